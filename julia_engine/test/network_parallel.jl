# Several processes that train together compute what one process computes of the same mini-batches. Tasks stand for them.

using TwinGrad.NETWORK: Communicator, part
using Random: randperm, MersenneTwister

"""What adds up a vector over this number of tasks: the last to come sums, and wakes the others."""
function adder(size)
    total, count, everybody = Ref{Any}(nothing), Ref(0), Condition()
    return function (vector)
        total[] = count[] == 0 ? copy(vector) : total[] .+ vector
        count[] += 1
        found = if count[] == size
            count[] = 0
            sum = total[]
            notify(everybody, sum)
            sum
        else
            wait(everybody)
        end
        copyto!(vector, found)
    end
end

"""What `work` returns in each of `size` tasks, called with a communicator."""
function in_tasks(work, size)
    add! = adder(size)
    tasks = [@async(work(Communicator(rank, size, add!))) for rank in 0:size-1]
    return map(fetch, tasks)
end

small_dense() = Chain(Dense(6 => 8, tanh), Dense(8 => 3); dtype=Float64)
small_text() = Chain(Embedding(20 => 4), Flatten(), Dense(24 => 3); dtype=Float64)

function trained_together(make, x, y, batch, rows, communicator; threads=1, optimizer=() -> SGD(0.1), accumulate=1)
    chain = make()
    trainer = Trainer(chain; optimizer=optimizer(), batch_size=batch, threads=threads, accumulate=accumulate,
        communicator=communicator)
    losses = [train_epoch!(trainer, x, y, randperm(MersenneTwister(epoch), size(x)[end])[1:rows]) for epoch in 1:2]
    return losses, copy(chain.parameters.vector)
end

const SAMPLES, WORDS, KINDS = let random = MersenneTwister(0)
    randn(random, 6, 40), rand(random, 1:20, 6, 40), rand(random, 1:3, 40)
end

@testset "$size processes train as one, batches of $batch of $rows rows" for size in (1, 2, 3, 7), batch in (1, 5, 16, 100),
        rows in (1, 7, 36, 40)
    losses, vector = trained_together(small_dense, SAMPLES, KINDS, batch, rows, nothing)
    for (found, other) in in_tasks(c -> trained_together(small_dense, SAMPLES, KINDS, batch, rows, c), size)
        @test found ≈ losses rtol = 1e-12
        @test other ≈ vector rtol = 1e-12
    end
end

@testset "every kind of network and update: $name" for (name, make, data, options) in (
        ("an embedding", small_text, WORDS, NamedTuple()),
        ("accumulated", small_dense, SAMPLES, (accumulate=3,)),
        ("clipped, with momentum", small_dense, SAMPLES, (optimizer=() -> SGD(0.1; momentum=0.9, clip_norm=0.05),)),
        ("Adam", small_text, WORDS, (optimizer=() -> Adam(0.01),)))
    losses, vector = trained_together(make, data, KINDS, 10, 38, nothing; options...)
    for (found, other) in in_tasks(c -> trained_together(make, data, KINDS, 10, 38, c; options...), 3)
        @test found ≈ losses rtol = 1e-11
        @test other ≈ vector rtol = 1e-11
    end
end

@testset "the threads of a process add their parts up before processes do" begin
    threads = min(2, Threads.nthreads())
    losses, vector = trained_together(small_dense, SAMPLES, KINDS, 10, 38, nothing; threads=threads)
    alone = Communicator(0, 1, identity)
    found, other = trained_together(small_dense, SAMPLES, KINDS, 10, 38, alone; threads=threads)
    @test found ≈ losses rtol = 1e-12
    @test other ≈ vector rtol = 1e-12
end

@testset "parts are disjoint, equal, and count as much as they have" for size in (1, 2, 3, 4, 7), samples in (1, 2, 5, 6, 64)
    parts = [part(Communicator(rank, size, identity), samples) for rank in 0:size-1]
    @test sum(p.weight for p in parts) ≈ 1
    @test reduce(vcat, [collect(p.first+1:p.first+p.count) for p in parts if p.weight > 0]) == 1:samples
    @test all(p -> 0 < p.count && p.first + p.count <= samples, parts)
    @test maximum(p.count for p in parts) - minimum(p.count for p in parts) <= 1
end

@testset "what is not finite in part $place ends all with the same parameters" for place in 0:2
    spoiled = copy(SAMPLES)
    spoiled[:, 2 * place + 7] .= NaN
    found = in_tasks(3) do communicator
        chain = small_dense()
        trainer = Trainer(chain; optimizer=SGD(0.1), batch_size=6, threads=1, communicator=communicator)
        error_of(() -> train_epoch!(trainer, spoiled, KINDS, collect(1:12))), copy(chain.parameters.vector)
    end
    @test all(error isa NonFiniteError && startswith(error.message, "step 2 of the epoch") for (error, _) in found)
    @test [occursin("another process's part", error.message) for (error, _) in found] == [rank != place for rank in 0:2]
    @test found[1][2] == found[2][2] == found[3][2] && all(isfinite, found[1][2])
end

@testset "after a step that was not finite the next ones are as ever, of $size processes, threads=$threads" for size in (1, 2),
    threads in unique((1, Threads.nthreads()))
    random = MersenneTwister(3)
    good, bad, y = randn(random, 4, 6), fill(NaN, 4, 6), rand(random, 1:3, 6)
    found = in_tasks(size) do communicator
        # The first tensor of the gradient is that of a layer on which the loss does not depend.
        graph = Graph(Dense(4 => 8; name="unused"), Dense(4 => 3; name="out"); inputs=Dict("out" => ["input"]), dtype=Float64)
        trainer = Trainer(graph; batch_size=6, threads=threads, communicator=communicator)
        @test error_of(() -> train_epoch!(trainer, bad, y)) isa NonFiniteError
        train_epoch!(trainer, good, y)
    end
    @test all(losses -> all(isfinite, losses), found)
end

@testset "what can't be done in parts says so" begin
    communicator = Communicator(0, 2, identity)
    batch_norm, eager = Chain(Dense(6 => 8), BatchNorm(8)), Techniques(replay=false)
    @test occursin("statistics of a whole batch", message_of(() -> Trainer(batch_norm; communicator=communicator)))
    @test occursin("replay and batched", message_of(() -> Trainer(small_dense(); techniques=eager, communicator=communicator)))
    @test occursin("rank 2 of size 2", message_of(() -> Communicator(2, 2, identity)))
end

@testset "another trainer of the same chain changes no process's masks" begin
    after(beside) = in_tasks(2) do communicator
        chain = Chain(Dense(6 => 8, tanh), Dropout(0.5), Dense(8 => 3); seed=1, dtype=Float64)
        trainer = Trainer(chain; optimizer=SGD(0.1), batch_size=40, threads=1, communicator=communicator)
        beside && Trainer(chain)
        train_epoch!(trainer, SAMPLES, KINDS, 1:40)
        copy(chain.parameters.vector)
    end
    @test after(true) == after(false)
end

@testset "no two processes draw the same dropout masks, and each continues with its own" begin
    with_dropout() = Chain(Dense(6 => 8, tanh), Dropout(0.5), Dense(8 => 3); dtype=Float64)
    function trained(epochs, communicator, kept)
        chain = with_dropout()
        trainer = Trainer(chain; optimizer=SGD(0.1), batch_size=7, threads=1, communicator=communicator)
        if kept !== nothing
            copyto!(chain.parameters.vector, kept[1])
            NETWORK.load_state!(trainer, kept[2])
        end
        losses = [train_epoch!(trainer, SAMPLES, KINDS, randperm(MersenneTwister(epoch), 40)) for epoch in epochs]
        return copy(chain.parameters.vector), NETWORK.training_state(trainer), losses
    end
    whole = in_tasks(c -> trained(1:4, c, nothing), 3)
    half = in_tasks(c -> trained(1:2, c, nothing), 3)
    again = in_tasks(c -> trained(3:4, c, half[c.rank+1]), 3)
    @test length(unique(state.numbers for (_, state, _) in whole)) == 3
    for rank in 1:3
        @test again[rank][2].numbers == whole[rank][2].numbers
        @test again[rank][1] ≈ whole[rank][1] rtol = 1e-12  # tasks add up in the order in which they come
        @test [half[rank][3]; again[rank][3]] ≈ whole[rank][3] rtol = 1e-12
    end
end
