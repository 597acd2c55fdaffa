# Convolution by matrix products: windows into columns and back. `index` holds the sizes that `window_numbers!` lists.

"""The sizes of windows on two axes, read from an instruction's numbers."""
struct WindowNumbers
    dims::NTuple{2,Int}
    kernel::NTuple{2,Int}
    stride::NTuple{2,Int}
    before::NTuple{2,Int}
    dilation::NTuple{2,Int}
    out::NTuple{2,Int}
    channels::Int
    strides::NTuple{3,Int}
end
@inline window_numbers(p::Ptr{Int64}) = unsafe_load(Ptr{WindowNumbers}(p))

"""The positions 0 <= o < n of windows for which o ∙ stride + shift lies in 0:size-1: from the first to before the last."""
@inline function inside(n::Int, stride::Int, shift::Int, size::Int)
    from = shift >= 0 ? 0 : cld(-shift, stride)
    to = shift >= size ? 0 : min(n, (size - 1 - shift) ÷ stride + 1)
    return min(from, n), max(to, min(from, n))
end

# Rows of an image, by vectors: those of small images are shorter than what LLVM vectorises a loop for. Loops over rows are inside
# of those over taps, so that what a row needs stays in registers.

for (W, T, name) in ((8, Float32, "float"), (4, Float32, "float"), (8, Float64, "double"), (4, Float64, "double"))
    V = "<$W x $name>"
    shuffled(to, a, b, lanes) = "$to = shufflevector $V $a, $V $b, <$W x i32> <$(join(["i32 $l" for l in lanes], ", "))>\n"
    into_evens(lanes) = shuffled("%spread", "%1", "undef", lanes) * "%sum = fadd $V %0, %spread\n" *
        shuffled("%r", "%sum", "%0", [iseven(l) ? l : W + l for l in 0:W-1]) * "ret $V %r"
    for (f, code) in (:every_second => shuffled("%r", "%0", "%1", [2l < W ? 2l : 2l + 1 for l in 0:W-1]) * "ret $V %r",
        :add_first_half => into_evens([l ÷ 2 for l in 0:W-1]), :add_second_half => into_evens([(W + l) ÷ 2 for l in 0:W-1]))
        @eval @inline $f(a::Vec{$W,$T}, b::Vec{$W,$T}) = Base.llvmcall($code, Vec{$W,$T}, NTuple{2,Vec{$W,$T}}, a, b)
    end
end

"""Let the first `n` elements of rows that lie `below` one another be zero."""
@inline function zero_rows!(o::Ptr{T}, below::Int, n::Int, rows::Int) where {T}
    for u in 0:n-1, v in 0:rows-1
        unsafe_store!(o + sizeof(T) * (v * below + u), zero(T))
    end
    return nothing
end

"""Copy every S-th of 1 + (W - 1) ∙ S elements (S is 1 or 2), and read none behind these."""
@inline function copy_vector!(::Type{V}, o::Ptr{T}, a::Ptr{T}, ::Val{S}) where {W,T,V<:Vec{W,T},S}
    v = unsafe_load(Ptr{V}(a))
    S == 2 && (v = every_second(v, unsafe_load(Ptr{V}(a + sizeof(T) * (W - 1)))))
    unsafe_store!(Ptr{V}(o), v)
    return nothing
end

"""Copy every S-th element of rows of W or more; the last vector overlaps the one before."""
@inline function copy_rows!(::Type{V}, o::Ptr{T}, below::Int, a::Ptr{T}, apart::Int, n::Int, rows::Int,
        step::Val{S}) where {W,T,V<:Vec{W,T},S}
    for _ in 1:rows
        u = 0
        while u < n - W
            copy_vector!(V, o + sizeof(T) * u, a + sizeof(T) * u * S, step)
            u += W
        end
        copy_vector!(V, o + sizeof(T) * (n - W), a + sizeof(T) * (n - W) * S, step)
        o += sizeof(T) * below
        a += sizeof(T) * apart
    end
    return nothing
end

"""
Copy `rows` rows of `n` elements that lie `step` apart, and rows `apart`, into rows that lie `below` one another.
"""
@inline function copy_rows!(o::Ptr{T}, below::Int, a::Ptr{T}, apart::Int, n::Int, rows::Int, step::Int) where {T}
    if SIMD && n >= 4 && step == 1
        n >= 8 ? copy_rows!(Vec{8,T}, o, below, a, apart, n, rows, Val(1)) :
            copy_rows!(Vec{4,T}, o, below, a, apart, n, rows, Val(1))
    elseif SIMD && n >= 4 && step == 2
        n >= 8 ? copy_rows!(Vec{8,T}, o, below, a, apart, n, rows, Val(2)) :
            copy_rows!(Vec{4,T}, o, below, a, apart, n, rows, Val(2))
    else
        for v in 0:rows-1
            p, q = o + sizeof(T) * v * below, a + sizeof(T) * v * apart
            @fast for u in 1:n
                unsafe_store!(p, at(q, u, step), u)
            end
        end
    end
    return nothing
end

"""Add W elements to every S-th of S ∙ W (S is 1 or 2), and write the others as they are."""
@inline function add_vector!(::Type{V}, o::Ptr{T}, a::Ptr{T}, ::Val{S}) where {T,V<:Vec{<:Any,T},S}
    first, second, v = Ptr{V}(o), Ptr{V}(o + sizeof(V)), unsafe_load(Ptr{V}(a))
    if S == 1
        unsafe_store!(first, plus(unsafe_load(first), v))
    else
        unsafe_store!(first, add_first_half(unsafe_load(first), v))
        unsafe_store!(second, add_second_half(unsafe_load(second), v))
    end
    return nothing
end

"""Add rows to every S-th element of others, none of which is touched behind the last."""
@inline function add_rows!(o::Ptr{T}, apart::Int, a::Ptr{T}, below::Int, n::Int, rows::Int, step::Val{S}) where {T,S}
    for _ in 1:rows
        u = 0
        while u + 8 < n + (S == 1)
            add_vector!(Vec{8,T}, o + sizeof(T) * u * S, a + sizeof(T) * u, step)
            u += 8
        end
        if u + 4 < n + (S == 1)
            add_vector!(Vec{4,T}, o + sizeof(T) * u * S, a + sizeof(T) * u, step)
            u += 4
        end
        while u < n
            p = o + sizeof(T) * u * S
            unsafe_store!(p, unsafe_load(p) + unsafe_load(a + sizeof(T) * u))
            u += 1
        end
        o += sizeof(T) * apart
        a += sizeof(T) * below
    end
    return nothing
end

"""
Add `rows` rows of `n` elements that lie `below` one another to elements that lie `step` apart, in rows that lie `apart`.
"""
@inline function add_rows!(o::Ptr{T}, apart::Int, a::Ptr{T}, below::Int, n::Int, rows::Int, step::Int) where {T}
    if SIMD && n >= 4 && step == 1
        add_rows!(o, apart, a, below, n, rows, Val(1))
    elseif SIMD && n > 4 && step == 2
        add_rows!(o, apart, a, below, n, rows, Val(2))
    else
        for v in 0:rows-1
            p, q = o + sizeof(T) * v * apart, a + sizeof(T) * v * below
            @fast for u in 1:n
                put!(p, at(p, u, step) + unsafe_load(q, u), u, step)
            end
        end
    end
    return nothing
end

"""
    @taps x body

Run `body` once for each channel and tap of an instruction's kernel. Of `width` windows in a row and `height` rows, those at `from`
to before `to` of a row, in the rows `first` to before `last`, have that tap inside of the image: the first of them `shift` elements
behind the image's start, the next one in its row `step` behind it, and the next row's `apart`.
"""
macro taps(x, body)
    return esc(quote
        w = window_numbers($x.index)
        width, height = w.out
        step, apart = w.stride[1] * w.strides[1], w.stride[2] * w.strides[2]
        for c in 0:w.channels-1, j in 0:w.kernel[2]-1, i in 0:w.kernel[1]-1
            right, down = i * w.dilation[1] - w.before[1], j * w.dilation[2] - w.before[2]
            from, to = inside(width, w.stride[1], right, w.dims[1])
            first, last = inside(height, w.stride[2], down, w.dims[2])
            shift = c * w.strides[3] + down * w.strides[2] + first * apart + right * w.strides[1] + from * step
            $body
        end
    end)
end

"""out (pixels, taps) = the windows of an image, each tap of the kernel in a column; zeros outside of the image."""
@inline function im2col!(x::Instruction{T}) where {T}
    o = x.out
    @taps x begin
        zero_rows!(o, width, first * width, 1)
        zero_rows!(o + sizeof(T) * first * width, width, from, last - first)
        zero_rows!(o + sizeof(T) * (first * width + to), width, width - to, last - first)
        zero_rows!(o + sizeof(T) * last * width, width, (height - last) * width, 1)
        copy_rows!(o + sizeof(T) * (first * width + from), width, x.a + sizeof(T) * shift, apart, to - from, last - first, step)
        o += sizeof(T) * width * height
    end
    return nothing
end

"""Add the windows a (pixels, taps) to the image that they are windows of."""
@inline function col2im!(x::Instruction{T}) where {T}
    a = x.a
    @taps x begin
        add_rows!(x.out + sizeof(T) * shift, apart, a + sizeof(T) * (first * width + from), width, to - from, last - first, step)
        a += sizeof(T) * width * height
    end
    return nothing
end

operation!(:im2col, :(im2col!(x)))
operation!(:col2im, :(col2im!(x)))
