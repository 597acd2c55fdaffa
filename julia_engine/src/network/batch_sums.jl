# Sums over a batch whose samples are split over threads: what batch normalisation needs of the other threads' samples.
#
# Each thread replays its own tape. Where a layer sums over the batch, the tapes wait at a barrier: every one writes its
# part of the sum, waits for the others, and adds up all parts in the same order, so that all have the same bits.

"""
Where the tapes of all threads, one for each part of a batch of `samples`, leave parts of sums and add them. `team` are the
threads that wait for each other; outside of a run of all tapes it is `ALONE`, and a tape adds what the others have left last.
"""
mutable struct BatchSums
    team::Team
    samples::Int
    parts::Dict{Int,Vector{Memory}}  # by the sum's number: one for each thread
    sums::Vector{Int}  # how many sums each thread's tape makes
end
BatchSums(threads::Int, samples::Int) = BatchSums(ALONE, samples, Dict{Int,Vector{Memory}}(), zeros(Int, threads))

Base.show(io::IO, m::BatchSums) = print(io, "BatchSums(", length(m.sums), " threads)")

"""Wait for the other threads. Where one of them has failed, this one continues with numbers that nobody reads."""
struct Wait
    batch_sums::BatchSums
end
(w::Wait)() = (barrier!(w.batch_sums.team); nothing)
AD.poison!(::Wait, byte::Integer) = nothing  # the parts are memory of the tapes

"""Run `f()`, which traces the tape of a thread for `samples` samples: its sums over the batch are sums over all parts."""
tracing_part(f, ::Nothing, thread::Int, samples::Int) = f()
tracing_part(f, batch_sums::BatchSums, thread::Int, samples::Int) = task_local_storage(f, :TwinGradBatchSums, (batch_sums, thread, samples))

current_batch_sums() = get(task_local_storage(), :TwinGradBatchSums, nothing)::Union{Nothing,Tuple{BatchSums,Int,Int}}

"""The sum of `x` over all parts of the batch; `x` itself where the batch is not split."""
function sum_of_parts(x::Tensor)
    here = current_batch_sums()
    here === nothing && return x
    batch_sums, thread, _ = here
    number = batch_sums.sums[thread] += 1
    return AD.apply(SUM_OF_PARTS, Tensor[x], AD.attributes(:batch_sums => batch_sums, :thread => thread, :number => number))
end

"""
How many samples there would be along the last axis of `x` (..., samples) for the whole batch, of which it is computed of all, or of
a part. It may hold several for each sample of the batch, such as its steps in time.
"""
function samples_of(x::Tensor)
    here = current_batch_sums()
    here === nothing && return x.dims[end]
    batch_sums, _, samples = here
    several, rest = divrem(x.dims[end], samples)
    rest == 0 || throw(ShapeError("statistics of $(x.dims[end]) samples, for a part of $samples of a batch, are not those of a whole " *
        "one; switch the technique split_batch off"))
    return several * batch_sums.samples
end

"""The numbers of the sums of a tape over the batch, in order."""
sums_of(tape::Tape) = Int[e.attrs.number for e in tape.program.equations if e.op === SUM_OF_PARTS]

function forward_parts(p, out::Memory, inputs::Vector{Memory}, attrs)
    x, batch_sums = inputs[1], attrs.batch_sums
    parts = get!(() -> Memory[zeroed_memory(x) for _ in batch_sums.sums], batch_sums.parts, attrs.number)
    append!(p.roots, parts)
    AD.emit_copy!(p, parts[attrs.thread], x)
    AD.emit_call!(p, Wait(batch_sums), 0, Memory[])
    AD.emit_copy!(p, out, parts[1])
    for part in parts[2:end]
        AD.emit_elementwise!(p, :add, out, Memory[out, part])
    end
    return nothing
end

function zeroed_memory(like::Memory)
    memory = AD.new_memory(like.eltype, like.dims)
    AD.zeroed!(memory.root)
    return memory
end

const SUM_OF_PARTS = AD.Op("sum_of_parts", (inputs, attrs) -> (inputs[1].dims, inputs[1].eltype); forward=forward_parts,
    backward=Any[(g, y, inputs, attrs) -> sum_of_parts(g)], jvp=(t, y, inputs, attrs) -> sum_of_parts(t[1]),
    batch=(op, count, mapped, inputs, attrs) -> sum_of_parts(inputs[1]), couples_batch=true, attrs=[:batch_sums, :thread, :number],
    doc="the sum over all parts of a batch that is split over threads")
