"""lily chat: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from lily.cli.options import add_command, add_model_options, add_sampling_options, open_engine, sampling_of
from lily.cli.reply import Reply
from lily.cli.terminal import ProgressBar, is_terminal, note
from lily.engine import Engine
from lily.errors import ContextFullError

_EXAMPLES = """  lily chat
  lily chat --model mlx-community/Qwen3.6-35B-A3B-4bit --system "Answer in French."
"""
_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends the program, Ctrl-C stops an answer"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "chat", "talk to the model", _EXAMPLES)
    parser.add_argument("--system", metavar="TEXT", help="system message in front of the conversation")
    parser.add_argument("--no-thinking", action="store_true", help="answer without reasoning first")
    add_model_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    options = sampling_of(args)
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    if args.no_thinking:
        options["enable_thinking"] = False
    with open_engine(args, max_sessions=1) as engine:
        if is_terminal(sys.stdin):
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  gives input() line editing and history
            print(f"{engine.info()['model']}. {_HELP}", file=sys.stderr)
        _converse(engine, args.system, options)
    return 0


def _converse(engine: Engine, system: str | None, options: dict[str, Any]) -> None:
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    while True:
        line = _read_line()
        if line is None or line == "/quit":
            return
        if line == "/reset":
            messages = list(first)
        elif line.startswith("/"):
            note(_HELP)
        elif line:
            _answer(engine, messages, line, options)


def _read_line() -> str | None:
    """Return a line, or None at the end of the input."""
    try:
        return input("> " if is_terminal(sys.stdin) else "").strip()
    except EOFError:
        if is_terminal(sys.stdin):
            print()
        return None
    except KeyboardInterrupt:
        if not is_terminal(sys.stdin):
            raise
        print()
        note(_HELP)
        return ""


def _answer(engine: Engine, messages: list[dict[str, str]], line: str, options: dict[str, Any]) -> None:
    """Answer one line and add both to the conversation; a stopped answer counts as far as it went."""
    messages.append({"role": "user", "content": line})
    reply = Reply()
    bar = ProgressBar("reading", unit=" tokens", least=64)
    try:
        reply.read(engine.generate(messages, progress=bar, on_context_full="stop", **options))
    except ContextFullError as error:
        messages.pop()
        note(f"{error}; /reset starts a new conversation")
        return
    except KeyboardInterrupt:
        pass
    finally:
        bar.wipe()
        reply.end_line()
    reply.explain_end(options.get("max_tokens"))
    messages.append({"role": "assistant", "content": reply.text, "reasoning_content": reply.reasoning})
