# A model whose layers may read the results of any layers before them, and the layers that join several.

"""
    Graph(layers...; inputs, seed=0, dtype=Float32)

A [`Chain`](@ref) of whose layers each reads the one before it, or those that `inputs`, a dictionary, names for it; the last
one's is the result. A layer reads only layers before it, or the network's own "input". It is not edited.

    graph = Graph(Dense(4 => 8; name="below"), Dense(8 => 8, relu; name="middle"), Add(name="sum");
        inputs=Dict("sum" => ["below", "middle"]))
"""
function Graph(@nospecialize(layers...); inputs, seed::Integer=0, dtype::DataType=Float32)
    chain = Chain(layers...; seed=seed, dtype=dtype)
    return read_inputs!(chain, Dict{String,Vector{String}}(String(name) => String[n for n in read] for (name, read) in inputs))
end

"""Let layers read others than the one before them. Throws a `ConfigurationError` for names of what is not before them."""
function read_inputs!(chain::Chain, inputs::Dict{String,Vector{String}})
    for name in keys(inputs)
        name in chain.ids || throw(ConfigurationError("inputs: there is no layer \"$name\"; there are: $(join(chain.ids, ", "))"))
    end
    INPUT in chain.ids && throw(ConfigurationError("a layer of a graph can't be called \"$INPUT\": that is the graph's input"))
    known = String[INPUT]
    for id in chain.ids
        for name in get(inputs, id, String[])
            name in known || throw(ConfigurationError(
                "inputs of layer \"$id\": \"$name\" is none of what is before it: $(join(known, ", "))"))
        end
        push!(known, id)
    end
    chain.inputs = inputs
    return chain
end

"""
    Add(; name=nothing)

The sum of several inputs of one size: a residual connection.
"""
struct Add <: Layer
    name::Union{Nothing,String}
end
Add(; name=nothing) = Add(checked_name(name))

function merged_size(layer::Add, sizes::Vector{Vector{Int}})
    length(sizes) >= 2 && all(==(sizes[1]), sizes) ||
        throw(refused(layer, "two or more samples of one size", sizes))
    return sizes[1]
end
merge_inputs(::Add, inputs::Vector{Tensor}) = reduce((a, b) -> a .+ b, inputs)

"""
    Concat(axis; name=nothing)

Several inputs one after the other along an axis of a sample; their other lengths are the same.
"""
struct Concat <: Layer
    axis::Int
    name::Union{Nothing,String}
end
Concat(@nospecialize(axis); name=nothing) = Concat(whole_number("Concat", "axis", axis), checked_name(name))

function merged_size(layer::Concat, sizes::Vector{Vector{Int}})
    axis, rest = layer.axis, size -> Int[n for (d, n) in enumerate(size) if d != layer.axis]
    length(sizes) >= 2 && axis <= length(sizes[1]) && all(s -> length(s) == length(sizes[1]) && rest(s) == rest(sizes[1]), sizes) ||
        throw(refused(layer, "two or more samples that differ along axis $axis alone", sizes))
    merged = copy(sizes[1])
    merged[axis] = sum(Int[s[axis] for s in sizes])
    return merged
end
merge_inputs(layer::Concat, inputs::Vector{Tensor}) = concatenate(inputs, layer.axis)

output_size(::Union{Add,Concat}, input::Vector{Int}) = input
forward(::Union{Add,Concat}, x::Tensor, parameters::Dict{String,Tensor}, training::Bool) = x
Base.show(io::IO, layer::Add) = print(io, "Add()")
Base.show(io::IO, layer::Concat) = print(io, "Concat(", layer.axis, ")")

LAYERS["add"], LAYERS["concat"] = Add, Concat
read_layer(::Type{Add}, line::Line, input::Vector{Int}) = Add(name=given(line, "id", String))
read_layer(::Type{Concat}, line::Line, input::Vector{Int}) =
    Concat(length(input) - given(line, "axis", Int); name=given(line, "id", String))

export Graph, Add, Concat
