"""The shading language's stand-in for CPUs: math, conversions, exchanges, shared arrays, divergence."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOST = ROOT / "shaders" / "host"


@pytest.mark.parametrize("width", [1, 32])
def test_shim__native_checks_pass(tmp_path: pathlib.Path, width: int) -> None:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    command = [compiler, "-std=c++20", "-O1", "-ffp-contract=off", f"-DLILY_WIDTH={width}"]
    command += ['-DLILY_SHIM="shim_cpu.h"', f"-I{HOST}", f"-I{HOST.parent}", "-o", str(tmp_path / "check")]
    sources = [ROOT / "tests" / "native" / "shim_check.cpp", HOST / "fibers.cpp"]
    built = subprocess.run([*command, *map(str, sources)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(tmp_path / "check")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
