"""The delta rule over long sequences, beside its recurrence in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from launch import DEVICES, TILES_ONLY
from lily.doctor.cases import make_case
from lily.doctor.inputs import Dims
from lily.doctor.kernels import KERNELS, compare, run
from lily.doctor.slots import Array


def near_one(rng: np.random.Generator, rows: int) -> Array:
    return rng.uniform(1 - 1e-4, 1, rows)


def near_zero(rng: np.random.Generator, rows: int) -> Array:
    return rng.uniform(0, 1e-3, rows)


def both(rng: np.random.Generator, rows: int) -> Array:
    """Long memories that end at once."""
    return np.where(rng.uniform(size=rows) < 0.01, 1e-4, 1 - 1e-5)


@pytest.mark.parametrize("device", [device for device in DEVICES if device not in TILES_ONLY])
@pytest.mark.parametrize("decays", [near_one, near_zero, both])
@pytest.mark.parametrize("beta", [1e-3, 1.0])
def test_long_sequence(device: str, decays: Callable[[np.random.Generator, int], Array], beta: float) -> None:
    rows = 8200 if device == "cpu" else 300
    d = Dims(rows, rows, 0, 1, 64, 64, 64, 64, 1, 1, 1)
    case = make_case("delta_scan", {}, "long", d, "normal", 0)
    gates = case.slots["gates"].reshape(rows, 1, 2).copy()
    gates[:, 0, 0] = decays(np.random.default_rng(1), rows)
    gates[:, 0, 1] = beta
    case = dataclasses.replace(case, slots={**case.slots, "gates": gates})
    kernel = KERNELS["delta_scan"]
    assert compare(kernel, case, run(device, kernel, case), device).reason == ""
