"""
The networks of the papers, written by hand in Julia: no graph, no AD, no layers. The twin of manual.py.

Here are the recurrent network of mnist-rnn-d and -e and what all share; the convolutional ones are in manual_images.jl
and manual_text.jl. Beside what it takes from the engine (register tiles, fast exp and tanh, teams of threads) the
recurrent network gains its speed like this:

- Nothing is allocated in a step, and threads share a batch: each has its buffers and its own gradient.
- The flat vector of parameters begins with `weight`, `recurrent` and `bias`: columns of one matrix. The buffer `z`
  holds for each sample and time step what that matrix is multiplied with: the pixels, the state before, and 1. So a
  time step is one product, and its part of all three gradients another.
- The pixels are copied from the caller's memory to where the products read them, and states are computed there; those
  of the next batch come near from memory while this one is computed.
- The learning rate is part of the loss's gradient, so that the update is a subtraction, and that adds up the threads'
  gradients as well.

The entry points are those of julia_engine/src/entry.jl; `create` reads one line, with the kind of network, the dtype and
what the kind's constructor reads. The parameters lie one after the other, without gaps, those that are trained first. The
data are taken to have been checked.
"""
module TwinGradManual

using TwinGrad.AD.Kernels: NO, VECTOR_BYTES, YES, fast_exp, fast_sqrt, fast_tanh, gemm!, gemv!, narrow, tile!, wide
using TwinGrad.Entry: FAILURE, OK, guarded, text_at
using TwinGrad.NETWORK: Line, Team, given, meet!, reading, set_blas_threads, threads_to_use, together

"""The address `i` elements on."""
@inline on(p::Ptr{T}, i::Int) where {T} = p + sizeof(T) * i

# Products -------------------------------------------------------------------------------------------------------------

"""Rows of a product by tiles of M vectors, from row `i` on, as many as fill tiles; how far it came."""
@inline function tiles!(::Type{V}, M::Val, i::Int, m::Int, n::Int, k::Int, a::Ptr{T}, lda::Int, b::Ptr{T}, down::Int,
        across::Int, c::Ptr{T}, ldc::Int, add::Bool) where {V,T}
    height = vectors(M) * sizeof(V) ÷ sizeof(T)
    while i + height <= m
        rows, out = on(a, i), on(c, i)
        j = 0
        while j + 6 <= n
            tile!(V, M, Val(6), rows, lda, on(b, j * across), down, across, on(out, j * ldc), ldc, k, add)
            j += 6
        end
        if j + 4 <= n
            tile!(V, M, Val(4), rows, lda, on(b, j * across), down, across, on(out, j * ldc), ldc, k, add)
            j += 4
        end
        if j + 2 <= n
            tile!(V, M, Val(2), rows, lda, on(b, j * across), down, across, on(out, j * ldc), ldc, k, add)
            j += 2
        end
        if j < n
            tile!(V, M, Val(1), rows, lda, on(b, j * across), down, across, on(out, j * ldc), ldc, k, add)
        end
        i += height
    end
    return i
end
@inline vectors(::Val{M}) where {M} = M

"""
c = a b, or c + a b, for m rows, n columns and k summands. The element of `b` for summand p and column j lies at
p ∙ down + j ∙ across, one of which is 1. Rows that do not fill a vector are left to BLAS.
"""
function product!(m::Int, n::Int, k::Int, a::Ptr{T}, lda::Int, b::Ptr{T}, down::Int, across::Int, c::Ptr{T}, ldc::Int,
        add::Bool) where {T}
    i = 0
    if VECTOR_BYTES[] == 64
        i = tiles!(wide(T), Val(4), i, m, n, k, a, lda, b, down, across, c, ldc, add)
        i = tiles!(wide(T), Val(2), i, m, n, k, a, lda, b, down, across, c, ldc, add)
        i = tiles!(wide(T), Val(1), i, m, n, k, a, lda, b, down, across, c, ldc, add)
    elseif VECTOR_BYTES[] == 32
        i = tiles!(narrow(T), Val(2), i, m, n, k, a, lda, b, down, across, c, ldc, add)
        i = tiles!(narrow(T), Val(1), i, m, n, k, a, lda, b, down, across, c, ldc, add)
    end
    i == m && return nothing
    turn, ldb = down == 1 ? (NO, across) : (YES, down)
    gemm!(NO, turn, m - i, n, k, on(a, i), lda, b, ldb, T(add), on(c, i), ldc)
    return nothing
end

# A session ------------------------------------------------------------------------------------------------------------

"""What one thread needs for its part of a batch. Matrices lie column after column; `columns` samples at most."""
struct Shard{T}
    columns::Int
    z::Vector{T}                # (features + units + 1, times, columns); the first states before are 0 and stay so
    last::Vector{T}             # (units, columns): the last states
    slope::Vector{T}            # (units, columns): gradient by what tanh was applied to
    state::Vector{T}            # (units, columns): gradient by a state
    logits::Vector{T}           # (padded, columns), then the gradient by them
    labelled::Vector{T}         # (columns): the logit of the label, less the highest
    recurrent::Vector{T}        # (units, units): transposed
    output::Vector{T}           # (padded, units): the output weights, with zeros below
    output_t::Vector{T}         # (units, classes): the same, transposed
    output_gradient::Vector{T}  # (units, classes): transposed
    gradient::Vector{T}         # as the parameters
    loss::Base.RefValue{Float64}
    right::Base.RefValue{Int}
end

abstract type Network{T} end

struct RNNSession{T} <: Network{T}
    batch_size::Int
    times::Int
    features::Int
    units::Int
    classes::Int
    padded::Int  # classes, up to a whole number of vectors
    rate::Float64
    parameters::Vector{T}
    shards::Vector{Shard{T}}
    team::Team
end

"""Whole numbers of a line, by their names."""
numbers(line::Line, names...) = Int[given(line, name, Int) for name in names]

function RNNSession{T}(line::Line, parameters::Vector{T}) where {T}
    batch_size, threads, times, features, units, classes =
        numbers(line, "batch_size", "threads", "times", "features", "units", "classes")
    lanes = 64 ÷ sizeof(T)
    padded = cld(classes, lanes) * lanes
    team = Team(threads_to_use(threads))
    shards = [Shard{T}(cld(batch_size, team.size), times, features, units, classes, padded, length(parameters))
              for _ in 1:team.size]
    return RNNSession{T}(batch_size, times, features, units, classes, padded,
        given(line, "learning_rate", Float64), parameters, shards, team)
end

function Shard{T}(columns, times, features, units, classes, padded, parameters) where {T}
    zs(n...) = zeros(T, prod(n))
    height = features + units + 1
    z = zs(height, times, columns)
    z[height:height:end] .= one(T)
    return Shard{T}(columns, z, zs(units, columns), zs(units, columns), zs(units, columns), zs(padded, columns),
        zs(columns), zs(units, units), zs(padded, units), zs(units, classes), zs(units, classes), zs(parameters),
        Ref(0.0), Ref(0))
end

@inline output_bias(s::RNNSession, j::Int) = @inbounds s.parameters[length(s.parameters)-s.classes+j]

"""Where samples lie: row `order[i]` of x and y, or row i where there is no order, for i from 0."""
struct Data{T}
    x::Ptr{T}
    y::Ptr{Int64}
    order::Ptr{Int64}
end

@inline row(data::Data, i::Int) = data.order == C_NULL ? i : Int(unsafe_load(data.order, i + 1))

# Samples of a time step that are computed at a time: two tiles.
const BLOCK = 12
const CACHE_LINE = 64

# The step of one thread -----------------------------------------------------------------------------------------------

"""Copy what is multiplied with transposes; the parameters stay as they are until all threads have met."""
function prepare!(s::RNNSession{T}, h::Shard{T}) where {T}
    p, u, c = s.parameters, s.units, s.classes
    recurrent, output = s.features * u, (s.features + u + 1) * u
    @inbounds for i in 1:u
        @simd ivdep for j in 1:u
            h.recurrent[j+(i-1)*u] = p[recurrent+i+(j-1)*u]
        end
    end
    @inbounds for j in 1:u, i in 1:c
        w = p[output+i+(j-1)*c]
        h.output[i+(j-1)*s.padded] = w
        h.output_t[j+(i-1)*u] = w
    end
    return nothing
end

# Samples lie anywhere in memory, and the processor can fetch them while it computes.
@static if Sys.ARCH === :x86_64
    const PREFETCH = "call void asm sideeffect \"prefetcht1 (\$0)\", \"r\"(i64 %0)\nret void"
    @inline prefetch(address::Ptr) = Base.llvmcall(PREFETCH, Cvoid, Tuple{UInt64}, UInt64(address))
else
    prefetch(address::Ptr) = nothing
end

"""
Gather `n` samples from number `first` on, and compute their states and logits. Meanwhile the processor is told to fetch
`later` samples from number `next` on.
"""
function forward!(s::RNNSession{T}, h::Shard{T}, data::Data{T}, first::Int, n::Int, next::Int=0, later::Int=0) where {T}
    u, f = s.units, s.features
    height = f + u + 1
    apart = height * s.times  # of samples
    p, z = pointer(s.parameters), pointer(h.z)
    for i in 0:n-1
        from, to = on(data.x, row(data, first + i) * f * s.times), on(z, i * apart)
        for t in 0:s.times-1
            ccall(:memcpy, Ptr{Cvoid}, (Ptr{Cvoid}, Ptr{Cvoid}, Csize_t), on(to, t * height), on(from, t * f),
                f * sizeof(T))
        end
    end
    bias = on(p, (f + u) * u)
    for t in 1:s.times
        state, ld = t == s.times ? (pointer(h.last), u) : (on(z, t * height + f), apart)
        for left in 0:BLOCK:n-1
            right = min(left + BLOCK, n)
            product!(u, right - left, t == 1 ? f : f + u, p, u, on(z, (t - 1) * height + left * apart), 1, apart,
                on(state, left * ld), ld, false)
            for i in left:right-1
                at = on(state, i * ld)
                @simd ivdep for j in 1:u
                    unsafe_store!(at, fast_tanh(unsafe_load(at, j) + unsafe_load(bias, j)), j)
                end
            end
            for i in left:min(right, later)-1
                from = on(data.x, (row(data, next + i) * s.times + t - 1) * f)
                for byte in 0:CACHE_LINE:f*sizeof(T)-1
                    prefetch(from + byte)
                end
            end
        end
    end
    product!(s.padded, n, u, pointer(h.output), s.padded, pointer(h.last), 1, u, pointer(h.logits), s.padded, false)
    return nothing
end

"""
Turn the logits, without bias so far, into their gradient, `scale` times that of the sum of losses; keep the sum of
losses, and how many were right.
"""
function loss!(s::Network{T}, h, data::Data{T}, first::Int, n::Int, scale::T) where {T}
    c, height, logits = s.classes, s.padded, h.logits
    right = 0
    @inbounds for i in 1:n
        at = (i - 1) * height
        top, best = T(-Inf), 1
        for j in 1:c
            v = logits[at+j] + output_bias(s, j)
            logits[at+j] = v
            best = ifelse(v > top, j, best)
            top = ifelse(v > top, v, top)
        end
        @simd ivdep for j in 1:height
            logits[at+j] -= top
        end
        label = unsafe_load(data.y, row(data, first + i - 1) + 1) + 1
        right += best == label
        h.labelled[i] = logits[at+label]
    end
    @inbounds @simd ivdep for j in 1:n*height
        logits[j] = fast_exp(logits[j])
    end
    loss = 0.0
    @inbounds for i in 1:n
        at = (i - 1) * height
        total = zero(T)
        for j in 1:c
            total += logits[at+j]
        end
        factor = scale / total
        @simd ivdep for j in 1:height
            logits[at+j] *= factor
        end
        label = unsafe_load(data.y, row(data, first + i - 1) + 1) + 1
        logits[at+label] -= scale
        loss += log(Float64(total)) - h.labelled[i]
    end
    h.loss[] = loss
    h.right[] = right
    return nothing
end

"""The gradient of all parameters from that by the logits."""
function backward!(s::RNNSession{T}, h::Shard{T}, n::Int) where {T}
    u, f, c = s.units, s.features, s.classes
    height = f + u + 1
    apart = height * s.times
    z, g, d, e, logits = pointer(h.z), pointer(h.gradient), pointer(h.state), pointer(h.slope), pointer(h.logits)
    product!(u, n, c, pointer(h.output_t), u, logits, 1, s.padded, d, u, false)
    product!(u, c, n, pointer(h.last), u, logits, s.padded, 1, pointer(h.output_gradient), u, false)
    for t in s.times:-1:1
        state, ld = t == s.times ? (pointer(h.last), u) : (on(z, t * height + f), apart)
        for i in 0:n-1
            at, to, from = on(state, i * ld), on(e, i * u), on(d, i * u)
            @simd ivdep for j in 1:u
                v = unsafe_load(at, j)
                unsafe_store!(to, unsafe_load(from, j) * (one(T) - v * v), j)
            end
        end
        t > 1 && product!(u, n, u, pointer(h.recurrent), u, e, 1, u, d, u, false)
        input = on(z, (t - 1) * height)
        if t == s.times
            product!(u, height, n, e, u, input, apart, 1, g, u, false)
        elseif t > 1
            product!(u, height, n, e, u, input, apart, 1, g, u, true)
        else  # the states before are zeros
            product!(u, f, n, e, u, input, apart, 1, g, u, true)
            product!(u, 1, n, e, u, on(input, height - 1), apart, 1, on(g, (height - 1) * u), u, true)
        end
    end
    output, bias = height * u, height * u + u * c
    @inbounds for j in 1:u, i in 1:c
        h.gradient[output+i+(j-1)*c] = h.output_gradient[j+(i-1)*u]
    end
    @inbounds for j in 1:c
        h.gradient[bias+j] = zero(T)
    end
    @inbounds for i in 1:n, j in 1:c
        h.gradient[bias+j] += h.logits[(i-1)*s.padded+j]
    end
    return nothing
end

"""Whose the numbers from 1 to `n` are: the part of member `k`, as the number before it and how many."""
@inline function part(n::Int, k::Int, size::Int)
    before = (k - 1) * n ÷ size
    return before, k * n ÷ size - before
end

"""All steps from `first` to `last` of an epoch over `rows` rows, as member `k` of the team."""
function steps!(s::Network{T}, k::Int, data::Data{T}, rows::Int, first::Int, last::Int, losses::Ptr{Float64}) where {T}
    h, size = s.shards[k], s.team.size
    before, count = part(length(s.parameters), k, size)
    p = pointer(s.parameters)
    for step in first:last
        start = (step - 1) * s.batch_size
        n = min(s.batch_size, rows - start)
        mine, samples = part(n, k, size)
        prepare!(s, h)
        if samples > 0
            following = start + s.batch_size
            later = step < last ? min(s.batch_size, rows - following) : 0
            skipped, own = part(later, k, size)
            forward!(s, h, data, start + mine, samples, following + skipped, own)
            loss!(s, h, data, start + mine, samples, T(s.rate / n))
            backward!(s, h, samples)
        else
            h.loss[] = 0.0
            fill!(h.gradient, zero(T))
        end
        meet!(s.team) || return nothing
        for other in s.shards
            g = pointer(other.gradient)
            @simd ivdep for i in before+1:before+count
                unsafe_store!(p, unsafe_load(p, i) - unsafe_load(g, i), i)
            end
        end
        if k == 1
            total = 0.0
            for other in s.shards
                total += other.loss[]
            end
            unsafe_store!(losses, total / n, step)
        end
        meet!(s.team) || return nothing
    end
    return nothing
end

"""Run `work(k)` for every member of the team, with BLAS at one thread."""
function run(work, s::Network)
    threads = set_blas_threads(1)
    try
        together(work, s.team)
    finally
        set_blas_threads(threads)
    end
    return nothing
end

train!(s::Network, data::Data, rows::Int, first::Int, last::Int, losses::Ptr{Float64}) =
    run(k -> steps!(s, k, data, rows, first, last, losses), s)

"""Call `each(shard, first, n)` for all pieces of `samples` samples that fit into a shard, after the forward pass."""
function pieces!(each, s::Network, data::Data, samples::Int)
    run(s) do k
        h = s.shards[k]
        prepare!(s, h)
        before, count = part(samples, k, s.team.size)
        for first in before:h.columns:before+count-1
            n = min(h.columns, before + count - first)
            forward!(s, h, data, first, n)
            each(h, k, first, n)
        end
    end
end

function evaluate!(s::Network{T}, data::Data{T}, samples::Int) where {T}
    losses, right = zeros(s.team.size), zeros(Int, s.team.size)
    pieces!(s, data, samples) do h, k, first, n
        loss!(s, h, data, first, n, one(T))
        losses[k] += h.loss[]
        right[k] += h.right[]
    end
    return sum(losses) / samples, sum(right) / samples
end

function predict!(s::Network{T}, data::Data{T}, samples::Int, out::Ptr{T}) where {T}
    c = s.classes
    pieces!(s, data, samples) do h, k, first, n
        for i in 1:n, j in 1:c
            unsafe_store!(out, h.logits[(i-1)*s.padded+j] + output_bias(s, j), (first + i - 1) * c + j)
        end
    end
end

function gradients!(s::Network{T}, data::Data{T}, samples::Int, gradient::Vector{T}) where {T}
    sums, losses = [zeros(T, length(gradient)) for _ in s.shards], zeros(s.team.size)
    pieces!(s, data, samples) do h, k, first, n
        loss!(s, h, data, first, n, T(1 / samples))
        losses[k] += h.loss[]
        backward!(s, h, n)
        sums[k] .+= h.gradient
    end
    gradient .= 0
    for part in sums
        gradient .+= part
    end
    return sum(losses) / samples
end

gradient_length(s::Network) = length(s.parameters)

include("manual_images.jl")
include("manual_text.jl")

# Entry points ---------------------------------------------------------------------------------------------------------

const KINDS = Dict("rnn" => RNNSession, "image-cnn" => ImageSession, "text-cnn" => TextSession)
# Called by `call`: Julia must not infer a method for all kinds of sessions at once.
const SESSIONS = Dict{Int64,Network}()
call(f, number, arguments...) = Base.invokelatest(f, SESSIONS[number], arguments...)
const COUNT = Ref{Int64}(0)

Data{T}(x::Ptr{Cvoid}, y::Ptr{Cvoid}, order::Ptr{Int64}=Ptr{Int64}(0)) where {T} =
    Data{T}(Ptr{T}(x), Ptr{Int64}(y), order)

function create(text::Ptr{UInt8}, n::Int64, parameters::Ptr{Cvoid}, length::Int64)::Int64
    return guarded(status -> -Int64(status)) do
        line = Line(chomp(text_at(text, n)))
        SESSIONS[COUNT[]+1] = reading(line) do
            kind = KINDS[given(line, "kind", String)]
            T = given(line, "dtype", String) == "float32" ? Float32 : Float64
            kind{T}(line, unsafe_wrap(Array, Ptr{T}(parameters), length))
        end
        COUNT[] += 1
    end
end

train(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, rows::Int64, order::Ptr{Int64}, first::Int64,
    last::Int64, losses::Ptr{Float64})::Cint = guarded(identity) do
    call(train, number, x, y, rows, order, first, last, losses)
    OK
end
train(s::Network{T}, x, y, rows, order, first, last, losses) where {T} =
    train!(s, Data{T}(x, y, order), rows, first, last, losses)

evaluate(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, out::Ptr{Float64})::Cint = guarded(identity) do
    loss, accuracy = call(evaluate, number, samples, x, y)
    unsafe_store!(out, loss, 1)
    unsafe_store!(out, accuracy, 2)
    OK
end
evaluate(s::Network{T}, samples, x, y) where {T} = evaluate!(s, Data{T}(x, y), samples)

predict(number::Int64, samples::Int64, x::Ptr{Cvoid}, out::Ptr{Cvoid})::Cint = guarded(identity) do
    call(predict, number, samples, x, out)
    OK
end
predict(s::Network{T}, samples, x, out) where {T} = predict!(s, Data{T}(x, C_NULL), samples, Ptr{T}(out))

gradients(number::Int64, samples::Int64, x::Ptr{Cvoid}, y::Ptr{Cvoid}, loss::Ptr{Float64}, vector::Ptr{Cvoid})::Cint =
    guarded(identity) do
        unsafe_store!(loss, call(gradients, number, samples, x, y, vector))
        OK
    end
gradients(s::Network{T}, samples, x, y, vector) where {T} =
    gradients!(s, Data{T}(x, y), samples, unsafe_wrap(Array, Ptr{T}(vector), gradient_length(s)))

free(number::Int64)::Cint = guarded(identity) do
    delete!(SESSIONS, number)
    OK
end

create_pointer() = @cfunction(create, Int64, (Ptr{UInt8}, Int64, Ptr{Cvoid}, Int64))
train_pointer() = @cfunction(train, Cint,
    (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Int64, Ptr{Int64}, Int64, Int64, Ptr{Float64}))
evaluate_pointer() = @cfunction(evaluate, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}))
predict_pointer() = @cfunction(predict, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}))
gradients_pointer() = @cfunction(gradients, Cint, (Int64, Int64, Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Float64}, Ptr{Cvoid}))
free_pointer() = @cfunction(free, Cint, (Int64,))

end
