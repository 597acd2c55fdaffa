"""What makes matrix products fast: BLAS's buffers in memory from the first one on, and threads that share large ones.

OpenBLAS packs the operands of a product into buffers that it keeps. Products of a few hundred rows or columns took
up to 3.5 times as long (kernels for AVX2, in a virtual machine) until a larger one had run in the same process,
probably since kernels prefetch what lies behind the part that they multiply, and a page that was never written to is
not in memory. So a large product is run before the first that matters.

OpenBLAS's own threads wait for the next product busily, which slows down what else is done with threads, such as the
update of the parameters. A team of threads computes large products as fast: each takes some rows or columns of the
result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad.memory import segments
from py_engine.ad.op import COUNTED, Call, Equation
from py_engine.ad.ops.product_parts import multiply_column_by_row, multiply_in_columns, multiply_in_tiles
from py_engine.ad.tensor import FLOATS

ROWS, COLUMNS, LENGTH = 48, 1024, 1024
"""Of the large product. Kernels multiply blocks of at most 768 columns and 640 summed numbers."""

LEAST_FLOPS = 2**21
"""Of a product from which on it is worth a large one, which takes 3 to 10 ms."""

_lock = threading.Lock()
_touched: set[Any] = set()  # dtypes, in this process


def touch_buffers(dtype: Any) -> None:
    """Run one large product of `dtype`, so that all later ones find OpenBLAS's buffers in memory.

    Threads that multiply at the same time have a buffer each: call this in all of them at once.
    """
    np.matmul(np.zeros((ROWS, LENGTH), dtype), np.zeros((LENGTH, COLUMNS), dtype))


def dtypes_of_products(equations: Iterable[Equation]) -> set[Any]:
    """The dtypes of products that are worth it."""
    found = set()
    for equation in equations:
        dtype = equation.outputs[0].dtype
        if equation.op.product and dtype in FLOATS and dtype not in found and equation.flops >= LEAST_FLOPS:
            found.add(dtype)
    return found


def touch_buffers_once(dtype: Any) -> None:
    """Run the large product unless this process already has."""
    with _lock:
        if dtype not in _touched:
            touch_buffers(dtype)
            _touched.add(dtype)


SHARED_FLOPS, SHARED_BYTES = 2**24, 2**21
"""Of a product from which on sharing it out to threads takes little of its time: of as many operations, or operands and
result of as many bytes."""


def is_one_product(calls: Sequence[Call]) -> bool:
    """Whether an op's calls are one product, and a copy of it at most."""
    return len(calls) == 1 or (len(calls) == 2 and isinstance(calls[1], partial) and calls[1].func is np.copyto)


def is_product(call: Call) -> bool:
    """Whether a call is a product of two matrices, or of stacks of them."""
    products = (np.matmul, np.ndarray.dot, multiply_column_by_row, multiply_in_columns, multiply_in_tiles)
    return isinstance(call, partial) and call.func in products and len(call.args) == 3


def operations(call: Call) -> int:
    """The multiplications and additions of a call that is a product, or contains products; 0 for any other."""
    if is_product(call):
        a, _, out = call.args
        return 2 * int(out.size) * int(a.shape[-1])
    counted = COUNTED.get(call.func) if isinstance(call, partial) else None
    return 0 if counted is None else counted(*call.args)


def bytes_of(call: Call) -> int:
    """The bytes of the arrays that a call is given."""
    return sum(x.nbytes for x in call.args if isinstance(x, np.ndarray))


def worth_sharing(call: Call) -> bool:
    """Whether a call is a product of two matrices that is large enough to be shared out to threads."""
    if not is_product(call):
        return False
    a, b, out = call.args
    flops = 2 * out.size * a.shape[-1]
    return bool(out.ndim == 2 and (flops >= SHARED_FLOPS or a.nbytes + b.nbytes + out.nbytes >= SHARED_BYTES))


def shared(call: Call, run: Callable[[Sequence[Call]], None], threads: int) -> Call:
    """Return a call that has `run` do parts of a product at the same time, one in each of `threads` threads.

    The parts are rows of the result, each the product with the whole right matrix, or columns, with the whole left one:
    the smaller of the two is read by all threads.
    """
    assert isinstance(call, partial)
    a, b, out = call.args
    # A column and a row are multiplied row by row, or by BLAS, which then writes to memory in one piece only.
    axis = 1 if a.size < b.size and call.func is not multiply_column_by_row else 0
    multiply = np.matmul if call.func is np.ndarray.dot else call.func  # `dot` writes no columns of a larger array

    def part(mine: slice) -> Call:
        if axis:
            return partial(multiply, a, b[:, mine], out[:, mine])
        return partial(multiply, a[mine], b, out[mine])

    return partial(run, [part(mine) for mine in segments(out.shape[axis], threads)])
