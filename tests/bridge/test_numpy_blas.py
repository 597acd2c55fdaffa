"""numpy's BLAS for the Julia engine: the addresses are those of its functions, and an older one is never taken."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from bridge import linear_algebra
from bridge.libjulia import numpy_blas

Address = tuple[int, ...]


@pytest.fixture
def addresses() -> Address:
    found = numpy_blas.newer_than("OpenBLAS 0.2.0")
    if found is None:
        pytest.skip("does not apply: numpy's BLAS is no OpenBLAS with whole numbers of 64 bits")
    return found


def numbers(*values: int) -> list[Any]:
    return [ctypes.byref(ctypes.c_int64(value)) for value in values]


@pytest.mark.parametrize(("place", "dtype"), [(0, np.float32), (2, np.float64)])
def test_the_products_are_those_of_matrices(addresses: Address, place: int, dtype: Any) -> None:
    scalar = ctypes.c_float if dtype == np.float32 else ctypes.c_double
    one, zero = (ctypes.byref(scalar(value)) for value in (1, 0))
    a, b = (np.random.default_rng(k).standard_normal(shape).astype(dtype) for k, shape in enumerate([(5, 7), (7, 3)]))
    out = np.zeros((5, 3), dtype)
    # In the order of Fortran the arrays are their transposes: out.T = b.T a.T.
    m, n, k = numbers(3, 5, 7)
    (lda, ldb), no = numbers(3, 7), ctypes.c_char_p(b"N")
    gemm = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13, ctypes.c_long, ctypes.c_long)(addresses[place])
    given = (no, no, m, n, k, one, b.ctypes.data, lda, a.ctypes.data, ldb, zero, out.ctypes.data, lda)
    gemm(*(ctypes.cast(x, ctypes.c_void_p) if not isinstance(x, int) else x for x in given), 1, 1)
    np.testing.assert_allclose(out, a @ b, rtol=1e-5)
    y, x = np.zeros(5, dtype), b[:, 0].copy()
    gemv = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 11, ctypes.c_long)(addresses[place + 1])
    rows, columns = numbers(7, 5)
    (step,), turned = numbers(1), ctypes.c_char_p(b"T")
    given = (turned, rows, columns, one, a.ctypes.data, rows, x.ctypes.data, step, zero, y.ctypes.data, step)
    gemv(*(ctypes.cast(x, ctypes.c_void_p) if not isinstance(x, int) else x for x in given), 1)
    np.testing.assert_allclose(y, a @ x, rtol=1e-5)


def test_the_number_of_threads_is_numpys(addresses: Address) -> None:
    from threadpoolctl import threadpool_info, threadpool_limits

    set_threads = ctypes.CFUNCTYPE(None, ctypes.c_int)(addresses[4])
    threads = ctypes.CFUNCTYPE(ctypes.c_int)(addresses[5])
    (library, *_) = linear_algebra.libraries_of_numpy()
    with threadpool_limits(limits=1, user_api="blas"):
        assert threads() == 1
        set_threads(2)
        now = [found for found in threadpool_info() if found["filepath"] == library["filepath"]]
        assert [found["num_threads"] for found in now] == [threads()]


@pytest.mark.parametrize("blas", ["OpenBLAS 99.0.0", "OpenBLAS", "mkl", "", "OpenBLAS 0.3.9"])
def test_only_a_newer_one_is_taken(monkeypatch: pytest.MonkeyPatch, blas: str) -> None:
    own = {"internal_api": "openblas", "version": "0.3.9", "filepath": "/none/libopenblas.so"}
    monkeypatch.setattr(
        numpy_blas, "libraries_of_numpy", lambda: [own, own | {"internal_api": "mkl", "version": "2026"}]
    )
    if blas == "OpenBLAS":  # it does not say: nothing is known to be newer
        monkeypatch.setattr(numpy_blas, "libraries_of_numpy", lambda: [own | {"version": None}])
    assert numpy_blas.newer_than(blas) is None


def test_a_library_without_these_functions_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import _ctypes

    there = {"internal_api": "openblas", "version": "0.3.31", "filepath": _ctypes.__file__}
    monkeypatch.setattr(numpy_blas, "libraries_of_numpy", lambda: [there])
    assert numpy_blas.newer_than("OpenBLAS 0.3.9") is None
