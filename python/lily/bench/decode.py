"""The speed of decode, and how much of the machine's memory bandwidth that is."""

from __future__ import annotations

import contextlib
import statistics
from pathlib import Path
from typing import Any

from lily.bench.machine import copy_bandwidth
from lily.bench.medians import percentile
from lily.bench.runners import LilyRunner, Progress, Runner
from lily.checkpoint import open_checkpoint
from lily.plan import record

WARM_UP = 4  # tokens; the first steps of a process meet cold caches and pages


def measure_decode(
    folder: Path,
    *,
    device: str,
    threads: int,
    context: int,
    tokens: int,
    repeats: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return times, speed and bandwidth of greedy decoding, as JSON types; in seconds and bytes.

    Args:
        folder: The checkpoint.
        device: As for Engine.
        threads: As for Engine.
        context: Tokens the session holds when the first repeat begins; each goes on where the last one ended.
        tokens: Tokens of a repeat.
        repeats: Number of repeats.
        progress: Called while weights are read and the context is prefilled, and after each repeat.

    Raises:
        LilyError: The engine cannot be opened, or failed.
    """
    room = context + tokens * repeats
    runner = LilyRunner(str(folder), device=device, threads=threads, context=room, progress=progress)
    with contextlib.closing(runner):
        facts = runner.facts()
        warm_up(runner, context)
        seconds = []
        for index in range(repeats):
            seconds.append(runner.decode(tokens))
            if progress is not None:
                progress("decode", "repeats", index + 1, repeats)
    speeds = [tokens / sum(repeat) for repeat in seconds]
    every = [second for repeat in seconds for second in repeat]
    speed = statistics.median(speeds)
    middle = context + tokens * repeats // 2
    config = open_checkpoint(folder).config
    plans = [record(config, plan, context=middle + 1) for plan in ("decode", "greedy")]
    read, written = sum(plan.read for plan in plans), sum(plan.written for plan in plans)
    bandwidth = (read + written) * speed
    copied = None
    # That of another device is not the processor's. The engine is closed: two GiB may be what there is.
    if facts["device"] in ("cpu", "cpu32"):
        copied = copy_bandwidth(int(facts["device_info"]["threads"]))
    return {
        "tokens_per_second": speed,
        "tokens_per_second_of_repeats": speeds,
        "seconds_per_token": {"p50": percentile(every, 50), "p99": percentile(every, 99)},
        "plan": {
            "context": middle,
            "launches": sum(len(plan.launches) for plan in plans),
            "stages": sum(plan.stages for plan in plans),
            "bytes_read": read,
            "bytes_written": written,
        },
        "bytes_per_second": bandwidth,
        "copy_bytes_per_second": copied,
        "share_of_copy": None if copied is None else bandwidth / copied,
        "engine": facts,
    }


def warm_up(runner: Runner, context: int) -> list[float]:
    """Let an engine hold `context` tokens, the last few of them decoded; return the seconds of those."""
    count = min(WARM_UP, context - 1)
    runner.hold(context - count)
    return runner.decode(count) if count else []
