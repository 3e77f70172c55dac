"""Live comparison with mlx-lm on the same checkpoint bytes, at the demo's shape and at a random one.

mlx-lm's float parameters are cast to fp32: its CPU back-end accumulates quantised products in bf16 when
activations are bf16, which makes it no oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lily import Engine
from make_checkpoint import Shape, make_checkpoint

mx = pytest.importorskip("mlx.core", reason="the test extra installs mlx")


def mlx_model(folder: Path) -> Any:
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    wide = tree_map(
        lambda v: v.astype(mx.float32) if mx.issubdtype(v.dtype, mx.floating) else v, model.parameters()
    )
    model.update(wide)
    return model


def mlx_logits(model: Any, ids: list[int]) -> npt.NDArray[np.float32]:
    logits = model(mx.array(ids)[None], cache=model.make_cache())[0].astype(mx.float32)
    mx.eval(logits)
    return np.array(logits)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    normalised: npt.NDArray[np.float64] = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return normalised


def compare(folder: Path, ids: list[int], device: str) -> None:
    expected = log_softmax(mlx_logits(mlx_model(folder), ids))
    with Engine(folder, device=device, context=512, prefill_chunk=64) as engine:
        score = engine.score(ids, top_logprobs=1)
    rows = np.arange(len(ids))
    order = np.sort(expected, -1)
    clear = order[:, -1] - order[:, -2] > 1.0
    top = expected.argmax(-1)
    deltas = np.abs(score.logprobs - expected[rows[:-1], ids[1:]])
    same = score.top_ids[:, 0] == top
    print(f"\n{folder.name}: top-1 {same.mean():.4f}, mean |dlogprob| {deltas.mean():.4f}")
    assert same[clear].all()
    assert same.mean() >= 0.95
    assert deltas.mean() <= 0.02


def test_demo_agrees_with_mlx(demo_folder: Path, device: str, tokenizer: Any) -> None:
    text = "The quick brown fox jumps over the lazy dog, and then it tells of a turtle named Omar. " * 4
    compare(demo_folder, tokenizer.encode(text)[:96], device)


def test_random_shape_agrees_with_mlx(tmp_path: Path, device: str) -> None:
    folder = tmp_path / "third"
    make_checkpoint(folder, shards=2)
    rng = np.random.default_rng(11)
    compare(folder, [int(i) for i in rng.integers(0, 300, 80)], device)


def test_many_experts_used_and_value_heads_agree_with_mlx(tmp_path: Path, device: str) -> None:
    folder = tmp_path / "many"
    make_checkpoint(folder, Shape(experts=24, experts_used=17, delta_key_heads=1, delta_value_heads=9))
    rng = np.random.default_rng(12)
    compare(folder, [int(i) for i in rng.integers(0, 300, 80)], device)
