"""A process of its own for each engine, so that threads of one cannot disturb another.

    python -m lily.bench.worker

reads one JSON object a line from standard input: first {"runner": "module:Class", "settings": {...}}, then
{"call": method, "arguments": [...]}. Each is answered by one object in a line: {"result": ...} or
{"error": text}, before which there may be {"progress": [...]}. The end of its input is its end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, TextIO

from lily.bench.runners import Progress, Runner
from lily.errors import LilyError

_PATIENCE = 10.0  # seconds that an engine has to close
_TELLING = 1.0  # seconds; threads may spin for a moment before they sleep


class WorkerError(LilyError):
    """A worker's engine failed, or its process ended."""


class Worker:
    """A Runner in a process of its own; everything raises WorkerError if it fails or its process ends.

    Args:
        runner: The runner's class, as "module:Class".
        settings: Arguments of the class.
        progress: Called with what the runner reports.
    """

    def __init__(self, runner: str, settings: dict[str, Any], progress: Progress | None = None) -> None:
        self._progress = progress
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lily.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._idle = (0.0, 0.0)
        self._busy = False
        try:
            self._ask({"runner": runner, "settings": settings})
        except BaseException:
            self.close()
            raise

    def facts(self) -> dict[str, Any]:
        """Return what the runner does."""
        facts: dict[str, Any] = self._call("facts")
        return facts

    def hold(self, count: int) -> None:
        """Let the runner do it."""
        self._call("hold", count)

    def decode(self, tokens: int) -> list[float]:
        """Return what the runner does."""
        seconds: list[float] = self._call("decode", tokens)
        return seconds

    def prefill(self, count: int) -> float:
        """Return what the runner does."""
        return float(self._call("prefill", count))

    @property
    def idle_load(self) -> float:
        """Cores that the process kept busy between the calls; 0 if that was too short to tell."""
        cpu, wall = self._idle
        return cpu / wall if wall >= _TELLING else 0.0

    def close(self) -> None:
        """End the process, which is killed if it is at work; a second call does nothing."""
        process = self._process
        if process.stdin is None or process.stdin.closed:
            return
        if self._busy:
            process.kill()
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._errors.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._ask({"call": method, "arguments": arguments})

    def _ask(self, request: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None or stdin.closed:
            raise WorkerError("the worker is closed")
        self._busy = True
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            while True:
                line = stdout.readline()
                if not line:
                    raise WorkerError(self._why_it_ended())
                reply = json.loads(line)
                if "progress" not in reply:
                    break
                if self._progress is not None:
                    self._progress(*reply["progress"])
        except BrokenPipeError:
            raise WorkerError(self._why_it_ended()) from None
        self._busy = False
        if "error" in reply:
            raise WorkerError(reply["error"])
        self._idle = reply["idle"]
        return reply["result"]

    def _why_it_ended(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        said = [line.strip() for line in self._errors if line.strip()]
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"its process ended with {how}" + (f": {said[-1]}" if said else "")


class _Idle:
    """Counts the processor and wall-clock seconds between calls."""

    def __init__(self) -> None:
        self.cpu = self.wall = 0.0
        self._start = (time.process_time(), time.perf_counter())

    def begin(self) -> None:
        self._start = (time.process_time(), time.perf_counter())

    def end(self) -> None:
        self.cpu += time.process_time() - self._start[0]
        self.wall += time.perf_counter() - self._start[1]


def serve(requests: TextIO, replies: TextIO) -> None:
    """Make the runner that the first request names, and answer the others with its methods."""

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    def progress(*state: object) -> None:
        reply({"progress": state})

    runner: Runner | None = None
    idle = _Idle()
    for line in requests:
        idle.end()
        request = json.loads(line)
        try:
            result = None
            if runner is None:
                module, name = request["runner"].split(":")
                made = getattr(importlib.import_module(module), name)
                runner = made(**request["settings"], progress=progress)
            else:
                result = getattr(runner, request["call"])(*request["arguments"])
            reply({"result": result, "idle": (idle.cpu, idle.wall)})
        except Exception as error:
            known = isinstance(error, (LilyError, ValueError)) and str(error)
            reply({"error": str(error) if known else f"{type(error).__name__}: {error}"})
        idle.begin()
    if runner is not None:
        runner.close()


def main() -> None:
    """Serve on standard input and output."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that began this closes it
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the replies
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
