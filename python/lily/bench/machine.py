"""The machine a measurement was made on: its name, and how fast it copies memory."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from lily.engine import machine_memory

_COPIED = 1 << 30  # bytes of the source; the destination has as many
_PASSES = 5


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, bytes of memory, system, and how busy the machine is.

    "load" is the number of processes that could run, a mean of about a minute.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory": machine_memory(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        if platform.system() == "Darwin":
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.check_output(command, text=True).strip()
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except (OSError, subprocess.CalledProcessError):
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else platform.processor() or platform.machine()


def versions_of(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages; "unknown" for one that was not installed by pip."""

    def version_of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "unknown"

    return {package: version_of(package) for package in packages}


def copy_bandwidth(threads: int) -> float:
    """Return the bytes per second, read and written ones together, of copying memory; the best of 5 passes.

    A source of 1 GiB, or of 1/8 of the memory if that is less, is copied by this many threads at once.
    """
    size = min(_COPIED, (machine_memory() or 8 * _COPIED) // 8) // threads
    with ThreadPoolExecutor(threads) as pool:
        # Filled by the threads that copy, so that the pages are there, and near.
        parts = list(pool.map(lambda _: (np.ones(size, np.uint8), np.zeros(size, np.uint8)), range(threads)))

        def copy(part: tuple[Any, Any]) -> None:
            np.copyto(part[1], part[0])  # gives the GIL free

        seconds = []
        for _ in range(_PASSES):
            start = time.perf_counter()
            list(pool.map(copy, parts))
            seconds.append(time.perf_counter() - start)
    return 2 * size * threads / min(seconds)
