"""Reading weights: what the headers cannot show is found while the native module reads the files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import poke, rebuild
from lily import Engine, _native
from lily.checkpoint import Checkpoint, open_checkpoint
from lily.errors import CheckpointError
from make_checkpoint import FULL_SIZE, SMALL, Shape, make_checkpoint, tensor_specs
from native_engine import open_native

MODEL = "model.safetensors"
LOG = "language_model.model.layers.0.linear_attn.A_log"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "one", SMALL)


def load(checkpoint: Checkpoint, progress: Callable[[int, int], object] | None = None) -> None:
    open_native(checkpoint, progress).close()


@pytest.mark.parametrize("shape", [Shape(), SMALL, FULL_SIZE, Shape(attention_interval=1), Shape(layers=1)])
def test_needed_tensors_are_the_layout(shape: Shape) -> None:
    counts: dict[str, Any] = dataclasses.asdict(shape)
    found = {spec.name: spec for spec in _native.tensor_specs(_native.Config(**counts))}
    expected = {spec.name: spec for spec in tensor_specs(counts)}
    assert found.keys() == expected.keys()
    for name, spec in expected.items():
        assert set(found[name].dtypes) == set(spec.dtypes), name
        assert tuple(found[name].shape) == spec.shape, name


@pytest.mark.parametrize("a_log", ["F32", "BF16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_load_reports_progress(tmp_path: Path, shards: int, a_log: str) -> None:
    calls: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "x", Shape(), shards=shards, a_log=a_log))
    load(checkpoint, lambda done, total: calls.append((done, total)))
    total = sum(nbytes for *_, nbytes in checkpoint.tensors)
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_load_is_cancelled_by_progress(folder: Path) -> None:
    class StopError(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise StopError

    with pytest.raises(StopError):
        load(open_checkpoint(folder), progress)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["language_model.lm_head.scales", "language_model.lm_head.biases", LOG])
def test_values_that_are_no_numbers(folder: Path, name: str, value: float) -> None:
    poke(folder / MODEL, name, 1, value)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)}: element 1 is NaN or infinite"):
        load(open_checkpoint(folder))


def test_file_that_shrank_after_the_check(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with (folder / MODEL).open("r+b") as file:
        file.truncate(20_000)
    with pytest.raises(CheckpointError, match=f"{MODEL}: truncated, tensor .* needs"):
        load(checkpoint)


@pytest.mark.parametrize("when", ["before", "during"])
def test_file_that_was_replaced_after_the_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The new file is valid and as long, but its tensors lie elsewhere."""
    other = folder / "other"
    shutil.copy(folder / MODEL, other)
    rebuild(other, lambda tensors: tensors.update({name: tensors.pop(name) for name in list(tensors)[::-1]}))

    def replace(*_: object) -> None:
        if other.exists():
            other.replace(folder / MODEL)

    if when == "before":
        monkeypatch.setattr("lily.engine._check_memory", replace)
    with pytest.raises(CheckpointError, match=f"{MODEL}: was changed while the model was opened"):
        Engine(folder, context=256, device="cpu", progress=replace if when == "during" else None)


def test_file_that_was_written_to_after_the_check(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    checkpoint.check_unchanged()
    os.utime(folder / MODEL, ns=(1, 1))
    with pytest.raises(CheckpointError, match=f"{MODEL}: was changed"):
        checkpoint.check_unchanged()
    (folder / MODEL).unlink()
    with pytest.raises(CheckpointError, match=f"{MODEL}: cannot be read"):
        checkpoint.check_unchanged()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 10**400),
        ("top_p", 10**400),
        ("min_p", -(10**400)),
        ("repetition_penalty", 10**400),
        ("repetition_penalty", float("1e999")),
        ("top_k", 1 << 32),
        ("top_k", 10**400),
        ("top_k", 1.5),
        ("temperature", [1]),
        ("temperature", {}),
        ("top_p", "1"),
    ],
)
def test_defaults_that_are_no_sampling_parameters(folder: Path, key: str, value: object) -> None:
    text = json.dumps({"do_sample": True, key: value}).replace("Infinity", "1e999")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{key}"):
        Engine.plan_memory(folder, context=256, device="cpu")


def test_file_that_went_away_after_the_check(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    (folder / MODEL).unlink()
    with pytest.raises(CheckpointError, match=f"{MODEL}: cannot be opened"):
        load(checkpoint)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_file_that_became_a_folder_or_a_pipe(folder: Path, make: Callable[[Path], None]) -> None:
    checkpoint = open_checkpoint(folder)
    (folder / MODEL).unlink()
    make(folder / MODEL)
    with pytest.raises(CheckpointError, match=f"{MODEL}: is not a regular file"):
        load(checkpoint)


def test_experts_beyond_one_piece_of_a_stack_are_at_their_places(device: str, tmp_path: Path) -> None:
    """Whatever the experts' order, and though their stacks are read in pieces, the logits are the same."""
    shape = dataclasses.replace(SMALL, layers=1, hidden=512, inner=512, experts=96)  # stacks of 12 MB
    folder = make_checkpoint(tmp_path / "one", shape)
    reversed_folder = shutil.copytree(folder, tmp_path / "reversed")

    def reverse(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
        for name, (dtype, sizes, raw) in tensors.items():
            if ".mlp.switch_mlp." in name or ".mlp.gate." in name:
                rows = np.frombuffer(raw, np.uint8).reshape(shape.experts, -1)
                tensors[name] = (dtype, sizes, rows[::-1].tobytes())

    rebuild(reversed_folder / MODEL, reverse)
    scores = []
    for path in (folder, reversed_folder):
        with Engine(path, device=device, context=256, prefill_chunk=64) as engine:
            scores.append(engine.score(range(200)).logprobs)
    np.testing.assert_array_equal(scores[0], scores[1])
