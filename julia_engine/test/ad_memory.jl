# Eager gradients use memory again: none of what somebody can still see, and nearly all of the rest.

using Random: MersenneTwister

const LARGE = 4096  # elements: enough for an array to be used again

large(seed, dims...) = 0.5 .+ rand(MersenneTwister(seed), dims...)

@testset "a captured reinterpreted vector that grew is refused" begin
    bytes = zeros(UInt8, 80)
    w = reinterpret(Float64, bytes)
    f = compile(x -> sum(x .* w))
    @test f(ones(10)) == 0
    append!(bytes, zeros(UInt8, 10^7))
    @test error_of(() -> f(ones(10))) isa ReplayError
end

@testset "values: $name" for (name, f, dims) in (
    ("a chain", x -> sum(sin.(exp.(cos.(x)))), (LARGE,)),
    ("one value read many times", x -> (y = sin.(x); z = y .* y .+ y; sum(z .* y .- z ./ (y .+ 2) .+ y)), (LARGE,)),
    ("a gradient passed on as it is", x -> (y = x .+ x; sum(sin.(y .+ y) .+ y .+ x)), (LARGE,)),
    ("slices that overlap", x -> sum((x[2:end] .- x[1:end-1] .^ 2) .^ 2 .* x[1:end-1]), (LARGE,)),
    ("slices put together", x -> (y = exp.(x); sum(y[1:LARGE÷2] .* y[LARGE÷2+1:end] .+ y[2:LARGE÷2+1])), (LARGE,)),
    ("views", x -> (y = reshape(sin.(x), 64, :); sum(permutedims(y) .* permutedims(cos.(y)) .+ permutedims(y))), (LARGE,)),
    ("broadcasting", x -> (y = sum(sin.(x); dims=1); sum(exp.(x .* y) .+ x ./ sum(x; dims=2))), (64, 64)),
    ("products", x -> sum(tanh.(x * sin.(x)) * x .+ x), (64, 64)),
    ("a checkpoint", x -> (h = checkpoint(t -> sin.(t) .* exp.(t)); sum(h(h(x) ./ 9) .* x)), (LARGE,)),
    ("a loop", x -> (r = x; for _ in 1:9; r = r .* sin.(x); end; sum(r)), (LARGE,)))
    x = large(1, dims...)
    @test grad(f)(x) ≈ compile(grad(f))(x) rtol = 1e-12
end

@testset "results are nobody's memory" begin
    f(x, y) = sum(sin.(x .* y) .* exp.(x))
    x, y = large(3, LARGE), large(4, LARGE)
    first_ = grad(f; argnums=(1, 2))(x, y)
    copies = map(copy, first_)
    grad(f; argnums=(1, 2))(y, x)
    @test first_ == copies
    fill!(first_[1], 0)
    @test first_[2] == copies[2] && grad(f; argnums=(1, 2))(x, y) == copies

    variable = Variable(x)
    backward!(f(variable, y))
    backward!(f(variable, y))
    @test variable.grad ≈ 2 .* copies[1]

    variable = Variable(x)
    between = exp.(sin.(cos.(variable)))
    output = sum(sin.(between))
    inner, outer = no_grad(() -> gradients([output], [Constant(1.0)], [between, variable]))
    expected = exp.(sin.(cos.(x)))
    @test value(inner) ≈ cos.(expected)
    @test value(outer) ≈ cos.(expected) .* expected .* cos.(cos.(x)) .* -sin.(x)

    _, pull = vjp((x, y) -> sin.(x .* y) .+ x, x, y)
    seed = large(5, LARGE)
    once, twice, kept_seed = pull(seed), pull(2 .* seed), copy(seed)
    @test all(a -> a[2] ≈ 2 .* a[1], zip(once, twice)) && seed == kept_seed
end

@testset "a rule of the user's may keep what it sees" begin
    seen = Any[]
    f = custom_rule(x -> sin.(x); vjp=(g, y, x) -> (push!(seen, g, cos.(x)); g .* seen[2]))
    x = large(6, LARGE)
    before(t) = exp.(sin.(cos.(sin.(t) .* t)))
    grad(t -> sum(exp.(f(before(t)) .* t) ./ t))(x)
    input = before(x)
    @test length(seen) == 2 && value(seen[1]) ≈ exp.(sin.(input) .* x) && value(seen[2]) ≈ cos.(input)
end

@testset "a gradient inside of another" begin
    f(x) = sum(sin.(x) .* exp.(x))
    x = large(7, LARGE)
    @test grad(t -> sum(grad(f)(t) .* t))(x) ≈ compile(grad(t -> sum(grad(f)(t) .* t)))(x) rtol = 1e-12
    @test hvp(f, x, x) ≈ 2 .* cos.(x) .* exp.(x) .* x rtol = 1e-12
end

@testset "bytes: the values of the forward pass, and little more" begin
    steps = 50
    function loop(x)
        r = x
        for _ in 1:steps
            r = r .* sin.(x)
        end
        return sum(r)
    end
    x = large(8, 4 * LARGE)
    gradient = grad(loop)
    for _ in 1:2
        gradient(x)
        arrays = (@allocated gradient(x)) / sizeof(x) / steps
        @test 2 <= arrays < 2.5  # sin.(x) and r; the rules of each step compute five more
        # The same once dual numbers have met tensors, of which these gradients know nothing.
        @test derivative(a -> sum(grad(x -> sum(x .^ 2) * a)([1.0, 2.0])), 3.0) == 6
    end
end

resident_bytes() = parse(Int, split(read("/proc/self/statm", String))[2]) * ccall(:getpagesize, Cint, ())

if AD.of_glibc(:malloc_trim) !== nothing
    @testset "memory that was freed is given back to the system" begin
        (() -> sum(ones(3_900_000)))()
        GC.gc()  # having freed so large an array, malloc takes smaller ones from its heap
        pieces = [ones(2^15) for _ in 1:1000]
        before, freed = resident_bytes(), sum(sizeof, pieces) ÷ 2
        deleteat!(pieces, 1:2:length(pieces))  # those that are left keep the heap from becoming shorter
        GC.gc()
        AD.return_freed_memory()
        @test before - resident_bytes() > 0.8 * freed
        @test all(x -> sum(x) == 2^15, pieces)
    end
end

@testset "vectors that were resized are refused: $(name)" for (name, change!) in (
    ("grown", x -> append!(x, zeros(10^6))), ("shorter", x -> resize!(x, length(x) - 1)))
    for T in (Float64, Float32), part in (identity, x -> view(x, 2:length(x)), x -> reshape(view(x, 1:length(x)), :, 1))
        x = T.(large(5, LARGE))
        pull = vjp(x -> sum(sin.(x)), part(x))[2]
        used, variable = compile(y -> sum(part(x) .* y)), Variable(part(x); name="weights")
        @test used(T(2)) ≈ 2sum(part(x))
        change!(x)
        @test occursin("changed in place since", message_of(() -> pull(one(T))))
        for _ in 1:2
            @test occursin("captures, of size", message_of(() -> used(T(2))))
        end
        @test occursin("exp: an operand, \"weights\", an array of $T", message_of(() -> exp.(variable)))
        @test occursin("push!", message_of(() -> value(variable)))
        @test occursin("assign!: an array of $T", message_of(() -> assign!(variable, ones(T, size(variable)))))
        @test occursin("was resized since", message_of(() -> assign!(Variable(ones(T, size(variable))), variable)))
    end
    for of in (t -> sum(t .^ 2), t -> reshape(t, 10, :))
        x = large(5, LARGE * 10)
        order = topological_sort(of(Variable(x)))
        change!(x)
        @test occursin("an operand, an array of Float64", message_of(() -> forward!(order)))
    end
    x = large(5, LARGE)
    captured = Constant(x)
    change!(x)
    @test occursin("was resized since", message_of(() -> compile(t -> t .* captured)(ones(LARGE))))
    @test occursin("was resized since", message_of(() -> grad(t -> sum(t .* captured))(ones(LARGE))))
    one_element = [2.0]
    f = compile(a -> sum(a .* one_element))
    @test f(3.0) == 6
    append!(one_element, ones(10^6))
    @test occursin("captures, of size", message_of(() -> f(3.0)))
end

@testset "a vector that the body of a loop or a branch captures is noticed when it is resized: $name" for (name, make) in (
        "scan" => v -> x -> scan((c, _) -> (c .+ v, nothing), x, nothing; length=3)[1],
        "branch" => v -> x -> branch(sum(x) .>= 0, a -> a .+ v, a -> a .- v, x),
        "while_loop" => v -> x -> while_loop(c -> sum(c) .< 1, c -> c .+ v, x))
    v = [1.0, 2.0]
    f = compile(make(v))
    expected = f([0.0, 0.0])
    @test f([0.0, 0.0]) == expected
    append!(v, zeros(10^6))
    @test_throws ReplayError f([0.0, 0.0])
end

@testset "results are not written into what the body of a loop captures" begin
    v, x = rand(1000), rand(1000)
    f = compile(x -> (x .+ 1, scan((c, _) -> (c .+ v, nothing), x, nothing; length=2)[1]))
    f(x)
    before = copy(v)
    @test_throws ReplayError AD.run!((v, zeros(1000)), f, x)
    @test v == before
end
