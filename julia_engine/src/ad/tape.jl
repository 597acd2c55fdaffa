# The tape: a graph compiled into a flat list of instructions, each bound to its memory.
#
# Contract. `run!` reads the input buffers and the captured tensors, and writes the output buffers and the tape's own
# scratch memory, nothing else; it may destroy any scratch. Outputs are overwritten by the next run. Captured tensors
# (parameters) are used in place, so changes made to them between runs are seen. A tape belongs to one thread at a time.

"""One op of the tape: the node it computes, from and into which memories, and where its instructions stand."""
struct Step
    node::Tensor
    memories::Vector{Memory}
    out::Memory
    place::Int  # its byte in the arena, or -1: memory of its own
    singles::UnitRange{Int}
    doubles::UnitRange{Int}
end

"""
    Tape(graph; results=Dict(), techniques=Techniques())

A compiled graph, which belongs to the tape from then on. `results` gives memory to compute outputs into, by position
(gradients into a parameter vector, `reshape(view(vector, range), dims)`); the others get memory of their own. The tape
keeps alive what it is given; what stands behind an array of `unsafe_wrap` is the caller's to keep alive.

- `inputs`: the arrays to fill before [`run!`](@ref).
- `outputs`: the arrays that `run!` fills.
- `steps`: what `run!` does, in order.
- `plan`: where each value lies.
"""
mutable struct Tape
    graph::Graph
    techniques::Techniques
    inputs::Vector{Any}
    outputs::Vector{Any}
    program::Program
    boxed::Vector{Any}
    steps::Vector{Step}
    plan::Plan
    arena::Memory
    known::Vector{Tensor}
    memories::Vector{Union{Nothing,Memory}}
    destinations::Vector{Memory}
    runs::Dict{Tensor,Run}
    resizable::Vector{Tensor}  # captured vectors of the user's, or views of such
    converted::Vector{Converted}  # captured arrays that were converted when the graph was traced
    watched::Vector{Watched}  # what else the function captures, and may have read numbers of while it was traced
    replaying::Bool
end

function Tape(graph::Graph; results=Dict{Int,Any}(), techniques::Techniques=Techniques())
    techniques.simplify && simplify!(graph)
    techniques.fuse && fuse!(graph)
    forget!(graph)
    isolate_outputs!(graph)
    techniques.views || copy_views!(graph)
    layout = straighten!(graph)
    outputs = Set{Tensor}(graph.outputs)
    tiles = techniques.fuse && techniques.concrete && techniques.preallocate
    runs = tiles ? tiled!(graph, layout, outputs) : Dict{Tensor,Run}()
    leaves = captured(graph)
    known = Tensor[graph.inputs; leaves; graph.nodes]
    number = Dict{Tensor,Int}(x => i for (i, x) in enumerate(known))
    whole = needed_whole(graph, runs)
    arranged = plan(Value[described(x, number, outputs, whole, runs, techniques) for x in known];
        in_place=techniques.in_place, reuse=techniques.reuse_memory)
    memories = Vector{Union{Nothing,Memory}}(nothing, length(known))
    inputs = Any[unfilled(new_array(x.eltype, x.dims)) for x in graph.inputs]
    for (i, x) in enumerate(inputs)
        memories[i] = Memory(x)
    end
    for x in leaves
        memories[number[x]] = x.data::Memory
    end
    destinations = Memory[result_memory(get(results, k, nothing), x, leaves) for (k, x) in enumerate(graph.outputs)]
    for (x, m) in zip(graph.outputs, destinations)
        memories[number[x]] = m
    end
    tape = Tape(graph, techniques, inputs, Any[m.root for m in destinations], Program(), Any[], Step[], arranged,
        arena_memory(arranged.size), known, memories, destinations, runs,
        filter(x -> is_resizable(x.data::Memory), leaves), conversions(leaves, graph), Watched[], false)
    now = state()
    outer = now.scope
    try
        foreach(x -> bind!(tape, x, number), graph.nodes)
    finally
        now.scope = outer
    end
    techniques.concrete || append!(tape.boxed, boxed(tape.program))
    return tape
end

# Labels and indices count from 1: a fresh tape can be run.
unfilled(@nospecialize(x::Array)) = eltype(x) === Int64 ? ones!(x) : zeroed!(x)
ones!(x::Array{Int64}) = (GC.@preserve x fill_ones!(pointer(x), length(x)); x)

function arena_memory(size::Int)
    bytes = Vector{UInt8}(undef, size + ALIGNMENT)
    zeroed!(bytes)
    address = Ptr{Cvoid}(pointer(bytes))
    shift = mod(-Int(UInt(address)), ALIGNMENT)
    return Memory(bytes, address + shift, UInt8, Int[size], Int[1])
end

function result_memory(@nospecialize(given), x::Tensor, captured::Vector{Tensor})
    given === nothing && return Memory(zeroed!(new_array(x.eltype, x.dims)))
    m = Memory(given)
    m.eltype === x.eltype && m.dims == x.dims && is_dense(m) || throw(ReplayError("result memory: expected size " *
        "$(size(x)) of $(x.eltype), got $(Tuple(m.dims)) of $(m.eltype)" * (is_dense(m) ? "" : " with gaps")))
    for a in captured
        share_bytes(extent(m), extent(a.data::Memory)) && throw(ReplayError("result memory of size $(size(x)) is also " *
            "that of $(isempty(a.name) ? "a captured tensor" : a.name), which would change while the function still reads it"))
    end
    return m
end

"""The addresses of a memory's first byte and of the one behind its last."""
function extent(m::Memory)
    first = UInt(m.address)
    length(m) == 0 && return first, first
    return first, first + sizeof(m.eltype) * (1 + sum((m.dims .- 1) .* m.strides))
end
extent(x::Array) = (UInt(pointer(x)), UInt(pointer(x)) + sizeof(x))
share_bytes((a, a_end), (b, b_end)) = a < b_end && b < a_end

# Running --------------------------------------------------------------------------------------------------------------

"""
    run!(tape)

Compute the outputs from the inputs. Allocates nothing.
"""
function run!(tape::Tape)
    GC.@preserve tape begin
        if !tape.techniques.preallocate
            run_allocating!(tape)
        elseif tape.techniques.concrete
            execute!(tape.program)
        else
            for instruction in tape.boxed
                execute!(instruction)
            end
        end
    end
    return nothing
end

"""Throw if the tape is being replayed already, which would write over what it was given, or if what it captured is gone."""
function check_ready(tape::Tape)
    for x in tape.resizable
        is_there(x.data::Memory) || throw(ReplayError("a vector of $(x.eltype) that the function captures, of size " *
            "$(size(x)) when it was compiled, $RESIZED, or pass it as an argument"))
    end
    is_current(tape) || throw(ReplayError("an array that the function captures was changed since the function was traced, " *
        "where it was read or converted (truth values into positions or numbers, integers or a layout into others): the tape has " *
        "its old values; call the function that was compiled, which is traced anew, or pass the array as an argument"))
    tape.replaying && throw(ReplayError("a compiled function is called while it is running, by a custom rule that is part " *
        "of it or by another task, on arguments of the same sizes and element types; call the function that was compiled " *
        "there, not its tape"))
    return nothing
end

"""Whether what was converted, or may have been read, when the graph was traced holds what it held then."""
function is_current(tape::Tape)
    for c in tape.converted
        is_unchanged(c)::Bool || return false
    end
    for w in tape.watched
        is_unchanged(w) || return false
    end
    return true
end

boxed(p::Program) = Any[s.single ? p.f32[i] : p.f64[i] for s in p.stretches for i in s.first:s.last]

"""Compute every op into fresh memory, as an engine without buffers would."""
function run_allocating!(tape::Tape)
    values = Dict{Tensor,Memory}(x => Memory(a) for (x, a) in zip(tape.graph.inputs, tape.inputs))
    for x in tape.graph.nodes
        inputs = Memory[haskey(values, a) ? values[a] : a.data::Memory for a in x.inputs]
        values[x] = compute(x.op::Op, inputs, x.dims, x.eltype, x.attrs)
    end
    for (x, out) in zip(tape.graph.outputs, tape.destinations)
        copy_memory!(out, values[x])
    end
end

"""
    tape(arrays...)

Copy the arrays in, run, and return the output arrays themselves: the next run overwrites them. Throws a `ReplayError`
for another number of arrays, another size or another element type than planned, and while the tape is running.
"""
function (tape::Tape)(@nospecialize(arrays...))
    check_ready(tape)
    length(arrays) == length(tape.inputs) ||
        throw(ReplayError("expected $(length(tape.inputs)) arrays, got $(length(arrays))"))
    for (i, (buffer, array)) in enumerate(zip(tape.inputs, arrays))
        size(array) == size(buffer) && eltype(array) === eltype(buffer) || throw(ReplayError(
            "argument $i: this tape was planned for size $(size(buffer)) $(eltype(buffer)), got $(size(array)) " *
            "$(eltype(array))"))
        copyto!(buffer, array)
    end
    tape.replaying = true
    try
        run!(tape)
    finally
        tape.replaying = false
    end
    return tape.outputs
end

"""
    poison!(tape, byte)

Fill all memory that a run must not rely on with one byte; for tests.
"""
function poison!(tape::Tape, byte::Integer)
    fill!(tape.arena.root, byte % UInt8)
    for m in tape.program.roots
        m.root isa Vector{Int64} && continue  # a generator's state
        fill_bytes!(m.root, byte)
    end
    for out in tape.outputs
        out isa Array && fill_bytes!(out, byte)
    end
    return nothing
end

fill_bytes!(::Kernels.Place, byte) = nothing
fill_bytes!(x::Array, byte) = GC.@preserve x unsafe_fill!(Ptr{UInt8}(pointer(x)), byte % UInt8, sizeof(x))
unsafe_fill!(p::Ptr{UInt8}, byte::UInt8, n::Int) = (for i in 1:n
    unsafe_store!(p, byte, i)
end)

# Looking at it --------------------------------------------------------------------------------------------------------

"""
    nbytes(tape)

The bytes of the arena and of the ops' scratch memory; inputs, outputs and parameters not counted.
"""
nbytes(tape::Tape) = tape.plan.size + sum(Int[length(m) * sizeof(m.eltype) for m in tape.program.roots])

"""
    source(tape)

The tape as straight-line code, for reading.
"""
function source(tape::Tape)
    names = shown_names(tape)
    return join([line_of(step, names) for step in tape.steps], "\n")
end

function line_of(step::Step, names::Dict{Tensor,String})
    x = step.node
    op = x.op::Op
    operands = String[names[a] for a in x.inputs]
    for (name, attr) in zip(op.attrs, x.attrs)
        push!(operands, "$name=$(attr isa Vector{Int} ? Tuple(attr) : attr)")
    end
    tiled = length(step.out) < length(x) ? "a tile of $(length(step.out)) in " : ""
    place = op.view !== nothing ? "view" :
        "$(x.eltype)$(size(x)) in $(tiled)$(step.place >= 0 ? "arena[$(step.place)]" : "result")"
    return "$(names[x]) = $(op.name)($(join(operands, ", ")))  # $place"
end

is_finite(m::Memory) = !(m.eltype in FLOATS) || all(isfinite, array(m))

"""
    diagnose(tape)

Run once more, op by op, and return a `NonFiniteError` that names the first op with a NaN or infinite result, or
`nothing` when every result is finite. Inputs and parameters must be those of the run in question.
"""
function diagnose(tape::Tape)
    isempty(tape.runs) || return diagnose(untiled(tape))
    for x in tape.known
        x.data === nothing || is_finite(x.data) ||
            return NonFiniteError("$(isempty(x.name) ? "a captured tensor" : x.name) holds NaN or Inf")
    end
    for (i, x) in enumerate(tape.inputs)
        eltype(x) in FLOATS && !all(isfinite, x) && return NonFiniteError("input $i (size $(size(x))) holds NaN or Inf")
    end
    p = tape.program
    for step in tape.steps
        GC.@preserve tape begin
            execute!(p.f32, first(step.singles), last(step.singles))
            execute!(p.f64, first(step.doubles), last(step.doubles))
        end
        if !is_finite(step.out)
            layer = isempty(step.node.scope) ? "" : " in layer \"$(step.node.scope)\""
            return NonFiniteError("op \"$(step.node.op.name)\"$layer was the first to give NaN or Inf (result of size " *
                                  "$(size(step.node)))")
        end
    end
    return nothing
end

"""The same tape with all values whole, and the same inputs."""
function untiled(tape::Tape)
    graph = Graph(tape.graph.inputs, copy(tape.graph.outputs), copy(tape.graph.nodes))
    whole = Tape(graph; techniques=Techniques(simplify=false, fuse=false))
    foreach(copyto!, whole.inputs, tape.inputs)
    return whole
end

# Building -------------------------------------------------------------------------------------------------------------

"""The memory of value `i`, made on first use."""
function memory_of!(tape::Tape, i::Int)
    known = tape.memories[i]
    known === nothing || return known
    x, layout = tape.known[i], tape.plan
    if haskey(layout.placed, i)
        whole = tape.known[layout.placed[i]]
        k = findfirst(part -> part === x, whole.inputs)
        m = view_slice(memory_of!(tape, layout.placed[i]), whole.attrs[2][k])
    else
        address = tape.arena.address + layout.offset[layout.storage[i]]
        run = get(tape.runs, x, nothing)
        dims = run !== nothing && x in run.inside ? Int[run.tile] : x.dims
        m = Memory(tape.arena.root, address, x.eltype, dims, dense_strides(dims))
    end
    tape.memories[i] = m
    return m
end

function bind!(tape::Tape, x::Tensor, number::Dict{Tensor,Int})
    op, i, p = x.op::Op, number[x], tape.program
    read = Memory[memory_of!(tape, number[a]) for a in x.inputs]
    singles, doubles = length(p.f32), length(p.f64)
    run = get(tape.runs, x, nothing)
    state().scope = x.scope  # for messages
    if op.view !== nothing
        out = op.view(read[1], x.attrs)
        out === nothing && error("the view op $(op.name) would need a copy")
        tape.memories[i] = out
    else
        out = memory_of!(tape, i)
        run === nothing ? op.forward!(p, out, read, x.attrs) : emit_tile!(p, x, out, read, run)
    end
    run !== nothing && x === run.nodes[end] && repeat_last!(p, x.eltype === Float32, length(run.nodes), run.tile, run.n)
    place = get(tape.plan.offset, tape.plan.storage[i], -1)
    push!(tape.steps, Step(x, read, out, place, singles+1:length(p.f32), doubles+1:length(p.f64)))
    return nothing
end

# Preparing the graph --------------------------------------------------------------------------------------------------

"""Give every output a value of its own, computed by an op that writes memory."""
function isolate_outputs!(graph::Graph)
    seen = Set{Tensor}()
    for (k, x) in enumerate(graph.outputs)
        if x.op === nothing || x.data !== nothing || (x.op::Op).view !== nothing || x in seen
            x = graph.outputs[k] = copy_node!(graph.nodes, x)
        end
        push!(seen, x)
    end
end

new_node(op::Op, inputs::Vector{Tensor}, dims::Vector{Int}, attrs::Vector{Any}) =
    Tensor(nothing, inputs[1].eltype, dims, op, inputs, attrs, false, nothing, "", inputs[1].scope, false)

function copy_node!(nodes::Vector{Tensor}, x::Tensor)
    node = new_node(COPY, Tensor[x], x.dims, NO_ATTRS)
    push!(nodes, node)
    return node
end

"""Put a copy behind every view (the technique `views` switched off)."""
function copy_views!(graph::Graph)
    copies = Dict{Tensor,Tensor}()
    nodes = Tensor[]
    for x in graph.nodes
        x.inputs = Tensor[get(copies, a, a) for a in x.inputs]
        push!(nodes, x)
        (x.op::Op).view === nothing || (copies[x] = copy_node!(nodes, x))
    end
    graph.nodes = nodes
    graph.outputs = Tensor[get(copies, x, x) for x in graph.outputs]
end

"""The memory that `x` will have, as far as its layout goes, without an address."""
shape_of(x::Tensor) = x.data === nothing ?
    Memory(nothing, NOWHERE, x.eltype, x.dims, dense_strides(x.dims)) : x.data::Memory

"""
Insert copies where an op needs another memory layout than its input has, and return how values lie. Elementwise ops take
every layout.
"""
function straighten!(graph::Graph)
    layout = Dict{Tensor,Memory}()
    straight = Dict{Tensor,Tensor}()
    nodes = Tensor[]
    function copied(a::Tensor)
        haskey(straight, a) && return straight[a]
        node = copy_node!(nodes, a)
        layout[node] = shape_of(node)
        return straight[a] = node
    end
    for x in graph.nodes
        op = x.op::Op
        for a in x.inputs
            haskey(layout, a) || (layout[a] = shape_of(a))
        end
        if op.view !== nothing
            seen = op.view(layout[x.inputs[1]], x.attrs)
            if seen === nothing
                x.inputs = Tensor[copied(x.inputs[1])]
                seen = op.view(layout[x.inputs[1]], x.attrs)
            end
            layout[x] = seen
        elseif op === MATMUL || op === MATMUL_ADD
            k = length(x.inputs)
            x.inputs[k-1] = suited(x.inputs[k-1], factor_layout(x.inputs[k-1], x.dims), layout, copied)
            x.inputs[k] = suited(x.inputs[k], suits_blas, layout, copied)
        elseif op.accepts !== nothing
            x.inputs = Tensor[suited(a, op.accepts, layout, copied) for a in x.inputs]
        end
        push!(nodes, x)
    end
    graph.nodes = nodes
    return layout
end

"""
Which layouts a product takes of its first factor. Tiles want its columns in one piece, and so a factor that lies by rows
(a transposed weight) is copied, once for all products that use it, if that is little work beside the product.
"""
function factor_layout(a::Tensor, dims::Vector{Int})
    tiled(a.dims[1], dims[2], a.dims[2], a.eltype) && dims[2] >= 32 || return suits_blas
    return (d, s) -> leading_dimension(d, s, false) > 0
end

suited(a::Tensor, accepts, layout, copied) =
    length(a) == 0 || accepts(layout[a].dims, layout[a].strides) ? a : copied(a)

"""The tensors with data that the ops use, in order of first use."""
function captured(graph::Graph)
    own = Set{Tensor}(graph.inputs)
    union!(own, graph.nodes)
    found, seen = Tensor[], Set{Tensor}()
    function check(x::Tensor)
        (x in own || x in seen) && return
        x.data === nothing && throw(TraceError(
            "a tensor was kept from an earlier trace, or made in another task: there it stood for values that exist only " *
            "while a function is replayed; return it from that function, or compute it in this one, in the task that compiles"))
        push!(seen, x)
        push!(found, x)
    end
    for node in graph.nodes
        foreach(check, node.inputs)
    end
    foreach(check, graph.outputs)
    return found
end

"""What was converted into captured tensors, those of the pieces of programs in the graph included."""
function conversions(leaves::Vector{Tensor}, graph::Graph)
    inner = Tensor[x for node in graph.nodes for x in captured_by(node.attrs)]
    return Converted[x.attrs[1] for x in [leaves; inner] if !isempty(x.attrs) && x.attrs[1] isa Converted]
end

"""The values that some op, or a run, can use, directly or through views, only without gaps."""
function needed_whole(graph::Graph, runs::Dict{Tensor,Run})
    needed = Set{Tensor}()
    for (x, run) in runs
        x === run.nodes[1] && union!(needed, run.from_outside)
    end
    for x in Iterators.reverse(graph.nodes)
        op = x.op::Op
        through = op.view !== nothing && x in needed
        if through || op === RESHAPE || (op.accepts !== nothing && op !== MATMUL)
            union!(needed, x.inputs)
        end
    end
    return needed
end

"""Describe a tensor to the planner."""
function described(x::Tensor, number::Dict{Tensor,Int}, outputs::Set{Tensor}, whole::Set{Tensor}, runs::Dict{Tensor,Run},
        techniques::Techniques)
    bytes = length(x) * sizeof(x.eltype)
    (x.op === nothing || x.data !== nothing) && return Value(bytes; fixed=true)
    op = x.op::Op
    reads = Int[number[a] for a in x.inputs]
    op.view === nothing || return Value(bytes; reads=reads, view_of=reads[1])
    run = get(runs, x, nothing)
    run === nothing || return described_in(run, x, number, reads, x in outputs)
    may_overwrite = Int[]
    for i in op.overwrites
        i <= length(x.inputs) || continue
        a = x.inputs[i]
        a.dims == x.dims && a.eltype === x.eltype && (a.op === nothing || a.op === RESHAPE || (a.op::Op).view === nothing) &&
            push!(may_overwrite, number[a])
    end
    parts = techniques.place_parts ? Int[number[a] for a in placeable(x, whole, runs)] : Int[]
    return Value(bytes; reads=reads, may_overwrite=may_overwrite, parts=parts, fixed=x in outputs)
end

"""
The inputs of an assembly that may be computed in their places: results of elementwise ops and of matrix products, where
the place is a matrix that BLAS can read, or lies in one piece.
"""
function placeable(x::Tensor, whole::Set{Tensor}, runs::Dict{Tensor,Run})
    parts = Tensor[]
    x.op === ASSEMBLE && covers(x.attrs[1], x.attrs[2]) || return parts
    seen = shape_of(x)
    counts = Dict{Tensor,Int}()
    for a in x.inputs
        counts[a] = get(counts, a, 0) + 1
    end
    for (a, index) in zip(x.inputs, x.attrs[2])
        a.op !== nothing && a.data === nothing && counts[a] == 1 && !(a in whole) || continue
        op = a.op::Op
        place = view_slice(seen, index)
        one_piece = is_dense(place)
        matrix = length(place.dims) == 2 && suits_blas(place.dims, place.strides) && !haskey(runs, a)
        fits = op === MATMUL || op === MATMUL_ADD ? matrix : op.elementwise && (one_piece || matrix)
        fits && push!(parts, a)
    end
    return parts
end

function shown_names(tape::Tape)
    names = Dict{Tensor,String}()
    for (i, x) in enumerate(tape.graph.inputs)
        names[x] = "x$i"
    end
    for (i, x) in enumerate(captured(tape.graph))
        names[x] = x.literal ? string(item(x)) : isempty(x.name) ? "c$i" : x.name
    end
    for (i, x) in enumerate(tape.graph.nodes)
        names[x] = "v$i"
    end
    return names
end
