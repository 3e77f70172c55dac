"""Runs kernels on a device, on guarded memory, and compares what they write with their reference."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lily import _native
from lily.doctor.cases import Case, cases
from lily.doctor.references import expected
from lily.doctor.slots import (
    ACT_TYPE,
    Array,
    Out,
    bf16_bits,
    bf16_values,
    dtype_of,
    shape_of,
    words_per_element,
)
from lily.errors import LilyError

KERNELS: dict[str, dict[str, Any]] = {kernel["name"]: kernel for kernel in _native.kernels()}
CONSTANTS = _native.shape_constants()

UNWRITTEN_BYTE = 0xFF  # not a number in every float type
UNIT = 2.0**-24  # rounding of fp32
# Below this, devices may flush to zero, and 1 / exp(x) is zero where exp(x) overflows.
FLOOR = 1e-36
SMALLEST_HALF = 2.0**-14  # below it, half loses relative precision
PRODUCTS = {
    *("norm_qmv", "qmv", "qmv_add", "head_logits", "expert_mv_gate_up", "expert_mv_down"),  # of single rows
    *("qmm", "qmm_add", "qmm_swiglu", "expert_mm_gate_up", "expert_mm_down"),  # of tiles
}
# An error that is everywhere near the bound is no rounding error.
MOST_TYPICAL = 0.75


class StrayWriteError(Exception):
    """A kernel wrote where it must not."""


class Judgement(NamedTuple):
    """How a written slot agrees with its expectation.

    worst: the largest error, relative to what is allowed. typical: their root mean square. text: where
    the largest is. nmse: mean square error over mean square. error: the largest error, relative to the size
    of the terms that make up the value.
    """

    worst: float
    typical: float
    text: str
    nmse: float = 0.0
    error: float = 0.0


def memory_of(kernel: Mapping[str, Any], case: Case) -> dict[str, Array]:
    """Arrays for all slots of a launch; those that are only written hold no numbers."""
    names = {**CONSTANTS, **{name: int(value) for name, value in case.args.items()}, **case.consts}
    slots = {}
    for slot in kernel["slots"]:
        kind, name = slot["type"], slot["name"]
        words = int(np.prod(shape_of(slot["shape"], names))) * words_per_element(kind)
        slots[name] = np.full(words * dtype_of(kind).itemsize, UNWRITTEN_BYTE, np.uint8).view(dtype_of(kind))
        if name in case.slots:
            if case.slots[name].dtype != slots[name].dtype:
                raise TypeError(f"the inputs of {kernel['name']}.{name} are of another type")
            slots[name][:] = case.slots[name].reshape(-1)
    return slots


def run(device: str, kernel: Mapping[str, Any], case: Case, threads: int = 1) -> dict[str, Array]:
    """Runs a case and returns the slots afterwards. The native module guards the memory around each slot.

    Raises:
        StrayWriteError: a slot that is only read was written.
        LilyError: memory outside the slots was written, or the device failed.
    """
    slots = memory_of(kernel, case)
    before = {slot["name"]: slots[slot["name"]].copy() for slot in kernel["slots"] if not slot["written"]}
    _native.run_kernel(kernel["name"], dict(case.args), dict(case.consts), slots, device, threads)
    for name, content in before.items():
        if slots[name].tobytes() != content.tobytes():
            raise StrayWriteError(f"{name} was written, and is only to be read")
    return slots


def numbers(kind: str, raw: Array, out: Out) -> Array:
    """The content of a slot as float64, in the shape of its expectation."""
    if (ACT_TYPE if kind == "act_t" else kind) == "bfloat":
        return bf16_values(raw).reshape(out.value.shape)
    content = raw.astype(np.float64).reshape(out.value.shape)
    if out.float_bits is not None:
        content[out.float_bits] = raw.view(np.float32).reshape(out.value.shape)[out.float_bits]
    return content


def storage_error(kind: str, got: Array, want: Array) -> Array | float:
    """What storing may change: half a unit of the type's last place; integers are cut."""
    exponent = np.floor(np.log2(np.maximum(np.maximum(np.abs(got), np.abs(want)), FLOOR)))
    if is_half(kind):
        return np.asarray(2.0 ** (np.maximum(exponent, -14) - 11))
    if kind in ("act_t", "bfloat"):
        return np.asarray(2.0 ** (exponent - 8))
    return 1.0 if kind == "uint" else 0.0


def is_half(kind: str) -> bool:
    """Whether a slot of this type holds halves."""
    return (ACT_TYPE if kind == "act_t" else kind) == "half"


def judge(kind: str, out: Out, before: Array, after: Array, ulps: float) -> Judgement:
    """Compares a written slot with its expectation; elements that must be kept are compared bit by bit.

    Raises:
        StrayWriteError: an element that must be kept was written.
    """
    keep = np.isnan(out.value).reshape(-1)
    word = np.dtype(f"u{after.dtype.itemsize}")
    changed = np.flatnonzero(keep & (after.view(word) != before.view(word)))
    if changed.size:
        raise StrayWriteError(f"element {changed[0]} of {keep.size} must not be written")
    if keep.all():
        return Judgement(0, 0, "")
    got, want = numbers(kind, after, out), out.value
    exact = ulps * np.broadcast_to(out.scale, want.shape) == 0
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0, np.abs(got - want))  # infinities
        allowed = ulps * UNIT * out.scale + np.where(exact, 0, FLOOR)
        stored = np.where(exact & (kind == "uint"), 0, storage_error(kind, got, want))
        allowed = allowed + (stored if out.float_bits is None else 0)
    nmse, relative = sizes_of(kind, error, want, np.broadcast_to(out.scale, want.shape))
    error, allowed = error.reshape(-1)[~keep], allowed.reshape(-1)[~keep]
    ratio = np.where(error == 0, 0, error / np.maximum(allowed, 1e-300))
    ratio[np.isnan(error)] = np.inf
    at = int(np.argmax(ratio))
    place = np.unravel_index(np.flatnonzero(~keep)[at], want.shape)
    text = f"[{', '.join(map(str, place))}] is {got[place]:.9g}, not {want[place]:.9g} +- {allowed[at]:.3g}"
    typical = float(np.sqrt((ratio**2).mean())) if len(ratio) >= 256 else 0.0
    return Judgement(float(ratio[at]), typical, text, nmse, relative)


def sizes_of(kind: str, error: Array, want: Array, scale: Array) -> tuple[float, float]:
    """NMSE, and the largest error relative to a value's terms, of what has a meaningful relative error."""
    size = np.maximum(np.abs(want), scale)
    meant = np.isfinite(want) & (size >= (SMALLEST_HALF if is_half(kind) else FLOOR))
    if not meant.any():
        return 0.0, 0.0
    error, want, size = error[meant], want[meant], size[meant]
    most = float(np.abs(want).max()) or 1.0  # squares of very large numbers must not overflow
    norm = float(np.square(want / most).sum())
    off = float(np.square(error / most).sum())
    return off / norm if norm else math.inf if off else 0.0, float((error / size).max())


@dataclass
class Comparison:
    """The worst of all slots that a launch wrote; reason says why it is wrong, or is empty."""

    reason: str = ""
    worst: float = 0.0
    nmse: float = 0.0
    error: float = 0.0


@functools.cache
def multiplies_integers(device: str) -> bool:
    """Whether a device rounds the activations of quantised products to 16-bit integers, as CPUs do.

    It is asked for 128 * 0 + 2^-9 * 1 + 1 * 1. Integers that hold 128 miss 2^-9.

    Raises:
        ValueError: The answer is neither.
    """
    consts = next(
        consts for name, consts in _native.variants(device) if name == "qmv_add" and consts["BITS"] == 4
    )
    n, k = 64, consts["K"] or 64
    x, w = np.zeros(k), np.zeros((n, k // 8), np.uint32)
    x[:3], w[:, 0] = (128, 2.0**-9, 1), 0x110
    groups = (n, k // 64)
    slots = {
        "x": x.astype("f2") if ACT_TYPE == "half" else bf16_bits(x),
        "step": np.array([0, 0, 1, 0, 0, 0], np.uint32),
        "w": w.reshape(-1),
        "scales": bf16_bits(np.ones(groups)),
        "biases": bf16_bits(np.zeros(groups)),
        "y": np.zeros(n, np.float32),
    }
    case = Case("integers", {"rows": 1, "n": n, "k": k}, consts, slots, {"y": 0})
    y = run(device, KERNELS["qmv_add"], case)["y"]
    if not np.isin(y, (1.0, 1 + 2.0**-9)).all():
        raise ValueError(f"qmv_add: a product of three terms is {y[0]}")
    return bool((y == 1).all())


def compare(kernel: Mapping[str, Any], case: Case, after: Mapping[str, Array], device: str) -> Comparison:
    """Compares what a launch wrote on a device with the reference.

    Raises:
        StrayWriteError: something was written that must be kept.
    """
    before = memory_of(kernel, case)
    integers = kernel["name"] in PRODUCTS and multiplies_integers(device)
    outs = expected(kernel, case.args, case.consts, before, CONSTANTS, integers=integers)
    written = {slot["name"]: slot["type"] for slot in kernel["slots"] if slot["written"]}
    if not set(outs) == set(written) == set(case.ulps):
        raise ValueError(f"the reference of {kernel['name']} writes other slots")
    result = Comparison()
    for name, kind in written.items():
        try:
            found = judge(kind, outs[name], before[name], after[name], case.ulps[name])
        except StrayWriteError as fault:
            raise StrayWriteError(f"{name}: {fault}") from fault
        result.worst = max(result.worst, found.worst)
        result.nmse = larger(result.nmse, found.nmse)
        result.error = larger(result.error, found.error)
        if not result.reason and not found.worst <= 1:
            result.reason = f"{name}{found.text}"
        elif not result.reason and not found.typical <= MOST_TYPICAL:
            result.reason = f"{name}: errors have a pattern"
    return result


def larger(a: float, b: float) -> float:
    """The larger of two numbers; not a number if one of them is none."""
    return float(np.maximum(a, b))


def same_bits(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    """Whether two launches wrote the same."""
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


@dataclass
class KernelResult:
    """What the cases of one variant of a kernel showed.

    Attributes:
        nmse: The worst mean square error over mean square of a written slot.
        error: The worst error, relative to the size of the terms that make up a value.
        allowed: The worst error, relative to what is allowed for it.
        memory: Whether nothing was written but what the kernel is to write.
        seconds: Time on the device, compiling included.
        reason: Why it is wrong; empty if it is not.
    """

    kernel: str
    variant: dict[str, int]
    cases: int = 0
    nmse: float = 0.0
    error: float = 0.0
    allowed: float = 0.0
    memory: bool = True
    seconds: float = 0.0
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether every case agreed."""
        return not self.reason


def check_kernel(device: str, name: str, consts: Mapping[str, int], *, small: bool) -> KernelResult:
    """Runs a variant of a kernel on all its cases, each twice; whatever goes wrong is the result's reason.

    Args:
        device: A device's own name, not "auto".
        name: Of the kernel.
        consts: Of the variant.
        small: Take sizes for slow devices.
    """
    result = KernelResult(name, dict(consts))
    case = None
    try:
        with np.errstate(all="ignore"):  # some builds of numpy report what never happened
            for case in cases(name, consts, small=small):
                result.cases += 1
                _check_case(result, device, case)
    except Exception as error:  # whatever it is, the next kernel is to have its turn
        result.memory = not isinstance(error, StrayWriteError) and "written outside" not in str(error)
        text = (
            f"{error}"
            if isinstance(error, (LilyError, StrayWriteError))
            else f"{type(error).__name__}: {error}"
        )
        if not result.reason or not result.memory:
            result.reason = f"{case.label}: {text}" if case is not None else text
    return result


def _check_case(result: KernelResult, device: str, case: Case) -> None:
    kernel = KERNELS[result.kernel]
    begin = time.perf_counter()
    after = run(device, kernel, case)
    again = run(device, kernel, case)
    result.seconds += time.perf_counter() - begin
    found = compare(kernel, case, after, device)
    result.allowed = larger(result.allowed, found.worst)
    result.nmse = larger(result.nmse, found.nmse)
    result.error = larger(result.error, found.error)
    if not result.reason and found.reason:
        result.reason = f"{case.label}: {found.reason}"
    if not result.reason and not same_bits(after, again):
        result.reason = f"{case.label}: a second run differs"
