"""Generating takes no memory: no step but the first allocates, and the process does not grow."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from compiler import preloadable
from stories import tell

TESTS = pathlib.Path(__file__).resolve().parent
KINDS = ("greedy", "adjusted", "sampled")


def story(*arguments: str, **environment: str) -> Any:
    """What memory_story.py prints."""
    return tell("memory_story.py", *arguments, **environment)


@pytest.fixture(scope="module")
def allocations(tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    """Allocations of Lily's native code, found by a library that is loaded before everything else.

    Python allocates for every token, so what counts is who calls: Lily's extension, with the argument
    conversion that is compiled into it, the objects with the kernels, and the C++ library for either, on any
    thread.
    """
    if device != "cpu":
        pytest.skip("the CPU device's launches are counted")
    library = preloadable("count_allocations", tmp_path_factory.mktemp("count"))
    found = story(library, LD_PRELOAD=library)
    if found["calls"]["idle"]:
        pytest.skip("built with a pybind11 before 3.0, which allocates for every call")
    return found


def test_count__sees_what_is_known_to_allocate(allocations: Any) -> None:
    assert allocations["calls"]["logits"] >= 1


@pytest.mark.parametrize("turn", ["first", "again"])
@pytest.mark.parametrize("kind", KINDS)
def test_step__allocates_nothing_after_the_first(allocations: Any, kind: str, turn: str) -> None:
    """Over the ends of two pages. The first step of a call takes its sampling parameters over."""
    assert allocations[f"{kind}, {turn}"] == {"at": [250], "sites": []}


def test_step__a_plan_is_recorded_once(allocations: Any) -> None:
    """From 2,048 tokens on another plan runs, and only the first session to come there records it."""
    assert allocations["far, greedy"]["at"] == [2040, 2048]
    assert allocations["far, sampled"] == {"at": [2040], "sites": []}


def test_step__allocates_nothing_between_sessions(allocations: Any) -> None:
    assert allocations["interleaved"] == {"count": 0, "sites": []}


def test_prefill__allocates_nothing_for_a_launch(allocations: Any) -> None:
    """A chunk has more than a hundred launches; what is allocated is copies of its ids."""
    assert allocations["calls"]["prefill"] < 8


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not tell")
def test_process__does_not_grow_over_20000_tokens() -> None:
    found = story()
    assert found["tokens"] >= 20_000
    assert found["growth"] < 1 << 20, found


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="the system does not tell")
def test_limit__holds_whatever_is_done_and_close_gives_all_back() -> None:
    found = story("ceiling")
    assert found["most"] <= found["limit"]
    assert found["failures"] > 0  # there was more to do than the limit has room for
    assert found["cache"]["snapshots"] >= 2
    assert found["used"] <= found["limit"]
    assert found["locked"] == 0
    assert found["closed"] < 4 << 20, found
