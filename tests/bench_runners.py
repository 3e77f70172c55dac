"""Engines for the tests of `lily bench peers`, which run in processes of their own."""

from __future__ import annotations

import os
import time
from typing import Any


class Steady:
    """Takes a millisecond for a token."""

    def __init__(self, model: str, **settings: Any) -> None:
        print("this must not get between the replies")
        os.write(1, b"nor this\n")
        self.settings = settings

    def facts(self) -> dict[str, Any]:
        return {"versions": {"steady": "1"}, "threads": self.settings["threads"]}

    def hold(self, count: int) -> None:
        self.settings["held"] = count

    def decode(self, tokens: int) -> list[float]:
        return [1e-3] * tokens

    def prefill(self, count: int) -> float:
        return 1e-3 * count

    def close(self) -> None:
        pass


class Ahead(Steady):
    """Prepares the next token while one is made, so that the last of a call seems to take no time."""

    def decode(self, tokens: int) -> list[float]:
        return [*super().decode(tokens - 1), 1e-5]


class Unmade(Steady):
    def __init__(self, **settings: Any) -> None:
        raise KeyError("weights")


class Failing(Steady):
    """Fails in the second round."""

    def hold(self, count: int) -> None:
        if self.settings.get("held") == 8:
            raise RuntimeError("no memory for token 9")
        super().hold(count)


class Dying(Steady):
    """Its process ends."""

    def decode(self, tokens: int) -> list[float]:
        os.write(2, b"assertion failed: 1 == 2\n")
        os.abort()


class Busy(Steady):
    """Begins and never answers."""

    def prefill(self, count: int) -> float:
        self.settings["progress"]("prefill", "tokens", 0, count)
        time.sleep(1000)
        return 0.0
