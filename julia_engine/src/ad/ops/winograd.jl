# Winograd's algorithm: convolutions with a quarter to three fifths of the multiplications, and their gradients.
#
# Four outputs along an axis of a kernel w of three elements read six places x. As values of polynomials at five points and
# at infinity they take six multiplications rather than twelve,
#
#     y = Aᵀ [(G w) .* (B x)]        A (6, 4), G (6, 3), B (6, 6)
#
# and over two axes 36 rather than 144: F(4 x 4, 3 x 3) of A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural
# Networks, 2016, after S. Winograd, Arithmetic Complexity of Computations, 1980. Over channels they are matrix products, one
# for each place of all tiles. A block of samples is copied first, so that its channels lie in one piece: transforms are sums of
# vectors of channels, and add little to the time of the products.
#
# Rounding errors are larger than those of sums of products: with 64 channels of normal numbers in Float32, their root mean square
# was 7e-7 to 1e-6 of the results' standard deviation, and 1.5e-7 to 4e-7 with sums. What is beside a number that is not finite
# becomes NaN. So the technique `winograd` is for training steps in Float32 only.

"""Elements of a kernel along an axis, at most."""
const LONGEST_KERNEL = 5

"""
A spatial axis of a convolution without stride and dilation.

- `length`, `outputs`: of the input, and how many.
- `before`: the padding before the input; negative where it is cut off.
- `kernel`: its elements.
- `pairs`: its polynomials are evaluated at 0, at infinity, and at this number of points with either sign; 0 for a kernel of one
  element.
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

"""The convolution by tiles, or `nothing` where its settings, sizes or element type don't suit them."""
function tiled_convolution(c::Convolution, @nospecialize(T::DataType))
    w = c.windows
    T === Float32 && Kernels.VECTOR_BYTES[] > 0 && c.groups == 1 && all(==(1), w.stride) && all(==(1), w.dilation) &&
        1 < maximum(w.kernel) <= LONGEST_KERNEL && c.samples > 0 || return nothing
    pairs = minimum(w.kernel) == 1 ? 3 : 2
    axis(d) = TiledAxis(w.dims[d], w.out[d], w.before[d], w.kernel[d], w.kernel[d] == 1 ? 0 : pairs)
    exchanged = w.kernel[1] == 1
    return TiledConvolution(exchanged ? (axis(2), axis(1)) : (axis(1), axis(2)), exchanged, c.channels, c.filters, c.samples)
end

"""
The convolution by tiles, or its transpose for the gradient by the input, where a training step may use it and it is less work
than `direct(c)`; else `nothing`.
"""
function by_winograd(c::Convolution, @nospecialize(T::DataType); transpose::Bool=false, direct=direct_work)
    state().winograd || return nothing
    tiled = tiled_convolution(c, T)
    tiled === nothing && return nothing
    transpose && (tiled = transposed(tiled))
    return winograd_work(tiled) < direct(c) ? tiled : nothing
end

"""
What an element costs, in multiplications of a product: one that is transformed, one that is copied into another order (of planes,
and of a weight), and one of a window. Measured on one core, with vectors of 64 and of 32 bytes.
"""
const PLACED, COPIED, COPIED_WEIGHT, COPIED_WINDOW = 6, 12, 15, 20

"""The cost of a convolution by tiles, or of a gradient of one, in multiplications of a product."""
function winograd_work(c::TiledConvolution)
    channels, filters = whole_vectors(c.channels), whole_vectors(c.filters)
    products = places(c) * tiles(c) * c.channels * filters
    transforms = PLACED * places(c) * tiles(c) * (channels + filters)
    first, second = c.axes
    copies = COPIED * (channels * first.length * second.length + filters * first.outputs * second.outputs)
    weight = c.channels * filters * (first.kernel * second.kernel * (places(c) + COPIED_WEIGHT) + PLACED * places(c))
    return c.samples * (products + transforms + copies) + weight
end

"""The same by windows."""
direct_work(c::Convolution) = c.samples * c.taps * (whole_vectors(c.pixels) * c.filters + COPIED_WINDOW * c.pixels)

# Lowering ---------------------------------------------------------------------------------------------------------------

"""Bytes of what the tiles of a block read and make, at most: they stay in the second-level cache."""
const TILED_BYTES = 2^19

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
with_strides(m::Memory, dims::Vector{Int}, strides::Vector{Int}, offset::Int=0) =
    Memory(m.root, at_element(m, offset), m.eltype, dims, strides)

"""The planes (lengths..., channels, samples) of some samples."""
of_samples(m::Memory, first::Int, count::Int) = with_strides(m, Int[m.dims[1:end-1]; count], m.strides, first * m.strides[end])

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
    return turned_planes!(p, m, m.dims[1:end-1], samples)
end

"""Planes (lengths..., channels) in memory with the channels in one piece."""
function turned_planes!(p::Instructions, all::Memory, dims::Vector{Int}, samples::Int)
    room = scratch!(p, Float32, Int[whole_vectors(dims[end]); dims[1:end-1]; samples])
    return Planes(all, with_strides(room, Int[dims; samples], Int[room.strides[2:end-1]; 1; room.strides[end]]))
end

of_block(x::Planes, first::Int, count::Int) =
    x.turned === nothing ? of_samples(x.all, first, count) : of_samples(x.turned, 0, count)

"""Copy a block's planes to where the channels lie in one piece, if they don't yet; or back. The result's first axis comes first."""
function copy_in!(p::Instructions, x::Planes, first::Int, count::Int)
    x.turned === nothing && return nothing
    n = length(x.all.dims)
    by_channel(m) = with_strides(m, m.dims[Int[n - 1; 1:n-2; n]], m.strides[Int[n - 1; 1:n-2; n]])
    return emit_copy!(p, by_channel(of_block(x, first, count)), by_channel(of_samples(x.all, first, count)))
end
copy_out!(p::Instructions, x::Planes, first::Int, count::Int) =
    x.turned === nothing ? nothing : emit_copy!(p, of_samples(x.all, first, count), of_block(x, first, count))

"""The first place that is read by the tiles after `tiles` others, and the first output that they make, along both axes."""
outputs_before(c::TiledConvolution, tiles::NTuple{2,Int}) =
    (tiles[1] * outputs_of_tile(c.axes[1]), tiles[2] * outputs_of_tile(c.axes[2]))
places_before(c::TiledConvolution, tiles::NTuple{2,Int}) = outputs_before(c, tiles) .- (c.axes[1].before, c.axes[2].before)

"""
Append the transform of planes (lengths..., channels, samples) into the places of `counts` tiles, or with `from_places` back;
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

"""G (places, kernel) of a tile."""
function weight_transform(kernel::Int, pairs::Int)
    pairs == 0 && return ones(1, 1)
    points = Float64[0; [sign * p for p in Kernels.POINTS[pairs] for sign in (1, -1)]]
    powers = [Float64[point^k for point in points, k in 0:kernel-1]; Float64[k == kernel - 1 for _ in 1:1, k in 0:kernel-1]]
    return powers ./ [Float64[prod(Float64[p - q for q in points if q != p]) for p in points]; 1.0]
end

"""G of two axes, (elements of the kernel, places), in Float32; `flipped` with the elements from the last to the first."""
function weight_transform(kernels::NTuple{2,Int}, flipped::Bool)
    pairs = minimum(kernels) == 1 ? 3 : 2
    g, h = (weight_transform(k, k == 1 ? 0 : pairs) for k in kernels)
    both = Float32[g[i, k] * h[j, l] for k in axes(g, 2), l in axes(h, 2), i in axes(g, 1), j in axes(h, 1)]
    elements = reshape(both, prod(kernels), :)
    return flipped ? elements[end:-1:1, :] : elements
end

"""All of these, made once; as whole numbers, since what a tape keeps alive of floats may be overwritten between its runs."""
const WEIGHT_TRANSFORMS = Dict{Tuple{NTuple{2,Int},Bool},Vector{Int64}}(((k, l), flipped) =>
    (m = vec(weight_transform((k, l), flipped)); collect(reinterpret(Int64, [m; zeros(Float32, length(m) % 2)])))
    for k in 2:LONGEST_KERNEL for l in 1:LONGEST_KERNEL for flipped in (false, true))

function weight_transform!(p::Instructions, c::TiledConvolution, flipped::Bool)
    kernels = (c.axes[1].kernel, c.axes[2].kernel)
    numbers = WEIGHT_TRANSFORMS[kernels, flipped]
    push!(p.roots, Memory(numbers))
    dims = Int[kernels[1] * kernels[2], places(c)]
    return Memory(numbers, start_of(numbers), Float32, dims, dense_strides(dims))
end

"""
The transformed weight, (filters, channels, places), of a weight (kernel..., channels, filters); of the transposed convolution
where it is `flipped`, so that the weight's filters are its channels.
"""
function weight_places!(p::Instructions, c::TiledConvolution, weight::Memory, flipped::Bool)
    of_weight = weight_transform!(p, c, flipped)
    k, rows, summed = of_weight.dims[1], whole_vectors(c.filters), c.channels
    strides = flipped ? Int[k, 1, k * c.filters] : Int[k * c.channels, 1, k]
    elements, dims = scratch!(p, Float32, Int[rows, k, summed]), Int[c.filters, k, summed]
    emit_copy!(p, with_strides(elements, dims, elements.strides), with_strides(weight, dims, strides))
    found = scratch!(p, Float32, Int[rows, summed, places(c)])
    emit_matmul!(p, with_strides(found, found.dims[[1, 3, 2]], found.strides[[1, 3, 2]]), elements,
        for_each_matrix(of_weight, summed), 0)
    return found
end

for_each_matrix(m::Memory, n::Int) = Memory(m.root, m.address, m.eltype, Int[m.dims; n], Int[m.strides; 0])

"""
Samples whose places stay in the cache, or a segment of an axis's tiles if not even those of one sample do: `samples` and
`segment` are how many at most, `axis` is which axis is cut.
"""
struct Blocks
    samples::Int
    axis::Int
    segment::Int
end

function Blocks(c::TiledConvolution)
    bytes = sizeof(Float32) * (whole_vectors(c.channels) + whole_vectors(c.filters)) * places(c) * tiles(c)
    equal(n, most) = cld(n, cld(n, max(most, 1)))  # in about equal parts
    axis = c.axes[2].pairs == 0 ? 1 : 2
    n = tiles(c.axes[axis])
    return Blocks(equal(c.samples, min(TILED_BYTES ÷ bytes, c.samples)), axis, equal(n, min(n * TILED_BYTES ÷ bytes, n)))
end

"""The tiles of a block, at most."""
tiles(c::TiledConvolution, b::Blocks) = b.samples * b.segment * tiles(c.axes[3-b.axis])

"""The tiles before a segment, along both axes, and those in it."""
function segment(c::TiledConvolution, b::Blocks, first::Int)
    count, across = min(b.segment, tiles(c.axes[b.axis]) - first), tiles(c.axes[3-b.axis])
    return b.axis == 1 ? ((first, 0), (count, across)) : ((0, first), (across, count))
end
segments(c::TiledConvolution, b::Blocks) = 0:b.segment:tiles(c.axes[b.axis])-1

"""
Append the instructions of all blocks. `emit(first sample, samples)` appends those of one; those of others of its size are made
from them, see `emit_again!`, with other parts of the memories `x` and `y`.
"""
function emit_blocks!(emit, p::Instructions, c::TiledConvolution, b::Blocks, x::Memory, y::Memory)
    start(m, sample) = m.address + sizeof(Float32) * m.strides[end] * sample
    from, last = 0, 0  # the instructions of the second block
    told_apart = start(x, b.samples) != start(y, b.samples) || x.strides[end] == y.strides[end]
    for first in 0:b.samples:c.samples-1
        if told_apart && first > b.samples && first + b.samples <= c.samples
            emit_again!(p, from:last, start(x, b.samples) => start(x, first), start(y, b.samples) => start(y, first))
            continue
        end
        before = length(p.f32)
        emit(first, min(b.samples, c.samples - first))
        first == b.samples && ((from, last) = (before + 1, length(p.f32)))
    end
end

"""out (lengths..., filters, samples) = the convolution of x; for the weight see `weight_places!`."""
function emit_winograd!(p::Instructions, c::TiledConvolution, out::Memory, x::Memory, weight::Memory, flipped::Bool)
    made = planes!(p, out, Blocks(c).samples)
    return emit_winograd!((first, count) -> copy_out!(p, made, first, count), p, c, made, x, weight, flipped)
end

"""The same, with what `after(first sample, samples)` appends behind each block, whose planes are then made."""
function emit_winograd!(after, p::Instructions, c::TiledConvolution, made::Planes, x::Memory, weight::Memory, flipped::Bool)
    weights, blocks = weight_places!(p, c, weight, flipped), Blocks(c)
    input = planes!(p, x, blocks.samples)
    read = place_memory!(p, whole_vectors(c.channels), tiles(c, blocks), places(c))
    written = place_memory!(p, whole_vectors(c.filters), tiles(c, blocks), places(c))
    return emit_blocks!(p, c, blocks, x, made.all) do first, count
        copy_in!(p, input, first, count)
        for tile in segments(c, blocks)
            before, counts = segment(c, blocks, tile)
            n = count * counts[1] * counts[2]
            a, y = first_tiles(read, n), first_tiles(written, n)
            emit_transform!(p, :places_of_input, c, of_block(input, first, count), a, places_before(c, before), counts)
            emit_matmul!(p, y, weights, with_strides(a, Int[c.channels, n, places(c)], a.strides), 0)
            emit_transform!(p, :from_places, c, of_block(made, first, count), y, outputs_before(c, before), counts)
        end
        after(first, count)
    end
end

"""out (kernel..., channels, filters) = the gradient by the weight, from g (lengths..., filters, samples) and x."""
function emit_winograd_weight_gradient!(p::Instructions, c::TiledConvolution, out::Memory, g::Memory, x::Memory)
    blocks, rows = Blocks(c), whole_vectors(c.filters)
    input, upstream = planes!(p, x, blocks.samples), planes!(p, g, blocks.samples)
    read = place_memory!(p, whole_vectors(c.channels), tiles(c, blocks), places(c))
    given = place_memory!(p, rows, tiles(c, blocks), places(c))
    total = scratch!(p, Float32, Int[rows, c.channels, places(c)])
    emit_blocks!(p, c, blocks, x, g) do first, count
        copy_in!(p, input, first, count)
        copy_in!(p, upstream, first, count)
        for tile in segments(c, blocks)
            before, counts = segment(c, blocks, tile)
            n = count * counts[1] * counts[2]
            a, b = first_tiles(given, n), first_tiles(read, n)
            emit_transform!(p, :places_of_input, c, of_block(input, first, count), b, places_before(c, before), counts)
            emit_transform!(p, :places_of_upstream, c, of_block(upstream, first, count), a, outputs_before(c, before), counts)
            across = with_strides(b, Int[n, c.channels, places(c)], b.strides[[2, 1, 3]])
            emit_matmul!(p, total, a, across, first + tile == 0 ? 0 : 1)
        end
    end
    of_weight = weight_transform!(p, c, false)
    k = of_weight.dims[1]
    elements = scratch!(p, Float32, Int[rows, k, c.channels])
    emit_matmul!(p, elements, with_strides(total, total.dims[[1, 3, 2]], total.strides[[1, 3, 2]]),
        for_each_matrix(turned(of_weight), c.channels), 0)
    return emit_copy!(p, with_strides(out, Int[k, c.channels, c.filters], Int[1, k, k * c.channels]),
        with_strides(elements, Int[k, c.channels, c.filters], Int[rows, rows * k, 1]))
end
