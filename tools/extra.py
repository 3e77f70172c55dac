"""Print the requirements of one of pyproject.toml's extras, a line each, for pip.

`pip install .[extra]` would build the package again.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(pyproject: str, extra: str) -> list[str]:
    """Return the requirements of `extra`; the file keeps each extra on one line or one requirement a line."""
    section = pyproject.split("[project.optional-dependencies]", 1)[1]
    found = re.search(rf"^{re.escape(extra)} = \[(.*?)\]\s*$", section, re.M | re.S)
    if found is None:
        sys.exit(f"pyproject.toml has no extra {extra}")
    return re.findall(r'"([^"]+)"', found[1])


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    print("\n".join(requirements((root / "pyproject.toml").read_text(encoding="utf-8"), sys.argv[1])))
