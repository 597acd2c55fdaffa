# A training session done once while the package is compiled, for the same reason as in ../precompile.jl. The steps not
# before Julia 1.9: there only inferred code would be kept, with which 1.5 makes steps that allocate.

function precompile_session(T::DataType, optimizer::Integer)
    switches = ones(Int64, length(Entry.TECHNIQUE_CODES))
    integers = Int64[2, 8 * sizeof(T), 2, 1, 1, optimizer, 0, switches..., 1, 1, 4, 3,
        6, 1, Int('a'), 2, 2, 2,
        2, 1, Int('b'), 3, 2, 1,
        1, 1, Int('c'), 2, 1]
    floats = [0.1, 0.0, 0.9, 0.999, 1e-8, 0.0, 0.0]
    chain = Chain(Reshape(2, 2), RNN(2 => 3), Dense(3 => 2); dtype=T)
    vector, gradient = copy(chain.parameters.vector), copy(chain.parameters.vector)
    x, y, order, losses, logits = T[1 2 3; 4 5 6; 7 8 9; 1 2 3], Int64[0, 1, 0], Int64[2, 1, 0], zeros(2), zeros(T, 2, 3)
    at(a) = Ptr{Cvoid}(pointer(a))
    GC.@preserve integers floats vector gradient x y order losses logits begin
        s = Entry.create(pointer(integers), length(integers), pointer(floats), length(floats), at(vector), length(vector))
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

if ccall(:jl_generating_output, Cint, ()) == 1
    if VERSION >= v"1.9"
        precompile_session(Float32, 1)
        precompile_session(Float32, 3)
    end
    precompile_plan()
end
