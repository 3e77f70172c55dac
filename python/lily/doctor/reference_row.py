"""References of the kernels of one decoded row: chains of those of many rows (reference.py), in one launch.

What such a kernel keeps to itself is rounded where the chain would store it. There fp32 may fall to the other
side than float64; `slack` says by how much that moves what is made of it.
"""

from __future__ import annotations

from types import SimpleNamespace as Space
from typing import Any

import numpy as np

from lily.doctor.reference import (
    DELTA_DIM,
    HEAD_DIM,
    Attended,
    attend,
    cache_places,
    conv_silu,
    delta_prepare,
    delta_rule,
    gates_of,
    heads_of,
    moe_route,
)
from lily.doctor.reference_math import (
    SWIGLU_SHIFT,
    Slots,
    integer_unit,
    kept,
    product,
    rms,
    silu,
    swiglu,
    weight_parts,
)
from lily.doctor.slots import ACT_TYPE, Array, Out, bf16_bits, bf16_values, half_values, saturated

CONV_ULPS = 4  # of the convolution's own error, see cases.py
LEAST_ULPS = 4  # what a scale is multiplied by at least


def slack(x: Array, scale: Array, fraction: int, least: int) -> Array:
    """How far a rounding of x to a type may be off, as a scale: one unit where x is near the middle of two.

    fraction: bits of the type's fraction. least: exponent of its smallest normal number.
    """
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**least)))
    unit = 2.0 ** (exponent - fraction)
    beside = np.abs(np.abs(x) / unit % 1 - 0.5)
    return np.where(beside <= 16 * 2.0**-24 * scale / unit, unit, 0) * 2.0**24 / LEAST_ULPS


def act_slack(x: Array, scale: Array) -> Array:
    """The slack of a rounding to act_t."""
    return slack(x, scale, 10, -14) if ACT_TYPE == "half" else slack(x, scale, 7, -126)


def norm_qmv(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    h = saturated(rms(s.x, a.eps) * s.norm)
    x, moved = half_values(h), act_slack(h, np.abs(h))
    y, scale = product(x, s.w, s.scales, s.biases, c.BITS, integers=c.integers)
    if c.integers and c.BITS == 4:
        moved += np.where(moved > 0, integer_unit(x), 0) * 2.0**24 / LEAST_ULPS
    q, weight, bias = weight_parts(s.w, s.scales, s.biases, c.BITS)
    moved = np.abs(q * weight + bias) @ moved
    return {"h": Out(h, np.abs(h)), "y": Out(y, scale + moved)}


def delta_mix(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    proj, heads, step = s.proj[None], a.key_heads, s.step
    conv = conv_silu(Space(proj=proj, w=s.conv_w, step=step, state=s.conv, y=np.zeros((1, a.channels))), a, c)
    qkv = conv["y"].value.reshape(1, -1, DELTA_DIM)
    size = CONV_ULPS * np.reshape(conv["y"].scale, qkv.shape)
    gates = np.zeros((1, a.value_heads, 2))
    made = delta_prepare(
        Space(proj=proj, qkv=qkv, gates=gates, step=step, a_log=s.a_log, dt_bias=s.dt_bias), a, c
    )
    gates, gates_scale = made["gates"].value[0], CONV_ULPS * np.asarray(made["gates"].scale)[0]
    x = np.where(np.isnan(made["qkv"].value), qkv, made["qkv"].value)
    rule = delta_rule(s, a, x, gates[None])
    # Errors of what goes into the rule: of directions q and k relative to their length, v, and the gates.
    keys = np.arange(a.value_heads) // (a.value_heads // heads)
    off = np.linalg.norm(size, axis=-1)[0] / np.sqrt((qkv[0] ** 2).sum(-1) + 1e-6)
    off_q, off_k, off_v = off[keys][:, None], off[heads + keys][:, None], size[0, 2 * heads :]
    before = s.state[step.session, step.generation] * (step.position > 0)
    after = np.where(np.isnan(rule["state"].value), 0, rule["state"].value).sum((0, 1))
    length, decay, beta = np.linalg.norm(before, axis=-1), gates[:, :1], gates[:, 1:]
    seen = np.abs(x[0, 2 * heads :]) + decay * length
    moved = beta * (off_v + decay * length * off_k + seen * off_k)
    moved += gates_scale[:, :1] * length + gates_scale[:, 1:] * seen
    q_length = np.linalg.norm(x[0, keys], axis=-1)[:, None]
    y = rule["y"].value[0]
    y_scale = np.asarray(rule["y"].scale)[0] + (moved + np.linalg.norm(after, axis=-1) * off_q) * q_length
    state_scale = np.asarray(rule["state"].scale).copy()
    state_scale[state_scale.any((2, 3, 4))] += moved[..., None]
    # The norm divides by a length that these errors move too.
    root = np.sqrt((y**2).mean(-1, keepdims=True) + a.eps)
    shift = np.linalg.norm(y_scale, axis=-1, keepdims=True) / (root * np.sqrt(DELTA_DIM))
    z = s.proj[a.z :][: a.value_heads * DELTA_DIM].reshape(a.value_heads, DELTA_DIM)
    factor = s.norm * silu(z)
    out = saturated(y / root * factor)
    return {
        "conv": conv["state"],
        "state": Out(rule["state"].value, state_scale),
        "y": Out(out, (y_scale + np.abs(y) * shift) / root * np.abs(factor) + np.abs(out)),
    }


class Row:
    """One row's queries and the cache with its own key and value, as decode attention sees them."""

    def __init__(self, s: Slots, a: Any, c: Any) -> None:
        self.group, position = c.GROUP, s.step.position
        made = heads_of(s.proj[None], s, position, a.kv_heads * c.GROUP, a.kv_heads, a.eps)
        by_kv_head = (a.kv_heads, c.GROUP, HEAD_DIM)
        self.q = half_values(made.q).reshape(by_kv_head)
        self.q_slack = act_slack(made.q, made.q_scale).reshape(by_kv_head)
        self.k_slack = slack(made.k[0], made.k_scale[0], 7, -126)
        places = cache_places(s, 0, position + 1)
        self.k, self.v = s.k_cache[places], s.v_cache[places]
        self.k[-1], self.v[-1] = (bf16_values(bf16_bits(x[0])) for x in (made.k, made.v))
        self.outs = {}
        own = tuple(index[-1] for index in places)
        for name, cache, value, scale in (
            ("k_cache", s.k_cache, made.k, made.k_scale),
            ("v_cache", s.v_cache, made.v, np.zeros(made.v.shape)),
        ):
            content, size = kept(cache), np.zeros(cache.shape)
            content[own], size[own] = value[0], scale[0]
            self.outs[name] = Out(content, size)

    def attend(self, h: int, first: int, last: int) -> Attended:
        """Attention of KV head h to tokens [first, last)."""
        k, v = self.k[first:last, h], self.v[first:last, h]
        moved = self.q_slack[h] @ np.abs(k).T
        if last == len(self.k):
            moved[:, -1] += np.abs(self.q[h]) @ self.k_slack[h]
        return attend(self.q[h], k, v, np.ones((self.group, len(k)), bool), moved)


def attention_decode(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    row = Row(s, a, c)
    gate = gates_of(s.proj, a.kv_heads * c.GROUP).reshape(s.y.shape)
    y, scale = np.empty(s.y.shape), np.empty(s.y.shape)
    for h in range(a.kv_heads):
        r = row.attend(h, 0, s.step.position + 1)
        y[h] = gate[h] * r.total / r.weight[:, None]
        scale[h] = gate[h] * r.total_scale / r.weight[:, None]
    return {**row.outs, "y": Out(saturated(y), scale)}


def attention_blocks(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    row, length = Row(s, a, c), s.step.position + 1
    sums, sums_scale = kept(s.sums), np.zeros(s.sums.shape)
    stats, stats_scale = kept(s.stats), np.zeros(s.stats.shape)
    for b in range(min(a.blocks, (length + a.block - 1) // a.block)):
        for h in range(a.kv_heads):
            r = row.attend(h, b * a.block, min(b * a.block + a.block, length))
            sums[b, h], sums_scale[b, h] = r.total, r.total_scale
            stats[b, h] = np.stack([r.most, r.weight], -1)
            stats_scale[b, h] = np.stack([r.score_scale, r.weight * (1 + r.score_scale)], -1)
    return {**row.outs, "sums": Out(sums, sums_scale), "stats": Out(stats, stats_scale)}


def expert_mv_gate_up(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    routed = moe_route(
        Space(logits=s.logits[None], ids=s.ids[None], weights=s.weights[None], step=Space(rows=1)), a, c
    )
    h, scale = np.empty(s.h.shape), np.empty(s.h.shape)
    matrices = [(s.w[e], s.scales[e], s.biases[e]) for e in routed["ids"].value[0].astype(int)]
    at = 0
    for w, scales, biases in [*matrices, (s.shared_w, s.shared_scales, s.shared_biases)]:
        value, size = product(s.x, w, scales, biases, integers=c.integers)
        n = len(value) // 2
        h[at : at + n], scale[at : at + n] = swiglu(value[:n], size[:n], value[n:], size[n:])
        at += n
    weights = routed["weights"]
    return {
        "h": Out(h, scale),
        "ids": Out(routed["ids"].value[0]),
        "weights": Out(weights.value[0], np.asarray(weights.scale)[0]),
    }


def expert_mv_down(s: Slots, a: Any, c: Any) -> dict[str, Out]:
    h = s.h * SWIGLU_SHIFT
    x, scale = s.x.copy(), np.abs(s.x)
    matrices = [(s.w[e], s.scales[e], s.biases[e]) for e in s.ids]
    for j, matrix in enumerate([*matrices, (s.shared_w, s.shared_scales, s.shared_biases)]):
        own = h[j * a.inner :][: a.inner if j < a.used else a.shared_inner]
        value, size = product(own, *matrix, integers=c.integers)
        x += s.weights[j] * value
        scale += np.abs(s.weights[j]) * size
    return {"x": Out(x, scale)}


ROW_REFERENCES = (
    norm_qmv,
    delta_mix,
    attention_decode,
    attention_blocks,
    expert_mv_gate_up,
    expert_mv_down,
)
