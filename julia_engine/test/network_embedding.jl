# Embeddings, frozen parameters and state, normalisation, radial basis functions.

using TwinGrad.NETWORK: NETWORK, takes_ids, trained_tensors
using TwinGrad.AD: AD
using Random: MersenneTwister

"""Chains of Float64 whose values, but those of a variance, are all random."""
function lively_chain(layers...; seed=0)
    chain, random = Chain(layers...; seed=seed, dtype=Float64), MersenneTwister(seed)
    for name in keys(chain.parameters)
        a = chain.parameters[name]
        a .= endswith(name, "running_var") ? 0.5 .+ rand(random, size(a)...) : randn(random, size(a)...) ./ 2
    end
    return chain
end

texts(random, samples; vocabulary=9, length=6) = rand(random, 1:vocabulary, length, samples)

@testset "a lookup and its gradient, padding=$padding" for padding in (0, 4)
    random = MersenneTwister(3)
    weight, ids = randn(random, 3, 5), [1 4 4; 5 4 1]
    y = embedding(weight, ids; padding_index=padding)
    @test value(y) == weight[:, ids] && size(y) == (3, 2, 3)
    g = randn(random, 3, 2, 3)
    expected = zeros(3, 5)
    for i in CartesianIndices(ids)
        ids[i] == padding || (expected[:, ids[i]] .+= g[:, i])
    end
    @test value(embedding_gradient(g, ids; vocabulary=5, padding_index=padding)) ≈ expected
    @test gradient(w -> sum(embedding(w, ids; padding_index=padding) .* g), weight)[1] ≈ expected
    # Derivatives of derivatives, and forward mode: with padding they are those of a function that holds that column still.
    t = randn(random, 3, 5)
    held = copy(t)
    padding == 0 || (held[:, padding] .= 0)
    @test value(jvp(w -> embedding(w, ids; padding_index=padding), (weight,), (t,))[2]) ≈ held[:, ids]
    back(u) = gradient(x -> sum(embedding_gradient(x, ids; vocabulary=5, padding_index=padding) .* u), g)[1]
    @test back(t) ≈ held[:, ids]
    padding == 0 && gradcheck((w, v) -> sum(embedding(w, ids) .* v .^ 2), weight, g)
    compiled = compile(w -> embedding(w, ids; padding_index=padding) .* 2)
    @test compiled(weight) == 2 .* weight[:, ids]
end

@testset "ids that can't be" begin
    text = message_of(() -> embedding(zeros(3, 5), [1 2; 3 6]))
    @test occursin("token id 6 in sample 2 at position 2 is not one of the 5", text)
    @test occursin("integers", message_of(() -> embedding(zeros(3, 5), [1.0, 2.0])))
    @test occursin("matrix", message_of(() -> embedding(zeros(3), [1, 2])))
    @test occursin("padding_index", message_of(() -> embedding(zeros(3, 5), [1, 2]; padding_index=6)))
    @test occursin("vocabulary => dimension", message_of(() -> Embedding(5)))
    @test occursin("from 1 to 5", message_of(() -> Embedding(5 => 2; padding_index=6)))
    trainer = Trainer(Chain(Embedding(9 => 2), Flatten(), Dense(12 => 2)); batch_size=4, threads=1)
    x, y = texts(MersenneTwister(1), 8), rand(MersenneTwister(2), 1:2, 8)
    before = copy(trainer.vector)
    bad = copy(x)
    bad[3, 7] = 10
    for f in (() -> train_epoch!(trainer, bad, y), () -> predict(trainer, bad), () -> evaluate(trainer, bad, y))
        @test occursin("token id 10 in sample 7 at position 3 is not one of the 9", message_of(f))
    end
    @test occursin("token ids", message_of(() -> train_epoch!(trainer, Float32.(x), y)))
    @test trainer.vector == before
end

text_layers(; options...) = (Embedding(9 => 4; name="e", options...), PermuteDims(2, 1), Conv1D(4 => 3, 3, relu; name="c"),
    Flatten(), Dense(12 => 1; name="d"))

"""Parameters after two epochs over the same texts."""
function read_texts(layers...; optimizer=Adam(0.05), options...)
    random = MersenneTwister(5)
    x, y = texts(random, 26), rand(random, [0.0, 1.0], 1, 26)
    chain = lively_chain(layers...; seed=2)
    start = as_dict(chain.parameters)
    trainer = Trainer(chain; loss="binary_cross_entropy", optimizer=optimizer, batch_size=8, options...)
    losses = [train_epoch!(trainer, x, y); train_epoch!(trainer, x, y)]
    return start, as_dict(chain.parameters), losses, trainer
end

@testset "gradients by columns are gradients, $(typeof(o))" for o in (SGD(0.1), SGD(0.1; momentum=0.9), Adam(0.05),
        Adam(0.05; weight_decay=0.1), AdamW(0.05), RMSProp(0.01), Adam(0.05; clip_norm=0.1)), padding in (nothing, 3)

    _, expected, losses, plain = read_texts(text_layers(padding_index=padding)...; optimizer=o, threads=1,
        techniques=Techniques(sparse_columns=false))
    @test !plain.sparse
    for threads in unique((1, Threads.nthreads()))
        _, found, its_losses, trainer = read_texts(text_layers(padding_index=padding)...; optimizer=o, threads=threads)
        @test trainer.sparse == (o.clip_norm == Inf)
        @test its_losses ≈ losses rtol = 1e-10
        @test all(isapprox(found[name], expected[name]; rtol=1e-9) for name in keys(expected))
    end
end

@testset "every technique reads texts alike" begin
    _, expected, losses, _ = read_texts(text_layers()...; threads=1)
    for name in fieldnames(Techniques)
        how = Techniques(; NamedTuple{(name,)}((false,))...)
        _, found, its_losses, _ = read_texts(text_layers()...; threads=Threads.nthreads(), techniques=how)
        @test (name, isapprox(its_losses, losses; rtol=1e-9)) == (name, true)
        @test (name, all(isapprox(found[n], expected[n]; rtol=1e-8) for n in keys(expected))) == (name, true)
    end
end

@testset "clipping may be switched on between epochs" begin
    random = MersenneTwister(6)
    x, y = texts(random, 16), rand(random, [0.0, 1.0], 1, 16)
    after(sparse) = begin
        chain = lively_chain(text_layers()...; seed=2)
        trainer = Trainer(chain; loss="binary_cross_entropy", optimizer=SGD(0.1), batch_size=8, threads=1,
            techniques=Techniques(sparse_columns=sparse))
        train_epoch!(trainer, x, y)
        trainer.optimizer.clip_norm = 0.01
        train_epoch!(trainer, x, y)
        trainer.optimizer.clip_norm = Inf
        train_epoch!(trainer, x, y)
        copy(trainer.vector)
    end
    @test after(true) ≈ after(false) rtol = 1e-10
end

@testset "a column's gradient that is not finite stops the step" begin
    random = MersenneTwister(7)
    x, y = texts(random, 16), rand(random, Float32[0, 1], 1, 16)
    chain = Chain(text_layers()...; seed=2)
    trainer = Trainer(chain; loss="binary_cross_entropy", optimizer=Adam(0.1), batch_size=8, threads=Threads.nthreads())
    train_epoch!(trainer, x, y)
    kept = chain.parameters["d.weight"][1]
    chain.parameters["d.weight"][1] = NaN32
    before = copy(chain.parameters["e.weight"])
    @test occursin("step 1 of the epoch", message_of(() -> train_epoch!(trainer, x, y)))
    @test chain.parameters["e.weight"] == before
    chain.parameters["d.weight"][1] = kept
    @test all(isfinite, train_epoch!(trainer, x, y))
end

allocated_by(trainer, x, y, order, losses) = compiling(() -> @allocated train_epoch!(trainer, x, y, order, losses))

@testset "reading texts allocates nothing" begin
    random = MersenneTwister(8)
    x, y, order, losses = texts(random, 40), rand(random, Float32[0, 1], 1, 40), collect(1:40), zeros(5)
    trainer = Trainer(Chain(text_layers()...); loss="binary_cross_entropy", optimizer=Adam(0.01), batch_size=8, threads=1)
    train_epoch!(trainer, x, y, order, losses)
    allocated_by(trainer, x, y, order, losses)
    @test allocated_by(trainer, x, y, order, losses) == 0
end

@testset "what is frozen stays, $(typeof(o))" for o in (SGD(0.1; weight_decay=0.5), Adam(0.1; weight_decay=0.5), AdamW(0.1)),
        threads in unique((1, Threads.nthreads()))
    start, found, _, trainer = read_texts(text_layers(trainable=false)...; optimizer=o, threads=threads)
    @test found["e.weight"] == start["e.weight"] && found["c.weight"] != start["c.weight"]
    layout = trainer.parameters.layout
    @test layout.names == ["c.weight", "c.bias", "d.weight", "d.bias", "e.weight"] && layout.trained == layout.offsets[5]
    @test length(trainer.gradient) == layout.trained && length(trained_tensors(trainer.parameters)) == 4
    x, y = texts(MersenneTwister(1), 4), [0.0 1.0 0.0 1.0]
    gradients = loss_and_gradients(trainer, x, y)[2]
    @test sort!(collect(keys(gradients))) == ["c.bias", "c.weight", "d.bias", "d.weight"]
    @test Set(keys(gradient(m -> sum(m(x)), trainer.chain))) == Set(keys(gradients))
    @test trainer.parameters["e.weight"] == start["e.weight"]
end

@testset "the ids' layers come first" begin
    @test takes_ids(Chain(Reshape(2, 3), PermuteDims(2, 1), Embedding(9 => 4))) && !takes_ids(Chain(Dense(2 => 2)))
    @test occursin("token ids", message_of(() -> Chain(Dense(6 => 6), Embedding(9 => 4))(zeros(Float32, 6, 2))))
    x = rand(MersenneTwister(1), 1:9, 6, 5)
    chain = lively_chain(Reshape(2, 3), PermuteDims(2, 1), Embedding(9 => 4; name="e"))
    @test value(chain(x)) == chain.parameters["e.weight"][:, permutedims(reshape(x, 2, 3, 5), (2, 1, 3))]
    @test occursin("each axis of a sample once", message_of(() -> PermuteDims(1, 1)))
    @test occursin("2 axes", message_of(() -> Chain(PermuteDims(2, 1))(zeros(Float32, 3, 4))))
end

# Looks up vectors by an embedding that it holds.
struct Words <: NETWORK.Layer
    held::Vector{Embedding}
    name::Union{Nothing,String}
end
Words(; options...) = Words([Embedding(5 => 2; options...)], "words")
NETWORK.takes_ids(::Words) = true
NETWORK.parameters(layer::Words) = NETWORK.parameters(layer.held[1])
NETWORK.output_size(::Words, input::Vector{Int}) = [2; input]
NETWORK.forward(layer::Words, x::AD.Tensor, parameters::Dict{String,AD.Tensor}, training::Bool) =
    NETWORK.forward(layer.held[1], x, parameters, training)

# Looks up vectors that are no parameter.
struct Fixed{F} <: NETWORK.Layer
    f::F
    name::Union{Nothing,String}
end
NETWORK.output_size(::Fixed, input::Vector{Int}) = [2; input]
NETWORK.forward(layer::Fixed, x::AD.Tensor, parameters::Dict{String,AD.Tensor}, training::Bool) = layer.f(x)

# A part of the ids of each sample.
struct PartOf <: NETWORK.Layer
    part::UnitRange{Int}
    name::Union{Nothing,String}
end
NETWORK.only_moves(::PartOf) = true
NETWORK.output_size(layer::PartOf, ::Vector{Int}) = [length(layer.part)]
NETWORK.forward(layer::PartOf, x::AD.Tensor, ::Dict{String,AD.Tensor}, ::Bool) = x[layer.part, :]

# The same ids go to an embedding of more of them.
beside(layer) = Graph(Embedding(10 => 2; name="large"), layer, Concat(2; name="both"), Flatten(), Dense(12 => 2);
    inputs=Dict("words" => ["input"], "both" => ["large", "words"]))
const FIXED = ones(Float32, 2, 5)

@testset "ids that a layer of the user's looks up are checked before anything is trained: $place" for (place, chain) in (
        ("held", () -> Chain(Words(), Flatten(), Dense(6 => 2))),
        ("held, not trained", () -> Chain(Words(; trainable=false), Flatten(), Dense(6 => 2))),
        ("held, beside another", () -> beside(Words())),
        ("held, not trained, beside another", () -> beside(Words(; trainable=false))),
        ("an op", () -> beside(Fixed(x -> embedding(FIXED, x), "words"))),
        ("columns", () -> beside(Fixed(x -> Constant(FIXED)[:, x], "words"))))
    for how in (Techniques(), Techniques(replay=false), Techniques(batched=false)), bad in (0, 6, 8)
        trainer = Trainer(chain(); batch_size=4, threads=1, techniques=how)
        x, y = [1 + (i + 3k) % 5 for i in 1:3, k in 1:8], repeat([1, 2], 4)
        train_epoch!(trainer, x, y)
        before = copy(trainer.vector)
        x[2, 7] = bad
        named = bad == 0 && "large" in trainer.chain.ids ? "large" : "words"
        for f in (() -> train_epoch!(trainer, x, y), () -> evaluate(trainer, x, y), () -> predict(trainer, x))
            @test occursin("layer \"$named\": token id $bad in sample 7 at position 2", message_of(f))
        end
        @test occursin("the model takes token ids", message_of(() -> train_epoch!(trainer, Float32.(x), y)))
        @test trainer.vector == before
    end
end

@testset "each embedding is asked for the ids that it reads, in every part of many samples" begin
    graph = Graph(PartOf(1:1, "left"), Embedding(10 => 2; name="large"), PartOf(2:3, "right"), Embedding(5 => 2; name="small"),
        Concat(2; name="both"), Flatten(), Dense(6 => 2); inputs=Dict("right" => ["input"], "both" => ["large", "small"]))
    trainer = Trainer(graph; batch_size=1500, threads=min(2, Threads.nthreads()))
    x, y = repeat([10, 1, 5], 1, 3000), repeat([1, 2], 1500)
    train_epoch!(trainer, x, y)
    for sample in (1, 999, 1000, 1001, 2500, 3000)
        bad = copy(x)
        bad[3, sample] = 6
        @test occursin("layer \"small\": token id 6 in sample $sample at position 2", message_of(() -> train_epoch!(trainer, bad, y)))
    end
    @test occursin("Int64", message_of(() -> train_epoch!(Trainer(Chain(Flatten(), Dense(3 => 2))), x, y)))
    held = Trainer(Chain(Fixed([Embedding(5 => 2)], "words")))
    @test occursin("has a method of NETWORK.takes_ids", message_of(() -> train_epoch!(held, x, y)))
end

# Normalisation ----------------------------------------------------------------------------------------------------------

average(x, axes) = sum(x; dims=axes) ./ prod(size(x)[collect(axes)])

@testset "batch normalisation of $(size(x))" for x in (randn(MersenneTwister(1), 3, 7), randn(MersenneTwister(2), 4, 3, 7),
    randn(MersenneTwister(3), 2, 4, 3, 7))
    axes = Tuple(setdiff(1:ndims(x), ndims(x) - 1))
    over(v) = reshape(v, ntuple(d -> d == ndims(x) - 1 ? 3 : 1, ndims(x)))
    chain = lively_chain(BatchNorm(3; momentum=0.3, name="b"); seed=4)
    p = as_dict(chain.parameters)
    m, v = average(x, axes), average((x .- average(x, axes)) .^ 2, axes)
    n = length(x) ÷ 3
    @test value(chain(x; training=true)) ≈ (x .- m) ./ sqrt.(v .+ 1e-5) .* over(p["b.scale"]) .+ over(p["b.shift"])
    now = as_dict(chain.parameters)
    @test now["b.running_mean"] ≈ 0.7 .* p["b.running_mean"] .+ 0.3 .* vec(m)
    @test now["b.running_var"] ≈ 0.7 .* p["b.running_var"] .+ 0.3 .* vec(v) .* (n / (n - 1))
    @test value(chain(x)) ≈ (x .- over(now["b.running_mean"])) ./ sqrt.(over(now["b.running_var"]) .+ 1e-5) .*
        over(p["b.scale"]) .+ over(p["b.shift"])
    @test as_dict(chain.parameters) == now  # evaluation changes nothing
    arrays = [copy(chain.parameters[name]) for name in keys(chain.parameters)]
    for training in (true, false)
        f(x, scale, shift) = NETWORK.applied(chain,
            AD.Tensor[AD.as_tensor(scale), AD.as_tensor(shift), chain.parameters.tensors[3:4]...], AD.as_tensor(x), training)
        gradcheck(f, x, arrays[1], arrays[2])
    end
end

@testset "batch normalisation in training, $T" for T in (Float32, Float64)
    random = MersenneTwister(9)
    x, y = randn(random, T, 5, 30), rand(random, 1:3, 30)
    make() = Chain(Dense(5 => 4; name="a"), BatchNorm(4; name="b"), Dense(4 => 3; name="c"); seed=1, dtype=T)
    chain, eager = make(), make()
    trainer = Trainer(chain; optimizer=SGD(0.1), batch_size=10, threads=Threads.nthreads())
    losses = train_epoch!(trainer, x, y)
    @test length(trainer.plans[10, Threads.nthreads()]) == Threads.nthreads()  # the parts meet where they sum over the batch
    for step in 1:3
        columns = 10step-9:10step
        found = gradient(m -> softmax_cross_entropy(m(x[:, columns]; training=true), y[columns]), eager)
        for name in keys(found)
            eager.parameters[name] .-= T(0.1) .* found[name]
        end
    end
    @test all(isapprox(as_dict(chain.parameters)[k], v; rtol=1e-4, atol=1e-7) for (k, v) in as_dict(eager.parameters))
    before = as_dict(chain.parameters)
    loss_and_gradients(trainer, x, y)
    evaluate(trainer, x, y)
    @test as_dict(chain.parameters) == before
    bad = copy(x)
    bad[2, 3] = NaN
    @test_throws NonFiniteError train_epoch!(trainer, bad, y)
    @test as_dict(chain.parameters) == before  # running statistics, too
    other = Chain(Dense(5 => 4; name="a"), BatchNorm(4; name="b"), Dense(4 => 3; name="c"); seed=1, dtype=T)
    how = Techniques(replay=false)
    found = train_epoch!(Trainer(other; optimizer=SGD(0.1), batch_size=10, threads=1, techniques=how), x, y)
    @test isapprox(found, losses; rtol=8 * eps(T))  # the parts of a batch add up in another order
    @test other.parameters["b.running_var"] ≈ before["b.running_var"]
    for (threads, most) in ((1, 0), (Threads.nthreads(), 4000))  # a parallel region for the call, however many steps it has
        order, room, trainer = repeat(1:30, 20), zeros(60), Trainer(make(); batch_size=10, threads=threads)
        train_epoch!(trainer, x, y, order, room)
        allocated_by(trainer, x, y, order, room)
        @test allocated_by(trainer, x, y, order, room) <= most
    end
    @test occursin("more than one value", message_of(() -> train_epoch!(trainer, x[:, 1:21], y[1:21])))
    @test occursin("batched", message_of(() -> Trainer(chain; threads=1, techniques=Techniques(batched=false))))
end

@testset "the parts of a normalised batch meet, $(length(sizes)) axes" for sizes in ([6], [7, 6], [5, 4, 6])
    random, threads = MersenneTwister(3), Threads.nthreads()
    x, y = randn(random, sizes..., 46), rand(random, 1:3, 46)
    make() = Chain(BatchNorm(6), Activation(tanh), BatchNorm(6), Flatten(), Dense(prod(sizes) => 3); seed=2, dtype=Float64)
    new_trainer(threads) = Trainer(make(); optimizer=Adam(0.01; clip_norm=1.0), batch_size=11, threads=threads)
    whole, split, again = new_trainer(1), new_trainer(threads), new_trainer(threads)
    expected, found = train!(whole, x, y; epochs=3), train!(split, x, y; epochs=3)
    @test found ≈ expected && train!(again, x, y; epochs=3) == found  # the same bits at every run
    @test all(isapprox(as_dict(split.parameters)[k], v; rtol=1e-9, atol=1e-12) for (k, v) in as_dict(whole.parameters))
    @test as_dict(split.parameters) == as_dict(again.parameters)
    @test length(split.plans[11, threads]) == threads && length(split.plans[2, 1]) == 1
    meetings(shard) = sum(e.op === NETWORK.SUM_OF_PARTS for e in shard.tape.program.equations)
    @test all(threads == 1 ? meetings(shard) == 0 : meetings(shard) >= 6 for shard in split.plans[11, threads])
    # Inside a parallel region of the user's there are no threads to meet: the batch stays whole.
    inside, losses = new_trainer(threads), zeros(5)
    Threads.@threads for k in 1:threads
        k == 1 && train_epoch!(inside, x, y, collect(1:46), losses)
    end
    @test losses ≈ train_epoch!(new_trainer(1), x, y)
    # A thread that fails lets the others go, and says why; the next call is as if nothing had been.
    bad = copy(x)
    bad[1] = NaN  # in the first step
    before = as_dict(split.parameters)
    @test_throws NonFiniteError train_epoch!(split, bad, y)
    @test as_dict(split.parameters) == before
    @test train_epoch!(split, x, y) ≈ train_epoch!(whole, x, y)
end

@testset "layer normalisation and RBF" begin
    x = randn(MersenneTwister(1), 4, 3, 5)
    chain = lively_chain(LayerNorm(4; name="l"))
    scale, shift = chain.parameters["l.scale"], chain.parameters["l.shift"]
    m = average(x, (1,))
    v = average((x .- m) .^ 2, (1,))
    @test value(chain(x)) ≈ (x .- m) ./ sqrt.(v .+ 1e-5) .* scale .+ shift
    f(x, scale, shift) = NETWORK.applied(chain, AD.Tensor[AD.as_tensor(scale), AD.as_tensor(shift)], AD.as_tensor(x), true)
    gradcheck(f, x, copy(scale), copy(shift))

    chain = lively_chain(RBF(4 => 2; name="r"))
    c, beta = chain.parameters["r.centers"], chain.parameters["r.beta"]
    @test size(c) == (4, 2) && size(chain(x)) == (2, 3, 5)
    @test value(chain(x))[2, 3, 1] ≈ exp(-beta[2] * sum(abs2, x[:, 3, 1] .- c[:, 2]))
    h(x, c, beta) = NETWORK.applied(chain, AD.Tensor[AD.as_tensor(c), AD.as_tensor(beta)], AD.as_tensor(x), true)
    gradcheck(h, x, copy(c), copy(beta))
    @test occursin("(4, ...)", message_of(() -> RBF(4 => 2) |> layer -> Chain(layer)(zeros(Float32, 3, 2))))
    @test occursin("eps", message_of(() -> LayerNorm(4; eps=0)))
    @test occursin("momentum", message_of(() -> BatchNorm(4; momentum=2)))
end
