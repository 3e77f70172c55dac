"""Iterators that any thread may close, and locks a forked child does not wait for."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from lily.errors import LilyError

if TYPE_CHECKING:
    from lily._native import Flag
    from lily.admission import Admission

T = TypeVar("T")


class ProcessLock:
    """A reentrant lock of one process: calling it gives the lock, for a with statement.

    A thread that holds it does not exist in a forked child, which would wait for ever.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    @property
    def foreign(self) -> bool:
        """Whether this is a child of the process that made the lock."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise LilyError in a forked child."""
        if self.foreign:
            raise LilyError("this engine belongs to the parent process; open a new one after fork()")

    # The lock itself and not an __enter__ in Python, in which Ctrl-C could come between taking and having it.
    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock.

        Raises:
            LilyError: This is a forked child.
        """
        self.check()
        return self._lock

    def take(self) -> bool:
        """Take the lock unless that means waiting; True has to be followed by give()."""
        return not self.foreign and self._lock.acquire(blocking=False)

    def give(self) -> None:
        """Give the lock back."""
        self._lock.release()


def new_flag() -> Flag:
    """Return what tells a loop that it is over; any thread may set it, and a call that waits looks at it."""
    from lily import _native  # slow to import

    return _native.Flag()


class Unique:
    """Base of what stands for state on a device, which cannot be copied."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a lily.{type(self).__name__} cannot be copied or pickled")


class Stream(Unique, Iterator[T]):
    """Iterator of generate() and step(), to be read from one thread at a time.

    close() may be called from any thread, or leave a with statement to call it: a loop that reads the stream
    then ends after at most one more step, or chunk of a prompt, and the session stays usable.
    """

    def __init__(
        self, loop: Generator[T, None, None], flag: Flag, admission: Admission | None = None
    ) -> None:
        self._loop = loop
        self._flag = flag
        self._admission = admission
        self._inside = False  # the thread that has the lock is in the loop
        self._lock = ProcessLock()

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Stream[T]:
        return self

    def __next__(self) -> T:
        try:
            with self._lock():
                if self._flag.raised:
                    raise StopIteration
                if self._inside:
                    raise LilyError("a stream cannot be read from within its own progress callback")
                self._inside = True
                try:
                    return next(self._loop)
                finally:
                    self._inside = False
        finally:
            if self._flag.raised:
                self._end()

    def wait_for(self, reader: object) -> None:
        """Note that reading only goes on when a task does."""
        if self._admission is not None and reader is not None:
            self._admission.read(self._flag, reader)

    def stop(self) -> None:
        """Have the loop that reads the stream end, and do nothing else."""
        self._flag.set()

    def close(self) -> None:
        """End the stream, without waiting for a thread that reads it; a second call does nothing."""
        self._flag.set()
        self._end()

    def _end(self) -> None:
        """Let go of what the loop holds, unless a thread is in it: that one does this when it leaves."""
        if self._lock.take():
            try:
                if not self._inside:  # it is if a progress callback closes the stream
                    self._loop.close()
            finally:
                self._lock.give()
