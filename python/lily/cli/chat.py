"""lily chat: a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily.cli.conversation import Conversation
from lily.cli.line_input import LineInput
from lily.cli.options import (
    add_command,
    add_model_options,
    add_sampling_options,
    add_thinking_options,
    open_engine,
    sampling_of,
    thinking_of,
)
from lily.cli.reply import Reply, brief_line
from lily.cli.terminal import ProgressBar, dim, is_terminal, note
from lily.engine import Engine
from lily.errors import ContextFullError, LilyError, OutOfMemoryError
from lily.session import Session

_COMMANDS = {
    "/reset": ("", "forgets the conversation"),
    "/retry": ("", "answers the last question again"),
    "/system": (" TEXT", "sets the system message, without TEXT removes it"),
    "/think": (" on|off", "has the model think before it answers, or not"),
    "/save": (" FILE", "writes the conversation to a file"),
    "/load": (" FILE", "goes on with the conversation of a file"),
    "/help": ("", "shows this"),
    "/quit": ("", "ends the program"),
}
_KEYS = """Ctrl-C stops an answer; at the prompt, Ctrl-C twice or Ctrl-D ends the program.
A line that ends with a backslash goes on in the next one. Three double quotes
begin and end a text of several lines. // at the beginning is a plain /."""
_EXAMPLES = """  lily chat
  lily chat --model mlx-community/Qwen3.6-35B-A3B-4bit --system "Answer in French."
  printf 'What is the capital of France?\\nAnd of Spain?\\n' | lily chat --json

Conversations stay in memory, and so does the history of the arrow keys; /save writes one to a file, as JSON.
"""
_AGAIN = "/help shows the commands; Ctrl-C again or Ctrl-D ends the program"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "chat", "talk to the model", _EXAMPLES)
    parser.add_argument("--system", metavar="TEXT", help="system message in front of the conversation")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each answer")
    add_thinking_options(parser)
    add_model_options(parser)
    add_sampling_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    options = sampling_of(args) | thinking_of(args)
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    with open_engine(args, max_sessions=1) as engine, engine.session() as session:
        model = engine.info()["model"]
        if is_terminal(sys.stdin):
            print(f"{model}. {_AGAIN.split(';')[0]}, Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
        conversation = Conversation(model, args.system, options.pop("enable_thinking", None))
        _Chat(engine, session, conversation, options, args.json).run()
    return 0


class _Chat:
    """Carries out what the user says, until the end of the input."""

    def __init__(
        self,
        engine: Engine,
        session: Session,
        conversation: Conversation,
        options: dict[str, Any],
        as_json: bool,
    ) -> None:
        self._engine = engine
        self._session = session
        self._conversation = conversation
        self._options = options
        self._json = as_json
        self._actions: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/retry": self._retry,
            "/system": self._set_system,
            "/think": self._set_thinking,
            "/save": self._save,
            "/load": self._load,
            "/help": self._help,
        }

    def run(self) -> None:
        files = [name + " " if "FILE" in _COMMANDS[name][0] else name for name in _COMMANDS]
        source = LineInput(files, quiet=self._json)
        stopped = False  # whether the last thing that happened was Ctrl-C at the prompt
        while True:
            try:
                text = source.read()
            except KeyboardInterrupt:
                if stopped or not source.terminal:
                    raise
                stopped = True
                print(file=sys.stderr)
                note(_AGAIN)
                continue
            stopped = False
            if text is None or text == "/quit":
                return
            if text.startswith("/") and not text.startswith("//"):
                self._act(text)
            elif text.strip():
                self._answer(text[1:] if text.startswith("//") else text.lstrip("\n"))

    def _act(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        action = self._actions.get(name)
        if action is None:
            known = ", ".join(f"{name}{what} {text}" for name, (what, text) in _COMMANDS.items())
            note(f"there is no command {name}: {known}")
            return
        if rest.strip() and not _COMMANDS[name][0]:
            note(f"{name} takes nothing behind it")
            return
        if not rest.strip() and "FILE" in _COMMANDS[name][0]:
            note(f"{name} takes the name of a file")
            return
        action(rest.strip())

    def _answer(self, question: str) -> None:
        """Answer a question; a stopped answer counts as far as it went, one that never began is none."""
        conversation = self._conversation
        asked = conversation.ask(question)
        reply = Reply(quiet=self._json)
        bar = ProgressBar("reading", unit=" tokens", least=64)
        try:
            with self._session.generate(
                asked,
                progress=bar,
                on_context_full="stop",
                enable_thinking=conversation.thinking,
                **self._options,
            ) as chunks:
                reply.read(chunks)
        except (ContextFullError, OutOfMemoryError) as error:
            note(f"{error}; /reset starts a new conversation")
            return
        except KeyboardInterrupt:
            if not is_terminal(sys.stdin):
                raise
        finally:
            bar.wipe()
            reply.end_line()
        if not reply.empty or reply.finish_reason is not None:
            conversation.answer(asked, reply.message())
        if self._json:
            print(json.dumps(reply.record(), ensure_ascii=False), flush=True)
        self._explain(reply)

    def _explain(self, reply: Reply) -> None:
        reply.explain_end(self._options.get("max_tokens"))
        if is_terminal(sys.stderr) and is_terminal(sys.stdin):
            text = "(stopped)" if reply.usage is None else brief_line(reply.usage)
            print(dim(text, sys.stderr), file=sys.stderr)

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        _say("the conversation is forgotten")

    def _retry(self, _: str) -> None:
        question = self._conversation.take_back()
        if question is None:
            note("there is no question yet")
        else:
            self._answer(question)

    def _set_system(self, text: str) -> None:
        self._conversation.set_system(text or None)
        _say("the system message is set" if text else "there is no system message")

    def _set_thinking(self, text: str) -> None:
        if text not in ("on", "off"):
            note("/think takes on or off")
            return
        self._conversation.thinking = text == "on"
        _say(f"thinking is {text}")

    def _save(self, text: str) -> None:
        try:
            self._conversation.save(_path(text))
        except (OSError, ValueError) as error:
            note(f"{text} was not written: {error}")
        else:
            _say(f"{len(self._conversation.messages)} messages are in {text}")

    def _load(self, text: str) -> None:
        try:
            model = self._conversation.load(_path(text), self._check)
        except (LilyError, ValueError) as error:
            note(f"{error}; the conversation is as it was")
            return
        if model not in (None, self._conversation.model):
            _say(f"it was a conversation with {model}")
        rest = "; /retry answers its last question" if self._conversation.unanswered else ""
        _say(f"{len(self._conversation.messages)} messages were read{rest}")

    def _check(self, messages: list[dict[str, Any]]) -> None:
        """Raise ValueError if the model cannot go on from these messages."""
        if messages[-1]["role"] != "user":
            messages = [*messages, {"role": "user", "content": "?"}]
        self._engine.tokenizer.encode(self._engine.tokenizer.apply_chat_template(messages))

    def _help(self, _: str) -> None:
        for name, (what, text) in _COMMANDS.items():
            print(f"  {name + what:15} {text}", file=sys.stderr)
        print(_KEYS, file=sys.stderr)


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))


def _say(text: str) -> None:
    """Tell what was done, on a terminal only."""
    if is_terminal(sys.stderr):
        print(dim(f"({text})", sys.stderr), file=sys.stderr)
