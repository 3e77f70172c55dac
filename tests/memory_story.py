"""What test_memory.py runs in a process of its own: generates, and prints what that took as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import numpy as np

from lily import Engine, OutOfMemoryError, Session

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "adjusted": {"temperature": 0.0, "frequency_penalty": 0.2, "logit_bias": {7: 1.5}},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.1},
}


class Counter:
    """The preloaded library."""

    def __init__(self, library: str) -> None:
        self._native = ctypes.CDLL(library)
        self._native.lily_count.restype = ctypes.c_uint64
        self._native.lily_count_start()  # Lily's libraries are loaded

    def count(self) -> int:
        """Allocations since the start."""
        return int(self._native.lily_count())

    def sites(self) -> list[str]:
        """The first places that have allocated since the last call."""
        text = ctypes.create_string_buffer(500)
        found: list[str] = []
        while self._native.lily_count_site(len(found), text, len(text)):
            found.append(text.value.decode())
        self._native.lily_count_forget()
        return found


def feed(session: Session, tokens: int) -> None:
    """Start anew with a prompt of so many tokens."""
    session.reset()
    for _ in session.prefill([(i * 7919) % 4000 for i in range(tokens)]):
        pass


def steps(session: Session, counter: Counter, tokens: int, **options: Any) -> dict[str, Any]:
    """Positions at which a step allocated, and where it did after the first step."""
    stream, at = session.step(tokens, **options), []
    before = counter.count()
    for i, _ in enumerate(stream):
        if (now := counter.count()) != before:
            at.append(session.position - 1)
        before = now
        if i == 0:
            counter.sites()
    return {"at": at, "sites": counter.sites()}


def interleave(engine: Engine, counter: Counter) -> dict[str, Any]:
    """Steps straight from native sessions, with some asked for ahead and another session's between."""
    with engine.session() as one, engine.session() as other:
        pair = (one._native, other._native)
        for native in pair:
            native.prefill(np.arange(60, dtype=np.int32))
            native.step(0)
        counter.sites()
        before = counter.count()
        for turn in range(100):
            for native in pair:
                native.step(turn % 7)
        return {"count": counter.count() - before, "sites": counter.sites()}


def single_calls(engine: Engine, counter: Counter) -> dict[str, int]:
    """Allocations of calls that are no steps."""
    found = {}
    with engine.session() as session:
        ids = np.arange(128, dtype=np.int32)
        native = session._native
        native.prefill(ids)
        calls = {
            "prefill": lambda: native.prefill(ids[:64]),
            "logits": native.logits,
            "idle": native.last_token,
        }
        for name, call in calls.items():
            before = counter.count()
            call()
            found[name] = counter.count() - before
    return found


def count_allocations(library: str) -> dict[str, Any]:
    """Of steps in a first session of each kind, and in others that find every plan recorded."""
    found: dict[str, Any] = {}
    with Engine("demo", device="cpu", context=2304, threads=2, max_sessions=2) as engine:
        counter = Counter(library)
        for turn in ("first", "again"):
            for kind, options in KINDS.items():
                with engine.session() as session:
                    feed(session, 250)
                    found[f"{kind}, {turn}"] = steps(session, counter, 280, **options)
        # Attention has one block up to 2,048 tokens, and more from there on.
        for turn in ("greedy", "sampled"):
            with engine.session() as session:
                feed(session, 2040)
                found[f"far, {turn}"] = steps(session, counter, 20, **KINDS[turn])
        found["interleaved"] = interleave(engine, counter)
        found["calls"] = single_calls(engine, counter)
    return found


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(session: Session, turn: int) -> int:
    """Fill the context by one call or the other; returns the number of tokens."""
    feed(session, 20)
    if turn % 2:
        return sum(1 for _ in session.step(temperature=1.0, seed=turn))
    stream = session.generate(None, ignore_eos=True, seed=turn, **KINDS["sampled"])
    return sum(len(chunk.token_ids) for chunk in stream)


def measure_growth(tokens: int) -> dict[str, Any]:
    """Resident bytes when a context has been filled by both calls, and after so many tokens more."""
    engine = Engine("demo", device="cpu", context=512, threads=1, max_sessions=1)
    with engine, engine.session() as session:
        fill(session, 0)
        fill(session, 1)
        made, turn, before = 0, 2, resident()
        while made < tokens:
            made += fill(session, turn)
            turn += 1
        return {"tokens": made, "growth": resident() - before}


def locked() -> int:
    """Bytes of this process that the system must keep in memory."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmLck:"))


def fits(session: Session, number: int) -> bool:
    """Fill a session; whether there was memory for it."""
    try:
        for _ in session.prefill([number + 5] * 1000):
            pass
        session.snapshot()
        list(session.step(8))
        session.fork().close()
    except OutOfMemoryError:
        return False
    return True


def use_everything(engine: Engine) -> dict[str, Any]:
    """Fill sessions and snapshots until the engine has nothing left."""
    sessions = [engine.session() for _ in range(6)]
    failures = sum(not fits(session, number) for number, session in enumerate(sessions))
    sessions.pop(0).close()  # their pages are for snapshots now
    sessions.pop(0).close()
    for number in range(40):
        list(engine.generate([number + 100] * 40, max_tokens=2))
    found = {"failures": failures, "used": resident(), "locked": locked(), "cache": engine.info()["cache"]}
    for session in sessions:
        session.close()
    return found


def measure_ceiling() -> dict[str, Any]:
    """Memory of an engine whose limit has no room for the caches of all its sessions, in use and closed."""
    options: dict[str, Any] = {"device": "cpu", "context": 1024, "prefill_chunk": 64, "max_sessions": 8}
    size = Engine.plan_memory("demo", **options)
    limit = size["total"] + 2 * size["kv"]
    with Engine("demo", threads=1, **options) as engine:  # what Python and its libraries take
        list(engine.generate([5] * 900, max_tokens=2))
    before = resident()
    engine = Engine("demo", threads=1, memory_limit=limit, **options)
    most = engine.info()["most_memory"]
    found = use_everything(engine)
    engine.close()
    used, closed = found.pop("used") - before, resident() - before
    return {"limit": limit, "most": most, "used": used, "closed": closed, "kv": size["kv"], **found}


if __name__ == "__main__":
    if sys.argv[1:] == ["ceiling"]:
        print(json.dumps(measure_ceiling()))
    else:
        print(json.dumps(count_allocations(sys.argv[1]) if len(sys.argv) > 1 else measure_growth(20_000)))
