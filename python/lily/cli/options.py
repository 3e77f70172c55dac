"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lily.cli.terminal import ProgressBar, is_terminal
from lily.engine import CUDA_DEVICE, DEVICES, MAX_CONTEXT, MAX_THREADS, Engine
from lily.errors import UnsupportedError
from lily.sampling import SamplingParams

_MIB = 1 << 20

# option, type, metavar, help: fields of SamplingParams of the same name
_SAMPLING: tuple[tuple[str, type, str, str], ...] = (
    ("max-tokens", int, "N", "most tokens to produce (default: what the context has room for)"),
    ("temperature", float, "T", "0 always takes the most likely token (default: the model's)"),
    (
        "top-p",
        float,
        "P",
        "choose among the most likely tokens of total probability P (default: the model's)",
    ),
    ("top-k", int, "K", "choose among the K most likely tokens, 0 is all (default: the model's)"),
    ("min-p", float, "P", "leave out tokens less likely than P times the most likely one"),
    ("presence-penalty", float, "X", "lower tokens that occurred, -2 to 2"),
    ("frequency-penalty", float, "X", "lower tokens by how often they occurred, -2 to 2"),
    ("repetition-penalty", float, "X", "divide the logits of tokens that occurred, 1 is none"),
    ("seed", int, "N", "the same seed gives the same answer (default: random)"),
)


def add_command(commands: Any, name: str, text: str, examples: str) -> argparse.ArgumentParser:
    """Add a command with the help text and examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(parser=parser)
    return parser


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a type for integers of a range."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"must be an integer from {low} to {high}, not {text!r}")
        return number

    return parse


def add_model_options(
    parser: argparse.ArgumentParser,
    context: bool = True,
    synthetic: bool = False,
    devices: Sequence[str] = DEVICES,
) -> None:
    """Add --model, --device and what belongs to them."""
    group = parser.add_argument_group("model")
    text = "'demo', a folder, or a Hugging Face hub id (default: demo, which comes with Lily)"
    if synthetic:
        text = f"'synthetic:LAYERS' (full size but for the layers; kept in ~/.cache/lily), {text}"
    group.add_argument("--model", default="demo", metavar="MODEL", help=text)
    group.add_argument("--revision", metavar="REV", help="revision on the hub")
    text = f"where to run (default: {devices[0]})"
    names = "{" + ",".join(devices) + "}"
    group.add_argument("--device", default=devices[0], type=device_in(devices), metavar=names, help=text)
    text = "most tokens of prompt and answer together (default: 32768, or the model's maximum if less)"
    if context:
        group.add_argument("--context", type=whole(1, MAX_CONTEXT), metavar="N", help=text)
    text = "threads of the cpu device (default: 0, one for each core)"
    group.add_argument("--threads", type=whole(0, MAX_THREADS), default=0, metavar="N", help=text)


def device_in(devices: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of device names; "cuda" may be followed by the number of a GPU."""

    def parse(text: str) -> str:
        if text not in devices and not ("cuda" in devices and CUDA_DEVICE.fullmatch(text)):
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(devices)})")
        return text

    return parse


def device_of(name: str, config: Mapping[str, int | float]) -> str:
    """Return the device that is meant by a name; "auto" is the first of which this build has the code."""
    from lily import _native

    native = _native.Config(**config)
    for device in ("metal",) if name == "auto" else ():
        with contextlib.suppress(UnsupportedError):
            _native.memory_plan(native, context=1, prefill_chunk=64, max_sessions=1, device=device)
            return device
    return "cpu" if name == "auto" else name


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each sampling parameter."""
    group = parser.add_argument_group("sampling")
    for name, kind, metavar, text in _SAMPLING:
        names = (f"--{name}", "--temp") if name == "temperature" else (f"--{name}",)
        group.add_argument(*names, type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end the answer at TEXT (repeatable)")


def add_thinking_options(parser: argparse.ArgumentParser) -> None:
    """Add --no-thinking and --thinking-budget."""
    parser.add_argument("--no-thinking", action="store_true", help="answer without reasoning first")
    budget = whole(0, MAX_CONTEXT)
    parser.add_argument("--thinking-budget", type=budget, metavar="N", help="most tokens of reasoning")


def thinking_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was said about thinking, as arguments of generate()."""
    options: dict[str, Any] = {}
    if args.no_thinking:
        options["enable_thinking"] = False
    if args.thinking_budget is not None:
        options["thinking_token_budget"] = args.thinking_budget
    return options


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given, as arguments of generate()."""
    options: dict[str, Any] = {}
    for option in [name for name, *_ in _SAMPLING] + ["stop"]:
        name = option.replace("-", "_")
        value = getattr(args, name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            args.parser.error(f"argument --{option}: {error}")
        options[name] = value
    return options


def open_engine(args: argparse.Namespace, **settings: Any) -> Engine:
    """Load the model, with a progress bar."""
    bar = ProgressBar(f"loading {args.model}", _MIB, " MiB")
    try:
        return Engine(
            args.model,
            device=args.device,
            context=args.context,
            revision=args.revision,
            threads=args.threads,
            progress=bar,
            **settings,
        )
    finally:
        bar.wipe()


def read_text(argument: str | None) -> str:
    """Return a text argument, or standard input if it is missing or "-".

    Raises:
        ValueError: Nothing was given, or standard input is closed.
    """
    if argument is not None and argument != "-":
        return argument
    if argument is None and is_terminal(sys.stdin):
        raise ValueError("give the text as an argument, or on standard input")
    if sys.stdin is None:
        raise ValueError("standard input is closed: give the text as an argument")
    text = sys.stdin.read()
    if not text.strip():
        raise ValueError("standard input is empty")
    return text
