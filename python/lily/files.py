"""Read the files of a checkpoint, which may come from anyone: never waiting, never more than a limit.

And where Lily keeps files of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from lily.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

MAX_JSON_BYTES = 100_000_000
MAX_SHOWN = 200

FileIdentity = tuple[int, int, int, int]


def cache_folder() -> Path:
    """Return the folder `lily` in the user's cache folder. It may be deleted."""
    from pathlib import Path

    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "lily"


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; `CheckpointError` if it is none or reading fails."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path}: is not a regular file")
            yield file
    except FileNotFoundError:
        what = "a link to a file that does not exist" if os.path.islink(path) else "no such file"
        raise CheckpointError(f"{path}: {what}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _open_at_once(path: str, flags: int) -> int:
    try:
        # Without O_NONBLOCK, opening a FIFO waits for a writer.
        return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except ValueError as error:  # a NUL or a lone surrogate in the name
        raise OSError(errno.EINVAL, "no possible file name") from error


def read_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes; `CheckpointError` if it is none."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{path}: larger than {limit} bytes")
        data = file.read(size + 1)
    if len(data) != size:
        raise CheckpointError(f"{path}: changed while it was read")
    return data


def is_there(path: Path) -> bool:
    """Tell whether a folder has such an entry; a broken link is one, and so is what may not be looked at."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def identity(status: os.stat_result) -> FileIdentity:
    """Return what changes when a file is replaced or written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def shown(value: object) -> str:
    """Return a value out of a file for an error message: escaped, and not long."""
    try:
        text = repr(value)
    except RecursionError:
        text = type(value).__name__
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def named(name: str) -> str:
    """Return a name out of a file for an error message: as it is if it is short and printable."""
    return name if name.isprintable() and len(name) <= MAX_SHOWN else shown(name)
