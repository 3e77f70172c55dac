"""Matrix tiles: a row's result depends neither on the tiles' height nor on the rows that share the launch."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import numpy as np
import pytest

from launch import DEVICES, SHADERS, TILE_KERNELS, variants
from lily.doctor.cases import Case, make_case
from lily.doctor.inputs import NO_TOKEN, Dims
from lily.doctor.kernels import CONSTANTS, KERNELS, run
from lily.doctor.slots import STRUCTS, Array

ROWS, USED, EXPERTS = 70, 3, 5
SIZES = Dims(
    *(ROWS, ROWS, 300, 2, 128, 64, 64, 64),  # rows, live, position, sessions, k, n, inner, shared
    *(2, 1, 1, EXPERTS, USED),  # heads
)
WINDOWS = ((0, 1), (0, 9), (13, 46), (69, 70))  # rows that are also computed without the others
# Many steps of k, not a multiple of what any device takes at once, and last tiles that are not full.
DEEP = dataclasses.replace(SIZES, k=1088, n=192, inner=320)

METAL_THREADGROUP_BYTES = 32 << 10
TYPE_BYTES = {"float": 4, "uint": 4, "atomic_uint": 4, "act_t": 2}


def kinds(device: str) -> list[tuple[str, str, dict[str, int]]]:
    """The tile kernels of a device and their consts besides BM. One GROUP that divides no tile is enough."""
    found = []
    for name, consts in variants(device):
        rest = {key: value for key, value in consts.items() if key != "BM"}
        if name in TILE_KERNELS and rest.get("GROUP", 3) == 3 and (device, name, rest) not in found:
            found.append((device, name, rest))
    return found


def product_window(case: Case, first: int, last: int) -> Case:
    """Rows before the window belong to the step, but not to the slots."""
    rows = {name: case.slots[name][first:last] for name in ("x", "y") if name in case.slots}
    args = {**case.args, "rows": last - first, "first": int(case.args["first"]) + first}
    step = case.slots["step"].copy()
    step.view(STRUCTS["StepState"])["rows"] -= np.uint32(ROWS - last)
    return dataclasses.replace(case, args=args, slots={**case.slots, **rows, "step": step})


def attention_window(case: Case, first: int, last: int) -> Case:
    """Rows before the window are in the cache already."""
    step = case.slots["step"].copy()
    step.view(STRUCTS["StepState"])["rows"] = last - first
    step.view(STRUCTS["StepState"])["position"] += np.uint32(first)
    slots = {"q": case.slots["q"][:, first:last], "proj": case.slots["proj"][first:last], "step": step}
    return dataclasses.replace(case, args={**case.args, "rows": last - first}, slots={**case.slots, **slots})


def places(case: Case) -> tuple[Array, Array]:
    """Pair and expert of every place."""
    tiles = case.slots["tiles"][: int(case.slots["tile_count"][0])]
    return case.slots["pairs"], np.repeat(tiles[:, 0], tiles[:, 2])


def expert_window(case: Case, first: int, last: int) -> Case:
    """Pairs of other rows are left out, which moves the rest to other places."""
    pairs, experts = places(case)
    kept = (pairs // USED >= first) & (pairs // USED < last)
    height, counts = case.consts["BM"], np.bincount(experts[kept], minlength=EXPERTS)
    starts = np.cumsum(counts) - counts
    made = [
        (e, starts[e] + i, min(height, counts[e] - i), 0)
        for e in range(EXPERTS)
        for i in range(0, counts[e], height)
    ]
    tiles = np.full(((last - first) * USED // height + EXPERTS, 4), NO_TOKEN, np.uint32)
    tiles[: len(made)] = made
    slots = {"pairs": pairs[kept] - np.uint32(first * USED), "tiles": tiles}
    slots["tile_count"] = np.array([len(made)], np.uint32)
    if "x" in case.slots:
        slots["x"] = case.slots["x"][first:last]
    else:
        slots["h"] = case.slots["h"][kept]
    return dataclasses.replace(case, args={**case.args, "rows": last - first}, slots={**case.slots, **slots})


def window(case: Case, name: str, first: int, last: int) -> Case:
    make = {"qmm": product_window, "attention": attention_window, "expert": expert_window}
    return make[name.partition("_")[0]](case, first, last)


def results(device: str, name: str, case: Case) -> Array:
    """What a launch wrote, as [rows, bytes]."""
    after = run(device, KERNELS[name], case)
    rows = int(case.args["rows"])
    if name != "expert_mm_gate_up":
        return after["y"].reshape(rows, -1).view(np.uint8)
    by_pair = np.empty((rows * USED, after["h"].size // (rows * USED)), after["h"].dtype)
    by_pair[places(case)[0]] = after["h"].reshape(by_pair.shape)
    return by_pair.reshape(rows, -1).view(np.uint8)


ALL_KINDS = [kind for device in DEVICES for kind in kinds(device)]


@pytest.mark.parametrize(("device", "name", "rest"), ALL_KINDS, ids=str)
def test_a_row_does_not_depend_on_its_company(device: str, name: str, rest: dict[str, int]) -> None:
    compare_company(device, name, rest, SIZES, WINDOWS)


@pytest.mark.parametrize(
    ("device", "name", "rest"), [kind for kind in ALL_KINDS if not kind[1].startswith("attention")], ids=str
)
def test_nor_in_deep_products(device: str, name: str, rest: dict[str, int]) -> None:
    compare_company(device, name, rest, DEEP, WINDOWS[2:3])


def compare_company(
    device: str, name: str, rest: dict[str, int], sizes: Dims, windows: Iterable[tuple[int, int]]
) -> None:
    expected = None
    for variant, consts in variants(device):
        if variant != name or not rest.items() <= consts.items():
            continue
        case = make_case(name, consts, "company", sizes, "normal", 1)
        whole = results(device, name, case)
        expected = whole if expected is None else expected
        np.testing.assert_array_equal(whole, expected, err_msg=f"{consts}")
        for first, last in windows:
            part = results(device, name, window(case, name, first, last))
            np.testing.assert_array_equal(part, whole[first:last], err_msg=f"{consts} {first}-{last}")


def test_both_forms_of_a_tile_have_the_same_bits() -> None:
    """Where both add up in ascending k, as on the CPU."""
    for _, name, rest in kinds("cpu32s"):
        consts = {**rest, "BM": 32} if "BM" in (c["name"] for c in KERNELS[name]["consts"]) else rest
        case = make_case(name, consts, "forms", SIZES, "normal", 1)
        tensor, simdgroup = (results(device, name, case) for device in ("cpu32", "cpu32s"))
        np.testing.assert_array_equal(simdgroup, tensor, err_msg=f"{name} {rest}")


def value_of(text: str, names: dict[str, int]) -> int:
    """The value of a constant expression, of which at most the outermost part is a choice."""
    if choice := re.fullmatch(r"(.+) \? (.+) : (.+)", text):
        condition, yes, no = choice.groups()
        return value_of(yes if value_of(condition, names) else no, names)
    return int(eval(text.replace("/", "//"), {}, names))


FUNCTION = re.compile(r"^(?:template <uint \w+> )?constexpr uint (\w+)\(\) \{ return ([^;]+); \}", re.M)


def constants_of(text: str, names: dict[str, int]) -> dict[str, int]:
    """The names, and the constants that a shader file declares, at SIMD width 32."""
    names = {"SIMD_WIDTH": 32, **names}
    for name, value in re.findall(r"^constant constexpr uint (\w+) = ([^;]+);", text, re.M):
        names[name] = value_of(value, names)
    return names


def test_threadgroup_memory_is_what_metal_has() -> None:
    headers, functions = dict(CONSTANTS), dict[str, str]()
    for path in sorted(SHADERS.glob("*.h")):
        headers = constants_of(path.read_text(encoding="utf-8"), headers)
        functions |= dict(FUNCTION.findall(path.read_text(encoding="utf-8")))
    for name, consts in variants("cpu32"):
        kernel = KERNELS[name]
        text = (SHADERS / kernel["where"].partition(":")[0]).read_text(encoding="utf-8")
        body = re.search(rf"^KERNEL\({name}, .*?^}}", text, re.M | re.S)
        assert body is not None
        known = {**constants_of(text, headers), **consts}
        known |= {"SIMDS": kernel["simds"], "THREADS": kernel["simds"] * 32}
        total = 0
        for kind, size in re.findall(r"^    SHARED (\w+) \w+\[(.+)\];", body[0], re.M):
            size = re.sub(r"(\w+)(?:<\w+>)?\(\)", lambda call: f"({functions[call[1]]})", size)
            total += -(-TYPE_BYTES[kind] * value_of(size, known) // 16) * 16
        assert total <= METAL_THREADGROUP_BYTES, f"{name} {consts}: {total} bytes"
