"""All references, and how one is run on the memory of a kernel's slots."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace as Space
from typing import Any

import numpy as np

from lily.doctor.reference import PLAIN_REFERENCES
from lily.doctor.reference_row import ROW_REFERENCES
from lily.doctor.slots import Array, Out, decode, shape_of

REFERENCES = {**PLAIN_REFERENCES, **{f.__name__: f for f in ROW_REFERENCES}}


def expected(
    kernel: Mapping[str, Any],
    args: Mapping[str, float],
    consts: Mapping[str, int],
    slots: Mapping[str, Array],
    constants: Mapping[str, int],
    *,
    integers: bool = False,
) -> dict[str, Out]:
    """Runs the reference of a kernel of the table on the memory of its slots.

    integers: the device multiplies 16-bit integers in quantised products.

    Raises:
        KeyError: the kernel has no reference.
    """
    names = {**constants, **{name: int(value) for name, value in args.items()}, **consts}
    views = Space()
    for slot in kernel["slots"]:
        shape = shape_of(slot["shape"], names)
        setattr(views, slot["name"], decode(slot["type"], slots[slot["name"]], shape))
    floats = {
        arg["name"]: np.float64(np.float32(args[arg["name"]])) for arg in kernel["args"] if arg["type"] == "f"
    }
    return REFERENCES[kernel["name"]](views, Space(**{**args, **floats}), Space(**consts, integers=integers))
