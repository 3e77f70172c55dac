"""The Python code in README.md and the examples run as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_readme__snippets_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All ```python blocks, in order and in one namespace, on the demo model."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    monkeypatch.chdir(tmp_path)  # one saves a session
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        code = re.sub(r'Engine\("[^"]*"', 'Engine("demo"', block.group(1))
        exec(compile("\n" * line + code, "README.md", "exec"), namespace)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example__runs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_examples__are_there() -> None:
    assert len(EXAMPLES) >= 3
