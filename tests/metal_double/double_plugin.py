"""The software double of Metal for tests: pytest -p double_plugin --double width=32 order=1."""

from __future__ import annotations

import ctypes
import faulthandler
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import demo_model
from lily import _native


class Double:
    """The double's control interface; tests/metal_double/double.h explains the names."""

    def __init__(self, given: Mapping[str, int] | None = None) -> None:
        self._given = dict(given or {})
        library = ctypes.CDLL(_native.__file__)
        self._set, self._text, self._count = (
            library.lily_double_set,
            library.lily_double_set_text,
            library.lily_double_count,
        )
        self._reset = library.lily_double_reset
        for function in (self._set, self._text, self._count):
            function.restype = ctypes.c_int64
        self._set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        self._text.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self._count.argtypes = [ctypes.c_char_p]

    def set(self, name: str, value: int | str) -> None:
        """Change a setting."""
        if isinstance(value, str):
            assert self._text(name.encode(), value.encode()) == 0, name
        else:
            assert self._set(name.encode(), value) >= 0, name

    def fail(self, kind: str, nth: int = 1) -> None:
        """Let the nth call from now of a kind fail."""
        self.set(f"fail:{kind}", nth)

    def count(self, name: str) -> int:
        """Return a count."""
        value = int(self._count(name.encode()))
        assert value >= 0, name
        return value

    def reset(self) -> None:
        """Go back to the defaults, and to what the command line says."""
        self._reset()
        for name, value in self._given.items():
            self.set(name, value)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --double and --test-limit."""
    parser.addoption("--double", nargs="+", default=[], metavar="NAME=VALUE", help="settings, see double.h")
    parser.addoption(
        "--test-limit", type=float, default=0, help="seconds after which a test ends the process"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Apply the settings."""
    made(config).reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test that hangs say where, and fail."""
    if limit := item.config.getoption("--test-limit"):
        faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__ or 2)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def made(config: pytest.Config) -> Double:
    """Return the double with the settings of the command line."""
    pairs = (word.partition("=") for word in config.getoption("--double", default=[]))
    return Double({name: int(value) for name, _, value in pairs})


LEFT = [
    *("devices", "queues", "libraries", "pipelines", "archives", "residency_sets", "buffers"),
    *("command_buffers", "encoders"),
]
LOST = ("autoreleased_without_pool", "skipped_pools")


@pytest.fixture(autouse=True)
def nothing_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves objects in no pool, or a pool open."""
    control = made(request.config)
    before = {name: control.count(name) for name in LOST}
    yield
    assert {name: control.count(name) for name in LOST} == before


@pytest.fixture
def double(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Double]:
    """The double with a cache folder of the test's own; nothing may be left when the test ends."""
    control = made(request.config)
    control.reset()
    control.set("caches_directory", str(tmp_path / "caches"))
    before = {kind: control.count(f"live_{kind}") for kind in LEFT}
    yield control
    control.set("hold", 0)
    left = {kind: control.count(f"live_{kind}") - before[kind] for kind in LEFT}
    lost = {name: control.count(name) for name in LOST}
    control.reset()
    assert not any(left.values()), left
    assert not any(lost.values()), lost


@pytest.fixture(scope="session")
def expected() -> list[int]:
    """What the CPU device writes after demo_model.PROMPT; the margins of these tokens are wide."""
    with demo_model.open_engine(device="cpu") as engine:
        return demo_model.story(engine)
