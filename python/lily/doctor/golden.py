"""The demo model against golden data of an independent implementation in fp32, token by token.

`golden.json` has, of six texts of 192 tokens, the oracle's most likely next token at every position, its
margin to the second one (in logits), and the negative log probability of the text's own next token. It is an
extract of tests/golden (tests/doctor_golden.py makes it). In half precision a rounding can flip a near tie of
the router, so single positions may differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lily.doctor.checks import Check
from lily.engine import Engine
from lily.errors import LilyError

GOLDEN = Path(__file__).with_name("golden.json")
LEAST_TOP1 = 0.98
CLEAR_MARGIN = 1.0  # from here on, the most likely token must be the same at every position
MOST_DELTA = 0.02
QUICK_TEXTS, QUICK_TOKENS = ("chat_think", "austen"), 64
FORCING_BIAS = 100.0  # makes any token the most likely one

Progress = Callable[[int, int], object]
Predictions = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


class Text(NamedTuple):
    """One text of n tokens: ids, top1 and margin [n]; nll [n - 1], that of token 1, 2, ..."""

    name: str
    ids: list[int]
    top1: npt.NDArray[np.int32]
    margin: npt.NDArray[np.float64]
    nll: npt.NDArray[np.float64]


def golden_texts(quick: bool = False) -> list[Text]:
    """The golden data, or the beginning of some of it.

    Raises:
        LilyError: The file, a part of the installation, is missing or damaged.
    """
    try:
        stored: list[dict[str, Any]] = json.loads(GOLDEN.read_text(encoding="utf-8"))["texts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LilyError(f"{GOLDEN}: {error}: Lily is not installed completely") from error
    tokens = QUICK_TOKENS if quick else None
    return [
        Text(
            text["name"],
            text["ids"][:tokens],
            np.array(text["top1"][:tokens], np.int32),
            np.array(text["margin"][:tokens]),
            np.array(text["nll"][: tokens and tokens - 1]),
        )
        for text in stored
        if not quick or text["name"] in QUICK_TEXTS
    ]


def prefilled(engine: Engine, ids: Sequence[int], tick: Callable[[], object]) -> Predictions:
    """Most likely next tokens [n] and log probabilities [n - 1] of a text that is fed at once."""
    score = engine.score(ids, top_logprobs=1)
    tick()
    return score.top_ids[:, 0], score.logprobs


def decoded(engine: Engine, ids: Sequence[int], tick: Callable[[], object]) -> Predictions:
    """The same of a text whose tokens are fed one by one, each as if it had been chosen."""
    logprobs = []
    with engine.session() as session:
        list(session.prefill(ids[:1]))
        top1 = [int(np.argmax(session.logits))]
        for target in ids[1:]:
            (token,) = session.step(max_tokens=1, logit_bias={target: FORCING_BIAS})
            if token.id != target:
                raise ArithmeticError(f"token {token.id} was chosen although {target} was forced")
            logprobs.append(token.logprob)
            top1.append(int(np.argmax(session.logits)))
            tick()
    return np.array(top1, np.int32), np.array(logprobs, np.float32)


def compare_texts(
    check: Check,
    texts: Sequence[Text],
    predict: Callable[[Engine, Sequence[int], Callable[[], object]], Predictions],
    engine: Engine,
    progress: Progress,
) -> None:
    """Fills a check with how the model's predictions agree with the oracle's."""
    total = sum(len(text.ids) for text in texts)
    done = 0
    same, margin, deltas = [], [], []

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    for text in texts:
        start = done
        top1, logprobs = predict(engine, text.ids, tick)
        done = start + len(text.ids)
        progress(done, total)
        same.append(text.top1 == top1)
        margin.append(text.margin)
        deltas.append(np.abs(-text.nll - logprobs))
    judge(check, np.concatenate(same), np.concatenate(margin), np.concatenate(deltas))


def judge(
    check: Check,
    same: npt.NDArray[np.bool_],
    margin: npt.NDArray[np.float64],
    deltas: npt.NDArray[np.float64],
) -> None:
    """Compares the agreement with the bars."""
    clear = same[margin > CLEAR_MARGIN]
    top1, clear_top1, delta = float(same.mean()), float(clear.mean()), float(deltas.mean())
    check.data = {"positions": same.size, "top1": top1, "clear_top1": clear_top1, "mean_delta": delta}
    check.text = (
        f"{same.size} positions: top-1 {100 * top1:.2f} %, {100 * clear_top1:.2f} % where clear, "
        f"mean |dlogprob| {delta:.4f}"
    )
    if top1 < LEAST_TOP1:
        check.reason = f"top-1 is below {100 * LEAST_TOP1:g} %"
    elif not clear.all():
        check.reason = f"{(~clear).sum()} positions with a margin above {CLEAR_MARGIN:g} have another top-1"
    elif not delta <= MOST_DELTA:
        check.reason = f"mean |dlogprob| is above {MOST_DELTA:g}"
