"""Scripts that tests run in a process of its own, and that print what they found as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def tell(script: str, *arguments: str, **environment: str) -> Any:
    """Return what a script of this folder prints; an error, with what it says, if it fails."""
    path = str(Path(__file__).resolve().with_name(script))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", path, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
