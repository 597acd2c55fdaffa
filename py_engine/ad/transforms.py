"""Function transforms: a function in, a function or its derivative out.

All of them take functions of nested containers (see `py_engine.ad.containers`), nest in each other to any order, and
work inside functions that are compiled. Called with arrays they return arrays that belong to the caller; called with
tensors, inside another transform, or with a function that captures a tensor for whose gradient `backward()` may be
called, they return tensors. They know of those around them in their own thread only: called with arrays in another one
they return arrays, which are constants to a transform around that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from py_engine.ad import ops
from py_engine.ad.containers import LEAF, Structure, flatten, flatten_as, paths, unflatten
from py_engine.ad.forward import push_forward
from py_engine.ad.memory import keep_freed_memory
from py_engine.ad.mutation import watch_setting
from py_engine.ad.op import as_tensor, shared_number
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.reverse import Path, depend_on_a_leaf, gradients, path_between, variable
from py_engine.ad.state import LEVELS, STATE, entering, inside_transform, restoring
from py_engine.ad.tensor import FLOATS, Array, Tensor, plain_array
from py_engine.errors import ConfigurationError, DTypeError, NotDifferentiableError, ShapeError

Function = Callable[..., Any]

ARRAYS = frozenset({np.ndarray, float, np.float64, np.float32})
ONES = {dtype: shared_number(1, dtype) for dtype in FLOATS}


# Gradients ------------------------------------------------------------------------------------------------


def grad(function: Function, argnums: int | Sequence[int] = 0) -> Function:
    """Return a function that computes the gradient of a scalar `function`.

    Args:
        function: takes arrays, tensors or nested containers of them as positional arguments and returns a scalar,
            written with operators, numpy's functions or `py_engine.ops`.
        argnums: the argument, or arguments, to differentiate by.

    Returns:
        A function of the same arguments. It returns a container of the argument's structure with arrays of its
        arrays' shapes and dtypes (a tuple of those if `argnums` is a sequence).

    Raises:
        ShapeError: the result is not a scalar, or there is no such argument.
        NotDifferentiableError: something in the argument is not of float32 or float64; names its place.
        ConfigurationError: `function` is not callable, or `argnums` are no integers.

    Example:
        >>> grad(lambda x: np.sum(x**3))(np.array([1.0, 2.0]))
        array([ 3., 12.])
        >>> grad(lambda layer: np.sum(layer["weight"] ** 2) + layer["bias"])({"weight": np.ones(2), "bias": 0.5})
        {'weight': array([2., 2.]), 'bias': array(1.)}
    """
    return named_grad("grad", function, argnums)


def named_grad(name: str, function: Function, argnums: int | Sequence[int] = 0) -> Function:
    """`grad` by another name in messages."""
    numbers, single = _numbers(name, function, argnums)

    def gradient(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and ARRAYS.issuperset(map(type, args)) and not inside_transform():
            _, found = _of_arrays(name, function, numbers, args)
            return found[0] if single else tuple(found)
        call, tensors = _differentiated(name, function, numbers, args, kwargs)
        return _by_argument(call, tensors, single)

    return gradient


def value_and_grad(function: Function, argnums: int | Sequence[int] = 0) -> Function:
    """Return a function that computes both the value of a scalar `function` and its gradient; see `grad`.

    Returns:
        A function of the same arguments that returns (value, gradient); the value is a Python float where the
        gradient is an array.

    Example:
        >>> value_and_grad(lambda x: np.sum(x**3))(np.array([1.0, 2.0]))
        (9.0, array([ 3., 12.]))
    """
    numbers, single = _numbers("value_and_grad", function, argnums)

    def value_and_gradient(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and ARRAYS.issuperset(map(type, args)) and not inside_transform():
            value, found = _of_arrays("value_and_grad", function, numbers, args)
            return value, found[0] if single else tuple(found)
        call, tensors = _differentiated("value_and_grad", function, numbers, args, kwargs)
        (output,) = call.outputs
        return (output.item() if call.plain else output), _by_argument(call, tensors, single)

    return value_and_gradient


def _numbers(name: str, function: Function, argnums: int | Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Return the arguments' numbers, and whether there is only one, not in a sequence."""
    check_callable(name, function)
    single = not isinstance(argnums, (tuple, list, range))
    numbers: tuple[Any, ...] = (argnums,) if single else tuple(argnums)  # type: ignore[arg-type]
    if not all(map(is_whole, numbers)):
        raise ConfigurationError(f"{name}: argnums must be an integer or integers, got {argnums!r}")
    return numbers, single


def check_callable(name: str, function: Any) -> None:
    """Begin a transform: raise `ConfigurationError` where something else is given in the place of a function."""
    keep_freed_memory()
    if not callable(function):
        raise ConfigurationError(
            f"{name}: expected a function first, got {type(function).__name__}; "
            "give the function itself, not its result"
        )


@restoring
def _differentiated(
    name: str, function: Function, numbers: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Linearized, list[Tensor | None]]:
    call = linearize(name, function, args, numbers, kwargs)
    output = _scalar(name, call.outputs, call.structure)
    with entering(grad_enabled=call.grad_enabled):
        return call, gradients([output], [_seed(output)], call.variables, level=call.level, path=call.path)


def _of_arrays(name: str, function: Function, numbers: Sequence[int], args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Fast path: array arguments, no enclosing transform. A small function's time is nearly all overhead."""
    outer, grad_enabled, level = STATE.__dict__.copy(), STATE.grad_enabled, next(LEVELS)
    try:  # as `restoring` does
        STATE.grad_enabled = STATE.differentiating = True
        passed = list(args)
        for n in numbers:
            i = _position(name, n, args)
            if passed[i] is args[i]:
                passed[i] = _variable(name, args[i], args, i, 0, LEAF, level)
        variables = [passed[n] for n in numbers]
        output = function(*passed)
        if output.__class__ is not Tensor or output.shape or output.dtype not in FLOATS:
            output = _scalar(name, *results(name, output))
        STATE.differentiating = False
        path = path_between([output], set(map(id, variables)), False, level)
        STATE.grad_enabled = kept = bool(path.below) and grad_enabled and depend_on_a_leaf(path.below)
        found = _or_zeros(gradients([output], [_seed(output)], variables, level=level, path=path), variables)
    finally:
        STATE.__dict__.update(outer)
    return (output, found) if kept else (output.item(), owned(found, args))


def _seed(output: Tensor) -> Tensor:
    return ops.reshape(ONES[output.dtype], output.shape) if output.shape else ONES[output.dtype]


def _scalar(name: str, outputs: Sequence[Tensor], structure: Structure) -> Tensor:
    if structure is not LEAF or outputs[0].size != 1:
        found = f"shape {outputs[0].shape}" if structure is LEAF else str(structure)
        raise ShapeError(
            f"{name}: the function must return a scalar, got {found}; use vjp() or jacobian() for other results, or "
            "reduce it first, for example with np.sum()"
        )
    return outputs[0]


def _by_argument(call: Linearized, found: Sequence[Tensor | None], single: bool) -> Any:
    gradients = call.shown(_or_zeros(found, call.variables))
    if single:
        return gradients[0] if call.structures[0] is LEAF else unflatten(call.structures[0], gradients)
    return tuple(call.in_arguments(gradients))


# Products with the Jacobian -------------------------------------------------------------------------------


@restoring
def vjp(function: Function, *args: Any) -> tuple[Any, Function]:
    """Return the value of a function and its pullback: reverse mode, one pass for each seed.

    Args:
        function: takes arrays, tensors or nested containers of them and returns the same.
        args: its arguments; every array in them is differentiated by. What has no derivative (labels, settings) is
            put into the function: `vjp(lambda x: f(x, labels), x)`.

    Returns:
        `(y, pullback)`. `pullback(seed)` takes a container of `y`'s structure with arrays of its shapes and dtypes,
        and returns a tuple with the vector-Jacobian product for each argument, in its structure and shapes. It may
        be called any number of times.

    Raises:
        NotDifferentiableError: something in an argument, or in the result, is not of float32 or float64.
        ShapeError, DTypeError: a seed does not fit the result; names the place, expected and actual.

    Example:
        >>> y, pullback = vjp(lambda x, w: np.sin(x) * w, np.array([0.0, 1.0]), 2.0)
        >>> pullback(np.array([1.0, 0.0]))
        (array([2., 0.]), array(0.))
    """
    check_callable("vjp", function)
    call = linearize("vjp", function, args, range(len(args)))

    @restoring
    def pullback(seed: Any) -> tuple[Any, ...]:
        leaves = flatten_as(seed, call.structure, "vjp: the seed")
        seeds = alike(leaves, call.outputs, call.structure, "vjp: the seed")
        with call.derivative(leaves):
            found = gradients(call.outputs, seeds, call.variables, level=call.level, path=call.path)
        return tuple(call.in_arguments(call.shown(_or_zeros(found, call.variables), leaves)))

    return call.value(), pullback


def jvp(function: Function, args: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Return the value of a function and its directional derivative: forward mode, one pass.

    Args:
        function: takes arrays, tensors or nested containers of them and returns the same.
        args: a tuple of its arguments.
        tangents: a tuple: for each argument a container of its structure with arrays of its shapes and dtypes, or None
            for one that counts as a constant (which may then be anything).

    Returns:
        `(y, tangent)`, both of the structure and the shapes of the function's result.

    Raises:
        NotDifferentiableError: something in an argument with a tangent, or in the result, is not of float32 or float64.
        ShapeError, DTypeError: a tangent does not fit its argument; names the place, expected and actual.

    Example:
        >>> jvp(lambda x, w: np.sin(x) * w, (np.array([0.0, 1.0]), 2.0), (np.array([1.0, 0.0]), None))[1]
        array([2., 0.])
    """
    return directional("jvp", function, args, tangents)


@restoring
def directional(name: str, function: Function, args: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """`jvp` by another name in messages."""
    check_callable(name, function)
    for what, value in (("args", args), ("tangents", tangents)):
        if not isinstance(value, (tuple, list)):
            raise ConfigurationError(
                f"{name}: {what} must be a tuple with an item for each argument of the function, got "
                f"{type(value).__name__}; write {name}(f, (x,), (v,)) for a function of one argument"
            )
    if len(args) != len(tangents):
        raise ShapeError(f"{name}: expected a tangent for each of the {len(args)} arguments, got {len(tangents)}")
    numbers = [i for i, t in enumerate(tangents) if t is not None]
    call = linearize(name, function, args, numbers)
    leaves, known = [], []
    for i, structure, variables in zip(numbers, call.structures, call.by_argument, strict=True):
        place = f"{name}: the tangent of argument {i}"
        given = flatten_as(tangents[i], structure, place)
        leaves += given
        known += alike(given, variables, structure, place)
    with call.derivative(leaves):
        found = push_forward(call.outputs, dict(zip(call.variables, known, strict=True)), level=call.level)
    return call.value(leaves), unflatten(call.structure, call.shown(_or_zeros(found, call.outputs), leaves))


def alike(values: Sequence[Any], tensors: Sequence[Tensor], structure: Structure, name: str) -> list[Tensor]:
    """Return seeds or tangents as tensors, each of the shape and dtype of its counterpart in `tensors`.

    Numbers and lists take the dtype, arrays must have it.

    Raises:
        ShapeError, DTypeError: one does not fit; names the place in the container.
    """
    result = []
    for k, (value, like) in enumerate(zip(values, tensors, strict=True)):
        x = value if isinstance(value, Tensor) or value.__class__ is np.ndarray else plain_array(value)
        if isinstance(value, list):  # which is copied
            watch_setting(value)
        if x.dtype != like.dtype and not isinstance(value, (Tensor, np.ndarray)) and x.dtype.kind in "fiu":
            x = x.astype(like.dtype)
        if x.dtype != like.dtype:
            raise DTypeError(f"{name}{paths(structure)[k]}: expected {like.dtype}, got {_called(value, x.dtype)}")
        if x.shape != like.shape:
            raise ShapeError(f"{name}{paths(structure)[k]}: expected shape {like.shape}, got {x.shape}")
        result.append(x if isinstance(x, Tensor) else Tensor(x))
    return result


def _or_zeros(found: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [Tensor(np.zeros(x.shape, x.dtype)) if g is None else g for g, x in zip(found, tensors, strict=True)]


# Linearisation --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Linearized:
    """A call of a function with the graph that it made, to be differentiated by some of its arguments.

    Attributes:
        by_argument: for each argument that is differentiated by, the variables in the place of its leaves.
        structures: their structures.
        outputs: the leaves of the result.
        structure: its structure.
        plain: whether the caller receives arrays.
        grad_enabled: whether derivatives may be differentiated once more, from outside.
        given: the arrays that belong to the caller.
        level: of its variables, see `Tensor.level`.
        path: from the variables to the outputs.
    """

    by_argument: list[list[Tensor]]
    structures: list[Structure]
    outputs: list[Tensor]
    structure: Structure
    plain: bool
    grad_enabled: bool
    given: list[Any]
    level: int
    path: Path

    @property
    def variables(self) -> list[Tensor]:
        """All tensors that are differentiated by."""
        if len(self.by_argument) == 1:
            return self.by_argument[0]
        return [x for leaves in self.by_argument for x in leaves]

    def in_arguments(self, values: list[Any]) -> list[Any]:
        """Return values, one for each variable, as one container for each argument."""
        if len(self.structures) == 1:
            return [unflatten(self.structures[0], values)]
        result, start = [], 0
        for leaves, structure in zip(self.by_argument, self.structures, strict=True):
            result.append(unflatten(structure, values[start : start + len(leaves)]))
            start += len(leaves)
        return result

    def derivative(self, others: Sequence[Any] = ()) -> entering:
        """Keep the graph of ops made inside only where an enclosing transform may need it, for `others` too."""
        outside = any(isinstance(x, Tensor) and x.requires_grad for x in others)
        return entering(grad_enabled=STATE.grad_enabled and (self.grad_enabled or outside or inside_transform()))

    def shown(self, results: Sequence[Tensor], others: Sequence[Any] = ()) -> list[Any]:
        """Return results as the caller wants them: as arrays that are only his where he passed arrays."""
        if inside_transform():
            return list(results)
        if not self.plain or (others and any(isinstance(x, Tensor) for x in others)):
            return [_of_the_caller(x) for x in results]
        return owned(results, (*self.given, *others))

    def value(self, others: Sequence[Any] = ()) -> Any:
        """Return what the function returned as the caller wants it."""
        shown = self.shown(self.outputs, others)
        # What was captured, not computed, belongs to others.
        return unflatten(
            self.structure,
            [np.array(x) if y.op is None and x is y.data else x for x, y in zip(shown, self.outputs, strict=True)],
        )


def _of_the_caller(x: Tensor) -> Tensor:
    """Return a result that the caller may write to: a copy of a constant of the graph, and of a view of one."""
    if x.op is None and x.data is not None and not x.requires_grad and not (x.data.shape and x.data.flags.owndata):
        return Tensor(np.array(x.data))
    return x


def owned(results: Sequence[Tensor], given: Iterable[Any]) -> list[Array]:
    """Return the results' arrays for the caller to keep and write to: copies where they are views, or shared.

    Shared with one of the arrays `given`; with each other, as both gradients of a sum are; or, if it is a single
    number, with a constant of the graph.
    """
    taken = set(map(id, given))
    arrays = []
    for x in results:
        array = x.numpy()
        if not array.shape or not array.flags.owndata or id(array) in taken:
            array = np.array(array)
        taken.add(id(array))
        arrays.append(array)
    return arrays


def linearize(
    name: str, function: Function, args: Sequence[Any], numbers: Sequence[int], kwargs: dict[str, Any] | None = None
) -> Linearized:
    """Call a function so that its result can be differentiated by the arguments `numbers`.

    Raises:
        ShapeError: there is no such argument.
        NotDifferentiableError: a leaf of such an argument, or of the result, is not of float32 or float64.
    """
    passed = list(args)
    opened: dict[int, tuple[list[Tensor], Structure]] = {}
    by_argument, structures, given = [], [], []
    grad_enabled, differentiating = STATE.grad_enabled, STATE.differentiating
    outside, level = inside_transform(), next(LEVELS)
    STATE.grad_enabled = STATE.differentiating = True
    try:
        for n in numbers:
            i = _position(name, n, args)
            if i not in opened:
                leaves, structure = flatten(args[i])
                given += leaves
                variables = [_variable(name, leaf, args, i, k, structure, level) for k, leaf in enumerate(leaves)]
                opened[i] = variables, structure
                passed[i] = variables[0] if structure is LEAF else unflatten(structure, variables)
            variables, structure = opened[i]
            by_argument.append(variables)
            structures.append(structure)
        outputs, returned = results(name, function(*passed, **kwargs) if kwargs else function(*passed))
    finally:
        STATE.grad_enabled, STATE.differentiating = grad_enabled, differentiating
    if len(opened) < len(args):
        for i, arg in enumerate(args):
            if i not in opened:
                given += flatten(arg)[0]
    path = path_between(outputs, {id(x) for variables in by_argument for x in variables}, False, level)
    plain, needed = not outside, outside
    for x in given:
        if isinstance(x, Tensor):
            plain = False
            needed = needed or x.requires_grad
    if not needed and path.below and grad_enabled and depend_on_a_leaf(path.below):
        plain, needed = False, True
    return Linearized(by_argument, structures, outputs, returned, plain, grad_enabled and needed, given, level, path)


def _position(name: str, n: int, args: Sequence[Any]) -> int:
    i = n + len(args) if n < 0 else n
    if not 0 <= i < len(args):
        raise ShapeError(f"{name}: there is no argument {n}, the function was called with {len(args)} by position")
    return i


def _variable(
    name: str, leaf: Any, args: Sequence[Any], argument: int, k: int, structure: Structure, level: int
) -> Tensor:
    """Return leaf `k` of an argument as a tensor that is differentiated by here and nowhere else."""
    x: Array | Tensor
    if leaf.__class__ is float:
        x = np.asarray(leaf, float_dtype(args))
    else:
        x = leaf if isinstance(leaf, Tensor) or leaf.__class__ is np.ndarray else plain_array(leaf)
    if x.dtype not in FLOATS:
        path = paths(structure)[k]
        place = f"argument {argument}, {path}," if path else f"argument {argument}"
        raise NotDifferentiableError(f"{name}: {place} is of {_called(leaf, x.dtype)}{_advice(x.dtype)}")
    if isinstance(x, Tensor):
        if x.level or x.data is None or STATE.trace is not None:  # a trace reads what the tensor holds by then
            return variable(x, level)
        x = x.data
    found = Tensor(x)
    found.level = level
    return found


def float_dtype(args: Sequence[Any]) -> np.dtype[Any]:
    """Return the dtype that a Python float takes among arguments: that of the first array of floats, or float64."""
    if len(args) > 1 or args[0].__class__ is not float:
        for x in flatten(args)[0]:
            if isinstance(x, (Tensor, np.ndarray, np.float32)) and x.dtype in FLOATS:
                return x.dtype
    return np.dtype(np.float64)


def _called(leaf: Any, dtype: np.dtype[Any]) -> str:
    """Name what something is: by its dtype if it is an array or made of numbers, else by its type."""
    return str(dtype) if dtype.kind in "biufc" or isinstance(leaf, np.ndarray) else f"type {type(leaf).__name__}"


def _advice(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "c":
        return ", and only real numbers are differentiated by; pass real and imaginary parts separately"
    return ", which has no derivative; use a float32 or float64 array"


def results(name: str, result: Any) -> tuple[list[Tensor], Structure]:
    """Return the leaves of what a function returned as tensors, and their structure.

    Raises:
        NotDifferentiableError: one is not of float32 or float64; names its place.
        ShapeError: there is none.
    """
    if result.__class__ is Tensor and result.dtype in FLOATS:
        return [result], LEAF
    leaves, structure = flatten(result)
    if not leaves:
        raise ShapeError(f"{name}: the function must return arrays, got {structure}")
    outputs = []
    for k, leaf in enumerate(leaves):
        x = leaf if isinstance(leaf, Tensor) or leaf.__class__ is np.ndarray else plain_array(leaf)
        whole = not isinstance(leaf, (Tensor, np.ndarray)) and x.dtype.kind == "i"  # a number, not yet of a dtype
        if x.dtype not in FLOATS and not whole:
            path = paths(structure)[k]
            place = f"the function's result, {path}," if path else "the function's result"
            raise NotDifferentiableError(f"{name}: {place} is of {_called(leaf, x.dtype)}{_advice(x.dtype)}")
        outputs.append(as_tensor(leaf))
    return outputs, structure
