# Lux behind the entry points of julia_engine/src/entry.jl.
#
# As the documentation of Lux 1 has it: a Chain with its parameters and states apart, activations in the layers before
# them, and `Training.single_train_step!` with Zygote and a rule of Optimisers for every batch.
# What is not here (see `check` in julia_package.py) is refused before Julia is asked.
module TwinGradLux

import Lux
import Optimisers
import Random
import Zygote  # which Lux uses for AutoZygote once it is loaded
include("julia_package.jl")

# A description's layers ----------------------------------------------------------------------------------------------

const ACTIVATIONS = Dict("identity" => identity, "tanh" => tanh, "relu" => Lux.relu, "sigmoid" => Lux.sigmoid,
    "softplus" => Lux.softplus)

activation(name) = Lux.WrappedFunction(
    name == "softmax" ? (x -> Lux.softmax(x; dims=1)) : (f = ACTIVATIONS[name]; x -> f.(x)))

"""Whether a layer can take the next one's activation into itself."""
fuses(layer, next) = (layer.op == "dense" || occursin("conv", layer.op)) && next.op == "activation" &&
    next.activation != "softmax"

"""A description's layers as (layer, its activation)."""
function with_activations(layers)
    found = Tuple{NamedTuple,Function}[]
    fused = false
    for (k, layer) in enumerate(layers)
        if fused
            fused = false
            continue
        end
        fused = k < length(layers) && fuses(layer, layers[k+1])
        push!(found, (layer, fused ? ACTIVATIONS[layers[k+1].activation] : identity))
    end
    return found
end

"""Lux's layer number k and the values of its parameters."""
function layer!(w::Weights, k, layer, f)
    op = layer.op
    op == "flatten" && return Lux.FlattenLayer(), NamedTuple()
    op == "reshape" && return Lux.ReshapeLayer(layer.dims), NamedTuple()
    op == "permute_dims" && return Lux.WrappedFunction(reshaping(layer)), NamedTuple()
    op == "activation" && return activation(layer.activation), NamedTuple()
    op == "dropout" && return Lux.Dropout(layer.rate), NamedTuple()
    if op in ("global_max_pool", "global_avg_pool")
        pool = op == "global_max_pool" ? Lux.GlobalMaxPool() : Lux.GlobalMeanPool()
        return Lux.Chain(; pool=pool, flat=Lux.FlattenLayer()), (pool=NamedTuple(), flat=NamedTuple())
    elseif op == "embedding"
        weight = parameter!(w, k, :weight, layer.dimension, layer.vocabulary; still=layer.padding_index)
        return Lux.Embedding(layer.vocabulary => layer.dimension), (weight=weight,)
    elseif occursin("pool", op)
        pool = op[1:3] == "max" ? Lux.MaxPool : Lux.MeanPool
        return pool(layer.window; stride=layer.stride, pad=layer.padding), NamedTuple()
    elseif occursin("conv", op)
        channels = layer.size[end]
        values = with_bias(w, k, layer.bias, layer.filters,
            parameter!(w, k, :weight, layer.kernel..., channels ÷ layer.groups, layer.filters))
        return Lux.Conv(layer.kernel, channels => layer.filters, f; stride=layer.stride, pad=layer.padding,
            dilation=layer.dilation, groups=layer.groups, use_bias=layer.bias, cross_correlation=true), values
    elseif op == "dense"
        values = with_bias(w, k, layer.bias, layer.units, parameter!(w, k, :weight, layer.units, layer.size[1]))
        return Lux.Dense(layer.size[1] => layer.units, f; use_bias=layer.bias), values
    end
    op in RECURRENT || throw(ConfigurationError("the engine lux has no $op"))
    return recurrent!(w, k, layer)
end

with_bias(w, k, bias, count, weight) = bias ? (weight=weight, bias=parameter!(w, k, :bias, count)) : (weight=weight,)

"""Lux's cells have two biases; the second stays zero, see `new_model`."""
function recurrent!(w::Weights{T}, k, layer) where {T}
    width, sizes = gates(layer) * layer.units, layer.size[1] => layer.units
    cell = layer.op == "rnn" ? Lux.RNNCell(sizes, ACTIVATIONS[layer.activation]) :
        layer.op == "lstm" ? Lux.LSTMCell(sizes) : Lux.GRUCell(sizes)
    values = (weight_ih=parameter!(w, k, :weight_ih, width, layer.size[1]),
        weight_hh=parameter!(w, k, :weight_hh, width, layer.units), bias_ih=parameter!(w, k, :bias_ih, width),
        bias_hh=zeros(T, width))
    layer.returns == "sequence" || return Lux.Recurrence(cell), values
    steps = Lux.WrappedFunction(outputs -> reshape(reduce(vcat, outputs), layer.units, length(outputs), :))
    return Lux.Chain(; cell=Lux.Recurrence(cell; return_sequence=true), steps=steps), (cell=values, steps=NamedTuple())
end

# The model ------------------------------------------------------------------------------------------------------------

mutable struct Model{T}
    state::Any
    loss::Any
    places::Vector{Place}
end

function new_model(d::Description, w::Weights{T}) where {T}
    made = [layer!(w, k, layer, f) for (k, (layer, f)) in enumerate(with_activations(d.layers))]
    names = Tuple(Symbol("layer_", k) for k in eachindex(made))
    model = Lux.Chain(; NamedTuple{names}(first.(made))...)
    defaults, states = Lux.setup(Random.MersenneTwister(rand(UInt32)), model)  # the task's own cannot be copied
    parameters = taking(NamedTuple{names}(last.(made)), defaults)
    o = d.optimizer
    rate = o.learning_rate
    rule = o isa NETWORK.RMSProp ? Optimisers.RMSProp(rate, o.alpha, o.eps) :
        o isa NETWORK.Adam ? Optimisers.Adam(rate, (o.beta1, o.beta2), o.eps) :
        o.nesterov ? Optimisers.Nesterov(rate, o.momentum) :
        o.momentum > 0 ? Optimisers.Momentum(rate, o.momentum) : Optimisers.Descent(rate)
    loss = d.loss == "softmax_cross_entropy" ? Lux.CrossEntropyLoss(; logits=Val(true)) :
        d.loss == "binary_cross_entropy" ? Lux.BinaryCrossEntropyLoss(; logits=Val(true)) : Lux.MSELoss()
    state = Lux.Training.TrainState(model, parameters, states, rule)
    foreach(Optimisers.freeze!, second_biases(state.optimizer_state))
    return Model{T}(state, loss, w.places)
end

"""Our values in the form of Lux's own initial ones."""
taking(values::NamedTuple, defaults::NamedTuple) =
    NamedTuple{keys(defaults)}(Tuple(taking(values[name], defaults[name]) for name in keys(defaults)))
taking(values::AbstractArray, default::AbstractArray) = reshape(values, size(default))

second_biases(::Any) = []
second_biases(tree::NamedTuple) =
    reduce(vcat, (name == :bias_hh ? [leaf] : second_biases(leaf) for (name, leaf) in pairs(tree)); init=[])

function part_of(nested, place::Place)
    layer = getfield(nested, Symbol("layer_", place.layer))
    layer isa NamedTuple && haskey(layer, :cell) && (layer = layer.cell)
    return layer === nothing ? nothing : getfield(layer, place.field)  # a gradient may lack a layer
end

predict(m::Model, x) = first(m.state.model(x, m.state.parameters, Lux.testmode(m.state.states)))
loss(m::Model, output, y) = m.loss(output, y)
classes(::Model{T}, labels, count) where {T} = T.((0:count-1) .== reshape(labels, 1, size(labels)...))

function step!(m::Model, x, y)
    return keeping_still(part_of, m.state.parameters, m.places) do
        _, found, _, m.state = Lux.Training.single_train_step!(Lux.AutoZygote(), m.loss, (x, y), m.state)
        found
    end
end

function gradient!(vector, m::Model, x, y)
    gradient, found, _, _ = Lux.Training.compute_gradients(Lux.AutoZygote(), m.loss, (x, y), m.state)
    store!(part_of, vector, m.places, gradient; gradient=true)
    return found
end

parameters!(vector, m::Model) = store!(part_of, vector, m.places, m.state.parameters; gradient=false)

end
