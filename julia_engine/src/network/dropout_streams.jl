# Random streams of dropout layers in a trainer's steps, so that a resumed training draws the same masks.
#
# A layer draws the masks of each traced copy from a separate stream. A trainer traces copies for other reasons than to
# train, such as to compute a gradient: only the streams of steps that train are in its state.

"""
The streams of dropout layers, by the step whose traced copies draw from them: a number of samples and of threads.

Use: `forget_traced!` before the trace of a step, `keep_traced!` after it, and `trains!` before a step trains for the first
time.
"""
mutable struct DropoutStreams
    layers::Vector{Dropout}
    calls::Vector{Int}  # of each layer before: another trainer of the same chain has used streams of these numbers
    of_step::Dict{Tuple{Int,Int},Vector{Vector{Tuple{String,Generator}}}}  # for each layer, with their scopes
    trained::Vector{Tuple{Int,Int}}  # the steps that train, in the order in which they first did
    loaded::Vector{Vector{Int64}}  # for each layer: two numbers for each stream of a loaded state
end
DropoutStreams(layers::Vector{Dropout}) = DropoutStreams(layers, Int[layer.calls for layer in layers],
    Dict{Tuple{Int,Int},Vector{Vector{Tuple{String,Generator}}}}(), Tuple{Int,Int}[], Vector{Int64}[Int64[] for _ in layers])

"""Forget what others have traced."""
forget_traced!(streams::DropoutStreams) = foreach(layer -> empty!(layer.traced), streams.layers)

"""Take over the streams of a step that has just been traced."""
function keep_traced!(streams::DropoutStreams, step::Tuple{Int,Int})
    streams.of_step[step] = Vector{Tuple{String,Generator}}[copy(layer.traced) for layer in streams.layers]
    return nothing
end

"""
Let the streams of this step be in the state from now on; where some were loaded, they resume. Others begin by their place
among all: how often the layer was called for other reasons changes nothing.
"""
function trains!(streams::DropoutStreams, step::Tuple{Int,Int})
    isempty(streams.layers) && return nothing
    step in streams.trained && return nothing
    before = Int[length(generators(streams, i)) for i in eachindex(streams.layers)]
    push!(streams.trained, step)
    for (i, layer) in enumerate(streams.layers), (k, (scope, g)) in enumerate(streams.of_step[step][i])
        copyto!(g.state, new_stream(layer, scope, streams.calls[i] + before[i] + k).state)
    end
    resume!(streams, before)
    return nothing
end

generators(streams::DropoutStreams, i::Int) = Generator[g for step in streams.trained for (_, g) in streams.of_step[step][i]]

"""Put the streams of each layer where the loaded ones are, but for the first `before` of them."""
function resume!(streams::DropoutStreams, before::Vector{Int})
    for i in eachindex(streams.layers)
        found, numbers = generators(streams, i), streams.loaded[i]
        for k in before[i]+1:min(length(found), length(numbers) ÷ 2)
            copyto!(found[k].state, 1, numbers, 2k - 1, 2)
        end
    end
    return nothing
end

"""
Where the streams of each layer are, two numbers for each, in the order in which the steps first trained, and behind them those of
a loaded state whose steps have not trained yet.
"""
stream_states(streams::DropoutStreams) = Vector{Int64}[stream_states(streams, i) for i in eachindex(streams.layers)]

function stream_states(streams::DropoutStreams, i::Int)
    numbers = Int64[number for g in generators(streams, i) for number in g.state]
    return append!(numbers, streams.loaded[i][length(numbers)+1:end])
end

"""Let the streams resume from such states; a step that trains later resumes from its part of them."""
function load_streams!(streams::DropoutStreams, states::Vector{Vector{Int64}})
    streams.loaded = deepcopy(states)
    resume!(streams, zeros(Int, length(states)))
    return nothing
end

"""Forget the steps: those that are traced in their place resume their streams."""
function forget!(streams::DropoutStreams)
    streams.loaded = stream_states(streams)
    empty!(streams.of_step)
    empty!(streams.trained)
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
