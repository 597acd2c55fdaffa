"""How one mini-batch becomes a loss and a gradient: by replay, eagerly, or sample by sample.

`Replay` is the engine. The other two are what it is measured against in an ablation.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from py_engine.ad.compile.products import dtypes_of_products, touch_buffers
from py_engine.ad.compile.tape import Tape, rewritten
from py_engine.ad.op import Call
from py_engine.ad.program import Program, prune, traced, tracing
from py_engine.ad.reverse import gradients
from py_engine.ad.state import STATE, entering, restoring
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import Array, Literal, Tensor
from py_engine.errors import ConfigurationError, NonFiniteError
from py_engine.network.chain import Chain
from py_engine.network.layers import collect_updates
from py_engine.network.losses import Loss
from py_engine.network.meeting import Meeting, sums
from py_engine.network.parameters import FlatVector, Layout
from py_engine.network.threads import Team

Rows: TypeAlias = NDArray[np.intp]


class Step(Protocol):
    """Computes loss and gradients of batches of one size.

    `updates` are pairs of a parameter that is not trained and the new value that the last run found for it.
    `blas_threads` is how many threads BLAS is to have in a run; None: all that there are.
    """

    updates: list[tuple[Array, Array]]
    blas_threads: int | None

    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Leave the gradient for these rows of the data in the gradient vector; return their loss."""

    def diagnose(self) -> NonFiniteError | None:
        """Explain a NaN or infinity of the last run."""


@restoring
def trace_step(
    chain: Chain, loss: Loss, x: Tensor, y: Tensor, share: float = 1.0
) -> tuple[Program, list[str], list[tuple[Tensor, Tensor]]]:
    """Trace forward and backward pass of a mini-batch as it is trained on, before anything is simplified or fused.

    Args:
        chain, loss: what is differentiated.
        x, y: symbols of the mini-batch, the inputs of the program.
        share: what the loss is multiplied by.

    Returns:
        The program; the names of the parameters that have a gradient; and pairs of a parameter that is not trained and
        its new value. The results of the program are the loss, these gradients, and these values.
    """
    with tracing() as nodes, collect_updates() as updates:
        value = loss(chain(x, training=True), y)
        if share != 1:
            value = value * share
        seed = Literal(np.ones((), value.dtype))
        found = gradients([value], [seed], _trainable(chain))
        watched = STATE.watched or ()
    named = {name: g for name, g in zip(chain.parameters.trainable, found, strict=True) if g is not None}
    outputs = [value, *named.values(), *(new for _, new in updates)]
    return traced(nodes, [x, y], outputs, watched), list(named), updates


class Shard:
    """A part of a batch: its tape, which gathers nothing and allocates nothing, and its gradient vector.

    Args:
        chain, loss: what is differentiated.
        x, y: the data, for its shapes and dtypes.
        part: which rows of a batch of `samples` this shard computes; its loss counts by its share of them.
        gradient: where the tape leaves the gradient.
        sparse: whether gradients of embeddings are left out of it, as the rows that are to be added up.
        meeting, thread: where the shards of a batch meet whose samples affect each other, and which of them this is.

    Attributes:
        rows: for each parameter whose gradient is left sparse, the equation that would make it, its inputs' arrays.
    """

    def __init__(
        self,
        chain: Chain,
        loss: Loss,
        x: Array,
        y: Array,
        part: slice,
        samples: int,
        gradient: FlatVector,
        techniques: Techniques,
        sparse: bool = False,
        meeting: Meeting | None = None,
        thread: int = 0,
    ) -> None:
        size = part.stop - part.start
        inputs = [Tensor.symbol((size, *a.shape[1:]), a.dtype, name) for a, name in ((x, "x"), (y, "y"))]
        with nullcontext() if meeting is None else meeting.tracing(thread):
            share = 1.0 if loss.couples_batch else size / samples  # a loss that couples the batch divides by all of it
            program, gradients_of, updates = trace_step(chain, loss, inputs[0], inputs[1], share)
        named = dict(zip(gradients_of, program.outputs[1:], strict=False))
        if sparse:  # which op makes a gradient is known only once it is fused
            program = rewritten(program, techniques)
        value, *news = program.outputs[0], *program.outputs[1 + len(named) :]
        named = dict(zip(named, program.outputs[1 : 1 + len(named)], strict=True))
        made = {id(y): equation for equation in program.equations for y in equation.outputs}
        rows = {}
        for name, g in named.items():
            last = made.get(id(g))
            if sparse and last is not None and last.op.sum_rows is not None:
                rows[name] = last
        dense = [name for name in named if name not in rows]
        outputs = [value, *(named[name] for name in dense), *(x for last in rows.values() for x in last.inputs)]
        program = prune(replace(program, outputs=(*outputs, *news)))
        self.part = part
        self.gradient = gradient
        results = {k + 1: gradient.arrays[name] for k, name in enumerate(dense)}
        self.tape = Tape(program, results, techniques)
        found_rows = iter(self.tape.outputs[1 + len(dense) : len(outputs)])
        self.rows = {name: (last, [next(found_rows) for _ in last.inputs]) for name, last in rows.items()}
        computed = self.tape.outputs[len(outputs) :]
        self.updates = [(parameter.numpy(), new) for (parameter, _), new in zip(updates, computed, strict=True)]

    def run(self, x: Array, y: Array, rows: Rows) -> None:
        """Gather the rows of this part and replay."""
        mine = rows[self.part]
        # "clip" writes straight into the buffer, the default mode goes through a copy; the trainer checked the rows.
        x.take(mine, 0, self.tape.inputs[0], "clip")
        y.take(mine, 0, self.tape.inputs[1], "clip")
        self.tape.run()

    @property
    def loss(self) -> float:
        """The loss of the last run, times the shard's share of the batch."""
        return self.tape.outputs[0].item()  # type: ignore[no-any-return]


class Replay:
    """Replay one tape, or one per thread with their gradients summed."""

    def __init__(self, shards: list[Shard], team: Team | None, meeting: Meeting | None = None) -> None:
        self.shards = shards
        self.updates = shards[0].updates  # from sums over the whole batch, the same in all shards
        self._meeting = meeting
        self._team = team
        self.blas_threads: int | None = None if team is None else 1
        first, *others = shards
        self._leave: list[list[Call]] = [[] for _ in shards]
        added: list[list[Call]] = [[] for _ in shards]
        for name, (last, _) in first.rows.items():
            assert last.op.sum_rows is not None
            found = [shard.rows[name][1] for shard in shards]
            leave, add = last.op.sum_rows(found, first.gradient.arrays[name], **last.attrs)
            for calls, more in (*zip(self._leave, leave, strict=True), *zip(added, add, strict=False)):
                calls += more
        self._add = [partial(_call_all, calls) for calls in added if calls]
        self._dense = [
            (first.gradient.vector[part], shard.gradient.vector[part])
            for shard in others
            for part in _dense_parts(first.gradient.layout, first.rows)
        ]

    def share_products(self, team: Team) -> None:
        """Have the threads of a team compute parts of the large products of a whole batch."""
        tape = self.shards[0].tape
        tape.share_products(team.run, team.size)
        self.blas_threads = 1
        _touch_buffers(tape, team)

    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Gather, compute, reduce."""
        if self._team is None:
            self.shards[0].run(x, y, rows)
            return self.shards[0].loss
        with nullcontext() if self._meeting is None else self._meeting.running():
            self._team.run([partial(self._run_shard, k, x, y, rows) for k in range(len(self.shards))])
        if self._add:
            self._team.run(self._add)
        for total, part in self._dense:
            np.add(total, part, out=total)
        return sum(shard.loss for shard in self.shards)

    def _run_shard(self, k: int, x: Array, y: Array, rows: Rows) -> None:
        try:
            self.shards[k].run(x, y, rows)
        except threading.BrokenBarrierError:
            return  # another shard has failed, and says why
        except BaseException:
            if self._meeting is not None:
                self._meeting.leave()
            raise
        _call_all(self._leave[k])

    def diagnose(self) -> NonFiniteError | None:
        """Replay op by op."""
        reasons = (shard.tape.diagnose() for shard in self.shards)
        return next((reason for reason in reasons if reason is not None), None)


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

    blas_threads: int | None = None

    def __init__(self, chain: Chain, loss: Loss, gradient: FlatVector) -> None:
        self._chain = chain
        self._loss = loss
        self._gradient = gradient
        self.updates: list[tuple[Array, Array]] = []

    @restoring
    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Run the model's Python code on these rows."""
        with collect_updates() as updates:
            value = self._loss(self._chain(Tensor(x[rows]), training=True), Tensor(y[rows]))
        with entering(grad_enabled=False):
            found = gradients([value], [Literal(np.ones((), value.dtype))], _trainable(self._chain))
        self.updates = [(parameter.numpy(), new.numpy()) for parameter, new in updates]
        for g, view in zip(found, self._gradient.arrays.values(), strict=True):
            view[...] = 0 if g is None else g.numpy()
        return value.item()

    def diagnose(self) -> NonFiniteError | None:
        """Nothing was kept that could tell which op it was."""
        return NonFiniteError("the eager step does not keep where it arose; switch the technique replay on")


class SampleBySample:
    """One pass for each sample of the batch, the gradients accumulated, as without vectorisation."""

    blas_threads: int | None = None

    def __init__(self, shard: Shard, total: FlatVector) -> None:
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

    def diagnose(self) -> NonFiniteError | None:
        """Explain the last sample's pass, if that is where it arose."""
        return self._shard.tape.diagnose() or NonFiniteError("it arose in one sample of the batch before the last")


def make_step(
    chain: Chain,
    loss: Loss,
    x: Array,
    y: Array,
    samples: int,
    gradient: FlatVector,
    team: Team | None,
    techniques: Techniques,
) -> Step:
    """Return the step for batches of `samples` rows that the techniques choose.

    With a `team` the batch is split into one shard per thread of it.
    """

    def shard(part: slice, of: int, into: FlatVector, *more: Any) -> Shard:
        return Shard(chain, loss, x, y, part, of, into, techniques, *more)

    if not techniques.batched:
        if chain.couples_batch:
            raise ConfigurationError(
                f"layer {chain.couples_batch!r} needs a whole batch, so that it can't be trained sample by sample; "
                "switch the technique batched on"
            )
        if loss.couples_batch:
            raise ConfigurationError(
                f"{loss.name} with {' and '.join(loss.settings)} is the mean of a whole batch by weights, so that "
                "it can't be trained sample by sample; switch the technique batched on"
            )
        return SampleBySample(shard(slice(0, 1), 1, gradient.zeros_like()), gradient)
    if not techniques.replay:
        return Eager(chain, loss, gradient)
    count = min(team.size, samples) if team is not None else 1
    ends = [samples * (k + 1) // count for k in range(count)]
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    meeting = Meeting(count, samples) if count > 1 and (chain.couples_batch or loss.couples_batch) else None
    shards = [
        # Of these vectors' memory only what a tape writes is ever touched, and so taken: not a matrix of embeddings.
        shard(part, samples, gradient if k == 0 else gradient.zeros_like(), count > 1, meeting, k)
        for k, part in enumerate(parts)
    ]
    if len({tuple(sums([step.equation.attrs for step in shard.tape.instructions])) for shard in shards}) > 1:
        return make_step(chain, loss, x, y, samples, gradient, None, techniques)  # they would wait for each other
    if team is not None and count > 1:
        _touch_buffers(shards[0].tape, team)
    return Replay(shards, team if count > 1 else None, meeting)


def _touch_buffers(tape: Tape, team: Team) -> None:
    """Products that are computed at the same time have a buffer of BLAS each: have all of them in memory."""
    for dtype in dtypes_of_products(tape.program.equations):
        team.run([partial(touch_buffers, dtype)] * team.size)


def _trainable(chain: Chain) -> list[Tensor]:
    parameters = chain.parameters
    return [parameters.tensors[name] for name in parameters.trainable]


SPLIT_FROM = 512 * 1024
"""Bytes that the calls in which the time goes by must move before it pays to split a batch over threads."""

GRADIENT_MOVES = 6
"""How often each further thread moves a gradient that all threads have: its products read the weight twice and write
its gradient, and the sum reads two gradients and writes one."""


def splitting_pays(tape: Tape, threads: int) -> bool:
    """Whether one part of the batch for each thread takes less time than the whole batch with BLAS on all threads.

    BLAS spreads the products over threads by itself; splitting spreads all other calls, too, and the gathering of the
    rows, but each thread then computes its own gradients, which are summed. So it pays where everything but the
    products moves more bytes than summing the gradients does (of embeddings only the gathered rows are summed), and
    where a call is long enough to do without the interpreter's lock for a while. It follows from shapes alone: the
    same network is split in the same way on every machine, and gives the same numbers in every run.
    """
    dense = [step for step in tape.instructions if step.equation.op.sum_rows is None]
    rows = sum(a.nbytes for step in tape.instructions if step.equation.op.sum_rows is not None for a in step.outs)
    others = [step for step in dense if step.calls and not step.equation.op.product]
    gathered = 2 * sum(a.nbytes for a in tape.inputs)
    moved = gathered + sum(a.nbytes for step in others for a in (*step.arrays, *step.outs))
    saved = moved * (threads - 1) / threads
    added = (sum(a.nbytes for a in tape.outputs) - rows) * GRADIENT_MOVES * (threads - 1)
    return saved > added and bytes_per_call(tape) >= SPLIT_FROM


def bytes_per_call(tape: Tape) -> float:
    """Return the number of bytes that a call of the tape reads and writes: the mean over the bytes, not the calls.

    So it is the size of the calls in which the time goes by; many short ones beside a few long ones don't hide them.
    """
    total = weighted = 0.0
    for step in tape.instructions:
        if step.calls:
            moved = sum(a.nbytes for a in (*step.arrays, *step.outs))
            total += moved
            weighted += moved * moved / len(step.calls)
    return weighted / total if total else 0.0
