"""Indexing: numpy's results for every index, and gradients that add up where positions repeat."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import py_engine as pe
from py_engine import ops
from py_engine.ad.ops.shape import covers
from py_engine.errors import DTypeError, ShapeError, TraceError

# Random indices -------------------------------------------------------------------------------------------


@st.composite
def slices(draw, length):
    bound = st.none() | st.integers(-length - 2, length + 2)
    return slice(draw(bound), draw(bound), draw(st.none() | st.sampled_from([-3, -2, -1, 1, 2, 3])))


@st.composite
def arrays_with_indices(draw):
    """A shape with an index for it: integers, slices, new axes, an ellipsis, integer arrays, boolean masks."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
    together = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))  # of the integer arrays
    index = []
    axis = 0
    indexed = draw(st.integers(0, len(shape)))
    while axis < indexed:
        length = shape[axis]
        kinds = ["slice"] + ["integer", "array"] * (length > 0) + ["mask"]
        kind = draw(st.sampled_from(kinds))
        if kind == "slice":
            index.append(draw(slices(length)))
        elif kind == "integer":
            index.append(draw(st.integers(-length, length - 1)))
        elif kind == "array":
            places = hnp.arrays(np.intp, draw(parts_of(together)), elements=st.integers(-length, length - 1))
            index.append(draw(places))
        else:
            axes = draw(st.integers(1, indexed - axis))
            index.append(draw(hnp.arrays(np.bool_, shape[axis : axis + axes])))
            axis += axes - 1
        axis += 1
    if draw(st.booleans()):
        index.insert(draw(st.integers(0, len(index))), None)
    if indexed == len(shape) or draw(st.booleans()):
        index.append(...)
    if len(index) == 1 and draw(st.booleans()):
        return shape, index[0]
    return shape, tuple(index)


@st.composite
def parts_of(draw, shape):
    """A shape that broadcasts to `shape`."""
    kept = shape[draw(st.integers(0, len(shape))) :]
    return tuple(1 if draw(st.booleans()) else n for n in kept)


def gradient_by_numpy(shape, index, weights):
    total = np.zeros(shape)
    np.add.at(total, index, weights)
    return total


@pytest.mark.campaign
@settings(max_examples=3 * settings.default.max_examples)
@given(arrays_with_indices(), st.integers(0, 2**32 - 1))
def test_any_index_gives_what_numpy_gives(case, seed):
    shape, index = case
    note(f"x of shape {shape}, index {index!r}")
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    try:
        expected = x[index]
    except IndexError:  # masks and arrays whose shapes do not broadcast
        with pytest.raises(ShapeError):
            pe.tensor(x)[index]
        return
    variable = pe.tensor(x, requires_grad=True)
    result = variable[index]
    assert isinstance(result.numpy(), np.ndarray)
    assert result.shape == np.shape(expected)
    np.testing.assert_array_equal(result.numpy(), expected)

    weights = rng.standard_normal(result.shape)
    gradient = gradient_by_numpy(shape, index, weights)
    result.backward(weights)
    np.testing.assert_allclose(variable.grad, gradient, rtol=1e-12, atol=1e-14)
    compiled = pe.compile(pe.grad(lambda x: np.sum(x[index] * weights)))
    np.testing.assert_allclose(compiled(x), gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "index", [np.s_[:, [0, 1], ..., [1, 0]], np.s_[:, [0, 1], [1, 0], ...], np.s_[:, 1, ..., [1, 0]]], ids=str
)
def test_an_ellipsis_that_stands_for_no_axis_parts_index_arrays_as_numpys_does(index):
    x = np.arange(18.0).reshape(2, 3, 3)
    expected = x[index]
    np.testing.assert_array_equal(pe.tensor(x)[index].numpy(), expected)
    np.testing.assert_array_equal(pe.compile(lambda x: x[index])(x), expected)
    weights = np.arange(1.0, expected.size + 1).reshape(expected.shape)
    gradient = gradient_by_numpy(x.shape, index, weights)
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(x[index] * weights))(x), gradient)
    forward = pe.jacobian(lambda x: x[index], x, mode="forward")
    np.testing.assert_array_equal(np.tensordot(weights, forward, weights.ndim), gradient)


@given(st.lists(st.tuples(slices(5), slices(4)), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_gradients_of_slices_that_overlap_or_leave_gaps_add_up(pairs, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, 4))
    parts = [rng.standard_normal(x[pair].shape) for pair in pairs]
    expected = sum(gradient_by_numpy(x.shape, pair, w) for pair, w in zip(pairs, parts, strict=True))

    def total(x):
        value = np.sum(x) * 0
        for pair, w in zip(pairs, parts, strict=True):
            value = value + np.sum(x[pair] * w)
        return value

    np.testing.assert_allclose(pe.grad(total)(x), expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(pe.compile(pe.grad(total))(x), expected, rtol=1e-12, atol=1e-13)


def test_places_that_overlap_very_often_are_no_mosaic():
    for times in (2**16, 2**16 + 1):  # 0 and 1 for a counter of two bytes
        assert not covers((2,), ((0,),) * times + ((1,),))
    assert covers((2,), ((0,), (1,)))


# Arrays of positions --------------------------------------------------------------------------------------


def test_repeated_positions_add_up():
    x = np.zeros((3, 2))
    rows = np.array([2, 0, 2, 2, -1])
    gradient = pe.grad(lambda x: np.sum(x[rows] * np.arange(10.0).reshape(5, 2)))(x)
    np.testing.assert_array_equal(gradient, [[2, 3], [0, 0], [0 + 4 + 6 + 8, 1 + 5 + 7 + 9]])


ROWS = np.array([3, -1, 0, 3, -4, 3])
PLACES = {
    "rows": ROWS,
    "bytes": ROWS.astype(np.int8),
    "unsigned": np.array([[3, 0], [3, 1]], np.uint64),
    "one row": np.array(-2),
    "no rows": np.zeros(0, np.intp),
    "columns": np.s_[:, ROWS],
    "a column of rows": np.s_[ROWS, 1],
    "rows and planes": np.s_[ROWS, ::2, np.newaxis, ROWS % 2],
    "elements": (ROWS, ROWS, ROWS % 2),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(4, 4, 2), (4, 4, 3), (4, 5, 1700), (4, 5, 1701), (9000, 4, 2), (4, 4000, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_added_at_repeated_positions_is_added_in_their_order(place, shape, dtype, rng):
    index = PLACES[place]
    positions = np.arange(np.prod(shape)).reshape(shape)[index]
    weights = (rng.standard_normal(positions.shape) * 10 ** rng.uniform(-6, 6, positions.shape)).astype(dtype)
    expected = np.zeros(shape, dtype)
    np.add.at(expected.reshape(-1), np.ravel(positions), np.ravel(weights))
    slope = pe.grad(lambda x: np.sum(x[index] * weights))
    for run in (slope, pe.compile(slope)):
        assert run(np.zeros(shape, dtype)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("index", [ROWS, np.s_[:, ROWS], np.s_[ROWS, ::100]], ids=str)
def test_the_gradient_of_a_few_elements_makes_no_positions_of_all(index):
    slope, x = pe.compile(pe.grad(lambda x: np.sum(x[index] ** 2))), np.ones((500, 400), np.float32)
    slope(x)
    tracemalloc.start()
    try:
        slope(x)
        assert tracemalloc.get_traced_memory()[1] < 1.5 * x.nbytes  # the gradient itself is one
    finally:
        tracemalloc.stop()


def test_positions_may_change_from_replay_to_replay():
    lookup = pe.compile(pe.value_and_grad(lambda table, rows: np.sum(table[rows] ** 2)))
    table = np.arange(6.0).reshape(3, 2)
    for rows in (np.array([0, 0]), np.array([2, 1]), np.array([-1, 0])):
        value, gradient = lookup(table, rows)
        assert value == np.sum(table[rows] ** 2)
        np.testing.assert_array_equal(gradient, gradient_by_numpy(table.shape, rows, 2 * table[rows]))
    assert len(lookup.tapes) == 1


def test_rows_of_any_integer_type():
    table = np.arange(6.0).reshape(3, 2)
    for dtype in (np.int8, np.uint8, np.int32, np.int64, np.uint64):
        rows = np.array([2, 0], dtype)
        np.testing.assert_array_equal(pe.tensor(table)[rows].numpy(), table[rows])
        np.testing.assert_array_equal(pe.compile(lambda t, r: t[r])(table, rows), table[rows])


def test_a_tensor_of_integers_is_an_index():
    table = pe.tensor(np.arange(6.0).reshape(3, 2), requires_grad=True)
    rows = pe.tensor([1, 1])
    np.sum(table[rows]).backward()
    np.testing.assert_array_equal(table.grad, [[0, 0], [2, 2], [0, 0]])


def test_lists_are_arrays_of_positions():
    x = np.arange(6.0).reshape(3, 2)
    for index in ([0, 2], ([0, 2], [1, 1]), [[0, 1], [2, 2]], [], [True, False, True], np.array([], int)):
        np.testing.assert_array_equal(pe.tensor(x)[index].numpy(), x[index])


def test_the_gradient_of_a_gather_can_be_differentiated():
    rows = np.array([0, 2, 2])
    pe.gradcheck(lambda x: ops.sum(x[rows] ** 3), np.arange(3.0))
    pe.gradcheck(lambda x: pe.grad(lambda x: ops.sum(x[rows] ** 3))(x), np.arange(3.0))


# Masks ----------------------------------------------------------------------------------------------------


def test_a_boolean_mask_works_eagerly():
    x = np.arange(6.0).reshape(3, 2)
    gradient = pe.grad(lambda x: np.sum(x[x > 2] ** 2))(x)
    np.testing.assert_array_equal(gradient, np.where(x > 2, 2 * x, 0))


def test_a_computed_mask_cannot_be_traced_and_the_error_says_what_to_do():
    with pytest.raises(TraceError, match=r"use where\(\) and a sum, or call the function eagerly"):
        pe.compile(lambda x: np.sum(x[x > 2]))(np.arange(6.0))


def test_a_mask_known_before_tracing_is_an_index_like_any_other():
    x, mask = np.arange(4.0), np.array([True, False, False, True])
    np.testing.assert_array_equal(pe.compile(lambda x: x[mask])(x), [0, 3])


@pytest.mark.parametrize(
    "mask", [np.ones(4, bool), np.ones((3, 3), bool), np.ones((3, 2, 1), bool), True, np.bool_(False)]
)
def test_a_mask_of_another_shape_is_refused(mask):
    with pytest.raises(ShapeError, match=r"mask must have the lengths|indices for an array"):
        pe.tensor(np.zeros((3, 2)))[mask]


# Bad indices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (3, "index 3 is out of bounds for axis 0 with size 3"),
        ((0, -3), "index -3 is out of bounds for axis 1 with size 2"),
        ((0, 0, 0), r"3 indices for an array of shape \(3, 2\)"),
        (np.array([0, 3]), "index 3 is out of range for an axis of length 3"),
        (np.array([-4, 0]), "index -4 is out of range for an axis of length 3"),
        ((slice(None), np.array([0, 2])), "index 2 is out of bounds for axis 1 with size 2"),
        ((np.array([0, 1]), np.array([0, 1, 0])), "could not be broadcast"),
    ],
)
def test_indices_that_do_not_fit(index, message):
    x = np.zeros((3, 2))
    with pytest.raises(ShapeError, match=message):
        pe.tensor(x)[index]
    with pytest.raises(ShapeError, match=message):
        pe.compile(lambda x: x[index])(x)


@pytest.mark.parametrize("index", [1.5, np.array([0.0, 1.0]), "a", pe.tensor(1.0)])
def test_indices_must_be_integers(index):
    with pytest.raises(DTypeError, match="an index must be of integers or booleans"):
        pe.tensor(np.zeros(3))[index]


def test_positions_that_are_out_of_range_in_a_later_replay_are_named():
    lookup = pe.compile(lambda table, rows: table[rows])
    lookup(np.zeros((3, 2)), np.array([0]))
    with pytest.raises(ShapeError, match="index 7 is out of range for an axis of length 3"):
        lookup(np.zeros((3, 2)), np.array([7]))
    # This gradient needs no element of the table: nothing is looked up before the ones are put back.
    spread = pe.compile(pe.grad(lambda table, rows: np.sum(table[rows])))
    with pytest.raises(ShapeError, match="index 7 is out of bounds for axis 0 with size 3"):
        spread(np.zeros((3, 2)), np.array([7]))
    with pytest.raises(ShapeError, match="index 30000 is out of range for an axis of length 30000, at position 1"):
        spread(np.zeros((30_000, 2)), np.array([7, 30_000]))
