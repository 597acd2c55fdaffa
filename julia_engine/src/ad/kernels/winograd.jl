# Winograd's algorithm: the transforms of tiles, see ../ops/winograd.jl. Channels are innermost, so that a vector has the same
# place of neighbouring channels, and a transform is sums of vectors. Of a polynomial at ± a point the even part is the same,
# and the odd one the opposite.

"""
Where planes and places lie, in elements, for the transforms of some tiles; the first axis is one with tiles.

A place (i, j) of tile (k, l) of a sample is at `step` ∙ (k, l) + `start` + (i, j) of the plane; outside of it is padding.
"""
struct TileNumbers
    dims::NTuple{2,Int}  # of a plane
    strides::NTuple{2,Int}
    sample::Int  # from a plane to the next sample's
    start::NTuple{2,Int}
    step::NTuple{2,Int}  # from tile to tile; the outputs of a tile
    tiles::NTuple{2,Int}
    samples::Int
    vectors::Int  # of channels
    column::Int  # from tile to tile, in memory
    apart::Int  # from place to place, in memory
    spare::Int  # the address of memory to work in
end
@inline tile_numbers(p::Ptr{Int64}) = unsafe_load(Ptr{TileNumbers}(p))

"""
The points, with either sign, at which polynomials are evaluated beside 0 and infinity, by their number: two for kernels along two
axes, three for those along one. Of the sets that were tried these have the smallest errors.
"""
const POINTS = Dict(2 => (3 // 4, 3 // 2), 3 => (1 // 2, 1 // 1, 2 // 1))

"""The coefficients of the product of x - root², in x, lowest first."""
function product_of_squares(roots)
    found = [1 // 1]
    for root in roots
        found = [0 // 1; found] .- root^2 .* [found; 0 // 1]
    end
    return found
end

"""The sum of vectors times coefficients, the last of which is 1."""
function summed(coefficients, vectors)
    total = vectors[end]
    for (c, v) in zip(coefficients[1:end-1], vectors[1:end-1])
        total = :(multiply_add(repeated(V, T($(Float64(c)))), $v, $total))
    end
    return total
end

for (N, points) in POINTS
    local places = 2N + 2
    in_order(body) = [body(j, p) for (j, p) in enumerate(points)]
    x = [Symbol(:x_, i) for i in 0:places-1]
    steps, made = Expr(:block), Any[]
    for (j, p) in enumerate(points)
        others = product_of_squares([q for q in points if q != p])
        even, odd = Symbol(:even_, j), Symbol(:odd_, j)
        push!(steps.args, :($even = $(summed(others, x[3:2:2N+1]))), :($odd = $(summed(others, x[2:2:2N]))))
        push!(made, :(multiply_add(repeated(V, T($(Float64(p)))), $odd, $even)))
        push!(made, :(multiply_add(repeated(V, T($(-Float64(p)))), $odd, $even)))
    end
    whole = product_of_squares(points)
    made = [summed(whole, x[1:2:2N+1]); made; summed(whole, x[2:2:2N+2])]
    # B x. The i-th element of x lies at a + i ∙ sa bytes if i is in from:to-1, else it is 0.
    @eval @inline function transform_input!(::Type{V}, ::Val{$N}, o::Ptr{T}, so::Int, a::Ptr{T}, sa::Int, from::Int, to::Int,
            zeros::Ptr{T}, each::Int) where {T,V}
        $([:($v = load(V, ifelse(from <= $(i - 1) < to, a + $(i - 1) * sa, zeros))) for (i, v) in enumerate(x)]...)
        $steps
        $([:(store!(o + $(i - 1) * so, $v)) for (i, v) in enumerate(made)]...)
        return nothing
    end

    even, odd, power = ([Symbol(name, :_, j) for j in 1:N] for name in (:even, :odd, :power))
    # A y, of `each` elements, otherwise the same.
    @eval @inline function transform_upstream!(::Type{V}, ::Val{$N}, o::Ptr{T}, so::Int, a::Ptr{T}, sa::Int, from::Int, to::Int,
            zeros::Ptr{T}, each::Int) where {T,V}
        $([:($e = $d = load(V, zeros)) for (e, d) in zip(even, odd)]...)
        $([:($f = one(T)) for f in power]...)
        i = 0
        v = load(V, ifelse(from <= 0 < to, a, zeros))
        store!(o, v)
        while true
            $([:($e = multiply_add(repeated(V, $f), v, $e)) for (e, f) in zip(even, power)]...)
            (i += 1) < each || break
            v = load(V, ifelse(from <= i < to, a + i * sa, zeros))
            $(in_order((j, p) -> :($(odd[j]) = multiply_add(repeated(V, $(power[j]) * T($(Float64(p)))), v, $(odd[j]))))...)
            (i += 1) < each || break
            v = load(V, ifelse(from <= i < to, a + i * sa, zeros))
            $(in_order((j, p) -> :($(power[j]) *= T($(Float64(p^2)))))...)
        end
        $([:(store!(o + $(2j - 1) * so, plus($(even[j]), $(odd[j])))) for j in 1:N]...)
        $([:(store!(o + $(2j) * so, multiply_add(repeated(V, -one(T)), $(odd[j]), $(even[j])))) for j in 1:N]...)
        store!(o + $(places - 1) * so, v)
        return nothing
    end

    # The first `count` elements of Aᵀ m, which has `each`.
    @eval @inline function transform_output!(::Type{V}, ::Val{$N}, o::Ptr{T}, so::Int, a::Ptr{T}, sa::Int, each::Int,
            count::Int) where {T,V}
        last, v = load(V, a + $(places - 1) * sa), load(V, a)
        $(in_order((j, p) -> quote
            $(odd[j]) = load(V, a + $(2j) * sa)
            $(even[j]) = load(V, a + $(2j - 1) * sa)
            $(even[j]), $(odd[j]) = plus($(even[j]), $(odd[j])), multiply_add(repeated(V, -one(T)), $(odd[j]), $(even[j]))
            $(power[j]) = one(T)
        end)...)
        zeros = repeated(V, zero(T))
        i = 0
        while true
            $([:(v = multiply_add(repeated(V, $f), $e, v)) for (e, f) in zip(even, power)]...)
            store!(o + i * so, i == each - 1 ? plus(v, last) : v)
            (i += 1) < count || break
            v = i == each - 1 ? last : zeros
            $(in_order((j, p) -> :(v = multiply_add(repeated(V, $(power[j]) * T($(Float64(p)))), $(odd[j]), v)))...)
            store!(o + i * so, v)
            (i += 1) < count || break
            v = zeros
            $(in_order((j, p) -> :($(power[j]) *= T($(Float64(p^2)))))...)
        end
        return nothing
    end
end

"""out = the places of the tiles of planes a, by the transform of an input or of an upstream gradient, along one axis or two."""
@inline function to_places!(transform!::F, ::Type{V}, ::Val{N}, x::Instruction{T}) where {F,T,V,N}
    s = tile_numbers(x.index)
    places, bytes = 2N + 2, sizeof(T)
    zeros = Ptr{T}(s.spare)
    rows = zeros + sizeof(V)
    store!(zeros, repeated(V, zero(T)))
    along, down, apart = bytes * s.strides[1], bytes * s.strides[2], bytes * s.apart
    # Of two axes, the rows that the tiles read are transformed first, each once.
    reach = transform! === transform_input! ? places : s.step[2]
    count = N == 2 ? (s.tiles[2] - 1) * s.step[2] + reach : s.tiles[2]
    for n in 0:s.samples-1, c in 0:s.vectors-1, k in 0:s.tiles[1]-1
        at = k * s.step[1] + s.start[1]
        a = x.a + bytes * n * s.sample + sizeof(V) * c + at * along
        o = x.out + sizeof(V) * c + bytes * s.column * (n * s.tiles[1] * s.tiles[2] + k)
        for j in 0:count-1
            y = j + s.start[2]
            to = 0 <= y < s.dims[2] ? s.dims[1] - at : 0
            if N == 2
                transform!(V, Val(N), rows + j * places * sizeof(V), sizeof(V), a + y * down, along, -at, to, zeros, s.step[1])
            else
                transform!(V, Val(N), o + bytes * s.column * s.tiles[1] * j, apart, a + y * down, along, -at, to, zeros, s.step[1])
            end
        end
        N == 2 || continue
        for l in 0:s.tiles[2]-1, i in 0:places-1
            transform!(V, Val(N), o + bytes * s.column * s.tiles[1] * l + i * apart, places * apart,
                rows + (l * s.step[2] * places + i) * sizeof(V), places * sizeof(V), 0, places, zeros, s.step[2])
        end
    end
    return nothing
end

"""out = the planes of which tiles have places a."""
@inline function from_places!(::Type{V}, ::Val{N}, x::Instruction{T}) where {T,V,N}
    s = tile_numbers(x.index)
    places, bytes = 2N + 2, sizeof(T)
    rows = Ptr{T}(s.spare)
    along, down, apart = bytes * s.strides[1], bytes * s.strides[2], bytes * s.apart
    for n in 0:s.samples-1, c in 0:s.vectors-1, l in 0:s.tiles[2]-1, k in 0:s.tiles[1]-1
        a = x.a + sizeof(V) * c + bytes * s.column * ((n * s.tiles[2] + l) * s.tiles[1] + k)
        first, row = k * s.step[1] + s.start[1], l * s.step[2] + s.start[2]
        o = x.out + bytes * n * s.sample + sizeof(V) * c + first * along + row * down
        count = min(s.step[1], s.dims[1] - first)
        if N == 2
            made = min(s.step[2], s.dims[2] - row)
            for i in 0:places-1
                transform_output!(V, Val(N), rows + i * sizeof(V), places * sizeof(V), a + i * apart, places * apart, s.step[2],
                    made)
            end
            for j in 0:made-1
                transform_output!(V, Val(N), o + j * down, along, rows + j * places * sizeof(V), sizeof(V), s.step[1], count)
            end
        else
            transform_output!(V, Val(N), o, along, a, apart, s.step[1], count)
        end
    end
    return nothing
end

for (bytes, vector) in ((64, :wide), (32, :narrow)), N in keys(POINTS)
    operation!(Symbol(:places_of_input_, bytes, :_, N), :(to_places!(transform_input!, $vector(T), Val($N), x)))
    operation!(Symbol(:places_of_upstream_, bytes, :_, N), :(to_places!(transform_upstream!, $vector(T), Val($N), x)))
    operation!(Symbol(:from_places_, bytes, :_, N), :(from_places!($vector(T), Val($N), x)))
end
