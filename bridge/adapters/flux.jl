# Flux behind the entry points of julia_engine/src/entry.jl.
#
# As Flux's own users would write it: a Chain, `withgradient` and `update!` for every batch, data as arrays that are there
# already. Only what keeps its name and meaning from Flux 0.13.9 to 0.16 is used, so recurrent layers, whose interface
# changed in between, are loops over Flux's arithmetic. Flux's convolutions flip their kernels: weights are passed flipped.
# What is not here (see `check` in julia_package.py) is refused before Julia is asked.
module TwinGradFlux

import Flux
include("julia_package.jl")

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
    none = zeros(eltype(x), units, size(x, 3))  # Zygote differentiates no fill!
    step(states, t) = (states..., layer.cell(inputs[:, t, :], layer.recurrent, states[end]))
    states = foldl(step, 1:size(x, 2); init=((none, none),))[2:end]
    layer.sequence || return states[end][1]
    return cat(map(state -> reshape(state[1], units, 1, :), states)...; dims=2)  # Zygote differentiates no generator here
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

const ACTIVATIONS = Dict("identity" => identity, "tanh" => tanh, "relu" => Flux.relu, "sigmoid" => Flux.sigmoid,
    "softplus" => Flux.softplus)

activation(name) = name == "softmax" ? (x -> Flux.softmax(x; dims=1)) : (f = ACTIVATIONS[name]; x -> f.(x))

"""The layer number k of Flux's model."""
function layer!(w::Weights, k, layer)
    op = layer.op
    reshapes(layer) && return reshaping(layer)
    op == "activation" && return activation(layer.activation)
    op == "dropout" && return Flux.Dropout(layer.rate)
    if op in ("global_max_pool", "global_avg_pool")
        pool = op == "global_max_pool" ? Flux.GlobalMaxPool() : Flux.GlobalMeanPool()
        return x -> in_rows(pool(x))
    elseif op == "embedding"
        return Flux.Embedding(parameter!(w, k, :weight, layer.dimension, layer.vocabulary; still=layer.padding_index))
    elseif occursin("pool", op)
        return (op[1:3] == "max" ? Flux.MaxPool : Flux.MeanPool)(layer.window; stride=layer.stride, pad=layer.padding)
    elseif occursin("conv", op)
        weight = parameter!(w, k, :weight, layer.kernel..., layer.size[end] ÷ layer.groups, layer.filters; flipped=true)
        bias = layer.bias && parameter!(w, k, :bias, layer.filters)
        return Flux.Conv(weight, bias; stride=layer.stride, pad=layer.padding, dilation=layer.dilation, groups=layer.groups)
    elseif op == "dense"
        weight = parameter!(w, k, :weight, layer.units, layer.size[1])
        return Flux.Dense(weight, layer.bias && parameter!(w, k, :bias, layer.units))
    end
    op in RECURRENT || throw(ConfigurationError("the engine flux has no $op"))
    cell = op == "rnn" ? rnn(ACTIVATIONS[layer.activation]) : op == "lstm" ? lstm : gru
    width = gates(layer) * layer.units
    weight, recurrent = parameter!(w, k, :weight, width, layer.size[1]), parameter!(w, k, :recurrent, width, layer.units)
    return Recurrent(cell, weight, recurrent, parameter!(w, k, :bias, width), layer.returns == "sequence")
end

# The model ------------------------------------------------------------------------------------------------------------

struct Model
    chain::Any
    state::Any
    loss::Any
    places::Vector{Place}
end

function new_model(d::Description, w::Weights)
    chain = Flux.Chain((layer!(w, k, layer) for (k, layer) in enumerate(d.layers))...)
    o = d.optimizer
    rate = o.learning_rate
    rule = o isa NETWORK.RMSProp ? Flux.RMSProp(rate, o.alpha, o.eps) :
        o isa NETWORK.Adam ? Flux.Adam(rate, (o.beta1, o.beta2), o.eps) :
        o.nesterov ? Flux.Nesterov(rate, o.momentum) :
        o.momentum > 0 ? Flux.Momentum(rate, o.momentum) : Flux.Descent(rate)
    loss = d.loss == "softmax_cross_entropy" ? Flux.logitcrossentropy :
        d.loss == "binary_cross_entropy" ? Flux.logitbinarycrossentropy : Flux.mse
    return Model(chain, Flux.setup(rule, chain), loss, w.places)
end

function part_of(nested, place::Place)
    layer = nested.layers[place.layer]
    return layer === nothing ? nothing : getfield(layer, place.field)  # a gradient may lack a layer
end

predict(m::Model, x) = m.chain(x)
loss(m::Model, output, y) = m.loss(output, y)
classes(::Model, labels, count) = Flux.onehotbatch(labels, 0:count-1)

function differentiate(m::Model, x, y)
    found, gradients = Flux.withgradient(chain -> m.loss(chain(x), y), m.chain)
    return found, gradients[1]
end

function step!(m::Model, x, y)
    return keeping_still(part_of, m.chain, m.places) do
        found, gradient = differentiate(m, x, y)
        Flux.update!(m.state, m.chain, gradient)
        found
    end
end

function gradient!(vector, m::Model, x, y)
    found, gradient = differentiate(m, x, y)
    store!(part_of, vector, m.places, gradient; gradient=true)
    return found
end

parameters!(vector, m::Model) = store!(part_of, vector, m.places, m.chain; gradient=false)

end
