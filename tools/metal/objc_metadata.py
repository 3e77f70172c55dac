"""Read what the compiler left in a Mach-O file: protocols, selectors, imported symbols, SDK version.

Apple's clang writes every protocol that a program mentions into it, each selector with the full encoding of
its types. So programs that others built against Apple's SDK tell what the SDK declares. Only what 64-bit arm
images need is understood here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ARM64 = 0x0100000C
FAT, FAT64, THIN = 0xCAFEBABE, 0xCAFEBABF, 0xFEEDFACF
LC_SYMTAB, LC_SEGMENT, LC_BUILD_VERSION, LC_CHAINED_FIXUPS = 0x2, 0x19, 0x32, 0x80000034
PROTOCOL_WITH_EXTENDED_TYPES = 80  # bytes of protocol_t from which on the extended types are there
RELATIVE_METHODS, DIRECT_SELECTORS = 0x80000000, 0x40000000
EXTERNAL, DEFINITION, HIDDEN, DEBUGGING = 0x01, 0x0E, 0x10, 0xE0  # parts of a symbol's kind
ANY_IMAGE = 0xFE  # the library of a symbol that is looked up in all of them
SELECTOR_STUB = "_objc_msgSend$"


@dataclass
class Protocol:
    """Methods of a protocol with their encodings, required and optional ones together."""

    name: str
    adopts: list[str] = field(default_factory=list)
    instance: dict[str, str] = field(default_factory=dict)
    static: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.instance) + len(self.static)


@dataclass(frozen=True)
class Segment:
    """A range of addresses and where the file holds it."""

    address: int
    size: int
    offset: int


def arm64_slice(data: bytes) -> bytes:
    """Return the arm64 image of a file that may hold several."""
    magic, count = struct.unpack_from(">II", data)
    if magic not in (FAT, FAT64):
        return data
    layout, step = (">IIQQ", 32) if magic == FAT64 else (">IIII", 20)
    for index in range(count):
        processor, _, offset, size = struct.unpack_from(layout, data, 8 + index * step)
        if processor == ARM64:
            return data[offset : offset + size]
    raise ValueError("no arm64 image in the file")


class Image:
    """One Mach-O file: a library or bundle, or an object (for selectors and symbols only)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = arm64_slice(path.read_bytes())
        self.segments: list[Segment] = []
        self.sections: dict[str, tuple[int, int, int]] = {}  # name: (address, size, file offset)
        self.base = 0
        self.is_chained = False
        self.sdk = self.oldest_system = (0, 0)
        self.symbol_table = (0, 0, 0)
        magic, _, _, _, count = struct.unpack_from("<5I", self.data)
        if magic != THIN:
            raise ValueError(f"{path}: not a 64-bit Mach-O file")
        offset = 32
        for _ in range(count):
            command, size = struct.unpack_from("<II", self.data, offset)
            self._load(command, offset)
            offset += size

    def _load(self, command: int, offset: int) -> None:
        if command == LC_SEGMENT:
            name, address, size, start, _, _, _, sections, _ = struct.unpack_from(
                "<16s4Q4I", self.data, offset + 8
            )
            self.segments.append(Segment(address, size, start))
            if name.rstrip(b"\0") == b"__TEXT":
                self.base = address
            for index in range(sections):
                section = struct.unpack_from("<16s16sQQI", self.data, offset + 72 + 80 * index)
                self.sections[section[0].rstrip(b"\0").decode()] = section[2:]
        elif command == LC_CHAINED_FIXUPS:
            self.is_chained = True
        elif command == LC_BUILD_VERSION:
            oldest, sdk = struct.unpack_from("<II", self.data, offset + 12)
            self.oldest_system, self.sdk = ((v >> 16, v >> 8 & 255) for v in (oldest, sdk))
        elif command == LC_SYMTAB:
            symbols, count, strings = struct.unpack_from("<III", self.data, offset + 8)
            self.symbol_table = (symbols, count, strings)

    def _offset(self, address: int) -> int:
        for segment in self.segments:
            if segment.address <= address < segment.address + segment.size:
                return address - segment.address + segment.offset
        raise ValueError(f"{self.path}: address {address:#x} is in no segment")

    def _unsigned(self, address: int) -> int:
        return int(struct.unpack_from("<I", self.data, self._offset(address))[0])

    def _signed(self, address: int) -> int:
        return int(struct.unpack_from("<i", self.data, self._offset(address))[0])

    def _pointer(self, address: int) -> int:
        raw = int(struct.unpack_from("<Q", self.data, self._offset(address))[0])
        if not self.is_chained or raw == 0:
            return raw
        if raw >> 63:  # bound to another image when loaded
            return 0
        target = raw & 0xFFFFFFFFF
        return target if target >= self.base else target + self.base

    def _text(self, address: int) -> str:
        if address == 0:
            return ""
        start = self._offset(address)
        return self.data[start : self.data.index(b"\0", start)].decode("latin1")

    def _methods(self, address: int) -> list[tuple[str, str]]:
        """Return (selector, encoding) of a method list."""
        if address == 0:
            return []
        flags, count = self._unsigned(address), self._unsigned(address + 4)
        step = flags & 0xFFFC
        found = []
        for index in range(count):
            entry = address + 8 + index * step
            if flags & RELATIVE_METHODS:
                name = entry + self._signed(entry)
                if not flags & DIRECT_SELECTORS:
                    name = self._pointer(name)
                found.append((self._text(name), self._text(entry + 4 + self._signed(entry + 4))))
            else:
                found.append((self._text(self._pointer(entry)), self._text(self._pointer(entry + 8))))
        return found

    def _adopted(self, address: int) -> list[str]:
        """Return the names in a protocol list, without those that another image defines."""
        if address == 0:
            return []
        (count,) = struct.unpack_from("<Q", self.data, self._offset(address))
        pointers = [self._pointer(address + 8 + 8 * index) for index in range(count)]
        return [self._text(self._pointer(pointer + 8)) for pointer in pointers if pointer]

    def protocols(self) -> dict[str, Protocol]:
        """Return the protocols in the image."""
        start, size, _ = self.sections.get("__objc_protolist", (0, 0, 0))
        found = {}
        for index in range(size // 8):
            address = self._pointer(start + 8 * index)
            protocol = Protocol(self._text(self._pointer(address + 8)))
            protocol.adopts = self._adopted(self._pointer(address + 16))
            is_extended = self._unsigned(address + 64) >= PROTOCOL_WITH_EXTENDED_TYPES
            extended = self._pointer(address + 72) if is_extended else 0
            position = 0
            # Required instance and class methods, then optional ones; the extended types are in the same
            # order.
            for group, list_at in enumerate((24, 32, 40, 48)):
                methods = protocol.static if group % 2 else protocol.instance
                for selector, encoding in self._methods(self._pointer(address + list_at)):
                    full = self._text(self._pointer(extended + 8 * position)) if extended else encoding
                    methods[selector] = full
                    position += 1
            found[protocol.name] = protocol
        return found

    def _symbols(self) -> Iterator[tuple[str, bool, int]]:
        """Yield (name, whether it is undefined, description) of the symbols that images share."""
        symbols, count, strings = self.symbol_table
        for index in range(count):
            name_at, kind, _, description = struct.unpack_from("<IBBH", self.data, symbols + 16 * index)
            if kind & EXTERNAL and not kind & (DEBUGGING | HIDDEN):
                start = strings + name_at
                name = self.data[start : self.data.index(b"\0", start)].decode()
                yield name, kind & DEFINITION == 0, description

    def imported(self) -> dict[str, bool]:
        """Return the undefined symbols, and whether each is to come from a library named in the image."""
        return {name: hint >> 8 != ANY_IMAGE for name, is_undefined, hint in self._symbols() if is_undefined}

    def exported(self) -> set[str]:
        """Return the symbols that other images can use."""
        return {name for name, is_undefined, _ in self._symbols() if not is_undefined}

    def selectors(self) -> set[str]:
        """Return the selectors that the image sends or names."""
        _, size, offset = self.sections.get("__objc_methname", (0, 0, 0))
        named = self.data[offset : offset + size].decode("latin1").split("\0")
        stubs = (s.removeprefix(SELECTOR_STUB) for s in self.imported() if s.startswith(SELECTOR_STUB))
        return {*named, *stubs} - {""}


def merge(images: list[Image]) -> dict[str, Protocol]:
    """Return the protocols of several images; of two with one name the larger."""
    merged: dict[str, Protocol] = {}
    for image in images:
        for name, protocol in image.protocols().items():
            if name not in merged or len(protocol) > len(merged[name]):
                merged[name] = protocol
    return merged
