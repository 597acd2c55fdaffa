# Training sessions done once while the package is compiled, for the same reason as in ../precompile.jl. The steps not
# before Julia 1.9: there only inferred code would be kept, with which 1.5 makes steps that allocate.

"""
Sessions that between them have every layer, loss and optimizer, small enough that what takes time is to compile them: for each
the loss, what samples hold and their size, the optimizer, and the layers.
"""
const PRECOMPILED_SESSIONS = (
    ("softmax_cross_entropy", "numbers", "12", "name=sgd learning_rate=0.1 momentum=0.5 nesterov=true weight_decay=0.1",
        ("op=reshape shape=3,4", "op=lstm units=3 returns=sequence", "op=gru units=3 returns=sequence",
            "op=layer_norm eps=1e-5", "op=rnn units=3 activation=tanh returns=last", "op=activation activation=tanh",
            "op=dense units=2 bias=true")),
    ("softmax_cross_entropy", "numbers", "1,8,8", "name=adam learning_rate=0.1 betas=0.9,0.999 eps=1e-8 weight_decay=0.0",
        ("op=conv2d filters=16 kernel=3,3 stride=1,1 padding=1,1,1,1 dilation=1,1 groups=1 bias=true",
            "op=conv2d filters=16 kernel=3,3 stride=1,1 padding=1,1,1,1 dilation=1,1 groups=1 bias=false",  # by Winograd's algorithm
            "op=batch_norm momentum=0.1 eps=1e-5", "op=activation activation=relu",
            "op=max_pool2d window=2,2 stride=2,2 padding=0,0,0,0 dilation=1,1 ceil_mode=false",
            "op=conv2d filters=4 kernel=2,2 stride=1,1 padding=0,0,0,0 dilation=1,1 groups=2 bias=false",
            "op=avg_pool2d window=2,2 stride=1,1 padding=0,0,0,0 dilation=1,1 ceil_mode=false count_padding=true",
            "op=dropout rate=0.5", "op=flatten", "op=dense units=2 bias=true")),
    ("binary_cross_entropy", "ids", "8", "name=rmsprop learning_rate=0.1 alpha=0.9 eps=1e-8 momentum=0.5 weight_decay=0.0 " *
            "clip_norm=1.0",
        ("op=embedding vocabulary=9 dimension=4 padding_index=0 trainable=true", "op=permute_dims axes=1,0",
            "op=conv1d filters=4 kernel=3 stride=1 padding=0,0 dilation=1 groups=1 bias=true", "op=activation activation=relu",
            "op=max_pool1d window=2 stride=2 padding=0,0 dilation=1 ceil_mode=false",
            "op=avg_pool1d window=2 stride=1 padding=0,0 dilation=1 ceil_mode=false count_padding=true", "op=global_max_pool",
            "op=dense units=1 bias=true")),
    ("mean_squared_error", "numbers", "2,4", "name=adamw learning_rate=0.1 betas=0.9,0.999 eps=1e-8 weight_decay=0.01",
        ("op=conv1d filters=3 kernel=2 stride=1 padding=0,0 dilation=1 groups=1 bias=false", "op=global_avg_pool",
            "op=activation activation=sigmoid", "op=rbf units=3", "op=activation activation=softplus")),
    ("softmax_cross_entropy", "numbers", "3,4", "name=sgd learning_rate=0.1 momentum=0.0 nesterov=false weight_decay=0.0",
        ("op=position_embedding", "op=multi_head_attention heads=2 causal=true bias=true", "op=add inputs=l1,l2",
            "op=concat inputs=l1,l3 axis=0", "op=activation activation=gelu", "op=flatten", "op=dense units=2 bias=true")),
    ("mean_squared_error", "numbers", "2,3,4,4", "name=sgd learning_rate=0.1 momentum=0.0 nesterov=false weight_decay=0.0",
        ("op=conv3d filters=2 kernel=2,2,2 stride=1,1,1 padding=0,0,0,0,0,0 dilation=1,1,1 groups=1 bias=true",
            "op=max_pool3d window=1,2,2 stride=1,1,1 padding=0,0,0,0,0,0 dilation=1,1,1 ceil_mode=false",
            "op=conv3d_transpose filters=2 kernel=2,2,2 stride=1,1,1 padding=0,0,0,0,0,0 output_padding=0,0,0 dilation=1,1,1 " *
                "groups=1 bias=true",
            "op=avg_pool3d window=2,1,1 stride=1,1,1 padding=0,0,0,0,0,0 dilation=1,1,1 ceil_mode=false count_padding=true",
            "op=interpolate size=1,3,3 mode=linear align_corners=false", "op=reshape shape=2,3,3",
            "op=conv2d_transpose filters=2 kernel=2,2 stride=1,1 padding=0,0,0,0 output_padding=0,0 dilation=1,1 groups=1 bias=true",
            "op=reshape shape=2,16",
            "op=conv1d_transpose filters=1 kernel=2 stride=1 padding=0,0 output_padding=0 dilation=1 groups=1 bias=true")))

function precompile_session(T::DataType, loss::String, holds::String, input::String, optimizer::String, layers)
    text = """
        session format=$(Entry.FORMAT) dtype=$(lowercase(string(T))) batch_size=2 threads=1 loss=$loss holds=$holds input=$input layers=$(length(layers))
        optimizer $optimizer
        techniques
        """ * join("layer id=l$n $layer\n" for (n, layer) in enumerate(layers))
    made = Entry.read_description(text)
    vector = copy(NETWORK.new_chain(0, made.names, made.layers, T, nothing).parameters.vector)
    gradient, outputs = copy(vector), prod(made.sizes[end])
    x = [(holds == "ids" ? Int64 : T)(k % 8) for k in 1:prod(made.sizes[1]), _ in 1:3]
    y = loss == "softmax_cross_entropy" ? Int64[0, 1, 0] : zeros(T, outputs, 3)
    order, losses, out = Int64[2, 1, 0], zeros(2), zeros(T, outputs, 3)
    at(a) = AD.start_of(a)
    sizes, said, bytes = zeros(Int64, 3), zeros(UInt8, 8), zeros(Int64, 2)
    GC.@preserve text vector gradient x y order losses out sizes said bytes begin
        s = Entry.create(pointer(text), sizeof(text), at(vector), length(vector))
        done = [Entry.train(s, 3, at(x), at(y), 3, pointer(order), 1, 2, pointer(losses)),
            Entry.evaluate(s, 3, at(x), at(y), pointer(losses)), Entry.predict(s, 3, at(x), at(out)),
            Entry.gradients(s, 3, at(x), at(y), pointer(losses), at(gradient)), Entry.learning_rate(s, 0.1),
            Entry.state(s, pointer(sizes), Ptr{Int64}(C_NULL), C_NULL, C_NULL), Entry.allocated(pointer(bytes))]
        numbers, first, second = zeros(Int64, sizes[1]), zeros(T, sizes[2]), zeros(T, sizes[3])
        GC.@preserve numbers first second begin
            push!(done, Entry.state(s, pointer(sizes), pointer(numbers), at(first), at(second)),
                Entry.load_state(s, pointer(sizes), pointer(numbers), at(first), at(second)))
        end
        t = Entry.session(s)
        NETWORK.make_shards(T, t.chain, NETWORK.objective(t), t.input, NETWORK.target_size(t), NETWORK.target_type(t), 4, 2,
            copy(t.gradient), t.techniques, t.sparse)  # of two threads
        isempty(Entry.costs(s)) && error("precompiling a session: a step without ops")
        push!(done, Entry.free(s))
        Entry.message(pointer(said), length(said))
        all(iszero, done) || error("precompiling a session: $(Entry.MESSAGE[])")
    end
    return nothing
end

precompile_sessions() = foreach(session -> precompile_session(Float32, session...), PRECOMPILED_SESSIONS)

"""The first network of the studies, as a program in Julia trains it."""
function precompile_trainer(T::DataType)
    x, y = T[1 2 3; 4 5 6; 7 8 9; 1 2 3], [1, 2, 1]
    trainer = Trainer(Chain(Reshape(2, 2), RNN(2 => 3), Dense(3 => 2); dtype=T); batch_size=2, threads=1)
    train_epoch!(trainer, x, y)
    evaluate(trainer, x, y)
    predict(trainer, x)
    return nothing
end

"""What comes before the first step: inferred code of it is kept from Julia 1.5 on."""
function precompile_plan()
    text = Chain(Embedding(9 => 4), PermuteDims(2, 1), Conv1D(4 => 2, 3), Activation(relu), MaxPool1D(2), Flatten(),
        Dense(4 => 1))
    segments = Chain(Reshape(2, 2), RNN(2 => 3), Dense(3 => 2))
    for (chain, dims, loss, optimizer) in ((text, [6], "binary_cross_entropy", Adam(0.1)),
        (segments, [4], "softmax_cross_entropy", SGD(0.1)))
        trainer = Trainer(chain; loss=loss, optimizer=optimizer, batch_size=2, threads=1)
        NETWORK.suit!(trainer, dims)
        NETWORK.choose_sparse!(trainer)
        NETWORK.planned(trainer, 2, 1)
    end
    return nothing
end

if Versions.writes_code()
    if Versions.KEEPS_MACHINE_CODE
        AD.Kernels.precompile_kernels(Float32)  # those of larger sizes, too
        precompile_sessions()
        precompile(NETWORK.together, (Function, NETWORK.Team))
        precompile(NETWORK.Wait(NETWORK.BatchSums(2, 2)), ())
        precompile(Entry.communicate, (Int64, Int64, Int64, Ptr{Cvoid}))
        precompile_trainer(Float32)
    end
    precompile_plan()
end
