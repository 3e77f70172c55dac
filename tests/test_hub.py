"""From a model's name to a folder: paths, the hub's cache, and downloads from a server on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from hub_stub import COMMIT, Hub, only_hub
from hub_stub import WEIGHTS as MODEL
from lily.checkpoint import open_checkpoint, resolve
from lily.errors import CheckpointError, UnsupportedError
from make_checkpoint import INDEX, SMALL, make_checkpoint, tensor_specs


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hub") / "one", SMALL)


def test_resolve_pristines(pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(pristine) == pristine
    assert resolve(str(pristine)) == pristine
    monkeypatch.chdir(pristine.parent)
    assert resolve("one") == pristine
    monkeypatch.setenv("HOME", str(pristine.parent))
    assert resolve("~/one") == pristine


@pytest.mark.parametrize(
    "name", ["", "/no/such/folder", "./owner/name", "../x", "~/nothing", "name", "a/b/c", "a\0/b", "-a/b"]
)
def test_resolve_names_that_are_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "empty" / "inside"  # "../x" is nothing there
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    with pytest.raises(CheckpointError, match="no such folder, and no hub id"):
        resolve(name)


@pytest.mark.parametrize("revision", ["main", "", 3])
def test_resolve_revision_of_what_has_none(tmp_path: Path, revision: str) -> None:
    for model in ("demo", tmp_path):
        with pytest.raises(ValueError, match="revision"):
            resolve(model, revision)


def test_folder_whose_name_is_no_text(pristine: Path, tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    shutil.copytree(pristine, folder)
    with pytest.raises(CheckpointError, match="not UTF-8"):
        open_checkpoint(folder)


def test_resolve_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(Path("owner/name"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "file")


@pytest.fixture
def hub(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with only_hub(pristine, tmp_path, monkeypatch) as server:
        yield server


def test_hub_download_then_cache(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[int, int]] = []
    found = resolve("owner/name", progress=lambda done, total: calls.append((done, total)))
    checkpoint = open_checkpoint(found, tensor_specs=tensor_specs)
    assert checkpoint.name == "owner/name"
    assert checkpoint.config == dataclasses.asdict(SMALL)
    weights = (hub.folder / MODEL).stat().st_size
    assert calls[-1][0] >= weights
    assert all(0 <= done <= total for done, total in calls)
    hub.requests.clear()
    assert resolve("owner/name") == found
    assert resolve("owner/name", revision=COMMIT) == found
    assert hub.requests == []
    assert resolve("owner/name", update=True) == found
    assert hub.requests != []
    assert capfd.readouterr() == ("", "")


def test_hub_completes_an_interrupted_download(hub: Hub) -> None:
    found = resolve("owner/name")
    (found / MODEL).unlink()
    assert resolve("owner/name") == found
    assert (found / MODEL).is_file()


def test_hub_index_that_names_no_possible_file(hub: Hub) -> None:
    found = resolve("owner/name")
    (found / INDEX).unlink()
    (found / INDEX).write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(CheckpointError, match="lacks"):
        resolve("owner/name")


def test_hub_refuses_an_unsupported_model_before_its_weights(hub: Hub) -> None:
    (hub.folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedError, match="found 'llama'"):
        resolve("owner/name")
    assert not any(path.endswith(MODEL) for path in hub.requests)


def test_hub_download_is_cancelled_by_progress(hub: Hub) -> None:
    class StopError(Exception):
        pass

    def progress(done: int, total: int) -> None:
        raise StopError

    with pytest.raises(StopError):
        resolve("owner/name", progress=progress)


def test_hub_without_the_model(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match="not available from http://127") as caught:
        resolve("owner/other", revision="v1")
    for word in ("owner/other", "no such folder", "cache", "'v1'"):
        assert word in str(caught.value)


def test_hub_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="not complete in the hub cache"):
        resolve("owner/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    found = resolve("owner/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("owner/name") == found


def test_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"not available from http://127\.0\.0\.1:9"):
        resolve("owner/name")
