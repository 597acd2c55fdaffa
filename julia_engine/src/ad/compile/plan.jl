# The memory plan: which values share memory, and where in one arena each lies.
#
# A pure function of what each value needs, so that it can be tested without computing anything. A storage is one piece
# of memory; views of a value, parts placed inside it, and results that overwrite it share its storage.

"""Bytes: a cache line, and the widest vector register."""
const ALIGNMENT = 64

"""
    Value(nbytes; reads, view_of, may_overwrite, parts, fixed, since)

What the planner knows of one value; values are numbered in the order they are computed.

- `nbytes`: the size in bytes.
- `reads`: the values its computation reads.
- `view_of`: the value whose memory it is a view of, or 0.
- `may_overwrite`: values it reads whose memory it may take over, if nobody needs them afterwards.
- `parts`: values that can be computed in their places inside this one.
- `fixed`: it has its own memory outside the arena: inputs, parameters, results.
- `since`: the step from which its memory is in use, where that is before its own; or 0.
"""
struct Value
    nbytes::Int
    reads::Vector{Int}
    view_of::Int
    may_overwrite::Vector{Int}
    parts::Vector{Int}
    fixed::Bool
    since::Int
end
Value(nbytes; reads=NO_VALUES, view_of=0, may_overwrite=NO_VALUES, parts=NO_VALUES, fixed=false, since=0) =
    Value(nbytes, reads, view_of, may_overwrite, parts, fixed, since)

const NO_VALUES = Int[]

"""
    Plan

Where every value lies.

- `storage`: for each value the number of the value that owns its memory.
- `offset`: for each owner inside the arena its first byte, from 0.
- `placed`: for each part computed in its place the value that contains it.
- `size`: the bytes of the arena.
- `lifetime`: for each owner inside the arena the first and last step at which its memory is in use.
"""
struct Plan
    storage::Vector{Int}
    offset::Dict{Int,Int}
    placed::Dict{Int,Int}
    size::Int
    lifetime::Dict{Int,Tuple{Int,Int}}
end

"""
    plan(values; in_place=true, reuse=true)

Plan the memory of `values`, which are in the order they are computed.

- `in_place`: whether results may overwrite values that nobody needs any more.
- `reuse`: whether storages that are never alive together may share bytes of the arena.
"""
function plan(values::Vector{Value}; in_place::Bool=true, reuse::Bool=true)
    placed = place_parts(values)
    last_read = last_reads(values, placed)
    storage = collect(1:length(values))
    last = zeros(Int, length(values))  # of each owner: the last step at which its memory is needed
    start = Int[value.since == 0 ? i : value.since for (i, value) in enumerate(values)]
    # A container's memory is in use from its first placed part on, so owners are found from the last value back.
    for i in length(values):-1:1
        if haskey(placed, i)
            storage[i] = storage[placed[i]]
            start[storage[i]] = min(start[storage[i]], start[i])
        end
    end
    for (i, value) in enumerate(values)
        if value.view_of != 0
            storage[i] = storage[value.view_of]
        elseif in_place && !haskey(placed, i)
            for x in value.may_overwrite
                if is_free(values, storage, placed, last, i, x)
                    storage[i] = storage[x]
                    break
                end
            end
        end
        last[storage[i]] = max(last[storage[i]], last_read[i])
    end
    owners = Int[i for i in eachindex(values) if storage[i] == i && !values[i].fixed]
    sort!(owners; by=i -> start[i])
    offset, size = pack(values, owners, start, last, reuse)
    lifetime = Dict{Int,Tuple{Int,Int}}(i => (start[i], last[i]) for i in owners)
    return Plan(storage, offset, placed, size, lifetime)
end

function place_parts(values::Vector{Value})
    placed = Dict{Int,Int}()
    for (i, value) in enumerate(values), part in value.parts
        haskey(placed, part) || values[part].fixed || values[part].view_of != 0 || (placed[part] = i)
    end
    return placed
end

"""For each value the last step that needs its memory, through views and containers as well."""
function last_reads(values::Vector{Value}, placed::Dict{Int,Int})
    last = collect(1:length(values))
    for i in length(values):-1:1
        value = values[i]
        for x in value.reads
            last[x] = max(last[x], i)
        end
        value.view_of == 0 || (last[value.view_of] = max(last[value.view_of], last[i]))
    end
    for i in length(values):-1:1  # a container comes after its parts, so it is final when they are met
        haskey(placed, i) && (last[i] = max(last[i], last[placed[i]]))
    end
    return last
end

"""Whether step `i` may write its result over the value `x`."""
function is_free(values::Vector{Value}, storage::Vector{Int}, placed::Dict{Int,Int}, last::Vector{Int}, i::Int, x::Int)
    owner = storage[x]
    return !values[i].fixed && !values[owner].fixed && !haskey(placed, x) && !haskey(placed, owner) &&
           values[owner].nbytes == values[i].nbytes && last[owner] <= i &&
           all(other -> other == x || storage[other] != owner, values[i].reads)
end

"""Give each storage the smallest gap it fits in when its life begins; gaps that meet are joined."""
function pack(values::Vector{Value}, owners::Vector{Int}, start::Vector{Int}, last::Vector{Int}, reuse::Bool)
    offset = Dict{Int,Int}()
    gaps = Tuple{Int,Int}[]  # (offset, size), by offset
    alive = Tuple{Int,Int}[]  # (last step, owner), the first to go at the end
    size = 0
    for owner in owners
        while reuse && !isempty(alive) && alive[end][1] < start[owner]
            gone = pop!(alive)[2]
            release!(gaps, offset[gone], aligned(values[gone].nbytes))
        end
        need = aligned(values[owner].nbytes)
        best = 0
        for k in eachindex(gaps)
            gaps[k][2] >= need && (best == 0 || gaps[k][2] < gaps[best][2]) && (best = k)
        end
        if best != 0
            at, n = gaps[best]
            n > need ? (gaps[best] = (at + need, n - need)) : deleteat!(gaps, best)
        elseif !isempty(gaps) && sum(gaps[end]) == size  # the last gap ends where the arena does: let it grow
            at, n = pop!(gaps)
            size = at + need
        else
            at = size
            size += need
        end
        offset[owner] = at
        entry = (last[owner], owner)
        insert!(alive, searchsortedfirst(alive, entry; rev=true), entry)
    end
    return offset, size
end

function release!(gaps::Vector{Tuple{Int,Int}}, at::Int, n::Int)
    n == 0 && return nothing
    k = searchsortedfirst(gaps, (at, n))
    if k <= length(gaps) && at + n == gaps[k][1]
        n += gaps[k][2]
        deleteat!(gaps, k)
    end
    if k > 1 && sum(gaps[k-1]) == at
        at, n = gaps[k-1][1], gaps[k-1][2] + n
        deleteat!(gaps, k - 1)
        k -= 1
    end
    insert!(gaps, k, (at, n))
    return nothing
end

aligned(nbytes::Int) = cld(nbytes, ALIGNMENT) * ALIGNMENT
