# The rates of a machine, measured in Julia for experiments/measures/roofline.py, which runs this file: its arguments are
# the dtype, how many samples to take, of about how many seconds each, and the bytes of the arrays to be read and written.
# It prints lines of a name and numbers. Of each rate the best sample counts.

using Base.Threads: @threads, Atomic, atomic_add!, nthreads

const SAMPLES = parse(Int, ARGS[2])
const SECONDS = parse(Float64, ARGS[3])

# Seconds of a call: the best of the samples, each the mean over as many calls as take about SECONDS.
function best(call, left=SAMPLES)
    call(1)
    count, found = 1, Inf
    while left > 0
        start = time_ns()
        call(count)
        taken = (time_ns() - start) / 1e9
        found = min(found, taken / count)
        taken >= SECONDS / 2 ? (left -= 1) : (count = max(count + 1, floor(Int, SECONDS / max(found, 1e-9))))
    end
    return found
end

# Many multiply-adds for each element, in chains that don't wait for one another.
@noinline function multiply_adds!(a::Vector{T}, c::T) where {T}
    @inbounds @simd for i in eachindex(a)
        x = a[i]
        p, q, r, s = x, x + 1, x + 2, x + 3
        Base.Cartesian.@nexprs 32 k -> begin
            p = muladd(p, x, c)
            q = muladd(q, x, c)
            r = muladd(r, x, c)
            s = muladd(s, x, c)
        end
        a[i] = (p + q + r + s) * c
    end
end

@noinline function total(a::Vector{T}) where {T}
    found = zero(T)
    @inbounds @simd for i in eachindex(a)
        found += a[i]
    end
    return found
end

@noinline function update!(a::Vector{T}, c::T) where {T}
    @inbounds @simd for i in eachindex(a)
        a[i] = muladd(a[i], c, c)
    end
end

# Three parts at a time, as an optimizer reads and writes a parameter and two numbers that it keeps for it.
@noinline function update_streams!(a::Vector{T}, c::T) where {T}
    third = length(a) ÷ 3
    @inbounds @simd ivdep for i in 1:third
        p, m, v = a[i], a[third + i], a[2third + i]
        m, v = muladd(m, c, c), muladd(v, c, c)
        a[i], a[third + i], a[2third + i] = muladd(m, v, p), m, v
    end
end

@noinline function copied!(a::Vector{T}) where {T}
    half = length(a) ÷ 2
    @inbounds @simd ivdep for i in 1:half
        a[half + i] = a[i]
    end
end

repeated(f, count) = for _ in 1:count
    f()
end

@noinline same(n::Int) = n

function calls(pointer::Ptr{Cvoid}, count)
    n = 0
    for _ in 1:count
        n = ccall(pointer, Int, (Int,), n)
    end
    return n
end

# The `amount` of all threads a second, each with its own array, at the same time: a sample begins in all of them at once, and
# the slowest one tells how long it took.
function together(run, amount, ::Type{T}, length) where {T}
    arrays = Vector{Vector{T}}(undef, nthreads())
    @threads for k in 1:nthreads()
        arrays[k] = zeros(T, length)  # by the thread that uses it
    end
    count = max(1, floor(Int, SECONDS / best(count -> repeated(() -> run(arrays[1]), count), 1)))
    took, arrived = zeros(SAMPLES, nthreads()), Atomic{Int}(0)
    @threads for k in 1:nthreads()
        for sample in 1:SAMPLES
            atomic_add!(arrived, 1)
            while arrived[] < sample * nthreads()
                GC.safepoint()
            end
            start = time_ns()
            repeated(() -> run(arrays[k]), count)
            took[sample, k] = (time_ns() - start) / 1e9
        end
    end
    return sum(amount, arrays) * count / minimum(maximum(took; dims=2))
end

function main(::Type{T}) where {T}
    println("flops ", together(a -> multiply_adds!(a, T(0.5)), a -> 256 * length(a), T, 1024))
    sink = Ref(zero(T))
    for size in parse.(Int, ARGS[4:end])
        count = size ÷ (sizeof(T) * nthreads())
        read = together(a -> (sink[] = total(a)), sizeof, T, count)
        copied = together(copied!, sizeof, T, count)
        updated = together(a -> update!(a, T(0.5)), a -> 2 * sizeof(a), T, count)
        streams = together(a -> update_streams!(a, T(0.5)), a -> 2 * sizeof(a), T, count - count % 3)
        println("bytes ", size, " ", max(read, copied, updated, streams))
    end
    pointer = @cfunction(same, Int, (Int,))
    println("call ", best(count -> calls(pointer, count)))
end

main(ARGS[1] == "float64" ? Float64 : Float32)
