# Random masks. An op here draws anew from its generator every time it is computed, eagerly and in a replay.

"""
    Generator(seed)

A stream of random numbers: a key and a counter that every draw moves on. Its state lies in two integers, so that a
replayed instruction draws without allocating. Not for use by two threads at a time.
"""
struct Generator
    state::Vector{Int64}
end
Generator(seed::Integer) = Generator(Int64[seed % Int64, 0])

infer_mask(inputs, attrs) = (inputs[1].dims, check_float(inputs[1].eltype))

function forward_mask(p, out, inputs, attrs)
    rate, generator = attrs.rate, attrs.generator
    length(out) == 0 && return nothing
    drawn = is_dense(out) ? out : scratch!(p, out.eltype, out.dims)
    memory = Memory(generator.state)
    push!(p.roots, memory)
    emit!(p, out.eltype, :dropout_mask, (drawn.address, NOWHERE, NOWHERE, NOWHERE), memory.address,
        (length(out), 1, 1, 1), (NONE, NONE, NONE, NONE), NONE, (Float64(rate), 0.0))
    drawn === out || emit_copy!(p, out, drawn)
    return nothing
end

const DROPOUT_MASK = register!(Op("dropout_mask", infer_mask; forward=forward_mask, random=true, constant=true,
    attrs=[:rate, :generator], doc="0 with probability rate, else 1 / (1 - rate), in the shape of x"))

"""
    dropout(x, rate, generator)

Zero each element with probability `rate` and scale the others by 1 / (1 - rate).

Source: Srivastava et al., "Dropout", JMLR 15 (2014), in the inverted form that needs nothing at evaluation.
"""
function dropout(x::Tensor, rate::Real, generator::Generator)
    0 <= rate < 1 ||
        throw(ConfigurationError("dropout: the rate must be at least 0 and below 1, got $rate"))
    return rate == 0 ? x : x .* apply(DROPOUT_MASK, Tensor[x], attributes(:rate => Float64(rate), :generator => generator))
end
