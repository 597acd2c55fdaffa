# Token ids to vectors, and the order of axes.

"""
    Embedding(vocabulary => dimension; padding_index=nothing, trainable=true, weight_init="normal", name=nothing)

A vector for each token id: ids (...), `Int64` from 1 to `vocabulary`, to (dimension, ...).

The first layer of a chain whose samples are ids; only `Reshape`, `Flatten` and `PermuteDims` may come before it. The
vector of the id `padding_index` gets no gradient. With `trainable=false` none does: the vectors stay as they are given.

Parameter: `weight` (dimension, vocabulary). A layer of your own that holds one, and hands it its samples, has a method
`NETWORK.takes_ids(::YourLayer) = true`.
"""
struct Embedding <: Layer
    vocabulary::Int
    dimension::Int
    padding_index::Int  # 0: none
    trainable::Bool
    weight_init::Any
    name::Union{Nothing,String}
end

function Embedding(@nospecialize(sizes); padding_index=nothing, trainable::Bool=true, weight_init="normal", name=nothing)
    sizes isa Pair || throw(ConfigurationError(
        "Embedding: expected vocabulary => dimension, such as 10_000 => 50, got $(repr(sizes))"))
    vocabulary = whole_number("Embedding", "vocabulary", sizes.first)
    dimension = whole_number("Embedding", "dimension", sizes.second)
    padding = padding_index === nothing ? 0 : whole_number("Embedding", "padding_index", padding_index)
    padding <= vocabulary || throw(ConfigurationError(
        "Embedding: padding_index must be an id from 1 to $vocabulary, got $padding"))
    return Embedding(vocabulary, dimension, padding, trainable, checked_initialiser("Embedding", "weight_init", weight_init),
        checked_name(name))
end

parameters(layer::Embedding) = ["weight" => ParameterSpec([layer.dimension, layer.vocabulary], layer.weight_init,
    layer.vocabulary, layer.dimension, layer.trainable)]

takes_ids(::Embedding) = true
output_size(layer::Embedding, input::Vector{Int}) = Int[layer.dimension; input]

function forward(layer::Embedding, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    x.eltype === Int64 || throw(DTypeError("$layer: expected samples of token ids, Int64 from 1 to $(layer.vocabulary), " *
        "got $(x.eltype)"))
    return embedding(parameters["weight"], x; padding_index=layer.padding_index)
end

Base.show(io::IO, layer::Embedding) = print(io, "Embedding(", layer.vocabulary, " => ", layer.dimension,
    layer.padding_index == 0 ? "" : "; padding_index=$(layer.padding_index)",
    layer.trainable ? "" : layer.padding_index == 0 ? "; trainable=false" : ", trainable=false", ")")

LAYERS["embedding"] = Embedding
function read_layer(::Type{Embedding}, line::Line, input::Vector{Int})
    padding = given_or_nothing(line, "padding_index", Int)  # from 0
    return Embedding(given(line, "vocabulary", Int) => given(line, "dimension", Int);
        padding_index=padding === nothing ? nothing : padding + 1, trainable=given(line, "trainable", Bool),
        name=given(line, "id", String))
end

"""
    PermuteDims(axes...)

The axes of each sample in another order, as `permutedims` has it: axis `axes[1]` becomes the first. The batch stays last.
"""
struct PermuteDims <: Layer
    axes::Vector{Int}
    name::Union{Nothing,String}
end

function PermuteDims(axes::Integer...; name=nothing)
    isperm(axes) || throw(ConfigurationError(
        "PermuteDims: expected each axis of a sample once, such as PermuteDims(2, 1), got $axes"))
    return PermuteDims(collect(Int, axes), checked_name(name))
end

only_moves(::PermuteDims) = true
function output_size(layer::PermuteDims, input::Vector{Int})
    length(input) == length(layer.axes) || throw(rejected(layer, "$(length(layer.axes)) axes", input))
    return input[layer.axes]
end
forward(layer::PermuteDims, x::Tensor, parameters::Dict{String,Tensor}, training::Bool) =
    permutedims(x, Int[layer.axes; ndims(x)])
Base.show(io::IO, layer::PermuteDims) = print(io, "PermuteDims(", join(layer.axes, ", "), ")")

LAYERS["permute_dims"] = PermuteDims
function read_layer(::Type{PermuteDims}, line::Line, input::Vector{Int})
    axes = given(line, "axes", Vector{Int})  # from 0, and the first of them is the last here
    return PermuteDims((length(axes) .- reverse(axes))...; name=given(line, "id", String))
end
