"""What test_cuda_faults.py runs in a process of its own: the CUDA device on doubles of CUDA's libraries.

Calls are made to fail one after the other; what goes wrong then is printed as JSON, with what has failed.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import lily
from cuda_library import (
    KINDS,
    LATE,
    LAUNCH_FAILED,
    NO_MEMORY,
    PLAIN,
    SILENT,
    STICKY,
    UNKNOWN,
    Double,
    Model,
    Report,
    Thunk,
    attempt,
    error_of,
    ids,
)
from lily import _native, cuda
from lily.errors import DeviceError, LilyError, OutOfMemoryError, UnsupportedError

STEPPING = ("probe", "steps", "sampled", "fork", "generate", "biased")  # operations that step ahead


def story(engine: _native.Engine) -> Iterator[tuple[str, Thunk]]:
    """Calls that need the GPU, in an order that makes sense."""
    sessions: list[Any] = []
    yield "session", lambda: sessions.append(engine.session())
    one = sessions[0] if sessions else None
    if one is None:
        return
    settings = lily.SamplingParams(temperature=0.7, frequency_penalty=0.1).with_defaults({}).native()
    yield "prefill", lambda: one.prefill(ids(7))
    yield "step", lambda: one.step(1)
    yield "step on", lambda: one.step(1)
    yield "logits", one.logits
    yield "sampling", lambda: one.set_sampling(**settings)
    yield "sampled step", lambda: one.step(0)
    yield "top", lambda: one.top_logprobs(2)
    yield "score", lambda: one.score(ids(5), ids(5), 1)
    one.close()


# Opening: every call fails once with each error.


def opening(report: Report, model: Model) -> None:
    """Every call of an engine that is being opened fails, and once nothing does."""
    for result, manner in ((NO_MEMORY, PLAIN), (UNKNOWN, PLAIN)):
        for nth in itertools.count(1):
            report.driver.fail(nth, result, manner)
            engine, error = attempt(model.open)
            failed = report.driver.failed()
            report.driver.fail(0)
            if failed == "cuDriverGetVersion" and error is None:
                report.failed[failed] += 1  # asked for the choice of a compiler: the newest one is taken
            elif failed:
                report.judge("open", failed, error, result)
            else:
                report.require(error is None, "open", error)
            if engine:
                engine.close()
            report.nothing_left("open", nth, failed, result)
            if not failed:
                break


def parallel(report: Report, model: Model) -> None:
    """The same where threads share the work, and more of them than there are pieces of pinned memory."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for nth in itertools.count(10, 9):
        report.driver.fail(nth)
        engine, error = attempt(lambda: model.open(24))
        failed = report.driver.failed()
        report.driver.fail(0)
        if engine:
            engine.close()
        if not failed:
            break
        report.judge("open in parallel", failed, error, UNKNOWN)
        report.nothing_left("open in parallel", nth, failed)


def compiling(report: Report, model: Model, compiler: Double) -> None:
    """Every call of the compiler fails."""
    for result in (1, 6):
        for nth in itertools.count(1):
            compiler.fail(nth, result)
            engine, error = attempt(model.open)
            failed = compiler.failed()
            compiler.fail(0)
            if engine:
                engine.close()
            if failed:
                report.judge("compile", failed, error, result)
            report.nothing_left("compile", nth, failed)
            report.require(not compiler.alive() and not compiler.misuse(), "the compiler's", nth, failed)
            if not failed:
                break


# Working: the same engine goes on.


def public_operations(engine: lily.Engine) -> dict[str, Thunk]:
    """Calls of the public interface, each from a beginning of its own."""
    probe, other = engine.session(), engine.session()
    long = [int(i) for i in ids(70)]

    def read(session: lily.Session, prompt: list[int]) -> int:
        session.reset()
        for _ in session.prefill(prompt):
            pass
        return session.position

    def steps(count: int, **options: Any) -> list[int]:
        read(other, long[:9])
        return [token.id for token in other.step(count, **options)]

    def generate(**options: Any) -> int:
        chunks = list(engine.generate("Once upon a time", max_tokens=3, ignore_eos=True, **options))
        return sum(len(chunk.token_ids) for chunk in chunks)

    def session() -> bool:
        with engine.session() as made:
            return made.position == 0

    def fork() -> list[int]:
        """A branch that writes to a page it shares, and back again."""
        read(other, long[:9])
        other.snapshot()
        with other.fork() as branch:
            found = [token.id for token in branch.step(2)]
        list(other.step(1))
        other.rewind(9)
        return [*found, other.position]

    def file() -> int:
        read(other, long[:9])
        with tempfile.TemporaryDirectory() as folder:
            other.save(folder + "/session")
            with engine.load_session(folder + "/session") as loaded:
                return loaded.position

    return {
        "probe": lambda: read(probe, long[:3]) == 3 and len(list(probe.step(2))) == 2,
        "again": lambda: len(list(probe.step(1))) == 1,
        "session": session,
        "fork": lambda: fork() == [0, 0, 9],
        "file": lambda: file() == 9,
        "prompt": lambda: read(other, long) == 70,
        "steps": lambda: steps(4) == [0] * 4,
        "sampled": lambda: steps(4, temperature=0.8, seed=1, frequency_penalty=0.2) == [0] * 4,
        "generate": lambda: generate() == 3,
        "biased": lambda: generate(temperature=0.0, logit_bias={5: 1.0}, logprobs=True, top_logprobs=2) == 3,
        "logits": lambda: engine.logits.shape == (4096,),
        "score": lambda: engine.score(long, top_logprobs=3).top_ids.shape == (70, 3),
        "info": lambda: engine.info()["device"] == "cuda",
    }


def native_operations(engine: _native.Engine) -> dict[str, Thunk]:
    """A few of them, without what Python adds."""
    probe, other = engine.session(), engine.session()

    def step(session: _native.Session) -> bool:
        return session.step(0)[0] == 0

    def start(session: _native.Session) -> bool:
        session.reset()
        return session.prefill(ids(3)) == 3 and step(session)

    return {
        "probe": lambda: start(probe),
        "again": lambda: step(probe),
        "start": lambda: start(other),
        "steps": lambda: start(other) and step(other) and step(other),
    }


def working(report: Report, operations: dict[str, Thunk], result: int) -> None:
    """Every call of each operation fails, and then the same call works, and one of another session."""
    done: dict[str, Thunk] = {}
    for name, operation in operations.items():
        for nth in itertools.count(1):
            report.driver.fail(nth, result)
            right, error = attempt(operation)
            failed = report.driver.failed()
            report.driver.fail(0)
            if not failed:
                report.require(error is None and right is True, name, error, right)
                break
            if error is None:  # a prompt goes on from the chunk that was not read
                report.require(right is True, name, failed, right)
                report.failed[failed] += 1
                # A step ahead that cannot begin is begun again when it is its turn.
                quiet = failed in SILENT or name in ("prompt", *STEPPING)
                report.require(quiet, name, failed, "no error")
            else:
                report.judge(name, failed, error, result)
            idle = not report.driver.alive().get("running")
            report.require(idle or failed == "cuCtxPushCurrent_v2", name, failed, "then work is left")
            if "again" in done:
                done["probe"]()
                report.require(error_of(done["again"]) is None, name, failed, "then the next call fails")
            report.require(not (misuse := report.driver.misuse()), name, nth, failed, misuse)
        done[name] = operation


def open_demo(**options: Any) -> lily.Engine:
    """Open the demo model with little memory."""
    return lily.Engine("demo", device="cuda", context=256, prefill_chunk=64, threads=1, **options)


def using(report: Report) -> None:
    """The demo model, with errors that pass."""
    for result, late in ((NO_MEMORY, 0), (UNKNOWN, 1)):
        report.driver.set(defer=late, pageable=late)
        with open_demo() as engine:
            working(report, public_operations(engine), result)
        report.nothing_left("closed")


def traced(report: Report, model: Model) -> None:
    """With LILY_DEBUG=trace, where kernels are launched one by one."""
    engine = model.open()
    working(report, native_operations(engine), UNKNOWN)
    engine.close()
    report.nothing_left("closed")


# Errors that stay with the context.


def breaking(report: Report, model: Model, manner: int) -> None:
    """A call breaks the context: all that follow say so, close() works, the next engine has another one."""
    for nth in itertools.count(1):
        report.driver.set(push_fails=nth % 2, defer=nth // 2 % 2)
        report.driver.fail(nth, LAUNCH_FAILED, manner)
        engine, error = attempt(model.open)
        failed = report.driver.failed()
        if not engine:
            judge_break(report, "open", failed, error)
            report.driver.fail(0)
            report.nothing_left("open", nth, failed)
            continue
        broken = False
        for name, call in story(engine):
            error = error_of(call)
            failed = report.driver.failed()
            if broken:
                # A step that had ended before is handed out without the GPU.
                ready = error is None and name == "sampled step"
                report.require(
                    type(error) is DeviceError or "no logits yet" in str(error) or ready,
                    nth,
                    failed,
                    name,
                    "after it:",
                    repr(error),
                )
            elif failed and error is not None:
                judge_break(report, name, failed, error)
                in_flight = manner == LATE and failed == "cuGraphLaunch"
                report.require(not in_flight or "the GPU failed in" in str(error), name, error)
                broken = True
            else:
                report.require(error is None, name, repr(error))
        if broken and nth % 16 == 0:
            beside = error_of(model.open)
            report.require(type(beside) is DeviceError, "a second engine:", repr(beside))
        if nth % 3:
            engine.close()
        del call, engine  # the call has the session, which has the engine
        failed = report.driver.failed()
        report.driver.fail(0)
        report.nothing_left("closed", nth, failed)
        if not failed:
            break


def judge_break(report: Report, where: str, failed: str, error: BaseException | None) -> None:
    """Of the first error: its class and text; a late one names the call that met it."""
    report.failed[failed] += 1
    wanted = UnsupportedError if failed == "cuInit" else DeviceError
    report.require(type(error) is wanted, where, failed, repr(error))
    advice = "" if failed == "cuInit" else "restart the process"
    report.require("unspecified launch failure" in str(error) and advice in str(error), where, error)


def closing(report: Report, model: Model) -> None:
    """Every call of close() fails: everything else is given back all the same."""
    for nth in itertools.count(1):
        engine = model.open()
        session = engine.session()
        session.prefill(ids(3))
        session.step(1)
        report.driver.fail(nth)
        error = error_of(engine.close)
        failed = report.driver.failed()
        report.driver.fail(0)
        report.require(error is None, "close", failed, repr(error))
        report.failed[failed] += 1
        if failed == "cuCtxPushCurrent_v2":  # nothing can be given back but by the context's end
            orphans = report.driver.alive()
            report.require(set(orphans) <= {"orphans"}, "close", failed, orphans)
        else:
            report.nothing_left("close", nth, failed)
        if not failed:
            break


# One launch on a device that stays.


def launching(report: Report) -> None:
    """A test's launch fails at every call: its memory is given back, and the next launch works."""
    slots: dict[str, Any] = {"x": np.zeros(4 * 512, np.float32), "w": np.zeros(512, np.uint16)}
    slots |= {"step": np.zeros(6, np.uint32), "y": np.zeros(4 * 512, np.float16)}

    def launch() -> None:
        _native.run_kernel("rms_norm", {"rows": 4, "dim": 512, "eps": 1e-6}, {}, slots, "cuda")

    report.driver.fail(1, name="cuModuleGetFunction")
    report.require(type(error_of(launch)) is DeviceError, "no function")
    report.require("modules" not in report.driver.alive(), "a kernel that was not found stays")
    launch()
    before = {"memory": 0, **report.driver.alive()}
    for result in (NO_MEMORY, UNKNOWN):
        for nth in itertools.count(1):
            report.driver.fail(nth, result)
            error = error_of(launch)
            failed = report.driver.failed()
            report.driver.fail(0)
            if not failed:
                report.require(error is None, "launch", error)
                break
            alive = {"memory": 0, **report.driver.alive()}
            if error is None:  # of what is given back
                report.require(
                    failed in SILENT or failed == "cuCtxPushCurrent_v2", "launch", failed, "no error"
                )
                before["memory"] = alive.get("memory", 0)
            else:
                report.judge("launch", failed, error, result)
            alive["events"] = before["events"]  # one may be in flight still
            report.require(alive == before, "launch", nth, failed, alive)
            report.require(error_of(launch) is None, "launch", nth, failed, "then the next fails")


# Machines.


def copying(report: Report) -> None:
    """Copies that run when somebody waits bring the same bytes."""
    digests = set()
    for settings in ({}, {"defer": 1}, {"defer": 1, "pageable": 1}):
        report.driver.reset()
        report.driver.set(**settings)
        with open_demo() as engine:
            engine.score([int(i) for i in ids(70)])
            digests.add(report.driver.digest())
        report.nothing_left(settings)
    report.require(len(digests) == 1, "memory differs")


MACHINES: tuple[tuple[dict[str, int], type[LilyError], str], ...] = (
    ({"devices": 0}, UnsupportedError, "there is no GPU 0, this process sees 0"),
    ({"major": 7}, UnsupportedError, "compute capability 7.0, 8.0 or later is needed"),
    ({"init": 100}, UnsupportedError, "no CUDA-capable device is detected"),
    ({"init": 803}, UnsupportedError, "the driver does not start: cuInit: error 803"),
    ({"memory": 260 << 20}, OutOfMemoryError, "lower context"),
)


def machines(report: Report) -> None:
    """GPUs that cannot be used."""
    for settings, kind, text in sorted(MACHINES, key=lambda machine: "init" not in machine[0]):
        report.driver.reset()
        report.driver.set(**settings)
        error = error_of(open_demo)
        report.require(type(error) is kind and text in str(error), settings, repr(error))
        report.nothing_left(settings)
    report.driver.reset()
    with open_demo() as engine:
        report.require(engine.info()["device_info"]["compiler"] == "13.0", engine.info())
    report.nothing_left("closed")


# Threads.


def threads(report: Report) -> None:
    """Two threads step sessions of their own while calls fail; in the end the context breaks."""
    faulthandler.dump_traceback_later(100, exit=True)
    rounds, steps = 30, 12
    seeds = random.Random(20)
    barrier = threading.Barrier(3)
    errors: Counter[str] = Counter()

    def advance(session: lily.Session, count: int) -> None:
        if not 0 < session.position < 200:
            session.reset()
            list(session.prefill([1, 2, 3]))
        before = session.position
        taken = len(list(session.step(count)))
        report.require(taken == count and session.position == before + taken, "lost tokens")

    def work(session: lily.Session) -> None:
        for turn in range(rounds + 1):
            barrier.wait()
            for step in range(steps):
                error = error_of(lambda: advance(session, 1 + step % 3))  # noqa: B023
                if error is not None:
                    errors[type(error).__name__ + (" at last" if turn == rounds else "")] += 1
            barrier.wait()

    with open_demo(max_sessions=2) as engine:
        for defer in (0, 1):
            report.driver.set(defer=defer)
            pair = [engine.session(), engine.session()]
            workers = [threading.Thread(target=work, args=(session,)) for session in pair]
            for worker in workers:
                worker.start()
            for turn in range(rounds + 1):
                last = turn == rounds and defer
                result = LAUNCH_FAILED if last else seeds.choice((NO_MEMORY, UNKNOWN))
                report.driver.fail(seeds.randrange(1, 20 if last else 120), result, STICKY if last else PLAIN)
                barrier.wait()
                barrier.wait()
                report.failed[report.driver.failed()] += 1
            for worker in workers:
                worker.join()
            for session in pair:
                session.close()
    report.require(errors["DeviceError"] and errors["OutOfMemoryError"], errors)
    report.require(errors["DeviceError at last"] >= steps, errors)
    report.driver.fail(0)
    report.nothing_left("closed")
    with open_demo() as engine:
        report.require(len(list(engine.generate("So", max_tokens=2, ignore_eos=True))) > 0, "a new engine")


def main() -> None:
    """Run one story: FOLDER STORY, with the libraries and a small checkpoint in the folder."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    driver, compiler = Double(folder / "libcuda.so.1"), Double(folder / "libnvrtc.so.13")
    driver.kinds = KINDS
    cuda._loaded.append(compiler.native)  # no other one
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one thread compiles: calls come in one order
    faulthandler.enable()
    report = Report(driver)
    stories: dict[str, Thunk] = {
        "opening": lambda: opening(report, Model(folder / "model")),
        "parallel": lambda: parallel(report, Model(folder / "model")),
        "compiling": lambda: compiling(report, Model(folder / "model"), compiler),
        "using": lambda: using(report),
        "traced": lambda: traced(report, Model(folder / "model")),
        "sticky": lambda: breaking(report, Model(folder / "model"), STICKY),
        "late": lambda: breaking(report, Model(folder / "model"), LATE),
        "closing": lambda: closing(report, Model(folder / "model")),
        "launching": lambda: launching(report),
        "copying": lambda: copying(report),
        "machines": lambda: machines(report),
        "threads": lambda: threads(report),
    }
    stories[name]()
    del report.failed[""]
    print(json.dumps({"problems": report.problems, "failed": report.failed}))


if __name__ == "__main__":
    main()
