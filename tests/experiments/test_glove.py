"""GloVe vectors are found, streamed and put in a vocabulary's order; what is wrong is named with its line."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest

from experiments.data import DataError, fetch, glove
from experiments.data.text import SPECIAL

LINES = ["the 1 2 -3.5", "movie 0.25 1e-3 4", ". 7 7 7", "café 5 6 7"]
CONTENT = "".join(f"{line}\n" for line in LINES).encode()
NAME = "glove.6B.3d.txt"


@pytest.fixture(autouse=True)
def no_outside_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TWINGRAD_DATA", raising=False)
    monkeypatch.setenv("TWINGRAD_OFFLINE", "1")
    monkeypatch.setenv("TWINGRAD_CACHE", str(tmp_path / "cache"))


def stored(folder: Path, form: str, content: bytes = CONTENT) -> Path:
    """The text in `folder`, in one of the forms it may have."""
    folder.mkdir(parents=True, exist_ok=True)
    if form == "plain":
        (folder / NAME).write_bytes(content)
        return folder / NAME
    if form == "gz":
        (folder / f"{NAME}.gz").write_bytes(gzip.compress(content))
        return folder / f"{NAME}.gz"
    path = folder / ("glove.6B.zip" if form == "official zip" else f"{NAME}.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if form == "official zip":
            archive.writestr("glove.6B.2d.txt", "the 1 2\n")
        archive.writestr(NAME, content)
    return path


FORMS = ("plain", "gz", "zip", "official zip")


@pytest.mark.parametrize("subfolder", ["", "glove"])
@pytest.mark.parametrize("form", FORMS)
def test_any_form_is_found_and_gives_the_wanted_vectors(tmp_path: Path, form: str, subfolder: str) -> None:
    path = stored(tmp_path / "d" / subfolder, form)
    place = glove.locate(3, data_dir=tmp_path / "d")
    assert place.found == path
    found = glove.read(path, ["café", "the", "absent"], 3)
    assert {word: vector.tolist() for word, vector in found.items()} == {"the": [1, 2, -3.5], "café": [5, 6, 7]}
    assert all(vector.dtype == np.float32 for vector in found.values())


def test_other_dimensions_are_not_taken_for_the_one_asked_for(tmp_path: Path) -> None:
    stored(tmp_path / "d", "plain")
    with pytest.raises(DataError, match=r"holds no GloVe vectors of 50 numbers: expected glove\.6B\.50d\.txt"):
        glove.locate(50, data_dir=tmp_path / "d")


def test_without_a_file_the_reasons_are_told(tmp_path: Path) -> None:
    place = glove.locate(50)
    assert place.found is None
    assert "TWINGRAD_DATA is not set" in place.reason and "downloads are switched off" in place.reason


def test_vectors_of_a_dimension_that_none_can_have_are_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWINGRAD_OFFLINE")
    monkeypatch.setattr(fetch, "download", lambda *_: pytest.fail("a download"))
    place = glove.locate(51)
    assert place.found is None
    assert place.reason.endswith("those to download have other dimensions: 50, 100, 200, 300")


@pytest.mark.parametrize("form", FORMS)
def test_reading_ends_with_the_last_wanted_word(tmp_path: Path, form: str) -> None:
    path = stored(tmp_path, form, b"the 1 2 3\nmovie 4 5 6\nwrong line\n")
    assert set(glove.read(path, ["movie", "the"], 3)) == {"the", "movie"}
    with pytest.raises(DataError, match="line 3"):
        glove.read(path, ["movie", "the", "absent"], 3)


@pytest.mark.parametrize("form", FORMS)
def test_the_first_vector_of_a_word_counts(tmp_path: Path, form: str) -> None:
    path = stored(tmp_path, form, b"a 1 2 3\na 4 5 6\nb 7 8 9\n")
    found = glove.read(path, ["a", "b"], 3)
    assert found["a"].tolist() == [1, 2, 3] and found["b"].tolist() == [7, 8, 9]


def test_the_header_of_the_word2vec_form_is_passed_over(tmp_path: Path) -> None:
    assert set(glove.read(stored(tmp_path, "plain", b"4 3\n" + CONTENT), ["the", "4"], 3)) == {"the"}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("movie 1 2", "found 2 numbers"),
        ("movie 1 2 3 4", "found 4 numbers"),
        ("movie 1 2 x3", "found 'x3' among its numbers"),
        ("movie 1 nan 3", "found 'nan' among its numbers"),
        ("movie 1 1e99 3", "found '1e99' among its numbers"),
        ("", "found 0 numbers"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, form: str, line: str, found: str) -> None:
    path = stored(tmp_path, form, f"the 1 2 3\n{line}\nfilm 1 2 3\n".encode())
    with pytest.raises(DataError) as caught:
        glove.read(path, ["movie", "film"], 3)
    message = str(caught.value)
    assert f"{path}, line 2" in message and found in message and "expected 3 numbers after the word" in message


def test_a_line_that_nobody_wants_must_have_the_right_length_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2 \('unwanted'\): expected 3 numbers after the word, found 2 numbers"):
        glove.read(stored(tmp_path, "plain", b"the 1 2 3\nunwanted 1 2\nfilm 1 2 3\n"), ["film"], 3)


@pytest.mark.parametrize("content", [b"a 1 2 3\nb 7 8 9", b"a 1 2 3\nb 7 8", b"a 1 2 3\nb", b"2 3\na 1 2 3.5"])
def test_a_plain_text_that_ends_within_a_line_is_cut_short(tmp_path: Path, content: bytes) -> None:
    path = stored(tmp_path, "plain", content)
    with pytest.raises(DataError, match="is cut short: line 2 has no line feed") as caught:
        glove.read(path, ["a", "b"], 3)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("form", ["gz", "zip", "official zip"])
def test_the_last_line_of_a_packed_text_needs_no_end(tmp_path: Path, form: str) -> None:
    path = stored(tmp_path, form, b"a 1 2 3\nb 7 8 9")
    assert glove.read(path, ["a", "b"], 3)["b"].tolist() == [7, 8, 9]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_without_any_of_the_words_is_an_error(tmp_path: Path, form: str) -> None:
    path = stored(tmp_path, form)
    with pytest.raises(DataError, match=r"has a vector for none of the 2 words, such as 'The'") as caught:
        glove.read(path, ["movies", "The", "movies"], 3)
    assert str(path) in str(caught.value)
    assert glove.read(path, [], 3) == {}


@pytest.mark.parametrize("form", ["gz", "zip"])
def test_a_truncated_file_is_an_error(tmp_path: Path, form: str, rng: np.random.Generator) -> None:
    values = rng.normal(size=(3000, 3))
    lines = "".join(f"word{row} {a:.6f} {b:.6f} {c:.6f}\n" for row, (a, b, c) in enumerate(values))
    path = stored(tmp_path, form, lines.encode())
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="is cut short or corrupt") as caught:
        glove.read(path, ["absent"], 3)
    assert str(path) in str(caught.value)


def test_damage_inside_a_zip_is_an_error(tmp_path: Path) -> None:
    path = stored(tmp_path, "zip")
    contents = bytearray(path.read_bytes())
    contents[60] ^= 0xFF
    path.write_bytes(contents)
    with pytest.raises(DataError, match="is cut short or corrupt"):
        glove.read(path, ["absent"], 3)


def test_a_zip_without_the_dimension_tells_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "glove.6B.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("glove.6B.2d.txt", "the 1 2\n")
    with pytest.raises(DataError, match=r"no file of vectors of 3 numbers.*it holds glove\.6B\.2d\.txt"):
        glove.identity(path, 3)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        glove.read(stored(tmp_path, "plain", b""), ["the"], 3)


@pytest.mark.parametrize("form", FORMS)
def test_the_identity_follows_the_content(tmp_path: Path, form: str) -> None:
    first = glove.identity(stored(tmp_path / "a", form), 3)
    assert first == glove.identity(stored(tmp_path / "b", form), 3)
    assert first != glove.identity(stored(tmp_path / "c", form, CONTENT.replace(b"2", b"3")), 3)


def test_rows_are_the_vocabulary_s_and_what_has_no_vector_is_random_but_fixed(tmp_path: Path) -> None:
    vocabulary = (*SPECIAL, "movie", "absent", "the")
    matrix = glove.fill(glove.read(stored(tmp_path, "gz"), vocabulary, 3), vocabulary, 7, 3)
    assert matrix.shape == (7, 3) and matrix.dtype == np.float32
    assert matrix[0].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(matrix[[2, 4]], np.array([[0.25, 1e-3, 4], [1, 2, -3.5]], np.float32))
    assert np.abs(matrix[[1, 3, 5, 6]]).max() < 6 * glove.SPREAD and (matrix[[1, 3, 5, 6]] != 0).all()
    other = glove.fill({}, vocabulary, 7, 3)
    np.testing.assert_array_equal(matrix[[1, 3, 5, 6]], other[[1, 3, 5, 6]])


def test_several_encrypted_mirrors_are_asked() -> None:
    assert len({mirror.split("/")[2] for mirror in glove.MIRRORS}) >= 2
    assert all(mirror.startswith("https://") for mirror in glove.MIRRORS)


def test_the_real_vectors(data_dir: Path) -> None:
    path = glove.find(data_dir, 50)
    if path is None:
        pytest.skip(f"needs the real data: {data_dir} holds no glove/glove.6B.50d.txt.gz")
    found = glove.read(path, ["the", "movie", "notawordofglove"], 50)
    assert set(found) == {"the", "movie"}
    expected = [0.418, 0.24968, -0.41242, 0.1217, 0.34527, -0.044457, -0.49688]  # the file's first numbers
    assert found["the"][:7].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        (b"film 1_0 2 3", "'1_0' among its numbers"),
        (b"film\t1 2 3", "a tab where numbers stand"),
        (b"film 1\t2 3 4", "a tab where numbers stand"),
        (b"film 1 2 3\0", "a NUL where numbers stand"),
        (b"film 1 \x0b2 3", r"'\x0b2' among its numbers"),
        (b"film nan 2 3", "'nan' among its numbers"),
        (b"film 1 -inf 3", "'-inf' among its numbers"),
        (b"film 1 2 infinity", "'infinity' among its numbers"),
        (b"film 1e99 2 3", "'1e99' among its numbers"),
        (b"film 0x1 2 3", "'0x1' among its numbers"),
        ("film １ 2 3".encode(), "'１' among its numbers"),
        (b"film  1 2", "'' among its numbers"),
        (b"film 1 2 ", "'' among its numbers"),
        (b"film 1 2", "2 numbers"),
        (b"film 1 2 3 4", "4 numbers"),
        (b" 1 2 3", "expected 3 numbers"),
        (b"\x1b[31mfilm 1 2", r"('\x1b[31mfilm')"),
    ],
)  # fmt: skip
def test_a_row_of_other_than_decimal_numbers_between_blanks_is_named(row: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "glove.6B.3d.txt"
    path.write_bytes(b"the 1 2 3\n" + row + b"\n")
    with pytest.raises(DataError) as caught:
        glove.read(path, ["film"], 3)
    assert f"{path}, line 2 (" in str(caught.value) and found in str(caught.value), str(caught.value)


@pytest.mark.parametrize("row", [b"film 1 -2.5 +3e-2", b"film .5 5. 1E+3\r", b"film 0 -0 00.10"])
def test_decimal_numbers_are_read(row: bytes, tmp_path: Path) -> None:
    path = tmp_path / "glove.6B.3d.txt"
    path.write_bytes(row + b"\n")
    expected = [float(value) for value in row.split()[1:]]
    assert glove.read(path, ["film"], 3)["film"].tolist() == pytest.approx(expected)
