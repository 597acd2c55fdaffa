# Indexing: numbers, ranges and colons are views, arrays of integers gather; embeddings gather columns of a matrix.
#
# As everywhere in Julia, indices count from 1 and several arrays of indices select a block (every combination), not
# pairs; for pairs, index with an array of CartesianIndex.

function infer_gather(inputs, attrs)
    x, index, axis = inputs[1], inputs[2], attrs.axis
    1 <= axis <= ndims(x) || throw(ShapeError("axis $axis does not exist in size $(size(x))"))
    index.eltype === Int64 || throw(DTypeError("an index must be of integers, got $(index.eltype)"))
    return Int[x.dims[1:axis-1]; index.dims; x.dims[axis+1:end]], x.eltype
end

infer_scatter(inputs, attrs) = (attrs.dims, inputs[1].eltype)

"""Append a gather or a scatter; all memories are without gaps."""
function emit_indexed!(p::Instructions, name::Symbol, out::Memory, a::Memory, index::Memory, dims::Vector{Int}, axis::Int)
    n = (prod(dims[1:axis-1]), length(index), prod(dims[axis+1:end]), 1)
    return emit!(p, a.eltype, name, (out.address, a.address, NOWHERE, NOWHERE), index.address, n,
        (NONE, NONE, NONE, NONE), (dims[axis], 0, 0, place!(p, String(name), index.dims)))
end

forward_gather(p, out, inputs, attrs) =
    length(out) == 0 ? nothing : emit_indexed!(p, :gather, out, inputs[1], inputs[2], inputs[1].dims, attrs.axis)
forward_scatter(p, out, inputs, attrs) =
    length(out) == 0 ? nothing : emit_indexed!(p, :scatter, out, inputs[1], inputs[2], attrs.dims, attrs.axis)

"""The slices of an array at the positions of an index along an axis, or `nothing` where these aren't known."""
function taken(dims::Vector{Int}, index::Tensor, axis::Int)
    index.data === nothing && return nothing
    before, n = prod(dims[1:axis-1]), dims[axis]
    return Int[i + before * (k - 1) + before * n * j for i in 1:before, k in vec(value(index)), j in 0:prod(dims[axis+1:end])-1][:]
end

"""The `sparsity` of a lookup along an axis; `back`: of adding what was looked up into an array of these dimensions."""
function looked_up(x::Tensor, index::Tensor, dims::Vector{Int}, axis::Int, back::Bool)
    places = taken(dims, index, axis)
    places === nothing && return nothing
    return Any[back ? (places, 1:length(x)) : (1:length(places), places), nothing]
end

const GATHER = register!(Op("gather", infer_gather;
    batch=(op, count, mapped, inputs, attrs) -> mapped[2] ? nothing : apply(op, inputs, attrs), forward=forward_gather,
    backward=Any[(g, y, inputs, attrs) -> apply(SCATTER, Tensor[g, inputs[2]], with(attrs, :dims => inputs[1].dims)), no_gradient],
    jvp=(t, y, inputs, attrs) -> apply(GATHER, Tensor[t[1], inputs[2]], attrs),
    sparsity=(inputs, attrs) -> looked_up(inputs[1], inputs[2], inputs[1].dims, attrs.axis, false), accepts=is_dense, attrs=[:axis],
    doc="elements at positions given by an array of integers along an axis"))
const SCATTER = register!(Op("scatter", infer_scatter;
    batch=(op, count, mapped, inputs, attrs) -> mapped[2] ? nothing : 
        apply(op, inputs, changed(attrs, :dims => Int[attrs.dims; count])), forward=forward_scatter,
    backward=Any[(g, y, inputs, attrs) -> apply(GATHER, Tensor[g, inputs[2]], subset(attrs, [:axis])), no_gradient],
    jvp=(t, y, inputs, attrs) -> apply(SCATTER, Tensor[t[1], inputs[2]], attrs),
    sparsity=(inputs, attrs) -> looked_up(inputs[1], inputs[2], attrs.dims, attrs.axis, true), accepts=is_dense,
    attrs=[:axis, :dims], doc="elements added into an array of zeros at positions given by an array of integers"))

"""
    gather(x, index; dims=ndims(x))

The slices of `x` at these positions of an axis, `x[:, ..., index]`; `index` is an array, or a tensor, of integers.
"""
gather(x::Tensor, index; dims=ndims(x)) = apply(GATHER, Tensor[x, index_tensor(index)], attributes(:axis => one_axis("gather", dims)))

# Embeddings -----------------------------------------------------------------------------------------------------------
#
# A lookup is linear in the matrix, and its gradient in the columns, so that each is the other's derivative. The column
# `padding_index` (0: none) counts as a constant: its gradient and its tangents are zero.
# For the tangents a lookup may be `masked`: that column then gives zeros.

function infer_embedding(inputs, attrs)
    weight, ids = inputs
    ndims(weight) == 2 || throw(ShapeError("expected a matrix (dimension, vocabulary), got size $(size(weight))"))
    check_ids_tensor(ids, weight.dims[2], attrs.padding_index)
    return Int[weight.dims[1]; ids.dims], check_float(weight.eltype)
end

function infer_embedding_gradient(inputs, attrs)
    g, ids = inputs
    ndims(g) > 0 && g.dims[2:end] == ids.dims || throw(ShapeError(
        "ids of size $(size(ids)) need columns of size (dimension, $(join(ids.dims, ", "))), got $(size(g))"))
    check_ids_tensor(ids, attrs.vocabulary, attrs.padding_index)
    return Int[g.dims[1], attrs.vocabulary], check_float(g.eltype)
end

function check_ids_tensor(ids::Tensor, vocabulary::Int, padding_index::Int)
    ids.eltype === Int64 || throw(DTypeError("expected integer token ids, got $(ids.eltype)"))
    0 <= padding_index <= vocabulary || throw(ShapeError(
        "padding_index must be 0 (none) or one of the $vocabulary columns, got $padding_index"))
end

emit_columns!(p::Instructions, name::Symbol, out::Memory, a::Memory, ids::Memory, vocabulary::Int, left_out::Int) =
    emit!(p, a.eltype, name, (out.address, a.address, NOWHERE, NOWHERE), ids.address, (a.dims[1], length(ids), 1, 1),
        (NONE, NONE, NONE, NONE), (vocabulary, left_out, 0, place!(p, String(name), ids.dims)))

forward_embedding(p, out, inputs, attrs) = length(out) == 0 ? nothing :
    emit_columns!(p, :embedding, out, inputs[1], inputs[2], inputs[1].dims[2], attrs.masked ? attrs.padding_index : 0)
forward_embedding_gradient(p, out, inputs, attrs) = length(out) == 0 ? nothing :
    emit_columns!(p, :embedding_gradient, out, inputs[1], inputs[2], attrs.vocabulary, attrs.padding_index)

const EMBEDDING = register!(Op("embedding", infer_embedding;
    batch=(op, count, mapped, inputs, attrs) -> mapped[1] ? nothing : apply(op, inputs, attrs), forward=forward_embedding,
    backward=Any[(g, y, inputs, attrs) -> apply(EMBEDDING_GRADIENT, Tensor[g, inputs[2]], attributes(:vocabulary => inputs[1].dims[2], :padding_index => attrs.padding_index)),
        no_gradient],
    jvp=(t, y, inputs, attrs) -> apply(EMBEDDING, Tensor[t[1], inputs[2]], attributes(:padding_index => attrs.padding_index, :masked => true)), accepts=is_dense,
    sparsity=(inputs, attrs) -> looked_up(inputs[1], inputs[2], inputs[1].dims, 2, false),
    attrs=[:padding_index, :masked], doc="columns of a matrix by their numbers"))
const EMBEDDING_GRADIENT = register!(Op("embedding_gradient", infer_embedding_gradient;
    forward=forward_embedding_gradient,
    backward=Any[(u, y, inputs, attrs) -> apply(EMBEDDING, Tensor[u, inputs[2]], attributes(:padding_index => attrs.padding_index, :masked => true)), no_gradient],
    jvp=(t, y, inputs, attrs) -> apply(EMBEDDING_GRADIENT, Tensor[t[1], inputs[2]], attrs), accepts=is_dense,
    sparsity=(inputs, attrs) -> looked_up(inputs[1], inputs[2], Int[inputs[1].dims[1], attrs.vocabulary], 2, true),
    attrs=[:vocabulary, :padding_index], doc="columns added into a matrix of zeros at their numbers"))

"""
    embedding(weight, ids; padding_index=0)

Columns of `weight` (dimension, vocabulary) by their numbers: `ids` (...), integers from 1, to (dimension, ...). The column
`padding_index` is looked up like the others and gets no gradient. Throws a `ShapeError` that names the first id out of
range.
"""
function embedding(@nospecialize(weight), @nospecialize(ids); padding_index::Integer=0)
    x, index = as_tensor(weight), index_tensor(ids)
    return apply(EMBEDDING, Tensor[x, index], attributes(:padding_index => Int(padding_index), :masked => false))
end

"""
    embedding_gradient(g, ids; vocabulary, padding_index=0)

The gradient of [`embedding`](@ref) by its matrix, (dimension, vocabulary), from columns `g` (dimension, ...).
"""
function embedding_gradient(@nospecialize(g), @nospecialize(ids); vocabulary::Integer, padding_index::Integer=0)
    index = index_tensor(ids)
    return apply(EMBEDDING_GRADIENT, Tensor[as_tensor(g), index], attributes(:vocabulary => Int(vocabulary), :padding_index => Int(padding_index)))
end

"""
Check token ids (..., N) that are counted from `base`, as are samples and positions in the message. `where_` is its beginning, and
`before` are the samples before these.
"""
function check_ids(ids::AbstractArray, vocabulary::Int, base::Int=1, where_::String="", before::Int=0)
    for id in ids
        base <= id < base + vocabulary || apart(refuse_ids, ids, vocabulary, base, where_, before)
    end
    return nothing
end

function refuse_ids(ids::AbstractArray, vocabulary::Int, base::Int, where_::String, before::Int)
    i = findfirst(id -> !(base <= id < base + vocabulary), ids)
    place = Tuple(i)
    at = length(place) == 0 ? "" : " in sample $(place[end] - 1 + base + before)"
    length(place) > 1 && (at *= " at position $(join(reverse(place[1:end-1]) .- 1 .+ base, ", "))")
    throw(ShapeError("$(where_)token id $(ids[i])$at is not one of the $vocabulary of the vocabulary, $base to " *
        "$(base + vocabulary - 1)"))
end

"""
    x[indices...]

Numbers, ranges and colons give views; arrays (or tensors) of integers gather; an array of booleans, only eagerly,
selects. One index alone counts through all elements, in order.
"""
Base.getindex(x::Tensor, @nospecialize(indices...)) = indexed(x, collect(Any, indices))
Base.view(x::Tensor, @nospecialize(indices...)) = indexed(x, collect(Any, indices))

function indexed(x::Tensor, indices::Vector{Any})
    if length(indices) == 1 && ndims(x) != 1
        only_one = indices[1]
        only_one isa CartesianIndex && return indexed(x, collect(Any, Tuple(only_one)))
        if only_one isa AbstractArray{Bool} && ndims(only_one) > 1
            size(only_one) == size(x) || throw(ShapeError(
                "getindex: a mask must have the size of the array, expected $(size(x)), got $(size(only_one))"))
            return indexed(vec(x), Any[vec(only_one)])
        end
        if only_one isa AbstractArray{<:CartesianIndex}
            places = LinearIndices(size(x))
            all(i -> checkbounds(Bool, places, i), only_one) ||
                throw(ShapeError("getindex: an index is out of range for size $(size(x))"))
            return indexed(vec(x), Any[converted(Int[places[i] for i in only_one], only_one)])
        end
        isempty(x.dims) && only_one == 1 && return x
        # A slice of x itself: the gradients of all are assembled once, where each reshape to a vector would have its own.
        only_one isa Integer && !(only_one isa Bool) && 1 <= only_one <= length(x) &&
            return indexed(x, collect(Any, Tuple(CartesianIndices(size(x))[Int(only_one)])))
        return indexed(vec(x), indices)
    end
    while length(indices) > ndims(x) && indices[end] == 1
        pop!(indices)
    end
    length(indices) == ndims(x) ||
        throw(ShapeError("getindex: $(length(indices)) indices for an array of size $(size(x))"))
    basic, arrays = Item[], Tuple{Int,Tensor}[]
    axis = 0  # of what the basic indices leave
    for (d, index) in enumerate(indices)
        n = x.dims[d]
        axis += !(index isa Integer && !(index isa Bool))
        if index isa Union{AbstractRange{<:Integer},Integer,Colon}
            push!(basic, index_item(index, n))
        else
            push!(basic, whole_axis(n))
            push!(arrays, (axis, positions(index, n)))
        end
    end
    result = all(d -> basic[d] == whole_axis(x.dims[d]), eachindex(basic)) ? x : named(() -> apply(SLICE, Tensor[x], attributes(:index => basic)))
    for (axis, index) in reverse(arrays)
        result = apply(GATHER, Tensor[result, index], attributes(:axis => axis))
    end
    return result
end

function named(f)
    try
        return f()
    catch error
        error isa ShapeError ? throw(ShapeError(replace(error.message, "slice" => "getindex"))) : rethrow()
    end
end

index_item(i::Bool, n::Int) = throw(DTypeError("getindex: expected an integer index, got a boolean"))
index_item(i::Integer, n::Int) = (Int(i), 1, -1)
index_item(r::AbstractRange{<:Integer}, n::Int) = (Int(first(r)), Int(step(r)), length(r))
index_item(::Colon, n::Int) = whole_axis(n)

"""An index of one axis as a tensor of integers."""
positions(index::Tensor, n::Int) = index_tensor(index)
function positions(index::AbstractArray{Bool}, n::Int)
    size(index) == (n,) ||
        throw(ShapeError("getindex: a mask must have the length of its axis, expected $n, got size $(size(index))"))
    return converted(findall(vec(index)), index)
end
positions(index::AbstractArray{<:Integer}, n::Int) = Constant(index)
positions(index::AbstractArray, n::Int) = isempty(index) ? Constant(Int64[]) :
    throw(DTypeError("getindex: an index must be of integers or booleans, got $(eltype(index))"))
positions(@nospecialize(index), n::Int) = throw(DTypeError("getindex: cannot index with $(typeof(index))"))

in_place() = throw(TraceError("tensors cannot be written in place, because a gradient may still need the old values; " *
    "build the new tensor with choose(), cat() or stack(), or use assign!() on a leaf"))
Base.setindex!(x::Tensor, @nospecialize(args...)) = in_place()
Base.fill!(x::Tensor, @nospecialize(value)) = in_place()
Base.copyto!(x::Tensor, @nospecialize(args...)) = in_place()
Base.Broadcast.materialize!(x::Tensor, @nospecialize(value)) = in_place()
Base.Broadcast.materialize!(x::Tensor, ::Base.Broadcast.Broadcasted{Style}) where {Style} = in_place()

into_array() = throw(TraceError("a tensor cannot be written into an array, where its derivative would be lost; use the tensor " *
    "itself, join tensors with stack() or cat(), or write value(x) if only the values are wanted"))
Base.Broadcast.materialize!(::AbstractArray, ::Tensor) = into_array()
Base.copy!(::AbstractArray, ::Tensor) = into_array()
Base.map!(@nospecialize(f), ::AbstractArray, ::Tensor, @nospecialize(others...)) = into_array()
