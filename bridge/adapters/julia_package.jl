# What the engines made of a Julia package have in common; each includes this file into its own module.
#
# The entry points are those of julia_engine/src/entry.jl, which describes them. Here are reading a description and the
# weights, the data, and the order of batches. The module has the network: a model `m`, made by `new_model(d, w)` of a
# `Description` and `Weights`, and
# - `step!(m, x, y)`: train on a batch, and return its loss from before;
# - `gradient!(vector, m, x, y)`: the loss of a batch, and its gradient in the layout of the spec;
# - `predict(m, x)` and `loss(m, output, y)`, with nothing learned; `classes(m, labels, count)`, from labels from 0;
# - `parameters!(vector, m)`: the trained ones, in the layout of the spec.
# Samples are columns: x has the axes of a sample backwards, then the batch.

using LinearAlgebra: BLAS
using TwinGrad: ConfigurationError, Entry, NETWORK
using TwinGrad.Entry: OK, guarded

last_size(x) = size(x, ndims(x))
in_rows(x) = reshape(x, :, last_size(x))

# Descriptions ---------------------------------------------------------------------------------------------------------

struct Description
    batch_size::Int
    threads::Int
    loss::String
    optimizer::NETWORK.Optimizer
    input::Vector{Int}
    ids::Bool
    output::Vector{Int}
    "how many elements the trained parameters have"
    trained::Int
    "of each its `op`, the `size` of a sample before it, and the fields of the Julia engine's layer"
    layers::Vector{NamedTuple}
end

function Description(d::Entry.Description)
    trained = Int[length(spec) for layer in d.layers for (_, spec) in NETWORK.parameters(layer) if spec.trainable]
    layers = NamedTuple[merge((op=op, size=size), fields(layer)) for (op, size, layer) in zip(d.ops, d.sizes, d.layers)]
    return Description(d.batch_size, d.threads, d.loss.name, d.optimizer, d.sizes[1], d.ids, d.sizes[end], sum(trained), layers)
end

fields(layer) = (; (name => listed(getfield(layer, name)) for name in fieldnames(typeof(layer)))...)
listed(value) = value isa Vector ? Tuple(value) : value

const RECURRENT = ("rnn", "lstm", "gru")

"""How many rows of gates a recurrent layer's weights have for each unit."""
gates(layer) = layer.op == "rnn" ? 1 : layer.op == "lstm" ? 4 : 3

# Weights --------------------------------------------------------------------------------------------------------------

"""
Where a trained parameter is: how many elements of the caller's vector come before it, its size, and the part of the model
(or of a gradient, which is nested alike) that it is in. The column `still`, if not 0, is not trained.
"""
struct Place
    before::Int
    size::Tuple
    layer::Int
    field::Symbol
    flipped::Bool
    still::Int
end

"""The caller's vector while a model is made of it."""
mutable struct Weights{T}
    vector::Vector{T}
    "the elements that trained parameters have taken so far"
    trained::Int
    "the same for the others, which follow after all trained ones"
    frozen::Int
    places::Vector{Place}
end

"""A copy of the next parameter, which will be `field` of a layer."""
function parameter!(w::Weights, layer::Int, field::Symbol, sizes...; flipped=false, still=0)
    before, w.trained = w.trained, w.trained + prod(sizes)
    push!(w.places, Place(before, sizes, layer, field, flipped, still))
    array = reshape(w.vector[before+1:w.trained], sizes)
    return flipped ? flip(array) : array
end

"""A kernel (spatial axes..., channels, filters) with its spatial axes reversed."""
flip(kernel::AbstractArray) = foldl((k, axis) -> reverse(k; dims=axis), 1:ndims(kernel)-2; init=kernel)

"""Copy what `part_of(nested, place)` finds of each parameter, or zeros for nothing, into a vector in the spec's layout."""
function store!(part_of, vector::Vector, places, nested; gradient::Bool)
    for place in places
        part, here = part_of(nested, place), view(vector, place.before+1:place.before+prod(place.size))
        if part === nothing
            here .= 0
            continue
        end
        copyto!(here, place.flipped ? flip(part) : part)
        gradient && place.still > 0 && (reshape(here, place.size)[:, place.still] .= 0)
    end
    return nothing
end

"""Call `change()`, which trains `part_of(model, place)`, and put the columns back that are not trained."""
function keeping_still(change, part_of, model, places)
    kept = [(place, part_of(model, place)[:, place.still]) for place in places if place.still > 0]
    found = change()
    for (place, column) in kept
        part_of(model, place)[:, place.still] = column
    end
    return found
end

"""
What to do with a batch's samples before the model: the layers in front that only give them another shape, or that look up
frozen vectors, taken off the description.
"""
function prepare!(d::Description, w::Weights)
    frozen = findlast(layer -> layer.op == "embedding" && !layer.trainable, d.layers)
    before = []
    while !isempty(d.layers) && (length(before) < something(frozen, 0) || reshapes(d.layers[1]))
        layer = popfirst!(d.layers)
        push!(before, layer.op == "embedding" ? lookup!(w, layer) : reshaping(layer))
    end
    return before
end

reshapes(layer) = layer.op in ("flatten", "reshape", "permute_dims")
reshaping(layer) = layer.op == "flatten" ? in_rows :
    layer.op == "reshape" ? (x -> reshape(x, layer.dims..., last_size(x))) :
    (x -> permutedims(x, (layer.axes..., ndims(x))))

function lookup!(w::Weights, layer)
    before, w.frozen = w.frozen, w.frozen + layer.dimension * layer.vocabulary
    weight = reshape(w.vector[before+1:w.frozen], layer.dimension, layer.vocabulary)
    return ids -> reshape(weight[:, vec(ids)], :, size(ids)...)
end

# Sessions -------------------------------------------------------------------------------------------------------------

struct Session{T}
    description::Description
    before::Vector{Any}
    model::Any
    vector::Vector{T}
end

function Session{T}(d::Description, vector::Vector{T}) where {T}
    weights = Weights{T}(vector, 0, d.trained, Place[])
    BLAS.set_num_threads(d.threads)
    before = prepare!(d, weights)
    return Session{T}(d, before, new_model(d, weights), vector)
end

struct Data{T}
    x::Array
    y::Array
end

function Data(s::Session{T}, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}) where {T}
    d = s.description
    kind = d.ids ? Int64 : T
    features = unsafe_wrap(Array, Ptr{kind}(x), (d.input..., Int(samples)))
    y == C_NULL && return Data{T}(features, T[])
    type, size = d.loss == "softmax_cross_entropy" ? (Int64, d.output[2:end]) : (T, d.output)
    return Data{T}(features, unsafe_wrap(Array, Ptr{type}(y), (size..., Int(samples))))
end

of(array, rows) = array[ntuple(_ -> :, ndims(array) - 1)..., rows]

"""What the model reads: gathered samples, ids from 1."""
function features(s::Session, data::Data, rows)
    x = of(data.x, rows)
    s.description.ids && (x = x .+ 1)
    return foldl((x, layer) -> layer(x), s.before; init=x)
end

"""What the loss compares outputs with."""
function targets(s::Session, data::Data, rows)
    y = of(data.y, rows)
    return s.description.loss == "softmax_cross_entropy" ? classes(s.model, y, s.description.output[1]) : y
end

function steps!(s::Session, data::Data, order, steps, losses)
    size = s.description.batch_size
    for step in steps
        rows = order[(step-1)*size+1:min(step * size, length(order))] .+ 1
        losses[step] = step!(s.model, features(s, data, rows), targets(s, data, rows))
    end
    parameters!(s.vector, s.model)
    return nothing
end

"""Call `each(output, rows)` for all samples, some at a time."""
function pieces(each, s::Session, data::Data)
    samples = last_size(data.x)
    for first in 1:1000:samples
        rows = first:min(first + 999, samples)
        each(predict(s.model, features(s, data, rows)), rows)
    end
end

"""The share of right answers."""
function right(s::Session, output, y)
    kind = s.description.loss
    kind == "mean_squared_error" && return NaN
    kind == "binary_cross_entropy" && return sum((output .> 0) .== (y .> 0.5)) / length(y)
    found = vec(argmax(output; dims=1))
    return count(k -> found[k][1] - 1 == y[k], eachindex(found)) / length(found)
end

# Entry points ---------------------------------------------------------------------------------------------------------

const SESSIONS = Dict{Int64,Session}()
const COUNT = Ref{Int64}(0)

function create(text::Ptr{UInt8}, n::Int64, parameters::Ptr{Cvoid}, length::Int64)::Int64
    return guarded(status -> -Int64(status)) do
        d = Entry.read_description(Entry.text_at(text, n))
        SESSIONS[COUNT[]+1] = Session{d.dtype}(Description(d), unsafe_wrap(Array, Ptr{d.dtype}(parameters), length))
        COUNT[] += 1
    end
end

train(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, rows::Int64, order::Ptr{Int64}, first::Int64,
    last::Int64, losses::Ptr{Float64})::Cint = guarded(identity) do
    s = SESSIONS[number]
    found = unsafe_wrap(Array, losses, cld(rows, s.description.batch_size))
    steps!(s, Data(s, samples, x, y), unsafe_wrap(Array, order, rows), first:last, found)
    OK
end

evaluate(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, out::Ptr{Float64})::Cint = guarded(identity) do
    s = SESSIONS[number]
    data, sums = Data(s, samples, x, y), zeros(2)
    pieces(s, data) do output, rows
        sums .+= length(rows) .* (loss(s.model, output, targets(s, data, rows)), right(s, output, of(data.y, rows)))
    end
    foreach(k -> unsafe_store!(out, sums[k] / samples, k), 1:2)
    OK
end

predict(number::Int64, samples::Int64, x::Ptr{Cvoid}, out::Ptr{Cvoid})::Cint = guarded(identity) do
    predict(SESSIONS[number], samples, x, out)
    OK
end

function predict(s::Session{T}, samples, x, out) where {T}
    found = unsafe_wrap(Array, Ptr{T}(out), (prod(s.description.output), Int(samples)))
    pieces(s, Data(s, samples, x, C_NULL)) do output, rows
        found[:, rows] = reshape(output, :, length(rows))
    end
end

gradients(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, value::Ptr{Float64}, vector::Ptr{Cvoid})::Cint =
    guarded(identity) do
        gradients(SESSIONS[number], samples, x, y, value, vector)
        OK
    end

function gradients(s::Session{T}, samples, x, y, value, vector) where {T}
    data, rows = Data(s, samples, x, y), 1:Int(samples)
    found = unsafe_wrap(Array, Ptr{T}(vector), length(s.vector))
    unsafe_store!(value, gradient!(found, s.model, features(s, data, rows), targets(s, data, rows)))
end

free(number::Int64)::Cint = guarded(identity) do
    delete!(SESSIONS, number)
    OK
end

create_pointer() = @cfunction(create, Int64, (Ptr{UInt8}, Int64, Ptr{Cvoid}, Int64))
train_pointer() = @cfunction(train, Cint,
    (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Int64, Ptr{Int64}, Int64, Int64, Ptr{Float64}))
evaluate_pointer() = @cfunction(evaluate, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}))
predict_pointer() = @cfunction(predict, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}))
gradients_pointer() = @cfunction(gradients, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}, Ptr{Cvoid}))
free_pointer() = @cfunction(free, Cint, (Int64,))
