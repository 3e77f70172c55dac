"""Attention of prefill behind caches as long as contexts get, around powers of two."""

from __future__ import annotations

import pytest

from lily.doctor.cases import make_case
from lily.doctor.inputs import Dims
from lily.doctor.kernels import KERNELS, compare, run


@pytest.mark.parametrize("length", [32_767, 32_768, 32_769, 65_536, 65_537, 131_071, 131_072])
def test_last_rows_of_a_long_context(length: int) -> None:
    rows = 3
    d = Dims(rows, rows, length - rows, 1, 64, 64, 64, 64, 1)
    case = make_case("attention_tile", {"GROUP": 2}, "long", d, "normal", 0)
    kernel = KERNELS["attention_tile"]
    assert compare(kernel, case, run("cpu", kernel, case), "cpu").reason == ""
