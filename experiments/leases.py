"""Leases: who may run a job, use a host or hold a results folder, among processes and machines that share the folder.

    results/.locks/<name>.<number>     one file for each lease, whose owner touches it every few seconds

No lock of the operating system is involved, since network file systems may have none. A lease is a file that was
created exclusively; whoever has the highest number holds it. It says who its owner is (host, boot, process), and its
time of change is the owner's heartbeat. A lease is free when its owner has released it, has ended (which a process of
the same boot and process namespace can see), or has not touched it for `MISSED` heartbeats. Who finds it free creates
the next number: of several that try exactly one succeeds. The file with the highest number is never removed, so that
no number is given twice and a late comer cannot take what somebody else took before it.

Ages are measured by the watcher's own clock, from one look to the next: clocks of two machines are never compared. A
process that was stopped for longer than that, and resumes, finds that its lease has a successor: see `Leases.holds`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from bridge.files import create_exclusively, write_atomically
from experiments.errors import ResultsError, StoppedError, explain

__all__ = ["Leases", "Owner"]

BEAT = 5.0
"""Seconds between two heartbeats."""
MISSED = 6
"""After how many looks, each a heartbeat after the one before, a lease that nobody touched is free."""
POLL = 0.2
"""Seconds between two attempts to get a lease that another process holds."""


@dataclass(frozen=True)
class Owner:
    """The process that holds a lease. `boot` and `namespace` say whether another process can see if it has ended."""

    host: str = ""
    boot: str = ""
    namespace: str = ""
    pid: int = 0
    started: str = ""
    """The kernel's time of its start, which tells it from a later process of the same number."""
    token: str = ""
    released: bool = False

    def __str__(self) -> str:
        """For messages: "process 123", with its host where that is another one."""
        here = self.host in ("", socket.gethostname())
        return f"process {self.pid}" + ("" if here else f" on {self.host}")


@dataclass
class _Sight:
    """What was seen of a lease that another process holds: its time of change, and how often that was the same."""

    changed: int
    looks: int
    at: float
    beats: bool = False


@cache
def identity() -> tuple[str, str, str]:
    """This machine's name, and what tells its boot and this process's namespace from others; empty where unknown."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return socket.gethostname(), boot, namespace


def started(pid: int) -> str | None:
    """When a process of this machine started, in the kernel's ticks; "" where that is unknown, None: it has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]


class Leases:
    """The leases of this process in one folder; `close` gives all of them back. Several threads may use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        host, boot, namespace = identity()
        self.me = Owner(host, boot, namespace, os.getpid(), started(os.getpid()) or "", secrets.token_hex(8))
        self._held: dict[str, int] = {}  # the numbers of leases by their names
        self._sights: dict[Path, _Sight] = {}
        self._lock = threading.RLock()
        self._turn = threading.Lock()
        self._turns: Counter[str] = Counter()
        self._ended = threading.Event()
        self._heart: threading.Thread | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsError(explain(error, folder)) from error

    def acquire(self, name: str) -> bool:
        """Get a lease if it is free; whether this process got it."""
        with self._lock:
            try:
                return self._acquire(name)
            except OSError as error:
                raise ResultsError(explain(error, self.folder)) from error

    def release(self, name: str) -> None:
        """Give a lease back; nothing where another process has taken it over."""
        with self._lock, contextlib.suppress(OSError):  # it is free at the latest once this process has ended
            held, number = self.holds(name), self._held.pop(name, 0)
            if held:
                write_atomically(self._path(name, number), _text(self.me, released=True))

    def holds(self, name: str) -> bool:
        """Whether a lease is still this process's: nobody took it over because this process did not answer."""
        number = self._held.get(name)
        if number is None:
            return False
        successor, own = _read(self._path(name, number + 1)), _read(self._path(name, number))
        return successor is None and own is not None and own[0].token == self.me.token

    def holder(self, name: str) -> Owner | None:
        """Who holds a lease, as far as one look shows; None where it is free."""
        with self._lock:
            number = self._highest(name)
            return self._look(self._path(name, number))[0] if number else None

    def settled(self, name: str, waiting: Callable[[Owner], None] = lambda owner: None) -> Owner | None:
        """Who holds a lease; of an owner on another machine it is waited for a heartbeat, or for enough without one.

        `waiting` is called once, with an owner that may have ended.
        """
        told = False
        while True:
            with self._lock:
                number = self._highest(name)
                owner, sure = self._look(self._path(name, number)) if number else (None, True)
            if owner is None or sure:
                return owner
            if not told:
                waiting(owner)
                told = True
            time.sleep(min(POLL, BEAT))

    def names(self, prefix: str) -> list[str]:
        """The names of leases that begin so."""
        return sorted({name for name, _ in self._numbers() if name.startswith(prefix)})

    @contextlib.contextmanager
    def turn(self, name: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Hold a lease for a `with` block, and wait for it; within this process several threads hold it together.

        Raises StoppedError where it is not got before `stopped` says so.
        """
        with self._turn:
            while not self._turns[name] and not self.acquire(name):
                if stopped():
                    raise StoppedError(f"stopped while it waited for {name}")
                time.sleep(POLL)
            self._turns[name] += 1
        try:
            yield
        finally:
            with self._turn:
                self._turns[name] -= 1
                if not self._turns[name]:
                    self.release(name)

    def clear(self, keep: str) -> None:
        """Remove all leases but one; only for who holds that one, and knows that nobody uses the others."""
        for name, number in self._numbers():
            if name != keep:
                self._path(name, number).unlink(missing_ok=True)
        for path in self.folder.glob(".*.part"):  # of killed processes: nobody writes one for an hour
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > 3600:
                    path.unlink()

    def close(self) -> None:
        """Give all leases back."""
        for name in list(self._held):
            self.release(name)
        self._ended.set()

    def _acquire(self, name: str) -> bool:
        while True:
            highest = self._highest(name)
            if highest and self._look(self._path(name, highest))[0] is not None:
                return False
            number = highest + 1
            path = self._path(name, number)
            if not create_exclusively(path, _text(self.me)):
                continue
            if self._highest(name) > number:  # the number was given and removed while this process looked away
                path.unlink(missing_ok=True)
                continue
            for old in sorted(older for other, older in self._numbers() if other == name and older < number):
                self._path(name, old).unlink(missing_ok=True)
                self._sights.pop(self._path(name, old), None)
            self._held[name] = number
            self._beat()
            return True

    def _look(self, path: Path) -> tuple[Owner | None, bool]:
        """The owner of a lease that is not free, and whether it is known to live."""
        found = _read(path)
        if found is None or found[0].released:
            return None, True
        owner, changed = found
        if owner.boot and (owner.boot, owner.namespace) == (self.me.boot, self.me.namespace):
            begun = started(owner.pid)
            alive = begun is not None and (not begun or not owner.started or begun == owner.started)
            return (owner, True) if alive else (None, True)
        now = time.monotonic()
        sight = self._sights.setdefault(path, _Sight(changed, 1, now))
        if sight.changed != changed:
            self._sights[path] = sight = _Sight(changed, 1, now, beats=True)
        elif now - sight.at >= BEAT:  # looks between which the machine or the network stood still are one
            sight.looks, sight.at = sight.looks + 1, now
        if sight.looks > MISSED:
            return None, True
        return owner, sight.beats

    def _numbers(self) -> list[tuple[str, int]]:
        """The files of the folder as names and numbers."""
        found = []
        for entry in os.listdir(self.folder):
            name, _, number = entry.rpartition(".")
            if name and not name.startswith(".") and number.isdecimal():
                found.append((name, int(number)))
        return found

    def _highest(self, name: str) -> int:
        return max((number for other, number in self._numbers() if other == name), default=0)

    def _path(self, name: str, number: int) -> Path:
        return self.folder / f"{name}.{number}"

    def _beat(self) -> None:
        """Start the thread that touches the leases of this process."""
        if self._heart is None:
            self._heart = threading.Thread(target=self._live, name="leases", daemon=True)
            self._heart.start()

    def _live(self) -> None:
        while not self._ended.wait(BEAT):
            for name, number in list(self._held.items()):
                with contextlib.suppress(OSError):  # taken over, or a network that is away for a while
                    os.utime(self._path(name, number))


def _text(owner: Owner, released: bool = False) -> str:
    return json.dumps(asdict(owner) | {"released": released}) + "\n"


def _read(path: Path) -> tuple[Owner, int] | None:
    """The owner that a lease names and its time of change; None where there is no such file.

    A file without content is one that is being written where there are no hard links, or was cut short by a crash.
    """
    while True:
        try:
            with path.open("rb") as file:  # opening, unlike asking for its status, gets what other machines wrote
                content, changed = file.read(10_000), os.fstat(file.fileno()).st_mtime_ns
            break
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE:  # replaced on its server between opening and reading
                raise
    try:
        return Owner(**json.loads(content)), changed
    except (ValueError, TypeError):
        return Owner(), changed
