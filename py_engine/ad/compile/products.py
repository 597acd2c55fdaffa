"""What makes matrix products fast from the first one on.

OpenBLAS packs the operands of a product into buffers that it keeps, and its kernels prefetch what lies behind the part
that they multiply. A page of such a buffer that was never written to is not in memory, and every prefetch from it walks
the page tables in vain: products of a few hundred rows or columns took up to 3.5 times as long (kernels for AVX2, in a
virtual machine) until a larger one had run in the same process. So a large one is run before the first that matters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from py_engine.ad.op import Equation
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
