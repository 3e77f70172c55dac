"""Write files that are complete or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(given: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file that takes the place of another one when it is complete, and never otherwise.

    A link stays one, and so do the permissions of the file that it leads to.
    """
    path = Path(os.path.realpath(given))
    mode = _replaceable(path, os.fspath(given))
    beside = path.with_name(f".lily-{os.getpid()}-{os.urandom(6).hex()}.part")
    try:
        with open(beside, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        if isinstance(error, OSError) and error.filename == str(beside):
            raise OSError(error.errno, error.strerror, os.fspath(given)) from error
        raise
    with contextlib.suppress(OSError):  # not every file system can do this with a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _replaceable(path: Path, given: str) -> int | None:
    """Return the permissions of the file that is there, if any; OSError if it is no regular file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        if not given.endswith(os.sep):
            return None
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), given) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), given)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", given)
    return stat.S_IMODE(mode)
