# Loops as one node: against the same loop written out, in both modes, to higher order, truncated, checkpointed, and long.

using TwinGrad.AD: AD

"""The tape of a compiled function."""
loop_tape(compiled) = first(values(compiled.tapes))[1]

allocated_by_loop(tape) = compiling(() -> (run!(tape); @allocated run!(tape)))

const STEPS = 7
recurrent(w) = (h, x) -> (new = tanh.(w * h .+ x); (new, new .^ 2))
objective(h, ys) = sum(h) + sum(ys .* (1:STEPS)')
looped(w, h, x; options...) = objective(scan(recurrent(w), h, x; options...)...)

"""The loop written out; `cut`: the gradient stops there, counted from the end."""
function written_out(w, h, x; cut=STEPS)
    ys = Tensor[]
    for t in 1:STEPS
        t > 1 && (STEPS - t + 1) % cut == 0 && (h = stop_gradient(h))
        h, y = recurrent(w)(h, x[:, t])
        push!(ys, y)
    end
    return objective(h, stack(ys))
end

same_gradients(a, b) = a[1] ≈ b[1] && all(p ≈ q for (p, q) in zip(a[2], b[2]))

@testset "a loop, its gradient and its tangent" begin
    w, h, x = randn(3, 3) ./ 2, randn(3), randn(3, STEPS)
    expected = value_and_grad(written_out; argnums=(1, 2, 3))(w, h, x)
    for checkpoint_ in (false, true, 1, 2, 3, 7, 10), run in (identity, compile)
        f = run(value_and_grad((w, h, x) -> looped(w, h, x; checkpoint=checkpoint_); argnums=(1, 2, 3)))
        @test same_gradients(f(w, h, x), expected)
    end
    for run in (identity, compile)
        @test all(run((a, b) -> jvp((w, x) -> looped(w, h, x), (a, b), (b * b', a * b)))(w, x) .≈
            jvp((w, x) -> written_out(w, h, x), (w, x), (x * x', w * x)))
        @test run(w -> hessian(w -> looped(w, h, x; checkpoint=3), w))(w) ≈ hessian(w -> written_out(w, h, x), w)
    end
    third(f) = grad(w -> sum(grad(w -> sum(grad(w -> f(w, h, x))(w) .^ 2))(w) .^ 2))(w)
    @test third(looped) ≈ third(written_out)
    a = Variable(w)
    backward!(objective(scan((h, x) -> recurrent(a)(h, x), h, x)...))  # what the body captures
    @test a.grad ≈ expected[2][1]
    f = compile(value_and_grad(looped; argnums=(1, 2, 3)))
    kept = f(w, h, x)
    for byte in (0x00, 0xff)
        poison!(loop_tape(f), byte)
        @test f(w, h, x) == kept
    end
end

@testset "loops and checkpoints with any technique off" begin
    w, h, x = randn(3, 3) ./ 2, randn(3), randn(3, STEPS)
    block = checkpoint(w -> tanh.(w * tanh.(w * w)))
    f = value_and_grad((w, h, x) -> looped(block(w), h, x; checkpoint=3); argnums=(1, 2, 3))
    expected = f(w, h, x)
    for name in (:preallocate, :reuse_memory, :in_place, :views, :place_parts, :simplify, :join, :fuse, :concrete, :replay)
        @test (name, same_gradients(compile(f; techniques=Techniques(; (name => false,)...))(w, h, x), expected)) == (name, true)
    end
    none = scan((h, x) -> (h .* x, h), h, zeros(3, 0))
    @test none == (h, zeros(3, 0))
    @test grad(w -> sum(scan((h, x) -> (w * h .+ x, h), h, zeros(3, 0))[1]))(w) == zeros(3, 3)
end

@testset "truncated back-propagation through time" begin
    w, h, x = randn(3, 3) ./ 2, randn(3), randn(3, STEPS)
    for cut in (1, 2, 3, STEPS, 20), checkpoint_ in (false, true), run in (identity, compile)
        expected = value_and_grad((w, h, x) -> written_out(w, h, x; cut=cut); argnums=(1, 2, 3))(w, h, x)
        f = run(value_and_grad((w, h, x) -> looped(w, h, x; truncate=cut, checkpoint=checkpoint_); argnums=(1, 2, 3)))
        @test same_gradients(f(w, h, x), expected)
    end
end

@testset "containers, lengths, integers, nested loops, Float32" begin
    @test scan((c, x) -> (c .+ 1, nothing), 0.0, nothing; length=5) == (5.0, nothing)
    @test scan((c, x) -> (c, nothing), [1.0], nothing; length=0) == ([1.0], nothing)
    c, ys = scan((c, x) -> ((a=c.a + x.u, b=[c.b[1] .* x.v]), Dict("a" => c.a)), (a=0.0, b=[[1.0, 1.0]]),
        (u=[1.0, 2.0], v=[1.0 2.0; 3.0 4.0]))
    @test c == (a=3.0, b=[[2.0, 12.0]]) && ys == Dict("a" => [0.0, 1.0])
    table = [1.0 2.0 3.0]
    looked_up(t) = scan((c, i) -> (c .+ 2 .* vec(t[:, i]), nothing), [0.0], reshape([3, 1, 3], 1, 3))[1]
    @test looked_up(Constant(table)) == [14.0]
    @test grad(t -> sum(scan((c, i) -> (c .+ sum(gather(t, i; dims=2)), nothing), [0.0], [3, 1, 3])[1]))(table) == [1 0 2]
    nested(w) = scan((c, x) -> (scan((d, y) -> (d * w + y, nothing), c, x)[1], nothing), 0.0, [1.0 3.0; 2.0 4.0])[1]
    @test nested(2.0) == ((1 * 2 + 2) * 2 + 3) * 2 + 4
    @test grad(nested)(2.0) ≈ 3 * 4 + 2 * 4 + 3 && compile(grad(nested))(2.0) ≈ 23
    h, ys = scan((h, x) -> (tanh.(h .+ x), h), Float32[0, 0], Float32[1 2 3; 4 5 6])
    @test eltype(h) === eltype(ys) === Float32 && size(ys) == (2, 3)
    inner(x) = scan((c, x) -> (c + grad(t -> t^3)(x), jvp(sin, (x,), (1.0,))[2]), 0.0, x)
    @test inner([1.0, 2.0])[1] == 15 && inner([1.0, 2.0])[2] ≈ cos.([1.0, 2.0])
    @test checkpoint(w -> looped(w, zeros(3), ones(3, STEPS)))(ones(3, 3)) ≈ looped(ones(3, 3), zeros(3), ones(3, STEPS))
end

@testset "the graph is of one size, and checkpoints need memory like the square root of the steps" begin
    function trained(n; options...)
        loss(w, x) = scan((c, x) -> (h = tanh.(w * c[1] .+ x); ((h, c[2] + sum(h .^ 2)), nothing)),
            (zeros(8), 0.0), x; options...)[1][2]
        f = compile(value_and_grad(loss))
        f(0.1 .* ones(8, 8), ones(8, n))
        return loop_tape(f)
    end
    lengths = (400, 1600, 6400)
    whole, kept = [trained(n) for n in lengths], [trained(n; checkpoint=true) for n in lengths]
    @test length(unique(length(t.steps) for t in whole)) == 1
    @test length(unique(length(t.steps) for t in kept)) == 1
    growth(tapes) = [(nbytes(tapes[k+1]) - nbytes(tapes[k])) for k in 1:2]
    @test 3.9 < growth(whole)[2] / growth(whole)[1] < 4.1  # four times the steps: four times the memory
    @test 1.8 < growth(kept)[2] / growth(kept)[1] < 2.2  # four times the steps: twice the memory
    @test nbytes(kept[3]) < nbytes(whole[3]) / 15
    bytes = [allocated_by_loop(t) for t in whole]
    @test bytes[1] == bytes[3] < 2000  # nothing per step
end

@testset "a sequence of 100,000 steps trains in bounded memory" begin
    n, target = 100_000, 0.9
    x = randn(AD.MersenneTwister(5), n)
    wanted = scan((h, x) -> (target * h + 0.1 * x, nothing), 0.0, x)[1]
    loss(w, x) = (scan((h, x) -> (w * h + 0.1 * x, nothing), 0.0, x; checkpoint=true)[1] - wanted)^2
    step = compile(value_and_grad(loss))
    w, first_loss = 0.85, step(0.85, x)[1]
    for _ in 1:60
        value_, g = step(w, x)
        w -= clamp(0.5 * g, -0.01, 0.01)
    end
    @test step(w, x)[1] < first_loss / 1000
    @test nbytes(loop_tape(step)) < 200_000  # what it reads is 800,000
end

@testset "what a loop cannot do is said" begin
    x = ones(2, 3)
    leaked = Ref{Any}()
    compile(x -> (leaked[] = x .* 2; x))(ones(2))
    for (kind, f, text) in (
        (ShapeError, () -> scan((c, x) -> (vcat(c, x), x), ones(2), x), "the carry must keep its size and element type: expected size (2,), got (4,)"),
        (ShapeError, () -> scan((c, x) -> ((a=c.a, b=c.a), x), (a=ones(2),), x), "scan: the carry: expected a named tuple of :a, got a named tuple of :a, :b"),
        (DTypeError, () -> scan((c, x) -> (Float32.(c), x), ones(2), x), "the carry must keep its size and element type: expected Float64, got Float32"),
        (ShapeError, () -> scan((c, x) -> c, ones(2), x), "must return (carry, y)"),
        (ShapeError, () -> scan((c, x) -> (c, x.a), ones(2), (a=x, b=ones(4))), "expected 3 steps along the last axis of xs.b, got size (4,)"),
        (ShapeError, () -> scan((c, x) -> (c, x), ones(2), x; length=4), "expected 4 steps"),
        (ShapeError, () -> scan((c, x) -> (c, x), ones(2), 1.0), "is a number"),
        (ShapeError, () -> scan((c, x) -> (c, x), ones(2), nothing), "give length"),
        (NotDifferentiableError, () -> scan((c, x) -> (c, x), [1, 2], x), "the carry is of Int64"),
        (NotDifferentiableError, () -> scan((c, x) -> (c, "a"), ones(2), x), "got String"),
        (DTypeError, () -> scan((c, x) -> (c, Float32.(x)), ones(2), x), "Float64 and Float32"),
        (TraceError, () -> scan((c, x) -> (item(sum(x)) > 0 ? c : x, x), ones(2), x), "being traced"),
        (TraceError, () -> scan((c, x) -> (dropout(c, 0.5, Generator(1)), x), ones(2), x), "random masks cannot be drawn"),
        (TraceError, () -> scan((c, x) -> (c .+ leaked[], x), ones(2), x), "kept from an earlier trace"),
        (ConfigurationError, () -> scan((c, x) -> (c, x), ones(2), x; checkpoint=0), "checkpoint must be true, false or"),
        (ConfigurationError, () -> scan((c, x) -> (c, x), ones(2), x; truncate=true), "truncate must be a number of steps"),
        (ConfigurationError, () -> scan((c, x) -> (c, x), ones(2), nothing; length=-1), "length must be a number of steps"),
        (ConfigurationError, () -> scan((c, x) -> (c, x), ones(2), nothing; length=true), "length must be a number of steps"))
        error = error_of(f)
        @test (text, typeof(error), error isa EngineError && occursin(text, error.message)) == (text, kind, true)
    end
    @test scan((c, x) -> (c .+ 1, x), ones(2), x)[1] == [4, 4]  # nothing was left in disorder
end

@testset "an array that the function of a loop or a checkpoint captures is not written over before the gradient" begin
    nested(f) = checkpoint(w -> checkpoint(f)(w) .* 2)
    for wrapped in (f -> w -> scan((c, x) -> (c .* f(w) .+ x, nothing), [1.0], ones(5))[1], checkpoint, nested,
            f -> w -> scan((c, x) -> (c .* f(w) .+ x, nothing), [1.0], ones(5); checkpoint=2)[1])
        array, w = [2.0], Variable([3.0])
        y = sum(wrapped(w -> sin.(w .* array))(w))
        array[1] = 9
        error = error_of(() -> backward!(y))
        @test error isa InPlaceError && occursin("an array that its function captures (size (1,)) was changed", error.message)
        array[1] = 2
        backward!(y)
        @test w.grad ≈ grad(w -> sum(wrapped(w -> sin.(w .* array))(w)))([3.0])
    end
end

@testset "what is computed without recording is a constant inside a loop and a checkpoint, too" begin
    step(c) = no_grad(() -> c * c) + c
    looped_(; options...) = w -> scan((c, _) -> (step(c), nothing), w, nothing; length=3, options...)[1]
    for f in (step, checkpoint(step), checkpoint(checkpoint(step)), looped_(), looped_(checkpoint=2), looped_(truncate=3),
            checkpoint(looped_()), w -> no_grad(() -> checkpoint(looped_())(w)) + w), run in (identity, compile)
        @test run(grad(f))(3.0) == 1 && run(w -> jvp(f, (w,), (1.0,))[2])(3.0) == 1
    end
end

@testset "a loop that carries nothing" begin
    for none in ((), nothing), options in ((), (:checkpoint => true,), (:truncate => 2,))
        f(a) = sum(scan((c, x) -> (c, a * x), none, [0.1, 0.2, 0.3]; options...)[2])
        @test f(2.0) ≈ 1.2 && grad(f)(2.0) ≈ 0.6 && compile(grad(f))(2.0) ≈ 0.6
    end
end

@testset "messages name scan and the operand: $(typeof(bad))" for bad in ("text", true, 'c', :symbol, ["a", "b"], [true, false], 1im, [1im])
    given = ((() -> scan((c, x) -> (c, x), bad, [1.0, 2.0]), "the carry"),
        (() -> scan((c, x) -> (c, x), (1.0, (a=bad,)), [1.0, 2.0]), "the carry[2].a"),
        (() -> scan((c, x) -> (c, c), 1.0, (a=[1.0, 2.0], b=bad)), "xs.b"))
    returned = ((() -> scan((c, x) -> (bad, c), 1.0, [1.0, 2.0]), "the carry"), (() -> scan((c, x) -> (c, bad), 1.0, [1.0, 2.0]), ""))
    # Truth values that the function returns count as numbers, as they do beside a tensor.
    for (run, place) in (bad isa Union{Bool,Vector{Bool}} ? given : (given..., returned...))
        message = message_of(run)
        @test occursin("scan", message) && occursin(place, message)
    end
end
