# Sums over a batch whose samples are split over threads: what batch normalisation needs of the other threads' samples.
#
# Each thread replays its own tape. Where a layer sums over the batch, the tapes wait at a barrier: every one writes its
# part of the sum, waits for the others, and adds up all parts in the same order, so that all have the same bits.
#
# A layer of a user's own may couple the samples by ordinary ops, such as a mean over the batch, and not say so:
# `coupling_layer` finds it, by what it computes.

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

# Layers that couple a batch and do not say so --------------------------------------------------------------------------

"""The generators of random numbers that ops draw from, in loops and branches, too."""
function generators(equations::Vector{AD.Equation})
    steps = AD.Equation[x for e in equations for x in AD.Equation[e; AD.inner_equations(e)]]
    return unique(objectid, Generator[pair.second for e in steps for pair in AD.pairs_of(e.attrs) if pair.second isa Generator])
end

"""
    coupling_layer(chain, input, samples, training)

The id of the first layer in which the samples of a batch affect each other in an undeclared way, or nothing.

The engine's own layers are known; each other one, and each that holds one, is traced and computed several times, of a batch of
`samples` samples of size `input` of which some stay the same and others do not. What it declares are sums over the batch, each a
`sum_of_parts`: these may have any value. In training its gradient by the samples is looked at, too.
"""
function coupling_layer(chain, input::Vector{Int}, samples::Int, training::Bool)
    own = Set{String}(id for (id, layer) in zip(chain.ids, chain.layers) if is_users_own(layer))
    (isempty(own) || samples < 2) && return nothing
    found, ids = Ref{Union{Nothing,String}}(nothing), takes_ids(chain)
    vocabulary = ids ? minimum(Int[typemax(Int); first.(lookups(chain, input, samples, training)[2])]) : 0
    through(chain, (input, ids)) do id, layer, given
        size = output_size(layer, merged_size(layer, Vector{Int}[dims for (dims, _) in given]))
        found[] === nothing && id in own && couples(chain, id, layer, given, size, samples, training, vocabulary) && (found[] = id)
        return (size, only_moves(layer) && all(last, given))
    end
    return found[]
end

is_users_own(layer::Layer) = any(pair -> parentmodule(typeof(pair.second)) !== (@__MODULE__), held_layers(Layer[layer], Layer))

"""Whether samples affect each other in this layer, whose inputs have these sizes and are ids or not."""
function couples(chain, id::String, layer::Layer, given::Vector{Tuple{Vector{Int},Bool}}, size::Vector{Int}, samples::Int,
        training::Bool, vocabulary::Int)
    program = traced_alone(chain, id, layer, given, size, samples, training)
    sums = AD.Equation[e for e in program.equations if e.op === SUM_OF_PARTS]
    program = AD.prune(AD.Program(Tensor[program.inputs; Tensor[AD.output(e) for e in sums]],
        AD.Equation[e for e in program.equations if e.op !== SUM_OF_PARTS], program.outputs))
    wanted, random = program.inputs[1:end-length(sums)], MersenneTwister(0)
    fixed = Array[fill!(AD.new_array(AD.output(e).eltype, AD.output(e).dims), samples) for e in sums]
    stay = [first ? (1:samples) .<= samples ÷ 2 : isodd.(1:samples) for first in (true, false)]
    for (low, high) in ((-3.0, 3.0), (0.1, 0.9))  # the second for layers that take positive numbers or shares alone
        one, other = [Array[drawn(random, x, low, high, vocabulary) for x in wanted] for _ in 1:2]
        expected = computed(program, Array[one; fixed])
        for stays in (stay[1], .!stay[1], stay[2], .!stay[2])
            mixed = Array[copy(b) for b in other]
            for (a, b) in zip(mixed, one)
                selectdim(a, ndims(a), stays) .= selectdim(b, ndims(b), stays)
            end
            found = computed(program, Array[mixed; fixed])
            (expected === nothing || found === nothing) && return true  # nobody knows
            any(differ(y, z, stays) for (y, z) in zip(expected, found)) && return true
        end
    end
    return false
end

drawn(random::MersenneTwister, x::Tensor, low::Float64, high::Float64, vocabulary::Int) =
    x.eltype === Int64 ? rand(random, 1:vocabulary, x.dims...) : x.eltype.(low .+ (high - low) .* rand(random, x.dims...))

"""
The program of a layer, with its gradient by the samples in training, where it has one. Its inputs are the layer's, and the
cotangent of the result. The streams of dropout layers are left as they are.
"""
function traced_alone(chain, id::String, layer::Layer, given::Vector{Tuple{Vector{Int},Bool}}, size::Vector{Int}, samples::Int,
        training::Bool)
    T = eltype(chain.parameters)
    inputs = Tensor[AD.symbol(ids ? Int64 : T, Int[dims; samples]) for (dims, ids) in given]
    seed, floats = AD.symbol(T, Int[size; samples]), Tensor[x for x in inputs if x.eltype !== Int64]
    function made(of::Tensor...)
        rest, own = Iterators.Stateful(of), Dict{String,Tensor}()
        for (name, _) in parameters(layer)
            own[name] = chain.parameters.tensors[findfirst(==("$id.$name"), keys(chain.parameters))]
        end
        merged = merge_inputs(layer, Tensor[x.eltype === Int64 ? x : popfirst!(rest) for x in inputs])
        return AD.scope(() -> forward(layer, merged, own, training), id)
    end
    function with_gradient(_...)
        y, pull = AD.vjp(made, floats...)
        return Tensor[y, pull(seed)...]
    end
    function trace_it()
        if training && !isempty(floats)
            try
                return AD.trace(with_gradient, Tensor[inputs; seed])
            catch error
                error isa AD.NotDifferentiableError || rethrow()
            end
        end
        return AD.trace((_...) -> Tensor[made(floats...)], Tensor[inputs; seed])
    end
    sums = training && couples_batch(chain) ? BatchSums(1, samples) : nothing
    return tracing_part(() -> tracing_aside(trace_it, Layer[layer]), sums, 1, samples)
end

"""What a program gives, with the random numbers that it would draw next; nothing if it cannot be computed."""
function computed(program::AD.Program, inputs::Vector{Array})
    before = [(g, copy(g.state)) for g in generators(program.equations)]
    try
        return Array[AD.value(y) for y in AD.no_grad(() -> AD.applied(program, Tensor[Constant(x) for x in inputs])[1])]
    catch error
        error isa InterruptException && rethrow()
        return nothing  # such as of a matrix that must be positive definite
    finally
        foreach(((g, state),) -> copyto!(g.state, state), before)
    end
end

"""Whether the samples that stay differ by more than rounding, or nothing in them is a number."""
function differ(y::Array, z::Array, stays::AbstractVector{Bool})
    ndims(y) > 0 && size(y) == size(z) && size(y)[end] == length(stays) || return true
    a, b = vec(collect(selectdim(y, ndims(y), stays))), vec(collect(selectdim(z, ndims(z), stays)))
    (isempty(a) || eltype(a) === Int64) && return a != b
    finite = isfinite.(a)
    any(finite) && finite == isfinite.(b) || return true
    near = 100 * eps(eltype(a)) * maximum(abs, a[finite])
    return any(abs.(a[finite] .- b[finite]) .> near)
end
