# The entry points, called as another language calls them: by address, with numbers counted from 0.

using TwinGrad.NETWORK: NETWORK
using TwinGrad: Entry
using Random: MersenneTwister, randperm

# The network of `described`: 12 numbers as 3 steps of 4, an RNN with 5 units, 3 classes.
described(; dtype="float64", threads=1, batch=10, format=3, holds="numbers", input="12", optimizer=SGD_LINE, techniques="",
        layers=["id=s op=reshape shape=3,4", "id=r op=rnn units=5 activation=tanh returns=last",
            "id=output op=dense units=3 bias=true"], count=length(layers), loss="softmax_cross_entropy") =
    "session format=$format dtype=$dtype batch_size=$batch threads=$threads loss=$loss holds=$holds input=$input " *
    "layers=$count\noptimizer $optimizer\ntechniques$techniques\n" * join("layer $layer\n" for layer in layers)
const SGD_LINE = "name=sgd learning_rate=0.1 momentum=0.0 nesterov=false weight_decay=0.0"
const OPTIMIZER_LINES = (SGD_LINE,
    "name=rmsprop learning_rate=0.1 alpha=0.9 eps=1e-8 momentum=0.5 weight_decay=0.0 clip_norm=0.5",
    "name=adam learning_rate=0.1 betas=0.9,0.999 eps=1e-8 weight_decay=0.0",
    "name=adamw learning_rate=0.1 betas=0.9,0.999 eps=1e-8 weight_decay=0.01")

make_session(text, vector) = GC.@preserve text vector ccall(Entry.create_pointer(), Int64,
    (Ptr{UInt8}, Int64, Ptr{Cvoid}, Int64), text, sizeof(text), vector, length(vector))

call_train(s, x, y, order, first, last, losses) = GC.@preserve x y order losses ccall(Entry.train_pointer(), Cint,
    (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Int64, Ptr{Int64}, Int64, Int64, Ptr{Float64}),
    s, size(x)[end], x, y, length(order), order, first, last, losses)

function last_message()
    buffer = zeros(UInt8, 2000)
    n = ccall(Entry.message_pointer(), Int64, (Ptr{UInt8}, Int64), buffer, length(buffer))
    return String(buffer[1:n])
end

@testset "a message is cut where there is no room, and none is written to no room" begin
    @test ccall(Entry.free_pointer(), Cint, (Int64,), 123_456) == 1
    whole = last_message()
    for capacity in (5, 0, -1, typemin(Int64))
        buffer = fill(0x2a, 9)
        @test ccall(Entry.message_pointer(), Int64, (Ptr{UInt8}, Int64), buffer, capacity) == length(whole)
        @test String(copy(buffer)) == whole[1:max(capacity, 0)] * "*"^(9 - max(capacity, 0))
    end
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
    s = make_session(described(dtype=lowercase(string(T)), threads=threads), vector)
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

@testset "layers and optimizers come by name" begin
    layers = ["id=a op=lstm units=5 returns=sequence", "id=b op=gru units=6 returns=sequence inputs=a",
        "id=c op=rnn units=2 activation=relu returns=sequence", "id=d op=activation activation=sigmoid", "id=e op=flatten",
        "id=f op=dropout rate=0.5", "id=g op=dense units=3 bias=false"]
    chain = Chain(LSTM(4 => 5; returns="sequence"), GRU(5 => 6; returns="sequence"), RNN(6 => 2, relu; returns="sequence"),
        Activation(sigmoid), Flatten(), Dropout(0.5), Dense(6 => 3; bias=false))
    for optimizer in OPTIMIZER_LINES
        vector = copy(chain.parameters.vector)
        s = make_session(described(dtype="float32", input="3,4", optimizer=optimizer, layers=layers), vector)
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

@testset "axes come in C order and are counted from 0" begin
    layer(text, input) = (line = NETWORK.Line("layer id=a $text");
        NETWORK.reading(() -> NETWORK.read_layer(NETWORK.LAYERS[NETWORK.given(line, "op", String)], line, input), line))
    conv = layer("op=conv2d filters=6 kernel=3,2 stride=1,2 padding=1,2,3,4 dilation=5,6 groups=2 bias=true", [28, 27, 4])
    @test (conv.channels, conv.filters, conv.kernel, conv.stride) == (4, 6, [2, 3], [2, 1])
    @test (conv.padding, conv.dilation, conv.groups, conv.bias) == ([3, 4, 1, 2], [6, 5], 2, true)
    pool = layer("op=max_pool1d window=4 stride=2 padding=1,0 dilation=2 ceil_mode=true", [9, 5])
    @test (pool.window, pool.stride, pool.padding, pool.dilation, pool.ceil_mode) == ([4], [2], [1, 0], [2], true)
    @test layer("op=reshape shape=2,3,4", [24]).dims == [4, 3, 2]
    @test layer("op=permute_dims axes=2,0,1", [4, 3, 2]).axes == [2, 3, 1]
    words(text) = layer("op=embedding vocabulary=9 dimension=4 trainable=true$text", [3])
    @test (words("").padding_index, words(" padding_index=0").padding_index) == (0, 1)
    norm = layer("op=batch_norm momentum=0.25 eps=1e-3", [7, 3])
    @test (norm.channels, norm.momentum, norm.eps) == (3, 0.25, 1e-3)
    @test layer("op=layer_norm eps=0.1", [7, 3]).features == layer("op=rbf units=2", [7, 3]).inputs == 7
end

@testset "a description that can't be" begin
    vector = copy(twin(Float64[]).parameters.vector)
    failing(text, v=vector) = (@test make_session(text, v) == -1; last_message())
    one(layer) = failing(described(layers=[layer]))
    ruled(optimizer) = failing(described(optimizer=optimizer))
    @test occursin("format 3, got 2", failing(described(format=2)))
    @test occursin("dtype: expected one of float32, float64, got \"float16\"", failing(described(dtype="float16")))
    @test occursin("julia -t", failing(described(threads=1000)))
    @test occursin("batch_size must be an integer >= 1", failing(described(batch=0)))
    @test occursin("batch_size: expected a whole number, got \"1e3\"", failing(described(batch="1e3")))
    @test occursin("unknown loss \"hinge\"", failing(described(loss="hinge")))
    @test occursin("label_smoothing: expected a number, got", failing(described(loss="softmax_cross_entropy label_smoothing=x")))
    @test occursin("class_weights must be finite numbers >= 0", failing(described(loss="softmax_cross_entropy class_weights=-1,2,1")))
    @test occursin("there is no setting ignored_class", failing(described(loss="mean_squared_error ignored_class=0")))
    @test occursin("there is no setting \"weights\"", failing(described(loss="softmax_cross_entropy weights=1")))
    @test occursin("must have $(length(vector)) elements", failing(described(), vector[1:end-1]))
    @test occursin("samples of ids do not suit a model that begins with Reshape", failing(described(holds="ids")))
    for n in 0:ncodeunits(described())-1
        @test occursin("ends too early", failing(described()[1:n]))
    end
    @test occursin("ends too early", failing(described(count=4)))
    @test occursin("continues after its 2 layers", failing(described(count=2)))
    @test occursin("must be ASCII", failing(described(loss="é")))
    @test occursin("at most 10000000 bytes", failing(" "^10_000_001))

    # Of a line: what is wrong is named with the layer, or the optimizer, and its setting.
    @test occursin("layer \"a\" (dens): op: expected one of activation, ", one("id=a op=dens units=3 bias=true"))
    @test occursin("layer \"a\" (dense): there is no setting \"unit\"; there are: ",
        one("id=a op=dense units=3 bias=true unit=3"))
    @test occursin("layer \"a\" (dense): the setting units is missing", one("id=a op=dense bias=true"))
    @test occursin("layer \"a\" (dense): units: expected a whole number, got \"three\"",
        one("id=a op=dense units=three bias=true"))
    @test occursin("layer \"a\" (dense): Dense: units must be an integer >= 1", one("id=a op=dense units=-3 bias=true"))
    @test occursin("layer \"a\" (dense): bias: expected true or false, got \"1\"", one("id=a op=dense units=3 bias=1"))
    @test occursin("(reshape): shape: expected a whole number, or several", one("id=a op=reshape shape=3,,4"))
    @test occursin("shape: expected a whole number, or several", one("id=a op=reshape shape=$(join(ones(Int, 100), ","))"))
    @test occursin("layer \"a\" (flatten): inputs: there is no layer \"b\" before this one; there are: none",
        one("id=a op=flatten inputs=b"))
    reading(inputs) = failing(described(layers=["id=a%2C op=flatten", "id=b op=flatten", "id=c op=flatten inputs=$inputs",
        "id=d op=flatten"]))
    @test occursin("there is no layer \"d\" before this one; there are: a,, b", reading("b,d"))
    @test occursin("there is no layer \"c\" before", reading("c")) && occursin("there is no layer \"\" before", reading(""))
    @test occursin("inputs: expected a text, or several", reading("%zz"))
    @test !occursin("inputs", reading("b")) && !occursin("inputs", one("id=a op=flatten inputs=input"))
    @test occursin("line 4, layer: units is set twice", one("id=a op=dense units=3 units=4 bias=true"))
    @test occursin("line 4, layer: expected name=value, got \"units\"", one("id=a op=dense units"))
    @test occursin("id: expected a text, got \"%F\"", one("id=%F op=flatten"))
    @test occursin("id: expected a text, got \"%ff\"", one("id=%ff op=flatten"))
    @test occursin("the setting id is missing", one("op=flatten"))
    @test occursin("two layers are called \"a\"", failing(described(layers=["id=a op=flatten", "id=a op=flatten"])))
    @test occursin("optimizer sgd: SGD: learning_rate must be", ruled(replace(SGD_LINE, "0.1" => "-1.0")))
    @test occursin("optimizer adam: the setting betas is missing", ruled(replace(SGD_LINE, "sgd" => "adam")))
    @test occursin("name: expected one of adam, adamw, rmsprop, sgd, got \"lion\"", ruled("name=lion"))
    @test occursin("no technique 'fusion'; it has replay, ", failing(described(techniques=" fusion=false")))
    @test occursin("techniques: fuse: expected true or false, got \"no\"", failing(described(techniques=" fuse=no")))

    s = make_session(described(techniques=" fuse=false sparse_columns=true"), vector)
    @test Entry.SESSIONS[s].techniques == Techniques(fuse=false)
    @test ccall(Entry.free_pointer(), Cint, (Int64,), s) == 0
    text = "\"; exit() # é\0 %="
    s = make_session(described(layers=["id=$(join("%" * string(byte; base=16, pad=2) for byte in codeunits(text))) op=reshape " *
        "shape=3,4", "id=r op=rnn units=5 activation=tanh returns=last", "id=output op=dense units=3 bias=true"]), vector)
    @test s > 0 && Entry.SESSIONS[s].chain.ids[1] == text
    @test ccall(Entry.free_pointer(), Cint, (Int64,), s) == 0
    counters = zeros(Int64, 2)
    @test ccall(Entry.allocated_pointer(), Cint, (Ptr{Int64},), counters) == 0 && all(>(0), counters)
end

@noinline reference_to(s) = WeakRef(Entry.SESSIONS[s])  # in a frame that is gone when the session is freed

"""Whether nothing holds the trainer of a session that was trained for an epoch, and then freed."""
function is_given_back(threads)
    units = 16 * cld(Entry.COLLECT_FROM, 16 * 3 * 8 * 12)
    vector = zeros(13 * units)
    random = MersenneTwister(5)
    x, y = randn(random, 12, 10), rand(random, 0:units-1, 10)
    trainer = GC.@preserve vector begin  # it outlives the session
        s = make_session(described(threads=threads, layers=["id=output op=dense units=$units bias=true"]), vector)
        @test s > 0 && call_train(s, x, y, collect(0:9), 1, 1, zeros(1)) == 0
        found = reference_to(s)
        @test ccall(Entry.free_pointer(), Cint, (Int64,), s) == 0
        found
    end
    return trainer.value === nothing
end

@testset "what a large session held is given back when it is freed, threads=$threads" for threads in unique((1, Threads.nthreads()))
    @test is_given_back(threads)
end

# A layer that the engine does not have: a type, its methods, and a name.
struct Gain <: NETWORK.Layer
    features::Int
    bound::Float64
    name::String
end
NETWORK.parameters(layer::Gain) = ["gain" => NETWORK.ParameterSpec([layer.features], "ones", layer.features, layer.features)]
NETWORK.output_size(::Gain, input::Vector{Int}) = input
NETWORK.forward(layer::Gain, x::AD.Tensor, parameters::Dict{String,AD.Tensor}, training::Bool) =
    layer.bound .* tanh.(x .* parameters["gain"])
NETWORK.read_layer(::Type{Gain}, line::NETWORK.Line, input::Vector{Int}) =
    Gain(NETWORK.features(input), NETWORK.given(line, "bound", Float64), NETWORK.given(line, "id", String))

@testset "a new layer is one type" begin
    layers = ["id=g op=gain bound=2.0", "id=output op=dense units=3 bias=true"]
    random = MersenneTwister(7)
    x, y = randn(random, 12, 40), rand(random, 0:2, 40)
    vector = [ones(12); zeros(4); 0.1 .* randn(random, 48); zeros(16)]  # every tensor begins at a multiple of 16 elements
    @test make_session(described(layers=layers), vector) == -1
    @test occursin("op: expected one of activation, ", last_message()) && occursin("got \"gain\"", last_message())
    NETWORK.LAYERS["gain"] = Gain
    try
        s = make_session(described(layers=layers), vector)
        @test make_session(described(layers=replace.(layers, "bound=2.0" => "bond=2.0")), vector) == -1
        @test occursin("layer \"g\" (gain): the setting bound is missing", last_message())
        @test s > 0 && collect(keys(Entry.SESSIONS[s].chain.parameters)) == ["g.gain", "output.weight", "output.bias"]
        losses = zeros(4)
        epochs = [(@test call_train(s, x, y, collect(0:39), 1, 4, losses) == 0; sum(losses)) for _ in 1:20]
        @test epochs[end] < epochs[1]
        @test all(vector[1:12] .!= 1) && vector[13:16] == zeros(4)
        ccall(Entry.free_pointer(), Cint, (Int64,), s)
    finally
        delete!(NETWORK.LAYERS, "gain")
    end
end

@testset "what is precompiled has every layer, loss and optimizer" begin
    word(line, name) = match(Regex("\\b$name=(\\S+)"), line)[1]
    sessions = TwinGrad.PRECOMPILED_SESSIONS
    own = [name for (name, layer) in NETWORK.LAYERS if parentmodule(layer) === NETWORK]
    @test Set(word(layer, "op") for session in sessions for layer in session[5]) == Set(own)
    @test Set(word(session[4], "name") for session in sessions) == Set(keys(NETWORK.OPTIMIZERS))
    @test Set(session[1] for session in sessions) == Set(keys(NETWORK.LOSSES))
end

@testset "what is done while the package is compiled" begin
    foreach(session -> @test(TwinGrad.precompile_session(Float32, session...) === nothing), TwinGrad.PRECOMPILED_SESSIONS)
    @test TwinGrad.precompile_trainer(Float32) === TwinGrad.precompile_plan() === nothing
    @test isempty(Entry.SESSIONS)
end
