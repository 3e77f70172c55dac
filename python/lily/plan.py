"""Print a recorded plan: python -m lily.plan decode [--shape qwen3.6-35b-a3b].

A plan is the list of kernel launches of one forward pass, in stages: launches of a stage are independent of
each other. Bytes are what a launch touches, as its shader says. No weights are needed.
"""

from __future__ import annotations

import argparse

from lily import _native

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


def plan_text(plan: str, shape: str, *, context: int = 4096, prefill_chunk: int = 2048) -> str:
    """Return a plan as a table, one launch a line, and its totals.

    Args:
        plan: One of PLANS.
        shape: A key of SHAPES.
        context: Tokens a session can hold.
        prefill_chunk: Rows of the prefill plan.
    """
    config = _native.Config(**SHAPES[shape], attention_interval=4, rms_eps=1e-6, rope_theta=1e7)
    return _native.plan_text(config, plan, context=context, prefill_chunk=prefill_chunk, max_sessions=1)


def main() -> None:
    """Print the plan named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m lily.plan", description="Print a recorded plan.")
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="demo", help="default: demo")
    options = parser.parse_args()
    print(plan_text(options.plan, options.shape), end="")


if __name__ == "__main__":
    main()
