"""A short text through a loaded model: its activations, prefill against decode, and its log probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lily import _native
from lily.doctor.checks import Check
from lily.doctor.slots import ACT_MAX
from lily.doctor.texts import PROSE, SAMPLE
from lily.engine import Engine

Progress = Callable[[int, int], object]

PASS_ROWS = (256, 64, 8, 1)  # prefill passes without an empty row, which would be counted as well
STEPS, QUICK_STEPS = 32, 8

CLEAR_MARGIN = 1.0  # a token this far ahead of the second must be the same however it was computed
MOST_MEAN_DELTA = 0.05
MOST_NORM_ERROR = 1e-3
CHANCE = 0.75  # of log(vocab): a model that predicts no better than this does not work

_PLACE = ("kernel", "label", "layer", "slot")
_COUNTS = ("values", "saturated", "nonfinite")


def sample_ids(engine: Engine, quick: bool) -> list[int]:
    """Tokens of the sample texts that fill one prefill pass."""
    ids = engine.tokenizer.encode(PROSE + SAMPLE)
    rows = PASS_ROWS[1:] if quick else PASS_ROWS
    return ids[: next(count for count in rows if count <= len(ids))]


def check_activations(check: Check, engine: Engine, ids: Sequence[int]) -> None:
    """Fills a check with what every launch of a prefill pass wrote; all of it must be finite."""
    session = engine._core.native().session()
    try:
        rows = _native.audit(session, np.array(ids, np.int32))
    finally:
        session.close()
    found = by_kernel_and_layer(rows)
    launches = {row["launch"] for row in rows}
    saturated, wrong = (sum(row[count] for row in rows) for count in ("saturated", "nonfinite"))
    largest = max((row["largest"] for row in rows if row["type"] == "act_t"), default=0.0)
    check.data = {
        "tokens": len(ids),
        "launches": len(launches),
        "values": sum(row["values"] for row in rows),
        "saturated": saturated,
        "nonfinite": wrong,
        "largest_act": largest,
        "by_kernel_and_layer": found,
    }
    check.text = (
        f"{len(ids)} tokens, {check.data['values']} values: {saturated} saturated, {wrong} not finite, "
        f"the largest rounded one {largest:.4g}"
    )
    if wrong:
        first = next(row for row in rows if row["nonfinite"])
        check.reason = f"{wrong} values are not finite, first in {_place(first)}"
    if saturated:
        places = [_place(row) for row in found if row["saturated"]]
        more = f" and {len(places) - 3} more" if len(places) > 3 else ""
        check.warnings.append(
            f"{saturated} activations are cut to {ACT_MAX:g}, in {', '.join(places[:3])}{more}"
        )


def by_kernel_and_layer(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums the rows of an audit, in the order of the pass."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in _PLACE)
        total = sums.setdefault(key, dict(zip(_PLACE, key, strict=True)) | dict.fromkeys(_COUNTS, 0))
        for name in _COUNTS:
            total[name] += row[name]
    return list(sums.values())


def _place(row: dict[str, Any]) -> str:
    layer = f" of layer {row['layer']}" if row["layer"] >= 0 else ""
    return f"{row['kernel']}.{row['slot']}{layer}"


def check_consistency(check: Check, engine: Engine, ids: Sequence[int], steps: int) -> None:
    """Fills a check with how far tokens that are decoded differ from the same ones prefilled."""
    tokens, logprobs, best, margins = [], [], [], []
    with engine.session() as session:
        list(session.prefill(ids))
        for _ in range(steps):
            second, first = np.partition(session.logits, -2)[-2:]
            best.append(int(np.argmax(session.logits)))
            margins.append(float(first - second))
            (token,) = session.step(max_tokens=1, temperature=0)
            tokens.append(token.id)
            logprobs.append(token.logprob)
        decoded = session.logits
    score = engine.score([*ids, *tokens], top_logprobs=1)
    start = len(ids) - 1
    same = score.top_ids[start:-1, 0] == np.array(best)
    clear = np.array(margins) > CLEAR_MARGIN
    deltas = np.abs(score.logprobs[start:] - np.array(logprobs))
    with engine.session() as session:
        list(session.prefill([*ids, *tokens]))
        last = float(np.abs(session.logits - decoded).max())
    check.data = {
        "steps": steps,
        "same_top1": float(same.mean()),
        "clear": int(clear.sum()),
        "clear_same_top1": float(same[clear].mean()) if clear.any() else None,
        "mean_delta": float(deltas.mean()),
        "largest_logit_difference": last,
    }
    check.text = (
        f"{steps} tokens: top-1 the same at {same.sum()}, mean |dlogprob| {deltas.mean():.4f}, "
        f"last logits within {last:.3g}"
    )
    if tokens != best:
        check.reason = "a greedy step did not take the most likely token"
    elif not same[clear].all():
        check.reason = f"{(~same[clear]).sum()} tokens with a margin above {CLEAR_MARGIN:g} differ"
    elif not deltas.mean() <= MOST_MEAN_DELTA:
        check.reason = f"mean |dlogprob| is above {MOST_MEAN_DELTA:g}"


def check_logprobs(check: Check, engine: Engine) -> None:
    """Fills a check with whether log probabilities make sense, and whether the model predicts text."""
    ids = engine.tokenizer.encode(PROSE)
    with engine.session() as session:
        list(session.prefill(ids))
        logits = session.logits.astype(np.float64)
        (token,) = session.step(max_tokens=1, temperature=0)
    vocab = len(logits)
    score = engine.score(ids, top_logprobs=2)
    finite = np.isfinite(logits).all() and np.isfinite(score.logprobs).all()
    mean = -float(score.logprobs.mean(dtype=np.float64))
    check.data = {"vocab": vocab, "mean_nll": mean, "chance_nll": math.log(vocab)}
    if not finite:
        check.reason = "logits or log probabilities are not finite"
        return
    norm = float(logits.max() + np.log(np.exp(logits - logits.max()).sum()))
    off = abs(float(logits[token.id]) - norm - token.logprob)
    perplexity = math.exp(min(mean, 700.0))  # as far as a float goes
    check.data["perplexity"] = perplexity
    check.data["logprob_error"] = off
    check.text = (
        f"perplexity {perplexity:.4g} of {vocab}, logits from {logits.min():.4g} to {logits.max():.4g}"
    )
    if score.logprobs.max() > 0 or (np.exp(score.top_logprobs).sum(-1) > 1 + MOST_NORM_ERROR).any():
        check.reason = "probabilities add up to more than 1"
    elif off > MOST_NORM_ERROR:
        check.reason = f"the log probability of a token is off by {off:.3g}"
    elif mean > CHANCE * math.log(vocab):
        check.reason = "the text is predicted hardly better than by chance: weights or tokenizer are wrong"
