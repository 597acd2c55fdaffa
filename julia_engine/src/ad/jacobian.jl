# Whole matrices of derivatives, and products with the matrix of second ones.

"""
    jacobian(f, x; mode=nothing, chunk=nothing)

The derivatives of all elements of `f(x)` (rows) by all elements of `x` (columns), in the order of memory, as a matrix. For
containers: one like the result whose leaves are ones like `x`, of a matrix each.

`mode` is `:forward` (a pass for each column) or `:reverse` (one for each row); `nothing` takes the fewer passes.

The derivative is traced for one direction, and applied to `chunk` of them at once, as [`vmap`](@ref) does it; `nothing`: to as
many as fit into the cache. Where it has ops without a batching rule (loops, decompositions, opaque rules), each direction is a
separate pass. Plain Julia functions have chunks of partial derivatives, too: [`forward_jacobian`](@ref).

Throws a `NotDifferentiableError` for an `x` without a derivative, and a `ConfigurationError` for another mode or chunk.
"""
function jacobian(@nospecialize(f), @nospecialize(x); @nospecialize(mode=nothing), @nospecialize(chunk=nothing))
    check_chunk("jacobian", chunk)
    mode === nothing || Symbol(mode) in (:forward, :reverse) ||
        throw(ConfigurationError("jacobian: expected the mode :forward or :reverse, got $(repr(mode))"))
    return jacobian_of("jacobian", f, x, mode, chunk)
end

check_chunk(name::String, @nospecialize(chunk)) = chunk === nothing || chunk isa Integer && !(chunk isa Bool) && chunk >= 1 ||
    throw(ConfigurationError("$name: chunk must be a number of directions from 1 on, or nothing, got $(repr(chunk))"))

function jacobian_of(name::String, @nospecialize(f), @nospecialize(x), @nospecialize(mode), @nospecialize(chunk))
    call = linearize(name, f, [1], (x,))
    columns = sum(Int[length(v) for v in call.variables])
    rows = sum(Int[length(y) for y in call.outputs])
    forward = mode === nothing ? columns <= rows : Symbol(mode) === :forward
    blocks = afterwards(() -> (forward ? by_columns : by_rows)(call, chunk), call)
    matrices = shown(blocks, call.plain, Any[])
    n = length(call.variables)
    found = Any[unflatten(call.arguments[1], matrices[(i-1)*n+1:i*n]) for i in 1:length(call.outputs)]
    return unflatten(call.result, found)
end

"""The blocks of the Jacobian, output by output and in each of them variable by variable."""
function by_rows(call::Linearized, chunk)
    own = Set{Tensor}(call.variables)
    order = Tensor[x for x in call.order if !(x in own)]
    blocks = Tensor[]
    for y in call.outputs
        pull(seed) = or_zeros(gradients(Tensor[y], Tensor[seed], call.variables; within=order), call.variables)
        for rows in in_directions(pull, y, call.variables, chunk)
            push!(blocks, astype(transpose(rows), y.eltype))
        end
    end
    return blocks
end

function by_columns(call::Linearized, chunk)
    found = [in_directions(t -> pushed_forward(call.outputs, Dict{Tensor,Tensor}(v => t), call.order), v, call.outputs, chunk)
             for v in call.variables]
    return Tensor[found[k][i] for i in eachindex(call.outputs) for k in eachindex(call.variables)]
end

"""Elements that the directions of one array have together, at most: more of them fall out of the processor's cache."""
const AT_ONCE = 100_000

"""
For each of `likes` a matrix: what `linear`, a function to tensors like these, makes of the directions of `x`, in columns. It is
traced for one direction and applied to many of them at once, where all its ops have batching rules.
"""
function in_directions(@nospecialize(linear), x::Tensor, likes::Vector{Tensor}, chunk)
    n = length(x)
    program = n < 2 ? nothing : derivative_program(linear, x)
    if program === nothing
        found = [linear(direction) for direction in directions(x)]
        return Tensor[side_by_side(Tensor[column[i] for column in found], likes[i]) for i in eachindex(likes)]
    end
    longest = maximum(Int[n; Int[length(y) for y in likes]])
    step = chunk === nothing ? max(1, AT_ONCE ÷ max(longest, 1)) : Int(chunk)
    parts = [Tensor[] for _ in likes]
    for first in 1:step:n
        count_ = min(step, n - first + 1)
        columns, mapped = batched(program, count_, Tensor[directions(x, first, count_)], [true])
        for (part, y, m, like_) in zip(parts, columns, mapped, likes)
            push!(part, reshape_to(m ? y : for_each(y, count_), Int[length(like_), count_]))
        end
    end
    return Tensor[length(part) == 1 ? part[1] : concatenate(part, 2) for part in parts]
end

"""The program from one direction of `x` to what `linear` makes of it, or `nothing` where an op of it has no batching rule."""
function derivative_program(@nospecialize(linear), x::Tensor)
    own = symbol(x.eltype, x.dims)
    outputs, nodes = nested_trace(() -> linear(own))
    program = traced(nodes, Tensor[own], outputs)
    depending = Set{Tensor}(program.inputs)
    for e in program.equations
        any(a -> a in depending, e.inputs) || continue
        e.op.batch === nothing && !e.op.elementwise && return nothing
        union!(depending, e.outputs)
    end
    return program
end

"""`n` directions of `x`, from that of element `first` on, along a last axis."""
function directions(x::Tensor, first::Int, n::Int)
    d = fill!(new_array(x.eltype, Int[length(x), n]), 0)
    for k in 1:n
        d[first+k-1, k] = 1
    end
    return reshape_to(Constant(d), Int[x.dims; n])
end

"""For each element of `x` its unit direction."""
function directions(x::Tensor)
    return [begin
        d = fill!(new_array(x.eltype, x.dims), 0)
        d[i] = 1
        Constant(d)
    end for i in 1:length(x)]
end

"""Tensors like `like` as the columns of a matrix."""
function side_by_side(columns::Vector{Tensor}, like::Tensor)
    isempty(columns) && return Constant(new_array(like.eltype, Int[length(like), 0]))
    return concatenate(Tensor[reshape_to(c, Int[length(like), 1]) for c in columns], 2)
end

"""
    hvp(f, x, v)

The Hessian of a scalar function times a direction `v`, which is like `x`: forward mode over the gradient, so that the
cost is that of a few gradients, whatever the size. `x` may be a container. Throws a `ShapeError` where `f` gives no single number,
or `v` does not fit.
"""
hvp(@nospecialize(f), @nospecialize(x), @nospecialize(v)) = jvp(grad(f), (x,), (v,))[2]

"""
    hessian(f, x; chunk=nothing)

The second derivatives of a scalar function by all elements of `x`, as a matrix: forward mode over the gradient. For a
container: one like `x` of ones like `x`, as [`jacobian`](@ref) has it. Throws a `ShapeError` where `f` gives no single number.
"""
function hessian(@nospecialize(f), @nospecialize(x); @nospecialize(chunk=nothing))
    check_chunk("hessian", chunk)
    return jacobian_of("hessian", grad(f), x, :forward, chunk)
end
