# Normalisation of activations, over a batch or within a sample.

"""
    BatchNorm(channels; momentum=0.1, eps=1e-5, name=nothing)

Batch normalisation (Ioffe and Szegedy 2015), `torch.nn.BatchNorm1d` and `2d`: `scale * (x - mean) / sqrt(var + eps) + shift`
for each channel, the last axis of a sample (W, H, channels), or its only one.

In training, mean and variance are those of the batch over all other axes, and `momentum` of them goes into the running
ones, the variance unbiased; otherwise the running ones are used.

Parameters: `scale` and `shift` (channels,); `running_mean` and `running_var` (channels,), which are not trained.
"""
struct BatchNorm <: Layer
    channels::Int
    momentum::Float64
    eps::Float64
    name::Union{Nothing,String}
end

BatchNorm(@nospecialize(channels); momentum=0.1, eps=1e-5, name=nothing) = BatchNorm(
    whole_number("BatchNorm", "channels", channels), fraction("BatchNorm", "momentum", momentum),
    positive("BatchNorm", "eps", eps), checked_name(name))

fraction(what::String, name::String, @nospecialize(value)) =
    value isa Real && !(value isa Bool) && 0 <= value <= 1 ? Float64(value) :
    throw(ConfigurationError("$what: $name must be a number from 0 to 1, got $(repr(value))"))
positive(what::String, name::String, @nospecialize(value)) =
    value isa Real && !(value isa Bool) && isfinite(value) && value > 0 ? Float64(value) :
    throw(ConfigurationError("$what: $name must be a finite number > 0, got $(repr(value))"))

function parameters(layer::BatchNorm)
    spec(init, trainable) = ParameterSpec([layer.channels], init, layer.channels, layer.channels, trainable)
    return ["scale" => spec("ones", true), "shift" => spec("zeros", true), "running_mean" => spec("zeros", false),
        "running_var" => spec("ones", false)]
end

couples_batch(::BatchNorm) = true
sums_over_batch(::BatchNorm) = true

function output_size(layer::BatchNorm, input::Vector{Int})
    !isempty(input) && input[end] == layer.channels || throw(rejected(layer, "size (..., $(layer.channels))", input))
    return input
end

function forward(layer::BatchNorm, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    # The channels' vectors, so that they broadcast over the axes before them.
    over_batch(v) = reshape(v, Int[ones(Int, ndims(x) - 2); layer.channels; 1]...)
    scale, shift = over_batch(parameters["scale"]), over_batch(parameters["shift"])
    if !training
        deviation = sqrt.(over_batch(parameters["running_var"]) .+ layer.eps)
        return (x .- over_batch(parameters["running_mean"])) .* (scale ./ deviation) .+ shift
    end
    axes = setdiff(1:ndims(x), ndims(x) - 1)
    count = samples_of(x) * prod(x.dims[1:end-2])
    count > 1 || throw(ShapeError("$layer: training needs more than one value per channel, got a batch of size $(size(x))"))
    average = sum_of_parts(sum(x; dims=axes)) ./ count
    apart = x .- average
    variance = sum_of_parts(sum(apart .^ 2; dims=axes)) ./ count
    update(name, new) = parameters[name] =
        (1 - layer.momentum) .* parameters[name] .+ layer.momentum .* reshape(detach(new), layer.channels)
    update("running_mean", average)
    update("running_var", variance .* (count / (count - 1)))
    return apart .* (scale ./ sqrt.(variance .+ layer.eps)) .+ shift
end
Base.show(io::IO, layer::BatchNorm) = print(io, "BatchNorm(", layer.channels, ")")

LAYERS["batch_norm"] = BatchNorm
read_layer(::Type{BatchNorm}, line::Line, input::Vector{Int}) = BatchNorm(channels(input);
    momentum=given(line, "momentum", Float64), eps=given(line, "eps", Float64), name=given(line, "id", String))

"""
    LayerNorm(features; eps=1e-5, name=nothing)

Layer normalisation (Ba et al. 2016), `torch.nn.LayerNorm` over one axis: `scale .* (x - mean) / sqrt(var + eps) .+ shift`
with the mean and variance along the first axis of x, (features, ...).

Parameters: `scale` and `shift` (features,).
"""
struct LayerNorm <: Layer
    features::Int
    eps::Float64
    name::Union{Nothing,String}
end

LayerNorm(@nospecialize(features); eps=1e-5, name=nothing) = LayerNorm(
    whole_number("LayerNorm", "features", features), positive("LayerNorm", "eps", eps), checked_name(name))

parameters(layer::LayerNorm) = [
    "scale" => ParameterSpec([layer.features], "ones", layer.features, layer.features),
    "shift" => ParameterSpec([layer.features], "zeros", layer.features, layer.features)]

function output_size(layer::LayerNorm, input::Vector{Int})
    !isempty(input) && input[1] == layer.features || throw(rejected(layer, "size ($(layer.features), ...)", input))
    return input
end

function forward(layer::LayerNorm, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    return layer_norm(x, parameters["scale"], parameters["shift"]; eps=layer.eps)
end
Base.show(io::IO, layer::LayerNorm) = print(io, "LayerNorm(", layer.features, ")")

LAYERS["layer_norm"] = LayerNorm
read_layer(::Type{LayerNorm}, line::Line, input::Vector{Int}) =
    LayerNorm(features(input); eps=given(line, "eps", Float64), name=given(line, "id", String))
