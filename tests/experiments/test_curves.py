"""The transformer and the residual network: the same losses in every engine, from the same weights and batch order."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from bridge import registry, spec
from bridge.worker import Worker
from experiments import curves

MODELS = sorted(curves.OPTIMIZERS)
CAMPAIGN = os.environ.get("TWINGRAD_TEST_PROFILE") == "campaign"
ENGINES = [name for name in curves.ENGINES if name != "numpy"] if CAMPAIGN else ["julia", "torch"]
"""A campaign trains in all engines; the others' layers are compared one by one in test_parity and test_references."""


@pytest.fixture(scope="module")
def few_steps() -> Iterator[Callable[[str, str], np.ndarray]]:
    """The losses of a few steps of an engine, each of which has one process for all models."""
    with contextlib.ExitStack() as stack:
        start = functools.cache(lambda name: stack.enter_context(Worker(name)))

        def losses(name: str, model: str) -> np.ndarray:
            described = spec.load(curves.MODELS_DIR / f"{model}.toml")
            return curves.trained(start(name), described, epochs=2, count=48, batch=16)

        yield losses


@pytest.fixture(scope="module")
def reference(few_steps: Callable[[str, str], np.ndarray]) -> dict[str, np.ndarray]:
    """The numpy engine's losses."""
    return {name: few_steps("numpy", name) for name in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_falls(reference: dict[str, np.ndarray], model: str) -> None:
    losses = reference[model]
    assert losses.shape == (2, 3) and losses[1].mean() < losses[0].mean()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.campaign
@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_has_the_same_losses(
    reference: dict[str, np.ndarray],
    few_steps: Callable[[str, str], np.ndarray],
    name: str,
    model: str,
    request: pytest.FixtureRequest,
) -> None:
    if name == "julia":
        request.getfixturevalue("julia")
    elif not (found := registry.availability(name)).ok:
        pytest.skip(found.reason)
    assert curves.difference(few_steps(name, model), reference[model]) < curves.TOLERANCE


def test_one_engine_alone_is_compared_with_nothing() -> None:
    assert curves.main(["numpy"]) == "two engines are needed to compare, and numpy can be used here"
    assert (curves.main(["numpi", "torch"]) or "").startswith("error: ")


def test_the_text_is_of_known_letters_and_the_targets_are_the_next_ones() -> None:
    model = spec.load(curves.MODELS_DIR / "char-transformer.toml")
    x, y = curves.rows(model, 20)
    assert model.vocabulary == len(curves.LETTERS)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    assert set(curves.text(50)) <= set(curves.LETTERS)


def test_the_table_names_the_engines_and_tells_curves_that_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter([np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)) * 1.1])
    monkeypatch.setattr(curves, "curve", lambda *given: next(made))
    assert not curves.run(["numpy", "torch"])
    said = capsys.readouterr().out
    assert said.count("numpy    ") == 2 and "1.0·10⁻¹" in said and "digits-resnet: mean loss" in said
