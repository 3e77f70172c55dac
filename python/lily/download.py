"""Fetch a checkpoint from the hub into its cache, going on where an earlier attempt ended.

The cache has the layout of huggingface_hub, so that other programs find what Lily fetched and the other way
round. That package begins a file anew after an interruption. Here a file grows beside its place, under its
checksum and the ending .lily.incomplete, and takes its place once the checksum is right; huggingface_hub then
makes the links to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import queue
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from lily.errors import CheckpointError, DownloadError, UnsupportedError
from lily.hub_access import LostError, describe_files, failure, list_files, patiently, pieces_of, quiet_links
from lily.model_config import load_config

Progress = Callable[[int, int], object]

_WORKERS = 4
_TICK = 0.1  # seconds between two calls of progress
_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before a file without a new byte is asked for again
_PIECE = 1 << 20
_GIT_ID = re.compile("[0-9a-f]{40}")
_SHA256 = re.compile("[0-9a-f]{64}")
_SUFFIX = ".lily.incomplete"


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub.

    Attributes:
        name: Its path in the repository.
        size: Bytes.
        digest: Its name in the cache: the SHA-256 of a large file, the git id of another one.
    """

    name: str
    size: int
    digest: str

    def hasher(self) -> Any:
        """Return what computes the digest of the file's bytes."""
        if _SHA256.fullmatch(self.digest):
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True)
class Plan:
    """What a checkpoint on the hub consists of, and what of it the cache lacks.

    Attributes:
        repo: The hub id.
        commit: The commit that the revision means now.
        store: The folder of the repository in the cache.
        files: The files Lily needs. What the hub gives no size or checksum of is left out here, and fetched
            by huggingface_hub.
    """

    repo: str
    commit: str
    store: Path
    files: tuple[RemoteFile, ...]

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint when it is complete."""
        return self.store / "snapshots" / self.commit

    @property
    def missing(self) -> tuple[RemoteFile, ...]:
        """The files that are not in the cache, or there with another size."""
        return tuple(file for file in self.files if self.place_of(file) is None)

    @property
    def bytes_total(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def bytes_to_fetch(self) -> int:
        """Bytes that have to be downloaded, without what an earlier attempt left."""
        return sum(max(file.size - _size(self.partial(file)), 0) for file in self.missing)

    def place_of(self, file: RemoteFile) -> Path | None:
        """Return where the file is in the cache, or None if it is not, or not completely."""
        for path in (self.folder / file.name, self.blob(file)):
            if path.is_file() and _size(path) == file.size:
                return path
        return None

    def blob(self, file: RemoteFile) -> Path:
        """Return where the bytes of a file belong."""
        return self.store / "blobs" / file.digest

    def partial(self, file: RemoteFile) -> Path:
        """Return where the bytes of a file are collected."""
        return self.store / "blobs" / (file.digest + _SUFFIX)

    def drop(self, file: RemoteFile) -> None:
        """Remove a damaged file from the cache; a link stays, and leads to its successor."""
        entry = self.folder / file.name
        for path in (self.blob(file), *(() if entry.is_symlink() else (entry,))):
            path.unlink(missing_ok=True)


def plan_download(repo: str, revision: str | None, patterns: list[str]) -> Plan:
    """Ask the hub what a checkpoint consists of, and refuse one that Lily does not run.

    Args:
        repo: The hub id.
        revision: Branch, tag or commit; None means "main".
        patterns: Names of the files that are needed, with wildcards.

    Raises:
        DownloadError: The hub does not tell.
        UnsupportedError: Lily does not run the model.
        CheckpointError: It is no model, or its configuration is damaged.
    """
    import huggingface_hub
    from huggingface_hub.file_download import repo_folder_name

    try:
        commit, names = list_files(repo, revision, patterns)
        _check_supported(repo, commit)
        files = tuple(
            RemoteFile(name, size, digest)
            for name, size, digest in describe_files(repo, commit, names)
            if size is not None and (_SHA256.fullmatch(digest) or _GIT_ID.fullmatch(digest))
        )
    except (CheckpointError, UnsupportedError):
        raise
    except Exception as error:
        raise failure(repo, revision, error) from error
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE).expanduser().absolute()
    store = cache / repo_folder_name(repo_id=repo, repo_type="model")
    return Plan(repo, commit, store, files)


def _check_supported(repo: str, commit: str) -> None:
    """Read the configuration, which is fetched into a folder of its own."""
    import huggingface_hub

    with tempfile.TemporaryDirectory() as cache:
        folder = patiently(
            lambda: huggingface_hub.snapshot_download(
                repo,
                revision=commit,
                allow_patterns=["config.json", "generation_config.json"],
                cache_dir=cache,
                tqdm_class=quiet_links(),
            )
        )
        try:
            load_config(Path(folder))
        except (CheckpointError, UnsupportedError) as error:  # the folder is gone when this is read
            raise type(error)(str(error).replace(folder, repo)) from None


def fetch(plan: Plan, revision: str | None, patterns: list[str], progress: Progress | None) -> Path:
    """Download what the cache lacks and return the checkpoint's folder.

    Args:
        plan: What plan_download() returned.
        revision: As there.
        patterns: As there.
        progress: Called with (done, total) bytes of all files, in this thread; what the cache had counts as
            done. An exception it raises ends the download, as Ctrl-C does; the next one goes on from there.

    Raises:
        DownloadError: Something could not be fetched.
    """
    import huggingface_hub

    check_disk(plan)
    if plan.missing:
        _Downloads(plan, revision, progress).run()
    try:
        folder = patiently(
            lambda: huggingface_hub.snapshot_download(
                plan.repo, revision=revision, allow_patterns=patterns, tqdm_class=quiet_links()
            )
        )
    except Exception as error:
        raise failure(plan.repo, revision, error) from error
    for file in plan.files:  # where a file system has no links, the entry is a copy
        if not (plan.folder / file.name).is_symlink() and (plan.folder / file.name).is_file():
            plan.blob(file).unlink(missing_ok=True)
    return Path(folder)


def damaged(plan: Plan, progress: Progress | None) -> list[RemoteFile]:
    """Return the files in the cache whose bytes have another checksum than on the hub.

    Args:
        plan: What plan_download() returned.
        progress: Called with (done, total) bytes.
    """
    found = []
    here = [(file, path) for file in plan.files if (path := plan.place_of(file)) is not None]
    done, total = 0, sum(file.size for file, _ in here)
    for file, path in here:
        hasher = file.hasher()
        with open(path, "rb") as stream:
            while piece := stream.read(_PIECE):
                hasher.update(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, total)
        if hasher.hexdigest() != file.digest:
            found.append(file)
    return found


def check_disk(plan: Plan) -> None:
    """Raise DownloadError if the disk has no room for what the cache lacks."""
    needed = plan.bytes_to_fetch
    folder = next(path for path in (plan.store, *plan.store.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadError(
            f"{plan.repo}: {needed / 1e9:.2f} GB are to be fetched, and the disk of the hub cache "
            f"{plan.store.parent} has room for {free / 1e9:.2f} GB",
            "disk_full",
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class _Downloads:
    """Files on their way, by threads that end with the one that waits for them.

    The threads are daemons: one that waits for a dead connection must not keep the program from ending.
    """

    def __init__(self, plan: Plan, revision: str | None, progress: Progress | None) -> None:
        self._plan = plan
        self._revision = revision
        self._progress = progress
        self._files: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        for file in sorted(plan.missing, key=lambda file: file.size):
            self._files.put(file)
        self._lock = threading.Lock()
        self._done = {file.name: _size(plan.partial(file)) for file in plan.missing}
        self._present = plan.bytes_total - sum(file.size for file in plan.missing)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(_WORKERS)]

    def run(self) -> None:
        try:
            (self._plan.store / "blobs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failure(self._plan.repo, self._revision, error) from error
        self._report()
        try:
            for thread in self._threads:
                thread.start()
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(_TICK)
                    self._report()
        finally:
            self._stop.set()
            for thread in self._threads:
                if thread.is_alive():
                    thread.join(1)
        if self._error is not None:
            raise failure(self._plan.repo, self._revision, self._error) from self._error
        self._report()

    def _report(self) -> None:
        if self._progress is not None and self._error is None:
            with self._lock:
                done = self._present + sum(self._done.values())
            self._progress(min(done, self._plan.bytes_total), self._plan.bytes_total)

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._fetch(self._files.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            self._stop.set()

    def _fetch(self, file: RemoteFile) -> None:
        path = self._plan.partial(file)
        with _locked(path, self._stop) as stream:
            if stream is None or self._plan.place_of(file) is not None:  # by another process, meanwhile
                path.unlink(missing_ok=True)
                self._note(file, file.size)
                return
            if not self._complete(stream, file):
                return  # stopped
            os.fsync(stream.fileno())
            self._plan.drop(file)
            os.replace(path, self._plan.blob(file))

    def _complete(self, stream: BinaryIO, file: RemoteFile) -> bool:
        """Append what is missing and check the whole; False if the download was stopped before."""
        hasher = file.hasher()
        at = _read_back(stream, hasher, file.size)
        tries = 0
        while at < file.size:
            before = at
            try:
                for start, piece in pieces_of(self._plan.repo, self._plan.commit, file.name, at):
                    if self._stop.is_set():
                        return False
                    if start != at:  # the hub sends everything again
                        stream.truncate(0)
                        hasher, at = file.hasher(), 0
                    stream.write(piece)
                    hasher.update(piece)
                    at += len(piece)
                    self._note(file, at)
                    if at > file.size:
                        break
                reason = f"{file.name} ended after {at} of {file.size} bytes"
            except LostError as error:
                reason = str(error)
            tries = 0 if at > before else tries + 1
            if tries > len(_PAUSES):
                raise ConnectionError(f"{reason}; the next attempt goes on from there")
            if tries and self._stop.wait(_PAUSES[tries - 1]):
                return False
        if at != file.size or hasher.hexdigest() != file.digest:
            stream.truncate(0)
            raise DownloadError(
                f"{self._plan.repo}: {file.name} has another size or checksum than the hub announced; "
                "it is fetched anew next time",
                "damaged",
            )
        return True

    def _note(self, file: RemoteFile, done: int) -> None:
        with self._lock:
            self._done[file.name] = done


@contextlib.contextmanager
def _locked(path: Path, stop: threading.Event) -> Iterator[BinaryIO | None]:
    """Open a partial file that no other process writes to; None if that one has completed it."""
    with open(path, "ab+", buffering=0) as stream:
        while not stop.is_set():
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stop.wait(_TICK)
            except OSError:  # a file system without locks
                break
        try:
            same = os.path.samestat(os.fstat(stream.fileno()), os.stat(path))
        except FileNotFoundError:
            same = False
        yield stream if same else None


def _read_back(stream: BinaryIO, hasher: Any, limit: int) -> int:
    """Put a partial file into the checksum and return its size; one that is too long is emptied."""
    if os.fstat(stream.fileno()).st_size > limit:
        stream.truncate(0)
    stream.seek(0)
    at = 0
    while piece := stream.read(_PIECE):
        hasher.update(piece)
        at += len(piece)
    return at
