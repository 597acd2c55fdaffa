# A model as a chain of layers over one flat vector of parameters.

"""
    Chain(layers...; seed=0, dtype=Float32)

Layers applied one after the other; call it with a batch (..., N) to get the outputs (logits), a `Tensor`.

    chain = Chain(Reshape(196, 4), RNN(196 => 64, tanh), Dense(64 => 10); seed=0)
    logits = chain(x)

Each layer has an id: its own `name`, or that of its type in lower case, numbered when taken (`dense`, `dense2`). A layer
keeps its id as long as it is in the chain. Parameters are called `<id>.<name>`; their initial values come from `seed` and
that name alone, so adding or removing a layer changes no other.

Editing (`push!`, `insert!`, `deleteat!`) makes a new `parameters` object, into which the values of the layers that stay
are copied; the old one is no longer used. What was built from it (a trainer) has to be built again.
"""
mutable struct Chain
    seed::Int
    ids::Vector{String}
    layers::Vector{Layer}
    parameters::Parameters
    inputs::Dict{String,Vector{String}}  # what layers read where it is not the one before them; see graph.jl
    # Only this one: the other that Julia makes takes five of anything, and so five layers.
    Chain(seed::Int, ids::Vector{String}, layers::Vector{Layer}, parameters::Parameters) =
        new(seed, ids, layers, parameters, Dict{String,Vector{String}}())
end

function Chain(@nospecialize(layers...); seed::Integer=0, dtype::DataType=Float32, vector::Union{Nothing,Vector}=nothing)
    check_seed(seed)
    dtype in AD.FLOATS || throw(ConfigurationError("parameters are Float32 or Float64, got $dtype"))
    ids, added = String[], Layer[]
    for layer in layers
        push!(ids, new_id(layer, ids))
        push!(added, layer)
    end
    return new_chain(Int(seed), ids, added, dtype, vector)
end

function new_chain(seed::Int, ids::Vector{String}, added::Vector{Layer}, dtype::DataType, vector::Union{Nothing,Vector})
    if vector !== nothing  # somebody else's memory, with values in it
        eltype(vector) === dtype || throw(ConfigurationError("a vector of $(eltype(vector)) for a model of $dtype"))
        return placed!(Chain(seed, ids, added, Parameters(layout_of(ids, added), vector)))
    end
    chain = Chain(seed, String[], Layer[], Parameters(layout_of(String[], Layer[]), dtype))
    become!(chain, ids, added)
    return chain
end

# What it computes -----------------------------------------------------------------------------------------------------

function (chain::Chain)(@nospecialize(x); training::Bool=false)
    news = Tuple{Int,Tensor}[]
    y = applied(chain, chain.parameters.tensors, as_batch(x), training, news)
    keep_state!(chain.parameters, news)
    return y
end

as_batch(x::Tensor) = x
as_batch(x::AbstractArray) = Constant(x)

"""
The outputs for a batch, with the parameters' values taken from `tensors`, in the order of the vector: this is the
function that is traced and differentiated. What layers have made of their state is added to `news`, by position.
"""
function applied(chain::Chain, tensors::Vector{Tensor}, x::Tensor, training::Bool, news=Tuple{Int,Tensor}[])
    ndims(x) > 0 || throw(ShapeError("a chain is called with a batch (..., N), got a number"))
    position = Dict{String,Int}(name => i for (i, name) in enumerate(keys(chain.parameters)))
    return through(chain, x) do id, layer, given
        own = Dict{String,Tensor}()
        for (local_name, _) in parameters(layer)
            own[local_name] = tensors[position["$id.$local_name"]]
        end
        y = AD.scope(id) do
            expected = output_size(layer, merged_size(layer, Vector{Int}[x.dims[1:end-1] for x in given]))
            made = forward(layer, merge_inputs(layer, given), own, training)
            made.dims[1:end-1] == expected || throw(ShapeError("layer \"$id\": output_size says samples of size $(Tuple(expected)), " *
                "forward gave $(Tuple(made.dims[1:end-1]))"))
            made
        end
        for (local_name, _) in parameters(layer)
            i = position["$id.$local_name"]
            own[local_name] === tensors[i] || push!(news, (i, new_state("$id.$local_name", own[local_name], tensors[i])))
        end
        return y
    end
end

"""A layer's new value of a parameter, which must have its size and type: plans copy its bytes."""
function new_state(name::String, @nospecialize(new), old::Tensor)
    value = AD.as_tensor(new)
    value.dims == old.dims || throw(ShapeError("$name: expected a new value of size $(Tuple(old.dims)), got $(size(value))"))
    value.eltype === old.eltype || throw(DTypeError("$name: expected a new value of $(old.eltype), got $(value.eltype)"))
    return value
end

"""What the input of a network is called among the names that its layers read."""
const INPUT = "input"

"""Run through the layers: `step(id, layer, values)`, with the values that it reads, gives that of the layer."""
function through(step, chain::Chain, x::T) where {T}
    made = Dict{String,T}(INPUT => x)
    for (id, layer) in zip(chain.ids, chain.layers)
        read = get(chain.inputs, id, nothing)
        x = made[id] = step(id, layer, read === nothing ? T[x] : T[made[name] for name in read])::T
    end
    return x
end

"""Throw a `TraceError` for a new value of a layer's state that only a loop's body knows."""
function check_states(news::Vector{Tuple{Int,Tensor}})
    AD.state().symbolic || all(pair -> pair[2].data !== nothing, news) || throw(TraceError("a layer gives a parameter a new value " *
        "inside a loop, where nothing has a value yet; let the loop return it"))
    return nothing
end

"""Store new values of layers' state, unless they are symbolic."""
function keep_state!(parameters::Parameters, news::Vector{Tuple{Int,Tensor}})
    check_states(news)
    for (i, new) in news
        new.data === nothing || (parameters[keys(parameters)[i]] .= value(new))
    end
end

"""Whether the samples of a batch affect each other's results in training, in a layer or in one that a layer holds."""
couples_batch(chain::Chain) = any(found -> couples_batch(found.second), held_layers(chain.layers, Layer))

"""Whether a batch can be split over threads: if its samples affect each other, then by sums over it."""
splits(chain::Chain) = all(found -> !couples_batch(found.second) || sums_over_batch(found.second),
    held_layers(chain.layers, Layer))

"""Whether the samples are Int64 token ids: the first layer that looks at values is an [`Embedding`](@ref), or says so."""
function takes_ids(chain::Chain)
    holds, before = Set([INPUT]), INPUT
    for (id, layer) in zip(chain.ids, chain.layers)
        reads_ids = any(in(holds), get(chain.inputs, id, [before]))
        reads_ids && !only_moves(layer) && return takes_ids(layer)
        reads_ids && push!(holds, id)
        before = id
    end
    return false
end

"""How many different ids the samples of a chain that takes ids may hold: those from 1 on."""
function vocabulary(chain::Chain)
    least = typemax(Int)
    for layer in chain.layers
        layer isa Embedding && (least = min(least, layer.vocabulary))
    end
    return least
end

"""
    lookups(chain, input, samples, training)

What is looked up of token ids (input..., samples): a program from these, and for each of its results how many ids there may be and
the id of the layer that reads it. Not among it are ids that are looked up inside a loop, or computed from numbers.
"""
function lookups(chain::Chain, input::Vector{Int}, samples::Int, training::Bool)
    ids = AD.symbol(Int64, Int[input; samples])
    program = tracing_aside(() -> AD.trace(x -> Tensor[applied(chain, chain.parameters.tensors, x, training)], Tensor[ids]), chain.layers)
    known, steps, read, rules = Set{Tensor}([ids]), AD.Equation[], Tensor[], Tuple{Int,String}[]
    for e in program.equations
        if (e.op === AD.EMBEDDING || e.op === AD.GATHER) && e.inputs[2] in known
            push!(read, e.inputs[2])
            push!(rules, (e.inputs[1].dims[e.op === AD.EMBEDDING ? 2 : e.attrs.axis], e.scope))
        end
        if !e.op.random && all(y -> y.eltype === Int64, e.outputs) && all(x -> x in known || x.data !== nothing, e.inputs)
            push!(steps, e)
            union!(known, e.outputs)
        end
    end
    return AD.Program(Tensor[ids], steps, read), rules
end

"""
    sizes(chain, input)

The size of the sample that comes out of each layer, `id => size`, for a sample of size `input`. Throws a `ShapeError`
naming the layer that doesn't fit what comes to it.
"""
function sizes(chain::Chain, input)
    found = Pair{String,Vector{Int}}[]
    through(chain, collect(Int, input)) do id, layer, given
        push!(found, id => AD.scope(() -> output_size(layer, merged_size(layer, given)), id))
        return found[end].second
    end
    return found
end

"""
    output_size(chain, input)

The size of an output sample for an input sample of size `input`; errors as `sizes`.
"""
function output_size(chain::Chain, input)
    found = sizes(chain, input)
    return isempty(found) ? collect(Int, input) : found[end].second
end

"""
    gradient(f, chain)

The gradient of the number `f(chain)` by each parameter that is trained, as a dictionary of arrays by name.
"""
function AD.gradient(@nospecialize(f), chain::Chain)
    output = f(chain)
    output isa Tensor && length(output) == 1 || throw(ShapeError("gradient: the function must return a number"))
    targets = trained_tensors(chain.parameters)
    found = no_grad(() -> gradients(Tensor[output], Tensor[AD.spread_to(AD.literal(output.eltype, 1), output.dims)], targets))
    return Dict{String,Array{eltype(chain.parameters)}}(
        x.name => g === nothing ? fill!(AD.new_array(x.eltype, x.dims), 0) : copy(value(g)) for (x, g) in zip(targets, found))
end

# Editing --------------------------------------------------------------------------------------------------------------

Base.push!(chain::Chain, layer::Layer) = insert!(chain, length(chain) + 1, layer)
Base.append!(chain::Chain, layer::Layer) = push!(chain, layer)

"""
    insert!(chain, index, layer)

Add `layer` before the layer at `index`.
"""
function Base.insert!(chain::Chain, index::Integer, layer::Layer)
    1 <= index <= length(chain) + 1 || throw(ConfigurationError(
        "there is no place $index in a chain of $(length(chain)) layers"))
    ids, layers = copy(chain.ids), copy(chain.layers)
    insert!(ids, index, new_id(layer, ids))
    insert!(layers, index, layer)
    return become!(chain, ids, layers)
end

"""
    deleteat!(chain, layer)

Take out the layer with this index or id, and return the chain; its values are lost.
"""
function Base.deleteat!(chain::Chain, layer::Union{Integer,AbstractString})
    i = position_of(chain, layer)
    keep = setdiff(1:length(chain), i)
    return become!(chain, chain.ids[keep], chain.layers[keep])
end

# As a collection of layers --------------------------------------------------------------------------------------------

Base.length(chain::Chain) = length(chain.layers)
Base.iterate(chain::Chain, i::Int=1) = i > length(chain) ? nothing : (chain.layers[i], i + 1)
Base.getindex(chain::Chain, layer::Union{Integer,AbstractString}) = chain.layers[position_of(chain, layer)]
Base.firstindex(chain::Chain) = 1
Base.lastindex(chain::Chain) = length(chain)

function Base.show(io::IO, chain::Chain)
    print(io, isempty(chain.inputs) ? "Chain" : "Graph", " of $(length(chain)) layers, $(length(chain.parameters)) parameters, $(eltype(chain.parameters))")
    width = maximum(Int[0; length.(chain.ids)])
    for (id, layer) in zip(chain.ids, chain.layers)
        print(io, "\n  ", rpad(id, width), "  ", layer)
        specs = parameters(layer)
        isempty(specs) || print(io, "\n  ", " "^width, "  ", join(["$n $(Tuple(s.dims))" for (n, s) in specs], ", "), ": ",
            sum(Int[length(s) for (_, s) in specs]), all(s.trainable for (_, s) in specs) ? "" : " (not all trained)")
    end
end

# How it works ---------------------------------------------------------------------------------------------------------

function position_of(chain::Chain, layer::Union{Integer,AbstractString})
    i = layer isa Bool ? nothing : layer isa Integer ? Int(layer) : findfirst(==(layer), chain.ids)
    i !== nothing && 1 <= i <= length(chain) || throw(ConfigurationError(
        "no layer $(repr(layer)) in this chain of $(length(chain)): $(isempty(chain.ids) ? "empty" : join(chain.ids, ", "))"))
    return i
end

function specs_of(ids::Vector{String}, layers::Vector{Layer})
    specs = Pair{String,ParameterSpec}[]
    for i in eachindex(ids), (name, spec) in parameters(layers[i])
        push!(specs, "$(ids[i]).$name" => spec)
    end
    return specs
end

function layout_of(ids::Vector{String}, layers::Vector{Layer})
    names, dims, trainable = String[], Vector{Int}[], Bool[]
    for (name, spec) in specs_of(ids, layers)
        push!(names, name)
        push!(dims, spec.dims)
        push!(trainable, spec.trainable)
    end
    return Layout(names, dims, trainable)
end

"""Take over layers with new parameters: old values where the name stays, initial ones elsewhere."""
function become!(chain::Chain, ids::Vector{String}, layers::Vector{Layer})
    isempty(chain.inputs) || throw(ConfigurationError("the layers of a graph stay what they are; make a new Graph"))
    old = chain.parameters
    new = Parameters(layout_of(ids, layers), eltype(old))
    for (name, spec) in specs_of(ids, layers)
        array = new[name]
        haskey(old, name) ? (array .= old[name]) : initialise!(array, spec, stream(chain.seed, name))
    end
    chain.ids, chain.layers, chain.parameters = ids, layers, new
    return placed!(chain)
end

"""Let the dropout layers know their places, from which they have different streams."""
function placed!(chain::Chain)
    for (place, layer) in held_layers(chain.layers, Dropout)
        isempty(place) || (layer.place = place)  # in a chain that a layer holds it has that of the whole
    end
    return chain
end

function new_id(@nospecialize(layer), taken::Vector{String})
    layer isa Layer || throw(ConfigurationError("a chain is made of layers, got $(repr(layer))"))
    name = layer_name(layer)
    if name !== nothing
        name in taken && throw(ConfigurationError("two layers are called \"$name\"; names in a chain must differ"))
        return name
    end
    base = lowercase(kind(layer))
    base in taken || return base
    number = 2
    while "$base$number" in taken
        number += 1
    end
    return "$base$number"
end
