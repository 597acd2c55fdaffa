# A stand-in for Flux: what bridge/adapters/flux.jl asks of it, in plain Julia. Gradients are finite differences.
module Flux

import Statistics: mean
include("parts.jl")

macro functor(_) end

struct Chain{T<:Tuple}
    layers::T
    Chain(layers...) = new{typeof(layers)}(layers)
end
(chain::Chain)(x) = foldl((x, layer) -> layer(x), chain.layers; init=x)

struct Dense{W,B}
    weight::W
    bias::B
end
(layer::Dense)(x) =
    reshape(layer.weight * reshape(x, size(x, 1), :) .+ layer.bias, size(layer.weight, 1), size(x)[2:end]...)

struct Embedding{W}
    weight::W
end
(layer::Embedding)(ids) = reshape(layer.weight[:, vec(ids)], :, size(ids)...)

struct Dropout
    rate::Float64
end
(::Dropout)(x) = x

struct Conv{W,B}
    weight::W
    bias::B
    options::NamedTuple
end
Conv(weight, bias; options...) = Conv(weight, bias, (; options...))
(layer::Conv)(x) = biased(convolution(x, layer.weight; layer.options..., turned=true), layer.bias)

MaxPool(window; stride, pad) = x -> pooled(x, false, window, stride, pad)
MeanPool(window; stride, pad) = x -> pooled(x, true, window, stride, pad)
GlobalMaxPool() = x -> maximum(x; dims=Tuple(1:ndims(x)-2))
GlobalMeanPool() = x -> mean(x; dims=Tuple(1:ndims(x)-2))

onehotbatch(labels, classes) = [l == c for c in classes, l in labels]
logitcrossentropy(out, y) = -mean(sum(y .* (out .- log.(sum(exp.(out); dims=1))); dims=1))
logitbinarycrossentropy(out, y) = mean(softplus.(out) .- out .* y)
mse(out, y) = mean(abs2.(out .- y))

function withgradient(loss, model::Chain)
    gradients = map(model.layers) do layer
        arrays = [name for name in fieldnames(typeof(layer)) if getfield(layer, name) isa Array]
        isempty(arrays) && return nothing
        return NamedTuple{Tuple(arrays)}(Tuple(differences(() -> loss(model), getfield(layer, name)) for name in arrays))
    end
    return (val=loss(model), grad=((layers=gradients,),))
end

setup(rule, model) = (rule, IdDict())
function update!((rule, states), model, gradient)
    for (layer, found) in zip(model.layers, gradient.layers), name in (found === nothing ? () : keys(found))
        array = getfield(layer, name)
        array .-= rule.change(get!(states, array, Dict{Int,Any}()), found[name])
    end
end

end
