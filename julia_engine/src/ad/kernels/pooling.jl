# Pooling in general: any window, stride, padding and layout. n is (channels, samples); strides are those along the two
# axes of a plane, then from channel to channel and from sample to sample.

"""The places of a window along an axis, those on padding left out: a range that is made without a division."""
struct Places
    first::Int
    last::Int
    step::Int
end
@inline places(start::Int, kernel::Int, dilation::Int, n::Int) = dilation == 1 ? Places(max(start, 0), min(start + kernel, n) - 1, 1) :
    Places(start + dilation * cld(max(-start, 0), dilation), min(start + (kernel - 1) * dilation, n - 1), dilation)
@inline Base.first(p::Places) = p.first
@inline Base.iterate(p::Places, at::Int=p.first) = at > p.last ? nothing : (at, at + p.step)

"""Run `body` for each window, with `place` the offset of its result in `out`, and its elements at u in us, v in vs."""
macro windows(x, body)
    return esc(quote
        w = window_numbers($x.index)
        for l in 0:$x.n[2]-1, k in 0:$x.n[1]-1, q in 0:w.out[2]-1, p in 0:w.out[1]-1
            u, v = p * w.stride[1] - w.before[1], q * w.stride[2] - w.before[2]
            us = places(u, w.kernel[1], w.dilation[1], w.dims[1])
            vs = places(v, w.kernel[2], w.dilation[2], w.dims[2])
            $body
        end
    end)
end

@inline element(p::Ptr{T}, s, i, j, k, l) where {T} = p + sizeof(T) * (i * s[1] + j * s[2] + k * s[3] + l * s[4])

"""Where in a plane the largest element is, the first of equal ones; NaN counts as the largest."""
@inline function winner(a::Ptr{T}, s, us, vs) where {T}
    best, at_u, at_v = T(-Inf), first(us), first(vs)
    for j in vs, i in us
        value = unsafe_load(element(a, s, i, j, 0, 0))
        if value > best || (isnan(value) && !isnan(best))
            best, at_u, at_v = value, i, j
        end
    end
    return at_u, at_v
end

@inline function max_pool!(x::Instruction{T}) where {T}
    @windows x begin
        a = element(x.a, x.sa, 0, 0, k, l)
        i, j = winner(a, x.sa, us, vs)
        unsafe_store!(element(x.out, x.so, p, q, k, l), unsafe_load(element(a, x.sa, i, j, 0, 0)))
    end
end

"""out += a where the largest of b are."""
@inline function max_pool_gradient!(x::Instruction{T}) where {T}
    @windows x begin
        i, j = winner(element(x.b, x.sb, 0, 0, k, l), x.sb, us, vs)
        o = element(x.out, x.so, i, j, k, l)
        unsafe_store!(o, unsafe_load(o) + unsafe_load(element(x.a, x.sa, p, q, k, l)))
    end
end

"""out = a where the largest of b are."""
@inline function max_pool_gather!(x::Instruction{T}) where {T}
    @windows x begin
        i, j = winner(element(x.b, x.sb, 0, 0, k, l), x.sb, us, vs)
        unsafe_store!(element(x.out, x.so, p, q, k, l), unsafe_load(element(x.a, x.sa, i, j, k, l)))
    end
end

@inline function avg_pool!(x::Instruction{T}) where {T}
    @windows x begin
        total = zero(T)
        for j in vs, i in us
            total += unsafe_load(element(x.a, x.sa, i, j, k, l))
        end
        unsafe_store!(element(x.out, x.so, p, q, k, l), total / (w.kernel[1] * w.kernel[2]))
    end
end

@inline function avg_pool_gradient!(x::Instruction{T}) where {T}
    @windows x begin
        part = unsafe_load(element(x.a, x.sa, p, q, k, l)) / (w.kernel[1] * w.kernel[2])
        for j in vs, i in us
            o = element(x.out, x.so, i, j, k, l)
            unsafe_store!(o, unsafe_load(o) + part)
        end
    end
end

for name in (:max_pool, :max_pool_gradient, :max_pool_gather, :avg_pool, :avg_pool_gradient)
    operation!(name, :($(Symbol(name, :!))(x)))
end
