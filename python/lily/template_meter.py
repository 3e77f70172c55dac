"""What a chat template may compute: one number that everything counts towards, and a clock.

Nothing here needs threads, signals or tracing. Whatever a template does is small, or comes by here first with
the size it is going to have; so between two looks at the clock lies little work.
"""

from __future__ import annotations

import itertools
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

SECONDS = 2.0
MAX_CHARS = 16_000_000
MAX_ITEMS = 1_000_000
MAX_BITS = 1 << 16
MAX_NESTING = 200
# What an element of a container, a pass of a loop or a call counts for: about what a small object occupies.
ITEM = 64
_BASE = 256_000_000
_PER_INPUT = 512
_MOST = 2_000_000_000
_STEP = 64 * ITEM
# A character as repr or JSON writes it: \U0001f600, or two \uXXXX.
_ESCAPED = 12
_SHORT = 1000
# Quotes and separators around a value; a float, a class, or the name of an object.
_BRACKETS = 4
_ANYTHING = 100
_SEQUENCES: Any = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class LimitError(Exception):
    """A chat template computes too much, or asks for what it may not have."""


class Weight(NamedTuple):
    """Characters, values and levels of a value."""

    chars: int
    nodes: int
    nesting: int


class Meter:
    """Counts, in bytes, what one rendering computes, and looks at the clock now and then.

    Args:
        size: Size of the input; a long conversation may cost more.
        seconds: Processor time that this thread may spend.
    """

    def __init__(self, size: int, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._used = 0
        self._most = min(_BASE + _PER_INPUT * size, _MOST)
        self._look_at = _STEP
        self._end = time.thread_time() + seconds

    def charge(self, cost: int) -> None:
        """Count work, before it is done."""
        self._used += cost
        if self._used > self._look_at:
            self._look()

    def _look(self) -> None:
        # Once over a limit, every further call ends here.
        if time.thread_time() > self._end:
            raise LimitError(f"it ran longer than {self._seconds:g} s")
        if self._used > self._most:
            raise LimitError("it computes too much")
        self._look_at = self._used + _STEP

    def room(self, chars: int) -> None:
        """Refuse a text that would become too long."""
        if chars > MAX_CHARS:
            raise LimitError(f"a text of more than {MAX_CHARS} characters")

    def room_for_items(self, count: int) -> None:
        """Refuse a container that would become too large, and count its elements."""
        if count > MAX_ITEMS:
            raise LimitError(f"a value with more than {MAX_ITEMS} elements")
        self.charge(count * ITEM)

    def made(self, value: Any) -> Any:
        """Count a value just computed and return it; an iterator comes back as one that counts."""
        kind = type(value)
        if kind is str:
            length = len(value)
            if length <= _SHORT:
                self.charge(ITEM + length)
                return value
            self.room(length)
            self.charge(sys.getsizeof(value))
        elif kind is int:
            if value.bit_length() > MAX_BITS:
                raise LimitError(f"a number of more than {MAX_BITS} bits")
            self.charge(ITEM)
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.room_for_items(len(value) + 1)
        elif isinstance(value, (str, bytes)):
            self.room(len(value))
            self.charge(ITEM + sys.getsizeof(value))
        elif isinstance(value, Iterator) and kind is not LoopContext:
            return self.counted(value)
        else:
            self.charge(ITEM)
        return value

    def weigh(self, value: Any, text: Callable[[str], object] | None = None) -> Weight:
        """Walk through a value as comparing or writing it would.

        Every reference counts anew: lists of lists of the same text are small in memory, but not for those
        who write or compare them. With `text`, which is repr or an encoder of JSON, `chars` is an upper bound
        of what is written.
        """
        level = [value]
        nodes = chars = nesting = 0
        while level:
            nodes += len(level)
            nesting += 1
            if nesting > MAX_NESTING:
                raise LimitError("a value is nested too deeply")
            below: list[Any] = []
            for item in level:
                kind = type(item)
                if kind is str:
                    chars += _written(item, text)
                elif kind is dict:
                    below += item
                    below += item.values()
                elif kind is list or kind is tuple:
                    below += item
                else:
                    chars += _unusual(item, below, text)
                if nodes + len(below) > MAX_ITEMS:
                    raise LimitError(f"a value with more than {MAX_ITEMS} elements")
                if chars > MAX_CHARS:
                    raise LimitError(f"a value with more than {MAX_CHARS} characters")
            level = below
        chars += _BRACKETS * nodes
        self.charge(chars + ITEM * nodes)
        return Weight(chars, nodes, nesting)

    def counted(self, items: Iterable[Any], cost: int = ITEM) -> Iterator[Any]:
        """Yield the elements, each of which counts."""
        charge = self.charge
        for item in items:
            charge(cost)
            yield item

    def listed(self, items: Iterable[Any]) -> list[Any]:
        """Return a list of the elements."""
        most = list(itertools.islice(self.counted(items), MAX_ITEMS + 1))
        self.room_for_items(len(most))
        return most

    def text(self, value: Any) -> str:
        """Return str(value)."""
        if isinstance(value, str):
            return str(value)
        self.weigh(value, repr)
        return str(value)


class Paced:
    """An iterable whose every element counts; sized if the other one is, for loop.length."""

    def __init__(self, meter: Meter, items: Iterable[Any], cost: int = ITEM) -> None:
        self._meter = meter
        self._items = items
        self._cost = cost

    def __iter__(self) -> Iterator[Any]:
        return self._meter.counted(self._items, self._cost)

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


def _written(value: str, text: Callable[[str], object] | None) -> int:
    if text is None:
        return len(value)
    return _ESCAPED * len(value) if len(value) < _SHORT else len(str(text(value)))


def _unusual(item: Any, below: list[Any], text: Callable[[str], object] | None) -> int:
    """Add what is written, or compared, as a part of a value; return how many characters are its own."""
    if isinstance(item, str):
        return _written(str(item), text)
    if isinstance(item, int):
        return 8 if -(10**7) < item < 10**7 else item.bit_length()
    if isinstance(item, bytes):
        return 4 * len(item)
    if isinstance(item, _SEQUENCES):
        below += item
    elif isinstance(item, (dict, types.MappingProxyType)):
        below += [*item, *item.values()]
    elif isinstance(item, Namespace):
        below.append(getattr(item, "_Namespace__attrs"))  # noqa: B009
    elif isinstance(item, types.MethodType):
        below.append(item.__self__)
    return _ANYTHING
