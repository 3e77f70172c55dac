"""Tokens of the Metal device at SIMD width 32, as a GPU runs them: for make check-metal, on the double."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import lily
from demo_model import PROMPT
from double_plugin import Double, made

TOKENS = 16
CLEAR = 0.2  # a margin of logits that sums in another order do not turn
SIMDGROUP, TENSOR = "simdgroup matrices", "tensor operations (Metal 4)"
FORMS = {
    SIMDGROUP: {"os_major": 15},
    TENSOR: {"os_major": 26, "os_minor": 2, "apple_family": 10, "metal4": 1},
}


@dataclasses.dataclass(frozen=True)
class Story:
    """Greedy tokens; the logits before each and after the last, and what their best is ahead by."""

    tokens: list[int]
    logits: list[bytes]
    margins: list[float]


def story(device: str, form: str = "") -> Story:
    """What a device writes."""
    tokens, logits = [], []
    with lily.Engine("demo", device=device, context=128, prefill_chunk=64) as engine:
        assert not form or engine.info()["device_info"]["matrix_products"] == form
        session = engine.session()
        list(session.prefill(PROMPT))
        logits.append(session.logits)
        for token in session.step(max_tokens=TOKENS, temperature=0.0):
            tokens.append(token.id)
            logits.append(session.logits)
        session.close()
    ranked = (np.sort(row) for row in logits)
    return Story(tokens, [row.tobytes() for row in logits], [float(row[-1] - row[-2]) for row in ranked])


def story_of_metal(double: Double, form: str, order: int) -> Story:
    """What the Metal device writes at width 32."""
    double.reset()
    for name, value in {"width": 32, "order": order, **FORMS[form]}.items():
        double.set(name, value)
    return story("metal", form)


@pytest.fixture(scope="module")
def first(request: pytest.FixtureRequest) -> Story:
    """The story that others are compared with."""
    return story_of_metal(made(request.config), SIMDGROUP, 0)


def test_tokens_are_those_of_width_1(first: Story) -> None:
    expected = story("cpu")
    clear = next((i for i, margin in enumerate(expected.margins) if margin < CLEAR), TOKENS)
    assert clear >= TOKENS // 2
    assert first.tokens[:clear] == expected.tokens[:clear]


@pytest.mark.parametrize(("form", "order"), [(SIMDGROUP, 1), (SIMDGROUP, 2), (TENSOR, 1)])
def test_no_bit_depends_on_form_or_order(first: Story, double: Double, form: str, order: int) -> None:
    """Dispatches between two barriers run reversed or shuffled; on the CPU both forms of a tile add alike."""
    assert story_of_metal(double, form, order) == first
