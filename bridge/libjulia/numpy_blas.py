"""numpy's BLAS for the Julia engine: it is in this process anyway, and newer than that of many a Julia.

OpenBLAS 0.3.9, which comes with Julia 1.5, multiplies a matrix by one of few columns in up to 1.8 times the time of
0.3.31. Only the engine's products go to numpy's; everything else in Julia keeps its own BLAS.
"""

from __future__ import annotations

import ctypes
import re

from bridge.linear_algebra import libraries_of_numpy

PREFIXES = ("scipy_", "")
"""Before the names in an OpenBLAS that is built for numpy's wheels, and in another one."""

FUNCTIONS = ("sgemm_64_", "sgemv_64_", "dgemm_64_", "dgemv_64_")
THREADS = ("openblas_set_num_threads64_", "openblas_get_num_threads64_")


def newer_than(blas: str) -> tuple[int, ...] | None:
    """The addresses that `use_blas!` of julia_engine/src/ad/kernels/products.jl takes; None without a newer OpenBLAS.

    `blas` is Julia's, as it says itself: "OpenBLAS 0.3.9".
    """
    name, _, own = blas.partition(" ")
    if name != "OpenBLAS":
        return None
    for library in libraries_of_numpy():
        if library["internal_api"] == "openblas" and _numbers(library["version"] or "") > _numbers(own):
            loaded = ctypes.CDLL(library["filepath"])
            for prefix in PREFIXES:
                names = [prefix + name for name in (*FUNCTIONS, *THREADS)]
                if all(hasattr(loaded, name) for name in names):
                    return tuple(ctypes.cast(loaded[name], ctypes.c_void_p).value or 0 for name in names)
    return None


def _numbers(version: str) -> list[int]:
    """0.3.9 is older than 0.3.31."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
