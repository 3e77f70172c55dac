"""Lily beside other engines on the same machine, in turn."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lily.bench.decode import warm_up
from lily.bench.gguf_file import synthetic_gguf
from lily.bench.machine import describe_machine
from lily.bench.medians import median_interval
from lily.bench.runners import Progress
from lily.bench.synthetic import full_size
from lily.bench.worker import Worker, WorkerError
from lily.errors import LilyError

ROUND_SECONDS = 4.0  # an engine that is slower decodes fewer tokens a round, at least 2
_FEWEST = 2
PROMPT_SECONDS = 60.0  # an engine that takes longer for a prompt is not measured with it
_OURS = "lily.bench.runners:LilyRunner"


@dataclass(frozen=True)
class Subject:
    """What is run.

    Attributes:
        folder: The checkpoint.
        layers: Layers of a checkpoint of random weights; None for any other.
        vocab: Tokens it knows.
    """

    folder: Path
    layers: int | None
    vocab: int


class LeftOutError(Exception):
    """A peer does not take part."""


Prepare = Callable[[Subject, Progress | None], Path]
_Act = Callable[[str, int], float | None]  # of an engine, in a round: its speed


def _checkpoint(subject: Subject, progress: Progress | None) -> Path:
    return subject.folder


def _gguf(subject: Subject, progress: Progress | None) -> Path:
    if subject.layers is None:
        raise LeftOutError("there is a GGUF file of random weights only (--model synthetic:LAYERS)")

    def written(done: int, total: int) -> None:
        if progress is not None:
            progress("writing random weights for llama.cpp", "bytes", done, total)

    return synthetic_gguf(full_size(subject.layers), written)


@dataclass(frozen=True)
class Peer:
    """An engine Lily is compared with.

    Attributes:
        name: As it is printed.
        runner: "module:Class" of a Runner.
        modules: What has to be installed.
        install: The command that does it.
        prepare: Returns the path the runner opens; raises LeftOutError if there is none.
    """

    name: str
    runner: str
    modules: tuple[str, ...]
    install: str
    prepare: Prepare


PEERS = (
    Peer(
        "mlx-lm",
        "lily.bench.runners:MlxRunner",
        ("mlx", "mlx_lm"),
        "pip install 'mlx[cpu]' mlx-lm",
        _checkpoint,
    ),
    Peer(
        "llama.cpp",
        "lily.bench.runners:LlamaRunner",
        ("llama_cpp", "gguf"),
        "pip install llama-cpp-python gguf",
        _gguf,
    ),
)


@dataclass
class _Race:
    """The engines that are still in it, and why others are not."""

    workers: dict[str, Worker] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def call(self, name: str, act: Callable[[Worker], Any]) -> Any:
        """Let an engine do something; None if a peer fails, which ends its part."""
        try:
            return act(self.workers[name])
        except WorkerError as error:
            if name == "lily":
                raise
            self.drop(name, f"failed: {error}")
            return None

    def close(self) -> None:
        """End all of them."""
        for worker in self.workers.values():
            worker.close()

    def drop(self, name: str, reason: str) -> None:
        """Go on without a peer."""
        self.reasons[name] = reason
        if name in self.workers:
            self.workers.pop(name).close()


def compare(
    subject: Subject,
    *,
    device: str,
    threads: int,
    context: int,
    tokens: int,
    pairs: int,
    prefill: Sequence[int] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure Lily and its peers in turn and return speeds and ratios, as JSON types.

    Args:
        subject: The model.
        device: Lily's device, "cpu" or "cpu32"; peers run on the processor.
        threads: Threads of Lily and llama.cpp; 0 is one for each core. mlx-lm chooses itself.
        context: Tokens that are there when the first round of decode begins; each round begins where Lily
            ended the one before, for all engines.
        tokens: Tokens of a round. A slow engine decodes as many of them as 4 seconds allow.
        pairs: Rounds.
        prefill: Lengths of prompts that are measured too, with the engines that take at most a minute.
        progress: Called while weights are read, prompts are prefilled, and after each round.

    Raises:
        LilyError: Lily itself failed.
    """
    machine = describe_machine()
    room = max([context + tokens * pairs, *(count + 1 for count in prefill)])
    race = _Race()
    with contextlib.ExitStack() as stack:
        stack.callback(race.close)
        _start(race, subject, device, threads, room, progress)
        cases = []
        known: dict[str, float] = {}
        for count in prefill:
            act, names, slow = _prefill(race, count, known)
            speeds = _rounds(race, f"prefill of {count} tokens", pairs, names, act, progress)
            summary = _summary(speeds)
            cases.append({"case": "prefill", "tokens": count, "engines": summary, "left_out": slow})
        counts = _warm_up(race, context, tokens)
        act = _decode(race, context, tokens, counts)
        speeds = _rounds(race, f"decode after {context} tokens", pairs, list(race.workers), act, progress)
        summary = _summary(speeds)
        for name, row in summary.items():
            row["tokens"] = counts[name]
        cases.append({"case": "decode", "context": context, "tokens": tokens, "engines": summary})
        for name, worker in race.workers.items():
            race.facts[name]["idle_load"] = worker.idle_load
    return {
        "machine": machine,
        "settings": {"context": context, "tokens": tokens, "pairs": pairs, "prefill": list(prefill)},
        "engines": {name: race.facts[name] for name in ("lily", *race.workers) if name in race.facts},
        "left_out": race.reasons,
        "cases": cases,
    }


def _start(
    race: _Race, subject: Subject, device: str, threads: int, room: int, progress: Progress | None
) -> None:
    """Begin Lily, which knows the number of threads, then every peer that can be."""
    settings: dict[str, Any] = {"model": str(subject.folder), "context": room}
    race.workers["lily"] = Worker(_OURS, {**settings, "device": device, "threads": threads}, progress)
    race.facts["lily"] = race.workers["lily"].facts()
    settings |= {"threads": int(race.facts["lily"]["device_info"]["threads"]), "vocab": subject.vocab}
    for peer in PEERS:
        missing = [name for name in peer.modules if importlib.util.find_spec(name) is None]
        if missing:
            race.drop(peer.name, f"not installed: no {' and no '.join(missing)} ({peer.install})")
            continue
        try:
            model = peer.prepare(subject, progress)
            race.workers[peer.name] = Worker(peer.runner, {**settings, "model": str(model)}, progress)
        except LeftOutError as error:
            race.drop(peer.name, str(error))
        except (LilyError, OSError) as error:
            race.drop(peer.name, f"failed: {error}")
        else:
            race.facts[peer.name] = race.call(peer.name, Worker.facts)


def _prefill(race: _Race, count: int, known: dict[str, float]) -> tuple[_Act, list[str], dict[str, str]]:
    """Return how an engine reads a prompt, the engines that do it in time, and why others are left out.

    `known` are the speeds at the length before, and becomes those at this one.
    """

    def act(name: str, _: int) -> float | None:
        seconds = race.call(name, lambda worker: worker.prefill(count))
        return None if seconds is None else count / seconds

    slow = {}
    for name in list(race.workers):
        if name == "lily" or name not in known or count <= PROMPT_SECONDS * known[name]:
            speed = act(name, 0)  # warms it up, too
            if speed is None:
                continue
            known[name] = speed
        if name != "lily" and count > PROMPT_SECONDS * known[name]:
            slow[name] = f"a prompt takes {count / known[name]:.0f} s"
    return act, [name for name in race.workers if name not in slow], slow


def _warm_up(race: _Race, context: int, tokens: int) -> dict[str, int]:
    """Bring every engine to the context and return how many tokens of a round it decodes."""
    counts = {}
    for name in list(race.workers):
        seconds = race.call(name, lambda worker: warm_up(worker, context))
        if seconds is not None:
            affordable = int(ROUND_SECONDS / statistics.mean(seconds)) if seconds else tokens
            counts[name] = min(tokens, max(_FEWEST, affordable))
    return counts


def _decode(race: _Race, context: int, tokens: int, counts: Mapping[str, int]) -> _Act:
    def act(name: str, index: int) -> float | None:
        def decode(worker: Worker) -> list[float]:
            worker.hold(context + index * tokens)
            return worker.decode(counts[name])

        seconds = race.call(name, decode)
        return None if seconds is None else counts[name] / sum(seconds)

    return act


def _rounds(
    race: _Race,
    label: str,
    pairs: int,
    names: Sequence[str],
    act: _Act,
    progress: Progress | None,
) -> dict[str, list[float]]:
    """Let these engines act once a round, another one first each time; return speeds of all that finished."""
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(pairs):
        left = [name for name in names if name in race.workers]
        first = index % len(left)
        for name in left[first:] + left[:first]:
            speed = act(name, index)
            if speed is not None:
                speeds[name].append(speed)
        if progress is not None:
            progress(label, "rounds", index + 1, pairs)
    return {name: speeds[name] for name in names if name in race.workers}


def _summary(speeds: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return median and rounds of every engine, and what Lily is to it: median ratio and its interval."""
    summary = {}
    for name, rounds in speeds.items():
        row: dict[str, Any] = {"tokens_per_second": statistics.median(rounds), "rounds": rounds}
        if name != "lily":
            ratios = [ours / theirs for ours, theirs in zip(speeds["lily"], rounds, strict=True)]
            row["ratio"] = statistics.median(ratios)
            row["interval"] = median_interval(ratios)
        summary[name] = row
    return summary
