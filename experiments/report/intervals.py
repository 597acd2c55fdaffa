"""Confidence intervals of 95 %: of the median of a race's rounds, and of the mean over seeds."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy import stats

Interval = tuple[float, float]
"""Lower and upper end."""

CONFIDENCE = 0.95


def of_median(values: Iterable[float]) -> Interval | None:
    """The interval of the median between two of the values themselves, whatever they are distributed like.

    Between the k-th smallest and the k-th largest of n values lies the median with the probability that neither fewer
    than k nor more than n - k of them fall below it (binomial). None for fewer than six values: not even the smallest
    and the largest of five hold it with 95 %. Source: W. J. Conover, *Practical Nonparametric Statistics*, 3.2.
    """
    ordered = np.sort(np.asarray(list(values), dtype=float))
    outside = int(stats.binom.ppf((1 - CONFIDENCE) / 2, len(ordered), 0.5))
    if outside < 1:
        return None
    return float(ordered[outside - 1]), float(ordered[-outside])


def of_mean(values: Iterable[float]) -> Interval | None:
    """Student's interval of the mean; None for fewer than three values, of whose spread nothing is known."""
    found = np.asarray(list(values), dtype=float)
    if len(found) < 3:
        return None
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(found) - 1) * found.std(ddof=1) / np.sqrt(len(found))
    return float(found.mean() - half), float(found.mean() + half)
