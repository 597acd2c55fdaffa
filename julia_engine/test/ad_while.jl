# Loops that end on a value: against Julia's own, in every kind of derivative, for many samples, in bounded memory; mistakes.

using TwinGrad.AD: AD

const LOOP_W, LOOP_X = [0.5 -0.3; 0.2 0.4], [0.9, -0.7]

"""Until the vector is short: the number of steps depends on the values."""
function looping(w, x)
    n, x, total = while_loop(c -> sum(c[2] .^ 2) .> 0.01, c -> (c[1] + 1, tanh.(w * c[2]), c[3] + c[2][1]), (0.0, x, 0.5))
    return sum(sin.(x)) * total + n
end
function looping_in_julia(w, x)
    total, n = 0.5, 0
    while item(sum(Tensor(x) .^ 2)) > 0.01
        n, x, total = n + 1, tanh.(w * x), total + x[1]
    end
    return sum(sin.(x)) * total + n
end

all_near(a, b) = all(p ≈ q for (p, q) in zip(a, b))
allocated_at(f, args...) = compiling(() -> (f(args...); @allocated f(args...)))

@testset "values and derivatives: $name" for (name, transform) in (
    ("value", f -> (w, x) -> (f(w, x),)),
    ("gradient", f -> grad(f; argnums=(1, 2))),
    ("tangent", f -> (w, x) -> (jvp(f, (w, x), (cos.(w), cos.(x)))[2],)),
    ("second, reverse over reverse", f -> grad((w, x) -> sum(sum(sin.(g)) for g in grad(f; argnums=(1, 2))(w, x)); argnums=(1, 2))),
    ("second, forward over reverse", f -> (w, x) -> jvp(grad(f; argnums=(1, 2)), (w, x), (cos.(w), cos.(x)))[2]),
    ("second, forward over forward", f -> (w, x) -> (jvp((w, x) -> jvp(f, (w, x), (cos.(w), cos.(x)))[2], (w, x), (w, x))[2],)),
    ("second, reverse over forward", f -> grad((w, x) -> jvp(f, (w, x), (cos.(w), cos.(x)))[2]; argnums=(1, 2))))
    compiled = compile(transform(looping))
    for x in (LOOP_X, 5 .* LOOP_X, LOOP_X .* 0.01, [0.05, 0.2])
        expected = transform(looping_in_julia)(LOOP_W, x)
        @test all_near(compiled(LOOP_W, x), expected)
        (x === LOOP_X || draws(1) > 1) && @test all_near(transform(looping)(LOOP_W, x), expected)
    end
    @test length(compiled.tapes) == 1
    poison!(first(values(compiled.tapes))[1], 0xff)
    @test all_near(compiled(LOOP_W, LOOP_X), transform(looping_in_julia)(LOOP_W, LOOP_X))
end

@testset "fourth derivatives of Newton's method" begin
    root(a) = while_loop(x -> abs.(x .* x .- a) .> 1e-14, x -> (x .+ a ./ x) ./ 2, a)
    f = root
    for expected in (2^0.5, 0.5 * 2^-0.5, -0.25 * 2^-1.5, 0.375 * 2^-2.5)
        @test isapprox(compile(f)(2.0), expected; rtol=1e-3)
        f = grad(f)
    end
    @test compile(root)(2.0) ≈ sqrt(2) && compile(x -> while_loop(x -> x .> 1, x -> x ./ 2, x))(5.0f0) === 0.625f0
    @test derivative(root, 2.0) ≈ derivative(sqrt, 2.0)
end

@testset "limits, and every number of steps goes back through its segments" begin
    for limit in (0, 1, 2, 1000), run in (identity, compile)
        squared(x) = while_loop(c -> c[2] .< 100, c -> (c[1] + 1, c[2] * c[2]), (0.0, x); max_steps=limit)
        steps = min(limit, 3)
        @test run(squared)(3.0) == (steps, 3.0^(2^steps))
        @test run(grad(x -> squared(x)[2]))(3.0) ≈ 2^steps * 3.0^(2^steps - 1)
    end
    function counted(w, x, n)
        last = while_loop(c -> c[1] .< n, c -> (c[1] + 1, sin.(w * c[2]) .+ c[1] .* x), (0.0, x))
        return sum(last[2] .^ 2)
    end
    function written(steps)
        return function (w, x)
            y = x
            foreach(k -> y = sin.(w * y) .+ k .* x, 0:steps-1)
            return sum(y .^ 2)
        end
    end
    compiled = compile(grad(counted; argnums=(1, 2, 3)))
    for steps in (draws(1) > 1 ? (0, 1, 2, 3, 4, 8, 9, 10, 17) : (0, 1, 3, 4, 10))
        expected = grad(written(steps); argnums=(1, 2))(LOOP_W, LOOP_X)
        found = compiled(LOOP_W, LOOP_X, Float64(steps))
        @test all_near(found, expected) && found[3] == 0  # the number of steps has no derivative
        @test all_near(grad(counted; argnums=(1, 2))(LOOP_W, LOOP_X, Float64(steps)), expected)
    end
end

@testset "memory grows with the square root of the steps, and the graph does not grow" begin
    size_ = 1000
    f = compile(grad((x, n) -> sum(while_loop(c -> c[1] .< n, c -> (c[1] + 1, sin.(c[2])), (0.0, x))[2])))
    few, many = [allocated_at(f, ones(size_), n) for n in (100.0, 10_000.0)]
    @test many < 15few && many < 2.5 * 100 * size_ * 8  # of 10,000 carries
    w, x = AD.symbol(Float64, [2, 2]), AD.symbol(Float64, [2])
    program = AD.trace((w, x) -> collect(grad(looping; argnums=(1, 2))(w, x)), Tensor[w, x])
    @test length(program.equations) < 30
end

@testset "many samples, each with its own end" begin
    xs = [0.3, 1.0, 5.0]' .* LOOP_X
    for (name, f) in (("value", looping), ("gradient", (w, x) -> grad(x -> looping(w, x))(x)),
            ("tangent", (w, x) -> jvp(looping, (w, x), (w, x))[2]), ("product", (w, x) -> hvp(x -> looping(w, x), x, cos.(x))),
            ("hessian", (w, x) -> hessian(x -> looping(w, x), x))), run in (name == "gradient" ? (identity, compile) : (compile,))
        found = run(vmap(f; in_axes=(nothing, :last)))(LOOP_W, xs)
        @test (name, [found[ntuple(_ -> :, ndims(found) - 1)..., k] ≈ f(LOOP_W, xs[:, k]) for k in 1:3]) == (name, trues(3))
    end
    through = grad((w, xs) -> sum(vmap(looping; in_axes=(nothing, :last))(w, xs)); argnums=(1, 2))
    each = [grad(looping; argnums=(1, 2))(LOOP_W, xs[:, k]) for k in 1:3]
    for run in (identity, compile)
        @test all_near(run(through)(LOOP_W, xs), (sum(g[1] for g in each), hcat((g[2] for g in each)...)))
        @test run(w -> hessian(w -> sum(vmap(looping; in_axes=(nothing, :last))(w, xs)), w))(LOOP_W) ≈
            sum(hessian(w -> looping(w, xs[:, k]), LOOP_W) for k in 1:3)
    end
end

@testset "loops in loops, branches in loops, and what they capture" begin
    function nested(w, xs)
        function body(h, x)
            inner = while_loop(c -> sum(c .* c) .> 0.3, c -> tanh.(w * c), h .+ x)
            return branch(inner[1] .> 0, h -> h .* 2, h -> sin.(h), inner), sum(inner)
        end
        last, ys = scan(body, LOOP_X, xs)
        return sum(last) + sum(ys)
    end
    function plain(w, xs)
        h, total = Tensor(LOOP_X), 0.0
        for k in 1:4
            c = h .+ xs[:, k]
            while item(sum(c .* c)) > 0.3
                c = tanh.(w * c)
            end
            h, total = item(c[1]) > 0 ? c .* 2 : sin.(c), total + sum(c)
        end
        return sum(h) + total
    end
    xs = randn(AD.MersenneTwister(seeded(3)), 2, 4)
    for run in (identity, compile)
        @test all_near(run(grad(nested; argnums=(1, 2)))(LOOP_W, xs), grad(plain; argnums=(1, 2))(LOOP_W, xs))
    end
    both = cat(xs, -xs; dims=3)
    found = vmap(xs -> grad(nested)(LOOP_W, xs))(both)
    @test all(found[:, :, k] ≈ grad(plain)(LOOP_W, both[:, :, k]) for k in 1:2)
    a = Variable(LOOP_W)
    backward!(sum(while_loop(c -> sum(c .* c) .> 0.3, c -> tanh.(a * c), LOOP_X)))
    @test a.grad ≈ grad(w -> sum(while_loop(c -> sum(c .* c) .> 0.3, c -> tanh.(w * c), LOOP_X)))(LOOP_W)
    limit = Constant(fill(3.0))
    f = compile(x -> while_loop(c -> c .< limit, c -> c .+ x, x))
    @test f(1.0) == 3
    assign!(limit, fill(5.0))
    @test f(1.0) == 5
    @test while_loop(c -> false, c -> c, (a=[1.0f0], b=2)) == (a=[1.0f0], b=2.0f0)
    @test compile(x -> grad(x -> sum(while_loop(c -> c.n .> 0, c -> (n=c.n - 1, x=c.x .* x), (n=2.0, x=x)).x))(x))([2.0]) == [12]
end

@testset "techniques change no result: $name" for name in (:preallocate, :views, :simplify, :concrete, :replay)
    f = grad(looping; argnums=(1, 2))
    @test all_near(compile(f; techniques=Techniques(; (name => false,)...))(LOOP_W, LOOP_X), f(LOOP_W, LOOP_X))
end

@testset "random loops against Julia's own" begin
    generator = AD.MersenneTwister(seeded(18))
    transform(f) = (w, x) -> (grad(f; argnums=(1, 2))(w, x)..., jvp(f, (w, x), (x .* w, x))[2])
    compiled = compile(transform(looping))
    for _ in 1:draws(3)
        w, x = randn(generator, 2, 2), randn(generator, 2)
        w .*= (0.2 + 0.7rand(generator)) / AD.LinearAlgebra.opnorm(w)  # so that it ends
        @test all_near(compiled(w, x), transform(looping_in_julia)(w, x))
    end
end

@testset "what is wrong is named" begin
    for (call, kind, what) in (
        (x -> while_loop(x -> x .> 0, x -> x, x; max_steps=-1), ConfigurationError, "or nothing, got -1"),
        (x -> while_loop(x -> "yes", x -> x, x), DTypeError, "what cond returns must be a truth value"),
        (x -> while_loop(x -> stack([x, x]) .> 0, x -> x, x), ShapeError, "must be one truth value, got size (2,)"),
        (x -> while_loop(x -> x .> 0, x -> stack([x, x]), x), ShapeError, "while_loop: the carry must keep its size and element type"),
        (x -> while_loop(c -> c[1] .> 0, c -> c[1], (x,)), ShapeError, "while_loop: the carry"),
        (x -> while_loop(x -> x .> 0, x -> item(x) > 1 ? x : -x, x), TraceError, "while_loop()"),
        (x -> while_loop(c -> true, c -> c, ()), ShapeError, "init must hold an array at least"),
        (x -> while_loop(c -> true, c -> c, "text"), NotDifferentiableError, "while_loop: the carry is of String"),
        (x -> while_loop(c -> true, c -> c, [1, 2]), NotDifferentiableError, "while_loop: the carry is of Int64"),
        (x -> while_loop(x -> x .> 0, x -> dropout(x, 0.5, AD.Generator(1)), x), TraceError, "random masks cannot be drawn inside"))
        for run in (identity, compile)
            error = error_of(() -> run(call)(0.5))
            @test error isa kind && occursin(what, error.message)
        end
    end
    for f in (x -> item(sum(x)) > 0 ? x : -x, x -> sum(x) > 0 ? x : -x, x -> [x for _ in 1:Int(x[1])], x -> x .* Float64(x[1]))
        error = error_of(() -> compile(f)(ones(2)))
        @test error isa TraceError && occursin("branch(), while_loop() and scan(), instead of branches and loops", error.message)
    end
end
