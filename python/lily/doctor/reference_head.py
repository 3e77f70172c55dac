"""The reference (see reference.py) of the head's and the sampler's kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from lily.doctor.reference_math import Slots, kept, next_generation, product
from lily.doctor.slots import Array, Out

TOKEN_RING, VOCAB_BLOCK, MAX_BIAS = 64, 4096, 1024


def head_logits(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    logits, scale = kept(s.logits), np.zeros(s.logits.shape)
    place = s.step.session, next_generation(s.step)
    logits[place], scale[place] = product(s.x, s.w, s.scales, s.biases, integers=c.integers)
    return {"logits": Out(logits, scale)}


def block_stats(logits: Array, sharpness: float) -> dict[str, Out]:
    stats, scale, indices = [], [], []
    for first in range(0, len(logits), VOCAB_BLOCK):
        block = logits[first : first + VOCAB_BLOCK]
        # A block of logits that are all -inf has no weight.
        below = sharpness * (block - max(block.max(), np.finfo(np.float64).min))
        stats.append((block.max(), np.exp(below).sum()))
        scale.append((0, (np.exp(below) * (1 - np.maximum(below, -1e3))).sum()))
        indices.append(first + block.argmax())
    return {"stats": Out(np.array(stats), np.array(scale)), "indices": Out(np.array(indices, float))}


def head_reduce(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    return block_stats(s.logits[s.step.session, next_generation(s.step)], 1.0)


def log_sum(stats: Array) -> float:
    """log(sum(exp(logits))) from the blocks' {largest, sum of exp relative to it}."""
    most = stats[:, 0].max()
    return float(most + np.log((stats[:, 1] * np.exp(stats[:, 0] - most)).sum()))


def finished(s: Slots, token: int) -> dict[str, Out]:
    """The end of a step: the token is fed to the next one and put in the ring with its log probability."""
    step = s.step
    logit = s.logits[step.session, next_generation(step), token]
    norm = log_sum(s.stats)
    ring, scale, bits = kept(s.ring), np.zeros(s.ring.shape), np.zeros(s.ring.shape, bool)
    place = step.ticket % TOKEN_RING
    ring[place] = token, logit - norm
    scale[place, 1], bits[place, 1] = abs(logit) + abs(norm) + 1, True
    after = (step.session, step.position + step.rows, 1, next_generation(step), token, step.ticket + 1)
    return {
        "step": Out(np.array([after], float)),
        "tokens": Out(np.array([float(token)])),
        "ring": Out(ring, scale, bits),
    }


def head_pick(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    return finished(s, int(s.choice_indices[s.choice_stats[:, 0].argmax()]))


def logprob_rows(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows = max(min(a.rows, s.step.rows - a.first), 0)
    logits = s.logits[:rows]
    most = logits.max(-1, keepdims=True)
    norm = most + np.log(np.exp(logits - most).sum(-1, keepdims=True))
    targets = np.minimum(s.targets[:rows, None], a.vocab - 1)
    best = np.argsort(-logits, -1, kind="stable")[:, : a.top]
    logprobs, top_ids, top_logprobs = kept(s.logprobs), kept(s.top_ids), kept(s.top_logprobs)
    scale, top_scale = np.zeros(s.logprobs.shape), np.zeros(s.top_logprobs.shape)
    logprobs[:rows] = (np.take_along_axis(logits, targets, -1) - norm)[:, 0]
    top_ids[:rows] = best
    top_logprobs[:rows] = np.take_along_axis(logits, best, -1) - norm
    scale[:rows] = (np.abs(np.take_along_axis(logits, targets, -1)) + np.abs(norm) + 1)[:, 0]
    top_scale[:rows] = np.abs(np.take_along_axis(logits, best, -1)) + np.abs(norm) + 1
    return {
        "logprobs": Out(logprobs, scale),
        "top_ids": Out(top_ids),
        "top_logprobs": Out(top_logprobs, top_scale),
    }


def logprob_next(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    logits = s.logits[s.step.session, next_generation(s.step)]
    norm = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    best = np.argsort(-logits, kind="stable")[: a.top]
    scale = np.abs(logits[best]) + abs(norm) + 1
    return {"top_ids": Out(best.astype(np.float64)), "top_logprobs": Out(logits[best] - norm, scale)}


# Sampling


def sample_adjust(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    step, p = s.step, s.params[s.step.session]
    logits = s.logits[step.session, next_generation(step)]
    counts = kept(s.counts)
    if p.presence == 0 and p.frequency == 0 and p.repetition == 1:
        return {"counts": Out(counts), "adjusted": Out(logits)}
    now = s.counts[step.session, step.generation].copy()
    if step.last_token < a.vocab and now[step.last_token] & 0x7FFF != 0x7FFF:
        now[step.last_token] += 1
    counts[step.session, next_generation(step)] = now
    times = now & 0x7FFF  # in the output; the bit above them means "in the prompt"
    repeated = np.where(logits > 0, logits / p.repetition, logits * p.repetition)
    adjusted = np.where(now > 0, repeated, logits) - p.frequency * times - p.presence * (times > 0)
    size = np.abs(adjusted) + np.abs(p.frequency * times) + abs(p.presence)
    return {
        "counts": Out(counts),
        "adjusted": Out(adjusted, np.where((now > 0) & (logits > -np.inf), size, 0)),
    }


def sample_bias(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    count = min(s.params[s.step.session].bias_count, MAX_BIAS)
    ids, values = s.ids[s.step.session, :count], s.values[s.step.session, :count]
    adjusted, scale = kept(s.adjusted), np.zeros(s.adjusted.shape)
    known = ids < a.vocab
    adjusted[ids[known]] = s.adjusted[ids[known]] + values[known]
    scale[ids[known]] = np.abs(adjusted[ids[known]])
    return {"adjusted": Out(adjusted, scale)}


def sharpness(p: Any) -> float:
    return 1 / p.temperature if p.temperature > 0 else 1.0


def sample_reduce(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    return block_stats(s.adjusted, sharpness(s.params[s.step.session]))


def sample_mass(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    sharp = sharpness(s.params[s.step.session])
    most = s.stats[:, 0].max()
    total = (s.stats[:, 1] * np.exp(sharp * (s.stats[:, 0] - most))).sum()
    below = sharp * (s.adjusted - most)
    mass = np.exp(below) / total * 2.0**31
    return {"mass": Out(np.floor(mass), mass * (2 - np.maximum(below, -1e3)))}


def philox(key: tuple[int, int], counter: int) -> int:
    """First word of Philox 4x32-10 of the counter (counter, 0, 0, 0)."""
    word, x, (k0, k1) = 0xFFFFFFFF, (counter, 0, 0, 0), key
    for _ in range(10):
        first, second = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = (second >> 32 ^ x[1] ^ k0, second & word, first >> 32 ^ x[3] ^ k1, first & word)
        k0, k1 = k0 + 0x9E3779B9 & word, k1 + 0xBB67AE85 & word
    return x[0]


def sample_pick(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    p, mass, least = s.params[s.step.session], s.mass, 1
    if 0 < p.top_k < a.vocab:
        mass = np.where(s.adjusted >= np.sort(s.adjusted)[-p.top_k], mass, 0)
    left = mass[mass >= least]
    if p.top_p < 1:
        # Thresholds are products of two fp32 numbers, in fp32.
        goal = min(max(int(np.float32(p.top_p) * np.float32(left.sum())), 1), int(left.sum()))
        largest_first = np.sort(left)[::-1]
        least = max(least, int(largest_first[np.searchsorted(np.cumsum(largest_first), goal)]))
    least = max(least, min(int(np.float32(p.min_p) * np.float32(mass.max())), int(mass.max())))
    running = np.cumsum(np.where(mass >= least, mass, 0))
    draw = philox((p.seed_low, p.seed_high), s.step.position + s.step.rows) * int(running[-1]) >> 32
    return finished(s, int(np.searchsorted(running, draw, side="right")))


HEAD_REFERENCES = (
    *(head_logits, head_reduce, head_pick, logprob_rows, logprob_next),
    *(sample_adjust, sample_bias, sample_reduce, sample_mass, sample_pick),
)
