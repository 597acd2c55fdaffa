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
