# Matrix products by BLAS, called at its addresses: nothing is wrapped, copied or allocated.

using LinearAlgebra.BLAS: @blasfunc
using ...Versions: LIBBLAS
const BlasInt = LinearAlgebra.BlasInt

"""
Where the functions of another BLAS are, with whole numbers of 64 bits, that multiplies in place of Julia's own; null without.
"""
const OTHER_BLAS = (sgemm=Ref(C_NULL), sgemv=Ref(C_NULL), dgemm=Ref(C_NULL), dgemv=Ref(C_NULL), set_threads=Ref(C_NULL),
    threads=Ref(C_NULL))

"""
    use_blas!(addresses)

Multiply by another BLAS from now on, such as a newer one that is in this process anyway: the addresses of its functions in the
order of `OTHER_BLAS`, as whole numbers. False, and nothing changes, where Julia's own has whole numbers of 32 bits.
"""
function use_blas!(addresses::NTuple{6,Integer})
    BlasInt === Int64 || return false
    for (place, address) in zip(OTHER_BLAS, addresses)
        place[] = Ptr{Cvoid}(UInt(address))
    end
    return true
end

gemm_call(T, gemm) = :(ccall($gemm, Cvoid, (Ref{UInt8}, Ref{UInt8}, Ref{BlasInt}, Ref{BlasInt}, Ref{BlasInt}, Ref{$T}, Ptr{$T},
    Ref{BlasInt}, Ptr{$T}, Ref{BlasInt}, Ref{$T}, Ptr{$T}, Ref{BlasInt}, Clong, Clong),
    ta, tb, m, n, k, one($T), a, lda, b, ldb, beta, c, ldc, 1, 1))
gemv_call(T, gemv) = :(ccall($gemv, Cvoid, (Ref{UInt8}, Ref{BlasInt}, Ref{BlasInt}, Ref{$T}, Ptr{$T}, Ref{BlasInt}, Ptr{$T},
    Ref{BlasInt}, Ref{$T}, Ptr{$T}, Ref{BlasInt}, Clong), ta, m, n, one($T), a, lda, x, incx, beta, y, incy, 1))

for (T, gemm, gemv) in ((:Float32, :sgemm, :sgemv), (:Float64, :dgemm, :dgemv))
    own(name) = :((@blasfunc($(Symbol(name, :_))), LIBBLAS))
    @eval begin
        @inline function gemm!(ta::UInt8, tb::UInt8, m::Int, n::Int, k::Int, a::Ptr{$T}, lda::Int, b::Ptr{$T},
                ldb::Int, beta::$T, c::Ptr{$T}, ldc::Int)
            other = OTHER_BLAS.$gemm[]
            other == C_NULL ? $(gemm_call(T, own(gemm))) : $(gemm_call(T, :other))
        end
        @inline function gemv!(ta::UInt8, m::Int, n::Int, a::Ptr{$T}, lda::Int, x::Ptr{$T}, incx::Int, beta::$T,
                y::Ptr{$T}, incy::Int)
            other = OTHER_BLAS.$gemv[]
            other == C_NULL ? $(gemv_call(T, own(gemv))) : $(gemv_call(T, :other))
        end
    end
end

const NO, YES = UInt8('N'), UInt8('T')
flipped(t::UInt8) = t == NO ? YES : NO

"""
out = a b, or out + a b where f[1] is 1. n is (rows, columns, summed, stacked products); i holds whether a and b
lie transposed; the first stride of an operand is its leading dimension, the second that from product to product.
"""
@inline function matmul!(x::Instruction{T}) where {T}
    m, n, k, stacked = x.n
    ta, tb = x.i[1] == 1 ? YES : NO, x.i[2] == 1 ? YES : NO
    beta, bytes = T(x.f[1]), sizeof(T)
    for j in 0:stacked-1
        o, a, b = x.out + bytes * j * x.so[2], x.a + bytes * j * x.sa[2], x.b + bytes * j * x.sb[2]
        if n == 1
            ta == NO ? gemv!(ta, m, k, a, x.sa[1], b, tb == NO ? 1 : x.sb[1], beta, o, 1) :
            gemv!(ta, k, m, a, x.sa[1], b, tb == NO ? 1 : x.sb[1], beta, o, 1)
        elseif m == 1
            tb == NO ? gemv!(YES, k, n, b, x.sb[1], a, ta == NO ? x.sa[1] : 1, beta, o, x.so[1]) :
            gemv!(NO, n, k, b, x.sb[1], a, ta == NO ? x.sa[1] : 1, beta, o, x.so[1])
        else
            gemm!(ta, tb, m, n, k, a, x.sa[1], b, x.sb[1], beta, o, x.so[1])
        end
    end
    return nothing
end
