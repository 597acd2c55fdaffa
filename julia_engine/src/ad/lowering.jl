# Lowering: the instructions that ops' kernels are made of, appended to a list.

Base.length(p::Instructions) = length(p.f32) + length(p.f64)

"""Memory that an op's instructions may use and that no run relies on."""
function scratch!(p::Instructions, @nospecialize(T::DataType), dims::Vector{Int})
    memory = new_memory(T, dims)
    push!(p.roots, memory)
    return memory
end

const Lengths = NTuple{4,Int}
const NONE = (0, 0, 0, 0)
const ONCE = (1, 1, 1, 1)
const NOWHERE = Address(C_NULL, 0)
const Addresses = NTuple{4,Address}  # of the result and up to three operands

"""Integers are moved, never computed with, as elements of the same size."""
carrier(@nospecialize(T)) = T === Int64 ? Float64 : T

"""Append one instruction."""
function emit!(p::Instructions, @nospecialize(T::DataType), name::Symbol, at::Addresses, index::Union{Ptr,Address}, n::Lengths,
        strides::NTuple{4,Lengths}, i::Lengths=NONE, f::Tuple{Float64,Float64}=(0.0, 0.0))
    single = carrier(T) === Float32
    code = kernel(name, single)
    places = convert(Address, index)
    if single
        push!(p.f32, Instruction{Float32}(code, at[1].pointer, at[2].pointer, at[3].pointer, at[4].pointer, places.pointer, n,
            strides..., i, f))
    else
        push!(p.f64, Instruction{Float64}(code, at[1].pointer, at[2].pointer, at[3].pointer, at[4].pointer, places.pointer, n,
            strides..., i, f))
    end
    last = single ? length(p.f32) : length(p.f64)
    for k in 1:4
        at[k].slot == 0 || keep!(p, Slot(at[k].slot, single, last, k + 1))  # the first field is the kernel
    end
    places.slot == 0 || keep!(p, Slot(places.slot, single, last, 6))
    return extend!(p, single, last)
end

"""
Append instructions of Float32 once more for other parts of two arrays: where their result or first operand begins at the first
address of `x` or `y`, it begins at the second one instead. That takes less time than to make the instructions anew. They must
read and write these parts by no other field and from no other address.
"""
function emit_again!(p::Instructions, range::UnitRange{Int}, x::Pair{Address,Address}, y::Pair{Address,Address})
    moved(at::Ptr{Float32}) = at == first(x).pointer ? Ptr{Float32}(last(x)) : at == first(y).pointer ? Ptr{Float32}(last(y)) : at
    ahead = length(p.f32) + 1 - first(range)
    for i in range
        it = p.f32[i]
        push!(p.f32, Kernels.piece(it, moved(it.out), moved(it.a), it.b, it.n))
    end
    for k in 1:length(p.slots)
        slot = p.slots[k]
        slot.single && slot.instruction in range && keep!(p, Slot(slot.number, true, slot.instruction + ahead, slot.field))
    end
    return extend!(p, true, first(range) + ahead)
end

"""Let the instructions from `first` on be done after those before."""
function extend!(p::Instructions, single::Bool, first::Int)
    last = single ? length(p.f32) : length(p.f64)
    if !isempty(p.segments) && p.segments[end].single == single && p.segments[end].tile == 0
        p.segments[end] = Segment(single, p.segments[end].first, last)
    else
        push!(p.segments, Segment(single, first, last))
    end
    return nothing
end

loop(v::Vector{Int}, default::Int) = ntuple(d -> d <= length(v) ? v[d] : default, Val(4))

"""Strides of `m` seen in the dimensions `dims`: 0 along axes on which its elements repeat."""
spread_strides(m::Memory, dims::Vector{Int}) =
    Int[d > length(m.dims) || (m.dims[d] == 1 && dims[d] != 1) ? 0 : m.strides[d] for d in eachindex(dims)]

"""Drop axes of length one, and join neighbours that all operands walk through in one stride."""
function coalesced(dims::Vector{Int}, strides::Vector{Vector{Int}})
    n = Int[]
    s = [Int[] for _ in strides]
    for d in eachindex(dims)
        dims[d] == 1 && continue
        if !isempty(n) && all(k -> strides[k][d] == s[k][end] * n[end], eachindex(strides))
            n[end] *= dims[d]
        else
            push!(n, dims[d])
            for k in eachindex(strides)
                push!(s[k], strides[k][d])
            end
        end
    end
    return n, s
end

"""
Append one op that walks through `dims` with an operand's strides each (the result's first): one instruction, or
several where the operands' layouts need more than four loops.
"""
function emit_loops!(p::Instructions, @nospecialize(T::DataType), name::Symbol, dims::Vector{Int}, operands::Vector{Memory},
        strides::Vector{Vector{Int}}, i::Lengths=NONE, f::Tuple{Float64,Float64}=(0.0, 0.0))
    any(==(0), dims) && return nothing
    n, s = coalesced(dims, strides)
    at = Address[m.address for m in operands]
    name === :copy && (name = copy_kernel(T, n, s))
    if length(n) <= 4
        emit!(p, T, name, addresses(at), NOWHERE, loop(n, 1), loops(s), i, f)
        return nothing
    end
    inner = Vector{Int}[v[1:4] for v in s]
    for place in CartesianIndices(Tuple(n[5:end]))
        moved_at = Address[at[k] + sizeof(operands[k].eltype) * sum((place[d] - 1) * s[k][4+d] for d in 1:length(place))
                              for k in eachindex(at)]
        emit!(p, T, name, addresses(moved_at), NOWHERE, loop(n[1:4], 1), loops(inner), i, f)
    end
    return nothing
end

addresses(at::Vector{Address}) = ntuple(k -> k <= length(at) ? at[k] : NOWHERE, Val(4))
loops(s::Vector{Vector{Int}}) = ntuple(k -> k <= length(s) ? loop(s[k], 0) : NONE, Val(4))

"""Whether all have the same dimensions, and no gaps."""
function are_dense_alike(out::Memory, inputs::Vector{Memory})
    is_dense(out) || return false
    for m in inputs
        (m.dims === out.dims || m.dims == out.dims) && is_dense(m) || return false
    end
    return true
end

"""Append an elementwise op, with broadcasting."""
function emit_elementwise!(p::Instructions, name::Symbol, out::Memory, inputs::Vector{Memory}, i::Lengths=NONE,
        f::Tuple{Float64,Float64}=(0.0, 0.0))
    T = isempty(inputs) ? out.eltype : inputs[1].eltype
    if are_dense_alike(out, inputs)  # as below, without its lists
        n, operands = length(out), length(inputs)
        n == 0 && return nothing
        x = operands < 1 ? NOWHERE : inputs[1].address
        y = operands < 2 ? NOWHERE : inputs[2].address
        z = operands < 3 ? NOWHERE : inputs[3].address
        each = n == 1 ? NONE : (1, 0, 0, 0)
        strides = (each, operands < 1 ? NONE : each, operands < 2 ? NONE : each, operands < 3 ? NONE : each)
        return emit!(p, T, name, (out.address, x, y, z), NOWHERE, (n, 1, 1, 1), strides, i, f)
    end
    operands, strides = Memory[out], Vector{Int}[out.strides]
    for m in inputs
        push!(operands, m)
        push!(strides, spread_strides(m, out.dims))
    end
    return emit_loops!(p, T, name, out.dims, operands, strides, i, f)
end

"""The kernel of a copy: matrices are transposed by a different one than others, if their sides are as long as a short vector."""
function copy_kernel(@nospecialize(T::DataType), n::Vector{Int}, s::Vector{Vector{Int}})
    longest = Kernels.VECTOR_BYTES[]
    length(n) >= 2 && longest > 0 && s[1][1] == 1 && s[2][1] > 1 && s[2][2] == 1 && s[1][2] > 1 || return :copy
    bytes = min(n[1], n[2]) * sizeof(T)
    return bytes >= longest ? Symbol(:turn_, longest) : bytes >= 32 ? :turn_32 : :copy
end

emit_copy!(p::Instructions, out::Memory, x::Memory) = emit_elementwise!(p, :copy, out, Memory[x])
emit_fill!(p::Instructions, out::Memory, v::Real) = emit_elementwise!(p, :fill, out, Memory[], NONE, (Float64(v), 0.0))

function copy_memory!(out::Memory, x::Memory)
    code = Instructions()
    emit_copy!(code, out, x)
    GC.@preserve out x execute!(code)
    return nothing
end

"""`m` itself where it has no gaps, else scratch memory that a copy is made into first."""
function dense!(p::Instructions, m::Memory)
    is_dense(m) && return m
    copied = scratch!(p, m.eltype, m.dims)
    emit_copy!(p, copied, m)
    return copied
end

"""
The address of what messages say of an op that checks integers at every run: op, layer, the integers' size. It is an
instruction's last number.
"""
function place!(p::Instructions, op::String, dims::Vector{Int})
    place = Kernels.Place(op, state().scope, dims)
    push!(p.roots, Memory(place, pointer_from_objref(place), UInt8, Int[0], Int[1]))
    return Int(pointer_from_objref(place))
end

same_place(a::Memory, b::Memory) = a.address.pointer == b.address.pointer && a.strides == b.strides && a.dims == b.dims

# Calls of Julia's own functions of arrays --------------------------------------------------------------------------------

"""
Append a call of a Julia object that takes no arguments; `bytes` is what its scratch memory counts, and `operands` are what it
reads and writes.
"""
function emit_call!(p::Instructions, @nospecialize(run), bytes::Int, operands::Vector{Memory})
    for m in operands
        m.address.slot == 0 || keep!(p, Slot(m.address.slot, false, 0, 0))
    end
    called = Called(run)
    address = pointer_from_objref(called)
    push!(p.roots, Memory(called, address, UInt8, Int[bytes], Int[1]))
    return emit!(p, Float64, :call, (NOWHERE, NOWHERE, NOWHERE, NOWHERE), address, ONCE, (NONE, NONE, NONE, NONE))
end

"""A function of arrays, on copies of an op's operands; the results are copied to where they belong."""
struct ArrayCall
    f::Any
    copy_in::Instructions
    copy_out::Instructions
    arrays::Vector{Any}
end

function (c::ArrayCall)()
    execute!(c.copy_in)
    c.f(c.arrays...)
    execute!(c.copy_out)
    return nothing
end

poison!(c::ArrayCall, byte::Integer) = foreach(a -> fill_bytes!(a, byte), c.arrays)

"""Append a call of `f(outs..., inputs...)`, a function of arrays that writes the first ones and nothing else."""
function emit_arrays!(p::Instructions, @nospecialize(f), outs::Vector{Memory}, inputs::Vector{Memory})
    copies = Memory[new_memory(m.eltype, m.dims) for m in [outs; inputs]]
    copy_in, copy_out = Instructions(), Instructions()
    n = length(outs)
    foreach((out, copied) -> emit_copy!(copy_out, out, copied), outs, copies[1:n])
    foreach((copied, m) -> emit_copy!(copy_in, copied, m), copies[n+1:end], inputs)
    bytes = sum(Int[sizeof(m.eltype) * length(m) for m in copies])
    return emit_call!(p, ArrayCall(f, copy_in, copy_out, Any[m.root for m in copies]), bytes, [inputs; outs])
end
