# Convolution over one or two axes, and its two derivatives. It is linear in each operand, so the three ops are closed
# under differentiation: the derivatives of each are the other two. Over more axes it is made of these.
#
# Sizes: x (W, C, N) or (W, H, C, N); weight (kw, C / groups, F) or (kw, kh, C / groups, F). This is cross-correlation, as
# in the other frameworks: the kernel is not turned round. Attributes are in the order of the spatial axes, first axis
# first; padding is a pair for each, before and after.

"""Where windows lie on the first axes of an array, as two axes: those of one axis get a second one of length one."""
struct Windows
    dims::Vector{Int}  # of the input
    kernel::Vector{Int}
    stride::Vector{Int}
    before::Vector{Int}  # padding
    dilation::Vector{Int}
    out::Vector{Int}
end

function Windows(dims::Vector{Int}, kernel::Vector{Int}, stride::Vector{Int}, padding::Vector{Int}, dilation::Vector{Int})
    out = window_counts(dims, kernel, stride, padding, dilation)
    two(v, fill) = length(v) == 1 ? Int[v[1], fill] : v
    return Windows(two(dims, 1), two(kernel, 1), two(stride, 1), two(padding[1:2:end], 0), two(dilation, 1), two(out, 1))
end

"""How many windows fit on each axis; a `ShapeError` where none does."""
function window_counts(dims::Vector{Int}, kernel::Vector{Int}, stride::Vector{Int}, padding::Vector{Int},
        dilation::Vector{Int})
    out = Int[]
    for d in eachindex(dims)
        room = dims[d] + padding[2d-1] + padding[2d] - dilation[d] * (kernel[d] - 1) - 1
        room >= 0 || throw(ShapeError("a window of size $(Tuple(kernel))" *
            (all(==(1), dilation) ? "" : " with dilation $(Tuple(dilation))") * " does not fit an input of $(Tuple(dims))" *
            (all(==(0), padding) ? "" : " with padding $(Tuple(padding))") * "; use a smaller window or more padding"))
        push!(out, room ÷ stride[d] + 1)
    end
    return out
end

spatial(x::Tensor) = x.dims[1:end-2]
spatial(m::Memory) = m.dims[1:end-2]

function check_convolved(x::Vector{Int}, weight::Vector{Int}, groups::Int, axes::Int=2)
    1 <= length(x) - 2 <= axes && length(weight) == length(x) || throw(ShapeError("expected an input (W, C, N) or (W, H, C, N) " *
        "and a weight (kw, C, F) or (kw, kh, C, F)$(axes > 2 ? ", or both with more axes" : ""), got sizes $(Tuple(x)) and " *
        "$(Tuple(weight))"))
    x[end-1] == weight[end-1] * groups && weight[end] % groups == 0 || throw(ShapeError(
        "an input of size $(Tuple(x)) has $(x[end-1]) channels; a weight of size $(Tuple(weight)) in $groups " *
        "group$(groups == 1 ? "" : "s") takes $(weight[end-1] * groups)" *
        (weight[end] % groups == 0 ? "" : ", and its $(weight[end]) filters cannot be divided among them")))
    return nothing
end

function infer_conv(inputs, attrs)
    x, w = inputs[1], inputs[2]
    check_convolved(x.dims, w.dims, attrs.groups)
    out = window_counts(spatial(x), spatial(w), attrs.stride, attrs.padding, attrs.dilation)
    return Int[out; w.dims[end]; x.dims[end]], check_float(common_eltype(Tensor[x, w]))
end

# The other two: (g, weight) and (g, x), with the size of what they give as the last attribute.

function infer_conv_input_gradient(inputs, attrs)
    g, w = inputs[1], inputs[2]
    check_convolved(attrs.dims, w.dims, attrs.groups)
    check_upstream(g, attrs.dims, w.dims, attrs)
    return attrs.dims, check_float(common_eltype(Tensor[g, w]))
end

function infer_conv_weight_gradient(inputs, attrs)
    g, x = inputs[1], inputs[2]
    check_convolved(x.dims, attrs.dims, attrs.groups)
    check_upstream(g, x.dims, attrs.dims, attrs)
    return attrs.dims, check_float(common_eltype(Tensor[g, x]))
end

function check_upstream(g::Tensor, x::Vector{Int}, weight::Vector{Int}, attrs)
    out = window_counts(x[1:end-2], weight[1:end-2], attrs.stride, attrs.padding, attrs.dilation)
    expected = Int[out; weight[end]; x[end]]
    g.dims == expected || throw(ShapeError("expected a gradient of size $(Tuple(expected)), got $(size(g))"))
    return nothing
end

# Lowering: the windows of a sample become the rows of a matrix (im2col), so that the rest is a matrix product.

"""What the kernels that walk through windows read: sizes, then the input's strides along its first two axes and C."""
function window_numbers!(p::Instructions, w::Windows, channels::Int, strides::Vector{Int})
    numbers = Int64[w.dims; w.kernel; w.stride; w.before; w.dilation; w.out; channels; strides]
    push!(p.roots, Memory(numbers))
    return Ptr{Cvoid}(pointer(numbers))
end

"""The strides of an image along its two axes and its channels."""
image_strides(m::Memory) = length(m.dims) == 3 ? Int[m.strides[1], 0, m.strides[2]] : m.strides[1:3]

at_element(m::Memory, offset::Int) = m.address + sizeof(m.eltype) * offset
matrix(m::Memory, offset::Int, dims::Vector{Int}) =
    Memory(m.root, at_element(m, offset), m.eltype, dims, dense_strides(dims))
turned(m::Memory) = Memory(m.root, m.address, m.eltype, reverse(m.dims), reverse(m.strides))

"""Sizes that the lowerings of all three ops share."""
struct Convolution
    windows::Windows
    pixels::Int  # of a result's plane
    taps::Int  # of a filter: kernel × channels of a group
    channels::Int  # of a group
    filters::Int  # of a group
    groups::Int
    samples::Int
end

function Convolution(x::Vector{Int}, weight::Vector{Int}, attrs)
    windows = Windows(x[1:end-2], weight[1:end-2], attrs.stride, attrs.padding, attrs.dilation)
    groups = attrs.groups
    return Convolution(windows, prod(windows.out), prod(weight[1:end-1]), weight[end-1], weight[end] ÷ groups, groups,
        x[end])
end

"""A kernel of one element that steps by one: its windows are the image itself."""
is_pointwise(w::Windows) =
    all(==(1), w.kernel) && all(==(1), w.stride) && all(==(0), w.before) && w.out == w.dims

"""The matrix of an image's windows, (pixels, taps), computed into `columns`, or the image itself."""
function columns!(p::Instructions, c::Convolution, columns::Memory, x::Memory, numbers::Ptr{Cvoid}, offset::Int)
    is_pointwise(c.windows) && is_dense(x) && return matrix(x, offset, Int[c.pixels, c.taps])
    emit!(p, x.eltype, :im2col, (columns.address, at_element(x, offset), NOWHERE, NOWHERE), numbers, ONCE,
        (NONE, NONE, NONE, NONE))
    return columns
end

"""Run through samples and groups: `f(first element of the input, of the weight, of the result)`."""
function each_image(f, c::Convolution, x::Memory)
    for n in 0:c.samples-1, k in 0:c.groups-1
        f(n * x.strides[end] + k * c.channels * x.strides[end-1], k * c.taps * c.filters,
            (n * c.groups + k) * c.pixels * c.filters)
    end
end

function forward_conv(p, out, inputs, attrs)
    x, w = inputs[1], dense!(p, inputs[2])
    length(out) == 0 && return nothing
    length(w) == 0 && return emit_fill!(p, out, 0)
    c = Convolution(x.dims, w.dims, attrs)
    tiled = by_winograd(c, out.eltype)
    tiled === nothing || return emit_winograd!(p, tiled, out, x, w, false)
    numbers = window_numbers!(p, c.windows, c.channels, image_strides(x))
    columns = scratch!(p, out.eltype, Int[c.pixels, c.taps])
    each_image(c, x) do image, filters, result
        a = columns!(p, c, columns, x, numbers, image)
        emit_matmul!(p, matrix(out, result, Int[c.pixels, c.filters]), a, matrix(w, filters, Int[c.taps, c.filters]), 0)
    end
end

function forward_conv_input_gradient(p, out, inputs, attrs)
    g, w = inputs[1], dense!(p, inputs[2])
    (length(g) == 0 || length(w) == 0 || length(out) == 0) && return emit_fill!(p, out, 0)
    c = Convolution(out.dims, w.dims, attrs)
    tiled = by_winograd(c, out.eltype; transpose=true)
    tiled === nothing || return emit_winograd!(p, tiled, out, g, w, true)
    emit_fill!(p, out, 0)
    g = dense!(p, g)
    numbers = window_numbers!(p, c.windows, c.channels, image_strides(out))
    columns = scratch!(p, out.eltype, Int[c.pixels, c.taps])
    each_image(c, out) do image, filters, result
        emit_matmul!(p, columns, matrix(g, result, Int[c.pixels, c.filters]),
            turned(matrix(w, filters, Int[c.taps, c.filters])), 0)
        emit!(p, out.eltype, :col2im, (at_element(out, image), columns.address, NOWHERE, NOWHERE), numbers, ONCE,
            (NONE, NONE, NONE, NONE))
    end
end

function forward_conv_weight_gradient(p, out, inputs, attrs)
    g, x = inputs[1], inputs[2]
    length(out) == 0 && return nothing
    length(g) == 0 && return emit_fill!(p, out, 0)
    c = Convolution(x.dims, out.dims, attrs)
    tiled = by_winograd(c, out.eltype)
    tiled === nothing || return emit_winograd_weight_gradient!(p, tiled, out, g, x)
    g = dense!(p, g)
    numbers = window_numbers!(p, c.windows, c.channels, image_strides(x))
    columns = scratch!(p, out.eltype, Int[c.pixels, c.taps])
    # BLAS is fastest where the longer side of a long sum is that of the columns: the transpose, then, and that once turned.
    turns = c.taps > c.filters
    total = turns ? scratch!(p, out.eltype, Int[length(out)]) : out
    each_image(c, x) do image, filters, result
        a, b = columns!(p, c, columns, x, numbers, image), matrix(g, result, Int[c.pixels, c.filters])
        beta = result < c.groups * c.pixels * c.filters ? 0 : 1
        turns ? emit_matmul!(p, matrix(total, filters, Int[c.filters, c.taps]), turned(b), a, beta) :
            emit_matmul!(p, matrix(total, filters, Int[c.taps, c.filters]), turned(a), b, beta)
    end
    turns || return nothing
    for filters in 0:c.taps*c.filters:length(out)-1
        emit_copy!(p, matrix(out, filters, Int[c.taps, c.filters]), turned(matrix(total, filters, Int[c.filters, c.taps])))
    end
end

# The records ----------------------------------------------------------------------------------------------------------

conv_input_gradient(g::Tensor, w::Tensor, x::Vector{Int}, attrs) =
    apply(CONV_INPUT_GRADIENT, Tensor[g, w], with(subset(attrs, CONV_ATTRS), :dims => x))
conv_weight_gradient(g::Tensor, x::Tensor, w::Vector{Int}, attrs) =
    apply(CONV_WEIGHT_GRADIENT, Tensor[g, x], with(subset(attrs, CONV_ATTRS), :dims => w))

const CONV_ATTRS = [:stride, :padding, :dilation, :groups]

"""Batching of an op that a weight takes part in: where all samples share it, they are one larger batch."""
function by_shared_weight(op, count, mapped, inputs, attrs)
    mapped[2] && return nothing
    x = inputs[1]
    whole = reshape_to(x, Int[x.dims[1:end-2]; x.dims[end-1] * count])
    return in_batches(apply(op, Tensor[whole, inputs[2]], of_batch(attrs, count)), count)
end

const CONV = register!(Op("conv", infer_conv; batch=by_shared_weight, forward=forward_conv, jvp=multilinear_jvp("conv"), attrs=CONV_ATTRS,
    backward=Any[(g, y, inputs, attrs) -> conv_input_gradient(g, inputs[2], inputs[1].dims, attrs),
        (g, y, inputs, attrs) -> conv_weight_gradient(g, inputs[1], inputs[2].dims, attrs)],
    doc="cross-correlation over the first axis or two, by a weight (kernel..., C / groups, F)"))
const CONV_INPUT_GRADIENT = register!(Op("conv_input_gradient", infer_conv_input_gradient; batch=by_shared_weight,
    forward=forward_conv_input_gradient, jvp=multilinear_jvp("conv_input_gradient"), attrs=[CONV_ATTRS; :dims],
    backward=Any[(g, y, inputs, attrs) -> apply(CONV, Tensor[g, inputs[2]], subset(attrs, CONV_ATTRS)),
        (g, y, inputs, attrs) -> conv_weight_gradient(inputs[1], g, inputs[2].dims, attrs)],
    doc="gradient of conv by its input: each window's part added to where it came from"))
const CONV_WEIGHT_GRADIENT = register!(Op("conv_weight_gradient", infer_conv_weight_gradient;
    forward=forward_conv_weight_gradient, jvp=multilinear_jvp("conv_weight_gradient"), attrs=[CONV_ATTRS; :dims],
    backward=Any[(g, y, inputs, attrs) -> apply(CONV, Tensor[inputs[2], g], subset(attrs, CONV_ATTRS)),
        (g, y, inputs, attrs) -> conv_input_gradient(inputs[1], g, inputs[2].dims, attrs)],
    doc="gradient of conv by its weight, summed over the batch"))

"""One number for all axes, or one for each."""
function each_axis(what::String, @nospecialize(value), n::Int, least::Int)
    numbers = value isa Integer ? fill(Int(value), n) : items_of(value)
    length(numbers) == n && all(v -> v isa Integer && !(v isa Bool) && v >= least, numbers) || throw(ShapeError(
        "$what must be an integer >= $least, or one for each of $n axes, got $(repr(value))"))
    return Int[v for v in numbers]
end

"""The items of a setting; none of what is no collection, which has too few for any axes."""
items_of(@nospecialize(value)) = applicable(iterate, value) ? collect(Any, value) : Any[]

"""Padding as one list, before and after for each axis, from a number, a number for each axis, or a pair for each."""
function each_side(what::String, @nospecialize(value), n::Int)
    value isa Integer && return fill(each_axis(what, value, 1, 0)[1], 2n)
    parts = items_of(value)
    n == 1 && length(parts) == 2 && all(v -> v isa Integer, parts) && (parts = Any[Tuple(parts)])
    length(parts) == n || throw(ShapeError("$what must be an integer >= 0, or an integer or a pair for each of $n axes, " *
        "got $(repr(value))"))
    return reduce(vcat, Vector{Int}[each_axis(what, part, 2, 0) for part in parts])
end

# More than two axes: what a window holds along the last one becomes channels, and where it lies samples.

"""Convolution of checked operands."""
function convolved(x::Tensor, w::Tensor, stride::Vector{Int}, padding::Vector{Int}, dilation::Vector{Int}, groups::Int)
    n = length(stride)
    n <= 2 && return apply(CONV, Tensor[x, w],
        attributes(:stride => stride, :padding => padding, :dilation => dilation, :groups => groups))
    k, before, after = w.dims[n], x.dims[1:n-1], padding[2n-1:2n]
    out = window_counts(spatial(x), spatial(w), stride, padding, dilation)
    k == 0 && return spread_to(literal(x.eltype, 0), Int[out; w.dims[end]; x.dims[end]])
    wide = pad(x, [d == n ? Tuple(after) : (0, 0) for d in 1:n+2])
    starts = 1 .+ dilation[n] .* (0:k-1)
    windows = stack(Tensor[part_of(wide, n, range(start; step=stride[n], length=out[n])) for start in starts]; dims=n)
    channels = permuted(windows, Int[1:n; n + 2; n + 1; n + 3])
    seen = reshape_to(channels, Int[before; k * x.dims[n+1]; out[n] * x.dims[end]])
    weight = reshape_to(w, Int[w.dims[1:n-1]; k * w.dims[n+1]; w.dims[end]])
    y = convolved(seen, weight, stride[1:n-1], padding[1:2n-2], dilation[1:n-1], groups)
    return permuted(reshape_to(y, Int[out[1:n-1]; w.dims[end]; out[n]; x.dims[end]]), Int[1:n-1; n + 1; n; n + 2])
end

"""Its transpose, with a result of these lengths."""
function spread_out(x::Tensor, w::Tensor, stride::Vector{Int}, padding::Vector{Int}, dilation::Vector{Int}, groups::Int,
        lengths::Vector{Int})
    n = length(stride)
    channels = w.dims[n+1] * groups
    n <= 2 && return apply(CONV_INPUT_GRADIENT, Tensor[x, w], attributes(:stride => stride, :padding => padding,
        :dilation => dilation, :groups => groups, :dims => Int[lengths; channels; x.dims[end]]))
    k, m, before = w.dims[n], x.dims[n], padding[2n-1]
    k == 0 && return spread_to(literal(x.eltype, 0), Int[lengths; channels; x.dims[end]])
    flat = reshape_to(permuted(x, Int[1:n-1; n + 1; n; n + 2]), Int[x.dims[1:n-1]; x.dims[n+1]; m * x.dims[end]])
    weight = reshape_to(w, Int[w.dims[1:n-1]; k * w.dims[n+1]; w.dims[end]])
    y = spread_out(flat, weight, stride[1:n-1], padding[1:2n-2], dilation[1:n-1], groups, lengths[1:n-1])
    # What each place of the kernel adds, for all places of x: they lie `stride` apart.
    each = permuted(reshape_to(y, Int[lengths[1:n-1]; k; channels; m; x.dims[end]]), Int[1:n-1; n + 2; n + 1; n + 3; n])
    parts = Tensor[part_of(each, n + 3, j:j) for j in 1:k]
    parts = Tensor[reshape_to(part, part.dims[1:end-1]) for part in parts]
    dims = Int[lengths[1:n-1]; max(dilation[n] * (k - 1) + stride[n] * (m - 1) + 1, before + lengths[n]); channels; x.dims[end]]
    places = Index[Index([d == n ? (1 + dilation[n] * j, stride[n], m) : whole_axis(dims[d]) for d in 1:n+2]) for j in 0:k-1]
    return part_of(assemble(parts, places, dims), n, before+1:before+lengths[n])
end

"""
    conv(x, weight; stride=1, padding=0, dilation=1, groups=1)

Cross-correlation of x (W, C, N) with a weight (kw, C / groups, F), giving (W', F, N), or of (W, H, C, N) with (kw, kh, C /
groups, F), giving (W', H', F, N), or over more axes in the same order. Settings are one number, or one for each of these axes;
padding also a pair (before, after) for each. Throws a `ShapeError` where the sizes do not fit.
"""
function conv(@nospecialize(x), @nospecialize(weight); stride=1, padding=0, dilation=1, groups::Integer=1)
    a, w = as_tensors((x, weight))
    n = ndims(a) - 2
    groups >= 1 || throw(ShapeError("conv: groups must be at least 1, got $groups"))
    check_convolved(a.dims, w.dims, Int(groups), typemax(Int))
    check_float(common_eltype(Tensor[a, w]))
    return convolved(a, w, each_axis("conv: stride", stride, n, 1), each_side("conv: padding", padding, n),
        each_axis("conv: dilation", dilation, n, 1), Int(groups))
end

FUNCTIONS["conv"] = conv
export conv

"""
    conv_transpose(x, weight; stride=1, padding=0, output_padding=0, dilation=1, groups=1)

The transpose of [`conv`](@ref): each element of x (W, F, N) adds its multiple of a weight (kw, C / groups, F), giving (W', C, N),
or of (W, H, F, N) with (kw, kh, C / groups, F), or over more axes. `padding` is cut off the result, `output_padding` is more at
its end, fewer than the stride or the dilation. Throws a `ShapeError` where the sizes do not fit, or nothing is left of the result.
"""
function conv_transpose(@nospecialize(x), @nospecialize(weight); stride=1, padding=0, output_padding=0, dilation=1, groups::Integer=1)
    a, w = as_tensors((x, weight))
    n = ndims(a) - 2
    n >= 1 && ndims(w) == ndims(a) && a.dims[n+1] == w.dims[end] && !any(==(0), a.dims[1:n]) || throw(ShapeError(
        "conv_transpose: expected x (W, F, N) or (W, H, F, N) and a weight (kw, C, F) or (kw, kh, C, F), or both with more axes, got " *
        "sizes $(size(a)) and $(size(w))"))
    groups >= 1 || throw(ShapeError("conv_transpose: groups must be at least 1, got $groups"))
    steps, sides = each_axis("conv_transpose: stride", stride, n, 1), each_side("conv_transpose: padding", padding, n)
    apart, more = each_axis("conv_transpose: dilation", dilation, n, 1), each_axis("conv_transpose: output_padding", output_padding, n, 0)
    all(more .< max.(steps, apart)) || throw(ShapeError("conv_transpose: output_padding must be less than the stride " *
        "$(Tuple(steps)) or the dilation $(Tuple(apart)), got $(Tuple(more))"))
    # More than the stride is less padding, and zeros where there is none left: nothing is added so far behind the end.
    behind = zeros(Int, n)
    for d in 1:n
        more[d] < steps[d] && continue
        kept = max(sides[2d] - more[d], 0)
        behind[d], sides[2d], more[d] = max(more[d] - sides[2d], 0), kept, 0
    end
    lengths = Int[(a.dims[d] - 1) * steps[d] + apart[d] * (w.dims[d] - 1) + 1 - sides[2d-1] - sides[2d] + more[d] for d in 1:n]
    all(>=(1), lengths) || throw(ShapeError(
        "conv_transpose: nothing is left of the result, whose lengths would be $(Tuple(lengths)); use less padding"))
    check_convolved(Int[lengths; w.dims[n+1] * groups; a.dims[end]], w.dims, Int(groups), typemax(Int))
    check_float(common_eltype(Tensor[a, w]))
    y = spread_out(a, w, steps, sides, apart, Int(groups), lengths)
    return all(==(0), behind) ? y : pad(y, [(0, d <= n ? behind[d] : 0) for d in 1:n+2])
end

FUNCTIONS["conv_transpose"] = conv_transpose
export conv_transpose
