"""Requests that wait for a place on an engine, in the order in which they came."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from lily.errors import LilyError

if TYPE_CHECKING:
    from lily._native import Flag

T = TypeVar("T")

_LOOK = 0.05  # seconds after which a waiting request looks whether it is over


class _Ticket:
    """A waiting request."""

    def __init__(self) -> None:
        thread = threading.current_thread()
        self.who = (thread, getattr(thread, "task", None))
        self.wake: SimpleQueue[None] = SimpleQueue()


class Admission:
    """The queue of an engine's requests.

    A request that has got a place runs until end(). Somebody reads it: a thread, or a task of an event loop.
    When all who read running requests wait in this queue themselves, or are gone, nobody can give a place
    back, and waiting is an error.

    There is no lock: finalisers end requests at any time, and Ctrl-C may come anywhere. Only the first in the
    queue tries to get a place. What was given back shows in the version before its reader goes, so whoever
    finds nobody to hope for, and the version of the last vain attempt, is right.
    """

    def __init__(self) -> None:
        self._queue: list[_Ticket] = []
        self._readers: dict[int, object] = {}  # of each running request, who reads it
        self._versions = itertools.count(1)
        self._version, self._tried = 0, -1

    def wait(self, flag: Flag, attempt: Callable[[], T | None]) -> T | None:
        """Call `attempt` when it is this request's turn, until it gives a place; None once it is over.

        From then on the request runs, and end() has to be called.

        Raises:
            LilyError: Nobody could give a place back.
        """
        ticket = _Ticket()
        try:
            self._queue.append(ticket)
            while not flag.raised and not flag.expired:
                if self._queue[0] is ticket:
                    version = self._version
                    if (got := attempt()) is not None:
                        self._readers[id(flag)] = ticket.who[0]
                        return got
                    self._tried = version
                self._check_hope()
                with contextlib.suppress(Empty):
                    ticket.wake.get(timeout=_LOOK)
            return None
        finally:
            with contextlib.suppress(ValueError):  # Ctrl-C came before it was there
                self._queue.remove(ticket)
            self._wake()

    def _check_hope(self) -> None:
        version = self._tried
        if version != self._version:
            return
        readers = list(self._readers.values())
        waiting = {id(who) for ticket in self._queue.copy() for who in ticket.who}
        if any(id(reader) not in waiting and _is_there(reader) for reader in readers):
            return
        if version != self._version:
            return
        who = "replies that nobody goes on reading" if readers else "open sessions"
        raise LilyError(
            f"all sessions are in use by {who}; close one or open the engine with a larger max_sessions "
            "(the engine's own session counts: reset() gives its place back)"
        )

    def end(self, flag: Flag | None = None) -> None:
        """A request, or something else that had a place, has ended and given it back."""
        self._version = next(self._versions)
        self._readers.pop(id(flag), None)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(IndexError):
            self._queue[0].wake.put(None)

    def read(self, flag: Flag, reader: object = None) -> None:
        """Note who reads a request, if it is a running one; default: this thread."""
        if id(flag) in self._readers:
            self._readers[id(flag)] = threading.current_thread() if reader is None else reader


def _is_there(reader: object) -> bool:
    """Whether a thread or task has not ended."""
    if isinstance(reader, threading.Thread):
        return reader.is_alive()
    return not reader.done()  # type: ignore[attr-defined]
