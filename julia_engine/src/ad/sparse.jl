# Sparse Jacobians and Hessians: patterns, colourings, and the few products that are enough for a whole matrix.
#
# The pattern is found by propagating, through the program of the function, which elements of the argument each element of a
# result may depend on: by the ops' records (`sparsity` of `Op`), never by values, so that no entry is missed wherever the
# derivatives happen to be zero. Columns without a row in common have one colour and are computed as one product with the sum
# of their unit vectors; so are rows, in reverse mode. Hessians are symmetric: an entry may be read in its row or in its
# column, so that a star colouring, of fewer colours, is enough.
#
# A. Gebremedhin, F. Manne, A. Pothen: What color is your Jacobian? SIAM Review 47 (2005).
# A. Gebremedhin, A. Tarafdar, F. Manne, A. Pothen: New acyclic and star coloring algorithms with application to computing
# Hessians. SIAM Journal on Scientific Computing 29 (2007).

# SparseArrays is loaded when a sparse matrix is first made: it takes seconds, and nothing else needs it.
const SPARSE_ARRAYS = Base.PkgId(Base.UUID("2f01184e-e22b-5df5-ae63-d93ebab69eaf"), "SparseArrays")
sparse_matrix(rows, columns, @nospecialize(values), dims) =
    Base.invokelatest(getfield(Base.require(SPARSE_ARRAYS), :sparse), rows, columns, values, dims...)

"""Dependences of one variable's elements, at most: more of them are no sparse matrix, and half a gigabyte of memory."""
const MOST_DEPENDENCES = 2^26

"""
    sparsity(f, x)

Which derivatives of a function of one array may be other than zero, wherever it is differentiated: a `SparseMatrixCSC` of
truth values, (elements of the result, elements of `x`), both in the order of memory. Of `x` only size and element type matter.

`f` is traced, as by [`compile`](@ref): it cannot branch on values. Elementwise ops, indexing with constant indices, changes of
shape, reductions and products are followed element by element (of a product all factors count, be they zero or not); any
other op is taken to depend on all elements of its inputs. What `f` captures counts as it is now. So the pattern may have
entries too many, and never one too few.

    Matrix(sparsity(x -> x[2:end] .* x[1:end-1], ones(3))) == [true true false; false true true]
"""
sparsity(f, x) = sparsity_of(f, x)

function sparsity_of(@nospecialize(f), @nospecialize(x))
    check_plain("sparsity", x)
    rows, columns, dims = found_pattern("sparsity", f, x)
    return sparse_matrix(rows, columns, trues(length(rows)), dims)
end

"""
    sparse_jacobian(f, x; pattern=nothing, mode=nothing)

All derivatives of a function of one array, a `SparseMatrixCSC` (elements of the result, elements of `x`), both in the order of
memory, by as few products as its pattern allows. It stores all entries of the pattern.

- `pattern`: where derivatives may be other than zero: a matrix, such as [`sparsity`](@ref) gives; what is not zero counts.
  `nothing` finds it, in every call: give it where the function is differentiated often, or branches on values. It is compared
  with the function by one more product, with a random vector.
- `mode`: `:forward` computes columns together (a product for each colour), `:reverse` rows; `nothing` takes what has fewer
  colours, and forward where they are equal.

Throws a `ConfigurationError` where the pattern misses an entry, and inside other transforms, where [`jacobian`](@ref) works.
"""
sparse_jacobian(f, x; pattern=nothing, mode=nothing) = sparse_jacobian_of(f, x, pattern, mode)

function sparse_jacobian_of(@nospecialize(f), @nospecialize(x), @nospecialize(pattern), @nospecialize(mode))
    name = "sparse_jacobian"
    mode === nothing || Symbol(mode) in (:forward, :reverse) ||
        throw(ConfigurationError("$name: expected the mode :forward or :reverse, got $(repr(mode))"))
    call, dims = one_array_call(name, f, x)
    rows, columns = pattern === nothing ? found_pattern(name, f, x) : given_pattern(name, pattern, dims)
    colors = mode !== nothing && Symbol(mode) === :reverse ? nothing : column_colors(rows, columns, dims)
    if mode === nothing || Symbol(mode) === :reverse
        of_rows = column_colors(columns, rows, reverse(dims))
        if colors === nothing || color_count(of_rows) < color_count(colors)
            found, probe, v = products(call, false, of_rows)
            values = found[of_rows[rows] .+ size(found, 1) .* (columns .- 1)]
            return checked_matrix(call, values, rows, columns, dims, probe, v, true)
        end
    end
    found, probe, v = products(call, true, colors)
    return checked_matrix(call, found[colors[columns] .+ size(found, 1) .* (rows .- 1)], rows, columns, dims, probe, v, false)
end

"""
    sparse_hessian(f, x; pattern=nothing)

All second derivatives of a scalar function of one array, a symmetric `SparseMatrixCSC`, forward over reverse. Of `pattern`, see
[`sparse_jacobian`](@ref), one triangle is enough. Throws as that does.
"""
sparse_hessian(f, x; pattern=nothing) = sparse_hessian_of(f, x, pattern)

function sparse_hessian_of(@nospecialize(f), @nospecialize(x), @nospecialize(pattern))
    name, slope = "sparse_hessian", grad(f)
    call, dims = one_array_call(name, slope, x)
    rows, columns = pattern === nothing ? found_pattern(name, slope, x) : given_pattern(name, pattern, dims)
    both = sort!(unique!([tuple.(rows, columns); tuple.(columns, rows)]))  # symmetric
    rows, columns = first.(both), last.(both)
    colors = star_colors(rows, columns, dims[1])
    found, probe, v = products(call, true, colors)
    # Where row i has no other entry in a column of j's colour it is read there, else in row j.
    count = Dict{Tuple{Int,Int},Int}()
    for (i, j) in both
        count[(i, colors[j])] = get(count, (i, colors[j]), 0) + 1
    end
    read(i, j) = i > j ? read(j, i) : count[(i, colors[j])] == 1 ? found[colors[j], i] : found[colors[i], j]
    return checked_matrix(call, eltype(found)[read(i, j) for (i, j) in both], rows, columns, dims, probe, v, false)
end

# Arguments and results ------------------------------------------------------------------------------------------------

function check_plain(name::String, @nospecialize(x))
    x isa AbstractArray || x isa Tensor || throw(ShapeError("$name: expected one array, got $(typeof(x)); join arrays with vcat"))
    is_plain(Any[x]) || throw(no_tensor(name, "of tensors, inside another transform or in a compiled function"))
    return check_derivative(x, name, 1, "")
end

no_tensor(name::String, where_::String) = ConfigurationError(
    "$name: a sparse matrix is no tensor, so that it cannot be computed $where_; jacobian and hessian can")

function one_array_call(name::String, @nospecialize(f), @nospecialize(x))
    check_plain(name, x)
    call = linearize(name, f, [1], (x,))
    call.plain || throw(no_tensor(name, "of a function that captures a tensor which requires a gradient (but under no_grad)"))
    call.result == LEAF || throw(ShapeError("$name: the function must return one array, got $(call.result)"))
    return call, (length(call.outputs[1]), length(call.variables[1]))
end

function given_pattern(name::String, @nospecialize(pattern), dims)
    pattern isa AbstractMatrix && size(pattern) == dims || throw(ShapeError("$name: expected a pattern of size $dims, got " *
        (pattern isa AbstractArray ? "one of size $(size(pattern))" : string(typeof(pattern)))))
    there = vec(findall(!iszero, pattern))
    return Int[p[1] for p in there], Int[p[2] for p in there]
end

"""The products with the sum of the unit vectors of each colour, as rows; one with a random vector; and that."""
function products(call::Linearized, forward::Bool, colors::Vector{Int})
    x, y = call.variables[1], call.outputs[1]
    given = forward ? x : y
    order = topological_sort(call.outputs, call.level)
    forward || filter!(node -> node !== x, order)
    probe = rand(MersenneTwister(0), length(given)) .+ 0.5  # the same in every call
    results = [begin
        seed = new_array(given.eltype, given.dims)
        k > color_count(colors) ? copyto!(seed, probe) : copyto!(seed, colors .== k)
        t = Constant(seed)
        found = afterwards(() -> forward ? pushed_forward(call.outputs, Dict{Tensor,Tensor}(x => t), order)[1] :
            or_zeros(gradients(Tensor[y], Tensor[t], call.variables; within=order), call.variables)[1], call)
        (convert(Vector{y.eltype}, vec(value(found))), vec(seed))
    end for k in 1:color_count(colors)+1]
    rows = y.eltype[r[1][i] for r in results[1:end-1], i in 1:length(forward ? y : x)]
    return rows, results[end]...
end

"""The matrix, if its product with `v` is what the function itself says."""
function checked_matrix(call::Linearized, values, rows, columns, dims, probe, v, transposed::Bool)
    x, y = call.variables[1], call.outputs[1]
    product, scale = zero(probe), zero(probe)
    for (k, value) in enumerate(values)
        i, j = transposed ? (columns[k], rows[k]) : (rows[k], columns[k])
        product[i] += value * v[j]
        scale[i] += abs(value) * abs(v[j])
    end
    rounding = max(eps(x.eltype), eps(y.eltype))
    largest = maximum([zero(eltype(scale)); filter(isfinite, scale)])
    # Where derivatives are infinite there is nothing to compare.
    wrong = Int[i for i in eachindex(probe) if isfinite(probe[i]) && isfinite(product[i]) &&
        abs(probe[i] - product[i]) > sqrt(rounding) * scale[i] + 100 * rounding * largest]
    isempty(wrong) || throw(ConfigurationError("$(call.name): the pattern misses an entry that is not zero, in " *
        "$(transposed ? "column" : "row") $(wrong[1]) (of $(length(wrong)) that are wrong); sparsity(f, x) finds a pattern, and " *
        "what it traced may have changed since"))
    return sparse_matrix(rows, columns, values, dims)
end

# Colourings -----------------------------------------------------------------------------------------------------------

color_count(colors::Vector{Int}) = maximum([0; colors])

"""
A colour for each column of a pattern, so that columns of one colour have no row in common. Greedy, columns with more entries
first (a distance-2 colouring); 0 for a column without entries.
"""
function column_colors(rows::Vector{Int}, columns::Vector{Int}, dims)
    members, in_row = lists(columns, rows, dims[2]), lists(rows, columns, dims[1])
    colors, taken = zeros(Int, dims[2]), zeros(Int, dims[2] + 1)  # for each colour the last column that it was not free for
    for j in sortperm(length.(members); rev=true, alg=MergeSort)
        isempty(members[j]) && continue
        for i in members[j], k in in_row[i]
            colors[k] == 0 || (taken[colors[k]] = j)
        end
        colors[j] = findfirst(!=(j), taken)
    end
    return colors
end

"""
A colour for each of `n` rows (and columns) of a symmetric pattern: a star colouring. Neighbours differ, and no path of four has
two colours only: of the two places of an entry, one is in a row without another entry of that colour. Greedy, rows with more
entries first.
"""
function star_colors(rows::Vector{Int}, columns::Vector{Int}, n::Int)
    beside = rows .!= columns
    neighbours = lists(rows[beside], columns[beside], n)
    colors, taken = zeros(Int, n), zeros(Int, n + 1)
    hubs = [Set{Int}() for _ in 1:n]  # the colours of its neighbours that have another neighbour of the vertex's own colour
    by_color = [Dict{Int,Int}() for _ in 1:n]  # the first neighbour of each colour
    for v in sortperm(length.(neighbours); rev=true, alg=MergeSort)
        own = by_color[v]
        refuse(set) = for c in set
            taken[c] = v
        end
        for w in neighbours[v]
            colors[w] == 0 && continue
            first_ = get!(own, colors[w], w)
            taken[colors[w]] = v
            if first_ == w
                refuse(hubs[w])  # v would be the end of a path v, w, hub, other
            else
                refuse(keys(by_color[w]))  # between two of one colour, v would be the second vertex of a path
                refuse(keys(by_color[first_]))
            end
        end
        color = colors[v] = findfirst(!=(v), taken)
        for w in neighbours[v]
            colors[w] == 0 && continue
            first_ = get!(by_color[w], color, v)
            first_ == v || (push!(hubs[v], colors[w]); push!(hubs[first_], colors[w]))  # w is a hub of both
            own[colors[w]] == w || (push!(hubs[w], color); push!(hubs[own[colors[w]]], color))  # v is one
        end
    end
    return colors
end

"""The values of each key from 1 to n."""
function lists(keys::Vector{Int}, values::Vector{Int}, n::Int)
    found = [Int[] for _ in 1:n]
    for (key, x) in zip(keys, values)
        push!(found[key], x)
    end
    return found
end

# Patterns -------------------------------------------------------------------------------------------------------------

"""For each element of a variable the elements of the argument that it depends on, ascending."""
const Dependence = Vector{Vector{Int}}

function found_pattern(name::String, @nospecialize(f), @nospecialize(x))
    input = as_tensor(x)
    given = symbol(input.eltype, input.dims)
    (outputs, result), nodes = nested_trace() do
        found, structure = flatten(f(given))
        Tensor[as_output(y, name) for y in found], structure
    end
    result == LEAF || throw(ShapeError("$name: the function must return one array, got $result"))
    found = propagated(name, traced(nodes, Tensor[given], outputs))
    dims = (length(outputs[1]), length(given))
    found === nothing && return Int[], Int[], dims
    return Int[i for i in 1:dims[1] for _ in found[i]], Int[j for columns in found for j in columns], dims
end

function propagated(name::String, program::Program)
    x, y = program.inputs[1], program.outputs[1]
    known = Dict{Tensor,Dependence}(x => [[i] for i in 1:length(x)])
    for e in program.equations
        (e.op.constant || !any(a -> haskey(known, a), e.inputs)) && continue
        given = Union{Nothing,Dependence}[get(known, a, nothing) for a in e.inputs]
        for output in e.outputs
            made = depending(name, e, output, given)
            made === nothing || (known[output] = made)
        end
    end
    return get(known, y, nothing)
end

function depending(name::String, e::Equation, y::Tensor, given::Vector{Union{Nothing,Dependence}})
    pairs = try
        pairs_of(e)
    catch error
        error isa TooManyDependences ? check_dependences(name, e, error.count) : rethrow()
    end
    if pairs === nothing
        columns = joined_columns(Vector{Int}[columns for d in given if d !== nothing for columns in d])
        check_dependences(name, e, length(columns) * length(y))
        return Dependence(fill(columns, length(y)))
    end
    from = [Vector{Int}[] for _ in 1:length(y)]
    for (d, pair) in zip(given, pairs)
        (d === nothing || pair === nothing) && continue
        for (made, read) in zip(pair...)
            push!(from[made], d[read])
        end
    end
    all(isempty, from) && return nothing
    check_dependences(name, e, sum(parts -> sum(Int[length(columns) for columns in parts]), from))
    return Dependence(map(joined_columns, from))
end

"""All columns of these lists, ascending."""
function joined_columns(parts::Vector{Vector{Int}})
    isempty(parts) && return Int[]
    all(x -> x === parts[1], parts) && return parts[1]
    return unique!(sort!(reduce(vcat, parts)))
end

check_dependences(name::String, e::Equation, count::Integer) = count <= MOST_DEPENDENCES || throw(ConfigurationError(
    "$name: by the op \"$(e.op.name)\"$(in_layer(e.scope)), $count derivatives may be other than zero, more than a sparse matrix is " *
    "good for; give the pattern, or use jacobian or hessian"))

"""The op's `sparsity`, from its record."""
function pairs_of(e::Equation)
    op, inputs, attrs = e.op, e.inputs, e.attrs
    op.sparsity === nothing || return op.sparsity(inputs, attrs)
    op.several && return nothing
    dims = output(e).dims
    if op.view !== nothing
        places = new_memory(Float64, inputs[1].dims)
        copyto!(places.root, 1:length(places))
        return Any[(1:prod(dims), Int.(vec(array(compute(op, Memory[places], dims, Float64, attrs)))))]
    end
    return op.elementwise ? each_with_each(inputs, dims) : nothing
end
