"""What a person sees while runs are under way: bars on a terminal, one plain line per finished run anywhere else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from experiments.formats import aligned, size


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _bars(console: Console) -> Bars:
    """Bars that are drawn between the timed parts only: a thread that draws takes its share of the cores."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Bars(*columns, console=console, transient=True, auto_refresh=False)


class Progress:
    """Counts the runs of a sweep: `start` and `step` while one runs, `finish` with what came of it.

    Every thread may have its own run.
    """

    def __init__(self, console: Console, total: int, unit: str = "runs") -> None:
        self.console = console
        self.total = total
        self.unit = unit
        self.done = 0
        self._bars: Bars | None = None
        self._lock = threading.Lock()
        self._ones: dict[int, TaskID] = {}

    @contextmanager
    def show(self) -> Iterator[Progress]:
        """Show the bars for the time of a `with` block; without a terminal only lines are printed."""
        if not self.console.is_terminal:
            yield self
            return
        with _bars(self.console) as bars:
            self._bars = bars
            self._all = bars.add_task(self.unit, total=self.total)
            yield self
        self._bars = None

    def start(self, what: str, parts: int) -> None:
        """Begin one run that consists of `parts` (epochs, rounds)."""
        if self._bars:
            self._ones[threading.get_ident()] = self._bars.add_task(escape(what), total=parts)
            self._bars.refresh()

    def step(self) -> None:
        """One part of this thread's run is done."""
        if self._bars:
            self._bars.advance(self._ones[threading.get_ident()])
            self._bars.refresh()

    def finish(self, what: str, outcome: str) -> None:
        """This thread's run is over: print its line."""
        with self._lock:
            self.done += 1
            width = len(str(self.total))
            say(self.console, f"[{self.done:{width}}/{self.total}] {what}  {outcome}")
        if self._bars:
            self._bars.advance(self._all)
            one = self._ones.pop(threading.get_ident(), None)
            if one is not None:
                self._bars.remove_task(one)
            self._bars.refresh()

    def note(self, text: str) -> None:
        """Print a line between the others."""
        say(self.console, text)


def table(console: Console, headers: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 1) -> None:
    """Print rows in aligned columns, from column `numbers` on flush right; plain text without a terminal."""
    if console.is_terminal:
        shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for index, header in enumerate(headers):
            shown.add_column(escape(header), justify="right" if index >= numbers else "left", overflow="fold")
        for row in rows:
            shown.add_row(*(escape(cell) for cell in row))
        console.print(shown)
        return
    for line in aligned([headers, *rows], range(numbers)):
        say(console, line)


class Lines:
    """A table that is printed row by row, as its numbers come in, under heads that are printed with the first."""

    LEAST = 7
    """Characters of a column; wide numbers may push a row out of line."""

    def __init__(self, console: Console, heads: Sequence[str]) -> None:
        self.console = console
        self._heads: Sequence[str] | None = heads
        self._widths = [max(len(head), self.LEAST) for head in heads]

    def row(self, cells: Sequence[str]) -> None:
        """Print a row."""
        rows, self._heads = [cells] if self._heads is None else [self._heads, cells], None
        for one in rows:
            text = "  ".join(cell.rjust(width) for cell, width in zip(one, self._widths, strict=True))
            say(self.console, text)


class Steps:
    """How far a long piece of work is: a bar on a terminal, anywhere else a line now and then."""

    SECONDS = 30.0
    """Between two lines where there is no terminal."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self.console = console
        self.what = what
        self.total = total
        self._said = time.monotonic()
        self._bars = _bars(console) if console.is_terminal else None

    def __enter__(self) -> Steps:
        if self._bars is not None:
            self._bars.start()
            self._bar = self._bars.add_task(escape(self.what), total=self.total)
            self._bars.refresh()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, done: int, note: str) -> None:
        """Say that `done` steps of all are done, and a word beside it."""
        if self._bars is not None:
            self._bars.update(self._bar, completed=done, description=escape(f"{self.what}, {note}"))
            self._bars.refresh()
        elif time.monotonic() - self._said > self.SECONDS and done < self.total:
            self._said = time.monotonic()
            text = f"{self.what}: {done:,} of {self.total:,} steps, {note}"
            say(self.console, text)


def download(console: Console) -> Callable[[str, int, int], None]:
    """A callback for downloads: a line when a file begins to arrive."""
    begun: set[str] = set()

    def show(name: str, so_far: int, total: int) -> None:
        if name not in begun:
            begun.add(name)
            console.print(f"downloading {name} ({size(total)})", markup=False, highlight=False)

    return show


class Stages:
    """The stages of a long command, with the time each took."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.seconds: list[tuple[str, float]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a stage and time it, whether it succeeds or not."""
        self.console.print(f"\n{name}", markup=False, highlight=False, style="bold")
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds.append((name, time.perf_counter() - start))

    def total(self) -> float:
        """The seconds of all stages so far."""
        return sum(seconds for _, seconds in self.seconds)
