# Compilation: a function in, a replayed tape out.

"""
    Compiled

A function that is traced once for each combination of argument sizes and element types, and then replayed.

Julia code runs only while tracing: branches and loops are fixed by the first call of each size, and a branch on a value
throws. Tensors and arrays that the function captures are read by reference at every call; where one that had to be converted
(truth values, integers, another layout) has changed, the function is traced anew. So it is where anything else that it
captures has changed: an array whose numbers Julia code reads (`w[1]`, `sum(w)`), a field, an item of a container, a captured
variable that was assigned to. All of that is looked at before every replay, large arrays at the speed of memory.

Not seen are changes of global variables' numbers, of what tracing itself changed (a counter), and of an array that ops read
in place: there Julia code's own `w[1]` stays that of the trace; pass it as an argument. Results are copies.

Inside another transform, on tensors that require a gradient or dual numbers, and where it captures a tensor that requires
a gradient (outside `no_grad`), the function itself is called instead: its results are then tensors, or dual numbers, that
can be differentiated.
"""
mutable struct Compiled
    f::Any
    techniques::Techniques
    tapes::Dict{Any,Tuple{Tape,Structure,Vector{Bool}}}  # with the form of the results, and which are transposes of vectors
    replays::Dict{Any,Any}
    last::Any  # the ZeroCopyCall of the last call
    code::Union{Nothing,Straight}  # its straight-line code, where it has one and returns one number
    making::ReentrantLock  # held while tapes and replays are looked up, and made where there are none
end

"""
    compile(f; techniques=Techniques())

Return `f` as a replayed tape; `compile(grad(f))` and `compile(value_and_grad(f))` work as well. See [`Compiled`](@ref)
for what is fixed by tracing.

Where all values of a tape are single numbers it is compiled further, into straight-line code. Large arrays are read and
written in place, not copied into the tape's memory.
"""
compile(@nospecialize(f); techniques::Techniques=Techniques()) =
    Compiled(f, techniques, Dict{Any,Tuple{Tape,Structure,Vector{Bool}}}(), Dict{Any,Any}(), nothing, nothing, ReentrantLock())

function (compiled::Compiled)(x::T, rest::Vararg{T,N}) where {T<:Union{Float32,Float64},N}
    code = compiled.code
    if code !== nothing && code.T === T && code.arguments == N + 1 && !inside_transform()
        return after_run(run -> result(run, T, 1), code, (x, rest...))
    end
    return replayed(compiled, (x, rest...))
end
(compiled::Compiled)(args::Vararg{Any,N}) where {N} = replayed(compiled, args)

function replayed(compiled::Compiled, args::Tuple)
    last = compiled.last
    last isa ZeroCopyCall && last.plain && all_fit(args, last.tape.inputs) && !inside_transform() && is_current(last.tape) &&
        !keeps_graph(last.tape) && return replay!(last, args)
    return anew(compiled, args)
end

function anew(compiled::Compiled, @nospecialize(args::Tuple))
    leaves, structure = flatten(args)
    (inside_transform() || any(x -> is_dual(x) || x isa Tensor && x.requires_grad, leaves)) && return compiled.f(args...)
    leaves = as_arguments(leaves, structure)
    compiled.techniques.replay || return unreplayed(compiled, leaves, structure)
    arrays = Any[value(x) for x in leaves]
    rows = Bool[x.row for x in leaves]
    made = lock(() -> replay_for!(compiled, arrays, rows, structure), compiled.making)
    made === nothing && return unreplayed(compiled, leaves, structure)
    tape, results, turned = made
    keeps_graph(tape) && return compiled.f(args...)
    return together(results, run_on!(outputs -> Any[as_julias(copy(out), row) for (out, row) in zip(outputs, turned)], tape, arrays))
end

"""The tape of such arguments, which calls like this one replay from now on, and the form of its results."""
function replay_for!(compiled::Compiled, arrays::Vector{Any}, rows::Vector{Bool}, structure::Structure)
    made = tape_for!(compiled, arrays, rows, structure)
    made === nothing && return nothing
    key, tape, results, turned = made
    keeps_graph(tape) && return tape, results, turned
    last = compiled.last = get!(() -> ZeroCopyCall(tape, structure, results, turned), compiled.replays, key)::ZeroCopyCall
    compiled.code = last.results == LEAF && isempty(tape.watched) && isempty(tape.variables) ? last.code : nothing
    return tape, results, turned
end

# Calls with arrays and numbers, as a tape wants them -------------------------------------------------------------------

const IN_PLACE_FROM = 2048  # bytes of an array that is not worth copying

"""An address in an instruction that is some way into an argument or a result."""
struct Reference
    place::Ptr{Ptr{Cvoid}}
    offset::Int
end

"""
    ZeroCopyCall

How a tape is called: whether its arguments are arrays and numbers without containers, its straight-line code, and the
operands that lie in its arguments and results, which a call points to other memory. `captured`: where the
arrays lie that it reads in place.
"""
struct ZeroCopyCall
    tape::Tape
    results::Structure
    rows::Vector{Bool}  # which results are transposes of vectors
    plain::Bool
    code::Union{Nothing,Straight}
    inputs::Vector{Vector{Reference}}
    outputs::Vector{Vector{Reference}}
    captured::Vector{Tuple{UInt,UInt}}
end

function ZeroCopyCall(tape::Tape, structure::Structure, results::Structure, rows::Vector{Bool})
    t = tape.techniques
    hot = t.preallocate && t.concrete
    plain = hot && structure.kind === :tuple && all(child -> child.kind === :leaf, structure.children) &&
        !any(x -> x.row, tape.program.inputs)  # an array is no transpose of a vector
    code = plain && isempty(tape.resizable) && isempty(tape.converted) ? straight(tape.program) : nothing
    captured_ = Tuple{UInt,UInt}[extent(x.data) for x in [captured(tape.program); captured_inside(tape.program)] if !x.literal]
    references = plain ? operands_by_slot(tape) : Vector{Reference}[Reference[] for _ in [tape.inputs; tape.outputs]]
    n = length(tape.inputs)
    return ZeroCopyCall(tape, results, rows, plain, code, references[1:n], references[n+1:end], captured_)
end

"""For each argument and result of a tape that is worth it, and that nothing else has read, the operands that lie in it."""
function operands_by_slot(tape::Tape)
    arrays, code = Any[tape.inputs; tape.outputs], tape.code
    found = Vector{Reference}[Reference[] for _ in arrays]
    fixed = Set{Int}(slot.number for slot in code.slots if slot.instruction == 0)
    for slot in code.slots
        x = arrays[slot.number]
        sizeof(x) >= IN_PLACE_FROM && !(slot.number in fixed) || continue
        place = slot.single ? place_of(code.f32, slot) : place_of(code.f64, slot)
        push!(found[slot.number], Reference(place, Int(UInt(unsafe_load(place)) - UInt(pointer(x)))))
    end
    return found
end

place_of(code::Vector{Instruction{T}}, slot::Slot) where {T} =
    Ptr{Ptr{Cvoid}}(pointer(code, slot.instruction)) + fieldoffset(Instruction{T}, slot.field)

function point!(references::Vector{Reference}, address::Ptr{Cvoid})
    for r in references
        unsafe_store!(r.place, address + r.offset)
    end
    return nothing
end
point!(references::Vector{Reference}, @nospecialize(x::Array)) = point!(references, start_of(x))

@inline all_fit(args::Tuple, buffers::Vector{Any}) = length(args) == length(buffers) && all_fit(args, buffers, 1)
@inline all_fit(args::Tuple{}, buffers::Vector{Any}, i::Int) = true
@inline all_fit(args::Tuple, buffers::Vector{Any}, i::Int) =
    fits(args[1], buffers[i]) && all_fit(Base.tail(args), buffers, i + 1)
@inline fits(x::Array{T,N}, buffer) where {T<:Union{Float32,Float64,Int64},N} =
    buffer isa Array{T,N} && size(x) == size(buffer)
@inline fits(x::T, buffer) where {T<:Union{Float32,Float64}} = buffer isa Array{T,0}
@inline fits(x, buffer) = false

@inline enter!(args::Tuple{}, replay::ZeroCopyCall, i::Int) = nothing
@inline function enter!(args::Tuple, replay::ZeroCopyCall, i::Int)
    enter_one!(args[1], replay.tape.inputs[i], replay.inputs[i])
    enter!(Base.tail(args), replay, i + 1)
end
@inline enter_one!(x::Array{T,N}, buffer, references::Vector{Reference}) where {T,N} =
    isempty(references) ? (copyto!(buffer::Array{T,N}, x); nothing) : point!(references, start_of(x))
@inline enter_one!(x::T, buffer, ::Vector{Reference}) where {T} = ((buffer::Array{T,0})[] = x; nothing)

function replay!(replay::ZeroCopyCall, args::Tuple)
    tape, code = replay.tape, replay.code
    code === nothing || return numbers_from(code, replay, map(as_number, args))
    outputs = copy(tape.outputs)
    for i in eachindex(outputs)
        isempty(replay.outputs[i]) || (outputs[i] = similar(outputs[i]))
    end
    return run_into!(outputs, replay, args, nothing)
end

"""Replay the tape, and return what `read_results` makes of it before another task may replay it."""
function run_into!(outputs::Vector{Any}, replay::ZeroCopyCall, args::Tuple, given)
    tape = replay.tape
    check_ready(tape)
    claim!(tape.replaying)
    GC.@preserve args outputs begin
        try
            enter!(args, replay, 1)
            foreach(i -> isempty(replay.outputs[i]) || point!(replay.outputs[i], outputs[i]), eachindex(outputs))
            run!(tape)
            return read_results(given, replay, outputs)
        finally  # what the tape was made with stays valid, whatever becomes of these arrays
            foreach(i -> isempty(replay.inputs[i]) || point!(replay.inputs[i], tape.inputs[i]), eachindex(replay.inputs))
            foreach(i -> isempty(replay.outputs[i]) || point!(replay.outputs[i], tape.outputs[i]), eachindex(outputs))
            tape.replaying[] = 0
        end
    end
end

read_results(::Nothing, replay::ZeroCopyCall, outputs::Vector{Any}) = finished(replay, outputs, true)
read_results(given::Tuple, replay::ZeroCopyCall, outputs::Vector{Any}) = copy_rest!(given, replay, 1)

"""
    run!(results, compiled, args...)

Call a compiled function whose results are arrays, and write them into `results`: an array, or a tuple of arrays, of the
sizes and element types that the function returns; return `results`. They may not share memory with each other, with an
argument, or with an array that the function captures.
"""
function run!(results, compiled::Compiled, args::Vararg{Any,N}) where {N}
    last = compiled.last
    last isa ZeroCopyCall && last.plain && all_fit(args, last.tape.inputs) && !inside_transform() && is_current(last.tape) &&
        !keeps_graph(last.tape) || return give!(results, compiled, args)
    given = as_tuple(results)
    all_fit(given, last.tape.outputs) && all_apart(given, args) || refuse(given, last.tape.outputs)
    outputs = copy(last.tape.outputs)
    name_memory!(outputs, given, last, 1)
    run_into!(outputs, last, args, given)
    return results
end

as_tuple(results::Tuple) = results
as_tuple(results) = (results,)

# Walks over tuples are recursive, so that each step is compiled for its types: a loop would find them out at every call.

@inline all_apart(given::Tuple{}, args::Tuple) = true
@inline all_apart(given::Tuple, args::Tuple) = apart_from(given[1], args) && apart_from(given[1], Base.tail(given)) &&
    all_apart(Base.tail(given), args)
@inline apart_from(mine, args::Tuple) = false  # no memory at all
@inline apart_from(mine::Array, args::Tuple{}) = true
@inline apart_from(mine::Array, args::Tuple) = are_apart(mine, args[1]) && apart_from(mine, Base.tail(args))
@inline are_apart(a::Array, b::Array) = !share_bytes(extent(a), extent(b))
@inline are_apart(a::Array, b) = true

@inline name_memory!(outputs::Vector{Any}, given::Tuple{}, replay::ZeroCopyCall, i::Int) = nothing
@inline function name_memory!(outputs::Vector{Any}, given::Tuple, replay::ZeroCopyCall, i::Int)
    mine = check_apart(given[1], replay.captured)
    isempty(replay.outputs[i]) || (outputs[i] = mine)
    name_memory!(outputs, Base.tail(given), replay, i + 1)
end

@noinline function check_apart(mine::Array, captured::Vector{Tuple{UInt,UInt}})
    any(bytes -> share_bytes(extent(mine), bytes), captured) && throw(ReplayError("run!: memory for a result is also that of " *
        "an array which the function captures, and would be written over while it is read; copy one"))
    return mine
end

"""Copy the results that the tape has computed in its own memory."""
@inline copy_rest!(given::Tuple{}, replay::ZeroCopyCall, i::Int) = nothing
@inline function copy_rest!(given::Tuple, replay::ZeroCopyCall, i::Int)
    isempty(replay.outputs[i]) && copyto!(given[1], replay.tape.outputs[i]::typeof(given[1]))
    copy_rest!(Base.tail(given), replay, i + 1)
end

@noinline function refuse(@nospecialize(given::Tuple), outputs::Vector{Any})
    length(given) == length(outputs) || throw(ReplayError(
        "run!: the function returns $(length(outputs)) arrays, got memory for $(length(given))"))
    for (k, (mine, out)) in enumerate(zip(given, outputs))
        typeof(mine) === typeof(out) && size(mine) == size(out) || throw(ReplayError(
            "run!: result $k is a $(typeof(out)) of size $(size(out)), got $(typeof(mine))" *
            (mine isa AbstractArray ? " of size $(size(mine))" : "") * "; give an array like it"))
    end
    all_apart(given, ()) || throw(ReplayError("run!: memory for one result is also that of another; give each its own"))
    throw(ReplayError(
        "run!: memory for a result is also an argument's, which would be written over while it is read; copy one"))
end

"""The results of a call that could not compute in their memory, such as the first one, copied there."""
function give!(results, compiled::Compiled, @nospecialize(args::Tuple))
    given = as_tuple(results)
    leaves = flatten(compiled(args...))[1]
    any(x -> x isa Tensor, leaves) && throw(TraceError("run!: here the results are tensors, which can be differentiated, " *
        "and memory of arrays cannot hold them; call the compiled function itself"))
    outputs = Any[is_row(x) ? Array(x) : x isa AbstractArray ? x : fill(x) for x in leaves]
    # What later calls refuse, the first one does as well.
    all_fit(given, outputs) && all_apart(given, args) || refuse(given, outputs)
    last = compiled.last
    last isa ZeroCopyCall && foreach(mine -> check_apart(mine, last.captured), given)
    foreach(copyto!, given, outputs)
    return results
end

function numbers_from(code::Straight, replay::ZeroCopyCall, args::Tuple{T,Vararg{T}}) where {T}
    return together(replay.results, after_run(run -> Any[result(run, T, i) for i in 1:run.results], code, args))
end

as_number(x::Real) = x
as_number(x::Array) = x[]

"""The results in the function's own form; copies, of those that the next run overwrites."""
function finished(replay::ZeroCopyCall, outputs::Vector{Any}, own::Bool)
    return together(replay.results, Any[
        as_julias(own && !isempty(r) ? out : copy(out), row) for (out, r, row) in zip(outputs, replay.outputs, replay.rows)])
end

function together(results::Structure, leaves::Vector{Any})
    results.kind === :leaf && return leaves[1]
    results.kind === :tuple && length(leaves) == length(results.children) &&
        all(child -> child.kind === :leaf, results.children) && return Tuple(leaves)
    return unflatten(results, leaves)
end

# Tracing --------------------------------------------------------------------------------------------------------------

"""The leaves of the arguments as tensors; integers in an array are indices or labels, truth values are numbers."""
function as_arguments(leaves::Vector{Any}, structure::Structure)
    for (x, place) in zip(leaves, paths(structure))
        x isa Union{Tensor,Real,AbstractArray{<:Real}} || throw(DTypeError(
            "compile: argument $(argument_name(place)) is of $(typeof(x)), and so no part of a tape; let the function capture it"))
    end
    # Numbers alone are as uncompiled: not Float64 where they are Float32.
    singles = any(x -> x isa Float32, leaves) && all(x -> x isa Float32 || eltype(x) <: Integer, leaves)
    tensors = singles ? Tensor[as_tensor(x, Float32) for x in leaves] : as_tensors(leaves)
    return as_rows(leaves, Tensor[is_index(x) ? index_tensor(x) : t for (x, t) in zip(leaves, tensors)])
end

is_index(@nospecialize(x)) = x isa AbstractArray{<:Integer} && eltype(x) !== Bool

"""The results of the function itself, as arrays."""
function unreplayed(compiled::Compiled, leaves::Vector{Tensor}, structure::Structure)
    result = @entering techniques=compiled.techniques compiled.f(unflatten(structure, leaves)...)
    found, results = flatten(result)
    places = findall(x -> x isa Tensor, found)
    outputs = Tensor[found[k] for k in places]
    found[places] = shown(outputs, true, given_arrays(Tensor[leaves; outputs]))
    return unflatten(results, found)
end

function tape_for!(compiled::Compiled, arrays::Vector{Any}, rows::Vector{Bool}, structure::Structure)
    key = (structure, Any[(size(a), eltype(a)) for a in arrays], rows)
    if haskey(compiled.tapes, key)
        is_current(compiled.tapes[key][1]) && return (key, compiled.tapes[key]...)
        delete!(compiled.replays, key)  # what was converted has changed: trace anew
    end
    inputs = Tensor[as_row(symbol(eltype(a), collect(Int, size(a)), "x$i"), rows[i]) for (i, a) in enumerate(arrays)]
    watched = watch(compiled.f)
    result, nodes = @entering techniques=compiled.techniques tracing(() -> compiled.f(unflatten(structure, inputs)...))
    leaves, results = flatten(result)
    program = traced(nodes, inputs, Tensor[as_result(x) for x in leaves])
    depends_on_duals(program.outputs) && return nothing  # the derivative around is not one of a tape
    tape = Tape(program; techniques=compiled.techniques)
    tape.watched = filter(w -> is_unchanged(w) && !is_read_in_place(w, tape), watched)
    tape.variables = filter(x -> x.requires_grad && depend_on_a_leaf(Tensor[x]), captured(tape.program))
    compiled.tapes[key] = (tape, results, Bool[is_row(x) for x in leaves])
    return (key, compiled.tapes[key]...)
end

"""Whether a derivative by what the tape captures may be asked for, which needs the graph of the ops themselves."""
keeps_graph(tape::Tape) = !isempty(tape.variables) && state().grad_enabled

"""Whether the tape's ops read this array by reference, or the tape looks at it as at one that was converted."""
function is_read_in_place(w::Watched, tape::Tape)
    x = w.object
    any(c -> c.source === x || owner_of(c.source) === x, tape.converted) && return true
    x isa Array && isbitstype(eltype(x)) || return false
    found = [captured(tape.program); captured_inside(tape.program)]
    return any(t -> !t.literal && t.data !== nothing && share_bytes(extent(x), extent(t.data::Memory)), found)
end

watched_parts(f::Compiled) = (f.f,)
watched_parts(::Tape) = ()

as_result(x::Union{Tensor,Real,AbstractArray{<:Real}}) = as_tensor(x)
as_result(@nospecialize(x)) =
    throw(TraceError("compile: the function must return tensors, or containers of tensors, got $(typeof(x))"))

"""
    source(compiled)

The tapes made so far as straight-line code, for reading.
"""
function source(compiled::Compiled)
    isempty(compiled.tapes) &&
        throw(ReplayError("the function has not been called yet, so nothing is compiled; call it first"))
    return join(["# $(join(["$T$n" for (n, T) in arrays], ", "))\n$(source(tape))" for ((_, arrays), (tape, _)) in compiled.tapes],
        "\n\n")
end
