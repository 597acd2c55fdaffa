"""Rows of a mapped file: found behind any view of it, asked for before they are needed, and trained on like others."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from py_engine.network import SGD, Chain, Dense, Trainer, read_ahead
from py_engine.network.read_ahead import mapped_file, reading_ahead


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "rows.npy", np.arange(6000, dtype=np.float32).reshape(100, 4, 15))
    return tmp_path / "rows.npy"


VIEWS = {
    "itself": lambda a: a,
    "an array": np.asarray,
    "contiguous": np.ascontiguousarray,
    "reshaped": lambda a: a.reshape(100, 60),
    "a part": lambda a: a[30:70],
    "a part of a part": lambda a: np.asarray(a[30:])[20:40].reshape(20, -1),
    "a row": lambda a: a[99],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_lies_where_its_bytes_are_in_the_file(view: str, path: Path) -> None:
    array = VIEWS[view](np.load(path, mmap_mode="r"))
    file, place = mapped_file(array) or ("", 0)
    assert file == str(path)
    assert path.read_bytes()[place : place + array.nbytes] == array.tobytes()


@pytest.mark.parametrize(
    "other",
    [np.array, lambda a: a + 0, lambda a: a[:, ::2], lambda a: a.transpose(), lambda a: a.astype(np.float64)],
    ids=["copy", "computed", "strided", "transposed", "converted"],
)
def test_what_is_no_stretch_of_a_file_is_none(other, path: Path) -> None:
    assert mapped_file(other(np.load(path, mmap_mode="r"))) is None


def test_what_is_written_to_a_copy_is_in_no_file(path: Path) -> None:
    array = np.load(path, mmap_mode="c")
    array[0] = 1
    assert mapped_file(array) is None and mapped_file(array[3:]) is None


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_mapping_of_what_no_name_leads_to_is_no_file(change: str, path: Path) -> None:
    array = np.load(path, mmap_mode="r")
    other = path.with_name("other.npy")
    np.save(other, np.zeros((100, 4, 15), np.float32))
    path.unlink() if change == "removed" else other.rename(path)
    assert mapped_file(array) is None


def asked(monkeypatch: pytest.MonkeyPatch, array, rows, places) -> list[list[tuple[int, int]]]:
    """The segments of the file that were asked for before each of the places, as numbers of bytes of the array."""
    found: list[tuple[int, int]] = []
    _, start = mapped_file(array) or ("", 0)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, __: found.append((at - start, at - start + size)))
    by_place = []
    with reading_ahead(array, rows) as reached:
        for place in places:
            reached(place)
            by_place.append(found.copy())
            found.clear()
    return by_place


def from_the_disk(monkeypatch: pytest.MonkeyPatch, *blocks: int) -> None:
    """Let the process have read these numbers of blocks by each further question."""
    usage = iter(blocks)
    monkeypatch.setattr(read_ahead.resource, "getrusage", lambda _: type("Usage", (), {"ru_inblock": next(usage)})())


@pytest.mark.parametrize("size", [1, 7, 50, 99, 100, 1000])
def test_every_row_is_asked_for_a_window_before_it_is_gathered(size: int, path: Path, monkeypatch) -> None:
    array = np.load(path, mmap_mode="r")
    monkeypatch.setattr(read_ahead, "WINDOW", size * 240)
    monkeypatch.setattr(read_ahead, "GAP", 0)
    from_the_disk(monkeypatch, *range(1000))
    rows = np.random.default_rng(size).permutation(100)
    there: set[int] = set()
    for place, segments in zip(range(0, 100, 10), asked(monkeypatch, array, rows, range(0, 100, 10)), strict=True):
        there |= {row for start, end in segments for row in range(start // 240, -(-end // 240))}
        assert set(rows[place : place + min(size, 10)]) <= there
    assert there == set(rows[: (90 // size + 2) * size])


@pytest.mark.parametrize(("size", "every"), [(1, 1), (7, 1), (50, 12), (1000, 250)])
def test_it_says_when_it_is_to_be_called_again(
    size: int, every: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times in a window: a call that takes many steps must not run past what has been asked for."""
    monkeypatch.setattr(read_ahead, "WINDOW", size * 240)
    with reading_ahead(np.load(path, mmap_mode="r"), np.arange(100)) as reached:
        assert [reached(place) - place for place in (0, 10, 50)] == [every] * 3


def test_rows_close_to_each_other_are_asked_for_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.load(path, mmap_mode="r")
    monkeypatch.setattr(read_ahead, "GAP", 2 * 240)
    (segments,) = asked(monkeypatch, array, np.array([50, 3, 1, 2, 6, 53, 99]), [0])
    assert segments == [(240, 7 * 240), (50 * 240, 54 * 240), (99 * 240, 100 * 240)]


def test_much_is_asked_for_in_pieces_that_the_system_reads_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "PIECE", 700)
    (segments,) = asked(monkeypatch, np.load(path, mmap_mode="r"), np.arange(8), [0])
    assert segments == [(0, 700), (700, 1400), (1400, 1920)]


def test_of_a_file_in_memory_only_the_first_window_is_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.load(path, mmap_mode="r")
    monkeypatch.setattr(read_ahead, "WINDOW", 10 * 240)
    # Nothing is read until the fifth window; then it is again.
    from_the_disk(monkeypatch, 5, 5, 5, 5, 6, 7, 7, 7, 7, 7)
    found = asked(monkeypatch, array, np.arange(100), range(0, 100, 10))
    windows = [start // 2400 for segments in found for start, _ in segments]
    assert windows == [0, 4, 5]


def test_an_array_in_memory_and_no_rows_cost_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a file was opened"))
    for array in (np.ones((3, 4)), np.ones((0, 4))):
        with reading_ahead(array, np.arange(3)) as reached:
            assert reached(0) == 3, "not to be called again"


def test_a_file_that_was_removed_is_read_as_it_is_mapped(path: Path) -> None:
    array = np.load(path, mmap_mode="r")
    path.unlink()
    with reading_ahead(array, np.arange(100)) as reached:
        reached(0)
    assert array[99, 3, 14] == 5999


@pytest.mark.parametrize("threads", [1, 2])
def test_training_on_a_mapped_file_is_training_on_its_rows(threads: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(read_ahead, "WINDOW", 1000)
    random = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", random.standard_normal((90, 12)).astype(np.float32))
    np.save(tmp_path / "y.npy", random.integers(0, 3, 90))
    order = random.permutation(90)

    def trained(mode):
        x, y = (np.load(tmp_path / f"{name}.npy", mmap_mode=mode) for name in "xy")
        chain = Chain(Dense(12, 8), Dense(8, 3), seed=1)
        trainer = Trainer(chain, optimizer=SGD(0.1), batch_size=16, threads=threads)
        losses = [trainer.train_epoch(x, y, order) for _ in range(2)]
        found = trainer.evaluate(x, y)
        trainer.close()
        return losses, chain.parameters.vector.copy(), found

    (mapped, vector, found), (read, expected, other) = trained("r"), trained(None)
    np.testing.assert_array_equal(mapped, read)
    np.testing.assert_array_equal(vector, expected)
    assert found == other
