"""What must not pass on the way to Julia, or must not matter: layouts, exceptions in mid-step, code in strings, torch.

What every engine refuses in the same words is in test_engine.py. Here programs run Julia in their own process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge import julia as bridge_julia
from bridge import spec
from bridge.errors import JuliaUnavailableError, SpecError
from bridge.libjulia.find import Julia
from bridge.spec import ModelSpec

ROOT = Path(bridge_julia.__file__).parents[2]

Made = Callable[..., Any]
Run = Callable[..., None]

BEGINNING = """
import os
import numpy as np
from bridge import julia, registry, spec
from bridge.session import Optimizer

rng = np.random.default_rng({seed})
x, y, order = rng.standard_normal((12, 15)).astype(np.float32), rng.integers(0, 4, 12), rng.permutation(12)

def build(**arguments):
    return julia.build("model.toml", **{{"optimizer": Optimizer("adam", 0.01), "batch_size": 4}} | arguments)

def refused(work, kind, *words):
    try:
        work()
    except kind as error:
        assert all(part in str(error) for part in words), error
    else:
        raise AssertionError(words)
"""


@pytest.fixture
def folder(small_paper_model: ModelSpec, tmp_path: Path) -> Path:
    """Where the code finds its model."""
    (tmp_path / "model.toml").write_text(small_paper_model.dump(), encoding="utf-8")
    return tmp_path


@pytest.fixture
def run_beside_others(julia_process: Made, folder: Path, seed: int) -> Run:
    """The same as `run`, in one process for all tests that may share one."""
    return lambda code: julia_process(BEGINNING.format(seed=seed) + textwrap.dedent(code), folder)


@pytest.fixture
def run(julia: Julia, folder: Path, seed: int) -> Run:
    """Runs Python code that has data and `build` for a model with 3 time steps, 5 features, 6 units and 4 classes."""

    def run(code: str) -> None:
        program = BEGINNING.format(seed=seed) + textwrap.dedent(code)
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", program],
            cwd=folder,
            env={**os.environ, "TWINGRAD_JULIA": julia.executable, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return run


# Arrays.


def test_arrays_of_every_layout_are_read_right_and_never_written(run_beside_others: Run) -> None:
    run_beside_others(
        """
        def everything(x, y, order, params=None):
            model = build(params=params)
            loss, gradients = model.loss_and_gradients(x, y)
            losses = model.train_epoch(x, y, order)
            evaluation = model.evaluate(x, y)
            found = [loss, *gradients.values(), losses, *model.params().values(), model.predict(x), evaluation.loss]
            model.close()
            return found

        def in_the_middle(array):
            wide = np.full((*array.shape[:-1], 3 * array.shape[-1]), 7, array.dtype)
            wide[..., 1::3] = array
            return wide[..., 1::3]

        def off_by_a_byte(array):
            view = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
            view[...] = array
            assert not view.flags.aligned
            return view

        def read_only(array):
            array = array.copy()
            array.flags.writeable = False
            return array

        layouts = {
            "Fortran": lambda array: array.copy(order="F"),
            "backwards": lambda array: array[::-1].copy()[::-1],
            "in the middle": in_the_middle,
            "off by a byte": off_by_a_byte,
            "read-only": read_only,
        }
        params = build().params()
        expected = everything(x, y, order, params)
        for name, layout in layouts.items():
            given = [layout(x), layout(y), layout(order)]
            weights = {key: layout(array) for key, array in params.items()}
            found = everything(*given, weights)
            for one, other in zip(found, expected):
                assert np.array_equal(one, other), name
            for array, before in zip((*given, *weights.values()), (x, y, order, *params.values())):
                assert np.array_equal(array, before), name
        for labels in (y.astype(np.int32), y.astype(np.uint8), y.astype(">i8"), y.tolist()):
            assert np.array_equal(everything(x, labels, order, params)[0], expected[0])
        """
    )


def test_what_is_no_array_of_the_right_kind_is_named(run_beside_others: Run) -> None:
    run_beside_others(
        """
        from bridge.errors import WeightsError
        from py_engine.errors import DTypeError, LabelError, ShapeError

        model = build()
        before = model.params()
        refused(lambda: model.predict(x.tolist()), DTypeError, "x: expected a numpy array, found list", "np.asarray(x")
        refused(lambda: model.predict(x.astype(">f4")), DTypeError, "x: expected float32, found >f4")
        refused(lambda: model.predict(x.astype(object)), DTypeError, "x: expected float32, found object")
        refused(lambda: model.predict(x[0, 0, ...]), ShapeError, "x: expected shape (N, 15), found ()")
        refused(lambda: model.predict(x.T), ShapeError, "x: expected shape (N, 15), found (15, 12)")
        refused(lambda: model.evaluate(x, np.array(3)), LabelError, "y: expected one target for every row")
        refused(lambda: model.evaluate(x, y[:, None]), LabelError, "(12, 1)")
        refused(lambda: model.train_epoch(x, y, order > 3), ShapeError, "order: expected one or more row numbers")
        refused(lambda: build(params={**before, "rnn.bias": np.zeros(7, np.float32)}), WeightsError, "rnn.bias", "(7,)")
        refused(lambda: build(params=before, dtype="float64"), WeightsError, "rnn.bias: found dtype float32")
        for name, array in model.params().items():
            assert np.array_equal(array, before[name])
        assert np.isfinite(model.train_epoch(x, y, order)).all()
        """
    )


# Exceptions.


@pytest.mark.parametrize("threads", [1, 2])
def test_an_exception_in_mid_step_comes_with_its_message_and_the_session_goes_on(threads: int, run: Run) -> None:
    run(
        f"""
        model, twin = build(threads={threads}), build(threads={threads})
        model._steps_per_call = 3  # the epoch is one call of Julia
        here = julia.runtime()
        # More special than the engine's own method: the third step, which starts after 8 rows, fails.
        here.evaluate('''
            on_fire = Ref(true)
            @eval TwinGrad.NETWORK function run!(shard::Shard{{Float32}}, data::Data, start::Int)
                Main.on_fire[] && start == 8 && error("the " * "processor is on fire")
                invoke(run!, Tuple{{Shard,Data,Int}}, shard, data, start)
            end
            nothing''')
        refused(lambda: model.train_epoch(x, y, order), julia.JuliaError, "the processor is on fire")
        twin.train_epoch(x, y, order[:8])

        def assert_same():
            for name, array in twin.params().items():
                assert np.array_equal(model.params()[name], array), name

        assert_same()  # as they were before the step
        here.evaluate("on_fire[] = false; nothing")
        for _ in range(2):
            assert np.array_equal(model.train_epoch(x, y, order[8:]), twin.train_epoch(x, y, order[8:]))
        assert_same()
        assert np.array_equal(model.predict(x), twin.predict(x))
        """
    )


# Code in strings.

CODE = [
    '"); touch("pwned"); ("',
    '$(touch("pwned"))',
    '"$(touch("pwned"))"',
    '"""; touch("pwned"); """',
    "`touch pwned`",
    'a\nend\nend\ntouch("pwned")\nbegin\n',
    'var"x"; touch("pwned") #',
    '#=\n=# @eval touch("pwned")',
    "\x00'\\",
    "é日本𝄞",
]


@pytest.mark.parametrize("code", CODE)
def test_no_spec_has_code_for_an_id_or_a_name(code: str, small_paper_model: ModelSpec) -> None:
    honest = spec.loads(small_paper_model.dump()).model_dump()
    for text in (code, f"a{code}"):
        with pytest.raises(SpecError, match="name"):
            spec.parse({**honest, "name": text})
        with pytest.raises(SpecError, match="id"):
            spec.parse({**honest, "layers": [{**honest["layers"][0], "id": text}, *honest["layers"][1:]]})


def test_an_id_that_came_past_the_spec_is_bytes_to_julia_and_never_evaluated(run_beside_others: Run) -> None:
    run_beside_others(
        f"""
        from bridge import weights
        from bridge.adapters.julia import JuliaSession
        from py_engine.errors import NonFiniteError

        honest = spec.load("model.toml")
        spoiled = np.full_like(x, np.nan)
        for code in {CODE!r}:
            layers = tuple(layer.model_copy(update={{"id": code + layer.id}}) for layer in honest.layers)
            made = honest.model_copy(update={{"name": code, "layers": layers}})
            model = JuliaSession(made, weights.initialise(made, 0), Optimizer("sgd", 0.1), 4)
            model.train_epoch(x, y, order)
            refused(lambda: model.train_epoch(spoiled, y, order), NonFiniteError, "the loss is NaN")
            assert list(model.params()) == [code + name for name in honest.parameters()]
            model.close()
            assert os.listdir() == ["model.toml"], code
        """
    )


def test_descriptions_that_are_cut_or_wrong_are_refused(run_beside_others: Run) -> None:
    run_beside_others(
        """
        import re
        from bridge.adapters import julia as adapter

        model = build()
        _, entries = adapter.load_engine(1)
        text = adapter.describe(spec.load("model.toml"), Optimizer("sgd", 0.1), 4, np.dtype("float32"), 1)
        vector = np.zeros(1024, np.float32)

        def create(text):
            status = entries.create(text, len(text), vector.ctypes.data, len(vector))
            model._raise(-status if status < 0 else 0)

        for end in range(len(text)):
            refused(lambda: create(text[:end]), Exception, "ends too early")
        refused(lambda: create(text), Exception, "the parameter vector must have")
        numbers = list(re.finditer(rb"(?<=[=,])[0-9.]+", text))
        assert len(numbers) > 10
        for found in numbers:  # nothing of the wrong size is made, and Julia does not crash
            for value in (-(2**63), -1, 2**40, 2**63 - 1, 10**40, "x", "", "1,", "%00"):
                wrong = text[: found.start()] + str(value).encode() + text[found.end() :]
                refused(lambda: create(wrong), Exception)
        for place in range(len(text)):  # whatever is there, it is read or refused, and never run
            byte = (b" ", b"=", b"%", b"\\n", b"\\0", b"\\xff")[place % 6]
            refused(lambda: create(text[:place] + byte + text[place + 1 :]), Exception)
        assert os.listdir() == ["model.toml"]
        assert np.isfinite(model.train_epoch(x, y, order)).all()
        """
    )


def test_a_layer_reads_the_line_before_it_and_another_only_where_that_is_there(run_beside_others: Run) -> None:
    run_beside_others(
        """
        from bridge.adapters.julia import describe, load_engine

        _, entries = load_engine(1)
        honest = spec.load("model.toml")
        text = describe(honest, Optimizer("sgd", 0.1), 4, np.dtype("float32"), 1).decode()
        session, optimizer, techniques, *layers = text.splitlines()
        assert [line.split()[:3] for line in layers] == [["layer", f"id={x.id}", f"op={x.op}"] for x in honest.layers]
        first, second, third = (layer.id for layer in honest.layers)

        def message(*lines):
            text = "".join(f"{line}\\n" for line in (session, optimizer, techniques, *lines)).encode()
            assert entries.create(text, len(text), np.zeros(8, np.float32).ctypes.data, 8) < 0
            return entries.last_message()

        def reading(inputs):
            return message(*layers[:2], f"{layers[2]} inputs={inputs}")

        whole = message(*layers)
        assert "the parameter vector must have" in whole
        assert message(layers[0], f"{layers[1]} inputs={first}", f"{layers[2]} inputs={second}") == whole
        name = f'layer "{third}" ({honest.layers[2].op}): inputs: '
        assert reading("nowhere") == f'{name}there is no layer "nowhere" before this one; there are: {first}, {second}'
        assert f'there is no layer "{third}" before' in reading(f"{second},{third}")
        assert reading(first).startswith("the parameter vector must have")  # of this graph
        assert "expected one input, got 2 of size" in reading(f"{first},{second}")
        assert message(layers[0], layers[1] + " damaged", layers[2]).startswith("line 5, layer: expected name=value")
        """
    )


# PyTorch. An empty module stands in for it: what counts is the name.


def test_the_engine_does_not_start_beside_torch(run: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    run(
        """
        import torch

        refused(build, julia.JuliaUnavailableError, "this process has imported torch", "bridge.worker.Worker")
        refused(build, julia.JuliaUnavailableError, "this process has imported torch")
        """
    )


def test_torch_is_not_imported_beside_the_engine(run: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    run(
        """
        from bridge.errors import EngineUnavailableError

        model = build()
        refused(lambda: __import__("bridge.adapters.torch"), ImportError, "this process runs Julia", "Worker")
        if registry.availability("torch").ok:
            refused(registry.get("torch").load, EngineUnavailableError, "engine torch", "this process runs Julia")
        assert np.isfinite(model.train_epoch(x, y, order)).all()
        """
    )


# No Julia.


def test_a_julia_that_does_not_work_is_named(
    broken_julia: str, small_paper_model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(JuliaUnavailableError) as caught:
        bridge_julia.build(small_paper_model)
    assert broken_julia in str(caught.value)
    assert str(tmp_path / "broken" / "julia") in str(caught.value)
    assert caught.value.exit_code == 2
