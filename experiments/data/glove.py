"""GloVe: word vectors trained on Wikipedia 2014 and Gigaword 5 (6 billion tokens, 400,000 lower-case words).

Pennington, Socher and Manning, "GloVe: Global Vectors for Word Representation", EMNLP 2014, pp. 1532-1543.

The text has one line per word, `word number number ...` with single blanks, the most frequent words first. It may be
plain, gz or a zip, the official `glove.6B.zip` among them, in the data folder itself or in `glove/`. It is read as a
stream, no further than to the last word that is wanted, and only wanted lines are turned into numbers; of the others
only the number of values is checked. Contents are not compared with the original's: vectors of one's own are welcome,
up to `MOST_LINES` of them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from bridge.errors import shown
from experiments.data import reading
from experiments.data.dataset import DataError, Progress
from experiments.data.fetch import RemoteFile
from experiments.data.search import Place, search
from experiments.data.text import PADDING, SPECIAL

VERSION = 1
"""Goes up with every change of what this module makes of the same file: what was made before is made anew."""

SUBFOLDERS = ("", "glove", "glove.6B")

FILES = (RemoteFile("glove.6B.zip", 862_182_613, "617afb2fe6cbd085c235baf7a465b96f4112bd7f7ccb2b2cbd649fed9cbcf2fb"),)
MIRRORS = (
    "https://nlp.stanford.edu/data",
    "https://downloads.cs.stanford.edu/nlp/data",
    "https://huggingface.co/stanfordnlp/glove/resolve/main",
)

REMEDY = "Put the original file in its place, or name another folder with --data-dir or TWINGRAD_DATA"

DIMENSIONS = (50, 100, 200, 300)
"""Of the vectors in the files that can be downloaded."""

SEED = 20240301
SPREAD = 0.1  # standard deviation; that of the frequent words' vectors in GloVe 6B is 0.4 to 0.6

LONGEST_WORD, LONGEST_NUMBER = 1_000, 50
"""Bytes of a word and of each number that a line may have."""
MOST_LINES = 3_000_000
"""The largest of GloVe's own files, 840B, has 2.2 million."""

_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


def locate(
    dimension: int,
    data_dir: str | Path | None = None,
    allow_download: bool = True,
    progress: Progress | None = None,
    mirrors: Sequence[str] = MIRRORS,
) -> Place:
    """The first place that has GloVe vectors of a dimension (see `experiments.data`); `Place.found` is a file."""
    known = ", ".join(map(str, DIMENSIONS))
    return search(
        dataset="glove",
        title=f"GloVe vectors of {dimension} numbers",
        find=lambda folder: find(folder, dimension),
        files=FILES,
        mirrors=mirrors,
        data_dir=data_dir,
        allow_download=allow_download,
        progress=progress,
        expected=f"glove.6B.{dimension}d.txt (plain, .gz or .zip) or glove.6B.zip",
        refusal=None if dimension in DIMENSIONS else f"those to download have other dimensions: {known}",
    )


def find(folder: Path, dimension: int) -> Path | None:
    """The file in `folder`, or in one of its `SUBFOLDERS`, with vectors of a dimension; None without one."""
    text = f"glove.6B.{dimension}d.txt"
    names = (text, f"{text}.gz", f"{text}.zip", f"glove.6B.{dimension}d.zip", "glove.6B.zip")
    paths = [folder / subfolder / name for subfolder in SUBFOLDERS for name in names]
    found = reading.first_file(paths)
    if found is None:
        reading.refuse_others((folder / subfolder for subfolder in SUBFOLDERS), folder=True)
        reading.refuse_others(paths)
    return found


def identity(path: Path, dimension: int) -> str:
    """A digest (hex) of what `path` holds; of a zip, what its directory says of the text: size and checksum."""
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                member = archive.getinfo(_member(archive, path, dimension))
            return hashlib.sha256(f"{member.filename} {member.file_size} {member.CRC}".encode()).hexdigest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except reading.DAMAGED_ZIP as error:
        raise _unreadable(path, error) from error


def fill(
    vectors: dict[str, NDArray[np.float32]], vocabulary: Sequence[str], rows: int, dimension: int
) -> NDArray[np.float32]:
    """A matrix (rows, dimension) with the vectors of a vocabulary in its order.

    A word without a vector, the unknown word, and rows beyond the vocabulary are normal(0, `SPREAD`), drawn with
    a fixed seed that makes them depend on nothing but their place. The row of the padding is zero.
    """
    generator = np.random.Generator(np.random.PCG64(SEED))
    filled = generator.normal(0.0, SPREAD, (rows, dimension)).astype(np.float32)
    for row, word in enumerate(vocabulary):
        vector = vectors.get(word)
        if vector is not None:
            filled[row] = vector
    filled[PADDING] = 0
    return filled


def without_vector(filled: NDArray[np.float32], vocabulary: Sequence[str]) -> int:
    """How many words of a vocabulary have a random row in what `fill` made of it."""
    random = fill({}, vocabulary, *filled.shape)
    return int((filled == random).all(axis=1)[len(SPECIAL) : len(vocabulary)].sum())


def read(path: Path, words: Sequence[str], dimension: int) -> dict[str, NDArray[np.float32]]:
    """The vectors of those `words` that `path` has, each (dimension,).

    Raises `DataError` naming the path and the line for one with too few or too many numbers or with something
    else than numbers, for a file that is cut short, and for one that has none of the words.
    """
    wanted = {word.encode() for word in words}
    longest = LONGEST_WORD + dimension * LONGEST_NUMBER
    is_plain = path.suffix not in (".zip", ".gz")  # nothing else tells the end of such a file from a cut
    found: dict[str, NDArray[np.float32]] = {}
    number = 0
    try:
        with _lines(path, dimension) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(longest), b""), 1):
                if len(line) == longest:
                    raise DataError(f"{path}, line {number:,} has more than {longest:,} bytes. {REMEDY}")
                if number > MOST_LINES:
                    raise DataError(f"{path} has more than {MOST_LINES:,} lines, the most that is read. {REMEDY}")
                if is_plain and not line.endswith(b"\n"):
                    raise DataError(
                        f"{path} is cut short: line {number:,} has no line feed. Add one if the line is whole. {REMEDY}"
                    )
                end = line.find(b" ")
                if line.count(b" ") != dimension or end < 1 or b"\t" in line or b"\0" in line:
                    if number == 1 and _is_header(line, dimension):
                        continue
                    raise DataError(_wrong_line(path, number, line, dimension))
                if line[:end] in wanted:
                    word = line[:end]
                    wanted.discard(word)
                    found[word.decode()] = _vector(path, number, line, dimension)
                    if not wanted:
                        break
    except reading.DAMAGED_ZIP as error:
        raise _unreadable(path, error, after=number) from error
    if number == 0:
        raise DataError(f"{path} is empty; expected a line per word, with {dimension} numbers each. {REMEDY}")
    if words and not found:
        raise DataError(
            f"{path} has a vector for none of the {len(wanted):,} words, such as {_short(min(wanted))}. {REMEDY}"
        )
    return found


@contextmanager
def _lines(path: Path, dimension: int) -> Iterator[IO[bytes]]:
    """The lines of the text in `path`, unpacked as they are read."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive, archive.open(_member(archive, path, dimension)) as member:
            yield io.BufferedReader(cast(io.RawIOBase, member), 1 << 20)
    elif path.suffix == ".gz":
        with gzip.open(path) as file:
            yield io.BufferedReader(file, 1 << 20)
    else:
        with path.open("rb", buffering=1 << 20) as file:
            yield file


def _member(archive: zipfile.ZipFile, path: Path, dimension: int) -> str:
    names = [name for name in archive.namelist() if name.endswith(f"{dimension}d.txt")]
    if not names:
        held = ", ".join(archive.namelist()[:5]) or "nothing"
        raise DataError(f"{path} has no file of vectors of {dimension} numbers, *{dimension}d.txt; it holds {held}")
    return names[0]


def _is_header(line: bytes, dimension: int) -> bool:
    """Whether a first line is that of the word2vec form: the number of words and the dimension."""
    parts = line.split()
    return len(parts) == 2 and parts[0].isdigit() and parts[1] == str(dimension).encode()


def _vector(path: Path, number: int, line: bytes, dimension: int) -> NDArray[np.float32]:
    values = _values(line)
    if not all(map(_NUMBER.fullmatch, values)):  # float() and numpy also take 1_0, and blanks and NULs around a number
        raise DataError(_wrong_line(path, number, line, dimension))
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is named below
        vector = np.array([float(value) for value in values]).astype(np.float32)
    if not np.isfinite(vector).all():
        raise DataError(_wrong_line(path, number, line, dimension))
    return vector


def _values(line: bytes) -> list[bytes]:
    """What comes after the word, between blanks."""
    return line.rstrip(b"\r\n").split(b" ")[1:]


def _wrong_line(path: Path, number: int, line: bytes, dimension: int) -> str:
    word, values = line.rstrip(b"\r\n").split(b" ")[0], _values(line)
    bad = next((value for value in values if not _is_number(value)), None)
    what = f"{len(values)} numbers" if bad is None else f"{_short(bad)} among its numbers"
    for byte, name in ((b"\t", "a tab"), (b"\0", "a NUL")):
        if byte in line:
            what = f"{name} where numbers stand between single blanks"
    return (
        f"{path}, line {number:,} ({_short(word)}): expected {dimension} numbers after the word, found {what}. {REMEDY}"
    )


def _short(text: bytes) -> str:
    return shown(text[:40].decode(errors="replace"))


def _is_number(value: bytes) -> bool:
    return _NUMBER.fullmatch(value) is not None and abs(float(value)) <= float(np.finfo(np.float32).max)


def _unreadable(path: Path, error: BaseException, after: int = 0) -> DataError:
    where = f" after line {after:,}" if after else ""
    if isinstance(error, PermissionError | FileNotFoundError | IsADirectoryError):
        return DataError(f"{path} can't be read: {error.strerror}")
    return DataError(f"{path} is cut short or corrupt{where}: {error or type(error).__name__}. {REMEDY}")
