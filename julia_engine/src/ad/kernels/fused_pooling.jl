# Convolution, bias, ReLU and max-pooling in one pass, for the shapes that are trained most. What comes out is, for each
# window of the pool, its largest element and which one that was: counted from 0, -1 where ReLU let nothing through. The
# gradients need nothing else, and are zero everywhere but there.

for (W, T, name) in ((16, Float32, "float"), (8, Float32, "float"), (4, Float32, "float"), (8, Float64, "double"),
    (4, Float64, "double"))
    V = "<$W x $name>"
    select(condition) = "$condition\n%r = select <$W x i1> %m, $V %p, $V %q\nret $V %r"
    pick(condition) = replace(replace(select(condition), "%p" => "%2"), "%q" => "%3")
    @eval begin
        """Lane by lane, p where a is larger than m, else q; a NaN is larger than all, and nothing larger than it."""
        @inline where_larger(a::Vec{$W,$T}, m::Vec{$W,$T}, p::Vec{$W,$T}, q::Vec{$W,$T}) = Base.llvmcall(
            $(pick("%n = fcmp ugt $V %0, %1\n%o = fcmp ord $V %1, %1\n%m = and <$W x i1> %n, %o")), Vec{$W,$T},
            NTuple{4,Vec{$W,$T}}, a, m, p, q)
        """Lane by lane, p where a > b, else q."""
        @inline where_greater(a::Vec{$W,$T}, b::Vec{$W,$T}, p::Vec{$W,$T}, q::Vec{$W,$T}) = Base.llvmcall(
            $(pick("%m = fcmp ogt $V %0, %1")), Vec{$W,$T}, NTuple{4,Vec{$W,$T}}, a, b, p, q)
        """Lane by lane, p where a <= b, else q."""
        @inline where_at_most(a::Vec{$W,$T}, b::Vec{$W,$T}, p::Vec{$W,$T}, q::Vec{$W,$T}) = Base.llvmcall(
            $(pick("%m = fcmp ole $V %0, %1")), Vec{$W,$T}, NTuple{4,Vec{$W,$T}}, a, b, p, q)
        """Lane by lane, p where a == b, else q."""
        @inline where_equal(a::Vec{$W,$T}, b::Vec{$W,$T}, p::Vec{$W,$T}, q::Vec{$W,$T}) = Base.llvmcall(
            $(pick("%m = fcmp oeq $V %0, %1")), Vec{$W,$T}, NTuple{4,Vec{$W,$T}}, a, b, p, q)
        @inline plus(a::Vec{$W,$T}, b::Vec{$W,$T}) =
            Base.llvmcall($("%r = fadd $V %0, %1\nret $V %r"), Vec{$W,$T}, NTuple{2,Vec{$W,$T}}, a, b)
    end
end

for (W, T, name) in ((16, Float32, "float"), (8, Float32, "float"), (8, Float64, "double"), (4, Float64, "double"))
    lanes(first) = join(["i32 $(first + 2i)" for i in 0:W-1], ", ")
    for (f, first) in ((:evens, 0), (:odds, 1))
        @eval @inline $f(a::Vec{$W,$T}, b::Vec{$W,$T}) = Base.llvmcall(
            $("%r = shufflevector <$W x $name> %0, <$W x $name> %1, <$W x i32> <$(lanes(first))>\nret <$W x $name> %r"),
            Vec{$W,$T}, NTuple{2,Vec{$W,$T}}, a, b)
    end
end

@inline load(::Type{V}, p::Ptr) where {V} = unsafe_load(Ptr{V}(p))
@inline store!(p::Ptr, v::V) where {V} = unsafe_store!(Ptr{V}(p), v)
@inline numbered(::Type{Tuple{VecElement{T},Vararg{VecElement{T},M}}}) where {T,M} = ntuple(i -> VecElement{T}(i - 1), Val(M + 1))
@inline total(v::Lanes{T}) where {T} = (s = zero(T); for e in v
    s += e.value
end; s)

"""ReLU, if asked for, on the largest elements; which they were becomes -1 where nothing came through."""
@inline function activated(v::V, which::V, relu::Bool) where {T,V<:Lanes{T}}
    relu || return v, which
    zeros = repeated(V, zero(T))
    return where_at_most(v, zeros, zeros, v), where_greater(v, zeros, which, repeated(V, -one(T)))
end

# Images ---------------------------------------------------------------------------------------------------------------
#
# Pools of 2 × 2 that follow each other. Each row of the image is split first: its even columns, then its odd ones, each
# padded to whole vectors. Then one vector holds the same column of neighbouring pools, and a window's four elements are
# four vectors: all the work is on whole vectors, and the pool costs three comparisons for a vector of results.

"""Sizes of the kernels for images; `half` is the length of a row's even columns with padding."""
struct PlaneNumbers
    width::Int  # of the pooled plane
    height::Int
    rows::Int  # of the image, with padding
    half::Int
    channels::Int
    filters::Int
    samples::Int
    relu::Int
    spare::Int  # the address of memory to work in
end
@inline plane_numbers(p::Ptr{Int64}) = unsafe_load(Ptr{PlaneNumbers}(p))

"""
out = the rows of a, split into even and odd columns. n is (width, height, channels, samples), sa the strides; i holds half
a row's length, the padding on the left and above, and the rows with padding.
"""
@inline function split_columns!(::Type{V}, x::Instruction{T}) where {T,W,V<:Vec{W,T}}
    width, height = x.n[1], x.n[2]
    half, left, above, rows = x.i
    o = x.out
    last = moved(x.a, x.sa, height - 1, x.n[3] - 1, x.n[4] - 1) + sizeof(T) * width - 2 * sizeof(V)
    whole = left == 0 && x.sa[1] == 1 && all(s -> s > 0, x.sa)
    numbers, zeros, columns = numbered(V), repeated(V, zero(T)), width ÷ 2
    for l in 0:x.n[4]-1, k in 0:x.n[3]-1, y in -above:rows-above-1
        a = moved(x.a, x.sa, y, k, l)
        here = 0 <= y < height
        if here && whole && a + sizeof(T) * 2 * (half - W) <= last
            u = 0
            while u < half
                p, q = a + sizeof(T) * 2u, o + sizeof(T) * u
                v, w = load(V, p), load(V, p + sizeof(V))
                store!(q, where_greater(repeated(V, T(width - columns - u)), numbers, evens(v, w), zeros))
                store!(q + sizeof(T) * half, where_greater(repeated(V, T(columns - u)), numbers, odds(v, w), zeros))
                u += W
            end
            o += sizeof(T) * 2 * half
            continue
        end
        for odd in 0:1
            # Column 2u + odd of the padded row is column 2u + odd - left of the image.
            from, to = here ? inside(half, 2, odd - left, width) : (0, 0)
            for u in 1:from
                unsafe_store!(o, zero(T), u)
            end
            p = a + sizeof(T) * (odd - left) * x.sa[1]
            for u in from+1:to
                unsafe_store!(o, at(p, u, 2 * x.sa[1]), u)
            end
            for u in to+1:half
                unsafe_store!(o, zero(T), u)
            end
            o += sizeof(T) * half
        end
    end
    for u in 0:64÷sizeof(V)-1
        store!(o + sizeof(V) * u, zeros)
    end
    return nothing
end

"""Where the vector for row r and column q of a window (from 0) lies, in the split rows at `row`."""
place(r::Int, q::Int) = :(row + sizeof(T) * ($r * 2 * s.half + $(q % 2) * s.half + $(q ÷ 2)))
window_vector(r::Int, q::Int) = Symbol(:x_, r, :_, q)
window_loads(size::Int) =
    [:($(window_vector(r, q)) = load(V, $(place(r, q)))) for r in 0:size for q in 0:size]

"""Add one channel's part to the four sums m_0 ... m_3, for a kernel of size × size."""
function channel_body(size::Int)
    steps = Expr(:block, window_loads(size)...)
    for j in 0:size-1, i in 0:size-1
        push!(steps.args, :(v = repeated(V, unsafe_load(w, $(j * size + i + 1)))))
        for b in 0:1, a in 0:1
            m = Symbol(:m_, 2b + a)
            push!(steps.args, :($m = multiply_add($(window_vector(b + j, a + i)), v, $m)))
        end
    end
    return steps
end

"""Add a row of pools to the gradient of each of a kernel's elements, from the gradients g_0 ... g_3."""
function gradient_body(size::Int)
    steps = Expr(:block, window_loads(size)...)
    for b in 0:1, a in 0:1, j in 0:size-1, i in 0:size-1
        d = Symbol(:d_, j * size + i)
        push!(steps.args, :($d = multiply_add($(Symbol(:g_, 2b + a)), $(window_vector(b + j, a + i)), $d)))
    end
    return steps
end

for size in (3, 5)
    sums = [Symbol(:d_, t) for t in 0:size^2-1]
    @eval begin
        """
        out = the pooled planes, then which element of each window was the largest. a: split rows, b: weight, c: bias or
        null.
        """
        @inline function pool_planes!(::Type{V}, ::Val{$size}, x::Instruction{T}) where {T,W,V<:Vec{W,T}}
            s = plane_numbers(x.index)
            count = s.width * s.height * s.filters * s.samples
            zeros = repeated(V, zero(T))
            o = x.out
            last = x.out + sizeof(T) * (count - W)  # where a whole vector can be stored
            for n in 0:s.samples-1, f in 0:s.filters-1
                for y in 0:s.height-1, block in 0:(s.width-1)÷W
                    from = block * W
                    row = x.a + sizeof(T) * ((n * s.channels * s.rows + 2y) * 2 * s.half + from)
                    w = x.b + sizeof(T) * f * s.channels * $(size^2)
                    m_0, m_1, m_2, m_3 = zeros, zeros, zeros, zeros
                    for _ in 1:s.channels
                        $(channel_body(size))
                        row += sizeof(T) * s.rows * 2 * s.half
                        w += sizeof(T) * $(size^2)
                    end
                    # Before the pool: rounded, numbers that were nearly equal can be equal, and the first of them wins.
                    if x.c != C_NULL
                        b = repeated(V, unsafe_load(x.c, f + 1))
                        m_0, m_1, m_2, m_3 = plus(m_0, b), plus(m_1, b), plus(m_2, b), plus(m_3, b)
                    end
                    m, which = m_0, zeros
                    which = where_larger(m_1, m, repeated(V, T(1)), which)
                    m = where_larger(m_1, m, m_1, m)
                    which = where_larger(m_2, m, repeated(V, T(2)), which)
                    m = where_larger(m_2, m, m_2, m)
                    which = where_larger(m_3, m, repeated(V, T(3)), which)
                    m = where_larger(m_3, m, m_3, m)
                    m, which = activated(m, which, s.relu == 1)
                    # Lanes beyond the row are overwritten by the next one, which is stored later.
                    lanes = min(W, s.width - from)
                    if o <= last
                        store!(o, m)
                        store!(o + sizeof(T) * count, which)
                    else
                        store_lanes!(o, m, lanes, Ptr{T}(s.spare))
                        store_lanes!(o + sizeof(T) * count, which, lanes, Ptr{T}(s.spare))
                    end
                    o += sizeof(T) * lanes
                end
            end
            return nothing
        end

        """out = the gradient by the weight. a: split rows, b: the gradient of the pooled planes, c: which were largest."""
        @inline function pool_planes_gradient!(::Type{V}, ::Val{$size}, x::Instruction{T}) where {T,W,V<:Vec{W,T}}
            s = plane_numbers(x.index)
            plane = s.width * s.height
            last = plane * s.filters * s.samples - W
            zeros, numbers = repeated(V, zero(T)), numbered(V)
            spare = Ptr{T}(s.spare)
            parts = spare + sizeof(V)  # the gradients, a vector for each
            for t in 0:s.filters*s.channels*$(size^2)-1
                store!(parts + t * sizeof(V), zeros)
            end
            for n in 0:s.samples-1, f in 0:s.filters-1, c in 0:s.channels-1
                d = parts + sizeof(V) * (f * s.channels + c) * $(size^2)
                $([:($v = load(V, d + $(t - 1) * sizeof(V))) for (t, v) in enumerate(sums)]...)
                for y in 0:s.height-1, block in 0:(s.width-1)÷W
                    from = block * W
                    row = x.a + sizeof(T) * (((n * s.channels + c) * s.rows + 2y) * 2 * s.half + from)
                    i = (n * s.filters + f) * plane + y * s.width + from
                    g, which = zeros, zeros
                    if i <= last
                        g, which = load(V, x.b + sizeof(T) * i), load(V, x.c + sizeof(T) * i)
                    else
                        g = load_lanes(V, x.b + sizeof(T) * i, s.width - from, spare)
                        which = load_lanes(V, x.c + sizeof(T) * i, s.width - from, spare)
                    end
                    g = where_greater(repeated(V, T(s.width - from)), numbers, g, zeros)
                    g_0 = where_equal(which, zeros, g, zeros)
                    g_1 = where_equal(which, repeated(V, T(1)), g, zeros)
                    g_2 = where_equal(which, repeated(V, T(2)), g, zeros)
                    g_3 = where_equal(which, repeated(V, T(3)), g, zeros)
                    $(gradient_body(size))
                end
                $([:(store!(d + $(t - 1) * sizeof(V), $v)) for (t, v) in enumerate(sums)]...)
            end
            for t in 0:s.filters*s.channels*$(size^2)-1
                unsafe_store!(x.out, total(load(V, parts + t * sizeof(V))), t + 1)
            end
            return nothing
        end
    end
end

"""Store the first lanes alone, by way of `spare`."""
@inline function store_lanes!(p::Ptr{T}, v, lanes::Int, spare::Ptr{T}) where {T}
    store!(spare, v)
    copy_elements!(p, spare, lanes)
end

"""Load the first lanes alone; zeros in the others."""
@inline function load_lanes(::Type{V}, p::Ptr{T}, lanes::Int, spare::Ptr{T}) where {W,T,V<:Vec{W,T}}
    store!(spare, repeated(V, zero(T)))
    copy_elements!(spare, p, min(lanes, W))
    return load(V, spare)
end

@inline copy_elements!(to::Ptr{T}, from::Ptr{T}, n::Int) where {T} =
    (ccall(:memcpy, Ptr{Cvoid}, (Ptr{Cvoid}, Ptr{Cvoid}, Csize_t), to, from, n * sizeof(T)); nothing)

# Sequences whose channels lie in one piece ------------------------------------------------------------------------------
#
# What a filter sees of a sequence (C, T) is then one patch of memory, and each step begins a stride later. A vector
# holds the sums of all filters of a band for one step, each added up in the order in which the patch lies: that is also
# the other frameworks' order, so that near-ties in a pool are rounded and broken as theirs are (but not where a training step
# convolves by Winograd's algorithm). Sixteen steps are computed together; the pools are taken from the first-level cache.

"""Sizes of the kernels for sequences; addresses of memory to work in."""
struct SequenceNumbers
    patch::Int  # kernel × channels: elements that a filter sees
    step::Int  # elements from step to step
    length::Int  # steps of the convolution
    filters::Int
    samples::Int
    sample::Int  # elements of a sample
    window::Int
    stride::Int  # of the pool
    pooled::Int  # how many windows
    relu::Int
    kernel::Int
    spare::Int
end
@inline sequence_numbers(p::Ptr{Int64}) = unsafe_load(Ptr{SequenceNumbers}(p))

"""out = the weight b (kernel, C, filters) in the order (C, kernel, filters)."""
@inline function filters_in_patches!(x::Instruction{T}) where {T}
    s = sequence_numbers(x.index)
    channels = s.patch ÷ s.kernel
    for f in 0:s.filters-1, k in 0:s.kernel-1, c in 0:channels-1
        unsafe_store!(x.out, unsafe_load(x.b, (f * channels + c) * s.kernel + k + 1), f * s.patch + k * channels + c + 1)
    end
    return nothing
end

"""out (kernel, C, filters) = a (C, kernel, filters)."""
@inline function filters_in_kernels!(x::Instruction{T}) where {T}
    s = sequence_numbers(x.index)
    channels = s.patch ÷ s.kernel
    for f in 0:s.filters-1, k in 0:s.kernel-1, c in 0:channels-1
        unsafe_store!(x.out, unsafe_load(x.a, f * s.patch + k * channels + c + 1), (f * channels + c) * s.kernel + k + 1)
    end
    return nothing
end

"""out = the filters a (patch, filters) in bands of a vector; zeros for those that a band lacks."""
@inline function filters_in_bands!(::Type{Vec{W,T}}, x::Instruction{T}) where {W,T}
    s = sequence_numbers(x.index)
    i = 0
    for band in 0:W:s.filters-1, q in 0:s.patch-1, f in band:band+W-1
        unsafe_store!(x.out, f < s.filters ? unsafe_load(x.a, f * s.patch + q + 1) : zero(T), i += 1)
    end
    return nothing
end

for M in (16, 8, 4, 1)
    sums = [Symbol(:y_, t) for t in 0:M-1]
    @eval @inline function steps!(::Type{V}, ::Val{$M}, o::Ptr{T}, a::Ptr{T}, w::Ptr{T}, patch::Int, step::Int) where {T,V}
        $([:($y = repeated(V, zero(T))) for y in sums]...)
        for _ in 1:patch
            v = load(V, w)
            $([:($y = multiply_add(repeated(V, unsafe_load(a + $(t - 1) * step)), v, $y)) for (t, y) in enumerate(sums)]...)
            a += sizeof(T)
            w += sizeof(V)
        end
        $([:(store!(o + $(t - 1) * sizeof(V), $y)) for (t, y) in enumerate(sums)]...)
        return nothing
    end
end

"""
out = the pooled sequences (pooled, filters, samples), then which step of each window was the largest. a: the sequences, b:
the filters in bands, c: bias or null.
"""
@inline function pool_sequences!(::Type{V}, ::Val{M}, x::Instruction{T}) where {W,T,V<:Vec{W,T},M}
    s = sequence_numbers(x.index)
    count = s.pooled * s.filters * s.samples
    row, bytes = Ptr{T}(s.spare), sizeof(T) * s.step
    steps = row + 2 * sizeof(V)
    for n in 0:s.samples-1, band in 0:W:s.filters-1
        a = x.a + sizeof(T) * n * s.sample
        w = x.b + sizeof(T) * band * s.patch
        t = 0
        while t + M <= s.length
            steps!(V, Val(M), steps + t * sizeof(V), a + t * bytes, w, s.patch, bytes)
            t += M
        end
        while t + 4 <= s.length
            steps!(V, Val(4), steps + t * sizeof(V), a + t * bytes, w, s.patch, bytes)
            t += 4
        end
        while t < s.length
            steps!(V, Val(1), steps + t * sizeof(V), a + t * bytes, w, s.patch, bytes)
            t += 1
        end
        lanes = min(W, s.filters - band)
        bias = band_bias(V, x.c, band, lanes, row)
        o = x.out + sizeof(T) * (n * s.filters + band) * s.pooled
        pool_steps!(o, count, steps, sizeof(V), bias, lanes, row, s.pooled, s.window, s.stride, s.relu == 1)
    end
    return nothing
end

@inline band_bias(::Type{V}, bias::Ptr{T}, band::Int, lanes::Int, spare::Ptr{T}) where {T,V<:Lanes{T}} =
    bias == C_NULL ? repeated(V, zero(T)) : load_lanes(V, bias + sizeof(T) * band, lanes, spare)

"""
The pools of a band of filters, whose steps lie `apart` bytes apart: for each filter at o the largest element of each window, and
`count` elements on which that was.
"""
@inline function pool_steps!(o::Ptr{T}, count::Int, steps::Ptr{T}, apart::Int, bias::V, lanes::Int, row::Ptr{T}, pooled::Int,
        window::Int, stride::Int, relu::Bool) where {W,T,V<:Vec{W,T}}
    for p in 0:pooled-1
        at_step = steps + p * stride * apart
        m, which = plus(load(V, at_step), bias), repeated(V, zero(T))
        for k in 1:window-1
            v = plus(load(V, at_step + k * apart), bias)
            which = where_larger(v, m, repeated(V, T(k)), which)
            m = where_larger(v, m, v, m)
        end
        m, which = activated(m, which, relu)
        store!(row, m)
        store!(row + sizeof(V), which)
        for f in 1:lanes
            put!(o + sizeof(T) * p, unsafe_load(row, f), f, pooled)
            put!(o + sizeof(T) * (count + p), unsafe_load(row, W + f), f, pooled)
        end
    end
    return nothing
end

"""
The same of sequences a (filters, steps, samples) that are convolved already. n is (pooled, filters, samples, window), sa how far
a step, a sample and a window (in steps) are from the next, so how far the second half of the result is from the first; i holds
whether there is ReLU, and the address of memory to work in; c is the bias or null.
"""
@inline function pool_convolved!(::Type{V}, x::Instruction{T}) where {W,T,V<:Vec{W,T}}
    pooled, filters, samples, window = x.n
    row = Ptr{T}(x.i[2])
    for n in 0:samples-1, band in 0:W:filters-1
        lanes = min(W, filters - band)
        bias = band_bias(V, x.c, band, lanes, row)
        a = x.a + sizeof(T) * (n * x.sa[2] + band)
        o = x.out + sizeof(T) * (n * filters + band) * pooled
        pool_steps!(o, x.so[1], a, sizeof(T) * x.sa[1], bias, lanes, row, pooled, window, x.sa[3], x.i[1] == 1)
    end
    return nothing
end

"""o += g a, n elements."""
@inline function add_scaled!(::Type{V}, o::Ptr{T}, g::T, a::Ptr{T}, n::Int) where {T,W,V<:Vec{W,T}}
    v, i = repeated(V, g), 0
    while i + W <= n
        p = o + sizeof(T) * i
        store!(p, multiply_add(v, load(V, a + sizeof(T) * i), load(V, p)))
        i += W
    end
    while i < n
        i += 1
        unsafe_store!(o, unsafe_load(o, i) + g * unsafe_load(a, i), i)
    end
    return nothing
end

"""
List those pooled elements of filter f that something came through: their gradients (b) at `values`, and where the patches
that they came from begin at `places`. Returns how many there are. There is no branch to be guessed wrong.
"""
@inline function list_winners!(values::Ptr{T}, places::Ptr{Int64}, x::Instruction{T}, s::SequenceNumbers, f::Int) where {T}
    count = 0
    for n in 0:s.samples-1
        i = (n * s.filters + f) * s.pooled
        for p in 0:s.pooled-1
            i += 1
            which = unsafe_load(x.c, i)
            unsafe_store!(values, unsafe_load(x.b, i), count + 1)
            unsafe_store!(places, n * s.sample + (p * s.stride + unsafe_trunc(Int64, which)) * s.step, count + 1)
            count += which >= 0
        end
    end
    return count
end

for M in (8, 2)
    sums = [Symbol(:y_, k) for k in 0:M-1]
    # The sum over all winners of gradient times patch, for M vectors of the patch.
    @eval @inline function sum_winners!(::Type{V}, ::Val{$M}, o::Ptr{T}, values::Ptr{T}, places::Ptr{Int64}, count::Int,
            a::Ptr{T}) where {T,V}
        $([:($y = repeated(V, zero(T))) for y in sums]...)
        for i in 1:count
            v, p = repeated(V, unsafe_load(values, i)), a + sizeof(T) * unsafe_load(places, i)
            $([:($y = multiply_add(v, load(V, p + $(k - 1) * sizeof(V)), $y)) for (k, y) in enumerate(sums)]...)
        end
        $([:(store!(o + $(k - 1) * sizeof(V), $y)) for (k, y) in enumerate(sums)]...)
        return nothing
    end
end

"""
out (patch, filters) = the gradient by the filters. a: the sequences, b: the pooled gradient, c: which were largest; in
`spare` the winners of one filter are listed.
"""
@inline function pool_sequences_gradient!(::Type{V}, x::Instruction{T}) where {T,W,V<:Vec{W,T}}
    s = sequence_numbers(x.index)
    places = Ptr{Int64}(s.spare)
    values = Ptr{T}(places + 8 * (s.pooled * s.samples + 1))
    for f in 0:s.filters-1
        count = list_winners!(values, places, x, s, f)
        o, i = x.out + sizeof(T) * f * s.patch, 0
        while i + 8W <= s.patch
            sum_winners!(V, Val(8), o + sizeof(T) * i, values, places, count, x.a + sizeof(T) * i)
            i += 8W
        end
        while i + 2W <= s.patch
            sum_winners!(V, Val(2), o + sizeof(T) * i, values, places, count, x.a + sizeof(T) * i)
            i += 2W
        end
        if i < s.patch && s.patch >= 2W  # what is left, and some of what is done once more
            i = s.patch - 2W
            sum_winners!(V, Val(2), o + sizeof(T) * i, values, places, count, x.a + sizeof(T) * i)
        elseif i < s.patch
            for j in i+1:s.patch
                sum_ = zero(T)
                for k in 1:count
                    sum_ += unsafe_load(values, k) * unsafe_load(x.a, unsafe_load(places, k) + j)
                end
                unsafe_store!(o, sum_, j)
            end
        end
    end
    return nothing
end

"""out += the gradient by the sequences. a: the filters (patch, filters), b and c as above."""
@inline function unpool_sequences!(::Type{V}, x::Instruction{T}) where {T,W,V<:Vec{W,T}}
    s = sequence_numbers(x.index)
    i = 0
    for n in 0:s.samples-1, f in 0:s.filters-1, p in 0:s.pooled-1
        i += 1
        which = unsafe_load(x.c, i)
        which >= 0 || continue
        o = x.out + sizeof(T) * (n * s.sample + (p * s.stride + unsafe_trunc(Int, which)) * s.step)
        add_scaled!(V, o, unsafe_load(x.b, i), x.a + sizeof(T) * f * s.patch, s.patch)
    end
    return nothing
end

# Both -----------------------------------------------------------------------------------------------------------------

"""out (filters) = the sum of a where b, which element was largest, is not -1. n is (plane, filters, samples)."""
@inline function sum_of_winners!(x::Instruction{T}) where {T}
    plane, filters, samples = x.n[1], x.n[2], x.n[3]
    for f in 0:filters-1
        sum_ = zero(T)
        for n in 0:samples-1
            a, b = (x.a, x.b) .+ sizeof(T) * (n * filters + f) * plane
            part = zero(T)
            @summing for i in 1:plane
                part += ifelse(unsafe_load(b, i) >= 0, unsafe_load(a, i), zero(T))
            end
            sum_ += part
        end
        unsafe_store!(x.out, sum_, f + 1)
    end
    return nothing
end

"""out += a at the place of each window's largest element, b. n is (pooled width, pooled height, planes); i the width and
height of a plane and the width of a window; sa the pool's strides."""
@inline function unpool!(x::Instruction{T}) where {T}
    width, height = x.i[1], x.i[2]
    i = 0
    for l in 0:x.n[3]-1, q in 0:x.n[2]-1, p in 0:x.n[1]-1
        i += 1
        which = unsafe_load(x.b, i)
        which >= 0 || continue
        v, u = divrem(unsafe_trunc(Int, which), x.i[3])
        at_window = (l * height + q * x.sa[2] + v) * width + p * x.sa[1] + u + 1
        unsafe_store!(x.out, unsafe_load(x.out, at_window) + unsafe_load(x.a, i), at_window)
    end
    return nothing
end

for name in (:filters_in_patches, :filters_in_kernels, :sum_of_winners, :unpool)
    operation!(name, :($(Symbol(name, :!))(x)))
end
# Bands are of eight filters: with few filters, longer vectors would be half empty.
operation!(:filters_in_bands, :(filters_in_bands!(narrow(T), x)))
for (bytes, vector, steps) in ((64, :wide, 16), (32, :narrow, 8))
    for size in (3, 5)
        operation!(Symbol(:pool_planes_, bytes, :_, size), :(pool_planes!($vector(T), Val($size), x)))
        operation!(Symbol(:pool_planes_gradient_, bytes, :_, size), :(pool_planes_gradient!($vector(T), Val($size), x)))
    end
    operation!(Symbol(:split_columns_, bytes), :(split_columns!($vector(T), x)))
    operation!(Symbol(:pool_sequences_, bytes), :(pool_sequences!(narrow(T), Val($steps), x)))
    operation!(Symbol(:pool_convolved_, bytes), :(pool_convolved!($vector(T), x)))
    operation!(Symbol(:pool_sequences_gradient_, bytes), :(pool_sequences_gradient!($vector(T), x)))
    operation!(Symbol(:unpool_sequences_, bytes), :(unpool_sequences!($vector(T), x)))
end
