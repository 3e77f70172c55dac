"""lily pull: fetch a checkpoint from the Hugging Face hub."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lily.cli.options import add_command
from lily.cli.terminal import TransferBar, duration, is_terminal, note, size_text
from lily.errors import DownloadError
from lily.hub import FILES, cached, local_folder

if TYPE_CHECKING:
    from lily.download import Plan, RemoteFile

_EXAMPLES = """  lily pull mlx-community/Qwen3.6-35B-A3B-4bit
  lily pull mlx-community/Qwen3.6-35B-A3B-4bit --dry-run
  lily pull mlx-community/Qwen3.6-35B-A3B-4bit --revision main --verify --json

The checkpoint goes into the cache that other programs use too, and what is there is not fetched again: of a
file that was interrupted only the rest. HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are
respected. The folder is all that is printed on standard output.
"""
_UNREACHED = ("offline", "no_connection", "server")


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "pull", "download a model from the Hugging Face hub", _EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="hub id, such as mlx-community/Qwen3.6-35B-A3B-4bit")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit on the hub (default: main)")
    parser.add_argument(
        "--verify", action="store_true", help="also check the files that are there, and fetch damaged ones"
    )
    parser.add_argument("--dry-run", action="store_true", help="tell what would be downloaded, and stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry the command out."""
    folder = local_folder(args.model, args.revision)
    if folder is not None:
        note(f"{args.model} is on this machine, there is nothing to download")
        return _finish(args, folder, {"bytes_downloaded": 0})
    from lily.download import plan_download

    try:
        plan = plan_download(args.model, args.revision, FILES)
    except DownloadError as error:
        folder = cached(args.model, args.revision)
        if error.reason not in _UNREACHED or folder is None or args.verify or args.dry_run:
            raise
        why = "offline mode is on" if error.reason == "offline" else "the hub cannot be reached"
        note(f"{why}; {args.model} is complete in the cache")
        return _finish(args, folder, {"commit": folder.name, "bytes_downloaded": 0})
    bad = _check(plan) if args.verify else []
    return _foresee(args, plan, bad) if args.dry_run else _fetch(args, plan, bad)


def _check(plan: Plan) -> list[RemoteFile]:
    """Return what is damaged in the cache."""
    from lily.download import damaged

    bar = TransferBar("checking")
    try:
        bad = damaged(plan, bar)
    finally:
        bar.wipe()
    for file in bad:
        note(f"{file.name} in the cache is damaged")
    return bad


def _foresee(args: argparse.Namespace, plan: Plan, bad: Collection[RemoteFile]) -> int:
    """Print what would be downloaded."""
    from lily.download import check_disk

    needed = plan.bytes_to_fetch + sum(file.size for file in bad)
    if args.json:
        print(json.dumps({**_facts(args, plan, bad), "bytes_to_download": needed}))
    else:
        for record in _files(plan, bad):
            print(f"{record['size'] / 1e6:12.2f} MB  {record['state']:8} {record['name']}")
        print(f"{size_text(needed)} of {size_text(plan.bytes_total)} would be downloaded to {plan.store}")
    check_disk(plan)
    return 0


def _fetch(args: argparse.Namespace, plan: Plan, bad: Collection[RemoteFile]) -> int:
    from lily.checkpoint import open_checkpoint
    from lily.download import fetch

    for file in bad:
        plan.drop(file)
    needed, begun = plan.bytes_to_fetch, time.monotonic()
    bar = TransferBar(f"downloading {args.model}")
    try:
        folder = fetch(plan, args.revision, FILES, bar)
    except KeyboardInterrupt:
        bar.wipe()
        note("stopped; the next lily pull goes on from here")
        raise
    finally:
        bar.wipe()
    open_checkpoint(folder)
    seconds = time.monotonic() - begun
    if needed:
        note(f"downloaded {size_text(needed)} in {duration(seconds)}")
    else:
        note(f"{args.model} is complete and the newest of its revision, there was nothing to download")
    return _finish(args, folder, {**_facts(args, plan, ()), "bytes_downloaded": needed, "seconds": seconds})


def _facts(args: argparse.Namespace, plan: Plan, bad: Collection[RemoteFile]) -> dict[str, Any]:
    return {
        "model": args.model,
        "commit": plan.commit,
        "folder": str(plan.folder),
        "bytes_total": plan.bytes_total,
        "files": _files(plan, bad),
    }


def _files(plan: Plan, bad: Collection[RemoteFile]) -> list[dict[str, Any]]:
    def state(file: RemoteFile) -> str:
        if file in bad:
            return "damaged"
        if plan.place_of(file) is not None:
            return "present"
        return "partial" if plan.partial(file).exists() else "missing"

    return [{"name": file.name, "size": file.size, "state": state(file)} for file in plan.files]


def _finish(args: argparse.Namespace, folder: Path, facts: dict[str, Any]) -> int:
    """Print the folder, and on a terminal what to do next."""
    if args.json:
        print(json.dumps({"model": args.model, **facts, "folder": str(folder)}))
        return 0
    print(folder)
    if is_terminal(sys.stderr):
        revision = "" if args.revision is None else f" --revision {args.revision}"
        note(f"now: lily chat --model {args.model}{revision}")
    return 0
