"""Files of the user's own, damaged at random: each is read, or refused by an error that names it."""

from __future__ import annotations

import gzip
import io
import lzma
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from bridge import weights
from bridge.errors import TwinGradError
from experiments import archive, checkpoint, mapped, rows
from experiments.data import glove

VECTORS = "".join(f"w{n} " + " ".join(f"{n * k % 7 - 3}.{k}" for k in range(5)) + "\n" for n in range(40)).encode()
COMPRESSIONS = {
    "stored": zipfile.ZIP_STORED,
    "deflate": zipfile.ZIP_DEFLATED,
    "bzip2": zipfile.ZIP_BZIP2,
    "lzma": zipfile.ZIP_LZMA,
}


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def zipped(members: dict[str, bytes], compression: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def read_vectors(path: Path) -> None:
    glove.identity(path, 5)
    glove.read(path, ["w1", "w39", "absent"], 5)


def read_weights(path: Path) -> None:
    weights.load(path)
    weights.metadata(path)


ROWS = npy(np.ones((3, 4)))
PARAMETERS = save({"a.weight": np.ones((3, 4), np.float32), "b.bias": np.zeros(4)}, {"seed": "1"})
CHECKPOINT = save(
    {"params.a": np.ones(2)},
    {"format": checkpoint.FORMAT, "version": checkpoint.VERSION, "settings": "{}", "history": "[]"},
)
RECORDS = archive.pack({"a" * 16: b'{"x": 1}', "b" * 16: b"{}"})

FILES: dict[str, tuple[str, bytes, Callable[[Path], Any]]] = {
    "vectors, plain": ("v.txt", VECTORS, read_vectors),
    "vectors, gz": ("v.txt.gz", gzip.compress(VECTORS, mtime=0), read_vectors),
    **{
        f"vectors, zip by {name}": ("v.zip", zipped({"glové.5d.txt": VECTORS, "x": b"y"}, how), read_vectors)
        for name, how in COMPRESSIONS.items()
    },
    "rows": ("x_train.npy", ROWS, rows.load_npy),
    "rows, mapped": ("x_train.npy", ROWS, lambda path: mapped.load(path.parent)),
    **{
        f"rows, npz by {name}": ("x.npz", zipped({"xé.npy": ROWS, "n.txt": b"y"}, how), rows.load_npz)
        for name, how in COMPRESSIONS.items()
    },
    "weights": ("w.safetensors", PARAMETERS, read_weights),
    "checkpoint": ("c.safetensors", CHECKPOINT, checkpoint.load),
    "records": ("raw.tar.xz", RECORDS, archive.read),
    "records, damaged before they were packed": (
        *("raw.tar", lzma.decompress(RECORDS)),
        lambda path: archive.unpack(lzma.compress(path.read_bytes(), preset=0), path),
    ),
}


@st.composite
def damages(draw: Any) -> list[tuple[float, int, bytes]]:
    """Where bytes are replaced (as a part of the length), how many, and by what."""
    bytes_ = st.one_of(st.binary(max_size=8), st.sampled_from([b"\xff" * 4, b"\0" * 4, b"'", b"(", b",", b"0", b"\n"]))
    places = st.one_of(st.floats(0, 0.2), st.floats(0.8, 1), st.floats(0, 1))
    return draw(st.lists(st.tuples(places, st.integers(0, 8), bytes_), min_size=1, max_size=3))


def damaged(content: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    for place, count, new in changes:
        start = round(place * len(content))
        content = content[:start] + new + content[start + count :]
    return content


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged")


@pytest.mark.campaign
@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=2 * settings.default.max_examples)
@given(changes=damages())
def test_a_damaged_file_is_read_or_refused(kind: str, folder: Path, changes: list[tuple[float, int, bytes]]) -> None:
    name, content, read = FILES[kind]
    path = folder / kind.replace(" ", "-") / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(damaged(content, changes))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            read(path)
        except TwinGradError as error:
            note(str(error))
            assert name in str(error)
    assert not warned


@pytest.mark.parametrize("kind", FILES)
def test_an_undamaged_file_is_read(kind: str, tmp_path: Path) -> None:
    name, content, read = FILES[kind]
    (tmp_path / name).write_bytes(content)
    read(tmp_path / name)


@pytest.mark.parametrize(
    "header",
    [
        *(b"{'descr': '<f8', 'fortran_order': False, 'shape': (3, 4, }", b"{'descr': '<f8', 'shape': '''"),
        *(b"{'descr': '04', 'fortran_order': False, 'shape': (3,), }", b"{'descr': ['<f8'], 'shape': (3,), }"),
        *(b"{'descr': '<f8', 'fortran_order': False, 'shape': (3L,), }", b"  {", b"(" * 100, b"\xff\xfe"),
    ],
)
@pytest.mark.parametrize("read", [rows.load_npy, lambda path: mapped.load(path.parent)])
def test_a_header_that_python_cannot_read_is_refused(
    header: bytes, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "x_train.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00v\x00" + header.ljust(117) + b"\n")
    with warnings.catch_warnings(), pytest.raises(TwinGradError, match=r"x_train\.npy"):
        warnings.simplefilter("error")
        read(path)


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.parametrize(("kind", "read"), [("vectors, zip by", read_vectors), ("rows, npz by", rows.load_npz)])
def test_any_byte_of_a_zip_may_be_another(kind: str, read: Callable[[Path], Any], name: str, tmp_path: Path) -> None:
    file, content, _ = FILES[f"{kind} {name}"]
    path, refused = tmp_path / file, 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
        try:
            read(path)
        except TwinGradError:
            refused += 1
    assert refused > len(content) // 4
