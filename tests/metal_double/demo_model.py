"""The demo model on the software double of Metal: what the checks do with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import lily
from lily.errors import LilyError

PROMPT = "Once upon a time there was a fox."
LONG = " ".join([PROMPT] * 20)


def open_engine(device: str = "metal") -> lily.Engine:
    """The demo model, with small chunks."""
    return lily.Engine("demo", device=device, context=512, prefill_chunk=64)


def story(engine: lily.Engine, tokens: int = 12, prompt: str = PROMPT) -> list[int]:
    """Greedy tokens of a session of their own."""
    with engine.session() as session:
        for _ in session.prefill(prompt):
            pass
        return [token.id for token in session.step(max_tokens=tokens)]


def info(engine: lily.Engine) -> dict[str, str]:
    """Facts that the device tells about itself."""
    facts: dict[str, str] = engine.info()["device_info"]
    return facts


def error_of(call: Callable[[], object]) -> LilyError | None:
    """The error of a call; None if there is none, and then what it returned is closed."""
    try:
        result = call()
    except LilyError as error:
        return error
    if isinstance(result, lily.Engine):
        result.close()
    return None


def persist(session: lily.Session, ids: list[int], count: int) -> tuple[list[int], list[LilyError]]:
    """`count` greedy tokens after a prompt, and the errors met; a call that fails is made again."""
    native, fed = session._native, 0
    tokens: list[int] = []
    errors: list[LilyError] = []

    def go_on() -> None:
        nonlocal fed
        while fed < len(ids):
            fed += native.prefill(np.array(ids[fed:], np.int32))
        while len(tokens) < count:
            tokens.append(native.step(count - len(tokens) - 1)[0])

    while (error := error_of(go_on)) is not None:
        errors.append(error)
    return tokens, errors
