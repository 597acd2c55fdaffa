"""A programmer's own Julia functions from Python: values, derivatives, errors; here, in another process, under torch.

Everything in Julia happens in a worker's process, where this process's torch can't be in its way; what runs in the same
process as Julia is run by a separate Python. Both start once for most tests, since Julia's start takes seconds.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import bridge.julia
from bridge.errors import JuliaError
from bridge.julia import remote
from bridge.worker import Worker
from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError

pytestmark = pytest.mark.usefixtures("julia")

ENERGY = "(w, x) -> sum(abs2, tanh.(w * x))"


def in_own_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def in_python(julia_process, tmp_path):
    """Runs a program in the process that such programs share."""
    return lambda program: julia_process(program, tmp_path)


class Kept(Worker):
    """A worker that functions don't end: one after the other is made in it."""

    def close(self):
        pass


@pytest.fixture(scope="module")
def kept(julia):
    worker = Kept("julia", 1)
    yield worker
    Worker.close(worker)


@pytest.fixture
def one_process(kept, monkeypatch):
    """Functions with a separate process, or under torch, get the same one."""
    monkeypatch.setattr(remote, "Worker", lambda *_: kept)


@pytest.fixture(scope="module")
def product(julia):
    function = bridge.julia.function("(w, x) -> tanh.(w * x)", process=True)
    yield function
    function.close()


def matrices(dtype="float64"):
    rng = np.random.default_rng(3)
    return rng.normal(size=(4, 3)).astype(dtype), rng.normal(size=(5, 4)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_axes_are_julias_the_other_way_round_and_the_dtype_is_kept(product, dtype):
    w, x = matrices(dtype)  # in Julia (3, 4) and (4, 5)
    y = product.value(w, x)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, np.tanh(x @ w), rtol=1e-5 if dtype == "float32" else 1e-12)


def test_the_pullback_is_the_derivative(product):
    w, x = matrices()
    seed = np.random.default_rng(4).normal(size=(5, 3))
    by_w, by_x = product.pullback(seed, w, x)
    slope = seed * (1 - np.tanh(x @ w) ** 2)
    np.testing.assert_allclose(by_w, x.T @ slope, rtol=1e-10)
    np.testing.assert_allclose(by_x, slope @ w.T, rtol=1e-10)


def test_arrays_may_lie_anywhere_in_memory(in_python):
    in_python("""
        import numpy as np
        from bridge import julia

        total = julia.function("x -> sum(abs2, x)")
        raw = bytes(3) + np.arange(4.0).tobytes()
        assert total.value(np.frombuffer(raw, np.float64, offset=3)) == 14.0
        assert total.value(np.asfortranarray(np.arange(4.0).reshape(2, 2))[:, ::-1]) == 14.0
        assert total.value(np.float64(3.0)) == 9.0
    """)


def test_masks_are_refused(product):
    with pytest.raises(DTypeError, match=r"pass x\.filled"):
        product.value(np.ma.array(np.ones((3, 4)), mask=True), np.ones((4, 5)))


def test_sizes_may_change_from_call_to_call(product):
    w, x = matrices()
    for rows in (5, 2, 0, 5):
        np.testing.assert_allclose(product.value(w, x[:rows]), np.tanh(x[:rows] @ w), rtol=1e-10)


@pytest.mark.parametrize(
    ("code", "name", "message"),
    [
        ("(x ->", "", "syntax|ParseError"),  # until 1.9, and from 1.10 on
        ("3", "", "must end with a function"),
        ("f(x) = x", "g", "defines no g"),
    ],
)
@pytest.mark.usefixtures("one_process")
def test_code_that_is_no_function_is_refused(code, name, message):
    with pytest.raises(JuliaError, match=message):
        bridge.julia.function(code, name, process=True)


@pytest.mark.parametrize(
    ("code", "replay", "error", "message"),
    [
        ('x -> error("no such luck")', False, JuliaError, "no such luck"),
        ('x -> "text"', False, ConfigurationError, "must return a number or an array"),
        ("x -> x[7]", True, ConfigurationError, "out of range"),
        ("x -> sum(x) > 0 ? x : -x", True, ConfigurationError, "branch|condition|value"),
    ],
)
@pytest.mark.usefixtures("one_process")
def test_errors_inside_the_function_are_told_in_its_own_words(code, replay, error, message):
    function = bridge.julia.function(code, replay=replay, process=True)
    try:
        with pytest.raises(error, match=message):
            function.value(np.ones(3))
    finally:
        function.close()


@pytest.mark.usefixtures("one_process")
def test_a_function_that_runs_at_every_call_may_branch_on_values():
    function = bridge.julia.function("x -> sum(x) > 0 ? x : -x", replay=False, process=True)
    try:
        np.testing.assert_array_equal(function.value(-np.ones(3)), np.ones(3))
        (g,) = function.pullback(np.ones(3), -np.ones(3))
        np.testing.assert_array_equal(g, -np.ones(3))
    finally:
        function.close()


def test_a_function_in_another_process_may_be_called_from_several_threads(product):
    rng = np.random.default_rng(6)
    calls = [(rng.normal(size=(4, 3)), rng.normal(size=(5, 4))) for _ in range(60)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda args: product.value(*args), calls))
    for y, (w, x) in zip(found, calls, strict=True):
        np.testing.assert_allclose(y, np.tanh(x @ w), rtol=1e-10)


def test_a_seed_of_another_shape_is_refused_and_not_broadcast(product):
    w, x = matrices()
    for shape in ((), (3,), (1, 3), (2, 5, 3)):
        with pytest.raises(ConfigurationError, match="seed must have the result's size"):
            product.pullback(np.ones(shape), w, x)


@pytest.mark.parametrize("arguments", [(3,), ("f(x) = x", 3), (Path("code.jl"), "f")])
@pytest.mark.parametrize("made", [bridge.julia.function, bridge.julia.torch_function])
def test_code_that_is_no_text_is_refused(made, arguments):
    if made is bridge.julia.torch_function:
        pytest.importorskip("torch")
    with pytest.raises(ConfigurationError, match=r"expected a str, found .*function_file"):
        made(*arguments)


def test_what_julia_does_not_take_is_refused_by_its_place(product):
    w, x = matrices()
    with pytest.raises(NotDifferentiableError, match="argument 1 is of float16"):
        product.value(w, x.astype("float16"))
    with pytest.raises(NotDifferentiableError, match="argument 0 is of complex128"):
        product.value(w + 1j, x)


def test_a_closed_function_can_not_be_called():
    function = bridge.julia.function("x -> x", process=True)
    function.close()
    with pytest.raises(Exception, match="closed"):
        function.value(np.ones(2))


def test_py_engine_differentiates_through_it_eagerly_and_compiled(in_python):
    in_python(f"""
        import numpy as np, py_engine as pe
        from bridge import julia

        energy = julia.function({ENERGY!r})
        rng = np.random.default_rng(0)
        w, x = rng.normal(size=(4, 3)), rng.normal(size=(5, 4))
        y = np.tanh(x @ w)
        expected = 3 * x.T @ (2 * y * (1 - y * y))
        loss = lambda w, x: 3 * energy(w, x)
        np.testing.assert_allclose(energy(w, x), np.sum(y * y), rtol=1e-12)
        np.testing.assert_allclose(pe.grad(loss)(w, x), expected, rtol=1e-10)
        compiled = pe.compile(pe.value_and_grad(loss))
        for _ in range(2):
            value, gradient = compiled(w, x)
            np.testing.assert_allclose(value, 3 * np.sum(y * y), rtol=1e-12)
            np.testing.assert_allclose(gradient, expected, rtol=1e-10)
    """)


def test_derivatives_have_derivatives_in_both_modes_eagerly_and_compiled(in_python):
    in_python(f"""
        import numpy as np, py_engine as pe
        from bridge import julia

        rng = np.random.default_rng(0)
        w, x = rng.normal(size=(4, 3)), rng.normal(size=(5, 4))
        v = rng.normal(size=w.shape)
        transforms = [
            lambda f: pe.jvp(f, (w, x), (v, None))[1],
            lambda f: pe.hessian(lambda w: f(w, x), w),
            lambda f: pe.jacobian(pe.grad(lambda w: f(w, x)), w, mode="reverse"),
            lambda f: pe.grad(lambda x: np.sum(pe.hvp(lambda w: f(w, x), w, v) ** 2))(x),
            lambda f: pe.compile(lambda w, v: pe.hvp(lambda w: f(w, x), w, v))(w, v),
        ]
        for replay in (True, False):
            energy = julia.function({ENERGY!r}, replay=replay)
            for transform in transforms:
                expected = transform(lambda w, x: np.sum(np.tanh(x @ w) ** 2))
                np.testing.assert_allclose(transform(energy), expected, rtol=1e-8, atol=1e-12)
        chosen = julia.function("(x, places) -> sum(x[places] .^ 3)")
        found = pe.hessian(lambda x: chosen(x, np.array([1, 3])), np.array([1.0, 2.0, 3.0]))
        np.testing.assert_array_equal(found, np.diag([6.0, 0.0, 18.0]))
        derivative = julia.function("x -> x^4")
        for expected in (32.0, 48.0, 48.0):
            derivative = pe.grad(derivative)
            assert derivative(2.0) == expected
    """)


def test_derivatives_by_a_number_beside_arrays_of_another_precision_have_the_numbers(in_python):
    in_python("""
        import numpy as np, py_engine as pe
        from bridge import julia

        cubes = julia.function("(a, x) -> sum(a .* a .* x .^ 3)")
        for number, array in ((np.float64, np.float32), (np.float32, np.float64)):
            a, x = number(2.0), np.arange(1, 4, dtype=array)
            for found, expected, dtype in (
                (pe.grad(cubes)(a, x), 144, number),
                (pe.hessian(lambda a: cubes(a, x), a), 72, number),
                (pe.grad(lambda x: pe.grad(cubes)(a, x))(x), 12 * x**2, array),
            ):
                np.testing.assert_array_equal(found, expected)
                assert found.dtype == dtype
    """)


def test_the_derivatives_of_a_closed_function_are_closed(in_python):
    in_python("""
        from bridge import julia
        from bridge.errors import JuliaError

        square = julia.function("x -> x^2")
        slope = square.derivative(0, [True])
        assert slope.value(3.0, 1.0) == 6.0
        square.close()
        try:
            slope.value(3.0, 1.0)
        except JuliaError as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("no error")
    """)


def test_a_file_of_julia_code_has_several_functions(in_python, tmp_path):
    path = tmp_path / "physics.jl"
    path.write_text("half(x) = x / 2\nkinetic(m, v) = half(m) * sum(v .* v)\n", encoding="utf-8")
    out = in_python(f"""
        import numpy as np
        from bridge import julia

        kinetic = julia.function_file({str(path)!r}, "kinetic")
        v = np.array([1.0, 2.0])
        print(kinetic.__name__, kinetic.value(3.0, v), kinetic.pullback(1.0, 3.0, v))
    """)
    assert out.split()[:2] == ["kinetic", "7.5"]
    assert "array([3., 6.])" in out


def test_a_function_may_keep_its_arguments_and_write_to_them(in_python):
    in_python("""
        import numpy as np
        from bridge import julia

        first = julia.function("seen = []; first_seen(x) = (push!(seen, x); sum(seen[1]))", "first_seen", replay=False)
        doubled = julia.function("x -> (x .*= 2; x)", replay=False)
        x = np.ones(3)
        assert first.value(x) == 3.0
        x[:] = 5.0
        assert first.value(x) == 3.0
        np.testing.assert_array_equal(doubled.value(x), np.full(3, 10.0))
        np.testing.assert_array_equal(x, np.full(3, 5.0))
    """)


def test_a_function_may_be_dropped_in_a_thread_and_in_a_fork():
    done = in_own_python("""
        import gc, os, sys, threading
        from bridge import julia

        sys.unraisablehook = lambda found: print(found.exc_value)
        functions = [julia.function("x -> x") for _ in range(2)]

        def drop():
            functions.pop()
            gc.collect()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            drop()
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        assert functions[0].value(2.0) == 2.0
        functions.append(julia.function("x -> x"))
        print(julia.runtime().evaluate("length(TwinGrad.Functions.FUNCTIONS)"))
    """)
    assert done == "2\n"


def test_sessions_may_be_dropped_as_functions_are():
    done = in_own_python("""
        import gc, os, threading
        import numpy as np
        from bridge import julia, spec
        from bridge.session import Optimizer

        model = spec.parse({
            "format": "twingrad-model", "version": 1, "opset": 1, "name": "small", "input": {"shape": ["N", 3]},
            "layers": [{"id": "a", "op": "dense", "units": 2}], "loss": {"op": "mean_squared_error"},
        })
        sessions = [julia.build(model, optimizer=Optimizer("sgd", 0.1), batch_size=2) for _ in range(3)]
        held = lambda: julia.runtime().evaluate("length(TwinGrad.Entry.SESSIONS)")
        seen = [held()]
        sessions.pop()
        gc.collect()
        seen.append(held())

        def drop():
            sessions.pop()
            gc.collect()

        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            drop()
            os._exit(0)
        os.waitpid(child, 0)
        assert np.isfinite(sessions[0].predict(np.ones((2, 3), np.float32))).all()
        seen.append(held())
        sessions.append(julia.build(model, optimizer=Optimizer("sgd", 0.1), batch_size=2))
        seen.append(held())
        for session in sessions * 2:
            session.close()
        print(*seen, held())
    """)
    assert done == "3 2 2 2 0\n"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.jl can't be read"):
        bridge.julia.function_file(tmp_path / "none.jl", "f")


def test_torch_differentiates_through_it_across_processes():
    torch = pytest.importorskip("torch")
    energy = bridge.julia.torch_function(ENERGY)
    w, x = (torch.tensor(a, requires_grad=True) for a in matrices())
    (3 * energy(w, x)).backward()
    found = w.grad.clone(), x.grad.clone()
    w.grad = x.grad = None
    (3 * torch.tanh(x @ w).square().sum()).backward()
    torch.testing.assert_close(found, (w.grad, x.grad))
    assert torch.autograd.gradcheck(energy, (w, x))
    assert torch.autograd.gradgradcheck(energy, (w, x))


@pytest.mark.usefixtures("one_process")
def test_arrays_beside_torch_tensors_may_be_written_to_before_the_derivative():
    torch = pytest.importorskip("torch")
    weighted = bridge.julia.torch_function("(x, y) -> sum(x .* y)")
    x, y = torch.ones(3, dtype=torch.float64, requires_grad=True), np.arange(3.0)
    result = weighted(x, y)
    y[:] = -1.0
    result.backward()
    assert x.grad.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("one_process")
def test_tensors_that_numpy_has_no_type_for_are_refused_by_their_place():
    torch = pytest.importorskip("torch")
    product = bridge.julia.torch_function("(x, y) -> x .* y")
    x = torch.ones(2, 2)
    for y in (x.bfloat16(), x.to_sparse(), x.to("meta")):
        with pytest.raises(NotDifferentiableError, match="argument 1"):
            product(x, y)


@pytest.mark.usefixtures("one_process")
def test_torch_arguments_without_gradient_and_integers_are_left_alone():
    torch = pytest.importorskip("torch")
    rows = bridge.julia.torch_function("(x, places) -> sum(x[places])")
    x, places = torch.arange(4.0, dtype=torch.float64, requires_grad=True), torch.tensor([1, 4])
    rows(x, places).backward()
    assert x.grad.tolist() == [1.0, 0.0, 0.0, 1.0]
