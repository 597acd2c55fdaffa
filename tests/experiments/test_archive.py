"""Raw records as one file: the same bytes each time, every tidy table made from it byte for byte, and harmless."""

from __future__ import annotations

import io
import json
import lzma
import random
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import archive
from experiments import results as module
from experiments.archive import ArchiveError
from experiments.cli import invoke
from experiments.papers import load_paper
from experiments.report import tables
from experiments.report.view import paper_view
from experiments.results import COLUMNS, COMMITTED, SCHEMA, Record, Results, ResultsError, Tidy

COMMITTED_RESULTS = Path(__file__).resolve().parents[2] / "paper" / "results"

MEASURES = (
    *("time", "own", "memory", "race", "scaling", "ablation", "variants", "sizes", "sizes_ablation", "growth"),
    *("totals", "split", "microbenchmarks", "failed"),
)


def invented(measure: str, number: int, schema: int = SCHEMA) -> Record:
    """A record of a measure with numbers that no short decimal holds."""
    draw = random.Random(f"{measure} {number}")
    status, measure = ("failed", "time") if measure == "failed" else ("ok", measure)
    point = {"engine": "numpy", "label": "TwinGrad numpy", "microseconds_per_step": draw.random() * 1e3}
    point |= {"quantity": "batch_size", "configuration": "all", "technique": "", "variant": "static", "batch": 64}
    point |= {"series": "width", "what": "step", "seconds": draw.random(), "all_on_microseconds": draw.random()}
    point |= {name: draw.random() for name in ("import_seconds", "start_seconds", "total_seconds")}
    point |= {"one_thread_microseconds": draw.random()}
    origin = {"label": "TwinGrad numpy", "engine_digest": "e1", "error": None, "versions": {"numpy": "2.0"}}
    record: Record = {
        "schema": schema,
        "key": f"{draw.getrandbits(64):016x}",
        "status": status,
        "error": "it failed, with a comma\nand a second line" if status == "failed" else None,
        "config": {
            **{
                "paper": "mnist-rnn-e",
                "engine": "numpy",
                "label": "TwinGrad numpy",
                "seed": number,
                "measure": measure,
            },
            **{"threads": 2, "dtype": "float32", "profile": "full", "suite": "gradients"},
        },
        "data": {"name": "mnist", "source": "real", "digest": "d1"},
        "provenance": {
            **{"commit": "c1", "dirty": False, "cpu_model": "Invented CPU", "blas": "BLAS of old", "python": "3.11.0"},
            **{"versions": {"numpy": "2.0"}, "engine_digest": "e1", "created": f"2001-01-{number + 1:02}T00:00:00"},
        },
    }
    if status == "failed":
        return record
    if measure in ("time", "own", "memory"):
        record["startup"] = {"import_seconds": draw.random(), "build_seconds": draw.random()}
        record["epochs"] = [
            {"epoch": epoch, "seconds": draw.random(), "test_accuracy": draw.random(), "bytes_allocated": draw.random()}
            for epoch in (1, 2, 3)
        ]
        record["step_losses"] = [draw.random() for _ in range(5)]
    elif measure == "microbenchmarks":
        record["entrants"] = {"numpy-eager": origin | {"available": True}}
        record["microbenchmarks"] = [{"engine": "numpy-eager", "label": "a", "nanoseconds": draw.random(), "round": 1}]
    else:
        record[measure] = [point | {"round": turn, "epoch": turn, "value": turn} for turn in (1, 2)]
        if measure in ("race", "sizes", "totals", "split"):
            record["entrants"] = {"numpy": origin}
        if measure == "sizes":
            record |= {"facts": [{"engine": "numpy", "batch": 64, "kernel": "matmul"}], "limits": {}}
    return record


def fill(results: Results, schema: int = SCHEMA, count: int = 3) -> Results:
    """Save records of every measure."""
    with results.locked():
        for measure in MEASURES:
            for number in range(count):
                made = invented(measure, number, schema)
                results.save(module._as_current(made) if schema == SCHEMA else made)
        results.write_tidy()
    return results


def tidy(results: Results) -> dict[str, bytes]:
    plain = {path.name: path.read_bytes() for path in sorted(results.tidy.glob("*.csv"))}
    return plain | {path.stem: lzma.decompress(path.read_bytes()) for path in results.tidy.glob("*.csv.xz")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return fill(Results(tmp_path_factory.mktemp("results")))


def test_every_tidy_file_is_made_again_from_the_archive_byte_for_byte(results: Results, tmp_path: Path) -> None:
    assert invoke(["archive", "--results", str(results.root), "--output", str(tmp_path / archive.NAME)]) == 0
    again = Results(tmp_path)
    with again.locked():
        counts = again.write_tidy()
    assert all(counts.values()), "a row of each kind"
    assert tidy(again) == tidy(results) and len(tidy(again)) == len(COLUMNS)
    assert again.files() == results.files() and again.records() == results.records()
    assert [again.load(key) for key in again.files()] == [results.load(key) for key in results.files()]
    assert not list(again.raw.iterdir())


def test_the_same_records_give_the_same_bytes(results: Results, tmp_path: Path) -> None:
    records = results.files()
    turned = dict(reversed(records.items()))
    assert archive.pack(records) == archive.pack(turned)
    assert archive.unpack(archive.pack(records), tmp_path) == records
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(archive.pack(records)))) as opened:
        about = {(member.mtime, member.uid, member.gid, member.uname, member.gname) for member in opened}
        assert about == {(0, 0, 0, "", "")}
        assert opened.getnames() == sorted(opened.getnames())


def test_a_record_in_the_folder_stands_before_one_in_the_archive(results: Results, tmp_path: Path) -> None:
    archive.write(tmp_path / archive.NAME, results.files())
    again = Results(tmp_path)
    key, other = list(results.files())[:2]
    changed = {**(results.load(key) or {}), "status": "failed", "error": "later"}
    with again.locked():
        again.put(key, json.dumps(changed).encode())
    assert again.finished(key) is None and (again.load(key) or {})["error"] == "later"
    assert again.load(other) == results.load(other)
    assert len(again.records()) == len(results.records())


def test_an_archive_of_nothing_or_of_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArchiveError, match="no raw records"):
        archive.write(tmp_path / archive.NAME, {})
    noise = random.Random(0).randbytes(20_000)
    monkeypatch.setattr(archive, "FILE_LIMIT", 10_000)
    with pytest.raises(ArchiveError, match=r"may take 10\.0 kB at most, and these would take"):
        archive.write(tmp_path / archive.NAME, {"0" * 16: noise})
    assert not list(tmp_path.iterdir())


# What others may have put into it ------------------------------------------------------------------------------------

GOOD = f"raw/{'0' * 16}.json"


def packed(*members: tuple[tarfile.TarInfo | str, bytes], end: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as made:
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = info.size or len(content)
            made.addfile(info, io.BytesIO(content))
    return lzma.compress(buffer.getvalue() + end)


def special(kind: bytes, name: str = GOOD, link: str = "/etc/passwd") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


ZEROS = "0" * 16
NAMES = (
    *("/etc/passwd", "../../outside.json", f"raw/../{ZEROS}.json", f"./raw/{ZEROS}.json", f"raw//{ZEROS}.json"),
    *(f"raw/{'0' * 15}.json", f"raw/{'0' * 17}.json", f"raw/{'A' * 16}.json", f"raw/{ZEROS}.json\n"),
    *("raw/\x1b[31m.json", f"raw/{ZEROS}.json/", f"{ZEROS}.json", "raw", "x" * 5000, f"raw/{'٠' * 16}.json"),
)
KINDS = (
    *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE),
    *(tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE),
)


def sparse_and_cut() -> bytes:
    """A header that says that more of the file's map follows, and nothing behind it."""
    header = bytearray(special(tarfile.GNUTYPE_SPARSE).tobuf(tarfile.GNU_FORMAT))
    header[482] = 1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return lzma.compress(bytes(header))


BROKEN: dict[str, Callable[[], bytes]] = {
    **{f"name {name[:30]!r}": lambda name=name: packed((name, b"{}")) for name in NAMES},
    **{f"type {kind!r}": lambda kind=kind: packed((special(kind), b"")) for kind in KINDS},
    "twice": lambda: packed((GOOD, b"{}"), (GOOD, b"{}")),
    "empty": lambda: b"",
    "no xz": lambda: b"{}" * 100,
    "no tar": lambda: lzma.compress(b"{}" * 1000),
    "no member": lambda: packed(),
    "cut": lambda: packed((GOOD, b"{}" * 1000))[:-30],
    "cut inside": lambda: lzma.compress(lzma.decompress(packed((GOOD, b"{}" * 1000)))[:700]),
    "more behind": lambda: packed((GOOD, b"{}")) + b"more",
    "two streams": lambda: packed((GOOD, b"{}")) * 2,
    "notes on notes": lambda: packed(*[(special(tarfile.XHDTYPE), b"")] * 2000, (GOOD, b"{}")),
    "a map that is cut": sparse_and_cut,
    "a record too large": lambda: packed((GOOD, bytes(archive.RECORD_LIMIT + 1))),
    "a bomb": lambda: lzma.compress(bytes(archive.CONTENT_LIMIT + 1), preset=0),
    "an old format": lambda: lzma.compress(b"{}", format=lzma.FORMAT_ALONE),
    "a window too large": lambda: lzma.compress(
        b"{}", filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**29}]
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_archive_of_records_is_refused_and_touches_nothing(case: str, tmp_path: Path) -> None:
    path = tmp_path / archive.NAME
    path.write_bytes(BROKEN[case]())
    tracemalloc.start()
    for use in (lambda: archive.read(path), Results(tmp_path).records):
        with pytest.raises(ArchiveError) as refused:
            use()
        message = str(refused.value)
        assert str(path) in message and len(message) < 400 + len(str(path))
        assert message.isprintable() and "twingrad archive" in message
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * archive.CONTENT_LIMIT
    assert [item.name for item in tmp_path.iterdir()] == [archive.NAME]


def test_any_flipped_byte_is_an_error_or_leaves_the_records_as_they_are(results: Results, tmp_path: Path) -> None:
    content = archive.pack(results.files())
    refused = 0
    for place in random.Random(1).sample(range(len(content)), 60):
        damaged = content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :]
        try:
            assert archive.unpack(damaged, tmp_path) == results.files()
        except ArchiveError:
            refused += 1
    assert refused > 50


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    for content in (b"not json", b"\xff\xfe\x00"):
        (tmp_path / archive.NAME).write_bytes(packed((GOOD, content)))
        with pytest.raises(ResultsError, match=f"{'0' * 16}.json is damaged: not "):
            Results(tmp_path).records()


# The committed results -----------------------------------------------------------------------------------------------


def archive_is_due(folder: Path) -> bool:
    """Whether results are of a schema whose archive is committed with them: from the second one on."""
    header = (folder / "tidy" / "runs.csv").read_text(encoding="utf-8").partition("\n")[0].split(",")
    return "job" in header


ON_OTHER_JULIAS = sorted(COMMITTED_RESULTS.glob("julia-*"))
"""A full run on another Julia has a separate folder, named for its version."""


@pytest.mark.parametrize("folder", [COMMITTED_RESULTS, *ON_OTHER_JULIAS], ids=lambda folder: folder.name)
def test_the_committed_tidy_files_are_those_of_the_committed_archive(folder: Path, tmp_path: Path) -> None:
    """Results of the first schema came without one: then the folder has nothing that could disagree."""
    committed = folder / archive.NAME
    assert (folder / COMMITTED).is_file()
    assert committed.is_file() == archive_is_due(folder), "see CONTRIBUTING.md, committing results"
    if committed.is_file():
        check(folder, tmp_path)


def julias_of(folder: Path) -> set[str]:
    """The versions of Julia that the runs of committed results were made with."""
    versions = pd.read_csv(folder / "tidy" / "runs.csv")["framework_version"].dropna()
    return set(versions.str.extract(r"\bjulia ([\d.]+)")[0].dropna())


def test_committed_results_on_another_julia_are_in_the_folder_of_its_version() -> None:
    assert len(julias_of(COMMITTED_RESULTS)) == 1
    for folder in ON_OTHER_JULIAS:
        assert julias_of(folder) == {folder.name.removeprefix("julia-")}


def check(folder: Path, room: Path) -> None:
    """Make the tidy files again from the archive of a folder, and compare them with those that are there."""
    assert (folder / archive.NAME).stat().st_size < archive.FILE_LIMIT
    (room / archive.NAME).write_bytes((folder / archive.NAME).read_bytes())
    again = Results(room)
    assert {record["schema"] for record in again.records()} == {SCHEMA}
    with again.locked():
        again.write_tidy()
    made, there = tidy(again), tidy(Results(folder))
    differing = [name for name in sorted({*made, *there}) if made.get(name) != there.get(name)]
    assert not differing, f"{folder}: not what {archive.NAME} gives: {', '.join(differing)}; commit both anew"


def test_an_archive_that_disagrees_with_its_tidy_files_is_found(results: Results, tmp_path: Path) -> None:
    folder, room = tmp_path / "one", tmp_path / "two"
    (folder / "tidy").mkdir(parents=True)
    room.mkdir()
    archive.write(folder / archive.NAME, results.files())
    for name, content in tidy(results).items():
        (folder / "tidy" / name).write_bytes(content)
    check(folder, room)
    changed = folder / "tidy" / "race.csv"
    changed.write_bytes(changed.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(AssertionError, match=r"not what raw.tar.xz gives: race.csv"):
        check(folder, room)


# Older schemas -------------------------------------------------------------------------------------------------------


def test_results_of_an_older_schema_are_shown_until_there_are_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = SCHEMA + 1
    results = fill(Results(tmp_path))
    before, shown = results.records(), tidy(results)
    monkeypatch.setattr(module, "SCHEMA", newer)
    assert results.older() == len(before) and not any(map(results.load, [record["key"] for record in before]))
    assert len(results.records()) == len(before), "they are read for reports"
    with results.locked():
        results.write_tidy()
    assert tidy(results) == shown
    kept = {path.name: path.read_bytes() for path in results.raw.iterdir()}
    with results.locked():
        results.save({**module._as_current(invented("time", 9)), "schema": newer})
        assert results.write_tidy()["runs"] == 1, "old and new are never mixed"
    assert {name: (results.raw / name).read_bytes() for name in kept} == kept, "the old files stay as they are"
    assert results.older() == len(before) and len(results.files()) == 1


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "archive"])
def test_records_of_the_first_schema_make_tables(packed: bool, tmp_path: Path) -> None:
    """Ten records that a release with the first schema made on the embedded sample."""
    results, made = Results(tmp_path), archive.read(Path(__file__).with_name("schema-1.tar.xz"))
    with results.locked():
        if packed:
            archive.write(results.archive, made)
        for key, content in {} if packed else made.items():
            (results.raw / f"{key}.json").write_bytes(content)
        assert len(results.records()) == len(made) == 10
        results.write_tidy()
    assert results.tidy_is_current()
    view = paper_view(load_paper("mnist-rnn-e"), Tidy.load(tmp_path))
    assert set(view.ok("time")["cpu_model"]) == {"AMD EPYC"} and view.ok("time")["blas"].notna().any()
    assert len(view.table("race")) and len(view.table("scaling")) and len(view.ok("memory"))
    for name in ("performance", "race", "provenance"):
        assert any(row.get("engine") == "torch" for row in tables.PRODUCERS[name](view).rows)
    assert len(paper_view(load_paper("imdb-cnn-c"), Tidy.load(tmp_path)).table("microbenchmarks"))


def test_tidy_files_of_the_first_schema_make_tables(tmp_path: Path) -> None:
    """Those that are committed, or were, have no column that came later."""
    older = ("machine", "job")
    with Results(tmp_path).locked():
        fill_from(Results(tmp_path))
    for path in Results(tmp_path).tidy.glob("*.csv"):
        frame = pd.read_csv(path, dtype=str)
        frame.drop(columns=[name for name in older if name in frame]).to_csv(path, index=False)
    view = paper_view(load_paper("mnist-rnn-e"), Tidy.load(tmp_path))
    assert {row.get("machine") for row in tables.PRODUCERS["performance"](view).rows} >= {"AMD EPYC"}


def fill_from(results: Results) -> None:
    """The tidy files of the records of the first schema."""
    archive.write(results.archive, archive.read(Path(__file__).with_name("schema-1.tar.xz")))
    results.write_tidy()


def test_a_run_says_in_one_line_what_it_runs_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiments.cli.runs import tell_older

    class Said:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def say(self, text: str = "") -> None:
            self.lines.append(text)

    results = fill(Results(tmp_path))
    output: Any = Said()
    tell_older(output, results)
    assert output.lines == []
    monkeypatch.setattr(module, "SCHEMA", SCHEMA + 1)
    tell_older(output, results)
    (line,) = output.lines
    assert f"{3 * len(MEASURES)} records of an older schema: run anew" in line and "\n" not in line
