# SimpleChains behind the entry points of julia_engine/src/entry.jl.
#
# As its documentation has it: a chain of static sizes with the activations in its layers, one vector of all parameters,
# and `valgrad!`, which gives sums over a batch. Its training functions know Adam alone and choose the batches
# themselves, so the step is written here; a batch is split over the threads, with a gradient for each. A convolution always
# has a bias there: where the spec has none it stays zero.
# What is not here (see `check` in simplechains.py) is refused before Julia is asked.
module TwinGradSimpleChains

import SimpleChains
include("julia_package.jl")

const ACTIVATIONS = Dict("identity" => identity, "tanh" => tanh, "relu" => SimpleChains.relu)

# A description's layers ----------------------------------------------------------------------------------------------

"""The chain, with where its parameters are in the caller's vector: 0 for those that the spec does not have."""
function chain!(d::Description, w::Weights)
    layers, places = [], Int[]
    k = 1
    while k <= length(d.layers)
        layer = d.layers[k]
        k += 1
        if layer.op in ("dense", "conv2d")
            fused = k <= length(d.layers) && d.layers[k].op == "activation"
            f = ACTIVATIONS[fused ? d.layers[k].activation : "identity"]
            k += fused
            push!(layers, layer.op == "dense" ? SimpleChains.TurboDense{layer.bias}(f, layer.units) :
                SimpleChains.Conv(f, layer.kernel, layer.filters))
            outputs = layer.op == "dense" ? layer.units : layer.filters
            inputs = layer.op == "dense" ? layer.size[1] : prod(layer.kernel) * layer.size[end]
            append!(places, w.trained .+ (1:outputs*inputs+layer.bias*outputs))
            w.trained += (inputs + layer.bias) * outputs
            layer.op == "conv2d" && !layer.bias && append!(places, zeros(Int, outputs))
        elseif layer.op == "activation"
            push!(layers, SimpleChains.Activation(ACTIVATIONS[layer.activation]))
        elseif layer.op == "max_pool2d"
            push!(layers, SimpleChains.MaxPool(layer.window))
        elseif length(layer.size) > 1  # flatten
            push!(layers, SimpleChains.Flatten(length(layer.size)))
        end
    end
    return SimpleChains.SimpleChain(map(SimpleChains.static, Tuple(d.layers[1].size)), Tuple(layers)), places
end

# The model ------------------------------------------------------------------------------------------------------------

struct Model{T}
    chain::Any
    parameters::Vector{T}
    places::Vector{Int}
    squares::Bool
    rate::T
    momentum::T
    velocity::Vector{T}
    "one for each thread"
    gradients::Vector{Vector{T}}
end

function new_model(d::Description, w::Weights{T}) where {T}
    chain, places = chain!(d, w)
    parameters = T[place == 0 ? 0 : w.vector[place] for place in places]
    length(parameters) == Int(SimpleChains.numparam(chain)) || error("SimpleChains has other parameters for this network")
    return Model{T}(chain, parameters, places, d.loss == "mean_squared_error", d.optimizer.learning_rate, d.optimizer.momentum,
        zero(parameters), [zero(parameters) for _ in 1:d.threads])
end

predict(m::Model, x) = Array(m.chain(x, m.parameters))
classes(::Model, labels, _) = UInt32.(labels .+ 1)

function loss(m::Model, output, y)
    m.squares && return sum(abs2, output .- y) / length(y)
    shifted = output .- maximum(output; dims=1)
    sums = log.(vec(sum(exp.(shifted); dims=1)))
    return sum(sums[k] - shifted[y[k], k] for k in eachindex(y)) / length(y)
end

"""The loss of a batch; its gradient is then the first of `m.gradients`."""
function differentiate!(m::Model{T}, x, y) where {T}
    count = last_size(x)
    parts = min(length(m.gradients), count)
    losses = zeros(T, parts)
    part(k) = div((k - 1) * count, parts)+1:div(k * count, parts)
    if parts == 1
        losses[1] = valgrad!(m, 1, x, y)
    else
        Threads.@threads for k in 1:parts
            losses[k] = valgrad!(m, k, of(x, part(k)), of(y, part(k)))
        end
    end
    # Sums: of half the squares, or of one loss for each sample.
    scale = m.squares ? T(2) / length(y) : one(T) / count
    total = m.gradients[1]
    for k in 2:parts
        total .+= m.gradients[k]
    end
    total .*= ifelse.(m.places .> 0, scale, zero(T))
    return sum(losses) * scale
end

function valgrad!(m::Model, k, x, y)
    target = m.squares ? SimpleChains.SquaredLoss(y) : SimpleChains.LogitCrossEntropyLoss(y)
    return SimpleChains.valgrad!(m.gradients[k], SimpleChains.add_loss(m.chain, target), x, m.parameters)
end

function step!(m::Model, x, y)
    found = differentiate!(m, x, y)
    m.velocity .= m.momentum .* m.velocity .+ m.gradients[1]
    m.parameters .-= m.rate .* m.velocity
    return found
end

function gradient!(vector, m::Model, x, y)
    found = differentiate!(m, x, y)
    scatter!(vector, m.places, m.gradients[1])
    return found
end

parameters!(vector, m::Model) = scatter!(vector, m.places, m.parameters)

function scatter!(vector, places, values)
    for (place, value) in zip(places, values)
        place > 0 && (vector[place] = value)
    end
end

end
