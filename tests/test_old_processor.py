"""The package runs on a processor without AVX; only the instruction set that is chosen differs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lily

# The oldest processor that the present numpy still runs on (x86-64-v2: SSE4.2, no AVX).
OLD = "Nehalem"
PROMPT = "What is the capital of France?"
CODE = """
import json, sys
from lily import Engine
engine = Engine("demo", context=256, prefill_chunk=64)
session = engine.session()
list(session.prefill(sys.argv[1]))
ids = [token.id for token in session.step(max_tokens=8)]
print(json.dumps({"isa": engine.info()["device_info"]["instruction_set"], "ids": ids}))
"""


def run(*prefix: str) -> dict[str, object]:
    path = os.pathsep.join(
        [str(Path(lily.__file__).absolute().parent.parent), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_CORETYPE": OLD}
    command = [*prefix, sys.executable, "-c", CODE, PROMPT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return dict(json.loads(result.stdout))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates an old x86-64 processor")
@pytest.mark.skipif(
    not shutil.which("qemu-x86_64"), reason="needs qemu-x86_64 (package qemu-user); CI installs it"
)
def test_old_processor__picks_the_baseline_and_the_same_tokens() -> None:
    old, new = run("qemu-x86_64", "-cpu", OLD), run()
    assert old["isa"] == "x86-64"
    assert old["ids"] == new["ids"]
