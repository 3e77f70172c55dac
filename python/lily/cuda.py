"""What the CUDA device finds on a machine: a run-time compiler in a Python package, a place for its results.

The native core opens libnvrtc by name. The packages nvidia-cuda-nvrtc (CUDA 13) and nvidia-cuda-nvrtc-cu12
put it where no loader looks; loaded from there first, it is found by that name.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

from lily import _native
from lily.files import cache_folder

_PACKAGES = ("nvidia.cu13", "nvidia.cuda_nvrtc")
_loaded: list[ctypes.CDLL] = []


def prepare() -> None:
    """Make compilers known to the native core; compiled kernels are kept in the user's cache folder."""
    try:
        _native.set_cuda_cache(str(cache_folder() / "cuda"))
    except (RuntimeError, UnicodeError):  # there is no such folder, or it has no name
        _native.set_cuda_cache("")
    if _loaded:
        return
    for folder in _folders():
        # A compiler opens its builtins by name too, so they come first.
        paths = [*sorted(folder.glob("libnvrtc-builtins.so*")), *sorted(folder.glob("libnvrtc.so.*"))]
        try:
            _loaded.extend([ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in paths])
        except OSError as error:  # the system may have another one
            logging.getLogger("lily").warning("%s: %s", folder, error)


def _folders() -> Iterator[Path]:
    for package in _PACKAGES:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for place in (found.submodule_search_locations if found else None) or ():
            yield Path(place) / "lib"
