"""Winograd's algorithm: convolutions with a quarter to three fifths of the multiplications.

Along an axis, four outputs of a kernel w of three elements are made from six elements of the input x. As values of
polynomials at five points and at infinity they take six multiplications rather than twelve,

    y = A^T [(G w) * (B x)]        A (6, 4), G (6, 3), B (6, 6); * is element by element

which is F(4, 3). Over two axes, F(4 x 4, 3 x 3), it is 36 rather than 144 (A. Lavin and S. Gray, Fast Algorithms for
Convolutional Neural Networks, 2016, after S. Winograd, Arithmetic Complexity of Computations, 1980). Here kernels along
one axis have seven points, those along two axes five each, and of the input a *tile* is read with as many elements and
one. Over channels the multiplications are matrix products, one for each element of all tiles.

The transforms by A, G and B are matrix products, too: one matrix transforms several neighbouring tiles, padding
included, so that no window is copied. The products take no longer with other elements than 0 and 1, so that the points
are those with the smallest rounding errors.

Rounding errors are larger than those of a sum of products: with 64 channels of normal numbers in float32 their root
mean square was 7e-7 to 8e-7 of the results' standard deviation, and 3e-7 with sums. What is beside a number that is not
finite becomes NaN. So the technique `winograd` is for training steps in float32 only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise, product

import numpy as np

from py_engine.ad.op import Call, Scratch
from py_engine.ad.ops.blocks import about_equal_blocks
from py_engine.ad.ops.product_parts import bind_product
from py_engine.ad.tensor import Array

ONE_AXIS, TWO_AXES = (0, 0.5, -0.5, 1, -1, 2, -2), (0, 0.75, -0.75, 1.5, -1.5)
"""Where the polynomials are evaluated, beside infinity, for kernels along one axis and two. Of the sets that were
tried, symmetric ones of short binary fractions, these have the smallest rounding errors."""

LONGEST = 5
"""Elements of a kernel along an axis, at most."""

MOST_TILES = 4
"""Tiles of an axis, at most, that are transformed by one matrix: with more, few of its elements are other than 0."""

TRANSPOSED_COST, PLAIN_COST = 32, 8
"""What a transform costs for each element that it reads or writes, in multiplications of a matrix product: the
transform of the width, which transposes images, and that of the height.

Fitted to 20 shapes with float32 on one core, with kernels for AVX2 and AVX-512. Of those that `work` then gives to this
algorithm, convolutions took 0.35 to 1.03 times the time, but for one with 2 samples (up to 1.35)."""


@dataclass(frozen=True)
class Axis:
    """A spatial axis of a convolution without stride and dilation.

    Attributes:
        length: of the input.
        outputs: how many windows there are.
        before: the padding before the input; negative where it is cut off.
        kernel: its elements.
        points: where its polynomials are evaluated, beside infinity; none for a kernel of one element.
    """

    length: int
    outputs: int
    before: int
    kernel: int
    points: tuple[float, ...]

    @property
    def size(self) -> int:
        """How many elements of the input a tile reads."""
        return len(self.points) + 1

    @property
    def step(self) -> int:
        """How many outputs a tile makes."""
        return self.size - self.kernel + 1

    @property
    def tiles(self) -> int:
        """How many there are."""
        return -(-self.outputs // self.step)

    @property
    def segments(self) -> int:
        """How many matrices transform them, each about equally many."""
        return -(-self.tiles // MOST_TILES)

    @property
    def longest(self) -> tuple[int, int, int]:
        """Of a segment, at most: tiles, elements of the input, and outputs."""
        tiles = -(-self.tiles // self.segments)
        return tiles, min(tiles * self.step + self.kernel - 1, self.length), min(tiles * self.step, self.outputs)

    def transposed(self) -> Axis:
        """Return the axis of the gradient by the input, which is a convolution of the upstream gradient."""
        return Axis(self.outputs, self.length, self.kernel - 1 - self.before, self.kernel, self.points)


NO_AXIS = Axis(1, 1, 0, 1, ())
"""The height where there is none."""


@dataclass(frozen=True)
class Segment:
    """Neighbouring tiles of an axis that are transformed by one matrix.

    Attributes:
        inputs: the elements of the input that they read.
        outputs: the outputs that they make.
        of_input: B (size * tiles, inputs), the tiles side by side for each element.
        of_output: A^T (outputs, size * tiles).
        of_gradient: A, by which the gradient by the outputs is transformed.
    """

    inputs: slice
    outputs: slice
    of_input: Array
    of_output: Array
    of_gradient: Array


def transforms(kernel: int, points: Sequence[float]) -> tuple[Array, Array, Array]:
    """Return A (size, outputs), G (size, kernel) and B (size, size) of a tile, in float64."""
    size = len(points) + 1
    others = [[*points[:i], *points[i + 1 :]] for i in range(size)]
    scale = [math.prod(point - other for other in rest) for point, rest in zip(points, others, strict=False)]
    a, g = (
        np.vstack([np.vander(np.array(points, np.float64), n, increasing=True), np.eye(n)[-1:]])
        for n in (size - kernel + 1, kernel)
    )
    b = np.zeros((size, size))
    for row, roots in zip(b, others, strict=True):
        row[: len(roots) + 1] = np.polynomial.polynomial.polyfromroots(roots)
    return a, g / np.array([*scale, 1.0])[:, None], b


@lru_cache(maxsize=256)
def segments(axis: Axis) -> list[Segment]:
    """Return the segments of an axis. Those that read and make equally much have the same matrices."""
    a, _, b = transforms(axis.kernel, axis.points)
    bounds = [axis.tiles * i // axis.segments for i in range(axis.segments + 1)]
    matrices: dict[tuple[int, ...], tuple[Array, Array, Array]] = {}
    found = []
    for first, last in pairwise(bounds):
        outputs = slice(first * axis.step, min(last * axis.step, axis.outputs))
        start, stop = outputs.start - axis.before, last * axis.step - axis.before + axis.kernel - 1
        inputs = slice(*(min(max(end, 0), axis.length) for end in (start, stop)))
        shape = last - first, start - inputs.start, inputs.stop - inputs.start, outputs.stop - outputs.start
        if shape not in matrices:
            matrices[shape] = _matrices(a, b, *shape)
        found.append(Segment(inputs, outputs, *matrices[shape]))
    return found


def _matrices(a: Array, b: Array, tiles: int, start: int, inputs: int, outputs: int) -> tuple[Array, Array, Array]:
    """Return the matrices of a segment; `start` is where its first tile begins, counted from its first input."""
    size, step = a.shape
    of_input, of_output = np.zeros((size, tiles, inputs), np.float32), np.zeros((outputs, size, tiles), np.float32)
    for tile in range(tiles):
        at = start + tile * step
        inside = [i for i in range(size) if 0 <= at + i < inputs]
        of_input[:, tile, [at + i for i in inside]] = b[:, inside]
        of_tile = of_output[tile * step : (tile + 1) * step]
        of_tile[:, :, tile] = a[:, : len(of_tile)].T
    to_outputs = of_output.reshape(outputs, size * tiles)
    return of_input.reshape(size * tiles, inputs), to_outputs, np.ascontiguousarray(to_outputs.T)


def axes_of(
    lengths: Sequence[int], outputs: Sequence[int], before: Sequence[int], kernel: Sequence[int]
) -> tuple[Axis, Axis] | None:
    """Return the axes of a convolution over one or two axes, height and width; None: it has more, or other kernels."""
    long = [n for n in kernel if n > 1]
    if len(kernel) > 2 or not long or max(long) > LONGEST:
        return None
    points = ONE_AXIS if len(long) == 1 else TWO_AXES
    found = [Axis(*at, points if at[-1] > 1 else ()) for at in zip(lengths, outputs, before, kernel, strict=True)]
    return (found[-2] if len(found) > 1 else NO_AXIS), found[-1]


def work(samples: int, channels: int, filters: int, axes: tuple[Axis, Axis]) -> int:
    """Return what a convolution costs, or a gradient of one, in multiplications of a matrix product."""
    height, width = axes
    size = height.size * width.size
    products = size * samples * height.tiles * width.tiles * channels * filters
    ends = samples * (channels * height.length * width.length + filters * height.outputs * width.outputs)
    by_width = samples * width.size * width.tiles * (channels * height.length + filters * height.outputs)
    pieces = len(about_equal_blocks(samples, _bytes(channels, filters, axes))) * height.segments * width.segments
    plain = (2 + pieces) * size * channels * filters  # each piece is added to the gradient by the weight
    if height != NO_AXIS:
        plain += by_width + samples * size * height.tiles * width.tiles * (channels + filters)
    return products + TRANSPOSED_COST * (ends + by_width) + PLAIN_COST * plain


def _sizes(channels: int, filters: int, axes: tuple[Axis, Axis]) -> tuple[int, int, int, int]:
    """Elements of a piece for a sample, at most: of the input transformed by width, by both axes; of the output's."""
    (rows, inputs, outputs), (columns, _, _) = (axis.longest for axis in axes)
    rows, columns = rows * axes[0].size, columns * axes[1].size
    if axes[0] == NO_AXIS:
        inputs = outputs = 0
    return channels * inputs * columns, channels * rows * columns, filters * outputs * columns, filters * rows * columns


def _bytes(channels: int, filters: int, axes: tuple[Axis, Axis]) -> int:
    """Bytes for a sample of the rows of images that a segment reads and makes, and of what is transformed."""
    (_, inputs, outputs), width = axes[0].longest, axes[1]
    ends = channels * inputs * width.length + filters * outputs * width.outputs
    return 4 * (ends + sum(_sizes(channels, filters, axes)))


@lru_cache(maxsize=64)
def _of_weight(axes: tuple[Axis, Axis]) -> Array:
    """Return G for both axes in float32, (elements of a tile, of the kernel), those along the width being outermost."""
    (_, of_height, _), (_, of_width, _) = (transforms(axis.kernel, axis.points) for axis in axes)
    both: Array = np.einsum("ax,by->abyx", of_width, of_height)
    return np.asarray(both.reshape(len(of_width) * len(of_height), -1), np.float32)


def _transform(
    x: Array, of_height: Array, of_width: Array, size: int, by_width: Array, by_both: Array
) -> tuple[list[Call], Array]:
    """Return the calls that transform images (count, H, W) by their width and their height, and the result.

    That is flat, in the order: elements of a tile along the width, along the height, tiles along the height, along the
    width, images.

    Args:
        of_height: the matrix, (size * tiles, H).
        of_width: the matrix, (size * tiles, W).
        size: of a tile along the width.
        by_width: memory for what is transformed by the width.
        by_both: memory for the result.
    """
    count, height, _ = x.shape
    columns, rows = len(of_width), len(of_height)
    images, result = x.transpose(1, 2, 0), by_both[: rows * columns * count]
    if of_height.shape == (1, 1):  # `NO_AXIS`
        return [partial(np.matmul, of_width, images, result.reshape(1, columns, count))], result
    by_width = by_width[: height * columns * count]
    by_row = by_width.reshape(height, size, columns // size * count).swapaxes(0, 1)
    return [
        partial(np.matmul, of_width, images, by_width.reshape(height, columns, count)),
        partial(np.matmul, of_height, by_row, result.reshape(size, rows, columns // size * count)),
    ], result


def _transform_back(x: Array, y: Array, of_height: Array, of_width: Array, size: int, by_height: Array) -> list[Call]:
    """Return the calls that leave in images y (count, H, W) what x is transformed to, see `_transform`.

    Args:
        of_height: the matrix, (H, size * tiles).
        of_width: the matrix, (W, size * tiles).
        size: of a tile along the width.
        by_height: memory for what is transformed by the height.
    """
    count, height, _ = y.shape
    rows, columns = of_height.shape[1], of_width.shape[1]
    calls: list[Call] = []
    if of_height.shape == (1, 1):  # `NO_AXIS`
        by_height = x.reshape(-1)
    else:
        by_height = by_height[: height * columns * count]
        into = by_height.reshape(height, size, columns // size * count).swapaxes(0, 1)
        calls.append(partial(np.matmul, of_height, x.reshape(size, rows, columns // size * count), into))
    by_image = by_height.reshape(height, columns, count).swapaxes(1, 2)
    return [*calls, partial(np.matmul, by_image, of_width.T, y.swapaxes(0, 1))]


@dataclass(frozen=True)
class _Piece:
    """What is computed at once: the windows of some samples in one segment of each axis.

    Attributes:
        rows, columns: the segments of the height and the width.
        inputs: the images that it reads, (samples * C, H, W).
        outputs: the images that it makes, (samples * F, H, W).
    """

    rows: Segment
    columns: Segment
    inputs: Array
    outputs: Array


def _pieces(x: Array, y: Array, axes: tuple[Axis, Axis], scratch: Scratch) -> tuple[list[Array], list[_Piece]]:
    """Return memory of the `_sizes`, used by every piece in turn, and the pieces of x (N, C, ...) and y (N, F, ...)."""
    height, width = axes
    samples, channels, filters = *x.shape[:2], y.shape[1]
    inputs = np.reshape(x, (samples * channels, height.length, width.length), copy=False)
    outputs = np.reshape(y, (samples * filters, height.outputs, width.outputs), copy=False)
    found = about_equal_blocks(samples, _bytes(channels, filters, axes))
    most = max(block.stop - block.start for block in found)
    memory = [scratch((most * size,), x.dtype) for size in _sizes(channels, filters, axes)]
    return memory, [
        _Piece(
            rows,
            columns,
            inputs[block.start * channels : block.stop * channels, rows.inputs, columns.inputs],
            outputs[block.start * filters : block.stop * filters, rows.outputs, columns.outputs],
        )
        for block in found
        for rows, columns in product(segments(height), segments(width))
    ]


def bind_convolution(
    x: Array, weight: Array, y: Array, axes: tuple[Axis, Axis], flipped: bool, scratch: Scratch
) -> list[Call]:
    """Return the calls that leave in y (N, F, *outputs) the convolution of x (N, C, *lengths), both contiguous.

    Args:
        weight: (F, C, *kernel); `flipped`: (C, F, *kernel) with its elements from the last to the first.
    """
    of_weight, elements = _of_weight(axes), np.reshape(weight, (*weight.shape[:2], -1), copy=False)
    if flipped:
        of_weight, elements = np.ascontiguousarray(of_weight[:, ::-1]), elements.swapaxes(0, 1)
    filters, channels = elements.shape[:2]
    weights = scratch((len(of_weight), channels, filters), weight.dtype)
    calls: list[Call] = [partial(np.matmul, of_weight, elements.transpose(1, 2, 0), weights.swapaxes(0, 1))]
    size = axes[1].size
    memory, pieces = _pieces(x, y, axes, scratch)
    for piece in pieces:
        rows, columns = piece.rows, piece.columns
        transform, tiles = _transform(piece.inputs, rows.of_input, columns.of_input, size, *memory[:2])
        tiles = tiles.reshape(len(weights), -1, channels)
        products = memory[3][: tiles.size // channels * filters].reshape(*tiles.shape[:2], filters)
        calls += [*transform, bind_product(tiles, weights, products)]
        calls += _transform_back(products, piece.outputs, rows.of_output, columns.of_output, size, memory[2])
    return calls


def bind_weight_gradient(g: Array, x: Array, out: Array, axes: tuple[Axis, Axis], scratch: Scratch) -> list[Call]:
    """Return the calls that leave in `out` (F, C, *kernel) the gradient of a convolution of x (N, C, *lengths).

    All arrays are contiguous, g (N, F, *outputs).
    """
    of_weight, size = _of_weight(axes), axes[1].size
    filters, channels = out.shape[:2]
    memory, pieces = _pieces(x, g, axes, scratch)
    total, *more = (scratch((len(of_weight), channels, filters), out.dtype) for _ in pieces[:2])
    calls: list[Call] = []
    for i, piece in enumerate(pieces):
        rows, columns = piece.rows, piece.columns
        transform, tiles = _transform(piece.inputs, rows.of_input, columns.of_input, size, *memory[:2])
        also, upstream = _transform(piece.outputs, rows.of_gradient, columns.of_gradient, size, *memory[2:])
        tiles, upstream = tiles.reshape(len(total), -1, channels), upstream.reshape(len(total), -1, filters)
        calls += [*transform, *also, bind_product(tiles.swapaxes(1, 2), upstream, more[0] if i else total)]
        if i:
            calls.append(partial(np.add, total, more[0], total))
    by_channel = np.reshape(out, (filters, channels, -1), copy=False).swapaxes(0, 1)
    return [*calls, partial(np.matmul, total.transpose(1, 2, 0), of_weight, by_channel)]
