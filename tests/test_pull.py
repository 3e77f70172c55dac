"""lily pull as a program, with a hub on this machine that serves the demo model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hub_stub import COMMIT, WEIGHTS, Hub, serve
from lily.checkpoint import DEMO
from lily.cli import terminal

NAME = "owner/name"
ANSWER = "The capital of France is Paris."


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serve(DEMO, tmp_path / "served") as server:
        yield server


def start(hub: Hub, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    cache = hub.folder.parent / "home" / "hub"
    environment = {**os.environ, "TERM": "xterm", **hub.environment(cache), **variables}
    command = [sys.executable, "-m", "lily", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(hub: Hub, *arguments: str, **variables: str) -> tuple[int, str, str]:
    with start(hub, *arguments, **variables) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def folder(hub: Hub) -> Path:
    return hub.folder.parent / "home" / "hub" / "models--owner--name" / "snapshots" / COMMIT


def test_pull__prints_the_folder(hub: Hub, device: str) -> None:
    status, out, err = run(hub, "pull", NAME)
    assert (status, out) == (0, f"{folder(hub)}\n")
    assert err.startswith("lily: downloaded 12.8 MB in ")
    assert err.count("\n") == 1
    status, out, err = run(hub, "pull", NAME)
    assert (status, out) == (0, f"{folder(hub)}\n")
    assert "nothing to download" in err
    question = ("What is the capital of France?", "--temperature", "0", "--device", device)
    hub.requests.clear()
    assert run(hub, "generate", *question, "--model", NAME) == (0, ANSWER + "\n", "")
    assert hub.requests == []


def test_pull__dry_run_then_json(hub: Hub) -> None:
    status, out, err = run(hub, "pull", NAME, "--dry-run", "--json")
    foreseen = json.loads(out)
    assert (status, err) == (0, "")
    assert foreseen["bytes_to_download"] == foreseen["bytes_total"] > 10_000_000
    assert {file["state"] for file in foreseen["files"]} == {"missing"}
    assert not folder(hub).exists()
    assert f"missing  {WEIGHTS}\n" in run(hub, "pull", NAME, "--dry-run")[1]
    record = json.loads(run(hub, "pull", NAME, "--json", "--revision", "main")[1])
    assert (record["model"], record["commit"], record["folder"]) == (NAME, COMMIT, str(folder(hub)))
    assert record["bytes_downloaded"] == foreseen["bytes_total"]
    assert {file["state"] for file in record["files"]} == {"present"}
    assert json.loads(run(hub, "pull", NAME, "--dry-run", "--json")[1])["bytes_to_download"] == 0


def test_pull__ctrl_c_and_on(hub: Hub) -> None:
    hub.pause = 0.05
    with start(hub, "pull", NAME) as process:
        blobs = folder(hub).parent.parent / "blobs"
        end = time.monotonic() + 30
        while not any(file.stat().st_size > 1_000_000 for file in blobs.glob("*.incomplete")):
            assert time.monotonic() < end
            time.sleep(0.01)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - begun < 3
    assert (process.returncode, out) == (130, "")
    assert "the next lily pull goes on from here" in err
    assert "Traceback" not in err
    hub.pause = 0
    record = json.loads(run(hub, "pull", NAME, "--dry-run", "--json")[1])
    assert "partial" in {file["state"] for file in record["files"]}
    assert record["bytes_to_download"] < record["bytes_total"] - 1_000_000
    assert run(hub, "pull", NAME)[0] == 0
    assert hub.ranges[WEIGHTS][-1].startswith("bytes=")


def test_pull__verify(hub: Hub) -> None:
    run(hub, "pull", NAME)
    blob = (folder(hub) / WEIGHTS).resolve()
    data = bytearray(blob.read_bytes())
    data[5_000_000] ^= 1
    blob.write_bytes(data)
    assert "nothing to download" in run(hub, "pull", NAME)[2]
    record = json.loads(run(hub, "pull", NAME, "--verify", "--dry-run", "--json")[1])
    assert [file["name"] for file in record["files"] if file["state"] == "damaged"] == [WEIGHTS]
    assert record["bytes_to_download"] == len(data)
    status, _, err = run(hub, "pull", NAME, "--verify")
    assert status == 0
    assert f"lily: {WEIGHTS} in the cache is damaged\n" in err
    assert blob.read_bytes() == (hub.folder / WEIGHTS).read_bytes()


def test_pull__cache_is_good_enough_without_a_hub(hub: Hub) -> None:
    status, out, err = run(hub, "pull", NAME, HF_HUB_OFFLINE="1")
    assert (status, out) == (1, "")
    assert "offline mode is on (HF_HUB_OFFLINE)" in err
    run(hub, "pull", NAME)
    status, out, err = run(hub, "pull", NAME, HF_HUB_OFFLINE="1")
    assert (status, out, err) == (
        0, f"{folder(hub)}\n", "lily: offline mode is on; owner/name is complete in the cache\n"
    )  # fmt: skip
    status, out, err = run(hub, "pull", NAME, HF_ENDPOINT="http://127.0.0.1:9")
    assert (status, out) == (0, f"{folder(hub)}\n")
    assert "the hub cannot be reached" in err
    assert run(hub, "pull", NAME, "--verify", HF_ENDPOINT="http://127.0.0.1:9")[0] == 1


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/models/owner/name", 401, "HF_TOKEN does not open it (401)"),
        ("/api/models/owner/name", 403, "its conditions have to be accepted"),
        ("/api/models/owner/name", 404, "there is no such repository"),
    ],
)
def test_pull__errors_are_one_line(hub: Hub, path: str, status: int, text: str) -> None:
    hub.faults[path] = [status] * 9
    found, out, err = run(hub, "pull", NAME)
    assert (found, out) == (1, "")
    assert text in err
    assert err.startswith("lily: owner/name: ")
    assert err.count("\n") == 1


def test_pull__token_of_the_environment(hub: Hub) -> None:
    hub.token = "hf_secret"
    assert run(hub, "pull", NAME)[0] == 1
    status, _, err = run(hub, "pull", NAME, HF_TOKEN="hf_secret")
    assert status == 0
    assert "secret" not in err


def test_pull__unsupported_model(hub: Hub) -> None:
    (hub.folder / "config.json").write_text('{"model_type": "llama"}')
    for options in ((), ("--dry-run",)):
        status, out, err = run(hub, "pull", NAME, *options)
        assert (status, out) == (1, "")
        assert err.startswith("lily: owner/name/config.json")
        assert "found 'llama'" in err
    assert not any(path.endswith(WEIGHTS) for path in hub.requests)


@pytest.mark.parametrize(
    ("arguments", "status", "out", "text"),
    [
        (["demo"], 0, f"{DEMO}\n", "nothing to download"),
        (["nothing"], 1, "", "no such folder, and no hub id"),
        (["demo", "--revision", "x"], 1, "", "applies to models of the hub"),
        ([], 2, "", "usage: lily pull"),
    ],
)
def test_pull__what_is_not_on_the_hub(
    hub: Hub, arguments: list[str], status: int, out: str, text: str
) -> None:
    result = run(hub, "pull", *arguments)
    assert result[:2] == (status, out)
    assert text in result[2]
    assert hub.requests == []


def test_transfer_bar__speed_and_time(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bar = terminal.TransferBar("downloading x")
    for second in range(20):
        now = 100.0 + second
        bar(5_000_000_000 + second * 100_000_000, 19_000_000_000)
    assert capsys.readouterr().err == "lily: downloading x: 6.5/19.0 GB, 100.0 MB/s, 2 min left\n"
    assert [terminal.duration(seconds) for seconds in (40, 720, 12600)] == ["40 s", "12 min", "3.5 h"]
