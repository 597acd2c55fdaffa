# Compilation: a function in, a replayed tape out.

"""
    Compiled

A function that is traced once for each combination of argument sizes and element types, and then replayed.

Julia code runs only while tracing: branches and loops are fixed by the first call of each size, and a branch on a value
throws. Tensors and arrays that the function captures are read by reference at every call. Results are copies.

Inside another transform, and on tensors that require a gradient, the function itself is called instead: its results are
then tensors that can be differentiated.
"""
struct Compiled
    f::Any
    techniques::Techniques
    tapes::Dict{Any,Tuple{Tape,Any}}
end

"""
    compile(f; techniques=Techniques())

Return `f` as a replayed tape; `compile(grad(f))` and `compile(value_and_grad(f))` work as well. See [`Compiled`](@ref)
for what is fixed by tracing.
"""
compile(@nospecialize(f); techniques::Techniques=Techniques()) = Compiled(f, techniques, Dict{Any,Tuple{Tape,Any}}())

function (compiled::Compiled)(@nospecialize(args...))
    leaves, structure = flatten(args)
    (inside_transform() || any(x -> x isa Tensor && x.requires_grad, leaves)) && return compiled.f(args...)
    leaves = as_arguments(leaves, structure)
    compiled.techniques.replay || return plainly(compiled.f(unflatten(structure, leaves)...))
    arrays = Any[value(x) for x in leaves]
    tape, results = tape_for!(compiled, arrays, structure)
    return unflatten(results, Any[unwrapped(copy(out)) for out in tape(arrays...)])
end

"""The leaves of the arguments as tensors; integers in an array are indices or labels."""
function as_arguments(leaves::Vector{Any}, structure::Structure)
    for (x, place) in zip(leaves, paths(structure))
        x isa Union{Tensor,Real,AbstractArray{<:Real}} || throw(DTypeError(
            "compile: argument $(argument_name(place)) is of $(typeof(x)), and so no part of a tape; let the function capture it"))
    end
    return Tensor[x isa AbstractArray{<:Integer} ? index_tensor(x) : t for (x, t) in zip(leaves, as_tensors(leaves))]
end

function plainly(@nospecialize(result))
    leaves, structure = flatten(result)
    return unflatten(structure, Any[x isa Tensor ? unwrapped(value(x)) : x for x in leaves])
end

function tape_for!(compiled::Compiled, arrays::Vector{Any}, structure::Structure)
    key = (structure, Any[(size(a), eltype(a)) for a in arrays])
    haskey(compiled.tapes, key) && return compiled.tapes[key]
    inputs = Tensor[symbol(eltype(a), collect(Int, size(a)), "x$i") for (i, a) in enumerate(arrays)]
    result, nodes = tracing(() -> compiled.f(unflatten(structure, inputs)...))
    leaves, results = flatten(result)
    graph = prune!(Graph(inputs, Tensor[as_result(x) for x in leaves], nodes))
    return compiled.tapes[key] = (Tape(graph; techniques=compiled.techniques), results)
end

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
