# A stand-in for Lux 1: what bridge/adapters/lux.jl asks of it, in plain Julia. Gradients are finite differences.
module Lux

import Optimisers
import Random
import Statistics: mean
include("parts.jl")

abstract type AbstractLuxLayer end
parameters(::AbstractLuxLayer) = NamedTuple()
states(::AbstractLuxLayer) = NamedTuple()
setup(::Random.AbstractRNG, layer) = (parameters(layer), states(layer))
testmode(state::NamedTuple) = map(testmode, haskey(state, :training) ? merge(state, (training=Val(false),)) : state)
testmode(other) = other

struct Chain{T<:NamedTuple} <: AbstractLuxLayer
    layers::T
end
Chain(; layers...) = Chain((; layers...))
parameters(chain::Chain) = map(parameters, chain.layers)
states(chain::Chain) = map(states, chain.layers)
function (chain::Chain)(x, ps, st)
    for name in keys(chain.layers)
        x, new = chain.layers[name](x, ps[name], st[name])
        st = merge(st, NamedTuple{(name,)}((new,)))
    end
    return x, st
end

struct WrappedFunction <: AbstractLuxLayer
    func::Function
end
(layer::WrappedFunction)(x, _, st) = layer.func(x), st
struct FlattenLayer <: AbstractLuxLayer end
(::FlattenLayer)(x, _, st) = reshape(x, :, size(x, ndims(x))), st
struct ReshapeLayer{N} <: AbstractLuxLayer
    dims::NTuple{N,Int}
end
(layer::ReshapeLayer)(x, _, st) = reshape(x, layer.dims..., size(x, ndims(x))), st

struct Dropout <: AbstractLuxLayer
    p::Float64
end
states(::Dropout) = (training=Val(true),)
(layer::Dropout)(x, _, st) = (st.training === Val(true) ? x .* (rand(Float64, size(x)) .>= layer.p) ./ (1 - layer.p) : x), st

struct Dense <: AbstractLuxLayer
    sizes::Pair
    activation::Function
    use_bias::Bool
end
Dense(sizes::Pair, activation=identity; use_bias=true) = Dense(sizes, activation, use_bias)
with_bias(weight, use_bias, count) = use_bias ? (weight=weight, bias=rand(Float32, count)) : (weight=weight,)
parameters(d::Dense) = with_bias(rand(Float32, last(d.sizes), first(d.sizes)), d.use_bias, last(d.sizes))
function (d::Dense)(x, ps, st)
    y = ps.weight * reshape(x, first(d.sizes), :) .+ (d.use_bias ? ps.bias : false)
    return reshape(d.activation.(y), last(d.sizes), size(x)[2:end]...), st
end

struct Conv <: AbstractLuxLayer
    kernel::Tuple
    channels::Pair
    activation::Function
    use_bias::Bool
    options::NamedTuple
end
Conv(k, channels, activation=identity; stride, pad, dilation, groups, use_bias=true, cross_correlation=false) = Conv(k,
    channels, activation, use_bias, (stride=stride, pad=pad, dilation=dilation, groups=groups, turned=!cross_correlation))
function parameters(c::Conv)
    weight = rand(Float32, c.kernel..., first(c.channels) ÷ c.options.groups, last(c.channels))
    return with_bias(weight, c.use_bias, last(c.channels))
end
function (c::Conv)(x, ps, st)
    size(x, ndims(x) - 1) == first(c.channels) || throw(DimensionMismatch("channels"))
    return c.activation.(biased(convolution(x, ps.weight; c.options...), c.use_bias && ps.bias)), st
end

MaxPool(window; stride, pad) = WrappedFunction(x -> pooled(x, false, window, stride, pad))
MeanPool(window; stride, pad) = WrappedFunction(x -> pooled(x, true, window, stride, pad))
GlobalMaxPool() = WrappedFunction(x -> maximum(x; dims=Tuple(1:ndims(x)-2)))
GlobalMeanPool() = WrappedFunction(x -> mean(x; dims=Tuple(1:ndims(x)-2)))

struct Embedding <: AbstractLuxLayer
    sizes::Pair
end
parameters(e::Embedding) = (weight=rand(Float32, last(e.sizes), first(e.sizes)),)
(::Embedding)(x::AbstractArray{<:Integer}, ps, st) = reshape(ps.weight[:, vec(x)], :, size(x)...), st

struct Cell
    gates::Int
    sizes::Pair
    step::Function
end
RNNCell(sizes, activation=tanh) = Cell(1, sizes, (x, h, (s, _)) -> (activation.(x .+ h), s))
function LSTMCell(sizes)
    return Cell(4, sizes, (x, h, (_, c)) -> begin
        i, f, g, o = parted(x .+ h, 4)
        c = sigmoid.(f) .* c .+ sigmoid.(i) .* tanh.(g)
        (sigmoid.(o) .* tanh.(c), c)
    end)
end
function GRUCell(sizes)
    return Cell(3, sizes, (x, h, (s, c)) -> begin
        (xr, xz, xn), (hr, hz, hn) = parted(x, 3), parted(h, 3)
        z, n = sigmoid.(xz .+ hz), tanh.(xn .+ sigmoid.(xr .+ hr) .* hn)
        ((1 .- z) .* n .+ z .* s, c)
    end)
end
parted(x, n) = ntuple(k -> x[(k-1)*(size(x, 1)÷n)+1:k*(size(x, 1)÷n), :], n)

struct Recurrence <: AbstractLuxLayer
    cell::Cell
    return_sequence::Bool
end
Recurrence(cell; return_sequence=false) = Recurrence(cell, return_sequence)
function parameters(r::Recurrence)
    inputs, units = r.cell.sizes
    width = r.cell.gates * units
    return (weight_ih=rand(Float32, width, inputs), weight_hh=rand(Float32, width, units), bias_ih=rand(Float32, width),
        bias_hh=rand(Float32, width))
end
function (r::Recurrence)(x, ps, st)
    state, outputs = (zeros(Float32, last(r.cell.sizes), size(x, 3)), zeros(Float32, last(r.cell.sizes), size(x, 3))), []
    for t in 1:size(x, 2)
        state = r.cell.step(ps.weight_ih * x[:, t, :] .+ ps.bias_ih, ps.weight_hh * state[1] .+ ps.bias_hh, state)
        push!(outputs, state[1])
    end
    return (r.return_sequence ? outputs : outputs[end]), st
end

struct Loss <: Function
    of::Function
end
CrossEntropyLoss(; logits) = logits === Val(true) ?
    Loss((out, y) -> -mean(sum(y .* (out .- log.(sum(exp.(out); dims=1))); dims=1))) : error("logits alone")
BinaryCrossEntropyLoss(; logits) = logits === Val(true) ?
    Loss((out, y) -> mean((1 .- y) .* out .+ softplus.(-out))) : error("logits alone")
MSELoss() = Loss((out, y) -> mean(abs2.(out .- y)))
(loss::Loss)(out, y) = size(out) == size(y) ? loss.of(out, y) : throw(DimensionMismatch("$(size(out)) and $(size(y))"))
function (loss::Loss)(model, ps, st, (x, y))
    out, st = model(x, ps, st)
    return loss(out, y), st, NamedTuple()
end

struct AutoZygote end

module Training

import Optimisers
import ..Lux: AutoZygote, differences

struct TrainState
    model::Any
    parameters::Any
    states::Any
    optimizer_state::Any
end
TrainState(model, ps, st, rule::Optimisers.Rule) = TrainState(model, ps, st, Optimisers.setup(rule, ps))

by(f, array::AbstractArray) = differences(f, array)
by(f, tree::NamedTuple) = isempty(tree) ? nothing : map(part -> by(f, part), tree)

function compute_gradients(::AutoZygote, objective, data, ts::TrainState)
    value(states) = objective(ts.model, ts.parameters, states, data)
    loss, states, stats = value(ts.states)
    gradients = by(() -> value(ts.states)[1], ts.parameters)
    return gradients, loss, stats, TrainState(ts.model, ts.parameters, states, ts.optimizer_state)
end

function single_train_step!(backend, objective, data, ts::TrainState)
    gradients, loss, stats, ts = compute_gradients(backend, objective, data, ts)
    Optimisers.update!(ts.optimizer_state, ts.parameters, gradients)
    return gradients, loss, stats, ts
end

end

end
