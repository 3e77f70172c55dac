"""Recorded plans: python -m lily.plan decode [--shape qwen3.6-35b-a3b] [--context 4096] [--json].

A plan is the list of kernel launches of one forward pass, in stages: launches of a stage are independent of
each other. Bytes are what a launch reads and writes, as its shader says (tests count its accesses); those of
decode are compared with the least that a token needs. The weights themselves are not needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lily import _native
from lily.engine import MAX_CHUNK, MAX_CONTEXT
from lily.sampling import check_int

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
class Slot:
    """A range of bytes that a launch reads, or also writes.

    Attributes:
        buffer: Number of the buffer that it lies in, from byte `offset` on.
        bytes_read: Bytes of it that are really read, each counted once.
        bytes_written: Likewise.
    """

    name: str
    written: bool
    buffer: int
    offset: int
    bytes: int
    bytes_read: int
    bytes_written: int

    def conflicts(self, other: Slot) -> bool:
        """Whether two launches with these slots must keep their order."""
        overlap = self.offset < other.offset + other.bytes and other.offset < self.offset + self.bytes
        some = self.buffer == other.buffer and self.bytes > 0 and other.bytes > 0
        return some and overlap and (self.written or other.written)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        label: The part of the model that it belongs to.
        layer: Number of its layer; -1 outside the layers.
        recorded: Its place in the order that the model was written down in.
        stage: Launches of a stage may run at the same time.
    """

    kernel: str
    consts: Mapping[str, int]
    label: str
    layer: int
    recorded: int
    stage: int
    slots: tuple[Slot, ...]

    @property
    def read(self) -> int:
        """Bytes read."""
        return sum(slot.bytes_read for slot in self.slots)

    @property
    def written(self) -> int:
        """Bytes written."""
        return sum(slot.bytes_written for slot in self.slots)


@dataclass(frozen=True)
class Plan:
    """The launches of one pass, in the order of their stages."""

    name: str
    launches: tuple[Launch, ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return max((launch.stage + 1 for launch in self.launches), default=0)

    @property
    def read(self) -> int:
        """Bytes that all launches read."""
        return sum(launch.read for launch in self.launches)

    @property
    def written(self) -> int:
        """Bytes that all launches write."""
        return sum(launch.written for launch in self.launches)


def record(config: Mapping[str, float], plan: str, *, context: int = 4096, prefill_chunk: int = 2048) -> Plan:
    """Record a plan.

    Args:
        config: Keyword arguments of `_native.Config`, as `checkpoint.open_checkpoint` finds them.
        plan: One of PLANS.
        context: Tokens a session can hold, 1 to MAX_CONTEXT. "decode" is the plan of the last of them.
        prefill_chunk: Rows of the prefill plan, a multiple of 64.

    Raises:
        ValueError: there is no such plan, or a number is out of range.
        UnsupportedError: no model can have these counts.
    """
    check_int("context", context, 1, MAX_CONTEXT, optional=False)
    check_int("prefill_chunk", prefill_chunk, 64, MAX_CHUNK, optional=False)
    name, launches = _native.plan(
        _native.Config(**config), plan, context=context, prefill_chunk=prefill_chunk, max_sessions=1
    )
    return Plan(
        name,
        tuple(
            Launch(**{**launch, "slots": tuple(Slot(**slot) for slot in launch["slots"])})
            for launch in launches
        ),
    )


def shape_config(shape: str) -> dict[str, float]:
    """Return the configuration of a key of SHAPES.

    Raises:
        ValueError: it is none.
    """
    if shape not in SHAPES:
        raise ValueError(f"no shape is called {shape}: there are {', '.join(SHAPES)}")
    return {**SHAPES[shape], "attention_interval": _INTERVAL, "rms_eps": 1e-6, "rope_theta": 1e7}


def dependencies(launches: Iterable[Launch]) -> dict[int, set[int]]:
    """Return which launches each one must wait for, by their places in the recorded order.

    One launch must wait for another that was recorded earlier if one of them writes what the other uses.

    Raises:
        ValueError: a launch is there twice.
    """
    before: dict[int, set[int]] = {}
    used: dict[int, list[tuple[Slot, int]]] = {}
    for launch in sorted(launches, key=lambda launch: launch.recorded):
        if launch.recorded in before:
            raise ValueError(f"launch {launch.recorded} is there twice")
        waits = before.setdefault(launch.recorded, set())
        for slot in launch.slots:
            earlier = used.setdefault(slot.buffer, [])
            waits.update(place for other, place in earlier if slot.conflicts(other))
        for slot in launch.slots:
            used[slot.buffer].append((slot, launch.recorded))
    return before


def violations(launches: Sequence[Launch], submitted: Sequence[Iterable[int]]) -> list[str]:
    """Return what is wrong with an order of submission; nothing if it respects every dependency.

    Args:
        launches: Of a plan.
        submitted: Places of launches in the recorded order, in groups; a group begins when the one before
            has ended.

    Raises:
        ValueError: a launch is in `launches` twice.
    """
    before = dependencies(launches)
    group_of: dict[int, int] = {}
    wrong = []
    for number, group in enumerate(submitted):
        for place in group:
            if place in group_of:
                wrong.append(f"launch {place} is submitted twice")
            group_of[place] = number
    wrong += [f"launch {place} is not submitted" for place in before if place not in group_of]
    wrong += [f"there is no launch {place}" for place in group_of if place not in before]
    for place, waits in before.items():
        for other in sorted(waits):
            if place in group_of and group_of.get(other, -1) >= group_of[place]:
                wrong.append(f"launch {place} does not wait for launch {other}")
    return wrong


def critical_path(launches: Iterable[Launch]) -> list[Launch]:
    """Return the chain of launches, each waiting for the one before, that moves the most bytes."""
    by_place = {launch.recorded: launch for launch in launches}
    cost: dict[int, int] = {}
    came_from: dict[int, int | None] = {}
    for place, waits in dependencies(by_place.values()).items():
        came_from[place] = max(waits, key=lambda other: cost[other], default=None)
        cost[place] = by_place[place].read + by_place[place].written
        cost[place] += max((cost[other] for other in waits), default=0)
    path = []
    at = max(cost, key=lambda place: cost[place], default=None)
    while at is not None:
        path.append(by_place[at])
        at = came_from[at]
    return path[::-1]


def plan_text(plan: str, shape: str, *, context: int = 4096, prefill_chunk: int = 2048) -> str:
    """Return a plan as a table, one launch a line, and its totals.

    Args:
        plan: One of PLANS.
        shape: A key of SHAPES.
        context: As for record().
        prefill_chunk: As for record().
    """
    made = record(shape_config(shape), plan, context=context, prefill_chunk=prefill_chunk)
    lines = [f"plan {made.name}", _line("stage", "launch", "kernel", "place", "read", "written")]
    for number, launch in enumerate(made.launches):
        consts = ",".join(f"{name}={value}" for name, value in launch.consts.items())
        place = f"{launch.label} {launch.layer}".lstrip() if launch.layer >= 0 else launch.label
        kernel = f"{launch.kernel} {consts}".rstrip()
        lines.append(_line(launch.stage, number, kernel, place, launch.read, launch.written))
    path = critical_path(made.launches)
    moved, on_path = (sum(launch.read + launch.written for launch in some) for some in (made.launches, path))
    lines += [
        f"total: {len(made.launches)} launches, {made.stages} stages, "
        f"{made.read} bytes read, {made.written} bytes written",
        f"critical path: {len(path)} launches, {on_path / moved:.2%} of the bytes",
    ]
    if plan == "decode":
        least = least_bytes(shape, context)
        lines.append(
            f"least: {least} bytes for weights, state and a cache of {context} tokens; "
            f"the plan's are {moved / least - 1:+.2%}"
        )
    return "\n".join(lines) + "\n"


def plan_json(plan: str, shape: str, *, context: int = 4096, prefill_chunk: int = 2048) -> dict[str, Any]:
    """Return what `plan_text` tells, and the slots of every launch, as JSON has it."""
    made = record(shape_config(shape), plan, context=context, prefill_chunk=prefill_chunk)
    result: dict[str, Any] = {
        "plan": made.name,
        "shape": shape,
        "context": context,
        "launches": [
            {**dataclasses.asdict(launch), "read": launch.read, "written": launch.written}
            for launch in made.launches
        ],
        "stages": made.stages,
        "read": made.read,
        "written": made.written,
        "critical_path": [launch.recorded for launch in critical_path(made.launches)],
    }
    if plan == "decode":
        result["least"] = least_bytes(shape, context)
    return result


def _line(*columns: str | int) -> str:
    stage, number, kernel, place, read, written = columns
    return f"{stage:>6} {number:>6}  {kernel:<44} {place:<24} {read:>14} {written:>14}"


def least_bytes(shape: str, context: int) -> int:
    """Return the bytes that decoding token number `context` of a session must move, each counted once.

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
    attention += 4 * _HEAD + context * 2 * s["kv_heads"] * _HEAD * 2
    full = s["layers"] // _INTERVAL
    head = matrix(s["vocab"] + 1, hidden) + 2 * hidden + 4 * s["vocab"]
    return s["layers"] * moe + (s["layers"] - full) * delta + full * attention + head


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan named on the command line; return the exit status, as of `lily`."""
    from lily.cli import guarded

    parser = argparse.ArgumentParser(prog="python -m lily.plan", description="Print a recorded plan.")
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="demo", help="default: demo")
    text = "tokens a session can hold; decode is that of the last one (default: 4096)"
    parser.add_argument("--context", type=int, default=4096, help=text)
    text = "rows of the prefill plan (default: 2048)"
    parser.add_argument("--prefill-chunk", type=int, default=2048, help=text)
    text = "print one JSON object, with the slots of every launch"
    parser.add_argument("--json", action="store_true", help=text)

    def run() -> int:
        options = parser.parse_args(argv)
        settings = {"context": options.context, "prefill_chunk": options.prefill_chunk}
        try:
            if options.json:
                text = json.dumps(plan_json(options.plan, options.shape, **settings)) + "\n"
            else:
                text = plan_text(options.plan, options.shape, **settings)
        except ValueError as error:
            parser.error(str(error))
        print(text, end="")
        return 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
