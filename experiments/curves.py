"""A transformer and a residual network, trained in every engine from the same weights to the same loss curve.

    python -m experiments.curves        or `make curves`

Each engine that can be used here trains in a separate worker process, on the same batches in the same order, in
float64. The table has the mean loss of each epoch, and how far the losses of all steps are from the first engine's. The
text is generated from a small grammar; the images are MNIST's where they are there, or else the embedded digits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bridge import registry, spec, weights
from bridge.errors import TwinGradError
from bridge.session import Optimizer
from bridge.worker import Worker
from experiments import data
from experiments.formats import fixed, scientific
from experiments.papers import MODELS_DIR

ENGINES = ("numpy", "julia", "torch", "jax", "tensorflow")
OPTIMIZERS = {"char-transformer": Optimizer("adam", 0.003), "digits-resnet": Optimizer("sgd", 0.1, momentum=0.9)}
"""How each of the two networks is trained."""
TOLERANCE = 1e-8
"""By how much the loss of a step may differ between engines, relative to it: rounding errors grow from step to step."""

LETTERS = " .abcdefghijklmnopqrstuvwxyz"
WORDS = (("the", "a", "one", "every"), ("small", "red", "old", "quiet"), ("fox", "boat", "tree", "clock", "river"))
VERBS = ("sees", "follows", "carries", "leaves", "finds")


def text(sentences: int, seed: int = 0) -> str:
    """Sentences such as "the old fox follows a boat." with a blank between them."""
    rng = np.random.default_rng(seed)

    def phrase() -> list[str]:
        determiner, adjective, noun = (str(rng.choice(words)) for words in WORDS)
        return [determiner, noun] if rng.random() < 0.5 else [determiner, adjective, noun]

    return " ".join(" ".join([*phrase(), str(rng.choice(VERBS)), *phrase()]) + "." for _ in range(sentences))


def rows(model: spec.ModelSpec, count: int, seed: int = 0) -> tuple[NDArray[np.generic], NDArray[np.int64]]:
    """Training rows for one of the two networks, and their targets: the next character at each place, or the digit."""
    if model.vocabulary is None:
        found = data.load("mnist", allow_download=False)
        return found.x_train[:count].astype(np.float64), found.y_train[:count]
    length = model.input.sample[0]
    ids = np.array([LETTERS.index(letter) for letter in text(length * count // 20 + 10, seed)], np.int64)
    starts = np.random.default_rng(seed).integers(0, len(ids) - length - 1, count)
    places = starts[:, None] + np.arange(length)
    return ids[places], ids[places + 1]


def curve(name: str, model: spec.ModelSpec, epochs: int, count: int, batch: int, seed: int = 0) -> NDArray[np.float64]:
    """The losses (epochs, steps) of a model in the engine of this name; the seed decides weights and orders."""
    with Worker(name) as worker:
        return trained(worker, model, epochs, count, batch, seed)


def trained(
    worker: Worker, model: spec.ModelSpec, epochs: int, count: int, batch: int, seed: int = 0
) -> NDArray[np.float64]:
    """The same in a process that is there."""
    x, y = rows(model, count, seed)
    orders = [np.random.default_rng([seed, epoch]).permutation(count) for epoch in range(epochs)]
    worker.build(model, weights.initialise(model, seed, "float64"), OPTIMIZERS[model.name], batch, "float64")
    return np.array([worker.train_epoch(x, y, order) for order in orders])


def difference(losses: NDArray[np.float64], reference: NDArray[np.float64]) -> float:
    """The largest difference of two curves at any step, relative to the reference."""
    return float(np.max(np.abs(losses - reference) / np.abs(reference)))


def usable(names: Iterable[str]) -> list[str]:
    """The engines of these names that can be used here."""
    return [name for name in names if registry.availability(name).ok]


def run(names: Sequence[str], epochs: int = 4, count: int = 512, batch: int = 32) -> bool:
    """Train both networks in these engines and print their curves; whether all of them are the same."""
    same = True
    for model in (spec.load(MODELS_DIR / f"{name}.toml") for name in OPTIMIZERS):
        print(f"{model.name}: mean loss of each epoch, and the largest relative difference from {names[0]}")
        reference: NDArray[np.float64] | None = None
        for name in names:
            losses = curve(name, model, epochs, count, batch)
            reference = losses if reference is None else reference
            apart = difference(losses, reference)
            same = same and apart <= TOLERANCE
            means = "".join(f"{fixed(mean, 6):>10}" for mean in losses.mean(1))
            print(f"  {name:<12}{means}{scientific(apart):>12}", flush=True)
    return same


def main(asked: Sequence[str]) -> str | None:
    """Compare the engines that are asked for, or all, as far as they can be used; what is wrong, or None."""
    try:
        names = usable(asked or ENGINES)
        if len(names) < 2:
            return f"two engines are needed to compare, and {' and '.join(names) or 'none'} can be used here"
        return None if run(names) else "the engines' losses differ by more than rounding"
    except TwinGradError as error:
        return f"error: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
