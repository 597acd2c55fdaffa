"""The recipe of a system image of Julia that holds the engine in compiled form: ``python -m contrib.sysimage``.

It is made of what is there, a Julia before 1.9 and a C compiler; `bridge.libjulia.sysimage` says what it is good for,
and where it is used.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge import spec as specs
from bridge import weights
from bridge.adapters.julia import JuliaSession, describe
from bridge.child import completed, ending
from bridge.errors import JuliaUnavailableError, TwinGradError
from bridge.libjulia.environment import ENGINE
from bridge.libjulia.find import Julia, find
from bridge.libjulia.runtime import EMBEDDED, literal
from bridge.libjulia.start import runtime
from bridge.libjulia.sysimage import COMMAND, KEEPS_MACHINE_CODE, SUFFIX, image_folder, path_for
from bridge.session import Optimizer
from py_engine.network.parameters import Layout

__all__ = ["build", "demonstrate", "main", "remove"]

BYTES_NEEDED = 1_500_000_000
"""What is written while an image is made, with room to spare; 200 MB of it remain."""

Say = Callable[[str], None]

_SCRIPT = Path(__file__).with_name("sysimage.jl")
_LAST_LINES = 8

# Run in its own process, with the modules of this one.
_PROOF = """
import json, sys
start = json.loads(sys.argv[1])
sys.path[:] = start["path"]
from bridge.errors import TwinGradError
from contrib.sysimage import demonstrate
try:
    demonstrate(start["sysimage"])
except TwinGradError as error:
    sys.exit(str(error))
"""


def build(julia: Julia, say: Say = print) -> Path:
    """Make the image for this Julia, see it work, and put it in its place; others that it replaces are removed.

    Takes some minutes. Raises `JuliaUnavailableError`, with nothing changed, when it can't be made or does not work.
    """
    if julia.release >= KEEPS_MACHINE_CODE:
        raise JuliaUnavailableError(f"{julia} keeps compiled code with the package itself, and needs no system image")
    compiler = _compiler()
    try:
        target = path_for(julia)
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
        if free < BYTES_NEEDED:
            raise JuliaUnavailableError(
                f"{target.parent} has {free / 1e6:.0f} MB free, and {BYTES_NEEDED / 1e6:.0f} MB are needed: make room, "
                "or name another folder in TWINGRAD_CACHE"
            )
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-", ignore_cleanup_errors=True) as folder:
            image = _make(julia, compiler, Path(folder), say)
            say("seeing it work")
            _prove(image)
            with image.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(image, target)
        for other in target.parent.glob(f"twingrad-{julia.version}-*{SUFFIX}"):
            if other != target:
                other.unlink()
    except OSError as error:
        raise JuliaUnavailableError(f"the system image can't be written: {error}") from None
    return target


def remove() -> list[Path]:
    """Remove all images; returns which there were."""
    there = sorted(image_folder().glob(f"twingrad-*{SUFFIX}"))
    for path in there:
        path.unlink()
    return there


def demonstrate(sysimage: str) -> None:
    """Start Julia here with this image and train: raises, or ends the process, where it does not work."""
    all_threads = min(2, os.cpu_count() or 1)
    here = runtime(all_threads, backend=EMBEDDED, sysimage=sysimage)
    if here.evaluate('any(id -> id.name == "TwinGrad", keys(Base.loaded_modules))') is not True:
        raise JuliaUnavailableError("the image does not hold the engine")
    if here.evaluate("TwinGradRuntime.catches()") is not True:
        raise JuliaUnavailableError("exceptions are not caught")
    rng = np.random.default_rng(0)
    for model in _models():
        for threads in (all_threads, 1):
            session = JuliaSession(model, weights.initialise(model, 0), Optimizer("sgd", 0.01), 8, threads=threads)
            x = rng.standard_normal((20, *model.input.sample)).astype(np.float32)
            y = np.zeros((20, *model.target.shape), np.int64 if model.target.kind == "classes" else np.float32)
            first, *_, last = [session.train_epoch(x, y, np.arange(20)).mean() for _ in range(10)]
            if not last < first:
                raise JuliaUnavailableError(f"{model.name} does not learn: its loss went from {first} to {last}")
            session.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Ends with 0 when the image is in its place, with 2 when it can't be made."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Compile the Julia engine into a system image, with which Julia starts from then on."
    )
    parser.add_argument("--again", action="store_true", help="make it even if it is there")
    parser.add_argument("--remove", action="store_true", help="remove it instead")
    options = parser.parse_args(arguments)
    try:
        if options.remove:
            for path in remove():
                print(f"removed {path}")
            return 0
        julia = find()
        print(julia)
        target = path_for(julia)
        if options.again or not target.is_file():
            print("making a system image for it (some minutes)", flush=True)
            before = time.perf_counter()
            build(julia, lambda line: print(f"  {line}", flush=True))
            print(f"done in {time.perf_counter() - before:.0f} s")
        print(f"{target} ({target.stat().st_size / 1e6:.0f} MB)")
    except TwinGradError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return JuliaUnavailableError.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _compiler() -> list[str]:
    """The C compiler, which here only calls the linker with the right settings."""
    if os.name != "posix":
        raise JuliaUnavailableError("system images are made on Linux and macOS only")
    named = shlex.split(os.environ.get("CC", ""))
    for command in (named, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    raise JuliaUnavailableError(
        "no C compiler was found, which links the image: install gcc or clang, or name one in CC"
    )


def _make(julia: Julia, compiler: Sequence[str], folder: Path, say: Say) -> Path:
    sessions, compiled, image = folder / "sessions.tsv", folder / "compiled.o", folder / "image"
    sessions.write_text("".join(f"{line}\n" for line in _sessions()), encoding="utf-8")
    say("compiling Julia's own library and the engine")
    # Modules compiled before are no use here: the image holds what is defined in this process.
    options = ["--startup-file=no", "--history-file=no", "--compiled-modules=no", f"--sysimage={julia.sysimage}"]
    script = f"Base.include(Main, {literal(_SCRIPT)})"
    without = {"JULIA_LOAD_PATH", "JULIA_PROJECT"}
    variables = {k: v for k, v in julia.environment(1).items() if k not in without}
    variables |= {"TWINGRAD_ENGINE": str(ENGINE), "TWINGRAD_SESSIONS": str(sessions)}
    _run("Julia", [julia.executable, *options, f"--output-o={compiled}", "-e", script], variables)
    say("linking")
    # What it calls of libjulia is found in the process that loads it, as for every plug-in.
    if sys.platform == "darwin":
        link = ["-dynamiclib", "-undefined", "dynamic_lookup", f"-Wl,-force_load,{compiled}"]
    else:
        link = ["-shared", "-Wl,--whole-archive", str(compiled), "-Wl,--no-whole-archive"]
    _run(compiler[0], [*compiler, "-o", str(image), *link], os.environ)
    return image


def _prove(image: Path) -> None:
    start = {"path": sys.path, "sysimage": str(image)}
    _run("Julia with the new image", [sys.executable, "-c", _PROOF, json.dumps(start)], os.environ)


def _run(name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    try:
        done = completed(command, environment)
    except OSError as error:
        raise JuliaUnavailableError(f"{name} can't be started: {error.strerror or error}") from None
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        # Julia's message comes before the stack, and all else before that.
        first = next((n for n, line in enumerate(said) if line.startswith("ERROR: ")), -_LAST_LINES)
        last = "".join(f"\n  {line}" for line in said[first:][:_LAST_LINES]) or " nothing"
        raise JuliaUnavailableError(f"{name} {ending(done.returncode)}; it last said:{last}")


# What is trained: the layers, losses and optimizers of the papers, in sizes for which the engine takes the same ways.

_OPTIMIZERS = (Optimizer("sgd", 0.01), Optimizer("rmsprop", 0.01), Optimizer("adam", 0.01), Optimizer("adamw", 0.01))


def _models() -> Iterator[specs.ModelSpec]:
    segments = {"id": "segments", "op": "reshape", "shape": [4, 196]}
    dense = {"id": "dense", "op": "dense", "units": 32}
    output = {"id": "output", "op": "dense", "units": 10}
    yield _model("rnn", [784], segments, {"id": "rnn", "op": "rnn", "units": 64}, output)
    for op in ("lstm", "gru"):
        yield _model(op, [784], segments, {"id": op, "op": op, "units": 32}, output)
    relu, dropout = (
        {"id": "relu", "op": "activation", "activation": "relu"},
        {"id": "drop", "op": "dropout", "rate": 0.1},
    )
    yield _model("dense", [28, 28], {"id": "flat", "op": "flatten"}, dense, relu, dropout, output)
    tanh = {"id": "tanh", "op": "activation", "activation": "tanh"}
    yield _model("regression", [8], dense, tanh, output, loss="mean_squared_error")
    flat, pool = {"id": "flat", "op": "flatten"}, {"op": "max_pool2d", "window": 2}
    conv = {"op": "conv2d", "filters": 16, "kernel": 5}
    lenet = {"id": "conv1", **conv}, relu, {"id": "pool1", **pool}, {"id": "conv2", **conv}, flat
    yield _model("lenet", [3, 16, 16], *lenet, output)
    conv = {"op": "conv2d", "filters": 16, "kernel": 3, "padding": 1, "bias": False}
    padded = {"id": "conv1", **conv, "bias": True}, relu, {"id": "pool1", **pool}
    strided = {"id": "conv2", **conv, "stride": 2}, {"id": "norm", "op": "batch_norm"}, {**relu, "id": "relu2"}
    yield _model("padded", [3, 16, 16], *padded, *strided, {"id": "mean", "op": "global_avg_pool"}, output)


def _model(
    name: str, shape: list[int], *layers: dict[str, Any], loss: str = "softmax_cross_entropy"
) -> specs.ModelSpec:
    header = {"format": "twingrad-model", "version": 1, "opset": 3, "name": name}
    input = {"shape": ["N", *shape], "dtype": "float32"}
    return specs.parse({**header, "input": input, "layers": list(layers), "loss": {"op": loss}})


def _sessions() -> Iterator[str]:
    """For sysimage.jl, one session per line: dtype, sizes, and the description, its line feeds as tabs."""
    batch = 100
    for model in _models():
        length = Layout.of({name: one.shape for name, one in model.parameters().items()}).size
        features, targets, outputs = (math.prod(s) for s in (model.input.sample, model.target.shape, model.output))
        labels = int(model.target.kind == "classes")
        sizes = (length, batch + batch // 2, features, labels, targets, outputs)
        for optimizer in _OPTIMIZERS:
            for dtype in ("float32", "float64"):
                description = describe(model, optimizer, batch, np.dtype(dtype), 1).decode().replace("\n", "\t")
                yield f"{dtype}\t{' '.join(map(str, sizes))}\t{description}"


if __name__ == "__main__":
    sys.exit(main())
