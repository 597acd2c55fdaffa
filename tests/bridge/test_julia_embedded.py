"""libjulia in a Python process: values, exceptions, entry points, threads, signals, and what must not share a process.

Julia starts once in a process, and never in that of the tests: they run programs, in a separate process where they
are about its start, its end or its settings, and otherwise in one for all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import julia as bridge_julia
from bridge.errors import JuliaUnavailableError
from bridge.libjulia import start
from bridge.libjulia.find import Julia

ROOT = Path(bridge_julia.__file__).parents[2]

Run = Callable[..., subprocess.CompletedProcess[str]]
RunBesideOthers = Callable[[str], str]

START = "from bridge import julia\nhere = julia.runtime(threads={threads}, backend='embedded')\n"


@pytest.fixture
def run(julia: Julia, tmp_path: Path) -> Run:
    """Runs Python code with a running Julia `here`; `start` is put before its start, `status` is how it must end."""

    def run(
        code: str, start: str = "", threads: int | None = 2, status: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        program = textwrap.dedent(start) + START.format(threads=threads) + textwrap.dedent(code)
        variables = {**os.environ, "TWINGRAD_JULIA": julia.executable, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        variables.pop("JULIA_NUM_THREADS", None)
        variables["TWINGRAD_SYSIMAGE"] = "0"  # whatever this user has made
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", program],
            cwd=tmp_path,
            env=variables | environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=300,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def run_beside_others(julia_process: Callable[[str, Path], str], tmp_path: Path) -> RunBesideOthers:
    """Runs Python code with a running Julia `here`, after other such code in the same process."""
    return lambda code: julia_process(START.format(threads=2) + textwrap.dedent(code), tmp_path)


# What can be asked.


def test_values_come_as_python_values(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        r"""
        expected = {
            "1 + 1": 2,
            "typemin(Int)": -(2**63),
            "typemax(UInt)": 2**64 - 1,
            "Int32(-4)": -4,
            "UInt32(4)": 4,
            "0.1": 0.1,
            "0.5f0": 0.5,
            "true": True,
            "false": False,
            "nothing": None,
            "x = 7; x + 1": 8,
            r'"an é, a \$, a \0 and a \n"': "an é, a $, a \0 and a \n",
            '""': "",
        }
        for code, value in expected.items():
            found = here.evaluate(code)
            assert found == value and type(found) is type(value), (code, found)
        assert here.evaluate("x") == 7
        """
    )


def test_exceptions_come_with_julias_message_and_leave_julia_usable(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        """
        expected = {
            "sqrt(-1.0)": "DomainError with -1.0",
            'error("the user\\'s own words")': "the user's own words",
            "undefined_thing": "undefined_thing",
            "[1, 2][3]": "BoundsError",
            "1 +": "syntax: incomplete" if here.julia.release < (1, 10, 0) else "ParseError",
            "throw(:not_an_exception)": "not_an_exception",
            "sin": "not passed to Python: end it with '; nothing'",
            "[1, 2]": "gives a Array, which is not passed",
        }
        for code, message in expected.items():
            try:
                here.evaluate(code)
            except julia.JuliaError as error:
                assert message in str(error), (code, str(error))
                assert "Stacktrace" not in str(error)
                assert error.exit_code == 1
            else:
                raise AssertionError(code)
            assert here.evaluate("1 + 1") == 2
        """
    )


def test_an_exception_that_can_not_be_shown_is_named(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        """
        here.evaluate("struct Shy <: Exception end; Base.showerror(io::IO, ::Shy) = error(); nothing")
        try:
            here.evaluate("throw(Shy())")
        except julia.JuliaError as error:
            assert str(error) == "Shy", error
        """
    )


def test_entry_points_work_on_numpys_memory(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        """
        import ctypes
        import numpy as np

        here.evaluate('''
            module Entry
            function double(address::Ptr{Float32}, columns::Cint, rows::Cint)::Cdouble
                x = unsafe_wrap(Array, address, (columns, rows))
                x .*= 2
                return x[1, 2]
            end
            pointer() = @cfunction(double, Cdouble, (Ptr{Float32}, Cint, Cint))
            nothing_there() = C_NULL
            end; nothing''')
        float_pointer = ctypes.POINTER(ctypes.c_float)
        double = here.function_pointer("Entry.pointer", [float_pointer, ctypes.c_int, ctypes.c_int], ctypes.c_double)
        x = np.arange(6, dtype=np.float32).reshape(2, 3)
        assert double(x.ctypes.data_as(float_pointer), 3, 2) == 6.0
        np.testing.assert_array_equal(x, [[0, 2, 4], [6, 8, 10]])

        for name in ("Entry.nothing_there", "Entry.not_there", "Entry", "1", "f()", "x; exit()", "f.", "é", "a\\n"):
            try:
                here.function_pointer(name, [], None)
            except julia.JuliaError as error:
                assert name in str(error) or "not_there" in str(error) or "Module" in str(error), error
            else:
                raise AssertionError(name)
        """
    )


def test_a_path_with_anything_in_it_is_no_code(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        r"""
        from bridge.libjulia.runtime import literal

        for text in ['plain', 'a "b" \\ $c $(exit(3)) `d` \n\t\x00\x1f', "é 日本 𝄞", '"; exit(3); "', '\\"', '$']:
            assert here.evaluate(literal(text)) == text, text
        """
    )


def test_it_tells_what_runs(run: Run, julia: Julia) -> None:
    done = run("print(here.info())", OPENBLAS_CORETYPE="")
    for part in (
        "backend='embedded'",
        f"version='{julia.version}'",
        f"executable='{julia.executable}'",
        f"libjulia='{julia.libjulia}'",
        "threads=2",
        "notes=('embedded was asked for',)",
    ):
        assert part in done.stdout


# How it starts.


@pytest.mark.parametrize(("threads", "variable", "expected"), [(1, "2", 1), (2, "1", 2), (None, "2", 2), (None, "", 1)])
def test_threads(threads: int | None, variable: str, expected: int, run: Run) -> None:
    run(
        f"""
        import os
        assert here.evaluate("Threads.nthreads()") == {expected}
        assert os.environ["JULIA_NUM_THREADS"] == "{variable}"
        """,
        threads=threads,
        JULIA_NUM_THREADS=variable,
    )


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("", 1), ("3", 3), (" 3", 3), ("0", 1), ("-2", 1), ("4,1", 4), ("4,auto", 4), ("auto", 2), ("auto,1", 2)],
)
def test_the_threads_that_the_users_setting_names(setting: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5}, raising=False)
    monkeypatch.setenv("JULIA_NUM_THREADS", setting)
    assert start._thread_count(None) == expected


@pytest.mark.parametrize("setting", ["two", "4,", ",1", "1.5", "auto,x", "4,1,1"])
def test_a_setting_that_names_no_number_of_threads_is_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JULIA_NUM_THREADS", setting)
    with pytest.raises(JuliaUnavailableError, match=f"JULIA_NUM_THREADS={setting}: expected"):
        start._thread_count(None)


def test_the_kernels_of_the_blas(run: Run, julia: Julia, monkeypatch: pytest.MonkeyPatch) -> None:
    if not julia.kernels:
        pytest.skip("needs a Julia whose BLAS is an OpenBLAS that names its kernels")
    ask = f"""
        import os
        from bridge.libjulia import environment
        print(here.info().kernels, environment.kernels_for({julia.kernels!r}), os.environ.get("OPENBLAS_CORETYPE"))
    """
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    chosen, better, variable = run(ask).stdout.split()
    assert chosen.upper() == better or chosen == julia.kernels
    assert variable == "None"  # as it was before
    assert run(ask, OPENBLAS_CORETYPE="Prescott").stdout.split()[0] == "Prescott"


def test_there_is_one_julia_in_a_process(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        """
        assert julia.runtime() is here
        assert julia.runtime(threads=2, backend="embedded") is here
        for arguments in ({"threads": 1}, {"backend": "juliacall"}, {"sysimage": "other.so"}):
            try:
                julia.runtime(**arguments)
            except julia.JuliaUnavailableError as error:
                assert "needs a new process" in str(error)
            else:
                raise AssertionError(arguments)
        """
    )


@pytest.mark.parametrize(
    ("variables", "arguments", "expected"),
    [
        (
            {"TWINGRAD_JULIA_BACKEND": "by hand"},
            "",
            "TWINGRAD_JULIA_BACKEND=by hand: expected one of juliacall, embedded",
        ),
        ({"TWINGRAD_JULIA_WAY": "by hand"}, "", "TWINGRAD_JULIA_WAY=by hand: expected one of juliacall, embedded"),
        ({}, "backend='by hand'", "backend='by hand': expected one of juliacall, embedded"),
        ({}, "threads=0", "Julia needs at least 1 thread, found threads=0"),
        ({"TWINGRAD_JULIA": "/nowhere"}, "", "TWINGRAD_JULIA=/nowhere names no Julia"),
    ],
)
def test_wrong_settings(variables: dict[str, str], arguments: str, expected: str) -> None:
    program = f"from bridge import julia\njulia.runtime({arguments})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert f"JuliaUnavailableError: {expected}" in done.stderr


def test_a_damaged_installation_is_named(run: Run) -> None:
    run(
        "raise AssertionError('started')",
        start="""
        import dataclasses, sys
        import numpy
        from bridge.errors import JuliaUnavailableError
        from bridge.libjulia.embedded import EmbeddedRuntime
        from bridge.libjulia.find import find

        sound = find()
        other = numpy._core._multiarray_umath.__file__
        changes = {
            "can't be loaded: /nowhere/libjulia.so": {"libjulia": "/nowhere/libjulia.so"},
            "can't be loaded: /nowhere/libffi.so.7": {"preload": ("/nowhere/libffi.so.7", *sound.preload)},
            f"{other} has no jl_is_initialized: this Julia is too new or too old": {"libjulia": other},
        }
        for words, change in changes.items():
            try:
                EmbeddedRuntime(dataclasses.replace(sound, **change), 1)
            except JuliaUnavailableError as error:
                assert words in str(error), error
            else:
                raise AssertionError(change)
        sys.exit(7)
        """,
        status=7,
    )


def test_another_libunwind_in_the_process_is_refused(run: Run, julia: Julia, tmp_path: Path) -> None:
    own = next((path for path in julia.preload if Path(path).name == "libunwind.so.8"), None)
    if own is None:
        pytest.skip("does not apply: this Julia does not bring its own libunwind")
    other = tmp_path / "libunwind.so.8"
    other.write_bytes(Path(own).read_bytes())
    done = run("", start=f"import ctypes; ctypes.CDLL({str(other)!r})\n", status=1)
    assert f"this process has loaded {other}, with which every exception" in done.stderr


# Who may call it.


def test_other_threads_are_refused(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        """
        import ctypes, threading

        entry = here.function_pointer("TwinGradRuntime.successor_pointer", [ctypes.c_int], ctypes.c_int)
        messages = []

        def call(work):
            try:
                work()
            except julia.JuliaError as error:
                messages.append(str(error))

        for work in (lambda: here.evaluate("1"), lambda: entry(1), here.info):
            thread = threading.Thread(target=call, args=(work,), name="other")
            thread.start()
            thread.join()
        assert len(messages) == 3, messages
        for message in messages:
            assert "called from thread 'other', but belongs to thread 'MainThread'" in message, message
        assert entry(1) == 2
        """
    )


def test_it_is_started_from_the_main_thread_only(run: Run) -> None:
    run(
        "",
        start="""
        import threading
        from bridge import julia

        def start():
            try:
                julia.runtime()
            except julia.JuliaUnavailableError as error:
                messages.append(str(error))

        messages = []
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        assert len(messages) == 1 and "start it, and call it, from the main thread" in messages[0], messages
        """,
    )


def test_a_forked_process_is_refused(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        """
        import os

        child = os.fork()
        if child == 0:
            try:
                here.evaluate("1")
            except julia.JuliaError as error:
                os._exit(5 if "forked process" in str(error) else 6)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert here.evaluate("1") == 1
        """
    )


def test_python_threads_run_while_julia_computes(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        """
        import threading

        here.evaluate("wait_a_while() = ccall(:usleep, Cint, (Cuint,), 300_000); nothing")
        ticks, done = [], threading.Event()
        ticker = threading.Thread(target=lambda: [ticks.append(1) for _ in iter(lambda: done.wait(0.01), True)])
        ticker.start()
        here.evaluate("wait_a_while()")
        during = len(ticks)
        done.set()
        ticker.join()
        assert during > 3, during
        """
    )


def test_exceptions_on_all_threads_while_garbage_is_collected(run_beside_others: RunBesideOthers) -> None:
    run_beside_others("assert all(here.evaluate('TwinGradRuntime.catches()') is True for _ in range(20))")


# Signals.


def test_ctrl_c_interrupts_python_and_leaves_julia_usable(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        """
        import os, signal, time

        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)
        except KeyboardInterrupt:
            assert here.evaluate("1 + 1") == 2
        else:
            raise AssertionError("not interrupted")
        """
    )


def test_ctrl_c_while_julia_computes_is_heard_when_the_call_ends(run_beside_others: RunBesideOthers) -> None:
    run_beside_others(
        """
        import os, signal, threading

        here.evaluate("finished = false; nothing")
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            here.evaluate("for _ in 1:60; ccall(:usleep, Cint, (Cuint,), 10_000); end; global finished = true; nothing")
        except KeyboardInterrupt:
            assert here.evaluate("finished") is True
        else:
            raise AssertionError("not interrupted")
        """
    )


def test_standard_streams_that_are_pipes_wait_as_before(run: Run) -> None:
    run(
        """
        assert os.get_blocking(1)
        threading.Timer(0.3, os.write, (send, b"later\\n")).start()
        assert sys.stdin.readline() == "later\\n"
        """,
        start="""
        import os, sys, threading

        receive, send = os.pipe()
        os.dup2(receive, 0)
        """,
    )


def test_handlers_and_blocked_signals_are_as_before(run: Run) -> None:
    run(
        """
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGWINCH}
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        """,
        start="""
        import os, signal

        heard = []
        handler = lambda number, frame: heard.append(number)
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
        """,
    )


def test_a_terminated_process_ends_without_julias_report(run: Run) -> None:
    done = run(
        """
        import os, signal, time

        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
        """,
        status=-signal.SIGTERM,
    )
    assert "signal" not in done.stderr


def test_what_julia_prints_is_written_by_the_end(run: Run) -> None:
    done = run('here.evaluate(\'atexit(() -> println("finalized")); print("printed "); nothing\')')
    assert done.stdout == "printed finalized\n"


# PyTorch. An empty module stands in for it: what counts is the name.


def test_torch_first_is_refused_with_the_reason(run: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    done = run("", start="import torch\n", status=1)
    assert "Julia can't be started: this process has imported torch. Julia and PyTorch have crashed each other" in (
        done.stderr
    )
    assert "bridge.worker.Worker" in done.stderr


def test_torch_afterwards_is_refused_with_the_reason(run: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    run(
        """
        import importlib.util, sys

        for statement in ("import torch", "import torch.nn", "from torch import nn"):
            try:
                exec(statement)
            except ImportError as error:
                assert "this process runs Julia" in str(error) and error.name == "torch", error
            else:
                raise AssertionError(statement)
        assert "torch" not in sys.modules
        assert importlib.util.find_spec("torch") is not None
        import json.tool
        """
    )


def test_where_torch_is_not_installed_nothing_changes(run: Run) -> None:
    run(
        """
        import importlib.util

        assert importlib.util.find_spec("torch") is None
        try:
            import torch
        except ModuleNotFoundError as error:
            assert "Julia" not in str(error)
        """,
        start="""
        import sys
        from bridge import julia
        sys.path[:] = [path for path in sys.path if "site-packages" not in path]
        """,
    )
