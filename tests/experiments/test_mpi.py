"""`mpiexec -n 2 twingrad train`: the same weights as in one process, said once, and nobody waits for a lost rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bridge import registry
from experiments import cli, mpi, parallel_speed
from experiments.errors import InputError
from py_engine.errors import ParameterError

MPIEXEC = Path(sys.executable).parent / "mpiexec"
ROOT = Path(__file__).resolve().parents[2]
ENGINES = tuple(name for name in registry.names() if registry.get(name).communicates)

NETWORK = """
format = "twingrad-model"
version = 1
opset = 2
name = "small"
input = { shape = ["N", 8] }
loss = { op = "softmax_cross_entropy" }
layers = [
    { id = "hidden", op = "dense", units = 12 },
    { id = "tanh", op = "activation", activation = "tanh" },
    { id = "output", op = "dense", units = 3 },
]
"""

DROPOUT = '    { id = "dropout", op = "dropout", rate = 0.5 },\n'
CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Path:
    """A folder with a network and rows for it."""
    pytest.importorskip("mpi4py")
    if not MPIEXEC.exists():
        pytest.skip("needs an MPI: pip install mpich")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.toml").write_text(NETWORK)
    x = rng.standard_normal((250, 8)).astype(np.float32)
    y = np.argmax(x[:, :3], axis=1)
    np.savez("rows.npz", x_train=x[:205], y_train=y[:205], x_test=x[205:], y_test=y[205:])
    return tmp_path


BASE = ["train", "net.toml", "--data", "rows.npz", "--batch-size", "41", "--threads", "1", "--learning-rate", "0.1"]


def command(ranks: int, *options: str) -> list[str]:
    # Tests of ranks on one machine: more of them than it has cores.
    return [str(MPIEXEC), "-n", str(ranks), sys.executable, "-m", "experiments", *BASE, *options]


def variables() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def together(ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(ranks, *options), env=variables(), capture_output=True, text=True, timeout=300, check=False
    )


def close(one: str, other: str, tolerance: float) -> None:
    found, expected = load_file(one), load_file(other)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(("engine", "ranks"), [("numpy", 3), *((name, 2) for name in ENGINES)])
def test_weights_are_those_of_one_process(engine: str, ranks: int, request: pytest.FixtureRequest) -> None:
    if engine == "julia":
        request.getfixturevalue("julia")
    options = ["--engine", engine, "--epochs", "2", "--momentum", "0.9"]
    assert cli.invoke([*BASE, *options, "--save", "one.safetensors"]) == 0
    more = ["--save", "several.safetensors", "--json", "said.json", "--checkpoint", "kept.safetensors"]
    done = together(ranks, *options, *more)
    assert done.returncode == 0, done.stderr
    assert any(name.startswith("state.") for name in load_file("kept.safetensors"))
    assert done.stdout.count("EPOCH") == 1 and Path("said.json").exists()
    close("several.safetensors", "one.safetensors", 1e-5)


def test_a_checkpoint_resumes_on_another_number_of_processes() -> None:
    options = [
        "--optimizer",
        "adam",
        "--schedule",
        "step",
        "--step-epochs",
        "2",
        "--validation",
        "0.2",
        "--patience",
        "9",
    ]
    assert cli.invoke([*BASE, *options, "--epochs", "4", "--save", "one.safetensors"]) == 0
    options += ["--checkpoint", "kept.safetensors", "--resume"]
    for ranks, epochs in ((2, "2"), (3, "3")):
        done = together(ranks, *options, "--epochs", epochs)
        assert done.returncode == 0, done.stderr
    assert cli.invoke([*BASE, *options, "--epochs", "4", "--save", "several.safetensors"]) == 0
    close("several.safetensors", "one.safetensors", 1e-5)


@pytest.mark.campaign
@pytest.mark.skipif(
    not CAMPAIGN, reason="does not apply: threads stand for processes in tests/py_engine/test_parallel.py"
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_with_dropout_resumes_as_if_undisturbed(engine: str, place: Path) -> None:
    """Batches of 41 rows do not divide: the processes are at other places of their streams of random numbers."""
    (place / "net.toml").write_text(NETWORK.replace('    { id = "output"', DROPOUT + '    { id = "output"'))
    options = ["--engine", engine, "--momentum", "0.9"]
    for ranks in ("2", "3"):
        for epochs, more in (
            ("4", ["--checkpoint", f"whole-{ranks}"]),
            *((n, ["--checkpoint", ranks, "--resume"]) for n in "24"),
        ):
            done = together(int(ranks), *options, *more, "--epochs", epochs, "--save", f"{more[1]}.safetensors")
            assert done.returncode == 0, done.stderr
        found, expected = load_file(ranks), load_file(f"whole-{ranks}")
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)
    # On another number of processes it continues, with other masks.
    assert together(2, *options, "--checkpoint", "3", "--resume", "--epochs", "5").returncode == 0
    assert cli.invoke([*BASE, *options, "--checkpoint", "2", "--resume", "--epochs", "5"]) == 0


def test_of_the_numbers_of_a_julia_session_each_process_takes_its_own() -> None:
    from bridge.adapters.julia import _own_numbers

    # Updates, mini-batches since, and two layers with two numbers and none.
    rows = np.array([[6, 9, 0, 2, 5, 6, 0], [6, 9, 0, 2, 7, 8, 0]])
    assert _own_numbers(rows, 0).tolist() == [9, 0, 2, 5, 6, 0]
    assert _own_numbers(rows, 1).tolist() == [9, 0, 2, 7, 8, 0]
    assert _own_numbers(rows, 2).tolist() == [9, 0, 0, 0]
    assert _own_numbers(rows[0, 1:], 0).tolist() == [9, 0, 2, 5, 6, 0]
    assert _own_numbers(rows[0, 1:], 1).tolist() == [9, 0, 0, 0]
    with pytest.raises(ParameterError, match="a vector, or one for each process"):
        _own_numbers(np.zeros((1, 1, 1), np.int64), 0)


def test_a_mistake_is_said_and_ends_all() -> None:
    done = together(2, "--epochs", "1", "--engine", "torch")
    assert done.returncode != 0
    assert "engine torch does not train on several processes" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_lost_process_ends_all_within_seconds_and_says_how_to_resume(place: Path) -> None:
    options = ["--epochs", "10000", "--checkpoint", str(place / "kept.safetensors")]
    with subprocess.Popen(
        command(2, *options), env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            limit = time.monotonic() + 120
            while not (place / "kept.safetensors").exists():
                assert process.poll() is None and time.monotonic() < limit
                time.sleep(0.1)
            ranks = sorted(ranks_of(place))
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode != 0
    assert not ranks_of(place)
    assert "when one is lost all end, and the same command resumes from" in said
    before = load_file("kept.safetensors")
    assert before  # whole, whatever was lost


def ranks_of(place: Path) -> list[int]:
    """The processes that train with the checkpoint in this folder, mpiexec's own apart."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(place / "kept.safetensors") in words and "mpiexec" not in words[0] and "hydra" not in words[0]:
            found.append(int(path.parent.name))
    return found


def test_processes_that_would_train_something_else_are_named() -> None:
    def with_digests(*digests: str) -> Any:
        return type("Communicator", (), {"allgather": lambda _, __: list(digests)})()

    mpi.check_agreement(with_digests("a", "a", "a"), "a")
    with pytest.raises(InputError, match="process 2 has other data, weights, options or another checkpoint"):
        mpi.check_agreement(with_digests("a", "a", "b"), "a")


def test_a_process_by_itself_needs_no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*mpi.SIZES, *mpi.RANKS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert mpi.world() is None
    monkeypatch.setenv("PMI_SIZE", "1")
    assert mpi.world() is None
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(InputError, match=r"without mpi4py.*pip install 'twingrad\[mpi\]'"):
        mpi.world()


def test_an_mpi_that_sees_fewer_processes_than_mpiexec_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        COMM_WORLD = type("Communicator", (), {"Get_size": lambda _: 1})()
        Get_library_version = staticmethod(lambda: "Invented MPI 1.0, of today")

    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", type(sys)("mpi4py"))
    sys.modules["mpi4py"].MPI = World  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"started 4 processes, and mpi4py's MPI \(Invented MPI 1.0\) sees 1"):
        mpi.world()


# What several machines would bring ------------------------------------------------------------------------------------


def test_what_machines_bring_follows_from_step_bytes_and_network() -> None:
    step, size = 1e-3, 1_000_000
    assert parallel_speed.speed_up(step, size, 1) == 1
    # Ten messages of latency 1 µs in a ring of six, and 10 / 6 of a megabyte at 1 GB/s.
    expected = step + 10e-6 + 10 / 6 * 1e-3
    assert parallel_speed.step_seconds(step, size, 6, 1e-6, 1e9) == pytest.approx(expected)
    assert parallel_speed.speed_up(step, size, 6, 1e-6, 1e9) == pytest.approx(6 * step / expected)
    found = [parallel_speed.speed_up(step, size, machines) for machines in (2, 4, 8)]
    assert found == sorted(found) and all(number < machines for number, machines in zip(found, (2, 4, 8), strict=True))


@pytest.mark.campaign
@pytest.mark.skipif(not CAMPAIGN, reason="does not apply: two processes are measured below")
def test_all_reduces_after_steps_and_during_them_are_measured() -> None:
    command = [str(MPIEXEC), "-n", "2", sys.executable, "-m", "experiments.parallel_speed", "--overlap"]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[2:]] == [
        "| mnist-rnn",
        "| mnist-cnn",
        "| imdb-cnn",
    ]


def test_two_processes_are_measured_and_drawn(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [str(MPIEXEC), "-n", "2", sys.executable, "-m", "experiments.parallel_speed", "--save", "points.json"],
        env=variables(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| mnist-rnn | numpy |") == 1
    parallel_speed.main(["--points", "points.json", "--figure", "speed.svg"])
    assert capsys.readouterr().out == done.stdout
    assert "<svg" in (place / "speed.svg").read_text()
    for point in json.loads((place / "points.json").read_text()):
        assert point["machines"] == 2 and min(point[name] for name in ("alone", "together", "all_reduce")) > 0
