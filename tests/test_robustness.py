"""The engine under hostile circumstances: limits, fork, arrays that change, numbers out of any range."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from lily import CheckpointError, Engine, LilyError, OutOfMemoryError, UnsupportedError, _native
from lily.checkpoint import DEMO, open_checkpoint
from lily.engine import MAX_CHUNK, MAX_CONTEXT, MAX_SCORE_TOP, MAX_SESSIONS, MAX_THREADS
from lily.model_config import load_config
from make_checkpoint import Shape, config_json
from native_engine import open_native

IDS = [(i * 7919) % 4000 for i in range(200)]


def native_engine(device: str, **sizes: int) -> _native.Engine:
    sizes.setdefault("threads", 1)
    return open_native(open_checkpoint(DEMO), None, device=device, **sizes)


@pytest.mark.parametrize("name", ["context", "prefill_chunk", "max_sessions", "threads"])
@pytest.mark.parametrize("value", [(1 << 32) - 64, 1 << 33])
def test_open__absurd_sizes_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        Engine("demo", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "most", "step"),
    [
        ("context", MAX_CONTEXT, 1),
        ("prefill_chunk", MAX_CHUNK, 64),
        ("max_sessions", MAX_SESSIONS, 1),
        ("threads", MAX_THREADS, 1),
    ],
)
def test_limits__native_and_python_have_the_same(name: str, most: int, step: int) -> None:
    """The native engine checks sizes before the device: an unknown one shows that a size was accepted."""
    with pytest.raises(ValueError, match="unknown device"):
        native_engine("none", **{name: most})
    with pytest.raises(ValueError, match=f"{name} must be"):
        native_engine("none", **{name: most + step})
    with pytest.raises(ValueError, match=name):
        Engine("demo", **{name: most + step})  # type: ignore[arg-type]
    with pytest.raises(LilyError, match=r"memory_limit|32-bit indices"):  # accepted, but too much
        Engine("demo", **{"context": 64, name: most}, memory_limit=1)  # type: ignore[arg-type]


def test_limits__native_and_python_have_the_same_most_top_logprobs(engine: Engine) -> None:
    native = native_engine("cpu")
    session = native.session()
    ids = np.array(IDS[:2], np.int32)
    with pytest.raises(ValueError, match=f"at most {MAX_SCORE_TOP} top"):
        session.score(ids, ids, MAX_SCORE_TOP + 1)
    assert session.score(ids, ids, MAX_SCORE_TOP)[2].shape == (2, MAX_SCORE_TOP)
    native.close()
    with pytest.raises(ValueError, match="top_logprobs"):
        engine.score(ids, top_logprobs=MAX_SCORE_TOP + 1)


@pytest.mark.parametrize(
    ("counts", "most", "step"),
    [
        (("vocab",), 1 << 22, 64),
        (("hidden",), 1 << 13, 64),
        (("inner",), 1 << 16, 64),
        (("shared_inner",), 1 << 16, 64),
        (("layers",), 1024, 1),
        (("heads", "kv_heads"), 1024, 1),
        (("delta_value_heads", "delta_key_heads"), 1024, 1),
        (("experts",), 512, 1),
        (("experts", "experts_used"), 32, 1),
        (("heads",), 8, 1),
    ],
)
def test_limits__native_and_python_take_the_same_models(
    tmp_path: Path, counts: tuple[str, ...], most: int, step: int
) -> None:
    def native(shape: Shape) -> None:
        config = _native.Config(**dataclasses.asdict(shape))
        _native.memory_plan(config, context=64, prefill_chunk=64, max_sessions=1, device="none")

    def python(shape: Shape) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config_json(shape)), encoding="utf-8")
        load_config(tmp_path)

    shapes = [
        dataclasses.replace(Shape(kv_heads=1), **dict.fromkeys(counts, value))
        for value in (most, most + step)
    ]
    with pytest.raises(ValueError, match="unknown device"):
        native(shapes[0])
    python(shapes[0])
    with pytest.raises(UnsupportedError):
        native(shapes[1])
    with pytest.raises((UnsupportedError, CheckpointError)):
        python(shapes[1])


def test_open__more_than_indices_reach_is_refused_before_loading() -> None:
    with pytest.raises(LilyError, match="32-bit indices"):
        Engine.plan_memory("demo", context=1 << 24, max_sessions=1 << 10)


def test_open__threads_that_cannot_start() -> None:
    code = """
import resource
from lily import Engine, OutOfMemoryError
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    Engine("demo", device="cpu", threads=1000)
except OutOfMemoryError as error:
    print("refused:", error)
print("alive")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "refused: cannot start 1000 threads" in result.stdout
    assert "alive" in result.stdout


def test_prefill__ids_are_copied(engine: Engine) -> None:
    ids = np.array(IDS, dtype=np.int32)
    with engine.session() as expected, engine.session() as session:
        list(expected.prefill(IDS))
        progress = session.prefill(ids)
        ids[:] = -1
        list(progress)
        np.testing.assert_array_equal(session.logits, expected.logits)


def test_native__wide_or_fractional_ids_are_not_narrowed(device: str) -> None:
    engine = native_engine(device)
    session = engine.session()
    for wrong in (np.array([2**32 + 5]), np.array([3.7])):
        with pytest.raises(TypeError):
            session.prefill(wrong)
    for wrong in (np.array([-1], np.int32), np.array([4096], np.int32), np.array([], np.int32)):
        with pytest.raises(ValueError, match="token id"):
            session.prefill(wrong)
    engine.close()


def test_score__fewer_top_tokens_are_the_first_of_more(engine: Engine) -> None:
    many = engine.score(IDS[:70], top_logprobs=20)
    for top in (0, 1, 3, 8, 9):
        few = engine.score(IDS[:70], top_logprobs=top)
        np.testing.assert_array_equal(few.logprobs, many.logprobs)
        np.testing.assert_array_equal(few.top_ids, many.top_ids[:, :top])
        np.testing.assert_array_equal(few.top_logprobs, many.top_logprobs[:, :top])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork__child_is_refused_and_can_clean_up(device: str) -> None:
    """Also when another thread of the parent was inside the engine at the moment of the fork."""
    with Engine("demo", device=device, context=512, prefill_chunk=64) as engine:
        session, busy = engine.session(), engine.session()
        list(busy.prefill(IDS[:8]))
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set() and busy.position < 400:
                list(busy.step(max_tokens=1))

        thread = threading.Thread(target=work)
        thread.start()
        children = [os.fork() for _ in range(1)]
        if 0 in children:
            signal.alarm(20)  # a child that hangs is killed, and the parent sees it
            try:
                list(session.prefill(IDS))
                os._exit(3)
            except LilyError:
                session.close()
                del session
                engine.close()
                os._exit(0)
        _, status = os.waitpid(children[0], 0)
        stop.set()
        thread.join()
        assert os.WIFEXITED(status)
        assert os.WEXITSTATUS(status) == 0


def test_memory_limit__is_a_typed_error() -> None:
    with pytest.raises(OutOfMemoryError, match="memory_limit"):
        Engine("demo", memory_limit=1 << 20)


@pytest.mark.parametrize(
    "call", ["generate('Once', max_tokens=3000, ignore_eos=True)", "step()", "score(list(range(3000)))"]
)
def test_exit__with_a_daemon_thread_at_work(call: str) -> None:
    """The interpreter ends threads that come back from native code; the process keeps its own exit status."""
    code = f"""
import sys, threading, time
from lily import Engine
engine = Engine("demo")
list(engine.prefill("Once"))
threading.Thread(target=lambda: [None for _ in [engine.{call}] for _ in _], daemon=True).start()
time.sleep(0.3)
sys.exit(5)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 5, result.stderr
    assert not result.stderr


@pytest.mark.timing
def test_info__does_not_wait_for_a_prompt(engine: Engine) -> None:
    with Engine("demo", context=4096) as busy, busy.session() as session:
        thread = threading.Thread(target=lambda: list(session.prefill(IDS * 10)))
        thread.start()
        time.sleep(0.05)
        start = time.perf_counter()
        busy.info()
        assert session.position in (0, 1984, 2000)
        waited = time.perf_counter() - start
        thread.join()
    assert waited < 0.1


def test_sessions__all_in_use(device: str) -> None:
    with Engine("demo", device=device, context=64, max_sessions=2) as engine:
        sessions = [engine.session(), engine.session()]
        with pytest.raises(LilyError, match="all 2 sessions are in use"):
            engine.session()
        sessions.pop()  # dropping one is enough
        engine.session()


def test_sampling__top_k_holds_at_any_temperature(engine: Engine) -> None:
    """At 1e8 all probabilities are equal in fp32, but top-k asks for the order of the logits."""
    with engine.session() as session:
        list(session.prefill(IDS[:20]))
        for temperature in (1.0, 1e4, 1e8):
            best = set(np.argsort(-session.logits)[:5].tolist())
            seed = int(temperature)
            (token,) = session.step(1, temperature=temperature, top_k=5, seed=seed)
            assert token.id in best
            first = int(session.logits.argmax())
            (token,) = session.step(1, temperature=temperature, top_k=1, seed=seed)
            assert token.id == first
            first = int(session.logits.argmax())
            (token,) = session.step(1, temperature=0.5, min_p=1.0, seed=seed)
            assert token.id == first
