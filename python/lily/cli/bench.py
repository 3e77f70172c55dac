"""lily bench: how fast decode and prefill are, alone and beside other engines."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily.cli.options import add_command, add_model_options, whole
from lily.cli.terminal import ProgressBar, wrapped
from lily.engine import MAX_CONTEXT

_EXAMPLES = """  lily bench decode
  lily bench prefill --tokens 128 512 2048
  lily bench decode --model synthetic:4 --context 4096 --json
  lily bench peers --model synthetic:4 --context 4096
"""
_DECODE = """  lily bench decode
  lily bench decode --model mlx-community/Qwen3.6-35B-A3B-4bit --context 4096
  lily bench decode --model synthetic:4 --threads 8 --json

A repeat goes on where the one before ended. tok/s is the median of the repeats, p50 and p99 are of all
tokens. The bytes of a token are those that its recorded plan reads and writes. The bandwidth this makes
is compared with that of copying 1 GiB of memory by as many threads as the engine has, bytes read and
written both counted; a model that fits in the processor's caches may exceed it.
"""
_PREFILL = """  lily bench prefill
  lily bench prefill --model synthetic:4 --tokens 128 512 2048
  lily bench prefill --model mlx-community/Qwen3.6-35B-A3B-4bit --tokens 4096 --json

Every prompt begins an empty session and ends with the logits of its last token; the lengths take turns.
tok/s is the length divided by the median time.
"""
_PEERS = """  lily bench peers
  lily bench peers --model synthetic:4 --context 4096
  lily bench peers --prefill 64,512 --json

Every engine runs on the processor, in a process of its own, and they take turns: a round is some tokens
of each, and the next round begins with another one. Printed are the median tok/s of each engine, the
median of Lily's speed divided by the other's in the same round, and an interval that covers this median
with at least 95 % confidence (order statistics; six rounds or more). An engine that takes more than 4
seconds for the tokens of a round decodes fewer; one that takes more than 60 for a prompt is left out of
that length.

mlx-lm has fp32 parameters, its fastest setting on a processor, and caches filled with random numbers.
llama.cpp has as many threads as Lily, flash attention, and random Q4_K weights of the same shape (with
synthetic:LAYERS only). All engines are in memory at the same time. Fewer than 4 layers have no attention,
which neither of the two takes.
"""
_COLUMN = 19  # where results begin
_UNITS = {"bytes": (1 << 20, " MiB")}  # of progress; others are shown as they are


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "bench", "measure the speed of decode and prefill", _EXAMPLES)
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)

    text = "measure decode, and the share of the memory bandwidth it reaches"
    decode = add_command(benchmarks, "decode", text, _DECODE)
    decode.add_argument(
        "--repeats", type=whole(1, 10_000), default=5, metavar="R", help="measurements (default: 5)"
    )
    _add_counts(decode, tokens=64)
    add_model_options(decode, context=False, synthetic=True)
    decode.set_defaults(run=run_decode)

    text = "measure how fast prompts are read"
    prefill = add_command(benchmarks, "prefill", text, _PREFILL)
    prefill.add_argument(
        "--tokens",
        type=whole(1, MAX_CONTEXT),
        nargs="+",
        default=[128, 512],
        metavar="N",
        help="lengths of the prompts (default: 128 512)",
    )
    prefill.add_argument(
        "--repeats", type=whole(1, 10_000), default=5, metavar="R", help="measurements (default: 5)"
    )
    prefill.add_argument("--json", action="store_true", help="print one JSON object")
    add_model_options(prefill, context=False, synthetic=True)
    prefill.set_defaults(run=run_prefill)

    text = "compare decode with mlx-lm and llama.cpp on this processor"
    peers = add_command(benchmarks, "peers", text, _PEERS)
    peers.add_argument("--pairs", type=whole(1, 10_000), default=7, metavar="R", help="rounds (default: 7)")
    peers.add_argument(
        "--prefill", type=_lengths, default=[], metavar="N,N", help="also measure prompts of so many tokens"
    )
    _add_counts(peers, tokens=16)
    add_model_options(peers, context=False, synthetic=True, devices=("cpu", "cpu32"))
    peers.set_defaults(run=run_peers)


def _add_counts(parser: argparse.ArgumentParser, tokens: int) -> None:
    parser.add_argument(
        "--context",
        type=whole(1, MAX_CONTEXT),
        default=512,
        metavar="N",
        help="tokens that are there at the beginning (default: 512)",
    )
    parser.add_argument(
        "--tokens",
        type=whole(1, MAX_CONTEXT),
        default=tokens,
        metavar="N",
        help=f"tokens decoded each time (default: {tokens})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _check_room(args: argparse.Namespace, repeats: int) -> None:
    room = args.context + args.tokens * repeats
    if room > MAX_CONTEXT:
        args.parser.error(
            f"--context {args.context} and {repeats} times --tokens {args.tokens} are {room} tokens; "
            f"a session holds at most {MAX_CONTEXT}"
        )


def _lengths(text: str) -> list[int]:
    return [whole(1, MAX_CONTEXT)(part) for part in text.split(",")]


class _Bars:
    """Progress bars, one after the other."""

    def __init__(self) -> None:
        self._label = ""
        self._bar = ProgressBar("")

    def __call__(self, label: str, unit: str, done: int, total: int) -> None:
        if label != self._label:
            self._bar.wipe()
            scale, name = _UNITS.get(unit, (1, f" {unit}"))
            self._label, self._bar = label, ProgressBar(label, scale, name)
        self._bar(done, total)

    def wipe(self) -> None:
        self._bar.wipe()


def _model_folder(args: argparse.Namespace, bars: _Bars) -> tuple[Path, int | None]:
    """Return the checkpoint's folder, written or downloaded if need be, and the layers of a synthetic one."""
    from lily.bench.synthetic import full_size, layers_of, synthetic_checkpoint
    from lily.checkpoint import resolve

    try:
        layers = layers_of(args.model)
    except ValueError as error:
        args.parser.error(f"argument --model: {error}")
    if layers is None:
        return resolve(args.model, args.revision, _part(bars, f"downloading {args.model}")), None
    if args.revision is not None:
        args.parser.error("--revision applies to models of the hub")
    return synthetic_checkpoint(full_size(layers), _part(bars, "writing random weights")), layers


def _part(bars: _Bars, label: str) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        bars(label, "bytes", done, total)

    return progress


def _report(
    args: argparse.Namespace,
    measure: Callable[..., dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    **settings: Any,
) -> int:
    """Measure Lily alone with these settings and print the result."""
    from lily.bench.machine import describe_machine

    bars = _Bars()
    try:
        folder, _ = _model_folder(args, bars)
        machine = describe_machine()
        result = measure(folder, device=args.device, threads=args.threads, progress=bars, **settings)
    finally:
        bars.wipe()
    record = {"model": args.model, "machine": machine, "settings": settings, **result}
    if args.json:
        print(json.dumps(record))
        return 0
    _show_machine(record, result["engine"])
    _line("versions", _versions(record["engine"]))
    show(record)
    return 0


def run_decode(args: argparse.Namespace) -> int:
    """Carry `bench decode` out."""
    from lily.bench.decode import measure_decode

    _check_room(args, args.repeats)
    counts = {"context": args.context, "tokens": args.tokens, "repeats": args.repeats}
    return _report(args, measure_decode, _show_decode, **counts)


def run_prefill(args: argparse.Namespace) -> int:
    """Carry `bench prefill` out."""
    from lily.bench.prefill import measure_prefill

    return _report(args, measure_prefill, _show_prefill, tokens=args.tokens, repeats=args.repeats)


def _show_machine(record: dict[str, Any], ours: dict[str, Any]) -> None:
    machine, info = record["machine"], ours["device_info"]
    _line("model", f"{record['model']}, in {ours['folder']}")
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['system']}"
    _line("machine", f"{where}, load {machine['load']:.2f} before")
    _line(
        "device", ", ".join([ours["device"], *(f"{k} {v}" for k, v in info.items() if v != ours["device"])])
    )


def _show_decode(record: dict[str, Any]) -> None:
    settings, plan, times = record["settings"], record["plan"], record["seconds_per_token"]
    speed, speeds = record["tokens_per_second"], record["tokens_per_second_of_repeats"]
    moved = plan["bytes_read"] + plan["bytes_written"]
    _line(
        "decode",
        f"{speed:.2f} tok/s after {settings['context']} tokens, median of {len(speeds)} times "
        f"{settings['tokens']} tokens ({min(speeds):.2f} to {max(speeds):.2f})",
    )
    _line("time of a token", f"{times['p50'] * 1e3:.3f} ms p50, {times['p99'] * 1e3:.3f} ms p99")
    _line(
        "plan of a token",
        f"{plan['launches']} launches, {plan['stages']} stages, {moved / 1e6:.1f} MB read and written",
    )
    share = "" if record["share_of_copy"] is None else (
        f", {record['share_of_copy']:.1%} of the {record['copy_bytes_per_second'] / 1e9:.1f} GB/s of a copy"
    )  # fmt: skip
    _line("bandwidth", f"{record['bytes_per_second'] / 1e9:.2f} GB/s{share}")


def _show_prefill(record: dict[str, Any]) -> None:
    for case in record["cases"]:
        speeds = case["tokens_per_second_of_repeats"]
        _line(
            "prefill",
            f"{case['tokens_per_second']:.2f} tok/s, {case['tokens']} tokens in {case['seconds']:.3f} s, "
            f"median of {len(speeds)} times ({min(speeds):.2f} to {max(speeds):.2f})",
        )


def run_peers(args: argparse.Namespace) -> int:
    """Carry `bench peers` out."""
    from lily.bench.peers import Subject, compare
    from lily.checkpoint import open_checkpoint

    _check_room(args, args.pairs)
    bars = _Bars()
    try:
        folder, layers = _model_folder(args, bars)
        vocab = int(open_checkpoint(folder).config["vocab"])
        record = compare(
            Subject(folder, layers, vocab),
            device=args.device,
            threads=args.threads,
            context=args.context,
            tokens=args.tokens,
            pairs=args.pairs,
            prefill=args.prefill,
            progress=bars,
        )
    finally:
        bars.wipe()
    record = {"model": args.model, **record}
    if args.json:
        print(json.dumps(record))
        return 0
    _show_machine(record, record["engines"]["lily"])
    for name, facts in record["engines"].items():
        _line(name, _versions(facts))
    for name, reason in record["left_out"].items():
        _line(name, f"left out: {reason}")
    for case in record["cases"]:
        _show_case(case)
    for name, facts in record["engines"].items():
        if facts["idle_load"] > 0.05:  # of a core
            warnings.warn(
                f"{name} kept {facts['idle_load']:.2f} cores busy while others ran: no speed here counts",
                stacklevel=1,
            )
    return 0


def _show_case(case: dict[str, Any]) -> None:
    after = f" after {case['context']}" if "context" in case else ""
    print(f"\n{case['case']}, {case['tokens']} tokens{after}")
    for name, row in case["engines"].items():
        text = f"{row['tokens_per_second']:10.2f} tok/s"
        if row.get("tokens", case["tokens"]) != case["tokens"]:
            text += f", {row['tokens']} tokens a round"
        if "ratio" in row:
            low, high = row["interval"] or (None, None)
            sure = "too few rounds for an interval" if low is None else f"95 %: {low:.2f} to {high:.2f}"
            text += f"   Lily / {name} {row['ratio']:.2f} ({sure})"
        _line(name, text)
    for name, reason in case.get("left_out", {}).items():
        _line(name, f"left out: {reason}")


def _versions(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts["versions"].items())


def _line(name: str, text: str) -> None:
    print(wrapped(f"{name:{_COLUMN - 1}} {text}", _COLUMN))
