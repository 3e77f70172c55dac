"""Prefill from router logits to the sum of experts, kernel after kernel, for logits nobody would draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from launch import DEVICES
from lily.doctor.cases import Case
from lily.doctor.inputs import Dims, Numbers, chain
from lily.doctor.kernels import KERNELS, compare, run
from lily.doctor.slots import Array

HIDDEN, INNER, TILE = 128, 64, 32


def one_expert(rows: int, experts: int) -> Array:
    """Every row likes the third expert best."""
    logits = np.zeros((rows, experts))
    logits[:, 2] = 5
    return logits


def one_row_each(rows: int, experts: int) -> Array:
    return np.eye(rows, experts) * 5


def ties(rows: int, experts: int) -> Array:
    return np.zeros((rows, experts))


def few_values(rows: int, experts: int) -> Array:
    """Ties of several experts at different places in every row."""
    return np.random.default_rng(0).integers(0, 3, (rows, experts)).astype(float)


def last_expert(rows: int, experts: int) -> Array:
    logits = np.full((rows, experts), -80.0)
    logits[:, -1] = 80
    return logits


class Launches:
    """Runs kernels on what earlier ones wrote, and compares each with its reference."""

    def __init__(self, device: str, slots: Mapping[str, Array]) -> None:
        self._device = device
        self.slots = dict(slots)

    def __call__(
        self, name: str, args: Mapping[str, float], ulps: Mapping[str, float], **consts: int
    ) -> None:
        kernel = KERNELS[name]
        inputs = {
            slot["name"]: self.slots[slot["name"]] for slot in kernel["slots"] if slot["name"] not in ulps
        }
        if name == "moe_combine":
            inputs["x"] = self.slots["x_rows"]
        case = Case("adversarial", args, consts, inputs, ulps)
        after = run(self._device, kernel, case, threads=2)
        assert compare(kernel, case, after, self._device).reason == "", name
        self.slots.update({slot: after[slot] for slot in ulps})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("logits", "rows", "experts", "used"),
    [
        (one_expert, 70, 8, 1),
        (one_expert, 70, 8, 3),
        (last_expert, 33, 5, 1),
        (one_row_each, 8, 8, 1),
        (few_values, 3, 16, 2),
        (few_values, 65, 11, 4),
        (ties, 40, 12, 5),
        (ties, 1, 16, 16),
    ],
)
def test_routing(
    device: str, logits: Callable[[int, int], Array], rows: int, experts: int, used: int
) -> None:
    d = Dims(rows, rows, 0, 1, HIDDEN, HIDDEN, INNER, INNER, 1, 1, 1, experts, used)
    g = Numbers("routing", "normal", 0)
    width = -(-(experts + 1) // 64) * 64
    route = np.full((rows, width), np.nan, np.float32)
    route[:, :experts] = logits(rows, experts)
    route[:, experts] = 0.5
    x = g.acts(rows, HIDDEN)
    launch = Launches(
        device, {"logits": route, "step": g.step(d), "x": x, **g.weights(experts, 2 * INNER, HIDDEN)}
    )
    launch(
        "moe_route",
        {"rows": rows, "n": width, "experts": experts, "used": used},
        {"ids": 0, "weights": 8},
        E=0,
    )
    order = {"rows": rows, "used": used, "experts": experts, "tile": TILE}
    launch("moe_histogram", order, {"counts": 0})
    launch("moe_scan", order, {"places": 0, "tiles": 0, "tile_count": 0})
    launch("moe_scatter", order, {"pairs": 0})
    pairs, tiles = launch.slots["pairs"], launch.slots["tiles"].reshape(-1, 4)
    tiles = tiles[: int(launch.slots["tile_count"][0])]
    assert sorted(pairs) == list(range(rows * used))
    assert tiles[:, 2].sum() == rows * used
    assert tiles[:, 2].min() > 0
    args = {"rows": rows, "used": used, "experts": experts}
    launch("expert_mm_gate_up", {**args, "n": INNER, "k": HIDDEN}, {"h": chain(HIDDEN, g)}, BM=TILE)
    launch.slots.update(g.weights(experts, HIDDEN, INNER))
    launch("expert_mm_down", {**args, "n": HIDDEN, "k": INNER}, {"y": chain(INNER, g)}, BM=TILE)
    launch.slots |= {"routed": launch.slots["y"], "shared": g.rows(d, HIDDEN), "x_rows": g.rows(d, HIDDEN)}
    launch("moe_combine", {"rows": rows, "used": used, "hidden": HIDDEN}, {"x": 8})
