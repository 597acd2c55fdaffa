# Arithmetic and elementary functions, elementwise with Julia's broadcasting.
#
# Subgradients: ties in `max`, `min` share the gradient equally; `clamp` passes it on at its bounds; `abs`, `relu` and
# `sign` have derivative 0 at 0; `sqrt` has infinity there.

# Arithmetic -----------------------------------------------------------------------------------------------------------

const ADD = elementwise("add", (y, a, b) -> 1, (y, a, b) -> 1; functions=(+,), doc="a + b")
const SUB = elementwise("sub", (y, a, b) -> 1, (y, a, b) -> -1; functions=(-,), doc="a - b")
const MUL = elementwise("mul", (y, a, b) -> b, (y, a, b) -> a; functions=(*,), doc="a b")
const DIV = elementwise("div", (y, a, b) -> 1 ./ b, (y, a, b) -> .-y ./ b; functions=(/,), doc="a / b")
const NEG = elementwise("neg", (y, x) -> -1; doc="-x")
const SQUARE = elementwise("square", (y, x) -> 2 .* x; functions=(abs2,), doc="x²")
const RECIPROCAL = elementwise("reciprocal", (y, x) -> NEG(SQUARE(y)); functions=(inv,), doc="1 / x")

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
        return MUL(p, item(p) == 2 ? x : elementwise_power(x, item(p) - 1))
    end
    # p x^(p-1), and 0 where p = 0 even at x = 0, where x^(p-1) is infinite.
    return MUL(p, POW(x, choose(EQUAL(p, 0), 1, SUB(p, 1))))
end

# y log x, and its limit 0 at x = 0 for p >= 0, where log x is infinite.
pow_exponent(y, x, p) = MUL(y, LOG(choose(MUL(EQUAL(x, 0), GREATER_EQUAL(p, 0)), 1, x)))

function forward_pow(p, out, inputs, attrs)
    exponent = inputs[2]
    # Only a number of the program may decide which instruction it is: others may change from replay to replay.
    if attrs != NO_ATTRS && attrs[1] in (3.0, 4.0, 5.0)
        return emit_elementwise!(p, :whole_power, out, inputs[1:1], (Int(attrs[1]), 0, 0, 0))
    end
    return emit_elementwise!(p, :pow, out, inputs)
end

const POW = register!(Op("pow", infer_elementwise; forward=forward_pow, backward=Any[
        partial_rule(pow_base), partial_rule(pow_exponent)],
    jvp=(t, y, inputs, attrs) -> partials_jvp((pow_base, pow_exponent), t, y, inputs), overwrites=[1, 2],
    elementwise=true, attrs=[:exponent], doc="x to the power p"))
DOTTED[^] = (x, p) -> elementwise_power(x, p)

"""x .^ p, by the cheapest op that gives it."""
function elementwise_power(@nospecialize(x), @nospecialize(p))
    if p isa Real && x isa Tensor && !(p isa DualNumber)
        p == 1 && return x
        p == 2 && return SQUARE(x)
        p == 0.5 && return SQRT(x)
        p == -1 && return RECIPROCAL(x)
        return apply(POW, as_tensors((x, p)), Any[Float64(p)])
    end
    return POW(x, p)
end

# Exponentials and logarithms ------------------------------------------------------------------------------------------

const EXP = elementwise("exp", (y, x) -> y; functions=(exp,), doc="e to the x")
const EXPM1 = elementwise("expm1", (y, x) -> y .+ 1; functions=(expm1,), doc="exp(x) - 1, exact near 0")
const LOG = elementwise("log", (y, x) -> 1 ./ x; functions=(log,), doc="natural logarithm")
const LOG1P = elementwise("log1p", (y, x) -> 1 ./ (x .+ 1); functions=(log1p,), doc="log(1 + x), exact near 0")
const SQRT = elementwise("sqrt", (y, x) -> 0.5 ./ y; functions=(sqrt,), doc="square root")

# Trigonometric and hyperbolic functions -------------------------------------------------------------------------------

const SIN = elementwise("sin", (y, x) -> COS(x); functions=(sin,), doc="sine")
const COS = elementwise("cos", (y, x) -> NEG(SIN(x)); functions=(cos,), doc="cosine")
const TAN = elementwise("tan", (y, x) -> 1 .+ SQUARE(y); functions=(tan,), doc="tangent")
const ARCSIN = elementwise("arcsin", (y, x) -> 1 ./ SQRT(1 .- SQUARE(x)); functions=(asin,), doc="inverse sine")
const ARCCOS = elementwise("arccos", (y, x) -> -1 ./ SQRT(1 .- SQUARE(x)); functions=(acos,), doc="inverse cosine")
const ARCTAN = elementwise("arctan", (y, x) -> 1 ./ (1 .+ SQUARE(x)); functions=(atan,), doc="inverse tangent")
const SINH = elementwise("sinh", (y, x) -> COSH(x); functions=(sinh,), doc="hyperbolic sine")
const COSH = elementwise("cosh", (y, x) -> SINH(x); functions=(cosh,), doc="hyperbolic cosine")
const TANH = elementwise("tanh", (y, x) -> 1 .- SQUARE(y); functions=(tanh,), doc="hyperbolic tangent")

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

const SIGMOID = elementwise("sigmoid", (y, x) -> y .* (1 .- y); functions=(sigmoid,), doc="1 / (1 + exp(-x))")
const SOFTPLUS = elementwise("softplus", (y, x) -> SIGMOID(x); functions=(softplus,), doc="log(1 + exp(x))")
const RELU = elementwise("relu", (y, x) -> STEP(y); functions=(relu,), doc="max(x, 0)")
const STEP = elementwise("step"; doc="1 where x > 0, else 0; derivative 0")
const SIGN = elementwise("sign"; functions=(sign,), doc="-1, 0 or 1; derivative 0")
const ABS = elementwise("abs", (y, x) -> SIGN(x); functions=(abs,), doc="absolute value")

for f in (:sigmoid, :softplus, :relu)
    @eval $f(x::Elements) = Elements($f(x.tensor))
end

# Choices --------------------------------------------------------------------------------------------------------------

"""1 for the winner, 1/2 for a tie, 0 for the loser."""
share(y, mine, other) = EQUAL_MASK(y, mine) .* (1 .- 0.5 .* EQUAL_MASK(mine, other))

const EQUAL_MASK = elementwise("equal_mask"; inputs=2,
    forward=(p, out, inputs, attrs) -> emit_elementwise!(p, :equal, out, inputs),
    doc="1 where a = b, else 0; derivative 0")
const MAXIMUM = elementwise("maximum", (y, a, b) -> share(y, a, b), (y, a, b) -> share(y, b, a);
    doc="the larger; ties share the gradient")
const MINIMUM = elementwise("minimum", (y, a, b) -> share(y, a, b), (y, a, b) -> share(y, b, a);
    doc="the smaller; ties share the gradient")
const CLIP = elementwise("clip", (y, x, low, high) -> EQUAL_MASK(y, x),
    (y, x, low, high) -> (1 .- EQUAL_MASK(y, x)) .* EQUAL_MASK(y, low),
    (y, x, low, high) -> (1 .- EQUAL_MASK(y, x)) .* EQUAL_MASK(y, high) .* (1 .- EQUAL_MASK(low, high));
    doc="x limited to [low, high]")
DOTTED[max] = (operands...) -> folded(MAXIMUM, operands)
DOTTED[min] = (operands...) -> folded(MINIMUM, operands)

"""
    clip(x, low, high)

Limit `x` to [low, high], as `clamp.(x, low, high)`; `nothing` leaves that side open. The gradient passes at the bounds.
"""
clip(x, low, high) = CLIP(x, low === nothing ? -Inf : low, high === nothing ? Inf : high)
DOTTED[clamp] = clip

const WHERE = register!(Op("where", infer_elementwise;
    forward=(p, out, inputs, attrs) -> emit_elementwise!(p, :where, out, inputs),
    backward=Any[no_gradient, (g, y, inputs, attrs) -> WHERE(inputs[1], g, 0), (g, y, inputs, attrs) -> WHERE(inputs[1], 0, g)],
    jvp=(t, y, inputs, attrs) -> WHERE(inputs[1], t[2] === nothing ? 0 : t[2], t[3] === nothing ? 0 : t[3]),
    overwrites=[1, 2, 3], elementwise=true, doc="a where the condition holds, else b"))

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
    forward=(p, out, inputs, attrs) -> emit_elementwise!(p, Symbol(name), out, inputs)), f)

const LESS = comparison("less", <, "a < b")
const LESS_EQUAL = comparison("less_equal", <=, "a <= b")
const GREATER = comparison("greater", >, "a > b")
const GREATER_EQUAL = comparison("greater_equal", >=, "a >= b")
const EQUAL = comparison("equal", ==, "a = b")
const NOT_EQUAL = comparison("not_equal", !=, "a ≠ b")

# Scalar functions on tensors without dimensions, as Julia's on numbers.
for f in ON_NUMBERS
    @eval Base.$f(x::Tensor) = is_scalar(x) ? DOTTED[$f](x) :
        throw(ShapeError($("$f: expected a number, got an array; use $f.(x)")))
end
Base.max(a::Tensor, b::Scalar) = MAXIMUM(a, b)
Base.max(a::Real, b::Tensor) = MAXIMUM(a, b)
Base.min(a::Tensor, b::Scalar) = MINIMUM(a, b)
Base.min(a::Real, b::Tensor) = MINIMUM(a, b)
Base.isless(a::Tensor, b::Scalar) = item(a) < value_or(b)
Base.isless(a::Real, b::Tensor) = a < item(b)
Base.:<(a::Tensor, b::Scalar) = item(a) < value_or(b)
Base.:<(a::Real, b::Tensor) = a < item(b)
value_or(x::Tensor) = item(x)
value_or(x) = x

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
for T in (Float32, Float64, Int64)
    DOTTED[T] = x -> astype(x, T)
end

infer_same(inputs::Vector{Tensor}, attrs::Vector{Any}) = (inputs[1].dims, inputs[1].eltype)
itself(m::Memory, attrs::Vector{Any}) = m

const STOP_GRADIENT = register!(Op("stop_gradient", infer_same; view=itself, constant=true,
    doc="x as a constant: no gradient flows through it"))
const IDENTITY = register!(Op("identity", infer_same; view=itself, backward=Any[(g, y, inputs, attrs) -> g],
    jvp=(t, y, inputs, attrs) -> t[1], doc="x itself, as a new node"), identity)
