"""The doubles of CUDA's libraries as cuda_story.py uses them, and what it notes about them."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lily import _native
from lily.checkpoint import open_checkpoint
from lily.errors import DeviceError, LilyError, OutOfMemoryError, UnsupportedError
from native_engine import open_native

PLAIN, STICKY, LATE = range(3)
NO_MEMORY, LAUNCH_FAILED, UNKNOWN = 2, 719, 999
KINDS = (
    "contexts",
    "memory",
    "pinned",
    "streams",
    "events",
    "modules",
    "graphs",
    "execs",
    "current",
    "running",
    "orphans",
)
# Calls whose failure nobody hears of: what they end has ended, or its context will.
SILENT = {
    "cuCtxPopCurrent_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuEventDestroy_v2",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuModuleUnload",
    "cuStreamDestroy_v2",
    "nvrtcDestroyProgram",
    "nvrtcGetProgramLog",
    "nvrtcGetProgramLogSize",
}
OF_KERNELS = ("cuModule", "cuFunc", "cuGraphAdd", "nvrtcCompile", "nvrtcGetCUBIN", "nvrtcCreate")

Thunk = Callable[[], object]
Made = TypeVar("Made")


class Double:
    """One of the two libraries."""

    def __init__(self, path: Path) -> None:
        self.native = ctypes.CDLL(str(path))
        self.native.lily_double_calls.restype = ctypes.c_int64
        self.native.lily_double_live.restype = ctypes.c_int64
        self.kinds: tuple[str, ...] = ("",)

    def fail(self, nth: int, result: int = UNKNOWN, manner: int = PLAIN, name: str = "") -> None:
        """The n-th call from now on returns an error; 0: none does."""
        self.native.lily_double_fail(name.encode(), ctypes.c_int64(nth), result, manner)

    def failed(self) -> str:
        """The call that has failed, if it has been made by now."""
        return self._text("failed")

    def misuse(self) -> str:
        """What the real library does not allow."""
        return self._text("misuse")

    def calls(self, name: str = "") -> int:
        """How many there were since the last reset."""
        return int(self.native.lily_double_calls(name.encode()))

    def set(self, **settings: int) -> None:
        """Properties of the machine."""
        for name, value in settings.items():
            self.native.lily_double_set(name.encode(), ctypes.c_int64(value))

    def reset(self) -> None:
        """Back to a machine where all goes well."""
        self.native.lily_double_reset()

    def alive(self) -> dict[str, int]:
        """Objects that nobody has destroyed, by kind."""
        found = {kind: int(self.native.lily_double_live(kind.encode())) for kind in self.kinds}
        return {kind: count for kind, count in found.items() if count}

    def digest(self) -> int:
        """A number made of the device's memory."""
        self.native.lily_double_digest.restype = ctypes.c_uint64
        return int(self.native.lily_double_digest())

    def _text(self, what: str) -> str:
        text = ctypes.create_string_buffer(400)
        getattr(self.native, f"lily_double_{what}")(text, len(text))
        return text.value.decode()


class Report:
    """What went wrong that should not, and which calls were made to fail."""

    def __init__(self, driver: Double) -> None:
        self.driver = driver
        self.problems: list[str] = []
        self.failed: Counter[str] = Counter()

    def require(self, right: object, *what: object) -> None:
        """Note a problem unless it is right."""
        text = " ".join(map(str, what))
        if not right and text not in self.problems and len(self.problems) < 20:
            self.problems.append(text)

    def nothing_left(self, *where: object) -> None:
        """After close() there is nothing of Lily's in the driver."""
        gc.collect(0)
        self.require(not (alive := self.driver.alive()), *where, "left", alive)
        self.require(not (misuse := self.driver.misuse()), *where, misuse)

    def judge(self, where: str, failed: str, error: BaseException | None, result: int) -> None:
        """Compare an error with the call that has failed."""
        self.failed[failed] += 1
        where = f"{where}: {failed} fails with {result}:"
        if error is None:
            self.require(failed in SILENT, where, "no error")
            return
        wanted: type[LilyError] = DeviceError
        if failed == "cuInit":
            wanted = UnsupportedError
        elif result == NO_MEMORY and failed.startswith("cu"):
            wanted = OutOfMemoryError
        self.require(type(error) is wanted, where, repr(error))
        self.require(str(error).startswith("cuda: ") and failed in str(error), where, error)
        if failed.startswith(OF_KERNELS):
            self.require(any(name in str(error) for name in kernel_names()), where, error)


def kernel_names() -> Iterable[str]:
    """Names of kernels in messages."""
    return {str(kernel["name"]) for kernel in _native.kernels()}


def attempt(call: Callable[[], Made]) -> tuple[Made | None, BaseException | None]:
    """What a call returns, or raises, without the frames, which hold on to objects."""
    try:
        return call(), None
    except (LilyError, ValueError) as error:
        return None, error.with_traceback(None)


def error_of(call: Thunk) -> BaseException | None:
    """What a call raises."""
    return attempt(call)[1]


class Model:
    """A small random checkpoint, opened without tokenizer and cache."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = open_checkpoint(folder)
        _native.set_cuda_cache("")

    def open(self, threads: int = 1) -> _native.Engine:
        """Open an engine; few variants and little memory, so that it is quick."""
        return open_native(
            self._checkpoint, device="cuda", context=128, max_sessions=2, threads=threads, tile=8
        )


def ids(count: int) -> Any:
    """Some prompt."""
    return np.arange(count, dtype=np.int32) % 300
