# The tape: a program compiled into a flat list of instructions, each bound to its memory.
#
# Contract. `run!` reads the input buffers and the captured tensors, and writes the output buffers and the tape's own
# scratch memory, nothing else; it may destroy any scratch. Outputs are overwritten by the next run. Captured tensors
# (parameters) are used in place, so changes made to them between runs are seen. A tape belongs to one thread at a time.

"""One op of the tape: what it computes, from and into which memories, and where its instructions are."""
struct TapeStep
    equation::Equation
    memories::Vector{Memory}
    outs::Vector{Memory}
    place::Int  # the first result's byte in the arena, or -1: its own memory
    singles::UnitRange{Int}
    doubles::UnitRange{Int}
end

"""
    Tape(program; results=Dict(), techniques=Techniques())

A compiled program. `results` gives memory to compute outputs into, by position
(gradients into a parameter vector, `reshape(view(vector, range), dims)`); the others get their own memory. The tape
keeps alive what it is given; the memory behind an array of `unsafe_wrap` is the caller's to keep alive.

- `program`: what it computes, as the passes have rewritten it.
- `inputs`: the arrays to fill before [`run!`](@ref).
- `outputs`: the arrays that `run!` fills.
- `steps`: what `run!` does, in order.
- `plan`: where each value lies.
- `code`: the instructions.
"""
mutable struct Tape
    program::Program
    techniques::Techniques
    inputs::Vector{Any}
    outputs::Vector{Any}
    code::Instructions
    boxed::Vector{Any}
    steps::Vector{TapeStep}
    plan::Plan
    arena::Memory
    known::Vector{Tensor}
    memories::Vector{Union{Nothing,Memory}}
    destinations::Vector{Memory}
    regions::Regions
    resizable::Vector{Tensor}  # captured vectors of the user's, or views of such
    converted::Vector{Converted}  # captured arrays that were converted when the program was traced
    watched::Vector{Watched}  # what else the function captures, and may have read numbers of while it was traced
    variables::Vector{Tensor}  # captured tensors that depend on a leaf that requires a gradient
    replaying::Threads.Atomic{Int}  # 1 while it runs
    winograd::Bool  # whether its convolutions may be computed by Winograd's algorithm
end

function Tape(traced::Program; results=Dict{Int,Any}(), techniques::Techniques=Techniques())
    program, regions = rewritten(traced, techniques)
    made = made_by(program)
    leaves = captured(program)
    known = Tensor[program.inputs; leaves; Tensor[x for e in program.equations for x in e.outputs]]
    number = TensorDict{Int}()
    sizehint!(number, length(known))
    for i in eachindex(known)
        number[known[i]] = i
    end
    refuse_foreign(program, number)
    values = Value[Value(bytes_of(x); fixed=true) for x in known[1:length(program.inputs)+length(leaves)]]
    sizehint!(values, length(known))
    whole = needed_whole(program, regions)
    outputs = TensorSet(program.outputs)
    foreach(e -> describe!(values, e, number, made, outputs, whole, regions, techniques), program.equations)
    arranged = plan(values; in_place=techniques.in_place, reuse=techniques.reuse_memory)
    memories = Vector{Union{Nothing,Memory}}(nothing, length(known))
    inputs = Any[unfilled(new_array(x.eltype, x.dims)) for x in program.inputs]
    for (i, x) in enumerate(inputs)
        memories[i] = in_slot(Memory(x), i)
    end
    for x in leaves
        memories[number[x]] = x.data::Memory
    end
    inside = captured_inside(program)  # by bodies of loops and branches
    destinations = Memory[result_memory(get(results, k, nothing), x, [leaves; inside]) for (k, x) in enumerate(program.outputs)]
    for (k, (x, m)) in enumerate(zip(program.outputs, destinations))
        memories[number[x]] = in_slot(m, length(inputs) + k)
    end
    tape = Tape(program, techniques, inputs, Any[m.root for m in destinations], Instructions(), Any[], TapeStep[], arranged,
        arena_memory(arranged.size), known, memories, destinations, regions,
        filter(x -> is_resizable(x.data::Memory), unique([leaves; inside])), conversions(leaves, program), Watched[], Tensor[],
        Threads.Atomic{Int}(0), state().winograd)
    now = state()
    make_room!(tape)
    @entering scope=now.scope techniques=techniques begin
        for e in program.equations
            now.scope = e.scope  # for messages
            bind!(tape, e, number, made)
        end
    end
    techniques.concrete || append!(tape.boxed, boxed(tape.code))
    return tape
end

"""The program that a tape runs, and its fused regions."""
function rewritten(program::Program, techniques::Techniques)
    techniques.simplify && (program = simplify(program))
    techniques.fuse && (program = fuse(program))
    program = with_outputs_apart(program)
    techniques.views || (program = with_copied_views(program))
    program, layout = legalised(program)
    regions = Regions()
    techniques.fuse && techniques.concrete && techniques.preallocate && ((program, regions) = tiled(program, layout))
    return program, regions
end

bytes_of(x::Union{Tensor,Memory}) = length(x) * sizeof(x.eltype)

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
            execute!(tape.code)
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
    tape.replaying[] == 0 || is_running()
    return nothing
end

@noinline is_running() = throw(ReplayError("a compiled function is called while it is running, by a custom rule that is part " *
    "of it or by another task, on arguments of the same sizes and element types; call the function that was compiled there, " *
    "not its tape, or compile it for each task"))

"""Take what one call at a time may use: 0 becomes 1, or an error says that another call has it."""
@inline claim!(running::Threads.Atomic{Int}) = Threads.atomic_cas!(running, 0, 1) == 0 || is_running()

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

boxed(p::Instructions) = Any[s.single ? p.f32[i] : p.f64[i] for s in p.segments for i in s.first:s.last]

"""Compute every op into fresh memory, as an engine without buffers would."""
run_allocating!(tape::Tape) = @entering winograd=tape.winograd compute_allocating!(tape)

function compute_allocating!(tape::Tape)
    values = TensorDict{Memory}(x => Memory(a) for (x, a) in zip(tape.program.inputs, tape.inputs))
    for e in tape.program.equations
        inputs = Memory[haskey(values, a) ? values[a] : a.data::Memory for a in e.inputs]
        if e.op.several
            found = compute_several(e.op, inputs, Kind[(x.dims, x.eltype) for x in e.outputs], e.attrs)
            foreach((x, m) -> values[x] = m, e.outputs, found)
        else
            x = output(e)
            values[x] = compute(e.op, inputs, x.dims, x.eltype, e.attrs)
        end
    end
    for (x, out) in zip(tape.program.outputs, tape.destinations)
        copy_memory!(out, values[x])
    end
end

"""
    tape(arrays...)

Copy the arrays in, run, and return the output arrays themselves: the next run overwrites them. Throws a `ReplayError`
for another number of arrays, another size or another element type than planned, and while the tape is running.
"""
(tape::Tape)(@nospecialize(arrays...)) = run_on!(identity, tape, collect(Any, arrays))

"""Run a tape on arrays, and return what `read` makes of its outputs before another task may run it."""
function run_on!(read, tape::Tape, arrays::Vector{Any})
    check_ready(tape)
    length(arrays) == length(tape.inputs) ||
        throw(ReplayError("expected $(length(tape.inputs)) arrays, got $(length(arrays))"))
    claim!(tape.replaying)
    try
        for (i, (buffer, array)) in enumerate(zip(tape.inputs, arrays))
            size(array) == size(buffer) && eltype(array) === eltype(buffer) || throw(ReplayError(
                "argument $i: this tape was planned for size $(size(buffer)) $(eltype(buffer)), got $(size(array)) " *
                "$(eltype(array))"))
            copyto!(buffer, array)
        end
        run!(tape)
        return read(tape.outputs)
    finally
        tape.replaying[] = 0
    end
end

"""
    poison!(tape, byte)

Fill all memory that a run must not rely on with one byte; for tests.
"""
function poison!(tape::Tape, byte::Integer)
    fill!(tape.arena.root, byte % UInt8)
    for m in tape.code.roots
        m.root isa Vector{Int64} && continue  # a generator's state
        fill_bytes!(m.root, byte)
    end
    for out in tape.outputs
        out isa Array && fill_bytes!(out, byte)
    end
    return nothing
end

fill_bytes!(::Kernels.Place, byte) = nothing
fill_bytes!(x::Array, byte) = GC.@preserve x unsafe_fill!(Ptr{UInt8}(start_of(x)), byte % UInt8, sizeof(x))
unsafe_fill!(p::Ptr{UInt8}, byte::UInt8, n::Int) = (for i in 1:n
    unsafe_store!(p, byte, i)
end)

# Looking at it --------------------------------------------------------------------------------------------------------

"""
    nbytes(tape)

The bytes of the arena and of the ops' scratch memory; inputs, outputs and parameters not counted.
"""
nbytes(tape::Tape) = tape.plan.size + sum(Int[length(m) * sizeof(m.eltype) for m in tape.code.roots])

"""
    source(tape)

The tape as straight-line code, for reading.
"""
function source(tape::Tape)
    names = shown_names(tape)
    return join([line_of(step, names) for step in tape.steps], "\n")
end

function line_of(step::TapeStep, names::TensorDict{String})
    e = step.equation
    operands = String[names[a] for a in e.inputs]
    for (name, attr) in pairs_of(e.attrs)
        push!(operands, "$name=$(attr isa Vector{Int} ? Tuple(attr) : attr)")
    end
    x, out = e.outputs[1], step.outs[1]
    tile = length(out) < length(x) ? "a tile of $(length(out)) in " : ""
    place = e.op.view !== nothing ? "view" :
        join(["$(y.eltype)$(size(y))" for y in e.outputs], ", ") *
        " in $(tile)$(step.place >= 0 ? "arena[$(step.place)]" : "result")"
    return "$(join([names[y] for y in e.outputs], ", ")) = $(e.op.name)($(join(operands, ", ")))  # $place"
end

is_finite(m::Memory) = !(m.eltype in FLOATS) || all(isfinite, array(m))

"""
A part of a tape that is timed by itself: one op, or all ops of a fused region, whose tiles the segment of this number does
one after the other (0: none).
"""
struct TimedPart
    steps::Vector{TapeStep}
    segment::Int
end

"""What a tape does, part by part; views do nothing."""
function timed_parts(tape::Tape)
    parts, done = TimedPart[], Set{FusedRegion}()
    for step in tape.steps
        step.equation.op.view === nothing || continue
        region = get(tape.regions, step.equation.outputs[1], nothing)
        if region === nothing
            push!(parts, TimedPart(TapeStep[step], 0))
        elseif !(region in done)
            push!(done, region)
            steps = TapeStep[s for s in tape.steps if get(tape.regions, s.equation.outputs[1], nothing) === region]
            push!(parts, TimedPart(steps, segment_of(tape, step)))
        end
    end
    return parts
end

"""The number of the segment that does the tiles of a fused region, given the region's first step."""
function segment_of(tape::Tape, step::TapeStep)
    single = step.outs[1].eltype === Float32
    first_one = first(single ? step.singles : step.doubles)
    return findfirst(s -> s.tile != 0 && s.single == single && s.first == first_one, tape.code.segments)::Int
end

"""Run a part of a tape."""
function run_part!(tape::Tape, part::TimedPart)
    p = tape.code
    part.segment == 0 || return Kernels.execute_segment!(p, part.segment)
    for step in part.steps
        execute!(p.f32, first(step.singles), last(step.singles))
        execute!(p.f64, first(step.doubles), last(step.doubles))
    end
    return nothing
end

"""
    costs(tape, parts=timed_parts(tape); repeats=3, run=run_part!)

Run a few times more, part by part, by `run(tape, part)`; return the least seconds of each part, and its multiplications and
additions, which are counted while its operands are still there.
"""
function costs(tape::Tape, parts::Vector{TimedPart}=timed_parts(tape); repeats::Int=3, run=run_part!)
    found = fill((Inf, 0), length(parts))
    GC.@preserve tape for repeat in 1:repeats, (k, part) in enumerate(parts)
        before = time_ns()
        run(tape, part)
        seconds = (time_ns() - before) / 1e9
        found[k] = (min(found[k][1], seconds), repeat < repeats ? 0 : operations(tape, part))
    end
    return found
end

"""The op of a part and its layer; of a fused region the different ones of its ops, the first three by name."""
function title(part::TimedPart)
    ops = unique(String[step.equation.op.name for step in part.steps])
    layers = unique(String[step.equation.scope for step in part.steps])
    length(ops) > 4 && (ops = String[ops[1:3]; "$(length(ops) - 3) more"])
    return join(ops, " + "), join(layers, " + ")
end

"""The multiplications and additions of a part, see `Kernels.operations`; those of a fused region are none of products."""
operations(tape::Tape, part::TimedPart) = part.segment != 0 ? 0 :
    sum(Int[Kernels.operations(x) for step in part.steps for (code, range) in
        ((tape.code.f32, step.singles), (tape.code.f64, step.doubles)) for x in code[range]])

"""
The bytes that a part has to read and write: each element of its operands and results once, of a table those rows that are
looked up, and of a fused region only what lies outside of its tiles.
"""
function bytes_moved(tape::Tape, part::TimedPart)
    found = Dict{Tuple{UInt,Vector{Int},Vector{Int}},Int}()
    for step in part.steps
        e = step.equation
        region = part.segment == 0 ? nothing : tape.regions[e.outputs[1]]
        for (x, m) in Iterators.flatten((zip(e.inputs, step.memories), zip(e.outputs, step.outs)))
            region !== nothing && x in region.inside && continue
            bytes = distinct_bytes(m)
            e.op in (EMBEDDING, GATHER) && x === e.inputs[1] && (bytes = min(bytes, distinct_bytes(step.outs[1])))
            found[UInt(m.address), m.dims, m.strides] = bytes
        end
    end
    return sum(values(found))
end

"""The bytes of a memory's elements, those that are seen several times counted once."""
function distinct_bytes(m::Memory)
    length(m) == 0 && return 0
    elements = prod(Int[s == 0 ? 1 : n for (n, s) in zip(m.dims, m.strides)])
    return sizeof(m.eltype) * min(elements, 1 + sum((m.dims .- 1) .* abs.(m.strides)))
end

"""The bytes of what a step reads and writes, as operands and results are shaped."""
bytes_moved(step::TapeStep) = sum(Int[length(m) * sizeof(m.eltype) for m in vcat(step.memories, step.outs)])

"""
    diagnose(tape)

Run once more, op by op, and return a `NonFiniteError` that names the first op with a NaN or infinite result, or
`nothing` when every result is finite. Inputs and parameters must be those of the run in question.
"""
function diagnose(tape::Tape)
    tape = untiled(tape)
    for x in tape.known
        x.data === nothing || is_finite(x.data) ||
            return NonFiniteError("$(isempty(x.name) ? "a captured tensor" : x.name) holds NaN or Inf")
    end
    for (i, x) in enumerate(tape.inputs)
        eltype(x) in FLOATS && !all(isfinite, x) && return NonFiniteError("input $i (size $(size(x))) holds NaN or Inf")
    end
    p = tape.code
    for step in tape.steps
        GC.@preserve tape begin
            execute!(p.f32, first(step.singles), last(step.singles))
            execute!(p.f64, first(step.doubles), last(step.doubles))
        end
        for (x, m) in zip(step.equation.outputs, step.outs)
            is_finite(m) || return NonFiniteError("op \"$(step.equation.op.name)\"$(in_layer(step.equation.scope)) was the first " *
                "to give NaN or Inf (result of size $(size(x)))")
        end
    end
    return nothing
end

"""The same tape with all values whole, and the same inputs; itself where they are."""
function untiled(tape::Tape)
    isempty(tape.regions) && return tape
    whole = @entering winograd=tape.winograd Tape(tape.program; techniques=Techniques(simplify=false, fuse=false))
    foreach(copyto!, whole.inputs, tape.inputs)
    return whole
end

# Building -------------------------------------------------------------------------------------------------------------

"""Make room for a step of each equation, and for an instruction where it is no view: lists are copied as they grow."""
function make_room!(tape::Tape)
    equations = tape.program.equations
    sizehint!(tape.steps, length(equations))
    instructions = count(e -> e.op.view === nothing, equations)
    singles = count(e -> e.op.view === nothing && e.outputs[1].eltype === Float32, equations)
    sizehint!(tape.code.f32, singles)
    sizehint!(tape.code.f64, instructions - singles)
    return nothing
end

"""The memory of value `i`, made on first use."""
function memory_of!(tape::Tape, i::Int, number::TensorDict{Int}, made::Made)
    known = tape.memories[i]
    known === nothing || return known
    x, layout = tape.known[i], tape.plan
    if haskey(layout.placed, i)
        place_all!(tape, layout.placed[i], number, made)
    else
        address = tape.arena.address + layout.offset[layout.storage[i]]
        region = get(tape.regions, x, nothing)
        dims = region !== nothing && x in region.inside ? Int[region.tile] : x.dims
        tape.memories[i] = Memory(tape.arena.root, address, x.eltype, dims, dense_strides(dims))
    end
    return tape.memories[i]::Memory
end

"""Let all parts that are computed in their places in value `i` lie there."""
function place_all!(tape::Tape, i::Int, number::TensorDict{Int}, made::Made)
    whole, e = memory_of!(tape, i, number, made), made[tape.known[i]]
    for (part, index) in zip(e.inputs, e.attrs.indices)
        k = number[part]
        get(tape.plan.placed, k, 0) == i && (tape.memories[k] = view_slice(whole, index))
    end
    return nothing
end

function bind!(tape::Tape, e::Equation, number::TensorDict{Int}, made::Made)
    op, p, x = e.op, tape.code, e.outputs[1]
    read = Memory[memory_of!(tape, number[a], number, made) for a in e.inputs]
    singles, doubles = length(p.f32), length(p.f64)
    region = get(tape.regions, x, nothing)
    if op.view !== nothing
        outs = op.several ? op.view(read, e.attrs) : Memory[op.view(read[1], e.attrs)]
        foreach((y, m) -> tape.memories[number[y]] = m, e.outputs, outs)
    else
        outs = Memory[memory_of!(tape, number[y], number, made) for y in e.outputs]
        region === nothing ? op.forward!(p, op.several ? outs : outs[1], read, e.attrs) : emit_tile!(p, e, outs[1], read, region)
    end
    region !== nothing && x === output(region.equations[end]) &&
        repeat_last!(p, x.eltype === Float32, length(region.equations), region.tile, region.n)
    place = get(tape.plan.offset, tape.plan.storage[number[x]], -1)
    push!(tape.steps, TapeStep(e, read, outs, place, singles+1:length(p.f32), doubles+1:length(p.f64)))
    return nothing
end

# Preparing the program ------------------------------------------------------------------------------------------------

copy_of(x::Tensor, scope::String) = Equation(COPY, Tensor[x], NO_ATTRS, scope)

"""The program with a separate value for every output, computed by an op that writes memory."""
function with_outputs_apart(program::Program)
    wanted, made, seen = TensorSet(program.outputs), Made(), TensorSet()
    for e in program.equations, x in e.outputs
        x in wanted && (made[x] = e)
    end
    equations, outputs = copy(program.equations), Tensor[]
    for x in program.outputs
        e = get(made, x, nothing)
        if e === nothing || e.op.view !== nothing || x in seen
            push!(equations, copy_of(x, e === nothing ? x.scope : e.scope))
            x = output(equations[end])
        end
        push!(outputs, x)
        push!(seen, x)
    end
    return Program(program.inputs, equations, outputs)
end

"""The program with a copy behind every view (the technique `views` switched off)."""
function with_copied_views(program::Program)
    copies, equations = TensorDict{Tensor}(), Equation[]
    for e in program.equations
        push!(equations, reading(a -> get(copies, a, a), e))
        e.op.view === nothing && continue
        for x in e.outputs
            push!(equations, copy_of(x, e.scope))
            copies[x] = output(equations[end])
        end
    end
    return Program(program.inputs, equations, Tensor[get(copies, x, x) for x in program.outputs])
end

"""The memory that `x` will have, as far as its layout goes, without an address."""
shape_of(x::Tensor) = x.data === nothing ?
    Memory(nothing, NOWHERE, x.eltype, x.dims, dense_strides(x.dims)) : x.data::Memory

"""
The program with copies where an op needs another memory layout than its input has, and how its values lie. Elementwise ops
take every layout.
"""
function legalised(program::Program)
    layout, dense = TensorDict{Memory}(), TensorDict{Tensor}()
    equations = Equation[]
    made = nothing  # found for the first copy, if there is one
    lies(a) = get!(() -> shape_of(a), layout, a)
    uses = TensorDict{Int}()  # how many products a tensor is the first factor of
    for e in program.equations
        e.op === MATMUL || e.op === MATMUL_ADD || continue
        a = e.inputs[end-1]
        uses[a] = get(uses, a, 0) + 1
    end
    function copied(a::Tensor)
        return get!(dense, a) do
            made === nothing && (made = made_by(program))
            from = get(made, a, nothing)
            e = copy_of(a, from === nothing ? a.scope : from.scope)
            push!(equations, e)
            output(e)
        end
    end
    suited(a::Tensor, accepts) = length(a) == 0 || accepts(lies(a).dims, lies(a).strides) ? a : copied(a)
    for e in program.equations
        op, inputs = e.op, e.inputs
        if op.view !== nothing && op.several
            foreach((x, m) -> layout[x] = m, e.outputs, op.view(Memory[lies(a) for a in inputs], e.attrs))
        elseif op.view !== nothing
            seen = op.view(lies(inputs[1]), e.attrs)
            if seen === nothing
                inputs = Tensor[copied(inputs[1])]
                seen = op.view(lies(inputs[1]), e.attrs)
            end
            layout[output(e)] = seen
        elseif op === MATMUL && turning_pays(lies(inputs[1]), lies(inputs[2]), uses[inputs[1]])
            append!(equations, turned_product!(layout, e))
            continue
        elseif op === MATMUL || op === MATMUL_ADD
            a, b = inputs[end-1], inputs[end]
            inputs = Tensor[inputs[1:end-2]; suited(a, factor_layout(a, output(e).dims, uses[a])); suited(b, suits_blas)]
        elseif op.accepts !== nothing
            inputs = Tensor[suited(a, op.accepts) for a in inputs]
        end
        push!(equations, inputs === e.inputs ? e : reading(e, inputs))
    end
    return Program(program.inputs, equations, program.outputs), layout
end

"""
Which layouts a product takes of its first factor. Tiles want its columns in one piece, and so a factor that lies by rows
(a transposed weight) is copied, once for all products that use it, if that is little work beside the products.
"""
function factor_layout(a::Tensor, dims::Vector{Int}, uses::Int)
    tiled(a.dims[1], dims[2], a.dims[2], a.eltype) && uses * dims[2] >= 32 || return suits_blas
    return lies_by_columns
end

"""
Whether to compute bᵀ aᵀ in place of a b: where tiles would have a copied, and copies of b and of the results of all products of
a are much smaller, since few rows make slower tiles.
"""
function turning_pays(a::Memory, b::Memory, uses::Int)
    length(a.dims) == 2 && length(b.dims) == 2 || return false
    (m, k), n = a.dims, b.dims[2]
    n >= 32 && tiled(m, n, k, a.eltype) && lies_by_columns(b.dims, b.strides) && !lies_by_columns(a.dims, a.strides) &&
        leading_dimension(a.dims, a.strides, true) > 0 || return false
    return 4 * uses * n * (k + m) < m * k
end

lies_by_columns(dims::Vector{Int}, strides::Vector{Int}) = leading_dimension(dims, strides, false) > 0

"""The equations that compute a product as the transpose of bᵀ aᵀ."""
function turned_product!(layout::TensorDict{Memory}, e::Equation)
    axes = attributes(:axes => Int[2, 1])
    function turned(x::Tensor)
        view = Equation(TRANSPOSE, Tensor[x], axes, e.scope)
        layout[output(view)] = view_transpose(get!(() -> shape_of(x), layout, x), axes)
        return view
    end
    a, b = turned(e.inputs[1]), turned(e.inputs[2])
    columns = copy_of(output(b), e.scope)
    product = Equation(MATMUL, Tensor[output(columns), output(a)], e.attrs, e.scope)
    rows = turned(output(product))
    return Equation[a, b, columns, product, rows, Equation(COPY, Tensor[output(rows)], NO_ATTRS, e.outputs, e.scope)]
end

"""The tensors with data that the ops use, in order of first use."""
function captured(program::Program)
    own = TensorSet(x for x in program.inputs if x.data !== nothing)  # symbols have none, and most are that
    for e in program.equations, x in e.outputs
        x.data === nothing || push!(own, x)
    end
    found, seen = Tensor[], TensorSet()
    function collect_captured(x::Tensor)
        (x.data === nothing || x in own || x in seen) && return
        push!(seen, x)
        push!(found, x)
    end
    foreach(e -> foreach(collect_captured, e.inputs), program.equations)
    foreach(collect_captured, program.outputs)
    return found
end

"""Throw a `TraceError` where a program reads a symbol that is not among its `known` tensors."""
function refuse_foreign(program::Program, known::TensorDict{Int})
    check(x::Tensor) = haskey(known, x) || throw(TraceError(
        "a tensor was kept from an earlier trace, or made in another task: there it stood for values that exist only " *
        "while a function is replayed; return it from that function, or compute it in this one, in the task that compiles"))
    foreach(e -> foreach(check, e.inputs), program.equations)
    foreach(check, program.outputs)
    return nothing
end

"""The tensors with data that pieces of programs inside of a program use, such as the bodies of its loops."""
captured_inside(program::Program) = Tensor[x for e in program.equations for x in captured_by(e.attrs)]

"""What was converted into captured tensors, those of the pieces of programs inside included."""
function conversions(leaves::Vector{Tensor}, program::Program)
    return Converted[x.attrs.converted for x in [leaves; captured_inside(program)] if has_attribute(x.attrs, :converted)]
end

"""The values that some op, or a fused region, can use, directly or through views, only without gaps."""
function needed_whole(program::Program, regions::Regions)
    needed = TensorSet()
    for (x, region) in regions
        x === output(region.equations[1]) && union!(needed, region.from_outside)
    end
    for e in Iterators.reverse(program.equations)
        through = e.op.view !== nothing && any(x -> x in needed, e.outputs)
        if through || e.op === RESHAPE || (e.op.accepts !== nothing && e.op !== MATMUL)
            union!(needed, e.inputs)
        end
    end
    return needed
end

"""Describe an equation's results to the planner: append them to `values`."""
function describe!(values::Vector{Value}, e::Equation, number::TensorDict{Int}, made::Made, outputs::TensorSet, whole::TensorSet,
        regions::Regions, techniques::Techniques)
    op, x = e.op, e.outputs[1]
    reads = Int[number[a] for a in e.inputs]
    op.view === nothing ||
        return append!(values, Value[Value(bytes_of(y); reads=reads, view_of=read) for (y, read) in zip(e.outputs, reads)])
    if op.several  # the last one reads the others, so that all are in use until the op is done
        others = Int[number[y] for y in e.outputs[1:end-1]]
        return append!(values, Value[Value(bytes_of(y); reads=y === e.outputs[end] ? [reads; others] : reads, fixed=y in outputs)
                                     for y in e.outputs])
    end
    region = get(regions, x, nothing)
    region === nothing || return push!(values, described_in(region, e, number, reads, x in outputs))
    may_overwrite = NO_VALUES
    for i in op.overwrites
        i <= length(e.inputs) || continue
        a = e.inputs[i]
        # One array may be two operands, of which only one may be overwritten.
        any(j -> e.inputs[j] === a && !(j in op.overwrites), eachindex(e.inputs)) && continue
        # A view may lie in its memory in another order, and so may what only reshapes one.
        base = a
        while op_of(base, made) === RESHAPE
            base = made[base].inputs[1]
        end
        before = op_of(base, made)
        a.dims == x.dims && a.eltype === x.eltype && (before === nothing || before.view === nothing) &&
            (may_overwrite = may_overwrite === NO_VALUES ? Int[number[a]] : push!(may_overwrite, number[a]))
    end
    parts = techniques.place_parts && op === ASSEMBLE ? Int[number[a] for a in placeable(e, made, whole, regions)] : NO_VALUES
    return push!(values, Value(bytes_of(x); reads=reads, may_overwrite=may_overwrite, parts=parts, fixed=x in outputs))
end

"""
The inputs of an assembly that may be computed in their places: results of elementwise ops and of matrix products, where
the place is a matrix that BLAS can read, or lies in one piece.
"""
function placeable(e::Equation, made::Made, whole::TensorSet, regions::Regions)
    parts = Tensor[]
    covers(e.attrs.dims, e.attrs.indices) || return parts
    seen = shape_of(output(e))
    counts = TensorDict{Int}()
    for a in e.inputs
        counts[a] = get(counts, a, 0) + 1
    end
    for (a, index) in zip(e.inputs, e.attrs.indices)
        op = op_of(a, made)
        op !== nothing && counts[a] == 1 && !(a in whole) || continue
        place = view_slice(seen, index)
        one_piece = is_dense(place)
        matrix = length(place.dims) == 2 && suits_blas(place.dims, place.strides) && !haskey(regions, a)
        fits = op === MATMUL || op === MATMUL_ADD ? matrix : op.elementwise && (one_piece || matrix)
        fits && push!(parts, a)
    end
    return parts
end

function shown_names(tape::Tape)
    names = TensorDict{String}()
    for (i, x) in enumerate(tape.program.inputs)
        names[x] = "x$i"
    end
    for (i, x) in enumerate(captured(tape.program))
        names[x] = x.literal ? string(item(x)) : isempty(x.name) ? "c$i" : x.name
    end
    for (i, x) in enumerate(Tensor[y for e in tape.program.equations for y in e.outputs])
        names[x] = "v$i"
    end
    return names
end
