"""Workers: the same results as in one's own process, and an end that leaves nothing behind.

A stand-in engine does on demand what real ones do by accident: print, hang, crash, start processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import registry, weights, worker
from bridge.errors import EngineUnavailableError, SpecError, WeightsError, WorkerError
from bridge.registry import Registered
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from bridge.worker import Worker, environment
from py_engine.errors import ConfigurationError, DTypeError, LabelError, ParameterError, ShapeError

ROOT = Path(worker.__file__).parents[1]
SGD = Optimizer("sgd", 0.1)
PATIENCE = 20.0

STAND_IN = '''
"""An engine whose session does what the first number of its data says."""
import ctypes, os, subprocess, sys, time
import numpy as np
from bridge.errors import SpecError
from bridge.session import Evaluation

print("a library greets")

class Session:
    def __init__(self, **arguments):
        os.write(1, b"a C library greets\\n")
        self.kept = []
        self.preloaded = 0.5
    def preload(self, x, y):
        self.preloaded = float(x.sum() + y.sum())
    def train_epoch(self, x, y, order):
        return np.arange(len(order), dtype=float)
    def evaluate(self, x, y):
        return Evaluation(self.preloaded, float("nan"))
    def predict(self, x):
        match int(x.flat[0]):
            case 1:
                print("famous last words", file=sys.stderr, flush=True)
                os._exit(3)
            case 2:
                ctypes.string_at(0)
            case 3:
                raise KeyError("an unexpected thing")
            case 4:
                time.sleep(600)
            case 5:
                return np.array([subprocess.Popen(["sleep", "600"]).pid])
            case 6:
                self.kept.append(np.ones(2**20, dtype=np.float64))
            case 8:
                raise SpecError('the model "small"', ["layers[0]: this one is unknown"])
            case 7:
                return np.array([len(sys.stdin.read())])
        return x
    def loss_and_gradients(self, x, y):
        return 1.5, {"w": x}
    def params(self):
        numbers = {name: int(value) for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
        numbers["cores"] = sorted(os.sched_getaffinity(0))
        return {name: np.array(value) for name, value in numbers.items()}
    def close(self):
        pass
'''


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the stand-in engine, registered here and in workers."""
    (tmp_path / "stand_in_engine.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(
        registry.ENGINES, "stand-in", Registered("stand-in", "Stand-in", "stand_in_engine:Session", ("numpy",))
    )
    monkeypatch.setattr(worker, "_BOOTSTRAP", with_stand_in(worker._BOOTSTRAP))
    return "stand-in"


def with_stand_in(bootstrap: str) -> str:
    row = "registry.Registered('stand-in', 'Stand-in', 'stand_in_engine:Session', ('numpy',))"
    return bootstrap.replace(
        "main(start)", f"from bridge import registry\nregistry.ENGINES['stand-in'] = {row}\nmain(start)"
    )


@pytest.fixture
def built(stand_in: str, small_paper_model: ModelSpec, random_params: Callable[..., Any]) -> Iterator[Worker]:
    """A worker of the stand-in engine, ready for requests."""
    with Worker(stand_in) as one:
        one.build(small_paper_model, random_params(small_paper_model), SGD, 4)
        yield one


def tell(number: int) -> np.ndarray:
    return np.full((1, 15), number, np.float32)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped by init does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


# --- Work ---


def test_a_worker_computes_what_a_session_of_ones_own_does(
    small_paper_model: ModelSpec,
    random_params: Callable[..., Any],
    random_data: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "OPENBLAS_CORETYPE" in os.environ:  # the same kernels in both processes, for the same bits
        monkeypatch.setenv("TWINGRAD_OPENBLAS_CORETYPE", os.environ["OPENBLAS_CORETYPE"])
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 10)
    own = registry.get("numpy").build(small_paper_model, params, SGD, 4, "float32", 1)
    with Worker("numpy") as one:
        one.build(small_paper_model, params, SGD, 4)
        assert one.build_seconds > 0
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(10)
            np.testing.assert_array_equal(one.train_epoch(x, y, order), own.train_epoch(x, y, order))
            assert one.seconds > 0
        np.testing.assert_array_equal(one.predict(x), own.predict(x))
        assert one.evaluate(x, y) == own.evaluate(x, y)
        (loss, gradients), (own_loss, own_gradients) = one.loss_and_gradients(x, y), own.loss_and_gradients(x, y)
        assert loss == own_loss
        for name, array in own.params().items():
            np.testing.assert_array_equal(one.params()[name], array)
            np.testing.assert_array_equal(gradients[name], own_gradients[name])


def test_a_worker_passes_techniques_on_and_tells_an_engines_own_parameters(
    small_paper_model: ModelSpec, random_params: Callable[..., Any]
) -> None:
    with Worker("numpy") as one:
        own = one.own_parameters(small_paper_model, 5, "float64")
        assert weights.digest(own) == weights.digest(weights.initialise(small_paper_model, 5, "float64"))
        with pytest.raises(ConfigurationError, match="no technique 'magic'"):
            one.build(small_paper_model, random_params(small_paper_model), SGD, 4, techniques={"magic": True})
        one.build(small_paper_model, random_params(small_paper_model), SGD, 4, techniques={"fuse": False})


def test_the_blas_chooses_its_own_kernels_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.delenv("TWINGRAD_OPENBLAS_CORETYPE", raising=False)
    assert "OPENBLAS_CORETYPE" not in environment(1)
    monkeypatch.setenv("TWINGRAD_OPENBLAS_CORETYPE", "Zen")
    assert environment(1)["OPENBLAS_CORETYPE"] == "Zen"


def test_data_can_be_given_as_files(
    tmp_path: Path, small_paper_model: ModelSpec, random_params: Callable[..., Any], random_data: Callable[..., Any]
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 10)
    paths = {name: tmp_path / f"{name}.npy" for name in "xyo"}
    for name, array in zip("xyo", (x, y, np.arange(10)), strict=True):
        np.save(paths[name], array)
    with Worker("numpy") as one:
        one.build(small_paper_model, params, SGD, 4)
        one.preload(paths["x"], paths["y"])
        from_files = one.train_epoch(paths["x"], str(paths["y"]), paths["o"])
        one.build(small_paper_model, params, SGD, 4)
        np.testing.assert_array_equal(one.train_epoch(x, y, np.arange(10)), from_files)
        assert all(path.exists() for path in paths.values())


def test_a_session_may_copy_the_data_before_the_first_epoch(built: Worker) -> None:
    x, y = np.arange(6.0).reshape(3, 2), np.ones(3)
    built.preload(x, y)
    assert built.evaluate(x, y).loss == 18


def test_answers_leave_no_files_behind(built: Worker) -> None:
    before = set(built._folder.iterdir())
    x = tell(0)
    built.train_epoch(x, x, np.arange(1))
    built.predict(x)
    built.params()
    built.loss_and_gradients(x, x)
    assert len(set(built._folder.iterdir()) - before) == 1  # x itself, kept for the next call


def test_what_libraries_print_stays_out_of_the_protocol(built: Worker) -> None:
    np.testing.assert_array_equal(built.predict(tell(0)), tell(0))
    assert "a library greets" in built.stderr.read_text()
    assert "a C library greets" in built.stderr.read_text()


def test_there_is_no_standard_input_to_wait_for(built: Worker) -> None:
    assert built.predict(tell(7)) == [0]


def test_a_number_that_is_none_passes(built: Worker) -> None:
    assert np.isnan(built.evaluate(tell(0), tell(0)).accuracy)


def test_cores_and_threads_are_fixed_before_anything_is_imported(
    stand_in: str, small_paper_model: ModelSpec, random_params: Callable[..., Any]
) -> None:
    for threads in range(1, len(os.sched_getaffinity(0)) + 1):
        with Worker(stand_in, threads) as one:
            one.build(small_paper_model, random_params(small_paper_model), SGD, 4)
            found = one.params()
            assert found.pop("cores").tolist() == sorted(os.sched_getaffinity(0))[:threads]
            assert {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"} <= set(found)
            assert all(value == threads for value in found.values())
            assert {library["num_threads"] for library in one.libraries()} <= {threads}


def test_more_threads_than_cores_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(WorkerError, match=f"threads={cores + 1}, but this process may use only {cores} core"):
        Worker("numpy", cores + 1)
    with pytest.raises(WorkerError, match="at least 1 thread, found threads=0"):
        Worker("numpy", 0)


def test_start_up_is_told_apart(built: Worker) -> None:
    assert 0 < built.import_seconds < built.start_seconds
    assert built.versions["numpy"] == np.__version__
    assert set(built.versions) == {"python", "numpy"}


# --- Memory ---


def test_the_peak_is_that_since_the_reset(built: Worker) -> None:
    built.predict(tell(0))
    built.reset_peak()
    before = built.peak_rss()
    built.predict(tell(6))
    grown = built.peak_rss() - before
    assert 8 * 2**20 <= grown < 16 * 2**20


def test_a_closed_session_is_gone_and_another_may_follow(
    small_paper_model: ModelSpec, random_params: Callable[..., Any]
) -> None:
    params = random_params(small_paper_model)
    with Worker("numpy") as one:
        for _ in range(2):
            one.build(small_paper_model, params, SGD, 4)
            one.close_session()
            one.close_session()
            with pytest.raises(EngineUnavailableError, match="nothing is built yet"):
                one.params()


def test_memray_sees_an_allocation_of_known_size(built: Worker, tmp_path: Path) -> None:
    memray = pytest.importorskip("memray")
    built.predict(tell(6))
    file = tmp_path / "allocations.bin"
    built.start_memray(file)
    with pytest.raises(EngineUnavailableError, match="recording already"):
        built.start_memray(tmp_path / "second.bin")
    built.predict(tell(6))
    built.stop_memray()
    built.predict(tell(6))
    with memray.FileReader(file) as reader:
        sizes = [record.size for record in reader.get_allocation_records() if record.size >= 8 * 2**20]
    assert sizes == [8 * 2**20]


# --- Errors ---


def test_errors_of_the_session_come_back_as_themselves(
    small_paper_model: ModelSpec, random_params: Callable[..., Any], random_data: Callable[..., Any], model: Any
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 10)
    with Worker("numpy") as one:
        with pytest.raises(EngineUnavailableError, match="nothing is built yet"):
            one.params()
        with pytest.raises(WeightsError, match=r"rnn\.bias: missing"):
            one.build(small_paper_model, {name: params[name] for name in params if name != "rnn.bias"}, SGD, 4)
        one.build(small_paper_model, params, SGD, 4)
        y[3] = 9
        with pytest.raises(LabelError, match="actual 9 in row 3"):
            one.train_epoch(x, y, np.arange(10))
        assert one.predict(x).shape == (10, 4)


@pytest.mark.parametrize("wrong", [[[1.0, 2.0]], 3, None])
def test_data_that_are_no_array_are_named(wrong: Any, built: Worker) -> None:
    x, y, order = np.zeros((2, 4), np.float32), np.zeros(2, np.int64), np.arange(2)
    for name, call in (
        ("x", lambda: built.predict(wrong)),
        ("x", lambda: built.train_epoch(wrong, y, order)),
        ("y", lambda: built.evaluate(x, wrong)),
        ("order", lambda: built.train_epoch(x, y, wrong)),
    ):
        with pytest.raises(DTypeError, match=f"{name}: expected a numpy array, found {type(wrong).__name__}; convert"):
            call()


def test_arrays_that_are_none_of_numbers_are_named(built: Worker) -> None:
    for wrong in (np.array([[object()]]), np.ma.array(np.zeros((1, 4)), mask=True)):
        with pytest.raises(DTypeError):
            built.predict(wrong)
    assert len(built.predict(tell(0))) == 1
    assert not list(built.stderr.parent.glob("*.npy.*"))


def test_numbers_of_numpys_are_numbers(stand_in: str, small_paper_model: ModelSpec, random_params: Any) -> None:
    with Worker(stand_in, threads=np.int64(1)) as one:
        optimizer = Optimizer("sgd", np.float64(0.5), momentum=np.float64(0.5))
        one.build(small_paper_model, random_params(small_paper_model), optimizer, np.int64(4))
        one.own_parameters(small_paper_model, seed=np.int32(3))
        with pytest.raises(TypeError, match="can't be sent to another process"):
            one.own_parameters(small_paper_model, seed={3})
        assert len(one.predict(tell(0))) == 1, "nothing was sent, and the session is as it was"
    for threads in (1.5, None):
        with pytest.raises(ConfigurationError, match=f"threads are an integer, found threads={threads}"):
            Worker(stand_in, threads)


def test_a_file_that_has_changed_is_read_again(built: Worker, tmp_path: Path) -> None:
    for content in (9.0, 10.0):
        np.save(tmp_path / "x.npy", np.full((1, 15), content, np.float32))
        np.testing.assert_array_equal(built.predict(tmp_path / "x.npy"), np.full((1, 15), content))


def test_requests_that_fail_leave_no_files(
    small_paper_model: ModelSpec, random_params: Callable[..., Any], random_data: Callable[..., Any]
) -> None:
    params, (x, y) = random_params(small_paper_model), random_data(small_paper_model, 10)
    with Worker("numpy") as one:
        one.build(small_paper_model, params, SGD, 4)
        one.train_epoch(x, y, np.arange(10))
        kept = set(one.stderr.parent.iterdir())
        with pytest.raises(ShapeError):
            one.train_epoch(x, y, np.arange(11))
        with pytest.raises(ParameterError):
            one.load_state({"nothing": x})
        with pytest.raises(ConfigurationError):
            one.build(small_paper_model, params, SGD, 0)
        assert set(one.stderr.parent.iterdir()) == kept


def test_a_path_among_the_places_of_modules_does_no_harm(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("lib")])
    Worker(stand_in).close()


def test_a_full_disk_of_the_worker_is_named(built: Worker) -> None:
    built.stderr.with_name("answer-1.npy").mkdir()  # so that it can't be written
    with pytest.raises(WorkerError, match=r"answer-1\.npy can't be written: .*TMPDIR"):
        built.predict(tell(0))


def test_the_problems_of_a_spec_come_back_with_their_error(built: Worker) -> None:
    with pytest.raises(SpecError, match="this one is unknown") as caught:
        built.predict(tell(8))
    assert list(caught.value.problems) == ["layers[0]: this one is unknown"]


def test_an_unexpected_error_names_its_kind_and_leaves_the_worker_usable(built: Worker) -> None:
    with pytest.raises(WorkerError, match=r"failed in predict: KeyError: 'an unexpected thing' \(\w+\.py, line \d+\)"):
        built.predict(tell(3))
    assert "Traceback" in built.stderr.read_text()
    assert built.predict(tell(0)).shape == (1, 15)


def test_an_engine_that_cannot_be_loaded_is_an_error_of_the_start(stand_in: str, tmp_path: Path) -> None:
    (tmp_path / "stand_in_engine.py").write_text("import no_such_library")
    with pytest.raises(EngineUnavailableError, match="stand-in is installed but can't be imported: No module named"):
        Worker(stand_in)


def test_a_worker_that_cannot_start_says_what_it_last_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_BOOTSTRAP", "import sys; sys.exit('no luck today')")
    with pytest.raises(WorkerError, match=r"ended with exit code 1 in starting; it last said:\n  no luck today"):
        Worker("numpy")


@pytest.mark.parametrize(
    ("number", "ending", "words"),
    [(1, "ended with exit code 3", "famous last words"), (2, "was ended by SIGSEGV", "Segmentation fault")],
)
def test_a_crash_is_reported_with_the_last_words(built: Worker, number: int, ending: str, words: str) -> None:
    with pytest.raises(WorkerError, match=rf"\(process {built.pid}\) {ending} in predict; it last said:[\s\S]*{words}"):
        built.predict(tell(number))
    assert not Path(f"/proc/{built.pid}").exists()
    with pytest.raises(WorkerError, match="is closed"):
        built.predict(tell(0))


def test_a_worker_killed_by_another_is_reported_and_reaped(built: Worker) -> None:
    os.kill(built.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"was ended by SIGKILL \(for want of memory, perhaps\) in predict"):
        built.predict(tell(0))
    assert not Path(f"/proc/{built.pid}").exists()
    assert not built._folder.exists()


# --- Stopping and ending ---


def test_a_paused_worker_stands_still_until_it_is_resumed(built: Worker) -> None:
    def state() -> str:
        return Path(f"/proc/{built.pid}/stat").read_text().rpartition(")")[2].split()[0]

    built.pause()
    assert eventually(lambda: state() == "T")
    with pytest.raises(WorkerError, match=r"is paused: call resume\(\) before predict"):
        built.predict(tell(0))
    built.resume()
    assert built.predict(tell(0)).shape == (1, 15)


@pytest.mark.parametrize("paused", [False, True])
def test_closing_leaves_no_process_and_no_files(built: Worker, paused: bool) -> None:
    (child,) = built.predict(tell(5))
    assert is_alive(child)
    if paused:
        built.pause()
    built.close()
    assert not Path(f"/proc/{built.pid}").exists()
    assert eventually(lambda: not is_alive(child))
    assert not built._folder.exists()
    built.close()
    with pytest.raises(WorkerError, match="is closed: start another one"):
        built.predict(tell(0))


def test_a_forgotten_worker_ends(stand_in: str) -> None:
    import gc

    pid = Worker(stand_in).pid
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_an_interrupted_request_ends_the_worker(built: Worker) -> None:
    class Interruption(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interruption):
            built.predict(tell(4))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not Path(f"/proc/{built.pid}").exists()


PARENT = """
import sys, time
import numpy as np
from bridge import registry, spec, weights, worker
from bridge.session import Optimizer
registry.ENGINES["stand-in"] = registry.Registered("stand-in", "Stand-in", "stand_in_engine:Session", ("numpy",))
worker._BOOTSTRAP = {bootstrap!r}
model = spec.loads({spec!r})
one = worker.Worker("stand-in")
one.build(model, weights.initialise(model, 0), Optimizer("sgd", 0.1), 4)
(child,) = one.predict(np.full((1, 15), 5, np.float32))
if {state!r} == "paused":
    one.pause()
print(one.pid, child, one._folder, flush=True)
if {state!r} == "busy":
    one.predict(np.full((1, 15), 4, np.float32))
time.sleep(600)
"""


@pytest.mark.parametrize("state", ["idle", "busy", "paused"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_worker_ends_with_its_parent(
    stand_in: str, small_paper_model: ModelSpec, tmp_path: Path, state: str, end: signal.Signals
) -> None:
    code = PARENT.format(bootstrap=worker._BOOTSTRAP, spec=small_paper_model.dump(), state=state)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        line = parent.stdout.readline().split()
        assert line, parent.stderr.read()
        pid, child, folder = int(line[0]), int(line[1]), Path(line[2])
        time.sleep(0.2)  # until it is busy
        os.killpg(parent.pid, end)  # as a terminal's Ctrl-C goes to the whole foreground group
        _, said = parent.communicate(timeout=PATIENCE)
    finally:
        parent.kill()
        parent.wait()
    assert eventually(lambda: not is_alive(pid))
    assert eventually(lambda: not is_alive(child))
    assert eventually(lambda: not folder.exists())
    if end == signal.SIGINT:
        assert said.strip().endswith("KeyboardInterrupt")


def test_a_fork_neither_ends_a_worker_nor_calls_it(built: Worker) -> None:
    forked = os.fork()
    if forked == 0:
        try:
            built.params()
        except WorkerError as error:
            refused = "forked process" in str(error)
        else:
            refused = False
        finally:
            built.close()
            os._exit(0 if refused else 1)
    assert os.waitpid(forked, 0)[1] == 0
    np.testing.assert_array_equal(built.predict(tell(0)), tell(0))
