"""The process of a command line: its signals, its exit code, and one line for every error that a user can meet."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterable
from types import FrameType
from typing import NoReturn

import click

from bridge.errors import TwinGradError
from experiments.cli.common import COMMAND, INTERRUPTED, RUN_FAILED, TERMINATED, USER_ERROR, Terminated, cli, complain
from experiments.extras import remedy
from py_engine.errors import EngineError, NonFiniteError


def main(arguments: Iterable[str] | None = None) -> NoReturn:
    """Run the command line and end the process with the code that fits."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal's encoding lacks becomes a ?
            stream.reconfigure(errors="replace")
    sys.exit(invoke(arguments))


def invoke(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; the exit code. Every error that a user can meet is one line on standard error."""
    try:
        code = cli.main(None if arguments is None else list(arguments), prog_name=COMMAND, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        usage = f"\nSee `{context.command_path} --help`." if context else ""
        complain(f"{error.format_message()}{usage}")
        return USER_ERROR
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except Terminated:
        click.echo("terminated", err=True)
        return TERMINATED
    except TwinGradError as error:
        complain(str(error))
        return error.exit_code
    except EngineError as error:  # a loss that is not a number is a run's failure, the rest are settings and data
        complain(str(error))
        return RUN_FAILED if isinstance(error, NonFiniteError) else USER_ERROR
    except OSError as error:  # of files of the user's there is a TwinGradError
        if error.filename is not None:
            complain(_in_words(error))
            return RUN_FAILED
        with contextlib.suppress(OSError):  # or Python would try to write the rest at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # whoever read has seen enough
            complain(f"the output could not be written: {error.strerror or error}")
        return RUN_FAILED
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package in ("py_engine", "bridge", "experiments"):
            raise
        complain(f"this needs the package {package}: {remedy(package)}")
        return USER_ERROR
    except MemoryError as error:
        complain(f"not enough memory: {error or 'none is left'}; see the sizes in what was asked for")
        return RUN_FAILED


def _in_words(error: OSError) -> str:
    """What is wrong with a file of TwinGrad's own, such as a temporary one, and what to do."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    advice = "free some space, or name another folder: " if full else "to use another folder: "
    places = "--results DIR for results, TWINGRAD_CACHE for the cache, TMPDIR for temporary files"
    return f"{error.filename}: {error.strerror or error}; {advice}{places}"


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated
