"""Sums over a batch whose samples are split over threads: what batch normalisation needs of the other threads' samples.

Each thread replays its own tape. Where a layer sums over the batch, the tapes wait at a barrier: every one
writes its part of the sum, waits for the others, and adds up all parts in the same order, so that all have the same
bits.

A layer of a user's own may couple the samples by ordinary ops, such as a mean over the batch, and not say so:
`coupling_layer` finds it, by what it computes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from py_engine.ad.op import Call, Equation, Op, Scratch, Shape
from py_engine.ad.ops.shape import leading
from py_engine.ad.program import Program, inner_equations, prune, trace
from py_engine.ad.state import collecting, entering, restoring, scope
from py_engine.ad.tensor import Array, Tensor
from py_engine.ad.transforms import vjp
from py_engine.errors import NotDifferentiableError, ShapeError
from py_engine.network.chain import Chain
from py_engine.network.layers import Layer, is_users_own, tracing_aside


class BatchSums:
    """Where the tapes of all threads, one for each part of a batch of `samples`, leave parts of sums and add them.

    Outside a run of all of them a tape waits for nobody: it adds what the others have left last.
    """

    def __init__(self, threads: int, samples: int) -> None:
        self.samples = samples
        self._barrier = threading.Barrier(threads)
        self._parts: dict[int, list[Array | None]] = {}
        self._sums = [0] * threads
        self._running = False

    @contextmanager
    def tracing(self, thread: int, samples: int) -> Iterator[None]:
        """Trace the tape of this thread for `samples` samples inside: sums over the batch are sums over all parts."""
        _CURRENT.batch_sums, _CURRENT.thread, _CURRENT.samples = self, thread, samples
        try:
            yield
        finally:
            _CURRENT.batch_sums = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all tapes inside, each in its thread."""
        self._barrier.reset()
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def leave(self) -> None:
        """Let nobody wait for this thread: its tape has failed."""
        self._barrier.abort()

    def next_sum(self, thread: int) -> int:
        """The number of the next sum that this thread's tape makes; sums of one number are one sum."""
        self._sums[thread] += 1
        return self._sums[thread]

    def calls(self, x: Array, out: Array, thread: int, number: int) -> Sequence[Call]:
        """The calls that leave `x` and compute the sum of all parts in `out`."""
        parts = self._parts.setdefault(number, [None] * self._barrier.parties)
        mine = parts[thread] = np.zeros_like(x)
        return [partial(np.copyto, mine, x), partial(self._wait), partial(_add, parts, out)]

    def _wait(self) -> None:
        if self._running:
            self._barrier.wait()


def _add(parts: Sequence[Array | None], out: Array) -> None:
    out.fill(0)
    for part in parts:
        if part is not None:
            np.add(out, part, out)


class _Current(threading.local):
    batch_sums: BatchSums | None = None
    thread: int = 0
    samples: int = 0


_CURRENT = _Current()


def sum_of_parts(x: Tensor) -> Tensor:
    """Return the sum of `x` over all parts of the batch; `x` itself where the batch is not split."""
    batch_sums, thread = _CURRENT.batch_sums, _CURRENT.thread
    if batch_sums is None:
        return x
    return SUM_OF_PARTS(x, batch_sums=batch_sums, thread=thread, number=batch_sums.next_sum(thread))


def samples_of(x: Tensor) -> int:
    """Return how many samples `x` (samples, ...) would have for the whole batch, of all or a part of which it is.

    It may hold several for each sample of the batch, such as its steps in time.

    Raises:
        ShapeError: it holds no whole number of them for each.
    """
    if _CURRENT.batch_sums is None:
        return len(x)
    several, rest = divmod(len(x), _CURRENT.samples)
    if rest:
        raise ShapeError(
            f"statistics of {len(x)} samples, for a part of {_CURRENT.samples} of a batch, are not those of a whole "
            "one; switch the technique split_batch off"
        )
    return several * _CURRENT.batch_sums.samples


def is_batch_sum(attrs: Mapping[str, Any]) -> bool:
    """Whether an op with these attributes is a sum over all parts of a batch."""
    return isinstance(attrs.get("batch_sums"), BatchSums)


def sums(attrs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the sums of a tape over the batch, in order, from its ops' attributes."""
    return [at["number"] for at in attrs if is_batch_sum(at)]


def numbered(equations: Sequence[Equation]) -> tuple[Equation, ...]:
    """Return the ops with their sums over parts numbered from 1: an op that a checkpoint repeats is another sum."""
    numbers = itertools.count(1)
    return tuple(
        replace(step, attrs={**step.attrs, "number": next(numbers)}) if is_batch_sum(step.attrs) else step
        for step in equations
    )


def _bind(
    arrays: Sequence[Array], out: Array, scratch: Scratch, batch_sums: BatchSums, thread: int, number: int
) -> Any:
    return batch_sums.calls(arrays[0], out, thread, number)


def _infer(x: Tensor, batch_sums: BatchSums, thread: int, number: int) -> tuple[Shape, Any]:
    return x.shape, x.dtype


SUM_OF_PARTS = Op(
    name="sum_of_parts",
    infer=_infer,
    bind=_bind,
    vjp=(lambda g, y, x, **at: sum_of_parts(g),),
    batch=leading,
    couples_batch=True,
    doc="the sum over all parts of a batch that is split over threads",
)


# Layers that couple a batch and do not say so --------------------------------------------------------------


def generators_of(equations: Iterable[Equation]) -> list[np.random.Generator]:
    """Return what ops draw random numbers from, in loops and branches, too; each once."""
    steps = (one for step in equations for one in (step, *inner_equations(step)))
    values = (value for step in steps for value in step.attrs.values())
    return list({id(value): value for value in values if isinstance(value, np.random.Generator)}.values())


@restoring
def coupling_layer(chain: Chain, x: Array, samples: int, training: bool) -> str | None:
    """Return the id of the first layer in which the samples of a batch affect each other in an undeclared way, or None.

    The engine's own layers are known; each other one, and each that holds one, is traced and computed several times, of
    a batch of which some samples stay the same and others do not. What it declares are sums over the batch, each a
    `sum_of_parts`: these may have any value. In training its gradient by the samples is looked at, too.

    Args:
        chain: the model, which is not changed.
        x: data (N, ...), of which ids are taken.
        samples: how many a batch has.
        training: whether the layers are computed as in training.
    """
    own = [name for name, layer in chain.layers.items() if is_users_own(layer)]
    if not own or samples < 2:
        return None
    found: list[str] = []

    def look(name: str, layer: Layer, given: Sequence[tuple[Shape, bool]]) -> tuple[Shape, bool]:
        shape = layer.output_shape(layer.merged_shape([shape for shape, _ in given]))
        if name in own and not found and _couples(chain, name, given, shape, x, samples, training):
            found.append(name)
        return shape, layer.only_moves and all(are_ids for _, are_ids in given)

    chain.through((x.shape[1:], x.dtype.kind != "f"), look)
    return found[0] if found else None


def _couples(
    chain: Chain, name: str, given: Sequence[tuple[Shape, bool]], shape: Shape, x: Array, samples: int, training: bool
) -> bool:
    """Whether samples affect each other in this layer, whose inputs have these shapes and are ids or not."""
    program = _traced_alone(chain, name, given, shape, samples, training)
    sums = [step for step in program.equations if is_batch_sum(step.attrs)]
    kept = tuple([step for step in program.equations if not is_batch_sum(step.attrs)])
    program = prune(Program((*program.inputs, *(step.output for step in sums)), kept, program.outputs))
    fixed = [np.full(step.output.shape, samples, step.output.dtype) for step in sums]
    random = np.random.default_rng(0)
    rows = np.arange(samples)
    for low, high in ((-3.0, 3.0), (0.1, 0.9)):  # the second for layers that take positive numbers or shares alone

        def draw(wanted: Tensor, low: float = low, high: float = high) -> Array:
            ids = wanted.dtype.kind != "f"
            return random.choice(x.ravel(), wanted.shape) if ids else random.uniform(low, high, wanted.shape)

        wanted = program.inputs[: len(program.inputs) - len(sums)]
        first, second = ([draw(a).astype(a.dtype) for a in wanted] for _ in range(2))
        expected = _computed(program, [*first, *fixed])
        for stays in (rows < samples // 2, rows >= samples // 2, rows % 2 == 0, rows % 2 == 1):
            mixed = [np.where(stays.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(first, second, strict=True)]
            found = _computed(program, [*mixed, *fixed])
            if expected is None or found is None:
                return True  # nobody knows
            if any(len(y) != samples or _differ(y[stays], z[stays]) for y, z in zip(expected, found, strict=True)):
                return True
    return False


def _traced_alone(
    chain: Chain, name: str, given: Sequence[tuple[Shape, bool]], shape: Shape, samples: int, training: bool
) -> Program:
    """Return the program of a layer, with its gradient by the samples in training, where it has one.

    Its inputs are the layer's, and the cotangent of the result. The streams of dropout layers are left as they are.
    """
    layer, dtype = chain.layers[name], chain.parameters.dtype
    parameters = {local: chain.parameters.tensors[f"{name}.{local}"] for local in layer.parameters()}
    inputs = [Tensor.symbol((samples, *of), np.int64 if ids else dtype) for of, ids in given]
    seed = Tensor.symbol((samples, *shape), dtype)

    def forward(*floats: Tensor) -> Tensor:
        rest = iter(floats)
        with scope(name):
            merged = layer.merge([a if ids else next(rest) for a, (_, ids) in zip(inputs, given, strict=True)])
            return layer(merged, parameters, training)

    floats = [a for a, (_, ids) in zip(inputs, given, strict=True) if not ids]

    def with_gradient(*_: Tensor) -> list[Tensor]:
        y, pullback = vjp(forward, *floats)
        return [y, *pullback(seed)]

    sums = BatchSums(1, samples).tracing(0, samples) if training and chain.couples_batch else nullcontext()
    with sums, tracing_aside({name: layer}), collecting("updates"), entering(grad_enabled=True):
        if training and floats:
            try:
                return trace(with_gradient, [*inputs, seed])
            except NotDifferentiableError:
                pass  # it is not differentiated by its samples
        return trace(lambda *_: [forward(*floats)], [*inputs, seed])


def _computed(program: Program, inputs: Sequence[Array]) -> list[Array] | None:
    """Return what a program gives, with the random numbers that it would draw next; None if it can't be computed."""
    before = [
        (generator.bit_generator, generator.bit_generator.state) for generator in generators_of(program.equations)
    ]
    try:
        with entering(grad_enabled=False), np.errstate(all="ignore"):
            return [y.numpy() for y in program([Tensor(a) for a in inputs])]
    except (ArithmeticError, ValueError):
        return None  # such as of a matrix that must be positive definite
    finally:
        for bits, state in before:
            bits.state = state


def _differ(y: Array, z: Array) -> bool:
    """Whether they differ by more than rounding, or nothing in them is a number."""
    if y.dtype.kind != "f":
        return not np.array_equal(y, z)
    finite = np.isfinite(y)
    if y.size and not finite.any():
        return True
    near = 100 * np.finfo(y.dtype).eps * np.abs(y[finite]).max(initial=0.0)
    return not np.array_equal(finite, np.isfinite(z)) or bool((np.abs(y[finite] - z[finite]) > near).any())
