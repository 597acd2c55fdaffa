# How one mini-batch becomes a loss and a gradient: by replay, eagerly, or sample by sample.
#
# Replay is the engine. The other two are what it is measured against in an ablation.

"""
Where samples and targets lie. Rows of `order` and classes are counted from `base`: 1 in Julia, 0 from Python. Arrays
behind the addresses are kept alive by the caller.
"""
struct Data
    samples::Int
    x::Ptr{UInt8}
    x_bytes::Int  # of one sample
    y::Ptr{UInt8}
    y_bytes::Int
    classes::Bool  # targets are Int64
    order::Ptr{Int64}  # null: as they stand
    rows::Int  # how many `order` names
    base::Int
end

Data(x::Array, y::Array, classes::Bool, order::Vector{Int64}, samples::Int) = Data(samples, Ptr{UInt8}(pointer(x)),
    sizeof(x) ÷ max(samples, 1), Ptr{UInt8}(pointer(y)), sizeof(y) ÷ max(samples, 1), classes, pointer(order),
    length(order), 1)

@inline row(data::Data, i::Int) = data.order == C_NULL ? i - 1 : unsafe_load(data.order, i) - data.base

"""Copy the samples and targets that stand at `first + 1 : first + count` of the order."""
@inline function gather!(x::Ptr{UInt8}, y::Ptr{UInt8}, data::Data, first::Int, count::Int)
    for i in 1:count
        r = row(data, first + i)
        copy_bytes!(x + (i - 1) * data.x_bytes, data.x + r * data.x_bytes, data.x_bytes)
        data.y == C_NULL && continue
        if data.classes
            to, from = Ptr{Int64}(y + (i - 1) * data.y_bytes), Ptr{Int64}(data.y + r * data.y_bytes)
            for j in 1:data.y_bytes>>3
                unsafe_store!(to, unsafe_load(from, j) + (1 - data.base), j)
            end
        else
            copy_bytes!(y + (i - 1) * data.y_bytes, data.y + r * data.y_bytes, data.y_bytes)
        end
    end
    return nothing
end

@inline copy_bytes!(to::Ptr{UInt8}, from::Ptr{UInt8}, n::Int) =
    (ccall(:memcpy, Ptr{Cvoid}, (Ptr{Cvoid}, Ptr{Cvoid}, Csize_t), to, from, n); nothing)

address(x::Array) = Ptr{UInt8}(pointer(x))

"""
A part of a batch: its tape, its place in the batch, and its gradient vector. Its loss counts by its share of the batch.
"""
struct Shard{T}
    tape::Tape
    x::Ptr{UInt8}
    y::Ptr{UInt8}
    first::Int  # samples of the batch before this part
    count::Int
    loss::Ptr{T}
    gradient::Vector{T}
end

function Shard{T}(chain::Chain, objective, input::Vector{Int}, target::Vector{Int}, target_type::DataType, first::Int,
        count::Int, samples::Int, gradient::Vector{T}, techniques::Techniques) where {T}
    parameters = chain.parameters
    inputs = Tensor[AD.symbol(T, Int[input; count], "x"), AD.symbol(target_type, Int[target; count], "y")]
    found = Any[]
    value, nodes = AD.tracing() do
        value = objective(applied(chain, parameters.tensors, inputs[1], true), inputs[2])
        count == samples || (value = value .* (count / samples))
        append!(found, gradients(Tensor[value], Tensor[AD.literal(T, 1)], parameters.tensors))
        value
    end
    outputs, results = Tensor[value], Dict{Int,Any}()
    for (g, part) in zip(found, views(parameters.layout, gradient))
        g === nothing && continue
        push!(outputs, g)
        results[length(outputs)] = part
    end
    tape = Tape(AD.prune!(Graph(copy(inputs), outputs, nodes)); results=results, techniques=techniques)
    return Shard{T}(tape, address(tape.inputs[1]), address(tape.inputs[2]), first, count, pointer(tape.outputs[1]::Array{T,0}),
        gradient)
end

"""Gather the rows of this part of the batch that begins after `start` rows, and replay."""
@inline function run!(shard::Shard, data::Data, start::Int)
    gather!(shard.x, shard.y, data, start + shard.first, shard.count)
    AD.run!(shard.tape)
    return nothing
end

"""
One shard per thread of the team, as many as the batch allows. The gradients of all but the first go into vectors of their
own.
"""
function make_shards(::Type{T}, chain::Chain, objective, input::Vector{Int}, target::Vector{Int}, target_type::DataType,
        samples::Int, threads::Int, gradient::Vector{T}, techniques::Techniques) where {T}
    n = min(threads, samples)
    ends = Int[samples * k ÷ n for k in 0:n]
    return Shard{T}[Shard{T}(chain, objective, input, target, target_type, ends[k], ends[k+1] - ends[k], samples,
        k == 1 ? gradient : zeros(T, length(gradient)), techniques) for k in 1:n]
end

# Without replay, or sample by sample: for ablations ---------------------------------------------------------------------

"""Record, differentiate and forget at every step, as an engine without a graph to replay does; return the loss."""
function eager_step!(chain::Chain, objective, x::Array, y::Array, gradient::Vector)
    loss = objective(applied(chain, chain.parameters.tensors, Constant(x), true), Constant(y))
    seed = AD.literal(loss.eltype, 1)
    found = no_grad(() -> gradients(Tensor[loss], Tensor[seed], chain.parameters.tensors))
    fill!(gradient, 0)
    for (g, part) in zip(found, views(chain.parameters.layout, gradient))
        g === nothing || (part .= value(g))
    end
    return Float64(item(loss))
end

"""One pass for each sample of the batch, the gradients accumulated, as without vectorisation; return the loss."""
function samples_step!(shard::Shard{T}, data::Data, start::Int, count::Int, gradient::Vector{T}) where {T}
    fill!(gradient, 0)
    loss = 0.0
    for i in 0:count-1
        run!(shard, data, start + i)
        gradient .+= shard.gradient
        loss += unsafe_load(shard.loss)
    end
    gradient ./= count
    return loss / count
end
