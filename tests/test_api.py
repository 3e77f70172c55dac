"""The Python API on the demo model."""

from __future__ import annotations

import ast
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lily
from lily import (
    Chunk,
    ContextFullError,
    Engine,
    LilyError,
    OutOfMemoryError,
    PrefillProgress,
    SamplingParams,
    Session,
    UnsupportedError,
)

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time"


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """An empty session."""
    with engine.session() as session:
        yield session


def text_of(chunks: list[Chunk], kind: str = "text") -> str:
    return "".join(chunk.text for chunk in chunks if chunk.kind == kind)


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [index for chunk in chunks for index in chunk.token_ids]


# Opening and closing


def test_import__is_cheap() -> None:
    """At most 40 ms of processor time beyond numpy, and nothing heavy is pulled in."""
    code = (
        "import sys, time, numpy; start = time.process_time(); import lily; print(time.process_time() - start);"
        "print([m for m in ('tokenizers', 'jinja2', 'huggingface_hub', 'safetensors') if m in sys.modules])"
    )
    times = []
    for _ in range(5):
        output = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout
        seconds, modules = output.splitlines()
        assert modules == "[]"
        times.append(float(seconds))
    assert min(times) <= 0.040


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
        if isinstance(value, type):
            present |= {f"{name}.{member}" for member in vars(value) if not member.startswith("_")}
        elif not name.startswith("_"):
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
        ({"context": 0}, "context must be an integer of at least 1"),
        ({"context": 1.5}, "context must be"),
        ({"prefill_chunk": 0}, "prefill_chunk must be"),
        ({"max_sessions": 0}, "max_sessions must be"),
        ({"threads": -1}, "threads must be"),
        ({"memory_limit": True}, "memory_limit must be"),
    ],
)
def test_open__wrong_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Engine("demo", **options)


def test_plan_memory__needs_no_weights(device: str) -> None:
    small = Engine.plan_memory("demo", context=1024, device=device)
    large = Engine.plan_memory("demo", context=4096, device=device)
    assert small["total"] == sum(size for name, size in small.items() if name != "total")
    assert small["weights"] == large["weights"] > 10_000_000
    assert small["kv"] < large["kv"]


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
    calls = [
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
        with pytest.raises(OutOfMemoryError):
            engine.session()
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
    assert all(a.processed < b.processed for a, b in zip(seen, seen[1:], strict=False))
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
    tokens = []
    with pytest.raises(ContextFullError):
        for token in session.step(5):
            tokens.append(token)  # noqa: PERF402  what came before the error counts
    assert len(tokens) == 3
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


FRANCE_PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n<think>\n"


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


# generate


def test_generate__answers_with_reasoning(engine: Engine) -> None:
    chunks = list(engine.generate(FRANCE, temperature=0, max_tokens=100))
    assert text_of(chunks, "reasoning") == "The user asks for the capital of France. It is Paris."
    assert text_of(chunks) == "The capital of France is Paris."
    last = chunks[-1]
    assert last.finish_reason == "stop"
    assert all(chunk.finish_reason is None and chunk.usage is None for chunk in chunks[:-1])
    usage = last.usage
    assert usage is not None
    assert usage.prompt_tokens == len(engine.tokenizer.encode(FRANCE_PROMPT))
    assert usage.completion_tokens == len(ids_of(chunks)) == 27
    assert usage.reasoning_tokens == 16
    assert (usage.cached_tokens, usage.cache_miss_reason) == (0, "fresh_context")
    assert min(usage.prompt_tps, usage.generation_tps, usage.ttft) > 0
    assert ids_of(chunks)[-1] == engine.tokenizer.token_id("<|im_end|>")


def test_generate__prompt_forms_agree(engine: Engine) -> None:
    ids = engine.tokenizer.encode(FRANCE_PROMPT)
    runs = [
        ids_of(list(engine.generate(prompt, temperature=0, max_tokens=40)))
        for prompt in (FRANCE, FRANCE_PROMPT, ids, np.array(ids))
    ]
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_generate__without_thinking(engine: Engine) -> None:
    for options in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}):
        chunks = list(engine.generate(FRANCE, temperature=0, **options))  # type: ignore[arg-type]
        assert text_of(chunks) == "The capital of France is Paris."
        assert text_of(chunks, "reasoning") == ""


def test_generate__defaults_come_from_the_checkpoint(engine: Engine) -> None:
    """The demo's generation_config samples at 0.7, top-k 20, top-p 0.95."""
    given = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
    plain = ids_of(list(engine.generate(STORY, seed=5, max_tokens=40)))
    assert plain == ids_of(list(engine.generate(STORY, seed=5, max_tokens=40, **given)))  # type: ignore[arg-type]
    assert plain == ids_of(list(engine.generate(STORY, SamplingParams(seed=5, **given), max_tokens=40)))  # type: ignore[arg-type]
    greedy = ids_of(list(engine.generate(STORY, temperature=0, max_tokens=40)))
    assert plain != greedy
    assert greedy == ids_of(list(engine.generate(STORY, temperature=0.7, top_k=1, max_tokens=40)))


def test_generate__seed_none_is_random(engine: Engine) -> None:
    runs = {tuple(ids_of(list(engine.generate(STORY, temperature=1.5, max_tokens=24)))) for _ in range(3)}
    assert len(runs) > 1


def test_generate__stops(engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 0, "enable_thinking": False}
    chunks = list(engine.generate(FRANCE, stop="Paris", **options))
    assert text_of(chunks) == "The capital of France is "
    assert chunks[-1].finish_reason == "stop"
    is_id = engine.tokenizer.encode(" is")[0]
    chunks = list(engine.generate(FRANCE, stop_token_ids=[is_id], **options))
    assert text_of(chunks) == "The capital of France"
    assert (chunks[-1].finish_reason, ids_of(chunks)[-1]) == ("stop", is_id)
    chunks = list(engine.generate(FRANCE, max_tokens=2, **options))
    assert (chunks[-1].finish_reason, len(ids_of(chunks))) == ("length", 2)
    chunks = list(engine.generate(FRANCE, ignore_eos=True, max_tokens=60, **options))
    assert (chunks[-1].finish_reason, len(ids_of(chunks))) == ("length", 60)
    assert "<|im_end|>" not in text_of(chunks)


def test_generate__fills_the_context_and_no_more(engine: Engine) -> None:
    ids = [500] * (engine.context - 5)
    for max_tokens in (None, 100):
        chunks = list(engine.generate(ids, temperature=0, ignore_eos=True, max_tokens=max_tokens))
        assert (chunks[-1].finish_reason, len(ids_of(chunks))) == ("length", 5)
    (chunk,) = engine.generate([500] * engine.context)
    assert (chunk.finish_reason, chunk.token_ids) == ("length", ())


def test_generate__logprobs(engine: Engine) -> None:
    chunks = list(engine.generate(STORY, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3))
    entries = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    assert [entry.id for entry in entries] == ids_of(chunks)
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.id, pytest.approx(entry.logprob, abs=1e-3))
        assert entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1]
    assert all(chunk.logprobs is None for chunk in engine.generate(STORY, max_tokens=2))


def test_generate__logit_bias_and_penalties(engine: Engine) -> None:
    (token,) = engine.tokenizer.encode("z")
    chunks = list(engine.generate(STORY, temperature=0, max_tokens=3, logit_bias={token: 100}))
    assert ids_of(chunks) == [token] * 3
    biased: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "logit_bias": {token: 20}}
    plain = ids_of(list(engine.generate(STORY, **biased)))
    punished = ids_of(list(engine.generate(STORY, frequency_penalty=2, **biased)))
    assert punished.count(token) < plain.count(token)


def test_generate__tools_reach_the_template(engine: Engine) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    plain = list(engine.generate(FRANCE, max_tokens=1))[-1].usage
    tools = list(engine.generate(FRANCE, max_tokens=1, tools=[tool]))[-1].usage
    assert plain is not None
    assert tools is not None
    assert tools.prompt_tokens > plain.prompt_tokens


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tool_choice": "auto"}, UnsupportedError, "tool_choice is not implemented"),
        (
            {"response_format": {"type": "json_object"}},
            UnsupportedError,
            "response_format is not implemented",
        ),
        ({"thinking_token_budget": 5}, UnsupportedError, "thinking_token_budget is not implemented"),
        ({"temperature": -1}, ValueError, "temperature must be"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be"),
        ({"stop_token_ids": [4096]}, ValueError, "stop_token_ids: token id 4096"),
        ({"logit_bias": {4096: 1}}, ValueError, "logit_bias: token id 4096"),
        (
            {"prompt": STORY, "enable_thinking": True},
            ValueError,
            "enable_thinking goes with a prompt of messages",
        ),
        ({"prompt": STORY, "tools": []}, ValueError, "tools goes with a prompt of messages"),
        ({"prompt": [{"role": "robot", "content": ""}]}, ValueError, "role 'robot'"),
        ({"temp": 1}, TypeError, "unexpected keyword argument 'temp'"),
    ],
)
def test_generate__wrong_arguments_fail_at_the_call(
    engine: Engine, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        engine.generate(**{"prompt": FRANCE, **options})


def test_generate__none_goes_on(engine: Engine, session: Session) -> None:
    with pytest.raises(LilyError, match="nothing to go on from"):
        list(session.generate(None))
    session.prefill(STORY)
    joined = list(session.generate(None, temperature=0, max_tokens=8))
    assert ids_of(joined) == ids_of(list(engine.generate(STORY, temperature=0, max_tokens=8)))
    session.prefill(FRANCE_PROMPT)
    assert next(session.generate(None, temperature=0)).kind == "reasoning"


def test_generate__starts_afresh_each_time(engine: Engine, session: Session) -> None:
    runs = []
    for _ in range(2):
        session.prefill("Something else before. ")
        runs.append(ids_of(list(engine.generate(FRANCE, temperature=0, session=session, max_tokens=20))))
    assert runs[0] == runs[1] == ids_of(list(engine.generate(FRANCE, temperature=0, max_tokens=20)))


def test_generate__session_of_another_engine(engine: Engine, device: str) -> None:
    with Engine("demo", device=device, context=64, max_sessions=1) as other, other.session() as session:
        with pytest.raises(ValueError, match="another engine"):
            engine.generate(STORY, session=session)


def test_generate__reports_prefill_progress(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    ids = list(range(100, 300))
    list(engine.generate(ids, max_tokens=1, progress=lambda done, total: seen.append((done, total))))
    assert len(seen) >= 3
    assert seen[-1] == (200, 200)


def test_generate__unread_does_nothing(engine: Engine) -> None:
    engine.reset()
    engine.prefill(STORY)
    before = engine.logits
    engine.generate("Another prompt")
    assert np.array_equal(engine.logits, before)


def test_generate__close_and_ctrl_c_leave_the_session_usable(engine: Engine, session: Session) -> None:
    expected = ids_of(list(engine.generate(FRANCE, temperature=0)))
    chunks = session.generate(FRANCE, temperature=0)
    next(chunks)
    chunks.close()
    with pytest.raises(KeyboardInterrupt):
        for _ in session.generate(STORY, ignore_eos=True):
            raise KeyboardInterrupt

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(session.generate(list(range(100, 400)), progress=interrupt))
    assert session.position < 300
    assert ids_of(list(session.generate(FRANCE, temperature=0))) == expected


def test_generate__overlapping_calls_have_their_own_context(engine: Engine) -> None:
    alone = ids_of(list(engine.generate(FRANCE, temperature=0)))
    first = engine.generate(FRANCE, temperature=0)
    head = [next(first)]
    second = list(engine.generate(STORY, temperature=0, max_tokens=12))
    assert ids_of(head + list(first)) == alone
    assert ids_of(second) == ids_of(list(engine.generate(STORY, temperature=0, max_tokens=12)))


def test_generate__from_several_threads(engine: Engine) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 24}
    alone = [ids_of(list(engine.generate(STORY, seed=seed, **options))) for seed in range(3)]
    results: dict[int, list[int]] = {}

    def work(seed: int) -> None:
        results[seed] = ids_of(list(engine.generate(STORY, seed=seed, **options)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[seed] for seed in range(3)] == alone


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
    for top in (-1, 129, True):
        with pytest.raises(ValueError, match="top_logprobs must be"):
            engine.score(STORY, top_logprobs=top)
