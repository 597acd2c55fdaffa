"""The gradient checker: an op's rules against finite differences, along random directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from py_engine.ad.containers import flatten
from py_engine.ad.op import as_tensor
from py_engine.ad.reverse import gradients
from py_engine.ad.state import entering
from py_engine.ad.tensor import FLOATS, Array, Tensor, plain_array
from py_engine.errors import DTypeError, GradientCheckError, NotDifferentiableError


@entering(grad_enabled=True)
def gradcheck(
    function: Callable[..., Any],
    *args: ArrayLike,
    rtol: float = 1e-6,
    atol: float = 1e-8,
    directions: int = 3,
    seed: int = 0,
) -> None:
    """Check the gradient of `function` by its float64 arguments against central differences.

    The result is projected on random vectors and the arguments are moved along random directions, so that one
    number per direction checks the whole Jacobian: a rule wrong by 0.1 % anywhere is caught. The difference is
    extrapolated from two step sizes (Richardson), which leaves an error of about 1e-10; where the two disagree,
    the function has a kink nearby and the message says so.

    Args:
        function: takes tensors, returns one tensor of any shape.
        args: float64 arrays to differentiate by; others (labels) are passed on.
        rtol: relative tolerance.
        atol: absolute tolerance.
        directions: how many random directions to try.
        seed: of the directions.

    Raises:
        GradientCheckError: the gradient is wrong; gives both numbers.
        DTypeError: an argument is float32, whose differences are too coarse to check anything.
        NotDifferentiableError: there is no float64 argument, so there would be nothing to check, or an argument is a
            container of arrays.
    """
    rng = np.random.default_rng(seed)
    for i, arg in enumerate(args):
        leaves, structure = flatten(arg)
        if isinstance(arg, dict | list | tuple) and any(getattr(x, "dtype", None) in FLOATS for x in leaves):
            raise NotDifferentiableError(
                f"gradcheck: argument {i} is {structure}, and only arrays can be moved; give its arrays as separate "
                'arguments, such as gradcheck(lambda w, b: f({"w": w, "b": b}), w, b)'
            )
    arrays = [plain_array(arg) for arg in args]
    if any(a.dtype == np.float32 for a in arrays):
        raise DTypeError("gradcheck: float32 is too coarse for finite differences; pass float64 arrays")
    floats = [i for i, a in enumerate(arrays) if a.dtype in FLOATS]
    if not floats:
        raise NotDifferentiableError("gradcheck: at least one float64 argument is needed to differentiate by")

    def evaluate(points: list[Array]) -> Tensor:
        return as_tensor(function(*(Tensor(np.asarray(a), i in floats) for i, a in enumerate(points))))

    variables = [Tensor(a, requires_grad=i in floats) for i, a in enumerate(arrays)]
    output = as_tensor(function(*variables))
    for k in range(directions):
        weights = rng.standard_normal(output.shape)
        found = gradients([output], [Tensor(weights)], [variables[i] for i in floats])
        steps = {i: rng.standard_normal(arrays[i].shape) for i in floats}
        analytic = 0.0
        for i, g in zip(floats, found, strict=True):
            if g is not None:
                if g.shape != arrays[i].shape:
                    raise GradientCheckError(
                        f"gradcheck: argument {i} has shape {arrays[i].shape}, its gradient {g.shape}"
                    )
                analytic += float(np.sum(g.numpy() * steps[i]))

        def difference(h: float, weights: Array = weights, steps: dict[int, Array] = steps) -> float:
            ahead = evaluate([a + h * steps[i] if i in floats else a for i, a in enumerate(arrays)])
            behind = evaluate([a - h * steps[i] if i in floats else a for i, a in enumerate(arrays)])
            return float(np.sum(weights * (ahead.numpy() - behind.numpy()))) / (2 * h)

        coarse, fine = difference(2e-4), difference(1e-4)
        numeric = (4 * fine - coarse) / 3
        if not abs(analytic - numeric) <= atol + rtol * max(abs(numeric), abs(analytic)):
            scale = max(abs(fine), abs(coarse), 1e-300)
            kink = (
                "; the two step sizes disagree, so there may be a kink within 2e-4 of this point"
                if abs(coarse - fine) > 1e-3 * scale
                else ""
            )
            raise GradientCheckError(
                f"gradcheck: direction {k}: the gradient gives {analytic!r}, finite differences {numeric!r}{kink}"
            )
