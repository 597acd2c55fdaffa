# The test vectors that both engines share (`tests/vectors/`, described in generate.py there): eagerly and as a tape, in
# Float64 and in Float32. The numpy engine replays the same files in tests/py_engine/test_vectors.py.
#
# The files speak numpy: arrays lie in C order, axes and positions count from 0. An array of shape (a, b, c) there is one
# of size (c, b, a) here, in the same memory, so that axis k of n becomes axis n - k, lists of lengths and of items turn
# round, and the operands of a product change places.

module SharedVectors  # its short names are nobody else's

using Test
using TwinGrad
using TwinGrad.AD: AD, apply
using ..Main: named

const VECTORS = joinpath(@__DIR__, "..", "..", "tests", "vectors")
const BYTES = read(joinpath(VECTORS, "values.bin"))
const ELEMENTS = Dict("float64" => Float64, "int64" => Int64, "bool" => Bool)

numbers(text) = Int[parse(Int, s) for s in split(text, ","; keepempty=false)]

"""The array of an entry `dtype:shape:offset`, or nothing for `-`."""
function stored(entry)
    entry == "-" && return nothing
    dtype, sizes, offset = split(entry, ":")
    dims = reverse(numbers(sizes))
    count, start = prod(dims), parse(Int, offset)
    T = dtype == "float64" ? Float64 : Int64
    elements = T[ltoh(x) for x in reinterpret(T, BYTES[start+1:start+8*count])]
    return reshape(convert(Vector{ELEMENTS[dtype]}, elements), Tuple(dims))
end

struct Vectors
    name::String
    attributes::Dict{String,String}
    operands::Vector{Any}
    upstream::Any
    result::Any
    gradients::Vector{Any}
end

function read_vectors()
    lines = readlines(joinpath(VECTORS, "index.tsv"))
    @assert lines[1] == join(("name", "attributes", "operands", "upstream", "result", "gradients"), "\t")
    return map(lines[2:end]) do line
        name, attributes, operands, upstream, result, gradients = split(line, "\t")
        pairs = [split(s, "="; limit=2) for s in split(attributes, ";"; keepempty=false)]
        Vectors(name, Dict(String(k) => String(v) for (k, v) in pairs), Any[stored(s) for s in split(operands, ";")],
            stored(upstream), stored(result), Any[stored(s) for s in split(gradients, ";")])
    end
end

# What the attributes mean here ------------------------------------------------------------------------------------------

"""Axes of an array of `n` axes: axis k becomes n - k, or -k where it counts from the end."""
axes_here(text, n) = Int[k < 0 ? -k : n - k for k in numbers(text)]
dims_here(a, n) = haskey(a, "axis") ? Tuple(axes_here(a["axis"], n)) : (:)
lengths_here(text) = Tuple(n == -1 ? (:) : n for n in reverse(numbers(text)))

"""One item of an index: a position, or a range from start, count and step."""
function item_here(text)
    occursin(":", text) || return parse(Int, text) + 1
    start, count, step = parse.(Int, split(text, ":"))
    return range(start + 1; step=step, length=count)
end
index_here(text) = [item_here(s) for s in reverse(split(text, ",")) if s != "new"]

"""Positions that count from 1."""
from_one(positions) = map(i -> i + 1, positions)

"""A place as `assemble` wants it: (first, step, count) for each axis."""
place_here(text) = AD.Item[AD.index_item(item, 0) for item in index_here(text)]

"""A permutation: axis i of the result is axis `axes[i]` of the operand, and the result's axes turn round as well."""
permutation_here(text, n) = reverse(axes_here(text, n))

# How each family is called: with the attributes, then the operands. What is in NEW may lack or have axes of length one
# that numpy's result has or lacks (it drops those that it reduces, and adds those of `new`; a product with a vector has
# none): its result is reshaped to the size that the file gives.

const NEW = Set(["sum", "mean", "var", "std", "norm", "max", "min", "logsumexp", "getitem", "slice",
    "matmul", "median", "quantile", "prod", "any", "all", "argmax", "argmin"])
const CALLS = Dict{String,Function}()

for name in ("sum", "mean", "norm", "max", "min", "logsumexp", "prod")
    CALLS[name] = (a, x) -> FUNCTIONS[name](x; dims=dims_here(a, ndims(x)))
end
for name in ("var", "std")
    CALLS[name] = (a, x) -> FUNCTIONS[name](x; dims=dims_here(a, ndims(x)), corrected=get(a, "ddof", "0") == "1")
end
for name in ("any", "all")  # of tensors, though the file's operands are truth values
    CALLS[name] = (a, x) -> FUNCTIONS[name](x isa Tensor ? x : Constant(x); dims=dims_here(a, ndims(x)))
end
for name in ("argmax", "argmin")  # positions count from 0 there
    CALLS[name] = (a, x) -> astype(FUNCTIONS[name](x, dims_here(a, ndims(x))), eltype(x)) .- 1
end
for name in ("softmax", "log_softmax")  # the last axis there is the first one here
    CALLS[name] = (a, x) -> FUNCTIONS[name](x; dims=haskey(a, "axis") ? dims_here(a, ndims(x)) : 1)
end
CALLS["astype"] = (a, x) -> astype(x, Int64)
CALLS["clip"] = (a, x, bounds...) ->
    isempty(bounds) ? clip(x, bound(a, "a_min"), bound(a, "a_max")) : clip(x, bounds...)
bound(a, name) = haskey(a, name) ? parse(Float64, a[name]) : nothing
CALLS["dropout"] = (a, x) -> dropout(x, parse(Float64, a["rate"]), Generator(1))
CALLS["dropout_mask"] = (a, x) -> apply(AD.DROPOUT_MASK, Tensor[x], named(AD.DROPOUT_MASK, parse(Float64, a["rate"]), Generator(1)))

CALLS["reshape"] = (a, x) -> reshape(x, lengths_here(a["shape"]))
CALLS["expand_dims"] = (a, x) -> expand_dims(x, axes_here(a["axis"], ndims(x) + length(numbers(a["axis"]))))
CALLS["squeeze"] = (a, x) -> squeeze(x, dims_here(a, ndims(x)))
CALLS["transpose"] = (a, x) ->
    haskey(a, "axes") ? permutedims(x, permutation_here(a["axes"], ndims(x))) : permutedims(x)
CALLS["swapaxes"] = (a, x) -> swapaxes(x, axes_here(a["axis1"], ndims(x))[1], axes_here(a["axis2"], ndims(x))[1])
CALLS["moveaxis"] = (a, x) -> moveaxis(x, axes_here(a["source"], ndims(x)), axes_here(a["destination"], ndims(x)))
CALLS["broadcast_to"] = (a, x) -> broadcast_to(x, lengths_here(a["shape"]))
CALLS["concatenate"] = (a, xs...) -> concatenate(xs, axes_here(a["axis"], ndims(xs[1]))[1])
CALLS["stack"] = (a, xs...) -> stack(collect(Tensor, xs); dims=axes_here(a["axis"], ndims(xs[1]) + 1)[1])
CALLS["pad"] = (a, x) -> pad(x, reverse(collect(Iterators.partition(numbers(a["pad_width"]), 2)));
    value=parse(Float64, get(a, "constant_values", "0")))
CALLS["getitem"] = CALLS["slice"] = (a, x) -> x[index_here(a["index"])...]
CALLS["flip"] = (a, x) -> reverse(x; dims=dims_here(a, ndims(x)))
CALLS["roll"] = (a, x) -> (axis = axes_here(a["axis"], ndims(x))[1];
    circshift(x, ntuple(d -> d == axis ? parse(Int, a["shift"]) : 0, ndims(x))))
CALLS["repeat"] = (a, x) -> (axis = axes_here(a["axis"], ndims(x))[1];
    repeat(x; inner=ntuple(d -> d == axis ? parse(Int, a["repeats"]) : 1, ndims(x))))
CALLS["tile"] = (a, x) -> repeat(x; outer=reverse(numbers(a["reps"])))
CALLS["diagonal"] = (a, x) -> FUNCTIONS["diagonal"](x, -parse(Int, get(a, "offset", "0")))
CALLS["diagflat"] = (a, x) -> FUNCTIONS["diagflat"](x, -parse(Int, get(a, "k", "0")))
CALLS["tril"] = (a, x) -> FUNCTIONS["triu"](x, -parse(Int, get(a, "k", "0")))  # rows are columns
CALLS["triu"] = (a, x) -> FUNCTIONS["tril"](x, -parse(Int, get(a, "k", "0")))
CALLS["take"] = (a, x, i) -> gather(x, from_one(i); dims=axes_here(a["axis"], ndims(x))[1])
CALLS["take_along_axis"] = (a, x, i) -> take_along_axis(x, from_one(i), axes_here(a["axis"], ndims(x))[1])
for name in ("cumsum", "cumprod", "sort", "diff")
    f = name == "cumsum" ? cumsum : name == "cumprod" ? cumprod : FUNCTIONS[name]
    CALLS[name] = (a, x) -> f(x; dims=axes_here(a["axis"], ndims(x))[1])
end
CALLS["argsort"] = (a, x) -> astype(sortperm_along(x, axes_here(a["axis"], ndims(x))[1]), eltype(x)) .- 1
CALLS["topk"] = (a, x) -> topk(x, parse(Int, a["k"]); dims=axes_here(a["axis"], ndims(x))[1])[1]
CALLS["median"] = (a, x) -> FUNCTIONS["median"](x; dims=dims_here(a, ndims(x)))
CALLS["quantile"] = (a, x) -> FUNCTIONS["quantile"](x, parse(Float64, a["q"]); dims=dims_here(a, ndims(x)))
CALLS["searchsorted"] = (a, x, v) -> astype(AD.searchsorted_places(x, v, a["side"] == "right"), eltype(x)) .- 1
# Matrices are turned over here: their inverses, too, and what is left is right.
CALLS["solve"] = (a, m, b) -> permutedims(permutedims(m) \ permutedims(b))
CALLS["cholesky"] = (a, x) -> FUNCTIONS["cholesky"](positive_definite(x)).U
CALLS["matrix_power"] = (a, x) -> matrix_power(x, parse(Int, a["n"]))
CALLS["pinv"] = (a, x) -> FUNCTIONS["pinv"](x)
CALLS["eigh"] = (a, x) -> ((w, v) = eigh(positive_definite(x)); vcat(w, vec(permutedims(v .^ 2))))
CALLS["svd"] = (a, x) -> ((u, s, v) = AD.svd(permutedims(x)); vcat(s, vec(permutedims(u .^ 2)), vec(v .^ 2)))
CALLS["qr"] = (a, x) -> ((q, r) = AD.qr(permutedims(x)); q = vec(permutedims(q .^ 2)); vcat(q, vec(permutedims(r .^ 2))))
positive_definite(x) = x' * x .+ Constant(Matrix{eltype(x)}([i == j ? i : 0 for i in 1:size(x, 2), j in 1:size(x, 2)]))
CALLS["polygamma"] = (a, x) -> AD.polygamma(parse(Int, a["n"]), x)
CALLS["gather"] = (a, x, i) -> gather(x, from_one(i))
CALLS["scatter"] = (a, g, i) -> apply(AD.SCATTER, Tensor[g, Constant(from_one(i))],
    named(AD.SCATTER, length(numbers(a["shape"])), collect(Int, lengths_here(a["shape"]))))
padding_column(a) = parse(Int, get(a, "padding_index", "-1")) + 1
CALLS["embedding"] = (a, x, i) -> embedding(x, from_one(i); padding_index=padding_column(a))
CALLS["embedding_gradient"] = (a, g, i) ->
    apply(AD.EMBEDDING_GRADIENT, Tensor[g, Constant(from_one(i))], named(AD.EMBEDDING_GRADIENT, parse(Int, a["vocabulary"]), padding_column(a)))
CALLS["assemble"] = (a, xs...) -> AD.assemble(collect(Tensor, xs),
    AD.Index[place_here(s) for s in split(a["places"], "|")], collect(Int, lengths_here(a["shape"])))

# A vector on the left of a product is a column here, and a row there when its place is the second.
CALLS["matmul"] = (a, x, y) -> matmul(ndims(y) == 1 ? reshape(y, 1, :) : y, x)
CALLS["outer"] = (a, x, y) -> outer(y, x)
# Here `dot` is the inner product alone; there it is a product of numbers, of vectors or of matrices.
CALLS["dot"] = (a, x, y) -> ndims(x) == 0 ? x .* y : ndims(x) == ndims(y) == 1 ? dot(x, y) : matmul(y, x)
CALLS["tensordot"] = (a, x, y) -> tensordot(y, x, (axes_here(a["axes_b"], ndims(y)), axes_here(a["axes_a"], ndims(x))))
CALLS["einsum"] = (a, xs...) -> einsum(turned(a["subscripts"]), xs...)
function turned(subscripts)
    operands, result = split(subscripts, "->")
    return join(reverse.(split(operands, ",")), ",") * "->" * reverse(result)
end

# Settings of windows: one number, or one for each spatial axis, the last of which comes first here; of padding a pair.
setting(a, name, default) = haskey(a, name) ? (v = numbers(a[name]); length(v) == 1 ? v[1] : reverse(v)) : default
padding_here(a) = haskey(a, "padding") ? (v = numbers(a["padding"]); length(v) == 1 ? v[1] :
    reverse(collect(Iterators.partition(v, 2)))) : 0
conv_settings(a, n) = Any[AD.each_axis("stride", setting(a, "stride", 1), n, 1), AD.each_side("padding", padding_here(a), n),
    AD.each_axis("dilation", setting(a, "dilation", 1), n, 1), parse(Int, get(a, "groups", "1"))]
pool_settings(a, n) = AD.pool_attrs("pool", n, setting(a, "window", 0), setting(a, "stride", nothing), padding_here(a), setting(a, "dilation", 1))
holds(a, name, default=false) = get(a, name, default ? "1" : "0") == "1"
shape_here(a) = reverse(numbers(a["shape"]))

CALLS["conv"] = (a, x, w) -> conv(x, w; stride=setting(a, "stride", 1), padding=padding_here(a),
    dilation=setting(a, "dilation", 1), groups=parse(Int, get(a, "groups", "1")))
for name in ("conv_input_gradient", "conv_weight_gradient")
    CALLS[name] = (a, g, x) -> apply(TABLE[name], Tensor[g, x], named(TABLE[name], conv_settings(a, ndims(x) - 2)..., shape_here(a)))
end
CALLS["conv_transpose"] = (a, x, w) -> conv_transpose(x, w; stride=setting(a, "stride", 1), padding=padding_here(a),
    output_padding=setting(a, "output_padding", 0), dilation=setting(a, "dilation", 1), groups=parse(Int, get(a, "groups", "1")))
CALLS["max_pool"] = (a, x) -> max_pool(x, setting(a, "window", 0); stride=setting(a, "stride", nothing), padding=padding_here(a),
    dilation=setting(a, "dilation", 1), ceil_mode=holds(a, "ceil_mode"))
CALLS["avg_pool"] = (a, x) -> avg_pool(x, setting(a, "window", 0); stride=setting(a, "stride", nothing), padding=padding_here(a),
    dilation=setting(a, "dilation", 1), ceil_mode=holds(a, "ceil_mode"), count_padding=holds(a, "count_padding", true))
CALLS["interpolate"] = (a, x) -> interpolate(x, Tuple(reverse(numbers(a["size"]))); mode=Symbol(get(a, "mode", "nearest")),
    align_corners=holds(a, "align_corners"))
for name in ("max_pool_gradient", "max_pool_gather")
    CALLS[name] = (a, g, x) -> apply(TABLE[name], Tensor[g, x], pool_settings(a, ndims(x) - 2))
end
CALLS["avg_pool_gradient"] = (a, g) -> apply(TABLE["avg_pool_gradient"], Tensor[g], AD.with(pool_settings(a, ndims(g) - 2), :dims => shape_here(a)))

reduction_of(a) = Symbol(get(a, "reduction", "mean"))
ignored_of(a) = haskey(a, "ignored") ? parse(Int, a["ignored"]) + 1 : nothing
CALLS["softmax_cross_entropy"] = (a, x, labels, weight=nothing) -> softmax_cross_entropy(x, from_one(labels); weight=weight,
    label_smoothing=parse(Float64, get(a, "label_smoothing", "0")), ignored=ignored_of(a), reduction=reduction_of(a))
CALLS["binary_cross_entropy"] = (a, x, t, weight=nothing, positive=nothing) ->
    binary_cross_entropy(x, t; weight=weight, positive_weight=positive, reduction=reduction_of(a))
CALLS["mean_squared_error"] = (a, x, t, weight=nothing) -> mean_squared_error(x, t; weight=weight, reduction=reduction_of(a))
CALLS["one_hot"] = (a, labels) -> one_hot(from_one(labels), parse(Int, a["classes"]); ignored=ignored_of(a), eltype=Int64)

# Axes of normalisation, sorted; what has channels has them last but one.
CALLS["reciprocal_std"] = (a, x) -> apply(AD.RECIPROCAL_STD, Tensor[x],
    named(AD.RECIPROCAL_STD, sort(axes_here(a["axes"], ndims(x))), parse(Float64, a["eps"])))
CALLS["standardize"] = (a, x) -> standardize(x; dims=axes_here(a["axis"], ndims(x)), eps=parse(Float64, a["eps"]))
CALLS["layer_norm"] = (a, x, w, b) -> layer_norm(x, w, b; dims=axes_here(a["axis"], ndims(x)))
CALLS["group_norm"] = (a, x, w, b) -> group_norm(x, parse(Int, a["groups"]), w, b)
CALLS["scaled_dot_product_attention"] = (a, q, k, v, mask=nothing) -> mask isa AbstractArray{Bool} ?
    scaled_dot_product_attention(q, k, v; mask=mask, causal=holds(a, "causal")) :
    scaled_dot_product_attention(q, k, v, mask; causal=holds(a, "causal"))
CALLS["softmax_cross_entropy_gradient"] = (a, g, x, labels) -> AD.SOFTMAX_CROSS_ENTROPY_GRADIENT(g, x,
    apply(AD.LOGSUMEXP, Tensor[x], named(AD.LOGSUMEXP, Int[1], false)), Constant(from_one(labels)))

"""Ops called as they are: those of the table, and functions, with tensors alone."""
plain(name) = (a, xs...) -> (haskey(FUNCTIONS, name) ? FUNCTIONS[name] : TABLE[name])(xs...)

# Replay -----------------------------------------------------------------------------------------------------------------

function call(v::Vectors, @nospecialize(operands))
    y = get(() -> plain(v.name), CALLS, v.name)(v.attributes, operands...)
    return v.name in NEW && size(y) != size(v.result) ? reshape(y, size(v.result)) : y
end

as_array(x::Number) = fill(x)
as_array(x::AbstractArray) = x

function close_enough(found, expected, limit)
    a, b = as_array(found), expected
    size(a) == size(b) || return "size $(size(a)), expected $(size(b))"
    distance, whole = sqrt(sum(abs2, Float64.(a) .- b)), sqrt(sum(abs2, Float64.(b)))
    return distance <= limit * whole ? "" : "relative distance $(distance / whole)"
end

function replayed(v::Vectors, T::DataType)
    limit = T === Float64 ? 1e-10 : 1e-5
    operands = Any[x isa Array{Float64} ? map(T, x) : x for x in v.operands]
    moving = findall(x -> eltype(x) === T, operands)
    f = (xs...) -> begin
        all_of_them = copy(operands)
        all_of_them[moving] .= xs
        call(v, all_of_them)
    end
    problems = String[]
    function compare(what, found, expected)
        problem = close_enough(found, expected, limit)
        eltype(expected) === Float64 && eltype(found) !== T && (problem = "element type $(eltype(found))")
        problem == "" || push!(problems, "$(v.name) $(v.attributes) $(map(size, v.operands)) $T, $what: $problem")
    end
    arrays = operands[moving]
    compare("tape, result", compile(f)(arrays...), v.result)
    if v.upstream === nothing
        compare("eager, result", value(f(Constant.(arrays)...)), v.result)
    else
        y, pull = vjp(f, arrays...)
        compare("eager, result", y, v.result)
        upstream = map(T, v.upstream)
        weighted = (xs...) -> sum(f(xs...) .* Constant(upstream))
        _, replayed_gradients = compile(value_and_grad(weighted; argnums=Tuple(1:length(arrays))))(arrays...)
        for (k, eager, taped) in zip(moving, pull(upstream), replayed_gradients)
            v.gradients[k] === nothing && continue
            compare("eager, gradient $k", eager, v.gradients[k])
            compare("tape, gradient $k", taped, v.gradients[k])
        end
    end
    return problems
end

const ALL_VECTORS = read_vectors()

@testset "shared vectors, $T" for T in (Float64, Float32)
    for v in ALL_VECTORS
        problems = try
            replayed(v, T)
        catch error
            String["$(v.name) $(v.attributes) $(map(size, v.operands)) $T: $(sprint(showerror, error))"]
        end
        @test problems == String[]
    end
end

@testset "every op and function has vectors" begin
    # Fused ops are made by the simplification of graphs alone, and tested against what they stand for.
    fused = [name for (name, op) in TABLE if !isempty(op.fuses)]
    public = setdiff([collect(keys(TABLE)); collect(keys(FUNCTIONS))], fused)
    @test setdiff(public, [v.name for v in ALL_VECTORS]) == []
end

end
