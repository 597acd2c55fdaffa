# Tapes: replay, memory, techniques, fusion, errors, and long graphs.

using TwinGrad.AD: AD, Tape, symbol, traced, tracing, literal

"""A recurrent network's training step as a tape: loss, and gradients into one flat vector."""
function rnn_tape(T; steps=4, features=6, units=5, classes=3, batch=7, techniques=Techniques(), seed=41)
    random = AD.MersenneTwister(seed)
    shapes = [(units, features), (units, units), (units,), (classes, units), (classes,)]
    parameters = [Variable(randn(random, T, s...) ./ 2; name="p$i") for (i, s) in enumerate(shapes)]
    flat = zeros(T, sum(prod, shapes))
    ends = cumsum([prod(s) for s in shapes])
    parts = [reshape(view(flat, e-prod(s)+1:e), s) for (e, s) in zip(ends, shapes)]
    inputs = [symbol(T, [steps * features, batch], "x"), symbol(Int64, [batch], "y")]
    outputs, nodes = tracing() do
        loss = rnn_loss(inputs[1], inputs[2], parameters, steps, features)
        Any[loss, gradients([loss], [literal(T, 1)], parameters)...]
    end
    tape = Tape(traced(nodes, inputs, AD.Tensor[outputs...]); results=Dict{Int,Any}(i + 1 => p for (i, p) in enumerate(parts)), techniques=techniques)
    copyto!(tape.inputs[1], randn(random, T, steps * features, batch))
    copyto!(tape.inputs[2], rand(random, 1:classes, batch))
    return tape, flat, parameters
end

function rnn_loss(x, y, (w, r, b, v, c), steps, features)
    projected = w * reshape(x, features, steps, size(x, 2)) .+ b
    h = tanh.(projected[:, 1, :])
    for t in 2:steps
        h = tanh.(projected[:, t, :] .+ r * h)
    end
    return softmax_cross_entropy(v * h .+ c, y)
end

allocated_by(tape) = compiling(() -> @allocated run!(tape))

@testset "a training step, $T" for T in (Float32, Float64)
    tape, flat, parameters = rnn_tape(T)
    run!(tape)
    loss, gradient = tape.outputs[1][], copy(flat)
    eager = rnn_loss(Constant(tape.inputs[1]), Constant(tape.inputs[2]), parameters, 4, 6)
    backward!(eager)
    @test item(eager) ≈ loss
    @test vcat((vec(p.grad) for p in parameters)...) ≈ gradient
    run!(tape)
    @test allocated_by(tape) == 0
    @test tape.outputs[1][] === loss && flat == gradient
    for byte in (0x00, 0xff)
        poison!(tape, byte)
        flat .= NaN
        run!(tape)
        @test tape.outputs[1][] === loss && flat == gradient
    end
    assign!(parameters[1], value(parameters[1]) .* 2)  # captured parameters are read by reference
    run!(tape)
    @test tape.outputs[1][] != loss
    @test occursin("matmul_add", source(tape)) && occursin("tanh_gradient", source(tape))
    @test length(split(source(tape), "\n")) == length(tape.steps)
end

@testset "every technique gives the same results" begin
    tape, flat, _ = rnn_tape(Float64)
    run!(tape)
    for name in (:preallocate, :reuse_memory, :in_place, :views, :place_parts, :simplify, :fuse, :concrete)
        other, other_flat, _ = rnn_tape(Float64; techniques=Techniques(; (name => false,)...))
        run!(other)
        @test (name, other.outputs[1][] ≈ tape.outputs[1][], other_flat ≈ flat) == (name, true, true)
        name in (:reuse_memory, :in_place) && @test nbytes(other) >= nbytes(tape)
        name === :fuse && @test !occursin("matmul_add", source(other))
    end
    f(x) = sum(x .^ 2)
    @test compile(f; techniques=Techniques(replay=false))([1.0, 2.0]) == 5
end

@testset "fused ops equal the ops that they stand for" begin
    x, y, w = randn(4, 3), randn(4, 3), randn(4, 4)
    one, two = Techniques(), Techniques(fuse=false)
    for (f, name) in ((x -> tanh.(x .+ y), "add_tanh"), (x -> sigmoid.(x .+ y[:, 1]), "add_sigmoid"),
        (x -> relu.(x .+ y), "add_relu"), (x -> grad(t -> sum(tanh.(t) .* y))(x), "tanh_gradient"),
        (x -> grad(t -> sum(sigmoid.(t) .* y))(x), "sigmoid_gradient"),
        (x -> grad(t -> sum(relu.(t) .* y))(x), "relu_gradient"), (x -> y .+ Constant(w) * x, "matmul_add"))
        fused, plain = compile(f; techniques=one), compile(f; techniques=two)
        @test fused(x) ≈ plain(x)
        @test occursin(name, source(fused)) && !occursin(name, source(plain))
        @test !isempty(AD.TABLE[name].fuses)
    end
end

@testset "nothing is computed in place over a view in another order, reshaped or not" begin
    x, w, v, u = [1.0 2 3; 4 5 6], reshape(collect(1.0:6), 3, 2, 1), [1.0, 2, 3, 4, 5], collect(5.0:-1:1)'
    first_ops = (cos, tanh)
    for g in first_ops
        programs = (
            (x, (x -> sum(sin.(reshape(transpose(g.(x)), 3, 2, 1)) .* w))),
            (x, (x -> sum(sin.(reshape(reshape(transpose(g.(x)), 3, 2, 1), 3, 1, 2)) .* reshape(w, 3, 1, 2)))),
            (x, (x -> sum(sin.(permutedims(reshape(g.(x), 2, 3, 1), (3, 2, 1))) .* reshape(w, 1, 3, 2)))),
            (x, (x -> sum(exp.(reshape(reverse(g.(x); dims=1), 1, 2, 3)) .* reshape(w, 1, 2, 3)))),
            (v, (v -> sum(sin.(transpose(reverse(g.(v)))) .* u))),
            (v, (v -> sum(softmax(reshape(reverse(g.(v)), 5, 1)) .* transpose(u)))),
        )
        for (a, f) in programs
            @test compile(f)(a) ≈ f(a)
            @test compile(grad(f))(a) ≈ grad(f)(a)
        end
    end
end

function random_program(random, xs)
    pool = Any[xs[1], xs[2]', xs[3]]
    for _ in 1:rand(random, 3:14)
        a, b = rand(random, pool), rand(random, pool)
        pick = rand(random, 1:13)
        push!(pool,
            pick == 1 ? a .+ b : pick == 2 ? a .* b : pick == 3 ? tanh.(a) : pick == 4 ? sigmoid.(a .+ b) :
            pick == 5 ? (a * b') * a ./ 9 : pick == 6 ? vcat(a[1:1, :], b[2:3, :]) : pick == 7 ? relu.(a) :
            pick == 8 ? reshape(reshape(a', 12), 3, 4) : pick == 9 ? softmax(a) .- b :
            pick == 10 ? a .- mean(a; dims=2) : pick == 11 ? hcat(a[:, 3:4], tanh.(b[:, 1:2])) :
            pick == 12 ? reshape(sin.(reshape(transpose(tanh.(a)), 4, 1, 3)), 4, 3)' :
            cos.(reshape(reverse(sigmoid.(b); dims=1), 1, 3, 4))[1, :, :])
    end
    return sum(sum(p .* 0.1) for p in pool) + sum(pool[end] .^ 2)
end

@testset "random programs: tape against eager, poisoned" begin
    seed = seeded(43)
    @info "random programs" seed
    random = AD.MersenneTwister(seed)
    for trial in 1:draws(60)
        recipe = rand(random, 1:10^6)
        f(xs...) = random_program(AD.MersenneTwister(recipe), xs)
        args = (randn(random, 3, 4), randn(random, 4, 3), randn(random, 3, 4))
        compiled = compile(value_and_grad(f; argnums=(1, 2, 3)))
        v, g = compiled(args...)
        ev, eg = value_and_grad(f; argnums=(1, 2, 3))(args...)
        @test v ≈ ev && all(a ≈ b for (a, b) in zip(g, eg))
        tape = first(values(compiled.tapes))[1]
        for byte in (0x00, 0xff)
            poison!(tape, byte)
            @test isequal(compiled(args...), (v, g))
        end
    end
end

@testset "compiled functions" begin
    f = compile((x, y) -> (sum(x .* y), (a=x .+ 1, b=[y, x])))
    r = f([1.0, 2.0], [3.0, 4.0])
    @test r[1] == 11 && r[2].a == [2, 3] && r[2].b == [[3, 4], [1, 2]]
    kept = r[2].a
    f([0.0, 0.0], [0.0, 0.0])
    @test kept == [2, 3]  # results are copies
    @test f([1.0f0], 2.0)[1] === 2.0f0
    @test length(f.tapes) == 2
    @test compile(x -> (x, x))([1.0]) == ([1.0], [1.0])
    @test compile(x -> x')([1.0, 2.0]) == [1.0 2.0]
    @test compile(x -> 3.0)([1.0]) == 3
    @test grad(compile(x -> sum(x .^ 2)))([1.0, 2.0]) == [2, 4]  # differentiable inside transforms
    g = compile(x -> exp.(-x .* x) .+ 2 .^ x .- clamp.(x, 0, 1))
    @test g([0.5]) ≈ [exp(-0.25) + sqrt(2) - 0.5]
end

@testset "errors name expected and actual" begin
    tape, = rnn_tape(Float64)
    own = ones(3)
    w = Constant(view(own, 1:2); name="w")
    squared(result) = Tape(AD.trace(x -> [x .* x .* w], [symbol(Float64, [2])]); results=Dict(1 => result))
    for (kind, f, text) in (
        (ReplayError, () -> tape([1.0]), "expected 2 arrays, got 1"),
        (ReplayError, () -> squared(view(zeros(4), 1:2:3)), "expected size (2,) of Float64, got (2,) of Float64 with gaps"),
        (ReplayError, () -> squared(zeros(Float32, 2)), "expected size (2,) of Float64, got (2,) of Float32"),
        (ReplayError, () -> squared(view(own, 2:3)), "is also that of w"),
        (ReplayError, () -> tape(zeros(2, 2), ones(Int, 7)), "planned for size (24, 7) Float64, got (2, 2)"),
        (ShapeError, () -> Variable([1.0]) + Variable([1.0, 2.0]), "sizes (1,) and (2,)"),
        (ShapeError, () -> Variable(ones(2)) .+ Variable(ones(3)), "sizes (2,) and (3,) cannot be broadcast"),
        (ShapeError, () -> Variable(ones(2, 3)) * ones(2, 3), "3 columns, 2 rows"),
        (ShapeError, () -> scope(() -> Variable(ones(2, 3)) * ones(2, 3), "dense"), "in layer \"dense\""),
        (DTypeError, () -> Variable(ones(2)) .+ ones(Float32, 2), "Float64 and Float32 cannot be mixed"),
        (DTypeError, () -> Variable([1, 2]), "Int64"),
        (DTypeError, () -> Constant(["a"]), "String"),
        (ShapeError, () -> reshape(Variable(ones(2, 3)), 4, :), "cannot be reshaped"),
        (ShapeError, () -> Variable(ones(3))[4], "out of range"),
        (ShapeError, () -> Variable(ones(3))[[1, 4]], "index 4 at position 2 is out of range"),
        (ShapeError, () -> sum(Variable(ones(3)); dims=2), "axes 2 do not fit"),
        (ShapeError, () -> maximum(Variable(ones(0))), "empty axis"),
        (LabelError, () -> softmax_cross_entropy(ones(3, 2), [1, 4]), "label 4 of sample 2"),
        (ShapeError, () -> softmax_cross_entropy(ones(3, 2), [1]), "labels of size (2,)"),
        (ShapeError, () -> backward!(Variable(ones(2)) .* 1), "a seed of size (2,)"),
        (ShapeError, () -> grad(x -> x)(ones(2)), "must return a number"),
        (NotDifferentiableError, () -> grad(x -> x)([1, 2]), "Int64"),
        (NotDifferentiableError, () -> backward!(Constant(ones(2)) .* 1), "does not depend"),
        (NotDifferentiableError, () -> cosc.(Variable(ones(2))), "cosc"),
        (TraceError, () -> compile(x -> item(sum(x)) > 0 ? x : -x)(ones(2)), "being traced"),
        (TraceError, () -> compile(x -> compile(y -> y)(x) + item(x))(1.0), "being traced"),
        (TraceError, () -> compile(x -> x .* Int(x[1]))(ones(2)), "being traced"),
        (TraceError, () -> Variable(ones(2))[1] = 3, "written in place"),
        (TraceError, () -> (y = exp.(Variable(ones(2))); y .= 3), "written in place"),
        (TraceError, () -> (y = exp.(Variable(ones(2))); y .+= ones(2)), "written in place"),
        (TraceError, () -> (y = exp.(Variable(ones(2))); y .= y), "written in place"),
        (TraceError, () -> fill!(Variable(ones(2)), 3), "written in place"),
        (TraceError, () -> copyto!(Variable(ones(2)), ones(2)), "written in place"),
        (TraceError, () -> ones(2) .= Variable(ones(2)), "cannot be written into an array"),
        (TraceError, () -> (y = ones(2); y .+= Variable(ones(2)) .^ 2), "cannot be written into an array"),
        (TraceError, () -> (y = ones(3); y[2:3] .= Variable(ones(2))), "cannot be written into an array"),
        (TraceError, () -> broadcast!(sin, ones(2), Variable(ones(2))), "cannot be written into an array"),
        (TraceError, () -> map!(sin, ones(2), Variable(ones(2))), "cannot be written into an array"),
        (TraceError, () -> copy!(ones(2), Variable(ones(2))), "cannot be written into an array"),
        (TraceError, () -> copyto!(ones(2), Variable(ones(2))), "cannot hold a tensor"),
        (ConfigurationError, () -> dropout(Variable(ones(2)), 1.5, Generator(0)), "at least 0 and below 1"))
        error = error_of(f)
        @test (text, error isa kind, error isa EngineError && occursin(text, error.message)) == (text, true, true)
    end
    leaked = Ref{Any}()
    compile(x -> (leaked[] = x .* 2; x))(ones(2))
    @test_throws TraceError compile(x -> x .+ leaked[])(ones(2))
end

@testset "an array whose indices do not begin with 1 is refused, since in a tensor they would mean other elements" begin
    square(o) = o[2]^2
    for T in (Float64, Float32)
        o = view(T[1, 2, 3], Base.IdentityUnitRange(2:3))
        @test o[2] == 2 && Base.has_offset_axes(o)
        compiled = compile(grad(square))
        compiled(T[1, 2])  # of the same size and element type
        for f in (() -> Variable(o), () -> Constant(o), () -> grad(square)(o), () -> gradient(square, o), () -> compiled(o),
                () -> compile(square)(o), () -> vjp(square, o), () -> jvp(square, (o,), (T[1, 1],)), () -> hvp(square, o, T[1, 1]),
                () -> jvp(square, (T[1, 1],), (o,)), () -> jacobian(square, o), () -> hessian(square, o), () -> vmap(x -> 2x)(o),
                () -> sparse_jacobian(x -> x .^ 2, o), () -> scan((c, x) -> (c .+ x, x), T(0), o), () -> checkpoint(square)(Variable(o)),
                () -> Variable(T[1, 2]) .* o, () -> compile(x -> x .* o)(T[1, 2]), () -> vcat(Variable(T[1, 2]), o))
            @test error_of(f) isa ShapeError && occursin("indices of tensors begin with 1", error_of(f).message)
        end
    end
    for o in (view([1, 2, 3], Base.IdentityUnitRange(2:3)), view([true, true, false], Base.IdentityUnitRange(2:3)))
        @test error_of(() -> Constant(o)) isa ShapeError
        @test error_of(() -> Variable(ones(2)) .* o) isa ShapeError
        @test error_of(() -> Variable(ones(2))[o]) isa ShapeError
    end
    @test grad(x -> x[1]^2)(view(view([1.0, 2.0, 3.0], Base.IdentityUnitRange(2:3)), 2:3)) == [4, 0]
end

@testset "a label out of range during replay is an error, not a stray read" begin
    tape, = rnn_tape(Float64)
    tape.inputs[2][3] = 9
    @test_throws LabelError run!(tape)
    tape.inputs[2][3] = 1
    run!(tape)
    @test isfinite(tape.outputs[1][])
end

@testset "diagnose names the first op that is not finite" begin
    f = compile(x -> scope(() -> sum(log.(x .- 1) .* 2), "loss"))
    f([2.0, 3.0])
    tape = first(values(f.tapes))[1]
    @test diagnose(tape) === nothing
    f([1.0, 3.0])
    message = diagnose(tape).message
    @test occursin("\"log\"", message) && occursin("\"loss\"", message)
    f([NaN, 3.0])
    @test occursin("input 1", diagnose(tape).message)
end

@testset "dropout draws anew at every replay, by its generator" begin
    run(seed) = (f = compile(x -> dropout(x, 0.3, Generator(seed))); (f(ones(1000)), f(ones(1000))))
    a, b = run(1)
    @test a != b && run(1) == (a, b) && run(2) != (a, b)
    @test all(v -> v == 0 || v ≈ 1 / 0.7, a) && 600 < count(!=(0), a) < 800
    @test grad(x -> sum(dropout(x, 0.5, Generator(3))))(ones(50)) == value(dropout(Constant(ones(50)), 0.5, Generator(3)))
end

@testset "nothing recurses over a graph" begin
    chain(x) = (for _ in 1:10_000
        x = sin.(x)
    end; sum(x))
    x = [0.5, 1.0]
    f = compile(value_and_grad(chain))
    v, g = f(x)
    @test v ≈ sum(foldl((a, _) -> sin.(a), 1:10_000; init=x)) && all(isfinite, g)
    @test first(values(f.tapes))[1].plan.size < 10^6
    tape, flat, _ = rnn_tape(Float32; steps=784, features=1, units=8, batch=2)
    run!(tape)
    @test isfinite(tape.outputs[1][]) && all(isfinite, flat)
    @test allocated_by(tape) == 0
end
