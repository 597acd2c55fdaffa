"""A child process has its cores from its first instruction on, and takes all that it has started with it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridge.child import Child, ChildDiedError

Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """A function from a shell program, and cores, to a process that runs it."""
    with contextlib.ExitStack() as stack:

        def started(program: str, cores: tuple[int, ...] = ()) -> Child:
            folder = tmp_path / "folder"
            folder.mkdir()
            child = Child(["sh", "-c", program], {**os.environ, "PYTHON": sys.executable}, folder, cores)
            stack.callback(child.close)
            return child

        yield started


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("place", [0, -1])
def test_it_is_pinned_before_its_first_instruction_and_nobody_else_is(start: Start, place: int) -> None:
    allowed = os.sched_getaffinity(0)
    core = sorted(allowed)[place]
    child = start(r"""grep Cpus_allowed_list /proc/self/status | sed 's/.*\t\(.*\)/{"result": "\1"}/'""", (core,))
    assert child.receive() == {"result": str(core)}
    assert os.sched_getaffinity(0) == allowed


def test_it_answers_requests_and_ends_with_all_that_it_has_started(start: Start) -> None:
    child = start('sleep 1000 & echo "{\\"result\\": $!}"; while read line; do echo "{\\"result\\": $line}"; done')
    started = child.receive()["result"]
    assert child.ask("add", first=1)["result"] == {"call": "add", "with": {"first": 1}}
    assert is_alive(started) and child.is_open and child.is_ours
    child.signal(signal.SIGSTOP)
    child.close()
    before = time.monotonic()
    while is_alive(started) and time.monotonic() - before < 10:
        time.sleep(0.01)
    assert not is_alive(started) and not is_alive(child.pid) and not child.is_open and not child.folder.exists()


@pytest.mark.parametrize(
    ("program", "status", "ending"),
    [
        ("echo no luck >&2; exit 3", 3, "ended with exit code 3"),
        ("kill -KILL $$", -9, "was ended by SIGKILL (for want"),
    ],
)
def test_a_death_says_how_and_what_was_last_said(start: Start, program: str, status: int, ending: str) -> None:
    child = start(program)
    with pytest.raises(ChildDiedError, match="no luck" if status == 3 else "nothing") as caught:
        child.receive()
    assert caught.value.status == status and caught.value.ending.startswith(ending)
    assert not child.folder.exists()


def test_a_program_that_is_not_there_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError):
        Child([str(tmp_path / "none")], os.environ, tmp_path / "folder", os.sched_getaffinity(0))
    assert not (tmp_path / "folder").exists()
