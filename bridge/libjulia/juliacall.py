"""Julia in this process through juliacall and PythonCall.jl, from Julia 1.10.3 on.

juliacall starts Julia when it is imported, as its settings (environment variables ``PYTHON_JULIACALL_...``) say. Where
the user has set one, it stays. The project that holds PythonCall.jl is set up by juliapkg, which `prepare` asks for it;
with program and project both named, juliacall itself looks for nothing and downloads nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bridge.errors import JuliaError, JuliaUnavailableError
from bridge.libjulia import environment
from bridge.libjulia.find import Julia
from bridge.libjulia.runtime import JULIACALL, Runtime, Value

__all__ = ["OLDEST", "PROJECT_VARIABLE", "JuliacallRuntime", "Project", "obstacle", "prepare", "running", "version"]

OLDEST = (1, 10, 3)
"""The first Julia that juliacall supports."""

PROJECT_VARIABLE = "PYTHON_JULIACALL_PROJECT"
"""Where a user names the project that has PythonCall.jl."""

CONTACT_SECONDS = 15
"""How long a server may stand still while juliapkg is preparing."""

# juliapkg sets no limit. The last line is for us.
_PREPARE = f"""
import json, socket
socket.setdefaulttimeout({CONTACT_SECONDS})
import juliapkg
juliapkg.resolve()
print(json.dumps({{"executable": juliapkg.executable(), "project": juliapkg.project()}}))
"""

_WARNING, _ERROR = "[juliapkg] WARNING: ", "ERROR: "
"""How a warning of juliapkg's begins, and the line in which Julia says why it ends."""

_ENDS = _ERROR, "Traceback ", "{"
"""How the line begins from which on there is no more progress: an error's, or the answer's."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Project:
    """A Julia, and the project in which juliapkg has put PythonCall.jl for it."""

    executable: str
    project: str


class JuliacallRuntime(Runtime):
    """Starts Julia when it is made, or joins the one that juliacall has started in this process before.

    Raises `JuliaUnavailableError` when juliacall does not start; the other backend can't start Julia after that.
    """

    backend = JULIACALL

    def __init__(
        self,
        julia: Julia,
        threads: int,
        project: Project | None,
        notes: Sequence[str] = (),
        sysimage: str | None = None,
    ) -> None:
        super().__init__(julia, notes, _settings(julia, threads, project, sysimage))

    def _start(self) -> None:
        try:
            self._module: ModuleType = importlib.import_module("juliacall")
            self._main: Any = self._module.Main
        except Exception as error:
            raise JuliaUnavailableError(f"juliacall did not start Julia: {_first_line(error)}") from error

    def _evaluate(self, code: str) -> Value:
        try:
            value = self._main.seval(code)
        except self._module.JuliaError as error:
            raise JuliaError(self._message(error)) from None
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise JuliaError(
            f"{code} gives a {type(value).__name__}, which is not passed to Python: end it with '; nothing'"
        )

    def _message(self, error: Any) -> str:
        """Julia's message without the stack, which juliacall's own text of the error carries."""
        return str(self._module.JuliaError(error.exception))


def running() -> bool:
    """Whether juliacall has started Julia in this process already."""
    module = sys.modules.get("juliacall")
    return module is not None and hasattr(module, "Main")


def version() -> str | None:
    """Of the juliacall that is installed, which is not imported for this; None without one."""
    try:
        return importlib.metadata.version("juliacall")
    except importlib.metadata.PackageNotFoundError:
        return None


def obstacle(julia: Julia) -> str | None:
    """Why juliacall can't be used with this Julia, whatever else is installed; None: nothing speaks against it."""
    if importlib.util.find_spec("juliacall") is None:
        return "juliacall is not installed: pip install juliacall"
    if julia.release < OLDEST:
        return f"juliacall needs Julia {'.'.join(map(str, OLDEST))} or later, and this is {julia.version}"
    return None


def prepare(executable: str | None = None, say: Say = lambda line: None) -> Project:
    """Let juliapkg set up PythonCall.jl, for this Julia or for one that it finds or downloads; needs the internet.

    `say` gets its lines of progress. Raises `JuliaUnavailableError` with the reason when it can't.
    """
    if importlib.util.find_spec("juliapkg") is None:
        raise JuliaUnavailableError("juliapkg is not installed: pip install juliacall")
    variables = dict(os.environ)
    if executable is not None:
        variables.setdefault("PYTHON_JULIAPKG_EXE", executable)
    command = [sys.executable, "-u", "-c", _PREPARE]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=nothing, stdout=pipe, stderr=subprocess.STDOUT, env=variables, encoding="utf-8", errors="replace"
    ) as process:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                if not any(earlier.startswith(_ENDS) for earlier in lines) and not line.lstrip().startswith("|"):
                    say(lines[-1])
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise JuliaUnavailableError(f"juliapkg: {_reason(lines or [f'exit code {process.returncode}'])}")
    return Project(**json.loads(next(line for line in reversed(lines) if line.startswith("{"))))


def _reason(lines: Sequence[str]) -> str:
    """What juliapkg has warned of, and what Julia, where it ran, or Python ended with."""
    warnings = [line.removeprefix(_WARNING) for line in lines if line.startswith(_WARNING)]
    ended = next((line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)), lines[-1])
    return "; ".join([*warnings, ended])


def _settings(julia: Julia, threads: int, project: Project | None, sysimage: str | None) -> dict[str, str]:
    ours = {
        # Without Julia's own handling of signals, more than one thread and the garbage collector crash the process.
        "PYTHON_JULIACALL_HANDLE_SIGNALS": "yes",
        "PYTHON_JULIACALL_THREADS": str(threads),
        "PYTHON_JULIACALL_STARTUP_FILE": "no",
    }
    if sysimage is not None:
        ours["PYTHON_JULIACALL_SYSIMAGE"] = sysimage
    if project is not None:  # juliacall takes both or neither; where it has both, it looks for nothing
        ours["PYTHON_JULIACALL_EXE"] = project.executable
        ours[PROJECT_VARIABLE] = project.project
    users = {name: os.environ[name] for name in ours if name in os.environ}
    return environment.settings(threads, julia.kernels) | ours | users


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
