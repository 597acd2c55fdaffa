# Large products, shared by threads.
#
# OpenBLAS's own threads wait for the next product busily, which slows down what Julia's threads do meanwhile. So these
# share the products: each computes some rows or columns of the result.

"""Multiplications of a product from which on sharing it out takes little of its time."""
const LEAST_SHARED_OUT = 2^22
"""Elements of its largest matrix from which on, since it takes long to read that once."""
const LEAST_ELEMENTS = 2^19

"""Rows of which one thread computes all: those of the largest tile, and several cache lines."""
const SHARED_ROWS = 64
"""Columns of which one thread computes all: two tiles of the usual width."""
const SHARED_COLUMNS = 12

product_address(::Type{T}) where {T} = known_address(:matmul, T === Float32)
tile_addresses(::Type{T}) where {T} =
    filter!(address -> address != C_NULL, Ptr{Cvoid}[known_address(name, T === Float32) for (name, _, _) in TILES])

"""Addresses of the kernels that multiply matrices: BLAS's, then those of tiles."""
products(::Type{T}) where {T} = Ptr{Cvoid}[product_address(T); tile_addresses(T)]

multiplications(x::Instruction) = 1.0 * x.n[1] * x.n[2] * x.n[3] * x.n[4]

"""The instructions that multiply, of those of one op: `nothing` where others are between them, or products are stacked."""
function product_of(code::Vector{Instruction{T}}, range::UnitRange{Int}, kernels::Vector{Ptr{Cvoid}}=products(T)) where {T}
    found = Int[i for i in range if code[i].kernel in kernels]
    isempty(found) && return nothing
    whole = first(found):last(found)
    return length(whole) == length(found) && all(i -> code[i].n[4] == 1, found) ? whole : nothing
end

"""Where the pieces of a product begin, as row and column, and how many rows and columns it has."""
function pieces(product::Vector{Instruction{T}}) where {T}
    lead = product[1].so[1]
    places = Tuple{Int,Int}[reverse(fldmod((x.out - product[1].out) ÷ sizeof(T), lead)) for x in product]
    m = maximum(Int[row + x.n[1] for ((row, _), x) in zip(places, product)])
    n = maximum(Int[column + x.n[2] for ((_, column), x) in zip(places, product)])
    return places, m, n
end

"""Whether a product takes so long that sharing it out pays."""
function is_shared_out(product::Vector{<:Instruction})
    _, m, n = pieces(product)
    count = sum(multiplications, product)
    return count >= LEAST_SHARED_OUT || max(m * n, count / m, count / n) >= LEAST_ELEMENTS
end

"""
What thread `k` of `threads` computes of a product, which these instructions make piece by piece: some rows of the result, with
the whole right matrix, or some columns, with the whole left one. The smaller of the two is read by all threads.
"""
function part(product::Vector{Instruction{T}}, threads::Int, k::Int) where {T}
    places, m, n = pieces(product)
    by_columns = m <= n || m < SHARED_ROWS * threads
    all, step = by_columns ? (n, SHARED_COLUMNS) : (m, SHARED_ROWS)
    bound(k) = k == threads ? all : all * k ÷ threads ÷ step * step
    from, to = bound(k - 1), bound(k)
    found = Instruction{T}[]
    for ((row, column), x) in zip(places, product)
        start, count = by_columns ? (column, x.n[2]) : (row, x.n[1])
        low, high = max(from, start), min(to, start + count)
        low < high && push!(found, by_columns ? some_columns(x, low - start, high - low) : some_rows(x, low - start, high - low))
    end
    return found
end

"""The columns of a piece of a product after the first `skipped`."""
function some_columns(x::Instruction{T}, skipped::Int, count::Int) where {T}
    apart = x.kernel != product_address(T) ? x.sb[2] : x.i[2] == 1 ? 1 : x.sb[1]
    return piece(x, x.out + sizeof(T) * skipped * x.so[1], x.a, x.b + sizeof(T) * skipped * apart, (x.n[1], count, x.n[3], 1))
end

"""The rows of a piece of a product after the first `skipped`."""
function some_rows(x::Instruction{T}, skipped::Int, count::Int) where {T}
    apart = x.kernel == product_address(T) && x.i[1] == 1 ? x.sa[1] : 1
    return piece(x, x.out + sizeof(T) * skipped, x.a + sizeof(T) * skipped * apart, x.b, (count, x.n[2], x.n[3], 1))
end

piece(x::Instruction{T}, out::Ptr{T}, a::Ptr{T}, b::Ptr{T}, n::NTuple{4,Int}) where {T} =
    Instruction{T}(x.kernel, out, a, b, x.c, x.index, n, x.so, x.sa, x.sb, x.sc, x.i, x.f)

"""
    SharedCode{T}

The instructions of a tape for threads that run it together: all compute parts of its large products of elements `T`, and the
first thread does the others. `stages` are the segments of `code` before each product and after the last; `parts` has for each
thread the instructions of its parts, and which of them are of each product; `lasting` is the code that has been cut up, which
keeps the memory alive.
"""
struct SharedCode{T}
    code::Instructions
    stages::Vector{UnitRange{Int}}
    parts::Vector{Tuple{Vector{Instruction{T}},Vector{UnitRange{Int}}}}
    lasting::Instructions
end

"""
The shared code of a tape of which each op has these instructions, or `nothing` where large products are less than nine tenths
of all multiplications of products: the others would be left to one thread.
"""
function shared_code(::Type{T}, p::Instructions, ops::Vector{UnitRange{Int}}, threads::Int) where {T}
    own, kernels = of_type(p, T), products(T)
    large = Dict{Int,UnitRange{Int}}()  # by their first instruction
    shared_out = 0.0
    for op in ops
        product = product_of(own, op, kernels)
        product !== nothing && is_shared_out(own[product]) || continue
        large[first(product)] = product
        shared_out += sum(multiplications, own[product])
    end
    isempty(large) && return nothing
    10 * shared_out >= 9 * sum(Float64[multiplications(x) for x in own if x.kernel in kernels]) || return nothing
    code = Instructions()
    append!(code.f32, p.f32)
    append!(code.f64, p.f64)
    append!(code.moves, p.moves)
    stages = UnitRange{Int}[]
    parts = Tuple{Vector{Instruction{T}},Vector{UnitRange{Int}}}[(Instruction{T}[], UnitRange{Int}[]) for _ in 1:threads]
    begun = 1  # the segment that the stage begins with
    for s in p.segments
        if s.tile != 0 || s.single != (T === Float32)
            push!(code.segments, s)
            continue
        end
        next = s.first
        for i in s.first:s.last
            product = get(large, i, nothing)
            product === nothing && continue
            next < i && push!(code.segments, Segment(s.single, next, i - 1))
            push!(stages, begun:length(code.segments))
            begun, next = length(code.segments) + 1, last(product) + 1
            for (k, (instructions, ranges)) in enumerate(parts)
                mine = part(own[product], threads, k)
                push!(ranges, length(instructions)+1:length(instructions)+length(mine))
                append!(instructions, mine)
            end
        end
        next <= s.last && push!(code.segments, Segment(s.single, next, s.last))
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
@inline function execute_product!(shared::SharedCode, k::Int, j::Int)
    instructions, ranges = shared.parts[k]
    return execute!(instructions, first(ranges[j]), last(ranges[j]))
end

of_type(p::Instructions, ::Type{Float32}) = p.f32
of_type(p::Instructions, ::Type{Float64}) = p.f64
