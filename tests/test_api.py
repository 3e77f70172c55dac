"""The Python API on the demo model."""

from __future__ import annotations

import ast
import gc
import inspect
import itertools
import statistics
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
from lily import (
    ContextFullError,
    Engine,
    LilyError,
    OutOfMemoryError,
    PrefillProgress,
    SamplingParams,
    Session,
)
from lily.core import GenerateOptions
from lily.sampling import SamplingOptions
from replies import FRANCE_PROMPT, STORY

# Opening and closing


@pytest.mark.timing
def test_import__is_cheap() -> None:
    """Half of 15 runs take at most 40 ms beyond numpy; nothing heavy is pulled in."""
    # This thread's time: numpy's own threads are still starting up.
    code = (
        "import sys, time, numpy; start = time.thread_time(); import lily;"
        "print(time.thread_time() - start);"
        "print([m for m in ('tokenizers', 'jinja2', 'huggingface_hub', 'safetensors') if m in sys.modules])"
    )
    times = []
    for _ in range(15):
        command = [sys.executable, "-c", code]
        seconds, modules = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout.splitlines()
        assert modules == "[]"
        times.append(float(seconds))
    assert statistics.median(times) <= 0.040


def test_native_stub__equals_the_module() -> None:
    from lily import _native

    stub = ast.parse(Path(lily.__file__).with_name("_native.pyi").read_text(encoding="utf-8"))
    stated: set[str] = set()
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            stated.add(node.name)
        if isinstance(node, ast.ClassDef):
            fields = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            names |= {target.id for target in fields if isinstance(target, ast.Name)}
            stated |= {f"{node.name}.{name}" for name in names if not name.startswith("__")}
    present: set[str] = set()
    for name, value in vars(_native).items():
        if name.startswith("_"):
            continue
        if isinstance(value, type):
            present |= {f"{name}.{member}" for member in vars(value) if not member.startswith("_")}
        else:
            present.add(name)
    assert stated == present


def test_version() -> None:
    assert lily.__version__[0].isdigit()
    with pytest.raises(AttributeError):
        lily.no_such_name  # noqa: B018


def test_open__reports_progress(device: str) -> None:
    seen: list[tuple[int, int]] = []
    with Engine("demo", device=device, context=128, progress=lambda done, total: seen.append((done, total))):
        pass
    assert seen
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 10_000_000


def test_open__default_context_fits_the_model(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Engine("demo", device=device, max_sessions=1) as engine:
            assert engine.context == 4096


def test_open__context_beyond_training_warns_once(device: str) -> None:
    with pytest.warns(UserWarning, match="context 5000 exceeds") as caught:
        Engine("demo", device=device, context=5000, max_sessions=1).close()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_open__too_large_is_refused_before_loading(device: str) -> None:
    calls: list[tuple[int, int]] = []
    with pytest.raises(OutOfMemoryError, match=r"demo needs .* MiB \(.*weights .*memory_limit is 1.0 MiB"):
        Engine("demo", device=device, memory_limit=1_000_000, progress=lambda *step: calls.append(step))
    assert not calls


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "gpu"}, "device must be one of auto, metal, cuda, cpu, cpu32"),
        ({"context": 0}, "context must be an integer from 1 to 16777216"),
        ({"context": 1.5}, "context must be"),
        ({"prefill_chunk": 0}, "prefill_chunk must be"),
        ({"prefill_chunk": 100}, "prefill_chunk must be a multiple of 64, not 100"),
        ({"prefill_chunk": "all"}, "prefill_chunk must be an integer"),
        ({"max_sessions": 0}, "max_sessions must be"),
        ({"threads": -1}, "threads must be"),
        ({"threads": 10**6}, "threads must be an integer from 0 to 1024"),
        ({"memory_limit": True}, "memory_limit must be"),
        ({"memory_limit": 1 << 64}, "memory_limit must be"),
        ({"snapshot_memory": -1}, "snapshot_memory must be"),
        ({"snapshot_memory": 1 << 64}, "snapshot_memory must be"),
        ({"device": None}, "device must be one of"),
    ],
)
def test_open__wrong_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Engine("demo", **options)


def test_open__progress_is_checked_before_loading() -> None:
    with pytest.raises(TypeError, match="progress must be a function"):
        Engine("demo", progress=3)  # type: ignore[arg-type]


def test_open__memory_limit_that_rounds_away_is_told_in_bytes(device: str) -> None:
    total = Engine.plan_memory("demo", device=device, context=128, snapshot_memory=0)["total"]
    for limit in (5, total - 1):
        text = rf"demo needs {total} bytes \(.*memory_limit is {limit} bytes;"
        with pytest.raises(OutOfMemoryError, match=text):
            Engine("demo", device=device, context=128, memory_limit=limit)


def test_plan_memory__warns_and_has_an_order(device: str) -> None:
    with pytest.warns(UserWarning, match="context 5000 exceeds") as caught:
        plan = Engine.plan_memory("demo", device=device, context=5000)
    assert [warning.filename for warning in caught] == [__file__]
    assert list(plan) == ["weights", "kv", "state", "logits", "scratch", "snapshots", "total"]


def test_prefill_chunk__default_suits_device_and_context(device: str) -> None:
    most = {"cpu32": 256, "cuda": 4096}.get(device, 2048)
    for context, chunk in ((100, 128), (4096, most)):
        plan = Engine.plan_memory("demo", context=context, device=device)
        with Engine("demo", context=context, device=device) as engine:
            # A GPU with little memory takes less than the plan, which does not know it, says.
            assert engine.info()["prefill_chunk"] in (chunk, min(chunk, 2048) if device == "cuda" else chunk)
        assert plan == Engine.plan_memory("demo", context=context, device=device, prefill_chunk=chunk)
    low, high = (
        Engine.plan_memory("demo", context=100, device=device, prefill_chunk=n) for n in (128, 65536)
    )
    assert low == high


def test_plan_memory__needs_no_weights(device: str) -> None:
    small = Engine.plan_memory("demo", context=1024, device=device)
    large = Engine.plan_memory("demo", context=4096, device=device)
    assert small["total"] == sum(size for name, size in small.items() if name != "total")
    assert small["weights"] == large["weights"] > 10_000_000
    assert small["kv"] < large["kv"]


@pytest.mark.filterwarnings("ignore:context 131072 exceeds")
def test_plan_memory__what_is_not_cache_does_not_grow_with_the_context(device: str) -> None:
    short, long = (
        Engine.plan_memory("demo", context=n, device=device, prefill_chunk=2048) for n in (4096, 131072)
    )
    assert long["kv"] == 32 * short["kv"]
    for name in ("state", "logits", "scratch"):
        assert long[name] <= 1.01 * short[name]


def test_info__is_json(engine: Engine) -> None:
    import json

    info = json.loads(json.dumps(engine.info()))
    assert info["model"] == "demo"
    assert info["context"] == engine.context == 1024
    assert info["vocab"] == 4096
    assert info["eos_token_ids"] == [4087, 4089]
    assert info["memory"]["total"] > info["memory"]["weights"]


def test_close__ends_every_use(device: str) -> None:
    engine = Engine("demo", device=device, context=128, max_sessions=3)
    session = engine.session()
    session.prefill(STORY)
    steps, chunks = session.step(), engine.generate(STORY)
    next(steps), next(chunks)
    engine.close()
    engine.close()
    calls: list[Callable[[], object]] = [
        lambda: engine.info(),
        lambda: engine.logits,
        lambda: engine.prefill(STORY),
        lambda: engine.generate(STORY),
        lambda: engine.score(STORY),
        lambda: engine.session(),
        lambda: session.prefill(STORY),
        lambda: session.step(),
        lambda: session.reset(),
        lambda: session.logits,
        lambda: next(steps),
        lambda: next(chunks),
    ]
    for call in calls:
        with pytest.raises(LilyError, match="closed"):
            call()
    session.close()


def test_engine__is_freed_without_close(device: str) -> None:
    engine = Engine("demo", device=device, context=128, max_sessions=1)
    engine.prefill(STORY)
    core = weakref.ref(engine._core)
    gc.disable()
    try:
        del engine
        assert core() is None
    finally:
        gc.enable()


def test_session__outlives_the_engine_variable(device: str) -> None:
    session = Engine("demo", device=device, context=128, max_sessions=1).session()
    gc.collect()
    session.prefill(STORY)
    assert next(session.step(1)).text


def test_session__limit_is_an_error_and_close_gives_it_back(device: str) -> None:
    with Engine("demo", device=device, context=128, max_sessions=2) as engine:
        first, second = engine.session(), engine.session()
        text = "all 2 sessions are in use; close one or open the engine with a larger max_sessions"
        with pytest.raises(LilyError, match=text) as caught:
            engine.session()
        assert caught.type is LilyError
        first.close()
        first.close()
        with pytest.raises(LilyError, match="the session is closed"):
            first.prefill(STORY)
        engine.session().close()
        second.close()


# prefill, step, logits


def test_prefill__reports_every_chunk(session: Session) -> None:
    ids = list(range(100, 250))
    seen = list(session.prefill(ids))
    assert seen[-1] == PrefillProgress(150, 150)
    assert len(seen) >= 3
    assert all(a.processed < b.processed for a, b in itertools.pairwise(seen))
    assert session.position == 150


def test_prefill__dropped_unread_runs_to_completion(session: Session) -> None:
    session.prefill(list(range(100, 250)))
    assert session.position == 150


def test_prefill__held_is_completed_by_the_next_call(session: Session) -> None:
    held = session.prefill(list(range(100, 250)))
    assert session.position == 0
    logits = session.logits
    assert session.position == 150
    assert list(held) == []
    with_loop = session.prefill(list(range(100, 250)))
    next(with_loop)
    next(session.step(1))
    assert session.position == 301
    assert logits.shape == (4096,)


def test_prefill__close_and_break_cancel_the_rest(session: Session) -> None:
    progress = session.prefill(list(range(100, 350)))
    done = next(progress).processed
    progress.close()
    assert session.position == done < 250
    assert list(progress) == []
    for step in session.prefill(list(range(100, 350))):
        more = step.processed
        break
    assert session.position == done + more < 500
    unread = session.prefill(list(range(100, 350)))
    unread.close()
    assert session.position == done + more
    assert next(session.step(1)).id >= 0


def test_prefill__any_chunking_gives_the_same_logits(engine: Engine, session: Session) -> None:
    ids = engine.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 12)
    session.prefill(ids)
    whole = session.logits
    session.reset()
    for start, end in ((0, 1), (1, 50), (50, 64), (64, len(ids))):
        session.prefill(ids[start:end])
    assert np.array_equal(session.logits, whole)


def test_prefill__accepts_text_lists_and_arrays(engine: Engine, session: Session) -> None:
    ids = engine.tokenizer.encode(STORY)
    results = []
    for prompt in (STORY, ids, tuple(ids), np.array(ids), np.array(ids, np.uint16), strided(ids)):
        session.reset()
        session.prefill(prompt)
        results.append(session.logits)
    assert all(np.array_equal(results[0], other) for other in results[1:])


def strided(ids: list[int]) -> np.ndarray[Any, Any]:
    """A strided view, which the native side cannot take as it is."""
    return np.repeat(np.array(ids, np.int64), 2)[::2]


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([4096], "token id 4096 is not from 0 to 4095"),
        ([5, -1], "token id -1 is not"),
        ([2**40], "token id 1099511627776 is not"),
        ([1.5], "flat sequence of token ids"),
        ([[1, 2]], "flat sequence of token ids"),
        ([[1], [2, 3]], "flat sequence of token ids"),
        ([True], "flat sequence of token ids"),
        (5, "flat sequence of token ids"),
        (b"abc", "flat sequence of token ids"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_prompt__wrong_ones_are_refused(engine: Engine, session: Session, prompt: Any, text: str) -> None:
    for call in (session.prefill, session.generate, engine.score):
        with pytest.raises(ValueError, match=text):
            call(prompt)
    assert session.position == 0


def test_context__exact_fit_and_one_more(engine: Engine, session: Session) -> None:
    ids = [500 + index % 100 for index in range(engine.context)]
    with pytest.raises(ContextFullError, match="the prompt has 1025 tokens, the context 1024"):
        session.prefill([*ids, 5])
    assert session.position == 0
    session.prefill(ids)
    assert session.position == engine.context
    with pytest.raises(ContextFullError, match="the context of 1024 tokens is full"):
        next(session.step(1))
    with pytest.raises(ContextFullError, match="of which 1024 are in use"):
        session.prefill([5])
    (chunk,) = session.generate(None)
    assert (chunk.finish_reason, chunk.token_ids, chunk.text) == ("length", (), "")
    with pytest.raises(ContextFullError):
        engine.generate([*ids, 5])
    with pytest.raises(ContextFullError):
        engine.score([*ids, 5])


def test_step__ends_or_raises_where_the_context_ends(engine: Engine, session: Session) -> None:
    session.prefill([500] * (engine.context - 3))
    steps = session.step(5)
    assert len([next(steps) for _ in range(3)]) == 3
    with pytest.raises(ContextFullError):
        next(steps)
    session.reset()
    session.prefill([500] * (engine.context - 3))
    assert len(list(session.step())) == 3


def test_step__is_greedy_and_raw(session: Session) -> None:
    session.prefill(STORY)
    first = session.logits
    tokens = list(session.step(8))
    assert tokens[0].id == int(first.argmax())
    logprob = first[tokens[0].id] - np.logaddexp.reduce(first.astype(np.float64))
    assert tokens[0].logprob == pytest.approx(logprob, abs=1e-4)
    assert session.position == 4 + 8
    session.reset()
    session.prefill(FRANCE_PROMPT)
    text = "".join(token.text for token in session.step(30))
    assert "<|im_end|>" in text


def test_step__logits_follow_the_last_token_handed_out(engine: Engine, session: Session) -> None:
    ids = engine.tokenizer.encode(STORY)
    session.prefill(ids)
    for token in session.step(3):
        ids.append(token.id)
        with engine.session() as other:
            other.prefill(ids)
            assert np.abs(other.logits - session.logits).max() < 0.5


def test_step__in_pieces_is_the_same(session: Session) -> None:
    session.prefill(STORY)
    whole = list(session.step(6))
    session.reset()
    session.prefill(STORY)
    assert [next(session.step(1)) for _ in range(6)] == whole


def test_step__sampling_is_reproducible(session: Session) -> None:
    runs = []
    for seed in (1, 1, 2):
        session.reset()
        session.prefill(STORY)
        runs.append([token.id for token in session.step(24, temperature=1.5, seed=seed)])
    assert runs[0] == runs[1] != runs[2]
    session.reset()
    session.prefill(STORY)
    params = SamplingParams(temperature=1.5, seed=2)
    assert [token.id for token in session.step(24, params)] == runs[2]


def test_step__wrong_use(session: Session) -> None:
    with pytest.raises(LilyError):
        next(session.step(1))
    with pytest.raises(LilyError):
        session.logits  # noqa: B018
    with pytest.raises(ValueError, match="max_tokens must be an integer at least 1"):
        session.step(0)
    with pytest.raises(ValueError, match=r"step\(\) does not use stop"):
        session.step(1, SamplingParams(stop="a"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'temp'"):
        session.step(1, temp=0.5)  # type: ignore[call-arg]


def test_iterators__old_ones_say_that_they_are_out_of_date(session: Session) -> None:
    session.prefill(STORY)
    old = session.step()
    next(old)
    new = session.step()
    next(new)
    with pytest.raises(LilyError, match="out of date"):
        next(old)
    session.reset()
    with pytest.raises(LilyError, match="out of date"):
        next(new)


def test_engine__has_its_own_session(engine: Engine) -> None:
    engine.reset()
    engine.prefill(STORY)
    with engine.session() as other:
        other.prefill("Something else")
        tokens = list(engine.step(max_tokens=4))
    assert len(tokens) == 4
    assert engine.logits.shape == (4096,)
    assert engine.logits.dtype == np.float32
    more = list(engine.generate(None, max_tokens=3, temperature=0))
    assert more[-1].usage is not None
    assert more[-1].usage.prompt_tokens == more[-1].usage.cached_tokens == 8


# score


def test_score__equals_stepwise_logprobs(engine: Engine, session: Session) -> None:
    session.prefill(STORY)
    tokens = list(session.step(12))
    ids = engine.tokenizer.encode(STORY) + [token.id for token in tokens]
    score = engine.score(ids, top_logprobs=4)
    assert score.token_ids.tolist() == ids
    assert score.logprobs.shape == (15,)
    assert score.top_ids.shape == score.top_logprobs.shape == (16, 4)
    assert np.abs(score.logprobs[3:] - [token.logprob for token in tokens]).max() < 0.5
    assert np.all(np.diff(score.top_logprobs, axis=1) <= 0)
    assert score.perplexity == pytest.approx(float(np.exp(-score.logprobs.mean())))
    for position in range(15):
        hits = np.flatnonzero(score.top_ids[position] == ids[position + 1])
        if hits.size:
            at = score.top_logprobs[position, hits[0]]
            assert at == pytest.approx(float(score.logprobs[position]), abs=1e-4)


def test_score__leaves_the_engine_alone(engine: Engine) -> None:
    engine.reset()
    engine.prefill(STORY)
    before = engine.logits
    long = engine.tokenizer.encode("The dog saw a bird. " * 30)
    assert len(long) > 128
    score = engine.score(long)
    assert score.logprobs.shape == (len(long) - 1,)
    assert score.top_ids.shape == (len(long), 0)
    assert np.array_equal(engine.logits, before)


def test_score__one_token_and_wrong_top(engine: Engine) -> None:
    score = engine.score([5], top_logprobs=1)
    assert score.logprobs.shape == (0,)
    assert np.isnan(score.perplexity)
    assert engine.score(STORY, top_logprobs=128).top_ids.shape == (4, 128)
    for top in (-1, 129, True, 1.5, None, "2"):
        with pytest.raises(ValueError, match="top_logprobs must be"):
            engine.score(STORY, top_logprobs=top)  # type: ignore[arg-type]


def test_generate_options__are_the_arguments_of_generate() -> None:
    named = GenerateOptions.__annotations__.keys() - SamplingOptions.__annotations__.keys()
    for generate, more in ((Session.generate, set()), (Engine.generate, {"session"})):
        arguments = inspect.signature(generate).parameters.values()
        assert {found.name for found in arguments if found.kind is found.KEYWORD_ONLY} == named | more
