# Operators on tensors, by Julia's own rules: `*` is the matrix product, `+` wants equal sizes, dots are elementwise.

const Scalar = Union{Real,Tensor}  # a tensor stands for a number where it has no dimensions

is_scalar(x::Tensor) = isempty(x.dims)
is_scalar(x::Real) = true
is_scalar(x) = false

"""Whether it is the transpose of a vector, and not just a matrix of one row."""
is_row(x::Tensor) = x.row
is_row(x::Union{Adjoint{<:Any,<:AbstractVector},Transpose{<:Any,<:AbstractVector}}) = true
is_row(x) = false

"""A result, which is the transpose of a vector if `row` says so, as Julia's operators keep that."""
as_row(y::Tensor, row::Bool) = (y.row = row; y)
as_row(y, row::Bool) = y

"""These operands, made as tensors, which are transposes of vectors where the operands are."""
function as_rows(operands, tensors::Vector{Tensor})
    for (x, t) in zip(operands, tensors)
        is_row(x) && as_row(t, true)
    end
    return tensors
end

row_or_matrix(row::Bool) = row ? "the transpose of a vector" : "a matrix of one row"

same_size(name, a, b) = is_scalar(a) || is_scalar(b) || size(a) == size(b) || throw(ShapeError(
    "$name: sizes $(size(a)) and $(size(b)) differ; use .$name for elementwise broadcasting"))

sum_by(op, name, a, b) = (same_size(name, a, b); as_row(op(a, b), is_row(a) && is_row(b)))
for (f, op) in ((:+, :ADD), (:-, :SUB))
    @eval Base.$f(a::Tensor, b::Tensor) = sum_by($op, $(string(f)), a, b)
    @eval Base.$f(a::Tensor, b::Union{Real,AbstractArray}) = sum_by($op, $(string(f)), a, b)
    @eval Base.$f(a::Union{Real,AbstractArray}, b::Tensor) = sum_by($op, $(string(f)), a, b)
end
Base.:+(a::Tensor) = a
Base.:-(a::Tensor) = as_row(NEG(a), a.row)
product(a, b) = is_scalar(a) || is_scalar(b) ? as_row(MUL(a, b), is_row(a) || is_row(b)) : matmul(a, b)
Base.:*(a::Tensor, b::Tensor) = product(a, b)
Base.:*(a::Tensor, b::Union{Real,AbstractArray}) = product(a, b)
Base.:*(a::Union{Real,AbstractArray}, b::Tensor) = product(a, b)
Base.:/(a::Tensor, b::Scalar) = quotient(a, b)
Base.:/(a::Union{Real,AbstractArray}, b::Tensor) = quotient(a, b)
function quotient(a, b)
    is_scalar(b) && return as_row(DIV(a, b), is_row(a))
    if ndims(a) == ndims(b) == 2  # a b⁻¹
        x, y = as_tensors((a, b))
        return transpose(turned_over(y) \ transpose(as_row(x, is_row(a))))
    end
    throw(ShapeError("/: expected a number to divide by, got an array of size $(size(b)); use ./"))
end
Base.:^(a::Tensor, b::Scalar) = power(a, b)
Base.:^(a::Tensor, b::Integer) = ndims(a) == 2 ? matrix_power(a, b) : power(a, b)
Base.:^(a::Real, b::Tensor) = power(a, b)
power(a, b) = is_scalar(a) && is_scalar(b) ? elementwise_power(a, b) :
    throw(ShapeError("^: expected numbers, got arrays; use .^"))
Base.literal_pow(::typeof(^), a::Tensor, ::Val{P}) where {P} = a^P

# Dots: every dotted call is one op at once, so that `sin.(x .* y)` is two nodes of the graph. ----------------------------

struct TensorStyle <: Base.Broadcast.BroadcastStyle end
Base.BroadcastStyle(::Type{Tensor}) = TensorStyle()
Base.BroadcastStyle(::TensorStyle, ::Base.Broadcast.BroadcastStyle) = TensorStyle()
Base.BroadcastStyle(::TensorStyle, ::Base.Broadcast.Unknown) = TensorStyle()
Base.broadcastable(x::Tensor) = x
Base.Broadcast.materialize(x::Tensor) = x

"""Julia's functions with the op, or function, that stands in for each when it is dotted over tensors."""
const DOTTED = IdDict{Any,Any}()

Base.Broadcast.broadcasted(::TensorStyle, @nospecialize(f), @nospecialize(args...)) = dotted(f, args)

function dotted(@nospecialize(f), @nospecialize(args::Tuple))
    operands = Vector{Any}(undef, length(args))
    for i in eachindex(operands)
        a = args[i]
        operands[i] = a isa Tensor ? a : draws(a) ? drawn(a, args) : plain(a)
    end
    any(x -> x isa Elements, operands) && return of_elements((xs...) -> dotted(f, xs), operands)
    f === Base.literal_pow && return elementwise_power(operands[2], value_of(operands[3]))
    stand_in = get(DOTTED, f, nothing)
    stand_in === nothing && return generic(f, operands, args)
    return stand_in(operands...)
end

plain(x::Base.RefValue) = x[]
plain(x::Base.Broadcast.Broadcasted) = Base.Broadcast.materialize(x)
plain(x::Tuple) = collect(x)
plain(x) = x
value_of(::Val{P}) where {P} = P

"""
Whether a dotted expression without tensors calls a function without arguments, as `randn.()` does, or draws otherwise: Julia
does so for each element.
"""
draws(x::Base.Broadcast.Broadcasted) = isempty(x.args) || x.f === rand || x.f === randn || any(draws, x.args)
draws(x) = false

"""What it gives for each element of the whole; these are numbers, and so take the float type of the tensors."""
function drawn(x::Base.Broadcast.Broadcasted, @nospecialize(args::Tuple))
    found = broadcast((_, v) -> v, CartesianIndices(Base.Broadcast.combine_axes(args...)), x)
    return eltype(found) <: AbstractFloat ? float_type(args).(found) : found
end

"""How many functions have been dotted over tensors."""
const RUNS = Threads.Atomic{Int}(1)

function generic(@nospecialize(f), operands::Vector{Any}, @nospecialize(args))
    # What holds something, such as sin ∘ cos or >(0), is run as the user's functions are.
    holds = !(f isa Type) && (!(f isa Function) || fieldcount(typeof(f)) > 0)
    holds || parentmodule(f) in (Base, Core, Base.Math) && no_op(f)
    # A function of the user's own, such as x -> x^2 + sin(x): run it once, on numbers that stand for all elements.
    run, draws_before = Threads.atomic_add!(RUNS, 1), Versions.random_state()
    T = float_type(Any[x for (x, a) in zip(operands, args) if varies(x, a)])
    result = try
        f((varies(x, a) ? Elements(as_tensor(x, T), run) : x for (x, a) in zip(operands, args))...)
    catch error
        error isa MethodError && no_op(error.f)
        error isa StackOverflowError && no_op(f)
        error isa TypeError && error.got isa Elements && throw(TraceError("a function that is dotted over a tensor runs once for " *
            "all elements, so it cannot branch on their values; use ifelse.(condition, a, b)"))
        rethrow()
    end
    # It may not depend on all operands, whose sizes the result has all the same.
    arrays = Tensor[as_tensor(x, T) for (x, a) in zip(operands, args) if varies(x, a)]
    Versions.random_state() == draws_before || !any(is_array, arrays) || throw(TraceError("a function that is dotted over a tensor, or " *
        "given to sum, mean and the like, runs once for all elements, so that it would draw one random number for all of them; draw " *
        "before, for example x .* randn(size(x)...), or with randn.() among the dots"))
    floats = filter(x -> x.eltype <: AbstractFloat, arrays)
    result isa Elements && is_array(result.tensor) && result.run != run && throw(once_for_all("the elements of another one"))
    is_array(result) && any(is_array, arrays) && throw(once_for_all("a whole array, of size $(size(result)),"))
    found = result isa Elements ? result.tensor : result isa Real && !isempty(floats) ? literal(floats[1].eltype, result) : as_tensor(result)
    return spread_to(found, broadcast_dims(push!(arrays, found)))
end

"""Whether an operand has elements that the function is called with, and is not given to all calls by a `Ref`."""
varies(@nospecialize(x), @nospecialize(given)) = (x isa Tensor || x isa AbstractArray) && !(given isa Base.RefValue)

no_op(@nospecialize(f)) = throw(NotDifferentiableError(
    "$f is not in the op table, so its derivative would be lost; use an op of TwinGrad, or call it on value(x)"))

"""A tensor that behaves like a number, so that a scalar function can be dotted over it: `(x -> x^2 + 1).(t)`."""
struct Elements <: Real
    tensor::Tensor
    run::Int  # of the dotted function that it is an argument of; those of different runs are not elements of one array
    Elements(tensor::Tensor, run::Int) = new(tensor, run)  # of nothing else: Base converts to other numbers by their constructors
end
Tensor(x::Elements) = x.tensor

"""A function of tensors applied to elements, and to single numbers beside them that a dotted function captures."""
function of_elements(@nospecialize(f), @nospecialize(operands))
    run = 0
    for x in operands
        x isa Elements && ndims(x.tensor) > 0 || continue
        run in (0, x.run) || throw(once_for_all("the elements of another one"))
        run = x.run
    end
    y = f((x isa Elements ? x.tensor : x for x in operands)...)
    arrays = filter(is_array, collect(Any, operands))
    isempty(arrays) && return Elements(as_tensor(y), run)
    run == 0 || throw(once_for_all("a whole array, of size $(size(arrays[1])),"))
    return y  # of single numbers: the function is called as Julia does it
end

is_array(@nospecialize(x)) = (x isa Tensor || x isa AbstractArray) && ndims(x) > 0
once_for_all(what::String) = TraceError("a function that is dotted over a tensor, or given to sum, mean and the like, runs once for " *
    "all elements, so that it cannot compute with $what for each of them; broadcast over another axis, or use vmap")
for f in (:+, :-, :*, :/, :^, :max, :min, :<, :<=, :>, :>=, :(==), :!=, :atan, :hypot, :fld, :mod, :rem)
    @eval Base.$f(a::Elements, b::Elements) = of_elements(DOTTED[$f], (a, b))
    for T in (:AbstractFloat, :Integer, :Rational, :AbstractIrrational)  # one by one: fewer, wider methods would be ambiguous with Base's
        @eval Base.$f(a::Elements, b::$T) = of_elements(DOTTED[$f], (a, b))
        @eval Base.$f(a::$T, b::Elements) = of_elements(DOTTED[$f], (a, b))
    end
end
Base.:-(a::Elements) = of_elements(DOTTED[-], (a,))
Base.:^(::Irrational{:ℯ}, b::Elements) = of_elements(EXP, (b,))
Base.zero(a::Elements) = of_elements(x -> literal(x.eltype, 0), (a,))
Base.one(a::Elements) = of_elements(x -> literal(x.eltype, 1), (a,))
@static if Versions.IFELSE_TAKES_METHODS
    Base.ifelse(c::Elements, a::Real, b::Real) = of_elements(choose, (c, a, b))
end
Base.literal_pow(::typeof(^), a::Elements, ::Val{P}) where {P} = of_elements(x -> elementwise_power(x, P), (a,))
Base.promote_rule(::Type{Elements}, ::Type{<:Real}) = Elements
