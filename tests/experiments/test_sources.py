"""A result's key changes with every file that decides the result, and with no other."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import importlib.metadata
import json
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bridge import linear_algebra
from bridge import registry as all_engines
from bridge.libjulia import numpy_blas
from experiments import papers, sources, sweep
from experiments.errors import ResultsError
from experiments.measures import registry
from experiments.microbenchmarks import sweep as micro
from experiments.results import hashes
from experiments.sources import PROJECTS, ROOT, SOURCES, Sources
from experiments.sweep import Job

# Which files decide what: written from what each file is for, not from what imports it. The test compares the two.

EVERY_TRAINING = (
    # The worker, what it reads, and what checks the data while an epoch is timed; the initial weights are the engine's.
    # `py_engine/scipy` is for programs of users.
    *("py_engine/__init__.py", "py_engine/errors.py", "py_engine/ad/*.py", "py_engine/network/*.py"),
    *("bridge/__init__.py", "bridge/adapters/__init__.py", "bridge/checks.py", "bridge/errors.py"),
    *("bridge/child.py", "bridge/child_process.py"),
    *("bridge/files.py", "bridge/layers.py", "bridge/memory.py", "bridge/registry.py"),
    *("bridge/temporary.py", "bridge/validation.py"),
    *("bridge/session.py", "bridge/spec.py", "bridge/toml.py", "bridge/weights.py", "bridge/worker.py"),
    "bridge/worker_process.py",
    # The measure's own tools.
    *("experiments/__init__.py", "experiments/errors.py", "experiments/slots.py", "experiments/run_arrays.py"),
    *(f"experiments/measures/{name}.py" for name in ("__init__", "measure", "task")),
)
LIBJULIA = ("bridge/libjulia/__init__.py", "bridge/libjulia/environment.py", "bridge/libjulia/find.py")
JULIA = (
    *("julia_engine/Project.toml", "julia_engine/src/*", "julia_engine/ext/*", "bridge/adapters/julia.py", *LIBJULIA),
    *(f"bridge/libjulia/{name}.py" for name in ("embedded", "engine", "juliacall", "numpy_blas", "precompilation")),
    *("bridge/libjulia/runtime.py", "bridge/libjulia/start.py", "bridge/libjulia/sysimage.py"),
    *("bridge/libjulia/probe.jl", "bridge/libjulia/runtime.jl"),
)
ADAPTERS: dict[str, tuple[str, ...]] = {
    "numpy": ("bridge/adapters/numpy.py",),
    "julia": JULIA,
    "torch": ("bridge/adapters/torch.py",),
    "torch-compile": ("bridge/adapters/torch.py", "bridge/adapters/torch_compile.py"),
    "tensorflow": ("bridge/adapters/tensorflow.py", "bridge/channels_last.py"),
    "tensorflow-xla": ("bridge/adapters/tensorflow.py", "bridge/adapters/tensorflow_xla.py", "bridge/channels_last.py"),
    "jax": ("bridge/adapters/jax.py", "bridge/channels_last.py"),
    **{
        name: (
            *JULIA,
            *("bridge/adapters/julia_package.py", "bridge/adapters/julia_package.jl"),
            *(f"bridge/adapters/{name}.py", f"bridge/adapters/{name}.jl"),
        )
        for name in ("flux", "lux", "simplechains")
    },
}
for _name in ADAPTERS:  # Julia's engines too, to find numpy's BLAS
    ADAPTERS[_name] += ("bridge/linear_algebra.py",)
MEASURES: dict[str, tuple[str, ...]] = {
    "time": ("experiments/measures/training.py",),
    "own": ("experiments/measures/native.py", "experiments/measures/training.py"),
    "variants": ("experiments/measures/variants.py", "experiments/measures/training.py"),
    "memory": ("experiments/measures/memory.py",),
    "race": (
        *("experiments/measures/race.py", "experiments/measures/roofline.py", "experiments/measures/roofline.jl"),
        *ADAPTERS["numpy"],  # the limit of a step is counted in its programs
    ),
    "scaling": tuple(f"experiments/measures/{name}.py" for name in ("scaling", "ablation", "memory")),
    "ablation": ("experiments/measures/ablation.py", "experiments/measures/memory.py"),
}
MEASURES["sizes"] = (
    *(*MEASURES["race"], *MEASURES["ablation"], "experiments/measures/sizes.py"),  # its limit; how engines warm up
    *(f"experiments/data/{name}.py" for name in ("__init__", "dataset", "generated")),
)
MEASURES["sizes_ablation"] = (
    *(name for name in MEASURES["sizes"] if name != "experiments/measures/roofline.jl"),  # no limit is measured
    "experiments/measures/sizes_ablation.py",
)
MEASURES["growth"] = (
    *(name for name in MEASURES["sizes"] if name not in (MEASURES["race"][0], "experiments/measures/sizes.py")),
    *(f"experiments/measures/growth.{end}" for end in ("py", "jl")),
    *("julia_engine/Project.toml", "julia_engine/src/*", "julia_engine/ext/*", *LIBJULIA),  # its graphs in Julia
    "bridge/libjulia/sysimage.py",
    *("bridge/libjulia/probe.jl", "bridge/libjulia/runtime.jl"),
    "experiments/machine.py",  # the caches
    "experiments/testing.py",  # the interval of a ratio
)
MEASURES["totals"] = (
    "experiments/measures/totals.py",
    *(name for name in MEASURES["race"] if name != "experiments/measures/roofline.jl"),  # how engines fall out
    *(f"experiments/data/{name}.py" for name in ("__init__", "dataset", "generated")),
)
MEASURES["split"] = (
    *(name for name in MEASURES["sizes"] if name != "experiments/measures/roofline.jl"),  # no limit is measured
    "experiments/measures/split.py",
)
SYSTEM_FOLDER = "experiments/microbenchmarks/systems"
NO_WORKER = ("bridge/worker_process.py", "bridge/child_process.py", "bridge/adapters/__init__.py")
EVERY_SUITE = (
    *(name for name in EVERY_TRAINING if name not in NO_WORKER),
    *(f"experiments/microbenchmarks/{name}.py" for name in ("__init__", "functions", "measure", "process", "registry")),
    "bridge/linear_algebra.py",
)
OURS_IN_PYTHON = ("numpy_compiled", "numpy_eager", "manual")
IN_JULIA = (
    *("experiments/microbenchmarks/serve.jl", *LIBJULIA, "bridge/libjulia/probe.jl", "bridge/libjulia/runtime.jl"),
    *("julia_engine/Project.toml", "julia_engine/src/*", "julia_engine/ext/*"),
)
PACKAGE = (f"{SYSTEM_FOLDER}/functions.jl",)
IN_PYTHON = ("experiments/microbenchmarks/serve.py", "bridge/child_process.py", f"{SYSTEM_FOLDER}/__init__.py")


TRAININGS: list[tuple[str, tuple[str, ...]]] = [
    *(("time", (name,)) for name in ADAPTERS),
    *((measure, ("numpy",)) for measure in MEASURES if measure != "time"),
    *(("race", ("tensorflow",)), ("memory", ("jax",)), ("memory", ("tensorflow",)), ("scaling", ("torch",))),
    *(("ablation", ("julia",)), ("race", ("numpy", "julia", "torch"))),
]
SUITES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("manual", "torch"): (*IN_PYTHON, f"{SYSTEM_FOLDER}/manual.py", f"{SYSTEM_FOLDER}/torch.py"),
    ("numpy-compiled",): (*IN_PYTHON, *(f"{SYSTEM_FOLDER}/{name}.py" for name in OURS_IN_PYTHON)),
    ("julia-compiled", "jax"): (
        *(*IN_PYTHON, *IN_JULIA, f"{SYSTEM_FOLDER}/jax.py"),
        *(f"{SYSTEM_FOLDER}/julia_eager.jl", f"{SYSTEM_FOLDER}/julia_compiled.jl"),
    ),
    ("duals", "zygote"): (*IN_JULIA, *PACKAGE, f"{SYSTEM_FOLDER}/zygote.jl", "experiments/microbenchmarks/duals.cpp"),
}
"""Systems of a suite, and the files that decide it beside those of every suite."""


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def changed(name: str) -> Sources:
    """The sources with one file changed in a way that leaves its imports as they are."""
    end = b"\n// changed\n" if name.endswith(".cpp") else b"\n# changed\n"
    return SOURCES.with_changes({name: (ROOT / name).read_bytes() + end})


def training(measure: Any, engines: tuple[str, ...], paper: str = "mnist-rnn-e") -> Job:
    return Job(papers.load_paper(paper), engines, 0, measure, 1, "full")


def suite(systems: tuple[str, ...]) -> micro.Job:
    first = micro.plan(papers.load_paper("imdb-cnn-c"), "full")[0]
    return dataclasses.replace(first, systems=systems)


def test_each_file_changes_the_keys_of_what_it_decides_and_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Every file of the packages is changed, one by one; of each run the key must change, or stay."""
    asked: dict[str, tuple[list[str], tuple[str, ...]]] = {}
    for measure, engines in TRAININGS:
        deciding = (*EVERY_TRAINING, *MEASURES[measure], *(item for name in engines for item in ADAPTERS[name]))
        asked[f"{measure} {', '.join(engines)}"] = sweep.starts(training(measure, engines)), deciding
    for systems, files in SUITES.items():
        asked[f"micro-benchmarks {', '.join(systems)}"] = micro.starts(suite(systems)), (*EVERY_SUITE, *files)

    def keys(among: Sources) -> dict[str, str]:
        return {what: hashes({}, {"sources": among.digest(starts)})["key"] for what, (starts, _) in asked.items()}

    usual = keys(SOURCES)
    wrong, moving, counts = [], set(), {what: [0, 0] for what in asked}
    for name in sorted(SOURCES.names):
        for what, key in keys(changed(name)).items():
            moved = key != usual[what]
            counts[what][moved] += 1
            moving |= {name} if moved else set()
            if moved != matches(name, asked[what][1]):
                wrong.append(f"{what}: {name} {'changes' if moved else 'does not change'} the key")
    assert wrong == []
    staying = len(SOURCES.names) - len(moving)
    with capsys.disabled():
        print(f"\n{len(SOURCES.names)} files changed one by one: {len(moving)} decide a result, {staying} none")
    assert len(moving) > 150 and staying > 80
    assert all(least > 60 and most > 60 for least, most in counts.values()), counts


def test_the_rule_names_no_file_that_is_not_there() -> None:
    everything = [*EVERY_TRAINING, *EVERY_SUITE, *(item for files in SUITES.values() for item in files)]
    everything += [item for table in (ADAPTERS, MEASURES) for files in table.values() for item in files]
    unused = {pattern for pattern in everything if not fnmatch.filter(SOURCES.names, pattern)}
    assert unused <= {"julia_engine/ext/*"}  # which may come
    assert set(ADAPTERS) == set(all_engines.names())
    assert set(MEASURES) == set(registry.MEASURES)


@pytest.mark.parametrize(
    "name",
    [
        *("experiments/cli/runs.py", "experiments/progress.py", "experiments/doctor.py", "experiments/output.py"),
        *("experiments/report/tables.py", "experiments/report/view.py", "experiments/results.py"),
        *(
            "experiments/data/imdb.py",
            "experiments/papers/__init__.py",
            "experiments/quantities.py",
            "experiments/summary.py",
            "experiments/gradbench/gmm.py",
        ),
        *("julia_engine/test/ad_ops.jl", "experiments/benchmarks/engines.py", "bridge/julia/install.py"),
    ],
)
def test_what_only_shows_installs_or_tests_decides_nothing(name: str) -> None:
    """The command line, progress, doctor and reports; data counts by its digest, papers and models by their values."""
    for measure, engines in TRAININGS:
        assert name not in SOURCES.closure(sweep.starts(training(measure, engines)))
    for systems in SUITES:
        assert name not in SOURCES.closure(micro.starts(suite(systems)))


# What the closure finds -----------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., set[str]]:
    """A function from files (path to text) and a start to the closure of that start among them."""

    def closure(files: dict[str, str], start: str) -> set[str]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return Sources(tmp_path).closure([start])

    return closure


IMPORTS = {
    "import bridge.other": True,
    "import bridge.other as short": True,
    "from bridge import other": True,
    "from bridge import other as short": True,
    "from bridge.other import name": True,
    "from bridge.other import *": True,
    "from . import other": True,
    "from .other import name": True,
    "def late():\n    import bridge.other": True,
    "class A:\n    def late(self):\n        from bridge.other import name": True,
    "try:\n    import bridge.other\nexcept ImportError:\n    pass": True,
    "import importlib\nimportlib.import_module('bridge.other')": True,
    "from importlib import import_module\nimport_module('bridge.other')": True,
    "lazy = lambda: __import__('importlib').import_module('bridge.other')": True,
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import bridge.other": False,
    "import typing\nif typing.TYPE_CHECKING:\n    import json\nelse:\n    import bridge.other": True,
    "import typing\nif not typing.TYPE_CHECKING:\n    import bridge.other": True,
    "for _ in ():\n    pass\nelse:\n    import bridge.other": True,
    "try:\n    pass\nexcept ImportError:\n    import bridge.other": True,
    "try:\n    pass\nfinally:\n    import bridge.other": True,
    "match 1:\n    case 1:\n        import bridge.other": True,
    "with a:\n    while b:\n        import bridge.other": True,
    "# import bridge.other": False,
    "'import bridge.other'": False,
    "import os": False,
}


@pytest.mark.parametrize("code", IMPORTS, ids=lambda code: code.replace("\n", " "))
def test_every_way_to_import_is_followed(tree: Callable[..., set[str]], code: str) -> None:
    files = {"bridge/__init__.py": "", "bridge/one.py": code, "bridge/other.py": "from bridge import third"}
    found = tree(files | {"bridge/third.py": ""}, "bridge.one")
    expected = {"bridge/other.py", "bridge/third.py"} if IMPORTS[code] else set()
    assert found - {"bridge/__init__.py", "bridge/one.py"} == expected


def test_the_statements_of_a_file_lead_where_all_of_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expressions are looked through only where a file's text has a word that makes it necessary."""
    monkeypatch.setattr(sources, "_IN_EXPRESSIONS", ("",))  # which every text has
    whole = Sources(ROOT)
    for name in SOURCES.names:
        assert SOURCES._file(name) == whole._file(name), name


def test_a_packages_own_file_counts_with_its_modules(tree: Callable[..., set[str]]) -> None:
    files = {
        "bridge/__init__.py": "",
        "bridge/a/__init__.py": "import bridge.b",
        "bridge/a/c.py": "",
        "bridge/b.py": "",
    }
    assert tree(files, "bridge.a.c") == set(files)


def test_included_files_and_projects_of_julia_are_followed(tree: Callable[..., set[str]]) -> None:
    files = {
        "bridge/__init__.py": "",
        "bridge/one.py": 'source = Path(__file__).with_name("one.jl")',
        "bridge/one.jl": 'include("two.jl")\n# include("three.jl")\nusing TwinGrad.AD: tape\n',
        "bridge/two.jl": 'include(joinpath(@__DIR__, "../experiments/four.jl"))',
        "bridge/three.jl": "",
        "experiments/four.jl": "",
        "julia_engine/Project.toml": 'name = "TwinGrad"',
        "julia_engine/src/TwinGrad.jl": 'include("ad/tape.jl")',
        "julia_engine/src/ad/tape.jl": "",
        "julia_engine/src/unused.jl": "",
        "julia_engine/ext/Extension.jl": "",
        "julia_engine/test/runtests.jl": "",
    }
    left_out = {"bridge/three.jl", "julia_engine/src/unused.jl", "julia_engine/test/runtests.jl"}
    assert tree(files, "bridge.one") == files.keys() - left_out


def test_an_installed_copy_without_git_has_the_digests_of_the_checkout(tmp_path: Path) -> None:
    for name in SOURCES.names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").touch()  # as in site-packages
    for job in (training("time", ("numpy",)), training("race", ("julia", "torch"))):
        assert Sources(tmp_path).digest(sweep.starts(job)) == SOURCES.digest(sweep.starts(job))


def test_what_is_no_source_is_refused() -> None:
    for start in ("bridge.no_such_module", "bridge/nothing.jl", "numpy", "bridge.worker.Worker"):
        with pytest.raises(KeyError, match="neither a source file nor a module"):
            SOURCES.digest([start])


def test_the_julia_projects_have_the_names_that_their_project_files_give() -> None:
    for module, folder in PROJECTS.items():
        assert tomllib.loads((ROOT / folder / "Project.toml").read_text())["name"] == module


def test_every_include_of_julia_has_a_constant_name() -> None:
    """Otherwise the closure would miss a file: `serve.jl` includes the program that its key names."""
    calls = [
        (name, line.strip())
        for name in SOURCES.names
        if name.endswith(".jl") and "/test/" not in name
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if "include(" in line.partition("#")[0]
    ]
    other = {name for name, line in calls if '("' not in line and '@__DIR__, "' not in line}
    assert other == {"experiments/microbenchmarks/serve.jl"}
    assert len(calls) > 60


def test_modules_are_imported_by_a_computed_name_only_where_the_key_knows() -> None:
    """The registry imports adapters, the micro-benchmarks' server a program: both are starting points of a key."""
    found = set()
    for name in SOURCES.names:
        if name.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / name).read_bytes())):
                call = node.func if isinstance(node, ast.Call) else None
                called = call.attr if isinstance(call, ast.Attribute) else call.id if isinstance(call, ast.Name) else ""
                dynamic = called in ("import_module", "__import__", "exec", "eval", "run_path", "run_module")
                if dynamic and any(not isinstance(argument, ast.Constant) for argument in node.args[:1]):
                    found.add(name)
    elsewhere = {
        "experiments/data/__init__.py",  # data counts by its digest
        "experiments/gradbench/protocol.py",  # makes no record
        "experiments/measures/registry.py",  # the closure of a key starts at its measure
        "py_engine/ad/compile/straight_line.py",  # runs arithmetic that it has generated itself
    }
    assert found - elsewhere == {"bridge/registry.py", "experiments/microbenchmarks/serve.py"}


# What a running engine says ------------------------------------------------------------------------------------------

ENGINES = ("numpy", "julia", "torch", "tensorflow", "jax")
INDEPENDENT = {
    "torch": "str(sys.modules['torch'].__config__.show())",
    "tensorflow": "str(sys.modules['tensorflow.python.framework.test_util'].IsMklEnabled())",
    # From 1.7 on Julia reaches what it has loaded through libblastrampoline, and its name alone would be said.
    "julia": "str(session._runtime.evaluate('string(let B = LinearAlgebra.BLAS; "
    "isdefined(B, :get_config) ? [basename(x.libname) for x in B.get_config().loaded_libs] : B.vendor() end, "
    "Char(124), TwinGradRuntime.blas())'))",
}
"""What else says which linear algebra an engine has, in its own process."""


@functools.cache
def trained(name: str) -> dict[str, Any]:
    """Train an engine in its own process: what it loaded, and what it says of its linear algebra."""
    if not (found := all_engines.availability(name)).ok:
        pytest.skip(found.reason)
    code = f"""
        import json, sys
        import numpy as np
        from bridge import registry, spec, weights
        from bridge.session import Optimizer
        import bridge.worker_process
        made = spec.load({str(papers.model_path("mnist-rnn"))!r})
        session = registry.get({name!r}).build(
            made, weights.initialise(made, 0), Optimizer("sgd", 0.01), 10, "float32", 1
        )
        x, y = np.zeros((20, *made.input.sample), "float32"), np.zeros(20, "int64")
        session.train_epoch(x, y, np.arange(20))
        session.evaluate(x, y)
        files = {{module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)}}
        if {name!r} == "tensorflow":
            import tensorflow.python.framework.test_util
        if {name!r} == "julia":
            session._runtime.evaluate("import LinearAlgebra")
        said = {{"files": sorted(files), "blas": session.linear_algebra(), "look": {INDEPENDENT.get(name, "''")}}}
        print("SAID" + json.dumps(said))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.partition("SAID")[2])
    return said


@pytest.mark.parametrize("name", ENGINES)
def test_a_worker_loads_no_file_of_ours_that_its_key_leaves_out(name: str) -> None:
    """An independent look at the closure: what Python itself has imported when a network is trained."""
    loaded = (Path(file) for file in trained(name)["files"])
    ours = {file.relative_to(ROOT).as_posix() for file in loaded if file.is_relative_to(ROOT)}
    ours = {file for file in ours if file.split("/")[0] in sources.PACKAGES}
    assert "bridge/worker_process.py" in ours and "bridge/checks.py" in ours
    assert ours - SOURCES.closure(sweep.starts(training("time", (name,)))) == set()


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_says_its_own_linear_algebra(name: str) -> None:
    said, look = trained(name)["blas"], trained(name)["look"]
    if name == "numpy":
        assert said == linear_algebra.of_numpy()
    elif name == "julia":
        names, _, own = look.partition("|")
        assert ("openblas" in names) == own.startswith("OpenBLAS")
        by_numpy = numpy_blas.newer_than(own) is not None
        assert said == f"{linear_algebra.of_numpy()} (numpy's)" if by_numpy else said.startswith(own)
    elif name == "torch":
        assert ("Math Kernel Library" in look and "USE_MKL=ON" in look) == ("MKL" in said)
        assert ("MKL-DNN v" in look) == ("oneDNN" in said)
    elif name == "tensorflow":
        assert said.endswith({"True": "oneDNN on", "False": "oneDNN off"}[look])
    else:
        assert said == f"XLA of jaxlib {importlib.metadata.version('jaxlib')}"
    if name not in ("numpy", "julia"):
        assert "openblas" not in said.lower(), "numpy's, which computes nothing here"


def test_threads_parse_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 has one counter of depth for all of them."""
    parsing: list[int] = []
    beside: list[int] = []
    parse = ast.parse

    def watched(text: str) -> ast.Module:
        parsing.append(1)
        beside.append(len(parsing))
        time.sleep(0.001)
        found = parse(text)
        parsing.pop()
        return found

    monkeypatch.setattr(sources.ast, "parse", watched)
    every = [Sources(ROOT), Sources(ROOT)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda one: one.digest(["experiments.measures.training"]), every)
    assert first == second
    assert len(beside) > 2 and max(beside) == 1


def test_a_file_that_is_edited_after_it_was_read_is_named(tmp_path: Path) -> None:
    for name, text in {"bridge/one.py": "from bridge import two", "bridge/two.py": "", "bridge/three.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = Sources(tmp_path)
    found.digest(["bridge.one"])
    assert found.edited(["bridge.one"]) is None
    (tmp_path / "bridge/three.py").write_text("other = 1")
    (tmp_path / "bridge/two.py").touch()
    found.check_unedited(["bridge.one"], "this run")  # what it does not read, and another time alone
    (tmp_path / "bridge/two.py").write_text("other = 1")
    assert found.edited(["bridge.one"]) == "bridge/two.py"
    with pytest.raises(
        ResultsError, match=r"^bridge/two\.py was edited while TwinGrad ran, so .* what this run has meas"
    ):
        found.check_unedited(["bridge.one"], "this run")
    (tmp_path / "bridge/two.py").unlink()
    assert found.edited(["bridge.one"]) == "bridge/two.py"
