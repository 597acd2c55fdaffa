# Reductions: sums, extrema and their stable exponential kin, over any axes.
#
# Julia's convention: with `dims` the reduced axes stay, with length one; without, the result is a number.

"""The axes as a sorted list; `:` means all."""
function normalize_axes(dims, n::Int)
    dims isa Colon && return collect(1:n)
    axes = sort!(axis_list(dims))
    all(d -> 1 <= d <= n, axes) && allunique(axes) ||
        throw(ShapeError("axes $dims do not fit an array of $n dimensions"))
    return axes
end

"""The dimensions with the reduced axes kept at length one."""
kept_dims(dims::Vector{Int}, axes::Vector{Int}) = Int[d in axes ? 1 : dims[d] for d in eachindex(dims)]

reduced_dims(dims, axes, keep) = keep ? kept_dims(dims, axes) : Int[dims[d] for d in eachindex(dims) if !(d in axes)]

infer_reduction(inputs, attrs) =
    (reduced_dims(inputs[1].dims, attrs.axes, attrs.keep), check_float(inputs[1].eltype))

function infer_extremum(inputs, attrs)
    any(d -> inputs[1].dims[d] == 0, attrs.axes) &&
        throw(ShapeError("no largest or smallest element along an empty axis of size $(size(inputs[1]))"))
    return infer_reduction(inputs, attrs)
end

"""The memory of a reduction's result in the dimensions that keep the reduced axes."""
kept_view(out::Memory, dims::Vector{Int}) =
    Memory(out.root, out.address, out.eltype, dims, reshaped_strides(out.dims, out.strides, dims))

"""A reduction's result in a shape that broadcasts against its input `x`."""
spread(reduced::Tensor, x::Tensor, axes::Vector{Int}) = reshape_to(reduced, kept_dims(x.dims, axes))

"""Apply a reduction with Julia's `dims` convention."""
function reduced(op::Op, x::Tensor, dims)
    axes = normalize_axes(dims, ndims(x))
    return apply(op, Tensor[x], attributes(:axes => axes, :keep => !(dims isa Colon)))
end

"""Append a reduction: the neutral element, then the elements, added up or compared with it."""
function emit_reduction!(p::Instructions, name::Symbol, neutral::Real, out::Memory, x::Memory, axes::Vector{Int})
    whole = kept_view(out, kept_dims(x.dims, axes))
    emit_fill!(p, out, neutral)
    dims, strides = x.dims, Vector{Int}[spread_strides(whole, x.dims), x.strides]
    if !is_dense(x) && length(x) > 0
        # In the order of memory, if its rows are for one element of the result, and long unless the whole result is that one.
        order = sortperm(Int[n == 1 || s == 0 ? typemax(Int) : abs(s) for (n, s) in zip(dims, x.strides)])
        sorted = dims[order], Vector{Int}[s[order] for s in strides]
        n, s = coalesced(sorted...)
        s[1][1] == 0 && (length(out) == 1 || n[1] >= LONG_ROW) && ((dims, strides) = sorted)
    end
    name === :sum && x.eltype === Float32 && length(x) > LONG_SUM && return emit_sum!(p, out, x, dims, strides)
    return emit_loops!(p, x.eltype, name, dims, Memory[out, x], strides)
end

const LONG_SUM = 2048  # elements; longer sums in Float32 are added up in parts
const PART = 512

"""
Append the addition of the elements of `x` to those of `out`, where strides of 0 lead. Rows are added in Float64, and other sums
in parts where they are long, so that rounding errors do not grow with the length.
"""
function emit_sum!(p::Instructions, out::Memory, x::Memory, dims::Vector{Int}, strides::Vector{Vector{Int}})
    any(==(0), dims) && return nothing
    n, (to, from) = coalesced(dims, strides)
    first_kept = findfirst(!=(0), to)
    axes = first_kept === nothing ? Int[] : Int[d for d in first_kept+1:length(n) if to[d] == 0]
    prod(n[axes]) > LONG_SUM || return emit_loops!(p, x.eltype, :sum, dims, Memory[out, x], strides)
    axis = maximum(n[axes]) > PART ? axes[argmax(n[axes])] : axes[end]
    length_ = n[axis] > PART ? PART : 1
    whole, rest = divrem(n[axis], length_)
    kept = Int[d for d in eachindex(n) if to[d] != 0]
    parts_dims = [n[kept]; whole + (rest > 0)]
    parts = scratch!(p, x.eltype, parts_dims)
    emit_fill!(p, parts, 0)
    to_parts = zeros(Int, length(n))
    to_parts[kept] = parts.strides[1:end-1]
    of_part(count) = (found = copy(n); found[axis] = count; found)
    emit_sum!(p, parts, x, [of_part(length_); whole], Vector{Int}[[to_parts; parts.strides[end]],
        [from; length_ * from[axis]]])
    rest == 0 || emit_sum!(p, further(parts, whole * parts.strides[end]), further(x, whole * length_ * from[axis]), of_part(rest),
        Vector{Int}[to_parts, from])
    return emit_sum!(p, out, parts, parts_dims, Vector{Int}[[to[kept]; 0], parts.strides])
end

"""The memory that begins `elements` elements after another one."""
further(m::Memory, elements::Int) = Memory(m.root, m.address + sizeof(m.eltype) * elements, m.eltype, m.dims, m.strides)

const LONG_ROW = 32  # elements; shorter rows are added to the result faster element by element

# Sums -----------------------------------------------------------------------------------------------------------------

const SUM = register!(Op("sum", infer_reduction; batch=trailing, sparsity=over_axes,
    forward=(p, out, inputs, attrs) -> emit_reduction!(p, :sum, 0, out, inputs[1], attrs.axes),
    backward=Any[(g, y, inputs, attrs) -> spread_to(spread(g, inputs[1], attrs.axes), inputs[1].dims)],
    jvp=linear_jvp("sum"), attrs=[:axes, :keep], scalar=:identity, doc="sum over axes"))

# Julia's functions of an array, or of another function and an array; keywords beyond `dims` are refused by name.
for (f, op, advice) in ((:sum, :SUM, "add the starting value to the sum"),
        (:prod, :PROD, "multiply the product by the starting value"),
        (:maximum, :MAX, "take max of the result and the starting value"),
        (:minimum, :MIN, "take min of the result and the starting value"), (:any, :ANY, ""), (:all, :ALL, ""))
    @eval Base.$f(x::Tensor; dims=:, init=nothing) =
        init === nothing ? reduced($op, x, dims) : refuse_keywords($(string(f)), (init=init,), $advice)
    @eval Base.$f(f::Function, x::Tensor; dims=:, init=nothing) = $f(as_tensor(dotted(f, (x,))); dims=dims, init=init)
end
Base.extrema(x::Tensor; dims=:) = dims isa Colon ? (minimum(x), maximum(x)) :
    throw(ConfigurationError("extrema: on tensors the keyword dims is not supported; take minimum and maximum"))
Base.count(x::Tensor; dims=:) = sum(NOT_EQUAL(x, 0); dims=dims)
Base.count(f::Function, x::Tensor; dims=:) = count(as_tensor(dotted(f, (x,))); dims=dims)

count_over(x::Tensor, dims) = prod(x.dims[normalize_axes(dims, ndims(x))])
whole_sum(x::Tensor, axes::Vector{Int}) = apply(SUM, Tensor[x], attributes(:axes => axes, :keep => true))

"""The mean of no elements is NaN."""
function Statistics.mean(x::Tensor; dims=:, kinds...)
    refuse_keywords("mean", kinds)
    n = count_over(x, dims)
    return n > 0 ? sum(x; dims=dims) ./ n : sum(x; dims=dims) .* NaN  # times 1 / n equal numbers have another mean
end
Statistics.mean(f::Function, x::Tensor; dims=:) = mean(dotted(f, (x,)); dims=dims)

centred(x::Tensor, axes::Vector{Int}) = x .- whole_sum(x, axes) ./ max(prod(x.dims[axes]), 1)

"""Squared deviations from the mean, summed and divided by n - 1 (`corrected`, Julia's default) or n."""
function Statistics.var(x::Tensor; dims=:, corrected::Bool=true, kinds...)
    refuse_keywords("var", kinds, "centre the array first")
    n = count_over(x, dims) - corrected
    return sum(SQUARE(centred(x, normalize_axes(dims, ndims(x)))); dims=dims) .* (n > 0 ? 1 / n : NaN)
end

"""The root of the variance; subgradient 0 where all elements are equal."""
function Statistics.std(x::Tensor; dims=:, corrected::Bool=true, kinds...)
    refuse_keywords("std", kinds, "centre the array first")
    n = count_over(x, dims) - corrected
    return norm(centred(x, normalize_axes(dims, ndims(x))); dims=dims) .* (n > 0 ? 1 / sqrt(n) : NaN)
end

# Reductions that need each column twice: loops 1 and 2 of an instruction run over the reduced axes, 3 and 4 over the
# others. Where the layout needs more, the input is copied with the reduced axes first.

"""
Append an instruction that runs over columns: `out` and `a` are seen whole, `b` holds one element per column.
"""
function emit_columns!(p::Instructions, name::Symbol, axes::Vector{Int}, out::Union{Nothing,Memory}, a::Memory,
        b::Union{Nothing,Memory})
    others = setdiff(1:length(a.dims), axes)
    whole = out === nothing ? Memory[a] : Memory[out, a]
    all_of_them = b === nothing ? whole : Memory[whole; b]
    length(a) == 0 && b === nothing && return nothing
    any(==(0), a.dims[others]) && return nothing
    n, s = coalesced(a.dims[axes], Vector{Int}[m.strides[axes] for m in whole])
    n_kept, s_kept = coalesced(a.dims[others], Vector{Int}[m.strides[others] for m in all_of_them])
    length(n) <= 2 && length(n_kept) <= 2 || return emit_straightened!(p, name, axes, others, out, a, b)
    strides(k) = (loop(s[k], 0)[1:2]..., loop(s_kept[k], 0)[1:2]...)
    per_column = b === nothing ? NONE : (0, 0, loop(s_kept[end], 0)[1:2]...)
    address = (out === nothing ? NOWHERE : out.address, a.address, b === nothing ? NOWHERE : b.address, NOWHERE)
    return emit!(p, a.eltype, name, address, NOWHERE, (loop(n, 1)[1:2]..., loop(n_kept, 1)[1:2]...),
        (out === nothing ? NONE : strides(1), strides(length(whole)), per_column, NONE))
end

"""The same on copies whose reduced axes come first, without gaps."""
function emit_straightened!(p, name, axes, others, out, a, b)
    order = [axes; others]
    seen(m) = Memory(m.root, m.address, m.eltype, m.dims[order], m.strides[order])
    dense(m) = scratch!(p, m.eltype, m.dims[order])
    a2 = dense(a)
    out2 = out === nothing ? nothing : same_place(out, a) ? a2 : dense(out)
    b2 = b === nothing ? nothing : dense(b)
    emit_copy!(p, a2, seen(a))
    out === nothing || same_place(out, a) || emit_copy!(p, out2, seen(out))
    b === nothing || emit_copy!(p, b2, seen(b))
    emit_columns!(p, name, collect(1:length(axes)), out2, a2, b2)
    out === nothing || emit_copy!(p, seen(out), out2)
    b === nothing || emit_copy!(p, seen(b), b2)
    return nothing
end

"""Memory of one element per column."""
column_scratch!(p::Instructions, x::Memory, axes::Vector{Int}) = scratch!(p, x.eltype, kept_dims(x.dims, axes))

function forward_norm(p, out, inputs, attrs)
    x, = inputs
    length(x) == 0 && return emit_fill!(p, out, 0)
    return emit_columns!(p, :norm, attrs.axes, nothing, x, kept_view(out, kept_dims(x.dims, attrs.axes)))
end

# At the origin the subgradient is 0, and so is what is differentiated once more.
direction(y, x, axes) = share_of(x, spread(y, x, axes))

const NORM = register!(Op("norm", infer_reduction; batch=trailing, sparsity=over_axes, forward=forward_norm,
    backward=Any[(g, y, inputs, attrs) -> spread(g, inputs[1], attrs.axes) .* direction(y, inputs[1], attrs.axes)],
    jvp=(t, y, inputs, attrs) -> apply(SUM, Tensor[t[1] .* direction(y, inputs[1], attrs.axes)], attrs),
    attrs=[:axes, :keep], doc="Euclidean norm over axes; subgradient 0 at the origin"))

"""Euclidean norm of all elements, or over `dims`."""
LinearAlgebra.norm(x::Tensor; dims=:) = reduced(NORM, x, dims)
LinearAlgebra.norm(x::Tensor, p::Real; dims=:) =
    p == 2 ? norm(x; dims=dims) : p == 1 ? sum(abs.(x); dims=dims) : norm_of_order(x, p, dims)

# Extrema --------------------------------------------------------------------------------------------------------------

"""Where the largest elements are, and how many. Ties share the gradient equally, so that it sums to one."""
function winners(y, x, axes)
    won = apply(EQUAL_MASK, Tensor[x, spread(y, x, axes)])
    return won, whole_sum(won, axes)
end
to_winners(g, y, x, axes) = ((won, n) = winners(y, x, axes); where_holds(won, apply(DIV, Tensor[g, n])))

extremum(name, neutral, doc) = register!(Op(name, infer_extremum; batch=trailing, sparsity=over_axes,
    forward=(p, out, inputs, attrs) -> emit_reduction!(p, Symbol(name), neutral, out, inputs[1], attrs.axes),
    backward=Any[(g, y, inputs, attrs) -> to_winners(spread(g, inputs[1], attrs.axes), y, inputs[1], attrs.axes)],
    jvp=(t, y, inputs, attrs) -> apply(SUM, Tensor[to_winners(t[1], y, inputs[1], attrs.axes)], attrs),
    attrs=[:axes, :keep], scalar=:identity, doc=doc))

const MAX = extremum("max", -Inf, "largest element over axes; ties share the gradient")
const MIN = extremum("min", Inf, "smallest element over axes; ties share the gradient")

# Products -------------------------------------------------------------------------------------------------------------

"""For each element the product of the others over axes: no division, so that any of them may be 0."""
function products_of_others(x::Tensor, axes::Vector{Int})
    order = [axes; setdiff(1:ndims(x), axes)]
    moved_ = permuted(x, order)
    n = prod(x.dims[axes])
    found = without_each(reshape_to(moved_, Int[n, n == 0 ? 0 : length(x) ÷ n]))
    return permuted(reshape_to(found, moved_.dims), invperm(order))
end

function without_each(columns::Tensor)
    n, m = columns.dims
    if n <= 1  # ones, which read the elements, as longer columns do
        one_ = literal(columns.eltype, 1)
        return WHERE(EQUAL(columns, columns), one_, one_)
    end
    # Pair by pair: without the one of a pair, there remain the other and what remains without the pair.
    half = n ÷ 2
    left, right, odd = columns[1:half, :], columns[half+1:2half, :], columns[2half+1:n, :]
    without = without_each(concatenate(Tensor[MUL(left, right), odd], 1))
    return concatenate(Tensor[MUL(without[1:half, :], right), MUL(without[1:half, :], left), without[half+1:n-half, :]], 1)
end

const PROD = register!(Op("prod", infer_reduction; batch=trailing, sparsity=over_axes,
    forward=(p, out, inputs, attrs) -> emit_reduction!(p, :prod, 1, out, inputs[1], attrs.axes),
    backward=Any[(g, y, inputs, attrs) -> MUL(spread(g, inputs[1], attrs.axes), products_of_others(inputs[1], attrs.axes))],
    jvp=(t, y, inputs, attrs) -> apply(SUM, Tensor[MUL(t[1], products_of_others(inputs[1], attrs.axes))], attrs),
    attrs=[:axes, :keep], scalar=:identity, doc="product over axes"))

# Truth values and positions: constant on purpose --------------------------------------------------------------------------

quantifier(name, neutral, doc) = register!(Op(name, infer_reduction; batch=trailing, constant=true, attrs=[:axes, :keep], doc=doc,
    forward=(p, out, inputs, attrs) -> emit_reduction!(p, Symbol(name), neutral, out, inputs[1], attrs.axes)))
const ANY = quantifier("any", 0, "whether any element over axes is not 0")
const ALL = quantifier("all", 1, "whether all elements over axes are not 0")

position_of(name, doc) = register!(Op(name, (inputs, attrs) -> (infer_extremum(inputs, attrs)[1], Int64); batch=trailing, constant=true,
    attrs=[:axes, :keep], doc=doc, forward=(p, out, inputs, attrs) -> emit_columns!(p, Symbol(name), attrs.axes, nothing,
        inputs[1], kept_view(out, kept_dims(inputs[1].dims, attrs.axes)))))
const ARGMAX = position_of("argmax", "position, from 1, of the largest element over axes; the first of equal ones")
const ARGMIN = position_of("argmin", "position, from 1, of the smallest element over axes; the first of equal ones")

"""
    argmax_along(x, dims)

The position, from 1, of the largest element along an axis, or in the order of memory along several (`:`, all), as integers;
the first of equal ones. As in Base, -0.0 is less than 0.0, and NaN the largest and the smallest. The reduced axes stay,
with length one, but with `:`. `argmax` itself gives a `CartesianIndex` for arrays other than vectors, which no tensor holds.
"""
argmax_along(x::Tensor, dims) = reduced(ARGMAX, x, dims)

"""
    argmin_along(x, dims)

The same for the smallest element; see [`argmax_along`](@ref).
"""
argmin_along(x::Tensor, dims) = reduced(ARGMIN, x, dims)

for (f, along) in ((:argmax, :argmax_along), (:argmin, :argmin_along))
    @eval Base.$f(x::Tensor; dims=:) = ndims(x) == 1 ? $along(x, dims) : throw(ShapeError(
        $("$f: for an array that is no vector Julia gives a CartesianIndex, which no tensor holds; use $along(x, dims) for " *
        "positions along axes, or $f(vec(x))")))
end

# Exponential kin ------------------------------------------------------------------------------------------------------

"""A row of -Inf has logsumexp -Inf; shifting by 0 instead gives it the gradient 0 rather than NaN."""
finite(y) = choose(EQUAL(y, -Inf), 0, y)

function forward_logsumexp(p, out, inputs, attrs)
    x, = inputs
    powers = scratch!(p, x.eltype, x.dims)
    total = kept_view(out, kept_dims(x.dims, attrs.axes))
    emit_columns!(p, :shift, attrs.axes, powers, x, total)
    emit_elementwise!(p, :exp, powers, Memory[powers])
    return emit_columns!(p, :add_log_sum, attrs.axes, nothing, powers, total)
end

probabilities(y, x, axes) = EXP(x .- finite(spread(y, x, axes)))

const LOGSUMEXP = register!(Op("logsumexp", infer_extremum; batch=trailing, sparsity=over_axes, forward=forward_logsumexp,
    backward=Any[(g, y, inputs, attrs) -> spread(g, inputs[1], attrs.axes) .* probabilities(y, inputs[1], attrs.axes)],
    jvp=(t, y, inputs, attrs) -> apply(SUM, Tensor[t[1] .* probabilities(y, inputs[1], attrs.axes)], attrs),
    attrs=[:axes, :keep], doc="log of the sum of exponentials over axes, without overflow"))

"""
    logsumexp(x; dims=:)

log(sum(exp.(x))) without overflow.
"""
logsumexp(x::Tensor; dims=:) = reduced(LOGSUMEXP, x, dims)

infer_softmax(inputs, attrs) = (inputs[1].dims, infer_extremum(inputs, attributes(:axes => attrs.axes, :keep => true))[2])

function forward_softmax(p, out, inputs, attrs)
    x, = inputs
    emit_columns!(p, :shift, attrs.axes, out, x, column_scratch!(p, x, attrs.axes))
    emit_elementwise!(p, :exp, out, Memory[out])
    return emit_columns!(p, :normalise, attrs.axes, out, out, nothing)
end

function forward_log_softmax(p, out, inputs, attrs)
    x, = inputs
    powers = scratch!(p, x.eltype, x.dims)
    emit_columns!(p, :shift, attrs.axes, out, x, column_scratch!(p, x, attrs.axes))
    emit_elementwise!(p, :exp, powers, Memory[out])
    return emit_columns!(p, :subtract_log_sum, attrs.axes, out, powers, nothing)
end

softmax_pull(g, y, axes) = y .* (g .- whole_sum(g .* y, axes))

const SOFTMAX = register!(Op("softmax", infer_softmax; batch=trailing, sparsity=along_axes, forward=forward_softmax, overwrites=[1],
    backward=Any[(g, y, inputs, attrs) -> softmax_pull(g, y, attrs.axes)],
    jvp=(t, y, inputs, attrs) -> softmax_pull(t[1], y, attrs.axes), attrs=[:axes],
    doc="exponentials that sum to one over axes, without overflow"))
const LOG_SOFTMAX = register!(Op("log_softmax", infer_softmax; batch=trailing, sparsity=along_axes, forward=forward_log_softmax, overwrites=[1],
    backward=Any[(g, y, inputs, attrs) -> g .- EXP(y) .* whole_sum(g, attrs.axes)],
    jvp=(t, y, inputs, attrs) -> t[1] .- whole_sum(EXP(y) .* t[1], attrs.axes), attrs=[:axes],
    doc="logarithm of softmax, without overflow"))

"""
    softmax(x; dims=1)

Exponentials that sum to one over `dims`: over the first axis, where features lie, unless told otherwise.
"""
softmax(x::Tensor; dims=1) = apply(SOFTMAX, Tensor[x], attributes(:axes => normalize_axes(dims, ndims(x))))

"""
    log_softmax(x; dims=1)

Logarithm of [`softmax`](@ref).
"""
log_softmax(x::Tensor; dims=1) = apply(LOG_SOFTMAX, Tensor[x], attributes(:axes => normalize_axes(dims, ndims(x))))
"""The name that NNlib and Flux have for [`log_softmax`](@ref)."""
const logsoftmax = log_softmax
for f in (:softmax, :log_softmax)
    @eval $f(x::AbstractArray; dims=1) = value($f(Constant(x); dims=dims))
end
logsumexp(x::AbstractArray; dims=:) = (y = value(logsumexp(Constant(x); dims=dims)); dims isa Colon ? y[] : y)
