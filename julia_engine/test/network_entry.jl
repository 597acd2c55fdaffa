# The entry points, called as another language calls them: by address, with numbers counted from 0.

using TwinGrad.NETWORK: NETWORK
using TwinGrad: Entry
using Random: MersenneTwister, randperm

# The network of `described`: 12 numbers as 3 steps of 4, an RNN with 5 units, 3 classes.
described(; bits=64, threads=1, batch=10, format=2) = Int64[
    format, bits, batch, threads, 1, 1, 0, SWITCHES..., 1, 1, 12, 3,
    6, 1, Int('s'), 2, 3, 4,
    2, 1, Int('r'), 5, 2, 1,
    1, 6, codeunits("output")..., 3, 1]
const SWITCHES = ones(Int64, length(Entry.TECHNIQUE_CODES))
const RATES = [0.1, 0.0, 0.9, 0.999, 1e-8, 0.0, 0.0]

make_session(integers, floats, vector) = GC.@preserve integers floats vector ccall(Entry.create_pointer(), Int64,
    (Ptr{Int64}, Int64, Ptr{Float64}, Int64, Ptr{Cvoid}, Int64),
    integers, length(integers), floats, length(floats), vector, length(vector))

call_train(s, x, y, order, first, last, losses) = GC.@preserve x y order losses ccall(Entry.train_pointer(), Cint,
    (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Int64, Ptr{Int64}, Int64, Int64, Ptr{Float64}),
    s, size(x)[end], x, y, length(order), order, first, last, losses)

function last_message()
    buffer = zeros(UInt8, 2000)
    n = ccall(Entry.message_pointer(), Int64, (Ptr{UInt8}, Int64), buffer, length(buffer))
    return String(buffer[1:n])
end

"""The same network, with the same parameters, by the Julia interface."""
function twin(vector)
    chain = Chain(Reshape(4, 3; name="s"), RNN(4 => 5; name="r"), Dense(5 => 3; name="output"); seed=3, dtype=eltype(vector))
    isempty(vector) || (chain.parameters.vector .= vector)
    return chain
end

@testset "a session is the trainer, $T, threads=$threads" for T in (Float32, Float64), threads in unique((1, Threads.nthreads()))
    random = MersenneTwister(4)
    x, y, order = randn(random, T, 12, 47), rand(random, 1:3, 47), randperm(random, 47)
    chain = twin(T[])
    vector = copy(chain.parameters.vector)
    trainer = Trainer(chain; optimizer=SGD(0.1), batch_size=10, threads=threads)
    s = make_session(described(bits=8 * sizeof(T), threads=threads), RATES, vector)
    @test s > 0
    labels, rows = y .- 1, order .- 1

    loss, gradient = Ref(0.0), zeros(T, length(vector))
    @test GC.@preserve(x, labels, gradient, ccall(Entry.gradients_pointer(), Cint,
        (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}, Ptr{Cvoid}), s, 47, x, labels, loss, gradient)) == 0
    expected_loss, expected = loss_and_gradients(trainer, x, y)
    @test loss[] == expected_loss && as_dict(chain.parameters.layout, gradient) == expected

    for _ in 1:2
        losses = fill(NaN, 5)
        @test call_train(s, x, labels, rows, 1, 2, losses) == 0
        @test all(isnan, losses[3:5])
        @test call_train(s, x, labels, rows, 3, 5, losses) == 0
        @test losses == train_epoch!(trainer, x, y, order)
        @test vector == chain.parameters.vector
    end

    found, logits = zeros(2), zeros(T, 3, 47)
    @test GC.@preserve(x, labels, found, ccall(Entry.evaluate_pointer(), Cint,
        (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}), s, 47, x, labels, found)) == 0
    expected = evaluate(trainer, x, y)
    @test found == [expected.loss, expected.accuracy]
    @test GC.@preserve(x, logits, ccall(Entry.predict_pointer(), Cint,
        (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}), s, 47, x, logits)) == 0
    @test logits == predict(trainer, x)

    # Mistakes come back as a status and a message, and the session stays usable.
    losses, before = zeros(5), copy(vector)
    @test call_train(s, x, labels .+ 1, rows, 1, 5, losses) == 1
    @test occursin("from 0 to 2", last_message())
    @test call_train(s, x, labels, order, 1, 5, losses) == 1
    @test occursin("from 0 to 46, got 47", last_message())
    @test call_train(s, x, labels, rows, 1, 6, losses) == 1
    @test occursin("steps 1 to 6", last_message())
    bad = copy(x)
    bad[1, order[12]] = NaN
    @test call_train(s, bad, labels, rows, 2, 5, losses) == 2
    @test occursin("step 2 of the epoch", last_message()) && vector == before
    @test call_train(s, x, labels, rows, 1, 5, losses) == 0

    @test ccall(Entry.free_pointer(), Cint, (Int64,), s) == 0
    @test call_train(s, x, labels, rows, 1, 5, losses) == 1
    @test occursin("no session $s", last_message())
end

@testset "every layer, optimizer and loss has a code" begin
    @test Set(Entry.LAYER_CODES) == Set(keys(LAYERS)) && Set(Entry.OPTIMIZER_CODES) == Set(keys(OPTIMIZERS))
    @test Set(Entry.LOSS_CODES) == Set(keys(LOSSES)) && Set(Entry.ACTIVATION_CODES) == Set(keys(ACTIVATIONS))
    @test collect(map(Symbol, Entry.TECHNIQUE_CODES)) == collect(fieldnames(Techniques))
    head(optimizer) = Int64[2, 32, 10, 1, 1, optimizer, 0, SWITCHES..., 1, 2, 3, 4]
    layers = Int64[7,
        3, 1, 97, 5, 2,  # lstm
        4, 1, 98, 6, 2,  # gru
        2, 1, 99, 2, 3, 2,  # rnn, relu
        7, 1, 100, 4,  # sigmoid
        5, 1, 101,  # flatten
        8, 1, 102, 0,  # dropout
        1, 1, 103, 3, 0]  # dense without bias
    chain = Chain(LSTM(4 => 5; returns="sequence"), GRU(5 => 6; returns="sequence"), RNN(6 => 2, relu; returns="sequence"),
        Activation(sigmoid), Flatten(), Dropout(0.5), Dense(6 => 3; bias=false))
    for optimizer in 1:4
        vector = copy(chain.parameters.vector)
        s = make_session([head(optimizer); layers], [RATES; 0.5], vector)
        @test s > 0
        x = randn(MersenneTwister(1), Float32, 4, 3, 20)
        logits = zeros(Float32, 3, 20)
        ccall(Entry.predict_pointer(), Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}), s, 20, x, logits)
        @test logits ≈ value(chain(x))
        @test call_train(s, x, rand(0:2, 20), collect(0:19), 1, 2, zeros(2)) == 0
        @test vector != chain.parameters.vector
        ccall(Entry.free_pointer(), Cint, (Int64,), s)
    end
end

@testset "a description that can't be" begin
    vector = copy(twin(Float64[]).parameters.vector)
    failing(integers, floats=RATES, v=vector) = (@test make_session(integers, floats, v) == -1; last_message())
    @test occursin("format 2, got 1", failing(described(format=1)))
    @test occursin("32 or 64", failing(described(bits=16)))
    @test occursin("ends too early", failing(described()[1:30]))
    @test occursin("julia -t", failing(described(threads=1000)))
    @test occursin("learning_rate", failing(described(), [-1.0; RATES[2:end]]))
    @test occursin("must have $(length(vector)) elements", failing(described(), RATES, vector[1:end-1]))
    counters = zeros(Int64, 2)
    @test ccall(Entry.allocated_pointer(), Cint, (Ptr{Int64},), counters) == 0 && all(>(0), counters)
end

@testset "what is done while the package is compiled" begin
    foreach(n -> (@test TwinGrad.precompile_session(Float32, n) === nothing), (1, 3))
    @test TwinGrad.precompile_plan() === nothing
    @test isempty(Entry.SESSIONS)
end
