"""The kernel table generator accepts one form of declaration and says where and why it refuses any other."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import NamedTuple

import pytest

from compiler import compiler

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import kernel_table  # noqa: E402

SHAPE = """\
#pragma once
using act_t = half;  // activations
constant constexpr uint DIM = 64;  // width
constant constexpr uint HALF_DIM = DIM / 2;
constant constexpr uint NONE = 0xffffffff;
struct StepState {
    uint rows;
    uint ring[HALF_DIM + 1];
    float scale;
};
"""

NORM = """\
#include "lily.h"

struct norm_args {
    uint rows;
    uint dim;
    float eps;
    int shift;
};

// norm_row: one threadgroup reduces one row;
// each thread strides over dim.
//   grid: (rows, (dim + TILE - 1) / TILE, max(1, dim))
//   bytes: x = rows * 4
//   used: encode_layer, encode_head
KERNEL(norm_row, 8)(
    device const float*     x    [[buffer(0)]],  // [rows, (dim + 1) * 2 - 2]
    device const bfloat*    w    [[buffer(1)]],  // [dim, HALF_DIM / 4] learned
    device act_t*           y    [[buffer(2)]],  // [rows, dim]
    device const StepState* step [[buffer(3)]],  // [1]
    constant norm_args&     args [[buffer(4)]],
    GRID)
{
    constexpr uint SIMDS = simdgroups(8);
    SHARED float part[SIMDS];
    SHARED uint seen[SIMDS][2];
    y[tid] = x[lane];
}

// mat_vec: one simdgroup makes one row.
//   grid: (n / mv_rows(K), BITS, simdgroups(1))
//   const: BITS <= 8, K = k
//   used: encode_layer
template <uint BITS, uint K>
KERNEL(mat_vec, 1)(
    device const uint4* w    [[buffer(0)]],  // [n, K * BITS / 128]
    device float*       y    [[buffer(1)]],  // [n]
    constant mat_args&  args [[buffer(2)]],
    GRID)
{
    y[0] = K;
}

// mat_check: the plain form.
//   grid: (n, 1, 1)
//   used: reference
KERNEL(mat_check, 1)(
    device float*      y    [[buffer(0)]],  // [n]
    constant mat_args& args [[buffer(1)]],
    GRID)
{
    y[0] = 0;
}
"""
NORM = NORM.replace("// mat_vec:", "struct mat_args {\n    uint n;\n    uint k;\n};\n\n// mat_vec:", 1)

CONSTS = "# variants\nmat_vec BITS=4,8 K=0,256\n"

MODEL = """\
#include "model.h"
namespace lily {
struct Layer { int x = 0; };
// k::mat_check{} in a comment is no launch
static const char* text = "k::mat_check{";
void Model::encode_layer(Recorder& run, const Layer& layer) {
    if (layer.x) {
        run(k::norm_row{.x = s.h, .args = {.rows = 1}});
    }
    run(k::mat_vec{.w = w});
}
template <class T> [[nodiscard]] bool encode_head(T& run) {
    auto each = [&](int i) { run(k::norm_row{.x = s.h}); };
    return true;
}
}  // namespace lily
"""


class Source(NamedTuple):
    """The tiny project that the tests change one piece of."""

    shape: str = SHAPE
    norm: str = NORM
    consts: str = CONSTS
    model: str = MODEL


def generate(folder: pathlib.Path, source: Source, *options: str) -> int:
    """Writes the sources and runs the generator on them; its exit status."""
    (folder / "host").mkdir(exist_ok=True)
    (folder / "shape.h").write_text(source.shape)
    (folder / "norm.metal").write_text(source.norm)
    (folder / "host" / "cpu_consts.txt").write_text(source.consts)
    (folder / "model.cpp").write_text(source.model)
    model = str(folder / "model.cpp")
    out = str(folder / "out")
    return kernel_table.main(["--shaders", str(folder), "--out-dir", out, *options, "--check", model])


class Bad(NamedTuple):
    """Replace old by new (once); the error must be at the line that holds `at` and contain `why`."""

    old: str
    new: str
    at: str
    why: str


def refused(folder: pathlib.Path, capsys: pytest.CaptureFixture[str], field: str, bad: Bad) -> None:
    text: str = getattr(Source(), field)
    assert text.count(bad.old), bad.old
    text = text.replace(bad.old, bad.new, 1)
    assert generate(folder, Source()._replace(**{field: text})) == 1
    message = capsys.readouterr().err.strip()
    line = text[: text.index(bad.at)].count("\n") + 1
    name = {"shape": "shape.h", "norm": "norm.metal", "consts": "cpu_consts.txt", "model": "model.cpp"}[field]
    where, _, why = message.partition(": ")
    assert where.endswith(f"{name}:{line}"), message
    assert bad.why in why, message


X = "    device const float*     x    [[buffer(0)]],  // [rows, (dim + 1) * 2 - 2]\n"
W = "    device const bfloat*    w    [[buffer(1)]],  // [dim, HALF_DIM / 4] learned\n"
ARGS = "    constant norm_args&     args [[buffer(4)]],\n"
GRID = "//   grid: (rows, (dim + TILE - 1) / TILE, max(1, dim))\n"
USED = "//   used: encode_layer, encode_head\n"
CONST = "//   const: BITS <= 8, K = k\n"
KERNEL = "KERNEL(norm_row, 8)("
CHECK = "// mat_check: the plain form.\n//   grid: (n, 1, 1)\n//   used: reference\nKERNEL(mat_check, 1)("

BAD_SHADERS = {
    "buffer index": Bad("w    [[buffer(1)]]", "w    [[buffer(2)]]", "w    [[buffer(2)]]", "expected 1"),
    "args index": Bad("args [[buffer(4)]]", "args [[buffer(5)]]", "args [[buffer(5)]]", "expected 4"),
    "no shape": Bad("  // [dim, HALF_DIM / 4] learned", "", "const bfloat* ", "w has no shape"),
    "comment without shape": Bad(
        "// [dim, HALF_DIM / 4] learned", "// weights", "// weights", "w has no shape"
    ),
    "empty shape": Bad("// [dim, HALF_DIM / 4]", "// []", "// []", "norm_row.w: ''; expected names"),
    "unknown type": Bad("const bfloat*", "const bfloat16*", "bfloat16", "unknown type bfloat16"),
    "reference": Bad("const bfloat*", "const bfloat&", "bfloat&", "w must be a pointer"),
    "unknown name": Bad("[rows, (dim + 1)", "[rows, (dims + 1)", "dims + 1", "unknown name dims"),
    "unknown constant": Bad("HALF_DIM / 4]", "HALF_DIMS / 4]", "HALF_DIMS", "unknown name HALF_DIMS"),
    "float in a shape": Bad("[rows, dim]\n", "[eps, dim]\n", "[eps", "eps is float"),
    "int in a shape": Bad("[rows, dim]\n", "[shift, dim]\n", "[shift", "shift is int"),
    "remainder in a shape": Bad("[rows, dim]\n", "[rows % 2]\n", "[rows % 2", "only + - * / ( )"),
    "call in a shape": Bad("[rows, dim]\n", "[max(rows, dim)]\n", "[max(", "only + - * / ( )"),
    "power in a shape": Bad("[rows, dim]\n", "[rows ** 2]\n", "[rows ** 2", "expected names, integers"),
    "fraction in a shape": Bad("[rows, dim]\n", "[0.5 * dim]\n", "[0.5", "expected names, integers"),
    "garbage in a shape": Bad("[rows, dim]\n", "[rows dim]\n", "[rows dim", "expected names, integers"),
    "two slots a line": Bad(
        W, W.replace(",  //", ", device float* v [[buffer(2)]],  //"), "float* v", "expected '    device"
    ),
    "slot not in the form": Bad(
        W, W.replace("device ", ""), "    const bfloat*", "expected '    device [const]"
    ),
    "slot name is a keyword": Bad("y    [[buffer(2)", "new  [[buffer(2)", "new  [[", "word of C++"),
    "slot name is a macro": Bad("y    [[buffer(2)", "buffer [[buffer(2)", "buffer [[", "word of C++"),
    "slot name is generated": Bad("y    [[buffer(2)", "launch [[buffer(2)", "launch [[", "word of C++"),
    "slot twice": Bad("y    [[buffer(2)", "x    [[buffer(2)", "act_t*           x", "another one"),
    "slot named as its kernel": Bad(
        "y    [[buffer(2)", "norm_row [[buffer(2)", "norm_row [[", "name of its kernel"
    ),
    "args not last": Bad(
        "    device act_t*           y    [[buffer(2)]],  // [rows, dim]\n",
        "    constant norm_args&     args [[buffer(2)]],\n",
        "step [[buffer(3)]]",
        "args is the last buffer",
    ),
    "args missing": Bad(ARGS, "", "    GRID)", "before GRID"),
    "args named otherwise": Bad("args [[buffer(4)]]", "a    [[buffer(4)]]", "a    [[", "one struct"),
    "constant that is no args struct": Bad(
        "constant norm_args&", "constant float&", "constant float&", "one struct"
    ),
    "args struct unknown": Bad(
        "constant norm_args&", "constant nom_args& ", "nom_args&", "not declared above"
    ),
    "args struct below": Bad(
        "constant norm_args& ", "constant mat_args&  ", "mat_args& ", "not declared above"
    ),
    "no slot": Bad(
        "    device float*      y    [[buffer(0)]],  // [n]\n    constant mat_args& args [[buffer(1)",
        "    constant mat_args& args [[buffer(0)",
        "    GRID)\n{\n    y[0] = 0",
        "at least one slot",
    ),
    "no GRID": Bad(ARGS + "    GRID)\n", ARGS, "{\n    constexpr", "expected '    device [const]"),
    "missing grid": Bad(GRID, "", KERNEL, "needs a line '//   grid"),
    "missing used": Bad(USED, "", KERNEL, "needs a line '//   used"),
    "second grid": Bad(GRID, GRID + "//   grid: (1, 1, 1)\n", "grid: (1, 1, 1)", "a second 'grid:'"),
    "unknown tag": Bad("//   bytes: x", "//   byte: x", "//   byte: x", "unknown line 'byte:'"),
    "text between tags": Bad("//   bytes: x", "// bytes: x", "// bytes: x", "grid|const|bytes|reads|used"),
    "comment of another kernel": Bad(
        "// norm_row: one", "// norm: one", KERNEL, "starts with '// norm_row: '"
    ),
    "no comment": Bad(USED, USED + "\n", KERNEL, "expected a comment right above"),
    "grid with two parts": Bad(", max(1, dim))", ")", "//   grid: (rows", "expected 'grid: (x, y, z)'"),
    "grid without parentheses": Bad(
        "grid: (rows", "grid: rows", "//   grid: rows", "expected 'grid: (x, y, z)'"
    ),
    "grid with an unknown name": Bad(
        "grid: (rows", "grid: (row", "//   grid: (row,", "row is no integer field"
    ),
    "grid with a float": Bad("grid: (rows", "grid: (eps", "//   grid: (eps,", "eps is no integer field"),
    "grid divides by a field": Bad("grid: (rows", "grid: (1 / rows", "grid: (1 / rows", "could be 0"),
    "grid with a choice": Bad(
        "grid: (rows", "grid: (rows ? 1 : 2", "grid: (rows ?", "expected names, integers"
    ),
    "grid with another simdgroups": Bad("simdgroups(1)", "simdgroups(2)", "simdgroups(2)", "KERNEL says 1"),
    "bytes of no slot": Bad("bytes: x =", "bytes: z =", "bytes: z =", "with a slot of this kernel"),
    "bytes without a value": Bad("bytes: x = rows * 4", "bytes: x", "bytes: x", "expected 'bytes: slot = "),
    "bytes twice": Bad(
        "//   bytes: x = rows * 4\n", "//   bytes: x = 8\n//   bytes: x = 4\n", "bytes: x = 4", "second"
    ),
    "reads of a slot that is not written": Bad(
        "bytes: x =", "reads: x =", "reads: x =", "slot of this kernel that is"
    ),
    "bytes with an unknown name": Bad("x = rows * 4", "x = row * 4", "x = row * 4", "unknown name row"),
    "used is no name": Bad(USED, "//   used: Encode\n", "//   used: Encode", "expected 'used: function"),
    "used twice": Bad(USED, "//   used: encode_head, encode_head\n", "used: encode_head,", "twice"),
    "used mixed": Bad(USED, "//   used: encode_head, bench\n", "used: encode_head, bench", "mixes"),
    "const not in the form": Bad("BITS <= 8", "BITS < 8", "BITS < 8", "'NAME = field' or 'NAME <= maximum'"),
    "const in lower case": Bad("BITS <= 8", "bits <= 8", "bits <= 8", "must be ALL_CAPS"),
    "const of shape.h": Bad("BITS <= 8", "DIM <= 8", "DIM <= 8", "no constant of shape.h"),
    "const without maximum": Bad("BITS <= 8", "BITS <= 0", "BITS <= 0", "maximum 0"),
    "const with unknown maximum": Bad("BITS <= 8", "BITS <= MOST", "BITS <= MOST", "unknown name MOST"),
    "const mirrors nothing": Bad("K = k", "K = kk", "K = kk", "no uint field of args"),
    "const mirrors twice": Bad("BITS <= 8", "BITS = k", "BITS = k", "two consts mirror k"),
    "const twice": Bad("BITS <= 8", "K <= 8", "K <= 8", "another one"),
    "five consts": Bad("BITS <= 8", "A <= 1, B <= 1, C <= 1, BITS <= 8", "//   const:", "at most 4"),
    "const without template": Bad(
        "template <uint BITS, uint K>\n", "", "KERNEL(mat_vec", "expected the line 'template"
    ),
    "template in another order": Bad(
        "<uint BITS, uint K>", "<uint K, uint BITS>", "KERNEL(mat_vec", "<uint BITS, uint K>"
    ),
    "template without const": Bad(CONST, "", "KERNEL(mat_vec", "needs a const: line"),
    "two kernels of one name": Bad(
        CHECK,
        CHECK.replace("mat_check", "norm_row"),
        "KERNEL(norm_row, 1)",
        "norm.metal:15 has this name already",
    ),
    "comment of another kernel below": Bad(
        "KERNEL(mat_check", "KERNEL(mat_chuck", "KERNEL(mat_chuck", "'// mat_chuck: '"
    ),
    "name is a keyword": Bad(KERNEL, "KERNEL(float, 8)(", "KERNEL(float", "word of C++"),
    "no power of two": Bad(KERNEL, "KERNEL(norm_row, 6)(", "KERNEL(norm_row, 6)", "power of two"),
    "too many simdgroups": Bad(KERNEL, "KERNEL(norm_row, 64)(", "KERNEL(norm_row, 64)", "from 1 to 32"),
    "no simdgroups": Bad(
        KERNEL, "KERNEL(norm_row)(", "KERNEL(norm_row)", "expected 'KERNEL(name, simdgroups)("
    ),
    "indented kernel": Bad(KERNEL, " " + KERNEL, " KERNEL", "at the start of a line"),
    "plain Metal kernel": Bad(KERNEL, "kernel void f(\n" + KERNEL, "kernel void", "a kernel is declared by"),
    "args field of another type": Bad("    int shift;", "    half shift;", "half shift", "uint|int|float"),
    "args field array": Bad("    int shift;", "    uint shift[2];", "shift[2]", "one field a line"),
    "two args fields a line": Bad(
        "    int shift;", "    int shift, more;", "shift, more", "one field a line"
    ),
    "args field twice": Bad("    int shift;", "    int rows;", "    int rows", "another one"),
    "args field is a macro": Bad("    int shift;", "    int device;", "int device", "word of C++"),
    "args field in capitals": Bad(
        "    int shift;", "    int TILE;", "struct norm_args", "ALL_CAPS is for constants"
    ),
    "too many args fields": Bad(
        "    int shift;", "\n".join(f"    uint f{i};" for i in range(22)), "struct norm", "at most 24"
    ),
    "args struct on one line": Bad(
        "struct mat_args {\n", "struct mat_args { uint z;\n", "struct mat_args", "expected 'struct"
    ),
    "args struct unused": Bad(
        "struct mat_args", "struct odd_args {\n    uint n;\n};\nstruct mat_args", "struct odd", "no kernel"
    ),
    "empty args struct": Bad(
        "struct mat_args", "struct odd_args {\n};\nstruct mat_args", "struct odd", "at least one field"
    ),
    "body brace": Bad("    GRID)\n{\n", "    GRID) {\n", "    GRID) {", "expected '    device [const]"),
    "body brace later": Bad("    GRID)\n{\n", "    GRID)\n\n{\n", "\n{\n    constexpr", "expected '{' alone"),
    "body simdgroups": Bad("simdgroups(8)", "simdgroups(4)", "simdgroups(4)", "KERNEL says 8"),
    "SHARED with initialiser": Bad("part[SIMDS];", "part[SIMDS] = {};", "part[SIMDS] =", "no initialiser"),
    "two SHARED a line": Bad("part[SIMDS];", "part[SIMDS], more[2];", "part[SIMDS],", "one array"),
    "SHARED scalar": Bad("part[SIMDS];", "part;", "SHARED float part;", "one array"),
    "SHARED in a block": Bad("    SHARED float", "        SHARED float", "        SHARED float", "top level"),
    "SHARED outside": Bad(
        "// mat_check:", "SHARED float part[2];\n\n// mat_check:", "SHARED float part[2]", "body of a kernel"
    ),
    "body without end": Bad(
        "    y[tid] = x[lane];\n}\n", "    y[tid] = x[lane];\n", "struct mat_args", "the body ends"
    ),
}


@pytest.mark.parametrize("bad", BAD_SHADERS.values(), ids=BAD_SHADERS.keys())
def test_declaration__refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], bad: Bad) -> None:
    refused(tmp_path, capsys, "norm", bad)


def test_act_t__must_be_named_by_shape_h(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(tmp_path, Source(shape=SHAPE.replace("using act_t = half;", ""))) == 1
    assert "y is act_t; expected 'using act_t = half|bfloat;' in shape.h" in capsys.readouterr().err


BAD_SHAPES = {
    "unknown name": Bad("= DIM / 2", "= DIMS / 2", "= DIMS", "unknown name DIMS"),
    "negative": Bad("= DIM / 2", "= 2 - DIM", "= 2 - DIM", "is -62, which is no uint"),
    "too large": Bad("= DIM / 2", "= DIM * 0x7fffffff", "= DIM *", "which is no uint"),
    "division by zero": Bad("= DIM / 2", "= DIM / (DIM - 64)", "= DIM / (", "division by zero"),
    "call": Bad("= DIM / 2", "= f(DIM)", "= f(", "expected an integer expression of earlier constants"),
    "lower case": Bad("uint DIM =", "uint dim =", "uint dim", "ALL_CAPS"),
    "twice": Bad("uint HALF_DIM =", "uint DIM =", "uint DIM = DIM", "another one"),
    "other type": Bad(
        "constexpr uint DIM", "constexpr int DIM", "constexpr int", "expected 'constant constexpr uint"
    ),
    "act_t of another type": Bad(
        "act_t = half", "act_t = float", "act_t = float", "using act_t = half|bfloat"
    ),
    "act_t twice": Bad("struct Step", "using act_t = bfloat;\nstruct Step", "= bfloat", "another one"),
    "other alias": Bad("using act_t", "using acts_t", "using acts_t", "expected 'constant constexpr uint"),
    "field type": Bad("    float scale;", "    half scale;", "half scale", "uint|int|float"),
    "field twice": Bad("    float scale;", "    float rows;", "float rows", "another one"),
    "array of unknown length": Bad("ring[HALF_DIM", "ring[SIZE", "ring[SIZE", "unknown name SIZE"),
    "no end": Bad("};\n", "", "struct StepState", "no line '};' ends"),
}

BAD_CONSTS = {
    "unknown kernel": Bad("mat_vec", "mat_vek", "mat_vek", "unknown kernel mat_vek"),
    "unknown const": Bad("K=0,256", "L=0,256", "mat_vec", "expected CONST=value"),
    "not in the form": Bad("K=0,256", "K=0..256", "mat_vec", "expected CONST=value"),
    "const twice": Bad("K=0,256", "K=0 K=256", "mat_vec", "once for each"),
    "missing const": Bad("BITS=4,8 ", "", "mat_vec", "BITS has no values"),
    "above the maximum": Bad("BITS=4,8", "BITS=4,16", "mat_vec", "BITS = 16, expected 1 to 8"),
    "zero": Bad("BITS=4,8", "BITS=0,8", "mat_vec", "BITS = 0, expected 1 to 8"),
    "listed twice": Bad("BITS=4,8", "BITS=4,4", "mat_vec", "listed twice"),
    "no generic form": Bad("K=0,256", "K=256", "# variants", "without its generic form (4, 0)"),
    "no line": Bad("mat_vec BITS=4,8 K=0,256", "", "# variants", "mat_vec (norm.metal:39) has no line"),
}

BAD_MODELS = {
    "unknown kernel": Bad("k::mat_vec{", "k::mat_vek{", "k::mat_vek", "no shader declares this kernel"),
    "function that used: does not name": Bad(
        "run(k::norm_row{.x = s.h});",
        "run(k::mat_vec{});",
        "run(k::mat_vec{})",
        "encode_head launches mat_vec",
    ),
    "launch of a reference": Bad(
        "k::mat_vec{", "k::mat_check{", "k::mat_check{.", "used: line says reference"
    ),
    "launch outside of functions": Bad(
        "struct Layer {",
        "auto x = k::mat_vec{};\nstruct Layer {",
        "k::mat_vec{}",
        "outside of every function",
    ),
}


@pytest.mark.parametrize("bad", BAD_SHAPES.values(), ids=BAD_SHAPES.keys())
def test_shape__refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], bad: Bad) -> None:
    refused(tmp_path, capsys, "shape", bad)


@pytest.mark.parametrize("bad", BAD_CONSTS.values(), ids=BAD_CONSTS.keys())
def test_cpu_consts__refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], bad: Bad) -> None:
    refused(tmp_path, capsys, "consts", bad)


@pytest.mark.parametrize("bad", BAD_MODELS.values(), ids=BAD_MODELS.keys())
def test_used__refused_in_the_model(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], bad: Bad
) -> None:
    refused(tmp_path, capsys, "model", bad)


def test_used__refused_when_nothing_launches(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODEL.replace("k::mat_vec{.w = w}", "0")
    assert generate(tmp_path, Source(model=model)) == 1
    message = capsys.readouterr().err
    assert "norm.metal:39: used: names encode_layer, which does not launch mat_vec" in message


def test_folder__refused_without_kernels(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(tmp_path, Source(norm="")) == 1
    assert "no kernel in *.metal" in capsys.readouterr().err


def test_files__refuse_one_name_twice(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = NORM[NORM.index("struct mat_args") :].replace("mat_check", "other").replace("mat_vec", "another")
    (tmp_path / "z.metal").write_text(second)
    assert generate(tmp_path, Source()) == 1
    assert "z.metal:1: struct mat_args: norm.metal has this name too" in capsys.readouterr().err


def test_output__deterministic_and_untouched(tmp_path: pathlib.Path) -> None:
    assert generate(tmp_path, Source()) == 0
    files = sorted((tmp_path / "out").iterdir())
    names = ["cpu_launch.gen.inc", "grids.gen.inc", "kernels.gen.cpp", "kernels.gen.h"]
    assert [path.name for path in files] == names
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    assert generate(tmp_path, Source()) == 0
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before


def test_output__host_header_keeps_its_text_when_lines_move(tmp_path: pathlib.Path) -> None:
    assert generate(tmp_path, Source()) == 0
    before = (tmp_path / "out" / "kernels.gen.h").read_text()
    assert generate(tmp_path, Source(norm="// one more line\n" + NORM)) == 0
    assert (tmp_path / "out" / "kernels.gen.h").read_text() == before


BENCH = """\
struct slow_args {
    uint n;
};

// slow: what the product does not do.
//   grid: (n, 1, 1)
//   const: BM <= 8
//   used: bench
template <uint BM>
KERNEL(slow, 1)(
    device float*       y    [[buffer(0)]],  // [n]
    constant slow_args& args [[buffer(1)]],
    GRID)
{
    y[0] = 0;
}
"""


def test_cpu_objects__have_what_the_product_does_not_launch_in_builds_for_benchmarks(
    tmp_path: pathlib.Path,
) -> None:
    bench, out = tmp_path / "bench", tmp_path / "out"
    bench.mkdir()
    (bench / "slow.metal").write_text(BENCH)
    (bench / "cpu_consts.txt").write_text("slow BM=2,4\nmat_vec BITS=2 K=0\n")
    launchers, table = out / "cpu_launch.gen.inc", out / "kernels.gen.cpp"
    assert generate(tmp_path, Source()) == 0
    for absent in ("mat_check_run", "slow", "mat_vec_run<2, 0>"):
        assert absent not in launchers.read_text()
    assert "slow" not in table.read_text()
    assert generate(tmp_path, Source(), "--bench", str(bench)) == 0
    for present in ("mat_check_run", "slow_run<4>", "mat_vec_run<2, 0>"):
        assert present in launchers.read_text()
    assert "slow" in table.read_text()


def test_docs__stale_is_an_error(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = str(tmp_path / "KERNELS.md")
    assert generate(tmp_path, Source(), "--check-docs", docs) == 1
    assert generate(tmp_path, Source(), "--docs", docs) == 0
    assert generate(tmp_path, Source(), "--check-docs", docs) == 0
    capsys.readouterr()
    changed = NORM.replace("[dim, HALF_DIM / 4]", "[dim]")
    assert generate(tmp_path, Source(norm=changed), "--check-docs", docs) == 1
    assert "KERNELS.md:1: stale" in capsys.readouterr().err
    text = pathlib.Path(docs).read_text()
    assert "one threadgroup reduces one row; each thread strides over dim." in text
    assert "| w | bfloat | read | `[dim, HALF_DIM / 4]` learned |" in text


# The generated host structs: what the compiler refuses.

GOOD_CALL = (
    "run(k::norm_row{.x = x, .w = w, .y = y, .step = step,"
    " .args = {.rows = 1, .dim = 2, .eps = 3, .shift = 4}})"
)
CALLS = {
    "as declared": (GOOD_CALL, ""),
    "slice": (GOOD_CALL.replace(".x = x", ".x = x.slice(0, 1)"), ""),
    "const source": (GOOD_CALL.replace(".w = w", ".w = cw"), ""),
    "consts": ("run(k::mat_vec{.w = q, .y = x, .args = {.n = 1, .k = 2}, .consts = {.BITS = 4}})", ""),
    "no consts": ("run(k::mat_vec{.w = q, .y = x, .args = {.n = 1, .k = 2}})", "consts"),
    "wrong type": (GOOD_CALL.replace(".x = x", ".x = w"), "Slot"),
    "wrong name": (GOOD_CALL.replace(".w = w", ".weight = w"), "weight"),
    "wrong constness": (GOOD_CALL.replace(".y = y", ".y = cy"), "Slot"),
    "wrong order": (GOOD_CALL.replace(".x = x, .w = w", ".w = w, .x = x"), "order|designator"),
    "missing slot": (GOOD_CALL.replace(".w = w, ", ""), "missing"),
    "missing args field": (GOOD_CALL.replace(", .shift = 4", ""), "missing"),
    "wrong args field": (GOOD_CALL.replace(".shift", ".shifts"), "shifts"),
    "negative count": (GOOD_CALL.replace(".rows = 1", ".rows = -1"), "narrowing"),
    "unknown kernel": (GOOD_CALL.replace("norm_row", "norm_rows"), "norm_rows"),
}

PROGRAM = """\
#include "kernels.gen.h"
#include "plan.h"
using namespace lily;
void record(Recorder& run, [[maybe_unused]] Slot<float> x, [[maybe_unused]] Slot<bfloat> w,
            [[maybe_unused]] Slot<const bfloat> cw, [[maybe_unused]] Slot<act_t> y,
            [[maybe_unused]] Slot<const act_t> cy, [[maybe_unused]] Slot<StepState> step,
            [[maybe_unused]] Slot<uint4> q) {
    %s;
}
"""


@pytest.mark.parametrize(("call", "why"), CALLS.values(), ids=CALLS.keys())
def test_host_struct__compiles_only_as_declared(tmp_path: pathlib.Path, call: str, why: str) -> None:
    assert generate(tmp_path, Source()) == 0
    (tmp_path / "call.cpp").write_text(PROGRAM % call)
    command = [compiler(), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    command += [f"-I{tmp_path}", f"-I{tmp_path / 'out'}", f"-I{ROOT / 'src' / 'lily_native'}"]
    result = subprocess.run(
        [*command, str(tmp_path / "call.cpp")], capture_output=True, text=True, check=False
    )
    if not why:
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode != 0
    assert any(word in result.stderr for word in why.split("|")), result.stderr
