# A backend of DifferentiationInterface, where that package is there; else what is said without it.

if Base.find_package("DifferentiationInterface") === nothing
    @testset "without DifferentiationInterface" begin
        @test occursin("write `using DifferentiationInterface` first", message_of(AutoTwinGrad))
    end
else
    @eval import DifferentiationInterface
    const DI = DifferentiationInterface
    plain, compiled = AutoTwinGrad(), AutoTwinGrad(compile=true)
    x, moved, seed = [0.3, -1.2, 2.0], [1.0, 0.5, -2.0], [1.0, -1.0]
    f(x) = sum(sin.(x) .* x)
    slope(x) = cos.(x) .* x .+ sin.(x)
    curve(x) = 2 .* cos.(x) .- sin.(x) .* x
    pair(x) = [sum(x .^ 2), x[1] * x[3]]
    pairs_jacobian(x) = [2x[1] 2x[2] 2x[3]; x[3] 0 x[1]]

    @testset "gradients, $backend" for backend in (plain, compiled)
        @test DI.check_available(backend) && !DI.check_inplace(backend)
        @test DI.gradient(f, backend, x) ≈ slope(x)
        y, g = DI.value_and_gradient(f, backend, x)
        @test y ≈ f(x) && g ≈ slope(x)
        prep = DI.prepare_gradient(f, backend, zero(x))
        for point in (x, 2x)
            @test DI.gradient(f, prep, backend, point) ≈ slope(point)
            out = zeros(3)
            @test DI.value_and_gradient!(f, out, prep, backend, point)[2] === out && out ≈ slope(point)
            @test DI.gradient!(f, zeros(3), prep, backend, point) == out
        end
        scaled(x, k) = k * f(x)
        prep = DI.prepare_gradient(scaled, backend, x, DI.Constant(1.0))
        @test DI.gradient(scaled, prep, backend, x, DI.Constant(3.0)) ≈ 3 .* slope(x)
        @test DI.gradient(f, backend, view([x; x], 2:4)) ≈ slope([x; x][2:4])
        @test DI.gradient(f, backend, Float32.(x)) isa Vector{Float32}
        @test_throws DI.PreparationMismatchError DI.gradient(f, prep, backend, x)
    end

    @testset "products with the Jacobian" begin
        y, ty = DI.value_and_pushforward(pair, plain, x, (moved, 2 .* moved))
        @test y ≈ pair(x) && all(ty .≈ (pairs_jacobian(x) * moved, 2 .* (pairs_jacobian(x) * moved)))
        @test only(DI.pushforward(pair, plain, x, (moved,))) ≈ pairs_jacobian(x) * moved
        @test only(DI.pushforward!(pair, (zeros(2),), plain, x, (moved,))) ≈ pairs_jacobian(x) * moved
        y, tx = DI.value_and_pullback(pair, plain, x, (seed, 3 .* seed))
        @test y ≈ pair(x) && all(tx .≈ (pairs_jacobian(x)' * seed, 3 .* (pairs_jacobian(x)' * seed)))
        prep = DI.prepare_pullback_same_point(pair, plain, x, (seed,))
        @test only(DI.pullback(pair, prep, plain, x, (2 .* seed,))) ≈ pairs_jacobian(x)' * (2 .* seed)
        @test DI.value_and_pullback!(pair, (zeros(3),), prep, plain, x, (seed,))[2][1] ≈ pairs_jacobian(x)' * seed
        @test only(DI.pullback(x -> x^3, plain, 2.0, (1.0,))) ≈ 12
        @test only(DI.pushforward(x -> x^3, plain, 2.0, (1.0,))) ≈ 12
    end

    @testset "the operators that follow from them" begin
        @test DI.derivative(x -> sin(x), plain, 0.4) ≈ cos(0.4)
        @test DI.derivative(t -> [t, t^2], plain, 0.4) ≈ [1, 0.8]
        @test DI.jacobian(pair, plain, x) ≈ pairs_jacobian(x)
        y, J = DI.value_and_jacobian!(pair, zeros(2, 3), plain, x)
        @test y ≈ pair(x) && J ≈ pairs_jacobian(x)
        @test DI.jacobian((x, k) -> k .* pair(x), plain, x, DI.Constant(2.0)) ≈ 2 .* pairs_jacobian(x)
        @test only(DI.hvp(f, plain, x, (moved,))) ≈ curve(x) .* moved
        @test DI.hessian(f, plain, x) ≈ [i == j ? curve(x)[i] : 0.0 for i in 1:3, j in 1:3]
        @test DI.second_derivative(x -> x^4, plain, 2.0) ≈ 48
    end
end
