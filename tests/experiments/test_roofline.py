"""The limit of a step: what is counted, that it is none too high, and what is said of steps below it."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from bridge import layers, spec
from bridge.errors import TwinGradError
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from experiments import papers
from experiments.measures import race, roofline
from experiments.measures.roofline import BelowLimitError, Limit, Rates, Work
from experiments.quantities import QUANTITIES, limit_shares
from experiments.report import row_helpers, tables
from experiments.report.view import View
from py_engine import ops
from py_engine.ad.program import simplify, trace
from py_engine.ad.tensor import Tensor

SGD, ADAM = Optimizer("sgd", 0.1), Optimizer("adam", 0.1)


def task(model: str | ModelSpec, optimizer: Optimizer = SGD, batch_size: int = 100, dtype: str = "float32") -> Any:
    network = spec.load(papers.model_path(model)) if isinstance(model, str) else model
    return SimpleNamespace(spec=network, optimizer=optimizer, batch_size=batch_size, dtype=dtype)


def work(*arguments: Any) -> Work:
    return roofline.work_of(task(*arguments))


RATES = Rates(1e9, {1000: 8e9, 10_000: 4e9, 100_000: 2e9}, {"numpy": 3e-7, "julia": 2e-9})


# What is counted ------------------------------------------------------------------------------------------------------


def test_the_products_of_a_recurrent_network_are_those_of_its_formulas() -> None:
    """Of all four segments with the weight, of three states with the recurrent one, and of the last with the output."""
    found = work("mnist-rnn")
    into, recurrent, out = 400 * 196 * 64, 3 * 100 * 64 * 64, 100 * 64 * 10
    # Forward; backward by parameters; and by states, of which pixels have none.
    assert found.products == 2 * (2 * into + 3 * recurrent + 3 * out)
    parameters = 196 * 64 + 64 * 64 + 64 + 64 * 10 + 10
    assert (found.state, found.batch) == (4 * parameters, 4 * 100 * 784)


def test_a_convolutions_gradient_counts_the_winners_of_a_maximum_alone() -> None:
    found = work("mnist-cnn")
    conv, hidden, out = 100 * 26 * 26 * 6 * 9, 100 * 1014 * 84, 100 * 84 * 10
    assert found.products == pytest.approx(2 * (conv * (1 + 1 / 4) + 3 * hidden + 3 * out))
    assert found.state == 4 * (6 * 9 + 1014 * 84 + 84 * 10)


def test_rows_that_are_looked_up_may_repeat_so_that_their_products_do_not_count() -> None:
    found = work("imdb-cnn", ADAM, 64)
    assert found.products == 3 * 2 * 64 * 128 - 2 * 64 * 128 + 2 * 64 * 128  # of the dense layer alone
    parameters = 12_849 * 50 + 8 * 50 * 3 + 8 + 128 + 1
    assert found.state == 3 * 4 * (parameters - 12_849 * 50), "with both means of Adam; rows may be updated later"
    assert work("imdb-cnn", Optimizer("rmsprop", 0.1), 64).state == 2 * 4 * parameters, "with its mean of squares"
    assert found.batch == 64 * 130 * 2  # ids below 2 ** 16
    assert work("imdb-cnn", SGD, 64).state == 4 * (parameters - 12_849 * 50), "rows without a gradient may stay"


def test_work_grows_with_the_batch_and_the_dtype() -> None:
    one, many = work("mnist-rnn", SGD, 1), work("mnist-rnn", SGD, 100)
    assert many.products == 100 * one.products and many.state == one.state and many.batch == 100 * one.batch
    network = spec.load(papers.model_path("mnist-rnn")).model_dump(mode="json", exclude_none=True)
    network["input"]["dtype"] = "float64"
    wide = work(spec.parse(network, "wide"), SGD, 100, "float64")
    assert (wide.products, wide.state, wide.batch) == (many.products, 2 * many.state, 2 * many.batch)


REQUIRED = {
    **{"units": 5, "filters": 6, "kernel": 3, "window": 2, "vocabulary": 9, "dimension": 4},
    **{"shape": [6, 4], "axes": [1, 0], "activation": "relu", "rate": 0.5, "heads": 2},
}


@pytest.mark.parametrize("op", layers.LAYERS)
def test_the_work_of_every_layer_is_known(op: str) -> None:
    kind = layers.LAYERS[op]
    asked = {
        name: REQUIRED[name] for name, field in kind.model_fields.items() if name in REQUIRED and field.is_required()
    }
    first = {"id": "a", "op": op, **asked}
    if "merged" in vars(kind):  # of several inputs
        first["inputs"] = ["input", "input"]
    if op == "interpolate":
        first["size"] = 5
    axes = len(kind.axes) if issubclass(kind, layers.Windowed) else 1
    shape: dict[str, Any] = {"shape": ["N", 4, *[6] * axes]}
    document = {
        **{"format": "twingrad-model", "version": 1, "opset": spec.OPSET, "name": op},
        "input": {"shape": ["N", 6], "dtype": "int64"} if op == "embedding" else shape,
        "layers": [first, {"id": "flat", "op": "flatten"}, {"id": "output", "op": "dense", "units": 3}],
        "loss": {"op": "softmax_cross_entropy"},
    }
    found = work(spec.parse(document, op), ADAM, 7)
    # Rows that are looked up, as both layers do, may repeat.
    assert found.state and found.ops and (found.products > 0) == (op not in ("embedding", "interpolate"))


def products(function: Any, *shapes: tuple[int, ...]) -> float:
    """The share of a program's products that count."""
    program = simplify(trace(lambda *x: [function(*x)], [Tensor.symbol(shape, np.float32) for shape in shapes]))
    zeros, needless = roofline.skipped(program), roofline.unread(program)
    found = [one for one in program.equations if one.op.product]
    return sum(one.flops * roofline.needed(one, zeros, needless) for one in found) / sum(one.flops for one in found)


def test_what_nobody_reads_does_not_count() -> None:
    assert products(lambda a, b: a @ b, (8, 4), (4, 6)) == 1
    assert products(lambda a, b: (a @ b)[:2], (8, 4), (4, 6)) == 0.25
    assert products(lambda a, b: ops.concatenate([(a @ b)[:2], (a @ b)[2:]]), (8, 4), (4, 6)) == 1
    pooled = lambda x, w: ops.max_pool(ops.conv(x, w), 3)  # noqa: E731  (10 of the 11 outputs are in no window of two)
    assert products(pooled, (1, 1, 13), (1, 1, 3)) == pytest.approx(9 / 11)


def test_zeros_and_padding_do_not_count() -> None:
    assert products(lambda a, b: ops.pad(a, ((0, 6), (0, 0))) @ b, (2, 4), (4, 6)) == 0.25
    assert products(lambda a, b: pe.ops.tanh(a.reshape((4, 4))) @ b, (16,), (4, 6)) == 1
    x, w = Tensor.symbol((1, 1, 4), np.float32), Tensor.symbol((1, 1, 3), np.float32)
    program = trace(lambda x, w: [ops.conv(x, w, padding=1)], [x, w])
    assert [one.flops for one in program.equations if one.op.product] == [2 * (4 * 3 - 2)]


# The limit ------------------------------------------------------------------------------------------------------------


def test_the_longer_of_both_times_and_the_shortest_call_are_the_limit() -> None:
    arithmetic = Limit(Work(5e6, 1000, 2000, ()), RATES)
    assert arithmetic.seconds == pytest.approx(5e-3 + 2e-9)
    assert arithmetic.record()["limited_by"] == "products"
    memory = Limit(Work(1e3, 1000, 20_000, ()), RATES)
    assert memory.seconds == pytest.approx(41_000 / 4e9 + 2e-9)
    assert memory.record()["limited_by"] == "memory"


def test_the_bandwidth_is_that_of_arrays_no_larger_than_the_working_set() -> None:
    assert [RATES.bandwidth(size) for size in (0, 1000, 9999, 10_000, 10**9)] == [8e9, 8e9, 8e9, 4e9, 2e9]
    uneven = dataclasses.replace(RATES, bytes_per_second={1000: 1e9, 10_000: 4e9})
    assert uneven.bandwidth(1000) == 4e9, "what larger arrays reached is possible"


def test_of_two_measurements_the_better_one_counts() -> None:
    other = Rates(2e9, {1000: 1e9, 10_000: 5e9}, {"numpy": 1e-7})
    best = RATES.best(other)
    assert best == other.best(RATES)
    assert best == Rates(2e9, {1000: 8e9, 10_000: 5e9, 100_000: 2e9}, {"numpy": 1e-7, "julia": 2e-9})


def test_more_work_never_has_a_lower_limit() -> None:
    limits = [Limit(Work(n * 1e6, 100 * n, 3000 * n, ()), RATES).seconds for n in range(1, 60)]
    assert limits == sorted(limits)


def test_op_by_op_nothing_is_faster() -> None:
    found = work("mnist-cnn")
    limit = Limit(found, RATES)
    assert limit.op_by_op_seconds > limit.seconds
    assert sum(flops for flops, _ in found.ops) > found.products


# Steps below it -------------------------------------------------------------------------------------------------------


def test_a_step_of_ours_below_its_limit_is_an_error_that_names_both() -> None:
    with pytest.raises(BelowLimitError, match=r"^TwinGrad numpy: a step of 24.0 µs is below a quarter of its limit of"):
        roofline.share("numpy", "TwinGrad numpy", 24.0, 100.0)
    assert roofline.share("numpy", "TwinGrad numpy", 80.0, 100.0) == 1.25, "by Winograd's algorithm"
    assert roofline.share("numpy", "TwinGrad numpy", 200.0, 100.0) == 0.5
    assert roofline.share("torch", "PyTorch", 80.0, 100.0) == 1.25, "its convolutions may have fewer multiplications"


def test_tables_refuse_such_a_step(view_of: Any, fake: Any) -> None:
    slow = with_limit(view_of(fake.rows()), 1e6)
    for summary in (
        lambda: tables.race(slow),
        lambda: QUANTITIES["limit_share"].value(slow, "numpy"),
        lambda: limit_shares(slow.table("race", "julia")),
    ):
        with pytest.raises(BelowLimitError, match="is below a quarter of its limit"):
            summary()


def with_limit(view: View, limit: float | None) -> View:
    """The same races with `limit` microseconds as the limit of a step."""
    return dataclasses.replace(
        view, tables={**view.tables, "race": view.tables["race"].assign(limit_microseconds=limit)}
    )


def test_every_engine_has_its_share_and_the_notes_say_where_the_limit_comes_from(view_of: Any, fake: Any) -> None:
    view = with_limit(view_of(fake.rows()), 40.0)
    made = tables.race(view)
    rows = [row for row in made.rows if row["rounds"]]
    assert rows and all(row["limit_share"] == pytest.approx(40 / row["step_us_median"], rel=0.02) for row in rows)
    assert "of the limit" in [column.header for column in made.columns]
    assert any("40.0 µs with 2 threads, by its products" in note for note in made.notes)
    assert QUANTITIES["limit_share"].value(view, "numpy") == pytest.approx(40 / 300, rel=0.05)


def test_a_race_without_a_limit_says_that_it_is_missing(view_of: Any, fake: Any) -> None:
    view = with_limit(view_of(fake.rows()), None)
    made = tables.race(view)
    assert all(row["limit_share"] is None for row in made.rows)
    assert any(note.startswith("Missing, limit of a step: 1 thread, 2 threads") for note in made.notes)
    assert QUANTITIES["limit_share"].value(view, "numpy") is None
    assert not [note for note in row_helpers.limit_notes(view.table("race")) if "least time" in note]


# This machine ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rates() -> Rates:
    """Of this machine, measured shortly."""
    patch = pytest.MonkeyPatch()
    for name, value in {"SAMPLES": 2, "SECONDS": 0.002}.items():
        patch.setattr(roofline, name, value)
    found = roofline.measure(Work(0, 0, 50_000, ()), "float32", 1)
    patch.undo()
    return found


def test_rates_are_measured_in_numpy_and_in_julia_where_it_is(rates: Rates) -> None:
    assert list(rates.bytes_per_second) == [2**14, 2**16], "the level of the working set, and the next one"
    assert all(map(math.isfinite, (rates.flops_per_second, *rates.bytes_per_second.values())))
    assert {"numpy"} <= set(rates.call_seconds) <= {"numpy", "julia"}


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 7, 12, 400])
def test_any_number_of_threads_has_a_bandwidth(threads: int, capsys: pytest.CaptureFixture[str]) -> None:
    roofline.main({"dtype": "float32", "threads": threads, "samples": 1, "seconds": 0.0005, "sizes": [2**14]})
    (rate,) = (line.split()[2] for line in capsys.readouterr().out.splitlines() if line.startswith("bytes"))
    assert float(rate) > 0


def test_the_slowest_thread_tells_how_long_a_sample_took() -> None:
    # The first is made to find how often to call it, the others by the threads.
    several = iter([0.001, 0.001, 0.02])
    assert roofline._together(lambda: partial(time.sleep, next(several)), 2, 2, 0.001) >= 0.02
    assert roofline._together(lambda: partial(time.sleep, 0.001), 1, 2, 0.001) < 0.02


def test_memory_whose_bandwidth_is_measured_was_written_to(monkeypatch: Any) -> None:
    moved: list[tuple[np.ndarray, ...]] = []

    def together(made: Any, threads: int, samples: int, seconds: float) -> float:
        call = made()
        moved.append(getattr(call, "args", None) or (call.__self__,))
        call()
        return 1.0

    monkeypatch.setattr(roofline, "_together", together)
    assert roofline._bandwidth(2**20, 2, 1, 0.001) == 2 * 2**20
    assert len(moved) == 2 and all(np.all(array == 1) for arrays in moved for array in arrays)
    target, source = moved[0]
    assert target.nbytes == source.nbytes == 2**19 and not np.may_share_memory(target, source)


def test_a_rate_that_was_not_measured_is_an_error() -> None:
    script = "print('flops', 1e9); print('bytes', 16384, 0.0); print('call', 1e-7)"
    with pytest.raises(TwinGradError, match="can't be measured in numpy"):
        roofline._rates("numpy", [sys.executable, "-c", script], os.environ)


@pytest.mark.parametrize("model", ["mnist-rnn", "mnist-cnn"])
def test_no_step_of_a_small_network_is_below_its_limit(model: str, rates: Rates, monkeypatch: Any) -> None:
    """By far: a single number of each layer, so that calls are all there is."""
    from bridge import registry, weights

    network = spec.load(papers.model_path(model))
    limit = Limit(roofline.work_of(task(network, SGD, 1)), rates).seconds
    session = registry.get("numpy").build(network, weights.initialise(network, 0, "float32"), SGD, 1, "float32", 1)
    x, y = np.zeros((50, 784), np.float32), np.zeros(50, np.int64)
    session.train_epoch(x, y, np.arange(50))
    taken = roofline._best(lambda: session.train_epoch(x, y, np.arange(50)), 3, 0.01) / 50
    assert roofline.share("numpy", "TwinGrad numpy", taken * 1e6, limit * 1e6) < 1


def test_what_is_recorded_has_its_form() -> None:
    from experiments import records

    found = Limit(work("mnist-rnn"), RATES).record()
    assert not list(records._faults(found, roofline.FORM, "roofline"))
    rows = [{"round": 1, "engine": "numpy", "label": "TwinGrad numpy", "microseconds_per_step": 1e9}]
    joined = race.with_limits({"race": rows, "roofline": found})
    assert joined[0].keys() == {*rows[0], *race.LIMITS}
    assert race.with_limits({"race": rows}) == rows
    assert race.standings(joined)[0]["limit_share"] == pytest.approx(found["limit_microseconds"] / 1e9)
    assert race.standings(rows)[0]["limit_share"] is None
