# Arrays that were written to between the forward and the backward pass: every write that matters is found, wherever it is.

using TwinGrad.AD: AD, apply
using Random: MersenneTwister, randperm, shuffle!

const WRITES = MersenneTwister(seeded(71))
@info "random writes" seed = seeded(71)

"""The pullback of `sum(w .* sin.(w))` by an array that can be reached through `w`, seen in the way `see`."""
multiplied(w) = vjp(v -> sum(v .* sin.(v)), w)[2]
is_refused(pull) = error_of(() -> pull(1.0)) isa InPlaceError
random_array(T, n) = T.(randn(WRITES, n))

@testset "one element of $n, $T" for T in (Float64, Float32), n in (100, 255, 257, 1000, 4097, 100_000, 10_000_001)
    w = random_array(T, n)
    pull = vjp(v -> sum(v .* v), w)[2]
    @test pull(one(T))[1] == 2 .* w
    large = n > 10^6
    for i in (1, n, rand(WRITES, 1:n, large ? 1 : 6)...)
        for new in (w[i] + 1, -w[i], nextfloat(w[i]), T(NaN), T(0))
            was = w[i]
            w[i] = new
            @test error_of(() -> pull(one(T))) isa InPlaceError
            w[i] = was
            large && break
        end
    end
    @test pull(one(T))[1] == 2 .* w
end

@testset "what is assigned may be the tensor's own elements in another order: $name, $n" for n in (2, 7, 1000), (name, change) in (
    ("reversed", x -> reverse(x)), ("transposed", x -> x'), ("a view", x -> view(value(x), size(x, 1):-1:1, :)), ("itself", identity))
    T = name == "reversed" ? randn(MersenneTwister(n), n) : randn(MersenneTwister(n), min(n, 40), min(n, 40))
    for make in (Variable, Constant)
        x = make(copy(T))
        expected = copy(value(change(make(copy(T)))))
        @test value(assign!(x, change(x))) == expected
    end
end

@testset "many elements at once: $name, $T" for T in (Float64, Float32), (name, change!) in (
    ("an exchange", w -> ((i, j) = (3, 4099); (w[i], w[j]) = (w[j], w[i]))), ("sort!", sort!), ("reverse!", reverse!),
    ("shuffle!", w -> shuffle!(WRITES, w)), ("all signs", w -> (w .*= -1)), ("two signs", w -> (w[1] *= -1; w[2] *= -1)),
    ("doubled", w -> (w .*= 2)), ("shifted", w -> copyto!(w, circshift(w, 1))), ("blocks exchanged",
        w -> (part = w[1:4096]; w[1:4096] = w[4097:8192]; w[4097:8192] = part)), ("filled", w -> fill!(w, 1)))
    for make in (() -> random_array(T, 8192), () -> T.(rand(WRITES, (1.0, 2.0), 8192)), () -> T.(1:8192))
        w = make()
        pull, before = vjp(v -> sum(v .* v), w)[2], copy(w)
        change!(w)
        @test w == before || error_of(() -> pull(one(T))) isa InPlaceError
    end
end

@testset "powers of two exchanged at any distance" begin
    found = 0
    for k in 0:16
        w = ones(2^16 + 1)
        w[1+2^k] = 2.0
        pull = vjp(v -> sum(v .* v), w)[2]
        w[1], w[1+2^k] = 2.0, 1.0
        found += error_of(() -> pull(1.0)) isa InPlaceError
    end
    @test found == 17
end

@testset "through every view: $name" for (name, written) in (
    ("a view", w -> view(w, 5:9)), ("a strided view", w -> view(w, 3:7:length(w))), ("reshape", w -> reshape(w, 3, :)),
    ("a transposed matrix", w -> transpose(reshape(w, 3, :))), ("permuted", w -> PermutedDimsArray(reshape(w, 3, :), (2, 1))),
    ("reinterpret", w -> reinterpret(UInt64, w)), ("unsafe_wrap", w -> unsafe_wrap(Array, pointer(w), length(w))),
    ("a view of a view", w -> view(view(w, 2:50), 3:4)))
    w = random_array(Float64, 30_000)
    pull = multiplied(w)
    seen = written(w)
    GC.@preserve w (i = rand(WRITES, eachindex(seen)); seen[i] = seen[i] isa UInt64 ? seen[i] + 1 : seen[i] + 1.5)
    @test is_refused(pull)
end

@testset "operands that are views: $name" for (name, seen) in (
    ("a view", w -> view(w, 7:20_000)), ("every third", w -> view(w, 1:3:30_000)), ("reshaped", w -> reshape(w, 100, :)),
    ("rows", w -> view(reshape(w, 100, :), 3:50, :)), ("columns", w -> view(reshape(w, 100, :), :, 2:90)),
    ("every second of both", w -> view(reshape(w, 100, :), 1:2:99, 2:2:300)), ("one row", w -> view(reshape(w, 100, :), 4, :)),
    ("a block of three axes", w -> view(reshape(w, 10, 10, :), 2:5, 3:9, 1:4:300)),
    ("a row of four axes", w -> view(reshape(w, 10, 10, 10, 30), 2:2:8, 3, 1:3:10, :)),
    ("reinterpreted", w -> reinterpret(Float32, w)), ("transposed", w -> transpose(reshape(w, 100, :))),
    ("permuted", w -> PermutedDimsArray(reshape(w, 100, :), (2, 1))))
    w = random_array(Float64, 30_000)
    x = seen(w)
    copied = x isa Union{AD.Adjoint,AD.Transpose,PermutedDimsArray}  # then a write does not matter
    pull = vjp(v -> sum(v .* v), x)[2]
    before = pull(one(eltype(x)))[1]
    for _ in 1:3
        i = rand(WRITES, CartesianIndices(x))
        was = x[i]
        x[i] += 1
        found = error_of(() -> isequal(pull(one(eltype(x)))[1], before) || error("another gradient"))
        @test copied ? found === nothing : found isa InPlaceError
        x[i] = was
    end
    @test isequal(pull(one(eltype(x)))[1], before)
end

@testset "only what a rule reads: $name" for (name, f, matters) in (
    ("sum", v -> sum(v), false), ("exp, of the result", v -> sum(exp.(v)), false), ("tanh", v -> sum(tanh.(v)), false),
    ("a slice", v -> sum(v[2:end]), false), ("added", v -> sum(v .+ v), false),
    ("times a constant", v -> sum(v .* fill(2.0, 5000)), false),
    ("sin", v -> sum(sin.(v)), true), ("squared", v -> sum(v .^ 2), true),
    ("a view of it", v -> sum(sin.(reshape(v, 50, :)[2:3, :])), true),
    ("a checkpoint", v -> sum(checkpoint(t -> sin.(t))(v)), true),
    ("a loop", v -> sum(scan((c, t) -> (c .* t, nothing), [2.0], reshape(v, 1, :))[1]), true),
    ("what a loop captures", v -> sum(scan((c, t) -> (c .+ sin.(v) .* t, nothing), zeros(5000), [1.0, 2.0])[1]), true),
    ("a custom rule", v -> sum(custom_rule(t -> sin.(t); vjp=(g, y, t) -> g .* cos.(t))(v)), true))
    w = random_array(Float64, 5000)
    pull = vjp(f, w)[2]
    before = pull(1.0)[1]
    w[3302] += 1
    found = error_of(() -> pull(1.0)[1] == before || error("another gradient"))
    @test (name, matters ? found isa InPlaceError : found === nothing) == (name, true)
    w[3302] -= 1
    matters || @test pull(1.0)[1] == before
end

@testset "constants, labels, indices and captured arrays" begin
    x = random_array(Float64, 600)
    logits, labels = reshape(x, 3, :), rand(WRITES, 1:3, 200)
    ids, c, weight = rand(WRITES, 1:600, 5000), random_array(Float64, 600), random_array(Float64, 600)
    for (f, v, array, i, new) in ((v -> softmax_cross_entropy(v, labels), logits, labels, 150, mod1(labels[150] + 1, 3)),
        (v -> sum(v[ids]), x, ids, 4321, 7), (v -> sum(v .* c), x, c, 599, 3.5),
        (v -> sum(embedding(reshape(v, 1, :), ids) .* 2), x, ids, 4999, 8), (v -> dot(v, weight), x, weight, 300, 9.0))
        pull = vjp(f, v)[2]
        before = pull(1.0)[1]
        array[i] = new
        @test error_of(() -> pull(1.0)) isa InPlaceError
        @test vjp(f, v)[2](1.0)[1] isa Array && before isa Array
    end
end

@testset "values of what was computed are copies: writing to them changes no gradient" begin
    variable = Variable(random_array(Float64, 3000))
    y = exp.(variable)
    z = sum(y .* y)
    fill!(value(y), 0)
    fill!(Array(y), 0)
    backward!(z)
    @test variable.grad ≈ 2 .* exp.(2 .* value(variable))
    result, pull = vjp(v -> exp.(v), value(variable))
    fill!(result, 0)
    @test pull(ones(3000))[1] ≈ exp.(value(variable))
end

@testset "forward mode looks, too" begin
    w = random_array(Float64, 5000)
    f(v) = (y = v .* w; w[4000] += 1; sum(y))
    @test error_of(() -> jvp(f, (ones(5000),), (ones(5000),))) isa InPlaceError
end

@testset "an array that is written to during the backward pass, by a custom rule" begin
    w = random_array(Float64, 3000)
    spoil = custom_rule(t -> 1 .* t; vjp=(g, y, t) -> (w[2000] = 7; g))
    @test error_of(() -> grad(v -> sum(spoil(v .* w) .* w))(ones(3000))) isa InPlaceError
end

@testset "the rules say which operands they read, whatever the sizes and attributes" begin
    # What one node's rules read, traced for it alone, is no more than what was found once for its op.
    seen = Set{String}()
    matrix, vector, single = random_array(Float64, 12) |> x -> reshape(x, 3, 4), random_array(Float64, 4), [1.5]
    for (f, operands) in ((*, (matrix, vector)), ((a, b) -> a .* b ./ (2 .+ b .^ 2), (matrix, [1.0, 2.0, 3.0])),
        ((a, b) -> a .* b ./ b, (single, single)), (x -> x .^ 3 .+ x .^ 2.5 .+ x .^ -1, (abs.(vector),)),
        ((x, p) -> x .^ p, (abs.(vector), single)),
        ((a, b) -> einsum("ij,jk,kl->il", a, b, a), (matrix[:, 1:3], matrix[:, 1:3])),
        (a -> einsum("ii->i", a), (matrix[:, 1:3],)),
        (a -> einsum("ij->", a), (matrix,)), (x -> maximum(x; dims=1) .+ minimum(x), (matrix,)),
        (x -> softmax(x) .+ log_softmax(x; dims=(1, 2)), (matrix,)), (x -> prod(x; dims=1), (matrix,)), (prod, (single,)),
        (x -> logsumexp(x; dims=2) .+ norm(x; dims=1), (matrix,)),
        ((x, w) -> conv(x, w; stride=2), (randn(WRITES, 7, 2, 2), randn(WRITES, 3, 2, 3))),
        (x -> max_pool(x, 2) .+ avg_pool(x, 2), (randn(WRITES, 6, 2, 1),)),
        (x -> softmax_cross_entropy(x, [1, 2, 3, 1]), (matrix,)),
        (w -> embedding(w, [1, 4, 4]; padding_index=4), (matrix,)),
        (x -> x[[2, 2], 1:3] .+ vcat(x[1:1, 2:4], x[1:1, 1:3]), (matrix,)),
        ((x, l, h) -> clamp.(x, l, h), (matrix, single, 2 .* single)),
        ((a, b) -> ifelse.(a .> b, max.(a, b), min.(a, 0.0)), (matrix, single)))
        variables = map(Variable, operands)
        y = f(variables...)
        for node in AD.topological_sort(y)
            (node.op === nothing || node.op.backward! isa AD.Joint || node.op.constant) && continue
            push!(seen, node.op.name)
            exact, known = AD.traced_reads(node), AD.operands_read(node)
            @test (node.op.name, all(exact .<= known)) == (node.op.name, true)
        end
    end
    @test length(seen) >= 25
end

# Functions that are collected before they run: each op would see what an array holds at the end.

function written_factor(x)
    factor, total = ones(3), 0.0
    for i in 1:3
        factor[i] = i - 1
        total = total + sum(x .* factor)
    end
    return total
end
function written_after(x)
    shift = zeros(3)
    y = shift .+ x
    shift .= 100
    return sum(y)
end
function copied_factor(x)
    factor, total = ones(3), 0.0
    for i in 1:3
        factor[i] = i - 1
        total = total + sum(x .* copy(factor))
    end
    return total
end
@testset "arrays that are written to while ops are collected: $name" for (name, collected) in (
    ("compile", f -> compile(f)([0.7, -0.3, 1.2])), ("compile, of a gradient", f -> compile(grad(f))([0.7, -0.3, 1.2])),
    ("vmap", f -> vmap(f)(reshape([0.7, -0.3, 1.2], 3, 1))), ("checkpoint", f -> grad(checkpoint(f))([0.7, -0.3, 1.2])),
    ("scan", f -> scan((c, x) -> (c + f(x), nothing), 0.0, reshape([0.7, -0.3, 1.2], 3, 1))[1]),
    ("scan in compile", f -> compile(v -> scan((c, x) -> (c + f(x), nothing), 0.0, v)[1])(reshape([0.7, -0.3, 1.2], 3, 1))))
    @test error_of(() -> collected(written_factor)) isa InPlaceError
    @test error_of(() -> collected(written_after)) isa InPlaceError
    found = collected(copied_factor)
    @test vec(collect(found isa Tensor ? value(found) : found)) ≈ (occursin("gradient", name) || name == "checkpoint" ? [0, 3, 4] : [3.9])
end
