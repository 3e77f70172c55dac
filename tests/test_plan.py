"""The recorded plans as golden text: a change of the launches of a pass shows as a change of these files.

To renew them after an intended change: python tests/test_plan.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from lily import Engine
from lily.plan import (
    PLANS,
    SHAPES,
    Launch,
    critical_path,
    dependencies,
    least_bytes,
    main,
    plan_text,
    record,
    shape_config,
    violations,
)

GOLDEN = Path(__file__).parent / "golden" / "plans"
# Plans and contexts: up to 2,048 tokens attention is one block, behind them it has several.
CASES = [("decode", 2048), *((plan, 4096) for plan in PLANS)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("plan", "context"), CASES)
def test_plan__is_as_recorded(plan: str, context: int, shape: str) -> None:
    expected = (GOLDEN / f"{shape}.{plan}-{context}.txt").read_text(encoding="utf-8")
    assert plan_text(plan, shape, context=context) == expected


@pytest.mark.parametrize(("context", "stages"), [(2048, 250), (2049, 260), (32768, 260)])
def test_plan__a_token_is_few_stages_and_moves_little_twice(context: int, stages: int) -> None:
    config = shape_config("qwen3.6-35b-a3b")
    body, tail = record(config, "decode", context=context), record(config, "greedy", context=context)
    assert len(body.launches) + len(tail.launches) <= 330
    assert body.stages + tail.stages <= stages
    least = least_bytes("qwen3.6-35b-a3b", context)
    assert least <= body.read + body.written <= 1.03 * least


def stages_of(launches: Sequence[Launch]) -> list[list[int]]:
    """Places of the launches, stage by stage."""
    groups: list[list[int]] = [[] for _ in range(1 + max(launch.stage for launch in launches))]
    for launch in launches:
        groups[launch.stage].append(launch.recorded)
    return groups


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("plan", "context"), CASES)
def test_plan__order_respects_every_dependency(plan: str, context: int, shape: str) -> None:
    made = record(shape_config(shape), plan, context=context)
    assert [launch.stage for launch in made.launches] == sorted(launch.stage for launch in made.launches)
    groups = stages_of(made.launches)
    assert violations(made.launches, groups) == []
    # No launch could start earlier, and the longest chain has a launch in every stage.
    before = dependencies(made.launches)
    stage_of = {launch.recorded: launch.stage for launch in made.launches}
    for place, waits in before.items():
        assert stage_of[place] == max((stage_of[other] + 1 for other in waits), default=0)
    path = [launch.recorded for launch in critical_path(made.launches)]
    assert all(a in before[b] for a, b in pairwise(path))


def test_plan__an_order_that_breaks_a_dependency_is_noticed() -> None:
    launches = record(shape_config("demo"), "decode").launches
    groups = stages_of(launches)
    early = [*groups[:4], groups[4] + groups[5], *groups[6:]]  # a barrier less
    assert violations(launches, early) == [f"launch {groups[5][0]} does not wait for launch {groups[4][0]}"]
    late = [*groups[:4], groups[5], groups[4], *groups[6:]]
    assert f"launch {groups[5][0]} does not wait for launch {groups[4][0]}" in violations(launches, late)
    assert violations(launches, groups[:-1])[0] == f"launch {groups[-1][0]} is not submitted"
    assert violations(launches, [*groups, groups[0]])[0] == f"launch {groups[0][0]} is submitted twice"
    assert violations(launches, [*groups, [9999]]) == ["there is no launch 9999"]


def test_plan__json_tells_what_the_text_does() -> None:
    command = [sys.executable, "-m", "lily.plan", "decode", "--context", "512", "--json"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    text = plan_text("decode", "demo", context=512)
    assert f"{len(found['launches'])} launches, {found['stages']} stages" in text
    assert f"{found['read']} bytes read, {found['written']} bytes written" in text
    assert f"least: {found['least']} bytes" in text
    assert found["read"] == sum(
        slot["bytes_read"] for launch in found["launches"] for slot in launch["slots"]
    )
    assert f"critical path: {len(found['critical_path'])} launches" in text


@pytest.mark.parametrize("context", ["0", "-1", str(10**19), "many"])
def test_plan__wrong_numbers_are_errors(context: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["decode", "--context", context])
    assert "context" in capsys.readouterr().err


def test_plan__too_large_a_context_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "--context", "16777216"]) == 1
    assert "is beyond 32-bit indices; lower context" in capsys.readouterr().err


def test_plan__output_that_cannot_be_written() -> None:
    command = [sys.executable, "-m", "lily.plan", "decode"]
    with open("/dev/full", "wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "lily: [Errno 28] No space left on device\n")


def test_plan__wrong_arguments_are_errors() -> None:
    config = shape_config("demo")
    with pytest.raises(ValueError, match="no plan is called sideways"):
        record(config, "sideways")
    with pytest.raises(ValueError, match="prefill_chunk must be a multiple of 64"):
        record(config, "prefill", prefill_chunk=65)
    with pytest.raises(ValueError, match="no shape is called large: there are demo, qwen"):
        plan_text("decode", "large")
    launches = record(config, "greedy").launches
    with pytest.raises(ValueError, match="launch 1 is there twice"):
        violations([*launches, launches[1]], [[0], [1]])


def test_plan__demo_shape_is_the_shipped_one(engine: Engine) -> None:
    from lily.checkpoint import DEMO, open_checkpoint

    config = open_checkpoint(DEMO).config
    assert {name: config[name] for name in SHAPES["demo"]} == SHAPES["demo"]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for shape_name in SHAPES:
        for plan_name, tokens in CASES:
            text = plan_text(plan_name, shape_name, context=tokens)
            (GOLDEN / f"{shape_name}.{plan_name}-{tokens}.txt").write_text(text, encoding="utf-8")
