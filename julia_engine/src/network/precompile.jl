# A training session done once while the package is compiled, for the same reason as in ../precompile.jl. The steps not
# before Julia 1.9: there only inferred code would be kept, with which 1.5 makes steps that allocate.

function precompile_session(T::DataType, optimizer::String)
    data = "loss=softmax_cross_entropy holds=numbers input=4"
    text = """
        session format=$(Entry.FORMAT) dtype=$(lowercase(string(T))) batch_size=2 threads=1 $data layers=3
        optimizer $optimizer
        techniques
        layer id=a op=reshape shape=2,2
        layer id=b op=rnn units=3 activation=tanh returns=last
        layer id=c op=dense units=2 bias=true
        """
    chain = Chain(Reshape(2, 2), RNN(2 => 3), Dense(3 => 2); dtype=T)
    vector, gradient = copy(chain.parameters.vector), copy(chain.parameters.vector)
    x, y, order, losses, logits = T[1 2 3; 4 5 6; 7 8 9; 1 2 3], Int64[0, 1, 0], Int64[2, 1, 0], zeros(2), zeros(T, 2, 3)
    at(a) = Ptr{Cvoid}(pointer(a))
    GC.@preserve text vector gradient x y order losses logits begin
        s = Entry.create(pointer(text), sizeof(text), at(vector), length(vector))
        Entry.train(s, 3, at(x), at(y), 3, pointer(order), 1, 2, pointer(losses))
        Entry.evaluate(s, 3, at(x), at(y), pointer(losses))
        Entry.predict(s, 3, at(x), at(logits))
        Entry.gradients(s, 3, at(x), at(y), pointer(losses), at(gradient))
        Entry.free(s)
    end
    trainer = Trainer(chain; batch_size=2, threads=1)
    train_epoch!(trainer, x, y .+ 1, order .+ 1)
    evaluate(trainer, x, y .+ 1)
    predict(trainer, x)
    return nothing
end

const PRECOMPILED_OPTIMIZERS = ("name=sgd learning_rate=0.1 momentum=0.0 nesterov=false weight_decay=0.0",
    "name=adam learning_rate=0.1 betas=0.9,0.999 eps=1e-8 weight_decay=0.0")

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
        NETWORK.planned(trainer, 2)
    end
    return nothing
end

if Versions.writes_code()
    if Versions.KEEPS_MACHINE_CODE
        foreach(optimizer -> precompile_session(Float32, optimizer), PRECOMPILED_OPTIMIZERS)
    end
    precompile_plan()
end
