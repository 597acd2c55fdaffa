"""
C-callable entry points: what a program in another language, in the same process, needs to train a model.

A session is described by text, works on the caller's memory in place, and is known by a number. Rows, classes and token ids
count from 0 here, and shapes are those of C order: (N, ..., features). Each getter (`train_pointer()`) returns the address
of a function:

- `create(text, n, parameters, length)`: the number of a new session, or minus a status. The `n` bytes of text are a
  description of the session, below. `parameters` is the flat parameter vector, the parameters that are trained first, then
  the others, each tensor at a multiple of 16 elements. The session trains it in place; it must outlive the session.
- `train(session, samples, x, y, rows, order, first, last, losses)`: train the steps `first` to `last` (from 1) of an
  epoch over the `rows` rows that `order` names, and store the loss of each step in `losses`, which has one for each step
  of the epoch. So an epoch can be cut into calls.
- `learning_rate(session, rate)`: the learning rate from the next step on.
- `communicate(session, rank, size, add)`: train together with other processes from the next step on, as a
  [`Communicator`](@ref NETWORK.Communicator) says. `add(gradient, length)` sums a vector over all processes, in place, and
  returns 1 if it could. Losses are then this process's part of them: their sums over all processes are those of the steps.
- `state(session, sizes, numbers, first, second)`: what a checkpoint needs beside the parameters, as
  [`training_state`](@ref NETWORK.training_state) says: the lengths of the three arrays in `sizes`, and these where they
  are not null; `load_state` takes the same, and reads them. Vectors are of the session's dtype, numbers of 64 bits.
- `evaluate(session, samples, x, y, out)`: mean loss and accuracy, two floats.
- `predict(session, samples, x, out)`: the model's outputs.
- `gradients(session, samples, x, y, loss, vector)`: the loss of one batch, and its gradient in the layout of the
  parameters that are trained.
- `free(session)`, and `message(buffer, capacity)`: the last error's message in UTF-8, and its whole length.
- `allocated(out)`: bytes and allocations of this process so far, two integers.

All but `create` and `message` return a status: 0; 1 for a mistake of the caller's; 2 when a loss or gradient was not
finite; 3 for anything else. No exception leaves an entry point. All calls come from the thread that started Julia.

A description has a line (`network/lines.jl`) for each part of a session, and a line feed after each of them:

- `session format=3 dtype=float32 batch_size=100 threads=2 loss=softmax_cross_entropy holds=numbers input=784 layers=3`:
  samples hold `numbers` or `ids`, and have the shape `input`. A loss may have the settings `class_weights`, `label_smoothing`,
  `ignored_class` and `positive_weight`.
- `optimizer name=sgd learning_rate=0.1 momentum=0.0 nesterov=false weight_decay=0.0`: the settings that `read_optimizer`
  reads, beside its type in `network`.
- `techniques fuse=false`: the switches of [`Techniques`](@ref AD.Techniques) that are not as by default.
- `layer id=rnn op=rnn units=64 activation=tanh returns=last` for each layer: its name, its op (of `NETWORK.LAYERS`), the
  settings that `read_layer` reads, beside its type in `network`, and perhaps `inputs=a,b`: the names of the layers before it,
  or `input`, whose outputs it reads; the one before it if none.
"""
module Entry

using ..AD: AD, EngineError, NonFiniteError, ConfigurationError, ShapeError, Techniques
using ..NETWORK: NETWORK, Data, LAYERS, Layer, Line, Loss, Optimizer, Trainer, given, given_or_nothing, reading

const OK, MISTAKE, NOT_FINITE, FAILURE = Cint(0), Cint(1), Cint(2), Cint(3)

const FORMAT = 3
"""The most bytes of a description. A model of a thousand layers has some hundred thousand."""
const MOST_BYTES = 10_000_000

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

"""What a description says. `sizes` are those of a sample before each layer and after the last, in Julia's order."""
struct Description
    dtype::DataType
    batch_size::Int
    threads::Int
    loss::Loss
    optimizer::Optimizer
    techniques::Techniques
    ids::Bool
    names::Vector{String}
    ops::Vector{String}
    layers::Vector{Layer}
    sizes::Vector{Vector{Int}}
    inputs::Dict{String,Vector{String}}
end

"""The text of `n` bytes, which must be ASCII: what is not is written as %XX."""
function text_at(bytes::Ptr{UInt8}, n::Int64)
    0 <= n <= MOST_BYTES || throw(ConfigurationError("a description has at most $MOST_BYTES bytes, got $n"))
    text = unsafe_string(bytes, n)
    isascii(text) || throw(ConfigurationError("a description must be ASCII"))
    return text
end

too_early() = ConfigurationError("the description of the session ends too early")

function read_description(text::String)
    endswith(text, '\n') || throw(too_early())  # it was cut
    lines = Line[Line(line, number) for (number, line) in enumerate(split(chop(text), '\n'))]
    function next(subject::String)
        isempty(lines) && throw(too_early())
        line = popfirst!(lines)
        line.subject == subject || throw(ConfigurationError(
            "the description of the session: expected a line of the $subject, got $(NETWORK.shortened(line.subject))"))
        return line
    end
    head = next("session")
    dtype, batch_size, threads, loss, ids, input, expected = reading(head) do
        format = given(head, "format", Int)
        format == FORMAT || throw(ConfigurationError("this engine reads descriptions of format $FORMAT, got $format"))
        whole(name) = NETWORK.whole_number("Trainer", name, given(head, name, Int))
        (one_of(head, "dtype", ("float32" => Float32, "float64" => Float64)), whole("batch_size"), whole("threads"),
            read_loss(head), one_of(head, "holds", ("numbers" => false, "ids" => true)),
            NETWORK.lengths(head, "input"), given(head, "layers", Int))
    end
    optimizer, techniques = read_optimizer(next("optimizer")), read_techniques(next("techniques"))
    length(lines) < expected && throw(too_early())
    names, ops, layers, sizes = String[], String[], Layer[], Vector{Int}[input]
    inputs = Dict{String,Vector{String}}()
    for _ in 1:expected
        line = next("layer")
        before = last_name(names)
        layer, read, size = read_layer(line, names, sizes)
        push!(ops, given(line, "op", String))
        push!(names, NETWORK.new_id(layer, names))
        push!(layers, layer)
        push!(sizes, NETWORK.output_size(layer, size))
        read == [before] || (inputs[names[end]] = read)
    end
    isempty(lines) || throw(ConfigurationError("the description of the session continues after its $expected layers"))
    return Description(dtype, batch_size, threads, loss, optimizer, techniques, ids, names, ops, layers, sizes, inputs)
end

"""The size of what a layer before makes, or of the input."""
function size_of(name::String, names::Vector{String}, sizes::Vector{Vector{Int}})
    place = name == NETWORK.INPUT ? 0 : findfirst(==(name), names)
    place === nothing && throw(ConfigurationError("inputs: there is no layer $(NETWORK.shortened(name)) before this one; " *
        "there are: $(isempty(names) ? "none" : join(names, ", "))"))
    return sizes[place+1]
end

"""The loss that a line names, with its settings; classes count from 0 there."""
function read_loss(line::Line)
    ignored, word = given_or_nothing(line, "ignored_class", Int), given(line, "loss", String)
    return NETWORK.loss_of(word; class_weights=given_or_nothing(line, "class_weights", Vector{Float64}),
        label_smoothing=something(given_or_nothing(line, "label_smoothing", Float64), 0.0),
        ignored_class=ignored === nothing ? nothing : ignored + 1,
        positive_weight=something(given_or_nothing(line, "positive_weight", Float64), 1.0))
end

"""What a setting's word stands for."""
function one_of(line::Line, name::String, choices)
    word = given(line, name, String)
    for (choice, value) in choices
        word == choice && return value
    end
    throw(ConfigurationError("$name: expected one of $(join(map(first, choices), ", ")), got $(NETWORK.shortened(word))"))
end

"""The type in a table that a setting names."""
function type_of(line::Line, name::String, table::Dict{String,Any})
    word = given(line, name, String)
    return get(table, word) do
        known = join(sort!(collect(keys(table))), ", ")
        throw(ConfigurationError("$name: expected one of $known, got $(NETWORK.shortened(word))"))
    end
end

read_optimizer(line::Line) =
    reading(() -> NETWORK.read_optimizer(type_of(line, "name", NETWORK.OPTIMIZERS), line), line)

function read_techniques(line::Line)
    known, defaults = map(String, fieldnames(Techniques)), Techniques()
    for name in sort!(collect(keys(line.settings)))
        name in known || throw(ConfigurationError("the Julia engine has no technique '$name'; it has $(join(known, ", "))"))
    end
    return reading(line) do
        switch(name) = something(given_or_nothing(line, name, Bool), getfield(defaults, Symbol(name)))
        Techniques(map(switch, known)...)
    end
end

"""The layer of a line, after those of these names, whose outputs have these sizes; what it reads, and its size."""
function read_layer(line::Line, names::Vector{String}, sizes::Vector{Vector{Int}})
    return reading(line) do
        inputs = given_or_nothing(line, "inputs", Vector{String})
        read = inputs === nothing ? String[last_name(names)] : inputs
        read_sizes = Vector{Int}[size_of(name, names, sizes) for name in read]
        given(line, "id", String)
        layer = NETWORK.read_layer(type_of(line, "op", LAYERS), line, read_sizes[1])::Layer
        return layer, read, NETWORK.merged_size(layer, read_sizes)
    end
end

last_name(names::Vector{String}) = isempty(names) ? NETWORK.INPUT : names[end]

function create(text::Ptr{UInt8}, n::Int64, parameters::Ptr{Cvoid}, length::Int64)::Int64
    return guarded(status -> -Int64(status)) do
        trainer = AD.interpreting() do
            d = read_description(text_at(text, n))
            d.dtype === Float32 ? new_session(d, Ptr{Float32}(parameters), length) :
                new_session(d, Ptr{Float64}(parameters), length)
        end
        COUNT[] += 1
        SESSIONS[COUNT[]] = trainer
        return COUNT[]
    end
end

function new_session(d::Description, parameters::Ptr{T}, count::Int64) where {T}
    chain = NETWORK.new_chain(0, d.names, d.layers, T, unsafe_wrap(Array, parameters, count))
    NETWORK.read_inputs!(chain, d.inputs)
    NETWORK.takes_ids(chain) == d.ids || throw(ConfigurationError("samples of $(d.ids ? "ids" : "numbers") do not suit a " *
        "model that begins with $(isempty(d.layers) ? "nothing" : d.layers[1])"))
    trainer = NETWORK.new_trainer(T, chain, d.loss, d.optimizer, d.batch_size, d.threads, 1, d.techniques)
    NETWORK.suit!(trainer, d.sizes[1])
    return trainer
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
            label = unsafe_load(labels, j)
            (0 <= label < classes || label + 1 == trainer.loss.ignored) && continue
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

function learning_rate(number::Int64, rate::Float64)::Cint
    return guarded(identity) do
        setfield!(session(number).optimizer, :learning_rate, NETWORK.setting("optimizer", "learning_rate", rate; at_least=0.0))
        OK
    end
end

function communicate(number::Int64, rank::Int64, size::Int64, add::Ptr{Cvoid})::Cint
    return guarded(identity) do
        trainer = session(number)
        function add!(vector)
            status = GC.@preserve vector ccall(add, Cint, (Ptr{Cvoid}, Int64), pointer(vector), length(vector))
            status == 1 || error("the gradients could not be added up")
        end
        communicator = NETWORK.Communicator(rank, size, add!)
        NETWORK.check_parts(trainer.chain, trainer.loss, trainer.techniques, communicator)
        trainer.communicator = communicator
        trainer.streams.rank = communicator.rank
        NETWORK.forget_plans!(trainer)
        OK
    end
end

function state(number::Int64, sizes::Ptr{Int64}, numbers::Ptr{Int64}, first::Ptr{Cvoid}, second::Ptr{Cvoid})::Cint
    return guarded(identity) do
        found = NETWORK.training_state(session(number))
        for (i, (to, from)) in enumerate(zip((numbers, first, second), (found.numbers, found.first, found.second)))
            unsafe_store!(sizes, length(from), i)
            to == C_NULL || GC.@preserve from NETWORK.copy_bytes!(Ptr{UInt8}(to), NETWORK.address(from), sizeof(from))
        end
        OK
    end
end

function load_state(number::Int64, sizes::Ptr{Int64}, numbers::Ptr{Int64}, first::Ptr{Cvoid}, second::Ptr{Cvoid})::Cint
    return guarded(identity) do
        load_state!(session(number), [unsafe_load(sizes, i) for i in 1:3], numbers, first, second)
        OK
    end
end

load_state!(trainer::Trainer{T}, sizes::Vector{Int64}, numbers, first, second) where {T} = NETWORK.load_state!(trainer,
    (numbers=unsafe_wrap(Array, numbers, sizes[1]), first=unsafe_wrap(Array, Ptr{T}(first), sizes[2]),
        second=unsafe_wrap(Array, Ptr{T}(second), sizes[3]), total=T[]))

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

"""Bytes of a session from which on its memory is given back at once when it is freed: a collection takes 0.1 s or more."""
const COLLECT_FROM = 2^25

"""About how many bytes a session holds beside the parameters."""
function held_bytes(t::Trainer)
    shards = NETWORK.Shard[s for plan in values(t.plans) for s in plan]
    t.single === nothing || push!(shards, t.single)
    tapes = AD.Tape[AD.Tape[s.tape for s in shards]; collect(AD.Tape, values(t.forwards))]
    return sum(Int[3 * sizeof(t.gradient); Int[sizeof(s.gradient) for s in shards]; Int[AD.bytes_of(x.arena) for x in tapes]])
end

"""
Forget a session, and return how many bytes it held. Not done where memory is collected then: the caller's frame would still
hold the session.
"""
@noinline function forget!(number::Int64)
    bytes = held_bytes(session(number))
    delete!(SESSIONS, number)
    return bytes
end

free(number::Int64)::Cint = guarded(identity) do
    if forget!(number) >= COLLECT_FROM
        GC.gc()
        AD.return_freed_memory()
    end
    OK
end

function message(buffer::Ptr{UInt8}, capacity::Int64)::Int64
    text = MESSAGE[]
    GC.@preserve text NETWORK.copy_bytes!(buffer, pointer(text), clamp(sizeof(text), 0, max(capacity, 0)))
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

"""
What `NETWORK.costs` says of a session, as text: a line for each op, with tabs between op, layer, seconds, bytes and operations.
For who evaluates it, not an entry point.
"""
costs(number::Integer) = join([join(cost, '\t') for cost in Base.invokelatest(NETWORK.costs, session(Int64(number)))], '\n')

"""What `NETWORK.threads_in_step` says of a session: no entry point either."""
threads_in_step(number::Integer) = Base.invokelatest(NETWORK.threads_in_step, session(Int64(number)))::String

"""What `NETWORK.threads_decided` says of a session."""
threads_decided(number::Integer) = Base.invokelatest(NETWORK.threads_decided, session(Int64(number)))::Bool

create_pointer() = @cfunction(create, Int64, (Ptr{UInt8}, Int64, Ptr{Cvoid}, Int64))
train_pointer() = @cfunction(train, Cint,
    (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Int64, Ptr{Int64}, Int64, Int64, Ptr{Float64}))
learning_rate_pointer() = @cfunction(learning_rate, Cint, (Int64, Float64))
communicate_pointer() = @cfunction(communicate, Cint, (Int64, Int64, Int64, Ptr{Cvoid}))
state_pointer() = @cfunction(state, Cint, (Int64, Ptr{Int64}, Ptr{Int64}, Ptr{Cvoid}, Ptr{Cvoid}))
load_state_pointer() = @cfunction(load_state, Cint, (Int64, Ptr{Int64}, Ptr{Int64}, Ptr{Cvoid}, Ptr{Cvoid}))
evaluate_pointer() = @cfunction(evaluate, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}))
predict_pointer() = @cfunction(predict, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}))
gradients_pointer() = @cfunction(gradients, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}, Ptr{Cvoid}))
free_pointer() = @cfunction(free, Cint, (Int64,))
message_pointer() = @cfunction(message, Int64, (Ptr{UInt8}, Int64))
allocated_pointer() = @cfunction(allocated, Cint, (Ptr{Int64},))

end
