"""The launch checks, the plan recorder and the generated launchers, on a tiny kernel table."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from compiler import compiler

ROOT = pathlib.Path(__file__).resolve().parent.parent
NATIVE = ROOT / "src" / "lily_native"

SHAPE = """\
constant constexpr uint TALL = 2;
constant constexpr uint WIDE = 8 * TALL;
"""

SHADER = """\
struct add_row_args {
    uint n;
    float scale;
};

// add_row: one simdgroup adds one row.
//   grid: (1, 1, 1)
//   reads: y = n * 4
//   used: encode
KERNEL(add_row, 1)(
    device const float*    x    [[buffer(0)]],  // [n]
    device float*          y    [[buffer(1)]],  // [n]
    constant add_row_args& args [[buffer(2)]],
    GRID)
{
    if (tid == 0)
        for (uint i = 0; i < args.n; i++) y[i] += args.scale * x[i];
}

struct mat_vec_args {
    uint n;
    uint k;
};

// mat_vec: not a product; each thread adds its group's coordinates to the group's element.
//   grid: (n / BITS, TALL, 2)
//   const: BITS <= 8, K = k
//   bytes: w = n * K / 2
//   used: encode
template <uint BITS, uint K>
KERNEL(mat_vec, 2)(
    device const uint4*    w    [[buffer(0)]],  // [n, K * BITS / 128]
    device float*          y    [[buffer(1)]],  // [n + 128 / k - 1]
    constant mat_vec_args& args [[buffer(2)]],
    GRID)
{
    const uint k = K ? K : args.k;
    float& sum = y[group.x + 4 * (group.y + 2 * group.z)];
    sum += float(100 * group.x + 10 * group.y + group.z) + float(w[0].x);
    if (tid == 0) sum += float(k);
}
"""


@pytest.mark.parametrize("width", [1, 32])
def test_plan__native_checks_pass(tmp_path: pathlib.Path, width: int) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "shape.h").write_text(SHAPE)
    (tmp_path / "tiny.metal").write_text(SHADER)
    (tmp_path / "host" / "cpu_consts.txt").write_text("mat_vec BITS=4,8 K=0,128\n")
    generator = [sys.executable, str(ROOT / "tools" / "kernel_table.py")]
    subprocess.run([*generator, "--shaders", str(tmp_path), "--out-dir", str(tmp_path)], check=True)
    sources = [NATIVE / "kernel.cpp", NATIVE / "plan.cpp", tmp_path / "kernels.gen.cpp"]
    sources += [ROOT / "tests" / "native" / name for name in ("plan_check.cpp", "tiny_object.cpp")]
    command = [compiler(), "-std=c++20", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    # libstdc++ 12's stable_sort calls get_temporary_buffer, of which clang says that it is deprecated.
    command += ["-Wno-deprecated-declarations"]
    command += [f"-DLILY_WIDTH={width}", f"-I{NATIVE}", f"-I{tmp_path}", "-o", str(tmp_path / "check")]
    built = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(tmp_path / "check")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
