# Forward mode: every function's derivative, ties and special values, derivatives within derivatives, chunks, allocations.

using TwinGrad.AD: AD, DualNumbers
using TwinGrad.AD.DualNumbers: BINARY, UNARY, partials, primal
using LinearAlgebra: normalize

central(f, x, h=cbrt(eps()) * max(1, abs(x))) = (f(x + h) - f(x - h)) / 2h

# Where a function is tried; the others take any number.
const PLACES = Dict(:asin => (-0.7, 0.3), :acos => (-0.7, 0.3), :atanh => (-0.7, 0.3), :acosh => (1.3, 4.0),
    :asec => (-1.7, 2.5), :acsc => (-1.7, 2.5), :acoth => (-1.7, 2.5), :asech => (0.2, 0.8), :log => (0.1, 3.0),
    :log2 => (0.1, 3.0), :log10 => (0.1, 3.0), :sqrt => (0.1, 3.0), :log1p => (-0.5, 3.0))

const OF_RECORDS = [nameof(f) for op in values(AD.TABLE) for f in op.functions
    if length(op.derivatives) == 1 && parentmodule(f) !== AD]

@testset "the derivative of every elementary function" begin
    @test length(OF_RECORDS) >= 17 && isempty(intersect(OF_RECORDS, first.(UNARY)))
    for name in [first.(UNARY)...; OF_RECORDS]
        f = Hidden(getfield(Base, name))
        for x in get(PLACES, name, (-1.3, 0.4, 2.1))
            @test (name, x, derivative(f, x)) == (name, x, derivative(f, x)) && isapprox(derivative(f, x), central(f, x);
                rtol=1e-7, atol=1e-8)
            slope = Hidden(t -> derivative(f, t))
            @test isapprox(derivative(slope, x), central(slope, x); rtol=1e-6, atol=1e-7)
            @test derivative(f, Float32(x)) isa Float32
            seeded = DualNumbers.dual(x, k -> Float64(k), Val(7), Val(1))
            @test primal(f(seeded)) == f(x) && collect(partials(f(seeded))) ≈ derivative(f, x) .* (1:7)
        end
    end
    s, c = sincos(DualNumbers.dual(0.3, k -> 1.0, Val(2), Val(1)))
    @test partials(s)[1] == cos(0.3) && partials(c)[2] == -sin(0.3)
    @test derivative(sigmoid, 0.3) ≈ sigmoid(0.3) * (1 - sigmoid(0.3)) && derivative(softplus, 0.3) ≈ sigmoid(0.3)
    @test derivative(x -> ldexp(x, 3), 1.5) == 8
end

@testset "functions of two arguments, by each and by both" begin
    for name in first.(BINARY)
        f = name === :logaddexp ? logaddexp : getfield(Base, name)
        for (a, b) in ((1.7, 0.6), (0.8, 2.3), (2.9, 2.2))
            of_a, of_b = Hidden(t -> f(t, b)), Hidden(t -> f(a, t))
            by_a, by_b = central(of_a, a), central(of_b, b)
            @test isapprox(derivative(of_a, a), by_a; rtol=1e-7, atol=1e-8)
            @test isapprox(derivative(of_b, b), by_b; rtol=1e-7, atol=1e-8)
            for chunk in (1, 2)
                @test isapprox(forward_gradient(Hidden(v -> f(v[1], v[2])), [a, b]; chunk=chunk), [by_a, by_b]; rtol=1e-7, atol=1e-8)
            end
            @test isapprox(forward_gradient(Hidden(v -> f(4, v[2]) + f(v[1], 2) + f(v[1], pi)), [a, b])[2],
                central(Hidden(t -> f(4, t)), b); rtol=1e-7, atol=1e-8)
        end
    end
    for p in (-2, 0, 1, 2, 3, 7, 0.5, -1.5, 2 // 3)
        @test derivative(x -> x^p, 1.7) ≈ p * 1.7^(p - 1)
    end
    @test derivative(x -> x^3 - 2x^2 + x^0 - x^-1, 1.7) ≈ 3 * 1.7^2 - 4 * 1.7 + 1.7^-2
    @test derivative(x -> 2^x, 3.0) ≈ 8log(2) && derivative(x -> ℯ^x, 1.0) ≈ ℯ
    @test derivative(x -> muladd(x, x, 2x) + fma(2, x, x * x) + muladd(x, 3, 1), 1.5) ≈ 13
    @test derivative(x -> clamp(x, 0, 1) + hypot(x, 1), 0.5) ≈ 1 + 0.5 / hypot(0.5, 1)
end

@testset "ties, kinks and special values" begin
    @test derivative(x -> max(x, 2.0), 2.0) == 0.5 && derivative(x -> min(2.0, x), 2.0) == 0.5
    @test forward_gradient(v -> max(v[1], v[2]), [1.0, 1.0]) == [0.5, 0.5]
    @test forward_gradient(v -> min(v[1], v[2]), [1.0, 2.0]) == [1.0, 0.0]
    @test derivative(abs, 0.0) == 0 && derivative(sign, 0.0) == 0 && derivative(relu, 0.0) == 0
    @test derivative(x -> clamp(x, 0.0, 1.0), 0.0) == 1 && derivative(x -> clamp(x, 0.0, 1.0), 1.5) == 0
    @test derivative(sqrt, 0.0) == Inf && derivative(log, 0.0) == Inf && derivative(cbrt, 0.0) == Inf
    @test derivative(x -> x^2, 0.0) == 0 && derivative(x -> x^0.0, 0.0) == 0 && derivative(x -> 0.0^x, 1.5) == 0
    @test isnan(derivative(sin, NaN)) && derivative(exp, -Inf) == 0 && derivative(exp, 710.0) == Inf
    @test isnan(derivative(x -> max(x, NaN), 1.0)) || derivative(x -> max(x, NaN), 1.0) == 0
    @test derivative(floor, 1.5) == 0 && derivative(x -> round(x) + x, 1.2) == 1 && derivative(x -> 3.0, 1.0) == 0
    @test derivative(x -> x > 1 ? x^2 : -x, 2.0) == 4 && derivative(x -> x > 1 ? x^2 : -x, 0.5) == -1
    d = DualNumbers.dual(2.0, k -> 1.0, Val(1), Val(1))
    @test d == 2 && d < 3 && 1 < d && isless(1.5, d) && d <= 2.0 && hash(d) == hash(2.0) && !iszero(zero(d) * 1 + (d - 2))
    @test floor(Int, d) == 2 && occursin("Dual(2.0", sprint(show, d)) && float(d) === d && typeof(one(d)) === typeof(d)
end

@testset "a dictionary finds under a dual number what was computed of the same value and derivatives alone" begin
    cache = Dict{Any,Any}()
    square(x) = get!(() -> x^2, cache, x)
    for x in (3.0, 3, 3.0f0)
        square(x)
        @test derivative(square, x) == 6
        @test derivative(y -> derivative(square, y) + square(y), float(x)) == 2 + 6
        @test derivative(square, x) == 6 && square(x) == 9
    end
    @test forward_gradient(x -> square(x[1]) + x[2], [1.0, 2.0]; chunk=1) == [2, 1]
    @test forward_gradient(x -> square(x[1]) + x[2], [1.0, 2.0]) == [2, 1]
    @test derivative(x -> square(zero(x) + 3) + x, 5.0) == 1
    @test derivative(x -> length(unique([x, 2x, x])), 1.0) == 0 && isequal(DualNumbers.dual(2.0, k -> 0.0, Val(1), Val(1)), 2.0)
end

@testset "mod1 has a derivative where its value is the period, as mod" begin
    for (a, b) in ((6.0, 3.0), (5.5, 3.0), (-1.0, 3.0))
        @test derivative(x -> mod1(x, b), a) == 1 && derivative(x -> mod1(a, x), b) == derivative(x -> a - x * (fld1(a, b) - 1), b)
    end
end

@testset "ranges, quotients, comparisons and lengths of dual numbers are those of numbers" begin
    steps(x) = (s = zero(x); for t in 0:0.1:x; s += x; end; s)
    for x in (0.3, 1.0, 0.05)
        @test derivative(steps, x) == length(0:0.1:x)
    end
    @test derivative(x -> sum(t^2 for t in x:0.5:2), 1.0) ≈ 2 * (1.0 + 1.5 + 2.0)
    @test derivative(x -> sum(t -> t * x, 0:x), 3.0) == 2 * 3 + 0  # of 0, 1, 2 and 3
    @test derivative(x -> sqrt(x)^2 ≈ x ? x^2 : -x, 2.0) == 4.0
    @test derivative(x -> [x, 1.0] ≈ [x + 1e-12, 1.0] ? 3x : x, 2.0) == 3.0
    for f in (fld, cld, div), (a, b) in ((3.0, 2.0), (-3.5, 2.0))
        @test derivative(x -> x - b * f(x, 2), a) == 1.0
        @test derivative(x -> x * f(x, x / a * b), a) == f(a, b)
    end
    @test derivative(mod2pi, 7.0) == 1.0 && derivative(x -> rem2pi(x, RoundNearest)^2, 7.0) ≈ 2 * rem2pi(7.0, RoundNearest)
    @test forward_gradient(v -> normalize(v)[1], [3.0, 4.0]) ≈ [0.128, -0.096]
    @test derivative(x -> derivative(y -> y * fld(y, 2) + steps(y), x) * x, 0.3) ≈ 4.0
end

@testset "derivatives within derivatives are not confused" begin
    @test derivative(x -> x * derivative(y -> x + y, 1.0), 1.0) == 1
    @test derivative(x -> x * derivative(y -> x * y, 2.0), 3.0) == 6
    @test derivative(x -> derivative(y -> derivative(z -> x * y^2 * z^3, x), x), 1.0) ≈ 24
    @test derivative(x -> derivative(t -> derivative(exp, t), x), 0.5) ≈ exp(0.5)
    held(x) = (total = 0.0; for i in 1:2
        total += derivative(y -> (total * y; x * y * i), 1.0)  # the function shares a variable that is assigned
    end; total * x)
    @test derivative(held, 2.0) == 12
    @test derivative(x -> derivative(y -> sum([x, y] .* [y, x]), 1.0), 3.0) == 2
    v = [0.3, -0.7, 1.1]
    f(v) = v[1]^2 * v[2] + exp(v[2] * v[3])
    H = forward_jacobian(w -> forward_gradient(f, w), v)
    e = exp(v[2] * v[3])
    @test H ≈ [2v[2] 2v[1] 0; 2v[1] v[3]^2*e (1+v[2]*v[3])*e; 0 (1+v[2]*v[3])*e v[2]^2*e]
    @test forward_jacobian(w -> forward_gradient(f, w; chunk=2), v; chunk=1) ≈ H
    outer = DualNumbers.dual(1.0, k -> 1.0, Val(2), Val(1)), DualNumbers.dual(1.0, k -> 1.0, Val(3), Val(1))
    @test_throws ShapeError outer[1] + outer[2]
end

rosenbrock(x) = sum(100 * (x[i+1] - x[i]^2)^2 + (1 - x[i])^2 for i in 1:length(x)-1)
function ackley(x)
    squares = cosines = zero(eltype(x))
    for v in x
        squares += v^2
        cosines += cos(2pi * v)
    end
    return -20 * exp(-0.2 * sqrt(squares / length(x))) - exp(cosines / length(x)) + 20 + exp(1)
end

@testset "gradients do not depend on the chunk" begin
    random = AD.MersenneTwister(7)
    # Everything is compiled for each number of directions at once: a campaign takes more of them, in both types.
    most = draws(1) > 1
    chunks = most ? (nothing, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 31, 64) : (nothing, 1, 2, 5, 8, 17, 64)
    for n in (1, 2, 5, 13, 40), (name, f) in (("rosenbrock", Hidden(rosenbrock)), ("ackley", Hidden(ackley))), T in (Float64, Float32)
        n == 1 && name == "rosenbrock" && continue
        most || T === Float64 || n == 13 || continue
        x = rand(random, T, n) .+ T(0.5)
        expected = Float64[central(t -> f([Float64.(x[1:i-1]); t; Float64.(x[i+1:end])]), Float64(x[i])) for i in 1:n]
        for chunk in chunks
            g = forward_gradient(f, x; chunk=chunk)
            @test eltype(g) === T && isapprox(g, expected; rtol=T === Float64 ? 1e-6 : 1e-3)
        end
        buffers = ForwardBuffers(f, x)
        @test forward_gradient!(similar(x), f, x, buffers) == f(x)  # values are those of the plain function
    end
    g(x) = [x[1] * x[2], sin(x[3]), x[1] + x[4] / x[2]]
    x = [1.0, 2.0, 3.0, 4.0]
    expected = [2 1 0 0; 0 0 cos(3) 0; 1 -1 0 0.5]
    @test all(forward_jacobian(g, x; chunk=chunk) ≈ expected for chunk in (nothing, 1, 2, 3, 4, 7))
    @test forward_jacobian!(zeros(3, 4), g, x) ≈ expected
    @test forward_gradient(x -> sum(x' * x), ones(2, 3)) ≈ grad(x -> sum(x' * x))(ones(2, 3))
    @test forward_gradient(x -> sum(x .^ 2), [1, 2]) == [2, 4]
    @test forward_gradient(x -> 1.0, zeros(3)) == zeros(3) && forward_gradient(x -> 0.0, Float64[]) == Float64[]
    @test derivative(t -> (t^2, [t, 1]), 3.0) == (6, [1, 0])
    @test [DualNumbers.default_chunk(n) for n in (0, 1, 12, 13, 24, 25, 12_000)] == [1, 1, 12, 7, 12, 9, 12]
end

@testset "a function may write to its argument: $name" for (name, f) in (
    ("all of it", x -> (x .= x .^ 2; sum(x .* x))), ("its last element", x -> (x[end] = x[1]; sum(x .^ 3))),
    ("after it is read", x -> (y = sum(x .^ 3); x .= 7; y)), ("numbers that stay", x -> (y = sum(x .* x[end]); x[end] = 3.0; y)),
    ("an equal number from a later chunk", x -> (y = sum(x .^ 2); x[1] = x[end÷2+1]; y)),
    ("all by one place", x -> (y = sum(x .^ 3); for i in 1:length(x)-1; x[i] = x[i+1]; end; y)),
    ("elements in another order", x -> (reverse!(x); sum(x .* (1:length(x))))))
    # A campaign takes more sizes: everything is compiled for each number of directions at once.
    f, of_one = Hidden(f), Hidden(x -> [f(x)])
    for n in (draws(1) > 1 ? (1, 3, 12, 13, 30) : (1, 4, 13)), chunk in (nothing, 1, 4, 40),
            values in (fill(3.0, n), randn(AD.MersenneTwister(n), n))
        expected = forward_gradient(f, copy(values); chunk=n)
        before = copy(values)
        @test forward_gradient(f, values; chunk=chunk) == expected && values == before
        @test forward_jacobian(of_one, values; chunk=chunk) == expected'
        g, J = zeros(n), zeros(1, n)
        @test forward_gradient!(g, f, values, ForwardBuffers(f, values; chunk=chunk)) ≈ f(copy(values)) && g == expected
        @test forward_jacobian!(J, of_one, values, ForwardBuffers(of_one, values; chunk=chunk)) == expected' && values == before
        forward_gradient!(before, f, before, ForwardBuffers(f, before; chunk=chunk))
        @test before == expected
    end
end

@testset "nothing is allocated with buffers" begin
    x, g = fill(0.7, 30), zeros(30)
    f(x) = (s = zero(eltype(x)); for v in x
        s += sin(v) * v^2
    end; s)
    measured(g, f::F, x, b) where {F} = @allocated forward_gradient!(g, f, x, b)
    map_!(J, f::F, x, b) where {F} = @allocated forward_jacobian!(J, f, x, b)
    for chunk in (1, 3, 4, 5, 8, 12, 30)
        buffers = ForwardBuffers(f, x; chunk=chunk)
        measured(g, f, x, buffers)
        @test measured(g, f, x, buffers) == 0
    end
    h(x) = (x[1] * x[2], x[3])
    J, buffers = zeros(2, 30), ForwardBuffers(h, x)
    map_!(J, h, x, buffers)
    @test map_!(J, h, x, buffers) == 0
    slope() = @allocated derivative(sin, 0.3)
    slope()
    @test slope() == 0
    @test (@inferred derivative(x -> x^2 * sin(x), 2.0)) ≈ 4sin(2) + 4cos(2)
end

@testset "errors say what to do" begin
    for (kind, f, text) in (
        (NotDifferentiableError, () -> forward_gradient(x -> (y = zeros(2); y[1] = x[1]; sum(y)), ones(2)), "lose its derivative"),
        (NotDifferentiableError, () -> derivative(x -> "a", 1.0), "String"),
        (NotDifferentiableError, () -> forward_gradient(sum, ["a"]), "array of real numbers, got"),
        (NotDifferentiableError, () -> forward_gradient(sum, [1im]), "real and imaginary parts separately"),
        (NotDifferentiableError, () -> derivative(x -> x^2, 1.0im), "real and imaginary parts separately"),
        (ShapeError, () -> derivative(sum, [1.0]), "expected a number"),
        (ShapeError, () -> forward_gradient(x -> x, ones(2)), "forward_jacobian"),
        (ShapeError, () -> forward_gradient(sum, ones(2); chunk=0), "chunk of 1 or more"),
        (ShapeError, () -> forward_gradient!(zeros(3), sum, ones(2)), "memory for 2"),
        (ShapeError, () -> forward_gradient!(zeros(3), sum, ones(3), ForwardBuffers(sum, ones(2))), "of size (2,)"),
        (ShapeError, () -> forward_jacobian!(zeros(3, 3), x -> x, ones(2)), "matrix of size (2, 2)"),
        (ShapeError, () -> forward_jacobian(x -> "a", ones(2)), "array of numbers"))
        error = error_of(f)
        @test (text, error isa kind && occursin(text, error.message)) == (text, true)
    end
end

"""A vector whose axis does not begin at 1."""
struct Shifted <: AbstractVector{Float64}
    data::Vector{Float64}
end
Base.axes(x::Shifted) = (Base.IdentityUnitRange(0:length(x.data)-1),)
Base.size(x::Shifted) = size(x.data)
Base.getindex(x::Shifted, i::Int) = x.data[i+1]
Base.setindex!(x::Shifted, v, i::Int) = x.data[i+1] = v

@testset "other axes are refused, and of nothing the value is the function's" begin
    shifted = Shifted([1.0, 2.0, 3.0])
    for call in (() -> forward_gradient(v -> sum(abs2, v), shifted), () -> forward_gradient!(shifted, v -> sum(abs2, v), ones(3)),
            () -> forward_jacobian(v -> v .* 2, shifted))
        @test error_of(call) isa ShapeError
    end
    @test forward_gradient!(Float64[], prod, Float64[]) == 1.0 && forward_gradient!(Float64[], v -> 3.0 + sum(v), Float64[]) == 3.0
end

@testset "fma rounds once, as the function itself does" begin
    f(v) = fma(v[1], v[1], -(v[1] * v[1]))
    g = zeros(1)
    @test forward_gradient!(g, f, [0.1]) == f([0.1]) != 0 && g == [0]
    for h in (x -> fma(x, 2.0, 1.0), x -> fma(2.0, x, x), x -> fma(2.0, 3.0, x), x -> fma(x, x, 3.0), x -> fma(2.0, x, 1.0), x -> fma(x, 3.0, x))
        for x in (0.1, 0.7, 1f0 / 3)
            y, slope = forward_gradient!([0.0], v -> h(v[1]), [Float64(x)]), derivative(h, x)
            @test y == h(Float64(x)) && isapprox(slope, (h(x + 1e-4) - h(x - 1e-4)) / 2e-4; rtol=1e-2)
        end
    end
    @test derivative(x -> derivative(y -> fma(y, y, x * y), x), 0.5) ≈ 3
end
