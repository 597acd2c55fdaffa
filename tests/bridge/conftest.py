"""Small models and random data for the tests of the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge import engine, spec, weights
from bridge.engine import Optimizer, Session
from bridge.spec import ModelSpec
from bridge.weights import Params
from bridge.worker import Worker

Data = tuple[NDArray[Any], NDArray[Any]]


@pytest.fixture
def model() -> Callable[..., ModelSpec]:
    """A spec of the given layers: `model([4, 3], {"op": "dense", "units": 2}, loss="mean_squared_error")`.

    It reads token ids where there is an embedding.
    """

    def make(
        shape: Sequence[int], *layers: Mapping[str, Any], loss: str = "softmax_cross_entropy", dtype: str = "float32"
    ) -> ModelSpec:
        named = [{"id": f"layer{number}", **layer} for number, layer in enumerate(layers)]
        header = {"format": "twingrad-model", "version": 1, "opset": 2, "name": "small"}
        reads_tokens = any(layer["op"] == "embedding" for layer in named)
        input = {"shape": ["N", *shape], "dtype": "int64" if reads_tokens else dtype}
        return spec.parse({**header, "input": input, "layers": named, "loss": {"op": loss}})

    return make


@pytest.fixture
def published() -> Callable[[str], ModelSpec]:
    """One of the papers' networks, by name."""
    return lambda name: spec.load(Path(spec.__file__).parents[1] / "experiments" / "models" / f"{name}.toml")


@pytest.fixture
def paper_model(published: Callable[[str], ModelSpec]) -> ModelSpec:
    """The network of the papers mnist-rnn-d and -e."""
    return published("mnist-rnn")


@pytest.fixture
def small_paper_model(model: Callable[..., ModelSpec]) -> ModelSpec:
    """The same with 3 time steps, 5 features, 6 units and 4 classes."""
    return model(
        [15],
        {"id": "segments", "op": "reshape", "shape": [3, 5]},
        {"id": "rnn", "op": "rnn", "units": 6},
        {"id": "output", "op": "dense", "units": 4},
    )


@pytest.fixture
def random_params(rng: np.random.Generator) -> Callable[..., Params]:
    """Parameters without a zero among them, so that no gradient is zero for want of a bias or a recurrence."""

    def make(model: ModelSpec, dtype: str = "float32", scale: float = 0.3) -> Params:
        shapes = {name: parameter.shape for name, parameter in model.parameters().items()}
        params = {name: (scale * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}
        for name in params:
            if name.endswith(".running_var"):
                params[name] = abs(params[name]) + 0.1
        weights.check(params, model, dtype)
        return params

    return make


@pytest.fixture
def random_data(rng: np.random.Generator) -> Callable[..., Data]:
    """Features, and targets of the kind that the model's loss takes."""

    def make(model: ModelSpec, rows: int, dtype: str = "float32") -> Data:
        if model.vocabulary is None:
            x = rng.standard_normal((rows, *model.input.sample)).astype(dtype)
        else:
            x = rng.integers(0, model.vocabulary, (rows, *model.input.sample))
        shape = (rows, *model.target.shape)
        if model.target.kind == "classes":
            return x, rng.integers(0, model.output[-1], shape)
        if model.loss.op == "binary_cross_entropy":
            return x, rng.integers(0, 2, shape).astype(dtype)
        return x, rng.standard_normal(shape).astype(dtype)

    return make


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[str], Worker]]:
    """The worker of an engine: one for all tests of a module, started by the first that asks for it."""
    started: dict[str, Worker] = {}
    with ExitStack() as stack:

        def worker(name: str) -> Worker:
            if name not in started:
                started[name] = stack.enter_context(Worker(name))
            return started[name]

        yield worker


@pytest.fixture
def session_of(workers: Callable[[str], Worker], request: pytest.FixtureRequest) -> Callable[..., Session]:
    """A session of any engine, by name; skips the test where the engine can't be used.

    PyTorch and Julia, which must not share a process, are in one worker each: with a new session the old one ends.
    """

    def make(
        name: str, model: ModelSpec, params: Params, optimizer: Optimizer, batch_size: int, dtype: str = ""
    ) -> Session:
        dtype = dtype or model.dtype
        if "julia" in name:
            request.getfixturevalue("julia")
        elif not (found := engine.availability(name)).ok:
            pytest.skip(found.reason)
        if engine.get(name).distributions == ("numpy",):
            return engine.get(name).build(model, params, optimizer, batch_size, dtype, 1)
        worker = workers(name)
        worker.build(model, params, optimizer, batch_size, dtype)
        return worker

    return make
