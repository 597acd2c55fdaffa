"""
    Instruction{T}

One step of a tape on elements of type `T`: the kernel to run, addresses, up to four nested loops with the strides (in
elements) of every operand, and a few numbers. All instructions have this one concrete type, so a tape is a plain
array of them, and running it compiles once, whatever its length.
"""
struct Instruction{T}
    kernel::Ptr{Cvoid}
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

# Set to false (environment TWINGRAD_SIMD=0, with --compiled-modules=no) to run the loops without `@simd`: an ablation. What
# is compiled beforehand, for a cache or an image that later processes share, always has it.
const SIMD = Versions.writes_code() || get(ENV, "TWINGRAD_SIMD", "1") != "0"

"""Mark a loop whose iterations are independent, so that it is vectorised without checks."""
macro fast(loop)
    return SIMD ? esc(:(@inbounds @simd ivdep $loop)) : esc(loop)
end

"""Mark a loop that only adds up, so that it is vectorised with several partial sums."""
macro summing(loop)
    return SIMD ? esc(:(@inbounds @simd $loop)) : esc(loop)
end

"""
    @rows x body

Run `body` once for each innermost row of an instruction, with `o`, `a`, `b`, `c` the addresses at which it begins. A
macro and not a function that takes `body`: what is inlined for certain needs no closure, and no allocation.
"""
macro rows(x, body)
    return esc(quote
        for l in 0:$x.n[4]-1, k in 0:$x.n[3]-1, j in 0:$x.n[2]-1
            o = moved($x.out, $x.so, j, k, l)
            a = moved($x.a, $x.sa, j, k, l)
            b = moved($x.b, $x.sb, j, k, l)
            c = moved($x.c, $x.sc, j, k, l)
            $body
        end
    end)
end

@inline moved(p::Ptr{T}, s, j, k, l) where {T} = p + sizeof(T) * (j * s[2] + k * s[3] + l * s[4])

"""
    @columns x body

The same for instructions whose loops 1 and 2 run inside a column: `body` runs once for each column.
"""
macro columns(x, body)
    return esc(quote
        for l in 0:$x.n[4]-1, k in 0:$x.n[3]-1
            o = moved($x.out, $x.so, 0, k, l)
            a = moved($x.a, $x.sa, 0, k, l)
            b = moved($x.b, $x.sb, 0, k, l)
            $body
        end
    end)
end

@inline at(p::Ptr, i, s) = unsafe_load(p, (i - 1) * s + 1)
@inline put!(p::Ptr, v, i, s) = unsafe_store!(p, v, (i - 1) * s + 1)
