"""Texts become tokens, tokens a vocabulary, texts rows of its numbers: as documented, and always the same."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.data import text
from experiments.data.text import PADDING, SPECIAL, UNKNOWN

ALL = np.arange(100)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("It's <br />GREAT, isn't it?", "it 's great is n't it"),
        ("one<br /><br />two", "one two"),
        ("Can't, won't, don't!", "ca n't wo n't do n't"),
        ("I'm we're I've you'll she'd", "i 'm we 're i 've you 'll she 'd"),
        ("isn\N{RIGHT SINGLE QUOTATION MARK}t", "is n't"),
        ("rock'n'roll 'quoted' o'clock", "rock n roll quoted o clock"),
        ("10/10 in 1999--the 80's_best", "10 10 in 1999 the 80 's best"),
        ("Amélie ΝΑΊ 東京", "amélie ναί 東京"),
        ("... !? <br />", ""),
        ("", ""),
    ],
)
def test_tokens_are_those_of_the_documentation(written: str, expected: str) -> None:
    assert text.tokens(written) == expected.split()


@given(st.text())
def test_no_token_is_empty_or_has_a_space_or_the_name_of_a_special_row(written: str) -> None:
    for token in text.tokens(written):
        assert token and not token.isspace() and token not in SPECIAL


def test_the_vocabulary_goes_by_frequency_and_then_by_the_alphabet() -> None:
    ids, vocabulary = text.encode(["b a c c", "c b a d"], ALL[:2], rows=10, length=4)
    assert vocabulary == (*SPECIAL, "c", "a", "b", "d")
    assert ids.tolist() == [[4, 3, 2, 2], [2, 4, 3, 5]]


def test_rare_words_are_unknown_when_the_rows_are_full() -> None:
    ids, vocabulary = text.encode(["b a c c", "c b a d"], ALL[:2], rows=4, length=4)
    assert vocabulary == (*SPECIAL, "c", "a")
    assert ids.tolist() == [[UNKNOWN, 3, 2, 2], [2, UNKNOWN, 3, UNKNOWN]]


def test_only_training_texts_are_counted() -> None:
    ids, vocabulary = text.encode(["test test test only", "some words", "test"], ALL[1:2], rows=10, length=2)
    assert vocabulary == (*SPECIAL, "some", "words")
    assert ids.tolist() == [[UNKNOWN, UNKNOWN], [2, 3], [UNKNOWN, PADDING]]


def test_words_that_are_cut_off_are_counted_all_the_same() -> None:
    _, vocabulary = text.encode(["early early late"], ALL[:1], rows=10, length=1)
    assert vocabulary == (*SPECIAL, "early", "late")


def test_the_end_of_a_long_text_is_kept_and_a_short_one_is_padded_behind() -> None:
    ids, _ = text.encode(["a b c d e", "d e", "!"], ALL[:3], rows=10, length=3)
    # By frequency: d and e twice, then a, b, c.
    assert ids.tolist() == [[6, 2, 3], [2, 3, PADDING], [PADDING] * 3]


def test_no_word_at_all_leaves_the_special_rows() -> None:
    ids, vocabulary = text.encode(["...", ""], ALL[:2], rows=10, length=2)
    assert vocabulary == SPECIAL and not ids.any()


@given(st.lists(st.text(alphabet="ab c'nt<br />"), min_size=1, max_size=6), st.integers(3, 9), st.integers(1, 5))
def test_ids_read_back_are_the_last_tokens_of_each_text(texts: list[str], rows: int, length: int) -> None:
    ids, vocabulary = text.encode(texts, np.arange(len(texts)), rows, length)
    assert ids.shape == (len(texts), length) and len(vocabulary) <= rows and ids.max() < len(vocabulary)
    for written, row in zip(texts, ids, strict=True):
        kept = text.tokens(written)[-length:]
        expected = [word if word in vocabulary else SPECIAL[UNKNOWN] for word in kept]
        assert [vocabulary[number] for number in row] == expected + [SPECIAL[PADDING]] * (length - len(kept))


def test_what_is_made_of_the_same_texts_changes_only_with_the_version() -> None:
    """Encoded data is kept by version: whoever changes this digest must raise `text.VERSION`."""
    texts = ["It's <br />GREAT, isn't it?", "Amélie, 10/10... I'd see it again & again", "the the a of 80's"]
    ids, vocabulary = text.encode(texts, ALL[:2], rows=14, length=7)
    digest = hashlib.sha256(ids.astype("<i4").tobytes() + " ".join(vocabulary).encode()).hexdigest()[:16]
    assert (text.VERSION, digest) == (1, "2d56e041f4c9f870")


def test_one_very_long_word_does_not_make_all_others_as_long() -> None:
    texts = ["a" * 100_000, *(f"word{number} common" for number in range(2000))]
    tracemalloc.start()
    ids, vocabulary = text.encode(texts, np.arange(len(texts)), 10, 4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert vocabulary[2] == "common" and len(vocabulary) == 10 and ids.shape == (2001, 4)
    assert peak < 20_000_000
