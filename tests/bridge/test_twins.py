"""What one engine has, the other has too, by the same names and in files of the same names.

What the Julia engine has is asked from Julia itself (`names.jl`), so that both lists are computed.
"""

from __future__ import annotations

import inspect
import math
import subprocess
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from bridge import layers, spec
from bridge.adapters import julia as adapter
from bridge.adapters.numpy import build_chain
from bridge.libjulia import sysimage
from bridge.libjulia.find import Julia
from bridge.session import OPTIMIZERS, Optimizer
from py_engine import network, ops
from py_engine.ad.op import TABLE
from py_engine.network import metrics

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "py_engine"
JULIA = ROOT / "julia_engine" / "src"

Lists = dict[str, dict[str, str]]
"""For each kind (op, layer, ...): the names, and their options as text."""

VALUES = {
    **{"units": 5, "filters": 6, "kernel": 3, "window": 2, "vocabulary": 9, "dimension": 4, "heads": 2},
    **{"shape": [6, 4], "axes": [1, 0], "activation": "relu", "rate": 0.5, "size": [5]},
}
"""A value for every key that a layer of a spec must have."""


def required_keys(kind: type[layers.Layer]) -> list[str]:
    """The keys of a layer that have no default, or of which one must be there."""
    if kind is layers.Interpolate:
        return ["size"]
    return [name for name, field in kind.model_fields.items() if field.is_required() and name not in ("id", "op")]


def sample(op: str) -> tuple[layers.Layer, tuple[int, ...]]:
    """A layer with nothing but its required keys, and the shape of an input for it."""
    kind = layers.LAYERS[op]
    joins = {} if kind.merged is layers.Layer.merged else {"inputs": ["input", "input"]}
    layer = kind.model_validate({"id": "a", "op": op, **joins, **{name: VALUES[name] for name in required_keys(kind)}})
    return layer, (4, *(6,) * len(layer.axes)) if isinstance(layer, layers.Windowed) else (4, 6)


SAMPLES = {op: sample(op) for op in layers.LAYERS}


@pytest.fixture(scope="module")
def there(julia: Julia, tmp_path_factory: pytest.TempPathFactory) -> Lists:
    """What the Julia engine has."""
    script = Path(__file__).with_name("names.jl")
    given = tmp_path_factory.mktemp("twins") / "lines"
    with given.open("wb") as file:
        for op, (layer, input) in SAMPLES.items():
            size = ",".join(map(str, reversed(input)))
            file.write(f"{size}\t".encode() + adapter.line("layer", {"id": "a", "op": op, **layer.settings()}))
        for name in OPTIMIZERS:
            settings = Optimizer(name, 0.1, clip_norm=1.0).settings()
            file.write(b"\t" + adapter.line("optimizer", {"name": name, **settings}))
    options = ["--startup-file=no", f"--project={JULIA.parent}", *sysimage.options(julia)]
    command = [julia.executable, *options, str(script), str(given)]
    done = subprocess.run(command, env=julia.environment(1), capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    found: Lists = {}
    for line in done.stdout.splitlines():
        kind, name, options = line.split("\t")
        found.setdefault(kind, {})[name] = options
    return found


def here() -> Lists:
    """What the numpy engine has."""
    return {
        # What only the rewriting of graphs makes is each engine's own.
        "op": dict.fromkeys((name for name, op in TABLE.items() if not op.fused), ""),
        # Functions that are ops themselves are in the table; the other list holds both.
        "function": dict.fromkeys(public_functions(), ""),
        "layer": dict.fromkeys(network.LAYERS, ""),
        "activation": dict.fromkeys(network.ACTIVATIONS, ""),
        "loss": dict.fromkeys(network.LOSSES, ""),
        "initialiser": {name: ",".join(options(function)) for name, function in network.INITIALISERS.items()},
        "optimizer": {name: ",".join(defaults(rule)) for name, rule in network.OPTIMIZERS.items()},
        "metric": {
            name: ""
            for name, thing in vars(metrics).items()
            if getattr(thing, "__module__", "") == metrics.__name__ and not name.startswith("_")
        },
    }


def public_functions() -> Iterable[str]:
    """Functions of `py_engine.ops` that are made of ops."""
    return (name for name, _ in inspect.getmembers(ops, inspect.isfunction) if not name.startswith("_"))


def options(function: Any) -> list[str]:
    """What can be set by keyword alone."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def defaults(rule: Any) -> list[str]:
    """An optimizer's options with their defaults, as Julia writes them: no limit is an infinite one, and two betas."""
    found = []
    for p in inspect.signature(rule).parameters.values():
        if p.name == "betas":
            found += [f"beta{k}={beta}" for k, beta in enumerate(p.default, 1)]
        else:
            found.append(f"{p.name}={math.inf if p.default is None else p.default}")
    return found


def settings(text: str) -> dict[str, Any]:
    """`a=0.1,b=false,c` as numbers by name, and None where there is no default."""
    words = {"true": 1.0, "false": 0.0}
    pairs = [item.partition("=") for item in text.split(",") if item]
    return {name: float(words.get(value.lower(), value)) if equals else None for name, equals, value in pairs}


def test_no_engine_lacks_what_the_other_has(there):
    ours = here()
    assert set(ours) == set(there) - {"settings"}
    lacking = {}
    for kind in ours:
        a, b = set(ours[kind]), set(there[kind])
        if kind == "function":  # each engine makes some functions of ops, and which is its own affair
            a, b = a | set(ours["op"]), b | set(there["op"])
        lacking[kind] = {"Julia lacks": sorted(a - b), "numpy lacks": sorted(b - a)}
    assert {kind: lists for kind, lists in lacking.items() if any(lists.values())} == {}


@pytest.mark.parametrize("kind", ["initialiser", "optimizer"])
def test_options_and_defaults_are_the_same(there, kind):
    theirs = {name: settings(text) for name, text in there[kind].items()}
    assert {name: settings(text) for name, text in here()[kind].items()} == theirs


# Settings -------------------------------------------------------------------------------------------------

# Arguments of the numpy engine's layers that are no settings of a spec.
OF_THE_ENGINE = {
    "activation": {op for op in layers.LAYERS if op == "dense" or op.startswith("conv")},  # in a spec a separate layer
    "seed": {"dropout"},  # in a spec no layer draws its own numbers
    "name": set(network.LAYERS),  # in a spec the id
}

# Keys of a spec that are no arguments of the engine's layers.
OF_THE_SPEC = {"interpolate": {"scale"}}  # which reading turns into a size


def test_the_spec_knows_the_engines_layers():
    assert set(layers.LAYERS) == set(network.LAYERS)


@pytest.mark.parametrize("op", layers.LAYERS)
def test_a_layers_settings_and_defaults_are_those_of_its_class_in_the_spec(op):
    kind, (layer, input) = network.LAYERS[op], SAMPLES[op]
    parameters = inspect.signature(kind).parameters
    theirs = {name for name in parameters if op not in OF_THE_ENGINE.get(name, ())}
    ours = type(layer).model_fields.keys() - {"id", "op", "inputs"} - OF_THE_SPEC.get(op, set())
    assert theirs == {*layer.lengths, *ours}
    arguments = layer.arguments(input)
    required = {name: arguments[name] for name in (*layer.lengths, *required_keys(type(layer)))}
    values = [v for name, p in parameters.items() if p.kind is p.VAR_POSITIONAL for v in required.pop(name)]
    header = {"format": "twingrad-model", "version": 1, "opset": spec.OPSET, "name": "one"}
    dtype = "int64" if layer.reads == "tokens" else "float32"
    network_of_one = {"input": {"shape": ["N", *input], "dtype": dtype}, "layers": [layer.model_dump()]}
    model = spec.parse(header | network_of_one | {"loss": {"op": "mean_squared_error"}})
    (built,) = build_chain(model, "float32")
    assert repr(built) == repr(kind(*values, **required, name="a"))


@pytest.mark.parametrize("op", layers.LAYERS)
def test_the_julia_engine_reads_a_layers_settings(there, op):
    layer, _ = SAMPLES[op]
    assert set(there["settings"][op].split(",")) == {"id", *layer.settings()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_settings_are_those_of_both_engines(there, name):
    settings = set(Optimizer(name, 0.1).settings())
    assert set(there["settings"][name].split(",")) == settings
    # Clipping element by element is the engines' own.
    assert set(inspect.signature(network.OPTIMIZERS[name]).parameters) == settings | {"clip_value"}


# Files ----------------------------------------------------------------------------------------------------

# Twins by another name: a package's own module in Python, a file beside its folder in Julia.
RENAMED = {
    "__init__.py": "TwinGrad.jl",
    "ad/__init__.py": "AD.jl",
    "network/__init__.py": "NETWORK.jl",
    "errors.py": "ad/errors.jl",
}
PYTHON_ONLY = {
    **{f"ad/{folder}/__init__.py": "makes the folder a package" for folder in ("ops", "compile", "control")},
    "ad/draw.py": "pictures of graphs, for which one engine is enough",
    "ad/compile/products.py": "BLAS has its buffers in memory from the first product on; threads share large products",
    "ad/compile/reassociation.py": "gradients' sums added early; in Julia they are added where they come up",
    "ad/ops/arguments.py": "numpy's own signatures, and what is refused of them; Julia's methods say so themselves",
    **{
        f"ad/ops/{name}.py": "numpy's functions that are made of ops, and that only numpy has a name for"
        for name in ("numpy_functions", "padding", "polynomials", "questions", "statistics")
    },
    "ad/ops/by_values.py": "numpy's functions whose result has a shape that depends on values",
    "ad/ops/ufuncs.py": "numpy's ufuncs and their methods; in Julia functions are dotted, reduced and accumulated",
    "ad/ops/scipy_functions.py": "what scipy computes, where the caller has imported it",
    **{
        f"scipy/{name}.py": "scipy's functions of Python code on tensors; Julia's packages have no such names"
        for name in ("__init__", "integrate", "linalg", "signal", "special", "stats")
    },
    "ad/ops/product_parts.py": "for kernels of numpy's BLAS; Julia computes in tiles what it does not leave to BLAS",
    "ad/ops/blocks.py": "samples in blocks, between calls of numpy; Julia's loops are blocked where they are",
    "ad/compile/zero_copy.py": "large arrays used in place by replays; in Julia that is part of compiled functions",
    "network/read_ahead.py": "of a mapped file; Python asks for its rows on behalf of the Julia engine, too",
    "network/lazy_updates.py": "rows that Adam updates later, at once; Julia's update is one pass, not ten",
    "network/recurrence.py": "LSTM and GRU as one op each; in Julia the single ops are computed tile by tile",
    "ad/ops/fused_text.py": "ops that only fusion makes; Julia's are with its fusion",
}
JULIA_ONLY = {
    "ad/copies.jl": "copies of tensors, which keep the graph or refuse; the numpy engine's are methods of its Tensor",
    "ad/dual_numbers.jl": "forward mode of plain Julia functions, by numbers that carry derivatives",
    "ad/compile/fused_pooling.jl": "convolutions with their max-pool; the numpy engine's are in fusion and ops",
    "ad/lowering.jl": "the instructions that kernels are made of; the numpy engine's kernels are numpy's calls",
    "ad/ops/julia_functions.jl": "Julia's functions that are made of ops, and that only Julia has a name for",
    "ad/compile/tiles.jl": "fused regions of elementwise ops, done tile by tile; numpy has calls instead",
    "ad/kernels/*": "the loops that a tape runs; the numpy engine's are numpy's",
    "ad/tensor_maps.jl": "dictionaries of tensors, in the order in which these were made; numpy's are Python's",
    "ad/nesting.jl": "dual numbers that meet tensors; the numpy engine has no dual numbers",
    "ad/compile/watched.jl": "what Julia code may have read of what a traced function captures",
    "functions.jl": "a programmer's own Julia functions, which Python calls",
    "network/lines.jl": "settings as lines of text, for callers in other languages",
    "entry.jl": "the entry points for callers of C functions, which Python needs none of",
    "versions.jl": "what differs between versions of Julia, each with its reason",
    "*precompile.jl": "what Julia compiles ahead of its first use",
}


def files(folder: Path, suffix: str) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob(f"*{suffix}")}


def test_files_have_twins():
    ours, theirs = files(PYTHON, ".py"), files(JULIA, ".jl")
    expected = {RENAMED.get(name, name.removesuffix(".py") + ".jl") for name in ours - set(PYTHON_ONLY)}
    alone = {name for name in theirs if any(fnmatch(name, pattern) for pattern in JULIA_ONLY)}
    assert expected - theirs == set(), "in Python alone"
    assert theirs - alone - expected == set(), "in Julia alone"


def test_exceptions_are_still_there():
    ours, theirs = files(PYTHON, ".py"), files(JULIA, ".jl")
    assert set(RENAMED) | set(PYTHON_ONLY) <= ours
    assert set(RENAMED.values()) <= theirs
    for pattern in JULIA_ONLY:
        assert any(fnmatch(name, pattern) for name in theirs), pattern
