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
