"""Which part of a prompt was read before, why not more, and where later prompts may want to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from lily.core import Ids
    from lily.tokenizer import Tokenizer

LEAST_KEPT = 32  # tokens that are quicker to read again than a snapshot is worth

_MESSAGE_START = "<|im_start|>"
_THINK = "<think>"
_SHOWN = 3  # tokens of a text in a reason


class Reuse(NamedTuple):
    """How a prompt compares with what was read before.

    Attributes:
        tokens: Tokens whose state is there.
        common: Tokens that the prompt begins with in common with something that was read, at least `tokens`.
        expected: Token that followed these there; -1 if none did.
    """

    tokens: int = 0
    common: int = 0
    expected: int = -1


def marks_of(ids: Ids, tokenizer: Tokenizer, first: int) -> list[int]:
    """Return positions behind `first` at which a snapshot is worth its memory, ascending.

    In a conversation these are the end of the first message, which other conversations may share, and the
    beginning of the reply: the next prompt has the messages up to there, but may write what follows
    otherwise, as templates leave out old reasoning. In another prompt it is the end.
    """
    start = tokenizer.token_id(_MESSAGE_START)
    starts = [] if start is None else np.flatnonzero(ids == start)[1:].tolist()
    marks = {starts[0], starts[-1]} if starts else {len(ids)}
    return sorted(mark for mark in marks if mark > first and mark >= LEAST_KEPT)


def miss_reason(ids: Ids, reuse: Reuse, tokenizer: Tokenizer) -> str | None:
    """Say why not more of a prompt was reused; None if all of it was.

    The text begins with one word: fresh_context (nothing was read before), new_tokens (all that was read
    before is reused, and more follows), token_differs, reasoning_left_out (the chat template no longer
    writes what the model thought), or not_kept (no snapshot is left where the prompt could go on).
    """
    tokens, common, expected = reuse.tokens, reuse.common, reuse.expected
    if tokens == len(ids):
        return None
    if common == 0 and expected < 0:
        return "fresh_context"
    if common == len(ids) or (expected < 0 and common > tokens):
        return (
            f"not_kept: {common} tokens were read before, but no state is left between {tokens} and {common}"
        )
    if expected < 0:
        return f"new_tokens: the prompt goes on behind the {tokens} tokens that were read before"
    found, before = tokenizer.decode(ids[common : common + _SHOWN]), tokenizer.decode(expected)
    where = f"token {common} was {before!r} ({expected}), now the prompt has {found!r} ({ids[common]}) there"
    if expected == tokenizer.token_id(_THINK):
        return f"reasoning_left_out: {where}; the chat template leaves out reasoning of earlier replies"
    return f"token_differs: {where}"
