"""Every kernel, in every variant that a device has, against its reference, on guarded memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from launch import DEVICES, variants
from lily import _native
from lily.doctor import reference, reference_head, reference_math
from lily.doctor.cases import GENERATORS, Case, cases
from lily.doctor.kernels import CONSTANTS, KERNELS, compare, memory_of, multiplies_integers, run, same_bits
from lily.doctor.references import REFERENCES
from lily.doctor.slots import Array, words_per_element
from lily.errors import LilyError

VARIANTS = [(device, name, consts) for device in DEVICES for name, consts in variants(device)]

LONG_K = 2048  # from here on mv_split (quant.h) depends on k


def variant_id(value: Any) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{name}={number}" for name, number in value.items()) or "plain"
    return None


def check(kernel: Mapping[str, Any], case: Case, after: Mapping[str, Array], device: str) -> None:
    """Compares what a launch wrote with the reference."""
    reason = compare(kernel, case, after, device).reason
    assert not reason, f"{kernel['name']} ({case.label}): {reason}"


def test_every_kernel_has_a_reference_and_cases() -> None:
    assert set(REFERENCES) == set(KERNELS)
    assert set(GENERATORS) == set(KERNELS)


def test_reference_knows_the_shaders_constants() -> None:
    for module in (reference, reference_head, reference_math):
        for name, value in vars(module).items():
            if name.isupper() and name in CONSTANTS:
                assert value == CONSTANTS[name], name


@pytest.mark.parametrize("device", DEVICES)
def test_every_kernel_has_a_variant(device: str) -> None:
    assert {name for name, _ in _native.variants(device)} == set(KERNELS)


@pytest.mark.parametrize("device", DEVICES)
def test_only_the_fast_cpu_device_multiplies_integers(device: str) -> None:
    if device != "metal":  # its double can have either width
        assert multiplies_integers(device) == (device == "cpu")


@pytest.mark.parametrize(("device", "name", "consts"), VARIANTS, ids=variant_id)
def test_kernel(device: str, name: str, consts: dict[str, int]) -> None:
    kernel = KERNELS[name]
    for case in cases(name, consts, small=device != "cpu"):
        after = run(device, kernel, case)
        check(kernel, case, after, device)
        assert same_bits(after, run(device, kernel, case)), f"{name} ({case.label}): a second run differs"
        shared = run(device, kernel, case, threads=2)
        assert same_bits(after, shared), f"{name} ({case.label}): two threads differ from one"
        if generic := generic_form(kernel, case):
            plain = run(device, kernel, generic)
            check(kernel, generic, plain, device)
            assert splits_otherwise(device, case) or same_bits(after, plain), (
                f"{name} ({case.label}): the generic form differs"
            )


def generic_form(kernel: Mapping[str, Any], case: Case) -> Case | None:
    """The same launch for the form that reads mirrored consts from args, if this is another one."""
    consts = {c["name"]: 0 if c["mirrors"] is not None else case.consts[c["name"]] for c in kernel["consts"]}
    if consts == dict(case.consts):
        return None
    return Case(case.label, case.args, MappingProxyType(consts), case.slots, case.ulps)


def splits_otherwise(device: str, case: Case) -> bool:
    """Whether the generic form adds up in another order.

    Where simdgroups exist, a long k that is known at compile time is split among more of them than one that
    is read from args (mv_split in quant.h), so the two forms round differently. Each must then agree with
    the reference on its own.
    """
    return device != "cpu" and max(case.consts.get("K", 0), case.consts.get("KS", 0)) >= LONG_K


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_short_slots_are_refused_by_name(name: str) -> None:
    kernel = KERNELS[name]
    consts = next(consts for variant, consts in _native.variants("cpu") if variant == name)
    case = next(iter(cases(name, consts, small=True)))
    slots = memory_of(kernel, case)
    for slot, count in zip(kernel["slots"], _native.slot_counts(name, dict(case.args), consts), strict=True):
        words = words_per_element(slot["type"])
        whole = slots[slot["name"]]
        assert whole.size == count * words
        short = {**slots, slot["name"]: whole[:-words]}
        with pytest.raises(LilyError, match=rf"{name}\.{slot['name']}\b"):
            _native.run_kernel(name, dict(case.args), consts, short, "cpu", 1)


@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("device", DEVICES)
def test_activations_that_are_not_numbers_show(device: str, count: int) -> None:
    """A device that multiplies integers has none for them."""
    all_consts = [consts for name, consts in _native.variants(device) if name == "qmv_add"]
    consts = next(consts for consts in all_consts if consts["BITS"] == 4)
    case = next(iter(cases("qmv_add", consts, small=True)))
    x = case.slots["x"].reshape(int(case.args["rows"]), -1)
    for i in range(count):
        x[0, i] = np.nan if x.dtype == np.float16 else 0x7FC0
    y = run(device, KERNELS["qmv_add"], case)["y"].reshape(len(x), -1)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1:]).all()
