"""What test_failing.py runs in a process of its own: allocations that fail, and what came of it as JSON."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from lily import Engine, OutOfMemoryError, _native
from lily.checkpoint import Checkpoint, open_checkpoint
from native_engine import open_native

Act: TypeAlias = Callable[[], Any]
Prepare: TypeAlias = Callable[[], tuple[Act, Act]]

IDS = np.array([(i * 7919) % 320 for i in range(70)], np.int32)  # fed in passes of 64 and 6
GREEDY: tuple[Any, ...] = (0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, {})
BIASED: tuple[Any, ...] = (0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, {5: -1.0})
SAMPLED: tuple[Any, ...] = (1.0, 40, 0.9, 0.01, 0.1, 0.1, 1.1, 7, {3: 1.5, 5: -100.0, 7: 1.0, 8: 1.0})


class Failing:
    """The preloaded library."""

    def __init__(self, library: str) -> None:
        self._native = ctypes.CDLL(library)
        self._native.lily_fail_at.argtypes = [ctypes.c_uint64, ctypes.c_bool]
        self._native.lily_fail_count.restype = ctypes.c_uint64
        self._native.lily_fail_start()  # Lily's libraries are loaded

    def at(self, n: int, rest: bool = False) -> None:
        """Let the n-th allocation from now on fail, or that and the rest; 0 lets all succeed."""
        self._native.lily_fail_at(n, rest)

    def count(self) -> int:
        """How many have failed."""
        return int(self._native.lily_fail_count())

    def site(self) -> str:
        """Where the first of them was."""
        text = ctypes.create_string_buffer(500)
        self._native.lily_fail_site(text, len(text))
        return text.value.decode().rsplit("/", 1)[-1]


class Tally:
    """What came of the failures in one kind of call."""

    def __init__(self, failing: Failing, check_every: int) -> None:
        self._failing = failing
        self._check_every = check_every
        self.calls = 0  # in which something has failed
        self.errors: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    def run(self, prepare: Prepare, *, rest: bool = False, first: int = 1, stride: int = 1) -> None:
        """Fail at each place in turn, alone or with the rest, until a call has fewer places.

        `prepare` gives a call, which is made again after it has failed and then has its usual result, and a
        check whose result does not depend on what happened before.
        """
        self._failing.at(0)
        act, check = prepare()
        expected, wanted = act(), check()
        n = first
        while self._once(n, rest, prepare, expected, wanted):
            n += stride

    def _once(self, n: int, rest: bool, prepare: Prepare, expected: object, wanted: object) -> bool:
        act, check = prepare()
        found = error = None
        self._failing.at(n, rest)
        try:
            found = act()
        except BaseException as raised:
            error = raised
        failed, site = self._failing.count(), self._failing.site()
        self._failing.at(0)
        if not failed:
            return False

        def problem(text: str) -> None:
            self.problems.append(f"allocation {n}{' and the rest' * rest}, {site}: {text}")

        self.calls += 1
        self.errors[type(error).__name__] += 1
        if error is not None and not isinstance(error, OutOfMemoryError):
            problem(f"{type(error).__name__}: {error}")
        if (act() if error is not None else found) != expected:
            problem("another result")
        if self.calls % self._check_every == 0 and check() != wanted:
            problem("another result of later calls")
        return True


def memory() -> dict[str, int]:
    """What this process holds: bytes of address space, open files."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(os.listdir("/proc/self/fd"))}


def open_small(checkpoint: Checkpoint) -> _native.Engine:
    return open_native(checkpoint, context=320, prefill_chunk=128, max_sessions=2)


def feed(session: _native.Session, ids: np.ndarray[Any, Any]) -> None:
    """Prefill; a call that fails is to have done nothing."""
    while len(ids):
        before = session.position
        try:
            ids = ids[session.prefill(ids) :]
        except BaseException:
            assert session.position == before
            raise


def walk(session: _native.Session) -> list[Any]:
    """A prompt and tokens of each kind, from the beginning."""
    session.reset()
    session.set_sampling(*GREEDY)
    feed(session, IDS)
    found: list[Any] = [session.logits().tobytes()]
    found += [session.step(0) for _ in range(3)]
    session.set_sampling(*SAMPLED)
    found += [session.step(0) for _ in range(3)]
    return [*found, session.top_logprobs(5)[0].tolist()]


class Scenes:
    """Preparations: each gives the call that fails, and the check."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self.engine = open_small(checkpoint)
        self.session = self.engine.session()
        self.wanted = walk(self.session)
        self.opened: list[_native.Engine] = []

    def open(self) -> tuple[Act, Act]:
        def act() -> int:
            open_small(self.checkpoint).close()
            return 1

        def check() -> list[Any]:
            engine = open_small(self.checkpoint)
            session = engine.session()
            found = session.prefill(IDS[:6])
            engine.close()
            return [found]

        return act, check

    def fresh(self, kind: str) -> tuple[Act, Act]:
        """Calls that are the first to need a plan."""
        for engine in self.opened:
            engine.close()
        engine = open_small(self.checkpoint)
        self.opened = [engine]
        session = engine.session()
        if kind != "prefill" and kind != "score":
            feed(session, IDS)
            if kind == "sampled":
                session.set_sampling(*SAMPLED)
        return self.call(kind, session), lambda: self.check(session)

    def warm(self, kind: str) -> tuple[Act, Act]:
        """Calls that find every plan recorded."""
        self.session.close()
        self.session = self.engine.session()
        feed(self.session, IDS)
        if kind == "sampled":
            self.session.set_sampling(*SAMPLED)
            self.session.step(0)
        return self.call(kind, self.session), lambda: self.check(self.session)

    def check(self, session: _native.Session) -> bool:
        return walk(session) == self.wanted

    def call(self, kind: str, session: _native.Session) -> Act:
        start = session.position

        def prefill() -> bytes:
            feed(session, IDS[session.position - start :])
            return session.logits().tobytes()

        def step() -> tuple[int, float]:
            assert session.position == start
            return session.step(1)

        def sampling() -> None:
            session.set_sampling(*BIASED)
            try:
                session.set_sampling(*SAMPLED)
            except BaseException:
                for _ in range(4):
                    best = int(session.logits().argmax())
                    assert session.step(0)[0] == best, "half of the parameters"
                raise

        def score() -> list[Any]:
            ids = IDS[:6]
            if session.position != start:  # the failure was behind the work
                session.reset()
                feed(session, IDS[:start])
            return [np.array(part).tolist() for part in session.score(ids, ids, 3)]

        calls: dict[str, Act] = {
            "prefill": prefill,
            "step": step,
            "sampled": step,
            "score": score,
            "logits": lambda: session.logits().tobytes(),
            "top": lambda: session.top_logprobs(8)[0].tolist(),
            "sampling": sampling,
            "reset": session.reset,
            "position": lambda: session.position,
            "last": session.last_token,
        }
        return calls[kind]

    def sessions(self) -> tuple[Act, Act]:
        def act() -> None:
            session = self.engine.session()
            try:
                session.prefill(IDS[:6])
            finally:
                session.close()

        return act, lambda: self.check(self.session)

    def close(self) -> tuple[Act, Act]:
        """After a failing close, another one gives everything back."""
        engine = open_small(self.checkpoint)
        session = engine.session()
        session.prefill(IDS[:6])

        def act() -> None:
            session.close()
            engine.close()

        def check() -> bool:
            engine.close()
            return self.check(self.session)

        return act, check

    def engines(self) -> tuple[Act, Act]:
        """The engine as applications open it."""

        def act() -> list[Any]:
            with Engine(self.folder, device="cpu", context=320, threads=2, max_sessions=2) as engine:
                return python_walk(engine)

        return act, act

    def python(self, engine: Engine) -> tuple[Act, Act]:
        return lambda: python_walk(engine), lambda: python_walk(engine)


def python_walk(engine: Engine) -> list[Any]:
    """What applications call."""
    with contextlib.suppress(OutOfMemoryError):  # what a dropped prompt met may still be told
        engine.reset()
    engine.prefill(IDS)
    found: list[Any] = [token.id for token in engine.step(3)]
    found += [token.id for token in engine.step(3, temperature=1.0, logit_bias={3: 1.0}, seed=1)]
    options: dict[str, Any] = {
        "max_tokens": 4,
        "ignore_eos": True,
        "seed": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    chunks = list(engine.generate(IDS[:20], **options))
    found += [index for chunk in chunks for index in chunk.token_ids]
    return [*found, engine.score(IDS[:20], top_logprobs=2).logprobs.tolist()]


def first_calls(failing: Failing, checkpoint: Checkpoint) -> dict[str, int]:
    """In children that have opened nothing yet: calls that fail, and can be made again."""
    wrong = 0
    places = [*range(1, 40), *range(40, 5000, 150)]
    for n in places:
        if (child := os.fork()) == 0:
            failing.at(n)
            try:
                with contextlib.suppress(OutOfMemoryError):
                    walk(open_small(checkpoint).session())
                failing.at(0)
                walk(open_small(checkpoint).session())
                os._exit(0)
            finally:
                os._exit(1)
        wrong += os.waitpid(child, 0)[1] != 0
    return {"calls": len(places), "wrong": wrong}


def tell(library: str, folder: Path) -> dict[str, Any]:
    """Everything."""
    failing, checkpoint = Failing(library), open_checkpoint(folder)
    found: dict[str, Any] = {"first": first_calls(failing, checkpoint)}
    scenes = Scenes(checkpoint, folder)

    def fail(name: str, prepare: Prepare, stride: int = 1, check_every: int = 1) -> None:
        tally = Tally(failing, check_every)
        tally.run(prepare, stride=stride)
        tally.run(prepare, rest=True, stride=7 * stride)
        found[name] = {"calls": tally.calls, "errors": tally.errors, "problems": tally.problems}

    fail("open", scenes.open, stride=2, check_every=50)
    before, others = memory(), Tally(failing, 1000)
    others.run(scenes.open, first=2, stride=4)
    found["growth"] = {name: size - before[name] for name, size in memory().items()}
    found["open"]["calls"] += others.calls
    needing_plans = ("prefill", "step", "sampled", "score", "top")
    for kind in needing_plans:
        stride = 3 if kind == "prefill" else 1
        fail(f"first {kind}", functools.partial(scenes.fresh, kind), stride=stride, check_every=20)
    for kind in (
        "prefill",
        "step",
        "sampled",
        "score",
        "top",
        "logits",
        "sampling",
        "reset",
        "position",
        "last",
    ):
        fail(kind, functools.partial(scenes.warm, kind))
    fail("session", scenes.sessions)
    fail("close", scenes.close)
    fail("engine", scenes.engines, stride=200)
    with Engine(folder, device="cpu", context=320, threads=2, max_sessions=2) as engine:
        fail("calls", lambda: scenes.python(engine))
    return found


if __name__ == "__main__":
    print(json.dumps(tell(sys.argv[1], Path(sys.argv[2]))))
