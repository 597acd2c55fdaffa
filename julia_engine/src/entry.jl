"""
C-callable entry points: what a program in another language, in the same process, needs to train a model.

A session is described by integers and floats alone, works on the caller's memory in place, and is known by a number. Rows,
classes and token ids count from 0 here, and shapes are those of C order: (N, ..., features). Each getter
(`train_pointer()`) returns the address of a function:

- `create(integers, n, floats, m, parameters, length)`: the number of a new session, or minus a status. `parameters` is the
  flat parameter vector, the parameters that are trained first, then the others, each tensor at a multiple of 16 elements.
  The session trains it in place; it must outlive the session.
- `train(session, samples, x, y, rows, order, first, last, losses)`: train the steps `first` to `last` (from 1) of an
  epoch over the `rows` rows that `order` names, and store the loss of each step in `losses`, which has one for each step
  of the epoch. So an epoch can be cut into calls.
- `evaluate(session, samples, x, y, out)`: mean loss and accuracy, two floats.
- `predict(session, samples, x, out)`: the model's outputs.
- `gradients(session, samples, x, y, loss, vector)`: the loss of one batch, and its gradient in the layout of the
  parameters that are trained.
- `free(session)`, and `message(buffer, capacity)`: the last error's message in UTF-8, and its whole length.
- `allocated(out)`: bytes and allocations of this process so far, two integers.

All but `create` and `message` return a status: 0; 1 for a mistake of the caller's; 2 when a loss or gradient was not
finite; 3 for anything else. No exception leaves an entry point. All calls come from the thread that started Julia.

The integers: format (2), bits of a float (32 or 64), batch size, threads, loss, optimizer, nesterov (0 or 1), a 0 or 1 for
each of `TECHNIQUE_CODES`, what a sample holds (1: floats, 2: Int64 token ids), number of its axes, their lengths, number of
layers, then for each layer its code, the length of its id, the id's bytes, and what `add_layer!` reads. The floats:
learning rate, momentum, beta1 or alpha, beta2, eps, weight decay, largest norm (0: none), then what `add_layer!` reads.
"""
module Entry

using ..AD: AD, EngineError, NonFiniteError, ConfigurationError, ShapeError, Techniques
using ..NETWORK: NETWORK, Activation, Adam, AdamW, BatchNorm, Chain, Data, Dense, Dropout, Embedding, Flatten, GRU,
    LAYERS, LSTM, Layer, LayerNorm, Optimizer, PermuteDims, RBF, RMSProp, RNN, Reshape, SGD, Trainer

const OK, MISTAKE, NOT_FINITE, FAILURE = Cint(0), Cint(1), Cint(2), Cint(3)

# A code is a position in these lists.
const LOSS_CODES = ("softmax_cross_entropy", "binary_cross_entropy", "mean_squared_error")
const OPTIMIZER_CODES = ("sgd", "rmsprop", "adam", "adamw")
const ACTIVATION_CODES = ("identity", "tanh", "relu", "sigmoid", "softplus", "softmax")
const LAYER_CODES = ("dense", "rnn", "lstm", "gru", "flatten", "reshape", "activation", "dropout", "conv1d", "conv2d",
    "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "global_max_pool", "global_avg_pool", "embedding", "permute_dims",
    "rbf", "batch_norm", "layer_norm")
const RETURN_CODES = ("last", "sequence")
const INPUT_CODES = ("floats", "ids")
const TECHNIQUE_CODES = ("replay", "preallocate", "reuse_memory", "in_place", "views", "place_parts", "simplify", "fuse",
    "fused_loss", "concrete", "batched", "flat_parameters", "sparse_columns", "split_batch")

const SESSIONS = Dict{Int64,Trainer}()
const COUNT = Ref{Int64}(0)
const MESSAGE = Ref{String}("")

"""Run `f()` and return its result; for an exception keep the message and return what `failed` makes of the status."""
function guarded(f, failed)
    try
        return f()
    catch error
        MESSAGE[] = try
            error isa EngineError ? error.message : sprint(showerror, error)
        catch
            string(typeof(error))
        end
        return failed(error isa NonFiniteError ? NOT_FINITE : error isa EngineError ? MISTAKE : FAILURE)
    end
end

function session(number::Int64)
    trainer = get(SESSIONS, number, nothing)
    trainer === nothing && throw(ConfigurationError("there is no session $number: it was closed, or never made"))
    return trainer
end

# Making a session -----------------------------------------------------------------------------------------------------

"""Reads a description from front to back."""
mutable struct Reader{T}
    values::Vector{T}
    next::Int
end

function read!(r::Reader)
    r.next <= length(r.values) || throw(ConfigurationError("the description of the session ends too early"))
    r.next += 1
    return r.values[r.next-1]
end
function read!(r::Reader, n::Integer)
    0 <= n <= length(r.values) - r.next + 1 || throw(ConfigurationError("the description of the session ends too early"))
    return [read!(r) for _ in 1:n]
end

function chosen(codes, code::Integer, what::String)
    1 <= code <= length(codes) || throw(ConfigurationError("$what $code is not one of 1:$(length(codes))"))
    return codes[code]
end

function create(integers::Ptr{Int64}, n::Int64, floats::Ptr{Float64}, m::Int64, parameters::Ptr{Cvoid}, length::Int64)::Int64
    return guarded(status -> -Int64(status)) do
        settings = Reader(copy(unsafe_wrap(Array, integers, n)), 1)
        numbers = Reader(copy(unsafe_wrap(Array, floats, m)), 1)
        format = read!(settings)
        format == 2 || throw(ConfigurationError("this engine reads session descriptions of format 2, got $format"))
        bits = read!(settings)
        bits in (32, 64) || throw(ConfigurationError("expected floats of 32 or 64 bits, got $bits"))
        trainer = AD.interpreting() do
            bits == 32 ? new_session(Float32, settings, numbers, Ptr{Float32}(parameters), length) :
                new_session(Float64, settings, numbers, Ptr{Float64}(parameters), length)
        end
        COUNT[] += 1
        SESSIONS[COUNT[]] = trainer
        return COUNT[]
    end
end

function new_session(::Type{T}, settings::Reader, numbers::Reader, parameters::Ptr{T}, count::Int64) where {T}
    batch_size, threads = read!(settings), read!(settings)
    loss = chosen(LOSS_CODES, read!(settings), "the loss")
    optimizer = new_optimizer(chosen(OPTIMIZER_CODES, read!(settings), "the optimizer"), read!(settings) == 1,
        read!(numbers, 7))
    switches = read!(settings, length(TECHNIQUE_CODES))
    techniques = Techniques(Bool[s == 1 for s in switches]...)
    holds = chosen(INPUT_CODES, read!(settings), "what a sample holds")
    input = reverse(read!(settings, read!(settings)))
    ids, layers, size = String[], Layer[], input
    for _ in 1:read!(settings)
        push!(layers, add_layer!(size, settings, numbers))
        push!(ids, NETWORK.new_id(layers[end], ids))
        size = NETWORK.output_size(layers[end], size)
    end
    vector = unsafe_wrap(Array, parameters, count)
    chain = NETWORK.new_chain(0, ids, layers, T, vector)
    NETWORK.takes_ids(chain) == (holds == "ids") || throw(ConfigurationError(
        "samples of $holds do not suit a model that begins with $(isempty(layers) ? "nothing" : layers[1])"))
    whole(name, value) = NETWORK.whole_number("Trainer", name, value)
    trainer = NETWORK.new_trainer(T, chain, NETWORK.loss_of(loss), optimizer, whole("batch_size", batch_size),
        whole("threads", threads), 1, techniques)
    NETWORK.suit!(trainer, input)
    return trainer
end

function new_optimizer(name::String, nesterov::Bool, numbers::Vector{Float64})
    rate, momentum, beta1, beta2, eps, weight_decay, clip = numbers
    limit = clip > 0 ? clip : nothing
    name == "sgd" && return SGD(rate; momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, clip_norm=limit)
    name == "rmsprop" && return RMSProp(rate, beta1; eps=eps, momentum=momentum, weight_decay=weight_decay, clip_norm=limit)
    name == "adam" && return Adam(rate, (beta1, beta2); eps=eps, weight_decay=weight_decay, clip_norm=limit)
    return AdamW(rate, (beta1, beta2); eps=eps, weight_decay=weight_decay, clip_norm=limit)
end

"""The next layer of the description, for samples of size `input`."""
function add_layer!(input::Vector{Int}, settings::Reader, numbers::Reader)
    op = chosen(LAYER_CODES, read!(settings), "the layer code")
    name = String(UInt8.(read!(settings, read!(settings))))
    op == "flatten" && return Flatten(name=name)
    op == "reshape" && return Reshape(reverse(read!(settings, read!(settings)))...; name=name)
    op == "activation" && return Activation(chosen(ACTIVATION_CODES, read!(settings), "the activation"); name=name)
    op == "dropout" && return Dropout(read!(numbers); seed=read!(settings), name=name)
    op == "permute_dims" && return permuted(read!(settings, read!(settings)), name)
    op in ("global_max_pool", "global_avg_pool") && return LAYERS[op](name=name)
    if op == "embedding"  # vocabulary, dimension, padding index or -1, trainable
        vocabulary, dimension, padding, trainable = read!(settings, 4)
        return Embedding(vocabulary => dimension; padding_index=padding < 0 ? nothing : padding + 1,
            trainable=trainable == 1, name=name)
    end
    isempty(input) && throw(ShapeError("layer \"$name\": a $op layer needs an axis of features"))
    op == "batch_norm" && return BatchNorm(input[end]; momentum=read!(numbers), eps=read!(numbers), name=name)
    op == "layer_norm" && return LayerNorm(input[1]; eps=read!(numbers), name=name)
    haskey(WINDOWED, op) && return windowed(op, name, input, settings)
    sizes = input[1] => read!(settings)
    op == "rbf" && return RBF(sizes; name=name)
    op == "dense" && return Dense(sizes; bias=read!(settings) == 1, name=name)
    if op == "rnn"
        activation = chosen(ACTIVATION_CODES, read!(settings), "the activation")
        return RNN(sizes, activation; returns=chosen(RETURN_CODES, read!(settings), "what is returned"), name=name)
    end
    returns = chosen(RETURN_CODES, read!(settings), "what is returned")
    return op == "lstm" ? LSTM(sizes; returns=returns, name=name) : GRU(sizes; returns=returns, name=name)
end

# For each: its number of spatial axes.
const WINDOWED = Dict("conv1d" => 1, "conv2d" => 2, "max_pool1d" => 1, "max_pool2d" => 2, "avg_pool1d" => 1,
    "avg_pool2d" => 2)

"""
A convolution or a pool. For each spatial axis: the sizes of the window, the strides, the padding before and after; for a
convolution then the dilations, filters, groups and bias (0 or 1).
"""
function windowed(op::String, name::String, input::Vector{Int}, settings::Reader)
    axes = WINDOWED[op]
    window, stride, sides = reverse(read!(settings, axes)), reverse(read!(settings, axes)), read!(settings, 2 * axes)
    padding = reverse([(sides[2k-1], sides[2k]) for k in 1:axes])
    occursin("pool", op) && return LAYERS[op](window; stride=stride, padding=padding, name=name)
    dilation, filters, groups, bias = reverse(read!(settings, axes)), read!(settings), read!(settings), read!(settings)
    return LAYERS[op](input[end] => filters, window; stride=stride, padding=padding, dilation=dilation, groups=groups,
        bias=bias == 1, name=name)
end

"""C order's axes, from 0, are these backwards."""
function permuted(axes::Vector{Int64}, name::String)
    n = length(axes)
    return PermuteDims((n - axes[n+1-k] for k in 1:n)...; name=name)
end

# Using it -------------------------------------------------------------------------------------------------------------

function data_of(trainer::Trainer{T}, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, rows::Int64, order::Ptr{Int64}) where {T}
    target_bytes = prod(NETWORK.target_size(trainer)) * sizeof(NETWORK.target_type(trainer))
    return Data(samples, x, prod(trainer.input) * sizeof(NETWORK.input_type(trainer)), trainer.ids, y, target_bytes,
        trainer.loss.classes, order, rows, 0)
end

"""
Check what the rows from `first` to `last` name, their token ids and their classes: memory outside the arrays is never
touched.
"""
function check(trainer::Trainer, data::Data, first::Int, last::Int)
    data.samples > 0 || throw(ShapeError("there are no samples"))
    classes, each = isempty(trainer.output) ? 0 : trainer.output[1], data.y_bytes >> 3
    vocabulary = data.ids ? NETWORK.vocabulary(trainer.chain) : 0
    for i in first:last
        r = NETWORK.row(data, i)
        0 <= r < data.samples || throw(ShapeError(
            "order must hold row numbers from 0 to $(data.samples - 1), got $r at place $(i - 1)"))
        data.ids && !all_within(Ptr{Int64}(data.x + r * data.x_bytes), data.x_bytes >> 3, vocabulary) && AD.check_ids(
            unsafe_wrap(Array, Ptr{Int64}(data.x), (trainer.input..., data.samples)), vocabulary, 0)
        data.classes && data.y != C_NULL || continue
        labels = Ptr{Int64}(data.y + r * data.y_bytes)
        for j in 1:each
            0 <= unsafe_load(labels, j) < classes && continue
            NETWORK.check_classes(trainer.loss, unsafe_wrap(Array, Ptr{Int64}(data.y), data.samples * each), classes, 0)
        end
    end
    return nothing
end

"""Whether `n` integers are from 0 to `limit - 1`."""
function all_within(p::Ptr{Int64}, n::Int, limit::Int)
    outside = 0
    @inbounds @simd for i in 1:n
        outside += reinterpret(UInt64, unsafe_load(p, i)) >= reinterpret(UInt64, limit)
    end
    return outside == 0
end

function train(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, rows::Int64, order::Ptr{Int64}, first::Int64,
        last::Int64, losses::Ptr{Float64})::Cint
    return guarded(identity) do
        train_steps(session(number), samples, x, y, rows, order, first, last, losses)
        OK
    end
end

function train_steps(trainer::Trainer, samples, x, y, rows, order, first, last, losses)
    data = data_of(trainer, samples, x, y, rows, order)
    1 <= first && last <= cld(rows, trainer.batch_size) || throw(ShapeError(
        "steps $first to $last are not all among the $(cld(rows, trainer.batch_size)) of this epoch"))
    check(trainer, data, (first - 1) * trainer.batch_size + 1, min(last * trainer.batch_size, rows))
    NETWORK.has_plans(trainer, rows) || AD.interpreting(() -> NETWORK.plan_steps!(trainer, rows))
    NETWORK.train_steps!(trainer, data, losses, Int(first), Int(last))
end

const NO_ORDER = Ptr{Int64}(0)

function evaluate(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, out::Ptr{Float64})::Cint
    return guarded(identity) do
        trainer = session(number)
        data = data_of(trainer, samples, x, y, samples, NO_ORDER)
        check(trainer, data, 1, samples)
        AD.interpreting(() -> NETWORK.plan_forward!(trainer, samples, true))
        found = NETWORK.evaluate(trainer, data)
        unsafe_store!(out, found.loss, 1)
        unsafe_store!(out, found.accuracy, 2)
        OK
    end
end

function predict(number::Int64, samples::Int64, x::Ptr{Cvoid}, out::Ptr{Cvoid})::Cint
    return guarded(identity) do
        trainer = session(number)
        data = data_of(trainer, samples, x, C_NULL, samples, NO_ORDER)
        check(trainer, data, 1, samples)
        AD.interpreting(() -> NETWORK.plan_forward!(trainer, samples, false))
        NETWORK.predict!(trainer, data, Ptr{UInt8}(out))
        OK
    end
end

function gradients(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, loss::Ptr{Float64}, vector::Ptr{Cvoid})::Cint
    return guarded(identity) do
        trainer = session(number)
        data = data_of(trainer, samples, x, y, samples, NO_ORDER)
        check(trainer, data, 1, samples)
        unsafe_store!(loss, NETWORK.loss_and_gradient!(trainer, data))
        NETWORK.copy_bytes!(Ptr{UInt8}(vector), NETWORK.address(trainer.gradient), sizeof(trainer.gradient))
        OK
    end
end

free(number::Int64)::Cint = guarded(identity) do
    session(number)
    delete!(SESSIONS, number)
    OK
end

function message(buffer::Ptr{UInt8}, capacity::Int64)::Int64
    text = MESSAGE[]
    GC.@preserve text NETWORK.copy_bytes!(buffer, pointer(text), min(capacity, sizeof(text)))
    return sizeof(text)
end

function allocated(out::Ptr{Int64})::Cint
    return guarded(identity) do
        now = Base.gc_num()
        unsafe_store!(out, Base.gc_bytes(), 1)
        unsafe_store!(out, now.malloc + now.realloc + now.poolalloc + now.bigalloc, 2)
        OK
    end
end

create_pointer() = @cfunction(create, Int64, (Ptr{Int64}, Int64, Ptr{Float64}, Int64, Ptr{Cvoid}, Int64))
train_pointer() = @cfunction(train, Cint,
    (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Int64, Ptr{Int64}, Int64, Int64, Ptr{Float64}))
evaluate_pointer() = @cfunction(evaluate, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}))
predict_pointer() = @cfunction(predict, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}))
gradients_pointer() = @cfunction(gradients, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}, Ptr{Cvoid}))
free_pointer() = @cfunction(free, Cint, (Int64,))
message_pointer() = @cfunction(message, Int64, (Ptr{UInt8}, Int64))
allocated_pointer() = @cfunction(allocated, Cint, (Ptr{Int64},))

end
