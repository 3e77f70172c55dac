"""Fuzz one target with atheris: python tests/fuzz/harness.py TARGET [libFuzzer's options and folders].

New inputs go to the first folder; inputs that fail are written to the current folder. More than 5 s or 1 GB
is a failure too.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Instrumented, jinja2 is slow; only one target is about it.
_PARTS = ["lily", "jinja2"] if sys.argv[1:2] == ["template"] else ["lily"]

with atheris.instrument_imports(include=_PARTS):
    import lily.template_sandbox  # noqa: F401  (the library imports it late)
    from fuzz.mutation import mutated
    from fuzz.targets import TARGETS

_LIMITS = ["-timeout=5", "-rss_limit_mb=1024", "-max_len=8192"]


def _mutator(data: bytes, most: int, seed: int) -> bytes:
    rng = random.Random(seed)
    changed = mutated(data, rng, most) if rng.random() < 0.6 else atheris.Mutate(data, most)
    return bytes(changed)


def main() -> None:
    """Fuzz what the command line says."""
    name, options = sys.argv[1], sys.argv[2:]
    atheris.Setup([sys.argv[0], *_LIMITS, *options], TARGETS[name], custom_mutator=_mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
