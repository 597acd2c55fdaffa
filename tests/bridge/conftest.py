"""Small models and random data for the tests of the engines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bridge import registry, spec, weights
from bridge.libjulia.find import Julia
from bridge.libjulia.sysimage import usable
from bridge.session import Optimizer, Session
from bridge.spec import ModelSpec
from bridge.weights import Params
from bridge.worker import Worker

Data = tuple[NDArray[Any], NDArray[Any]]

SGD = Optimizer("sgd", 0.1)

ROOT = Path(__file__).parents[2]
JULIA_ENGINE = ROOT / "julia_engine"

JULIA_GROUPS = {
    "interpreted": (
        "ad_chain_rules",
        "ad_checkpoint",
        "ad_checks",
        "ad_cond",
        "ad_constants",
        "ad_copies",
        "ad_differentiation_interface",
        "ad_interface",
        "ad_jacobian",
        "ad_julia_functions",
        "ad_nesting",
        "ad_rules",
        "ad_vmap",
        "ad_watched",
        "ad_while",
        "package",
    ),
    "optimised": (
        "ad_convolution",
        "ad_kernels",
        "ad_memory",
        "ad_tiles",
        "ad_transforms",
        "ad_winograd",
        "network_training",
    ),
    "quick": (
        "ad_compiled",
        "ad_duals",
        "ad_forward",
        "ad_ops",
        "ad_plan",
        "ad_sparse",
        "ad_special_values",
        "ad_vectors",
        "ad_written",
        "campaign",
        "network_layers",
        "network_parallel",
        "versions",
    ),
    "sweep": ("ad_sweep",),
    "training": (
        "ad_loops",
        "ad_tape",
        "network_embedding",
        "network_entry",
    ),
}
"""The files of `julia_engine/test` in groups: each a process and a `test_julia_suite_*.py`, which says how it compiles.

Every process compiles what its files share with the others once more: hence few groups. To interpret what runs once
takes less time than to compile it. Files that call the same functions many times, or functions of dual numbers, are
compiled, and those that try the kernels' own arithmetic need the compiler's optimisation.
"""

JULIA_GROUP_SECONDS = None if os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign" else 1800
"""The limit of a group, which takes about four minutes on an idle machine; a campaign has none."""


@pytest.fixture(scope="session")
def model() -> Callable[..., ModelSpec]:
    """A spec of the given layers: `model([4, 3], {"op": "dense", "units": 2}, loss="mean_squared_error")`.

    It reads token ids where there is an embedding.
    """

    def make(
        shape: Sequence[int],
        *layers: Mapping[str, Any],
        loss: str | Mapping[str, Any] = "softmax_cross_entropy",
        dtype: str = "float32",
    ) -> ModelSpec:
        named = [{"id": f"layer{number}", **layer} for number, layer in enumerate(layers)]
        header = {"format": "twingrad-model", "version": 1, "opset": spec.OPSET, "name": "small"}
        reads_tokens = any(layer["op"] == "embedding" for layer in named)
        input = {"shape": ["N", *shape], "dtype": "int64" if reads_tokens else dtype}
        found = {"op": loss} if isinstance(loss, str) else loss
        return spec.parse({**header, "input": input, "layers": named, "loss": found})

    return make


@pytest.fixture
def published() -> Callable[[str], ModelSpec]:
    """One of the papers' networks, by name."""
    return lambda name: spec.load(Path(spec.__file__).parents[1] / "experiments" / "models" / f"{name}.toml")


@pytest.fixture(scope="session")
def small_paper_model(model: Callable[..., ModelSpec]) -> ModelSpec:
    """The network of the papers mnist-rnn-d and -e with 3 time steps, 5 features, 6 units and 4 classes."""
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
            labels = rng.integers(0, model.output[-1], shape)
            ignored = model.loss.settings().get("ignored_class")
            if ignored is not None:
                labels[rng.random(shape) < 0.3] = ignored
            return x, labels
        if model.loss.op == "binary_cross_entropy":
            return x, rng.integers(0, 2, shape).astype(dtype)
        return x, rng.standard_normal(shape).astype(dtype)

    return make


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[str], Worker]]:
    """The worker of an engine: one for all tests of a module, started by the first that asks for it.

    XLA compiles quickly for them, since each of the small networks is run a few times only.
    """
    started: dict[str, Worker] = {}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip())

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
        elif not (found := registry.availability(name)).ok:
            pytest.skip(found.reason)
        if registry.get(name).distributions == ("numpy",):
            return registry.get(name).build(model, params, optimizer, batch_size, dtype, 1)
        worker = workers(name)
        worker.build(model, params, optimizer, batch_size, dtype)
        return worker

    return make


ONE_BY_ONE = """
import contextlib, io, json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    asked, said, failure = json.loads(line), io.StringIO(), ""
    os.chdir(asked["folder"])
    with contextlib.redirect_stdout(said):
        try:
            exec(compile(asked["program"], "<program>", "exec"), {"__name__": "program"})
        except BaseException:
            failure = traceback.format_exc()
    print(json.dumps([said.getvalue(), failure]), file=answers, flush=True)
"""
"""Runs the programs that it is given line by line, each in its own names, and says what each printed or ended in."""


@pytest.fixture(scope="module")
def julia_process(julia: Julia, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, Path], str]]:
    """Runs Python programs in one process, in which Julia starts once: `julia_process(program, folder)`.

    It is for programs that may follow others: what each of them defines is its own, but Julia is the same. Returns what
    the program prints; fails with its traceback, or with the last words of the process.
    """
    log = tmp_path_factory.mktemp("julia") / "stderr.txt"
    variables = {"TWINGRAD_JULIA": julia.executable, "PYTHONPATH": str(ROOT)}
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", ONE_BY_ONE],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            encoding="utf-8",
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        given, answers = process.stdin, process.stdout

        def run(program: str, folder: Path) -> str:
            print(json.dumps({"program": textwrap.dedent(program), "folder": str(folder)}), file=given, flush=True)
            answer = answers.readline()
            if not answer:
                pytest.fail(f"the process ended with code {process.wait()}:\n{log.read_text(encoding='utf-8')}")
            said, failure = json.loads(answer)
            if failure:
                pytest.fail(failure)
            return str(said)

        yield run
        process.kill()


@pytest.fixture
def compare_with_torch(
    session_of: Callable[..., Session], random_params: Callable[..., Params], random_data: Callable[..., Data]
) -> Callable[..., None]:
    """Compares what an engine and PyTorch compute of a model, at first, unless in training alone, and after two steps.

    ‖a - b‖ / ‖b‖ is at most 1e-10 in float64 and 1e-5 in float32, for every tensor.
    """

    def compare(
        name: str,
        made: ModelSpec,
        dtype: str = "float64",
        optimizer: Optimizer = SGD,
        batch: int = 6,
        rows: int = 12,
        training_alone: bool = False,
    ) -> None:
        params, (x, y) = random_params(made, dtype), random_data(made, rows, dtype)
        computed = []
        for engine_name in (name, "torch"):
            session = session_of(engine_name, made, params, optimizer, batch, dtype)
            found: dict[str, Any] = {}
            if not training_alone:  # which is compiled apart
                loss, gradients = session.loss_and_gradients(x, y)
                found = {"output": session.predict(x), "loss": loss}
                found |= {f"gradient of {key}": gradient for key, gradient in gradients.items()}
            found["losses"] = session.train_epoch(x, y, np.arange(rows)[::-1])
            found |= session.params()
            if rows % batch:  # evaluating is compiled, too, and takes its time
                evaluation = session.evaluate(x, y)
                found |= {"loss afterwards": evaluation.loss, "accuracy": evaluation.accuracy}
            computed.append(found)
        assert list(computed[0]) == list(computed[1])
        for key, expected in computed[1].items():
            assert np.shape(computed[0][key]) == np.shape(expected), key
            distance, size = np.linalg.norm(computed[0][key] - expected), np.linalg.norm(expected)
            tolerance = 1e-5 if dtype == "float32" else 1e-10
            assert np.all(np.isnan(expected)) or distance <= tolerance * max(size, 1e-3), f"{key}: {distance / size}"

    return compare


@pytest.fixture
def julia_groups() -> Mapping[str, Sequence[str]]:
    """The groups of the Julia engine's test files."""
    return JULIA_GROUPS


@pytest.fixture
def interpret(julia: Julia) -> tuple[str, ...]:
    """Julia's option to interpret what is not compiled beforehand: none where the engine is not in a system image.

    Nor is there one after 1.5, where `compiling` of runtests.jl can't have single functions compiled.
    """
    return ("--compile=min",) if usable(julia)[0] and julia.release < (1, 6) else ()


@pytest.fixture
def run_julia_tests(julia: Julia, tmp_path: Path) -> Callable[..., dict[str, int]]:
    """Run files of `julia_engine/test` in one Julia process, and return how many tests each of them holds.

    Julia's own options come after the files. Where there is a system image with the engine, Julia starts with it.

    Fails with the files' names and the lines that failed.
    """

    def run(files: Sequence[str], *options: str) -> dict[str, int]:
        program = str(JULIA_ENGINE / "test" / "runtests.jl")
        image, _ = usable(julia)
        options = (*options, f"--sysimage={image}") if image else options
        # Two threads: the trainer's own need at least that many.
        command = [julia.executable, "--startup-file=no", f"--project={JULIA_ENGINE}", *options, program, *files]
        log = tmp_path / "runtests.log"
        with log.open("wb") as file:
            try:
                code = subprocess.run(
                    command,
                    env=julia.environment(2),
                    cwd=tmp_path,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=JULIA_GROUP_SECONDS,
                ).returncode
                ending = f"ended with code {code}"
            except subprocess.TimeoutExpired:
                code, ending = None, f"was not done after {JULIA_GROUP_SECONDS} seconds"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print("\n".join([f"{julia}", *(line for line in lines if line.startswith("file "))]))
        counts = {
            found[1]: int(found[2]) for line in lines if (found := re.match(r"file (\S+): (\d+) tests passed", line))
        }
        if code or code is None or set(counts) != set(files) or not all(counts.values()):
            missing = ", ".join(name for name in files if not counts.get(name))
            pytest.fail(f"{' '.join(command)}\n{ending}; not passed: {missing}\n" + "\n".join(_failures(lines)))
        return counts

    return run


def _failures(lines: list[str]) -> list[str]:
    """The tests that failed, each below the name of its file; without any, the last lines."""
    found: list[str] = []
    for number, line in enumerate(lines):
        if re.match(r"file \S+$", line):
            found.append(line)
        elif "Test Failed at" in line or "Error During Test" in line or line.startswith(("ERROR", "signal")):
            found += lines[number : number + 8]
    shown = [line for line, after in zip(found, [*found[1:], "file"], strict=True) if not _starts_file(line, after)]
    return shown or lines[-60:]


def _starts_file(line: str, after: str) -> bool:
    """Whether a line names a file in which nothing failed."""
    return line.startswith("file ") and after.startswith("file")
