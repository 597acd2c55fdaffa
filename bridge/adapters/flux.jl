# Flux behind the entry points of julia_engine/src/entry.jl, which describes them and what `create` reads.
#
# As Flux's own users would write it: a Chain, `withgradient` and `update!` for every batch, data as arrays that are there
# already. Only what keeps its name and meaning from Flux 0.13.9 to 0.16 is used, so recurrent layers, whose interface
# changed in between, are loops over Flux's arithmetic. Flux's convolutions flip their kernels: weights are passed flipped.
# What is not here (see `check` in flux.py) is refused before Julia is asked.
module TwinGradFlux

import Flux
using LinearAlgebra: BLAS
using TwinGrad.Entry: ACTIVATION_CODES, INPUT_CODES, LAYER_CODES, LOSS_CODES, OK, OPTIMIZER_CODES, RETURN_CODES, Reader,
    TECHNIQUE_CODES, WINDOWED, guarded, read!

# Layers that Flux lacks, or has under names that changed --------------------------------------------------------------

"""A recurrent layer: weights (gates * units, features), (gates * units, units) and bias; input (features, steps, N)."""
struct Recurrent{F,A,B}
    cell::F
    weight::A
    recurrent::A
    bias::B
    sequence::Bool
end
@static if isdefined(Flux, Symbol("@layer"))
    Flux.@layer Recurrent
else
    Flux.@functor Recurrent
end

function (layer::Recurrent)(x)
    units = size(layer.recurrent, 2)
    inputs = reshape(layer.weight * reshape(x, size(x, 1), :) .+ layer.bias, :, size(x, 2), size(x, 3))
    none = fill!(similar(x, units, size(x, 3)), 0)
    step(states, t) = (states..., layer.cell(inputs[:, t, :], layer.recurrent, states[end]))
    states = foldl(step, 1:size(x, 2); init=((none, none),))[2:end]
    layer.sequence || return states[end][1]
    return cat((reshape(h, units, 1, :) for (h, _) in states)...; dims=2)
end

rnn(activation) = (x, recurrent, (h, _)) -> (activation.(x .+ recurrent * h), h)

function lstm(x, recurrent, (h, c))
    take, keep, new, show = quarters(x .+ recurrent * h, 4)
    cell = Flux.sigmoid.(keep) .* c .+ Flux.sigmoid.(take) .* tanh.(new)
    return Flux.sigmoid.(show) .* tanh.(cell), cell
end

function gru(x, recurrent, (h, _))
    reset, update, new = quarters(x, 3)
    reset_h, update_h, new_h = quarters(recurrent * h, 3)
    candidate = tanh.(new .+ Flux.sigmoid.(reset .+ reset_h) .* new_h)
    z = Flux.sigmoid.(update .+ update_h)
    return (1 .- z) .* candidate .+ z .* h, h
end

function quarters(x, n)
    each = size(x, 1) ÷ n
    return ntuple(k -> x[(k-1)*each+1:k*each, :], n)
end

# A description's layers ----------------------------------------------------------------------------------------------

"""
Where a trained parameter is: how many elements of the caller's vector come before it, and the part of Flux's model (or of
a gradient, which is nested alike) that it is in. The column `still`, if not 0, is not trained.
"""
struct Place
    before::Int
    layer::Int
    field::Symbol
    flipped::Bool
    still::Int
end

mutable struct Builder{T}
    vector::Vector{T}
    trained::Int
    """The elements that trained parameters have taken so far."""
    frozen::Int
    """The same for the others, which follow after all trained ones."""
    places::Vector{Place}
    layer::Int
    """The layer's number in the model."""
end

"""A copy of the next parameter, which will be `field` of the layer."""
function parameter!(b::Builder, field::Symbol, sizes...; flipped=false, still=0)
    before, b.trained = b.trained, b.trained + prod(sizes)
    push!(b.places, Place(before, b.layer, field, flipped, still))
    array = reshape(b.vector[before+1:b.trained], sizes)
    return flipped ? flip(array) : array
end

"""A kernel (spatial axes..., channels, filters) with its spatial axes reversed."""
flip(kernel::AbstractArray) = foldl((k, axis) -> reverse(k; dims=axis), 1:ndims(kernel)-2; init=kernel)

const ACTIVATIONS = Dict("identity" => identity, "tanh" => tanh, "relu" => Flux.relu, "sigmoid" => Flux.sigmoid,
    "softplus" => Flux.softplus)

activation(name) = name == "softmax" ? (x -> Flux.softmax(x; dims=1)) : (f = ACTIVATIONS[name]; x -> f.(x))

"""The next layer of a description, for samples of this size."""
function layer!(b::Builder, size, settings::Reader, numbers::Reader)
    op = LAYER_CODES[read!(settings)]
    read!(settings, read!(settings))  # its name
    if op == "flatten"
        return in_rows
    elseif op == "reshape"
        shape = Tuple(reverse(read!(settings, read!(settings))))
        return x -> reshape(x, shape..., last_size(x))
    elseif op == "activation"
        return activation(ACTIVATION_CODES[read!(settings)])
    elseif op == "dropout"
        read!(settings)  # the seed of the engine's own
        return Flux.Dropout(read!(numbers))
    elseif op == "permute_dims"
        axes = read!(settings, read!(settings))
        n = length(axes)
        order = (ntuple(k -> n - axes[n+1-k], n)..., n + 1)
        return x -> permutedims(x, order)
    elseif op in ("global_max_pool", "global_avg_pool")
        pool = op == "global_max_pool" ? Flux.GlobalMaxPool() : Flux.GlobalMeanPool()
        return x -> in_rows(pool(x))
    elseif op == "embedding"
        return embedding!(b, settings)
    elseif haskey(WINDOWED, op)
        return windowed!(b, op, size, settings)
    end
    units = read!(settings)
    if op == "dense"
        bias = read!(settings) == 1
        weight = parameter!(b, :weight, units, size[1])
        return Flux.Dense(weight, bias && parameter!(b, :bias, units))
    end
    cell = op == "rnn" ? rnn(ACTIVATIONS[ACTIVATION_CODES[read!(settings)]]) : op == "lstm" ? lstm : gru
    width = units * (op == "rnn" ? 1 : op == "lstm" ? 4 : 3)
    sequence = RETURN_CODES[read!(settings)] == "sequence"
    weight, recurrent = parameter!(b, :weight, width, size[1]), parameter!(b, :recurrent, width, units)
    return Recurrent(cell, weight, recurrent, parameter!(b, :bias, width), sequence)
end

last_size(x) = size(x, ndims(x))
in_rows(x) = reshape(x, :, last_size(x))

"""A frozen embedding, which Flux must not find among the model's parameters."""
struct Frozen{A}
    weight::A
end
(layer::Frozen)(ids) = reshape(layer.weight[:, vec(ids)], :, size(ids)...)

function embedding!(b::Builder, settings::Reader)
    vocabulary, dimension, padding, trainable = read!(settings, 4)
    trainable == 1 && return Flux.Embedding(parameter!(b, :weight, dimension, vocabulary; still=padding + 1))
    before, b.frozen = b.frozen, b.frozen + dimension * vocabulary
    return Frozen(reshape(b.vector[before+1:b.frozen], dimension, vocabulary))
end

function windowed!(b::Builder, op, size, settings)
    axes = WINDOWED[op]
    window, stride = Tuple(reverse(read!(settings, axes))), Tuple(reverse(read!(settings, axes)))
    sides = read!(settings, 2 * axes)
    pad = Tuple(vcat(([sides[2k-1], sides[2k]] for k in axes:-1:1)...))
    occursin("pool", op) && return (op[1:3] == "max" ? Flux.MaxPool : Flux.MeanPool)(window; stride=stride, pad=pad)
    dilation, (filters, groups, bias) = Tuple(reverse(read!(settings, axes))), read!(settings, 3)
    weight = parameter!(b, :weight, window..., size[end] ÷ groups, filters; flipped=true)
    bias = bias == 1 && parameter!(b, :bias, filters)
    return Flux.Conv(weight, bias; stride=stride, pad=pad, dilation=dilation, groups=groups)
end

# Sessions -------------------------------------------------------------------------------------------------------------

mutable struct Session{T}
    first::Vector{Any}
    """The layers up to a frozen embedding, which have nothing to train."""
    model::Any
    state::Any
    loss::String
    batch_size::Int
    input::Vector{Int}
    ids::Bool
    output::Vector{Int}
    places::Vector{Place}
    vector::Vector{T}
end

"""Reads what flux.py's `_describe` says: trained elements, the sizes of all inputs and of the output, a description."""
function Session{T}(settings::Reader, numbers::Reader, vector::Vector{T}) where {T}
    trained = read!(settings)
    sizes = [reverse(read!(settings, read!(settings))) for _ in 1:read!(settings)]
    read!(settings, 2)  # format and bits
    batch_size, threads = read!(settings, 2)
    BLAS.set_num_threads(threads)
    loss, optimizer, nesterov = LOSS_CODES[read!(settings)], OPTIMIZER_CODES[read!(settings)], read!(settings) == 1
    rate, momentum, first, second, eps, _, _ = read!(numbers, 7)
    read!(settings, length(TECHNIQUE_CODES))  # of the engine's own
    ids = INPUT_CODES[read!(settings)] == "ids"
    input = reverse(read!(settings, read!(settings)))
    b = Builder{T}(vector, 0, trained, Place[], 1)
    before, layers = [], []
    for k in 1:read!(settings)
        push!(layers, layer!(b, sizes[k], settings, numbers))
        if layers[end] isa Frozen
            before, layers = layers, []
        end
        b.layer = length(layers) + 1
    end
    model = Flux.Chain(layers...)
    rule = optimizer == "rmsprop" ? Flux.RMSProp(rate, first, eps) :
        optimizer == "adam" ? Flux.Adam(rate, (first, second), eps) :
        nesterov ? Flux.Nesterov(rate, momentum) : momentum > 0 ? Flux.Momentum(rate, momentum) : Flux.Descent(rate)
    return Session{T}(before, model, Flux.setup(rule, model), loss, batch_size, input, ids, sizes[end], b.places, vector)
end

function part_of(nested, place::Place)
    layer = nested.layers[place.layer]
    return layer === nothing ? nothing : getfield(layer, place.field)  # a gradient may lack a layer
end

"""Copy all parameters, or a gradient of them, into a vector in the layout of the spec."""
function store!(vector::Vector, s::Session, nested)
    for place in s.places
        found = part_of(nested, place)
        sizes = size(part_of(s.model, place))
        found = found === nothing ? zeros(eltype(vector), sizes) : place.flipped ? flip(found) : found
        copyto!(vector, place.before + 1, found, 1, length(found))
        nested === s.model || place.still == 0 || (reshape(view(vector, place.before+1:place.before+prod(sizes)),
            sizes)[:, place.still] .= 0)
    end
    return nothing
end

struct Data{T}
    x::Array
    y::Array
end

function Data(s::Session{T}, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}) where {T}
    kind = s.ids ? Int64 : T
    features = unsafe_wrap(Array, Ptr{kind}(x), (s.input..., Int(samples)))
    targets = s.loss == "softmax_cross_entropy" ? (Int64, s.output[2:end]) : (T, s.output)
    y == C_NULL && return Data{T}(features, T[])
    return Data{T}(features, unsafe_wrap(Array, Ptr{targets[1]}(y), (targets[2]..., Int(samples))))
end

of(array, rows) = array[ntuple(_ -> :, ndims(array) - 1)..., rows]

"""What the model reads: gathered samples, ids from 1, and what comes before a frozen embedding done."""
function features(s::Session, data::Data, rows)
    x = of(data.x, rows)
    s.ids && (x = x .+ 1)
    return foldl((x, layer) -> layer(x), s.first; init=x)
end

"""What the loss compares outputs with: for classes a one among zeros."""
targets(s::Session, data::Data, rows) = s.loss == "softmax_cross_entropy" ?
    Flux.onehotbatch(of(data.y, rows), 0:s.output[1]-1) : of(data.y, rows)

loss(s::Session, output, y) = s.loss == "softmax_cross_entropy" ? Flux.logitcrossentropy(output, y) :
    s.loss == "binary_cross_entropy" ? Flux.logitbinarycrossentropy(output, y) : Flux.mse(output, y)

function differentiate(s::Session, data::Data, rows)
    x, y = features(s, data, rows), targets(s, data, rows)
    found, gradients = Flux.withgradient(model -> loss(s, model(x), y), s.model)
    return found, gradients[1]
end

function steps!(s::Session, data::Data, order, steps, losses)
    kept = [(place, part_of(s.model, place)[:, place.still]) for place in s.places if place.still > 0]
    for step in steps
        rows = order[(step-1)*s.batch_size+1:min(step * s.batch_size, length(order))] .+ 1
        losses[step], gradient = differentiate(s, data, rows)
        Flux.update!(s.state, s.model, gradient)
        for (place, column) in kept
            part_of(s.model, place)[:, place.still] = column
        end
    end
    store!(s.vector, s, s.model)
    return nothing
end

"""Call `each(output, rows)` for all samples, some at a time."""
function pieces(each, s::Session, data::Data)
    samples = last_size(data.x)
    for first in 1:1000:samples
        rows = first:min(first + 999, samples)
        each(s.model(features(s, data, rows)), rows)
    end
end

"""The share of right answers."""
function right(s::Session, output, y)
    s.loss == "mean_squared_error" && return NaN
    s.loss == "binary_cross_entropy" && return sum((output .> 0) .== (y .> 0.5)) / length(y)
    found = vec(argmax(output; dims=1))
    return count(k -> found[k][1] - 1 == y[k], eachindex(found)) / length(found)
end

# Entry points ---------------------------------------------------------------------------------------------------------

const SESSIONS = Dict{Int64,Session}()
const COUNT = Ref{Int64}(0)

function create(integers::Ptr{Int64}, n::Int64, floats::Ptr{Float64}, m::Int64, parameters::Ptr{Cvoid}, length::Int64)::Int64
    return guarded(status -> -Int64(status)) do
        settings = Reader(copy(unsafe_wrap(Array, integers, n)), 1)
        numbers = Reader(copy(unsafe_wrap(Array, floats, m)), 1)
        T = read!(settings) == 32 ? Float32 : Float64
        SESSIONS[COUNT[]+1] = Session{T}(settings, numbers, unsafe_wrap(Array, Ptr{T}(parameters), length))
        COUNT[] += 1
    end
end

train(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, rows::Int64, order::Ptr{Int64}, first::Int64,
    last::Int64, losses::Ptr{Float64})::Cint = guarded(identity) do
    s = SESSIONS[number]
    found = unsafe_wrap(Array, losses, cld(rows, s.batch_size))
    steps!(s, Data(s, samples, x, y), unsafe_wrap(Array, order, rows), first:last, found)
    OK
end

evaluate(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, out::Ptr{Float64})::Cint = guarded(identity) do
    s = SESSIONS[number]
    data, sums = Data(s, samples, x, y), zeros(2)
    pieces(s, data) do output, rows
        sums .+= length(rows) .* (loss(s, output, targets(s, data, rows)), right(s, output, of(data.y, rows)))
    end
    foreach(k -> unsafe_store!(out, sums[k] / samples, k), 1:2)
    OK
end

predict(number::Int64, samples::Int64, x::Ptr{Cvoid}, out::Ptr{Cvoid})::Cint = guarded(identity) do
    predict(SESSIONS[number], samples, x, out)
    OK
end

function predict(s::Session{T}, samples, x, out) where {T}
    found = unsafe_wrap(Array, Ptr{T}(out), (prod(s.output), Int(samples)))
    pieces(s, Data(s, samples, x, C_NULL)) do output, rows
        found[:, rows] = reshape(output, :, length(rows))
    end
end

gradients(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, value::Ptr{Float64}, vector::Ptr{Cvoid})::Cint =
    guarded(identity) do
        s = SESSIONS[number]
        found, gradient = differentiate(s, Data(s, samples, x, y), 1:Int(samples))
        unsafe_store!(value, found)
        gradients(s, gradient, vector)
        OK
    end
gradients(s::Session{T}, gradient, vector) where {T} =
    store!(unsafe_wrap(Array, Ptr{T}(vector), length(s.vector)), s, gradient)

free(number::Int64)::Cint = guarded(identity) do
    delete!(SESSIONS, number)
    OK
end

create_pointer() = @cfunction(create, Int64, (Ptr{Int64}, Int64, Ptr{Float64}, Int64, Ptr{Cvoid}, Int64))
train_pointer() = @cfunction(train, Cint,
    (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Int64, Ptr{Int64}, Int64, Int64, Ptr{Float64}))
evaluate_pointer() = @cfunction(evaluate, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}))
predict_pointer() = @cfunction(predict, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}))
gradients_pointer() = @cfunction(gradients, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}, Ptr{Cvoid}))
free_pointer() = @cfunction(free, Cint, (Int64,))

end
