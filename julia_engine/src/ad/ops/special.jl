# Special functions, by formulas of our own (ad/kernels/special.jl): the error function and the gamma function's relatives.
#
# In Float64 `erf` is within 6 units in the last place, `erfc` within 16, `gammaln` and `polygamma` within 1e-13 of the value
# or, near their zeros, of 1.

for (f, plain, op) in ((:erf, :plain_erf, :ERF), (:erfc, :plain_erfc, :ERFC), (:gammaln, :plain_gammaln, :GAMMALN))
    @eval $f(x::AbstractFloat) = Kernels.$plain(x)
    @eval $f(x::Real) = $f(float(x))
    @eval $f(x::Tensor) = $op(x)
end
@doc "The error function, 2/√π times the integral of exp(-t²) from 0 to x; elementwise on tensors." erf
@doc "1 - erf(x), exact where that is small; elementwise on tensors." erfc
@doc "log |Γ(x)|; elementwise on tensors." gammaln

const ERF = elementwise("erf", :($(2 / sqrt(pi)) * exp(-(x^2))); functions=(erf,),
    doc="the error function 2/√π ∫₀ˣ exp(-t²) dt")
const ERFC = elementwise("erfc", :($(-2 / sqrt(pi)) * exp(-(x^2))); functions=(erfc,),
    doc="1 - erf(x), exact where that is small")
const GAMMALN = elementwise("gammaln", :(digamma(x)); functions=(gammaln,), doc="log |Γ(x)|")

const POLYGAMMA = register!(Op("polygamma", (inputs, attrs) -> (copy(inputs[1].dims), check_float(inputs[1].eltype)); batch=trailing,
    forward=(p, out, inputs, attrs) ->
        emit_arrays!(p, (y, x) -> (y .= Kernels.plain_polygamma.(attrs.n, x); nothing), Memory[out], inputs),
    backward=Any[(g, y, inputs, attrs) -> MUL(g, polygamma(attrs.n + 1, inputs[1]))],
    jvp=(t, y, inputs, attrs) -> MUL(t[1], polygamma(attrs.n + 1, inputs[1])), attrs=[:n], doc="derivative n of digamma"))

"""
    polygamma(n, x)

Derivative `n` of [`digamma`](@ref), elementwise, for x > -100.
"""
function polygamma(n::Integer, x::Tensor)
    n >= 0 || throw(ConfigurationError("polygamma: n must not be negative, got $n"))
    return apply(POLYGAMMA, Tensor[x], attributes(:n => Int(n)))
end
polygamma(n::Integer, x::Real) = Kernels.plain_polygamma(Int(n), float(x))

"""
    digamma(x)

The derivative of [`gammaln`](@ref), elementwise, for x > -100.
"""
digamma(x) = polygamma(0, x)
DOTTED[digamma] = digamma

"""
    logit(x)

log(x / (1 - x)), the inverse of [`sigmoid`](@ref), elementwise.
"""
logit(x::Tensor) = SUB(LOG(x), LOG1P(NEG(x)))
logit(x::Real) = log(x) - log1p(-x)
DOTTED[logit] = logit
