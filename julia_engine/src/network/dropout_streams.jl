# Random streams of dropout layers in a trainer's steps, so that a resumed training draws the same masks.
#
# A layer draws the masks of each traced copy from a separate stream. A trainer traces copies for other reasons than to
# train, such as to compute a gradient: only the streams of steps that train are in its state. The state says of each
# stream which step it belongs to: a resumed training may make its steps in another order.

# Of a stream's position.
const WORDS = 2
# Of a stream in a state: the samples and the threads of its step, its number, and its position.
const STREAM_NUMBERS = 3 + WORDS
# In place of samples and threads. Older versions do not say them: steps take their streams in the order in which they
# train.
const ANY_STEP = (0, 0)

"""
The streams of dropout layers, by the step whose traced copies draw from them: a number of samples and of threads.

Use: `forget_traced!` before the trace of a step, `keep_traced!` after it, and `trains!` before a step trains for the first
time.
"""
mutable struct DropoutStreams
    layers::Vector{Dropout}
    rank::Int  # of the process: each draws other numbers
    # Of each layer before the first step was traced: another trainer of the same chain has used streams of these numbers.
    calls::Vector{Int}
    of_step::Dict{Tuple{Int,Int},Vector{Vector{Tuple{String,Generator}}}}  # for each layer, with their scopes
    trained::Vector{Tuple{Int,Int}}
    rows::Vector{Matrix{Int64}}  # for each layer of a state, as columns; where a generator draws, it has the position
    drawing::Vector{Dict{Int,Generator}}  # for each layer: the generator that draws for a row
end
DropoutStreams(layers::Vector{Dropout}, rank::Int=0) = DropoutStreams(layers, rank, Int[],
    Dict{Tuple{Int,Int},Vector{Vector{Tuple{String,Generator}}}}(), Tuple{Int,Int}[],
    Matrix{Int64}[zeros(Int64, STREAM_NUMBERS, 0) for _ in layers],
    Dict{Int,Generator}[Dict{Int,Generator}() for _ in layers])

"""Forget what others have traced."""
function forget_traced!(streams::DropoutStreams)
    isempty(streams.calls) && append!(streams.calls, calls_of(streams))
    for layer in streams.layers
        empty!(layer.traced)
        layer.rank = streams.rank
    end
    return nothing
end

calls_of(streams::DropoutStreams) = isempty(streams.calls) ? Int[layer.calls for layer in streams.layers] : streams.calls

"""Take over the streams of a step that has just been traced; they resume where the state has them."""
function keep_traced!(streams::DropoutStreams, step::Tuple{Int,Int})
    streams.of_step[step] = Vector{Tuple{String,Generator}}[copy(layer.traced) for layer in streams.layers]
    resume!(streams, step)
    return nothing
end

"""
Let the streams of this step be in the state from now on; those that are not yet begin. Their numbers follow those in
the state: how often the layer was called for other reasons since the first step was traced changes nothing.
"""
function trains!(streams::DropoutStreams, step::Tuple{Int,Int})
    isempty(streams.layers) && return nothing
    step in streams.trained && return nothing
    push!(streams.trained, step)
    for (i, copies) in enumerate(streams.of_step[step]), k in length(rows_of(streams, i, step))+1:length(copies)
        add_row!(streams, i, step, copies[k][1])
    end
    resume!(streams, step)
    return nothing
end

rows_of(streams::DropoutStreams, i::Int, step::Tuple{Int,Int}) =
    Int[k for k in 1:size(streams.rows[i], 2) if (streams.rows[i][1, k], streams.rows[i][2, k]) == step]

"""Give a step one more row of a layer: the first one that may be any step's, or a new stream's."""
function add_row!(streams::DropoutStreams, i::Int, step::Tuple{Int,Int}, scope::String)
    rows, free = streams.rows[i], rows_of(streams, i, ANY_STEP)
    if isempty(free)
        number = 1 + (isempty(rows) ? streams.calls[i] : maximum(rows[3, :]))
        streams.layers[i].rank = streams.rank
        streams.rows[i] = hcat(rows, Int64[step..., number, new_stream(streams.layers[i], scope, number).state...])
    else
        rows[1, free[1]], rows[2, free[1]] = step
    end
    return nothing
end

"""Let the generators of a step draw for its rows, those that do not yet."""
function resume!(streams::DropoutStreams, step::Tuple{Int,Int})
    for (i, copies) in enumerate(streams.of_step[step]), (row, (_, g)) in zip(rows_of(streams, i, step), copies)
        haskey(streams.drawing[i], row) && continue
        copyto!(g.state, streams.rows[i][end-WORDS+1:end, row])
        streams.drawing[i][row] = g
    end
    return nothing
end

"""Where the streams of each layer are, `STREAM_NUMBERS` numbers for each."""
stream_states(streams::DropoutStreams) = Vector{Int64}[vec(rows_now(streams, i)) for i in eachindex(streams.layers)]

function rows_now(streams::DropoutStreams, i::Int)
    rows = copy(streams.rows[i])
    for (row, g) in streams.drawing[i]
        rows[end-WORDS+1:end, row] = g.state
    end
    return rows
end

"""
Let the streams resume from such states; a step that trains later resumes from its part of them. Without `steps` they
are of an older version, which has the positions alone.
"""
function load_streams!(streams::DropoutStreams, states::Vector{Vector{Int64}}, steps::Bool=true)
    streams.rows = Matrix{Int64}[steps ? reshape(copy(state), STREAM_NUMBERS, :) : with_steps(state, calls)
                                 for (state, calls) in zip(states, calls_of(streams))]
    detach!(streams)
    foreach(step -> resume!(streams, step), keys(streams.of_step))
    return nothing
end

function with_steps(positions::Vector{Int64}, calls::Int)
    count = length(positions) ÷ WORDS
    rows = zeros(Int64, STREAM_NUMBERS, count)  # of ANY_STEP
    rows[3, :] = calls+1:calls+count
    rows[end-WORDS+1:end, :] = reshape(positions, WORDS, count)
    return rows
end

function detach!(streams::DropoutStreams)
    empty!(streams.trained)
    foreach(empty!, streams.drawing)
    return nothing
end

"""Forget the steps: those that are traced in their place resume their streams."""
function forget!(streams::DropoutStreams)
    streams.rows = Matrix{Int64}[rows_now(streams, i) for i in eachindex(streams.layers)]
    empty!(streams.of_step)
    detach!(streams)
    return nothing
end

"""All streams, each with where it is, for `put_back!`."""
function kept_streams(streams::DropoutStreams)
    kept = Tuple{Generator,Vector{Int64}}[]
    for of_layers in values(streams.of_step), found in of_layers, (_, g) in found
        push!(kept, (g, copy(g.state)))
    end
    return kept
end

put_back!(kept::Vector{Tuple{Generator,Vector{Int64}}}) = foreach(((g, state),) -> copyto!(g.state, state), kept)
