"""What shows that a selector exists on macOS 15, the oldest system that Lily runs on.

Strongest first: a protocol that Apple's compiler wrote down, with all types (check_headers.py has compared
those); a note of pyobjc's about a method of a class; the same selector sent by a program that was built with
an SDK up to 15.5 from Objective-C. The rest is known from metal-cpp alone and is listed here by name, so that
it can grow by intent only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import check_headers
import metal_cpp
import pyobjc_tables
import wheels
from objc_metadata import Image, merge

# Selectors that only Apple's metal-cpp of macOS 15 shows, with the class that has them there.
METAL_CPP_ONLY = {
    "code": "NSError",
    "operatingSystemVersionString": "NSProcessInfo",
    "processInfo": "NSProcessInfo",
    "setMathMode:": "MTLCompileOptions",
    "setMaxTotalThreadsPerThreadgroup:": "MTLComputePipelineDescriptor",
    "setUrl:": "MTLBinaryArchiveDescriptor",
}
# Declared by Apple's objc/NSObject.h, which comes with the cross compiler.
ROOT_CLASS = {"alloc", "init", "new"}


@dataclass(frozen=True)
class Evidence:
    """Selectors by how they are known."""

    typed: frozenset[str]
    noted: frozenset[str]
    sent: frozenset[str]


def in_metal_cpp(selector: str, owner: str) -> bool:
    """Whether metal-cpp of macOS 15 declares a method of a class."""
    folder = wheels.metal_cpp(wheels.METAL_CPP_15) / ("Metal" if owner.startswith("MTL") else "Foundation")
    interface = metal_cpp.read(folder).interfaces.get(owner)
    return interface is not None and any(method.selector == selector for method in interface.methods)


@cache
def known() -> Evidence:
    """Gather the evidence from the wheels."""
    telling = (*check_headers.IMAGES[15], *wheels.PROGRAMS)
    images = [Image(path) for wheel in dict.fromkeys(telling) for path in wheels.images(wheel)]
    newer = [image.path.name for image in images if image.sdk > (15, 5)]
    if newer:
        raise SystemExit(f"built with an SDK newer than macOS 15.5: {', '.join(newer)}")
    protocols = merge(images).values()
    typed = {selector for p in protocols for selector in (*p.instance, *p.static)}
    notes = (
        pyobjc_tables.read(path).methods
        for wheel in check_headers.TABLES[15]
        for path in wheels.unpack(wheel).rglob("_metadata.py")
    )
    noted = {selector for methods in notes for _, selector in methods}
    sent = {selector for image in images for selector in image.selectors()}
    return Evidence(frozenset(typed), frozenset(noted), frozenset(sent))


def judge(selectors: set[str]) -> tuple[str, list[str]]:
    """Return a summary of how the selectors of an object are known, and what is wrong."""
    evidence = known()
    rest = selectors - ROOT_CLASS
    counts = []
    for group, how in (
        (evidence.typed, "with types"),
        (evidence.noted, "noted by pyobjc"),
        (evidence.sent, "sent by other programs"),
    ):
        counts.append(f"{len(rest & group)} {how}")
        rest -= group
    faults = [
        f"{s}: nothing shows that macOS 15 has this selector" for s in sorted(rest - METAL_CPP_ONLY.keys())
    ]
    faults += [f"{s}: listed in evidence.py without need" for s in sorted(METAL_CPP_ONLY.keys() - rest)]
    faults += [
        f"{selector}: not in metal-cpp's {owner}"
        for selector, owner in METAL_CPP_ONLY.items()
        if not in_metal_cpp(selector, owner)
    ]
    return ", ".join([*counts, f"{len(rest)} by metal-cpp alone ({', '.join(sorted(rest))})"]), faults
