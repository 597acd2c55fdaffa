# Arithmetic and elementary functions, elementwise with Julia's broadcasting.
#
# Subgradients: ties in `max`, `min` share the gradient equally; `clamp` passes it on at its bounds; `abs`, `relu` and
# `sign` have derivative 0 at 0; `sqrt` has infinity there. Where `relu`, `max`, `min` or `clamp` is constant nothing passes,
# not even an infinite gradient: `relu(x)^1.5` has derivatives 0 of every order at x < 0.

# Arithmetic -----------------------------------------------------------------------------------------------------------

const ADD = elementwise("add", (y, a, b) -> 1, (y, a, b) -> 1; functions=(+,), scalar=:+, doc="a + b")
const SUB = elementwise("sub", (y, a, b) -> 1, (y, a, b) -> -1; functions=(-,), scalar=:-, doc="a - b")
const MUL = elementwise("mul", (y, a, b) -> b, (y, a, b) -> a; functions=(*,), scalar=:*, doc="a b")
const DIV = elementwise("div", (y, a, b) -> 1 ./ b, (y, a, b) -> .-y ./ b; functions=(/,), scalar=:/, doc="a / b")
const NEG = elementwise("neg", (y, x) -> -1; scalar=:-, doc="-x")
const SQUARE = elementwise("square", (y, x) -> 2 .* x; functions=(abs2,), scalar=:square, doc="x²")
const RECIPROCAL = elementwise("reciprocal", (y, x) -> NEG(SQUARE(y)); functions=(inv,), scalar=:inv, doc="1 / x")

# `+` and `*` take any number of operands, `-` one or two.
DOTTED[+] = (operands...) -> folded(ADD, operands)
DOTTED[*] = (operands...) -> folded(MUL, operands)
DOTTED[-] = (operands...) -> length(operands) == 1 ? NEG(operands[1]) : SUB(operands...)
DOTTED[\] = (a, b) -> DIV(b, a)

function folded(op::Op, @nospecialize(operands))
    tensors = as_tensors(operands)
    total = tensors[1]
    for x in tensors[2:end]
        total = apply(op, Tensor[total, x])
    end
    return total
end

function pow_base(y, x, p)
    if p.literal && !(item(p) in (0, 1))
        item(p) == 0.5 && return DIV(0.5, y)
        return MUL(p, item(p) == 2 ? x : elementwise_power(x, item(p) - 1))
    end
    # p x^(p-1), and 0 where p = 0 even at x = 0, where x^(p-1) is infinite.
    return MUL(p, POW(x, choose(EQUAL(p, 0), 1, SUB(p, 1))))
end

# In forward mode a base that does not move stays so, even where the derivative is infinite, as behind a constant relu.
pow_base_moved(t, p::Tensor) = t === nothing || p.literal && item(p) >= 1 && isinteger(item(p)) ? pow_base :
    (y, x, p) -> Where(NOT_EQUAL(t, 0), pow_base(y, x, p))

# y log x, and its limit 0 at x = 0 for p >= 0, where log x is infinite.
pow_exponent(y, x, p) = MUL(y, LOG(choose(MUL(EQUAL(x, 0), GREATER_EQUAL(p, 0)), 1, x)))

function forward_pow(p, out, inputs, attrs)
    exponent = inputs[2]
    # Only a number of the program may decide which instruction it is: others may change from replay to replay.
    attrs != NO_ATTRS && attrs[1] == 0.5 && return emit_elementwise!(p, :half_power, out, inputs[1:1])
    if attrs != NO_ATTRS && attrs[1] in (3.0, 4.0, 5.0)
        return emit_elementwise!(p, :whole_power, out, inputs[1:1], (Int(attrs[1]), 0, 0, 0))
    end
    return emit_elementwise!(p, :pow, out, inputs)
end

# Of single numbers: a whole exponent that the program writes is a product.
const WHOLE_POWERS = Dict(0.5 => :half_power, 3.0 => :third_power, 4.0 => :fourth_power, 5.0 => :fifth_power)
scalar_power(attrs) = attrs == NO_ATTRS ? :general_power : get(WHOLE_POWERS, attrs[1], :general_power)

const POW = register!(Op("pow", infer_elementwise; forward=forward_pow, backward=Any[
        partial_rule(pow_base), partial_rule(pow_exponent)],
    jvp=(t, y, inputs, attrs) -> partials_jvp((pow_base_moved(t[1], inputs[2]), pow_exponent), t, y, inputs), overwrites=[1, 2],
    elementwise=true, attrs=[:exponent], scalar=scalar_power, doc="x to the power p"))
DOTTED[^] = (x, p) -> elementwise_power(x, p)

"""x .^ p, by the cheapest op that gives it."""
function elementwise_power(@nospecialize(x), @nospecialize(p))
    if p isa Real && x isa Tensor && !(p isa DualNumber)
        p == 1 && return x
        p == 2 && return SQUARE(x)
        p == -1 && return RECIPROCAL(x)
        return apply(POW, as_tensors((x, p)), Any[Float64(p)])
    end
    return POW(x, p)
end

# Exponentials and logarithms ------------------------------------------------------------------------------------------

const EXP = elementwise("exp", (y, x) -> y; functions=(exp,), scalar=:fast_exp, doc="e to the x")
const EXPM1 = elementwise("expm1", (y, x) -> y .+ 1; functions=(expm1,), scalar=:fast_expm1, doc="exp(x) - 1, exact near 0")
const LOG = elementwise("log", (y, x) -> 1 ./ x; functions=(log,), scalar=:fast_log, doc="natural logarithm")
const LOG1P = elementwise("log1p", (y, x) -> 1 ./ (x .+ 1); functions=(log1p,), scalar=:fast_log1p, doc="log(1 + x), exact near 0")
const SQRT = elementwise("sqrt", (y, x) -> 0.5 ./ y; functions=(sqrt,), scalar=:fast_sqrt, doc="square root")

# Trigonometric and hyperbolic functions -------------------------------------------------------------------------------

const SIN = elementwise("sin", (y, x) -> COS(x); functions=(sin,), scalar=:any_sin, doc="sine")
const COS = elementwise("cos", (y, x) -> NEG(SIN(x)); functions=(cos,), scalar=:any_cos, doc="cosine")
const TAN = elementwise("tan", (y, x) -> 1 .+ SQUARE(y); functions=(tan,), scalar=:any_tan, doc="tangent")
const ARCSIN = elementwise("arcsin", (y, x) -> 1 ./ SQRT(1 .- SQUARE(x)); functions=(asin,), scalar=:plain_asin, doc="inverse sine")
const ARCCOS = elementwise("arccos", (y, x) -> -1 ./ SQRT(1 .- SQUARE(x)); functions=(acos,), scalar=:plain_acos, doc="inverse cosine")
const ARCTAN = elementwise("arctan", (y, x) -> 1 ./ (1 .+ SQUARE(x)); functions=(atan,), scalar=:plain_atan, doc="inverse tangent")
const SINH = elementwise("sinh", (y, x) -> COSH(x); functions=(sinh,), scalar=:plain_sinh, doc="hyperbolic sine")
const COSH = elementwise("cosh", (y, x) -> SINH(x); functions=(cosh,), scalar=:plain_cosh, doc="hyperbolic cosine")
const TANH = elementwise("tanh", (y, x) -> 1 .- SQUARE(y); functions=(tanh,), scalar=:fast_tanh, doc="hyperbolic tangent")

# Activations ----------------------------------------------------------------------------------------------------------

"""
    sigmoid(x)

1 / (1 + exp(-x)), elementwise on tensors.
"""
sigmoid(x::Real) = 1 / (1 + exp(-x))
sigmoid(x::Tensor) = SIGMOID(x)

"""
    softplus(x)

log(1 + exp(x)) without overflow, elementwise on tensors.
"""
softplus(x::Real) = max(x, zero(x)) + log1p(exp(-abs(x)))
softplus(x::Tensor) = SOFTPLUS(x)

"""
    relu(x)

max(x, 0), elementwise on tensors.
"""
relu(x::Real) = max(x, zero(x))
relu(x::Tensor) = RELU(x)

const SIGMOID = elementwise("sigmoid", (y, x) -> y .* (1 .- y); functions=(sigmoid,), scalar=:fast_sigmoid, doc="1 / (1 + exp(-x))")
const SOFTPLUS = elementwise("softplus", (y, x) -> SIGMOID(x); functions=(softplus,), scalar=:fast_softplus, doc="log(1 + exp(x))")
const RELU = elementwise("relu", (y, x) -> Where(STEP(y), 1); functions=(relu,), scalar=:relu, doc="max(x, 0)")
const STEP = elementwise("step"; scalar=:step, doc="1 where x > 0, else 0; derivative 0")
const SIGN = elementwise("sign"; functions=(sign,), scalar=:signum, doc="-1, 0 or 1; derivative 0")
const ABS = elementwise("abs", (y, x) -> SIGN(x); functions=(abs,), scalar=:abs, doc="absolute value")

for f in (:sigmoid, :softplus, :relu)
    @eval $f(x::Elements) = Elements($f(x.tensor))
end

# Choices --------------------------------------------------------------------------------------------------------------

"""1 for the winner, 1/2 for a tie, 0 for the loser."""
share(y, mine, other) = Where(EQUAL_MASK(y, mine), 1 .- 0.5 .* EQUAL_MASK(mine, other))

const EQUAL_MASK = elementwise("equal_mask"; inputs=2,
    forward=(p, out, inputs, attrs) -> emit_elementwise!(p, :equal, out, inputs),
    scalar=:equal, doc="1 where a = b, else 0; derivative 0")
const MAXIMUM = elementwise("maximum", (y, a, b) -> share(y, a, b), (y, a, b) -> share(y, b, a);
    scalar=:larger, doc="the larger; ties share the gradient")
const MINIMUM = elementwise("minimum", (y, a, b) -> share(y, a, b), (y, a, b) -> share(y, b, a);
    scalar=:smaller, doc="the smaller; ties share the gradient")
const CLIP = elementwise("clip", (y, x, low, high) -> Where(in_order(EQUAL_MASK(y, x), low, high), 1),
    (y, x, low, high) -> Where(in_order(LESS(x, low), low, high), 1),
    (y, x, low, high) -> Where(GREATER(MAXIMUM(x, low), high), 1); scalar=:limited, doc="x limited to [low, high]")

"""`holds`, but not where the bounds are the wrong way round, and the result is `high` whatever x is."""
in_order(holds::Tensor, low::Tensor, high::Tensor) =
    low.literal && high.literal && item(low) <= item(high) ? holds : MUL(holds, LESS_EQUAL(low, high))
DOTTED[max] = (operands...) -> folded(MAXIMUM, operands)
DOTTED[min] = (operands...) -> folded(MINIMUM, operands)

"""
    clip(x, low, high)

Limit `x` to [low, high], as `clamp.(x, low, high)`; `nothing` leaves that side open. The gradient passes at the bounds.
Where `low` is above `high` the result is `high`, as numpy's; `clamp`'s is Julia's own.
"""
clip(x, low, high) = CLIP(x, low === nothing ? -Inf : low, high === nothing ? Inf : high)
DOTTED[clamp] = (x, low, high) -> low isa Real && high isa Real && low <= high ? CLIP(x, low, high) :
    WHERE(GREATER(x, high), high, WHERE(LESS(x, low), low, x))
Base.clamp(x::Tensor, low::Scalar, high::Scalar) = is_scalar(x) ? DOTTED[clamp](x, low, high) :
    throw(ShapeError("clamp: expected a number, got an array; use clamp.(x, low, high)"))

const WHERE = register!(Op("where", infer_elementwise;
    forward=(p, out, inputs, attrs) -> emit_elementwise!(p, :where, out, inputs),
    backward=Any[no_gradient, (g, y, inputs, attrs) -> WHERE(inputs[1], g, 0), (g, y, inputs, attrs) -> WHERE(inputs[1], 0, g)],
    jvp=(t, y, inputs, attrs) -> WHERE(inputs[1], t[2] === nothing ? 0 : t[2], t[3] === nothing ? 0 : t[3]),
    overwrites=[1, 2, 3], elementwise=true, scalar=:chosen, doc="a where the condition holds, else b"))

"""
    choose(condition, a, b)

Take `a` where `condition` holds and `b` elsewhere, as `ifelse.(condition, a, b)`. A condition is a comparison of tensors
(`x .> 0`), which is 1 where it holds and 0 elsewhere, or an array of booleans.

The branch not taken gets gradient zero, but its values are computed: keep them finite where their derivative is used.
"""
choose(@nospecialize(condition), @nospecialize(a), @nospecialize(b)) = WHERE(condition, a, b)
DOTTED[ifelse] = choose

# Comparisons: 1 where they hold, else 0, in the operands' element type ----------------------------------------------------

comparison(name, f, doc) = register!(Op(name, infer_elementwise; elementwise=true, constant=true, overwrites=[1, 2], doc=doc,
    scalar=Symbol(name),
    forward=(p, out, inputs, attrs) -> emit_elementwise!(p, Symbol(name), out, inputs)), f)

const LESS = comparison("less", <, "a < b")
const LESS_EQUAL = comparison("less_equal", <=, "a <= b")
const GREATER = comparison("greater", >, "a > b")
const GREATER_EQUAL = comparison("greater_equal", >=, "a >= b")
const EQUAL = comparison("equal", ==, "a = b")
const NOT_EQUAL = comparison("not_equal", !=, "a ≠ b")

# Truth values and whole numbers: constant on purpose, since between the places where they jump they do not change ---------

constant_op(name, f, doc; operands=1, scalar=Symbol(name)) = register!(Op(name, infer_elementwise; elementwise=true,
    constant=true, overwrites=collect(1:operands), scalar=scalar, doc=doc,
    forward=(p, out, inputs, attrs) -> emit_elementwise!(p, Symbol(name), out, inputs)), f)

const FLOOR = constant_op("floor", floor, "the largest whole number that is not above x")
const CEIL = constant_op("ceil", ceil, "the smallest whole number that is not below x")
const ROUND = constant_op("round", round, "the nearest whole number, halves to the even one")
const TRUNC = constant_op("trunc", trunc, "x without its fraction")
const ISNAN = constant_op("isnan", isnan, "whether x is NaN"; scalar=:is_nan)
const ISFINITE = constant_op("isfinite", isfinite, "whether x is neither infinite nor NaN"; scalar=:is_finite)
const ISINF = constant_op("isinf", isinf, "whether x is infinite"; scalar=:is_infinite)
const LOGICAL_NOT = constant_op("logical_not", !, "whether x is 0"; scalar=:fails)
const LOGICAL_AND = constant_op("logical_and", &, "whether neither a nor b is 0"; operands=2, scalar=:both_hold)
const LOGICAL_OR = constant_op("logical_or", |, "whether a or b is not 0"; operands=2, scalar=:one_holds)
DOTTED[xor] = (a, b) -> NOT_EQUAL(LOGICAL_NOT(a), LOGICAL_NOT(b))

Base.:!(x::Tensor) = one_truth("!", x) && LOGICAL_NOT(x)
for (f, op) in ((:&, :LOGICAL_AND), (:|, :LOGICAL_OR))
    @eval Base.$f(a::Tensor, b::Union{Tensor,Bool}) = one_truth($(string(f)), a, b) && $op(a, b)
    @eval Base.$f(a::Bool, b::Tensor) = one_truth($(string(f)), a, b) && $op(a, b)
    @eval Base.$f(a::Elements, b::Union{Elements,Bool}) = Elements($op(whole(a), whole(b)))
    @eval Base.$f(a::Bool, b::Elements) = Elements($op(a, b.tensor))
end
Base.:!(a::Elements) = Elements(LOGICAL_NOT(a.tensor))
one_truth(name, operands...) = all(is_scalar, operands) ||
    throw(ShapeError("$name: expected single truth values, got arrays; use .$name"))
for (f, op) in ((:isnan, :ISNAN), (:isfinite, :ISFINITE), (:isinf, :ISINF))
    @eval Base.$f(x::Tensor) = is_scalar(x) ? $f(item(x)) :
        throw(ShapeError($("$f: expected a number, got an array; use $f.(x)")))
    @eval Base.$f(x::Elements) = Elements($op(x.tensor))
end
for f in (:floor, :ceil, :round, :trunc)
    @eval Base.$f(x::Tensor; kinds...) = is_scalar(x) ? (refuse_keywords($(string(f)), kinds); DOTTED[$f](x)) :
        throw(ShapeError($("$f: expected a number, got an array; use $f.(x)")))
    @eval Base.$f(x::Elements; kinds...) = (refuse_keywords($(string(f)), kinds); Elements(DOTTED[$f](x.tensor)))
    @eval Base.$f(::Type{T}, x::Tensor) where {T<:Integer} = $f(T, item(x))
end
Base.round(x::Union{Tensor,Elements}, mode::RoundingMode; kinds...) = mode === RoundNearest ? round(x; kinds...) :
    throw(ConfigurationError("round: on tensors only halves to even; use floor, ceil or trunc for other modes"))

"""Refuse keywords that Julia's function takes and this one does not."""
function refuse_keywords(name::String, kinds, advice::String="")
    isempty(kinds) && return nothing
    throw(ConfigurationError("$name: on tensors the keyword $(join(keys(kinds), ", ")) is not supported" *
        (isempty(advice) ? "" : "; " * advice)))
end

# Scalar functions on tensors without dimensions, as Julia's on numbers.
for f in ON_NUMBERS
    @eval Base.$f(x::Tensor) = is_scalar(x) ? DOTTED[$f](x) :
        throw(ShapeError($("$f: expected a number, got an array; use $f.(x)")))
end
for f in (:exp2, :exp10, :log2, :log10, :cbrt, :hypot, :mod, :rem, :div, :fld, :cld, :divrem, :fldmod, :sec, :csc, :cot,
        :sinpi, :cospi, :sind, :cosd, :tand, :sincos, :asec, :acsc, :acot, :sech, :csch, :coth, :asinh, :acosh, :atanh,
        :copysign, :flipsign, :rad2deg, :deg2rad, :sinc, :cosc)
    @eval Base.$f(x::Tensor, @nospecialize(rest...)) = no_op($f)
    @eval Base.$f(a::Union{Real,AbstractArray}, x::Tensor) = no_op($f)
end
Base.atan(x::Tensor, y) = no_op(atan)
Base.atan(x::Real, y::Tensor) = no_op(atan)
Base.log(base::Union{Real,Tensor}, x::Tensor) = log(x) / log(base)
Base.log(base::Tensor, x::Real) = log(x) / log(base)
for f in (:+, :-, :*, :/, :\, :^, :(==), :isapprox, :hypot, :log)
    @eval Base.$f(x::Tensor, z::Complex) = no_complex($(string(f)))
    @eval Base.$f(z::Complex, x::Tensor) = no_complex($(string(f)))
end
no_complex(name::String) =
    throw(DTypeError("$name: tensors are not computed with complex numbers; compute with real and imaginary parts separately"))
for (f, op) in ((:max, :MAXIMUM), (:min, :MINIMUM))
    @eval Base.$f(a::Tensor, b::Scalar) = $(Symbol(f, :_of_numbers))(a, b)
    @eval Base.$f(a::Real, b::Tensor) = $(Symbol(f, :_of_numbers))(a, b)
    @eval $(Symbol(f, :_of_numbers))(a, b) = is_scalar(a) && is_scalar(b) ? $op(a, b) :
        throw(ShapeError($("$f: expected numbers, got arrays; use $f.(a, b)")))
end
Base.isless(a::Tensor, b::Scalar) = item(a) < value_or(b)
Base.isless(a::Real, b::Tensor) = a < item(b)
Base.:<(a::Tensor, b::Scalar) = item(a) < value_or(b)
Base.:<(a::Real, b::Tensor) = a < item(b)
value_or(x::Tensor) = item(x)
value_or(x) = x

# Equality of values, as Julia's of numbers and arrays; `isequal` and `===` compare the tensors themselves.
Base.:(==)(a::Tensor, b::Tensor) = same_values(a, b)
Base.:(==)(a::Tensor, b::Union{Real,AbstractArray}) = same_values(a, b)
Base.:(==)(a::Union{Real,AbstractArray}, b::Tensor) = same_values(a, b)
same_values(a, b) = unwrapped(value(a)) == unwrapped(value(b))
Base.isequal(a::Tensor, b::Tensor) = a === b
Base.isapprox(a::Tensor, b::Union{Tensor,Real,AbstractArray}; kinds...) = isapprox(unwrapped(value(a)), unwrapped(value(b)); kinds...)
Base.isapprox(a::Union{Real,AbstractArray}, b::Tensor; kinds...) = isapprox(a, unwrapped(value(b)); kinds...)

# Conversions ----------------------------------------------------------------------------------------------------------

function forward_astype(p, out, inputs, attrs)
    x, = inputs
    out.eltype === x.eltype && return emit_copy!(p, out, x)
    name = out.eltype === Int64 ? :to_int : x.eltype === Int64 ? :from_int : :to_other
    T = x.eltype === Int64 ? out.eltype : x.eltype
    return emit_loops!(p, T, name, out.dims, Memory[out, x], Vector{Int}[out.strides, x.strides])
end

const ASTYPE = register!(Op("astype", (inputs, attrs) -> (inputs[1].dims, attrs[1]); forward=forward_astype,
    backward=Any[(g, y, inputs, attrs) -> astype(g, inputs[1].eltype)],
    jvp=(t, y, inputs, attrs) -> astype(t[1], attrs[1]), attrs=[:eltype], doc="convert to another element type"))

"""
    astype(x, T)

Convert to Float32, Float64 or Int64; between float types the gradient is converted back. Also `Float32.(x)`.
"""
function astype(@nospecialize(x), T::DataType)
    T in (Float32, Float64, Int64) || throw(DTypeError("astype: expected Float32, Float64 or Int64, got $T"))
    t = x isa Tensor || eltype(x) in FLOATS ? as_tensor(x) : index_tensor(x)
    return t.eltype === T ? t : apply(ASTYPE, Tensor[t], Any[T])
end
for T in (Float32, Float64)
    DOTTED[T] = x -> astype(x, T)
end
DOTTED[Int64] = function (x)
    t = as_tensor(x)
    all(isinteger, value(t)) || throw(DTypeError("Int64: the elements are not all whole numbers; use astype(x, Int64), which " *
        "drops fractions"))
    return astype(t, Int64)
end

infer_same(inputs::Vector{Tensor}, attrs::Vector{Any}) = (inputs[1].dims, inputs[1].eltype)
itself(m::Memory, attrs::Vector{Any}) = m

const STOP_GRADIENT = register!(Op("stop_gradient", infer_same; view=itself, constant=true,
    scalar=:identity, doc="x as a constant: no gradient flows through it"))
const IDENTITY = register!(Op("identity", infer_same; view=itself, backward=Any[(g, y, inputs, attrs) -> g],
    jvp=(t, y, inputs, attrs) -> t[1], scalar=:identity, doc="x itself, as a new node"), identity)
