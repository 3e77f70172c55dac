"""Checkpoints that end anywhere, and reads that go wrong: an error that names the file, nothing is kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from compiler import preloadable
from lily import CheckpointError
from lily.checkpoint import Checkpoint, open_checkpoint
from lily.tensor_files import read_header
from make_checkpoint import SMALL, make_checkpoint
from native_engine import open_native
from stories import tell

SHARDS = (1, 3)


def load(checkpoint: Checkpoint) -> None:
    open_native(checkpoint).close()


def cuts(path: Path) -> list[int]:
    """Lengths at and beside every boundary in a file: of its length field, its header and its tensors."""
    tensors = list(read_header(path).values())
    edges = {0, 8} | {edge for each in tensors for edge in (each.offset, each.offset + each.nbytes)}
    size = path.stat().st_size
    around = {edge + step for edge in edges for step in (-1, 0, 1)}
    return sorted(length for length in around if 0 <= length <= size + 1 and length != size)


@pytest.mark.parametrize("shards", SHARDS)
def test_cut__at_every_tensor(tmp_path: Path, shards: int) -> None:
    """Found when the headers are checked; when they were checked before, while the weights are read."""
    folder = make_checkpoint(tmp_path / "one", SMALL, shards=shards)
    checkpoint = open_checkpoint(folder)
    descriptors = os.listdir("/dev/fd")
    done = 0
    for path in sorted(folder.glob("*.safetensors")):
        whole = path.read_bytes()
        header_end = min(tensor.offset for tensor in read_header(path).values())
        for length in cuts(path):
            path.write_bytes((whole + b"x")[:length])
            with pytest.raises(CheckpointError, match=f"^{path}: "):
                open_checkpoint(folder)
            if header_end <= length < len(whole):
                with pytest.raises(CheckpointError, match=f"^{path}: truncated, tensor "):
                    load(checkpoint)
            done += 1
        path.write_bytes(whole)
    assert done > 250
    load(open_checkpoint(folder))
    assert os.listdir("/dev/fd") == descriptors


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    """What reading_story.py found, of one file and of several."""
    if device != "cpu":
        pytest.skip("this is about files")
    folder = tmp_path_factory.mktemp("reading")
    library = preloadable("fail_reads", folder)
    models = [str(make_checkpoint(folder / f"{shards} files", SMALL, shards=shards)) for shards in SHARDS]
    # An arena for each thread would be 64 MB of address space now and then.
    found = tell("reading_story.py", library, *models, LD_PRELOAD=library, MALLOC_ARENA_MAX="1")
    return list(found.values())


@pytest.mark.parametrize("which", range(len(SHARDS)), ids=["one file", "three files"])
def test_reading__goes_wrong_anywhere(story: Any, which: int) -> None:
    """Errors and early ends of every read, of every opening, and files that change at any time."""
    found = story[which]
    assert found["problems"] == []
    counts = found["counts"]
    assert counts["error"] >= counts["end"] > 100  # reads: of headers and other files, and of every tensor
    assert counts["no descriptors"] == counts["forbidden"] >= 5
    assert counts["changed"] >= 4 * 2 * SHARDS[which]  # at two calls of progress or more


@pytest.mark.parametrize("which", range(len(SHARDS)), ids=["one file", "three files"])
def test_reading__gives_memory_and_files_back(story: Any, which: int) -> None:
    growth = story[which]["growth"]
    assert growth["files"] == 0
    assert max(growth["space"], growth["resident"]) < 1 << 20  # 200 models would take 400 times as much
