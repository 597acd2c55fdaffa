"""Two sets of results compared: `twingrad compare A B` answers whether one reproduces the other.

Runs are matched by what they ask: study, engine, measure, seed, threads, data, network and training settings, whatever
machine or version of the code they were made with. Only what both sets have is compared. These differences count, and
"reproduced" means that there is none of them:

    failed     a run that finished on the other side fails here
    losses     the loss of the first step, from the same weights and batch, differs by more than 1e-4, or one of the
               first hundred by more than 1e-2; what lies between is rounding that training enlarges
    accuracy   the means of the same runs differ by more than half a percentage point, and significantly: p below 0.05
               after Holm's correction for the number of comparisons
    order      an engine whose step is faster than PyTorch's on one side, with 95 % confidence, is slower on the other
               (of a race of five rounds: in all of them)
    claims     a claim of a study that holds on one side does not on the other, unless its number lies within a tenth
               of the limit (of accuracies: half a percentage point) on both

Times themselves, ratios that keep their side of one, versions and hardware are shown, and do not count.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import TwinGradError
from bridge.registry import ENGINES
from experiments import changed, testing
from experiments.formats import MISSING, counted, fixed, significant, size
from experiments.measures.registry import MEASURES
from experiments.merging import found_in, sound
from experiments.papers import PaperFileError, load_paper
from experiments.records import DamagedError
from experiments.results import SCHEMA, Record, Results, Tidy, key_of

if TYPE_CHECKING:
    from experiments.report.view import View

REFERENCE = "torch"
"""The engine that steps are compared with."""

FIRST_LOSS, LATER_LOSS = 1e-4, 1e-2
"""How far the loss of the first step, and those of the first hundred, may be apart."""
STEPS = 100
ACCURACY = 0.005
"""By how much accuracies may differ whatever the test says: half a percentage point."""
SIGNIFICANCE = 0.05
LEAST_ROUNDS = 5
"""Of a race whose order is sure where all rounds agree."""
BORDER = 0.1
"""How near to its limit, relative to it, the number of a claim is when its verdict may turn by chance."""

COMPARED = frozenset({"time", "own", "variants", "race", "sizes"})
"""The measures whose losses, accuracies or steps are compared."""

Interval = testing.Interval


class CompareError(TwinGradError):
    """Results that cannot be compared: says which, and why."""


# ---------------------------------------------------------------------------------------------------------------------
# A side


@dataclass(frozen=True)
class Side:
    """One of the two sets of results. `runs` are the newest of each job and machine."""

    name: str
    runs: Mapping[str, tuple[Record, ...]]
    settings: tuple[str, ...] = ()
    """Those of `--set`, in the place of the studies' own."""

    @property
    def records(self) -> list[Record]:
        """All of its runs."""
        return [record for group in self.runs.values() for record in group]

    @property
    def machines(self) -> list[str]:
        """The labels of its machines."""
        return list(dict.fromkeys(record["provenance"]["machine"]["label"] for record in self.records))

    def finished(self, job: str) -> list[Record]:
        """The finished runs of a job, one for each machine that has one."""
        return [record for record in self.runs.get(job, ()) if record["status"] == "ok"]


def load(name: str) -> Side:
    """A results folder or an archive of raw records; `folder@commit`: what it held when that commit had been run.

    Raises CompareError for what is neither, for damaged records, and where there are none of this release's form.
    """
    path, commit = Path(name), ""
    if not path.exists() and re.fullmatch(r".+@[0-9a-f]{4,40}", name):
        place, _, commit = name.rpartition("@")
        path = Path(place)
    if not path.exists():
        raise CompareError(f"{name}: there is no such results folder or archive")
    found, others = [], 0
    for key, (place, content) in found_in(path).items():
        try:
            if isinstance(content, DamagedError):
                raise content
            record = sound(content, key)
        except DamagedError as error:
            raise CompareError(f"{place} is damaged: {error}; run again, or remove it") from None
        if record is not None and record["schema"] == SCHEMA and "asked" in record:
            found.append(record)
        else:
            others += 1
    if not found:
        raise CompareError(f"{name}: its {others} records are of another release, which says nothing to match runs by")
    if commit:
        made = [str(one["provenance"]["created"]) for one in found if one["provenance"]["commit"].startswith(commit)]
        if not made:
            known = ", ".join(sorted({one["provenance"]["commit"][:8] for one in found}))
            raise CompareError(f"{name}: no run of commit {commit}; there are runs of {known}")
        found = [record for record in found if str(record["provenance"]["created"]) <= max(made)]
    settings = changed.noted(path) if path.is_dir() else None
    return Side(name, _newest(found), tuple(settings or ()))


def _newest(found: Iterable[Record]) -> dict[str, tuple[Record, ...]]:
    """For each job its newest run on each machine; a finished one comes before a failed one of the same sources."""
    runs: dict[str, dict[str, Record]] = {}
    for record in sorted(found, key=lambda record: str(record["provenance"]["created"])):
        if record["config"]["measure"] in MEASURES and not ENGINES.keys() & record["config"]["engine"].split(","):
            continue  # of an engine that is no more
        machines = runs.setdefault(_job(record), {})
        machine = str(record["provenance"]["machine"]["label"])
        known = machines.get(machine)
        same = known is not None and known["provenance"]["engine_digest"] == record["provenance"]["engine_digest"]
        if not (same and known and known["status"] == "ok" and record["status"] != "ok"):
            machines[machine] = record
    return {job: tuple(machines.values()) for job, machines in runs.items()}


def _job(record: Record) -> str:
    """What a run asks, but for the name of its profile: what a profile decides is in the rest."""
    return key_of({name: value for name, value in record["asked"].items() if name != "profile"})


# ---------------------------------------------------------------------------------------------------------------------
# What is found


@dataclass(frozen=True)
class Difference:
    """One thing that was compared. `counts`: it speaks against "reproduced"."""

    kind: str
    study: str
    engine: str
    what: str
    """Such as the measure, or the number of threads of a race."""
    here: Any
    there: Any
    words: str
    counts: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    """More numbers, by name."""

    def row(self) -> dict[str, Any]:
        """For programs."""
        names = ("kind", "study", "engine", "what", "here", "there", "words", "counts")
        return {name: getattr(self, name) for name in names} | dict(self.about)


@dataclass
class Comparison:
    """What came of comparing two sides."""

    here: Side
    there: Side
    runs: list[dict[str, Any]] = field(default_factory=list)
    """For each study how many runs both have, and how many only one."""
    found: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def of(self, kind: str) -> list[Difference]:
        """What was compared of one kind."""
        return [one for one in self.found if one.kind == kind]

    @property
    def counted(self) -> list[Difference]:
        """The differences that count."""
        return [one for one in self.found if one.counts]

    @property
    def reproduced(self) -> bool:
        """Whether no difference counts."""
        return not self.counted

    @property
    def both(self) -> int:
        """How many runs both have."""
        return sum(row["both"] for row in self.runs)

    def verdict(self) -> list[str]:
        """The answer in words, with what speaks against it."""
        of = sum(row["both"] + row["only_there"] for row in self.runs)
        share = f"{self.both} of the {of} runs of {self.there.name}" if self.both < of else f"all {of} runs"
        if self.reproduced:
            return [f"Reproduced: {share} were compared, and no difference counts."]
        count = len(self.counted)
        said = f"Not reproduced: {share} were compared, and {count} difference{'s count' if count > 1 else ' counts'}:"
        return [said, *(f"  {' '.join(filter(None, (one.study, one.engine)))}: {one.words}" for one in self.counted)]

    def rows(self) -> list[dict[str, Any]]:
        """For programs."""
        head = {"kind": "verdict", "reproduced": self.reproduced, "words": self.verdict()[0]}
        sides = [
            {"kind": "side", "name": side.name, "runs": len(side.records), "machines": side.machines}
            for side in (self.here, self.there)
        ]
        rows = [{"kind": "runs", **row} for row in self.runs]
        notes = [{"kind": "note", "words": text} for text in self.notes]
        return [head, *sides, *rows, *(one.row() for one in self.found), *notes]


def compare(here: Side, there: Side) -> Comparison:
    """Compare two sides. Raises CompareError where they have no run in common."""
    common = [job for job in there.runs if job in here.runs]
    if not common:
        raise CompareError(f"{here.name} and {there.name} have no run in common: {_why_disjoint(here, there)}")
    comparison = Comparison(here, there)
    comparison.runs = _runs(here, there)
    if here.settings != there.settings:
        told = " and ".join(f"{side.name}: {' '.join(side.settings) or 'none'}" for side in (here, there))
        comparison.notes.append(f"Runs with different --set: {told}.")
    if any(record["data"]["source"] == "sample" for job in common for record in here.runs[job]):
        comparison.notes.append("Runs on the embedded sample: their accuracies say nothing about the studies.")
    comparison.found += _failures(here, there, common)
    comparison.found += _losses(here, there, common)
    comparison.found += _accuracies(here, there, common)
    comparison.found += _steps(here, there)
    try:
        comparison.found += _claims(here, there)
    except ModuleNotFoundError as error:
        comparison.notes.append(f"Claims were not compared: this needs the package {error.name} (extra reports).")
    comparison.found += _origins(here, there, common)
    others = {record["asked"]["measure"] for job in common for record in here.runs[job]} - COMPARED
    if others:
        named = ", ".join(sorted(others))
        comparison.notes.append(f"Of these measures only failures and claims were compared: {named}.")
    return comparison


def _why_disjoint(here: Side, there: Side) -> str:
    """What the runs of two sides differ in, as far as no value is common to both."""

    def values(side: Side, get: Callable[[Record], Any]) -> set[str]:
        return {str(get(record)) for record in side.records if record["data"]["source"] != "none"}

    asked: dict[str, Callable[[Record], Any]] = {
        "studies": lambda record: record["asked"]["study"],
        "data": lambda record: f"{record['data']['name']} ({record['data']['source']}, {record['data']['digest'][:8]})",
        "measures": lambda record: record["asked"]["measure"],
        "engines": lambda record: record["config"]["engine"],
        "threads": lambda record: record["asked"]["threads"],
        "profiles": lambda record: record["asked"]["profile"],
    }
    for what, get in asked.items():
        mine, other = values(here, get), values(there, get)
        if not mine & other:
            return f"their {what} are {_some(mine)} and {_some(other)}"
    return "they differ in the settings of their trainings"


def _some(values: Iterable[str]) -> str:
    names = sorted(values)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _runs(here: Side, there: Side) -> list[dict[str, Any]]:
    studies: dict[str, dict[str, Any]] = {}
    for job in dict.fromkeys((*there.runs, *here.runs)):
        record = (there.runs.get(job) or here.runs[job])[0]
        name = str(record["asked"]["study"])
        row = studies.setdefault(name, {"study": name, "both": 0, "only_here": 0, "only_there": 0})
        row[
            "both" if job in here.runs and job in there.runs else "only_here" if job in here.runs else "only_there"
        ] += 1
    return list(studies.values())


def _failures(here: Side, there: Side, common: Sequence[str]) -> list[Difference]:
    """Runs that finished on one side alone. What is not available on a machine is no failure."""
    found = []
    for job in common:
        finished, other = here.finished(job), there.finished(job)
        if bool(finished) == bool(other):
            continue
        record = (there if finished else here).runs[job][-1]
        absent = record.get("error_kind") == "unavailable"
        config, error = record["config"], str(record["error"]).splitlines()[0]
        side = there.name if finished else here.name
        words = (
            f"{config['measure']}, seed {config['seed']}: {'not available' if absent else 'failed'} in {side}: {error}"
        )
        state = "unavailable" if absent else "failed"
        states = ("ok", state) if finished else (state, "ok")
        counts = not absent and not finished
        what = config["measure"]
        found.append(Difference("failed", config["paper"], config["engine"], what, *states, words, counts))
    return found


def _losses(here: Side, there: Side, common: Sequence[str]) -> list[Difference]:
    """How far the losses of the first steps are apart, by study and engine; the largest over seeds and machines."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for job in common:
        for mine, other in itertools.product(here.finished(job), there.finished(job)):
            pairs = list(zip(mine.get("step_losses", ())[:STEPS], other.get("step_losses", ())[:STEPS], strict=False))
            if not pairs:
                continue
            apart = [math.inf if (one is None) != (two is None) else abs((one or 0) - (two or 0)) for one, two in pairs]
            groups.setdefault((mine["config"]["paper"], mine["config"]["engine"]), []).append((apart[0], max(apart)))
    found = []
    for (study, engine), values in groups.items():
        first, most = (max(column) for column in zip(*values, strict=True))
        counts = first > FIRST_LOSS or most > LATER_LOSS
        state = "agree" if most <= FIRST_LOSS else "drift" if not counts else "differ"
        about = {"first": first, "largest": most, "runs": len(values), "state": state}
        words = "drift apart" if state == "drift" else state
        said = f"losses {words}: by {first:.1e} at the first step, by at most {most:.1e} in the first {STEPS}"
        found.append(Difference("losses", study, engine, "time", None, None, said, counts, about))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Accuracies


def _accuracies(here: Side, there: Side, common: Sequence[str]) -> list[Difference]:
    """The accuracies after the last epoch of the same runs, tested for a difference."""
    groups: dict[tuple[str, str, str], list[tuple[float, float, int]]] = {}
    for job in common:
        mine, other = (_mean_accuracies(side.finished(job)) for side in (here, there))
        for variant in mine.keys() & other.keys():
            record = here.finished(job)[0]
            place = (record["config"]["paper"], record["config"]["engine"], variant or record["config"]["measure"])
            rows = int(record["data"].get("test_rows", 0))
            groups.setdefault(place, []).append((mine[variant], other[variant], rows))
    tests = {place: testing.paired(*zip(*values, strict=True)) for place, values in sorted(groups.items())}
    corrected = testing.holm([test.p for test in tests.values()])
    found = []
    for (place, test), p in zip(tests.items(), corrected, strict=True):
        study, engine, what = place
        significant_ = p < SIGNIFICANCE
        large = abs(test.difference) > ACCURACY
        words = "differs" if large and significant_ else "open" if large else "agrees"
        about = {
            **{"runs": test.count, "difference": test.difference, "p": test.p, "p_corrected": p, "state": words},
            **{f"{side}_{end}": value for side, interval in (("here", test.here), ("there", test.there))
               for end, value in zip(("low", "high"), interval, strict=True)},
        }  # fmt: skip
        said = (
            f"accuracy ({what}) {fixed(test.mean_here, 4)} against {fixed(test.mean_there, 4)}, "
            f"{signed(100 * test.difference, 2)} points, p{probability(p, True)}"
        )
        counts = large and significant_
        found.append(Difference("accuracy", study, engine, what, test.mean_here, test.mean_there, said, counts, about))
    return found


def _mean_accuracies(records: Sequence[Record]) -> dict[str, float]:
    """The test accuracy after the last epoch, of a run ("") or of its variants by name; means over machines."""
    found: dict[str, list[float]] = {}
    for record in records:
        accuracy = record["epochs"][-1].get("test_accuracy") if record.get("epochs") else None
        if accuracy is not None and record["config"]["measure"] in ("time", "own"):
            found.setdefault("", []).append(accuracy)
        last = {row["variant"]: row.get("test_accuracy") for row in record.get("variants", ())}
        for variant, accuracy in last.items():
            if accuracy is not None:
                found.setdefault(variant, []).append(accuracy)
    return {name: statistics.fmean(values) for name, values in found.items()}


def probability(value: float, sign: bool = False) -> str:
    """A p value, short; with a `sign` also where it is no limit."""
    return "<0.001" if value < 1e-3 else f"{'=' if sign else ''}{fixed(value, 3)}"


def signed(value: float, decimals: int) -> str:
    """A difference with its sign."""
    text = fixed(value, decimals)
    return f"+{text}" if value > 0 and text.strip("0.") else text


# ---------------------------------------------------------------------------------------------------------------------
# Steps


@dataclass(frozen=True)
class Ratio:
    """The time of an engine's step as a ratio to PyTorch's on one machine: the median of a race, with its interval."""

    machine: str
    median: float
    spread: Interval
    """The interval of 95 %; of fewer than six rounds, which allow none, the least and the most."""
    rounds: int
    network: str = ""
    """Of a study of several sizes: which network, and of what size its mini-batches are."""

    @property
    def side(self) -> int:
        """-1: faster than PyTorch, 1: slower, 0: neither for sure."""
        if self.rounds < LEAST_ROUNDS:
            return 0
        return -1 if self.spread[1] < 1 else 1 if self.spread[0] > 1 else 0


def ratios(records: Iterable[Record]) -> dict[tuple[str, int, str, str], list[Ratio]]:
    """The ratios of races by study, threads asked for, engine, and what is trained; one for each machine.

    In a study of several sizes each network is raced in mini-batches of several sizes.
    """
    found: dict[tuple[str, int, str, str], list[Ratio]] = {}
    for record, network, rows in itertools.chain.from_iterable(map(_races, records)):
        rounds: dict[int, dict[str, float]] = {}
        for row in rows:
            rounds.setdefault(row["round"], {})[row["engine"]] = float(row["microseconds_per_step"])
        for engine in record.get("entrants", {}):
            values = [
                times[engine] / times[REFERENCE]
                for times in rounds.values()
                if engine in times and times.get(REFERENCE, 0) > 0 and engine != REFERENCE and engine in ENGINES
            ]
            if values:
                machine = record["provenance"]["machine"]["label"]
                same = {name: record["asked"][name] for name in ("data", "network", "training")}
                trained = key_of(same | ({"of": network} if network else {}))
                place = (record["config"]["paper"], int(record["asked"]["threads"]), engine, trained)
                spread = testing.of_median(values) or (min(values), max(values))
                ratio = Ratio(machine, statistics.median(values), spread, len(values), network)
                found.setdefault(place, []).append(ratio)
    return found


def _races(record: Record) -> Iterator[tuple[Record, str, Sequence[Mapping[str, Any]]]]:
    """The rounds of a record, with what was trained where that is one of several."""
    if "race" in record:
        yield record, "", record["race"]
    batches: dict[int, list[Mapping[str, Any]]] = {}
    for row in record.get("sizes", ()):
        batches.setdefault(row["batch"], []).append(row)
    for batch, rows in batches.items():
        yield record, f"{record['config']['family']}-{record['config']['size']}, mini-batches of {batch}", rows


def _steps(here: Side, there: Side) -> list[Difference]:
    """Step times relative to PyTorch's on each machine. Races of other engines are compared, too, as far as they go."""
    mine, other = (ratios(side.records) for side in (here, there))
    found = []
    for place in mine.keys() & other.keys():
        study, threads, engine, _ = place
        for one, two in itertools.product(mine[place], other[place]):
            turned = one.side * two.side == -1
            change = one.median / two.median
            apart = one.spread[0] > two.spread[1] or one.spread[1] < two.spread[0]
            with_threads = ", ".join(filter(None, (one.network, counted(threads, "thread"))))
            said = f"step {significant(one.median)} against {significant(two.median)} times PyTorch's, {with_threads}"
            about = {
                **{"machine_here": one.machine, "machine_there": two.machine, "change": change},
                **{"here_spread": one.spread, "there_spread": two.spread, "apart": apart},
            }
            words = f"the order turned: {said}" if turned else said
            found.append(Difference("step", study, engine, with_threads, one.median, two.median, words, turned, about))
    return sorted(found, key=lambda one: (one.study, one.what, one.engine))


# ---------------------------------------------------------------------------------------------------------------------
# Claims


def _claims(here: Side, there: Side) -> list[Difference]:
    """The claims of the studies whose verdict differs, or cannot be compared."""
    mine, other = (_findings(side) for side in (here, there))
    found = []
    for place in [place for place in other if place in mine]:
        study, claim = place
        (one, value, limits, text), (two, value_there, _, _) = mine[place], other[place]
        if one == two:
            continue
        known = "not measured" not in (one, two)
        near = known and _near(value, limits) and _near(value_there, limits)
        words = f"claim {claim}: {one} here, {two} there" + (" (near its limit)" if near else "")
        about = {"value_here": value, "value_there": value_there, "text": text}
        found.append(Difference("claim", study, "", claim, one, two, words, known and not near, about))
    return found


_Finding = tuple[str, float | None, tuple[float | None, float | None, bool], str]
"""The verdict, its number, the limits with whether they are differences, and the claim's text."""


def _findings(side: Side) -> dict[tuple[str, str], _Finding]:
    """The verdict on each claim; where machines disagree it says on how many it holds."""
    from experiments.quantities import QUANTITIES
    from experiments.report import claims
    from experiments.report.view import views_of

    found: dict[tuple[str, str], _Finding] = {}
    for paper, views in _views(side, views_of):
        for claim in paper.claims:
            if claim.quantity is None:
                continue
            findings = [claims.examine(claim, view) for view in views]
            verdicts = [one.on_ours or one.verdict for one in findings]
            tested = [word for word in verdicts if word not in ("not testable", "not measured")]
            holds = sum(word in ("holds", "reproduced") for word in tested)
            word = "not measured" if not tested else "holds" if holds == len(tested) else "does not hold"
            if 0 < holds < len(tested):
                word = f"holds on {holds} of {len(tested)} machines"
            value = next((one.value for one in findings if one.value is not None), None)
            limits = (claim.low, claim.high, QUANTITIES[claim.quantity].unit.differences)
            found[paper.key, claim.id] = (word, value, limits, claim.text)
    return found


def _views(side: Side, views_of: Callable[..., list[View]]) -> Iterable[tuple[Any, list[View]]]:
    """The studies of a side with the rows that their claims are about."""
    from experiments.papers import paper_keys

    with tempfile.TemporaryDirectory(prefix="twingrad-") as folder:
        results = Results(Path(folder))
        results.tidy.mkdir()
        results.write_tidy(side.records)
        tidy = Tidy.load(results.root)
    for key in paper_keys():
        try:
            paper = load_paper(key)
        except PaperFileError:
            continue
        views = views_of(paper, tidy)
        if views:
            yield paper, views


def _near(value: float | None, limits: tuple[float | None, float | None, bool]) -> bool:
    """Whether a claim's number is so near to a limit that chance may turn its verdict."""
    low, high, differences = limits
    if value is None:
        return False
    return any(
        abs(value - limit) <= (ACCURACY if differences else BORDER * abs(limit))
        for limit in (low, high)
        if limit is not None
    )


# ---------------------------------------------------------------------------------------------------------------------
# Versions and hardware


def _origins(here: Side, there: Side, common: Sequence[str]) -> list[Difference]:
    """Versions and hardware that differ among the runs that both have."""
    mine, other = (_origin([record for job in common for record in side.runs[job]]) for side in (here, there))
    found = []
    for what in dict.fromkeys((*other, *mine)):
        one, two = (", ".join(sorted(side.get(what, ()))) or MISSING for side in (mine, other))
        if one != two:
            found.append(Difference("origin", "", "", what, one, two, f"{what}: {one} here, {two} there"))
    return found


def _origin(records: Iterable[Record]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}

    def add(what: str, value: Any) -> None:
        if value not in (None, ""):
            found.setdefault(what, set()).add(str(value))

    for record in records:
        origin, machine = record["provenance"], record["provenance"]["machine"]
        add("machine", machine["label"])
        add("cores", origin.get("cores"))
        add("memory", size(origin["memory_bytes"], 2) if origin.get("memory_bytes") else None)
        add("system", origin.get("platform"))
        add("Python", origin["python"])
        add("commit", origin["commit"][:10] + ("+" if origin["dirty"] else ""))
        add("threads", record["config"]["threads"])
        for package, version in origin["versions"].items():
            add(package, version)
        for engine, text in record["blas"].items():
            add(f"BLAS of {engine}", text)
        if "entrants" not in record and record["status"] == "ok":
            add(f"source of {record['config']['engine']}", origin["engine_digest"][:8])
    return found
