"""Translate the C++ types of metal-cpp into Objective-C."""

from __future__ import annotations

import re

from metal_cpp import PREFIX, Declarations, split_list

SAME = (
    *(
        "void",
        "char",
        "float",
        "double",
        "int",
        "size_t",
        "intptr_t",
        "uintptr_t",
        "CGSize",
        "CFTimeInterval",
    ),
    *("IOSurfaceRef", "dispatch_data_t", "dispatch_queue_t", "unsigned long long"),
)
PLAIN = {
    "NS::UInteger": "NSUInteger",
    "NS::Integer": "NSInteger",
    "NS::Range": "NSRange",
    "NS::TimeInterval": "NSTimeInterval",
    "NS::ErrorDomain": "NSErrorDomain",
    "NS::ErrorUserInfoKey": "NSErrorUserInfoKey",
    "UInteger": "NSUInteger",
    "Integer": "NSInteger",
    "Range": "NSRange",
    "TimeInterval": "NSTimeInterval",
    "StringEncoding": "NSStringEncoding",
    "bool": "BOOL",
    "kern_return_t": "int",
    "mach_port_t": "uint32_t",
    "task_id_token_t": "uint32_t",
} | {name: name for name in SAME}
FIXED_WIDTH = re.compile(r"(?:std::)?(u?int(?:8|16|32|64|ptr)_t)")
BLOCK = re.compile(r"(?:const\s+)?void \(\^(\w*)\)\((.*)\)", re.S)
HANDLER = re.compile(r"const (MTL4?::\w*(?:Handler|Block)\w*)\b")
WORD = re.compile(r"[\w:]+|\*|\[\]|&")


class UnknownTypeError(Exception):
    """A type that has no translation."""

    def __init__(self, text: str) -> None:
        super().__init__(f"no Objective-C type for {text}")


class Types:
    """Translates types in the light of what the headers declare."""

    def __init__(self, declarations: Declarations) -> None:
        self.declarations = declarations
        self.foundation: set[str] = set()  # classes of Foundation that were mentioned

    def full_name(self, name: str, space: str) -> str:
        """Objective-C name of a qualified or unqualified C++ name."""
        head, _, tail = name.rpartition("::")
        if head:
            return PREFIX.get(head, head) + tail
        known = self.declarations
        for prefix in dict.fromkeys((PREFIX[space], "MTL", "NS")):
            full = prefix + name
            if any(full in group for group in (known.interfaces, known.enums, known.structs, known.aliases)):
                return full
        return name

    def object_type(self, full: str) -> str | None:
        """How a pointer to an object of this class or protocol is written, None for what is no object."""
        if full in ("NSObject", "id", "_Class", "_Object", "_ObjectType"):
            return "id"
        interface = self.declarations.interfaces.get(full)
        if interface is not None and not interface.is_class:
            return f"id<{full}>"
        if interface is None and full.startswith("NS"):
            self.foundation.add(full)
        if interface is not None or full.startswith("NS"):
            return f"{full}*"
        return None

    def value_type(self, full: str) -> str | None:
        """How an enum, struct or alias is written, None for anything else."""
        known = self.declarations
        if full in known.enums or full in known.structs or full in known.aliases:
            return full
        return None

    def translate(self, text: str, space: str) -> str:
        """Return a type in Objective-C; arrays become pointers."""
        words = [w for w in WORD.findall(text) if w not in ("class", "struct")]
        if "&" in words:
            raise UnknownTypeError(text)
        stars = sum(word in ("*", "[]") for word in words)
        names = [w for w in words if w not in ("const", "*", "[]")]
        base = " ".join(names)
        is_const = "const" in words[: words.index(names[-1])] if names else False
        fixed = FIXED_WIDTH.fullmatch(base)
        plain = PLAIN.get(base) or (fixed[1] if fixed else None)
        if plain is None:
            full = self.full_name(base, space)
            plain = self.value_type(full)
            written = None if plain else self.object_type(full)
            if written is not None:
                if stars == 0 and full != "id":
                    raise UnknownTypeError(text)
                return self._object_pointer(written, is_const, stars - (base != "id"))
            if plain is None:
                raise UnknownTypeError(text)
            if plain in self.declarations.aliases:
                is_const = False  # says only that the pointer itself does not change
        return ("const " if is_const and stars else "") + plain + "*" * stars

    @staticmethod
    def _object_pointer(written: str, is_const: bool, depth: int) -> str:
        if depth <= 0:
            return written
        if written == "NSError*":  # the one pointer to an object that is an output
            return "NSError**"
        # An array of objects: each may be nil, the array may not.
        const = "const " if is_const else ""
        return f"{const}{written} _Nullable{'*' * (depth - 1)}* _Nonnull"

    def block(self, text: str, space: str, name: str = "") -> str:
        """Return a block type in Objective-C."""
        match = BLOCK.fullmatch(text)
        if match is None:
            raise UnknownTypeError(text)
        inner = [self.translate(self._without_name(part), space) for part in split_list(match[2])]
        return f"void (^{name})({', '.join(inner)})"

    @staticmethod
    def _without_name(parameter: str) -> str:
        named = re.fullmatch(r"(.*[\s*])([a-z]\w*)", parameter.strip(), re.S)
        is_type = named is None or re.fullmatch(r"(const|class|struct|\s)*", named[1]) is not None
        return parameter if is_type or named is None else named[1]

    def parameter(self, text: str, space: str) -> tuple[str, str]:
        """Return (type, name) of a parameter."""
        block = BLOCK.fullmatch(text)
        if block:
            return self.block(text, space), block[1] or "block"
        named = re.fullmatch(r"(.*?)(\w+)((?:\[\])*)", HANDLER.sub(r"\1", text), re.S)
        if named is None:
            raise UnknownTypeError(text)
        return self.translate(named[1].strip() + named[3], space), named[2]
