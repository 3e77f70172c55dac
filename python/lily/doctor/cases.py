"""Inputs for every kernel: per kernel one function that makes args and slots of given sizes and numbers.

A function takes (g, d, c): the source of numbers, the sizes, the consts. Slots that it does not return are
written only; the harness fills them with 0xFF before the call. What a kernel must not read (rows past the
step's, cache rows past the end, other pages) is NaN or an index far outside, so that reading it shows.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lily.doctor.cases_head import HEAD_INPUTS
from lily.doctor.cases_row import ROW_INPUTS
from lily.doctor.inputs import EPS, INV_FREQ, NO_TOKEN, Dims, Made, Numbers, cache, chain, pages
from lily.doctor.reference import DELTA_DIM, HEAD_DIM, PAGE, ROUTE_BLOCK
from lily.doctor.reference_math import GENERATIONS
from lily.doctor.slots import Array

# embed, norm


def embed_gather(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    tokens = g.rng.integers(0, d.vocab, d.rows).astype(np.uint32)
    tokens[0], tokens[d.live :] = d.vocab + 5, NO_TOKEN  # an unknown token is taken for the last one
    slots = {"tokens": tokens, "step": g.step(d), **g.weights(d.vocab, d.k)}
    return Made({"rows": d.rows, "hidden": d.k, "vocab": d.vocab}, slots, {"x": 1})


def rms_norm(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    slots = {"x": g.rows(d, d.k), "w": g.bf16(d.k, mean=1, scale=0.3), "step": g.step(d)}
    return Made({"rows": d.rows, "dim": d.k, "eps": EPS}, slots, {"y": chain(d.k, g)})


def rms_norm_last(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    return rms_norm(g, d, c)


def gated_rms_norm(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    gate, width = 128, d.value_heads * DELTA_DIM
    slots = {
        "x": g.rows(d, d.value_heads, DELTA_DIM),
        "proj": g.rows(d, gate + width + 64, scale=2),
        "w": g.bf16(DELTA_DIM),
        "step": g.step(d),
    }
    args = {
        "rows": d.rows,
        "value_heads": d.value_heads,
        "proj_dim": gate + width + 64,
        "gate": gate,
        "eps": EPS,
    }
    return Made(args, slots, {"y": chain(DELTA_DIM, g)})


# quantised products


def qmv(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    k = c["K"] or d.k
    slots = {"x": g.act_rows(d, k), "step": g.step(d), **g.weights(d.n, k, bits=c["BITS"])}
    return Made({"rows": d.rows, "n": d.n, "k": k}, slots, {"y": chain(k, g)})


def qmv_add(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    made = qmv(g, d, c)
    return made._replace(slots={**made.slots, "y": g.rows(d, d.n)})


def qmm(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    first = 3 * (g.turn % 2)  # the step has `first` rows before those of the slots
    live = 0 if g.turn == 3 else d.live
    slots = {
        "x": g.act_rows(d, d.k, live=live),
        "step": g.step(d, rows=live + first),
        **g.weights(d.n, d.k, bits=c["BITS"]),
    }
    return Made({"rows": d.rows, "n": d.n, "k": d.k, "first": first}, slots, {"y": chain(d.k, g)})


def qmm_add(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    made = qmm(g, d, c)
    return made._replace(slots={**made.slots, "y": g.rows(d, d.n)})


def qmm_swiglu(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    made = qmm(g, d, c)
    return made._replace(slots={**made.slots, **g.weights(2 * d.n, d.k, bits=c["BITS"])})


# Gated DeltaNet


def conv_silu(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    channels = (2 * d.key_heads + d.value_heads) * DELTA_DIM
    slots = {
        "proj": g.rows(d, channels + 64, scale=2),
        "w": g.bf16(channels, 4, scale=0.5),
        "step": g.step(d),
        "state": g.values(d.sessions, GENERATIONS, 3, channels),
    }
    args = {"rows": d.rows, "sessions": d.sessions, "channels": channels, "proj_dim": channels + 64}
    return Made(args, slots, {"y": 4, "state": 0})


def delta_prepare(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    a = 192
    slots = {
        "proj": g.rows(d, a + 2 * d.value_heads + 10, scale=3),
        "a_log": g.rng.uniform(-3, 3, d.value_heads).astype(np.float32),
        "dt_bias": g.bf16(d.value_heads, scale=3),
        "step": g.step(d),
        "qkv": g.rows(d, 2 * d.key_heads + d.value_heads, DELTA_DIM),
    }
    args = {"rows": d.rows, "key_heads": d.key_heads, "value_heads": d.value_heads}
    args |= {"proj_dim": a + 2 * d.value_heads + 10, "a": a}
    return Made(args, slots, {"qkv": chain(DELTA_DIM, g), "gates": 4})


def delta_inputs(g: Numbers, d: Dims, live: int) -> dict[str, Array]:
    """Normalised q and k, values, gates from forgetting all to keeping all, and the state pool."""
    qkv = g.values(d.rows, 2 * d.key_heads + d.value_heads, DELTA_DIM)
    heads = qkv[:, : 2 * d.key_heads].astype(np.float64)
    heads /= np.sqrt((heads**2).sum(-1, keepdims=True) + 1e-6)
    heads[:, : d.key_heads] /= np.sqrt(DELTA_DIM)
    qkv[:, : 2 * d.key_heads] = heads
    gates = g.rng.beta(0.5, 0.5, (d.rows, d.value_heads, 2)).astype(np.float32)
    gates[..., 0] **= np.float32(0.1)
    qkv[live:], gates[live:] = np.nan, np.nan
    state = g.rng.standard_normal((d.sessions, GENERATIONS, d.value_heads, DELTA_DIM, DELTA_DIM)).astype(
        np.float32
    )
    return {"qkv": qkv, "gates": gates, "state": state}


def delta_scan(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    slots = {**delta_inputs(g, d, d.live), "step": g.step(d)}
    args = {"rows": d.rows, "sessions": d.sessions, "key_heads": d.key_heads, "value_heads": d.value_heads}
    return Made(args, slots, {"state": 1, "y": 1})


# Attention


def rope_write(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    heads = d.kv_heads * (1 + g.turn % 8)
    width = (2 * heads + 2 * d.kv_heads) * HEAD_DIM
    position = d.position * 50 % 100_000  # far positions turn by many circles
    before, last = position // PAGE, (position + d.rows - 1) // PAGE
    count = 1 + d.sessions * (last + 1 - before)
    table = np.full((d.sessions, last + 1), NO_TOKEN, np.uint32)
    table[:, before:] = 1 + g.rng.permutation(count - 1).reshape(d.sessions, -1)
    slots = {
        "proj": g.rows(d, width + 64),
        "q_norm": g.bf16(HEAD_DIM, mean=1, scale=0.3),
        "k_norm": g.bf16(HEAD_DIM, mean=1, scale=0.3),
        "inv_freq": INV_FREQ,
        "page_table": table,
        "step": g.step(d, position=position),
        "k_cache": cache(g, d, count, table, 0),
        "v_cache": cache(g, d, count, table, 0),
    }
    args = {"rows": d.rows, "heads": heads, "kv_heads": d.kv_heads, "proj_dim": width + 64, "eps": EPS}
    args |= {"sessions": d.sessions, "pages": count, "session_pages": last + 1}
    return Made(args, slots, {"q": 8, "k_cache": 8, "v_cache": 0})


def attention(g: Numbers, d: Dims, c: Mapping[str, int], rows: int, live: int, position: int) -> Made:
    group, length = c["GROUP"], position + live
    sizes, table = pages(g, d, length)
    peaked = 4.0 if g.turn % 2 else 1.0  # scores of a standard deviation of 4 or 1
    q = g.values(d.kv_heads, rows, group, HEAD_DIM, scale=peaked / 16, outlier=100).astype(np.float16)
    q[:, live:] = np.nan
    width = (2 * d.kv_heads * group + 2 * d.kv_heads) * HEAD_DIM
    proj = g.values(rows, width, scale=2)
    proj[live:] = np.nan
    slots = {
        "q": q,
        "proj": proj,
        "k_cache": cache(g, d, sizes["pages"], table, length),
        "v_cache": cache(g, d, sizes["pages"], table, length, scale=0.5),
        "page_table": table,
        "step": g.step(d, position=position, rows=live),
    }
    return Made({"kv_heads": d.kv_heads, "proj_dim": width, **sizes}, slots, {"y": 8})


def attention_merge(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    blocks, heads = d.position // d.block + 2, d.kv_heads * c["GROUP"]
    width = (2 * heads + 2 * d.kv_heads) * HEAD_DIM
    stats = np.stack([g.values(blocks, heads, scale=3), g.rng.uniform(1, 500, (blocks, heads))], -1).astype(
        np.float32
    )
    sums = g.values(blocks, heads, HEAD_DIM, scale=10)
    stats[-1], sums[-1] = np.nan, np.nan
    slots = {"sums": sums, "stats": stats, "proj": g.values(width, scale=2), "step": g.step(d, rows=1)}
    args = {"kv_heads": d.kv_heads, "proj_dim": width, "blocks": blocks, "block": d.block}
    return Made(args, slots, {"y": 8})


def attention_tile(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    made = attention(g, d, c, d.rows, d.live, d.position % 700)
    return made._replace(args={**made.args, "rows": d.rows}, ulps={"y": 1})


# Mixture of experts


def moe_route(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    routed = c["E"] or d.routed
    logits = g.rows(d, routed + 20, scale=3)
    logits[:, : routed // 2] = np.round(logits[:, : routed // 2])  # many ties
    args = {"rows": d.rows, "n": routed + 20, "experts": routed, "used": min(d.used, routed)}
    return Made(args, {"logits": logits, "step": g.step(d)}, {"ids": 0, "weights": 8})


class Order(NamedTuple):
    """(row, choice) pairs ordered by expert, as the routing kernels make it."""

    ids: Array
    counts: Array
    places: Array
    pairs: Array
    tiles: Array
    made: int


def order(g: Numbers, d: Dims, tile: int) -> Order:
    """The order of the step's pairs, by sorting; what lies past the end is far outside."""
    ids = g.experts(d.rows, d.used, d.experts)
    ids[d.live :] = NO_TOKEN
    flat = ids[: d.live].reshape(-1)
    blocks = -(-d.rows * d.used // ROUTE_BLOCK)
    counts = np.stack(
        [np.bincount(flat[b * ROUTE_BLOCK :][:ROUTE_BLOCK], minlength=d.experts) for b in range(blocks)]
    )
    total = counts.sum(0)
    start = np.cumsum(total) - total
    pairs = np.full(d.rows * d.used, NO_TOKEN, np.uint32)
    pairs[: len(flat)] = np.argsort(flat, kind="stable")
    tiles = np.full((d.rows * d.used // tile + d.experts, 4), NO_TOKEN, np.uint32)
    made = [
        (e, start[e] + i, min(tile, total[e] - i), 0)
        for e in range(d.experts)
        for i in range(0, total[e], tile)
    ]
    tiles[: len(made)] = made
    places = (start + np.cumsum(counts, 0) - counts).astype(np.uint32)
    return Order(ids, counts.astype(np.uint32), places, pairs, tiles, len(made))


def moe_histogram(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    args = {"rows": d.rows, "used": d.used, "experts": d.experts, "tile": 8}
    return Made(args, {"ids": order(g, d, 8).ids, "step": g.step(d)}, {"counts": 0})


def moe_scan(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    tile = 64 if g.turn % 2 else 8
    args = {"rows": d.rows, "used": d.used, "experts": d.experts, "tile": tile}
    slots = {"counts": order(g, d, tile).counts, "step": g.step(d)}
    return Made(args, slots, {"places": 0, "tiles": 0, "tile_count": 0})


def moe_scatter(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    args = {"rows": d.rows, "used": d.used, "experts": d.experts, "tile": 8}
    made = order(g, d, 8)
    return Made(args, {"ids": made.ids, "places": made.places, "step": g.step(d)}, {"pairs": 0})


def ordered(d: Dims, made: Order) -> dict[str, Array]:
    return {"pairs": made.pairs, "tiles": made.tiles, "tile_count": np.array([made.made], np.uint32)}


def expert_mm_gate_up(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    slots = {
        "x": g.act_rows(d, d.k),
        **ordered(d, order(g, d, c["BM"])),
        **g.weights(d.experts, 2 * d.inner, d.k),
    }
    args = {"rows": d.rows, "used": d.used, "experts": d.experts, "n": d.inner, "k": d.k}
    return Made(args, slots, {"h": chain(d.k, g)})


def expert_mm_down(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    h = g.acts(d.rows * d.used, d.inner)
    h[d.live * d.used :] = np.nan
    slots = {"h": h, **ordered(d, order(g, d, c["BM"])), **g.weights(d.experts, d.n, d.inner)}
    args = {"rows": d.rows, "used": d.used, "experts": d.experts, "n": d.n, "k": d.inner}
    return Made(args, slots, {"y": chain(d.inner, g)})


def moe_combine(g: Numbers, d: Dims, c: Mapping[str, int]) -> Made:
    weights = g.rng.uniform(0, 1, (d.rows, d.used + 1)).astype(np.float32)
    slots = {
        "routed": g.rows(d, d.used, d.k),
        "shared": g.rows(d, d.k),
        "weights": weights,
        "step": g.step(d),
        "x": g.rows(d, d.k),
    }
    args = {"rows": d.rows, "used": d.used, "hidden": d.k}
    return Made(args, slots, {"x": 8})


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch of a kernel."""

    label: str
    args: Mapping[str, float]
    consts: Mapping[str, int]
    slots: Mapping[str, Array]
    ulps: Mapping[str, float]


# rows, live, position, sessions, k, n, inner, shared, kv, key and value heads, experts, used, routed, vocab
ONE = Dims()
RAGGED = Dims(21, 19, 301, 2, 192, 128, 64, 128, 1, 1, 2, 5, 3, 67, 4160)
DECODE = Dims(1, 1, 1023, 2, 2048, 64, 512, 64, 2, 2, 4, 4, 2, 256, 8320)
REAL = Dims(70, 70, 1100, 3, 2048, 192, 128, 192, 2, 2, 4, 12, 8, 256, 8320)
SMALL_RAGGED = Dims(5, 4, 259, 2, 192, 64, 64, 128, 1, 1, 2, 3, 2, 37, 4160)
SMALL_DECODE = Dims(1, 1, 255, 2, 256, 64, 128, 64, 2, 2, 4, 4, 2, 256, 4160)
SMALL_REAL = Dims(18, 17, 1023, 2, 256, 128, 64, 64, 2, 2, 4, 4, 2, 256, 4224)


def random_dims(rng: np.random.Generator, small: bool) -> Dims:
    """Sizes at random: all are legal, few are round."""
    top = 3 if small else 9
    rows = int(rng.integers(1, 8 if small else 80))
    key_heads, experts = int(rng.integers(1, 4)), int(rng.integers(2, 5 if small else 14))
    return Dims(
        rows=rows,
        live=int(rng.integers(1, rows + 1)),
        position=int(rng.integers(0, 300 if small else 3000)),
        sessions=int(rng.integers(1, 4)),
        k=64 * int(rng.integers(1, top)),
        n=64 * int(rng.integers(1, top)),
        inner=64 * int(rng.integers(1, 3)),
        shared=64 * int(rng.integers(1, 3)),
        kv_heads=int(rng.integers(1, 4)),
        key_heads=key_heads,
        value_heads=key_heads * int(rng.integers(1, 4)),
        experts=experts,
        used=int(rng.integers(1, min(experts, 8) + 1)),
        routed=int(rng.integers(9, 513)),
        vocab=64 * int(rng.integers(1, 150)),
        block=64 * int(rng.integers(1, 17)),
    )


GENERATORS: dict[str, Callable[[Numbers, Dims, Mapping[str, int]], Made]] = {
    f.__name__: f
    for f in (
        *(embed_gather, rms_norm, rms_norm_last, gated_rms_norm),
        *(qmv, qmv_add, qmm, qmm_add, qmm_swiglu),
        *(conv_silu, delta_prepare, delta_scan),
        *(rope_write, attention_merge, attention_tile),
        *(moe_route, moe_histogram, moe_scan, moe_scatter, moe_combine),
        *(expert_mm_gate_up, expert_mm_down),
        *ROW_INPUTS,
        *HEAD_INPUTS,
    )
}


def make_case(name: str, consts: Mapping[str, int], label: str, d: Dims, kind: str, turn: int) -> Case:
    made = GENERATORS[name](Numbers(f"{name} {label}", kind, turn), d, consts)
    return Case(f"{label}/{kind}", made.args, dict(consts), made.slots, made.ulps)


def cases(name: str, consts: Mapping[str, int], small: bool) -> Iterator[Case]:
    """The cases of one variant of a kernel.

    Args:
        name: of the kernel.
        consts: of the variant; a mirrored const that is not 0 fixes its args field.
        small: sizes for the executor of width 32, which is slow.

    Raises:
        KeyError: the kernel has no cases.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    sizes: list[tuple[str, Dims, str]] = [
        ("one", ONE, "normal"),
        ("ragged", SMALL_RAGGED if small else RAGGED, "huge"),
        ("decode", SMALL_DECODE if small else DECODE, "normal"),
        ("real", SMALL_REAL if small else REAL, "normal"),
        ("random", random_dims(rng, small), "tiny"),
    ]
    if not small:
        sizes += [
            ("random", random_dims(rng, small), "zeros"),
            ("random again", random_dims(rng, small), "normal"),
        ]
    sizes += [
        (f"draw {i}", random_dims(rng, small), "normal") for i in range(60 if name == "sample_pick" else 0)
    ]
    for turn, (label, d, kind) in enumerate(sizes):
        yield make_case(name, consts, label, d, kind, turn)
