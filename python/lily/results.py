"""What the calls of an engine hand out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["text", "reasoning", "tool_call"]
Finish: TypeAlias = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How many tokens of a prompt have been processed."""

    processed: int
    total: int


@dataclass(frozen=True, slots=True)
class Token:
    """One token of step(). Text is empty while a character is incomplete; special tokens are written out."""

    id: int
    logprob: float
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a generated token, and of the most likely ones as (token id, log probability)."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts and speed of one generation.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens produced, the end token included.
        reasoning_tokens: Those of them that belong to reasoning.
        cached_tokens: Tokens of the prompt that did not have to be processed, because they were before.
        cache_miss_reason: Why cached_tokens is not larger; None if the whole prompt was there. It begins with
            fresh_context, new_tokens, token_differs, reasoning_left_out or not_kept, and goes on for people.
        prompt_tps: Prompt tokens processed per second; 0 if there were none.
        generation_tps: Tokens produced per second of engine time; 0 if there were none.
        ttft: Seconds from the start to the first token; 0 if there was none.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int
    cache_miss_reason: str | None
    prompt_tps: float
    generation_tps: float
    ttft: float


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model asks for.

    Attributes:
        id: Unique name of the call, for the message with its result.
        name: The function.
        arguments: Its arguments, as JSON types.
    """

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply.

    Attributes:
        text: New text; may be empty in the last chunk. Of a call, what the model wrote.
        kind: "text" for the answer, "reasoning" for what the model thinks before it, "tool_call" for a call.
        token_ids: Tokens read since the chunk before; some may belong to text that is still held back.
        finish_reason: None, or in the last chunk "stop" (end token or stop string), "length", or "tool_calls"
            if it ended like "stop" and there were calls.
        usage: None, or in the last chunk the counts and speed.
        logprobs: One entry for each of token_ids if logprobs were asked for, else None.
        tool_call: The call, if that is the kind; always a complete one.
        warning: Why text that begins like a call is none, else None.
    """

    text: str
    kind: Kind
    token_ids: tuple[int, ...] = ()
    finish_reason: Finish | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    tool_call: ToolCall | None = None
    warning: str | None = None


class Meter:
    """Counts and times of one generation; time the caller spends between chunks does not count."""

    def __init__(self) -> None:
        self._begun = self._started = time.perf_counter()
        self._prefill = self._stepping = 0.0
        self._first: float | None = None
        self.prompt = self.cached = self.completion = self.reasoning = 0
        self.miss_reason: str | None = None

    def prefilled(self) -> None:
        """Take the time at the end of the prompt."""
        self._prefill = time.perf_counter() - self._begun

    def start(self) -> None:
        """Take the time before a token."""
        self._started = time.perf_counter()

    def token(self, kind: Kind) -> None:
        """Count a token and the time since start()."""
        now = time.perf_counter()
        self._stepping += now - self._started
        if self._first is None:
            self._first = now - self._begun
        self.completion += 1
        self.reasoning += kind == "reasoning"

    def usage(self) -> Usage:
        """Return the figures."""
        computed = self.prompt - self.cached
        return Usage(
            prompt_tokens=self.prompt,
            completion_tokens=self.completion,
            reasoning_tokens=self.reasoning,
            cached_tokens=self.cached,
            cache_miss_reason=self.miss_reason,
            prompt_tps=computed / self._prefill if computed and self._prefill > 0 else 0.0,
            generation_tps=self.completion / self._stepping if self._stepping > 0 else 0.0,
            ttft=self._first or 0.0,
        )
