# Fused regions of elementwise ops: where an op after the other would write large arrays that the next one reads again, all ops
# of the region are done for the first few elements, then for the next, and what lies in between stays in the processor's cache.
#
# A fused region is a part of the tape whose values are of one size; what does not depend on it is computed before, and what
# depends on it, such as a sum in its middle whose result the region does not need, after. Only what others need is stored
# whole. The instructions are those of any other tape, on tiles; between two tiles the few addresses that name whole
# arrays move on.

const TILED_FROM = 1 << 20  # bytes of all arrays of a region: less stays in the cache anyway
const TILE_BYTES = 1 << 20  # of what a region keeps from op to op
const TILE_LEAST, TILE_MOST = 256, 1024  # elements

"""
    FusedRegion

Elementwise ops that are done tile by tile.

- `equations`: the ops in order, on arrays of `n` elements.
- `tile`: the elements of a tile.
- `inside`: the values that nobody else needs, of which there is a tile only.
- `from_outside`: the tensors that the ops read and that are not of the region.
"""
struct FusedRegion
    equations::Vector{Equation}
    n::Int
    tile::Int
    inside::Set{Tensor}
    from_outside::Vector{Tensor}
end

"""The fused region of every variable that one computes."""
const Regions = TensorDict{FusedRegion}

"""
    tiled(program, layout)

Find the fused regions of a program, and put their ops side by side; return the program and its regions. `layout` says how
values lie.
"""
function tiled(program::Program, layout::TensorDict{Memory})
    regions, outputs = Regions(), TensorSet(program.outputs)
    suits = Bool[can_be_tiled(e, layout) for e in program.equations]
    count(suits) > 1 || return program, regions
    readers = readers_of(program)
    equations = Equation[]
    all_, before, region, after = Equation[], Equation[], Equation[], Equation[]
    in_region, in_after = Set{Tensor}(), Set{Tensor}()
    function close!()
        found = worthwhile(region, in_region, readers, outputs)
        if found === nothing
            append!(equations, all_)
        else
            foreach(part -> append!(equations, part), (before, region, after))
            foreach(e -> regions[output(e)] = found, region)
        end
        foreach(empty!, (all_, before, region, after, in_region, in_after))
    end
    for (e, fits) in zip(program.equations, suits)
        e.op.random && close!()  # whose draws keep their order
        waits = any(a -> a in in_after, e.inputs)
        if fits && !isempty(region)
            first = output(region[1])
            (waits || output(e).dims != first.dims || output(e).eltype !== first.eltype) && close!()
        end
        push!(all_, e)
        if fits
            push!(region, e)
            push!(in_region, output(e))
        elseif waits || any(a -> a in in_region, e.inputs)
            push!(after, e)
            union!(in_after, e.outputs)
        else
            push!(before, e)
        end
    end
    close!()
    return Program(program.inputs, equations, program.outputs), regions
end

can_be_tiled(e::Equation, layout::TensorDict{Memory}) = e.op.elementwise && length(output(e)) > TILE_LEAST &&
    all(a -> a.eltype === output(e).eltype && tile_stride(get(() -> shape_of(a), layout, a), output(e).dims) !== nothing, e.inputs)

"""How far apart the elements of an operand lie, taken in the order of a dense array of size `dims`, if there is one answer."""
function tile_stride(m::Memory, dims::Vector{Int})
    m.dims == dims && is_dense(m) && return 1  # as below, without its lists
    n, s = coalesced(dims, Vector{Int}[dense_strides(dims), spread_strides(m, dims)])
    return length(n) == 1 ? s[2][1] : nothing
end

"""The equations that read each tensor."""
function readers_of(program::Program)
    readers = Dict{Tensor,Vector{Equation}}()
    for e in program.equations, a in e.inputs
        push!(get!(() -> Equation[], readers, a), e)
    end
    return readers
end

"""The region of these equations, or `nothing` where it would save no memory traffic."""
function worthwhile(equations::Vector{Equation}, own::Set{Tensor}, readers::Dict{Tensor,Vector{Equation}}, outputs::TensorSet)
    length(equations) > 1 || return nothing
    results = Tensor[output(e) for e in equations]
    inside = Set{Tensor}(x for x in results
        if !(x in outputs) && all(e -> e.outputs[1] in own, get(() -> Equation[], readers, x)))
    isempty(inside) && return nothing
    from_outside = unique(Tensor[a for e in equations for a in e.inputs if !(a in own)])
    last = Dict{Tensor,Int}(a => i for (i, e) in enumerate(equations) for a in e.inputs)
    alive = most = 0
    for (i, e) in enumerate(equations)
        alive += output(e) in inside
        most = max(most, alive)
        alive -= count(a -> a in inside && last[a] == i, unique(e.inputs))
    end
    n, bytes = length(results[1]), sizeof(results[1].eltype)
    arrays = most + length(results) - length(inside) + count(a -> length(a) == n, from_outside)
    n * bytes * arrays >= TILED_FROM || return nothing
    tile = clamp(TILE_BYTES ÷ (bytes * most) ÷ 16 * 16, TILE_LEAST, TILE_MOST)  # whole vectors
    return n > tile ? FusedRegion(copy(equations), n, tile, inside, from_outside) : nothing
end

"""An operand of one of a region's ops as the op sees it, a tile or a number, and how many bytes further the next tile's lies."""
function tile_of(m::Memory, operand::Tensor, x::Tensor, region::FusedRegion)
    operand in region.inside && return m, 0
    stride = tile_stride(m, x.dims)::Int
    dims, strides = stride == 0 ? (Int[], Int[]) : (Int[region.tile], Int[stride])
    return Memory(m.root, m.address, m.eltype, dims, strides), stride * region.tile * sizeof(m.eltype)
end

"""Append the instruction of one op, on the first tile."""
function emit_tile!(p::Instructions, e::Equation, out::Memory, read::Vector{Memory}, region::FusedRegion)
    x = output(e)
    seen = [tile_of(m, a, x, region) for (m, a) in zip(Memory[out; read], Tensor[x; e.inputs])]
    e.op.forward!(p, seen[1][1], Memory[m for (m, _) in seen[2:end]], e.attrs)
    for (k, (m, bytes)) in enumerate(seen)
        bytes == 0 || push!(p.moves, (x.eltype === Float32 ? length(p.f32) : length(p.f64), k, bytes))
    end
    return nothing
end

"""
Describe a region's value to the planner. Every tile is read and written in turn, so that what the region reads is needed up to
its last op, and what it stores is there from its first.
"""
function described_in(region::FusedRegion, e::Equation, number::TensorDict{Int}, reads::Vector{Int}, is_output::Bool)
    x = output(e)
    bytes = sizeof(x.eltype)
    x === output(region.equations[end]) && (reads = Int[reads; Int[number[a] for a in region.from_outside]])
    x in region.inside ||
        return Value(bytes * region.n; reads=reads, since=number[output(region.equations[1])], fixed=is_output)
    overwrites = Int[number[e.inputs[i]] for i in e.op.overwrites if i <= length(e.inputs) && e.inputs[i] in region.inside]
    return Value(bytes * region.tile; reads=reads, may_overwrite=overwrites)
end
