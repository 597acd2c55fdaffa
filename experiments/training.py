"""Training outside the papers: `twingrad train`.

An epoch is trained in a number of calls that follows from its steps alone, so that progress can be shown inside it, and
so that a resumed training makes the same calls as one that was never interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge import registry, weights
from bridge.checks import DataCheck
from bridge.schedule import Schedule
from bridge.session import Optimizer
from bridge.spec import ModelSpec
from bridge.worker import Worker
from experiments import checkpoint, curve, mapped
from experiments.checkpoint import Arrays, Checkpoint
from experiments.errors import InputError
from experiments.formats import duration, fixed, scientific
from experiments.mpi import Here, check_agreement
from experiments.output import Output, check_apart, check_place
from experiments.progress import Lines, Steps
from experiments.rows import MOST_BYTES, Rows, load_rows, load_spec
from experiments.score import Score
from py_engine.errors import NonFiniteError
from py_engine.network.losses import Loss

ROWS, BLOCKS = "rows", "blocks"
"""What is drawn at random for an epoch: every row, or blocks of rows that lie side by side."""

PARTS = 20
"""Calls in which an epoch is trained, or as many as it has steps."""


@dataclass(frozen=True)
class Training:
    """What `train` was asked to do; `data` is a data set's name, or where files are. The fields are the options."""

    spec: str
    data: str
    epochs: int
    engine: str
    optimizer: str
    learning_rate: float
    momentum: float
    nesterov: bool
    weight_decay: float | None
    clip_norm: float | None
    schedule: str
    warmup: int
    step_epochs: int
    step_factor: float
    batch_size: int
    shuffle: str
    validation: float
    patience: int | None
    seed: int
    threads: int
    weights: Path | None
    save: Path | None
    checkpoint: Path | None
    resume: bool
    curve: str | None
    data_dir: Path | None

    @property
    def rule(self) -> Optimizer:
        """The optimizer, which checks its settings."""
        own = {"momentum": self.momentum, "nesterov": self.nesterov}
        more = {"weight_decay": self.weight_decay, "clip_norm": self.clip_norm}
        return Optimizer(self.optimizer, self.learning_rate, **own, **more)  # type: ignore[arg-type]

    @property
    def rates(self) -> Schedule:
        """The schedule, which checks its settings."""
        return Schedule(self.schedule, self.warmup, self.step_epochs, self.step_factor)

    def check(self) -> None:
        """Raise for options that do not go together, and for files that cannot be written."""
        if self.patience is not None and not self.validation:
            raise InputError("--patience stops by the validation loss: give --validation, such as 0.1, too")
        if self.resume and self.checkpoint is None:
            raise InputError("--resume resumes from the file that --checkpoint names: give that, too")
        if self.curve is not None:
            curve.check(self.curve)
        for option, path in self.written.items():
            if path is not None:
                check_place(option, path, InputError)
        if self.checkpoint is not None and self.checkpoint.exists() and not self.resume:
            raise InputError(
                f"--checkpoint: {self.checkpoint} exists: give --resume to resume from it, or another file"
            )
        check_apart(self.written, {"SPEC": self.spec, "--data": self.data}, InputError)
        if self.checkpoint is not None or not self.rates.is_constant:
            registry.check_resumable(self.engine)

    @property
    def written(self) -> dict[str, Path | None]:
        """The files that the training writes, by their options."""
        drawn = None if self.curve in (None, curve.TERMINAL) else Path(str(self.curve))
        return {"--save": self.save, "--checkpoint": self.checkpoint, "--curve": drawn}

    def deciding(self, spec: ModelSpec, initial: Arrays, rows: Rows) -> dict[str, Any]:
        """What decides the training, by name: with the same of it, it is the same bit for bit."""
        schedule = dataclasses.asdict(self.rates)
        if self.schedule == "cosine":
            schedule["epochs"] = self.epochs
        return {
            "model": spec.digest,
            "data": rows.digest(),
            "initial weights": weights.digest(initial),
            "engine": self.engine,
            "threads": self.threads,
            "optimizer": {"name": self.optimizer, **_as_json(self.rule.settings())},
            "schedule": schedule,
            "batch size": self.batch_size,
            **({} if self.shuffle == ROWS else {"shuffle": self.shuffle}),
            "validation": self.validation,
            "patience": self.patience,
            "seed": self.seed,
        }


def train(request: Training, output: Output, communicator: Any = None) -> None:
    """Train a network, print every epoch, and write weights, checkpoints and the learning curve when asked to.

    With a communicator its processes train together, and that of rank 0 writes.
    """
    spec = load_spec(request.spec)
    rule, schedule = request.rule, request.rates
    writes = communicator is None or communicator.Get_rank() == 0
    request.check()
    initial = weights.load(request.weights, spec) if request.weights else weights.initialise(spec, request.seed)
    rows, test = load_rows(request.data, request.data_dir, spec, output)
    for file in (*rows.files, *(test.files if test else ())):
        check_apart(request.written, {"--data": file.path}, InputError)
    engine = registry.get(request.engine)
    if rows.files and rows.x.nbytes > MOST_BYTES and not engine.maps:
        others = ", ".join(name for name in registry.names() if registry.get(name).maps)
        raise InputError(
            f"{request.data}: engine {engine.name} reads rows whole, and these are {rows.x.nbytes:,} bytes; expected "
            f"{MOST_BYTES:,} at most, or one of the engines {others}"
        )
    trained_on, validation = split(rows, request.validation, request.seed, request.data)
    if request.batch_size > len(trained_on):
        raise InputError(
            f"--batch-size: a mini-batch of {request.batch_size:,} rows is more than the {len(trained_on):,} training "
            f"rows of {request.data}; give {len(trained_on)} or less"
        )
    check = DataCheck(spec, np.dtype(spec.dtype))
    check.batches(len(trained_on), request.batch_size)
    kept = Checkpoint({}, initial, {})
    if request.checkpoint is not None:
        kept.settings = request.deciding(spec, initial, rows)
        if request.checkpoint.exists():
            found = checkpoint.load(request.checkpoint)
            checkpoint.differences(request.checkpoint, found.settings, kept.settings)
            kept = found
            if len(kept.history) > request.epochs:
                raise InputError(
                    f"--epochs {request.epochs}: {request.checkpoint} is of epoch {len(kept.history)}; give as many or "
                    "more, or another file"
                )
            output.say(f"resuming after epoch {len(kept.history)} from {request.checkpoint}")
    score = Score.of(spec, rows.is_sample)
    shown = _columns(validation is not None, test is not None and test.y is not None, schedule, score)
    lines = Lines(output.console, list(shown.values()))
    if communicator is not None:
        decided = request.deciding(spec, initial, rows) | {"epochs": len(kept.history)}
        check_agreement(communicator, json.dumps(decided, sort_keys=True) + weights.digest(kept.params))
        kept_in = f"from {request.checkpoint} with --resume" if request.checkpoint else "if there is a --checkpoint"
        output.say(
            f"{communicator.Get_size()} processes: when one is lost all end, and the same command resumes {kept_in}"
        )
    engine.prepare()
    source = {"data": "sample" if rows.is_sample else "given"}
    output.add({**source, **row} for row in kept.history)
    started = Worker(request.engine, request.threads) if communicator is None else None
    with started or Here(request.engine, request.threads, communicator) as worker:
        worker.build(spec, kept.params, rule, request.batch_size, spec.dtype)
        if kept.state:
            worker.load_state(kept.state)
        worker.preload(rows.x, np.asarray(rows.y))
        for epoch in range(len(kept.history) + 1, request.epochs + 1):
            if _is_over(kept.history, request.patience):
                break
            order = _order(trained_on, rows, epoch, request)
            try:
                row = {"epoch": epoch} | _train_epoch(worker, rows, order, epoch, request, check.loss, output)
                for name, some in (("validation", validation), ("test", test)) if writes else ():
                    if some is not None and some.y is not None:
                        with output.waiting(f"epoch {epoch}: evaluating the {len(some.x):,} {name} rows"):
                            found_now = worker.evaluate(some.x, some.y)
                        row |= {f"{name}_loss": found_now.loss, f"{name}_{score.key}": score.value(found_now)}
            finally:  # of a file that became shorter the worker dies
                for part in (rows, test):
                    if part is not None:
                        part.check()
            if communicator is not None:
                row = communicator.bcast(row)  # all decide alike when to stop
            kept.history.append(row)
            output.add([{**source, **row}])
            is_best = request.patience is not None and _best(kept.history) == epoch
            if is_best or request.checkpoint is not None or epoch == request.epochs:
                kept.params = worker.params()
            if is_best:
                kept.best = kept.params
            if request.checkpoint is not None:
                kept.state = worker.state()  # of all processes together
                if writes:
                    kept.save(request.checkpoint)
            lines.row([_cell(key, row[key], score) for key in shown])
    if writes:
        _finish(request, spec, kept, output)


def split(rows: Rows, share: float, seed: int, source: str) -> tuple[NDArray[np.int64], Rows | None]:
    """The numbers of the rows to train on, in order, and the rows that are kept apart, drawn by the seed.

    Of a file that is mapped the last rows are kept apart: others would have to be copied into memory.
    """
    if rows.y is None or not len(rows.y):
        raise InputError(f"{source}: no training rows")
    if not 0 <= share < 1:  # nor is NaN
        raise InputError(f"--validation: expected a share from 0 to below 1, found {share}")
    count = round(share * len(rows.y))
    if share and not 0 < count < len(rows.y):
        raise InputError(
            f"--validation: {share} of the {len(rows.y):,} training rows of {source} leaves none of a part"
        )
    if rows.files:
        first = len(rows.y) - count
        return np.arange(first), replace(rows, x=rows.x[first:], y=rows.y[first:]) if count else None
    drawn = np.random.default_rng([seed, 0]).permutation(len(rows.y))
    apart = np.sort(drawn[:count])
    return np.sort(drawn[count:]), Rows(rows.x[apart], rows.y[apart], rows.is_sample) if count else None


def _order(trained_on: NDArray[np.int64], rows: Rows, epoch: int, request: Training) -> NDArray[np.int64]:
    """The rows in the order in which an epoch trains on them."""
    if request.shuffle == BLOCKS:
        return mapped.shuffled_blocks(trained_on, rows.x.nbytes // len(rows.x), [request.seed, epoch])
    return trained_on[np.random.default_rng([request.seed, epoch]).permutation(len(trained_on))]


def _train_epoch(
    worker: Worker | Here,
    rows: Rows,
    order: NDArray[np.int64],
    epoch: int,
    request: Training,
    loss: Loss,
    output: Output,
) -> dict[str, Any]:
    """Train once on the rows of `order`: the time, the mean loss, and the learning rate of the last step."""
    size, schedule = request.batch_size, request.rates
    steps = -(-len(order) // size)
    each = -(-steps // PARTS)
    seconds = total = weight = 0.0
    rate = request.learning_rate
    with Steps(output.console, f"epoch {epoch}", steps) as progress:
        for first in range(0, steps, each):
            part = order[first * size : (first + each) * size]
            try:
                if schedule.is_constant:
                    losses = worker.train_epoch(rows.x, np.asarray(rows.y), part)
                else:
                    done, count = (epoch - 1) * steps + first, -(-len(part) // size)
                    rates = schedule.rates(request.learning_rate, done, count, steps, request.epochs * steps)
                    losses, rate = worker.train_steps(rows.x, np.asarray(rows.y), part, rates), float(rates[-1])
            except NonFiniteError as error:
                raise NonFiniteError(_renumbered(str(error), epoch, first, steps)) from None
            seconds += worker.seconds
            batches = [part[k : k + size] for k in range(0, len(part), size)]
            # Of a batch whose classes count differently, as evaluation has it.
            targets = np.asarray(rows.y)
            counts = [loss.weight(targets[batch]) if loss.couples_batch else float(len(batch)) for batch in batches]
            total += float(losses @ np.array(counts))
            weight += sum(counts)
            progress.show(first + len(losses), f"loss {fixed(float(losses.mean()), 4)}")
    return {"seconds": seconds, "loss": total / weight, "learning_rate": rate}


def _renumbered(message: str, epoch: int, before: int, steps: int) -> str:
    """An error's words with the number of its step in the epoch, of which it has seen a part."""
    message = re.sub(r"^step (\d+)", lambda found: f"step {int(found[1]) + before}", message)
    of_epoch = r"\(step (\d+) of \d+ in its epoch\)"
    return f"epoch {epoch}: " + re.sub(of_epoch, lambda found: f"(step {int(found[1]) + before} of {steps})", message)


def _columns(validated: bool, tested: bool, schedule: Schedule, score: Score) -> dict[str, str]:
    """What is printed of each epoch: the key of the number, and the head of its column."""
    found = {"epoch": "EPOCH", "seconds": "TIME", "loss": "LOSS"}
    if not schedule.is_constant:
        found["learning_rate"] = "RATE"
    for name, there in (("validation", validated), ("test", tested)):
        if there:
            found |= {f"{name}_loss": f"{name.upper()} LOSS", f"{name}_{score.key}": f"{name.upper()} {score.head}"}
    return found


def _cell(key: str, value: Any, score: Score) -> str:
    match key:
        case "epoch":
            return str(value)
        case "seconds":
            return duration(value)
        case "learning_rate":
            return scientific(value, 3)
    return score.shown(value) if key.endswith(score.key) else fixed(value, 4)


def _best(history: list[dict[str, Any]]) -> int:
    """The first epoch with the least validation loss; one that is no number is none."""
    losses = [row["validation_loss"] for row in history]
    return 1 + losses.index(min(losses, key=lambda loss: math.inf if math.isnan(loss) else loss))


def _is_over(history: list[dict[str, Any]], patience: int | None) -> bool:
    return patience is not None and bool(history) and len(history) - _best(history) >= patience


def _finish(request: Training, spec: ModelSpec, kept: Checkpoint, output: Output) -> None:
    """Say how it ended, and write what was asked for."""
    history, params = kept.history, kept.params
    if request.patience is not None and history:
        best = _best(history)
        params = kept.best or params
        stopped = (
            f"stopped: no better validation loss in {request.patience} epochs; "
            if len(history) < request.epochs
            else ""
        )
        output.say(f"{stopped}the best epoch is {best}, and its weights are those that are kept")
    if request.save:  # first of all: what follows may fail
        about = {"model": spec.name, "spec": spec.digest, "engine": request.engine, "epochs": str(len(history))}
        weights.save(request.save, params, about)
        output.say(f"weights: {request.save}")
    if request.curve == curve.TERMINAL:
        output.say()
        for line in curve.drawn(history):
            output.say(line)
    elif request.curve is not None:
        curve.picture(history, Path(request.curve))
        output.say(f"curve: {request.curve}")


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """As they come back from a file, where there are no tuples and no numbers that are none."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in settings.items()
        if not (isinstance(value, float) and not math.isfinite(value))
    }
