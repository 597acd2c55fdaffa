# Where the elements of arrays lie, and memory that gradients use again.

"""
    Address

Where an operand of an instruction lies. `slot` is the number of the tape's argument or result (after the arguments) that it
is an address in, which a replay may put into another place; 0 for memory that stays where it is.
"""
struct Address
    pointer::Ptr{Cvoid}
    slot::Int
end
Base.convert(::Type{Address}, p::Ptr) = Address(p, 0)
Base.:+(a::Address, bytes::Integer) = Address(a.pointer + bytes, a.slot)
Base.UInt(a::Address) = UInt(a.pointer)
Base.Int(a::Address) = Int(a.pointer)
(::Type{Ptr{T}})(a::Address) where {T} = Ptr{T}(a.pointer)

"""
    Memory

Where an array's elements lie: an address, dimensions and strides in elements. Views are memories, too: they share
`root`, the object that keeps the elements alive. Not a Julia array type, because the engine's own code then need not
be compiled anew for every element type and number of dimensions. Nobody changes one.
"""
mutable struct Memory
    root::Any
    address::Address
    eltype::DataType
    dims::Vector{Int}
    strides::Vector{Int}
end

Memory(m::Memory) = m
in_slot(m::Memory, slot::Int) = Memory(m.root, Address(m.address.pointer, slot), m.eltype, m.dims, m.strides)
Memory(x::StridedArray{T}) where {T} =
    Memory(x, start_of_elements(x), T, collect(Int, size(x)), collect(Int, strides(x)))
start_of_elements(x::Array) = start_of(x)
start_of_elements(x::StridedArray) = Ptr{Cvoid}(pointer(x))

"""Strides of an array without gaps, the first axis fastest."""
function dense_strides(dims::Vector{Int})
    strides = ones(Int, length(dims))
    for d in 2:length(dims)
        strides[d] = strides[d-1] * max(dims[d-1], 1)
    end
    return strides
end

function is_dense(dims::Vector{Int}, strides::Vector{Int})
    dense, step = true, 1
    for d in eachindex(dims)
        dense &= dims[d] == 1 || strides[d] == step
        step *= dims[d]
    end
    return dense || step == 0
end
is_dense(m::Memory) = is_dense(m.dims, m.strides)

Base.length(m::Memory) = prod(m.dims)

function new_array(@nospecialize(T::DataType), dims::Vector{Int})
    T === Float32 && return undefined(Float32, dims)
    T === Float64 && return undefined(Float64, dims)
    return undefined(Int64, dims)
end

# With the number of axes in the program the call is found when it is compiled.
function undefined(::Type{T}, dims::Vector{Int}) where {T}
    n = length(dims)
    n == 0 && return Array{T}(undef)
    n == 1 && return Array{T}(undef, dims[1])
    n == 2 && return Array{T}(undef, dims[1], dims[2])
    n == 3 && return Array{T}(undef, dims[1], dims[2], dims[3])
    n == 4 && return Array{T}(undef, dims[1], dims[2], dims[3], dims[4])
    return Array{T}(undef, dims...)
end

"""Memory for values to come; nobody changes its `dims`, which tensors share."""
new_memory(@nospecialize(T::DataType), dims::Vector{Int}) = memory_of(new_array(T, dims), T, dims)

function memory_of(@nospecialize(array), @nospecialize(T::DataType), dims::Vector{Int})
    strides = ones(Int, length(dims))
    for d in 2:length(dims)
        strides[d] = strides[d-1] * dims[d-1]
    end
    return Memory(array, start_of(array), T, dims, strides)
end

"""
Whether the elements still are where they were: a vector of the user's moves when it grows (`push!`, `append!`), and its
end goes when it shrinks.
"""
function is_there(m::Memory)
    owner = owner_of(m.root)
    owner isa Vector{Float64} && return lies_in(m, owner)
    owner isa Vector{Float32} && return lies_in(m, owner)
    owner isa Vector{Int64} && return lies_in(m, owner)
    owner isa Vector && return Base.invokelatest(lies_in, m, owner)::Bool  # reinterpreted: compiled where one occurs
    return true
end

is_resizable(m::Memory) = owner_of(m.root) isa Vector

"""The array that a view, or a view of a view, is of."""
function owner_of(@nospecialize(root))
    while root isa AbstractArray && !(root isa Array)
        behind = parent(root)
        behind === root && break
        root = behind
    end
    return root
end

function lies_in(m::Memory, owner::Vector)
    first, behind = extent(m)
    start = UInt(pointer(owner))
    return first == behind || (start <= first && behind <= start + sizeof(owner))
end

"""The addresses of a memory's first byte and of the one behind its last; twice the same without elements."""
function extent(m::Memory)
    low = high = 0  # of the elements, from the first
    for d in eachindex(m.dims)
        m.dims[d] == 0 && return UInt(m.address), UInt(m.address)
        reach = (m.dims[d] - 1) * m.strides[d]
        reach < 0 ? (low += reach) : (high += reach)
    end
    bytes = sizeof(m.eltype)
    return UInt(m.address) + bytes * low, UInt(m.address) + bytes * (high + 1)
end
extent(x::Array) = (UInt(start_of(x)), UInt(start_of(x)) + sizeof(x))
share_bytes((a, a_end), (b, b_end)) = a < b_end && b < a_end

const RESIZED = "was resized since (push!, append!, resize!), which may move it; give a copy, or resize a copy"

"""The elements as a Julia array: the array behind the memory where that is all of it, else a copy."""
function array(m::Memory)
    is_there(m) || throw(InPlaceError("the array of $(m.eltype) behind a tensor of size $(Tuple(m.dims)) $RESIZED"))
    root = m.root
    if root isa Array && eltype(root) === m.eltype && is_dense(m) && length(root) == length(m) &&
       start_of(root) == m.address.pointer
        return collect(Int, size(root)) == m.dims ? root : reshape(root, m.dims...)
    end
    copied = new_memory(m.eltype, m.dims)
    copy_memory!(copied, m)
    return copied.root
end

# Reuse ----------------------------------------------------------------------------------------------------------------

"""
    Reuse

Memory of one eager gradient. Its rules make large arrays for values that are read once: by the next step of the same rule,
or by the rule of the node before. Left to Julia's collector they would all be fetched from the system, page by page, at
several times the cost of the arithmetic; here the next rule gets them.

- `spare`: arrays that nobody needs any more, by element type and dimensions.
- `uses`: for each array that was handed out, how many of the gradients that still wait to be read lie in it.
- `fresh`: what was handed out since the last [`recycle!`](@ref).
"""
struct Reuse
    spare::Dict{Tuple{DataType,Vector{Int}},Vector{Any}}
    uses::IdDict{Any,Int}
    fresh::Vector{Any}
end
Reuse() = Reuse(Dict{Tuple{DataType,Vector{Int}},Vector{Any}}(), IdDict{Any,Int}(), Any[])

"""Bytes of the smallest array that is worth it."""
const LARGE = 1 << 14

new_memory(@nospecialize(T::DataType), dims::Vector{Int}, ::Nothing) = new_memory(T, dims)
function new_memory(@nospecialize(T::DataType), dims::Vector{Int}, reuse::Reuse)
    prod(dims) * sizeof(T) < LARGE && return new_memory(T, dims)
    spare = get(reuse.spare, (T, dims), nothing)
    array = spare === nothing || isempty(spare) ? new_array(T, dims) : pop!(spare)
    reuse.uses[array] = 0
    push!(reuse.fresh, array)
    return memory_of(array, T, dims)
end

"""One gradient more that lies in this memory waits to be read; or, with -1, one less."""
function waits!(reuse::Union{Nothing,Reuse}, m::Union{Nothing,Memory}, more::Int=1)
    (reuse === nothing || m === nothing || isempty(reuse.uses)) && return nothing
    count = get(reuse.uses, m.root, nothing)
    count === nothing || (reuse.uses[m.root] = count + more)  # else it is not from here
    return nothing
end

"""A node is done: take back its gradient's memory and all that was handed out meanwhile, where no gradient waits in it."""
function recycle!(reuse::Union{Nothing,Reuse}, g::Union{Nothing,Memory})
    (reuse === nothing || g === nothing || isempty(reuse.uses)) && return nothing
    for array in push!(reuse.fresh, g.root)
        get(reuse.uses, array, nothing) === 0 || continue
        delete!(reuse.uses, array)
        push!(get!(Vector{Any}, reuse.spare, (eltype(array), collect(Int, size(array)))), array)
    end
    empty!(reuse.fresh)
    return nothing
end

# The C library's memory -----------------------------------------------------------------------------------------------

"""Bytes that may stay with the process although nothing needs them."""
const KEPT = 256 << 20

"""Bytes: larger arrays go back to the system one by one; the C library allows no more."""
const LARGEST = 32 << 20

const TRIM_THRESHOLD, MMAP_THRESHOLD = Cint(-1), Cint(-3)  # of mallopt, in glibc's malloc.h

"""Whether [`keep_freed_memory`](@ref) was called."""
const ASKED = Ref(false)

"""
Tell glibc to keep freed memory: the values of the forward pass are freed all at once, and would go back to the system
only to be fetched again for the next gradient. Not so with another C library, or where the environment says what malloc
shall do. It is the whole process that this is set for, so the first eager gradient does it, not the module.
"""
function keep_freed_memory()
    ASKED[] && return nothing
    ASKED[] = true
    any(name -> startswith(name, "MALLOC_") || name == "GLIBC_TUNABLES", keys(ENV)) && return nothing
    set = of_glibc(:mallopt)
    set === nothing && return nothing
    ccall(set, Cint, (Cint, Cint), TRIM_THRESHOLD, KEPT)
    ccall(set, Cint, (Cint, Cint), MMAP_THRESHOLD, LARGEST)
    return nothing
end

"""Give memory that was freed back to the system: glibc keeps that of arrays of less than 32 MB, more or less of it."""
function return_freed_memory()
    trim = of_glibc(:malloc_trim)
    trim === nothing || ccall(trim, Cint, (Csize_t,), 0)
    return nothing
end

"""The address of a function of glibc; `nothing` with another C library."""
function of_glibc(name::Symbol)
    library = Sys.islinux() ? Libdl.dlopen("libc.so.6"; throw_error=false) : nothing
    return library === nothing ? nothing : Libdl.dlsym(library, name; throw_error=false)
end
