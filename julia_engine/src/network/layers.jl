# Layers: what each computes, and what it says about its parameters and sizes.
#
# A layer holds settings, not values. It declares its parameters, and is applied to the batch and the tensors that hold
# them, so the same object serves eager use, tracing and any number of threads. Sizes in this file are per sample unless
# they end with N, the batch, which is the last axis; sequences are (features, T). In memory this is the numpy engine's
# (N, T, features), and its weights (in, out) are (out, in) here. Every layer is written in ops alone.

"""
    Layer

What all layers share. Your own layer is a subtype with methods for [`output_size`](@ref), [`forward`](@ref) and perhaps
[`parameters`](@ref). Its field `name`, if it has one, is its id in a chain, unless it is `nothing`.
"""
abstract type Layer end

"""Layers by the name that a model spec gives them."""
const LAYERS = Dict{String,Any}()

"""
    read_layer(T, line, input)

The layer of type `T` with the settings of a [`Line`](@ref), for samples of size `input`. The names of the settings are the
model spec's, which gives all of them: defaults are those of the spec.
"""
function read_layer end

"""
    parameters(layer)

The layer's parameters, `name => ParameterSpec`, in the order in which they are stored.
"""
parameters(layer::Layer) = Pair{String,ParameterSpec}[]

"""
    output_size(layer, input::Vector{Int})

The size of a sample that comes out for a sample of size `input`. Throws a `ShapeError`, saying what is expected, if such
a sample can't go in.
"""
function output_size end

"""
    forward(layer, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)

Compute the output for a batch `x` whose size has been checked. A layer with state, parameters that are not trained, puts
the state's new values into `parameters`: they take its place when the step is done.
"""
function forward end

"""
    merged_size(layer, sizes)

The size of a sample that the layer's inputs, of these sizes, make together; a layer that joins several has its own method.
Throws a `ShapeError`, saying what is expected, if they don't fit.
"""
merged_size(layer::Layer, sizes::Vector{Vector{Int}}) = length(sizes) == 1 ? sizes[1] : throw(refused(layer, "one input", sizes))

"""
    merge_inputs(layer, inputs)

What the layer's inputs, whose sizes fit, make together.
"""
merge_inputs(::Layer, inputs::Vector{Tensor}) = inputs[1]

"""The error for `merged_size` to throw: inputs of these sizes don't fit, `expected` would."""
refused(layer::Layer, expected::String, sizes::Vector{Vector{Int}}) = ShapeError("$layer$(AD.in_layer(AD.state().scope)): " *
    "expected $expected, got $(length(sizes)) of size " *
    join(["($(join(size, ", "))$(length(size) == 1 ? "," : ""))" for size in sizes], " and "))

"""
    couples_batch(layer)

Whether the samples of a batch affect each other's results in training, so that it can't be trained sample by sample. Of a layer
that does not say so a trainer tries whether they do, and then computes whole batches.
"""
couples_batch(layer::Layer) = false

"""
    sums_over_batch(layer)

Whether they do so by sums over the batch alone, each a `sum_of_parts`: such a batch can be split over threads.
"""
sums_over_batch(layer::Layer) = false

"""
    only_moves(layer)

Whether it only rearranges elements, and so takes token ids as well as numbers.
"""
only_moves(layer::Layer) = false

"""
    takes_ids(layer)

Whether its samples are `Int64` token ids, which it looks up. A layer of your own that hands them to an [`Embedding`](@ref) says so.
"""
takes_ids(layer::Layer) = false

layer_name(@nospecialize(layer::Layer)) = isdefined(layer, :name) ? getfield(layer, :name) : nothing
kind(layer::Layer) = String(nameof(typeof(layer)))

"""The error for `output_size` to throw: samples of size `input` don't fit, `expected` would."""
function rejected(layer::Layer, expected::String, input::Vector{Int})
    where_ = AD.state().scope
    isempty(where_) || (where_ = " in layer \"$where_\"")
    return ShapeError("$layer$where_: expected samples of $expected, got size $(Tuple(input))")
end

whole_number(what::String, name::String, @nospecialize(value)) =
    value isa Integer && !(value isa Bool) && value >= 1 ? Int(value) :
    throw(ConfigurationError("$what: $name must be an integer >= 1, got $(repr(value))"))

function sizes_of(what::String, @nospecialize(sizes))
    sizes isa Pair || throw(ConfigurationError("$what: expected inputs => units, such as 196 => 64, got $(repr(sizes))"))
    return whole_number(what, "inputs", sizes.first), whole_number(what, "units", sizes.second)
end

function checked_name(@nospecialize(name))
    name === nothing && return nothing
    name isa Union{AbstractString,Symbol} && !isempty(String(name)) && !occursin('.', String(name)) ||
        throw(ConfigurationError("a layer's name must be a string without dots, got $(repr(name))"))
    return String(name)
end

function checked_initialiser(what::String, name::String, @nospecialize(initialiser))
    try
        resolve(initialiser)
    catch error
        error isa ConfigurationError ? throw(ConfigurationError("$what: $name: $(error.message)")) : rethrow()
    end
    return initialiser isa Symbol ? String(initialiser) : initialiser
end

# Activations ----------------------------------------------------------------------------------------------------------

softmax_over_classes(x::Tensor) = softmax(x; dims=1)

"""Activations by name, as functions on tensors."""
const ACTIVATIONS = Dict{String,Function}(
    "identity" => identity,
    "tanh" => x -> tanh.(x),
    "relu" => relu,
    "sigmoid" => sigmoid,
    "softplus" => softplus,
    "softmax" => softmax_over_classes,
    "gelu" => gelu,
    "gelu_tanh" => gelu_tanh,
    "silu" => silu,
    "leaky_relu" => leaky_relu,  # of slope 0.01
    "elu" => elu,  # of alpha 1
)

# What a user may write for each: Julia's own functions.
const ACTIVATION_NAMES = IdDict{Any,String}(identity => "identity", tanh => "tanh", relu => "relu", sigmoid => "sigmoid",
    softplus => "softplus", softmax => "softmax", gelu => "gelu", gelu_tanh => "gelu_tanh", silu => "silu",
    leaky_relu => "leaky_relu", elu => "elu")

function activation_name(what::String, @nospecialize(f))
    name = f isa Union{AbstractString,Symbol} ? String(f) : get(ACTIVATION_NAMES, f, "")
    haskey(ACTIVATIONS, name) || throw(ConfigurationError(
        "$what: activation must be one of $(join(sort!(collect(keys(ACTIVATIONS))), ", ")), got $(repr(f))"))
    return name
end

activated(name::String, x::Tensor) = ACTIVATIONS[name](x)::Tensor

# Dense ----------------------------------------------------------------------------------------------------------------

"""
    Dense(inputs => units, activation=identity; bias=true, weight_init="glorot_uniform", bias_init="zeros", name=nothing)

`activation(weight * x .+ bias)` on the first axis of x: (inputs, ...) to (units, ...).

Parameters: `weight` (units, inputs); `bias` (units,) unless `bias=false`.
"""
struct Dense <: Layer
    inputs::Int
    units::Int
    activation::String
    bias::Bool
    weight_init::Any
    bias_init::Any
    name::Union{Nothing,String}
end

function Dense(@nospecialize(sizes), @nospecialize(activation=identity); bias::Bool=true, weight_init="glorot_uniform",
        bias_init="zeros", name=nothing)
    inputs, units = sizes_of("Dense", sizes)
    return Dense(inputs, units, activation_name("Dense", activation), bias,
        checked_initialiser("Dense", "weight_init", weight_init),
        checked_initialiser("Dense", "bias_init", bias_init), checked_name(name))
end

function parameters(layer::Dense)
    fans = (layer.inputs, layer.units)
    specs = ["weight" => ParameterSpec([layer.units, layer.inputs], layer.weight_init, fans...)]
    layer.bias && push!(specs, "bias" => ParameterSpec([layer.units], layer.bias_init, fans...))
    return specs
end

function output_size(layer::Dense, input::Vector{Int})
    !isempty(input) && input[1] == layer.inputs || throw(rejected(layer, "size ($(layer.inputs), ...)", input))
    return Int[layer.units; input[2:end]]
end

function forward(layer::Dense, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    y = parameters["weight"] * x
    layer.bias && (y = y .+ parameters["bias"])
    return activated(layer.activation, y)
end

Base.show(io::IO, layer::Dense) = print(io, "Dense(", layer.inputs, " => ", layer.units,
    layer.activation == "identity" ? "" : ", $(layer.activation)", layer.bias ? "" : "; bias=false", ")")

LAYERS["dense"] = Dense
read_layer(::Type{Dense}, line::Line, input::Vector{Int}) = Dense(features(input) => given(line, "units", Int);
    bias=given(line, "bias", Bool), name=given(line, "id", String))

# Recurrent layers -----------------------------------------------------------------------------------------------------

"""
What [`RNN`](@ref), [`LSTM`](@ref) and [`GRU`](@ref) share: (inputs, T) to the last state, (units,), or to all states,
(units, T).

The input projection of all steps is one matrix product outside the loop. States before the first step are zero, and so
are left out of it. Parameters: `weight` (gates · units, inputs), `recurrent` (gates · units, units), used as
`recurrent * h`, and `bias` (gates · units,), added on the input side.
"""
abstract type Recurrent <: Layer end

for (name, gates, formula) in (
    (:RNN, 1, "The vanilla recurrent layer, `h[t] = activation.(weight * x[t] + recurrent * h[t-1] + bias)`."),
    (:LSTM, 4, "Long short-term memory with a forget gate (Gers et al. 2000), without peepholes; gates i, f, g, o.\n\n" *
               "`c[t] = f .* c[t-1] + i .* g` and `h[t] = o .* tanh.(c[t])`, where i, f and o are sigmoids and g is the " *
               "tanh of their part of\n`weight * x[t] + recurrent * h[t-1] + bias`."),
    (:GRU, 3, "Gated recurrent unit (Cho et al. 2014), with the reset after the product; gates r, z, n.\n\n" *
              "`h[t] = (1 - z) .* n + z .* h[t-1]`, where r and z are sigmoids of their part of `weight * x[t] + bias + " *
              "recurrent * h[t-1]`,\nand n is the tanh of its part of it with the product times r."))
    activation = name === :RNN ? ", activation=tanh" : ""
    head = "    $name(inputs => units$activation; returns=\"last\", weight_init, recurrent_init, bias_init, name)\n\n"
    @eval begin
        @doc $(head * formula * "\n\nSee `NETWORK.Recurrent` for sizes and parameters; `returns=\"sequence\"` gives all states.")
        struct $name <: Recurrent
            inputs::Int
            units::Int
            activation::String
            returns::String
            weight_init::Any
            recurrent_init::Any
            bias_init::Any
            name::Union{Nothing,String}
        end
        gates(::$name) = $gates
    end
end

function recurrent(@nospecialize(T), @nospecialize(sizes), activation::String, returns, weight_init, recurrent_init,
        bias_init, name)
    what = String(nameof(T))
    inputs, units = sizes_of(what, sizes)
    returns isa Union{AbstractString,Symbol} && String(returns) in ("last", "sequence") ||
        throw(ConfigurationError("$what: returns must be one of last, sequence, got $(repr(returns))"))
    return T(inputs, units, activation, String(returns), checked_initialiser(what, "weight_init", weight_init),
        checked_initialiser(what, "recurrent_init", recurrent_init), checked_initialiser(what, "bias_init", bias_init),
        checked_name(name))
end

RNN(@nospecialize(sizes), @nospecialize(activation=tanh); returns="last", weight_init="glorot_uniform",
    recurrent_init="glorot_uniform", bias_init="zeros", name=nothing) =
    recurrent(RNN, sizes, activation_name("RNN", activation), returns, weight_init, recurrent_init, bias_init, name)
LSTM(@nospecialize(sizes); returns="last", weight_init="glorot_uniform", recurrent_init="glorot_uniform",
    bias_init="zeros", name=nothing) =
    recurrent(LSTM, sizes, "tanh", returns, weight_init, recurrent_init, bias_init, name)
GRU(@nospecialize(sizes); returns="last", weight_init="glorot_uniform", recurrent_init="glorot_uniform",
    bias_init="zeros", name=nothing) =
    recurrent(GRU, sizes, "tanh", returns, weight_init, recurrent_init, bias_init, name)

function parameters(layer::Recurrent)
    inputs, units, width = layer.inputs, layer.units, gates(layer) * layer.units
    return ["weight" => ParameterSpec([width, inputs], layer.weight_init, inputs, units),
        "recurrent" => ParameterSpec([width, units], layer.recurrent_init, units, units),
        "bias" => ParameterSpec([width], layer.bias_init, inputs, units)]
end

function output_size(layer::Recurrent, input::Vector{Int})
    length(input) == 2 && input[1] == layer.inputs && input[2] >= 1 ||
        throw(rejected(layer, "size ($(layer.inputs), steps)", input))
    return layer.returns == "last" ? Int[layer.units] : Int[layer.units, input[2]]
end

"""Project all steps at once, then run through them."""
function forward(layer::Recurrent, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    projected = parameters["weight"] * x .+ parameters["bias"]
    steps = Tensor[projected[:, t, :] for t in 1:size(x, 2)]
    states = unrolled(layer, steps, parameters["recurrent"])
    return layer.returns == "last" ? states[end] : stack(states; dims=2)
end

"""`count` gates from the gate number `first` on, out of (gates · units, N)."""
gate(layer::Recurrent, x::Tensor, first::Int, count::Int=1) =
    x[(first-1)*layer.units+1:(first+count-1)*layer.units, :]

# Each gives the hidden states (units, N) of all steps from their projected inputs (gates · units, N).

function unrolled(layer::RNN, projected::Vector{Tensor}, recurrent::Tensor)
    states = Tensor[activated(layer.activation, projected[1])]
    for step in projected[2:end]
        push!(states, activated(layer.activation, step .+ recurrent * states[end]))
    end
    return states
end

# The first step has nothing to forget; i and f are neighbours, so one sigmoid serves both.
function unrolled(layer::LSTM, projected::Vector{Tensor}, recurrent::Tensor)
    z = projected[1]
    cell = sigmoid(gate(layer, z, 1)) .* tanh.(gate(layer, z, 3))
    states = Tensor[sigmoid(gate(layer, z, 4)) .* tanh.(cell)]
    for step in projected[2:end]
        z = step .+ recurrent * states[end]
        i_and_f, g = sigmoid(gate(layer, z, 1, 2)), tanh.(gate(layer, z, 3))
        cell = gate(layer, i_and_f, 2) .* cell .+ gate(layer, i_and_f, 1) .* g
        push!(states, sigmoid(gate(layer, z, 4)) .* tanh.(cell))
    end
    return states
end

# The first step has nothing to reset; r and z are neighbours, so one sigmoid serves both.
function unrolled(layer::GRU, projected::Vector{Tensor}, recurrent::Tensor)
    n = tanh.(gate(layer, projected[1], 3))
    states = Tensor[n .- sigmoid(gate(layer, projected[1], 2)) .* n]
    for step in projected[2:end]
        h = states[end]
        product = recurrent * h
        r_and_z = sigmoid(gate(layer, step, 1, 2) .+ gate(layer, product, 1, 2))
        n = tanh.(gate(layer, step, 3) .+ gate(layer, r_and_z, 1) .* gate(layer, product, 3))
        push!(states, n .+ gate(layer, r_and_z, 2) .* (h .- n))
    end
    return states
end

Base.show(io::IO, layer::Recurrent) = print(io, kind(layer), "(", layer.inputs, " => ", layer.units,
    layer isa RNN && layer.activation != "tanh" ? ", $(layer.activation)" : "",
    layer.returns == "last" ? "" : "; returns=\"sequence\"", ")")

LAYERS["rnn"], LAYERS["lstm"], LAYERS["gru"] = RNN, LSTM, GRU
read_layer(::Type{RNN}, line::Line, input::Vector{Int}) = RNN(features(input) => given(line, "units", Int),
    given(line, "activation", String); returns=given(line, "returns", String), name=given(line, "id", String))
read_layer(T::Type{<:Recurrent}, line::Line, input::Vector{Int}) = T(features(input) => given(line, "units", Int);
    returns=given(line, "returns", String), name=given(line, "id", String))

# Layers without parameters --------------------------------------------------------------------------------------------

"""
    Flatten()

Each sample as one vector, in its order in memory.
"""
struct Flatten <: Layer
    name::Union{Nothing,String}
end
Flatten(; name=nothing) = Flatten(checked_name(name))

only_moves(::Flatten) = true
output_size(layer::Flatten, input::Vector{Int}) = Int[prod(input)]
forward(layer::Flatten, x::Tensor, parameters::Dict{String,Tensor}, training::Bool) =
    reshape(x, prod(x.dims[1:end-1]), size(x, ndims(x)))
Base.show(io::IO, layer::Flatten) = print(io, "Flatten()")

LAYERS["flatten"] = Flatten
read_layer(::Type{Flatten}, line::Line, input::Vector{Int}) = Flatten(name=given(line, "id", String))

"""
    Reshape(lengths...)

Each sample in another size, in its order in memory: `Reshape(196, 4)` cuts 784 pixels into 4 segments.
"""
struct Reshape <: Layer
    dims::Vector{Int}
    name::Union{Nothing,String}
end
Reshape(dims::Integer...; name=nothing) =
    Reshape(Int[whole_number("Reshape", "every length", n) for n in dims], checked_name(name))

only_moves(::Reshape) = true
function output_size(layer::Reshape, input::Vector{Int})
    prod(input) == prod(layer.dims) || throw(rejected(layer, "$(prod(layer.dims)) elements", input))
    return layer.dims
end
forward(layer::Reshape, x::Tensor, parameters::Dict{String,Tensor}, training::Bool) =
    reshape(x, layer.dims..., size(x, ndims(x)))
Base.show(io::IO, layer::Reshape) = print(io, "Reshape(", join(layer.dims, ", "), ")")

LAYERS["reshape"] = Reshape
read_layer(::Type{Reshape}, line::Line, input::Vector{Int}) =
    Reshape(lengths(line, "shape")...; name=given(line, "id", String))

"""
    Activation(f)

One of `tanh`, `relu`, `sigmoid`, `softplus`, `softmax`, `identity`, or its name, on every element (softmax: over the
first axis).
"""
struct Activation <: Layer
    activation::String
    name::Union{Nothing,String}
end
Activation(@nospecialize(activation); name=nothing) =
    Activation(activation_name("Activation", activation), checked_name(name))

function output_size(layer::Activation, input::Vector{Int})
    layer.activation == "softmax" && isempty(input) && throw(rejected(layer, "size (classes, ...)", input))
    return input
end
forward(layer::Activation, x::Tensor, parameters::Dict{String,Tensor}, training::Bool) = activated(layer.activation, x)
Base.show(io::IO, layer::Activation) = print(io, "Activation(", layer.activation, ")")

LAYERS["activation"] = Activation
read_layer(::Type{Activation}, line::Line, input::Vector{Int}) =
    Activation(given(line, "activation", String); name=given(line, "id", String))

"""
    Dropout(rate; seed=0)

In training, zero each element with probability `rate` and divide the others by 1 - rate; else nothing.

Every call in training, and so every traced copy, draws from a separate stream, decided by `seed`, the layer's name in its
chain, the number of calls before and the process's rank: two layers, threads or processes never share one. A layer that
holds others may call it: it is known there by the field that it is in.
"""
mutable struct Dropout <: Layer
    rate::Float64
    seed::Int
    name::Union{Nothing,String}
    place::String  # in a layer of the chain that holds it, such as "dropout" or "blocks.1.dropout"; the chain sets it
    rank::Int  # which of the processes that train together this is; the trainer sets it
    calls::Int
    traced::Vector{Tuple{String,Generator}}  # of the copies traced last the scope and the stream, which a trainer takes over
end

function Dropout(@nospecialize(rate); seed=0, name=nothing)
    rate isa Real && !(rate isa Bool) && 0 <= rate < 1 ||
        throw(ConfigurationError("Dropout: rate must be a number >= 0 and < 1, got $(repr(rate))"))
    check_seed(seed)
    return Dropout(Float64(rate), Int(seed), checked_name(name), "", 0, 0, Tuple{String,Generator}[])
end

# Other layers cannot be changed at all; and a trainer has planned its steps by these.
function Base.setproperty!(layer::Dropout, name::Symbol, value)
    name in (:rate, :seed) && throw(ConfigurationError("a dropout layer keeps its $name; make a new one"))
    return setfield!(layer, name, convert(fieldtype(Dropout, name), value))
end

AD.watched_parts(::Dropout) = ()  # the engine changes it, and its settings stay

output_size(layer::Dropout, input::Vector{Int}) = input
function forward(layer::Dropout, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    training || return x
    layer.calls += 1
    scope = AD.state().scope
    generator = new_stream(layer, scope, layer.calls)
    x.data === nothing && push!(layer.traced, (scope, generator))
    return dropout(x, layer.rate, generator)
end

"""The stream of this number of the layer in this place of a chain."""
new_stream(layer::Dropout, scope::String, number::Int) =
    Generator(rand(stream(layer.seed, string(scope, isempty(layer.place) ? "" : ".$(layer.place)", "/", number,
        layer.rank == 0 ? "" : "/$(layer.rank)")), Int64))
Base.show(io::IO, layer::Dropout) = print(io, "Dropout(", layer.rate, ")")

"""
The layers of a kind among these and in what they hold, each with its place there; it is "" among these. What they hold is looked for
in chains, containers, structs of the user's and what functions capture. Throws a `ConfigurationError` for several in a set.
"""
function held_layers(layers::Vector{Layer}, @nospecialize(kind::Type))
    found = Pair{String,Layer}[]
    seen = Base.IdSet{Any}()
    for layer in layers
        layer isa kind && find_layers!(found, seen, layer, "", kind)
    end
    for layer in layers
        find_layers!(found, seen, layer, "", kind)
    end
    return found
end

function find_layers!(found::Vector{Pair{String,Layer}}, seen::Base.IdSet{Any}, @nospecialize(value), place::String,
        @nospecialize(kind::Type))
    (value isa Union{Number,AbstractString,Char} || value in seen) && return nothing
    push!(seen, value)
    value isa kind && push!(found, place => value)
    if value isa Layer
        for name in fieldnames(typeof(value))
            isdefined(value, name) && find_layers!(found, seen, getfield(value, name), within(place, name), kind)
        end
    elseif value isa Chain
        for (id, layer) in zip(value.ids, value.layers)
            find_layers!(found, seen, layer, within(place, id), kind)
        end
    elseif value isa Union{Tuple,NamedTuple,AbstractArray,AbstractDict}
        eltype(value) <: Union{Number,AbstractString} && return nothing
        for name in (value isa AbstractArray ? eachindex(IndexLinear(), value) : keys(value))
            value isa AbstractArray && !isassigned(value, name) && continue
            find_layers!(found, seen, value[name], within(place, name), kind)
        end
    elseif value isa AbstractSet
        count(part -> part isa Layer, value) > 1 &&
            throw(ConfigurationError("a layer holds others in a set, which has no order; hold them in a vector"))
        foreach(((i, part),) -> find_layers!(found, seen, part, within(place, i), kind), enumerate(value))
    else
        parts = AD.watched_parts(value)  # of an engine's object those that are a layer's own
        parts === nothing || return foreach(part -> find_layers!(found, seen, part, place, kind), parts)
        for name in fieldnames(typeof(value))
            isdefined(value, name) && find_layers!(found, seen, getfield(value, name), within(place, name), kind)
        end
    end
    return nothing
end

"""Run `f()`, which traces layers for other reasons than to train: the streams of their dropout layers stay as they are."""
function tracing_aside(@nospecialize(f), layers::Vector{Layer})
    dropouts = Dropout[found for (_, found) in held_layers(layers, Dropout)]
    before = Tuple{Int,Int}[(dropout.calls, length(dropout.traced)) for dropout in dropouts]
    try
        return f()
    finally
        for (dropout, (calls, copies)) in zip(dropouts, before)
            dropout.calls = calls
            resize!(dropout.traced, copies)
        end
    end
end

within(place::String, @nospecialize(name)) = isempty(place) ? string(name) : "$place.$name"

LAYERS["dropout"] = Dropout
read_layer(::Type{Dropout}, line::Line, input::Vector{Int}) =
    Dropout(given(line, "rate", Float64); name=given(line, "id", String))

# Radial basis functions -----------------------------------------------------------------------------------------------

"""
    RBF(inputs => units; centers_init="normal" => (std=1,), beta_init="ones", name=nothing)

Gaussian radial basis functions on the first axis of x, `exp(-beta[j] * sum(abs2, x - centers[:, j]))`: (inputs, ...) to
(units, ...).

Parameters: `centers` (inputs, units); `beta` (units,), the inverse squared widths.
"""
struct RBF <: Layer
    inputs::Int
    units::Int
    centers_init::Any
    beta_init::Any
    name::Union{Nothing,String}
end

function RBF(@nospecialize(sizes); centers_init="normal" => (std=1.0,), beta_init="ones", name=nothing)
    inputs, units = sizes_of("RBF", sizes)
    return RBF(inputs, units, checked_initialiser("RBF", "centers_init", centers_init),
        checked_initialiser("RBF", "beta_init", beta_init), checked_name(name))
end

parameters(layer::RBF) = [
    "centers" => ParameterSpec([layer.inputs, layer.units], layer.centers_init, layer.inputs, layer.units),
    "beta" => ParameterSpec([layer.units], layer.beta_init, layer.inputs, layer.units)]

function output_size(layer::RBF, input::Vector{Int})
    !isempty(input) && input[1] == layer.inputs || throw(rejected(layer, "size ($(layer.inputs), ...)", input))
    return Int[layer.units; input[2:end]]
end

# ‖x - c‖² from the differences themselves: as ‖x‖² - 2 x ∙ c + ‖c‖² it would cancel, and could be negative.
function forward(layer::RBF, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    apart = reshape(x, layer.inputs, 1, x.dims[2:end]...) .- parameters["centers"]
    distance = reshape(sum(apart .^ 2; dims=1), layer.units, x.dims[2:end]...)
    return exp.(.-(parameters["beta"] .* distance))
end
Base.show(io::IO, layer::RBF) = print(io, "RBF(", layer.inputs, " => ", layer.units, ")")

LAYERS["rbf"] = RBF
read_layer(::Type{RBF}, line::Line, input::Vector{Int}) =
    RBF(features(input) => given(line, "units", Int); name=given(line, "id", String))
