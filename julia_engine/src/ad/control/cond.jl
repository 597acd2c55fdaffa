# Branches on values: one op with a program for each branch, of which a replay runs the one that is taken.

"""
    Branches

What is computed where a predicate does not hold, and where it does: two programs of the same inputs, with results of the same
sizes.
"""
struct Branches
    programs::Vector{Program}
end

Base.show(io::IO, b::Branches) = print(io, length(b.programs[2].equations), " ops or ", length(b.programs[1].equations))
programs_in(b::Branches) = b.programs

infer_cond(inputs, attrs) = Kind[(x.dims, x.eltype) for x in (attrs.branches::Branches).programs[1].outputs]

"""Branches as an instruction: the tapes of both, and what is copied into and out of each."""
struct Choice
    holds::Memory
    tapes::Vector{Tape}
    enter::Vector{Vector{Transfer}}
    leave::Vector{Vector{Transfer}}
end

function (c::Choice)()
    k = first_number(c.holds) == 0 ? 1 : 2
    copy_all!(c.enter[k], 0)
    run!(c.tapes[k])
    copy_all!(c.leave[k], 0)
    return nothing
end

first_number(m::Memory) = m.eltype === Float64 ? unsafe_load(Ptr{Float64}(m.address)) :
    m.eltype === Float32 ? Float64(unsafe_load(Ptr{Float32}(m.address))) : Float64(unsafe_load(Ptr{Int64}(m.address)))

function forward_cond(p::Instructions, outs::Vector{Memory}, inputs::Vector{Memory}, attrs)
    tapes = Tape[Tape(program; techniques=state().techniques) for program in (attrs.branches::Branches).programs]
    copied(to, from, x) = Transfer(to, from, sizeof(x), 0, 0)
    enter = [Transfer[copied(address_of(x), Ptr{UInt8}(m.address), x) for (x, m) in zip(tape.inputs, inputs[2:end])] for tape in tapes]
    leave = [Transfer[copied(Ptr{UInt8}(m.address), address_of(x), x) for (x, m) in zip(tape.outputs, outs)] for tape in tapes]
    own = sum(Int[nbytes(tape) + sum(Int[sizeof(x) for x in [tape.inputs; tape.outputs]]) for tape in tapes])
    return emit_call!(p, Choice(inputs[1], tapes, enter, leave), own, [inputs; outs])
end

function poison!(c::Choice, byte::Integer)
    for tape in c.tapes
        poison!(tape, byte)
        foreach(x -> fill_bytes!(x, byte), tape.inputs)
    end
end

# Derivatives: branches again, which compute the inside of a branch once more. -----------------------------------------

function cond_pullback(cotangents::Vector{Union{Nothing,Tensor}}, node::Tensor, inputs::Vector{Tensor}, needs_grad::Vector{Bool})
    given = Int[k for (k, g) in enumerate(cotangents) if g !== nothing]
    wanted = Int[i for i in 2:length(inputs) if needs_grad[i]]
    isempty(wanted) && return Vector{Any}(nothing, length(inputs))  # only the truth value depends on what is differentiated by
    programs = map((node.attrs.branches::Branches).programs) do program
        (own, outputs), nodes = nested_trace() do
            here = symbols(program)
            seeds = Tensor[like(program.outputs[k]) for k in given]
            results, made = applied(program, here)
            targets = here[wanted.-1]
            found = gradients(results[given], seeds, targets; within=made)
            Tensor[here; seeds], Tensor[g === nothing ? zeros_of(x) : g for (g, x) in zip(found, targets)]
        end
        traced(nodes, own, outputs)
    end
    found = apply_several(COND, Tensor[inputs; Tensor[cotangents[k] for k in given]], attributes(:branches => Branches(programs)))
    parts = Vector{Any}(nothing, length(inputs))
    parts[wanted] = found
    return parts
end

function cond_jvp(t, results, inputs, attrs)
    active = Int[i for i in 2:length(inputs) if t[i] !== nothing]
    isempty(active) && return fill(nothing, length(results))
    programs = map((attrs.branches::Branches).programs) do program
        (own, outputs), nodes = nested_trace() do
            here = symbols(program)
            tangents = Tensor[like(here[i-1]) for i in active]
            found, made = applied(program, here)
            of_inputs = Dict{Tensor,Tensor}(here[i-1] => d for (i, d) in zip(active, tangents))
            Tensor[here; tangents], pushed_forward(found, of_inputs, made)
        end
        traced(nodes, own, outputs)
    end
    return apply_several(COND, Tensor[inputs; Tensor[t[i] for i in active]], attributes(:branches => Branches(programs)))
end

const COND = Op("cond", infer_cond; several=true, forward=forward_cond, backward=Joint(cond_pullback), jvp=cond_jvp,
    accepts=is_dense, attrs=[:branches], doc="one of two programs, chosen by a truth value")

# What users write -----------------------------------------------------------------------------------------------------

"""
    branch(holds, f, g, args...)

`f(args...)` where `holds`, a truth value or a comparison's result, is true, and `g(args...)` where it is not: a branch that
compiled functions can have (the numpy engine's `cond`, which is another function's name in LinearAlgebra). Eagerly it is
`holds ? f(args...) : g(args...)`. Where a function is traced, both are, and each replay computes one of them; so do
derivatives, of any order. Results are arrays of floats, or containers of them, of one structure, and of the same sizes and
element types. Under `vmap` each sample has its own branch.

Random masks cannot be drawn in it: draw them before, and pass them in.

    compile(grad(x -> branch(x .> 0, x -> x^2, x -> -x, x)))(3.0) == 6

Throws a `ShapeError` or `DTypeError` where the results differ; a `TraceError` for a branch on a value inside.
"""
function branch(holds, f, g, args...)
    leaves, structure = flatten(args)
    chosen = truth_value("branch: the first argument", holds)
    tensors = any(x -> x isa Tensor && x.data === nothing, Any[leaves; chosen])
    state().symbolic || tensors || return (item(chosen) != 0 ? f : g)(args...)
    beside = any(x -> x isa Union{Tensor,AbstractArray}, leaves)  # whose float type a number takes, as it does eagerly
    operands = as_rows(leaves, Tensor[is_index(x) ? index_tensor(x) :
        x isa AbstractArray{Bool} || x isa Real && beside ? as_tensor(x, float_type(leaves)) : as_tensor(x) for x in leaves])
    (no, returned, rows), (yes, other, others) = traced_branch(g, operands, structure), traced_branch(f, operands, structure)
    other == returned || throw(ShapeError("branch: the first function returns $other, the second one $returned"))
    for (a, b, row, same, place) in zip(yes[1].outputs, no[1].outputs, others, rows .== others, paths(returned))
        a.dims == b.dims || throw(ShapeError("branch: the result$place is of size $(size(a)) from the first function, and of " *
            "size $(size(b)) from the second"))
        a.eltype === b.eltype || throw(DTypeError("branch: the result$place is of $(a.eltype) from the first function, and of " *
            "$(b.eltype) from the second"))
        same || throw(ShapeError("branch: the result$place is $(row_or_matrix(row)) from the first function, and " *
            "$(row_or_matrix(!row)) from the second"))
    end
    outside = unique(Tensor[no[2]; yes[2]])
    n = length(operands)
    programs = map((no, yes)) do (program, own)
        known = Dict{Tensor,Tensor}(zip(own, program.inputs[n+1:end]))
        Program(Tensor[program.inputs[1:n]; Tensor[get(() -> like(x), known, x) for x in outside]], program.equations, program.outputs)
    end
    found = apply_several(COND, Tensor[chosen; operands; outside], attributes(:branches => Branches(collect(programs))))
    return unflatten(returned, Any[as_row(y, row) for (y, row) in zip(found, rows)])
end

"""One truth value, a `Bool` or a comparison's result, as a tensor."""
function truth_value(what::String, @nospecialize(x))
    x isa Union{Real,Tensor,AbstractArray{<:Real}} ||
        throw(DTypeError("$what must be a truth value, such as x .> 0, got $(typeof(x))"))
    found = as_tensor(x isa Bool ? Float64(x) : x)
    length(found) == 1 || throw(ShapeError("$what must be one truth value, got size $(size(found)); use all() or any()"))
    return found
end

"""
A function of these operands as a program with what it captures, the structure of its result, and which of its leaves are
transposes of vectors.
"""
function traced_branch(@nospecialize(f), operands::Vector{Tensor}, structure::Structure)
    own = Tensor[like(x) for x in operands]
    (outputs, returned, rows), nodes = nested_trace() do
        found, returned = flatten(f(unflatten(structure, own)...))
        T = findfirst(x -> x isa Tensor, found)
        Tensor[x isa Real && T !== nothing ? as_tensor(x, found[T].eltype) : as_output(x, "branch") for x in found], returned,
        Bool[is_row(x) for x in found]
    end
    foreach(x -> check_float(x.eltype), outputs)
    drawn = findfirst(x -> (x.op::Op).random, nodes)
    drawn === nothing || throw(TraceError("branch: random masks cannot be drawn inside a branch ($(nodes[drawn].op.name)); " *
        "draw them before and pass them in"))
    return close_over(nodes, own, outputs), returned, rows
end
