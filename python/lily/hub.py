"""Turn what a user calls a model - "demo", a folder or a hub id - into a folder on this machine."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lily.errors import CheckpointError
from lily.files import is_there, shown
from lily.model_config import load_config, read_json

DEMO = Path(__file__).resolve().parent / "demo"

Progress = Callable[[int, int], object]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_SMALL_FILES = ["*.json", "*.jinja", "*.txt"]
_ALL_FILES = [*_SMALL_FILES, "model*.safetensors"]
_INDEX = "model.safetensors.index.json"


def resolve(
    model: str | os.PathLike[str],
    revision: str | None = None,
    progress: Progress | None = None,
    *,
    update: bool = False,
) -> Path:
    """Return the folder that holds `model`, downloading it first if need be.

    A hub id whose files are complete in the hub cache is used as it is, without touching the network. Cache
    folder, token, endpoint and offline mode follow the usual `HF_*` variables. Nothing is printed.

    Args:
        model: "demo", an existing folder, or a hub id "owner/name".
        revision: branch, tag or commit of a hub id; None means "main".
        progress: called with (bytes done, bytes known so far) during a download, perhaps from another thread;
            an exception it raises cancels the download and is passed on.
        update: ask the hub for a newer version even if one is cached.

    Raises:
        CheckpointError: nothing was found; the message says what was tried.
        UnsupportedError: the hub has a model Lily does not run; its weights are not downloaded then.
        ValueError: `model` is neither a string nor a path, or is not on the hub and yet has a `revision`.
    """
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise ValueError(f"revision must be the name of a branch, tag or commit, not {revision!r}")
    if model == "demo":
        _refuse_revision("the demo model", revision)
        return DEMO
    text = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise ValueError(f"model must be a name or a path, not {type(model).__name__}")
    folder = Path(os.path.expanduser(text))
    if text and os.path.isdir(folder):
        _refuse_revision("a folder", revision)
        return folder.absolute()
    if text and os.path.exists(folder):
        raise CheckpointError(f"{text}: is a file; give the folder that holds config.json and the weights")
    if not isinstance(model, str) or not _is_hub_id(text):
        raise CheckpointError(
            f"{shown(text)}: no such folder, and no hub id (owner/name); the built-in model is 'demo'"
        )
    return _from_hub(text, revision, progress, update)


def _refuse_revision(what: str, revision: str | None) -> None:
    if revision is not None:
        raise ValueError(f"revision {revision!r} applies to models of the hub, not to {what}")


def _is_hub_id(text: str) -> bool:
    """Tell whether a text has the form owner/name."""
    return len(text) <= 200 and bool(_HUB_ID.fullmatch(text)) and ".." not in text and "--" not in text


def _from_hub(repo: str, revision: str | None, progress: Progress | None, update: bool) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(f"{repo}: no such folder; hub ids need the package huggingface_hub") from error

    if not update:
        try:
            cached = Path(
                huggingface_hub.snapshot_download(
                    repo, revision=revision, allow_patterns=_ALL_FILES, local_files_only=True
                )
            )
        except Exception:  # Not cached, or not completely: the download below says what is wrong.
            pass
        else:
            if _is_complete(cached):
                return cached

    cancelled: list[BaseException] = []
    bar = _progress_class(progress, cancelled)

    def download(patterns: list[str], at: str | None) -> Path:
        try:
            return Path(
                huggingface_hub.snapshot_download(repo, revision=at, allow_patterns=patterns, tqdm_class=bar)
            )
        except Exception as error:
            if cancelled:
                raise cancelled[0] from None
            raise _failure(repo, revision, error) from error

    small = download(_SMALL_FILES, revision)
    # An unsupported model is refused here, before gigabytes of its weights are fetched.
    load_config(small)
    # The second call names the commit: the branch may have moved in between.
    folder = download(_ALL_FILES, small.name)
    if not _is_complete(folder):
        raise CheckpointError(
            f"{repo}: {folder} lacks tokenizer.json or model*.safetensors files, which could not be fetched"
        )
    return folder


def _is_complete(folder: Path) -> bool:
    """Tell whether every needed file is there; an interrupted download leaves some out."""
    names = ["config.json", "tokenizer.json"]
    index = folder / _INDEX
    if not is_there(index):
        names.append("model.safetensors")
    elif not os.path.isfile(index):
        return False
    else:
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            return False
        names += {str(shard) for shard in shards.values()}
    return all(os.path.isfile(folder / name) for name in names)


def _failure(repo: str, revision: str | None, error: Exception) -> CheckpointError:
    from huggingface_hub import constants

    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    at = f" at revision {revision!r}" if revision else ""
    return CheckpointError(
        f"{repo}: no such folder, not complete in the hub cache {constants.HF_HUB_CACHE}{at}, "
        f"and not available from {constants.ENDPOINT} ({type(error).__name__}: {reason})"
    )


def _progress_class(progress: Progress | None, cancelled: list[BaseException]) -> type[Any]:
    """Return a progress bar class for huggingface_hub that draws nothing and reports bytes to `progress`."""
    # Not exported for type checkers, but the documented base for such classes.
    bar: Any = importlib.import_module("huggingface_hub.utils").tqdm
    # Several bars may count the same bytes (network, disk): report the furthest, and the last one's total.
    furthest = 0
    last: object = None

    class SilentBar(bar):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            nonlocal last
            self.counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})
            if self.counts_bytes:
                last = self

        def update(self, n: float | None = 1) -> None:
            nonlocal furthest
            self.n += n or 0
            if progress is None or not self.counts_bytes:
                return
            furthest = max(furthest, int(self.n))
            total = int(getattr(last, "total", 0) or 0)
            try:
                progress(min(furthest, total), total)
            except BaseException as error:
                cancelled.append(error)
                raise

    return SilentBar
