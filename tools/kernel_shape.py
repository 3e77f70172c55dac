"""Read shaders/shape.h, and the pieces every declaration is made of: names, expressions, struct fields."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from collections.abc import Collection, Mapping

SLOT_TYPES = {"float": 4, "half": 2, "bfloat": 2, "act_t": 2, "uint": 4, "int": 4, "ushort": 2, "uint4": 16}
FIELD_TYPES = ("uint", "int", "float")

# Names that a keyword, a macro of a shim or the generated code already takes.
RESERVED_WORDS = """
    alignas alignof and asm auto bool break case catch char class concept const consteval constexpr
    constinit const_cast continue co_await co_return co_yield decltype default delete do double
    dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable
    namespace new noexcept not nullptr operator or private protected public register reinterpret_cast
    requires return short signed sizeof static static_assert static_cast struct switch template this
    throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while xor
    buffer constant device thread threadgroup kernel vertex fragment half bfloat uint ushort uchar ulong
    act_t group tid lane simd simdgroups args consts info launch main
"""
RESERVED = frozenset(RESERVED_WORDS.split())

STRUCT_LINE = re.compile(r"struct (\w+) \{$")
FIELD_LINE = re.compile(r"    (\w+) (\w+)(?:\[([^\]]+)\])?;$")
ACT_LINE = re.compile(r"using act_t = (half|bfloat);$")
CONSTANT_LINE = re.compile(r"constant constexpr uint (\w+) = ([^;]+);$")


class TableError(Exception):
    """A declaration that is not in the accepted form; the text starts with file:line."""

    def __init__(self, path: pathlib.Path, line: int, why: str) -> None:
        super().__init__(f"{path}:{line}: {why}")


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a file, for messages. Lines count from 1."""

    path: pathlib.Path
    line: int

    def error(self, why: str) -> TableError:
        """Make the error that says what was expected at this place."""
        return TableError(self.path, self.line, why)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What shape.h declares: constants by value, structs by size in bytes, what act_t is ("": nothing)."""

    constants: Mapping[str, int]
    structs: Mapping[str, int]
    act: str


def strip_comments(text: str) -> list[str]:
    """Lines of text without comments and trailing blanks; every line keeps its number."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), text, flags=re.S)
    return [re.sub(r"//.*", "", line).rstrip() for line in text.split("\n")]


def check_name(place: Place, what: str, name: str, taken: Collection[str] = ()) -> None:
    """Refuses names that C++, Metal or the generated code could not use."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or "__" in name:
        raise place.error(f"{what} {name}: expected a name of letters, digits and single underscores")
    if name in RESERVED or name in SLOT_TYPES:
        raise place.error(f"{what} {name}: this is a word of C++, of Metal or of the generated code")
    if name in taken:
        raise place.error(f"{what} {name}: there is another one of this name")


# Expressions


def parse_expression(place: Place, what: str, text: str) -> ast.expr:
    """Reads an integer expression that C and Python agree on: names, integers, + - * / % ( ) and calls."""
    wrong = place.error(
        f"{what}: '{text.strip()}'; expected names, integers, + - * / ( ), in a grid also max(a, b)"
    )
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise wrong from None
    allowed = (ast.BinOp, ast.Name, ast.Load, ast.Call, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Mod)
    for part in ast.walk(node):
        if not isinstance(part, allowed) and not (isinstance(part, ast.Constant) and type(part.value) is int):
            raise wrong
    return node


def check_host_expression(
    place: Place, what: str, node: ast.expr, names: Mapping[str, str], shape: Shape
) -> None:
    """Refuses what the host cannot compute: it knows args fields and consts (names) and shape.h."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Call, ast.Mod)):
            raise place.error(f"{what}: only + - * / ( ) can be used here")
        if isinstance(part, ast.Name):
            if names.get(part.id) in ("int", "float"):
                raise place.error(f"{what}: {part.id} is {names[part.id]}; sizes are made of uint fields")
            if part.id not in names and part.id not in shape.constants:
                raise place.error(
                    f"{what}: unknown name {part.id}; expected {', '.join(names)} or a constant of shape.h"
                )


def split_top(text: str) -> list[str]:
    """Splits at the commas that are outside all parentheses."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def evaluate(place: Place, node: ast.expr, constants: Mapping[str, int]) -> int:
    """Value of a constant expression, as C computes it for unsigned numbers."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in constants:
            raise place.error(f"unknown name {node.id}; expected a constant declared above")
        return constants[node.id]
    if isinstance(node, ast.BinOp):
        a, b = evaluate(place, node.left, constants), evaluate(place, node.right, constants)
        if isinstance(node.op, (ast.Div, ast.Mod)) and b == 0:
            raise place.error("division by zero")
        value = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}.get(type(node.op))
        if value is None:
            value = a // b if isinstance(node.op, ast.Div) else a % b
        if not 0 <= value <= 0xFFFFFFFF:
            raise place.error(f"{ast.unparse(node)} is {value}, which is no uint")
        return value
    raise place.error("expected an integer expression of earlier constants")


# shape.h


def parse_fields(
    lines: list[str], place: Place, name: str, constants: Mapping[str, int] | None
) -> tuple[tuple[tuple[str, str, int], ...], int]:
    """Fields (type, name, elements) after the struct line at `place`, and the line number of its `};`.

    Fixed arrays are accepted when constants (for their length) are given.
    """
    fields: list[tuple[str, str, int]] = []
    for number in range(place.line + 1, len(lines) + 1):
        line, here = lines[number - 1], Place(place.path, number)
        if line == "};":
            if not fields:
                raise place.error(f"{name}: a struct needs at least one field")
            return tuple(fields), number
        if not line:
            continue
        match = FIELD_LINE.match(line)
        if not match or match[1] not in FIELD_TYPES or (match[3] and constants is None):
            arrays = "" if constants is None else " or uint name[N];"
            raise here.error(
                f"{name}: expected '    uint|int|float name;'{arrays}, one field a line: {line.strip()}"
            )
        check_name(here, f"field {name}.", match[2], {field for _, field, _ in fields})
        length = 1
        if match[3]:
            length = evaluate(here, parse_expression(here, name, match[3]), constants or {})
        fields.append((match[1], match[2], length))
    raise place.error(f"{name}: no line '}};' ends this struct")


def parse_shape(path: pathlib.Path) -> Shape:
    """Reads shape.h: constants, plain structs, the type act_t, nothing else."""
    lines = strip_comments(path.read_text(encoding="utf-8"))
    constants: dict[str, int] = {}
    structs: dict[str, int] = {}
    act = ""
    number = 0
    while number < len(lines):
        number += 1
        line, place = lines[number - 1], Place(path, number)
        if match := CONSTANT_LINE.match(line):
            check_name(place, "constant", match[1], constants)
            if match[1] != match[1].upper():
                raise place.error(f"constant {match[1]}: names of constants are ALL_CAPS")
            constants[match[1]] = evaluate(place, parse_expression(place, match[1], match[2]), constants)
        elif match := STRUCT_LINE.match(line):
            check_name(place, "struct", match[1], structs)
            fields, number = parse_fields(lines, place, match[1], constants)
            structs[match[1]] = sum(4 * length for _, _, length in fields)
        elif match := ACT_LINE.match(line):
            if act:
                raise place.error("act_t: there is another one of this name")
            act = match[1]
        elif line and line != "#pragma once" and not re.match(r"static_assert\(.*\);$", line):
            raise place.error(
                "expected 'constant constexpr uint NAME = expression;', a struct "
                f"or 'using act_t = half|bfloat;': {line}"
            )
    return Shape(constants, structs, act)
