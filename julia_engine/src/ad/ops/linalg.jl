# Products: matmul and what can be said with it, and einsum.

# Matrix products ------------------------------------------------------------------------------------------------------
#
# Matrices lie in the first two axes; further axes stack them, and broadcast.

function infer_matmul(inputs, attrs)
    a, b = inputs[1], inputs[2]
    a.dims[2] == b.dims[1] || throw(ShapeError(
        "sizes $(size(a)) and $(size(b)) do not fit: $(a.dims[2]) columns, $(b.dims[1]) rows"))
    stacked = ones(Int, max(ndims(a), ndims(b)) - 2)
    for x in (a, b), d in 3:ndims(x)
        if stacked[d-2] == 1
            stacked[d-2] = x.dims[d]
        elseif x.dims[d] != 1 && x.dims[d] != stacked[d-2]
            throw(ShapeError("the axes after the second of sizes $(size(a)) and $(size(b)) do not fit"))
        end
    end
    return Int[a.dims[1]; b.dims[2]; stacked], check_float(common_eltype(Tensor[a, b]))
end

"""Whether a matrix has its columns or its rows in one piece: what BLAS can read as it lies."""
suits_blas(dims::Vector{Int}, strides::Vector{Int}) =
    leading_dimension(dims, strides, false) > 0 || leading_dimension(dims, strides, true) > 0

"""The leading dimension of a matrix that lies by columns (or, `flipped`, by rows); 0 if it does not lie so."""
function leading_dimension(dims::Vector{Int}, strides::Vector{Int}, flipped::Bool)
    rows, columns = flipped ? (dims[2], dims[1]) : (dims[1], dims[2])
    step, lead = flipped ? (strides[2], strides[1]) : (strides[1], strides[2])
    rows == 1 || step == 1 || return 0
    columns == 1 && return max(rows, 1)
    return lead >= max(rows, 1) ? lead : 0
end

forward_matmul(p, out, inputs, attrs) = emit_matmul!(p, out, inputs[1], inputs[2], 0)

"""out = a b + beta out, one instruction for each run of equally spaced matrices."""
function emit_matmul!(p::Instructions, out::Memory, a::Memory, b::Memory, beta::Int)
    length(out) == 0 && return nothing
    if a.dims[2] == 0
        return beta == 0 ? emit_fill!(p, out, 0) : nothing
    end
    lead = leading_dimension(out.dims, out.strides, false)
    if lead == 0  # the result lies by rows: compute its transpose
        flip(m) = Memory(m.root, m.address, m.eltype, m.dims[[2; 1; 3:end]], m.strides[[2; 1; 3:end]])
        return emit_matmul!(p, flip(out), flip(b), flip(a), beta)
    end
    tiled(out.dims[1], out.dims[2], a.dims[2], a.eltype) && leading_dimension(a.dims, a.strides, false) > 0 ||
        return emit_blas!(p, out, a, b, beta, lead)
    rows = emit_tiles!(p, out, a, b, beta, lead)
    return rows == out.dims[1] ? nothing : emit_blas!(p, rows_after(out, rows), rows_after(a, rows), b, beta, lead)
end

"""The rows after the first `n` of every matrix."""
rows_after(m::Memory, n::Int) =
    Memory(m.root, m.address + n * sizeof(m.eltype), m.eltype, Int[m.dims[1] - n; m.dims[2:end]], m.strides)

function emit_blas!(p::Instructions, out::Memory, a::Memory, b::Memory, beta::Int, lead::Int)
    flipped_a = leading_dimension(a.dims, a.strides, false) == 0
    flipped_b = leading_dimension(b.dims, b.strides, false) == 0
    m, k, n = out.dims[1], a.dims[2], out.dims[2]
    lead_a = leading_dimension(a.dims, a.strides, flipped_a)
    lead_b = leading_dimension(b.dims, b.strides, flipped_b)
    stacked = out.dims[3:end]
    s, s_a, s_b = out.strides[3:end], stack_strides(a, stacked), stack_strides(b, stacked)
    count, steps = coalesced(stacked, Vector{Int}[s, s_a, s_b])
    inner = isempty(count) ? 1 : count[1]
    first(k) = isempty(steps[k]) ? 0 : steps[k][1]
    for place in CartesianIndices(Tuple(count[2:end]))
        offset(k) = sum(Int[(place[d] - 1) * steps[k][d+1] for d in 1:length(place)]) * sizeof(out.eltype)
        emit!(p, out.eltype, :matmul, (out.address + offset(1), a.address + offset(2), b.address + offset(3), NOWHERE),
            NOWHERE, (m, n, k, inner),
            ((lead, first(1), 0, 0), (lead_a, first(2), 0, 0), (lead_b, first(3), 0, 0), NONE),
            (Int(flipped_a), Int(flipped_b), 0, 0), (Float64(beta), 0.0))
    end
    return nothing
end

# Tiles read one operand again and again: as many summands and columns at a time as the second-level cache holds.
const SUMMED_AT_ONCE = 512
const CACHED_BYTES = 512 * 1024

"""
How many summands tiles take at a time of a matrix whose columns lie `bytes_apart`. Columns a multiple of half a page apart
share few sets of the caches, which hold but a small number of them.
"""
summed_at_once(bytes_apart::Int) = bytes_apart % 2048 == 0 ? 64 : SUMMED_AT_ONCE

most_multiplications(bytes::Int) = bytes == 64 ? 1024^3 : 256^3  # beyond that, BLAS's packed operands win

"""Whether a product of m × k by k × n is done by tiles: at least one vector of rows, and not too large."""
function tiled(m::Int, n::Int, k::Int, @nospecialize(T::DataType))
    bytes = Kernels.VECTOR_BYTES[]
    return bytes > 0 && m * sizeof(T) >= bytes && n > 1 && m * n * k <= most_multiplications(bytes)
end

"""
The product by tiles: in bands of as many rows as tiles have, and in pieces that caches hold. Returns how many rows that
are. Rows left over, less than a vector of them, are done together with some that are done already, computed once more;
where the product is added to what is there that cannot be, and they are for BLAS.
"""
function emit_tiles!(p::Instructions, out::Memory, a::Memory, b::Memory, beta::Int, lead::Int)
    T, bytes = out.eltype, Kernels.VECTOR_BYTES[]
    m, k, n = out.dims[1], a.dims[2], out.dims[2]
    stacked = out.dims[3:end]
    count, steps = coalesced(stacked, Vector{Int}[out.strides[3:end], stack_strides(a, stacked), stack_strides(b, stacked)])
    inner = isempty(count) ? 1 : count[1]
    step(j) = isempty(steps[j]) ? 0 : steps[j][1]
    lead_a = leading_dimension(a.dims, a.strides, false)
    summed = min(k, summed_at_once(lead_a * sizeof(T)))
    columns = max(6, CACHED_BYTES ÷ (summed * sizeof(T)) ÷ 6 * 6)
    tiles = bytes == 64 ? ((4, :tiles_64_4), (2, :tiles_64_2), (1, :tiles_64_1)) : ((2, :tiles_32_2), (1, :tiles_32_1))
    row = 0
    for place in CartesianIndices(Tuple(count[2:end])), from in 0:summed:k-1, column in 0:columns:n-1
        offset(j) = sum(Int[(place[d] - 1) * steps[j][d+1] for d in 1:length(place)])
        row = 0
        for (vectors, name) in tiles
            band = vectors * bytes ÷ sizeof(T)
            rows = (m - row) ÷ band * band
            rows == 0 && continue
            at = (out.address + sizeof(T) * (offset(1) + row + column * lead),
                a.address + sizeof(T) * (offset(2) + row + from * lead_a),
                b.address + sizeof(T) * (offset(3) + from * b.strides[1] + column * b.strides[2]), NOWHERE)
            emit!(p, T, name, at, NOWHERE, (rows, min(columns, n - column), min(summed, k - from), inner),
                ((lead, step(1), 0, 0), (lead_a, step(2), 0, 0), (b.strides[1], b.strides[2], step(3), 0), NONE), NONE,
                (from == 0 ? Float64(beta) : 1.0, 0.0))
            row += rows
        end
    end
    rest = bytes ÷ sizeof(T)
    (row == m || beta == 1 || prod(stacked) != inner) && return row
    at = (at_element(out, m - rest), at_element(a, m - rest), b.address, NOWHERE)
    emit!(p, T, tiles[end][2], at, NOWHERE, (rest, n, k, inner),
        ((lead, step(1), 0, 0), (lead_a, step(2), 0, 0), (b.strides[1], b.strides[2], step(3), 0), NONE))
    return m
end

stack_strides(m::Memory, stacked::Vector{Int}) =
    Int[d + 2 > length(m.dims) || (m.dims[d+2] == 1 && stacked[d] != 1) ? 0 : m.strides[d+2] for d in eachindex(stacked)]

"""The two first axes exchanged."""
flipped(x::Tensor) = permuted(x, Int[2; 1; 3:ndims(x)])

function matmul_sparsity(inputs, attrs)
    (a, b), dims = inputs, infer_matmul(inputs, attrs)[1]
    m, n, k, stacked = dims[1], dims[2], a.dims[2], dims[3:end]
    whole = Int[m; n; k; stacked]
    apart(x) = Int[d <= ndims(x) && x.dims[d] != 1 ? dense_strides(x.dims)[d] : 0 for d in 3:length(dims)]
    made = strided(whole, Int[1; m; 0; dense_strides(dims)[3:end]])
    return Any[(made, strided(whole, Int[1; 0; m; apart(a)])), (made, strided(whole, Int[0; k; 1; apart(b)]))]
end

const MATMUL = register!(Op("matmul", infer_matmul; batch=trailing, sparsity=matmul_sparsity, forward=forward_matmul,
    backward=Any[(g, y, inputs, attrs) -> MATMUL(g, flipped(inputs[2])), (g, y, inputs, attrs) -> MATMUL(flipped(inputs[1]), g)],
    jvp=multilinear_jvp("matmul"), accepts=suits_blas,
    doc="matrix product over the first two axes, stacked over the others"))

"""
    matmul(a, b)

Matrix product, as `a * b`; stacks of matrices in further axes are multiplied one by one, and broadcast. A matrix times
an array of columns in more than one axis, (k, ...), is one large product.
"""
function matmul(@nospecialize(x), @nospecialize(y))
    row = is_row(x)
    a, b = as_tensors((x, y))
    ndims(a) > 0 && ndims(b) > 0 ||
        throw(ShapeError("matmul: at least one axis is needed, got sizes $(size(a)) and $(size(b))"))
    ndims(a) == 1 && return matmul(reshape_to(a, Int[length(a), 1]), ndims(b) == 1 ? reshape_to(b, Int[length(b), 1]) : b)
    if ndims(b) == 1
        product = matmul(a, reshape_to(b, Int[length(b), 1]))
        return reshape_to(product, row ? Int[] : Int[product.dims[1]; product.dims[3:end]])
    end
    if ndims(a) == 2 && ndims(b) > 2 && a.dims[2] == b.dims[1]
        # One large product in place of a stack of small ones; the gradient of a becomes one as well.
        columns = apply(MATMUL, Tensor[a, reshape_to(b, Int[b.dims[1], prod(b.dims[2:end])])])
        return reshape_to(columns, Int[a.dims[1]; b.dims[2:end]])
    end
    return as_row(apply(MATMUL, Tensor[a, b]), row && ndims(b) == 2)
end

"""Sum of the products of equal places."""
LinearAlgebra.dot(a::Tensor, b::Union{Tensor,AbstractArray}) = inner_product(a, b)
LinearAlgebra.dot(a::AbstractArray, b::Tensor) = inner_product(a, b)
LinearAlgebra.dot(a::Tensor, b::Real) = product_of_numbers(a, b)
LinearAlgebra.dot(a::Real, b::Tensor) = product_of_numbers(a, b)
product_of_numbers(a, b) = is_scalar(a) && is_scalar(b) ? MUL(a, b) :
    throw(ShapeError("dot: expected two arrays of one size, got sizes $(size(a)) and $(size(b))"))
function inner_product(x, y)
    a, b = as_tensors((x, y))
    a.dims == b.dims || throw(ShapeError("dot: sizes $(size(a)) and $(size(b)) differ"))
    return reshape_to(matmul(reshape_to(a, Int[1, length(a)]), reshape_to(b, Int[length(b), 1])), Int[])
end

"""
    outer(a, b)

All products of an element of `a` with one of `b`, both seen as vectors: `a * b'`.
"""
function outer(x, y)
    a, b = as_tensors((x, y))
    return MUL(reshape_to(a, Int[length(a), 1]), reshape_to(b, Int[1, length(b)]))
end

"""
    tensordot(a, b, dims)

Sum of products over axes of `a` paired with axes of `b`: `dims` is two lists of axes, or the number of the last axes of
`a` to pair with the first of `b`.
"""
function tensordot(x, y, dims)
    a, b = as_tensors((x, y))
    over_a = dims isa Integer ? collect(ndims(a)-dims+1:ndims(a)) : axis_list(dims[1])
    over_b = dims isa Integer ? collect(1:Int(dims)) : axis_list(dims[2])
    fits = length(over_a) == length(over_b) && all(d -> 1 <= d <= ndims(a), over_a) && all(d -> 1 <= d <= ndims(b), over_b)
    fits && a.dims[over_a] == b.dims[over_b] ||
        throw(ShapeError("tensordot: axes $dims of sizes $(size(a)) and $(size(b)) do not pair up"))
    free_a, free_b = setdiff(1:ndims(a), over_a), setdiff(1:ndims(b), over_b)
    left = reshape_to(permuted(a, [free_a; over_a]), Int[prod(a.dims[free_a]), prod(a.dims[over_a])])
    right = reshape_to(permuted(b, [over_b; free_b]), Int[prod(b.dims[over_b]), prod(b.dims[free_b])])
    return reshape_to(apply(MATMUL, Tensor[left, right]), Int[a.dims[free_a]; b.dims[free_b]])
end

# Einstein notation ----------------------------------------------------------------------------------------------------

function infer_einsum(inputs, attrs)
    terms, result = attrs.terms, attrs.result
    lengths = Dict{Char,Int}()
    for (x, term) in zip(inputs, terms)
        length(term) == ndims(x) ||
            throw(ShapeError("subscripts \"$(String(term))\" do not fit an operand of size $(size(x))"))
        for (letter, n) in zip(term, x.dims)
            get!(lengths, letter, n) == n ||
                throw(ShapeError("subscript '$letter' stands for both $(lengths[letter]) and $n"))
        end
    end
    return Int[lengths[letter] for letter in result], check_float(common_eltype(inputs))
end

"""A memory with a letter for each axis, no letter twice."""
struct Labelled
    memory::Memory
    letters::Vector{Char}
end

"""An axis for each letter: a letter that occurs twice is a diagonal, whose stride is the sum of both."""
function diagonal(m::Memory, term::Vector{Char})
    letters = unique(term)
    dims = Int[m.dims[findfirst(==(c), term)] for c in letters]
    strides = Int[sum(m.strides[findall(==(c), term)]) for c in letters]
    return Labelled(Memory(m.root, m.address, m.eltype, dims, strides), letters)
end

axes_of(x::Labelled, letters) = Int[findfirst(==(c), x.letters) for c in letters]
lengths_of(x::Labelled, letters) = x.memory.dims[axes_of(x, letters)]

"""Sum over the letters that nobody else needs."""
function summed!(p::Instructions, x::Labelled, needed)
    gone = Int[d for (d, c) in enumerate(x.letters) if !(c in needed)]
    isempty(gone) && return x
    stay = setdiff(1:length(x.letters), gone)
    out = scratch!(p, x.memory.eltype, x.memory.dims[stay])
    emit_reduction!(p, :sum, 0, out, x.memory, gone)
    return Labelled(out, x.letters[stay])
end

"""The memory as a stack of matrices with these groups of letters, copied where its layout does not allow that."""
function as_matrices!(p::Instructions, x::Labelled, rows, columns, stacked)
    axes = axes_of(x, [rows; columns; stacked])
    m = Memory(x.memory.root, x.memory.address, x.memory.eltype, x.memory.dims[axes], x.memory.strides[axes])
    dims = Int[prod(lengths_of(x, rows)), prod(lengths_of(x, columns)), prod(lengths_of(x, stacked))]
    strides = reshaped_strides(m.dims, m.strides, dims)
    if strides === nothing || !suits_blas(dims, strides)
        copied = scratch!(p, m.eltype, m.dims)
        emit_copy!(p, copied, m)
        return Memory(copied.root, copied.address, copied.eltype, dims, dense_strides(dims))
    end
    return Memory(m.root, m.address, m.eltype, dims, strides)
end

function contracted!(p::Instructions, x::Labelled, y::Labelled, needed)
    both = intersect(x.letters, y.letters)
    stacked = filter(c -> c in needed, both)
    over = setdiff(both, stacked)
    rows, columns = setdiff(x.letters, both), setdiff(y.letters, both)
    letters = [rows; columns; stacked]
    out = scratch!(p, x.memory.eltype, Int[lengths_of(x, rows); lengths_of(y, columns); lengths_of(x, stacked)])
    dims = Int[prod(lengths_of(x, rows)), prod(lengths_of(y, columns)), prod(lengths_of(x, stacked))]
    emit_matmul!(p, Memory(out.root, out.address, out.eltype, dims, dense_strides(dims)),
        as_matrices!(p, x, rows, over, stacked), as_matrices!(p, y, over, columns, stacked), 0)
    return Labelled(out, letters)
end

function forward_einsum(p, out, inputs, attrs)
    terms, result = attrs.terms, attrs.result
    operands = Labelled[diagonal(m, term) for (m, term) in zip(inputs, terms)]
    total = nothing
    for (k, x) in enumerate(operands)
        later = vcat(Char[], Vector{Char}[y.letters for y in operands[k+1:end]]...)
        others = total === nothing ? later : [later; total.letters]
        x = summed!(p, x, [result; others])
        total = total === nothing ? x : contracted!(p, total, x, [result; later])
    end
    total = summed!(p, total, result)
    axes = axes_of(total, result)
    m = total.memory
    return emit_copy!(p, out, Memory(m.root, m.address, m.eltype, m.dims[axes], m.strides[axes]))
end

# The gradient of one operand is an einsum of the upstream gradient with the other operands. A letter that occurs twice
# in the operand (a diagonal) gets a second name, tied to the first by an identity matrix; one that occurs nowhere else
# was summed over alone, so its gradient repeats along it.
function backward_einsum(i, g, y, inputs, attrs)
    terms, result = attrs.terms, attrs.result
    x, term = inputs[i], terms[i]
    operands = Tensor[g; inputs[1:i-1]; inputs[i+1:end]]
    operand_terms = Vector{Char}[[result]; terms[1:i-1]; terms[i+1:end]]
    spare = setdiff(LETTERS, vcat(terms...))
    unique_letters = Char[]
    repeated = Tuple{Int,Int}[]  # the axes of such a letter, the first one and another
    for (letter, n) in zip(term, x.dims)
        if letter in unique_letters
            push!(repeated, (findfirst(==(letter), unique_letters), length(unique_letters) + 1))
            twin = popfirst!(spare)
            push!(operands, Constant(Matrix{x.eltype}(I, n, n)))
            push!(operand_terms, [letter, twin])
            push!(unique_letters, twin)
        else
            push!(unique_letters, letter)
        end
    end
    elsewhere = Set(vcat(operand_terms...))
    wanted = filter(c -> c in elsewhere, unique_letters)
    gradient = apply(EINSUM, operands, attributes(:terms => operand_terms, :result => wanted))
    gradient = reshape_to(gradient, Int[c in elsewhere ? n : 1 for (c, n) in zip(unique_letters, x.dims)])
    for axes in repeated  # beside the diagonal the products above may be 0 times infinity
        n = x.dims[axes[1]]
        diagonal_ = reshape_to(Constant(Matrix{x.eltype}(I, n, n)), Int[d in axes ? n : 1 for d in eachindex(x.dims)])
        gradient = choose(diagonal_, gradient, 0)
    end
    return spread_to(gradient, x.dims)
end

function batch_einsum(op, count, mapped, inputs, attrs)
    each = findfirst(c -> !any(term -> c in term, attrs.terms), 'a':'z')
    each === nothing && return nothing
    letter = ('a':'z')[each]
    terms = [m ? [term; letter] : term for (term, m) in zip(attrs.terms, mapped)]
    return apply(op, inputs, attributes(:terms => terms, :result => [attrs.result; letter]))
end

einsum_sparsity(inputs, attrs) = Any[einsum_pairs(x, term, attrs.result, infer_einsum(inputs, attrs)[1])
                                     for (x, term) in zip(inputs, attrs.terms)]

function einsum_pairs(x::Tensor, term, result, dims::Vector{Int})
    alone = setdiff(term, result)  # the letters that are summed over
    lengths = Int[x.dims[findfirst(==(letter), term)] for letter in alone]
    apart(letter) = sum(Int[step for (other, step) in zip(term, dense_strides(x.dims)) if other == letter])
    whole = Int[dims; lengths]
    return strided(whole, Int[dense_strides(dims); zeros(Int, length(alone))]), strided(whole, map(apart, [result; alone]))
end

const EINSUM = register!(Op("einsum", infer_einsum; batch=batch_einsum, sparsity=einsum_sparsity, forward=forward_einsum, backward=backward_einsum,
    jvp=multilinear_jvp("einsum"), attrs=[:terms, :result], doc="sum of products in Einstein notation"))

const LETTERS = [collect('a':'z'); collect('A':'Z')]

"""
    einsum(subscripts, operands...)

Sum of products in Einstein notation, as numpy's: `einsum("ij,jk->ik", a, b)` is a matrix product.
"""
function einsum(subscripts::AbstractString, @nospecialize(operands...))
    inputs = as_tensors(operands)
    terms, result = parse_einsum(replace(subscripts, " " => ""), inputs)
    stretched = Set(c for (x, term) in zip(inputs, terms) for (c, n) in zip(term, x.dims) if n != 1)
    for (k, (x, term)) in enumerate(zip(inputs, terms))
        length(term) == ndims(x) || continue  # an error, which the op explains
        # An axis of length one broadcasts against a longer one of the same letter: it is dropped there.
        stay = Int[d for d in eachindex(term) if x.dims[d] != 1 || !(term[d] in stretched) || count(==(term[d]), term) > 1]
        inputs[k], terms[k] = reshape_to(x, x.dims[stay]), term[stay]
    end
    return apply(EINSUM, inputs, attributes(:terms => terms, :result => result))
end

"""The operands' and the result's letters, with the implicit forms and `...` spelled out."""
function parse_einsum(subscripts::AbstractString, inputs::Vector{Tensor})
    sides = split(subscripts, "->")
    length(sides) <= 2 || throw(ShapeError("einsum: \"$subscripts\" has more than one ->"))
    parts = String[String(s) for s in split(sides[1], ",")]
    length(parts) == length(inputs) || throw(ShapeError(
        "einsum: \"$subscripts\" names $(length(parts)) operands, got $(length(inputs))"))
    used = Set(join(replace(s, "..." => ""; count=1) for s in [parts; sides[2:end]]))
    used ⊆ LETTERS || throw(ShapeError("einsum: subscripts must be letters, got \"$subscripts\""))
    spare = setdiff(LETTERS, used)
    dots = Int[occursin("...", s) ? ndims(x) - length(replace(s, "..." => "")) : 0 for (s, x) in zip(parts, inputs)]
    minimum(dots) >= 0 || throw(ShapeError("einsum: \"$subscripts\" has more subscripts than an operand has axes"))
    extra = spare[1:maximum(dots)]
    # Axes that `...` stands for are matched from the first on, as broadcasting does here.
    terms = Vector{Char}[collect(replace(s, "..." => String(extra[1:n]))) for (s, n) in zip(parts, dots)]
    letters = vcat(Char[], terms...)
    if length(sides) == 2
        isempty(extra) || occursin("...", sides[2]) || throw(ShapeError(
            "einsum: \"$subscripts\" has no ... in its result for the axes that ... names before"))
        result = collect(replace(String(sides[2]), "..." => String(extra)))
    else
        result = [extra; sort(filter(c -> count(==(c), letters) == 1, setdiff(unique(letters), extra)))]
    end
    allunique(result) && result ⊆ letters || throw(ShapeError(
        "einsum: the result \"$(String(result))\" must use letters of \"$(sides[1])\", each once"))
    return terms, result
end

# Kronecker and cross products -------------------------------------------------------------------------------------------

const Factor = Union{Tensor,AbstractArray}
LinearAlgebra.kron(a::Tensor, b::Union{Factor,Real}) = kronecker(as_tensors((a, b))...)
LinearAlgebra.kron(a::Union{AbstractArray,Real}, b::Tensor) = kronecker(as_tensors((a, b))...)
function kronecker(a::Tensor, b::Tensor)
    n = max(ndims(a), ndims(b))
    length_(x, d) = d <= ndims(x) ? x.dims[d] : 1
    left = reshape_to(a, Int[k for d in 1:n for k in (1, length_(a, d))])
    right = reshape_to(b, Int[k for d in 1:n for k in (length_(b, d), 1)])
    return reshape_to(MUL(left, right), Int[length_(a, d) * length_(b, d) for d in 1:n])
end

LinearAlgebra.cross(a::Tensor, b::Factor) = cross_product(as_tensors((a, b))...)
LinearAlgebra.cross(a::AbstractArray, b::Tensor) = cross_product(as_tensors((a, b))...)
function cross_product(a::Tensor, b::Tensor)
    a.dims == b.dims == [3] || throw(ShapeError("cross: expected vectors of three elements, got sizes $(size(a)) and $(size(b))"))
    return SUB(MUL(circshift(a, -1), circshift(b, -2)), MUL(circshift(a, -2), circshift(b, -1)))
end
