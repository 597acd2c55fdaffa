"""A picture of a function's graph, as SVG: values flow from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from py_engine.ad.containers import flatten, paths, unflatten
from py_engine.ad.op import as_tensor
from py_engine.ad.program import Program, simplify, traced, tracing
from py_engine.ad.state import restoring
from py_engine.ad.tensor import Literal, Tensor, plain_arrays
from py_engine.ad.transforms import check_callable
from py_engine.errors import TraceError

MOST_NODES = 400
"""More than this is no picture any more."""

_LETTER, _LINE, _PAD = 7.2, 16, 8
_GAP, _RISE = 18, 34
_SWEEPS = 12
_COLOURS = {"input": "#d7e8f7", "constant": "#eeeeee", "op": "#ffffff", "output": "#dcf0d8"}


class SVG(str):
    """The text of an SVG picture, which notebooks show as one."""

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass
class _Box:
    """A node of the picture, or a point that a long edge passes through."""

    lines: tuple[str, ...] = ()
    kind: str = ""
    title: str = ""
    layer: int = 0
    x: float = 0.0
    above: list[_Box] = field(default_factory=list)
    below: list[_Box] = field(default_factory=list)

    @property
    def width(self) -> float:
        return max((len(line) for line in self.lines), default=0) * _LETTER + 2 * _PAD if self.lines else 2.0

    @property
    def height(self) -> float:
        return len(self.lines) * _LINE + _PAD if self.lines else 0.0


@restoring
def draw(function: Callable[..., Any], *args: Any, simplified: bool = True) -> SVG:
    """Return a picture of the ops that `function` does on arguments of these shapes.

    Args:
        function: what `compile` takes: a function of arrays, or of nested containers of them, `grad` of one included.
        args: arrays or tensors; only their shapes and dtypes are used.
        simplified: as a compiled function runs it, without repetitions and idle ops; otherwise as it was written.

    Returns:
        An SVG text: inputs are blue, results green, arrays that the function captures grey. Numbers are shown in the op
        that uses them. Write it into a file, or leave it as the last value of a notebook's cell.

    Raises:
        ConfigurationError: `function` is not callable.
        TraceError: the function branches on a value, or its graph has more than 400 nodes.

    Example:
        >>> import numpy as np
        >>> picture = draw(lambda x: np.sum(np.sin(x) ** 2), np.ones(3))
        >>> picture.startswith("<svg")
        True
    """
    check_callable("draw", function)
    program = _traced(function, args)
    if simplified:
        program = simplify(program)
    if len(program.equations) > MOST_NODES:
        raise TraceError(
            f"draw: the graph has {len(program.equations)} ops, more than the {MOST_NODES} that can be shown"
        )
    boxes = _boxes(program)
    layers = _layers(boxes)
    _order(layers)
    _place(layers)
    return SVG(_picture(layers))


def _traced(function: Callable[..., Any], args: Sequence[Any]) -> Program:
    leaves, structure = flatten(tuple(args))
    arrays = plain_arrays(leaves)
    names = [f"x{path.removeprefix('[0]') if len(args) == 1 else path}" for path in paths(structure)]
    inputs = [Tensor.symbol(a.shape, a.dtype, name) for a, name in zip(arrays, names, strict=True)]
    with tracing() as nodes:
        outputs, _ = flatten(function(*unflatten(structure, inputs)))
        results = [as_tensor(output) for output in outputs]
    return traced(nodes, inputs, results, checks=False)


def _boxes(program: Program) -> list[_Box]:
    found: dict[int, _Box] = {}
    results = {id(x) for x in program.outputs}
    for x in program.inputs:
        kind = "output" if id(x) in results else "input"
        found[id(x)] = _Box((x.name or "x", _described(x)), kind)
    for equation in program.equations:
        y = equation.outputs[0]
        shown = [_number(a) if isinstance(a, Literal) else "·" for a in equation.inputs]
        name = equation.op.name
        label = name if set(shown) <= {"·"} else f"{name}({', '.join(shown)})"
        attributes = ", ".join(f"{key}={value}" for key, value in equation.attrs.items())
        box = _Box((label, _described(y)), "output" if id(y) in results else "op", attributes)
        for a in equation.inputs:
            if isinstance(a, Literal):
                continue
            if id(a) not in found:
                found[id(a)] = _Box((a.name or "constant", _described(a)), "constant")
            _join(found[id(a)], box)
        found.update((id(y), box) for y in equation.outputs)
    for x in program.outputs:
        if id(x) not in found:  # it depends on no input
            found[id(x)] = _Box((_number(x) if x.size == 1 else x.name or "constant", _described(x)), "output")
    return list(found.values())


def _join(above: _Box, below: _Box) -> None:
    above.below.append(below)
    below.above.append(above)


def _described(x: Tensor) -> str:
    return f"{x.dtype} {x.shape}" if x.shape else str(x.dtype)


def _number(x: Tensor) -> str:
    return f"{x.item():.4g}"


# Layout: layers by the longest way from above, points where an edge crosses a layer, few crossings, short edges. ----


def _layers(boxes: list[_Box]) -> list[list[_Box]]:
    for box in boxes:  # in the order of computation, but for constants, which come when they are first used
        box.layer = max((a.layer + 1 for a in box.above), default=0)
    for box in reversed(boxes):
        if not box.above and box.below:
            box.layer = min(b.layer for b in box.below) - 1
    deepest = min((box.layer for box in boxes), default=0)
    layers: list[list[_Box]] = [[] for _ in range(max((b.layer for b in boxes), default=0) - deepest + 1)]
    for box in boxes:
        box.layer -= deepest
        layers[box.layer].append(box)
    for box in boxes:
        for k, below in enumerate(box.below):
            upper = box
            for layer in range(box.layer + 1, below.layer):
                point = _Box(layer=layer, above=[upper])
                if upper is box:
                    box.below[k] = point
                else:
                    upper.below.append(point)
                layers[layer].append(point)
                upper = point
            if upper is not box:
                upper.below.append(below)
                below.above[next(i for i, a in enumerate(below.above) if a is box)] = upper
    return layers


def _order(layers: list[list[_Box]]) -> None:
    """Put each box at the mean place of its neighbours, downwards and upwards in turn."""
    for layer in layers:
        _number_boxes(layer)
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            layer.sort(key=lambda box: _mean(box.above if downwards else box.below, box.x))
            _number_boxes(layer)


def _number_boxes(layer: list[_Box]) -> None:
    for k, box in enumerate(layer):
        box.x = float(k)


def _mean(boxes: Iterable[_Box], otherwise: float) -> float:
    places = [box.x for box in boxes]
    return sum(places) / len(places) if places else otherwise


def _place(layers: list[list[_Box]]) -> None:
    for layer in layers:
        _spread(layer, [0.0] * len(layer))
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        for layer in layers if downwards else layers[::-1]:
            _spread(layer, [_mean(box.above if downwards else box.below, box.x) for box in layer])
    left = min((box.x - box.width / 2 for layer in layers for box in layer), default=0.0)
    for layer in layers:
        for box in layer:
            box.x += _GAP - left


def _spread(layer: list[_Box], wanted: Sequence[float]) -> None:
    """Place the boxes of a layer in their order, apart, as near as can be to where they are wanted."""
    # Boxes that would overlap become a block that moves as one, to the mean of what its boxes want.
    blocks: list[list[Any]] = []  # boxes, sum of (wanted - offset), width so far
    for box, place in zip(layer, wanted, strict=True):
        blocks.append([[(box, 0.0)], place])
        while len(blocks) > 1 and _left(blocks[-1]) < _right(blocks[-2]) + _GAP:
            boxes, total = blocks.pop()
            shift = blocks[-1][0][-1][1] + blocks[-1][0][-1][0].width / 2 + _GAP + boxes[0][0].width / 2
            blocks[-1][1] += total - shift * len(boxes)
            blocks[-1][0] += [(other, offset + shift) for other, offset in boxes]
    for boxes, total in blocks:
        for box, offset in boxes:
            box.x = total / len(boxes) + offset


def _left(block: list[Any]) -> float:
    boxes, total = block
    return float(total / len(boxes) - boxes[0][0].width / 2)


def _right(block: list[Any]) -> float:
    boxes, total = block
    return float(total / len(boxes) + boxes[-1][1] + boxes[-1][0].width / 2)


# The picture ------------------------------------------------------------------------------------------------


def _picture(layers: list[list[_Box]]) -> str:
    tops, y = [], float(_GAP)
    for layer in layers:
        tops.append(y)
        y += max((box.height for box in layer), default=0.0) + _RISE
    width = max((box.x + box.width / 2 for layer in layers for box in layer), default=0.0) + _GAP
    height = y - _RISE + _GAP
    edges, shapes = [], []
    for layer, top in zip(layers, tops, strict=True):
        for box in layer:
            end = top + (box.height or max((b.height for b in layer), default=0.0))
            if not box.lines:
                edges.append(f'<path d="M{box.x:.1f} {top:.1f}V{end:.1f}"/>')
            edges += [_edge(box, end, below, tops[box.layer + 1]) for below in box.below]
            if box.lines:
                shapes.append(_shape(box, top))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
            f'width="{width:.0f}" height="{height:.0f}" font-family="monospace" font-size="12">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
            '<g fill="none" stroke="#555">',
            *edges,
            "</g>",
            *shapes,
            "</svg>",
        ]
    )


def _edge(box: _Box, y: float, below: _Box, top: float) -> str:
    tip = ' marker-end="url(#tip)"' if below.lines else ""
    bend = (y + top) / 2
    return (
        f'<path d="M{box.x:.1f} {y:.1f}C{box.x:.1f} {bend:.1f} {below.x:.1f} {bend:.1f} {below.x:.1f} {top:.1f}"{tip}/>'
    )


def _shape(box: _Box, top: float) -> str:
    text = "".join(
        f'<text x="{box.x:.1f}" y="{top + _LINE * (k + 1) - 2:.1f}" text-anchor="middle"'
        f"{'' if k == 0 else SMALL}>{escape(line)}</text>"
        for k, line in enumerate(box.lines)
    )
    title = f"<title>{escape(box.title)}</title>" if box.title else ""
    corner = 10 if box.kind in ("input", "output", "constant") else 3
    return (
        f'<g>{title}<rect x="{box.x - box.width / 2:.1f}" y="{top:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="{corner}" fill="{_COLOURS[box.kind]}" stroke="#555"/>{text}</g>'
    )


SMALL = ' font-size="10" fill="#555"'
