"""Products: matmul and what can be said with it, and einsum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad.op import (
    Call,
    Op,
    Scratch,
    Shape,
    as_tensors,
    common_dtype,
    define,
    float_only,
    implements,
    multilinear_jvp,
    numbered,
)
from py_engine.ad.ops.arguments import axis_of, refuse, same_dtype, whole, wholes
from py_engine.ad.ops.elementary import WHERE
from py_engine.ad.ops.product_parts import (
    FEW_ROWS,
    bind_product,
    columns_at_once,
    multiply_column_by_row,
    multiply_in_columns,
)
from py_engine.ad.ops.shape import (
    RESHAPE,
    TRANSPOSE,
    broadcast_to,
    concatenate,
    leading,
    moveaxis,
    reshape,
    roll,
    swapaxes,
    transpose,
)
from py_engine.ad.state import STATE
from py_engine.ad.tensor import Array, Operand, Tensor
from py_engine.errors import ConfigurationError, ShapeError

# Matrix products ------------------------------------------------------------------------------------------


def _infer_matmul(a: Tensor, b: Tensor) -> tuple[Shape, Any]:
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(f"shapes {a.shape} and {b.shape} do not fit: {a.shape[-1]} columns, {b.shape[-2]} rows")
    try:
        stacked = a.shape[:-2] if len(a.shape) == len(b.shape) == 2 else np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ShapeError(f"the leading axes of shapes {a.shape} and {b.shape} do not fit") from None
    dtype = common_dtype((a, b))
    return (*stacked, a.shape[-2], b.shape[-1]), dtype if dtype.kind in "iub" else float_only(dtype)


def suits_blas(x: Array, **attrs: Any) -> bool:
    """Whether each matrix has its rows or its columns in one piece; numpy multiplies others without BLAS."""
    rows, columns = x.strides[-2:]
    return (columns == x.itemsize and rows >= x.shape[-1] * x.itemsize) or (
        rows == x.itemsize and columns >= x.shape[-2] * x.itemsize
    )


MANY_COLUMNS, LEAST_PRODUCTS = 128, 3 * 2**18
"""Where a product of few rows by a transposed matrix is computed as its transpose: at least this many columns and
multiplications."""


def _by_transpose(a: Array, b: Array) -> bool:
    """Whether the transpose of the product, of `b` as it lies and of the few rows of `a`, takes less time.

    BLAS copies the right matrix in a way that takes long where it is transposed: products took up to twice as long.
    """
    if a.ndim != 2 or b.ndim != 2 or b.strides[0] != b.itemsize:
        return False
    (rows, summed), columns = a.shape, b.shape[1]
    suits = 1 < rows <= FEW_ROWS and MANY_COLUMNS <= columns <= summed
    return bool(suits and rows * summed * columns >= LEAST_PRODUCTS)


def _bind_matmul(arrays: Sequence[Array], out: Array, scratch: Scratch) -> Sequence[Call]:
    a, b = arrays
    if a.ndim == b.ndim == 2 and a.shape[1] == 1 and out.flags.c_contiguous:
        return [partial(multiply_column_by_row, a, b, out)]
    call = bind_product(a, b, out)
    if call.func is np.matmul and _by_transpose(a, b):
        transposed = scratch(out.shape[::-1], out.dtype)
        return [partial(np.matmul, b.T, a.T, transposed), partial(np.copyto, out, transposed.T)]
    return [call]


def _matmul(a: Array, b: Array, out: Array) -> None:
    if columns_at_once(a, b, out):
        multiply_in_columns(a, b, out)
    elif _by_transpose(a, b):
        out[...] = np.matmul(b.T, a.T).T
    elif a.ndim == b.ndim == 2 and a.shape[1] == 1:
        multiply_column_by_row(a, b, out)
    else:
        np.matmul(a, b, out)


def _gradient_of_right(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if b.op is TRANSPOSE and b.ndim == 2:
        # Transposed twice: the vjp of `b`'s transposition then gives a gradient in C order.
        return _transposed(MATMUL(_transposed(g), a))
    return MATMUL(_transposed(a), g)


def _transposed(x: Tensor) -> Tensor:
    return TRANSPOSE.apply((x,), {"axes": (1, 0)}) if len(x.shape) == 2 else swapaxes(x, -1, -2)


def _batch_matmul(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor:
    a, b = inputs
    if not mapped[1] and b.ndim == 2:  # all the rows there are in one product
        rows = MATMUL(reshape(a, (math.prod(a.shape[:-1]), a.shape[-1])), b)
        return reshape(rows, (*a.shape[:-1], b.shape[-1]))
    if not mapped[0] and a.ndim == 2 and b.ndim == 3 and b.shape[-1] == 1:
        # A matrix times many vectors is a matrix product.
        columns = MATMUL(reshape(b, (count, b.shape[1])), swapaxes(a, 0, 1))
        return reshape(columns, (count, a.shape[0], 1))
    return leading(op, count, mapped, inputs, attrs)  # type: ignore[no-any-return]


def _matmul_sparsity(a: Tensor, b: Tensor) -> list[tuple[Array, Array]]:
    stacked = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    found = numbered((*stacked, a.shape[-2], b.shape[-1]))[..., None]  # rows, columns, terms
    left, right = numbered(a.shape)[..., :, None, :], np.swapaxes(numbered(b.shape), -1, -2)[..., None, :, :]
    return [(found, left), (found, right)]


def _join_products(terms: list[Tensor]) -> list[Tensor]:
    """Return these products with those of few summands as one of all of them.

    The gradient of a weight that a loop reads is a sum of products, one for each step. With few samples each writes a
    whole matrix for little work: one product of all the steps' rows below each other, which are copied, writes it once.
    """
    few = [x for x in terms if _has_few_summands(x)]
    if len(few) < 3:
        return terms
    outer, STATE.scope = STATE.scope, few[0].scope
    left, right = concatenate([x.inputs[0].inputs[0] for x in few]), concatenate([x.inputs[1] for x in few])
    product = MATMUL(_transposed(left), right)
    STATE.scope = outer
    return [*(x for x in terms if not _has_few_summands(x)), product]


def _has_few_summands(product: Tensor) -> bool:
    """Whether it is one of a transposed matrix, and its operands together are smaller than it."""
    turned, other = product.inputs
    return turned.op is TRANSPOSE and turned.ndim == other.ndim == 2 and turned.size + other.size <= product.size


MATMUL: Op = define(
    name="matmul",
    infer=_infer_matmul,
    kernel=_matmul,
    bind=_bind_matmul,
    vjp=(lambda g, y, a, b: MATMUL(g, _transposed(b)), lambda g, y, a, b: _gradient_of_right(g, a, b)),
    jvp=multilinear_jvp("matmul"),
    batch=_batch_matmul,
    sparsity=_matmul_sparsity,
    join=_join_products,
    accepts=suits_blas,
    strided=True,
    flops=lambda a, b: 2 * b.shape[-1] * math.prod((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *a.shape[-2:])),
    product=True,
    doc="matrix product over the last two axes, stacked over the others",
)


@implements(np.matmul)
def matmul(x1: Operand, x2: Operand, /) -> Tensor:
    """Matrix product, by numpy.matmul's rules for vectors and stacks of matrices."""
    a, b = as_tensors((x1, x2))
    if not a.ndim or not b.ndim:
        raise ShapeError(f"matmul: at least one axis is needed, got shapes {a.shape} and {b.shape}")
    if a.ndim == 1:
        product = matmul(reshape(a, (1, -1)), b)
        return reshape(product, product.shape[:-1] if b.ndim == 1 else (*product.shape[:-2], product.shape[-1]))
    if b.ndim == 1:
        column = RESHAPE.apply((b,), {"shape": (*b.shape, 1)})
        product = matmul(a, column)
        return RESHAPE.apply((product,), {"shape": product.shape[:-1]})
    if a.ndim > 2 and b.ndim == 2:
        # One large product in place of a stack of small ones; the gradient of b becomes one as well.
        rows = MATMUL(reshape(a, (math.prod(a.shape[:-1]), a.shape[-1])), b)
        return reshape(rows, (*a.shape[:-1], b.shape[-1]))
    return MATMUL(a, b)


@implements(np.dot)
def dot(a: Operand, b: Operand, out: None = None) -> Tensor:
    """Inner product over the last axis of `a` and the last but one (or only) axis of `b`."""
    refuse("dot", out=(out,))
    a, b = as_tensors((a, b))
    if not a.ndim or not b.ndim:
        return a * b
    return tensordot(a, b, ((a.ndim - 1,), (max(b.ndim - 2, 0),)))


@implements(np.outer)
def outer(a: Operand, b: Operand, out: None = None) -> Tensor:
    """All products of an element of `a` with one of `b`, both seen as vectors."""
    refuse("outer", out=(out,))
    a, b = as_tensors((a, b))
    return reshape(a, (a.size, 1)) * reshape(b, (1, b.size))


@implements(np.kron)
def kron(a: Operand, b: Operand) -> Tensor:
    """The Kronecker product: `a` with each element replaced by its product with the whole of `b`."""
    a, b = as_tensors((a, b))
    ndim = max(a.ndim, b.ndim)
    rows, columns = ((1,) * (ndim - x.ndim) + x.shape for x in (a, b))
    apart = reshape(a, [k for n in rows for k in (n, 1)]) * reshape(b, [k for n in columns for k in (1, n)])
    return reshape(apart, [n * m for n, m in zip(rows, columns, strict=True)])


@implements(np.cross)
def cross(a: Operand, b: Operand, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> Tensor:
    """The cross product of vectors of three elements, which lie along an axis of each operand and of the result."""
    a, b = as_tensors((a, b))
    if axis is not None:
        axisa = axisb = axisc = axis
    if not a.ndim or not b.ndim:
        raise ShapeError(f"cross: at least one axis is needed, got shapes {a.shape} and {b.shape}")
    a = moveaxis(a, axis_of(axisa, a.ndim, "cross", a.shape), -1)
    b = moveaxis(b, axis_of(axisb, b.ndim, "cross", b.shape), -1)
    if a.shape[-1] != 3 or b.shape[-1] != 3:
        raise ShapeError(f"cross: expected vectors of three elements, got shapes {a.shape} and {b.shape}")
    product = roll(a, -1, -1) * roll(b, -2, -1) - roll(a, -2, -1) * roll(b, -1, -1)
    return moveaxis(product, -1, axis_of(axisc, product.ndim, "cross", product.shape))


@implements(np.tensordot)
def tensordot(a: Operand, b: Operand, axes: int | Sequence[int | Sequence[int]] = 2) -> Tensor:
    """Sum of products over axes of `a` paired with axes of `b`, as numpy.tensordot.

    Raises:
        ShapeError: an axis is out of range or named twice, or the lengths do not pair up.
    """
    a, b = as_tensors((a, b))
    over_a, over_b = _paired_axes(axes, a, b)
    if [a.shape[n] for n in over_a] != [b.shape[n] for n in over_b]:
        raise ShapeError(f"tensordot: axes {axes} of shapes {a.shape} and {b.shape} do not pair up")
    free_a = tuple(n for n in range(a.ndim) if n not in over_a)
    free_b = tuple(n for n in range(b.ndim) if n not in over_b)
    summed = math.prod(a.shape[n] for n in over_a)
    rows = math.prod(a.shape[n] for n in free_a)
    columns = math.prod(b.shape[n] for n in free_b)
    left = reshape(transpose(a, free_a + over_a), (rows, summed))
    right = reshape(transpose(b, over_b + free_b), (summed, columns))
    shape = tuple(a.shape[n] for n in free_a) + tuple(b.shape[n] for n in free_b)
    return reshape(MATMUL(left, right), shape)


def _paired_axes(axes: Any, a: Tensor, b: Tensor) -> tuple[Shape, Shape]:
    """Return numpy's forms of the axes to sum over as those of `a` and of `b`, none negative."""
    if isinstance(axes, (str, bytes)) or not isinstance(axes, Iterable):
        n = whole(axes, "tensordot: the number of axes")
        return _each_once(range(-n, 0), a, axes), _each_once(range(n), b, axes)
    pair = [*axes]
    if len(pair) != 2:
        raise ShapeError(f"tensordot: axes are a number, or a pair of those of a and of b, got {axes}")
    of_a, of_b = (wholes(item, "tensordot: each axis") for item in pair)
    if len(of_a) != len(of_b):
        raise ShapeError(f"tensordot: axes {axes} name {len(of_a)} of a and {len(of_b)} of b, which do not pair up")
    return _each_once(of_a, a, axes), _each_once(of_b, b, axes)


def _each_once(numbers: Iterable[int], x: Tensor, axes: Any) -> Shape:
    found = tuple([axis_of(n, x.ndim, "tensordot") for n in numbers])
    if len(set(found)) < len(found):
        raise ShapeError(f"tensordot: axes {axes} name an axis of shape {x.shape} twice")
    return found


# Einstein notation ----------------------------------------------------------------------------------------


def _infer_einsum(*inputs: Tensor, terms: tuple[str, ...], result: str) -> tuple[Shape, Any]:
    lengths: dict[str, int] = {}
    for x, term in zip(inputs, terms, strict=True):
        if len(term) != x.ndim:
            raise ShapeError(f"subscripts {term!r} do not fit an operand of shape {x.shape}")
        for letter, n in zip(term, x.shape, strict=True):
            if lengths.setdefault(letter, n) != n:
                raise ShapeError(f"subscript {letter!r} stands for both {lengths[letter]} and {n}")
    return tuple(lengths[letter] for letter in result), common_dtype(inputs)


def _bind_einsum(
    arrays: Sequence[Array], out: Array, scratch: Scratch, terms: tuple[str, ...], result: str
) -> Sequence[Call]:
    subscripts = ",".join(terms) + "->" + result
    path = np.einsum_path(subscripts, *arrays, optimize="greedy")[0]
    return [partial(np.einsum, subscripts, *arrays, out=out, optimize=path)]


def _pull_einsum(cotangents: Any, needs_grad: Sequence[bool], node: Tensor) -> list[Tensor | None]:
    (g,) = cotangents
    return [_by_operand(i, g, node.inputs, **node.attrs) if needed else None for i, needed in enumerate(needs_grad)]


def _by_operand(i: int, g: Tensor, inputs: tuple[Tensor, ...], terms: tuple[str, ...], result: str) -> Tensor:
    # The gradient of one operand is an einsum of the upstream gradient with the other operands. A letter that
    # occurs twice in the operand (a diagonal) gets a second name, tied to the first by an identity matrix, and what is
    # beside the diagonal is 0, also of an infinite gradient; one that occurs nowhere else was summed over alone, so its
    # gradient repeats along it.
    x, term = inputs[i], terms[i]
    operands = [g, *inputs[:i], *inputs[i + 1 :]]
    operand_terms = [result, *terms[:i], *terms[i + 1 :]]
    spare = iter(letter for letter in _LETTERS if letter not in "".join(terms))
    unique = ""
    on_diagonals = np.ones((1,) * x.ndim, bool)
    for place, (letter, n) in enumerate(zip(term, x.shape, strict=True)):
        if letter in unique:
            twin = next(spare)
            pair = [n if d in (unique.index(letter), place) else 1 for d in range(x.ndim)]
            on_diagonals = on_diagonals & np.eye(n, dtype=bool).reshape(pair)
            operands.append(Tensor(np.eye(n, dtype=x.dtype)))
            operand_terms.append(letter + twin)
            unique += twin
        else:
            unique += letter
    elsewhere = set("".join(operand_terms))
    wanted = "".join(letter for letter in unique if letter in elsewhere)
    gradient = EINSUM(*operands, terms=tuple(operand_terms), result=wanted)
    shape = tuple(n if letter in elsewhere else 1 for letter, n in zip(unique, x.shape, strict=True))
    gradient = reshape(gradient, shape)
    if on_diagonals.size > 1:
        gradient = WHERE(Tensor(on_diagonals), gradient, Tensor(np.zeros((), gradient.dtype)))
    return broadcast_to(gradient, x.shape)


def _batch_einsum(
    op: Op, count: int, mapped: Sequence[bool], inputs: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Tensor | None:
    terms, result = attrs["terms"], attrs["result"]
    each = next((letter for letter in _LETTERS if letter not in "".join(terms)), None)
    if each is None:
        return None
    lettered = tuple([each + term if m else term for term, m in zip(terms, mapped, strict=True)])
    return op(*inputs, terms=lettered, result=each + result)


FEW_OPERANDS = 5
"""Operands of an einsum up to which the best order is searched for."""


def _einsum_flops(*inputs: Tensor, terms: tuple[str, ...], result: str) -> int:
    """Two for each term of a sum, for the contractions in the best order; of many operands, in a good one."""
    lengths = {
        letter: n for x, term in zip(inputs, terms, strict=True) for letter, n in zip(term, x.shape, strict=True)
    }
    arrays = [np.broadcast_to(np.float32(0), x.shape) for x in inputs]
    how = "optimal" if len(inputs) <= FEW_OPERANDS else "greedy"  # the search for the best order grows as n!
    path = np.einsum_path(",".join(terms) + "->" + result, *arrays, optimize=how)[0]
    left, flops = list(terms), 0
    for chosen in path[1:]:
        letters = {letter for i in chosen for letter in left[i]}
        left = [term for i, term in enumerate(left) if i not in chosen]
        flops += 2 * math.prod(lengths[letter] for letter in letters)
        left.append("".join(letters & set("".join(left) + result)))
    return flops


def _einsum_sparsity(*inputs: Tensor, terms: tuple[str, ...], result: str) -> list[tuple[Array, Array]]:
    lengths = {
        letter: n for x, term in zip(inputs, terms, strict=True) for letter, n in zip(term, x.shape, strict=True)
    }
    found = numbered(tuple(lengths[letter] for letter in result))
    pairs = []
    for x, term in zip(inputs, terms, strict=True):
        # The letters of both: those of the result, then those of the term alone, which are summed over.
        letters = result + "".join(sorted(set(term) - set(result)))
        places = np.zeros((1,) * len(letters), np.intp)
        for axis, (letter, stride) in enumerate(zip(term, _strides(x.shape), strict=True)):
            shape = [1] * len(letters)
            shape[letters.index(letter)] = x.shape[axis]
            places = places + (np.arange(x.shape[axis]) * stride).reshape(shape)
        pairs.append((found.reshape(*found.shape, *[1] * (len(letters) - len(result))), places))
    return pairs


def _strides(shape: Shape) -> list[int]:
    """Return for each axis of an array in C order how many elements apart its neighbours are."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


EINSUM: Op = define(
    name="einsum",
    infer=_infer_einsum,
    bind=_bind_einsum,
    vjp=_pull_einsum,
    jvp=multilinear_jvp("einsum"),
    flops=_einsum_flops,
    product=True,
    batch=_batch_einsum,
    sparsity=_einsum_sparsity,
    doc="sum of products in Einstein notation",
)

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@implements(np.einsum)
def einsum(subscripts: str, *operands: Operand, out: None = None, optimize: Any = False, **kwargs: Any) -> Tensor:
    """Sum of products in Einstein notation, as numpy.einsum; the contraction order is always optimised.

    In place of subscripts, each operand may be followed by a list of its axes' numbers, and all by that of the result.
    """
    dtype = kwargs.pop("dtype", None)
    refuse("einsum", out=(out,), **{k: (v, {"order": "K", "casting": "safe"}.get(k)) for k, v in kwargs.items()})
    if not isinstance(subscripts, str):
        subscripts, operands = _lettered((subscripts, *operands))
    if not isinstance(subscripts, str):
        raise ConfigurationError(
            f"einsum: expected subscripts such as 'ij,jk->ik' first, got {type(subscripts).__name__}"
        )
    inputs = as_tensors(operands)
    if inputs:
        same_dtype("einsum", dtype, inputs[0])
    terms, result = _parse(subscripts.replace(" ", ""), inputs, bool(optimize))
    stretched = {
        letter
        for x, term in zip(inputs, terms, strict=True)
        for letter, n in zip(term, x.shape, strict=False)
        if n != 1
    }
    # An axis of length one broadcasts against a longer one of the same letter: it is dropped.
    flat = [_without_ones(x, term, stretched) for x, term in zip(inputs, terms, strict=True)]
    return EINSUM(*(x for x, _ in flat), terms=tuple(term for _, term in flat), result=result)


def _lettered(given: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return subscripts and operands of einsum's other form: operands, each followed by a list of its axes' numbers."""
    lists = given[1::2] if len(given) % 2 == 0 else (*given[1::2], given[-1])
    lists = tuple([x.tolist() if isinstance(x, np.ndarray) and x.dtype.kind in "iu" else x for x in lists])
    if len(given) < 2 or not all(isinstance(numbers, (list, tuple)) for numbers in lists):
        return None, ()
    letters = sorted(_LETTERS)  # in the order of their numbers, that of an implicit result
    terms = []
    for numbers in lists:
        if not all(n is Ellipsis or (isinstance(n, (int, np.integer)) and 0 <= n < len(letters)) for n in numbers):
            raise ShapeError(f"einsum: a list of axes holds numbers from 0 to {len(letters) - 1}, got {numbers}")
        terms.append("".join("..." if n is Ellipsis else letters[n] for n in numbers))
    if len(given) % 2 == 0:
        return ",".join(terms), given[::2]
    return ",".join(terms[:-1]) + "->" + terms[-1], given[:-1:2]


def _without_ones(x: Tensor, term: str, stretched: set[str]) -> tuple[Tensor, str]:
    if len(term) != x.ndim:
        return x, term  # an error, which the op explains
    long = {letter for n, letter in zip(x.shape, term, strict=True) if n != 1}
    kept = [(n, letter) for n, letter in zip(x.shape, term, strict=True) if letter in long or letter not in stretched]
    return reshape(x, tuple(n for n, _ in kept)), "".join(letter for _, letter in kept)


def _parse(subscripts: str, inputs: Sequence[Tensor], optimize: bool) -> tuple[tuple[str, ...], str]:
    """Return the operands' and the result's letters, with the implicit forms and `...` spelled out."""
    left, arrow, result = subscripts.partition("->")
    terms = left.split(",")
    if len(terms) != len(inputs):
        raise ShapeError(f"einsum: {subscripts!r} names {len(terms)} operands, got {len(inputs)}")
    used = set("".join([term.replace("...", "", 1) for term in (*terms, result)]))
    if not used <= set(_LETTERS):
        raise ShapeError(f"einsum: subscripts must be letters, and `...` at most once in a term, got {subscripts!r}")
    spare = [letter for letter in _LETTERS if letter not in used]
    dots = [
        x.ndim - len(term.replace("...", "")) if "..." in term else 0 for x, term in zip(inputs, terms, strict=True)
    ]
    longest = max(dots, default=0)
    if min(dots, default=0) < 0:
        raise ShapeError(f"einsum: {subscripts!r} has more subscripts than an operand has axes")
    if arrow and longest and "..." not in result and not optimize:  # numpy sums over them where it optimises
        raise ShapeError(f"einsum: the result of {subscripts!r} must have the axes of `...`, or optimize=True be given")
    extra = "".join(spare[:longest])
    terms = [term.replace("...", extra[longest - n :]) for term, n in zip(terms, dots, strict=True)]
    if arrow:
        result = result.replace("...", extra)
    else:
        letters = "".join(terms)
        result = extra + "".join(sorted(c for c in set(letters) - set(extra) if letters.count(c) == 1))
    if len(set(result)) < len(result) or not set(result) <= set("".join(terms)):
        raise ShapeError(f"einsum: the result {result!r} must use letters of {left!r}, each once")
    return tuple(terms), result
