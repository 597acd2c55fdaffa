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

"""A number with partial derivatives of forward mode; all are of one type, [`Dual`](@ref)."""
abstract type DualNumber <: Real end
is_dual(@nospecialize(x)) = x isa DualNumber || x isa AbstractArray{<:DualNumber}

"""
    Tensor

An array with a derivative. Make one with [`Variable`](@ref) (it has a gradient) or [`Constant`](@ref).

- `grad`: what `backward!` has added up, an array, or `nothing`.
- `requires_grad`: whether `backward!` stores a gradient here and ops on it are recorded.
- `name`, `scope`: for messages: the user's name, and the layer whose op made it.
- `literal`: a number written in the program, which never changes, so that graphs may fold it.
- `level`: of the last transform to begin whose variables it depends on; 0 for a constant, 1 for what depends on variables
  alone. See [`gradients`](@ref).
- `stamps`: checksums of the arrays that its derivative reads, as they were when it was computed: [`stamp`](@ref).
"""
mutable struct Tensor <: GraphNode
    data::Union{Nothing,Memory}
    eltype::DataType
    dims::Vector{Int}
    op::Union{Nothing,Operator}
    inputs::Vector{Tensor}
    attrs::Vector{Any}
    requires_grad::Bool
    grad::Any
    name::String
    scope::String
    literal::Bool
    stamps::Vector{UInt64}
    level::Int
end
Tensor(data::Union{Nothing,Memory}, @nospecialize(T::DataType), dims::Vector{Int}, op, inputs::Vector{Tensor},
    attrs::Vector{Any}, requires_grad::Bool, grad, name::String, scope::String, literal::Bool) =
    Tensor(data, T, dims, op, inputs, attrs, requires_grad, grad, name, scope, literal, NO_STAMPS,
        Int(requires_grad))

const NO_STAMPS = UInt64[]

"""The levels of transforms, in the order in which they begin; 1 is that of `backward!`."""
const LEVELS = Threads.Atomic{Int}(2)
next_level() = Threads.atomic_add!(LEVELS, 1)

const NO_INPUTS = Tensor[]
const NO_ATTRS = Any[]

# What the engine is doing in this task.
mutable struct State
    trace::Union{Nothing,Vector{Tensor}}  # while a function is traced: its ops so far, all symbolic
    recording::Bool  # ops made now can be differentiated
    differentiating::Bool  # inside a function that grad() was given
    scope::String  # the layer whose ops are being made
    made::Union{Nothing,Vector{Tensor}}  # where somebody asked for them: all results of ops, whether recorded or not
    constants::Set{Tensor}  # those of them that the user's function made under no_grad()
    reuse::Union{Nothing,Reuse}  # while the rule of a gradient runs: memory for its values
    mixed::Bool  # whether a dual number has met a tensor in this task
end
new_state() = State(nothing, true, false, "", nothing, Set{Tensor}(), nothing, false)
state() = get!(new_state, task_local_storage(), :TwinGrad)::State

"""
    scope(f, name)

Run `f()` and label the ops made inside with the layer `name`; nested scopes are joined by a slash.
"""
function scope(@nospecialize(f), name::AbstractString)
    now = state()
    outer = now.scope
    now.scope = isempty(outer) ? String(name) : string(outer, "/", name)
    try
        return f()
    finally
        now.scope = outer
    end
end

"""
    no_grad(f)

Run `f()` without recording: results made inside cannot be differentiated, nor can dual numbers that it returns.
"""
function no_grad(@nospecialize(f))
    now = state()
    made = now.made
    before = made === nothing ? 0 : length(made)
    try
        return without_duals(unrecorded(f))
    finally
        made === nothing || union!(now.constants, made[before+1:end])
    end
end

"""`no_grad` of the engine's own, which says nothing about what the user's function means."""
function unrecorded(@nospecialize(f))
    now = state()
    outer = now.recording
    now.recording = false
    try
        return f()
    finally
        now.recording = outer
    end
end

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
    GC.@preserve(x, mixed_bytes(Ptr{UInt8}(pointer(x)), sizeof(x))) + hash(size(x)) % UInt64 : checksum_of_elements(x)
checksum(x::BitArray) = checksum(x.chunks) + hash(size(x)) % UInt64
checksum(x::AbstractArray) = checksum_of_elements(x)
function checksum_of_elements(x::AbstractArray)
    total, i = hash(size(x)) % UInt64, 0
    for v in x
        total += Kernels.mixed(hash(v) % UInt64, i += 1)
    end
    return total
end

"""A constant of `array`, which was made of `source`."""
function converted(array, source)
    x = Constant(array)
    remember!(x, array, source)
    return x
end

function remember!(x::Tensor, @nospecialize(array), @nospecialize(source))
    array === source || state().trace === nothing || !(source isa AbstractArray) || source isa AbstractRange ||
        isbits(source) || (x.attrs = Any[Converted(source)])
    return x
end

"""
    Tensor(x; requires_grad=false, name="")

An array or number as a leaf of graphs. The array is kept by reference, not copied, wherever its layout permits.
"""
function Tensor(@nospecialize(x::Union{Real,AbstractArray}); requires_grad::Bool=false, name::AbstractString="")
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

"""A tensor without data: an input of a graph that is being traced."""
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

"""
    value(x::Tensor)

The array itself where the tensor was made of all of it; a copy where the tensor was computed and can be differentiated: a
gradient may still need what the op computed.

Throws a `TraceError` when the tensor is symbolic: its values exist only when the traced function is replayed.
"""
function value(x::Tensor)
    x.data === nothing && throw(TraceError(
        "a value is needed here, but the function is being traced and only shapes are known; use ops such as choose() " *
        "instead of branches on values, or call the function eagerly"))
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

Copy `values` into a leaf in place, so that compiled functions that captured it see them.
"""
function assign!(x::Tensor, values)
    x.op === nothing || throw(TraceError("assign! works on leaf tensors, this one was computed by $(x.op.name)"))
    source = Tensor(values)
    source.dims == x.dims || length(source) == 1 ||
        throw(ShapeError("assign!: expected an array of size $(size(x)), got $(size(source))"))
    source.eltype === x.eltype || (source = Tensor(x.eltype.(values)))
    copy_memory!(x.data::Memory, source.data::Memory)
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

# Operators: Julia's own rules. `*` is the matrix product, `+` wants equal sizes, dots are elementwise. ------------------

const Scalar = Union{Real,Tensor}  # a tensor stands for a number where it has no dimensions

is_scalar(x::Tensor) = isempty(x.dims)
is_scalar(x::Real) = true
is_scalar(x) = false

same_size(name, a, b) = is_scalar(a) || is_scalar(b) || size(a) == size(b) || throw(ShapeError(
    "$name: sizes $(size(a)) and $(size(b)) differ; use .$name for elementwise broadcasting"))

for (f, op) in ((:+, :ADD), (:-, :SUB))
    @eval Base.$f(a::Tensor, b::Tensor) = (same_size($(string(f)), a, b); $op(a, b))
    @eval Base.$f(a::Tensor, b::Union{Real,AbstractArray}) = (same_size($(string(f)), a, b); $op(a, b))
    @eval Base.$f(a::Union{Real,AbstractArray}, b::Tensor) = (same_size($(string(f)), a, b); $op(a, b))
end
Base.:+(a::Tensor) = a
Base.:-(a::Tensor) = NEG(a)
product(a, b) = is_scalar(a) || is_scalar(b) ? MUL(a, b) : matmul(a, b)
Base.:*(a::Tensor, b::Tensor) = product(a, b)
Base.:*(a::Tensor, b::Union{Real,AbstractArray}) = product(a, b)
Base.:*(a::Union{Real,AbstractArray}, b::Tensor) = product(a, b)
Base.:/(a::Tensor, b::Scalar) = quotient(a, b)
Base.:/(a::Union{Real,AbstractArray}, b::Tensor) = quotient(a, b)
quotient(a, b) = is_scalar(b) ? DIV(a, b) :
    throw(ShapeError("/: expected a number to divide by, got an array of size $(size(b)); use ./"))
Base.:^(a::Tensor, b::Scalar) = power(a, b)
Base.:^(a::Tensor, b::Integer) = power(a, b)
Base.:^(a::Real, b::Tensor) = power(a, b)
power(a, b) = is_scalar(a) && is_scalar(b) ? elementwise_power(a, b) :
    throw(ShapeError("^: expected numbers, got arrays; use .^"))
Base.literal_pow(::typeof(^), a::Tensor, ::Val{P}) where {P} = power(a, P)

# Dots: every dotted call is one op at once, so that `sin.(x .* y)` is two nodes of the graph. ----------------------------

struct TensorStyle <: Base.Broadcast.BroadcastStyle end
Base.BroadcastStyle(::Type{Tensor}) = TensorStyle()
Base.BroadcastStyle(::TensorStyle, ::Base.Broadcast.BroadcastStyle) = TensorStyle()
Base.broadcastable(x::Tensor) = x
Base.Broadcast.materialize(x::Tensor) = x

"""Julia's functions with the op, or function, that stands in for each when it is dotted over tensors."""
const DOTTED = IdDict{Any,Any}()

Base.Broadcast.broadcasted(::TensorStyle, @nospecialize(f), @nospecialize(args...)) = dotted(f, args)

function dotted(@nospecialize(f), @nospecialize(args))
    operands = Any[plain(a) for a in args]
    f === Base.literal_pow && return elementwise_power(operands[2], value_of(operands[3]))
    stand_in = get(DOTTED, f, nothing)
    stand_in === nothing && return generic(f, operands)
    return stand_in(operands...)
end

plain(x::Base.RefValue) = x[]
plain(x::Base.Broadcast.Broadcasted) = Base.Broadcast.materialize(x)
plain(x::Tuple) = collect(x)
plain(x) = x
value_of(::Val{P}) where {P} = P

function generic(@nospecialize(f), operands::Vector{Any})
    parentmodule(f) in (Base, Core, Base.Math) && no_op(f)
    # A function of the user's own, such as x -> x^2 + sin(x): run it once, on numbers that stand for all elements.
    result = try
        f((x isa Tensor || x isa AbstractArray ? Elements(as_tensor(x)) : x for x in operands)...)
    catch error
        error isa MethodError && no_op(error.f)
        error isa StackOverflowError && no_op(f)
        error isa TypeError && error.got isa Elements && throw(TraceError("a function that is dotted over a tensor runs once for " *
            "all elements, so it cannot branch on their values; use ifelse.(condition, a, b)"))
        rethrow()
    end
    return result isa Elements ? result.tensor : as_tensor(result)
end

no_op(@nospecialize(f)) = throw(NotDifferentiableError(
    "$f is not in the op table, so its derivative would be lost; use an op of TwinGrad, or call it on value(x)"))

"""A tensor that behaves like a number, so that a scalar function can be dotted over it: `(x -> x^2 + 1).(t)`."""
struct Elements <: Real
    tensor::Tensor
end
Tensor(x::Elements) = x.tensor
whole(x::Elements) = x.tensor
whole(x::Real) = x
for f in (:+, :-, :*, :/, :^, :max, :min, :<, :<=, :>, :>=, :(==), :!=)
    @eval Base.$f(a::Elements, b::Elements) = Elements(DOTTED[$f](a.tensor, b.tensor))
    for T in (:AbstractFloat, :Integer, :Rational)  # one by one: fewer, wider methods would be ambiguous with Base's
        @eval Base.$f(a::Elements, b::$T) = Elements(DOTTED[$f](a.tensor, b))
        @eval Base.$f(a::$T, b::Elements) = Elements(DOTTED[$f](a, b.tensor))
    end
end
Base.:-(a::Elements) = Elements(DOTTED[-](a.tensor))
"""Functions of one number that are ops when dotted, and that tensors without dimensions take as numbers do."""
const ON_NUMBERS = (:abs, :abs2, :sign, :sqrt, :inv, :exp, :expm1, :log, :log1p, :sin, :cos, :tan, :asin, :acos, :atan,
    :sinh, :cosh, :tanh)
for f in ON_NUMBERS
    @eval Base.$f(a::Elements) = Elements(DOTTED[$f](a.tensor))
end
@static if !(ifelse isa Core.Builtin)  # until Julia 1.6 it takes no methods
    Base.ifelse(c::Elements, a::Real, b::Real) = Elements(choose(whole(c), whole(a), whole(b)))
end
Base.literal_pow(::typeof(^), a::Elements, ::Val{P}) where {P} = Elements(elementwise_power(a.tensor, P))
Base.promote_rule(::Type{Elements}, ::Type{<:Real}) = Elements
