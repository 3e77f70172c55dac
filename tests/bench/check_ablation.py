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
    """The logits after each pass."""
    ablations, session = [_native.Ablation(name) for _ in ROWS], native.session()
    made = []
    for ablation, ids in zip(ablations, passes(), strict=True):
        ablation.prefill(session, ids)
        made.append(session.logits())
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
    """A device that multiplies integers rounds no weight, so there logits differ by that rounding."""
    integers = multiplies_integers(device)
    with engine_with(device) as native:
        for mine, theirs in zip(logits_of(native, "expanded_weights"), expected, strict=True):
            if integers:
                assert 0 < np.abs(mine - theirs).mean() < 0.1
            else:
                assert mine.tobytes() == theirs.tobytes()


def test_ablation__unknown_name() -> None:
    with pytest.raises(ValueError, match="no ablation is called tiles"):
        _native.Ablation("tiles")


def test_ablation__more_rows_than_a_chunk(device: str) -> None:
    with engine_with(device) as native:
        session = native.session()
        with pytest.raises(ValueError, match="more tokens than prefill_chunk"):
            _native.Ablation("none").prefill(session, np.zeros(257, np.int32))
