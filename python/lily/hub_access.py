"""What Lily asks the hub, through huggingface_hub: lists of files, their bytes, and what an error means."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import importlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from lily.errors import CheckpointError, DownloadError

T = TypeVar("T")

_TIMEOUT = 10.0  # seconds without a byte
_PAUSES = (0.5, 1.0, 2.0)  # seconds before a question is asked again
_HEADS = 8  # at the same time


class LostError(Exception):
    """The connection was lost, or the hub is busy: worth another try."""


def list_files(repo: str, revision: str | None, patterns: list[str]) -> tuple[str, list[str]]:
    """Return the commit of a revision, and the names of its files that match the patterns."""
    import huggingface_hub

    info = patiently(lambda: huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=_TIMEOUT))
    names = [str(sibling.rfilename) for sibling in info.siblings or ()]
    names = [name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    return str(info.sha), names


def describe_files(repo: str, commit: str, names: list[str]) -> list[tuple[str, int | None, str]]:
    """Return name, bytes and checksum of files.

    The checksum is the name in the cache; it or the bytes may be unknown (any text, or None).
    """
    import huggingface_hub

    def facts(name: str) -> tuple[str, int | None, str]:
        url = huggingface_hub.hf_hub_url(repo, name, revision=commit)
        found = patiently(lambda: huggingface_hub.get_hf_file_metadata(url))
        return name, found.size, found.etag or ""

    with ThreadPoolExecutor(_HEADS) as pool:
        return list(pool.map(facts, names))


def pieces_of(repo: str, commit: str, name: str, start: int) -> Iterator[tuple[int, bytes]]:
    """Return the bytes of a file from a position on, as (position, bytes).

    They begin at 0 again where the hub cannot begin elsewhere.

    Raises:
        LostError: They ended too soon.
    """
    import huggingface_hub

    url = huggingface_hub.hf_hub_url(repo, name, revision=commit)
    headers = {**_utils().build_hf_headers(), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        with _opened(url, headers) as (status, pieces):
            at = start if status == 206 else 0
            for piece in pieces:
                yield at, piece
                at += len(piece)
    except Exception as error:
        if _is_final(error):
            raise
        raise LostError(_reason(error)) from error


@contextlib.contextmanager
def _opened(url: str, headers: dict[str, str]) -> Iterator[tuple[int, Iterator[bytes]]]:
    utils = _utils()
    session = utils.get_session()
    if callable(session.stream):
        with session.stream("GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True) as response:
            utils.hf_raise_for_status(response)
            yield response.status_code, response.iter_bytes()
    else:  # huggingface_hub before 1.0 uses requests
        with session.get(url, headers=headers, timeout=_TIMEOUT, stream=True) as response:
            utils.hf_raise_for_status(response)
            yield response.status_code, response.iter_content(1 << 16)


def patiently(ask: Callable[[], T], tries: int = 0) -> T:
    """Return the answer to a question, which is asked again while the hub is busy."""
    try:
        return ask()
    except Exception as error:
        status = _status(_root(error))
        busy = status in (408, 429) or status >= 500
        if not busy or tries == len(_PAUSES):
            raise
    time.sleep(_PAUSES[tries])
    return patiently(ask, tries + 1)


def _status(error: BaseException) -> int:
    """Return the hub's status code, or 0 if it gave none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def _root(error: BaseException) -> BaseException:
    """Return why huggingface_hub looked into its cache, where that is all it says."""
    while isinstance(error, _utils().LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def _is_final(error: Exception) -> bool:
    """Tell whether another try would end the same way."""
    status = _status(error)
    return isinstance(error, _utils().OfflineModeIsEnabled) or (
        400 <= status < 500 and status not in (408, 416, 429)
    )


def failure(repo: str, revision: str | None, error: BaseException) -> CheckpointError:
    """Return the error for what a question to the hub, or a download, ended with."""
    from huggingface_hub import constants

    if isinstance(error, CheckpointError):
        return error
    reason, text = _explained(repo, _root(error))
    at = f" at revision {revision!r}" if revision else ""
    return DownloadError(
        f"{repo}: no such folder, not complete in the hub cache {constants.HF_HUB_CACHE}{at}, "
        f"and not available from {constants.ENDPOINT}: {text}",
        reason,
    )


def _explained(repo: str, error: BaseException) -> tuple[str, str]:
    """Return the reason of a DownloadError, and what to do about it."""
    from huggingface_hub import constants

    utils = _utils()
    status = _status(error)
    if isinstance(error, utils.OfflineModeIsEnabled):
        return "offline", "offline mode is on (HF_HUB_OFFLINE)"
    if isinstance(error, utils.GatedRepoError):
        page = f"{constants.ENDPOINT}/{repo}"
        return "no_access", f"its conditions have to be accepted on {page}, and HF_TOKEN set ({status})"
    if isinstance(error, utils.RevisionNotFoundError):
        return "not_found", "it has no such revision"
    if isinstance(error, utils.RepositoryNotFoundError) and status != 401:
        return "not_found", "there is no such repository"
    if status in (401, 403):
        text = "there is no such repository, or it is private and HF_TOKEN does not open it"
        return "no_access", f"{text} ({status})"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full", "the disk of the cache is full"
    if status:
        return "server", f"the hub answers with status {status}"
    if isinstance(error, OSError) and error.filename is not None:  # a file of the cache
        return "cache", _reason(error)
    return "no_connection", f"no connection ({_reason(error)})"


def _reason(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def quiet_links() -> type[Any]:
    """Return a progress bar class for huggingface_hub that draws nothing."""
    bar: Any = _utils().tqdm

    class SilentBar(bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return SilentBar


def _utils() -> Any:
    """Return huggingface_hub.utils, whose documented names are not exported for type checkers."""
    return importlib.import_module("huggingface_hub.utils")
