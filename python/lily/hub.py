"""Turn what a user calls a model - "demo", a folder or a hub id - into a folder on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from lily.errors import CheckpointError
from lily.files import is_there, shown
from lily.model_config import read_json

DEMO = Path(__file__).resolve().parent / "demo"

Progress = Callable[[int, int], object]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
FILES = ["*.json", "*.jinja", "*.txt", "model*.safetensors"]  # of a repository, what Lily needs
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
        progress: called with (done, total) bytes during a download; an exception it raises cancels the
            download and is passed on. The next attempt goes on where that ended.
        update: ask the hub for a newer version even if one is cached.

    Raises:
        CheckpointError: nothing was found; the message says what was tried. A DownloadError, if the hub
            or the way to it is the reason.
        UnsupportedError: the hub has a model Lily does not run; its weights are not downloaded then.
        ValueError: `model` is neither a string nor a path, or is not on the hub and yet has a `revision`.
    """
    found = local_folder(model, revision)
    if found is None:
        return _from_hub(os.fspath(model), revision, progress, update)
    return found


def local_folder(model: str | os.PathLike[str], revision: str | None = None) -> Path | None:
    """Return the folder of "demo" or of a path, or None if `model` is a hub id. Errors as of resolve()."""
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
    return None


def _refuse_revision(what: str, revision: str | None) -> None:
    if revision is not None:
        raise ValueError(f"revision {revision!r} applies to models of the hub, not to {what}")


def _is_hub_id(text: str) -> bool:
    """Tell whether a text has the form owner/name."""
    return len(text) <= 200 and bool(_HUB_ID.fullmatch(text)) and ".." not in text and "--" not in text


def _from_hub(repo: str, revision: str | None, progress: Progress | None, update: bool) -> Path:
    if not update:
        found = cached(repo, revision)
        if found is not None:
            return found
    _need_huggingface_hub(repo)
    from lily.download import fetch, plan_download

    folder = fetch(plan_download(repo, revision, FILES), revision, FILES, progress)
    if not _is_complete(folder):
        raise CheckpointError(
            f"{repo}: {folder} lacks tokenizer.json or model*.safetensors files, which could not be fetched"
        )
    return folder


def cached(repo: str, revision: str | None = None) -> Path | None:
    """Return the folder of a hub id in the hub cache, or None if it is not there completely.

    The network is not asked.
    """
    _need_huggingface_hub(repo)
    import huggingface_hub

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=FILES, local_files_only=True
            )
        )
    except Exception:  # not cached, or not completely
        return None
    return folder if _is_complete(folder) else None


def _need_huggingface_hub(repo: str) -> None:
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise CheckpointError(f"{repo}: no such folder; hub ids need the package huggingface_hub") from error


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
