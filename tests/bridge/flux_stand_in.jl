# A stand-in for Flux, of what bridge/adapters/flux.jl asks of it, in plain Julia: gradients are finite differences.
module Flux

import Statistics: mean

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

"""Call `each(output position, input position, kernel position)` for all that lies in the input."""
function windows(each, input, kernel, output, stride, pad, dilation)
    for o in CartesianIndices(output), k in CartesianIndices(kernel)
        i = CartesianIndex(ntuple(d -> (o[d] - 1) * stride[d] + (k[d] - 1) * dilation[d] + 1 - pad[2d-1], length(kernel)))
        checkbounds(Bool, CartesianIndices(input), i) && each(o, i, k)
    end
end
moved(n, k, stride, before, after, dilation) = (n + before + after - dilation * (k - 1) - 1) ÷ stride + 1

struct Conv{W,B}
    weight::W
    bias::B
    options::NamedTuple
end
Conv(weight, bias; options...) = Conv(weight, bias, (; options...))
function (layer::Conv)(x)
    w, (stride, pad, dilation, groups) = layer.weight, layer.options
    kernel, input = size(w)[1:end-2], size(x)[1:end-2]
    output = ntuple(d -> moved(input[d], kernel[d], stride[d], pad[2d-1], pad[2d], dilation[d]), length(kernel))
    channels, filters = size(w)[end-1:end]
    y = zeros(eltype(x), output..., filters, size(x)[end])
    windows(input, kernel, output, stride, pad, dilation) do o, i, k
        turned = CartesianIndex(kernel .+ 1 .- Tuple(k))  # a convolution, not a cross-correlation
        for f in 1:filters, c in 1:channels, n in 1:size(x)[end]
            group = (f - 1) ÷ (filters ÷ groups)
            y[o, f, n] += w[turned, c, f] * x[i, group*channels+c, n]
        end
    end
    return layer.bias === false ? y : y .+ reshape(layer.bias, ntuple(_ -> 1, length(kernel))..., :)
end

struct Pool
    reduce::Function
    first::Float64
    window::Tuple
    stride::Tuple
    pad::Tuple
end
MaxPool(window; stride, pad) = Pool(max, -Inf, window, stride, pad)
MeanPool(window; stride, pad) = Pool((a, b) -> a + b / prod(window), 0.0, window, stride, pad)
function (layer::Pool)(x)
    input = size(x)[1:end-2]
    output = ntuple(d -> moved(input[d], layer.window[d], layer.stride[d], layer.pad[2d-1], layer.pad[2d], 1), length(input))
    y = fill(eltype(x)(layer.first), output..., size(x)[end-1:end]...)
    windows(input, layer.window, output, layer.stride, layer.pad, ntuple(_ -> 1, length(input))) do o, i, _
        y[o, :, :] .= layer.reduce.(y[o, :, :], x[i, :, :])
    end
    return y
end
struct GlobalMaxPool end
(::GlobalMaxPool)(x) = maximum(x; dims=Tuple(1:ndims(x)-2))
struct GlobalMeanPool end
(::GlobalMeanPool)(x) = mean(x; dims=Tuple(1:ndims(x)-2))

relu(x) = max(x, zero(x))
sigmoid(x) = 1 / (1 + exp(-x))
softplus(x) = log1p(exp(-abs(x))) + relu(x)
softmax(x; dims) = exp.(x) ./ sum(exp.(x); dims=dims)

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

function differences(f, array)
    gradient, step = similar(array), 1e-6
    for k in eachindex(array)
        kept = array[k]
        array[k] = kept + step
        above = f()
        array[k] = kept - step
        gradient[k] = (above - f()) / 2step
        array[k] = kept
    end
    return gradient
end

struct Rule
    change::Function
end
Descent(rate) = Rule((state, g) -> rate .* g)
Momentum(rate, rho) = Rule((state, g) -> (state[1] = rho .* get(state, 1, 0) .+ rate .* g))
function Adam(rate, (a, b), eps)
    return Rule() do state, g
        t = state[0] = get(state, 0, 0) + 1
        state[1] = a .* get(state, 1, 0) .+ (1 - a) .* g
        state[2] = b .* get(state, 2, 0) .+ (1 - b) .* g .^ 2
        rate .* state[1] ./ (1 - a^t) ./ (sqrt.(state[2] ./ (1 - b^t)) .+ eps)
    end
end

setup(rule, model) = (rule, IdDict())
function update!((rule, states), model, gradient)
    for (layer, found) in zip(model.layers, gradient.layers), name in (found === nothing ? () : keys(found))
        array = getfield(layer, name)
        array .-= rule.change(get!(states, array, Dict{Int,Any}()), found[name])
    end
end

end
