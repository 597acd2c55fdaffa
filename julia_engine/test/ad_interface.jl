# What a user types: operators, dots, indexing, the papers' names, Flux's names, and the README's examples.

using TwinGrad.AD: AD

@testset "operators follow Julia's rules" begin
    a, b, v = randn(3, 4), randn(3, 4), randn(4)
    x, y, z = Variable(a), Variable(b), Variable(v)
    for (got, expected) in ((x + y, a + b), (x - b, a - b), (-x, -a), (2x, 2a), (x / 2, a / 2), (x * z, a * v),
        (x * v, a * v), (a * z, a * v), (x', permutedims(a)), (x' * y, a' * b), (x .* y .+ 1, a .* b .+ 1),
        (sin.(x), sin.(a)), (x .^ 2, a .^ 2), (x .^ 3 ./ y, a .^ 3 ./ b), (2 .^ x, 2 .^ a), (abs2.(x), abs2.(a)),
        (max.(x, y, 0), max.(a, b, 0)), (x .> y, a .> b), (ifelse.(x .> 0, x, y), ifelse.(a .> 0, a, b)),
        (clamp.(x, -0.5, 0.5), clamp.(a, -0.5, 0.5)), (sum(x; dims=1), sum(a; dims=1)), (mean(x; dims=2), mean(a; dims=2)),
        (var(x; dims=1), var(a; dims=1)), (std(x; dims=2), std(a; dims=2)), (sum(abs2, x; dims=1), sum(abs2, a; dims=1)),
        (x[2, :], a[2, :]), (x[:, end], a[:, end]), (x[1:2, [1, 4]], a[1:2, [1, 4]]), (x[end:-1:1, 2:3], a[end:-1:1, 2:3]),
        (x[:], a[:]), (x[5:7], a[5:7]), (x[a.>0], a[a.>0]), (vec(x), vec(a)), (reshape(x, 2, :), reshape(a, 2, :)),
        ([x; y], [a; b]), ([x y], [a b]), ([x y; y x], [a b; b a]), (cat(x, y; dims=3), cat(a, b; dims=3)),
        (hcat(x, b), hcat(a, b)), (vcat(a, y), vcat(a, b)), (permuteDims(x, (2, 1)), permutedims(a, (2, 1))),
        (dropdims(sum(x; dims=1); dims=1), dropdims(sum(a; dims=1); dims=1)), (squeeze(sum(x; dims=1)), vec(sum(a; dims=1))),
        (maximum(x; dims=1), maximum(a; dims=1)), (stack([x, y]), cat(a, b; dims=3)), (Float32.(x), Float32.(a)),
        ((t -> 2t^2 + sin(t) / 3 - max(t, 0)).(x), (t -> 2t^2 + sin(t) / 3 - max(t, 0)).(a)),
        (((s, t) -> s * t + 1).(x, b), a .* b .+ 1), (sum(t -> t^2, x; dims=1), sum(t -> t^2, a; dims=1)),
        (1 ./ (1 .+ exp.(-x)), 1 ./ (1 .+ exp.(-a))), (x .- mean(x), a .- mean(a)))
        @test got isa Tensor && size(got) == size(expected)
        @test value(got) ≈ expected
    end
    @test item(sum(x)) ≈ sum(a) && item(mean(x)) ≈ mean(a) && item(maximum(x)) == maximum(a) && item(dot(x, y)) ≈ dot(a, b)
    @test item(x[2, 3]) == a[2, 3] && item(norm(x)) ≈ norm(a)
    @test item(sin(x[1]) ^ 2 + 3) ≈ sin(a[1])^2 + 3
    @test size(x) == (3, 4) && size(x, 3) == 1 && ndims(x) == 2 && length(x) == 12 && eltype(x) == Float64
    @test occursin("Tensor(", sprint(show, x .+ 1)) && occursin("op=add", sprint(show, x .+ 1))
    @test [item(t) for t in z] == v
end

@testset "the papers' names" begin
    w, x = Variable([1.0 2.0; 3.0 4.0]; name="w"), Constant([5.0, 6.0])
    y = sum((w * x) .^ 2)
    order = topological_sort(y)
    @test order[end] === y && w in order && x isa GraphNode && order[3].op isa Operator
    @test forward!(order)[] == 17.0^2 + 39.0^2
    backward!(order)
    @test w.grad ≈ 2 .* [17.0, 39.0] * [5.0, 6.0]'
    assign!(w, [1.0 0.0; 0.0 1.0])
    @test forward!(order)[] == 25 + 36
    backward!(order)  # set anew
    @test w.grad ≈ 2 .* [5.0, 6.0] * [5.0, 6.0]'
    backward!(y)  # added up
    @test w.grad ≈ 4 .* [5.0, 6.0] * [5.0, 6.0]'
end

@testset "the gradient of a number is an array without axes, however often it is added up" begin
    b = Variable(2.0)
    for times in 1:3
        backward!(b * b)
        @test b.grad isa Array{Float64,0} && b.grad[] == 4times
    end
    @test fill!(b.grad, 0)[] == 0
end

@testset "a sorted graph is computed again through views that had to be copied" begin
    x = Variable([1.0 2 3; 4 5 6])
    y = sum(reshape(vec(transpose(x)), 2, 3)[1, :] .* [1.0, 2, 3])
    order = topological_sort(y)
    @test forward!(order)[] == 1 + 2 * 3 + 3 * 5
    assign!(x, [0.0 1 0; 1 0 1])
    @test forward!(order)[] == 0 + 2 * 0 + 3 * 0
    assign!(x, [1.0 0 1; 0 1 0])
    @test forward!(order)[] == 1 + 2 * 1 + 3 * 1
    backward!(order)
    @test x.grad == [1 0 2; 0 3 0]
end

@testset "forward! refuses what the graph does not know how to compute again" begin
    v = Variable([1.0, 2.0])
    for f in (v -> sum(ifelse.(v .> 0, v, 2 .* v)), v -> sum(sort(v) .* [1, 2]), v -> sum(v .* (sign.(v) .+ 1)),
        v -> sum(checkpoint(x -> x .^ 2)(v)), v -> sum(custom_rule(x -> x .^ 2; vjp=(g, y, x) -> 2 .* g .* x)(v)))
        @test_throws ConfigurationError forward!(f(v))
    end
    frozen(v) = v .> 0
    for f in (v -> (m = frozen(v); scan((c, _) -> (c .* m, nothing), v, nothing; length=2)[1]),
            v -> (m = frozen(v); scan((c, _) -> (c .* m, nothing), v, nothing; length=4, checkpoint=2)[1]),
            v -> (m = frozen(v); while_loop(s -> s[1] .< 2, s -> (s[1] .+ 1, s[2] .* m), (0.0, v))[2]),
            v -> (m = frozen(v); branch(sum(v) .> 0, x -> x .* m, x -> x, v)),
            v -> (m = frozen(v); scan((c, _) -> (c .* m, nothing), Constant([1.0, 2.0]), nothing; length=2)[1] .* v),
            v -> (i = sortperm(v); scan((c, t) -> (c .* v[i] .* t, nothing), v, [1.0, 2.0])[1] .* [1.0, 2.0]))
        @test_throws ConfigurationError forward!(sum(f(v)))
    end
    y = sum(v .* relu.(v) .+ Constant([1.0, 2.0]) .* (Constant([3.0, 4.0]) .> 3))
    assign!(v, [-1.0, 3.0])
    @test forward!(y)[] == 9 + 2
end

@testset "gradients in Flux's form" begin
    @test gradient(x -> sum(x .^ 2), [1.0, 2.0]) == ([2.0, 4.0],)
    @test gradient((x, n) -> sum(x) * n, [1.0, 2.0], 3) == ([3.0, 3.0], nothing)
    @test gradient(x -> x^2 + 1, 3.0) == (6.0,)
    r = withgradient((x, y) -> sum(x .* y), [1.0f0], [2.0f0])
    @test r.val === 2.0f0 && r.grad == ([2.0f0], [1.0f0])
    @test value_and_grad(x -> sum(x .^ 3))([2.0]) == (8.0, [12.0])
    @test grad(x -> grad(y -> sum(y .^ 3))(x)[1])([2.0]) == [12.0]
    v, pull = vjp(x -> x .^ 2, [1.0, 2.0])
    @test v == [1, 4] && pull([1.0, 1.0]) == ([2.0, 4.0],)
    @test jvp(x -> x .^ 2, ([1.0, 2.0],), ([1.0, 0.0],)) == ([1.0, 4.0], [2.0, 0.0])
    @test hvp(x -> sum(x .^ 3), [1.0, 2.0], [1.0, 1.0]) == [6, 12]
    x = Variable([1.0])
    @test no_grad(() -> x .* 2).requires_grad == false && (x .* 2).requires_grad
end

@testset "the examples of $name run" for name in ("README.md", "COMING_FROM_ZYGOTE.md")
    text = read(joinpath(@__DIR__, "..", name), String)
    blocks = [m.captures[1] for m in eachmatch(r"```julia\n(.*?)```"s, text)]
    @test !isempty(blocks)
    for block in blocks
        example = Module()
        @test (include_string(example, block); true)
    end
end

@testset "the table is documented, and a twin" begin
    for (name, op) in AD.TABLE
        @test op.name == name && !isempty(op.doc)
        @test isempty(op.fuses) || !AD.differentiable(op)
    end
    @test all(f -> f isa Function || f isa AD.Op, values(AD.FUNCTIONS))
end

@testset "an element of a matrix by one number is a slice of the matrix itself" begin
    a = reshape(collect(1.0:24), 2, 3, 4)
    x = Variable(a)
    @test all(item(x[i]) == a[i] && x[i].op === AD.SLICE && x[i].inputs[1] === x for i in eachindex(a))
    @test x[UInt8(5)].inputs[1] === x && item(x[end]) == 24
    for f in (x -> sum(v^2 for v in x), x -> sum(x[i]^2 for i in eachindex(x)))
        @test grad(f)(a) == 2a == compile(grad(f))(a)
    end
    for wrong in (0, 25, true, -1)
        @test error_of(() -> x[wrong]) isa EngineError
    end
end

@testset "methods for arrays are not those of tensors" begin
    of_arrays(x::AbstractArray) = sum(x)
    @test error_of(() -> gradient(of_arrays, [1.0])) isa MethodError
end
