"""Printing an answer while it is generated."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from typing import Any

from lily.cli.terminal import dim, is_terminal, note
from lily.results import Chunk, TokenLogprob, ToolCall, Usage


class Reply:
    """Collects the chunks of an answer and prints them.

    Reasoning is printed on a terminal only, so that a pipe or file gets the answer and nothing else. A call
    of a tool is a line with the function's name and its arguments as JSON.

    Args:
        quiet: Print nothing, only collect.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.text = ""
        self.reasoning = ""
        self.tool_calls: list[ToolCall] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._quiet = quiet
        self._terminal = is_terminal(sys.stdout)
        self._open = False  # whether a line has begun

    def read(self, chunks: Iterable[Chunk]) -> None:
        """Print chunks as they come; what was read stays if this is interrupted."""
        for chunk in chunks:
            if chunk.kind == "reasoning":
                first, self.reasoning = not self.reasoning, self.reasoning + chunk.text
                self._show_reasoning(chunk.text, first)
            elif chunk.kind == "text":
                first, self.text = not self.text, self.text + chunk.text
                self._show_text(chunk.text, first)
            if chunk.tool_call is not None:
                self.tool_calls.append(chunk.tool_call)
                self._show_call(chunk.tool_call)
            if chunk.warning is not None:
                self.end_line()
                note(f"warning: {chunk.warning}")
            if chunk.logprobs is not None:
                self.logprobs = self.logprobs or []
                self.logprobs += chunk.logprobs
            self.token_ids += chunk.token_ids
            self.finish_reason = chunk.finish_reason
            self.usage = chunk.usage

    def end_line(self) -> None:
        """End the line of the answer."""
        if self._open:
            self._show("\n")
            self._open = False

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON types."""
        record: dict[str, Any] = {
            "text": self.text,
            "reasoning": self.reasoning,
            "tool_calls": [dataclasses.asdict(call) for call in self.tool_calls],
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": dataclasses.asdict(self.usage) if self.usage is not None else None,
        }
        if self.logprobs is not None:
            record["logprobs"] = [dataclasses.asdict(token) for token in self.logprobs]
        return record

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of a conversation."""
        return {"role": "assistant", "content": self.text, "reasoning_content": self.reasoning}

    @property
    def empty(self) -> bool:
        """Whether nothing came."""
        return not (self.text or self.reasoning or self.tool_calls)

    @property
    def unanswered(self) -> bool:
        """Whether the tokens were used up by reasoning."""
        answered = bool(self.text or self.tool_calls)
        return self.finish_reason == "length" and bool(self.reasoning) and not answered

    def explain_end(self, max_tokens: int | None) -> None:
        """Say why an answer was cut off: a complaint if it never began, else a hint on a terminal."""
        if self.finish_reason != "length" or self.usage is None:
            return
        full = max_tokens is None or self.usage.completion_tokens < max_tokens
        if self.unanswered:
            option = "--context" if full else "--max-tokens"
            note(f"the tokens were used up before the answer began: raise {option}, or use --no-thinking")
        elif is_terminal(sys.stderr):
            hint = "(context full)" if full else "(stopped at --max-tokens)"
            print(dim(hint, sys.stderr), file=sys.stderr)

    def _show_reasoning(self, text: str, first: bool) -> None:
        if self._terminal and text:
            head = dim("(thinking) ", sys.stdout) if first else ""
            self._show(head + dim(text, sys.stdout))

    def _show_text(self, text: str, first: bool) -> None:
        if text:
            head = "\n\n" if self.reasoning and first and self._terminal else ""
            self._show(head + text)

    def _show_call(self, call: ToolCall) -> None:
        self.end_line()
        self._show(f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})\n")
        self._open = False

    def _show(self, text: str) -> None:
        if not self._quiet:
            self._open = True  # before Ctrl-C can come in between
            print(text, end="", flush=True)


def speed_line(usage: Usage) -> str:
    """Return the counts and speed of an answer in one line."""
    return (
        f"prompt {usage.prompt_tokens} tokens, {usage.prompt_tps:.0f} tok/s; "
        f"answer {usage.completion_tokens} tokens, {usage.generation_tps:.1f} tok/s; "
        f"first token after {usage.ttft:.2f} s"
    )


def brief_line(usage: Usage) -> str:
    """Return the same for one answer of many, with what of the prompt did not have to be read again."""
    known = f" ({usage.cached_tokens} known)" if usage.cached_tokens else ""
    speed = f"{usage.completion_tokens} written at {usage.generation_tps:.1f} tok/s"
    return f"{usage.prompt_tokens} tokens read{known}, {speed}, first after {usage.ttft:.2f} s"
