"""Compiling the Julia engine before somebody waits for it, or takes the time of its first epoch."""

from __future__ import annotations

import subprocess

from bridge.julia.environment import ENGINE, child_environment
from bridge.julia.find import Julia

__all__ = ["compile_engine"]


def compile_engine(julia: Julia) -> None:
    """Let Julia compile the engine in a process of its own and keep the result: inside Python it may not be able to.

    Takes a second where that has been done. What it can't do is done when the engine is loaded.
    """
    command = [julia.executable, "--startup-file=no", f"--project={ENGINE}", "-e", "import TwinGrad"]
    environment = child_environment(1, julia.kernels)
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
