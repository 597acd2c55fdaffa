# Compiled equals eager, checks included: integers out of range, and captured arrays that change between calls.

using TwinGrad.AD: AD, apply
using SparseArrays: sparse
using LinearAlgebra: Diagonal, Symmetric, UpperTriangular

const LOGITS = [0.5 -1.0 2.0 0.1; 1.5 0.3 -0.2 0.7; 0.1 0.9 0.4 -1.1]

"""For every op that checks integers: functions of an array and of integers up to `most`, with what a message calls them."""
const CHECKED = (
    ("softmax_cross_entropy", (x, i) -> softmax_cross_entropy(x, i), LOGITS, [1, 3, 2, 3], 3, LabelError),
    ("softmax_cross_entropy", (x, i) -> softmax_cross_entropy(reshape(x, 3, 2, 2), i), LOGITS, [1 3; 2 3], 3, LabelError),
    ("gather", (x, i) -> sum(x[:, i] .^ 2), LOGITS, [1, 4, 4], 4, ShapeError),
    ("gather", (x, i) -> sum(x[i, [1, 2]] .^ 2), LOGITS, [3, 1], 3, ShapeError),
    ("gather", (x, i) -> sum(gather(x, i; dims=1) .^ 2), LOGITS, [1 2; 3 3], 3, ShapeError),
    ("gather", (x, i) -> sum(vec(x)[i] .^ 2), LOGITS, [12, 1], 12, ShapeError),
    ("scatter", (x, i) -> sum(apply(AD.SCATTER, AD.Tensor[AD.as_tensor(x), AD.index_tensor(i)], AD.attributes(:axis => 2, :dims => [3, 6])) .^ 2),
        LOGITS, [6, 1, 2, 2], 6, ShapeError),
    ("embedding", (x, i) -> sum(embedding(x, i) .^ 2), LOGITS, [1, 4, 2], 4, ShapeError),
    ("embedding", (x, i) -> sum(embedding(x, i; padding_index=2) .^ 2), LOGITS, [1 4 2; 2 3 1], 4, ShapeError),
    ("embedding_gradient", (x, i) -> sum(embedding_gradient(x, i; vocabulary=5) .^ 2), LOGITS, [5, 1, 1, 2], 5, ShapeError))

with_bad(good, k, bad) = (i = copy(good); i[k] = bad; i)
in_layer(f) = (x, i) -> AD.scope(() -> f(x, i), "head")

"""Ways to run `f(x, i)` again and again, with `i` as an argument or captured, which each take the integers of a call."""
function ways(f, x, good)
    inside = copy(good)
    compiled = compile(f)
    gradient_ = compile(grad(f))
    captured, captured_gradient = compile(x -> f(x, inside)), compile(grad(x -> f(x, inside)))
    single = reshape(good, size(good)..., 1)
    looped = compile((x, is) -> scan((c, i) -> (c .+ f(x, i), nothing), 0.0, is)[1])
    looped_gradient = compile(grad((x, is) -> scan((c, i) -> (c .+ f(x, i), nothing), 0.0, is)[1]))
    checkpointed = compile(grad((x, i) -> checkpoint(x -> f(x, i))(x)))
    set!(run) = i -> (copyto!(inside, i); run(x))
    steps(run) = i -> run(x, cat(good, i; dims=ndims(good) + 1))
    return ("argument" => i -> compiled(x, i), "gradient" => i -> gradient_(x, i), "captured" => set!(captured),
        "captured, gradient" => set!(captured_gradient), "scan" => steps(looped), "scan, gradient" => steps(looped_gradient),
        "checkpoint" => i -> checkpointed(x, i))
end

@testset "integers out of range: $(name) of $(size(good))" for (name, f, x, good, most, kind) in CHECKED
    g = Hidden(in_layer(f))
    for (way, run) in ways(g, x, good)
        run(good)
        for bad in (0, -1, most + 1, typemax(Int), typemin(Int)), k in (1, length(good))
            integers = with_bad(good, k, bad)
            eager, replayed = error_of(() -> g(Constant(x), integers)), error_of(() -> run(integers))
            @test (way, typeof(eager), typeof(replayed)) == (way, kind, kind)
            @test occursin(string(bad), replayed.message) && occursin("in layer \"head\"", replayed.message)
            way in ("argument", "captured") && @test replayed.message == eager.message
        end
        @test (way, error_of(() -> run(good))) == (way, nothing)
        integers = clamp.(rand(AD.MersenneTwister(9), 1:most, size(good)...), 1, most)
        @test (way, error_of(() -> run(integers))) == (way, nothing)
    end
    message = message_of(() -> g(Constant(x), with_bad(good, length(good), 99)))
    where_ = ndims(good) == 1 ? string(length(good)) : name == "embedding" ? "sample 3 at position 2" : string(size(good))
    @test occursin(name, message) && occursin(where_, message)
end

@testset "a trainer checks labels and ids in every step, evaluation and partial batch" begin
    ids, labels = rand(AD.MersenneTwister(3), 1:9, 4, 23), rand(AD.MersenneTwister(4), 1:3, 23)
    trainer = Trainer(Chain(Embedding(9 => 4), Flatten(), Dense(16 => 3)); batch_size=5, threads=1)
    train_epoch!(trainer, ids, labels)
    evaluate(trainer, ids, labels)
    for k in (1, 23), bad in (0, 10)
        wrong_ids, wrong_labels = with_bad(ids, 4k, bad), with_bad(labels, k, bad)
        for run in (train_epoch!, evaluate, loss_and_gradients)
            @test occursin("token id $bad in sample $k", message_of(() -> run(trainer, wrong_ids, labels)))
            @test error_of(() -> run(trainer, ids, wrong_labels)) isa LabelError
        end
        @test occursin("token id $bad in sample $k", message_of(() -> predict(trainer, wrong_ids)))
    end
    chain_loss = compile((x, y) -> softmax_cross_entropy(trainer.chain(x), y))
    chain_loss(ids, labels)
    @test occursin("embedding in layer \"embedding\": token id 10 in sample 23 at position 4",
        message_of(() -> chain_loss(with_bad(ids, length(ids), 10), labels)))
    @test chain_loss(ids, labels) == chain_loss(ids, labels)
end

# Captured arrays ------------------------------------------------------------------------------------------------------

const GLOBAL_MASK = [true, false, true, true]
mutable struct Holder
    mask::Any
end

"""Ways to capture an array: `make(a)` returns what the function reads at its call, as `read()`."""
const CAPTURED = (
    ("a variable", a -> () -> a), ("a field", a -> (h = Holder(a); () -> h.mask)),
    ("a dictionary", a -> (d = Dict(1 => a); () -> d[1])),
    ("a tuple", a -> (t = (1, a); () -> t[2])), ("a reference", a -> (r = Ref(a); () -> r[])),
    ("a vector of arrays", a -> (v = [a]; () -> v[1])))

"""Arrays to capture, how each is changed, and a function of `x` (length 4) and of it."""
const USES = (
    ("truth values as an index", () -> [true, false, true, true], m -> (m[1] = false), (x, m) -> sum(x[m] .^ 2)),
    ("bits as an index", () -> BitVector([true, false, true, true]), m -> (m[2] = true), (x, m) -> sum(x[m] .^ 2)),
    ("a mask of another count", () -> trues(4), m -> (m .= [true, false, false, false]), (x, m) -> sum(x[m])),
    ("a matrix of truth values", () -> [true false; true true], m -> (m[1, 2] = true), (x, m) -> sum(reshape(x, 2, 2)[m] .^ 2)),
    ("a matrix of bits", () -> BitArray([true false; true true]), m -> (m[1, 1] = false),
        (x, m) -> sum(reshape(x, 2, 2)[m] .^ 2)),
    ("truth values as a condition", () -> [true, false, true, true], m -> (m[1] = false), (x, m) -> sum(ifelse.(m, x, 2 .* x))),
    ("bits as a factor", () -> BitVector([true, false, true, true]), m -> (m[4] = false), (x, m) -> sum(x .* m)),
    ("indices", () -> [1, 3, 3], m -> (m[1] = 4), (x, m) -> sum(x[m] .^ 2)),
    ("indices of 32 bits", () -> Int32[1, 3, 3], m -> (m[1] = 4), (x, m) -> sum(x[m] .^ 2)),
    ("unsigned indices", () -> UInt8[1, 3, 3], m -> (m[3] = 4), (x, m) -> sum(gather(x, m) .^ 2)),
    ("pairs of indices", () -> [CartesianIndex(1, 2), CartesianIndex(2, 2)], m -> (m[1] = CartesianIndex(2, 1)),
        (x, m) -> sum(reshape(x, 2, 2)[m] .^ 2)),
    ("labels", () -> [1, 2], m -> (m[1] = 2), (x, m) -> softmax_cross_entropy(reshape(x, 2, 2), m)),
    ("labels of 32 bits", () -> Int32[1, 2], m -> (m[1] = 2), (x, m) -> softmax_cross_entropy(reshape(x, 2, 2), m)),
    ("ids", () -> [1, 2, 2], m -> (m[3] = 1), (x, m) -> sum(embedding(reshape(x, 2, 2), m) .^ 2)),
    ("floats", () -> [1.0, 2, 3, 4], m -> (m[2] = 7), (x, m) -> sum(x .* m)),
    ("integers as a factor", () -> [1, 2, 3, 4], m -> (m[2] = 7), (x, m) -> sum(x .* m)),
    ("integers of 16 bits", () -> Int16[1, 2, 3, 4], m -> (m[2] = 7), (x, m) -> sum(x .+ m)),
    ("a view", () -> view([0.0, 1.0, 2, 3, 4], 2:5), m -> (m[2] = 7), (x, m) -> sum(x .* m)),
    ("a view by positions", () -> view([0.0, 1.0, 2, 3, 4], [5, 1, 2, 2]), m -> (m[2] = 7), (x, m) -> sum(x .* m)),
    ("a view of integers", () -> view([0, 1, 2, 3, 4], 2:5), m -> (m[2] = 7), (x, m) -> sum(x .* m)),
    ("a view of truth values", () -> view([true, true, false, true, true], 2:5), m -> (m[1] = false), (x, m) -> sum(x[m])),
    ("a transposed matrix", () -> transpose([1.0 2; 3 4]), m -> (m[1, 2] = 7), (x, m) -> sum(reshape(x, 2, 2) * m)),
    ("an adjoint", () -> [1.0 2; 3 4]', m -> (m[1, 2] = 7), (x, m) -> sum(reshape(x, 2, 2) .* m)),
    ("permuted axes", () -> PermutedDimsArray([1.0 2; 3 4], (2, 1)), m -> (m[1, 2] = 7), (x, m) -> sum(reshape(x, 2, 2) .* m)),
    ("a diagonal", () -> Diagonal([1.0, 2]), m -> (m.diag[1] = 7), (x, m) -> sum(reshape(x, 2, 2) * m)),
    ("a triangle", () -> UpperTriangular([1.0 2; 3 4]), m -> (m[1, 2] = 7), (x, m) -> sum(reshape(x, 2, 2) * m)),
    ("a symmetric matrix", () -> Symmetric([1.0 2; 2 4]), m -> (parent(m)[1, 2] = 7), (x, m) -> sum(reshape(x, 2, 2) * m)),
    ("a sparse matrix", () -> sparse([1.0 0; 0 4]), m -> (m[1, 2] = 7), (x, m) -> sum(reshape(x, 2, 2) * m)),
    ("reinterpreted", () -> reinterpret(Float64, [1, 2, 3, 4]), m -> (m[2] = 7.0), (x, m) -> sum(x .* m)),
    ("a tensor", () -> Constant([1.0, 2, 3, 4]), m -> assign!(m, [4.0, 3, 2, 1]), (x, m) -> sum(x .* m)),
    ("a tensor of indices", () -> Constant([1, 2, 2]), m -> (value(m)[1] = 4), (x, m) -> sum(x[m] .^ 2)),
    ("joined", () -> [1, 2, 3], m -> (m[1] = 9), (x, m) -> sum(vcat(x, m) .^ 2)),
    ("a product with integers", () -> [1 2; 3 4], m -> (m[1] = 9), (x, m) -> sum(reshape(x, 2, 2) * m)),
    ("what a loop reads", () -> [true, true, false], m -> (m[1] = false),
        (x, m) -> sum(scan((c, t) -> (c .* 2 .+ t, nothing), x, ifelse.(m, 1.0, 3.0 .+ sum(x)))[1])),
    ("in a loop's step", () -> [true, false, true, true], m -> (m[1] = false),
        (x, m) -> sum(scan((c, _) -> (ifelse.(m, c, 2 .* c), nothing), x, nothing; length=3)[1])),
    ("the sequence of a loop", () -> Int32[1, 2, 3], m -> (m[1] = 4),
        (x, m) -> sum(scan((c, i) -> (c .+ x[i], nothing), zeros(4), m)[1])),
    ("in a checkpoint", () -> [true, false, true, true], m -> (m[1] = false),
        (x, m) -> sum(checkpoint(t -> ifelse.(m, t, t .^ 2))(x))),
    ("as the result", () -> [true, false, true, true], m -> (m[1] = false),
        (x, m) -> (sum(x), m)[1] * 1.0 + sum(Constant([1.0, 2, 3, 4])[m])))

@testset "captured: $name" for (name, make, change!, use) in USES
    x, f = [0.5, -1.5, 2.0, 0.25], Hidden(use)
    for (way, capture) in (name in ("truth values as an index", "indices of 32 bits") ? CAPTURED : CAPTURED[1:1])
        array = make()
        read = Hidden(capture(array))
        value_, gradient_ = compile(x -> f(x, read())), compile(grad(x -> f(x, read())))
        into, room = compile(x -> f(x, read()) .* x), zeros(4)
        eager(x, array) = (y = f(Constant(x), array); y isa Tensor ? item(y) : y)
        for _ in 1:2
            before = eager(x, array)
            for _ in 1:2
                @test (way, value_(x)) == (way, before)
                @test (way, gradient_(x)) == (way, grad(x -> f(x, array))(x))
                @test (way, run!(room, into, x)) == (way, before .* x)
            end
            change!(array)
            changed = eager(x, array)
            @test (way, value_(x)) == (way, changed)
            @test (way, gradient_(x)) == (way, grad(x -> f(x, array))(x))
            @test (way, run!(room, into, x)) == (way, changed .* x)
        end
        @test (name, eager(x, array) != eager(x, make())) == (name, true)
    end
end

@testset "a global mask, and one that grows" begin
    f = compile(x -> sum(x[GLOBAL_MASK]))
    @test f([1.0, 2, 3, 4]) == 8
    GLOBAL_MASK[2] = true
    @test f([1.0, 2, 3, 4]) == 10
    mask = [true, false]
    g = compile(x -> sum(x[mask]))
    @test g([1.0, 2]) == 1
    push!(mask, true)
    @test error_of(() -> g([1.0, 2])) isa ShapeError
    @test g([1.0, 2, 3]) == 4
end

@testset "replays with converted arrays allocate nothing, and a tape of one's own refuses what changed" begin
    mask, factor, weights = trues(400), Int32.(1:400), transpose(reshape(collect(1.0:400), 20, 20))
    f = compile(x -> ifelse.(mask, x .* factor, reshape(reshape(x, 20, 20) * weights, 400)))
    x, out = collect(1.0:400), zeros(400)
    f(x)
    run!(out, f, x)
    tape = first(values(f.tapes))[1]
    checked(tape, n) = (all_ = true; for _ in 1:n; all_ &= AD.is_current(tape); end; all_)
    measured(tape, n) = compiling(() -> @allocated checked(tape, n))
    @test length(tape.converted) == 3 && checked(tape, 3)
    measured(tape, 1)
    @test measured(tape, 1000) == measured(tape, 1)
    mask[7] = false
    @test occursin("was changed since the function was traced", message_of(() -> tape(x)))
    @test f(x)[7] != x[7] * 7 && f(x)[8] == x[8] * 8
end

@testset "what has no Int64 is refused by astype, eagerly and in every replay: $T" for T in (Float32, Float64)
    f(x) = AD.scope(() -> astype(x, Int64), "head")
    good = T[-2.7 0.5 1e6; 2.7 -0.0 -1e18; 1 2 -T(2)^63; 4 5 prevfloat(T(2)^63)]
    views = (identity, transpose, x -> x[2:3, :], x -> x[1:2:4, [3, 1]],
        x -> permutedims(reshape(x, 1, 2, 2, 1, 3), (5, 2, 1, 4, 3)))
    for seen in views, (way, run) in (("eager", g -> x -> value(g(Constant(x)))), ("compiled", compile),
            ("scan", g -> compile(x -> selectdim(scan((c, x) -> (c, astype(g(x), T)), T(0), reshape(x, 4, 3, 1))[2],
                ndims(seen(x)) + 1, 1))))
        replay = run(x -> f(seen(x)))
        @test (way, replay(good)) == (way, trunc.(Int64, seen(good)))
        for bad in (NaN, Inf, -Inf, 2.0^63, -1.5 * 2.0^63)
            x = seen === views[3] || seen === views[4] ? fill(T(bad), size(good)) : with_bad(good, 5, T(bad))
            error = error_of(() -> replay(x))
            @test (way, typeof(error)) == (way, DTypeError)
            @test startswith(error.message, "astype in layer \"head\": $(T(bad)) is no Int64")
        end
        @test (way, replay(good)) == (way, trunc.(Int64, seen(good)))
    end
    @test occursin("is no Int64", message_of(() -> Int64.(Constant(T[1e30]))))
end

@testset "the mean loss of no samples is NaN: $loss, $kinds" for (loss, targets, kinds) in (
        (softmax_cross_entropy, Int[], NamedTuple()), (softmax_cross_entropy, Int[], (weight=ones(3),)),
        (softmax_cross_entropy, Int[], (label_smoothing=0.1,)), (softmax_cross_entropy, Int[], (ignored=1,)),
        (AD.FUNCTIONS["binary_cross_entropy"], zeros(3, 0), NamedTuple()),
        (AD.FUNCTIONS["mean_squared_error"], zeros(3, 0), NamedTuple()))
    f(x) = loss(x, targets; kinds...)
    @test isnan(value(f(Constant(zeros(3, 0))))[]) && isnan(compile(f)(zeros(3, 0)))
    @test grad(f)(zeros(3, 0)) == zeros(3, 0) == compile(grad(f))(zeros(3, 0))
    total(x) = loss(x, targets; reduction=:sum, kinds...)
    @test value(total(Constant(zeros(3, 0))))[] == 0 == compile(total)(zeros(3, 0))
    many = vmap(x -> f(reshape(x, 3, 0)))
    @test all(isnan, many(zeros(0, 2))) && all(isnan, compile(many)(zeros(0, 2)))
end
