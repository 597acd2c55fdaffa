"""How one mini-batch becomes a loss and a gradient: by replay, eagerly, or sample by sample.

`Replay` is the engine. The other two are what it is measured against in an ablation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from py_engine.ad.graph import Graph, gradients, tracing
from py_engine.ad.tape import Tape
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import Array, Literal, Tensor, no_grad
from py_engine.errors import ConfigurationError, NonFiniteError
from py_engine.network.chain import Chain
from py_engine.network.layers import collect_updates
from py_engine.network.parameters import FlatVector
from py_engine.network.threads import Team

Rows: TypeAlias = NDArray[np.intp]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Step(Protocol):
    """A way to compute loss and gradients of batches of one size.

    `updates` are pairs of a parameter that is not trained and the new value that the last run found for it.
    """

    updates: list[tuple[Array, Array]]

    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Leave the gradient for these rows of the data in the gradient vector; return their loss."""

    def diagnose(self) -> NonFiniteError | None:
        """Explain a NaN or infinity of the last run."""


class Shard:
    """A part of a batch: its tape, which gathers nothing and allocates nothing, and its gradient vector.

    Args:
        chain, loss: what is differentiated.
        x, y: the data, for its shapes and dtypes.
        part: which rows of a batch of `samples` this shard computes; its loss counts by its share of them.
        gradient: where the tape leaves the gradient.
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
    ) -> None:
        size = part.stop - part.start
        inputs = [Tensor.symbol((size, *a.shape[1:]), a.dtype, name) for a, name in ((x, "x"), (y, "y"))]
        with tracing() as nodes, collect_updates() as updates:
            value = loss(chain(inputs[0], training=True), inputs[1])
            if size != samples:
                value = value * (size / samples)
            seed = Literal(np.ones((), value.dtype))
            found = gradients([value], [seed], _trainable(chain))
        used = [(g, view) for g, view in zip(found, gradient.arrays.values(), strict=True) if g is not None]
        graph = Graph(inputs, [value, *(g for g, _ in used), *(new for _, new in updates)], nodes)
        graph.prune()
        self.part = part
        self.gradient = gradient
        self.tape = Tape(graph, {k + 1: view for k, (_, view) in enumerate(used)}, techniques)
        news = self.tape.outputs[1 + len(used) :]
        self.updates = [(parameter.numpy(), new) for (parameter, _), new in zip(updates, news, strict=True)]

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

    def __init__(self, shards: list[Shard], team: Team | None) -> None:
        self.shards = shards
        self.updates = shards[0].updates  # what has any couples its batch and is not split
        self._team = team

    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Gather, compute, reduce."""
        first, *others = self.shards
        if self._team is None:
            first.run(x, y, rows)
            return first.loss
        self._team.run([lambda shard=shard: shard.run(x, y, rows) for shard in self.shards])  # type: ignore[misc]
        for shard in others:
            np.add(first.gradient.vector, shard.gradient.vector, out=first.gradient.vector)
        return sum(shard.loss for shard in self.shards)

    def diagnose(self) -> NonFiniteError | None:
        """Replay op by op."""
        reasons = (shard.tape.diagnose() for shard in self.shards)
        return next((reason for reason in reasons if reason is not None), None)


class Eager:
    """Record, differentiate and forget at every step, as an engine without a graph to replay does."""

    def __init__(self, chain: Chain, loss: Loss, gradient: FlatVector) -> None:
        self._chain = chain
        self._loss = loss
        self._gradient = gradient
        self.updates: list[tuple[Array, Array]] = []

    def run(self, x: Array, y: Array, rows: Rows) -> float:
        """Run the model's Python code on these rows."""
        with collect_updates() as updates:
            value = self._loss(self._chain(Tensor(x[rows]), training=True), Tensor(y[rows]))
        with no_grad():
            found = gradients([value], [Literal(np.ones((), value.dtype))], _trainable(self._chain))
        self.updates = [(parameter.numpy(), new.numpy()) for parameter, new in updates]
        for g, view in zip(found, self._gradient.arrays.values(), strict=True):
            view[...] = 0 if g is None else g.numpy()
        return value.item()

    def diagnose(self) -> NonFiniteError | None:
        """Nothing was kept that could tell which op it was."""
        return NonFiniteError("the eager step keeps no record of where it arose; switch the technique replay on")


class SampleBySample:
    """One pass for each sample of the batch, the gradients accumulated, as without vectorisation."""

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
    """Return the way to compute batches of `samples` rows that the techniques ask for.

    With a `team` the batch is split into one shard per thread of it.
    """

    def shard(part: slice, of: int, into: FlatVector) -> Shard:
        return Shard(chain, loss, x, y, part, of, into, techniques)

    if not techniques.batched:
        if chain.couples_batch:
            raise ConfigurationError(
                f"layer {chain.couples_batch!r} needs a whole batch, so that it can't be trained sample by sample; "
                "switch the technique batched on"
            )
        return SampleBySample(shard(slice(0, 1), 1, gradient.zeros_like()), gradient)
    if not techniques.replay:
        return Eager(chain, loss, gradient)
    count = min(team.size, samples) if team is not None else 1
    ends = [samples * (k + 1) // count for k in range(count)]
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    shards = [shard(part, samples, gradient if k == 0 else gradient.zeros_like()) for k, part in enumerate(parts)]
    return Replay(shards, team if count > 1 else None)


def _trainable(chain: Chain) -> list[Tensor]:
    parameters = chain.parameters
    return [parameters.tensors[name] for name in parameters.trainable]


def bytes_per_call(tape: Tape) -> float:
    """Return the mean number of bytes that a call of the tape reads and writes."""
    moved: list[Any] = [
        sum(a.nbytes for a in (*step.arrays, step.out)) / len(step.calls) for step in tape.instructions if step.calls
    ]
    return float(np.mean(moved)) if moved else 0.0
