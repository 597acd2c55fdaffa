# All parameters of a model as one flat vector with a named view per tensor.
#
# One vector makes the optimizer one loop, a checkpoint one array, a reduction over threads one addition, and gives the
# bridge one pointer. The trainable tensors come first: a gradient vector has the layout of that part, so the two can be
# combined without looking at names. The numpy engine's sizes are these reversed, its memory is the same, byte for byte.

"""Every tensor starts at a multiple of this many elements: 64 bytes, a cache line, for Float32."""
const PARAMETER_ALIGNMENT = 16

"""
Where each named tensor lies in a flat vector of `length` elements; what lies between them is padding. The first
`trained_tensors` tensors, in the first `trained` elements, are trainable.
"""
struct Layout
    names::Vector{String}
    dims::Vector{Vector{Int}}
    offsets::Vector{Int}
    length::Int
    trained_tensors::Int
    trained::Int
end

"""Lay the tensors out one after the other, each aligned, those that are `trainable` first."""
function Layout(names::Vector{String}, dims::Vector{Vector{Int}}, trainable::Vector{Bool}=fill(true, length(names)))
    order = sort(1:length(names); by=i -> !trainable[i], alg=MergeSort)
    names, dims, count, trained = names[order], dims[order], sum(trainable), 0
    offsets, last = Int[], 0
    for (i, d) in enumerate(dims)
        push!(offsets, last)
        last += cld(prod(d), PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        i == count && (trained = last)
    end
    return Layout(names, dims, offsets, last, count, trained)
end

"""The layout of a gradient: of the trainable tensors alone."""
trainable_part(l::Layout) = Layout(l.names[1:l.trained_tensors], l.dims[1:l.trained_tensors],
    l.offsets[1:l.trained_tensors], l.trained, l.trained_tensors, l.trained)

"""Where the tensors lie in `vector`."""
memories(layout::Layout, vector::Vector{T}) where {T} = AD.Memory[
    AD.Memory(Ref{Any}(vector), AD.start_of(vector) + sizeof(T) * offset, T, dims, AD.dense_strides(dims))
    for (offset, dims) in zip(layout.offsets, layout.dims)]

"""The tensors as arrays: views into `vector`."""
views(layout::Layout, vector::Vector) = Any[
    reshape(view(vector, offset+1:offset+prod(dims)), dims...) for (offset, dims) in zip(layout.offsets, layout.dims)]

"""
    Parameters

The named parameters of a model, those that are trained before those that are not. `vector` holds them all, `tensors` has
a named `Tensor` for each, by reference: writing into the one is writing into the other, or into the views of the vector
that are its `arrays`. Only tensors that are trained have a gradient.

`parameters["rnn.weight"]` is a tensor's values as an array that shares its memory.
"""
struct Parameters
    layout::Layout
    vector::Vector
    tensors::Vector{Tensor}
end

# Made when they are asked for: each number of axes is a separate type, for which Julia compiles what it is used with.
Base.getproperty(p::Parameters, name::Symbol) =
    name === :arrays ? views(getfield(p, :layout), getfield(p, :vector)) : getfield(p, name)

function Parameters(layout::Layout, vector::Vector)
    length(vector) == layout.length || throw(ParameterError(
        "the parameter vector must have $(layout.length) elements, got $(length(vector))"))
    return Parameters(layout, vector, Tensor[AD.leaf(m, eltype(vector), m.dims, i <= layout.trained_tensors, layout.names[i])
                                             for (i, m) in enumerate(memories(layout, vector))])
end
Parameters(layout::Layout, T::DataType) = Parameters(layout, AD.zeroed!(Vector{T}(undef, layout.length)))

Base.deepcopy_internal(p::Parameters, known::IdDict) =
    get!(() -> Parameters(p.layout, Base.deepcopy_internal(p.vector, known)), known, p)::Parameters

AD.watched_parts(p::Parameters) = (p.vector,)

Base.eltype(p::Parameters) = eltype(p.vector)
Base.keys(p::Parameters) = p.layout.names
Base.haskey(p::Parameters, name) = name in p.layout.names
"""The tensors that are trained."""
trained_tensors(p::Parameters) = p.tensors[1:p.layout.trained_tensors]
"""Number of parameters, trained or not, without the padding of the vector."""
Base.length(p::Parameters) = sum(Int[prod(d) for d in p.layout.dims])

function Base.getindex(p::Parameters, name::AbstractString)
    i = findfirst(==(name), p.layout.names)
    i === nothing && throw(ParameterError("no parameter \"$name\"; there are: $(join(keys(p), ", "))"))
    offset, dims = p.layout.offsets[i], p.layout.dims[i]
    return reshape(view(p.vector, offset+1:offset+prod(dims)), dims...)
end

"""
    as_dict(parameters)

Copies of all tensors by name.
"""
as_dict(p::Parameters) = as_dict(p.layout, p.vector)
as_dict(layout::Layout, vector::Vector) =
    Dict{String,Array{eltype(vector)}}(name => Array(a) for (name, a) in zip(layout.names, views(layout, vector)))

"""
    load!(parameters, values)

Copy values in by name, rounding to this element type. Throws a `ParameterError`, and changes nothing, unless `values`
has exactly these names and sizes.
"""
function load!(p::Parameters, values::AbstractDict)
    missing_ = [name for name in keys(p) if !haskey(values, name)]
    extra = [name for name in keys(values) if !haskey(p, name)]
    if !isempty(missing_) || !isempty(extra)
        parts = ["parameters don't match the model"]
        isempty(missing_) || push!(parts, "missing: $(join(missing_, ", "))")
        isempty(extra) || push!(parts, "not in the model: $(join(extra, ", "))")
        throw(ParameterError(join([parts; "the model has: $(join(keys(p), ", "))"], "; ")))
    end
    for (name, array) in zip(keys(p), p.arrays)
        size(values[name]) == size(array) || throw(ParameterError(
            "parameter $name: expected size $(size(array)), got $(size(values[name]))"))
        eltype(values[name]) <: Real || throw(ParameterError(
            "parameter $name: expected real numbers, got $(eltype(values[name]))"))
    end
    # Of these parameters' own memory, such as two tensors that change places, all is read before any is written.
    given = AbstractArray[Base.mightalias(values[name], p.vector) ? copy(values[name]) : values[name] for name in keys(p)]
    for (array, value) in zip(p.arrays, given)
        array .= value
    end
    return p
end

function Base.show(io::IO, p::Parameters)
    print(io, "Parameters(", length(p), " ", eltype(p), " in ", length(p.tensors), " tensors")
    for (name, array) in zip(keys(p), p.arrays)
        print(io, "\n  ", name, " ", size(array))
    end
    print(io, ")")
end
