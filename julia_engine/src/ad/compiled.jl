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
    (inside_transform() || any(x -> x isa Tensor && x.requires_grad, args)) && return compiled.f(args...)
    compiled.techniques.replay || return plainly(compiled.f(as_arguments(args)...))
    arrays = Any[value(x) for x in as_arguments(args)]
    tape, structure = tape_for!(compiled, arrays)
    outputs = tape(arrays...)
    return packed(structure, Any[unwrapped(copy(out)) for out in outputs])
end

as_arguments(@nospecialize(args)) = Tensor[x isa AbstractArray{<:Integer} ? index_tensor(x) : t for (x, t) in zip(args, as_tensors(args))]
plainly(x::Tensor) = unwrapped(value(x))
plainly(x::Union{Tuple,NamedTuple}) = map(plainly, x)
plainly(x) = x

function tape_for!(compiled::Compiled, arrays::Vector{Any})
    key = Any[(size(a), eltype(a)) for a in arrays]
    haskey(compiled.tapes, key) && return compiled.tapes[key]
    inputs = Tensor[symbol(eltype(a), collect(Int, size(a)), "x$i") for (i, a) in enumerate(arrays)]
    result, nodes = tracing(() -> compiled.f(inputs...))
    outputs = Tensor[]
    structure = flattened!(outputs, result)
    graph = prune!(Graph(inputs, outputs, nodes))
    return compiled.tapes[key] = (Tape(graph; techniques=compiled.techniques), structure)
end

"""Append the tensors of a result and return its structure."""
flattened!(leaves::Vector{Tensor}, x::Union{Tensor,AbstractArray,Real}) = (push!(leaves, as_tensor(x)); length(leaves))
flattened!(leaves::Vector{Tensor}, x::Union{Tuple,NamedTuple}) = map(y -> flattened!(leaves, y), x)
flattened!(leaves::Vector{Tensor}, x::Vector{<:Union{Tensor,Tuple}}) = Any[flattened!(leaves, y) for y in x]
flattened!(leaves::Vector{Tensor}, x::Nothing) = nothing
flattened!(leaves::Vector{Tensor}, @nospecialize(x)) =
    throw(TraceError("compile: the function must return tensors in tuples or lists, got $(typeof(x))"))

packed(structure::Int, arrays::Vector{Any}) = arrays[structure]
packed(structure::Union{Tuple,NamedTuple,Vector}, arrays::Vector{Any}) = map(s -> packed(s, arrays), structure)
packed(::Nothing, arrays::Vector{Any}) = nothing

"""
    source(compiled)

The tapes made so far as straight-line code, for reading.
"""
function source(compiled::Compiled)
    isempty(compiled.tapes) &&
        throw(ReplayError("the function has not been called yet, so nothing is compiled; call it first"))
    return join(["# $(join(["$T$n" for (n, T) in key], ", "))\n$(source(tape))" for (key, (tape, _)) in compiled.tapes],
        "\n\n")
end
