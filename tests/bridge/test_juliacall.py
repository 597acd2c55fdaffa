"""The backend juliacall: its settings, its errors, and when it is chosen.

A stand-in with juliacall's documented interface is imported in its place: it says what it was given, and answers as
PythonCall.jl would. Where a real juliacall works, `test_the_real_juliacall` runs it too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import julia as bridge_julia
from bridge.errors import JuliaUnavailableError
from bridge.libjulia import juliacall, start
from bridge.libjulia.find import Julia, Memory
from bridge.libjulia.juliacall import Project
from bridge.spec import ModelSpec

ROOT = Path(bridge_julia.__file__).parents[2]

STAND_IN = '''
"""As much of juliacall as the bridge uses. Like the real one it starts "Julia" when it is imported."""
import ctypes, json, os

print("settings", json.dumps({k: v for k, v in os.environ.items() if k.startswith(("PYTHON_JULIA", "OPENBLAS"))}))
if os.environ.get("STAND_IN_IS") == "broken":
    raise Exception("PythonCall.jl did not start properly\\nand more")
if os.environ.get("STAND_IN_IS") == "crashing":
    os.abort()

class JuliaError(Exception):
    def __init__(self, exception, backtrace=None):
        super().__init__(exception, backtrace)
    exception = property(lambda self: self.args[0])
    def __str__(self):
        return self.args[0] if self.args[1] is None else self.args[0] + "\\nStacktrace:\\n" + self.args[1]

successor = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: x + 1)

class Main:
    answers = {
        "string(VERSION)": os.environ.get("STAND_IN_VERSION", "1.11.2"),
        "1 + 1": 2,
        "nothing": None,
        "Threads.nthreads()": int(os.environ["PYTHON_JULIACALL_THREADS"]),
        "unsafe_string(Base.JLOptions().image_file)": "sys.so",
        "TwinGradRuntime.blas()": "OpenBLAS 0.3.23",
        "TwinGradRuntime.kernels()": "SkylakeX",
        "TwinGradRuntime.catches()": True,
        "UInt(TwinGradRuntime.successor_pointer())": ctypes.cast(successor, ctypes.c_void_p).value,
        "[1, 2]": [1, 2],
    }
    def seval(self, code):
        if code.startswith("Base.include(Main, "):
            assert code.endswith('runtime.jl"); nothing'), code
            return None
        if code not in self.answers:
            raise JuliaError("UndefVarError: `" + code + "` not defined", "top-level scope")
        return self.answers[code]

Main = Main()
'''

FACTS = Julia(
    executable="/opt/julia-1.11.2/bin/julia",
    source="PATH",
    version="1.11.2",
    bindir="/opt/julia-1.11.2/bin",
    libjulia="/opt/julia-1.11.2/lib/libjulia.so.1.11",
    sysimage="/opt/julia-1.11.2/lib/julia/sys.so",
    preload=(),
    blas="OpenBLAS 0.3.27",
    kernels="",
)

# The stand-in's folder is searched first.
PROLOGUE = """
import os, sys
from bridge import julia
from bridge.errors import JuliaError, JuliaUnavailableError
from bridge.libjulia.find import Julia
from bridge.libjulia.juliacall import JuliacallRuntime, Project
facts = Julia(**{facts!r})
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


def facts_of(julia: Julia) -> dict[str, object]:
    return {name: getattr(julia, name) for name in Julia.__dataclass_fields__}


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    folder = tmp_path / "stand-in"
    folder.mkdir()
    (folder / "juliacall.py").write_text(STAND_IN, encoding="utf-8")
    return folder


@pytest.fixture
def run(stand_in: Path, tmp_path: Path) -> Run:
    def run(code: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON_JULIA", "TWINGRAD"))}
        kept |= {"PYTHONPATH": os.pathsep.join([str(stand_in), str(ROOT)]), "TWINGRAD_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", PROLOGUE.format(facts=facts_of(FACTS)) + textwrap.dedent(code)],
            env=kept | environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


def settings_seen(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    line = next(line for line in done.stdout.splitlines() if line.startswith("settings "))
    seen: dict[str, str] = json.loads(line.removeprefix("settings "))
    return {name.removeprefix("PYTHON_JULIACALL_"): value for name, value in seen.items() if "JULIACALL" in name}


# Its settings.


def test_juliacall_is_told_threads_signals_and_places_before_it_is_imported(run: Run) -> None:
    done = run("JuliacallRuntime(facts, 2, Project('/opt/julia/bin/julia', '/env/julia_env'))")
    assert settings_seen(done) == {
        "HANDLE_SIGNALS": "yes",
        "THREADS": "2",
        "STARTUP_FILE": "no",
        "EXE": "/opt/julia/bin/julia",
        "PROJECT": "/env/julia_env",
    }


def test_without_a_project_juliacall_asks_juliapkg_itself(run: Run) -> None:
    seen = settings_seen(run("JuliacallRuntime(facts, 1, None)"))
    assert "EXE" not in seen
    assert "PROJECT" not in seen


def test_a_system_image_is_passed_on(run: Run) -> None:
    seen = settings_seen(run("JuliacallRuntime(facts, 1, None, sysimage='/cache/sys.so')"))
    assert seen["SYSIMAGE"] == "/cache/sys.so"


def test_what_the_user_has_set_stays(run: Run) -> None:
    code = "JuliacallRuntime(facts, 2, Project('/ours/julia', '/ours/project'))"
    users = {"HANDLE_SIGNALS": "no", "STARTUP_FILE": "yes", "EXE": "/theirs/julia", "PROJECT": "/theirs/project"}
    done = run(code, **{f"PYTHON_JULIACALL_{name}": value for name, value in users.items()})
    assert settings_seen(done) == {**users, "THREADS": "2"}


def test_a_program_of_the_users_gets_the_project_that_was_set_up_for_it(run: Run) -> None:
    done = run("JuliacallRuntime(facts, 2, Project('/theirs/julia', '/ours/p'))", PYTHON_JULIACALL_EXE="/theirs/julia")
    assert settings_seen(done)["EXE"] == "/theirs/julia"
    assert settings_seen(done)["PROJECT"] == "/ours/p"


def test_the_environment_is_afterwards_as_it_was(run: Run) -> None:
    run(
        """
        before = dict(os.environ)
        JuliacallRuntime(facts, 2, Project("/opt/julia", "/env"))
        assert dict(os.environ) == before
        """
    )


# What it answers.


def test_values_exceptions_and_entry_points(run: Run) -> None:
    run(
        """
        from ctypes import c_int

        here = JuliacallRuntime(facts, 2, None)
        assert here.evaluate("1 + 1") == 2
        assert here.evaluate("nothing") is None
        for code, message in {
            "not_there": "UndefVarError: `not_there` not defined",
            "[1, 2]": "[1, 2] gives a list, which is not passed to Python: end it with '; nothing'",
        }.items():
            try:
                here.evaluate(code)
            except JuliaError as error:
                assert str(error) == message, error
            else:
                raise AssertionError(code)
        assert here.function_pointer("TwinGradRuntime.successor_pointer", [c_int], c_int)(41) == 42
        """
    )


def test_other_threads_are_refused(run: Run) -> None:
    run(
        """
        import threading
        from ctypes import c_int

        here = JuliacallRuntime(facts, 2, None)
        entry = here.function_pointer("TwinGradRuntime.successor_pointer", [c_int], c_int)
        messages = []

        def call():
            for work in (lambda: here.evaluate("1 + 1"), lambda: entry(1)):
                try:
                    work()
                except JuliaError as error:
                    messages.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(messages) == 2 and "belongs to thread 'MainThread'" in messages[0], messages
        """
    )


def test_a_juliacall_that_does_not_start_is_quoted(run: Run) -> None:
    done = run("JuliacallRuntime(facts, 2, None)", status=1, STAND_IN_IS="broken")
    assert "JuliaUnavailableError: juliacall did not start Julia: PythonCall.jl did not start properly" in done.stderr


def test_torch_is_kept_out_in_both_orders(run: Run, stand_in: Path) -> None:
    (stand_in / "torch.py").touch()
    done = run("import torch\nJuliacallRuntime(facts, 1, None)", status=1)
    assert "Julia can't be started: this process has imported torch" in done.stderr
    done = run("JuliacallRuntime(facts, 1, None)\nimport torch", status=1)
    assert "ImportError: torch can't be imported: this process runs Julia" in done.stderr


# When it is taken.


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Memory:
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    for name in ("PYTHON_JULIACALL_EXE", "PYTHON_JULIACALL_PROJECT", "PYTHON_JULIAPKG_EXE"):
        monkeypatch.delenv(name, raising=False)
    return Memory()


@pytest.fixture
def searched(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes started from here find the stand-in."""
    monkeypatch.syspath_prepend(str(stand_in))


def julia_of(version: str) -> Julia:
    return Julia(**{**facts_of(FACTS), "version": version})


@pytest.mark.parametrize(
    ("version", "allowed"), [("1.5.3", False), ("1.10.2", False), ("1.10.3", True), ("1.12.0", True)]
)
def test_it_needs_a_julia_that_juliacall_supports(version: str, allowed: bool, searched: None) -> None:
    reason = juliacall.obstacle(julia_of(version))
    assert reason == (None if allowed else f"juliacall needs Julia 1.10.3 or later, and this is {version}")


def test_it_needs_juliacall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert juliacall.obstacle(julia_of("1.11.2")) == "juliacall is not installed: pip install juliacall"


def test_an_old_julia_is_embedded_and_the_reason_reported(memory: Memory, searched: None) -> None:
    assert start.choose(julia_of("1.5.3"), memory) == (
        "embedded",
        ["not through juliacall: juliacall needs Julia 1.10.3 or later, and this is 1.5.3"],
    )


def test_without_pythoncall_it_is_embedded(memory: Memory, searched: None) -> None:
    backend, notes = start.choose(FACTS, memory)
    assert backend == "embedded"
    assert notes == ["not through juliacall: PythonCall.jl is not set up: python -m bridge.julia.install"]


def test_it_is_taken_where_it_has_been_seen_to_work(memory: Memory, searched: None, tmp_path: Path) -> None:
    start.remember_project(FACTS, memory, Project(FACTS.executable, str(tmp_path)))
    assert start.choose(FACTS, memory) == ("juliacall", [])
    assert start.verdict("juliacall", FACTS, memory) == start.Verdict(True, "")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            "broken",
            "juliacall ended with exit code 1: juliacall did not start Julia: PythonCall.jl did not start properly",
        ),
        ("crashing", "juliacall was ended by SIGABRT"),
    ],
)
def test_where_it_fails_julia_is_embedded_and_the_reason_reported(
    kind: str, reason: str, memory: Memory, searched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.remember_project(FACTS, memory, Project(FACTS.executable, str(tmp_path)))
    monkeypatch.setenv("STAND_IN_IS", kind)
    backend, [note] = start.choose(FACTS, memory)
    assert backend == "embedded"
    assert note.startswith(f"not through juliacall: {reason}")
    monkeypatch.delenv("STAND_IN_IS")
    assert start.choose(FACTS, memory) == (backend, [note])  # remembered: not tried again at every start


def test_a_way_that_leads_to_another_julia_does_not_count(
    memory: Memory, searched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.remember_project(FACTS, memory, Project(FACTS.executable, str(tmp_path)))
    monkeypatch.setenv("STAND_IN_VERSION", "1.10.4")
    seen = start.verify("juliacall", FACTS, memory)
    assert not seen.ok
    assert "juliacall leads to Julia 1.10.4, not to Julia 1.11.2" in seen.reason


def test_a_project_that_is_gone_is_no_project(memory: Memory, tmp_path: Path) -> None:
    start.remember_project(FACTS, memory, Project(FACTS.executable, str(tmp_path / "gone")))
    assert start.known_project(FACTS, memory) is None


def test_the_project_that_the_user_names_is_taken(
    memory: Memory, searched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.remember_project(FACTS, memory, Project(FACTS.executable, "/ours"))
    monkeypatch.setenv("PYTHON_JULIACALL_PROJECT", str(tmp_path))
    assert start.known_project(FACTS, memory) == Project(FACTS.executable, str(tmp_path))
    assert start.choose(FACTS, memory) == ("juliacall", [])
    monkeypatch.setenv("PYTHON_JULIACALL_PROJECT", str(tmp_path / "gone"))
    with pytest.raises(JuliaUnavailableError, match=r"PYTHON_JULIACALL_PROJECT=.*gone names no folder"):
        start.known_project(FACTS, memory)


def test_a_project_that_is_gone_is_a_reason_against_juliacall_and_against_nothing_else(
    memory: Memory, searched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "find", lambda: FACTS)
    monkeypatch.setattr(start, "Memory", lambda: memory)
    start.remember_project(FACTS, memory, Project(FACTS.executable, str(tmp_path)))
    monkeypatch.setenv("PYTHON_JULIACALL_PROJECT", "")
    assert start.known_project(FACTS, memory) is not None, "an empty setting is none"
    monkeypatch.setenv("PYTHON_JULIACALL_PROJECT", str(tmp_path / "gone"))
    seen = start.status()
    assert seen.julia == FACTS and not seen.obstacle
    refused = seen.backends["juliacall"]
    assert refused is not None and not refused.ok and "gone names no folder" in refused.reason
    assert start.backend(FACTS) is None, "whoever starts Julia gets the error"
    monkeypatch.setattr(start.juliacall, "obstacle", lambda julia: "too old")
    assert start.backend(FACTS) == "embedded"


def test_the_backend_is_the_one_that_is_asked_for_or_that_works(
    memory: Memory, searched: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "Memory", lambda: memory)
    assert start.backend(FACTS) == "embedded", "no project"
    start.remember_project(FACTS, memory, Project(FACTS.executable, str(tmp_path)))
    assert start.backend(FACTS) is None, "nobody has tried"
    assert start.choose(FACTS, memory)[0] == "juliacall" == start.backend(FACTS)
    monkeypatch.setenv("TWINGRAD_JULIA_BACKEND", "embedded")
    assert start.backend(FACTS) == "embedded"


def test_the_project_that_juliapkg_has_resolved_is_taken(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "resolved_by_juliapkg", lambda: (FACTS.executable, str(tmp_path)))
    assert start.known_project(FACTS, memory) is None  # resolved for others, without PythonCall.jl
    (tmp_path / "Project.toml").write_text('[deps]\nPythonCall = "6099a3de-0909-46bc-b1f4-468b9a2dfc0d"\n')
    assert start.known_project(FACTS, memory) == Project(FACTS.executable, str(tmp_path))
    monkeypatch.setattr(start, "resolved_by_juliapkg", lambda: ("/another/julia", str(tmp_path)))
    assert start.known_project(FACTS, memory) is None


def test_nothing_is_downloaded_when_julia_starts(run: Run, tmp_path: Path) -> None:
    # Without a project juliacall would ask juliapkg, which downloads: it is not even imported.
    done = run("julia.runtime(backend='juliacall')", status=1, TWINGRAD_JULIA=fake_julia(tmp_path))
    assert "PythonCall.jl is not set up: python -m bridge.julia.install" in done.stderr
    assert "settings" not in done.stdout


def test_the_users_variables_lead_to_juliacall(run: Run, tmp_path: Path) -> None:
    users = {"PYTHON_JULIACALL_EXE": fake_julia(tmp_path), "PYTHON_JULIACALL_PROJECT": str(tmp_path)}
    done = run("print(julia.runtime().info())", **users)
    assert "Info(backend='juliacall', version='1.11.2'" in done.stdout
    assert settings_seen(done)["PROJECT"] == str(tmp_path)


def fake_julia(folder: Path) -> str:
    """A program that passes the proof as Julia 1.11.2."""
    program = folder / "julia"
    for name in ("libjulia.so.1.11", "sys.so"):
        (folder / name).touch()
    said = ["version\\t1.11.2", "threads\\t2", "blas\\tOpenBLAS", "kernels\\t", f"bindir\\t{folder}"]
    said += [f"sysimage\\t{folder}/sys.so", f"library\\t{folder}/libjulia.so.1.11", "step\\t"]
    program.write_text("#!/bin/sh\n" + "".join(f"printf '{line}\\n'\n" for line in said), encoding="utf-8")
    program.chmod(0o755)
    return str(program)


def test_the_whole_way_from_the_setting_to_the_runtime(run: Run, tmp_path: Path) -> None:
    done = run(
        """
        from bridge.libjulia import start
        from bridge.libjulia.find import Memory, find
        start.remember_project(find(), Memory(), Project(find().executable, os.getcwd()))
        assert julia.status().backends == {"juliacall": None, "embedded": None}
        here = julia.runtime(threads=2)
        assert julia.status().backends["juliacall"].ok
        assert julia.runtime() is here
        print(here.info())
        """,
        TWINGRAD_JULIA=fake_julia(tmp_path),
    )
    assert "Info(backend='juliacall', version='1.11.2'" in done.stdout
    assert "threads=2" in done.stdout
    assert "notes=()" in done.stdout
    assert settings_seen(done)["EXE"] == str(tmp_path / "julia")


def test_a_juliacall_that_runs_already_is_joined(run: Run, tmp_path: Path) -> None:
    done = run(
        """
        import juliacall
        print(julia.runtime().info())
        for _ in range(2):
            assert julia.runtime(threads=3) is julia.runtime(threads=2) is julia.runtime()
        """,
        TWINGRAD_JULIA=fake_julia(tmp_path),
        PYTHON_JULIACALL_THREADS="3",
    )
    assert "backend='juliacall'" in done.stdout
    assert "threads=3" in done.stdout
    assert "juliacall had started Julia in this process" in done.stdout
    done = run(
        "import juliacall\njulia.runtime(backend='embedded')",
        status=1,
        TWINGRAD_JULIA=fake_julia(tmp_path),
        PYTHON_JULIACALL_THREADS="3",
    )
    assert "Julia runs in this process already, started by juliacall" in done.stderr
    done = run(
        "import juliacall\njulia.runtime(threads=4)",
        status=1,
        TWINGRAD_JULIA=fake_julia(tmp_path),
        PYTHON_JULIACALL_THREADS="3",
    )
    assert "with threads=3: threads=4 needs a new process" in done.stderr


# juliapkg, which sets up PythonCall.jl.

JULIAPKG = """
import os, subprocess, sys
def resolve():
    print("[juliapkg] Locating Julia")
    print("[juliapkg] WARNING: juliapkg_exe=/opt/julia is Julia 1.12.2 but 1.10.3 - 1.11 is required")
    print("          | import Pkg")
    if os.environ.get("STAND_IN_IS") == "offline":
        raise Exception("urlopen error: no way to the network")
    if os.environ.get("STAND_IN_IS") == "unsatisfiable":
        code = "import sys; sys.exit(chr(10).join(['ERROR: Unsatisfiable requirements', 'Stacktrace:', ' [1] add']))"
        subprocess.run([sys.executable, "-c", code], check=True)
def executable():
    return os.environ.get("PYTHON_JULIAPKG_EXE", "/downloaded/julia")
def project():
    return "/env/julia_env"
"""


@pytest.fixture
def juliapkg(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stand_in / "juliapkg.py").write_text(JULIAPKG, encoding="utf-8")
    monkeypatch.syspath_prepend(str(stand_in))
    monkeypatch.setenv("PYTHONPATH", str(stand_in))
    monkeypatch.delenv("PYTHON_JULIAPKG_EXE", raising=False)


def test_juliapkg_prepares_the_julia_it_is_told_or_one_of_its_own(
    juliapkg: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert juliacall.prepare("/opt/julia") == Project("/opt/julia", "/env/julia_env")
    assert juliacall.prepare() == Project("/downloaded/julia", "/env/julia_env")
    monkeypatch.setenv("PYTHON_JULIAPKG_EXE", "/theirs/julia")
    assert juliacall.prepare("/opt/julia").executable == "/theirs/julia"


def test_a_juliapkg_that_fails_is_quoted(juliapkg: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_IS", "offline")
    with pytest.raises(JuliaUnavailableError, match="required; Exception: urlopen error: no way to the network"):
        juliacall.prepare()


def test_where_julia_fails_its_own_message_is_quoted(juliapkg: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_IS", "unsatisfiable")
    with pytest.raises(JuliaUnavailableError, match=r"1.10.3 - 1.11 is required; Unsatisfiable requirements$"):
        juliacall.prepare()


def test_what_juliapkg_does_is_passed_on_line_by_line(juliapkg: None) -> None:
    lines: list[str] = []
    juliacall.prepare(say=lines.append)
    assert lines[0] == "[juliapkg] Locating Julia"
    assert len(lines) == 2, "the lines of Julia that it runs, and the answer, are no progress"


# The real thing.


@pytest.fixture
def run_really(julia: Julia, tmp_path: Path) -> Callable[[str], str]:
    """Runs a program in which Julia is started by the real juliacall; skips the test where that cannot be."""
    memory = Memory()
    backend, notes = start.choose(julia, memory)
    if backend != "juliacall":
        pytest.skip(f"does not apply: Julia is not started by juliacall here: {'; '.join(notes)}")
    project = start.known_project(julia, memory)
    assert project is not None

    def run(code: str) -> str:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            # Where a program itself imports juliacall, these lead to the same Julia, and nothing is downloaded.
            "PYTHON_JULIACALL_EXE": project.executable,
            "PYTHON_JULIACALL_PROJECT": project.project,
            "PYTHON_JULIACALL_THREADS": "2",
            "PYTHON_JULIACALL_HANDLE_SIGNALS": "yes",
        }
        program = [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)]
        done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_the_real_juliacall(run_really: Callable[[str], str]) -> None:
    run_really(
        """
        from bridge import julia
        here = julia.runtime(threads=2)
        assert here.info().backend == "juliacall", here.info()
        assert here.info().threads == 2
        assert here.evaluate("1 + 1") == 2
        try:
            here.evaluate("sqrt(-1.0)")
        except julia.JuliaError as error:
            assert str(error).startswith("DomainError with -1.0") and "Stacktrace" not in str(error), error
        assert here.evaluate("TwinGradRuntime.catches()") is True
        """
    )


OF_OTHERS = """
import juliacall

module = juliacall.newmodule("OfOthers")
module.seval("using Statistics; count = Ref(0); spread(x) = (count[] += 1; std(x))")
spread = module.spread

def calls():
    return module.seval("count[]")
"""
"""A package of somebody else's that uses juliacall as its documentation says."""

TRAINING = """
import gc
import numpy as np
from bridge import julia, spec
from bridge.session import Optimizer

model = spec.loads({spec!r})
rng = np.random.default_rng(0)
x, y, order = rng.standard_normal((40, 15), dtype=np.float32), rng.integers(0, 4, 40), np.arange(40)

def build():
    return julia.build(model, optimizer=Optimizer("adam", 0.01), batch_size=8, threads=2)
"""


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_another_package_that_uses_juliacall_lives_beside_ours(
    run_really: Callable[[str], str], small_paper_model: ModelSpec, tmp_path: Path, first: str
) -> None:
    (tmp_path / "of_others.py").write_text(OF_OTHERS, encoding="utf-8")
    starts = ["import of_others\n", "session = build()\n"]
    run_really(
        TRAINING.format(spec=small_paper_model.dump())
        + "".join(starts if first == "theirs" else starts[::-1])
        + """
import os

import juliacall
assert julia.runtime().info().backend == "juliacall"
assert np.isfinite(session.train_epoch(x, y, order)).all()
assert abs(of_others.spread(x[:, 0]) - x[:, 0].std(ddof=1)) < 1e-6
assert np.isfinite(session.train_epoch(x, y, order)).all() and of_others.calls() == 1
assert juliacall.Main.seval("Base.active_project()").startswith(os.environ["PYTHON_JULIACALL_PROJECT"])
assert juliacall.Main.seval("isdefined(Main, :gradient)") is False
energy = julia.function("(w, x) -> sum(abs2, tanh.(w * x))")
assert np.isfinite(energy(np.ones((3, 2)), np.ones((5, 3))))
"""
    )


def test_collecting_garbage_on_both_sides_changes_no_result(
    run_really: Callable[[str], str], small_paper_model: ModelSpec
) -> None:
    run_really(
        TRAINING.format(spec=small_paper_model.dump())
        + """
def trained(collecting):
    session, losses = build(), []
    for _ in range(10):
        losses.append(session.train_epoch(x, y, order))
        if collecting:
            import juliacall
            held = [juliacall.Main.rand(100) for _ in range(20)]  # Julia's, held by Python
            lent = juliacall.Main.Ref(rng.standard_normal(1000))  # Python's, held by Julia
            del held, lent
            gc.collect()
            juliacall.Main.GC.gc()
    return np.concatenate(losses), session.params()

plain, collected = trained(False), trained(True)
np.testing.assert_array_equal(plain[0], collected[0])
for name, value in plain[1].items():
    np.testing.assert_array_equal(value, collected[1][name])
"""
    )


def test_julias_own_threads_may_work_beside_a_session(
    run_really: Callable[[str], str], small_paper_model: ModelSpec
) -> None:
    run_really(
        TRAINING.format(spec=small_paper_model.dump())
        + """
alone = build().train_epoch(x, y, order)
import juliacall
juliacall.Main.seval('''begin
    done = Threads.Atomic{Int}(0)
    others = [Threads.@spawn(for _ in 1:200
        sum(rand(1000)); yield(); Threads.atomic_add!(done, 1)
    end) for _ in 1:2]
end; nothing''')
beside = build().train_epoch(x, y, order)
juliacall.Main.seval("foreach(wait, others)")
assert juliacall.Main.seval("done[]") == 400
np.testing.assert_array_equal(alone, beside)
"""
    )
