"""Requests that wait for a place on an engine, in the order in which they came."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from lily.errors import LilyError

if TYPE_CHECKING:
    from lily._native import Flag

T = TypeVar("T")

_LOOK = 0.05  # seconds after which a waiting request looks whether it is over


class Admission:
    """The queue of an engine's requests.

    A request that holds a place is `running` until it ends. One that waits for a place which only requests
    of its own thread can give back would wait for ever, so that is an error.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._readers: dict[int, int] = {}  # the thread that last read each running request

    def wait(self, flag: Flag, attempt: Callable[[], T | None]) -> T | None:
        """Call `attempt` when it is this request's turn, until it gives something; None once it is over.

        Raises:
            LilyError: Nobody else could give a place back.
        """
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while not flag.raised and not flag.expired:
                    if self._queue[0] is ticket:
                        got = attempt()
                        if got is not None:
                            return got
                        self._check_hope()
                    self._changed.wait(_LOOK)
                return None
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _check_hope(self) -> None:
        me = threading.get_ident()
        if all(reader == me for reader in list(self._readers.values())):
            who = "replies that this thread has not read to their end" if self._readers else "open sessions"
            raise LilyError(
                f"all sessions are in use by {who}; close one or open the engine with a larger max_sessions"
            )

    @contextmanager
    def running(self, flag: Flag) -> Iterator[None]:
        """Be a running request for a with statement."""
        self._readers[id(flag)] = threading.get_ident()
        try:
            yield
        finally:
            self._readers.pop(id(flag), None)
            self.notify()

    def read(self, flag: Flag) -> None:
        """Note that this thread reads a request, if it is a running one."""
        if id(flag) in self._readers:
            self._readers[id(flag)] = threading.get_ident()

    def notify(self) -> None:
        """A place may have become free."""
        if (
            os.getpid() != self._pid
        ):  # in a forked child, where nobody waits and the lock may be held for ever
            return
        with self._changed:
            self._changed.notify_all()
