"""lily bench: what is measured, what is written to the cache, and that a failing peer costs nobody else."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lily import plan as plans
from lily.bench import gguf_file, machine, peers, synthetic
from lily.bench.medians import median_interval, percentile
from lily.bench.peers import Peer, Subject, compare
from lily.bench.runners import LlamaRunner
from lily.bench.synthetic import Shape, layers_of, random_tensor, synthetic_checkpoint
from lily.bench.worker import Worker, WorkerError
from lily.checkpoint import DEMO, open_checkpoint
from lily.cli import main
from lily.errors import UnsupportedError
from make_checkpoint import Spec

TINY = Shape(
    vocab=512, hidden=256, layers=4, attention_interval=4, heads=2, kv_heads=1, delta_key_heads=2,
    delta_value_heads=4, experts=8, experts_used=2, inner=256, shared_inner=256,
)  # fmt: skip
SMALL_COPY = 1 << 22


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lily's cache folder, empty; full size is tiny here, and so is what is copied."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(synthetic, "FULL_SIZE", TINY)
    monkeypatch.setattr(machine, "_COPIED", SMALL_COPY)
    return tmp_path / "cache" / "lily"


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["bench", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# ---- arguments ----


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "usage: lily bench "),
        (["speed"], "invalid choice: 'speed'"),
        (["decode", "x"], "lily bench decode: error: unrecognized arguments: x"),
        (["decode", "--context", "0"], "argument --context: must be an integer from 1"),
        (["decode", "--repeats", "0"], "argument --repeats: must be an integer from 1"),
        (["decode", "--model", "synthetic:0"], "argument --model: synthetic:LAYERS needs a number of layers"),
        (["decode", "--model", "synthetic:4", "--revision", "x"], "--revision applies to models of the hub"),
        (["peers", "--model", "synthetic:many"], "from 1 to 1024, not 'many'"),
        (["peers", "--prefill", "64,x"], "argument --prefill: must be an integer from 1"),
        (["peers", "--device", "metal"], "argument --device: invalid choice: 'metal'"),
    ],
)
def test_usage__errors_are_two(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_errors__are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("decode", "peers"):
        status, out, err = bench(capsys, command, "--model", "/no/such/folder")
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("lily: '/no/such/folder': no such folder")


@pytest.mark.parametrize(
    ("model", "layers"), [("demo", None), ("a/b", None), (DEMO, None), ("synthetic:4", 4), ("synthetic:1", 1)]
)
def test_layers_of(model: str | Path, layers: int | None) -> None:
    assert layers_of(model) == layers


@pytest.mark.parametrize("text", ["", "0", "1025", "-4", "4.0", "1e3", "²", "9" * 5000])
def test_layers_of__no_number_of_layers(text: str) -> None:
    with pytest.raises(ValueError, match="from 1 to 1024"):
        layers_of(f"synthetic:{text}")


# ---- figures ----


def test_percentile() -> None:
    values = [3.0, 1.0, 2.0, 4.0]
    assert [percentile(values, p) for p in (0, 50, 99, 100)] == pytest.approx([1, 2.5, 3.97, 4])
    assert percentile([7.0], 99) == 7


@pytest.mark.parametrize(
    ("count", "ranks"), [(1, None), (5, None), (6, (1, 6)), (9, (2, 8)), (15, (4, 12)), (20, (6, 15))]
)
def test_median_interval__order_statistics_of_the_tables(count: int, ranks: tuple[int, int] | None) -> None:
    values = [float(i) for i in range(count, 0, -1)]
    assert median_interval(values) == ranks


def test_copy_bandwidth() -> None:
    assert machine.copy_bandwidth(2) > 1e8


# ---- decode ----


def test_decode__json(capsys: pytest.CaptureFixture[str], device: str) -> None:
    counts = ("--context", "9", "--tokens", "3", "--repeats", "2")
    status, out, err = bench(capsys, "decode", *counts, "--device", device, "--json")
    record = json.loads(out)
    assert (status, err) == (0, "")
    assert record["model"] == "demo"
    assert record["settings"] == {"context": 9, "tokens": 3, "repeats": 2}
    assert record["machine"]["cores"] >= 1
    assert record["machine"]["processor"]
    speeds = record["tokens_per_second_of_repeats"]
    assert len(speeds) == 2
    assert min(speeds) < record["tokens_per_second"] < max(speeds)
    times = record["seconds_per_token"]
    assert 0 < times["p50"] <= times["p99"]
    plan = record["plan"]
    config = open_checkpoint(DEMO).config
    decode, pick = (plans.record(config, name, context=13) for name in ("decode", "greedy"))
    assert plan["context"] == 12
    assert plan["launches"] == len(decode.launches) + len(pick.launches)
    moved = plan["bytes_read"] + plan["bytes_written"]
    assert moved == decode.read + decode.written + pick.read + pick.written
    assert record["bytes_per_second"] == pytest.approx(moved * record["tokens_per_second"])
    if device in ("cpu", "cpu32"):
        assert record["share_of_copy"] == pytest.approx(
            record["bytes_per_second"] / record["copy_bytes_per_second"]
        )
    else:
        assert record["share_of_copy"] is record["copy_bytes_per_second"] is None
    assert record["engine"]["device"] == device
    assert set(record["engine"]["versions"]) == {"lily", "numpy"}


def test_decode__synthetic_as_text(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    arguments = ("decode", "--model", "synthetic:2", "--context", "1", "--tokens", "2", "--repeats", "1")
    status, out, err = bench(capsys, *arguments, "--device", "cpu")
    assert (status, err) == (0, "")
    (folder,) = cache.iterdir()
    assert open_checkpoint(folder).config == dataclasses.asdict(dataclasses.replace(TINY, layers=2))
    names = [line.split("  ")[0] for line in out.splitlines()]
    assert names == [
        "model", "machine", "device", "versions", "decode", "time of a token", "plan of a token", "bandwidth",
    ]  # fmt: skip
    assert f"synthetic:2, in {folder}\n" in out
    assert " tok/s after 1 tokens, median of 1 times 2 tokens (" in out
    assert "% of the " in out


# ---- prefill ----


def test_prefill__json(capsys: pytest.CaptureFixture[str], device: str) -> None:
    arguments = ("prefill", "--tokens", "5", "70", "--repeats", "3", "--device", device, "--json")
    status, out, err = bench(capsys, *arguments)
    record = json.loads(out)
    assert (status, err) == (0, "")
    assert record["settings"] == {"tokens": [5, 70], "repeats": 3}
    assert [case["tokens"] for case in record["cases"]] == [5, 70]
    for case in record["cases"]:
        assert case["tokens_per_second"] == pytest.approx(case["tokens"] / case["seconds"])
        speeds = case["tokens_per_second_of_repeats"]
        assert len(speeds) == 3
        assert min(speeds) <= case["tokens_per_second"] * 1.0001
    assert record["engine"]["device"] == device
    assert record["machine"]["cores"] >= 1


def test_prefill__as_text(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    arguments = (
        "prefill",
        "--model",
        "synthetic:2",
        "--tokens",
        "1",
        "9",
        "--repeats",
        "1",
        "--device",
        "cpu",
    )
    status, out, err = bench(capsys, *arguments)
    assert (status, err) == (0, "")
    names = [line.split("  ")[0] for line in out.splitlines()]
    assert names == ["model", "machine", "device", "versions", "prefill", "prefill"]
    assert " tok/s, 9 tokens in " in out


def test_prefill__a_length_out_of_range(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench(capsys, "prefill", "--tokens", "8", "0")
    assert "argument --tokens: must be an integer from 1 to 16777216, not '0'" in capsys.readouterr().err


# ---- random weights ----


def test_checkpoint__is_written_once(cache: Path) -> None:
    calls: list[tuple[int, int]] = []
    folder = synthetic_checkpoint(TINY, lambda done, total: calls.append((done, total)))
    size = sum(nbytes for *_, nbytes in open_checkpoint(folder).tensors)
    assert calls[0] == (0, size)
    assert calls[-1] == (size, size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    written = (folder / "model.safetensors").stat().st_ino
    assert synthetic_checkpoint(TINY, calls.append) == folder  # type: ignore[arg-type]  # never called
    assert (folder / "model.safetensors").stat().st_ino == written
    other = synthetic_checkpoint(dataclasses.replace(TINY, experts=4))
    assert sorted(cache.iterdir()) == sorted([folder, other])


def test_checkpoint__that_was_damaged_is_written_anew() -> None:
    folder = synthetic_checkpoint(TINY)
    expected = (folder / "model.safetensors").read_bytes()
    os.truncate(folder / "model.safetensors", 1000)
    assert synthetic_checkpoint(TINY) == folder
    assert (folder / "model.safetensors").read_bytes() == expected


def test_checkpoint__written_twice_at_the_same_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = synthetic.write_checkpoint, []

    def meanwhile(*arguments: Any, **options: Any) -> Path:
        calls.append(1)
        if len(calls) == 1:
            synthetic_checkpoint(TINY)
        return write(*arguments, **options)

    monkeypatch.setattr(synthetic, "write_checkpoint", meanwhile)
    folder = synthetic_checkpoint(TINY)
    open_checkpoint(folder)
    assert len(calls) == 2
    assert list(cache.iterdir()) == [folder]


def test_checkpoint__no_room(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1000))
    status, _, err = bench(capsys, "decode", "--model", "synthetic:4")
    assert status == 1
    assert "random weights need 0.0 GiB and 0.0 GiB are free; XDG_CACHE_HOME names another folder" in err


def test_checkpoint__no_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    status, _, err = bench(capsys, "decode", "--model", "synthetic:4")
    assert status == 1
    assert "no place for random weights: Not a directory; XDG_CACHE_HOME names another folder" in err


def test_checkpoint__replaces_what_another_version_wrote(cache: Path) -> None:
    counts = synthetic.entry_of(TINY, "synthetic-4", Path(synthetic.__file__)).name.rsplit("-", 1)[0]
    other_shape = cache / "synthetic-4-01234567-89abcdef"
    for folder in (cache / f"{counts}-01234567", other_shape):
        folder.mkdir(parents=True)
    made = synthetic_checkpoint(TINY)
    assert sorted(cache.iterdir()) == sorted([made, other_shape])


def test_checkpoint__that_failed_leaves_nothing(cache: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthetic_checkpoint(TINY, stop)
    assert list(cache.iterdir()) == []


def test_large_tensors__repeat_and_are_sane() -> None:
    shape = (5, 1000, 256)  # experts of a block's size would all be the same
    for kind, dtype in (("weight", "U32"), ("scales", "BF16")):
        spec = Spec(f"language_model.model.layers.0.mlp.switch_mlp.up_proj.{kind}", (dtype,), shape)
        values = random_tensor(spec, dtype, 2048, 0)
        assert values.shape == shape
        assert len({part.tobytes() for part in values}) == 5
    scales = (values.astype(np.uint32) << 16).view(np.float32)
    assert np.abs(scales).max() < 1.6 / 7.5 / 45


def test_gguf__has_the_tensors_of_the_shape(cache: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the test extra installs gguf")
    calls: list[tuple[int, int]] = []
    path = gguf_file.synthetic_gguf(TINY, lambda done, total: calls.append((done, total)))
    assert gguf_file.synthetic_gguf(TINY) == path
    assert list(cache.iterdir()) == [path.parent]
    assert calls[-1][0] == calls[-1][1]
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert sum(tensor.n_bytes for tensor in reader.tensors) == calls[-1][1]
    assert len(tensors) == 3 + 3 * (2 + 9 + 8) + (2 + 6 + 8)
    experts = tensors["blk.3.ffn_down_exps.weight"]
    assert (experts.tensor_type.name, list(experts.shape)) == ("Q4_K", [256, 256, 8])
    weights = gguf.quants.dequantize(tensors["blk.0.attn_qkv.weight"].data, experts.tensor_type)
    assert weights.shape == (2 * 256 + 512, 256)
    assert weights.std() == pytest.approx(1 / 16, rel=0.1)
    assert abs(weights.mean()) < 0.01
    with pytest.raises(UnsupportedError, match="rows of 64 weights; Q4_K needs multiples of 256"):
        gguf_file.synthetic_gguf(dataclasses.replace(TINY, inner=64))


def test_llama_cpp__holds_and_decodes(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is compiled for minutes when it is installed")
    pytest.importorskip("gguf", reason="the test extra installs gguf")
    path = gguf_file.synthetic_gguf(TINY)
    runner = LlamaRunner(str(path), threads=2, context=64, vocab=TINY.vocab)
    runner.hold(5)
    first = runner._token
    assert len(runner.decode(3)) == 3
    runner.hold(20)
    assert runner.prefill(9) > 0
    runner.hold(5)
    assert runner._token == first
    assert "system_info" in runner.facts()
    runner.close()
    runner.close()
    (tmp_path / "other").write_bytes(b"other bytes")
    with pytest.raises(RuntimeError, match=r"cannot load .*invalid magic"):
        LlamaRunner(str(tmp_path / "other"), threads=2, context=64, vocab=TINY.vocab)


# ---- peers ----


def fake(name: str, *modules: str) -> Peer:
    return Peer(name, f"bench_runners:{name.capitalize()}", modules, "pip install it", lambda s, _: s.folder)


@pytest.fixture
def with_peers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Function that compares the demo model with the peers given."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))

    def run(*those: Peer, **options: Any) -> dict[str, Any]:
        monkeypatch.setattr(peers, "PEERS", those)
        settings = {"device": "cpu", "threads": 0, "context": 4, "tokens": 4, "pairs": 6, **options}
        return compare(Subject(DEMO, None, 4096), **settings)

    return run


def test_peers__speeds_and_ratios(with_peers: Callable[..., dict[str, Any]]) -> None:
    record = with_peers(fake("steady"), prefill=[7])
    assert record["left_out"] == {}
    threads = int(record["engines"]["lily"]["device_info"]["threads"])
    assert record["engines"]["steady"]["threads"] == threads
    assert all(facts["idle_load"] < 0.5 for facts in record["engines"].values())
    prefill, decode = record["cases"]
    assert (prefill["case"], prefill["tokens"]) == ("prefill", 7)
    assert (decode["case"], decode["context"], decode["tokens"]) == ("decode", 4, 4)
    for case in (prefill, decode):
        ours, theirs = case["engines"]["lily"], case["engines"]["steady"]
        assert theirs["tokens_per_second"] == pytest.approx(1000)
        assert len(ours["rounds"]) == len(theirs["rounds"]) == 6
        low, high = theirs["interval"]
        assert low <= theirs["ratio"] <= high
        assert theirs["ratio"] == pytest.approx(ours["tokens_per_second"] / 1000)


def test_peers__absent_and_failing_ones_are_reported(with_peers: Callable[..., dict[str, Any]]) -> None:
    left_out = Peer("other", "bench_runners:Steady", (), "", peers._gguf)
    record = with_peers(
        fake("absent", "no_such_module", "json", "nor_this"),
        left_out, fake("unmade"), fake("failing"), fake("dying"), fake("steady"),
    )  # fmt: skip
    assert record["left_out"] == {
        "absent": "not installed: no no_such_module and no nor_this (pip install it)",
        "other": "there is a GGUF file of random weights only (--model synthetic:LAYERS)",
        "unmade": "failed: KeyError: 'weights'",
        "failing": "failed: RuntimeError: no memory for token 9",
        "dying": "failed: its process ended with signal 6: assertion failed: 1 == 2",
    }
    assert list(record["engines"]) == list(record["cases"][0]["engines"]) == ["lily", "steady"]
    assert len(record["cases"][0]["engines"]["steady"]["rounds"]) == 6


def test_peers__that_are_slow_decode_less(
    with_peers: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ROUND_SECONDS", 3e-3)
    (case,) = with_peers(fake("steady"))["cases"]
    assert case["engines"]["steady"]["tokens"] == 3


def test_peers__quickest_token_is_not_how_fast_they_are(
    with_peers: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ROUND_SECONDS", 2e-3)
    (case,) = with_peers(fake("ahead"))["cases"]
    assert case["engines"]["ahead"]["tokens"] == 2


def test_peers__slow_ones_do_not_read_long_prompts(
    with_peers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PROMPT_SECONDS", 0.0)
    prompt, decode = with_peers(fake("steady"), prefill=[7])["cases"]
    assert list(prompt["engines"]) == ["lily"]
    assert prompt["left_out"] == {"steady": "a prompt takes 0 s"}
    assert list(decode["engines"]) == ["lily", "steady"]


def test_peers__lily_itself_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS", ())
    status, out, err = bench(capsys, "peers", "--prefill", str(1 << 24))
    assert (status, out) == (1, "")
    assert err.startswith("lily: context must be an integer from 1 to 16777216, not 16777217")


def test_room__is_checked_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench(capsys, "decode", "--context", str(1 << 24), "--tokens", "2", "--repeats", "3")
    expected = (
        "--context 16777216 and 3 times --tokens 2 are 16777222 tokens; a session holds at most 16777216"
    )
    assert expected in capsys.readouterr().err


def test_peers__as_text(
    capsys: pytest.CaptureFixture[str], with_peers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS", (fake("steady"), fake("absent", "no_such_module")))
    arguments = ("peers", "--prefill", "8", "--pairs", "2", "--tokens", "4", "--context", "4")
    status, out, err = bench(capsys, *arguments)
    assert (status, err) == (0, "")
    assert "absent             left out: not installed: no no_such_module (pip install it)\n" in out
    assert "\nprefill, 8 tokens\nlily " in out
    assert "\ndecode, 4 tokens after 4\nlily " in out
    assert "   Lily / steady " in out
    assert "(too few rounds for an interval)" in out


def test_peers__mlx_lm(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_lm", reason="the test extra installs mlx-lm")
    arguments = ("--prefill", "8", "--pairs", "1", "--tokens", "2", "--context", "300", "--json")
    status, out, _ = bench(capsys, "peers", *arguments)
    record = json.loads(out)
    assert status == 0
    assert record["left_out"].keys() == {"llama.cpp"}
    assert set(record["engines"]["mlx-lm"]["versions"]) == {"mlx", "mlx-lm"}
    for case in record["cases"]:
        assert case["engines"]["mlx-lm"]["tokens_per_second"] > 0
        assert case["engines"]["mlx-lm"]["interval"] is None


def test_worker__that_is_interrupted_ends_at_once(with_peers: Callable[..., Any]) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    worker = Worker("bench_runners:Busy", {"model": "demo", "threads": 1}, interrupt)
    assert worker.facts()["threads"] == 1
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        worker.prefill(1)
    worker.close()
    worker.close()
    assert time.monotonic() - start < 5
    with pytest.raises(WorkerError, match="closed"):
        worker.prefill(1)
