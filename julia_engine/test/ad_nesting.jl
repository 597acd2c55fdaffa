# Forward mode on dual numbers, and the transforms of tensors, inside each other; opaque custom rules in what is compiled.

using TwinGrad.AD: DualNumbers

# Every transform as a function from a function of one number to a derivative of it. `Hidden` keeps the types from telling
# what a function holds, so that every function is compiled once; that is another way for dual numbers to be found, too.

in_vector(x::Tensor) = reshape(x, 1)
in_vector(x) = [x]
const ORDERS = Dict("derivative" => 1, "forward_gradient" => 1, "forward_jacobian" => 1, "grad" => 1, "gradient" => 1,
    "value_and_grad" => 1, "vjp" => 1, "jvp" => 1, "jacobian" => 1, "hvp" => 2, "hessian" => 2)
const DERIVED = Dict{String,Any}(
    "derivative" => (f, x) -> derivative(f, x),
    "forward_gradient" => (f, x) -> forward_gradient(Hidden(v -> f(v[1])), in_vector(x); chunk=2)[1],
    "forward_jacobian" => (f, x) -> forward_jacobian(Hidden(v -> (f(v[1]), v[1])), in_vector(x))[1, 1],
    "grad" => (f, x) -> grad(f)(x),
    "gradient" => (f, x) -> gradient(f, x)[1],
    "value_and_grad" => (f, x) -> value_and_grad(f)(x)[2],
    "vjp" => (f, x) -> vjp(f, x)[2](1.0)[1],
    "jvp" => (f, x) -> jvp(f, (x,), (1.0,))[2],
    "jacobian" => (f, x) -> jacobian(v -> f(v[1]), in_vector(x))[1],
    "hvp" => (f, x) -> hvp(v -> f(v[1]), in_vector(x), [1.0])[1],
    "hessian" => (f, x) -> hessian(v -> f(v[1]), in_vector(x))[1, 1])
const TRANSFORMS = sort!(collect(keys(DERIVED)))
derived(name, f) = Hidden(x -> DERIVED[name](Hidden(f), x))
const FIRST_ORDER = filter(name -> ORDERS[name] == 1, TRANSFORMS)

h(x) = exp(2x)
h(x, n) = 2.0^n * exp(2x)  # its n-th derivative

@testset "every transform inside every other" begin
    @test length(TRANSFORMS) == 11
    for outer in TRANSFORMS, inner in TRANSFORMS
        k, n, x = ORDERS[inner], ORDERS[outer], 0.3
        same(found, expected) = @test (outer, inner, found) == (outer, inner, found) && isapprox(found, expected; rtol=1e-10, atol=1e-12)
        same(derived(outer, derived(inner, h))(x), h(x, n + k))
        # The inner function holds the outer variable, and the outer one multiplies by it.
        held = derived(outer, x -> x * derived(inner, y -> x * h(y))(x))(x)
        same(held, n == 1 ? 2x * h(x, k) + x^2 * h(x, k + 1) : 2h(x, k) + 4x * h(x, k + 1) + x^2 * h(x, k + 2))
        # The classic: perturbations that are confused give 2.
        same(derived(outer, x -> x * derived(inner, y -> x + y)(1.0))(1.0), k == n == 1 ? 1 : 0)
    end
end

@testset "three inside each other, drawn at random" begin
    random = AD.MersenneTwister(5)
    for _ in 1:30
        a, b, c = rand(random, FIRST_ORDER, 3)
        # z -> x y z²: 2 x y²; y times that: 2 x y³; 6 x y²; x times that at y = x: 6 x⁴; 24 x³.
        found = derived(a, x -> x * derived(b, y -> y * derived(c, z -> x * y * z^2)(y))(x))(1.5)
        @test (a, b, c, found) == (a, b, c, found) && found ≈ 24 * 1.5^3
    end
end

@testset "$name with what runs programs" for name in TRANSFORMS
    n, x = ORDERS[name], 0.3
    of(f) = derived(name, f)
    @test of(compile(h))(x) ≈ h(x, n)
    @test of(checkpoint(h))(x) ≈ h(x, n)
    @test compile(x -> of(h)(x))(x) ≈ h(x, n)
    @test compile(x -> of(y -> y * x^2 * h(y))(x) * x)(x) ≈ x^3 * (n * h(x, n - 1) + x * h(x, n))
    @test checkpoint(x -> of(h)(x))(x) ≈ h(x, n)
    @test grad(checkpoint(x -> of(h)(x)))(x) ≈ h(x, n + 1)
    # A loop whose steps are differentiated, and a loop that is: c -> a c + x three times.
    steps = [0.5, 1.0, 2.0]
    @test scan((c, x) -> (c * of(h)(x), c), 1.0, steps)[1] ≈ prod(h.(steps, n))
    along(a) = scan((c, x) -> (a * c + x, c), 1.0, steps)[1]  # a³ + a²/2 + a + 2
    @test of(along)(0.7) ≈ (n == 1 ? 3 * 0.7^2 + 0.7 + 1 : 6 * 0.7 + 1)
    # What a compiled function captures.
    @test of(a -> compile(x -> a^2 * sum(x))(steps))(x) ≈ (n == 1 ? 2x : 2) * sum(steps)
end

@testset "vectors and matrices, held and given" begin
    W, v = [0.5 -1.0; 2.0 0.3], [0.7, -0.4]
    f = Hidden(v -> sum((W * v) .^ 3))
    J(v) = W' * (3 .* (W * v) .^ 2)
    H = W' * (6 .* (W * v) .* W)
    for g in map(Hidden, (grad(f), x -> forward_gradient(f, x), x -> vec(jacobian(f, x)), x -> gradient(f, x)[1]))
        @test g(v) ≈ J(v)
        @test forward_jacobian(g, v) ≈ H && jacobian(g, v) ≈ H && jacobian(g, v; mode=:reverse) ≈ H
        @test forward_gradient(x -> sum(g(x)), v) ≈ vec(sum(H; dims=1)) && grad(x -> sum(g(x)))(v) ≈ vec(sum(H; dims=1))
        @test compile(g)(v) ≈ J(v) && compile(x -> forward_jacobian(g, x))(v) ≈ H
        @test derivative(t -> g(t .* v), 1.0) ≈ H * v && derivative(t -> sum(g([t, t])), 0.2) ≈ sum(W' * (6 .* (W * [0.2, 0.2]) .* W))
    end
    # Matrix-valued functions of matrices that hold the outer variable.
    M = [1.0 0.5; -0.3 2.0]
    power(a) = X -> a .* (X * X)
    expected = forward_jacobian(X -> X * X, M)
    @test derivative(a -> forward_jacobian(power(a^2), M), 3.0) ≈ 6 .* expected
    @test derivative(a -> jacobian(power(a^2), M), 3.0) ≈ 6 .* expected
    @test grad(a -> sum(forward_jacobian(power(a^2), M)))(3.0) ≈ 6 * sum(expected)
    @test forward_gradient(A -> sum(jacobian(X -> A * X, M) .^ 2), M) ≈ grad(A -> sum(jacobian(X -> A * X, M) .^ 2))(M)
    @test hessian(A -> forward_gradient(X -> sum((A * X) .^ 2), M)[1], M) ≈ forward_jacobian(
        A -> forward_gradient(B -> forward_gradient(X -> sum((B * X) .^ 2), M)[1], A), M)
    # Dotted functions, containers, Float32.
    t = Constant([0.5, 1.5])
    @test value((x -> derivative(y -> x * y^3, x)).(t)) ≈ 3 .* [0.5, 1.5] .^ 3
    @test derivative(a -> sum(grad(m -> a * sum(m.w .^ 2) * m.b)((w=[1.0, 2.0], b=a)).w), 2.0) ≈ 4 * 2.0 * 3
    @test derivative(a -> grad(x -> a * x^2)(3.0f0), 2.0f0) === 6.0f0
    @test forward_gradient(x -> grad(y -> sum(x .* y .^ 2))(x)[1], Float32[1, 2]) == Float32[4, 0]
end

@testset "what hides a dual number does not confuse it" begin
    hidden = ((x -> Any[x]), (x -> Real[x]), (x -> Ref{Any}(x)), (x -> Dict{Any,Any}(1 => x)), (x -> Any[Any[x]]))
    look(box) = (v = box isa Ref ? box[] : box isa Dict ? box[1] : box[1]; v isa Vector ? v[1] : v)
    for hide in hidden
        @test derivative(x -> (box = hide(x); x * derivative(y -> look(box) + y, 1.0)), 1.0) == 1
        @test derivative(x -> (box = hide(x); x * grad(y -> look(box) + y)(1.0)), 1.0) == 1
        hide(1.0) isa Vector{Real} || @test grad(x -> (box = hide(x); x * derivative(y -> look(box) + y, 1.0)))(1.0) == 1
        @test forward_gradient(v -> (box = hide(v[1]); v[1] * forward_gradient(w -> look(box) + w[1], [1.0])[1]), [1.0]) == [1]
    end
    @test derivative(a -> (t = Constant([1.0, 2.0]) .* a; sum(grad(w -> sum(w .* t .^ 2))([1.0, 1.0]))), 2.0) == 20
    @test derivative(a -> sum(Constant([1.0, 2.0]) .* a), 2.0) == 3
    @test derivative(x -> x * stop_gradient(x), 3.0) == 3 && derivative(x -> x * no_grad(() -> x^2), 3.0) == 9
    @test derivative(x -> x * stop_gradient((a=[x, 1.0],)).a[1], 3.0) == 3
    @test derivative(a -> sum(Constant([3.0]) .^ a), 2.0) ≈ 9 * log(3)  # at 2, whose power is a square otherwise
end

@testset "dual numbers that only a rule of the user's holds" begin
    x = [0.3, 0.7]
    pulled(a) = custom_rule(x -> sin.(x); vjp=(g, y, x) -> g .* cos.(x) .* a)
    pushed(a) = custom_rule(x -> sin.(x); jvp=(t, y, x) -> t[1] .* cos.(x) .* a)
    tensor(a) = Constant([1.0, 1.0]) .* a
    for (name, f) in (
        ("grad", a -> grad(x -> sum(pulled(a)(x)))(x)),
        ("grad, of a tensor", a -> grad(x -> sum(pulled(tensor(a))(x)))(x)),
        ("grad, in a checkpoint", a -> grad(x -> sum(checkpoint(pulled(a))(x)))(x)),
        ("grad, in a checkpoint, of a tensor", a -> grad(x -> sum(checkpoint(pulled(tensor(a)))(x)))(x)),
        ("grad, hidden", a -> grad(x -> sum(pulled(Ref{Any}(a)[])(x)))(x)),
        ("vjp", a -> vjp(pulled(a), x)[2]([1.0, 1.0])[1]),
        ("vjp, of the seed", a -> vjp(x -> sin.(x), x)[2]([a, a])[1]),
        ("jvp", a -> jvp(pushed(a), (x,), ([1.0, 1.0],))[2]),
        ("jvp, of the tangent", a -> jvp(x -> sin.(x), (x,), ([a, a],))[2]),
        ("jacobian", a -> sum(jacobian(pulled(a), x; mode=:reverse); dims=1)))
        # In a separate task: the first dual number that meets a tensor there must be seen as later ones are.
        first, second = fetch(@async (derivative(f, 2.0), derivative(f, 2.0)))
        @test (name, vec(first) ≈ cos.(x), vec(second) ≈ cos.(x)) == (name, true, true)
    end
end

@testset "errors of mixtures say what to do" begin
    W = Variable([1.0, 2.0])
    late() = Variable([1.0])
    for (kind, f, text) in (
        (NotDifferentiableError, () -> ForwardBuffers(x -> sum(W .* x), [1.0, 2.0]), "need no buffers"),
        (NotDifferentiableError, () -> derivative(a -> (backward!(sum(late() .* a)); a), 1.0), "use grad()"),
        (NotDifferentiableError, () -> derivative(a -> Float64(sum(Constant([1.0]) .* a)), 1.0), "lose its derivative"),
        (NotDifferentiableError, () -> derivative(x -> x * derivative(y -> DualNumbers.dual(1.0, k -> 1.0, Val(1), Val(3)), x), 1.0),
            "kept beyond"),
        (TraceError, () -> derivative(x -> grad(y -> Real[y][1])(x), 1.0), "stack()"),
        (NotDifferentiableError, () -> forward_gradient(sum, [Constant(1.0)]), "stack()"),
        (NotDifferentiableError, () -> forward_jacobian(sin, 1.0), "forward_jacobian: expected an array"),
        (ShapeError, () -> derivative(sum, W), "expected a number"),
        (ShapeError, () -> forward_gradient(x -> W .* x, [1.0, 2.0]), "forward_jacobian"),
        (DTypeError, () -> derivative(x -> grad(y -> x * y)(x), big(1.0)), "BigFloat"))
        error = error_of(f)
        @test (text, error isa kind && occursin(text, error.message), error) == (text, true, error)
    end
end

@testset "an opaque custom rule is called with arrays at every replay" begin
    seen, factor = Any[], Ref(1.0)
    rule = custom_rule(x -> (push!(seen, x isa Array ? copy(x) : x); factor[] .* cumsum(x));
        vjp=(g, y, x) -> (push!(seen, x isa Array ? copy(x) : x); factor[] .* reverse(cumsum(reverse(g)))),
        jvp=(t, y, x) -> factor[] .* cumsum(t[1]), opaque=true)
    plain(x) = factor[] * sum(cumsum(x) .* (1:length(x)))
    slope(x) = factor[] .* reverse(cumsum(reverse(Float64.(1:length(x)))))
    f(x) = sum(rule(x) .* (1:length(x)))
    for (wrapped, expected) in ((compile(f), plain), (grad(compile(f)), slope), (compile(grad(f)), slope),
            (compile(x -> jvp(f, (x,), (ones(3),))[2]), x -> sum(slope(x))), (x -> derivative(t -> f(t .* x), 1.0), plain),
            (x -> forward_gradient(f, x), slope), (compile(checkpoint(f)), plain))
        wrapped([0.0, 0.0, 0.0])
        @test all(x -> x isa Array{Float64,1}, seen)  # never a tensor, be it concrete or symbolic
        for (k, x) in ((1.0, [1.0, -2.0, 0.5]), (1.0, [4.0, 0.0, 3.0]), (-2.0, [4.0, 0.0, 3.0]))  # what it captures counts
            empty!(seen)
            factor[] = k
            @test wrapped(x) ≈ expected(x)
            @test !isempty(seen) && all(==(x), seen)
        end
        factor[] = 1.0
    end
    # In a loop it is called at every step of every replay.
    steps = [1.0 2.0 3.0; 0.5 0.5 0.5]
    loop = compile(xs -> sum(scan((c, x) -> (c .+ rule(x), c), zeros(2), xs)[1]))
    loop(steps)
    empty!(seen)
    @test loop(2 .* steps) ≈ sum(cumsum(2 .* steps; dims=1)) && seen == [2 .* steps[:, t] for t in 1:3]
    @test grad(xs -> sum(scan((c, x) -> (c .+ rule(x), c), zeros(2), xs)[1]))(steps) ≈ [2 2 2; 1 1 1]
    @test occursin("no second derivative", message_of(() -> grad(x -> sum(grad(f)(x)))([1.0, 2.0, 3.0])))
end
