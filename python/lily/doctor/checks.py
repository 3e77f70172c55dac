"""The result of one check of a model."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lily.errors import LilyError


@dataclass
class Check:
    """What one check showed.

    Attributes:
        name: What was checked.
        text: The result in a line.
        reason: Why it failed; empty if it did not.
        warnings: What the user should know all the same.
        details: More about the result, a line each.
        data: Numbers, as JSON types.
        seconds: How long it took.
    """

    name: str
    text: str = ""
    reason: str = ""
    warnings: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it passed."""
        return not self.reason


def attempt(name: str, check: Callable[[Check], object]) -> Check:
    """Carries out a check, which fills what it is given; exceptions fail it, warnings become its own."""
    result = Check(name)
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            check(result)
        except Exception as error:  # the checks that follow are to have their turn
            text = (
                f"{error}" if isinstance(error, (LilyError, OSError)) else f"{type(error).__name__}: {error}"
            )
            result.reason = text or type(error).__name__
    result.warnings += [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    result.seconds = time.perf_counter() - begin
    return result
