# Rules of ChainRulesCore, read and given, where that package is there; else what is said without it.

if Base.find_package("ChainRulesCore") === nothing
    @testset "without ChainRulesCore" begin
        @test occursin("write `using ChainRulesCore` first", message_of(() -> chain_rule(sin)))
    end
else
    @eval using ChainRulesCore: ChainRulesCore, NoTangent, ZeroTangent, unthunk
    struct Cubed end
    (::Cubed)(x) = x .^ 3
    struct Unruled end
    (::Unruled)(x) = x .^ 3
    struct Scaled end
    (::Scaled)(x, k) = x .* k
    @eval begin
        ChainRulesCore.rrule(f::Cubed, x) = f(x), g -> (NoTangent(), 3 .* x .^ 2 .* unthunk(g))
        ChainRulesCore.frule((_, dx), f::Cubed, x) = f(x), 3 .* x .^ 2 .* dx
        ChainRulesCore.rrule(f::Scaled, x, k) = f(x, k), g -> (NoTangent(), k .* unthunk(g), ZeroTangent())
    end
    x = [1.0, 2.0, 3.0]

    @testset "a function with their rule is differentiated by it" begin
        f = chain_rule(Cubed())
        for run in (identity, compile)
            @test run(grad(x -> sum(f(x))))(x) == 3 .* x .^ 2
            @test run(grad(x -> sum(sin.(f(x .* 2)))))(x) ≈ 24 .* x .^ 2 .* cos.(8 .* x .^ 3)
        end
        @test jvp(f, (x,), (ones(3),))[2] == 3 .* x .^ 2
        @test grad(x -> sum(chain_rule(Scaled())(x, [2.0])))(x) == fill(2.0, 3)
        unruled = chain_rule(Unruled(); name="mine")
        @test occursin("no rrule of mine", message_of(() -> grad(x -> sum(unruled(x)))(x)))
        @test occursin("no frule of mine", message_of(() -> jvp(unruled, (x,), (ones(3),))))
    end

    @testset "a compiled function of ours has a rule of theirs" begin
        f = compile((x, n) -> sin.(x) .* n)
        y, pull = ChainRulesCore.rrule(f, x, 2.0)
        @test y == 2 .* sin.(x)
        @test pull(ones(3)) == (NoTangent(), 2 .* cos.(x), sum(sin.(x)))
        @test pull(ZeroTangent()) == (NoTangent(), NoTangent(), NoTangent())
        y, pull = ChainRulesCore.rrule(compile((x, i) -> x[i]), x, 2)
        @test y == 2.0 && pull(1.0) == (NoTangent(), [0.0, 1.0, 0.0], NoTangent())
        @test occursin("takes the derivative by one number or array", message_of(() -> pull((1.0, 2.0))))
    end

    if Base.find_package("Zygote") !== nothing
        @eval using Zygote: Zygote
        @testset "Zygote differentiates through a compiled function" begin
            f = compile((x, y) -> sum(sin.(x) .* y))
            @test all(Zygote.gradient((x, y) -> f(x, y)^2, x, 2x) .≈ grad((x, y) -> f(x, y)^2; argnums=(1, 2))(x, 2x))
        end
    end
end
