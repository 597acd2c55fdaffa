# The trainer: the papers' central idea. Build and plan once for each batch size, replay for every batch.
#
# A mini-batch is gathered straight into the tapes' input buffers, each tape leaves its gradients in one flat vector,
# and the optimizer runs over that vector: a step allocates nothing. With more than one thread the batch is split into
# shards, one per thread, each with its own buffers and gradient vector and BLAS at one thread; the sum of the gradients
# is fused with the update, of which every thread does a segment. Where the gradients are more than all that a split
# spreads, a batch stays whole, and the threads share its products. One thread makes the step where that takes less
# time. Of a matrix whose columns are looked up (an embedding) only the gradients of those columns are kept; the update
# spreads them out, a block at a time, in the cache.

"""Mean loss and share of right answers (NaN where the loss has no notion of a right answer)."""
struct Evaluation
    loss::Float64
    accuracy::Float64
end

# Samples per forward pass outside training.
const EVALUATION_BATCH = 1000
# Numbers of samples whose forward passes are planned at a time: a service may be asked for any.
const MOST_FORWARDS = 32
# Elements of a segment that are summed, then updated, while they are in the cache.
const BLOCK = 4096

"""
    Trainer(chain; loss="softmax_cross_entropy", optimizer=SGD(0.01), batch_size=100, threads=Threads.nthreads(),
        accumulate=1, techniques=Techniques(), communicator=nothing)

Trains a chain on mini-batches.

- `chain`: the model; its parameters are trained in place.
- `loss`: one of `softmax_cross_entropy`, `binary_cross_entropy`, `mean_squared_error`, or its name; or one of these with settings:
  `loss_of(softmax_cross_entropy; class_weights=[1, 2])`.
- `optimizer`: the update rule.
- `batch_size`: samples per step; a partial last batch gets its own plan.
- `threads`: how many to use, at most those Julia was started with (`julia -t 2`, or `JULIA_NUM_THREADS`).
- `accumulate`: mini-batches whose mean gradient makes one update.
- `techniques`: the switches of the engine, for ablations.
- `communicator`: the [`Communicator`](@ref) of the processes that train together, each with a trainer of the same chain, data
  and order: each computes a part of every batch, and all make the same updates.

Steps are planned anew where fields of a layer of your own, or what they hold, have changed since; what its `forward` changes is
left out of that. Arrays that its ops read are read at every step.

See [`train_epoch!`](@ref), [`train!`](@ref), [`evaluate`](@ref), [`predict`](@ref), [`loss_and_gradients`](@ref).
"""
mutable struct Trainer{T,O<:Optimizer}
    chain::Chain
    parameters::Parameters
    vector::Vector{T}
    loss::Loss
    optimizer::O
    state::State{T}
    batch_size::Int
    threads::Int
    accumulate::Int
    techniques::Techniques
    team::Team
    gradient::Vector{T}
    total::Vector{T}  # of accumulated gradients
    pending::Int
    input::Vector{Int}  # the size of a sample that the plans are for
    output::Vector{Int}
    plans::Dict{Tuple{Int,Int},Vector{Shard{T}}}  # by the number of samples, and of threads
    trials::Dict{Tuple{Int,Int},Trials}  # of the plans whose steps all threads can make, or one of them
    single::Union{Nothing,Shard{T}}  # the plan for one sample, where a batch goes through one by one
    streams::DropoutStreams  # of the plans
    forwards::Dict{Tuple{Int,Bool},Tape}
    whole::Dict{Bool,Bool}  # whether forward passes, with the loss or without, need all samples at once
    partial::Vector{Float64}  # one number per thread, for sums; a cache line apart
    ids::Bool  # samples are token ids
    own::Vector{Layer}  # those of the chain's layers that are, or hold, the user's own
    own_ids::Bool  # samples are token ids, and these may look them up
    watched::Vector{AD.Watched}  # what these held when plans were made
    sparse::Bool  # the plans keep columns' gradients apart
    blocks::Vector{Vector{T}}  # for each thread: room for a block of a gradient
    update_seconds::Float64  # the least of an update since a plan was made
    communicator::Union{Nothing,Communicator}
    couples::Bool  # the samples of a batch affect each other, in the chain or in the loss
    splits::Bool  # they do so by sums alone
end

AD.watched_parts(trainer::Trainer) = (trainer.chain,)

@inline function Base.setproperty!(trainer::Trainer, name::Symbol, value)
    name === :chain || name === :loss || name === :optimizer || name === :batch_size || name === :threads ||
        name === :accumulate || name === :techniques ||
        return setfield!(trainer, name, convert(fieldtype(typeof(trainer), name), value))
    throw(ConfigurationError("a trainer keeps the $name that it was made with; make a new one"))
end

function Trainer(chain::Chain; loss="softmax_cross_entropy", optimizer::Optimizer=SGD(0.01), batch_size=100,
        threads=Threads.nthreads(), accumulate=1, techniques::Techniques=Techniques(),
        communicator::Union{Nothing,Communicator}=nothing)
    sizes = Int[whole_number("Trainer", name, value)
                for (name, value) in ("batch_size" => batch_size, "threads" => threads, "accumulate" => accumulate)]
    return new_trainer(eltype(chain.parameters), chain, loss_of(loss), optimizer, sizes..., techniques, communicator)
end

function new_trainer(::Type{T}, chain::Chain, loss::Loss, optimizer::O, batch_size::Int, threads::Int, accumulate::Int,
        techniques::Techniques, communicator::Union{Nothing,Communicator}=nothing) where {T,O<:Optimizer}
    with_team = techniques.split_batch && techniques.batched && techniques.replay
    threads <= Threads.nthreads() || !with_team || throw(ConfigurationError("Trainer: threads must be at most " *
        "$(Threads.nthreads()), with which Julia was started, got $threads; start it with `julia -t $threads`"))
    batched_only = couples_batch(chain) && !techniques.batched
    batched_only && throw(ConfigurationError("Trainer: techniques.batched can't be switched off for a chain with layers " *
        "that couple the samples of a batch, such as BatchNorm"))
    couples_batch(loss) && !techniques.batched && throw(ConfigurationError("Trainer: $(loss.name) with class_weights or an " *
        "ignored_class is the mean of a whole batch by its weights: techniques.batched can't be switched off for it"))
    check_parts(chain, loss, techniques, communicator)
    n = chain.parameters.layout.trained
    # Memory as large as the parameters is first used in the first step: whoever made this trainer may still hold others.
    return Trainer{T,O}(chain, chain.parameters, chain.parameters.vector, loss, optimizer, State{T}(0, T[], T[]),
        batch_size, threads, accumulate, techniques, Team(with_team ? threads : 1),
        new_gradient(T, chain.parameters.layout), AD.zeroed!(Vector{T}(undef, accumulate > 1 ? n : 0)), 0, Int[], Int[],
        Dict{Tuple{Int,Int},Vector{Shard{T}}}(), Dict{Tuple{Int,Int},Trials}(), nothing,
        DropoutStreams(dropouts(chain), communicator === nothing ? 0 : communicator.rank),
        Dict{Tuple{Int,Bool},Tape}(), Dict{Bool,Bool}(),
        zeros(8 * (threads + 1)), takes_ids(chain), filter(is_users_own, chain.layers),
        takes_ids(chain) && any(is_users_own, chain.layers), AD.Watched[], false,
        [T[] for _ in 1:threads], Inf, communicator, couples_batch(chain) || couples_batch(loss), splits(chain))
end

"""A gradient vector. Only what lies between tensors is cleared: a plan, or a step without one, writes or clears the rest."""
new_gradient(::Type{T}, layout::Layout) where {T} = cleared(layout, AD.huge_pages!(Vector{T}(undef, layout.trained)))

check_parts(chain::Chain, loss::Loss, techniques::Techniques, ::Nothing) = nothing

function check_parts(chain::Chain, loss::Loss, techniques::Techniques, ::Communicator)
    couples_batch(loss) && throw(ConfigurationError("Trainer: $(loss.name) with class_weights or an ignored_class is the mean of a " *
        "whole batch by its weights, of which each process would know a part: train it in one process"))
    couples_batch(chain) && throw(ConfigurationError("Trainer: a layer, such as BatchNorm, needs the statistics of a whole " *
        "batch, of which each process would have a part: train it in one process, or take layer normalisation instead"))
    techniques.replay && techniques.batched || throw(ConfigurationError(
        "Trainer: with a communicator the techniques replay and batched can't be switched off"))
    return nothing
end

"""A trainer of a copy of the chain, with the optimizer's state; it makes its own plans."""
function Base.deepcopy_internal(trainer::Trainer{T}, known::IdDict) where {T}
    haskey(known, trainer) && return known[trainer]::Trainer{T}
    copied = known[trainer] = new_trainer(T, Base.deepcopy_internal(trainer.chain, known), trainer.loss, deepcopy(trainer.optimizer),
        trainer.batch_size, trainer.threads, trainer.accumulate, trainer.techniques, trainer.communicator)
    copied.state = Base.deepcopy_internal(trainer.state, known)
    copied.total = copy(trainer.total)
    copied.pending = trainer.pending
    load_streams!(copied.streams, stream_states(trainer.streams))
    return copied
end

# Training -------------------------------------------------------------------------------------------------------------

"""
    train_epoch!(trainer, x, y, order=1:N; rates=nothing)

Train once on all samples, or on those that `order` names, in its order; return the loss of each step, before its update.

- `x`: (..., N), of the parameters' element type, or `Int64` token ids from 1 for a chain that begins with an `Embedding`.
- `y`: (..., N), targets of the loss; classes count from 1.
- `order`: sample numbers, cut into batches as they are.
- `rates`: the learning rate of each step, for a schedule; the optimizer keeps the last. `nothing`: its own for all.

Throws a `ShapeError` or `LabelError` when the data does not suit the model, with nothing trained; a `NonFiniteError` when
a loss or gradient became NaN or infinite, which names the step and the op and layer that first produced it. The
parameters are then those before that step.
"""
function train_epoch!(trainer::Trainer, x::AbstractArray, y::AbstractArray, order::AbstractVector{<:Integer}=1:size(x)[end];
        rates::Union{Nothing,AbstractVector{<:Real}}=nothing)
    losses = zeros(cld(length(order), trainer.batch_size))
    train_epoch!(trainer, x, y, order, losses, rates === nothing ? nothing : Float64[rate for rate in rates])
    return losses
end

"""
The same, with memory for the losses, and a rate for each step or none: with `Array`s of the right element types and one thread,
nothing is allocated.
"""
function train_epoch!(trainer::Trainer, x::AbstractArray, y::AbstractArray, order::AbstractVector{<:Integer},
        losses::Vector{Float64}, rates::Union{Nothing,Vector{Float64}}=nothing)
    samples = checked_samples!(trainer, x, true)
    targets = checked_targets(trainer, y, size(x)[end])
    rows = checked_order(order, size(x)[end])
    length(losses) == cld(length(rows), trainer.batch_size) || throw(ShapeError(
        "train_epoch!: expected room for $(cld(length(rows), trainer.batch_size)) losses, got $(length(losses))"))
    rates === nothing || check_rates(rates, length(losses))
    GC.@preserve samples targets rows losses begin
        data = Data(samples, targets, trainer.loss.classes, rows, size(x)[end])
        if rates === nothing
            train_steps!(trainer, data, pointer(losses), 1, length(losses))
        else
            for (step, rate) in enumerate(rates)
                setfield!(trainer.optimizer, :learning_rate, rate)  # was checked
                train_steps!(trainer, data, pointer(losses), step, step)
            end
        end
    end
    trainer.communicator === nothing || trainer.communicator.add!(losses)
    return nothing
end

function check_rates(rates::Vector{Float64}, steps::Int)
    length(rates) == steps || throw(ShapeError(
        "train_epoch!: expected a learning rate for each of $steps steps, got $(length(rates))"))
    foreach(rate -> setting("train_epoch!", "learning rate", rate; at_least=0.0), rates)
end

"""
    train!(trainer, x, y; epochs=1, shuffle=true, seed=0)
    train!(chain, x, y; epochs=1, shuffle=true, seed=0, loss, optimizer, batch_size, threads)

Train for some epochs and return the mean loss of each. The order of the samples is drawn anew for every epoch. Data and
errors are as in [`train_epoch!`](@ref).
"""
function train!(trainer::Trainer, x::AbstractArray, y::AbstractArray; epochs::Integer=1, shuffle::Bool=true, seed::Integer=0)
    random, n = stream(seed, "order"), size(x)[end]
    return map(1:epochs) do _
        order = shuffle ? randperm(random, n) : collect(1:n)
        mean_loss(trainer.loss, train_epoch!(trainer, x, y, order), y, order, trainer.batch_size)
    end
end
train!(chain::Chain, x::AbstractArray, y::AbstractArray; epochs::Integer=1, shuffle::Bool=true, seed::Integer=0, options...) =
    train!(Trainer(chain; options...), x, y; epochs=epochs, shuffle=shuffle, seed=seed)

"""The mean over all samples of an epoch of the `losses` of its steps, each by how much its mini-batch counts."""
function mean_loss(loss::Loss, losses::Vector{Float64}, y::AbstractArray, order::Vector{Int}, batch_size::Int)
    m = Mean()
    for (step, found) in enumerate(losses)
        rows = order[(step-1)*batch_size+1:min(step * batch_size, end)]
        weight = mean_weight(loss, selectdim(y, ndims(y), rows), length(rows))
        weight > 0 && add!(m, found, weight)
    end
    return result(m)
end

"""
    loss_and_gradients(trainer, x, y)

The training loss of one batch and its gradient by each trained parameter, a dictionary by name; nothing is updated. `x` is
(..., N), `y` as in [`train_epoch!`](@ref). Throws a `ShapeError` or `LabelError` for data that does not suit the model.
"""
function loss_and_gradients(trainer::Trainer, x::AbstractArray, y::AbstractArray)
    samples = checked_samples!(trainer, x, true)
    targets = checked_targets(trainer, y, size(x)[end])
    rows = collect(Int64, 1:size(x)[end])
    loss = GC.@preserve samples targets rows loss_and_gradient!(
        trainer, Data(samples, targets, trainer.loss.classes, rows, size(x)[end]))
    return loss, as_dict(trainable_part(trainer.parameters.layout), trainer.gradient)
end

"""Leave the gradient of all rows of the data, as one batch, in the trainer's gradient vector; return the loss."""
function loss_and_gradient!(trainer::Trainer{T}, data::Data) where {T}
    before = set_blas_threads(trainer.threads)
    try
        forget_traced!(trainer.streams)
        shard = AD.apart(gradient_shard, trainer, data.rows)::Shard{T}
        GC.@preserve shard run!(shard, data, 0)
        return Float64(GC.@preserve shard unsafe_load(shard.loss))
    finally
        set_blas_threads(before)
    end
end

gradient_shard(trainer::Trainer{T}, rows::Int) where {T} = make_shards(T, trainer.chain, objective(trainer), trainer.input,
    target_size(trainer), target_type(trainer), rows, 1, trainer.gradient, trainer.techniques)[1]

"""
    costs(trainer)

Op, layer, seconds, bytes moved, and multiplications and additions of products, of each op of the step of a whole mini-batch. They
are timed as they run: beside those of the other threads, with the seconds divided by the number of threads that do the same; a
product that threads share by all of them; the ops of a fused region together, tile by tile. The last is the update, with the sums
of the threads' gradients. What else a step takes is for gathering the samples, looking for NaN, and waiting.
"""
function costs(trainer::Trainer{T}) where {T}
    choose_sparse!(trainer)
    forget_outdated!(trainer)
    shards = shards_for!(trainer, trainer.batch_size)
    n, shared = length(shards), shards[1].shared
    parts = [AD.timed_parts(shard.tape) for shard in shards]
    found = [Tuple{Float64,Int}[] for _ in shards]
    alone = runs_alone(trainer) || threads_to_use(trainer.team.size) < trainer.team.size
    team = alone || (n == 1 && shared === nothing) ? ALONE : trainer.team
    streams = kept_streams(trainer.streams)
    before = set_blas_threads(runs_alone(trainer) ? 1 : blas_threads(shards, trainer.threads))
    sum_in!(team, shards)
    try
        together(team) do k
            if team.size > 1 && shared !== nothing
                k == 1 ? (found[1] = shared_costs(shards[1], shared, parts[1], team)) : share_products!(shared, team, k)
            else
                for j in k:team.size:n
                    found[j] = AD.costs(shards[j].tape, parts[j])
                end
            end
        end
    finally
        sum_in!(ALONE, shards)
        set_blas_threads(before)
        put_back!(streams)
    end
    each = Tuple{String,String,Float64,Int,Int}[]
    for (shard, parts, costs) in zip(shards, parts, found), (part, (seconds, operations)) in zip(parts, costs)
        push!(each, (AD.title(part)..., alone ? seconds : seconds / n, AD.bytes_moved(shard.tape, part), operations))
    end
    isfinite(trainer.update_seconds) &&
        push!(each, (UPDATE, "", trainer.update_seconds / trainer.accumulate, updated_bytes(trainer, shards), 0))
    return each
end

"""Times that `costs` runs each op."""
const REPEATS = 3

"""
What `AD.costs` gives for a tape whose products the team shares, timed by the first thread, which does all else; the other threads do
`share_products!`.
"""
function shared_costs(shard::Shard{T}, shared::AD.Kernels.SharedCode{T}, parts::Vector{AD.TimedPart}, team::Team) where {T}
    code = AD.Kernels.of_type(shard.tape.code, T)
    products = Dict{UnitRange{Int},Tuple{Int,UnitRange{Int}}}()  # those that are shared out, by the instructions of their op
    for part in parts
        op = part.segment == 0 ? instructions(T, part.steps[1]) : 1:0
        product = AD.Kernels.product_of(code, op)
        product !== nothing && AD.Kernels.is_shared_out(code[product]) && (products[op] = (length(products) + 1, product))
    end
    return AD.costs(shard.tape, parts; repeats=REPEATS, run=function (tape, part)
        op = instructions(T, part.steps[1])
        j, product = get(products, op, (0, 1:0))
        j == 0 && return AD.run_part!(tape, part)
        AD.Kernels.execute!(code, first(op), first(product) - 1)
        barrier!(team)
        AD.Kernels.execute_product!(shared, 1, j)
        barrier!(team)
        AD.Kernels.execute!(code, last(product) + 1, last(op))
        return nothing
    end)
end

"""What thread `k`, not the first, does meanwhile: its parts of the products."""
function share_products!(shared::AD.Kernels.SharedCode, team::Team, k::Int)
    for _ in 1:REPEATS, j in 1:length(shared.stages)-1
        barrier!(team) || return nothing
        AD.Kernels.execute_product!(shared, k, j)
        barrier!(team) || return nothing
    end
    return nothing
end

"""
The bytes that an update reads and writes: parameters, what the optimizer keeps for them, and the gradients of all parts of the
batch, of columns that are kept apart only those that were looked up.
"""
function updated_bytes(trainer::Trainer{T}, shards::Vector{Shard{T}}) where {T}
    kept_apart = sum(Int[c.height * c.width for c in shards[1].columns])
    looked_up = sum(Int[c.height * c.count for shard in shards for c in shard.columns])
    gradients = length(shards) * (length(trainer.gradient) - kept_apart) + looked_up
    return sizeof(T) * (2 * (1 + length(state_names(trainer.optimizer))) * length(trainer.gradient) + gradients)
end

"""What is known of the two ways to make the step of a whole mini-batch; `nothing` where they were not tried."""
trials_known(trainer::Trainer) =
    get(trainer.trials, (trainer.batch_size, threads_for(trainer, trainer.batch_size)), nothing)

"""Whether one thread makes the step of a whole mini-batch, since that takes less time."""
function runs_alone(trainer::Trainer)
    rounds_alike(trainer) || return false
    trials = trials_known(trainer)
    return trials !== nothing && trials.decided && trials.prefers_alone
end

"""What `costs` calls the update, with the sums of the threads' gradients before it."""
const UPDATE = "sums and update"

"""
    threads_in_step(trainer)

What the threads do in the step of a whole mini-batch, in words.
"""
function threads_in_step(trainer::Trainer)
    choose_sparse!(trainer)
    forget_outdated!(trainer)
    shards = shards_for!(trainer, trainer.batch_size)
    runs_alone(trainer) && return "one thread"
    length(shards) > 1 && return "split over $(length(shards)) threads"
    shards[1].shared === nothing || return "products shared by $(trainer.threads) threads"
    threads = blas_threads(shards, trainer.threads)
    return threads > 1 ? "$threads threads in BLAS" : "one thread"
end

"""
    threads_decided(trainer)

Whether it is known what the threads do in the step of a whole mini-batch, as is tried in the first ones. True also before the
first step, and where nothing is tried.
"""
function threads_decided(trainer::Trainer)
    trials = trials_known(trainer)
    return trials === nothing || trials.decided
end

# Checkpoints ----------------------------------------------------------------------------------------------------------

# The third number of a state. In its place older versions have a count, or nothing: their streams do not say
# their steps.
const STREAMS_WITH_STEPS = -1

"""
    training_state(trainer)

All that a checkpoint needs beside the parameters and the settings, as copies: `(numbers, first, second, total)`. The
numbers are the updates and the mini-batches since the last one, $STREAMS_WITH_STEPS, and for each dropout layer how
many numbers its streams have, and these: see `STREAM_NUMBERS`. The vectors are the optimizer's own, called `names`, and what
is accumulated of an update of `accumulate` mini-batches.

A new trainer of the same chain and settings that has the same parameters and takes this over by [`load_state!`](@ref)
continues bit for bit as this one would. With a communicator it is the state of this process, whose streams are its own.
"""
function training_state(trainer::Trainer)
    trainer.techniques.replay || isempty(trainer.streams.layers) || throw(ConfigurationError(
        "eager steps of a dropout layer cannot be resumed: switch the technique replay on"))
    suit!(trainer.state, trainer.optimizer, length(trainer.gradient))
    numbers = Int64[trainer.state.steps, trainer.pending, STREAMS_WITH_STEPS]
    for found in stream_states(trainer.streams)
        append!(push!(numbers, length(found)), found)
    end
    return (numbers=numbers, first=copy(trainer.state.first), second=copy(trainer.state.second), total=copy(trainer.total),
        names=state_names(trainer.optimizer), accumulate=trainer.accumulate)
end

dropouts(chain::Chain) = Dropout[layer for (_, layer) in held_layers(chain.layers, Dropout)]

"""
    load_state!(trainer, state)

Take over what [`training_state`](@ref) gave, in this version or an older one. Throws a `ParameterError`, and changes
nothing, if it does not fit.
"""
function load_state!(trainer::Trainer{T}, state) where {T}
    suit!(trainer.state, trainer.optimizer, length(trainer.gradient))
    hasproperty(state, :names) && state.names != state_names(trainer.optimizer) && throw(unfit_state())
    hasproperty(state, :accumulate) && get(state.numbers, 2, 0) > 0 && state.accumulate != trainer.accumulate &&
        throw(ParameterError("load_state!: a part of an update of $(state.accumulate) mini-batches is not one of $(trainer.accumulate)"))
    all(part -> isempty(part) || eltype(part) === T, (state.first, state.second, state.total)) || throw(unfit_state())
    numbers = state.numbers
    steps = get(numbers, 3, 0) == STREAMS_WITH_STEPS
    streams, next = Vector{Int64}[], steps ? 4 : 3
    for _ in trainer.streams.layers
        count = next <= length(numbers) ? numbers[next] : -1
        0 <= count <= length(numbers) - next && count % (steps ? STREAM_NUMBERS : WORDS) == 0 || throw(unfit_state())
        push!(streams, numbers[next+1:next+count])
        next += count + 1
    end
    length(numbers) == next - 1 && numbers[1] >= 0 && 0 <= numbers[2] < trainer.accumulate && length(state.first) == length(trainer.state.first) &&
        length(state.second) == length(trainer.state.second) && length(state.total) == length(trainer.total) ||
        throw(unfit_state())
    trainer.state.steps, trainer.pending = numbers[1], numbers[2]
    copyto!(trainer.state.first, state.first)
    copyto!(trainer.state.second, state.second)
    copyto!(trainer.total, state.total)
    load_streams!(trainer.streams, streams, steps)
    return nothing
end

unfit_state() = ParameterError("load_state!: this state is of another network, optimizer or element type")

# Evaluation -----------------------------------------------------------------------------------------------------------

"""
    evaluate(trainer, x, y)

Mean loss and accuracy over all samples, as an `Evaluation`, with dropout off; ignored labels count in neither.
"""
function evaluate(trainer::Trainer, x::AbstractArray, y::AbstractArray)
    samples = checked_samples!(trainer, x)
    targets = checked_targets(trainer, y, size(x)[end])
    return GC.@preserve samples targets evaluate(
        trainer, Data(samples, targets, trainer.loss.classes, Int64[], size(x)[end]))
end

function evaluate(trainer::Trainer, data::Data)
    loss, right = Mean(), Accuracy(trainer.loss.ignored)
    each_part(trainer, data, true) do tape, first, count
        gather!(address(tape.inputs[1]), address(tape.inputs[2]), unordered(data), first, count)
        AD.run!(tape)
        weight = mean_weight(trainer.loss, tape.inputs[2], count)
        weight > 0 && add!(loss, tape.outputs[2][], weight)
        trainer.loss.counts_answers && add!(right, tape.outputs[1], tape.inputs[2])
    end
    return Evaluation(result(loss), result(right))
end

"""
    predict(trainer, x)

The model's outputs (logits) for all samples (..., N), as (output..., N), with dropout off. Throws a `ShapeError` for samples that
do not suit the model.
"""
function predict(trainer::Trainer{T}, x::AbstractArray) where {T}
    samples = checked_samples!(trainer, x)
    n = size(x)[end]
    out = Array{T}(undef, trainer.output..., n)
    GC.@preserve samples out predict!(trainer, Data(samples, samples, false, Int64[], n), address(out))
    return out
end

function predict!(trainer::Trainer{T}, data::Data, out::Ptr{UInt8}) where {T}
    bytes = prod(trainer.output) * sizeof(T)
    each_part(trainer, data, false) do tape, first, count
        copy_items!(address(tape.inputs[1]), data.x + first * data.x_bytes, count * data.x_bytes, data.ids, data.base)
        AD.run!(tape)
        copy_bytes!(out + first * bytes, address(tape.outputs[1]), count * bytes)
    end
    return nothing
end

unordered(d::Data) = Data(d.samples, d.x, d.x_bytes, d.ids, d.y, d.y_bytes, d.classes, Ptr{Int64}(C_NULL), d.samples, d.base)

function each_part(f, trainer::Trainer, data::Data, with_loss::Bool)
    before = set_blas_threads(trainer.threads)
    try
        isempty(trainer.watched) || forget_outdated!(trainer)
        at_once = evaluated_at_once(trainer, data.samples, with_loss)
        for first in 0:at_once:data.samples-1
            count = min(at_once, data.samples - first)
            f(forward_tape!(trainer, count, with_loss), first, count)
        end
    finally
        set_blas_threads(before)
    end
end

"""How many samples are computed at once: all of them where an op or a layer needs a whole batch in evaluation, too."""
function evaluated_at_once(trainer::Trainer, samples::Int, with_loss::Bool)
    samples > EVALUATION_BATCH || return EVALUATION_BATCH
    whole = get!(trainer.whole, with_loss) do
        equations = forward_tape!(trainer, EVALUATION_BATCH, with_loss).program.equations
        coupling_op(equations) !== nothing || AD.apart(coupling_layer, trainer.chain, trainer.input, EVALUATION_BATCH, false) !== nothing
    end
    return whole ? samples : EVALUATION_BATCH
end

function forward_tape!(trainer::Trainer, samples::Int, with_loss::Bool)
    known = get(trainer.forwards, (samples, with_loss), nothing)
    known === nothing || (AD.check_ready(known); return known)
    length(trainer.forwards) >= MOST_FORWARDS && empty!(trainer.forwards)
    tape = noting_fields(() -> AD.apart(new_forward_tape, trainer, samples, with_loss), trainer)::Tape
    forget_read_in_place!(trainer, Tape[tape])
    return trainer.forwards[samples, with_loss] = tape
end

function new_forward_tape(trainer::Trainer, samples::Int, with_loss::Bool)
    inputs = Tensor[AD.symbol(input_type(trainer), push!(copy(trainer.input), samples), "x")]
    with_loss && push!(inputs, AD.symbol(target_type(trainer), Int[target_size(trainer); samples], "y"))
    outputs, nodes = AD.tracing() do
        outputs = Tensor[applied(trainer.chain, trainer.parameters.tensors, inputs[1], false)]
        outputs[1].eltype === eltype(trainer.vector) || throw(DTypeError("the chain's parameters are of $(eltype(trainer.vector)), " *
            "what it gives is of $(outputs[1].eltype)"))
        with_loss && push!(outputs, objective(trainer)(outputs[1], inputs[2]))
        outputs
    end
    return Tape(AD.traced(nodes, inputs, outputs); techniques=trainer.techniques)
end

# Looking at it --------------------------------------------------------------------------------------------------------

"""The training tapes planned so far."""
tapes(trainer::Trainer) = Tape[shard.tape for (_, shards) in trainer.plans for shard in shards]

"""
    source(trainer)

The training tapes planned so far as straight-line code, for reading.
"""
AD.source(trainer::Trainer) =
    join(["# $(size(tape.inputs[1])[end]) samples\n$(AD.source(tape))" for tape in tapes(trainer)], "\n\n")

# The steps ------------------------------------------------------------------------------------------------------------

"""
Train the steps from `first` to `last` of an epoch over `data`, whose order and targets have been checked, and store the
loss of each.
"""
function train_steps!(trainer::Trainer, data::Data, losses::Ptr{Float64}, first::Int, last::Int)
    first <= last || return nothing
    trainer.chain.parameters === trainer.parameters || throw(ConfigurationError(
        "the chain's layers were changed after this trainer was made; make a new trainer"))
    isempty(trainer.watched) || forget_outdated!(trainer)
    how = trainer.techniques
    if !how.replay || !how.batched
        failed = AD.apart(plain_steps!, trainer, data, losses, first, last)::Int
        failed == 0 || throw(AD.apart(explained, trainer, data, failed, unsafe_load(losses, failed)))
        return nothing
    end
    full, rest = parts(trainer, data.rows)
    choose_sparse!(trainer)
    suit!(trainer.state, trainer.optimizer, length(trainer.gradient))
    threads = threads_to_use(trainer.team.size)
    shards = shards_for!(trainer, full, threads)
    others = rest == 0 ? shards : shards_for!(trainer, rest, threads)
    while threads != threads_to_use(trainer.team.size)  # another task has entered a parallel region, or left it, since
        threads = threads_to_use(trainer.team.size)
        shards = shards_for!(trainer, full, threads)
        others = rest == 0 ? shards : shards_for!(trainer, rest, threads)
    end
    trains!(trainer.streams, (full, threads_for(trainer, full, threads)))
    rest == 0 || trains!(trainer.streams, (rest, threads_for(trainer, rest, threads)))
    forget!(shards)  # what an error may have left behind
    forget!(others)
    foreach(shard -> AD.check_ready(shard.tape), shards)
    foreach(shard -> AD.check_ready(shard.tape), others)
    team, of_blas = all_threads(trainer, shards, others)
    is_free = threads == trainer.team.size
    several = is_free && (team.size > 1 || (of_blas > 1 && trainer.team.size > 1))
    trials = several || Versions.writes_code() ? trials_for!(trainer, shards, others, full, threads) : nothing
    before = set_blas_threads(of_blas)
    failed = 0
    try
        if trials === nothing
            failed = steps!(trainer, is_free ? team : ALONE, shards, others, data, losses, first, last)
        else
            failed = tried_steps!(trainer, trials, shards, others, data, losses, first, last)
        end
    finally
        set_blas_threads(before)
    end
    failed == 0 || throw(AD.apart(explained, trainer, data, failed, unsafe_load(losses, failed)))
    return nothing
end

"""
How all threads make a step of these parts of a batch: the team that runs them, and the threads of BLAS. `others` are the parts of
the last batch, which may have sums over the batch where those of a whole one do not.
"""
function all_threads(trainer::Trainer, shards::Vector{<:Shard}, others::Vector{<:Shard}=shards)
    works_together = length(shards) > 1 || shards[1].shared !== nothing || any(shard -> shard.batch_sums !== nothing, others)
    return works_together ? trainer.team : ALONE, blas_threads(shards, trainer.threads)
end

"""
What is known of the two ways to make a plan's steps; `nothing` where there is one: all threads must work at the same time where they
wait for each other, and where one of them rounds otherwise, as in a norm.
"""
function trials_for!(trainer::Trainer, shards::Vector{<:Shard}, others::Vector{<:Shard}, samples::Int, threads::Int)
    is_split = length(shards) > 1
    (is_split && others[1].shared !== nothing || !rounds_alike(trainer)) && !Versions.writes_code() && return nothing
    all(shard -> shard.batch_sums === nothing, shards) && all(shard -> shard.batch_sums === nothing, others) || return nothing
    key = (samples, threads_for(trainer, samples, threads))
    known = get(trainer.trials, key, nothing)
    known === nothing || return known
    return trainer.trials[key] = Trials(trainer.accumulate, is_split, blas_threads(shards, trainer.threads) > 1)
end

"""
Leave one thread untried where it rounds the products of a whole batch in another way than all threads do, and where a step is long.
What is trained does not depend on what a clock says, then. Nothing is known yet where other work has the threads.
"""
function check_alike!(trainer::Trainer, trials::Trials, shard::Shard{T}, data::Data, step::Int) where {T}
    threads_to_use(trainer.team.size) == trainer.team.size || return nothing
    team, of_blas = all_threads(trainer, [shard])
    start = (step - 1) * trainer.batch_size
    products, code = AD.Kernels.products(T), AD.Kernels.of_type(shard.tape.code, T)
    may_try = sum(Float64[AD.Kernels.multiplications(x) for x in code if x.kernel in products]) < LONG_WORK
    kept = kept_streams(trainer.streams)
    try
        if may_try
            bits, seconds = bits_of_step!(team, of_blas, shard, data, start)
            put_back!(kept)
            if seconds > LONG_STEP  # the first time may compile, and touches memory
                bits, seconds = bits_of_step!(team, of_blas, shard, data, start)
                put_back!(kept)
            end
            may_try = seconds <= LONG_STEP
        end
        if may_try
            others, seconds = bits_of_step!(ALONE, 1, shard, data, start)
            may_try = others == bits && seconds <= 2 * LONG_STEP
        end
    finally
        put_back!(kept)
    end
    may_try || choose!(trials, false, Inf)
    trials.checked = true
    return nothing
end

"""Make a step of a whole batch but for the update; a checksum of the loss and the gradients, and its seconds."""
function bits_of_step!(team::Team, of_blas::Int, shard::Shard{T}, data::Data, start::Int) where {T}
    before, begun = set_blas_threads(of_blas), time_ns()
    try
        together(team) do k
            team.size == 1 ? run!(shard, data, start) : run!(shard, shard.shared::AD.Kernels.SharedCode{T}, data, start, team, k)
        end
    finally
        set_blas_threads(before)
    end
    seconds = (time_ns() - begun) / 1e9
    found = UInt64[AD.mixed_bytes(Ptr{UInt8}(shard.loss), sizeof(T)), AD.mixed_bytes(address(shard.gradient), sizeof(shard.gradient))]
    for c in shard.columns
        push!(found, AD.mixed_bytes(Ptr{UInt8}(c.values), sizeof(T) * c.height * c.count))
    end
    return found, seconds
end

"""Whether an update by one thread gives the bits of one by all: a norm is added up from the threads' parts."""
rounds_alike(trainer::Trainer) = trainer.optimizer.clip_norm == Inf && trainer.communicator === nothing

"""The steps in the way that is the fastest or, as long as that is not known, now in the one and now in the other."""
function tried_steps!(trainer::Trainer, trials::Trials, shards, others, data::Data, losses::Ptr{Float64}, first::Int, last::Int)
    whole = others === shards ? last : data.rows ÷ trainer.batch_size  # the steps of as many samples as the first
    (all_team, of_blas), is_split = all_threads(trainer, shards), length(shards) > 1
    trials.checked || first > whole || check_alike!(trainer, trials, shards[1], data, first)
    trials.checked || return steps!(trainer, threads_to_use(trainer.team.size) == trainer.team.size ? all_team : ALONE, shards, others,
        data, losses, first, last)
    failed = 0
    while failed == 0 && first <= last
        # Another task may have entered a parallel region since the last steps.
        is_free = threads_to_use(trainer.team.size) == trainer.team.size
        compare_again!(trials)
        # Fewer samples, whose products are not split, may be rounded in another way by one thread: all make their step.
        is_alone = trials.is_alone && (is_split || first <= whole)
        team = is_alone || !is_free ? ALONE : all_team
        timed = trials.compares || (is_alone && !is_split) ? min(last, whole) : last
        stop = first > timed ? last : first - 1 + at_once(trials, timed - first + 1)
        set_blas_threads(is_alone ? 1 : of_blas)
        before = time_ns()
        failed = steps!(trainer, team, shards, others, data, losses, first, stop)
        if is_free && failed == 0 && (stop <= whole || !trials.compares)
            compared = trials.compares
            note!(trials, (time_ns() - before) / 1e9, stop - first + 1)
            compared && !trials.compares && stop < last && (trainer.update_seconds = Inf)  # the least of both ways
        end
        first = stop + 1
    end
    return failed
end

function steps!(trainer::Trainer, team::Team, shards, others, data::Data, losses::Ptr{Float64}, first::Int, last::Int)
    steps, pending = trainer.state.steps, trainer.pending
    team.size == 1 && !Versions.writes_code() &&  # a workload has one thread, and is to compile what several do
        return work!(trainer, team, 1, shards, others, data, losses, first, last, steps, pending)
    return in_team!(trainer, team, shards, others, data, losses, first, last, steps, pending)
end

function in_team!(trainer, team, shards, others, data, losses, first, last, steps, pending)
    failed = Threads.Atomic{Int}(0)
    sum_in!(team, shards, others)
    try
        together(team) do k
            found = work!(trainer, team, k, shards, others, data, losses, first, last, steps, pending)
            k == 1 && (failed[] = found)
        end
    finally
        sum_in!(ALONE, shards, others)
    end
    return failed[]
end

"""
What thread `k` of the team does: in each step its shards, then, when all have met, its segment of the parameters.
Returns the step whose loss or gradient was not finite, which all threads notice alike; 0 if there was none.
"""
function work!(trainer::Trainer{T}, team::Team, k::Int, full::Vector{Shard{T}}, rest::Vector{Shard{T}}, data::Data,
        losses::Ptr{Float64}, first::Int, last::Int, steps::Int, pending::Int) where {T}
    o, batch, partial = trainer.optimizer, trainer.batch_size, trainer.partial
    from, to = segment(1, length(trainer.gradient), team.size, k)
    clips = o.clip_norm < Inf || o.clip_value < Inf
    for step in first:last
        start = (step - 1) * batch
        shards = data.rows - start >= batch ? full : rest
        own = part(trainer.communicator, min(batch, data.rows - start))
        j = k
        finite = true
        shared = shards[1].shared
        shares = team.size > 1 && shared !== nothing
        if shares
            run!(shards[1], shared, data, start + own.first, team, k) && barrier!(team) || return 0
            finite = all_finite(trainer, shards[1], team.size, k)
        end
        while j <= length(shards)
            shard = shards[j]
            shares || run!(shard, data, start + own.first)
            finite &= isfinite(unsafe_load(shard.loss)) && (shares || all_finite(trainer, shard, 1, 1))
            for c in shard.columns
                finite &= all_finite(c.values, c.height * c.count)
                collect!(c)
            end
            j += team.size
        end
        partial[8k] = finite ? 0.0 : 1.0
        barrier!(team) || return 0
        loss, wrong = 0.0, 0.0
        for shard in shards
            loss += unsafe_load(shard.loss)
        end
        for m in 1:team.size
            wrong += partial[8m]
        end
        k == 1 && unsafe_store!(losses, loss * own.weight, step)
        if trainer.communicator !== nothing
            add_parts!(trainer, team, k, shards, own.weight, wrong == 0) || return step
        elseif wrong != 0
            return step
        end
        pending += 1
        updates = pending == trainer.accumulate
        updates && (pending = 0; steps += 1)
        before = time_ns()
        if clips
            reduce!(trainer, shards, updates, from, to)
            if updates
                barrier!(team) || return 0  # nobody reads `partial` any more
                clip!(trainer, team, k, from, to) || return left_out!(trainer, k, from, to, step)
                update_segment!(trainer, from, to, steps)
            end
        else
            sums = trainer.accumulate > 1 || (length(shards) > 1 && trainer.communicator === nothing)
            for (a, b) in shards[1].dense
                from, to = segment(a, b, team.size, k)
                at_once = sums ? BLOCK : max(1, to - from + 1)  # a call of the update for each block counts where it is short
                for block in from:at_once:to
                    stop = min(block + at_once - 1, to)
                    reduce!(trainer, shards, updates, block, stop)
                    updates && update_segment!(trainer, block, stop, steps)
                end
            end
            for i in eachindex(shards[1].columns)
                update_columns!(trainer, shards, i, team.size, k, steps)
            end
        end
        if k == 1  # after every step, so that the count is right even if the next one throws
            foreach(keep_states!, shards)
            trainer.state.steps, trainer.pending = steps, pending
            updates && (trainer.update_seconds = min(trainer.update_seconds, (time_ns() - before) / 1e9))
        end
        barrier!(team) || return 0
    end
    return 0
end

"""Leave nothing of an update whose gradient can't be clipped for the next one; return the step."""
function left_out!(trainer::Trainer, k::Int, from::Int, to::Int, step::Int)
    trainer.accumulate > 1 && clear!(trainer.total, from, to)
    k == 1 && (trainer.pending = 0)
    return step
end

"""Sum the gradients of the shards, and those of all processes; whether all of it is finite."""
function add_parts!(trainer::Trainer{T}, team::Team, k::Int, shards::Vector{Shard{T}}, weight::Float64, finite::Bool) where {T}
    from, to = segment(1, length(trainer.gradient), team.size, k)
    sum_shards!(trainer, shards, from, to)
    barrier!(team) || return false
    k == 1 && exchange!(trainer.communicator::Communicator, trainer.gradient, weight, finite)
    barrier!(team) || return false
    all_finite(trainer.gradient) && return true
    barrier!(team) || return false
    k == 1 && fill!(trainer.gradient, 0)  # no tape writes what has no derivative, so that it would stay NaN
    return false
end

"""The elements, of those from `a` to `b`, that the thread `k` of `threads` updates; segments begin on cache lines."""
function segment(a::Int, b::Int, threads::Int, k::Int)
    each = cld(cld(b - a + 1, 16), threads) * 16
    return a + (k - 1) * each, min(a + k * each - 1, b)
end

"""Whether thread `k`'s segment of a gradient is finite, but for what is kept by columns."""
function all_finite(trainer::Trainer{T}, shard::Shard{T}, threads::Int, k::Int) where {T}
    for (a, b) in shard.dense
        from, to = segment(a, b, threads, k)
        all_finite(elements_of(shard.gradient, from), to - from + 1) || return false
    end
    return true
end

"""
Update the i-th matrix whose gradient is kept by columns. A block of its gradient at a time is put together from all shards,
and used while it is in the cache; blocks go round the threads, since low ids are often the frequent ones.
"""
function update_columns!(trainer::Trainer{T}, shards::Vector{Shard{T}}, i::Int, threads::Int, k::Int, steps::Int) where {T}
    whole = shards[1].columns[i]
    height, width, o, state = whole.height, whole.width, trainer.optimizer, trainer.state
    at_once, block = max(1, BLOCK ÷ height), trainer.blocks[k]
    vector, first, second = elements_of(trainer.vector), elements_of(state.first), elements_of(state.second)
    sums = elements_of(block)
    for from in (k-1)*at_once+1:threads*at_once:width
        to = min(from + at_once - 1, width)
        fill!(block, zero(T))
        start = whole.offset + (from - 1) * height
        for shard in shards
            c = shard.columns[i]
            for id in from:to
                f = @inbounds Int(c.first[id])
                f == 0 && continue
                @inbounds c.first[id] = 0
                sum, values = sums + sizeof(T) * height * (id - from), c.values + sizeof(T) * height * (f - 1)
                add_scaled!(sum, values, one(T), 1, height)
            end
        end
        g = sums - sizeof(T) * start  # so that the gradient has the parameters' numbers
        update!(o, vector, g, first, second, start + 1, start + (to - from + 1) * height, steps)
    end
    return nothing
end

gradient_vector(trainer::Trainer) = trainer.accumulate > 1 ? trainer.total : trainer.gradient

"""Sum the shards' gradients into the first one's."""
@inline function sum_shards!(trainer::Trainer{T}, shards::Vector{Shard{T}}, from::Int, to::Int) where {T}
    for m in 2:length(shards)
        add_scaled!(elements_of(trainer.gradient), elements_of(shards[m].gradient), one(T), from, to)
    end
    return nothing
end

"""Sum the shards' gradients, unless they are summed already, and the mean over several batches into `total`."""
@inline function reduce!(trainer::Trainer{T}, shards::Vector{Shard{T}}, updates::Bool, from::Int, to::Int) where {T}
    trainer.communicator === nothing && sum_shards!(trainer, shards, from, to)
    trainer.accumulate > 1 &&
        add_scaled!(elements_of(trainer.total), elements_of(trainer.gradient), T(1 / trainer.accumulate), from, to)
    return nothing
end

@inline function update_segment!(trainer::Trainer{T}, from::Int, to::Int, steps::Int) where {T}
    g, vector = elements_of(gradient_vector(trainer)), elements_of(trainer.vector)
    first, second = elements_of(trainer.state.first), elements_of(trainer.state.second)
    if trainer.techniques.flat_parameters
        update!(trainer.optimizer, vector, g, first, second, from, to, steps)
    else
        layout = trainer.parameters.layout
        for i in 1:length(layout.offsets)
            stop = i < length(layout.offsets) ? layout.offsets[i+1] : layout.length
            update!(trainer.optimizer, vector, g, first, second, max(from, layout.offsets[i] + 1), min(to, stop), steps)
        end
    end
    trainer.accumulate > 1 && scale!(g, zero(T), from, to)
    return nothing
end

"""Clip the whole gradient, of which this thread has a segment; false if its norm is not finite."""
function clip!(trainer::Trainer{T}, team::Team, k::Int, from::Int, to::Int) where {T}
    o, g = trainer.optimizer, elements_of(gradient_vector(trainer))
    o.clip_value < Inf && clip!(g, T(o.clip_value), from, to)
    o.clip_norm < Inf || return true
    norm, unit = sqrt(over_threads(+, trainer, team, k, Float64(squares(g, from, to)))), 1.0
    if norm == Inf  # finite numbers may have squares that are not
        barrier!(team) || return false  # nobody reads `partial` any more
        unit = unit_of(over_threads(max, trainer, team, k, largest(g, from, to)))
        barrier!(team) || return false
        scale!(g, T(1 / unit), from, to)
        norm = unit * sqrt(over_threads(+, trainer, team, k, Float64(squares(g, from, to))))
    end
    isfinite(norm) || return false
    factor = clip_scale(o, norm) * unit
    factor == 1 || scale!(g, T(factor), from, to)
    return true
end

"""What `combine` makes of a number of each thread, in their order; NaN where the barrier is broken."""
function over_threads(combine::F, trainer::Trainer, team::Team, k::Int, mine::Float64) where {F}
    trainer.partial[8k] = mine
    barrier!(team) || return NaN
    found = trainer.partial[8]
    for m in 2:team.size
        found = combine(found, trainer.partial[8m])
    end
    return found
end

"""The steps without replay, or sample by sample: for ablations."""
function plain_steps!(trainer::Trainer{T}, data::Data, losses::Ptr{Float64}, first::Int, last::Int) where {T}
    before = set_blas_threads(trainer.threads)
    try
        for step in first:last
            start = (step - 1) * trainer.batch_size
            count = min(trainer.batch_size, data.rows - start)
            news = Tuple{Int,Tensor}[]
            if trainer.techniques.replay
                single_shard!(trainer)
                trains!(trainer.streams, ONE_BY_ONE)
                loss = samples_step!(single_shard!(trainer), data, start, count, trainer.gradient)
            else
                x = Array{input_type(trainer)}(undef, trainer.input..., count)
                y = Array{target_type(trainer)}(undef, target_size(trainer)..., count)
                gather!(address(x), address(y), data, start, count)
                loss, news = eager_step!(trainer.chain, objective(trainer), x, y, trainer.gradient, trainer.techniques)
            end
            unsafe_store!(losses, loss, step)
            isfinite(loss) && all_finite(trainer.gradient) || return step
            if trainer.accumulate > 1
                trainer.pending + 1 == trainer.accumulate || keep_state!(trainer.parameters, news)
                trainer.total .+= trainer.gradient ./ trainer.accumulate
                trainer.pending += 1
                trainer.pending == trainer.accumulate || continue
                trainer.pending = 0
            end
            try
                step!(trainer.optimizer, trainer.state, trainer.vector, gradient_vector(trainer))
            finally
                trainer.accumulate > 1 && fill!(trainer.total, 0)
            end
            keep_state!(trainer.parameters, news)
        end
    finally
        set_blas_threads(before)
    end
    return 0
end

"""The error for a step whose loss or gradient is not finite."""
function explained(trainer::Trainer, data::Data, step::Int, loss::Float64)
    reason = nothing
    if trainer.techniques.replay && trainer.techniques.batched
        # The step that failed was the last one: its buffers still hold its batch.
        samples = min(trainer.batch_size, data.rows - (step - 1) * trainer.batch_size)
        for shard in shards_for!(trainer, part(trainer.communicator, samples).count)
            reason === nothing && (reason = diagnosed(shard.tape))
        end
    end
    if reason === nothing && trainer.communicator !== nothing
        reason = NonFiniteError("it arose in another process's part of the batch, or where they are added up")
    end
    what = isfinite(loss) ? "the gradient is not finite" : "the loss is $loss"
    because = reason === nothing ? "" : ": $(reason.message)"
    return NonFiniteError("step $step of the epoch: $what$because. The parameters are those before this step; lower the " *
        "learning rate or look at this batch")
end

"""Why the last run of a tape was not finite, computed with the random numbers that it drew: their streams are put back to it."""
function diagnosed(tape::Tape)
    drawn = generators(tape.program.equations)
    isempty(drawn) && return AD.diagnose(tape)
    after = Vector{Int64}[copy(g.state) for g in drawn]
    try
        AD.run!(tape)  # how far a run goes
        for (g, state) in zip(drawn, after)
            g.state .= 2 .* state .- g.state
        end
        return AD.diagnose(tape)
    finally
        foreach(((g, state),) -> copyto!(g.state, state), zip(drawn, after))
    end
end

# Plans and checks, before anything is computed ------------------------------------------------------------------------

"""How many samples the batches of an epoch over `rows` rows have, and its last one, if it is smaller (0)."""
batches(trainer::Trainer, rows::Int) = min(trainer.batch_size, rows), rows % trainer.batch_size

"""The same for what this process computes of them."""
function parts(trainer::Trainer, rows::Int)
    full, rest = batches(trainer, rows)
    return part(trainer.communicator, full).count, rest == 0 ? 0 : part(trainer.communicator, rest).count
end

"""Make the plans of an epoch over `rows` rows. Nothing of it is called again in a step: it may be interpreted."""
function plan_steps!(trainer::Trainer, rows::Int)
    full, rest = parts(trainer, rows)
    choose_sparse!(trainer)
    shards_for!(trainer, full)
    rest == 0 || shards_for!(trainer, rest)
    return nothing
end

function has_plans(trainer::Trainer, rows::Int)
    trainer.techniques.replay && trainer.techniques.batched || return true  # needs none
    full, rest = parts(trainer, rows)
    there(samples) = haskey(trainer.plans, (samples, threads_for(trainer, samples)))
    return there(full) && (rest == 0 || there(rest))
end

"""Make the tapes that evaluation and prediction of `samples` samples need."""
function plan_forward!(trainer::Trainer, samples::Int, with_loss::Bool)
    for count in (min(EVALUATION_BATCH, samples), samples % EVALUATION_BATCH)
        count == 0 || forward_tape!(trainer, count, with_loss)
    end
    return nothing
end

"""
Gradients of columns are kept apart where nothing needs a whole gradient vector. Plans made otherwise are given up: the
optimizer's settings may change at any time.
"""
function choose_sparse!(trainer::Trainer{T}) where {T}
    o = trainer.optimizer
    wanted = trainer.techniques.sparse_columns && trainer.techniques.flat_parameters && trainer.accumulate == 1 &&
        o.clip_norm == Inf && o.clip_value == Inf && trainer.communicator === nothing
    wanted == trainer.sparse || forget_plans!(trainer)
    trainer.sparse = wanted
    return nothing
end

# What layers of the user's hold -------------------------------------------------------------------------------------------

"""Stands for a field that tracing itself changes."""
struct Changing end

"""Make plans by `f()`: what layers of the user's hold is compared from then on, but for what tracing changes."""
function noting_fields(@nospecialize(f), trainer::Trainer)
    isempty(trainer.own) && return f()
    isempty(trainer.watched) && (trainer.watched = AD.apart(AD.watch, trainer.own))
    found = f()
    filter!(trainer.watched) do w
        (is_same(w) || AD.holds_numbers(w.object)) && return is_same(w)
        AD.count_parts(w.object) == length(w.parts) || return false
        for i in eachindex(w.parts)
            AD.part_of(w.object, i) === w.parts[i] || (w.parts[i] = Changing())
        end
        return true
    end
    return found
end

function is_same(w::AD.Watched)
    AD.holds_numbers(w.object) && return AD.is_unchanged(w)
    AD.count_parts(w.object) == length(w.parts) || return false
    return all(i -> w.parts[i] isa Changing || AD.part_of(w.object, i) === w.parts[i], eachindex(w.parts))
end

"""Arrays that ops read in place are read anew at every step."""
forget_read_in_place!(trainer::Trainer, tapes::Vector{Tape}) = isempty(trainer.watched) ? trainer.watched :
    filter!(w -> !(AD.holds_numbers(w.object) && all(tape -> AD.is_read_in_place(w, tape), tapes)), trainer.watched)

"""Forget the plans if layers of the user's hold something else by now; they are made anew."""
function forget_outdated!(trainer::Trainer)
    all(is_same, trainer.watched) && return nothing
    forget_plans!(trainer)
    empty!(trainer.forwards)
    empty!(trainer.whole)
    empty!(trainer.watched)
    return nothing
end

"""Forget how steps are planned; those that are planned in their place resume their random streams."""
function forget_plans!(trainer::Trainer)
    forget!(trainer.streams)
    empty!(trainer.plans)
    empty!(trainer.trials)
    trainer.single = nothing
    return nothing
end

function forget!(shards::Vector{Shard{T}}) where {T}
    for shard in shards, c in shard.columns
        fill!(c.first, 0)
    end
end

"""The segments of the gradient vector that are not kept by columns."""
function dense_segments(layout::Layout, columns::Vector{Columns{T}}) where {T}
    found, last = Tuple{Int,Int}[], 0
    for c in columns[sortperm(Int[c.offset for c in columns])]
        c.offset > last && push!(found, (last + 1, c.offset))
        last = c.offset + cld(c.height * c.width, PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
    end
    layout.trained > last && push!(found, (last + 1, layout.trained))
    return found
end

"""The parts of a batch of `samples` samples, planned when they are first needed. For `available` see `threads_for`."""
function shards_for!(trainer::Trainer{T}, samples::Int, available::Int=threads_to_use(trainer.team.size)) where {T}
    threads = threads_for(trainer, samples, available)
    known = get(trainer.plans, (samples, threads), nothing)
    known === nothing || return known
    forget_traced!(trainer.streams)
    found = noting_fields(() -> AD.apart(planned, trainer, samples, threads), trainer)::Vector{Shard{T}}
    forget_read_in_place!(trainer, Tape[shard.tape for shard in found])
    keep_traced!(trainer.streams, (samples, threads))
    return trainer.plans[samples, threads] = found
end

"""
How many threads a batch is split over. Parts with sums over the batch need a thread each, which they do not have inside a
parallel region of the user's; others can wait for their turn. `available` is what `threads_to_use` says.
"""
function threads_for(trainer::Trainer, samples::Int, available::Int=threads_to_use(trainer.team.size))
    threads = trainer.team.size
    (threads == 1 || samples < 2 * threads) && return 1
    trainer.couples || return threads
    return trainer.splits && available == threads ? threads : 1
end

function planned(trainer::Trainer{T}, samples::Int, threads::Int) where {T}
    make(threads) = make_shards(T, trainer.chain, objective(trainer), trainer.input, target_size(trainer),
        target_type(trainer), samples, threads, trainer.gradient, trainer.techniques, trainer.sparse)
    shards, team = make(threads), trainer.team.size
    if team > 1 && (threads == 1 || !splitting_pays(shards))
        whole = threads == 1 ? shards : make(1)
        shared = with_shared_products(whole[1], team)
        if shared !== nothing
            shards = Shard{T}[shared]
        elseif !splitting_pays(shards; shared=false)
            shards = whole
        end
    end
    coupling = coupling_op(shards[1].tape.program.equations)
    orders = unique(Vector{Int}[sums_of(shard.tape) for shard in shards])
    # What a layer keeps of a batch without sums over it would be of one part.
    keeps = any(keeps_of_its_samples, shards)
    keeps && trainer.communicator !== nothing && throw(ConfigurationError("Trainer: a layer keeps statistics of a whole batch, of " *
        "which each process would have a part: train it in one process"))
    coupling !== nothing && trainer.communicator !== nothing && throw(ConfigurationError("Trainer: the op $coupling needs a whole " *
        "batch, of which each process would have a part: train it in one process"))
    splits = length(shards) > 1
    layer = splits || trainer.communicator !== nothing ? coupling_layer(trainer.chain, trainer.input, samples, true) : nothing
    layer !== nothing && trainer.communicator !== nothing && throw(ConfigurationError("Trainer: in layer \"$layer\" the samples of a " *
        "batch affect each other, of which each process would have a part: train it in one process"))
    # Parts of other orders would wait for each other; of one generator it would be chance which draws first.
    draws = Vector{Generator}[generators(shard.tape.program.equations) for shard in shards]
    shares = length(unique(objectid, vcat(draws...))) < sum(map(length, draws))
    splits && (shares || coupling !== nothing || layer !== nothing || keeps || length(orders) > 1) && (shards = make(1))
    trainer.update_seconds = Inf
    for block in trainer.blocks, c in shards[1].columns
        length(block) >= max(BLOCK, c.height) || resize!(block, max(BLOCK, c.height))
    end
    return shards
end

"""
The name of the first op that needs a whole batch, but for sums over its parts outside of loops, or nothing: inside of one
they would come to the next barrier before all have read them, and not equally often.
"""
function coupling_op(equations::Vector{AD.Equation})
    for e in equations
        e.op.couples_batch && e.op !== SUM_OF_PARTS && return e.op.name
        inner = AD.inner_equations(e)
        k = findfirst(x -> x.op.couples_batch, inner)
        k === nothing || return inner[k].op.name
    end
    return nothing
end

"""What the trainer's streams call the step of one sample."""
const ONE_BY_ONE = (1, 0)

function single_shard!(trainer::Trainer{T}) where {T}
    if trainer.single === nothing
        forget_traced!(trainer.streams)
        single = noting_fields(trainer) do
            make_shards(T, trainer.chain, objective(trainer), trainer.input, target_size(trainer),
                target_type(trainer), 1, 1, zeros(T, length(trainer.gradient)), trainer.techniques)[1]
        end
        forget_read_in_place!(trainer, Tape[single.tape])
        isempty(single.states) || throw(ConfigurationError("Trainer: a layer keeps statistics of a whole batch, of which there " *
            "is one sample at a time: switch the technique batched on"))
        coupling = coupling_op(single.tape.program.equations)
        coupling === nothing || throw(ConfigurationError("Trainer: the op $coupling needs a whole batch, of which there is one " *
            "sample at a time: switch the technique batched on"))
        layer = coupling_layer(trainer.chain, trainer.input, trainer.batch_size, true)
        layer === nothing || throw(ConfigurationError("Trainer: in layer \"$layer\" the samples of a batch affect each other, of which " *
            "there is one at a time: switch the technique batched on"))
        keep_traced!(trainer.streams, ONE_BY_ONE)
        trainer.single = single
    end
    AD.check_ready(trainer.single.tape)
    return trainer.single::Shard{T}
end

target_size(trainer::Trainer) = target_size(trainer.loss, trainer.output)
target_type(trainer::Trainer{T}) where {T} = trainer.loss.classes ? Int64 : T
input_type(trainer::Trainer{T}) where {T} = trainer.ids ? Int64 : T

function objective(trainer::Trainer)
    trainer.loss.name == "softmax_cross_entropy" && is_plain(trainer.loss) && !trainer.techniques.fused_loss &&
        return one_hot_cross_entropy
    return trainer.loss
end

"""Softmax cross-entropy with one-hot columns, for an ablation."""
function one_hot_cross_entropy(logits::Tensor, labels::Tensor)
    identity_matrix = zeros(logits.eltype, logits.dims[1], logits.dims[1])
    for i in 1:logits.dims[1]
        identity_matrix[i, i] = 1
    end
    one_hot = Constant(identity_matrix)[:, labels]
    return -mean(sum(one_hot .* log_softmax(logits; dims=1); dims=1))
end

"""Plan for samples of this size, unless the plans there are for it; throws when the model does not take it."""
function suit!(trainer::Trainer, dims::Vector{Int})
    trainer.output = output_size(trainer.chain, dims)
    trainer.input = dims
    forget_plans!(trainer)
    empty!(trainer.forwards)
    empty!(trainer.whole)
    return nothing
end

same_size(x::AbstractArray, dims::Vector{Int}) =
    ndims(x) == length(dims) + 1 && all(ntuple(d -> d == ndims(x) || size(x, d) == dims[d], Val(ndims(x))))

function checked_samples!(trainer::Trainer{T}, x::AbstractArray, training::Bool=false) where {T}
    trainer.ids || eltype(x) === T || throw_numbers(trainer, x)
    trainer.ids && (eltype(x) !== Int64 || !trainer.own_ids && count_outside(x, 1, vocabulary(trainer.chain)) > 0) && throw_ids(trainer, x)
    ndims(x) > 0 && size(x)[end] > 0 || throw(ShapeError("there are no samples in an array of size $(size(x))"))
    trainer.chain.parameters === trainer.parameters || throw(ConfigurationError(
        "the chain's layers were changed after this trainer was made; make a new trainer"))
    same_size(x, trainer.input) && !isempty(trainer.output) || suit!(trainer, collect(Int, size(x)[1:end-1]))
    trainer.own_ids && AD.apart(check_lookups, trainer, x, training)
    return x isa Array ? x : Array(x)
end

"""Throw a `ShapeError` where a layer would look up an id that is none of its vocabulary."""
function check_lookups(trainer::Trainer, x::AbstractArray, training::Bool)
    n = size(x)[end]
    count = min(n, EVALUATION_BATCH)
    program, rules = lookups(trainer.chain, trainer.input, count, training)
    for start in 1:count:n
        first = min(start, n - count + 1)
        read = AD.applied(program, Tensor[AD.index_tensor(collect(selectdim(x, ndims(x), first:first+count-1)))])[1]
        for (ids, (vocabulary, layer)) in zip(read, rules)
            AD.check_ids(AD.value(ids), vocabulary, 1, isempty(layer) ? "" : "layer \"$layer\": ", first - 1)
        end
    end
    return nothing
end

function throw_numbers(trainer::Trainer{T}, x::AbstractArray) where {T}
    held = eltype(x) <: Integer ? held_layers(trainer.chain.layers, Embedding) : Pair{String,Layer}[]
    throw(DTypeError("the model is of $T, the samples of $(eltype(x)); convert one of them, for example $T.(x)" *
        (isempty(held) ? "" : "; an Embedding that a layer holds gets them if that layer has a method of NETWORK.takes_ids")))
end

function throw_ids(trainer::Trainer, x::AbstractArray)
    eltype(x) === Int64 || throw(DTypeError("the model takes token ids, Int64, got samples of $(eltype(x)); convert them, " *
        "for example Int64.(x)"))
    AD.check_ids(x, vocabulary(trainer.chain))
end

# The fast way out first: it allocates nothing.
function checked_targets(trainer::Trainer{T}, y::AbstractArray, samples::Int) where {T}
    loss = trainer.loss
    if loss.classes && isempty(loss.class_weights) && y isa Vector{Int64} && length(trainer.output) == 1 &&
       trainer.output[1] > 1 && length(y) == samples &&
       count_outside(y, 1, trainer.output[1]) == 0
        return y
    end
    if !loss.classes && y isa Array{T} && ndims(y) == length(trainer.output) + 1 && size(y)[end] == samples &&
       same_size(y, trainer.output) && count_outside(y, loss.low, loss.high) == 0 && all_finite(y)
        return y
    end
    return checked_targets(loss, trainer.output, samples, y, T)
end

function checked_order(order::AbstractVector{<:Integer}, samples::Int)
    eltype(order) === Bool && throw(DTypeError("order: expected sample numbers, got truth values; give findall(order)"))
    rows = order isa Vector{Int64} ? order : collect(Int64, order)
    isempty(rows) && throw(ShapeError("the order names no samples"))
    count_outside(rows, 1, samples) == 0 || throw(ShapeError(
        "order must hold sample numbers from 1 to $samples, got $(minimum(rows)) to $(maximum(rows))"))
    return rows
end
