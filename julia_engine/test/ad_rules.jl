# A missing rule is an error in every mode; what is constant says so in its record.

using TwinGrad.AD: AD, apply, no_gradient
using LinearAlgebra: norm
using Random: MersenneTwister

"""An op that cubes, and is not in the table; with the rules that are given."""
cube(; rules...) = AD.Op("cube", AD.infer_elementwise; elementwise=true, rules...,
    forward=(p, out, inputs, attrs) -> AD.emit_elementwise!(p, :whole_power, out, inputs[1:1], (3, 0, 0, 0)))
const WITHOUT = cube()
const BACKWARD = Any[(g, y, inputs, attrs) -> g .* 3 .* inputs[1] .^ 2]
forward_rule(t, y, inputs, attrs) = t[1] .* 3 .* inputs[1] .^ 2

in_layer(v) = AD.scope(() -> WITHOUT(v), "encoder")
through(v) = sum(in_layer(v) .* v)
inner_step(c, x) = (c .+ in_layer(x), c)
along(f) = x -> jvp(f, (x,), (ones(eltype(x), size(x)),))[2]

@testset "every op and every input of it has its rules, or says that it is constant" begin
    named = sort!(collect(AD.TABLE); by=first)
    pieces = ["barrier" => AD.BARRIER, "checkpoint" => AD.CHECKPOINT, "custom" => AD.CUSTOM, "opaque" => AD.OPAQUE,
        "scan" => AD.SCAN, "cond" => AD.COND]
    for (name, op) in [named; pieces]
        has_rules = op.backward! !== nothing && op.jvp !== nothing
        lacks_all = op.backward! === nothing && op.jvp === nothing
        fused = !isempty(op.fuses)
        @test (name, op.constant || fused ? lacks_all : has_rules) == (name, true)
        @test (name, op.constant && fused) == (name, false)
        op.backward! isa Vector{Any} && @test (name, count(isnothing, op.backward!)) == (name, 0)
    end
    constant_inputs = Dict(name => findall(r -> r === no_gradient, op.backward!) for (name, op) in named
                           if op.backward! isa Vector{Any} && any(r -> r === no_gradient, op.backward!))
    @test constant_inputs == Dict("where" => [1], "gather" => [2], "scatter" => [2], "embedding" => [2],
        "embedding_gradient" => [2], "max_pool_gradient" => [2], "max_pool_gather" => [2], "softmax_cross_entropy" => [2, 3],
        "standardize" => [2])
end

@testset "constant ops have zero derivatives, in both modes" begin
    names = [name for (name, op) in AD.TABLE if op.constant && op.elementwise]
    @test length(names) >= 9
    for name in names
        op = AD.TABLE[name]
        f(x) = sum(op((x, x .+ 1)[1:length(op.overwrites)]...) .* x)
        x = [0.5, -1.5]
        value_ = value(op((Constant(x), Constant(x .+ 1))[1:length(op.overwrites)]...))
        @test (name, grad(f)(x)) == (name, value_)
        @test (name, jvp(f, (x,), ([1.0, 0.0],))[2]) == (name, value_[1])
    end
end

@testset "an op without a rule raises: $mode" for (mode, run) in (
    ("grad", x -> grad(through)(x)), ("value_and_grad", x -> value_and_grad(through)(x)),
    ("gradient", x -> gradient(through, x)), ("vjp", x -> vjp(in_layer, x)[2](x)), ("jvp", x -> jvp(in_layer, (x,), (x,))),
    ("backward!", x -> backward!(through(Variable(x)))), ("jacobian", x -> jacobian(in_layer, x)),
    ("hessian", x -> hessian(through, x)), ("hvp", x -> hvp(through, x, x)),
    ("grad of grad", x -> grad(t -> sum(grad(through)(t)))(x)), ("grad of jvp", x -> grad(t -> sum(along(through)(t)))(x)),
    ("gradcheck", x -> gradcheck(through, Float64.(x))),
    ("compiled grad", x -> compile(grad(through))(x)), ("compiled jvp", x -> compile(along(through))(x)),
    ("grad of compiled", x -> grad(compile(through))(x)),
    ("grad through checkpoint", x -> grad(t -> sum(checkpoint(in_layer)(t)))(x)),
    ("jvp through checkpoint", x -> along(checkpoint(in_layer))(x)),
    ("grad through scan", x -> grad(t -> sum(scan(inner_step, zeros(eltype(t), 1), reshape(t, 1, :))[1]))(x)),
    ("grad through a checkpointed scan",
        x -> grad(t -> sum(scan(inner_step, zeros(eltype(t), 1), reshape(t, 1, :); checkpoint=true)[1]))(x)),
    ("jvp through scan", x -> along(t -> sum(scan(inner_step, zeros(eltype(t), 1), reshape(t, 1, :))[1]))(x)),
    ("compiled grad through scan", x -> compile(grad(t -> sum(scan(inner_step, zeros(eltype(t), 1), reshape(t, 1, :))[1])))(x)),
    ("grad by what a scan captures",
        x -> grad(w -> sum(scan((c, t) -> (c .+ in_layer(w), nothing), zeros(eltype(w), 2), ones(eltype(w), 2, 3))[1]))(x)),
    ("second derivative of a custom rule", x -> grad(t -> sum(grad(u -> sum(custom_rule(v -> v .* 1;
        vjp=(g, y, v) -> g .* in_layer(v))(u)))(t)))(x)))
    for x in ([1.5, 2.0], Float32[1.5, 2.0])
        error = error_of(() -> run(x))
        @test error isa NotDifferentiableError &&
            occursin("through \"cube\" in layer \"encoder\", but it has no", error.message)
    end
end

@testset "an op without a rule does no harm where no derivative goes through it" begin
    x = [1.5, 2.0]
    for f in (x -> sum(stop_gradient(WITHOUT(x)) .* x), x -> sum(no_grad(() -> WITHOUT(x)) .* x))
        @test grad(f)(x) ≈ x .^ 3 && compile(grad(f))(x) ≈ x .^ 3 && along(f)(x) ≈ sum(x .^ 3) &&
            compile(along(f))(x) ≈ sum(x .^ 3)
    end
    unused(x) = (WITHOUT(x); sum(x .^ 2))
    constant = Constant(x)
    beside(x) = sum(x .* WITHOUT(constant))
    chosen(x) = sum(ifelse.(WITHOUT(x), x, 2 .* x))
    @test grad(unused)(x) == 2x && along(unused)(x) == sum(2x)
    @test grad(beside)(x) == x .^ 3 && along(beside)(x) == sum(x .^ 3)
    @test grad(chosen)(x) == [1, 1] && along(chosen)(x) == 2
    @test compile(x -> sum(WITHOUT(x)))(x) == sum(x .^ 3)
    beside_carry(x) = scan((c, t) -> ((a=WITHOUT(c.a), b=c.b .+ c.a .* t), nothing), (a=1.1, b=0.0), x)[1].b
    @test grad(beside_carry)(x) ≈ [1.1, 1.1^3] && compile(grad(beside_carry))(x) ≈ [1.1, 1.1^3]
end

@testset "half the rules serve their own mode only" begin
    x = [1.5, 2.0]
    backward_only, forward_only = cube(backward=BACKWARD), cube(jvp=forward_rule)
    @test grad(x -> sum(backward_only(x)))(x) ≈ 3 .* x .^ 2 && jvp(forward_only, (x,), (x,))[2] ≈ 3 .* x .^ 3
    @test occursin("it has no jvp rule", message_of(() -> jvp(backward_only, (x,), (x,))))
    @test occursin("it has no backward rule for its input 1", message_of(() -> grad(x -> sum(forward_only(x)))(x)))
    of_two = AD.Op("half", AD.infer_elementwise; backward=Any[(g, y, inputs, attrs) -> g .* inputs[2], nothing],
        forward=(p, out, inputs, attrs) -> AD.emit_elementwise!(p, :mul, out, inputs))
    @test grad(x -> sum(of_two(x, [2.0, 3.0])))(x) == [2, 3]
    @test occursin("through \"half\", but it has no backward rule for its input 2",
        message_of(() -> grad(x -> sum(of_two([2.0, 3.0], x)))(x)))
end

@testset "the table refuses a record without rules" begin
    before = sort!(collect(keys(AD.TABLE)))
    for (op, what) in ((cube(), "lacks a backward rule"), (cube(backward=BACKWARD), "lacks a jvp rule"),
        (cube(jvp=forward_rule), "lacks a backward rule"), (cube(backward=Any[nothing], jvp=forward_rule), "no_gradient"),
        (cube(constant=true, backward=BACKWARD), "is constant"), (cube(constant=true, jvp=forward_rule), "is constant"),
        (cube(fuses="mul, mul", backward=BACKWARD), "is fused"))
        error = error_of(() -> AD.register!(op))
        @test error isa ConfigurationError && occursin("cube", error.message) && occursin(what, error.message)
    end
    @test sort!(collect(keys(AD.TABLE))) == before
end

# Fused ops: graphs are fused after they have been differentiated.

plainly(x) = x isa Tensor ? AD.unwrapped(value(x)) : x

"""The derivative of order `n` of a function of one array to one number, by a fixed direction at each order."""
function of_order(f, n)
    n == 0 && return f
    inner = of_order(f, n - 1)
    n == 1 && return grad(f)
    return grad(t -> sum(inner(t) .* eltype(t).(reshape(sin.((1:length(t)) .+ n), size(t)))))
end

const PATTERN_X = reshape(sin.(1:12), 4, 3)
const PATTERN_Y = reshape(cos.(1:12), 4, 3)
const PATTERN_W = reshape(sin.(1:16) ./ 2, 4, 4)
const IMAGES = reshape(sin.((1:200) .^ 2), 10, 10, 1, 2)
const PLANES = reshape(cos.((1:27) .^ 2), 3, 3, 1, 3)
const SEQUENCES = reshape(Float32.(sin.((1:120) .^ 2)), 4, 15, 2)
const FILTERS = reshape(Float32.(cos.((1:60) .^ 2)), 3, 4, 5)
planes(x, w) = max_pool(relu.(conv(x, w) .+ reshape(Constant([0.1, -0.2, 0.3]), 1, 1, 3)), 2)
in_sequence(x, w) = max_pool(relu.(conv(permutedims(x, (2, 1, 3)), w) .+ reshape(Constant(Float32[0.1, -0.2, 0.3, 0, 0.1]),
    1, 5)), 3)

@testset "fused equals unfused at every order: $name" for (name, f, x, fused) in (
    ("tanh", x -> sum(tanh.(x .+ PATTERN_Y) .* PATTERN_Y), PATTERN_X, ["add_tanh", "tanh_gradient"]),
    ("sigmoid", x -> sum(sigmoid.(x .+ PATTERN_Y) .* PATTERN_Y), PATTERN_X, ["add_sigmoid", "sigmoid_gradient"]),
    ("relu", x -> sum(relu.(x .+ PATTERN_Y) .^ 3 .* PATTERN_Y), PATTERN_X, ["add_relu", "relu_gradient"]),
    ("product", x -> sum(tanh.(PATTERN_W * x .+ PATTERN_Y .+ x) .^ 2), PATTERN_X, ["matmul_add"]),
    ("product and sum", x -> sum((x .* PATTERN_Y .+ exp.(x)) .^ 3), PATTERN_X, ["mul_add"]),
    ("planes by weights", w -> sum(planes(Constant(IMAGES), w) .^ 3), PLANES,
        ["split_columns", "conv_pool", "conv_pool_weight_gradient"]),
    ("planes by images", x -> sum(planes(x, Constant(PLANES)) .^ 3), IMAGES, ["conv_pool", "unpool"]),
    ("sequences by weights", w -> sum(in_sequence(Constant(SEQUENCES), w) .^ 3), FILTERS,
        ["sequence_pool", "sequence_pool_weight_gradient"]),
    ("sequences by inputs",
        x -> sum(in_sequence(x, Constant(FILTERS)) .^ 3), SEQUENCES, ["sequence_pool", "sequence_pool_input_gradient"]))
    found = Set{String}()
    for n in 0:3
        g = of_order(f, n)
        on, off, eager = compile(g), compile(g; techniques=Techniques(fuse=false)), plainly(g(x))
        limit = eltype(x) === Float32 ? 1e-3 : 1e-10
        @test n == 0 || maximum(abs, eager) > 0.01
        @test (n, isapprox(on(x), eager; rtol=limit), isapprox(off(x), eager; rtol=limit)) == (n, true, true)
        # What is compiled inside is differentiated as it was written, not as it was fused.
        inside = compile(f)
        inside(x)
        @test (n, isapprox(plainly(of_order(inside, n)(x)), eager; rtol=limit)) == (n, true)
        union!(found, (m.captures[1] for m in eachmatch(r"= (\w+)\(", source(on))))
        @test isempty(intersect((m.captures[1] for m in eachmatch(r"= (\w+)\(", source(off))),
            [name for (name, op) in AD.TABLE if !isempty(op.fuses)]))
    end
    @test issubset(fused, found) || occursin("pool", join(fused)) && AD.Kernels.VECTOR_BYTES[] == 0
end

@testset "a fused op has no derivative: it says what it stands for" begin
    for (name, op) in sort!(collect(AD.TABLE); by=first)
        isempty(op.fuses) && continue
        @test (name, op.constant, op.backward!, op.jvp) == (name, false, nothing, nothing)
        op.elementwise || continue
        operands = [fill(0.5, 3) for _ in op.overwrites]
        f(xs...) = sum(op(xs...))
        for run in (() -> gradient(f, operands...), () -> jvp(f, Tuple(operands), Tuple(operands)))
            @test (name, occursin("it stands for: $(op.fuses)", message_of(run))) == (name, true)
        end
    end
end

# A new op: its value and its derivative, and nothing anywhere else.
row_cube(x::Real) = x^3
AD.elementwise("row_cube", :(3 * x^2); value=x -> x * x * x, functions=(row_cube,), doc="x³")

@testset "an elementwise op is one row, $T" for T in (Float32, Float64)
    x, w = T[0.5, -1.5, 2], T[1 2 3; 4 5 6; 7 8 9]
    f(x) = sum(row_cube.(x) .* w)
    rows = vec(sum(w; dims=2))
    slope, curvature = 3 .* x .^ 2 .* rows, 6 .* x .* rows
    @test value(row_cube.(Constant(x))) == x .^ 3 == compile(x -> row_cube.(x))(x)
    @test grad(f)(x) ≈ slope && compile(grad(f))(x) ≈ slope && grad(checkpoint(f))(x) ≈ slope
    @test jvp(f, (x,), (ones(T, 3),))[2] ≈ sum(slope)
    @test hessian(f, x) ≈ [i == j ? curvature[i] : zero(T) for i in 1:3, j in 1:3] ≈ compile(x -> hessian(f, x))(x)
    @test forward_gradient(f, x) ≈ slope && derivative(row_cube, T(2)) == 12
    numbers = compile(a -> row_cube.(a) + a)
    @test numbers(T(1.5)) === numbers(T(1.5)) === T(1.5)^3 + T(1.5) && occursin("row_cube", source(numbers))
    total(x) = scan((c, a) -> (c .+ row_cube.(a), nothing), zero(T), x)[1]
    @test total(x) ≈ sum(x .^ 3) && grad(total)(x) ≈ 3 .* x .^ 2 && isempty(row_cube.(Constant(T[])).dims) == false
    @test eltype(row_cube.(Constant(x))) === T && (T === Float32 || gradcheck(f, x) === nothing)
end
delete!(AD.TABLE, "row_cube")
delete!(AD.DOTTED, row_cube)

@testset "derivatives of lengths, angles and remainders where their formulas are singular or round" begin
    lengths = (norm, x -> hypot.(x[1:1], x[2:2])[1], x -> sum(norm(reshape(x, 1, 2); dims=1)))
    for f in lengths
        @test all(iszero, grad(f)(zeros(2))) && all(iszero, hessian(f, zeros(2))) && all(iszero, compile(x -> hessian(f, x))(zeros(2)))
    end
    for (T, sizes) in ((Float64, (1e-200, 1e200)), (Float32, (1e-23, 1e20))), size in sizes
        slopes = gradient((a, b) -> atan.(a, b)[1], T[size], T[2*size])
        @test slopes[1] ≈ T[0.4 / size] && slopes[2] ≈ T[-0.2 / size]
    end
    for (a, b) in ((1.0, 0.1), (-1.0, 0.1), (5.3, -2.0), (0.3, 0.1), (7.0, 7.0), (1e10, 0.3))
        slope = -round((a - rem(a, b)) / b)
        @test gradient((a, b) -> rem.(a, b)[1], [a], [b]) == ([1.0], [slope]) && derivative(b -> rem(a, b), b) == slope
        @test derivative(b -> mod(a, b), b) == -round((a - mod(a, b)) / b)
    end
    @test derivative(t -> derivative(t -> hypot(t, 0.0), t), 0.0) == 0 && derivative(t -> atan(t, 2e-200), 1e-200) ≈ 4e199
end

# An op whose value throws: done tile by tile, the last of which is a short one, it fails in any of them.
row_root(x::Real) = sqrt(x)
AD.elementwise("row_root", :(1 / (2 * row_root(x))); value=x -> sqrt(x), functions=(row_root,), doc="the root")

@testset "an op that throws leaves a program as it was, $T" for T in (Float32, Float64)
    x = rand(MersenneTwister(1), T, 100_000) .+ 1
    f = compile(x -> row_root.(x) .* x .+ sin.(x))
    expected = copy(f(x))
    for place in (1, 50_000, 100_000)
        bad = copy(x)
        bad[place] = -1
        @test_throws DomainError f(bad)
        out = fill(T(NaN), length(x))
        AD.run!(out, f, x)
        @test out == expected == f(x)
    end
end
delete!(AD.TABLE, "row_root")
delete!(AD.DOTTED, row_root)
