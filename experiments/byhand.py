"""Training and predicting outside the papers: `twingrad train` and `twingrad predict`."""

from __future__ import annotations

import math
import os
import stat
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge import spec as model_spec
from bridge import weights
from bridge.engine import Optimizer
from bridge.errors import TwinGradError, shown
from bridge.spec import ModelSpec
from bridge.worker import Worker
from experiments import data, papers
from experiments.data.dataset import Dataset
from experiments.formats import duration, fixed, fraction
from experiments.output import Output, check_place
from experiments.progress import download, table

MOST_BYTES = 16_000_000_000
"""Of all arrays in an .npz together, unpacked."""
MOST_ARRAYS = 100

_UNREADABLE = (OSError, ValueError, EOFError, MemoryError)


class InputError(TwinGradError):
    """Rows, labels or an output file that cannot be used; names the file, what was expected and found."""


@dataclass(frozen=True)
class Training:
    """What `train` was asked to do; `data` is a data set's name or an .npz file."""

    spec: str
    data: str
    epochs: int
    engine: str
    optimizer: str
    learning_rate: float
    batch_size: int
    seed: int
    threads: int
    weights: Path | None
    save: Path | None
    data_dir: Path | None


@dataclass(frozen=True)
class Prediction:
    """What `predict` was asked to do; `input` is a data set's name or an .npy file."""

    spec: str
    weights: Path
    input: str
    engine: str
    threads: int
    save: Path | None
    show: int
    data_dir: Path | None


@dataclass(frozen=True)
class Rows:
    """Rows to work on, with their targets where those are known."""

    x: NDArray[Any]
    y: NDArray[Any] | None


def train(request: Training, output: Output) -> None:
    """Train a network, print every epoch, and write the weights when asked to."""
    spec = load_spec(request.spec)
    _check_place(request.save)
    initial = weights.load(request.weights, spec) if request.weights else weights.initialise(spec, request.seed)
    optimizer = Optimizer(request.optimizer, request.learning_rate)
    training, test = load_rows(request.data, request.data_dir, spec, output)
    if training.y is None:
        raise InputError(f"{request.data}: no y_train, nothing to learn")
    if request.batch_size > len(training.y) > 0:
        raise InputError(
            f"--batch-size: a mini-batch of {request.batch_size:,} rows is more than the "
            f"{len(training.y):,} training rows of {request.data}; give {len(training.y)} or less"
        )
    with Worker(request.engine, request.threads) as worker:
        worker.build(spec, initial, optimizer, request.batch_size, spec.dtype)
        worker.preload(training.x, training.y)
        shown = []
        for epoch in range(1, request.epochs + 1):
            order = np.random.default_rng([request.seed, epoch]).permutation(len(training.y)).astype(np.int64)
            losses = worker.train_epoch(training.x, training.y, order)
            row: dict[str, Any] = {"epoch": epoch, "seconds": worker.seconds, "loss": float(losses.mean())}
            shown.append([str(epoch), duration(row["seconds"]), fixed(row["loss"], 4), ""])
            if test is not None and test.y is not None:
                found = worker.evaluate(test.x, test.y)
                row |= {"test_loss": found.loss, "test_accuracy": found.accuracy}
                shown[-1][3] = fraction(found.accuracy)
            output.add([row])
        trained = worker.params()
    table(output.console, ["EPOCH", "TIME", "LOSS", "TEST ACCURACY"], shown, numbers=0)
    if request.save:
        about = {"model": spec.name, "spec": spec.digest, "engine": request.engine, "epochs": str(request.epochs)}
        weights.save(request.save, trained, about)
        output.say(f"weights: {request.save}")


def predict(request: Prediction, output: Output) -> None:
    """Run a network on rows, print the first of them, and write its outputs when asked to."""
    spec = load_spec(request.spec)
    _check_place(request.save)
    params = weights.load(request.weights, spec)
    given = _rows_to_predict(request, spec, output)
    with Worker(request.engine, request.threads) as worker:
        worker.build(spec, params, Optimizer("sgd", 0.0), max(1, min(1000, len(given.x))), spec.dtype)
        outputs = worker.predict(given.x)
        known = None if given.y is None else worker.evaluate(given.x, given.y)
    found = readable(spec, outputs)
    output.add({"row": index, **row} for index, row in enumerate(found))
    headers = ["ROW", *(key.upper() for key in (found[0] if found else {}))]
    lines = [[str(index), *map(_text, row.values())] for index, row in enumerate(found[: request.show])]
    table(output.console, headers, lines, numbers=0)
    if len(found) > request.show:
        output.say(f"and {len(found) - request.show} more rows")
    if known is not None:
        output.say(f"loss {fixed(known.loss, 4)}, accuracy {fraction(known.accuracy)} on {len(found):,} rows")
    if request.save:
        _save_array(request.save, outputs)
        output.say(f"outputs: {request.save}")


def load_spec(name: str) -> ModelSpec:
    """The spec in a file, or the one of this name that comes with the project."""
    if name.endswith(".toml") or os.sep in name:
        return model_spec.load(name)
    return model_spec.load(papers.model_path(name))


def load_rows(name: str, data_dir: Path | None, spec: ModelSpec, output: Output) -> tuple[Rows, Rows | None]:
    """Training and test rows of a data set or of an .npz file, shaped as the spec's input wants them."""
    if not name.endswith(".npz"):
        dataset = _dataset(name, ".npz", data_dir, output)
        training = Rows(dataset.x_train, dataset.y_train)
        test: Rows | None = Rows(dataset.x_test, dataset.y_test)
    else:
        arrays = _load_npz(Path(name))
        if "x_train" not in arrays or "y_train" not in arrays:
            raise InputError(f"{name}: expected the arrays x_train and y_train, found {', '.join(arrays) or 'none'}")
        training = Rows(arrays["x_train"], arrays["y_train"])
        test = Rows(arrays["x_test"], arrays["y_test"]) if {"x_test", "y_test"} <= arrays.keys() else None
    return fitted(training, spec, name), fitted(test, spec, name) if test else None


def fitted(rows: Rows, spec: ModelSpec, source: str) -> Rows:
    """Rows as the spec reads them, targets as its loss wants them; InputError when they do not allow it."""
    sample = spec.input.sample
    if rows.x.dtype.kind not in "fiub":
        raise InputError(f"{source}: rows must be numbers, found dtype {rows.x.dtype}")
    if spec.input.dtype == "int64" and rows.x.dtype.kind == "f":
        raise InputError(f"{source}: model {spec.name} reads token ids (whole numbers), found dtype {rows.x.dtype}")
    if rows.x.ndim == 0 or math.prod(rows.x.shape[1:]) != math.prod(sample):
        expected = ", ".join(["N", *map(str, sample)])
        raise InputError(f"{source}: model {spec.name} expects rows of shape ({expected}), found {rows.x.shape}")
    x = np.ascontiguousarray(rows.x.reshape(len(rows.x), *sample), dtype=spec.input.dtype)
    if rows.y is None:
        return Rows(x, None)
    if len(rows.y) != len(x):
        raise InputError(f"{source}: {len(x)} rows but {len(rows.y)} labels")
    target = spec.target
    if target.kind == "classes":
        return Rows(x, rows.y.astype(np.int64) if rows.y.dtype.kind in "iu" else rows.y)
    if math.prod(rows.y.shape[1:]) != math.prod(target.shape):
        expected = ", ".join(["N", *map(str, target.shape)])
        raise InputError(f"{source}: model {spec.name} expects targets of shape ({expected}), found {rows.y.shape}")
    return Rows(x, rows.y.reshape(len(rows.y), *target.shape).astype(spec.dtype))


def readable(spec: ModelSpec, outputs: NDArray[Any]) -> list[dict[str, Any]]:
    """What outputs mean under the spec's loss: class and probability, yes or no, or the values themselves."""
    flat = outputs.reshape(len(outputs), -1)
    if spec.loss.op == "softmax_cross_entropy" and outputs.ndim == 2:
        shifted = np.exp(flat - flat.max(axis=1, keepdims=True, initial=-np.inf))
        probabilities = shifted / shifted.sum(axis=1, keepdims=True)
        classes = probabilities.argmax(axis=1)
        return [
            {"class": int(number), "probability": float(row[number])}
            for number, row in zip(classes, probabilities, strict=True)
        ]
    if spec.loss.op == "binary_cross_entropy" and flat.shape[1] == 1:
        return [{"class": int(value > 0), "probability": float(1 / (1 + np.exp(-value)))} for value in flat[:, 0]]
    return [{"output": row.tolist()} for row in outputs]


def _rows_to_predict(request: Prediction, spec: ModelSpec, output: Output) -> Rows:
    if request.input.endswith(".npy"):
        return fitted(Rows(_load_npy(Path(request.input)), None), spec, request.input)
    dataset = _dataset(request.input, ".npy", request.data_dir, output)
    return fitted(Rows(dataset.x_test, dataset.y_test), spec, request.input)


def _dataset(name: str, file: str, data_dir: Path | None, output: Output) -> Dataset:
    """The data set of this name; `file` is the kind of file that could have been meant."""
    if name not in data.LOADERS:
        raise InputError(f"{name}: neither an {file} file nor a data set ({', '.join(sorted(data.LOADERS))})")
    dataset = data.load(name, data_dir, progress=download(output.console))
    if dataset.notice:
        output.say(dataset.notice)
    return dataset


def _load_npy(path: Path) -> NDArray[Any]:
    try:
        _check_file(path)
        loaded = np.load(path, allow_pickle=False)
    except _UNREADABLE as error:
        raise InputError(f"{path}: not an array that can be read: {shown(str(error))}") from None
    if not isinstance(loaded, np.ndarray):
        raise InputError(f"{path}: holds several arrays; expected an .npy file with one")
    return loaded


def _load_npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        _check_file(path)
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MOST_BYTES:
            raise InputError(f"{path}: unpacks to {size:,} bytes; expected at most {MOST_BYTES:,}")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files[:MOST_ARRAYS]}
    except (*_UNREADABLE, NotImplementedError, RuntimeError, AttributeError, zlib.error, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: not an .npz file that can be read: {shown(str(error))}") from None
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}


def _check_file(path: Path) -> None:
    """Raise `InputError` for what is no regular file: another would be waited for, or is not to be read twice."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such file") from None
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: this is {'a folder' if stat.S_ISDIR(mode) else 'no regular file'}")


def _save_array(path: Path, array: NDArray[Any]) -> None:
    import io

    from bridge.files import write_atomically
    from experiments.results import explain

    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    try:
        write_atomically(path, buffer.getvalue())
    except OSError as error:
        raise InputError(explain(error, path, "--save with another file")) from error


def _check_place(path: Path | None) -> None:
    if path is not None:
        check_place("--save", path, InputError)


def _text(value: Any) -> str:
    return fixed(value, 4) if isinstance(value, float) else str(value)
