# How many multiplications and additions an instruction is made of: what a step costs is held against what the machine can do.

"""
    operations(instruction)

The multiplications and additions, one each, of an instruction that adds up products. It is those that it does: products with zeros
count, and so do rows that tiles compute twice, and filters that fill up vectors in Winograd's algorithm. 0 for every other
instruction, whose cost is that of its memory traffic.
"""
function operations(x::Instruction{T}) where {T}
    x.kernel in products(T) && return round(Int, 2 * multiplications(x))
    name = name_of(x)
    if startswith(name, "pool_planes")  # its gradient, too, multiplies all four elements of every window
        s = plane_numbers(x.index)
        size = parse(Int, name[end:end])
        return 8 * s.width * s.height * s.filters * s.samples * s.channels * size^2
    elseif startswith(name, "pool_sequences_gradient") || startswith(name, "unpool_sequences")
        s = sequence_numbers(x.index)
        return 2 * winners(x.c, s.pooled * s.filters * s.samples) * s.patch
    elseif startswith(name, "pool_sequences")
        s = sequence_numbers(x.index)
        return 2 * s.length * s.filters * s.samples * s.patch
    end
    return 0
end

"""How many of `n` windows let something through: which element was the largest is not -1."""
winners(which::Ptr, n::Int) = count(i -> unsafe_load(which, i) >= 0, 1:n)

"""The name of an instruction's kernel."""
function name_of(x::Instruction{T}) where {T}
    lock(ADDRESSES_LOCK)
    try
        for ((name, single), address) in ADDRESSES
            address == x.kernel && single == (T === Float32) && return String(name)
        end
    finally
        unlock(ADDRESSES_LOCK)
    end
    return ""
end
