# Large products, shared by threads.
#
# OpenBLAS's own threads wait for the next product busily, which slows down what Julia's threads do meanwhile. So these
# share the products: each computes some rows or columns of the result.

"""Multiplications of a product from which on sharing it out takes little of its time."""
const LEAST_SHARED_OUT = 2^23

"""Rows or columns that threads do not share: a cache line of Float32."""
const SHARED_LINE = 16

product_address(::Type{T}) where {T} = get(ADDRESSES, (:matmul, T === Float32), C_NULL)

"""Whether BLAS computes a product in these instructions."""
has_product(code::Vector{Instruction{T}}, range::UnitRange{Int}) where {T} = any(i -> code[i].kernel == product_address(T), range)

is_shared_out(x::Instruction, product::Ptr{Cvoid}) =
    x.kernel == product && x.n[4] == 1 && 1.0 * x.n[1] * x.n[2] * x.n[3] >= LEAST_SHARED_OUT

"""
The part of a product that thread `k` of `threads` computes: rows of the result, with the whole right matrix, or columns, with
the whole left one. The smaller of the two is read by all threads.
"""
function part(x::Instruction{T}, threads::Int, k::Int) where {T}
    m, n, summed, _ = x.n
    by_columns = m <= n
    length = by_columns ? n : m
    bound(k) = k == threads ? length : length * k ÷ threads ÷ SHARED_LINE * SHARED_LINE
    first, count, bytes = bound(k - 1), bound(k) - bound(k - 1), sizeof(T)
    out, a, b = x.out, x.a, x.b
    if by_columns
        out += bytes * first * x.so[1]
        b += bytes * first * (x.i[2] == 1 ? 1 : x.sb[1])
    else
        out += bytes * first
        a += bytes * first * (x.i[1] == 1 ? x.sa[1] : 1)
    end
    sides = by_columns ? (m, count, summed, 1) : (count, n, summed, 1)
    return Instruction{T}(x.kernel, out, a, b, x.c, x.index, sides, x.so, x.sa, x.sb, x.sc, x.i, x.f)
end

"""
    SharedCode{T}

The instructions of a tape for threads that run it together: all compute parts of its large products of elements `T`, and the
first thread does the others. `stages` are the segments of `code` before each product and after the last; `parts` has for each
thread its part of each product, and `lasting` the code that has been cut up, which keeps the memory alive.
"""
struct SharedCode{T}
    code::Instructions
    stages::Vector{UnitRange{Int}}
    parts::Vector{Vector{Instruction{T}}}
    lasting::Instructions
end

"""The shared code of a tape, or `nothing` where large products are less than three quarters of all multiplications of BLAS."""
function shared_code(::Type{T}, p::Instructions, threads::Int) where {T}
    own, product = of_type(p, T), product_address(T)
    multiplications(x) = x.kernel == product ? 1.0 * x.n[1] * x.n[2] * x.n[3] * x.n[4] : 0.0
    large = filter(x -> is_shared_out(x, product), own)
    isempty(large) && return nothing
    4 * sum(multiplications, large) >= 3 * sum(multiplications, own) || return nothing
    code = Instructions()
    append!(code.f32, p.f32)
    append!(code.f64, p.f64)
    append!(code.moves, p.moves)
    stages, parts = UnitRange{Int}[], [Instruction{T}[] for _ in 1:threads]
    begun = 1  # the segment that the stage begins with
    for s in p.segments
        if s.tile != 0 || s.single != (T === Float32)
            push!(code.segments, s)
            continue
        end
        first = s.first
        for i in s.first:s.last
            is_shared_out(own[i], product) || continue
            first < i && push!(code.segments, Segment(s.single, first, i - 1))
            push!(stages, begun:length(code.segments))
            begun, first = length(code.segments) + 1, i + 1
            for k in 1:threads
                push!(parts[k], part(own[i], threads, k))
            end
        end
        first <= s.last && push!(code.segments, Segment(s.single, first, s.last))
    end
    push!(stages, begun:length(code.segments))
    return SharedCode{T}(code, stages, parts, p)
end

"""Do what is before the j-th product, or after the last: the first thread."""
@noinline function execute_stage!(shared::SharedCode, j::Int)
    for k in shared.stages[j]
        execute_segment!(shared.code, k)
    end
    return nothing
end

"""Do thread `k`'s part of the j-th product."""
execute_product!(shared::SharedCode, k::Int, j::Int) = execute!(shared.parts[k], j, j)

of_type(p::Instructions, ::Type{Float32}) = p.f32
of_type(p::Instructions, ::Type{Float64}) = p.f64
