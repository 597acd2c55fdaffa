"""IMDB: 50,000 film reviews, half of them negative (class 0) and half positive (class 1), as rows of word ids.

Maas, Daly, Pham, Huang, Ng and Potts, "Learning Word Vectors for Sentiment Analysis", ACL-HLT 2011, pp. 142-150
(Large Movie Review Dataset v1.0, `aclImdb`).

The reviews may lie in the data folder itself or in `imdb/` (see `forms`), as

- `train.csv` and `test.csv`, plain or gz, with the header `review,label` or `review,sentiment`;
- the folder `aclImdb`, with `train/neg/*.txt` and the three others;
- its archive, `aclImdb_v1.tar.gz`, as it is downloaded;
- one CSV of all 50,000, such as `IMDB Dataset.csv`. It does not tell training from test reviews, so that only our
  own split can be made from it.

Labels are 0 or neg(ative), 1 or pos(itive). However the reviews are stored, they are put in the order of the sha256
of their texts: the same reviews make the same arrays.

Options (`OPTIONS`): `vocabulary`, rows in all, padding and unknown word included; `length`, ids per review (`LIMITS`:
the most of each); `experiments.data.text` says how texts become ids. `split`: "40000/10000" draws 40,000 of all
50,000 for training with a fixed seed, "original" is the authors' 25,000 and 25,000. `vectors`: "glove" for a matrix of
pretrained word vectors with `dimension` columns (see `experiments.data.glove`), "none" for no such thing.

418 of the reviews are repetitions of others, so that some test reviews occur in the training reviews too, with
either split. That is left as it is. `Dataset.notes` says how many they are, and how many words GloVe has no vector of.
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.errors import printable, shown
from experiments.data import encoded, glove, reading, sample_reviews, text
from experiments.data.dataset import (
    SAMPLE_LABEL,
    DataError,
    Dataset,
    IncompleteError,
    Progress,
    array_digest,
    combined_digest,
)
from experiments.data.fetch import RemoteFile
from experiments.data.search import search

OPTIONS: Mapping[str, Any] = {
    "vocabulary": 12_849,
    "length": 130,
    "split": "40000/10000",
    "vectors": "glove",
    "dimension": 50,
}
"""What `load` takes beside the places to look in, with what it is when it is not given."""

LIMITS = {"vocabulary": (len(text.SPECIAL) + 1, 1_000_000), "length": (1, 3_000), "dimension": (1, 1_000)}
"""The least and the most of each option that is a number; the longest review has 2,500 words."""

SPLITS = ("40000/10000", "original")
SPLIT_SEED = 20240303
TRAINING_SHARE = 0.8
EACH = 12_500  # reviews of one class in one of the original parts

FILES = (
    RemoteFile("aclImdb_v1.tar.gz", 84_125_825, "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"),
)
MIRRORS = ("https://ai.stanford.edu/~amaas/data/sentiment", "https://d2l-data.s3-accelerate.amazonaws.com")

SUBFOLDERS = ("imdb", "")
WHOLE = ("IMDB Dataset.csv", "imdb.csv", "reviews.csv")
ARCHIVES = ("aclImdb_v1.tar.gz", "aclImdb.tar.gz", "aclImdb_v1.tar", "aclImdb.tar")
LABELS = {"0": 0, "neg": 0, "negative": 0, "1": 1, "pos": 1, "positive": 1}
GROUPS = (("train", "neg"), ("train", "pos"), ("test", "neg"), ("test", "pos"))

VERSION = f"imdb 1, text {text.VERSION}, glove {glove.VERSION}"
"""Its own number goes up with every change of what this module makes of the same reviews."""

EXAMPLES = 4


@dataclass(frozen=True)
class Review:
    """A text as it was written, its class, and its original part ("train", "test", or "" when that is not known)."""

    text: str
    label: int
    part: str


def load(
    data_dir: str | Path | None = None,
    allow_download: bool = True,
    progress: Progress | None = None,
    each: int = EACH,
    **options: Any,
) -> Dataset:
    """IMDB from the first place that has it (see `experiments.data`), or generated reviews.

    Where the reviews are available and the vectors are not, the vectors are random and the dataset is a sample.
    `each` is how many reviews of each class each original part must have. Raises `DataError` for options that
    cannot be, and for data that is present but wrong.
    """
    settings = checked({**OPTIONS, **options})
    rows, length, split, dimension = (settings[name] for name in ("vocabulary", "length", "split", "dimension"))
    with_vectors = settings["vectors"] == "glove"
    place = search(
        dataset="imdb",
        title="IMDB reviews",
        find=find,
        files=FILES,
        mirrors=MIRRORS,
        data_dir=data_dir,
        allow_download=allow_download,
        progress=progress,
        expected="train.csv.gz and test.csv.gz, the folder aclImdb or its archive aclImdb_v1.tar.gz, or one CSV "
        f"({WHOLE[0]})",
    )
    if place.found is None:
        size = dimension if with_vectors else None
        return sample_reviews.reviews("imdb", "IMDB", place.reason, rows, length, size)
    source = place.found
    vectors = glove.locate(dimension, data_dir, allow_download, progress) if with_vectors else None
    words_from = vectors.found if vectors is not None else None

    def make() -> encoded.Arrays:
        made = encode(list(read(source, each)), source, rows, length, split)
        if with_vectors:
            words = encoded.to_words(made["vocabulary"])
            found = {} if words_from is None else glove.read(words_from, words[len(text.SPECIAL) :], dimension)
            made["glove"] = glove.fill(found, words, rows, dimension)
        return made

    parts = {name: str(value) for name, value in settings.items()}
    parts |= {"each": str(each), "reviews": identity(source)}
    if words_from is not None:
        parts["glove"] = glove.identity(words_from, dimension)
    arrays, note = encoded.remember(encoded.entry("imdb", combined_digest(sorted(parts.items()))), VERSION, make)

    notice = None
    if vectors is not None and words_from is None:
        notice = (
            f"{SAMPLE_LABEL[0].upper()}{SAMPLE_LABEL[1:]} in part: IMDB's reviews are real, but their word vectors "
            f"are random, not GloVe's, because {vectors.reason}. For real results, put glove.6B.{dimension}d.txt "
            "in a folder and name it with --data-dir or TWINGRAD_DATA."
        )
    return Dataset(
        name="imdb",
        source="real" if notice is None else "sample",
        x_train=arrays["x_train"].astype(np.int64),
        y_train=arrays["y_train"].astype(np.int64),
        x_test=arrays["x_test"].astype(np.int64),
        y_test=arrays["y_test"].astype(np.int64),
        digest=combined_digest((name, array_digest(arrays[name])) for name in sorted(arrays)),
        origin=str(source) if words_from is None else f"{source} and {words_from}",
        instead_of="" if notice is None else "all of IMDB (its word vectors are random)",
        notice=notice,
        vocabulary=encoded.to_words(arrays["vocabulary"]),
        pretrained={"glove": arrays["glove"]} if with_vectors else {},
        examples=encoded.to_words(arrays["examples"]),
        notes=(*filter(None, [note]), *_notes(arrays, words_from)),
    )


def _notes(arrays: encoded.Arrays, words_from: Path | None) -> Iterator[str]:
    """What is odd in the arrays of a dataset, whose word vectors are from a file or random."""
    if repeated := int(arrays["repeated"]):
        of_test = f"{repeated:,} of the {len(arrays['y_test']):,} test reviews"
        yield f"{of_test} occur in the training reviews too, as the data set has it"
    if words_from is not None:
        vocabulary = encoded.to_words(arrays["vocabulary"])
        words = len(vocabulary) - len(text.SPECIAL)
        if without := glove.without_vector(arrays["glove"], vocabulary):
            yield f"{without:,} of the {words:,} words have random vectors, since {words_from} has none of them"


def checked(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, every one of which must be possible; `DataError` names the first that is not."""
    why = {"vocabulary": " (padding, the unknown word, and at least one word)"}
    for name, (lowest, highest) in LIMITS.items():
        value = settings[name]
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise DataError(
                f"imdb: {name} is {shown(value)}; expected a whole number, {lowest} or more{why.get(name, '')}, and at "
                f"most {highest:,}"
            )
    for name, known in {"split": SPLITS, "vectors": ("glove", "none")}.items():
        if settings[name] not in known:
            raise DataError(f"imdb: {name} is {shown(settings[name])}; expected {' or '.join(map(repr, known))}")
    return settings


def encode(reviews: list[Review], source: Path, rows: int, length: int, split: str) -> encoded.Arrays:
    """The arrays of a dataset (see `load`), in the smallest types that hold them."""
    reviews.sort(key=lambda review: (hashlib.sha256(review.text.encode()).digest(), review.part, review.label))
    if split == "original":
        if not reviews[0].part:
            raise DataError(
                f"{source} does not tell training from test reviews, so the original split can't be made of it; "
                f"choose the split {SPLITS[0]!r}, or name a folder with train.csv and test.csv or aclImdb"
            )
        in_training = np.array([review.part == "train" for review in reviews])
        train, test = np.flatnonzero(in_training), np.flatnonzero(~in_training)
    else:
        order = np.random.Generator(np.random.PCG64(SPLIT_SEED)).permutation(len(reviews))
        cut = round(TRAINING_SHARE * len(reviews))
        train, test = order[:cut], order[cut:]
    ids, vocabulary = text.encode([review.text for review in reviews], train, rows, length)
    ids = ids.astype(np.min_scalar_type(max(rows - 1, 1)))
    labels = np.array([review.label for review in reviews], np.uint8)
    seen = {reviews[row].text for row in train}
    return {
        "x_train": ids[train],
        "y_train": labels[train],
        "x_test": ids[test],
        "y_test": labels[test],
        "vocabulary": encoded.from_words(vocabulary),
        "examples": encoded.from_words(tuple(reviews[row].text.replace("\0", " ") for row in train[:EXAMPLES])),
        "repeated": np.array(sum(reviews[row].text in seen for row in test)),
    }


# ----------------------------------------------------------------------------------------------------------
# Where reviews are, in which form


MOST_BYTES = 300_000_000
"""Of a CSV of reviews; that of all 50,000 has 66 million."""
MOST_UNPACKED = 450_000_000
"""Of the archive with all that it holds, which a plain one has itself."""
MOST_TIMES, ROOM = 4, 1_000
"""How many times the reviews of a kind that there should be, and how many beside, are read to count them."""
LONGEST_TEXT = 131_072
"""Bytes of a review; the longest has 14,000. Python's reader of CSV has the same limit."""


def find(folder: Path) -> Path | None:
    """What holds the reviews in `folder` or its `SUBFOLDERS`: a folder with two CSVs, aclImdb, an archive or a CSV.

    Raises `IncompleteError` when only a part is there.
    """
    incomplete = None
    for subfolder in SUBFOLDERS:
        candidate = folder / subfolder
        try:
            found = _form(candidate)
        except IncompleteError as error:
            incomplete = incomplete or error
            continue
        if found is not None:
            return found
    reading.refuse_others((folder / subfolder for subfolder in SUBFOLDERS), folder=True)
    for candidate in (folder / subfolder for subfolder in SUBFOLDERS):
        reading.refuse_others(_extracted(candidate), folder=True)
        reading.refuse_others([*_files(candidate), *_csvs(candidate, "train"), *_csvs(candidate, "test")])
    if incomplete is not None:
        raise incomplete
    return None


def _extracted(folder: Path) -> Iterator[Path]:
    """The folders of the extracted archive; those beside the data folder's own only where one is called so."""
    extracted = folder / "aclImdb"
    yield extracted
    yield from (extracted.joinpath(*group) for group in GROUPS)


def _files(folder: Path) -> list[Path]:
    """Where one file with all reviews may be."""
    return [folder / f"{name}{end}" for name in (*ARCHIVES, *WHOLE) for end in ("", ".gz")]


def _csvs(folder: Path, part: str) -> list[Path]:
    """Where the reviews of one part may be."""
    return [folder / f"{part}.csv", folder / f"{part}.csv.gz"]


def _form(folder: Path) -> Path | None:
    for extracted in (folder / "aclImdb", folder):
        missing = ["/".join(group) for group in GROUPS if not os.path.isdir(extracted.joinpath(*group))]
        if not missing:
            return extracted
        if len(missing) < len(GROUPS):
            raise IncompleteError(
                f"{extracted} holds only a part of IMDB. Missing: {', '.join(missing)}. "
                "Extract the archive again, or name another folder"
            )
    parts = [_csv_of(folder, part) for part in ("train", "test")]
    if all(parts):
        return folder
    whole = reading.first_file(_files(folder))
    if whole is None and any(parts):
        absent = "train" if parts[0] is None else "test"
        raise IncompleteError(
            f"{folder} holds only one of IMDB's two files. Missing, plain or gz: {absent}.csv.gz. "
            "Copy it there, or name another folder"
        )
    return whole


def _csv_of(folder: Path, part: str) -> Path | None:
    return reading.first_file(_csvs(folder, part))


def _sources(source: Path) -> list[tuple[Path, str]]:
    """The files that `source`, as `find` returns it, consists of, with the part in each; none for aclImdb."""
    if source.is_file():
        return [(source, "")]
    parts = [(path, part) for part in ("train", "test") if (path := _csv_of(source, part)) is not None]
    return [] if all(source.joinpath(*group).is_dir() for group in GROUPS) else parts


def _most_stored(path: Path) -> int:
    """How many bytes a file with reviews may have."""
    return MOST_UNPACKED if ".tar" in path.suffixes else MOST_BYTES


def identity(source: Path) -> str:
    """A digest (hex) of what the reviews are made from.

    Of files it is over their contents. Of aclImdb, whose 50,000 files take seconds to read, it is over their
    names, sizes and times of change.
    """
    digest = hashlib.sha256()
    try:
        for path, part in _sources(source):
            with reading.opened(path, _most_stored(path)) as file:
                digest.update(f"{part} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        if not _sources(source):
            for group in GROUPS:
                with os.scandir(source.joinpath(*group)) as listing:
                    for entry in sorted(listing, key=lambda entry: entry.name):
                        about = entry.stat()
                        line = f"{group} {entry.name} {about.st_size} {about.st_mtime_ns}\n"
                        digest.update(os.fsencode(line))
    except OSError as error:
        raise DataError(f"{error.filename or source} can't be read: {error.strerror or error}") from error
    return digest.hexdigest()


# ----------------------------------------------------------------------------------------------------------
# Reading them


def read(source: Path, each: int = EACH) -> Iterator[Review]:
    """The reviews in what `find` returned, which must be `each` of a class in a part.

    Raises `DataError` naming the file, and in a CSV the line, of a text that is not UTF-8 or empty, and of a label
    that is missing or unknown.
    """
    counts: dict[tuple[str, int], int] = {}
    for review in _reviews(source):
        key = review.part, review.label
        counts[key] = counts.get(key, 0) + 1
        if counts[key] > MOST_TIMES * each + ROOM:
            raise DataError(f"{source} holds more than {counts[key] - 1:,} reviews of one kind. {glove.REMEDY}")
        yield review
    parts = {"train": each, "test": each} if any(part for part, _ in counts) else {"": 2 * each}
    for part, expected in parts.items():
        found = [counts.get((part, label), 0) for label in (0, 1)]
        if found != [expected, expected]:
            what = {"train": "training reviews", "test": "test reviews", "": "reviews"}[part]
            raise DataError(
                f"{source}: the {what} are {found[0]:,} negative and {found[1]:,} positive ones; expected "
                f"{expected:,} of each, as the data set has them. {glove.REMEDY}"
            )


def _reviews(source: Path) -> Iterator[Review]:
    files = _sources(source)
    if not files:
        yield from _read_folder(source)
    for path, part in files:
        if ".tar" in path.suffixes:
            yield from _read_archive(path)
        else:
            yield from _read_csv(path, part)


def _read_folder(folder: Path) -> Iterator[Review]:
    for part, group in GROUPS:
        inside = folder / part / group
        for name in sorted(os.listdir(inside)):
            if name.endswith(".txt"):
                yield Review(
                    _text(reading.contents(inside / name, LONGEST_TEXT), f"{inside / name}"), LABELS[group], part
                )


_DAMAGED_ARCHIVE = (*reading.DAMAGED, tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError)
"""What reading a damaged archive raises; the last four come of odd numbers in headers, and of headers in a long row."""


class _Member(tarfile.TarInfo):
    """A member of the archive; its name and notes, which are read whole, may not be as long as a bomb's."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        if self.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) and self.size > LONGEST_TEXT:
            raise tarfile.ReadError(f"a note of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]

    def _refuse(self, *_: Any) -> Any:
        raise tarfile.ReadError("a file with holes")  # whose map is read whole, however long it is

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse


def _read_archive(path: Path) -> Iterator[Review]:
    member_of = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/[^/]+\.txt")
    try:
        # "r|": in one pass, without going back.
        with (
            reading.unpacked(path, _most_stored(path), MOST_UNPACKED) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive,
        ):
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # they would be kept, for going back
                _check_size(member, archive.offset)
                match = member_of.fullmatch(member.name)
                text = archive.extractfile(member) if match else None
                if match and text is not None:
                    where = f"{path}: {printable(member.name[:200])}"
                    if member.size > LONGEST_TEXT:
                        raise DataError(
                            f"{where}: a review of {member.size:,} bytes; expected at most {LONGEST_TEXT:,}"
                        )
                    yield Review(_text(text.read(), where), LABELS[match[2]], match[1])
    except DataError:  # a ValueError, too
        raise
    except _DAMAGED_ARCHIVE as error:
        raise DataError(f"{path} is cut short or corrupt: {error or type(error).__name__}. {glove.REMEDY}") from error


def _check_size(member: tarfile.TarInfo, end: int) -> None:
    """Raise an error for a member of a size that cannot be; `end` is where the next one begins.

    `tarfile` would count through all the blocks until there, whether or not the archive has them.
    """
    if member.size < 0:
        raise tarfile.ReadError(f"{shown(member.name)} has {shown(member.size)} bytes")
    if max(member.size, end) > MOST_UNPACKED:
        raise reading.TooLongError(
            f"it unpacks to more than {MOST_UNPACKED:,} bytes, by what it says of {shown(member.name)}"
        )


def _read_csv(path: Path, part: str) -> Iterator[Review]:
    rows = csv.reader(_csv_lines(path), strict=True)
    try:
        header = [column.strip().lower() for column in next(rows, [])]
        if sorted(header) not in (["label", "review"], ["review", "sentiment"]):
            raise DataError(
                f"{path}: its header is {shown(','.join(header))}; expected review,label or review,sentiment. "
                f"{glove.REMEDY}"
            )
        of_text = header.index("review")
        line = rows.line_num
        for row in rows:
            where, line = f"{path}, line {line + 1:,}", rows.line_num
            if row:
                yield _row(row, of_text, part, where)
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num:,}: {error}; is the file cut short? {glove.REMEDY}") from error


def _csv_lines(path: Path) -> Iterator[str]:
    """The lines of a CSV, which ends them by a line feed, with a carriage return or without; decoded one by one."""
    packed = " (decompressed)" if path.suffix == ".gz" else ""
    at, number = 0, 0
    try:
        with reading.unpacked(path, MOST_BYTES, MOST_BYTES) as stream:
            while line := stream.readline(LONGEST_TEXT + 1):
                number += 1
                if len(line) > LONGEST_TEXT:
                    raise DataError(f"{path}, line {number:,} has more than {LONGEST_TEXT:,} bytes. {glove.REMEDY}")
                if b"\0" in line:
                    raise DataError(f"{path}, line {number:,} has a NUL in it. {glove.REMEDY}")
                text = _decoded(line, f"{path}{packed}", at)
                yield text.removeprefix("\N{BYTE ORDER MARK}") if number == 1 else text
                at += len(line)
    except reading.DAMAGED as error:
        raise DataError(f"{path} is cut short or corrupt: {error}. {glove.REMEDY}") from error


def _row(row: Sequence[str], of_text: int, part: str, where: str) -> Review:
    if len(row) > 2:
        raise DataError(f"{where}: {len(row)} values; expected a review and a label. Quote texts that hold commas")
    label = row[1 - of_text].strip() if len(row) == 2 else ""
    if not label:
        raise DataError(f"{where}: the label is missing; expected {_in_words(LABELS)}")
    if label.lower() not in LABELS:
        raise DataError(f"{where}: the label {shown(label[:40])} is unknown; expected {_in_words(LABELS)}")
    if not row[of_text].strip():
        raise DataError(f"{where}: the text of the review is empty")
    return Review(row[of_text], LABELS[label.lower()], part)


def _text(contents: bytes, where: str) -> str:
    decoded = _decoded(contents, where)
    if not decoded.strip():
        raise DataError(f"{where}: the text of the review is empty")
    if "\0" in decoded:
        raise DataError(f"{where}: the text of the review has a NUL in it. {glove.REMEDY}")
    return decoded


def _decoded(contents: bytes, where: str, at: int = 0) -> str:
    """The text of UTF-8 that begins `at` bytes into what `where` names."""
    try:
        return contents.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8: byte 0x{contents[error.start]:02x} at offset {at + error.start:,}. {glove.REMEDY}"
        ) from error


def _in_words(labels: Iterable[str]) -> str:
    return ", ".join(labels)
