"""Losses: the same values and gradients as PyTorch's, and targets that are checked before they are used."""

from __future__ import annotations

import numpy as np
import pytest

import py_engine as pe
from py_engine.ad import ops
from py_engine.ad.gradcheck import gradcheck
from py_engine.ad.operators import tensor
from py_engine.ad.tensor import Tensor
from py_engine.errors import ConfigurationError, LabelError
from py_engine.network.losses import LOSSES, check_targets, get

GENERATOR = np.random.default_rng(3)
CASES = [
    ("softmax_cross_entropy", GENERATOR.normal(size=(6, 4)) * 5, GENERATOR.integers(4, size=6)),
    ("softmax_cross_entropy", GENERATOR.normal(size=(6, 3, 4)), GENERATOR.integers(4, size=(6, 3))),
    ("binary_cross_entropy", GENERATOR.normal(size=(6, 1)) * 5, GENERATOR.integers(2, size=6)),
    ("binary_cross_entropy", GENERATOR.normal(size=(6,)), GENERATOR.random(6)),
    ("binary_cross_entropy", GENERATOR.normal(size=(6, 3)), GENERATOR.integers(2, size=(6, 3))),
    ("mean_squared_error", GENERATOR.normal(size=(6, 3)), GENERATOR.normal(size=(6, 3))),
    ("mean_squared_error", GENERATOR.normal(size=(6, 1)), GENERATOR.normal(size=6)),
]
IDS = [f"{name}-{outputs.shape}" for name, outputs, _ in CASES]


@pytest.mark.parametrize(("name", "outputs", "targets"), CASES, ids=IDS)
def test_losses_equal_torch(name, outputs, targets):
    torch = pytest.importorskip("torch")
    prepared = check_targets(name, outputs.shape, targets, np.float64)
    ours = tensor(outputs, requires_grad=True)
    loss = LOSSES[name](ours, Tensor(prepared))
    loss.backward()
    theirs = torch.tensor(outputs, requires_grad=True)
    if name == "softmax_cross_entropy":
        classes = outputs.shape[-1]
        expected = torch.nn.functional.cross_entropy(theirs.reshape(-1, classes), torch.tensor(targets).reshape(-1))
    else:
        functional = {
            "binary_cross_entropy": torch.nn.functional.binary_cross_entropy_with_logits,
            "mean_squared_error": torch.nn.functional.mse_loss,
        }[name]
        expected = functional(theirs, torch.tensor(targets, dtype=torch.float64).reshape(outputs.shape))
    expected.backward()
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(ours.grad, theirs.grad.numpy(), rtol=1e-10, atol=1e-12)


WEIGHTED = [
    {"class_weights": [0.5, 2, 1, 0]},
    {"ignored_class": -1},
    {"ignored_class": 2, "label_smoothing": 0.3},
    {"label_smoothing": 1},
    {"class_weights": (0.5, 2, 1, 0), "ignored_class": 1, "label_smoothing": 0.1},
]


@pytest.mark.parametrize("settings", WEIGHTED, ids=lambda settings: " ".join(settings))
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)])
def test_losses_with_settings_equal_torch(shape, settings):
    torch = pytest.importorskip("torch")
    outputs, targets = GENERATOR.normal(size=shape), GENERATOR.integers(4, size=shape[:-1])
    loss = get("softmax_cross_entropy", **settings)
    if loss.ignored_class is not None:
        targets[::2] = loss.ignored_class
    prepared = check_targets(loss, shape, targets, np.float64)
    ours, theirs = tensor(outputs, requires_grad=True), torch.tensor(outputs, requires_grad=True)
    value = loss(ours, Tensor(prepared))
    value.backward()
    weights = torch.tensor(settings["class_weights"], dtype=torch.float64) if "class_weights" in settings else None
    expected = torch.nn.functional.cross_entropy(
        theirs.reshape(-1, 4),
        torch.tensor(targets).reshape(-1),
        weights,
        ignore_index=settings.get("ignored_class", -100),
        label_smoothing=settings.get("label_smoothing", 0.0),
    )
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(ours.grad, theirs.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_a_weight_of_positives_equals_torchs():
    torch = pytest.importorskip("torch")
    outputs, targets = GENERATOR.normal(size=(6, 3)), GENERATOR.random((6, 3))
    ours, theirs = tensor(outputs, requires_grad=True), torch.tensor(outputs, requires_grad=True)
    value = get("binary_cross_entropy", positive_weight=2.5)(ours, Tensor(targets))
    value.backward()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        theirs, torch.tensor(targets), pos_weight=torch.tensor(2.5, dtype=torch.float64)
    )
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(ours.grad, theirs.grad.numpy(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mean_squared_error", {"class_weights": [1, 2]}, "there is no setting 'class_weights'; there are: none"),
        ("softmax_cross_entropy", {"positive_weight": 2}, "there is no setting 'positive_weight'; there are: class_w"),
        ("softmax_cross_entropy", {"class_weights": [1, -2]}, r"class_weights must be finite .* actual \[1, -2\]"),
        ("softmax_cross_entropy", {"class_weights": [0, 0.0]}, "not all of them 0"),
        ("softmax_cross_entropy", {"class_weights": {0: 1.0, 1: 2.0}}, "in the order of the classes"),
        ("softmax_cross_entropy", {"class_weights": {1.0, 2.0}}, "in the order of the classes"),
        ("softmax_cross_entropy", {"class_weights": 3}, "class_weights must be finite numbers"),
        ("softmax_cross_entropy", {"label_smoothing": 1.5}, "label_smoothing must be a number from 0 to 1, actual 1.5"),
        ("softmax_cross_entropy", {"ignored_class": 0.5}, "ignored_class must be a whole number, actual 0.5"),
        ("binary_cross_entropy", {"positive_weight": 0}, "positive_weight must be a finite number > 0, actual 0"),
    ],
)
def test_settings_that_a_loss_does_not_take_are_named(name, settings, message):
    with pytest.raises(ConfigurationError, match=f"^{name}: .*{message}"):
        get(name, **settings)


def test_labels_are_classes_or_ignored():
    loss = get("softmax_cross_entropy", ignored_class=-1, class_weights=[1, 2])
    with pytest.raises(LabelError, match=r"from 0 to 1 .*, or -1, which is ignored, actual 2 in row 1; 1 of 3 are out"):
        check_targets(loss, (3, 2), np.array([-1, 2, 0]))
    with pytest.raises(ConfigurationError, match="expected class_weights for 3 classes, which the model has, actual 2"):
        check_targets(loss, (3, 3), np.array([-1, 2, 0]))


@pytest.mark.parametrize(("name", "outputs", "targets"), CASES, ids=IDS)
def test_gradients(name, outputs, targets):
    prepared = check_targets(name, outputs.shape, targets, np.float64)
    gradcheck(lambda x: LOSSES[name](x, Tensor(prepared)), outputs)


@pytest.mark.parametrize(("name", "outputs", "targets"), CASES, ids=IDS)
def test_a_batch_is_the_weighted_mean_of_its_shards(name, outputs, targets):
    prepared = check_targets(name, outputs.shape, targets, np.float64)
    loss = LOSSES[name]
    whole = loss(tensor(outputs), Tensor(prepared)).item()
    shards = [loss(tensor(outputs[part]), Tensor(prepared[part])).item() for part in (slice(0, 4), slice(4, 6))]
    assert whole == pytest.approx((4 * shards[0] + 2 * shards[1]) / 6, rel=1e-12)


@pytest.mark.parametrize("name", ["softmax_cross_entropy", "binary_cross_entropy"])
def test_logits_of_any_size_give_finite_losses(name):
    outputs = np.array([[1e4, -1e4], [-3e38, 3e38]], np.float32)
    targets = [1, 0] if name == "softmax_cross_entropy" else [[0, 1], [0, 1]]
    x = tensor(outputs, requires_grad=True)
    with np.errstate(over="ignore"):  # of the smaller logits' exponentials, whose limit is 0
        loss = LOSSES[name](x, Tensor(check_targets(name, outputs.shape, targets)))
        loss.backward()
    assert loss.item() > 1e3
    assert np.isfinite(x.grad).all()


def test_targets_that_fit_are_not_copied():
    labels = np.zeros(5, np.int64)
    assert check_targets("softmax_cross_entropy", (5, 3), labels) is labels
    values = np.zeros((5, 3), np.float32)
    assert check_targets("mean_squared_error", (5, 3), values) is values


def test_targets_get_the_shape_and_dtype_that_the_loss_takes():
    labels = check_targets("softmax_cross_entropy", (3, 2), [0, 1, 1])
    assert labels.dtype == np.int64
    binary = check_targets("binary_cross_entropy", (3, 1), np.array([True, False, True]))
    assert binary.shape == (3, 1) and binary.dtype == np.float32
    assert check_targets("softmax_cross_entropy", (0, 2), np.zeros(0, np.uint8)).shape == (0,)


@pytest.mark.parametrize(
    ("name", "outputs_shape", "targets", "message"),
    [
        (
            "softmax_cross_entropy",
            (4, 10),
            np.array([0, 9, 10, -1]),
            r"expected labels from 0 to 9 \(the model has 10 outputs\), actual 10 in row 2; 2 of 4 are out of range",
        ),
        ("softmax_cross_entropy", (2, 2, 3), np.array([[0, 1], [2, -5]]), r"actual -5 in row 1 at \[1\]"),
        ("softmax_cross_entropy", (2, 3), np.array([0.0, 1.0]), r"expected integer labels, actual dtype float64"),
        ("softmax_cross_entropy", (2, 3), np.array(["0", "1"]), r"expected integer labels, actual dtype <U1"),
        ("softmax_cross_entropy", (2, 3), np.zeros(3, int), r"targets of shape \(2,\), actual \(3,\)"),
        ("softmax_cross_entropy", (2, 3), np.eye(3)[:2].astype(int), r"of shape \(2,\), actual \(2, 3\)"),
        ("binary_cross_entropy", (3, 1), np.array([0, 1, 2]), r"from 0 to 1, actual 2\.0 in row 2 .*1 of 3"),
        ("binary_cross_entropy", (2, 1), np.array([0.5, np.nan]), r"finite targets, actual nan in row 1"),
        ("binary_cross_entropy", (2, 3), np.array([0, 1]), r"of shape \(2, 3\), actual \(2,\)"),
        ("mean_squared_error", (2, 1), np.array([[1.0, 2.0]]), r"of shape \(2, 1\), actual \(1, 2\)"),
        ("mean_squared_error", (2,), np.array([1.0, np.inf]), r"finite targets, actual inf in row 1"),
        ("mean_squared_error", (2,), np.array([1j, 0]), r"expected real numbers"),
    ],
)
def test_bad_targets_are_named(name, outputs_shape, targets, message):
    with pytest.raises(LabelError, match=message):
        check_targets(name, outputs_shape, targets)


def test_one_class_is_refused():
    with pytest.raises(ConfigurationError, match=r"expected a model with 2 outputs or more, .* actual 1; for a single"):
        check_targets("softmax_cross_entropy", (3, 1), np.zeros(3, int))


def test_an_unknown_loss_is_named():
    with pytest.raises(ConfigurationError, match=r"unknown loss \['hinge'\]; there are: softmax_cross_entropy, "):
        get(["hinge"])
    with pytest.raises(ConfigurationError, match="unknown loss 'hinge'; there are: softmax_cross_entropy, "):
        get("hinge")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("loss", "targets", "settings"),
    [
        (ops.softmax_cross_entropy, np.zeros(0, int), {}),
        (ops.softmax_cross_entropy, np.zeros(0, int), {"weight": np.ones(3)}),
        (ops.softmax_cross_entropy, np.zeros(0, int), {"label_smoothing": 0.1}),
        (ops.softmax_cross_entropy, np.zeros(0, int), {"ignored": 1}),
        (ops.binary_cross_entropy, np.zeros((0, 3)), {}),
        (ops.binary_cross_entropy, np.zeros((0, 3)), {"positive_weight": 2.0}),
        (ops.mean_squared_error, np.zeros((0, 3)), {}),
    ],
)
def test_the_mean_loss_of_no_rows_is_nan_as_torchs(loss, targets, settings, reduction):
    def of(x):
        return loss(x, targets, reduction=reduction, **settings)

    empty, expected = np.zeros((0, 3)), np.nan if reduction == "mean" else 0.0
    np.testing.assert_equal(of(tensor(empty)).item(), expected)
    np.testing.assert_equal(float(pe.compile(of)(empty)), expected)
    for gradient in (pe.grad(of), pe.compile(pe.grad(of))):
        assert gradient(empty).shape == (0, 3)
    for samples in (pe.vmap(of), pe.compile(pe.vmap(of))):
        np.testing.assert_array_equal(samples(np.zeros((2, 0, 3))), [expected, expected])
