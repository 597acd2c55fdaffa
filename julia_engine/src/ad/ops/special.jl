# Special functions, by our own formulas (ad/kernels/special.jl): the error function and the gamma function's relatives.
#
# In Float64 `erf` is within 6 units in the last place, `erfc` within 16, `gammaln` and `polygamma` within 1e-13 of the value
# or, near their zeros, of the largest term of their sums.

for (f, plain, op) in ((:erf, :plain_erf, :ERF), (:erfc, :plain_erfc, :ERFC), (:gammaln, :plain_gammaln, :GAMMALN),
    (:logit, :plain_logit, :LOGIT))
    @eval $f(x::AbstractFloat) = Kernels.$plain(x)
    @eval $f(x::Real) = $f(float(x))
    @eval $f(x::Tensor) = $op(x)
end
@doc "The error function, 2/√π times the integral of exp(-t²) from 0 to x; elementwise on tensors." erf
@doc "1 - erf(x), exact where that is small; elementwise on tensors." erfc
@doc "log |Γ(x)|; elementwise on tensors." gammaln
@doc "log(x / (1 - x)), the inverse of [`sigmoid`](@ref), exact near 0.5; elementwise on tensors." logit

const ERF = elementwise("erf", :($(2 / sqrt(pi)) * exp(-(x^2))); functions=(erf,),
    doc="the error function 2/√π ∫₀ˣ exp(-t²) dt")
const ERFC = elementwise("erfc", :($(-2 / sqrt(pi)) * exp(-(x^2))); functions=(erfc,),
    doc="1 - erf(x), exact where that is small")
const LOGIT = elementwise("logit", :(1 / (x * (1 - x))); functions=(logit,), doc="log(x / (1 - x)), the inverse of sigmoid, exact near 0.5")
const GAMMALN = elementwise("gammaln", :(digamma(x)); functions=(gammaln,), doc="log |Γ(x)|")

const POLYGAMMA = register!(Op("polygamma", (inputs, attrs) -> (copy(inputs[1].dims), check_float(inputs[1].eltype)); batch=trailing,
    forward=(p, out, inputs, attrs) ->
        emit_arrays!(p, (y, x) -> (y .= Kernels.plain_polygamma.(attrs.n, x); nothing), Memory[out], inputs),
    backward=Any[(g, y, inputs, attrs) -> MUL(g, polygamma(attrs.n + 1, inputs[1]))],
    jvp=(t, y, inputs, attrs) -> MUL(t[1], polygamma(attrs.n + 1, inputs[1])), attrs=[:n], doc="derivative n of digamma"))

"""
    polygamma(n, x)

Derivative `n` of [`digamma`](@ref), elementwise, for n up to 150; at negative poles Inf for odd n, NaN for even n.
"""
polygamma(n::Integer, x::Tensor) = apply(POLYGAMMA, Tensor[x], attributes(:n => order_of(n)))
polygamma(n::Integer, x::Real) = Kernels.plain_polygamma(order_of(n), float(x))
function order_of(n::Integer)
    n >= 0 || throw(ConfigurationError("polygamma: n must not be negative, got $n"))
    n <= Kernels.MOST_DERIVATIVES || throw(ConfigurationError("polygamma: n must be $(Kernels.MOST_DERIVATIVES) at most, got $n"))
    return Int(n)
end

"""
    digamma(x)

The derivative of [`gammaln`](@ref), elementwise.
"""
digamma(x) = polygamma(0, x)
DOTTED[digamma] = digamma
