"""Weights: initial values from a seed, safetensors files, and what is said about those that don't fit."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bridge import spec, weights
from bridge.errors import WeightsError
from bridge.weights import Params
from py_engine.errors import DTypeError, EngineError

MODEL = spec.load(Path(spec.__file__).parents[1] / "experiments" / "models" / "mnist-rnn.toml")


@pytest.fixture
def params(seed: int) -> Params:
    return weights.initialise(MODEL, seed)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights.safetensors"


def complaint(path: Path, model: spec.ModelSpec | None = MODEL) -> str:
    """What loading `path` for `model` says, without the name of the folder."""
    with pytest.raises(WeightsError) as caught:
        weights.load(path, model)
    return str(caught.value).replace(f"{path.parent}/", "")


# --- Initial values ---


def test_parameters_have_the_specs_names_order_shapes_and_dtype(params: Params) -> None:
    expected = [(name, parameter.shape, "float32") for name, parameter in MODEL.parameters().items()]
    assert [(name, array.shape, array.dtype.name) for name, array in params.items()] == expected


def test_glorot_weights_fill_their_interval_and_the_rest_is_zero(params: Params) -> None:
    for name, fans in {"rnn.weight": 196 + 64, "rnn.recurrent": 64 + 64}.items():
        limit, largest = np.sqrt(6 / fans), np.abs(params[name]).max()
        assert 0.99 * limit < largest <= limit * (1 + 1e-6)
    assert not params["rnn.bias"].any()


def test_a_seed_decides_all(seed: int) -> None:
    digest = weights.digest(weights.initialise(MODEL, seed))
    assert digest == weights.digest(weights.initialise(MODEL, seed))
    assert digest != weights.digest(weights.initialise(MODEL, seed + 1))


def test_float32_is_float64_rounded(seed: int) -> None:
    wide = weights.initialise(MODEL, seed, "float64")
    narrow = weights.initialise(MODEL, seed)
    assert all(np.array_equal(narrow[name], wide[name].astype(np.float32)) for name in narrow)


def test_options_of_initialisers_arrive() -> None:
    text = MODEL.dump().replace('bias_init = { name = "zeros" }', 'bias_init = { name = "uniform", low = 2, high = 3 }')
    bias = weights.initialise(spec.loads(text), 0)["rnn.bias"]
    assert bias.min() >= 2
    assert bias.max() <= 3
    assert len(set(bias.tolist())) > 1


def test_the_row_of_padding_starts_at_zero() -> None:
    model = spec.load(Path(spec.__file__).parents[1] / "experiments" / "models" / "imdb-cnn.toml")
    rows = weights.initialise(model, 0)["embedding.weight"]
    assert rows.dtype == np.float32
    assert not rows[0].any()
    assert rows[1:].all(axis=None)
    assert rows[1:].std() == pytest.approx(0.1, rel=0.01)
    weights.check(weights.initialise(model, 0), model)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(EngineError, match="seed"):
        weights.initialise(MODEL, -1)


# --- Files ---


def test_a_file_reads_back_exactly(params: Params, path: Path) -> None:
    weights.save(path, params, {"seed": "7"})
    loaded = weights.load(path, MODEL)
    assert list(loaded) == list(params)
    assert all(np.array_equal(loaded[name], params[name]) for name in params)
    assert weights.digest(loaded) == weights.digest(params)
    assert weights.metadata(path) == {"seed": "7"}


finite = hnp.arrays(st.sampled_from([np.float32, np.float64]), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(lambda name: name != "__metadata__")


@given(arrays=st.dictionaries(names, finite))
def test_any_arrays_read_back_exactly(arrays: Params, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("weights") / "any.safetensors"
    weights.save(path, arrays)
    loaded = weights.load(path)
    assert loaded.keys() == arrays.keys()
    assert all(loaded[name].tobytes() == arrays[name].tobytes() for name in arrays)
    assert all(loaded[name].shape == arrays[name].shape for name in arrays)
    assert weights.digest(loaded) == weights.digest(arrays)


def test_views_transposes_and_foreign_byte_orders_are_saved_by_value(path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    odd = {"transposed": array.T, "strided": array[::2, ::3], "big-endian": array.astype(">f4")}
    weights.save(path, odd)
    loaded = weights.load(path)
    assert all(np.array_equal(loaded[name], odd[name]) for name in odd)
    assert weights.digest(loaded) == weights.digest(odd)


def test_loaded_arrays_may_be_changed_without_changing_the_file(params: Params, path: Path) -> None:
    weights.save(path, params)
    loaded = weights.load(path, MODEL)
    for array in loaded.values():
        array += 1
    assert weights.digest(weights.load(path, MODEL)) == weights.digest(params)


def test_other_programs_read_our_files(params: Params, path: Path) -> None:
    """The format, by hand: a length, a JSON header, and the bytes that the header points into."""
    weights.save(path, params)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])["rnn.weight"]
    start, stop = entry["data_offsets"]
    values = np.frombuffer(data[8 + length + start : 8 + length + stop], "<f4")
    assert entry["dtype"] == "F32"
    assert np.array_equal(values.reshape(entry["shape"]), params["rnn.weight"])


# --- The digest ---


def test_the_digest_ignores_order_and_sees_everything_else() -> None:
    one, two = np.zeros((2, 3), np.float32), np.ones(2, np.float32)
    digest = weights.digest({"a": one, "b": two})
    assert digest == weights.digest({"b": two, "a": one})
    others = [
        {"a": one},
        {"a": two, "b": one},
        {"a": one, "c": two},
        {"a": one.T, "b": two},
        {"a": one.astype(np.float64), "b": two},
        {"a": one, "b": np.nextafter(two, np.float32(2))},
    ]
    assert digest not in [weights.digest(other) for other in others]


# --- Weights that are not the model's ---


def test_every_difference_is_named(params: Params, path: Path) -> None:
    del params["rnn.bias"]
    params["output.weight"] = params["output.weight"].T
    params["output.bias"] = params["output.bias"].astype(np.float64)
    params["rnn.bias_hh"] = np.zeros(64, np.float32)
    weights.save(path, params)
    assert complaint(path).splitlines() == [
        'weights.safetensors (for the model "mnist-rnn"): 4 problems',
        "  rnn.bias: missing, expected float32 of shape (64,)",
        "  output.weight: found shape (10, 64), expected (64, 10)",
        "  output.bias: found dtype float64, expected float32",
        "  rnn.bias_hh: not a parameter of this model, which has rnn.weight, rnn.recurrent, rnn.bias, "
        "output.weight, output.bias",
    ]


def test_a_file_of_another_model_is_refused_before_it_is_read(path: Path) -> None:
    """However large it is: here a terabyte, of which the disk holds nothing."""
    size = 2**40
    header = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    with pytest.raises(WeightsError, match="a: not a parameter of this model"):
        weights.load(path, MODEL)


def test_weights_with_a_mask_are_refused(params: Params) -> None:
    params["output.bias"] = np.ma.array(params["output.bias"], mask=True)
    with pytest.raises(DTypeError, match=r"pass x\.filled"):
        weights.check(params, MODEL)


def test_another_dtype_can_be_asked_for(seed: int, path: Path) -> None:
    weights.save(path, weights.initialise(MODEL, seed, np.float64))
    assert weights.load(path, MODEL, np.float64)["rnn.weight"].dtype == np.float64
    assert "found dtype float64, expected float32" in complaint(path)


def test_parameters_in_memory_are_checked_alike(params: Params) -> None:
    weights.check(params, MODEL)
    params.pop("output.bias")
    with pytest.raises(WeightsError, match=r"the given weights .*: output\.bias: missing"):
        weights.check(params, MODEL)


def test_weights_are_floating_point(path: Path) -> None:
    with pytest.raises(WeightsError, match="a: found dtype int64, expected float32 or float64"):
        weights.save(path, {"a": np.arange(3)})
    assert not path.exists()


def test_a_dtype_that_numpy_lacks(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    assert complaint(path, None) == "weights.safetensors: a: found dtype BF16, expected float32 or float64"


# --- Files that are not whole ---


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -1])
def test_a_truncated_file_is_named(params: Params, path: Path, kept: int) -> None:
    weights.save(path, params)
    path.write_bytes(path.read_bytes()[:kept])
    assert complaint(path).startswith("weights.safetensors: truncated, corrupt or not a safetensors file: ")


def test_a_file_of_another_kind_is_named(path: Path) -> None:
    path.write_text("these are no weights, whatever the file is called")
    assert complaint(path).startswith("weights.safetensors: truncated, corrupt or not a safetensors file: ")


def test_a_missing_file_is_named(path: Path) -> None:
    assert complaint(path) == "weights.safetensors: there is no such file"


def test_a_folder_is_named(path: Path) -> None:
    path.mkdir()
    assert complaint(path) == "weights.safetensors: this is a folder, not a safetensors file"


def test_a_folder_that_is_missing_can_not_be_written_to(params: Params, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="cannot be written: No such file or directory"):
        weights.save(tmp_path / "missing" / "weights.safetensors", params)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    params: Params, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights.save(path, params)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bridge.files.os.fsync", fail)
    with pytest.raises(WeightsError, match="cannot be written: No space left on device"):
        weights.save(path, {"a": np.zeros(3, np.float32)})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
