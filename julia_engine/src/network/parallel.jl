# One training on several processes: each computes a part of every mini-batch, and the gradients are added up.

"""
    Communicator(rank, size, add!)

The processes that train together: how many they are, and which of them this is, from 0 on. All have the same parameters,
data and order; each trains on its part of every mini-batch. `add!(vector)` makes every element the sum over all processes,
in place. With MPI.jl: `Communicator(MPI.Comm_rank(c), MPI.Comm_size(c), v -> MPI.Allreduce!(v, +, c))`.
"""
struct Communicator
    rank::Int
    size::Int
    add!::Any

    function Communicator(rank::Integer, size::Integer, add!)
        0 <= rank < size || throw(ConfigurationError(
            "Communicator: rank must be from 0 to size - 1, got rank $rank of size $size"))
        return new(rank, size, add!)
    end
end

"""A process's part of a mini-batch: the samples before it, how many it has, and what its mean gradient counts."""
struct Part
    first::Int
    count::Int
    weight::Float64
end

part(::Nothing, samples::Int) = Part(0, samples, 1.0)

"""
Parts differ by one sample at most. Of a mini-batch with fewer samples than processes, those left over compute the last one,
for nothing.
"""
function part(c::Communicator, samples::Int)
    each, more = divrem(samples, c.size)
    count = each + (c.rank < more)
    count == 0 && return Part(samples - 1, 1, 0.0)
    return Part(c.rank * each + min(c.rank, more), count, count / samples)
end

"""Add all processes' gradients up, each by its part; NaN where a part is not finite, so that all of them see it."""
function exchange!(c::Communicator, gradient::Vector{T}, weight::Float64, finite::Bool) where {T}
    isempty(gradient) && return nothing
    weight == 1 || scale!(elements_of(gradient), T(weight), 1, length(gradient))
    finite || (gradient[1] = T(NaN))
    c.add!(gradient)
    return nothing
end
