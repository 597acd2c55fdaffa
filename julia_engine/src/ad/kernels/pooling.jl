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
    us.last - us.first == 1 && us.step == 1 && vs.last - vs.first == 1 && vs.step == 1 &&
        return winner_of_four(element(a, s, us.first, vs.first, 0, 0), s, us.first, vs.first)
    best, at_u, at_v = T(-Inf), first(us), first(vs)
    for j in vs, i in us
        value = unsafe_load(element(a, s, i, j, 0, 0))
        if wins(value, best)
            best, at_u, at_v = value, i, j
        end
    end
    return at_u, at_v
end

@inline wins(value::T, best::T) where {T} = (value > best) | ((value != value) & (best == best))

"""The same of two by two elements, without branches: they would be guessed wrong every other time."""
@inline function winner_of_four(a::Ptr{T}, s, u::Int, v::Int) where {T}
    best, later = unsafe_load(a), unsafe_load(element(a, s, 1, 0, 0, 0))
    over = wins(later, best)
    best, at_u = ifelse(over, later, best), ifelse(over, u + 1, u)
    below, last = unsafe_load(element(a, s, 0, 1, 0, 0)), unsafe_load(element(a, s, 1, 1, 0, 0))
    over = wins(last, below)
    below, below_u = ifelse(over, last, below), ifelse(over, u + 1, u)
    over = wins(below, best)
    return ifelse(over, below_u, at_u), ifelse(over, v + 1, v)
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

# Windows of two by two that do not overlap, without padding, of planes whose first axis lies in one piece: in vectors.

"""The larger of two, and the first of equal ones."""
@inline larger(value::T, best::T) where {T} = ifelse(wins(value, best), value, best)

"""Run `body` for each row of such windows: two rows of elements that begin at `upper` and `lower`."""
macro pairs_of_rows(x, a, sa, body)
    return esc(quote
        w = window_numbers($x.index)
        for l in 0:$x.n[2]-1, k in 0:$x.n[1]-1, q in 0:w.out[2]-1
            upper = element($a, $sa, 0, 2q, k, l)
            lower = upper + sizeof(T) * $sa[2]
            $body
        end
    end)
end

@inline function max_pool_pairs!(x::Instruction{T}) where {T}
    @pairs_of_rows x x.a x.sa begin
        out = element(x.out, x.so, 0, q, k, l)
        @fast for p in 1:w.out[1]
            above = larger(unsafe_load(upper, 2p), unsafe_load(upper, 2p - 1))
            below = larger(unsafe_load(lower, 2p), unsafe_load(lower, 2p - 1))
            unsafe_store!(out, larger(below, above), p)
        end
    end
end

"""out = a where the largest of b are, else 0."""
@inline function max_pool_gradient_pairs!(x::Instruction{T}) where {T}
    @pairs_of_rows x x.b x.sb begin
        g, out = element(x.a, x.sa, 0, q, k, l), element(x.out, x.so, 0, 2q, k, l)
        under = out + sizeof(T) * x.so[2]
        @fast for p in 1:w.out[1]
            up, down = unsafe_load(g, p), zero(T)
            a, b, c, d = unsafe_load(upper, 2p - 1), unsafe_load(upper, 2p), unsafe_load(lower, 2p - 1), unsafe_load(lower, 2p)
            above, below = larger(b, a), larger(d, c)
            in_upper, in_lower = ifelse(wins(below, above), down, up), ifelse(wins(below, above), up, down)
            unsafe_store!(out, ifelse(wins(b, a), down, in_upper), 2p - 1)
            unsafe_store!(out, ifelse(wins(b, a), in_upper, down), 2p)
            unsafe_store!(under, ifelse(wins(d, c), down, in_lower), 2p - 1)
            unsafe_store!(under, ifelse(wins(d, c), in_lower, down), 2p)
        end
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

for name in (:max_pool, :max_pool_pairs, :max_pool_gradient, :max_pool_gradient_pairs, :max_pool_gather, :avg_pool, :avg_pool_gradient)
    operation!(name, :($(Symbol(name, :!))(x)))
end
