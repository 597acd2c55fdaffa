# Small matrix products without BLAS.
#
# A training step multiplies matrices of a few dozen rows. BLAS copies ("packs") both operands first and was often built
# before the processor it runs on; a tile of the result that stays in registers needs no copies where the columns of `a`
# lie in one piece: per summand, its vectors are loaded, the elements of `b`, wherever they lie, are repeated over a
# vector each, and every pair is multiplied and added. Very large products, and rows that do not fill a vector, are
# left to BLAS.

const Vec{W,T} = NTuple{W,VecElement{T}}
"""Vectors of any length but 0, whose type tells that of their elements."""
const Lanes{T} = Tuple{VecElement{T},Vararg{VecElement{T}}}

for (W, T, suffix) in ((16, Float32, "v16f32"), (8, Float32, "v8f32"), (8, Float64, "v8f64"), (4, Float64, "v4f64"))
    @eval @inline multiply_add(a::Vec{$W,$T}, b::Vec{$W,$T}, c::Vec{$W,$T}) =
        ccall($("llvm.fma.$suffix"), llvmcall, Vec{$W,$T}, (Vec{$W,$T}, Vec{$W,$T}, Vec{$W,$T}), a, b, c)
end

@inline repeated(::Type{Vec{W,T}}, v::T) where {W,T} = ntuple(_ -> VecElement{T}(v), Val(W))

"""The body of a tile of M vectors of rows times N columns, written out: its sums are variables, and so registers."""
function tile_body(M::Int, N::Int)
    sums = [Symbol(:c_, i, :_, j) for i in 1:M, j in 1:N]
    rows = [Symbol(:a_, i) for i in 1:M]
    place(i, j) = :(Ptr{V}(c + $(i - 1) * sizeof(V) + $(j - 1) * sizeof(T) * ldc))
    steps = Expr(:block, [:($(rows[i]) = unsafe_load(Ptr{V}(a + $(i - 1) * sizeof(V)))) for i in 1:M]...)
    for j in 1:N
        push!(steps.args, :(v = repeated(V, unsafe_load(b + $(j - 1) * sizeof(T) * across))))
        for i in 1:M
            push!(steps.args, :($(sums[i, j]) = multiply_add($(rows[i]), v, $(sums[i, j]))))
        end
    end
    return quote
        if add
            $([:($(sums[i, j]) = unsafe_load($(place(i, j)))) for i in 1:M, j in 1:N]...)
        else
            $([:($(sums[i, j]) = repeated(V, zero(T))) for i in 1:M, j in 1:N]...)
        end
        for _ in 1:k
            $steps
            a += sizeof(T) * lda
            b += sizeof(T) * down
        end
        $([:(unsafe_store!($(place(i, j)), $(sums[i, j]))) for i in 1:M, j in 1:N]...)
        return nothing
    end
end

# Compute one tile, c = a b, or c + a b. `a` has columns `lda` apart; the element of `b` for summand p and column j lies
# at p ∙ down + j ∙ across.
for M in (1, 2, 4), N in (1, 2, 4, 6)
    @eval @inline function tile!(::Type{V}, ::Val{$M}, ::Val{$N}, a::Ptr{T}, lda::Int, b::Ptr{T}, down::Int, across::Int,
            c::Ptr{T}, ldc::Int, k::Int, add::Bool) where {V,T}
        $(tile_body(M, N))
    end
end

# A column of the result is written a band of a tile's rows at a time, and then the next column: far apart, for few summands, which
# are soon added. So many bands of these alternate as the second-level cache holds of `a`, and columns are written in long pieces.
const FEW_SUMMED = 32
const BAND_BYTES = 512 * 1024

"""How many rows, a multiple of a tile's, are done of some columns before the next columns."""
rows_in_turn(::Type{T}, band::Int, k::Int) where {T} = k > FEW_SUMMED ? band : max(1, BAND_BYTES ÷ (k * band * sizeof(T))) * band

"""
Multiply by tiles of M vectors of rows. n is (rows, columns, summed, stacked products), rows a multiple of the tile's;
sb is how far apart the elements of b are along the summed axis and across the columns, then from product to product.
"""
@inline function tiles!(::Type{Vec{W,T}}, ::Val{M}, x::Instruction{T}) where {W,T,M}
    m, n, k, stacked = x.n
    lda, ldc, down, across, add, bytes = x.sa[1], x.so[1], x.sb[1], x.sb[2], x.f[1] == 1, sizeof(T)
    V = Vec{W,T}
    at_once = rows_in_turn(T, W * M, k)
    for s in 0:stacked-1, first in 0:at_once:m-1
        rows = first:W*M:min(first + at_once, m)-1
        a = x.a + bytes * s * x.sa[2]
        c = x.out + bytes * s * x.so[2]
        b = x.b + bytes * s * x.sb[3]
        j = 0
        while j + 6 <= n
            column_tiles!(V, Val(M), Val(6), rows, a, lda, b + bytes * j * across, down, across, c + bytes * j * ldc, ldc, k, add)
            j += 6
        end
        if j + 4 <= n
            column_tiles!(V, Val(M), Val(4), rows, a, lda, b + bytes * j * across, down, across, c + bytes * j * ldc, ldc, k, add)
            j += 4
        end
        if j + 2 <= n
            column_tiles!(V, Val(M), Val(2), rows, a, lda, b + bytes * j * across, down, across, c + bytes * j * ldc, ldc, k, add)
            j += 2
        end
        if j < n
            column_tiles!(V, Val(M), Val(1), rows, a, lda, b + bytes * j * across, down, across, c + bytes * j * ldc, ldc, k, add)
        end
    end
    return nothing
end

"""The tiles of N columns that begin at these rows."""
@inline function column_tiles!(::Type{V}, ::Val{M}, ::Val{N}, rows::StepRange{Int,Int}, a::Ptr{T}, lda::Int, b::Ptr{T}, down::Int,
        across::Int, c::Ptr{T}, ldc::Int, k::Int, add::Bool) where {V,T,M,N}
    for i in rows
        tile!(V, Val(M), Val(N), a + sizeof(T) * i, lda, b, down, across, c + sizeof(T) * i, ldc, k, add)
    end
    return nothing
end

# Matrices turned ------------------------------------------------------------------------------------------------------

for (W, T, name) in ((16, Float32, "float"), (8, Float32, "float"), (8, Float64, "double"), (4, Float64, "double"))
    V = "<$W x $name>"
    exchanged(lanes) =
        "%r = shufflevector $V %0, $V %1, <$W x i32> <$(join(["i32 $l" for l in lanes], ", "))>\nret $V %r"
    # A square of W vectors is turned by exchanging its quarters, then the quarters of each quarter, and so on.
    steps = Expr(:block)
    d = W ÷ 2
    while d >= 1
        upper = exchanged([l & d == 0 ? l : W + l - d for l in 0:W-1])
        lower = exchanged([l & d == 0 ? l + d : W + l for l in 0:W-1])
        for r in 0:W-1
            r & d == 0 || continue
            a, b = Symbol(:v_, r), Symbol(:v_, r + d)
            push!(steps.args, :(($a, $b) = (Base.llvmcall($upper, Vec{$W,$T}, NTuple{2,Vec{$W,$T}}, $a, $b),
                Base.llvmcall($lower, Vec{$W,$T}, NTuple{2,Vec{$W,$T}}, $a, $b))))
        end
        d ÷= 2
    end
    @eval @inline function turn_square!(::Type{Vec{$W,$T}}, o::Ptr{$T}, so::Int, a::Ptr{$T}, sa::Int)
        V = Vec{$W,$T}
        $([:($(Symbol(:v_, r)) = unsafe_load(Ptr{V}(a + $r * sizeof($T) * sa))) for r in 0:W-1]...)
        $steps
        $([:(unsafe_store!(Ptr{V}(o + $r * sizeof($T) * so), $(Symbol(:v_, r)))) for r in 0:W-1]...)
        return nothing
    end
end

"""
Copy row-major matrices into column-major ones, square by square. The last squares of each direction overlap
those before: what is copied twice is the same.
"""
@inline function turn!(::Type{V}, x::Instruction{T}) where {W,T,V<:Vec{W,T}}
    for l in 0:x.n[4]-1, k in 0:x.n[3]-1
        o, a = moved(x.out, x.so, 0, k, l), moved(x.a, x.sa, 0, k, l)
        for q in 0:(x.n[2]-1)÷W, p in 0:(x.n[1]-1)÷W
            i, j = min(p * W, x.n[1] - W), min(q * W, x.n[2] - W)
            turn_square!(V, o + sizeof(T) * (i + j * x.so[2]), x.so[2], a + sizeof(T) * (i * x.sa[1] + j), x.sa[1])
        end
    end
    return nothing
end

wide(::Type{T}) where {T} = Vec{64 ÷ sizeof(T),T}  # 512 bits
narrow(::Type{T}) where {T} = Vec{32 ÷ sizeof(T),T}  # 256 bits

"""The bytes of a vector register that tiles may use: 64, 32, or 0 for none."""
const VECTOR_BYTES = Ref(0)

"""What this processor has, as far as the operating system tells; the environment's TWINGRAD_VECTOR_BYTES goes first."""
function find_vector_bytes()
    given = get(ENV, "TWINGRAD_VECTOR_BYTES", "")
    given in ("0", "32", "64") && return parse(Int, given)
    isempty(given) || error("TWINGRAD_VECTOR_BYTES=$given: expected 0, 32 or 64")
    Sys.ARCH === :x86_64 && Sys.islinux() || return 0
    flags = try
        first(line for line in eachline("/proc/cpuinfo") if startswith(line, "flags"))
    catch
        return 0
    end
    has(name) = occursin(" $name ", flags * " ")
    return has("avx512f") && has("avx512vl") ? 64 : has("avx2") && has("fma") ? 32 : 0
end
