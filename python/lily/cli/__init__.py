"""The command line: lily generate | chat | info | score."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from lily.cli import chat, generate, info, score
from lily.cli.terminal import note
from lily.errors import LilyError

_EXAMPLES = """examples:
  lily generate "Why is the sky blue?"
  lily chat --model mlx-community/Qwen3.6-35B-A3B-4bit
  lily info --model ./checkpoint --json
  lily score < book.txt
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
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (generate, chat, info, score):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 after an error, 2 for wrong usage, 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character must not end the answer
            stream.reconfigure(errors="replace")
    args = make_parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            status = args.run(args)
            sys.stdout.flush()
        except KeyboardInterrupt:
            return _interrupted()
        except BrokenPipeError:  # the reader, such as head, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (LilyError, ValueError, OSError, ImportError) as error:
            note(f"{error}" or type(error).__name__)
            return 1
    return int(status)


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
