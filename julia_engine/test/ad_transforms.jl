# Transforms: containers, products with Jacobians, matrices, derivatives of derivatives, random programs, bad input.

using SparseArrays: SparseArrays  # else the first sparse matrix loads it, too late for its own expression
using TwinGrad.AD: AD

rosenbrock(x) = sum(100 .* (x[2:end] .- x[1:end-1] .^ 2) .^ 2 .+ (1 .- x[1:end-1]) .^ 2)

function rosenbrock_hessian(x)
    n = length(x)
    h = zeros(n, n)
    for i in 1:n-1
        h[i, i] += 1200x[i]^2 - 400x[i+1] + 2
        h[i+1, i+1] += 200
        h[i, i+1] -= 400x[i]
        h[i+1, i] -= 400x[i]
    end
    return h
end

@testset "a captured array that is returned is copied" begin
    c = [1.0, 2.0]
    for captured in (c, Constant(c))
        y, _ = vjp(x -> captured, [3.0])
        y .= 0
        tangent = jvp(x -> (captured, x), ([3.0],), ([1.0],))
        tangent[1][1] .= 0
        @test c == [1, 2]
    end
end

@testset "gradients have the structure of their argument" begin
    w, b, c = [1.0 2.0; 3.0 4.0], [5.0, 6.0], 2.0
    loss(p) = sum(p.layers[1]["w"] * p.layers[1]["b"]) * p.scale[1] + sum(p.layers[2])
    p = (layers=Any[Dict("w" => w, "b" => b), c], scale=(3.0, nothing), extra=())
    expected = (layers=Any[Dict("w" => 3 .* [b'; b'], "b" => 3 .* [4.0, 6.0]), 1.0], scale=(sum(w * b), nothing), extra=())
    for run in (grad(loss), compile(grad(loss)), p -> gradient(loss, p)[1], p -> value_and_grad(loss)(p)[2],
        p -> vjp(loss, p)[2](1)[1])
        g = run(p)
        @test typeof(g).name === typeof(p).name && keys(g) == keys(p)
        @test g.layers[1]["w"] == expected.layers[1]["w"] && g.layers[1]["b"] == expected.layers[1]["b"]
        @test g.layers[2] == 1 && g.scale === (sum(w * b), nothing) && g.extra === ()
    end
    @test grad(ws -> sum(ws[1] .* ws[2]))([[1.0, 2.0], [3.0, 4.0]]) == [[3, 4], [1, 2]]
    @test grad((a, p) -> sum(a) * p.x; argnums=(2, 1))([1.0, 2.0], (x=3.0,)) == ((x=3.0,), [3.0, 3.0])
    @test gradient(p -> sum(p.w) * p.n, (w=[1.0], n=2, label="a")) == ((w=[2.0], n=nothing, label=nothing),)
    @test withgradient(p -> sum(p.w .^ 2), (w=[3.0],)) == (val=9.0, grad=((w=[6.0],),))
end

@testset "vjp and jvp of containers" begin
    f(p, x) = (y=p.w * x, z=[sum(p.w), x .^ 2])
    p, x = (w=[1.0 2.0; 3.0 4.0],), [5.0, 6.0]
    y, pull = vjp(f, p, x)
    @test y.y == [17, 39] && y.z[1] == 10 && y.z[2] == [25, 36]
    gp, gx = pull((y=[1.0, 0.0], z=[2.0, [0.0, 1.0]]))
    @test gp.w == [7 8; 2 2] && gx == [1, 2 + 12]
    y, moved = jvp(f, (p, x), ((w=[1.0 0.0; 0.0 0.0],), nothing))
    @test y.y == [17, 39] && moved.y == [5, 0] && moved.z[1] == 1 && moved.z[2] == [0, 0]
    compiled = compile((p, x, u) -> vjp(f, p, x)[2]((y=u, z=[0.0, zeros(2)])))
    @test compiled(p, x, [1.0, 0.0]) == ((w=[5.0 6.0; 0.0 0.0],), [1, 2])
    @test compile((p, x, t) -> jvp(x -> f(p, x), (x,), (t,))[2])(p, x, [1.0, 0.0]).y == [1, 3]
    @test vjp(x -> sum(x .^ 2), [3.0])[2](2.0) == ([12.0],)
    @test vjp(x -> x[1], [3.0, 4.0])[1] === 3.0
end

@testset "Jacobians: by rows, by columns, in blocks, compiled" begin
    a = randn(5, 3)
    f(x) = tanh.(a * x)
    x = randn(3)
    expected = (1 .- tanh.(a * x) .^ 2) .* a
    for mode in (nothing, :forward, :reverse, "forward", "reverse")
        @test jacobian(f, x; mode=mode) ≈ expected
        @test compile(x -> jacobian(f, x; mode=mode))(x) ≈ expected
    end
    halves(x) = (astype(x, Float32), x)
    @test all(eltype.(jacobian(halves, x; mode=mode)) == (Float32, Float64) for mode in (:forward, :reverse))
    @test size(jacobian(x -> sum(x), x)) == (1, 3) && size(jacobian(x -> x .* [1.0, 2.0], 2.0)) == (2, 1)
    blocks = jacobian(p -> (u=p.a .* p.b, v=sum(p.a)), (a=[1.0, 2.0], b=[3.0, 4.0]))
    @test blocks.u.a == [3 0; 0 4] && blocks.u.b == [1 0; 0 2] && blocks.v.a == [1 1] && blocks.v.b == [0 0]
    @test jacobian(x -> vec(x .^ 2), [1.0f0 2.0f0; 3.0f0 4.0f0]) == AD.Matrix{Float32}(AD.I * 1.0f0, 4, 4) .* [2 6 4 8]
end

@testset "the Hessian of Rosenbrock's function" begin
    for n in (2, 3, 10)
        x = randn(n)
        @test hessian(rosenbrock, x) ≈ rosenbrock_hessian(x)
        @test compile(x -> hessian(rosenbrock, x))(x) ≈ rosenbrock_hessian(x)
        v = randn(n)
        @test hvp(rosenbrock, x, v) ≈ rosenbrock_hessian(x) * v
        @test compile((x, v) -> hvp(rosenbrock, x, v))(x, v) ≈ rosenbrock_hessian(x) * v
        @test jacobian(grad(rosenbrock), x; mode=:reverse) ≈ rosenbrock_hessian(x)
    end
    blocks = hessian(p -> sum(p.a .^ 2) * p.b, (a=[1.0, 2.0], b=3.0))
    @test blocks.a.a == [6 0; 0 6] && vec(blocks.a.b) == [2, 4] && vec(blocks.b.a) == [2, 4] && blocks.b.b == zeros(1, 1)
end

@testset "third derivatives of elementary functions" begin
    x = 0.7
    for (f, expected) in ((sin, -cos(x)), (cos, sin(x)), (exp, exp(x)), (log, 2 / x^3), (x -> x^5, 60x^2), (x -> 1 / x, -6 / x^4),
        (sqrt, 3 / 8 * x^-2.5), (tanh, -2(1 - tanh(x)^2) * (1 - 3tanh(x)^2)), (x -> x^2.5, 2.5 * 1.5 * 0.5 / sqrt(x)),
        (atan, (6x^2 - 2) / (1 + x^2)^3),
        (x -> sin(cos(x)), (sin(x) + sin(x)^3) * cos(cos(x)) - 3sin(x) * cos(x) * sin(cos(x))))
        direction(g) = t -> jvp(g, (t,), (1.0,))[2]
        for third in (grad(grad(grad(f))), direction(direction(direction(f))), grad(direction(grad(f))),
            direction(grad(direction(f))), compile(grad(grad(grad(f)))), compile(direction(grad(grad(f)))))
            @test third(x) ≈ expected
        end
    end
end

@testset "derivatives within derivatives are not confused" begin
    @test grad(x -> x * grad(y -> x + y)(1.0))(1.0) == 1
    @test grad(x -> x * jvp(y -> x * y, (2.0,), (1.0,))[2])(3.0) == 6
    @test jvp(x -> x * jvp(y -> x * y, (2.0,), (1.0,))[2], (3.0,), (1.0,)) == (9, 6)
    @test jvp(x -> grad(y -> x * y^2)(2.0), (3.0,), (1.0,)) == (12, 4)
    @test grad(x -> sum(vjp(y -> x .* y, [1.0, 2.0])[2]([1.0, 1.0])[1]))([3.0, 4.0]) == [1, 1]
    @test jacobian(x -> vec(jacobian(y -> x .* y .^ 2, [1.0, 1.0])), [1.0, 1.0]) == [2 0; 0 0; 0 0; 0 2]
end

@testset "stop_gradient" begin
    @test grad(x -> sum(x .* stop_gradient(x)))([2.0, 3.0]) == [2, 3]
    @test compile(grad(x -> sum(x .* stop_gradient(x))))([2.0, 3.0]) == [2, 3]
    @test jvp(x -> x .* stop_gradient(x), ([2.0],), ([1.0],)) == ([4.0], [2.0])
    @test grad(p -> (q = stop_gradient(p); p.a * q.b[1]))((a=2.0, b=(3.0,))) == (a=3.0, b=(0.0,))
    @test stop_gradient((1, [2.0], nothing)) == (1, [2.0], nothing)
    @test hessian(x -> sum(stop_gradient(x) .* x .^ 2), [1.0]) == fill(2.0, 1, 1)
    for run in (identity, compile)  # what is a constant to all outside is a variable inside
        @test run(x -> x * grad(sin)(stop_gradient(x)))(0.5) ≈ 0.5cos(0.5)
        @test run(x -> x * jvp(sin, (stop_gradient(x),), (1.0,))[2])(0.5) ≈ 0.5cos(0.5)
        @test run(grad(x -> x * grad(grad(sin))(stop_gradient(x))))(0.5) ≈ -sin(0.5)
    end
end

# Random programs, as data: each line names an op and the values that it takes. Running them compiles nothing.
const SMOOTH = Pair{Int,Any}[
    2 => (a, b) -> AD.ADD(a, b), 2 => (a, b) -> AD.SUB(a, b), 2 => (a, b) -> AD.MUL(a, b),
    2 => (a, b) -> AD.DIV(a, AD.ADD(AD.SQUARE(b), 1.5)), 1 => a -> AD.SIN(a), 1 => a -> AD.COS(a), 1 => a -> AD.TANH(a),
    1 => a -> AD.SIGMOID(a), 1 => a -> AD.EXP(AD.SIN(a)), 1 => a -> AD.LOG(AD.ADD(AD.SQUARE(a), 1.2)),
    1 => a -> AD.SQRT(AD.ADD(AD.SQUARE(a), 0.7)), 1 => a -> AD.SOFTPLUS(a), 1 => a -> AD.ARCTAN(a),
    1 => a -> AD.NEG(a), 1 => a -> a[[3, 1, 1]] .* 0.5, 1 => a -> AD.MUL(a, sum(a)),
    2 => (a, b) -> vcat(a[1:1], b[2:3]), 2 => (a, b) -> reshape(a, 3, 1) * reshape(b, 1, 3) * a,
    1 => a -> softmax(a), 1 => a -> AD.SUB(a, mean(a)), 1 => a -> AD.POW(AD.ADD(AD.SQUARE(a), 0.5), 1.3),
    2 => (a, b) -> AD.MUL(norm(AD.ADD(AD.SQUARE(a), 0.3)), b)]

random_lines(random, n) = [(k = rand(random, 1:length(SMOOTH)); (k, rand(random, 1:i+1), rand(random, 1:i+1)))
                           for i in 1:n]

function run_lines(lines, x, y)
    pool = AD.Tensor[AD.as_tensor(x), AD.as_tensor(y)]
    for (k, i, j) in lines
        takes, op = SMOOTH[k]
        # Values stay within ±2, so that finite differences stay meaningful however long the program is.
        push!(pool, 2 .* AD.TANH(0.5 .* (takes == 1 ? op(pool[i]) : op(pool[i], pool[j]))))
    end
    return pool[end] .+ 0.1 .* pool[end-1]
end

@testset "jvp, vjp and finite differences agree on random programs" begin
    seed = seeded(51)
    @info "random programs" seed
    random = AD.MersenneTwister(seed)
    worst_pair, worst_difference = 0.0, 0.0
    for trial in 1:draws(600)
        lines = random_lines(random, rand(random, 1:9))
        x, y, dx, dy, u = (randn(random, 3) for _ in 1:5)
        f(x, y) = run_lines(lines, x, y)
        value_, pull = vjp(f, x, y)
        gx, gy = pull(u)
        same, moved = jvp(f, (x, y), (dx, dy))
        @assert same == value_
        forward, backward = sum(u .* moved), sum(gx .* dx) + sum(gy .* dy)
        at(h) = no_grad(() -> sum(u .* value(f(x .+ h .* dx, y .+ h .* dy))))
        difference(h) = (at(h) - at(-h)) / 2h
        numeric = (4 * difference(5e-4) - difference(1e-3)) / 3
        worst_pair = max(worst_pair, abs(forward - backward) / max(1, abs(forward)))
        worst_difference = max(worst_difference, abs(forward - numeric) / max(1, abs(forward)))
        if trial % 100 == 0  # the compiled gradient, and second derivatives, of some
            @test compile((x, y) -> vjp(f, x, y)[2](u))(x, y)[1] ≈ gx
            loss(x) = sum(f(x, y) .* u)
            @test hvp(loss, x, dx) ≈ grad(t -> sum(grad(loss)(t) .* dx))(x)
        end
    end
    @test worst_pair < 1e-10
    @test worst_difference < 1e-5
end

@testset "results share memory with nobody's array" begin
    a = [1.0, 2.0]
    y, pull = vjp(x -> x, a)
    seed = [5.0, 6.0]
    g, = pull(seed)
    @test y == a && y !== a && g == seed && g !== seed
    y[1], g[1] = 9, 9
    @test a == [1, 2] && seed == [5, 6]
    y, moved = jvp(x -> (x, x), (a,), (seed,))
    y[1][1], moved[1][1] = 9, 9
    @test a == [1, 2] && seed == [5, 6] && y[2] == [1, 2] && moved[2] == [5, 6]
    g, h = gradient((x, y) -> sum(x .+ y), [1.0, 2.0], [3.0, 4.0])
    g[1] = 9
    @test h == [1, 1]
    c = compile(x -> (x, reshape(x, 1, 2), x .+ 1))
    r = c(a)
    r[1][1] = 9
    @test a == [1, 2] && r[2] == [1 2] && c(a)[1] == [1, 2]
end

@testset "bad input names argument, place, expected and actual" begin
    v, pull = vjp(x -> x .^ 2, [1.0, 2.0])
    changed = [1.0, 2.0]
    _, late = vjp(x -> x .^ 2, changed)
    changed[2] = 5
    sized = compile(x -> x .* 2)
    sized([1.0, 2.0])
    tape = first(values(sized.tapes))[1]
    for (kind, f, text) in (
        (ShapeError, () -> grad(x -> x)(ones(2)), "must return a number, got an array of size (2,); use vjp or jacobian"),
        (ShapeError, () -> grad(x -> (sum(x), x))(ones(2)), "must return a number, got a tuple of 2"),
        (ShapeError, () -> grad(x -> sum(x); argnums=2)(ones(2)), "there is no argument 2"),
        (NotDifferentiableError, () -> grad(x -> sum(x))([1, 2]), "argument 1 is of Int64"),
        (NotDifferentiableError, () -> grad(p -> p.a)((a=1.0, layers=[Dict("w" => 3)])), "argument 1.layers[1][\"w\"] is of Int64"),
        (NotDifferentiableError, () -> grad((x, y) -> x; argnums=2)(1.0, "abc"), "argument 2 is of String"),
        (NotDifferentiableError, () -> grad(x -> sum(x))(["a", "b"]), "argument 1 is of String"),
        (NotDifferentiableError, () -> grad(x -> sum(abs2, x))([1.0 + 2im]), "real and imaginary parts separately"),
        (NotDifferentiableError, () -> grad(x -> sum(x))(2.0 + 1im), "real and imaginary parts separately"),
        (NotDifferentiableError, () -> gradient((x, y) -> sum(x), [1.0], [2im]), "argument 2 is of Complex{Int64}"),
        (DTypeError, () -> grad(x -> sum(x .* 1im))([2.0]), "real and imaginary parts separately"),
        (NotDifferentiableError, () -> grad(x -> Float64(x)^2)(2.0), "would lose its derivative; use item()"),
        (NotDifferentiableError, () -> jvp(x -> Float32(x[1]), (Float32[2],), (Float32[1],)), "would lose its derivative"),
        (NotDifferentiableError, () -> grad(x -> 1im)(2.0), "return real and imaginary parts separately"),
        (NotDifferentiableError, () -> grad(x -> "a")(2.0), "must return tensors"),
        (NotDifferentiableError, () -> gradient(x -> x, 2), "no argument is of Float32 or Float64"),
        (NotDifferentiableError, () -> vjp(x -> x, 2), "vjp: argument 1 is of Int64"),
        (NotDifferentiableError, () -> jvp(x -> x, ([1],), ([1],)), "jvp: argument 1 is of Int64"),
        (NotDifferentiableError, () -> jacobian(x -> x, [1]), "jacobian: argument 1 is of Int64"),
        (NotDifferentiableError, () -> hessian(x -> sum(x), [1]), "argument 1 is of Int64"),
        (ShapeError, () -> pull([1.0]), "expected size (2,), got (1,)"),
        (DTypeError, () -> pull(([1.0], [1.0])), "vjp: the seed: expected Float64 of size (2,)"),
        (DTypeError, () -> pull(Float32[1, 2]), "expected Float64, got Float32"),
        (ShapeError, () -> vjp(x -> (a=x,), [1.0])[2]((b=[1.0],)), "expected a named tuple of :a, got a named tuple of :b"),
        (InPlaceError, () -> late([1.0, 1.0]), "changed in place"),
        (ConfigurationError, () -> grad((x, y) -> sum(x .* y); argnums=(1, 1)), "name each argument once, got (1, 1)"),
        (ShapeError, () -> jvp(x -> x, ([1.0],), ([1.0], [2.0])), "expected 1 tangents"),
        (ShapeError, () -> jvp(x -> x, ([1.0],), ([1.0, 2.0],)), "jvp: tangent 1: expected size (1,), got (2,)"),
        (ConfigurationError, () -> jacobian(x -> x, [1.0]; mode=:sideways), ":forward or :reverse"),
        (ReplayError, () -> tape([1.0]), "planned for size (2,) Float64, got (1,) Float64"),
        (ReplayError, () -> tape([1.0f0, 2.0f0]), "planned for size (2,) Float64, got (2,) Float32"),
        (DTypeError, () -> compile(p -> p.w)((w=[1.0], name="a")), "argument 1.name is of String"),
        (TraceError, () -> compile(x -> "a")(1.0), "must return tensors"),
        (TraceError, () -> compile(x -> x > 0 ? x : -x)(1.0), "being traced"))
        error = error_of(f)
        @test (text, typeof(error), error isa EngineError && occursin(text, error.message)) == (text, kind, true)
    end
    branch(x) = x > 0 ? x^2 : -x  # eagerly a branch on a value works
    @test grad(branch)(3.0) == 6 && grad(branch)(-3.0) == -1
    @test sized([1.0f0]) == [2.0f0] && length(sized.tapes) == 2  # another size or type is another tape
end

@testset "a graph of 100,000 numbers" begin
    function chain(x)
        for _ in 1:50_000
            x = sin(x) * 0.999 + 0.001
        end
        return x
    end
    y = chain(Variable(0.5))
    @test length(topological_sort(y)) > 100_000
    v, g = value_and_grad(chain)(0.5)
    compiled = compile(value_and_grad(chain))
    @test item(y) == v && all(compiled(0.5) .≈ (v, g))
    @test isapprox(g, (chain(0.5 + 1e-6) - chain(0.5 - 1e-6)) / 2e-6; atol=1e-8)
end

@testset "arrays written over while a gradient needs them" begin
    for n in (3, 5000)
        a, b = ones(n), ones(n)
        w, v = Variable(a; name="w"), Variable(b)
        y = sum(w .* v)
        a .= 2
        @test occursin("the gradient of \"mul\" needs what was computed with, but its input 1, \"w\" (size ($n,)) was changed",
            message_of(() -> backward!(y)))
        a .= 1
        backward!(y)  # as it was
        @test w.grad == b
        assign!(v, 3)
        @test occursin("its input 2 (size ($n,)) was changed in place", message_of(() -> backward!(y)))
        z = exp.(w)
        value(z) .= 0  # a copy
        w.grad = nothing
        backward!(sum(z))
        @test w.grad ≈ exp.(a)
        for f in (() -> sum(w .+ v), () -> sum(exp.(w) .- exp.(w) .+ w))  # a sum needs no values, exp its result alone
            s = f()
            a .= 7
            w.grad = nothing
            backward!(s)
            @test w.grad == ones(n)
        end
    end
    for n in (6, 6000), view_ in (x -> reshape(x, 2, :), x -> x[1:2:end], x -> permutedims(reshape(x, 2, :))[2:end, 1:1])
        x, c = ones(n), ones(n)
        _, pull = vjp(x -> sum(sin.(view_(x))), x)
        y = sum(view_(Variable(ones(n))) .* view_(Constant(c)))
        x .= 2
        c .= 2
        @test all(occursin("changed in place", message_of(f)) for f in (() -> pull(1.0), () -> backward!(y)))
    end
    places = [1, 2]
    _, pull = vjp(x -> x[places], [1.0, 2.0])
    places .= 1
    @test occursin("the gradient of \"gather\"", message_of(() -> pull([1.0, 1.0])))
    x = [1.0, 2.0]
    _, pull = vjp(x -> 3 .* x, x)
    x .= 5
    @test pull([1.0, 1.0]) == ([3.0, 3.0],)  # nothing of what was there is needed
    x = Variable([1.0, 2.0])
    @test occursin("cannot be written in place", message_of(() -> x[1] = 3))
end

@testset "a transform inside others costs what its own function costs" begin
    inner(z) = sum(sin.(z) .* z)
    ones3 = [1.0, 1.0, 1.0]
    @test derivative(a -> sum(grad(inner)(a .* ones3)), 0.0) == 6  # dual numbers that have met tensors change no costs
    steps = Dict{String,Any}(
        "grad" => grad(inner), "vjp" => x -> vjp(z -> sin.(z), x)[2](ones3)[1],
        "jvp" => x -> jvp(z -> sin.(z), (x,), (ones3,))[2], "hvp" => x -> hvp(inner, x, ones3),
        "jacobian" => x -> vec(sum(jacobian(z -> sin.(z), x), dims=1)),
        "checkpoint" => grad(z -> sum(checkpoint(v -> sin.(v))(z .* z))))
    # Bytes are the same in every run, and grow with what is looked at: sorting a graph allocates for each of its nodes.
    function bytes(f, outer, n)
        descent(x) = (for _ in 1:n; x = x .- 0.01 .* f(x); end; sum(x))
        start = [1.0, 2.0, 3.0]
        outer(descent)(start)
        return @allocated outer(descent)(start)
    end
    for (name, f) in steps, outer in (grad, compile ∘ grad)
        @test (name, bytes(f, outer, 64) < 5 * bytes(f, outer, 16)) == (name, true)
    end
end

@testset "backward! goes through a transform to a leaf that its function captures" begin
    two, pair = 2.0, ones(2)
    cases = Dict{String,Tuple{Any,Float64}}(
        "grad" => (x -> grad(y -> x * y)(two), 3), "grad of a constant" => (x -> grad(y -> x + y)(two), 1),
        "value_and_grad" => (x -> value_and_grad(y -> x * y)(two)[1], 6), "gradient" => (x -> gradient(y -> x * y, two)[1], 3),
        "grad of what it was computed to" => (x -> (z = x * x; grad(y -> z * y)(two)), 9),
        "grad of grad" => (x -> grad(grad(y -> x * y^2))(two), 6),
        "vjp" => (x -> vjp(y -> x * y, two)[1], 6), "pullback" => (x -> vjp(y -> x * y, two)[2](1.0)[1], 3),
        "jvp" => (x -> jvp(y -> x * y, (two,), (1.0,))[1], 6), "tangent" => (x -> jvp(y -> x * y, (two,), (1.0,))[2], 3),
        "jacobian" => (x -> sum(jacobian(y -> x .* y, pair)), 6),
        "jacobian backward" => (x -> sum(jacobian(y -> x .* y, pair; mode=:reverse)), 6),
        "hessian" => (x -> sum(hessian(y -> sum(x .* y .^ 2), pair)), 12),
        "hvp" => (x -> sum(hvp(y -> sum(x .* y .^ 2), pair, pair)), 12), "vmap" => (x -> sum(vmap(y -> x * y)(pair)), 6),
        "checkpoint" => (x -> checkpoint(y -> x * y)(two), 6), "derivative" => (x -> derivative(y -> x * y, two), 3),
        "forward_gradient" => (x -> sum(forward_gradient(y -> sum(x .* y), pair)), 6),
        "scan" => (x -> scan((c, s) -> (c * x + s, c), 1.0, pair)[1], 13))
    for (name, (around, expected)) in cases, compiled in (false, true)
        x = Variable(3.0)
        f = compiled ? compile(one -> around(x) * one) : one -> around(x) * one
        for _ in 1:2
            x.grad = nothing
            y = f(1.0)
            @test (name, compiled, y isa Tensor ? item(y) : y) == (name, compiled, expected)
            backward!(x * y)
            @test (name, compiled, x.grad[]) == (name, compiled, grad(v -> v * around(v))(3.0))
        end
        @test (name, no_grad(() -> around(x)) isa Tensor) == (name, false)
        @test no_grad(() -> f(1.0)) == expected
    end
    x = Variable(3.0)
    rule = custom_rule(y -> x * y; vjp=(g, out, y) -> g)
    @test occursin("is no input of it", message_of(() -> rule(two)))
    @test occursin("is no input of it", message_of(() -> grad(rule)(two)))
    opaque = custom_rule(y -> x * y; vjp=(g, out, y) -> g, opaque=true)
    for f in (opaque, grad(opaque), compile(opaque), compile(rule))
        @test occursin("is no input of it", message_of(() -> f(two)))
    end
    @test occursin("captures a tensor which requires a gradient", message_of(() -> sparse_jacobian(y -> x .* y, pair)))
    @test size(no_grad(() -> sparse_jacobian(y -> x .* y, pair))) == (2, 2)
    # What a pullback has kept is a constant to a later transform.
    _, pull = vjp(v -> v .^ 2, [1.0, 2.0])
    @test !(grad(u -> sum(pull(u)[1]))(pair)[1] isa Tensor)
end

@testset "work grows with the number of leaves, not with its square" begin
    first_of(leaves) = sum(leaves[1] .* 2)
    sampled = vmap(leaves -> leaves[1] .* 2)
    for run in (grad(first_of), leaves -> vjp(first_of, leaves)[2](1.0), leaves -> jvp(first_of, (leaves,), (leaves,)),
            leaves -> jacobian(leaves -> leaves[1], leaves; mode=:reverse), sampled)
        hidden = Hidden(run)
        function bytes(n)
            leaves = [ones(1) for _ in 1:n]
            hidden(leaves)
            return @allocated hidden(leaves)
        end
        @test bytes(2000) < 6 * bytes(500)  # 4 times as many, or 16
    end
end
