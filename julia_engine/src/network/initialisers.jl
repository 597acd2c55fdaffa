# Initial values of parameters: a table of distributions and the streams they are drawn from.
#
# Every parameter has its own random stream, which depends on the seed and on the parameter's name and on nothing else:
# adding, removing or reordering layers leaves the initial values of the others as they were. Values are drawn in Float64
# and rounded once. The numpy engine draws other numbers from the same distributions; where two engines are to start
# alike, weights are loaded.

"""
    ParameterSpec(dims, initialiser, fan_in, fan_out, trainable=true)

What a layer says about one of its parameters before it exists. One that is not `trainable` has no gradient, and the
optimizer leaves it alone: values that the user wants kept, or a layer's own state.

`fan_in` and `fan_out` are the numbers of connections into and out of one unit. For the stacked gates of an LSTM or GRU
they are those of a single gate, since each gate is a separate matrix.
"""
struct ParameterSpec
    dims::Vector{Int}
    initialiser::Any
    fan_in::Int
    fan_out::Int
    trainable::Bool
end
ParameterSpec(dims, initialiser, fan_in, fan_out) = ParameterSpec(dims, initialiser, fan_in, fan_out, true)

Base.length(spec::ParameterSpec) = prod(spec.dims)

spread(random, dims, low, high) = low .+ (high - low) .* rand(random, dims...)

"""Uniform on ±sqrt(6 / (fan_in + fan_out)): Glorot and Bengio 2010, eq. 16 (Xavier)."""
glorot_uniform(random, dims, fan_in, fan_out) =
    (limit = sqrt(6 / (fan_in + fan_out)); spread(random, dims, -limit, limit))

"""Normal with variance 2 / (fan_in + fan_out): Glorot and Bengio 2010, eq. 12. Not truncated."""
glorot_normal(random, dims, fan_in, fan_out) = sqrt(2 / (fan_in + fan_out)) .* randn(random, dims...)

"""Uniform on ±sqrt(6 / fan_in), which has the variance of `he_normal`."""
he_uniform(random, dims, fan_in, fan_out) = (limit = sqrt(6 / fan_in); spread(random, dims, -limit, limit))

"""Normal with variance 2 / fan_in: He et al. 2015, eq. 10. Not truncated."""
he_normal(random, dims, fan_in, fan_out) = sqrt(2 / fan_in) .* randn(random, dims...)

# These three are reached through the table only: their names are too common to take from the user.
function init_uniform(random, dims, fan_in, fan_out; low::Real=-0.1, high::Real=0.1)
    low <= high || throw(ConfigurationError("initialiser uniform: expected low <= high, got low = $low, high = $high"))
    return spread(random, dims, low, high)
end
function init_normal(random, dims, fan_in, fan_out; mean::Real=0.0, std::Real=0.1)
    std >= 0 || throw(ConfigurationError("initialiser normal: expected std >= 0, got std = $std"))
    return mean .+ std .* randn(random, dims...)
end
init_zeros(random, dims, fan_in, fan_out) = zeros(dims...)
init_ones(random, dims, fan_in, fan_out) = ones(dims...)

"""Initialisers by name: the function, and the options that it takes."""
const INITIALISERS = Dict{String,Tuple{Function,Vector{Symbol}}}(
    "glorot_uniform" => (glorot_uniform, Symbol[]),
    "glorot_normal" => (glorot_normal, Symbol[]),
    "he_uniform" => (he_uniform, Symbol[]),
    "he_normal" => (he_normal, Symbol[]),
    "uniform" => (init_uniform, [:low, :high]),
    "normal" => (init_normal, [:mean, :std]),
    "zeros" => (init_zeros, Symbol[]),
    "ones" => (init_ones, Symbol[]),
)

"""
The function and the options that an initialiser stands for: a name (`"he_normal"`), a name with options (`"normal" =>
(std=0.01,)`), or your own function, `f(random, dims, fan_in, fan_out)`.

Throws a `ConfigurationError` for an unknown name, an unknown option, or an option that is not a finite number.
"""
function resolve(@nospecialize(initialiser))
    initialiser isa Function && return initialiser, NamedTuple()
    name, options = initialiser isa Pair ? (initialiser.first, initialiser.second) : (initialiser, NamedTuple())
    found = name isa Union{AbstractString,Symbol} ? get(INITIALISERS, String(name), nothing) : nothing
    found === nothing && throw(ConfigurationError(
        "unknown initialiser $(repr(name)); there are: $(join(sort!(collect(keys(INITIALISERS))), ", "))"))
    f, known = found
    options isa NamedTuple || throw(ConfigurationError(
        "initialiser $name: expected options such as (std=0.01,), got $(repr(options))"))
    for (key, value) in pairs(options)
        key in known || throw(ConfigurationError("initialiser $name has no option $key; it takes " *
            (isempty(known) ? "none" : join(known, ", "))))
        value isa Real && !(value isa Bool) && isfinite(value) ||
            throw(ConfigurationError("initialiser $name: $key must be a finite number, got $(repr(value))"))
    end
    return f, options
end

"""The random stream of one named part of a model, decided by the seed and the name alone."""
stream(seed::Integer, name::AbstractString) = MersenneTwister(UInt32[stream_words(seed); codeunits(String(name))])

stream_words(seed::Integer) = (check_seed(seed); UInt32[seed & 0xffffffff, (seed >> 32) & 0xffffffff])

check_seed(seed::Integer) = !(seed isa Bool) && 0 <= seed <= typemax(Int64) ||
    throw(ConfigurationError("a seed must be an integer >= 0, got $(repr(seed))"))
check_seed(@nospecialize(seed)) = throw(ConfigurationError("a seed must be an integer >= 0, got $(repr(seed))"))

"""Draw values for `spec` from `random` into `array`."""
function initialise!(array, spec::ParameterSpec, random)
    f, options = resolve(spec.initialiser)
    if spec.initialiser isa Function
        array .= f(random, spec.dims, spec.fan_in, spec.fan_out; options...)
    else  # the same numbers as one row: nothing is compiled anew for each number of axes
        vec(array) .= f(random, Int[length(spec)], spec.fan_in, spec.fan_out; options...)
    end
    return array
end
