#!/usr/bin/env python3
"""Measure what design decisions of prefill and decode gain, by doing without them one at a time.

    make ablation ARGS="--model synthetic:4 --tokens 512,2048 --contexts 32768"

The gain of a decision is how much faster a prompt is read with it than without it, or a token decoded
behind a context. All forms do the same in turn, in one process; speeds are medians. It needs a build with
-DLILY_BENCH=ON, which `make ablation` makes: the product does not have the forms that are slower. Two
engines are opened for prompts, one of them for the tiles, and expanded weights of a layer of full size take
1.6 GB more.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

import lily
from lily import _native
from lily.bench.medians import median_interval
from lily.bench.runners import prompt
from lily.bench.synthetic import full_size, layers_of, synthetic_checkpoint
from lily.cli.options import whole
from lily.engine import DEVICES, MAX_CHUNK

Ablation: Any = getattr(_native, "_Ablation", None)  # in builds for benchmarks only

PRESENT, AGAIN, SMALL_TILES, SMALL = "as it is", "as it is, again", "16-row tiles", 16
# What is left out, and the gains of the published Lily (Perplexity, 2026; M5 Max): tokens, percent.
FORMS = {
    PRESENT: "none",
    AGAIN: "none",
    "routing on the host": "host_routing",
    "dequantised weights in memory": "expanded_weights",
    SMALL_TILES: "none",
    "delta state in memory": "state_in_memory",
}
DECODE_FORMS = {
    PRESENT: "none",
    AGAIN: "none",
    "query heads apart": "heads_apart",
    "attention in one block": "one_block",
}
PUBLISHED = {
    "query heads apart": "+23.8 % at 32K",
    "attention in one block": "+7.7, +27.4, +40.2 % at 32, 64, 128K",
    "routing on the host": "+89 % at 512",
    "dequantised weights in memory": "+77.4 % at 512",
    SMALL_TILES: "+13.2 % at 2,048",
    "delta state in memory": "+5.6 %",
}
CHUNK = 2048  # at least, as engines have it
STEPS = 8  # decode passes of one measurement, so that starting them weighs little
LONGEST = 1 << 20  # context
NOTES = """The interval covers the median with 95 % confidence or is empty; the second row shows the noise.
A CPU multiplies expanded weights in fp32, the product's in integers: that gain is not memory's alone.
Behind contexts the time is that of a pass, which makes the logits and picks nothing; a context that the
device attends to in one block anyway shows noise."""

Case = tuple[str, int]  # form, tokens
Logits = np.ndarray[Any, Any]


def opened(model: str, options: argparse.Namespace, tile: int) -> lily.Engine:
    """Open an engine with tiles of so many rows, or, with 0, of what suits the device."""
    most = max(CHUNK, *options.tokens)
    with mock.patch.object(_native, "Engine", functools.partial(_native.Engine, tile=tile)):
        return lily.Engine(
            model,
            device=options.device,
            threads=options.threads,
            context=most,
            prefill_chunk=most,
            max_sessions=1,
        )


def in_turn(cases: Sequence[Case], rounds: int, once: Callable[[str, int], float]) -> dict[Case, list[float]]:
    """Return each case's times, measured in changing orders, after one round that does not count."""
    seconds: dict[Case, list[float]] = {case: [] for case in cases}
    order = random.Random(0)
    for index in range(rounds + 1):
        for case in order.sample(cases, len(cases)):
            took = once(*case)
            if index > 0:
                seconds[case].append(took)
        print(f"round {index} of {rounds}", file=sys.stderr)
    return seconds


def measure(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let all forms read all prompts."""
    logits: dict[Case, Logits] = {}
    with opened(model, options, 0) as engine, opened(model, options, SMALL) as small:
        if engine.info()["device_info"] != small.info()["device_info"]:
            print("the two engines differ in more than their tiles: see info()", file=sys.stderr)
        sessions = {which: which._core.native().session() for which in (engine, small)}
        vocab = int(engine.info()["vocab"])
        prompts = {count: np.array(prompt(0, count, vocab), np.int32) for count in options.tokens}
        users = {form: sessions[small if form == SMALL_TILES else engine] for form in FORMS}
        ablations = {form: Ablation(users[form], name) for form, name in FORMS.items()}

        def once(form: str, count: int) -> float:
            users[form].reset()
            start = time.perf_counter()
            ablations[form].prefill(prompts[count])
            took = time.perf_counter() - start
            logits[form, count] = users[form].logits()
            return took

        cases = [(form, count) for count in options.tokens for form in FORMS]
        seconds = in_turn(cases, options.rounds, once)
    differences = {case: np.abs(logits[case] - logits[PRESENT, case[1]]).max() for case in cases}
    return [
        {"kind": "prefill"}
        | row_of(case, case[1], times, seconds[PRESENT, case[1]])
        | {"largest_logit_difference": float(differences[case])}
        for case, times in seconds.items()
    ]


def measure_decode(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Let all forms decode behind all contexts."""
    rows = []
    fed = len(DECODE_FORMS) * (options.rounds + 1)  # tokens
    with lily.Engine(
        model,
        device=options.device,
        threads=options.threads,
        context=max(options.contexts) + fed,
        max_sessions=1,
    ) as engine:
        session, vocab = engine._core.native().session(), int(engine.info()["vocab"])
        ablations = {form: Ablation(session, name) for form, name in DECODE_FORMS.items()}

        def once(form: str, _: int) -> float:
            start = time.perf_counter()
            ablations[form].decode(0, STEPS)
            return (time.perf_counter() - start) / STEPS

        for context in options.contexts:
            session.reset()
            left = np.array(prompt(0, context, vocab), np.int32)
            while left.size:
                left = left[session.prefill(left) :]
            seconds = in_turn([(form, context) for form in DECODE_FORMS], options.rounds, once)
            present = seconds[PRESENT, context]
            rows += [{"kind": "decode"} | row_of(case, 1, times, present) for case, times in seconds.items()]
    return rows


def row_of(case: Case, made: int, times: Sequence[float], present: Sequence[float]) -> dict[str, Any]:
    """Return what is known of one form and length, as JSON types; each measurement made so many tokens."""
    gains = [100 * (mine / theirs - 1) for mine, theirs in zip(times, present, strict=True)]
    return {
        "form": case[0],
        "tokens": case[1],
        "tokens_per_second": made / statistics.median(times),
        "gain_percent": statistics.median(gains),
        "gain_interval_percent": median_interval(gains),
        "gains_percent_of_rounds": gains,
        "published": PUBLISHED.get(case[0], ""),
    }


def lengths(text: str, most: int = MAX_CHUNK) -> list[int]:
    """Read numbers of tokens, which are whole passes."""
    if not re.fullmatch(r"\d{1,7}(,\d{1,7})*", text):
        raise argparse.ArgumentTypeError(f"numbers of tokens with commas are needed, not {text!r}")
    numbers = list(dict.fromkeys(map(int, text.split(","))))
    if any(n % 64 or not 64 <= n <= most for n in numbers):
        raise argparse.ArgumentTypeError(f"multiples of 64 up to {most} are needed")
    return numbers


def contexts(text: str) -> list[int]:
    """Read lengths of contexts."""
    return lengths(text, LONGEST)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="demo", help="demo, synthetic:LAYERS or a folder (default: demo)")
    parser.add_argument(
        "--tokens", type=lengths, default=[512, 2048], help="lengths of prompts (default: 512,2048)"
    )
    parser.add_argument(
        "--contexts", type=contexts, default=[], help="lengths of contexts to decode behind (default: none)"
    )
    parser.add_argument("--device", default="auto", choices=DEVICES)
    parser.add_argument("--threads", type=whole(0, 1024), default=0, help="0: one per core")
    parser.add_argument(
        "--rounds", type=whole(1, 10_000), default=7, help="measurements of each (default: 7)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    return parser.parse_args()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Write the results for people."""
    head = f"{'without':30} {'tokens':>6} {'tok/s':>8} {'gain':>9} {'interval':>18}  {'published':34} "
    lines = [head + "largest logit difference"]
    for row in rows:
        low_high = row["gain_interval_percent"]
        interval = f"{low_high[0]:+.1f} to {low_high[1]:+.1f} %" if low_high else ""
        difference = f"{row['largest_logit_difference']:.2g}" if row["kind"] == "prefill" else ""
        gain = f"{row['gain_percent']:+.1f} %"
        gain, interval = ("", "") if row["form"] == PRESENT else (gain, interval)
        lines.append(
            f"{row['form']:30} {row['tokens']:6} {row['tokens_per_second']:8.1f} {gain:>9} {interval:>18}  "
            f"{row['published']:34} {difference}"
        )
    return "\n".join([*lines, "", NOTES])


def main() -> None:
    """Measure and print."""
    options = arguments()
    if Ablation is None:
        sys.exit("this build of Lily has no ablations: make ablation")
    try:
        layers = layers_of(options.model)
        model = options.model if layers is None else str(synthetic_checkpoint(full_size(layers)))
        rows = measure(model, options)
        if options.contexts:
            rows += measure_decode(model, options)
    except (lily.LilyError, ValueError) as error:
        sys.exit(f"ablation: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(rows) if options.json else table(rows))


if __name__ == "__main__":
    main()
