"""The mathematics that several references share, in float64. Products come with their scale (slots.Out)."""

from __future__ import annotations

from typing import Any

import numpy as np

from lily.doctor.slots import Array, half_values, saturated

Slots = Any  # a namespace of arrays; attributes are the kernel's slot names

QUANT_GROUP, GENERATIONS, SWIGLU_SHIFT = 64, 3, 64


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def kept(x: Array) -> Array:
    return np.full(x.shape, np.nan)


def weight_parts(w: Array, scales: Array, biases: Array, bits: int) -> tuple[Array, Array, Array]:
    """q, scale and bias of every weight, [..., k]; w is [..., k * bits / 128, 4] words."""
    shifts = np.arange(0, 32, bits)
    q = ((w[..., None] >> shifts) & ((1 << bits) - 1)).reshape(*w.shape[:-2], -1)
    return q, np.repeat(scales, QUANT_GROUP, -1), np.repeat(biases, QUANT_GROUP, -1)


def integer_unit(x: Array) -> Array:
    """What a 16-bit integer stands for that some devices multiply instead of x: a power of two per group."""
    groups = np.abs(x).reshape(*x.shape[:-1], -1, QUANT_GROUP).max(-1)
    exponent = np.floor(np.log2(np.maximum(groups, 2.0**-100)))
    return np.repeat(2.0 ** (exponent - 14), QUANT_GROUP, -1)


def as_integers(x: Array) -> Array:
    """x as those devices have it."""
    unit = integer_unit(x)
    rounded: Array = np.rint(x / unit) * unit
    return rounded


def product(
    x: Array, w: Array, scales: Array, biases: Array, bits: int = 4, *, integers: bool = False
) -> tuple[Array, Array]:
    """x W^T with exact weights, [rows, n], and its scale.

    integers: the device multiplies integers, not x, with 4-bit weights.
    """
    if integers and bits == 4:
        x = as_integers(x)
    q, s, b = weight_parts(w, scales, biases, bits)
    return x @ (q * s + b).T, np.abs(x) @ (q * np.abs(s) + np.abs(b)).T


def tile_product(
    x: Array, w: Array, scales: Array, biases: Array, bits: int = 4, *, integers: bool = False
) -> tuple[Array, Array]:
    """x W^T with every weight made in fp32 and then rounded to half, [rows, n], and its scale.

    integers: the device multiplies integers, not x, with exact weights.
    """
    if integers:
        return product(as_integers(x), w, scales, biases, bits)
    q, s, b = weight_parts(w, scales, biases, bits)
    weights = half_values((q * s + b).astype(np.float32))
    return x @ weights.T, np.abs(x) @ np.abs(weights).T


def swiglu(gate: Array, gate_scale: Array, up: Array, up_scale: Array) -> tuple[Array, Array]:
    """silu(gate) * up / SWIGLU_SHIFT as act_t, and its scale. The slope of silu is below 1.1."""
    value = silu(gate) * up / SWIGLU_SHIFT
    scale = (1.1 * np.abs(up) * gate_scale + np.abs(silu(gate)) * up_scale) / SWIGLU_SHIFT + np.abs(value)
    return saturated(value), scale


def rms(x: Array, eps: float) -> Array:
    scaled: Array = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
    return scaled


def next_generation(step: Any) -> int:
    return int(step.generation + 1) % GENERATIONS
