# Many samples at once: axes and containers, transforms in and around, and mistakes. Every op is tried in ad_ops.jl.

using TwinGrad.AD: AD

@testset "axes of arguments and of results" begin
    a, b = randn(2, 3), randn(4, 3)
    @test vmap(outer)(a, b) ≈ cat((a[:, k] * b[:, k]' for k in 1:3)...; dims=3)
    @test vmap(outer; in_axes=(1, nothing), out_axes=1)(Matrix(a'), b[:, 1])[2, :, :] ≈ a[:, 2] * b[:, 1]'
    layer = (w=randn(5, 2, 3), b=randn(5))
    found = vmap((p, x) -> (y=p.w * x .+ p.b, shared=p.b .* 2); in_axes=((w=:last, b=nothing), 2), out_axes=(y=1, shared=nothing))(layer, a)
    @test found.y ≈ vcat((reshape(layer.w[:, :, k] * a[:, k] .+ layer.b, 1, :) for k in 1:3)...)
    @test found.shared == 2 .* layer.b
    @test vmap((x, how, n) -> how == "times" ? x .* n : x; in_axes=(:last, nothing, nothing))([1.0, 2.0], "times", 2) == [2, 4]
    @test vmap((x, i) -> gather(x, i))(randn(4, 3), [1 2 3; 4 4 4]) isa Matrix
    captured = ones(2)
    same = vmap(x -> captured; out_axes=nothing)([1.0, 2.0])
    same .= 5
    @test captured == [1, 1]
    @test vmap(x -> 3.0)([1.0, 2.0]) == [3, 3]
    @test vmap(x -> sin.(x))(Constant([1.0, 2.0])) isa Tensor
    @test size(vmap(x -> sum(tanh.(x)))(ones(3, 0))) == (0,)
end

@testset "gradients of each sample" for run in (identity, compile)
    w, x, y = randn(2, 3), randn(3, 5), randn(2, 5)
    loss(w, x, y) = sum((tanh.(w * x) .- y) .^ 2)
    each = run(vmap(grad(loss); in_axes=(nothing, :last, :last)))(w, x, y)
    @test size(each) == (2, 3, 5)
    @test all(each[:, :, k] ≈ grad(loss)(w, x[:, k], y[:, k]) for k in 1:5)
    values_, gradients_ = run(vmap(value_and_grad(loss); in_axes=(nothing, :last, :last)))(w, x, y)
    @test gradients_ ≈ each && values_ ≈ [loss(w, x[:, k], y[:, k]) for k in 1:5]
    total = run(grad(w -> sum(vmap((x, y) -> loss(w, x, y))(x, y))))(w)
    @test total ≈ dropdims(sum(each; dims=3); dims=3)
end

@testset "transforms in and around" for run in (identity, compile)
    x, v = randn(3, 4), randn(3, 4)
    f(x) = tanh.(cumsum(x; dims=1) .* x[1])
    of_each(x, v) = (vjp(f, x)[2](v)[1], jvp(f, (x,), (v,))[2], jacobian(f, x), hvp(x -> sum(f(x)), x, v))
    found = run(vmap(of_each))(x, v)
    for k in 1:4, (a, b) in zip(found, of_each(x[:, k], v[:, k]))
        @test AD.value(Constant(a))[ntuple(_ -> :, ndims(a) - 1)..., k] ≈ b
    end
    g(x) = sum(vmap(x -> prod(sin.(x)))(x) .^ 2)
    plain(x) = sum(prod(sin.(x); dims=1) .^ 2)
    @test run(x -> hessian(g, x))(x) ≈ hessian(plain, x)
    @test run(vmap(vmap((a, b) -> a .* b .+ 1)))(x, v) ≈ x .* v .+ 1
    @test run(vmap(vmap((a, b) -> sum(a .* b); in_axes=(:last, nothing))))(randn(2, 3, 4), randn(2, 4)) isa Matrix
    # Loops, checkpoints and opaque rules take one sample after the other.
    w, start = randn(2, 2), randn(2)
    last_(xs) = sum(scan((h, x) -> (tanh.(w * h .+ x), nothing), start, xs)[1])
    xs = randn(2, 5, 3)
    @test run(vmap(last_))(xs) ≈ [last_(xs[:, :, k]) for k in 1:3]
    @test run(vmap(grad(last_)))(xs)[:, :, 2] ≈ grad(last_)(xs[:, :, 2])
    block = checkpoint(x -> sin.(x .* 2))
    @test run(vmap(grad(x -> sum(block(x)))))(x) ≈ 2 .* cos.(2 .* x)
    rule = custom_rule(x -> cumsum(x); vjp=(g, y, x) -> reverse(cumsum(reverse(g))), opaque=true)
    @test run(vmap(grad(x -> sum(rule(x) .^ 2))))(x)[:, 3] ≈ grad(x -> sum(rule(x) .^ 2))(x[:, 3])
end

@testset "samples take as many ops as one" begin
    function ops(n)
        f(x) = AD.Tensor[vmap(grad(x -> sum(tanh.(x) .* softmax(x))))(x)]
        return length(AD.trace(f, AD.Tensor[AD.symbol(Float64, [3, n])]).equations)
    end
    @test ops(1) == ops(100) < 20
end

@testset "what is wrong is named" begin
    for (call, kind, what) in (
        (() -> vmap(sin; in_axes=3)(ones(2, 2)), ShapeError, "argument 1 of size (2, 2) has no axis 3"),
        (() -> vmap((a, b) -> a .+ b)(ones(2), ones(3)), ShapeError, "argument 2 has 3 samples, but the first that is mapped has 2"),
        (() -> vmap(sin)(1.0), ShapeError, "argument 1 must be an array, got Float64"),
        (() -> vmap(sin; in_axes=nothing)(1.0), ConfigurationError, "nothing is mapped"),
        (() -> vmap(sin; in_axes=(1, 1))(ones(2)), ConfigurationError, "in_axes has 2 items, but the function was called with 1"),
        (() -> vmap(p -> p.a; in_axes=((b=1,),))((a=ones(2),)), ConfigurationError, "in_axes for argument 1: expected a named"),
        (() -> vmap(sin; in_axes="1")(ones(2)), ConfigurationError, "in_axes for argument 1 must be an axis, :last or nothing, got"),
        (() -> vmap(x -> x .* 1; out_axes=nothing)(ones(2)), ConfigurationError, "result differs from sample to sample"),
        (() -> vmap(x -> nothing)(ones(2)), ShapeError, "the function must return arrays, got nothing"),
        (() -> vmap(x -> dropout(x, 0.5, AD.Generator(1)))(ones(2, 3)), TraceError, "random masks cannot be drawn"),
        (() -> vmap(x -> item(x) > 0 ? x : -x)(ones(2)), TraceError, "a value is needed here"))
        error = error_of(call)
        @test error isa kind && occursin(what, error.message)
    end
end
