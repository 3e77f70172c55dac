"""The devices that kernels are tested on, and what to test there."""

from __future__ import annotations

import pathlib
import re

from lily import _native, cuda
from lily.doctor.kernels import KERNELS

cuda.prepare()
# cpu has SIMD width 1, the others 32: they multiply tiles by tensor operations (cpu32) or simdgroup_matrix.
# cudam is cuda without the instructions of warpgroups.
CUDA = ("cuda", "cudam") if _native.cuda_problem() is None else ()
DEVICES = ("cpu", "cpu32", "cpu32s", *(name for name in _native.devices() if name == "metal"), *CUDA)
TILES_ONLY = ("cpu32s", "cudam")  # differ from another device in nothing but tiles
SHADERS = pathlib.Path(__file__).resolve().parent.parent / "shaders"
TILES = re.compile(r'^#include "(attend_)?tile\.h"', re.M)
TILE_FILES = {path.name for path in SHADERS.glob("*.metal") if TILES.search(path.read_text(encoding="utf-8"))}
TILE_KERNELS = sorted(name for name, k in KERNELS.items() if k["where"].partition(":")[0] in TILE_FILES)


def variants(device: str) -> list[tuple[str, dict[str, int]]]:
    """What to test on a device: (kernel, consts)."""
    return [
        (name, consts)
        for name, consts in _native.variants(device)
        if device not in TILES_ONLY or name in TILE_KERNELS
    ]
