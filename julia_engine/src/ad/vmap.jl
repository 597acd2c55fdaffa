# Many samples at once: a function of one sample as a function of many, by the ops' batching rules.
#
# The function is traced on one sample, and the ops of that program are then applied to all samples, which lie along the last
# axis: each op by the rule of its record, those without a rule sample by sample. What does not depend on a sample is
# computed once.

"""
    vmap(f; in_axes=:last, out_axes=:last)

A function that applies `f` to all samples along an axis of its arguments at once.

- `in_axes`: for each argument the axis of the samples, a number or `:last`, or `nothing` for one that all samples share
  (which may then be anything): one for all arguments, or a tuple with one for each; a container of arrays may have a
  container of axes.
- `out_axes`: the same for what `f` returns; `nothing` for what is the same for all samples.

`f` is traced, in every call, on one sample: what holds for compiled functions holds for it. Elementwise ops, reductions,
products, changes of shape, convolutions of a shared weight and lookups are one op for all samples; others (loops, checkpoints,
decompositions, opaque rules, losses of labels) are one for each sample. It nests in all transforms, in itself and in compiled
functions. Random masks cannot be drawn in it: draw them before.

    vmap((a, b) -> sum(a .* b); in_axes=(:last, nothing))([1.0 2.0; 3.0 4.0], [1.0, 1.0]) == [4.0, 6.0]

Throws a `ShapeError` where an argument has no such axis, or lengths differ; a `ConfigurationError` where axes do not fit the
arguments or the result, or nothing is mapped; a `TraceError` for a branch on a value, or a random draw.
"""
vmap(@nospecialize(f); @nospecialize(in_axes=:last), @nospecialize(out_axes=:last)) = Mapped(f, in_axes, out_axes)

"""What [`vmap`](@ref) returns: a struct, as [`Gradient`](@ref) is one."""
struct Mapped <: Function
    f::Any
    in_axes::Any
    out_axes::Any
end
(m::Mapped)(@nospecialize(args...)) = on_all_samples(m.f, m.in_axes, m.out_axes, args)

function on_all_samples(@nospecialize(f), @nospecialize(in_axes), @nospecialize(out_axes), @nospecialize(args))
    in_axes isa Tuple && length(in_axes) != length(args) && throw(ConfigurationError(
        "vmap: in_axes has $(length(in_axes)) items, but the function was called with $(length(args)) arguments"))
    plain, theirs = is_plain(flatten(args)[1]), Any[x for x in flatten(args)[1] if x isa AbstractArray]
    given, samples, all_samples = Any[args...], Tensor[], Tensor[]
    for n in eachindex(given)
        leaves, structure = flatten(args[n])
        along = sample_axes("in_axes", in_axes isa Tuple ? in_axes[n] : in_axes, structure, "argument $n")
        places = paths(structure)
        for (k, axis) in enumerate(along)
            if axis === nothing
                leaves[k] isa AbstractArray{<:Union{Float32,Float64}} && (leaves[k] = as_row(Constant(leaves[k]), is_row(leaves[k])))
                continue
            end
            place = "argument $n$(places[k])"
            x = sampled_operand(leaves[k], place)
            push!(all_samples, moveaxis(x, checked_axis(axis, ndims(x), size(x), place), ndims(x)))
            count, expected = all_samples[end].dims[end], all_samples[1].dims[end]
            count == expected || throw(ShapeError("vmap: $place has $count samples, but the first that is mapped has $expected"))
            leaves[k] = symbol(x.eltype, all_samples[end].dims[1:end-1])
            push!(samples, leaves[k])
        end
        given[n] = unflatten(structure, leaves)
    end
    isempty(samples) && throw(ConfigurationError("vmap: nothing is mapped; in_axes must name an axis of at least one array"))
    level, count = next_level(), all_samples[1].dims[end]
    (outputs, structure), nodes = nested_trace() do
        found, structure = flatten(f(given...))
        Tensor[as_output(x, "vmap") for x in found], structure
    end
    isempty(outputs) && throw(ShapeError("vmap: the function must return arrays, got $structure"))
    drawn = findfirst(x -> (x.op::Op).random, nodes)
    drawn === nothing || throw(TraceError("vmap: random masks cannot be drawn for each sample ($(nodes[drawn].op.name)); draw " *
        "those of all samples before and pass them in"))
    program, outside = close_over(nodes, samples, outputs)
    # Variables of transforms inside are constants from here on.
    outside = Tensor[x.level > level && x.data !== nothing ? detached(x) : x for x in outside]
    found, mapped = batched(program, count, Tensor[all_samples; outside], [trues(length(samples)); falses(length(outside))])
    results = placed(found, mapped, count, out_axes, structure)
    plain = plain && !any(x -> x.requires_grad, results)
    return unflatten(structure, shown(results, plain, theirs))
end

sampled_operand(x::Union{Tensor,AbstractArray{Float64},AbstractArray{Float32}}, ::String) = as_tensor(x)
sampled_operand(x::AbstractArray{<:Integer}, ::String) = index_tensor(x)
sampled_operand(@nospecialize(x), place::String) = throw(ShapeError("vmap: $place must be an array, got $(typeof(x))"))

"""The axis, or `nothing`, for each leaf of a container, from one for all of it or a container of them."""
function sample_axes(name::String, @nospecialize(axes), s::Structure, place::String)
    axes === nothing || axes === :last || (axes isa Integer && !(axes isa Bool)) || s.kind !== :leaf && kind_of(axes) === s.kind ||
        throw(ConfigurationError("vmap: $name for $place must be an axis, :last or nothing" *
            (s.kind === :leaf ? "" : ", or $s of them") * ", got $(repr(axes))"))
    kind_of(axes) === :leaf || axes === nothing || return Any[a
        for (item, child) in zip(items_as(axes, s, "vmap: $name for $place"), s.children) for a in sample_axes(name, item, child, place)]
    return Any[axes for _ in 1:leaf_count(s)]
end

"""The items of a container that has the keys of this structure."""
function items_as(@nospecialize(x), s::Structure, name::String)
    kind = kind_of(x)
    same = kind === :named ? Any[keys(x)...] == s.keys : kind === :dict ? Set{Any}(keys(x)) == Set{Any}(s.keys) :
        length(x) == length(s.children)
    same || throw(ConfigurationError("$name: expected $s, got $(repr(x))"))
    return items(x, kind, s.keys)
end

function checked_axis(@nospecialize(axis), n::Int, dims, place::String)
    d = axis === :last ? n : Int(axis)
    1 <= d <= n || throw(ShapeError("vmap: $place of size $dims has no axis $(repr(axis))"))
    return d
end

"""The results with the axis of the samples where `out_axes` says."""
function placed(found::Vector{Tensor}, mapped::Vector{Bool}, count::Int, @nospecialize(out_axes), structure::Structure)
    axes = sample_axes("out_axes", out_axes, structure, "the function's result")
    return Tensor[placed(y, m, count, axis, "the function's result$path")
                  for (y, m, axis, path) in zip(found, mapped, axes, paths(structure))]
end

function placed(y::Tensor, mapped::Bool, count::Int, @nospecialize(axis), place::String)
    if axis === nothing
        mapped && throw(ConfigurationError("vmap: $place differs from sample to sample, so that out_axes must name an axis for it"))
        return COPY(y)  # what was captured belongs to others
    end
    whole = mapped ? y : COPY(for_each(y, count))
    return moveaxis(whole, ndims(whole), checked_axis(axis, ndims(whole), size(whole), place))
end

# Programs of many samples ---------------------------------------------------------------------------------------------

"""
Apply a program of one sample to `count` of them: its inputs, where `mapped`, have a last axis of samples. Returns the results,
and which of them have that axis; the others are the same for all samples.
"""
function batched(program::Program, count::Int, inputs::Vector{Tensor}, mapped::AbstractVector{Bool})
    here = Dict{Tensor,Tuple{Tensor,Bool}}(x => (y, m) for (x, y, m) in zip(program.inputs, inputs, mapped))
    now = state()
    @entering scope=now.scope begin
        for e in program.equations
            now.scope = e.scope
            given = Tuple{Tensor,Bool}[get(here, x, (x, false)) for x in e.inputs]
            results, flag = on_samples(e.op, count, Bool[m for (_, m) in given], Tensor[x for (x, _) in given], e.attrs)
            for (x, y) in zip(e.outputs, results)
                here[x] = (y, flag)
            end
        end
    end
    found = Tuple{Tensor,Bool}[get(here, x, (x, false)) for x in program.outputs]
    return Tensor[x for (x, _) in found], Bool[m for (_, m) in found]
end

"""The results of an op for all samples, and whether they are mapped."""
function on_samples(op::Op, count::Int, mapped::Vector{Bool}, inputs::Vector{Tensor}, attrs::Attributes)
    any(mapped) || return apply_all(op, inputs, attrs), false
    rule = op.batch === nothing && op.elementwise ? trailing : op.batch
    found = rule === nothing ? nothing : rule(op, count, mapped, inputs, attrs)
    return found === nothing ? one_by_one(op, count, mapped, inputs, attrs) : Tensor[found], true
end

"""The op on one sample after the other."""
function one_by_one(op::Op, count::Int, mapped::Vector{Bool}, inputs::Vector{Tensor}, attrs::Attributes)
    if count == 0
        one = Tensor[symbol(x.eltype, m ? x.dims[1:end-1] : x.dims) for (x, m) in zip(inputs, mapped)]
        return Tensor[Constant(new_array(T, Int[dims; 0])) for (dims, T) in kinds_of(op, one, attrs)]
    end
    rows = [apply_all(op, Tensor[m ? sample_of(x, k) : x for (x, m) in zip(inputs, mapped)], attrs) for k in 1:count]
    return Tensor[joined(Tensor[row[i] for row in rows]) for i in eachindex(rows[1])]
end

sample_of(x::Tensor, k::Int) =
    apply(SLICE, Tensor[x], attributes(:index => Index([[whole_axis(n) for n in x.dims[1:end-1]]; (k, 1, -1)])))

function joined(rows::Vector{Tensor})
    dims, n = rows[1].dims, length(rows)
    return assemble(rows, Index[Index([[whole_axis(m) for m in dims]; (k, 1, -1)]) for k in 1:n], Int[dims; n])
end
