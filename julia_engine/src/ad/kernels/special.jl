# Special functions of single numbers, by the formulas of the numpy engine's ops/special.py: W. J. Cody's rational
# approximations of the error function (Mathematics of Computation 23, 1969), and asymptotic series of the gamma function's
# relatives. The coefficient of the lowest power comes first.

const ERF_NEAR = ((3209.37758913846947, 377.485237685302021, 113.864154151050156, 3.16112374387056560, 1.85777706184603153e-1),
    (2844.23683343917062, 1282.61652607737228, 244.024637934444173, 23.6012909523441209, 1.0))
const ERF_MIDDLE = ((1230.33935479799725, 2051.07837782607147, 1712.04761263407058, 881.952221241769090, 298.635138197400131,
        66.1191906371416295, 8.88314979438837594, 0.564188496988670089, 2.15311535474403846e-8),
    (1230.33935480374942, 3439.36767414372164, 4362.61909014324716, 3290.79923573345963, 1621.38957456669019, 537.181101862009858,
        117.693950891312499, 15.7449261107098347, 1.0))
const ERF_FAR = ((6.58749161529837803e-4, 1.60837851487422766e-2, 0.125781726111229246, 0.360344899949804439, 0.305326634961232344,
        1.63153871373020978e-2),
    (2.33520497626869185e-3, 6.05183413124413191e-2, 0.527905102951428412, 1.87295284992346725, 2.56852019228982242, 1.0))
ratio(c, x) = evalpoly(x, c[1]) / evalpoly(x, c[2])

"""erfc(x) for x > 0.46875, in Float64."""
function erfc_above(x::Float64)
    x > 30 && return 0.0
    scaled = x <= 4 ? ratio(ERF_MIDDLE, x) : (z = 1 / (x * x); (1 / sqrt(pi) - z * ratio(ERF_FAR, z)) / x)
    short = floor(16x) / 16  # exp(-x²) without the rounding of x²: what is squared has few digits, and the rest is small
    return exp(-short * short) * exp(-(x - short) * (x + short)) * scaled
end
function plain_erf(x::T) where {T}
    a = Float64(x)
    isnan(a) && return x
    return T(abs(a) <= 0.46875 ? a * ratio(ERF_NEAR, a * a) : copysign(1 - erfc_above(abs(a)), a))
end
function plain_erfc(x::T) where {T}
    a = Float64(x)
    isnan(a) && return x
    abs(a) <= 0.46875 && return T(1 - a * ratio(ERF_NEAR, a * a))
    return T(a < 0 ? 2 - erfc_above(-a) : erfc_above(a))
end

# Where x is small, gammaln and polygamma are taken at x + m by their recurrences. The factors, and terms, of a shift are taken in
# pairs, from both ends: (x + k) (x + m - k) = x (x + m) + k (m - k).
const SHIFT = 16
const BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)

# Of digamma: the factorial of a larger number and what it is multiplied with are beyond Float64.
const MOST_DERIVATIVES = 150

"""What lies between x and the next whole number, exactly, from -0.5 to 0.5."""
to_whole(x::Float64) = x - round(x)

"""log Γ(x) for x >= 8, by Stirling's series."""
function gammaln_beyond(x::Float64)
    inverse, series = 1 / x, 0.0
    for k in length(BERNOULLI):-1:1
        series = series * inverse * inverse + BERNOULLI[k] / (2k * (2k - 1))
    end
    return (x - 0.5) * (log(x) - 1) + (log(2pi) / 2 - 0.5) + series * inverse
end
function gammaln_above(x::Float64)
    x >= 8 && return gammaln_beyond(x)
    ends = x * (x + 7)
    return gammaln_beyond(x + 8) - log(ends * (ends + 6) * (ends + 10) * (ends + 12))
end
function plain_gammaln(x::T) where {T}
    a = Float64(x)
    isnan(a) && return x
    (isinf(a) || (a <= 0 && a == floor(a))) && return T(Inf)
    a >= 0.5 && return T(gammaln_above(a))
    return T(log(pi) - log(abs(sin(pi * to_whole(a)))) - gammaln_above(1 - a))
end

"""Derivative `n` of digamma; what is negative is reflected."""
function plain_polygamma(n::Int, x::T) where {T}
    at = Float64(x)
    isnan(at) && return x
    at < 0 && at == floor(at) && return T(isodd(n) ? Inf : NaN)
    at < 0 || return T(polygamma_above(n, at))
    reflected = (isodd(n) ? -1 : 1) * polygamma_above(n, 1 - at)
    return T(reflected - float(pi)^(n + 1) * slope_of_cot(to_whole(at), n))
end
"""Derivative `n` of digamma for x >= SHIFT + n, by its asymptotic series."""
function polygamma_beyond(n::Int, x::Float64)
    inverse, series = 1 / x, 0.0
    for k in length(BERNOULLI):-1:1
        series = series * inverse * inverse + BERNOULLI[k] * (n == 0 ? 1 / 2k : combinations(2k + n - 1, 2k))
    end
    n == 0 && return log(x) - 0.5 * inverse - series * inverse * inverse
    leading = inverse  # (n - 1)! / xⁿ, whose factors may be beyond the range of numbers
    for k in 1:n-1
        leading *= k * inverse
    end
    return (iseven(n) ? -1 : 1) * leading * (1 + n / 2 * inverse + series * inverse * inverse)
end
function polygamma_above(n::Int, x::Float64)
    x >= SHIFT + n && return polygamma_beyond(n, x)
    shift = SHIFT + n + n % 2
    if n == 0
        ends = x * (x + (shift - 1))
        total = 1 / ends
        for k in 1:shift÷2-1
            total += 1 / (ends + k * (shift - 1 - k))
        end
        total *= 2x + (shift - 1)
    else
        total = (1 / x)^(n + 1)
        for k in 1:shift-1
            total += (1 / (x + k))^(n + 1)
        end
    end
    return polygamma_beyond(n, x + shift) - (isodd(n) ? -1 : 1) * factorial_of(n) * total
end

"""Derivative `n` of the cotangent at πx, |x| <= 0.5, a polynomial of it: (cot)' = -(1 + cot²)."""
function slope_of_cot(x::Float64, n::Int)
    # The smaller of both angles has all its digits.
    cot = abs(x) <= 0.25 ? 1 / tan(pi * x) : copysign(tan(pi * (0.5 - abs(x))), x)
    n == 0 && return cot
    n == 1 && return -(1 + cot^2)
    polynomial = [0.0, 1.0]  # the lowest power first
    for _ in 1:n
        slope = [k * polynomial[k+1] for k in 1:length(polynomial)-1]
        polynomial = -([slope; 0.0; 0.0] .+ [0.0; 0.0; slope])
    end
    return evalpoly(cot, polynomial)
end
factorial_of(n::Int) = prod(1.0:n)
combinations(n::Int, k::Int) = foldl((found, j) -> found * (n - k + j) / j, 1:k; init=1.0)

function plain_logit(x::Real)
    off = 2 * (x - oftype(x, 0.5))
    abs(off) < 0.5 && return log1p(off) - log1p(-off)
    return 0 <= x <= 1 ? log(x) - log1p(-x) : oftype(x, NaN)
end
