"""IMDB is read from every form it is stored in, encoded once, and never replaced in silence.

Most tests run on a small IMDB made here, with `each` reviews of a class in a part.
"""

from __future__ import annotations

import csv
import gc
import gzip
import hashlib
import io
import os
import re
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import data
from experiments.data import SAMPLE_LABEL, DataError, encoded, glove, imdb, text
from experiments.data.fetch import RemoteFile

EACH = 6
PARTS = ("train", "test")
GROUPS = (("neg", 0), ("pos", 1))


@pytest.fixture(autouse=True)
def no_outside_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("TWINGRAD_DATA", "TWINGRAD_MIRRORS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))


Rows = dict[str, list[tuple[str, int]]]


@pytest.fixture
def rows() -> Rows:
    """Reviews of a small IMDB by part. Two of its texts occur twice: one in both parts, one within training."""
    made: Rows = {}
    for part in PARTS:
        made[part] = [
            (f'A "{kind}" film, number {number} of {part}.<br />Isn\'t it {kind}? Café {"so " * number}', label)
            for kind, label in GROUPS
            for number in range(EACH)
        ]
    made["test"][0] = made["train"][0]
    made["train"][2] = made["train"][1]
    return made


def csv_bytes(rows: list[tuple[str, Any]], header: tuple[str, str] = ("review", "label")) -> bytes:
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n").writerows([header, *rows])
    return stream.getvalue().encode()


def write(folder: Path, contents: dict[str, bytes]) -> Path:
    for name, stored in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(stored) if name.endswith("csv.gz") else stored)
    return folder


def pair(rows: Rows, end: str = "csv") -> dict[str, bytes]:
    return {f"{part}.{end}": csv_bytes(rows[part]) for part in PARTS}


def extracted(rows: Rows) -> dict[str, bytes]:
    """The files of aclImdb, those that are no reviews among them."""
    files = {
        "README": b"Large Movie Review Dataset v1.0",
        "train/unsup/0_0.txt": b"no label",
        "train/urls_neg.txt": b"x",
    }
    for part in PARTS:
        for kind, label in GROUPS:
            texts = [written for written, of in rows[part] if of == label]
            files |= {f"{part}/{kind}/{number}_5.txt": each.encode() for number, each in enumerate(texts)}
    return {f"aclImdb/{name}": content for name, content in files.items()}


def archive(rows: Rows, mode: str = "w:gz") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # type: ignore[call-overload]
        for name, content in extracted(rows).items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def sentiments(rows: Rows, *parts: str) -> list[tuple[str, Any]]:
    return [(written, ("negative", "positive")[label]) for part in parts for written, label in rows[part]]


FORMS: dict[str, Callable[[Rows], dict[str, bytes]]] = {
    "csv": pair,
    "csv.gz": lambda rows: pair(rows, "csv.gz"),
    "one plain, one gz": lambda rows: {
        "train.csv": csv_bytes(rows["train"]),
        "test.csv.gz": csv_bytes(rows["test"]),
    },
    "sentiment": lambda rows: {
        f"{part}.csv": csv_bytes(sentiments(rows, part), ("review", "sentiment")) for part in PARTS
    },
    "label first, with a byte order mark": lambda rows: {
        f"{part}.csv": b"\xef\xbb\xbf" + csv_bytes([(b, a) for a, b in rows[part]], ("label", "review"))
        for part in PARTS
    },
    "Windows line ends": lambda rows: {name: content.replace(b"\n", b"\r\n") for name, content in pair(rows).items()},
    "folder": extracted,
    "archive": lambda rows: {"aclImdb_v1.tar.gz": archive(rows)},
    "plain archive": lambda rows: {"aclImdb.tar": archive(rows, "w")},
}
ONE_CSV = {
    "IMDB Dataset.csv": lambda rows: csv_bytes(sentiments(rows, "test", "train"), ("review", "sentiment")),
    "imdb.csv.gz": lambda rows: csv_bytes(rows["train"] + rows["test"]),
}


def load(folder: Path | None, **options: Any) -> data.Dataset:
    return imdb.load(data_dir=folder, each=EACH, **{"vectors": "none", "length": 12, **options})


def read_back(dataset: data.Dataset, part: str) -> list[tuple[str, int]]:
    """The reviews of a part as (words, class), sorted."""
    assert dataset.vocabulary is not None
    x, y = (dataset.x_train, dataset.y_train) if part == "train" else (dataset.x_test, dataset.y_test)
    return sorted(
        (" ".join(dataset.vocabulary[row] for row in ids), int(label)) for ids, label in zip(x, y, strict=True)
    )


def expected_of(rows: list[tuple[str, int]], length: int) -> list[tuple[str, int]]:
    padding = text.SPECIAL[text.PADDING]
    kept = [(text.tokens(written)[-length:], label) for written, label in rows]
    return sorted((" ".join(words + [padding] * (length - len(words))), label) for words, label in kept)


# Reading every form


@pytest.mark.parametrize("subfolder", ["", "imdb"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_original_parts(rows: Rows, tmp_path: Path, form: str, subfolder: str) -> None:
    write(tmp_path / "d" / subfolder, FORMS[form](rows))
    dataset = load(tmp_path / "d", split="original", length=30)
    assert (dataset.name, dataset.source, dataset.notice) == ("imdb", "real", None)
    assert dataset.x_train.dtype == dataset.y_train.dtype == np.int64
    assert dataset.x_train.shape == dataset.x_test.shape == (2 * EACH, 30)
    vocabulary = set(dataset.vocabulary or ())
    known = [(written, label) for written, label in rows["test"] if set(text.tokens(written)) <= vocabulary]
    assert read_back(dataset, "train") == expected_of(rows["train"], 30)
    assert set(expected_of(known, 30)) <= set(read_back(dataset, "test"))
    assert dataset.origin.startswith(str(tmp_path / "d" / subfolder))


def test_the_same_reviews_make_the_same_arrays_however_they_are_stored(rows: Rows, tmp_path: Path) -> None:
    forms = FORMS | {name: lambda rows, name=name: {name: ONE_CSV[name](rows)} for name in ONE_CSV}  # type: ignore[misc]
    loaded = [load(write(tmp_path / name, form(rows))) for name, form in forms.items()]
    for dataset in loaded[1:]:
        assert dataset.digest == loaded[0].digest
        np.testing.assert_array_equal(dataset.x_train, loaded[0].x_train)
        assert dataset.vocabulary == loaded[0].vocabulary and dataset.examples == loaded[0].examples
    rows["train"][3] = ("another text", rows["train"][3][1])
    assert load(write(tmp_path / "changed", pair(rows))).digest != loaded[0].digest


@pytest.mark.parametrize("name", ONE_CSV)
def test_one_csv_has_no_original_split(rows: Rows, tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "d", {name: ONE_CSV[name](rows)})
    with pytest.raises(DataError, match=r"does not tell training from test reviews.*choose the split '40000/10000'"):
        load(folder, split="original")


def test_our_split_draws_four_fifths_of_all_reviews(rows: Rows, tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "d", pair(rows)), length=40)
    assert (len(dataset.y_train), len(dataset.y_test)) == (19, 5)
    both = [label for part in PARTS for _, label in read_back(dataset, part)]
    assert sorted(both) == [0] * 2 * EACH + [1] * 2 * EACH
    # The parts of the original are mixed: neither is the other's prefix.
    assert {"train", "test"} <= {word for words, _ in read_back(dataset, "train") for word in words.split()}


def test_reviews_that_occur_in_both_parts_are_told_of_and_left(rows: Rows, tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "d", pair(rows)), split="original")
    assert dataset.notes == ("1 of the 12 test reviews occur in the training reviews too, as the data set has it",)
    assert len(dataset.y_test) == 2 * EACH
    rows["test"][0] = ("no repetition", 0)
    assert load(write(tmp_path / "other", pair(rows)), split="original").notes == ()


def test_the_first_training_reviews_are_kept_as_they_were_written(rows: Rows, tmp_path: Path) -> None:
    dataset = load(write(tmp_path / "d", pair(rows)), length=30)
    assert dataset.vocabulary is not None and len(dataset.examples) == 4
    labels = dict(rows["train"] + rows["test"])
    for written, ids, label in zip(dataset.examples, dataset.x_train, dataset.y_train, strict=False):
        words = text.tokens(written)
        assert [dataset.vocabulary[row] for row in ids][: len(words)] == words and labels[written] == label


def test_the_vocabulary_and_the_length_can_be_set(rows: Rows, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", pair(rows))
    dataset = load(folder, vocabulary=5, length=3)
    assert dataset.vocabulary is not None and len(dataset.vocabulary) == 5
    assert dataset.x_train.shape == (19, 3) and max(dataset.x_train.max(), dataset.x_test.max()) < 5


# Word vectors


def test_vectors_of_the_vocabulary_come_with_it(rows: Rows, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", pair(rows))
    write(folder, {"glove/glove.6B.3d.txt": b"film 1 2 3\nso 4 5 6\nunheard 7 8 9\n"})
    dataset = load(folder, vectors="glove", dimension=3, vocabulary=200)
    vectors = dataset.pretrained["glove"]
    assert vectors.shape == (200, 3) and vectors.dtype == np.float32 and dataset.vocabulary is not None
    assert vectors[dataset.vocabulary.index("film")].tolist() == [1, 2, 3]
    assert vectors[dataset.vocabulary.index("so")].tolist() == [4, 5, 6]
    assert not vectors[0].any() and dataset.source == "real" and "glove.6B.3d.txt" in dataset.origin
    known = len(dataset.vocabulary) - len(text.SPECIAL)
    assert dataset.notes[-1].startswith(f"{known - 2} of the {known} words have random vectors, since ")
    again = load(folder, vectors="glove", dimension=3, vocabulary=200)
    np.testing.assert_array_equal(again.pretrained["glove"], vectors)
    write(folder, {"glove/glove.6B.3d.txt": b"film 9 9 9\n"})
    changed = load(folder, vectors="glove", dimension=3, vocabulary=200)
    assert changed.pretrained["glove"][dataset.vocabulary.index("film")].tolist() == [9, 9, 9]
    assert changed.digest != dataset.digest


def test_a_file_with_a_vector_for_every_word_leaves_nothing_to_say(rows: Rows, tmp_path: Path) -> None:
    words = sorted({word for part in PARTS for written, _ in rows[part] for word in text.tokens(written)})
    folder = write(tmp_path / "d", pair(rows))
    write(folder, {"glove.6B.3d.txt": "".join(f"{word} 1 2 3\n" for word in words).encode()})
    assert not [note for note in load(folder, vectors="glove", dimension=3).notes if "vectors" in note]


def test_vectors_of_other_words_alone_are_an_error(rows: Rows, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", pair(rows))
    write(folder, {"glove.6B.3d.txt": b"Film 1 2 3\nSO 4 5 6\n"})
    with pytest.raises(DataError, match=r"glove\.6B\.3d\.txt has a vector for none of the \d+ words, such as '"):
        load(folder, vectors="glove", dimension=3)


def test_real_reviews_with_random_vectors_are_a_sample_and_say_so(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINGRAD_DATA", str(write(tmp_path / "d", pair(rows))))
    dataset = load(None, vectors="glove", dimension=3)
    assert dataset.source == "sample" and dataset.notice is not None
    assert dataset.notice.lower().startswith(f"{SAMPLE_LABEL} in part")
    assert "random, not GloVe's" in dataset.notice and "does not hold it" in dataset.notice
    assert dataset.pretrained["glove"].shape == (12_849, 3)
    assert load(None).source == "real"  # nobody asks for vectors here


def test_an_explicit_folder_must_hold_the_vectors_too(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no GloVe vectors of 50 numbers"):
        load(write(tmp_path / "d", pair(rows)), vectors="glove")


# Options that cannot be


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"vocabulary": 2}, "vocabulary is 2; expected a whole number, 3 or more"),
        ({"vocabulary": "many"}, "vocabulary is 'many'; expected a whole number"),
        ({"vocabulary": True}, "vocabulary is True; expected a whole number"),
        ({"length": 0}, "length is 0; expected a whole number, 1 or more"),
        ({"length": 1.5}, r"length is 1\.5; expected a whole number"),
        ({"dimension": 0}, "dimension is 0; expected a whole number, 1 or more"),
        ({"split": "45000/5000"}, "split is '45000/5000'; expected '40000/10000' or 'original'"),
        ({"vectors": "word2vec"}, "vectors is 'word2vec'; expected 'glove' or 'none'"),
        ({"words": 5}, "imdb has no option 'words'; its options: vocabulary, length, split, vectors, dimension"),
    ],
)
def test_an_impossible_option_is_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        data.load("imdb", **options)


def test_a_dataset_without_options_says_so() -> None:
    with pytest.raises(DataError, match="mnist has no option 'length'; it has no options"):
        data.load("mnist", length=5)


# Data that is present but wrong


def line(number: int, content: bytes) -> Callable[[bytes], bytes]:
    """A function that puts `content` in the place of a CSV's line."""

    def replace(stored: bytes) -> bytes:
        lines = stored.split(b"\n")
        lines[number - 1] = content
        return b"\n".join(lines)

    return replace


WRONG_CSV: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "wrong header": (line(1, b"text,stars"), "its header is 'text,stars'; expected review,label or review,sentiment"),
    "no header": (lambda b: b.split(b"\n", 1)[1], "its header is .*; expected review,label"),
    "empty": (lambda b: b"", "its header is ''; expected review,label"),
    "only the header": (lambda b: b[:13], "training reviews are 0 negative and 0 positive ones; expected 6 of each"),
    "missing label": (line(3, b"a fine film,"), "line 3: the label is missing"),
    "no second value": (line(3, b"a fine film"), "line 3: the label is missing"),
    "unknown label": (
        line(3, b"a fine film,good"),
        "line 3: the label 'good' is unknown; expected 0, neg, negative, 1",
    ),
    "commas": (line(3, b"a fine, fine film,1"), "line 3: 3 values; expected a review and a label"),
    "empty text": (line(3, b",0"), "line 3: the text of the review is empty"),
    "blank text": (line(3, b'" ",0'), "line 3: the text of the review is empty"),
    "invalid UTF-8": (lambda b: b[:40] + b"\xff" + b[41:], "is not UTF-8: byte 0xff at offset 40"),
    "cut in a quoted text": (lambda b: b[: b.rindex(b'"')], "unexpected end of data; is the file cut short"),
    "cut between lines": (
        lambda b: b[: b.rindex(b"\n", 0, -1) + 1],
        "6 negative and 5 positive ones; expected 6 of each",
    ),
}


@pytest.mark.parametrize("end", ["csv", "csv.gz"])
@pytest.mark.parametrize("case", WRONG_CSV)
def test_a_wrong_csv_is_named(rows: Rows, tmp_path: Path, case: str, end: str) -> None:
    spoil, reason = WRONG_CSV[case]
    contents = pair(rows, end)
    folder = write(tmp_path / "d", contents | {f"train.{end}": spoil(contents[f"train.{end}"])})
    with pytest.raises(DataError, match=reason) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert not (tmp_path / "cache").exists()  # nothing half-made is kept
    write(folder, contents)
    assert load(folder).source == "real"


WRONG_FILE: dict[str, tuple[bytes, str]] = {
    "invalid UTF-8": (b"a caf\xe9", "is not UTF-8: byte 0xe9 at offset 5"),
    "empty": (b"", "the text of the review is empty"),
    "blank": (b" \n", "the text of the review is empty"),
}


@pytest.mark.parametrize("form", ["folder", "archive"])
@pytest.mark.parametrize("case", WRONG_FILE)
def test_a_wrong_review_file_is_named(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, form: str
) -> None:
    content, reason = WRONG_FILE[case]
    name = "aclImdb/test/pos/3_5.txt"
    good = extracted(rows)
    monkeypatch.setitem(globals(), "extracted", lambda rows: good | {name: content})
    folder = write(tmp_path / "d", archive_or_folder(form, rows))
    with pytest.raises(DataError, match=reason) as caught:
        load(folder)
    assert name in str(caught.value) and str(folder) in str(caught.value)


def archive_or_folder(form: str, rows: Rows) -> dict[str, bytes]:
    return extracted(rows) if form == "folder" else {"aclImdb_v1.tar.gz": archive(rows)}


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.7])
@pytest.mark.parametrize("name", ["aclImdb_v1.tar.gz", "aclImdb.tar", "train.csv.gz"])
def test_a_truncated_archive_is_an_error(rows: Rows, tmp_path: Path, name: str, keep: float) -> None:
    if name == "train.csv.gz":
        whole, others = gzip.compress(csv_bytes(rows["train"])), {"test.csv": csv_bytes(rows["test"])}
    else:
        whole, others = archive(rows, "w:gz" if name.endswith("gz") else "w"), {}
    folder = write(tmp_path / "d", others)
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(DataError, match=r"is cut short or corrupt|expected 6 of each") as caught:
        load(folder)
    assert str(folder / name) in str(caught.value)


def header(
    kind: bytes = tarfile.REGTYPE,
    size: int = 0,
    form: int = tarfile.GNU_FORMAT,
    notes: dict[str, str] | None = None,
) -> bytes:
    """The blocks before the content of a member, with notes where there are any."""
    info = tarfile.TarInfo("aclImdb/other")
    info.type, info.size, info.pax_headers = kind, size, notes or {}
    return info.tobuf(tarfile.PAX_FORMAT if notes else form)


NO_LESS = "it unpacks to more than 450,000,000 bytes"
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a size of 2**80": (lambda: header(size=2**80), NO_LESS),
    "such a size in a note": (lambda: header(size=2**80, form=tarfile.PAX_FORMAT), NO_LESS),
    "such a size beside a smaller one": (
        lambda: tarfile.TarInfo.create_pax_global_header({"GNU.sparse.realsize": "5"}) + header(size=2**80),
        NO_LESS,
    ),
    "a size below zero": (lambda: header(size=-1), "'aclImdb/other' has -1 bytes"),
    "a size that is no number": (lambda: header(notes={"GNU.sparse.realsize": "abc"}), "'abc'"),
    "a map that is none": (lambda: header(notes={"GNU.sparse.map": "abc"}), "a file with holes"),
    "a map": (lambda: header(tarfile.GNUTYPE_SPARSE), "a file with holes"),
    "notes on notes": (lambda: header(tarfile.XHDTYPE) * 2000, "recursion"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["aclImdb_v1.tar.gz", "aclImdb.tar"])
@pytest.mark.parametrize("case", HOSTILE)
def test_headers_of_an_archive_that_cannot_be_are_refused_at_once(case: str, name: str, tmp_path: Path) -> None:
    make, reason = HOSTILE[case]
    (tmp_path / name).write_bytes(gzip.compress(make()) if name.endswith("gz") else make())
    with pytest.raises(DataError, match=re.escape(reason)) as caught:
        load(tmp_path)
    assert f"{tmp_path / name} is cut short or corrupt: " in str(caught.value)


def test_the_members_of_an_archive_are_not_kept(rows: Rows, tmp_path: Path) -> None:
    (tmp_path / "aclImdb.tar").write_bytes(archive(rows, "w"))

    def known() -> int:
        return sum(type(item) is imdb._Member for item in gc.get_objects())

    before = known()
    # Each count goes through all objects of this process: it is taken of every tenth review.
    counts = [known() - before if i % 10 == 0 else 0 for i, _ in enumerate(imdb.read(tmp_path / "aclImdb.tar", EACH))]
    assert len(counts) == 4 * EACH and max(counts) < 4


def test_a_plain_archive_may_have_as_many_bytes_as_one_unpacks_to(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"aclImdb.tar": archive(rows, "w")})
    stored = (tmp_path / "aclImdb.tar").stat().st_size
    monkeypatch.setattr(imdb, "MOST_BYTES", stored - 1)
    assert load(tmp_path).source == "real"
    monkeypatch.setattr(imdb, "MOST_UNPACKED", stored - 1)
    with pytest.raises(DataError, match=f"expected at most {stored - 1:,}"):
        load(tmp_path)


def test_a_file_whose_name_is_no_text_is_no_review(rows: Rows, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", extracted(rows))
    before = load(folder)
    folder.joinpath("aclImdb/train/neg", os.fsdecode(b"r\xe9sum\xe9")).write_text("mine")
    np.testing.assert_array_equal(load(folder).x_train, before.x_train)


def test_a_missing_review_file_is_noticed(rows: Rows, tmp_path: Path) -> None:
    folder = write(tmp_path / "d", extracted(rows))
    os.unlink(folder / "aclImdb/train/neg/2_5.txt")
    with pytest.raises(DataError, match="training reviews are 5 negative and 6 positive ones; expected 6 of each"):
        load(folder)


@pytest.mark.parametrize("place", ["data_dir", "TWINGRAD_DATA"])
@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("aclImdb/test/neg", "aclImdb holds only a part of IMDB. Missing: test/neg"),
        ("test.csv", "holds only one of IMDB's two files. Missing, plain or gz: test.csv.gz"),
    ],
)
def test_a_part_of_it_is_an_error(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, missing: str, reason: str
) -> None:
    contents = extracted(rows) if missing.startswith("aclImdb") else pair(rows)
    kept = {name: content for name, content in contents.items() if not name.startswith(missing)}
    folder = write(tmp_path / "d", kept)
    monkeypatch.setenv("TWINGRAD_DATA", str(folder))
    with pytest.raises(DataError, match=reason):
        load(folder if place == "data_dir" else None)


def test_the_default_size_rejects_what_is_not_imdb(rows: Rows, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected 12,500 of each"):
        data.load("imdb", write(tmp_path / "d", pair(rows)), vectors="none")


def test_an_explicit_folder_without_imdb_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"holds no IMDB reviews: expected train\.csv\.gz and test\.csv\.gz, the folder"
    ):
        data.load("imdb", data_dir=tmp_path)


# The cache of encoded data


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources that are read from now on."""
    made: list[Path] = []
    original = imdb.read

    def read(source: Path, each: int) -> Any:
        made.append(source)
        return original(source, each)

    monkeypatch.setattr(imdb, "read", read)
    return made


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "encoded").iterdir())


@pytest.mark.parametrize("form", ["csv", "folder", "archive"])
def test_a_second_load_reads_no_review(rows: Rows, tmp_path: Path, form: str, readings: list[Path]) -> None:
    folder = write(tmp_path / "d", FORMS[form](rows))
    first, second = load(folder), load(folder)
    assert len(readings) == 1 and len(entries(tmp_path)) == 1
    assert first.digest == second.digest and first.vocabulary == second.vocabulary
    assert (first.examples, first.notes, first.origin) == (second.examples, second.notes, second.origin)
    for name in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
        assert getattr(second, name).dtype == np.int64


@pytest.mark.parametrize("form", ["csv", "folder", "archive"])
def test_changed_reviews_and_other_options_are_encoded_anew(
    rows: Rows, tmp_path: Path, form: str, readings: list[Path]
) -> None:
    folder = write(tmp_path / "d", FORMS[form](rows))
    first = load(folder)
    assert load(folder, length=11).x_train.shape[1] == 11
    assert load(folder, split="original").x_train.shape[0] == 2 * EACH
    rows["train"][3] = ("quite another text", rows["train"][3][1])
    time.sleep(0.01)  # so that the files of a folder differ in the time of their change
    assert load(write(folder, FORMS[form](rows))).digest != first.digest
    assert len(readings) == 4


SPOILED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut short": (lambda b: b[:-1000], "was cut short or altered"),
    "cut to nothing": (lambda b: b"", "was cut short or altered"),
    "cut in its first line": (lambda b: b[:10], "was cut short or altered"),
    "one bit altered": (lambda b: b[:-500] + bytes([b[-500] ^ 1]) + b[-499:], "was cut short or altered"),
    "something else": (lambda b: b"PK\x03\x04 something else\n\n", "was cut short or altered"),
    "another version": (
        lambda b: b.replace(imdb.VERSION.encode(), b"imdb 0, text 0, glove 0", 1),
        "was written by another version",
    ),
    "a version to come, in another form": (
        lambda b: b"twingrad encoded data, version imdb 9\n{}",
        "was written by another version",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_cache_that_is_not_whole_or_ours_is_made_anew_with_a_note(
    rows: Rows, tmp_path: Path, case: str, readings: list[Path]
) -> None:
    spoil, reason = SPOILED[case]
    folder = write(tmp_path / "d", pair(rows))
    first = load(folder)
    (entry,) = entries(tmp_path)
    good = entry.read_bytes()
    entry.write_bytes(spoil(good))
    second = load(folder)
    assert f"{entry} {reason}" in second.notes[0] and "it is made anew" in second.notes[0]
    assert second.digest == first.digest and len(readings) == 2
    np.testing.assert_array_equal(second.x_test, first.x_test)
    assert entries(tmp_path) == [entry] and entry.read_bytes() == good
    assert load(folder).notes == first.notes and len(readings) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "file"))
    dataset = load(write(tmp_path / "d", pair(rows)))
    assert dataset.source == "real" and "can't be kept" in dataset.notes[0]


def test_strings_survive_the_cache() -> None:
    for words in ((), ("a",), ("<padding>", "", "café", "two words\n")):
        assert encoded.to_words(encoded.from_words(words)) == words


# The embedded sample


def test_without_files_or_network_the_sample_says_what_it_is() -> None:
    dataset = data.load("imdb")
    assert (dataset.name, dataset.source) == ("imdb", "sample")
    assert dataset.notice is not None and dataset.notice.lower().startswith(f"{SAMPLE_LABEL}, not imdb")
    assert "downloads are switched off" in dataset.notice and SAMPLE_LABEL in dataset.origin
    assert dataset.x_train.shape == (4000, 130) and dataset.x_test.shape == (1000, 130)
    assert dataset.vocabulary is not None and dataset.vocabulary[:2] == text.SPECIAL
    for x, y in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)):
        assert x.dtype == y.dtype == np.int64 and x.flags.c_contiguous
        assert x.min() == 0 and x.max() < len(dataset.vocabulary) <= 12_849
        assert 0.45 < y.mean() < 0.55 and set(y.tolist()) == {0, 1}
    vectors = dataset.pretrained["glove"]
    assert vectors.shape == (12_849, 50) and vectors.dtype == np.float32 and not vectors[0].any()
    assert len(dataset.examples) == 4
    assert "glove" not in data.load("imdb", vectors="none").pretrained


def test_the_sample_follows_the_options_and_is_the_same_every_time() -> None:
    options = {"vocabulary": 500, "length": 20, "dimension": 7}
    first, second = data.load("imdb", **options), data.load("imdb", **options)
    assert first.x_train.shape == (4000, 20) and first.x_train.max() == 499
    assert first.pretrained["glove"].shape == (500, 7)
    np.testing.assert_array_equal(first.x_train, second.x_train)
    assert first.digest == second.digest != data.load("imdb").digest


def test_the_sample_can_be_learned_but_not_from_the_frequency_of_one_word() -> None:
    """A linear model of word counts does well on it; no single word decides; "not" turns a word's meaning."""
    from sklearn.linear_model import LogisticRegression

    dataset = data.load("imdb", vectors="none")
    assert dataset.vocabulary is not None

    def counts(x: np.ndarray) -> np.ndarray:
        table = np.zeros((len(x), len(dataset.vocabulary or ())), np.float32)
        np.add.at(table, (np.arange(len(x))[:, None], x), 1)
        return table[:, 2:]

    train, test = counts(dataset.x_train), counts(dataset.x_test)
    score = LogisticRegression(C=0.1, max_iter=200).fit(train, dataset.y_train).score(test, dataset.y_test)
    assert 0.75 < score < 0.97
    alone = np.abs(((train > 0) == (dataset.y_train[:, None] > 0)).mean(axis=0) - 0.5) + 0.5
    assert alone.max() < 0.65
    assert "not" in dataset.vocabulary


# Downloads


def test_what_would_be_downloaded_is_encrypted_and_from_several_servers() -> None:
    assert len({mirror.split("/")[2] for mirror in imdb.MIRRORS}) >= 2
    assert all(mirror.startswith("https://") for mirror in imdb.MIRRORS)


def test_a_downloaded_archive_in_the_cache_is_found(rows: Rows, tmp_path: Path) -> None:
    write(tmp_path / "cache" / "imdb", {"aclImdb_v1.tar.gz": archive(rows)})
    dataset = load(None)
    assert dataset.source == "real" and dataset.origin == str(tmp_path / "cache" / "imdb" / "aclImdb_v1.tar.gz")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address of a server of what is in it."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def remote(path: Path) -> tuple[RemoteFile]:
    content = path.read_bytes()
    return (RemoteFile(path.name, len(content), hashlib.sha256(content).hexdigest()),)


@pytest.fixture
def mirror(rows: Rows, served: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a mirror that holds both data sets, which downloads are switched on for."""
    folder, url = served
    write(folder, {"imdb/aclImdb_v1.tar.gz": archive(rows)})
    (folder / "glove").mkdir()
    with zipfile.ZipFile(folder / "glove" / "glove.6B.zip", "w") as packed:
        packed.writestr("glove.6B.3d.txt", "film 1 2 3\n")
    monkeypatch.setattr(imdb, "FILES", remote(folder / "imdb" / "aclImdb_v1.tar.gz"))
    monkeypatch.setattr(glove, "FILES", remote(folder / "glove" / "glove.6B.zip"))
    monkeypatch.setattr(glove, "DIMENSIONS", (3,))
    monkeypatch.setenv("TWINGRAD_MIRRORS", url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("TWINGRAD_OFFLINE")
    return folder


@pytest.mark.usefixtures("mirror")
def test_both_are_downloaded_into_the_cache(tmp_path: Path) -> None:
    dataset = load(None, vectors="glove", dimension=3)
    assert dataset.source == "real" and dataset.vocabulary is not None
    assert dataset.pretrained["glove"][dataset.vocabulary.index("film")].tolist() == [1, 2, 3]
    assert (tmp_path / "cache" / "imdb" / "aclImdb_v1.tar.gz").is_file()
    assert (tmp_path / "cache" / "glove" / "glove.6B.zip").is_file()


@pytest.mark.usefixtures("mirror")
def test_vectors_of_a_dimension_that_no_mirror_has_are_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glove, "DIMENSIONS", (50, 100))
    dataset = load(None, vectors="glove", dimension=3)
    assert dataset.source == "sample" and dataset.notice is not None
    assert "those to download have other dimensions: 50, 100. For real results" in dataset.notice
    assert (tmp_path / "cache" / "imdb" / "aclImdb_v1.tar.gz").is_file()
    assert not (tmp_path / "cache" / "glove").exists()


@pytest.mark.parametrize(
    ("name", "source"), [("imdb/aclImdb_v1.tar.gz", "not IMDB"), ("glove/glove.6B.zip", "in part")]
)
def test_a_download_of_other_bytes_is_not_kept(mirror: Path, tmp_path: Path, name: str, source: str) -> None:
    stored = (mirror / name).read_bytes()
    (mirror / name).write_bytes(stored[:-1] + bytes([stored[-1] ^ 1]))
    dataset = load(None, vectors="glove", dimension=3)
    assert dataset.source == "sample" and dataset.notice is not None
    assert source in dataset.notice and "wrong bytes" in dataset.notice
    assert not (tmp_path / "cache" / name).exists()


# The real IMDB, where TWINGRAD_DATA names it


@pytest.fixture(scope="session")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests of the real data, so that it is encoded once."""
    return tmp_path_factory.mktemp("real")


@pytest.mark.parametrize(("split", "train"), [("40000/10000", 40_000), ("original", 25_000)])
def test_the_real_imdb_loads(
    data_dir: Path, real_cache: Path, monkeypatch: pytest.MonkeyPatch, split: str, train: int
) -> None:
    if imdb.find(data_dir) is None or glove.find(data_dir, 50) is None:
        pytest.skip(f"needs the real data: {data_dir} holds no imdb/ or no glove/")
    monkeypatch.setenv("TWINGRAD_CACHE", str(real_cache))
    dataset = data.load("imdb", data_dir=data_dir, split=split)
    assert (dataset.source, dataset.notice) == ("real", None)
    assert dataset.x_train.shape == (train, 130) and dataset.x_test.shape == (50_000 - train, 130)
    assert dataset.vocabulary is not None and len(dataset.vocabulary) == 12_849
    assert dataset.vocabulary[2:6] == ("the", "and", "a", "of")
    both = np.concatenate([dataset.y_train, dataset.y_test])
    assert np.bincount(both).tolist() == [25_000, 25_000]
    vectors = dataset.pretrained["glove"]
    assert vectors[2, :3].tolist() == pytest.approx([0.418, 0.24968, -0.41242])  # "the" in the original
    spread = np.abs(vectors).max(axis=1) > 6 * glove.SPREAD
    assert spread[2:].mean() > 0.99  # hardly a word is without a vector
    if split == "original":
        assert dataset.y_train.sum() == 12_500
        # 199 = 25,000 - 24,801 repetitions within test and 123 texts in both parts: a few more than 123 rows.
        assert 123 <= int(dataset.notes[0].split()[0]) <= 123 + 199
