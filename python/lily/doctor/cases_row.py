"""Inputs for the kernels of one decoded row (see cases.py)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lily.doctor.inputs import EPS, INV_FREQ, Dims, Made, Numbers, cache, chain, pages
from lily.doctor.reference import DELTA_DIM, HEAD_DIM
from lily.doctor.reference_math import GENERATIONS


def norm_qmv(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    k = c["K"] or d.k
    slots = {
        "x": g.values(k),
        "norm": g.bf16(k, mean=1, scale=0.3),
        **g.weights(d.n, k, bits=c["BITS"]),
    }
    return Made({"n": d.n, "k": k, "eps": EPS}, slots, {"h": chain(k, g), "y": chain(k, g)})


def delta_mix(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    channels, values = (2 * d.key_heads + d.value_heads) * DELTA_DIM, d.value_heads * DELTA_DIM
    z, a = channels + 64, channels + 64 + values
    width = a + 2 * d.value_heads + 10
    state = g.rng.standard_normal((d.sessions, GENERATIONS, d.value_heads, DELTA_DIM, DELTA_DIM))
    slots = {
        "proj": g.values(width, scale=2),
        "conv_w": g.bf16(channels, 4, scale=0.5),
        "a_log": g.rng.uniform(-3, 3, d.value_heads).astype(np.float32),
        "dt_bias": g.bf16(d.value_heads, scale=3),
        "norm": g.bf16(DELTA_DIM),
        "step": g.step(d, rows=1),
        "conv": g.values(d.sessions, GENERATIONS, 3, channels),
        "state": state.astype(np.float32),
    }
    args = {"sessions": d.sessions, "key_heads": d.key_heads, "value_heads": d.value_heads, "eps": EPS}
    args |= {"channels": channels, "proj_dim": width, "z": z, "a": a}
    return Made(args, slots, {"conv": 0, "state": 4, "y": 4 + chain(DELTA_DIM, g)})


def attention(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    """The row's own place in the cache holds no number before."""
    heads, length = d.kv_heads * c["GROUP"], d.position + 1
    sizes, table = pages(g, d, length)
    width = 2 * (heads + d.kv_heads) * HEAD_DIM
    peaked = 4.0 if g.turn % 2 else 1.0  # scores of a standard deviation of 4 or 1
    slots = {
        "proj": g.values(width, scale=2),
        "q_norm": g.bf16(HEAD_DIM, mean=peaked, scale=0.3),
        "k_norm": g.bf16(HEAD_DIM, mean=1, scale=0.3),
        "inv_freq": INV_FREQ,
        "page_table": table,
        "step": g.step(d, rows=1),
        "k_cache": cache(g, d, sizes["pages"], table, d.position),
        "v_cache": cache(g, d, sizes["pages"], table, d.position, scale=0.5),
    }
    args = {"kv_heads": d.kv_heads, "proj_dim": width, "eps": EPS, **sizes}
    return Made(args, slots, {"k_cache": 8, "v_cache": 0})


def attention_decode(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    made = attention(g, d, c)
    return Made({**made.args, "blocks": 1, "block": d.block}, made.slots, {**made.ulps, "y": 8})


def attention_blocks(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    made = attention(g, d, c)
    args = {**made.args, "blocks": d.position // d.block + 2, "block": d.block}
    return Made(args, made.slots, {**made.ulps, "sums": 4, "stats": 4})


def expert_mv_gate_up(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    hidden, experts = c["K"] or d.k, c["E"] or d.experts
    logits = g.values(experts + 20, scale=3)
    logits[: experts // 2] = np.round(logits[: experts // 2])  # many ties
    slots = {
        "x": g.acts(hidden),
        "logits": logits,
        **g.weights(experts, 2 * d.inner, hidden),
        **g.weights(2 * d.shared, hidden, prefix="shared_"),
    }
    args = {"n": experts + 20, "hidden": hidden, "inner": d.inner, "shared_inner": d.shared}
    args |= {"experts": experts, "used": d.used}
    return Made(args, slots, {"h": chain(hidden, g), "ids": 0, "weights": 8})


def expert_mv_down(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    inner, shared = c["K"] or d.inner, c["KS"] or d.shared
    logits = g.values(d.experts + 20, scale=3)
    ids = np.argsort(-logits[: d.experts], kind="stable")[: d.used]
    shares = np.exp(logits[ids].astype(np.float64) - logits[ids[0]])
    gate = 1 / (1 + np.exp(-logits[d.experts].astype(np.float64)))
    slots = {
        "h": g.acts(d.used * inner + shared),
        "logits": logits,  # a device may choose again
        "ids": ids.astype(np.uint32),
        "weights": np.append(shares / shares.sum(), gate).astype(np.float32),
        **g.weights(d.experts, d.k, inner),
        **g.weights(d.k, shared, prefix="shared_"),
        "x": g.values(d.k),
    }
    args = {"n": d.experts + 20, "hidden": d.k, "inner": inner, "shared_inner": shared}
    args |= {"experts": d.experts, "used": d.used}
    return Made(args, slots, {"x": 8 + chain(max(inner, shared), g)})


ROW_INPUTS = (
    norm_qmv,
    delta_mix,
    attention_decode,
    attention_blocks,
    expert_mv_gate_up,
    expert_mv_down,
)
