"""Print requirements of pyproject.toml, a line each, for pip: `dependencies` or the name of an extra.

`pip install .[extra]` would build the package again.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def requirements(pyproject: str, name: str) -> list[str]:
    """Return the requirements in the list called `name`."""
    found = re.search(rf"^{re.escape(name)} = \[(.*?)\]\s*$", pyproject, re.M | re.S)
    if found is None:
        sys.exit(f"pyproject.toml has no list {name}")
    return re.findall(r'"([^"]+)"', re.sub(r"\\.", "", found[1]))


def main() -> None:
    """Print the lists named on the command line."""
    pyproject = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    for name in sys.argv[1:]:
        print("\n".join(requirements(pyproject, name)))


if __name__ == "__main__":
    main()
