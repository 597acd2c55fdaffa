"""
    Instruction{T}

One step of a tape on elements of type `T`: an operation code, addresses, up to four nested loops with the strides (in
elements) of every operand, and a few numbers. All instructions have this one concrete type, so a tape is a plain
array of them, and running it compiles once, whatever its length.
"""
struct Instruction{T}
    code::Int
    out::Ptr{T}
    a::Ptr{T}
    b::Ptr{T}
    c::Ptr{T}
    index::Ptr{Int64}
    n::NTuple{4,Int}
    so::NTuple{4,Int}
    sa::NTuple{4,Int}
    sb::NTuple{4,Int}
    sc::NTuple{4,Int}
    i::NTuple{4,Int}
    f::NTuple{2,Float64}
end

# Set to false (environment TWINGRAD_SIMD=0, with --compiled-modules=no) to run the loops without `@simd`: an ablation.
const SIMD = get(ENV, "TWINGRAD_SIMD", "1") != "0"

"""Mark a loop whose iterations are independent, so that it is vectorised without checks."""
macro fast(loop)
    return SIMD ? esc(:(@inbounds @simd ivdep $loop)) : esc(loop)
end

"""Mark a loop that only adds up, so that it is vectorised with several partial sums."""
macro summing(loop)
    return SIMD ? esc(:(@inbounds @simd $loop)) : esc(loop)
end

"""Call `body(out, a, b, c)` with the addresses at which each innermost row begins."""
@inline function rows(body::F, x::Instruction{T}) where {F,T}
    bytes = sizeof(T)
    for l in 0:x.n[4]-1, k in 0:x.n[3]-1, j in 0:x.n[2]-1
        body(
            x.out + bytes * (j * x.so[2] + k * x.so[3] + l * x.so[4]),
            x.a + bytes * (j * x.sa[2] + k * x.sa[3] + l * x.sa[4]),
            x.b + bytes * (j * x.sb[2] + k * x.sb[3] + l * x.sb[4]),
            x.c + bytes * (j * x.sc[2] + k * x.sc[3] + l * x.sc[4]),
        )
    end
    return nothing
end

@inline at(p::Ptr, i, s) = unsafe_load(p, (i - 1) * s + 1)
@inline put!(p::Ptr, v, i, s) = unsafe_store!(p, v, (i - 1) * s + 1)
