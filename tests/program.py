"""Lily as a program, with pipes or on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

PROGRAM = [sys.executable, "-m", "lily"]


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **options.pop("env", {})}
    return subprocess.Popen([*PROGRAM, *arguments], env=environment, **options)


class Terminal:
    """A program on a pseudo-terminal.

    Attributes:
        shown: What it wrote, but for the switches of bracketed paste, which show nothing.
    """

    def __init__(self, *arguments: str, **env: str) -> None:
        self._fd, child = pty.openpty()
        self._process = start(
            arguments, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True
        )
        os.close(child)
        self._bytes = b""
        self._seen = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)

    @property
    def shown(self) -> str:
        return re.sub("\x1b\\[\\?2004[hl]", "", self._bytes.decode(errors="replace"))

    def read_until(self, text: str, seconds: float = 30) -> None:
        """Read until the text was shown, after the text that was waited for before."""
        end = time.monotonic() + seconds
        while (at := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < end, f"{text!r} did not come: {self.shown!r}"
            if select.select([self._fd], [], [], 0.1)[0]:
                self._bytes += os.read(self._fd, 4096)
        self._seen = at + len(text)

    def write(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def finish(self) -> int:
        """Read the rest and return the exit status."""
        try:
            while data := os.read(self._fd, 4096):
                self._bytes += data
        except OSError:  # how Linux reports that the other end is closed
            pass
        return self._process.wait(60)
