"""Parts of a sweep for several machines: `twingrad run ... --shard i/n`.

Jobs are cut by what they ask, which is the same on every machine, and never by their keys. Costs come from one file, so
that all machines cut alike: `experiments/costs.csv`, made from the committed results, or one that is passed along.

    python -m experiments.shards results > costs.csv        # the seconds that the runs of a results folder took
"""

from __future__ import annotations

import csv
import io
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import TwinGradError, shown
from experiments.results import Record, Results
from experiments.sweep import Job

COSTS = Path(__file__).with_name("costs.csv")
"""The committed file: seconds of a run by study, measure and engine; a measure of all engines together has none."""

COLUMNS = ("study", "measure", "engine", "seconds")
MOST_SHARDS = 10_000
MOST_BYTES = 10_000_000
LARGEST = 1e9
"""Seconds of one run."""

Costs = Mapping[tuple[str, str, str], float]


class ShardError(TwinGradError):
    """A shard that cannot be, or costs that cannot be read."""


@dataclass(frozen=True)
class Shard:
    """The part `number` (from 1) of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`2/5`: the second of five."""
        number, slash, count = text.partition("/")
        if slash and all(part.isascii() and part.isdecimal() and len(part) <= 6 for part in (number, count)):
            found = cls(int(number), int(count))
            if 1 <= found.number <= found.count <= MOST_SHARDS:
                return found
        raise ShardError(
            f"--shard {shown(text)}: expected i/n, such as 1/4, with i from 1 to n and n to {MOST_SHARDS:,}"
        )

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def cut(jobs: Sequence[Job], shard: Shard, costs: Costs) -> list[Job]:
    """The jobs of one shard, in their order; all shards together have each job once, and take about as long.

    The dearest job goes first, each to the shard that has least to do so far.
    """
    jobs = list({job.identity: job for job in reversed(jobs)}.values())[::-1]
    order = sorted(jobs, key=lambda job: (-cost(job, costs), job.identity))
    loads = [0.0] * shard.count
    mine: set[tuple] = set()
    for job in order:
        least = loads.index(min(loads))
        loads[least] += cost(job, costs)
        if least == shard.number - 1:
            mine.add(job.identity)
    return [job for job in jobs if job.identity in mine]


def cost(job: Job, costs: Costs) -> float:
    """The seconds that a job takes by these costs; without its own line what others of its measure take on average."""
    engine = "" if job.kind.plan == "together" else job.engines[0]
    known = costs.get((job.paper.key, job.measure, engine))
    if known is not None:
        return known
    alike = [seconds for (_, measure, _), seconds in costs.items() if measure == job.measure]
    return statistics.fmean(alike or costs.values() or [1.0])


def read_costs(path: Path = COSTS) -> Costs:
    """The costs of a file as `costs_of` writes them. Raises ShardError for any other."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ShardError(f"{path}: more than {MOST_BYTES:,} bytes; expected a table of costs")
        rows = list(csv.reader(io.StringIO(content.decode("utf-8")), strict=True))
    except OSError as error:
        raise ShardError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ShardError(f"{path}: no table of costs: {error}") from None
    if not rows or tuple(rows[0]) != COLUMNS:
        raise ShardError(f"{path}: no table of costs: expected the columns {', '.join(COLUMNS)}")
    found: dict[tuple[str, str, str], float] = {}
    for number, row in enumerate(rows[1:], start=2):
        try:
            study, measure, engine, seconds = row
            found[study, measure, engine] = float(seconds)
            if not 0 <= float(seconds) <= LARGEST:
                raise ValueError
        except ValueError:
            raise ShardError(
                f"{path}: line {number}: expected {', '.join(COLUMNS)}, found {shown(','.join(row))}"
            ) from None
    return found


def costs_of(records: Iterable[Record]) -> str:
    """The table of costs of finished runs, as CSV: means over seeds and numbers of threads."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        config = record["config"]
        if record["status"] == "ok" and "seconds" in record:
            engine = "" if "," in config["engine"] or "entrants" in record else config["engine"]
            groups.setdefault((config["paper"], config["measure"], engine), []).append(record["seconds"])
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((*key, f"{statistics.fmean(seconds):.3g}") for key, seconds in sorted(groups.items()))
    return buffer.getvalue()


def main(arguments: Sequence[str]) -> str:
    """The table of costs of a results folder. Raises ShardError for one without a finished run."""
    if len(arguments) != 1:
        raise ShardError("expected one results folder: python -m experiments.shards DIR")
    table = costs_of(Results(Path(arguments[0])).records())
    if table.count("\n") < 2:
        raise ShardError(f"{arguments[0]}: no finished runs in it")
    return table


if __name__ == "__main__":
    try:
        sys.stdout.write(main(sys.argv[1:]))
    except TwinGradError as error:
        sys.exit(f"error: {error}")
