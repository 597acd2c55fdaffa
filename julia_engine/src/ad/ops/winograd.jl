# Winograd's algorithm: convolutions with a quarter to a half of the multiplications, and their gradients.
#
# Four outputs along an axis of a kernel w of three elements read six places x. As values of polynomials at five points and
# at infinity they take six multiplications rather than twelve,
#
#     y = Aᵀ [(G w) .* (B x)]        A (6, 4), G (6, 3), B (6, 6)
#
# and over two axes 36 rather than 144: F(4 x 4, 3 x 3) of A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural
# Networks, 2016, after S. Winograd, Arithmetic Complexity of Computations, 1980. Over channels they are matrix products, one
# for each place of all tiles. Images are turned first, so that channels lie in one piece, and transforms are sums of vectors.
#
# A sum of products rounds otherwise: with 64 channels of normal numbers, the root mean square error was ... of the results'
# standard deviation, and ... for sums. What is not finite makes NaN of the results around. So it is for training steps in
# Float32 only, where the technique `winograd` is on.

"""Elements of a kernel along an axis, at most."""
const LONGEST_KERNEL = 5

"""
A spatial axis of a convolution without stride and dilation.

- `length`, `outputs`: of the input, and how many.
- `before`: the padding before the input; negative where it is cut off.
- `kernel`: its elements.
- `pairs`: its polynomials are evaluated at 0, infinity and ± so many points; 0 for a kernel of one element.
"""
struct TiledAxis
    length::Int
    outputs::Int
    before::Int
    kernel::Int
    pairs::Int
end

"""How many places a tile reads, how many outputs it makes, and how many tiles there are."""
places(axis::TiledAxis) = axis.pairs == 0 ? 1 : 2 * axis.pairs + 2
outputs_of_tile(axis::TiledAxis) = places(axis) - axis.kernel + 1
tiles(axis::TiledAxis) = cld(axis.outputs, outputs_of_tile(axis))

"""The axis of the gradient by the input, which is a convolution of the upstream gradient."""
transposed(axis::TiledAxis) =
    TiledAxis(axis.outputs, axis.length, axis.kernel - 1 - axis.before, axis.kernel, axis.pairs)

"""A (places, outputs) and G (places, kernel) of a tile."""
function tile_transforms(axis::TiledAxis)
    axis.pairs == 0 && return ones(1, 1), ones(1, 1)
    points = Float64[0.0; [sign * p for p in Kernels.POINTS[axis.pairs] for sign in (1, -1)]]
    powers(n) = [[point^k for point in points, k in 0:n-1]; [Float64(k == n - 1) for _ in 1:1, k in 0:n-1]]
    scale = [prod(Float64[point - other for other in points if other != point]) for point in points]
    return powers(outputs_of_tile(axis)), powers(axis.kernel) ./ [scale; 1.0]
end

"""A convolution by tiles: its axes, the first one with tiles, whether they are exchanged, and sizes."""
struct TiledConvolution
    axes::NTuple{2,TiledAxis}
    exchanged::Bool
    channels::Int
    filters::Int
    samples::Int
end

transposed(c::TiledConvolution) =
    TiledConvolution(map(transposed, c.axes), c.exchanged, c.filters, c.channels, c.samples)
places(c::TiledConvolution) = places(c.axes[1]) * places(c.axes[2])
tiles(c::TiledConvolution) = tiles(c.axes[1]) * tiles(c.axes[2])

"""The convolution by tiles, or `nothing` where it has no such or another takes less work."""
function by_winograd(c::Convolution, @nospecialize(T::DataType))
    w = c.windows
    long = count(>(1), w.kernel)
    state().winograd && T === Float32 && Kernels.VECTOR_BYTES[] > 0 && c.groups == 1 && all(==(1), w.stride) &&
        all(==(1), w.dilation) && long > 0 && all(<=(LONGEST_KERNEL), w.kernel) && c.samples > 0 || return nothing
    axis(d) = TiledAxis(w.dims[d], w.out[d], w.before[d], w.kernel[d], w.kernel[d] == 1 ? 0 : long == 1 ? 3 : 2)
    found = TiledConvolution(w.kernel[1] == 1 ? (axis(2), axis(1)) : (axis(1), axis(2)), w.kernel[1] == 1, c.channels, c.filters,
        c.samples)
    return WINOGRAD_ALWAYS[] || winograd_work(found) < direct_work(c) ? found : nothing
end

const WINOGRAD_ALWAYS = Ref(false)  # for tests

"""
What an element costs that a transform reads or makes for its places, that is copied into another order (of channels and of
weights), and of a window that is copied, in multiplications of a product. Measured on one core, with vectors of 64 and 32 bytes.
"""
const PLACED, COPIED, COPIED_WEIGHT, COPIED_WINDOW = 6, 12, 60, 20

"""Multiplications that a convolution by tiles, or a gradient of one, takes about as long as."""
function winograd_work(c::TiledConvolution)
    channels, filters = whole_vectors(c.channels), whole_vectors(c.filters)
    products = places(c) * tiles(c) * c.channels * filters
    transforms = PLACED * places(c) * tiles(c) * (channels + filters)
    first, second = c.axes
    copies = COPIED * (channels * first.length * second.length + filters * first.outputs * second.outputs)
    elements = first.kernel * second.kernel
    weight = c.channels * filters * elements * (places(c) + COPIED_WEIGHT)
    return c.samples * (products + transforms + copies) + weight
end

"""The same by windows."""
direct_work(c::Convolution) = c.samples * c.taps * (whole_vectors(c.pixels) * c.filters + COPIED_WINDOW * c.pixels)

# Lowering ---------------------------------------------------------------------------------------------------------------

"""Bytes of what the tiles of a block read and make, at most: they stay in the second-level cache."""
const TILED_BYTES = Ref(2^19)

vector_lanes() = Kernels.VECTOR_BYTES[] ÷ sizeof(Float32)
"""Channels in whole vectors; what the last ones hold is never used."""
whole_vectors(channels::Int) = cld(channels, vector_lanes()) * vector_lanes()

"""Memory for the places of tiles (channels, tiles, places); they lie so that no two places are in the same sets of the caches."""
function place_memory!(p::Instructions, channels::Int, tiles::Int, places::Int)
    apart = channels * tiles + vector_lanes()
    m = scratch!(p, Float32, Int[apart * places])
    return Memory(m.root, m.address, Float32, Int[channels, tiles, places], Int[1, channels, apart])
end

first_tiles(m::Memory, n::Int) = Memory(m.root, m.address, m.eltype, Int[m.dims[1], n, m.dims[3]], m.strides)
strided(m::Memory, dims::Vector{Int}, strides::Vector{Int}, offset::Int=0) =
    Memory(m.root, at_element(m, offset), m.eltype, dims, strides)

"""The planes (lengths..., channels, samples) of some samples."""
of_samples(m::Memory, first::Int, count::Int) = strided(m, Int[m.dims[1:end-1]; count], m.strides, first * m.strides[end])

"""From 0 to n in parts of about the same length, `most` at most: the first of each, counted from 0, and how many."""
function parts_of(n::Int, most::Int)
    count = cld(n, most)
    return Tuple{Int,Int}[(n * k ÷ count, n * (k + 1) ÷ count - n * k ÷ count) for k in 0:count-1]
end

"""
The planes (lengths..., channels, samples) of a block with the channels in one piece: `all` itself where they lie so, or memory to
copy them to or from.
"""
struct Planes
    all::Memory
    turned::Union{Nothing,Memory}
end

function planes!(p::Instructions, m::Memory, samples::Int)
    channels = m.dims[end-1]
    m.strides[end-1] == 1 && channels == whole_vectors(channels) && return Planes(m, nothing)
    room = scratch!(p, Float32, Int[whole_vectors(channels); m.dims[1:end-2]; samples])
    return Planes(m, strided(room, Int[m.dims[1:end-1]; samples], Int[room.strides[2:end-1]; 1; room.strides[end]]))
end

of_block(x::Planes, first::Int, count::Int) =
    x.turned === nothing ? of_samples(x.all, first, count) : of_samples(x.turned, 0, count)

function copy_in!(p::Instructions, x::Planes, first::Int, count::Int)
    x.turned === nothing && return nothing
    by_channel(m) = (order = Int[length(m.dims) - 1; 1:length(m.dims)-2; length(m.dims)]; strided(m, m.dims[order], m.strides[order]))
    return emit_copy!(p, by_channel(of_block(x, first, count)), by_channel(of_samples(x.all, first, count)))
end
copy_out!(p::Instructions, x::Planes, first::Int, count::Int) =
    x.turned === nothing ? nothing : emit_copy!(p, of_samples(x.all, first, count), of_block(x, first, count))

"""The first place that the tiles after so many others read, and the first output that they make, along both axes."""
outputs_before(c::TiledConvolution, tiles::NTuple{2,Int}) =
    (tiles[1] * outputs_of_tile(c.axes[1]), tiles[2] * outputs_of_tile(c.axes[2]))
places_before(c::TiledConvolution, tiles::NTuple{2,Int}) = outputs_before(c, tiles) .- (c.axes[1].before, c.axes[2].before)

"""
Append the transform of so many tiles' planes (lengths..., channels, samples) into their places, or with `from_places` back;
`start` is the first element that they read or make.
"""
function emit_transform!(p::Instructions, name::Symbol, c::TiledConvolution, planes::Memory, places_of::Memory,
        start::NTuple{2,Int}, counts::NTuple{2,Int})
    dims, strides = planes.dims[1:end-2], planes.strides[1:end-2]
    length(dims) == 1 && (push!(dims, 1); push!(strides, 0))
    c.exchanged && (reverse!(dims); reverse!(strides))
    first, second = c.axes
    rows = (counts[2] - 1) * outputs_of_tile(second) + places(second)
    spare = scratch!(p, Float32, Int[(1 + rows * places(first)) * vector_lanes()])
    numbers = Int64[dims; strides; planes.strides[end]; start...; outputs_of_tile(first); outputs_of_tile(second); counts...;
        planes.dims[end]; whole_vectors(planes.dims[end-1]) ÷ vector_lanes(); places_of.strides[2]; places_of.strides[3];
        Int(spare.address)]
    to, from = name === :from_places ? (planes, places_of) : (places_of, planes)
    return emit!(p, Float32, Symbol(name, :_, Kernels.VECTOR_BYTES[], :_, first.pairs),
        (to.address, from.address, NOWHERE, NOWHERE), address_of(numbers, p), ONCE, (NONE, NONE, NONE, NONE))
end

"""G of both axes, (elements of the kernel, places), as memory that no run writes."""
function weight_transform!(p::Instructions, c::TiledConvolution, flipped::Bool)
    (_, first), (_, second) = map(tile_transforms, c.axes)
    both = Float32[first[i, k] * second[j, l] for k in axes(first, 2), l in axes(second, 2), i in axes(first, 1), j in axes(second, 1)]
    elements = length(both) ÷ places(c)
    found = zeros(Int64, cld(length(both), 2))  # whole numbers are never overwritten by `poison!`
    flat = reshape(both, elements, :)
    flipped && (flat = flat[end:-1:1, :])
    GC.@preserve found unsafe_copyto!(Ptr{Float32}(pointer(found)), pointer(flat), length(flat))
    push!(p.roots, Memory(found))
    return Memory(found, Ptr{Cvoid}(pointer(found)), Float32, Int[elements, places(c)], Int[1, elements])
end

"""
The transformed weight, (filters, channels, places), of a weight (kernel..., channels, filters); of the transposed convolution
where it is `flipped`, so that the weight's filters are its channels.
"""
function weight_places!(p::Instructions, c::TiledConvolution, weight::Memory, flipped::Bool)
    of_weight = weight_transform!(p, c, flipped)
    k, rows, summed = of_weight.dims[1], whole_vectors(c.filters), c.channels
    strides = flipped ? Int[k, 1, k * c.filters] : Int[k * c.channels, 1, k]
    elements = scratch!(p, Float32, Int[rows, k, summed])
    emit_copy!(p, strided(elements, Int[c.filters, k, summed], elements.strides), strided(weight, Int[c.filters, k, summed], strides))
    found = scratch!(p, Float32, Int[rows, summed, places(c)])
    emit_matmul!(p, strided(found, Int[rows, places(c), summed], found.strides[[1, 3, 2]]), elements, for_each_matrix(of_weight, summed), 0)
    return found
end

for_each_matrix(m::Memory, n::Int) = Memory(m.root, m.address, m.eltype, Int[m.dims; n], Int[m.strides; 0])

"""Samples whose places stay in the cache, and segments of an axis if those of one sample do not."""
struct Blocks
    samples::Vector{Tuple{Int,Int}}  # first, and how many
    segments::Vector{NTuple{2,NTuple{2,Int}}}  # tiles along both axes before a segment, and in it
    most_samples::Int
    most_tiles::Int  # of a block's samples and a segment
end

function Blocks(c::TiledConvolution)
    bytes = sizeof(Float32) * (whole_vectors(c.channels) + whole_vectors(c.filters)) * places(c) * tiles(c)
    samples = parts_of(c.samples, clamp(TILED_BYTES[] ÷ bytes, 1, c.samples))
    cut = c.axes[2].pairs == 0 ? 1 : 2
    n, other = tiles(c.axes[cut]), tiles(c.axes[3-cut])
    cuts = parts_of(n, clamp(n * TILED_BYTES[] ÷ bytes, 1, n))
    both(along, across) = cut == 1 ? (along, across) : (across, along)
    segments = NTuple{2,NTuple{2,Int}}[(both(first, 0), both(count, other)) for (first, count) in cuts]
    most = maximum(last, samples)
    return Blocks(samples, segments, most, most * other * maximum(last, cuts))
end

"""out (lengths..., filters, samples) = the convolution of x; the weight is (kernel..., channels, filters), or see `weight_places!`."""
function emit_winograd!(p::Instructions, c::TiledConvolution, out::Memory, x::Memory, weight::Memory, flipped::Bool)
    weights, blocks = weight_places!(p, c, weight, flipped), Blocks(c)
    input, made = planes!(p, x, blocks.most_samples), planes!(p, out, blocks.most_samples)
    read = place_memory!(p, whole_vectors(c.channels), blocks.most_tiles, places(c))
    written = place_memory!(p, whole_vectors(c.filters), blocks.most_tiles, places(c))
    for (first, count) in blocks.samples
        copy_in!(p, input, first, count)
        for (before, counts) in blocks.segments
            a, y = first_tiles(read, count * prod(counts)), first_tiles(written, count * prod(counts))
            emit_transform!(p, :places_of_input, c, of_block(input, first, count), a, places_before(c, before), counts)
            emit_matmul!(p, y, weights, strided(a, Int[c.channels; a.dims[2:3]], a.strides), 0)
            emit_transform!(p, :from_places, c, of_block(made, first, count), y, outputs_before(c, before), counts)
        end
        copy_out!(p, made, first, count)
    end
    return nothing
end

"""out (kernel..., channels, filters) = the gradient by the weight, from g (lengths..., filters, samples) and x."""
function emit_winograd_weight_gradient!(p::Instructions, c::TiledConvolution, out::Memory, g::Memory, x::Memory)
    blocks, rows = Blocks(c), whole_vectors(c.filters)
    input, upstream = planes!(p, x, blocks.most_samples), planes!(p, g, blocks.most_samples)
    read = place_memory!(p, whole_vectors(c.channels), blocks.most_tiles, places(c))
    given = place_memory!(p, rows, blocks.most_tiles, places(c))
    total = scratch!(p, Float32, Int[rows, c.channels, places(c)])
    begun = 0
    for (first, count) in blocks.samples
        copy_in!(p, input, first, count)
        copy_in!(p, upstream, first, count)
        for (before, counts) in blocks.segments
            a, b = first_tiles(given, count * prod(counts)), first_tiles(read, count * prod(counts))
            emit_transform!(p, :places_of_input, c, of_block(input, first, count), b, places_before(c, before), counts)
            emit_transform!(p, :places_of_upstream, c, of_block(upstream, first, count), a, outputs_before(c, before), counts)
            across = strided(b, Int[b.dims[2], c.channels, b.dims[3]], b.strides[[2, 1, 3]])
            emit_matmul!(p, total, a, across, begun)
            begun = 1
        end
    end
    of_weight = weight_transform!(p, c, false)
    k = of_weight.dims[1]
    elements = scratch!(p, Float32, Int[rows, k, c.channels])
    emit_matmul!(p, elements, strided(total, total.dims[[1, 3, 2]], total.strides[[1, 3, 2]]),
        for_each_matrix(turned(of_weight), c.channels), 0)
    return emit_copy!(p, strided(out, Int[k, c.channels, c.filters], Int[1, k, k * c.channels]),
        strided(elements, Int[k, c.channels, c.filters], Int[rows, rows * k, 1]))
end
