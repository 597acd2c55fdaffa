"""
Automatic differentiation on Julia arrays: tensors, the op table, planning and replay.

The twin of the numpy engine's `ad` package, file by file. What a tape does, the loops on bare memory, is in
`ad/kernels`; there is no such folder in the twin, whose kernels are numpy's.
"""
module AD

using Libdl: Libdl
using LinearAlgebra
using LinearAlgebra: I, LAPACKException, PosDefException, SingularException, Symmetric, cholesky, cross, det, diag, diagm, dot, kron, logabsdet, lu, norm,
    normalize, opnorm, pinv, qr, svd, svdvals, tr, tril, triu
using Random: MersenneTwister
using Serialization: Serialization
using Statistics: Statistics, mean, median, middle, quantile, std, var
using ..Versions: Versions

# Building graphs runs once: compile it quickly, and keep the optimiser for the kernels, a separate module.
Base.Experimental.@optlevel 0

include("ad/errors.jl")
using .Errors
include("ad/kernels/Kernels.jl")
using .Kernels
using .Kernels: Called, Segment, Slot, apart, compiling, copy_columns!, elements_of, fill_ones!, huge_pages!, interpret,
    interpreting, keep!, kernel, mixed_bytes, mixed_rows, repeat_last!, start_of, zeroed!

# values: a tensor and where it came from; no op
include("ad/memory.jl")
include("ad/techniques.jl")
include("ad/tensor.jl")
include("ad/tensor_maps.jl")
using .TensorMaps
include("ad/state.jl")
include("ad/containers.jl")

# ops: the record of an op, its use, and all records
include("ad/operators.jl")
include("ad/lowering.jl")
include("ad/op.jl")
include("ad/mutation.jl")
include("ad/ops/elementary.jl")
include("ad/ops/shape.jl")
include("ad/ops/reduction.jl")
include("ad/ops/indexing.jl")
include("ad/ops/along.jl")
include("ad/ops/linalg.jl")
include("ad/ops/decompositions.jl")
include("ad/ops/special.jl")
include("ad/ops/activations.jl")
include("ad/ops/loss.jl")
include("ad/ops/normalisation.jl")
include("ad/ops/attention.jl")
include("ad/ops/convolution.jl")
include("ad/ops/winograd.jl")
include("ad/ops/pooling.jl")
include("ad/ops/interpolation.jl")
include("ad/ops/random.jl")
include("ad/ops/julia_functions.jl")

# programs: tracing, closing over, simplifying
include("ad/program.jl")

# derivatives: gradients and tangents, of tensors and of dual numbers
include("ad/reverse.jl")
include("ad/forward.jl")
include("ad/transforms.jl")
include("ad/vmap.jl")
include("ad/jacobian.jl")
include("ad/sparse.jl")
include("ad/gradcheck.jl")
include("ad/dual_numbers.jl")
using .DualNumbers
polygamma(n::Integer, x::Dual) = DualNumbers.by_rule(x, a -> polygamma(n, a), (a, y) -> polygamma(n + 1, a))
relu(x::Dual) = DualNumbers.by_rule(x, relu, (a, y) -> ifelse(a > 0, one(a), zero(a)))
include("ad/nesting.jl")

# compilation: passes over programs, and tapes
include("ad/compile/plan.jl")
include("ad/compile/fusion.jl")
include("ad/compile/fused_pooling.jl")
include("ad/compile/tiles.jl")
include("ad/compile/watched.jl")
include("ad/compile/tape.jl")
include("ad/compile/straight_line.jl")
include("ad/compile/compiled.jl")
include("ad/copies.jl")

# control: ops made of functions
include("ad/control/checkpoint.jl")
include("ad/control/custom.jl")
include("ad/control/scan.jl")
include("ad/control/cond.jl")
include("ad/control/while_loop.jl")

# Every function on tensors that the numpy engine's `ops` has, by its name there. Ops that are functions themselves are in
# TABLE; here are the others, and those that go by another name or convention in Julia.
for (name, f) in (
    "all" => all, "any" => any, "argmax" => argmax_along, "argmin" => argmin_along, "astype" => astype, "binary_cross_entropy" => binary_cross_entropy, "broadcast_to" => broadcast_to, "clip" => clip,
    "concatenate" => concatenate, "dot" => dot, "dropout" => dropout, "einsum" => einsum,
    "embedding" => embedding, "embedding_gradient" => embedding_gradient, "expand_dims" => expand_dims,
    "getitem" => getindex, "log_softmax" => log_softmax, "logsumexp" => logsumexp, "matmul" => matmul, "max" => maximum,
    "mean" => mean, "mean_squared_error" => mean_squared_error, "min" => minimum, "moveaxis" => moveaxis, "norm" => norm,
    "outer" => outer, "pad" => pad, "prod" => prod, "ravel" => vec, "reshape" => reshape, "softmax" => softmax,
    "softmax_cross_entropy" => softmax_cross_entropy, "squeeze" => squeeze, "stack" => stack, "std" => std,
    "sum" => sum, "swapaxes" => swapaxes, "tensordot" => tensordot, "transpose" => permutedims, "var" => var,
    "where" => choose, "flip" => reverse, "roll" => circshift, "repeat" => repeat, "tile" => repeat, "diagonal" => diag,
    "trace" => tr, "diagflat" => diagm, "tril" => tril, "triu" => triu, "take" => gather, "take_along_axis" => take_along_axis,
    "diff" => diff, "sort" => sort, "topk" => topk, "median" => median, "quantile" => quantile, "kron" => kron, "cross" => cross,
    "solve" => \, "inv" => inv, "det" => det, "cholesky" => cholesky, "pinv" => pinv, "matrix_power" => matrix_power,
    "digamma" => digamma)
    FUNCTIONS[name] = f
end

export GraphNode, Operator, Tensor, Variable, Constant, Op, TABLE, FUNCTIONS, Program, Tape, Techniques, Generator
export value, item, assign!, scope, no_grad, topological_sort, forward!, backward!, gradients, trace
export gradient, withgradient, grad, value_and_grad, vjp, jvp, vmap, jacobian, hessian, hvp, sparsity, sparse_jacobian, sparse_hessian, compile, gradcheck, AutoTwinGrad
export stop_gradient, custom_rule, chain_rule, checkpoint, scan, branch, while_loop
export Dual, ForwardBuffers, derivative, forward_gradient, forward_gradient!, forward_jacobian, forward_jacobian!
export run!, copy_columns!, poison!, source, diagnose, nbytes
export logaddexp, sigmoid, softplus, relu, clip, choose, astype, expand_dims, squeeze, permuteDims, swapaxes, moveaxis, broadcast_to
export concatenate, stack, pad, gather, embedding, embedding_gradient, matmul, outer, tensordot, einsum, logsumexp
export softmax, log_softmax, logsoftmax, softmax_cross_entropy, binary_cross_entropy, mean_squared_error, dropout
export argmax_along, argmin_along, sortperm_along, take_along_axis, topk, matrix_power, eigh, erf, erfc, gammaln, digamma, polygamma, logit, mean, var, std, norm, dot
for name in names(Errors)
    name === :Errors || @eval export $name
end

end
