# Optimizers, losses, metrics and the trainer.

using TwinGrad.NETWORK: NETWORK, State, add!, result, state_names, step!, tapes
using TwinGrad.AD: AD
using Random: MersenneTwister, randperm

# Optimizers, against the formulas in their documentation, written for whole vectors --------------------------------------

function by_hand(o::SGD, p, gradients)
    v = zero(p)
    for g in gradients
        g = g .+ o.weight_decay .* p
        v = o.momentum .* v .+ g
        p = p .- o.learning_rate .* (o.nesterov ? g .+ o.momentum .* v : v)
    end
    return p
end
function by_hand(o::RMSProp, p, gradients)
    s, v = zero(p), zero(p)
    for g in gradients
        g = g .+ o.weight_decay .* p
        s = o.alpha .* s .+ (1 - o.alpha) .* g .^ 2
        v = o.momentum .* v .+ g ./ (sqrt.(s) .+ o.eps)
        p = p .- o.learning_rate .* v
    end
    return p
end
function by_hand(o::Union{Adam,AdamW}, p, gradients)
    m, s = zero(p), zero(p)
    for (n, g) in enumerate(gradients)
        o isa Adam ? (g = g .+ o.weight_decay .* p) : (p = p .* (1 - o.learning_rate * o.weight_decay))
        m = o.beta1 .* m .+ (1 - o.beta1) .* g
        s = o.beta2 .* s .+ (1 - o.beta2) .* g .^ 2
        p = p .- o.learning_rate .* (m ./ (1 - o.beta1^n)) ./ (sqrt.(s ./ (1 - o.beta2^n)) .+ o.eps)
    end
    return p
end

const OPTIMIZER_CASES = [SGD(0.1), SGD(0.1; weight_decay=0.3), Momentum(0.1, 0.9), SGD(0.1; momentum=0.8, nesterov=true,
        weight_decay=0.1), RMSProp(0.05), RMSProp(0.05, 0.9; momentum=0.5, weight_decay=0.2, eps=1e-4), Adam(0.1),
    Adam(0.1, (0.8, 0.95); eps=1e-3, weight_decay=0.1), AdamW(0.1), AdamW(0.1; weight_decay=0.5)]

@testset "$(typeof(o)) $i by hand" for (i, o) in enumerate(OPTIMIZER_CASES)
    random = MersenneTwister(i)
    start, gradients = randn(random, 37), [randn(random, 37) for _ in 1:6]
    p, state = copy(start), State{Float64}(o, 37)
    for g in gradients
        step!(o, state, p, copy(g))
    end
    @test p ≈ by_hand(o, start, gradients) rtol = 1e-12
    @test state.steps == 6 && length(state_names(o)) == (!isempty(state.first)) + (!isempty(state.second))
end

@testset "no state stays below the smallest normal number: $(typeof(o))" for o in (SGD(0.1; momentum=0.9),
        SGD(0.1; momentum=0.9, nesterov=true), RMSProp(0.1, 0.9; momentum=0.9), Adam(0.1, (0.9, 0.9)), AdamW(0.1, (0.9, 0.9)))
    p, state = ones(Float32, 40), State{Float32}(o, 40)
    step!(o, state, p, ones(Float32, 40))
    for _ in 1:1024
        step!(o, state, p, zeros(Float32, 40))
    end
    @test all(iszero, state.first) && all(iszero, state.second) && all(isfinite, p)
end

@testset "small state is kept where a small epsilon makes it count" begin
    o = Adam(0.1; eps=1e-30)
    p, state = ones(Float32, 3), State{Float32}(o, 3)
    step!(o, state, p, fill(Float32(1e-18), 3))
    @test all(!iszero, state.first) && all(!iszero, state.second)
end

@testset "clipping" begin
    p, g = zeros(4), [3.0, 0.0, -4.0, 0.0]
    step!(SGD(1.0; clip_norm=1.0), State{Float64}(SGD(), 4), p, copy(g))
    @test p ≈ -g ./ 5 rtol = 1e-6
    p = zeros(4)
    step!(SGD(1.0; clip_value=2.0), State{Float64}(SGD(), 4), p, copy(g))
    @test p == [-2, 0, 2, 0]
    p = zeros(4)
    @test_throws NonFiniteError step!(SGD(1.0; clip_norm=1.0), State{Float64}(SGD(), 4), p, [NaN, 0, 0, 0])
    @test p == zeros(4)
    for (T, large) in ((Float32, 1f20), (Float32, 3f38), (Float64, 1e200), (Float64, 1e300)), n in (1, 3, 1000)
        g, p = fill(large, n), zeros(T, n)
        step!(SGD(1.0; clip_norm=1.0), State{T}(SGD(), n), p, g)
        @test isapprox(p, fill(-1 / sqrt(n), n); rtol=1e-4)
    end
    @test_throws ConfigurationError SGD(-1)
    @test_throws ConfigurationError SGD(0.1; nesterov=true)
    o = SGD(0.1)
    @test_throws ConfigurationError o.nesterov = true
    o.momentum = 0.9
    o.nesterov = true
    @test_throws ConfigurationError o.momentum = 0
    @test o.nesterov && o.momentum == 0.9
    @test_throws ConfigurationError Adam(0.1, 0.9)
end

# The trainer ------------------------------------------------------------------------------------------------------------

function problem(T=Float32; samples=53, seed=7)
    random = MersenneTwister(seed)
    return randn(random, T, 12, samples), rand(random, 1:3, samples), randperm(random, samples)
end

model(T=Float32; recurrent=RNN) =
    Chain(Reshape(4, 3), recurrent(4 => 5; name="recurrent"), Dense(5 => 3; name="output"); seed=1, dtype=T)

"""The parameters and losses after three epochs."""
function trained(chain; optimizer=SGD(0.1), T=Float32, options...)
    x, y, order = problem(T)
    trainer = Trainer(chain; optimizer=optimizer, batch_size=10, options...)
    losses = vcat((train_epoch!(trainer, x, y, order) for _ in 1:3)...)
    return copy(chain.parameters.vector), losses, trainer
end

"""The same by eager gradients and the formulas above."""
function trained_by_hand(chain, optimizer::SGD, T)
    x, y, order = problem(T)
    losses = T[]
    for _ in 1:3, first in 1:10:length(order)
        rows = order[first:min(first + 9, end)]
        push!(losses, item(softmax_cross_entropy(chain(x[:, rows]), y[rows])))
        found = gradient(m -> softmax_cross_entropy(m(x[:, rows]), y[rows]), chain)
        for name in keys(chain.parameters)
            chain.parameters[name] .-= optimizer.learning_rate .* found[name]
        end
    end
    return copy(chain.parameters.vector), losses
end

const MANY = Threads.nthreads()

@testset "the trainer against eager steps, $recurrent" for recurrent in (RNN, LSTM, GRU)
    expected, expected_losses = trained_by_hand(model(Float64; recurrent=recurrent), SGD(0.1), Float64)
    for threads in 1:MANY
        found, losses, _ = trained(model(Float64; recurrent=recurrent); T=Float64, threads=threads)
        @test found ≈ expected rtol = 1e-10
        @test losses ≈ expected_losses rtol = 1e-10
    end
end

@testset "every technique gives the same results" begin
    expected, expected_losses, _ = trained(model(Float64); T=Float64, threads=MANY, optimizer=Adam(0.01))
    for name in fieldnames(Techniques)
        how = Techniques(; NamedTuple{(name,)}((false,))...)
        found, losses, _ = trained(model(Float64); T=Float64, threads=MANY, optimizer=Adam(0.01), techniques=how)
        @test (name, isapprox(found, expected; rtol=1e-9)) == (name, true)
        @test (name, isapprox(losses, expected_losses; rtol=1e-9)) == (name, true)
    end
end

@testset "a gradient whose squares are too large is clipped, threads=$threads" for threads in unique((1, MANY))
    trainer = Trainer(Chain(Dense(4 => 1)); loss="mean_squared_error", optimizer=SGD(1.0; clip_norm=1.0), batch_size=8, threads=threads)
    before = copy(trainer.vector)
    train_epoch!(trainer, fill(1f5, 4, 8), fill(1f15, 1, 8))
    @test isapprox(sqrt(sum(abs2, trainer.vector .- before)), 1; rtol=1e-3)
end

@testset "split and whole, $(typeof(o)), accumulate=$n" for o in (SGD(0.1; momentum=0.9), Adam(0.01; clip_norm=0.05),
        RMSProp(0.01; clip_value=0.01)), n in (1, 2)
    whole, losses, trainer = trained(model(Float64); T=Float64, threads=1, optimizer=o, accumulate=n)
    @test trainer.state.steps == 18 ÷ n
    split, split_losses, _ = trained(model(Float64); T=Float64, threads=MANY, optimizer=o, accumulate=n)
    @test split ≈ whole rtol = 1e-10
    @test split_losses ≈ losses rtol = 1e-10
end

@testset "an epoch in pieces is the epoch" begin
    x, y, order = problem()
    whole, _, _ = trained(model(); threads=MANY)
    chain = model()
    trainer = Trainer(chain; optimizer=SGD(0.1), batch_size=10, threads=MANY)
    losses = zeros(6)
    NETWORK.suit!(trainer, [12])
    GC.@preserve x y order losses for _ in 1:3, (first, last) in ((1, 2), (3, 3), (4, 6))
        NETWORK.train_steps!(trainer, NETWORK.Data(x, y, true, order, 53), pointer(losses), first, last)
    end
    @test chain.parameters.vector == whole
end

"""The trials of a trainer's plans, decided so, as if its steps had been timed."""
decide!(trainer, alone) = foreach(trials -> NETWORK.choose!(trials, alone), values(trainer.trials))

allocated_by(trainer, x, y, order, losses) = compiling(() -> @allocated train_epoch!(trainer, x, y, order, losses))

@testset "a whole epoch allocates nothing, $T $(typeof(o))" for T in (Float32, Float64),
    o in (SGD(0.1), Adam(0.01; clip_norm=1.0), RMSProp(0.01; momentum=0.5))

    x, y, order = problem(T)
    trainer, losses = Trainer(model(T); optimizer=o, batch_size=10, threads=1), zeros(6)
    train_epoch!(trainer, x, y, order, losses)
    allocated_by(trainer, x, y, order, losses)
    @test allocated_by(trainer, x, y, order, losses) == 0
    # With threads: one parallel region for the whole call, however many steps it has.
    trainer = Trainer(model(T); optimizer=o, batch_size=10, threads=MANY)
    long = repeat(order, 20)
    many = zeros(106)
    train_epoch!(trainer, x, y, long, many)
    decide!(trainer, false)  # trials have more regions
    allocated_by(trainer, x, y, long, many)
    @test allocated_by(trainer, x, y, long, many) <= 4000
end

@testset "BLAS has threads for large products alone" begin
    function blas_of(width, rows)
        trainer = Trainer(Chain(Dense(width => width)); batch_size=rows, threads=Threads.nthreads())
        NETWORK.suit!(trainer, [width])
        return NETWORK.blas_threads(NETWORK.shards_for!(trainer, rows), 2)
    end
    @test blas_of(8, 1) == 1       # a second thread would only wait
    alone = Threads.nthreads() == 1  # else the threads share the products
    @test blas_of(1024, 1) == (alone ? 2 : 1)
    @test blas_of(1024, 64) == (alone && !AD.tiled(1024, 64, 1024, Float32) ? 2 : 1)
end

wide(T; threads, options...) = Trainer(Chain(Dense(500 => 900, relu; name="wide"), Dense(900 => 10; name="output");
    seed=1, dtype=T); batch_size=64, threads=threads, optimizer=Adam(0.001), options...)

wide_problem(T) = (rand(MersenneTwister(1), T, 500, 150), rand(MersenneTwister(2), 1:10, 150))

@testset "threads share the products of a wide network, $T" for T in (Float32, Float64)
    x, y = wide_problem(T)
    alone = wide(T; threads=1)
    losses, tolerance = train_epoch!(alone, x, y), T === Float32 ? 1e-4 : 1e-10
    @test all(shards -> shards[1].shared === nothing, values(alone.plans))
    for threads in 2:MANY
        trainer = wide(T; threads=threads)
        @test train_epoch!(trainer, x, y) ≈ losses rtol = tolerance
        @test trainer.vector ≈ alone.vector rtol = tolerance
        shards = trainer.plans[64, threads]
        @test length(shards) == 1 && shards[1].shared !== nothing
        @test all(((_, products),) -> length(products) == length(shards[1].shared.stages) - 1 > 0, shards[1].shared.parts)
        @test loss_and_gradients(trainer, x[:, 1:64], y[1:64])[1] ≈ loss_and_gradients(alone, x[:, 1:64], y[1:64])[1] rtol = tolerance
        decide!(trainer, false)
        order, many = repeat(1:150, 10), zeros(24)  # 1,500 rows
        train_epoch!(trainer, x, y, order, many)
        allocated_by(trainer, x, y, order, many)
        @test allocated_by(trainer, x, y, order, many) <= 4000
        trainer = wide(T; threads=threads)
        train_epoch!(trainer, x, y)
        again = wide(T; threads=threads)
        train_epoch!(again, x, y)
        @test again.vector == trainer.vector  # bit for bit
        bad = copy(x)
        bad[3, 70] = NaN
        @test_throws NonFiniteError train_epoch!(trainer, bad, y)
        @test again.vector != trainer.vector && all(isfinite, trainer.vector)  # the step before is taken
    end
    @test all(isfinite, wide(T; threads=MANY, techniques=Techniques(concrete=false)).vector)
end

"""
The losses of three epochs, and the parameters after them, of new trainers: one that finds out which way is the fastest, one where
all threads were chosen, in a way that `words` tell, and one where one was.
"""
in_each_way(new, x, y, words; last_epoch...) = map((nothing, false, true)) do alone
    trainer = new()
    losses = train_epoch!(trainer, x, y)
    trials = only(values(trainer.trials))
    differs = trials.left == Inf  # one thread rounds in another way on this processor
    @test trials.checked
    alone === nothing || differs || decide!(trainer, alone)
    losses = [losses; train_epoch!(trainer, x, y); train_epoch!(trainer, x, y; last_epoch...)]
    @test NETWORK.threads_decided(trainer) == trials.decided
    alone === nothing || @test NETWORK.threads_decided(trainer)
    alone === nothing || @test occursin(alone && !differs ? "one thread" : words, NETWORK.threads_in_step(trainer))
    all(cost -> cost[3] >= 0, NETWORK.costs(trainer)) || error("a cost below zero")
    losses, copy(trainer.vector)
end

"""Plan a trainer's steps as if BLAS had large products in them."""
function leave_to_blas!(trainer, x)
    NETWORK.suit!(trainer, collect(Int, size(x)[1:end-1]))
    NETWORK.choose_sparse!(trainer)
    shards = NETWORK.shards_for!(trainer, trainer.batch_size)
    shards[1] = typeof(shards[1])((name === :large_products || getfield(shards[1], name) for name in fieldnames(typeof(shards[1])))...)
end

@testset "one thread is tried for a whole batch where it rounds as all do, $name" for (name, new, x, words) in (
        ("shared products", threads -> wide(Float32; threads=threads), wide_problem(Float32)[1], "products shared by"),
        ("threads of BLAS", threads -> Trainer(Chain(Conv2D(32 => 64, (3, 3), relu; padding=1), Dropout(0.5), Flatten(), Dense(20736 => 10);
            seed=1, dtype=Float32); batch_size=1, threads=threads), rand(MersenneTwister(1), Float32, 18, 18, 32, 3), "threads in BLAS"))
    y = rand(MersenneTwister(2), 1:10, size(x)[end])
    for threads in 2:MANY
        found = in_each_way(x, y, words) do
            trainer = new(threads)
            occursin("BLAS", name) && leave_to_blas!(trainer, x)
            trainer
        end
        @test found[1] == found[2] == found[3]
    end
end

@testset "one thread is tried only where it rounds as all threads do and its step is short, and what has not been seen is not tried" begin
    x, y = wide_problem(Float32)
    trainer = wide(Float32; threads=1)
    train_epoch!(trainer, x, y)
    shard = trainer.plans[64, 1][1]
    GC.@preserve x y begin
        data = NETWORK.Data(x, y, true, collect(1:150), 150)
        before = copy(trainer.vector)
        trials = NETWORK.Trials(1, false)
        NETWORK.check_alike!(trainer, trials, shard, data, 1)
        @test trials.checked && !trials.decided && trials.compares  # with one thread there is one way
        @test trainer.vector == before
        bits = map(first -> NETWORK.bits_of_step!(NETWORK.ALONE, 1, shard, data, first)[1], (0, 0, 64))
        @test bits[1] == bits[2] != bits[3]
    end
    large = Trainer(Chain(Dense(4096 => 4096; bias=false); seed=1); batch_size=600, threads=1)
    NETWORK.suit!(large, [4096])
    trials = NETWORK.Trials(1, false)
    shard = NETWORK.shards_for!(large, 600)[1]
    NETWORK.check_alike!(large, trials, shard, NETWORK.Data(zeros(Float32, 0, 1), Int[], true, Int[], 1), 1)  # makes no step
    @test trials.checked && trials.left == Inf && !trials.prefers_alone
end

@testset "a small batch of a dense network stays whole, where its small products take less time than a sum of gradients" begin
    for threads in 2:min(MANY, 4), (rows, split) in ((4, false), (16, false), (200, true))
        chain() = Chain(Dense(100 => 100, relu), Dense(100 => 100, relu), Dense(100 => 10); seed=1, dtype=Float64)
        x, y = rand(MersenneTwister(1), 100, rows), rand(MersenneTwister(2), 1:10, rows)
        trainer, alone = Trainer(chain(); batch_size=rows, threads=threads), Trainer(chain(); batch_size=rows, threads=1)
        @test train_epoch!(trainer, x, y) ≈ train_epoch!(alone, x, y)
        @test trainer.vector ≈ alone.vector
        @test NETWORK.threads_in_step(trainer) == (split ? "split over $threads threads" : "one thread")
    end
end

@testset "one thread computes bit for bit what all do, $name, $(typeof(o)), $T" for T in (Float32, Float64),
    o in (SGD(0.1), SGD(0.1; momentum=0.9, weight_decay=0.01), Adam(0.01), RMSProp(0.01; clip_value=0.1)),
    (name, layers, input, options) in (
        ("dense", () -> (Dense(20 => 13, tanh), Dense(13 => 10)), T -> rand(MersenneTwister(1), T, 20, 173), NamedTuple()),
        ("dropout", () -> (Dense(20 => 13, relu), Dropout(0.5), Dense(13 => 10)), T -> rand(MersenneTwister(1), T, 20, 173), (accumulate=3,)),
        ("embedding", () -> (Embedding(50 => 6), Flatten(), Dense(30 => 10)), T -> rand(MersenneTwister(1), 1:50, 5, 173), NamedTuple()))

    x, y = input(T), rand(MersenneTwister(2), 1:10, 173)
    for threads in 2:MANY
        found = in_each_way(x, y, "split over $threads threads"; rates=fill(0.01, 4)) do
            Trainer(Chain(layers()...; seed=1, dtype=T); batch_size=50, threads=threads, optimizer=deepcopy(o), options...)
        end
        @test found[1] == found[2] == found[3]
    end
end

@testset "forward passes of any number of samples are planned, but not all kept" begin
    x = rand(MersenneTwister(1), Float32, 5, 100)
    trainer = Trainer(Chain(Dense(5 => 3); seed=1, dtype=Float32); batch_size=10, threads=1)
    expected = predict(trainer, x)
    @test all(1:99) do count
        predict(trainer, x[:, 1:count]) ≈ expected[:, 1:count] && length(trainer.forwards) <= NETWORK.MOST_FORWARDS
    end
end

@testset "the way that takes less time is kept" begin
    function decided(together, alone; least=1, steps=10_000)
        trials, done = NETWORK.Trials(least), 0
        while !trials.decided && done < steps
            now = NETWORK.at_once(trials, steps - done)
            done += now
            NETWORK.note!(trials, now * (trials.is_alone ? alone : together), now)
        end
        return trials, done
    end
    for (together, alone, kept) in ((1e-4, 2e-4, false), (2e-4, 1e-4, true), (1e-4, 1.01e-4, true), (0.5, 0.9, false), (0.9, 0.5, true))
        trials, steps = decided(together, alone)
        @test trials.decided && trials.is_alone == kept
        @test together < 0.1 ? 0.1 <= trials.all_spent < 0.12 : steps == 7  # three of each, after one that warms up
        @test NETWORK.at_once(trials, 7) == 7
    end
    @test decided(1e-9, 1e-9)[2] == 10_000 && !decided(1e-9, 1e-9)[1].decided
    trials, steps = decided(0.5, 0.9; least=4)
    @test steps == 28 && !trials.is_alone
    trials, _ = decided(0.5, 0.9)
    @test trials.left > 50 * 3 * 1.4  # a comparison takes no more than a fiftieth of the time
    trials, _ = decided(2e-3, 1e-3)
    NETWORK.note!(trials, 14.0, 14_000)
    @test NETWORK.at_once(trials, 10_000) == 6000  # as many as the other 6 s have
    NETWORK.note!(trials, 6.0, 6000)
    NETWORK.compare_again!(trials)
    @test trials.compares && trials.decided && trials.prefers_alone && NETWORK.at_once(trials, 10_000) == 1
    for _ in 1:1000
        NETWORK.note!(trials, trials.is_alone ? 2e-3 : 1e-3, 1)
    end
    @test !trials.compares && !trials.prefers_alone && !trials.is_alone
    NETWORK.choose!(trials, false, Inf)
    NETWORK.compare_again!(trials)
    @test !trials.compares && NETWORK.at_once(trials, 10_000) == 10_000
    watched, _ = decided(1e-3, 2e-3)
    @test NETWORK.at_once(watched, 10_000) == ceil(0.25 / 1e-3)  # then their time is held against that of one thread
    NETWORK.note!(watched, 0.5, 250)
    NETWORK.compare_again!(watched)
    @test !watched.compares  # one thread was hardly faster
    NETWORK.note!(watched, 0.6, 250)  # all threads are slower than one was
    NETWORK.compare_again!(watched)
    @test watched.compares && watched.window == 0.5  # and looked at less often
    while watched.compares
        NETWORK.note!(watched, watched.is_alone ? 2e-3 : 2.4e-3, 1)
    end
    @test watched.prefers_alone && watched.limit == Inf
    NETWORK.note!(watched, 5.0, 10)  # nothing uses fewer threads
    NETWORK.compare_again!(watched)
    @test !watched.compares && NETWORK.at_once(watched, 10_000) == ceil(Int, watched.left / 2e-3)
    of_blas, busy = NETWORK.Trials(1, true, true), 0.0  # threads of BLAS wait busily for a while, beside one that works
    while !of_blas.decided
        busy = of_blas.is_alone ? max(0.0, busy - 0.04) : 0.09
        NETWORK.note!(of_blas, of_blas.is_alone ? (busy > 0 ? 0.04 : 0.01) : 0.02, 1)
    end
    @test of_blas.prefers_alone
    slow = NETWORK.Trials(1)  # one trial of three is disturbed, of each
    for seconds in (9.0, 0.9, 0.1, 0.05, 0.1, 0.05, 0.01)
        NETWORK.note!(slow, seconds, 1)
    end
    @test slow.decided && !slow.is_alone
end

@testset "both ways are tried in the first steps, and then one is kept" begin
    chain() = Chain(Conv2D(1 => 4, (3, 3), relu), Flatten(), Dense(256 => 10); seed=1, dtype=Float32)
    x, y = rand(MersenneTwister(1), Float32, 10, 10, 1, 100), rand(MersenneTwister(2), 1:10, 100)
    for threads in 2:MANY
        trainer = Trainer(chain(); batch_size=20, threads=threads)
        train_epoch!(trainer, x, y)
        trials = trainer.trials[20, threads]
        epochs = 1
        while !trials.decided && epochs < 10_000
            train_epoch!(trainer, x, y)
            epochs += 1
        end
        @test trials.decided && min(length(trials.alone), length(trials.together)) >= 3
        expected = Trainer(chain(); batch_size=20, threads=threads)
        train_epoch!(expected, x, y)
        decide!(expected, false)
        foreach(_ -> train_epoch!(expected, x, y), 2:epochs)
        @test trainer.vector == expected.vector
        NETWORK.forget_plans!(trainer)
        @test isempty(trainer.trials)
        for options in ((optimizer=SGD(0.1; clip_norm=1.0),), (threads=1,))
            other = Trainer(chain(); batch_size=20, threads=threads, options...)
            train_epoch!(other, x, y)
            @test isempty(other.trials)
        end
        decide!(expected, true)
        @test NETWORK.threads_in_step(expected) == "one thread"
        train_epoch!(expected, x, y)
        known = expected.trials[20, threads]
        @test !known.compares  # it was decided a moment ago
        for (alone, words) in ((true, "one thread"), (false, "split over $threads threads"))
            decide!(expected, alone)
            known.left = 0.0
            train_epoch!(expected, x, y)
            @test known.compares && known.decided  # both are tried again
            @test NETWORK.threads_in_step(expected) == words
        end
        decide!(expected, true)
        expected.optimizer.clip_norm = 1.0  # now all threads work
        @test NETWORK.threads_in_step(expected) == "split over $threads threads"
        bad = copy(x)
        bad[1, 1, 1, 5] = NaN
        other = Trainer(chain(); batch_size=20, threads=threads)
        train_epoch!(other, x, y)
        known = deepcopy(other.trials[20, threads])
        @test_throws NonFiniteError train_epoch!(other, bad, y)
        @test other.trials[20, threads].steps == known.steps  # what failed is not timed
    end
end

compiling() do
    @testset "parts of a product make the whole, $(m)x$(n)x$(k), $T" for T in (Float32, Float64),
            (m, n, k) in ((200, 30, 50), (30, 200, 50), (64, 64, 1), (17, 33, 50), (200, 1, 50), (1, 200, 50), (300, 150, 600),
                (131, 300, 600)),
            transposed_a in (false, true), transposed_b in (false, true), added in (0, 1), bytes in (0, 32, 64)
        known = AD.Kernels.VECTOR_BYTES[]
        bytes <= known || continue
        AD.Kernels.VECTOR_BYTES[] = bytes
        try
            random = MersenneTwister(4)
            a, b = rand(random, T, (transposed_a ? (k, m) : (m, k))...), rand(random, T, (transposed_b ? (n, k) : (k, n))...)
            start, out = rand(random, T, m, n), zeros(T, m, n)
            lies(x, turned) = turned ? AD.view_transpose(AD.Memory(x), (axes=[2, 1],)) : AD.Memory(x)
            p = AD.Kernels.Instructions()
            AD.emit_matmul!(p, AD.Memory(out), lies(a, transposed_a), lies(b, transposed_b), added)
            code = AD.Kernels.of_type(p, T)
            product = code[AD.Kernels.product_of(code, 1:length(code))]
            expected = (transposed_a ? a' : a) * (transposed_b ? b' : b) .+ added .* start
            for threads in (1, 2, 3, 5)
                copyto!(out, added == 1 ? start : fill(T(NaN), m, n))
                GC.@preserve a b out for j in threads:-1:1
                    mine = AD.Kernels.part(product, threads, j)
                    AD.Kernels.execute!(mine, 1, length(mine))
                end
                @test out ≈ expected
            end
        finally
            AD.Kernels.VECTOR_BYTES[] = known
        end
    end
end

@testset "a product by a transposed weight is computed turned, and equal: $T" for T in (Float32, Float64)
    random = MersenneTwister(5)
    w, x, c = randn(random, T, 650, 600), randn(random, T, 650, 40), randn(random, T, 600, 40)  # tiled on any processor
    for f in (w -> sum(tanh.(w' * x) .* c), w -> sum((w' * x) .* c .+ w' * x))  # once, and twice
        @test compile(grad(f))(w) ≈ grad(f)(w)
    end
    for (columns, turned) in ((40, AD.Kernels.VECTOR_BYTES[] > 0), (20, false))  # few columns are for BLAS
        product = compile((w, x) -> w' * x)
        @test product(w, x[:, 1:columns]) ≈ w' * x[:, 1:columns]
        @test occursin("($columns, 600)", source(product)) == turned
    end
end

@testset "the members of a team are in different threads, the calling one among them, and an error ends all" begin
    team, threads = NETWORK.Team(MANY), zeros(Int, MANY)
    NETWORK.together(team) do k
        threads[k] = Threads.threadid()
        NETWORK.barrier!(team) || error("a member is missing")
    end
    @test allunique(threads) && Threads.threadid() in threads
    reached = fill(false, MANY)
    for failing in 1:MANY
        @test_throws ArgumentError("the member $failing") NETWORK.together(team) do k
            k == failing && throw(ArgumentError("the member $failing"))
            reached[k] = NETWORK.barrier!(team)
        end
    end
    @test !any(reached)
end

@testset "a trainer in a parallel region of its user's" begin
    x, y, order = problem()
    chains, losses = [model(), model()], Vector{Vector{Float64}}(undef, 2)
    trainers = [Trainer(chain; batch_size=10, threads=MANY, optimizer=SGD(0.1)) for chain in chains]
    Threads.@threads for k in 1:2
        losses[k] = train_epoch!(trainers[k], x, y, order)
    end
    expected = train_epoch!(Trainer(model(); batch_size=10, threads=MANY, optimizer=SGD(0.1)), x, y, order)
    @test losses[1] == losses[2] == expected
end

# Centres the whole batch anew in each step of a loop.
struct CentredInSteps <: NETWORK.Layer end
NETWORK.couples_batch(::CentredInSteps) = true
NETWORK.sums_over_batch(::CentredInSteps) = true
NETWORK.output_size(::CentredInSteps, input::Vector{Int}) = input
NETWORK.forward(::CentredInSteps, x::AD.Tensor, parameters::Dict{String,AD.Tensor}, training::Bool) = scan(x, [1.0, 0.5, 2.0]) do h, t
    (tanh.(t .* (h .- NETWORK.sum_of_parts(sum(h; dims=2)) ./ NETWORK.samples_of(h))), nothing)
end[1]

@testset "a batch that is summed over inside a loop stays whole" begin
    x, y = randn(MersenneTwister(1), 40, 400), rand(MersenneTwister(2), 1:10, 400)
    found = map(unique((1, MANY))) do threads
        chain = Chain(Dense(40 => 60, tanh), CentredInSteps(), Dense(60 => 10); seed=1, dtype=Float64)
        trainer = Trainer(chain; batch_size=200, threads=threads, optimizer=SGD(0.1))
        losses = vcat((train_epoch!(trainer, x, y) for _ in 1:3)...)
        @test !occursin("split", NETWORK.threads_in_step(trainer))
        losses, copy(trainer.vector)
    end
    @test found[1][1] ≈ found[end][1] && found[1][2] ≈ found[end][2]
end

@testset "a network of 784 steps" begin
    random = MersenneTwister(8)
    x, y = randn(random, Float32, 784, 40), rand(random, 1:10, 40)
    trainer = Trainer(Chain(Reshape(1, 784), RNN(1 => 8), Dense(8 => 10)); batch_size=20, threads=1)
    first_losses = train_epoch!(trainer, x, y, collect(1:40))
    @test all(isfinite, first_losses)
    losses, order = zeros(2), collect(1:40)
    train_epoch!(trainer, x, y, order, losses)
    @test allocated_by(trainer, x, y, order, losses) == 0
    @test sum(losses) < sum(first_losses)
end

@testset "poisoned scratch" begin
    x, y, order = problem()
    chain = model()
    trainer = Trainer(chain; batch_size=10, threads=MANY, optimizer=SGD(0.1))
    start = copy(chain.parameters.vector)
    losses = train_epoch!(trainer, x, y, order)
    expected = copy(chain.parameters.vector)
    for byte in (0x00, 0xff)
        chain.parameters.vector .= start
        foreach(tape -> poison!(tape, byte), tapes(trainer))
        @test train_epoch!(trainer, x, y, order) == losses
        @test chain.parameters.vector == expected
    end
end

# The networks of the study `sizes` (experiments/models), each as small as there.
const OF_ORDINARY_SIZE = [
    ("LeNet-5", (28, 28, 1), () -> (Conv2D(1 => 6, 5, relu; padding=2), MaxPool2D(2), Conv2D(6 => 16, 5, relu), MaxPool2D(2),
        Flatten(), Dense(400 => 120, relu), Dense(120 => 84, relu), Dense(84 => 10))),
    ("CNN", (32, 32, 3), () -> (Conv2D(3 => 16, 3, relu; padding=1), MaxPool2D(2), Conv2D(16 => 32, 3, relu; padding=1),
        MaxPool2D(2), Conv2D(32 => 64, 3, relu; padding=1), MaxPool2D(2), Flatten(), Dense(1024 => 10))),
    ("normalised CNN", (32, 32, 3), () -> (Conv2D(3 => 16, 3; padding=1, bias=false), BatchNorm(16), Activation("relu"),
        Conv2D(16 => 32, 3; stride=2, padding=1, bias=false), BatchNorm(32), Activation("relu"),
        Conv2D(32 => 64, 3; stride=2, padding=1, bias=false), BatchNorm(64), Activation("relu"), GlobalAvgPool(), Dense(64 => 10))),
    ("MLP", (784,), () -> (Dense(784 => 256, relu), Dense(256 => 256, relu), Dense(256 => 256, relu), Dense(256 => 10))),
    ("LSTM", (64, 64), () -> (LSTM(64 => 64), Dense(64 => 10))),
    ("two GRUs", (64, 64), () -> (GRU(64 => 64; returns="sequence"), GRU(64 => 64), Dense(64 => 10))),
    ("text", (200,), () -> (Embedding(5000 => 64), PermuteDims(2, 1), Conv1D(64 => 128, 5, relu), GlobalMaxPool(), Dense(128 => 10))),
]

@testset "a step of a network of ordinary size reads nothing that it has not written: $name" for (name, sizes, layers) in OF_ORDINARY_SIZE
    random = MersenneTwister(1)
    x = name == "text" ? rand(random, 1:5000, 200, 36) : randn(random, Float32, sizes..., 36)
    y = rand(random, 1:10, 36)
    found = map((nothing, 0x00, 0xff)) do byte  # batches of 24 samples, and of 12
        trainer = Trainer(Chain(layers()...; seed=2); batch_size=24, threads=MANY, optimizer=Adam(0.001))
        losses = map(1:3) do _
            byte === nothing || foreach(tape -> poison!(tape, byte), tapes(trainer))
            train_epoch!(trainer, x, y)
        end
        vcat(losses...), copy(trainer.vector)
    end
    @test all(isfinite, found[1][1]) && found[1] == found[2] == found[3]
end

@testset "a loss that is not finite is explained and leaves the parameters" begin
    x, y, order = problem()
    for threads in unique((1, MANY)), bad in (NaN32, Inf32)
        chain = model()
        trainer = Trainer(chain; batch_size=10, threads=threads, optimizer=SGD(0.1))
        spoiled = copy(x)
        spoiled[3, order[25]] = bad
        text = message_of(() -> train_epoch!(trainer, spoiled, y, order))
        @test occursin("step 3 of the epoch", text) && occursin("input 1", text)
        chain2 = model()
        train_epoch!(Trainer(chain2; batch_size=10, threads=threads, optimizer=SGD(0.1)), x, y, order[1:20])
        @test chain.parameters.vector == chain2.parameters.vector
        @test all(isfinite, train_epoch!(trainer, x, y, order))  # the trainer stays usable
    end
    chain = Chain(Dense(12 => 3, softplus; name="big"), Dense(3 => 3))
    chain.parameters["big.weight"] .= 1f38
    trainer = Trainer(chain; batch_size=10, threads=MANY)
    text = message_of(() -> train_epoch!(trainer, x, y, order))
    @test occursin("step 1", text) && occursin("op \"", text) && occursin("layer \"big\"", text)
end

@testset "losses, evaluation, prediction" begin
    x, y, _ = problem(Float64; samples=2300)
    chain = model(Float64)
    trainer = Trainer(chain; threads=MANY)
    logits = predict(trainer, x)
    @test logits ≈ value(chain(x)) && size(logits) == (3, 2300)
    found = evaluate(trainer, x, y)
    @test found.loss ≈ item(softmax_cross_entropy(chain(x), y))
    @test found.accuracy == accuracy(logits, y) == sum(argmax(logits[:, i]) == y[i] for i in 1:2300) / 2300
    binary = Chain(Dense(12 => 1); dtype=Float64)
    targets = Float64.(y .== 1)
    trainer = Trainer(binary; loss=binary_cross_entropy, threads=MANY)
    before = evaluate(trainer, x, targets)
    train!(trainer, x, targets; epochs=2)
    @test evaluate(trainer, x, targets).loss < before.loss && before.loss ≈ item(
        binary_cross_entropy(Chain(Dense(12 => 1); dtype=Float64)(x), reshape(targets, 1, :)))
    @test isnan(evaluate(Trainer(binary; loss=:mean_squared_error, threads=1), x, targets).accuracy)
    many = Chain(Reshape(4, 3), RNN(4 => 5; returns="sequence"), Dense(5 => 3); dtype=Float64)
    labels = [x[4t-3, i] > 0 ? 1 : 3 for t in 1:3, i in 1:2300]
    @test train!(many, x, labels; epochs=3, optimizer=Adam(0.01), threads=MANY)[3] < log(2)
    with_dropout = Chain(Dense(12 => 30, relu), Dropout(0.5), Dense(30 => 3); dtype=Float64)
    trainer = Trainer(with_dropout; threads=MANY)
    train_epoch!(trainer, x, y)
    @test evaluate(trainer, x, y) === evaluate(trainer, x, y)
end

weighted(; options...) = loss_of(softmax_cross_entropy; options...)

@testset "a weighted loss of a split batch is that of the whole, $options, $(kinds[1])" for options in (
        (class_weights=[0.5, 2, 1],), (ignored_class=0,), (class_weights=(0.5, 2, 1), ignored_class=2, label_smoothing=0.2),
        (label_smoothing=0.2,)), kinds in (("dense", () -> Dense(12 => 12, tanh)), ("normalised", () -> BatchNorm(12)))
    x, y, order = problem(Float64)
    haskey(options, :ignored_class) && (y[order[1:9]] .= options.ignored_class)
    loss = weighted(; options...)
    make() = Chain(kinds[2](), Dense(12 => 3); seed=2, dtype=Float64)
    found = map(unique((1, MANY))) do threads
        trainer = Trainer(make(); loss=loss, optimizer=SGD(0.1), batch_size=20, threads=threads)
        (train_epoch!(trainer, x, y, order), copy(trainer.vector), evaluate(trainer, x, y))
    end
    for (losses, vector, evaluation) in found
        @test losses ≈ found[1][1] && vector ≈ found[1][2]
        @test evaluation.loss ≈ found[1][3].loss && evaluation.accuracy ≈ found[1][3].accuracy
    end
    chain = make()
    keywords = (weight=haskey(options, :class_weights) ? collect(Float64, options.class_weights) : nothing,
        label_smoothing=get(options, :label_smoothing, 0), ignored=get(options, :ignored_class, nothing))
    @test loss_and_gradients(Trainer(chain; loss=loss, threads=1), x, y)[1] ≈
          item(softmax_cross_entropy(chain(x; training=true), y; keywords...))
end

@testset "losses with settings" begin
    x, y, _ = problem(Float64)
    chain = Chain(Dense(12 => 3); dtype=Float64)
    labels = [i % 3 == 0 ? -1 : label for (i, label) in enumerate(y)]
    kept = labels .> 0
    found, expected = evaluate(Trainer(chain; loss=weighted(ignored_class=-1), threads=1), x, labels),
    evaluate(Trainer(chain; threads=1), x[:, kept], y[kept])
    @test found.loss ≈ expected.loss && found.accuracy == expected.accuracy
    nothing_counts = evaluate(Trainer(chain; loss=weighted(ignored_class=-1), threads=1), x, fill(-1, length(y)))
    @test isnan(nothing_counts.loss) && isnan(nothing_counts.accuracy)
    binary = Chain(Dense(12 => 1); dtype=Float64)
    targets = reshape(Float64.(y .== 1), 1, :)
    trainer = Trainer(binary; loss=loss_of("binary_cross_entropy"; positive_weight=2.5), threads=1)
    @test loss_and_gradients(trainer, x, targets)[1] ≈ item(binary_cross_entropy(binary(x), targets; positive_weight=2.5))
    text = message_of(() -> train_epoch!(Trainer(chain; loss=weighted(ignored_class=0), threads=1), x, fill(4, length(y))))
    @test occursin("from 1 to 3 (the model has 3 outputs), or 0, which is ignored, got 4", text)
    for (f, expected_text) in (
        (() -> weighted(class_weights=[1, -1]), "class_weights must be finite numbers >= 0"),
        (() -> weighted(class_weights=[0, 0]), "not all of them 0"),
        (() -> weighted(class_weights=Dict(1 => 0.5, 2 => 1)), "in the order of the classes"),
        (() -> weighted(class_weights=Set([0.5, 1, 2])), "in the order of the classes"),
        (() -> evaluate(Trainer(Chain(Dense(12 => 1); dtype=Float64); threads=1), x, ones(Int, length(y))), "a model with 2 outputs or more"),
        (() -> weighted(label_smoothing=2), "label_smoothing must be a number from 0 to 1, got 2"),
        (() -> weighted(ignored_class=0.5), "ignored_class must be a whole number"),
        (() -> weighted(positive_weight=2), "softmax_cross_entropy: there is no setting positive_weight"),
        (() -> loss_of("binary_cross_entropy"; positive_weight=-1), "positive_weight must be a finite number > 0"),
        (() -> evaluate(Trainer(chain; loss=weighted(class_weights=[1, 2]), threads=1), x, y), "class_weights for 3 classes"),
        (() -> Trainer(chain; loss=weighted(ignored_class=0), threads=1, techniques=Techniques(batched=false)), "the mean of a whole batch"),
        (() -> Trainer(chain; loss=weighted(ignored_class=0), threads=1, communicator=NETWORK.Communicator(0, 2, identity)),
            "of which each process would know a part"))
        @test (expected_text, occursin(expected_text, message_of(f))) == (expected_text, true)
    end
end

@testset "metrics" begin
    m = Mean()
    @test isnan(result(m)) && result(add!(add!(m, 1.0, 3), 5.0)) == 2
    @test accuracy([1 2; 3 2], [2, 1]) == 1 && accuracy([1.0 -1.0], [1 0]) == 1 && accuracy([1.0, -1.0], [0, 0]) == 0.5
    @test result(add!(Accuracy(0), [1 2; 3 2], [2, 0])) == 1 && isnan(result(add!(Accuracy(2), [1 2; 3 2], [2, 2])))
    @test_throws ShapeError accuracy(zeros(3, 2), [1, 2, 3])
end

@testset "data that does not suit is named, and nothing is trained" begin
    x, y, order = problem()
    chain = model()
    start = copy(chain.parameters.vector)
    trainer = Trainer(chain; batch_size=10, threads=MANY)
    bad = copy(y)
    bad[[8, 20]] .= 4
    text = message_of(() -> train_epoch!(trainer, x, bad, order))
    @test occursin("from 1 to 3", text) && occursin("got 4 in sample 8", text) && occursin("2 of 53", text)
    @test occursin("Float32", message_of(() -> train_epoch!(trainer, Float64.(x), y)))
    @test occursin("(53,), got (52,)", message_of(() -> train_epoch!(trainer, x, y[1:52])))
    @test occursin("integer labels", message_of(() -> train_epoch!(trainer, x, Float32.(y))))
    @test occursin("from 1 to 53", message_of(() -> train_epoch!(trainer, x, y, [0, 1])))
    @test occursin("findall(order)", message_of(() -> train_epoch!(trainer, x, y, trues(53))))
    @test occursin("12 elements", message_of(() -> train_epoch!(trainer, x[1:11, :], y)))
    @test occursin("no samples", message_of(() -> train_epoch!(trainer, x[:, 1:0], y[1:0])))
    @test occursin("unknown loss", message_of(() -> Trainer(chain; loss="hinge")))
    @test occursin("batch_size", message_of(() -> Trainer(chain; batch_size=0)))
    @test occursin("julia -t", message_of(() -> Trainer(chain; threads=MANY + 1)))
    @test chain.parameters.vector == start
    push!(chain, Activation(tanh))
    @test occursin("make a new trainer", message_of(() -> train_epoch!(trainer, x, y)))
    @test train_epoch!(Trainer(model()), view(x, :, 1:53), UInt8.(y)) == train_epoch!(Trainer(model()), x, y)
end

@testset "a trainer resumes from a state bit for bit" begin
    x, y, order = problem()
    new() = Trainer(Chain(Dense(12 => 16, relu), Dropout(0.5), Dense(16 => 3); dtype=eltype(x)); optimizer=Adam(0.01),
        batch_size=20, threads=1, accumulate=2)
    whole, first, second = new(), new(), new()
    expected = [train_epoch!(whole, x, y, order) for _ in 1:4]
    begun = [train_epoch!(first, x, y, order) for _ in 1:2]
    second.chain.parameters.vector .= first.chain.parameters.vector
    NETWORK.load_state!(second, NETWORK.training_state(first))
    @test [begun; [train_epoch!(second, x, y, order) for _ in 1:2]] == expected
    @test second.chain.parameters.vector == whole.chain.parameters.vector
    other = Trainer(Chain(Dense(12 => 3); dtype=eltype(x)); threads=1)
    @test occursin("another network", message_of(() -> NETWORK.load_state!(other, NETWORK.training_state(first))))
    @test_throws ParameterError NETWORK.load_state!(second, (numbers=Int[1], first=[], second=[], total=[]))
end

@testset "the state of another optimizer, or of other numbers, is refused" begin
    new(optimizer, T=Float32) = Trainer(Chain(Dense(4 => 2); dtype=T); optimizer=optimizer, batch_size=10, threads=1)
    begun(optimizer) = (trainer = new(optimizer);
        train_epoch!(trainer, randn(MersenneTwister(1), Float32, 4, 40), repeat([1, 2], 20)); NETWORK.training_state(trainer))
    velocity = begun(SGD(0.1; momentum=0.9))
    for optimizer in (RMSProp(0.1), Adam(0.1))
        other = new(optimizer)
        @test_throws ParameterError NETWORK.load_state!(other, velocity)
        @test all(iszero, NETWORK.training_state(other).first)
    end
    @test_throws ParameterError NETWORK.load_state!(new(Adam(0.1)), begun(RMSProp(0.1; momentum=0.9)))
    @test_throws ParameterError NETWORK.load_state!(new(SGD(0.1; momentum=0.9), Float64), velocity)
    NETWORK.load_state!(new(SGD(0.1; momentum=0.5)), velocity)
end

@testset "settings are not added to those of a loss" begin
    smooth = loss_of("softmax_cross_entropy"; label_smoothing=0.1)
    @test loss_of(smooth) === smooth
    @test occursin("no others are added", message_of(() -> loss_of(smooth; ignored_class=2)))
    @test loss_of(softmax_cross_entropy; ignored_class=2).ignored == 2
end

@testset "asking what a step takes changes nothing, and tells of every layer and the update: $layer" for layer in (Dropout(0.5), BatchNorm(16))
    x, y, order = problem()
    function trained(asks)
        chain = Chain(Dense(12 => 16, relu), deepcopy(layer), Dense(16 => 3); dtype=eltype(x))
        trainer = Trainer(chain; optimizer=Adam(0.01), batch_size=20, threads=Threads.nthreads())
        train_epoch!(trainer, x, y, order)
        found = [NETWORK.costs(trainer) for _ in 1:asks]
        train_epoch!(trainer, x, y, order)
        return chain.parameters.vector, found
    end
    expected, _ = trained(0)
    actual, (costs, _) = trained(2)
    @test actual == expected
    @test issubset(("dense", "dense2"), [layer for (_, layer) in costs])
    @test costs[end][1] == "sums and update"
    @test all(seconds > 0 && bytes > 0 for (_, _, seconds, bytes) in costs)
end

"""The multiplications and additions that `costs` tells of, by op and layer, of the step of a chain on 8 samples."""
function counted(layers, x; classes=10, techniques=AD.Techniques(), threads=1)
    chain = Chain(layers...; dtype=Float32)
    trainer = Trainer(chain; batch_size=8, threads=threads, techniques=techniques)
    train_epoch!(trainer, x, rand(MersenneTwister(1), 1:classes, 8))
    found = Dict{Tuple{String,String},Int}()
    for (op, layer, _, _, operations) in NETWORK.costs(trainer)
        found[op, layer] = get(found, (op, layer), 0) + operations
    end
    return found
end

@testset "a product costs two operations for each of its terms, whatever computes it and with whatever it is fused: fuse $fuse" for fuse in (true, false)
    for units in (5, 64, 96)  # by BLAS, by tiles, and both
        found = counted((Dense(20 => units, tanh), Dense(units => 10)), rand(Float32, 20, 8); techniques=AD.Techniques(fuse=fuse))
        of_layer(layer) = sum(n for ((_, l), n) in found if l == layer)
        @test of_layer("dense") == 2 * 2 * 20 * units * 8  # none by the input
        @test of_layer("dense2") == 3 * 2 * units * 10 * 8
        @test sum(values(found)) == of_layer("dense") + of_layer("dense2")
        @test all(n == 0 for ((op, _), n) in found if !startswith(op, "matmul"))
    end
end

@testset "products that threads share are counted once" begin
    layers() = (Dense(600 => 2048, relu), Dense(2048 => 2048, relu), Dense(2048 => 10))
    x = rand(MersenneTwister(2), Float32, 600, 8)
    alone = counted(layers(), x)
    for threads in 2:MANY
        @test counted(layers(), x; threads=threads) == alone
    end
end

@testset "a fused convolution and pool costs what its parts do" begin
    x = rand(MersenneTwister(3), Float32, 14, 14, 3, 8)
    layers() = (Conv2D(3 => 6, (5, 5), relu), MaxPool2D(2), Flatten(), Dense(6 * 25 => 10))
    fused = counted(layers(), x)
    product = 2 * 10 * 10 * 6 * 8 * 3 * 25  # for each pixel of each filter and sample
    if any(op == "conv_pool" for (op, _) in keys(fused))
        of(name) = only([n for ((op, _), n) in fused if op == name])
        @test of("conv_pool") == of("conv_pool_weight_gradient") == product
    end
    plain = counted(layers(), x; techniques=AD.Techniques(fuse=false, winograd=false))
    @test 2 * product <= sum(n for ((op, _), n) in plain if startswith(op, "conv")) < 2.2 * product  # tiles repeat some rows
end

@testset "a fused convolution and pool of sequences costs what is multiplied" begin
    ids = rand(MersenneTwister(4), 1:30, 20, 8)
    layers() = (Embedding(30 => 16), PermuteDims(2, 1), Conv1D(16 => 8, 3, relu), GlobalMaxPool(), Dense(8 => 10))
    found = counted(layers(), ids)
    names = [op for (op, _) in keys(found)]
    if "sequence_pool" in names
        of(name) = only([n for ((op, _), n) in found if op == name])
        @test of("sequence_pool") == 2 * 18 * 8 * 8 * 48
        @test 0 < of("sequence_pool_weight_gradient") <= 2 * 8 * 8 * 48  # of one step for each filter and sample, or none
    end
end

@testset "streams of batches that have not come again are kept when a training is resumed twice" begin
    x, y, order = problem()
    function from(trainer=nothing)
        fresh = Trainer(Chain(Dense(12 => 16, relu), Dropout(0.5), Dense(16 => 3); dtype=eltype(x)); batch_size=20, threads=1)
        trainer === nothing && return fresh
        fresh.chain.parameters.vector .= trainer.chain.parameters.vector
        NETWORK.load_state!(fresh, NETWORK.training_state(trainer))
        return fresh
    end
    train(trainer, rows) = train_epoch!(trainer, x, y, order[1:rows])
    whole = from()
    train(whole, 40), train(whole, 41)  # the last row of 41 is a batch with another stream
    once = from(whole)
    train(once, 40)
    twice = from(once)
    train(once, 41), train(twice, 41)
    train(whole, 40), train(whole, 41)
    @test once.chain.parameters.vector == whole.chain.parameters.vector == twice.chain.parameters.vector
end

dropout_chain() = Chain(Dense(12 => 16, relu), Dropout(0.5), Dense(16 => 3))

"""A trainer whose batches have 20 samples at most."""
dropout_trainer(chain=dropout_chain()) = Trainer(chain; batch_size=20, threads=1)

"""Another one, from this state on."""
function resumed(trainer, state=NETWORK.training_state(trainer), chain=dropout_chain())
    found = dropout_trainer(chain)
    found.vector .= trainer.vector
    NETWORK.load_state!(found, state)
    return found
end

@testset "a resumed training may train its batches in another order: $rows, $copied" for
        rows in ([13, 53], [3, 13, 3, 53], [5, 20, 13, 5]), copied in (false, true)
    x, y, order = problem()
    trainer = dropout_trainer()
    train_epoch!(trainer, x, y, order)  # batches of 20 and then 13
    other = copied ? resumed(trainer, NETWORK.training_state(trainer), deepcopy(trainer.chain)) : resumed(trainer)
    for count in rows
        @test train_epoch!(other, x, y, order[1:count]) == train_epoch!(trainer, x, y, order[1:count])
    end
    @test other.vector == trainer.vector && NETWORK.training_state(other) == NETWORK.training_state(trainer)
end

@testset "a trainer that has trained more sizes resumes, too" begin
    x, y, order = problem()
    trainer, other = dropout_trainer(), dropout_trainer()
    train_epoch!(trainer, x, y, order[1:20])
    foreach(count -> train_epoch!(other, x, y, order[1:count]), (53, 3))
    other.vector .= trainer.vector
    NETWORK.load_state!(other, NETWORK.training_state(trainer))
    for count in (3, 53)
        @test train_epoch!(other, x, y, order[1:count]) == train_epoch!(trainer, x, y, order[1:count])
    end
end

@testset "a state of an older version resumes in the order in which it was trained" begin
    x, y, order = problem()
    trainer = dropout_trainer()
    train_epoch!(trainer, x, y, order)
    state = NETWORK.training_state(trainer)
    rows = reshape(state.numbers[5:end], NETWORK.STREAM_NUMBERS, :)
    older = Int64[state.numbers[1:2]; 2size(rows, 2); vec(rows[end-1:end, :])]
    other = resumed(trainer, merge(state, (numbers=older,)))
    for count in (53, 3, 53)
        @test train_epoch!(other, x, y, order[1:count]) == train_epoch!(trainer, x, y, order[1:count])
    end
    @test NETWORK.training_state(other) == NETWORK.training_state(trainer)
    @test error_of(() -> resumed(trainer, merge(state, (numbers=older[1:end-1],)))) isa ParameterError
    @test error_of(() -> resumed(trainer, merge(state, (numbers=[older[1:2]; 1; older[4]],)))) isa ParameterError
end

@testset "each step has its own learning rate" begin
    x, y, order = problem()
    rates = range(0.1, 0.0; length=cld(53, 10))
    one, other = (Trainer(model(); batch_size=10, threads=1) for _ in 1:2)
    losses = train_epoch!(one, x, y, order; rates=rates)
    expected = map(enumerate(rates)) do (step, rate)
        other.optimizer.learning_rate = rate
        train_epoch!(other, x, y, order[10step-9:min(10step, 53)])[1]
    end
    @test losses == expected && one.chain.parameters.vector == other.chain.parameters.vector
    @test occursin("for each of 6 steps, got 1", message_of(() -> train_epoch!(one, x, y, order; rates=[0.1])))
end

@testset "a barrier that is broken once stays so" begin
    team, found = NETWORK.Team(MANY), [Bool[] for _ in 1:MANY]
    @test_throws ArgumentError("gone") NETWORK.together(team) do k
        k == 1 && throw(ArgumentError("gone"))
        for _ in 1:5
            push!(found[k], NETWORK.barrier!(team))
        end
    end
    @test all(found[k] == fill(false, 5) for k in 2:MANY)
    NETWORK.together(k -> push!(found[k], NETWORK.barrier!(team)), team)
    @test all(last.(found))
end

"""Hands its input on, unless a number in it is above 100."""
struct Picky <: NETWORK.Layer
    rule::Any
end
Picky() = Picky(custom_rule(x -> (any(>(100), x) && error("picky"); copy(x)); vjp=(g, y, x) -> copy(g), opaque=true))
NETWORK.output_size(::Picky, input::Vector{Int}) = input
NETWORK.forward(layer::Picky, x::AD.Tensor, ::Dict{String,AD.Tensor}, ::Bool) = layer.rule(x)

@testset "an error in a part of a batch changes no parameter, where the parts meet: $first_bad" for first_bad in (true, false)
    random = MersenneTwister(3)
    x, y = randn(random, 2, 200), rand(random, 1:3, 200)
    chain = Chain(Dense(2 => 4), Picky(), Dense(4 => 3); dtype=Float64)
    trainer = Trainer(chain; loss=loss_of("softmax_cross_entropy"; class_weights=[1, 2, 1]), batch_size=200, threads=MANY, optimizer=SGD(0.1))
    train_epoch!(trainer, x, y)
    before, bad = copy(trainer.vector), copy(x)
    bad[:, first_bad ? 1 : 200] .= 1e6
    @test occursin("picky", sprint(showerror, error_of(() -> train_epoch!(trainer, bad, y))))
    @test trainer.vector == before
    train_epoch!(trainer, x, y)
    @test trainer.vector != before
end

"""Takes time to be planned."""
struct Slow <: NETWORK.Layer end
NETWORK.output_size(::Slow, input::Vector{Int}) = input
NETWORK.forward(::Slow, x::AD.Tensor, ::Dict{String,AD.Tensor}, training::Bool) = (training && sleep(0.5); x)

@testset "a parallel region that another task enters while parts of a batch that meet are planned" begin
    random = MersenneTwister(5)
    x, y = randn(random, 6, 40), rand(random, 1:3, 40)
    new() = Trainer(Chain(Dense(6 => 8), BatchNorm(8), Slow(), Dense(8 => 3); dtype=Float64); batch_size=20, threads=MANY)
    expected = train_epoch!(new(), x, y)
    region = @async begin
        sleep(0.1)
        Threads.@threads for _ in 1:MANY
            sleep(3)
        end
    end
    @test train_epoch!(new(), x, y) ≈ expected
    wait(region)
end

@testset "settings that need more vectors may be set when the trainer is made: $(typeof(o))" for o in (SGD(0.1), RMSProp(0.01))
    x, y, order = problem()
    trainer = Trainer(model(); optimizer=deepcopy(o), threads=1, batch_size=10)
    train_epoch!(trainer, x, y, order)
    trainer.optimizer.momentum = 0.9
    other = Trainer(model(); optimizer=deepcopy(trainer.optimizer), threads=1, batch_size=10)
    other.vector .= trainer.vector
    NETWORK.load_state!(other, merge(NETWORK.training_state(other), (numbers=NETWORK.training_state(trainer).numbers,)))
    isempty(trainer.state.first) || copyto!(other.state.first, trainer.state.first)
    @test train_epoch!(trainer, x, y, order) == train_epoch!(other, x, y, order)
    @test trainer.vector == other.vector
    p, g, state = ones(Float32, 10), ones(Float32, 10), State{Float32}(SGD(), 10)
    step!(Adam(0.1), state, p, g)
    @test all(isfinite, p) && length(state.first) == length(state.second) == 10
end

@testset "settings of an optimizer are checked when they are set, too: $(typeof(o))" for o in (SGD(), RMSProp(), Adam(), AdamW())
    wrong = [:learning_rate => -1, :weight_decay => -0.1, :clip_norm => -1, :clip_norm => 0, :clip_value => NaN, :weight_decay => "no",
        :momentum => 1, :alpha => -1, :beta1 => 1.5, :beta2 => NaN, :eps => 0]
    for (name, value) in wrong
        hasfield(typeof(o), name) || continue
        before = getfield(o, name)
        @test occursin("$(nameof(typeof(o))): $name must be", message_of(() -> setproperty!(o, name, value)))
        @test getfield(o, name) === before
    end
    o.clip_norm, o.learning_rate = 2, 1 // 2
    @test o.clip_norm === 2.0 && o.learning_rate === 0.5
    o.clip_norm = nothing
    @test o.clip_norm == Inf
    @test occursin("keeps its rate", message_of(() -> Dropout(0.5).rate = 0.1))
end

@testset "of an update that fails nothing is left, $(threads) threads, replay: $replay" for threads in unique((1, MANY)), replay in (true, false)
    function new(o)
        trainer = Trainer(Chain(Dense(1 => 16; bias=false); dtype=Float64); loss="mean_squared_error", optimizer=o, batch_size=2,
            accumulate=2, threads=threads, techniques=Techniques(replay=replay))
        trainer.vector .= 0
        return trainer
    end
    x, y = ones(1, 8), ones(16, 8)
    x[1, 3:4] .= 1.2e156
    y[:, 3:4] .= 1e153  # the gradient is finite, its norm is not
    trainer, expected = new(SGD(0.1; clip_norm=1.0)), new(SGD(0.1; clip_norm=1.0))
    @test error_of(() -> train_epoch!(trainer, x, y, 1:4)) isa NonFiniteError
    @test trainer.pending == 0 && all(iszero, trainer.total) && trainer.vector == expected.vector
    @test train_epoch!(trainer, x, y, 5:8) == train_epoch!(expected, x, y, 5:8)
    @test trainer.vector == expected.vector
end

@testset "a step that fails leaves the statistics of batch normalisation as they were: replay=$replay" for replay in (true, false)
    # The gradient is finite, and its norm is not: outputs are 0, since weights of the last layer take each other's away.
    x, y = [1.0 2 3 1000], [0.0 0 0 1e154]
    chain = Chain(Dense(1 => 16; name="first"), BatchNorm(16), Dense(16 => 1; name="last"); dtype=Float64)
    chain.parameters["first.weight"] .= 1
    chain.parameters["last.weight"] .= 1e154 .* [1 -1 1 -1 1 -1 1 -1 1 -1 1 -1 1 -1 1 -1]
    trainer = Trainer(chain; loss="mean_squared_error", optimizer=SGD(0.1; clip_norm=1.0), batch_size=4, threads=1,
        techniques=Techniques(replay=replay))
    before = copy(trainer.chain.parameters.vector)
    @test error_of(() -> train_epoch!(trainer, x, y)) isa NonFiniteError
    @test trainer.chain.parameters.vector == before
end

@testset "a training is resumed bit for bit, whatever is asked meanwhile: $asked" for asked in ("gradients", "costs", "a copy", "another size")
    x, y, order = problem()
    new(chain=Chain(Dense(12 => 16, relu), Dropout(0.5), Dense(16 => 3))) =
        Trainer(chain; optimizer=Adam(0.01), batch_size=20, threads=1)
    trainer = new()
    asked == "gradients" && loss_and_gradients(trainer, x[:, 1:20], y[1:20])
    train_epoch!(trainer, x, y, order)
    asked == "gradients" && loss_and_gradients(trainer, x[:, 1:7], y[1:7])
    other = asked == "a copy" ? new(deepcopy(trainer.chain)) : new()
    other.vector .= trainer.vector
    NETWORK.load_state!(other, NETWORK.training_state(trainer))
    if asked == "costs"
        NETWORK.suit!(other, [12])
        NETWORK.costs(other), NETWORK.threads_in_step(other)
    elseif asked == "another size"
        loss_and_gradients(other, x[:, 1:7], y[1:7])
    end
    for _ in 1:2
        @test train_epoch!(trainer, x, y, order) == train_epoch!(other, x, y, order)
    end
    @test trainer.vector == other.vector && NETWORK.training_state(trainer) == NETWORK.training_state(other)
end

@testset "two trainers of one chain that are made before either trains draw different masks" begin
    x, y, order = problem()
    chain = Chain(Dense(12 => 16, relu), Dropout(0.5), Dense(16 => 3))
    first, second = (Trainer(chain; batch_size=20, threads=1) for _ in 1:2)
    before = copy(chain.parameters.vector)
    losses = train_epoch!(first, x, y, order)
    chain.parameters.vector .= before
    @test train_epoch!(second, x, y, order) != losses
end

@testset "a trainer keeps what it was made with" begin
    trainer = Trainer(model(); batch_size=10, threads=1)
    for name in (:chain, :loss, :optimizer, :batch_size, :threads, :accumulate, :techniques)
        found = error_of(() -> setproperty!(trainer, name, getproperty(trainer, name)))
        @test found isa ConfigurationError && occursin("keeps the $name that it was made with", found.message)
    end
end

@testset "a copy of a trainer continues with the streams of its dropout layers" begin
    x, y, order = problem()
    trainer = Trainer(Chain(Dense(12 => 16, relu), Dropout(0.5), Dense(16 => 3)); batch_size=20, threads=1)
    train_epoch!(trainer, x, y, order)
    copied = deepcopy(trainer)
    @test train_epoch!(trainer, x, y, order) == train_epoch!(copied, x, y, order)
    @test trainer.vector == copied.vector
end

@testset "with rates, too, nothing is trained where something is wrong, and errors tell the step" begin
    x, y, order = problem()
    trainer = Trainer(model(); batch_size=10, threads=1)
    before = copy(trainer.vector)
    @test error_of(() -> train_epoch!(trainer, x, y, [order[1:20]; 999]; rates=[0.1, 0.1, 0.1])) isa ShapeError
    @test error_of(() -> train_epoch!(trainer, x, y, order[1:20]; rates=[0.1, -1])) isa ConfigurationError
    @test error_of(() -> train_epoch!(trainer, x, y, order[1:20]; rates=Float64[])) isa ShapeError
    @test error_of(() -> train_epoch!(trainer, x, y, order[1:20], zeros(2), fill(0.1, 50))) isa ShapeError
    @test trainer.vector == before
    x[1, order[25]] = NaN
    @test startswith(message_of(() -> train_epoch!(trainer, x, y, order; rates=fill(0.1, 6))), "step 3 of the epoch")
end

"""Has a gradient of nothing that comes before."""
struct Signs <: NETWORK.Layer end
NETWORK.output_size(::Signs, input::Vector{Int}) = input
NETWORK.forward(::Signs, x::AD.Tensor, ::Dict{String,AD.Tensor}, ::Bool) = sign.(x)

@testset "parameters without a gradient have none in the next step either: $(typeof(o))" for o in (RMSProp(0.01; weight_decay=0.1),
        RMSProp(0.01; weight_decay=0.1, momentum=0.5), Adam(0.01; weight_decay=0.1), SGD(0.1; momentum=0.9, weight_decay=0.1, clip_norm=0.1))
    random = MersenneTwister(2)
    x, y = randn(random, 4, 30), rand(random, 1:2, 30)
    found = map((true, false)) do replay
        chain = Chain(Dense(4 => 3), Signs(), Dense(3 => 2); dtype=Float64, seed=0)
        trainer = Trainer(chain; optimizer=deepcopy(o), batch_size=10, threads=1, techniques=Techniques(replay=replay))
        train_epoch!(trainer, x, y), train_epoch!(trainer, x, y)
        copy(chain.parameters.vector)
    end
    @test found[1] ≈ found[2] rtol = 1e-12
end

@testset "while a team works, another training has one thread" begin
    x, y, order = problem()
    new() = Trainer(Chain(Dense(12 => 8), BatchNorm(8), Dense(8 => 3); dtype=Float64); batch_size=20, threads=MANY)
    expected = train_epoch!(new(), Float64.(x), y, order)
    lock(NETWORK.ONE_TEAM)
    try
        @test NETWORK.threads_to_use(MANY) == 1
        @test train_epoch!(new(), Float64.(x), y, order) ≈ expected
    finally
        unlock(NETWORK.ONE_TEAM)
    end
    @test NETWORK.threads_to_use(MANY) == MANY
end

@testset "the mean loss of an epoch is by the weights of the mini-batches" begin
    first_row(r, d, i, o) = reshape([1.0, 0.0], 2, 1)
    x = Float32[4 0 0 0]
    for (options, y) in (((ignored_class=3,), [2, 3, 2, 2]), ((class_weights=[1.0, 5.0],), [2, 1, 2, 2]), (NamedTuple(), [2, 1, 2, 2]))
        chain = Chain(Dense(1 => 2; bias=false, weight_init=first_row))
        trainer = Trainer(chain; loss=loss_of(softmax_cross_entropy; options...), optimizer=SGD(0.0), batch_size=2, threads=1)
        for shuffle in (false, true)
            @test train!(trainer, x, y; shuffle=shuffle)[1] ≈ evaluate(trainer, x, y).loss rtol = 1e-6
        end
    end
end

@testset "a very small epsilon counts beside small gradients, $(typeof(o))" for (o, wanted) in
        ((Adam(0.1; eps=1e-20), -0.1 * 1e-18 / (1e-18 + 1e-20)), (RMSProp(0.1, 0.99; eps=1e-20), -0.1 * 1e-18 / (1e-19 + 1e-20)))
    chain = Chain(Dense(1 => 1; bias=false, weight_init="zeros"))
    train!(chain, fill(1f0, 1, 1), fill(-5f-19, 1, 1); loss="mean_squared_error", optimizer=o, batch_size=1, threads=1)
    @test chain.parameters["dense.weight"][1] ≈ wanted rtol = 1e-2
end
