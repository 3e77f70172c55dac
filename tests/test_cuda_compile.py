"""The shaders as CUDA C++, compiled for three generations of NVIDIA GPUs; no GPU is needed for that."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lily import _native, cuda
from lily.errors import DeviceError

# Ampere, Hopper with the instructions of warpgroups, Blackwell without: all forms that there are.
ARCHITECTURES = ("sm_80", "sm_90a", "sm_120")
REPORT = Path(__file__).resolve().parent.parent / "build" / "cuda_kernels.json"

# Angles are reduced in local memory: sines of large ones are exact.
FRAME_BYTES = {"rope_write": 32, "attention_decode": 32, "attention_blocks": 32}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """The one of the package nvidia-cuda-nvrtc."""
    cuda.prepare()


def variants(architecture: str) -> list[tuple[str, dict[str, int]]]:
    """Every variant that a device takes there, but of the numbers of query heads three."""
    tallest = 64 if architecture.endswith("a") else 32
    listed = [(n, c) for n, c in _native.variants("cpu32") if c.get("BM", 0) <= tallest]
    return [(n, c) for n, c in listed if c.get("GROUP", 8) in (1, 3, 8)]


def facts(name: str, consts: dict[str, int], architecture: str) -> dict[str, Any]:
    """Compiles a variant; what the assembler says of it."""
    code, log = _native.cuda_compile(name, consts, architecture)
    assert code.startswith(b"\x7fELF")
    numbers = {
        "registers": r"Used (\d+) registers",
        "shared_bytes": r"(\d+) bytes smem",
        "frame_bytes": r"(\d+) bytes stack frame",
        "spill_bytes": r"(\d+) bytes spill stores",
    }
    found = {key: re.search(pattern, log) for key, pattern in numbers.items()}
    values = {key: int(match[1]) if match else 0 for key, match in found.items()}
    return {"kernel": name, "consts": consts, "architecture": architecture, **values, "log": log}


# Widths that checkpoints may have beside those of the tests: parts of other sizes, more threadgroup memory.
OTHER_WIDTHS: tuple[tuple[str, dict[str, int]], ...] = (
    *(("norm_qmv", {"BITS": 4, "K": k}) for k in (512, 1024, 1536, 4096, 8192)),
    *(("qmv_add", {"BITS": 4, "K": k}) for k in (512, 1024, 1536, 2048, 6144, 8192)),
    *(("expert_mv_gate_up", {"K": k, "E": 256}) for k in (512, 1024, 4096, 8192)),
    *(("head_logits", {"K": k}) for k in (512, 1024, 4096)),
    *(
        ("expert_mv_down", {"K": k, "KS": ks})
        for k, ks in ((1024, 1024), (64, 1024), (1088, 1088), (512, 2048))
    ),
)
STATIC_MEMORY = 48 << 10  # bytes of a threadgroup, on all GPUs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_widths_compile_everywhere(architecture: str) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(lambda variant: facts(variant[0], variant[1], architecture), OTHER_WIDTHS))
    assert [row for row in rows if row["shared_bytes"] > STATIC_MEMORY] == []


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_and_stays_in_registers(architecture: str) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        report = list(
            pool.map(lambda variant: facts(variant[0], variant[1], architecture), variants(architecture))
        )
    for row in report:
        name, log = row["kernel"], row.pop("log")
        assert row["registers"] > 0
        # A device knows the model when it compiles: it never has the forms that read sizes from args.
        if 0 not in row["consts"].values():
            assert row["spill_bytes"] == 0, f"{name} {row['consts']}: {log}"
            assert row["frame_bytes"] <= FRAME_BYTES.get(name, 0), f"{name} {row['consts']}: {log}"
        assert "serialized" not in log, f"{name} {row['consts']}: {log}"
        assert "warning" not in log, f"{name} {row['consts']}: {log}"
    REPORT.parent.mkdir(exist_ok=True)
    kept = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else []
    kept = [row for row in kept if row["architecture"] != architecture]
    REPORT.write_text(json.dumps(kept + report, indent=1), encoding="utf-8")


def test_the_compilers_messages_reach_the_caller() -> None:
    with pytest.raises(DeviceError, match=r"rms_norm does not compile for sm_12: .*gpu-architecture"):
        _native.cuda_compile("rms_norm", {}, "sm_12")
