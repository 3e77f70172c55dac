#!/usr/bin/env python3
"""Put one mistake at a time into the Metal host code and see whether `make check-metal` notices.

The mutants are fixed: tests/metal_double/mutants.txt names 40 sites of mutation_rules.py, drawn with a fixed
seed before the checks were written (--choose draws them anew). Each is compiled in a copy of the sources
under build/metal, so that only what it touches is built again. A mutant is caught when a step fails or does
not come to its end in time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import random
import signal
import sys
import time
from collections.abc import Sequence

import check
from mutation_rules import Mutant, mutated, sites

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LIST = ROOT / "tests" / "metal_double" / "mutants.txt"
COPY = ROOT / "build" / "metal" / "mutants"
COUNT, SEED = 40, 20
SLACK = 60  # seconds on top of three times what a step takes
COPIED = ("src", "shaders", "tests", "tools", "python", "CMakeLists.txt", "pyproject.toml")


def choose() -> None:
    """Draw the mutants and write their list."""
    drawn = random.Random(SEED).sample(list(sites(ROOT)), COUNT)
    drawn.sort(key=lambda mutant: (mutant.rule.file, mutant.line))
    lines = ["# rule:site of tools/metal/mutation_rules.py, drawn by tools/metal/mutate.py --choose"]
    LIST.write_text("\n".join([*lines, *(mutant.key for mutant in drawn)]) + "\n", encoding="utf-8")


def chosen() -> list[Mutant]:
    """Return the mutants of the list.

    Raises:
        ValueError: The sources have changed so that one has no site any more.
    """
    known = {mutant.key: mutant for mutant in sites(ROOT)}
    keys = [
        line for line in LIST.read_text(encoding="utf-8").split() if ":" in line and not line.startswith("#")
    ]
    keys = [key for key in keys if key.rpartition(":")[2].isdigit()]
    missing = [key for key in keys if key not in known]
    if missing:
        raise ValueError(f"no such site: {', '.join(missing)}")
    return [known[key] for key in keys]


def sources(root: pathlib.Path) -> dict[pathlib.Path, bytes]:
    """Return what a mutant is built and tested from, by path below the root."""
    paths = (path for name in COPIED for path in (root / name, *(root / name).rglob("*")))
    return {
        path.relative_to(root): path.read_bytes()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts
    }


def copy_sources() -> None:
    """Make the copy's sources those of the project.

    What is the same is left alone, and what is not gets a new time. So ninja sees what it must build again,
    also after the last mutant.
    """
    wanted, there = sources(ROOT), sources(COPY)
    for name in there.keys() - wanted.keys():
        (COPY / name).unlink()
    for name, content in wanted.items():
        if there.get(name) != content:
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            (COPY / name).write_bytes(content)


def baseline() -> list[check.Step]:
    """Return the steps, with limits that follow from the time that each takes without a mutant.

    Raises:
        RuntimeError: One fails.
    """
    steps, seconds = check.steps_for_mutants(COPY), dict[str, float]()
    if failed := check.run(COPY, steps, quiet=True, seconds=seconds):
        raise RuntimeError(f"without a mutant, {failed} fails already: {COPY / check.LOGS / failed}.log")
    return [dataclasses.replace(step, limit=SLACK + 3 * seconds[step.name]) for step in steps]


def try_mutant(mutant: Mutant, steps: Sequence[check.Step]) -> tuple[str, float]:
    """Return the step that catches a mutant ("" if none does) and the seconds that took."""
    path = COPY / mutant.rule.file
    whole = path.read_text(encoding="utf-8")
    start = time.monotonic()
    try:
        path.write_text(mutated(COPY, mutant), encoding="utf-8")
        failed = check.run(COPY, steps, quiet=True)
    finally:
        path.write_text(whole, encoding="utf-8")
    return failed, time.monotonic() - start


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 0 when at most two mutants survive."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--choose", action="store_true", help="draw the mutants anew and write their list")
    parser.add_argument("--all", action="store_true", help="every site of every rule")
    parser.add_argument("--only", nargs="+", default=[], metavar="RULE:SITE", help="these mutants")
    parser.add_argument("--json", type=pathlib.Path, help="write the results here too")
    options = parser.parse_args(arguments)
    if options.choose:
        choose()
        return 0
    mutants = list(sites(ROOT)) if options.all or options.only else chosen()
    if options.only:
        mutants = [mutant for mutant in mutants if mutant.key in options.only]
    copy_sources()
    # Under nohup it is ignored, and tests that press Ctrl-C would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        steps = baseline()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    results = []
    for mutant in mutants:
        caught, seconds = try_mutant(mutant, steps)
        place = f"{mutant.rule.file}:{mutant.line}"
        results.append(
            {"mutant": mutant.key, "place": place, "caught_by": caught, "seconds": round(seconds, 1)}
        )
        print(f"{mutant.key:36} {place:44} {caught or 'SURVIVES':24} {seconds:6.1f} s", flush=True)
    survivors = [str(result["mutant"]) for result in results if not result["caught_by"]]
    found = len(results) - len(survivors)
    print(f"{found} of {len(results)} caught; survivors: {', '.join(survivors) or 'none'}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if len(survivors) <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
