"""Allocations of native code that fail: each call ends in OutOfMemoryError, and can be made again."""

from __future__ import annotations

from typing import Any

import pytest

from compiler import preloadable
from make_checkpoint import SMALL, make_checkpoint
from stories import tell

# Calls, and how many of their allocations are made to fail at the least.
SCENES = {
    "open": 3000,
    "first prefill": 300,
    "first step": 300,
    "first sampled": 300,
    "first score": 400,
    "first top": 20,
    "prefill": 5,
    "score": 10,
    "top": 5,
    "logits": 2,
    "sampling": 5,
    "session": 5,
    "engine": 30,
    "calls": 20,
}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    """What failing_story.py found, with a library that is loaded before everything else."""
    if device != "cpu":
        pytest.skip("the CPU device's allocations fail")
    folder = tmp_path_factory.mktemp("failing")
    library = preloadable("fail_allocations", folder)
    make_checkpoint(folder / "model", SMALL)
    return tell("failing_story.py", library, str(folder / "model"), LD_PRELOAD=library)


@pytest.mark.parametrize("scene", SCENES)
def test_failing__is_an_error_and_changes_nothing(story: Any, scene: str) -> None:
    """Wherever memory, the device's too, or a thread is refused, alone or with all that follows."""
    found = story[scene]
    assert found["problems"] == []
    assert found["calls"] >= SCENES[scene]
    assert found["errors"]["OutOfMemoryError"] > 0.5 * found["calls"]


@pytest.mark.parametrize("scene", ["step", "sampled", "reset", "position", "last", "close"])
def test_failing__calls_that_need_no_memory(story: Any, scene: str) -> None:
    assert story[scene]["calls"] == 0


def test_failing__in_the_first_calls_of_a_process(story: Any) -> None:
    assert story["first"]["wrong"] == 0


def test_failing__gives_memory_and_files_back(story: Any) -> None:
    """Address space, so that a buffer which was never written to counts, too."""
    assert story["growth"]["bytes"] < 1 << 16
    assert story["growth"]["files"] == 0
