"""The figure of measurements is drawn from them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_figure__is_that_of_the_measurements() -> None:
    """To draw it anew: python tools/h200_figure.py"""
    spec = importlib.util.spec_from_file_location("h200_figure", ROOT / "tools" / "h200_figure.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    results = json.loads((ROOT / "docs" / "h200.json").read_text(encoding="utf-8"))
    assert tool.figure(results) == (ROOT / "docs" / "h200.svg").read_text(encoding="utf-8")
