"""Forks, checkpoints, and sessions in files."""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lily import CheckpointError, ContextFullError, Engine, LilyError, OutOfMemoryError, Session
from lily.checkpoint import open_checkpoint
from make_checkpoint import Shape, make_checkpoint
from replies import STORY

PAGE = 256
LONG = [(i * 7919) % 4000 for i in range(700)]


@pytest.fixture(scope="module")
def many(device: str) -> Iterator[Engine]:
    """An engine with room for many sessions."""
    with Engine("demo", device=device, prefill_chunk=64, context=1024, max_sessions=12) as engine:
        yield engine


@pytest.fixture
def told(many: Engine) -> Iterator[Session]:
    """A session with a prompt and a few tokens, in the middle of a page."""
    with many.session() as session:
        list(session.prefill(LONG[:300]))
        list(session.step(3))
        yield session


def ids_of(session: Session, count: int, **options: Any) -> list[int]:
    return [token.id for token in session.step(count, **options)]


# fork


def test_fork__goes_on_as_the_original_does(told: Session) -> None:
    with told.fork() as fork:
        assert np.array_equal(fork.tokens, told.tokens)
        assert np.array_equal(fork.logits, told.logits)
        assert ids_of(fork, 8) == ids_of(told, 8)
        assert np.array_equal(fork.logits, told.logits)


@pytest.mark.parametrize("first", ["fork", "original"])
def test_fork__neither_sees_what_the_other_writes(many: Engine, told: Session, first: str) -> None:
    with many.session() as alone:
        list(alone.prefill(LONG[:300]))
        list(alone.step(3))
        expected = ids_of(alone, 12)
        logits = alone.logits
    with told.fork() as fork:
        reader, writer = (told, fork) if first == "fork" else (fork, told)
        list(writer.prefill(LONG[:90]))
        assert ids_of(reader, 12) == expected
        assert np.array_equal(reader.logits, logits)


def test_fork__of_steps_that_are_queued_ahead(told: Session) -> None:
    """The original's device may be ahead of what was read; the fork starts at what was read."""
    stream = told.step(20)
    head = [next(stream).id for _ in range(2)]
    with told.fork() as fork:
        rest = [token.id for token in stream]
        assert fork.position == 305
        assert ids_of(fork, 18) == rest
    assert len(head) == 2


def test_fork__shares_pages_until_one_writes(told: Session) -> None:
    page = told.memory["own"] // 2
    assert told.memory == {"own": 2 * page, "shared": 0}
    with told.fork() as fork:
        assert told.memory == fork.memory == {"own": 0, "shared": 2 * page}
        list(fork.step(1))
        assert told.memory == fork.memory == {"own": page, "shared": page}
    assert told.memory == {"own": 2 * page, "shared": 0}


def test_fork__keeps_sampling_penalties_and_seed(told: Session) -> None:
    options: dict[str, Any] = {
        "temperature": 0.9,
        "seed": 5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
    }
    list(told.step(20, **options))
    with told.fork() as fork:
        assert ids_of(fork, 20, **options) == ids_of(told, 20, **options)


def test_fork__of_nothing_and_of_a_closed_session(many: Engine) -> None:
    session = many.session()
    with session.fork() as fork:
        assert fork.position == 0
        list(fork.prefill(STORY))
    session.close()
    with pytest.raises(LilyError, match="the session is closed"):
        session.fork()


def test_fork__completes_a_prompt_first(many: Engine) -> None:
    with many.session() as session:
        held = session.prefill(LONG[:200])
        with session.fork() as fork:
            assert fork.position == 200
        held.close()


def test_fork__limit_is_an_error_that_changes_nothing(device: str) -> None:
    with Engine("demo", device=device, context=128, max_sessions=1) as engine, engine.session() as session:
        list(session.prefill(STORY))
        with pytest.raises(LilyError, match="all 1 sessions are in use"):
            session.fork()
        assert ids_of(session, 1)


def test_fork__many_interleaved_are_as_alone(device: str) -> None:
    """A hundred forks of one session, a token of each in turn."""
    with Engine("demo", device=device, prefill_chunk=64, context=512, max_sessions=102) as engine:
        root = engine.session()
        list(root.prefill(LONG[:290]))
        options: list[dict[str, Any]] = [{"temperature": 1.0, "seed": seed} for seed in range(100)]
        alone = []
        for chosen in options:
            with root.fork() as fork:
                alone.append(ids_of(fork, 5, **chosen))
        forks = [root.fork() for _ in options]
        streams = [fork.step(5, **chosen) for fork, chosen in zip(forks, options, strict=True)]
        rows = [[next(stream).id for stream in streams] for _ in range(5)]
        assert [list(column) for column in zip(*rows, strict=True)] == alone
        assert len({tuple(tokens) for tokens in alone}) > 50


@pytest.mark.timing
@pytest.mark.filterwarnings("ignore:context .* exceeds:UserWarning")
def test_fork__of_8000_tokens_takes_a_moment(device: str) -> None:
    with Engine("demo", device=device, context=8192, max_sessions=2) as engine, engine.session() as session:
        list(session.prefill([7] * 8000))
        times = []
        for _ in range(9):
            start = time.perf_counter()
            fork = session.fork()
            times.append(time.perf_counter() - start)
            assert fork.memory["own"] == 0
            fork.close()
        assert statistics.median(times) <= 0.005


# snapshot and rewind


def test_rewind__logits_and_tokens_are_those_of_that_time(told: Session) -> None:
    logits, tokens = told.logits, told.tokens
    assert told.snapshot() == 303
    first = ids_of(told, 30)
    after = told.logits
    assert told.checkpoints == (0, 303)
    told.rewind(303)
    assert np.array_equal(told.logits, logits)
    assert np.array_equal(told.tokens, tokens)
    assert ids_of(told, 30) == first
    assert np.array_equal(told.logits, after)


def test_rewind__to_one_of_several_and_on(told: Session) -> None:
    marks = []
    for _ in range(3):
        marks.append((told.snapshot(), told.logits))
        list(told.step(40))
    for position, logits in reversed(marks):
        told.rewind(position)
        assert np.array_equal(told.logits, logits)
    assert told.checkpoints == (0, 303)
    other = ids_of(told, 10, temperature=2.0, seed=1)
    told.rewind(303)
    assert ids_of(told, 10, temperature=2.0, seed=1) == other
    told.rewind(0)
    assert told.position == 0
    with pytest.raises(LilyError, match="no logits"):
        _ = told.logits


def test_rewind__to_no_checkpoint_changes_nothing(told: Session) -> None:
    logits = told.logits
    for position in (1, 302, 304):
        with pytest.raises(ValueError, match=f"position {position} is not one of the session's checkpoints"):
            told.rewind(position)
    for wrong in (-1, 1 << 40, None, 1.5):
        with pytest.raises(ValueError, match="position must be"):
            told.rewind(wrong)  # type: ignore[arg-type]
    told.rewind(303)
    assert np.array_equal(told.logits, logits)


def test_rewind__makes_older_iterators_out_of_date(told: Session) -> None:
    told.snapshot()
    stream = told.step(5)
    next(stream)
    told.rewind(303)
    with pytest.raises(LilyError, match="out of date"):
        next(stream)


def test_rewind__penalties_count_what_is_left(told: Session) -> None:
    options: dict[str, Any] = {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5}
    list(told.step(6, **options))
    position = told.snapshot()
    expected = ids_of(told, 15, **options)
    told.rewind(position)
    assert ids_of(told, 15, **options) == expected


def test_rewind__is_to_the_sessions_own_state(many: Engine, told: Session) -> None:
    """Another session with the same tokens, which it has read and not chosen, has other bits."""
    ids = told.tokens.tolist()
    with many.session() as other:
        list(other.prefill(ids))
        other.snapshot()
        assert 303 not in told.checkpoints
        logits = told.logits
        assert not np.array_equal(other.logits, logits)
        told.snapshot()
        expected = ids_of(told, 6, temperature=0.0, frequency_penalty=1.0)
        told.rewind(303)
        assert np.array_equal(told.logits, logits)
        assert ids_of(told, 6, temperature=0.0, frequency_penalty=1.0) == expected


def test_prefill__that_does_not_fit_holds_no_pages(device: str) -> None:
    options: dict[str, Any] = {
        "context": 1024,
        "prefill_chunk": 1024,
        "max_sessions": 4,
        "snapshot_memory": 0,
    }
    limit = Engine.plan_memory("demo", device=device, **options)["total"]
    with Engine("demo", device=device, memory_limit=limit, **options) as engine:
        a, b, c = (engine.session() for _ in range(3))
        list(a.prefill(LONG[:200]))
        with pytest.raises(OutOfMemoryError):
            list(b.prefill(LONG[:700] + LONG[:300]))
        assert b.position == 0
        assert list(c.prefill(LONG[:200]))


def test_load__calls_out_of_order_are_refused(many: Engine, told: Session) -> None:
    """The native ones that a file is read with."""
    ids = np.arange(300, dtype=np.int32)
    native = many._core.native().session()
    with pytest.raises(LilyError, match="nothing is being loaded"):
        native.end_load(ids, 0)
    with pytest.raises(LilyError, match="nothing is being loaded"):
        told._native.write_part(0, 0, b"x")
    native.begin_load(100)
    for call in (lambda: native.prefill(ids), lambda: native.step(0), native.reset, native.logits):
        with pytest.raises(LilyError, match="is being loaded"):
            call()
    for part, offset, count in ((0, 1 << 40, 1), (0, (1 << 64) - 1, 1), (10**6, 0, 1), (0, 0, 1 << 22)):
        with pytest.raises((ValueError, IndexError)):
            native.write_part(part, offset, bytes(count))
    for wrong in (ids, ids[:99], ids[:0]):
        with pytest.raises((LilyError, ValueError)):
            native.end_load(wrong, 0)
    native.end_load(ids[:100], 0)
    with pytest.raises(ValueError, match="too many bytes"):
        native.read_part(0, 0, 1 << 36)
    native.close()
    assert ids_of(told, 2)


def test_snapshot__no_room_is_an_error_and_pins_hold(device: str) -> None:
    with Engine("demo", device=device, context=256, max_sessions=1, snapshot_memory=0) as engine:
        list(engine.prefill(STORY))
        with pytest.raises(OutOfMemoryError, match="snapshot_memory"):
            engine._default_session().snapshot()
        assert [token.id for token in engine.step(2)]
    size = Engine.plan_memory("demo")["snapshots"] // 16
    with (
        Engine("demo", device=device, context=256, max_sessions=1, snapshot_memory=2 * size) as engine,
        engine.session() as session,
    ):
        list(session.prefill(STORY))
        for _ in range(2):
            session.snapshot()
            session.snapshot()
            list(session.step(2))
        with pytest.raises(OutOfMemoryError, match="snapshot_memory"):
            session.snapshot()
        session.rewind(session.checkpoints[1])
        list(session.step(3))
        session.snapshot()
        assert len(session.checkpoints) == 3


def test_memory__pages_of_snapshots_make_room(device: str) -> None:
    """Snapshots hold pages that no session has; a session that needs them gets them."""
    with Engine("demo", device=device, context=1024, prefill_chunk=64, max_sessions=1) as engine:
        for turn in range(4):
            list(engine.generate([turn + 5] * 1000, max_tokens=2))
        assert engine.info()["cache"]["snapshots"] >= 1
        with pytest.raises(LilyError, match="sessions are in use"):
            engine.session()


# files


def test_file__goes_on_with_the_same_bits(many: Engine, told: Session, tmp_path: Path) -> None:
    path = tmp_path / "a session.lily"
    seen: list[tuple[int, int]] = []
    told.save(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert os.listdir(tmp_path) == [path.name]
    with many.load_session(path) as loaded:
        assert np.array_equal(loaded.tokens, told.tokens)
        assert np.array_equal(loaded.logits, told.logits)
        options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "presence_penalty": 0.4}
        assert ids_of(loaded, 20, **options) == ids_of(told, 20, **options)
        assert np.array_equal(loaded.logits, told.logits)


def test_file__of_one_device_on_another(told: Session, tmp_path: Path, device: str) -> None:
    told.save(tmp_path / "s")
    other = "cpu32" if device == "cpu" else "cpu"
    with Engine("demo", device=other, context=512, max_sessions=1) as engine:
        session = engine.load_session(tmp_path / "s")
        assert np.array_equal(session.logits, told.logits)
        list(session.step(1))
        list(told.step(1))
        assert np.abs(session.logits - told.logits).max() < 0.5


def test_file__replaces_an_older_one_only_when_complete(told: Session, tmp_path: Path) -> None:
    path = tmp_path / "s"
    told.save(path)
    before = path.read_bytes()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        told.save(path, progress=interrupt)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["s"]
    assert ids_of(told, 2)


def test_file__a_disk_that_is_full(told: Session, tmp_path: Path) -> None:
    """A limit of file size is met as a full disk is: write() fails after a part."""
    path = tmp_path / "s"
    path.write_bytes(b"older")
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            told.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"older"
    assert os.listdir(tmp_path) == ["s"]
    told.save(path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_file__errors_of_the_system_are_its_own(told: Session, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        told.save(tmp_path / "no" / "such" / "folder")
    with pytest.raises(IsADirectoryError):
        told.save(tmp_path)
    told.rewind(0)
    with pytest.raises(LilyError, match="no token"):
        told.save(tmp_path / "empty")


def test_file__calls_in_the_callback_are_refused(told: Session, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: told.step(1).__next__(),
        lambda: told.rewind(0),
        lambda: told.prefill(STORY),
        lambda: next(told.generate(STORY)),
        told.reset,
        told.close,
        told.fork,
    ]
    for call in calls:
        with pytest.raises(LilyError, match="is being saved"):
            told.save(tmp_path / "s", progress=lambda done, total, call=call: call())  # type: ignore[misc]
    assert os.listdir(tmp_path) == []
    assert ids_of(told, 2)


def test_file__of_any_name_and_kind(told: Session, many: Engine, tmp_path: Path) -> None:
    for name in ("é" * 120 + ".st", "日" * 80):
        told.save(tmp_path / name)
        many.load_session(tmp_path / name).close()
    path = tmp_path / "s"
    path.touch(0o600)
    (tmp_path / "link").symlink_to(path)
    told.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    many.load_session(path).close()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        told.save(tmp_path / "fifo")
    with pytest.raises(IsADirectoryError):
        told.save("")
    with pytest.raises(IsADirectoryError):
        told.save(f"{tmp_path}/new/")
    with pytest.raises(FileNotFoundError, match="none/x") as caught:
        told.save(str(tmp_path / "none" / "x"))
    assert caught.value.filename == str(tmp_path / "none" / "x")


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_file__that_does_not_fit_is_refused(many: Engine, told: Session, tmp_path: Path, device: str) -> None:
    refused = {
        "format": "not a session",
        "layout": "another version",
        "fingerprint": "another model",
        "crc32": "damaged",
    }
    for key, text in refused.items():
        told.save(tmp_path / "s")
        changed(tmp_path / "s", lambda header, key=key: header["__metadata__"].update({key: "x"}))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=text):
            many.load_session(tmp_path / "s")
    with Engine("demo", device=device, context=64, max_sessions=1) as small:
        told.save(tmp_path / "s")
        with pytest.raises(ContextFullError, match="303 tokens"):
            small.load_session(tmp_path / "s")
        small.session().close()


def test_fingerprint__tells_weights_and_configurations_apart(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", Shape())
    one = open_checkpoint(tmp_path / "one")
    assert one.fingerprint() == one.fingerprint()
    make_checkpoint(tmp_path / "same", Shape())
    assert open_checkpoint(tmp_path / "same").fingerprint() == one.fingerprint()
    make_checkpoint(tmp_path / "seed", Shape(), seed=1)
    assert open_checkpoint(tmp_path / "seed").fingerprint() != one.fingerprint()
    path = tmp_path / "one" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["rms_norm_eps"] = 2e-6
    path.write_text(json.dumps(config))
    assert open_checkpoint(tmp_path / "one").fingerprint() != one.fingerprint()


def test_file__truncated_anywhere_is_refused(many: Engine, told: Session, tmp_path: Path) -> None:
    path = tmp_path / "s"
    told.save(path)
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    ends = {length + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
    for end in sorted({0, 1, 7, 8, 9, length - 1, length} | {end - 1 for end in ends} | ends - {len(data)}):
        path.write_bytes(data[:end])
        with pytest.raises(CheckpointError):
            many.load_session(path)
    path.write_bytes(data + b"x")
    with pytest.raises(CheckpointError):
        many.load_session(path)
    assert many.info()["cache"]["sessions"] == 1 + (many._session is not None)


def test_file__one_bit_that_differs_is_noticed(many: Engine, told: Session, tmp_path: Path) -> None:
    path = tmp_path / "s"
    told.save(path)
    before = path.read_bytes()
    data = bytearray(before)
    rng = np.random.default_rng(0)
    for _ in range(40):
        at = int(rng.integers(8, len(data)))
        data[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            many.load_session(path).close()
        data[at] = before[at]


def test_file__that_changes_while_it_is_read(many: Engine, told: Session, tmp_path: Path) -> None:
    path = tmp_path / "s"
    told.save(path)

    def shrink(done: int, total: int) -> None:
        os.truncate(path, 5000)

    with pytest.raises(CheckpointError, match=r"truncated while it was read|checksum"):
        many.load_session(path, progress=shrink)
    told.save(path)
    with many.load_session(path) as loaded:
        assert loaded.position == 303
