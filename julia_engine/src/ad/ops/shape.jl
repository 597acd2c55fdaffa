# Changes of shape. All but `assemble` and `copy` are views: they cost nothing when replayed.
#
# Arrays are column-major, as everywhere in Julia: a reshape keeps the order in which the first axis runs fastest.

"""One axis, or several, as a list."""
axis_list(d::Integer) = Int[d]
axis_list(dims::Union{Tuple{Vararg{Integer}},AbstractArray{<:Integer},Base.Generator}) = collect(Int, dims)
one_axis(::String, axis::Integer) = Int(axis)
one_axis(::String, ::Val{D}) where {D} = Int(D)
one_axis(name::String, @nospecialize(axis)) =
    throw(ShapeError("$name: on tensors an axis is one number of an integer type, got $(repr(axis))"))
axis_list(@nospecialize(dims)) = isempty(dims) ? Int[] :
    throw(ShapeError("axes and lengths must be whole numbers of an integer type, got $(repr(dims))"))

# Reshape and permute --------------------------------------------------------------------------------------------------

"""The dimensions with a -1 replaced by what is left over for it."""
function filled_dims(x::Tensor, dims::Vector{Int})
    known = 1
    for n in dims
        n == -1 || (known *= n)
    end
    if count(==(-1), dims) == 1 && known != 0 && length(x) % known == 0
        dims = Int[n == -1 ? length(x) ÷ known : n for n in dims]
    end
    if any(<(0), dims) || prod(dims) != length(x)
        throw(ShapeError("an array of size $(size(x)) ($(length(x)) elements) cannot be reshaped to $(Tuple(dims))"))
    end
    return dims
end

"""Strides that show the elements of an array in other dimensions without moving them, or `nothing`."""
function reshaped_strides(dims::Vector{Int}, strides::Vector{Int}, new::Vector{Int})
    prod(dims) == 0 && return dense_strides(new)
    n, s = coalesced(dims, Vector{Int}[strides])
    s = s[1]
    result = ones(Int, length(new))
    k, left = 1, isempty(n) ? 1 : n[1]  # the segment that is being divided up, and what is left of it
    step = isempty(s) ? 1 : s[1]
    for d in eachindex(new)
        if new[d] == 1
            result[d] = step
            continue
        end
        if left == 1
            k += 1
            k <= length(n) || return nothing
            left, step = n[k], s[k]
        end
        left % new[d] == 0 || return nothing
        result[d] = step
        step *= new[d]
        left ÷= new[d]
    end
    return result
end

function view_reshape(m::Memory, attrs::Attributes)
    strides = reshaped_strides(m.dims, m.strides, attrs.dims)
    return strides === nothing ? nothing : Memory(m.root, m.address, m.eltype, attrs.dims, strides)
end

const RESHAPE = register!(Op("reshape", (inputs, attrs) -> (filled_dims(inputs[1], attrs.dims), inputs[1].eltype);
    view=view_reshape, backward=Any[(g, y, inputs, attrs) -> reshape_to(g, inputs[1].dims)],
    jvp=linear_jvp("reshape"), attrs=[:dims],
    batch=(op, count, mapped, inputs, attrs) -> apply(op, inputs, attributes(:dims => Int[filled_dims(symbol(inputs[1].eltype,
        inputs[1].dims[1:end-1]), attrs.dims); count])), simplify=(e, made) -> shorter_reshape(e, made), scalar=:identity,
    doc="the same elements, in order, in another shape"))

function reshape_to(x::Tensor, dims::Vector{Int})
    try
        dims = filled_dims(x, dims)
    catch error
        error isa ShapeError ? throw(ShapeError("reshape: $(error.message)")) : rethrow()
    end
    return dims == x.dims && !x.row ? x : apply(RESHAPE, Tensor[x], attributes(:dims => dims))
end

to_length(n::Integer) = n >= 0 ? Int(n) : throw(ShapeError("reshape: lengths are not negative, got $n; write : for what is left over"))
to_length(::Colon) = -1
to_length(@nospecialize(n)) = throw(ShapeError("reshape: lengths must be integers or a colon, got $(repr(n))"))
Base.reshape(x::Tensor, dims::Tuple{Vararg{Union{Integer,Colon}}}) = reshape_to(x, Int[to_length(n) for n in dims])
Base.reshape(x::Tensor, dims::Union{Integer,Colon}...) = reshape(x, dims)
Base.reshape(x::Tensor, @nospecialize(dims...)) =
    reshape_to(x, Int[to_length(n) for n in (length(dims) == 1 && dims[1] isa Tuple ? dims[1] : dims)])
Base.vec(x::Tensor) = reshape_to(x, Int[length(x)])

"""
    expand_dims(x, dims)

Insert axes of length one, at these positions of the result.
"""
function expand_dims(x::Tensor, dims)
    places = axis_list(dims)
    n = ndims(x) + length(places)
    all(d -> 1 <= d <= n, places) && allunique(places) ||
        throw(ShapeError("expand_dims: axes $dims do not fit a result of $n axes; the size is $(size(x))"))
    rest = copy(x.dims)
    return reshape_to(x, Int[d in places ? 1 : popfirst!(rest) for d in 1:n])
end

function Base.dropdims(x::Tensor; dims)
    gone = axis_list(dims)
    all(d -> 1 <= d <= ndims(x) && x.dims[d] == 1, gone) ||
        throw(ShapeError("dropdims: axes $dims of size $(size(x)) are not all there and of length one"))
    return reshape_to(x, Int[x.dims[d] for d in 1:ndims(x) if !(d in gone)])
end

"""
    squeeze(x, dims=:)

Remove axes of length one: these, or all of them. `dropdims(x; dims)` is Julia's own name for the first.
"""
squeeze(x::Tensor, dims=:) =
    dropdims(x; dims=dims isa Colon ? Tuple(d for d in 1:ndims(x) if x.dims[d] == 1) : dims)

infer_transpose(inputs, attrs) = (inputs[1].dims[attrs.axes], inputs[1].eltype)
view_transpose(m::Memory, attrs) = Memory(m.root, m.address, m.eltype, m.dims[attrs.axes], m.strides[attrs.axes])

const TRANSPOSE = register!(Op("transpose", infer_transpose; view=view_transpose,
    backward=Any[(g, y, inputs, attrs) -> permuted(g, invperm(attrs.axes))], jvp=linear_jvp("transpose"), attrs=[:axes],
    batch=(op, count, mapped, inputs, attrs) -> apply(op, inputs, attributes(:axes => Int[attrs.axes; length(attrs.axes) + 1])),
    simplify=(e, made) -> shorter_transpose(e, made), scalar=:identity, doc="permutation of the axes"))

function permuted(x::Tensor, axes::Vector{Int})
    sort(axes) == 1:ndims(x) ||
        throw(ShapeError("permutedims: axes $(Tuple(axes)) are no permutation of the axes of size $(size(x))"))
    return issorted(axes) ? x : apply(TRANSPOSE, Tensor[x], attributes(:axes => axes))
end

Base.permutedims(x::Tensor, axes) = permuted(x, axis_list(axes))
Base.permutedims(x::Tensor) = ndims(x) == 1 ? reshape_to(x, Int[1, length(x)]) : permuted(x, Int[2, 1])
"""The papers' name for `permutedims`."""
const permuteDims = permutedims

"""As Julia's: that of a vector remembers what it is of, which is its transpose again; a number is its own."""
function Base.transpose(x::Tensor)
    ndims(x) == 0 && return x
    ndims(x) == 1 && return as_row(reshape_to(x, Int[1, length(x)]), true)
    ndims(x) == 2 || throw(ShapeError("transpose: expected a vector or a matrix, got size $(size(x)); use permutedims"))
    return x.row ? reshape_to(x, Int[length(x)]) : permuted(x, Int[2, 1])
end
Base.adjoint(x::Tensor) = transpose(x)
Base.adjoint(x::Elements) = x

"""
    swapaxes(x, a, b)

Exchange two axes.
"""
function swapaxes(x::Tensor, a, b)
    a, b = one_axis("swapaxes", a), one_axis("swapaxes", b)
    1 <= a <= ndims(x) && 1 <= b <= ndims(x) ||
        throw(ShapeError("swapaxes: axes $a and $b do not both exist in size $(size(x))"))
    axes = collect(1:ndims(x))
    axes[a], axes[b] = b, a
    return permuted(x, axes)
end

"""
    moveaxis(x, source, destination)

Move an axis, or several, to other positions.
"""
function moveaxis(x::Tensor, source, destination)
    from, to = axis_list(source), axis_list(destination)
    length(from) == length(to) && allunique(from) && allunique(to) && all(a -> 1 <= a <= ndims(x), [from; to]) ||
        throw(ShapeError("moveaxis: axes $source cannot be moved to $destination in size $(size(x))"))
    axes = zeros(Int, ndims(x))
    axes[to] = from
    rest = setdiff(1:ndims(x), from)
    for d in eachindex(axes)
        axes[d] == 0 && (axes[d] = popfirst!(rest))
    end
    return permuted(x, axes)
end

function infer_broadcast_to(inputs, attrs)
    x, dims = inputs[1], attrs.dims
    fits = length(x.dims) <= length(dims) && all(d -> x.dims[d] == 1 || x.dims[d] == dims[d], eachindex(x.dims))
    fits || throw(ShapeError("an array of size $(size(x)) cannot be broadcast to $(Tuple(dims))"))
    return dims, x.eltype
end

view_broadcast_to(m::Memory, attrs) = Memory(m.root, m.address, m.eltype, attrs.dims, spread_strides(m, attrs.dims))

# The runtime sums a gradient back to its input's shape.
const BROADCAST_TO = register!(Op("broadcast_to", infer_broadcast_to; view=view_broadcast_to,
    backward=Any[(g, y, inputs, attrs) -> g], jvp=linear_jvp("broadcast_to"), attrs=[:dims],
    batch=(op, count, mapped, inputs, attrs) -> spread_to(aligned_samples(inputs[1], length(attrs.dims)), Int[attrs.dims; count]),
    scalar=:identity, doc="the same elements repeated along new or length-one axes"))

"""
    broadcast_to(x, dims)

Repeat the elements along axes of length one, and along new axes at the end.
"""
broadcast_to(x::Tensor, dims) = spread_to(x, axis_list(dims))
spread_to(x::Tensor, dims::Vector{Int}) = dims == x.dims ? x : apply(BROADCAST_TO, Tensor[x], attributes(:dims => dims))

# Slices and their transpose -------------------------------------------------------------------------------------------
#
# A basic index is stored as one (first, step, count) for each axis; a count of -1 drops the axis.

const Item = NTuple{3,Int}
const Index = Vector{Item}

whole_axis(n::Int) = (1, 1, n)
sliced_dims(index::Index) = Int[n for (_, _, n) in index if n != -1]

"""The positions of a slice's elements in an array of these dimensions."""
function sliced_positions(dims::Vector{Int}, index::Index)
    kept, strides = findall(item -> item[3] != -1, index), dense_strides(dims)
    return strided(sliced_dims(index), Int[index[d][2] * strides[d] for d in kept],
        1 + sum(Int[(index[d][1] - 1) * strides[d] for d in eachindex(dims)]))
end

function view_slice(m::Memory, index::Index)
    offset = 0
    dims, strides = Int[], Int[]
    for (d, (first, step, n)) in enumerate(index)
        offset += (first - 1) * m.strides[d]
        n == -1 && continue
        push!(dims, n)
        push!(strides, step * m.strides[d])
    end
    prod(dims) == 0 && (offset = 0)
    return Memory(m.root, m.address + offset * sizeof(m.eltype), m.eltype, dims, strides)
end

function check_index(dims::Vector{Int}, index::Index)
    length(index) == length(dims) || throw(ShapeError("$(length(index)) indices for an array of size $(Tuple(dims))"))
    for (d, (first, step, n)) in enumerate(index)
        n == 0 && continue
        last = first + (max(n, 1) - 1) * step
        1 <= first <= dims[d] && 1 <= last <= dims[d] ||
            throw(ShapeError("index $first:$step:$last is out of range for axis $d of size $(Tuple(dims))"))
    end
end

function infer_slice(inputs, attrs)
    check_index(inputs[1].dims, attrs.index)
    return sliced_dims(attrs.index), inputs[1].eltype
end

const SLICE = register!(Op("slice", infer_slice; view=(m, attrs) -> view_slice(m, attrs.index),
    backward=Any[(g, y, inputs, attrs) -> assemble([g], Index[attrs.index], inputs[1].dims)], jvp=linear_jvp("slice"),
    batch=(op, count, mapped, inputs, attrs) -> apply(op, inputs, attributes(:index => Index([attrs.index; whole_axis(count)]))),
    attrs=[:index], doc="basic indexing: numbers, ranges, colons"))

function infer_assemble(inputs, attrs)
    dims, indices = attrs.dims, attrs.indices
    for (part, index) in zip(inputs, indices)
        check_index(dims, index)
        sliced_dims(index) == part.dims || throw(ShapeError(
            "a part of size $(size(part)) does not fit a place of size $(Tuple(sliced_dims(index)))"))
    end
    return dims, common_eltype(inputs)
end

"""How many of the places hold the least and the most often covered element: (1, 1) is a mosaic."""
function layers(dims::Vector{Int}, indices::Vector{Index})
    # Places that differ in one axis only, in consecutive segments, are what cat, stack and unrolled loops make.
    prod(dims) == 0 && return 1, 1
    axis = 0
    for index in indices, d in eachindex(dims)
        index[d] == whole_axis(dims[d]) && continue
        axis == 0 && (axis = d)
        axis == d || return counted_layers(dims, indices)
    end
    axis == 0 && return length(indices), length(indices)
    counts = zeros(Int, dims[axis])
    for index in indices
        first, step, n = index[axis]
        for k in 0:abs(n)-1
            counts[first+k*step] += 1
        end
    end
    return minimum(counts), maximum(counts)
end

function counted_layers(dims::Vector{Int}, indices::Vector{Index})
    counts = zeros(Float32, dims...)
    memory, one = Memory(counts), Memory(fill(1.0f0))
    for index in indices
        part = view_slice(memory, index)
        one_more = Memory(counts, part.address, Float32, part.dims, part.strides)
        code = Instructions()
        GC.@preserve counts one begin  # instructions have addresses alone
            emit_elementwise!(code, :add, one_more, Memory[one_more, one])
            execute!(code)
        end
    end
    return Int(minimum(counts)), Int(maximum(counts))
end

"""Whether the places fill the whole without overlap."""
covers(dims::Vector{Int}, indices::Vector{Index}) = layers(dims, indices) == (1, 1)

function forward_assemble(p, out, inputs, attrs)
    least, most = layers(attrs.dims, attrs.indices)
    least > 0 && most <= 1 || emit_fill!(p, out, 0)
    for (part, index) in zip(inputs, attrs.indices)
        place = view_slice(out, index)
        if most > 1
            emit_elementwise!(p, :add, place, Memory[place, part])
        elseif !same_place(place, part)  # the planner may have put the part in its place already
            emit_copy!(p, place, part)
        end
    end
end

const ASSEMBLE = register!(Op("assemble", infer_assemble; forward=forward_assemble,
    backward=(i, g, y, inputs, attrs) -> apply(SLICE, Tensor[g], attributes(:index => attrs.indices[i])), jvp=linear_jvp("assemble"),
    batch=(op, count, mapped, inputs, attrs) -> assemble(all_mapped(count, mapped, inputs),
        Index[Index([index; whole_axis(count)]) for index in attrs.indices], Int[attrs.dims; count]),
    sparsity=(inputs, attrs) -> Any[(sliced_positions(attrs.dims, index), 1:length(part)) for (part, index) in zip(inputs, attrs.indices)],
    attrs=[:dims, :indices], doc="parts put (where they overlap, added) into their places in an array of zeros"))

"""Add each part into its place, a basic index, in an array of zeros."""
assemble(parts::Vector{Tensor}, indices::Vector{Index}, dims::Vector{Int}) = apply(ASSEMBLE, parts, attributes(:dims => dims, :indices => indices))

function check_eltypes(name::String, parts::Vector{Tensor})
    try
        common_eltype(parts)
    catch error
        error isa DTypeError ? throw(DTypeError("$name: $(error.message)")) : rethrow()
    end
end

"""Refuse the elements that a dotted function computes with: each would be an array to join."""
refuse_elements(@nospecialize(parts)) = any(x -> x isa Elements && ndims(x.tensor) > 0, parts) &&
    throw(once_for_all("an array that is joined"))

"""
    concatenate(tensors, dims)

Join tensors along an axis, as `cat(tensors...; dims)`.
"""
function concatenate(@nospecialize(arrays), dims)
    dims = one_axis("cat", dims)
    refuse_elements(arrays)
    parts = as_tensors(collect(Any, arrays))
    isempty(parts) && throw(ShapeError("cat: at least one array is needed"))
    dims >= 1 || throw(ShapeError("cat: axes count from 1, got $dims"))
    check_eltypes("cat", parts)
    n = max(maximum(ndims(part) for part in parts), dims)
    parts = Tensor[reshape_to(part, Int[part.dims; ones(Int, n - ndims(part))]) for part in parts]
    first = parts[1]
    for part in parts
        all(d -> d == dims || part.dims[d] == first.dims[d], 1:n) || throw(ShapeError(
            "cat: sizes $(join(String[string(size(q)) for q in parts], " and ")) do not match outside axis $dims"))
    end
    whole = copy(first.dims)
    whole[dims] = sum(part.dims[dims] for part in parts)
    start = 1
    places = Index[]
    for part in parts
        place = Item[whole_axis(m) for m in whole]
        place[dims] = (start, 1, part.dims[dims])
        start += part.dims[dims]
        push!(places, place)
    end
    return assemble(parts, places, whole)
end

"""A square matrix that Julia tells from others by its type: functions know more of it, and operators take it as a tensor."""
abstract type StructuredTensor end

const Joined = Union{Tensor,StructuredTensor,AbstractArray,Real}
const AnyTensor = Union{Tensor,StructuredTensor}
Base.cat(x::AnyTensor, rest::Joined...; dims) = concatenate((x, rest...), dims)
Base.cat(a::Union{AbstractArray,Real}, x::AnyTensor, rest::Joined...; dims) = concatenate((a, x, rest...), dims)
Base.vcat(x::AnyTensor, rest::Joined...) = concatenate((x, rest...), 1)
Base.vcat(a::Union{AbstractArray,Real}, x::AnyTensor, rest::Joined...) = concatenate((a, x, rest...), 1)
Base.hcat(x::AnyTensor, rest::Joined...) = concatenate((x, rest...), 2)
Base.hcat(a::Union{AbstractArray,Real}, x::AnyTensor, rest::Joined...) = concatenate((a, x, rest...), 2)
Base.hvcat(rows::Tuple{Vararg{Int}}, x::AnyTensor, rest::Joined...) = joined_rows(rows, (x, rest...))
Base.reduce(::typeof(vcat), xs::AbstractVector{Tensor}) = concatenate(xs, 1)
Base.reduce(::typeof(hcat), xs::AbstractVector{Tensor}) = concatenate(xs, 2)
# Behind several arrays or numbers: with any number of them the methods would be Base's own. Of numbers alone there may be as many as
# a matrix of four rows has; of either kind fewer, since Julia compares each combination of kinds, for minutes where there are many.
# What Base makes of more is an array of elements of any type; see the `as_tensor` below.
const PLAIN_FIRST, NUMBERS_FIRST = 4, 16
for n in 1:NUMBERS_FIRST
    names = Symbol[Symbol(:a, k) for k in 1:n]
    before = [n > PLAIN_FIRST ? :($a::Real) : :($a::Union{AbstractArray,Real}) for a in names]
    if n > 1  # for one there are methods above
        @eval Base.cat($(before...), x::AnyTensor, rest::Joined...; dims) = concatenate(($(names...), x, rest...), dims)
        @eval Base.vcat($(before...), x::AnyTensor, rest::Joined...) = concatenate(($(names...), x, rest...), 1)
        @eval Base.hcat($(before...), x::AnyTensor, rest::Joined...) = concatenate(($(names...), x, rest...), 2)
    end
    @eval Base.hvcat(rows::Tuple{Vararg{Int}}, $(before...), x::AnyTensor, rest::Joined...) =
        joined_rows(rows, ($(names...), x, rest...))
end

function joined_rows(rows, parts)
    refuse_elements(parts)
    parts = as_tensors(collect(Any, parts))  # numbers of a row without a tensor, too, take the float type of the tensors
    start = 0
    lines = Any[]
    for n in rows
        push!(lines, concatenate(parts[start+1:start+n], 2))
        start += n
    end
    return concatenate(lines, 1)
end

@static if Versions.HAS_STACK
    import Base: stack
end

"""
    stack(tensors; dims=:)

Join tensors of one size along a new axis: the last one unless `dims` says otherwise.
"""
stack(tensors::Union{AbstractVector{Tensor},Tuple{Tensor,Vararg{Joined}}}; dims=:) = stacked(tensors, dims)

function stacked(@nospecialize(arrays), dims)
    refuse_elements(arrays)
    parts = as_tensors(collect(Any, arrays))
    isempty(parts) && throw(ShapeError("stack: at least one array is needed"))
    check_eltypes("stack", parts)
    one_part = parts[1].dims
    all(part -> part.dims == one_part, parts) || throw(ShapeError(
        "stack: all sizes must be equal, got $(join(String[string(size(q)) for q in parts], " and "))"))
    axis = dims isa Colon ? length(one_part) + 1 : one_axis("stack", dims)
    1 <= axis <= length(one_part) + 1 ||
        throw(ShapeError("stack: axis $axis does not exist in a stack of arrays of size $(Tuple(one_part))"))
    whole = Int[one_part[1:axis-1]; length(parts); one_part[axis:end]]
    places = map(1:length(parts)) do i
        place = Item[whole_axis(m) for m in whole]
        place[axis] = (i, 1, -1)
        place
    end
    return assemble(parts, places, whole)
end

"""
    pad(x, widths; value=0)

Surround an array with a number: `widths` holds (before, after) for each axis, or is one number for all sides.
"""
function pad(x::Tensor, widths; value=0)
    pairs = widths isa Integer ? fill((Int(widths), Int(widths)), ndims(x)) : [two_widths(pair) for pair in widths]
    length(pairs) == ndims(x) && all(p -> p[1] >= 0 && p[2] >= 0, pairs) ||
        throw(ShapeError("pad: expected $(ndims(x)) pairs of widths that are not negative, got $widths"))
    is_scalar(value) || throw(ShapeError("pad: expected one number as value, got $(repr(value))"))
    place = Item[(a + 1, 1, n) for ((a, _), n) in zip(pairs, x.dims)]
    dims = Int[a + n + b for ((a, b), n) in zip(pairs, x.dims)]
    padded = assemble(Tensor[x], Index[place], dims)
    value isa Real && !(value isa Union{DualNumber,Elements}) && iszero(value) && !signbit(value) && return padded
    inside = fill!(new_array(x.eltype, dims), 0)
    view(inside, (first:first+n-1 for (first, _, n) in place)...) .= 1
    return WHERE(Constant(inside), padded, value)  # copies: (x - value) + value would round, and is NaN at infinity
end

function two_widths(@nospecialize(pair))
    widths = axis_list(pair)
    length(widths) == 2 || throw(ShapeError("pad: expected (before, after) for each axis, got $(repr(pair))"))
    return (widths[1], widths[2])
end

"""An array of numbers and single tensors, such as Base makes of a matrix whose first tensor stands behind many numbers."""
function as_tensor(x::AbstractArray{>:Tensor}, @nospecialize(T)=Float64)
    all(is_scalar, x) && any(v -> v isa Tensor, x) || throw(DTypeError("expected an array of numbers, or of numbers and single " *
        "tensors, got a $(typeof(x)); convert what holds numbers alone, and join arrays and tensors with concatenate((a, b, ...), dims)"))
    return reshape_to(stacked(vec(x), :), collect(Int, size(x)))
end

# Arrays and tensors like another ----------------------------------------------------------------------------------------

Base.zero(x::Tensor) = spread_to(literal(x.eltype, 0), x.dims)
Base.one(x::Tensor) = is_scalar(x) ? literal(x.eltype, 1) : ndims(x) == 2 && x.dims[1] == x.dims[2] ?
    Constant(Matrix{x.eltype}(I, x.dims...)) :
    throw(ShapeError("one: expected a number or a square matrix, got size $(size(x)); write fill(one(eltype(x)), size(x))"))
Base.oneunit(x::Tensor) = one(x)
Base.float(x::Tensor) = (check_float(x.eltype); x)
Base.real(x::Tensor) = x
Base.conj(x::Tensor) = x
Base.isreal(x::Tensor) = true
Base.similar(x::Tensor, T::Type=x.eltype, dims::Tuple{Vararg{Integer}}=size(x)) = Array{T}(undef, dims)
Base.similar(x::Tensor, dims::Tuple{Vararg{Integer}}) = similar(x, x.eltype, dims)
Base.similar(x::Tensor, dims::Integer...) = similar(x, x.eltype, dims)
Base.convert(::Type{T}, x::Tensor) where {T<:Number} = throw(TraceError(
    "an array of $T cannot hold a tensor; join tensors with stack() or cat(), or take its value with item()"))

function Base.reverse(x::Tensor; dims=:)
    axes = dims isa Colon ? collect(1:ndims(x)) : axis_list(dims)
    all(d -> 1 <= d <= ndims(x), axes) || throw(ShapeError("reverse: axes $dims do not fit an array of $(ndims(x)) dimensions"))
    return x[(d in axes ? (n:-1:1) : Colon() for (d, n) in enumerate(x.dims))...]
end

function Base.diff(x::Tensor; dims=ndims(x) == 1 ? 1 : nothing)
    dims isa Integer && 1 <= dims <= ndims(x) ||
        throw(ShapeError("diff: dims must be one of the axes of an array of $(ndims(x)) dimensions, got $(repr(dims))"))
    n = x.dims[dims]
    part_(range) = x[(d == dims ? range : Colon() for d in 1:ndims(x))...]
    return part_(2:n) .- part_(1:n-1)
end

function Base.circshift(x::Tensor, shifts)
    moves = axis_list(shifts)
    length(moves) <= ndims(x) || throw(ShapeError("circshift: $(length(moves)) shifts do not fit size $(size(x))"))
    for (d, places) in enumerate(moves)
        n = x.dims[d]
        start = n == 0 ? 0 : mod(-places, n)
        start == 0 || (x = concatenate(Tensor[part_of(x, d, start+1:n), part_of(x, d, 1:start)], d))
    end
    return x
end

"""As Julia's: `inner` repeats each element, `outer`, or numbers without a name, the whole."""
Base.repeat(x::Tensor, counts::Integer...) = repeat(x; outer=counts)
function Base.repeat(x::Tensor; inner=nothing, outer=nothing)
    inner_, outer_ = (counts === nothing ? Int[] : axis_list(counts) for counts in (inner, outer))
    n = max(ndims(x), length(inner_), length(outer_))
    all(c -> c >= 0, [inner_; outer_]) || throw(ShapeError("repeat: numbers of copies must not be negative"))
    at_(counts, d) = d <= length(counts) ? counts[d] : 1
    length_(d) = d <= ndims(x) ? x.dims[d] : 1
    apart = Int[k for d in 1:n for k in (1, length_(d), 1)]
    wide = Int[k for d in 1:n for k in (at_(inner_, d), length_(d), at_(outer_, d))]
    whole_ = Int[at_(inner_, d) * length_(d) * at_(outer_, d) for d in 1:n]
    return reshape_to(spread_to(reshape_to(x, apart), wide), whole_)
end

function LinearAlgebra.diag(x::Tensor, k::Integer=0)
    ndims(x) == 2 || throw(ShapeError("diag: expected a matrix, got size $(size(x))"))
    m, n = x.dims
    row, column = max(-k, 0), max(k, 0)
    count = max(min(m - row, n - column), 0)
    count == 0 && return vec(x)[1:0]
    start = 1 + row + column * m
    return vec(x)[range(start; step=m + 1, length=count)]
end
LinearAlgebra.tr(x::Tensor) = (ndims(x) == 2 && x.dims[1] == x.dims[2] || throw(ShapeError(
    "tr: expected a square matrix, got size $(size(x))")); sum(diag(x)))

"""A matrix of zeros with the elements of `x` on its diagonal, `k` places to the right."""
function LinearAlgebra.diagm(x::Tensor, k::Integer)
    n = length(x) + abs(k)
    place = Index[[(length(x) == 0 ? 1 : 1 + max(k, 0) * n + max(-k, 0), n + 1, length(x))]]
    return reshape_to(assemble(Tensor[vec(x)], place, Int[n * n]), Int[n, n])
end
LinearAlgebra.diagm(x::Tensor) = diagm(x, 0)
LinearAlgebra.diagm(pair::Pair{<:Integer,Tensor}) = diagm(pair[2], pair[1])

for (f, below) in ((:tril, >=), (:triu, <=))
    @eval function LinearAlgebra.$f(x::Tensor, k::Integer=0)
        ndims(x) == 2 || throw(ShapeError("$($(string(f))): expected a matrix, got size $(size(x))"))
        kept_ = [$below(i, j - k) for i in 1:x.dims[1], j in 1:x.dims[2]]
        return WHERE(Constant(Array{x.eltype}(kept_)), x, 0)
    end
end

# What tensors do not have, and what to write instead; otherwise Julia's message would be about a method, or memory.
for (f, advice) in ((:findmax, "take maximum and argmax"), (:findmin, "take minimum and argmin"),
        (:findall, "take findall of value(x), or choose() between two results"),
        (:findfirst, "take findfirst of value(x)"), (:findlast, "take findlast of value(x)"),
        (:accumulate, "write it with scan()"), (:mapslices, "write ops with dims"),
        (:unique, "take unique(value(x))"), (:searchsorted, "take searchsortedfirst and searchsortedlast"))
    signatures = f in (:findall, :findfirst, :findlast, :findmax, :findmin, :accumulate, :mapslices) ?
        ((:(x::Tensor),), (:(f::Function), :(x::Tensor))) : ((:(x::Tensor), :(@nospecialize(args...))),)
    for signature in signatures
        @eval Base.$f($(signature...); kinds...) = throw(ConfigurationError($("$f is no op of TwinGrad; $advice")))
    end
end
for (f, advice) in ((:eigen, "; eigen(Symmetric(x)) is for symmetric matrices"), (:eigvals, "; eigvals(Symmetric(x)) is for symmetric " *
        "matrices"), (:lu, ""), (:nullspace, "; its vectors are not unique, those of svd(x) are"),
        (:issymmetric, "; take issymmetric(value(x))"), (:ishermitian, "; take ishermitian(value(x))"), (:isposdef, "; take isposdef(value(x))"),
        (:isdiag, "; take isdiag(value(x))"), (:istriu, "; take istriu(value(x))"), (:istril, "; take istril(value(x))"))
    @eval LinearAlgebra.$f(x::Tensor, @nospecialize(args...); kinds...) = throw(ConfigurationError(
        $("$f is no op of TwinGrad" * advice)))
end
const MulOperand = Union{Tensor,AbstractVecOrMat,Number}  # with any type, these would be ambiguous with ChainRulesCore's
LinearAlgebra.mul!(c::Tensor, a::MulOperand, b::MulOperand, scales::Number...) = in_place()
LinearAlgebra.mul!(c::AbstractVecOrMat, a::Tensor, b::MulOperand, scales::Number...) = in_place()
LinearAlgebra.mul!(c::AbstractVecOrMat, a::AbstractVecOrMat, b::Tensor, scales::Number...) = in_place()
LinearAlgebra.dot(x::Tensor, z::Complex) = no_complex("dot")
LinearAlgebra.dot(z::Complex, x::Tensor) = no_complex("dot")
Base.:\(a::Tensor, b::Union{Tensor,Real,AbstractArray}) = left_quotient(a, b)
Base.:\(a::Union{Real,AbstractArray}, b::Tensor) = left_quotient(a, b)

# Copies ---------------------------------------------------------------------------------------------------------------

const COPY = register!(Op("copy", infer_same; batch=trailing, sparsity=one_to_one, forward=(p, out, inputs, attrs) -> emit_copy!(p, out, inputs[1]),
    backward=Any[(g, y, inputs, attrs) -> g], jvp=linear_jvp("copy"), scalar=:identity, doc="the same values in new memory"))
Base.copy(x::Tensor) = as_row(COPY(x), x.row)
