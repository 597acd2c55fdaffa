"""The shared test vectors, replayed: eagerly and compiled, in float64 and in float32.

The Julia engine replays the same files in `julia_engine/test/ad_vectors.jl`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import py_engine as pe
from py_engine import Tensor, ops
from py_engine.ad.op import TABLE
from py_engine.ad.ops.convolution import paddings, per_axis
from py_engine.ad.reverse import gradients


def load_generator() -> Any:
    """The module `tests/vectors/generate.py` (test folders are not packages, so it cannot be imported)."""
    path = Path(__file__).parents[1] / "vectors" / "generate.py"
    spec = importlib.util.spec_from_file_location("vectors_generate", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


generate = load_generator()
VECTORS = generate.read()
TOLERANCE = {np.float64: 1e-10, np.float32: 1e-5}


# What the attributes' texts mean --------------------------------------------------------------------------


def axes(text: str) -> Any:
    """`2` is a number, `0,2` and `2,` are tuples, and so is nothing."""
    return tuple(map(int, filter(None, text.split(",")))) if "," in text or not text else int(text)


def shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def places(text: str) -> tuple[Any, ...]:
    """Each place as an index of the op `assemble`: (start, stop, step) per axis."""
    return tuple(
        tuple((item.start, item.stop, item.step) for item in generate.index_of(place)) for place in text.split("|")
    )


def paired(numbers: Any) -> Any:
    """A pair for each spatial axis, from its numbers one after the other; a single number stays one."""
    return numbers if isinstance(numbers, int) else tuple(zip(numbers[::2], numbers[1::2], strict=True))


PARSE: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("axis", "axes", "source", "destination", "axes_a", "axes_b"), axes),
    **dict.fromkeys(("ddof", "classes", "ignored", "axis1", "axis2", "shift", "repeats", "offset", "k", "n"), int),
    **dict.fromkeys(("a_min", "a_max", "constant_values", "rate", "q", "eps", "label_smoothing"), float),
    **dict.fromkeys(("keepdims", "causal", "align_corners", "ceil_mode", "count_padding"), lambda text: text == "1"),
    **dict.fromkeys(("mode", "reduction"), str),
    "size": shape,
    "shape": shape,
    "pad_width": lambda text: tuple(map(tuple, np.reshape(shape(text), (-1, 2)).tolist())),
    "index": lambda text: generate.index_of(text),
    "places": places,
    **dict.fromkeys(("stride", "dilation", "window", "output_padding"), axes),
    "padding": lambda text: paired(axes(text)),
    **dict.fromkeys(("groups", "vocabulary", "padding_index"), int),
    "reps": shape,
    "subscripts": str,
    "side": str,
    "dtype": np.dtype,
}


def settings(axes: int, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> dict[str, Any]:
    """The attributes of a convolution as the ops have them."""
    return {
        "stride": per_axis("stride", stride, axes),
        "padding": paddings(padding, axes),
        "dilation": per_axis("dilation", dilation, axes),
        "groups": groups,
    }


def pooling(window: tuple[int, ...], stride: Any = None, padding: Any = 0, dilation: Any = 1) -> dict[str, Any]:
    """The attributes of pooling as the ops have them."""
    of = settings(len(window), window if stride is None else stride, padding, dilation)
    return {"window": window, **{name: of[name] for name in ("stride", "padding", "dilation")}}


def positive_definite(x: Tensor) -> Tensor:
    return x @ x.T + np.diag(np.arange(1, len(x) + 1)).astype(x.dtype)


def squares(factors: Any, first: int, *before: Tensor) -> Tensor:
    """Results of a decomposition as one vector, those from number `first` on squared: their signs are free."""
    return np.concatenate([*before, *factors[:first], *(np.ravel(x * x) for x in factors[first:])])


# How a vector is called where it is not `ops.name(*operands, **attributes)`.
CALLS: dict[str, Callable[..., Tensor]] = {
    "polygamma": lambda x, n: ops.polygamma(n, x),
    "one_hot": lambda labels, **at: ops.one_hot(labels, dtype=np.int64, **at),
    "group_norm": lambda x, weight, bias, groups: ops.group_norm(x, groups, weight, bias),
    "cholesky": lambda x: ops.cholesky(positive_definite(x)),
    "eigh": lambda x: squares(np.linalg.eigh(positive_definite(x)), 1),
    "svd": lambda x: squares(np.linalg.svd(x, full_matrices=False)[::2], 0, np.linalg.svd(x, full_matrices=False)[1]),
    "qr": lambda x: squares(np.linalg.qr(x), 0),
    "topk": lambda x, **at: ops.topk(x, **at)[0],
    "concatenate": lambda *parts, axis: ops.concatenate(parts, axis),
    "stack": lambda *parts, axis: ops.stack(parts, axis),
    "slice": lambda x, index: x[index],
    "gather": lambda x, i: x[i],
    "scatter": lambda g, i, shape: TABLE["scatter"](g, i, pattern=("array",), shape=shape),
    "assemble": lambda *parts, places, shape: ops.assemble(parts, places, shape),
    "tensordot": lambda a, b, axes_a, axes_b: ops.tensordot(a, b, (axes_a, axes_b)),
    "einsum": lambda *operands, subscripts: ops.einsum(subscripts, *operands),
    "clip": lambda x, a_min=None, a_max=None: ops.clip(x, a_min, a_max),
    "dropout": lambda x, rate: ops.dropout(x, rate, np.random.default_rng(1)),
    "dropout_mask": lambda x, rate: TABLE["dropout_mask"](x, rate=rate, generator=np.random.default_rng(1)),
    "conv_input_gradient": lambda g, weight, shape, **at: TABLE["conv_input_gradient"](
        g, weight, lengths=shape[2:], **settings(len(shape) - 2, **at)
    ),
    "conv_weight_gradient": lambda g, x, shape, **at: TABLE["conv_weight_gradient"](
        g, x, kernel=shape[2:], **settings(len(shape) - 2, **at)
    ),
    "max_pool_gradient": lambda g, x, **at: TABLE["max_pool_gradient"](
        g, x, ops.max_pool(x, **at), lengths=x.shape[2:], **pooling(**at)
    ),
    "max_pool_gather": lambda u, x, **at: TABLE["max_pool_gather"](u, x, ops.max_pool(x, **at), **pooling(**at)),
    "avg_pool_gradient": lambda g, shape, **at: TABLE["avg_pool_gradient"](g, lengths=shape[2:], **pooling(**at)),
    "softmax_cross_entropy_gradient": lambda g, x, y: TABLE["softmax_cross_entropy_gradient"](
        g, x, ops.logsumexp(x, -1), y
    ),
}


def label(vector: Any) -> str:
    sizes = " ".join(str(x.shape).replace(" ", "") for x in vector.operands)
    return f"{vector.name} {sizes} {';'.join(f'{k}={v}' for k, v in vector.attributes.items())}".strip()


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("vector", VECTORS, ids=label)
def test_replay(vector, dtype):
    arrays = [x.astype(dtype) if x.dtype == np.float64 else x for x in vector.operands]
    upstream = None if vector.upstream is None else vector.upstream.astype(dtype)
    wanted = [i for i, g in enumerate(vector.gradients) if g is not None]
    expected = [vector.result, *(vector.gradients[i] for i in wanted)]
    attributes = {key: PARSE[key](text) for key, text in vector.attributes.items()}
    call = CALLS.get(vector.name) or getattr(ops, vector.name, None) or TABLE[vector.name]

    def outputs(*operands: Tensor) -> list[Tensor]:
        y = call(*operands, **attributes)
        return [y, *gradients([y], [Tensor(upstream)], [operands[i] for i in wanted])] if wanted else [y]

    eager = outputs(*(Tensor(x, requires_grad=i in wanted) for i, x in enumerate(arrays)))
    compiled = pe.compile(outputs)(*arrays)
    for way, results in (("eager", [x.numpy() for x in eager]), ("compiled", compiled)):
        for place, (result, value) in enumerate(zip(results, expected, strict=True)):
            what = f"{way}: {f'gradient {wanted[place - 1]}' if place else 'result'}"
            assert result.dtype == (dtype if value.dtype == np.float64 else value.dtype), what
            assert result.shape == value.shape, what
            distance = np.linalg.norm(np.ravel(result.astype(np.float64) - value))
            assert distance <= TOLERANCE[dtype] * np.linalg.norm(np.ravel(value.astype(np.float64))), what


def test_every_op_and_function_is_covered():
    # Fused ops are made by the rewriting of graphs alone, and tested against what they stand for.
    own = {name for name, op in TABLE.items() if not op.fused}
    assert own | PUBLIC <= {vector.name for vector in VECTORS}


PUBLIC = {
    name
    for name, function in vars(ops).items()
    if callable(function)
    and getattr(function, "__annotations__", {}).get("return") in ("Tensor", "tuple[Tensor, Tensor]")
    and any("Operand" in str(hint) for key, hint in function.__annotations__.items() if key != "return")
    and not name.startswith(("_", "as_tensor"))
}  # fmt: skip


@pytest.mark.skipif(np.finfo(np.longdouble).eps > 1e-18, reason="needs a long double of more than 64 bits")
def test_files_are_what_the_generator_computes():
    computed = generate.compute()
    assert [(v.name, v.attributes) for v in computed] == [(v.name, v.attributes) for v in VECTORS]
    for fresh, stored in zip(computed, VECTORS, strict=True):
        pairs = [(fresh.upstream, stored.upstream), (fresh.result, stored.result)]
        pairs += list(zip(fresh.operands, stored.operands, strict=True))
        pairs += list(zip(fresh.gradients, stored.gradients, strict=True))
        for new, old in pairs:
            assert (new is None) == (old is None), label(stored)
            if new is not None:
                assert new.dtype == old.dtype and new.shape == old.shape, label(stored)
                np.testing.assert_allclose(new, old, rtol=1e-12, atol=1e-13, err_msg=label(stored))


def test_files_stay_small():
    assert sum(path.stat().st_size for path in generate.FOLDER.glob("*.*") if path.suffix in (".bin", ".tsv")) < 400_000
