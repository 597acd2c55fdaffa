"""What makes products fast: a large one before the first that matters, sharing by threads, and parts of few columns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine.ad.compile import products
from py_engine.ad.memory import segments
from py_engine.ad.ops import product_parts
from py_engine.ad.state import entering
from py_engine.ad.techniques import Techniques
from py_engine.network import GRU, LSTM, SGD, Chain, Conv2D, Dense, Flatten, Trainer, steps

LARGE = np.ones((128, 128))
"""Its product with itself has 2**22 operations."""


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, int]]]:
    """The dtypes of the large products that are run, each with its thread, in a process that has run none."""
    found: list[tuple[Any, int]] = []
    run = products.touch_buffers

    def noted(dtype: Any) -> None:
        run(dtype)
        found.append((np.dtype(dtype), threading.get_ident()))

    monkeypatch.setattr(products, "_touched", set())
    for module in (products, steps):
        monkeypatch.setattr(module, "touch_buffers", noted)
    yield found


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_once_for_each_dtype_before_a_product_that_is_worth_it(dtype: Any, touched: list[tuple[Any, int]]) -> None:
    """The second function with such a product finds it done."""
    a = LARGE.astype(dtype)
    for f in (lambda x: pe.ops.sum(x @ x), lambda x: pe.ops.mean(x @ x)):
        np.testing.assert_allclose(pe.compile(f)(a), f(pe.Tensor(a)).numpy(), rtol=1e-6)
    assert [found for found, _ in touched] == [np.dtype(dtype)]


def test_none_where_there_is_no_large_product(touched: list[tuple[Any, int]]) -> None:
    """Small ones, and functions without any, start at once."""
    a = LARGE[:8, :8]
    pe.compile(lambda x: pe.ops.sum(x @ x))(a)
    pe.compile(lambda x: pe.ops.sum(pe.ops.sin(x)))(LARGE)
    assert not touched


def test_in_each_thread_of_a_split_batch(touched: list[tuple[Any, int]]) -> None:
    """OpenBLAS keeps a buffer for each product that is computed at the same time."""
    rng = np.random.default_rng(0)
    x, y = rng.random((64, 128), np.float32), rng.integers(0, 10, 64)
    chain = Chain(Dense(128, 512, name="wide"), Dense(512, 10, name="output"), dtype=np.float32)
    trainer = Trainer(chain, batch_size=64, threads=2, techniques=pe.Techniques(split_batch=True))
    trainer.train_epoch(x, y)
    trainer.close()
    in_threads = [thread for dtype, thread in touched if dtype == np.float32]
    assert len(set(in_threads)) == 2


def test_the_product_is_larger_than_the_blocks_of_kernels() -> None:
    """Rows of the output beyond 768 numbers are cut into blocks, and sums of more than 640 products."""
    assert products.COLUMNS > 768
    assert products.LENGTH > 640
    assert products.ROWS >= 32  # two groups of columns as kernels of OpenBLAS, which see the transpose, have them


def wide(dtype: Any = np.float32, units: int = 1024, techniques: pe.Techniques = pe.Techniques()) -> Trainer:  # noqa: B008
    """A trainer of a network whose products take most of the operations, for batches of 16."""
    chain = Chain(Dense(512, units, "relu", name="wide"), Dense(units, 10, name="output"), dtype=dtype)
    return Trainer(chain, batch_size=16, threads=2, techniques=techniques)


@pytest.fixture(scope="module")
def batch() -> tuple[Any, Any]:
    """Samples and labels."""
    rng = np.random.default_rng(0)
    return rng.random((40, 512)), rng.integers(0, 10, 40)


@pytest.mark.parametrize("samples", [1, 16, 40])
def test_shared_products_give_the_gradients_of_whole_ones(samples: int, batch: tuple[Any, Any]) -> None:
    """Each thread of two computes rows or columns of the results, a partial batch's, too."""
    x, y = batch[0][:samples], batch[1][:samples]
    found = []
    for split in ("auto", False):
        trainer = wide(np.float64, techniques=pe.Techniques(split_batch=split))
        losses = trainer.train_epoch(x, y)
        found.append((losses, trainer.loss_and_gradients(x, y), trainer.parameters.as_dict()))
        calls = [call for tape in trainer.tapes for step in tape.steps for call in step.calls]
        assert any(is_shared_out(call, trainer) for call in calls) == (split == "auto")
        trainer.close()
    (losses, (loss, gradients), trained), (losses_, (loss_, gradients_), trained_) = found
    np.testing.assert_allclose(losses, losses_, rtol=1e-12)
    assert loss == pytest.approx(loss_, rel=1e-12)
    for name in gradients:
        np.testing.assert_allclose(gradients[name], gradients_[name], rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(trained[name], trained_[name], rtol=1e-9, atol=1e-15)


def is_shared_out(call: Any, trainer: Trainer) -> bool:
    """Whether a call of a tape hands its parts to the trainer's threads."""
    return getattr(call, "func", None) == getattr(trainer._threads, "run", 0)


def test_two_runs_with_shared_products_give_the_same_bits(batch: tuple[Any, Any]) -> None:
    """Which thread computes what follows from the shapes."""
    found = []
    for _ in range(2):
        trainer = wide()
        found.append(trainer.train_epoch(batch[0].astype(np.float32), batch[1]))
        trainer.close()
    np.testing.assert_array_equal(*found)


def test_small_products_are_left_to_blas(batch: tuple[Any, Any]) -> None:
    """Handing them to threads would take longer than they do."""
    trainer = wide(units=64)
    trainer.train_epoch(batch[0].astype(np.float32), batch[1])
    calls = [call for tape in trainer.tapes for step in tape.steps for call in step.calls]
    assert not any(is_shared_out(call, trainer) for call in calls)
    trainer.close()


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda a: a,
    "columns": lambda a: np.asfortranarray(a),
    "part": lambda a: np.tile(a, 2)[:, : a.shape[1]],
}


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(3, 5, 200), (200, 5, 3), (64, 1, 40), (1, 300, 90), (90, 300, 1), (33, 17, 65)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_a_product_make_the_whole(layout: str, shape: tuple[int, int, int], threads: int) -> None:
    """Whatever its sides, the order of its operands in memory and the number of threads."""
    rng = np.random.default_rng(0)
    m, k, n = shape
    a, b = (LAYOUTS[layout](rng.random(sides)) for sides in ((m, k), (k, n)))
    out = np.full((m, n), np.nan)

    def run(calls: Any) -> None:
        assert 1 <= len(calls) <= threads
        for call in calls:
            call()

    products.shared(partial(np.matmul, a, b, out), run, threads)()
    np.testing.assert_allclose(out, a @ b, rtol=1e-12)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 100, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_segments_cover_all_elements_once(length: int, count: int) -> None:
    """And begin where a cache line may."""
    found = segments(length, count)
    assert 1 <= len(found) <= count
    assert [k for part in found for k in range(length)[part]] == list(range(length))
    assert all(part.start % 16 == 0 for part in found)


def test_a_small_network_starts_no_threads(batch: tuple[Any, Any]) -> None:
    """They would have nothing to do."""
    trainer = wide(units=8)
    trainer.train_epoch(batch[0].astype(np.float32), batch[1])
    assert trainer._threads is None
    trainer.close()


# In parts -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["with copies", "without copies"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A BLAS that has kernels that multiply small matrices as they lie, or has none, whatever this machine's has."""
    monkeypatch.setattr(product_parts, "_multiplies_without_copies", lambda: request.param)
    monkeypatch.setattr(product_parts, "_cores", lambda: 2)
    return bool(request.param)


def lying(x: Any, by_columns: bool) -> Any:
    """The matrix, with its columns or its rows in one piece."""
    return np.ascontiguousarray(x.T).T if by_columns else np.ascontiguousarray(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 31, 32, 33])
@pytest.mark.parametrize(
    ("summed", "columns"),
    [(31, 4096), (32, 4096), (32, 40), (64, 128), (300, 520), (512, 2048), (1024, 127), (1000, 300)],
)
def test_products_of_few_rows_in_parts_are_the_whole_ones(
    kernels: bool, rng: np.random.Generator, dtype: Any, by_columns: bool, rows: int, summed: int, columns: int
) -> None:
    a, b = rng.standard_normal((rows, summed)).astype(dtype), rng.standard_normal((summed, columns)).astype(dtype)
    b = lying(b, by_columns)
    beside = np.full((rows, columns + 5), np.nan, dtype)
    for out in (np.full((rows, columns), np.nan, dtype), beside[:, 2:-3]):
        left, right, result = product_parts.in_columns(a, b, out)
        apart = right.ndim == 3
        small = rows * summed * columns <= product_parts.SMALL and (
            not by_columns or rows * columns <= product_parts.SMALL_TRANSPOSED
        )
        assert apart <= (kernels and 1 < rows <= 32 and summed >= 32 and not small and columns != 127)
        if kernels and 2 <= rows <= 16 and (summed, columns) == (512, 2048):
            assert apart
        assert right is b or (np.shares_memory(right, b) and np.shares_memory(result, out))
        if apart:
            assert right.shape[0] * right.shape[2] == columns
            assert rows * summed * right.shape[2] <= product_parts.SMALL
            assert not by_columns or rows * right.shape[2] <= product_parts.SMALL_TRANSPOSED
        np.matmul(left, right, result)
        tolerance = 1e-3 if dtype is np.float32 else 1e-11
        np.testing.assert_allclose(out, a.astype(float) @ b.astype(float), rtol=tolerance, atol=tolerance)
    assert np.isnan(beside[:, :2]).all() and np.isnan(beside[:, -3:]).all()


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize(("rows", "summed", "columns"), [(16, 512, 640), (3, 700, 600), (32, 256, 512)])
def test_products_of_few_rows_are_the_same_eagerly_and_compiled(
    kernels: bool, rng: np.random.Generator, by_columns: bool, rows: int, summed: int, columns: int
) -> None:
    a, b = rng.standard_normal((rows, summed)), rng.standard_normal((summed, columns))
    w = b.T.copy() if by_columns else b

    def product(a: Any, w: Any) -> Any:
        return a @ (w.T if by_columns else w)

    def loss(a: Any, w: Any) -> Any:
        return np.sum(np.tanh(product(a, w) / 10))

    np.testing.assert_array_equal(pe.compile(product)(a, w), product(pe.tensor(a), pe.tensor(w)).numpy())
    np.testing.assert_allclose(pe.compile(product)(a, w), a @ b, rtol=1e-9, atol=1e-9)
    slope = (1 - np.tanh(a @ b / 10) ** 2) / 10
    by_w = a.T @ slope
    for found in (pe.grad(loss, (0, 1))(a, w), pe.compile(pe.grad(loss, (0, 1)))(a, w)):
        np.testing.assert_allclose(found[0], slope @ b.T, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found[1], by_w.T if by_columns else by_w, rtol=1e-9, atol=1e-9)


def test_what_does_not_lie_as_kernels_read_it_is_multiplied_whole(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(product_parts, "_multiplies_without_copies", lambda: True)
    monkeypatch.setattr(product_parts, "_cores", lambda: 2)
    a, b, out = rng.random((16, 512)), rng.random((512, 1024)), np.empty((16, 1024))
    assert product_parts.in_columns(a, b, out)[1].ndim == 3
    every_other = np.empty((16, 2048))[:, ::2]
    large = np.broadcast_to(b[:1], b.shape)  # as many bytes as it has elements, whatever the memory
    integers = (a.astype(int), b.astype(int), out.astype(int))
    for given in (
        (lying(a, True), b, out),
        (a, b[::-1], lying(out, True)),
        (a, b, every_other),
        (a[None], b, out[None]),
        (a, np.repeat(b, 2, axis=1)[:, ::2], out),
        integers,
    ):
        assert product_parts.in_columns(*given)[1] is given[1]
    assert large.strides[1] == large.itemsize and product_parts.in_columns(a, large, out)[2].ndim == 3
    whole = np.empty((2048, 1025))[:, :1024]  # in memory of over MOST_BYTES
    assert product_parts.in_columns(rng.random((4, 2048)), whole, np.empty((4, 1024)))[1] is whole
    by_columns = np.empty((1024, 2048)).T
    assert product_parts.in_columns(rng.random((4, 2048)), by_columns, np.empty((4, 1024)))[1].ndim == 3


def test_a_product_in_parts_is_shared_out_to_threads(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Each thread has some of the columns, and computes these in parts."""
    monkeypatch.setattr(product_parts, "_multiplies_without_copies", lambda: True)
    monkeypatch.setattr(product_parts, "_cores", lambda: 2)
    a, b, out = rng.random((16, 512)), rng.random((512, 1024)), np.empty((16, 1024))
    whole = partial(product_parts.multiply_in_columns, a, b, out)
    assert products.is_product(whole) and products.worth_sharing(whole)
    for threads in (1, 2, 3, 40):
        out[...] = np.nan
        done: list[Any] = []
        products.shared(whole, lambda calls, done=done: done.extend(call() for call in calls), threads)()  # type: ignore[misc]
        assert len(done) == threads
        np.testing.assert_allclose(out, a @ b, rtol=1e-12)
    stack = partial(np.matmul, rng.random((512, 512)), rng.random((2, 2, 512, 64)), np.empty((2, 2, 512, 64)))
    assert not products.worth_sharing(stack)


def test_arguments_of_products_in_parts_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled function copies neither a large matrix in nor a large result out."""
    monkeypatch.setattr(product_parts, "_multiplies_without_copies", lambda: True)
    monkeypatch.setattr(product_parts, "_cores", lambda: 2)
    read: list[Any] = []
    plain = product_parts.in_columns

    def noted(a: Any, b: Any, out: Any) -> Any:
        read.append((a, b, out))
        return plain(a, b, out)

    product = pe.compile(lambda a, b: a @ b)
    monkeypatch.setattr(product_parts, "in_columns", noted)
    for number in range(3):
        a, b = np.full((16, 512), 1.0 + number), np.ones((512, 1024))
        result = product(a, b)
        np.testing.assert_array_equal(result, np.full((16, 1024), 512 * (1.0 + number)))
        assert read[-1][0] is a and read[-1][1] is b
        assert np.shares_memory(read[-1][2], result)


def test_products_are_left_whole_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """By the threads of BLAS, where there are many cores, and those of a matrix by its own transpose."""
    monkeypatch.setattr(product_parts, "_multiplies_without_copies", lambda: True)
    monkeypatch.setattr(product_parts, "_cores", lambda: 2)
    a, out = rng.random((32, 2000)), np.empty((32, 32))
    assert product_parts.in_columns(a, a.T, out)[2] is out
    assert product_parts.in_columns(a, a.copy().T, out)[2].ndim == 3
    x = pe.tensor(a)
    np.testing.assert_array_equal((x @ x.T).numpy(), a @ a.T)
    b, out = rng.random((2000, 256)), np.empty((4, 256))
    assert product_parts.in_columns(a[:4], b, out)[2].ndim == 3
    monkeypatch.setattr(product_parts, "_cores", lambda: 64)
    assert product_parts.in_columns(a[:4], b, out)[2] is out
    small = rng.random((100, 400)).T, np.empty((32, 100))
    assert product_parts.in_columns(a[:, :400], *small)[2] is small[1]
    small = rng.random((64, 400)).T, np.empty((32, 64))  # which BLAS's threads do not share
    assert product_parts.in_columns(a[:, :400], *small)[2].ndim == 3


@pytest.mark.parametrize("layer", [LSTM, GRU])
@pytest.mark.parametrize(("last", "length"), [(True, 3), (False, 2), (True, 1)])
def test_recurrences_with_products_in_parts_are_those_without(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, layer: Any, last: bool, length: int
) -> None:
    """Where the kernels are not there, and where the technique is off."""
    found: list[Any] = []
    x, y = rng.standard_normal((24, length, 8)), rng.integers(0, 3, 24)
    monkeypatch.setattr(product_parts, "_cores", lambda: 2)
    for kernels, on in ((True, True), (False, True), (True, False)):
        monkeypatch.setattr(product_parts, "_multiplies_without_copies", lambda kernels=kernels: kernels)
        head = [] if last else [Flatten()]
        chain = Chain(
            layer(8, 128, returns="last" if last else "sequence"),
            *head,
            Dense(128 if last else 128 * length, 3),
            dtype=np.float64,
        )
        how = Techniques(product_parts=on)
        trainer = Trainer(chain, batch_size=24, threads=1, optimizer=SGD(0.1), techniques=how)
        losses = [trainer.train_epoch(x, y) for _ in range(3)]
        calls = [call for step in trainer.tapes[0].steps for call in step.calls if products.is_product(call)]
        in_columns = any(call.args[2].ndim == 3 or call.func is product_parts.multiply_in_columns for call in calls)
        assert in_columns == (kernels and on and length > 1)
        found.append((losses, trainer.loss_and_gradients(x, y)[1]))
        trainer.close()
    for losses, gradients in found[1:]:
        np.testing.assert_allclose(losses, found[0][0], rtol=1e-12)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(gradient, found[0][1][name], rtol=1e-9, atol=1e-14)
    for one, other in zip(found[1][1].values(), found[2][1].values(), strict=True):
        assert (one == other).all()  # both as a BLAS without the kernels has them


@pytest.mark.parametrize(
    ("layer", "units", "samples"), [(LSTM, 512, 16), (LSTM, 256, 16), (GRU, 256, 16), (LSTM, 64, 16), (LSTM, 64, 64)]
)
def test_recurrences_whose_products_are_in_parts_are_split_where_these_take_most_time(
    kernels: bool, rng: np.random.Generator, layer: Any, units: int, samples: int
) -> None:
    trainer = Trainer(Chain(layer(64, units), Dense(units, 3)), batch_size=samples, threads=2)
    trainer.train_epoch(rng.standard_normal((samples, 20, 64)).astype(np.float32), rng.integers(0, 3, samples))
    assert len(trainer.tapes) == (2 if kernels and units > 64 else 1)
    trainer.close()


# In tiles -------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is bound is bound for a BLAS with one thread, and with kernels that multiply small matrices as they lie."""
    monkeypatch.setattr(product_parts, "_multiplies_without_copies", lambda: True)
    monkeypatch.setattr(product_parts, "_cores", lambda: 64)
    with entering(one_blas_thread=True):
        yield


LIES = {"rows, rows": (False, False), "rows, columns": (False, True), "columns, rows": (True, False)}
SHAPES = [
    (64, 256, 256),
    (128, 48, 640),
    (288, 256, 64),
    (784, 16, 320),
    (100, 500, 60),
    (97, 211, 251),
    (512, 800, 64),
]
IN_TILES = {
    "rows, rows": {*SHAPES} - {(97, 211, 251)},
    "rows, columns": {(64, 256, 256), (288, 256, 64), (100, 500, 60), (512, 800, 64)},
    "columns, rows": {(128, 48, 640), (784, 16, 320)},
}
"""Those of them that are computed in tiles, in float32."""
STACKS = {
    "matrices": ((), ()),
    "one by a stack": ((), (3,)),
    "a stack by one": ((2, 1), (1, 2)),
    "stacks": ((2,), (2,)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("stacked", STACKS)
@pytest.mark.parametrize(
    "shape",
    [(64, 256, 256), (128, 48, 640), (288, 256, 64), (784, 16, 320), (100, 500, 60), (97, 211, 251), (512, 800, 64)],
)
def test_products_in_tiles_are_the_whole_ones(
    one_thread: None, rng: np.random.Generator, dtype: Any, lies: str, stacked: str, shape: tuple[int, int, int]
) -> None:
    """Whatever is not finite stays in its row and column, each part is one that the kernels multiply as it lies, and a
    result may lie in the rows of a larger one."""
    rows, summed, columns = shape
    a, b = (
        rng.standard_normal((*stack, *((n, m) if is_transposed else (m, n)))).astype(dtype)
        for stack, (m, n), is_transposed in zip(
            STACKS[stacked], ((rows, summed), (summed, columns)), LIES[lies], strict=True
        )
    )
    a.reshape(-1)[:1], b.reshape(-1)[-1:] = np.inf, np.nan
    a, b = (x.swapaxes(-1, -2) if is_transposed else x for x, is_transposed in zip((a, b), LIES[lies], strict=True))
    with np.errstate(invalid="ignore"):
        expected = np.matmul(a, b)
    wide = np.full((*expected.shape[:-1], columns + 3), 7.0, dtype)
    out = wide[..., :columns]
    of_a, of_b, of_out = product_parts.in_tiles(a, b, out)
    call = product_parts.bind_product(a, b, out)
    assert dtype == np.float64 or (of_out is not out) == (shape in IN_TILES[lies])
    if of_out is not out:
        (height, summed), width = of_a.shape[-2:], of_b.shape[-1]
        assert height * summed * width <= product_parts.SMALL
        assert not LIES[lies][1] or (height * width <= product_parts.SMALL_TRANSPOSED and summed >= 32)
        assert np.shares_memory(of_out, out) and np.shares_memory(of_a, a) and np.shares_memory(of_b, b)
        assert (call.func is product_parts.multiply_in_tiles) == (out.ndim == 2)
    with np.errstate(invalid="ignore"):
        call()
    tolerance = 1e-12 if dtype == np.float64 else 2e-4
    np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    assert (wide[..., columns:] == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("columns", [1, 3, product_parts.LONG_ROW - 1, product_parts.LONG_ROW, 2000])
@pytest.mark.parametrize("lies", ["in one piece", "columns", "reversed"])
def test_the_product_of_a_column_and_a_row_is_exact_whatever_its_length(
    rng: np.random.Generator, dtype: Any, rows: int, columns: int, lies: str
) -> None:
    a, b = ((100 * rng.standard_normal(shape)).astype(dtype) for shape in ((rows, 1), (1, columns)))
    if lies == "columns":
        a, b = np.asfortranarray(np.repeat(a, 2, 1))[:, :1], np.asfortranarray(np.repeat(b, 2, 0))[:1]
    elif lies == "reversed":
        a, b = a[::-1], b[:, ::-1]
    if dtype != np.int64:
        a[0], b[0, 0] = np.inf, 0
    with np.errstate(invalid="ignore"):
        expected = a * b
        function = pe.compile(lambda a, b: a @ b)
        for found in ((pe.tensor(a) @ pe.tensor(b)).numpy(), *(np.asarray(function(a, b)) for _ in range(2))):
            np.testing.assert_array_equal(found, expected)
            assert found.dtype == dtype


def test_parts_of_a_shared_product_of_a_column_and_a_row_are_rows(rng: np.random.Generator) -> None:
    a, b, out = rng.standard_normal((96, 1)), rng.standard_normal((1, 600)), np.zeros((96, 600))
    ran: list[Any] = []
    products.shared(partial(product_parts.multiply_column_by_row, a, b, out), ran.extend, 3)()
    assert [call.args[2].shape for call in ran] == [(32, 600)] * 3 and not out.any()
    for call in ran:
        call()
    np.testing.assert_array_equal(out, a * b)


def test_what_needs_no_copies_is_computed_so(one_thread: None, rng: np.random.Generator) -> None:
    """Small or in tiles, with one sample and with several; of convolutions of every size."""
    found = 0
    for _ in range(500):
        rows, summed, columns = (int(2 ** rng.uniform(3, 9)) for _ in range(3))
        by_transposed = bool(rng.integers(2))
        if not product_parts.needs_no_copies(rows, summed, columns, 4, by_transposed=by_transposed):
            continue
        found += 1
        a = np.empty((1, rows, summed), np.float32)
        b = np.empty((2, 1, *((columns, summed) if by_transposed else (summed, columns))), np.float32)
        of_a, of_b, _ = product_parts.in_tiles(
            a, b.swapaxes(-1, -2) if by_transposed else b, np.empty((2, 1, rows, columns), np.float32)
        )
        assert of_a.shape[-2] * summed * of_b.shape[-1] <= product_parts.SMALL
        assert not by_transposed or of_a.shape[-2] * of_b.shape[-1] <= product_parts.SMALL_TRANSPOSED
    assert found > 50


def test_sizes_of_every_kind_have_a_tile_that_divides_them(one_thread: None, rng: np.random.Generator) -> None:
    found = 0
    for _ in range(3000):
        rows, summed, columns = (int(2 ** rng.uniform(0, 12)) for _ in range(3))
        size, is_transposed, by_transposed = int(rng.choice([4, 8])), bool(rng.integers(2)), bool(rng.integers(2))
        of_a = (size, rows * size) if is_transposed else (summed * size, size)
        of_b = (size, summed * size) if by_transposed else (columns * size, size)
        height, width = product_parts._tile(rows, summed, columns, of_a, of_b, size)
        assert (height > 0) == (width > 0)
        if height:
            found += 1
            assert rows % height == 0 and columns % width == 0 and height * summed * width <= product_parts.SMALL
            assert width >= 8 and height >= 8 and rows * summed * columns > product_parts.SMALL / 8
    assert found > 50


def test_what_is_not_multiplied_in_tiles(one_thread: None, rng: np.random.Generator) -> None:
    """What does not lie as kernels read it, is no float, is small, or is a matrix by its own transpose."""
    a, b, out = rng.random((64, 512)), rng.random((512, 256)), np.zeros((64, 256))
    assert product_parts.in_tiles(a, b, out)[2] is not out
    integers = (a.astype(int), b.astype(int), out.astype(int))
    for given in (
        (a[:, ::-1], b, out),
        (a, np.repeat(b, 2, axis=1)[:, ::2], out),
        (a, b, np.empty((256, 64)).T),
        (a, b, np.empty((64, 512))[:, ::2]),
        (np.broadcast_to(a[:1], a.shape), b, out),
        (a[:8, :64], b[:64], out[:8]),
        integers,
    ):
        assert product_parts.in_tiles(*given)[2] is given[2]
        assert product_parts.bind_product(*given).func is np.matmul
    square = rng.random((256, 300))
    assert product_parts.in_tiles(square, square.T, np.empty((256, 256)))[1].ndim == 2
    assert product_parts.in_tiles(square, square.copy().T, np.empty((256, 256)))[1].ndim > 2
    with entering(techniques=Techniques(product_parts=False)):
        assert product_parts.bind_product(a, b, out).func is np.matmul
        assert not product_parts.needs_no_copies(64, 512, 256, 8)
    with entering(one_blas_thread=False):
        assert product_parts.bind_product(a, b, out).func is np.matmul
        assert not product_parts.needs_no_copies(64, 512, 256, 8)
    assert product_parts.needs_no_copies(64, 512, 256, 8) and product_parts.needs_no_copies(8, 8, 64, 8)
    assert not product_parts.needs_no_copies(8, 8, 8, 8)  # too few columns to be multiplied by themselves


def in_tiles(trainer: Trainer) -> int:
    """How many calls of the steps are products in tiles, those that threads share out included."""
    calls = [call for tape in trainer.tapes for step in tape.steps for call in step.calls]
    calls += [part for call in calls if is_shared_out(call, trainer) for part in call.args[0]]
    found = (call for call in calls if products.is_product(call))
    return sum(call.func is product_parts.multiply_in_tiles or call.args[2].ndim > 4 for call in found)


NETWORKS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "dense": (lambda: [Dense(512, 1024, "relu"), Dense(1024, 4)], (512,)),
    "convolutions": (
        lambda: [
            Conv2D(3, 32, 3, padding=1, activation="relu"),
            Conv2D(32, 64, 3, padding=1, activation="relu"),
            Conv2D(64, 32, 3, stride=2, padding=1),
            Flatten(),
            Dense(32 * 8 * 8, 4),
        ],
        (3, 16, 16),
    ),
    "grouped": (
        lambda: [Conv2D(4, 64, 3, padding=1), Conv2D(64, 64, 5, padding=2, groups=2), Flatten(), Dense(64 * 64, 4)],
        (4, 8, 8),
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_with_products_in_tiles_is_that_without(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, network: str, threads: int
) -> None:
    """With one thread, in a split batch, and where threads share products; the same bits in every run."""
    monkeypatch.setattr(product_parts, "_multiplies_without_copies", lambda: True)
    make, shape = NETWORKS[network]
    x, y = rng.standard_normal((40, *shape)), rng.integers(0, 4, 40)
    found = []
    for on in (True, True, False):
        chain = Chain(*make(), dtype=np.float64, seed=1)
        how = Techniques(product_parts=on, split_batch="auto" if network == "dense" else True)
        trainer = Trainer(chain, batch_size=40, threads=threads, optimizer=SGD(0.01), techniques=how)
        losses = [trainer.train_epoch(x, y) for _ in range(2)]
        assert bool(in_tiles(trainer)) == on
        found.append((losses, *trainer.parameters.as_dict().values()))
        trainer.close()
    for one, again, without in zip(*found, strict=True):
        np.testing.assert_array_equal(one, again)
        np.testing.assert_allclose(one, without, rtol=1e-9, atol=1e-12)


def test_where_blas_has_threads_there_are_no_tiles(monkeypatch: pytest.MonkeyPatch, batch: tuple[Any, Any]) -> None:
    """Its threads would not share them; so with what is evaluated, or called."""
    monkeypatch.setattr(product_parts, "_multiplies_without_copies", lambda: True)
    for threads, how in ((2, "2 threads in BLAS"), (1, "one thread")):
        chain = Chain(Dense(512, 1024, "relu"), Dense(1024, 10))
        trainer = Trainer(chain, batch_size=40, threads=threads, techniques=Techniques(split_batch=False))
        trainer.train_epoch(batch[0].astype(np.float32), batch[1])
        assert trainer.threads_in_step() == how and bool(in_tiles(trainer)) == (threads == 1)
        trainer.close()
    a, b = np.ones((64, 512)), np.ones((512, 512))
    monkeypatch.setattr(product_parts, "in_tiles", lambda *_: pytest.fail("in tiles"))
    np.testing.assert_array_equal(pe.compile(lambda a, b: a @ b)(a, b), a @ b)
    np.testing.assert_array_equal((pe.tensor(a) @ b).numpy(), a @ b)
