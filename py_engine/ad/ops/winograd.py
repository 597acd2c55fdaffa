"""Winograd's algorithm: convolutions with a quarter to a half of the multiplications.

Four outputs along an axis of a kernel w of three elements read six places x. As values of polynomials at five points
and at infinity they take six multiplications rather than twelve,

    y = A^T [(G w) * (B x)]        A (6, 4), G (6, 3), B (6, 6); * is element by element

and over two axes 36 rather than 144: F(4 x 4, 3 x 3) of A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural
Networks, 2016, after S. Winograd, Arithmetic Complexity of Computations, 1980. Over channels they are matrix products,
one for each place of all tiles. The transforms are matrix products, too: a matrix has several tiles of an axis and the
padding in it, so that no window is copied. It takes no longer with other elements than 0 and 1, so that the points are
those with the least roundings.

A sum of products rounds otherwise: with 64 channels of normal numbers in float32, the root mean square error was
7e-7 to 8e-7 of the results' standard deviation, and 3e-7 for sums. What is not finite makes NaN of the results around.
So it is for training steps in float32 only, where the technique `winograd` is on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise, product

import numpy as np

from py_engine.ad.op import Call, Scratch
from py_engine.ad.ops.blocks import about_equal_blocks
from py_engine.ad.ops.product_parts import bind_product
from py_engine.ad.tensor import Array

ONE_AXIS, TWO_AXES = (0, 0.5, -0.5, 1, -1, 2, -2), (0, 0.75, -0.75, 1.5, -1.5)
"""Where the polynomials are evaluated, beside infinity, for kernels along one axis and two. Of the symmetric sets that
were tried these have the smallest errors."""

LONGEST = 5
"""Elements of a kernel along an axis, at most."""

MOST_TILES = 4
"""Tiles of an axis, at most, that are transformed by one matrix: with more, few of its elements are other than 0."""

ACROSS, ALONG = 32, 8
"""What an element costs that a transform reads or writes, in multiplications of a matrix product over channels: of the
one that goes from images to places or back, and of others. Measured with float32 on one core, with kernels for AVX2 and
AVX-512."""


@dataclass(frozen=True)
class Axis:
    """A spatial axis of a convolution without stride and dilation.

    Attributes:
        length: of the input.
        outputs: how many.
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
    def places(self) -> int:
        """Of the input, that a tile reads."""
        return len(self.points) + 1

    @property
    def tiles(self) -> int:
        """How many there are."""
        return -(-self.outputs // (self.places - self.kernel + 1))

    def transposed(self) -> Axis:
        """Return the axis of the gradient by the input, which is a convolution of the upstream gradient."""
        return Axis(self.outputs, self.length, self.kernel - 1 - self.before, self.kernel, self.points)


NO_AXIS = Axis(1, 1, 0, 1, ())
"""The height where there is none."""


@dataclass(frozen=True)
class Segment:
    """Neighbouring tiles of an axis that are transformed by one matrix.

    Attributes:
        read: which places of the input they read.
        made: which outputs they make.
        reads: B (places * tiles, places of the input), a tile after the other for each place.
        makes: A^T (outputs, places * tiles).
        makes_across: A, as a matrix of its own.
    """

    read: slice
    made: slice
    reads: Array
    makes: Array
    makes_across: Array


def transforms(kernel: int, points: Sequence[float]) -> tuple[Array, Array, Array]:
    """Return A (places, outputs), G (places, kernel) and B (places, places) of a tile, in float64."""
    places = len(points) + 1
    others = [[*points[:i], *points[i + 1 :]] for i in range(places)]
    scale = [math.prod(point - other for other in rest) for point, rest in zip(points, others, strict=False)]
    a, g = (
        np.vstack([np.vander(np.array(points, np.float64), n, increasing=True), np.eye(n)[-1:]])
        for n in (places - kernel + 1, kernel)
    )
    b = np.zeros((places, places))
    for row, roots in zip(b, others, strict=True):
        row[: len(roots) + 1] = np.polynomial.polynomial.polyfromroots(roots)
    return a, g / np.array([*scale, 1.0])[:, None], b


@lru_cache(maxsize=256)
def segments(axis: Axis) -> list[Segment]:
    """Return the segments of an axis, with about equally many tiles."""
    a, _, b = transforms(axis.kernel, axis.points)
    places, each = a.shape
    count = -(-axis.tiles // MOST_TILES)
    bounds = [axis.tiles * i // count for i in range(count + 1)]
    found = []
    for first, last in pairwise(bounds):
        tiles = last - first
        made = slice(first * each, min(last * each, axis.outputs))
        start = made.start - axis.before
        ends = start, start + tiles * each + axis.kernel - 1
        read = slice(*(min(max(end, 0), axis.length) for end in ends))
        reads = np.zeros((places, tiles, read.stop - read.start), np.float32)
        makes = np.zeros((made.stop - made.start, places, tiles), np.float32)
        for tile in range(tiles):
            at = start + tile * each - read.start
            inside = [place for place in range(places) if 0 <= at + place < reads.shape[2]]
            reads[:, tile, [at + place for place in inside]] = b[:, inside]
            of_tile = makes[tile * each : (tile + 1) * each]
            of_tile[:, :, tile] = a[:, : len(of_tile)].T
        reads, makes = reads.reshape(places * tiles, -1 if reads.size else 0), makes.reshape(-1, places * tiles)
        found.append(Segment(read, made, reads, makes, np.ascontiguousarray(makes.T)))
    return found


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
    places = height.places * width.places
    products = places * samples * height.tiles * width.tiles * channels * filters
    ends = samples * (channels * height.length * width.length + filters * height.outputs * width.outputs)
    partly = samples * width.places * width.tiles * (channels * height.length + filters * height.outputs)
    whole = samples * places * height.tiles * width.tiles * (channels + filters)
    pieces = len(about_equal_blocks(samples, _bytes(channels, filters, axes)))
    pieces *= len(segments(height)) * len(segments(width))
    along = (2 + pieces) * places * channels * filters  # each piece is added to the gradient by the weight
    if height != NO_AXIS:
        along += partly + whole
    return products + ACROSS * (ends + partly) + ALONG * along


def _sizes(channels: int, filters: int, axes: tuple[Axis, Axis]) -> tuple[int, int, int, int]:
    """Elements for a sample, at most, of the input transformed along one axis, along both, and of the output's."""
    rows, columns = (max(len(segment.reads) for segment in segments(axis)) for axis in axes)
    read = max(segment.reads.shape[1] for segment in segments(axes[0]))
    made = max(len(segment.makes) for segment in segments(axes[0]))
    if axes[0] == NO_AXIS:
        read = made = 0
    return channels * read * columns, channels * rows * columns, filters * made * columns, filters * rows * columns


def _bytes(channels: int, filters: int, axes: tuple[Axis, Axis]) -> int:
    """Bytes for a sample: those of the input, of the output and of what is transformed."""
    height, width = axes
    ends = channels * height.length * width.length + filters * height.outputs * width.outputs
    return 4 * (ends + sum(_sizes(channels, filters, axes)))


@lru_cache(maxsize=64)
def _of_weight(axes: tuple[Axis, Axis]) -> Array:
    """Return G for both axes in float32, (places, elements of the kernel), the width's places first."""
    (_, of_height, _), (_, of_width, _) = (transforms(axis.kernel, axis.points) for axis in axes)
    both: Array = np.einsum("ax,by->abyx", of_width, of_height)
    return np.asarray(both.reshape(len(of_width) * len(of_height), -1), np.float32)


def _transform(
    x: Array, rows: Array, columns: Array, places: int, partly: Array, whole: Array
) -> tuple[list[Call], Array]:
    """Return the calls that transform x (images, H, W), along the width first, and the result, flat: by places of the
    width and the height, tiles of the height and the width, and images.

    Args:
        rows: of the height, (places * tiles, H).
        columns: of the width, (places * tiles, W).
        places: of a tile, along the width.
        partly, whole: memory for what is transformed along the width, and along both.
    """
    images, height, _ = x.shape
    whole = whole[: len(rows) * len(columns) * images]
    if rows.shape == (1, 1):  # `NO_AXIS`
        return [partial(np.matmul, columns, x.transpose(1, 2, 0), whole.reshape(1, len(columns), images))], whole
    partly = partly[: height * len(columns) * images]
    by_row = partly.reshape(height, places, -1).swapaxes(0, 1)
    return [
        partial(np.matmul, columns, x.transpose(1, 2, 0), partly.reshape(height, len(columns), images)),
        partial(np.matmul, rows, by_row, whole.reshape(places, len(rows), -1)),
    ], whole


def _transform_back(whole: Array, y: Array, rows: Array, columns: Array, places: int, partly: Array) -> list[Call]:
    """Return the calls that leave in y (images, H, W) what `whole` has, transformed along the height first.

    Args:
        rows: of the height, (H, places * tiles).
        columns: of the width, (W, places * tiles).
        places, partly: see `_transform`.
    """
    images, height, _ = y.shape
    by_height: list[Call] = []
    if rows.shape == (1, 1):  # `NO_AXIS`
        partly = whole.reshape(-1)
    else:
        partly = partly[: height * columns.shape[1] * images]
        into = partly.reshape(height, places, -1).swapaxes(0, 1)
        by_height = [partial(np.matmul, rows, whole.reshape(places, rows.shape[1], -1), into)]
    across = partly.reshape(height, columns.shape[1], images).swapaxes(1, 2)
    return [*by_height, partial(np.matmul, across, columns.T, y.swapaxes(0, 1))]


@dataclass(frozen=True)
class _Piece:
    """The windows of some samples, by one segment of each axis.

    Attributes:
        rows, columns: the segments of the height and the width.
        read: what they read of the input, (samples * C, height, width).
        made: what they make of the output, (samples * F, height, width).
    """

    rows: Segment
    columns: Segment
    read: Array
    made: Array


def _pieces(x: Array, y: Array, axes: tuple[Axis, Axis], scratch: Scratch) -> tuple[list[Array], Iterator[_Piece]]:
    """Return memory of the `_sizes`, used by every piece in turn, and the pieces of x (N, C, ...) and y (N, F, ...)."""
    height, width = axes
    samples, channels, filters = *x.shape[:2], y.shape[1]
    inputs = np.reshape(x, (samples * channels, height.length, width.length), copy=False)
    outputs = np.reshape(y, (samples * filters, height.outputs, width.outputs), copy=False)
    found = about_equal_blocks(samples, _bytes(channels, filters, axes))
    most = max(block.stop - block.start for block in found)
    memory = [scratch((most * size,), x.dtype) for size in _sizes(channels, filters, axes)]
    return memory, (
        _Piece(
            rows,
            columns,
            inputs[block.start * channels : block.stop * channels, rows.read, columns.read],
            outputs[block.start * filters : block.stop * filters, rows.made, columns.made],
        )
        for block in found
        for rows, columns in product(segments(height), segments(width))
    )


def bind_convolution(
    x: Array, weight: Array, y: Array, axes: tuple[Axis, Axis], flipped: bool, scratch: Scratch
) -> list[Call]:
    """Return the calls that leave in y (N, F, *outputs) the convolution of x (N, C, *lengths), both in one piece.

    Args:
        weight: (F, C, *kernel); `flipped`: (C, F, *kernel) with its elements from the last to the first.
    """
    of_weight, elements = _of_weight(axes), np.reshape(weight, (*weight.shape[:2], -1), copy=False)
    if flipped:
        of_weight, elements = np.ascontiguousarray(of_weight[:, ::-1]), elements.swapaxes(0, 1)
    filters, channels = elements.shape[:2]
    weights = scratch((len(of_weight), channels, filters), weight.dtype)
    calls: list[Call] = [partial(np.matmul, of_weight, elements.transpose(1, 2, 0), weights.swapaxes(0, 1))]
    places = axes[1].places
    memory, pieces = _pieces(x, y, axes, scratch)
    for piece in pieces:
        rows, columns = piece.rows, piece.columns
        transform, of_x = _transform(piece.read, rows.reads, columns.reads, places, *memory[:2])
        of_x = of_x.reshape(len(weights), -1, channels)
        of_y = memory[3][: of_x.size // channels * filters].reshape(*of_x.shape[:2], filters)
        calls += [*transform, bind_product(of_x, weights, of_y)]
        calls += _transform_back(of_y, piece.made, rows.makes, columns.makes, places, memory[2])
    return calls


def bind_weight_gradient(g: Array, x: Array, out: Array, axes: tuple[Axis, Axis], scratch: Scratch) -> list[Call]:
    """Return the calls that leave in `out` (F, C, *kernel) the gradient of a convolution of x (N, C, *lengths).

    All arrays are in one piece each, g (N, F, *outputs).
    """
    of_weight, places = _of_weight(axes), axes[1].places
    filters, channels = out.shape[:2]
    total, part = (scratch((len(of_weight), channels, filters), out.dtype) for _ in range(2))
    calls: list[Call] = []
    memory, pieces = _pieces(x, g, axes, scratch)
    for i, piece in enumerate(pieces):
        rows, columns = piece.rows, piece.columns
        transform_x, of_x = _transform(piece.read, rows.reads, columns.reads, places, *memory[:2])
        transform_g, of_g = _transform(piece.made, rows.makes_across, columns.makes_across, places, *memory[2:])
        of_x, of_g = of_x.reshape(len(total), -1, channels), of_g.reshape(len(total), -1, filters)
        calls += [*transform_x, *transform_g, bind_product(of_x.swapaxes(1, 2), of_g, part if i else total)]
        if i:
            calls.append(partial(np.add, total, part, total))
    by_channel = np.reshape(out, (filters, channels, -1), copy=False).swapaxes(0, 1)
    return [*calls, partial(np.matmul, total.transpose(1, 2, 0), of_weight, by_channel)]
