# The convolutional network of the paper mnist-cnn, with a kernel of 3 × 3 and pools of 2 × 2.
#
# - The even columns of an image's row come first, then its odd ones, each padded to a whole number of lanes: a loop over
#   neighbouring pools then reads neighbouring numbers, and computes the four elements of a window at a time.
# - Of a window only its maximum is kept, and which element that was, -1 where ReLU let nothing through: the gradient by
#   the kernel comes from the winners alone.
# - Dense layers are products by BLAS, or with its matrix and vector where there is one sample.

const LANES = 16

# Fewer samples are not worth a thread.
const LEAST_SAMPLES = 16

"""What one thread needs for its part of a batch."""
struct ImageShard{T}
    columns::Int
    x::Vector{T}         # (half, 2, rows, columns): the images, split
    pooled::Vector{T}    # (features, columns)
    winner::Vector{T}    # the same: 0 to 3, or -1
    d_pooled::Vector{T}
    sums::Vector{T}      # (LANES, 9): the gradient by the kernel, lane by lane
    hidden::Vector{T}    # (hidden, columns)
    d_hidden::Vector{T}
    logits::Vector{T}    # (classes, columns), then the gradient by them
    labelled::Vector{T}
    gradient::Vector{T}  # as the parameters
    loss::Base.RefValue{Float64}
    right::Base.RefValue{Int}
end

struct ImageSession{T} <: Network{T}
    batch_size::Int
    height::Int
    width::Int
    filters::Int
    hidden::Int
    classes::Int
    padded::Int
    across::Int  # pools in a row
    down::Int
    half::Int    # even columns of a row, padded
    rate::Float64
    parameters::Vector{T}
    shards::Vector{ImageShard{T}}
    team::Team
end

function ImageSession{T}(line::Line, parameters::Vector{T}) where {T}
    batch_size, threads, height, width, filters, hidden, classes =
        numbers(line, "batch_size", "threads", "height", "width", "filters", "hidden", "classes")
    across, down = (width - 2) ÷ 2, (height - 2) ÷ 2
    half = cld(across, LANES) * LANES + 1
    features = filters * across * down
    team = Team(threads_to_use(min(threads, cld(batch_size, LEAST_SAMPLES))))
    n = cld(batch_size, team.size)
    zs(n...) = zeros(T, prod(n))
    shards = [ImageShard{T}(n, zs(half, 2, height, n), zs(features * n + LANES), zs(features * n + LANES),
                  zs(features * n + LANES), zs(LANES, 9), zs(hidden, n), zs(hidden, n), zs(classes, n), zs(n),
                  zs(length(parameters)), Ref(0.0), Ref(0)) for _ in 1:team.size]
    return ImageSession{T}(batch_size, height, width, filters, hidden, classes, classes, across, down, half,
        given(line, "learning_rate", Float64), parameters, shards, team)
end

prepare!(::ImageSession, h) = nothing
@inline output_bias(s::ImageSession{T}, j::Int) where {T} = zero(T)
features(s::ImageSession) = s.filters * s.across * s.down

# Element (r, q) of the 4 × 4 pixels that a window sees, for all pools of a row.
pixel(r, q) = Symbol(:x_, r, q)
pixels() = [:($(pixel(r, q)) = unsafe_load(p, u + $r * 2half + $(q % 2) * half + $(q ÷ 2))) for r in 0:3 for q in 0:3]
weight(j, i) = Symbol(:w_, j, i)
each(f) = [f(j, i) for j in 0:2 for i in 0:2]
phase(a, b) = foldr((at, sum) -> :(muladd($(weight(at...)), $(pixel(a + at[1], b + at[2])), $sum)), each(tuple);
    init=:(zero(T)))
kernel_gradient(j, i) = foldr(((a, b), sum) -> :(muladd($(Symbol(:g_, 2a + b)), $(pixel(a + j, b + i)), $sum)),
    [(a, b) for a in 0:1 for b in 0:1]; init=:(unsafe_load(d, u + $(LANES * (3j + i)))))

@eval begin
    """A row of LANES pools: their maxima after ReLU, and which elements of the windows they are."""
    @inline function pool_row!(out::Ptr{T}, winner::Ptr{T}, p::Ptr{T}, half::Int, w::Ptr{T}) where {T}
        $(each((j, i) -> :($(weight(j, i)) = unsafe_load(w, $(3j + i + 1))))...)
        @simd ivdep for u in 1:LANES
            $(pixels()...)
            m, which = zero(T), -one(T)
            $([quote
                v = $(phase(k ÷ 2, k % 2))
                larger = !(v <= m)  # NaN passes
                which = ifelse(larger, T($k), which)
                m = ifelse(larger, v, m)
            end for k in 0:3]...)
            unsafe_store!(out, m, u)
            unsafe_store!(winner, which, u)
        end
        return nothing
    end

    """Add a row of `n` pools to the gradient by each of the kernel's elements, lane by lane."""
    @inline function add_row!(d::Ptr{T}, g::Ptr{T}, winner::Ptr{T}, n::T, p::Ptr{T}, half::Int) where {T}
        @simd ivdep for u in 1:LANES
            $(pixels()...)
            gradient = ifelse(T(u) <= n, unsafe_load(g, u), zero(T))
            which = unsafe_load(winner, u)
            $([:($(Symbol(:g_, k)) = ifelse(which == T($k), gradient, zero(T))) for k in 0:3]...)
            $(each((j, i) -> :(unsafe_store!(d, $(kernel_gradient(j, i)), u + $(LANES * (3j + i)))))...)
        end
        return nothing
    end
end

function forward!(s::ImageSession{T}, h::ImageShard{T}, data::Data{T}, first::Int, n::Int, next::Int=0,
        later::Int=0) where {T}
    image = 2 * s.half * s.height
    p, f = pointer(s.parameters), features(s)
    for i in 0:n-1
        from, to = on(data.x, row(data, first + i) * s.height * s.width), on(pointer(h.x), i * image)
        for y in 0:s.height-1
            at, even = on(from, y * s.width), on(to, y * 2 * s.half)
            odd = on(even, s.half)
            @simd ivdep for u in 1:s.width÷2
                unsafe_store!(even, unsafe_load(at, 2u - 1), u)
                unsafe_store!(odd, unsafe_load(at, 2u), u)
            end
            isodd(s.width) && unsafe_store!(even, unsafe_load(at, s.width), s.width ÷ 2 + 1)
        end
        # Lanes beyond a row are overwritten by the next one.
        o = i * f
        for filter in 0:s.filters-1, y in 0:s.down-1
            for block in 0:LANES:s.across-1
                pool_row!(on(pointer(h.pooled), o + block), on(pointer(h.winner), o + block),
                    on(to, 4 * y * s.half + block), s.half, on(p, 9 * filter))
            end
            o += s.across
        end
    end
    w1 = on(p, 9 * s.filters)
    w2 = on(w1, f * s.hidden)
    times!(NO, s.hidden, n, f, w1, s.hidden, pointer(h.pooled), pointer(h.hidden))
    @inbounds @simd ivdep for j in 1:s.hidden*n
        h.hidden[j] = ifelse(h.hidden[j] <= 0, zero(T), h.hidden[j])
    end
    times!(NO, s.classes, n, s.hidden, w2, s.classes, pointer(h.hidden), pointer(h.logits))
    return nothing
end

"""c (m, n) = a b, or aᵀ b, for b (k, n); a has columns `lda` apart."""
@inline function times!(turn::UInt8, m::Int, n::Int, k::Int, a::Ptr{T}, lda::Int, b::Ptr{T}, c::Ptr{T}) where {T}
    if n == 1
        rows, columns = turn == NO ? (m, k) : (k, m)
        gemv!(turn, rows, columns, a, lda, b, 1, zero(T), c, 1)
    else
        gemm!(turn, NO, m, n, k, a, lda, b, k, zero(T), c, m)
    end
    return nothing
end

"""c (m, k) = a bᵀ for a (m, n) and b (k, n)."""
@inline function outer!(m::Int, n::Int, k::Int, a::Ptr{T}, b::Ptr{T}, c::Ptr{T}) where {T}
    n == 1 || return gemm!(NO, YES, m, k, n, a, m, b, k, zero(T), c, m)
    for j in 1:k
        v, to = unsafe_load(b, j), on(c, (j - 1) * m)
        @simd ivdep for i in 1:m
            unsafe_store!(to, unsafe_load(a, i) * v, i)
        end
    end
    return nothing
end

function backward!(s::ImageSession{T}, h::ImageShard{T}, n::Int) where {T}
    p, g, f, image = pointer(s.parameters), pointer(h.gradient), features(s), 2 * s.half * s.height
    first, second = 9 * s.filters, 9 * s.filters + f * s.hidden
    outer!(s.classes, n, s.hidden, pointer(h.logits), pointer(h.hidden), on(g, second))
    times!(YES, s.hidden, n, s.classes, on(p, second), s.classes, pointer(h.logits), pointer(h.d_hidden))
    @inbounds @simd ivdep for j in 1:s.hidden*n
        h.d_hidden[j] = ifelse(h.hidden[j] > 0, h.d_hidden[j], zero(T))
    end
    outer!(s.hidden, n, f, pointer(h.d_hidden), pointer(h.pooled), on(g, first))
    times!(YES, f, n, s.hidden, on(p, first), s.hidden, pointer(h.d_hidden), pointer(h.d_pooled))
    for filter in 0:s.filters-1
        fill!(h.sums, zero(T))
        for i in 0:n-1, y in 0:s.down-1, block in 0:LANES:s.across-1
            o = i * f + (filter * s.down + y) * s.across + block
            add_row!(pointer(h.sums), on(pointer(h.d_pooled), o), on(pointer(h.winner), o), T(s.across - block),
                on(pointer(h.x), i * image + 4 * y * s.half + block), s.half)
        end
        @inbounds for t in 0:8
            total = zero(T)
            @simd for u in 1:LANES
                total += h.sums[LANES*t+u]
            end
            h.gradient[9*filter+t+1] = total
        end
    end
    return nothing
end
