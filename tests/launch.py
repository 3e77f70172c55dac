"""The devices that kernels are tested on, and what to test there."""

from __future__ import annotations

import pathlib

from lily import _native
from lily.doctor.kernels import KERNELS

# cpu has SIMD width 1, the others 32: they multiply tiles by tensor operations (cpu32) or simdgroup_matrix.
DEVICES = ("cpu", "cpu32", "cpu32s", *(name for name in _native.devices() if name == "metal"))
SHADERS = pathlib.Path(__file__).resolve().parent.parent / "shaders"
TILE_FILES = {p.name for p in SHADERS.glob("*.metal") if '#include "tile.h"' in p.read_text(encoding="utf-8")}
TILE_KERNELS = sorted(name for name, k in KERNELS.items() if k["where"].partition(":")[0] in TILE_FILES)


def variants(device: str) -> list[tuple[str, dict[str, int]]]:
    """What to test on a device: (kernel, consts). The two forms of width 32 differ in nothing but tiles."""
    return [
        (name, consts)
        for name, consts in _native.variants(device)
        if device != "cpu32s" or name in TILE_KERNELS
    ]
