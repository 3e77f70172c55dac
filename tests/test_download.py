"""Downloads that are interrupted, damaged or refused, from a hub on this machine."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from hub_stub import COMMIT, WEIGHTS, Hub, digest, only_hub
from lily import download, hub_access
from lily.checkpoint import open_checkpoint, resolve
from lily.download import damaged, plan_download
from lily.errors import CheckpointError, DownloadError
from lily.hub import FILES, cached
from make_checkpoint import SMALL, make_checkpoint, tensor_specs

NAME = "owner/name"


class StopError(Exception):
    """Raised by a progress callback."""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hub") / "one", SMALL)


@pytest.fixture
def hub(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(download, "_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(hub_access, "_PAUSES", (0.01, 0.01))
    monkeypatch.setattr(download, "_TICK", 0.01)
    with only_hub(pristine, tmp_path, monkeypatch) as server:
        yield server


def store() -> Path:
    return Path(constants.HF_HUB_CACHE) / "models--owner--name"


def partial(hub: Hub) -> Path:
    return store() / "blobs" / (digest((hub.folder / WEIGHTS).read_bytes()) + ".lily.incomplete")


def check(folder: Path, hub: Hub) -> None:
    """Check that a download is what the hub has, and that nothing is left of the way there."""
    assert (folder / WEIGHTS).read_bytes() == (hub.folder / WEIGHTS).read_bytes()
    open_checkpoint(folder, tensor_specs=tensor_specs)
    assert not list(store().rglob("*.incomplete"))
    assert (store() / "refs" / "main").read_text() == COMMIT


def test_download__layout_is_that_of_other_programs(hub: Hub) -> None:
    check(resolve(NAME), hub)
    entry = store() / "snapshots" / COMMIT / WEIGHTS
    assert entry.resolve() == (store() / "blobs" / digest((hub.folder / WEIGHTS).read_bytes())).resolve()


def test_download__finds_what_another_program_fetched(hub: Hub) -> None:
    import huggingface_hub

    theirs = huggingface_hub.snapshot_download(NAME, tqdm_class=hub_access.quiet_links())
    hub.requests.clear()
    assert resolve(NAME) == Path(theirs)
    assert hub.requests == []
    assert plan_download(NAME, None, FILES).missing == ()


def test_download__lost_connections_go_on(hub: Hub) -> None:
    size = (hub.folder / WEIGHTS).stat().st_size
    hub.faults[WEIGHTS] = [("drop", 100_000), 503, ("drop", 50_000), 429]
    check(resolve(NAME), hub)
    begins = [int(text.removeprefix("bytes=").rstrip("-")) for text in hub.ranges[WEIGHTS] if text]
    assert begins == sorted(begins)
    assert 0 < begins[0] <= 100_000
    assert begins[-1] < size


def test_download__next_attempt_goes_on(hub: Hub) -> None:
    def progress(done: int, total: int) -> None:
        if partial(hub).exists() and partial(hub).stat().st_size > 100_000:
            raise StopError

    hub.pause = 0.05
    with pytest.raises(StopError):
        resolve(NAME, progress=progress)
    kept = partial(hub).stat().st_size
    assert kept > 100_000
    assert cached(NAME) is None
    hub.pause = 0
    hub.ranges.clear()
    calls: list[tuple[int, int]] = []
    check(resolve(NAME, progress=lambda *call: calls.append(call)), hub)
    assert hub.ranges[WEIGHTS] == [f"bytes={kept}-"]
    assert calls[0][0] >= kept
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_download__hub_that_cannot_begin_in_the_middle(hub: Hub) -> None:
    hub.faults[WEIGHTS] = [("drop", 100_000), "whole"]
    check(resolve(NAME), hub)


def test_download__wrong_bytes_are_thrown_away(hub: Hub) -> None:
    hub.faults[WEIGHTS] = ["flip"]
    with pytest.raises(DownloadError, match="checksum") as caught:
        resolve(NAME)
    assert caught.value.reason == "damaged"
    assert partial(hub).stat().st_size == 0
    check(resolve(NAME), hub)


def test_download__left_over_of_another_file(hub: Hub) -> None:
    partial(hub).parent.mkdir(parents=True)
    partial(hub).write_bytes(b"x" * 1_000_000)
    check(resolve(NAME), hub)
    shutil.rmtree(store())
    partial(hub).parent.mkdir(parents=True)
    partial(hub).write_bytes(b"x" * 1000)
    with pytest.raises(DownloadError, match="fetched anew"):
        resolve(NAME)
    check(resolve(NAME), hub)


def test_download__hub_that_always_ends_too_soon(hub: Hub) -> None:
    hub.faults[WEIGHTS] = [("drop", 70_000), *[("drop", 0)] * 3]
    with pytest.raises(DownloadError, match="goes on from there") as caught:
        resolve(NAME)
    assert caught.value.reason == "no_connection"
    assert partial(hub).stat().st_size == 70_000
    check(resolve(NAME), hub)


def test_download__short_files_are_completed(hub: Hub) -> None:
    hub.faults[WEIGHTS] = ["short"]
    check(resolve(NAME), hub)


@pytest.mark.parametrize("path", ["/api/models/owner/name", "config.json", WEIGHTS])
def test_download__busy_hub_is_asked_again(hub: Hub, path: str) -> None:
    hub.faults[path] = [500, 504]
    check(resolve(NAME), hub)


@pytest.mark.parametrize(
    ("path", "status", "reason", "text"),
    [
        ("/api/models/owner/name", 401, "no_access", "private and HF_TOKEN does not open it"),
        ("/api/models/owner/name", 403, "no_access", "conditions have to be accepted on http"),
        ("/api/models/owner/name", 404, "not_found", "there is no such repository"),
        ("/api/models/owner/name", 500, "server", "status 500"),
        (WEIGHTS, 403, "no_access", "conditions have to be accepted on http"),
    ],
)
def test_download__refusals(hub: Hub, path: str, status: int, reason: str, text: str) -> None:
    hub.faults[path] = [status] * 9
    with pytest.raises(DownloadError, match=text) as caught:
        resolve(NAME)
    assert caught.value.reason == reason
    assert isinstance(caught.value, CheckpointError)


def test_download__unknown_revision(hub: Hub) -> None:
    with pytest.raises(DownloadError, match=r"'v9'.* it has no such revision") as caught:
        resolve(NAME, "v9")
    assert caught.value.reason == "not_found"


def test_download__no_hub_and_offline_mode(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="offline mode is on") as caught:
        resolve(NAME)
    assert caught.value.reason == "offline"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="no connection") as caught:
        resolve(NAME)
    assert caught.value.reason == "no_connection"


def test_download__token_is_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(DownloadError) as caught:
        resolve(NAME)
    assert caught.value.reason == "no_access"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    check(resolve(NAME), hub)


def test_download__full_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage  # huggingface_hub asks it as well, about a temporary folder
    small = SimpleNamespace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda at: small if "pytest" in str(at) else usage(at))
    with pytest.raises(DownloadError, match=r"has room for 0\.00 GB") as caught:
        resolve(NAME)
    assert caught.value.reason == "disk_full"
    assert not any(path.startswith("GET") and path.endswith(WEIGHTS) for path in hub.requests)


def test_download__disk_that_becomes_full(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(DownloadError, match="disk of the cache is full") as caught:
        resolve(NAME)
    assert caught.value.reason == "disk_full"
    assert list(store().rglob("*.lily.incomplete"))


def test_download__cache_that_cannot_be_written(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DownloadError) as caught:
        resolve(NAME)
    assert caught.value.reason == "cache"


def test_download__two_at_the_same_time(hub: Hub) -> None:
    hub.pause = 0.02
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(resolve(NAME))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    check(found[0], hub)
    assert hub.ranges[WEIGHTS] == [""]


def test_download__damage_is_found_and_mended(hub: Hub) -> None:
    folder = resolve(NAME)
    plan = plan_download(NAME, None, FILES)
    assert damaged(plan, None) == []
    blob = (folder / WEIGHTS).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    calls: list[tuple[int, int]] = []
    assert [file.name for file in damaged(plan, lambda *call: calls.append(call))] == [WEIGHTS]
    assert calls[-1] == (plan.bytes_total, plan.bytes_total)
    plan.drop(damaged(plan, None)[0])
    check(resolve(NAME), hub)


def test_download__truncated_file_is_fetched_again(hub: Hub) -> None:
    folder = resolve(NAME)
    with open((folder / WEIGHTS).resolve(), "r+b") as file:
        file.truncate(1000)
    assert [file.name for file in plan_download(NAME, None, FILES).missing] == [WEIGHTS]
    check(resolve(NAME, update=True), hub)


def test_download__cache_without_links(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.are_symlinks_supported", lambda *_: False)
    folder = resolve(NAME)
    check(folder, hub)
    assert not (folder / WEIGHTS).is_symlink()
    assert not (store() / "blobs" / digest((hub.folder / WEIGHTS).read_bytes())).exists()
    with open(folder / WEIGHTS, "r+b") as file:
        file.truncate(1000)
    check(resolve(NAME, update=True), hub)
