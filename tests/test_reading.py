"""Checkpoints that end anywhere, and reads that go wrong: an error that names the file, nothing is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compiler import preloadable
from lily import CheckpointError, _native
from lily.checkpoint import Checkpoint, open_checkpoint
from lily.tensor_files import read_header
from make_checkpoint import Shape, make_checkpoint

SHAPE = Shape(
    vocab=320, hidden=64, layers=2, heads=2, kv_heads=1, delta_key_heads=1, delta_value_heads=2, experts=4,
    experts_used=2, inner=64, shared_inner=64,
)  # fmt: skip
SHARDS = (1, 3)


def load(checkpoint: Checkpoint) -> None:
    engine = _native.Engine(
        _native.Config(**checkpoint.config),
        checkpoint.tensors,
        device="cpu",
        context=64,
        prefill_chunk=64,
        threads=2,
        max_sessions=1,
        progress=None,
    )
    engine.close()


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
    folder = make_checkpoint(tmp_path / "one", SHAPE, shards=shards)
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
    models = [str(make_checkpoint(folder / f"{shards} files", SHAPE, shards=shards)) for shards in SHARDS]
    script = str(Path(__file__).with_name("reading_story.py"))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", script, library, *models],
        # An arena for each thread would be 64 MB of address space now and then.
        env={**os.environ, "LD_PRELOAD": library, "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout).values())


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
