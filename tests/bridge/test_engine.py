"""The registry of engines, what it says of those that can't be used, and the settings of optimizers."""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import registry, weights
from bridge.errors import EngineUnavailableError, SpecError, WeightsError
from bridge.registry import Registered
from bridge.session import OPTIMIZERS, Optimizer, Session
from bridge.spec import ModelSpec
from py_engine import network
from py_engine.errors import ConfigurationError, DTypeError, LabelError, NonFiniteError, ShapeError

IN_PROCESS = ("numpy", "torch")

# --- The registry ---


def test_every_engine_has_a_row_and_an_adapter_file() -> None:
    ours = ["numpy", "julia"]
    others = ["torch", "torch-compile", "tensorflow", "tensorflow-xla", "jax", "flux", "lux", "simplechains"]
    assert registry.names() == [*ours, *others]
    folder = Path(registry.__file__).parent / "adapters"
    modules = {registry.get(name).module for name in registry.names()}
    # What engines share is in a separate file beside the adapters.
    parts = {"bridge.adapters.julia_package"}
    assert modules | parts == {
        f"bridge.adapters.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"
    }


def test_an_unknown_engine_is_named_with_the_known_ones() -> None:
    with pytest.raises(EngineUnavailableError, match=r"no engine 'torhc'.*did you mean 'torch'.*numpy, julia, torch"):
        registry.get("torhc")


def test_asking_about_engines_imports_none_of_them() -> None:
    code = (
        "import sys; from bridge import registry\n"
        "for name in registry.names(): registry.availability(name), registry.get(name).label\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensorflow', 'jax', 'juliacall')))"
    )
    root = Path(registry.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_an_available_engine_tells_its_versions() -> None:
    found = registry.availability("numpy")
    assert found.ok
    assert not found.reason
    assert found.versions == {"numpy": np.__version__}


def test_an_engine_without_its_package_says_how_to_install_it() -> None:
    row = Registered("other", "Other", "nowhere:Session", ("numpy", "no-such-package"), extra="other")
    found = row.availability()
    assert not found.ok
    assert found.reason == "no-such-package is not installed: pip install 'twingrad[other]'"
    with pytest.raises(EngineUnavailableError, match="engine other: no-such-package is not installed"):
        row.load()


def test_an_engine_that_cannot_be_imported_says_why() -> None:
    row = Registered("broken", "Broken", "bridge.no_such_adapter:Session", ("numpy",))
    assert row.availability().ok
    with pytest.raises(EngineUnavailableError, match="engine broken is installed but can't be imported: No module"):
        row.load()


def test_functions_of_a_programmers_own_are_for_julia_alone() -> None:
    assert [name for name in registry.names() if registry.get(name).functions] == ["julia"]
    with pytest.raises(ConfigurationError, match="engine numpy takes no functions of a programmer's own"):
        registry.get("numpy").function("x -> x", "", True, 1)


def test_torch_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert (
        "needs a C++ compiler (g++ or clang++ or c++): install one, or set CXX"
        in registry.availability("torch-compile").reason
    )
    monkeypatch.setenv("CXX", "my-compiler")
    assert "(my-compiler)" in registry.availability("torch-compile").reason
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    assert "no Python.h in /nowhere" in registry.availability("torch-compile").reason


# --- Optimizers ---


def test_optimizers_have_the_settings_of_the_numpy_engines() -> None:
    assert set(OPTIMIZERS) == set(network.OPTIMIZERS)
    for name in OPTIMIZERS:
        ours = Optimizer(name, 0.25)
        theirs = network.OPTIMIZERS[name](0.25)
        assert ours.settings() == {setting: getattr(theirs, setting) for setting in ours.settings()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sdg", "learning_rate": 1.0}, r"no optimizer 'sdg' \(did you mean 'sgd'\?\)"),
        ({"name": "sgd", "learning_rate": -1.0}, "sgd: learning_rate must be a number at least 0, found -1.0"),
        ({"name": "sgd", "learning_rate": float("nan")}, "sgd: learning_rate"),
        ({"name": "sgd", "learning_rate": "fast"}, "sgd: learning_rate .* found 'fast'"),
        ({"name": "sgd", "learning_rate": 1.0, "momentum": 1.0}, "momentum must be a number at least 0 and below 1"),
        ({"name": "sgd", "learning_rate": 1.0, "nesterov": True}, "nesterov needs a momentum"),
        ({"name": "sgd", "learning_rate": 1.0, "nesterov": "no"}, "sgd: nesterov must be True or False, found 'no'"),
        ({"name": "sgd", "learning_rate": None}, "sgd: learning_rate must be a number at least 0, found None"),
        ({"name": "sgd", "learning_rate": 1.0, "momentum": (0.5,)}, r"momentum must be a number .* found \(0\.5,\)"),
        (
            {"name": "adam", "learning_rate": 1.0, "momentum": 0.9},
            "adam has no setting 'momentum'; it has learning_rate",
        ),
        ({"name": "adam", "learning_rate": 1.0, "betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"name": "adam", "learning_rate": 1.0, "betas": (0.9,)}, "betas must be two numbers"),
        ({"name": "adam", "learning_rate": 1.0, "betas": 0.9}, r"betas must be two numbers, found 0\.9"),
        ({"name": "rmsprop", "learning_rate": 1.0, "clip_norm": 0.0}, "clip_norm must be a number above 0"),
    ],
)
def test_a_wrong_optimizer_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Optimizer(**arguments)  # type: ignore[arg-type]


# --- What every engine refuses ---


@pytest.fixture(params=[*IN_PROCESS, "julia", "tensorflow", "jax"])
def session(
    request: pytest.FixtureRequest, small_paper_model: ModelSpec, random_params: Callable, session_of: Callable
) -> Session:
    return session_of(request.param, small_paper_model, random_params(small_paper_model), Optimizer("sgd", 0.1), 4)


@pytest.mark.parametrize("name", [*IN_PROCESS, "julia", "tensorflow", "jax"])
def test_a_batch_larger_than_the_data_is_all_of_it(
    name: str, small_paper_model: ModelSpec, random_params: Callable, random_data: Callable, session_of: Callable
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 10)
    found = []
    for size in (64, 10):
        session = session_of(name, small_paper_model, params, Optimizer("sgd", 0.1), size)
        losses = session.train_epoch(x, y, np.arange(10)[::-1].copy())
        assert len(losses) == 1
        found.append((losses[0], session.evaluate(x, y).loss))
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert found[0][1] < found[0][0], "it has learned"


def test_a_label_out_of_range_is_named(session: Session, small_paper_model: ModelSpec, random_data) -> None:
    x, y = random_data(small_paper_model, 10)
    y[7] = 4
    for call in (lambda: session.train_epoch(x, y, np.arange(10)), lambda: session.evaluate(x, y)):
        with pytest.raises(LabelError, match=r"labels from 0 to 3 .*actual 4 in row 7"):
            call()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda x, y: (x.astype("float64"), y), DTypeError, "expected float32, found float64"),
        (lambda x, y: (x[:, :-1], y), ShapeError, r"expected shape \(N, 15\), found \(10, 14\)"),
        (lambda x, y: (x[:0], y[:0]), ShapeError, "x has no rows"),
        (lambda x, y: (x, y[:-1]), ShapeError, "x has 10 rows and y has 9"),
        (lambda x, y: (x, y.astype("float32")), LabelError, "expected integer labels, actual dtype float32"),
        (lambda x, y: (np.ma.array(x, mask=x > 0), y), DTypeError, r"pass x\.filled"),
        (lambda x, y: (x, np.ma.array(y, mask=y > 0)), DTypeError, r"pass x\.filled"),
        (lambda x, y: (None, y), DTypeError, "x: expected a numpy array, found NoneType"),
    ],
)
def test_data_that_does_not_fit_is_refused(
    session: Session, small_paper_model: ModelSpec, random_data, spoil, error, message
) -> None:
    x, y = spoil(*random_data(small_paper_model, 10))
    with pytest.raises(error, match=message):
        session.train_epoch(x, y, np.arange(10))
    with pytest.raises(error, match=message):
        session.loss_and_gradients(x, y)


@pytest.mark.parametrize("dtype", [">f4", "float16", "int64", "nonsense"])
@pytest.mark.parametrize("name", [*IN_PROCESS, "tensorflow", "jax"])
def test_networks_compute_in_float32_or_float64(
    name: str, dtype: str, small_paper_model: ModelSpec, random_params: Callable
) -> None:
    params = random_params(small_paper_model)
    if dtype != "nonsense":
        params = {name: array.astype(dtype) for name, array in params.items()}
    with pytest.raises(ConfigurationError, match=f"float32 or float64, found dtype '{dtype}'"):
        registry.get(name).build(small_paper_model, params, Optimizer("sgd", 0.1), 4, dtype, 1)
    with pytest.raises(ConfigurationError, match=f"float32 or float64, found dtype '{dtype}'"):
        weights.initialise(small_paper_model, 0, dtype)


@pytest.mark.parametrize("order", [[0, 10], [-1, 3], [], [[0, 1]], [0.0]])
def test_a_wrong_order_is_refused(session: Session, small_paper_model: ModelSpec, random_data, order) -> None:
    x, y = random_data(small_paper_model, 10)
    with pytest.raises(ShapeError, match="order"):
        session.train_epoch(x, y, np.array(order))


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_step(
    session: Session, small_paper_model: ModelSpec, random_data
) -> None:
    x, y = random_data(small_paper_model, 10)
    x[5] = np.nan
    with pytest.raises(NonFiniteError, match=r"step 2 of"):  # batches of 4, counted from 1
        session.train_epoch(x, y, np.arange(10))


def test_a_session_says_what_computes_its_products(session: Session) -> None:
    said = session.linear_algebra()
    assert said == session.linear_algebra().strip() and said


def test_data_of_any_layout_is_read_right(session: Session, small_paper_model: ModelSpec, random_data) -> None:
    x, y = random_data(small_paper_model, 10)
    expected = session.predict(x)
    x.flags.writeable = y.flags.writeable = False
    np.testing.assert_array_equal(session.predict(np.asfortranarray(x)), expected)
    order = np.arange(10)
    order.flags.writeable = False
    assert len(session.train_epoch(x, y.astype("int32"), order[::-1])) == 3


@pytest.fixture(params=["numpy", "torch", "julia"])
def reader(request: pytest.FixtureRequest, model, random_params: Callable, session_of: Callable) -> Session:
    """A session of a network that reads token ids."""
    embedding = {"op": "embedding", "vocabulary": 30, "dimension": 3}
    made = model([5], embedding, {"op": "flatten"}, {"op": "dense", "units": 1}, loss="binary_cross_entropy")
    return session_of(request.param, made, random_params(made), Optimizer("sgd", 0.1), 4)


def test_token_ids_may_be_any_integers_in_any_layout(reader: Session, rng: np.random.Generator) -> None:
    ids, y = rng.integers(0, 30, (10, 5)), np.zeros(10, np.float32)
    expected = reader.predict(ids)
    for dtype in ("int8", "uint8", "int32", "uint64"):
        np.testing.assert_array_equal(reader.predict(np.asfortranarray(ids.astype(dtype))), expected)
    assert len(reader.train_epoch(ids.astype("uint16"), y, np.arange(10))) == 3


@pytest.mark.parametrize("wrong", [-1, 30, 2**62])
def test_a_token_id_out_of_range_is_named(reader: Session, wrong: int) -> None:
    ids, y = np.zeros((10, 5), np.int64), np.zeros(10, np.float32)
    ids[7, 3] = wrong
    message = rf"token id {wrong} in row 7 at position 3 is not one of the 30 of the vocabulary, 0\.\.29"
    for call in (
        lambda: reader.train_epoch(ids, y, np.arange(10)),
        lambda: reader.evaluate(ids, y),
        lambda: reader.predict(ids),
        lambda: reader.loss_and_gradients(ids, y),
    ):
        with pytest.raises(ShapeError, match=message):
            call()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda ids: ids.astype("float32"), DTypeError, "expected token ids .int64., found float32"),
        (lambda ids: ids[:, :-1], ShapeError, r"expected shape \(N, 5\), found \(10, 4\)"),
        (lambda ids: ids > 3, DTypeError, "expected token ids .int64., found bool"),
    ],
)
def test_what_is_no_token_ids_is_refused(reader: Session, spoil, error, message) -> None:
    with pytest.raises(error, match=message):
        reader.predict(spoil(np.zeros((10, 5), np.int64)))


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow", "julia"])
def test_a_batch_of_one_row_has_no_variance(name: str, model, random_params, random_data, session_of) -> None:
    made = model([5], {"op": "dense", "units": 3}, {"id": "norm", "op": "batch_norm"})
    session = session_of(name, made, random_params(made), Optimizer("sgd", 0.1), 4)
    x, y = random_data(made, 9)
    with pytest.raises(ConfigurationError, match="norm"):
        session.train_epoch(x, y, np.arange(9))
    with pytest.raises(ConfigurationError, match="norm"):
        session.loss_and_gradients(x[:1], y[:1])
    assert np.isfinite(session.train_epoch(x, y, np.arange(8))).all()
    assert np.isfinite(session.predict(x[:1])).all()


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_layer_or_an_optimizer_that_an_adapter_has_not_is_refused_by_name(
    name: str, small_paper_model: ModelSpec, random_params, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (available := registry.availability(name)).ok:
        pytest.skip(available.reason)
    adapter = importlib.import_module(registry.get(name).module)
    layers = network.LAYERS if name == "numpy" else adapter._LAYERS
    optimizers = network.OPTIMIZERS if name == "numpy" else adapter._OPTIMIZERS
    params = random_params(small_paper_model)
    with monkeypatch.context() as patched, pytest.raises(SpecError) as caught:
        patched.delitem(layers, "dense")
        registry.get(name).build(small_paper_model, params, Optimizer("sgd", 0.1), 4, "float32", 1)
    assert str(caught.value) == f'the model "small": layers[2] (id "output"): the engine {name} has no dense'
    monkeypatch.delitem(optimizers, "adamw")
    with pytest.raises(ConfigurationError, match=f"{name} has no optimizer adamw; it has sgd, rmsprop, adam$"):
        registry.get(name).build(small_paper_model, params, Optimizer("adamw", 0.1), 4, "float32", 1)


# --- Techniques, and parameters of an engine's own ---


def test_techniques_reach_the_engines_that_have_them(small_paper_model: ModelSpec, random_params, random_data) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 10)
    losses = [
        registry.get("numpy")
        .build(small_paper_model, params, Optimizer("sgd", 0.1), 4, "float32", 1, techniques)
        .train_epoch(x, y, np.arange(10))
        for techniques in (None, {}, {"simplify": False})
    ]
    np.testing.assert_array_equal(losses[0], losses[1])
    np.testing.assert_allclose(losses[0], losses[2], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [("numpy", "no technique 'magic'"), ("torch", "engine torch has no techniques to set, found magic")],
)
def test_techniques_that_there_are_not_are_refused(
    name: str, message: str, small_paper_model: ModelSpec, random_params
) -> None:
    params = random_params(small_paper_model)
    with pytest.raises(ConfigurationError, match=message):
        registry.get(name).build(small_paper_model, params, Optimizer("sgd", 0.1), 4, "float32", 1, {"magic": True})


def test_our_engines_start_from_the_initialisers_of_the_spec(small_paper_model: ModelSpec) -> None:
    own = registry.get("numpy").own_parameters(small_paper_model, 3, "float64")
    expected = weights.initialise(small_paper_model, 3, "float64")
    assert weights.digest(own) == weights.digest(expected)


@pytest.mark.parametrize("name", IN_PROCESS)
def test_weights_that_do_not_belong_to_the_model_are_refused(
    name: str, small_paper_model: ModelSpec, random_params
) -> None:
    params = random_params(small_paper_model)
    params["more"] = params.pop("rnn.bias")
    with pytest.raises(WeightsError, match=r"rnn\.bias: missing[\s\S]*more: not a parameter"):
        registry.get(name).build(small_paper_model, params, Optimizer("sgd", 0.1), 4, "float32", 1)


def test_a_network_of_frozen_parameters_is_refused(model, random_params) -> None:
    made = model(
        [4], {"op": "embedding", "vocabulary": 3, "dimension": 2, "trainable": False}, loss="mean_squared_error"
    )
    with pytest.raises(ConfigurationError, match="nothing to train"):
        registry.get("torch").build(made, random_params(made), Optimizer("sgd", 0.1), 4, "float32", 1)


def test_a_network_without_parameters_is_refused(model) -> None:
    with pytest.raises(ConfigurationError, match='the model "small" has no parameters: there is nothing to train'):
        registry.get("torch").build(model([4], {"op": "flatten"}), {}, Optimizer("sgd", 0.1), 4, "float32", 1)


@pytest.mark.parametrize(("batch_size", "threads"), [(0, 1), (4, 0), (2.5, 1), ("4", 1), (4, True)])
def test_sizes_that_are_no_positive_integers_are_refused(
    small_paper_model: ModelSpec, random_params, batch_size: int, threads: int
) -> None:
    params = random_params(small_paper_model)
    with pytest.raises(ConfigurationError, match="at least 1"):
        registry.get("numpy").build(small_paper_model, params, Optimizer("sgd", 0.1), batch_size, "float32", threads)


@pytest.mark.parametrize("optimizer", ["sgd", None, Optimizer])
def test_what_is_no_optimizer_is_refused(small_paper_model: ModelSpec, random_params, optimizer) -> None:
    params = random_params(small_paper_model)
    with pytest.raises(ConfigurationError, match=r'expected an Optimizer, such as Optimizer\("sgd", 0\.01\), found'):
        registry.get("numpy").build(small_paper_model, params, optimizer, 4, "float32", 1)


def test_the_version_of_every_installed_package_is_the_one_that_python_tells() -> None:
    installed = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
    assert {name: registry.version(name) for name in installed} == installed and "numpy" in installed
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        registry.version("no-such-package")


CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
RNN_OF_SUMS = {"op": "rnn", "activation": "identity"}


@pytest.mark.campaign
@pytest.mark.parametrize("optimizer", [Optimizer("adamw", 0.1), Optimizer("sgd", 0.1, weight_decay=0.5)], ids=str)
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        *itertools.product(("torch", "jax", "tensorflow", "julia"), (RNN_OF_SUMS, {"op": "lstm"}, {"op": "gru"})),
        *([("torch-compile", RNN_OF_SUMS)] if CAMPAIGN else []),  # takes 45 s to compile, the others more
    ],
    ids=str,
)
def test_what_a_single_step_does_not_read_decays_as_all_else(
    name: str, layer: dict[str, Any], optimizer: Optimizer, model, random_params, random_data, session_of
) -> None:
    """A recurrent layer does not read `recurrent` in the first step of a sequence."""
    made = model([1, 3], {"id": "layer", "units": 3, **layer}, {"op": "dense", "units": 2})
    params = random_params(made)
    x, y = random_data(made, 8)
    found = []
    for one in ("numpy", name):
        session = session_of(one, made, params, optimizer, 4)
        session.train_epoch(x, y, np.arange(8))
        found.append(session.params())
    assert (found[0]["layer.recurrent"] != params["layer.recurrent"]).any()
    for key, array in found[0].items():
        np.testing.assert_allclose(found[1][key], array, rtol=1e-4, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "tensorflow", "julia"])
def test_the_row_of_padding_begins_at_zero_whatever_initialises_the_others(name: str, model, workers) -> None:
    if not (found := registry.availability(name)).ok:
        pytest.skip(found.reason)
    made = model([4], {"id": "words", "op": "embedding", "vocabulary": 9, "dimension": 3, "padding_index": 2},
                 {"op": "flatten"}, {"op": "dense", "units": 2})  # fmt: skip
    weight = workers(name).own_parameters(made, 1, "float32")["words.weight"]
    assert not weight[2].any() and weight[[0, 1, 3, 8]].any(1).all()
