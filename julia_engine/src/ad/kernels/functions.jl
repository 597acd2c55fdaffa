# Elementary functions that LLVM can vectorise: no branches, no tables, no calls.
#
# Base's own exp, tanh, log ... branch, and stop the vectoriser: inside a loop they cost 16 to 77 times as much. The
# polynomials are interpolations at Chebyshev points of the stated intervals, computed with 50 digits; in Float32
# results are within 2 units in the last place, in Float64 within 3. NaN, infinities, zeros, subnormal results and
# overflow come out as IEEE arithmetic wants them, and nothing throws: log(-1) is NaN, as in a graph it must be.

bits(::Type{Float32}) = Int32
bits(::Type{Float64}) = Int64
mantissa(::Type{Float32}) = Int32(23)
mantissa(::Type{Float64}) = Int64(52)
bias(::Type{Float32}) = Int32(127)
bias(::Type{Float64}) = Int64(1023)

# Adding this number leaves the nearest integer in the low bits of the sum: it rounds, and converts, in one addition.
rounder(::Type{Float32}) = 12582912.0f0
rounder(::Type{Float64}) = 6755399441055744.0

log2e(::Type{T}) where {T} = T(1.4426950408889634)
ln2_high(::Type{Float32}) = 0.693145751953125f0
ln2_low(::Type{Float32}) = 1.428606765330187f-6
ln2_high(::Type{Float64}) = 0.6931471803691238
ln2_low(::Type{Float64}) = 1.9082149292705877e-10

# (exp(r) - 1 - r) / r² for |r| <= log(2) / 2
const EXP32 = (0.500000001353873f0, 0.16666666681704215f0, 0.04166646419740569f0, 0.008333310844647862f0,
    0.0013933730715792083f0, 0.00019891080463998843f0)
const EXP64 = (0.5, 0.1666666666666667, 0.04166666666666667, 0.008333333333326084, 0.0013888888888883711,
    0.0001984126987500228, 2.480158732567746e-05, 2.755725517000089e-06, 2.755727347871858e-07,
    2.5105312729622103e-08, 2.09147553258932e-09)
# (2 atanh(s) - 2 s) / s³ by s² for |s| <= (√2 - 1) / (√2 + 1)
const LOG32 = (0.6666666655358554f0, 0.40000122584582097f0, 0.285507364053582f0, 0.23332761807741403f0)
const LOG64 = (0.6666666666666666, 0.4000000000000089, 0.28571428570795937, 0.22222222393451754, 0.18181795454619548,
    0.15386249783145214, 0.13268503447792365, 0.1308944373626974)
# (sin(r) - r) / r³ and (cos(r) - 1 + r²/2) / r⁴ by r² for |r| <= π / 4
const SIN32 = (-0.16666666663832763, 0.008333331865959415, -0.00019840082012765537, 2.7249314054698804e-06)
const COS32 = (0.0416666666643024, -0.0013888887664713619, 2.4800596435621998e-05, -2.7300448619488353e-07)
const SIN64 = (-0.16666666666666666, 0.008333333333333331, -0.00019841269841265017, 2.755731921930192e-06,
    -2.5052106219521895e-08, 1.6058529572267877e-10, -7.586576588171073e-13)
const COS64 = (0.041666666666666664, -0.0013888888888888887, 2.4801587301584618e-05, -2.7557319221382114e-07,
    2.087675578389404e-09, -1.1470459749675607e-11, 4.745804889760674e-14)
const HALF_PI = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)

exp_polynomial(::Type{Float32}) = EXP32
exp_polynomial(::Type{Float64}) = EXP64
log_polynomial(::Type{Float32}) = LOG32
log_polynomial(::Type{Float64}) = LOG64

# The largest and smallest arguments at which exp is neither infinite nor zero, and a little more.
exp_most(::Type{Float32}) = 89.0f0
exp_most(::Type{Float64}) = 710.0
exp_least(::Type{Float32}) = -104.0f0
exp_least(::Type{Float64}) = -746.0

@inline two_to(::Type{T}, k) where {T} = reinterpret(T, (k + bias(T)) << mantissa(T))
@inline clamped(x, low, high) = ifelse(x < low, low, ifelse(x > high, high, x))  # NaN stays NaN

"""Return k and p with exp(x) = 2^k (1 + p), |p| < 0.42."""
@inline function exp_parts(x::T) where {T}
    shifted = muladd(x, log2e(T), rounder(T))
    k = reinterpret(bits(T), shifted) - reinterpret(bits(T), rounder(T))
    rounded = shifted - rounder(T)
    r = muladd(rounded, -ln2_low(T), muladd(rounded, -ln2_high(T), x))
    return k, muladd(r * r, evalpoly(r, exp_polynomial(T)), r)
end

@inline function fast_exp(x::T) where {T}
    k, p = exp_parts(clamped(x, exp_least(T), exp_most(T)))
    half = k >> 1  # 2^k in two factors, so that subnormal results and those near the largest number are right
    return (one(T) + p) * two_to(T, half) * two_to(T, k - half)
end

"""exp(x) - 1 for x between -40 and where exp overflows."""
@inline function expm1_inside(x::T) where {T}
    k, p = exp_parts(x)
    t = two_to(T, k - one(k))
    return 2 * muladd(t, p, t - T(0.5))
end

@inline function fast_expm1(x::T) where {T}
    return ifelse(abs(x) < 2 * floatmin(T), x, expm1_inside(clamped(x, T(-40), exp_most(T))))
end

@inline function fast_tanh(x::T) where {T}
    size = abs(x)
    t = expm1_inside(2 * ifelse(size > T(22), T(22), size))
    return copysign(t / (t + 2), x)
end

@inline fast_sigmoid(x::T) where {T} = one(T) / (one(T) + fast_exp(-x))

root_half(::Type{Float32}) = reinterpret(Int32, 0.70710677f0)
root_half(::Type{Float64}) = reinterpret(Int64, 0.7071067811865476)
subnormal_scale(::Type{Float32}) = 2.0f0^25
subnormal_scale(::Type{Float64}) = 2.0^54
@inline as_float(::Type{Float32}, k::Int32) = Float32(k)
# Exact for |k| < 2^51, and vectorised on processors that cannot convert 64-bit integers.
@inline as_float(::Type{Float64}, k::Int64) = reinterpret(Float64, k + reinterpret(Int64, rounder(Float64))) - rounder(Float64)

@inline function fast_log(x::T) where {T}
    small = x < floatmin(T)
    scaled = ifelse(small, x * subnormal_scale(T), x)
    one_bits = bias(T) << mantissa(T)
    shifted = reinterpret(bits(T), scaled) + (one_bits - root_half(T))
    k = (shifted >> mantissa(T)) - bias(T)
    m = reinterpret(T, (shifted & ((one(k) << mantissa(T)) - one(k))) + root_half(T))  # in [√½, √2)
    e = as_float(T, k) - ifelse(small, log2_of(subnormal_scale(T)), zero(T))
    f = m - one(T)
    s = f / (2 + f)
    z = s * s
    half = T(0.5) * f * f
    y = e * ln2_high(T) - ((half - muladd(s, muladd(z, evalpoly(z, log_polynomial(T)), half), e * ln2_low(T))) - f)
    y = ifelse(x == T(Inf), x, y)
    y = ifelse(x == 0, T(-Inf), y)
    return ifelse(x >= 0, y, T(NaN))
end
log2_of(::Float32) = 25.0f0
log2_of(::Float64) = 54.0

@inline function fast_log1p(x::T) where {T}
    # W. Kahan's: the rounding error of 1 + x is divided out again.
    u = one(T) + x
    d = u - one(T)
    y = fast_log(u) * (x / ifelse(d == 0, one(T), d))
    return ifelse(d == 0, x, ifelse(x == T(Inf), x, y))
end

@inline function fast_softplus(x::T) where {T}
    return ifelse(x > 0, x, ifelse(x <= 0, zero(T), x)) + fast_log1p(fast_exp(-abs(x)))
end

# Beyond this size the quadrant has too many bits for three parts of π/2; those arguments go to Base's own functions.
const TURNS = 1.0e6

@inline function turned(x::Float64)
    shifted = muladd(x, 0.6366197723675814, rounder(Float64))
    q = reinterpret(Int64, shifted)
    k = shifted - rounder(Float64)
    a = x - k * HALF_PI[1]
    b = k * HALF_PI[2]
    r = a - b
    rest = ((a - r) - b) - k * HALF_PI[3]
    y = r + rest
    return q, y, (r - y) + rest
end

@inline function fast_sincos(x::Float64)
    q, r, rest = turned(x)
    z = r * r
    sine = r + muladd(z * r, evalpoly(z, SIN64), rest * (1 - 0.5 * z))
    half = 0.5 * z
    w = 1 - half
    cosine = w + (((1 - w) - half) + muladd(z * z, evalpoly(z, COS64), -r * rest))
    return q, sine, cosine
end

@inline function fast_sincos(x::Float32)
    q, r, _ = turned(Float64(x))
    z = r * r
    return q, muladd(z * r, evalpoly(z, SIN32), r), muladd(z * z, evalpoly(z, COS32), muladd(z, -0.5, 1.0))
end

@inline negated_if(x, condition) = ifelse(condition, -x, x)

@inline function fast_sin(x::T) where {T}
    q, sine, cosine = fast_sincos(x)
    return T(negated_if(ifelse((q & 1) == 0, sine, cosine), (q & 2) != 0))
end

@inline function fast_cos(x::T) where {T}
    q, sine, cosine = fast_sincos(x)
    return T(negated_if(ifelse((q & 1) == 0, cosine, sine), ((q + 1) & 2) != 0))
end

@inline function fast_tan(x::T) where {T}
    q, sine, cosine = fast_sincos(x)
    odd = (q & 1) != 0
    return T(negated_if(ifelse(odd, cosine, sine) / ifelse(odd, sine, cosine), odd))
end

slow_sin(x::T) where {T} = isfinite(x) ? sin(x) : T(NaN)
slow_cos(x::T) where {T} = isfinite(x) ? cos(x) : T(NaN)
slow_tan(x::T) where {T} = isfinite(x) ? tan(x) : T(NaN)

# Seldom in a hot loop: Base's, made total.
plain_asin(x::T) where {T} = abs(x) <= 1 ? asin(x) : T(NaN)
plain_acos(x::T) where {T} = abs(x) <= 1 ? acos(x) : T(NaN)
plain_atan(x) = atan(x)
plain_sinh(x) = sinh(x)
plain_acosh(x::T) where {T} = x < 1 ? T(NaN) : acosh(x)
plain_atanh(x::T) where {T} = abs(x) > 1 ? T(NaN) : atanh(x)
plain_log2(x::T) where {T} = x < 0 ? T(NaN) : log2(x)
plain_log10(x::T) where {T} = x < 0 ? T(NaN) : log10(x)
plain_sinc(x::T) where {T} = isinf(x) ? zero(T) : sinc(x)
plain_logaddexp(a, b) = a == b ? a + oftype(a, log(2)) : max(a, b) + log1p(exp(-abs(a - b)))
plain_cosh(x) = cosh(x)
function plain_pow(x::T, p::T) where {T}
    x < 0 && isfinite(p) && p != trunc(p) || return x^p
    return x == T(-Inf) ? ifelse(p > 0, T(Inf), zero(T)) : T(NaN)  # as IEEE 754 has it
end

@inline fast_sqrt(x) = Core.Intrinsics.sqrt_llvm(x)
@inline half_power(x::T) where {T} = ifelse(x == T(-Inf), T(Inf), fast_sqrt(x) + zero(T))  # 0 at -0
@inline square(x) = x * x
@inline relu(x::T) where {T} = ifelse(x > 0, x, ifelse(x <= 0, zero(T), x))  # NaN passes
@inline step(x::T) where {T} = ifelse(x > 0, one(T), zero(T))
@inline signum(x::T) where {T} = ifelse(x > 0, one(T), ifelse(x < 0, -one(T), x))
@inline larger(a, b) = ifelse((a > b) | (a != a), a, b)  # NaN wins, as in numpy
@inline smaller(a, b) = ifelse((a < b) | (a != a), a, b)
@inline limited(x, low, high) = smaller(larger(x, low), high)
@inline chosen(c, a, b) = ifelse(c != 0, a, b)
@inline mask(condition::Bool, ::T) where {T} = ifelse(condition, one(T), zero(T))
@inline less(a, b) = mask(a < b, a)
@inline less_equal(a, b) = mask(a <= b, a)
@inline greater(a, b) = mask(a > b, a)
@inline greater_equal(a, b) = mask(a >= b, a)
@inline equal(a, b) = mask(a == b, a)
@inline not_equal(a, b) = mask(a != b, a)
@inline is_nan(x) = mask(x != x, x)
@inline is_finite(x) = mask(x - x == 0, x)
@inline is_infinite(x::T) where {T} = mask(abs(x) == T(Inf), x)
@inline both_hold(a, b) = mask((a != 0) & (b != 0), a)
@inline one_holds(a, b) = mask((a != 0) | (b != 0), a)
@inline fails(a) = mask(a == 0, a)
@inline tanh_gradient(g::T, y::T) where {T} = g * (one(T) - y * y)
@inline sigmoid_gradient(g::T, y::T) where {T} = g * (y * (one(T) - y))
@inline relu_gradient(g::T, y::T) where {T} = ifelse(y > 0, g, zero(T))  # 0 even of an infinite gradient
@inline add_tanh(a, b) = fast_tanh(a + b)
@inline add_sigmoid(a, b) = fast_sigmoid(a + b)
@inline add_relu(a, b) = relu(a + b)
@inline mul_add(c, a, b) = c + a * b
