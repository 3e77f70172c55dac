"""Medians and what is known of them from few measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value below which `percent` of the values lie, interpolated between two of them."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return an interval that covers the median of what the values are drawn from, or None.

    It lies between two order statistics, the closest to the middle that have at least this confidence, which
    follows from the binomial distribution alone: nothing is supposed of the values but that they are
    independent. Six values are the fewest that have one of 95 %: their extremes.
    """
    ordered = sorted(values)
    count = len(ordered)
    found = None
    for left_out in range(count // 2):
        outside = 2 * sum(math.comb(count, i) for i in range(left_out + 1)) / 2**count
        if 1 - outside < confidence:
            break
        found = (ordered[left_out], ordered[count - 1 - left_out])
    return found
