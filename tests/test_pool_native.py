"""How fast the thread pool of the CPU device hands work over."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from compiler import compiler

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.timing
def test_pool__thread_that_spins_begins_at_once(tmp_path: pathlib.Path) -> None:
    """Between the stages of a plan it spins. The limit is ten times the aim, as machines are busy."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if usable < 2:
        pytest.skip("needs two processors")
    sources = [
        ROOT / "tests" / "native" / "pool_wakeup.cpp",
        ROOT / "src" / "lily_native" / "thread_pool.cpp",
    ]
    command = [compiler(), "-std=c++20", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-pthread"]
    command += [f"-I{ROOT / 'src' / 'lily_native'}", *map(str, sources), "-o", str(tmp_path / "wakeup")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    medians = []
    for _ in range(5):
        done = subprocess.run([str(tmp_path / "wakeup")], capture_output=True, text=True, check=True)
        print(done.stdout)
        lines = (line.split() for line in done.stdout.splitlines())
        medians.append({name: int(median) for name, median, _ in lines}["spinning"])
    assert min(medians) < 20_000  # ns
