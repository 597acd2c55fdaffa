"""Weights: the parameters of a model, in safetensors files that every engine reads.

All engines of a comparison start from one file, never from one seed: each would make something else of it.
Names and layout are those of `bridge.spec`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_safetensors

from bridge.errors import MOST_COUNTED, WeightsError, printable, shown
from bridge.files import write_atomically
from bridge.spec import ModelSpec
from py_engine.ad.tensor import check_class
from py_engine.errors import ConfigurationError
from py_engine.network import initialisers

__all__ = ["Params", "check", "digest", "float_dtype", "initialise", "load", "metadata", "opened", "save"]

Params = dict[str, NDArray[Any]]
"""Parameters by their full names, such as ``rnn.weight``."""

_DTYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype(np.float32), "F64": np.dtype(np.float64)}
"""What parameters may be, by safetensors' names."""

MOST_HEADER_BYTES = 10_000_000
"""Of a weights file: the names, shapes and places of its tensors. A model of 1,000 layers has 500,000."""
_LONGEST_NAME = 140
"""Characters of a tensor's name that a message repeats; a parameter's has at most this many."""


def initialise(spec: ModelSpec, seed: int, dtype: DTypeLike | None = None) -> Params:
    """Initial values for all parameters of `spec`, in its dtype unless another is given.

    Each depends on the seed and on its own name, shape and initialiser, and on nothing else in the spec.
    """
    parameters = {
        name: initialisers.ParameterSpec(p.shape, p.initialiser.model_dump(), p.fan_in, p.fan_out)
        for name, p in spec.parameters().items()
    }
    params = initialisers.initialise_all(parameters, seed, float_dtype(dtype or spec.dtype))
    for name, parameter in spec.parameters().items():
        if parameter.zero_row is not None:
            params[name][parameter.zero_row] = 0
    return params


def save(
    path: str | os.PathLike[str],
    params: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `params` as safetensors, whole or not at all, with `metadata` of any kind, such as a seed."""
    arrays = {name: _portable(array) for name, array in params.items()}
    unfit = [_misfit(name, array.dtype) for name, array in arrays.items() if array.dtype not in _DTYPES.values()]
    if unfit:
        raise WeightsError(str(path), unfit)
    try:
        write_atomically(path, to_safetensors(arrays, dict(metadata) if metadata else None))
    except OSError as error:
        raise WeightsError(str(path), [f"cannot be written: {error.strerror or error}"]) from None


def load(path: str | os.PathLike[str], spec: ModelSpec | None = None, dtype: DTypeLike | None = None) -> Params:
    """Read parameters, as arrays that may be changed.

    With a `spec` they come in its order and must be exactly its parameters, in its dtype unless another is
    given. Raises `WeightsError`, naming the file and every tensor at fault.
    """
    with opened(path) as file:
        names = file.keys()
        kinds = {name: file.get_slice(name).get_dtype() for name in names}
        unfit = [_misfit(name, kind) for name, kind in kinds.items() if kind not in _DTYPES][: MOST_COUNTED + 1]
        if unfit:
            raise WeightsError(str(path), unfit)
        if spec is not None:  # before anything is read, which may be larger than memory
            parts = {name: file.get_slice(name) for name in names}
            found = {name: (tuple(part.get_shape()), _DTYPES[kinds[name]]) for name, part in parts.items()}
            _raise_for(_misfits(found, spec, float_dtype(dtype or spec.dtype)), spec, str(path))
        params = {name: file.get_tensor(name) for name in names}
    if spec is None:
        return params
    check(params, spec, dtype, str(path))
    return {name: params[name] for name in spec.parameters()}


def metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The free text that `save` put beside the parameters."""
    with opened(path) as file:
        return dict(file.metadata() or {})


def check(
    params: Mapping[str, NDArray[Any]],
    spec: ModelSpec,
    dtype: DTypeLike | None = None,
    source: str = "the given weights",
) -> None:
    """Raise `WeightsError` unless `params` are those of `spec`: the same names, shapes and dtype, and finite.

    And `ConfigurationError` where that dtype is neither float32 nor float64, or has not this machine's order of bytes.
    """
    kind = float_dtype(dtype or spec.dtype)
    for array in params.values():
        check_class(array)
    found = {name: (array.shape, array.dtype) for name, array in params.items()}
    _raise_for(_misfits(found, spec, kind) or _not_finite(params, spec), spec, source)


def digest(params: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 over the names, dtypes, shapes and values of all parameters, whatever their order."""
    sha = hashlib.sha256()
    for name in sorted(params):
        array = _portable(params[name])
        sha.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        sha.update(array.data)
    return sha.hexdigest()


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A safetensors file, with its faults as `WeightsError`."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise WeightsError(str(path), ["this is a folder, not a safetensors file"])
        if not stat.S_ISREG(status.st_mode):  # the format is read from several places at once
            raise WeightsError(str(path), ["this is no regular file: save what comes out of it to one"])
        with Path(path).open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
        if length > min(MOST_HEADER_BYTES, status.st_size):
            raise WeightsError(
                str(path),
                [
                    f"truncated, corrupt or not a safetensors file: a header of {length:,} bytes, expected at most "
                    f"{MOST_HEADER_BYTES:,} and within the file"
                ],
            )
        with safe_open(path, "numpy") as file:
            yield file
    except FileNotFoundError:
        raise WeightsError(str(path), ["there is no such file"]) from None
    except OSError as error:
        raise WeightsError(str(path), [f"cannot be read: {error.strerror or error}"]) from None
    except SafetensorError as error:
        raise WeightsError(str(path), [f"truncated, corrupt or not a safetensors file: {shown(str(error))}"]) from None


def _portable(array: NDArray[Any]) -> NDArray[Any]:
    """The same values in C order and little-endian, as files and digests have them."""
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def float_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """float32 or float64, as whatever names it; `ConfigurationError` for all else, in another order of bytes, too."""
    with contextlib.suppress(TypeError):
        if (found := np.dtype(dtype)) in _DTYPES.values():
            return found
    raise ConfigurationError(f"networks compute in float32 or float64, found dtype {dtype!r}")


def _raise_for(problems: Sequence[str], spec: ModelSpec, source: str) -> None:
    if problems:
        raise WeightsError(f'{source} (for the model "{spec.name}")', problems[: MOST_COUNTED + 1])


def _misfit(name: str, dtype: object) -> str:
    return f"{_short(name)}: found dtype {dtype}, expected float32 or float64"


def _short(name: str) -> str:
    """A tensor's name in a file, which may be anything, cut where it is long."""
    return printable(name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…")


def _misfits(
    found: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], spec: ModelSpec, dtype: np.dtype[Any]
) -> list[str]:
    """What is wrong with the names, shapes and dtypes of tensors."""
    expected = {name: parameter.shape for name, parameter in spec.parameters().items()}
    problems = []
    for name, shape in expected.items():
        if name not in found:
            problems.append(f"{name}: missing, expected {dtype} of shape {shape}")
        elif found[name][0] != shape:
            problems.append(f"{name}: found shape {found[name][0]}, expected {shape}")
        elif found[name][1] != dtype:
            problems.append(f"{name}: found dtype {found[name][1]}, expected {dtype}")
    more = itertools.islice((name for name in found if name not in expected), MOST_COUNTED + 1)
    known = ", ".join(expected)
    return problems + [f"{_short(name)}: not a parameter of this model, which has {known}" for name in more]


def _not_finite(params: Mapping[str, NDArray[Any]], spec: ModelSpec) -> list[str]:
    problems = []
    for name in spec.parameters():
        if _is_surely_finite(params[name]):
            continue
        wrong = np.flatnonzero(~np.isfinite(params[name]))
        if len(wrong):
            place = np.unravel_index(wrong[0], params[name].shape)
            problems.append(f"{name}: found {params[name][place]} at {list(map(int, place))}, expected finite numbers")
    return problems


def _is_surely_finite(array: NDArray[Any]) -> bool:
    """Whether the sum of the squares is finite: then all numbers are. It takes no memory, and may overflow."""
    if not array.flags.c_contiguous:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(float(np.vdot(array, array)))
