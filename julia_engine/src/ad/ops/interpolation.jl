# Images and sequences in another size: x (lengths..., C, N), axis by axis.

"""
    interpolate(x, size; mode=:nearest, align_corners=false)

`x` (lengths..., C, N) with spatial axes of the lengths `size`, one number or one for each. With mode `:nearest` an element is
the one whose part of the axis it lies in; with `:linear` it lies between the two that are nearest: (1 - w) a + w b with the
interpolation weight w. An infinite b gives NaN where w is 0, as in PyTorch. With `align_corners` the first and last
elements stay where they are; else elements are the centres of pieces of equal length, and the outermost ones continue beyond. Throws a `ShapeError` where there is no spatial axis, or an empty one.
"""
function interpolate(@nospecialize(x), @nospecialize(size); mode::Symbol=:nearest, align_corners::Bool=false)
    t = as_tensor(x)
    check_float(t.eltype)
    n = ndims(t) - 2
    mode in (:nearest, :linear) ||
        throw(ConfigurationError("interpolate: mode must be :nearest or :linear, got $(repr(mode))"))
    mode === :nearest && align_corners && throw(ConfigurationError("interpolate: align_corners is for mode :linear"))
    n >= 1 && !any(==(0), t.dims[1:n]) || throw(ShapeError(
        "interpolate: expected x (lengths..., C, N) with elements on each axis, got size $(Base.size(t))"))
    for (axis, new) in enumerate(each_axis("interpolate: size", size, n, 1))
        old = t.dims[axis]
        new == old && continue
        if mode === :nearest
            t = gather(t, Int[i * old ÷ new + 1 for i in 0:new-1]; dims=axis)
            continue
        end
        first_, second, share = neighbours(old, new, align_corners)
        before, behind = gather(t, first_; dims=axis), gather(t, second; dims=axis)
        along(weights) = reshape(convert(Vector{t.eltype}, weights), ntuple(d -> d == axis ? new : 1, axis))
        t = before .* along(1 .- share) .+ behind .* along(share)  # no difference of elements, which overflows or is Inf - Inf
    end
    return t
end

"""
For each new element the old ones before and behind it, and the interpolation weight of the latter. Behind the last element is
that element again, with any weight, as in PyTorch: 0 times infinity would be NaN.
"""
function neighbours(old::Int, new::Int, align_corners::Bool)
    places = align_corners ? Float64[i * ((old - 1) / max(new - 1, 1)) for i in 0:new-1] :
        Float64[max((i + 0.5) * (old / new) - 0.5, 0) for i in 0:new-1]
    first_ = Int[min(floor(Int, place), old - 1) for place in places]
    return first_ .+ 1, min.(first_ .+ 1, old - 1) .+ 1, places .- first_
end

FUNCTIONS["interpolate"] = interpolate
export interpolate
