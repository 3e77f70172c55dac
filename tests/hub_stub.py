"""A hub on this machine: serves one folder as the repository owner/name, with faults on demand."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "model.safetensors"
_LARGE = 100_000  # bytes from which the hub names a file by its SHA-256


class Hub(http.server.ThreadingHTTPServer):
    """The hub, which runs until close() or the end of a with statement.

    Attributes:
        folder: The files of the repository.
        requests: Method and path of every request.
        ranges: The Range headers of requests for files, by name.
        faults: What happens to the next requests for a path that ends like the key, the first one first:
            an int is the status of the answer, ("drop", n) ends the connection after n bytes, "short" sends
            half a file as if it were the whole, "flip" changes a byte, "whole" ignores the range.
        pause: Seconds between two pieces of 64 KiB.
        token: What may read the repository; None is anybody.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.requests: list[str] = []
        self.ranges: dict[str, list[str]] = defaultdict(list)
        self.faults: dict[str, list[Any]] = {}
        self.pause = 0.0
        self.token: str | None = None
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def environment(self, cache: Path) -> dict[str, str]:
        """Return variables with which a program uses this hub and a cache of its own."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(cache.parent), "HF_HUB_CACHE": str(cache),
            "HF_TOKEN": "", "HF_HUB_OFFLINE": "", "NO_PROXY": "*",
        }  # fmt: skip

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that went away."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        fault = self._fault(path)
        if isinstance(fault, int):
            self._refuse(fault, {401: "", 403: "GatedRepo", 404: "RepoNotFound"}.get(fault, ""))
        elif self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._refuse(401, "GatedRepo" if "/resolve/" in path else "RepoNotFound")
        elif path == "/api/models/owner/name" or path.startswith("/api/models/owner/name/revision/"):
            if path.rsplit("/", 1)[1] in ("name", "main", COMMIT):
                siblings = [{"rfilename": name} for name in self._names()]
                self._json({"id": "owner/name", "sha": COMMIT, "siblings": siblings})
            else:
                self._refuse(404, "RevisionNotFound")
        elif path.startswith("/api/models/owner/name/tree/"):
            self._json([self._entry(name) for name in self._names()])
        elif path.startswith("/owner/name/resolve/"):
            name = path.split("/", 5)[5]
            if name in self._names():
                self._file(name, fault)
            else:
                self._refuse(404, "EntryNotFound")
        else:
            self._refuse(404, "RepoNotFound")

    def _names(self) -> list[str]:
        return sorted(file.name for file in self.server.folder.iterdir())

    def _fault(self, path: str) -> Any:
        for end, faults in self.server.faults.items():
            if faults and path.endswith(end) and (self.command == "GET" or isinstance(faults[0], int)):
                return faults.pop(0)
        return None

    def _entry(self, name: str) -> dict[str, Any]:
        data = (self.server.folder / name).read_bytes()
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": digest(data)[:40]}
        if len(data) >= _LARGE:
            entry["lfs"] = {"oid": digest(data), "size": len(data), "pointerSize": 134}
        return entry

    def _file(self, name: str, fault: Any) -> None:
        data = (self.server.folder / name).read_bytes()
        headers = {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if len(data) >= _LARGE:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": headers["ETag"]}
        begin, status = 0, 200
        if self.command == "GET":
            self.server.ranges[name].append(self.headers.get("Range", ""))
            if "Range" in self.headers and fault != "whole":
                begin, status = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")), 206
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        body = data[begin:]
        if fault == "short":
            body = body[: len(body) // 2]
        elif fault == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        self._head(status, {**headers, "Content-Length": str(len(body))})
        if self.command == "GET":
            self._send(body, fault[1] if isinstance(fault, tuple) else None)

    def _send(self, body: bytes, most: int | None) -> None:
        for at in range(0, len(body) if most is None else most, 1 << 16):
            self.wfile.write(body[at : min(at + (1 << 16), len(body) if most is None else most)])
            time.sleep(self.server.pause)
        if most is not None:
            self.close_connection = True

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._head(200, {"Content-Length": str(len(body)), "Content-Type": "application/json"})
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._head(status, {"Content-Length": "0", **({"X-Error-Code": code} if code else {})})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def digest(data: bytes) -> str:
    """Return the name of a file's bytes in the hub's cache."""
    if len(data) >= _LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def serve(source: Path, place: Path) -> Hub:
    """Serve a copy of a checkpoint's folder, which tests may change."""
    return Hub(shutil.copytree(source, place))


@contextlib.contextmanager
def only_hub(source: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a folder as the hub of this process, which begins with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "cache"))
    with serve(source, place / "served") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield hub
