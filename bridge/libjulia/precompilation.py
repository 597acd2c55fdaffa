"""Compiling the Julia engine before somebody waits for it, or takes the time of its first epoch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

from bridge.libjulia.environment import ENGINE
from bridge.libjulia.find import Julia

__all__ = ["compile_engine"]

MESSAGE = "compiling the Julia engine (once per machine)"
PATIENCE = 5.0
"""Seconds after which Julia is compiling: to load what is compiled takes one or two."""
EVERY = 1.0, 20.0
"""Seconds between two words on how long it has taken, on a terminal and anywhere else."""


def compile_engine(julia: Julia) -> None:
    """Let Julia compile the engine in its own process and keep the result: inside Python it may not be able to.

    Takes a second where that has been done; says on standard error what it does where it takes longer. What it can't do
    is done when the engine is loaded.
    """
    command = [julia.executable, "--startup-file=no", f"--project={ENGINE}", "-e", "import TwinGrad"]
    nowhere = subprocess.DEVNULL
    # Julia itself would take half of the processors to write machine code.
    environment = {"JULIA_IMAGE_THREADS": str(os.cpu_count() or 1)} | julia.environment(1)
    with subprocess.Popen(command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere) as process:
        try:
            _wait(process)
        except BaseException:
            process.kill()
            raise


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process, and say how long it has taken: in one line on a terminal, else now and then."""
    started = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
        return
    out = sys.stderr
    is_terminal = out is not None and out.isatty()
    start, end = ("\r", "") if is_terminal else ("", "\n")

    def say(text: str, end: str = end) -> None:
        if out is not None:
            print(f"{start}{MESSAGE}{text}", end=end, file=out, flush=True)

    say("")
    while True:
        try:
            process.wait(EVERY[0] if is_terminal else EVERY[1])
        except subprocess.TimeoutExpired:
            say(f": {time.monotonic() - started:.0f} s")
        else:
            say(f": done in {time.monotonic() - started:.0f} s", "\n")
            return
