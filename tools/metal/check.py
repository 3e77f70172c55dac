"""Check the Metal device on Linux: `make check-metal`, and with --full `make check-metal-full`.

A step is a command with a time limit. Steps run side by side, as soon as those that they need are done; the
first that fails ends the run. What a step says is in build/metal/logs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from build_double import COMPILER
from check_macho import tool

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "metal"
LOGS = Path("build", "metal", "logs")
TAIL = 60  # lines of a failed step's log that are printed
POLL = 0.05  # seconds between two looks at what runs


@dataclasses.dataclass(frozen=True)
class Step:
    """A command that must succeed within `limit` seconds, once the steps that it needs have."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    limit: float = 600
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Build:
    """A build of the double; `sanitize` is CMake's LILY_SANITIZE, `runtime` the library to preload."""

    name: str
    sanitize: str = ""
    runtime: str = ""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where it is, relative to the tree that it is built from."""
        return Path("build", "metal", f"double-{self.name}")

    def step(self, root: Path) -> Step:
        """The step that builds it."""
        arguments = (str(root / self.folder), "--source", str(root), "--sanitize", self.sanitize)
        return script(f"double-{self.name}", "build_double.py", *arguments, needs=("headers",))

    def environment(self, root: Path) -> dict[str, str]:
        """What Python needs to run it. The interpreter is not sanitized: its leaks are not reported."""
        places = (root / self.folder / "root", root / "tests" / "metal_double")
        environment = {"PYTHONPATH": os.pathsep.join(map(str, places)), **self.options}
        if self.runtime:
            environment |= {"LD_PRELOAD": runtime_library(self.runtime), "PYTHONMALLOC": "malloc"}
        return environment


@functools.cache
def runtime_library(name: str) -> str:
    """Return the path of a sanitizer's runtime."""
    compiler = tool(COMPILER)
    command = (compiler, f"-print-file-name=libclang_rt.{name}-x86_64.so")
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"{compiler} has no {found}; on Debian: apt-get install libclang-rt-19-dev")
    return found


COMMON = "allocator_may_return_null=1:allow_addr2line=1"  # the latter where llvm-symbolizer is not installed
ASAN = Build(
    "asan",
    "address,undefined",
    "asan",
    {
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:" + COMMON,
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    },
)
TSAN = Build(
    "tsan",
    "thread",
    "tsan",
    # The threads of numpy's OpenBLAS are not instrumented: what orders them is not seen.
    {"TSAN_OPTIONS": "halt_on_error=1:" + COMMON, "OPENBLAS_NUM_THREADS": "1"},
)
PLAIN = Build("plain")

# The tests of the engine: those that look at the program and the files around it run few kernels.
ENGINE = ("api", "generate", "sampling", "threads", "robustness")
MODEL = ("golden", "invariance")
SESSIONS = ("sessions", "reuse", "concurrency")
AROUND = ("doctor", "cli", "load", "chat", "readme")
DEVICE = ("tests/metal_double/check_device.py", "tests/metal_double/check_files.py")
REVERSED, SHUFFLED, WIDE = ("order=1",), ("order=2",), ("width=32",)
TENSOR = ("os_major=26", "os_minor=2", "apple_family=10", "metal4=1")
NOT_HERE = ("tests/test_api.py::test_version",)  # of the installed package
LEFT_OUT = {
    "asan": ("tests/test_robustness.py::test_open__threads_that_cannot_start",),  # limits address space
    "tsan": (
        "tests/test_robustness.py::test_open__threads_that_cannot_start",
        "tests/metal_double/check_device.py::test_model__agrees_with_the_cpu_device[32]",  # takes minutes
    ),
}


def script(name: str, file: str, *arguments: str, needs: tuple[str, ...] = (), limit: float = 600) -> Step:
    """A step that runs a script of this folder."""
    return Step(name, (sys.executable, str(TOOLS / file), *arguments), needs, limit)


def pytest_step(
    name: str,
    build: Build,
    root: Path,
    what: Sequence[str],
    settings: Sequence[str] = (),
    limit: float = 600,
    test_limit: float = 120,
) -> Step:
    """A step that runs tests on the double.

    `what` are names of tests/test_*.py, other paths and options; `settings` are those of double.h.
    """
    files = [word if word.startswith("-") or "/" in word else f"tests/test_{word}.py" for word in what]
    left_out = (*NOT_HERE, *LEFT_OUT.get(build.name, ()))
    options = ["-q", "--capture=sys", "-p", "no:cacheprovider", "-p", "double_plugin", "-m", "not timing"]
    options += ["--device", "metal", *(f"--deselect={test}" for test in left_out)]
    options += ["--test-limit", str(test_limit), *(["--double", *settings] if settings else [])]
    command = (sys.executable, "-m", "pytest", *files, *options)
    return Step(name, command, (f"double-{build.name}",), limit, build.environment(root))


def selftest(build: Build, root: Path) -> Step:
    """A step that tests the double itself, without Python; here leaks count."""
    environment = {
        name: text.replace("detect_leaks=0", "detect_leaks=1") for name, text in build.options.items()
    }
    command = (str(root / build.folder / "metal_double_selftest"),)
    return Step(f"selftest-{build.name}", command, (f"double-{build.name}",), 120, environment)


def cross_build(root: Path) -> Step:
    """The step that builds for a Mac."""
    return script("mac", "check_macho.py", "--source", str(root), needs=("headers",))


def steps(root: Path = ROOT) -> list[Step]:
    """The steps of `make check-metal`."""

    def asan(name: str, what: Sequence[str], settings: Sequence[str] = ()) -> Step:
        return pytest_step(name, ASAN, root, what, settings)

    kernels, tiles = ("kernels", "tiles", "-kmetal"), ("kernels", "tiles", "-kmetal and (tile or _mm or qmm)")
    short = "-knot fills_the_context and not context_ends and not exact_fit and not perplexity"
    return [
        script("headers", "objc_header.py"),
        ASAN.step(root),
        cross_build(root),
        script("shaders", "check_shaders.py"),
        selftest(ASAN, root),
        asan("engine", ENGINE),
        asan("model", MODEL),
        asan("sessions", SESSIONS),
        asan("device", DEVICE),
        asan("around", AROUND),
        asan("ablation", ("tests/bench/check_ablation.py",)),
        asan("engine-reversed", (*ENGINE, short), REVERSED),
        asan("model-reversed", (*MODEL, short), REVERSED),
        asan("kernels-wide", kernels, WIDE),
        asan("tokens-wide", ("tests/metal_double/check_widths.py",)),
        asan("tiles-wide-tensor", tiles, (*WIDE, *TENSOR)),
    ]


def more_steps(root: Path = ROOT) -> list[Step]:
    """What `make check-metal-full` adds."""
    whole = (*ENGINE, *SESSIONS, *MODEL, *AROUND)
    doctor = (sys.executable, "-m", "lily", "doctor", "--device", "metal")
    shuffles = [
        pytest_step(f"suite-shuffled-{seed}", ASAN, root, whole, (*SHUFFLED, f"seed={seed}"), 1200)
        for seed in (1, 2)
    ]
    return [
        *(build.step(root) for build in (TSAN, PLAIN)),
        pytest_step("suite-reversed", ASAN, root, whole, REVERSED, 1200),
        *shuffles,
        selftest(TSAN, root),
        pytest_step("device-tsan", TSAN, root, DEVICE),
        pytest_step("suite-tsan", TSAN, root, whole, limit=1200),
        pytest_step("device-plain", PLAIN, root, DEVICE),  # here growth is measured strictly
        Step("doctor", doctor, ("double-plain",), 300, PLAIN.environment(root)),
        pytest_step("suite-wide", PLAIN, root, whole, WIDE, 3000, test_limit=900),
    ]


def steps_for_mutants(root: Path) -> list[Step]:
    """What a mistake in the host code is looked for with: quick parts of `make check-metal`."""
    quick = ("generate", "golden", "-knot perplexity and not fills_the_context")
    chosen = {
        "plan": ("plan", "plan_native"),
        "device": DEVICE,
        "model": quick,
        "model-reversed": quick,
        "kernels-wide": ("kernels", "tiles", "-kmetal"),
        "tokens-wide": ("tests/metal_double/check_widths.py",),
    }
    settings = {"model-reversed": REVERSED, "kernels-wide": WIDE}
    return [
        script("headers", "objc_header.py"),
        ASAN.step(root),
        cross_build(root),
        *(
            pytest_step(name, ASAN, root, (*what, "--exitfirst"), settings.get(name, ()), test_limit=60)
            for name, what in chosen.items()
        ),
    ]


class Running:
    """A step at work. It leads a process group, so that whatever it started ends with it."""

    def __init__(self, root: Path, step: Step) -> None:
        self.step, self.start = step, time.monotonic()
        self.log = root / LOGS / f"{step.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **step.environment}
        if symbolizer := shutil.which("llvm-symbolizer-19"):
            environment["ASAN_SYMBOLIZER_PATH"] = environment["TSAN_SYMBOLIZER_PATH"] = symbolizer
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                step.command,
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def seconds(self) -> float:
        """Time since it started."""
        return time.monotonic() - self.start

    def failure(self) -> str | None:
        """Return None while it runs, "" if it went well, else what happened."""
        status = self.process.poll()
        if status is None:
            return f"took more than {self.step.limit:.0f} s" if self.seconds > self.step.limit else None
        if status < 0:
            return f"ended by {signal.Signals(-status).name}"
        return f"exit status {status}" if status else ""

    def stop(self) -> None:
        """End what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def report(job: Running, failure: str) -> None:
    """Print a step's line and, if it failed, the end of its log."""
    print(
        f"{'FAILED' if failure else 'ok':7} {job.step.name:20} {job.seconds:6.1f} s  {failure}".rstrip(),
        flush=True,
    )
    if failure:
        lines = job.log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join(f"    {line}" for line in lines[-TAIL:]))
        print(f"    (all of it: {job.log})", flush=True)


def run(
    root: Path,
    steps: Sequence[Step],
    *,
    workers: int = 2,
    quiet: bool = False,
    keep_going: bool = False,
    seconds: dict[str, float] | None = None,
) -> str:
    """Run steps in a tree, `workers` at a time; return the name of the first that failed, or "".

    `seconds` receives the time that each step took.
    """
    waiting, running = list(steps), list[Running]()
    done, failed = set[str](), ""
    try:
        while waiting or running:
            ready = [step for step in waiting if done.issuperset(step.needs)]
            for step in ready[: workers - len(running)]:
                waiting.remove(step)
                running.append(Running(root, step))
            if not running:  # the others need what failed
                break
            time.sleep(POLL)
            for job in list(running):
                failure = job.failure()
                if failure is None:
                    continue
                running.remove(job)
                job.stop()
                if seconds is not None:
                    seconds[job.step.name] = job.seconds
                if not quiet:
                    report(job, failure)
                if not failure:
                    done.add(job.step.name)
                    continue
                failed = failed or job.step.name
                if not keep_going:
                    return failed
    finally:
        for job in running:
            job.stop()
    return failed


def with_needs(steps: Sequence[Step], names: Sequence[str]) -> list[Step]:
    """Return the named steps and those that they need."""
    wanted = set(names)
    for step in reversed(steps):
        if step.name in wanted:
            wanted.update(step.needs)
    return [step for step in steps if step.name in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Check the Metal device on Linux.")
    parser.add_argument("--full", action="store_true", help="everything, also what takes long")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps and those that they need")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    parser.add_argument("--jobs", type=int, default=2, help="steps that run at once (default: 2)")
    options = parser.parse_args(arguments)
    every = [*steps(), *more_steps()]
    names = [step.name for step in every]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = with_needs(every, options.only) if options.only else every if options.full else steps()
    # Under nohup it is ignored, and tests that press Ctrl-C would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    failed = run(ROOT, chosen, workers=options.jobs, keep_going=options.keep_going)
    print(f"{'FAILED' if failed else 'passed'}: {len(chosen)} steps in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
