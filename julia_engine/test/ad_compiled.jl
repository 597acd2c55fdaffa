# Compiled functions called with numbers and with large arrays: straight-line code equals the tape, nothing is overwritten.

using TwinGrad.AD: AD

the_tape(compiled) = first(values(compiled.tapes))[1]
const VALUES = (0.0, -0.0, 0.3, -0.7, 1.0, -1.0, 2.5, -3.0, 1e7, -1e30, Inf, -Inf, NaN, 1e-310)

@testset "threads that call one compiled function get their own numbers or an error" begin
    f, g = compile(x -> x^2 + 1), compile(grad(x -> x^3))
    f(1.0), g(1.0)
    wrong = Threads.Atomic{Int}(0)
    Threads.@threads for t in 1:4
        for _ in 1:20_000
            try
                f(Float64(t)) == t^2 + 1 && g(Float64(t)) == 3t^2 || Threads.atomic_add!(wrong, 1)
            catch error
                error isa ReplayError || Threads.atomic_add!(wrong, 1)
            end
        end
    end
    @test wrong[] == 0 && f(2.0) == 5 && g(2.0) == 12
end

@testset "threads that call one compiled function of arrays get their own results or an error" begin
    f, values = compile(v -> (sum(v .^ 2), v .+ 1)), [fill(Float64(t), 100) for t in 1:4]
    f(values[1])
    wrong = Threads.Atomic{Int}(0)
    Threads.@threads for t in 1:4
        results = (fill(0.0), zeros(100))
        for i in 1:20_000
            try
                found = iseven(i) ? f(values[t]) : run!(results, f, values[t])
                found[1][] == 100 * t^2 && all(==(t + 1), found[2]) || Threads.atomic_add!(wrong, 1)
            catch error
                error isa ReplayError || Threads.atomic_add!(wrong, 1)
            end
        end
    end
    @test wrong[] == 0 && f(values[2])[1] == 400
end

@testset "threads, and tasks, whose first calls of one compiled function come together" begin
    traced = Ref(0)
    f = compile(x -> (traced[] += 1; foreach(_ -> yield(), 1:5); 2 .* x))
    calls = [@async(f([1.0, 2.0])) for _ in 1:3]
    @test all(call -> fetch(call) == [2, 4], calls) && traced[] == 1 && length(f.tapes) == 1
    g, wrong = compile(x -> sum(x .^ 2)), Threads.Atomic{Int}(0)
    Threads.@threads for t in 1:4
        for n in t:4:60
            try
                g(ones(n)) == n || Threads.atomic_add!(wrong, 1)
            catch error
                Threads.atomic_add!(wrong, 1)
            end
        end
    end
    @test wrong[] == 0 && length(g.tapes) == 60
end

@testset "a compiled function of numbers is one call's where another thread can run" begin
    @test AD.Versions.has_one_thread() == (Threads.nthreads() == 1 && !AD.Versions.waits_apart())
end

@testset "straight-line code equals the tape for every elementwise op" begin
    names = sort!([name for (name, op) in AD.TABLE if op.elementwise])
    @test all(name -> AD.TABLE[name].scalar !== nothing, names)
    for name in names, T in (Float64, Float32)
        op = AD.TABLE[name]
        count = name in ("clip", "where") ? 3 : length(op.overwrites)
        name in ("pow", "equal_mask") && (count = 2)
        f = compile((xs...) -> op(xs...))
        random = AD.MersenneTwister(5)
        # Lone numbers count as Float64; arrays without dimensions keep their type.
        args = [ntuple(_ -> T === Float64 ? rand(random, VALUES) : fill(T(rand(random, VALUES))), count) for _ in 1:40]
        f(args[1]...)
        @test f.code !== nothing && f.code.T === T
        tape = the_tape(f)
        for xs in args
            @test isequal((name, xs, f(xs...)), (name, xs, tape(xs...)[1][]))
        end
    end
    for p in (2, 3, 4, 5, 6, 0.5, -1, 1.7)
        f = compile(x -> x^p)
        @test f(1.3) ≈ 1.3^p && f.code !== nothing && f(1.7) == the_tape(f)(1.7)[1][]
    end
end

@testset "derivatives of derivatives, compiled" begin
    order(f, n) = n == 0 ? f : grad(order(f, n - 1))
    wave(x) = exp(2x) * sin(x)  # the imaginary part of exp((2 + i) x)
    for n in 1:5, x in (0.3, -1.1)
        closed = imag((2 + im)^n * exp((2 + im) * x))
        @test compile(order(wave, n))(x) ≈ closed rtol = 1e-10
        @test sum(compile(order(v -> sum(wave.(v) .* v[1] ./ v[1]), 1))([x, x])) ≈
            2imag((2 + im) * exp((2 + im) * x)) rtol = 1e-10
    end
    thrice(d) = x -> d(a -> d(b -> d(c -> (a * b * c)^2)(x))(x))(x)  # variables that are equal and not the same
    along(f) = x -> jvp(f, (x,), (1.0,))[2]
    for d in (grad, along)
        @test compile(thrice(d))(2.0) == thrice(d)(2.0) == 64
    end
    nested(x) = sum(grad(a -> sum(grad(b -> sum(exp.(b) .* sin.(b)))(a) .* a))(x) .* x)
    x = [0.3, -0.4, 1.2]
    @test compile(nested)(x) ≈ nested(x) rtol = 1e-12
    @test compile(grad(nested))(x) ≈ grad(nested)(x) rtol = 1e-12
end

@testset "straight-line code of whole programs" begin
    f(x, y) = sin(cos(x)) * y + exp(-x * x) / (1 + y^2) + max(x, y) - tanh(x * y)
    g = compile(grad(f; argnums=(1, 2)))
    for (x, y) in ((0.3, 0.4), (-1.2, 2.0), (1.0, 1.0))
        @test all(isapprox.(g(x, y), (derivative(t -> f(t, y), x), derivative(t -> f(x, t), y)); rtol=1e-13))
    end
    @test g(0.3, 0.4) isa Tuple{Float64,Float64} && all(g(0.3f0, 0.4f0) .≈ g(Float64(0.3f0), Float64(0.4f0)))
    h = compile((x, y) -> (a=x * y, b=[x + y, (x, y)]))
    @test h(2.0, 3.0) == (a=6.0, b=[5.0, (2.0, 3.0)]) && h(1.0, 3.0) == (a=3.0, b=[4.0, (1.0, 3.0)])
    @test compile(x -> 3.0)(1.0) == 3 && compile(x -> x)(1.5) === 1.5 && compile(x -> (x, x))(2.0) === (2.0, 2.0)
    function powers(x, n)
        r = x
        for i in 1:n
            r = r * sin(x + i)
        end
        return r
    end
    long = compile(value_and_grad(x -> powers(x, 400)))  # several functions, which hand values on
    value_, slope = long(0.9)
    @test value_ ≈ powers(0.9, 400) && slope ≈ derivative(x -> powers(x, 400), 0.9) && long(0.9) == (value_, slope)
    @test long.last.code !== nothing && !isempty(long.last.code.kept) && isequal(Tuple(o[] for o in the_tape(long)(0.9)), long(0.9))
    longer = compile(x -> powers(x, AD.STRAIGHT_MOST))
    longer(0.9)
    @test longer.code === nothing && longer(1.1) ≈ powers(1.1, AD.STRAIGHT_MOST)
end

@testset "what changes between calls is seen" begin
    c = Variable(2.0)
    f = compile(x -> x * c)
    @test f(3.0) == 6 && f.code === nothing
    assign!(c, 5.0)
    @test f(3.0) == 15
    g = compile(x -> x^2)
    @test g(3.0) == 9 && g([1.0, 2.0]' * [1.0, 2.0]) == 25 && g(2.0f0) == 4 && g(3) == 9 && g(3.0) == 9
    single = compile(grad(x -> sum(Float32[1, 2] .* x .* x)))  # a Float32 stays one, as it does uncompiled
    @test single(2.0f0) === 12.0f0 && single(3.0f0) === 18.0f0 && g(2.0f0) === 4.0f0 && g(2.0) === 4.0
    @test compile((x, n, i) -> x * n * sum(Constant(Float32[1, 2])[i] .* x))(2.0f0, 3, [2, 1]) === 36.0f0
    @test compile((x, n) -> x * n)(2.0f0, 3) === 6.0f0 && compile((x, y) -> x * y)(2.0f0, 3.0) === 6.0
    @test grad(x -> g(x) * x)(2.0) == 12  # inside a transform the function itself is called
    @test grad(x -> compile(y -> x * y)(2.0))(3.0) == 2
    called() = @allocated g(1.5)
    called()
    @test called() <= 32  # the number that is returned, where its type is not known before
end

@testset "arrays of truth values are arguments" begin
    pick = compile((x, m) -> sum(choose(m, x, 0)))
    slope = compile(grad((x, m) -> sum(choose(m, x, 0))))
    for T in (Float64, Float32), mask in (trues(3), [true, false, true], [false, true, false])
        x = T[0.5, -1.5, 2.0]
        @test pick(x, mask) === sum(x .* mask) && slope(x, mask) == mask
    end
    x = [0.5, -1.5, 2.0]
    @test pick(x, x .> 0) == 2.5 && compile((x, m) -> x .* m)(x, x .> 0) == [0.5, 0, 2]
    @test compile((x, i, m) -> x[i] .* m)(x, [3, 1], [false, true]) == [0, 0.5]  # other integers are indices
end

@testset "ops of another task" begin
    inside(x) = sum(fetch(@async sin.(x)))
    @test grad(inside)([0.0, 1.0]) ≈ [1, cos(1)]
    @test occursin("in another task", message_of(() -> compile(inside)([0.0, 1.0])))
end

@testset "large arrays are used in place, and results are the caller's" begin
    n = 1000
    f = compile((x, y, s) -> (x .* y .+ s, sum(x .* x), x'))
    x, y = randn(n), randn(n)
    x0, y0 = copy(x), copy(y)
    first_ = f(x, y, 2.0)
    kept = map(copy, first_)
    second = f(2x, y, 1.0)
    third = f(x, x, 0.0)  # one array twice
    @test first_ == kept && x == x0 && y == y0
    @test first_[1] ≈ x .* y .+ 2 && first_[2] ≈ sum(abs2, x) && first_[3] == x'
    @test second[1] ≈ 2x .* y .+ 1 && third[1] ≈ x .* x && third[3] !== second[3]
    @test length(f.tapes) == 1
    for byte in (0x00, 0xff)
        poison!(the_tape(f), byte)
        @test isequal(f(x, y, 2.0), first_)
    end
    @test the_tape(f)(x, y, 2.0)[1] ≈ first_[1]  # its own memory is what it was
    @test x == x0 && isequal(f(y, x, 2.0)[1], first_[1])
    w, b, v = randn(10, 784), randn(10), randn(784)
    loss(w, b, v) = sum(sigmoid.(w * v .+ b))
    g = compile(value_and_grad(loss; argnums=(1, 2)))
    for _ in 1:3
        w .*= 1.1
        (a, (dw, db)) = g(w, b, v)
        (e, (ew, eb)) = value_and_grad(loss; argnums=(1, 2))(w, b, v)
        @test a ≈ e && dw ≈ ew && db ≈ eb
    end
    labels = rand(1:5, 300)
    h = compile(grad(z -> softmax_cross_entropy(z, labels)))
    k = compile((z, l) -> softmax_cross_entropy(z, l))
    z = randn(5, 300)
    @test h(z) ≈ h(copy(z)) && k(z, labels) ≈ k(z, copy(labels))
    @test_throws LabelError k(z, fill(9, 300))
    @test k(z, labels) ≈ value(softmax_cross_entropy(Constant(z), labels))[]  # the error left nothing behind
    @test compile(x -> sum(x[2:end] .* x[1:end-1]))(x) ≈ sum(x[2:end] .* x[1:end-1])
    @test compile(t -> grad(u -> sum((1 .- u[1:end-1]) .^ 2 .+ 100 .* (u[2:end] .- u[1:end-1] .^ 2) .^ 2))(t))(x) ≈
          forward_gradient(u -> sum(100 * (u[i+1] - u[i]^2)^2 + (1 - u[i])^2 for i in 1:length(u)-1), x)
end

@testset "results into the caller's memory" begin
    w, b, v = randn(10, 784), randn(10), randn(784)
    g = compile(grad((w, b, v) -> sum(sigmoid.(w * v .+ b)); argnums=(1, 2)))
    memory = zeros(10, 784), zeros(10)
    for _ in 1:3
        w .*= 1.1
        @test run!(memory, g, w, b, v) === memory && isequal(memory, g(w, b, v))
    end
    one = zeros(300)
    f = compile(x -> 2 .* x)
    @test run!(one, f, fill(3.0, 300)) === one && all(==(6), one) && run!(one, f, ones(300)) == fill(2.0, 300)
    @test occursin("also an argument's", message_of(() -> run!(one, f, one)))
    kept = ones(300)
    both = compile(x -> (kept .* x, kept .+ x))
    both(one)
    @test occursin("an array which the function captures", message_of(() -> run!((kept, zeros(300)), both, one)))
    @test kept == ones(300)
    for n in (3, 300)  # small results are copied there, and the first call has them all copied
        held, x = ones(n), fill(2.0, n)
        new = compile(x -> (held .* x, held .+ x))
        for _ in 1:2
            @test occursin("an array which the function captures", message_of(() -> run!((zeros(n), held), new, x)))
            @test held == ones(n)
        end
        @test occursin("also an argument's", message_of(() -> run!(x, compile(x -> 2 .* x), x))) && x == fill(2.0, n)
    end
    @test occursin("size (300,)", message_of(() -> run!(zeros(3), f, ones(300))))
    @test occursin("returns 1 arrays", message_of(() -> run!((one, one), f, ones(300))))
    @test occursin("that of another", message_of(() -> run!((one, one), both, ones(300))))
    @test occursin("got Float64", message_of(() -> run!(1.0, compile(sum), ones(300))))
    for wrong in (zeros(5), zeros(Float32, 300), (one,), (one, one), (a=one, b=zeros(300)))  # on the first call as on others
        @test_throws ReplayError run!(wrong, compile(x -> (kept .* x, kept .+ x)), ones(300))
    end
    @test occursin("call the compiled function itself", message_of(() -> grad(x -> (run!(one, f, x); sum(x)))(ones(300))))
    named = zeros(300), zeros(300)
    @test run!(named, compile(x -> (a=2 .* x, b=x .+ 1)), ones(300)) === named && named == (fill(2.0, 300), fill(2.0, 300))
end

@testset "the gradient of a weight that a loop reads is one product where the samples are few" begin
    function recurrence(weight, x)
        for _ in 1:6
            x = tanh.(weight * x)
        end
        return sum(x .* x)
    end
    random = AD.MersenneTwister(8)
    weight, v = randn(random, 8, 8) ./ 3, randn(random, 8, 8)
    for (samples, products) in ((1, 6 + 5 + 1), (4, 6 + 5 + 1), (5, 6 + 5 + 6))  # forward, by x, by the weight
        x = randn(random, 8, samples)
        gradient = w -> grad(w -> recurrence(w, x))(w)
        program = AD.trace(w -> [gradient(w)], AD.Tensor[AD.symbol(Float64, [8, 8])])
        @test count(equation -> equation.op === AD.MATMUL, AD.simplify(program).equations) == products
        @test compile(gradient)(weight) ≈ gradient(weight) rtol = 1e-12
        each = compile(gradient; techniques=Techniques(join=false))
        @test each(weight) ≈ gradient(weight) rtol = 1e-12
        # All are products by a transposed matrix but for the six of the forward pass.
        found = first(values(each.tapes))[1].program.equations
        @test count(equation -> startswith(equation.op.name, "matmul"), found) >= 6 + 5 + 6
        along(w) = sum(gradient(w) .* v)
        @test compile(grad(along))(weight) ≈ grad(along)(weight) rtol = 1e-11
    end
end

# Keys -----------------------------------------------------------------------------------------------------------------

@testset "a function is traced for each type of a dictionary's keys" begin
    same = Any[1, 1.0, true, Int32(1), 1 // 1, (1,), (1.0,), (true,), Any[1], Any[true], [1], 0.0, -0.0, 0, false]
    for (i, a) in enumerate(same), (k, b) in enumerate(same)
        @test (a, b, AD.flatten(Dict{Any,Any}(a => 1.0))[2] == AD.flatten(Dict{Any,Any}(b => 1.0))[2]) == (a, b, i == k)
    end
    f = compile(items -> sum(Any[length(repr(key)) .* x for (key, x) in items]))
    x = ones(2)
    for _ in 1:2, key in same
        @test f(Dict{Any,Any}(key => x)) == length(repr(key)) .* x
    end
end

@testset "the transpose of a vector is one in a compiled function, too" begin
    f(a, b) = a * b
    compiled = compile(f)
    a, b = [1.0, 2.0], [3.0, 4.0]
    for _ in 1:2
        @test compiled(a', b) === 11.0
        @test compiled(reshape(a, 1, 2), b) == [11.0]
        @test compiled(transpose(a), b) === 11.0
    end
    @test grad(a -> a * b)(a') == b' && compile(grad(a -> a * b))(a') == b'
    @test compile(f; techniques=Techniques(replay=false))(a', b) === 11.0
    @test checkpoint(f)(a', b) === 11.0
    @test derivative(s -> sum(grad(a -> a * b)((s .* a)')), 1.0) == 0
end

# What is done with a row, some of which differs from what is done with a matrix of one row.
const OF_A_ROW = ("a number" => (r, b, m) -> r * b, "a vector" => (r, b, m) -> r' .* b, "its multiples" => (r, b, m) -> (2r - r / 2) * b,
    "a row" => (r, b, m) -> r * m, "a matrix" => (r, b, m) -> r .+ m, "an outer product" => (r, b, m) -> b * r)

# For each place of a row what is computed there, and the same in Julia alone.
no_rule(count) = (given...) -> Tuple(nothing for _ in 1:count)
of_rows(use) = (
    ("in a branch", (a, b, m) -> branch(b[1] .> 0, use, (r, b, m) -> use(2r, b, m), a', b, m), (a, b, m) -> use(b[1] > 0 ? a' : 2a', b, m)),
    ("captured by a branch", (a, b, m) -> (r = a'; branch(b[1] .> 0, b -> use(r, b, m), b -> use(2r, b, m), b)),
        (a, b, m) -> use(b[1] > 0 ? a' : 2a', b, m)),
    ("behind a branch", (a, b, m) -> use(branch(b[1] .> 0, a -> a', a -> 2a', a), b, m), (a, b, m) -> use(b[1] > 0 ? a' : 2a', b, m)),
    ("in a rule", (a, b, m) -> custom_rule(use; vjp=no_rule(3))(a', b, m), (a, b, m) -> use(a', b, m)),
    ("behind a rule", (a, b, m) -> use(custom_rule(a -> a'; vjp=no_rule(1))(a), b, m), (a, b, m) -> use(a', b, m)),
    ("in an opaque rule", (a, b, m) -> custom_rule(use; opaque=true)(a', b, m), (a, b, m) -> use(a', b, m)),
    ("behind an opaque rule", (a, b, m) -> use(custom_rule(a -> a'; opaque=true)(a), b, m), (a, b, m) -> use(a', b, m)),
    ("in a checkpoint", (a, b, m) -> checkpoint(use)(a', b, m), (a, b, m) -> use(a', b, m)),
    ("behind a checkpoint", (a, b, m) -> use(checkpoint(a -> a')(a), b, m), (a, b, m) -> use(a', b, m)),
    ("in a loop", (a, b, m) -> scan((r, t) -> (2r, sum(use(r, b, m))), a', nothing; length=2)[2],
        (a, b, m) -> [sum(use(a', b, m)), sum(use(2a', b, m))]),
    ("behind a loop", (a, b, m) -> use(scan((r, t) -> (2r, nothing), a', nothing; length=3, truncate=2)[1], b, m), (a, b, m) -> use(8a', b, m)),
    ("behind a while_loop", (a, b, m) -> use(while_loop(r -> sum(r) .< 5, r -> 2r, a'), b, m), (a, b, m) -> use(2a', b, m)),
    ("behind a vjp", (a, b, m) -> use(vjp(a -> a', a)[1], b, m), (a, b, m) -> use(a', b, m)),
    ("behind a compiled function", (a, b, m) -> use(compile(a -> a')(a), b, m), (a, b, m) -> use(a', b, m)))

@testset "the transpose of a vector stays one: $what" for (what, use) in OF_A_ROW
    a, m = [1.0, 2.0], [1.0 2.0; 3.0 5.0]
    for (place, f, plain) in of_rows(use)
        compiled = compile(f)
        for b in ([3.0, 4.0], [-3.0, 4.0]), found in (f(a, b, m), compiled(a, b, m), compiled(a, b, m),
                compile(f; techniques=Techniques(replay=false))(a, b, m), compile(f; techniques=Techniques(fuse=false))(a, b, m))
            expected = plain(a, b, m)
            @test (place, size(found), found ≈ expected) == (place, size(expected), true)
        end
    end
end

@testset "derivatives with the transpose of a vector: $place" for (place, f) in (
        ("branch", (a, b) -> branch(b[1] .> 0, (r, b) -> r * b, (r, b) -> 2r * b, a', b)),
        ("captured", (a, b) -> (r = a'; branch(b[1] .> 0, b -> r * b, b -> 2r * b, b))),
        ("rule", custom_rule((a, b) -> a * b; vjp=(g, y, a, b) -> (g * b', (g * a)'), jvp=(t, y, a, b) -> t[1] * b + a * t[2])),
        ("opaque", custom_rule((a, b) -> a * b; opaque=true, vjp=(g, y, a, b) -> (g * b', (g * a)'), jvp=(t, y, a, b) -> t[1] * b + a * t[2])),
        ("rule of a row", (a, b) -> custom_rule(r -> 2r; vjp=(g, y, r) -> (g * r') * r ./ (r * r'), jvp=(t, y, r) -> 2t[1])(a) * b),
        ("loop", (a, b) -> scan((r, t) -> (2r, r * b), a, nothing; length=1)[2][1]),
        ("rule in a loop", (a, b) -> scan((r, t) -> (r, custom_rule((r, b) -> r * b; vjp=(g, y, r, b) -> (g * b', (g * r)'),
            jvp=(t, y, r, b) -> t[1] * b + r * t[2])(r, b)), a, nothing; length=1)[2][1]),
        ("checkpoint", checkpoint((a, b) -> a * b)))
    a, b = [1.0, 2.0], [3.0, 4.0]
    plain = place in ("branch", "captured")
    given = plain ? a : a'
    derivatives = ((a, b) -> grad(f; argnums=(1, 2))(a, b), (a, b) -> (jvp(f, (a, b), (2 .* a, b))[2],))
    expected = (place == "rule of a row" ? (b' * a * a' ./ (a' * a), 2a) : (plain ? b : b', a), (place == "rule of a row" ? 66.0 : 33.0,))
    for (derivative, known) in zip(derivatives, expected), found in (derivative(given, b), compile(derivative)(given, b))
        @test all(size(x) == size(y) && x ≈ y for (x, y) in zip(found, known))
        @test all(x -> x isa Union{Real,Array}, found)
    end
end

@testset "a row on one side alone is refused" begin
    a, matrix = [1.0, 2.0], [1.0 2.0]
    both = compile(x -> branch(x[1] .> 0, x -> x', x -> permutedims(x), x))
    @test occursin("the transpose of a vector from the first function, and a matrix of one row from the second", message_of(() -> both(a)))
    @test occursin("the carry is the transpose of a vector and becomes a matrix of one row",
        message_of(() -> scan((r, t) -> (r .+ 1, nothing), a', nothing; length=2)))
    @test occursin("the carry is a matrix of one row and becomes the transpose of a vector",
        message_of(() -> while_loop(r -> sum(r) .< 5, r -> vec(r)' * 2, matrix)))
end
