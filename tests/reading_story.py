"""What test_reading.py runs in a process of its own: reads that go wrong, and what came of it as JSON."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily import CheckpointError, Engine

SHORT, INTERRUPTED, SLOW, ERROR, END, OPEN = range(1, 7)


class Faults:
    """The preloaded library."""

    def __init__(self, library: str) -> None:
        self._native = ctypes.CDLL(library)
        self._native.lily_reads.argtypes = [
            ctypes.c_char_p,
            ctypes.c_uint32,
            ctypes.c_uint64,
            ctypes.c_uint64,
        ]
        self._native.lily_reads_count.restype = ctypes.c_uint64
        self._native.lily_opens_count.restype = ctypes.c_uint64

    def set(self, folder: Path, kind: int, n: int = 0, amount: int = 0) -> None:
        """Let reads of files in a folder go wrong; kind 0 ends that."""
        self._native.lily_reads(bytes(folder), kind, n, amount)

    def reads(self) -> int:
        """Reads since then."""
        return int(self._native.lily_reads_count())

    def opens(self) -> int:
        """Files opened since then."""
        return int(self._native.lily_opens_count())


def memory() -> dict[str, int]:
    """What this process holds: bytes of address space, and in memory; open files."""
    with open("/proc/self/statm") as file:
        space, resident = (int(text) * os.sysconf("SC_PAGE_SIZE") for text in file.read().split()[:2])
    return {"space": space, "resident": resident, "files": len(os.listdir("/proc/self/fd"))}


def tokens(folder: Path, progress: Callable[[int, int], object] | None = None) -> list[int]:
    """Open a model and let it choose a few tokens."""
    with Engine(folder, device="cpu", context=256, threads=2, max_sessions=1, progress=progress) as engine:
        engine.prefill(range(70))
        return [token.id for token in engine.step(8)]


class Story:
    """One checkpoint, and what went wrong with it."""

    def __init__(self, faults: Faults, folder: Path) -> None:
        self.faults = faults
        self.folder = folder
        self.pristine = shutil.copytree(folder, folder.with_name(folder.name + " as it was"))
        self.expected = tokens(folder)
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def harmless(self, name: str, kind: int, amount: int) -> None:
        """The system may read as little at a time as it likes."""
        self.faults.set(self.folder, kind, 0, amount)
        if tokens(self.folder) != self.expected:
            self.problems.append(f"{name}: other tokens")
        self.count(name)
        self.faults.set(self.folder, 0)

    def attempt(self, name: str, progress: Callable[[int, int], object] | None = None) -> bool:
        """Open; whether that failed. If so, then soon, and with an error that names a file."""
        start = time.monotonic()
        try:
            if tokens(self.folder, progress) != self.expected:
                self.problems.append(f"{name}: other tokens")
            return False
        except CheckpointError as error:
            if f"{self.folder}{os.sep}" not in str(error):
                self.problems.append(f"{name}: names no file: {error}")
        except BaseException as error:
            self.problems.append(f"{name}: {type(error).__name__}: {error}")
        self.count("refused")
        if time.monotonic() - start > 5:
            self.problems.append(f"{name}: took {time.monotonic() - start:.1f} s")
        return True

    def each(self, name: str, kind: int, amount: int = 0) -> None:
        """One read or opening after the other goes wrong. An end where it is found anyway is none."""
        self.faults.set(self.folder, SLOW)
        tokens(self.folder)
        most = self.faults.opens() if kind == OPEN else self.faults.reads()
        for n in range(1, most + 1):
            self.faults.set(self.folder, kind, n, amount)
            if self.attempt(f"{name} {n} of {most}"):
                self.count(name)
            elif kind != END:
                self.problems.append(f"{name} {n} of {most}: no error")
        self.faults.set(self.folder, 0)

    def changed(self, name: str, change: Callable[[Path], object]) -> None:
        """Files of weights change, at each call of the progress callback in turn."""
        for path in sorted(self.folder.glob("*.safetensors")):
            turn, calls = 0, 1
            while turn < calls:
                calls = self._changed_at(f"{name} {path.name}", turn, path, change)
                turn += 1

    def _changed_at(self, name: str, turn: int, path: Path, change: Callable[[Path], object]) -> int:
        calls = 0

        def progress(done: int, total: int) -> None:
            nonlocal calls
            if calls == turn:
                change(path)
            calls += 1

        self.faults.set(self.folder, SLOW, 0, 3000)
        failed = self.attempt(name, progress)
        self.faults.set(self.folder, 0)
        if calls > turn:  # there are more of them on some days
            self.count("changed")
            if not failed:
                self.problems.append(f"{name} at call {turn} of progress: no error")
            path.unlink(missing_ok=True)
            shutil.copyfile(self.pristine / path.name, path)
        return calls

    def tell(self) -> dict[str, Any]:
        """Everything; the second half must not hold more memory than the first."""
        for name, amount in (("a byte at a time", 1), ("1000 bytes at a time", 1000)):
            self.harmless(name, SHORT, amount)
        self.harmless("interrupted", INTERRUPTED, 0)
        self.each("error", ERROR, errno.EIO)
        before = memory()
        self.each("end", END)
        self.each("no descriptors", OPEN, errno.EMFILE)
        self.each("forbidden", OPEN, errno.EACCES)
        self.changed("truncated", lambda path: os.truncate(path, 5000))
        self.changed("written to", write_zeros)
        self.changed("replaced", replace)
        self.changed("removed", Path.unlink)
        growth = {name: size - before[name] for name, size in memory().items()}
        if tokens(self.folder) != self.expected:
            self.problems.append("other tokens at the end")
        return {"counts": self.counts, "problems": self.problems, "growth": growth}


def write_zeros(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(bytes(size // 2))


def replace(path: Path) -> None:
    other = path.with_name("other")
    shutil.copyfile(path, other)
    other.replace(path)


if __name__ == "__main__":
    faults = Faults(sys.argv[1])
    print(json.dumps({folder: Story(faults, Path(folder)).tell() for folder in sys.argv[2:]}))
