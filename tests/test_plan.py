"""The recorded plans as golden text: a change of the launches of a pass shows as a change of these files.

To renew them after an intended change: python tests/test_plan.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lily import Engine
from lily.plan import PLANS, SHAPES, plan_text

GOLDEN = Path(__file__).parent / "golden" / "plans"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", PLANS)
def test_plan__is_as_recorded(plan: str, shape: str) -> None:
    expected = (GOLDEN / f"{shape}.{plan}.txt").read_text(encoding="utf-8")
    assert plan_text(plan, shape) == expected


def test_plan__a_token_is_few_stages_and_moves_little_twice() -> None:
    *_, total, least = plan_text("decode", "qwen3.6-35b-a3b").splitlines()
    launches, stages = (int(count) for count in re.findall(r"(\d+) (?:launches|stages)", total))
    tail = plan_text("greedy", "qwen3.6-35b-a3b").splitlines()[-1]
    assert launches + int(tail.split()[1]) <= 330
    assert stages + int(tail.split()[3]) <= 250
    assert 0 <= float(least.split()[-1].rstrip("%")) <= 3


def test_plan__demo_shape_is_the_shipped_one(engine: Engine) -> None:
    from lily.checkpoint import DEMO, open_checkpoint

    config = open_checkpoint(DEMO).config
    assert {name: config[name] for name in SHAPES["demo"]} == SHAPES["demo"]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for shape_name in SHAPES:
        for plan_name in PLANS:
            (GOLDEN / f"{shape_name}.{plan_name}.txt").write_text(
                plan_text(plan_name, shape_name), encoding="utf-8"
            )
