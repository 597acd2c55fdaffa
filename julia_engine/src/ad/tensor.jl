# The tensor: an array that remembers how it was computed.
#
# A tensor is also the node of the computation graph (the papers' GraphNode): it holds the op, the inputs and the op's
# attributes that produced it. A concrete tensor has data; a symbolic one, made while a function is traced, has only
# dimensions and an element type.

"""A node of a computation graph; all nodes are of one type, [`Tensor`](@ref)."""
abstract type GraphNode end

"""What a node does: one record per operation, [`Op`](@ref), in `TABLE`."""
abstract type Operator end

"""Element types that have derivatives."""
const FLOATS = (Float32, Float64)
is_float(@nospecialize(T)) = T === Float32 || T === Float64

"""A number with partial derivatives of forward mode; all are of one type, [`Dual`](@ref)."""
abstract type DualNumber <: Real end
is_dual(@nospecialize(x)) = x isa DualNumber || x isa AbstractArray{<:DualNumber}

"""
    attributes(name => value, ...)

An op's attributes, read by name: `attrs.axes`. Nobody changes them.
"""
mutable struct Attributes
    pairs::Vector{Pair{Symbol,Any}}
end
attributes(@nospecialize(pairs...)) = Attributes(Pair{Symbol,Any}[pair for pair in pairs])

"""The pairs of name and value, in order."""
pairs_of(attrs::Attributes) = getfield(attrs, :pairs)
has_attribute(attrs::Attributes, name::Symbol) = any(pair -> pair.first === name, pairs_of(attrs))

function Base.getproperty(attrs::Attributes, name::Symbol)
    for pair in pairs_of(attrs)
        pair.first === name && return pair.second
    end
    throw(ConfigurationError("the op has no attribute \"$name\", but $(join(first.(pairs_of(attrs)), ", "))"))
end

Base.isempty(attrs::Attributes) = isempty(pairs_of(attrs))
Base.:(==)(a::Attributes, b::Attributes) = pairs_of(a) == pairs_of(b)

"""The same attributes and one more, or only those of these names."""
with(attrs::Attributes, @nospecialize(pair)) = Attributes(Pair{Symbol,Any}[pairs_of(attrs); pair])
changed(attrs::Attributes, @nospecialize(pair)) =
    Attributes(Pair{Symbol,Any}[old.first === pair.first ? pair : old for old in pairs_of(attrs)])
subset(attrs::Attributes, names::Vector{Symbol}) = Attributes(filter(pair -> pair.first in names, pairs_of(attrs)))

"""
    Tensor

An array with a derivative. Make one with [`Variable`](@ref) (it has a gradient) or [`Constant`](@ref).

- `grad`: what `backward!` has added up, an array, or `nothing`.
- `requires_grad`: whether `backward!` stores a gradient here and ops on it build a graph.
- `name`, `scope`: for messages: the user's name, and the layer whose op made it.
- `literal`: a number written in the program, which never changes, so that graphs may fold it.
- `results`: all results of its op, in order, where that has several; else empty.
- `row`: whether it is the transpose of a vector, of size (1, n): its product with a vector is a number, as Julia's.
- `level`: of the last transform to begin whose variables it depends on; 0 for a constant, 1 for what depends on variables
  alone. See [`gradients`](@ref).
- `number`: tensors are counted as they are made; equal numbers are possible, 2^32 tensors apart. See [`TensorDict`](@ref).
- `stamps`: checksums of the arrays that its derivative reads, as they were when it was computed: [`stamp`](@ref).
"""
mutable struct Tensor <: GraphNode
    data::Union{Nothing,Memory}
    eltype::DataType
    dims::Vector{Int}
    op::Union{Nothing,Operator}
    inputs::Vector{Tensor}
    attrs::Attributes
    requires_grad::Bool
    literal::Bool  # beside the others, since lone ones would make every tensor a size class larger
    row::Bool
    number::UInt32  # here for the same reason
    grad::Any
    name::String
    scope::String
    stamps::Vector{UInt64}
    level::Int
    results::Vector{Tensor}
    Tensor(data::Union{Nothing,Memory}, @nospecialize(T::DataType), dims::Vector{Int}, op, inputs::Vector{Tensor},
        attrs::Attributes, requires_grad::Bool, grad, name::String, scope::String, literal::Bool) =
        new(data, T, dims, op, inputs, attrs, requires_grad, literal, false, next_number(), grad, name, scope, NO_STAMPS,
            Int(requires_grad), NO_INPUTS)
end

const NO_STAMPS = UInt64[]

const NUMBERS = Threads.Atomic{UInt32}(0)
next_number() = Threads.atomic_add!(NUMBERS, UInt32(1))

"""The tensor that stands for an op of a graph: its result, or the first one of several."""
node_of(x::Tensor) = isempty(x.results) ? x : x.results[1]

"""All results of a tensor's op, itself among them."""
results_of(x::Tensor) = isempty(x.results) ? Tensor[x] : x.results

"""The levels of transforms, in the order in which they begin; 1 is that of `backward!`."""
const LEVELS = Threads.Atomic{Int}(2)
next_level() = Threads.atomic_add!(LEVELS, 1)

const NO_INPUTS = Tensor[]
const NO_ATTRS = attributes()
"""Of what was computed from variables by an op that no derivative passes, and of what follows from that: no node of a graph."""
const FROZEN = attributes(:frozen => true)
is_frozen(x::Tensor) = x.op === nothing && x.attrs === FROZEN

# Leaves ---------------------------------------------------------------------------------------------------------------

"""An array whose memory the engine can use in place: itself where possible, else a copy."""
kept(x::StridedArray{T}) where {T<:Union{Float32,Float64,Int64}} = x
kept(x::AbstractArray{T}) where {T<:Union{Float32,Float64,Int64}} = collect(x)
kept(x::AbstractArray{Bool}) = Array{Float64}(x)
kept(x::AbstractArray{<:Integer}) = Array{Int64}(x)
kept(x::AbstractArray) = throw(DTypeError(
    "tensors hold Float32, Float64 or Int64, got elements of $(eltype(x)); convert the array first"))
kept(x::AbstractFloat) = fill(x isa Float32 ? x : Float64(x))
kept(x::Real) = fill(Float64(x))

"""Refuse an array whose indices do not begin with 1, as a tensor's do: the same index would be another element."""
check_indices(@nospecialize(x)) = nothing
check_indices(x::AbstractArray) = Base.has_offset_axes(x) && throw(ShapeError(
    "the indices of tensors begin with 1, got a $(typeof(x)) with the axes $(axes(x)); pass its elements, collect(x), and " *
    "change the indices"))

function leaf(data::Union{Nothing,Memory}, @nospecialize(T::DataType), dims::Vector{Int}, requires_grad::Bool, name::String)
    return Tensor(data, T, dims, nothing, NO_INPUTS, NO_ATTRS, requires_grad, nothing, name, "", false)
end

"""An array that a traced function captures and that was converted: by reference its changes could not be seen."""
struct Converted{A}
    source::A
    checksum::UInt64
end
Converted(source) = Converted(source, checksum(source))
is_unchanged(c::Converted) = checksum(c.source) == c.checksum

"""A checksum of the elements of any array and of its size."""
checksum(x::Array{T}) where {T} = isbitstype(T) ?
    GC.@preserve(x, mixed_bytes(Ptr{UInt8}(start_of(x)), sizeof(x))) + hash(size(x)) % UInt64 : checksum_of_elements(x)
checksum(x::BitArray) = checksum(x.chunks) + hash(size(x)) % UInt64
checksum(x::AbstractArray) = checksum_of_elements(x)
function checksum_of_elements(x::AbstractArray)
    total, i = hash(size(x)) % UInt64, 0
    for v in x
        total += Kernels.mixed((hash(v)::UInt) % UInt64, i += 1)
    end
    return total
end

"""A constant of `array`, which was made of `source`."""
function converted(array, source)
    check_indices(source)
    x = Constant(array)
    remember!(x, array, source)
    return x
end

function remember!(x::Tensor, @nospecialize(array), @nospecialize(source))
    array === source || !state().symbolic || !(source isa AbstractArray) || source isa AbstractRange ||
        isbits(source) || (x.attrs = attributes(:converted => Converted(source)))
    return x
end

"""
    Tensor(x; requires_grad=false, name="")

An array or number as a leaf of graphs. The array is kept by reference, not copied, wherever its layout permits.
"""
function Tensor(@nospecialize(x::Union{Real,AbstractArray}); requires_grad::Bool=false, name::AbstractString="")
    check_indices(x)
    array_ = kept(x)
    data = Memory(array_)
    if requires_grad && !(data.eltype in FLOATS)
        throw(DTypeError("only Float32 and Float64 tensors have a gradient, this one is of $(data.eltype); " *
                         "convert it first, for example with Float32.(x)"))
    end
    return remember!(leaf(data, data.eltype, data.dims, requires_grad, String(name)), array_, x)
end

"""
    Variable(x; name="")

A leaf with a gradient: `backward!` adds to its `.grad`. The array is kept by reference.
"""
Variable(x; name::AbstractString="") = Tensor(x; requires_grad=true, name=name)

"""
    Constant(x; name="")

A leaf without a gradient. The array is kept by reference.
"""
Constant(x; name::AbstractString="") = Tensor(x; requires_grad=false, name=name)

"""The values of a tensor as a constant without a history."""
function detached(x::Tensor)
    x.data === nothing && value(x)  # which raises
    return leaf(x.data, x.eltype, x.dims, false, x.name)
end

"""A tensor without data: an input of a program."""
symbol(@nospecialize(T::DataType), dims::Vector{Int}, name::AbstractString="") =
    leaf(nothing, T, dims, T in FLOATS, String(name))

"""A number written in the program."""
function literal(@nospecialize(T::DataType), x::Real)
    data = new_memory(T, Int[])
    fill!(data.root, x)
    t = leaf(data, T, data.dims, false, "")
    t.literal = true
    return t
end

# What it is -----------------------------------------------------------------------------------------------------------

Base.size(x::Tensor) = Tuple(x.dims)
Base.size(x::Tensor, d::Integer) = d <= length(x.dims) ? x.dims[d] : 1
Base.ndims(x::Tensor) = length(x.dims)
Base.length(x::Tensor) = prod(x.dims)
Base.eltype(x::Tensor) = x.eltype
Base.axes(x::Tensor) = map(Base.OneTo, size(x))
Base.axes(x::Tensor, d::Integer) = Base.OneTo(size(x, d))
Base.firstindex(x::Tensor) = 1
Base.lastindex(x::Tensor) = length(x)
Base.firstindex(x::Tensor, d::Integer) = 1
Base.lastindex(x::Tensor, d::Integer) = size(x, d)
Base.iterate(x::Tensor, i::Int=1) = i > length(x) ? nothing : (x[i], i + 1)
# Comprehensions and `map` keep the size, as of arrays. Iteration itself says no size, so that tensors may be splatted.
Base.collect(g::Base.Generator{Tensor}) = reshape(invoke(collect, Tuple{Base.Generator}, g), size(g.iter))
function Base.collect(g::Base.Generator{<:Iterators.Zip{<:Tuple{Tensor,Vararg{Tensor}}}})
    found, tensors = invoke(collect, Tuple{Base.Generator}, g), tensors_of(g.iter)
    return all(x -> x.dims == tensors[1].dims, tensors) ? reshape(found, size(tensors[1])) : found
end
tensors_of(zipped::Iterators.Zip) = zipped.is

"""
    value(x::Tensor)

The array itself where the tensor was made of all of it; a copy where the tensor was computed and can be differentiated: a
gradient may still need what the op computed.

Throws a `TraceError` when the tensor is symbolic: its values exist only when the traced function is replayed.
"""
function value(x::Tensor)
    x.data === nothing && throw(TraceError(
        "a value is needed here, but the function is being traced and only shapes are known; use ops such as choose(), " *
        "or branch(), while_loop() and scan(), instead of branches and loops on values, or call the function eagerly"))
    found = array(x.data::Memory)
    return x.op === nothing ? found : copy(found)
end
value(x) = x

"""
    item(x::Tensor)

The only element as a number.
"""
function item(x::Tensor)
    length(x) == 1 || throw(ShapeError("item: expected one element, got an array of size $(size(x))"))
    x.data === nothing && value(x)
    return array(x.data::Memory)[1]
end

"""
    detach(x::Tensor)

The same values as a constant: no gradient flows through it.
"""
Base.detach(x::Tensor) = STOP_GRADIENT(x)

"""
    assign!(x::Tensor, values)

Copy `values` into a leaf in place, so that compiled functions that captured it see them, and [`forward!`](@ref) where it is a
[`Variable`](@ref): what ops have computed from constants alone stays as it is.
"""
function assign!(x::Tensor, values)
    x.op === nothing || throw(TraceError("assign! works on leaf tensors, this one was computed by $(x.op.name)"))
    source = Tensor(values)
    source.dims == x.dims || length(source) == 1 ||
        throw(ShapeError("assign!: expected an array of size $(size(x)), got $(size(source))"))
    source.eltype === x.eltype || (source = Tensor(x.eltype.(values)))
    into, from = x.data::Memory, source.data::Memory
    for m in (into, from)
        is_there(m) || throw(InPlaceError("assign!: an array of $(m.eltype) of size $(Tuple(m.dims)) $RESIZED"))
    end
    if share_bytes(extent(into), extent(from))  # such as the tensor's own elements in another order
        copied = new_memory(from.eltype, from.dims)
        copy_memory!(copied, from)
        from = copied
    end
    copy_memory!(into, from)
    return x
end

Base.Float64(x::Tensor) = as_number(Float64, x)
Base.Float32(x::Tensor) = as_number(Float32, x)
Base.Int64(x::Tensor) = Int64(item(x))

function as_number(T::DataType, x::Tensor)
    (state().differentiating && depends_on_variables(x) || x.requires_grad && depends_on_duals(Tensor[x])) && throw(NotDifferentiableError(
        "a $T of this tensor would lose its derivative; use item() if only the value is wanted, or the tensor itself"))
    return T(item(x))
end

function Base.show(io::IO, x::Tensor)
    print(io, "Tensor(")
    if x.data === nothing
        print(io, "symbolic ", x.eltype, size(x))
    else
        show(IOContext(io, :limit => true, :compact => true), value(x))
    end
    x.op === nothing || print(io, ", op=", x.op.name)
    print(io, ")")
end
