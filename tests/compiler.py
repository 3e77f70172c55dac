"""The C++ compiler that the tests of generated and native code use."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parent / "native"


def compiler() -> str:
    """Path of a C++ compiler; the test is skipped, and says so, where there is none."""
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    pytest.skip("no C++ compiler on this machine")


def preloadable(name: str, folder: Path) -> str:
    """Build tests/native/NAME.cpp for LD_PRELOAD; the test is skipped where there is no such thing."""
    if platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ:
        pytest.skip("needs the GNU C library, and no other library before it")
    library = str(folder / f"{name}.so")
    command = [compiler(), "-std=c++20", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fPIC", "-shared"]
    command += [str(NATIVE / f"{name}.cpp"), "-o", library, "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return library
