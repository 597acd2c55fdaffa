# Whole matrices of derivatives: many directions at once, in chunks, and one by one where an op has no batching rule.

using TwinGrad.AD: AD

const JACOBIAN_W = [0.5 -0.3 0.8; 0.2 0.4 -0.1; 0.9 0.3 0.2]
by_differences(f, x, h=1e-6) = hcat([vec(f(x .+ h .* e) .- f(x .- h .* e)) ./ 2h
    for e in (reshape(Float64.(1:length(x) .== k), size(x)) for k in 1:length(x))]...)
equations_of_jacobian(f, n; options...) =
    length(AD.trace(x -> [jacobian(f, x; options...)], AD.Tensor[AD.symbol(Float64, [n])]).equations)

const FUNCTIONS_OF_ARRAYS = (
    ("products", x -> tanh.(JACOBIAN_W * reshape(x, 3, 2)) * [1.0, -2.0]), ("sums", x -> cumsum(x) ./ sum(x .^ 2)),
    ("slices", x -> [x[2:4] .* x[1]; sin.(x[5:6])]), ("softmax", x -> softmax(reshape(x, 2, 3); dims=2)),
    ("loop", x -> scan((c, t) -> (sin.(c) .* t, sum(c)), x[1:2], reshape(x, 2, 3))[2]),
    ("solve", x -> (JACOBIAN_W + AD.diagm(x[1:3])) \ x[4:6]), ("constant", x -> zero(x)), ("itself", x -> x),
    ("a part is constant", x -> vcat(x[1:1] .* x[2], [3.0])), ("empty", x -> x[1:0]))

@testset "in both modes, in chunks, eager and compiled: $name" for (name, f) in FUNCTIONS_OF_ARRAYS
    x = [0.3, -0.8, 1.1, 0.4, -0.2, 0.7]
    expected = by_differences(x -> AD.value(f(Tensor(x))), x)
    for mode in (:forward, :reverse), chunk in (nothing, 1, 4)
        @test isapprox(jacobian(f, x; mode=mode, chunk=chunk), expected; atol=1e-8)
    end
    @test isapprox(compile(x -> jacobian(f, x))(x), expected; atol=1e-8)
end

@testset "derivatives of matrices of derivatives" begin
    x = [0.3, -0.8, 1.1]
    f(x) = tanh.(JACOBIAN_W * x) .* x
    second = by_differences(x -> jacobian(f, x), x)
    for mode in (:forward, :reverse), inner in (:forward, :reverse)
        @test isapprox(jacobian(x -> vec(jacobian(f, x; mode=inner)), x; mode=mode), second; atol=1e-8)
    end
    g(x) = sum(f(x) .^ 2)
    @test isapprox(hessian(g, x), by_differences(grad(g), x); atol=1e-8) && hessian(g, x; chunk=2) ≈ hessian(g, x)
    @test isapprox(jacobian(x -> vec(hessian(g, x)), x), by_differences(x -> hessian(g, x), x); atol=1e-7)
    @test compile(x -> hessian(g, x))(x) ≈ hessian(g, x)
    @test vmap(x -> hessian(g, x))([x 2x])[:, :, 2] ≈ hessian(g, 2x)
    @test forward_jacobian(x -> vec(jacobian(f, x)), x) ≈ second atol = 1e-8
    blocks = hessian(p -> sum(p.a .^ 2 .* p.b), (a=[1.0, 2.0], b=[3.0, 4.0]))
    @test blocks.a.b == [2 0; 0 4] && blocks.a.a == [6 0; 0 8] && blocks.b.b == zeros(2, 2)
    @test jacobian(x -> x .* 2.0f0, Float32[1, 2]) == Float32[2 0; 0 2]
    @test size(jacobian(x -> x, zeros(0))) == (0, 0) && size(jacobian(x -> vcat(x, [1.0, 2.0]), zeros(0))) == (2, 0)
end

@testset "a program of the same size for any number of directions" begin
    f(x) = tanh.(x) .* sum(x)
    for mode in (:forward, :reverse)
        @test equations_of_jacobian(f, 10; mode=mode) == equations_of_jacobian(f, 100; mode=mode) < 30
    end
    @test equations_of_jacobian(f, 100; chunk=10) > 5 * equations_of_jacobian(f, 100)
end

@testset "what is wrong is named" begin
    for (call, what) in ((() -> jacobian(sin, [1.0]; chunk=0), "jacobian: chunk must be a number of directions from 1 on"),
        (() -> hessian(sum, [1.0]; chunk=1.5), "hessian: chunk must be"), (() -> jacobian(x -> x, [1.0]; mode=:both), "or :reverse"))
        @test occursin(what, message_of(call))
    end
end
