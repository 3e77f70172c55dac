"""Fixtures of the Python tests: the demo model on a device, and its tokenizer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import lily
from lily.checkpoint import DEMO


def pytest_configure() -> None:
    """In the background of a shell Ctrl-C is ignored, and programs that tests start would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --device."""
    parser.addoption("--device", default="cpu", help="device the demo model runs on (default: cpu)")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Device given on the command line."""
    return str(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """Folder of the demo checkpoint."""
    return DEMO


@pytest.fixture(scope="session")
def engine(device: str) -> Iterator[lily.Engine]:
    """The demo model; tests leave no unfinished generation in it."""
    with lily.Engine("demo", device=device, prefill_chunk=64, context=1024) as engine:
        yield engine


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> lily.Tokenizer:
    """Tokenizer of the demo model."""
    return lily.Tokenizer(demo_folder)


@pytest.fixture
def session(engine: lily.Engine) -> Iterator[lily.Session]:
    """An empty session."""
    with engine.session() as session:
        yield session
