# Normalisation: arrays with mean 0 and variance 1 over some of their axes.
#
# The deviation is a separate op, as the logsumexp of a cross-entropy is, so that the gradient needs nothing computed
# again: with r the reciprocal deviation and y the result, it is r (g - mean(g) - y mean(g y)).

count_of(dims::Vector{Int}, axes::Vector{Int}) = max(prod(dims[axes]), 1)

"""Append x less its mean over axes; return memory of one number, the count of these elements."""
function emit_centred!(p::Instructions, out::Memory, x::Memory, axes::Vector{Int})
    centre, count = column_scratch!(p, x, axes), scratch!(p, x.eltype, Int[])
    emit_fill!(p, count, count_of(x.dims, axes))
    emit_reduction!(p, :sum, 0, centre, x, axes)
    emit_elementwise!(p, :div, centre, Memory[centre, count])  # times its reciprocal equal numbers have another mean
    emit_elementwise!(p, :sub, out, Memory[x, centre])
    return count
end

function forward_reciprocal_std(p, out, inputs, attrs)
    x, = inputs
    deviations, eps = scratch!(p, x.eltype, x.dims), scratch!(p, x.eltype, Int[])
    count = emit_centred!(p, deviations, x, attrs.axes)
    emit_elementwise!(p, :square, deviations, Memory[deviations])
    emit_reduction!(p, :sum, 0, out, deviations, attrs.axes)
    emit_fill!(p, eps, attrs.eps)
    for (name, more) in ((:div, Memory[count]), (:add, Memory[eps]), (:sqrt, Memory[]), (:reciprocal, Memory[]))
        emit_elementwise!(p, name, out, Memory[out; more])
    end
    return nothing
end

function forward_standardize(p, out, inputs, attrs)
    emit_centred!(p, out, inputs[1], attrs.axes)
    return emit_elementwise!(p, :mul, out, Memory[out, inputs[2]])
end

mean_kept(x::Tensor, axes::Vector{Int}) = MUL(whole_sum(x, axes), 1 / count_of(x.dims, axes))
standardize_pull(g, y, r, axes) = r .* (g .- mean_kept(g, axes) .- y .* mean_kept(g .* y, axes))
deviation_slope(r, x, axes) =
    MUL(SQUARE(r), -1 / count_of(x.dims, axes)) .* apply(STANDARDIZE, Tensor[x, r], attributes(:axes => axes))

const RECIPROCAL_STD = register!(Op("reciprocal_std",
    (inputs, attrs) -> (kept_dims(inputs[1].dims, attrs.axes), check_float(inputs[1].eltype)); sparsity=over_axes, forward=forward_reciprocal_std,
    backward=Any[(g, r, inputs, attrs) -> g .* deviation_slope(r, inputs[1], attrs.axes)],
    jvp=(t, r, inputs, attrs) -> whole_sum(t[1] .* deviation_slope(r, inputs[1], attrs.axes), attrs.axes),
    attrs=[:axes, :eps], doc="1 / √(variance + eps) over axes"))
# The rule for x contains the deviation's.
const STANDARDIZE = register!(Op("standardize", (inputs, attrs) -> (inputs[1].dims, inputs[1].eltype); sparsity=along_axes, forward=forward_standardize,
    backward=Any[(g, y, inputs, attrs) -> standardize_pull(g, y, inputs[2], attrs.axes), no_gradient],
    jvp=(t, y, inputs, attrs) -> t[1] === nothing ? zeros_like(y) : standardize_pull(t[1], y, inputs[2], attrs.axes),
    attrs=[:axes], doc="(x - mean) times the reciprocal deviation of x over axes"))

"""
    standardize(x; dims=1, eps=1e-5)

Mean 0 and variance 1 over `dims`: (x - mean) / √(variance + eps), with the biased variance.
"""
function standardize(@nospecialize(x); dims=1, eps::Real=1e-5)
    t = as_tensor(x)
    axes = normalize_axes(dims, ndims(t))
    r = apply(RECIPROCAL_STD, Tensor[t], attributes(:axes => axes, :eps => Float64(eps)))
    return apply(STANDARDIZE, Tensor[t, r], attributes(:axes => axes))
end

function scaled_and_shifted(y::Tensor, @nospecialize(weight), @nospecialize(bias), lengths::Vector{Int}, place::Vector{Int}, name::String)
    for (what, value, op) in (("weight", weight, MUL), ("bias", bias, ADD))
        value === nothing && continue
        given = as_tensor(value, y.eltype)
        given.dims == lengths ||
            throw(ShapeError("$name: expected a $what of size $(Tuple(lengths)), got $(size(given))"))
        y = op(y, reshape_to(given, place))
    end
    return y
end

"""
    layer_norm(x, weight=nothing, bias=nothing; dims=1, eps=1e-5)

[`standardize`](@ref) the first axes of `x`, then scale by `weight` and shift by `bias`, which have the size of these axes
(Ba et al. 2016). Throws a `ShapeError` where the axes are not the first ones, or a size does not fit.
"""
function layer_norm(@nospecialize(x), weight=nothing, bias=nothing; dims=1, eps::Real=1e-5)
    t = as_tensor(x)
    axes = normalize_axes(dims, ndims(t))
    axes == 1:length(axes) || throw(ShapeError("layer_norm: expected the first axes, got $dims; standardize takes any"))
    lengths = t.dims[axes]
    return scaled_and_shifted(standardize(t; dims=axes, eps=eps), weight, bias, lengths, lengths, "layer_norm")
end

"""
    batch_norm(x, weight=nothing, bias=nothing, mean=nothing, variance=nothing; eps=1e-5)

Each channel of `x` (..., C, N) with mean 0 and variance 1, then scaled and shifted (Ioffe and Szegedy 2015). All but `x` are
of length C. Without `mean` and `variance` they are the batch's, over all axes but the last but one. Throws a `ShapeError` where
a size does not fit, or only one of the two is given.
"""
function batch_norm(@nospecialize(x), weight=nothing, bias=nothing, mean=nothing, variance=nothing; eps::Real=1e-5)
    t = as_tensor(x)
    n = ndims(t)
    n >= 2 || throw(ShapeError("batch_norm: expected x (..., C, N), got size $(size(t))"))
    (mean === nothing) == (variance === nothing) || throw(ShapeError("batch_norm: mean and variance are given together"))
    lengths = t.dims[n-1:n-1]
    place = Int[ones(Int, n - 2); lengths]
    if mean === nothing
        y = standardize(t; dims=Int[1:n-2; n], eps=eps)
    else
        centre, spread_ = as_tensor(mean, t.eltype), as_tensor(variance, t.eltype)
        for (what, given) in (("mean", centre), ("variance", spread_))
            given.dims == lengths ||
                throw(ShapeError("batch_norm: expected a $what of size $(Tuple(lengths)), got $(size(given))"))
        end
        factor = scaled_and_shifted(DIV(1, SQRT(ADD(spread_, eps))), weight, nothing, lengths, lengths, "batch_norm")
        y = (t .- reshape_to(centre, place)) .* reshape_to(factor, place)
        weight = nothing
    end
    return scaled_and_shifted(y, weight, bias, lengths, place, "batch_norm")
end

"""
    group_norm(x, groups, weight=nothing, bias=nothing; eps=1e-5)

[`standardize`](@ref) each group of channels of each sample of `x` (..., C, N), then scale and shift (Wu and He 2018). With one
group it is layer normalisation of all but the batch, with C of them instance normalisation. Throws a `ShapeError` where the
channels cannot be divided so, or a size does not fit.
"""
function group_norm(@nospecialize(x), groups::Integer, weight=nothing, bias=nothing; eps::Real=1e-5)
    t = as_tensor(x)
    n = ndims(t)
    n >= 2 && groups >= 1 && t.dims[n-1] % groups == 0 ||
        throw(ShapeError("group_norm: the channels of size $(size(t)) cannot be divided into $groups groups"))
    rows = reshape_to(t, Int[prod(t.dims[1:n-1])÷groups, groups, t.dims[n]])
    place = Int[ones(Int, n - 2); t.dims[n-1]]
    return scaled_and_shifted(reshape_to(standardize(rows; eps=eps), t.dims), weight, bias, t.dims[n-1:n-1], place, "group_norm")
end

FUNCTIONS["standardize"], FUNCTIONS["layer_norm"] = standardize, layer_norm
FUNCTIONS["batch_norm"], FUNCTIONS["group_norm"] = batch_norm, group_norm
export standardize, layer_norm, batch_norm, group_norm
