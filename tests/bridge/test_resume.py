"""Learning rates that change are the same in every engine; a resumed training is an undisturbed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bridge import registry, schedule
from bridge.adapters import julia as adapter
from bridge.schedule import Schedule
from bridge.session import Optimizer, Resumable, Scheduling
from bridge.spec import ModelSpec
from py_engine.errors import ConfigurationError, NonFiniteError, ParameterError, ShapeError

Made = Callable[..., Any]
RESUMABLE = [name for name, row in registry.ENGINES.items() if row.resumable]
ROWS, BATCH = 47, 10
STEPS = 5

OPTIMIZERS = [
    Optimizer("sgd", 0.1, momentum=0.9, weight_decay=0.01, clip_norm=0.5),
    Optimizer("rmsprop", 0.01, momentum=0.5),
    Optimizer("adam", 0.01, weight_decay=0.1),
    Optimizer("adamw", 0.01),
    Optimizer("sgd", 0.1),
]
SCHEDULES = [
    Schedule("constant", warmup=7),
    Schedule("step", every=1, factor=0.5),
    Schedule("cosine"),
    Schedule("cosine", warmup=4),
    Schedule("step", every=2, warmup=3),
]


def test_the_learning_rates_are_those_of_torchs_schedulers() -> None:
    torch = pytest.importorskip("torch")
    schedulers = torch.optim.lr_scheduler

    def rates(make: Callable[[Any], Any], every: int = 1) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.5)
        scheduler, found = make(optimizer), []
        for step in range(1, 41):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if step % every == 0:
                scheduler.step()
        return found

    def warm(optimizer: Any) -> Any:
        return schedulers.LinearLR(optimizer, 1 / 8, 1, 7)

    def warm_cosine(optimizer: Any) -> Any:
        after = schedulers.CosineAnnealingLR(optimizer, 32)
        return schedulers.SequentialLR(optimizer, [warm(optimizer), after], [8])

    cases = [
        (Schedule(), lambda o: schedulers.ConstantLR(o, 1.0), 1),
        (Schedule(warmup=8), warm, 1),
        (Schedule("step", every=2, factor=0.3), lambda o: schedulers.StepLR(o, 2, 0.3), 10),
        (Schedule("cosine"), lambda o: schedulers.CosineAnnealingLR(o, 40), 1),
        (Schedule("cosine", warmup=8), warm_cosine, 1),
    ]
    for ours, theirs, every in cases:
        np.testing.assert_allclose(ours.rates(0.5, 0, 40, 10, 40), rates(theirs, every), rtol=1e-6, err_msg=str(ours))
        parts = np.concatenate([ours.rates(0.5, first, 8, 10, 40) for first in range(0, 40, 8)])
        np.testing.assert_array_equal(parts, ours.rates(0.5, 0, 40, 10, 40))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "cosin"}, "no schedule 'cosin'; schedules: constant, step, cosine"),
        ({"warmup": -1}, "warmup must be at least 0"),
        ({"every": 0}, "every at least 1"),
        ({"factor": 0.0}, "factor must be above 0"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Schedule(**settings)
    assert schedule.SCHEDULES == ("constant", "step", "cosine")


@pytest.fixture
def network(model: Made) -> ModelSpec:
    found: ModelSpec = model([6], {"op": "dense", "units": 8}, {"op": "batch_norm"}, {"op": "dense", "units": 3})
    return found


@pytest.fixture
def noisy(model: Made) -> ModelSpec:
    layers = [{"op": "dense", "units": 8}, {"op": "batch_norm"}, {"op": "dropout", "rate": 0.4}]
    found: ModelSpec = model([6], *layers, {"op": "dense", "units": 3})
    return found


@pytest.mark.parametrize(
    ("name", "optimizer", "plan"),
    [
        *(("numpy", *case) for case in zip(OPTIMIZERS, SCHEDULES, strict=True)),
        ("julia", OPTIMIZERS[0], SCHEDULES[3]),
        ("julia", OPTIMIZERS[2], SCHEDULES[4]),
    ],
)
def test_schedules_train_as_torch_does(
    name: str,
    plan: Schedule,
    optimizer: Optimizer,
    network: ModelSpec,
    session_of: Made,
    random_params: Made,
    random_data: Made,
    rng: np.random.Generator,
) -> None:
    params, (x, y) = random_params(network, "float64"), random_data(network, ROWS, "float64")
    orders = [rng.permutation(ROWS) for _ in range(3)]
    found = []
    for one in (name, "torch"):
        session = session_of(one, network, params, optimizer, BATCH, "float64")
        losses = [
            session.train_steps(
                x, y, order, plan.rates(optimizer.learning_rate, STEPS * epoch, STEPS, STEPS, 3 * STEPS)
            )
            for epoch, order in enumerate(orders)
        ]
        found.append({"losses": np.concatenate(losses), **session.params()})
    for key, expected in found[1].items():
        np.testing.assert_allclose(found[0][key], expected, rtol=1e-8, atol=1e-10, err_msg=key)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        *(("numpy", optimizer) for optimizer in OPTIMIZERS),
        *(("torch", optimizer) for optimizer in OPTIMIZERS),
        *(("julia", optimizer) for optimizer in (OPTIMIZERS[0], OPTIMIZERS[2])),  # it compiles the trainer of each
    ],
)
def test_a_resumed_session_goes_on_bit_for_bit(
    name: str,
    optimizer: Optimizer,
    noisy: ModelSpec,
    session_of: Made,
    random_params: Made,
    random_data: Made,
    rng: np.random.Generator,
) -> None:
    check_resumed(name, optimizer, noisy, session_of, random_params(noisy), random_data(noisy, ROWS), rng)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_session_of_images_goes_on_bit_for_bit(
    optimizer: Optimizer,
    model: Made,
    session_of: Made,
    random_params: Made,
    random_data: Made,
    rng: np.random.Generator,
) -> None:
    """PyTorch's weights of images have their channels last in memory, and so have the optimizer's arrays."""
    layers = [{"op": "conv2d", "filters": 3, "kernel": 2}, {"op": "flatten"}, {"op": "dense", "units": 3}]
    images = model([2, 4, 4], *layers)
    check_resumed("torch", optimizer, images, session_of, random_params(images), random_data(images, ROWS), rng)


def check_resumed(
    name: str,
    optimizer: Optimizer,
    spec: ModelSpec,
    session_of: Made,
    params: Any,
    data: Any,
    rng: np.random.Generator,
) -> None:
    """Fail unless a training that is resumed after two epochs of four is one that is not interrupted."""
    x, y = data
    orders = [rng.permutation(ROWS) for _ in range(4)]
    whole = session_of(name, spec, params, optimizer, BATCH)
    losses = [whole.train_epoch(x, y, order) for order in orders]
    expected = whole.params()
    first = session_of(name, spec, params, optimizer, BATCH)
    begun = [first.train_epoch(x, y, order) for order in orders[:2]]
    middle, state = first.params(), first.state()
    second = session_of(name, spec, middle, optimizer, BATCH)
    second.load_state(state)
    np.testing.assert_array_equal([*begun, *(second.train_epoch(x, y, order) for order in orders[2:])], losses)
    for key, array in second.params().items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)


def test_a_state_of_something_else_is_refused(
    network: ModelSpec, noisy: ModelSpec, session_of: Made, random_params: Made, random_data: Made
) -> None:
    for name in ("numpy", "julia", "torch"):
        adam = session_of(name, noisy, random_params(noisy), Optimizer("adam", 0.1), BATCH)
        adam.train_epoch(*random_data(noisy, ROWS), np.arange(ROWS))
        state = adam.state()
        sgd = session_of(name, network, random_params(network), Optimizer("sgd", 0.1), BATCH)
        with pytest.raises(ParameterError):
            sgd.load_state({})
        with pytest.raises(ParameterError):
            sgd.load_state(state)
        if name == "torch":
            larger = session_of(name, network, random_params(network), Optimizer("adam", 0.1), BATCH)
            for wrong in (
                {"0.exp_avg": np.zeros((9, 9), np.float32)},
                {"0.exp_avg": state["0.exp_avg"].astype(np.float64)},
                {"0.other": np.zeros(2, np.float32)},
                {"random": np.zeros(3, np.uint8)},
            ):
                with pytest.raises(ParameterError, match="does not fit"):
                    larger.load_state(state | wrong)
            plain = {key: array for key, array in state.items() if key in ("random", "steps")}
            with pytest.raises(ParameterError, match="keeps no arrays"):
                larger.load_state(plain)
            larger.load_state(plain | {"steps": np.array(0)})  # of a session that has not trained


def test_a_state_of_another_rule_that_keeps_as_many_arrays_is_refused(
    network: ModelSpec, session_of: Made, random_params: Made, random_data: Made
) -> None:
    rules = {
        1: [Optimizer("sgd", 0.1, momentum=0.9), Optimizer("rmsprop", 0.1)],
        2: [Optimizer("adam", 0.1), Optimizer("rmsprop", 0.1, momentum=0.9)],
    }
    x, y = random_data(network, ROWS)
    for name in ("numpy", "julia", "torch"):
        for one, other in (pair for rule in rules.values() for pair in (rule, rule[::-1])):
            first = session_of(name, network, random_params(network), one, BATCH)
            first.train_epoch(x, y, np.arange(ROWS))
            state = first.state()
            second = session_of(name, network, random_params(network), other, BATCH)
            before = second.params()
            with pytest.raises(ParameterError):
                second.load_state(state)
            for key, array in second.params().items():
                np.testing.assert_array_equal(array, before[key])
    julia = session_of("julia", network, random_params(network), rules[2][0], BATCH)
    older = {key: array for key, array in julia.state().items() if key != "rule"}
    julia.load_state(older)


def test_the_number_of_rates_is_checked(
    network: ModelSpec, session_of: Made, random_params: Made, random_data: Made
) -> None:
    for name in ("numpy", "julia", "torch"):
        session = session_of(name, network, random_params(network), Optimizer("sgd", 0.1), BATCH)
        with pytest.raises(ShapeError, match="a learning rate for each of 5 steps"):
            session.train_steps(*random_data(network, ROWS), np.arange(ROWS), np.ones(4))
        before = session.params()
        for wrong in (np.nan, -1.0, np.inf):
            with pytest.raises(ConfigurationError, match=r"learning rates? must be"):
                session.train_steps(*random_data(network, ROWS), np.arange(ROWS), np.array([0.1, 0.1, 0.1, 0.1, wrong]))
        for key, array in session.params().items():
            np.testing.assert_array_equal(array, before[key], err_msg="nothing was trained")


def test_a_loss_that_is_none_and_batches_that_can_be_none_are_named_by_their_place_in_the_epoch(
    network: ModelSpec, session_of: Made, random_params: Made, random_data: Made
) -> None:
    x, y = random_data(network, ROWS)
    for name in ("numpy", "torch"):
        session = session_of(name, network, random_params(network), Optimizer("sgd", 0.1), BATCH)
        before = session.params()
        with pytest.raises(ConfigurationError, match="21 rows in batches of 10 leave a batch of 1"):
            session.train_steps(x, y, np.arange(21), np.ones(3))  # of batch normalisation
        for key, array in session.params().items():
            np.testing.assert_array_equal(array, before[key], err_msg="nothing was trained")
    wrong = x.copy()
    wrong[35] = np.nan
    with pytest.raises(NonFiniteError, match=r"step 4 of 5 in its epoch"):
        session.train_steps(wrong, y, np.arange(ROWS), np.ones(5))


def test_the_registry_says_which_engines_can(
    network: ModelSpec, session_of: Made, random_params: Made, random_data: Made
) -> None:
    assert RESUMABLE == ["numpy", "julia", "torch", "torch-compile"]
    session = session_of("numpy", network, random_params(network), Optimizer("sgd", 0.1), BATCH)
    assert isinstance(session, Scheduling) and isinstance(session, Resumable)
    jax = session_of("jax", network, random_params(network), Optimizer("sgd", 0.1), BATCH)
    with pytest.raises(ConfigurationError, match=r"engine jax: its learning rate cannot change .* numpy, julia, torch"):
        jax.state()
    with pytest.raises(ConfigurationError, match="engine jax"):
        jax.train_steps(*random_data(network, ROWS), np.arange(ROWS), np.ones(STEPS))


def test_of_the_engines_in_files_of_julia_only_our_own_is_resumable() -> None:
    from bridge.adapters.julia import EntrySession, JuliaSession
    from bridge.adapters.julia_package import PackageSession

    assert issubclass(JuliaSession, EntrySession) and hasattr(JuliaSession, "state")
    assert issubclass(PackageSession, EntrySession) and not hasattr(PackageSession, "state")


@pytest.mark.parametrize("header", [[5, 1, -1], [5, 1]], ids=["this version", "an older one"])
def test_a_process_that_was_not_there_has_no_random_streams(header: list[int]) -> None:
    streams = [2, 7, -1, 0, 3, -1, 8, 9]  # of three layers, each after their count
    rows = np.array([[len(header) + 8, *header, *streams], [len(header) + 8, *header, *streams[::-1]]], np.int64)
    assert adapter._own_numbers(rows, 1).tolist() == [*header, *streams[::-1]]
    assert adapter._own_numbers(rows, 2).tolist() == [*header, 0, 0, 0]
    assert adapter._own_numbers(np.array(header), 1).tolist() == header
