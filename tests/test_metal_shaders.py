"""The check of shaders against Metal's rules passes the shaders, and refuses mistakes with file and line."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import sys
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "metal")]

import check_shaders  # noqa: E402
import kernel_parse  # noqa: E402
from lily import _native  # noqa: E402
from lily.plan import SHAPES  # noqa: E402

SHADERS = ROOT / "shaders"


class Mistake(NamedTuple):
    """A change of one file. The finding is on the line of `at`, or of what is new."""

    family: str  # the .metal file that is checked
    file: str
    old: str
    new: str
    message: str
    at: str = ""
    at_file: str = ""


@pytest.fixture(autouse=True)
def clang() -> None:
    if shutil.which(check_shaders.CLANG) is None and not os.environ.get("CI"):
        pytest.skip(f"{check_shaders.CLANG} is not installed")


def test_shaders__pass() -> None:
    assert check_shaders.check_folder(SHADERS) == []


@pytest.mark.parametrize("tensor_ops", [False, True], ids=["simdgroups", "tensors"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sources_of_a_device__pass_and_have_no_variant_that_lint_does_not_check(
    shape: str, tensor_ops: bool
) -> None:
    config = _native.Config(**SHAPES[shape], attention_interval=4, rms_eps=1e-6, rope_theta=1e7)
    sources = _native.metal_sources(
        config, context=131072, prefill_chunk=2048, max_sessions=2, tensor_ops=tensor_ops
    )
    assert set(sources) == {path.stem for path in SHADERS.glob("*.metal")}
    checked = "".join(text.source for text in check_shaders.texts_of(SHADERS))
    for name, source in sources.items():
        text = check_shaders.Text(name, source, tensor_ops)
        assert check_shaders.check_text(text) == []
        for line in re.findall(r"^template \[\[.*", source, re.M):
            assert line in checked, f"tools/metal/consts.txt lacks this variant: {line}"


def test_shaders__every_kernel_is_seen_by_the_rules() -> None:
    _, kernels = kernel_parse.parse_folder(SHADERS, SHADERS / "bench")
    for text in check_shaders.texts_of(SHADERS):
        seen = {function.name for function in check_shaders.source_of(text).functions if function.kernel}
        assert seen == {kernel.name for kernel in kernels if kernel.place.path.stem == text.name}


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
DECIDES = "thread's index decides"

MISTAKES = {
    # Address spaces
    "threadgroup array for a device pointer": Mistake(
        "norm", "norm.metal", "(x + group.x * args.dim, w,", "(part, w,", "no matching function"
    ),
    "device pointer for a threadgroup array": Mistake(
        "quant_mv",
        "quant_mv.metal",
        "= mv_row<mv_split(K)>(part, i)",
        "= mv_row<mv_split(K)>(y, i)",
        "no matching",
    ),
    "pointer without a space": Mistake(
        "quant_mv",
        "quant.h",
        "mv_reduce(thread quant_acc<BITS>* acc",
        "mv_reduce(quant_acc<BITS>* acc",
        "a pointer",
    ),
    "local pointer without a space": Mistake(
        "conv", "conv.metal", "device const float* before =", "const float* before =", "a pointer without"
    ),
    "reference without a space": Mistake(
        "head", "reduce.h", "thread float& most", "float& most", "a reference without"
    ),
    "cast to a pointer without a space": Mistake(
        "moe_tile", "tile.h", "*(device const uint4*)", "*(const uint4*)", "a pointer without"
    ),
    "cast between spaces": Mistake(
        "moe_tile",
        "tile.h",
        "*(device const uint4*)",
        "*(threadgroup const uint4*)",
        "address spaces",
    ),
    "array of pointers without a space": Mistake(
        "conv", "conv.metal", "float taps[", "const float* from[2]; float taps[", "a pointer without"
    ),
    "member function without a space": Mistake(
        "quant_mv", "quant.h", "float total() const thread", "float total() const", "trailing 'thread'"
    ),
    "threadgroup array in a helper": Mistake(
        "norm",
        "lily.h",
        "    v = simd_sum(v);\n",
        "    threadgroup float sums[8];\n    v = simd_sum(v);\n",
        "top level",
    ),
    "threadgroup array in a block": Mistake(
        "norm",
        "norm.metal",
        "    if (group.x >= step->rows) return;\n",
        "    if (group.x >= step->rows) {\n        threadgroup uint seen[4];\n        return;\n    }\n",
        "top level",
        at="threadgroup uint seen",
    ),
    "global without a space": Mistake(
        "delta",
        "delta_rows.h",
        "constant constexpr uint DELTA_ROWS",
        "constexpr uint DELTA_ROWS",
        "is 'constant'",
    ),
    "static variable without a space": Mistake(
        "norm",
        "lily.h",
        "    v = simd_sum(v);\n",
        "    static uint seen = 0;\n    v = simd_sum(v);\n",
        "is 'constant'",
    ),
    # What may be written
    "write to the arguments": Mistake(
        "embed",
        "embed.metal",
        "    if (group.x >= step->rows)",
        "    args.rows = 1;\n    if (false)",
        "assign",
    ),
    "write to an input": Mistake(
        "norm",
        "norm.metal",
        "device act_t*                 y    [[buffer(4)]],  // [rows, value_heads, DELTA_DIM]",
        "device const act_t*           y    [[buffer(4)]],  // [rows, value_heads, DELTA_DIM]",
        "assign",
        at="to[i * to_stride] = to_act(from[i * from_stride]);",
        at_file="lily.h",
    ),
    "const lost": Mistake(
        "conv",
        "conv.metal",
        "device float* after = state +",
        "device float* after = proj +",
        "cannot initialize",
    ),
    # Types and the library
    "ambiguous overload": Mistake(
        "conv", "conv.metal", "min(first + CONV_ROWS, rows)", "min(first + CONV_ROWS, int(rows))", "ambiguous"
    ),
    "misspelt function": Mistake(
        "norm", "lily.h", "    v = simd_sum(v);", "    v = simd_sun(v);", "simd_sun"
    ),
    "function that Metal lacks": Mistake(
        "norm", "lily.h", "/ (1.0f + precise::exp(-v)); }\n\n", "/ (1.0f + expf(-v)); }\n\n", "expf"
    ),
    "double literal": Mistake("rope", "rope.h", "QUERY_SCALE = 0.0625f", "QUERY_SCALE = 0.0625", "double"),
    "double": Mistake("conv", "conv.metal", "float sum[OWN]", "double sum[OWN]", "double"),
    "float to bfloat": Mistake("rope", "rope.metal", "= bfloat(v[j])", "= v[j]", "no viable"),
    "bfloat in arithmetic": Mistake(
        "norm", "norm.metal", "scale * float(w[d]) *", "scale * w[d] *", "invalid operands"
    ),
    "vector of three": Mistake(
        "sample", "sample.metal", "uint4(counter, 0, 0, 0)", "uint4(counter, 0, 0)", "a vector is made of"
    ),
    "sum of bool": Mistake(
        "norm", "lily.h", "    v = simd_sum(v);", "    v = simd_sum(v > 0);", "16- and 32-bit"
    ),
    "atomic operation on a number": Mistake(
        "sample",
        "sample.metal",
        "SHARED atomic_uint bins",
        "SHARED uint bins",
        "no matching",
        at="list.count = list_choices<THREADS>",
    ),
    "order of an atomic operation": Mistake(
        "sample",
        "sample.metal",
        "0u, memory_order_relaxed",
        "0u, memory_order_seq_cst",
        "memory_order_seq_cst",
    ),
    "name of the library": Mistake(
        "sample", "sample.metal", "sample_floor", "mem_flags", "a name of Metal's library"
    ),
    "keyword": Mistake(
        "conv",
        "conv.metal",
        "struct conv_silu_args {\n",
        "constant constexpr uint vertex = 1;\n\nstruct conv_silu_args {\n",
        "a word of Metal",
    ),
    "recursion": Mistake(
        "conv",
        "lily.h",
        "inline float silu(float v) { return v /",
        "inline float silu(float v) { return v == 0 ? silu(v) : v /",
        "recursion",
    ),
    "lambda that captures this": Mistake(
        "quant_mv", "quant.h", "{ return acc; }", "{ return [this]() { return acc; }(); }", "capture this"
    ),
    # Kernels
    "no buffer index": Mistake("embed", "embed.metal", "tokens [[buffer(0)]],", "tokens,", "expected"),
    "buffer index twice": Mistake(
        "embed", "embed.metal", "x      [[buffer(5)]]", "x      [[buffer(4)]]", "expected 5"
    ),
    "unknown attribute": Mistake(
        "embed",
        "lily.h",
        "[[thread_index_in_simdgroup]]",
        "[[thread_index_in_simd]]",
        "unknown attribute",
        at="    GRID)",
        at_file="embed.metal",
    ),
    "attribute of another type": Mistake(
        "embed",
        "lily.h",
        "uint3 group [[",
        "float group [[",
        "threadgroup_position_in_grid is no float",
        at="    GRID)",
        at_file="embed.metal",
    ),
    "too much threadgroup memory": Mistake(
        "attention",
        "attention.metal",
        "SHARED float out[HEAD_DIM];",
        "SHARED float out[HEAD_DIM * 24];",
        "at most 32768",
    ),
    # Control flow
    "barrier in a branch": Mistake(
        "moe",
        "moe.metal",
        f"    {BARRIER}\n    if (simd == 0)",
        f"    if (tid < 32) {BARRIER}\n    if (simd == 0)",
        DECIDES,
    ),
    "barrier after a return": Mistake(
        "moe",
        "moe.metal",
        "    if (first >= all) return;",
        "    if (first + tid >= all) return;",
        DECIDES,
        at=f"    {BARRIER}\n    for (uint i = tid; i < count;",
    ),
    "barrier in a loop over threads": Mistake(
        "moe",
        "moe.metal",
        "        total[e] = sum;\n",
        f"        total[e] = sum;\n        {BARRIER}\n",
        DECIDES,
        at=f"        {BARRIER}",
    ),
    "helper with a barrier in a branch": Mistake(
        "head", "reduce.h", "    s.sum = group_sum", "    if (tid == 0) s.sum = group_sum", DECIDES
    ),
    "lanes that leave": Mistake(
        "delta",
        "delta_rows.h",
        "const float out = simd_sum(",
        "const float out = lane > 3 ? 0 : 1; if (lane == 0) simd_sum(",
        DECIDES,
    ),
    # Matrix tiles
    "operands of two types": Mistake(
        "quant_mm",
        "tile_tensor.h",
        "<operand, operand, float, int>",
        "<operand, tensor<threadgroup const act_t, dextents<int32_t, 2>, tensor_inline>, float, int>",
        "one type",
    ),
    "no type of coordinates": Mistake(
        "quant_mm",
        "tile_tensor.h",
        "<operand, operand, float, int>",
        "<operand, operand, float>",
        "too few template",
    ),
    "result of another operation": Mistake(
        "attention_tile",
        "tile_tensor.h",
        "using P = tile_product<BM, BN, SIMDS, true>",
        "using P = tile_product<BM, BN, SIMDS, false>",
        "no matching",
        at="typename P::product().run(left, right, acc);\n}\n",
    ),
    "matrix of another type": Mistake(
        "quant_mm",
        "tile_simdgroup.h",
        "simdgroup_matrix<act_t, 8, 8> left",
        "simdgroup_matrix<float, 8, 8> left",
        "no matching",
        at="simdgroup_load(right[j]",
    ),
    "matrix of another size": Mistake(
        "quant_mm",
        "tile_simdgroup.h",
        "simdgroup_matrix<float, 8, 8> sum",
        "simdgroup_matrix<float, 8, 4> sum",
        "8 x 8",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake__is_refused_where_it_is(name: str, tmp_path: pathlib.Path) -> None:
    mistake = MISTAKES[name]
    for path in [*SHADERS.glob("*.h"), *SHADERS.glob("*.metal")]:
        shutil.copy(path, tmp_path)
    shutil.copytree(SHADERS / "bench", tmp_path / "bench")
    text = (tmp_path / mistake.file).read_text()
    assert mistake.old in text
    text = text.replace(mistake.old, mistake.new)
    (tmp_path / mistake.file).write_text(text)
    findings = check_shaders.check_folder(tmp_path, [mistake.family])
    file = mistake.at_file or mistake.file
    text = (tmp_path / file).read_text()
    where = mistake.at or mistake.new
    lines = {text.count("\n", 0, match.start()) + 1 for match in re.finditer(re.escape(where), text)}
    found = [f for f in findings if f.file == file and re.search(mistake.message, f.message)]
    assert found, "\n".join(map(str, findings))
    assert {f.line for f in found} & lines, "\n".join(map(str, findings))
