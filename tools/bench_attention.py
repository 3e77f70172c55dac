"""Measure decode attention behind long contexts: in one block, and in blocks that are merged.

Both forms attend to random caches of the same size, in turn; times are medians, of one row in one layer.
Equal times per 1,000 tokens mean that time grows linearly.

    python tools/bench_attention.py [--contexts 2048,32768,65536,131072] [--threads 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence

from lily import _native
from lily.doctor.cases import make_case
from lily.doctor.inputs import Dims
from lily.doctor.kernels import KERNELS, memory_of

HEADS = {"demo": (1, 8), "qwen3.6-35b-a3b": (2, 8)}  # KV heads, query heads of each
FORMS = {"one block": ("attention_decode",), "blocks": ("attention_blocks", "attention_merge")}
ROUNDS, REPEATS = 5, 5


def measure(context: int, shape: str, device: str, threads: int) -> dict[str, float]:
    """Return seconds of attending to `context` tokens in each form, medians over all rounds.

    Args:
        context: Tokens in the cache, the row's own included.
        shape: A key of HEADS.
        device: A CPU device.
        threads: Of the device; 0 for one per core.
    """
    kv_heads, group = HEADS[shape]
    dims = Dims(1, 1, context - 1, 1, 256, 64, 64, 64, kv_heads, 1, 1, 2, 1, 64, 64)
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    launches = {}
    for kernel in ("attention_decode", "attention_blocks", "attention_merge"):
        case = make_case(kernel, {"GROUP": group}, f"{context} tokens", dims, "normal", 0)
        launches[kernel] = (case, memory_of(KERNELS[kernel], case))
    for _ in range(ROUNDS):
        for form, kernels in FORMS.items():
            runs = []
            for kernel in kernels:
                case, slots = launches[kernel]
                args, consts = dict(case.args), dict(case.consts)
                runs.append(_native.run_kernel(kernel, args, consts, slots, device, threads, REPEATS + 1)[1:])
            times[form] += [sum(run) for run in zip(*runs, strict=True)]
    return {form: statistics.median(seconds) for form, seconds in times.items()}


def report(contexts: Sequence[int], device: str, threads: int) -> list[dict[str, str | int | float]]:
    """Measure every shape and context."""
    rows: list[dict[str, str | int | float]] = []
    for shape in HEADS:
        for context in contexts:
            seconds = measure(context, shape, device, threads)
            rows.append({"shape": shape, "context": context, **seconds})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--contexts", default="2048,32768,65536,131072", help="tokens, separated by commas")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cpu32"))
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args()
    rows = report([int(word) for word in options.contexts.split(",")], options.device, options.threads)
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{'shape':18} {'context':>8} {'one block':>11} {'blocks':>11} {'ratio':>6}  per 1,000 tokens")
    for row in rows:
        one, blocks, context = (float(row[key]) for key in ("one block", "blocks", "context"))
        times = f"{one * 1e6:8.0f} us {blocks * 1e6:8.0f} us {one / blocks:6.2f}"
        each = f"{one / context * 1e9:.1f} us, {blocks / context * 1e9:.1f} us"
        print(f"{row['shape']:18} {row['context']:8} {times}  {each}")


if __name__ == "__main__":
    main()
