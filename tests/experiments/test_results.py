"""Results are written whole or not at all, by one process at a time, and every failure to write says what to do."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.files import write_atomically
from experiments import results as module
from experiments.results import (
    COLUMNS,
    COMMITTED,
    Record,
    Results,
    ResultsError,
    ResultsInUseError,
    Tidy,
    key_of,
    plain,
    tidy_rows,
)

ROOT = Path(__file__).resolve().parents[2]


def record(key: str = "0" * 16, measure: str = "time", **changes: Any) -> Record:
    """An invented record of a finished run."""
    made: Record = {
        "schema": module.SCHEMA,
        "key": key,
        "job": "1" * 16,
        "status": "ok",
        "error": None,
        "config": {
            "paper": "mnist-rnn-e",
            "engine": "numpy",
            "label": "TwinGrad numpy",
            "seed": 3,
            "measure": measure,
            "threads": 2,
            "dtype": "float32",
            "profile": "full",
        },
        "data": {"name": "mnist", "source": "sample", "digest": "d1", "train_rows": 10, "test_rows": 5},
        "provenance": {
            "commit": "c1",
            "dirty": False,
            "cpu_model": "Invented CPU",
            "machine": {"label": "Invented CPU (family 1) 01234567", "digest": "0123456789abcdef"},
            "python": "3.11.0",
            "versions": {"numpy": "2.0"},
            "engine_digest": "e1",
            "created": "2001-01-01",
        },
        "blas": {"numpy": "invented 1.0"},
        "startup": {"import_seconds": 0.5, "build_seconds": 0.25},
        "epochs": [
            {"epoch": 1, "seconds": 2.0, "seconds_with_evaluation": 2.5, "train_accuracy": 0.5, "test_accuracy": 0.4},
            {"epoch": 2, "seconds": 1.0, "seconds_with_evaluation": 1.5, "train_accuracy": 0.7, "test_accuracy": 0.6},
            {"epoch": 3, "seconds": 3.0, "seconds_with_evaluation": 3.5, "train_accuracy": 0.9, "test_accuracy": 0.8},
        ],
        "step_losses": [2.3, 2.2],
    }
    return made | changes


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    folder = Results(tmp_path / "results")
    with folder.locked():
        yield folder


@contextmanager
def other_process(folder: Path, then: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a results folder, says so, and continues with `then`."""
    code = f"""
        import os, signal, sys
        from pathlib import Path
        from experiments.results import Results
        results = Results(Path({str(folder)!r}))
        with results.locked():
            print("locked", flush=True)
            {then}
    """
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    try:
        assert started.stdout is not None and started.stdout.readline() == "locked\n"
        yield started
    finally:
        started.kill()
        started.communicate()


def lock(results: Results) -> None:
    """Take the lock and give it back."""
    with results.locked():
        pass


# Keys -----------------------------------------------------------------------------------------------------------------


def test_a_key_depends_on_values_and_not_on_their_order() -> None:
    assert key_of({"a": 1, "b": [2, 3]}) == key_of({"b": [2, 3], "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})
    assert key_of({"a": 1}) != key_of({"a": 1.5})
    assert len(key_of({})) == 16


# Writing --------------------------------------------------------------------------------------------------------------


def test_a_record_is_found_again(results: Results) -> None:
    results.save(record("a" * 16))
    assert results.load("a" * 16) == record("a" * 16)
    assert results.finished("a" * 16) is not None
    assert results.load("b" * 16) is None


def test_a_failed_run_is_recorded_but_not_finished(results: Results) -> None:
    results.save(record("a" * 16, status="failed", error="loss is NaN"))
    assert results.load("a" * 16) is not None
    assert results.finished("a" * 16) is None


def test_a_record_of_another_schema_counts_as_none(results: Results) -> None:
    results.save(record("a" * 16, schema=0))
    assert results.load("a" * 16) is None
    assert results.records() == []


def test_what_json_cannot_hold_becomes_null(results: Results) -> None:
    results.save(record("a" * 16, step_losses=[1.0, math.nan, math.inf]))
    loaded = results.load("a" * 16)
    assert loaded is not None and loaded["step_losses"] == [1.0, None, None]
    assert plain({"path": Path("x"), "pair": (1, 2)}) == {"path": "x", "pair": [1, 2]}


def test_a_damaged_record_is_named(results: Results) -> None:
    (results.raw / f"{'a' * 16}.json").write_text('{"schema": 1, "key')
    with pytest.raises(ResultsError, match=r"a{16}\.json is damaged: not JSON"):
        results.records()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_old_file_and_says_what_to_do(
    results: Results, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    results.save(record("a" * 16))

    def full(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResultsError, match=r"no space left; free some.*finished runs are kept"):
        results.save(record("a" * 16, status="failed"))
    monkeypatch.undo()
    assert results.finished("a" * 16) is not None
    assert not list(results.raw.glob(".*"))


def test_a_write_that_the_system_cuts_short_leaves_no_truncated_file(tmp_path: Path) -> None:
    """A real one: the process may write files of 2,000 bytes at most."""
    code = f"""
        import resource
        from pathlib import Path
        from experiments.results import Results, ResultsError
        results = Results(Path({str(tmp_path)!r}))
        with results.locked():
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            try:
                results.save({{"key": "a", "status": "ok", "filler": "x" * 10000}})
            except ResultsError as error:
                print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "no space left" in done.stdout, done.stderr
    assert list((tmp_path / "raw").iterdir()) == []


def test_a_run_killed_while_it_writes_leaves_nothing_that_looks_like_a_result(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    kill = "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL); "
    kill += "results.save({'key': 'a' * 16, 'status': 'ok', 'schema': 1})"
    with other_process(folder, kill) as process:
        assert process.wait(60) == -signal.SIGKILL
    raw = folder / "raw"
    assert list(raw.glob("*.json")) == []
    assert len(list(raw.glob(".*.part"))) == 1
    with Results(folder).locked():  # the dead process's lock is gone, and the next run clears up
        assert list(raw.iterdir()) == []


def test_arrays_left_by_a_killed_run_are_removed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.work.mkdir()
    (results.work / "train-x.npy").write_bytes(b"left behind")
    with results.locked():
        assert not results.work.exists()


# One writer at a time -------------------------------------------------------------------------------------------------


def test_a_second_run_in_the_same_folder_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with other_process(tmp_path, "sys.stdin.read()") as process, pytest.raises(ResultsInUseError) as caught:
        lock(Results(tmp_path))
    assert f"(process {process.pid}); wait until it has finished" in str(caught.value)
    assert "--results DIR" in str(caught.value)
    lock(Results(tmp_path))


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(ResultsError, match=r"a part of this path is a file.*--results DIR"):
        lock(Results(tmp_path / "results"))


def test_a_folder_without_write_access_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the system: the tests may run as root, whom no permission stops."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("experiments.errors.write_atomically", refused)
    with pytest.raises(ResultsError, match=r"Permission denied; get write access to .* or use --results DIR"):
        lock(Results(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="does not apply: root may write anywhere")
def test_a_folder_that_is_read_only_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ResultsError, match="--results DIR"):
            lock(Results(tmp_path / "results"))
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_on_a_system_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ResultsError, match="/proc"):
        lock(Results(Path("/proc/results")))


def test_committed_results_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / COMMITTED).touch()
    with pytest.raises(ResultsError, match="committed"):
        lock(Results(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [COMMITTED]


# Tidy -----------------------------------------------------------------------------------------------------------------


def test_the_first_epoch_includes_build_and_later_ones_are_averaged() -> None:
    (row,) = tidy_rows([record()])["runs"]
    assert row["build_seconds"] == 0.25
    assert row["first_epoch_seconds"] == 2.25
    assert row["later_epoch_seconds"] == 2.0
    assert row["total_seconds"] == 6.25
    assert row["total_seconds_with_evaluation"] == 7.75
    assert (row["train_accuracy"], row["test_accuracy"]) == (0.9, 0.8)


def test_epochs_and_steps_have_a_row_each() -> None:
    rows = tidy_rows([record()])
    assert [row["seconds"] for row in rows["epochs"]] == [2.25, 1.0, 3.0]
    assert [(row["step"], row["loss"]) for row in rows["steps"]] == [(1, 2.3), (2, 2.2)]
    assert {row["seed"] for row in rows["steps"]} == {3}


def test_bytes_of_the_first_and_of_later_epochs_stay_apart() -> None:
    epochs = [{"epoch": n, "bytes_allocated": size} for n, size in enumerate((900, 10, 20), start=1)]
    (row,) = tidy_rows([record(measure="memory", epochs=epochs, peak_rss_bytes=7)])["runs"]
    assert (row["bytes_first_epoch"], row["bytes_later_epochs"], row["peak_rss_bytes"]) == (900, 15, 7)
    assert row["first_epoch_seconds"] is None


def test_a_race_has_a_row_for_every_engine_with_its_own_status() -> None:
    entrants = {
        "numpy": {"label": "TwinGrad numpy", "engine_digest": "n1", "versions": {"numpy": "2.0"}, "error": None},
        "torch": {"label": "PyTorch", "engine_digest": "t1", "versions": {"torch": "2.9"}, "error": "it died"},
    }
    raced = [{"round": 1, "engine": "numpy", "label": "TwinGrad numpy", "microseconds_per_step": 300.0}]
    blas = {"numpy": "openblas 0.3", "torch": "MKL 2024"}
    parts = {"entrants": entrants, "race": raced, "blas": blas, "status": "failed", "error": "torch: it died"}
    rows = tidy_rows([record(measure="race", **parts)])
    names = ("status", "error", "engine_digest", "blas", "framework_version")
    found = {row["engine"]: tuple(row[name] for name in names) for row in rows["runs"]}
    assert found == {
        "numpy": ("ok", None, "n1", "openblas 0.3", "numpy 2.0"),
        "torch": ("failed", "it died", "t1", "MKL 2024", "torch 2.9"),
    }
    assert [(row["engine"], row["key"]) for row in rows["race"]] == [("numpy", "0" * 16)]


def test_a_failed_run_has_a_row_with_its_error(results: Results) -> None:
    failed = record(status="failed", error="the loss is NaN, at step 7", epochs=[], step_losses=[])
    (row,) = tidy_rows([failed])["runs"]
    assert (row["status"], row["error"], row["total_seconds"]) == ("failed", "the loss is NaN, at step 7", None)


def test_tidy_files_have_their_columns_and_are_read_back(results: Results) -> None:
    results.save(record("a" * 16))
    results.save(record("b" * 16, status="failed", error='said "no",\nand died', epochs=[], step_losses=[]))
    counts = results.write_tidy()
    assert counts == {
        "runs": 2,
        "epochs": 3,
        "steps": 2,
        "race": 0,
        "scaling": 0,
        "ablation": 0,
        "variants": 0,
        "sizes": 0,
        "sizes_ablation": 0,
        "growth": 0,
        "totals": 0,
        "split": 0,
        "microbenchmarks": 0,
    }
    for name, columns in COLUMNS.items():
        with (results.tidy / f"{name}.csv").open(newline="") as file:
            assert tuple(next(csv.reader(file))) == columns
    tidy = Tidy.load(results.root)
    assert list(tidy.runs["status"]) == ["ok", "failed"]
    assert tidy.runs["error"][1] == 'said "no",\nand died'
    assert tidy.steps["loss"].tolist() == [2.3, 2.2]
    assert tidy.tables["race"].empty and list(tidy.tables["race"].columns) == list(COLUMNS["race"])


def test_records_come_oldest_first(results: Results) -> None:
    for key, created in (("a", "2003"), ("b", "2001"), ("c", "2002")):
        made = record(key * 16)
        made["provenance"] = made["provenance"] | {"created": created}
        results.save(made)
    assert [item["key"][0] for item in results.records()] == ["b", "c", "a"]


def test_reading_results_that_are_not_there_says_how_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="nothing has been run into it"):
        Tidy.load(tmp_path)


def test_a_tidy_file_of_another_make_is_named(results: Results) -> None:
    results.write_tidy()
    (results.tidy / "runs.csv").write_text("key,paper\n")
    with pytest.raises(ResultsError, match=r"runs\.csv is damaged: lacks the column 'engine'"):
        Tidy.load(results.root)


def test_a_tidy_file_with_more_columns_is_read(results: Results) -> None:
    """As those of earlier releases have."""
    results.write_tidy()
    old = [*COLUMNS["steps"], "label", "data_source", "cpu_model"]
    row = ["a" * 16, "mnist-rnn-e", "numpy", "0", "1", "2.3", "TwinGrad numpy", "real", "Fast CPU"]
    (results.tidy / "steps.csv").write_text(f"{','.join(old)}\n{','.join(row)}\n")
    assert Tidy.load(results.root).steps["loss"].tolist() == [2.3]


def test_tidy_files_without_the_later_columns_are_read(results: Results) -> None:
    """As those of earlier releases are: their machine is the name of its CPU."""
    results.save(record("a" * 16))
    results.write_tidy()
    for name, columns in COLUMNS.items():
        path = results.tidy / f"{name}.csv"
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [column for column in columns if column not in module.LATER_COLUMNS])
            writer.writeheader()
            writer.writerows(
                {name: text for name, text in row.items() if name not in module.LATER_COLUMNS} for row in rows
            )
    tidy = Tidy.load(results.root)
    assert tidy.runs["machine"].tolist() == ["Invented CPU"]
    assert tidy.runs["job"].isna().all()
    assert set(tidy.tables["race"].columns) == set(COLUMNS["race"])
    assert tidy.tables["race"]["limit_microseconds"].isna().all()


def test_no_committed_result_is_a_large_file() -> None:
    committed = Path(__file__).parents[2] / "paper" / "results"
    assert {path.name for path in committed.rglob("*") if path.stat().st_size >= 1_000_000} == set()


def test_tidy_is_made_anew_only_when_there_is_something_new(results: Results) -> None:
    assert results.tidy_is_current()  # nothing to make it from
    results.save(record("a" * 16))
    assert not results.tidy_is_current()
    results.write_tidy()
    assert results.tidy_is_current()
    results.save(record("b" * 16))
    assert not results.tidy_is_current()
    results.write_tidy()
    (results.tidy / "runs.csv").write_text("key,paper\n")
    assert not results.tidy_is_current()


@pytest.mark.parametrize("field", ["x" * 200_000, '"' + "x" * 200_000])
def test_tidy_is_made_anew_where_a_field_is_longer_than_readers_take(results: Results, field: str) -> None:
    results.save(record("a" * 16, status="failed", error=field, epochs=[], step_losses=[]))
    results.write_tidy()
    assert not results.tidy_is_current()


def test_text_of_names_that_are_no_utf8_is_written_and_has_a_key(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.npz")
    write_atomically(tmp_path / "said.json", json.dumps({"path": name}, ensure_ascii=False))
    assert json.loads((tmp_path / "said.json").read_text(encoding="utf-8")) == {"path": name}
    assert key_of({"path": name}) != key_of({"path": "caf.npz"})


def test_tidy_is_made_anew_when_a_record_is_gone_or_came_with_an_old_time(results: Results) -> None:
    kept, gone = (results.save(record(letter * 16)) for letter in "ab")
    results.write_tidy()
    assert results.tidy_is_current()
    content = gone.read_bytes()
    gone.unlink()
    assert not results.tidy_is_current()
    results.write_tidy()
    assert results.tidy_is_current()
    gone.write_bytes(content)
    os.utime(gone, (1, 1))
    assert not results.tidy_is_current()
    results.write_tidy()
    later = results.raw / f"{'c' * 16}.json"
    later.write_text(json.dumps(json.loads(kept.read_text()) | {"schema": module.SCHEMA + 1, "key": later.stem}))
    os.utime(later, (1, 1))
    assert results.tidy_is_current(), "of a later release, which is not shown"


def test_raw_records_are_plain_json(results: Results) -> None:
    path = results.save(record())
    assert json.loads(path.read_text())["config"]["paper"] == "mnist-rnn-e"
