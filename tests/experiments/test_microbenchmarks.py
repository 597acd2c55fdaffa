"""The micro-benchmarks: derivatives by hand, every system's program, the protocol, rounds, records and tables."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bridge.libjulia.find import Julia
from bridge.libjulia.sysimage import usable
from bridge.registry import availability
from experiments.microbenchmarks import measure, process, serve, sweep
from experiments.microbenchmarks import registry as systems
from experiments.microbenchmarks.functions import BENCHMARKS, CHUNKED, SMALL, benchmark, flat, read, shapes_of
from experiments.microbenchmarks.measure import Sizes
from experiments.microbenchmarks.process import Process, UnsupportedError, WrongGradientError, largest_error
from experiments.microbenchmarks.registry import FOLDER, SYSTEMS, BenchmarkError, Found, System
from experiments.papers import PaperFileError, load_paper
from experiments.progress import Progress
from experiments.report import claims, microbenchmarks, tables
from experiments.report.view import View
from experiments.results import Results, Tidy
from experiments.sources import SOURCES

TINY = Sizes(
    rounds=2, samples=3, seconds=1e-5, array=12, rows=2, chunked=9, chunks=(1, 4), chunk_rounds=2, lengths=(4, 9)
)
PYTHON = [name for name, system in SYSTEMS.items() if system.language == "py"]
JULIA = [name for name, system in SYSTEMS.items() if system.language == "jl"]
compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="needs a C++ compiler: g++, clang++ or c++"
)

ViewOf = Callable[..., View]


class Silent:
    """A watcher that counts."""

    steps = 0

    def step(self) -> None:
        self.steps += 1


@pytest.mark.parametrize("name", JULIA)
def test_julia_has_the_kernels_of_other_runs_whatever_the_surroundings_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(process, "find", lambda: SimpleNamespace(kernels="Prescott"))
    monkeypatch.setattr(process, "kernels_for", lambda chosen: f"better than {chosen}")
    monkeypatch.setattr(systems, "command", lambda system: [])
    monkeypatch.setattr(process, "Child", lambda command, variables, *rest: seen.update(variables))
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Core2")
    monkeypatch.delenv("TWINGRAD_OPENBLAS_CORETYPE", raising=False)
    Process(SYSTEMS[name], threads=1)
    assert seen["OPENBLAS_CORETYPE"] == "better than Prescott"
    monkeypatch.setenv("TWINGRAD_OPENBLAS_CORETYPE", "Zen")
    Process(SYSTEMS[name], threads=1)
    assert seen["OPENBLAS_CORETYPE"] == "Zen"


# ---------------------------------------------------------------------------------------------------------------------
# The functions


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("size", [1, 6])
def test_derivatives_by_hand_agree_with_differences(name: str, size: int) -> None:
    item = benchmark(name)
    inputs = item.inputs(max(size, 3) if name in (*CHUNKED, "logsumexp") else size)
    _, gradients = item.gradient(*inputs)
    assert [g.shape for g in gradients] == [x.shape for x in inputs[: item.by]]
    generator = np.random.default_rng(0)
    for number in range(item.by):
        direction, step = generator.standard_normal(inputs[number].shape), 1e-6
        moved = [
            item.gradient(*(x + sign * step * direction if i == number else x for i, x in enumerate(inputs)))[0]
            for sign in (1, -1)
        ]
        wanted = (moved[0] - moved[1]) / (2 * step)
        assert np.sum(gradients[number] * direction) == pytest.approx(wanted, rel=1e-6, abs=1e-8)


def test_inputs_cross_a_file_as_they_are(tmp_path: Path) -> None:
    arrays = [np.array(0.5), np.arange(6.0).reshape(2, 3), np.arange(4.0)]
    flat(7.0, arrays)[1:].tofile(tmp_path / "inputs")
    assert shapes_of(arrays) == ",2x3,4"
    for found, given in zip(read(str(tmp_path / "inputs"), ",2x3,4"), arrays, strict=True):
        np.testing.assert_array_equal(found, given)


def test_the_point_is_that_of_the_dual_numbers() -> None:
    (x,) = BENCHMARKS["rosenbrock"].inputs(1001)
    assert x[0] == 0.5 and x[1] == pytest.approx(0.537) and x[28] == pytest.approx(0.536)
    assert "0.5 + 0.001 * static_cast<double>((37 * i) % 1000)" in systems.DUALS.read_text()


# ---------------------------------------------------------------------------------------------------------------------
# The programs


def test_every_program_belongs_to_a_system_and_every_system_has_one() -> None:
    helpers = {"__init__.py", "functions.jl"}
    assert {path.name for path in FOLDER.iterdir() if path.is_file()} - helpers == {
        system.program for system in SYSTEMS.values() if system.language != "cpp"
    }
    assert {suite for system in SYSTEMS.values() for suite in system.suites} == set(systems.SUITES)
    named = load_paper("imdb-cnn-c").microbenchmarks
    assert named is not None and set(named.systems.value) == set(SYSTEMS)


def test_no_program_in_julia_splats_a_vector() -> None:
    """Whose length and types the compiler does not know, so that each call would take far longer."""
    for path in FOLDER.glob("*.jl"):
        assert not re.search(r"\binputs(\[[^]]*\])?\.\.\.", path.read_text(encoding="utf-8")), path.name


def questions(system: System) -> Iterator[measure.Question]:
    for suite in system.suites:
        for question in measure.questions(suite, TINY):
            if question.kinds(system.name):
                yield question


@pytest.mark.parametrize("name", PYTHON)
def test_gradients_of_a_python_system_are_those_by_hand(name: str) -> None:
    system = SYSTEMS[name]
    if not system.found().ok:
        pytest.skip(system.found().reason)
    program = Process(system, threads=1)
    try:
        for question in questions(system):
            assert program.prepare(benchmark(question.benchmark), question.size) < 1e-10
            for what in question.kinds(name):
                times = program.measure(what, 1e-5, samples=2)
                assert len(times) == 2 and min(times) > 0
    finally:
        program.close()


@pytest.fixture
def compiled_quickly(julia: Julia, monkeypatch: pytest.MonkeyPatch) -> None:
    """Julia starts with the engine's image where there is one, and optimises in one system alone what is not in it.

    Each function is called twice.
    """
    image, _ = usable(julia)
    options = [f"--sysimage={image}"] if image else []
    known = systems.command

    def command(system: System) -> list[str]:
        program, *rest = known(system)
        if system.language != "jl":
            return [program, *rest]
        return [program, *(() if system.name == "julia-compiled" else ("-O0",)), *options, *rest]

    monkeypatch.setattr(systems, "command", command)


@pytest.mark.timeout(1500)  # packages compile themselves before their first use
@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("name", JULIA)
def test_gradients_of_a_julia_system_are_those_by_hand(name: str) -> None:
    system = SYSTEMS[name]
    if system.needs and not system.found().ok:
        pytest.skip(f"does not apply: {system.found().reason}")
    program = Process(system, threads=1)
    try:
        for question in questions(system):
            if name == "forwarddiff" and benchmark(question.benchmark).by > 1:
                with pytest.raises(UnsupportedError, match="differentiates by one array"):
                    program.prepare(benchmark(question.benchmark), question.size)
                continue
            assert program.prepare(benchmark(question.benchmark), question.size, question.chunk) < 1e-10
            assert min(program.measure("gradient", 1e-5, samples=1)) > 0
        if "chunks" not in system.suites:
            with pytest.raises(UnsupportedError, match="forward mode"):
                program.prepare(benchmark("rosenbrock"), 9, chunk=2)
    finally:
        program.close()


@compiler
def test_gradients_of_the_dual_numbers_are_those_by_hand() -> None:
    program = process.start(SYSTEMS["duals"], 1)
    try:
        for name in CHUNKED:
            for chunk in (0, 1, 4):
                assert program.prepare(benchmark(name), 9, chunk) < 1e-10
                assert len(program.measure("gradient", 0.0, samples=3)) == 3
        with pytest.raises(BenchmarkError, match="chunk"):
            program.prepare(benchmark("ackley"), 9, chunk=99)
    finally:
        program.close()


def test_a_loop_with_checkpoints_needs_less_memory_the_longer_it_is() -> None:
    program = process.start(SYSTEMS["numpy-compiled"], 1)
    try:
        plain = [program.memory(length, False) for length in (1000, 16_000)]
        kept = [program.memory(length, True) for length in (1000, 16_000)]
    finally:
        program.close()
    growth = [math.log(ends[1] / ends[0]) / math.log(16) for ends in (plain, kept)]
    assert growth[0] > 0.85, "every step is kept"
    assert growth[1] < 0.65, "the square root of the steps is kept"


# ---------------------------------------------------------------------------------------------------------------------
# The protocol


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Process]]:
    """A function that starts a system whose program is the given text."""
    started = []

    def make(text: str) -> Process:
        (tmp_path / "invented_program.py").write_text(text)
        monkeypatch.setattr(
            Process, "_argument", lambda self: [json.dumps({"module": "invented_program", "path": path})]
        )
        system = System("invented", "Invented", "invented.py")
        started.append(Process(system, threads=1))
        return started[-1]

    import sys

    path = [str(tmp_path), *sys.path]
    yield make
    for item in started:
        item.close()


RIGHT = """
import numpy as np
def prepare(name, inputs, by):
    x = inputs[0]
    print("what a library prints does not disturb")
    return lambda: np.sin(np.cos(x)), lambda: -np.cos(np.cos(x)) * np.sin(x){wrong}
"""


def test_a_program_is_checked_before_it_is_timed(program: Callable[[str], Process]) -> None:
    assert program(RIGHT.format(wrong="")).prepare(benchmark("sincos"), 1) == 0.0
    with pytest.raises(WrongGradientError, match=r"Invented: value and gradient of SINCOS differ .* not timed"):
        program(RIGHT.format(wrong=" * 1.0001")).prepare(benchmark("sincos"), 1)


def test_what_goes_wrong_in_a_program_is_told(program: Callable[[str], Process]) -> None:
    with pytest.raises(BenchmarkError, match=r"Invented: starting: ModuleNotFoundError.*nothing_like_this"):
        program("import nothing_like_this").prepare(benchmark("sincos"), 1)
    text = "def prepare(*_): raise ValueError('no good')"
    with pytest.raises(BenchmarkError, match="Invented: prepare: ValueError: no good"):
        program(text).prepare(benchmark("sincos"), 1)
    text = "import os\ndef prepare(*_): os._exit(3)"
    with pytest.raises(BenchmarkError, match="its process ended with status 3 in prepare"):
        program(text).prepare(benchmark("sincos"), 1)


def test_what_a_program_does_not_have_is_no_failure(program: Callable[[str], Process]) -> None:
    one = program(RIGHT.format(wrong=""))
    with pytest.raises(UnsupportedError, match="no forward mode"):
        one.prepare(benchmark("rosenbrock"), 9, chunk=3)
    with pytest.raises(UnsupportedError, match="no call memory"):
        one.memory(9, True)


def test_the_first_call_does_not_say_how_many_make_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0], []

    def call() -> None:
        now[0] += 100 if calls else 5_000_000
        calls.append(now[0])

    monkeypatch.setattr(serve, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    assert serve._enough(call, seconds=1e-3) == 10_000


ODD = '\x1b[31m \x00 \x7f \t " \\ é 😀 $(1)'
IN_JULIA = """
function prepare(name, inputs, by, chunk)
    chunk == 0 || throw(Unsupported(String(UInt8[BYTES])))
    x = inputs[1]
    return () -> sin(cos(x)), () -> -cos(cos(x)) * sin(x)
end
"""


@pytest.mark.usefixtures("julia")
def test_any_text_crosses_to_a_program_in_julia_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / 'é 😀 "quoted" \\n \\'
    folder.mkdir()
    program = folder / "program.jl"
    program.write_text(IN_JULIA.replace("BYTES", ", ".join(map(str, ODD.encode()))), encoding="utf-8")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))  # where inputs and results lie
    monkeypatch.setattr(System, "path", program)
    one = Process(System("invented", "Invented", program.name), threads=1)
    try:
        assert one.folder.parent == folder
        assert one.prepare(benchmark("sincos"), 1) < 1e-15
        with pytest.raises(UnsupportedError) as caught:
            one.prepare(benchmark("sincos"), 1, chunk=1)
        assert str(caught.value) == ODD
    finally:
        one.close()


def test_a_gradient_of_another_size_or_that_is_no_number_is_wrong() -> None:
    gradient = [np.array([1.0, 2.0])]
    assert largest_error(np.array([5.0, 1.0, 2.0]), 5.0, gradient) == 0
    assert largest_error(np.array([5.0, 1.0, 2.002]), 5.0, gradient) == pytest.approx(1e-3)
    for found in ([5.0, 1.0], [5.0, 1.0, 2.0, 3.0], [5.0, math.nan, 2.0]):
        assert largest_error(np.array(found), 5.0, gradient) == math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Rounds


class Fake:
    """A system that notes what it is asked."""

    def __init__(self, name: str, log: list[tuple[str, ...]], fails: str = "", lacks: str = "") -> None:
        self.name, self.log, self.fails, self.lacks = name, log, fails, lacks

    def prepare(self, benchmark: Any, size: int, chunk: int = 0) -> float:
        if benchmark.name == self.fails:
            raise BenchmarkError(f"{self.name} died")
        if benchmark.name == self.lacks:
            raise UnsupportedError(f"{self.name} can't")
        self.benchmark = benchmark.name
        return 0.0

    def measure(self, what: str, seconds: float, samples: int) -> list[float]:
        self.log.append((self.name, self.benchmark, what))
        return [3.0, 1.0, 2.0][:samples]

    def memory(self, length: int, checkpoint: bool) -> int:
        return length

    def close(self) -> None: ...


def test_systems_take_turns_and_a_round_is_the_median_of_its_samples() -> None:
    log: list[tuple[str, ...]] = []
    watcher = Silent()
    rows, missing = measure.measure("gradients", {name: Fake(name, log) for name in "ab"}, TINY, watcher)
    order = [name for name, function, what in log if function == "sincos" and what == "gradient"]
    assert order == ["b", "a", "a", "b"]
    assert {row["nanoseconds"] for row in rows} == {2.0} and not missing
    assert len(rows) == 2 * 2 * len(SMALL) * TINY.rounds
    assert watcher.steps == measure.parts("gradients", TINY) == len(SMALL)


def test_a_system_that_fails_is_left_out_and_one_that_lacks_something_stays() -> None:
    entrants = {"a": Fake("a", [], fails="mlp"), "b": Fake("b", [], lacks="loop"), "c": Fake("c", [])}
    rows, missing = measure.measure("gradients", entrants, TINY, Silent())
    assert {row["engine"] for row in rows} == {"b", "c"}
    assert "loop" not in {row["benchmark"] for row in rows if row["engine"] == "b"}
    assert {(row["engine"], row["benchmark"], row["missing"], row["failure"]) for row in missing} == {
        ("a", "mlp", "a died", True),
        ("b", "loop", "b can't", False),
    }


def test_only_forward_mode_is_asked_for_chunks() -> None:
    by_chunk = measure.Question("ackley", 9, 2)
    whole = measure.Question("ackley", 9)
    assert by_chunk.kinds("julia-forward") == by_chunk.kinds("duals") == ("gradient",)
    assert by_chunk.kinds("julia-compiled") == ()
    assert whole.kinds("julia-compiled") == ("forward", "gradient")
    assert whole.kinds("duals") == ("forward",)


# ---------------------------------------------------------------------------------------------------------------------
# Records


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results")


def jobs(*names: str) -> list[sweep.Job]:
    return [
        dataclasses.replace(job, sizes=TINY)
        for job in sweep.plan(load_paper("imdb-cnn-c"), "sample", list(names))
        if job.suite in ("gradients", "memory")
    ]


def run(results: Results, jobs: list[sweep.Job]) -> list[dict[str, Any]]:
    with results.locked():
        records = sweep.run(jobs, results, Progress(Console(quiet=True), len(jobs)))
        results.write_tidy()
    return records


def test_a_suite_is_recorded_once_with_where_it_comes_from(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(results, jobs("manual", "numpy-compiled"))
    assert [record["config"]["suite"] for record in first] == ["gradients", "memory"]
    monkeypatch.setattr(sweep, "start", lambda *_: pytest.fail("a finished suite is measured again"))
    again = run(results, jobs("manual", "numpy-compiled"))
    assert [record["provenance"] for record in again] == [record["provenance"] for record in first]
    assert {record["status"] for record in first} == {"ok"}
    assert [set(record["blas"]) for record in first] == [{"manual", "numpy-compiled"}, {"numpy-compiled"}]
    tidy = Tidy.load(results.root)
    assert tidy.runs.empty, "no engine of a paper's tables was trained"
    rows = tidy.tables["microbenchmarks"]
    assert set(rows["engine"]) == {"manual", "numpy-compiled"}
    assert (rows["paper"] == "imdb-cnn-c").all() and (rows["threads"] == 1).all()
    assert (
        rows[["key", "commit", "cpu_model", "machine", "blas", "created", "engine_digest", "version"]]
        .notna()
        .all()
        .all()
    )
    timed = rows[rows["suite"] == "gradients"]
    assert len(timed) == 2 * 2 * len(SMALL) * TINY.rounds
    assert (timed["nanoseconds"] > 0).all() and (timed["gradient_error"] < 1e-10).all()
    assert (rows.loc[rows["suite"] == "memory", "bytes"] > 0).all()


def test_a_system_that_is_not_there_has_a_row_with_the_reason(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = [job for job in jobs("manual") if job.suite == "gradients"]
    monkeypatch.setattr(systems, "_found", lambda system: Found({}, _why(system)))
    (record,) = run(results, [dataclasses.replace(job, systems=("manual", "zygote"))])
    assert record["status"] == "ok" and sweep.absent(record) == ["Zygote: no Zygote here"]
    rows = Tidy.load(results.root).tables["microbenchmarks"]
    assert list(rows.loc[rows["engine"] == "zygote", "missing"]) == ["no Zygote here"]


def _why(system: System) -> str:
    return "" if system.name == "manual" else f"no {system.label} here"


def test_another_program_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    (job, *_) = jobs("manual")
    key = sweep.skeleton(job)["key"]
    assert sweep.skeleton(job)["key"] == key
    other = SOURCES.with_changes({"experiments/microbenchmarks/systems/manual.py": b"changed = True"})
    monkeypatch.setattr(sweep, "SOURCES", other)
    assert sweep.skeleton(job)["key"] != key


def test_an_engine_of_ours_decides_the_key_and_a_framework_by_its_version() -> None:
    def covered(name: str) -> set[str]:
        return {Path(file).name for file in SOURCES.closure(sweep.starts_of(SYSTEMS[name]))}

    names = covered("numpy-compiled")
    assert {"numpy_compiled.py", "numpy_eager.py", "serve.py", "functions.py", "tape.py"} <= names
    names = covered("julia-compiled")
    assert {"julia_compiled.jl", "julia_eager.jl", "serve.jl", "TwinGrad.jl"} <= names
    assert "tape.py" not in covered("torch")
    if availability("torch").ok:
        assert "torch" in SYSTEMS["torch"].found().versions


def test_systems_are_asked_for_by_name() -> None:
    paper = load_paper("imdb-cnn-c")
    with pytest.raises(BenchmarkError, match="no system 'caffe'; systems: numpy-eager"):
        sweep.plan(paper, "sample", ["caffe"])
    with pytest.raises(PaperFileError, match="mnist-rnn-e has no micro-benchmarks; papers that have: imdb-cnn-c"):
        sweep.plan(load_paper("mnist-rnn-e"))
    assert sweep.of_engines(paper, "full", ["numpy", "torch"]) == ["numpy-eager", "numpy-compiled", "torch"]


@compiler
def test_every_word_of_cxx_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))))
    wrapper = tmp_path / "a folder" / "wrapper"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\nexec "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CXX", f"wrapper {real} -Wall")
    found = systems._compiler()
    said = subprocess.run([real, "--version"], capture_output=True, text=True, check=True).stdout
    assert shlex.split(found.versions["compiler"]) == [str(wrapper), real, "-Wall"]
    assert found.libraries == {"compiler": said.partition("\n")[0]}
    monkeypatch.setattr(System, "found", lambda self: found)
    program = process.start(SYSTEMS["duals"], 1)
    try:
        assert program.prepare(benchmark("ackley"), 9, 1) < 1e-10
    finally:
        program.close()


def test_a_compiler_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho cannot do this >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(System, "found", lambda self: Found({"compiler": str(broken)}))
    with pytest.raises(BenchmarkError, match=r"could not compile duals\.cpp: cannot do this"):
        process.start(SYSTEMS["duals"], 1).prepare(benchmark("ackley"), 9, 1)


# ---------------------------------------------------------------------------------------------------------------------
# The report


@pytest.fixture
def view(fake: ModuleType, view_of: ViewOf) -> View:
    return view_of(fake.rows("imdb-cnn-a", seeds=1), paper="imdb-cnn-c")


def test_measured_and_cited_figures_never_share_a_row(view: View) -> None:
    for producer in ("micro_gradients", "micro_chunks"):
        made = tables.PRODUCERS[producer](view)
        kinds = {row["kind"] for row in made.rows}
        assert kinds == {"measured", "cited"}
        groups = {str(row["group"]): row["kind"] for row in made.rows}
        assert all(("Cited" in group) == (kind == "cited") for group, kind in groups.items())
    cited = {row["system"]: row for row in microbenchmarks.micro_gradients(view).rows if row["kind"] == "cited"}
    assert cited["Zygote"]["sincos_gradient_ns"] == pytest.approx(20.7)
    assert cited["Zygote"]["sincos_ratio"] == pytest.approx(20.7 / 15.9)
    assert cited["ReverseDiff"]["mlp_gradient_ns"] is None


def test_a_cell_is_forward_pass_gradient_and_ratio(view: View) -> None:
    made = microbenchmarks.micro_gradients(view)
    row = next(row for row in made.rows if row.get("engine") == "numpy-eager")
    assert row["sincos_ratio"] == pytest.approx(2.5)
    assert made.columns[1].text(row) == "300 ns · 750 ns (2.5)"


def test_systems_that_are_missing_have_rows_and_reasons(view: View, fake: ModuleType) -> None:
    made = microbenchmarks.micro_gradients(view)
    for name in fake.ABSENT:
        row = next(row for row in made.rows if row.get("engine") == name)
        assert row["missing"] == f"Julia 1.5.3 has no package {SYSTEMS[name].needs}"
        assert made.columns[1].text(row) == "—"
    assert any(note.startswith("Missing: Zygote: Julia 1.5.3 has no package Zygote") for note in made.notes)
    missing = {row["row"] for row in tables.missing(view).rows if row["measure"] == "micro-benchmarks"}
    assert missing == {SYSTEMS[name].label for name in fake.ABSENT}


def test_tables_without_any_run_show_what_is_cited_and_say_so(fake: ModuleType, view_of: ViewOf) -> None:
    empty = view_of({name: [] for name in fake.rows()}, paper="imdb-cnn-c")
    for producer in ("micro_gradients", "micro_chunks", "micro_ratios", "micro_memory"):
        made = tables.PRODUCERS[producer](empty)
        assert made.rows and not any(row.get("machine") for row in made.rows)
    assert any("not run" in note for note in microbenchmarks.micro_gradients(empty).notes)


def test_gradients_by_chunk_size_name_their_own_rounds(view: View) -> None:
    rows = view.table("microbenchmarks")[
        (view.table("microbenchmarks")["chunk"] == 0) | (view.table("microbenchmarks")["round"] == 1)
    ]
    fewer = dataclasses.replace(view, tables={**view.tables, "microbenchmarks": rows})
    count = int(rows["round"].max())
    assert count > 1
    assert any(
        f"{count} rounds (1 by chunk size), 1 thread" in note for note in microbenchmarks.micro_chunks(fewer).notes
    )
    for made in (microbenchmarks.micro_chunks(view), microbenchmarks.micro_gradients(fewer)):
        assert any(f"{count} rounds, 1 thread" in note for note in made.notes)


def test_claims_are_decided_by_the_times(view: View) -> None:
    found = {claim.id: claims.examine(claim, view) for claim in view.paper.claims}
    # The invented times grow with a system's place in the list: 4th against 9th, 5th against 8th.
    assert (found["micro-benchmarks"].verdict, found["micro-benchmarks"].on_ours) == ("not tested", "holds")
    assert found["micro-benchmarks-zygote"].verdict == "not testable"
    assert found["micro-benchmarks"].value == pytest.approx(4 / 9)
    assert found["forward-mode"].value == pytest.approx(5 / 8)
    assert found["overhead"].verdict == "not testable"
    assert found["overhead"].words == "ReverseDiff: not measured"
    assert found["overhead"].missing is not None
    assert "Julia 1.5.3 has no package ReverseDiff" in found["overhead"].missing[2]


def test_a_run_of_few_systems_does_not_take_the_place_of_a_whole_one(fake: ModuleType, view_of: ViewOf) -> None:
    whole = fake.rows("imdb-cnn-a", seeds=1)
    few = {name: [] for name in whole}
    few["microbenchmarks"] = [
        {**row, "key": "few", "created": "2002", "nanoseconds": 1.0}
        for row in whole["microbenchmarks"]
        if row["suite"] == "gradients" and row["engine"] == "torch"
    ]
    rows = view_of(whole, few, paper="imdb-cnn-c").table("microbenchmarks")
    assert "few" not in set(rows["key"])


def test_the_benchmarks_of_commits_have_a_time_for_every_system_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.benchmarks import micro

    assert set(micro.FUNCTIONS) == set(SMALL) and set(micro.SYSTEMS) < set(SYSTEMS)
    monkeypatch.setattr(micro, "SYSTEMS", ("numpy-compiled",))
    monkeypatch.setattr(micro, "SECONDS", 1e-5)
    bench = micro.Gradient()
    times = bench.setup_cache()
    assert all(bench.track_gradient(times, "numpy-compiled", name) > 0 for name in micro.FUNCTIONS)
    with pytest.raises(NotImplementedError):
        bench.setup(times, "julia-eager", "mlp")


@compiler
@pytest.mark.usefixtures("sketched")
def test_the_command_measures_reports_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments import report
    from experiments.cli import invoke

    monkeypatch.chdir(tmp_path)
    options = ["--profile", "sample", "--systems", "manual,numpy-compiled,duals", "--json", "found.json"]
    assert invoke(["microbench", *options]) == 0
    said = capsys.readouterr().out
    assert "Hand-written numpy" in said and "SINCOS" in said and "C++ dual numbers" in said
    rows = json.loads(Path("found.json").read_text())["rows"]
    assert {row["suite"] for row in rows} == {"gradients", "arrays", "chunks", "memory"}
    assert all(row.get("nanoseconds", row.get("bytes")) > 0 for row in rows)
    built = report.build("results")
    names = {path.name for path in built.written}
    for table in ("micro-gradients", "micro-chunks", "micro-ratios", "micro-memory"):
        assert {f"imdb-cnn-c-{table}{suffix}" for suffix in (".csv", ".tex", ".md", ".svg", ".png")} <= names
    page = (built.folder / "report.html").read_text(encoding="utf-8")
    assert "Small functions: forward pass and gradient, measured and cited" in page
    assert invoke(["microbench", "--systems", "caffe"]) != 0
    assert "no system" in capsys.readouterr().err


def test_the_dual_numbers_compile_without_a_warning(tmp_path: Path) -> None:
    found = SYSTEMS["duals"].found()
    if not found.ok:
        pytest.skip(found.reason)
    command = [found.versions["compiler"], "-O1", "-std=c++17", "-Wall", "-Wextra", str(systems.DUALS)]
    done = subprocess.run([*command, "-o", str(tmp_path / "duals")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
