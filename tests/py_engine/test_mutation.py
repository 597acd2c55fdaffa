"""Arrays that are written to in place while a gradient still needs them: any write is found before it does harm."""

from __future__ import annotations

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad import mutation
from py_engine.ad.mutation import COPIED, SMALL
from py_engine.errors import InPlaceError


def test_the_error_names_op_layer_tensor_and_input():
    w = np.array([1.0, 2.0])
    x = pe.tensor([3.0, 4.0], requires_grad=True)
    weight = Tensor(w, name="weight")
    with pe.scope("dense"):
        y = x * weight
    w += 1
    expected = r"gradient of 'mul' in layer 'dense' needs its input 1 \(weight, shape \(2,\) float64\) as it was"
    with pytest.raises(InPlaceError, match=expected):
        y.sum().backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.__iadd__(1),
        lambda a: a.__setitem__(..., 0),
        lambda a: a.__setitem__((1, 1), 7.0),
        lambda a: a[1:].fill(3.0),
        lambda a: a.T.sort(),
        lambda a: np.negative(a, out=a),
    ],
    ids=["+=", "[...] =", "one element", "through a view", "sort", "out="],
)
def test_any_way_to_write_is_found(write):
    w = np.arange(6.0).reshape(3, 2)[::-1].copy()
    x = pe.tensor(np.ones((3, 2)), requires_grad=True)
    y = np.sum(x * w)
    write(w)
    with pytest.raises(InPlaceError, match="'mul'"):
        y.backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.reshape(2, 3),
        lambda x: x[::2],
        lambda x: np.broadcast_to(x, (3, 6)),
        lambda x: x.reshape(2, 3)[1:].T,
        lambda x: pe.grad(lambda z: np.sum(z**3))(x),
    ],
    ids=["reshape", "slice", "broadcast", "several", "inner variable"],
)
def test_a_write_is_found_where_the_gradient_reads_a_view_of_what_was_given(view):
    x = np.arange(6.0)
    _, pullback = pe.vjp(lambda x: np.sum(np.sin(view(x))), x)
    x += 1
    with pytest.raises(InPlaceError):
        pullback(1.0)


SIZES = [1, 100, 255, 257, 10_000, 1_000_003]
"""Elements: of arrays that each op keeps a copy of, of those that share one, and beyond what caches hold."""

VIEWS = {
    "itself": lambda a: a.reshape(-1),
    "reversed": lambda a: a[::-1],
    "transposed": lambda a: a.reshape(-1, 1).T[0],
    "every second": lambda a: a[1::2] if a.size > 1 else a,
    "diagonal": lambda a: a[: int(a.size**0.5) ** 2].reshape(int(a.size**0.5), -1).ravel()[:: int(a.size**0.5) + 1],
    "another dtype": lambda a: a.view(np.int64),
    "bytes": lambda a: np.frombuffer(memoryview(a).cast("B"), np.uint8),
    "as_strided": lambda a: np.lib.stride_tricks.as_strided(a, (a.size,), a.strides),
}

READERS = {
    "mul": lambda x, w: np.sum(x * w),
    "div": lambda x, w: np.sum((x + 2) / w),
    "where": lambda x, w: np.sum(np.where(x > 5, x, x * w)),
    "dot": lambda x, w: x @ w,
    "einsum": lambda x, w: np.einsum("i,i->", x, w),
    "a view of it": lambda x, w: np.sum(x[::-1] * w.reshape(1, -1)[0, ::-1]),
    "checkpoint": lambda x, w: pe.checkpoint(lambda x: np.sum(np.sin(x * w)))(x),
    "scan": lambda x, w: pe.scan(lambda c, _: (c * w, None), x, length=2)[0].sum(),
    "custom rule": lambda x, w: np.sum(pe.custom_rule(lambda x, w: x * w, vjp=lambda g, y, x, w: (g * w, None))(x, w)),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("size", SIZES[:-1])
def test_a_write_to_any_element_is_found_at_every_size_by_every_op(read, size, rng):
    w = rng.standard_normal(size)
    _, pullback = pe.vjp(lambda x: READERS[read](x, w), np.ones(size))
    pullback(1.0)
    for place in {0, size - 1, *rng.integers(0, size, 3).tolist()}:
        kept = w[place]
        w[place] = np.nextafter(kept, np.inf)  # the least that a write can change
        with pytest.raises(InPlaceError, match=r"as it was, but the array was written to"):
            pullback(1.0)
        w[place] = kept
    pullback(1.0)  # all is as it was


def test_an_op_that_reads_nothing_of_one_input_reads_each_of_several(rng):
    pe.grad(lambda x: np.sum(np.einsum("ij->ji", x)))(np.ones((2, 3)))
    w = rng.standard_normal(3)
    _, pullback = pe.vjp(lambda x: np.einsum("i,i->", x, w), np.ones(3))
    w[1] += 1
    with pytest.raises(InPlaceError, match="as it was, but the array was written to"):
        pullback(1.0)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("size", SIZES)
def test_a_write_through_any_view_is_found(view, size, rng):
    w = rng.standard_normal(size)
    _, pullback = pe.vjp(lambda x: np.sum(x * w), np.ones(size))
    seen = VIEWS[view](w)
    seen[rng.integers(seen.size)] += 1
    with pytest.raises(InPlaceError):
        pullback(1.0)


PERMUTED = {
    "swap": lambda a, i, j: a.__setitem__([i, j], a[[j, i]]),
    "sort": lambda a, i, j: a.sort(),
    "shuffle": lambda a, i, j: np.random.default_rng(1).shuffle(a),
    "reverse": lambda a, i, j: a.__setitem__(slice(None), a[::-1].copy()),
    "negate": lambda a, i, j: np.negative(a, out=a),
    "negate two": lambda a, i, j: a.__setitem__([i, j], -a[[i, j]]),
    "double": lambda a, i, j: np.multiply(a, 2, out=a),
    "zero": lambda a, i, j: a.fill(0),
    "truncate": lambda a, i, j: a.view(f"i{a.itemsize}").__iand__(-2),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("write", PERMUTED)
@pytest.mark.parametrize("limit", [COPIED, 0], ids=["copies", "checksums"])
def test_a_write_that_only_moves_or_only_turns_signs_is_found(limit, write, dtype, rng, monkeypatch):
    monkeypatch.setattr(mutation, "COPIED", limit)
    for size in (2 * SMALL, 40_000, 40_001):
        w = rng.standard_normal(size).astype(dtype)
        _, pullback = pe.vjp(lambda x: np.sum(x * w), np.ones(size, dtype))  # noqa: B023
        i, j = rng.choice(size, 2, replace=False)
        PERMUTED[write](w, i, j)
        with pytest.raises(InPlaceError):
            pullback(dtype(1))


LAYOUTS = {
    "c": lambda a: a,
    "fortran": np.asfortranarray,
    "strided": lambda a: a[::2, ::3],
    "backwards": lambda a: a[::-1, ::-1],
    "columns of many": lambda a: a[:, 3:5],
    "broadcast": lambda a: np.broadcast_to(a, (3, *a.shape)),
    "windows": lambda a: np.lib.stride_tricks.sliding_window_view(a, (20, 20)),
    "bytes read as floats": lambda a: np.frombuffer(bytearray(a.tobytes()), np.float64),
    "not aligned": lambda a: np.frombuffer(bytearray(b"x" + a.tobytes()), np.uint8)[1:].view(np.float64),
}


@pytest.mark.parametrize("limit", [COPIED, 0], ids=["copies", "checksums"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_is_found_whatever_the_memory_of_the_array(layout, limit, rng, monkeypatch):
    monkeypatch.setattr(mutation, "COPIED", limit)
    base = rng.standard_normal((40, 40))
    w = LAYOUTS[layout](base)
    owner = w if w.flags.writeable else base
    _, pullback = pe.vjp(lambda x: np.sum(x * w), np.ones(w.shape))
    pullback(1.0)
    owner[(-1,) * owner.ndim] += 1
    with pytest.raises(InPlaceError):
        pullback(1.0)


def test_one_element_of_ten_million_is_found(rng):
    w = np.zeros(10**7)
    _, pullback = pe.vjp(lambda x: x[0] * np.sum(x[1] * w), np.ones(2))
    for place in (0, 12345, 10**7 - 1):
        w[place] = 100
        with pytest.raises(InPlaceError):
            pullback(1.0)
        w[place] = 0
    pullback(1.0)


@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.int64], ids=str)
def test_integers_and_truth_values_that_a_rule_reads_are_watched(kind, rng):
    chosen = rng.integers(0, 2, 5000).astype(kind)

    def f(x):
        return np.sum(np.where(chosen, x, 0) if kind is np.bool_ else x[chosen])

    _, pullback = pe.vjp(f, np.arange(5000.0))
    chosen[4321] = 1 - chosen[4321]
    with pytest.raises(InPlaceError):
        pullback(1.0)


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_an_array_whose_shape_or_dtype_is_set_in_place_is_refused(change):
    w = np.ones((4, 500))
    _, pullback = pe.vjp(lambda x: np.sum(x * w), np.ones((4, 500)))
    setattr(w, change, {"shape": (2, 1000), "dtype": np.int64}[change])
    with pytest.raises(InPlaceError):
        pullback(1.0)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f, x: pe.grad(f)(x),
        lambda f, x: pe.value_and_grad(f)(x),
        lambda f, x: pe.jvp(f, (x,), (x,)),
        lambda f, x: pe.jacobian(f, x, mode="forward"),
        lambda f, x: pe.jacobian(f, x, mode="reverse"),
        lambda f, x: pe.hessian(f, x),
        lambda f, x: pe.hvp(f, x, x),
        lambda f, x: pe.grad(lambda x: np.sum(pe.grad(f)(x) ** 2))(x),
        lambda f, x: f(pe.tensor(x, requires_grad=True)).backward(),
    ],
    ids=["grad", "value_and_grad", "jvp", "forward", "reverse", "hessian", "hvp", "grad of grad", "backward"],
)
def test_every_derivative_finds_a_write_within_the_function(derivative):
    w = np.ones(1000)

    def f(x):
        y = np.sum(np.sin(x * w))
        w[567] += 1
        return y

    with pytest.raises(InPlaceError):
        derivative(f, np.ones(1000))


def test_an_array_that_changes_between_two_uses_is_found_even_if_it_is_changed_back():
    w = np.ones(1000)

    def f(x):
        y = x * w
        w[3] = 2
        y = y * w
        w[3] = 1
        return np.sum(y)

    with pytest.raises(InPlaceError, match="'mul' needs its input 1"):
        pe.grad(f)(np.ones(1000))


def test_ops_that_read_the_same_array_share_one_copy(monkeypatch):
    made = []
    monkeypatch.setattr(mutation.Snapshot, "__init__", lambda self, array, old=mutation.Snapshot.__init__: (
        made.append(array), old(self, array))[1])  # fmt: skip
    w = np.ones(SMALL)

    def f(x):
        for _ in range(20):
            x = x * w
        return np.sum(x)

    pe.grad(f)(np.ones(SMALL))
    assert len(made) == 1 and made[0] is w
    assert id(w) not in mutation._KNOWN  # freed with the graph


def test_only_what_a_rule_reads_is_copied(monkeypatch):
    made = []
    monkeypatch.setattr(mutation, "version_of", lambda data, copied: made.append(data) or b"")
    x, w = np.ones((60, 60)), np.full((60, 60), 2.0)
    pe.vjp(lambda w: x @ w, w)
    assert [id(a) for a in made] == [id(x)]  # not the weight: nobody asks for the gradient by x


def test_the_variable_of_a_gradient_is_watched_as_well():
    x = np.array([1.0, 2.0])

    def f(t):
        y = np.sin(t)
        x[0] = 5.0
        return np.sum(y)

    with pytest.raises(InPlaceError, match=r"'sin' needs its input 0 \(shape \(2,\) float64\)"):
        pe.grad(f)(x)


def test_assigning_to_a_leaf_between_forward_and_backward_is_found():
    w = pe.tensor([1.0, 2.0], requires_grad=True)
    y = np.sum(w * w)
    w.assign([3.0, 4.0])
    with pytest.raises(InPlaceError):
        y.backward()


def test_what_no_rule_reads_may_be_written():
    w = np.array([1.0, 2.0])
    x = pe.tensor([3.0, 4.0], requires_grad=True)
    y = np.sum((x + w - w) * 2)  # sums do not need their operands, nor do factors need themselves
    own = np.exp(x)  # needs its result, not its operand
    w += 1
    x.assign([0.0, 0.0])
    y.backward()
    np.testing.assert_array_equal(x.grad, [2, 2])
    np.sum(own).backward()
    np.testing.assert_allclose(x.grad, 2 + np.exp([3.0, 4.0]))


def test_before_its_use_and_after_the_gradient_an_array_may_be_written():
    w = np.array([1.0, 2.0])
    x = pe.tensor([3.0, 4.0], requires_grad=True)
    for factor in (1.0, 10.0):
        w[:] = [factor, 2 * factor]
        np.sum(x * w).backward()
    np.testing.assert_array_equal(x.grad, [11, 22])


def test_a_parameter_may_be_updated_between_steps_in_place():
    w = pe.tensor([1.0], requires_grad=True)
    for _ in range(3):
        w.grad = None
        np.sum(w * w).backward()
        w.numpy()[...] -= 0.25 * w.grad
    np.testing.assert_allclose(w.numpy(), [0.125])


def test_the_arrays_of_computed_tensors_are_read_only():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    y = np.exp(x)
    with pytest.raises(ValueError, match="read-only"):
        y.numpy()[0] = 0
    np.sum(y).backward()
    np.testing.assert_allclose(x.grad, np.exp([1.0, 2.0]))
    with pe.no_grad():
        ops.exp(x).numpy()[0] = 0  # nothing is recorded, so nobody needs it


@pytest.mark.parametrize(
    "shown",
    [
        lambda y: y.detach(),
        pe.stop_gradient,
        lambda y: pe.stop_gradient(y)[:1],
        lambda y: np.reshape(y.detach(), (1, 2)).T,
    ],
)
def test_a_constant_view_of_a_computed_tensor_is_read_only(shown):
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    y = np.exp(x)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(shown(y))[...] = 0
    with pe.no_grad(), pytest.raises(ValueError, match="read-only"):
        shown(y).numpy()[...] = 0
    with pe.no_grad():
        seen = y[:1]
    with pytest.raises(ValueError, match="read-only"):
        seen.numpy()[...] = 0
    np.sum(y).backward()
    np.testing.assert_allclose(x.grad, np.exp([1.0, 2.0]))
    pe.tensor(shown(y).numpy(), requires_grad=True).numpy()[...] = 0  # a copy
    given = np.ones(2)
    pe.tensor(given)[:1].numpy()[...] = 5.0  # of what was given, which may be written to


def test_tensors_are_not_written_in_place():
    x = pe.tensor([1.0, 2.0], requires_grad=True)
    with pytest.raises(TypeError, match="tensors cannot be written in place"):
        x[0] = 5.0
    y = x
    y += 1  # a new tensor
    assert y is not x
    np.testing.assert_array_equal(x.numpy(), [1, 2])


def test_a_custom_rule_is_taken_to_read_all_it_was_given():
    w = np.array([1.0, 2.0])
    twice = pe.custom_rule(lambda x, w: x * w, vjp=lambda g, y, x, w: (g * w, None))
    y = twice(pe.tensor([1.0, 1.0], requires_grad=True), w)
    w[1] = 0
    with pytest.raises(InPlaceError, match=r"'custom' needs its input 1 \(shape \(2,\) float64\)"):
        np.sum(y).backward()


# Functions that are collected before they run ----------------------------------------------------------------

V = np.array([0.7, -0.3, 1.2])


def written_factor(x, size=3):
    factor, total = np.ones(size), 0.0
    for i in range(3):
        factor[i] = i
        total = total + np.sum(x * factor[:3])
    return total


def written_after(x):
    shift = np.zeros(3)
    y = shift + x
    shift[:] = 100
    return np.sum(y)


def written_index(x):
    index, total = np.array([0]), 0.0
    for i in range(3):
        index[0] = i
        total = total + x[index][0] * (i + 1)
    return total


def written_mask(x):
    mask, total = np.zeros(3, bool), 0.0
    for i in range(3):
        mask[:] = np.arange(3) == i
        total = total + np.sum(np.where(mask, x, 0)) * (i + 1)
    return total


def copies(x):
    factor, total = np.ones(3), 0.0
    for i in range(3):
        factor[i] = i
        total = total + np.sum(x * factor.copy())
    return total


COLLECTED = {
    "compile": lambda f: pe.compile(f)(V),
    "compile, of a gradient": lambda f: pe.compile(pe.grad(f))(V),
    "vmap": lambda f: pe.vmap(f)(V[np.newaxis]),
    "vmap of a gradient": lambda f: pe.vmap(pe.grad(f))(V[np.newaxis]),
    "cond": lambda f: pe.cond(True, f, f, V),
    "scan": lambda f: pe.scan(lambda c, x: (c + f(x), None), 0.0, V[np.newaxis])[0],
    "scan in compile": lambda f: pe.compile(lambda v: pe.scan(lambda c, x: (c + f(x), None), 0.0, v)[0])(V[np.newaxis]),
    "while_loop": lambda f: pe.while_loop(lambda c: c[1] < 1, lambda c: (f(V) + 0 * c[0], c[1] + 1), (0.0, 0.0))[0],
    "checkpoint": lambda f: pe.grad(pe.checkpoint(f))(V),
}


@pytest.mark.parametrize("how", COLLECTED)
@pytest.mark.parametrize("function", [written_factor, written_after, written_index, written_mask])
def test_an_array_that_is_written_to_while_ops_are_collected_is_found(how, function):
    """Each op would see what the array holds at the end."""
    if how == "while_loop":
        assert COLLECTED[how](function).item() == pytest.approx(
            function(V)
        )  # V is no part of its carry: it runs at once
        return
    with pytest.raises(InPlaceError, match="was written to after an op had read it"):
        COLLECTED[how](function)


@pytest.mark.parametrize("how", COLLECTED)
def test_copies_are_what_they_were(how):
    found = np.asarray(COLLECTED[how](copies)).reshape(-1)
    expected = [0, 3, 4] if "gradient" in how or how == "checkpoint" else [copies(V)]
    np.testing.assert_allclose(found, expected)


def test_what_is_written_between_two_loops_inside_a_compiled_function_is_found():
    def two(x):
        factor = np.ones(3)
        first, _ = pe.scan(lambda c, x: (c + np.sum(x * factor), None), 0.0, x)
        factor[:] = 2
        return first + pe.scan(lambda c, x: (c + np.sum(x * factor), None), 0.0, x)[0]

    rows = np.stack([V, 2 * V])
    assert two(rows).item() == pytest.approx(9 * V.sum())
    with pytest.raises(InPlaceError, match="was written to after an op had read it"):
        pe.compile(two)(rows)


def test_large_arrays_are_watched_too():
    with pytest.raises(InPlaceError, match="was written to after an op had read it"):
        pe.compile(lambda x: written_factor(x[:3], SMALL))(V)
    data = np.ones(3 * SMALL)

    def late(x):
        total = np.sum(data * x)
        data[-1] = 5
        return total

    with pytest.raises(InPlaceError, match="an array of shape"):
        pe.compile(late)(2.0)


@pytest.mark.parametrize("size", [3, 3 * SMALL])
def test_an_array_that_is_changed_back_while_ops_are_collected_is_found(size):
    data = np.ones(size)

    def scaled(x):
        total = np.sum(data * x)
        data[-1] = 5
        total = total + np.sum(data * x)
        data[-1] = 1
        return total

    with pytest.raises(InPlaceError, match="was written to after an op had read it"):
        pe.compile(scaled)(2.0)


def test_a_trace_copies_once_what_a_loop_reads_and_nothing_else(monkeypatch):
    made = []
    make = mutation.Snapshot.__init__
    monkeypatch.setattr(mutation.Snapshot, "__init__", lambda self, array: (made.append(array), make(self, array))[1])
    weight, turned, once = np.full((64, 64), 0.01), np.full((64, 64), 0.01), np.ones((64, 64))
    assert weight.nbytes > SMALL

    def repeated(x):
        for _ in range(10):
            x = np.tanh(weight @ x) + turned.T @ x  # an array object for each round
        return np.sum(once @ x)

    pe.compile(repeated)(np.ones(64))
    assert len(made) == 1 and made[0] is weight


def test_forward_mode_finds_what_a_custom_rule_writes():
    a, x = np.ones(SMALL), np.ones(SMALL)

    def rule(writes):
        def jvp(tangents, y, x, w):
            tangent = tangents[0] * np.array(a)
            if writes:
                a[0] = 100
            return tangent

        return pe.custom_rule(lambda x, w: x * w, vjp=lambda g, y, x, w: (g * np.array(a), None), jvp=jvp)

    first, second = rule(True), rule(False)
    with pytest.raises(InPlaceError):
        pe.jvp(lambda x: np.sum(second(first(x, a), a)), (x,), (x,))
