"""A lease has one holder, however many ask and whoever dies, seen from one machine or from several."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge import files
from bridge.files import create_exclusively
from experiments import leases
from experiments.errors import StoppedError
from experiments.leases import Leases
from experiments.results import Results, ResultsInUseError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BEAT", 0.02)
    monkeypatch.setattr(leases, "POLL", 0.005)


def on(machine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Leases:
    """Leases of another machine, whose processes cannot be seen from here."""
    with monkeypatch.context() as patched:
        patched.setattr(leases, "identity", lambda: (machine, f"boot of {machine}", ""))
        return Leases(folder)


def gone(found: Leases) -> None:
    """What is left of a process that was killed: its files, and no heartbeat."""
    found._ended.set()


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Leases, Leases]]:
    """Two machines."""
    found = on("a", tmp_path, monkeypatch), on("b", tmp_path, monkeypatch)
    yield found
    for one in found:
        one.close()


def test_one_holds_a_lease_until_it_gives_it_back(two: tuple[Leases, Leases]) -> None:
    one, other = two
    for _ in range(3):
        assert one.acquire("job") and one.holds("job")
        assert not other.acquire("job") and not one.acquire("job")
        holder = other.holder("job")
        assert holder is not None and str(holder) == f"process {os.getpid()} on a"
        one.release("job")
        assert other.holder("job") is None and not one.holds("job")
        assert other.acquire("job") and not one.acquire("job")
        other.release("job")
    assert [path.name for path in one.folder.iterdir()] == [
        "job.6"
    ]  # the last number stays, so that none is given twice


def test_who_is_told_to_stop_does_not_wait_for_a_turn(two: tuple[Leases, Leases]) -> None:
    one, other = two
    assert one.acquire("host")
    asked: list[bool] = []

    def stopped() -> bool:
        asked.append(True)
        return len(asked) == 3

    with pytest.raises(StoppedError), other.turn("host", stopped):
        raise AssertionError("it has no turn")
    one.release("host")
    with other.turn("host", stopped):
        assert other.holds("host")


def test_a_lease_whose_owner_is_silent_is_taken_over_and_the_owner_finds_out(two: tuple[Leases, Leases]) -> None:
    one, other = two
    assert one.acquire("job")
    gone(one)
    assert not other.acquire("job"), "one look says nothing"
    assert other.settled("job") is None
    assert other.acquire("job") and [path.name for path in one.folder.iterdir()] == ["job.2"]
    assert not one.holds("job")
    one.release("job")  # changes nothing
    assert other.holds("job") and one.holder("job") is not None


def test_a_lease_whose_owner_lives_is_never_taken(two: tuple[Leases, Leases]) -> None:
    one, other = two
    assert one.acquire("job")
    told: list[object] = []
    assert other.settled("job", told.append) is not None and len(told) == 1
    threading.Event().wait(leases.BEAT * leases.MISSED * 2)
    for _ in range(20):
        assert not other.acquire("job")


def test_looks_before_and_after_a_standstill_of_the_network_are_no_silence(
    two: tuple[Leases, Leases], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    assert one.acquire("job")
    gone(one)
    clock = [0.0]
    monkeypatch.setattr(leases.time, "monotonic", lambda: clock[0])
    assert not other.acquire("job")
    clock[0] += 1e6
    assert not other.acquire("job")


def test_a_dead_process_of_this_machine_is_seen_at_once(tmp_path: Path) -> None:
    code = f"from experiments.leases import *; from pathlib import Path; import os; Leases(Path({str(tmp_path)!r}))"
    code += ".acquire('job'); os.kill(os.getpid(), 9)"
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, env=os.environ | {"PYTHONPATH": str(root)})
    assert [path.name for path in tmp_path.iterdir()] == ["job.1"]
    found = Leases(tmp_path)
    assert found.holder("job") is None and found.acquire("job")
    found.close()


def test_a_later_process_of_the_same_number_is_not_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Leases(tmp_path)
    assert one.acquire("job")
    other = Leases(tmp_path)
    assert not other.acquire("job")
    monkeypatch.setattr(leases, "started", lambda pid: "later")
    assert other.acquire("job")


def test_of_many_that_ask_at_once_one_gets_it_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = [on(f"m{number}", tmp_path, monkeypatch) for number in range(6)]
    inside, most, got = [0], [0], Counter[str]()
    guard = threading.Lock()

    def work(found: Leases) -> None:
        while sum(got.values()) < 60:
            if not found.acquire("job"):
                continue
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                got[found.me.host] += 1
            with guard:
                inside[0] -= 1
            found.release("job")

    threads = [threading.Thread(target=work, args=[found]) for found in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] and sum(got.values()) >= 60
    for found in machines:
        found.close()


@pytest.mark.parametrize("content", ["", "{", '{"host": 3, "more": []}', "[]", "\x00" * 100])
def test_a_lease_without_a_readable_owner_is_busy_until_it_is_silent(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.1").write_text(content)
    found = on("a", tmp_path, monkeypatch)
    assert not found.acquire("job")
    assert found.settled("job") is None and found.acquire("job")
    found.close()


def test_where_there_are_no_hard_links_a_file_is_created_exclusively_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(files.os, "link", refused)
    assert create_exclusively(tmp_path / "a", "one") and not create_exclusively(tmp_path / "a", "two")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "one")]


def test_a_link_whose_answer_was_lost_on_the_way_is_known_as_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def lost(source: Path, target: Path) -> None:  # as a client of NFS that asks a second time
        link(source, target)
        link(source, target)

    monkeypatch.setattr(files.os, "link", lost)
    assert create_exclusively(tmp_path / "a", "one")
    assert not create_exclusively(tmp_path / "a", "two") and (tmp_path / "a").read_text() == "one"
    assert len(list(tmp_path.iterdir())) == 1


# Results folders ------------------------------------------------------------------------------------------------------


def test_a_folder_is_held_alone_or_shared_and_not_both(tmp_path: Path) -> None:
    one, other = Results(tmp_path), Results(tmp_path)
    with one.locked(), pytest.raises(ResultsInUseError, match=rf"\(process {os.getpid()}\)"), other.shared():
        pass
    refused = pytest.raises(ResultsInUseError, match="wait until it has finished")
    with one.shared(), other.shared(), refused, other.locked():
        pass
    with one.locked():
        assert [path.name.partition(".")[0] for path in one.locks.iterdir()] == ["folder"]


def test_a_folder_of_a_machine_that_died_is_free_after_a_while_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path)
    for name in ("folder", "with-1234"):
        left = on("far", results.locks, monkeypatch)
        left.acquire(name)
        gone(left)
        said: list[str] = []
        with results.locked(said.append):
            pass
        assert len(said) == 1 and f"process {os.getpid()} on far: waiting for a sign of life" in said[0]
