"""A process that answers requests, one line of JSON each, and never outlives the process that started it.

It has its cores from its first instruction on. It ends with `close`, with its parent (however that ends, and stopped or
busy as it may be), and whenever a request is interrupted; whatever it may have started ends with it. It belongs to the
process that made it, and not to forks of that. `bridge.child_process` is its other side, for programs in Python.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

__all__ = ["Child", "ChildDiedError", "completed", "ending", "import_path", "was_killed"]

_PATIENCE = 10.0
"""Seconds that a process gets to end by itself."""

_LAST_LINES = 20
"""Lines of a dead process's standard error that are kept."""
_CRASH_REPORT = "Fatal Python error: "
"""What Python's report on a crash of its process begins with."""


class ChildDiedError(Exception):
    """A process that gave no answer: its exit status, or None where it has not ended, and what it last said."""

    def __init__(self, status: int | None, said: Sequence[str]) -> None:
        self.status = status
        self.said = list(said)
        super().__init__(f"{self.ending}; it last said: {' / '.join(self.said) or 'nothing'}")

    @property
    def ending(self) -> str:
        """How it ended, in words that follow its name."""
        return "stopped answering" if self.status is None else ending(self.status)


def ending(status: int) -> str:
    """How a process ended, from its exit status, in words that follow its name."""
    if status >= 0:
        return f"ended with exit code {status}"
    hint = " (for want of memory, perhaps)" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"


def was_killed(status: int) -> bool:
    """Whether something outside has ended a process, by its exit status: the same could go well another time."""
    return status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT)


def import_path() -> list[str]:
    """Where this process finds modules, as text: Python passes over what is none, such as a `Path`."""
    return [place for place in sys.path if isinstance(place, str)]


class Child:
    """A process, its two pipes, and its folder, which goes with it."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], folder: Path, cores: Collection[int] = ()
    ) -> None:
        """`cores`: which ones it may use; empty: those of this process. The folder is removed where it can't start."""
        self.folder = folder
        self._owner = os.getpid()
        try:
            # Its own group: Ctrl-C in the terminal is the parent's to handle, and whatever the process starts can
            # be ended with it. Still of the parent's session: a stopped group whose parent dies is woken.
            with _pinned(cores), self.stderr.open("wb") as stderr:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=dict(variables),
                    encoding="utf-8",
                    process_group=0,
                )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._finalizer = weakref.finalize(self, _end, self._process, folder, self._owner)

    @property
    def pid(self) -> int:
        """The process's id, and its group's."""
        return self._process.pid

    @property
    def stderr(self) -> Path:
        """The file with what the process and its libraries have printed; gone after `close`."""
        return self.folder / "stderr.txt"

    @property
    def is_ours(self) -> bool:
        """Whether it was started in this process, and not in one that this was forked from."""
        return os.getpid() == self._owner

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet."""
        return self._finalizer.alive

    def ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the answer; see `send` and `receive`."""
        self.send(call, **arguments)
        return self.receive()

    def send(self, call: str, **arguments: Any) -> None:
        """Send a request. Raises `ChildDiedError` where nobody reads it, and `TypeError` for what JSON can't hold."""
        line = json.dumps({"call": call, "with": arguments}, default=_as_number) + "\n"
        try:
            pipe = cast("IO[str]", self._process.stdin)
            pipe.write(line)
            pipe.flush()
        except BrokenPipeError:
            raise self._death() from None
        except BaseException:
            self.close()
            raise

    def receive(self) -> dict[str, Any]:
        """Return the next answer: see `bridge.child_process`. Raises `ChildDiedError` where there is none."""
        try:
            line = cast("IO[str]", self._process.stdout).readline()
        except BaseException:
            self.close()  # interrupted: whatever it still answers would be taken for the answer to another request
            raise
        if not line.endswith("\n"):
            raise self._death()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it has started."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """End the process, from any thread: who waits for an answer gets `ChildDiedError`. `close` is still needed."""
        if self.is_open:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)

    def close(self) -> None:
        """End the process and remove its files. Calling it twice does no harm."""
        self._finalizer()

    def _death(self) -> ChildDiedError:
        """The process has closed its end of the pipe: how it died and what it last said."""
        try:
            status = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        said = _last_words(self.stderr.read_text(encoding="utf-8", errors="replace"))
        self.close()
        return ChildDiedError(status, said)


def completed(
    command: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, without input, and keep what it says.

    Raises `OSError` where it can't be started, `subprocess.TimeoutExpired` where it is not done in `timeout` seconds.
    """
    return subprocess.run(
        list(command),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        check=False,
    )


@contextlib.contextmanager
def _pinned(cores: Collection[int]) -> Iterator[None]:
    """This thread on these cores, as the processes are that it starts; the process's other threads stay as they are."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(process: subprocess.Popen[str], folder: Path, owner: int) -> None:
    """End a process and all of its group, reap it and remove its files. Also called when Python ends."""
    if os.getpid() != owner:
        return  # the end of a fork, which the process outlives
    # Not by closing the pipe and waiting: a stopped process would never see that.
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            cast("IO[str]", pipe).close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _as_number(value: Any) -> Any:
    """Python's own number in place of one of numpy's, which JSON does not know."""
    if getattr(value, "ndim", None) != 0:
        raise TypeError(f"a {type(value).__name__} can't be sent to another process here: {value!r}")
    return value.item()


def _last_words(text: str) -> list[str]:
    """The last lines of what a process said; of Python's long report on a crash only what and where it was."""
    said, report, stacks = text.partition(_CRASH_REPORT)
    lines = said.splitlines()[-_LAST_LINES:]
    if report:
        what, _, rest = stacks.partition("\n")
        frames = [line for line in rest.partition("Current thread")[2].splitlines() if line.startswith("  File ")]
        lines += [report + what, *frames[:1]]
    return lines
