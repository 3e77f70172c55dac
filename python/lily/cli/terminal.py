"""What the user sees beside the answer: notes, a progress bar, dim text."""

from __future__ import annotations

import collections
import os
import shutil
import sys
import textwrap
import time
from typing import TextIO


def note(text: str) -> None:
    """Write one line to standard error."""
    print("lily: " + " ".join(text.split()), file=sys.stderr)


def is_terminal(stream: TextIO | None) -> bool:
    """Tell whether a stream is a terminal."""
    return stream is not None and not stream.closed and stream.isatty()


def dim(text: str, stream: TextIO) -> str:
    """Return text in faint letters if the stream is a terminal with colours (NO_COLOR is respected)."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not is_terminal(stream)
    return text if plain or not text else f"\x1b[2m{text}\x1b[22m"


def wrapped(line: str, column: int) -> str:
    """Break a line of output between words where a terminal would break it anywhere.

    Args:
        line: What is printed.
        column: Where lines after the first begin.
    """
    if not is_terminal(sys.stdout):
        return line
    width = max(shutil.get_terminal_size().columns, 2 * column)
    return textwrap.fill(
        line, width, subsequent_indent=" " * column, break_long_words=False, break_on_hyphens=False
    )


class ProgressBar:
    """A bar on standard error, drawn on a terminal only and wiped when the work is done.

    Args:
        label: What is being done.
        scale: Units of the counter that make one of the unit shown.
        unit: Unit shown.
        least: Totals below this are done too soon for a bar.
    """

    def __init__(self, label: str, scale: float = 1, unit: str = "", least: int = 0) -> None:
        self._label = label
        self._scale = scale
        self._unit = unit
        self._least = least
        self._stream = sys.stderr
        self._active = is_terminal(self._stream) and os.environ.get("TERM") != "dumb"
        self._drawn = 0.0  # when the bar that is on the screen was drawn; 0 if there is none

    def __call__(self, done: int, total: int) -> None:
        """Show that done of total units are finished."""
        now = time.monotonic()
        if done >= total:
            self.wipe()
        if not self._active or done >= total or total < self._least or now - self._drawn < 0.05:
            return
        self._drawn = now
        counts = self._counts(done, total)
        room = shutil.get_terminal_size().columns - len(self._label) - len(counts) - 6
        width = max(min(room, 40), 0)
        full = int(width * done / max(total, 1))
        self._stream.write(f"\r{self._label} [{'#' * full}{'-' * (width - full)}] {counts}\x1b[K")
        self._stream.flush()

    def wipe(self) -> None:
        """Remove the bar."""
        if self._drawn:
            self._drawn = 0.0
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _counts(self, done: int, total: int) -> str:
        digits = 1 if self._scale > 1 else 0
        return f"{done / self._scale:.{digits}f}/{total / self._scale:.{digits}f}{self._unit}"


class TransferBar(ProgressBar):
    """A bar for bytes, with speed and the time that is left; where no terminal is, a line now and then."""

    _WINDOW = 8.0  # seconds over which speed is measured
    _PERIOD = 15.0  # seconds between two lines

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._marks: collections.deque[tuple[float, int]] = collections.deque()
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Show that done of total bytes are there."""
        now = time.monotonic()
        self._marks.append((now, done))
        while now - self._marks[0][0] > self._WINDOW:
            self._marks.popleft()
        super().__call__(done, total)
        if not self._active and done < total and now - self._said >= self._PERIOD:
            self._said = now
            note(f"{self._label}: {self._counts(done, total)}")

    def _counts(self, done: int, total: int) -> str:
        unit = size_unit(total)
        text = f"{done / unit[0]:.1f}/{total / unit[0]:.1f} {unit[1]}"
        (begun, before), (now, _) = self._marks[0], self._marks[-1]
        if now - begun < 0.5 or done <= before:
            return text
        speed = (done - before) / (now - begun)
        return f"{text}, {speed / 1e6:.1f} MB/s, {duration((total - done) / speed)} left"


def size_unit(size: int) -> tuple[float, str]:
    """Return the unit for a number of bytes, and its name."""
    return (1e9, "GB") if size >= 1e9 else (1e6, "MB")


def size_text(size: int) -> str:
    """Return a number of bytes for people: "12.5 MB" or "19.0 GB"."""
    scale, name = size_unit(size)
    return f"{size / scale:.1f} {name}"


def duration(seconds: float) -> str:
    """Return a time for people: "40 s", "12 min" or "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
