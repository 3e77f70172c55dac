"""Every kernel, in every variant that a device has, against its reference, on guarded memory."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

import reference
import reference_head
import reference_math
from cases import GENERATORS, Case, cases
from lily import _native
from lily.errors import LilyError
from reference import REFERENCES, expected
from slots import Array, Out, bf16_values, dtype_of, shape_of, words_per_element

KERNELS = {kernel["name"]: kernel for kernel in _native.kernels()}
CONSTANTS = _native.shape_constants()
DEVICES = ("cpu", "cpu32")
VARIANTS = [(device, name, consts) for device in DEVICES for name, consts in _native.variants(device)]

UNWRITTEN_BYTE = 0xFF  # not a number in every float type

UNIT = 2.0**-24  # rounding of fp32
LONG_K = 2048  # from here on mv_split (quant.h) depends on k
# Below this, devices may flush to zero, and 1 / exp(x) is zero where exp(x) overflows.
FLOOR = 1e-36


def variant_id(value: Any) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{name}={number}" for name, number in value.items()) or "plain"
    return None


def memory_of(kernel: Mapping[str, Any], case: Case) -> dict[str, Array]:
    """Arrays for all slots of a launch; those that are only written hold no numbers."""
    names = {**CONSTANTS, **{name: int(value) for name, value in case.args.items()}, **case.consts}
    slots = {}
    for slot in kernel["slots"]:
        kind, name = slot["type"], slot["name"]
        words = int(np.prod(shape_of(slot["shape"], names))) * words_per_element(kind)
        slots[name] = np.full(words * dtype_of(kind).itemsize, UNWRITTEN_BYTE, np.uint8).view(dtype_of(kind))
        if name in case.slots:
            assert case.slots[name].dtype == slots[name].dtype, f"{kernel['name']}.{name}: test input"
            slots[name][:] = case.slots[name].reshape(-1)
    return slots


def run(device: str, kernel: Mapping[str, Any], case: Case, threads: int = 1) -> dict[str, Array]:
    """Runs a case and returns the slots afterwards. The native module guards the memory around each slot."""
    slots = memory_of(kernel, case)
    before = {slot["name"]: slots[slot["name"]].copy() for slot in kernel["slots"] if not slot["written"]}
    _native.run_kernel(kernel["name"], dict(case.args), dict(case.consts), slots, device, threads)
    for name, content in before.items():
        assert slots[name].tobytes() == content.tobytes(), (
            f"{kernel['name']}.{name} ({case.label}): was written"
        )
    return slots


def numbers(kind: str, raw: Array, out: Out) -> Array:
    """The content of a slot as float64, in the shape of its expectation."""
    if kind == "bfloat":
        return bf16_values(raw).reshape(out.value.shape)
    content = raw.astype(np.float64).reshape(out.value.shape)
    if out.float_bits is not None:
        content[out.float_bits] = raw.view(np.float32).reshape(out.value.shape)[out.float_bits]
    return content


def storage_error(kind: str, got: Array, want: Array) -> Array | float:
    """What storing may change: half a unit of the type's last place; integers are cut."""
    exponent = np.floor(np.log2(np.maximum(np.maximum(np.abs(got), np.abs(want)), FLOOR)))
    if kind in ("act_t", "half"):
        return np.asarray(2.0 ** (np.maximum(exponent, -14) - 11))
    if kind == "bfloat":
        return np.asarray(2.0 ** (exponent - 8))
    return 1.0 if kind == "uint" else 0.0


class Judgement(NamedTuple):
    """worst: the largest error, relative to what is allowed; typical: their root mean square; text: where."""

    worst: float
    typical: float
    text: str


def judge(kind: str, out: Out, before: Array, after: Array, ulps: float) -> Judgement:
    """Compares a written slot with its expectation; elements that must be kept are compared bit by bit."""
    keep = np.isnan(out.value).reshape(-1)
    word = np.dtype(f"u{after.dtype.itemsize}")
    changed = np.flatnonzero(keep & (after.view(word) != before.view(word)))
    if changed.size:
        return Judgement(np.inf, np.inf, f"element {changed[0]} of {keep.size} must not be written")
    if keep.all():
        return Judgement(0, 0, "")
    got, want = numbers(kind, after, out), out.value
    exact = ulps * np.broadcast_to(out.scale, want.shape) == 0
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0, np.abs(got - want))  # infinities
        allowed = ulps * UNIT * out.scale + np.where(exact, 0, FLOOR)
        stored = np.where(exact & (kind == "uint"), 0, storage_error(kind, got, want))
        allowed = allowed + (stored if out.float_bits is None else 0)
    error, allowed = error.reshape(-1)[~keep], allowed.reshape(-1)[~keep]
    ratio = np.where(error == 0, 0, error / np.maximum(allowed, 1e-300))
    ratio[np.isnan(error)] = np.inf
    at = int(np.argmax(ratio))
    place = np.unravel_index(np.flatnonzero(~keep)[at], want.shape)
    text = f"[{', '.join(map(str, place))}] is {got[place]!r}, not {want[place]!r} +- {allowed[at]:.3g}"
    typical = float(np.sqrt((ratio**2).mean())) if len(ratio) >= 256 else 0.0
    return Judgement(float(ratio[at]), typical, text)


def check(kernel: Mapping[str, Any], case: Case, after: Mapping[str, Array]) -> None:
    """Compares what a launch wrote with the reference."""
    before = memory_of(kernel, case)
    outs = expected(kernel, case.args, case.consts, before, CONSTANTS)
    written = {slot["name"]: slot["type"] for slot in kernel["slots"] if slot["written"]}
    assert set(outs) == set(written) == set(case.ulps), f"{kernel['name']}: the reference writes other slots"
    for name, kind in written.items():
        result = judge(kind, outs[name], before[name], after[name], case.ulps[name])
        assert result.worst <= 1, f"{kernel['name']}.{name} ({case.label}): {result.text}"
        # An error that is everywhere near the bound is no rounding error.
        assert result.typical <= 0.75, f"{kernel['name']}.{name} ({case.label}): errors have a pattern"


def same_bits(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


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


@pytest.mark.parametrize(("device", "name", "consts"), VARIANTS, ids=variant_id)
def test_kernel(device: str, name: str, consts: dict[str, int]) -> None:
    kernel = KERNELS[name]
    for case in cases(name, consts, small=device == "cpu32"):
        after = run(device, kernel, case)
        check(kernel, case, after)
        assert same_bits(after, run(device, kernel, case)), f"{name} ({case.label}): a second run differs"
        shared = run(device, kernel, case, threads=2)
        assert same_bits(after, shared), f"{name} ({case.label}): two threads differ from one"
        if generic := generic_form(kernel, case):
            plain = run(device, kernel, generic)
            check(kernel, generic, plain)
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
    return device == "cpu32" and max(case.consts.get("K", 0), case.consts.get("KS", 0)) >= LONG_K


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
