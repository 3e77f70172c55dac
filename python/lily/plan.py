"""Print a recorded plan: python -m lily.plan decode [--shape qwen3.6-35b-a3b].

A plan is the list of kernel launches of one forward pass, in stages: launches of a stage are independent of
each other. Bytes are what a launch reads and writes, as its shader says (tests count its accesses); those of
decode are compared with the least that a token needs. The weights themselves are not needed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lily import _native

_INTERVAL = 4  # every fourth layer has attention
_HEAD, _DELTA, _TAPS = 256, 128, 4  # dims of an attention head and of a delta head, taps of the convolution
PLANS = ("decode", "prefill", "greedy", "sampled")
# The counts of each shape, as _native.Config takes them.
SHAPES: dict[str, dict[str, int]] = {
    "demo": {
        "vocab": 4096,
        "hidden": 256,
        "layers": 8,
        "heads": 8,
        "kv_heads": 1,
        "delta_key_heads": 2,
        "delta_value_heads": 4,
        "experts": 16,
        "experts_used": 4,
        "inner": 128,
        "shared_inner": 128,
    },
    "qwen3.6-35b-a3b": {
        "vocab": 248320,
        "hidden": 2048,
        "layers": 40,
        "heads": 16,
        "kv_heads": 2,
        "delta_key_heads": 16,
        "delta_value_heads": 32,
        "experts": 256,
        "experts_used": 8,
        "inner": 512,
        "shared_inner": 512,
    },
}


@dataclass(frozen=True)
class Totals:
    """Sums of a plan: launches, stages, and the bytes that its launches read and write."""

    launches: int
    stages: int
    read: int
    written: int


def totals(config: Mapping[str, int | float], plan: str, *, context: int) -> Totals:
    """Return the sums of a plan.

    Args:
        config: Keyword arguments of _native.Config, as Checkpoint.config has them.
        plan: One of PLANS.
        context: Tokens in the cache, all of which are attended to.
    """
    text = _native.plan_text(
        _native.Config(**config), plan, context=context, prefill_chunk=2048, max_sessions=1
    )
    launches, stages, read, written = map(int, re.findall(r"\d+", text.splitlines()[-1]))
    return Totals(launches, stages, read, written)


def plan_text(plan: str, shape: str, *, context: int = 4096, prefill_chunk: int = 2048) -> str:
    """Return a plan as a table, one launch a line, and its totals.

    Args:
        plan: One of PLANS.
        shape: A key of SHAPES.
        context: Tokens a session can hold.
        prefill_chunk: Rows of the prefill plan.
    """
    config = _native.Config(**SHAPES[shape], attention_interval=_INTERVAL, rms_eps=1e-6, rope_theta=1e7)
    text = _native.plan_text(config, plan, context=context, prefill_chunk=prefill_chunk, max_sessions=1)
    if plan != "decode":
        return text
    least = least_bytes(shape, context)
    moved = sum(int(count) for count in re.findall(r"(\d+) bytes", text.splitlines()[-1]))
    return (
        f"{text}least: {least} bytes for weights, state and {context} cached tokens; "
        f"the plan's are {moved / least - 1:+.2%}\n"
    )


def least_bytes(shape: str, context: int) -> int:
    """Return the bytes that decoding one token after `context` others must move, each counted once.

    Weights are 4-bit (the router 8-bit) with a bf16 scale and bias per 64; states are read and written; the
    cache is bf16; the logits are written.
    """
    s = SHAPES[shape]
    hidden, values = s["hidden"], s["delta_value_heads"] * _DELTA
    channels = 2 * s["delta_key_heads"] * _DELTA + values

    def matrix(rows: int, columns: int, bits: int = 4) -> int:
        return rows * columns * bits // 8 + rows * columns // 64 * 4

    moe = matrix(s["experts"] + 1, hidden, 8) + 2 * hidden
    moe += 3 * matrix(s["experts_used"] * s["inner"] + s["shared_inner"], hidden)
    delta = matrix(channels + values + 2 * s["delta_value_heads"], hidden) + matrix(hidden, values)
    delta += 2 * hidden + channels * 2 * _TAPS + s["delta_value_heads"] * 6 + 2 * _DELTA
    delta += 2 * 4 * (s["delta_value_heads"] * _DELTA**2 + (_TAPS - 1) * channels)
    width = s["heads"] * _HEAD
    attention = matrix(2 * width + 2 * s["kv_heads"] * _HEAD, hidden) + matrix(hidden, width) + 2 * hidden
    attention += 4 * _HEAD + (context + 1) * 2 * s["kv_heads"] * _HEAD * 2
    full = s["layers"] // _INTERVAL
    head = matrix(s["vocab"] + 1, hidden) + 2 * hidden + 4 * s["vocab"]
    return s["layers"] * moe + (s["layers"] - full) * delta + full * attention + head


def main() -> None:
    """Print the plan named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m lily.plan", description="Print a recorded plan.")
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="demo", help="default: demo")
    options = parser.parse_args()
    print(plan_text(options.plan, options.shape), end="")


if __name__ == "__main__":
    main()
