"""Every technique of the engine as a switch, so that an ablation can tell what each one brings.

The defaults are the engine. With any of them off a step is slower or larger, and results differ by rounding only, but
where a description below says more (`lazy_updates`; `fuse` and `winograd` beside numbers that are not finite).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Techniques:
    """What the engine does to be fast. The papers' names for the techniques are in brackets.

    Attributes:
        replay: build and sort the graph once and replay it for every batch (topological sort once); off: build
            and differentiate it eagerly at every step.
        preallocate: compute into buffers that exist before the step (pre-allocation, in-place `forward!` and
            `backward!`, gradients reset and not reallocated); off: every op allocates its result.
        reuse_memory: values that are never alive together share memory (memory reuse), and so does what ops need
            while they are computed; off: each has its own.
        in_place: an op may write over an input that no later op reads; off: never.
        views: slices, reshapes and transposes are views (`@views`); off: they are copied.
        place_parts: the parts of a concatenation, and the gradients of slices, are computed in their place in
            the whole; off: they are copied there.
        straight_line: functions of single numbers run as generated straight-line Python on floats; off: as calls of
            numpy.
        simplify: merge equal subexpressions, drop needless ops (one graph for forward and backward), and add the parts
            of a gradient as soon as they are there.
        join: the terms of a gradient that can be computed together are: the products that make the gradient of a
            weight which a loop reads become one of all its steps; off: each is computed and added.
        fused_loss: softmax cross-entropy and its gradient as two fused ops on integer labels (stable softmax,
            sparse one-hot labels); off: log_softmax times one-hot rows.
        fuse: convolution, bias, relu and max-pooling as one chain of few calls: the pooling is made ready by the
            matrix product of the convolution, and relu, which commutes with it, comes after it, where there is less
            to do; all steps of an LSTM or a GRU as one op; off: op after op. Sums are in another order, no less exact.
            Beside what is not finite, windows of a fused pool that do not reach it may be NaN, too, those of the
            sample before it among them.
        batched: a mini-batch is one pass (vectorisation by matrices); off: one pass per sample, gradients
            accumulated.
        flat_parameters: one optimizer loop over one vector of all parameters; off: one per tensor.
        sparse_rows: where the batch is split, the gradient of an embedding is kept for the rows that were looked up,
            until the parts are added up; off: as a whole matrix, one for each thread.
        lazy_updates: lazy updates by Adam: rows of an embedding that no sample looks up are updated when they are
            looked up again, and all of them every 32 steps: many steps at once, which differs by roundings, and by at
            most a 40,000th of what the steps subtract, never more than 1e-6. In float32, where a batch looks up a part
            of the rows only.
        product_parts: products of few rows are computed some columns at a time, and larger ones of a training step in
            tiles where BLAS has one thread in it, if numpy's BLAS then multiplies matrices as they lie, without copies;
            off: every product as a whole.
        winograd: in training steps in float32, convolutions without stride, dilation and groups, over one axis or two
            and with kernels of up to five elements along each, are computed by Winograd's algorithm where that is less
            work. It has a quarter to three fifths of the multiplications and rounding errors about 2.5 times as large,
            and makes what is beside a number that is not finite NaN. Off, and always in `compile`: as sums of products.
        split_batch: split the batch over threads: "auto" where the ops are large enough to be worth it, else
            True or False. Where a batch stays whole, large products of matrices are split instead, but with False.
            BLAS has one thread inside the split; without it all threads, or with "auto" one where that is measured to
            be faster, or rounds in another way and the products are small.
    """

    replay: bool = True
    preallocate: bool = True
    reuse_memory: bool = True
    in_place: bool = True
    views: bool = True
    place_parts: bool = True
    straight_line: bool = True
    simplify: bool = True
    join: bool = True
    fused_loss: bool = True
    fuse: bool = True
    batched: bool = True
    flat_parameters: bool = True
    sparse_rows: bool = True
    lazy_updates: bool = True
    product_parts: bool = True
    winograd: bool = True
    split_batch: bool | str = "auto"


COMPILE_DEFAULTS = Techniques(winograd=False)
"""The techniques of `compile`: all but Winograd, whose rounding errors are larger than those of numpy's functions."""
