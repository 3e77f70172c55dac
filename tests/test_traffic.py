"""The kernel table's bytes per slot against accesses that are counted, at SIMD width 32.

The shaders are compiled with a call at every access to memory (native/count_accesses.cpp). A byte counts once
as read, if it was not written before, and once as written.
"""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from compiler import compiler
from lily import _native
from lily.doctor.cases import Case, cases, make_case
from lily.doctor.inputs import Dims
from lily.doctor.kernels import KERNELS, memory_of
from lily.doctor.slots import STRUCTS, Array

ROOT = pathlib.Path(__file__).resolve().parent.parent
READ, WRITTEN = 1, 2
# What decode launches, and sizes where all of it is in use.
DECODE = (
    *("embed_gather", "norm_qmv", "qmv_add", "delta_mix"),
    *("attention_decode", "attention_blocks", "attention_merge"),
    *("expert_mv_gate_up", "expert_mv_down", "rms_norm_last", "head_logits"),
)
FULL = Dims(1, 1, 1023, 2, 256, 64, 128, 64, 2, 2, 4, 4, 2, 256, 4160)
SMALL = ("tokens", "page_table")
GCC = [
    *("-fsanitize=kernel-address", "--param=asan-instrumentation-with-call-threshold=0"),
    *("--param=asan-stack=0", "--param=asan-globals=0"),
]
CLANG = [
    *("-fsanitize=kernel-address", "-mllvm", "-asan-instrumentation-with-call-threshold=0"),
    *("-mllvm", "-asan-stack=0", "-mllvm", "-asan-globals=0"),
]


class Run(ctypes.Structure):
    """CpuRun of cpu_object.h."""

    _fields_ = (
        ("slots", ctypes.POINTER(ctypes.c_void_p)),
        ("args", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
    )


GRID = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32))
RUN = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.POINTER(Run), ctypes.c_uint32, ctypes.c_uint32)


class Form(ctypes.Structure):
    """CpuKernel of cpu_object.h."""

    _fields_ = (("kernel", ctypes.c_uint32), ("consts", ctypes.c_uint32 * 4), ("grid", GRID), ("run", RUN))


class Object(ctypes.Structure):
    """CpuObject of cpu_object.h."""

    _fields_ = (
        ("table_hash", ctypes.c_uint64),
        ("width", ctypes.c_uint32),
        ("isa", ctypes.c_char_p),
        ("count", ctypes.c_uint32),
        ("kernels", ctypes.POINTER(Form)),
    )


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The shaders, with every access counted."""
    folder = tmp_path_factory.mktemp("counted")
    generator = [sys.executable, str(ROOT / "tools" / "kernel_table.py")]
    subprocess.run([*generator, "--shaders", str(ROOT / "shaders"), "--out-dir", str(folder)], check=True)
    shaders = sorted((ROOT / "shaders").glob("*.metal"))
    includes = "".join(f'#include "{path}"\n' for path in shaders)
    (folder / "cpu_shaders.gen.inc").write_text(includes, encoding="utf-8")
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    places = ("src/lily_native", "shaders", "shaders/host")
    common = [compiler(), "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-ffp-contract=off"]
    common += ["-fno-strict-aliasing", "-DLILY_WIDTH=32", '-DLILY_ISA="counted"', "-DLILY_TENSOR_OPS"]
    common += [f"-I{folder}", *(f"-I{ROOT / place}" for place in places)]
    objects = []
    for source, options in (
        ("shaders/host/cpu_object.cpp", CLANG if "clang" in version else GCC),
        ("shaders/host/fibers.cpp", []),
        ("tests/native/count_accesses.cpp", []),
    ):
        objects.append(str(folder / f"{pathlib.Path(source).stem}.o"))
        command = [*common, *options, "-c", str(ROOT / source), "-o", objects[-1]]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
    library = folder / "counted.so"
    subprocess.run([compiler(), "-shared", *objects, "-pthread", "-o", str(library)], check=True)
    found = ctypes.CDLL(str(library))
    found.lily_cpu_object.restype = ctypes.POINTER(Object)
    found.watch_slot.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)
    return found


def words(kernel: Mapping[str, Any], args: Mapping[str, float]) -> Array:
    """The args struct in memory."""
    values = [
        np.float32(args[a["name"]]) if a["type"] == "f" else np.uint32(args[a["name"]])
        for a in kernel["args"]
    ]
    return np.concatenate([np.array([value]).view(np.uint32) for value in values])


def traffic(
    library: ctypes.CDLL, name: str, case: Case
) -> Iterator[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Every slot of a launch: its name, and (read, written) bytes as told by the table and as counted."""
    told = _native.slot_traffic(name, dict(case.args), dict(case.consts))
    names = [slot["name"] for slot in KERNELS[name]["slots"]]
    yield from zip(names, told, count(library, name, case), strict=True)


def count(library: ctypes.CDLL, name: str, case: Case) -> list[tuple[int, int]]:
    """(read, written) bytes of every slot of a launch."""
    kernel = KERNELS[name]
    index = list(KERNELS).index(name)
    values = [case.consts[const["name"]] for const in kernel["consts"]] + [0] * 4
    found = library.lily_cpu_object().contents
    forms = (found.kernels[i] for i in range(found.count))
    form = next(f for f in forms if f.kernel == index and list(f.consts) == values[:4])
    slots = list(memory_of(kernel, case).values())
    args = words(kernel, case.args)
    run = Run((ctypes.c_void_p * len(slots))(*(slot.ctypes.data for slot in slots)), args.ctypes.data)
    form.grid(args.ctypes.data, run.grid)
    marks = [np.zeros(slot.nbytes, np.uint8) for slot in slots]
    before = [slot.copy() for slot in slots]
    library.watch_nothing()
    for slot, mark in zip(slots, marks, strict=True):
        library.watch_slot(slot.ctypes.data, slot.nbytes, mark.ctypes.data)
    error = form.run(ctypes.byref(run), 0, int(np.prod(run.grid)))
    library.watch_nothing()
    assert error is None
    # A store behind a load of the same place is not always instrumented, but it changes an element.
    for slot, old, mark in zip(slots, before, marks, strict=True):
        changed = slot.view(f"u{slot.itemsize}") != old.view(f"u{slot.itemsize}")
        mark[np.repeat(changed, slot.itemsize)] |= WRITTEN
    return [(int((mark & READ != 0).sum()), int((mark & WRITTEN != 0).sum())) for mark in marks]


def full_cache(case: Case) -> Case:
    """The same, but its session has no room for more tokens."""
    pages, table = case.args["session_pages"] - 1, case.slots["page_table"][:, :-1]
    slots = {**case.slots, "page_table": np.ascontiguousarray(table)}
    return dataclasses.replace(case, args={**case.args, "session_pages": pages}, slots=slots)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_no_more_than_told(name: str, counted: ctypes.CDLL) -> None:
    consts = next(consts for kernel, consts in _native.variants("cpu32") if kernel == name)
    for case in cases(name, consts, small=True):
        for slot, told, got in traffic(counted, name, case):
            assert got[0] <= told[0], f"{case.label}: {slot} is read"
            assert got[1] <= told[1], f"{case.label}: {slot} is written"


@pytest.mark.parametrize("name", DECODE)
def test_as_told_in_decode(name: str, counted: ctypes.CDLL) -> None:
    """All that a token's launches read and write, where every row, page and block is in use."""
    kernel = KERNELS[name]
    kinds = {slot["name"]: slot["type"] for slot in kernel["slots"]}
    consts = next(consts for other, consts in _native.variants("cpu32") if other == name)
    case = make_case(name, consts, "full", FULL, "normal", 0)
    if "page_table" in kinds:
        case = full_cache(case)
    if "blocks" in case.args:
        case = dataclasses.replace(case, args={**case.args, "blocks": FULL.position // FULL.block + 1})
        # The merge's last block is one that is not to be read.
        parts = {slot: case.slots[slot][:-1] for slot in ("sums", "stats") if slot in case.slots}
        case = dataclasses.replace(case, slots={**case.slots, **parts})
    row = (
        2 * 256 * case.args.get("kv_heads", 0)
    )  # the row's own place in the cache was written before it is read
    for slot, told, got in traffic(counted, name, case):
        if kinds[slot] in STRUCTS or slot in SMALL:
            continue
        assert got[0] == told[0] - (row if slot in ("k_cache", "v_cache") else 0), f"{slot} is read"
        # Test matrices have a row of zeros, which adds nothing.
        assert told[1] - (4 if got[0] else 0) <= got[1] <= told[1], f"{slot} is written"
