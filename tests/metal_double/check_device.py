"""The Metal device on the software double: what it asks of Metal, and what it does when Metal says no.

Not collected by a plain pytest run: the double exists in a build of its own (make check-metal).
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

import lily
from demo_model import LONG, PROMPT, error_of, info, open_engine, persist, story
from double_plugin import Double
from lily.checkpoint import DEMO
from lily.errors import DeviceError, LilyError, OutOfMemoryError, UnsupportedError

# What is asked of Metal.


def test_step__two_in_flight_one_pass_each(double: Double, expected: list[int]) -> None:
    with open_engine() as engine, engine.session() as session:
        for _ in session.prefill(PROMPT):
            pass
        double.reset()
        double.set("latency_us", 2000)
        assert [token.id for token in session.step(max_tokens=12)] == expected
        assert double.count("max_in_flight") == 2
        assert double.count("command_buffers") == double.count("encoders") == 12
        (launches, stages), (tail_launches, tail_stages) = plan_size("decode"), plan_size("greedy")
        assert double.count("dispatches") == 12 * (launches + tail_launches)
        # One barrier between two stages, and one between the tail and the body.
        assert double.count("barriers") == 12 * (stages + tail_stages - 1)


def plan_size(name: str) -> tuple[int, int]:
    """Launches and stages of a plan of the demo model."""
    from lily.plan import record, shape_config

    plan = record(shape_config("demo"), name, context=512, prefill_chunk=64)
    return len(plan.launches), plan.stages


@pytest.mark.parametrize("stop", range(1, 6))
def test_step__stopping_with_steps_in_flight_changes_nothing(double: Double, stop: int) -> None:
    double.set("latency_us", 500)
    with open_engine() as engine, engine.session() as one, engine.session() as other:
        logits = []
        for session, ahead in ((one, 5), (other, 0)):
            native = session._native
            native.prefill(np.array(engine.tokenizer.encode(PROMPT), np.int32))
            tokens = [native.step(ahead) for _ in range(stop)]
            after = native.logits()  # of the last token handed out, whatever is in flight
            native.prefill(np.array(engine.tokenizer.encode(" Then"), np.int32))
            more = [native.step(ahead) for _ in range(3)]
            logits.append((tokens, after.tobytes(), more, native.logits().tobytes()))
        assert logits[0] == logits[1]


# A prompt's length and the tokens then taken: every generation of the state, and the end of a page, where the
# step that is queued when the caller stops has taken the next page.
STOPS = [(9, 1), (9, 2), (9, 3), (9, 4), (252, 3), (252, 4), (252, 5)]


@pytest.mark.parametrize("latency", [0, 20_000])  # the queued step has ended, or runs still
@pytest.mark.parametrize("then", ["prefill", "reset", "sampling"])
def test_step__what_follows_a_stop_is_right(double: Double, then: str, latency: int) -> None:
    """At both depths of the queue: with nothing asked for ahead, no step is ever given up."""
    settings = lily.SamplingParams(temperature=0.0, repetition_penalty=1.3).with_defaults({}).native()
    results = []
    with open_engine() as engine:
        ids = np.arange(300, dtype=np.int32) * 7919 % 4000
        for ahead in (0, 1, 5):
            double.set("latency_us", 0)
            with engine.session() as session:
                native, found = session._native, []
                for length, stop in STOPS:
                    native.reset()
                    native.set_sampling(**lily.SamplingParams(temperature=0.0).with_defaults({}).native())
                    while (done := native.position) < length:
                        native.prefill(ids[done:length])
                    double.set("latency_us", latency)
                    tokens = [native.step(ahead) for _ in range(stop)]
                    if latency:
                        assert double.count("in_flight") == min(ahead, 1)
                    if then == "reset":
                        native.reset()
                    if then == "sampling":
                        native.set_sampling(**settings)
                    else:
                        native.prefill(ids[:5])
                    double.set("latency_us", 0)
                    more = [native.step(ahead) for _ in range(3)]
                    found.append((tokens, more, native.logits().tobytes()))
            results.append(found)
    assert results[0] == results[1] == results[2]


def test_step__penalties_survive_steps_that_were_given_up(double: Double) -> None:
    options = {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    results = []
    with open_engine() as engine:
        for ahead in (5, 0):
            with engine.session() as session:
                native = session._native
                native.prefill(np.array(engine.tokenizer.encode(PROMPT), np.int32))
                settings = lily.SamplingParams(**options).with_defaults({}).native()  # type: ignore[arg-type]
                native.set_sampling(**settings)
                tokens = []
                for turn in range(9):
                    tokens.append(native.step(ahead))
                    if turn % 3 == 1:
                        native.top_logprobs(2)  # ends the queue; its steps are kept
                    if turn % 4 == 2:
                        native.set_sampling(**settings)  # ends the queue and gives the steps up
                results.append((tokens, native.logits().tobytes()))
    assert results[0] == results[1]


def test_sessions__interleaved_steps_lose_nothing(double: Double, expected: list[int]) -> None:
    with open_engine() as engine, engine.session() as one, engine.session() as other:
        for session in (one, other):
            for _ in session.prefill(PROMPT):
                pass
        streams = [one.step(max_tokens=12), other.step(max_tokens=12, temperature=0.0)]
        pairs = [(next(streams[0]).id, next(streams[1]).id) for _ in range(12)]
        assert [first for first, _ in pairs] == [second for _, second in pairs] == expected


@pytest.mark.parametrize("order", [1, 2])
def test_order__inside_stages_does_not_matter(double: Double, order: int) -> None:
    results = []
    for setting in (0, order):
        double.set("order", setting)
        with open_engine() as engine, engine.session() as session:
            for _ in session.prefill(LONG):
                pass
            tokens = [token.id for token in session.step(max_tokens=8)]
            results.append((tokens, session.logits.tobytes()))
    assert results[0] == results[1]


def test_prefill__long_work_is_cut_between_layers(double: Double) -> None:
    def buffers(tokens: int) -> tuple[int, list[int]]:
        before = double.count("command_buffers")
        made = story(engine, tokens, LONG)
        return double.count("command_buffers") - before, made

    double.set("dispatch_ns", 1000)
    with open_engine() as engine:
        chunks = -(-len(engine.tokenizer.encode(LONG)) // 64)
        untimed, first = buffers(1)
        assert untimed > chunks + 1  # a plan is cut at each layer until it was timed
        assert buffers(1) == (chunks + 1, first)
        double.set("dispatch_ns", 5_000_000)  # ten dispatches are long enough for a command buffer
        assert buffers(1)[1] == first
        cut, again = buffers(1)
        assert again == first
        assert cut == 9 * chunks + 1  # 8 layers and the head; a step is never cut
        double.set("dispatch_ns", 2_000_000)  # now two layers fit into one
        assert buffers(1)[1] == first
        assert buffers(1) == (5 * chunks + 1, first)


# What it computes.


@pytest.mark.parametrize("width", [1, 32])
def test_model__agrees_with_the_cpu_device(double: Double, width: int) -> None:
    """Teacher-forced, prefill and decode. At width 1 both run the same code, so every bit is the same."""
    double.set("width", width)
    scored, prefilled = (100, 6) if width == 1 else (40, 2)
    ids = lily.Tokenizer(DEMO).encode(LONG)[:scored]
    found = []
    for device in ("metal", "cpu"):
        with lily.Engine("demo", device=device, context=512, prefill_chunk=64) as engine:
            score = engine.score(ids, top_logprobs=1)
            with engine.session() as session:
                native = session._native
                logits = []
                for token in ids[:prefilled]:
                    native.prefill(np.array([token], np.int32))
                    logits.append(native.logits())
                native.step(0)
                logits.append(native.logits())
            found.append((np.asarray(score.logprobs), np.stack(logits)))
    (logprobs, logits_), (cpu_logprobs, cpu_logits) = found
    if width == 1:
        assert logprobs.tobytes() == cpu_logprobs.tobytes()
        assert logits_.tobytes() == cpu_logits.tobytes()
    else:
        assert np.abs(logprobs - cpu_logprobs)[1:].mean() < 0.01
        assert np.abs(logits_ - cpu_logits).mean() < 0.01


# Which form of the tiles.


@pytest.mark.parametrize(
    ("system", "minor", "family", "products", "reason"),
    [
        (15, 5, 9, "simdgroup matrices", "macOS 26"),
        (26, 1, 10, "simdgroup matrices", "macOS 26"),
        (26, 2, 9, "simdgroup matrices", "no tensor units"),
        (16, 2, 10, "tensor operations (Metal 4)", "has tensor units"),  # what old programs are told
        (16, 1, 10, "simdgroup matrices", "macOS 26"),
        (26, 2, 10, "tensor operations (Metal 4)", "has tensor units"),
    ],
)
def test_tiles__form_follows_system_and_gpu(
    double: Double, expected: list[int], system: int, minor: int, family: int, products: str, reason: str
) -> None:
    double.set("os_major", system)
    double.set("os_minor", minor)
    double.set("apple_family", family)
    double.set("metal4", int(system != 15))
    with open_engine() as engine:
        facts = info(engine)
        assert facts["matrix_products"] == products
        assert reason in facts["matrix_products_reason"]
        assert story(engine) == expected


@pytest.mark.parametrize("kind", ["library", "pipeline"])
def test_tiles__tensor_form_that_does_not_compile(double: Double, expected: list[int], kind: str) -> None:
    for nth in itertools.count(1):
        double.reset()
        for name, value in (("os_major", 26), ("os_minor", 2), ("apple_family", 10), ("metal4", 1)):
            double.set(name, value)
        double.fail(kind, nth)
        try:
            engine = open_engine()
        except DeviceError:
            continue  # a family without tiles failed: there is nothing to fall back to
        with engine:
            fell_back = info(engine)["matrix_products"] == "simdgroup matrices"
            if fell_back:
                assert "do not compile here" in info(engine)["matrix_products_reason"]
                assert story(engine) == expected
                return
        assert nth < 60


# What goes wrong.

OPENING = {
    "device": (UnsupportedError, "no access to a GPU"),
    "queue": (DeviceError, "command queue"),
    "buffer": (OutOfMemoryError, "cannot allocate"),
    "library": (DeviceError, "does not compile: "),
    "function": (DeviceError, "is not in its compiled library"),
    "pipeline": (DeviceError, "makes no pipeline: "),
}


@pytest.mark.parametrize("kind", OPENING)
def test_open__every_call_that_fails_is_a_typed_error(double: Double, expected: list[int], kind: str) -> None:
    failures = 0
    for nth in itertools.count(1):
        double.fail(kind, nth)
        error = error_of(open_engine)
        if error is None:
            break
        failures += 1
        wanted, text = OPENING[kind]
        assert type(error) is wanted, error
        assert str(error).startswith("metal: ")
        assert text in str(error)
        del error
        gc.collect()
        assert double.count("live_buffers") == double.count("live_pipelines") == 0
    assert failures >= 1
    double.set(f"fail:{kind}", 0)
    with open_engine() as engine:
        assert story(engine) == expected


@pytest.mark.parametrize("kind", ["command_buffer", "encoder", "execution"])
def test_step__every_command_buffer_that_fails_is_a_typed_error(
    double: Double, expected: list[int], kind: str
) -> None:
    with open_engine() as engine:
        ids = engine.tokenizer.encode(PROMPT)
        for nth in range(1, 12):
            with engine.session() as session:
                double.fail(kind, nth)
                tokens, errors = persist(session, ids, len(expected))
                assert [type(error) for error in errors] == [DeviceError]
                assert "metal" in str(errors[0])
                assert tokens == expected


def test_step__the_gpu_out_of_memory_is_its_own_error(double: Double, expected: list[int]) -> None:
    double.set("execution_error", 8)
    with open_engine() as engine:
        double.fail("execution", 3)
        with pytest.raises(OutOfMemoryError, match="GPU failed in"):
            story(engine)
        assert story(engine) == expected


def test_step__a_gpu_taken_away_stays_so_and_says_what_to_do(double: Double) -> None:
    double.set("execution_error", 4)
    with open_engine() as engine:
        double.fail("execution", 3)
        for _ in range(2):
            with pytest.raises(DeviceError, match="restart the process"):
                story(engine)
    double.set("execution_error", 1)
    with open_engine() as engine:
        story(engine, 1)


def test_step__an_error_while_another_session_works_is_not_lost(double: Double, expected: list[int]) -> None:
    double.set("latency_us", 2000)
    with open_engine() as engine, engine.session() as one, engine.session() as other:
        for session in (one, other):
            session._native.prefill(np.array(engine.tokenizer.encode(PROMPT), np.int32))
        tokens = [one._native.step(5)[0]]
        double.fail("execution", 1)
        errors = 0
        while len(tokens) < 6:
            other._native.logits()
            error = error_of(lambda: tokens.append(one._native.step(5)[0]))
            errors += error is not None
        assert errors == 1
        assert tokens == expected[:6]


def test_step__an_error_names_the_place(double: Double) -> None:
    double.set("dispatch_ns", 1000)  # so that no prompt is cut
    with open_engine() as engine:
        story(engine, 2)
        double.fail("execution", 2)
        with pytest.raises(DeviceError, match=r"the GPU failed in greedy; decode_\d+: "):
            story(engine)


def test_step__after_a_failure_nothing_runs(double: Double, expected: list[int]) -> None:
    double.set("latency_us", 3000)
    with open_engine() as engine, engine.session() as session:
        for _ in session.prefill(PROMPT):
            pass
        double.fail("execution", 1)
        with pytest.raises(DeviceError):
            session._native.step(5)
        assert double.count("in_flight") == 0
        assert [session._native.step(0)[0] for _ in range(12)] == expected


# Memory.


def test_memory__more_than_the_gpu_works_on_is_refused_before_loading(double: Double) -> None:
    double.set("working_set", 8 << 20)
    with pytest.raises(OutOfMemoryError, match="this device works on"):
        open_engine()
    assert double.count("buffer_bytes") == 0


def test_memory__weights_are_split_to_fit_the_gpu(double: Double, expected: list[int]) -> None:
    double.set("max_buffer_length", 4 << 20)
    with open_engine() as engine:
        assert double.count("live_buffers") > 6
        assert story(engine) == expected


def test_memory__a_buffer_beyond_the_limit_is_refused(double: Double) -> None:
    double.set("max_buffer_length", 1 << 16)
    with pytest.raises(LilyError, match="buffers hold 65536"):
        open_engine()


def test_launch__gives_its_memory_back_and_refuses_too_much() -> None:
    # In a process of its own: the device of run_kernel is never destroyed.
    code = """
import ctypes, numpy as np
from lily import _native
double = ctypes.CDLL(_native.__file__)
def launch(rows):
    slots = {"x": np.zeros(rows * 512, np.float32), "w": np.zeros(512, np.uint16)}
    slots |= {"step": np.zeros(6, np.uint32), "y": np.zeros(rows * 512, np.float16)}
    _native.run_kernel("rms_norm", {"rows": rows, "dim": 512, "eps": 1e-6}, {}, slots, "metal")
    return double.lily_double_count(b"live_buffers"), double.lily_double_count(b"buffer_bytes")
assert launch(4) == launch(8) == (0, 0)
double.lily_double_set(b"max_buffer_length", ctypes.c_int64(1 << 16))
launch(64)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "OutOfMemoryError: metal: test: cannot allocate" in done.stderr


def test_memory__without_a_residency_set(double: Double, expected: list[int]) -> None:
    double.fail("residency_set")
    with open_engine() as engine:
        assert info(engine)["residency"].startswith("by pass: ")
        assert story(engine) == expected


def test_memory__everything_is_resident(double: Double) -> None:
    with open_engine() as engine:
        story(engine, 1)
        assert double.count("resident_buffers") >= 5
        assert double.count("attached_residency_sets") == 1
    assert double.count("resident_buffers") == double.count("attached_residency_sets") == 0


def test_memory__twenty_cycles_give_it_back(double: Double) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sizes = []
    for _ in range(23):
        with open_engine() as engine:
            story(engine, 3)
        gc.collect()
        sizes.append(resident())
    sanitized = "asan" in os.environ.get("LD_PRELOAD", "")  # freed memory stays in its quarantine
    assert sizes[-1] - sizes[2] < (400 if sanitized else 5) << 20, sizes


def test_close__with_steps_in_flight(double: Double) -> None:
    double.set("latency_us", 20_000)
    engine = open_engine()
    session = engine.session()
    session._native.prefill(np.array([1, 2, 3], np.int32))
    session._native.step(5)
    assert double.count("in_flight") > 0
    engine.close()
    assert double.count("in_flight") == 0
    with pytest.raises(LilyError, match="closed"):
        session._native.step(0)


def test_drop__with_steps_in_flight(double: Double) -> None:
    double.set("latency_us", 20_000)
    engine = open_engine()
    session = engine.session()
    session._native.prefill(np.array([1, 2, 3], np.int32))
    session._native.step(5)
    del engine, session
    gc.collect()
    assert double.count("live_devices") == 0


# Limits of the GPU.


def test_gpu__too_few_threads_is_refused_by_name(double: Double) -> None:
    double.set("max_threads", 64)
    with pytest.raises(UnsupportedError, match="needs 256 threads"):
        open_engine()


def test_gpu__too_much_threadgroup_memory_is_refused_by_name(double: Double) -> None:
    double.set("threadgroup_memory:qmv", 40_000)
    with pytest.raises(DeviceError, match=r"qmv_.*40000"):
        open_engine()


def test_gpu__before_apple_silicon_is_refused(double: Double) -> None:
    double.set("apple_family", 4)
    with pytest.raises(UnsupportedError, match="no GPU of Apple silicon"):
        open_engine()


def test_system__before_macos_15_is_refused(double: Double) -> None:
    double.set("os_major", 14)
    with pytest.raises(UnsupportedError, match="macOS 15"):
        open_engine()


def test_auto__takes_the_cpu_where_metal_cannot_run(double: Double) -> None:
    double.set("os_major", 14)
    with lily.Engine("demo", context=256) as engine:
        assert engine.info()["device"] == "cpu"
    double.set("os_major", 15)
    with lily.Engine("demo", context=256) as engine:
        assert engine.info()["device"] == "metal"


def test_fork__a_child_is_refused(double: Double) -> None:
    with open_engine():
        child = os.fork()
        if child == 0:
            error = error_of(open_engine)
            os._exit(0 if isinstance(error, DeviceError) and "spawn" in str(error) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
