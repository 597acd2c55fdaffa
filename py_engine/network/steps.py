"""How one mini-batch becomes a loss and a gradient: by replay, eagerly, or sample by sample.

`Replay` is the engine. The other two are what it is measured against in an ablation.
"""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from py_engine.ad.compile.products import (
    bytes_of,
    dtypes_of_products,
    is_one_product,
    is_product,
    operations,
    touch_buffers,
)
from py_engine.ad.compile.tape import Cost, Tape, rewritten
from py_engine.ad.memory import segments
from py_engine.ad.op import Call, Equation
from py_engine.ad.program import Program, drawing, inner_equations, prune, traced, tracing
from py_engine.ad.reverse import gradients
from py_engine.ad.state import STATE, entering, restoring
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import Array, Literal, Tensor
from py_engine.errors import ConfigurationError, NonFiniteError, ShapeError
from py_engine.network.batch_sums import BatchSums, coupling_layer, generators_of, is_batch_sum, numbered, sums
from py_engine.network.chain import Chain
from py_engine.network.layers import collect_updates
from py_engine.network.losses import Loss
from py_engine.network.parameters import FlatVector, Layout
from py_engine.network.threads import Team, Trials

Rows: TypeAlias = NDArray[np.intp]


class ThreadUse(NamedTuple):
    """How a step uses threads: how many BLAS has, and whether a team shares the large products of a whole batch."""

    blas: int
    share_products: bool = False


class Step(Protocol):
    """Computes loss and gradients of batches of one size.

    `generators` are what its runs draw random numbers from, where `draw` can do that alone. `updates` are pairs of a
    parameter that is not trained and the new value that the last run found for it.
    `threads` are the ways to use threads in a run, of which the fastest is chosen.
    """

    updates: list[tuple[Array, Array]]
    threads: Trials[ThreadUse]

    @property
    def generators(self) -> list[np.random.Generator]:
        """See above."""

    def draw(self, rows: int, last: bool) -> None:
        """Draw the random numbers of a run of this number of rows; `last`: without those that `diagnose` draws."""

    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Leave the gradient for these rows of the data in the gradient vector; return their loss."""

    def diagnose(self) -> NonFiniteError | None:
        """Explain a NaN or infinity of the last run, given that the same random numbers are drawn as in it."""


TracedStep: TypeAlias = tuple[Program, list[str], list[tuple[Tensor, Tensor]]]


@restoring
def trace_step(chain: Chain, loss: Loss, x: Tensor, y: Tensor, share: float = 1.0) -> TracedStep:
    """Trace forward and backward pass of a mini-batch as it is trained on, before anything is simplified or fused.

    Args:
        chain, loss: what is differentiated.
        x, y: symbols of the mini-batch, the inputs of the program.
        share: what the loss is multiplied by.

    Returns:
        The program; the names of the parameters that have a gradient; and pairs of a parameter that is not trained and
        its new value. The results of the program are the loss, these gradients, and these values.
    """
    with entering(grad_enabled=True), tracing() as nodes, collect_updates() as updates:
        value = _one_number(loss, loss(chain(x, training=True), y))
        if share != 1:
            value = value * share
        seed = Literal(np.ones((), value.dtype))
        found = gradients([value], [seed], _trainable(chain))
        watched = STATE.watched or ()
    _check_untrained(chain, updates)
    named = {name: g for name, g in zip(chain.parameters.trainable, found, strict=True) if g is not None}
    outputs = [value, *named.values(), *(new for _, new in updates)]
    program = traced(nodes, [x, y], outputs, watched)
    return replace(program, equations=numbered(program.equations)), list(named), updates


def _one_number(loss: Loss, value: Tensor) -> Tensor:
    """Return what a loss gave. Raises `ShapeError` if that is not one number."""
    if value.shape != ():
        name = getattr(loss, "name", getattr(loss, "__name__", "the loss"))
        raise ShapeError(f"{name}: a loss gives one number, actual shape {value.shape}")
    return value


def _check_untrained(chain: Chain, updates: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise `ConfigurationError` if a layer gives a parameter a new value that the optimizer changes, too."""
    trained = {id(chain.parameters.tensors[name]): name for name in chain.parameters.trainable}
    for parameter, _ in updates:
        if (name := trained.get(id(parameter))) is not None:
            raise ConfigurationError(
                f"{name}: a layer updates it by itself, and so does the optimizer; declare it with trainable=False"
            )


class Shard:
    """A part of a batch: its tape, which gathers nothing and allocates nothing, and its gradient vector.

    Args:
        traced: what `trace_step` gives for this part of the batch.
        part: which rows of the batch it computes.
        gradient: where the tape leaves the gradient.
        sparse: whether gradients of embeddings are left out of it, as the rows that are to be added up.

    Attributes:
        rows: for each parameter whose gradient is left sparse, the equation that would make it, its inputs' arrays.
        looked_up: those of them of which nothing but rows is used, whose numbers are ids in the samples.
        unused: the parameters that the loss does not depend on, such as an LSTM's `recurrent` in one step.
    """

    def __init__(
        self, traced: TracedStep, part: slice, gradient: FlatVector, techniques: Techniques, sparse: bool = False
    ) -> None:
        program, gradients_of, updates = traced
        named = dict(zip(gradients_of, program.outputs[1:], strict=False))
        self.unused = [name for name in gradient.arrays if name not in named]
        if sparse:  # which op makes a gradient is known only once it is fused
            program = rewritten(program, techniques)
        value, *news = program.outputs[0], *program.outputs[1 + len(named) :]
        named = dict(zip(named, program.outputs[1 : 1 + len(named)], strict=True))
        made = {id(y): equation for equation in program.equations for y in equation.outputs}
        self._sparse = {}
        for name, g in named.items():
            last = made.get(id(g))
            if sparse and last is not None and last.op.sum_rows is not None:
                self._sparse[name] = last
        self._dense = [name for name in named if name not in self._sparse]
        rows = [x for last in self._sparse.values() for x in last.inputs]
        outputs = (value, *(named[name] for name in self._dense), *rows, *news)
        program = prune(replace(program, outputs=outputs))
        self.looked_up = {name for name, last in self._sparse.items() if _is_looked_up(program, name, last)}
        self._updated = [parameter for parameter, _ in updates]
        tape = Tape(program, self._results(gradient), techniques, is_rewritten=sparse)
        self._use(tape, part, gradient)

    @property
    def generators(self) -> list[np.random.Generator]:
        """What its ops draw random numbers from, in loops and branches, too."""
        return generators_of(self.tape.program.equations)

    def beside(self, part: slice, gradient: FlatVector) -> Shard | None:
        """Return the shard of as many other rows of the batch; None if it can't be planned by this one's plan."""
        if part.stop - part.start != self.part.stop - self.part.start:
            return None
        tape = self.tape.beside(self._results(gradient))
        if tape is None:
            return None
        shard = copy.copy(self)
        shard._use(tape, part, gradient)
        return shard

    def sharing(self, team: Team) -> Shard:
        """Return this shard, in the same memory, with large products shared by a team; see `Tape.sharing`."""
        shard = copy.copy(self)
        shard.tape = self.tape.sharing(team.run, team.size)
        return shard

    def _results(self, gradient: FlatVector) -> dict[int, Array]:
        return {k + 1: gradient.arrays[name] for k, name in enumerate(self._dense)}

    def _use(self, tape: Tape, part: slice, gradient: FlatVector) -> None:
        self.tape = tape
        self.part = part
        self.gradient = gradient
        found = iter(tape.outputs[1 + len(self._dense) :])
        self.rows = {name: (last, [next(found) for _ in last.inputs]) for name, last in self._sparse.items()}
        self.updates = [(parameter.numpy(), new) for parameter, new in zip(self._updated, found, strict=True)]

    def draw(self) -> None:
        """Draw the random numbers of a run, and compute nothing else."""
        for step in self.tape.steps:
            if drawing(step.equation.op, step.equation.attrs) is not None:
                _call_all(step.calls)

    def run(self, x: Array, y: Array, rows: Rows) -> None:
        """Gather the rows of this part and replay."""
        mine = rows[self.part]
        # "clip" writes straight into the buffer, the default mode goes through a copy; the trainer checked the rows.
        x.take(mine, 0, self.tape.inputs[0], "clip")
        y.take(mine, 0, self.tape.inputs[1], "clip")
        self.tape.run()

    @property
    def summed(self) -> int:
        """The bytes of those gradients that are summed with the other shards' as they are."""
        return sum(self.gradient.arrays[name].nbytes for name in self._dense)

    @property
    def loss(self) -> float:
        """The loss of the last run, times the shard's share of the batch."""
        return self.tape.outputs[0].item()  # type: ignore[no-any-return]


class Replay:
    """Replay one tape, or one per thread with their gradients summed.

    Args:
        shards: the parts of the batch.
        batch_sums: the sums over the whole batch, if there are any.
        threads: the ways to use threads, those that use more first.
        fixed: the one among them that is kept where they round differently; by default the first.
        lazy: a parameter whose rows may be updated lazily, or None.

    Attributes:
        lazy: that parameter, if it is known which rows a run reads and changes. Its gradient is then to be all zeros
            before each run; after it only these rows are not.
    """

    def __init__(
        self,
        shards: list[Shard],
        batch_sums: BatchSums | None = None,
        threads: Sequence[ThreadUse] = (ThreadUse(blas=1),),
        fixed: ThreadUse | None = None,
        lazy: str | None = None,
    ) -> None:
        self.shards = shards
        self.updates = shards[0].updates  # from sums over the whole batch, the same in all shards
        self.uses_team = len(shards) > 1 or any(use.share_products for use in threads)
        self.threads = Trials(threads, [use.blas for use in threads], fixed)
        self._alone, self._sharing = shards[0], shards[0]
        self._batch_sums = batch_sums
        self._team: Team | None = None
        self.lazy = lazy if all(lazy in shard.looked_up for shard in shards) else None
        first, *others = shards
        self._leave: list[list[Call]] = [[] for _ in shards]
        # Steps of other lengths of sequences leave a gradient in the same vector.
        self._leave[0] += [partial(first.gradient.arrays[name].fill, 0) for name in first.unused]
        added: list[list[Call]] = [[] for _ in shards]
        for name, (last, _) in first.rows.items():
            assert last.op.sum_rows is not None
            found = [shard.rows[name][1] for shard in shards]
            zeroed = name == self.lazy
            leave, add = last.op.sum_rows(found, first.gradient.arrays[name], zeroed, **last.attrs)
            for calls, more in (*zip(self._leave, leave, strict=True), *zip(added, add, strict=False)):
                calls += more
        self._add = [partial(_call_all, calls) for calls in added if calls]
        # The sum of the others' gradients, shared out where that takes longer than to start a thread.
        dense = [part for part in _dense_parts(first.gradient.layout, first.rows) if others]
        count = len(shards) if sum(part.stop - part.start for part in dense) >= SUMS_SHARED_FROM else 1
        self._dense: list[list[Call]] = [[] for _ in range(count)]
        for part in dense:
            for calls, piece in zip(self._dense, segments(part.stop - part.start, count), strict=False):
                total, *rest = (shard.gradient.vector[part][piece] for shard in shards)
                calls += [partial(np.add, total, one, out=total) for one in rest]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that an update reads: those of all shards, and once of what they add rows to."""
        gradient, rows = self.shards[0].gradient, self.shards[0].rows
        dense = sum(gradient.vector[part].nbytes for part in _dense_parts(gradient.layout, rows))
        return len(self.shards) * dense + sum(gradient.arrays[name].nbytes for name in rows if name != self.lazy)

    def work_in(self, team: Team) -> None:
        """Run in this team's threads from now on: a shard in each, or parts of the large products of a whole batch."""
        if len(self.shards) == 1:
            self._sharing = self._alone.sharing(team)
            self.use(self.threads.way)
        self._team = team
        tape = self.shards[0].tape
        # Products that are computed at the same time have a buffer of BLAS each: have all of them in memory.
        for dtype in dtypes_of_products(tape.program.equations):
            team.run([partial(touch_buffers, dtype)] * team.size)

    @cached_property
    def generators(self) -> list[np.random.Generator]:
        """Those of all shards."""
        return [generator for shard in self.shards for generator in shard.generators]

    @property
    def runs_in_team(self) -> bool:
        """Whether threads of a team compute something of a step as it is run now, so that they are awake."""
        return len(self.shards) > 1 or (self.shards[0] is self._sharing and self._sharing is not self._alone)

    def use(self, use: ThreadUse) -> None:
        """Share the large products of a whole batch from now on, or not."""
        if len(self.shards) == 1:
            self.shards = [self._sharing if use.share_products else self._alone]

    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Gather, compute, reduce."""

        def run_shard(k: int) -> None:
            self.shards[k].run(x, y, rows)
            self._leave_for_sum(k)

        self._for_each_shard(run_shard)
        self._sum()
        return sum(shard.loss for shard in self.shards)

    def costs(self, repeats: int = 3) -> tuple[list[Cost], float]:
        """Compute again what was gathered last; return what each op of each shard takes, and the seconds of the sums.

        Of several repeats the least seconds count. All shards run at the same time, as in a step, so that their ops
        wait for memory and for the interpreter as they do there; the seconds are divided by the number of shards.
        """
        count = len(self.shards)
        runs: list[list[list[Cost]]] = [[[] for _ in range(count)] for _ in range(repeats)]
        sums = math.inf
        for of_shards in runs:

            def run_shard(k: int, of_shards: list[list[Cost]] = of_shards) -> None:
                of_shards[k] = self.shards[k].tape.costs()
                self._leave_for_sum(k)

            self._for_each_shard(run_shard)
            before = time.perf_counter()
            self._sum()
            sums = min(sums, time.perf_counter() - before)
        ops = itertools.chain.from_iterable(zip(*of_shard, strict=True) for of_shard in zip(*runs, strict=True))
        least = (min(op, key=lambda cost: cost.seconds) for op in ops)
        return [cost._replace(seconds=cost.seconds / count) for cost in least], sums

    def _leave_for_sum(self, k: int) -> None:
        """Write what a shard leaves for the sum; numpy is silent about what is not finite, as in the tape."""
        if self._leave[k]:
            with np.errstate(all="ignore"):
                _call_all(self._leave[k])

    def _for_each_shard(self, do: Callable[[int], None]) -> None:
        """Do this with each shard's number, in a thread each."""
        if len(self.shards) == 1:
            do(0)
            return
        assert self._team is not None
        with nullcontext() if self._batch_sums is None else self._batch_sums.running():
            leave = (lambda: None) if self._batch_sums is None else self._batch_sums.leave
            self._team.run([partial(self._run_shard, do, k) for k in range(len(self.shards))], leave)

    def _run_shard(self, do: Callable[[int], None], k: int) -> None:
        try:
            do(k)
        except threading.BrokenBarrierError:
            return  # another shard has failed, and says why
        except BaseException:
            if self._batch_sums is not None:
                self._batch_sums.leave()
            raise

    def _sum(self) -> None:
        """Add up the shards' gradients, in threads that have their caller's `np.errstate`."""
        if len(self.shards) == 1 and not self._add:
            return
        with np.errstate(all="ignore"):
            if len(self.shards) == 1:
                _call_all(self._add)
                return
            assert self._team is not None
            if len(self._dense) > 1:
                self._team.run([partial(_call_all, calls) for calls in self._dense])
            else:
                _call_all(self._dense[0])
            if self._add:
                self._team.run(self._add)

    def draw(self, rows: int, last: bool) -> None:
        """Those of all shards, or none."""
        for shard in () if last else self.shards:
            shard.draw()

    def diagnose(self) -> NonFiniteError | None:
        """Replay op by op."""
        reasons = (shard.tape.diagnose() for shard in self.shards)
        return next((reason for reason in reasons if reason is not None), None)


def _is_looked_up(program: Program, name: str, gradient: Equation) -> bool:
    """Whether a program uses nothing but rows of a parameter, whose numbers are ids in its first input."""
    ids = {id(program.inputs[0])}
    for equation in program.equations:
        if (equation.op.view is not None or equation.op.keeps_ids) and id(equation.inputs[0]) in ids:
            ids.update(map(id, equation.outputs))
    read = {id(x): x.data for equation in program.equations for x in equation.inputs if x.data is not None}
    matrices = [x.data for equation in program.equations for x in equation.inputs if x.name == name]
    shared = {key for key, data in read.items() if any(np.may_share_memory(data, matrix) for matrix in matrices)}
    readers = [equation for equation in program.equations if not shared.isdisjoint(map(id, equation.inputs))]
    numbers = [x for equation in (*readers, gradient) for x in equation.inputs if x.dtype.kind == "i"]
    return all(equation.op.reads_rows for equation in readers) and all(id(x) in ids for x in numbers)


def _call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _dense_parts(layout: Layout, without: Collection[str]) -> list[slice]:
    """The pieces of a vector that hold other tensors than those of these names."""
    parts: list[slice] = []
    starts = [*layout.offsets.values(), layout.size]
    for name, start, stop in zip(layout.offsets, starts, starts[1:], strict=False):
        if name in without or start == stop:
            continue
        if parts and parts[-1].stop == start:
            start = parts.pop().start
        parts.append(slice(start, stop))
    return parts


class Eager:
    """Build the graph, differentiate and forget it at every step, as an engine without replay does."""

    def __init__(self, chain: Chain, loss: Loss, gradient: FlatVector, threads: int) -> None:
        self.threads = Trials([ThreadUse(blas=threads)])
        self._chain = chain
        self._loss = loss
        self._gradient = gradient
        self.updates: list[tuple[Array, Array]] = []

    @restoring
    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Run the model's Python code on these rows."""
        with entering(grad_enabled=True), collect_updates() as updates:
            value = _one_number(self._loss, self._loss(self._chain(Tensor(x[rows]), training=True), Tensor(y[rows])))
        _check_untrained(self._chain, updates)
        with entering(grad_enabled=False):
            found = gradients([value], [Literal(np.ones((), value.dtype))], _trainable(self._chain))
        self.updates = [(parameter.numpy(), new.numpy().copy()) for parameter, new in updates]
        for g, view in zip(found, self._gradient.arrays.values(), strict=True):
            view[...] = 0 if g is None else g.numpy()
        return value.item()

    @property
    def generators(self) -> list[np.random.Generator]:
        """Not known."""
        return []

    def draw(self, rows: int, last: bool) -> None:
        """Nothing: it makes no diagnosis."""

    def diagnose(self) -> NonFiniteError | None:
        """Nothing was kept that could tell which op it was."""
        return NonFiniteError("the eager step does not keep where it arose; switch the technique replay on")


class SampleBySample:
    """One pass for each sample of the batch, the gradients accumulated, as without vectorisation."""

    def __init__(self, shard: Shard, total: FlatVector, threads: int) -> None:
        self.threads = Trials([ThreadUse(blas=threads)])
        self._shard = shard
        self._total = total
        self.updates: list[tuple[Array, Array]] = []

    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Add up losses and gradients, then divide by the number of samples."""
        self._total.vector[...] = 0
        loss = 0.0
        for i in range(len(rows)):
            self._shard.run(x, y, rows[i : i + 1])
            np.add(self._total.vector, self._shard.gradient.vector, out=self._total.vector)
            loss += self._shard.loss
        np.multiply(self._total.vector, 1 / len(rows), out=self._total.vector)
        return loss / len(rows)

    @cached_property
    def generators(self) -> list[np.random.Generator]:
        """Those of a pass."""
        return self._shard.generators

    def draw(self, rows: int, last: bool) -> None:
        """Those of a pass for each row, but the last one's."""
        for _ in range(rows - last):
            self._shard.draw()

    def diagnose(self) -> NonFiniteError | None:
        """Explain the last sample's pass, if that is where it arose."""
        return self._shard.tape.diagnose() or NonFiniteError("it arose in one sample of the batch before the last")


@restoring
def make_step(
    chain: Chain,
    loss: Loss,
    x: Array,
    y: Array,
    samples: int,
    gradient: FlatVector,
    threads: int,
    techniques: Techniques,
    lazy: str | None = None,
) -> Step:
    """Return the step for batches of `samples` rows that the techniques choose.

    With more than one thread the batch is split into one shard for each where `techniques.split_batch` says so, or
    that is "auto" and `splitting_pays`. A step that `uses_team` is to be given one before it runs. For `lazy` see
    `Replay`.
    """
    if not techniques.batched:
        if chain.couples_batch:
            raise ConfigurationError(
                f"layer {chain.couples_batch!r} needs a whole batch, so that it can't be trained sample by sample; "
                "switch the technique batched on"
            )
        if not loss.is_mean:
            raise ConfigurationError(
                f"{loss.name} is not known to be a mean over the targets, so that it can't be trained sample by "
                "sample: say so (is_mean=True) if it is, or switch the technique batched on"
            )
        if loss.couples_batch:
            raise ConfigurationError(
                f"{loss.name} with {' and '.join(loss.settings)} is the mean of a whole batch by weights, so that "
                "it can't be trained sample by sample; switch the technique batched on"
            )
        one = _traced(chain, loss, x, y, 1, techniques, 1)
        if one[2]:
            raise ConfigurationError(
                "a layer updates a parameter by itself in training, so that it can't be trained sample by sample; "
                "switch the technique batched on"
            )
        if (name := coupling_op(one[0].equations)) is not None:
            raise ConfigurationError(
                f"the op {name!r} needs a whole batch, so that it can't be trained sample by sample; "
                "switch the technique batched on"
            )
        if (name := coupling_layer(chain, x, samples, training=True)) is not None:
            raise ConfigurationError(
                f"in layer {name!r} the samples of a batch affect each other, so that it can't be trained sample by "
                "sample; switch the technique batched on"
            )
        return SampleBySample(Shard(one, slice(0, 1), gradient.zeros_like(), techniques), gradient, threads)
    if not techniques.replay:
        return Eager(chain, loss, gradient, threads)
    trace = partial(_traced, chain, loss, x, y, samples, techniques)
    whole = trace(samples)
    may_split = threads > 1 and samples >= 2 * threads and chain.splits and loss.is_mean
    if may_split and (techniques.split_batch is True or (techniques.split_batch and _may_pay(whole[0]))):
        batch_sums = BatchSums(threads, samples) if chain.couples_batch or loss.couples_batch else None
        with entering(one_blas_thread=True):
            split = _split(trace, whole[0], samples, threads, batch_sums, gradient, techniques, lazy)
        if split is not None and coupling_layer(chain, x, samples, training=True) is None:
            return split
    everything = slice(0, samples)
    with entering(one_blas_thread=threads == 1):
        shard = Shard(whole, everything, gradient, techniques, sparse=lazy is not None)
    large = shard.tape.large_products()
    shares = threads > 1 and bool(techniques.split_batch) and 0 < SHARED_FROM * len(large) <= gradient.layout.size
    all_threads = ThreadUse(blas=1, share_products=True) if shares else ThreadUse(blas=threads)
    if shares:
        with entering(one_blas_thread=True):
            shard = shard.beside(everything, gradient) or shard  # without tiles where it can be bound only once
    one_thread = ThreadUse(blas=1)
    ways, fixed = [all_threads], all_threads
    if techniques.split_batch == "auto" and all_threads != one_thread:
        largest = math.inf if shares else _largest_product(shard.tape)
        if not shares and _operations_per_call(shard.tape) < OPERATIONS_PER_CALL:
            largest = 0.0
        ways = [all_threads, one_thread] if largest > SMALL_PRODUCT else [one_thread]
        fixed = all_threads if largest > LARGE_PRODUCT else one_thread
    return Replay([shard], threads=ways, fixed=fixed, lazy=lazy)


def _largest_product(tape: Tape) -> float:
    """Operations of the op that multiplies most, or of one step's product where it has many."""
    found = [0.0]
    for step in tape.steps:
        if step.equation.op.steps:
            products = (call.args for call in step.calls if is_product(call))
            found += [2.0 * out.size * a.shape[-1] for a, _, out in products]
        elif step.equation.op.product:
            found.append(step.equation.flops)
    return max(found)


def _operations_per_call(tape: Tape) -> float:
    """Operations of all products for each call of a step."""
    calls = [call for step in tape.steps for call in step.calls]
    return sum(map(operations, calls)) / max(1, len(calls))


@restoring
def _traced(
    chain: Chain, loss: Loss, x: Array, y: Array, samples: int, techniques: Techniques, size: int
) -> TracedStep:
    """Trace the step of `size` rows of a batch of `samples`; their loss counts by their share of it."""
    inputs = [Tensor.symbol((size, *a.shape[1:]), a.dtype, name) for a, name in ((x, "x"), (y, "y"))]
    share = 1.0 if loss.couples_batch else size / samples  # a loss that couples the batch divides by all of it
    with entering(techniques=techniques):
        return trace_step(chain, loss, inputs[0], inputs[1], share)


def _split(
    trace: Callable[[int], TracedStep],
    whole: Program,
    samples: int,
    threads: int,
    batch_sums: BatchSums | None,
    gradient: FlatVector,
    techniques: Techniques,
    lazy: str | None,
) -> Replay | None:
    """Return the step of a batch in one part for each thread, or None where it is better left whole.

    Args:
        trace: gives the step of a part with this number of rows.
        whole: the program of the whole batch.
        samples: the rows of that.
        threads: how many parts there are.
        batch_sums: the sums over the whole batch, if its samples affect each other.
        gradient: where the gradient goes.
        techniques: what to do to be fast.
        lazy: see `Replay`.
    """
    ends = [samples * (k + 1) // threads for k in range(threads)]
    shards: list[Shard] = []
    for k, part in enumerate(map(slice, [0, *ends], ends)):
        # Of these vectors' memory only what a tape writes is ever touched, and so taken: not a matrix of embeddings.
        into = gradient if k == 0 else gradient.zeros_like()
        shard = shards[0].beside(part, into) if shards else None
        if shard is None:
            with nullcontext() if batch_sums is None else batch_sums.tracing(k, part.stop - part.start):
                traced = trace(part.stop - part.start)
            if _keeps_of_its_rows(traced):
                return None
            shard = Shard(traced, part, into, techniques, sparse=techniques.sparse_rows)
            equations = [step.equation for step in shard.tape.steps]
            if coupling_op(equations) is not None:
                return None
            decides = not shards and techniques.split_batch == "auto"
            if decides and not splitting_pays(shard, threads, _growth(traced[0], whole)):
                return None
        shards.append(shard)
    if len({tuple(sums([step.equation.attrs for step in shard.tape.steps])) for shard in shards}) > 1:
        return None  # they would wait for each other
    drawn_from = [id(generator) for shard in shards for generator in shard.generators]
    if len(set(drawn_from)) < len(drawn_from):
        return None  # which of them draws first would be chance
    return Replay(shards, batch_sums, lazy=lazy)


def coupling_op(equations: Iterable[Equation]) -> str | None:
    """Return the name of the first op that needs a whole batch, but for sums over its parts outside of loops."""
    for equation in equations:
        for step in (equation, *inner_equations(equation)):
            if step.op.couples_batch and not (step is equation and is_batch_sum(step.attrs)):
                return step.op.name
    return None


def _keeps_of_its_rows(traced: TracedStep) -> bool:
    """Whether a step may give parameters values that are of its rows, or of their number, and not of sums over all."""
    program, _, updates = traced
    of_rows, of_sums = {id(x) for x in program.inputs}, set[int]()
    for equation in program.equations:
        is_sum, outputs = is_batch_sum(equation.attrs), [id(x) for x in equation.outputs]
        if not is_sum and any(id(x) in of_rows for x in equation.inputs):
            of_rows.update(outputs)
        if is_sum or any(id(x) in of_sums for x in equation.inputs):
            of_sums.update(outputs)
    new = [id(x) for x in program.outputs[len(program.outputs) - len(updates) :]]
    return any(x in of_rows or x not in of_sums for x in new)


def _trainable(chain: Chain) -> list[Tensor]:
    parameters = chain.parameters
    return [parameters.tensors[name] for name in parameters.trainable]


SPLIT_FROM = 100 * 1024
"""Bytes that a call must move on average, products' left out, before it pays to split a batch over threads: each call
then costs 2 to 4 µs more, for the interpreter's lock. Measured on networks of 60 to 5,000 calls a step."""

SHARED_FROM = 200_000
"""Elements of the gradient, for each large product, from which on a team shares them and not the threads of BLAS.

At each product that a team shares its threads wake up, which takes 0.1 to 0.2 ms; those of BLAS wait busily between
products, and slow down the threads that update, by 1 ns for each element. Measured with dense layers of 256 to 2,048
units and LSTMs of 384 to 1,024."""

SMALL_PRODUCT = 3_000_000
"""Operations of the largest product up to which a batch that stays whole has one thread: a second one in BLAS takes as
long to wake as it saves. Measured with one sample: up to here two threads take 0.94 to 1.34 times the time of one."""

LARGE_PRODUCT = 20_000_000
"""Operations of the largest product up to which a whole batch has one thread where several round in another way, so
that no measurement may decide. Measured on two processors that are near each other at times and far at others: with 8
million operations two threads take 0.96 to 2.4 times the time of one, with 25 to 100 million 0.7 to 1.1 times."""

OPERATIONS_PER_CALL = 200_000
"""Operations of a step's products, for each of its calls, from which on threads of BLAS may compute a whole batch: with
fewer they wait most of the time, busily. Measured with recurrent networks: with 100,000 to 140,000 two threads take
1.0 to 1.2 times the time of one (LSTM and GRUs of 64 units, 16 samples), with 350,000 to 550,000 0.7 to 0.8 times."""

SUMS_SHARED_FROM = 1 << 18
"""Elements of a gradient from which on threads share the sum over the parts of a batch: 3 MB are moved then."""

OPERATIONS_PER_BYTE = 20
"""Of a product in parts: how many operations cost as much as moving a byte. With kernels for AVX-512, LSTMs of 256
units with 16 and 64 samples are faster split, and one of 64 units with 64 samples is not."""

GRADIENT_MOVES = 3
"""How often each further thread moves a gradient that all threads have: its products read the weight and write its
gradient, and of the sum, which reads two gradients and writes one, each thread computes a part. Measured where that is
what splitting costs: with 7.6 times the bytes of the gradient to spread over two threads (LeNet-5 of 16 times the
width, 16 samples) a step takes 0.73 times as long split, with 3.8 times (8 samples) 0.94."""


def splitting_pays(shard: Shard, threads: int, growth: Mapping[int, float]) -> bool:
    """Whether one such part of the batch for each thread takes less time than the whole batch.

    In a whole batch only the products are spread over threads; splitting spreads all other calls, too, and the
    gathering of the rows, but each thread then computes its own gradients, which are summed. So it pays where
    everything but the products moves more bytes than summing the gradients does (of embeddings only the gathered rows
    are summed), and where that is enough for the number of calls, each of which waits for the interpreter's lock: a
    recurrent network makes thousands of short ones, and at each of its steps every thread reads all weights, however
    few samples it has (measured with LSTMs of 256 and 512 units and 16 samples). Its products, where BLAS computes them
    in parts without copies, cost as much as their operations, which splitting spreads. So do those of a convolution,
    which are many small ones with copies and sums between them, of which BLAS's threads gain little; they only count
    against summing the gradients (measured with LeNet-5 of 16 times the width: 16 and 64 samples take 0.73 and 0.55
    times as long split). It follows from shapes and from BLAS's kernels alone: the same network gives the same numbers
    in every run.

    Args:
        shard: a part of the batch.
        threads: how many such parts there are.
        growth: how many times as large each of its variables is in the whole batch, see `_growth`.
    """
    growth = dict(growth)
    moved = 2.0 * threads * sum(a.nbytes for a in shard.tape.inputs)  # by gathering the rows
    within = 0.0  # what products of many calls cost, in bytes
    calls = read = 0
    for step in shard.tape.steps:
        inputs, outputs = step.equation.inputs, step.equation.outputs
        # What the tape made of the traced ops grows as what it reads; not so a product of samples, summed over them.
        grown = [growth.get(id(x), 1.0) for x in inputs]
        own = 1.0 if step.equation.op.product and min(grown) > 1 else max(grown, default=1.0)
        growth.update((id(y), growth.get(id(y), own)) for y in outputs)
        calls += len(step.calls)
        if step.equation.op.steps:
            moved += own * sum(bytes_of(call) for call in step.calls if not is_product(call))
            products = [call.args for call in step.calls if is_product(call)]
            read += sum(b.nbytes for _, b, _ in products)
            multiplied = sum(2 * out.size * a.shape[-1] for a, b, out in products if b.ndim > a.ndim)
            moved += own * multiplied / OPERATIONS_PER_BYTE
        elif step.equation.op.product and not is_one_product(step.calls):
            moves = sum(bytes_of(call) for call in step.calls if not is_product(call))
            multiplied = sum(map(operations, step.calls))
            within += max(grown, default=1.0) * (moves + multiplied / OPERATIONS_PER_BYTE)
        elif step.calls and not step.equation.op.product:
            moved += sum(x.nbytes * growth.get(id(x), 1.0) for x in (*inputs, *outputs))
    spreads = moved > max(SPLIT_FROM * calls, threads * read / 2)
    return spreads and moved + within > GRADIENT_MOVES * threads * shard.summed


def _growth(part: Program, whole: Program) -> dict[int, float]:
    """Return how many times as large a variable of a part of a batch is in the whole batch, by its id.

    Both were traced from the same layers, so that they have the same ops, but for the sums over parts.
    """
    equations = [step for step in part.equations if not is_batch_sum(step.attrs)]
    pairs = [*zip(part.inputs, whole.inputs, strict=True)]
    if [step.op.name for step in equations] == [step.op.name for step in whole.equations]:
        for mine, step in zip(equations, whole.equations, strict=True):
            pairs += zip(mine.outputs, step.outputs, strict=True)
    return {id(x): y.size / x.size for x, y in pairs if x.size}


def _may_pay(whole: Program) -> bool:
    """Whether splitting may pay, from what was traced, which spares planning a part of the batch where it can't.

    What is planned makes about one call of each op or more, but of views none, and they move about what the ops do.
    """
    computed = [step for step in whole.equations if step.op.view is None]
    read = sum(x.nbytes for x in whole.inputs)
    spread = [step for step in computed if not (step.op.product and all(x.ndim <= 2 for x in step.inputs))]
    moved = sum(x.nbytes for step in spread for x in (*step.inputs, *step.outputs))
    return 2 * read + moved > SPLIT_FROM * len(computed)
