"""The quantities that are reported of engines: one record each, with its source, its unit and its label.

Claims, tables, figures, the paper's text and the terminal ask for a quantity by its name. A new one is a record in
`QUANTITIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.formats import fraction, nanoseconds, percent, share, significant, size
from experiments.measures import roofline

if TYPE_CHECKING:
    import pandas as pd

    from experiments.report.view import View

INHERITING = ("numpy", "julia")
"""Engines without their own initialisation: they take the spec's."""

ALL = "all"
"""Of a claim that is about all techniques, or all functions of the micro-benchmarks, together."""

SETTLED = 3
"""After which epoch a gain is a late one: the studies say that learning stopped "after 2 or 3 epochs"."""


# ---------------------------------------------------------------------------------------------------------------------
# Units


@dataclass(frozen=True)
class Unit:
    """How values are printed."""

    symbol: str
    show: Callable[[float | None], str]
    """With the unit."""
    number: Callable[[float | None], str]
    """Without it, for a text or a table that states it."""
    differences: bool = False
    """Whether two values are compared by their difference rather than by their ratio."""


def _unit(symbol: str, number: Callable[[float | None], str] = significant) -> Unit:
    return Unit(symbol, lambda value: f"{number(value)} {symbol}", number)


SECONDS = _unit("s")
MICROSECONDS = _unit("µs")
TIMES = _unit("times")
NANOSECONDS = Unit("ns", nanoseconds, nanoseconds)
BYTES = Unit("B", size, size)
FRACTION = Unit("", fraction, fraction, differences=True)
LOSS = Unit("", significant, fraction, differences=True)
PERCENT = Unit("%", share, share)
SHARE = Unit("%", lambda value: f"{percent(value)} saved", percent)


# ---------------------------------------------------------------------------------------------------------------------
# Quantities


@dataclass(frozen=True)
class Quantity:
    """One number that is reported of an engine."""

    name: str
    label: str
    """Its heading."""
    unit: Unit
    measure: str
    """The measure that it comes from."""
    column: str = ""
    """Its column of `tidy/runs.csv`, if it is one."""
    source: Callable[[View, str, str], Any] | None = None
    """Its values for an engine, one for each run or round, or one number; what it is about is the last argument."""
    text: str = ""
    """As the paper's text calls it: `numpy.<text>`."""
    about: str = ""
    """What a claim names in `of`: a technique, a variant, or a function of the micro-benchmarks."""
    of_both: bool = False
    """Whether both sides of a comparison have it of the same thing."""
    compilation: bool | None = None
    """Whether it contains what is compiled in the first epoch; None: that makes no difference."""

    def values(self, view: View, engine: str, of: str = "") -> Any:
        """Its values in the rows of a report: one for each run or round, or one number."""
        if self.source is not None:
            return self.source(view, engine, of)
        if view.pooled is not None and self.unit.differences:
            rows = view.pooled
            return rows.loc[(rows["engine"] == engine) & (rows["measure"] == _measure(view, self, engine)), self.column]
        runs = native_runs(view, engine) if self.measure == "own" else view.ok(self.measure, engine)
        return runs[self.column]

    def value(self, view: View, engine: str, of: str = "") -> float | None:
        """The mean of its values; None without any."""
        values = self.values(view, engine, of)
        number = values.mean() if hasattr(values, "mean") else values
        return None if number is None or math.isnan(number) else float(number)


def native_runs(view: View, engine: str) -> pd.DataFrame:
    """The runs of an engine from its own initialisation.

    The spec's initialisation is that of our own engines: where a paper's file names nothing else, theirs are the
    usual runs.
    """
    return view.ok(_native(view, engine), engine)


def _native(view: View, engine: str) -> str:
    return "own" if engine in view.paper.own or engine not in INHERITING else "time"


def _measure(view: View, quantity: Quantity, engine: str) -> str:
    """The measure whose runs have a quantity of an engine."""
    return _native(view, engine) if quantity.measure == "own" else quantity.measure


def memory_of(view: View, engine: str) -> dict[str, float | None]:
    """Bytes allocated in the first epoch, per later epoch and in all, as means over the memory runs.

    "In all" is of as many epochs as the runs of time have: those of memory may have fewer, whose later ones are like
    all that would follow.
    """
    first, later = (QUANTITIES[name].value(view, engine) for name in ("bytes_first_epoch", "bytes_later_epochs"))
    trained, measured = (view.epochs_of(measure, engine)["epoch"].max() for measure in ("time", "memory"))
    epochs = measured if math.isnan(trained) else trained
    total = first if epochs == 1 else None
    if first is not None and later is not None and not math.isnan(epochs):
        total = float(first + (epochs - 1) * later)
    return {"first": first, "later": later, "total": total}


def saved(view: View, engine: str, technique: str, column: str, alone: bool = False) -> float | None:
    """The share of time or bytes that a technique saves: 1 - with it / without it, the others on; None without runs.

    `technique` is "all" for all of them against none; `column` is one of the ablation's tidy file. `alone`: the
    technique as the only one against none, where the others leave it nothing to save.
    """
    rows = view.table("ablation", engine)
    found = dict(zip(zip(rows["configuration"], rows["technique"].fillna(""), strict=True), rows[column], strict=True))
    this = ("alone", technique) if alone else ("all", "")
    other = ("none", "") if alone or technique == ALL else ("without", technique)
    if this not in found or other not in found:
        return None
    if found[other] == 0:  # nothing is left to save, or all that the technique needs is more
        return 0.0 if found[this] == 0 else -math.inf
    return float(1 - found[this] / found[other])


def _first_to_later(view: View, engine: str, _: str) -> Any:
    runs = view.ok("time", engine)
    return runs["first_epoch_seconds"] / runs["later_epoch_seconds"]


def _average(view: View, engine: str, _: str) -> Any:
    """Per run the average time of all its epochs, the first included."""
    return view.epochs_of("time", engine).groupby("key")["seconds"].mean()


def _evaluated(view: View, engine: str, _: str) -> Any:
    """Per run the average time of its later epochs, the evaluation of the test rows included."""
    epochs = view.epochs_of("time", engine)
    return epochs[epochs["epoch"] > 1].groupby("key")["seconds_with_evaluation"].mean()


def _step(view: View, engine: str, _: str) -> Any:
    """The median over the rounds of the race with the most threads."""
    return _last_race(view, engine)["microseconds_per_step"].median()


def _last_race(view: View, engine: str) -> pd.DataFrame:
    """An engine's rounds of the race with the most threads."""
    rounds = view.table("race", engine)
    return rounds[rounds["threads"] == view.table("race")["threads"].max()]


def limit_shares(rounds: pd.DataFrame) -> pd.Series:
    """Of each round of an engine which share of its step the machine's limit is; empty where that was not measured.

    Raises `BelowLimitError` for a step too far below its limit; see `experiments.measures.roofline`.
    """
    limited = rounds.dropna(subset=["limit_microseconds"])
    steps = zip(
        *(limited[name] for name in ("engine", "label", "microseconds_per_step", "limit_microseconds")), strict=True
    )
    for step in steps:
        roofline.share(*step)
    return limited["limit_microseconds"].astype(float) / limited["microseconds_per_step"]


def _saved(column: str, alone: bool = False) -> Callable[[View, str, str], Any]:
    return lambda view, engine, of: saved(view, engine, of, column, alone)


def _variant(column: str) -> Callable[[View, str, str], Any]:
    def values(view: View, engine: str, of: str) -> Any:
        rows = variant_rows(view, engine, of)
        return (rows[rows["epoch"] > 1] if column == "seconds" else rows[rows["epoch"] == rows["epoch"].max()])[column]

    return values


def variant_rows(view: View, engine: str, variant: str) -> pd.DataFrame:
    """The epochs of an engine's runs of a variant."""
    rows = view.table("variants", engine)
    return rows[rows["variant"] == variant]


def _variant_gain(view: View, engine: str, of: str) -> float | None:
    """What test accuracy gains after epoch `SETTLED`, as the mean over the seeds."""
    by_epoch = variant_rows(view, engine, of).groupby("epoch")["test_accuracy"].mean()
    if SETTLED not in by_epoch.index or by_epoch.index.max() == SETTLED:
        return None
    return float(by_epoch[by_epoch.index.max()] - by_epoch[SETTLED])


def _micro(name: str) -> Callable[[View, str, str], Any]:
    def value(view: View, engine: str, of: str) -> Any:
        from experiments.report import microbenchmarks

        return getattr(microbenchmarks, name)(view, engine, of)

    return value


def _run(name: str, label: str, unit: Unit, measure: str = "time", **more: Any) -> Quantity:
    """A quantity that is a column of `tidy/runs.csv`."""
    return Quantity(name, label, unit, measure, more.pop("column", name), **more)


_ALL = (
    _run("import_seconds", "start-up", SECONDS, text="import_s"),
    _run("first_epoch_seconds", "first epoch", SECONDS, text="first_s", compilation=True),
    _run("later_epoch_seconds", "later epochs", SECONDS, text="later_s", compilation=False),
    _run("total_seconds", "all epochs", SECONDS, text="total_s", compilation=True),
    Quantity("average_epoch_seconds", "epoch", SECONDS, "time", source=_average, text="epoch_s", compilation=True),
    Quantity("later_evaluated_seconds", "with evaluation", SECONDS, "time", source=_evaluated),
    Quantity("first_to_later_seconds", "first / later epoch", TIMES, "time", source=_first_to_later, compilation=True),
    _run("train_accuracy", "train accuracy", FRACTION, text="train_accuracy"),
    _run("test_accuracy", "test accuracy", FRACTION, text="test_accuracy"),
    _run("test_loss", "test loss", LOSS, text="test_loss"),
    _run("own_train_accuracy", "own train accuracy", FRACTION, "own", column="train_accuracy"),
    _run("own_test_accuracy", "own test accuracy", FRACTION, "own", column="test_accuracy"),
    _run("own_test_loss", "own test loss", LOSS, "own", column="test_loss"),
    _run("bytes_first_epoch", "allocated, first epoch", BYTES, "memory", text="bytes_first", compilation=True),
    _run("bytes_later_epochs", "allocated", BYTES, "memory", text="bytes_later", compilation=False),
    Quantity(
        *("bytes_all_epochs", "allocated, all epochs", BYTES, "memory"),
        source=lambda view, engine, _: memory_of(view, engine)["total"],
        text="bytes_total",
        compilation=True,
    ),
    _run("peak_rss_bytes", "peak", BYTES, "memory", text="peak", compilation=True),
    Quantity("step_microseconds", "step", MICROSECONDS, "race", source=_step, compilation=False),
    Quantity(
        *("limit_share", "share of the limit", PERCENT, "race"),
        source=lambda view, engine, _: limit_shares(_last_race(view, engine)).median(),
        text="limit_share",
        compilation=False,
    ),
    *(
        Quantity(f"technique_{name}", label, SHARE, "ablation", source=source, about="technique")
        for name, label, source in (
            ("time_saved", "time saved", _saved("microseconds_per_step")),
            ("bytes_saved", "bytes saved", _saved("bytes_per_epoch")),
            ("alone_bytes_saved", "bytes saved alone", _saved("bytes_per_epoch", alone=True)),
        )
    ),
    Quantity(
        *("variant_test_accuracy", "test accuracy", FRACTION, "variants"),
        source=_variant("test_accuracy"),
        about="variant",
    ),
    Quantity(
        *("variant_late_gain_accuracy", "late gain of accuracy", FRACTION, "variants"),
        source=_variant_gain,
        about="variant",
    ),
    Quantity(
        *("variant_later_epoch_seconds", "later epochs", SECONDS, "variants"),
        source=_variant("seconds"),
        about="variant",
        compilation=False,
    ),
    *(
        Quantity(name, label, unit, "microbenchmarks", source=_micro(value), about="function", of_both=True)
        for name, label, unit, value in (
            ("gradient_nanoseconds", "gradient", NANOSECONDS, "gradient_time"),
            ("gradient_to_forward", "gradient / forward", TIMES, "gradient_to_forward"),
            ("chunked_gradient_nanoseconds", "forward-mode gradient", NANOSECONDS, "chunked_time"),
        )
    ),
)

QUANTITIES: dict[str, Quantity] = {one.name: one for one in _ALL}
"""Every quantity by its name, as papers' claims and tables call it."""
