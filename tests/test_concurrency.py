"""Many threads and asyncio on one engine: fair turns, no deadlock, no mixed answers, a loop that runs on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from lily import Chunk, Engine, LilyError, Stream, TimeLimitError
from lily.admission import Admission
from lily.stream import new_flag
from replies import FRANCE, STORY, ids_of

PROMPTS: list[Any] = [STORY, "The moon is", FRANCE, "A dog and a cat", "In the beginning"]


@pytest.fixture
def small(device: str) -> Iterator[Engine]:
    """An engine with fewer sessions than threads."""
    with Engine("demo", device=device, prefill_chunk=64, context=512, max_sessions=3) as engine:
        yield engine


def in_threads(works: Sequence[Callable[[], object]], seconds: float) -> None:
    """Run them all; an error of one, or one that does not end, fails the test."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.01))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def test_threads__random_cancels_and_equal_results(small: Engine) -> None:
    """Eight threads with fifty requests each."""
    wanted = [(prompt, seed) for prompt in range(len(PROMPTS)) for seed in range(3)]
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8}
    alone = {(p, s): ids_of(list(small.generate(PROMPTS[p], seed=s, **options))) for p, s in wanted}

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            rng = random.Random(number)
            for _ in range(50):
                prompt, seed = rng.choice(wanted)
                stream = small.generate(PROMPTS[prompt], seed=seed, **options)
                stop = rng.choice([None, None, 0, 1, 3])
                found: list[Chunk] = []
                for chunk in stream:
                    found.append(chunk)
                    if stop is not None and len(found) > stop:
                        stream.close()
                expected = alone[prompt, seed]
                tokens = ids_of(found)
                assert tokens == expected[: len(tokens)]
                assert stop is not None or tokens == expected

        return run

    in_threads([work(number) for number in range(8)], 300)
    assert small.info()["cache"]["sessions"] == 1


def test_threads__closing_streams_of_others(small: Engine) -> None:
    """A thread reads, another closes at any time; nothing hangs and the engine goes on."""
    for seed in range(20):
        streams = [small.generate(STORY, ignore_eos=True, max_tokens=300) for _ in range(4)]
        rng = random.Random(seed)

        def close(streams: list[Stream[Chunk]] = streams, rng: random.Random = rng) -> None:
            for stream in rng.sample(streams, len(streams)):
                time.sleep(rng.random() * 0.02)
                stream.close()

        in_threads([close, *(partial(list, stream) for stream in streams)], 60)
    assert ids_of(list(small.generate(FRANCE, temperature=0, max_tokens=5)))


def test_turns__are_fair(device: str) -> None:
    """Sessions that step at the same time get about as many tokens each."""
    with Engine("demo", device=device, context=1024, max_sessions=3) as engine:
        counts = [0, 0, 0]
        ready = threading.Barrier(3)

        def work(number: int) -> Callable[[], None]:
            def run() -> None:
                with engine.session() as session:
                    list(session.prefill(STORY))
                    ready.wait()
                    for _ in session.step(900):
                        counts[number] += 1
                        if sum(counts) > 150:
                            break

            return run

        in_threads([work(number) for number in range(3)], 120)
        assert min(counts) > 0.6 * max(counts)


def test_queue__is_first_come_first_served() -> None:
    admission = Admission()
    order: list[int] = []
    free = threading.Event()
    busy = new_flag()
    ready = [threading.Event() for _ in range(5)]

    def request(number: int) -> None:
        flag = new_flag()
        ready[number].set()
        if admission.wait(flag, lambda: free.is_set() or None):
            order.append(number)

    inside, leave = threading.Event(), threading.Event()

    def holder() -> None:
        admission.wait(busy, lambda: True)
        inside.set()
        leave.wait(20)
        admission.end(busy)

    holding = threading.Thread(target=holder)
    holding.start()
    inside.wait(20)
    threads = []
    for number in range(5):
        thread = threading.Thread(target=request, args=(number,))
        thread.start()
        threads.append(thread)
        ready[number].wait(20)
        time.sleep(0.02)
    free.set()
    leave.set()
    for thread in [holding, *threads]:
        thread.join(20)
    assert order == [0, 1, 2, 3, 4]


def test_queue__a_request_waits_for_the_others_and_can_be_cancelled(device: str) -> None:
    with Engine("demo", device=device, context=512, max_sessions=1) as engine:
        entered, leave = threading.Event(), threading.Event()
        results: list[list[int]] = []

        def slow() -> None:
            for _ in engine.generate(STORY, max_tokens=3, ignore_eos=True):
                entered.set()
                leave.wait(20)

        cancelled = engine.generate(STORY)
        first = threading.Thread(target=slow)
        first.start()
        assert entered.wait(20)
        waiting = [
            threading.Thread(target=lambda: results.append(ids_of(list(cancelled)))),
            threading.Thread(
                target=lambda: results.append(ids_of(list(engine.generate(STORY, max_tokens=4))))
            ),
        ]
        for thread in waiting:
            thread.start()
        time.sleep(0.1)
        cancelled.close()
        waiting[0].join(5)
        assert results == [[]]
        with pytest.raises(TimeLimitError, match="before it was the request's turn"):
            list(engine.generate(STORY, timeout=0.1))
        leave.set()
        waiting[1].join(20)
        assert len(results[1]) == 4
        first.join(20)


def test_queue__waiting_for_oneself_is_an_error(device: str) -> None:
    with Engine("demo", device=device, context=512, max_sessions=1) as engine:
        first = engine.generate(STORY, ignore_eos=True)
        next(first)
        with pytest.raises(LilyError, match="nobody goes on reading"):
            next(engine.generate(FRANCE))
        first.close()
        assert next(engine.generate(FRANCE)).token_ids
    with Engine("demo", device=device, context=512, max_sessions=1) as engine:
        session = engine.session()
        with pytest.raises(LilyError, match="open sessions"):
            next(engine.generate(FRANCE))
        session.close()
        assert next(engine.generate(FRANCE)).token_ids


def begun(engine: Engine) -> Stream[Chunk]:
    """A reply that has a place, and whose reader is this thread."""
    stream = engine.generate(STORY, max_tokens=200, ignore_eos=True)
    next(stream)
    return stream


def test_queue__nobody_waits_for_those_who_wait(device: str) -> None:
    """Behind somebody who waits for the same place; each for the other's; for a thread that has ended."""
    found: list[str] = []

    def ask(engine: Engine) -> None:
        try:
            list(engine.generate(STORY, max_tokens=3))
        except LilyError as error:
            found.append(str(error))

    with Engine("demo", device=device, context=512, max_sessions=1) as engine:
        held = begun(engine)
        behind = threading.Thread(target=ask, args=(engine,))
        behind.start()
        ask(engine)
        held.close()
        behind.join(20)
        assert found
        assert not behind.is_alive()
    found.clear()
    with Engine("demo", device=device, context=512, max_sessions=2) as engine:
        barrier = threading.Barrier(2)

        def cross() -> None:
            with begun(engine):
                barrier.wait()
                ask(engine)

        in_threads([cross, cross], 60)
        assert found
    with Engine("demo", device=device, context=512, max_sessions=1) as engine:
        left: list[Any] = []
        thread = threading.Thread(target=lambda: left.append(begun(engine)))
        thread.start()
        thread.join()
        with pytest.raises(LilyError, match="nobody goes on reading"):
            list(engine.generate(STORY, max_tokens=3))
        left.pop().close()
        assert list(engine.generate(STORY, max_tokens=3))


def test_queue__of_scores(device: str) -> None:
    with Engine("demo", device=device, prefill_chunk=64, context=1024, max_sessions=2) as engine:
        works = [lambda: engine.score([7] * 400), lambda: engine.score([8] * 300)]
        in_threads([*works, lambda: list(engine.generate(STORY, max_tokens=3))], 60)


def test_reset__gives_the_place_back(device: str) -> None:
    with Engine("demo", device=device, context=128, max_sessions=1) as engine:
        list(engine.generate(STORY, max_tokens=2))
        with pytest.raises(LilyError, match=r"reset\(\) gives its place back"):
            engine.score(STORY)
        engine.reset()
        assert engine.score(STORY).logprobs.size
        engine.session().close()
        assert list(engine.generate(STORY, max_tokens=2))


INTERRUPTED = """
import signal, sys
from lily import Engine
engine = Engine("demo", device=sys.argv[1], context=1024, prefill_chunk=64, max_sessions=1)
ids = [[(i * step) % 4000 for i in range(300)] for step in (7, 11, 13)]
for prompt in ids:
    list(engine.generate(prompt, max_tokens=2))
def interrupt(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
stopped = 0
for turn in range(300):
    signal.setitimer(signal.ITIMER_REAL, 0.0002 * (turn % 60) + 0.00005)
    try:
        list(engine.generate(ids[turn % 3][: 200 + turn % 90], max_tokens=2))
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        stopped += 1
    session = engine._session
    assert session is None or len(session.tokens) == session.position
found = list(engine.generate(ids[0], max_tokens=3, timeout=20))
print(stopped > 20, len(found) > 0, engine.info()["cache"]["sessions"], len(engine._core.admission._queue))
"""


def test_queue__interrupts_anywhere_leave_nothing_behind(device: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, device]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (result.stdout, result.stderr) == ("True True 1 0\n", "")


def test_queue__finalisers_of_dropped_prompts(small: Engine) -> None:
    """The garbage collector may run one anywhere, in the queue too."""
    threshold = gc.get_threshold()

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(12):
                list(small.generate(PROMPTS[number % 5], max_tokens=2))
                with contextlib.suppress(LilyError), small.session() as session:
                    cycle: list[Any] = [session.prefill([7] * 80)]
                    cycle.append(cycle)
                    del cycle

        return run

    gc.set_threshold(20)
    try:
        in_threads([work(number) for number in range(4)], 120)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()


def test_stream__is_not_read_in_its_own_callback(small: Engine) -> None:
    def progress(done: int, total: int) -> None:
        next(stream)

    stream = small.generate(STORY, progress=progress)
    with pytest.raises(LilyError, match="within its own progress callback"):
        list(stream)


def test_timeout__is_not_renewed_behind_the_queue(small: Engine) -> None:
    stream = small.generate(STORY, ignore_eos=True, timeout=0.4)
    next(stream)
    time.sleep(0.5)
    with pytest.raises(TimeLimitError):
        next(stream)


def test_call__inside_a_progress_callback(small: Engine) -> None:
    """Calls from within a call are served, or refused with an error."""
    inner: list[Any] = []

    def progress(done: int, total: int) -> None:
        inner.append(ids_of(list(small.generate(FRANCE, temperature=0, max_tokens=3))))
        inner.append(small.info()["device"])

    assert ids_of(list(small.generate(STORY, max_tokens=3, progress=progress)))
    assert len(inner) >= 2


def test_timeout__stops_and_leaves_the_session_usable(small: Engine) -> None:
    with small.session() as session:
        start = time.monotonic()
        read: list[Chunk] = []
        stream = session.generate(STORY, ignore_eos=True, timeout=0.2)
        with pytest.raises(TimeLimitError, match="timeout"):
            read.extend(time.sleep(0.01) or chunk for chunk in stream)  # type: ignore[func-returns-value]
        assert 0.1 < time.monotonic() - start < 5
        assert read
        assert issubclass(TimeLimitError, TimeoutError)
        assert ids_of(list(session.generate(FRANCE, temperature=0, max_tokens=5, timeout=1000)))
    for wrong in (-1, "1", float("nan"), True):
        with pytest.raises(ValueError, match="timeout must be"):
            small.generate(STORY, timeout=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_context_full must be"):
        small.generate(STORY, on_context_full="cut")  # type: ignore[arg-type]


# asyncio


def test_asyncio__streams_are_those_of_threads(small: Engine) -> None:
    expected = ids_of(list(small.generate(FRANCE, temperature=0)))

    async def one(prompt: Any, **options: Any) -> list[int]:
        return ids_of([chunk async for chunk in small.agenerate(prompt, temperature=0, **options)])

    async def several() -> list[list[int]]:
        return await asyncio.gather(*(one(FRANCE) for _ in range(6)))

    assert asyncio.run(several()) == [expected] * 6
    with small.session() as session:

        async def in_session() -> list[int]:
            async with session.agenerate(FRANCE, temperature=0) as stream:
                return ids_of([chunk async for chunk in stream])

        assert asyncio.run(in_session()) == expected


def test_asyncio__errors_and_ends(small: Engine) -> None:
    async def run() -> None:
        stream = small.agenerate(STORY, max_tokens=-1)
        with pytest.raises(ValueError, match="max_tokens"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        with pytest.raises(TypeError, match="unexpected"):
            await anext(small.agenerate(STORY, no_such_option=1))  # type: ignore[call-arg]
        ended = small.agenerate(STORY, max_tokens=2)
        assert [chunk async for chunk in ended]
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(ended)

    asyncio.run(run())


def test_asyncio__replies_within_a_reply(device: str) -> None:
    """The task cannot read the outer one while it waits for the inner one."""

    async def nested(engine: Engine, tokens: int) -> int:
        async with engine.agenerate(STORY, max_tokens=tokens, ignore_eos=True) as outer:
            await anext(outer)
            return len([chunk async for chunk in engine.agenerate(STORY, max_tokens=3)])

    with Engine("demo", device=device, context=512, max_sessions=1) as engine:
        assert asyncio.run(nested(engine, 20))
        with pytest.raises(LilyError, match="nobody goes on reading"):
            asyncio.run(nested(engine, 400))
        assert list(engine.generate(STORY, max_tokens=3))


def test_asyncio__nothing_comes_after_the_end(small: Engine) -> None:
    async def run() -> list[Chunk]:
        stream = small.agenerate(STORY, max_tokens=40, ignore_eos=True)
        await anext(stream)
        await asyncio.sleep(0.2)
        await stream.aclose()
        return [chunk async for chunk in stream]

    assert asyncio.run(run()) == []


def test_asyncio__a_new_session_does_not_wait_for_the_device(device: str) -> None:
    with Engine("demo", device=device, context=2048, max_sessions=3) as engine:
        inside = threading.Event()

        def read() -> None:
            inside.set()
            engine.score([7] * 2000)

        thread = threading.Thread(target=read)
        thread.start()
        inside.wait(20)
        time.sleep(0.05)
        start = time.perf_counter()
        session = engine.session()
        took = time.perf_counter() - start
        alive = thread.is_alive()
        thread.join()
        session.close()
        assert took < 0.3 or not alive  # the prompt takes seconds


def test_asyncio__cancelling_a_task_stops_the_reply(small: Engine) -> None:
    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    async def run() -> None:
        for _ in range(5):
            task = asyncio.create_task(read(small.agenerate(STORY, ignore_eos=True)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(small.agenerate(STORY, ignore_eos=True)), 0.1)
        stream = small.agenerate(STORY, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        del stream
        dropped = small.agenerate(STORY, ignore_eos=True)
        await anext(dropped)
        del dropped

    asyncio.run(run())
    deadline = time.monotonic() + 20
    while small.info()["cache"]["sessions"] > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert small.info()["cache"]["sessions"] == 1
    assert ids_of(list(small.generate(FRANCE, temperature=0, max_tokens=3)))


def lags_of(work: Callable[[], None]) -> list[float]:
    """How much later than it should an event loop wakes up every millisecond, while a thread works."""

    async def run() -> list[float]:
        thread = threading.Thread(target=work)
        thread.start()
        lags = []
        while thread.is_alive():
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - start - 0.001)
        return lags

    return asyncio.run(run())


@pytest.mark.timing
def test_asyncio__the_loop_stays_responsive(device: str) -> None:
    """Beside prefill and decode it is hardly later than beside numpy products on as many threads."""
    with Engine("demo", device=device, context=2048, max_sessions=2) as engine:
        prompt = [(i * 31) % 4000 for i in range(1200)]

        def reply() -> None:
            async def read() -> None:
                async for _ in engine.agenerate(prompt, max_tokens=100, ignore_eos=True):
                    pass

            engine.reset()
            asyncio.run(read())

        start = time.perf_counter()
        reply()
        seconds = time.perf_counter() - start
        square = np.ones((1500, 1500), np.float32)

        def load() -> None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                square @ square

        beside = np.percentile(lags_of(load), 99)
        found = np.percentile(lags_of(reply), 99)
        assert found <= beside + 0.020, (found, beside)
