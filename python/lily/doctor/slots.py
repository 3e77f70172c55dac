"""The memory of kernel slots: types and structs as numpy sees them; what a reference says about a slot."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import SimpleNamespace as Space
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lily import _native

Array = npt.NDArray[Any]

ACT_TYPE = _native.act_type()  # "half" or "bfloat"
ACT_MAX = 65504.0 if ACT_TYPE == "half" else np.inf

DTYPES: dict[str, np.dtype[Any]] = {
    "float": np.dtype("f4"),
    "half": np.dtype("f2"),
    "act_t": np.dtype("f2" if ACT_TYPE == "half" else "u2"),
    "bfloat": np.dtype("u2"),
    "ushort": np.dtype("u2"),
    "uint": np.dtype("u4"),
    "uint4": np.dtype("u4"),
    "int": np.dtype("i4"),
}
STRUCTS: dict[str, np.dtype[Any]] = {
    "StepState": np.dtype(
        [(f, "u4") for f in ("session", "position", "rows", "generation", "last_token", "ticket")]
    ),
    "SampleParams": np.dtype(
        [(f, "f4") for f in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")]
        + [(f, "u4") for f in ("top_k", "seed_low", "seed_high", "bias_count")]
    ),
}


class Out(NamedTuple):
    """The expected content of one written slot.

    value: float64 in the slot's shape, saturated but not yet rounded to the slot's type (integers are exact).
        NaN where the kernel must leave the element as it was.
    scale: the size of the terms that make up each value: the error that fp32 arithmetic may cause is a small
        multiple of 2^-24 * scale, whatever cancels. 0 demands the exact value.
    float_bits: True where a uint element holds the bits of a float.
    """

    value: Array
    scale: Array | float = 0.0
    float_bits: Array | None = None


def words_per_element(kind: str) -> int:
    """Numpy elements (of `dtype_of`) that one element of a slot has."""
    if kind in STRUCTS:
        return STRUCTS[kind].itemsize // 4
    return 4 if kind == "uint4" else 1


def dtype_of(kind: str) -> np.dtype[Any]:
    """The dtype of the array that run_kernel takes for a slot of this type: structs are uint32 words."""
    return np.dtype("u4") if kind in STRUCTS else DTYPES[kind]


def decode(kind: str, raw: Array, shape: tuple[int, ...]) -> Any:
    """A slot's memory as float64 or int64 in its declared shape; StepState as a namespace, else a list."""
    if kind in STRUCTS:
        records = np.ascontiguousarray(raw).view(STRUCTS[kind]).reshape(-1)
        spaces = [Space(**{f: record[f].item() for f in STRUCTS[kind].names or ()}) for record in records]
        return spaces[0] if kind == "StepState" else spaces
    if (ACT_TYPE if kind == "act_t" else kind) == "bfloat":
        return bf16_values(raw).reshape(shape)
    values = raw.astype(np.float64 if raw.dtype.kind == "f" else np.int64)
    return values.reshape((*shape, 4) if kind == "uint4" else shape)


def shape_of(text: str, names: Mapping[str, int]) -> tuple[int, ...]:
    """Evaluates a shape comment such as "[rows, n / 64]"."""
    tree = ast.parse(text.replace("/", "//"), mode="eval")
    return tuple(eval(compile(tree, text, "eval"), {"__builtins__": {}}, dict(names)))


def bf16_values(bits: Array) -> Array:
    """float64 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bf16_bits(x: Array) -> Array:
    """The bf16 nearest to x (finite), ties to even, as uint16."""
    u = np.asarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def half_values(x: Array) -> Array:
    """Numbers rounded to act_t, saturating as half does."""
    if ACT_TYPE == "bfloat":
        return bf16_values(bf16_bits(x))
    return saturated(x).astype(np.float16).astype(np.float64)


def saturated(x: Array) -> Array:
    """Numbers cut to the range of act_t."""
    return np.clip(x, -ACT_MAX, ACT_MAX)
