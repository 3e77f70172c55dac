"""Passes that do without a design decision compute what the product does. Needs a build for benchmarks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

import lily
from lily import _native
from lily.doctor.kernels import multiplies_integers

Ablation: Any = getattr(_native, "_Ablation", None)

ROWS = (200, 64, 1)  # more than a tile, a tile, one row; the second and third pass go on from a state
EXACT = ("none", "host_routing", "state_in_memory")
Logits = list[npt.NDArray[np.float32]]


@contextlib.contextmanager
def engine_with(device: str, tile: int = 0) -> Iterator[Any]:
    """The demo model, in the native core."""
    native = functools.partial(_native.Engine, tile=tile)
    with mock.patch.object(_native, "Engine", native):
        engine = lily.Engine("demo", device=device, context=512, prefill_chunk=256, max_sessions=1)
    with engine:
        yield engine._core.native()


def passes() -> Iterator[npt.NDArray[np.int32]]:
    """The tokens of each pass."""
    for rows in ROWS:
        yield np.arange(rows, dtype=np.int32) * 37 % 1000


def logits_of(native: Any, name: str) -> Logits:
    """The logits after each pass; all again, in the other order, with the passes that are prepared then."""
    session = native.session()
    ablation, made = Ablation(session, name), []
    for ids in passes():
        ablation.prefill(ids)
        made.append(session.logits())
    for ids in reversed(list(passes())):
        session.reset()
        ablation.prefill(ids)
    session.reset()
    for ids, before in zip(passes(), made, strict=True):
        ablation.prefill(ids)
        assert session.logits().tobytes() == before.tobytes()
    session.close()
    return made


@pytest.fixture(scope="module")
def expected(device: str) -> Logits:
    """The logits of the product's own passes."""
    made = []
    with engine_with(device) as native:
        session = native.session()
        for ids in passes():
            for part in (ids[: len(ids) // 64 * 64], ids[len(ids) // 64 * 64 :]):
                assert part.size == 0 or session.prefill(part) == part.size
            made.append(session.logits())
        session.close()
    return made


@pytest.mark.parametrize("name", EXACT)
def test_ablation__has_the_bits_of_the_product(device: str, expected: Logits, name: str) -> None:
    with engine_with(device) as native:
        for mine, theirs in zip(logits_of(native, name), expected, strict=True):
            assert mine.tobytes() == theirs.tobytes()


def test_small_tiles__have_the_bits_of_the_product(device: str, expected: Logits) -> None:
    with engine_with(device, tile=16) as native:
        for mine, theirs in zip(logits_of(native, "none"), expected, strict=True):
            assert mine.tobytes() == theirs.tobytes()


def test_expanded_weights__are_those_of_the_tiles(device: str, expected: Logits) -> None:
    """A device that multiplies integers, or rounds scales, has other weights: logits differ by that."""
    integers = multiplies_integers(device) or device.startswith("cuda")
    with engine_with(device) as native:
        for mine, theirs in zip(logits_of(native, "expanded_weights"), expected, strict=True):
            if integers:
                assert 0 < np.abs(mine - theirs).mean() < 0.1
            else:
                assert mine.tobytes() == theirs.tobytes()


def test_decode_ablations__attend_to_the_same(device: str) -> None:
    """Query heads of their own have the same bits; one block rounds otherwise, and prompts' passes do."""
    ids, context = np.arange(2112, dtype=np.int32) * 37 % 1000, 2112
    made = {}
    with lily.Engine("demo", device=device, context=4096, max_sessions=1) as engine:
        native = engine._core.native()
        for name in ("none", "heads_apart", "one_block", "prompt"):
            session = native.session()
            left = ids
            while left.size:
                left = left[session.prefill(left) :]
            if name == "prompt":
                session.prefill(ids[:1])
            else:
                Ablation(session, name).decode(int(ids[0]), 2)
            assert session.position == context + 1
            made[name] = session.logits()
            session.close()
    if not device.startswith("cuda"):  # where sums of a tile have another order with more heads
        assert made["heads_apart"].tobytes() == made["none"].tobytes()
    for name in ("heads_apart", "one_block", "prompt"):
        assert np.abs(made[name] - made["none"]).max() < 0.1


def test_ablation__wrong_arguments(device: str) -> None:
    with engine_with(device) as native:
        session = native.session()
        with pytest.raises(ValueError, match="no ablation is called tiles"):
            Ablation(session, "tiles")
        with pytest.raises(ValueError, match="more tokens than prefill_chunk"):
            Ablation(session, "none").prefill(np.zeros(257, np.int32))


def test_ablation__variant_that_is_missing_is_said_each_time(device: str) -> None:
    if device == "metal" or device.startswith("cuda"):
        pytest.skip("it compiles any variant")
    with engine_with(device, tile=16) as native:
        session = native.session()
        ablation = Ablation(session, "expanded_weights")
        for _ in range(2):
            with pytest.raises(lily.LilyError, match="expanded_mm_gate_up is not compiled"):
                ablation.prefill(np.zeros(8, np.int32))


def test_ablation__closed_engine_is_said(device: str) -> None:
    with engine_with(device) as native:
        session = native.session()
        ablation = Ablation(session, "none")
        ablation.prefill(np.zeros(8, np.int32))
    del native, session
    with pytest.raises(lily.LilyError, match="closed"):
        ablation.prefill(np.zeros(8, np.int32))
