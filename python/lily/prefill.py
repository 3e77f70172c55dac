"""Iterator of prefill(): a prompt on its way into a session."""

from __future__ import annotations

import _thread
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lily.core import Ids
from lily.results import PrefillProgress
from lily.stream import Unique

if TYPE_CHECKING:
    from lily.session import Session


class Prefill(Unique, Iterator[PrefillProgress]):
    """Iterator of prefill(): each item is the progress after one more chunk."""

    _prompt: Prompt | None = None  # until __init__ has come to its end

    def __init__(self, session: Session, prompt: Prompt) -> None:
        self._session = session
        self._read = False
        self._interrupt: _Interrupt | None = None
        self._prompt = prompt

    def __next__(self) -> PrefillProgress:
        prompt = self._prompt
        if prompt is None:
            raise StopIteration
        self._read = True
        try:
            if not self._session._continue(prompt):
                raise StopIteration
        except BaseException:
            prompt.cancelled = True
            raise
        return PrefillProgress(prompt.done, len(prompt.ids))

    def close(self) -> None:
        """Cancel what is left, from any thread; tokens already processed stay in the context."""
        if self._prompt is not None:
            self._prompt.cancelled = True

    def __del__(self) -> None:
        if self._prompt is None:
            return
        if self._read:
            self.close()
        elif not sys.is_finalizing() and self._session._finish_dropped(self._prompt):
            self._interrupt = _Interrupt()


class _Interrupt:
    """Delivers Ctrl-C that came in a finaliser, where Python only prints exceptions.

    Its own finaliser runs no Python code, so the exception is raised in the code that dropped the last
    reference. There Python looks for signals at the next call or turn of a loop, not in the statement itself.
    """

    __del__ = staticmethod(_thread.interrupt_main)


class Prompt:
    """Token ids on their way into a session."""

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self.done = 0
        self.cancelled = False
