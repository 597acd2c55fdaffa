"""The table of the ops' speed: what is timed, and that it is timed for equal gradients alone."""

from __future__ import annotations

import numpy as np
import pytest

from experiments import op_speed
from py_engine import ops
from py_engine.ad.op import NUMPY


@pytest.mark.parametrize("row", op_speed.ROWS, ids=lambda row: row.name)
def test_each_row_is_a_function_that_the_engine_has(row):
    function = np
    for part in row.name.partition(" ")[0].split("."):
        function = getattr(function, part, None)
    assert function in NUMPY or hasattr(ops, row.name)
    x = op_speed.given(row.kind, 10)
    assert np.isfinite(np.asarray(row.numpy(np, x))).all()


def test_a_gradient_that_differs_is_not_timed():
    calls = {"numpy": lambda: np.ones(2), "torch": lambda: np.ones(2) * 1.01, "jax": lambda: np.ones(2)}
    assert [*op_speed.agreeing(calls)] == ["numpy", "jax"]


def test_the_table_names_what_is_slow(capsys, monkeypatch):
    times = {"numpy": 8e-6, "torch": 2e-6, "jax": 4e-6}
    monkeypatch.setattr(op_speed, "measured", lambda rows, sizes, rounds: [(rows[0], 10, times)])
    op_speed.main(["sort", "--size", "10"])
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| sort | 10 | 8.0 | 2.0 | 4.0 | 4.00 |",
        "",
        "More than 3 times the faster one: sort of 10 (4.0).",
    ]


def test_gradients_are_computed_and_timed(monkeypatch):
    monkeypatch.setattr(op_speed, "SECONDS", 1e-4)
    monkeypatch.setattr(op_speed, "_torch", lambda: None)
    monkeypatch.setattr(op_speed, "_jax", lambda: None)
    ((row, size, times),) = op_speed.measured([row for row in op_speed.ROWS if row.name == "sort"], [10], 1)
    assert (row.name, size, [*times]) == ("sort", 10, ["numpy"]) and 0 < times["numpy"] < 60
