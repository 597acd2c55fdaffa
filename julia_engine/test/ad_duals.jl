# Dual numbers of dual numbers: every function that the op table has for numbers, differentiated three times.

using TwinGrad.AD: AD, DualNumbers, polygamma
using TwinGrad.AD.DualNumbers: dual, partials

"""A number whose partials are one at three levels: its function's value holds the first three derivatives."""
function moving(x)
    first = dual(x, k -> 1.0, Val(1), Val(1))
    second = dual(first, k -> one(first), Val(1), Val(2))
    return dual(second, k -> one(second), Val(1), Val(3))
end
plain(d::AD.Dual) = plain(DualNumbers.primal(d))
plain(d::Real) = Float64(d)
slope(d, level) = d isa AD.Dual && level_of(d) == level ? partials(d)[1] : 0.0
level_of(::AD.Dual{N,T,L}) where {N,T,L} = L
"""The value and the derivatives of order one to three."""
orders(d) = Float64[plain(d), plain(slope(d, 3)), plain(slope(slope(d, 3), 2)), plain(slope(slope(slope(d, 3), 2), 1))]

# Where a function is tried, beside 0, where the formulas of some change; the others take any number.
const DUAL_PLACES = Dict{Any,Any}(asin => (-0.7, 0.3), acos => (-0.7, 0.3), atanh => (-0.7, 0.3), acosh => (1.3, 4.0),
    log => (0.3, 3.0), log2 => (0.3, 3.0), log10 => (0.3, 3.0), sqrt => (0.3, 3.0), log1p => (-0.5, 3.0), logit => (0.2, 0.7),
    gammaln => (0.4, 2.5, -1.3), digamma => (0.4, 2.5, -7.8), sinc => (0.0, 0.2, -0.3, 1.4), inv => (0.4, -2.1), cbrt => (0.4, -2.1),
    asec => (1.3, -2.5), acsc => (1.3, -2.5), acoth => (1.3, -2.5), asech => (0.3, 0.8), (f => (0.4, -1.3) for f in (csc, cot, csch, coth, acsch))...)
const KINKS = (abs, sign, relu, floor, ceil, round, trunc, AD.hard_swish, leaky_relu, elu, AD.selu, AD.softsign)

"""Derivatives of tensors by the ops' own rules, order by order."""
function by_ops(@nospecialize(f), x)
    g, found = Hidden(f), Float64[]
    for _ in 1:4
        push!(found, g(x))
        g = Hidden(grad(g))
    end
    return found
end

@testset "copysign at zero has derivative 0 in both modes" begin
    for b in (1.0, -1.0)
        @test derivative(x -> copysign(x, b), 0.0) == 0 == grad(x -> copysign(x, b))(0.0)
    end
end

@testset "three derivatives of every function of one number" begin
    tried = 0
    for f in sort!([f for f in keys(AD.DOTTED) if f isa Function && applicable(f, 0.3)]; by=string)
        f in (+, !, max, min, hypot, ifelse, isnan, isinf, isfinite, identity, ==, !=, <, <=, >, >=) && continue
        for x in get(DUAL_PLACES, f, f in KINKS ? (-1.3, 0.4) : (-1.3, 0.0))
            found, expected = orders(f(moving(x))), by_ops(x -> f.(x), x)
            @test (f, x, isapprox(found, expected; rtol=1e-8, atol=1e-9)) == (f, x, true)
        end
        tried += 1
    end
    @test tried > 45
end

@testset "three derivatives of every function of two numbers, by each and by both" begin
    for f in (+, -, *, /, ^, atan, hypot, max, min, mod, rem, copysign, logaddexp, leaky_relu, elu)
        for (a, b) in ((1.7, 0.6), (0.8, 2.3))[1:min(draws(1), 2)]
            x = f in (leaky_relu, elu) ? -a : a
            for operands in (x -> (x, b), x -> (a, x), x -> (x, x * x))
                found, expected = orders(f(operands(moving(x))...)), by_ops(x -> f.(operands(x)...), x)
                @test (f, a, b, isapprox(found, expected; rtol=1e-8, atol=1e-9)) == (f, a, b, true)
            end
        end
    end
    @test orders(logaddexp(moving(0.5), 0.5))[2:3] ≈ [0.5, 0.25]  # a tie is no kink
    @test orders(hypot(moving(0.0), 0.0))[2] == 0
end

@testset "numbers of other types, and mixed ones" begin
    for f in (erf, erfc, gelu, gelu_tanh, silu, gammaln, digamma, AD.mish, AD.selu, leaky_relu, elu, AD.log_sigmoid, AD.softsign, AD.hard_swish)
        @test derivative(f, 1.5f0) isa Float32 && derivative(f, 1.5f0) ≈ derivative(f, 1.5)
        @test derivative(f, 1) ≈ derivative(f, 1.0)
    end
    @test derivative(x -> gelu(x, true), 0.4) ≈ derivative(gelu_tanh, 0.4) && derivative(x -> gelu(x, false), 0.4) ≈ derivative(gelu, 0.4)
    @test derivative(s -> leaky_relu(-2.0, s), 0.3) == -2 && derivative(s -> elu(-1.0, s), 2.0) ≈ expm1(-1)
    @test derivative(x -> polygamma(2, x), 1.5) ≈ polygamma(3, 1.5)
    @test forward_gradient(v -> sum(erf, v), [0.1, 0.2]) ≈ 2 / sqrt(pi) .* exp.(-[0.1, 0.2] .^ 2)
end
