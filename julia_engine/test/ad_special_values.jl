# Values and derivatives where care is needed: at 0, at ties, at infinity, and far out, as `tests/py_engine/test_special_values.py`
# has them for numpy's engine. Eagerly and compiled.

using TwinGrad.AD: AD

# Cancellation ---------------------------------------------------------------------------------------------------------

@testset "the loss of large logits is Float64's in Float32, target $target, $settings" for target in (0, 1, 0.5, 0.999),
        settings in (NamedTuple(), (positive_weight=2.5,), (weight=0.5,))
    sizes = exp10.(range(-4, 2; length=50))
    logits = Float32[-sizes; 0; sizes]
    targets = fill(Float32(target), length(logits))
    x, t = Float64.(logits), Float64.(targets)
    weight, positive = get(settings, :weight, 1), get(settings, :positive_weight, 1)
    expected = @. weight * (positive * t * softplus(-x) + (1 - t) * softplus(x))
    slope = @. weight * ((1 - t) / (1 + exp(-x)) - positive * t / (1 + exp(x)))
    losses(x, t) = binary_cross_entropy(x, t; reduction=:none, settings...)
    gradient(x, t) = grad(x -> sum(losses(x, t)))(x)
    zero_inside = 0 < target < 1 ? 1e-7 : 1e-37  # the gradient changes its sign there
    for (f, wanted, atol) in ((losses, expected, 1e-37), (gradient, slope, zero_inside))
        for found in (value(f(Constant(logits), Constant(targets))), compile(f)(logits, targets))
            @test eltype(found) == Float32
            @test [(a, b) for (a, b) in zip(found, wanted) if abs(a - b) > 2e-6abs(b) + atol] == []
        end
    end
end

# Interpolation between infinite and huge elements is PyTorch's: (1 - w) a + w b, and behind the last element that one again.
# Numbers of `torch.nn.functional.interpolate(mode="linear")`, version 2.13.
@testset "elements between infinite and huge ones, $T" for T in (Float32, Float64)
    huge = T(0.9) * floatmax(T)
    for (x, size, corners, expected) in (
        ([1, Inf, 2, 3], 8, false, [NaN, Inf, Inf, Inf, Inf, 2.25, 2.75, 3]),
        ([-Inf, Inf, 0, 1], 8, false, [NaN, NaN, NaN, Inf, Inf, 0.25, 0.75, 1]),
        ([Inf, Inf, 1, -Inf], 8, false, [NaN, Inf, Inf, Inf, Inf, -Inf, -Inf, -Inf]),
        ([2, -Inf, 0, 3], 2, false, [-Inf, 1.5]), ([NaN, 1, 2, Inf], 2, false, [NaN, Inf]),
        ([1, Inf, 2, 3], 7, true, [NaN, Inf, Inf, Inf, 2, 2.5, 3]),
        (huge .* [1, -1, 1, 1], 8, false, huge .* [1, 0.5, -0.5, -0.5, 0.5, 1, 1, 1]))
        x, expected = reshape(T.(x), :, 1, 1), T.(expected)
        f(x) = interpolate(x, size; mode=:linear, align_corners=corners)
        for found in (value(f(Constant(x))), compile(f)(x))
            @test [(a, b) for (a, b) in zip(found, expected) if !(isequal(a, b) || isapprox(a, b; rtol=1e-5))] == []
        end
    end
    slope = compile(grad(x -> sum(interpolate(x, 8; mode=:linear) .* reshape(T.(1:8), 8, 1, 1))))
    @test isapprox(vec(slope(reshape(huge .* T[1, -1, 1, 1], 4, 1, 1))), T[1 + 2 * 0.75 + 3 * 0.25,
        2 * 0.25 + 3 * 0.75 + 4 * 0.75 + 5 * 0.25, 4 * 0.25 + 5 * 0.75 + 6 * 0.75 + 7 * 0.25, 6 * 0.25 + 7 * 0.75 + 8]; rtol=1e-5)
end

# Forward mode where a derivative is infinite -------------------------------------------------------------------------------

along(f, x, t) = value(AD.jvp(f, map(Constant ∘ fill, x), map(fill, t))[2])[]
along_duals(f, x, t) = derivative(s -> f((a + s * b for (a, b) in zip(x, t))...), 0.0)

@testset "a constant behind a root has the gradient 0, and zero times infinity forward: $name" for (name, f) in (("sqrt", x -> sqrt.(relu.(x))), ("cbrt", x -> cbrt.(relu.(x))),
        ("^0.5", x -> relu.(x) .^ 0.5), ("^p", x -> relu.(x) .^ (0.5 .+ 0 .* x)), ("sqrt(max)", x -> sqrt.(max.(x, 0))), ("1 / ^", x -> relu.(x) .^ -1.5),
        ("^-2", x -> relu.(x) .^ -2))
    for x in (-1.0, -0.5)
        @test grad(x -> sum(f(x)))(fill(x))[] == 0
        @test isnan(along(f, (x,), (1.0,))) && isnan(along_duals(f, (x,), (1.0,)))
        @test isnan(compile(x -> AD.jvp(f, (x,), (ones(()),))[2])(fill(x))[])
    end
    @test along(f, (2.0,), (1.0,)) ≈ grad(x -> sum(f(x)))(fill(2.0))[] ≈ along_duals(f, (2.0,), (1.0,))
end

@testset "a tangent that is 0 at a point is no constant: the derivative is 1, or there is none" for f in (x -> cbrt.(x .^ 3),
        x -> (x .^ 3) .^ (1 / 3), x -> sqrt.(x .^ 2))
    @test isnan(along(f, (0.0,), (1.0,))) && isnan(along_duals(f, (0.0,), (1.0,))) && isnan(grad(x -> sum(f(x)))(fill(0.0))[])
end

@testset "u^v along u, v and both: $u^$v" for (u, v, by_u, by_v) in ((0.0, 0.0, 0, 0), (0.0, 1.0, 1, 0), (0.0, 2.0, 0, 0), (0.0, 0.5, Inf, 0),
        (0.0, -1.0, -Inf, -Inf), (2.0, 3.0, 12, 8log(2)), (-2.0, 2.0, -4, NaN), (-2.0, 3.0, 12, NaN), (-2.0, -1.0, -0.25, NaN))
    power(u, v) = u .^ v
    still = 0 * by_u  # zero times infinity is NaN
    for (t, expected) in (((1.0, 0.0), by_u), ((0.0, 1.0), still + by_v), ((1.0, 1.0), by_u + by_v), ((0.0, 0.0), still))
        same(x) = isequal(x + 0, expected + 0.0) || isapprox(x, expected)
        @test (t, same(along(power, (u, v), t))) == (t, true)
        if u < 0 && t[2] != 0  # log
            @test_throws DomainError along_duals(power, (u, v), t)
        else
            @test (t, same(along_duals(power, (u, v), t))) == (t, true)
        end
    end
    by_one = derivative(s -> u^(v + 0s), 0.0)
    @test by_one == 0
end

@testset "where one of two is NaN, both derivatives are 0" begin
    for (f, plain) in ((x -> max.(x, 1), x -> max(x, 1)), (x -> max.(1, x), x -> max(1, x)), (x -> min.(x, 1), x -> min(x, 1)),
        (x -> clamp.(x, -1, 1), x -> clamp(x, -1, 1)), (x -> relu.(x), relu), (x -> max.(x, x .+ 1), x -> max(x, x + 1)))
        @test grad(x -> sum(f(x)))(fill(NaN))[] == along(f, (NaN,), (1.0,)) == derivative(plain, NaN) == 0
    end
    @test grad(x -> sum(max.(x, NaN)))(fill(1.0))[] == derivative(x -> max(x, NaN), 1.0) == 0
    for limited in (x -> max(x, -1), x -> clamp(x, -1, 1))  # of several levels
        @test derivative(a -> derivative(b -> limited(a + b), zero(a)), NaN) == 0
        @test derivative(a -> limited(a + AD.DualNumbers.plain_value(a)), NaN) == 0
    end
end

@testset "zeros with a sign: of equal operands the second, as numpy's, $n of $T" for n in (1, 3, 40), T in (Float32, Float64)
    for (a, b) in ((T(0), -T(0)), (-T(0), T(0)))
        x, y = fill(a, n), fill(b, n)
        for f in ((x, y) -> max.(x, y), (x, y) -> min.(x, y), (x, y) -> clip(x, y, 1), (x, y) -> clip(x, -1, y))
            @test all(isequal(b), value(f(Constant(x), Constant(y)))) && all(isequal(b), compile(f)(x, y))
        end
    end
end

# Long sums ------------------------------------------------------------------------------------------------------------

@testset "rounding errors of a sum do not grow with its length: $size over $dims" for (size, dims) in (((2, 200_000), 2), ((1, 200_000), 2),
        ((40, 20_000), 2), ((2, 100_003, 2), 2), ((3, 600, 500), (2, 3)), ((2, 3, 100_000), (1, 3)), ((2, 100_000, 3), 2), ((200_000, 2), 1),
        ((2, 60, 3, 70), (2, 4)), ((2, 600, 3, 70), (2, 4)))
    x = fill(0.1f0, size)
    expected = sum(Float64.(x); dims=dims)
    random = randn(AD.MersenneTwister(3), Float32, size)
    for (sums, back) in ((x -> sum(x; dims=dims), identity),
            (x -> sum(permutedims(x, ndims(x):-1:1); dims=Tuple(ndims(x) + 1 .- dims)), x -> permutedims(x, ndims(x):-1:1)))
        compiled = compile(sums)
        for found in (value(sums(Constant(x))), compiled(x))
            @test maximum(abs.(vec(Float64.(back(found))) .- vec(expected)) ./ vec(expected)) < 3e-5
        end
        for found in (value(sums(Constant(random))), compiled(random), compiled(copy(random)))  # the last in memory that is new to it
            @test isapprox(back(found), sum(Float64.(random); dims=dims); atol=1e-5 * sqrt(length(random)))
        end
    end
end

# Sizes that do not fit, and factors that overflow ---------------------------------------------------------------------

@testset "what weights losses or scores makes nothing larger" begin
    x, t = [1.0 2.0], [1.0 0.0]
    for loss in (w -> binary_cross_entropy(x, t; weight=w), w -> binary_cross_entropy(x, t; positive_weight=w),
            w -> mean_squared_error(x, t; weight=w), w -> mean_squared_error(x, t; weight=w, reduction=:none))
        @test_throws ShapeError loss([1.0, 3.0])
        @test_throws ShapeError loss(ones(1, 2, 2))
        @test item(sum(loss([2.0]))) ≈ item(sum(loss(2.0))) && isfinite(item(sum(loss([1.0 3.0]))))
    end
    attend(; options...) = scaled_dot_product_attention(zeros(2, 1), zeros(2, 3), ones(1, 3); options...)
    @test_throws ShapeError attend(mask=trues(1, 3))
    @test_throws ShapeError scaled_dot_product_attention(zeros(2, 1), zeros(2, 3), ones(1, 3), zeros(1, 3))
    @test size(attend(mask=trues(3, 1))) == (1, 1)
end

@testset "derivatives of singular vectors whose squares overflow or vanish, $T, $scale" for (T, scale) in
        ((Float32, 1f20), (Float32, 1f-25), (Float64, 1e160), (Float64, 1e-170))
    a = T[2 0; 1 1]
    for part in (x -> AD.svd(x).U[1, 2], x -> AD.svd(x).Vt[1, 2])
        @test grad(part)(a .* scale) .* scale ≈ grad(part)(a) rtol = 100 * eps(T)
        @test value(jvp(part, (a .* scale,), (a .* scale,))[2]) ≈ value(jvp(part, (a,), (a,))[2]) atol = 100 * eps(T)
    end
end

@testset "a running product whose later factors overflow" begin
    first_of(x) = cumprod(x)[1]
    @test grad(first_of)([1e-300, 1e200, 1e200]) == [1, 0, 0]
    @test compile(grad(first_of))([1e-300, 1e200, 1e200]) == [1, 0, 0]
    @test grad(x -> sum(grad(first_of)(x)))([1e-300, 1e200, 1e200]) == zeros(3)
end

@testset "the gradient of a diagonal is zero beside it" begin
    @test grad(x -> sum(sqrt.(einsum("ii->i", x))))(zeros(2, 2)) == [Inf 0; 0 Inf]
    @test grad(x -> sum(sqrt.(einsum("iji->j", x))))(zeros(2, 1, 2)) == reshape([Inf, 0, 0, Inf], 2, 1, 2)
    gradcheck(x -> einsum("iii->", x), randn(AD.MersenneTwister(0), 2, 2, 2))
end

@testset "subscripts that are none, $subscripts" for (subscripts, x) in (("i.j->ij", ones(2, 3, 4)), ("i...->i", ones(2, 3)),
        ("..i->i", ones(2, 3)), ("i......->i", ones(2, 3)), ("ij->i->j", ones(2, 3)))
    @test_throws ShapeError einsum(subscripts, x)
end
