"""Sparse Jacobians and Hessians: patterns, colourings, and the few products that are enough for a whole matrix.

The pattern is found by propagating, through the program of the function, which elements of the argument each element
of a result may depend on: by the ops' records (`Op.sparsity`), never by values, so that no entry is missed wherever the
derivatives happen to be zero. Columns without a row in common have one colour and are computed as one product with the
sum of their unit vectors; so are rows, in reverse mode. Hessians are symmetric: an entry may be read in its row or in
its column, so that a star colouring, of fewer colours, is enough.

scipy's sparse matrices are the results.

References:
    A. Gebremedhin, F. Manne, A. Pothen: What color is your Jacobian? SIAM Review 47 (2005).
    A. Gebremedhin, A. Tarafdar, F. Manne, A. Pothen: New acyclic and star coloring algorithms with application to
    computing Hessians. SIAM Journal on Scientific Computing 29 (2007).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from py_engine.ad.containers import LEAF
from py_engine.ad.jacobian import AT_ONCE, derivative_program
from py_engine.ad.op import Equation, described, numbered
from py_engine.ad.ops.scipy_functions import installed
from py_engine.ad.ops.shape import along_axes, for_each
from py_engine.ad.program import Program, nested_trace, traced
from py_engine.ad.state import entering, inside_transform, restoring
from py_engine.ad.tensor import Array, Tensor, plain_array
from py_engine.ad.transforms import Function, Linearized, check_callable, linearize, named_grad, results
from py_engine.ad.vmap import batched
from py_engine.errors import ConfigurationError, ShapeError

MOST = 2**26
"""Dependences of one variable's elements, at most: more of them are no sparse matrix, and half a gigabyte of memory."""


@restoring
def sparsity(function: Function, x: Any) -> Any:
    """Return which derivatives of a function of one array may be other than zero, wherever it is differentiated.

    The function is traced, as by `compile`: it cannot branch on values. Elementwise ops, indexing with constant
    indices, changes of shape, reductions and products are followed element by element (of a product all factors count,
    be they zero or not); any other op is taken to depend on all elements of its inputs. What a function captures counts
    as it is now. So the pattern may have entries too many, and never one too few.

    Args:
        function: takes an array and returns one.
        x: an array of the shape and dtype of its argument; its values don't matter.

    Returns:
        A matrix (elements of the result, elements of `x`) of truth values, both in C order, as scipy.sparse.csr_array.

    Raises:
        ConfigurationError: scipy is not installed, or the pattern has too many entries to be sparse.
        ShapeError: `x` or the result is not one array.
        TraceError: the function branches on a value.

    Example:
        >>> sparsity(lambda x: x[1:] * x[:-1], np.ones(4)).toarray().astype(int)
        array([[1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
    """
    check_callable("sparsity", function)
    sparse = installed("sparse", "sparsity")
    rows, columns, shape = _found("sparsity", function, _one_array("sparsity", x))
    return sparse.csr_array((np.ones(len(rows), np.bool_), (rows, columns)), shape)


@restoring
def sparse_jacobian(
    function: Function, x: Any, *, pattern: Any = None, mode: str | None = None, chunk: int | None = None
) -> Any:
    """Return all derivatives of a function of one array as a sparse matrix, by as few products as its pattern allows.

    Args:
        function: takes an array and returns one.
        x: where it is differentiated.
        pattern: where derivatives may be other than zero: a matrix (elements of the result, elements of `x`), of
            scipy.sparse or an array, such as `sparsity` gives; what is not zero counts. None finds it, in every call:
            give it where the function is differentiated often, or branches on values. It is compared with the function
            by one more product, with a random vector.
        mode: "forward" computes columns together (a product for each colour), "reverse" rows; None takes what has
            fewer colours, and forward where they are equal.
        chunk: how many products at once; None: as many as fit into the cache.

    Returns:
        A scipy.sparse.csr_array (elements of the result, elements of `x`), both in C order, of the dtype of the result,
        that stores all entries of the pattern.

    Raises:
        ConfigurationError: the pattern misses an entry, or there are too many; there is no such mode; the chunk is not
            positive; scipy is not installed; or it is called inside another transform, where `jacobian` works.
        ShapeError: the pattern is of another shape, or `x` or the result is not one array.
        NotDifferentiableError: `x` or the result is not of float32 or float64.

    Example:
        >>> sparse_jacobian(lambda x: x[1:] * x[:-1], np.array([1.0, 2.0, 3.0])).toarray()
        array([[2., 1., 0.],
               [0., 3., 2.]])
    """
    name = "sparse_jacobian"
    check_callable(name, function)
    if mode not in (None, "forward", "reverse"):
        raise ConfigurationError(f"{name}: mode must be 'forward', 'reverse' or None, got {mode!r}")
    sparse, x = installed("sparse", name), _one_array(name, x)
    call, shape = _linearized(name, function, x)
    rows, columns = _given(name, pattern, shape, sparse) if pattern is not None else _found(name, function, x)[:2]
    colors = None if mode == "reverse" else column_colors(rows, columns, shape)
    if mode != "forward":
        of_rows = column_colors(columns, rows, shape[::-1])
        if colors is None or _count(of_rows) < _count(colors):
            products, probe, v = _products(call, False, of_rows, chunk, name)
            values = products[of_rows[rows], columns]
            return _checked(name, call, sparse, values, (rows, columns), probe, v, transposed=True)
    assert colors is not None
    products, probe, v = _products(call, True, colors, chunk, name)
    return _checked(name, call, sparse, products[colors[columns], rows], (rows, columns), probe, v)


@restoring
def sparse_hessian(function: Function, x: Any, *, pattern: Any = None, chunk: int | None = None) -> Any:
    """Return all second derivatives of a scalar function of one array as a sparse matrix, forward over reverse.

    Args:
        function: takes an array and returns a scalar.
        x: where it is differentiated.
        pattern: see `sparse_jacobian`; one triangle is enough. None finds it, in every call.
        chunk: how many products at once, see `sparse_jacobian`.

    Returns:
        A scipy.sparse.csr_array (elements of `x`, elements of `x`), in C order, symmetric, that stores all entries of
        the pattern.

    Raises:
        ShapeError: the result is not a scalar, `x` is not one array, or the pattern is of another shape.
        ConfigurationError, NotDifferentiableError: see `sparse_jacobian`.

    Example:
        >>> sparse_hessian(lambda x: np.sum(x[1:] * x[:-1] ** 2), np.array([1.0, 2.0, 3.0])).toarray()
        array([[4., 2., 0.],
               [2., 6., 4.],
               [0., 4., 0.]])
    """
    name = "sparse_hessian"
    check_callable(name, function)
    sparse, x = installed("sparse", name), _one_array(name, x)
    gradient = named_grad(name, function)
    call, shape = _linearized(name, gradient, x)
    rows, columns = _given(name, pattern, shape, sparse) if pattern is not None else _found(name, gradient, x)[:2]
    rows, columns = _entries(np.concatenate([rows, columns]), np.concatenate([columns, rows]), shape)  # symmetric
    colors = star_colors(rows, columns, shape[0])
    products, probe, v = _products(call, True, colors, chunk, name)
    upper = rows <= columns
    i, j = rows[upper], columns[upper]
    # Where row i has no other entry in a column of j's colour it is read there, else in row j.
    alone = np.bincount(rows * (_count(colors) + 1) + colors[columns], minlength=1) == 1
    there = alone[i * (_count(colors) + 1) + colors[j]]
    values = np.where(there, products[colors[j], i], products[colors[i], j])
    below = i < j
    places = np.concatenate([i, j[below]]), np.concatenate([j, i[below]])
    return _checked(name, call, sparse, np.concatenate([values, values[below]]), places, probe, v)


# Arguments and results ------------------------------------------------------------------------------------


def _one_array(name: str, x: Any) -> Array:
    if inside_transform() or (isinstance(x, Tensor) and (x.data is None or x.requires_grad)):
        raise _no_tensor(name, "inside another transform or a compiled function")
    if isinstance(x, (dict, tuple)):
        raise ShapeError(f"{name}: expected one array, got a {type(x).__name__}; join arrays with np.concatenate()")
    return x.numpy() if isinstance(x, Tensor) else plain_array(x)


def _no_tensor(name: str, where: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name}: a sparse matrix is no tensor, so that it cannot be computed {where}; jacobian() and hessian() can"
    )


def _linearized(name: str, function: Function, x: Array) -> tuple[Linearized, tuple[int, int]]:
    call = linearize(name, function, (x,), (0,))
    if call.grad_enabled:
        raise _no_tensor(name, "of a function that captures a tensor which requires a gradient (but under no_grad())")
    if call.structure is not LEAF:
        raise ShapeError(f"{name}: the function must return one array, got {call.structure}")
    return call, (call.outputs[0].size, call.variables[0].size)


def _given(name: str, pattern: Any, shape: tuple[int, int], sparse: Any) -> tuple[Array, Array]:
    matrix = sparse.coo_array(pattern if sparse.issparse(pattern) else plain_array(pattern))
    if matrix.shape != shape:
        raise ShapeError(f"{name}: expected a pattern of shape {shape}, got {matrix.shape}")
    there = matrix.data != 0
    return _entries(matrix.row[there], matrix.col[there], shape)


def _entries(rows: Array, columns: Array, shape: tuple[int, int]) -> tuple[Array, Array]:
    """Return the places row by row, each once."""
    return np.divmod(np.unique(rows.astype(np.int64) * max(shape[1], 1) + columns), max(shape[1], 1))


def _products(
    call: Linearized, forward: bool, colors: Array, chunk: int | None, name: str
) -> tuple[Array, Array, Array]:
    """Return the products with the sum of the unit vectors of each color, and one with a random vector, and that."""
    if chunk is not None and not (isinstance(chunk, (int, np.integer)) and chunk >= 1):
        raise ConfigurationError(f"{name}: chunk must be a positive integer or None, got {chunk!r}")
    given, found = (call.variables[0], call.outputs[0]) if forward else (call.outputs[0], call.variables[0])
    count = _count(colors)
    seeds = np.zeros((count + 1, given.size), given.dtype)
    colored = np.flatnonzero(colors >= 0)
    seeds[colors[colored], colored] = 1
    seeds[-1] = np.random.default_rng(0).uniform(0.5, 1.5, given.size)  # the same in every call
    at_once = chunk or max(1, AT_ONCE // max(given.size, found.size, 1))
    with call.derivative():
        program = derivative_program(call, forward, [given])
        products = np.concatenate(
            [_applied(program, seeds[start : start + at_once]) for start in range(0, len(seeds), at_once)]
        )
    return products[:-1], products[-1], seeds[-1]


def _applied(program: Program, seeds: Array) -> Array:
    count, (given,), (found,) = len(seeds), program.inputs, program.outputs
    (y,), (mapped,) = batched(program, count, [Tensor(seeds.reshape(count, *given.shape))], [True])
    return (y if mapped else for_each(y, count)).numpy().reshape(count, found.size)


def _checked(
    name: str,
    call: Linearized,
    sparse: Any,
    values: Array,
    places: tuple[Array, Array],
    probe: Array,
    v: Array,
    transposed: bool = False,
) -> Any:
    """Return the matrix, if its product with `v` is what the function itself says."""
    (x,), (y,) = call.variables, call.outputs
    matrix = sparse.csr_array((values.astype(y.dtype, copy=False), places), (y.size, x.size))
    product, scale = (matrix.T @ v, abs(matrix).T @ v) if transposed else (matrix @ v, abs(matrix) @ v)
    eps = max(float(np.finfo(z.dtype).eps) for z in (x, y))
    with np.errstate(invalid="ignore"):  # where derivatives are infinite there is nothing to compare
        largest = np.max(scale, initial=0.0, where=np.isfinite(scale))
        wrong = np.isfinite(probe) & np.isfinite(product)
        wrong &= np.abs(probe - product) > math.sqrt(eps) * scale + 100 * eps * largest
    if wrong.any():
        what = "column" if transposed else "row"
        raise ConfigurationError(
            f"{name}: the pattern misses an entry that is not zero, in {what} {int(np.argmax(wrong))} (of "
            f"{int(wrong.sum())} that are wrong); sparsity() finds a pattern, and what it traced may have changed since"
        )
    return matrix


# Colourings -----------------------------------------------------------------------------------------------
#
# Sets of colours are the bits of an integer.


_KNOWN: dict[bytes, Array] = {}
"""The last colourings, by a digest of the pattern, which may be large."""

_MOST_KNOWN = 16


def _remembered(color: Callable[[Array, Array, Any], Array], rows: Array, columns: Array, size: Any) -> Array:
    """Return the colours of a pattern, found now or before."""
    digest = blake2b(repr((color.__name__, rows.dtype.str, columns.dtype.str, size)).encode(), digest_size=16)
    for places in (rows, columns):
        digest.update(np.ascontiguousarray(places).data)
    key = digest.digest()
    found = _KNOWN.get(key)
    if found is None:
        found = color(rows, columns, size)
        while len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)), None)
        _KNOWN[key] = found
    return found


def _count(colors: Array) -> int:
    return int(colors.max(initial=-1)) + 1


def column_colors(rows: Array, columns: Array, shape: tuple[int, int]) -> Array:
    """Return a colour for each column of a pattern, so that columns of one colour have no row in common.

    Greedy, columns with more entries first (a distance-2 colouring); -1 for a column without entries.
    """
    return _remembered(_column_colors, rows, columns, shape)


def _column_colors(rows: Array, columns: Array, shape: tuple[int, int]) -> Array:
    members, counts = _lists(columns, rows, shape[1])
    colors = np.full(shape[1], -1)
    used = [0] * shape[0]
    for j in _largest_first(counts):
        mine = members[j]
        taken = 0
        for i in mine:
            taken |= used[i]
        color = _lowest_free(taken)
        for i in mine:
            used[i] |= color
        if mine:
            colors[j] = color.bit_length() - 1
    colors.flags.writeable = False
    return colors


def star_colors(rows: Array, columns: Array, count: int) -> Array:
    """Return a colour for each of `count` rows (and columns) of a symmetric pattern: a star colouring.

    Neighbours differ, and no path of four has two colours only: of the two places of an entry, one is in a row without
    another entry of that colour. Greedy, rows with more entries first.
    """
    return _remembered(_star_colors, rows, columns, count)


def _star_colors(rows: Array, columns: Array, count: int) -> Array:
    beside = rows != columns
    neighbours, counts = _lists(rows[beside], columns[beside], count)
    colors = [-1] * count
    around = [0] * count  # the colours of a vertex's neighbours
    hubs = [0] * count  # those of its neighbours that have another neighbour of the vertex's own colour
    by_color: list[dict[int, int]] = [{} for _ in range(count)]  # the first neighbour of each colour
    for v in _largest_first(counts):
        colored = [w for w in neighbours[v] if colors[w] >= 0]
        taken, own = 0, by_color[v]
        for w in colored:
            first = own.setdefault(colors[w], w)
            # v would be the end of a path v, w, hub, other; or, between two of one colour, its second vertex.
            taken |= 1 << colors[w] | (hubs[w] if first == w else around[w] | around[first])
        bit = _lowest_free(taken)
        color = colors[v] = bit.bit_length() - 1
        for w in colored:
            around[w] |= bit
            around[v] |= 1 << colors[w]
            first = by_color[w].setdefault(color, v)
            if first != v:  # w is a hub of v and of the first
                hubs[v] |= 1 << colors[w]
                hubs[first] |= 1 << colors[w]
            if own[colors[w]] != w:  # v is one of w and of the first of its colour
                hubs[w] |= bit
                hubs[own[colors[w]]] |= bit
    found = np.array(colors, np.intp)
    found.flags.writeable = False
    return found


def _lists(keys: Array, values: Array, count: int) -> tuple[list[list[int]], Array]:
    """Return the values of each key from 0 to count - 1, and how many they are."""
    counts = np.bincount(keys, minlength=count)
    ordered = values[np.argsort(keys, kind="stable")]
    return [part.tolist() for part in np.split(ordered, np.cumsum(counts)[:-1])] if count else [], counts


def _largest_first(counts: Array) -> list[int]:
    found: list[int] = np.argsort(-counts, kind="stable").tolist()
    return found


def _lowest_free(taken: int) -> int:
    return ~taken & (taken + 1)


# Patterns -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Dependence:
    """Which elements of the argument each element of a variable depends on: those of element i are
    `columns[starts[i] : starts[i + 1]]`, ascending."""

    starts: Array
    columns: Array

    @classmethod
    def of(cls, keys: Array, size: int, width: int) -> _Dependence:
        """From `element * width + column` of all pairs."""
        if not (keys[1:] > keys[:-1]).all():
            keys = np.unique(keys)
        rows, columns = np.divmod(keys, width)
        return cls(np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=size))]), columns)


def _found(name: str, function: Function, x: Array) -> tuple[Array, Array, tuple[int, int]]:
    """Return the rows and columns of all entries of the pattern, row by row, and its shape."""
    symbol = Tensor.symbol(x.shape, x.dtype)
    with entering(updates=[]), nested_trace() as nodes:
        outputs, structure = results(name, function(symbol))
    if structure is not LEAF:
        raise ShapeError(f"{name}: the function must return one array, got {structure}")
    (y,) = outputs
    shape = (y.size, x.size)
    found = _propagated(name, traced(nodes, [symbol], [y], checks=False)) if y.size and x.size else None
    if found is None:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), shape
    return np.repeat(np.arange(y.size), np.diff(found.starts)), found.columns, shape


def _propagated(name: str, program: Program) -> _Dependence | None:
    (x,), (y,) = program.inputs, program.outputs
    known: dict[int, _Dependence] = {id(x): _Dependence(np.arange(x.size + 1), np.arange(x.size))}
    for equation in program.equations:
        given = [known.get(id(a)) for a in equation.inputs]
        if equation.op.constant or not any(given):
            continue
        for output in equation.outputs:
            made = _of_equation(name, equation, output, given, x.size)
            if made is not None:
                known[id(output)] = made
    return known.get(id(y))


def _of_equation(
    name: str, equation: Equation, output: Tensor, given: Sequence[_Dependence | None], width: int
) -> _Dependence | None:
    depending = {id(d): (d, a) for d, a in zip(given, equation.inputs, strict=True) if d is not None}
    if equation.op.elementwise and len(depending) == 1:
        ((only, a),) = depending.values()
        if a.shape == output.shape:
            return only
    pairs = _pairs(equation)
    if pairs is None:
        columns = np.unique(np.concatenate([d.columns for d, _ in depending.values()]))
        _check_count(name, equation, len(columns) * output.size)
        return _Dependence(np.arange(output.size + 1) * len(columns), np.tile(columns, output.size))
    keys = []
    for dependence, pair in zip(given, pairs, strict=True):
        if dependence is None or pair is None:
            continue
        _check_count(name, equation, math.prod(np.broadcast_shapes(pair[0].shape, pair[1].shape)))
        made, read = (positions.ravel() for positions in np.broadcast_arrays(*pair))
        starts = dependence.starts[read]
        counts = dependence.starts[read + 1] - starts
        total = int(counts.sum())
        _check_count(name, equation, total)
        at = np.arange(total) + np.repeat(starts - np.cumsum(counts) + counts, counts)
        keys.append(np.repeat(made, counts) * width + dependence.columns[at])
    return _Dependence.of(np.concatenate(keys), output.size, width) if keys else None


def _check_count(name: str, equation: Equation, count: int) -> None:
    if count > MOST:
        raise ConfigurationError(
            f"{name}: by the op {described(equation)}, {count:,} derivatives may be other than zero, more than a "
            "sparse matrix is good for; give the pattern, or use jacobian() or hessian()"
        )


def _pairs(equation: Equation) -> Sequence[tuple[Array, Array] | None] | None:
    """Return the op's `sparsity`, from its record."""
    op, inputs, attrs = equation.op, equation.inputs, equation.attrs
    if op.sparsity is not None:
        return op.sparsity(*inputs, **attrs)
    if op.several:
        return None
    shape = equation.output.shape
    if op.view is not None:
        (x,) = inputs
        return [(numbered(shape), op.view(numbered(x.shape), **attrs))]
    if op.elementwise:
        return [(numbered(shape), np.broadcast_to(numbered(x.shape), shape)) for x in inputs]
    if op.batch is along_axes:
        axes = attrs["axes" if "axes" in attrs else "axis"]
        return _along((axes,) if isinstance(axes, int) else tuple(axes), shape, inputs)
    return None


def _along(axes: Sequence[int], shape: Sequence[int], inputs: Sequence[Tensor]) -> list[tuple[Array, Array]] | None:
    """Each element of the result depends on all that differ from it along these axes alone."""
    pairs = []
    for x in inputs:
        behind = [axis % x.ndim for axis in axes]
        others = [axis for axis in range(x.ndim) if axis not in behind]
        lengths = tuple(x.shape[axis] for axis in others)
        read = numbered(x.shape).transpose([*others, *behind])
        made = numbered(tuple(shape))
        if made.ndim == x.ndim:
            made = made.transpose([*others, *behind])
        if made.shape[: len(others)] != lengths:
            return None
        within = math.prod(made.shape[len(others) :]), math.prod(read.shape[len(others) :])
        pairs.append((made.reshape(*lengths, within[0], 1), read.reshape(*lengths, 1, within[1])))
    return pairs
