"""Read the kernel declarations of shaders/*.metal.

One strict form is accepted; anything else stops with file:line and what was expected. This is no
parser of the Metal language and must not become one: a kernel that does not fit changes its form.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping

from kernel_shape import (
    SLOT_TYPES,
    STRUCT_LINE,
    Place,
    Shape,
    TableError,
    check_host_expression,
    check_name,
    evaluate,
    parse_expression,
    parse_fields,
    parse_shape,
    split_top,
    strip_comments,
)

MAX_SLOTS, MAX_CONSTS, MAX_FIELDS, MAX_SIMDS = 16, 4, 24, 32  # 24 fields are kMaxArgBytes
MIRRORED_MAX = 0xFFFFFFFF
UNLAUNCHED = ("reference", "bench")  # `used:` words of kernels that the product never launches

SLOT_FORM = "device [const] TYPE* name [[buffer(n)]],  // [shape]"
KERNEL_LINE = re.compile(r"KERNEL\((\w+), (\d+)\)\($")
SLOT_LINE = re.compile(
    r"    (device|constant) (const )?(\w+)([*&]) +(\w+) +\[\[buffer\((\d+)\)\]\],"
    r"(?: +// ?(\[[^\]]*\])?(.*))?$"
)
TAG_LINE = re.compile(r"//   (\w+): (.*)$")
CONST_FORM = re.compile(r"(\w+) (<=|=) (\w+)$")
SHARED_LINE = re.compile(r"    SHARED \w+ \w+(\[[^\[\]]+\])+;$")


@dataclasses.dataclass(frozen=True)
class Args:
    """An args struct: (type, name) of each 4-byte field."""

    name: str
    fields: tuple[tuple[str, str], ...]
    place: Place


@dataclasses.dataclass(frozen=True)
class Slot:
    """A buffer parameter. `count` is the product of the shape as a Python expression tree."""

    name: str
    type: str
    written: bool
    shape: str
    note: str
    count: ast.expr


@dataclasses.dataclass(frozen=True)
class Const:
    """A compile-time parameter: it mirrors an args field, or the plan chooses 1 ... max."""

    name: str
    mirrors: str | None
    max: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One KERNEL declaration."""

    name: str
    simds: int
    place: Place
    doc: str
    grid: tuple[ast.expr, ...]
    grid_text: str
    used: tuple[str, ...]
    slots: tuple[Slot, ...]
    args: Args
    consts: tuple[Const, ...]
    bytes: Mapping[str, ast.expr]
    reads: Mapping[str, ast.expr]

    @property
    def where(self) -> str:
        """File and line, as the host shows them."""
        return f"{self.place.path.name}:{self.place.line}"

    @property
    def launched(self) -> bool:
        """Whether the product launches this kernel."""
        return self.used[0] not in UNLAUNCHED


# shaders/*.metal


class ShaderFile:
    """The text of one .metal file with the parts that kernels refer to."""

    def __init__(self, path: pathlib.Path, shape: Shape) -> None:
        self.path = path
        self.shape = shape
        self.text = path.read_text(encoding="utf-8").split("\n")
        self.code = strip_comments("\n".join(self.text))
        self.structs: dict[str, Args] = {}
        self.in_kernel: set[int] = set()  # line numbers of kernel bodies

    def kernels(self) -> Iterator[Kernel]:
        """Every kernel, in the order of the file."""
        self._read_structs()
        unused = set(self.structs)
        for number, line in enumerate(self.code, 1):
            place = Place(self.path, number)
            if line.startswith("KERNEL"):
                kernel = self._kernel(place)
                unused.discard(kernel.args.name)
                yield kernel
            elif re.search(r"\bKERNEL\b", line) or re.search(r"\bkernel\s+void\b|\[\[kernel", line):
                raise place.error(
                    "a kernel is declared by 'KERNEL(name, simdgroups)(' at the start of a line"
                )
        for number, line in enumerate(self.code, 1):
            if number not in self.in_kernel and re.search(r"\bSHARED\b", line):
                raise Place(self.path, number).error("SHARED is only for the body of a kernel")
        for name in sorted(unused):
            raise self.structs[name].place.error(f"{name}: no kernel of this file takes it")

    def _read_structs(self) -> None:
        for number, line in enumerate(self.code, 1):
            place = Place(self.path, number)
            if not re.match(r"\s*struct\s+\w+_args\b", line):
                continue
            match = STRUCT_LINE.match(line)
            if not match:
                raise place.error(f"expected 'struct NAME_args {{' at the start of a line: {line.strip()}")
            name = match[1]
            check_name(place, "struct", name, self.structs)
            fields, _ = parse_fields(self.code, place, name, None)
            if len(fields) > MAX_FIELDS:
                raise place.error(f"{name}: {len(fields)} fields, at most {MAX_FIELDS} are possible")
            for _, field, _ in fields:
                if field in self.shape.constants or field == field.upper():
                    raise place.error(f"{name}.{field}: ALL_CAPS is for constants")
            self.structs[name] = Args(name, tuple((kind, field) for kind, field, _ in fields), place)

    def _kernel(self, place: Place) -> Kernel:
        match = KERNEL_LINE.match(self.code[place.line - 1])
        if not match:
            raise place.error("expected 'KERNEL(name, simdgroups)(' with nothing after it on the line")
        name, simds = match[1], int(match[2])
        check_name(place, "kernel", name)
        if not 1 <= simds <= MAX_SIMDS or simds & (simds - 1):
            raise place.error(f"{name}: {simds} simdgroups; expected a power of two from 1 to {MAX_SIMDS}")
        slots, args, end = self._parameters(place, name)
        template = self.code[place.line - 2] if self.code[place.line - 2].startswith("template") else None
        doc, tags = self._header(Place(self.path, place.line - (template is not None)), name)
        fields = {field: kind for kind, field in args.fields}
        consts = self._consts(tags, name, args)
        self._check_template(place, name, consts, template)
        names = fields | {const.name: "uint" for const in consts}
        parsed = tuple(self._count(here, name, slot, names) for here, slot in slots)
        grid_place, grid_text = tags["grid"][0]
        kernel = Kernel(
            name=name,
            simds=simds,
            place=place,
            doc=doc,
            grid=self._grid(grid_place, name, grid_text, names, simds),
            grid_text=grid_text,
            used=self._used(*tags["used"][0], name),
            slots=parsed,
            args=args,
            consts=consts,
            bytes=self._bytes("bytes", tags, name, parsed, names),
            reads=self._bytes("reads", tags, name, tuple(slot for slot in parsed if slot.written), names),
        )
        self._check_body(end, kernel)
        return kernel

    def _parameters(self, place: Place, name: str) -> tuple[list[tuple[Place, re.Match[str]]], Args, int]:
        """Slot lines, the args struct and the number of the line `    GRID)`."""
        slots: list[tuple[Place, re.Match[str]]] = []
        seen: set[str] = set()
        args: Args | None = None
        for number in range(place.line + 1, len(self.text) + 1):
            here, line = Place(self.path, number), self.text[number - 1].rstrip()
            if line == "    GRID)":
                if args is None:
                    raise here.error(
                        f"{name}: expected 'constant NAME_args& args [[buffer(n)]],' before GRID"
                    )
                if not slots:
                    raise here.error(f"{name}: a kernel needs at least one slot")
                return slots, args, number
            match = SLOT_LINE.match(line)
            if not match:
                raise here.error(
                    f"{name}: expected '    {SLOT_FORM}', the args struct or '    GRID)': {line.strip()}"
                )
            if args is not None:
                raise here.error(f"{name}: args is the last buffer; {match[5]} comes after it")
            if int(match[6]) != len(slots):
                raise here.error(f"{name}: {match[5]} is [[buffer({match[6]})]], expected {len(slots)}")
            if match[1] == "constant":
                args = self._args(here, name, match)
                continue
            self._check_slot(here, name, match, seen)
            seen.add(match[5])
            slots.append((here, match))
            if len(slots) > MAX_SLOTS:
                raise here.error(f"{name}: more than {MAX_SLOTS} slots")
        raise place.error(f"{name}: no line '    GRID)' ends the parameters")

    def _args(self, place: Place, name: str, match: re.Match[str]) -> Args:
        if match[2] or match[4] != "&" or match[5] != "args" or not match[3].endswith("_args"):
            raise place.error(
                f"{name}: constants go in one struct: 'constant NAME_args& args [[buffer(n)]],'"
            )
        if match[3] not in self.structs or self.structs[match[3]].place.line > place.line:
            raise place.error(f"{name}: struct {match[3]} is not declared above in this file")
        return self.structs[match[3]]

    def _check_slot(self, place: Place, name: str, match: re.Match[str], seen: set[str]) -> None:
        kind, slot = match[3], match[5]
        if match[4] != "*":
            raise place.error(f"{name}: {slot} must be a pointer: '{SLOT_FORM}'")
        if kind not in SLOT_TYPES and kind not in self.shape.structs:
            known = ", ".join([*SLOT_TYPES, *self.shape.structs])
            raise place.error(f"{name}: {slot} has the unknown type {kind}; expected one of {known}")
        if kind == "act_t" and not self.shape.act:
            raise place.error(f"{name}: {slot} is act_t; expected 'using act_t = half|bfloat;' in shape.h")
        check_name(place, f"slot {name}.", slot, seen)
        if slot == name:
            raise place.error(f"{name}: a slot cannot have the name of its kernel")
        if not match[7]:
            raise place.error(
                f"{name}: {slot} has no shape; expected '// [rows, ...]' at the end of the line"
            )

    def _count(self, place: Place, name: str, match: re.Match[str], names: Mapping[str, str]) -> Slot:
        what = f"{name}.{match[5]}"
        count: ast.expr | None = None
        for text in split_top(match[7][1:-1]):
            dim = parse_expression(place, what, text)
            check_host_expression(place, what, dim, names, self.shape)
            count = dim if count is None else ast.BinOp(count, ast.Mult(), dim)
        assert count is not None
        return Slot(match[5], match[3], not match[2], match[7], match[8].strip(" ,;:"), count)

    def _header(self, place: Place, name: str) -> tuple[str, dict[str, list[tuple[Place, str]]]]:
        """The comment that ends right above `place`: its sentence, and its tags with their lines."""
        first = place.line - 1
        while first > 0 and self.text[first - 1].startswith("//"):
            first -= 1
        comment = self.text[first : place.line - 1]
        start = f"// {name}: "
        if not comment or not comment[0].startswith(start):
            raise place.error(f"{name}: expected a comment right above that starts with '{start}'")
        doc = [comment[0][len(start) :].strip()]
        tags: dict[str, list[tuple[Place, str]]] = {}
        for number, line in enumerate(comment[1:], first + 2):
            here = Place(self.path, number)
            match = TAG_LINE.match(line)
            if not match:
                if tags:
                    raise here.error(f"{name}: expected '//   grid|const|bytes|reads|used: ...': {line}")
                doc.append(line[2:].strip())
            elif match[1] not in ("grid", "const", "bytes", "reads", "used"):
                raise here.error(
                    f"{name}: unknown line '{match[1]}:'; expected grid, const, bytes, reads or used"
                )
            elif match[1] in tags and match[1] not in ("bytes", "reads"):
                raise here.error(f"{name}: a second '{match[1]}:' line")
            else:
                tags.setdefault(match[1], []).append((here, match[2].strip()))
        for tag in ("grid", "used"):
            if tag not in tags:
                raise place.error(f"{name}: the comment above needs a line '//   {tag}: ...'")
        return " ".join(doc).strip(), tags

    def _consts(
        self, tags: Mapping[str, list[tuple[Place, str]]], name: str, args: Args
    ) -> tuple[Const, ...]:
        consts: dict[str, Const] = {}
        for place, text in tags.get("const", []):
            for part in split_top(text):
                match = CONST_FORM.match(part)
                if not match:
                    raise place.error(
                        f"{name}: expected 'NAME = field' or 'NAME <= maximum' in const: {part}"
                    )
                const, relation, value = match.groups()
                check_name(place, "const", const, consts)
                if const != const.upper() or const in self.shape.constants:
                    raise place.error(f"{name}: const {const} must be ALL_CAPS and no constant of shape.h")
                if relation == "=":
                    if ("uint", value) not in args.fields:
                        raise place.error(
                            f"{name}: const {const} mirrors {value}, which is no uint field of args"
                        )
                    if value in {other.mirrors for other in consts.values()}:
                        raise place.error(f"{name}: two consts mirror {value}")
                    consts[const] = Const(const, value, MIRRORED_MAX)
                else:
                    limit = evaluate(place, parse_expression(place, const, value), self.shape.constants)
                    if limit < 1:
                        raise place.error(f"{name}: const {const} has the maximum {limit}")
                    consts[const] = Const(const, None, limit)
            if len(consts) > MAX_CONSTS:
                raise place.error(f"{name}: {len(consts)} consts, at most {MAX_CONSTS} are possible")
        return tuple(consts.values())

    def _check_template(
        self, place: Place, name: str, consts: tuple[Const, ...], template: str | None
    ) -> None:
        expected = f"template <{', '.join(f'uint {const.name}' for const in consts)}>" if consts else None
        if expected and template != expected:
            raise place.error(f"{name}: expected the line '{expected}' right above KERNEL, as const: says")
        if template and not expected:
            raise place.error(f"{name}: a template line needs a const: line with the same names")

    def _grid(
        self, place: Place, name: str, text: str, names: Mapping[str, str], simds: int
    ) -> tuple[ast.expr, ...]:
        if not (text.startswith("(") and text.endswith(")")) or len(split_top(text[1:-1])) != 3:
            raise place.error(f"{name}: expected 'grid: (x, y, z)', found {text}")
        parts = tuple(parse_expression(place, f"{name} grid", part) for part in split_top(text[1:-1]))
        nodes = [node for tree in parts for node in ast.walk(tree)]
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Call):
                if not isinstance(node.func, ast.Name) or node.keywords:
                    raise place.error(f"{name} grid: expected a call like f(x)")
                given = ", ".join(map(ast.unparse, node.args))
                if node.func.id == "simdgroups" and given != str(simds):
                    raise place.error(f"{name} grid: simdgroups({given}), but KERNEL says {simds}")
            elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mod)):
                divisor = {part.id for part in ast.walk(node.right) if isinstance(part, ast.Name)}
                if any(field in divisor and field != field.upper() for field in names):
                    raise place.error(f"{name} grid: a field of args could be 0 and cannot be a divisor")
            elif isinstance(node, ast.Name) and id(node) not in called:
                known = names.get(node.id) in ("uint", "int") or node.id == node.id.upper()
                if not known:
                    raise place.error(
                        f"{name} grid: {node.id} is no integer field or const, and not ALL_CAPS"
                    )
        return parts

    def _used(self, place: Place, text: str, name: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(","))
        for word in words:
            if not re.fullmatch(r"[a-z]\w*", word):
                raise place.error(
                    f"{name}: expected 'used: function, function', 'reference' or 'bench': {text}"
                )
        if len(set(words)) != len(words) or (len(words) > 1 and set(words) & set(UNLAUNCHED)):
            raise place.error(
                f"{name}: used: names a function twice, or mixes reference or bench with functions"
            )
        return words

    def _bytes(
        self,
        tag: str,
        tags: Mapping[str, list[tuple[Place, str]]],
        name: str,
        slots: tuple[Slot, ...],
        names: Mapping[str, str],
    ) -> dict[str, ast.expr]:
        """The lines `bytes:`, of what a slot is for, or `reads:`, of what is read of a written slot."""
        result: dict[str, ast.expr] = {}
        for place, text in tags.get(tag, []):
            slot, equals, expression = text.partition(" = ")
            if not equals or slot not in {known.name for known in slots}:
                written = " that is written" if tag == "reads" else ""
                raise place.error(
                    f"{name}: expected '{tag}: slot = expression' with a slot of this kernel{written}: {text}"
                )
            if slot in result:
                raise place.error(f"{name}: a second {tag}: line for {slot}")
            result[slot] = parse_expression(place, f"{name}.{slot} bytes", expression)
            check_host_expression(place, f"{name}.{slot} bytes", result[slot], names, self.shape)
        return result

    def _check_body(self, grid_line: int, kernel: Kernel) -> None:
        """The body is `{` ... `}` at the start of lines; checks its SHARED arrays and simdgroups counts."""
        name = kernel.name
        if self.code[grid_line : grid_line + 1] != ["{"]:
            raise Place(self.path, grid_line + 1).error(
                f"{name}: expected '{{' alone on the line after GRID)"
            )
        for number in range(grid_line + 2, len(self.code) + 1):
            line, here = self.code[number - 1], Place(self.path, number)
            if line == "}":
                self.in_kernel.update(range(grid_line, number))
                return
            if line and not line.startswith((" ", "#")):
                raise here.error(f"{name}: the body ends with '}}' at the start of a line, before this one")
            if re.search(r"\bSHARED\b", line) and not SHARED_LINE.match(line):
                raise here.error(
                    f"{name}: expected '    SHARED type name[size];' at the top level of the body, "
                    f"one array, no initialiser: {line.strip()}"
                )
            for count in re.findall(r"\bsimdgroups\(([^()]*)\)", line):
                if count.strip() != str(kernel.simds):
                    raise here.error(f"{name}: simdgroups({count}), but KERNEL says {kernel.simds}")
        raise Place(self.path, grid_line).error(f"{name}: no line '}}' ends the body")


def parse_folder(folder: pathlib.Path, *more: pathlib.Path) -> tuple[Shape, tuple[Kernel, ...]]:
    """Reads shape.h and every .metal file of a folder, and those of more folders without a shape.h.

    The order of kernels is by folder, by file, then by line.

    Raises:
        TableError: a declaration is not in the accepted form.
    """
    shape = parse_shape(folder / "shape.h")
    kernels: dict[str, Kernel] = {}
    structs: dict[str, Args] = {}
    for path in (path for each in (folder, *more) for path in sorted(each.glob("*.metal"))):
        for kernel in ShaderFile(path, shape).kernels():
            if kernel.name in kernels:
                raise kernel.place.error(
                    f"kernel {kernel.name}: {kernels[kernel.name].where} has this name already"
                )
            kernels[kernel.name] = kernel
            other = structs.setdefault(kernel.args.name, kernel.args)
            if other != kernel.args:
                raise kernel.args.place.error(
                    f"struct {kernel.args.name}: {other.place.path.name} has this name too"
                )
    if not kernels:
        raise TableError(folder, 1, "no kernel in *.metal")
    return shape, tuple(kernels.values())
