"""Where the inputs of kernel cases come from: sizes, and numbers of several kinds."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lily.doctor.reference import HEAD_DIM, PAGE, ROTARY_DIM
from lily.doctor.reference_math import GENERATIONS
from lily.doctor.slots import STRUCTS, Array, bf16_bits

NO_TOKEN = 0xFFFFFFFF
EPS = float(np.float32(1e-6))
INV_FREQ = (1e7 ** (-np.arange(ROTARY_DIM // 2) / (ROTARY_DIM // 2))).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes of one case. rows is the capacity, live what the step has."""

    rows: int = 1
    live: int = 1
    position: int = 0
    sessions: int = 1
    k: int = 64
    n: int = 64
    inner: int = 64
    shared: int = 64
    kv_heads: int = 1
    key_heads: int = 1
    value_heads: int = 1
    experts: int = 1
    used: int = 1
    routed: int = 1  # experts where no expert's weights are needed
    vocab: int = 64
    block: int = 1024  # tokens of a block of attention


class Made(NamedTuple):
    """One launch's inputs. ulps: the error allowed in each written slot, in units of 2^-24 * Out.scale."""

    args: Mapping[str, float]
    slots: dict[str, Array]
    ulps: Mapping[str, float]


class Numbers:
    """Numbers of one kind: normal, zeros, huge (one outlier in every row) or tiny (subnormal)."""

    def __init__(self, seed: str, kind: str, turn: int) -> None:
        self.rng = np.random.default_rng(zlib.crc32(seed.encode()))
        self.kind = kind
        self.turn = turn  # number of the case, for choices that should all be met

    def values(self, *shape: int, scale: float = 1.0, outlier: float = 1e5, tiny: float = 1e-39) -> Array:
        """float32 of a kind; scale is the standard deviation of normal numbers."""
        x = self.rng.standard_normal(shape) * scale
        if self.kind == "zeros":
            x[:] = 0
        elif self.kind == "huge":
            flat = x.reshape(-1, shape[-1])
            flat[np.arange(len(flat)), self.rng.integers(0, shape[-1], len(flat))] *= outlier
        elif self.kind == "tiny":
            x *= tiny
        return x.astype(np.float32)

    def rows(self, d: Dims, *shape: int, scale: float = 1.0, live: int | None = None) -> Array:
        """[rows, ...] of which only the step's rows are numbers."""
        x = self.values(d.rows, *shape, scale=scale)
        x[d.live if live is None else live :] = np.nan
        return x

    def acts(self, *shape: int) -> Array:
        """Inputs of a quantised product; outliers are near the largest half."""
        x = self.values(*shape, outlier=6e4, tiny=2.0**-20)
        return np.clip(x, -65504, 65504).astype(np.float16)

    def act_rows(self, d: Dims, *shape: int, live: int | None = None) -> Array:
        """As rows(), for inputs of a quantised product."""
        x = self.acts(d.rows, *shape)
        x[d.live if live is None else live :] = np.nan
        return x

    def bf16(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Array:
        """Weights and cache rows: always normal numbers."""
        return bf16_bits(mean + scale * self.rng.standard_normal(shape))

    def weights(self, *shape: int, bits: int = 4, prefix: str = "") -> dict[str, Array]:
        """Slots w, scales, biases of a [..., n, k] matrix. Scales of both signs; the last row is all zero."""
        *outer, k = shape
        scale = (
            0.3
            / 2**bits
            * self.rng.uniform(0.5, 1.5, (*outer, k // 64))
            * self.rng.choice([-1, 1], (*outer, k // 64))
        )
        bias = -(2 ** (bits - 1)) * scale * self.rng.uniform(0.8, 1.2, scale.shape)
        w = self.rng.integers(0, 2**32, (*outer, k * bits // 32), dtype=np.uint32)
        for x in (w, scale, bias):
            x[..., -1, :] = 0
        return {f"{prefix}w": w, f"{prefix}scales": bf16_bits(scale), f"{prefix}biases": bf16_bits(bias)}

    def step(self, d: Dims, **fields: int) -> Array:
        """One StepState of the last session."""
        state = np.zeros(1, STRUCTS["StepState"])
        values = {
            "session": d.sessions - 1,
            "position": d.position,
            "rows": d.live,
            "generation": self.integer(GENERATIONS),
            "last_token": NO_TOKEN,
            "ticket": self.integer(1000),
        }
        for name, value in {**values, **fields}.items():
            state[name] = value
        return state.view(np.uint32)

    def integer(self, top: int) -> int:
        """An integer from 0 to top - 1."""
        return int(self.rng.integers(0, top))

    def experts(self, rows: int, used: int, experts: int) -> Array:
        """Distinct experts per row, the first ones more often."""
        favour = self.rng.gumbel(size=(rows, experts)) - np.arange(experts) / 4
        return np.argsort(-favour, -1)[:, :used].astype(np.uint32)


def chain(n: int, g: Numbers) -> float:
    """Allowed error of a sum of n terms: roundings are a random walk, unless an outlier gives them order."""
    return 4 + (n / 4 if g.kind == "huge" else n**0.5 / 2)


def pages(g: Numbers, d: Dims, length: int) -> tuple[dict[str, int], Array]:
    """Args of the cache, and a page table whose entries past `length` lead to page 0, which is NaN."""
    own = -(-length // PAGE)
    table = np.zeros((d.sessions, own + 1), np.uint32)
    table[:, :own] = 1 + g.rng.permutation(d.sessions * own).reshape(d.sessions, own)
    return {"sessions": d.sessions, "pages": 1 + d.sessions * own, "session_pages": own + 1}, table


def cache(g: Numbers, d: Dims, count: int, table: Array, length: int, scale: float = 1.0) -> Array:
    """A pool of pages: rows of the last session up to `length` are numbers, all others NaN."""
    x = np.full((count, PAGE, d.kv_heads, HEAD_DIM), 0x7FC0, np.uint16)
    t = np.arange(length)
    x[table[-1, t // PAGE], t % PAGE] = g.bf16(length, d.kv_heads, HEAD_DIM, scale=scale)
    return x
