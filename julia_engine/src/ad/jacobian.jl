# Whole matrices of derivatives, and products with the matrix of second ones.

"""
    jacobian(f, x; mode=nothing)

The derivatives of all elements of `f(x)` (rows) by all elements of `x` (columns), in the order of memory, as a matrix. For
containers: one like the result whose leaves are ones like `x`, of a matrix each.

`mode` is `:forward` (a pass for each column) or `:reverse` (one for each row); `nothing` takes the fewer passes.

There is no `chunk` as in the numpy engine, whose passes push many tangents at once to save its calls' overhead; a pass
here is instructions of the tape. Plain Julia functions have chunks of partial derivatives: [`forward_jacobian`](@ref).
"""
function jacobian(f, x; mode=nothing)
    mode === nothing || Symbol(mode) in (:forward, :reverse) ||
        throw(ConfigurationError("jacobian: expected the mode :forward or :reverse, got $(repr(mode))"))
    return jacobian_of("jacobian", f, x, mode)
end

function jacobian_of(name::String, @nospecialize(f), @nospecialize(x), @nospecialize(mode))
    call = recorded_call(name, f, [1], (x,))
    columns = sum(Int[length(v) for v in call.variables])
    rows = sum(Int[length(y) for y in call.outputs])
    forward = mode === nothing ? columns <= rows : Symbol(mode) === :forward
    blocks = afterwards(() -> (forward ? by_columns : by_rows)(call), call)
    matrices = shown(blocks, call.plain, Any[])
    n = length(call.variables)
    found = Any[unflatten(call.arguments[1], matrices[(i-1)*n+1:i*n]) for i in 1:length(call.outputs)]
    return unflatten(call.result, found)
end

"""The blocks of the Jacobian, output by output and in each of them variable by variable."""
function by_rows(call::Call)
    own = Set{Tensor}(call.variables)
    order = Tensor[x for x in topological_sort(call.outputs, call.level) if !(x in own)]
    blocks = Tensor[]
    for y in call.outputs
        found = [or_zeros(gradients(Tensor[y], Tensor[seed], call.variables; within=order), call.variables)
                 for seed in directions(y)]
        for k in eachindex(call.variables)
            push!(blocks, astype(transpose(side_by_side(Tensor[g[k] for g in found], call.variables[k])), y.eltype))
        end
    end
    return blocks
end

function by_columns(call::Call)
    order = topological_sort(call.outputs, call.level)
    found = [[pushed_forward(call.outputs, Dict{Tensor,Tensor}(v => t), order) for t in directions(v)]
             for v in call.variables]
    return Tensor[side_by_side(Tensor[column[i] for column in found[k]], call.outputs[i])
                  for i in eachindex(call.outputs) for k in eachindex(call.variables)]
end

"""For each element of `x` the direction in which it alone moves, by one."""
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
cost is that of a few gradients, whatever the size. `x` may be a container.
"""
hvp(f, x, v) = jvp(grad(f), (x,), (v,))[2]

"""
    hessian(f, x)

The second derivatives of a scalar function by all elements of `x`, as a matrix: forward mode over the gradient. For a
container: one like `x` of ones like `x`, as [`jacobian`](@ref) has it.
"""
hessian(f, x) = jacobian(grad(f), x; mode=:forward)
