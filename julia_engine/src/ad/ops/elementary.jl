# Arithmetic and elementary functions, elementwise with Julia's broadcasting.
#
# Subgradients: ties in `max`, `min` share the gradient equally; `clamp` passes it on at its bounds; `abs`, `relu`,
# `sign`, `hypot` and `copysign` have derivative 0 at 0; `sqrt` has infinity there. Where `relu`, `max`, `min` or `clamp` is constant nothing passes,
# not even an infinite gradient: `relu(x)^1.5` has derivatives 0 of every order at x < 0.
# The exponent of a power counts in forward mode only where it has a tangent: that of a negative base has the derivative NaN.
# Elsewhere infinity times 0 is NaN, also in forward mode behind a root: the tangent 0 of `relu(x)` at x < 0 can't be told from that of
# `x^3` at 0, where `cbrt(x^3)` has derivative 1.
# Where the larger or smaller of two is NaN, both derivatives are 0.

# Arithmetic -----------------------------------------------------------------------------------------------------------

const ADD = elementwise("add", 1, 1; functions=(+,), doc="a + b")
const SUB = elementwise("sub", 1, -1; functions=(-,), doc="a - b")
const MUL = elementwise("mul", :b, :a; functions=(*,), simplify=(e, made) -> without_one(e, made), doc="a b")
const DIV = elementwise("div", :(1 / b), :(-y / b); functions=(/,), doc="a / b")
const NEG = elementwise("neg", -1; doc="-x")
const SQUARE = elementwise("square", :(2 * x); functions=(abs2,), doc="x²")
const RECIPROCAL = elementwise("reciprocal", :(-(y^2)); functions=(inv,), doc="1 / x")

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
    p.literal && item(p) == 0 && return zeros_of(x)
    if p.literal && item(p) != 1
        item(p) == 0.5 && return DIV(0.5, y)
        return MUL(p, item(p) == 2 ? x : elementwise_power(x, item(p) - 1))
    end
    # p x^(p-1), and 0 at x = p = 0, where x^(p-1) is infinite.
    return MUL(p, POW(x, choose(MUL(EQUAL(p, 0), EQUAL(x, 0)), 1, SUB(p, 1))))
end

# y log x, and its limit 0 at x = 0 for p >= 0, where log x is infinite.
pow_exponent(y, x, p) = MUL(y, LOG(choose(MUL(EQUAL(x, 0), GREATER_EQUAL(p, 0)), 1, x)))

# Where the exponent has no tangent, it passes no NaN on, which log x is where x is negative. A derivative that is finite counts
# there, too, since the tangent may be differentiated by.
exponent_moved(t) = (y, x, p) -> (slope = pow_exponent(y, x, p); Where(LOGICAL_OR(NOT_EQUAL(t, 0), ISFINITE(slope)), slope))

function forward_pow(p, out, inputs, attrs)
    exponent = inputs[2]
    # Only a number of the program may decide which instruction it is: others may change from replay to replay.
    number = isempty(attrs) ? nothing : attrs.exponent
    number == 0.5 && return emit_elementwise!(p, :half_power, out, inputs[1:1])
    number in (3.0, 4.0, 5.0) && return emit_elementwise!(p, :whole_power, out, inputs[1:1], (Int(number), 0, 0, 0))
    return emit_elementwise!(p, :pow, out, inputs)
end

# Of single numbers: a whole exponent that the program writes is a product.
const WHOLE_POWERS = Dict(0.5 => :half_power, 3.0 => :third_power, 4.0 => :fourth_power, 5.0 => :fifth_power)
scalar_power(attrs) = isempty(attrs) ? :general_power : get(WHOLE_POWERS, attrs.exponent, :general_power)

const POW = register!(Op("pow", infer_elementwise; forward=forward_pow, backward=Any[
        partial_rule(pow_base), partial_rule(pow_exponent)],
    jvp=(t, y, inputs, attrs) -> partials_jvp((pow_base, exponent_moved(t[2])), t, y, inputs), overwrites=[1, 2],
    elementwise=true, attrs=[:exponent], scalar=scalar_power, doc="x to the power p"))
DOTTED[^] = (x, p) -> elementwise_power(x, p)

"""x .^ p, by the cheapest op that gives it."""
function elementwise_power(@nospecialize(x), @nospecialize(p))
    if p isa Real && x isa Tensor && !(p isa Union{DualNumber,Elements})
        p == 1 && return x
        p == 2 && return SQUARE(x)
        p == -1 && return RECIPROCAL(x)
        return apply(POW, as_tensors((x, p)), attributes(:exponent => Float64(p)))
    end
    return POW(x, p)
end

# Exponentials and logarithms ------------------------------------------------------------------------------------------

const EXP = elementwise("exp", :y; functions=(exp,), doc="e to the x")
const EXPM1 = elementwise("expm1", :(y + 1); functions=(expm1,), doc="exp(x) - 1, exact near 0")
const LOG = elementwise("log", :(1 / x); functions=(log,), doc="natural logarithm")
const LOG1P = elementwise("log1p", :(1 / (x + 1)); functions=(log1p,), doc="log(1 + x), exact near 0")
const SQRT = elementwise("sqrt", :(0.5 / y); functions=(sqrt,), doc="square root")
const CBRT = elementwise("cbrt", :(1 / (3 * y^2)); functions=(cbrt,), doc="cube root")
const EXP2 = elementwise("exp2", :(y * $(log(2))); functions=(exp2,), doc="2 to the x")
const LOG2 = elementwise("log2", :(1 / (x * $(log(2)))); functions=(log2,), doc="binary logarithm")
const LOG10 = elementwise("log10", :(1 / (x * $(log(10)))); functions=(log10,), doc="decimal logarithm")

"""
    logaddexp(a, b)

log(exp(a) + exp(b)) without overflow, elementwise on tensors.
"""
logaddexp(a::Real, b::Real) = Kernels.plain_logaddexp(promote(float(a), float(b))...)
logaddexp(a::Tensor, b::Scalar) = LOGADDEXP(a, b)
logaddexp(a::Real, b::Tensor) = LOGADDEXP(a, b)

# Two infinitely small terms have logaddexp -Inf and the derivative 0, not NaN.
terms_apart(y, mine, other) = choose(EQUAL(y, -Inf), -Inf, SUB(mine, other))
const LOGADDEXP = elementwise("logaddexp", (y, a, b) -> SIGMOID(terms_apart(y, a, b)), (y, a, b) -> SIGMOID(terms_apart(y, b, a));
    functions=(logaddexp,), doc="log(exp(a) + exp(b)), without overflow")

# Trigonometric and hyperbolic functions -------------------------------------------------------------------------------

const SIN = elementwise("sin", :(cos(x)); functions=(sin,), doc="sine")
const COS = elementwise("cos", :(-sin(x)); functions=(cos,), doc="cosine")
const TAN = elementwise("tan", :(1 + y^2); functions=(tan,), doc="tangent")
const ARCSIN = elementwise("arcsin", :(1 / sqrt((1 - x) * (1 + x))); functions=(asin,), doc="inverse sine")
const ARCCOS = elementwise("arccos", :(-1 / sqrt((1 - x) * (1 + x))); functions=(acos,), doc="inverse cosine")
const ARCTAN = elementwise("arctan", :(1 / (1 + x^2)); functions=(atan,), doc="inverse tangent")
const SINH = elementwise("sinh", :(cosh(x)); functions=(sinh,), doc="hyperbolic sine")
const COSH = elementwise("cosh", :(sinh(x)); functions=(cosh,), doc="hyperbolic cosine")
const TANH = elementwise("tanh", :(1 - y^2); functions=(tanh,), doc="hyperbolic tangent")
const ARCSINH = elementwise("arcsinh", :(1 / sqrt(1 + x^2)); functions=(asinh,), doc="inverse hyperbolic sine")
const ARCCOSH = elementwise("arccosh", :(1 / sqrt((x - 1) * (x + 1))); functions=(acosh,), doc="inverse hyperbolic cosine")
const ARCTANH = elementwise("arctanh", :(1 / ((1 - x) * (1 + x))); functions=(atanh,), doc="inverse hyperbolic tangent")
const HYPOT = elementwise("hypot", (y, a, b) -> share_of(a, y), (y, a, b) -> share_of(b, y);
    functions=(hypot,), doc="√(a² + b²), without overflow; derivative 0 at the origin")
share_of(a, y) = choose(EQUAL(y, 0), 0, DIV(a, choose(EQUAL(y, 0), 1, y)))
const ARCTAN2 = elementwise("arctan2", :((b / hypot(a, b)) / hypot(a, b)), :((-a / hypot(a, b)) / hypot(a, b));
    doc="the angle of the point (b, a), from -π to π")
DOTTED[atan] = (operands...) -> length(operands) == 1 ? ARCTAN(operands[1]) : ARCTAN2(operands...)
const DEG2RAD = elementwise("deg2rad", pi / 180; functions=(deg2rad,), doc="degrees as radians")
const RAD2DEG = elementwise("rad2deg", 180 / pi; functions=(rad2deg,), doc="radians as degrees")

# (cos πx - sinc x) / x, which cancels near 0: there its series, so that the derivatives of every order are right.
function sinc_slope(y, x::Tensor)
    near = LESS(ABS(x), 0.25)
    z = choose(near, SQUARE(MUL(pi, x)), 0)
    series = MUL(z, 0)
    for k in 9:-1:1
        series = ADD(MUL(series, z), 2k * (-1.0)^k / factorial(2k + 1))
    end
    away = choose(near, 1, x)
    return choose(near, MUL(MUL(pi^2, x), series), DIV(SUB(COS(MUL(pi, away)), SINC(away)), away))
end
function sinc_slope(y, x::Real)
    abs(x) < 0.25 || return (cospi(x) - sinc(x)) / x
    z, series = (oftype(x, pi) * x)^2, zero(x)
    for k in 9:-1:1
        series = series * z + oftype(x, 2k * (-1.0)^k / factorial(2k + 1))
    end
    return oftype(x, pi)^2 * x * series
end
const SINC = elementwise("sinc", sinc_slope; functions=(sinc,), doc="sin(πx) / (πx), and 1 at 0")

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

const SIGMOID = elementwise("sigmoid", :(y * (1 - y)); functions=(sigmoid,), doc="1 / (1 + exp(-x))")
const SOFTPLUS = elementwise("softplus", :(sigmoid(x)); functions=(softplus,), doc="log(1 + exp(x))")
const RELU = elementwise("relu", (y, x) -> Where(STEP(y), 1); functions=(relu,), doc="max(x, 0)")
const STEP = elementwise("step"; doc="1 where x > 0, else 0; derivative 0")
const SIGN = elementwise("sign"; functions=(sign,), doc="-1, 0 or 1; derivative 0")
const ABS = elementwise("abs", :(sign(x)); functions=(abs,), doc="absolute value")

# Choices --------------------------------------------------------------------------------------------------------------

"""1 for the winner, 1/2 for a tie, 0 for the loser."""
share(y, mine, other) = Where(EQUAL_MASK(y, mine), 1 .- 0.5 .* EQUAL_MASK(mine, other))

const EQUAL_MASK = elementwise("equal_mask"; inputs=2,
    forward=(p, out, inputs, attrs) -> emit_elementwise!(p, :equal, out, inputs),
    scalar=:equal, doc="1 where a = b, else 0; derivative 0")
const MAXIMUM = elementwise("maximum", (y, a, b) -> share(y, a, b), (y, a, b) -> share(y, b, a);
    doc="the larger; ties share the gradient")
const MINIMUM = elementwise("minimum", (y, a, b) -> share(y, a, b), (y, a, b) -> share(y, b, a);
    doc="the smaller; ties share the gradient")
const CLIP = elementwise("clip", (y, x, low, high) -> Where(in_order(EQUAL_MASK(y, x), low, high), 1),
    (y, x, low, high) -> Where(in_order(LESS(x, low), low, high), 1),
    (y, x, low, high) -> Where(GREATER(MAXIMUM(x, low), high), 1); doc="x limited to [low, high]")

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
    overwrites=[1, 2, 3], elementwise=true, scalar=:chosen, functions=(ifelse,), doc="a where the condition holds, else b"))

"""
    choose(condition, a, b)

Take `a` where `condition` holds and `b` elsewhere, as `ifelse.(condition, a, b)`. A condition is a comparison of tensors
(`x .> 0`), which is 1 where it holds and 0 elsewhere, or an array of booleans.

The branch not taken gets gradient zero, but its values are computed: keep them finite where their derivative is used.
"""
choose(@nospecialize(condition), @nospecialize(a), @nospecialize(b)) = WHERE(condition, a, b)

# Remainders -----------------------------------------------------------------------------------------------------------
#
# Between the places where the quotient jumps they are linear.

const FLOOR_DIVIDE = elementwise("floor_divide"; inputs=2, functions=(fld,),
    doc="the largest whole number that is not above a / b; derivative 0")
const MOD = elementwise("mod", (y, a, b) -> 1, (y, a, b) -> NEG(FLOOR_DIVIDE(a, b)); functions=(mod,),
    doc="what remains of a divided by b, with the sign of b")
# Of fmod a / b may be rounded up to a whole number that the quotient does not reach.
const FMOD = elementwise("fmod", (y, a, b) -> 1, (y, a, b) -> NEG(ROUND(DIV(SUB(a, y), b))); functions=(rem,),
    doc="what remains of a divided by b, with the sign of a")
const COPYSIGN = elementwise("copysign", (y, a, b) -> MUL(SIGN(a), SIGN(y)), (y, a, b) -> 0; functions=(copysign,),
    doc="|a| with the sign of b")

# Comparisons: 1 where they hold, else 0, in the operands' element type ----------------------------------------------------

comparison(name, f, doc) = elementwise(name; inputs=2, functions=(f,), doc=doc)

const LESS = comparison("less", <, "a < b")
const LESS_EQUAL = comparison("less_equal", <=, "a <= b")
const GREATER = comparison("greater", >, "a > b")
const GREATER_EQUAL = comparison("greater_equal", >=, "a >= b")
const EQUAL = comparison("equal", ==, "a = b")
const NOT_EQUAL = comparison("not_equal", !=, "a ≠ b")

# Truth values and whole numbers: constant on purpose, since between the places where they jump they do not change ---------

const FLOOR = elementwise("floor"; functions=(floor,), doc="the largest whole number that is not above x")
const CEIL = elementwise("ceil"; functions=(ceil,), doc="the smallest whole number that is not below x")
const ROUND = elementwise("round"; functions=(round,), doc="the nearest whole number, halves to the even one")
const TRUNC = elementwise("trunc"; functions=(trunc,), doc="x without its fraction")
const ISNAN = elementwise("isnan"; functions=(isnan,), doc="whether x is NaN")
const ISFINITE = elementwise("isfinite"; functions=(isfinite,), doc="whether x is neither infinite nor NaN")
const ISINF = elementwise("isinf"; functions=(isinf,), doc="whether x is infinite")
const LOGICAL_NOT = elementwise("logical_not"; functions=(!,), doc="whether x is 0")
const LOGICAL_AND = elementwise("logical_and"; inputs=2, functions=(&,), doc="whether neither a nor b is 0")
const LOGICAL_OR = elementwise("logical_or"; inputs=2, functions=(|,), doc="whether a or b is not 0")
DOTTED[xor] = (a, b) -> ((a, b) = as_tensors((a, b)); NOT_EQUAL(LOGICAL_NOT(a), LOGICAL_NOT(b)))

Base.:!(x::Tensor) = one_truth("!", x) && LOGICAL_NOT(x)
for (f, op) in ((:&, :LOGICAL_AND), (:|, :LOGICAL_OR))
    @eval Base.$f(a::Tensor, b::Union{Tensor,Bool}) = one_truth($(string(f)), a, b) && $op(a, b)
    @eval Base.$f(a::Bool, b::Tensor) = one_truth($(string(f)), a, b) && $op(a, b)
    @eval Base.$f(a::Elements, b::Union{Elements,Bool}) = of_elements($op, (a, b))
    @eval Base.$f(a::Bool, b::Elements) = of_elements($op, (a, b))
end
Base.:!(a::Elements) = of_elements(LOGICAL_NOT, (a,))
one_truth(name, operands...) = all(is_scalar, operands) ||
    throw(ShapeError("$name: expected single truth values, got arrays; use .$name"))
for (f, op) in ((:isnan, :ISNAN), (:isfinite, :ISFINITE), (:isinf, :ISINF))
    @eval Base.$f(x::Tensor) = is_scalar(x) ? $f(item(x)) :
        throw(ShapeError($("$f: expected a number, got an array; use $f.(x)")))
    @eval Base.$f(x::Elements) = of_elements($op, (x,))
end
for f in (:floor, :ceil, :round, :trunc)
    @eval Base.$f(x::Tensor; kinds...) = is_scalar(x) ? (refuse_keywords($(string(f)), kinds); DOTTED[$f](x)) :
        throw(ShapeError($("$f: expected a number, got an array; use $f.(x)")))
    @eval Base.$f(x::Elements; kinds...) = (refuse_keywords($(string(f)), kinds); of_elements(DOTTED[$f], (x,)))
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

# Elementary functions on elements, and Julia's own on tensors without dimensions, as on numbers.
for op in collect(values(TABLE)), f in op.functions
    length(op.overwrites) == 1 && (op === SIGN || !op.constant) || continue
    @eval (::$(typeof(f)))(x::Elements) = of_elements(DOTTED[$f], (x,))
    parentmodule(f) === @__MODULE__() || f === inv || @eval (::$(typeof(f)))(x::Tensor) = is_scalar(x) ? DOTTED[$f](x) :
        throw(ShapeError($("$f: expected a number, got an array; use $f.(x)")))
end
for f in (:div, :cld, :divrem, :fldmod, :sincos, :flipsign, :cosc)
    @eval Base.$f(x::Tensor) = no_op($f)
    @eval Base.$f(x::Tensor, @nospecialize(y::Union{Number,AbstractArray,GraphNode,Elements})) = no_op($f)
    @eval Base.$f(a::Union{Real,AbstractArray}, x::Tensor) = no_op($f)
end
Base.hypot(x::Tensor) = abs(x)
Base.hypot(x::Tensor, y, z, @nospecialize(rest...)) = no_op(hypot)
for f in (:div, :rem, :divrem), mode in (:Nearest, :ToZero, :FromZero, :Up, :Down)
    @eval Base.$f(x::Tensor, y, ::RoundingMode{$(QuoteNode(mode))}) = no_op($f)
end
Base.log(base::Union{Real,Tensor}, x::Tensor) = log(x) / log(base)
Base.log(base::Tensor, x::Real) = log(x) / log(base)
for f in (:+, :-, :*, :/, :\, :^, :(==), :isapprox, :hypot, :log)
    @eval Base.$f(x::Tensor, z::Complex) = no_complex($(string(f)))
    @eval Base.$f(z::Complex, x::Tensor) = no_complex($(string(f)))
end
no_complex(name::String) =
    throw(DTypeError("$name: tensors are not computed with complex numbers; compute with real and imaginary parts separately"))
for (f, op) in ((:max, :MAXIMUM), (:min, :MINIMUM), (:atan, :ARCTAN2), (:hypot, :HYPOT), (:fld, :FLOOR_DIVIDE), (:mod, :MOD),
        (:rem, :FMOD), (:copysign, :COPYSIGN))
    @eval Base.$f(a::Tensor, b::Scalar) = $(Symbol(f, :_of_numbers))(a, b)
    @eval Base.$f(a::Real, b::Tensor) = $(Symbol(f, :_of_numbers))(a, b)
    @eval $(Symbol(f, :_of_numbers))(a, b) = is_scalar(a) && is_scalar(b) ? $op(a, b) :
        throw(ShapeError($("$f: expected numbers, got arrays; use $f.(a, b)")))
end
Base.isless(a::Tensor, b::Scalar) = isless(item(a), value_or(b))
Base.isless(a::Real, b::Tensor) = isless(a, item(b))
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
    i = name === :to_int ? (0, 0, 0, place!(p, "astype", out.dims)) : NONE
    return emit_loops!(p, T, name, out.dims, Memory[out, x], Vector{Int}[out.strides, x.strides], i)
end

const ASTYPE = register!(Op("astype", (inputs, attrs) -> (inputs[1].dims, attrs.eltype); batch=trailing, sparsity=one_to_one, forward=forward_astype,
    backward=Any[(g, y, inputs, attrs) -> astype(g, inputs[1].eltype)],
    jvp=(t, y, inputs, attrs) -> astype(t[1], attrs.eltype), attrs=[:eltype], doc="convert to another element type"))

"""
    astype(x, T)

Convert to Float32, Float64 or Int64; between float types the gradient is converted back. Also `Float32.(x)`. To Int64
fractions are dropped; NaN, infinite and too large numbers throw a `DTypeError`, eagerly and at every replay.
"""
function astype(@nospecialize(x), T::DataType)
    T in (Float32, Float64, Int64) || throw(DTypeError("astype: expected Float32, Float64 or Int64, got $T"))
    t = x isa Tensor || eltype(x) in FLOATS ? as_tensor(x) : index_tensor(x)
    return t.eltype === T ? t : apply(ASTYPE, Tensor[t], attributes(:eltype => T))
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

infer_same(inputs::Vector{Tensor}, attrs::Attributes) = (inputs[1].dims, inputs[1].eltype)
itself(m::Memory, attrs::Attributes) = m

const STOP_GRADIENT = register!(Op("stop_gradient", infer_same; batch=trailing, view=itself, constant=true,
    simplify=(e, made) -> its_input(e, made), scalar=:identity, doc="x as a constant: no gradient flows through it"))
const IDENTITY = register!(Op("identity", infer_same; batch=trailing, view=itself, backward=Any[(g, y, inputs, attrs) -> g],
    jvp=(t, y, inputs, attrs) -> t[1], simplify=(e, made) -> its_input(e, made), scalar=:identity, functions=(identity,),
    doc="x itself, as a new node"))
