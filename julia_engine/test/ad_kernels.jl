# The loops and functions behind the tape: accuracy, special values, no allocation.

using LinearAlgebra: LinearAlgebra, BLAS
using Random: MersenneTwister
using TwinGrad.AD: AD, Kernels, Memory, emit_elementwise!, emit_reduction!
using TwinGrad.NETWORK: NETWORK

"""The largest error in units of the last place, against a reference computed with 128 bits."""
function worst_error(f, reference, T, points)
    worst = 0.0
    setprecision(BigFloat, 128) do
        for p in points
            x = T(p)
            exact = reference(BigFloat(x))
            floatmin(T) < abs(exact) < floatmax(T) || continue
            worst = max(worst, Float64(abs(BigFloat(f(x)) - exact) / eps(T(exact))))
        end
    end
    return worst
end

between(a, b) = a .+ (b - a) .* ((0:499) .+ 0.37) ./ 500
const LOGISTIC = x -> 1 / (1 + exp(-x))

@testset "accuracy in units of the last place, $T" for (T, limit) in ((Float32, 2.5), (Float64, 3.0))
    wide = T === Float32 ? 87 : 700
    for (name, f, reference, points) in (
        ("exp", Kernels.fast_exp, exp, [between(-wide, wide); between(-1, 1)]),
        ("expm1", Kernels.fast_expm1, expm1, [between(-30, 60); between(-1, 1); between(-1e-4, 1e-4)]),
        ("log", Kernels.fast_log, log, [between(0.01, 4); exp.(between(-80, 80))]),
        ("log1p", Kernels.fast_log1p, log1p, [between(-0.9, 10); between(-1e-4, 1e-4)]),
        ("tanh", Kernels.fast_tanh, tanh, [between(-12, 12); between(-1, 1); between(-1e-4, 1e-4)]),
        ("sigmoid", Kernels.fast_sigmoid, LOGISTIC, between(-30, 30)),
        ("softplus", Kernels.fast_softplus, x -> log1p(exp(x)), between(-20, 20)),
        ("sin", Kernels.fast_sin, sin, [between(-7, 7); between(-1e6, 1e6)]),
        ("cos", Kernels.fast_cos, cos, [between(-7, 7); between(-1e6, 1e6)]),
        ("tan", Kernels.fast_tan, tan, between(-7, 7)))
        @test (name, worst_error(f, reference, T, points) <= limit) == (name, true)
    end
end

close(a::T, b::T) where {T} = isnan(b) ? isnan(a) : a == b || isapprox(a, b; rtol=4eps(T))

@testset "special values, $T" for T in (Float32, Float64)
    points = T[NaN, Inf, -Inf, 0, -0.0, 1, -1, floatmax(T), -floatmax(T), floatmin(T), nextfloat(zero(T)), 1000, -1000]
    total(f) = x -> try
        f(x)
    catch
        T(NaN)
    end
    for (name, f) in (("exp", exp), ("expm1", expm1), ("log", log), ("log1p", log1p), ("tanh", tanh), ("sqrt", sqrt),
        ("sin", sin), ("cos", cos), ("arcsin", asin), ("abs", abs), ("sign", sign), ("square", abs2))
        got = value(AD.TABLE[name](Constant(points)))
        expected = T[total(f)(x) for x in points]
        wrong = [(name, x, g, e) for (x, g, e) in zip(points, got, expected) if !close(g, e)]
        @test wrong == []
    end
    got = value(relu.(Constant(points)))
    @test isnan(got[1]) && got[2:3] == [Inf, 0]
    @test isnan(value(max.(Constant(T[NaN]), 1))[1]) && isnan(value(max.(1, Constant(T[NaN])))[1])
    @test value(sigmoid.(Constant(T[-1000, 1000, 0]))) == T[0, 1, 0.5]
    @test value(softplus.(Constant(T[-1000, 1000]))) == T[0, 1000]
    @test isequal(value(Constant(T[-8, -8, 0, 2]) .^ Constant(T[3, 0.5, 0, -1])), T[-512, NaN, 1, 0.5])
    @test only(value(logsumexp(Constant(T[-Inf, -Inf])))) == -Inf
    @test only(value(logsumexp(Constant(T[1000, 1000])))) ≈ 1000 + log(T(2))
    @test !any(isnan, value(softmax(Constant(T[1000, 0]))))
end

@testset "loops over any layout" begin
    seed = seeded(11)
    @info "random layouts" seed
    random = AD.MersenneTwister(seed)
    for trial in 1:draws(100)
        n = rand(random, 1:6)
        dims = rand(random, 1:3, n)
        base = randn(random, (2 .* dims)...)
        ranges = [rand(random, Bool) ? (1:1:d) : (2:2:2d) for d in dims]  # of one type, for each of which code is compiled
        a = view(base, (all(r -> step(r) == 1, ranges) ? [1:d for d in dims] : ranges)...)
        order = sortperm(rand(random, n))
        t = permutedims(Constant(a), order)
        plain = permutedims(Array(a), order)
        @test value(t .+ 1) == plain .+ 1
        @test value(copy(t)) == plain
        shrunk = randn(random, (rand(random, Bool) ? 1 : d for d in size(plain))...)
        @test value(t .* Constant(shrunk)) == plain .* shrunk
        over = [d for d in 1:n if rand(random, Bool)]
        @test value(sum(t; dims=Tuple(over))) ≈ sum(plain; dims=over)
        @test value(maximum(t; dims=Tuple(over))) == maximum(plain; dims=over)
        isempty(over) || @test value(softmax(t; dims=Tuple(over))) ≈ exp.(plain) ./ sum(exp.(plain); dims=over)
        isempty(over) || @test value(logsumexp(t; dims=Tuple(over))) ≈ log.(sum(exp.(plain); dims=over))
        isempty(over) || @test value(norm(t; dims=Tuple(over))) ≈ sqrt.(sum(abs2.(plain); dims=over))
        @test value(reshape(t, :)) == vec(plain)
    end
end

# What this machine has, and half of it: every tile is tried, and BLAS alone.
const has_bytes = Kernels.VECTOR_BYTES[]

@testset "products of any layout, $T, vectors of $bytes bytes" for T in (Float32, Float64), bytes in unique((0, min(32, has_bytes), has_bytes))
    Kernels.VECTOR_BYTES[] = bytes
    seed = seeded(12)
    @info "random products" seed
    random = AD.MersenneTwister(seed)
    lay(x) = rand(random, Bool) ? Constant(x) : permutedims(Constant(permutedims(x, (2, 1))), (2, 1))
    for trial in 1:draws(75)
        m, k, n = rand(random, (1, 2, 3, 7, 16, 33, 48, 64, 84, 112), 3)
        a, b, c = randn(random, T, m, k), randn(random, T, k, n), randn(random, T, m, n)
        @test value(lay(a) * lay(b)) ≈ a * b rtol = 100eps(T)
        f = compile((c, a, b) -> c .+ a' * b)
        @test f(c, permutedims(a), b) ≈ c .+ a * b rtol = 100eps(T)
        @test occursin("matmul_add", source(f))
    end
    a, b = randn(T, 20, 1200), randn(T, 1200, 400)  # more summands and columns than are done at once
    @test value(Constant(a) * b) ≈ a * b rtol = 1000eps(T)
    a, b = randn(T, 2048 ÷ sizeof(T), 150), randn(T, 150, 40)  # columns that share sets of a cache
    @test value(Constant(a) * b) ≈ a * b rtol = 1000eps(T)
    for k in (1, 30)  # few summands; with 30 the second-level cache does not hold those of all rows
        a, b = randn(T, 4500, k), randn(T, k, 13)
        @test value(Constant(a) * b) ≈ a * b rtol = 100eps(T)
    end
    w = randn(T, 48, 64) ./ 8
    powers = compile(v -> w' * (w * (w' * (w * (w' * (w * v))))))  # a weight that many products read transposed
    for samples in (1, 2, 16)
        v = randn(T, 64, samples)
        @test powers(v) ≈ (w' * w)^3 * v rtol = 1000eps(T)
    end
    a, b = randn(T, 3, 4, 5, 1), randn(T, 4, 2, 1, 6)
    product = value(matmul(Constant(a), Constant(b)))
    @test size(product) == (3, 2, 5, 6)
    @test all(product[:, :, i, j] ≈ a[:, :, i, 1] * b[:, :, 1, j] for i in 1:5, j in 1:6)
    a, b = randn(T, 32, 4, 5, 2), randn(T, 4, 35, 5, 1)
    product = value(matmul(Constant(a), permutedims(Constant(permutedims(b, (2, 1, 3, 4))), (2, 1, 3, 4))))
    @test all(product[:, :, i, j] ≈ a[:, :, i, j] * b[:, :, i, 1] for i in 1:5, j in 1:2)
    @test value(matmul(Constant(zeros(T, 2, 0)), Constant(zeros(T, 0, 3)))) == zeros(T, 2, 3)
    @test size(value(matmul(Constant(zeros(T, 0, 2)), Constant(zeros(T, 2, 3))))) == (0, 3)
    Kernels.VECTOR_BYTES[] = has_bytes
end

@testset "matrices are turned, $T, vectors of $bytes bytes" for T in (Float32, Float64, Int64), bytes in unique((0, min(32, has_bytes), has_bytes))
    Kernels.VECTOR_BYTES[] = bytes
    for (m, n) in ((16, 16), (17, 40), (84, 1014), (5, 33), (64, 1))
        x = rand(T, m, n, 2)
        @test value(copy(permutedims(Constant(x), (2, 1, 3)))) == permutedims(x, (2, 1, 3))
        y = view(x, 1:m-1, :, 1)
        @test value(copy(transpose(Constant(y)))) == permutedims(y)
    end
    Kernels.VECTOR_BYTES[] = has_bytes
end

@testset "sums of many elements keep their precision" begin
    x = fill(0.1f0, 10^6)
    @test only(value(sum(Constant(x)))) ≈ 10^5 * 1.0000000149 rtol = 1e-6
    # So do those of arrays that lie in another order, or are parts of larger ones.
    each, wide, deep = Float64(0.1f0), Constant(fill(0.1f0, 3, 10^6)), Constant(fill(0.1f0, 3, 3, 10^6))
    parts = (permutedims(Constant(fill(0.1f0, 10^6, 2))), wide[1:2, :], wide[1:2:3, :], deep[1:2, 1:2, :])
    for part in parts
        @test item(sum(part)) ≈ length(part) * each rtol = 1e-6
        @test all(isapprox.(value(sum(part; dims=1)), size(part, 1) * each; rtol=1e-6))
    end
    @test value(sum(parts[1]; dims=2)) ≈ fill(10^6 * each, 2, 1) rtol = 1e-6
    @test compile(x -> sum(x[1:2, :]))(value(wide)) ≈ 2e6 * each rtol = 1e-6
    logits = zeros(Float32, 3, 10^6)
    logits[1] = 1
    @test sum(Float64.(value(softmax(Constant(logits)[1:2, :]; dims=(1, 2))))) ≈ 1 rtol = 1e-6
end

# Wrapped in functions: `@allocated` in global scope counts the boxes of its own arguments.
allocated_by(program) = @allocated AD.execute!(program)

@testset "no instruction allocates, $T" for T in (Float32, Float64)
    for (name, op) in sort!(collect(AD.TABLE); by=first)
        op.elementwise || continue
        inputs = [Memory(rand(T, 5, 3)) for _ in 1:3]
        count = name in ("clip", "where", "mul_add") ? 3 : length(op.overwrites) >= 2 || name in ("pow",) ? 2 : 1
        program = AD.Instructions()
        out = Memory(zeros(T, 5, 3))
        op.forward!(program, out, inputs[1:count], AD.NO_ATTRS)
        GC.@preserve inputs out program begin
            allocated_by(program)
            @test (name, allocated_by(program)) == (name, 0)
        end
    end
end

gathered(out, x, rows) = @allocated copy_columns!(out, x, rows, 2, 2)

@testset "samples are gathered into a batch" begin
    x, rows, out = rand(Float32, 3, 2, 5), [1, 4, 2, 5], zeros(Float32, 6, 2)
    gathered(out, x, rows)
    @test gathered(out, x, rows) == 0
    @test out == reshape(x[:, :, [4, 2]], 6, 2)
    @test_throws ShapeError copy_columns!(out, x, [6, 1])
    @test_throws ShapeError copy_columns!(out, x, [1, 1, 1])
end

@testset "no ambiguous methods" begin
    @test detect_ambiguities(AD) == []
end

@testset "what is interpreted" begin
    K = AD.Kernels
    switch() = unsafe_load(K.compile_switch())
    before = switch()
    loop(n) = sum(k -> k * k, 1:n)
    @test K.interpreting(() -> loop(10)) == 385
    @test K.interpreting(switch) == (TwinGrad.Versions.INTERPRETS ? K.INTERPRET : before)
    @test K.interpreting(() -> K.compiling(switch)) == (TwinGrad.Versions.INTERPRETS ? K.COMPILE : before)
    @test_throws DivideError K.interpreting(() -> div(1, 0))
    @test switch() == before
    if TwinGrad.Versions.INTERPRETS
        called = [x -> 3x]
        K.switched(() -> Base.invokelatest(called[1], 5), K.INTERPRET)
        code() = only(K.codes(first(methods(called[1]))))
        @test code().invoke != C_NULL && code().specptr == C_NULL  # interpreted
        @test K.compile_interpreted!() > 0 && code().invoke == C_NULL
        @test Base.invokelatest(called[1], 5) == 15 && any(c -> c.specptr != C_NULL, K.codes(first(methods(called[1]))))
        @test K.compile_interpreted!() < 10  # what it calls itself
        seconds, wanted = K.INTERPRETED_SECONDS[], K.WANTED[]
        for (spent, wish, found, then) in ((0.0, true, true, 0.0), (1.0, true, true, 1.0), (1.0, false, false, Inf),
                (0.0, false, false, 0.0), (11.0, true, false, Inf), (Inf, true, false, Inf))
            K.INTERPRETED_SECONDS[] = spent
            K.interpret(wish)
            @test (K.WANTED[], K.INTERPRETED_SECONDS[]) == (found, then)
        end
        K.INTERPRETED_SECONDS[], K.WANTED[] = seconds, wanted
    end
    for x in (fill(1.0f0, 3, 2), fill(7), Int64[], UInt8[1, 2])
        @test K.zeroed!(x) === x && all(iszero, x)
    end
    for bytes in (0, 1, K.HUGE_PAGE, 2 * K.HUGE_PAGE - 1, 2 * K.HUGE_PAGE, 5 * K.HUGE_PAGE + 3)
        x = fill(0x01, bytes)  # asked for late, pages keep what they have
        @test K.huge_pages!(x) === x && all(isequal(0x01), x)
        @test K.zeroed!(x) === x && all(iszero, x)
    end
    for n in (0, 1, 2, 7, 64)
        x = zeros(Int64, n + 1)
        GC.@preserve x K.fill_ones!(pointer(x), n)
        @test all(isequal(1), x[1:n]) && x[n+1] == 0
    end
end

# Another BLAS ------------------------------------------------------------------------------------------------------------

const LIBBLAS = TwinGrad.Versions.LIBBLAS
const MULTIPLIED, THREADS_OF_OTHER = Ref(0), Ref{Cint}(3)

"""Julia's own BLAS, as another one that counts."""
function counted_sgemm(ta::Ptr{UInt8}, tb::Ptr{UInt8}, m::Ptr{Int64}, n::Ptr{Int64}, k::Ptr{Int64}, alpha::Ptr{Float32},
        a::Ptr{Float32}, lda::Ptr{Int64}, b::Ptr{Float32}, ldb::Ptr{Int64}, beta::Ptr{Float32}, c::Ptr{Float32},
        ldc::Ptr{Int64}, ::Clong, ::Clong)
    MULTIPLIED[] += 1
    ccall((BLAS.@blasfunc(sgemm_), LIBBLAS), Cvoid, (Ptr{UInt8}, Ptr{UInt8}, Ptr{Int64}, Ptr{Int64}, Ptr{Int64}, Ptr{Float32},
        Ptr{Float32}, Ptr{Int64}, Ptr{Float32}, Ptr{Int64}, Ptr{Float32}, Ptr{Float32}, Ptr{Int64}, Clong, Clong), ta, tb, m, n,
        k, alpha, a, lda, b, ldb, beta, c, ldc, 1, 1)
    return nothing
end
set_threads_of_other(n::Cint) = (THREADS_OF_OTHER[] = n; nothing)
threads_of_other() = THREADS_OF_OTHER[]

@testset "products by another BLAS" begin
    # Three rows are less than a vector of them on any machine, and so no product by tiles.
    a, b = rand(MersenneTwister(1), Float32, 3, 900), rand(MersenneTwister(2), Float32, 900, 650)
    x, y = AD.symbol(Float32, [3, 900], "x"), AD.symbol(Float32, [900, 650], "y")
    product, nodes = AD.tracing(() -> x * y)
    tape = AD.Tape(AD.traced(nodes, AD.Tensor[x, y], AD.Tensor[product]))
    multiplied() = (copyto!(tape.inputs[1], a); copyto!(tape.inputs[2], b); AD.run!(tape); copy(tape.outputs[1]))
    expected, own = multiplied(), NETWORK.blas_threads()
    gemm = @cfunction(counted_sgemm, Cvoid, (Ptr{UInt8}, Ptr{UInt8}, Ptr{Int64}, Ptr{Int64}, Ptr{Int64}, Ptr{Float32},
        Ptr{Float32}, Ptr{Int64}, Ptr{Float32}, Ptr{Int64}, Ptr{Float32}, Ptr{Float32}, Ptr{Int64}, Clong, Clong))
    functions = (gemm, C_NULL, C_NULL, C_NULL, @cfunction(set_threads_of_other, Cvoid, (Cint,)),
        @cfunction(threads_of_other, Cint, ()))
    MULTIPLIED[] = 0
    try
        @test Kernels.use_blas!(UInt.(functions)) == (LinearAlgebra.BlasInt === Int64)
        @test multiplied() == expected
        @test MULTIPLIED[] > 0
        @test NETWORK.set_blas_threads(2) == 3 && NETWORK.blas_threads() == 2
        @test NETWORK.own_blas_threads() == own
    finally
        Kernels.use_blas!((0, 0, 0, 0, 0, 0))
    end
    count = MULTIPLIED[]
    @test multiplied() == expected && MULTIPLIED[] == count && NETWORK.blas_threads() == own
end
