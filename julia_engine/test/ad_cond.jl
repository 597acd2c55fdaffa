# Branches on values: eager and compiled, derivatives of every kind, many samples, and mistakes.

using TwinGrad.AD: AD

const BRANCH_W = [0.5 -0.3; 0.2 0.4]
first_branch(w, x) = (tanh.(w * x), x[1])
second_branch(w, x) = (sin.(x), sum(x .* (w * x)))
function branching(w, x)
    y, s = branch(sum(x) .> 0, x -> first_branch(w, x), x -> second_branch(w, x), x)
    return sum(y .^ 2) * s
end
plainly(holds) = (w, x) -> ((y, s) = (holds ? first_branch : second_branch)(w, x); sum(y .^ 2) * s)

@testset "values and derivatives: $name" for (name, transform) in (
    ("value", f -> (w, x) -> (f(w, x),)),
    ("gradient", f -> grad(f; argnums=(1, 2))),
    ("tangent", f -> (w, x) -> (jvp(f, (w, x), (cos.(w), cos.(x)))[2],)),
    ("second, reverse over reverse", f -> grad((w, x) -> sum(sum(sin.(g)) for g in grad(f; argnums=(1, 2))(w, x)); argnums=(1, 2))),
    ("second, forward over reverse", f -> (w, x) -> jvp(grad(f; argnums=(1, 2)), (w, x), (cos.(w), cos.(x)))[2]),
    ("second, reverse over forward", f -> grad((w, x) -> jvp(f, (w, x), (cos.(w), cos.(x)))[2]; argnums=(1, 2))))
    compiled = compile(transform(branching))
    for x in ([0.9, -0.7], [-0.9, 0.7])
        expected = transform(plainly(sum(x) > 0))(BRANCH_W, x)
        for found in (compiled(BRANCH_W, x), transform(branching)(BRANCH_W, x))
            @test all(a ≈ b for (a, b) in zip(found, expected))
        end
    end
    @test length(compiled.tapes) == 1
end

@testset "one branch is computed" begin
    taken = Symbol[]
    noting(name) = custom_rule(x -> (push!(taken, name); 2 .* x); vjp=(g, y, x) -> 2 .* g, infer=x -> (size(x), eltype(x)), opaque=true)
    yes, no = noting(:yes), noting(:no)
    f = compile(grad(x -> sum(branch(x[1] .> 0, yes, no, x))))
    for (x, name) in (([1.0, 2], :yes), ([-1.0, 2], :no), ([3.0, 2], :yes))
        empty!(taken)
        @test f(x) == [2, 2] && Set(taken) == Set([name])
    end
end

@testset "containers, what is captured, and samples" begin
    scale = Constant(fill(3.0))
    f = compile((p, flag) -> branch(flag, p -> (a=p.x .* scale, z=0.0), p -> (a=p.x, z=p.x[1]), p))
    @test f((x=ones(2),), 1.0) == (a=[3, 3], z=0.0) && f((x=ones(2),), 0.0) == (a=[1, 1], z=1.0)
    assign!(scale, fill(5.0))
    @test f((x=ones(2),), 1.0).a == [5, 5]
    xs = [0.9 -0.4 0.3; -0.7 0.1 0.3]
    for g in (branching, (w, x) -> grad(x -> branching(w, x))(x))
        found = vmap(g; in_axes=(nothing, :last))(BRANCH_W, xs)
        @test all(found[ntuple(_ -> :, ndims(found) - 1)..., k] ≈ g(BRANCH_W, xs[:, k]) for k in 1:3)
    end
    steps(x) = scan((h, t) -> (branch(h .> 1, h -> h / 2, h -> h * t, h), nothing), x, [1.5, 2.0, 3.0])[1]
    @test compile(steps)(1.0) ≈ 1.5 / 2 * 3 && compile(grad(steps))(1.0) ≈ 1.5 / 2 * 3
    @test Float32 === eltype(compile(x -> branch(x[1] .> 0, x -> x, x -> 2 .* x, x))(Float32[1, 2]))
end

@testset "truth values beside floats are numbers, traced as well" begin
    for m in ([true, false], BitVector([true, false]))
        f(x) = sum(branch(x[1] .> 0, (x, m) -> x .* m, (x, m) -> x, x, m))
        @test grad(f)([1.0, 2.0]) == compile(grad(f))([1.0, 2.0]) == [1, 0]
        @test compile(grad(f))([-1.0, 2.0]) == [1, 1]
    end
end

@testset "only the truth value depends on what is differentiated by; numbers take the type of the arrays beside them" begin
    f(x) = branch(x[1], c -> sum(c), c -> -sum(c), [1.0, 2.0]) + sum(x)
    for x in ([1.0, 0.0], [0.0, 3.0]), run in (identity, compile)
        @test run(grad(f))(x) == [1, 1] && run(x -> jvp(f, (x,), ([1.0, 2.0],))[2])(x)[] == 3
    end
    @test hessian(f, [1.0, 0.0]) == hessian(f, [0.0, 3.0]) == zeros(2, 2)
    weak(x) = branch(sum(x) .> 0, (x, s) -> x .* s, (x, s) -> x, x, 2.0)
    for T in (Float32, Float64), x in (T[1, 2], T[-1, 2, -3])
        @test compile(weak)(x) == value(weak(Constant(x))) && eltype(compile(weak)(x)) == T
    end
end

@testset "what is wrong is named" begin
    for (call, kind, what) in (
        (x -> branch(x .> 0, sin, cos, x), ShapeError, "must be one truth value, got size (2,)"),
        (x -> branch(x[1] .> 0, x -> x, x -> x[1:1], x), ShapeError, "is of size (2,) from the first function, and of size (1,)"),
        (x -> branch(x[1] .> 0, x -> (x, x), x -> x, x), ShapeError, "the first function returns a tuple of 2, the second one"),
        (x -> branch(x[1] .> 0, x -> item(x[1]) > 1 ? x : -x, x -> x, x), TraceError, "a value is needed here"),
        (x -> branch(x[1] .> 0, x -> dropout(x, 0.5, AD.Generator(1)), x -> x, x), TraceError, "random masks cannot be drawn inside a br"))
        error = error_of(() -> compile(call)(ones(2)))
        @test error isa kind && occursin(what, error.message)
    end
end
