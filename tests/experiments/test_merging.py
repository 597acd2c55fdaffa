"""Merged results: every record once, nothing overwritten, conflicts and damage named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments import archive, changed, cli, merging
from experiments.records import DamagedError
from experiments.results import COMMITTED, Record, Results, hashes
from experiments.shards import Shard

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """A function that makes a results folder of records."""

    def make(name: str, records: list[Record]) -> Path:
        results = Results(tmp_path / name)
        with results.locked():
            for record in records:
                results.save(record)
            results.write_tidy()
        return results.root

    return make


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in out + err


@pytest.fixture
def merge(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """The command, with the folder `all` as its results."""

    def call(*sources: Path, into: str = "all") -> Said:
        capsys.readouterr()
        code = cli.invoke(["merge", *map(str, sources), "--results", str(tmp_path / into)])
        return Said(code, *capsys.readouterr())

    return call


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "raw").iterdir()}


def test_results_of_two_machines_and_of_archives_are_put_together(
    save: Save, merge: Any, invented: ModuleType, tmp_path: Path
) -> None:
    one, other = save("one", invented.sweep("a")), save("other", invented.sweep("b"))
    packed = tmp_path / "other.tar.xz"
    archive.write(packed, Results(other).files())
    shutil.rmtree(other)
    said = merge(one, packed)
    assert (said.code, said.err) == (0, "") and said.out.endswith("all: 32 added\n")
    both = tmp_path / "all"
    assert contents(both).items() >= contents(one).items() and len(contents(both)) == 32
    assert (
        archive.read(packed).items()
        == {
            key: content
            for key, content in Results(both).files().items()
            if json.loads(content)["provenance"]["machine"]["label"].endswith("b0000000")
        }.items()
    )
    before = contents(both)
    for again in (one, packed, both):  # the same ones once more, and the folder itself
        said = merge(again)
        assert said.code == 0 and "there already" in said.out
    assert contents(both) == before and Results(both).tidy_is_current()


def test_a_sweep_in_shards_is_the_sweep(save: Save, merge: Any, invented: ModuleType, tmp_path: Path) -> None:
    whole = invented.sweep("a")
    parts = [save(str(Shard(number, 3)).replace("/", "-"), whole[number - 1 :: 3]) for number in (1, 2, 3)]
    assert merge(*parts).code == 0
    assert Results(tmp_path / "all").files() == Results(save("whole", whole)).files()


def test_two_runs_that_should_be_one_are_named_and_the_first_stays(
    save: Save, merge: Any, invented: ModuleType, tmp_path: Path
) -> None:
    one = save("one", [invented.record(seed=3)])
    other = save(
        "other", [invented.record(seed=3, accuracy=0.5, created="2001-05-06T07:08:09"), invented.record(seed=4)]
    )
    said = merge(one, other)
    assert said.code == 1 and said.out.endswith("all: 2 added; 1 not copied\n")
    assert (
        "is the same run (mnist-rnn-e, numpy, time, seed 3) of 2001-02-03T04:05, this one of 2001-05-06T07:08"
        in said.err
    )
    assert str(other) in said.err
    assert contents(tmp_path / "all").items() >= contents(one).items()


def test_a_finished_run_takes_the_place_of_a_failed_one_which_is_kept(
    save: Save, merge: Any, invented: ModuleType, tmp_path: Path
) -> None:
    failed, done = save("failed", [invented.record(status="failed")]), save("done", [invented.record()])
    said = merge(failed, done)
    assert said.code == 0 and "1 added, 1 in the place of failed ones" in said.out
    both = tmp_path / "all"
    assert contents(both) == contents(done)
    assert {path.name: path.read_bytes() for path in (both / "replaced").iterdir()} == contents(failed)
    said = merge(failed)
    assert said.code == 0 and "1 failed, and finished there" in said.out and contents(both) == contents(done)


def test_runs_of_several_states_of_an_engine_are_kept_and_told(save: Save, merge: Any, invented: ModuleType) -> None:
    one = save("one", [invented.record(commit="aaaaaaaa1")])
    said = merge(one, save("other", [invented.record(sources="s2", commit="bbbbbbbb2", machine="b")]))
    assert said.code == 0
    assert (
        "mnist-rnn-e, numpy: run in 2 states of the source (commits aaaaaaaa, bbbbbbbb): reports show the newest"
        in said.out
    )


DAMAGE: dict[str, tuple[Callable[[Path, Record], Any], str]] = {
    "empty": (lambda path, record: path.write_text(""), "is damaged: empty"),
    "cut": (lambda path, record: path.write_text(json.dumps(record)[:-9]), "is damaged: not JSON"),
    "binary": (lambda path, record: path.write_bytes(b"\xff" * 99), "is damaged: not UTF-8"),
    "a list": (lambda path, record: path.write_text("[]"), "is damaged: the record"),
    "altered": (
        lambda path, record: path.write_text(json.dumps(record | {"asked": record["asked"] | {"seed": 9}})),
        "is damaged: its key is not the hash of what it says",
    ),
    "no hash": (
        lambda path, record: path.write_text(json.dumps(record | {"decided_by": 3})),
        "is damaged: its key is not the hash|is damaged: 'int'|is damaged",
    ),
    "another's": (lambda path, record: path.write_text(json.dumps(record | {"key": "0" * 16})), "is damaged: key"),
    "a folder": (lambda path, record: path.mkdir(), "is damaged: a folder"),
    "a FIFO": (lambda path, record: os.mkfifo(path), "is damaged: no regular file"),
    "a dead link": (lambda path, record: path.symlink_to("nowhere"), "is damaged: a link"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_record_is_named_and_the_others_are_merged(
    kind: str, save: Save, merge: Any, invented: ModuleType, tmp_path: Path
) -> None:
    good, bad = invented.record(seed=0), invented.record(seed=1)
    one = save("one", [good, bad])
    path = one / "raw" / f"{bad['key']}.json"
    path.unlink()
    make, reason = DAMAGE[kind]
    make(path, bad)
    said = merge(one)
    assert said.code == 1 and str(path) in said.err, said.err
    assert any(part in said.err for part in reason.split("|")), said.err
    assert list(contents(tmp_path / "all")) == [f"{good['key']}.json"]


def test_what_is_no_results_is_refused_before_anything_is_written(
    save: Save, merge: Any, invented: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no archive")
    one = save("one", [invented.record()])
    for other, reason in (
        ("absent", "neither a results folder nor an archive"),
        ("empty", "no raw records in it"),
        ("text", "no archive of raw records"),
    ):
        said = merge(one, tmp_path / other)
        assert said.code == 2 and reason in said.err and not (tmp_path / "all").exists()
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / COMMITTED).touch()
    assert merge(one).code == 2 and not (tmp_path / "all" / "raw").exists()


def test_records_of_other_releases_are_left_out_and_told(
    save: Save, merge: Any, invented: ModuleType, tmp_path: Path
) -> None:
    later = invented.record(seed=7) | {"schema": 99, "new": True}
    one = save("one", [invented.record()])
    (one / "raw" / f"{later['key']}.json").write_text(json.dumps(later))
    old = Path(__file__).with_name("schema-1.tar.xz")
    said = merge(one, old)
    assert said.code == 0 and said.out.endswith("all: 1 added\n")
    assert "1 records of a later release: left out" in said.out
    assert "10 records of an older release, which have no job to match by: left out" in said.out


def test_runs_with_other_settings_are_not_mixed_with_the_studies(
    save: Save, merge: Any, invented: ModuleType, tmp_path: Path
) -> None:
    one, other = save("one", [invented.record()]), save("other", [invented.record(seed=1)])
    (other / changed.NOTE).write_text('["training.learning_rate=0.1"]\n')
    said = merge(one, other)
    assert said.code == 2 and "different --set are not merged" in said.err and "training.learning_rate=0.1" in said.err
    assert merge(other).code == 0
    assert changed.noted(tmp_path / "all") == ["training.learning_rate=0.1"]
    assert merge(one).code == 2, "nor later"


def test_an_archive_would_not_say_that_its_runs_have_other_settings(
    save: Save, invented: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save("one", [invented.record()])
    (folder / changed.NOTE).write_text('["training.learning_rate=0.1"]\n')
    packed = tmp_path / "one.tar.xz"
    assert cli.invoke(["archive", "--results", str(folder), "--output", str(packed)]) == 2
    assert "training.learning_rate=0.1" in capsys.readouterr().err and not packed.exists()


@pytest.mark.parametrize("holds", ["raw.tar.xz", COMMITTED])
@pytest.mark.parametrize("command", ["run", "merge"])
def test_committed_results_are_not_marked_as_runs_with_other_settings(
    holds: str, command: str, save: Save, invented: ModuleType, tmp_path: Path
) -> None:
    committed = tmp_path / "committed"
    committed.mkdir()
    (committed / holds).write_text("")
    other = save("other", [invented.record()])
    (other / changed.NOTE).write_text('["training.learning_rate=0.1"]\n')
    words = {"run": ["run", "mnist-rnn-e", "--set", "training.learning_rate=0.1"], "merge": ["merge", str(other)]}
    assert cli.invoke([*words[command], "--results", str(committed)]) == 2
    assert [path.name for path in committed.iterdir()] == [holds]


def test_what_was_asked_is_whole(merge: Any, invented: ModuleType, tmp_path: Path) -> None:
    record = invented.sweep("a")[0]
    made = hashes({}, record["decided_by"])
    packed = tmp_path / "one.tar.xz"
    packed.write_bytes(archive.pack({made["key"]: json.dumps({**record, **made}).encode()}))
    said = merge(packed)
    assert said.code and "asked: lacks study, measure, threads, profile" in said.err + said.out


def test_what_was_asked_is_not_nested_without_end(invented: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    record = invented.sweep("a")[0]

    def too_deep(*_: Any) -> Any:  # as of hundreds of lists, by the Python
        raise RecursionError

    monkeypatch.setattr(merging, "hashes", too_deep)
    with pytest.raises(DamagedError, match="nested too deeply"):
        merging.sound(json.dumps(record).encode(), record["key"])
