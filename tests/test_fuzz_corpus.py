"""The fuzzers' inputs, and a few hundred changes of each target's, without a fuzzer."""

from __future__ import annotations

import random
import time
import zlib
from pathlib import Path

import pytest

from fuzz.mutation import mutated
from fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
CHANGES = 300
SECONDS = 5.0


def inputs(target: str) -> list[Path]:
    return sorted((CORPUS / target).iterdir())


def check(target: str, data: bytes, what: str) -> None:
    start = time.thread_time()
    try:
        TARGETS[target](data)
    except Exception as error:
        raise AssertionError(f"{target}, {what}: {data[:2000]!r}") from error
    assert time.thread_time() - start < SECONDS, f"{target}, {what}: {data[:2000]!r}"


def test_corpus__is_small() -> None:
    assert {path.name for path in CORPUS.iterdir()} == TARGETS.keys()
    for target in TARGETS:
        assert 0 < len(inputs(target)) <= 50
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) <= 200_000


@pytest.mark.parametrize("target", TARGETS)
def test_corpus__is_accepted_or_refused(target: str) -> None:
    for path in inputs(target):
        check(target, path.read_bytes(), path.name)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_corpus__changed_is_accepted_or_refused(target: str) -> None:
    rng = random.Random(zlib.crc32(target.encode()))
    seeds = [path.read_bytes() for path in inputs(target)]
    for index in range(CHANGES):
        check(target, mutated(seeds[index % len(seeds)], rng), f"change {index}")
