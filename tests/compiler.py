"""The C++ compiler that the tests of generated and native code use."""

from __future__ import annotations

import shutil

import pytest


def compiler() -> str:
    """Path of a C++ compiler; the test is skipped, and says so, where there is none."""
    for name in ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    pytest.skip("no C++ compiler on this machine")
