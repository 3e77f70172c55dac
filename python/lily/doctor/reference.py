"""What every kernel must compute, in numpy float64: one function per kernel, with its name and slot names.

These functions are the specification of the kernels (those of the head and of sampling: reference_head.py,
those of one decoded row: reference_row.py).
They follow the model's mathematics (transformers modeling_qwen3_5_moe.py judges them) and know nothing about
threads, lanes or tiles. What is part of a kernel's contract and visible in its numbers is here too: which
weights are rounded to half, which results saturate, ties, integer masses.

A function takes (s, a, c): slots, args, and consts with `integers`, which says whether the device multiplies
16-bit integers in its quantised products. Slots arrive decoded, in the shape of their declaration
(`expected` in references.py does that from the kernel table): numbers as float64 or int64, structs as
namespaces. It returns an `Out` per written slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lily.doctor.reference_head import HEAD_REFERENCES
from lily.doctor.reference_math import (
    SWIGLU_SHIFT,
    Slots,
    kept,
    next_generation,
    product,
    rms,
    sigmoid,
    silu,
    swiglu,
    tile_product,
    weight_parts,
)
from lily.doctor.slots import Array, Out, half_values, saturated

HEAD_DIM, ROTARY_DIM, DELTA_DIM, CONV_WIDTH = 256, 64, 128, 4
PAGE, ROUTE_BLOCK = 256, 256
HALF_ROUNDING = 2.0**13  # of a normal half, in units of 2^-24


# embed, norm


def embed_gather(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    tokens = np.minimum(s.tokens[: s.step.rows], a.vocab - 1)
    q, scale, bias = weight_parts(s.w[tokens], s.scales[tokens], s.biases[tokens], 4)
    x, size = kept(s.x), np.zeros(s.x.shape)
    x[: s.step.rows] = q * scale + bias
    size[: s.step.rows] = np.abs(q * scale + bias)
    return {"x": Out(x, size)}


def rms_norm(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    y = kept(s.y)
    y[: s.step.rows] = saturated(rms(s.x[: s.step.rows], a.eps) * s.w)
    return {"y": Out(y, np.abs(y))}


def rms_norm_last(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    y = saturated(rms(s.x[s.step.rows - 1], a.eps) * s.w)
    return {"y": Out(y, np.abs(y))}


def gated_rms_norm(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows = s.step.rows
    z = s.proj[:rows, a.gate : a.gate + a.value_heads * DELTA_DIM].reshape(rows, a.value_heads, DELTA_DIM)
    y = kept(s.y)
    y[:rows] = saturated(rms(s.x[:rows], a.eps) * s.w * silu(z))
    return {"y": Out(y, np.abs(y))}


# quantised products


def qmv(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows = s.step.rows
    y, scale = kept(s.y), np.zeros(s.y.shape)
    y[:rows], scale[:rows] = product(s.x[:rows], s.w, s.scales, s.biases, c.BITS, integers=c.integers)
    return {"y": Out(y, scale)}


def qmv_add(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    out = qmv(s, a, c)["y"]
    return {"y": Out(out.value + s.y, out.scale + np.abs(s.y))}


def qmm(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows = min(a.rows, s.step.rows - a.first)
    y, scale = kept(s.y), np.zeros(s.y.shape)
    if rows > 0:
        y[:rows], scale[:rows] = tile_product(
            s.x[:rows], s.w, s.scales, s.biases, c.BITS, integers=c.integers
        )
    return {"y": Out(y, scale)}


def qmm_add(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    out = qmm(s, a, c)["y"]
    return {"y": Out(out.value + s.y, out.scale + np.abs(s.y))}


def qmm_swiglu(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows = min(a.rows, s.step.rows - a.first)
    y, scale = kept(s.y), np.zeros(s.y.shape)
    if rows > 0:
        gate, up = (
            tile_product(s.x[:rows], s.w[half], s.scales[half], s.biases[half], c.BITS, integers=c.integers)
            for half in (slice(a.n), slice(a.n, None))
        )
        y[:rows], scale[:rows] = swiglu(*gate, *up)
    return {"y": Out(y, scale)}


# Gated DeltaNet


def conv_silu(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows, step = s.step.rows, s.step
    tail = CONV_WIDTH - 1
    before = s.state[step.session, step.generation]
    x = np.concatenate([before if step.position else np.zeros_like(before), s.proj[:rows, : a.channels]])
    total = sum(x[t : t + rows] * s.w[:, t] for t in range(CONV_WIDTH))
    size = sum(np.abs(x[t : t + rows] * s.w[:, t]) for t in range(CONV_WIDTH))
    y, scale, state = kept(s.y), np.zeros(s.y.shape), kept(s.state)
    y[:rows] = silu(total)
    scale[:rows] = 1.1 * size + np.abs(y[:rows])
    state[step.session, next_generation(step)] = x[rows : rows + tail]
    return {"y": Out(y, scale), "state": Out(state)}


def delta_prepare(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows, heads = s.step.rows, a.key_heads
    x = s.qkv[:rows, : 2 * heads]
    qkv, gates, scale = kept(s.qkv), kept(s.gates), np.zeros(s.gates.shape)
    qkv[:rows, : 2 * heads] = x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)
    qkv[:rows, :heads] /= np.sqrt(DELTA_DIM)
    columns = s.proj[:rows, a.a : a.a + 2 * a.value_heads].reshape(rows, 2, a.value_heads)
    softplus = np.logaddexp(0, columns[:, 0] + s.dt_bias)
    rate = np.exp(s.a_log)
    gates[:rows, :, 0] = np.exp(-rate * softplus)
    gates[:rows, :, 1] = sigmoid(columns[:, 1])
    # softplus is a sum and log(1 + small) in fp32: its error is relative to 1 + the sum's terms.
    size = 1 + np.abs(columns[:, 0]) + np.abs(s.dt_bias)
    scale[:rows, :, 0] = gates[:rows, :, 0] * (1 + rate * (softplus + size))
    scale[:rows, :, 1] = gates[:rows, :, 1]
    return {"qkv": Out(qkv, np.abs(qkv)), "gates": Out(gates, scale)}


def delta_rule(s: Slots, a: Any, qkv: Array, gates: Array) -> dict[str, Out]:
    """qkv [rows, heads, 128], gates [rows, value_heads, 2]; y is [rows, value_heads, 128]."""
    step = s.step
    keys = np.arange(a.value_heads) // (a.value_heads // a.key_heads)
    state = s.state[step.session, step.generation].copy()  # [head, value, key]
    if step.position == 0:
        state[:] = 0
    norm = np.linalg.norm(state, axis=-1)
    error = np.zeros(state.shape[:-1])  # of a row of the state: k has length 1, so errors only add up
    y, scale = np.empty((len(qkv), *state.shape[:-1])), np.empty((len(qkv), *state.shape[:-1]))
    for t in range(len(qkv)):
        q, k, v = qkv[t, keys], qkv[t, a.key_heads + keys], qkv[t, 2 * a.key_heads :]
        decay, beta = gates[t, :, :1], gates[t, :, 1:]
        state *= decay[..., None]
        change = beta * (v - np.einsum("hvk,hk->hv", state, k))
        state += change[..., None] * k[:, None]
        error = decay * (error + norm) + beta * (np.abs(v) + decay * norm) + np.abs(change)
        norm = np.linalg.norm(state, axis=-1)
        y[t] = np.einsum("hvk,hk->hv", state, q)
        scale[t] = (error + norm) * np.linalg.norm(q, axis=-1)[:, None]
    after, after_scale = kept(s.state), np.zeros(s.state.shape)
    after[step.session, next_generation(step)] = state
    after_scale[step.session, next_generation(step)] = (error + norm)[..., None]
    return {"state": Out(after, after_scale), "y": Out(y, scale)}


def delta_scan(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows = s.step.rows
    out = delta_rule(s, a, s.qkv[:rows], s.gates[:rows])
    y, scale = kept(s.y), np.zeros(s.y.shape)
    y[:rows], scale[:rows] = out["y"].value, out["y"].scale
    return {"state": out["state"], "y": Out(y, scale)}


# Attention


def cache_places(s: Slots, first: int, last: int) -> tuple[Array, Array]:
    """Page and place in the page of tokens [first, last) of the step's session."""
    t = np.arange(first, last)
    return s.page_table[s.step.session, t // PAGE], t % PAGE


class Heads(NamedTuple):
    """Queries [rows, heads, 256], keys and values [rows, kv_heads, 256] of a projection, and scales."""

    q: Array
    q_scale: Array
    k: Array
    k_scale: Array
    v: Array


def heads_of(proj: Array, s: Slots, position: int, heads: int, kv_heads: int, eps: float) -> Heads:
    """Norm and rotation of a projection [rows, width]; queries are scaled by HEAD_DIM^-0.5."""
    rows = len(proj)
    columns = proj[:, : (2 * heads + 2 * kv_heads) * HEAD_DIM].reshape(rows, -1, HEAD_DIM)
    query, key, value = (
        columns[:, : 2 * heads : 2],
        columns[:, 2 * heads : -kv_heads],
        columns[:, -kv_heads:],
    )
    # The angle is a product of two fp32 numbers, in fp32 as in every implementation of this model.
    angle = np.float32(position + np.arange(rows))[:, None] * np.float32(s.inv_freq)
    cos, sin = np.cos(np.float64(angle))[:, None], np.sin(np.float64(angle))[:, None]

    def turned(x: Array, w: Array) -> tuple[Array, Array]:
        x = rms(x, eps) * w
        half = ROTARY_DIM // 2
        first, second, rest = x[..., :half], x[..., half:ROTARY_DIM], x[..., ROTARY_DIM:]
        size = np.abs(first) + np.abs(second)
        turn = [first * cos - second * sin, second * cos + first * sin, rest]
        return np.concatenate(turn, -1), np.concatenate([size, size, np.abs(rest)], -1)

    q, q_scale = (x / np.sqrt(HEAD_DIM) for x in turned(query, s.q_norm))
    return Heads(q, q_scale, *turned(key, s.k_norm), value)


def rope_write(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows, position, group = s.step.rows, s.step.position, a.heads // a.kv_heads
    q, q_scale, k, k_scale, value = heads_of(s.proj[:rows], s, position, a.heads, a.kv_heads, a.eps)
    by_kv_head = (a.kv_heads, a.rows, group, HEAD_DIM)
    out_q, out_q_scale = np.full(by_kv_head, np.nan), np.zeros(by_kv_head)
    out_q[:, :rows] = saturated(q).reshape(rows, a.kv_heads, group, HEAD_DIM).swapaxes(0, 1)
    out_q_scale[:, :rows] = q_scale.reshape(rows, a.kv_heads, group, HEAD_DIM).swapaxes(0, 1)
    k_cache, k_cache_scale, v_cache = kept(s.k_cache), np.zeros(s.k_cache.shape), kept(s.v_cache)
    places = cache_places(s, position, position + rows)
    k_cache[places], k_cache_scale[places], v_cache[places] = k, k_scale, value
    return {
        "q": Out(out_q.reshape(s.q.shape), out_q_scale.reshape(s.q.shape)),
        "k_cache": Out(k_cache, k_cache_scale),
        "v_cache": Out(v_cache),
    }


class Attended(NamedTuple):
    """One KV head's attention: per query, sums of p v and of p = exp(score - most), most, and scales."""

    total: Array
    total_scale: Array
    weight: Array
    most: Array
    score_scale: Array


def attend(q: Array, k: Array, v: Array, seen: Array, slack: Array | float = 0.0) -> Attended:
    """q [n, 256], k and v [tokens, 256], seen [n, tokens]. A score's error is a relative one of exp.

    slack is what scores may be off by beyond their sums' own rounding, like a scale.
    """
    score = np.where(seen, q @ k.T, -np.inf)
    most = score.max(-1)
    p = np.exp(score - most[:, None])
    score_scale = np.where(seen, np.abs(q) @ np.abs(k).T + slack, 0).max(-1)
    return Attended(p @ v, p @ np.abs(v) * (2 + score_scale[:, None]), p.sum(-1), most, score_scale)


def gates_of(proj: Array, heads: int) -> Array:
    """[..., heads, 256]: the second half of every query head's columns."""
    return sigmoid(proj[..., : 2 * heads * HEAD_DIM].reshape(*proj.shape[:-1], heads, 2, HEAD_DIM)[..., 1, :])


def attention_merge(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    blocks = s.step.position // a.block + 1
    sums, most, weight = s.sums[:blocks], s.stats[:blocks, ..., :1], s.stats[:blocks, ..., 1:]
    share = np.exp(most - most.max(0))
    gate = gates_of(s.proj, a.kv_heads * c.GROUP).reshape(s.y.shape)
    factor = gate / (share * weight).sum(0)
    size = 2 + np.abs(most).max(0)
    return {
        "y": Out(saturated((share * sums).sum(0) * factor), (share * np.abs(sums)).sum(0) * factor * size)
    }


def attention_tile(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows, position, heads = s.step.rows, s.step.position, a.kv_heads * c.GROUP
    places = cache_places(s, 0, position + rows)
    seen = np.arange(position + rows) <= position + np.arange(rows).repeat(c.GROUP)[:, None]
    gate = gates_of(s.proj[:rows], heads).reshape(rows, a.kv_heads, c.GROUP, HEAD_DIM)
    y, scale = kept(s.y), np.zeros(s.y.shape)
    for h in range(a.kv_heads):
        k, v = half_values(s.k_cache[places][:, h]), half_values(s.v_cache[places][:, h])
        r = attend(s.q[h, :rows].reshape(-1, HEAD_DIM), k, v, seen)
        # exp(score) is rounded to half: by 2^-11 of it, or by 2^-25 where it is small.
        rounding = HALF_ROUNDING * r.total_scale / (2 + r.score_scale[:, None]) + np.abs(v).sum(0) / 2
        factor = gate[:, h] / r.weight.reshape(rows, c.GROUP, 1)
        y[:rows, h] = r.total.reshape(rows, c.GROUP, HEAD_DIM) * factor
        scale[:rows, h] = (4 * r.total_scale + rounding).reshape(rows, c.GROUP, HEAD_DIM) * factor
    return {"y": Out(saturated(y), scale)}


# Mixture of experts


def moe_route(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows = s.step.rows
    ids, weights, scale = kept(s.ids), kept(s.weights), np.zeros(s.weights.shape)
    logits = s.logits[:rows, : a.experts]
    chosen = np.argsort(-logits, -1, kind="stable")[:, : a.used]  # equal logits: the lowest index first
    below = np.take_along_axis(logits, chosen, -1) - logits.max(-1, keepdims=True)
    ids[:rows] = chosen
    weights[:rows, :-1] = np.exp(below) / np.exp(below).sum(-1, keepdims=True)
    weights[:rows, -1] = sigmoid(s.logits[:rows, a.experts])
    scale[:rows, :-1] = weights[:rows, :-1] * (1 - below)
    scale[:rows, -1] = weights[:rows, -1]
    return {"ids": Out(ids), "weights": Out(weights, scale)}


def moe_histogram(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    ids = s.ids.reshape(-1)[: s.step.rows * a.used]
    counts = np.zeros(s.counts.shape)
    np.add.at(counts, (np.arange(len(ids)) // ROUTE_BLOCK, ids), 1)
    return {"counts": Out(counts)}


def moe_scan(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    blocks = -(-s.step.rows * a.used // ROUTE_BLOCK)
    counts = s.counts[:blocks]
    total = counts.sum(0)
    start = np.cumsum(total) - total
    places, tiles = kept(s.places), kept(s.tiles)
    places[:blocks] = start + np.cumsum(counts, 0) - counts
    made = [
        (e, start[e] + i, min(a.tile, total[e] - i), 0)
        for e in range(a.experts)
        for i in range(0, total[e], a.tile)
    ]
    tiles[: len(made)] = np.array(made).reshape(-1, 4)
    return {"places": Out(places), "tiles": Out(tiles), "tile_count": Out(np.array([float(len(made))]))}


def moe_scatter(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    ids = s.ids.reshape(-1)[: s.step.rows * a.used]
    pairs = kept(s.pairs)
    for first in range(0, len(ids), ROUTE_BLOCK):
        following = s.places[first // ROUTE_BLOCK].copy()
        for i in range(first, min(first + ROUTE_BLOCK, len(ids))):
            pairs[following[ids[i]]] = i
            following[ids[i]] += 1
    return {"pairs": Out(pairs)}


def expert_mm_gate_up(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    h, scale = kept(s.h), np.zeros(s.h.shape)
    for e, first, n, _ in s.tiles[: s.tile_count[0]]:
        x = s.x[s.pairs[first : first + n] // a.used]
        value, size = tile_product(x, s.w[e], s.scales[e], s.biases[e], integers=c.integers)
        own = slice(first, first + n)
        h[own], scale[own] = swiglu(value[:, : a.n], size[:, : a.n], value[:, a.n :], size[:, a.n :])
    return {"h": Out(h, scale)}


def expert_mm_down(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    y, scale = kept(s.y), np.zeros(s.y.shape)
    for e, first, n, _ in s.tiles[: s.tile_count[0]]:
        own = s.pairs[first : first + n]
        y[own], scale[own] = tile_product(
            s.h[first : first + n] * SWIGLU_SHIFT, s.w[e], s.scales[e], s.biases[e], integers=c.integers
        )
    return {"y": Out(y, scale)}


def moe_combine(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    rows = s.step.rows
    parts = [s.weights[:rows, j, None] * s.routed[:rows, j] for j in range(a.used)]
    parts.append(s.weights[:rows, -1:] * s.shared[:rows] * SWIGLU_SHIFT)
    x, scale = kept(s.x), np.zeros(s.x.shape)
    x[:rows] = s.x[:rows] + sum(parts)
    scale[:rows] = np.abs(s.x[:rows]) + sum(np.abs(part) for part in parts)
    return {"x": Out(x, scale)}


PLAIN_REFERENCES: dict[str, Callable[[Slots, Any, Any], dict[str, Out]]] = {
    f.__name__: f
    for f in (
        *(embed_gather, rms_norm, rms_norm_last, gated_rms_norm),
        *(qmv, qmv_add, qmm, qmm_add, qmm_swiglu),
        *(conv_silu, delta_prepare, delta_scan),
        *(rope_write, attention_merge, attention_tile),
        *(moe_route, moe_histogram, moe_scan, moe_scatter, moe_combine),
        *(expert_mm_gate_up, expert_mm_down),
        *HEAD_REFERENCES,
    )
}
