"""generate() on the demo model."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest

from lily import ContextFullError, Engine, LilyError, SamplingParams, Session, UnsupportedError
from replies import FRANCE, FRANCE_PROMPT, STORY, ids_of, text_of


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
    assert 0 <= usage.cached_tokens <= usage.prompt_tokens
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
        chunks = list(engine.generate(FRANCE, temperature=0, **options))
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
        reply = engine.generate(
            ids, temperature=0, ignore_eos=True, max_tokens=max_tokens, on_context_full="stop"
        )
        chunks = list(reply)
        assert (chunks[-1].finish_reason, len(ids_of(chunks))) == ("length", 5)
    with pytest.raises(ContextFullError, match="on_context_full='stop'"):
        engine.generate(ids, max_tokens=6)
    assert len(ids_of(list(engine.generate(ids, ignore_eos=True, max_tokens=5)))) == 5
    (chunk,) = engine.generate([500] * engine.context)
    assert (chunk.finish_reason, chunk.token_ids) == ("length", ())


def test_generate__logprobs(engine: Engine) -> None:
    chunks = list(engine.generate(STORY, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3))
    entries = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    assert [entry.id for entry in entries] == ids_of(chunks)
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0][0] == entry.id
        assert entry.top[0][1] == pytest.approx(entry.logprob, abs=1e-3)
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


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_generate__tools_reach_the_template(engine: Engine) -> None:
    plain = list(engine.generate(FRANCE, max_tokens=1))[-1].usage
    tools = list(engine.generate(FRANCE, max_tokens=1, tools=[TOOL]))[-1].usage
    assert plain is not None
    assert tools is not None
    assert tools.prompt_tokens > plain.prompt_tokens


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"tool_choice": "auto"}, ValueError, "tool_choice='auto' needs tools"),
        (
            {"tool_choice": "maybe", "tools": [TOOL]},
            ValueError,
            "tool_choice must be 'auto', 'none', 'required'",
        ),
        ({"tool_choice": "required", "tools": [TOOL]}, UnsupportedError, "'required' is not implemented yet"),
        ({"tools": [TOOL, TOOL]}, ValueError, "'weather' is the name of a tool before it as well"),
        (
            {"response_format": {"type": "json_object"}},
            UnsupportedError,
            "response_format is not implemented",
        ),
        ({"thinking_token_budget": -1}, ValueError, "thinking_token_budget must be an integer at least 0"),
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
        ({"prompt": FRANCE[0]}, ValueError, "single message: give a list of messages"),
        ({"enable_thinking": "no"}, ValueError, "enable_thinking must be True or False, not 'no'"),
        ({"chat_template_kwargs": [1]}, TypeError, "chat_template_kwargs must be a mapping, not list"),
        ({"chat_template_kwargs": {1: 2}}, TypeError, "chat_template_kwargs: every name must be a string"),
        ({"chat_template_kwargs": {"messages": []}}, ValueError, "'messages' is set by generate"),
        ({"chat_template_kwargs": {"tools": []}}, ValueError, "'tools' is set by generate"),
        ({"chat_template_kwargs": {"tokenize": True}}, ValueError, "'tokenize' is set by generate"),
        (
            {"chat_template_kwargs": {"add_generation_prompt": False}},
            ValueError,
            "'add_generation_prompt' is set by generate",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
            ValueError,
            "'enable_thinking' is given as an argument as well",
        ),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, ValueError, "enable_thinking must be True"),
        ({"session": 5}, TypeError, "session must be a Session, not int"),
        ({"progress": 3}, TypeError, "progress must be a function of"),
        ({"top_k": 2**70}, ValueError, "top_k must be an integer from -1 to 2147483647"),
        ({"temperature": 10**400}, ValueError, "temperature must be a number at least 0"),
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


def test_generate__closed_session_fails_at_the_call(engine: Engine, session: Session) -> None:
    session.close()
    for call in (session.generate, lambda prompt: engine.generate(prompt, session=session)):
        with pytest.raises(LilyError, match="the session is closed"):
            call(STORY)


def test_generate__session_of_another_engine(engine: Engine, device: str) -> None:
    with (
        Engine("demo", device=device, context=64, max_sessions=1) as other,
        other.session() as session,
        pytest.raises(ValueError, match="another engine"),
    ):
        engine.generate(STORY, session=session)


def test_generate__reports_prefill_progress(engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    ids = list(range(100, 300))
    list(engine.generate(ids, max_tokens=1, progress=lambda done, total: seen.append((done, total))))
    assert len(seen) >= 4
    assert (seen[0], seen[-1]) == ((0, 200), (200, 200))


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
    with contextlib.suppress(KeyboardInterrupt):
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


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 1, "presence_penalty": 1.0}])
@pytest.mark.parametrize("budget", [0, 1, 4, 7])
def test_generate__a_thinking_budget_closes_reasoning(
    engine: Engine, budget: int, options: dict[str, Any]
) -> None:
    free = list(engine.generate(FRANCE, max_tokens=60, logprobs=True, **options))
    chunks = list(
        engine.generate(FRANCE, max_tokens=60, logprobs=True, thinking_token_budget=budget, **options)
    )
    ids, close = ids_of(chunks), engine.tokenizer.encode("\n</think>\n\n")
    assert ids[:budget] == ids_of(free)[:budget]
    assert ids[budget : budget + len(close)] == close
    assert text_of(chunks, "reasoning") == engine.tokenizer.decode(ids[:budget]).rstrip("\n")
    assert text_of(chunks)
    assert "think>" not in text_of(chunks)
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.reasoning_tokens == budget + 2  # the line break and </think>
    assert usage.completion_tokens == len(ids)
    found = [entry.logprob for chunk in chunks for entry in chunk.logprobs or ()]
    prompt = engine.tokenizer.apply_chat_template(FRANCE, tokenize=True)
    scores = engine.score([*prompt, *ids]).logprobs[len(prompt) - 1 :]
    assert found == pytest.approx(scores.tolist(), abs=0.02)


def test_generate__a_thinking_budget_that_is_not_used_up_changes_nothing(engine: Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "seed": 3}
    assert ids_of(list(engine.generate(FRANCE, thinking_token_budget=1000, **options))) == ids_of(
        list(engine.generate(FRANCE, **options))
    )
    plain = list(engine.generate(FRANCE, enable_thinking=False, **options))
    assert ids_of(
        list(engine.generate(FRANCE, enable_thinking=False, thinking_token_budget=0, **options))
    ) == ids_of(plain)


def test_generate__a_thinking_budget_respects_max_tokens(engine: Engine) -> None:
    chunks = list(engine.generate(FRANCE, max_tokens=4, thinking_token_budget=3, temperature=0))
    assert len(ids_of(chunks)) == 4
    assert chunks[-1].finish_reason == "length"
