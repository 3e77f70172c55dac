"""generate() for asyncio: a thread reads the reply, the event loop only takes what is there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from lily.results import Chunk
from lily.stream import Stream, Unique

if TYPE_CHECKING:
    from types import TracebackType

_AHEAD = 64  # chunks that a slow reader may be behind


class AsyncStream(Unique, AsyncIterator[Chunk]):
    """Asynchronous iterator of agenerate(), for one task of one event loop.

    The event loop never waits for the device. aclose(), `async with`, the end of the task that reads it, and
    letting go of the iterator stop the reply within one step, or one chunk of a prompt.
    """

    def __init__(self, make: Callable[[], Stream[Chunk]]) -> None:
        self._reading = _Reading(make)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __anext__(self) -> Chunk:
        reading = self._reading
        loop = asyncio.get_running_loop()
        if reading.loop not in (None, loop):
            raise RuntimeError("an asynchronous reply belongs to the event loop that began to read it")
        reading.task = asyncio.current_task()
        if reading.loop is None:
            reading.loop = loop
            reading.start()
        if reading.closed:
            raise StopAsyncIteration
        try:
            item = await reading.items.get()
        except asyncio.CancelledError:
            reading.close()
            raise
        reading.room.put(None)
        if isinstance(item, Chunk):
            return item
        reading.items.put_nowait(None)  # further calls end too
        if item is not None:
            raise item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the reply, without waiting for the device; a second call does nothing."""
        self._reading.close()

    def __del__(self) -> None:
        if (reading := getattr(self, "_reading", None)) is not None:
            reading.close()


class _Reading(threading.Thread):
    """The thread, and what it shares with the iterator; it does not keep the iterator alive.

    One of a pool could wait behind requests that wait for this one.
    """

    def __init__(self, make: Callable[[], Stream[Chunk]]) -> None:
        super().__init__(name="lily-agenerate", daemon=True)
        self._make = make
        self._stream: Stream[Chunk] | None = None
        self.closed = False
        self.task: asyncio.Task[object] | None = None  # the one that reads
        self.loop: asyncio.AbstractEventLoop | None = None
        self.items: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
        self.room: SimpleQueue[None] = SimpleQueue()  # one for each chunk that may be read
        for _ in range(_AHEAD):
            self.room.put(None)

    def run(self) -> None:
        """Read the reply to its end."""
        end: BaseException | None = None
        try:
            self._stream = self._make()
            for chunk in self._stream if not self.closed else ():
                if self.room.empty():  # now it is the task that does not go on
                    self._stream.wait_for(self.task)
                self.room.get()
                if self.closed:
                    break
                self._hand_over(chunk)
        except BaseException as error:
            end = error
        finally:
            if self._stream is not None:
                self._stream.close()
        self._hand_over(end)

    def _hand_over(self, item: Chunk | BaseException | None) -> None:
        assert self.loop is not None
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:  # the event loop is closed
            self.close()

    def close(self) -> None:
        """End the reply; any thread may call it."""
        self.closed = True
        if self._stream is not None:
            self._stream.stop()  # the thread ends it, so that nobody waits for the device here
        self.room.put(None)
