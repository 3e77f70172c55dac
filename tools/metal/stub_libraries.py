"""Write text stubs of the frameworks into build/metal/stubs: names that a Mac exports, for the linker.

They hold only names that are known to exist: classes that metal-cpp names, constants and functions of
pyobjc's tables, and symbols of the Objective-C runtime that programs built by Apple's compiler import. An
import of anything else fails to link.
"""

from __future__ import annotations

from pathlib import Path

import metal_cpp
import objc_header
import pyobjc_tables
import wheels
import zig
from objc_metadata import Image

STUBS = zig.BUILD / "stubs"
STUB = """\
--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '/System/Library/Frameworks/{name}.framework/Versions/{version}/{name}'
exports:
  - targets: [ arm64-macos ]
    symbols: [ {symbols} ]
    objc-classes: [ {classes} ]
...
"""
# What no program above happens to import: two functions of the ARC runtime that clang's specification of ARC
# names, and CoreFoundation's empty array, which clang uses for @[].
IMPLICIT = {"_objc_autoreleaseReturnValue", "_objc_retainAutorelease", "___NSArray0__"}
LITERALS = {"___CFConstantStringClassReference"}
GENERATION = 15  # the oldest system that Lily runs on


def write(name: str, version: str, symbols: set[str], classes: set[str]) -> None:
    """Write the stub of one framework."""
    path = STUBS / f"{name}.framework" / f"{name}.tbd"
    text = STUB.format(
        name=name, version=version, symbols=", ".join(sorted(symbols)), classes=", ".join(sorted(classes))
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def tables(wheel: wheels.Wheel) -> pyobjc_tables.Tables:
    """Return pyobjc's tables in a wheel."""
    (path,) = wheels.unpack(wheel).rglob("_metadata.py")
    return pyobjc_tables.read(path)


def exports(known: pyobjc_tables.Tables) -> set[str]:
    """Return the symbols of constants and functions."""
    return {f"_{name}" for name in known.constants | known.functions.keys()}


def generate() -> Path:
    """Write all stubs and return their folder."""
    programs = (wheels.PYOBJC_METAL_15, wheels.PYOBJC_COCOA_15, *wheels.PROGRAMS)
    imported = {s for wheel in programs for path in wheels.images(wheel) for s in Image(path).imported()}
    runtime = {s for s in imported if s.startswith(("_objc_", "__objc_"))}
    if "_objc_msgSend" not in runtime:
        raise SystemExit("no program imports the Objective-C runtime: their symbols cannot be read")
    folder = wheels.metal_cpp(objc_header.GENERATIONS[GENERATION])
    declared = metal_cpp.read(folder / "Metal").interfaces.values()
    write("Metal", "A", exports(tables(wheels.PYOBJC_METAL_15)), {i.name for i in declared if i.is_class})
    # Foundation re-exports the runtime and CoreFoundation.
    classes = {s.removeprefix("_OBJC_CLASS_$_") for s in imported if s.startswith("_OBJC_CLASS_$_NS")}
    declared = metal_cpp.read(folder / "Foundation").interfaces.values()
    classes |= {i.name for i in declared if i.is_class}
    symbols = exports(tables(wheels.PYOBJC_COCOA_15)) | runtime | IMPLICIT | LITERALS
    write("Foundation", "C", symbols, classes)
    write("CoreGraphics", "A", set(), set())  # linked for what its presence does
    return STUBS


if __name__ == "__main__":
    print(generate())
