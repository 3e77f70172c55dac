"""lily doctor: a healthy installation passes, and what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import poke
from doctor_golden import extract
from lily import DeviceError, Engine, LilyError, _native
from lily.checkpoint import open_checkpoint
from lily.cli import main
from lily.doctor import golden, passes, references
from lily.doctor.checks import Check, attempt
from lily.doctor.golden import GOLDEN, compare_texts, decoded, golden_texts, prefilled
from lily.doctor.kernels import check_kernel
from lily.doctor.slots import ACT_MAX, Out
from lily.doctor.texts import check_chat_template, check_tokenizer
from lily.doctor.weights import check_weights
from lily.tensor_files import read_header
from lily.tokenizer import Tokenizer

MODEL = "model.safetensors"
LAYER = "language_model.model.layers.1"
ROUTER = f"{LAYER}.mlp.gate.scales"
NORM = f"{LAYER}.input_layernorm.weight"


def nothing(*_: object) -> None:
    """Progress that nobody watches."""


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], device: str) -> Callable[..., tuple[int, str, str]]:
    """Function that runs the command and returns its status, output and error output."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["doctor", "--device", device, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves two kernels to check, for tests that are about something else."""
    found = _native.variants
    monkeypatch.setattr(
        _native, "variants", lambda device: [v for v in found(device) if v[0] in ("rms_norm", "moe_scan")]
    )


@pytest.fixture
def copy(tmp_path: Path, demo_folder: Path) -> Path:
    """A copy of the demo checkpoint, to be damaged."""
    return Path(shutil.copytree(demo_folder, tmp_path / "copy"))


@pytest.fixture
def damaged(copy: Path, device: str) -> Iterator[Callable[[str, int, float], Engine]]:
    """Function that opens the copy after one number of it was changed."""
    engines = []

    def open_damaged(name: str, element: int, value: float) -> Engine:
        poke(copy / MODEL, name, element, value)
        engines.append(Engine(copy, device=device, context=512, prefill_chunk=256))
        return engines[-1]

    yield open_damaged
    for engine in engines:
        engine.close()


# The command


def test_a_healthy_installation_passes(doctor: Callable[..., tuple[int, str, str]], device: str) -> None:
    status, out, err = doctor("--quick")
    assert (status, err) == (0, "")
    assert "FAIL" not in out
    assert out.startswith("Lily ")
    rows = [line.split() for line in out.splitlines() if line.endswith(" ok")]
    assert [row[0] for row in rows] == [name for name, _ in _native.variants(device)]
    assert all(row[-4] == "intact" for row in rows)
    checks = ("device", "checkpoint", "kernels", "demo prefill", "demo decode", "tokenizer", "chat template")
    for name in (*checks, "weights", "activations", "consistency", "log probabilities"):
        assert f"\n{name:18} ok " in out, name
    assert out.endswith(": all is well\n")


def test_json_is_one_object(doctor: Callable[..., tuple[int, str, str]], two_kernels: None) -> None:
    status, out, err = doctor("--quick", "--json")
    record = json.loads(out)
    assert (status, err, record["ok"], record["failed"]) == (0, "", True, [])
    assert [kernel["kernel"] for kernel in record["kernels"]] == ["moe_scan", "rms_norm"]
    assert all(kernel["ok"] and kernel["memory"] and kernel["cases"] >= 5 for kernel in record["kernels"])
    checks = {check["name"]: check for check in record["checks"]}
    assert checks["demo decode"]["data"]["positions"] == 128
    assert checks["device"]["data"]["device"] == record["device"]
    assert checks["activations"]["data"]["saturated"] == 0
    assert checks["weights"]["data"]["kinds"]["mlp.gate.scales"]["tensors"] == 8


def test_chosen_kernels_alone(doctor: Callable[..., tuple[int, str, str]]) -> None:
    status, out, _ = doctor("--json", "--kernel", "rms_norm", "qmv", "--kernel", "moe_scan")
    record = json.loads(out)
    assert status == 0
    assert {kernel["kernel"] for kernel in record["kernels"]} == {"rms_norm", "qmv", "moe_scan"}
    assert [check["name"] for check in record["checks"]] == ["device", "kernels"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--kernel", "rms_norms"], "there is no kernel 'rms_norms'; there are "),
        (["--kernel", "rms_norm", "--model", "x"], "--kernel checks kernels alone"),
        (["--kernel"], "--kernel: expected at least one argument"),
        (["--context", "5"], "unrecognized arguments: --context 5"),
    ],
)
def test_wrong_usage_is_two(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *arguments])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--help"])
    assert caught.value.code == 0
    assert "examples:\n  lily doctor\n" in capsys.readouterr().out


def test_an_absent_device_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda:999"]) == 1  # wherever the tests run
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "cuda: " in captured.out
    assert captured.out.endswith("1 FAILED: device\n")
    assert main(["doctor", "--device", "cuda:999", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["device"], record["failed"], record["kernels"]) == ("cuda:999", ["device"], [])


def test_kernels_that_cannot_be_listed_are_not_unused(
    doctor: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(device: str) -> None:
        raise DeviceError("no object")

    monkeypatch.setattr(_native, "variants", broken)
    status, out, _ = doctor("--kernel", "moe_scan")
    assert status == 1
    assert "no object" in out
    assert "not used" not in out
    assert "NMSE" not in out


def test_what_is_missing_in_the_installation_is_a_finding(
    doctor: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    two_kernels: None,
    tmp_path: Path,
) -> None:
    (tmp_path / "golden.json").write_text("{")
    monkeypatch.setattr(golden, "GOLDEN", tmp_path / "golden.json")
    status, out, _ = doctor("--quick", "--json")
    record = json.loads(out)
    assert (status, record["failed"]) == (1, ["demo prefill", "demo decode"])
    reasons = [check["reason"] for check in record["checks"] if check["name"] == "demo decode"]
    assert reasons[0].startswith(f"{tmp_path / 'golden.json'}: Expecting")
    monkeypatch.setattr("lily.checkpoint.DEMO", tmp_path)
    monkeypatch.setattr("lily.hub.DEMO", tmp_path)
    record = json.loads(doctor("--quick", "--json")[1])
    assert {"device", "checkpoint"} <= set(record["failed"])


def test_a_missing_model_is_a_finding(
    doctor: Callable[..., tuple[int, str, str]], two_kernels: None, tmp_path: Path
) -> None:
    status, out, _ = doctor("--quick", "--model", str(tmp_path / "none"))
    assert status == 1
    assert "\ncheckpoint         FAIL\n" in out
    assert f"{tmp_path}/none" in out
    assert "demo decode        ok" in out
    assert "1 FAILED: checkpoint" in out


def test_kernels_are_checked_although_the_model_does_not_load(
    doctor: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    two_kernels: None,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise DeviceError("the compiler says:\nno")

    monkeypatch.setattr(_native, "Engine", broken)
    status, out, _ = doctor("--json")
    record = json.loads(out)
    assert (status, record["device"]) == (1, device)
    assert record["checks"][0]["reason"] == "the compiler says:\nno"
    assert [kernel["ok"] for kernel in record["kernels"]] == [True, True]
    assert record["failed"] == ["device"]


def test_nothing_of_it_is_imported_by_lily() -> None:
    code = (
        "import sys, lily, lily.cli;"
        "print([m for m in sys.modules if m.startswith(('lily.doctor', 'lily.bench'))])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


# Kernels


def one_kernel(device: str, name: str) -> Any:
    consts = next(consts for variant, consts in _native.variants(device) if variant == name)
    return check_kernel(device, name, consts, small=True)


@pytest.mark.parametrize("name", ["qmm", "rope_write", "head_pick"])
def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch, device: str, name: str) -> None:
    right = one_kernel(device, name)
    assert right.ok
    assert 0 < right.allowed <= 1
    assert right.nmse < 1e-5

    def wrong(s: Any, a: Any, c: Any) -> dict[str, Out]:
        outs = references.REFERENCES[f"right {name}"](s, a, c)
        slot, out = next((slot, out) for slot, out in outs.items() if np.isfinite(out.value).any())
        value = out.value.copy()
        at = np.flatnonzero(np.isfinite(value))[-1]
        value.flat[at] += 0.02 * (1 + abs(value.flat[at])) if np.any(out.scale) else 1
        return {**outs, slot: out._replace(value=value)}

    monkeypatch.setitem(references.REFERENCES, f"right {name}", references.REFERENCES[name])
    monkeypatch.setitem(references.REFERENCES, name, wrong)
    result = one_kernel(device, name)
    assert not result.ok
    assert result.allowed > 1
    assert " is " in result.reason
    assert ", not " in result.reason
    assert result.memory


def test_a_failure_is_shown_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, doctor: Callable[..., tuple[int, str, str]]
) -> None:
    def broken(s: Any, a: Any, c: Any) -> dict[str, Out]:
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setitem(references.REFERENCES, "moe_scan", broken)
    status, out, _ = doctor("--kernel", "moe_histogram", "moe_scan", "moe_scatter")
    assert status == 1
    lines = out.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.endswith("FAIL"))
    assert lines[at].startswith("moe_scan ")
    assert lines[at + 1 : at + 3] == ["    one/normal: ZeroDivisionError: first line", "    second line"]
    assert sum(line.endswith(" ok") for line in lines) == 2
    assert lines[-1].endswith("1 FAILED: moe_scan")


def run_and_then(change: Callable[[dict[str, Any]], object]) -> Callable[..., None]:
    """run_kernel of a device that does something else as well."""
    run_kernel = _native.run_kernel

    def run(name: str, args: Any, consts: Any, slots: dict[str, Any], *rest: Any) -> None:
        run_kernel(name, args, consts, slots, *rest)
        change(slots)

    return run


def test_stray_writes_break_the_memory(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    def input_too(slots: dict[str, Any]) -> None:
        slots["w"][0] ^= 1

    monkeypatch.setattr(_native, "run_kernel", run_and_then(input_too))
    result = one_kernel(device, "rms_norm")
    assert (result.ok, result.memory) == (False, False)
    assert result.reason == "one/normal: w was written, and is only to be read"

    def beyond_the_step(slots: dict[str, Any]) -> None:
        slots["y"][-1] = 0

    monkeypatch.undo()
    monkeypatch.setattr(_native, "run_kernel", run_and_then(beyond_the_step))
    result = one_kernel(device, "rms_norm")
    assert (result.ok, result.memory) == (False, False)
    assert "must not be written" in result.reason

    def outside(*_: object) -> None:
        raise LilyError("rms_norm.y: written outside")

    monkeypatch.setattr(_native, "run_kernel", outside)
    result = one_kernel(device, "rms_norm")
    assert (result.ok, result.memory) == (False, False)


def test_a_race_is_found(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    turns = iter(range(1000))

    def last_bit(slots: dict[str, Any]) -> None:
        slots["y"].view(np.uint16)[0] ^= next(turns) % 2

    monkeypatch.setattr(_native, "run_kernel", run_and_then(last_bit))
    result = one_kernel(device, "rms_norm")
    assert result.reason == "one/normal: a second run differs"


# Text


def check_of(folder: Path, what: Callable[[Check, Tokenizer], None]) -> Check:
    return attempt("x", lambda check: what(check, Tokenizer(folder)))


def test_tokenizer_and_template_of_the_demo(demo_folder: Path) -> None:
    found = check_of(demo_folder, check_tokenizer)
    assert found.ok
    assert found.data["characters_per_token"] > 3
    assert check_of(demo_folder, check_chat_template).ok


@pytest.mark.parametrize(
    "template", ["{% for", "{{ raise_exception('no') }}", "{{ messages[0].role }}", "\xff"]
)
def test_a_broken_chat_template_is_a_finding(copy: Path, template: str) -> None:
    (copy / "chat_template.jinja").write_bytes(template.encode("latin-1"))
    assert check_of(copy, check_chat_template).reason


def test_no_chat_template_is_a_warning(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    found = check_of(copy, check_chat_template)
    assert (found.ok, found.text) == (True, "none")
    assert "generate() takes text or token ids" in found.warnings[0]


def test_a_tokenizer_without_merges_is_a_finding(copy: Path) -> None:
    path = copy / "tokenizer.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole["model"]["merges"] = []
    path.write_text(json.dumps(whole), encoding="utf-8")
    assert "has lost its merges" in check_of(copy, check_tokenizer).reason


def test_a_tokenizer_that_changes_text_is_a_finding(copy: Path) -> None:
    path = copy / "tokenizer.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(whole), encoding="utf-8")
    assert "not the same" in check_of(copy, check_tokenizer).reason


def test_warnings_belong_to_their_check() -> None:
    def warn(check: Check) -> None:
        warnings.warn("long context", stacklevel=1)

    assert attempt("x", warn).warnings == ["long context"]


# Golden data


def test_golden_data_is_the_extract() -> None:
    assert GOLDEN.read_text(encoding="utf-8") == extract()
    assert GOLDEN.stat().st_size < 150_000


@pytest.mark.parametrize("predict", [prefilled, decoded])
def test_another_oracle_is_not_agreed_with(engine: Engine, predict: Any) -> None:
    text = golden_texts(quick=True)[0]
    clear = int(np.argmax(text.margin))
    top1 = text.top1.copy()
    top1[clear] += 1
    wrong = {
        "with a margin above 1 have another top-1": text._replace(top1=top1),
        "top-1 is below 98 %": text._replace(top1=text.top1 + 1),
        "mean |dlogprob| is above": text._replace(nll=text.nll + 0.1),
    }
    for reason, changed in wrong.items():
        check = attempt(
            "x", partial(compare_texts, texts=[changed], predict=predict, engine=engine, progress=nothing)
        )
        assert reason in check.reason
    assert attempt(
        "x", partial(compare_texts, texts=[text], predict=predict, engine=engine, progress=nothing)
    ).ok


def test_golden_progress_ends(engine: Engine) -> None:
    calls: list[tuple[int, int]] = []
    texts = [text._replace(ids=text.ids[:8]) for text in golden_texts(quick=True)]
    texts = [golden.Text(t.name, t.ids, t.top1[:8], t.margin[:8], t.nll[:7]) for t in texts]
    compare_texts(Check("x"), texts, decoded, engine, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (16, 16)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


# Checkpoints


def weights_of(folder: Path) -> Check:
    return attempt("weights", partial(check_weights, checkpoint=open_checkpoint(folder), progress=nothing))


def test_weights__what_is_not_finite_is_named(copy: Path) -> None:
    assert weights_of(copy).ok
    poke(copy / MODEL, ROUTER, 3, np.nan)
    poke(copy / MODEL, NORM, 5, np.inf)
    check = weights_of(copy)
    assert check.data["not_finite"] == {ROUTER: 1, NORM: 1}
    assert "2 numbers are not finite" in check.reason
    assert ROUTER in check.reason


def test_weights__what_is_too_large_is_named(copy: Path) -> None:
    poke(copy / MODEL, ROUTER, 3, -1e5)
    assert weights_of(copy).reason == f"1 scales or biases are above 4096, in {ROUTER} (1)"


def test_weights__rows_of_zeros_are_a_warning(copy: Path) -> None:
    header = read_header(copy / MODEL)
    for name in ("scales", "biases"):
        for column in range(4):
            poke(copy / MODEL, f"language_model.lm_head.{name}", column, 0)
    for column in range(4):  # the second row: the packed words are zero instead of the scales
        poke(copy / MODEL, "language_model.lm_head.biases", 4 + column, 0)
    stored = header["language_model.lm_head.weight"]
    width = stored.nbytes // stored.shape[0]
    with (copy / MODEL).open("r+b") as file:
        file.seek(stored.offset + width)
        file.write(bytes(width))
    check = weights_of(copy)
    assert check.ok
    assert check.data["zero_rows"] == {"language_model.lm_head": 2}
    assert len(check.warnings) == 1


def test_a_damaged_checkpoint_is_reported(
    doctor: Callable[..., tuple[int, str, str]], two_kernels: None, copy: Path
) -> None:
    poke(copy / MODEL, ROUTER, 3, np.nan)
    status, out, _ = doctor("--quick", "--model", str(copy))
    assert status == 1
    assert "\nweights            FAIL 253 tensors" in out
    assert f"1 numbers are not finite, in {ROUTER} (1)" in out
    assert "\nload               FAIL\n" in out
    assert "2 FAILED: weights, load" in out
    with (copy / MODEL).open("r+b") as file:
        file.truncate(1000)
    status, out, _ = doctor("--quick", "--model", str(copy))
    assert status == 1
    assert "\ncheckpoint         FAIL\n" in out
    assert "truncated" in out


def test_activations__none_saturate_in_the_demo(engine: Engine) -> None:
    ids = passes.sample_ids(engine, quick=True)
    assert len(ids) == 64
    check = attempt("x", partial(passes.check_activations, engine=engine, ids=ids))
    assert (check.reason, check.warnings) == ("", [])
    assert check.data["saturated"] == check.data["nonfinite"] == 0
    assert 1 < check.data["largest_act"] < 1000
    layers = {row["layer"] for row in check.data["by_kernel_and_layer"]}
    assert layers == {-1, *range(8)}


def test_audit__is_a_prefill(engine: Engine) -> None:
    ids = np.array(passes.sample_ids(engine, quick=True), np.int32)
    plain, audited = engine._core.native().session(), engine._core.native().session()
    plain.prefill(ids)
    rows = _native.audit(audited, ids)
    assert audited.position == plain.position == 64
    assert plain.logits().tobytes() == audited.logits().tobytes()
    assert [row["launch"] for row in rows] == sorted(row["launch"] for row in rows)
    (logits,) = (row for row in rows if row["slot"] == "logits")
    assert logits["largest"] >= np.abs(audited.logits()).max()
    with pytest.raises(ValueError, match="prefill_chunk"):
        _native.audit(audited, np.zeros(65, np.int32))
    plain.close()
    audited.close()


def test_activations__saturated_ones_are_a_warning(damaged: Callable[[str, int, float], Engine]) -> None:
    engine = damaged(NORM, 7, 3e6)
    check = attempt(
        "x", partial(passes.check_activations, engine=engine, ids=passes.sample_ids(engine, True))
    )
    assert check.data["saturated"] > 0
    assert check.data["largest_act"] == ACT_MAX
    assert "rms_norm.y of layer 1" in check.warnings[0]


def test_activations__the_first_that_is_not_finite_is_named(
    damaged: Callable[[str, int, float], Engine],
) -> None:
    engine = damaged(f"{LAYER}.linear_attn.conv1d.weight", 3, 3e38)
    check = attempt(
        "x", partial(passes.check_activations, engine=engine, ids=passes.sample_ids(engine, True))
    )
    assert "values are not finite, first in conv_silu.y of layer 1" in check.reason


def test_consistency_and_log_probabilities(engine: Engine) -> None:
    ids = passes.sample_ids(engine, quick=True)
    check = attempt("x", partial(passes.check_consistency, engine=engine, ids=ids, steps=8))
    assert check.ok
    assert check.data["mean_delta"] < 0.05
    check = attempt("x", partial(passes.check_logprobs, engine=engine))
    assert check.ok
    assert 1 < check.data["perplexity"] < 512


def test_log_probabilities__a_model_that_predicts_nothing(
    damaged: Callable[[str, int, float], Engine],
) -> None:
    engine = damaged("language_model.model.norm.weight", 0, 3e4)
    check = attempt("x", partial(passes.check_logprobs, engine=engine))
    assert "hardly better than by chance" in check.reason


def test_a_check_that_raises_has_failed() -> None:
    def check(result: Check) -> None:
        raise KeyError("x")

    assert attempt("x", check).reason == "KeyError: 'x'"
    assert dataclasses.asdict(attempt("x", lambda result: None))["reason"] == ""
