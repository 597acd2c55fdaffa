# Functions along an axis: running sums and products, and order.
#
# A position is constant between the values where the order changes, so that a sorted array has the gradient of its
# elements' places; of equal ones the first in the array comes first. NaN comes last.

"""One axis of `x`; none stands for that of a vector."""
function axis_along(name::String, x::Tensor, dims)
    dims === nothing && ndims(x) == 1 && return 1
    dims === nothing && throw(ShapeError("$name: dims must be given for an array of $(ndims(x)) dimensions"))
    axis = one_axis(name, dims)
    1 <= axis <= ndims(x) || throw(ShapeError("$name: axis $dims does not exist in size $(size(x))"))
    return axis
end

"""The slice `range` of an axis."""
part_of(x::Tensor, axis::Int, range::AbstractRange) = x[(d == axis ? range : Colon() for d in 1:ndims(x))...]

# Running sums and products ----------------------------------------------------------------------------------------------

infer_running(inputs, attrs) = (inputs[1].dims, check_float(inputs[1].eltype))
forward_running(f!) = (p, out, inputs, attrs) -> emit_arrays!(p, (y, x) -> f!(y, x; dims=attrs.axis), Memory[out], inputs)
running(op::Op, x::Tensor, axis::Int) = apply(op, Tensor[x], attributes(:axis => axis))

const CUMSUM = register!(Op("cumsum", infer_running; batch=trailing, sparsity=along_axes, forward=forward_running(cumsum!),
    backward=Any[(g, y, inputs, attrs) -> reverse(running(CUMSUM, reverse(g; dims=attrs.axis), attrs.axis); dims=attrs.axis)],
    jvp=linear_jvp("cumsum"), attrs=[:axis], doc="sum of the elements up to each place along an axis"))

"""y with y[i] = a[i] y[i-1] + b[i] along an axis, by recursive doubling (a parallel scan)."""
function recurrence(a::Tensor, b::Tensor, axis::Int)
    n = b.dims[axis]
    n <= 1 && return WHERE(EQUAL(a, a), b, b)  # read `a`, as longer ones do
    reach = 1
    while reach < n
        a_here, b_here = part_of(a, axis, reach+1:n), part_of(b, axis, reach+1:n)
        a_there, b_there = part_of(a, axis, 1:n-reach), part_of(b, axis, 1:n-reach)
        factor = a_here
        if reach > 1  # a product of finite factors may overflow, and nothing comes through it where `b` is 0
            factor = choose(LOGICAL_AND(EQUAL(b_there, 0), LOGICAL_NOT(ISFINITE(a_here))), 0, a_here)
        end
        b = concatenate(Tensor[part_of(b, axis, 1:reach), ADD(MUL(factor, b_there), b_here)], axis)
        a = concatenate(Tensor[part_of(a, axis, 1:reach), MUL(a_here, a_there)], axis)
        reach *= 2
    end
    return b
end

"""The product of the elements before each place, from those up to each place."""
function product_before(y::Tensor, axis::Int)
    n = y.dims[axis]
    one_ = Constant(fill!(new_array(y.eltype, Int[d == axis ? min(n, 1) : m for (d, m) in enumerate(y.dims)]), 1))
    return concatenate(Tensor[one_, part_of(y, axis, 1:max(n - 1, 0))], axis)
end

function backward_cumprod(g, y, inputs, attrs)
    # From the last place to the first: what a place's factor multiplies is its gradient and the next place's.
    x, axis = inputs[1], attrs.axis
    n = x.dims[axis]
    following = concatenate(Tensor[part_of(x, axis, min(2, n + 1):n), part_of(x, axis, 1:min(1, n))], axis)
    total = reverse(recurrence(reverse(following; dims=axis), reverse(g; dims=axis), axis); dims=axis)
    return MUL(total, product_before(y, axis))
end

const CUMPROD = register!(Op("cumprod", infer_running; batch=trailing, sparsity=along_axes, forward=forward_running(cumprod!), backward=Any[backward_cumprod],
    jvp=(t, y, inputs, attrs) -> recurrence(inputs[1], MUL(t[1], product_before(y, attrs.axis)), attrs.axis),
    attrs=[:axis], doc="product of the elements up to each place along an axis"))

Base.cumsum(x::Tensor; dims=nothing) = running(CUMSUM, x, axis_along("cumsum", x, dims))
Base.cumprod(x::Tensor; dims=nothing) = running(CUMPROD, x, axis_along("cumprod", x, dims))

# Order -------------------------------------------------------------------------------------------------------------------

"""Run `f(y_row, x_row)` for all rows along an axis."""
function by_rows(f, y::AbstractArray, x::AbstractArray, axis::Int)
    others = Tuple(d == axis ? (1:1) : axes(x, d) for d in 1:ndims(x))
    for place in CartesianIndices(others)
        row = ntuple(d -> d == axis ? Colon() : place[d], ndims(x))
        f(view(y, row...), view(x, row...))
    end
end

# As numpy orders them: 0 and -0 are equal.
before(a, b) = a < b || (isnan(b) && !isnan(a))
order!(y, x) = (y .= sortperm(x; lt=before, alg=MergeSort); nothing)

const ARGSORT = register!(Op("argsort", (inputs, attrs) -> (inputs[1].dims, Int64); batch=trailing, constant=true, attrs=[:axis],
    forward=(p, out, inputs, attrs) -> emit_arrays!(p, (y, x) -> by_rows(order!, y, x, attrs.axis), Memory[out], inputs),
    doc="positions, from 1, of the elements in rising order along an axis, of equal ones the first first"))

"""
    sortperm_along(x, dims)

The positions, from 1, of the elements in rising order along an axis, as integers, of equal ones the first first. Constant.
"""
sortperm_along(x::Tensor, dims) = running(ARGSORT, x, axis_along("sortperm", x, dims))
Base.sortperm(x::Tensor; kinds...) = (refuse_keywords("sortperm", kinds); sortperm_along(x, nothing))

# Where the elements of rows are in memory, from their positions in the rows.
function memory_places!(y, index, dims, axis)
    n = dims[axis]
    for place in CartesianIndices(index)
        k = index[place]
        1 <= k <= n || throw(ShapeError("take_along_axis: position $k is out of range for an axis of length $n"))
        at, step = 1, 1
        for d in 1:length(dims)
            here = d == axis ? k : dims[d] == 1 ? 1 : place[d]
            at += (here - 1) * step
            step *= dims[d]
        end
        y[place] = at
    end
end

const MEMORY_PLACES = Op("memory_places", (inputs, attrs) -> (inputs[1].dims, Int64); constant=true, attrs=[:dims, :axis],
    forward=(p, out, inputs, attrs) ->
        emit_arrays!(p, (y, index) -> memory_places!(y, index, attrs.dims, attrs.axis), Memory[out], inputs),
    doc="places in memory of positions along an axis")

"""
    take_along_axis(x, index, dims)

The elements at these positions, from 1, along an axis, one array of positions for each row: what [`sortperm_along`](@ref)
gives. Throws a `ShapeError` for positions that do not fit.
"""
function take_along_axis(x::Tensor, index, dims)
    places, axis = index_tensor(index), axis_along("take_along_axis", x, dims)
    ndims(places) == ndims(x) && all(d -> d == axis || places.dims[d] == x.dims[d], 1:ndims(x)) || throw(ShapeError(
        "take_along_axis: positions of size $(size(places)) do not fit size $(size(x)) along axis $axis"))
    at = apply(MEMORY_PLACES, Tensor[places], attributes(:dims => x.dims, :axis => axis))
    return gather(vec(x), at)
end

"""
    topk(x, k; dims)

The `k` largest elements along an axis (of a vector its only one), falling, and their positions, from 1, which are constant. Of
equal ones the first comes first; NaN counts as the largest. Throws a `ShapeError` where the axis has fewer elements.
"""
function topk(x::Tensor, k::Integer; dims=nothing)
    axis = axis_along("topk", x, dims)
    n = x.dims[axis]
    0 <= k <= n || throw(ShapeError("topk: axis $axis of size $(size(x)) has $n elements, of which $k were asked for"))
    # Rising, then turned round: in what is turned round itself, so that of equal ones the first ends up first.
    rising = sortperm_along(reverse(x; dims=axis), axis)
    largest = selected(reverse(rising; dims=axis), axis, Int(k))
    places = gather(Constant(collect(n:-1:1)), largest)
    return take_along_axis(x, places, axis), places
end

selected(x::Tensor, axis::Int, count::Int) =
    apply(SLICE, Tensor[x], attributes(:index => Index([d == axis ? (1, 1, count) : whole_axis(n) for (d, n) in enumerate(x.dims)])))

function Base.sort(x::Tensor; dims=nothing, rev::Bool=false, kinds...)
    refuse_keywords("sort", kinds)
    axis = axis_along("sort", x, dims)
    sorted = take_along_axis(x, sortperm_along(x, axis), axis)
    return rev ? reverse(sorted; dims=axis) : sorted
end

"""The elements of all of `dims` as the first axis, sorted, and the sizes that `dims` and the others have."""
function sorted_columns(x::Tensor, dims)
    axes_ = normalize_axes(dims, ndims(x))
    others = setdiff(1:ndims(x), axes_)
    n = prod(x.dims[axes_])
    n > 0 || throw(ShapeError("there is no quantile of no elements"))
    columns = reshape_to(permuted(x, [axes_; others]), Int[n, prod(x.dims[others])])
    return sort(columns; dims=1), reduced_dims(x.dims, axes_, !(dims isa Colon))
end

"""
The middle element, or the mean of the two, of all elements or over `dims`; NaN where one is NaN.
"""
Statistics.median(x::Tensor; dims=:, kinds...) = (refuse_keywords("median", kinds); quantile(x, 0.5; dims=dims))

# Shares of a quantile, which a replay looks at, too: they lie between 0 and 1.
function copy_shares!(y, q)
    foreach(check_share, q)
    y .= q
    return nothing
end
check_share(q::Real) = 0 <= q <= 1 || throw(ConfigurationError("quantile: the share must lie between 0 and 1, got $q"))

const SHARES = Op("shares", (inputs, attrs) -> (inputs[1].dims, check_float(inputs[1].eltype)); batch=trailing,
    forward=(p, out, inputs, attrs) -> emit_arrays!(p, copy_shares!, Memory[out], inputs),
    backward=Any[(g, y, inputs, attrs) -> g], jvp=(t, y, inputs, attrs) -> t[1],
    doc="shares of a quantile, which lie between 0 and 1")

"""
The value that the share `q` of the elements does not exceed, over all of them or over `dims`; between two elements by a
straight line, at places that `alpha` and `beta` say as for arrays; NaN where an element is NaN. `q` may be a tensor, and has a
derivative: at an element the one towards larger shares, at the last one towards smaller ones.
"""
Statistics.quantile(x::Tensor, q::Union{Real,Tensor}; dims=:, alpha::Real=1.0, beta::Real=alpha, kinds...) =
    (refuse_keywords("quantile", kinds); check_places(alpha, beta); quantile_of(sorted_columns(x, dims)..., q, alpha, beta))
Statistics.quantile(x::AbstractArray{<:Real}, q::Tensor; kinds...) = quantile(as_tensor(x), q; kinds...)
Statistics.quantile(x::AbstractVector{<:Real}, q::Tensor; kinds...) = quantile(as_tensor(x), q; kinds...)

check_places(alpha::Real, beta::Real) = 0 <= alpha <= 1 && 0 <= beta <= 1 ||
    throw(ConfigurationError("quantile: alpha and beta must be between 0 and 1, got $alpha and $beta"))

"""How far along `n` elements a share lies, from 1 for the first one."""
place_of(q, n::Int, alpha::Real, beta::Real) = alpha == beta == 1 ? ADD(MUL(n - 1, q), 1) : ADD(MUL(q, n + 1 - alpha - beta), alpha)

function quantile_of(sorted::Tensor, left, q::Real, alpha::Real, beta::Real)
    check_share(q)
    n = sorted.dims[1]
    at = clamp(alpha == beta == 1 ? 1 + (n - 1) * q : n * q + alpha + q * (1 - alpha - beta), 1, n)
    low = floor(Int, at)
    value_ = sorted[low, :]
    if low < n && at > low
        next, share_ = sorted[low+1, :], at - low
        width = SUB(next, value_)
        # Between infinite elements, or where the difference is, the mean by weights.
        value_ = choose(ISFINITE(width), ADD(value_, MUL(choose(ISFINITE(width), width, 0), share_)),
            ADD(MUL(value_, 1 - share_), MUL(next, share_)))
    end
    return without_nan(sorted, value_, left)
end

function quantile_of(sorted::Tensor, left, q::Tensor, alpha::Real, beta::Real)
    ndims(q) == 1 && return stack(Tensor[quantile_of(sorted, left, q[k], alpha, beta) for k in 1:length(q)])
    ndims(q) == 0 || throw(ShapeError("quantile: expected a share, or a vector of shares, got size $(size(q))"))
    common_eltype(Tensor[sorted, q])
    n = sorted.dims[1]
    at = clip(place_of(apply(SHARES, Tensor[q], NO_ATTRS), n, alpha, beta), 1, n)
    low = clip(FLOOR(at), 1, max(n - 1, 1))
    first_, second = (gather(sorted, astype(clip(k, 1, n), Int64); dims=1) for k in (low, ADD(low, 1)))
    between, width = SUB(at, low), SUB(second, first_)
    # An element itself, which may be infinite, or the mean by weights: nothing times an infinite width.
    infinite = EQUAL(ISFINITE(width), 0)
    mixes = LOGICAL_AND(infinite, LOGICAL_AND(NOT_EQUAL(between, 0), NOT_EQUAL(between, 1)))
    width = choose(infinite, 0, width)
    near, far = ADD(first_, MUL(width, between)), SUB(second, MUL(width, SUB(1, between)))
    mixed = ADD(MUL(choose(mixes, first_, 0), SUB(1, between)), MUL(choose(mixes, second, 0), between))
    return without_nan(sorted, choose(mixes, mixed, choose(LESS(between, 0.5), near, far)), left)
end

without_nan(sorted::Tensor, value_::Tensor, left) =
    (last_ = sorted[sorted.dims[1], :]; reshape_to(WHERE(ISNAN(last_), last_, value_), left))

function infer_searchsorted(inputs, attrs)
    ndims(inputs[1]) == 1 || throw(ShapeError("expected a sorted vector, got size $(size(inputs[1]))"))
    common_eltype(inputs)
    return inputs[2].dims, Int64
end

const SEARCHSORTED = register!(Op("searchsorted", infer_searchsorted; constant=true, attrs=[:last, :shift],
    forward=(p, out, inputs, attrs) -> emit_arrays!(p, (y, a, v) -> place_all!(y, a, v, attrs.last, attrs.shift), Memory[out], inputs),
    doc="places, from 1, at which elements belong into a sorted vector"))
function place_all!(y, a, v, last_, shift)
    for k in eachindex(y, v)
        y[k] = (last_ ? searchsortedlast(a, v[k]; lt=before) + 1 : searchsortedfirst(a, v[k]; lt=before)) + shift
    end
end

"""
The places, from 1, at which the elements of `v` belong into the sorted vector `a`, before its equals;
`searchsortedlast` gives the last element that is not above each. Constant.
"""
Base.searchsortedfirst(a::Tensor, v::Union{Tensor,Real,AbstractArray}) = searchsorted_places(a, v, false)
Base.searchsortedlast(a::Tensor, v::Union{Tensor,Real,AbstractArray}) = searchsorted_places(a, v, true, -1)
searchsorted_places(a, v, last_, shift=0) = apply(SEARCHSORTED, as_tensors((a, v)), attributes(:last => last_, :shift => shift))
