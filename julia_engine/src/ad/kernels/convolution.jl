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

"""out (pixels, taps) = the windows of an image, each tap of the kernel in a column; zeros outside of the image."""
@inline function im2col!(x::Instruction{T}) where {T}
    w = window_numbers(x.index)
    width, o = w.out[1], x.out
    for c in 0:w.channels-1, j in 0:w.kernel[2]-1, i in 0:w.kernel[1]-1
        shift = i * w.dilation[1] - w.before[1]
        from, to = inside(width, w.stride[1], shift, w.dims[1])
        step = w.stride[1] * w.strides[1]
        for v in 0:w.out[2]-1
            y = v * w.stride[2] + j * w.dilation[2] - w.before[2]
            a = x.a + sizeof(T) * (c * w.strides[3] + y * w.strides[2] + shift * w.strides[1])
            if 0 <= y < w.dims[2]
                for u in 0:from-1
                    unsafe_store!(o, zero(T), u + 1)
                end
                if step == 1
                    @fast for u in from+1:to
                        unsafe_store!(o, unsafe_load(a, u), u)
                    end
                else
                    @fast for u in from+1:to
                        unsafe_store!(o, at(a, u, step), u)
                    end
                end
                for u in to:width-1
                    unsafe_store!(o, zero(T), u + 1)
                end
            else
                @fast for u in 1:width
                    unsafe_store!(o, zero(T), u)
                end
            end
            o += sizeof(T) * width
        end
    end
    return nothing
end

"""Add the windows a (pixels, taps) to the image that they are windows of."""
@inline function col2im!(x::Instruction{T}) where {T}
    w = window_numbers(x.index)
    width, a = w.out[1], x.a
    for c in 0:w.channels-1, j in 0:w.kernel[2]-1, i in 0:w.kernel[1]-1
        shift = i * w.dilation[1] - w.before[1]
        from, to = inside(width, w.stride[1], shift, w.dims[1])
        step = w.stride[1] * w.strides[1]
        for v in 0:w.out[2]-1
            y = v * w.stride[2] + j * w.dilation[2] - w.before[2]
            if 0 <= y < w.dims[2]
                o = x.out + sizeof(T) * (c * w.strides[3] + y * w.strides[2] + shift * w.strides[1])
                if step == 1
                    @fast for u in from+1:to
                        unsafe_store!(o, unsafe_load(o, u) + unsafe_load(a, u), u)
                    end
                else
                    @fast for u in from+1:to
                        put!(o, at(o, u, step) + unsafe_load(a, u), u, step)
                    end
                end
            end
            a += sizeof(T) * width
        end
    end
    return nothing
end

operation!(:im2col, :(im2col!(x)))
operation!(:col2im, :(col2im!(x)))
