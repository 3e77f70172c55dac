"""Looks at the numbers of a checkpoint: not finite ones, rows of zeros, ranges per kind of tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lily import _native
from lily.checkpoint import Checkpoint
from lily.doctor.checks import Check

Progress = Callable[[int, int], object]

_PREFIX = re.compile(r"^language_model\.(model\.)?(layers\.\d+\.)?")
_NAMED = 3  # tensors that a message names
# No working model has weights of this size, and act_t, to which prefill rounds weights, ends at 65504.
MOST_SCALE = 4096.0


@dataclass
class Kind:
    """The numbers of all tensors of one kind, such as the scales of every layer's router.

    smallest and largest are absolute values; zeros are left out of smallest.
    """

    tensors: int = 0
    values: int = 0
    zeros: int = 0
    smallest: float = float("inf")
    largest: float = 0.0

    def add(self, values: npt.NDArray[Any]) -> None:
        """Takes in one tensor's finite values."""
        sizes = np.abs(values)
        there = sizes[sizes > 0]
        self.tensors += 1
        self.values += values.size
        self.zeros += values.size - there.size
        if there.size:
            self.smallest = min(self.smallest, float(there.min()))
            self.largest = max(self.largest, float(there.max()))


def kind_of(name: str) -> str:
    """The name of a tensor without its layer."""
    return _PREFIX.sub("", name)


def check_weights(check: Check, checkpoint: Checkpoint, progress: Progress) -> None:
    """Fills a check with what the numbers show; one that is not finite is a reason to fail.

    The packed words of quantised matrices are read only where a row may be zero.
    """
    specs = _native.tensor_specs(_native.Config(**checkpoint.config))
    shapes = {spec.name: tuple(spec.shape) for spec in specs}
    arrays = {
        name: np.memmap(path, _dtype(dtype), "r", offset, shapes[name])
        for name, dtype, path, offset, _ in checkpoint.tensors
    }
    total = sum(array.nbytes for array in arrays.values() if array.dtype != np.uint32)
    done = 0
    kinds: dict[str, Kind] = {}
    wrong: dict[str, int] = {}
    large: dict[str, int] = {}
    zero_rows: dict[str, int] = {}
    for name, array in arrays.items():
        if array.dtype == np.uint32:
            continue
        values = _values(array)
        finite = np.isfinite(values)
        if not finite.all():
            wrong[name] = int(values.size - finite.sum())
            values = values[finite]
        kinds.setdefault(kind_of(name), Kind()).add(values)
        if name.endswith((".scales", ".biases")) and (count := int((np.abs(values) > MOST_SCALE).sum())):
            large[name] = count
        if name.endswith(".biases") and (count := _zero_rows(arrays, name.removesuffix(".biases"))):
            zero_rows[name.removesuffix(".biases")] = count
        done += array.nbytes
        progress(done, total)
    check.data = {
        "tensors": len(arrays),
        "kinds": {kind: asdict(found) for kind, found in sorted(kinds.items())},
        "not_finite": wrong,
        "too_large": large,
        "zero_rows": zero_rows,
    }
    check.details = [
        f"{kind:36} {found.smallest:9.2e} to {found.largest:9.2e}"
        + (f", {found.zeros} zeros" if found.zeros else "")
        for kind, found in sorted(kinds.items())
        if not kind.endswith(".biases")
    ]
    check.text = (
        f"{sum(kind.tensors for kind in kinds.values())} tensors of scales, biases, norms and the like"
    )
    if wrong:
        check.reason = f"{sum(wrong.values())} numbers are not finite, in {_listed(wrong)}"
    elif large:
        check.reason = f"{sum(large.values())} scales or biases are above {MOST_SCALE:g}, in {_listed(large)}"
    if zero_rows:
        check.warnings.append(
            f"{sum(zero_rows.values())} rows of weights are all zero, in {_listed(zero_rows)}; "
            "a padded vocabulary has some, other matrices should not"
        )


def _dtype(name: str) -> npt.DTypeLike:
    return {"U32": np.uint32, "BF16": np.uint16, "F32": np.float32}[name]


def _values(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array if array.dtype == np.float32 else (array.astype(np.uint32) << 16).view(np.float32)


def _zero_rows(arrays: Mapping[str, npt.NDArray[Any]], matrix: str) -> int:
    """Rows of w = q * scale + bias that are zero: no bias, and no scale or no q."""
    without = ~(arrays[f"{matrix}.biases"] & 0x7FFF).any(-1)
    rows = np.nonzero(without)
    if not rows[0].size:
        return 0
    unscaled = ~(arrays[f"{matrix}.scales"][rows] & 0x7FFF).any(-1)
    unset = ~arrays[f"{matrix}.weight"][rows].any(-1)
    return int((unscaled | unset).sum())


def _listed(counts: Mapping[str, int]) -> str:
    named = [f"{name} ({count})" for name, count in list(counts.items())[:_NAMED]]
    return ", ".join(named) + (f" and {len(counts) - _NAMED} more tensors" if len(counts) > _NAMED else "")
