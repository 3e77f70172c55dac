"""Tokens, types and functions of a preprocessed Metal source: as much of the language as the rules need."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v]+|\n)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<sign>::|->|\+\+|--|<<=?|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\[\[|.)""",
    re.X,
)
LINE_MARK = re.compile(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"')
CLOSING = {"(": ")", "[": "]", "[[": "]]", "{": "}"}
SPACES = frozenset(("device", "threadgroup", "constant", "thread"))
QUALIFIERS = frozenset(("const", "volatile"))
SPECIFIERS = frozenset(("constexpr", "static", "inline", "typename", "struct", "explicit", "friend"))
SCALARS = (
    "bool",
    "char",
    "uchar",
    "short",
    "ushort",
    "int",
    "uint",
    "long",
    "ulong",
    "half",
    "bfloat",
    "float",
)
BUILTIN_TYPES = frozenset(
    ["void", "auto", "unsigned", "signed", "double", "size_t", "atomic_int", "atomic_uint"]
    + [f"{scalar}{width}" for scalar in SCALARS for width in ("", 2, 3, 4)]
    + [f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)
LIBRARY_TEMPLATES = frozenset(
    ("atomic", "cooperative_tensor", "dextents", "extents", "simdgroup_matrix", "tensor", "vec")
)


@dataclasses.dataclass(frozen=True)
class Token:
    """One token, and where a person finds it. `at` is its place in the preprocessed text."""

    text: str
    kind: str
    at: int
    file: str
    line: int


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """Something that Apple's compiler would refuse, or must not be given."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def finding(token: Token, message: str) -> Finding:
    """Make a finding at a token."""
    return Finding(token.file, token.line, message)


@dataclasses.dataclass(frozen=True)
class Function:
    """A function with a body. Places are indices of tokens; a range is [first, last)."""

    name: str
    name_at: int
    owner: str  # the struct that it is a member of, or ""
    head: range
    parameters: range
    trailer: range  # after the parameters: const, an address space
    body: range
    kernel: bool


def tokens_of(text: str, ours: frozenset[str]) -> list[Token]:
    """The tokens of the files named, from text that a preprocessor made."""
    result: list[Token] = []
    file, line, at = "", 1, 0
    while at < len(text):
        if text[at] == "#" and (at == 0 or text[at - 1] == "\n"):
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            mark = LINE_MARK.match(text, at)
            if mark:
                file, line = mark[2], int(mark[1])
            else:
                line += 1
            at = end + 1
            continue
        match = TOKEN.match(text, at)
        assert match is not None
        if match.lastgroup != "space" and file in ours:
            result.append(Token(match[0], str(match.lastgroup), at, file, line))
        line += match[0].count("\n")
        at = match.end()
    return result


class Source:
    """The project's part of a preprocessed source."""

    def __init__(self, text: str, ours: frozenset[str]) -> None:
        self.text = text
        self.tokens = tokens_of(text, ours)
        self.words = [token.text for token in self.tokens]
        self.templates = set(LIBRARY_TEMPLATES)
        self.types = self._types()
        self.globals: list[Token] = []  # names that the shaders declare outside of functions and structs
        self.variables: list[range] = []  # declarations there, and of static members
        self.functions = list(self._functions())

    def closing(self, index: int) -> int:
        """The index of the bracket that closes the one at `index`."""
        if self.words[index] == "[[":
            depth = 0
            for place in range(index, len(self.words)):
                depth += {"[[": 2, "[": 1, "]": -1}.get(self.words[place], 0)
                if depth == 0:
                    return place
            return len(self.words) - 1
        opened, closed = self.words[index], CLOSING[self.words[index]]
        depth = 0
        for place in range(index, len(self.words)):
            depth += (self.words[place] == opened) - (self.words[place] == closed)
            if depth == 0:
                return place
        return len(self.words) - 1

    def closing_angle(self, index: int) -> int:
        """The index of the > that closes the template list at `index`."""
        depth, place = 0, index
        while place < len(self.words):
            word = self.words[place]
            if word in ("(", "["):
                place = self.closing(place)
            depth += (word == "<") - (word == ">")
            if depth == 0:
                return place
            place += 1
        return len(self.words) - 1

    def opening_angle(self, index: int) -> int | None:
        """The index of the < of a template list that ends at `index`, if it is one."""
        depth = 0
        for place in range(index, max(index - 60, -1), -1):
            word = self.words[place]
            if word in (";", "{", "}"):
                return None
            depth += (word == ">") - (word == "<")
            if depth == 0:
                return place
        return None

    def is_type_at(self, index: int) -> int | None:
        """The index where the type that ends at `index` begins, or None if no type ends there."""
        first: int | None = index
        if self.words[index] == ">":
            first = self.opening_angle(index)
            if first is None or first == 0:
                return None
            first -= 1
            if self.words[first] not in self.templates:
                return None
        elif self.words[index] not in self.types and not self._dependent(index):
            return None
        assert first is not None
        while first >= 2 and self.words[first - 1] == "::":
            first -= 2
            if self.words[first] == ">":
                opening = self.opening_angle(first)
                if opening is None:
                    return None
                first = opening - 1
        return first

    def _dependent(self, index: int) -> bool:
        """Whether the name at `index` ends `typename A::b`."""
        place = index
        while place >= 2 and self.words[place - 1] == "::":
            place -= 2
        return place >= 1 and place != index and self.words[place - 1] == "typename"

    def _types(self) -> set[str]:
        """Names of types that the source declares or is given as template parameters."""
        types = set(BUILTIN_TYPES)
        for index, word in enumerate(self.words[:-2]):
            if (
                word in ("struct", "class", "union", "enum", "using")
                and self.tokens[index + 1].kind == "name"
            ):
                name = self.words[index + 1]
                if word == "using" and self.words[index + 2] != "=":
                    continue
                types.add(name)
                if index > 0 and self.words[index - 1] == ">" and word != "class":
                    self.templates.add(name)
        return types

    def skip_attributes(self, index: int, last: int) -> int:
        """The first index from `index` on that is in no [[attribute]], alignas() or template<> list."""
        while index < last:
            if self.words[index] == "[[":
                index = self.closing(index) + 1
            elif self.words[index] == "alignas":
                index = self.closing(index + 1) + 1
            elif self.words[index] == "template" and self.words[index + 1] == "<":
                index = self.closing_angle(index + 1) + 1
            else:
                return index
        return last

    def _functions(self) -> Iterator[Function]:
        """Every function with a body, and meanwhile the names at global scope."""
        index, head = 0, 0
        scopes: list[tuple[int, str]] = []  # (end of the scope, struct's name or "")
        while index < len(self.words):
            if scopes and index == scopes[-1][0]:
                scopes.pop()
                index, head = index + 1, index + 1
                continue
            word = self.words[index]
            if word == ";":
                self._remember_variable(head, index, bool(scopes))
                head = index + 1
            elif word == "{":
                end = self.closing(index)
                function = self._function(range(head, index), end, scopes[-1][1] if scopes else "")
                if function is not None:
                    yield function
                    if not function.owner:
                        self.globals.append(self.tokens[function.name_at])
                    index, head = end, end + 1
                elif self.words[self.skip_attributes(head, index)] in (
                    "struct",
                    "class",
                    "union",
                    "namespace",
                ):
                    scopes.append((end, self.words[index - 1]))
                    if len(scopes) == 1:
                        self.globals.append(self.tokens[index - 1])
                else:
                    index = end  # an initialiser
            elif word in ("(", "[", "[["):
                index = self.closing(index)
            index += 1

    def _remember_variable(self, head: int, end: int, member: bool) -> None:
        first = self.skip_attributes(head, end)
        words = self.words[first:end]
        if not words or words[0] in ("template", "using", "typedef", "struct", "static_assert"):
            return
        if member and "static" not in words:
            return
        self.variables.append(range(first, end))
        for index in range(first, end if not member else first):
            if self.words[index + 1] in ("=", "[", ";") and self.tokens[index].kind == "name":
                self.globals.append(self.tokens[index])
                return

    def _function(self, head: range, end: int, owner: str) -> Function | None:
        """The function that `head {` begins, or None."""
        first = self.skip_attributes(head.start, head.stop)
        if first >= head.stop or self.words[first] in ("namespace", "struct", "class", "union", "enum"):
            return None
        index = first
        while index < head.stop and self.words[index] != "(":
            if self.words[index] in ("=", ";"):
                return None
            index = self.closing(index) + 1 if self.words[index] in ("[[", "[") else index + 1
        if index >= head.stop or index == head.start:
            return None
        name = index - 1
        if self.words[name] == ">":
            opening = self.opening_angle(name)
            name = name if opening is None else opening - 1
        close = self.closing(index)
        return Function(
            name=self.words[name],
            name_at=name,
            owner=owner,
            head=head,
            parameters=range(index + 1, close),
            trailer=range(close + 1, head.stop),
            body=range(head.stop + 1, end),
            kernel="kernel" in self.words[head.start : name],
        )
