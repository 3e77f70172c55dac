"""The Metal device on the software double: the pipeline cache, and what LILY_DEBUG writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from demo_model import PROMPT, info, open_engine, persist, story
from double_plugin import Double

# The pipeline cache.


def cache_file(folder: Path) -> Path:
    """The one file in the cache."""
    (file,) = (folder / "caches" / "lily").iterdir()
    return file


def test_cache__second_opening_compiles_nothing(double: Double, tmp_path: Path, expected: list[int]) -> None:
    with open_engine() as engine:
        first = info(engine)
        assert first["pipelines_from_cache"] == "0"
    assert cache_file(tmp_path).name.endswith(".metalarchive")
    compiled = double.count("pipelines_compiled")
    with open_engine() as engine:
        assert info(engine)["pipelines_from_cache"] == info(engine)["pipelines"] == first["pipelines"]
        assert story(engine) == expected
    assert double.count("pipelines_compiled") == compiled


@pytest.mark.parametrize("damage", ["empty", "noise", "half"])
def test_cache__a_damaged_file_is_replaced(
    double: Double, tmp_path: Path, expected: list[int], damage: str
) -> None:
    with open_engine():
        file = cache_file(tmp_path)
    whole = file.read_bytes()
    damaged = {"empty": b"", "noise": os.urandom(len(whole)), "half": whole[: len(whole) // 2]}
    file.write_bytes(damaged[damage])
    with open_engine() as engine:
        assert info(engine)["pipelines_from_cache"] == "0"
        assert "replaced" in info(engine)["pipeline_cache"]
        assert story(engine) == expected
    with open_engine() as engine:
        assert info(engine)["pipelines_from_cache"] == info(engine)["pipelines"]


@pytest.mark.parametrize(("name", "value"), [("os_build", "24G99"), ("gpu_name", "Apple M9 Double")])
def test_cache__another_system_or_gpu_has_its_own(
    double: Double, tmp_path: Path, name: str, value: str
) -> None:
    with open_engine():
        pass
    double.set(name, value)
    with open_engine() as engine:
        assert info(engine)["pipelines_from_cache"] == "0"
    assert len(list((tmp_path / "caches" / "lily").iterdir())) == 2


def test_cache__its_name_holds_the_shaders_hash(double: Double, tmp_path: Path) -> None:
    with open_engine():
        pass
    digits = cache_file(tmp_path).stem.rpartition("-")[2]
    assert len(digits) == 16
    assert int(digits, 16) != 0


@pytest.mark.parametrize("kind", ["archive_open", "archive_add", "archive_serialize", "pipeline_lookup"])
def test_cache__nothing_that_fails_matters(double: Double, expected: list[int], kind: str) -> None:
    for _ in range(2):
        double.fail(kind)
        with open_engine() as engine:
            assert story(engine) == expected
        double.set(f"fail:{kind}", 0)


def test_cache__a_file_that_cannot_be_saved_leaves_the_old_one(double: Double, tmp_path: Path) -> None:
    with open_engine():
        file = cache_file(tmp_path)
    before = file.read_bytes()
    double.fail("archive_serialize")
    double.fail("pipeline_lookup")  # so that there is something to save
    with open_engine():
        pass
    assert cache_file(tmp_path).read_bytes() == before


def test_cache__without_a_folder(double: Double, expected: list[int]) -> None:
    double.set("caches_directory", "")
    with open_engine() as engine:
        assert "no cache folder" in info(engine)["pipeline_cache"]
        assert story(engine) == expected


# LILY_DEBUG.


def run_with(debug: str, folder: Path, capture: int = 1) -> str:
    """What a process with LILY_DEBUG set writes to its standard error."""
    code = (
        "import ctypes, lily\n"
        "from lily import _native\n"
        "double = ctypes.CDLL(_native.__file__)\n"
        f"double.lily_double_set(b'capture_supported', ctypes.c_int64({capture}))\n"
        "with lily.Engine('demo', device='metal', context=256) as engine:\n"
        "    engine.session().prefill('Hello')\n"
        "    list(engine.generate('Hello', max_tokens=6, ignore_eos=True))\n"
        "print(double.lily_double_count(b'captured_command_buffers'))\n"
    )
    environment = {**os.environ, "LILY_DEBUG": debug}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def test_debug__capture_of_one_token(double: Double, tmp_path: Path) -> None:
    text = run_with("capture", tmp_path)
    assert "capturing one token into lily-" in text
    assert len(list(tmp_path.glob("lily-*.gputrace"))) == 1
    assert text.splitlines()[0] == "1"


def test_debug__capture_that_is_not_allowed_says_how(double: Double, tmp_path: Path) -> None:
    assert "MTL_CAPTURE_ENABLED=1" in run_with("capture", tmp_path, capture=0)


def test_debug__trace_prints_the_time_of_each_kernel(double: Double, tmp_path: Path) -> None:
    text = run_with("trace", tmp_path)
    assert "mean us" in text
    assert "rms_norm" in text
    assert "expert_mv_gate_up" in text


def test_debug__trace_survives_a_failure(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[int] | None = None
    monkeypatch.setenv("LILY_DEBUG", "trace")
    for nth in (0, 2, 5, 60):
        with open_engine() as engine, engine.session() as session:
            session._native.prefill(np.array(engine.tokenizer.encode(PROMPT), np.int32))
            double.set("fail:execution", nth)
            tokens, errors = persist(session, [], 6)
        assert len(errors) == (nth > 0)
        expected = expected or tokens
        assert tokens == expected
