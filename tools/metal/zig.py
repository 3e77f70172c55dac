"""Run the cross compiler: clang and a Mach-O linker of the package ziglang, caches in build/metal/zig."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import wheels

ROOT = wheels.ROOT
BUILD = ROOT / "build" / "metal"
CACHE = BUILD / "zig"
FOUNDATION = ROOT / "tests" / "metal_double" / "include"
TARGET = ("-target", "aarch64-macos.15.0")
STRICT = ("-std=c++20", "-Wall", "-Wextra", "-Wshadow", "-Werror")


class CompileError(Exception):
    """The compiler or linker refused; the text is its output."""


def run(*arguments: str | Path) -> None:
    """Run `zig ARGUMENTS`."""
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(CACHE), "ZIG_LOCAL_CACHE_DIR": str(CACHE)}
    command = [sys.executable, "-m", "ziglang", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{done.stderr}{done.stdout}")


def compile_object(source: Path, output: Path, *flags: str | Path) -> Path:
    """Compile C++ or Objective-C++ to an object for a Mac."""
    output.parent.mkdir(parents=True, exist_ok=True)
    arc = ("-fobjc-arc",) if source.suffix == ".mm" else ()
    run("c++", *TARGET, *STRICT, *arc, *flags, "-c", source, "-o", output)
    return output


def metal_includes(generation: int) -> tuple[str | Path, ...]:
    """Flags that find the headers of one generation."""
    return ("-I", FOUNDATION, "-I", BUILD / f"include{generation}")
