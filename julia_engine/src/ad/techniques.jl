"""
    Techniques(; replay=true, ...)

Every technique of the engine as a switch, so that an ablation can tell what each one brings. The defaults are the
engine. With any of them off a step is slower or larger, and results differ by rounding only; beside numbers that are not
finite, `fuse` and `winograd` may also make more of them NaN. The papers' names are in brackets.

- `replay`: build and sort the graph once and replay it for every batch (topological sort once); off: build and
  differentiate eagerly at every step.
- `preallocate`: compute into buffers that exist before the step (pre-allocation, in-place `forward!` and `backward!`,
  gradients reset and not reallocated); off: every op allocates its result.
- `reuse_memory`: values that are never alive together share memory (memory reuse); off: each has its own.
- `in_place`: an op may write over an input that nobody needs any more; off: never.
- `views`: slices, reshapes and transposes are views (`@views`); off: they are copied.
- `place_parts`: the parts of a concatenation, and the gradients of slices, are computed in their place in the whole;
  off: they are copied there.
- `simplify`: merge equal subexpressions and drop needless ops (one graph for forward and backward).
- `join`: the products that make the gradient of a weight which a loop reads become one of all its steps, where the samples
  are few; off: each is computed and added.
- `fuse`: products that add to what is there, activations with their bias and their derivative, and convolutions with their
  max-pool, in one pass, and elementwise ops on large arrays tile by tile; off: op by op.
- `fused_loss`: softmax cross-entropy and its gradient as fused ops on integer labels (stable softmax, sparse one-hot
  labels); off: log_softmax times one-hot columns.
- `concrete`: instructions are of one concrete type and run by a static branch (concrete types, type stability); off:
  each is boxed and dispatched at run time.
- `batched`: a mini-batch is one pass (vectorisation by matrices); off: one pass per sample, gradients accumulated.
- `flat_parameters`: one optimizer loop over one vector of all parameters; off: one per tensor.
- `sparse_columns`: the gradient of an embedding is kept for the columns that were looked up, until the update (row-sparse
  in the papers' layout); off: as a whole matrix, one for each thread.
- `winograd`: in training steps in Float32, convolutions without stride, dilation and groups, of kernels of up to five elements
  along one axis or two, are computed by Winograd's algorithm where that takes less work: with a quarter to three fifths of the
  multiplications, and rounding errors about 2.5 times as large. Off, and always in `compile`: all by sums of products.
- `split_batch`: split the batch over threads, or the large products of a batch that stays whole, BLAS at one thread inside;
  off: BLAS has all threads.

`@inbounds` and `@simd` are compiled into the loops: start Julia with `TWINGRAD_SIMD=0` in the environment and
`--compiled-modules=no` to have the loops without them.
"""
struct Techniques
    replay::Bool
    preallocate::Bool
    reuse_memory::Bool
    in_place::Bool
    views::Bool
    place_parts::Bool
    simplify::Bool
    join::Bool
    fuse::Bool
    fused_loss::Bool
    concrete::Bool
    batched::Bool
    flat_parameters::Bool
    sparse_columns::Bool
    winograd::Bool
    split_batch::Bool
end

Techniques(; replay=true, preallocate=true, reuse_memory=true, in_place=true, views=true, place_parts=true,
    simplify=true, join=true, fuse=true, fused_loss=true, concrete=true, batched=true, flat_parameters=true, sparse_columns=true,
    winograd=true, split_batch=true) =
    Techniques(replay, preallocate, reuse_memory, in_place, views, place_parts, simplify, join, fuse, fused_loss,
        concrete, batched, flat_parameters, sparse_columns, winograd, split_batch)
