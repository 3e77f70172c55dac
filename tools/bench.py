"""Measure the demo model beside mlx-lm on this machine's CPU: prefill and decode, interleaved, medians.

Both run the same checkpoint bytes. mlx-lm's float parameters are cast to fp32, its fastest setting on a CPU.
Prints a table, or with --json one object.

    python tools/bench.py [--repeats 7] [--json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lily
from lily.checkpoint import DEMO

PREFILL = (64, 512)
DECODE_CONTEXT, DECODE_TOKENS = 64, 64


def prompt(count: int) -> list[int]:
    """Return `count` token ids, the same in every run."""
    return [(i * 7919) % 4000 for i in range(count)]


class LilyRunner:
    """Lily on its CPU device."""

    def __init__(self) -> None:
        self.engine = lily.Engine("demo", context=2048)

    def prefill(self, count: int) -> float:
        """Return tokens per second of a prompt of `count` tokens."""
        session = self.engine.session()
        start = time.perf_counter()
        for _ in session.prefill(prompt(count)):
            pass
        seconds = time.perf_counter() - start
        session.close()
        return count / seconds

    def decode(self) -> float:
        """Return tokens per second of greedy decoding after DECODE_CONTEXT tokens."""
        session = self.engine.session()
        for _ in session.prefill(prompt(DECODE_CONTEXT)):
            pass
        start = time.perf_counter()
        count = sum(1 for _ in session.step(max_tokens=DECODE_TOKENS))
        seconds = time.perf_counter() - start
        session.close()
        return count / seconds


class MlxRunner:
    """mlx-lm on the CPU with fp32 parameters."""

    def __init__(self) -> None:
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.utils import load_model

        mx.set_default_device(mx.cpu)
        self.mx: Any = mx
        self.model: Any = load_model(Path(DEMO))[0]

        def widen(value: Any) -> Any:
            return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value

        self.model.update(tree_map(widen, self.model.parameters()))

    def prefill(self, count: int) -> float:
        """Return tokens per second of a prompt of `count` tokens, with logits of the last one only."""
        cache = self.model.make_cache()
        ids = self.mx.array(prompt(count))[None]
        start = time.perf_counter()
        self.model(ids[:, :-1], cache=cache)
        self.mx.eval([layer.state for layer in cache])
        self.mx.eval(self.model(ids[:, -1:], cache=cache))
        return count / (time.perf_counter() - start)

    def decode(self) -> float:
        """Return tokens per second of greedy decoding, the next step prepared while one runs."""
        cache = self.model.make_cache()
        logits = self.model(self.mx.array(prompt(DECODE_CONTEXT))[None], cache=cache)
        token = logits[:, -1].argmax(-1)
        self.mx.eval(token)
        start = time.perf_counter()
        for _ in range(DECODE_TOKENS):
            token = self.model(token[None], cache=cache)[:, -1].argmax(-1)
            self.mx.async_eval(token)
        self.mx.eval(token)
        return DECODE_TOKENS / (time.perf_counter() - start)


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """Return the median tokens per second of both sides and the median ratio, for each case."""
    ours, theirs = LilyRunner(), MlxRunner()
    cases: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        f"prefill {n} tokens": (partial(ours.prefill, n), partial(theirs.prefill, n)) for n in PREFILL
    }
    cases[f"decode {DECODE_TOKENS} tokens at context {DECODE_CONTEXT}"] = (ours.decode, theirs.decode)
    results = {}
    for name, (lily_run, mlx_run) in cases.items():
        lily_run(), mlx_run()  # warm up
        pairs = [(lily_run(), mlx_run()) for _ in range(repeats)]
        results[name] = {
            "lily": statistics.median(a for a, _ in pairs),
            "mlx_lm": statistics.median(b for _, b in pairs),
            "ratio": statistics.median(a / b for a, b in pairs),
        }
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=7, help="interleaved pairs (default: 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("lily", "mlx", "mlx-lm")}
    results = measure(options.repeats)
    if options.json:
        machine = platform.processor() or platform.machine()
        print(json.dumps({"machine": machine, "versions": versions, "results": results}))
        return
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    for name, row in results.items():
        ours, theirs, ratio = row["lily"], row["mlx_lm"], row["ratio"]
        print(f"{name:36} lily {ours:8.1f} tok/s   mlx-lm {theirs:7.1f} tok/s   {ratio:5.1f}x")


if __name__ == "__main__":
    main()
