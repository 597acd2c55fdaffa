"""Einstein notation: random subscripts, with values from numpy and gradients from PyTorch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.errors import ConfigurationError, DTypeError, ShapeError

LETTERS = "abcd"


@st.composite
def products(draw):
    """Subscripts with repeated letters, an ellipsis, spaces and both forms of result, and operand shapes for them."""
    lengths = {letter: draw(st.integers(0, 3)) for letter in LETTERS}
    dots = draw(st.lists(st.integers(1, 3), max_size=2))  # the lengths that an ellipsis stands for
    terms, shapes = [], []
    for _ in range(draw(st.integers(1, 3))):
        letters = draw(st.text(LETTERS, max_size=3))
        shape = [lengths[letter] for letter in letters]
        at = draw(st.none() | st.integers(0, len(letters)))
        if at is not None:
            kept = dots[draw(st.integers(0, len(dots))) :]
            shape[at:at] = [1 if draw(st.booleans()) else n for n in kept]
            letters = letters[:at] + "..." + letters[at:]
        terms.append(letters)
        shapes.append(tuple(shape))
    subscripts = draw(st.sampled_from([",", ", "])).join(terms)
    if draw(st.booleans()):
        used = sorted(set("".join(terms)) - {"."})
        result = "".join(draw(st.permutations(draw(st.lists(st.sampled_from(used), unique=True)) if used else [])))
        if "..." in subscripts:
            at = draw(st.integers(0, len(result)))
            result = result[:at] + "..." + result[at:]
        subscripts += draw(st.sampled_from(["->", " -> "])) + result
    return subscripts, shapes


@given(products(), st.integers(0, 2**32 - 1))
def test_any_subscripts(torch, case, seed):
    subscripts, shapes = case
    note(f"{subscripts!r} of {shapes}")
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    expected = np.einsum(subscripts, *arrays)
    weights = rng.standard_normal(expected.shape)

    variables = [torch.tensor(a, requires_grad=True) for a in arrays]
    torch.einsum(subscripts, *variables).backward(torch.tensor(weights))

    def weighted(*operands):
        return np.sum(ops.einsum(subscripts, *operands) * weights)

    np.testing.assert_allclose(ops.einsum(subscripts, *arrays).numpy(), expected, rtol=1e-10, atol=1e-12)
    gradient = pe.grad(weighted, range(len(arrays)))
    for found in (gradient(*arrays), pe.compile(gradient)(*arrays)):
        for ours, theirs in zip(found, variables, strict=True):
            np.testing.assert_allclose(ours, theirs.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("subscripts", "shapes"),
    [
        ("ii", [(3, 3)]),
        ("ij,ij,ij->", [(2, 3)] * 3),
        ("...a,a...b->...b", [(2, 3), (3, 2, 4)]),
        ("ab,bc,cd", [(2, 2)] * 3),
    ],
)
def test_the_gradient_can_be_differentiated(subscripts, shapes, rng):
    arrays = [rng.standard_normal(shape) for shape in shapes]
    pe.gradcheck(
        lambda *x: pe.grad(lambda *x: np.sum(ops.einsum(subscripts, *x) ** 3), 0)(*x),
        *arrays,
    )


def test_letters_of_both_cases_are_sorted_as_numpy_sorts_them(rng):
    a, b = rng.standard_normal((2, 3)), rng.standard_normal((3, 4))
    np.testing.assert_allclose(ops.einsum("bA,AB", a, b).numpy(), np.einsum("bA,AB", a, b))


@pytest.mark.parametrize(
    ("subscripts", "shapes", "message"),
    [
        ("ij,jk", [(2, 3)], "names 2 operands, got 1"),
        ("ij,jk", [(2, 3), (2, 3)], "subscript 'j' stands for both 3 and 2"),
        ("ii", [(1, 3)], "subscript 'i' stands for both 1 and 3"),
        ("ij", [(2,)], r"subscripts 'ij' do not fit an operand of shape \(2,\)"),
        ("i...j", [(2,)], "more subscripts than an operand has axes"),
        ("ij->ijk", [(2, 3)], "must use letters of 'ij', each once"),
        ("ij->ii", [(2, 3)], "must use letters of 'ij', each once"),
        ("i1", [(2, 3)], "subscripts must be letters"),
        (".i->i", [(2, 3)], "at most once in a term"),
        ("..i", [(2, 3, 4)], "at most once in a term"),
        ("....i", [(2, 3)], "at most once in a term"),
        ("...i...", [(2,)], "at most once in a term"),
        ("...i->.i", [(2,)], "at most once in a term"),
        ("i->j->i", [(2,)], "subscripts must be letters"),
        ("i-j", [(2, 3)], "subscripts must be letters"),
    ],
)
def test_subscripts_that_do_not_fit(subscripts, shapes, message):
    with pytest.raises(ShapeError, match=message):
        ops.einsum(subscripts, *(np.zeros(shape) for shape in shapes))


@pytest.mark.parametrize("subscripts", ["...i->i", "i...->", "...->"])
def test_axes_of_an_ellipsis_are_left_out_of_the_result_only_where_numpy_sums_over_them(subscripts):
    x = np.arange(6.0).reshape(2, 3)
    with pytest.raises(ValueError):
        np.einsum(subscripts, x)
    with pytest.raises(ShapeError, match=r"must have the axes of `...`, or optimize=True be given"):
        np.einsum(subscripts, Tensor(x))
    found = np.einsum(subscripts, Tensor(x), optimize=True).numpy()
    np.testing.assert_array_equal(found, np.einsum(subscripts, x, optimize=True))
    np.testing.assert_array_equal(np.einsum("...i->i", Tensor(x[0])).numpy(), x[0])  # where it stands for none


def test_what_is_neither_subscripts_nor_lists_is_refused():
    x = pe.tensor(np.zeros((2, 2)))
    with pytest.raises(ConfigurationError, match="einsum: expected subscripts such as 'ij,jk->ik' first"):
        ops.einsum(x, x)


def test_operands_of_different_dtypes_are_refused():
    with pytest.raises(DTypeError, match="einsum: operands of float32 and float64"):
        ops.einsum("i,i", np.zeros(2, np.float32), np.zeros(2))


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: np.einsum(a, [0, 1], b, [1, 2], [2, 0]),
        lambda a, b: np.einsum(a, [0, 1], b, [1, 2]),
        lambda a, b: np.einsum(a, [Ellipsis, 1], b, [1, 2], [Ellipsis, 2]),
        lambda a, b: np.einsum(b, [3, 3], [3]),
        lambda a, b: np.einsum(a, [0, 26]),
        lambda a, b: np.einsum(a, [25, 26], b, [26, 51]),
        lambda a, b: np.einsum(a, [27, 3]),
    ],
)
def test_lists_of_axes_in_place_of_subscripts(call):
    a, b = np.arange(6.0).reshape(2, 3), np.arange(9.0).reshape(3, 3)
    np.testing.assert_array_equal(call(Tensor(a), Tensor(b)).numpy(), call(a, b))
    np.testing.assert_array_equal(pe.compile(call)(a, b), call(a, b))
    with pytest.raises(ShapeError, match="a list of axes holds numbers from 0 to 51"):
        np.einsum(Tensor(a), [0, -1])


def test_lists_of_tensors_are_arrays_to_ops():
    assert pe.grad(lambda x: ops.mean([x, x + 2]))(1.0) == 1
    np.testing.assert_array_equal(pe.grad(lambda x: ops.sum(ops.mul([[x, 2.0], [1.0, x]], [3.0, 4.0])))(1.5), 7)


def test_many_operands_are_compiled_at_once():
    matrices = np.random.default_rng(0).normal(size=(16, 2, 2))
    letters = "abcdefghijklmnopq"
    subscripts = ",".join(map("".join, pairwise(letters))) + "->aq"

    def chain(*factors):
        return np.einsum(subscripts, *factors)

    np.testing.assert_allclose(pe.compile(chain)(*matrices), np.linalg.multi_dot(matrices))
