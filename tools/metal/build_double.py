"""Build Lily on Linux with its Metal device, against the software double of Metal (tests/metal_double).

FOLDER gets CMake's files, the double's self-test, and in FOLDER/root a package `lily` to put on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11

import zig
from check_macho import NEW, tool

COMPILER = "clang++-19"  # only clang emits Apple's Objective-C ABI


def call(*command: str | Path) -> None:
    """Run a step of the build; its output is this program's."""
    subprocess.run(list(map(str, command)), check=True)


def build(source: Path, folder: Path, sanitize: str, jobs: int) -> None:
    """Configure once, build and install."""
    if not (folder / "build.ninja").exists():
        options = {
            "CMAKE_CXX_COMPILER": tool(COMPILER),
            "CMAKE_MAKE_PROGRAM": tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "LILY_METAL_DOUBLE": "ON",
            "LILY_BENCH": "ON",  # so that what only benchmarks run is checked too
            "LILY_METAL_HEADERS": zig.BUILD / f"include{NEW}",
            "LILY_SANITIZE": sanitize,
        }
        defines = [f"-D{name}={value}" for name, value in options.items()]
        call(tool("cmake"), "-S", source, "-B", folder, "-G", "Ninja", *defines)
    call(tool("ninja"), "-C", folder, "-j", str(jobs))
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    call(tool("cmake"), "--install", folder, "--prefix", root)
    shutil.copytree(source / "python" / "lily", root / "lily", dirs_exist_ok=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Build Lily against the software double of Metal.")
    parser.add_argument("folder", type=Path, help="where to build")
    parser.add_argument("--source", type=Path, default=zig.ROOT, help="tree to build (default: this one)")
    parser.add_argument("--sanitize", default="", metavar="NAMES", help="address,undefined or thread")
    parser.add_argument("--jobs", type=int, default=2, help="compilers that run at once (default: 2)")
    options = parser.parse_args()
    try:
        build(options.source.resolve(), options.folder.resolve(), options.sanitize, options.jobs)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


if __name__ == "__main__":
    main()
