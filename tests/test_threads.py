"""Closing iterators from other threads, fork() in the middle of work, and Ctrl-C in a finaliser."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lily import Engine, LilyError, Prefill, Session, Stream
from replies import FRANCE, STORY, ids_of

LONG = [(i * 7919) % 4000 for i in range(900)]


class Reader(threading.Thread):
    """Reads an iterator to its end; says when the first item is there, and what it raised."""

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__()
        self._items = items
        self.count = 0
        self.begun = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for _ in self._items:
                self.count += 1
                self.begun.set()
        except BaseException as error:
            self.error = error

    def ended(self) -> bool:
        """Wait for the end; whether it came without an error."""
        self.join(20)
        return not self.is_alive() and self.error is None


def endless(session: Session, kind: str) -> Any:
    if kind == "step":
        session.prefill(STORY)
        return session.step(900, temperature=1)
    if kind == "generate":
        return session.generate(STORY, ignore_eos=True)
    return session.prefill(LONG)


@pytest.mark.parametrize("kind", ["generate", "step", "prefill"])
def test_close__from_another_thread_ends_the_loop(engine: Engine, session: Session, kind: str) -> None:
    expected = ids_of(list(engine.generate(FRANCE, temperature=0)))
    items = endless(session, kind)
    reader = Reader(items)
    assert reader.begun.wait(20)
    items.close()
    again = session.generate(FRANCE, temperature=0)  # without waiting for the reader
    assert ids_of(list(again)) == expected
    assert reader.ended(), reader.error
    assert reader.count < 900
    assert list(items) == []
    items.close()


def test_close__in_a_long_prompt(session: Session) -> None:
    inside, closed = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        inside.set()
        assert closed.wait(20)

    chunks = session.generate(LONG, progress=progress)
    reader = Reader(chunks)
    assert inside.wait(20)
    chunks.close()
    closed.set()
    assert reader.ended(), reader.error
    assert reader.count == 0
    assert session.position < len(LONG)


def test_close__just_before_the_first_item(session: Session) -> None:
    """A reader that comes late leaves alone what another call has made of the session."""
    late: Stream[Any]
    for late in (session.generate(LONG), session.step()):
        session.reset()
        session.prefill(STORY)
        current = session.generate(None, ignore_eos=True)
        next(current)
        owner = session._owner
        late._flag.set()  # what close() does first; the reader is past the check of Stream
        assert list(late._loop) == []
        assert session._owner is owner
        assert next(current).token_ids


def test_close__in_a_progress_callback(session: Session) -> None:
    chunks = session.generate(LONG, progress=lambda done, total: chunks.close())
    assert list(chunks) == []
    assert session.position < len(LONG)


def test_close__makes_the_engines_own_session_free(device: str) -> None:
    with Engine("demo", device=device, context=1024, max_sessions=1) as engine:
        reader = Reader(chunks := engine.generate(STORY, ignore_eos=True))
        assert reader.begun.wait(20)
        chunks.close()
        assert ids_of(list(engine.generate(FRANCE, temperature=0, max_tokens=5)))
        assert reader.ended(), reader.error


def test_close__by_with_and_while_a_prompt_is_completed(session: Session) -> None:
    with session.generate(STORY, ignore_eos=True) as chunks:
        next(chunks)
    assert list(chunks) == []
    held = session.prefill(LONG)
    next(held)
    held.close()
    with session.step() as tokens:
        next(tokens)
    assert session.position < 200


def test_prefill__says_that_it_is_out_of_date(session: Session) -> None:
    calls: list[Callable[[], object]] = [session.reset, lambda: next(session.generate(STORY))]
    for call in calls:
        session.reset()
        prompt = session.prefill(LONG)
        next(prompt)
        call()
        with pytest.raises(LilyError, match="out of date"):
            list(prompt)
        prompt.close()
        assert list(prompt) == []
    session.reset()
    dropped = session.prefill(LONG)
    session.reset()
    del dropped
    assert session.position == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork__in_the_middle_of_a_call(device: str) -> None:
    """A child whose parent held every lock is refused at once and can clean up."""
    codes: list[int] = []
    with Engine("demo", device=device, context=1024, prefill_chunk=64) as engine:
        session = engine.session()
        inside, leave = threading.Event(), threading.Event()
        native = session._native

        class Slow:
            """The native session, stopped in the middle of a step."""

            position = 4

            def step(self, ahead: int, flag: object) -> Any:
                inside.set()
                leave.wait(20)
                return native.step(ahead)

            def __getattr__(self, name: str) -> Any:
                return getattr(native, name)

        session.prefill(STORY)
        session._native = Slow()  # type: ignore[assignment]
        tokens = session.step(1)
        reader = Reader(tokens)
        assert inside.wait(20)
        other = engine.session()
        garbage = [other.prefill(LONG), engine.session(), engine.generate(STORY), other]
        with engine._core.lock(), other._lock():
            arguments = (engine, session, tokens, garbage, codes)
            thread = threading.Thread(target=fork_and_clean_up, args=arguments)
            thread.start()
            thread.join(30)
        leave.set()
        assert reader.ended(), reader.error
        assert codes == [0]


def fork_and_clean_up(
    engine: Engine, session: Session, tokens: Stream[Any], garbage: list[Any], codes: list[int]
) -> None:
    child = os.fork()
    if child:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return
    signal.alarm(10)  # a child that hangs is killed, and the parent sees it
    calls: list[Callable[[], object]] = [
        lambda: session.prefill(STORY),
        lambda: session.logits,
        lambda: next(session.step()),
        lambda: next(tokens),
        lambda: next(engine.generate(STORY)),
        lambda: engine.prefill(STORY),
        lambda: engine.score(STORY),
    ]
    wrong = [number for number, call in enumerate(calls, 1) if not refused(call)]
    tokens.close()
    session.close()
    garbage.clear()
    gc.collect()
    engine.close()
    os._exit(wrong[0] if wrong else 0)


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except LilyError as error:
        return "parent process" in str(error)
    return False


INTERRUPTED = """
import os, signal, sys, threading
from lily import Engine
engine = Engine("demo", device=sys.argv[1], context=4096, prefill_chunk=64)
session = engine.session()
native = session._native
class Slow:
    chunks = 0
    def prefill(self, ids, flag):
        self.chunks += 1
        if self.chunks == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return native.prefill(ids)
    def __getattr__(self, name):
        return getattr(native, name)
session._native = Slow()
try:
    session.prefill([5] * 4000)
    for _ in range(1000):  # Python looks for signals at the next call or turn of a loop, not in the statement
        pass
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted at", session.position)
session.prefill([5] * 10)
print("then", session.position, len(session.tokens))
"""


def test_prefill__ctrl_c_in_the_finaliser_reaches_the_caller(device: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, device]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    position = int(lines[0].removeprefix("interrupted at "))
    assert 128 <= position <= 192
    assert lines[1] == f"then {position + 10} {position + 10}"


@pytest.mark.parametrize("call", ["reset", "position", "logits", "prefill", "generate", "step"])
def test_prefill__an_error_in_the_finaliser_comes_at_the_next_call(session: Session, call: str) -> None:
    class Broken:
        position = 0

        def prefill(self, ids: object, flag: object) -> int:
            raise LilyError("it broke")

    native, session._native = session._native, Broken()  # type: ignore[assignment]
    session.prefill(STORY)
    session._native = native
    calls: dict[str, Callable[[], object]] = {
        "reset": session.reset,
        "position": lambda: session.position,
        "logits": lambda: session.logits,
        "prefill": lambda: session.prefill(STORY),
        "generate": lambda: next(session.generate(STORY)),
        "step": lambda: next(session.step()),
    }
    with pytest.raises(LilyError, match="it broke"):
        calls[call]()
    assert session.position == 0


@pytest.mark.filterwarnings("error")
def test_objects__that_failed_to_be_made_are_silent() -> None:
    for kind in (Prefill, Stream):
        with pytest.raises(TypeError):
            kind()  # type: ignore[call-arg]


def test_objects__are_not_copied(engine: Engine, session: Session) -> None:
    things = (engine, session, session.generate(STORY), session.prefill(STORY))
    for thing in things:
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"a lily.{type(thing).__name__} cannot be copied or pickled"):
                call(thing)


def test_objects__say_what_they_are(device: str) -> None:
    engine = Engine("demo", device=device, context=128, max_sessions=1)
    session = engine.session()
    session.prefill([5, 6, 7])
    assert repr(engine) == f"<lily.Engine demo on {device}, context 128, open>"
    assert repr(session) == "<lily.Session at position 3>"
    session.close()
    assert repr(session) == "<lily.Session closed>"
    with pytest.raises(LilyError, match="the session is closed"), session:
        pass
    engine.close()
    assert repr(engine) == f"<lily.Engine demo on {device}, context 128, closed>"
    with pytest.raises(LilyError, match="the engine is closed"), engine:
        pass


def test_step__interrupt_after_the_work_keeps_the_token(device: str) -> None:
    """Ctrl-C that arrives when native code has just returned: the session knows the token that it fed."""
    with Engine("demo", device=device, context=128, prefill_chunk=64) as engine, engine.session() as session:
        list(session.prefill("Once upon a time"))
        native = session._native

        class Interrupted:
            def __getattr__(self, name: str) -> Any:
                return getattr(native, name)

            def step(self, ahead: int, flag: object) -> Any:
                native.step(ahead)
                raise KeyboardInterrupt

        session._native = Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            next(session.step(1))
        session._native = native
        assert len(session.tokens) == session.position
        assert session.tokens[-1] == native.last_token()
