"""The speed of reading prompts."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lily.bench.runners import LilyRunner, Progress


def measure_prefill(
    folder: Path,
    *,
    device: str,
    threads: int,
    tokens: Sequence[int],
    repeats: int,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return speeds of prefill, as JSON types; in seconds and tokens per second.

    Every prompt begins an empty session and ends with the logits of its last token. The lengths take turns.

    Args:
        folder: The checkpoint.
        device: As for Engine.
        threads: As for Engine.
        tokens: Lengths of the prompts.
        repeats: Measurements of each length, after one that does not count.
        progress: Called while weights are read, and after each prompt.

    Raises:
        LilyError: The engine cannot be opened, or failed.
    """
    runner = LilyRunner(str(folder), device=device, threads=threads, context=max(tokens), progress=progress)
    with contextlib.closing(runner):
        facts = runner.facts()
        seconds: list[list[float]] = [[] for _ in tokens]
        for index in range(repeats + 1):
            for place, count in enumerate(tokens):
                took = runner.prefill(count)
                if index > 0:
                    seconds[place].append(took)
                if progress is not None:
                    progress(
                        "prefill", "prompts", index * len(tokens) + place + 1, (repeats + 1) * len(tokens)
                    )
    cases = []
    for count, times in zip(tokens, seconds, strict=True):
        median = statistics.median(times)
        speeds = [count / second for second in times]
        cases.append(
            {
                "tokens": count,
                "seconds": median,
                "tokens_per_second": count / median,
                "tokens_per_second_of_repeats": speeds,
            }
        )
    return {"cases": cases, "engine": facts}
