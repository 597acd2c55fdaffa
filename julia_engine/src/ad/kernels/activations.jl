# Activations of single numbers, beside those of functions.jl.

@inline plain_silu(x) = x * fast_sigmoid(x)
plain_gelu(x::T) where {T} = x * (plain_erfc(x * T(-sqrt(0.5))) * T(0.5))
@inline plain_gelu_tanh(x::T) where {T} =
    T(0.5) * (one(T) + fast_tanh(x * muladd(x * x, T(GELU_CUBIC), T(GELU_LINEAR)))) * x
@inline plain_leaky_relu(x, slope) = ifelse(x > 0, x, x * slope)
@inline plain_elu(x, alpha) = ifelse(x > 0, x, alpha * fast_expm1(x))

# Of the polynomial in the approximation of gelu by Hendrycks and Gimpel (2016).
const GELU_LINEAR = sqrt(2 / pi)
const GELU_CUBIC = sqrt(2 / pi) * 0.044715
