"""Reading what a user says, line by line: editing, completion, and messages of several lines."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lily.cli.terminal import is_terminal

_QUOTES = '"""'


class LineInput:
    """Standard input.

    On a terminal it has line editing, a history of this run (which is not written to a file) and completion
    by Tab. A message goes on in the next line behind a line that ends with a backslash, and from three double
    quotes to the next three.

    Args:
        commands: Words at the beginning of a line that Tab completes; those that end with a blank take the
            name of a file.
        quiet: Whether standard output is for answers only, so that prompts go to standard error.
    """

    def __init__(self, commands: Sequence[str], quiet: bool) -> None:
        self.terminal = is_terminal(sys.stdin)
        if hasattr(sys.stdin, "reconfigure"):  # a key that makes no character must not end the conversation
            sys.stdin.reconfigure(errors="replace")
        self._editing = self.terminal and is_terminal(sys.stdout) and not quiet
        if self._editing:
            with contextlib.suppress(ImportError):  # gives input() line editing and history
                import readline

                _prepare(readline, commands)

    def read(self) -> str | None:
        """Return a message, or None at the end of the input.

        One of a single line is stripped. One of several lines never is a command: it begins with a line
        break if it begins with a slash.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; what was typed of the message is dropped.
        """
        first = self._line("> ")
        if first is None:
            return None
        if first.lstrip().startswith(_QUOTES):
            text = self._quoted(first.lstrip()[len(_QUOTES) :])
        elif first.endswith("\\"):
            text = self._continued(first)
        elif "\n" in first:  # pasted
            text = first
        else:
            return first.strip()
        text = text.strip("\n")
        return f"\n{text}" if text.startswith("/") else text

    def _quoted(self, line: str | None) -> str:
        lines = []
        while line is not None:
            if line.rstrip().endswith(_QUOTES):
                lines.append(line.rstrip()[: -len(_QUOTES)])
                break
            lines.append(line)
            line = self._line(". ")
        return "\n".join(lines)

    def _continued(self, line: str | None) -> str:
        lines = []
        while line is not None:
            lines.append(line.removesuffix("\\"))
            line = self._line(". ") if line.endswith("\\") else None
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        """Return a line, or None at the end of the input."""
        try:
            if self._editing:
                return input(prompt)
            if self.terminal:
                print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except EOFError:
            line = ""
        if line:
            return line.removesuffix("\n")
        if self.terminal:
            print(file=sys.stdout if self._editing else sys.stderr)
        return None


def _prepare(readline: Any, commands: Sequence[str]) -> None:
    readline.set_completer_delims(" \t\n")
    readline.set_completer(_completer(readline, commands))
    old = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if old else "tab: complete")
    if not old:  # a pasted text is one message, whatever lines it has
        readline.parse_and_bind("set enable-bracketed-paste on")


def _completer(readline: Any, commands: Sequence[str]) -> Callable[[str, int], str | None]:
    """Return what readline asks for completions, one after the other."""

    def complete(text: str, state: int) -> str | None:
        found = completions(commands, readline.get_line_buffer()[: readline.get_endidx()], text)
        return found[state] if state < len(found) else None

    return complete


def completions(commands: Sequence[str], line: str, word: str) -> list[str]:
    """Return what the last word of a line may become.

    Args:
        commands: As for LineInput.
        line: The line up to the cursor.
        word: Its last word.
    """
    if line == word and word.startswith("/"):
        return [command for command in commands if command.startswith(word)]
    if any(command.endswith(" ") and line.startswith(command) for command in commands):
        names = sorted(glob.glob(glob.escape(os.path.expanduser(word)) + "*"))
        return [name + "/" if os.path.isdir(name) else name for name in names]
    return []
