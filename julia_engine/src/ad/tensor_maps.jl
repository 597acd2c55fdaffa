"""
Dictionaries and sets of tensors, which are known by their identity, for passes over graphs.

A pass comes to tensors in the order in which they were made, or in the opposite one. Here neighbours in that order are neighbours
in memory, where Julia's own dictionaries scatter them, so that each look-up in a large one waits for memory.
"""
module TensorMaps

using ..AD: Tensor

export TensorDict, TensorSet

Base.Experimental.@optlevel 3  # the module around asks for quick compilation; this is what its passes do most

"""
    TensorDict{V}()

A dictionary of tensors with open addressing: a tensor is at the place of its number, modulo the number of places, or at the
first free one of a sequence from there. Nothing can be deleted. Its `values` are undefined where there is no key.
"""
mutable struct TensorDict{V}
    keys::Vector{Union{Nothing,Tensor}}
    values::Vector{V}
    count::Int
end
TensorDict{V}() where {V} = TensorDict{V}(places(8), Vector{V}(undef, 8), 0)

"""A dictionary of these pairs."""
function TensorDict{V}(pairs) where {V}
    map = TensorDict{V}()
    for (x, value) in pairs
        map[x] = value
    end
    return map
end

const TensorSet = TensorDict{Nothing}

"""A set of these tensors."""
TensorSet(tensors) = union!(TensorSet(), tensors)

places(n::Int) = Vector{Union{Nothing,Tensor}}(nothing, n)

"""Where `x` is; or, with a minus sign, the free place where it would be put."""
@noinline function place(keys::Vector{Union{Nothing,Tensor}}, x::Tensor)
    last, rest = length(keys) - 1, Int(x.number)
    i = rest & last
    while true
        key = @inbounds keys[i+1]
        key === x && return i + 1
        key === nothing && return -(i + 1)
        rest >>= 5  # as in Python's dictionaries: all bits count, and in the end every place is tried
        i = (5 * i + rest + 1) & last
    end
end

Base.length(map::TensorDict) = map.count
Base.isempty(map::TensorDict) = map.count == 0
Base.haskey(map::TensorDict, x::Tensor) = map.count > 0 && place(map.keys, x) > 0
Base.in(x::Tensor, set::TensorSet) = haskey(set, x)

Base.get(map::TensorDict, x::Tensor, default) = get(() -> default, map, x)
function Base.get(f::Base.Callable, map::TensorDict, x::Tensor)
    map.count == 0 && return f()
    i = place(map.keys, x)
    return i > 0 ? (@inbounds map.values[i]) : f()
end

function Base.getindex(map::TensorDict, x::Tensor)
    i = place(map.keys, x)
    return i > 0 ? (@inbounds map.values[i]) : throw(KeyError(x))
end

Base.setindex!(map::TensorDict{V}, value, x::Tensor) where {V} = (put!(map, convert(V, value), x); map)

@noinline function put!(map::TensorDict{V}, value::V, x::Tensor) where {V}
    i = place(map.keys, x)
    if i < 0
        i = -i
        3 * map.count >= 2 * length(map.keys) && (grow!(map, 2 * length(map.keys)); i = -place(map.keys, x))
        @inbounds map.keys[i] = x
        map.count += 1
    end
    @inbounds map.values[i] = value
    return nothing
end

function grow!(map::TensorDict{V}, n::Int) where {V}
    keys, values = map.keys, map.values
    map.keys, map.values = places(n), Vector{V}(undef, n)
    for k in eachindex(keys)
        x = @inbounds keys[k]
        x === nothing && continue
        i = -place(map.keys, x)
        @inbounds map.keys[i] = x
        @inbounds map.values[i] = values[k]
    end
    return nothing
end

"""Make room for `n` tensors in all."""
function Base.sizehint!(map::TensorDict, n::Int)
    n = nextpow(2, max(3 * n ÷ 2 + 1, 8))
    n > length(map.keys) && grow!(map, n)
    return map
end

Base.get!(map::TensorDict{V}, x::Tensor, default) where {V} = get!(() -> default, map, x)
function Base.get!(f::Base.Callable, map::TensorDict{V}, x::Tensor) where {V}
    i = place(map.keys, x)
    i > 0 && return @inbounds map.values[i]
    value = convert(V, f())
    put!(map, value, x)
    return value
end

Base.push!(set::TensorSet, x::Tensor) = (put!(set, nothing, x); set)
function Base.union!(set::TensorSet, tensors)
    for x in tensors
        push!(set, x)
    end
    return set
end

function Base.empty!(map::TensorDict{V}) where {V}
    map.keys, map.values, map.count = places(8), Vector{V}(undef, 8), 0
    return map
end

"""The pairs of tensors and values, in no order."""
function Base.iterate(map::TensorDict, i::Int=1)
    while i <= length(map.keys)
        x = map.keys[i]
        x === nothing || return x => map.values[i], i + 1
        i += 1
    end
    return nothing
end
Base.values(map::TensorDict) = last.(collect(map))
Base.IteratorSize(::Type{<:TensorDict}) = Base.HasLength()
Base.eltype(::Type{TensorDict{V}}) where {V} = Pair{Tensor,V}

end
