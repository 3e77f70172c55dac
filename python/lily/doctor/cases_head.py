"""Inputs (see cases.py) of the head's and the sampler's kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lily.doctor.inputs import NO_TOKEN, Dims, Made, Numbers, chain
from lily.doctor.reference_head import MAX_BIAS, TOKEN_RING, VOCAB_BLOCK
from lily.doctor.reference_math import GENERATIONS
from lily.doctor.slots import STRUCTS, Array

# Of VOCAB_BLOCK small terms after a large one most are below half a unit of the sum, so its roundings
# have one sign.
STATS_ULPS = 4 + VOCAB_BLOCK / 8


def blocks_of(logits: Array, sharpness: float = 1.0) -> tuple[Array, Array]:
    """Statistics of the logits' blocks, as head_reduce and sample_reduce make them."""
    parts = [logits[i : i + VOCAB_BLOCK].astype(np.float64) for i in range(0, len(logits), VOCAB_BLOCK)]
    most = [max(x.max(), np.finfo(np.float64).min) for x in parts]
    stats = [(x.max(), np.exp(sharpness * (x - m)).sum()) for x, m in zip(parts, most, strict=True)]
    return np.array(stats, np.float32), np.array(
        [i * VOCAB_BLOCK + x.argmax() for i, x in enumerate(parts)], np.uint32
    )


def logit_pool(g: Numbers, d: Dims, state: Array) -> tuple[Array, Array]:
    """Logits of all sessions and generations, NaN but for the next generation's; and those."""
    pool = np.full((d.sessions, GENERATIONS, d.vocab), np.nan, np.float32)
    logits = g.values(d.vocab, scale=4, outlier=3)
    logits[g.rng.integers(0, d.vocab, 3)] = logits.max()  # ties
    if g.turn % 2:  # banned tokens, and a whole block of them
        logits[g.rng.integers(0, d.vocab, 5)] = -np.inf
        logits[VOCAB_BLOCK : 2 * VOCAB_BLOCK] = -np.inf
    pool[state[0], (state[3] + 1) % GENERATIONS] = logits
    return pool, logits


def head_logits(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    hidden = c["K"] or d.k
    vocab = d.n if hidden > 512 else d.vocab
    slots = {"x": g.acts(hidden), "step": g.step(d), **g.weights(vocab, hidden)}
    slots["logits"] = g.values(d.sessions, GENERATIONS, vocab)
    return Made(
        {"sessions": d.sessions, "vocab": vocab, "hidden": hidden}, slots, {"logits": chain(hidden, g)}
    )


def head_reduce(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    step = g.step(d)
    args = {"sessions": d.sessions, "vocab": d.vocab, "hidden": 64}
    return Made(
        args, {"logits": logit_pool(g, d, step)[0], "step": step}, {"stats": STATS_ULPS, "indices": 0}
    )


def head_pick(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    step = g.step(d)
    pool, logits = logit_pool(g, d, step)
    stats, indices = blocks_of(logits)
    choice, choice_indices = blocks_of(logits + g.values(d.vocab))
    slots = {"logits": pool, "stats": stats, "indices": indices, "choice_stats": choice}
    slots |= {"choice_indices": choice_indices, "step": step, "ring": ring(g)}
    args = {"sessions": d.sessions, "vocab": d.vocab, "hidden": 64}
    return Made(args, slots, {"step": 0, "tokens": 0, "ring": 8})


def ring(g: Numbers) -> Array:
    return g.rng.integers(0, 1000, (TOKEN_RING, 2)).astype(np.uint32)


def logprob_rows(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    first = 2 * (g.turn % 2)
    top = min(1 + d.n // 10, d.vocab)
    logits = g.rows(d, d.vocab, scale=4)
    logits[:, ::5] = np.round(logits[:, ::5])  # ties
    targets = g.rng.integers(0, d.vocab, d.rows).astype(np.uint32)
    targets[d.live :] = NO_TOKEN
    slots = {"logits": logits, "targets": targets, "step": g.step(d, rows=d.live + first)}
    error = 8 + d.vocab / 256
    ulps = {"logprobs": error, "top_ids": 0, "top_logprobs": error}
    return Made({"rows": d.rows, "vocab": d.vocab, "top": top, "first": first}, slots, ulps)


def logprob_next(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    step = g.step(d)
    args = {"sessions": d.sessions, "vocab": d.vocab, "top": min(1 + d.n // 10, d.vocab)}
    slots = {"logits": logit_pool(g, d, step)[0], "step": step}
    return Made(args, slots, {"top_ids": 0, "top_logprobs": 8 + d.vocab / 256})


def params(g: Numbers, d: Dims, **fields: float) -> Array:
    """SampleParams of every session; those of the last one as given, the others as no one would want them."""
    p = np.zeros(d.sessions, STRUCTS["SampleParams"])
    p["temperature"], p["top_p"], p["repetition"], p["top_k"] = 1e-3, 1e-3, 1e3, 1
    for name, value in {"top_p": 1, "repetition": 1, "top_k": 0, "temperature": 0.7, **fields}.items():
        p[name][-1] = value
    return p.view(np.uint32)


def sample_adjust(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    last = g.integer(d.vocab) if g.turn % 2 else NO_TOKEN
    step = g.step(d, last_token=last)
    counts = g.rng.choice(
        np.array([0, 0, 1, 7, 0x7FFF, 0x8000, 0x8003, 0xFFFF], np.uint16), (d.sessions, 3, d.vocab)
    )
    penalties = {} if g.turn == 1 else {"presence": 0.5, "frequency": 0.1, "repetition": 1.3}
    slots = {
        "logits": logit_pool(g, d, step)[0],
        "params": params(g, d, **penalties),
        "step": step,
        "counts": counts,
    }
    return Made({"sessions": d.sessions, "vocab": d.vocab}, slots, {"counts": 0, "adjusted": 4})


def sample_bias(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    count = min(d.vocab, MAX_BIAS, 1 + d.k)
    ids = np.full((d.sessions, MAX_BIAS), 0, np.uint32)
    ids[-1, :count] = g.rng.permutation(d.vocab)[:count]
    ids[-1, 0] = NO_TOKEN
    slots = {
        "ids": ids,
        "values": g.values(d.sessions, MAX_BIAS, scale=10),
        "params": params(g, d, bias_count=count),
        "step": g.step(d),
        "adjusted": g.values(d.vocab, scale=4),
    }
    return Made({"sessions": d.sessions, "vocab": d.vocab}, slots, {"adjusted": 1})


def temperature(g: Numbers) -> float:
    return (0.7, 3.0, 0.0, 1.0, 0.05)[g.turn % 5]


def sample_reduce(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    slots = {"adjusted": logit_pool(g, d, g.step(d))[1], "params": params(g, d, temperature=temperature(g))}
    return Made(
        {"sessions": d.sessions, "vocab": d.vocab},
        {**slots, "step": g.step(d)},
        {"stats": STATS_ULPS, "indices": 0},
    )


def sample_mass(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    step, t = g.step(d), temperature(g)
    logits = logit_pool(g, d, step)[1]
    stats, indices = blocks_of(logits, 1 / t if t else 1.0)
    slots = {
        "adjusted": logits,
        "stats": stats,
        "indices": indices,
        "params": params(g, d, temperature=t),
        "step": step,
    }
    return Made({"sessions": d.sessions, "vocab": d.vocab}, slots, {"mass": 8})


def sample_pick(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    step = g.step(d)
    pool, logits = logit_pool(g, d, step)
    stats, indices = blocks_of(logits)
    p = np.exp(np.round(logits * 4) / 4 - logits.max())  # equal masses
    masses = (
        np.floor(p / p.sum() * 2.0**31),
        1000 + g.rng.permutation(d.vocab),
        g.rng.integers(0, 4, d.vocab),  # a draw often lies just at the end of a token's share
    )
    limits: tuple[dict[str, float], ...] = (
        {},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
        {"top_p": 0.9},
        {"top_k": 1 + d.n // 64},
        {"min_p": (1.0, 0.05)[g.turn // 8 % 2]},
        {"top_k": d.vocab, "top_p": 0.0},
        {"top_k": 1},
        {"top_k": 2, "top_p": 0.6, "min_p": 0.1},
    )
    chosen = {**limits[g.turn % 8], "seed_low": g.integer(2**32), "seed_high": g.integer(2**32)}
    mass = masses[g.turn // 8 % 3].astype(np.uint32)
    if g.turn // 8 % 3 == 0:
        mass[np.argmax(mass)] = (1 << 30) + 65  # fp32 rounds it up: min_p = 1 must keep it
    # Near the order of the masses: at a high temperature masses tie where logits do not.
    adjusted = (masses[g.turn // 8 % 3] / 2**24 + g.rng.integers(0, 2, d.vocab)).astype(np.float32)
    slots = {
        "mass": mass,
        "adjusted": adjusted,
        "choice_stats": blocks_of(adjusted)[0],
        "logits": pool,
        "stats": stats,
        "indices": indices,
        "params": params(g, d, **chosen),
        "step": step,
        "ring": ring(g),
    }
    return Made({"sessions": d.sessions, "vocab": d.vocab}, slots, {"step": 0, "tokens": 0, "ring": 8})


HEAD_INPUTS = (
    *(head_logits, head_reduce, head_pick, logprob_rows, logprob_next),
    *(sample_adjust, sample_bias, sample_reduce, sample_mass, sample_pick),
)
