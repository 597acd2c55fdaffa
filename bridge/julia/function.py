"""A programmer's own function, written in Julia, called from Python and differentiated by the Julia engine.

    from bridge import julia

    energy = julia.function("(w, x) -> sum(abs2, tanh.(w * x))")
    energy(w, x)                        # numpy arrays in, a numpy array out
    py_engine.grad(energy)(w, x)        # an op that py_engine differentiates through, to any order and in both modes

The code is run as it is: it must be as trusted as the Python that passes it. A model spec's never comes here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike, NDArray

import py_engine as pe
from bridge.julia.remote import RemoteFunction
from bridge.libjulia.functions import EmbeddedFunction, as_argument
from py_engine.errors import ConfigurationError

__all__ = ["JuliaFunction", "function", "function_file"]

Array = NDArray[Any]


def function(
    code: str, name: str = "", *, replay: bool = True, threads: int = 1, process: bool = False
) -> JuliaFunction:
    """Return a Julia function as one of Python's, which `py_engine` can differentiate.

    Args:
        code: Julia code, in which ``using TwinGrad`` holds. Its last value is the function; or
        name: the function of this name, which the code defines.
        replay: trace the function once for each combination of shapes, and replay it: fast, but its branches and
            loops are then those of the first call, and a branch on a value is an error. False runs it at every call.
        threads: of Julia, fixed for the process by whatever starts it first.
        process: run Julia in its own process, which is closed with the function. Needed where torch is imported,
            in threads, and where one Julia should not wait for another; arrays are then copied to and fro.

    Returns:
        A function of numpy arrays (or tensors of `py_engine`), float32, float64 or int64, that returns an array.
        A numpy array of shape (N, C) is a Julia array of size (C, N), its elements in the same order in memory: Julia's
        arrays are stored the other way round. Nothing that the function does to its arguments changes the caller's.
        Those of shape () and Python numbers arrive as numbers. Integers are passed as they are: as indices they count
        from 1 in Julia, and come in arrays to a function that is replayed, in which a number is one of floats.

    Raises:
        ConfigurationError: code or name is no str.
        JuliaError: the code can't be parsed or run, its value is no function, or it defines no `name`.
        JuliaUnavailableError: no Julia works here; says what to do.
    """
    check_texts(code, name)
    if process:
        return JuliaFunction(RemoteFunction.defined(code, name, replay, threads), name)
    return JuliaFunction(EmbeddedFunction.defined(code, name, replay, threads), name)


def check_texts(code: object, name: object) -> None:
    """Raise `ConfigurationError` for what is no Julia code and name."""
    for what, given in (("code", code), ("name", name)):
        if not isinstance(given, str):
            raise ConfigurationError(
                f"{what}: expected a str, found {type(given).__name__}; for the code in a file call function_file"
            )


def function_file(path: str | os.PathLike[str], name: str = "", **settings: Any) -> JuliaFunction:
    """Return the function `name` that a Julia file defines (or the file's last value); see `function`."""
    try:
        code = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{os.fspath(path)} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{os.fspath(path)} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return function(code, name, **settings)


class JuliaFunction:
    """A Julia function; see `function`.

    Its derivatives are Julia functions, too, and so can be differentiated again.
    """

    def __init__(self, backend: Any, name: str = "", like: int | None = None) -> None:
        """`like`: the argument whose shape and type the result has, where that is known."""
        self._backend = backend
        self._like = like
        self.__name__ = name or "julia_function"
        self._derivatives: dict[tuple[int | None, tuple[bool, ...]], JuliaFunction] = {}
        infer = None if like is None else lambda *args: (args[like].shape, args[like].dtype)

        def call(*given: Any) -> Array:
            return self.value(*given)

        call.__name__ = self.__name__  # error messages give it
        self._rule = pe.custom_rule(call, self._vjp, self._jvp, infer)

    def __call__(self, *args: Any) -> Any:
        """Call the function.

        Raises `JuliaError` with Julia's message for an exception in it, and `ConfigurationError` where it returns
        something other than an array or a number.
        """
        return self._rule(*args)

    def value(self, *args: ArrayLike) -> Array:
        """Call the function on arrays, without building a graph."""
        arrays = [as_argument(self.__name__, i, x) for i, x in enumerate(args)]
        found: Array = self._backend.value(arrays)
        # In Julia a number takes the precision of the arrays that it meets, and the derivative by it has that, too.
        return found if self._like is None else found.astype(arrays[self._like].dtype, copy=False)

    def pullback(self, seed: ArrayLike, *args: ArrayLike) -> tuple[Array | None, ...]:
        """Return the products of `seed`, of the result's shape, with the derivatives by each argument.

        An argument of integers has None. Raises as calling it does, and `ConfigurationError` for a seed of another
        shape.
        """
        arrays = [as_argument(self.__name__, i, x) for i, x in enumerate(args)]
        return tuple(self._backend.pullback(as_argument(self.__name__, "seed", seed), arrays))

    def derivative(self, by: int | None, needs_grad: Sequence[bool]) -> JuliaFunction:
        """Return a derivative as a Julia function; it is closed with this one.

        Args:
            by: the argument, counted from 0, whose product with a seed is wanted: a function of the arguments and then
                the seed. None: forward mode, a function of the arguments and then the tangents of those that need one.
            needs_grad: for each argument whether it is of floats, and so has a derivative.
        """
        key = (by, tuple(needs_grad))
        if key not in self._derivatives:
            if by is None:
                made = JuliaFunction(self._backend.derivative(*key), f"the tangent of {self.__name__}")
            else:
                name = f"the derivative of {self.__name__} by argument {by}"
                made = JuliaFunction(self._backend.derivative(*key), name, by)
            self._derivatives[key] = made
        return self._derivatives[key]

    def close(self) -> None:
        """Let Julia forget the function; it can't be called any more."""
        for made in self._derivatives.values():
            made.close()
        self._backend.close()

    def _vjp(self, g: Any, y: Any, *args: Any) -> tuple[Any, ...]:
        if not any(isinstance(x, pe.Tensor) for x in (g, *args)):
            return self.pullback(g, *args)
        floats = _of_floats(args)
        return tuple(self.derivative(i, floats)(*args, g) if needed else None for i, needed in enumerate(floats))

    def _jvp(self, tangents: Sequence[Any], y: Any, *args: Any) -> Any:
        floats = _of_floats(args)
        made = self.derivative(None, floats)
        given = (*args, *(t for t, needed in zip(tangents, floats, strict=True) if needed))
        found = made(*given) if any(isinstance(x, pe.Tensor) for x in given) else made.value(*given)
        return found if found.dtype == y.dtype else found.astype(y.dtype)  # see `value`


def _of_floats(args: Sequence[Any]) -> list[bool]:
    return [x.dtype.kind == "f" for x in args]
