"""Kernels of one decoded row against the chains that they replace: the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from launch import DEVICES, TILES_ONLY, variants
from lily.doctor.cases import Case, make_case
from lily.doctor.inputs import EPS, Dims
from lily.doctor.kernels import KERNELS, run
from lily.doctor.slots import Array

DIMS = {
    "small": Dims(1, 1, 5, 2, 192, 128, 64, 128, 1, 1, 2, 5, 3, 67, 4160),
    "first": Dims(1, 1, 0, 1, 64, 64, 128, 64, 2, 2, 2, 9, 8, 67, 4160),
    "large": Dims(1, 1, 1300, 3, 256, 64, 64, 64, 2, 2, 6, 12, 8, 256, 4160),
}
ROW = {"step": np.array([0, 0, 1, 0, 0xFFFFFFFF, 0], np.uint32)}
each = pytest.mark.parametrize(
    ("device", "d"),
    [
        pytest.param(x, d, id=f"{x}-{name}")
        for x in DEVICES
        if x not in TILES_ONLY
        for name, d in DIMS.items()
    ],
)


def launch(
    device: str, name: str, args: Mapping[str, float], slots: Mapping[str, Array], **consts: int
) -> dict[str, Array]:
    """What a plain kernel leaves in its slots."""
    listed = [found for kernel, found in variants(device) if kernel == name]
    wanted = {**dict.fromkeys(listed[0], 0), **consts}
    return run(device, KERNELS[name], Case(name, args, wanted, slots, {}))


def fused(device: str, name: str, d: Dims, **consts: int) -> tuple[Case, dict[str, Array]]:
    """A case of a kernel of one row, and what it leaves in its slots."""
    case = make_case(name, consts, "row", d, "normal", 0)
    return case, run(device, KERNELS[name], case)


def same(a: Array, b: Array) -> bool:
    return a.reshape(-1).tobytes() == b.reshape(-1).tobytes()


@each
def test_norm_qmv(device: str, d: Dims) -> None:
    case, after = fused(device, "norm_qmv", d, BITS=8, K=0)
    x, k = case.slots, int(case.args["k"])
    normed = launch(
        device, "rms_norm", {"rows": 1, "dim": k, "eps": EPS}, {"x": x["x"], "w": x["norm"], **ROW}
    )
    weights = {name: x[name] for name in ("w", "scales", "biases")}
    args = {"rows": 1, "n": d.n, "k": k}
    product = launch(device, "qmv", args, {"x": normed["y"], **weights, **ROW}, BITS=8)
    assert same(after["h"], normed["y"])
    assert same(after["y"], product["y"])


@each
def test_delta_mix(device: str, d: Dims) -> None:
    case, after = fused(device, "delta_mix", d)
    x, a = case.slots, case.args
    heads = {"key_heads": d.key_heads, "value_heads": d.value_heads}
    common = {"proj": x["proj"], "step": x["step"]}
    width = {"rows": 1, "proj_dim": a["proj_dim"]}
    conv = launch(
        device,
        "conv_silu",
        {**width, "sessions": d.sessions, "channels": a["channels"]},
        {**common, "w": x["conv_w"], "state": x["conv"]},
    )
    prepared = launch(
        device,
        "delta_prepare",
        {**width, **heads, "a": a["a"]},
        {**common, "a_log": x["a_log"], "dt_bias": x["dt_bias"], "qkv": conv["y"]},
    )
    scan = launch(
        device,
        "delta_scan",
        {"rows": 1, "sessions": d.sessions, **heads},
        {"qkv": prepared["qkv"], "gates": prepared["gates"], "step": x["step"], "state": x["state"]},
    )
    out = launch(
        device,
        "gated_rms_norm",
        {**width, "value_heads": d.value_heads, "gate": a["z"], "eps": EPS},
        {**common, "x": scan["y"], "w": x["norm"]},
    )
    assert same(after["conv"], conv["state"])
    assert same(after["state"], scan["state"])
    assert same(after["y"], out["y"])


@each
@pytest.mark.parametrize("group", [1, 4])
def test_attention(device: str, d: Dims, group: int) -> None:
    """The cache rows are those of rope_write, and blocks joined again are the whole."""
    case, after = fused(device, "attention_decode", d, GROUP=group)
    x, a = case.slots, case.args
    names = ("proj", "q_norm", "k_norm", "inv_freq", "page_table", "step", "k_cache", "v_cache")
    args = {name: a[name] for name in ("sessions", "kv_heads", "proj_dim", "pages", "session_pages", "eps")}
    args |= {"rows": 1, "heads": d.kv_heads * group}
    roped = launch(device, "rope_write", args, {name: x[name] for name in names})
    blocks = {**a, "blocks": d.position // 64 + 1, "block": 64}
    parts = launch(device, "attention_blocks", blocks, x, GROUP=group)
    for name in ("k_cache", "v_cache"):
        assert same(after[name], roped[name])
        assert same(parts[name], roped[name])
    whole = launch(
        device,
        "attention_merge",
        {name: blocks[name] for name in ("kv_heads", "proj_dim", "blocks", "block")},
        {"sums": parts["sums"], "stats": parts["stats"], "proj": x["proj"], "step": x["step"]},
        GROUP=group,
    )
    assert np.allclose(whole["y"].astype(float), after["y"].astype(float), rtol=2e-3, atol=1e-5)


@each
def test_experts(device: str, d: Dims) -> None:
    """Routing is that of moe_route; outputs of single experts, added up by moe_combine, are those of all."""
    case, after = fused(device, "expert_mv_gate_up", d, K=0, E=0)
    n = int(case.args["n"])
    counts = {"experts": d.experts, "used": d.used}
    routed = launch(
        device,
        "moe_route",
        {"rows": 1, "n": n, **counts},
        {"logits": case.slots["logits"], **ROW},
    )
    assert same(after["ids"], routed["ids"])
    assert same(after["weights"], routed["weights"])
    case, after = fused(device, "expert_mv_down", d, K=0, KS=0)
    # One expert at a time: the only one chosen, the shared one weighing nothing; or that one, behind zeros.
    inner, ids, h = int(case.args["inner"]), case.slots["ids"], case.slots["h"]
    logits = {"logits": case.slots["logits"], **ROW}
    route = launch(device, "moe_route", {"rows": 1, "n": int(case.args["n"]), **counts}, logits)
    case = dataclasses.replace(case, slots={**case.slots, "weights": route["weights"].reshape(-1)})
    after = run(device, KERNELS["expert_mv_down"], case)
    single = []
    for j in range(d.used + 1):
        alone_logits = np.zeros_like(case.slots["logits"])
        alone_logits[ids[j % d.used]] = 100
        alone_logits[d.experts] = -200 if j < d.used else 200
        own = h[j * inner : (j + 1) * inner] if j < d.used else np.zeros_like(h[:inner])
        alone = {
            "logits": alone_logits,
            "ids": ids[j % d.used : j % d.used + 1],
            "weights": np.array([1, 0 if j < d.used else 1], np.float32),
            "h": np.concatenate([own, h[d.used * inner :]]),
            "x": np.zeros(d.k, np.float32),
        }
        alone_case = dataclasses.replace(case, args={**case.args, "used": 1}, slots={**case.slots, **alone})
        single.append(run(device, KERNELS["expert_mv_down"], alone_case)["x"])
    combined = launch(
        device,
        "moe_combine",
        {"rows": 1, "used": d.used, "hidden": d.k},
        {
            "routed": np.stack(single[:-1]),
            "shared": single[-1] / np.float32(64),
            "weights": case.slots["weights"],
            "x": case.slots["x"],
            **ROW,
        },
    )
    assert same(after["x"], combined["x"])
