# Copies: part of the graph wherever a derivative may be asked for, or an error; never values that lost it unnoticed.

"""Whether a derivative through this tensor may be asked for, also where it is computed again and so not in the graph yet."""
depends_on_variables(x::Tensor) = x.requires_grad ||
    (x.op !== nothing && x.eltype in FLOATS && any(y -> y.requires_grad, topological_sort(x)))

"""Whether a copy has to be an op: of a leaf outside of all transforms it is a leaf."""
is_followed(x::Tensor) = x.data === nothing || (depends_on_variables(x) && (x.op !== nothing || inside_transform()))

function lost(what::String, instead::String)
    throw(NotDifferentiableError("$what: the derivative of this tensor would be lost; $instead"))
end

"""The values as an array of the caller's own; refused where a transform differentiates them."""
function copied_out(what::String, x::Tensor)
    x.data !== nothing && (inside_transform() && depends_on_variables(x) || depends_on_duals(Tensor[x])) &&
        lost(what, "use the tensor itself, copy(x) for a copy, or value(x) if only the values are wanted")
    x.data === nothing && value(x)
    return copy(array(x.data::Memory))
end

Base.Array(x::Tensor) = copied_out("Array", x)
Base.collect(x::Tensor) = copied_out("collect", x)
Base.Vector(x::Tensor) = convert(Vector, copied_out("Vector", x))
Base.Matrix(x::Tensor) = convert(Matrix, copied_out("Matrix", x))
Array{T}(x::Tensor) where {T} = convert(Array{T}, copied_out("Array", x))
Array{T,N}(x::Tensor) where {T,N} = convert(Array{T,N}, copied_out("Array", x))
Base.convert(::Type{A}, x::Tensor) where {A<:Array} = convert(A, copied_out("convert", x))

function Tensor(x::Tensor; requires_grad::Bool=false, name::AbstractString="")
    if is_followed(x)
        requires_grad || return IDENTITY(x)
        lost("Variable", "it is part of a graph, which a new variable would cut; use the tensor itself, or Variable(value(x))")
    end
    return Tensor(value(x); requires_grad=requires_grad, name=name)
end

Constant(x::Tensor; name::AbstractString="") = is_followed(x) ?
    lost("Constant", "use the tensor itself, or stop_gradient(x) if it is to count as a constant") :
    Tensor(value(x); name=name)

# deepcopy also reaches tensors within containers and the user's own types.

function Base.deepcopy_internal(x::Tensor, known::IdDict)
    haskey(known, x) && return known[x]::Tensor
    is_followed(x) && return known[x] = COPY(x)
    m = x.data::Memory
    whole = m.root isa Array && array(m) === m.root  # then what shares the array keeps sharing its copy
    values = whole ? Base.deepcopy_internal(m.root, known) : copy(array(m))
    copied = leaf(Memory(values), x.eltype, copy(x.dims), x.requires_grad, x.name)
    copied.grad = Base.deepcopy_internal(x.grad, known)
    copied.literal, copied.row = x.literal, x.row
    return known[x] = copied
end

# Ops are known by their identity.
Base.deepcopy_internal(op::Op, ::IdDict) = op

Base.deepcopy_internal(::Memory, ::IdDict) = throw(ReplayError(
    "a tape is bound to its memory and cannot be copied; compile the function again, or make a new trainer"))

Base.deepcopy_internal(f::Compiled, known::IdDict) =
    get!(() -> compile(Base.deepcopy_internal(f.f, known); techniques=f.techniques), known, f)::Compiled

# Memory is an address, which means nothing in another process, or later: what holds one is not serialized.

Serialization.serialize(::Serialization.AbstractSerializer, x::Tensor) = is_followed(x) ?
    lost("serialize", "serialize value(x) if only the values are wanted") :
    throw(ConfigurationError("serialize: a tensor is memory of this process; serialize value(x), or of a chain " *
        "as_dict(parameters)"))
Serialization.serialize(::Serialization.AbstractSerializer, ::Memory) = throw(ConfigurationError(
    "serialize: a tape, a trainer or a chain is bound to memory of this process; serialize value(x) of a tensor, or of a chain " *
    "as_dict(parameters)"))
Serialization.serialize(::Serialization.AbstractSerializer, ::Compiled) = throw(ConfigurationError(
    "serialize: a compiled function is bound to memory of this process; serialize the function, and compile it again"))
