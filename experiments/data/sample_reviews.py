"""The embedded sample of reviews: generated texts and random word vectors, when the real ones cannot be had.

**The generator.** Words are made of syllables, so that nobody takes them for English. There are 1,500 neutral ones
(used as often as Zipf's law has it: the k-th in proportion to 1/k), 16 that praise and 16 that scold. A review is
negative or positive with equal chances, and 30 to 200 words long (uniformly). Of its words one in six bears
sentiment: with a chance of 0.75 that of the review, otherwise the other one. Of these, 15 in 100 are put as the
opposite word after "not", so that pairs of words count and not only single ones. The seed is fixed; everything
follows from it. (A torch run of `imdb-cnn` had test accuracies of 0.54, 0.63, 0.79, 0.89 and 0.91 in its 5 epochs.)

The vectors are normal(0, 0.4), about as far spread as GloVe's, and mean nothing.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from experiments.data import text
from experiments.data.dataset import SAMPLE_LABEL, Dataset, array_digest, combined_digest

TRAIN_ROWS, TEST_ROWS = 4000, 1000
SEED = 20240302
NEUTRAL, BEARING = 1500, 16
LENGTHS = (30, 200)
SENTIMENT, AGREES, NEGATED = 1 / 6, 0.75, 0.15
VECTOR_SPREAD = 0.4


def reviews(name: str, instead_of: str, reason: str, rows: int, length: int, dimension: int | None) -> Dataset:
    """Generated reviews: the stand-in for the dataset `name`, whose title is `instead_of`.

    `rows` is that of the vocabulary, `length` the ids of a review, `dimension` that of the vectors (None: without
    them), `reason` why the real data could not be had, for the notice.
    """
    texts, labels = generate(TRAIN_ROWS + TEST_ROWS)
    ids, vocabulary = text.encode(texts, np.arange(TRAIN_ROWS), rows, length)
    x, y = ids.astype(np.int64), labels.copy()
    pretrained = {}
    if dimension is not None:
        generator = np.random.Generator(np.random.PCG64(SEED + 1))
        vectors = generator.normal(0.0, VECTOR_SPREAD, (rows, dimension)).astype(np.float32)
        vectors[text.PADDING] = 0
        pretrained["glove"] = vectors
    return Dataset(
        name=name,
        source="sample",
        x_train=x[:TRAIN_ROWS],
        y_train=y[:TRAIN_ROWS],
        x_test=x[TRAIN_ROWS:],
        y_test=y[TRAIN_ROWS:],
        digest=combined_digest((key, array_digest(array)) for key, array in ({"x": x, "y": y} | pretrained).items()),
        origin=f"{SAMPLE_LABEL}: generated reviews" + (" and random word vectors" if pretrained else ""),
        instead_of=instead_of,
        notice=(
            f"{SAMPLE_LABEL[0].upper()}{SAMPLE_LABEL[1:]}, not {instead_of}: {TRAIN_ROWS:,} training and "
            f"{TEST_ROWS:,} test reviews of made-up words"
            + (", with random word vectors" if pretrained else "")
            + f", because {reason}. For real results, put {instead_of} in a folder and name it with --data-dir or "
            "TWINGRAD_DATA."
        ),
        vocabulary=vocabulary,
        pretrained=pretrained,
        examples=texts[:4],
    )


@functools.lru_cache(1)
def generate(count: int) -> tuple[tuple[str, ...], np.ndarray]:
    """That many texts, and their labels (count,), int64: 0 for a negative review, 1 for a positive one.

    Made once in a process, in about a second; several studies ask for them.
    """
    generator = np.random.Generator(np.random.PCG64(SEED))
    words = _words(NEUTRAL + 2 * BEARING, generator)
    bearing, neutral = words[: 2 * BEARING].reshape(2, BEARING), words[2 * BEARING :]
    frequency = 1 / np.arange(1, NEUTRAL + 1)
    frequency /= frequency.sum()
    labels = generator.integers(0, 2, count)
    texts = []
    for label in labels:
        size = int(generator.integers(LENGTHS[0], LENGTHS[1], endpoint=True))
        chosen = neutral[generator.choice(NEUTRAL, size, p=frequency)].tolist()
        for place in np.flatnonzero(generator.random(size) < SENTIMENT):
            agrees, negated = generator.random() < AGREES, generator.random() < NEGATED
            kind = label ^ (not agrees) ^ negated
            word = bearing[kind, generator.integers(BEARING)]
            chosen[place] = f"not {word}" if negated else word
        texts.append(" ".join(chosen) + ".")
    labels.flags.writeable = False  # the caller who asks next gets the same array
    return tuple(texts), labels


def _words(count: int, generator: np.random.Generator) -> np.ndarray:
    """Different made-up words of two and three syllables, in random order."""
    syllables = [consonant + vowel for consonant in "bdfgklmprstvz" for vowel in "aeiou"]
    two = ["".join(pair) for pair in itertools.product(syllables, repeat=2)]
    three = ["".join(parts) for parts in itertools.product(syllables[::5], syllables[::3], syllables[::4])]
    every = np.array(sorted(set(two + three)))
    return generator.permutation(every)[:count]
