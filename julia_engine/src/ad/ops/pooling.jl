# Pooling over the first axis or two of (W, C, N) or (W, H, C, N): the largest or the mean element of each window. Over more axes
# it is one pooling after the other.
#
# Of equal elements the first in memory is the largest, and NaN is larger than any number. max_pool_gradient puts an
# upstream gradient to the places of the largest elements, max_pool_gather takes from them: each is the derivative of the
# other, and of max_pool.

function check_pooled(x::Vector{Int}, window::Vector{Int})
    expected = length(window) == 1 ? "(W, C, N)" : "(W, H, C, N)"
    length(x) == length(window) + 2 || throw(ShapeError(
        "expected an input of size $expected for a window of size $(Tuple(window)), got size $(Tuple(x))"))
    return nothing
end

function pooled_dims(x::Vector{Int}, attrs)
    all(d -> (attrs.dilation[d] == 1 && x[d] > 0) || sees_elements(x[d], attrs, d), 1:length(attrs.window)) ||
        throw(ShapeError("a window would lie on padding alone; use less padding"))
    return Int[window_counts(x[1:end-2], attrs.window, attrs.stride, attrs.padding, attrs.dilation); x[end-1:end]]
end

"""Whether each window has an element of the axis."""
function sees_elements(n::Int, attrs, d::Int)
    k, dilation = attrs.window[d], attrs.dilation[d]
    starts = -attrs.padding[2d-1]:attrs.stride[d]:n+attrs.padding[2d]-1-(k-1)*dilation
    return all(start -> any(j -> 0 <= start + j * dilation < n, 0:k-1), starts)
end

function infer_pool(inputs, attrs)
    check_pooled(inputs[1].dims, attrs.window)
    return pooled_dims(inputs[1].dims, attrs), check_float(inputs[1].eltype)
end

function check_pool_gradient(g::Vector{Int}, x::Vector{Int}, attrs)
    check_pooled(x, attrs.window)
    g == pooled_dims(x, attrs) ||
        throw(ShapeError("expected a gradient of size $(Tuple(pooled_dims(x, attrs))), got $(Tuple(g))"))
    return nothing
end

function infer_max_pool_gradient(inputs, attrs)
    check_pool_gradient(inputs[1].dims, inputs[2].dims, attrs)
    return inputs[2].dims, check_float(common_eltype(inputs))
end

function infer_max_pool_gather(inputs, attrs)
    inputs[1].dims == inputs[2].dims ||
        throw(ShapeError("expected two arrays of one size, got $(size(inputs[1])) and $(size(inputs[2]))"))
    check_pooled(inputs[2].dims, attrs.window)
    return pooled_dims(inputs[2].dims, attrs), check_float(common_eltype(inputs))
end

function infer_avg_pool_gradient(inputs, attrs)
    check_pool_gradient(inputs[1].dims, attrs.dims, attrs)
    return attrs.dims, check_float(inputs[1].eltype)
end

"""
Append a kernel that walks through the windows of `whole` (the side before pooling), plane by plane. Strides of an operand
are those of its planes, along its two axes and then C and N.
"""
function emit_pool!(p::Instructions, name::Symbol, whole::Memory, attrs, out::Memory, operands::Memory...)
    (length(out) == 0 || length(whole) == 0) && return nothing
    windows = Windows(spatial(whole), attrs.window, attrs.stride, attrs.padding, attrs.dilation)
    numbers = window_numbers!(p, windows, 1, Int[0, 0, 0])
    planes(m) = length(m.dims) == 3 ? (m.strides[1], 0, m.strides[2], m.strides[3]) : loop(m.strides, 0)
    at = addresses(Address[out.address; [m.address for m in operands]])
    strides = ntuple(k -> k == 1 ? planes(out) : k <= length(operands) + 1 ? planes(operands[k-1]) : NONE, Val(4))
    return emit!(p, out.eltype, name, at, numbers, (out.dims[end-1], out.dims[end], 1, 1), strides)
end

"""Whether windows of two by two elements lie side by side, without padding, in planes whose first axis lies in one piece."""
in_pairs(attrs, operands::Memory...) = attrs.window == attrs.stride == Int[2, 2] && iszero(attrs.padding) &&
    all(==(1), attrs.dilation) && all(m -> m.strides[1] == 1, operands)

function forward_max_pool(p, out, inputs, attrs)
    name = in_pairs(attrs, out, inputs[1]) ? :max_pool_pairs : :max_pool
    return emit_pool!(p, name, inputs[1], attrs, out, inputs[1])
end

function forward_max_pool_gradient(p, out, inputs, attrs)
    in_pairs(attrs, out, inputs...) || return forward_pool_gradient(:max_pool_gradient, p, out, inputs, attrs)
    all(iseven, spatial(out)) || emit_fill!(p, out, 0)  # what is in no window
    return emit_pool!(p, :max_pool_gradient_pairs, out, attrs, out, inputs...)
end

function forward_pool_gradient(name::Symbol, p, out, inputs, attrs)
    emit_fill!(p, out, 0)
    return emit_pool!(p, name, out, attrs, out, inputs...)
end

pool_gradient(g::Tensor, x::Tensor, attrs) = apply(MAX_POOL_GRADIENT, Tensor[g, x], attrs)
pool_gather(t::Tensor, x::Tensor, attrs) = apply(MAX_POOL_GATHER, Tensor[t, x], attrs)

const POOL_ATTRS = [:window, :stride, :padding, :dilation]

const MAX_POOL = register!(Op("max_pool", infer_pool; batch=by_samples, attrs=POOL_ATTRS,
    forward=forward_max_pool, backward=Any[(g, y, inputs, attrs) -> pool_gradient(g, inputs[1], attrs)],
    jvp=(t, y, inputs, attrs) -> pool_gather(t[1], inputs[1], attrs),
    doc="largest element of each window over the first axis or two; the first of equal ones"))
const MAX_POOL_GRADIENT = register!(Op("max_pool_gradient", infer_max_pool_gradient; batch=by_samples, attrs=POOL_ATTRS,
    forward=forward_max_pool_gradient,
    backward=Any[(g, y, inputs, attrs) -> pool_gather(g, inputs[2], attrs), no_gradient],
    jvp=(t, y, inputs, attrs) -> t[1] === nothing ? zeros_like(y) : pool_gradient(t[1], inputs[2], attrs),
    doc="gradient of max_pool: each element added where the largest of its window of the second operand is"))
const MAX_POOL_GATHER = register!(Op("max_pool_gather", infer_max_pool_gather; batch=by_samples, attrs=POOL_ATTRS,
    forward=(p, out, inputs, attrs) -> emit_pool!(p, :max_pool_gather, inputs[2], attrs, out, inputs...),
    backward=Any[(g, y, inputs, attrs) -> pool_gradient(g, inputs[2], attrs), no_gradient],
    jvp=(t, y, inputs, attrs) -> t[1] === nothing ? zeros_like(y) : pool_gather(t[1], inputs[2], attrs),
    doc="the elements at the places where the largest of each window of the second operand are"))
const AVG_POOL = register!(Op("avg_pool", infer_pool; batch=by_samples, attrs=POOL_ATTRS,
    forward=(p, out, inputs, attrs) -> emit_pool!(p, :avg_pool, inputs[1], attrs, out, inputs[1]),
    backward=Any[(g, y, inputs, attrs) -> apply(AVG_POOL_GRADIENT, Tensor[g], with(attrs, :dims => inputs[1].dims))],
    jvp=linear_jvp("avg_pool"), doc="mean of each window over the first axis or two; padding counts as zeros"))
const AVG_POOL_GRADIENT = register!(Op("avg_pool_gradient", infer_avg_pool_gradient; batch=by_samples, attrs=[POOL_ATTRS; :dims],
    forward=(p, out, inputs, attrs) -> forward_pool_gradient(:avg_pool_gradient, p, out, inputs, attrs),
    backward=Any[(g, y, inputs, attrs) -> apply(AVG_POOL, Tensor[g], subset(attrs, POOL_ATTRS))],
    jvp=linear_jvp("avg_pool_gradient"), doc="gradient of avg_pool: each element spread evenly over its window"))

"""Window, stride, padding and dilation as attributes. Padding is at most half the window, so that none is all padding."""
function pool_attrs(what::String, n::Int, @nospecialize(window), @nospecialize(stride), @nospecialize(padding), @nospecialize(dilation=1))
    sizes = each_axis("$what: window", window, n, 1)
    steps = stride === nothing ? sizes : each_axis("$what: stride", stride, n, 1)
    sides, apart = each_side("$what: padding", padding, n), each_axis("$what: dilation", dilation, n, 1)
    all(d -> 2 * max(sides[2d-1], sides[2d]) <= (sizes[d] - 1) * apart[d] + 1, 1:n) || throw(ShapeError(
        "$what: padding must be at most half the window, got $(Tuple(sides)) for a window of size $(Tuple(sizes))"))
    return attributes(:window => sizes, :stride => steps, :padding => sides, :dilation => apart)
end

"""The padding behind each axis with which its last window, begun before the end, is complete."""
function to_last_windows(x::Tensor, attrs)
    pooled_dims(x.dims, attrs)  # which refuses a window that is longer than the padded input
    sides = copy(attrs.padding)
    for d in eachindex(attrs.window)
        reach, padded = (attrs.window[d] - 1) * attrs.dilation[d] + 1, x.dims[d] + sides[2d-1] + sides[2d]
        last = cld(max(padded - reach, 0), attrs.stride[d]) * attrs.stride[d]
        last >= x.dims[d] + sides[2d-1] && (last -= attrs.stride[d])
        sides[2d] = max(last + reach - x.dims[d] - sides[2d-1], sides[2d])
    end
    return attributes(:window => attrs.window, :stride => attrs.stride, :padding => sides, :dilation => attrs.dilation)
end

function pooled(name::String, op::Op, @nospecialize(x), settings, ceil_mode::Bool)
    a = as_tensor(x)
    n = ndims(a) - 2
    n >= 1 || throw(ShapeError("$name: expected size (W, C, N) or (W, H, C, N), or more axes, got $(size(a))"))
    attrs = pool_attrs(name, n, settings...)
    return pooled(op, a, ceil_mode ? to_last_windows(a, attrs) : attrs)
end

function pooled(op::Op, x::Tensor, attrs)
    n = length(attrs.window)
    n <= 2 && return apply(op, Tensor[x], attrs)
    check_float(x.eltype)
    pooled_dims(x.dims, attrs)  # which checks the sizes of all axes
    # The first two axes for all others, then each other one: of equal elements the first in memory is still the largest.
    along(axes::UnitRange{Int}) = attributes(:window => attrs.window[axes], :stride => attrs.stride[axes],
        :padding => attrs.padding[2*first(axes)-1:2*last(axes)], :dilation => attrs.dilation[axes])
    y = apply(op, Tensor[reshape_to(x, Int[x.dims[1:2]; prod(x.dims[3:end-1]); x.dims[end]])], along(1:2))
    dims = Int[y.dims[1:2]; x.dims[3:end]]
    for d in 3:n
        one = along(d:d)
        settings = attributes(:window => Int[1; one.window], :stride => Int[1; one.stride], :padding => Int[0, 0, one.padding...],
            :dilation => Int[1; one.dilation])
        y = apply(op, Tensor[reshape_to(y, Int[prod(dims[1:d-1]); dims[d]; prod(dims[d+1:end-1]); dims[end]])], settings)
        dims[d] = y.dims[2]
    end
    return reshape_to(y, dims)
end

"""
    max_pool(x, window; stride=window, padding=0, dilation=1, ceil_mode=false)

The largest element of each window over the first axis of (W, C, N), over the first two of (W, H, C, N), or over more. Settings are
one number, or one for each axis. Padding is minus infinities, at most half the window. With `ceil_mode` elements that are left over at the end, too few for a window, have one nevertheless.
Throws a `ShapeError` for shapes that do not fit, or a window that is longer than the padded input.
"""
max_pool(@nospecialize(x), @nospecialize(window); stride=nothing, padding=0, dilation=1, ceil_mode::Bool=false) =
    pooled("max_pool", MAX_POOL, x, (window, stride, padding, dilation), ceil_mode)

"""
    avg_pool(x, window; stride=window, padding=0, dilation=1, ceil_mode=false, count_padding=true)

The mean of each window; settings are those of [`max_pool`](@ref). Padding counts as zeros, or with `count_padding=false` not at all;
what a window of `ceil_mode` has beyond the padding never counts.
"""
function avg_pool(@nospecialize(x), @nospecialize(window); stride=nothing, padding=0, dilation=1, ceil_mode::Bool=false,
        count_padding::Bool=true)
    y = pooled("avg_pool", AVG_POOL, x, (window, stride, padding, dilation), ceil_mode)
    a = as_tensor(x)
    n = ndims(a) - 2
    given = count_padding ? each_side("avg_pool: padding", padding, n) : zeros(Int, 2n)
    return averaged(y, a, given, pool_attrs("avg_pool", n, window, stride, padding, dilation))
end

"""Means `y` of windows of `x`, which count all their places, as means over the elements and the `given` padding alone."""
function averaged(y::Tensor, x::Tensor, given::Vector{Int}, settings)
    for d in eachindex(settings.window)
        reach = (settings.window[d] - 1) * settings.dilation[d] + 1
        settings.padding[2d-1] == 0 && (y.dims[d] - 1) * settings.stride[d] + reach <= x.dims[d] && continue
        inside = -given[2d-1]:x.dims[d]+given[2d]-1
        starts = (0:y.dims[d]-1) .* settings.stride[d] .- settings.padding[2d-1]
        counts = Int[count(j -> start + j * settings.dilation[d] in inside, 0:settings.window[d]-1) for start in starts]
        all(==(settings.window[d]), counts) && continue
        factor = convert(Vector{y.eltype}, settings.window[d] ./ max.(counts, 1))
        y = y .* reshape(factor, ntuple(k -> k == d ? length(factor) : 1, d))
    end
    return y
end

FUNCTIONS["max_pool"], FUNCTIONS["avg_pool"] = max_pool, avg_pool
export max_pool, avg_pool
