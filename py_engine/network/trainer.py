"""The trainer: the papers' central idea. Build and plan once for each batch shape, replay for every batch.

A mini-batch is gathered straight into the tape's input buffers, the tape leaves the gradients in one flat vector,
and the optimizer runs over that vector: a step allocates no arrays, except with lazy updates of an embedding
(`LazyUpdates`): these allocate arrays for the rows that a mini-batch looks up.

More than one thread is used in one of two forms, which `Techniques.split_batch` chooses. Either BLAS spreads each
matrix product over all threads, or the batch is split into shards, one per thread, each with separate buffers and
gradient vector and BLAS at one thread, summed at the end. `splitting_pays` estimates which takes less time, by shapes
and BLAS's kernels and not by a measurement, since the sum is rounded in another way: so the same network gives the
same numbers in every run. Whether all threads or one compute the products of a batch that stays whole is measured in
the first steps, and now and then again: threads that wait for each other in short products may take longer than one.
Where that is rounded in another way, the size of the products decides.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike, NDArray
from threadpoolctl import ThreadpoolController

from py_engine.ad import ops
from py_engine.ad.compile.tape import Cost, Tape
from py_engine.ad.memory import segments
from py_engine.ad.mutation import checksum
from py_engine.ad.ops.arguments import is_whole
from py_engine.ad.ops.indexing import check_ids
from py_engine.ad.program import Program, trace
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import Array, Tensor
from py_engine.errors import ConfigurationError, DTypeError, LabelError, NonFiniteError, ParameterError, ShapeError
from py_engine.network import losses
from py_engine.network.batch_sums import coupling_layer
from py_engine.network.chain import Chain
from py_engine.network.dropout_streams import DropoutStreams
from py_engine.network.embedding import Embedding
from py_engine.network.layers import Dropout, Fields, Layer, held_layers, is_users_own, settings_of
from py_engine.network.lazy_updates import LOOKED_UP, WINDOW, LazyUpdates
from py_engine.network.metrics import Accuracy, Mean
from py_engine.network.optimizers import SGD, SPLIT_FROM, Adam, Optimizer
from py_engine.network.parallel import Communicator, Parallel
from py_engine.network.read_ahead import reading_ahead
from py_engine.network.steps import Replay, Rows, Step, ThreadUse, coupling_op, make_step
from py_engine.network.threads import Team, usable_cores

EVALUATION_BATCH = 1000
"""Samples per forward pass outside training."""

MOST_FORWARDS = 32
"""Numbers of samples whose forward passes are planned at a time: a service may be asked for any."""

MOST_STEPS = 32
"""Steps that are planned at a time, each with its memory: samples may have any length."""

SQUARES_SHARED_FROM = 1 << 20
"""Elements of a gradient from which on threads share the sum of its squares; fewer cost as much as starting them."""

UPDATE = "sums and update"
"""What `Trainer.costs` calls the update, with the sums of the threads' gradients before it."""

CHECKED_STEP = 3
"""The step that is made in each way to use threads, to see which compute the same."""

LONG_STEP = 0.05
"""Seconds of a step from which on that one may tell which way is the fastest."""


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and share of right answers (NaN where the loss has no notion of a right answer)."""

    loss: float
    accuracy: float


_ARGUMENTS = frozenset({"chain", "loss", "optimizer", "batch_size", "threads", "accumulate", "techniques"})
"""Of a trainer, which plans its steps by them."""


class Trainer:
    """Trains a chain on mini-batches.

    What layers keep beside their trained parameters (running statistics) changes after each step, with or without
    an update. Steps are planned anew where attributes of a layer of your own have changed since; what its `forward`
    changes is left out of that. Arrays are read at every step.

    Args:
        chain: the model; its parameters are trained in place.
        loss: a name from `losses.LOSSES`, or that loss with settings: `losses.get(name, class_weights=...)`.
        optimizer: the update rule; SGD(0.01) by default.
        batch_size: samples per step; a partial last batch has its own plan.
        threads: how many to use, at most; None takes one for each core that this process may use.
        accumulate: mini-batches whose mean gradient makes one update.
        techniques: the switches of the engine, for ablations.
        communicator: the processes that train together, such as `mpi4py.MPI.COMM_WORLD`, each with a trainer of the
            same chain, data and order: each computes a part of every batch, and all make the same updates. None: this
            process alone.
    """

    def __init__(
        self,
        chain: Chain,
        loss: str | losses.Loss = "softmax_cross_entropy",
        optimizer: Optimizer | None = None,
        batch_size: int = 100,
        threads: int | None = None,
        accumulate: int = 1,
        techniques: Techniques = Techniques(),  # noqa: B008  (frozen)
        communicator: Communicator | None = None,
    ) -> None:
        self.threads = threads if threads is not None else usable_cores()
        if not isinstance(chain, Chain):
            raise ConfigurationError(f"Trainer: expected a Chain of layers, actual {chain!r}")
        for name, value in (("batch_size", batch_size), ("threads", self.threads), ("accumulate", accumulate)):
            if not is_whole(value, 1):
                raise ConfigurationError(f"Trainer: {name} must be an integer >= 1, actual {value!r}")
        if techniques.split_batch not in (True, False, "auto"):
            raise ConfigurationError(
                f"Trainer: split_batch must be True, False or 'auto', actual {techniques.split_batch!r}"
            )
        self.chain = chain
        self.loss = losses.get(loss)
        self.optimizer = SGD() if optimizer is None else optimizer
        if not isinstance(self.optimizer, Optimizer):
            raise ConfigurationError(f"Trainer: expected an optimizer, such as SGD(0.01), actual {optimizer!r}")
        self.batch_size = int(batch_size)
        self.accumulate = int(accumulate)
        self.techniques = techniques
        self.parallel = None if communicator is None else Parallel(communicator)
        if self.parallel is not None and chain.couples_batch:
            raise ConfigurationError(
                f"layer {chain.couples_batch!r} needs the statistics of a whole batch, of which each process would "
                "have a part: train it in one process, or take layer normalisation instead"
            )
        if self.parallel is not None and not techniques.replay:
            raise ConfigurationError(
                "Trainer: with a communicator the technique replay can't be switched off: what needs a whole batch is "
                "found in the trace of a step"
            )
        if self.parallel is not None and not self.loss.is_mean:
            raise ConfigurationError(
                f"{self.loss.name} is not known to be a mean over the targets, of which each process has a part: "
                "say so (is_mean=True) if it is, or train it in one process"
            )
        if self.parallel is not None and self.loss.couples_batch:
            raise ConfigurationError(
                f"{self.loss.name} with {' and '.join(self.loss.settings)} is the mean of a whole batch by weights, of "
                "which each process would know a part: train it in one process"
            )
        self._batch = self.batch_size if self.parallel is None else self.parallel.part(self.batch_size)[1]
        dropouts = held_layers(chain.layers, Dropout)
        self._streams = DropoutStreams(dropouts, self._rank)
        layers: dict[str, Layer] = held_layers(chain.layers, Layer)  # type: ignore[type-abstract]
        self._settings = {name: (vars(layer), settings_of(layer)) for name, layer in layers.items()}
        self._own = [layer for layer in chain.layers.values() if is_users_own(layer)]
        self._fields: Fields | None = None  # what these held when plans were made, and where tracing changes it
        self._changing: set[tuple[int, Any]] = set()
        self.parameters = chain.parameters
        for name, layer in chain.layers.items():
            for local, spec in layer.parameters().items():
                if spec.trainable != (f"{name}.{local}" in self.parameters.trainable):
                    raise ConfigurationError(
                        f"layer {name!r}: whether {local} is trained was changed after its chain was made, which keeps "
                        "to what it was; make a new chain"
                    )
        self._gradient = self.parameters.zeros_like()
        self._total = self.parameters.zeros_like() if accumulate > 1 else self._gradient
        # The token ids that were checked last, for training or not, and what is looked up of them.
        self._checked: dict[bool, Callable[[], object]] = {}
        self._lookups: dict[Any, tuple[Program, list[tuple[int, str]]]] = {}
        self._pending = 0
        self._steps: dict[Any, Step] = {}
        self._lazy: LazyUpdates | None = None
        self._gathering = 0.0  # seconds for the rows that the last step looks up
        self._zeroed: str | None = (
            f"{chain.takes_ids}.weight"  # the matrix with lazy updates, while its gradient is zeros
        )
        # The step of whole batches of this epoch, its rows, and the positions of random streams before it.
        self._epoch: tuple[Step, int, list[tuple[Any, Any]]] | None = None
        self._planned: Step | None = None  # the last one, or that of whole batches if an epoch has come since
        # Of the last updates with that: seconds, bytes that are moved but for `Replay.gradient_bytes`, and whether rows
        # were updated lazily.
        self._updates: deque[tuple[float, int, bool]] = deque(maxlen=WINDOW)
        self._threads: Team | None = None
        self._forwards: dict[Any, Tape] = {}
        self._whole: WeakKeyDictionary[Tape, bool] = WeakKeyDictionary()  # which of them need all samples at once
        self._blas = ThreadpoolController()
        self._blas_count = 0  # its threads now, within `_blas_threads`
        vector = self.parameters.vector
        tensors = () if techniques.flat_parameters else self.parameters.layout.offsets.values()
        if self.threads > 1 and vector.size >= SPLIT_FROM and self.optimizer.state_names:
            with closing(Team(self.threads)) as team:  # a trainer that trains nothing yet has no threads
                self.optimizer.bind(vector, tensors, team=team)
        else:
            self.optimizer.bind(vector, tensors)
        self._binding = self.optimizer.binding

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS and name in self.__dict__:
            raise ConfigurationError(f"a trainer keeps the {name} that it was made with; make a new one")
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "a trainer is bound to the memory of its chain and neither copied nor pickled; make a new one for a copy "
            "of the chain: Trainer(copy.deepcopy(trainer.chain), ...)"
        )

    # Training ---------------------------------------------------------------------------------------------

    def train_epoch(
        self, x: ArrayLike, y: ArrayLike, order: ArrayLike | None = None, rates: ArrayLike | None = None
    ) -> NDArray[np.float64]:
        """Train once on all samples, or on those that `order` names, in its order.

        Args:
            x: (samples, ...), of the parameters' dtype; integers where the chain begins with an embedding. It may map a
                file (`numpy.load(path, mmap_mode="r")`) larger than memory: its rows are read ahead.
            y: (samples, ...), targets of the loss.
            order: row numbers, cut into batches in this order; None takes all rows in order.
            rates: (steps,), the learning rate of each step, for a schedule; the optimizer keeps the last. None: the
                optimizer's own for all.

        Returns:
            The loss of each step, before its update.

        Raises:
            ShapeError, LabelError, ConfigurationError: the data or the rates do not suit the model; nothing was
                trained.
            NonFiniteError: a loss or gradient became NaN or infinite; names the step, from 1 on, and the op and layer
                that first produced it. The parameters are those before that step.
        """
        self._check_optimizer()
        x, y = self._data(x, y, training=True)
        rows = self._rows(order, len(x))
        weights = None
        if self.parallel is not None:
            rows, weights = self.parallel.own_rows(rows, self.batch_size)
        found = np.empty(-(-len(rows) // self._batch), np.float64)
        steps_rates = None if rates is None else _as_rates(rates)
        if steps_rates is not None and steps_rates.shape != found.shape:
            raise ShapeError(f"expected a learning rate for each of {len(found)} steps, got shape {steps_rates.shape}")
        if steps_rates is not None and not (np.isfinite(steps_rates) & (steps_rates >= 0)).all():
            raise ConfigurationError(f"learning rates must be finite numbers >= 0, got {steps_rates}")
        # Both are planned first: a batch that the model can't take is an error before anything is trained. The whole
        # one comes first: new streams of dropout layers are numbered in that order.
        sizes = {min(self._batch, len(rows)), len(rows) % self._batch or self._batch}
        steps = {samples: self._step(samples, x, y) for samples in sorted(sizes, reverse=True)}
        for samples in steps:
            self._streams.train(self._key(samples, x, y))
        self._planned = whole = before = steps[max(sizes)]
        streams = [(g.bit_generator, g.bit_generator.state) for step in steps.values() for g in step.generators]
        self._epoch = whole, len(rows), streams
        with (
            self._using(whole),
            reading_ahead(x, rows) as reached,
            self._updating_lazily(steps.values(), len(found)) as lazy,
        ):
            for number, start in enumerate(range(0, len(rows), self._batch)):
                reached(start)
                batch = rows[start : start + self._batch]
                step = steps[len(batch)]
                if step is not before:
                    self._use(step, step.threads.way)
                    before = step
                if lazy is not None:
                    begun = perf_counter()
                    lazy.gather(x[batch])
                    self._gathering = perf_counter() - begun
                rate = None if steps_rates is None else float(steps_rates[number])
                weight = None if weights is None else weights[number]
                finish = partial(self._finish, step, number, rate, weight)
                if step is not whole:
                    found[number] = finish(self._run(step, x, y, batch))
                elif step.threads.comparing:
                    found[number] = self._try(step, x, y, batch, finish)
                else:
                    found[number] = self._timed(step, x, y, batch, finish)
        if self.parallel is not None and weights is not None:
            return self.parallel.add_up(found * weights)
        return found

    def loss_and_gradients(self, x: ArrayLike, y: ArrayLike) -> tuple[float, dict[str, Array]]:
        """Return the training loss of one batch and its gradient by each trained parameter; nothing is updated.

        Args:
            x: (N, *sample), all rows as one batch.
            y: (N, ...), as `train_epoch` takes it.

        Raises:
            ShapeError, LabelError: the data does not suit the model.
        """
        x, y = self._data(x, y, training=True)
        step = self._step(len(x), x, y)
        with self._using(step):
            loss = self._run(step, x, y, np.arange(len(x)))
        return loss, self._gradient.as_dict()

    def costs(self) -> list[Cost]:
        """Return what each op of the last planned step takes, timed as it runs beside those of the other threads.

        The last of them is the update, with the sums of the threads' gradients before it: the least seconds of the last
        updates, as of several repeats of the ops; their mean where rows are updated lazily, since one of these updates
        does what the others leave. What else a step takes is for gathering the rows, looking for NaN, and waiting.
        Empty without a step that is replayed; nothing is changed.
        """
        step = self._planned
        if not isinstance(step, Replay):
            return []
        self._zeroed = None
        with self._streams.unchanged(step.generators), self._using(step):
            found, sums = step.costs()
        if self._updates:
            seconds, moved = _usual_update(self._updates)
            found.append(Cost(UPDATE, "", sums + seconds / self.accumulate, step.gradient_bytes + int(moved), 0))
        return found

    def threads_in_step(self) -> str:
        """Return in words what the threads do in the last planned step; empty without a step that is replayed."""
        step = self._planned
        if not isinstance(step, Replay):
            return ""
        if len(step.shards) > 1:
            return f"split over {len(step.shards)} threads"
        use = step.threads.way
        if use.share_products:
            return f"products shared by {self.threads} threads"
        return f"{use.blas} threads in BLAS" if use.blas > 1 else "one thread"

    def threads_decided(self) -> bool:
        """Return whether it is known what the threads do in the last planned step, as is tried in the first ones.

        True also before the first step, and where nothing is tried.
        """
        step = self._planned
        return not isinstance(step, Replay) or (step.threads.decided and self.optimizer.decided)

    # Checkpoints ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """Return copies of all that a checkpoint needs beside the parameters and the settings.

        The optimizer's arrays (``optimizer.velocity``) and the settings that give their units, the streams of dropout
        layers (``dropout.<layer>``), and what is accumulated of an update. A new trainer of the same chain and settings
        that loads the parameters and this resumes bit for bit as this one would, where no layer draws from a generator
        of the user's.

        With a communicator all processes call this together, and each returns the streams of all of them, (ranks,
        copies, 8): the state of one is a checkpoint for all. On another number of processes, streams resume in a
        process whose part of a mini-batch is as large as it was there, and else begin anew.
        """
        found = self._own_state()
        if self.parallel is not None:
            for name in self._streams.layers:
                streams = self.parallel.gather(found[f"dropout.{name}"])
                copies = max(map(len, streams))
                found[f"dropout.{name}"] = np.stack([np.pad(a, ((0, copies - len(a)), (0, 0))) for a in streams])
        return found

    def _check_optimizer(self) -> None:
        if self.optimizer.binding is not self._binding:
            raise ConfigurationError(
                "Trainer: the optimizer has begun anew with another trainer since; give each trainer its own"
            )

    def _own_state(self) -> dict[str, NDArray[Any]]:
        self._check_optimizer()
        if not self.techniques.replay and self._streams.layers:
            raise ConfigurationError("eager steps of a dropout layer can't be resumed: switch the technique replay on")
        found = {f"optimizer.{name}": array for name, array in self.optimizer.state().items()}
        found |= {f"dropout.{name}": streams for name, streams in self._streams.state().items()}
        if self.accumulate > 1:
            found |= {"pending": np.array(self._pending, np.int64), "total": self._total.vector.copy()}
            found["accumulate"] = np.array(self.accumulate, np.int64)
        return found

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Copy a `state` back in. Raises `ParameterError`, and changes nothing, if it doesn't fit."""
        expected = self._own_state()
        optional = {f"optimizer.{name}" for name in self.optimizer.unit_settings}  # which older versions did not save
        optional |= {"accumulate"} & expected.keys()
        if state.keys() | optional != expected.keys():
            raise ParameterError(f"Trainer.load_state: expected {', '.join(expected)}; found {', '.join(state)}")
        for name, kinds in (("pending", "iu"), ("total", "f")) if self.accumulate > 1 else ():
            array = np.asarray(state[name])
            fits = array.shape == expected[name].shape and array.dtype.kind in kinds
            if not fits or (name == "pending" and not 0 <= array < self.accumulate):
                raise ParameterError(f"Trainer.load_state: {name} is not of this trainer's updates: {state[name]!r}")
        if self.accumulate > 1 and state["pending"] and state.get("accumulate", self.accumulate) != self.accumulate:
            raise ParameterError(
                f"Trainer.load_state: a part of an update of {state['accumulate']} mini-batches is not one of "
                f"{self.accumulate}"
            )
        streams = {name: self._own_streams(state[f"dropout.{name}"]) for name in self._streams.layers}
        self._streams.check(streams)
        prefix = "optimizer."
        self.optimizer.load_state({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})
        self._streams.load_state(streams)
        if self.accumulate > 1:
            self._pending = int(state["pending"])
            self._total.vector[...] = state["total"]

    def _own_streams(self, state: NDArray[Any]) -> NDArray[Any]:
        """Return this process's part of the streams of a state, whose other parts are padded with zeros."""
        ranks = state if state.ndim == 3 else state[np.newaxis]
        if self._rank >= len(ranks):
            return ranks[0, :0]
        own: NDArray[Any] = ranks[self._rank]
        return own[own.any(axis=-1)] if own.ndim == 2 else own

    @property
    def _rank(self) -> int:
        return 0 if self.parallel is None else self.parallel.rank

    # Evaluation -------------------------------------------------------------------------------------------

    def evaluate(self, x: ArrayLike, y: ArrayLike) -> Evaluation:
        """Return mean loss and accuracy over all samples, with dropout off; ignored labels count in neither.

        Args:
            x: (N, *sample).
            y: (N, ...), as `train_epoch` takes it.

        Raises:
            ShapeError, LabelError: the data does not suit the model.
        """
        x, y = self._data(x, y)
        loss, accuracy = Mean(), Accuracy(self.loss.ignored_class)
        labels = y.argmax(-1) if self._one_hot else y
        # Of a loss that is no mean the parts' values say nothing of the whole.
        for part in self._parts(x, y) if self.loss.is_mean or not len(x) else [slice(0, len(x))]:
            logits, value = self._forward(x[part], y[part])
            if weight := self.loss.weight(labels[part]):
                loss.add(value.item(), weight)
            if self.loss.counts_answers:
                accuracy.add(logits, labels[part])
        return Evaluation(loss.value, accuracy.value)

    def predict(self, x: ArrayLike) -> Array:
        """Return the model's outputs (logits) for all samples (N, *sample), as (N, *output), with dropout off.

        Raises:
            ShapeError: the samples do not suit the model.
        """
        x = self._samples(x)
        out = np.empty((len(x), *self.chain.output_shape(x.shape[1:])), self.parameters.dtype)
        for part in self._parts(x):
            (out[part],) = self._forward(x[part])
        return out

    def close(self) -> None:
        """End the trainer's threads and forget its plans."""
        if self._threads is not None:
            self._end_threads()
            self._threads = None
        self._steps.clear()
        self._streams.forget()
        self._planned = None
        self._forwards.clear()

    # Looking at it ----------------------------------------------------------------------------------------

    @property
    def tapes(self) -> list[Tape]:
        """The training tapes planned so far."""
        return [shard.tape for step in self._steps.values() if isinstance(step, Replay) for shard in step.shards]

    @property
    def source(self) -> str:
        """The training tapes planned so far as straight-line Python, for reading."""
        return "\n\n".join(f"# {len(tape.inputs[0])} samples\n{tape.source}" for tape in self.tapes)

    # How it works -----------------------------------------------------------------------------------------

    def _lazy_parameter(self, samples: int, x: Array) -> str | None:
        """The name of the embedding matrix whose rows may be updated lazily in steps of `samples` samples, or None."""
        how, layout = self.techniques, self.parameters.layout
        name = f"{self.chain.takes_ids}.weight"
        if (
            len(layout.shapes.get(name, ())) != 2
            or not self.optimizer.allows_lazy_updates
            or self.parameters.dtype != np.float32
        ):
            return None
        vocabulary, dimension = layout.shapes[name]
        few = samples * math.prod(x.shape[1:]) <= LOOKED_UP * vocabulary and vocabulary * dimension >= SPLIT_FROM
        switched = how.lazy_updates and how.sparse_rows and how.replay and how.batched and how.flat_parameters
        return name if few and switched and self.accumulate == 1 and self.parallel is None else None

    @contextmanager
    def _updating_lazily(self, steps: Collection[Step], count: int) -> Iterator[LazyUpdates | None]:
        """Update rows lazily inside, if all these steps do, and more than one is made, in all `count`.

        Afterwards all are up to date, and their gradient is all zeros.
        """
        names = {step.lazy if isinstance(step, Replay) else None for step in steps}
        name = names.pop() if len(names) == 1 and count > 1 else None
        if name is None or not isinstance(self.optimizer, Adam) or not self.optimizer.allows_lazy_updates:
            yield None
            return
        matrix, gradient = self.parameters.arrays[name], self._gradient.arrays[name]
        start = self.parameters.layout.offsets[name]
        part = slice(start, start + matrix.size)
        state = self.optimizer.state_of(self.parameters.vector, part)
        if self._zeroed != name:
            self._clear_gradient(name)
        self._zeroed = None
        team = self._all_threads() if self.threads > 1 else None
        self._lazy = LazyUpdates(self.optimizer, part, [matrix, *state], gradient, team)
        try:
            yield self._lazy
        finally:
            lazy, self._lazy, self._gathering = self._lazy, None, 0.0
            begun, before = perf_counter(), lazy.moved
            try:
                lazy.catch_up()
            except KeyboardInterrupt:
                lazy.catch_up()  # the rest of it
                raise
            lazy.clear()
            self._zeroed = name
            if self._updates:
                seconds, moved, _ = self._updates[-1]
                self._updates[-1] = seconds + perf_counter() - begun, moved + lazy.moved - before, True

    def _run(self, step: Step, x: Array, y: Array, rows: Rows) -> float:
        """Leave the gradient for these rows of the data in the gradient vector; return their loss."""
        if self._lazy is not None:
            self._lazy.clear()
        else:
            self._zeroed = None
            if isinstance(step, Replay) and step.lazy is not None:
                self._clear_gradient(step.lazy)
        return step.run(x, y, rows)

    def _clear_gradient(self, name: str) -> None:
        """Make the gradient of a large matrix zeros."""
        gradient = self._gradient.arrays[name].reshape(-1)
        if self.threads > 1:
            parts = segments(gradient.size, self.threads)
            self._all_threads().run([partial(gradient[part].fill, 0) for part in parts])
        else:
            gradient.fill(0)

    def _finish(self, step: Step, number: int, rate: float | None, weight: float | None, loss: float) -> float:
        """Update after a step, with this learning rate; return its loss, which has this weight among all processes'."""
        if self.parallel is not None and weight is not None:
            self.parallel.exchange(self._gradient.vector, weight, loss)
        self._check(step, loss, number + 1)
        if rate is not None:
            self.optimizer.learning_rate = rate
        self._update(step)
        for parameter, new in step.updates:
            np.copyto(parameter, new)
        return loss

    def _update(self, step: Step) -> None:
        waits = False  # for more mini-batches
        try:
            if self.accumulate > 1:
                np.multiply(self._gradient.vector, 1 / self.accumulate, out=self._gradient.vector)
                np.add(self._total.vector, self._gradient.vector, out=self._total.vector)
                self._pending += 1
                waits = self._pending < self.accumulate
                if waits:
                    return
            vector = self.parameters.vector
            team = self._all_threads() if self.threads > 1 and vector.size >= SPLIT_FROM else None
            before = perf_counter() - self._gathering
            if self._lazy is None:
                self.optimizer.step(vector, self._total.vector, team)
            else:
                self.optimizer.step(vector, self._total.vector, team, self._lazy.part)
                self._lazy.update()
        finally:  # of an update that fails, or is interrupted while gradients are added up, nothing is left
            if self.accumulate > 1 and not waits:
                self._pending = 0
                self._total.vector[...] = 0
        self._updates.append((perf_counter() - before, self._moved(step), self._lazy is not None))

    def _moved(self, step: Step) -> int:
        """Bytes that the update after a step has moved, but for `Replay.gradient_bytes`."""
        whole, copies = self.parameters.vector.nbytes, 2 * (1 + len(self.optimizer.state_names))
        if self._lazy is not None:
            return copies * (whole - self._lazy.nbytes) + self._lazy.moved
        name = step.lazy if isinstance(step, Replay) else None  # whose gradient it does not count
        return copies * whole + (self._gradient.arrays[name].nbytes if name is not None else 0)

    def _check(self, step: Step, loss: float, number: int) -> None:
        """Raise if the loss or the gradient is not finite, before they reach the parameters."""
        with np.errstate(over="ignore", invalid="ignore"):  # whether something is not finite is said below
            if math.isfinite(loss) and math.isfinite(self._sum_of_squares(step)):
                return
        if math.isfinite(loss) and np.isfinite(self._gradient.vector).all():
            return  # only the squares in the line above are not
        elsewhere = "it arose where parts of the batch are added up"
        if self.parallel is not None:
            elsewhere = "it arose in another process's part of the batch, or where they are added up"
        what = "the gradient is not finite" if math.isfinite(loss) else f"the loss is {loss}"
        reason = self._diagnosis(step, number) or elsewhere
        raise NonFiniteError(
            f"step {number} of the epoch: {what}: {reason}. The parameters are those before this step; lower the "
            "learning rate or look at this batch"
        )

    def _diagnosis(self, step: Step, number: int) -> NonFiniteError | None:
        """Return why the step of this number, from 1 on, was not finite, by computing it with its own random numbers.

        These are drawn once more from the beginning of the epoch: no step keeps where its streams were.
        """
        assert self._epoch is not None
        whole, rows, streams = self._epoch
        with self._streams.unchanged(step.generators + whole.generators):
            for bits, state in streams:
                bits.state = state
            for _ in range(number - 1 if streams else 0):
                whole.draw(self._batch, last=False)
            step.draw(min(self._batch, rows - (number - 1) * self._batch), last=True)
            return step.diagnose()

    def _sum_of_squares(self, step: Step) -> float:
        """Return that of the gradient. Where a team was used in the step, its threads sum a part of a long one each."""
        vector = self._gradient.vector
        if self._lazy is not None:
            part = self._lazy.part
            others = vector[: part.start], vector[part.stop :]
            return self._lazy.squares() + sum(float(v.dot(v)) for v in others)
        if vector.size < SQUARES_SHARED_FROM or not (isinstance(step, Replay) and step.runs_in_team):
            return float(vector.dot(vector))
        found: list[float] = []

        def add(part: slice) -> None:
            found.append(float(vector[part].dot(vector[part])))

        team = self._all_threads()
        team.run([partial(add, part) for part in segments(vector.size, team.size)])
        return sum(found)

    @staticmethod
    def _key(samples: int, x: Array, y: Array) -> tuple[int, ...]:
        return samples, x.ndim, *x.shape[1:], *y.shape[1:]

    def _step(self, samples: int, x: Array, y: Array) -> Step:
        """Return the step for batches of this many samples, planned when it is first needed."""
        for name in self.parameters.trainable:
            if not self.parameters.tensors[name].requires_grad:
                raise ConfigurationError(
                    f"Trainer: {name} has requires_grad = False, but a trainer trains all parameters except those "
                    "that their layer declares with trainable=False; set it to True"
                )
        for name, tensor in self.parameters.tensors.items():
            if tensor.requires_grad and name not in self.parameters.trainable:
                raise ConfigurationError(
                    f"Trainer: {name} has requires_grad = True, but its layer declares it with trainable=False; make a "
                    "new layer and chain to train it"
                )
        key = self._key(samples, x, y)
        planned = *key, y.dtype.str  # which a loss of a user's own may leave as it is
        if planned in self._steps:
            self._steps[planned] = self._steps.pop(planned)  # the last one that was used
        else:
            while len(self._steps) >= MOST_STEPS:
                del self._steps[next(iter(self._steps))]
            with self._noting_fields(), self._blas_threads(self.threads), self._streams.tracing(key):
                step = make_step(
                    *(self.chain, self._objective, x, y, samples, self._gradient, self.threads, self.techniques),
                    self._lazy_parameter(samples, x),
                )
            if self.parallel is not None and step.updates:
                raise ConfigurationError(
                    "a layer keeps statistics of a whole batch, of which each process would have a part: train it in "
                    "one process"
                )
            if self.parallel is not None and isinstance(step, Replay):
                coupling = coupling_op(step.shards[0].tape.program.equations)
                if coupling is not None:
                    raise ConfigurationError(
                        f"the op {coupling!r} needs a whole batch, of which each process would have a part: train it "
                        "in one process"
                    )
                layer = coupling_layer(self.chain, x, samples, training=True)
                if layer is not None:
                    raise ConfigurationError(
                        f"in layer {layer!r} the samples of a batch affect each other, of which each process would "
                        "have a part: train it in one process"
                    )
            if isinstance(step, Replay) and step.uses_team:
                with self._blas_threads(1):
                    step.work_in(self._all_threads())
            self._steps[planned] = self._planned = step
            self._updates.clear()
        return self._steps[planned]

    def _try(self, step: Step, x: Array, y: Array, rows: Rows, finish: Callable[[float], float]) -> float:
        """Train in one of the ways to use threads that may be the fastest, and keep the time.

        The optimizer chooses its threads before.
        """
        threads = step.threads
        if not threads.compared:
            return finish(self._keep_what_computes_the_same(step, x, y, rows))
        if self._update_counts and self.optimizer.comparing:
            self._use(step, threads.way if threads.decided else threads.ways[-1])
            return finish(self._run(step, x, y, rows))
        self._use(step, threads.next)
        loss = self._timed(step, x, y, rows, finish)
        if not threads.comparing:
            self._use(step, threads.way)
        return loss

    def _timed(self, step: Step, x: Array, y: Array, rows: Rows, finish: Callable[[float], float]) -> float:
        """Train, and note how long it took, with the update where that counts."""
        if self._update_counts:
            return float(step.threads.run(lambda _: finish(self._run(step, x, y, rows))))
        return finish(step.threads.run(lambda _: self._run(step, x, y, rows)))

    @property
    def _update_counts(self) -> bool:
        """Whether the update belongs to the time of a step, since threads of BLAS that wait busily slow down its own.

        Not so where other processes are waited for, or an update is made after several steps.
        """
        return self.parallel is None and self.accumulate == 1

    def _keep_what_computes_the_same(self, step: Step, x: Array, y: Array, rows: Rows) -> float:
        """Make a step but for the update; leave those ways to use threads in which it is rounded in the same way.

        What is trained does not depend on what a clock says, then. Products of some lengths are rounded in another way
        when threads share them. The first steps tell nothing: in them memory is used for the first time, and products
        may be of zeros.
        """
        threads = step.threads
        threads.steps += 1
        if threads.steps < CHECKED_STEP:
            self._use(step, threads.fixed)
            return self._run(step, x, y, rows)
        made: list[tuple[float, int]] = []
        seconds: dict[ThreadUse, float] = {}
        generators = step.generators if isinstance(step, Replay) else []
        for use in sorted(threads.ways, key=lambda use: use == threads.fixed):  # whose gradient is kept
            self._use(step, use)
            start = perf_counter()
            with self._streams.unchanged(generators) as before:
                loss = self._run(step, x, y, rows)
                seconds[use] = perf_counter() - start
                if use == threads.fixed:
                    before.clear()
            made.append((loss, checksum(self._gradient.vector)))
        if not math.isfinite(loss):
            return loss
        if made != made[:1] * len(threads.ways):
            threads.fix()
        elif min(seconds.values()) > LONG_STEP:
            threads.keep_first([seconds[use] for use in threads.ways])
        threads.compared = True
        return loss

    @contextmanager
    def _using(self, step: Step) -> Iterator[None]:
        """Use threads inside as was chosen for this step."""
        with self._blas_threads(step.threads.way.blas):
            self._use(step, step.threads.way)
            yield

    def _use(self, step: Step, use: ThreadUse) -> None:
        """Use threads so in a step from now on, those of BLAS until the surrounding `_blas_threads` ends."""
        if use.blas != self._blas_count:  # asking BLAS takes longer than many a step
            self._blas.limit(limits=use.blas, user_api="blas")
            self._blas_count = use.blas
        if isinstance(step, Replay):
            step.use(use)

    def _all_threads(self) -> Team:
        """Return the trainer's threads, started when they are first needed."""
        if self._threads is None:
            team = Team(self.threads)
            self._end_threads = weakref.finalize(self, team.close)  # of a trainer that nobody closes, too
            self._end_threads.atexit = False
            self._threads = team
        return self._threads

    @property
    def _objective(self) -> losses.Loss:
        return replace(self.loss, function=_one_hot_cross_entropy) if self._one_hot else self.loss

    @property
    def _one_hot(self) -> bool:
        is_fused = self.loss.name == "softmax_cross_entropy" and not self.loss.settings
        return is_fused and not self.techniques.fused_loss

    def _parts(self, *arrays: Array) -> list[slice]:
        """Return the rows that are computed at once: all of them where one needs a whole batch in evaluation, too."""
        count = len(arrays[0])
        starts = range(0, count, EVALUATION_BATCH)
        parts = [slice(start, min(start + EVALUATION_BATCH, count)) for start in starts]
        if len(parts) > 1:
            tape = self._forward_tape(*(a[parts[0]] for a in arrays))
            if tape not in self._whole:  # once for each tape
                coupling = coupling_op(tape.program.equations)
                self._whole[tape] = (
                    coupling or coupling_layer(self.chain, arrays[0], EVALUATION_BATCH, False)
                ) is not None
            if self._whole[tape]:
                return [slice(0, count)]
        return parts

    def _forward(self, *arrays: Array) -> list[Array]:
        """Return the outputs, and the loss if targets are given, in buffers that the next call overwrites."""
        tape = self._forward_tape(*arrays)
        with self._blas_threads(self.threads):
            return tape(*arrays)

    def _forward_tape(self, *arrays: Array) -> Tape:
        """Return the tape of `_forward`, planned when it is first needed."""
        key = tuple((a.shape, a.dtype) for a in arrays)
        tape = self._forwards.get(key)
        if tape is None:

            def outputs(x: Tensor, *targets: Tensor) -> list[Tensor]:
                y = self.chain(x)
                return [y, *(self._objective(y, t) for t in targets)]

            with self._noting_fields():
                program = trace(outputs, [Tensor.symbol(a.shape, a.dtype) for a in arrays])
            if len(self._forwards) >= MOST_FORWARDS:
                self._forwards.clear()
            tape = self._forwards[key] = Tape(program, techniques=replace(self.techniques, winograd=False))
        return tape

    @contextmanager
    def _blas_threads(self, count: int) -> Iterator[None]:
        before, self._blas_count = self._blas_count, count
        try:
            with self._blas.limit(limits=count, user_api="blas"):
                yield
        finally:
            self._blas_count = before

    @contextmanager
    def _noting_fields(self) -> Iterator[None]:
        """Trace inside: what layers of the user's hold is compared from then on, but for what tracing changes."""
        if not self._own:
            yield
            return
        before = self._fields = self._fields or Fields(self._own)
        yield
        self._fields = Fields(self._own)
        self._changing |= before.changed(self._fields)

    def _forget_outdated(self) -> None:
        """Forget the plans if layers of the user's hold something else by now; they are made anew."""
        if self._fields is None:
            return
        now = Fields(self._own)
        if self._fields.changed(now) <= self._changing:
            return
        self._fields = now
        self._steps.clear()
        self._streams.forget()
        self._planned = None
        self._updates.clear()
        self._forwards.clear()
        self._lookups.clear()
        self._checked.clear()

    # Checks, before anything is computed ------------------------------------------------------------------

    def _samples(self, x: ArrayLike, training: bool = False) -> Array:
        if self.chain.parameters is not self.parameters:
            raise ConfigurationError("the chain's layers were changed after this trainer was made; make a new trainer")
        for layer, (now, made) in self._settings.items():
            for name, value in made.items():
                if now[name] is not value and repr(now[name]) != repr(value):
                    raise ConfigurationError(
                        f"layer {layer!r}: {name} was changed from {value!r} to {now[name]!r} after this trainer was "
                        "made, which keeps to what it was; make a new trainer"
                    )
        self._forget_outdated()
        array = np.asarray(x)
        embedding = self.chain.takes_ids
        if embedding is not None and array.dtype.kind not in "iu":
            raise DTypeError(
                f"layer {embedding!r} looks up integer token ids, the samples are of {array.dtype}; "
                "convert them, for example x.astype(np.int64)"
            )
        if embedding is None and array.dtype != self.parameters.dtype:
            held = held_layers(self.chain.layers, Embedding) if array.dtype.kind in "iu" else {}
            advice = (
                f"; {next(iter(held))!r} gets them if the layer that holds it says takes_ids = True" if held else ""
            )
            raise DTypeError(
                f"the model is of {self.parameters.dtype}, the samples of {array.dtype}; convert one of them, "
                f"for example x.astype(np.{self.parameters.dtype}){advice}"
            )
        if not array.shape:
            raise ShapeError("samples (N, ...) are needed, got a scalar")
        self.chain.output_shape(array.shape[1:])
        if embedding is None:
            return np.ascontiguousarray(array)
        ids = np.ascontiguousarray(array, np.int64)
        # Once for each array: that no replay reads elsewhere does not depend on it.
        if training not in self._checked or self._checked[training]() is not ids:
            self._check_ids(ids, training)
            self._checked[training] = weakref.ref(ids)
        return ids

    def _check_ids(self, ids: Array, training: bool) -> None:
        """Raise `ShapeError` where a layer would look up an id that is none of its vocabulary."""
        count = min(len(ids), EVALUATION_BATCH)
        if not count:
            return
        key = (count, *ids.shape[1:], training)
        if key not in self._lookups:
            if len(self._lookups) >= MOST_FORWARDS:
                self._lookups.clear()
            with self._noting_fields():
                self._lookups[key] = self.chain.lookups(count, ids.shape[1:], training)
        program, rules = self._lookups[key]
        for start in range(0, len(ids), count):
            first = min(start, len(ids) - count)
            read = program([Tensor(ids[first : first + count])])
            for looked_up, (vocabulary, layer) in zip(read, rules, strict=True):
                rows = looked_up.numpy()
                rows = rows if len(rows) == count or rows.size % count else rows.reshape(count, -1)
                check_ids(rows, vocabulary, f"layer {layer!r}" if layer else "embedding", first)

    def _data(self, x: ArrayLike, y: ArrayLike, training: bool = False) -> tuple[Array, Array]:
        samples = self._samples(x, training)
        if not len(samples):
            raise ShapeError("there are no samples")
        count = len(np.atleast_1d(np.asarray(y)))
        if count != len(samples) or not np.ndim(y):
            raise LabelError(f"{len(samples)} samples need as many targets, got {count if np.ndim(y) else repr(y)}")
        outputs_shape = (len(samples), *self.chain.output_shape(samples.shape[1:]))
        targets = losses.check_targets(self.loss, outputs_shape, y, self.parameters.dtype)
        if self._one_hot:
            targets = np.eye(outputs_shape[-1], dtype=self.parameters.dtype)[targets]
        return samples, targets

    @staticmethod
    def _rows(order: ArrayLike | None, count: int) -> Rows:
        if order is None:
            return np.arange(count)
        rows = np.ascontiguousarray(order)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or not len(rows):
            raise ShapeError(f"order must be a list of row numbers, got shape {rows.shape} of {rows.dtype}")
        if rows.min() < 0 or rows.max() >= count:
            raise ShapeError(f"order must hold row numbers from 0 to {count - 1}, got {rows.min()} to {rows.max()}")
        return rows.astype(np.intp, copy=False)


def _one_hot_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """With targets as one-hot rows, for an ablation."""
    return -ops.mean(ops.sum(targets * ops.log_softmax(outputs), -1))


def _usual_update(updates: Collection[tuple[float, int, bool]]) -> tuple[float, float]:
    """Return seconds and moved bytes of an update: of the fastest one, or the means where some leave work to others."""
    if not any(lazily for *_, lazily in updates):
        return min(updates)[:2]
    return sum(seconds for seconds, *_ in updates) / len(updates), sum(moved for _, moved, _ in updates) / len(updates)


def _as_rates(rates: ArrayLike) -> NDArray[np.float64]:
    """Learning rates as an array; raises ConfigurationError for what are no real numbers."""
    try:
        found = np.asarray(rates)
    except ValueError:  # lists of different lengths
        found = np.empty(0, object)
    if found.dtype.kind not in "iuf":
        raise ConfigurationError(f"learning rates must be finite numbers >= 0, got {rates!r}")
    return found.astype(np.float64)
