# Calls in great number: forward mode over sizes and chunks, and all modes while memory is collected again and again. A
# campaign makes 10,000 calls, and an hour of them.

using Random: MersenneTwister

const CAMPAIGN = draws(1) > 1

ackley(x) = -20exp(-0.2sqrt(sum(abs2, x) / length(x))) - exp(sum(t -> cos(2t), x) / length(x)) + 20

function ackley_gradient(x)
    n, r, c = length(x), sqrt(sum(abs2, x) / length(x)), exp(sum(t -> cos(2t), x) / length(x))
    return [4exp(-0.2r) * t / (n * r) + 2c * sin(2t) / n for t in x]
end

@testset "forward mode at many sizes, with many chunks" begin
    seed = seeded(91)
    random = MersenneTwister(seed)
    # Each pair of a chunk and an element type is compiled anew, for seconds.
    kinds = [(chunk, T) for chunk in 1:16 for T in (Float64, Float32)]
    kinds = CAMPAIGN ? kinds : rand(random, kinds, 3)
    wrong = Tuple{Int,Int,DataType}[]
    for _ in 1:draws(100)
        (chunk, T), n = rand(random, kinds), rand(random, 1:40)
        x = randn(random, T, n)
        expected, g = ackley_gradient(x), zeros(T, n)
        found = forward_gradient(ackley, x; chunk=chunk)
        forward_gradient!(g, ackley, x, ForwardBuffers(ackley, x; chunk=chunk))
        isapprox(found, expected; rtol=sqrt(eps(T))) && g == found || push!(wrong, (n, chunk, T))
    end
    @test (seed, wrong) == (seed, [])
end

@testset "calls while memory is collected" begin
    seed = seeded(92)
    random = MersenneTwister(seed)
    w, x = randn(random, 5, 7), randn(random, 7, 11)
    loss(w, x) = softmax_cross_entropy(tanh.(w * x), [1 + k % 5 for k in 1:11])
    replayed = compile(value_and_grad(loss; argnums=(1, 2)))
    last_step(w) = scan((h, x) -> (h = tanh.(w * h .+ x); (h, sum(h))), zeros(5), x[1:5, :]; checkpoint=true)[1]
    rows, labels, order = randn(random, Float32, 12, 30), rand(random, 1:3, 30), collect(1:30)
    function trained(optimizer)
        trainer = Trainer(Chain(Reshape(4, 3), RNN(4 => 5), Dense(5 => 3); seed=3); optimizer=optimizer, batch_size=8)
        return train_epoch!(trainer, rows, labels, order), predict(trainer, rows)
    end
    square = randn(random, 5, 5)
    calls = (() -> gradient(loss, w, x), () -> replayed(w, x), () -> forward_gradient(ackley, w),
        () -> grad(w -> sum(last_step(w)))(square), () -> hvp(w -> loss(w, x), w, w), () -> trained(SGD(0.1)),
        () -> trained(Adam(0.1)))
    first_results = map(call -> call(), calls)
    stop, count, wrong = time() + 3600, 0, Int[]
    while CAMPAIGN ? time() < stop : count < 20
        k = rand(random, eachindex(calls))
        garbage = [zeros(rand(random, 1:2000)) for _ in 1:rand(random, 1:50)]
        GC.gc(rand(random, Bool))
        calls[k]() == first_results[k] || push!(wrong, k)
        count += length(garbage) > 0
    end
    println("campaign: $count calls while memory was collected")
    @test (seed, wrong) == (seed, [])
end
