"""Printing an answer while it is generated."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from lily.cli.terminal import dim, is_terminal, note
from lily.results import Chunk, Usage


class Reply:
    """Collects the chunks of an answer and prints them.

    Reasoning is printed on a terminal only, so that a pipe or file gets the answer and nothing else.

    Args:
        quiet: Print nothing, only collect.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.text = ""
        self.reasoning = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self._quiet = quiet
        self._terminal = is_terminal(sys.stdout)

    def read(self, chunks: Iterable[Chunk]) -> None:
        """Print chunks as they come; what was read stays if this is interrupted."""
        for chunk in chunks:
            if chunk.kind == "reasoning":
                first, self.reasoning = not self.reasoning, self.reasoning + chunk.text
                self._show_reasoning(chunk.text, first)
            else:
                first, self.text = not self.text, self.text + chunk.text
                self._show_text(chunk.text, first)
            self.token_ids += chunk.token_ids
            self.finish_reason = chunk.finish_reason
            self.usage = chunk.usage

    def end_line(self) -> None:
        """End the line of the answer."""
        if not self._quiet and (self.text or (self.reasoning and self._terminal)):
            print(flush=True)

    @property
    def unanswered(self) -> bool:
        """Whether the tokens were used up by reasoning."""
        return self.finish_reason == "length" and bool(self.reasoning) and not self.text

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
        if self._quiet or not self._terminal or not text:
            return
        head = dim("(thinking) ", sys.stdout) if first else ""
        print(head + dim(text, sys.stdout), end="", flush=True)

    def _show_text(self, text: str, first: bool) -> None:
        if self._quiet or not text:
            return
        head = "\n\n" if self.reasoning and first and self._terminal else ""
        print(head + text, end="", flush=True)


def speed_line(usage: Usage) -> str:
    """Return the counts and speed of an answer in one line."""
    return (
        f"prompt {usage.prompt_tokens} tokens, {usage.prompt_tps:.0f} tok/s; "
        f"answer {usage.completion_tokens} tokens, {usage.generation_tps:.1f} tok/s; "
        f"first token after {usage.ttft:.2f} s"
    )
