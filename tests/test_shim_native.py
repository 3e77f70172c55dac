"""The shading language's stand-in for CPUs: math, conversions, exchanges, shared arrays, divergence."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from compiler import compiler

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOST = ROOT / "shaders" / "host"
sys.path.insert(0, str(ROOT / "tools"))

import kernel_table  # noqa: E402

FORMS = (["-DLILY_WIDTH=1"], ["-DLILY_WIDTH=32"], ["-DLILY_WIDTH=32", "-DLILY_TENSOR_OPS"])


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_shim__native_checks_pass(tmp_path: pathlib.Path, form: list[str]) -> None:
    command = [compiler(), "-std=c++20", "-O1", "-ffp-contract=off", *form]
    command += ['-DLILY_SHIM="shim_cpu.h"', f"-I{HOST}", f"-I{HOST.parent}", "-o", str(tmp_path / "check")]
    sources = [ROOT / "tests" / "native" / "shim_check.cpp", HOST / "fibers.cpp"]
    built = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(tmp_path / "check")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_shaders__compile_with_the_other_act_t(tmp_path: pathlib.Path, form: list[str]) -> None:
    """All shaders and their launchers, as CMakeLists.txt makes an object of them."""
    shaders, generated = tmp_path / "shaders", tmp_path / "generated"
    shutil.copytree(HOST.parent, shaders)
    text = (shaders / "shape.h").read_text(encoding="utf-8")
    now, other = ("half", "bfloat") if "using act_t = half;" in text else ("bfloat", "half")
    flipped = text.replace(f"using act_t = {now};", f"using act_t = {other};")
    assert flipped != text
    (shaders / "shape.h").write_text(flipped, encoding="utf-8")
    assert kernel_table.main(["--shaders", str(shaders), "--out-dir", str(generated)]) == 0
    includes = [f'#include "{path}"\n' for path in sorted(shaders.glob("*.metal"))]
    (generated / "cpu_shaders.gen.inc").write_text("".join(includes), encoding="utf-8")
    command = [compiler(), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    command += ["-Wno-psabi", "-Wno-unused-parameter", *form, '-DLILY_ISA="flipped"']
    folders = (ROOT / "src" / "lily_native", shaders, shaders / "host", generated)
    command += [f"-I{folder}" for folder in folders]
    sources = [shaders / "host" / "cpu_object.cpp", generated / "kernels.gen.cpp"]
    built = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
