# Nested containers of arrays: taken apart into their leaves, and put together again.
#
# A container is a tuple, a named tuple, a vector of anything but numbers, or a dictionary, nested to any depth; `nothing`
# is a container of nothing. All else (an array of numbers, a tensor, a number) is a leaf.

"""
    Structure

What a container is without its leaves; equal for containers of the same make. `kind` is `:leaf`, `:nothing`, `:tuple`,
`:named`, `:vector` or `:dict`; `keys` are the fields of a named tuple and the keys of a dictionary, in their order.
"""
struct Structure
    kind::Symbol
    keys::Vector{Any}
    children::Vector{Structure}
end
const LEAF = Structure(:leaf, Any[], Structure[])

Base.:(==)(a::Structure, b::Structure) = a.kind === b.kind && are_same_keys(a.keys, b.keys) && a.children == b.children
Base.hash(s::Structure, h::UInt) = hash(s.kind, hash(s.keys, hash(s.children, h)))

"""Whether keys are of the same types and equal: 1, 1.0 and true are equal to each other, and so are 0.0 and -0.0."""
are_same_keys(a, b) = length(a) == length(b) && all(((x, y),) -> is_same_key(x, y), zip(a, b))
is_same_key(@nospecialize(x), @nospecialize(y)) = typeof(x) === typeof(y) &&
    (x isa AbstractArray ? size(x) == size(y) && are_same_keys(x, y) : x isa Union{Tuple,Pair} ? are_same_keys(x, y) : isequal(x, y))

function Base.show(io::IO, s::Structure)
    n = length(s.children)
    s.kind === :leaf && return print(io, "an array")
    s.kind === :nothing && return print(io, "nothing")
    s.kind === :tuple && return print(io, "a tuple of $n")
    s.kind === :vector && return print(io, "a vector of $n")
    print(io, s.kind === :named ? "a named tuple of " : "a dictionary of ", join(map(repr, s.keys), ", "))
end

kind_of(@nospecialize(x::Any)) = :leaf
kind_of(::Nothing) = :nothing
kind_of(@nospecialize(x::Tuple)) = :tuple
kind_of(@nospecialize(x::NamedTuple)) = :named
kind_of(@nospecialize(x::AbstractDict)) = :dict
kind_of(@nospecialize(x::AbstractVector)) = eltype(x) <: Number || eltype(x) <: Union{AbstractString,AbstractChar} ? :leaf : :vector

"""
    flatten(x)

The leaves of a container, from left to right, and its [`Structure`](@ref).
"""
function flatten(@nospecialize(x))
    kind_of(x) === :leaf && return Any[x], LEAF
    leaves = Any[]
    return leaves, structure!(leaves, x)
end

function structure!(leaves::Vector{Any}, @nospecialize(x))
    kind = kind_of(x)
    kind === :leaf && (push!(leaves, x); return LEAF)
    keys_ = kind === :named || kind === :dict ? collect(Any, keys(x)) : Any[]
    children = Structure[structure!(leaves, item) for item in items(x, kind, keys_)]
    return Structure(kind, keys_, children)
end

items(@nospecialize(x), kind::Symbol, keys_::Vector{Any}) =
    kind === :nothing ? () : kind === :dict ? Any[x[key] for key in keys_] :
    kind === :vector ? collect(Any, x) : Any[getfield(x, i) for i in 1:nfields(x)]

"""
    unflatten(structure, leaves)

The container of this structure with these leaves.
"""
function unflatten(s::Structure, leaves)
    s.kind === :leaf && length(leaves) == 1 && return leaves[1]
    length(leaves) == leaf_count(s) ||
        throw(ShapeError("unflatten: $s has $(leaf_count(s)) leaves in all, got $(length(leaves))"))
    return filled(s, Iterators.Stateful(leaves))
end

function filled(s::Structure, leaves)
    s.kind === :leaf && return popfirst!(leaves)
    s.kind === :nothing && return nothing
    found = Any[filled(child, leaves) for child in s.children]
    s.kind === :tuple && return Tuple(found)
    s.kind === :named && return NamedTuple{Tuple(s.keys)}(Tuple(found))
    s.kind === :dict && return Dict(zip(map(identity, s.keys), found))
    return isempty(found) ? found : map(identity, found)  # of the narrowest type that holds them all
end

leaf_count(s::Structure) = s.kind === :leaf ? 1 : sum(Int[leaf_count(child) for child in s.children])

"""Where each leaf is, as Julia would index it: `["layers"][1].weight`; empty for a lone leaf."""
function paths(s::Structure)
    s.kind === :leaf && return String[""]
    return String[step * rest for (step, child) in zip(steps_of(s), s.children) for rest in paths(child)]
end

"""`[2].weight`, a place in a tuple of arguments, as `2.weight`."""
argument_name(place::AbstractString) = replace(place, r"^\[(\d+)\]" => s"\1")

function steps_of(s::Structure)
    s.kind === :named && return String[".$key" for key in s.keys]
    s.kind === :dict && return String["[$(repr(key))]" for key in s.keys]
    return String["[$i]" for i in 1:length(s.children)]
end

"""
    flatten_as(x, structure, name)

The leaves of a container that must have this structure, in its order. Throws a `ShapeError` that says where in `name` it
has another one.
"""
function flatten_as(@nospecialize(x), s::Structure, name::AbstractString)
    leaves = Any[]
    take_apart!(leaves, x, s, name)
    return leaves
end

function take_apart!(leaves::Vector{Any}, @nospecialize(x), s::Structure, name::AbstractString)
    s.kind === :leaf && (push!(leaves, x); return nothing)  # whatever it is: the caller knows what it may be made of
    kind = kind_of(x)
    same = kind === s.kind && (
        kind === :named ? Any[keys(x)...] == s.keys : kind === :dict ? Set{Any}(keys(x)) == Set{Any}(s.keys) :
        kind === :nothing || length(x) == length(s.children))
    if !same
        found = kind === :leaf ? "one leaf ($(typeof(x)))" : string(flatten(x)[2])
        throw(ShapeError("$name: expected $s, got $found"))
    end
    for (item, child, step) in zip(items(x, kind, s.keys), s.children, steps_of(s))
        take_apart!(leaves, item, child, name * step)
    end
    return nothing
end
