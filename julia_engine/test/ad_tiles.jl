# Elementwise runs in tiles: equal to the same ops done one after the other, in any surroundings, and nothing is overwritten.

using TwinGrad.AD: AD, Tape

tape_for(compiled) = first(values(compiled.tapes))[1]
untiled_compile(f) = compile(f; techniques=Techniques(fuse=false))
allocated_by(tape) = @allocated run!(tape)

"""A program of many elementwise ops on arrays, with sums, products and views in between, and several results."""
function random_elementwise(random, x, y, s)
    pool = Any[x, y, x .* y]
    results = Any[]
    for _ in 1:rand(random, 8:30)
        a, b = rand(random, pool), rand(random, pool)
        pick = rand(random, 1:14)
        push!(pool,
            pick == 1 ? a .+ b : pick == 2 ? a .* b : pick == 3 ? tanh.(a) : pick == 4 ? sigmoid.(a .+ b) :
            pick == 5 ? a .- s : pick == 6 ? sin.(b) .* 0.5 : pick == 7 ? relu.(a) .- b : pick == 8 ? max.(a, b) :
            pick == 9 ? a .* mean(b) : pick == 10 ? a .- mean(a; dims=1) : pick == 11 ? clip(a, -1, 1) .+ a :
            pick == 12 ? reshape(permutedims(reshape(a, 3, :)), size(x)...) :
            pick == 13 ? ifelse.(a .> b, a, s .* b) : exp.(-a .* a))
        pick == 9 && push!(results, sum(b))
        rand(random) < 0.1 && push!(results, pool[end])
    end
    return (pool[end], results...)
end

@testset "random programs: in tiles and not, $T" for T in (Float64, Float32)
    seed = seeded(51)
    @info "random elementwise programs" seed
    random = AD.MersenneTwister(seed)
    runs = 0
    for trial in 1:draws(20)
        recipe = rand(random, 1:10^6)
        f(xs...) = random_elementwise(AD.MersenneTwister(recipe), xs...)
        loss(xs...) = sum(sum(r .* r) for r in f(xs...)) ./ 1000
        dims = rand(random, Bool) ? (80_001,) : (303, 211)
        args = (randn(random, T, dims...), randn(random, T, dims...), randn(random, T))
        for g in (f, value_and_grad(loss; argnums=(1, 2, 3)))
            tiled, plain = compile(g), untiled_compile(g)
            got, expected = AD.flatten(tiled(args...))[1], AD.flatten(plain(args...))[1]
            tolerance = T === Float64 ? 1e-9 : 1e-3
            @test all(isapprox(a, b; rtol=tolerance) for (a, b) in zip(got, expected))
            tape = tape_for(tiled)
            runs += length(unique(values(tape.regions)))
            for byte in (0x00, 0xff)
                poison!(tape, byte)
                @test isequal(AD.flatten(tiled(args...))[1], got)
            end
            other = map(a -> a .* T(0.9), args)
            @test all(isapprox(a, b; rtol=tolerance)
                      for (a, b) in zip(AD.flatten(tiled(other...))[1], AD.flatten(plain(other...))[1]))
            @test isequal(AD.flatten(tiled(args...))[1], got)
            tape(args...)
            @test allocated_by(tape) == 0
        end
    end
    @test runs > 20
end

@testset "a long loop keeps tiles, not arrays" begin
    function powers(x)
        r = 1.0
        for _ in 1:100
            r = r .* sin.(x)
        end
        return sum(r)
    end
    x = collect(range(1.4; stop=1.7, length=10_007))
    g = compile(value_and_grad(powers))
    value_, slope = g(x)
    @test value_ ≈ sum(sin.(x) .^ 100) && slope ≈ 100 .* sin.(x) .^ 99 .* cos.(x)
    tape, whole = tape_for(g), untiled_compile(value_and_grad(powers))
    whole(x)
    @test nbytes(tape) < nbytes(tape_for(whole)) / 5
    run = only(unique(values(tape.regions)))
    @test length(run.equations) > 200 && run.n == 10_007 && run.tile < 10_007  # both passes are one run
    @test occursin("a tile of $(run.tile) in", source(g)) && length(split(source(tape), "\n")) == length(tape.steps)
    @test count(step -> step.equation.op === AD.SIN, tape.steps) == 1
    memory = (fill(0.0), zeros(10_007))
    @test run!(memory, g, x)[2] == slope && run!(memory, g, 2 .* x) === memory && memory[2] != slope && g(x) == (value_, slope)
end

@testset "what a run reads may be a part of another array" begin
    a, b = randn(300, 40), randn(40, 300)
    f(a, b) = (p = a * b; (tanh.(p) .* p .+ p, vcat(p, 2 .* p), vcat(sin.(p .* p) .+ p, p .* 3)))
    tiled, plain = compile(f), untiled_compile(f)
    @test all(map(isapprox, tiled(a, b), plain(a, b))) && !isempty(tape_for(tiled).regions)
end

@testset "draws between runs" begin
    w, x = randn(100, 100) ./ 10, randn(100, 700)
    function f(x)
        a, b = Generator(3), Generator(4)
        y = dropout(tanh.(x) .* x .+ x, 0.5, a)
        z = dropout(w * y, 0.5, b)  # of what is computed after the run
        return dropout(tanh.(z) .* z .+ y .* mean(y), 0.5, a)
    end
    tiled, plain = compile(f), untiled_compile(f)
    for _ in 1:3
        @test tiled(x) ≈ plain(x)
    end
    @test length(unique(values(tape_for(tiled).regions))) > 1
end

@testset "errors in a run are found" begin
    f = compile(x -> AD.scope(() -> exp.(log.(x .- 1) .* 2) .+ x .* x .+ sin.(x), "loss"))
    x = fill(2.5, 100_000)
    f(x)
    tape = tape_for(f)
    @test !isempty(tape.regions)
    tape(x)
    @test diagnose(tape) === nothing
    x[77_777] = 0.5
    tape(x)
    message = diagnose(tape).message
    @test occursin("\"log\"", message) && occursin("\"loss\"", message)
end

@testset "equal parts of a program are differentiated once" begin
    f(x) = sum(sin.(x) .* sin.(x) .+ stop_gradient(sin.(x)) .* x)
    x = randn(5)
    g = compile(grad(f))
    @test g(x) ≈ grad(f)(x)
    h = compile(grad(x -> sum(grad(t -> sum(sin.(t) .* sin.(t)))(x) .* sin.(x))))
    @test h(x) ≈ 2 .* cos.(2x) .* sin.(x) .+ sin.(2x) .* cos.(x)
    @test count(step -> step.equation.op === AD.COS, tape_for(g).steps) == 1
    draws = compile(grad(x -> sum(dropout(x, 0.5, Generator(1)) .* dropout(x, 0.5, Generator(2)))))
    @test draws(ones(1000)) == grad(x -> sum(dropout(x, 0.5, Generator(1)) .* dropout(x, 0.5, Generator(2))))(ones(1000))
end

@testset "a fused region is timed as it runs: in one part, tile by tile" begin
    f = compile(x -> AD.scope(() -> sum(exp.(x .* 2) .* x .+ sin.(x)), "loss"))
    x = fill(1.5f0, 500_000)
    value_ = f(x)
    tape = tape_for(f)
    region = only(unique(values(tape.regions)))
    parts = AD.timed_parts(tape)
    part = only([part for part in parts if part.segment != 0])
    @test [step.equation for step in part.steps] == region.equations && length(parts) < length(tape.steps)
    title, layer = AD.title(part)
    @test occursin("exp", title) && occursin(" + ", title) && layer == "loss"
    outside = length(region.equations) - length(region.inside)
    @test AD.bytes_moved(tape, part) == (1 + outside) * sizeof(x) + 4  # x, what is kept whole, and the number 2
    costs = AD.costs(tape, parts)
    @test length(costs) == length(parts) && all(seconds > 0 && operations == 0 for (seconds, operations) in costs)
    @test f(x) == value_ && AD.costs(tape, parts; run=(_, _) -> nothing)[1][1] < 1
end
