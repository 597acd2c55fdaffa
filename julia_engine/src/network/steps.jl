# How one mini-batch becomes a loss and a gradient: by replay, eagerly, or sample by sample.
#
# Replay is the engine. The other two are what it is measured against in an ablation.

"""
Where samples and targets lie. Rows of `order`, token ids and classes are counted from `base`: 1 in Julia, 0 from Python.
Arrays behind the addresses are kept alive by the caller.
"""
struct Data
    samples::Int
    x::Ptr{UInt8}
    x_bytes::Int  # of one sample
    ids::Bool  # samples are Int64 token ids
    y::Ptr{UInt8}
    y_bytes::Int
    classes::Bool  # targets are Int64
    order::Ptr{Int64}  # null: as they are
    rows::Int  # how many `order` names
    base::Int
end

Data(x::Array, y::Array, classes::Bool, order::Vector{Int64}, samples::Int) = Data(samples, address(x),
    sizeof(x) ÷ max(samples, 1), eltype(x) === Int64, address(y), sizeof(y) ÷ max(samples, 1), classes, pointer(order),
    length(order), 1)

@inline row(data::Data, i::Int) = data.order == C_NULL ? i - 1 : unsafe_load(data.order, i) - data.base

"""Copy the samples and targets that are at `first + 1 : first + count` of the order."""
@inline function gather!(x::Ptr{UInt8}, y::Ptr{UInt8}, data::Data, first::Int, count::Int)
    for i in 1:count
        r = row(data, first + i)
        copy_items!(x + (i - 1) * data.x_bytes, data.x + r * data.x_bytes, data.x_bytes, data.ids, data.base)
        data.y == C_NULL && continue
        copy_items!(y + (i - 1) * data.y_bytes, data.y + r * data.y_bytes, data.y_bytes, data.classes, data.base)
    end
    return nothing
end

"""Copy bytes; if they are integers that count from `base`, they count from 1 thereafter."""
@inline function copy_items!(to::Ptr{UInt8}, from::Ptr{UInt8}, bytes::Int, counts::Bool, base::Int)
    counts && base != 1 || return copy_bytes!(to, from, bytes)
    there, here = Ptr{Int64}(to), Ptr{Int64}(from)
    @inbounds @simd ivdep for j in 1:bytes>>3
        unsafe_store!(there, unsafe_load(here, j) + (1 - base), j)
    end
    return nothing
end

@inline copy_bytes!(to::Ptr{UInt8}, from::Ptr{UInt8}, n::Int) =
    (ccall(:memcpy, Ptr{Cvoid}, (Ptr{Cvoid}, Ptr{Cvoid}, Csize_t), to, from, n); nothing)

address(x::Array) = Ptr{UInt8}(AD.start_of(x))

"""
The gradient of a matrix of which a step looks up some columns: those columns' gradients, as the tape leaves them, one for
each lookup. `first` is 0 between steps; in one, for each column of the matrix, the number of its first lookup.
"""
struct Columns{T}
    offset::Int  # of the matrix in the parameter vector
    height::Int
    width::Int
    left_out::Int  # the column without a gradient, or 0
    values::Ptr{T}
    ids::Ptr{Int64}
    count::Int
    first::Vector{Int32}
end

"""Add the gradients of each column up in the place of its first lookup."""
@inline function collect!(c::Columns{T}) where {T}
    first, height = c.first, c.height
    @inbounds for j in 1:c.count
        id = unsafe_load(c.ids, j)
        id == c.left_out && continue
        f = Int(first[id])
        if f == 0
            first[id] = j % Int32
        else
            add_scaled!(c.values + sizeof(T) * height * (f - 1), c.values + sizeof(T) * height * (j - 1), one(T), 1, height)
        end
    end
    return nothing
end

"""
A part of a batch: its tape, its place in the batch, and its gradient vector, with the gradients of `columns` apart from
it. Its loss counts by its share of the batch. `states` are layers' new states: where they go, where they are, how many.
`batch_sums` has the sums over all parts, if there are any; `shared` the tape's code for threads that share the products of a
whole batch.
"""
struct Shard{T}
    tape::Tape
    x::Ptr{UInt8}
    y::Ptr{UInt8}
    first::Int  # samples of the batch before this part
    count::Int
    loss::Ptr{T}
    gradient::Vector{T}
    columns::Vector{Columns{T}}
    dense::Vector{Tuple{Int,Int}}  # the segments of the gradient that are not kept by columns
    absent::Vector{Tuple{Int,Int}}  # those that the loss of this step does not depend on: other steps may have written there
    states::Vector{Tuple{Ptr{T},Ptr{T},Int}}
    batch_sums::Union{Nothing,BatchSums}
    large_products::Bool  # large enough for several threads of BLAS
    shared::Union{Nothing,AD.Kernels.SharedCode{T}}
end

"""The instructions of a step on elements of one type."""
instructions(::Type{T}, step::AD.TapeStep) where {T} = T === Float32 ? step.singles : step.doubles

"""The same part of a batch with its products shared out to threads; `nothing` where other products take most of the work."""
function with_shared_products(shard::Shard{T}, threads::Int) where {T}
    techniques = shard.tape.techniques
    techniques.preallocate && techniques.concrete || return nothing
    shared = AD.Kernels.shared_code(T, shard.tape.code, UnitRange{Int}[instructions(T, step) for step in shard.tape.steps], threads)
    shared === nothing && return nothing
    return Shard{T}(shard.tape, shard.x, shard.y, shard.first, shard.count, shard.loss, shard.gradient, shard.columns,
        shard.dense, shard.absent, shard.states, shard.batch_sums, shard.large_products, shared)
end

"""Plan a part of a batch; with `sparse`, gradients of matrices of which columns are looked up are kept as `columns`."""
function Shard{T}(chain::Chain, objective, input::Vector{Int}, target::Vector{Int}, target_type::DataType, first::Int,
        count::Int, samples::Int, gradient::Vector{T}, techniques::Techniques, sparse::Bool,
        batch_sums::Union{Nothing,BatchSums}=nothing, thread::Int=1) where {T}
    parameters = chain.parameters
    layout = parameters.layout
    inputs = Tensor[AD.symbol(takes_ids(chain) ? Int64 : T, push!(copy(input), count), "x"),
        AD.symbol(target_type, push!(copy(target), count), "y")]
    found, news = Any[], Tuple{Int,Tensor}[]
    function traced_part()
        value = objective(applied(chain, parameters.tensors, inputs[1], true, news), inputs[2])
        # A loss that couples the batch divides by all of it.
        count == samples || couples_batch(objective) || (value = value .* (count / samples))
        append!(found, gradients(Tensor[value], Tensor[AD.literal(T, 1)], trained_tensors(parameters)))
        return value
    end
    value, nodes = AD.@entering techniques=techniques tracing_part(() -> AD.tracing(traced_part), batch_sums, thread, count)
    outputs, results, lookups, absent = Tensor[value], Dict{Int,Any}(), Tuple{Int,Tensor,Int}[], Tuple{Int,Int}[]
    parts = memories(trainable_part(layout), gradient)
    for i in eachindex(found)
        g = found[i]
        if g === nothing
            push!(absent, (layout.offsets[i] + 1, layout.offsets[i] + prod(layout.dims[i])))
        elseif sparse && g.op === AD.EMBEDDING_GRADIENT
            push!(lookups, (i, g, length(outputs)))
            append!(outputs, g.inputs)
        else
            push!(outputs, g)
            results[length(outputs)] = parts[i]
        end
    end
    first_state = length(outputs)
    append!(outputs, Tensor[new for (_, new) in news])
    tape = AD.@entering winograd=techniques.winograd Tape(AD.traced(nodes, inputs, outputs); results=results, techniques=techniques)
    columns = Columns{T}[Columns{T}(layout.offsets[i], layout.dims[i][1], layout.dims[i][2], g.attrs.padding_index::Int,
        Ptr{T}(address(tape.outputs[k+1])), Ptr{Int64}(address(tape.outputs[k+2])),
        length(tape.outputs[k+2]::Array{Int64}), AD.zeroed!(Vector{Int32}(undef, layout.dims[i][2])))
                         for (i, g, k) in lookups]
    states = Tuple{Ptr{T},Ptr{T},Int}[(Ptr{T}(address(parameters.vector)) + sizeof(T) * layout.offsets[i],
        Ptr{T}(address(tape.outputs[first_state+k])), prod(layout.dims[i])) for (k, (i, _)) in enumerate(news)]
    return Shard{T}(tape, address(tape.inputs[1]), address(tape.inputs[2]), first, count,
        elements_of(tape.outputs[1]::Array{T,0}), gradient, columns, dense_segments(layout, columns), absent, states, batch_sums,
        AD.Kernels.multiplications_per_call(tape.code) >= LEAST_SHARED, nothing)
end

"""Multiplications of a product from which on a second thread of BLAS saves more than it costs."""
const LEAST_SHARED = 2^21

"""
BLAS threads for the steps of these parts of a batch: all for a whole batch of large products that no others share, else one.
Between products the other threads of BLAS wait busily, which slows the first where they share a core: a step of small
products took twice as long.
It follows from sizes alone, so that every run gives the same numbers.
"""
blas_threads(shards::Vector{<:Shard}, threads::Int) =
    length(shards) == 1 && shards[1].large_products && shards[1].shared === nothing ? threads : 1

"""
How often each further thread moves a gradient that all threads have: its products read the weight twice and write its gradient,
and the sum reads two gradients and writes one.
"""
const GRADIENT_MOVES = 6

"""Multiplications of a product that cost about as much as moving a byte of a gradient."""
const MULTIPLICATIONS_PER_BYTE = 2

"""
Whether one part of the batch for each thread takes less time than the whole batch, of which the threads share the large products
or, where `shared` is false, do not: where there are convolutions, which do much with few bytes, or where all
that only splitting spreads over threads takes longer than summing the gradients does. It follows from sizes alone.
"""
function splitting_pays(shards::Vector{Shard{T}}; shared::Bool=true) where {T}
    steps, code = shards[1].tape.steps, AD.Kernels.of_type(shards[1].tape.code, T)
    any(step -> occursin("conv", step.equation.op.name), steps) && return true
    kept_apart = sum(Int[c.height * c.width for c in shards[1].columns])
    summed = (length(shards[1].gradient) - kept_apart) * sizeof(T)
    products, spread = AD.Kernels.products(T), 0.0
    for step in steps
        range = instructions(T, step)
        if !shared
            multiplied = sum(Float64[AD.Kernels.multiplications(code[i]) for i in range if code[i].kernel in products])
            spread += multiplied / MULTIPLICATIONS_PER_BYTE
        end
        if step.equation.op.view === nothing && AD.Kernels.product_of(code, range, products) === nothing
            spread += AD.bytes_moved(step)
        end
    end
    return spread > GRADIENT_MOVES * summed
end

"""Gather the rows of this part of the batch that begins after `start` rows, and replay."""
@inline function run!(shard::Shard, data::Data, start::Int)
    begin!(shard, data, start)
    AD.run!(shard.tape)
    return nothing
end

"""Gather the rows of this part of the batch, and clear what its tape leaves as it is."""
@inline function begin!(shard::Shard, data::Data, start::Int)
    gather!(shard.x, shard.y, data, start + shard.first, shard.count)
    for (a, b) in shard.absent
        clear!(shard.gradient, a, b)
    end
    return nothing
end

"""
What thread `k` of a team does of a whole batch whose products are shared: its parts of these, and as the first one all that
is between them. False when one of the threads will never come.
"""
@inline function run!(shard::Shard{T}, shared::AD.Kernels.SharedCode{T}, data::Data, start::Int, team::Team, k::Int) where {T}
    k == 1 && begin!(shard, data, start)
    for j in 1:length(shared.stages)
        k == 1 && GC.@preserve shard AD.Kernels.execute_stage!(shared, j)
        j == length(shared.stages) && break
        barrier!(team) || return false
        AD.Kernels.execute_product!(shared, k, j)
        barrier!(team) || return false
    end
    return true
end

"""Let the sums over a batch be those of the threads of this team."""
function sum_in!(team::Team, batches::Vector{<:Shard}...)
    for shards in batches, shard in shards
        shard.batch_sums === nothing || (shard.batch_sums.team = team)
    end
end

"""Whether new states of layers may be of this part of a batch: of its samples, or of their number, and not of sums over all."""
function keeps_of_its_samples(shard::Shard)
    isempty(shard.states) && return false
    program = shard.tape.program
    of_samples = Set{UInt}(objectid(x) for x in program.inputs[1:2])  # samples and targets
    of_sums = Set{UInt}()
    for e in program.equations
        is_sum = e.op === SUM_OF_PARTS
        !is_sum && any(x -> objectid(x) in of_samples, e.inputs) && union!(of_samples, map(objectid, e.outputs))
        (is_sum || any(x -> objectid(x) in of_sums, e.inputs)) && union!(of_sums, map(objectid, e.outputs))
    end
    return any(x -> objectid(x) in of_samples || !(objectid(x) in of_sums), program.outputs[end-length(shard.states)+1:end])
end

"""Let the new states of layers take the place of the old ones."""
@inline function keep_states!(shard::Shard{T}) where {T}
    for (to, from, n) in shard.states
        copy_bytes!(Ptr{UInt8}(to), Ptr{UInt8}(from), n * sizeof(T))
    end
    return nothing
end

"""
One shard per thread of the team, as many as the batch allows. The gradients of all but the first go into separate
vectors, of which the part for `columns` is never touched.
"""
function make_shards(::Type{T}, chain::Chain, objective, input::Vector{Int}, target::Vector{Int}, target_type::DataType,
        samples::Int, threads::Int, gradient::Vector{T}, techniques::Techniques, sparse::Bool=false) where {T}
    n = min(threads, samples)
    ends = Int[samples * k ÷ n for k in 0:n]
    batch_sums = n > 1 && (couples_batch(chain) || couples_batch(objective)) ? BatchSums(n, samples) : nothing
    return Shard{T}[Shard{T}(chain, objective, input, target, target_type, ends[k], ends[k+1] - ends[k], samples,
        k == 1 ? gradient : new_gradient(T, chain.parameters.layout),
        techniques, sparse, batch_sums, k) for k in 1:n]
end

"""Set what lies between the tensors to zero: every number of a gradient vector is looked at."""
function cleared(layout::Layout, gradient::Vector)
    for i in 1:layout.trained_tensors
        stop = i < layout.trained_tensors ? layout.offsets[i+1] : layout.trained
        clear!(gradient, layout.offsets[i] + prod(layout.dims[i]) + 1, stop)
    end
    return gradient
end

clear!(gradient::Vector, from::Int, to::Int) = (for i in from:to
    gradient[i] = 0
end)

# Without replay, or sample by sample: for ablations ---------------------------------------------------------------------

"""
Record, differentiate and forget at every step, as an engine without a graph to replay does; return the loss, and the new states of
layers, which are to be kept once the step has been made.
"""
function eager_step!(chain::Chain, objective, x::Array, y::Array, gradient::Vector, techniques::Techniques)
    news = Tuple{Int,Tensor}[]
    loss, found = AD.@entering techniques=techniques begin
        loss = objective(applied(chain, chain.parameters.tensors, Constant(x), true, news), Constant(y))
        seed = AD.literal(loss.eltype, 1)
        loss, no_grad(() -> gradients(Tensor[loss], Tensor[seed], trained_tensors(chain.parameters)))
    end
    check_states(news)
    fill!(gradient, 0)
    for (g, part) in zip(found, views(trainable_part(chain.parameters.layout), gradient))
        g === nothing || (part .= value(g))
    end
    return Float64(item(loss)), news
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
