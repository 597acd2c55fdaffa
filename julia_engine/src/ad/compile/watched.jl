# What a traced function captures: Julia code may read numbers of it, which the graph then has as constants.

"""
    Watched

An array or another object that can change and that a function captures, as it was when the function was traced: the checksum of
an array of numbers, else what it holds, to be compared by identity.
"""
struct Watched
    object::Any
    checksum::UInt64
    parts::Vector{Any}
end

is_unchanged(w::Watched) = holds_numbers(w.object) ? checksum(w.object)::UInt64 == w.checksum : same_parts(w.object, w.parts)
holds_numbers(@nospecialize(x)) = x isa Versions.CONTAINERS ? isbitstype(eltype(x)) : x isa BitArray

"""Stands for a field or an item that has no value yet."""
struct Undefined end

count_parts(@nospecialize(x)) = x isa Versions.CONTAINERS ? length(x) : nfields(x)
# Each by its type when it runs, so that nothing here is compiled anew beside packages with more methods.
has_part(@nospecialize(x), i::Int) = x isa Versions.CONTAINERS ? apart(isassigned, x, i)::Bool : isdefined(x, i)
part_of(@nospecialize(x), i::Int) =
    !has_part(x, i) ? Undefined() : x isa Versions.CONTAINERS ? apart(getindex, x, i) : getfield(x, i)

function same_parts(@nospecialize(x), parts::Vector{Any})
    count_parts(x) == length(parts) || return false
    for i in eachindex(parts)
        part_of(x, i) === parts[i] || return false
    end
    return true
end

"""
What of an object is followed without being compared itself, where that is not all of it: an engine's object keeps much that is
none of a function's own, or is read at every replay.
"""
watched_parts(@nospecialize(x)) = nothing
watched_parts(x::Tensor) = x.data === nothing ? () : ((x.data::Memory).root,)
watched_parts(::Union{Operator,Type,Module,Symbol,AbstractString,Task,IO,Method,Core.SimpleVector,Base.AbstractLock}) = ()
watched_parts(::Generator) = ()  # every replay draws from it, and so changes it

"""All that can change and is reached from what a function captures, as it is now."""
function watch(@nospecialize(f))
    found, seen, waiting = Watched[], IdDict{Any,Nothing}(), Any[f]
    while !isempty(waiting)
        x = pop!(waiting)
        (isbits(x) || haskey(seen, x)) && continue
        seen[x] = nothing
        if holds_numbers(x)
            push!(found, Watched(x, checksum(x)::UInt64, Any[]))
            continue
        end
        parts = watched_parts(x)
        if parts === nothing
            parts = Any[part_of(x, i) for i in 1:count_parts(x)]
            x isa Versions.CONTAINERS || ismutable(x) ? push!(found, Watched(x, UInt64(0), parts)) : nothing
        end
        append!(waiting, parts)
    end
    return found
end
