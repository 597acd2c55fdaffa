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
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.errors import EngineError

SEED = 13
A = np.array([[0.5, 0.25, 0.75], [0.125, 0.9375, 0.6]])
B = np.array([[0.3, 0.2, 0.4], [0.7, 0.8, 0.65]])
NO_VALUE = getattr(np, "_NoValue")  # noqa: B009


# Arguments ------------------------------------------------------------------------------------------------


class Subclass(np.ndarray):
    """An array of a class of its own."""


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


# What stands for an operand. Those of the first table become tensors; those of the second stand beside a tensor.
TENSORS: dict[str, Callable[[], np.ndarray]] = {
    "float64": lambda: A.copy(),
    "float32": lambda: A.astype(np.float32),
    "float16": lambda: A.astype(np.float16),
    "int64": lambda: np.array([[3, -1, 2], [0, 5, 4]]),
    "int32": lambda: np.array([[3, -1, 2], [0, 5, 4]], np.int32),
    "uint8": lambda: np.array([[3, 1, 2], [0, 5, 250]], np.uint8),
    "bool": lambda: A > 0.4,
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
    "special": lambda: np.array([[np.nan, np.inf, -np.inf], [0.0, -0.0, 1e300]]),
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
    "matrix": lambda: np.matrix(A),
    "subclass": lambda: A.view(Subclass),
    "structured": lambda: np.zeros((2, 3), [("x", float)]),
    "dates": lambda: np.zeros((2, 3), "datetime64[s]"),
    "big-endian": lambda: A.astype(">f8"),
    "float128": lambda: A.astype(np.longdouble),
}

OPERANDS = {"a", "b", "x", "x1", "x2", "y", "array", "condition", "prototype"}

AXIS = [None, 0, 1, -1, -2, 2, -3, (), (0,), (0, 1), (1, -2), (0, 0), (0, 5), [0, 1], np.int64(1), np.array(1), 1.0, "0",
        True, np.float64(0), (0.0,), 2**70]  # fmt: skip
LENGTHS = [(3, 2), (2, 3), 6, (-1,), (2, -1), (4, 2), (2, 2, 3), [3, 2], np.array([3, 2]), (), -1, (-1, -1), 6.0, (2.0, 3),
           (np.int64(3), 2), "23", (0,), (2, -2), True, (2, 3, 1), np.float64(6), 2**70]  # fmt: skip
NUMBERS = [0.25, 1, 0, -1, np.float64(0.5), np.nan, np.inf, True, "a", None, [0.1, 0.2, 0.3], np.array([0.1, 0.5, 0.9]), B]

# For each parameter the values that are tried. A parameter of a new stand-in needs its values here.
VALUES: dict[str, list[Any]] = {
    "axis": AXIS,
    "axis1": [0, 1, -1, 2, 1.0, np.int64(1), None, "0"],
    "axis2": [1, 0, -2, -3, 0.0, np.int64(0), None, "0"],
    "axes": [None, (0, 1), (1, 0), [1, 0], (-1, 0), (0, 0), (0,), (1.0, 0), 0, 1, 2, 3, -1, 1.0, ((0,), (0,)), ([1], [1]),
             (0, 0), (1, -1), ((0, 1), (0, 1)), ((1, 0), (1, 0)), ((0, 1), (1, 0)), ((0, 0), (0, 0)), ((0, -2), (0, -2)),
             ((5,), (5,)), ((-7,), (-7,)), ((0.0,), (0.0,)), "01", (np.int64(1), np.int64(0)), ((0,), (0, 1))],
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
    "decimals": [0, 1, 2, -1, 15, 400, np.int64(1), 1.0, "1", None],
    "fill_value": [2.5, 3, True, np.float64(1), np.nan, "x", None, [1.0, 2.0, 3.0], np.ones((2, 1)), np.ones(4), 1j],
    "ord": [None, 2, 1, "fro"],
    "rtol": [1e-5, 0, 0.5, "a"],
    "atol": [1e-8, 0, 0.5, np.nan, "a"],
    "equal_nan": [False, True],
    "a_min": NUMBERS,
    "a_max": NUMBERS,
    "min": NUMBERS,
    "max": NUMBERS,
    "pad_width": [1, 0, (1, 2), ((0, 1), (2, 0)), [[1, 1], [2, 2]], (3,), ((1,), (2,)), ((1, 2),), np.array([1, 2]), -1,
                  (1, -1), 1.0, (1.5, 2), "1", (1, 2, 3), {0: 1}, {-1: (1, 2)}, {0: (1, 2), 1: 3}, {5: 1}, {0: 1.0}, (),
                  np.array([1, 2], np.uint8), None],
    "mode": ["constant", "edge", "reflect", "wrap", "nonsense", None],
    "constant_values": [0, 1.5, -0.0, (1, 2), ((1, 2), (3, 4)), [[5], [6]], np.nan, np.inf, (1, 2, 3), "a", np.array(7.0),
                        True],
    "reflect_type": ["even"],
    "optimize": [False, True, "greedy"],
}  # fmt: skip
UFUNC = {"out", "where", "casting", "order", "dtype", "subok"}
MORE = {np.pad: ["constant_values", "reflect_type"]}  # what a signature hides behind **kwargs

EINSUM = [
    *("ij,kj->ik", "ij,kj", "ij, ij ->", "ij,ij->ij", "...j,kj->...k", "ij,jk", "ij,kl->il", "ij,ij->ji", "ij", "ij,kj->iz"),
    *("ij,kj->ii", "", "ij,k1->i", "i...,i...", "ij,kj->ik->k"),
]

# Operands that a function is first called with: the first of these pairs for which numpy has a result.
BASES = [
    (A, B),
    (A > 0.4, B > 0.4),
    (A, B.T),
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
        return list(inspect.signature(ops.NUMPY[key]).parameters.values())
    return list(inspect.signature(key).parameters.values())


def operand_count(key: Any) -> int:
    if key is np.einsum:
        return 3
    names = [p.name for p in parameters(key)]
    if names[0] == "arrays":
        return 1
    return sum(name in OPERANDS for name in names[:3]) if key is not np.clip else 1


def settings(key: Any) -> list[inspect.Parameter]:
    """The parameters that are no operands."""
    found = [p for p in parameters(key) if p.name not in OPERANDS and p.kind is not p.VAR_KEYWORD]
    if key is np.einsum or parameters(key)[0].name == "arrays":
        found = [p for p in found if p.kind is not p.VAR_POSITIONAL and p.name != "arrays"]
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


@lru_cache(maxsize=None)
def base_call(key: Any) -> tuple[list[Any], list[Any]]:
    if key is np.einsum:
        return [EINSUM[0], A, B], []
    needed = [VALUES[p.name][:3] for p in settings(key) if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
    for x, y in BASES:
        chosen = [[x, y]] if parameters(key)[0].name == "arrays" else [x, y][: operand_count(key)]
        if key is np.where:
            chosen = [A > 0.4, A, B]
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
    """An operand in the place of the one that stands there: a sequence of arrays is one of several of that form."""
    return [value, value] if isinstance(standing, list) else value


# Comparison -----------------------------------------------------------------------------------------------


def computed(function: Callable[..., Any], call: Call, wrap: bool) -> tuple[Any, Exception | None]:
    args = list(call.args)
    if wrap:
        for i in call.tensors:
            args[i] = [wrapped(x) for x in args[i]] if isinstance(args[i], list) else wrapped(args[i])
    else:
        args = [weak(x, call.direct and i == 0) for i, x in enumerate(args)]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **call.kwargs), None
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
    return any("py_engine" in frame.filename and "tests" not in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def difference(key: Any, result: Any, expected: Any) -> str | None:
    if isinstance(expected, (tuple, int)) and not isinstance(expected, bool):
        return None if type(result) is type(expected) and result == expected else f"{result!r} for {expected!r}"
    if not isinstance(result, Tensor):
        return f"a {type(result).__name__} for a {type(expected).__name__}"
    value, expected = result.numpy(), np.asarray(expected)
    if value.shape != expected.shape:
        return f"shape {value.shape} for {expected.shape}"
    if value.dtype != expected.dtype:
        return f"dtype {value.dtype} for {expected.dtype}"
    if key is np.empty_like:
        return None
    if expected.dtype.kind in "biu":
        same = np.array_equal(value, expected)
    else:
        eps = np.finfo(expected.dtype).eps
        same = np.allclose(value, expected, rtol=16 * eps, atol=4 * eps, equal_nan=True)
    return None if same else f"{brief_values(value)} for {brief_values(expected)}"


def brief_values(x: np.ndarray) -> str:
    return np.array2string(np.ravel(x)[:6], precision=17, separator=",").replace("\n", "")


@lru_cache(maxsize=None)
def swept(key: Any) -> tuple[Counter[str], tuple[str, ...]]:
    """How many calls are equal and refused, and what is wrong with the others."""
    counts: Counter[str] = Counter(equal=0, refused=0)
    wrong = []
    for call in calls(key, np.random.default_rng(SEED)):
        expected, refusal = computed(of_numpy(key), call, wrap=False)
        result, error = computed(ops.NUMPY[key] if call.direct else of_numpy(key), call, wrap=True)
        if isinstance(error, EngineError):
            counts["refused"] += 1
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


@pytest.mark.parametrize("key", ops.NUMPY, ids=name_of)
def test_each_call_is_numpy_s_or_refused(key):
    counts, wrong = swept(key)
    assert not wrong, f"{name_of(key)}: {counts}\n" + "\n".join(wrong)
    assert counts["equal"] > 3
