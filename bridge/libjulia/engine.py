"""The Julia engine: whether it can be used here, and its entry points in the Julia of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint8, c_void_p
from types import SimpleNamespace
from typing import Any

from bridge.errors import JuliaUnavailableError
from bridge.libjulia import numpy_blas, start, sysimage
from bridge.libjulia.environment import ENGINE
from bridge.libjulia.find import Memory
from bridge.libjulia.precompilation import compile_engine
from bridge.libjulia.runtime import EMBEDDED, Runtime, literal

__all__ = ["SIGNATURES", "Entries", "Signature", "blas", "lacks", "load_engine", "pointers", "prepare", "versions"]


def lacks() -> str:
    """Why there is no Julia that works here, and what to do; empty when there is one."""
    return start.status().obstacle


def versions() -> dict[str, str]:
    """Of the Julia here, its backend, and which system image it starts with; nothing where there is none."""
    found = start.status().julia
    if found is None:
        return {}
    backend = start.backend(found)
    image = sysimage.usable(found)[0] if backend == EMBEDDED else None
    return (
        {"julia": found.version}
        | ({"backend": backend} if backend else {})
        | ({"sysimage": sysimage.key(image)} if image else {})
    )


def blas() -> dict[str, str]:
    """The BLAS of the Julia here, with its kernels."""
    found = start.status().julia
    return {} if found is None else {"julia": f"{found.blas} {found.kernels}".strip()}


def prepare() -> None:
    """Have the backend found out and the engine compiled before it is timed, and both results kept.

    Where Julia starts from a system image, the engine is compiled in it.
    """
    if (found := start.status().julia) is not None:
        if start.backend(found) is None:
            start.choose(found, Memory())
        if start.backend(found) != EMBEDDED or not sysimage.usable(found)[0]:
            compile_engine(found)


class Entries(SimpleNamespace):
    """The entry points of julia_engine/src/entry.jl, which describes them, by the names in `SIGNATURES`."""

    def last_message(self) -> str:
        """What the error of the last call says."""
        buffer = (c_uint8 * 4096)()
        size = min(self.message(ctypes.cast(buffer, POINTER(c_uint8)), len(buffer)), len(buffer))
        return bytes(buffer[:size]).decode("utf-8", errors="replace")


Signature = tuple[list[type[Any]], type[Any]]
"""The types of an entry point's arguments, and of its result."""

SIGNATURES: dict[str, Signature] = {
    "create": ([c_char_p, c_int64, c_void_p, c_int64], c_int64),
    "train": ([c_int64, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p], c_int),
    "evaluate": ([c_int64, c_int64, c_void_p, c_void_p, c_void_p], c_int),
    "predict": ([c_int64, c_int64, c_void_p, c_void_p], c_int),
    "gradients": ([c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p], c_int),
    "learning_rate": ([c_int64, c_double], c_int),
    "state": ([c_int64, c_void_p, c_void_p, c_void_p, c_void_p], c_int),
    "load_state": ([c_int64, c_void_p, c_void_p, c_void_p, c_void_p], c_int),
    "communicate": ([c_int64, c_int64, c_int64, c_void_p], c_int),
    "free": ([c_int64], c_int),
    "message": ([POINTER(c_uint8), c_int64], c_int64),
    "allocated": ([c_void_p], c_int),
}

_loaded: tuple[Runtime, Entries] | None = None


def load_engine(threads: int) -> tuple[Runtime, Entries]:
    """Start Julia with this many threads, unless it runs, and load the engine into it.

    Raises `JuliaUnavailableError` when Julia can't be started here, or runs with fewer threads.
    """
    global _loaded
    if _loaded is None:
        here = start.runtime(None if start.started() else threads)
        here.evaluate(f"pushfirst!(LOAD_PATH, {literal(ENGINE)}); nothing")
        if not here.evaluate(_IS_COMPILED):
            compile_engine(here.julia)
        here.evaluate("import TwinGrad; nothing")
        if addresses := numpy_blas.newer_than(str(here.evaluate("TwinGradRuntime.blas()"))):
            here.uses_numpy_blas = bool(here.evaluate(f"TwinGrad.AD.Kernels.use_blas!({addresses})"))
        _loaded = here, Entries(**pointers(here, "TwinGrad.Entry", SIGNATURES))
    here, entries = _loaded
    there = int(here.evaluate("Threads.nthreads()") or 1)
    if there < threads:
        raise JuliaUnavailableError(
            f"Julia has {there} of {threads} threads that were asked for: some versions have no more than there are "
            f"cores; ask for {there}, or, where Julia ran here already, for threads={threads} in a new process"
        )
    return here, entries


def pointers(here: Runtime, module: str, signatures: Mapping[str, Signature]) -> dict[str, Callable[..., int]]:
    """The entry points of these names in a Julia module that offers them as julia_engine/src/entry.jl does."""
    return {name: here.function_pointer(f"{module}.{name}_pointer", *types) for name, types in signatures.items()}


# Whether a TwinGrad is in the system image, or a compiled one that is not out of date among Julia's files.
_IS_COMPILED = """
let id = Base.identify_package("TwinGrad"), path = Base.locate_package(id)
    haskey(Base.loaded_modules, id) ||
        any(file -> Base.stale_cachefile(path, file) !== true, Base.find_all_in_cache_path(id))
end
"""
