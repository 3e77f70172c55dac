"""Requests that wait for a place on an engine, in the order in which they came."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lily.errors import LilyError

if TYPE_CHECKING:
    from lily._native import Flag

T = TypeVar("T")

_LOOK = 0.05  # seconds after which a waiting request looks whether it is over


class Admission:
    """The queue of an engine's requests.

    A request that has got a place runs until end(). Somebody reads it: a thread, or a task of an event loop.
    When all who read running requests wait in this queue themselves, or are gone, nobody can give a
    place back, and waiting is an error.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._queue: list[tuple[object, ...]] = []  # of each waiting request, who waits
        self._readers: dict[int, object] = {}  # of each running request, who reads it
        self._tried = False  # since something was given back, the first in the queue has tried in vain

    def wait(self, flag: Flag, attempt: Callable[[], T | None]) -> T | None:
        """Call `attempt` when it is this request's turn, until it gives a place; None once it is over.

        From then on the request runs, and end() has to be called.

        Raises:
            LilyError: Nobody could give a place back.
        """
        thread = threading.current_thread()
        ticket = (thread, getattr(thread, "task", None), object())
        with self._changed:
            self._queue.append(ticket)
            try:
                while not flag.raised and not flag.expired:
                    if self._queue[0] is ticket:
                        if (got := attempt()) is not None:
                            self._readers[id(flag)] = thread
                            return got
                        self._tried = True
                    if self._tried:
                        self._check_hope()
                    self._changed.wait(_LOOK)
                return None
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _check_hope(self) -> None:
        readers = list(self._readers.values())
        waiting = {id(who) for ticket in self._queue for who in ticket}
        if any(id(reader) not in waiting and _is_there(reader) for reader in readers):
            return
        who = "replies that nobody goes on reading" if readers else "open sessions"
        raise LilyError(
            f"all sessions are in use by {who}; close one or open the engine with a larger max_sessions "
            "(the engine's own session counts: reset() gives its place back)"
        )

    def end(self, flag: object) -> None:
        """A request, or something else that had a place, has ended and given it back."""
        if os.getpid() != self._pid:  # a forked child: nobody waits, and the lock may be held for ever
            return
        with self._changed:
            self._readers.pop(id(flag), None)
            self._tried = False
            self._changed.notify_all()

    def read(self, flag: Flag, reader: object = None) -> None:
        """Note who reads a request, if it is a running one; default: this thread."""
        if id(flag) in self._readers:
            self._readers[id(flag)] = threading.current_thread() if reader is None else reader


def _is_there(reader: object) -> bool:
    """Whether a thread or task has not ended."""
    if isinstance(reader, threading.Thread):
        return reader.is_alive()
    return not reader.done()  # type: ignore[attr-defined]
