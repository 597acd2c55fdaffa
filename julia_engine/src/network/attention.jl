# Attention layers, for sequences (features, steps).

"""
    MultiHeadAttention(features, heads; causal=false, bias=true, weight_init="glorot_uniform", bias_init="zeros", name=nothing)

Each step's mean of all steps, weighted by how well they fit it, in several heads (Vaswani et al. 2017): (features, steps) to
the same. Queries, keys and values are `weight * x .+ bias`, one after the other; each head has its part of their features. What
the heads find, one after the other, goes through `output_weight * _ .+ output_bias`. With `causal` a step sees itself and those
before it alone.

Parameters: `weight` (3 features, features), `output_weight` (features, features), and unless `bias=false` `bias` (3 features,)
and `output_bias` (features,).
"""
struct MultiHeadAttention <: Layer
    features::Int
    heads::Int
    causal::Bool
    bias::Bool
    weight_init::Any
    bias_init::Any
    name::Union{Nothing,String}
end

function MultiHeadAttention(@nospecialize(features), @nospecialize(heads); causal::Bool=false, bias::Bool=true,
        weight_init="glorot_uniform", bias_init="zeros", name=nothing)
    what = "MultiHeadAttention"
    n, parts = whole_number(what, "features", features), whole_number(what, "heads", heads)
    n % parts == 0 || throw(ConfigurationError("$what: heads must divide the $n features, got $parts"))
    return MultiHeadAttention(n, parts, causal, bias, checked_initialiser(what, "weight_init", weight_init),
        checked_initialiser(what, "bias_init", bias_init), checked_name(name))
end

function parameters(layer::MultiHeadAttention)
    n = layer.features
    spec(dims, init) = ParameterSpec(dims, init, n, n)
    specs = ["weight" => spec([3n, n], layer.weight_init), "bias" => spec([3n], layer.bias_init),
        "output_weight" => spec([n, n], layer.weight_init), "output_bias" => spec([n], layer.bias_init)]
    return layer.bias ? specs : specs[[1, 3]]
end

function output_size(layer::MultiHeadAttention, input::Vector{Int})
    length(input) == 2 && input[1] == layer.features && input[2] >= 1 ||
        throw(rejected(layer, "size ($(layer.features), steps)", input))
    return input
end

function forward(layer::MultiHeadAttention, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    n, steps, samples = x.dims
    projected(name, bias, rows) =
        (y = parameters[name] * rows; layer.bias ? y .+ parameters[bias] : y)
    rows = projected("weight", "bias", reshape(x, n, steps * samples))
    by_head = permutedims(reshape(rows, n ÷ layer.heads, layer.heads, 3, steps, samples), (1, 4, 2, 5, 3))
    parts = [by_head[:, :, :, :, k] for k in 1:3]
    found = permutedims(AD.scaled_dot_product_attention(parts...; causal=layer.causal), (1, 3, 2, 4))
    return reshape(projected("output_weight", "output_bias", reshape(found, n, steps * samples)), n, steps, samples)
end
Base.show(io::IO, layer::MultiHeadAttention) =
    print(io, "MultiHeadAttention(", layer.features, ", ", layer.heads, layer.causal ? "; causal=true" : "", ")")

LAYERS["multi_head_attention"] = MultiHeadAttention
read_layer(::Type{MultiHeadAttention}, line::Line, input::Vector{Int}) = MultiHeadAttention(features(input),
    given(line, "heads", Int); causal=given(line, "causal", Bool), bias=given(line, "bias", Bool), name=given(line, "id", String))

"""
    PositionEmbedding(features, steps; weight_init="normal", name=nothing)

A learned vector for each step, added to it: (features, steps) to the same. Parameter: `weight` (features, steps).
"""
struct PositionEmbedding <: Layer
    features::Int
    steps::Int
    weight_init::Any
    name::Union{Nothing,String}
end

PositionEmbedding(@nospecialize(features), @nospecialize(steps); weight_init="normal", name=nothing) = PositionEmbedding(
    whole_number("PositionEmbedding", "features", features), whole_number("PositionEmbedding", "steps", steps),
    checked_initialiser("PositionEmbedding", "weight_init", weight_init), checked_name(name))

parameters(layer::PositionEmbedding) = ["weight" => ParameterSpec([layer.features, layer.steps], layer.weight_init,
    layer.steps, layer.features)]

function output_size(layer::PositionEmbedding, input::Vector{Int})
    input == [layer.features, layer.steps] || throw(rejected(layer, "size ($(layer.features), $(layer.steps))", input))
    return input
end

forward(::PositionEmbedding, x::Tensor, parameters::Dict{String,Tensor}, training::Bool) = x .+ parameters["weight"]
Base.show(io::IO, layer::PositionEmbedding) = print(io, "PositionEmbedding(", layer.features, ", ", layer.steps, ")")

LAYERS["position_embedding"] = PositionEmbedding
function read_layer(::Type{PositionEmbedding}, line::Line, input::Vector{Int})
    length(input) == 2 || throw(ShapeError("it needs an axis of features and one of steps"))
    return PositionEmbedding(input...; name=given(line, "id", String))
end

export MultiHeadAttention, PositionEmbedding
