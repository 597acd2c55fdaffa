"""Every stand-in for a numpy function, with every form of every argument: numpy's result, or an engine error.

The cases follow from numpy's own signatures: each operand in every form (kind of number, shape, layout, what is no
array), each other parameter with every value that `VALUES` has for its name, by position and by keyword, alone and in
random combinations. numpy computes the same call on plain arrays. Equal are value, shape and dtype; refused is an
`EngineError`, or numpy's own error where numpy never asked the tensor. Anything else is a difference.

Numbers beside arrays take their dtype, also numpy's scalars, and Python's whole numbers alone are float64: that is how
ops treat numbers, and the one way in which results may differ from numpy's.
"""

from __future__ import annotations

import inspect
import itertools
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor
from py_engine.ad.op import NUMPY, Op
from py_engine.ad.operators import SHAPE_FROM_VALUES
from py_engine.errors import EngineError

SEED = 13
A = np.array([[0.5, 0.25, 0.75], [0.125, 0.9375, 0.6]])
B = np.array([[0.3, 0.2, 0.4], [0.7, 0.8, 0.65]])
NO_VALUE = getattr(np, "_NoValue")  # noqa: B009


# Arguments ------------------------------------------------------------------------------------------------


class Subclass(np.ndarray):
    """An array of a subclass."""


def matrix():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.matrix(A)


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


# What stands for an operand. Those of the first table become tensors; those of the second are beside a tensor.
TENSORS: dict[str, Callable[[], np.ndarray]] = {
    "float64": lambda: A.copy(),
    "float32": lambda: A.astype(np.float32),
    "float16": lambda: A.astype(np.float16),
    "int64": lambda: np.array([[3, -1, 2], [0, 5, 4]]),
    "int32": lambda: np.array([[3, -1, 2], [0, 5, 4]], np.int32),
    "uint8": lambda: np.array([[3, 1, 2], [0, 5, 250]], np.uint8),
    "bool": lambda: A > 0.4,
    "int64 vector": lambda: np.array([3, 1, 2]),
    "int64 square": lambda: np.array([[2, 1], [1, 3]]),
    "bool vector": lambda: np.array([True, False, True]),
    "number": lambda: np.array(0.5),
    "one": lambda: np.array([0.5]),
    "empty": lambda: np.zeros((0,)),
    "empty rows": lambda: np.zeros((2, 0)),
    "vector": lambda: A[0].copy(),
    "three axes": lambda: np.arange(1, 13).reshape(2, 3, 2) / 16,
    "ones": lambda: np.full((1, 3, 1), 0.5),
    "square": lambda: np.array([[0.5, 0.25], [0.75, 0.125]]),
    "fortran": lambda: np.asfortranarray(A),
    "strided": lambda: np.repeat(np.repeat(A, 2, 0), 3, 1)[::-2, ::3],
    "read-only": lambda: read_only(A),
    "special": lambda: np.array([[np.nan, np.inf, -np.inf], [0.0, -0.0, 1e100]]),
    "halves": lambda: np.array([[0.5, 1.5, -0.5], [-2.5, 1e17, 2.675]]),
    "ties": lambda: np.array([[1.0, 1.0, 0.0], [1.0, -1.0, -1.0]]),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "list": lambda: A.tolist(),
    "tuple": lambda: tuple(map(tuple, A.tolist())),
    "list of whole numbers": lambda: [[1, 2, 3], [4, 5, 6]],
    "ragged list": lambda: [[1.0, 2.0], [3.0]],
    "empty list": lambda: [],
    "Python float": lambda: 0.5,
    "Python int": lambda: 2,
    "large int": lambda: 2**2000,
    "Python bool": lambda: True,
    "numpy float64": lambda: np.float64(0.5),
    "numpy float32": lambda: np.float32(0.5),
    "numpy int64": lambda: np.int64(2),
    "numpy bool": lambda: np.bool_(True),
    "no axes": lambda: np.array(0.5),
    "float32 array": lambda: A.astype(np.float32),
    "float64 array": lambda: B.copy(),
    "int64 array": lambda: np.array([[3, 1, 2], [1, 5, 4]]),
    "column": lambda: B[:, :1],
    "wrong shape": lambda: np.ones((4, 5)),
    "complex number": lambda: 1j,
    "complex array": lambda: A * 1j,
    "text": lambda: "two",
    "array of text": lambda: np.array([["a"] * 3] * 2),
    "nothing": lambda: None,
    "dict": lambda: {"a": 1},
    "object": object,
    "array of objects": lambda: A.astype(object),
    "masked array": lambda: np.ma.masked_less(A, 0.3),
    "matrix": matrix,
    "subclass": lambda: A.view(Subclass),
    "structured": lambda: np.zeros((2, 3), [("x", float)]),
    "dates": lambda: np.zeros((2, 3), "datetime64[s]"),
    "big-endian": lambda: A.astype(">f8"),
    "float128": lambda: A.astype(np.longdouble),
}

OPERANDS = {
    *("a", "b", "x", "x1", "x2", "y", "array", "condition", "prototype", "A", "a1", "a2", "arr", "ary", "f", "m"),
    *("p", "v", "val", "z", "values", "ar", "ar1", "ar2", "element", "filt", "from_", "sample", "seq_of_zeros"),
    *("test_elements", "u"),
}
ONE = {
    *(np.clip, np.interp, np.linalg.cond, np.cumulative_sum, np.cumulative_prod, np.polyder),
    *(np.polyint, np.linalg.matrix_rank),
}
"""Functions whose other operands are tried as settings."""
APART = {
    *(np.insert, np.piecewise, np.apply_along_axis, np.apply_over_axes, np.einsum_path, np.lexsort),
    *(np.common_type, np.result_type, np.can_cast, np.min_scalar_type, np.ravel_multi_index, np.unravel_index),
}
"""Functions of functions, those of dtypes, and those whose operands are not the first arguments: tested in
test_numpy_functions.py."""
BY_VALUES = {key for key in NUMPY if not isinstance(key, tuple) and key.__name__ in SHAPE_FROM_VALUES}
KEYS = [key for key in NUMPY if key not in APART]
SEQUENCES = {"arrays", "tup", "keys", "multi_index"}
MANY = {"arys", "args", "xi", "arrays_and_dtypes"}
FREE_ORDER = {np.partition, np.argpartition, "argpartition"}
"""Whose elements numpy leaves in its own order beside the places that were asked for."""
QUESTIONS = {
    *(np.linalg.lstsq, np.allclose, np.array_equal, np.iscomplexobj, np.isrealobj, np.shape, np.ndim, np.size),
    *(np.poly, np.polyfit, np.array_equiv, np.array2string, np.array_repr, np.array_str, np.linalg.matrix_rank),
}
"""Whose answers, or parts of them, are numbers or truth values, known eagerly alone."""

AXIS = [None, 0, 1, -1, -2, 2, -3, (), (0,), (0, 1), (1, -2), (0, 0), (0, 5), [0, 1], np.int64(1), np.array(1), 1.0,
        "0", True, np.float64(0), (0.0,), 2**70]  # fmt: skip
LENGTHS = [(3, 2), (2, 3), 6, (-1,), (2, -1), (4, 2), (2, 2, 3), [3, 2], np.array([3, 2]), (), -1, (-1, -1), 6.0,
           (2.0, 3), (np.int64(3), 2), "23", (0,), (2, -2), True, (2, 3, 1), np.float64(6), 2**70]  # fmt: skip
NUMBERS = [
    0.25,
    1,
    0,
    -1,
    np.float64(0.5),
    np.nan,
    np.inf,
    True,
    "a",
    None,
    [0.1, 0.2, 0.3],
    np.array([0.1, 0.5, 0.9]),
    B,
]

# For each parameter the values that are tried. A parameter of a new stand-in needs its values here.
VALUES: dict[str, list[Any]] = {
    "axis": AXIS,
    "axis1": [0, 1, -1, 2, 1.0, np.int64(1), None, "0"],
    "axis2": [1, 0, -2, -3, 0.0, np.int64(0), None, "0"],
    "axes": [None, (0, 1), (1, 0), [1, 0], (-1, 0), (0, 0), (0,), (1.0, 0), 0, 1, 2, 3, -1, 1.0, ((0,), (0,)),
             ([1], [1]), (0, 0), (1, -1), ((0, 1), (0, 1)), ((1, 0), (1, 0)), ((0, 1), (1, 0)), ((0, 0), (0, 0)), 
             ((0, -2), (0, -2)), ((5,), (5,)), ((-7,), (-7,)), ((0.0,), (0.0,)), "01", (np.int64(1), np.int64(0)),
             ((0,), (0, 1))],
    "source": [0, 1, -1, (0, 1), [1, 0], (0, 0), 2, 1.0, "0", np.int64(0)],
    "destination": [1, 0, -1, (1, 0), [0, 1], (0, 0), -3, 1.0, np.int64(1)],
    "shape": LENGTHS,
    "keepdims": [False, True, NO_VALUE, 1, 0, None],
    "dtype": [None, np.float64, "float64", float, np.float32, np.int64, bool, complex, "nonsense", object],
    "out": [None, np.zeros((2, 3)), np.zeros(3), (np.zeros((2, 3)),), 3],
    "where": [True, NO_VALUE, False, A > 0.3, [True, False, True]],
    "initial": [NO_VALUE, None, 0.0, 1, np.inf],
    "mean": [NO_VALUE, 0.5, np.full((2, 1), 0.5)],
    "ddof": [0, 1, 2, 3, 6, 7, 1.5, -1, np.int64(1), "1", np.nan],
    "correction": [NO_VALUE, 0, 1, 1.5, 6],
    "order": ["C", "K", "A", "F", None, "nonsense"],
    "subok": [True, False],
    "copy": [None, True, False],
    "casting": ["same_kind", "safe", "unsafe", "no", "nonsense"],
    "device": [None, "cpu", "cuda"],
    "decimals": [0, 1, 2, -1, 4, 400, np.int64(1), 1.0, "1", None],
    "fill_value": [2.5, 3, True, np.float64(1), np.nan, "x", None, [1.0, 2.0, 3.0], np.ones((2, 1)), np.ones(4), 1j],
    "ord": [None, 2, 1, "fro", "nuc", np.inf, -np.inf, -1, -2, 0, 3, 0.5, "x"],
    "atol": [1e-8, 0, 0.5, np.nan, "a"],
    "a_min": NUMBERS,
    "a_max": NUMBERS,
    "min": NUMBERS,
    "max": NUMBERS,
    "pad_width": [1, 0, (1, 2), ((0, 1), (2, 0)), [[1, 1], [2, 2]], (3,), ((1,), (2,)), ((1, 2),), np.array([1, 2]), -1,
                  (1, -1), 1.0, (1.5, 2), "1", (1, 2, 3), {0: 1}, {-1: (1, 2)}, {0: (1, 2), 1: 3}, {5: 1}, {0: 1.0}, (),
                  np.array([1, 2], np.uint8), None],
    "mode": ["constant", "edge", "reflect", "wrap", "symmetric", "mean", "nonsense", None, "raise", "clip", "full",
             "same", "valid", "reduced", "r", "complete"],
    "constant_values": [0, 1.5, -0.0, (1, 2), ((1, 2), (3, 4)), [[5], [6]], np.nan, np.inf, (1, 2, 3), "a",
                        np.array(7.0), True],
    "reflect_type": ["even"],
    "optimize": [False, True, "greedy"],
    "shift": [1, 0, -2, 7, (1, 2), [1, 0], 1.0, "1", np.int64(1), ()],
    "repeats": [2, 0, 1, -1, [1, 2], (1, 0, 2), np.array([2, 1]), [1], 1.0, "2", [1, 2, 3, 4, 5, 6], np.int64(2)],
    "reps": [2, 0, (1, 2), (2, 1, 2), (), [1, 2], -1, 1.0, "2", np.array([2, 1])],
    "offset": [0, 1, -1, 5, -5, 1.0, np.int64(1), None],
    "k": [0, 1, -1, 5, -5, 1.0, np.int64(1), None],
    "indices": [0, np.array([[1, 0, 1], [0, 0, 1]]), 1, -1, [0, 1], np.array([[0], [1]]), 5, -7, 1.0, [], True, "0",
                np.array([0.5])],
    "n": [1, 2, 0, -1, 5, 1.0, "1", np.int64(1)],
    "prepend": [NO_VALUE, 0.5, np.ones((2, 1)), [[1.0], [2.0]], np.ones((1, 3)), 1, None, "a"],
    "append": [NO_VALUE, 0.5, np.ones((2, 1)), 1],
    "kind": [None, "stable", "quicksort", "introselect", "nonsense"],
    "stable": [None, True, False],
    "overwrite_input": [False],
    "method": ["linear", "lower", "higher", "midpoint", "nearest", "hazen", "weibull", "median_unbiased",
               "normal_unbiased", "interpolated_inverted_cdf", "inverted_cdf", "averaged_inverted_cdf",
               "closest_observation", "nonsense", None],
    "q": [0.5, 0, 1, [0.25, 0.75], np.array([[0.1, 0.9]]), (), 0.3, 1.5, -0.1, "a", np.float64(0.2), np.nan,
          np.array([0, 1])],
    "weights": [None, A, np.array([0.2, 0.5, 0.3]), [0.2, 0.5, 0.3], np.ones(4), 1.0, "a"],
    "returned": [False, True],
    "rowvar": [True, False],
    "kth": [0, 1, -1, (0, 1), 7, 1.0],
    "side": ["left", "right", "nonsense"],
    "sorter": [None, np.array([0, 1, 2])],
    "indices_or_sections": [1, [1], 2, 3, [1, 2], (0, 1), [2, 1], [5], 0, -1, 1.0, "1", np.array([1]), [], [1.0]],
    "start": [0, 1, 2, -1, 3, 1.0],
    "stop": [1.5, B, 2],
    "num": [3, 1, 0, 5, -1, 2.0],
    "endpoint": [True, False],
    "retstep": [False, True],
    "bias": [False, True],
    "fweights": [None, np.array([1, 2, 1])],
    "aweights": [None, np.array([1.0, 2.0, 1.0])],
    "obj": [0, 1, [0, 1], -1, slice(0, 1), 7, 1.0],
    "new_shape": [(3, 2), 4, (5, 2), (2,), 0, -1, (2, 2, 2), 1.0, "3"],
    "sparse": [False, True],
    "indexing": ["xy", "ij", "nonsense"],
    "N": [None, 0, 1, 3, -1, 1.0],
    "increasing": [False, True],
    "default": [0, 1.5, A, np.zeros(3), None],
    "nan": [0.0, 1.5, np.inf, 2, "a"],
    "posinf": [None, 1.5, 7],
    "neginf": [None, -1.5],
    **{name: [-1, 0, 1, 2, 1.0] for name in ("axisa", "axisb", "axisc")},
    "tol": [100, 0],
    "upper": [False, True],
    "UPLO": ["L", "U", "x"],
    "full_matrices": [False, True],
    "compute_uv": [True, False],
    "hermitian": [False, True],
    "rcond": [None, 1e-10, "a"],
    "dx": [1.0, 2, 0.5],
    "edge_order": [1, 2, 3],
    "include_initial": [False, True],
    "to_end": [None, 1.0, [1.0, 2.0], A],
    "to_begin": [None, 1.0, A],
    "xp": [[0.1, 0.5, 0.9], np.array([0.2, 0.6, 0.61]), [0.5], [], [0.1, 0.2], A],
    "fp": [[1.0, 3.0, 2.0], np.array([0.5, -0.5, 0.25]), [2.0], [], [1, 2], A],
    "left": [None, 0.5, 2],
    "right": [None, -0.5],
    "period": [None, 1.0, 2 * np.pi, "a"],
    "p": [None, 2, -2, 1, "fro", np.inf, "x"],
    "m": [1, 0, 2, 3, -1, 1.0],
    "bins": [[0.1, 0.5, 0.9], 3, np.array([0.0, 0.125, 0.5, 1.0]), [0.9, 0.5, 0.1], [0.1, 0.9, 0.5], 1, 0, 2.0, "auto",
             [], [0.5], np.array([0.2], np.float32), A],
    "range": [None, (0, 1), (0.5, 0.5), (1, 0), (0.0, np.inf), 3, (0.2, 0.6), [(0, 1), (0, 0.5)]],
    "density": [None, False, True],
    "assume_unique": [False],
    "invert": [False, True],
    "choices": [[A[0], B[0], A[1]], [A, B, A], [1.0, 2.0, 3.0], [], A, 3, "ab"],
    "base": [10.0, 2, B[0], "a"],
    "ind": [2, 1, 0, 3, 1.0],
    "minlength": [0, 2, 8, -1, 1.0],
    "discont": [None, 0.1, 4.0],
    "deg": [1, 0, 2, -1, 1.0, False, True],
    "full": [False, True],
    "cov": [False, True, "unscaled"],
    "w": [None, B[0], B, 2.0],
    "rtol": [1e-5, 0, 0.5, None, "a"],
    "to": [np.float64, "int8", np.float32, bool, "nonsense", A],
    "trim": ["fb", "f", "b", "x", 1],
    "dims": [(4, 5), (6, 6, 6), 3, (2, 2), -1],
    **{name: [False, True] for name in ("return_index", "return_inverse", "return_counts", "return_indices")},
    "sorted": [True, False],
    "equal_nan": [False, True],
    "precision": [None, 3, 0],
    "max_line_width": [None, 20],
    "suppress_small": [None, True],
    "separator": [" ", ", "],
    "prefix": ["", "x = "],
    "suffix": ["", ")"],
    "formatter": [None, {"float": str}],
    "threshold": [None, 2],
    "edgeitems": [None, 1],
    "sign": [None, "+"],
    "floatmode": [None, "fixed"],
    "legacy": [None],
}  # fmt: skip
UFUNC = {"out", "where", "casting", "order", "dtype", "subok"}
MORE = {np.pad: ["constant_values", "reflect_type"]}  # what a signature hides behind **kwargs

EINSUM = [
    *(
        "ij,kj->ik",
        "ij,kj",
        "ij, ij ->",
        "ij,ij->ij",
        "...j,kj->...k",
        "ij,jk",
        "ij,kl->il",
        "ij,ij->ji",
        "ij",
        "ij,kj->iz",
    ),
    *("ij,kj->ii", "", "ij,k1->i", "i...,i...", "ij,kj->ik->k"),
]

# Operands that a function is first called with: the first of these pairs for which numpy has a result.
BASES = [
    (A, B),
    (A > 0.4, B > 0.4),
    (A, B.T),
    (A[0], B[0]),
    (np.arange(1.0, 25.0).reshape(2, 3, 4) / 25, B),
    (A[:, :2], B[:, :2]),
    (np.array([[2.0, 0.5], [0.5, 1.5]]), B[:, :2]),
    (A[:, :2] + 2 * np.eye(2), A[:, :2]),
    (np.array([1, 0, 2]), np.array([2, 3, 1])),
    (np.arange(16.0).reshape(2, 2, 2, 2) + 20 * np.eye(4).reshape(2, 2, 2, 2), A[:, :2]),
]


# Calls ----------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """Arguments of one call; operands are the places in `args` that hold one, `forms` says what they are."""

    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[int, ...] = (0,)
    direct: bool = False  # the stand-in itself is called: numpy would not ask it where there is no tensor

    def __str__(self) -> str:
        shown = [f"tensor {brief(x)}" if i in self.tensors else brief(x) for i, x in enumerate(self.args)]
        return f"({', '.join(shown + [f'{k}={brief(v)}' for k, v in self.kwargs.items()])})"


def brief(x: Any) -> str:
    if isinstance(x, list):
        return f"[{', '.join(map(brief, x[:3]))}]"
    text = f"{type(x).__name__}({x.dtype}{list(x.shape)})" if isinstance(x, np.ndarray) else repr(x)
    return text if len(text) < 40 else text[:37] + "..."


def name_of(key: Any) -> str:
    if isinstance(key, tuple):
        return f"{key[0].__name__}.{key[1]}"
    return ("linalg." if key.__module__ == "numpy.linalg" else "") + key.__name__


def of_numpy(key: Any) -> Callable[..., Any]:
    return getattr(*key) if isinstance(key, tuple) else key


def parameters(key: Any) -> list[inspect.Parameter]:
    """Parameters of numpy's function; of a ufunc's reduction those that the documentation has, as ours."""
    if isinstance(key, tuple):
        return list(inspect.signature(NUMPY[key]).parameters.values())
    return list(inspect.signature(key).parameters.values())


def operand_count(key: Any) -> int:
    if key is np.einsum:
        return 3
    names = [p.name for p in parameters(key)]
    if names[0] in SEQUENCES | MANY or key in ONE:
        return 1
    if key in (np.select, np.linspace, np.logspace, np.geomspace):
        return 2
    return sum(name in OPERANDS for name in names[:3])


def settings(key: Any) -> list[inspect.Parameter]:
    """The parameters that are no operands."""
    spaced = key in (np.linspace, np.logspace, np.geomspace)
    skipped = {*SEQUENCES, "condlist", "choicelist", *(("start", "stop") if spaced else ())}
    skipped |= {parameters(key)[0].name} if key in ONE else OPERANDS
    found = [p for p in parameters(key) if p.name not in skipped and p.kind is not p.VAR_KEYWORD]
    found = [p for p in found if p.kind is not p.VAR_POSITIONAL]
    if isinstance(key, np.ufunc):
        found = [p for p in found if p.name in UFUNC]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return found + [inspect.Parameter(name, keyword, default=0) for name in MORE.get(key, [])]


def required(key: Any) -> list[Any]:
    """A value for each parameter that must be given beside the operands, with which numpy has a result."""
    return base_call(key)[1]


def base(key: Any) -> list[Any]:
    """Operands that the function has a result for."""
    return base_call(key)[0]


@cache
def base_call(key: Any) -> tuple[list[Any], list[Any]]:
    if key is np.einsum:
        return [EINSUM[0], A, B], []
    needed = [VALUES[p.name][:3] for p in settings(key) if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
    for x, y in BASES:
        chosen = [[x, y]] if parameters(key)[0].name in SEQUENCES else [x, y][: operand_count(key)]
        if key is np.select:
            chosen = [[A > 0.4, B > 0.4], [A, B]]
        if key is np.where:
            chosen = [A > 0.4, A, B]
        if key is np.ldexp:  # which numpy has for truth values, too
            chosen = [A, np.array([[3, -1, 2], [0, 5, 4]])]
        for rest in itertools.product(*needed):
            if computed(of_numpy(key), Call([*chosen, *rest]), wrap=False)[1] is None:
                return chosen, list(rest)
    raise AssertionError(f"BASES needs operands of {name_of(key)}")


def placed(key: Any, parameter: inspect.Parameter, value: Any) -> Iterator[Call]:
    """The parameter by keyword, and by position with the defaults before it."""
    operands = base(key)
    needed = [p for p in settings(key) if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
    filled = dict(zip([p.name for p in needed], required(key), strict=True))
    tensors = (1,) if key is np.einsum else (0,)
    if parameter.kind is not parameter.POSITIONAL_ONLY:
        yield Call(operands, {**filled, parameter.name: value}, tensors)
    if parameter.kind is not parameter.KEYWORD_ONLY and key is not np.einsum:
        before: list[Any] = []
        for p in settings(key):
            if p.name == parameter.name:
                yield Call([*operands, *before, value], {}, tensors)
                return
            before.append(filled.get(p.name, p.default))


def calls(key: Any, rng: np.random.Generator) -> Iterator[Call]:
    operands, rest = base(key), required(key)
    places = range(1, 3) if key is np.einsum else range(len(operands))
    yield Call([*operands, *rest], {}, tuple(places))
    for i in places:
        for make in TENSORS.values():
            changed = [*operands[:i], in_form(key, operands[i], make()), *operands[i + 1 :]]
            yield Call([*changed, *rest], {}, (i,))
            if len(places) > 1 and key not in (np.where, np.einsum):  # both of this kind
                yield Call([*(make() for _ in operands), *rest], {}, tuple(places))
        for make in OTHERS.values():
            changed = [*operands[:i], in_form(key, operands[i], make()), *operands[i + 1 :]]
            beside = tuple(k for k in places if k != i)
            yield Call([*changed, *rest], {}, beside, direct=not beside)
    for parameter in settings(key):
        for value in values_of(parameter):
            yield from placed(key, parameter, value)
    for subscripts in EINSUM if key is np.einsum else []:
        yield Call([subscripts, A, B], {}, (1, 2))
        yield Call([subscripts, A], {}, (1,))
    names = settings(key)
    for _ in range(25 if names and not isinstance(key, np.ufunc) else 0):
        make = list(TENSORS.values())[rng.integers(len(TENSORS))]
        chosen = [in_form(key, operands[0], make()), *operands[1:]] if key is not np.einsum else operands
        kwargs = {
            p.name: values_of(p)[rng.integers(len(values_of(p)))]
            for p in names
            if (p.default is p.empty or rng.random() < 0.4) and p.kind is not p.POSITIONAL_ONLY
        }
        yield Call([*chosen], kwargs, (1,) if key is np.einsum else (0,))


def values_of(parameter: inspect.Parameter) -> list[Any]:
    """What is tried; numpy's mark for no value only where numpy itself has it."""
    return [v for v in VALUES[parameter.name] if v is not NO_VALUE or parameter.default is NO_VALUE]


def in_form(key: Any, standing: Any, value: Any) -> Any:
    """An operand in the place of the one that is there: a sequence of arrays is one of several of that form."""
    return [value, value] if isinstance(standing, list) else value


# Comparison -----------------------------------------------------------------------------------------------


def computed(function: Callable[..., Any], call: Call, wrap: bool) -> tuple[Any, Exception | None]:
    args, kwargs = list(call.args), call.kwargs
    if wrap:
        for i in call.tensors:
            args[i] = [wrapped(x) for x in args[i]] if isinstance(args[i], list) else wrapped(args[i])
    else:
        args = [weak(x, call.direct and i == 0) for i, x in enumerate(args)]
        kwargs = {name: weak(x, False) if name in ("min", "max", "a_min", "a_max") else x for name, x in kwargs.items()}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **kwargs), None
        except Exception as error:  # any: which of them it is, is what is tested
            return None, error


def wrapped(x: Any) -> Any:
    return Tensor(x) if isinstance(x, np.ndarray) and x.__class__ is np.ndarray else x


def weak(x: Any, alone: bool) -> Any:
    """A numpy scalar as the Python number that ops take it for; whole numbers alone are floats."""
    if isinstance(x, list):
        return [item if isinstance(item, list) else weak(item, alone) for item in x]
    number = x.item() if isinstance(x, np.generic) else x
    return float(number) if alone and type(number) is int and number < 2**1000 else number


def inside_engine(error: Exception) -> bool:
    return any(
        "py_engine" in frame.filename and "tests" not in frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
    )


def difference(key: Any, result: Any, expected: Any) -> str | None:
    if isinstance(expected, (list, tuple)) and any(isinstance(x, (np.ndarray, np.generic)) for x in expected):
        if not isinstance(result, (list, tuple)) or len(result) != len(expected):
            return f"{type(result).__name__} for {len(expected)} results"
        found = [difference(key, *pair) for pair in zip(result, expected, strict=True)]
        return next(filter(None, found), None)
    if isinstance(expected, (list, tuple, int)) and (not isinstance(expected, bool) or isinstance(result, bool)):
        return None if type(result) is type(expected) and result == expected else f"{result!r} for {expected!r}"
    if isinstance(result, np.generic) and isinstance(expected, np.generic):  # a rank
        return None if result == expected and result.dtype == expected.dtype else f"{result!r} for {expected!r}"
    if isinstance(expected, (str, float)) and not isinstance(result, Tensor):
        return None if result == expected else f"{result!r} for {expected!r}"
    if not isinstance(result, Tensor):
        return f"a {type(result).__name__} for a {type(expected).__name__}"
    value, expected = result.numpy(), np.asarray(expected)
    if value.shape != expected.shape:
        return f"shape {value.shape} for {expected.shape}"
    if value.dtype != expected.dtype:
        return f"dtype {value.dtype} for {expected.dtype}"
    if key is np.empty_like:
        return None
    if key in FREE_ORDER:
        value, expected = np.sort(value, None), np.sort(expected, None)
    if expected.dtype.kind in "biu":
        same = np.array_equal(value, expected)
    else:
        eps = np.finfo(expected.dtype).eps
        if of_matrices(key):
            if not np.isfinite(expected).all():
                return None  # what comes of numbers that are not finite is left to LAPACK
            eps *= 64
        same = np.allclose(value, expected, rtol=16 * eps, atol=4 * eps, equal_nan=True)
    return None if same else f"{brief_values(value)} for {brief_values(expected)}"


def of_matrices(key: Any) -> bool:
    return getattr(key, "__module__", "") == "numpy.linalg" or key in (np.polyfit, np.geomspace)


def brief_values(x: np.ndarray) -> str:
    return np.array2string(np.ravel(x)[:6], precision=17, separator=",").replace("\n", "")


@cache
def swept(key: Any) -> tuple[Counter[str], tuple[str, ...]]:
    """How many calls are equal and refused, and what is wrong with the others."""
    counts: Counter[str] = Counter(equal=0, refused=0)
    wrong = []
    for call in calls(key, np.random.default_rng(SEED)):
        expected, refusal = computed(of_numpy(key), call, wrap=False)
        result, error = computed(NUMPY[key] if call.direct else of_numpy(key), call, wrap=True)
        if isinstance(error, EngineError):
            counts["refused"] += 1
            continue
        if call.direct and isinstance(refusal, AttributeError):
            counts["refused"] += 1  # numpy takes arrays alone here, and the stand-in what makes one
            continue
        if error is not None:
            if refusal is not None and type(error) is type(refusal) and not inside_engine(error):
                counts["refused"] += 1  # by numpy, before it asks the tensor
            else:
                wrong.append(f"{call}: {type(error).__name__}: {error}")
            continue
        found = f"a result, where numpy raises {refusal!r}" if refusal else difference(key, result, expected)
        if found is None:
            counts["equal"] += 1
        else:
            wrong.append(f"{call}: {found}")
    return counts, tuple(wrong)


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_each_call_is_numpy_s_or_refused(key):
    counts, wrong = swept(key)
    assert not wrong, f"{name_of(key)}: {counts}\n" + "\n".join(wrong)
    assert counts["equal"] > 1


# Signatures -----------------------------------------------------------------------------------------------

OLD = {"newshape"}  # numpy's own, deprecated and gone in its newer versions


@pytest.mark.parametrize("key", [key for key in NUMPY if not isinstance(key, np.ufunc)], ids=name_of)
def test_signature_is_numpy_s_position_by_position(key):
    ours = list(inspect.signature(NUMPY[key]).parameters.values())
    if key is np.einsum:  # its first operand is the subscripts, which have a name here
        ours = ours[1:]
    if isinstance(key, tuple):  # numpy's has **kwargs in the place of the last three
        expected = [
            ("axis", 0),
            ("dtype", None),
            ("out", None),
            ("keepdims", False),
            ("initial", NO_VALUE),
            ("where", True),
        ]
        assert [(p.name, p.default) for p in ours[1:]] == expected
        return
    wanted = [p for p in inspect.signature(key).parameters.values() if p.name not in OLD]
    for mine, theirs in zip(ours, wanted, strict=False):
        if theirs.kind is theirs.VAR_KEYWORD:
            break  # what ours names, numpy has there
        assert (mine.name, mine.kind) == (theirs.name, theirs.kind)
        if key is not np.where:  # which takes None for an operand
            assert mine.default is theirs.default or mine.default == theirs.default, mine
    else:
        assert len(ours) == len(wanted)


@pytest.mark.parametrize("key", [key for key in KEYS if isinstance(key, np.ufunc)], ids=name_of)
def test_ufuncs_take_their_operands_by_position_alone(key):
    operands = base(key)
    stand_in = NUMPY[key]
    assert len(operands) == key.nin
    if not isinstance(stand_in, Op):
        mine = list(inspect.signature(stand_in).parameters.values())
        assert [p.name for p in mine] == [p.name for p in parameters(key)[: key.nin]]
        assert {p.kind for p in mine} == {inspect.Parameter.POSITIONAL_ONLY}
    for name in (UFUNC - {"dtype"}) & {p.name for p in parameters(key)}:
        out = tuple(np.zeros((2, 3)) for _ in range(key.nout))
        value = {"out": out, "where": A > 0.3, "casting": "unsafe", "order": "F", "subok": False}[name]
        with pytest.raises(EngineError, match=name):
            key(*map(Tensor, operands), **{name: value})


# Attributes of arrays -------------------------------------------------------------------------------------

ATTRIBUTES = [name for name in dir(np.ndarray) if not name.startswith("_")]
OURS = {
    "data": "the array of a concrete tensor",
    "grad": "the gradient that backward() stores",
}


def test_each_attribute_of_arrays_is_there_or_says_what_to_write():
    x, missing = Tensor(A), []
    for name in ATTRIBUTES:
        try:
            getattr(x, name)
        except EngineError as error:
            missing.append(name)
            assert isinstance(error, AttributeError) and f"a tensor has no {name}: " in str(error)
            assert not hasattr(x, name)
    assert len(missing) < len(ATTRIBUTES) / 2
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = x.nonsense


SOME = ("float64", "float32", "int64", "number", "empty rows", "three axes")


def has(name: str) -> bool:
    return hasattr(Tensor(A), name) and name not in OURS


@pytest.mark.parametrize("name", [name for name in ATTRIBUTES if has(name)])
def test_each_method_and_property_is_numpy_s_or_refused(name):
    wrong, equal = [], 0
    for kind, make in TENSORS.items():
        if not callable(getattr(Tensor(A), name)):
            verdict = of_method(name, make(), None, {})
            equal += verdict is None
            wrong += [f"{name} of {brief(make())}: {verdict}"] if verdict else []
            continue
        for args, kwargs in itertools.islice(method_arguments(name), None if kind in SOME else 1):
            verdict = of_method(name, make(), args, kwargs)
            equal += verdict is None
            wrong += [f"{name} of {brief(make())} {args} {kwargs}: {verdict}"] if verdict else []
    assert not wrong, "\n".join(wrong)
    assert equal > 3


def method_arguments(name: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    first = {
        "reshape": [6],
        "swapaxes": [0, 1],
        "dot": [B.T],
        "astype": [np.float32],
        "item": [0],
        "repeat": [2],
        "take": [[0]],
        "searchsorted": [0.5],
        "compress": [[True, False]],
        "choose": [[A, B]],
        "argpartition": [0],
    }.get(name, [])
    yield first, {}
    if name == "reshape":
        yield from ([([shape], {}) for shape in LENGTHS] + [([3, 2], {}), ([3, -1], {}), ([3.0, 2], {}), ([], {})])
    if name == "transpose":
        yield from [([1, 0], {}), ([(1, 0)], {}), ([0, 0], {}), ([None], {}), ([1.0, 0], {})]
    if name == "item":
        yield from [([], {}), ([(0, 1)], {}), ([0, 1], {}), ([-1], {}), ([99], {}), ([1.0], {})]
    for p in inspect.signature(getattr(Tensor, name)).parameters.values():
        if p.name in VALUES and not (name in ("reshape", "transpose") and p.name in ("shape", "axes")):
            for value in values_of(p):
                if value is NO_VALUE:  # which only numpy's functions have for "not given"
                    continue
                yield first, {p.name: value}
                if name in ("sum", "mean", "max", "min", "any", "all", "prod", "std", "var"):  # by position
                    names = list(inspect.signature(getattr(Tensor, name)).parameters.values())[1:]
                    place = names.index(p)
                    if p.kind is p.POSITIONAL_OR_KEYWORD and not any(q.default is NO_VALUE for q in names[:place]):
                        yield [*(q.default for q in names[:place]), value], {}


def of_method(name: str, x: np.ndarray, args: list[Any] | None, kwargs: dict[str, Any]) -> str | None:
    """What is wrong with a call of a method, or None if it is numpy's result, or refused."""

    def use(x: Any) -> Any:
        if args is None:
            return getattr(x, name)
        bounds = isinstance(x, np.ndarray) and name == "clip"
        return getattr(x, name)(*args, **{k: weak(v, False) if bounds else v for k, v in kwargs.items()})

    expected, refusal = computed(use, Call([x]), wrap=False)
    result, error = computed(use, Call([x]), wrap=True)
    if error is not None:
        natural = isinstance(error, TypeError) and not inside_engine(error) and isinstance(refusal, TypeError)
        return None if isinstance(error, EngineError) or natural else f"{type(error).__name__}: {error}"
    if refusal is not None:
        return f"a result, where numpy raises {refusal!r}"
    if isinstance(result, Tensor):
        return difference(name, result, expected)
    same = np.array_equal(result, expected, equal_nan=np.asarray(expected).dtype.kind == "f")
    return None if same and type(result) is type(expected) else f"{result!r} for {expected!r}"


# Compiled, and gradients ----------------------------------------------------------------------------------


def sampled(key: Any, count: int) -> list[Call]:
    """Some calls that have a result, with a float64 tensor as the only one."""
    rng = np.random.default_rng(SEED)
    found = []
    for call in calls(key, rng):
        one = call.tensors[:1]
        if len(call.tensors) and not call.direct and isinstance(call.args[one[0]], np.ndarray):
            single = Call(call.args, call.kwargs, one)
            result, error = computed(of_numpy(key), single, wrap=True)
            if single.args[one[0]].dtype == np.float64 and error is None and (isinstance(result, Tensor) or result):
                found.append(single)
    return [found[i] for i in rng.permutation(len(found))[:count]]


def as_function(key: Any, call: Call) -> tuple[Callable[..., Any], np.ndarray]:
    (i,) = call.tensors
    return lambda x: joined(of_numpy(key)(*call.args[:i], x, *call.args[i + 1 :], **call.kwargs)), call.args[i]


def joined(result: Any) -> Any:
    """Several results as one vector, of truth values and positions too."""
    if not isinstance(result, (list, tuple)):
        return result
    found = [part for x in result for part in (x if isinstance(x, tuple) else (x,))]
    return np.concatenate([np.ravel(x).astype(np.float64) for x in found])


SINGLE = [
    key for key in KEYS if key not in QUESTIONS | BY_VALUES and parameters(key)[0].name not in SEQUENCES | {"condlist"}
]


@pytest.mark.parametrize("key", SINGLE, ids=name_of)
def test_compiled_calls_are_eager_ones(key):
    chosen = sampled(key, 4)
    for call in chosen:
        function, x = as_function(key, call)
        compiled = pe.compile(function)
        with np.errstate(all="ignore"):
            eager = function(Tensor(x)).numpy()
            for _ in range(2):
                np.testing.assert_allclose(compiled(x), eager, rtol=1e-15, err_msg=str(call))
    assert chosen or key in WHOLE


WHOLE = {
    *(np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert, np.left_shift, np.right_shift, np.gcd, np.lcm),
    *(np.bitwise_count, np.choose),
}
"""Functions of whole numbers or truth values: none is called with a float64 tensor."""


COMPLETED = {np.linalg.svd}
"""Whose results may have vectors that complete a basis, and have no derivative."""
JUMPS = {np.histogram, np.histogram2d, np.histogramdd, np.unwrap}
"""Whose values jump at those arguments that are tried."""


@pytest.mark.parametrize("key", [key for key in SINGLE if key not in JUMPS], ids=name_of)
def test_gradients_are_those_of_finite_differences(key):
    rng = np.random.default_rng(SEED)
    for call in sampled(key, 12):
        function, x = as_function(key, call)
        with np.errstate(all="ignore"):  # where there is no finite value, nothing is compared
            value = function(Tensor(x)).numpy()
        if (
            key in FREE_ORDER
            or value.dtype != np.float64
            or not (np.isfinite(x).all() and np.abs(x).max(initial=0) < 10 and x.size)
        ):
            continue
        if not np.isfinite(value).all() or np.unique(x).size < x.size or key is np.empty_like:
            continue
        x = x + 0.0123  # away from where functions jump
        weights, direction = rng.standard_normal(value.shape), rng.standard_normal(x.shape)

        def total(x, function=function, weights=weights):
            return np.sum(weights * function(x))

        step = 1e-6 * direction
        if key in COMPLETED and value.size > joined(key(x, full_matrices=False)).size:
            with pytest.raises(EngineError, match="any basis of what is left"):
                pe.grad(total)(x)
            continue
        with np.errstate(all="ignore"):
            estimate = (total(x + step) - total(x - step)) / 2e-6
            found = np.sum(pe.grad(total)(x) * direction)
        if np.isfinite(estimate):
            np.testing.assert_allclose(found, estimate, rtol=1e-5, atol=1e-7, err_msg=str(call))


def test_counts(capsys):
    total: Counter[str] = Counter()
    for key in KEYS:
        total += swept(key)[0]
    differences = sum(len(swept(key)[1]) for key in KEYS)
    with capsys.disabled():
        print(
            f"\n{len(KEYS)} stand-ins: {total['equal']} equal, {total['refused']} refused, differences: {differences}"
        )
    assert differences == 0
    assert total["equal"] > 5000 and total["refused"] > 4000
