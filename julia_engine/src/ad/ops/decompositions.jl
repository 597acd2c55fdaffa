# Systems of equations and decompositions of matrices.
#
# Where a matrix is singular there is no inverse: a `LinearAlgebraError`, eagerly and in every replay. The decompositions of
# symmetric matrices take their operand for symmetric, and so is the gradient. The vectors of equal eigenvalues, or singular
# values, are any basis of their space and have no derivative: it is NaN, even of a function that does not depend on which (a
# matrix's square root, say), since it follows from the values and vectors together. The values alone have theirs. Nor have the
# vectors that complete those of the thin forms: any basis of the rest of the space is one, and their derivative throws.

check_matrix(x::Tensor) = ndims(x) == 2 ? check_float(x.eltype) : throw(ShapeError("expected a matrix, got size $(size(x))"))
check_square(x::Tensor) = (T = check_matrix(x); x.dims[1] == x.dims[2] ? T :
    throw(ShapeError("expected a square matrix, got size $(size(x))")))

infer_square(inputs, attrs) = (copy(inputs[1].dims), check_square(inputs[1]))
infer_of_square(inputs, attrs) = (Int[], check_square(inputs[1]))

"""The lowering of a function of arrays whose results are to be copied."""
function forward_by(name::String, @nospecialize(f))
    return function (p, out, inputs, attrs)
        outs = out isa Memory ? Memory[out] : out
        return emit_arrays!(p, Decomposition(name, f, length(outs)), outs, inputs)
    end
end

"""A function of arrays whose results are copied to the first `results` arrays that it is called with."""
struct Decomposition
    name::String
    f::Any
    results::Int
end

function (d::Decomposition)(@nospecialize(arrays...))
    given, name = Any[arrays...], d.name
    found = try
        d.f(given[d.results+1:end]...)
    catch error
        error isa Union{SingularException,PosDefException,LAPACKException} || rethrow()
        throw(LinearAlgebraError("$name: the matrix is " * (error isa PosDefException ? "not positive definite" : "singular")))
    end
    found isa Tuple || (found = (found,))
    for k in 1:d.results
        given[k] .= found[k]
    end
    return nothing
end

turned_over(x::Tensor) = permuted(x, Int[2, 1])
times(a::Tensor, b::Tensor) = apply(MATMUL, Tensor[a, b])
scaled_rows(v::Tensor) = reshape_to(v, Int[length(v), 1])
scaled_columns(v::Tensor) = reshape_to(v, Int[1, length(v)])
lower(x::Tensor) = tril(x)
strictly_lower(x::Tensor) = tril(x, -1)
symmetrised(x::Tensor) = MUL(ADD(x, turned_over(x)), 0.5)

# Inverses and determinants ----------------------------------------------------------------------------------------------

function infer_solve(inputs, attrs)
    a, b = inputs
    check_square(a)
    check_matrix(b)
    a.dims[1] == b.dims[1] || throw(ShapeError("$(a.dims[1]) equations do not fit right-hand sides of size $(size(b))"))
    return copy(b.dims), common_eltype(inputs)
end

function solve_jvp(t, y, inputs, attrs)
    right = t[1] === nothing ? t[2] : t[2] === nothing ? NEG(times(t[1], y)) : SUB(t[2], times(t[1], y))
    return SOLVE(inputs[1], right)
end

inverse(x) = (n = LinearAlgebra.checksquare(x); n == 0 ? x : inv(x))
const SOLVE = register!(Op("solve", infer_solve; forward=forward_by("solve", (a, b) -> isempty(b) ? b : lu(a) \ b),
    backward=Any[(g, y, inputs, attrs) -> NEG(times(SOLVE(turned_over(inputs[1]), g), turned_over(y))),
        (g, y, inputs, attrs) -> SOLVE(turned_over(inputs[1]), g)],
    jvp=solve_jvp, doc="x with a x = b, for a square matrix a"))
const INV = register!(Op("inv", infer_square; forward=forward_by("inv", inverse),
    backward=Any[(g, y, inputs, attrs) -> NEG(times(times(turned_over(y), g), turned_over(y)))],
    jvp=(t, y, inputs, attrs) -> NEG(times(times(y, t[1]), y)), doc="inverse of a square matrix"))
trace_of_product(a, b) = sum(MUL(a, turned_over(b)))
const DET = register!(Op("det", infer_of_square; forward=forward_by("det", det),
    backward=Any[(g, y, inputs, attrs) -> MUL(MUL(g, y), turned_over(INV(inputs[1])))],
    jvp=(t, y, inputs, attrs) -> MUL(y, trace_of_product(INV(inputs[1]), t[1])),
    doc="determinant of a square matrix; its derivative needs the inverse"))
const LOGABSDET = register!(Op("logabsdet", infer_of_square; forward=forward_by("logabsdet", x -> logabsdet(x)[1]),
    backward=Any[(g, y, inputs, attrs) -> MUL(g, turned_over(INV(inputs[1])))],
    jvp=(t, y, inputs, attrs) -> trace_of_product(INV(inputs[1]), t[1]),
    doc="logarithm of the absolute value of the determinant"))
const DETSIGN = register!(Op("detsign", infer_of_square; forward=forward_by("logabsdet", x -> logabsdet(x)[2]), constant=true,
    doc="sign of the determinant"))

Base.inv(x::Tensor) = is_scalar(x) ? RECIPROCAL(x) : INV(x)
LinearAlgebra.det(x::Tensor) = DET(x)
LinearAlgebra.logabsdet(x::Tensor) = (LOGABSDET(x), DETSIGN(x))
left_quotient(a, b) = is_scalar(a) ? quotient(b, a) : solved(as_tensors((a, b))...)
function solved(a::Tensor, b::Tensor)
    ndims(b) == 1 && return vec(solved(a, scaled_rows(b)))
    ndims(a) == 2 && a.dims[1] != a.dims[2] && ndims(b) == 2 && a.dims[1] == b.dims[1] || return SOLVE(a, b)
    # Least squares; of many solutions the shortest.
    return times(pinv(a; rtol=minimum(a.dims) * eps(check_float(common_eltype(Tensor[a, b])))), b)
end

"""
    matrix_power(x, n)

The product of `n` equal square matrices, of their inverses where `n` is negative: `x^n` of a matrix.
"""
function matrix_power(x::Tensor, n::Integer)
    check_square(x)
    n < 0 && return matrix_power(INV(x), -n)
    n == 0 && return WHERE(EQUAL(x, x), Constant(Matrix{x.eltype}(I, x.dims...)), Constant(Matrix{x.eltype}(I, x.dims...)))
    n == 1 && return x
    half = matrix_power(x, n ÷ 2)
    whole_ = times(half, half)
    return isodd(n) ? times(whole_, x) : whole_
end

# Cholesky -----------------------------------------------------------------------------------------------------------------

halved(x::Tensor) = MUL(ADD(lower(x), strictly_lower(x)), 0.5)

function backward_cholesky(g, y, inputs, attrs)
    inner = halved(times(turned_over(y), lower(g)))
    right = SOLVE(turned_over(y), inner)
    return symmetrised(turned_over(SOLVE(turned_over(y), turned_over(right))))
end

function push_cholesky(t, y, inputs, attrs)
    left = SOLVE(y, symmetrised(t[1]))
    return times(y, halved(SOLVE(y, turned_over(left))))
end

const CHOLESKY = register!(Op("cholesky", infer_square; forward=forward_by("cholesky", x -> cholesky(Symmetric(x, :L)).L),
    backward=Any[backward_cholesky], jvp=push_cholesky,
    doc="lower triangular l with l l' = x, for symmetric positive definite x"))
LinearAlgebra.cholesky(x::Tensor) = (l = CHOLESKY(x); (L=l, U=turned_over(l)))

# Decompositions with several results ------------------------------------------------------------------------------------------

decomposition(name, f, infer, backward, jvp, doc) = register!(Op(name, infer; several=true, forward=forward_by(name, f),
    backward=Joint(backward), jvp=jvp, doc=doc))

"""1 / (v[j] - v[i]) for i ≠ j, NaN where these are equal, and 0 for i = j."""
function gaps(v::Tensor)
    n = v.dims[1]
    differences = SUB(scaled_columns(v), scaled_rows(v))
    same = EQUAL(differences, 0)
    unknown = Constant(v.eltype[i == j ? 0 : NaN for i in 1:n, j in 1:n])
    return choose(same, unknown, DIV(1, choose(same, 1, differences)))
end

"""
s[j] / (s[j]² - s[i]²) and s[i] / (s[j]² - s[i]²), each as `gaps` has it for i ≠ j, i = j and equals.

By differences and sums, since squares may overflow or vanish; halved, since sums may overflow.
"""
function between_squares(s::Tensor)
    between, half = gaps(s), MUL(s, 0.5)
    row, column = scaled_columns(half), scaled_rows(half)
    sums = ADD(row, column)
    sums = choose(EQUAL(sums, 0), 1, sums)
    return MUL(between, DIV(row, sums)), MUL(between, DIV(column, sums))
end

diagonal_matrix(v::Tensor) = diagm(v, 0)

function backward_eigh(cotangents, node, inputs, needs_grad)
    by_values, by_vectors = cotangents
    values_, vectors = node.results
    inner = by_values === nothing ? nothing : diagonal_matrix(by_values)
    if by_vectors !== nothing
        turned = MUL(gaps(values_), times(turned_over(vectors), by_vectors))
        inner = inner === nothing ? turned : ADD(inner, turned)
    end
    return Any[inner === nothing ? nothing : symmetrised(times(times(vectors, inner), turned_over(vectors)))]
end

function push_eigh(t, results, inputs, attrs)
    values_, vectors = results
    inner = times(times(turned_over(vectors), symmetrised(t[1])), vectors)
    return Any[diag(inner), times(vectors, MUL(gaps(values_), inner))]
end

infer_eigh(inputs, attrs) = (T = check_square(inputs[1]); Kind[(Int[inputs[1].dims[1]], T), (copy(inputs[1].dims), T)])
const EIGH = decomposition("eigh", x -> (e = eigen(Symmetric(x, :L)); (e.values, e.vectors)), infer_eigh, backward_eigh, push_eigh,
    "eigenvalues, rising, and eigenvectors of symmetric x")

"""
    eigh(x)

The eigenvalues, rising, and the eigenvectors, as columns, of a symmetric matrix: `eigen(Symmetric(x))`.
"""
eigh(x::Tensor) = ((values_, vectors) = apply_several(EIGH, Tensor[x], NO_ATTRS); (values=values_, vectors=vectors))

function backward_svd(cotangents, node, inputs, needs_grad)
    by_u, by_s, by_vt = cotangents
    u, s, vt = node.results
    v = turned_over(vt)
    row = scaled_columns(s)
    by_row, by_column = between_squares(s)
    m, n = inputs[1].dims
    terms = Tensor[]
    by_s === nothing || push!(terms, times(times(u, diagonal_matrix(by_s)), vt))
    if by_u !== nothing
        turned = times(turned_over(u), by_u)
        push!(terms, times(times(u, MUL(by_row, SUB(turned, turned_over(turned)))), vt))
        m > n && push!(terms, times(DIV(SUB(by_u, times(u, turned)), row), vt))  # else nothing is outside, but rounding
    end
    if by_vt !== nothing
        by_v = turned_over(by_vt)
        turned = times(vt, by_v)
        push!(terms, times(times(u, MUL(by_column, SUB(turned, turned_over(turned)))), vt))
        n > m && push!(terms, times(u, turned_over(DIV(SUB(by_v, times(v, turned)), row))))
    end
    return Any[isempty(terms) ? nothing : folded(ADD, terms)]
end

function push_svd(t, results, inputs, attrs)
    u, s, vt = results
    v = turned_over(vt)
    row = scaled_columns(s)
    inner = times(times(turned_over(u), t[1]), v)
    by_row, by_column = between_squares(s)
    by_u = times(u, ADD(MUL(by_row, inner), MUL(by_column, turned_over(inner))))
    by_v = times(v, ADD(MUL(by_column, inner), MUL(by_row, turned_over(inner))))
    m, n = inputs[1].dims
    if m > n  # else nothing is outside, but what rounding leaves
        moved = DIV(times(t[1], v), row)
        by_u = ADD(by_u, SUB(moved, times(u, times(turned_over(u), moved))))
    end
    if n > m
        moved = DIV(times(turned_over(t[1]), u), row)
        by_v = ADD(by_v, SUB(moved, times(v, times(vt, moved))))
    end
    return Any[by_u, diag(inner), turned_over(by_v)]
end

function infer_svd(inputs, attrs)
    T = check_matrix(inputs[1])
    m, n = inputs[1].dims
    k = min(m, n)
    return Kind[(Int[m, k], T), (Int[k], T), (Int[k, n], T)]
end
# Of no rows LinearAlgebra's has more vectors than the thin form.
thin_svd(x) = isempty(x) ? (zeros(size(x, 1), 0), zeros(0), zeros(0, size(x, 2))) : (f = svd(x); (f.U, f.S, f.Vt))
const SVD = decomposition("svd", thin_svd, infer_svd, backward_svd, push_svd,
    "u, s and v' of the singular value decomposition x = u diag(s) v', in its thin form")

no_rest(given...) = throw(NotDifferentiableError("svd: the vectors that complete those of a matrix that is not square have no " *
    "derivative: any basis of what is left of the space would do; take svd(x)"))
function infer_rest(inputs, attrs)
    T = check_matrix(inputs[1])
    m, n = inputs[1].dims
    return Int[m, m-n], T
end
rest_of(x) = (n = size(x, 2); n == 0 ? Matrix{eltype(x)}(I, size(x, 1), size(x, 1)) : (qr(x).Q * Matrix{eltype(x)}(I, size(x, 1), size(x, 1)))[:, n+1:end])
const REST = Op("rest", infer_rest; forward=forward_by("svd", rest_of), backward=Any[no_rest], jvp=no_rest,
    doc="columns that complete orthonormal ones to a basis")
completed(x::Tensor) = x.dims[1] > x.dims[2] ? hcat(x, apply(REST, Tensor[x], NO_ATTRS)) : x

function LinearAlgebra.svd(x::Tensor; full::Bool=false, kinds...)
    refuse_keywords("svd", kinds)
    u, s, vt = apply_several(SVD, Tensor[x], NO_ATTRS)
    v = turned_over(vt)
    full || return (U=u, S=s, V=v, Vt=vt)
    v = completed(v)
    return (U=completed(u), S=s, V=v, Vt=turned_over(v))
end
LinearAlgebra.svdvals(x::Tensor) = svd(x).S

function backward_qr(cotangents, node, inputs, needs_grad)
    by_q, by_r = cotangents
    q, r = node.results
    inner = by_r === nothing ? nothing : times(r, turned_over(triu(by_r)))
    if by_q !== nothing
        product_ = times(turned_over(by_q), q)
        inner = inner === nothing ? NEG(product_) : SUB(inner, product_)
    end
    inner === nothing && return Any[nothing]
    total = times(q, ADD(lower(inner), turned_over(strictly_lower(inner))))
    by_q === nothing || (total = ADD(by_q, total))
    return Any[turned_over(SOLVE(r, turned_over(total)))]
end

function push_qr(t, results, inputs, attrs)
    q, r = results
    moved_ = turned_over(SOLVE(turned_over(r), turned_over(t[1])))
    inner = times(turned_over(q), moved_)
    below = strictly_lower(inner)
    rest = SUB(inner, SUB(below, turned_over(below)))
    return Any[SUB(moved_, times(q, rest)), times(rest, r)]
end

function infer_qr(inputs, attrs)
    T = check_matrix(inputs[1])
    m, n = inputs[1].dims
    m >= n || throw(ShapeError("expected at least as many rows as columns, got size $(size(inputs[1]))"))
    return Kind[(Int[m, n], T), (Int[n, n], T)]
end
const QR = decomposition("qr", x -> (f = qr(x); (Matrix(f.Q)[:, 1:size(x, 2)], f.R)), infer_qr, backward_qr, push_qr,
    "q, orthonormal, and r, upper triangular, of x = q r")
function LinearAlgebra.qr(x::Tensor)
    check_matrix(x)
    m, n = x.dims
    q, r = apply_several(QR, Tensor[m < n ? x[:, 1:m] : x], NO_ATTRS)
    return (Q=q, R=m < n ? hcat(r, times(turned_over(q), x[:, m+1:n])) : r)
end

# Inverses of other matrices -----------------------------------------------------------------------------------------------------

"""
What singular values that were cut off, without being 0, add to the derivative of a pseudo-inverse.

With the factors x = u diag(s) v' and m = u' dx v it is v (k + l') u', of k = far .* m' + near .* m and l = far .* m +
near .* m', by the singular subspaces of those kept and those cut, which turn towards each other. Returns u, v, far and near;
`nothing` where what is cut off is rounding.
"""
function between_kept_and_cut(x::Tensor, rtol::Float64)
    (rtol <= 16 * eps(x.eltype) * maximum(x.dims) || length(x) == 0) && return nothing
    u, s, vt = apply_several(SVD, Tensor[x], NO_ATTRS)
    row, column, cut = scaled_columns(s), scaled_rows(s), MUL(s[1], rtol)
    of_pairs(inside, outside) = choose(GREATER(row, cut), choose(GREATER(column, cut), outside, inside), outside)
    gap = MUL(MUL(SUB(row, column), ADD(row, column)), row)
    near = DIV(of_pairs(column, 0), of_pairs(gap, 1))
    return u, turned_over(vt), MUL(near, DIV(column, of_pairs(row, 1))), near
end

"""The derivative among matrices of one rank, by a tangent or cotangent `m`, with what the cut adds."""
function with_cut(found::Tensor, m::Tensor, x::Tensor, rtol::Float64, pulled::Bool)
    parts = between_kept_and_cut(x, rtol)
    parts === nothing && return found
    u, v, far, near = parts
    left, right = pulled ? (v, u) : (u, v)
    inner = times(times(turned_over(left), m), right)
    turned = turned_over(inner)
    moved = ADD(ADD(MUL(near, inner), MUL(far, turned)), turned_over(ADD(MUL(far, inner), MUL(near, turned))))
    return ADD(found, times(times(right, moved), turned_over(left)))
end

function backward_pinv(g, y, inputs, attrs)
    x, = inputs
    yt, gt = turned_over(y), turned_over(g)
    left, right = times(gt, times(y, yt)), times(times(yt, y), gt)
    found = SUB(SUB(left, times(x, times(y, left))), times(times(yt, g), yt))
    return with_cut(SUB(ADD(found, right), times(times(right, y), x)), g, x, attrs.rtol, true)
end

function push_pinv(t, y, inputs, attrs)
    x, = inputs
    yt, tt = turned_over(y), turned_over(t[1])
    left, right = times(times(y, yt), tt), times(tt, times(yt, y))
    found = SUB(SUB(left, times(times(left, x), y)), times(times(y, t[1]), y))
    return with_cut(SUB(ADD(found, right), times(y, times(x, right))), t[1], x, attrs.rtol, false)
end

const PINV = register!(Op("pinv", (inputs, attrs) -> (T = check_matrix(inputs[1]); (reverse(inputs[1].dims), T));
    forward=(p, out, inputs, attrs) -> forward_by("pinv", x -> pinv(x; rtol=attrs.rtol))(p, out, inputs, attrs),
    backward=Any[backward_pinv], jvp=push_pinv, attrs=[:rtol],
    doc="pseudo-inverse; its derivative is that among matrices with as many singular values above the cut"))
LinearAlgebra.pinv(x::Tensor; rtol::Real=eps(check_matrix(x)) * minimum(x.dims)) = apply(PINV, Tensor[x], attributes(:rtol => Float64(rtol)))
