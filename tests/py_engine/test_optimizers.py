"""Optimizers: the same steps as PyTorch's, in place, without allocating, and safe against bad settings."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from py_engine.errors import ConfigurationError, NonFiniteError, ParameterError
from py_engine.network import optimizers
from py_engine.network import threads as threads_module
from py_engine.network.optimizers import OPTIMIZERS, SGD, Adam, AdamW, RMSProp
from py_engine.network.threads import Team

# What we say, and what PyTorch calls it.
SAME_AS_TORCH = [
    (SGD(0.1), "SGD", {"lr": 0.1}),
    (SGD(0.1, weight_decay=0.05), "SGD", {"lr": 0.1, "weight_decay": 0.05}),
    (SGD(0.1, momentum=0.9), "SGD", {"lr": 0.1, "momentum": 0.9}),
    (SGD(0.1, momentum=0.9, nesterov=True), "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (
        SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.05),
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
    ),
    (RMSProp(0.01), "RMSprop", {"lr": 0.01}),
    (RMSProp(0.01, alpha=0.8, eps=1e-3), "RMSprop", {"lr": 0.01, "alpha": 0.8, "eps": 1e-3}),
    (
        RMSProp(0.01, momentum=0.9, weight_decay=0.05),
        "RMSprop",
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.05},
    ),
    (Adam(0.01), "Adam", {"lr": 0.01}),
    (Adam(0.01, betas=(0.8, 0.95), eps=1e-3), "Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3}),
    (Adam(0.01, weight_decay=0.05), "Adam", {"lr": 0.01, "weight_decay": 0.05}),
    (AdamW(0.01), "AdamW", {"lr": 0.01}),
    (AdamW(0.01, weight_decay=0.3), "AdamW", {"lr": 0.01, "weight_decay": 0.3}),
    (AdamW(0.01, weight_decay=0.0), "AdamW", {"lr": 0.01, "weight_decay": 0.0}),
]


def problem(dtype=np.float64, size=37, steps=20):
    """A start and one gradient per step, some of them zero."""
    generator = np.random.default_rng(7)
    gradients = generator.normal(size=(steps, size)) * np.geomspace(1e-4, 10.0, size)
    gradients[:, ::5] = 0.0
    return generator.normal(size=size).astype(dtype), gradients.astype(dtype)


def run(optimizer, start, gradients):
    vector = start.copy()
    optimizer.bind(vector)
    for gradient in gradients:
        optimizer.step(vector, gradient.copy())
    return vector


@pytest.mark.parametrize("block", [8, 1_000_000])
@pytest.mark.parametrize(("ours", "name", "settings"), SAME_AS_TORCH, ids=lambda value: str(value))
def test_twenty_steps_equal_torch(ours, name, settings, block, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(optimizers, "BLOCKS", (block,))
    start, gradients = problem()
    parameter = torch.tensor(start, requires_grad=True)
    theirs = getattr(torch.optim, name)([parameter], **settings)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        theirs.step()
    np.testing.assert_allclose(run(ours, start, gradients), parameter.detach().numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("ours", "name", "settings", "later"),
    [
        (SGD(0.1), "SGD", {"lr": 0.1}, {"momentum": 0.9}),
        (SGD(0.1, 0.9), "SGD", {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.0}),
        (SGD(0.1, 0.9), "SGD", {"lr": 0.1, "momentum": 0.9}, {"nesterov": True, "weight_decay": 0.1}),
        (RMSProp(0.01), "RMSprop", {"lr": 0.01}, {"alpha": 0.8, "eps": 1e-4}),
        (RMSProp(0.01, momentum=0.5), "RMSprop", {"lr": 0.01, "momentum": 0.5}, {"alpha": 0.9, "momentum": 0.8}),
        (Adam(0.01), "Adam", {"lr": 0.01}, {"betas": (0.8, 0.95)}),
        (Adam(0.01, (0.0, 0.9)), "Adam", {"lr": 0.01, "betas": (0.0, 0.9)}, {"betas": (0.95, 0.99), "eps": 1e-3}),
        (AdamW(0.01), "AdamW", {"lr": 0.01, "weight_decay": 0.01}, {"betas": (0.85, 0.999), "weight_decay": 0.2}),
    ],
    ids=str,
)
def test_settings_that_change_between_steps_equal_torch(ours, name, settings, later):
    torch = pytest.importorskip("torch")
    start, gradients = problem()
    parameter = torch.tensor(start, requires_grad=True)
    theirs = getattr(torch.optim, name)([parameter], **settings)
    vector = start.copy()
    ours.bind(vector)
    for step, gradient in enumerate(gradients):
        if step == 8:
            theirs.param_groups[0].update(later)
            for setting, value in later.items():
                setattr(ours, setting, value)
        parameter.grad = torch.tensor(gradient)
        theirs.step()
        ours.step(vector, gradient)
    np.testing.assert_allclose(vector, parameter.detach().numpy(), rtol=1e-12, atol=1e-13)


def test_momentum_that_is_switched_on_collects_from_then_on():
    start, gradients = problem()
    late, vector = RMSProp(0.01), start.copy()
    late.bind(vector)
    for gradient in gradients[:5]:
        late.step(vector, gradient)
    late.momentum = 0.9
    other, copy = RMSProp(0.01, momentum=0.9), vector.copy()
    other.bind(copy)
    other.load_state({**late.state(), "velocity": np.zeros_like(copy)})
    for gradient in gradients[5:]:
        late.step(vector, gradient)
        other.step(copy, gradient)
    np.testing.assert_array_equal(vector, copy)


@pytest.mark.parametrize(
    ("optimizer", "setting", "value"),
    [
        (SGD(), "momentum", 1.0), (RMSProp(), "momentum", -0.1), (RMSProp(), "alpha", "0.9"),
        (Adam(), "betas", 0.9), (Adam(), "betas", (0.9, 1.0)), (AdamW(), "betas", (np.nan, 0.9)),
        (SGD(clip_norm=1), "clip_norm", -1), (SGD(), "clip_value", 0), (SGD(), "weight_decay", np.nan),
        (Adam(), "eps", 0.0), (RMSProp(), "eps", -1.0), (SGD(), "learning_rate", True),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_setting_is_refused_and_the_one_before_stays(optimizer, setting, value):
    before = getattr(optimizer, setting)
    with pytest.raises(ConfigurationError, match=setting):
        setattr(optimizer, setting, value)
    assert getattr(optimizer, setting) == before


@pytest.mark.parametrize("limit", [0.5, 1e6])
@pytest.mark.parametrize("kind", ["clip_norm", "clip_value"])
def test_clipping_equals_torch(kind, limit):
    torch = pytest.importorskip("torch")
    start, gradients = problem()
    parameter = torch.tensor(start, requires_grad=True)
    theirs = torch.optim.Adam([parameter], lr=0.01)
    clip = torch.nn.utils.clip_grad_norm_ if kind == "clip_norm" else torch.nn.utils.clip_grad_value_
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        clip([parameter], limit)
        theirs.step()
    ours = run(Adam(0.01, **{kind: limit}), start, gradients)
    np.testing.assert_allclose(ours, parameter.detach().numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_stays_float32_and_near_float64(name):
    start, gradients = problem()
    exact = run(OPTIMIZERS[name](), start, gradients)
    single = run(OPTIMIZERS[name](), start.astype(np.float32), gradients.astype(np.float32))
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [case[0] for case in SAME_AS_TORCH], ids=str)
def test_zeros_stay_zero(optimizer):
    """The padding of the flat vector must not drift."""
    vector = run(optimizer, np.zeros(16, np.float32), np.zeros((5, 16), np.float32))
    assert not vector.any()


@pytest.mark.parametrize("optimizer", [case[0] for case in SAME_AS_TORCH], ids=str)
def test_a_step_reads_the_gradient_and_allocates_nothing(optimizer):
    vector = np.ones(200_000, np.float32)
    gradient = np.full(200_000, 0.5, np.float32)
    optimizer.bind(vector)
    optimizer.step(vector, gradient)
    tracemalloc.start()
    optimizer.step(vector, gradient)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000
    assert (gradient == 0.5).all()


@pytest.mark.parametrize("optimizer", [case[0] for case in SAME_AS_TORCH], ids=str)
def test_a_run_goes_on_from_its_state(optimizer):
    start, gradients = problem()
    whole = run(optimizer, start, gradients)
    half = run(optimizer, start, gradients[:10])
    state = optimizer.state()
    optimizer.bind(half)
    optimizer.load_state(state)
    for gradient in gradients[10:]:
        optimizer.step(half, gradient)
    np.testing.assert_array_equal(half, whole)


CHANGED = [
    (Adam, "betas", (0.9, 0.999), (0.5, 0.9)),
    (AdamW, "betas", (0.9, 0.999), (0.95, 0.99)),
    (RMSProp, "alpha", 0.99, 0.5),
    (lambda **at: RMSProp(momentum=0.9, **at), "alpha", 0.9, 0.99),
    (lambda **at: SGD(**{"momentum": 0.9, **at}), "momentum", 0.9, 0.5),
    (Adam, "learning_rate", 0.1, 0.01),
    (Adam, "eps", 1e-3, 1e-8),
]


@pytest.mark.parametrize("change", ["constructed", "set before loading", "set after loading"])
@pytest.mark.parametrize(("make", "setting", "before", "after"), CHANGED, ids=[str(row[1:]) for row in CHANGED])
def test_a_state_is_continued_with_other_settings_as_torch_continues_it(torch, make, setting, before, after, change):
    start, gradients = problem()
    first = make(**{setting: before})
    vector = run(first, start, gradients[:10])
    second = make(**{setting: after if change == "constructed" else before})
    second.bind(vector)
    if change == "set before loading":
        setattr(second, setting, after)
    second.load_state(first.state())
    if change == "set after loading":
        setattr(second, setting, after)
    assert getattr(second, setting) == after

    name = {"learning_rate": "lr"}.get(setting, setting)
    parameter = torch.nn.Parameter(torch.tensor(start))
    kind = {
        "Adam": torch.optim.Adam,
        "AdamW": torch.optim.AdamW,
        "RMSProp": torch.optim.RMSprop,
        "SGD": torch.optim.SGD,
    }
    given = {
        key: getattr(first, key) for key in ("weight_decay", "momentum", "eps", "betas", "alpha") if hasattr(first, key)
    }
    theirs = kind[type(first).__name__]([parameter], lr=first.learning_rate, **given)
    for step, gradient in enumerate(gradients):
        if step == 10:
            theirs.param_groups[0][name] = after
        parameter.grad = torch.tensor(gradient)
        theirs.step()
    for gradient in gradients[10:]:
        second.step(vector, gradient)
    np.testing.assert_allclose(vector, parameter.detach().numpy(), rtol=1e-12, atol=1e-13)


def test_a_state_of_an_older_version_is_taken_to_be_of_the_settings_of_now():
    start, gradients = problem()
    optimizer = Adam(betas=(0.8, 0.9))
    half = run(optimizer, start, gradients[:10])
    old = {name: array for name, array in optimizer.state().items() if name != "betas"}
    again, copy = Adam(betas=(0.8, 0.9)), half.copy()
    again.bind(copy)
    again.load_state(old)
    for gradient in gradients[10:]:
        optimizer.step(half, gradient)
        again.step(copy, gradient)
    np.testing.assert_array_equal(copy, half)


@pytest.mark.parametrize("betas", [np.array([0.9, 1.0]), np.array(0.9), np.array(["a", "b"])], ids=str)
def test_settings_of_a_state_that_are_none_are_refused_and_change_nothing(betas):
    start, gradients = problem()
    optimizer = Adam()
    run(optimizer, start, gradients[:3])
    before = optimizer.state()
    with pytest.raises(ParameterError, match=r"Adam\.load_state: Adam: betas"):
        optimizer.load_state({**before, "steps": np.array(7), "betas": betas})
    for name, array in optimizer.state().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("optimizer", [case[0] for case in SAME_AS_TORCH], ids=str)
def test_one_loop_per_tensor_gives_the_same(optimizer):
    start, gradients = problem()
    whole = run(optimizer, start, gradients)
    vector = start.copy()
    optimizer.bind(vector, cuts=[0, 5, 16, 37, 100])
    for gradient in gradients:
        optimizer.step(vector, gradient)
    np.testing.assert_array_equal(vector, whole)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("optimizer", [case[0] for case in SAME_AS_TORCH], ids=str)
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_out_a_large_vector_and_change_nothing(optimizer, threads, dtype, monkeypatch):
    monkeypatch.setattr(optimizers, "SPLIT_FROM", 30)
    monkeypatch.setattr(optimizers, "BLOCKS", (5, 8))
    monkeypatch.setattr(threads_module, "LEAST_SECONDS", 0)
    start, gradients = problem(dtype, size=77)
    whole = run(optimizer, start, gradients)
    team = Team(threads)
    vector = start.copy()
    optimizer.bind(vector, cuts=[0, 16, 40])
    gradient = np.empty_like(vector)
    for g in gradients:
        gradient[...] = g
        optimizer.step(vector, gradient, team)
    np.testing.assert_array_equal(vector, whole)
    assert optimizer._cut_by.decided, "twenty steps have tried one and all threads, and both lengths, three times"
    optimizer.bind(vector)
    optimizer.step(vector, np.zeros_like(vector), team)
    assert [len(tasks) for tasks in optimizer._cut_by.ways] == [threads, threads, 1, 1]
    optimizer.step(vector, gradient)  # without the team again
    assert [len(tasks) for tasks in optimizer._cut_by.ways] == [1, 1]
    team.close()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "optimizer", [SGD(0.1, momentum=0.9), RMSProp(momentum=0.9, alpha=0.9), Adam(), AdamW()], ids=str
)
def test_no_state_stays_below_the_smallest_normal_number(optimizer, dtype):
    """What is trained no more, after gradients of zero for long, takes no longer than what is."""
    vector, gradient = np.ones(5, dtype), np.ones(5, dtype)
    optimizer.bind(vector)
    optimizer.step(vector, gradient)
    gradient[:] = [0, 0, 1, 1e-30, np.finfo(dtype).tiny]
    for _ in range(1024 if dtype is np.float32 else 8192):
        optimizer.step(vector, gradient)
        for name in set(optimizer.state_names) - {"square"}:
            assert not (
                (optimizer._state[name][:2] != 0) & (abs(optimizer._state[name][:2]) < np.finfo(dtype).tiny)
            ).any()
    for name in set(optimizer.state_names) - {"square"}:
        assert not optimizer._state[name][:2].any()
        assert optimizer._state[name][2:4].all()
    assert np.isfinite(vector).all()


@pytest.mark.parametrize("optimizer", [RMSProp(eps=1e-30), Adam(eps=1e-30)], ids=str)
def test_small_state_is_kept_where_a_small_epsilon_makes_it_count(optimizer):
    vector, gradient = np.ones(3, np.float32), np.full(3, 1e-19, np.float32)
    optimizer.bind(vector)
    for _ in range(64):
        optimizer.step(vector, gradient)
    assert all(array.all() for array in optimizer._state.values())


def test_state_is_a_copy():
    start, gradients = problem()
    optimizer = Adam()
    run(optimizer, start, gradients)
    state = optimizer.state()
    state["mean"][:] = 0
    assert optimizer.state()["mean"].any()


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing():
    adam, rmsprop = Adam(), RMSProp()
    start, gradients = problem()
    run(adam, start, gradients)
    run(rmsprop, start, gradients[:3])
    with pytest.raises(ParameterError, match=r"RMSProp\.load_state: expected arrays"):
        rmsprop.load_state(adam.state())
    for change in (
        {"steps": np.array(-1)},
        {"steps": np.array(np.nan)},
        {"square": rmsprop.state()["square"].astype(str)},
    ):
        with pytest.raises(
            ParameterError, match=r"RMSProp\.load_state: expected (whole steps >= 0|real numbers as square)"
        ):
            rmsprop.load_state({**rmsprop.state(), **change})
    assert rmsprop.steps == 3


def test_learning_rate_can_be_changed_between_steps():
    vector, gradient = np.zeros(3), np.ones(3)
    optimizer = SGD(0.1)
    optimizer.bind(vector)
    optimizer.step(vector, gradient)
    optimizer.learning_rate = 0.01
    optimizer.step(vector, gradient)
    np.testing.assert_allclose(vector, -0.11)


def test_a_second_gradient_vector_is_noticed():
    vector = np.zeros(3)
    optimizer = SGD(1.0)
    optimizer.bind(vector)
    optimizer.step(vector, np.ones(3))
    optimizer.step(vector, np.full(3, 10.0))
    np.testing.assert_array_equal(vector, -11.0)


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.float32, 1e20), (np.float32, -3e38), (np.float64, 1e200), (np.float64, -1e300)]
)
@pytest.mark.parametrize("size", [1, 3, 200_000])
def test_a_gradient_whose_squares_are_too_large_is_clipped(dtype, value, size):
    vector, gradient = np.zeros(size, dtype), np.full(size, value, dtype)
    gradient[0] = -value / 2
    expected = -gradient / value / np.linalg.norm(gradient.astype(np.float64) / value) * np.sign(value)
    optimizer = SGD(1.0, clip_norm=1.0)
    optimizer.bind(vector)
    optimizer.step(vector, gradient)
    np.testing.assert_allclose(vector, expected, rtol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_not_applied_when_clipping(bad):
    vector = np.zeros(3)
    optimizer = SGD(0.1, clip_norm=1.0)
    optimizer.bind(vector)
    with pytest.raises(NonFiniteError, match=r"SGD, step 1: the norm of the gradient"):
        optimizer.step(vector, np.array([1.0, bad, 1.0]))
    assert not vector.any() and optimizer.steps == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(-0.1), r"SGD: learning_rate must be a finite number >= 0, actual -0.1"),
        (lambda: SGD(float("nan")), r"learning_rate .* actual nan"),
        (lambda: SGD("0.1"), r"learning_rate .* actual '0.1'"),
        (lambda: SGD(True), r"learning_rate .* actual True"),
        (lambda: SGD(0.1, momentum=1.0), r"momentum must be a finite number >= 0 and < 1, actual 1.0"),
        (lambda: SGD(0.1, nesterov=True), r"nesterov needs a momentum above 0"),
        (lambda: SGD(0.1, weight_decay=-1), r"weight_decay must be .* >= 0"),
        (lambda: SGD(0.1, clip_norm=0), r"clip_norm must be a finite number > 0, actual 0"),
        (lambda: SGD(0.1, clip_value=-1), r"clip_value must be"),
        (lambda: RMSProp(alpha=1), r"RMSProp: alpha must be"),
        (lambda: RMSProp(eps=0), r"eps must be a finite number >= 1e-30"),
        (lambda: Adam(betas=(0.9, 1.0)), r"Adam: betas\[1\] must be"),
        (lambda: Adam(betas=0.9), r"betas must be two numbers, actual 0.9"),
        (lambda: AdamW(eps=-1), r"AdamW: eps must be"),
        (lambda: setattr(SGD(0.1), "learning_rate", -1), r"learning_rate must be"),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_using_it_wrongly_says_what_to_do():
    optimizer = SGD(0.1)
    vector = np.zeros(4)
    with pytest.raises(ConfigurationError, match=r"call bind\(vector\) first"):
        optimizer.step(vector, vector)
    with pytest.raises(ConfigurationError, match=r"call bind\(vector\) first"):
        optimizer.load_state({})
    with pytest.raises(ConfigurationError, match=r"expected one flat float32 or float64 vector, actual shape \(2, 2\)"):
        optimizer.bind(np.zeros((2, 2)))
    optimizer.bind(vector)
    with pytest.raises(ConfigurationError, match=r"expected a gradient of shape \(4,\) and dtype float64"):
        optimizer.step(vector, np.zeros(4, np.float32))


def test_repr_shows_the_settings():
    assert repr(SGD(0.015, momentum=0.9)) == (
        "SGD(learning_rate=0.015, momentum=0.9, nesterov=False, weight_decay=0.0)"
    )


def test_a_clipped_norm_does_not_depend_on_the_threads_of_blas(rng):
    """OpenBLAS adds up a long vector of float64 in as many parts as it has threads."""
    gradient = rng.standard_normal(50_001)
    found = []
    for threads in (1, 2):
        with threadpool_limits(threads, user_api="blas"):
            vector = np.zeros_like(gradient)
            optimizer = SGD(1.0, clip_norm=0.1)
            optimizer.bind(vector)
            optimizer.step(vector, gradient.copy())
            found.append(vector)
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(np.linalg.norm(found[0]), 0.1, rtol=1e-5)
