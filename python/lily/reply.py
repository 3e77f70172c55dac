"""Generated tokens to reasoning, answer text and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lily.tool_calls import CLOSE, OPEN, CallReader, NoCallError, Read, parse_call, tail_start

if TYPE_CHECKING:
    from lily.results import Kind, ToolCall
    from lily.tokenizer import Tokenizer
    from lily.tools import Tool


class Piece(NamedTuple):
    """A piece of a reply; the fields are those of Chunk."""

    kind: Kind
    text: str
    tool_call: ToolCall | None = None
    warning: str | None = None


class ReplyStream:
    """Splits generated tokens into reasoning, text and tool calls, and looks for stop strings in the text.

    The tokens <think> and </think> switch between reasoning and answer and are not part of the text, nor are
    the line breaks that the chat template puts around them. With tools, <tool_call> in the answer begins a
    call, which is one piece, and the line breaks around calls are not part of the text either. What begins
    like a call but is none comes as text with a warning. Text is held back while it may be the beginning of a
    stop string or of a call, and line breaks while they may be the last of the reasoning or before a call.

    Args:
        tokenizer: Tokenizer of the checkpoint.
        context: Token ids in front of the reply; reasoning may have been opened there.
        stop: Stop strings; not looked for in reasoning and calls.
        tools: Functions that may be called; without any, calls are part of the text.

    Attributes:
        kind: What the next token belongs to, as far as known: "reasoning", or "text" for all else.
        stopped: Whether a stop string was found; the reply is over then.
        calls: Number of calls so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int],
        stop: Sequence[str] = (),
        tools: Sequence[Tool] = (),
    ) -> None:
        self.stopped = False
        self.calls = 0
        self._open = tokenizer.token_id("<think>")
        self._close = tokenizer.token_id("</think>")
        self._stop = tuple(stop)
        self._tools = {tool.name: tool for tool in tools}
        # The tags as tokens, which another tokenizer may count among those that are not shown.
        self._tags = {tokenizer.token_id(tag): tag for tag in (OPEN, CLOSE)} if tools else {}
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
        self._held = ""
        self.kind: Kind = "reasoning" if self._left_open(tokenizer, context) else "text"
        self._trim = False
        self._call: CallReader | None = None
        self._before_call = ""  # line breaks

    def _left_open(self, tokenizer: Tokenizer, context: Sequence[int]) -> bool:
        """Tell whether the last marker of the context is <think>; a special token ends a turn."""
        for index in reversed(context):
            if index == self._open:
                return True
            if index == self._close or index in tokenizer.special_ids:
                return False
        return False

    @property
    def at_line_end(self) -> bool:
        """Whether reasoning so far ends with a line break."""
        return self.kind == "reasoning" and bool(self._held)

    @property
    def inside_character(self) -> bool:
        """Whether some bytes of the last character are still to come."""
        return self._detokenizer.inside_character

    def add(self, index: int) -> list[Piece]:
        """Take one token id and return the pieces that are certain with it."""
        if index == self._open and self.kind == "text" and not (self._call and self._call.begun):
            return self._switch("reasoning", self._detokenizer.flush())
        if index == self._close and self.kind == "reasoning":
            last = (self._held + self._detokenizer.flush()).rstrip("\n")
            self._held = ""
            return self._switch("text", last)
        if index in self._tags:
            return self._feed(self._detokenizer.flush() + self._tags[index])
        return self._feed(self._detokenizer.add(index))

    def finish(self, complete: bool = True) -> list[Piece]:
        """Return what is still held back, unless a stop string was found.

        Args:
            complete: The model ended the reply itself; what is open then was not cut off.
        """
        if self.stopped:
            return []
        return self._flush(self._detokenizer.flush(), complete)

    def _switch(self, kind: Kind, last: str) -> list[Piece]:
        pieces = self._flush(last, complete=False)
        if not self.stopped:
            self.kind = kind
            self._trim = True
        return pieces

    def _flush(self, last: str, complete: bool) -> list[Piece]:
        """Take the last text before something else, and return it with all that is held back."""
        pieces = self._feed(last)
        while self._call is not None:
            pieces += self._end_call(self._call.finish(complete))
        if self._held and not self.stopped:
            pieces.append(Piece(self.kind, self._held))
        self._held = ""
        return pieces

    def _feed(self, piece: str) -> list[Piece]:
        if self._call is not None:
            read = self._call.add(piece) if piece else None
            return [] if read is None else self._end_call(read)
        if self._trim:
            piece = piece.lstrip("\n")
            self._trim = not piece
        text = self._held + piece
        if self.kind == "reasoning":
            cut = len(text.rstrip("\n"))
        elif self._tools and (at := text.find(OPEN)) >= 0:
            return self._begin_call(text, at)
        else:
            cut = self._find_stop(text)
            if self._tools and not self.stopped:
                cut = min(cut, self._find_call(text))
        self._held = "" if self.stopped else text[cut:]
        return [Piece(self.kind, text[:cut])] if cut else []

    def _begin_call(self, text: str, at: int) -> list[Piece]:
        """Take text with <tool_call> in it, unless a stop string comes before."""
        end = at + len(OPEN)
        cut = self._find_stop(text[:end])
        if not self.stopped:
            cut = len(text[:at].rstrip("\n"))
            self._before_call = text[cut:at]
            self._call = CallReader()
        self._held = ""
        pieces = [Piece("text", text[:cut])] if cut else []
        return pieces if self.stopped else pieces + self._feed(text[end:])

    def _end_call(self, read: Read) -> list[Piece]:
        """Return the call that was read, or its text, and what follows as far as it is certain."""
        before, self._before_call, self._call = self._before_call, "", None
        try:
            if read.problem is not None:
                raise NoCallError(read.problem)
            call = parse_call(read.body, self._tools)
        except NoCallError as error:
            piece = Piece("text", before + read.raw, warning=f"not a tool call: {error}")
        else:
            piece = Piece("tool_call", read.raw, tool_call=call)
            self.calls += 1
            self._trim = True
        return [piece, *self._feed(read.rest)]

    def _find_call(self, text: str) -> int:
        """Return how much of the text is certain: up to what may become <tool_call>, or come before it."""
        return len(text[: tail_start(text, OPEN)].rstrip("\n"))

    def _find_stop(self, text: str) -> int:
        """Return how much of the text is certain: up to a stop string, or up to what may become one.

        The stop string that is complete first wins, so that the result does not depend on how tokens split
        the text.
        """
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return min(found)[1]
        for length in range(max(map(len, self._stop), default=0), 0, -1):
            if len(text) >= length and any(stop.startswith(text[-length:]) for stop in self._stop):
                return len(text) - length
        return len(text)


class ThinkingBudget:
    """Ends reasoning that has used up its tokens, in the form that the chat template writes.

    Args:
        tokenizer: Tokenizer of the checkpoint.
        budget: Most tokens of reasoning; None is no limit.
    """

    def __init__(self, tokenizer: Tokenizer, budget: int | None) -> None:
        self._tokenizer = tokenizer
        self._budget = None if tokenizer.token_id("</think>") is None else budget  # else it never closes
        self._left: list[int] = []

    def forced(self, reply: ReplyStream, used: int) -> int | None:
        """Return the token that has to come next after `used` tokens of reasoning, or None if any may."""
        if not self._left:
            over = self._budget is not None and used >= self._budget and reply.kind == "reasoning"
            if not over or reply.inside_character:
                return None
            self._left = self._tokenizer.encode("</think>\n\n" if reply.at_line_end else "\n</think>\n\n")
        return self._left.pop(0)
