"""Read Apple's metal-cpp headers into declarations: enums, structs, aliases, constants, classes, methods.

metal-cpp wraps each Objective-C method in an inline function whose body names the selector, so a declaration
is put together from three places: the class, the inline function, and the table of selectors in
MTLHeaderBridge.hpp. Types stay C++ text here; objc_types.py translates them. The reader knows the layout of
these headers, not C++.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = {"MTL": "MTL", "MTL4": "MTL4", "NS": "NS"}

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
NAMESPACE = re.compile(r"^namespace (MTL4?|NS)\s*\{(.*?)^\}(?!\s*(?:;|_MTL_PACKED|_NS_PACKED))", re.S | re.M)
SELECTOR = re.compile(r'_(?:MTL|NS)_PRIVATE_DEF_SEL\(\s*(\w+)\s*,\s*"([^"]+)"\s*\)')
CLASS_OBJECT = re.compile(r"_(?:MTL|NS)_PRIVATE_DEF_CLS\(\s*(\w+)\s*\)")
ENUM = re.compile(r"_(?:MTL|NS)_(ENUM|OPTIONS)\(\s*([\w:]+)\s*,\s*(\w+)\s*\)\s*\{(.*?)\}", re.S)
CLASS = re.compile(r"\nclass (\w+)\s*:\s*public\s+(?:NS::)?(Referencing|Copying|SecureCoding)<([^>]*)>")
STRUCT = re.compile(r"\nstruct (\w+)\s*\{(.*?)\n\}\s*(?:_MTL_PACKED|_NS_PACKED)?\s*;", re.S)
ALIAS = re.compile(r"using (\w+)\s*=\s*(void \(\^\)\([^)]*\)|(?:class\s+)?[\w:]+\s*\*?);")
CONSTANT = re.compile(r"_(?:MTL|NS)_CONST\(\s*([\w:]+)\s*,\s*(\w+)\s*\)")
INLINE = re.compile(
    r"_(?:MTL|NS)_INLINE\s+(?P<result>[\w:*\s]+?)\s*(?P<space>MTL4?|NS)::(?P<owner>\w+)::(?P<name>\w+)"
    r"\((?P<parameters>(?:[^()]|\([^()]*\))*)\)\s*(?:const)?\s*\n\{(?P<body>.*?)\n\}",
    re.S,
)
SEND = re.compile(
    r"sendMessage(?:Safe)?<.+?>\(\s*(?P<receiver>this|_(?:MTL|NS)_PRIVATE_CLS\(\w+\))\s*,"
    r"\s*_(?:MTL|NS)_PRIVATE_SEL\((?P<accessor>\w+)\)",
    re.S,
)
SENDING = re.compile(r"sendMessage(?:Safe)?\s*<")
FIELD = re.compile(r"^\s*([\w:]+)\s+(\w+(?:\[\d+\])?)\s*;", re.M)


@dataclass(frozen=True)
class Enumeration:
    """An enum or option set; a value is C++ text, or empty for one more than the last."""

    name: str
    space: str
    underlying: str
    is_options: bool
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Structure:
    """A plain struct; fields are (C++ type, declarator)."""

    name: str
    space: str
    fields: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Method:
    """A message; parameters are C++ text, without default names."""

    selector: str
    is_static: bool
    space: str
    result: str
    parameters: tuple[str, ...]


@dataclass
class Interface:
    """A class, or a protocol where the library exports no class object."""

    name: str
    space: str
    base: str
    is_class: bool
    is_copying: bool
    methods: list[Method] = field(default_factory=list)


@dataclass
class Declarations:
    """Everything that one generation of the headers declares."""

    enums: dict[str, Enumeration] = field(default_factory=dict)
    structs: dict[str, Structure] = field(default_factory=dict)
    aliases: dict[str, tuple[str, str]] = field(default_factory=dict)  # name: (namespace, C++ type)
    constants: dict[str, tuple[str, str]] = field(default_factory=dict)
    interfaces: dict[str, Interface] = field(default_factory=dict)
    unread: int = 0  # messages in inline functions of a form that the reader does not know


def split_list(text: str) -> list[str]:
    """Split at commas outside brackets; drops empty items."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return [part for part in [*parts, current.strip()] if part]


def read_members(space: str, body: str) -> tuple[tuple[str, str], ...]:
    """Return the members of an enum with their full names; names inside values get the prefix too."""
    prefix = PREFIX[space]
    members = []
    for item in filter(str.strip, body.split(",")):
        name, _, value = (part.strip() for part in item.partition("="))
        value = value.replace("NS::UIntegerMax", "NSUIntegerMax")
        value = re.sub(r"(?<![\w:])(?!NS|UINT|INT)([A-Z]\w+)", prefix + r"\1", value)
        members.append((prefix + name, value))
    return tuple(members)


def read_namespace(space: str, body: str, classes: set[str], out: Declarations) -> None:
    """Read what a namespace declares, except methods."""
    prefix = PREFIX[space]
    for kind, underlying, name, members in ENUM.findall(body):
        out.enums[prefix + name] = Enumeration(
            prefix + name, space, underlying, kind == "OPTIONS", read_members(space, members)
        )
    for name, kind, arguments in CLASS.findall(body):
        base = [*split_list(arguments)[1:], ""][0]
        full = prefix + name
        out.interfaces.setdefault(full, Interface(full, space, base, full in classes, kind != "Referencing"))
    for name, members in STRUCT.findall(body):
        fields = FIELD.findall(members)
        if len(fields) > 1:  # the other view of a union
            fields = [f for f in fields if not f[1].startswith("elements[")]
        out.structs[prefix + name] = Structure(prefix + name, space, tuple(fields))
    for name, target in ALIAS.findall(body):
        out.aliases[prefix + name] = (space, target.strip())
    for target, name in CONSTANT.findall(body):
        out.constants[prefix + name] = (space, target)


def read_methods(text: str, selectors: dict[str, str], out: Declarations) -> None:
    """Read the inline functions of a file into the methods of their classes."""
    sent = 0
    for match in INLINE.finditer(text):
        owner = PREFIX[match["space"]] + match["owner"]
        send = SEND.search(match["body"])
        interface = out.interfaces.get(owner)
        if send is None or interface is None:
            continue  # alloc(), init(), makers of structs, and overloads that take std::function
        selector = selectors.get(send["accessor"])
        parameters = tuple(split_list(match["parameters"]))
        if selector is None or selector.count(":") != len(parameters):
            continue
        sent += 1
        is_static = send["receiver"] != "this"
        if any(m.selector == selector and m.is_static == is_static for m in interface.methods):
            continue
        interface.methods.append(
            Method(selector, is_static, match["space"], match["result"].strip(), parameters)
        )
    out.unread += len(SENDING.findall(text)) - sent


def read(folder: Path) -> Declarations:
    """Read metal_cpp/Metal or metal_cpp/Foundation."""
    texts = [COMMENT.sub("", path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.hpp"))]
    everything = "\n".join(texts)
    selectors = dict(SELECTOR.findall(everything))
    classes = set(CLASS_OBJECT.findall(everything))
    out = Declarations()
    for text in texts:
        for space, body in NAMESPACE.findall(text):
            read_namespace(space, body, classes, out)
    for text in texts:
        read_methods(text, selectors, out)
    if not selectors or not out.enums or not any(i.methods for i in out.interfaces.values()):
        raise SystemExit(f"{folder}: not the layout of metal-cpp that this reader knows")
    return out
