"""LSTM and GRU over all steps of a sequence, each as one op, with its gradient as another.

As ops on single gates, a step of an LSTM with its gradient is 38 calls of numpy, each of which takes half a microsecond
before it computes anything, and twice that where rows lie apart. Here it is 20 on memory in one piece, since

- the weights are negated beforehand, which is exact, so that a sigmoid, 1 / (1 + exp(-z)), has nothing to negate;
- what the gradient is multiplied by at each step is known after the forward pass, and computed for many steps at once;
- the numbers of a gate lie together, not those of a sample.

Results differ from those of the single ops by roundings. A recurrence has its definition in single ops, and the calls.
All other derivatives (forward mode, the gradient's own gradient), and batches in which each sample has its own
weights, follow from the definition.

Shapes: T steps, N samples, H units, G gates: an LSTM has four, which are i, f, g, o side by side in a row of the
projected inputs, (T, N, 4 H), and i, f, o, -g where they are kept, (T, 4, N, H); a GRU three: r, z, n.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from py_engine.ad import ops
from py_engine.ad.forward import push_forward
from py_engine.ad.op import Call, Op, Scratch, Tangents, c_ordered, common_dtype, float_only
from py_engine.ad.ops.blocks import copies
from py_engine.ad.ops.product_parts import in_columns
from py_engine.ad.reverse import gradients
from py_engine.ad.state import LEVELS, STATE, entering
from py_engine.ad.tensor import Array, Node, Tensor

Kinds: TypeAlias = "list[tuple[tuple[int, ...], Any]]"
Definition: TypeAlias = Callable[..., "list[Tensor]"]


class Recurrence(NamedTuple):
    """All steps as one op, and in single ops."""

    op: Op
    steps: Definition


BLOCK = 32_768
"""Elements of the gates of the steps that are worked on at once: two such arrays fit a cache."""


def _blocks(steps: int, per_step: int) -> list[slice]:
    """The steps in blocks of about `BLOCK` elements."""
    count = max(1, BLOCK // max(per_step, 1))
    return [slice(first, min(first + count, steps)) for first in range(0, steps, count)]


def _by_gate(rows: Array, gates: int) -> Array:
    """Rows (..., N, G H) as a view (..., G, N, H)."""
    return np.moveaxis(rows.reshape(*rows.shape[:-1], gates, rows.shape[-1] // gates), -2, -3)


def _one(dtype: Any) -> Array:
    """The number one as an array, which numpy need not make of it at each call."""
    return np.ones((), dtype)


def _memory_of_weights(state: Array, weights: Array, product: Array, scratch: Scratch) -> Array:
    """Memory for a copy of the weights, which lies as the products with states are the fastest."""
    by_columns = scratch(weights.shape[::-1], weights.dtype).T
    is_in_parts = in_columns(state, by_columns, product)[1] is not by_columns
    return by_columns if is_in_parts else by_columns.T.reshape(weights.shape)


def _sigmoid_of_negated(z: Array, one: Array) -> list[Call]:
    return [partial(np.exp, z, z), partial(np.add, z, one, z), partial(np.reciprocal, z, z)]


# What follows from a definition ---------------------------------------------------------------------------


def _as_defined(definition: Definition, node: Node, needed: Sequence[bool]) -> tuple[list[Tensor], list[Tensor], int]:
    """New variables for a node's inputs, its results computed from them in single ops, and the variables' level."""
    connected, level = STATE.grad_enabled, next(LEVELS)
    again = []
    with entering(grad_enabled=True):
        for x, need in zip(node.inputs, needed, strict=True):
            fixed = x.data is not None and STATE.trace is None and not (connected and x.requires_grad)
            again.append(Tensor(x.numpy()) if fixed else ops.identity(x))
            if need:
                again[-1].level = level
        return again, definition(*again, **node.attrs), level


def _pull(definition: Definition, cotangents: Tangents, needed: Sequence[bool], node: Node) -> list[Tensor | None]:
    """The vjp of a recurrence, by the rules of the ops that it is defined in."""
    again, results, level = _as_defined(definition, node, needed)
    seeded = [(y, g) for y, g in zip(results, cotangents, strict=True) if g is not None]
    targets = [x for x, need in zip(again, needed, strict=True) if need]
    found = iter(gradients([y for y, _ in seeded], [g for _, g in seeded], targets, stop_at_targets=True, level=level))
    return [next(found) if need else None for need in needed]


def _push(definition: Definition, tangents: Tangents, node: Node, *inputs: Tensor, **attrs: Any) -> Tangents:
    """The jvp of a recurrence, by the rules of the ops that it is defined in."""
    again, results, level = _as_defined(definition, node, [t is not None for t in tangents])
    return push_forward(results, {x: t for x, t in zip(again, tangents, strict=True) if t is not None}, level=level)


def _batch(
    definition: Definition,
    op: Op,
    count: int,
    mapped: Sequence[bool],
    inputs: Sequence[Tensor],
    attrs: Mapping[str, Any],
) -> tuple[Sequence[Tensor], Sequence[bool]]:
    """Many batches at once: as the samples of one, where they share the weights, which are the last input."""
    each = [
        x if is_mapped else ops.broadcast_to(x, (count, *x.shape)) for x, is_mapped in zip(inputs, mapped, strict=True)
    ]
    if mapped[-1]:
        found = definition(*each, **attrs)
    else:
        together = [ops.moveaxis(x, 0, -3) for x in each[:-1]]
        together = [ops.reshape(x, (*x.shape[:-3], count * x.shape[-2], x.shape[-1])) for x in together]
        results = op.apply_several((*together, inputs[-1]), attrs)
        apart = [ops.reshape(y, (*y.shape[:-2], count, y.shape[-2] // count, y.shape[-1])) for y in results]
        found = [ops.moveaxis(y, -3, 0) for y in apart]
    return found, [True] * len(found)


def _narrow(attrs: Mapping[str, Any], needed: Sequence[bool]) -> Mapping[str, Any]:
    """Keep nothing for a gradient where there is none."""
    return {**attrs, "keep": False} if "keep" in attrs and not any(needed[1:]) else attrs


def _recurrence(
    name: str,
    definition: Definition,
    infer: Callable[..., Kinds],
    bind: Callable[..., list[Call]],
    flops: Callable[..., int],
    doc: str,
    vjp: Callable[..., Sequence[Tensor | None]] | None = None,
) -> Op:
    def kernel(*arrays: Array, **attrs: Any) -> None:
        given = len(inspect.signature(definition).parameters) - len(attrs)
        with np.errstate(over="ignore"):  # where a sigmoid is 0
            for call in bind(arrays[:given], *arrays[given:], np.empty, **attrs):
                call()

    return Op(
        name,
        infer,
        kernel=kernel,
        bind=bind,
        several=True,
        narrow=_narrow,
        vjp=vjp or partial(_pull, definition),
        jvp=partial(_push, definition),
        batch=partial(_batch, definition),
        accepts=c_ordered,
        flops=flops,
        product=True,
        steps=True,
        doc=doc,
    )


def _kinds(projected: Tensor, recurrent: Tensor, last: bool, keep: bool, kept: int) -> Kinds:
    """The results of a forward pass: the last state or all; then, to keep, all, `kept` more arrays, and the gates."""
    (steps, samples, width), units = projected.shape, recurrent.shape[0]
    dtype = float_only(common_dtype((projected, recurrent)))
    states = (steps, samples, units)
    shapes: list[tuple[int, ...]] = [(samples, units)] if last else [states]
    if keep:
        shapes += [states] * (last + kept) + [(steps, width // units, samples, units)]
    return [(shape, dtype) for shape in shapes]


def _rows(gates: Tensor, less: int = 0) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the gates of all but `less` steps, side by side for each sample."""
    steps, count, samples, units = gates.shape
    return (steps - less, samples, count * units), gates.dtype


def _by_recurrent(states: Tensor, by_product: Tensor) -> Tensor:
    """The gradient by the recurrent weights: of all steps' products, (T - 1, N, H) and (T - 1, N, G H), in one."""
    rows = states.shape[0] * states.shape[1]
    left = ops.reshape(states, (rows, states.shape[2]))
    return ops.transpose(left, (1, 0)) @ ops.reshape(by_product, (rows, by_product.shape[2]))


# LSTM -----------------------------------------------------------------------------------------------------


def lstm_steps(projected: Tensor, recurrent: Tensor, last: bool, keep: bool) -> list[Tensor]:
    """The LSTM in single ops, with the results of `LSTM`. Both may have further axes in front.

    The first step has nothing to forget; i and f are neighbours, so one sigmoid serves both.
    """
    units = recurrent.shape[-2]
    states: list[Tensor] = []
    cells: list[Tensor] = []
    tanhs: list[Tensor] = []
    gates: list[Tensor] = []
    for t in range(projected.shape[-3]):
        z = projected[..., t, :, :]
        if states:
            z = z + states[-1] @ recurrent
        first = ops.sigmoid(z[..., : 2 * units] if states or keep else z[..., :units])
        g, o = ops.tanh(z[..., 2 * units : 3 * units]), ops.sigmoid(z[..., 3 * units :])
        cell = first[..., :units] * g
        cells.append(first[..., units:] * cells[-1] + cell if cells else cell)
        tanhs.append(ops.tanh(cells[-1]))
        states.append(o * tanhs[-1])
        if keep:
            gates.append(ops.stack([first[..., :units], first[..., units:], o, -g], -3))
    result = states[-1:] if last else [ops.stack(states, -3)]
    if keep:
        result += [ops.stack(values, -3) for values in ([states] if last else []) + [cells, tanhs]]
        result.append(ops.stack(gates, -4))
    return result


def _product(a: Array, b: Array, out: Array) -> Call:
    """The call for a product of matrices of a loop; `dot` asks BLAS for the same as `matmul` does, in less time."""
    a, b, out = in_columns(a, b, out)
    return partial(np.ndarray.dot if b.ndim == 2 and min(b.shape) > 1 else np.matmul, a, b, out)


def _bind_lstm(arrays: Sequence[Array], *outs_and_scratch: Any, last: bool, keep: bool) -> list[Call]:
    projected, recurrent = arrays
    *outs, scratch = outs_and_scratch
    (steps, samples, width), units, dtype = projected.shape, len(recurrent), projected.dtype
    if keep:
        states, cells, tanhs, gates = outs[1:] if last else outs
    else:
        states = [outs[0]] * steps if last else outs[0]
        cells, tanhs = ([scratch((samples, units), dtype)] * steps for _ in range(2))
        gates = scratch((1, 4, samples, units), dtype)
    rows, term = scratch((samples, width), dtype), scratch((samples, units), dtype)
    product, one, order = _by_gate(rows, 4), _one(dtype), (0, 1, 3, 2)
    negated = _memory_of_weights(states[0], recurrent, rows, scratch)
    in_order = _by_gate(negated, 4), _by_gate(recurrent, 4)
    calls: list[Call] = [partial(np.copyto, in_order[0][to], in_order[1][gate]) for to, gate in enumerate(order)]
    calls.append(partial(np.negative, negated, negated))
    for block in _blocks(steps, samples * width) if keep else [slice(t, t + 1) for t in range(steps)]:
        given, made = _by_gate(projected[block], 4), gates[block] if keep else gates
        calls += [call for to, gate in enumerate(order) for call in copies(made[:, to], given[:, gate])]
        for t in range(block.start, block.stop):
            z, cell, tanh = gates[t if keep else 0], cells[t], tanhs[t]
            i, f, o, minus_g = z
            if t:
                calls += [
                    _product(states[t - 1], negated, rows),
                    partial(np.subtract, product, z, z),
                ]
            else:
                calls.append(partial(np.negative, z, z))
            calls += [*_sigmoid_of_negated(z[:3], one), partial(np.tanh, minus_g, minus_g)]
            calls.append(partial(np.multiply, i, minus_g, term))
            if t:
                calls += [partial(np.multiply, f, cells[t - 1], cell), partial(np.subtract, cell, term, cell)]
            else:
                calls.append(partial(np.negative, term, cell))
            calls += [partial(np.tanh, cell, tanh), partial(np.multiply, o, tanh, states[t])]
    if keep and last:
        calls.append(partial(np.copyto, outs[0], states[-1]))
    return calls


def lstm_gradient_steps(
    g: Tensor, cells: Tensor, tanhs: Tensor, gates: Tensor, recurrent: Tensor, last: bool
) -> list[Tensor]:
    """The gradient of an LSTM in single ops, with the result of `LSTM_GRADIENT`; with further axes in front."""
    steps = gates.shape[-4]
    back = ops.swapaxes(recurrent, -1, -2)
    found: list[Tensor] = []
    by_state = g if last else g[..., -1, :, :]
    by_cell: Tensor | None = None
    for t in range(steps - 1, -1, -1):
        if found:
            by_state = found[-1] @ back if last else found[-1] @ back + g[..., t, :, :]
        i, f, o, n = (gates[..., t, k, :, :] for k in range(4))
        n, tanh = -n, tanhs[..., t, :, :]
        through = by_state * (o * (1 - ops.square(tanh)))
        by_cell = through if by_cell is None else by_cell + through
        before = cells[..., t - 1, :, :] * (f * (1 - f)) if t else None
        parts = [
            by_cell * (n * (i * (1 - i))),
            by_cell * before if before is not None else by_cell * 0,
            by_cell * (i * (1 - ops.square(n))),
            by_state * (tanh * (o * (1 - o))),
        ]
        found.append(ops.concatenate(parts, -1))
        by_cell = by_cell * f
    return [ops.stack(found[::-1], -3)]


def _bind_lstm_gradient(arrays: Sequence[Array], out: Array, scratch: Scratch, last: bool) -> list[Call]:
    g, cells, tanhs, gates, recurrent = arrays
    (steps, _, samples, units), dtype = gates.shape, gates.dtype
    blocks = _blocks(steps, 4 * samples * units)
    longest = (blocks[0].stop, samples, units)
    factors, known, slopes = scratch((4, *longest), dtype), scratch((4, *longest), dtype), scratch(longest, dtype)
    by_cell, by_state, term = (scratch((samples, units), dtype) for _ in range(3))
    back, one = recurrent.T, _one(dtype)
    calls: list[Call] = []
    for block in reversed(blocks):
        length = block.stop - block.start
        d_i, d_f, d_g, d_o = made = [x[:length] for x in factors]
        i, f, n, o = own = [x[:length] for x in known]
        tanh, slope = tanhs[block], slopes[:length]
        calls += [call for to, k in zip(own, (0, 1, 3, 2), strict=True) for call in copies(to, gates[block, k])]
        calls.append(partial(np.negative, n, n))
        calls += [partial(np.multiply, y, y, d) for y, d in zip(own, made, strict=True)]
        calls += [partial(np.subtract, one if y is n else y, d, d) for y, d in zip(own, made, strict=True)]
        calls += [
            partial(np.multiply, d_i, n, d_i),
            partial(np.multiply, d_g, i, d_g),
            partial(np.multiply, d_o, tanh, d_o),
            partial(np.multiply, tanh, tanh, slope),
            partial(np.subtract, one, slope, slope),
            partial(np.multiply, slope, o, slope),
        ]
        later = max(block.start, 1)
        if later < block.stop:
            after = d_f[later - block.start :]
            calls.append(partial(np.multiply, after, cells[later - 1 : block.stop - 1], after))
        if block.start == 0:
            calls.append(partial(np.copyto, d_f[0], 0))
        for t in range(block.stop - 1, block.start - 1, -1):
            k = t - block.start
            if t == steps - 1:
                here = g if last else g[t]
                calls.append(partial(np.multiply, here, slope[k], by_cell))
            else:
                here = by_state
                calls.append(_product(out[t + 1], back, by_state))
                calls += [] if last else [partial(np.add, by_state, g[t], by_state)]
                calls += [partial(np.multiply, here, slope[k], term), partial(np.add, by_cell, term, by_cell)]
            # Gates of a single sample are in one piece each: they are computed in their place.
            to = _by_gate(out[t], 4) if samples == 1 else factors[:, k]
            calls += [partial(np.multiply, d[k], by_cell, y) for d, y in zip((d_i, d_f, d_g), to, strict=False)]
            calls.append(partial(np.multiply, d_o[k], here, to[3]))
            calls += [] if samples == 1 else copies(_by_gate(out[t], 4), to)
            if t:
                calls.append(partial(np.multiply, by_cell, f[k], by_cell))
    return calls


def _pull_lstm(cotangents: Tangents, needed: Sequence[bool], node: Node) -> Sequence[Tensor | None]:
    last, keep = node.attrs["last"], node.attrs["keep"]
    if not keep or any(g is not None for g in cotangents[1:]):
        return _pull(lstm_steps, cotangents, needed, node)
    (g, *_), (_, recurrent) = cotangents, node.inputs
    assert g is not None
    states, *known = (node.result(k) for k in range(last, 4 + last))
    (by_z,) = LSTM_GRADIENT.apply_several((g, *known, recurrent), {"last": last})
    by_recurrent = _by_recurrent(states[:-1], by_z[1:]) if needed[1] and len(states) > 1 else None
    return by_z, by_recurrent


def _operations(gates: int, per_unit: int) -> Callable[..., int]:
    """The `flops` of a recurrence: of the products of all steps but one, and `per_unit` more for each unit and step."""

    def flops(*inputs: Tensor, **attrs: Any) -> int:
        shape, units = inputs[-2].shape, inputs[-1].shape[0]  # of the projected inputs, or of the gates
        steps, samples = shape[0], shape[-2]
        return 2 * samples * units * gates * units * max(steps - 1, 0) + per_unit * steps * samples * units

    return flops


LSTM = Recurrence(
    _recurrence(
        "lstm",
        lstm_steps,
        lambda projected, recurrent, last, keep: _kinds(projected, recurrent, last, keep, 2),
        _bind_lstm,
        _operations(4, 13),
        "an LSTM's last state (N, H) or all (T, N, H), from projected inputs (T, N, 4 H) and weights (H, 4 H); to "
        "keep: all states, cells and their tanhs (T, N, H), and gates (T, 4, N, H)",
        _pull_lstm,
    ),
    lstm_steps,
)
LSTM_GRADIENT = _recurrence(
    "lstm_gradient",
    lstm_gradient_steps,
    lambda g, cells, tanhs, gates, recurrent, last: [_rows(gates)],
    _bind_lstm_gradient,
    _operations(4, 22),
    "an LSTM's gradient by its projected inputs (T, N, 4 H)",
)


# GRU ------------------------------------------------------------------------------------------------------


def gru_steps(projected: Tensor, recurrent: Tensor, last: bool, keep: bool) -> list[Tensor]:
    """The GRU in single ops, with the results of `GRU`. Both may have further axes in front.

    The first step has nothing to reset; r and z are neighbours, so one sigmoid serves both.
    """
    units = recurrent.shape[-2]
    states: list[Tensor] = []
    resets: list[Tensor] = []
    gates: list[Tensor] = []
    for t in range(projected.shape[-3]):
        step = projected[..., t, :, :]
        if states:
            h = states[-1]
            product = h @ recurrent
            r_and_z = ops.sigmoid(step[..., : 2 * units] + product[..., : 2 * units])
            reset = r_and_z[..., :units] * product[..., 2 * units :]
            n = ops.tanh(step[..., 2 * units :] + reset)
            states.append(n + r_and_z[..., units:] * (h - n))
        else:
            r_and_z = ops.sigmoid(step[..., : 2 * units] if keep else step[..., units : 2 * units])
            n = ops.tanh(step[..., 2 * units :])
            reset = n * 0
            states.append(n - r_and_z[..., -units:] * n)
        if keep:
            resets.append(reset)
            gates.append(ops.stack([r_and_z[..., :units], r_and_z[..., units:], n], -3))
    result = states[-1:] if last else [ops.stack(states, -3)]
    if keep:
        result += [ops.stack(values, -3) for values in ([states] if last else []) + [resets]]
        result.append(ops.stack(gates, -4))
    return result


def _bind_gru(arrays: Sequence[Array], *outs_and_scratch: Any, last: bool, keep: bool) -> list[Call]:
    projected, recurrent = arrays
    *outs, scratch = outs_and_scratch
    (steps, samples, width), units, dtype = projected.shape, len(recurrent), projected.dtype
    if keep:
        states, resets, gates = outs[1:] if last else outs
    else:
        states = [outs[0]] * steps if last else outs[0]
        resets = [scratch((samples, units), dtype)] * steps
        gates = scratch((1, 3, samples, units), dtype)
    rows, term = scratch((samples, width), dtype), scratch((samples, units), dtype)
    product, one = _by_gate(rows, 3), _one(dtype)
    negated, both = _memory_of_weights(states[0], recurrent, rows, scratch), slice(2 * units)
    calls: list[Call] = [
        partial(np.copyto, negated, recurrent),
        partial(np.negative, negated[:, both], negated[:, both]),
    ]
    for block in _blocks(steps, samples * width) if keep else [slice(t, t + 1) for t in range(steps)]:
        calls += copies(gates[block] if keep else gates, _by_gate(projected[block], 3))
        for t in range(block.start, block.stop):
            r_and_z, n = gates[t if keep else 0][:2], gates[t if keep else 0][2]
            r, z = r_and_z
            if t:
                calls += [
                    _product(states[t - 1], negated, rows),
                    partial(np.subtract, product[:2], r_and_z, r_and_z),
                ]
            else:
                calls.append(partial(np.negative, r_and_z, r_and_z))
            calls += _sigmoid_of_negated(r_and_z, one)
            if t:
                calls += [
                    partial(np.multiply, r, product[2], resets[t]),
                    partial(np.add, n, resets[t], n),
                    partial(np.tanh, n, n),
                    partial(np.subtract, states[t - 1], n, term),
                    partial(np.multiply, z, term, term),
                    partial(np.add, n, term, states[t]),
                ]
            else:
                calls += [
                    partial(np.copyto, resets[t], 0),
                    partial(np.tanh, n, n),
                    partial(np.multiply, z, n, term),
                    partial(np.subtract, n, term, states[t]),
                ]
    if keep and last:
        calls.append(partial(np.copyto, outs[0], states[-1]))
    return calls


def gru_gradient_steps(
    g: Tensor, states: Tensor, resets: Tensor, gates: Tensor, recurrent: Tensor, last: bool
) -> list[Tensor]:
    """The gradient of a GRU in single ops, with the results of `GRU_GRADIENT`; with further axes in front."""
    steps = gates.shape[-4]
    back = ops.swapaxes(recurrent, -1, -2)
    by_inputs: list[Tensor] = []
    by_products: list[Tensor] = []
    by_state = g if last else g[..., -1, :, :]
    for t in range(steps - 1, -1, -1):
        r, z, n = (gates[..., t, k, :, :] for k in range(3))
        before = states[..., t - 1, :, :] - n if t else -n
        by_z = by_state * (z * (1 - z) * before)
        by_n = by_state * ((1 - ops.square(n)) * (1 - z))
        by_r = by_n * ((1 - r) * resets[..., t, :, :]) if t else by_n * 0
        by_inputs.append(ops.concatenate([by_r, by_z, by_n], -1))
        if t:
            by_products.append(ops.concatenate([by_r, by_z, by_n * r], -1))
            by_state = by_products[-1] @ back + by_state * z
            by_state = by_state if last else by_state + g[..., t - 1, :, :]
    inputs = ops.stack(by_inputs[::-1], -3)
    return [inputs, ops.stack(by_products[::-1], -3) if by_products else inputs[..., :0, :, :]]


def _bind_gru_gradient(
    arrays: Sequence[Array], by_inputs: Array, by_products: Array, scratch: Scratch, last: bool
) -> list[Call]:
    g, states, resets, gates, recurrent = arrays
    (steps, _, samples, units), dtype = gates.shape, gates.dtype
    blocks = _blocks(steps, 4 * samples * units)
    longest = (blocks[0].stop, samples, units)
    # By n, r and z, and by the product for n.
    factors, known, memory = scratch((4, *longest), dtype), scratch((3, *longest), dtype), scratch(longest, dtype)
    by_state, carried = scratch((samples, units), dtype), scratch((samples, units), dtype)
    back, one = recurrent.T, _one(dtype)
    calls: list[Call] = []
    for block in reversed(blocks):
        length = block.stop - block.start
        d_n, d_r, d_z, _ = (x[:length] for x in factors)
        r, z, n = own = [x[:length] for x in known]
        term = memory[:length]
        later = max(block.start, 1)
        rest = slice(later - block.start, None)
        calls += [call for k, to in enumerate(own) for call in copies(to, gates[block, k])]
        if later < block.stop:
            calls.append(partial(np.subtract, states[later - 1 : block.stop - 1], n[rest], term[rest]))
        if block.start == 0:
            calls.append(partial(np.negative, n[0], term[0]))
        calls += [
            partial(np.subtract, one, z, d_z),
            partial(np.multiply, n, n, d_n),
            partial(np.subtract, one, d_n, d_n),
            partial(np.multiply, d_n, d_z, d_n),
            partial(np.multiply, d_z, z, d_z),
            partial(np.multiply, d_z, term, d_z),
            partial(np.subtract, one, r, d_r),
            partial(np.multiply, d_r, resets[block], d_r),
        ]
        if block.start == 0:
            calls.append(partial(np.copyto, d_r[0], 0))
        for t in range(block.stop - 1, block.start - 1, -1):
            k = t - block.start
            if t == steps - 1:
                here = g if last else g[t]
            else:
                here = by_state
                calls += [
                    _product(by_products[t], back, by_state),
                    partial(np.add, by_state, carried, by_state),
                ]
                calls += [] if last else [partial(np.add, by_state, g[t], by_state)]
            # Gates of a single sample are in one piece each: they are computed in their place.
            in_place = samples == 1 and t > 0
            by_r, by_z, by_product = to = _by_gate(by_products[t - 1], 3) if in_place else factors[1:, k]
            calls += [
                partial(np.multiply, d_n[k], here, d_n[k]),
                partial(np.multiply, d_z[k], here, by_z),
                partial(np.multiply, d_r[k], d_n[k], by_r),
            ]
            if t:
                calls += [
                    partial(np.multiply, d_n[k], r[k], by_product),
                    partial(np.multiply, here, z[k], carried),
                ]
                calls += [] if in_place else copies(_by_gate(by_products[t - 1], 3), to)
        by_gate = _by_gate(by_inputs[block], 3)
        calls += [call for to, d in enumerate((d_r, d_z, d_n)) for call in copies(by_gate[:, to], d)]
        if samples == 1 and later < block.stop:
            there = _by_gate(by_products[later - 1 : block.stop - 1], 3)
            calls += copies(by_gate[rest, :2], there[:, :2])
    return calls


def _pull_gru(cotangents: Tangents, needed: Sequence[bool], node: Node) -> Sequence[Tensor | None]:
    last, keep = node.attrs["last"], node.attrs["keep"]
    if not keep or any(g is not None for g in cotangents[1:]):
        return _pull(gru_steps, cotangents, needed, node)
    (g, *_), (_, recurrent) = cotangents, node.inputs
    assert g is not None
    states, *known = (node.result(k) for k in range(last, 3 + last))
    by_inputs, by_products = GRU_GRADIENT.apply_several((g, states, *known, recurrent), {"last": last})
    by_recurrent = _by_recurrent(states[:-1], by_products) if needed[1] and len(states) > 1 else None
    return by_inputs, by_recurrent


GRU = Recurrence(
    _recurrence(
        "gru",
        gru_steps,
        lambda projected, recurrent, last, keep: _kinds(projected, recurrent, last, keep, 1),
        _bind_gru,
        _operations(3, 11),
        "a GRU's last state (N, H) or all (T, N, H), from projected inputs (T, N, 3 H) and weights (H, 3 H); to keep: "
        "all states and what is reset (T, N, H), and gates (T, 3, N, H)",
        _pull_gru,
    ),
    gru_steps,
)
GRU_GRADIENT = _recurrence(
    "gru_gradient",
    gru_gradient_steps,
    lambda g, states, resets, gates, recurrent, last: [_rows(gates), _rows(gates, 1)],
    _bind_gru_gradient,
    _operations(3, 19),
    "a GRU's gradient by its projected inputs (T, N, 3 H) and by the products of later steps (T - 1, N, 3 H)",
)
