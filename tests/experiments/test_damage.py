"""Damaged results are named and set aside, and run again; no damage of them ends a command with a traceback."""

from __future__ import annotations

import csv
import errno
import json
import lzma
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bridge.errors import TwinGradError
from experiments import archive, cli, papers, records, report, summary
from experiments.measures.registry import RECORDED
from experiments.report import ReportError, tables
from experiments.report.view import paper_view
from experiments.results import (
    COLUMNS,
    SCHEMA,
    Results,
    ResultsError,
    Tidy,
    TidyError,
    _as_current,
    _csv,
    tidy_rows,
)

KEY = "a" * 16
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 10**30, -(10**30), 1e300, 2.5, "", "x", "\x1b[31m", "9" * 5000),
    *([], [[]], {}, {"": None}, [None], [1, "x"], {"a": [{}]}),
)


def record(measure: str = "time") -> dict[str, Any]:
    """An invented record of a finished run of a measure, with all that readers take from it."""
    provenance = {
        **{name: "invented" for name in ("commit", "cpu_model", "python", "engine_digest", "blas")},
        **{"dirty": False, "created": "2001-01-01", "versions": {"numpy": "2.0"}, "machine": {"label": "Invented"}},
    }
    entrant = {"label": "TwinGrad numpy", "engine_digest": "e", "error": None, "versions": {}, "available": True}
    timed = {"label": "TwinGrad numpy", "engine": "numpy", "round": 1}
    epochs = [{"epoch": n, "seconds": 1.0, "test_accuracy": 0.5, "bytes_allocated": 3.0} for n in (1, 2)]
    parts: dict[str, dict[str, Any]] = {
        "time": {"epochs": epochs, "step_losses": [2.3, 2.2], "startup": {"build_seconds": 0.5}},
        "own": {"epochs": epochs},
        "memory": {"epochs": epochs, "peak_rss_bytes": 10},
        "race": {"race": [timed | {"microseconds_per_step": 2.0}], "entrants": {"numpy": entrant}},
        "scaling": {"scaling": [{"quantity": "batch_size", "value": 10, "microseconds_per_step": 2.0}]},
        "ablation": {"ablation": [{"configuration": "all", "technique": "", "microseconds_per_step": 2.0, "steps": 3}]},
        "variants": {"variants": [{"variant": "static", "model": "m", **epochs[0]}]},
        "sizes": {
            "sizes": [{"engine": "numpy", "batch": 1, "round": 1, "microseconds_per_step": 2.0}],
            **{
                "facts": [{"engine": "numpy", "batch": 1, "memory_bytes": 10, "kernel_share": 0.5}],
                "limits": {},
                "entrants": {"numpy": entrant},
            },
        },
        "sizes_ablation": {
            "sizes_ablation": [{"technique": "fuse", "microseconds_per_step": 3.0, "all_on_microseconds": 2.0}],
        },
        "growth": {"growth": [{"series": "width", "value": 10, "what": "step", "seconds": 2.0, "limit_seconds": 1.0}]},
        "totals": {
            "totals": [
                timed | {"network": "n"} | dict.fromkeys(("import_seconds", "start_seconds", "total_seconds"), 2.0)
            ],
            "entrants": {"numpy": entrant},
        },
        "split": {
            "split": [
                {
                    **{"engine": "numpy", "batch": 1, "round": 1, "family": "mlp"},
                    **{"microseconds_per_step": 2.0, "one_thread_microseconds": 3.0},
                }
            ],
            "entrants": {"numpy": entrant},
        },
        "microbenchmarks": {
            "entrants": {"numpy": entrant},
            "microbenchmarks": [
                timed | {"benchmark": "b", "size": 1, "chunk": 0, "what": "forward", "nanoseconds": 2.0}
            ],
        },
    }
    about = {"paper": "mnist-rnn-e", "engine": "numpy", "label": "TwinGrad numpy", "seed": 0, "measure": measure}
    return {
        **{"schema": SCHEMA, "key": KEY, "job": "j", "status": "ok", "error": None, "error_kind": None, "seconds": 1.0},
        "config": about | {"threads": 1, "dtype": "float32", "profile": "full", "suite": "gradients"},
        "data": {"name": "mnist", "source": "real", "digest": "d", "train_rows": 3, "test_rows": 2},
        "asked": {"study": "mnist-rnn-e", "data": {}, "network": "n", "training": {}},
        "decided_by": {"machine": "m", "sources": "s"},
        "provenance": provenance | {"memory_bytes": 4},
        "blas": {"numpy": "OpenBLAS"},
        **parts[measure],
    }


MEASURES = [*RECORDED]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """A results folder with one record of every measure."""
    found = Results(tmp_path / "results")
    with found.locked():
        for number, measure in enumerate(MEASURES):
            found.save(record(measure) | {"key": f"{number:016}"})
        found.write_tidy()
    return found


def use(results: Results) -> list[str]:
    """All that commands do with raw records, but for drawing; what is said of damaged ones."""
    notes: list[str] = []
    with results.locked(notes.append):
        loaded = results.records()
        results.write_tidy()
    summary.rows(loaded)
    summary.tables(loaded)
    Tidy.load(results.root)
    return notes


@pytest.mark.parametrize("measure", MEASURES)
def test_a_sound_record_is_sound(measure: str) -> None:
    assert records.fault(record(measure)) is None


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside a record."""
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, name)
        if isinstance(item, dict | list):
            yield from places(item, (*path, name))


def put(whole: Any, path: tuple[Any, ...], value: Any) -> None:
    for name in path[:-1]:
        whole = whole[name]
    whole[path[-1]] = value


def read_to_the_end(found: dict[str, Any]) -> None:
    """Make of a record all that commands make of it, but for files."""
    current = found if found["schema"] == SCHEMA else _as_current(found)
    for name, rows in tidy_rows([current]).items():
        _csv(COLUMNS[name], rows)
    summary.tables([current])


@pytest.mark.parametrize("measure", MEASURES)
def test_every_value_of_every_type_at_every_place_is_read_or_refused(measure: str) -> None:
    fine = refused = 0
    for place in places(record(measure)):
        for value in VALUES:
            bad = record(measure)
            put(bad, place, value)
            if records.fault(bad) is None:  # what is said to be sound is read to the end
                read_to_the_end(bad)
                fine += 1
            else:
                refused += 1
    assert fine > 50 and refused > 300, (fine, refused)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_record_that_lacks_a_part_is_read_or_refused(measure: str) -> None:
    for place in places(record(measure)):
        bad = record(measure)
        inner = bad
        for name in place[:-1]:
            inner = inner[name]
        del inner[place[-1]]
        problem = records.fault(bad)
        if problem is None:
            read_to_the_end(bad)
        elif len(place) == 1:
            assert str(place[0]) in problem


TIMES = ("microseconds_per_step", "one_thread_microseconds", "all_on_microseconds", "nanoseconds", "limit_microseconds")
LIMIT = ("limit_microseconds", "op_by_op_microseconds", "products_flops", "moved_bytes", "state_bytes")


def timed(measure: str) -> dict[str, Any]:
    """A record of a measure, with the limit of a step where one may have it."""
    limit = dict.fromkeys((*LIMIT, "flops_per_second", "bytes_per_second"), 1.0)
    part = {"limited_by": "memory", "call_nanoseconds": {"numpy": 1.0}, **limit}
    more = {"race": {"roofline": part}, "sizes": {"limits": {"1": part}}}
    return record(measure) | more.get(measure, {})


@pytest.mark.parametrize("value", [0, -1, 0.0, -2.5])
def test_a_step_that_took_no_time_is_unsound(value: float) -> None:
    refused = set()
    for measure in MEASURES:
        assert records.fault(timed(measure)) is None
        for place in places(timed(measure)):
            if place[-1] in TIMES:
                bad = timed(measure)
                put(bad, place, value)
                fault = records.fault(bad)
                assert fault is not None and fault.endswith(f"found {value}, expected a number above 0")
                refused.add((measure, place[-1]))
    steps = ("race", "scaling", "ablation", "sizes", "sizes_ablation", "split")
    assert refused == {
        *((measure, "microseconds_per_step") for measure in steps),
        *(("split", "one_thread_microseconds"), ("sizes_ablation", "all_on_microseconds")),
        *(("microbenchmarks", "nanoseconds"), ("race", "limit_microseconds"), ("sizes", "limit_microseconds")),
    }


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(records.MOST_TABLE_BYTES + 1)  # sparse: it takes no room


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "empty"),
    "binary": (lambda path: path.write_bytes(bytes(range(256))), "not UTF-8 text: byte 0x80 at offset 128"),
    "cut short": (lambda path: path.write_text(json.dumps(record())[:-40]), "not JSON"),
    "deep": (lambda path: path.write_text("[" * 100_000), "nested too deeply"),
    "deep and whole": (lambda path: path.write_text("[" * 900 + "]" * 900), "expected a table"),
    "digits": (lambda path: path.write_text('{"schema": ' + "1" * 10_000 + "}"), "not JSON"),
    "a list": (lambda path: path.write_text("[]"), "the record: found [], expected a table"),
    "no number": (lambda path: path.write_text(json.dumps(record() | {"seconds": float("nan")})), "seconds: found nan"),
    "another's": (lambda path: path.write_text(json.dumps(record() | {"key": "b" * 16})), "key: found 'bbbb"),
    "a folder": (Path.mkdir, "a folder, not a file"),
    "a FIFO": (_fifo, "no regular file"),
    "a loop": (_loop, "Too many levels"),
    "a dead link": (_dangling, "a link that leads nowhere"),
    "huge": (_huge, "bytes, more than the"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_record_is_named_and_set_aside_and_nothing_is_deleted(kind: str, results: Results) -> None:
    make, reason = DAMAGE[kind]
    path = results.raw / f"{KEY}.json"
    make(path)
    before = os.lstat(path)
    with pytest.raises(ResultsError, match=rf"{path} is damaged"):
        results.records()
    notes = use(results)
    assert len(notes) == 1 and str(path) in notes[0] and reason in notes[0], notes
    moved = results.root / "damaged" / path.name
    assert (os.lstat(moved).st_ino, os.lstat(moved).st_mode) == (before.st_ino, before.st_mode)
    assert not os.path.lexists(path) and len(results.records()) == len(MEASURES)
    make(path)  # a second one of the same name has its own place
    assert use(results) and os.path.lexists(moved.with_name(f"{moved.name}.1"))
    assert use(results) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_record_that_cannot_be_read_stays_where_it_is(
    code: int, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(results.raw.glob("*.json"))
    contents, opened = path.read_bytes(), Path.open

    def refused(self: Path, *args: Any, **options: Any) -> Any:
        if self == path:
            raise OSError(code, os.strerror(code))
        return opened(self, *args, **options)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ResultsError, match=rf"{path} can't be read: .*: let this user read it, or choose another"):
        use(results)
    monkeypatch.undo()
    assert path.read_bytes() == contents and use(results) == []


@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind != "another's"])
def test_a_damaged_tidy_table_is_made_anew_from_raw(
    kind: str, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = results.tidy / "race.csv"
    good = path.read_bytes()
    path.unlink()
    DAMAGE[kind][0](path)
    with pytest.raises(TidyError, match=rf"{path} is damaged: .*; restore it"):
        Tidy.load(results.root)
    monkeypatch.setattr("experiments.report.build", lambda *_: None)
    monkeypatch.setattr(cli.reports, "show_built", lambda *_: None)
    if kind not in ("a folder", "a FIFO"):  # a link or file of now is newer than raw
        os.utime(path, (2e9, 2e9), follow_symlinks=False)
    assert cli.invoke(["report", "--results", str(results.root)]) == 0
    assert path.read_bytes() == good


def test_a_damaged_table_without_records_is_an_error_and_stays(results: Results) -> None:
    for path in results.raw.iterdir():
        path.unlink()
    (results.tidy / "runs.csv").write_bytes(b"\xff\xfe")
    assert cli.invoke(["report", "--results", str(results.root)]) == 2
    assert (results.tidy / "runs.csv").read_bytes() == b"\xff\xfe"


def test_a_run_whose_record_is_damaged_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))
    command = ["run", "mnist-rnn-e", "--profile", "sample", "--engines", "numpy", "--seeds", "1", "--measure", "time"]
    command += ["--results", str(tmp_path / "results"), "--threads", "1"]
    assert cli.invoke(command) == 0
    (path,) = (tmp_path / "results" / "raw").iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    capsys.readouterr()
    assert cli.invoke(command) == 0
    said = capsys.readouterr().out
    assert f"{path} is damaged: not JSON" in said and "1 of 1 runs finished in" in said
    assert json.loads(path.read_text())["status"] == "ok"


# Tidy tables ----------------------------------------------------------------------------------------------------------

CELLS = ("", "nan", "inf", "-1", "0", "1e300", "1e17", "x", "\x1b[31m", "9" * 400, "True", "[]", "é", "failed", "2.5")


def damage(path: Path, source: random.Random) -> None:
    """One random change to a table."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    column = source.randrange(len(rows[0]))
    match source.randrange(6):
        case 0:  # a cell
            rows[source.randrange(1, len(rows))][column] = source.choice(CELLS)
        case 1:  # a column
            value = source.choice(CELLS)
            for row in rows[1:]:
                row[column] = value
        case 2:
            rows = [rows[0], *(row for row in rows[1:] if source.random() < 0.3)]
        case 3:
            rows += source.choices(rows[1:], k=5)
        case 4:
            source.choice(rows).append("more")
        case _:
            content = path.read_bytes()
            path.write_bytes(
                content[: source.randrange(len(content))] + source.choice([b"", b"\xff\0", b'"', b"\n,,\n"])
            )
            return
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def test_tables_damaged_at_random_are_reported_or_refused(fake: Any, tmp_path: Path) -> None:
    source = random.Random(19)
    paper = papers.load_paper("mnist-rnn-e")
    base = fake.write(tmp_path, fake.rows(seeds=1, engines=("numpy", "torch")))
    good = {name: (base / "tidy" / f"{name}.csv").read_bytes() for name in COLUMNS}
    outcomes = {"reported": 0, "refused": 0}
    for _ in range(30):
        name = source.choice([name for name in COLUMNS if good[name].count(b"\n") > 1])
        path = base / "tidy" / f"{name}.csv"
        damage(path, source)
        try:
            with report._foreseen(paper):
                view = paper_view(paper, Tidy.load(base))
                tables.make(paper.tables[source.randrange(len(paper.tables))], view)
            outcomes["reported"] += 1
        except TwinGradError as error:
            assert name in str(error) or not isinstance(error, TidyError)
            outcomes["refused"] += 1
        path.write_bytes(good[name])
    assert min(outcomes.values()) > 5, outcomes


def test_rows_that_are_sound_one_by_one_and_make_no_report_together_are_said_to(fake: Any, tmp_path: Path) -> None:
    found = fake.rows(seeds=1, engines=("numpy", "torch"))
    found["race"] = [row | {"microseconds_per_step": None} for row in found["race"]]
    fake.write(tmp_path, found)
    with pytest.raises(ReportError, match=r"the results of mnist-rnn-e make no report \(KeyError: .*anew from the raw"):
        report.build(tmp_path, tmp_path / "report", ["mnist-rnn-e"])


def test_a_run_that_has_almost_diverged_is_no_damage(results: Results) -> None:
    """A loss may be any finite number: it is only the next step that finds it infinite."""
    found = record("time")
    found["step_losses"], found["epochs"][0]["train_loss"] = [2.3, 3e38], 1e200
    with results.locked():
        results.save(found)
    assert use(results) == [] and results.finished(KEY) is not None
    tidy = Tidy.load(results.root)
    assert tidy.steps["loss"].max() == 3e38 and tidy.epochs["train_loss"].max() == 1e200


@pytest.mark.parametrize("name", COLUMNS)
def test_a_repeated_row_is_named_with_the_first_one_and_its_table(name: str, results: Results) -> None:
    path = results.tidy / f"{name}.csv"
    header, *lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        path.write_text("\n".join([header, *lines, line, ""]))
        said = rf"{name}\.csv is damaged: row {len(lines) + 1} repeats row {number}: key '.*; restore it"
        with pytest.raises(TidyError, match=said):
            Tidy.load(results.root)
    path.write_text("\n".join([header, *lines, ""]))
    tidy = Tidy.load(results.root)
    assert lines and len((vars(tidy) | tidy.tables)[name]) == len(lines)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        *[("race", "microseconds_per_step"), ("race", "limit_microseconds"), ("scaling", "microseconds_per_step")],
        *[("split", "one_thread_microseconds"), ("microbenchmarks", "nanoseconds"), ("sizes", "microseconds_per_step")],
    ],
)
@pytest.mark.parametrize("cell", ["0", "-1"])
def test_a_step_that_took_no_time_is_refused_in_a_table(name: str, column: str, cell: str, results: Results) -> None:
    path = results.tidy / f"{name}.csv"
    frame = pd.read_csv(path, dtype=str)
    frame.loc[0, column] = cell
    frame.to_csv(path, index=False)
    with pytest.raises(TidyError, match=rf"{name}\.csv is damaged: row 1, column {column}: .* a number above 0"):
        Tidy.load(results.root)
    frame.loc[0, column] = "0.5"
    frame.to_csv(path, index=False)
    assert Tidy.load(results.root).tables[name][column].tolist() == [0.5]


def test_a_packed_table_is_read_as_it_was_and_a_damaged_one_is_named(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Tidy.load(results.root)
    path, packed = results.tidy / "race.csv", results.tidy / "race.csv.xz"
    content = lzma.compress(path.read_bytes())
    path.unlink()
    packed.write_bytes(content)
    pd.testing.assert_frame_equal(Tidy.load(results.root).tables["race"], expected.tables["race"])
    for damaged in (content[:-10], content[:20], b"", b"none", content[:-30] + bytes(30)):
        packed.write_bytes(damaged)
        with pytest.raises(TidyError, match=r"race\.csv\.xz is damaged: not a table: "):
            Tidy.load(results.root)
    packed.write_bytes(lzma.compress(bytes(2_000_000)))
    monkeypatch.setattr(archive, "CONTENT_LIMIT", 1_000_000)
    with pytest.raises(TidyError, match=r"race\.csv\.xz is damaged: not a table: "):
        Tidy.load(results.root)


def test_a_fifo_among_the_records_is_not_waited_for(results: Results) -> None:
    os.mkfifo(results.raw / f"{KEY}.json")
    done = threading.Thread(target=use, args=[results], daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive()
