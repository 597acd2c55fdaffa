"""Predicting with a trained network outside the papers: `twingrad predict`."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge import registry, weights
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from bridge.worker import Worker
from experiments.errors import InputError, write
from experiments.formats import fixed
from experiments.output import Output, check_apart, check_place
from experiments.progress import table
from experiments.rows import Rows, fitted, load_dataset, load_npy, load_spec
from experiments.score import Score


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


def predict(request: Prediction, output: Output) -> None:
    """Run a network on rows, print the first of them, and write its outputs when asked to."""
    spec = load_spec(request.spec)
    if request.save is not None:
        check_place("--save", request.save, InputError)
        read: dict[str, Path | str | None] = {"SPEC": request.spec, "WEIGHTS": request.weights, "INPUT": request.input}
        check_apart({"--save": request.save}, read, InputError)
    params = weights.load(request.weights, spec)
    given = _rows_to_predict(request, spec, output)
    registry.get(request.engine).prepare()
    with Worker(request.engine, request.threads) as worker:
        worker.build(spec, params, Optimizer("sgd", 0.0), max(1, min(1000, len(given.x))), spec.dtype)
        with output.waiting(f"predicting {len(given.x):,} rows"):
            outputs = worker.predict(given.x)
        wrong = ~np.isfinite(outputs.reshape(len(outputs), -1))
        if wrong.any():
            row = int(np.argmax(wrong.any(axis=1)))
            value = outputs[row].reshape(-1)[int(np.argmax(wrong[row]))]
            raise InputError(f"{request.input}: row {row} makes {value}: look for NaN or very large numbers in it")
        known = None
        if given.y is not None:
            with output.waiting(f"evaluating {len(given.x):,} rows"):
                known = worker.evaluate(given.x, given.y)
    if request.save:  # before anything is printed, which may fail
        buffer = io.BytesIO()
        np.save(buffer, outputs, allow_pickle=False)
        write(request.save, buffer.getvalue(), InputError, "--save with another file")
    found = readable(spec, outputs)
    output.add({"row": index, **row} for index, row in enumerate(found))
    headers = ["ROW", *(key.upper() for key in (found[0] if found else {}))]
    lines = [[str(index), *map(_text, row.values())] for index, row in enumerate(found[: request.show])]
    table(output.console, headers, lines, numbers=0)
    if len(found) > request.show:
        output.say(f"and {len(found) - request.show} more rows")
    if known is not None:
        output.say(f"loss {fixed(known.loss, 4)}, {Score.of(spec, given.is_sample).text(known)} on {len(found):,} rows")
    if request.save:
        output.say(f"outputs: {request.save}")


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
        with np.errstate(over="ignore"):  # of a probability that is zero
            return [{"class": int(value > 0), "probability": float(1 / (1 + np.exp(-value)))} for value in flat[:, 0]]
    return [{"output": row.tolist()} for row in outputs]


def _rows_to_predict(request: Prediction, spec: ModelSpec, output: Output) -> Rows:
    if request.input.endswith(".npy"):
        return fitted(Rows(load_npy(Path(request.input)), None), spec, request.input)
    dataset = load_dataset(request.input, "an .npy file", request.data_dir, output)
    return fitted(Rows(dataset.x_test, dataset.y_test, dataset.source == "sample"), spec, request.input)


def _text(value: Any) -> str:
    return fixed(value, 4) if isinstance(value, float) else str(value)
