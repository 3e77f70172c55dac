"""Every call of CUDA's driver and compiler made to fail, on doubles of both: no GPU is needed.

The doubles lie in tests/cuda_double, what is done with them in cuda_story.py.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiler import compiler
from make_checkpoint import Shape, make_checkpoint

TESTS = Path(__file__).resolve().parent
SYSTEM_COMPILER = Path("/usr/local/cuda/lib64/libnvrtc.so")  # found wherever the loader looks
# How many calls each story has to make fail, at least: fewer say that it did not come to its end.
STORIES = {
    "opening": 1000,
    "parallel": 50,
    "compiling": 400,
    "using": 1500,
    "traced": 300,
    "sticky": 700,
    "late": 700,
    "closing": 50,
    "launching": 80,
    "copying": 0,
    "machines": 0,
    "threads": 40,
}
SHAPE = Shape(
    vocab=512,
    hidden=128,
    layers=2,
    attention_interval=2,
    heads=8,
    kv_heads=1,
    delta_key_heads=1,
    delta_value_heads=2,
    experts=4,
    experts_used=2,
    inner=64,
    shared_inner=64,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="CUDA's libraries are opened by their Linux names"
)

Story = Callable[[str], Any]


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with both libraries and a small checkpoint."""
    folder = tmp_path_factory.mktemp("cuda")
    command = [compiler(), "-std=c++20", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fPIC", "-shared"]
    command += ["-fvisibility=hidden", "-pthread"]
    libraries = {
        "libcuda.so.1": ("driver.cpp", "objects.cpp", "control.cpp"),
        "libnvrtc.so.13": ("nvrtc.cpp", "control.cpp"),
    }
    for name, sources in libraries.items():
        files = [str(TESTS / "cuda_double" / source) for source in sources]
        line = [*command, *files, f"-Wl,-soname,{name}", "-o", str(folder / name), "-ldl"]
        built = subprocess.run(line, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
    make_checkpoint(folder / "model", SHAPE)
    return folder


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with a cache folder of its own."""
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    return subprocess.run(
        [sys.executable, *arguments], env=variables, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def story(doubles: Path) -> Story:
    """What cuda_story.py prints, once for each story."""

    @functools.cache
    def tell(name: str) -> Any:
        environment = {"LILY_DEBUG": "trace"} if name == "traced" else {}
        done = python(doubles, str(TESTS / "cuda_story.py"), str(doubles), name, **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return tell


@pytest.mark.parametrize("name", STORIES)
def test_story__failures_are_typed_and_leave_nothing(story: Story, name: str) -> None:
    """cuda_story.py says what each does, and what it finds wrong."""
    found = story(name)
    assert found["problems"] == []
    assert sum(found["failed"].values()) >= STORIES[name]


def test_story__every_function_fails_somewhere(story: Story) -> None:
    """All that the native core looks up, but for texts of errors."""
    header = (TESTS.parent / "src" / "lily_native" / "cuda_api.h").read_text()
    used = set(re.findall(r"\b(?:cu[A-Z]|nvrtc[A-Z])\w+(?=, *(?:\\\n *)?\()", header))
    failed = {function for name in STORIES for function in story(name)["failed"]}
    assert len(used) > 40
    assert used - failed == {"cuGetErrorString"}


# What a machine may lack.

OPEN = """
import sys
sys.modules["nvidia"] = None  # no compiler in a package
import lily
print(lily.Engine("demo", device="cuda", context=128).info()["device_info"]["compiler"])
"""


def machine(folder: Path, *, broken: tuple[str, ...] = (), empty: tuple[str, ...] = ()) -> Path:
    """Add libraries to a folder: some that are none, and some without any function."""
    folder.mkdir()
    for name in broken:
        (folder / name).write_text("no library")
    for name in empty:
        line = [compiler(), "-shared", "-x", "c++", os.devnull, "-o", str(folder / name)]
        subprocess.run(line, check=True)
    return folder


def error_on(folder: Path) -> str:
    """What Engine() says on a machine with the libraries of a folder."""
    done = python(folder, "-c", OPEN, LD_LIBRARY_PATH=str(folder))
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1]


def test_machine__without_a_driver(tmp_path: Path) -> None:
    found = error_on(machine(tmp_path / "lib", broken=("libcuda.so.1", "libcuda.so")))
    assert found.startswith("lily.errors.UnsupportedError: cuda: ")
    assert found.endswith("; an NVIDIA GPU and its driver are needed")


def test_machine__with_an_old_driver(tmp_path: Path) -> None:
    found = error_on(machine(tmp_path / "lib", empty=("libcuda.so.1",)))
    assert found == "lily.errors.UnsupportedError: cuda: cuInit is missing: CUDA 12.4 is needed"


def test_machine__without_a_compiler(tmp_path: Path, doubles: Path) -> None:
    if SYSTEM_COMPILER.exists():
        pytest.skip(f"{SYSTEM_COMPILER} is on this machine")
    folder = machine(tmp_path / "lib", broken=("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"))
    shutil.copy(doubles / "libcuda.so.1", folder)
    found = error_on(folder)
    assert found.startswith("lily.errors.UnsupportedError: cuda: ")
    assert "; install CUDA's run-time compiler: pip install nvidia-cuda-nvrtc" in found


def test_machine__with_an_old_compiler(tmp_path: Path, doubles: Path) -> None:
    folder = machine(tmp_path / "lib", empty=("libnvrtc.so.13",))
    shutil.copy(doubles / "libcuda.so.1", folder)
    found = error_on(folder)
    assert re.fullmatch(
        r"lily.errors.UnsupportedError: cuda: nvrtc\w+ is missing: CUDA 12.4 is needed", found
    )


@pytest.mark.parametrize(("driver", "wanted"), [(12060, "12.0"), (13000, "13.0")])
def test_machine__takes_a_compiler_that_the_driver_knows(
    tmp_path: Path, doubles: Path, driver: int, wanted: str
) -> None:
    folder = machine(tmp_path / "lib")
    shutil.copy(doubles / "libcuda.so.1", folder)
    for major in (12, 13):
        shutil.copy(doubles / "libnvrtc.so.13", folder / f"libnvrtc.so.{major}")
    setting = (
        f'import ctypes; ctypes.CDLL("libcuda.so.1").lily_double_set(b"version", ctypes.c_int64({driver}))\n'
    )
    done = python(folder, "-c", setting + OPEN, LD_LIBRARY_PATH=str(folder))
    assert done.stdout == wanted + "\n", done.stderr
