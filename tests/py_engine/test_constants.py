"""What has no derivative on purpose: truth values, positions, whole numbers, shapes.

They are computed anew in every replay, in every step of a loop and in a checkpoint; a gradient ends there, and passes
beside them. All inputs are chosen so that the result changes from one call to the next.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.op import TABLE
from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError, TraceError

ROWS = np.array([[0.3, -1.6, 2.5, 0.0], [-2.5, 1.7, 0.4, -0.2], [1.5, 0.0, np.inf, -3.4], [np.nan, 4.5, -0.5, 1.0]])
FINITE = np.array([[0.3, -1.6, 2.6, 0.1], [-2.4, 1.7, 0.4, -0.2], [1.4, 0.2, 3.3, -3.4]])


def number(x):
    """Truth values and whole numbers as floats, of tensors and of arrays."""
    return x.astype(np.float64)


# For each constant op of the table, and each function made of them, x -> what it is without a derivative.
CONSTANT = {
    "less": lambda x: number(x < 0.35),
    "less_equal": lambda x: number(x <= 0.4),
    "greater": lambda x: number(x > 0.35),
    "greater_equal": lambda x: number(np.greater_equal(x, 0.4)),
    "equal": lambda x: number(x == 0.4),
    "not_equal": lambda x: number(x != 0.4),
    "isnan": lambda x: number(np.isnan(x)),
    "isfinite": lambda x: number(np.isfinite(x)),
    "isinf": lambda x: number(np.isinf(x)),
    "logical_and": lambda x: number(np.logical_and(x > -1, x < 1)),
    "logical_or": lambda x: number((x < -1) | (x > 1)),
    "logical_not": lambda x: number(~(x > 0.35)),
    "logical_xor": lambda x: number((x > -1) ^ (x < 1)),
    "isclose": lambda x: number(np.isclose(x, 0.4)),
    "any": lambda x: number(np.any(x > 2, axis=-1, keepdims=True)),
    "all": lambda x: number(np.all(x > -2, axis=-1, keepdims=True)),
    "argmax": lambda x: number(np.argmax(x, axis=-1, keepdims=True)),
    "argmin": lambda x: number(x.argmin(axis=-1, keepdims=True)),
    "argsort": lambda x: number(np.argsort(x, axis=-1)),
    "one_hot": lambda x: (
        ops.one_hot(np.argmax(x, axis=-1), x.shape[-1])
        if isinstance(x, Tensor)
        else np.eye(x.shape[-1])[np.argmax(x, axis=-1)]
    ),
    "searchsorted": lambda x: number(np.searchsorted(np.array([-2.0, 0.0, 1.0]), x)),
    "count_nonzero": lambda x: number(np.count_nonzero(x > 0.35, axis=-1, keepdims=True)),
    "floor_divide": lambda x: x // 0.5 + 3 // (x + 0.01),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.round,
    "round to decimals": lambda x: np.round(x, -1) + x.round(1),
    "fix": np.fix,
    "sign": np.sign,
    "stop_gradient": lambda x: ops.stop_gradient(x) if isinstance(x, Tensor) else x,
    "place of the largest": lambda x: number(np.argmax(x) == np.argmin(x)) + number(np.argmax(np.ravel(x))),
}
MASKS = {"dropout_mask", "detsign"}  # random, or of square matrices: replays are tested elsewhere


def test_every_constant_op_of_the_table_is_here():
    assert {name for name, op in TABLE.items() if op.constant and not op.fused} <= {*CONSTANT, *MASKS}


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


each = pytest.mark.parametrize("constant", CONSTANT.values(), ids=CONSTANT)


@each
def test_computed_anew_in_every_replay(constant):
    compiled = pe.compile(constant)
    expected = [constant(row) for row in ROWS]
    assert any(not np.array_equal(e, expected[0], equal_nan=True) for e in expected)
    for _ in range(2):
        for row, value in zip(ROWS, expected, strict=True):
            np.testing.assert_array_equal(constant(Tensor(row)).numpy(), value)
            np.testing.assert_array_equal(compiled(row), value)
    assert len(compiled.tapes) == 1


@each
def test_a_gradient_ends_there_and_passes_beside(constant):
    def loss(x):
        return np.sum(constant(x) * x)

    for gradient in (pe.grad(loss), pe.compile(pe.grad(loss)), pe.grad(pe.checkpoint(loss)),
                     pe.compile(pe.grad(pe.checkpoint(loss))), lambda x: pe.jacobian(loss, x)):  # fmt: skip
        for row in FINITE:
            np.testing.assert_allclose(gradient(row), np.broadcast_to(constant(row), row.shape), rtol=1e-15)
    for row in FINITE:
        np.testing.assert_array_equal(pe.grad(lambda x: np.sum(constant(x)))(row), np.zeros(4))
        np.testing.assert_array_equal(pe.hessian(loss, row), np.zeros((4, 4)))
        assert pe.jvp(loss, (row,), (np.ones(4),))[1] == np.sum(np.broadcast_to(constant(row), row.shape))


@each
def test_computed_anew_in_every_step_of_a_scan(constant):
    def body(carry, x):
        row, weights = x
        found = constant(row)
        return carry * 0.5 + found * weights, found

    def loop(start, rows, weights):
        last, seen = pe.scan(body, start, (rows, weights))
        return np.sum(last), seen

    def unrolled(start, rows, weights):
        carry = start
        for k in range(len(ROWS)):
            carry = body(carry, (rows[k], weights[k]))[0]
        return np.sum(carry)

    start, weights = np.array([0.9, -1.1, 0.6, 1.3]), np.arange(16.0).reshape(4, 4) - 7
    steps = [constant(row) for row in ROWS]
    assert any(not np.array_equal(step, steps[0], equal_nan=True) for step in steps)
    compiled = pe.compile(loop)
    for rows in (ROWS, ROWS[::-1].copy()):
        for total, seen in (loop(start, rows, weights), compiled(start, rows, weights)):
            np.testing.assert_array_equal(plain(seen), [constant(row) for row in rows])
            np.testing.assert_allclose(plain(total), unrolled(start, rows, weights), rtol=1e-13)
    gradient = pe.grad(lambda *args: loop(*args)[0], (0, 1, 2))
    compiled = pe.compile(gradient)
    for rows in (FINITE, FINITE[::-1].copy()):
        rows = np.concatenate([rows, rows[:1]])
        expected = pe.grad(unrolled, (0, 1, 2))(start, rows, weights)
        assert not expected[1].any()
        for found in (gradient(start, rows, weights), compiled(start, rows, weights)):
            for ours, theirs in zip(found, expected, strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-13)


def plain(x):
    return x.numpy() if isinstance(x, Tensor) else x


# Used as indices, masks and conditions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[np.argmax(x)] ** 2,
        lambda x: np.sum(x[x.argmin() :][:0]) + x[x.argmin()],
        lambda x: np.sum(np.where(np.isnan(x), 0.0, x) ** 2),
        lambda x: np.sum(np.where(np.any(x > 2), x, -x)),
        lambda x: np.sum(np.floor(x) * x) + np.sum(x[np.argmax(x) - 1] * np.sign(x)),
        lambda x: np.sum(x * np.where((x > 0) & ~(x > 2), 1.0, 3.0)),
    ],
)
def test_as_indices_and_conditions(use):
    try:
        compiled = pe.compile(pe.value_and_grad(use))
        first = compiled(FINITE[0])
    except TraceError:
        compiled = None  # a bound of a slice gives a shape that depends on values
    for row in FINITE:
        value, gradient = pe.value_and_grad(use)(row)
        np.testing.assert_allclose(value, use(row), rtol=1e-14)
        step = 1e-7
        estimate = [(use(row + step * e) - use(row - step * e)) / (2 * step) for e in np.eye(4)]
        np.testing.assert_allclose(gradient, estimate, rtol=1e-5, atol=1e-6)
        if compiled is not None:
            for ours, theirs in zip(compiled(row), (value, gradient), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-14)
    assert compiled is None or first[0] != compiled(FINITE[1])[0]


def test_shapes_are_plain_integers_eagerly_and_while_tracing():
    seen = []

    def function(x):
        seen.append((np.shape(x), np.ndim(x), np.size(x), np.size(x, 0), x.shape, x.ndim, x.size, len(x)))
        return np.reshape(x, (np.size(x),)) / np.shape(x)[1]

    for run in (lambda x: function(Tensor(x)).numpy(), pe.compile(function)):
        np.testing.assert_array_equal(run(FINITE), FINITE.ravel() / 4)
    assert seen == [((3, 4), 2, 12, 3, (3, 4), 2, 12, 3)] * 2
    assert {type(item) for row in seen for item in row} == {int, tuple}


@pytest.mark.parametrize("make", [np.zeros_like, np.ones_like, lambda x: np.full_like(x, 2.5)])
def test_constants_of_a_tensor_s_shape(make):
    for dtype in (np.float32, np.float64, np.int64):
        x = FINITE.astype(dtype)
        np.testing.assert_array_equal(make(Tensor(x)).numpy(), make(x))
        assert make(Tensor(x)).dtype == dtype == pe.compile(make)(x).dtype
        np.testing.assert_array_equal(pe.compile(make)(x), make(x))
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(make(x) * x))(FINITE), make(FINITE))
    np.testing.assert_array_equal(pe.compile(pe.grad(lambda x: np.sum(make(x) * x)))(FINITE), make(FINITE))


def test_full_like_of_a_tensor_passes_its_gradient():
    def function(x):
        return np.sum(np.full_like(x, np.sum(x)) * FINITE)

    for gradient in (pe.grad(function), pe.compile(pe.grad(function))):
        np.testing.assert_allclose(gradient(FINITE), np.full((3, 4), FINITE.sum()), rtol=1e-13)


def test_truth_values_of_a_trace_are_no_branch():
    with pytest.raises(TraceError, match=r"use ops such as where\(\)"):
        pe.compile(lambda x: x if np.any(x > 0) else -x)(FINITE)
    assert pe.grad(lambda x: np.sum(x if np.any(x > 0) else -x))(FINITE).sum() == 12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (np.unique_values, "numpy.unique_values is refused on tensors: the shape of its result depends on values"),
        (lambda x: np.where(x > 0, x), "either both or neither of the two results must be given"),
        (lambda x: x.flat, "a tensor has no flat: write"),
        (lambda x: x.sort(), "a tensor has no sort: tensors cannot be written in place"),
        (lambda x: x & 1, "& is for truth values on tensors, got float64"),
        (lambda x: ~x, "~ is for truth values on tensors, got float64"),
        (lambda x: np.fft.fft(x), "numpy.fft.fft is not in the op table"),
        (lambda x: np.packbits(x), "numpy.packbits is refused on tensors: it is for the bits of whole numbers"),
        (lambda x: x << 2, "left_shift: expected whole numbers, got float64"),
    ],
)
def test_what_is_not_there_says_so(call, message):
    for run in (lambda: call(Tensor(FINITE, requires_grad=True)), lambda: pe.compile(call)(FINITE)):
        with pytest.raises(pe.EngineError, match=message):
            run()


# Products -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [(), (1,), (1, 3), (0, 1, 2, 3, 4)])
def test_products_have_gradients_of_every_order_where_factors_are_zero(zeros):
    x = np.array([0.5, -1.5, 2.0, 3.0, -0.25])
    x[list(zeros)] = 0
    others = np.array([np.prod(np.delete(x, i)) for i in range(5)])
    pairs = np.array([[0 if i == j else np.prod(np.delete(x, [i, j])) for j in range(5)] for i in range(5)])
    np.testing.assert_allclose(pe.grad(np.prod)(x), others, rtol=1e-14)
    np.testing.assert_allclose(pe.compile(pe.grad(np.prod))(x), others, rtol=1e-14)
    np.testing.assert_allclose(pe.hessian(np.prod, x), pairs, rtol=1e-14)
    third = pe.jacobian(lambda x: pe.hessian(np.prod, x), x)
    assert third[0, 1, 2] == x[3] * x[4] and third[0, 0, 1] == 0


# Kinks --------------------------------------------------------------------------------------------------------

FLAT = {
    "relu": lambda x: ops.relu(x),
    "maximum": lambda x: np.maximum(x, 0),
    "maximum, turned": lambda x: np.maximum(0, x),
    "minimum": lambda x: -np.minimum(-x, 0),
    "clip": lambda x: np.clip(x, 0, 3),
    "where": lambda x: np.where(x > 0, x, 0),
    "max": lambda x: np.max(np.stack([x, np.zeros_like(x)])),
}


@pytest.mark.parametrize("flat", FLAT.values(), ids=FLAT)
@pytest.mark.parametrize("power", [0.5, 1.5, 2.5])
def test_where_a_function_is_constant_no_infinite_derivative_passes(flat, power):
    """The derivatives of r ** 1.5 at 0 grow without limit; of relu(x) ** 1.5 at x < 0 all of them are 0."""
    derivative = lambda x: flat(x) ** power  # noqa: E731
    for _ in range(3):
        derivative = pe.grad(derivative)
        assert derivative(-1.0) == pe.compile(derivative)(-1.0) == 0
        assert np.isfinite(derivative(2.0)) and derivative(2.0) != 0
    assert pe.jvp(pe.grad(lambda x: flat(x) ** power), (-1.0,), (1.0,))[1] == 0


def test_clip_with_its_bounds_the_wrong_way_round_is_the_upper_one():
    x = np.array([-2.0, -1.0, 0.0, 1.0, 2.0, np.nan])
    for bounds in ((1, -1), (np.full(6, 1.0), np.full(6, -1.0)), (np.nan, 1), (-1, np.nan)):
        np.testing.assert_array_equal(np.clip(Tensor(x), *bounds).numpy(), np.clip(x, *bounds))
        np.testing.assert_array_equal(pe.compile(lambda x, bounds=bounds: np.clip(x, *bounds))(x), np.clip(x, *bounds))
    gradients = pe.grad(lambda *args: np.sum(np.clip(*args)), (0, 1, 2))(x[:5], np.full(5, 1.0), np.full(5, -1.0))
    np.testing.assert_array_equal(gradients, [[0] * 5, [0] * 5, [1] * 5])


# Operands of other classes -------------------------------------------------------------------------------------


def matrix():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix(FINITE)


@pytest.mark.parametrize(
    "operand", [matrix(), np.ma.masked_less(FINITE, 0), FINITE.view(type("Own", (np.ndarray,), {}))], ids=type
)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize(
    "use",
    [
        lambda a: Tensor(FINITE) * a,
        lambda a: a * Tensor(FINITE, requires_grad=True),
        lambda a: ops.sum(a),
        lambda a: pe.tensor(a),
        lambda a: Tensor(a),
        lambda a: np.concatenate([Tensor(FINITE), a]),
        lambda a: np.where(Tensor(FINITE) > 0, a, 0),
        lambda a: pe.grad(np.sum)(a),
        lambda a: pe.value_and_grad(lambda x: np.sum(x * a))(FINITE),
        lambda a: pe.compile(np.sum)(a),
        lambda a: pe.scan(lambda c, x: (c + np.sum(x), None), 0.0, a),
        lambda a: pe.scan(lambda c, x: (c, a), 0.0, FINITE),
        lambda a: pe.jvp(np.sum, (a,), (FINITE,)),
        lambda a: pe.jvp(np.sum, (FINITE,), (a,)),
        lambda a: pe.jacobian(np.sum, a),
        lambda a: pe.gradcheck(np.sum, a),
        lambda a: (2 * pe.tensor(FINITE, requires_grad=True)).backward(a),
        lambda a: pe.tensor(FINITE).assign(a),
    ],
)
def test_arrays_of_other_classes_are_refused_by_name(operand, use):
    of_its_own = f"{type(operand).__name__} has rules that tensors do not follow; pass "
    with pytest.raises(DTypeError, match=f"{of_its_own}|plain array of this tensor would lose its derivative"):
        use(operand)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (FINITE.astype(object), DTypeError),
        (FINITE * 1j, DTypeError),
        ([[1.0, 2.0], [3.0]], pe.errors.ShapeError),
        (["a"], DTypeError),
        ({"a": 1}, DTypeError),
        (None, DTypeError),
        (FINITE.astype(">f8"), DTypeError),
        (np.zeros(3, [("x", float)]), DTypeError),
        (np.zeros(3, "datetime64[s]"), DTypeError),
    ],
    ids=lambda x: getattr(x, "__name__", str(x).partition("\n")[0]),
)
def test_a_tensor_is_of_numbers(data, error):
    with pytest.raises(error, match=r"number|byte order"):
        pe.tensor(data)


def test_a_memory_map_is_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "x.bin", np.float64, "w+", shape=(3, 4))
    mapped[...] = FINITE
    np.testing.assert_array_equal((Tensor(FINITE) * mapped).numpy(), FINITE * FINITE)
    np.testing.assert_array_equal(pe.grad(lambda x: np.sum(x * x))(mapped), 2 * FINITE)
    np.testing.assert_array_equal(pe.compile(lambda x: x * x)(mapped), FINITE * FINITE)


def test_floats_are_no_indices_axes_or_lengths():
    x = Tensor(FINITE)
    for use in (lambda: x[1.0], lambda: x[0:2.0], lambda: x[:, 0.0:], lambda: x[::1.5], lambda: x[[0.5]],
                lambda: np.sum(x, 1.0), lambda: np.reshape(x, (4.0, 3)), lambda: x.reshape(6.0, 2),
                lambda: np.stack([x, x], 0.0), lambda: np.transpose(x, (1.0, 0)), lambda: np.pad(x, 1.5),
                lambda: np.broadcast_to(x, (2.0, 3, 4)), lambda: np.tensordot(x, x.T, 1.0), lambda: np.argmax(x, 0.0),
                lambda: np.moveaxis(x, 0.0, 1), lambda: np.expand_dims(x, 0.0),
                lambda: np.squeeze(x, 0.0)):  # fmt: skip
        with pytest.raises(DTypeError):
            use()
    with pytest.raises(NotDifferentiableError, match="does not take out=ndarray"):
        np.sum(x, 0, None, np.zeros(4))


# Values that would lose what they are ---------------------------------------------------------------------------


@pytest.mark.parametrize("data", [np.array([1 + 2j]), np.array(["1.5"]), np.array([None]), np.array([1.0], ">f8")])
def test_a_tensor_is_of_real_numbers_of_this_machine_however_it_is_made(data):
    for use in (
        Tensor,
        pe.tensor,
        pe.tensor([1.0]).assign,
        lambda x: (2 * pe.tensor([1.0], requires_grad=True)).backward(x),
    ):
        with pytest.raises(DTypeError):
            use(data)


@pytest.mark.parametrize("dtype", [np.float16, np.longdouble])
def test_a_derivative_is_not_lost_in_a_conversion_to_floats_without_gradients(dtype):
    def converted(convert):
        return lambda x: np.sum(convert(x).astype(np.float64) ** 2)

    x = np.array([1.0, 2.0])
    converts = [
        lambda x: x.astype(dtype),
        lambda x: np.astype(x, dtype),
        lambda x: pe.tensor(x, dtype=dtype),
        lambda x: np.full_like(x, x[0], dtype=dtype),
    ]
    for function in map(converted, converts):
        for derived in (pe.grad(function), pe.compile(pe.grad(function)), lambda x, f=function: pe.jvp(f, (x,), (x,))):
            with pytest.raises(DTypeError, match=f"not {np.dtype(dtype)}; convert stop_gradient"):
                derived(x)
        np.testing.assert_array_equal(function(Tensor(x)), function(x))
    still = converted(lambda x: ops.stop_gradient(x).astype(dtype))
    np.testing.assert_array_equal(pe.grad(lambda x: still(x) + np.sum(x))(x), [1, 1])


def test_numbers_that_are_assigned_keep_their_values():
    whole, truth = pe.tensor([1, 2]), pe.tensor([True, False])
    for leaf, values in ((whole, [1.7, 2.9]), (truth, [2, 0]), (truth, [0.5, 0.0])):
        with pytest.raises(DTypeError, match=r"assign: .* does not fit a tensor of"):
            leaf.assign(values)
    whole.assign([3, 4])
    truth.assign([False, True])
    assert whole.tolist() == [3, 4] and truth.tolist() == [False, True]
    short = pe.tensor(np.zeros(2, np.float32))
    short.assign([0.5, 1])
    assert short.tolist() == [0.5, 1]


def test_a_number_beside_float32_is_not_rounded_where_float64_is_computed():
    one, places, values = (Tensor(np.array(x, np.float32)) for x in (1, [0, 1], [0, 1e6]))
    assert np.geomspace(one, 0.1, 3)[-1].item() == 0.1
    assert np.interp(0.1, places, values).item() == np.interp(0.1, places.numpy(), values.numpy()) == 1e5
    assert np.float_power(one, 0.1).dtype == np.float64


def test_the_rate_of_a_dropout_is_a_number():
    generator = np.random.default_rng(0)
    for rate in (np.array(0.5), pe.tensor(0.5), [0.5], "0.5", True, None, 1, -0.1, np.nan):
        with pytest.raises(ConfigurationError, match="dropout: the rate must be a number"):
            ops.dropout(FINITE, rate, generator)
    assert ops.dropout(FINITE, np.float32(0.5), generator).shape == FINITE.shape
