# Elementwise runs in tiles: where an op after the other would write large arrays that the next one reads again, all ops of
# the run are done for the first few elements, then for the next, and what lies in between stays in the processor's cache.
#
# A run is a stretch of the tape whose values are of one size; what does not depend on it is computed before, and what
# depends on it, such as a sum in its middle whose result the run does not need, after. Only what others need is stored
# whole. The instructions are those of any other tape, on tiles; between two tiles the few addresses that name whole
# arrays move on.

const TILED_FROM = 1 << 20  # bytes of all arrays of a run: less stays in the cache anyway
const TILE_BYTES = 1 << 20  # of what a run keeps from op to op
const TILE_LEAST, TILE_MOST = 256, 1024  # elements

"""
    Run

Elementwise ops that are done tile by tile.

- `nodes`: the ops in order, on arrays of `n` elements.
- `tile`: the elements of a tile.
- `inside`: the values that nobody else needs, of which there is a tile only.
- `from_outside`: the tensors that the ops read and that are not of the run.
"""
struct Run
    nodes::Vector{Tensor}
    n::Int
    tile::Int
    inside::Set{Tensor}
    from_outside::Vector{Tensor}
end

"""
    tiled!(graph, layout, outputs)

Find the runs of a graph and put their ops side by side, in place; return the run of every node that is of one. `layout`
says how values lie, `outputs` which are results.
"""
function tiled!(graph::Graph, layout::Dict{Tensor,Memory}, outputs::Set{Tensor})
    runs = Dict{Tensor,Run}()
    suits = Set{Tensor}(x for x in graph.nodes if can_be_tiled(x, layout))
    length(suits) > 1 || return runs
    users = users_of(graph)
    nodes = Tensor[]
    all_, before, run, after = Tensor[], Tensor[], Tensor[], Tensor[]
    in_run, in_after = Set{Tensor}(), Set{Tensor}()
    function close!()
        found = worthwhile(run, in_run, users, outputs)
        if found === nothing
            append!(nodes, all_)
        else
            foreach(part -> append!(nodes, part), (before, run, after))
            foreach(x -> runs[x] = found, run)
            run = Tensor[]
        end
        foreach(empty!, (all_, before, run, after, in_run, in_after))
    end
    for x in graph.nodes
        (x.op::Op).random && close!()  # whose draws keep their order
        waits = any(a -> a in in_after, x.inputs)
        fits = x in suits
        fits && !isempty(run) && (waits || x.dims != run[1].dims || x.eltype !== run[1].eltype) && close!()
        push!(all_, x)
        if fits
            push!(run, x)
            push!(in_run, x)
        elseif waits || any(a -> a in in_run, x.inputs)
            push!(after, x)
            push!(in_after, x)
        else
            push!(before, x)
        end
    end
    close!()
    graph.nodes = nodes
    return runs
end

can_be_tiled(x::Tensor, layout::Dict{Tensor,Memory}) = (x.op::Op).elementwise && length(x) > TILE_LEAST &&
    all(a -> a.eltype === x.eltype && tile_stride(get(() -> shape_of(a), layout, a), x.dims) !== nothing, x.inputs)

"""How far apart the elements of an operand lie, taken in the order of a dense array of size `dims`, if there is one answer."""
function tile_stride(m::Memory, dims::Vector{Int})
    n, s = coalesced(dims, Vector{Int}[dense_strides(dims), spread_strides(m, dims)])
    return length(n) == 1 ? s[2][1] : nothing
end

"""The nodes that read each tensor."""
function users_of(graph::Graph)
    users = Dict{Tensor,Vector{Tensor}}()
    for x in graph.nodes, a in x.inputs
        push!(get!(() -> Tensor[], users, a), x)
    end
    return users
end

"""The run of these nodes, or `nothing` where it would save no memory traffic."""
function worthwhile(nodes::Vector{Tensor}, own::Set{Tensor}, users::Dict{Tensor,Vector{Tensor}}, outputs::Set{Tensor})
    length(nodes) > 1 || return nothing
    inside = Set{Tensor}(x for x in nodes if !(x in outputs) && all(y -> y in own, get(users, x, NO_INPUTS)))
    isempty(inside) && return nothing
    from_outside = unique(Tensor[a for x in nodes for a in x.inputs if !(a in own)])
    last = Dict{Tensor,Int}(a => i for (i, x) in enumerate(nodes) for a in x.inputs)
    alive = most = 0
    for (i, x) in enumerate(nodes)
        alive += x in inside
        most = max(most, alive)
        alive -= count(a -> a in inside && last[a] == i, unique(x.inputs))
    end
    n, bytes = length(nodes[1]), sizeof(nodes[1].eltype)
    arrays = most + length(nodes) - length(inside) + count(a -> length(a) == n, from_outside)
    n * bytes * arrays >= TILED_FROM || return nothing
    tile = clamp(TILE_BYTES ÷ (bytes * most) ÷ 16 * 16, TILE_LEAST, TILE_MOST)  # whole vectors
    return n > tile ? Run(copy(nodes), n, tile, inside, from_outside) : nothing
end

"""An operand of one of a run's ops as the op sees it, a tile or a number, and how many bytes further the next tile's lies."""
function tile_of(m::Memory, operand::Tensor, x::Tensor, run::Run)
    operand in run.inside && return m, 0
    stride = tile_stride(m, x.dims)::Int
    dims, strides = stride == 0 ? (Int[], Int[]) : (Int[run.tile], Int[stride])
    return Memory(m.root, m.address, m.eltype, dims, strides), stride * run.tile * sizeof(m.eltype)
end

"""Append the instruction of one op, on the first tile."""
function emit_tile!(p::Program, x::Tensor, out::Memory, read::Vector{Memory}, run::Run)
    seen = [tile_of(m, a, x, run) for (m, a) in zip(Memory[out; read], Tensor[x; x.inputs])]
    (x.op::Op).forward!(p, seen[1][1], Memory[m for (m, _) in seen[2:end]], x.attrs)
    for (k, (m, bytes)) in enumerate(seen)
        bytes == 0 || push!(p.moves, (x.eltype === Float32 ? length(p.f32) : length(p.f64), k, bytes))
    end
    return nothing
end

"""
Describe a run's value to the planner. Every tile is read and written in turn, so that what the run reads is needed up to
its last op, and what it stores is there from its first.
"""
function described_in(run::Run, x::Tensor, number::Dict{Tensor,Int}, reads::Vector{Int}, output::Bool)
    bytes = sizeof(x.eltype)
    x === run.nodes[end] && (reads = Int[reads; Int[number[a] for a in run.from_outside]])
    x in run.inside || return Value(bytes * run.n; reads=reads, since=number[run.nodes[1]], fixed=output)
    overwrites = Int[number[x.inputs[i]] for i in (x.op::Op).overwrites if i <= length(x.inputs) && x.inputs[i] in run.inside]
    return Value(bytes * run.tile; reads=reads, may_overwrite=overwrites)
end
