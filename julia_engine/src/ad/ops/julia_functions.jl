# Julia's functions that are made of ops, and that only Julia has a name for; the numpy engine has a file of numpy's.

# Elementary functions -------------------------------------------------------------------------------------------------

"""
Sine and cosine of an angle of which a quarter turn is `quarter`: whole turns are taken off without rounding, and what is left of
whole quarter turns is small, so that they are exact there.
"""
function turned_by(x::Tensor, quarter::Real)
    x = FMOD(x, 4 * quarter)
    whole_ = ROUND(DIV(x, quarter))
    rest = MUL(SUB(x, MUL(whole_, quarter)), pi / 2 / quarter)
    turns, s, c = MOD(whole_, 4), SIN(rest), COS(rest)
    pick(a, b, c_, d) = choose(EQUAL(turns, 0), a, choose(EQUAL(turns, 1), b, choose(EQUAL(turns, 2), c_, d)))
    return pick(s, c, SUB(0, s), NEG(c)), pick(c, SUB(0, s), NEG(c), s)
end

"""The sign of zero counts, so that acot jumps there, and its derivatives are those on both sides."""
inverse_cotangent(x::Tensor) = (side = COPYSIGN(1, x); ARCTAN2(side, MUL(side, x)))

"""`y` where x is not 0, and a zero of the sign of x where it is."""
or_zero(y::Tensor, x::Tensor) = choose(EQUAL(x, 0), x, y)

"""1 / cosh(x), or 1 / sinh(x), by an exponential where both are that many times larger than what they lack of it."""
function far_out(x::Tensor, f, sign_)
    far = GREATER(ABS(x), 30)
    return choose(far, MUL(MUL(EXP(NEG(ABS(x))), 2), sign_), RECIPROCAL(f(choose(far, 1, x))))
end

for (f, value_) in ((:exp10, x -> elementwise_power(10, x)), (:sec, x -> RECIPROCAL(COS(x))), (:csc, x -> RECIPROCAL(or_zero(SIN(x), x))),
        (:cot, x -> RECIPROCAL(or_zero(TAN(x), x))), (:asec, x -> ARCCOS(RECIPROCAL(x))), (:acsc, x -> ARCSIN(RECIPROCAL(x))),
        (:acot, inverse_cotangent), (:sech, x -> far_out(x, COSH, 1)), (:csch, x -> far_out(x, SINH, SIGN(x))),
        (:coth, x -> RECIPROCAL(TANH(x))), (:asech, x -> ARCCOSH(RECIPROCAL(x))), (:acsch, x -> ARCSINH(RECIPROCAL(x))),
        (:acoth, x -> ARCTANH(RECIPROCAL(x))), (:sinpi, x -> turned_by(x, 0.5)[1]), (:cospi, x -> turned_by(x, 0.5)[2]),
        (:sind, x -> turned_by(x, 90)[1]), (:cosd, x -> turned_by(x, 90)[2]), (:tand, x -> DIV(turned_by(x, 90)...)))
    @eval begin
        DOTTED[$f] = $value_
        Base.$f(x::Elements) = of_elements($value_, (x,))
        Base.$f(x::Tensor) = is_scalar(x) ? $value_(x) : throw(ShapeError($("$f: expected a number, got an array; use $f.(x)")))
    end
end
# Of numbers and tensors together, so that the numbers become the tensors' element type.
DOTTED[muladd] = (a, b, c) -> ((a, b, c) = as_tensors((a, b, c)); ADD(MUL(a, b), c))
DOTTED[flipsign] = (a, b) -> ((a, b) = as_tensors((a, b)); MUL(a, COPYSIGN(1, b)))

# Arrays ---------------------------------------------------------------------------------------------------------------

Base.rotl90(x::Tensor) = reverse(permutedims(x); dims=1)
Base.rotr90(x::Tensor) = reverse(permutedims(x); dims=2)
Base.rot180(x::Tensor) = reverse(x; dims=(1, 2))
Base.rotl90(x::Tensor, k::Integer) = (turns = mod(k, 4); turns == 0 ? COPY(x) : turns == 1 ? rotl90(x) : turns == 2 ? rot180(x) : rotr90(x))
Base.rotr90(x::Tensor, k::Integer) = rotl90(x, -k)
Base.rot180(x::Tensor, k::Integer) = rotl90(x, 2k)

Base.selectdim(x::Tensor, d::Integer, i) = (axis_along("selectdim", x, d); x[(k == d ? i : Colon() for k in 1:ndims(x))...])
Base.eachcol(x::Tensor) = (x[:, k] for k in 1:size(x, 2))
Base.eachrow(x::Tensor) = (x[k, (Colon() for _ in 2:ndims(x))...] for k in 1:size(x, 1))
Base.eachslice(x::Tensor; dims::Integer) = (selectdim(x, dims, k) for k in 1:size(x, axis_along("eachslice", x, dims)))
Base.partialsort(x::Tensor, places::Union{Integer,AbstractUnitRange{<:Integer}}; rev::Bool=false, kinds...) =
    (refuse_keywords("partialsort", kinds); sort(x; rev=rev)[places])

# As for arrays, numbers for all elements, or pairs for those of a matrix.
Base.eachindex(x::Tensor) = Base.OneTo(length(x))
Base.LinearIndices(x::Tensor) = LinearIndices(size(x))
Base.CartesianIndices(x::Tensor) = CartesianIndices(size(x))
Base.keys(x::Tensor) = ndims(x) == 1 ? eachindex(x) : CartesianIndices(x)
Base.pairs(x::Tensor) = (k => x[k] for k in keys(x))

Base.accumulate(::typeof(+), x::Tensor; dims=nothing) = cumsum(x; dims=dims)
Base.accumulate(::typeof(*), x::Tensor; dims=nothing) = cumprod(x; dims=dims)

# The identity matrix, of the size beside it ------------------------------------------------------------------------------

function scaled_identity(x::Tensor, s::UniformScaling)
    check_square(x)
    return as_tensor(Matrix{x.eltype}(s, x.dims[1], x.dims[1]))
end
Base.:+(x::Tensor, s::UniformScaling) = ADD(x, scaled_identity(x, s))
Base.:+(s::UniformScaling, x::Tensor) = ADD(x, scaled_identity(x, s))
Base.:-(x::Tensor, s::UniformScaling) = SUB(x, scaled_identity(x, s))
Base.:-(s::UniformScaling, x::Tensor) = SUB(scaled_identity(x, s), x)
Base.:*(x::Tensor, s::UniformScaling) = product(x, s.λ)
Base.:*(s::UniformScaling, x::Tensor) = product(x, s.λ)

# Norms and determinants -------------------------------------------------------------------------------------------------

"""The norm of any order `p`, by elements scaled to the one that counts most; subgradient 0 at the origin."""
function norm_of_order(x::Tensor, p::Real, dims)
    isempty(x.dims) || length(x) > 0 || return norm(x; dims=dims)
    p == Inf && return maximum(abs.(x); dims=dims)
    p == -Inf && return minimum(abs.(x); dims=dims)
    p == 0 && return count(x; dims=dims)
    axes_ = normalize_axes(dims, ndims(x))
    sizes = ABS(x)
    most = STOP_GRADIENT(apply(p < 0 ? MIN : MAX, Tensor[sizes], attributes(:axes => axes_, :keep => true)))
    scale = choose(LOGICAL_AND(GREATER(most, 0), ISFINITE(most)), most, 1)
    total = apply(SUM, Tensor[elementwise_power(DIV(sizes, scale), p)], attributes(:axes => axes_, :keep => true))
    empty_ = p > 0 ? EQUAL(total, 0) : ISINF(total)
    y = MUL(scale, choose(empty_, 0, elementwise_power(choose(empty_, 1, total), 1 / p)))
    return reshape_to(y, reduced_dims(x.dims, axes_, !(dims isa Colon)))
end

"""The largest factor by which a matrix makes a vector longer, in the norm of order 1, 2 or Inf."""
function LinearAlgebra.opnorm(x::Tensor, p::Real=2)
    check_matrix(x)
    p in (1, 2, Inf) || throw(ConfigurationError("opnorm: p must be 1, 2 or Inf, got $p"))
    length(x) == 0 && return sum(x)
    return p == 2 ? svdvals(x)[1] : maximum(sum(abs.(x); dims=p == 1 ? 1 : 2))
end
function LinearAlgebra.cond(x::Tensor, p::Real=2)
    p == 2 || return opnorm(x, p) * opnorm(inv(x), p)
    check_matrix(x)
    s = svdvals(x)
    return choose(EQUAL(s[1], 0), Inf, s[1] / s[length(s)])
end

"""The number of singular values above `rtol` times the largest; constant."""
function LinearAlgebra.rank(x::Tensor; atol::Real=0, rtol::Real=atol > 0 ? 0 : minimum(x.dims) * eps(x.eltype))
    check_matrix(x)
    s = STOP_GRADIENT(svdvals(x))
    return length(s) == 0 ? sum(s) : sum(GREATER(s, MAXIMUM(MUL(s[1], rtol), atol)))
end

"""log(det(x)); NaN where the determinant is negative."""
LinearAlgebra.logdet(x::Tensor) = ADD(LOGABSDET(x), LOG(DETSIGN(x)))
LinearAlgebra.normalize(x::Tensor, p::Real) = x ./ norm(x, p)
LinearAlgebra.normalize(x::Tensor) = normalize(x, 2)

# Matrices of a structure -------------------------------------------------------------------------------------------------

"""`Symmetric(x)` of a tensor: the matrix that has one triangle of `x` on both sides."""
struct SymmetricTensor <: StructuredTensor
    tensor::Tensor
end
as_tensor(x::SymmetricTensor, @nospecialize(T)=Float64) = x.tensor
function LinearAlgebra.Symmetric(x::Tensor, uplo::Symbol=:U)
    check_square(x)
    uplo in (:U, :L) || throw(ConfigurationError("Symmetric: expected :U or :L, got $(repr(uplo))"))
    one_side, rest = uplo === :U ? (triu(x), triu(x, 1)) : (tril(x), tril(x, -1))
    return SymmetricTensor(ADD(one_side, turned_over(rest)))
end
LinearAlgebra.Hermitian(x::Tensor, uplo::Symbol=:U) = Symmetric(x, uplo)
LinearAlgebra.eigen(x::SymmetricTensor) = eigh(x.tensor)
LinearAlgebra.eigvals(x::SymmetricTensor) = eigh(x.tensor).values
LinearAlgebra.eigvecs(x::SymmetricTensor) = eigh(x.tensor).vectors
LinearAlgebra.eigmin(x::SymmetricTensor) = eigvals(x)[1]
LinearAlgebra.eigmax(x::SymmetricTensor) = eigvals(x)[size(x, 1)]

"""`Diagonal(x)` of a tensor: its elements, or those on its diagonal, are all that is kept."""
struct DiagonalTensor <: StructuredTensor
    diagonal::Tensor
end
as_tensor(x::DiagonalTensor, @nospecialize(T)=Float64) = diagm(x.diagonal)
LinearAlgebra.Diagonal(x::Tensor) = DiagonalTensor(ndims(x) == 1 ? x : diag(x))

# The diagonal of a matrix that is inverted, at which a replay looks, too: a zero there makes the matrix singular.
function copy_diagonal!(y, x, name::String)
    any(iszero, x) && throw(LinearAlgebraError("$name: the matrix is singular"))
    y .= x
    return nothing
end
const INVERTED_DIAGONAL = Op("inverted_diagonal", (inputs, attrs) -> (inputs[1].dims, check_float(inputs[1].eltype));
    batch=trailing, sparsity=one_to_one,
    forward=(p, out, inputs, attrs) -> emit_arrays!(p, (y, x) -> copy_diagonal!(y, x, attrs.name), Memory[out], inputs),
    backward=Any[(g, y, inputs, attrs) -> g], jvp=(t, y, inputs, attrs) -> t[1], attrs=[:name],
    doc="the diagonal of a matrix that has an inverse: no element is zero")
inverted_diagonal(x::DiagonalTensor, name::String) =
    apply(INVERTED_DIAGONAL, Tensor[x.diagonal], attributes(:name => name))

Base.inv(x::DiagonalTensor) = DiagonalTensor(RECIPROCAL(inverted_diagonal(x, "inv")))
LinearAlgebra.det(x::DiagonalTensor) = prod(x.diagonal)
LinearAlgebra.logdet(x::DiagonalTensor) = ADD(sum(LOG(ABS(x.diagonal))), LOG(prod(SIGN(x.diagonal))))
LinearAlgebra.tr(x::DiagonalTensor) = sum(x.diagonal)
LinearAlgebra.diag(x::DiagonalTensor) = x.diagonal

# The other kinds are tensors: Julia's solver sees by itself that a matrix is triangular.
LinearAlgebra.UpperTriangular(x::Tensor) = (check_square(x); triu(x))
LinearAlgebra.LowerTriangular(x::Tensor) = (check_square(x); tril(x))
LinearAlgebra.UnitUpperTriangular(x::Tensor) = triu(x, 1) + I
LinearAlgebra.UnitLowerTriangular(x::Tensor) = tril(x, -1) + I
LinearAlgebra.Tridiagonal(below::Tensor, x::Tensor, above::Tensor) = diagm(x) + diagm(below, -1) + diagm(above, 1)
LinearAlgebra.SymTridiagonal(x::Tensor, beside::Tensor) = Tridiagonal(beside, x, beside)
function LinearAlgebra.Bidiagonal(x::Tensor, beside::Tensor, uplo::Symbol)
    uplo in (:U, :L) || throw(ConfigurationError("Bidiagonal: expected :U or :L, got $(repr(uplo))"))
    return diagm(x) + diagm(beside, uplo === :U ? 1 : -1)
end

Base.size(x::StructuredTensor) = size(as_tensor(x))
Base.size(x::DiagonalTensor) = (length(x.diagonal), length(x.diagonal))
Base.size(x::StructuredTensor, d::Integer) = d <= 2 ? size(x)[d] : 1
Base.ndims(x::StructuredTensor) = 2
Base.length(x::StructuredTensor) = prod(size(x))
Base.Matrix(x::StructuredTensor) = as_tensor(x)

# Equality of values, as that of tensors.
dense(x::StructuredTensor) = as_tensor(x)
dense(x) = x
for (A, B) in ((:StructuredTensor, :StructuredTensor), (:StructuredTensor, :Tensor), (:Tensor, :StructuredTensor),
    (:StructuredTensor, :AbstractArray), (:AbstractArray, :StructuredTensor))
    @eval Base.:(==)(a::$A, b::$B) = dense(a) == dense(b)
    @eval Base.isapprox(a::$A, b::$B; kinds...) = isapprox(dense(a), dense(b); kinds...)
end
Base.:(==)(x::AnyTensor, s::UniformScaling) = ndims(x) == 2 && size(x, 1) == size(x, 2) && x == Matrix(s, size(x)...)
Base.:(==)(s::UniformScaling, x::AnyTensor) = x == s
Base.transpose(x::StructuredTensor) = x
Base.adjoint(x::StructuredTensor) = x
Base.getindex(x::StructuredTensor, places...) = as_tensor(x)[places...]
value(x::StructuredTensor) = value(as_tensor(x))
for (from, fs) in ((Base, (:inv, :abs, :-, :vec, :iterate, :exp, :log, :sqrt)), (LinearAlgebra, (:cholesky, :det, :diag, :logabsdet, :logdet,
        :isposdef, :norm, :opnorm, :pinv, :rank, :svd, :svdvals, :tr, :tril, :triu))), f in fs
    @eval $from.$f(x::StructuredTensor) = $f(as_tensor(x))
end
for f in (:sum, :prod, :maximum, :minimum)
    @eval Base.$f(x::StructuredTensor; kinds...) = $f(as_tensor(x); kinds...)
    @eval Base.$f(f::Function, x::StructuredTensor; kinds...) = $f(f, as_tensor(x); kinds...)
end
LinearAlgebra.norm(x::StructuredTensor, p::Real) = norm(as_tensor(x), p)
LinearAlgebra.opnorm(x::StructuredTensor, p::Real) = opnorm(as_tensor(x), p)
Base.iterate(x::StructuredTensor, state) = iterate(as_tensor(x), state)
Base.:^(x::StructuredTensor, n::Integer) = as_tensor(x)^n
LinearAlgebra.eigvals(x::DiagonalTensor) = x.diagonal  # in this order, as Julia has them
LinearAlgebra.eigen(x::DiagonalTensor) =
    (values=x.diagonal, vectors=Constant(Matrix{x.diagonal.eltype}(I, size(x)...)))
Base.BroadcastStyle(::Type{<:StructuredTensor}) = TensorStyle()
Base.broadcastable(x::StructuredTensor) = as_tensor(x)

left_product(a::StructuredTensor, b) = as_tensor(a) * b
right_product(a, b::StructuredTensor) = a * as_tensor(b)
solution(a::StructuredTensor, b) = as_tensor(a) \ b
left_product(a::DiagonalTensor, b) = ndims(b) == 0 ? DiagonalTensor(a.diagonal * b) : MUL(facing(a, b), b)
function right_product(a, b::DiagonalTensor)
    ndims(a) == 0 && return DiagonalTensor(a * b.diagonal)
    x = as_tensors((a, b.diagonal))[1]
    check_matrix(x)
    return transpose(left_product(b, transpose(as_row(x, is_row(a)))))
end
function solution(a::DiagonalTensor, b)
    d = facing(a, b)  # which checks the sizes
    return DIV(b, length(b) == 0 ? d : facing(DiagonalTensor(inverted_diagonal(a, "solve")), b))
end

"""The diagonal, to be multiplied by the columns of `b`."""
function facing(a::DiagonalTensor, b)
    ndims(b) in (1, 2) && size(b, 1) == length(a.diagonal) || throw(ShapeError(
        "a diagonal matrix of size $(size(a)) does not fit an array of size $(size(b))"))
    return ndims(b) == 1 ? a.diagonal : scaled_rows(a.diagonal)
end

const Beside = Union{Tensor,AbstractVecOrMat{<:Real},Real}
for (f, left, right) in ((:*, :left_product, :right_product), (:\, :solution, nothing), (:/, nothing, nothing), (:+, nothing, nothing), (:-, nothing, nothing))
    on_left = left === nothing ? :((a, b) -> $f(as_tensor(a), b)) : left
    on_right = right === nothing ? :((a, b) -> $f(a, as_tensor(b))) : right
    @eval Base.$f(a::StructuredTensor, b::$(f in (:+, :-) ? :(Union{Beside,UniformScaling}) : :Beside)) = $on_left(a, b)
    @eval Base.$f(a::$(f in (:+, :-) ? :(Union{Beside,UniformScaling}) : :Beside), b::StructuredTensor) = $on_right(a, b)
    @eval Base.$f(a::StructuredTensor, b::StructuredTensor) = $on_left(a, as_tensor(b))
end

LinearAlgebra.kron(a::StructuredTensor, b::Union{Beside,StructuredTensor}) = kron(as_tensor(a), as_tensor(b))
LinearAlgebra.kron(a::Beside, b::StructuredTensor) = kron(a, as_tensor(b))

# A matrix that Julia has factorised is a constant.
const Factorised = Union{LinearAlgebra.Cholesky,LinearAlgebra.LU,LinearAlgebra.QR,LinearAlgebra.QRCompactWY,LinearAlgebra.SVD}
Base.:\(a::Factorised, b::Tensor) = Matrix(a) \ b

"""What `cholesky` gives: `c \\ b` solves by both factors."""
const CholeskyTensors = NamedTuple{(:L, :U),Tuple{Tensor,Tensor}}
Base.:\(c::CholeskyTensors, b::Beside) = c.U \ (c.L \ b)
Base.inv(c::CholeskyTensors) = c \ Matrix{c.L.eltype}(I, size(c.L)...)
LinearAlgebra.logdet(c::CholeskyTensors) = 2 * sum(LOG(diag(c.L)))
LinearAlgebra.det(c::CholeskyTensors) = prod(diag(c.L))^2

# Statistics ---------------------------------------------------------------------------------------------------------------

"""Observations along `dims`, as rows, less their means."""
function observations(name::String, x::Tensor, dims)
    ndims(x) in (1, 2) || throw(ShapeError("$name: expected a vector or a matrix, got size $(size(x))"))
    ndims(x) == 1 && return centred(reshape_to(x, Int[length(x), 1]), Int[1])
    dims in (1, 2) || throw(ShapeError("$name: dims must be 1 or 2, got $(repr(dims))"))
    return centred(dims == 1 ? x : turned_over(x), Int[1])
end

function covariance(name::String, x::Tensor, y::Tensor, dims, corrected::Bool)
    a, b = observations(name, x, dims), observations(name, y, dims)
    a.dims[1] == b.dims[1] ||
        throw(ShapeError("$name: expected as many observations in both, got sizes $(size(x)) and $(size(y))"))
    n = a.dims[1] - corrected
    found = times(turned_over(a), b) .* (n > 0 ? 1 / n : NaN)
    return ndims(x) == ndims(y) == 1 ? reshape_to(found, Int[]) : found
end

Statistics.cov(x::Tensor; dims=1, corrected::Bool=true) = covariance("cov", x, x, dims, corrected)
Statistics.cor(x::Tensor; dims=1) = ndims(x) == 1 ? literal(float(x.eltype), 1) : with_ones(correlation(x, x, dims))
with_ones(x::Tensor) = WHERE(Constant(Matrix{x.eltype}(I, x.dims...)), 1, x)
Statistics.cov(x::Tensor, y::Union{Tensor,AbstractArray}; dims=1, corrected::Bool=true) =
    covariance("cov", x, as_tensor(y), dims, corrected)
Statistics.cor(x::Tensor, y::Union{Tensor,AbstractArray}; dims=1) = correlation(x, as_tensor(y), dims)
Statistics.cov(x::AbstractArray, y::Tensor; dims=1, corrected::Bool=true) = covariance("cov", as_tensor(x), y, dims, corrected)
Statistics.cor(x::AbstractArray, y::Tensor; dims=1) = correlation(as_tensor(x), y, dims)

function correlation(x::Tensor, y::Tensor, dims)
    found = covariance("cor", x, y, dims, false)
    lengths(z) = norm(observations("cor", z, dims); dims=1) .* (1 / sqrt(size(observations("cor", z, dims), 1)))
    scale = times(turned_over(lengths(x)), lengths(y))
    return clip(DIV(found, ndims(found) == 0 ? reshape_to(scale, Int[]) : scale), -1, 1)
end

"""Several quantiles as a vector."""
Statistics.quantile(x::Tensor, shares::AbstractVector{<:Real}; kinds...) = stack(Tensor[quantile(x, q; kinds...) for q in shares])

"""The mean of the smallest and the largest element, or of two numbers."""
Statistics.middle(x::Tensor) = middle(minimum(x), maximum(x))
Statistics.middle(a::Tensor, b::Union{Tensor,Real}) = DIV(ADD(a, b), 2)
Statistics.middle(a::Real, b::Tensor) = DIV(ADD(a, b), 2)
