"""The command line: lily generate | chat | pull | info | score | doctor | bench."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from lily.cli import bench, chat, doctor, generate, info, pull, score
from lily.cli.terminal import note
from lily.errors import LilyError

_EXAMPLES = """examples:
  lily generate "Why is the sky blue?"
  lily chat --model mlx-community/Qwen3.6-35B-A3B-4bit
  lily pull mlx-community/Qwen3.6-35B-A3B-4bit
  lily info --model ./checkpoint --json
  lily score < page.txt
  lily doctor
  lily bench decode
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="lily",
        description="Run Qwen3.6-35B-A3B and models of its kind on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in (generate, chat, pull, info, score, doctor, bench):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""

    def run() -> int:
        args = _parse(argv)
        _quiet_hub()
        return int(args.run(args))

    return guarded(run)


def guarded(run: Callable[[], int]) -> int:
    """Return what `run` does, or the exit status of what ended it, which is said in a line."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for the rest of the program
    if sys.stdout is None:
        note("standard output is closed")
        return 1
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character must not end the answer
            stream.reconfigure(errors="replace")
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            status = run()
            sys.stdout.flush()
        except KeyboardInterrupt:
            return _interrupted()
        except BrokenPipeError:  # the reader, such as head, has seen enough
            _drop_output()
            return 1
        except (LilyError, ValueError, OSError, ImportError) as error:
            note(f"{error}" or type(error).__name__)
            _drop_output()
            return 1
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    try:
        parser = make_parser()
        args, rest = parser.parse_known_args(argv)
        if not hasattr(args, "run") and not rest:
            parser.print_help(sys.stderr)
            parser.exit(2)
        if rest:  # said by the command's own parser, with its usage
            getattr(args, "parser", parser).error(f"unrecognized arguments: {' '.join(rest)}")
    except SystemExit:  # help and version are output like any other, and may not find room
        sys.stdout.flush()
        raise
    return args


def _quiet_hub() -> None:
    """Keep huggingface_hub from writing to standard error; what matters of it comes as an error."""
    import logging

    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)


def _drop_output() -> None:
    """Throw away output that cannot be written, so that Python does not try again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _interrupted() -> int:
    print(file=sys.stderr)
    return 130


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    note(f"warning: {message}")


class _Version(argparse.Action):
    """Look the version up only when asked: importlib.metadata is slow to import."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        import lily

        print(f"lily {lily.__version__}")
        parser.exit()
