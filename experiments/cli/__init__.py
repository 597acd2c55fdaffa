"""The command `twingrad`: every step from raw data to the finished paper, and single networks, trained and asked.

A user's mistake ends with `error: ...` and code 2, a failed run with code 1, ctrl-C with 130; none shows a
traceback. Heavy packages are imported by the commands that need them, so that `--help` is quick and works
without the extras. A module here holds some commands (importing it adds them to `cli`), or what all have in common.
"""

from __future__ import annotations

from experiments.cli import looking, networks, reports, reproducing, runs
from experiments.cli.common import INTERRUPTED, RUN_FAILED, TERMINATED, USER_ERROR, cli
from experiments.cli.process import invoke, main

__all__ = [
    "INTERRUPTED",
    "RUN_FAILED",
    "TERMINATED",
    "USER_ERROR",
    "cli",
    "invoke",
    "looking",
    "main",
    "networks",
    "reports",
    "reproducing",
    "runs",
]
