"""Prompts that begin with something that was read before: what is reused and why not more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lily import Engine, Session, Usage
from lily.reuse import LEAST_KEPT, Reuse, marks_of, miss_reason
from replies import ids_of

SYSTEM = "You are a helpful assistant. " + "The fox ran over the hill to the river. " * 12
WORDS = [(i * 7919) % 3900 + 20 for i in range(600)]


@pytest.fixture
def fresh(device: str) -> Iterator[Engine]:
    """An engine that has read nothing yet."""
    with Engine("demo", device=device, prefill_chunk=64, context=1024, max_sessions=3) as engine:
        yield engine


def answer(engine: Engine | Session, prompt: Any, **options: Any) -> tuple[list[int], Usage]:
    chunks = list(engine.generate(prompt, **{"temperature": 0, "max_tokens": 12, **options}))
    usage = chunks[-1].usage
    assert usage is not None
    return ids_of(chunks), usage


def cold(device: str, prompt: Any, **options: Any) -> list[int]:
    with Engine("demo", device=device, prefill_chunk=64, context=1024, snapshot_memory=0) as engine:
        return answer(engine, prompt, **options)[0]


def turn(*texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": "system", "content": SYSTEM},
        *({"role": roles[i % 2], "content": text} for i, text in enumerate(texts)),
    ]


def test_conversation__reads_only_what_is_new(fresh: Engine, device: str) -> None:
    texts = ["What is the capital of France?"]
    before = 0
    for number in range(5):
        messages = turn(*texts)
        ids, usage = answer(fresh, messages)
        assert ids == cold(device, messages)
        prompt = fresh.tokenizer.apply_chat_template(messages, tokenize=True)
        # What follows the header of the reply is written otherwise in the next prompt.
        assert usage.cached_tokens == before
        assert usage.prompt_tokens == len(prompt)
        before = len(
            fresh.tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=True)
        )
        assert usage.cache_miss_reason is not None
        reason = usage.cache_miss_reason.partition(":")[0]
        assert reason == ("reasoning_left_out" if number else "fresh_context")
        texts += ["It is Paris.", f"And of Spain? Try {number}."]


@pytest.mark.timing
@pytest.mark.filterwarnings("ignore:context .* exceeds:UserWarning")
def test_conversation__the_tenth_turn_begins_as_fast_as_the_second(device: str) -> None:
    """With 4,000 tokens of history, each turn adds as many tokens as the one before."""
    with Engine("demo", device=device, context=6144, max_sessions=1) as engine:
        history = "Once upon a time there was a fox who lived in the wood. " * 270
        messages = [{"role": "system", "content": history}]
        times = []
        for number in range(10):
            messages.append({"role": "user", "content": f"What is the capital of France? Turn {number}."})
            assert engine.tokenizer is not None
            _, usage = answer(engine, messages, max_tokens=3)
            times.append(usage.ttft)
            if number:
                assert usage.prompt_tokens - usage.cached_tokens < 60
                assert usage.cached_tokens > 3000
            messages.append({"role": "assistant", "content": "The capital of France is Paris."})
        assert min(times[7:]) <= 1.3 * min(times[1:4])  # other processes only make it slower


def test_prompt__of_two_conversations_that_share_the_first_message(fresh: Engine, device: str) -> None:
    answer(fresh, turn("What is a fox?"))
    ids, usage = answer(fresh, turn("Count to three."))
    system = fresh.tokenizer.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
    assert usage.cached_tokens == len(system)
    assert usage.cache_miss_reason is not None
    assert usage.cache_miss_reason.startswith("token_differs: token ")
    assert "What" in usage.cache_miss_reason
    assert "Count" in usage.cache_miss_reason
    assert ids == cold(device, turn("Count to three."))


def test_prompt__that_is_known_as_a_whole(fresh: Engine, device: str) -> None:
    first, _ = answer(fresh, WORDS)
    with fresh.session() as session:
        again, usage = answer(session, WORDS)
        assert (usage.cached_tokens, usage.cache_miss_reason) == (600, None)
        assert usage.prompt_tps == 0
        assert again == first == cold(device, WORDS)


def test_prompt__that_goes_on_where_the_session_is(fresh: Engine, device: str) -> None:
    session = fresh.session()
    list(session.prefill(WORDS[:100]))
    _, usage = answer(session, WORDS[:150])
    assert usage.cached_tokens == 100
    assert usage.cache_miss_reason is not None
    assert usage.cache_miss_reason.startswith("new_tokens")
    ids, usage = answer(fresh, WORDS[:180])
    assert usage.cached_tokens == 150
    assert ids == cold(device, WORDS[:180])


def test_prompt__that_was_cancelled_is_not_read_again(fresh: Engine, device: str) -> None:
    def stop(done: int, total: int) -> None:
        if done > 200:
            chunks.close()

    chunks = fresh.generate(WORDS, progress=stop)
    assert list(chunks) == []
    other = fresh.generate(WORDS[300:340], max_tokens=1)
    list(other)
    ids, usage = answer(fresh, WORDS)
    assert 200 < usage.cached_tokens <= 320
    assert ids == cold(device, WORDS)


def test_prompt__of_a_request_that_overlapped_is_known_afterwards(fresh: Engine) -> None:
    first = fresh.generate(WORDS[:200], ignore_eos=True, max_tokens=50)
    next(first)
    answer(fresh, WORDS[100:300])
    first.close()
    _, usage = answer(fresh, WORDS[100:350])
    assert usage.cached_tokens == 200


def test_progress__begins_with_what_is_known(fresh: Engine) -> None:
    list(fresh.generate(WORDS[:200], max_tokens=1))
    seen: list[tuple[int, int]] = []
    list(fresh.generate(WORDS[:330], max_tokens=1, progress=lambda *step: seen.append(step)))
    assert seen[0] == (200, 330)
    assert seen[-1] == (330, 330)


def test_reuse__is_the_same_with_sampling_and_penalties(fresh: Engine, device: str) -> None:
    options = {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5, "repetition_penalty": 1.3}
    answer(fresh, WORDS[:200])
    answer(fresh, WORDS[300:400])
    ids, usage = answer(fresh, WORDS[:260], **options)
    assert usage.cached_tokens == 200
    assert ids == cold(device, WORDS[:260], **options)


def test_reuse__logits_are_bit_equal(fresh: Engine, device: str) -> None:
    answer(fresh, WORDS[:200], max_tokens=1)
    answer(fresh, WORDS[300:400], max_tokens=1)
    with fresh.session() as session, fresh.session() as plain:
        chunks = session.generate(WORDS[:300], max_tokens=1, temperature=0)
        list(chunks)
        list(plain.prefill(WORDS[:300]))
        list(plain.step(1))
        assert np.array_equal(session.logits, plain.logits)


def test_snapshots__stay_within_their_memory(device: str) -> None:
    size = Engine.plan_memory("demo")["snapshots"] // 16
    with Engine("demo", device=device, context=512, max_sessions=2, snapshot_memory=3 * size) as engine:
        for start in range(0, 300, 50):
            answer(engine, WORDS[start : start + 100], max_tokens=2)
            cache = engine.info()["cache"]
            assert cache["snapshots"] <= 3
        _, usage = answer(engine, WORDS[:100], max_tokens=2)
        assert usage.cached_tokens == 0
        assert usage.cache_miss_reason is not None
    with Engine("demo", device=device, context=512, max_sessions=2, snapshot_memory=0) as engine:
        answer(engine, WORDS[:100])
        answer(engine, WORDS[100:200])
        assert answer(engine, WORDS[:100])[1].cached_tokens == 0
        assert engine.info()["cache"]["snapshots"] == 0


def test_reset__forgets_the_session_and_not_the_snapshots(fresh: Engine) -> None:
    answer(fresh, WORDS[:100])
    fresh.reset()
    assert answer(fresh, WORDS[:100])[1].cached_tokens == 100


def test_marks__are_the_ends_of_messages(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    ids = np.array(tokenizer.apply_chat_template(turn("a", "b", "c"), tokenize=True), np.int32)
    start = tokenizer.token_id("<|im_start|>")
    starts = [i for i, token in enumerate(ids) if token == start]
    assert marks_of(ids, tokenizer, 0) == [starts[1], starts[-1]]
    assert marks_of(ids, tokenizer, starts[1]) == [starts[-1]]
    assert marks_of(ids, tokenizer, starts[-1]) == []
    plain = np.arange(100, 100 + LEAST_KEPT, dtype=np.int32)
    assert marks_of(plain, tokenizer, 0) == [LEAST_KEPT]
    assert marks_of(plain[1:], tokenizer, 0) == []


def test_reason__each(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    ids = np.array(tokenizer.encode("The capital of France is Paris."), np.int32)
    think = tokenizer.token_id("<think>")
    assert think is not None
    known = {
        Reuse(): "fresh_context",
        Reuse(3, 3): "new_tokens",
        Reuse(2, 3): "not_kept",
        Reuse(2, len(ids)): "not_kept",
        Reuse(2, 3, int(ids[0])): "token_differs",
        Reuse(2, 3, think): "reasoning_left_out",
    }
    for reuse, word in known.items():
        reason = miss_reason(ids, reuse, tokenizer)
        assert reason is not None
        assert reason.partition(":")[0] == word
    assert miss_reason(ids, Reuse(len(ids), len(ids)), tokenizer) is None
