# The mutation guard: arrays are used by reference, and a gradient may need what they held when the op was computed.

"""Whether the caller gave its memory, or what it is a view of, and so may write there; what ops compute, nobody can."""
function is_given(x::Tensor)
    while x.op !== nothing && (x.op::Op).view !== nothing
        x = x.inputs[1]
    end
    return x.op === nothing && !x.literal
end

"""The arrays among the memory of tensors that their callers gave: what is returned to them shares none of it."""
given_arrays(tensors::Vector{Tensor}) = Any[(x.data::Memory).root for x in tensors if x.data !== nothing && is_given(x)]

"""A checksum of all its elements: it changes when one of them does, or their order."""
stamp(x::Tensor) = checksum(x.data::Memory)

function checksum(m::Memory)
    is_dense(m) && return mixed_bytes(Ptr{UInt8}(m.address), length(m) * sizeof(m.eltype))
    # With gaps, or in another order: row by row along the first axis; elements that repeat count once.
    n, s = coalesced(m.dims, Vector{Int}[m.strides])
    once = Int[step == 0 ? 1 : count for (count, step) in zip(n, s[1])]
    p = m.eltype === Float32 ? Ptr{UInt32}(m.address) : Ptr{UInt64}(m.address)
    return mixed_rows(p, once[1], s[1][1], Tuple(once[2:end]), Tuple(s[1][2:end]))::UInt64
end

"""While ops are collected, keep the checksums of the arrays that one of them was given: it reads them later."""
function note_given(now::State, inputs::Vector{Tensor})
    given = now.given
    given === nothing && return nothing
    for x in inputs
        x.op === nothing && !x.literal && x.data !== nothing || continue
        is_there(x.data::Memory) || throw(InPlaceError("an operand, an array of $(x.eltype) of size $(size(x)), $RESIZED"))
        push!(given, x => stamp(x))
    end
end

"""
Throw an `InPlaceError` if an array was written to after a collected op had read it: all ops that read it would see its last values.
What was collected belongs to the ops around it, too.
"""
function check_given(given::Given)
    for (x, was) in given
        is_there(x.data::Memory) && stamp(x) == was || throw(InPlaceError("an array of size $(size(x)) was written to after an op " *
            "had read it, and ops that are collected read it later: give each a copy, such as copy(a), or make a new array in " *
            "each round of a loop"))
    end
    outer = state().given
    outer === nothing || append!(outer, given)
    return nothing
end

"""
Which of `n` inputs the rules of input `k` read in either mode, as `reads[i, k]`; row `n + 1` is for the result. Found by
tracing the rules, once for an op: what a rule reads may not depend on sizes or attributes. A rule that needs values reads all.
"""
function operands_read(node::Tensor)
    op, n = node.op::Op, length(node.inputs)
    known = lock(() -> get(op.reads, n, nothing), READS_LOCK)
    known === nothing || return known::Matrix{Bool}
    reads = traced_reads(node)
    return lock(() -> get!(op.reads, n, reads), READS_LOCK)::Matrix{Bool}
end

"""Of the ops' `reads`, which tasks on several threads may look up and add to."""
const READS_LOCK = ReentrantLock()

function traced_reads(node::Tensor)
    op, n = node.op::Op, length(node.inputs)
    values = Tensor[symbol(x.eltype, x.dims) for x in Tensor[node.inputs; node]]
    g, y, inputs = symbol(node.eltype, node.dims), values[end], values[1:n]
    reads = zeros(Bool, n + 1, n)
    for (k, x) in enumerate(node.inputs)
        x.eltype in FLOATS || continue
        try
            tangents = Any[i == k ? symbol(a.eltype, a.dims) : nothing for (i, a) in enumerate(inputs)]
            parts, _ = nested_trace() do
                r = rule(op, k)
                pulled = r === nothing ? nothing : r(g, y, inputs, node.attrs)
                tangent = op.jvp === nothing || counts_as_constant(op, k) ? nothing : op.jvp(tangents, y, inputs, node.attrs)
                Any[pulled, tangent]
            end
            seen = TensorSet(topological_sort(Tensor[part for part in parts if part !== nothing]))
            reads[:, k] = Bool[v in seen for v in values]
        catch error
            error isa EngineError || rethrow()
            reads[:, k] .= true
        end
    end
    return reads
end

"""Whether a gradient through this node reads its input `i`."""
function is_read(node::Tensor, reads::Matrix{Bool}, i::Int)
    for k in eachindex(node.inputs)
        reads[i, k] && node.inputs[k].requires_grad && return true
    end
    return false
end

"""What a gradient through this node reads of memory that a caller gave: inputs, and what the function captures that it repeats."""
function given_and_read(node::Tensor)
    op = node.op::Op
    if op.backward! isa Joint
        passed = op.several && op.view !== nothing ? length(node.results) : 0  # inputs that no rule reads
        return filter(is_given, Tensor[node.inputs[passed+1:end]; captured_by(node.attrs)])
    end
    any(is_given, node.inputs) || return NO_INPUTS
    reads, found = operands_read(node), NO_INPUTS
    for (i, x) in enumerate(node.inputs)
        is_given(x) && is_read(node, reads, i) && !(any(y -> y === x, found)) || continue
        found === NO_INPUTS && (found = Tensor[])
        push!(found, x)
    end
    return found
end

function stamps_of(node::Tensor)
    given = given_and_read(node)
    return given === NO_INPUTS ? NO_STAMPS : UInt64[stamp(x) for x in given]
end

"""
Throw an `InPlaceError` if an array that this node's derivative reads was written to since. `now` keeps the checksums of this
gradient: of each array one is enough, as long as no code of the user's runs.
"""
function check_stamps(node::Tensor, now::TensorDict{UInt64})
    isempty(node.stamps) && return nothing
    for (x, was) in zip(given_and_read(node), node.stamps)
        is_there(x.data::Memory) && get!(() -> stamp(x), now, x) == was && continue
        i = findfirst(a -> a === x, node.inputs)
        what = i === nothing ? "an array that its function captures" :
            isempty(x.name) ? "its input $i" : "its input $i, \"$(x.name)\""
        throw(InPlaceError("the gradient of $(described(node)) needs what was computed with, but $what (size $(size(x))) was " *
            "changed in place since; change arrays after the backward pass, or compute with a copy"))
    end
end
