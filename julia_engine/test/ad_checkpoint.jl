# Checkpoints and custom rules: eager, compiled, nested, in both modes and to higher order; and their errors.

using TwinGrad.AD: AD

"""The tape of a compiled function."""
tape_of(compiled) = first(values(compiled.tapes))[1]

@testset "a checkpoint changes no derivative" begin
    w, v, x = randn(4, 4) ./ 2, randn(4, 4) ./ 2, randn(4, 3)
    block(w, x) = tanh.(w * tanh.(w * x))
    plain(w, v) = sum(block(v, block(w, x)) .^ 2)
    kept(w, v) = sum(checkpoint(block)(v, checkpoint(block)(w, x)) .^ 2)
    nested(w, v) = sum(checkpoint(w -> checkpoint(block)(v, checkpoint(block)(w, x)))(w) .^ 2)  # captures v
    expected = value_and_grad(plain; argnums=(1, 2))(w, v)
    for f in (kept, nested), run in (identity, compile)
        value_, g = run(value_and_grad(f; argnums=(1, 2)))(w, v)
        @test value_ ≈ expected[1] && g[1] ≈ expected[2][1] && g[2] ≈ expected[2][2]
        @test run((w, t) -> hvp(w -> f(w, v), w, t))(w, v) ≈ hvp(w -> plain(w, v), w, v)
        @test all(run((w, t) -> jvp(w -> f(w, v), (w,), (t,)))(w, v) .≈ jvp(w -> plain(w, v), (w,), (v,)))
    end
    a = Variable(w)
    y = sum(checkpoint(x -> block(a, x))(x) .^ 2)  # only what it captures is differentiated by
    backward!(y)
    @test a.grad ≈ grad(w -> sum(block(w, x) .^ 2))(w)
    @test checkpoint(block)(w, x) ≈ value(block(Constant(w), Constant(x)))
end

@testset "a checkpoint of containers, branches, integers and random draws" begin
    f = checkpoint((p, n, i) -> (y=[p.w .* p.b, sum(p.w) * n], z=p.w[i]))
    p, i = (w=[1.0, 2.0], b=[3.0, 4.0]), [2, 1, 2]
    y = f(p, 3, i)
    @test y.y[1] == [3, 8] && y.y[2] == 9 && y.z == [2, 1, 2]
    for g in (grad(p -> (y = f(p, 3, i); sum(y.y[1]) + y.y[2] + sum(y.z)))(p),
        compile(grad(p -> (y = f(p, 3, i); sum(y.y[1]) + y.y[2] + sum(y.z))))(p))
        @test g.w == [3 + 3 + 1, 4 + 3 + 2] && g.b == [1, 2]
    end
    branch = checkpoint(x -> item(x) > 0 ? x^2 : -x)
    @test grad(branch)(3.0) == 6 && grad(branch)(-3.0) == -1
    calls = Ref(0)
    counted = checkpoint(x -> (calls[] += 1; x^2))
    @test grad(counted)(3.0) == 6 && calls[] == 1  # the ops are repeated, not the function
    generator = Generator(7)
    masked = checkpoint(x -> dropout(x, 0.5, generator) .^ 2)
    for run in (identity, compile)
        y, g = run(x -> (t = masked(x); (t, grad(x -> 0.5 * sum(masked(x)))(x))))(ones(64))
        @test all(v -> v in (0, 4), y) && all(v -> v in (0, 4), g)
        generator = Generator(7)
    end
    y, pull = vjp(masked, ones(64))
    @test pull(ones(64))[1] == 2 .* y  # by the mask of the forward pass
end

@testset "a compiled checkpoint computes again, and needs less memory" begin
    deep(block) = x -> (for _ in 1:16
        x = block(x)
    end; sum(x))
    block(x) = (for _ in 1:8
        x = sin.(x .* 1.1)
    end; x)
    x = randn(1000)
    plain, kept = compile(grad(deep(block))), compile(grad(deep(checkpoint(block))))
    @test plain(x) ≈ kept(x)
    sines(c) = count(step -> step.equation.op === AD.SIN, tape_of(c).steps)
    @test sines(plain) <= 128 && sines(kept) >= 128 + 16 * 7 - 8  # not merged with the forward pass
    @test nbytes(tape_of(kept)) < 0.4 * nbytes(tape_of(plain))
    w = Variable(x)
    @test Base.summarysize(deep(checkpoint(block))(w)) < 0.4 * Base.summarysize(deep(block)(w))  # eagerly, too
    for byte in (0x00, 0xff)
        poison!(tape_of(kept), byte)
        @test kept(x) ≈ plain(x)
    end
end

@testset "custom rules" begin
    twice = custom_rule(x -> exp.(x); vjp=(g, y, x) -> 2 .* g .* y, jvp=(t, y, x) -> 2 .* t[1] .* y, name="twice")
    x = [0.0, 1.0]
    @test twice(x) ≈ exp.(x)
    for run in (identity, compile)
        @test run(grad(x -> sum(twice(x))))(x) ≈ 2 .* exp.(x)
        @test run((x, t) -> jvp(twice, (x,), (t,))[2])(x, [1.0, 0.0]) ≈ [2, 0]
        @test run(x -> hessian(x -> sum(twice(x)), x))(x) ≈ [4 0; 0 4 * exp(1)]  # the rule's own derivative
        @test run(x -> jacobian(grad(x -> sum(twice(x))), x; mode=:reverse))(x) ≈ [4 0; 0 4 * exp(1)]
    end
    scale = custom_rule((x, s) -> x .* s; vjp=(g, y, x, s) -> (g .* s, nothing))  # no gradient by s
    @test gradient((x, s) -> sum(scale(x, s)), x, 3.0) == ([3.0, 3.0], 0.0)
    @test grad(x -> sum(scale(x, 2) .^ 2))(x) == 8 .* x
    w = Variable(x)
    backward!(sum(scale(w, 5)))
    @test w.grad == [5, 5]
    clipped = custom_rule(identity; vjp=(g, y, x) -> clip(g, -1, 1), jvp=(t, y, x) -> t[1])
    @test grad(x -> sum(clipped(x) .* [5.0, 0.5]))(x) == [1, 0.5]
end

@testset "custom rules of opaque functions" begin
    reversed(g) = reverse(cumsum(reverse(g)))
    calls = Ref(0)
    total = custom_rule(x -> (calls[] += 1; cumsum(x)); vjp=(g, y, x) -> reversed(g),
        jvp=(t, y, x) -> cumsum(t[1]), name="cumsum", opaque=true)
    x = randn(5)
    loss(x) = sum(total(x) .^ 2)
    expected = 2 .* reversed(cumsum(x))
    @test grad(loss)(x) ≈ expected && jacobian(total, x) ≈ [Float64(i >= j) for i in 1:5, j in 1:5]
    compiled = compile(value_and_grad(loss))
    @test compiled(x)[2] ≈ expected
    before = calls[]
    @test compiled(2x)[2] ≈ 2 .* expected
    @test calls[] == before + 1  # one call of the tape
    @test compile((x, t) -> jvp(total, (x,), (t,))[2])(x, x) ≈ cumsum(x)
    product = custom_rule((a, b) -> a * b; vjp=(g, y, a, b) -> (g * b', a' * g), opaque=true)
    a, b = randn(2, 3), randn(3, 2)
    f(a, b) = sum(product(a, b) .^ 2)
    ga, gb = gradient((a, b) -> sum((a * b) .^ 2), a, b)
    for run in (identity, compile)
        found = run(grad(f; argnums=(1, 2)))(a, b)
        @test found[1] ≈ ga && found[2] ≈ gb
    end
    buffer = zeros(2)
    reusing = custom_rule(x -> buffer .= 2 .* x; vjp=(g, y, x) -> 2 .* g, opaque=true)
    first_ = reusing([1.0, 2.0])
    reusing([5.0, 5.0])
    @test first_ == [2.0, 4.0]
    halves = compile(grad(x -> sum(custom_rule(x -> x ./ 2; vjp=(g, y, x) -> g ./ 2, opaque=true)(x))))
    @test halves(Float32[1, 2]) == [0.5f0, 0.5f0] && eltype(halves(Float32[1, 2])) === Float32
    # Inputs of several element types.
    mixed = custom_rule((a, b) -> Float32.(a .* b); vjp=(g, y, a, b) -> (Float32.(g .* b), Float64.(g .* a)), opaque=true)
    for run in (identity, compile)
        found = run(grad((a, b) -> sum(mixed(a, b)); argnums=(1, 2)))(Float32[1, 2], [3.0, 4.0])
        @test found == ([3, 4], [1, 2]) && map(eltype, found) == (Float32, Float64)
    end
    picked(g, y, a, i) = (d = zero(a); d[i] .+= g; (d, nothing))
    pick = custom_rule((a, i) -> a[i]; vjp=picked, opaque=true)
    @test compile(grad((a, i) -> sum(pick(a, i) .^ 2)))([3.0, 4.0, 5.0], [2, 1]) == [6, 8, 0]
end

@testset "what an opaque function returns may be given" begin
    calls = Ref(0)
    function root(a)  # which is not to be called on ones
        all(==(1), a) && error("never")
        calls[] += 1
        return sum(sqrt.(a))
    end
    rule = custom_rule(root; vjp=(g, y, a) -> g ./ (2 .* sqrt.(a)), infer=a -> ((), eltype(a)), opaque=true)
    for T in (Float64, Float32)
        compiled = compile(value_and_grad(a -> rule(a) * 2))
        for a in (T[4, 9], T[16, 25])
            value_, found = compiled(a)
            @test value_ ≈ 2 * sum(sqrt.(a)) && found ≈ 1 ./ sqrt.(a) && eltype(found) === T
        end
    end
    @test calls[] == 4  # once in each replay
    wrong = custom_rule(a -> 2 .* a; infer=a -> (size(a) .+ 1, eltype(a)), opaque=true, name="double")
    @test occursin("\"double\" must return size (4,) of Float64, got size (3,)", message_of(() -> compile(wrong)(ones(3))))
    @test wrong(ones(3)) == [2, 2, 2]  # eagerly there is nothing to tell
    none = custom_rule(a -> 2 .* a; infer=a -> 3, opaque=true, name="double")
    @test occursin("infer must return the result's size and element type", message_of(() -> compile(none)(ones(3))))
    @test occursin("infer is for opaque functions", message_of(() -> custom_rule(sin; infer=a -> (size(a), eltype(a)))))
end

@testset "a compiled function calls itself on other sizes only" begin
    compiled = nothing
    inner = custom_rule(x -> length(x) > 1 ? compiled(x[2:end]) : x; opaque=true)
    compiled = compile(x -> sum(inner(x) .* 2) + x[1])
    for _ in 1:2
        @test compiled([1.0, 2.0, 3.0]) == 2 * (2 * (2 * 3 + 3) + 2) + 1
    end
    again, x = Ref(false), [1.0, 2.0]
    same = custom_rule(x -> again[] ? compiled(x .+ 100) : copy(x); opaque=true)
    compiled = compile(x -> same(x) .* 2 .+ x)
    for _ in 1:2
        again[] = false
        @test compiled(x) == 3x
        again[] = true
        @test_throws ReplayError compiled(x)
        @test_throws ReplayError run!(zeros(2), compiled, x)
    end
    again[] = false
    @test compiled(x) == 3x
end

@testset "results are nobody's memory: $name" for (name, run, given) in (
    ("a checkpoint's captured array", (w, x) -> checkpoint(_ -> w)(x), 1), ("a checkpoint's argument", (w, x) -> checkpoint(identity)(x), 2),
    ("a checkpoint's view", (w, x) -> checkpoint(_ -> view(w, 1:2))(x), 1), ("two of a checkpoint", (w, x) -> checkpoint(_ -> (w, w))(x)[2], 1),
    ("a rule's captured array", (w, x) -> custom_rule(_ -> w; vjp=(g, y, x) -> zero(x))(x), 1),
    ("a rule's argument", (w, x) -> custom_rule(identity; vjp=(g, y, x) -> g)(x), 2),
    ("a compiled function's captured array", (w, x) -> compile(_ -> Constant(w); techniques=Techniques(replay=false))(x), 1),
    ("a compiled function's argument", (w, x) -> compile(identity; techniques=Techniques(replay=false))(x), 2))
    w, x = [1.0, 2.0], [3.0, 4.0]
    found = run(w, x)
    @test found == (w, x)[given]
    found .= 0
    @test w == [1, 2] && x == [3, 4]
end

@testset "gradients by custom rules share no memory with what a rule captures" begin
    w, x = [1.0, 2.0], [3.0, 4.0]
    for part in (w, view(w, :), Constant(w), reshape(Constant(reshape(w, 1, 2)), 2)), run in (identity, compile)
        product = custom_rule(x -> dot(w, x); vjp=(g, y, x) -> part, jvp=(t, y, x) -> dot(w, t[1]))
        twice = custom_rule(x -> 2 .* x; jvp=(t, y, x) -> part)
        for f in (grad(product), x -> gradient(product, x)[1], x -> vjp(product, x)[2](1.0)[1], x -> jvp(twice, (x,), (x,))[2])
            found = run(f)(x)
            @test found == [1, 2]
            found .= 0
            @test w == [1, 2]
        end
    end
end

@testset "wrong custom rules are named" begin
    rule(; options...) = custom_rule(x -> 2 .* x; name="double", options...)
    x = [1.0, 2.0]
    by(r) = () -> grad(x -> sum(r(x)))(x)
    pushed(r) = () -> jvp(r, (x,), (x,))
    for (kind, f, text) in (
        (ShapeError, by(rule(vjp=(g, y, x) -> g[1:1])), "\"double\": the gradient of input 1 must have size (2,), got (1,)"),
        (ShapeError, by(rule(vjp=(g, y, x) -> astype(g, Float32))), "\"double\": the gradient of input 1 must be of Float64, got Float32"),
        (ShapeError, by(rule(vjp=(g, y, x) -> (g, g))), "\"double\": its vjp must return one gradient (or nothing) for each of 1 inputs, got 2"),
        (DTypeError, by(rule(vjp=(g, y, x) -> "a")), "\"double\": the gradient of input 1 must be a tensor or an array, got String"),
        (NotDifferentiableError, by(rule(jvp=(t, y, x) -> t[1])), "\"double\": reverse mode was asked for, and it has no vjp"),
        (NotDifferentiableError, pushed(rule(vjp=(g, y, x) -> g)), "\"double\": forward mode was asked for, and it has no jvp"),
        (ShapeError, pushed(rule(jvp=(t, y, x) -> t[1][1:1])), "\"double\": the tangent must have size (2,), got (1,)"),
        (ShapeError, by(rule(vjp=(g, y, x) -> g[1:1], opaque=true)), "\"double\": the gradient of input 1 must have size (2,), got (1,)"),
        (ShapeError, () -> compile(grad(x -> sum(rule(vjp=(g, y, x) -> g[1:1], opaque=true)(x))))(x),
            "\"double\": the gradient of input 1 must have size (2,), got (1,)"),
        (NotDifferentiableError, () -> hessian(x -> sum(rule(vjp=(g, y, x) -> g, jvp=(t, y, x) -> t[1], opaque=true)(x)), x),
            "\"double\": its vjp: an opaque function of arrays has no second derivative"),
        (DTypeError, () -> custom_rule(x -> "a"; name="text")(x), "\"text\" must return a tensor or an array, got String"),
        (DTypeError, () -> custom_rule(x -> nothing; name="text", opaque=true)(x), "\"text\" must return a tensor"),
        (DTypeError, () -> compile(custom_rule(x -> (x, x); name="text", opaque=true))(x), "\"text\" must return a tensor"))
        error = error_of(f)
        @test (text, typeof(error), error isa EngineError && occursin(text, error.message)) == (text, kind, true)
    end
    changing = custom_rule(x -> x[x.>0]; vjp=(g, y, x) -> x, opaque=true, name="positive")
    compiled = compile(x -> changing(x))
    @test occursin("\"positive\" must return size (2,) of Float64, got size (1,)", message_of(() -> compiled([1.0, -1.0])))
end

@testset "results of several element types" begin
    f(x) = (sum(x .^ 2), Float32.(x) .^ 3, AD.Constant([1, 2]))
    total(g) = x -> ((a, b, i) = g(x); a * 2 + sum(Float64.(b) .* 3) + sum(x[i]))
    for x in ([0.5, -1.5, 2.0], [1.0, 2, 3])
        expected = 4x .+ 9x .^ 2 .+ [1, 1, 0]
        for g in (total(checkpoint(f)), total(checkpoint(checkpoint(f))))
            @test grad(g)(x) ≈ expected rtol = 1e-6
            @test compile(grad(g))(x) ≈ expected rtol = 1e-6
            @test jvp(g, (x,), (ones(3),))[2] ≈ sum(expected) rtol = 1e-6
            @test grad(y -> sum(grad(g)(y) .* y))(x) ≈ grad(y -> sum(grad(total(f))(y) .* y))(x) rtol = 1e-6
        end
        a, b, i = checkpoint(f)(x)
        @test a isa Float64 && b isa Vector{Float32} && i == [1, 2]
    end
end
