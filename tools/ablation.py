#!/usr/bin/env python3
"""Measure what prefill's design decisions gain, by doing without them one at a time.

    make ablation
    python tools/ablation.py [--model synthetic:4] [--tokens 512,2048] [--device cpu] [--json]

The gain of a decision is how much faster a prompt is read with it than without it. All forms read the same
prompts in turn, in one process; speeds are medians. It needs a build with -DLILY_BENCH=ON, which
`make ablation` makes: the product does not have the forms that are slower.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

import lily
from lily import _native
from lily.bench.runners import prompt
from lily.bench.synthetic import full_size, layers_of, synthetic_checkpoint

PRESENT, SMALL_TILES, SMALL = "as it is", "16-row tiles", 16
# What is left out, and the gains of the published Lily (Perplexity, 2026; M5 Max): tokens, percent.
FORMS = {
    PRESENT: "none",
    "routing on the host": "host_routing",
    "dequantised weights in memory": "expanded_weights",
    SMALL_TILES: "none",
    "delta state in memory": "state_in_memory",
}
PUBLISHED = {
    "routing on the host": "+89 % at 512",
    "dequantised weights in memory": "+77.4 % at 512",
    SMALL_TILES: "+13.2 % at 2,048",
    "delta state in memory": "+5.6 %",
}

Logits = np.ndarray[Any, Any]


def opened(model: str, options: argparse.Namespace, tile: int) -> lily.Engine:
    """Open an engine with tiles of so many rows, or, with 0, of what suits the device."""
    most = max(options.tokens)
    with mock.patch.object(_native, "Engine", functools.partial(_native.Engine, tile=tile)):
        return lily.Engine(
            model,
            device=options.device,
            threads=options.threads,
            context=most,
            prefill_chunk=most,
            max_sessions=1,
        )


def prefill(engine: lily.Engine, ablation: _native.Ablation, count: int) -> tuple[float, Logits]:
    """Read a prompt in one pass; return seconds and the logits of its last token."""
    ids = np.array(prompt(0, count, int(engine.info()["vocab"])), np.int32)
    session = engine._core.native().session()
    try:
        start = time.perf_counter()
        ablation.prefill(session, ids)
        return time.perf_counter() - start, session.logits()
    finally:
        session.close()


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let all forms read all prompts in turn, after one round that does not count."""
    cases = [(form, count) for count in options.tokens for form in FORMS]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    logits: dict[tuple[str, int], Logits] = {}
    with opened(model, options, 0) as engine, opened(model, options, SMALL) as small:
        ablations = {(form, count): _native.Ablation(FORMS[form]) for form, count in cases}
        for index in range(options.rounds + 1):
            first = index % len(cases)  # whoever begins a round is another one each time
            for form, count in cases[first:] + cases[:first]:
                which = small if form == SMALL_TILES else engine
                took, logits[form, count] = prefill(which, ablations[form, count], count)
                if index > 0:
                    seconds[form, count].append(took)
            print(f"round {index} of {options.rounds}", file=sys.stderr)
    return [
        {
            "form": form,
            "tokens": count,
            "tokens_per_second": count / statistics.median(times),
            "gain_percent": 100 * (statistics.median(ratios(times, seconds[PRESENT, count])) - 1),
            "gains_percent_of_rounds": [100 * (r - 1) for r in ratios(times, seconds[PRESENT, count])],
            "published": PUBLISHED.get(form, ""),
            "largest_logit_difference": float(np.abs(logits[form, count] - logits[PRESENT, count]).max()),
        }
        for (form, count), times in seconds.items()
    ]


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return time by time of the same round."""
    return [a / b for a, b in zip(times, others, strict=True)]


def lengths(text: str) -> list[int]:
    """Read the lengths of prompts, which are whole passes."""
    numbers = [int(word) for word in text.split(",")]
    if any(n < 64 or n % 64 for n in numbers):
        raise argparse.ArgumentTypeError("multiples of 64 are needed")
    return numbers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo", help="demo, synthetic:LAYERS or a folder (default: demo)")
    parser.add_argument(
        "--tokens", type=lengths, default=[512, 2048], help="lengths of prompts (default: 512,2048)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args()
    if not hasattr(_native, "Ablation"):
        sys.exit("this build of Lily has no ablations: make ablation")
    layers = layers_of(options.model)
    model = options.model if layers is None else str(synthetic_checkpoint(full_size(layers)))
    rows = measure(model, options)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'without':30} {'tokens':>6} {'tok/s':>8} {'gain':>8}  {'published':18} largest logit difference")
    for row in rows:
        gain = f"{row['gain_percent']:+.1f} %" if row["form"] != PRESENT else ""
        print(
            f"{row['form']:30} {row['tokens']:6} {row['tokens_per_second']:8.1f} {gain:>8}  "
            f"{row['published']:18} {row['largest_logit_difference']:.2g}"
        )


if __name__ == "__main__":
    main()
