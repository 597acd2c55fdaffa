# Activations beside those that the other ops are made with: smooth and leaky kin of relu.
#
# Subgradients at 0: `leaky_relu` has its slope, `elu` and `selu` that of their negative side, as PyTorch's.

for (f, plain, op) in ((:silu, :plain_silu, :SILU), (:gelu_tanh, :plain_gelu_tanh, :GELU_TANH))
    @eval $f(x::AbstractFloat) = Kernels.$plain(x)
    @eval $f(x::Real) = $f(float(x))
    @eval $f(x::Tensor) = $op(x)
end
@doc "x times the [`sigmoid`](@ref) of x; elementwise on tensors." silu
@doc "[`gelu`](@ref) with a tanh in place of the error function; elementwise on tensors." gelu_tanh

# Smooth ones ----------------------------------------------------------------------------------------------------------

const SILU_SLOPE = :(sigmoid(x) + y * (1 - sigmoid(x)))

# Φ(x) + x φ(x) with the normal distribution and its density: exact where Φ is small.
const GELU_SLOPE = :(0.5 * erfc($(-sqrt(0.5)) * x) + $(1 / sqrt(2pi)) * (x * exp(-0.5 * x^2)))

# Beyond 100 the tanh is ±1, and squares of much larger numbers overflow.
const GELU_TANH_SLOPE = let x = :(min(max(x, -100), 100)), t = :(tanh($x * ($(Kernels.GELU_LINEAR) + $(Kernels.GELU_CUBIC) * $x^2)))
    :(0.5 * (1 + $t) + 0.5 * ($x * ((1 - $t^2) * ($(Kernels.GELU_LINEAR) + $(3 * Kernels.GELU_CUBIC) * $x^2))))
end

"""
    gelu(x, approximate=false)

x times the normal distribution function of x (Hendrycks and Gimpel 2016), exactly, or by their tanh; elementwise on tensors.
"""
gelu(x::Tensor, approximate::Bool=false) = approximate ? GELU_TANH(x) : GELU(x)
gelu(x::AbstractFloat) = Kernels.plain_gelu(x)
gelu(x::Real) = gelu(float(x))
gelu(x::Real, approximate::Bool) = approximate ? gelu_tanh(x) : gelu(x)

const SILU = elementwise("silu", SILU_SLOPE; functions=(silu,), doc="x sigmoid(x)")
const GELU = elementwise("gelu", GELU_SLOPE; functions=(gelu,), doc="x times the normal distribution function of x")
const GELU_TANH = elementwise("gelu_tanh", GELU_TANH_SLOPE; functions=(gelu_tanh,), doc="gelu with a tanh in place of erf")
DOTTED[gelu] = (x, approximate=false) -> gelu(x, approximate)

# Bent ones ------------------------------------------------------------------------------------------------------------
#
# The slope, or the limit, of the negative side is an operand: a number, or a parameter with its own gradient.

"""A plain number beside `x`, in the type of that; a dual number stays one."""
weak(x::Union{AbstractFloat,DualNumber}, number::Union{AbstractFloat,Integer}) = oftype(x, number)
weak(x::Real, number::Real) = number

"""
    leaky_relu(x, slope=0.01)

x where it is above 0, else x times `slope`, which may be a parameter (PReLU); elementwise on tensors.
"""
leaky_relu(x::Real, slope::Real=0.01) = x > 0 ? x : x * weak(x, slope)
leaky_relu(x::Tensor, slope=0.01) = LEAKY_RELU(x, slope)

"""
    elu(x, alpha=1)

x where it is above 0, else alpha (exp(x) - 1) (Clevert et al. 2015); elementwise on tensors.
"""
elu(x::Real, alpha::Real=1) = x > 0 ? x : weak(x, alpha) * expm1(x)
elu(x::Tensor, alpha=1) = ELU(x, alpha)

const LEAKY_RELU = elementwise("leaky_relu", (y, x, slope) -> choose(GREATER(x, 0), 1, slope),
    (y, x, slope) -> choose(GREATER(x, 0), 0, x); doc="x where it is above 0, else x times a slope")
const ELU = elementwise("elu", (y, x, alpha) -> choose(GREATER(x, 0), 1, MUL(alpha, EXP(MINIMUM(x, 0)))),
    (y, x, alpha) -> choose(GREATER(x, 0), 0, EXPM1(MINIMUM(x, 0))); doc="x where it is above 0, else alpha (exp(x) - 1)")
DOTTED[leaky_relu] = (x, slope=0.01) -> LEAKY_RELU(x, slope)
DOTTED[elu] = (x, alpha=1) -> ELU(x, alpha)

# Made of others -------------------------------------------------------------------------------------------------------

const SELU_SCALE, SELU_ALPHA = 1.0507009873554805, 1.6732632423543772

"""
    selu(x)

The scaled [`elu`](@ref) that keeps mean 0 and variance 1 (Klambauer et al. 2017); elementwise on tensors.
"""
selu(x::Tensor) = MUL(SELU_SCALE, ELU(x, SELU_ALPHA))
selu(x::Real) = weak(float(x), SELU_SCALE) * elu(float(x), SELU_ALPHA)

"""
    mish(x)

x tanh(softplus(x)) (Misra 2019); elementwise on tensors.
"""
mish(x::Tensor) = MUL(x, TANH(SOFTPLUS(x)))
mish(x::Real) = x * tanh(softplus(x))

"""
    hard_swish(x)

x times x + 3 limited to [0, 6], divided by 6 (Howard et al. 2019); elementwise on tensors.
"""
hard_swish(x::Tensor) = MUL(MUL(x, CLIP(ADD(x, 3), 0, 6)), 1 / 6)
hard_swish(x::Real) = x * clamp(x + 3, 0, 6) / 6

"""
    softsign(x)

x / (1 + |x|); elementwise on tensors.
"""
softsign(x::Tensor) = DIV(x, ADD(1, ABS(x)))
softsign(x::Real) = x / (1 + abs(x))

"""
    log_sigmoid(x)

log(sigmoid(x)), without overflow; elementwise on tensors.
"""
log_sigmoid(x::Tensor) = NEG(SOFTPLUS(NEG(x)))
log_sigmoid(x::Real) = -softplus(-x)

for (name, f) in (("selu", selu), ("mish", mish), ("hard_swish", hard_swish), ("softsign", softsign), ("log_sigmoid", log_sigmoid))
    DOTTED[f] = f
    FUNCTIONS[name] = f
end
export silu, gelu, gelu_tanh, leaky_relu, elu, selu, mish, hard_swish, softsign, log_sigmoid
