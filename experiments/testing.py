"""Confidence intervals and tests of few values, with nothing but Python: what `twingrad compare` needs anywhere."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Interval = tuple[float, float]
"""Lower and upper end, of 95 %."""

CONFIDENCE = 0.95
LEAST = 3
"""Values of whose spread something is known."""
_PARTS = 400
"""Of the range over which Student's density is integrated (Simpson's rule): the error is below 1e-9."""


@dataclass(frozen=True)
class Paired:
    """The same runs on two sides: their means with intervals, and whether they differ."""

    count: int
    mean_here: float
    mean_there: float
    here: Interval
    there: Interval
    difference: float
    p: float
    """Two-sided."""


def student(t: float, degrees: int) -> float:
    """The probability that Student's t with `degrees` degrees of freedom is at most `t`."""
    if math.isinf(t):
        return 1.0 if t > 0 else 0.0
    # With t = sqrt(n) tan(a) the density becomes cos(a)^(n - 1), which is smooth on a finite range.
    angle = math.atan(abs(t) / math.sqrt(degrees))
    step = angle / _PARTS
    values = [math.cos(step * place) ** (degrees - 1) for place in range(_PARTS + 1)]
    area = step / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    return 0.5 + math.copysign(scale * area, t)


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """The t of which `student` is this probability (above a half), by bisection."""
    low, high = 0.0, 1.0
    while student(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def of_mean(values: Sequence[float]) -> Interval | None:
    """Student's interval of the mean; None for fewer than three values, of whose spread nothing is known."""
    if len(values) < LEAST:
        return None
    mean, quantile = statistics.fmean(values), student_quantile((1 + CONFIDENCE) / 2, len(values) - 1)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def of_share(mean: float, rows: int) -> Interval:
    """Wilson's interval of a share of `rows` test rows, which holds near 0 and 1, too; 0 to 1 without any rows."""
    if not rows:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre, half = mean + z * z / (2 * rows), z * math.sqrt(mean * (1 - mean) / rows + (z / (2 * rows)) ** 2)
    return (centre - half) / (1 + z * z / rows), (centre + half) / (1 + z * z / rows)


def paired(here: Sequence[float], there: Sequence[float], rows: Sequence[int]) -> Paired:
    """Whether the same runs have another mean accuracy on two sides.

    From three runs on by Student's test of their differences; of fewer by that of two shares of the test rows, as if
    both sides had been tested on separate rows. `rows` are the numbers of test rows of the runs.
    """
    differences = [one - two for one, two in zip(here, there, strict=True)]
    difference, count, tested = statistics.fmean(differences), len(differences), min(rows)
    if count >= LEAST:
        error = statistics.stdev(differences) / math.sqrt(count)
        t = difference / error if error else math.copysign(math.inf, difference) if difference else 0.0
        p = 2 * (1 - student(abs(t), count - 1))
    else:
        share = statistics.fmean([*here, *there])
        error = math.sqrt(2 * max(0.0, share * (1 - share)) / tested) if tested else math.inf
        z = abs(difference) / error if error else math.inf if difference else 0.0
        p = math.erfc(z / math.sqrt(2))
    mean_here, mean_there = statistics.fmean(here), statistics.fmean(there)
    interval_here = of_mean(here) or of_share(mean_here, tested)
    interval_there = of_mean(there) or of_share(mean_there, tested)
    p = min(1.0, max(0.0, p))
    return Paired(count, mean_here, mean_there, interval_here, interval_there, difference, p)


def holm(values: Sequence[float]) -> list[float]:
    """Probabilities corrected for their number by Holm's method, in the same order."""
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=lambda place: values[place])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected


def of_median(values: Sequence[float]) -> Interval | None:
    """The interval of the median between two of the values themselves, whatever they are distributed like.

    Between the k-th smallest and the k-th largest of n values lies the median with the probability that neither fewer
    than k nor more than n - k of them fall below it (binomial). None for fewer than six values: not even the smallest
    and the largest of five hold it with 95 %. Source: W. J. Conover, *Practical Nonparametric Statistics*, 3.2.
    """
    ordered, count = sorted(values), len(values)
    below, outside = 0.0, 0
    for place in range(count):
        below += math.comb(count, place) / 2**count
        if below >= (1 - CONFIDENCE) / 2:
            outside = place
            break
    return None if outside < 1 else (ordered[outside - 1], ordered[-outside])
