# Forward mode: dual numbers on plain Julia functions. There are no ops here and no graph: a function that holds tensors,
# or is called with some, is differentiated by the ops' own forward-mode rules (`nesting.jl`).
#
# Ties and corners are those of the op table: equal arguments of `max` and `min` share the derivative, `clamp` passes it
# on at its bounds, `abs`, `sign` and `relu` have derivative 0 at 0, `sqrt` has infinity there; where the larger or smaller of two
# is NaN, both derivatives are 0. Behind a root or a power with an infinite derivative a partial of 0 is NaN. The exponent of
# a negative base may not move: Julia's `log` throws a `DomainError` there, where an op has NaN.

"""Dual numbers, and derivatives by them."""
module DualNumbers

using LinearAlgebra: LinearAlgebra, norm, Bidiagonal, Diagonal, Hermitian, SymTridiagonal, Symmetric, Tridiagonal
using ..AD: AD, DualNumber, Elements, GraphNode, digamma, erfc, logaddexp, sigmoid, sinc_slope
using ..Errors: NotDifferentiableError, ShapeError
using ...Versions: Versions

export Dual, partials, primal, derivative, forward_gradient, forward_gradient!, forward_jacobian, forward_jacobian!
export ForwardBuffers

Base.Experimental.@optlevel 3  # the module around asks for quick compilation; loops want the optimiser

"""
    Dual{N,T,L}

A number with `N` partial derivatives, both of type `T`: a real number on which any function that is written for `Real`
can be called.

`L` is the level of the derivative that the partials belong to: 1, or one more than that of any dual number which the
differentiated function takes or holds. So derivatives within derivatives are not confused:
`derivative(x -> x * derivative(y -> x + y, 1.0), 1.0) == 1`. What a function holds is seen in its type and, where that does
not tell (variables that it assigns, containers of type `Any`), in the values. Not seen is a dual number that reaches it
through a global variable alone.

Comparisons look at the value alone.
"""
struct Dual{N,T<:Real,L,P} <: DualNumber
    value::T
    pieces::P  # the partials, in pieces
end

"""The value without derivatives of the outermost level; numbers are their own."""
primal(d::Dual) = d.value
primal(x::Real) = x

# Partials -------------------------------------------------------------------------------------------------------------
#
# Six partials and more, if they are floats, are kept as vectors of the processor, in pieces of 1, 2, 4, 8 or 16 elements
# (12 is 4 and 8): as tuples LLVM would mix them with values, and do them one by one. Fewer are better kept as numbers,
# because a loop that is marked `@simd` is then vectorised across its iterations. Products and sums of partials may be
# contracted into one rounding (`contract`), values never are: a function of dual numbers has the value that it has
# without them.

const WORDS = IdDict{Any,String}(Float64 => "double", Float32 => "float")
const SEPARATE = Versions.MISALIGNS_VECTORS ? typemax(Int) : 5  # partials that are kept as numbers
const LONGEST = 16  # elements in a piece

Vec{W,T} = NTuple{W,VecElement{T}}

"""The type of `N` partials of type `T`."""
@generated function pieces(::Val{N}, ::Type{T}) where {N,T}
    haskey(WORDS, T) || return :(Tuple{NTuple{N,T}})
    N <= SEPARATE && return :(NTuple{N,T})
    found = Any[]
    for W in (1, 2, 4, 8)
        N & W == 0 || push!(found, W == 1 ? :T : :(Vec{$W,T}))
    end
    append!(found, [:(Vec{LONGEST,T}) for _ in 1:N÷LONGEST])
    return :(Tuple{$(found...)})
end
@inline dual_type(::Val{N}, ::Type{T}, ::Val{L}) where {N,T,L} = Dual{N,T,L,pieces(Val(N), T)}

"""All partials as the pieces of type `P`, from element `first` on of the function `element(k)`."""
@generated function piecewise(element::F, ::Type{P}) where {F,P<:Tuple}
    found, k = Any[], 0
    for piece in fieldtypes(P)
        if piece <: Tuple
            wrap = eltype(piece) <: VecElement ? :VecElement : :identity
            push!(found, :(($((:($wrap(element($(k + i)))) for i in 1:fieldcount(piece))...),)))
            k += fieldcount(piece)
        else
            push!(found, :(element($(k += 1))))
        end
    end
    return :($(Expr(:meta, :inline)); ($(found...),))
end

"""The partial derivatives, a tuple."""
@generated function partials(d::Dual{N,T,L,P}) where {N,T,L,P}
    found = Any[]
    for (i, piece) in enumerate(fieldtypes(P))
        if !(piece <: Tuple)
            push!(found, :(d.pieces[$i]))
        elseif eltype(piece) <: VecElement
            append!(found, [:(d.pieces[$i][$k].value) for k in 1:fieldcount(piece)])
        else
            append!(found, [:(d.pieces[$i][$k]) for k in 1:fieldcount(piece)])
        end
    end
    return :($(Expr(:meta, :inline)); ($(found...),))
end

@inline dual(value::T, element::F, ::Val{N}, ::Val{L}) where {T,F,N,L} =
    Dual{N,T,L,pieces(Val(N), T)}(value, piecewise(element, pieces(Val(N), T)))

"""An array of dual numbers of these values, and for each partial derivative an array."""
as_duals(values::AbstractArray{T}, parts, n::Val, v::Val) where {T} =
    map(i -> dual(values[i], k -> parts[k][i], n, v), reshape(eachindex(values), size(values)))

"""LLVM's text for one operation on vectors, or on the one number of a piece."""
function vector_text(W::Int, @nospecialize(T), spread, body::String)
    t = WORDS[T]
    V = W == 1 ? t : "<$W x $t>"
    lines = String[]
    for i in spread  # numbers that stand for vectors of them
        W == 1 || push!(lines, "%s$i = insertelement $V undef, $t %$i, i32 0",
            "%v$i = shufflevector $V %s$i, $V undef, <$W x i32> zeroinitializer")
        W == 1 && (body = replace(body, "%v$i" => "%$i"))
    end
    push!(lines, replace(body, "VECTOR" => V), "ret $V %y")
    return join(lines, "\n")
end

for (name, arguments, body, scalar) in (
    (:scaled, (:number, :pieces), "%y = fmul contract VECTOR %v0, %1", (s, p) -> :($s * $p)),
    (:added, (:pieces, :pieces), "%y = fadd contract VECTOR %0, %1", (p, q) -> :($p + $q)),
    (:subtracted, (:pieces, :pieces), "%y = fsub contract VECTOR %0, %1", (p, q) -> :($p - $q)),
    (:combined, (:number, :pieces, :number, :pieces),
        "%a = fmul contract VECTOR %v0, %1\n%b = fmul contract VECTOR %v2, %3\n%y = fadd contract VECTOR %a, %b",
        (s, p, t, q) -> :($s * $p + $t * $q)))
    names = [Symbol(:x, i) for i in 1:length(arguments)]
    typed = [:($x::$(kind === :pieces ? :P : :T)) for (x, kind) in zip(names, arguments)]
    spread = [i - 1 for (i, kind) in enumerate(arguments) if kind === :number]
    @eval @generated function $name($(typed...)) where {$((:number in arguments ? (:T,) : ())...),P<:Tuple}
        results = Any[]
        for (i, piece) in enumerate(fieldtypes(P))
            operands = Any[kind === :pieces ? :($x[$i]) : x for (x, kind) in zip($names, $arguments)]
            if piece <: Tuple && !(eltype(piece) <: VecElement)
                each = [$scalar((kind === :pieces ? :($x[$k]) : x for (x, kind) in zip(operands, $arguments))...)
                        for k in 1:fieldcount(piece)]
                push!(results, :(($(each...),)))
            else
                element = piece <: Tuple ? fieldtype(eltype(piece), 1) : piece
                text = vector_text(piece <: Tuple ? fieldcount(piece) : 1, element, $spread, $body)
                types = Tuple{(kind === :pieces ? piece : element for kind in $arguments)...}
                push!(results, :(Base.llvmcall($text, $piece, $types, $(operands...))))
            end
        end
        return :($(Expr(:meta, :inline)); ($(results...),))
    end
end

@inline still(::Type{D}) where {N,T,L,P,D<:Dual{N,T,L,P}} = piecewise(k -> zero(T), P)

"""The dual number of value `y` whose derivative by `a` is `dy`."""
@inline chained(a::Dual{N,T,L,P}, y::T, dy::T) where {N,T,L,P} = Dual{N,T,L,P}(y, scaled(dy, a.pieces))
@inline chained(a::Dual{N,T,L}, y, dy) where {N,T,L} =  # where the function leaves the type, as sqrt of integers
    chained_as(promote_type(T, typeof(y)), a, y, dy)
@inline chained_as(::Type{S}, a::Dual{N,T,L}, y, dy) where {S,N,T,L} =
    chained(convert(dual_type(Val(N), S, Val(L)), a), convert(S, y), convert(S, dy))

"""The dual number of value `y` whose derivatives by two arguments of one level are `da` and `db`."""
@inline chained(a::Dual{N,T,L,P}, b::Dual{N,T,L,P}, y::T, da::T, db::T) where {N,T,L,P} =
    Dual{N,T,L,P}(y, combined(da, a.pieces, db, b.pieces))

@inline is_still(a::Dual) = all(iszero, partials(a))

constant(::Type{D}, x) where {N,T,L,P,D<:Dual{N,T,L,P}} = Dual{N,T,L,P}(convert(T, x), still(D))

# Numbers that Julia promotes, converts and compares ----------------------------------------------------------------------

const Plain = Union{AbstractFloat,Integer,Rational,AbstractIrrational}

Base.promote_rule(::Type{<:Dual{N,T,L}}, ::Type{S}) where {N,T,L,S<:Plain} = dual_type(Val(N), promote_type(T, S), Val(L))
Base.promote_rule(::Type{Bool}, ::Type{<:Dual{N,T,L}}) where {N,T,L} = dual_type(Val(N), promote_type(T, Bool), Val(L))
Base.promote_rule(::Type{S}, ::Type{<:Dual{N,T,L}}) where {N,T,L,S<:AbstractIrrational} =
    dual_type(Val(N), promote_type(T, S), Val(L))
function Base.promote_rule(::Type{D}, ::Type{E}) where {N,T,L,M,S,K,D<:Dual{N,T,L},E<:Dual{M,S,K}}
    L > K && return dual_type(Val(N), promote_type(T, E), Val(L))
    L < K && return dual_type(Val(M), promote_type(S, D), Val(K))
    N == M || throw(ShapeError("dual numbers with $N and with $M partials of one level cannot meet; each belongs to a " *
        "separate derivative, and was kept beyond it"))
    return dual_type(Val(N), promote_type(T, S), Val(L))
end
Base.convert(::Type{D}, x::D) where {D<:Dual} = x
@inline Base.convert(::Type{D}, x::Real) where {D<:Dual} = converted(D, x)
@inline converted(::Type{D}, x::Real) where {N,T,L,P,D<:Dual{N,T,L,P}} =
    of_kind(x, Val(N), Val(L)) ? raised(D, x) : constant(D, x)
@inline of_kind(::Dual{N,T,L}, ::Val{N}, ::Val{L}) where {N,T,L} = true
@inline of_kind(::Real, ::Val, ::Val) = false
@inline function raised(::Type{D}, x) where {N,T,L,P,D<:Dual{N,T,L,P}}
    p = partials(x)
    return Dual{N,T,L,P}(convert(T, x.value), piecewise(k -> convert(T, @inbounds p[k]), P))
end
Dual{N,T,L,P}(x::Real) where {N,T,L,P} = convert(Dual{N,T,L,P}, x)
for T in (:Float64, :Float32, :Float16, :Int64, :Int32, :Bool)
    @eval Base.$T(::Dual) = throw(NotDifferentiableError(string($T, ": a dual number would lose its derivative; store " *
        "it in an array of its own type, such as similar(x) or zeros(eltype(x), n), and use zero(x), one(x)")))
end
Base.AbstractFloat(d::Dual) = float(d)
Base.float(d::Dual) = convert(float(typeof(d)), d)
Base.float(::Type{D}) where {N,T,L,D<:Dual{N,T,L}} = dual_type(Val(N), float(T), Val(L))

Base.zero(::Type{D}) where {D<:Dual} = constant(D, 0)
Base.one(::Type{D}) where {D<:Dual} = constant(D, 1)
Base.zero(::D) where {D<:Dual} = constant(D, 0)
Base.one(::D) where {D<:Dual} = constant(D, 1)
for f in (:eps, :floatmin, :floatmax, :typemin, :typemax)
    @eval Base.$f(::Type{D}) where {N,T,L,D<:Dual{N,T,L}} = constant(D, $f(T))
end
Base.eps(d::Dual) = eps(d.value)
# Without these `≈` would be `==`, and a range would end where rounding lets it, or never.
Base.rtoldefault(::Type{<:Dual{N,T}}) where {N,T} = Base.rtoldefault(T)
Base.:(:)(a::D, b::D) where {D<:Dual} = a:one(D):b
Base.:(:)(a::D, step::D, b::D) where {D<:Dual} = StepRangeLen(a, step, length(a.value:step.value:b.value))
Base.precision(::Type{D}) where {N,T,L,D<:Dual{N,T,L}} = precision(T)

for f in (:isnan, :isinf, :isfinite, :isinteger, :signbit, :iseven, :isodd)
    @eval Base.$f(d::Dual) = $f(d.value)
end
# These two decide whether a shortcut is right, which must hold for derivatives as well.
Base.iszero(d::Dual) = iszero(d.value) && all(iszero, partials(d))
Base.isone(d::Dual) = isone(d.value) && all(iszero, partials(d))
Base.hash(d::Dual, h::UInt) = hash(d.value, h)
Base.show(io::IO, d::Dual) = print(io, "Dual(", d.value, ", ", partials(d), ")")

# One level is the other's constant: what a binary function does is settled by the types.
for f in (:<, :<=, :(==), :isless)
    @eval @inline Base.$f(a::Dual{N,T,L}, b::Dual{M,S,K}) where {N,T,L,M,S,K} =
        L == K ? $f(a.value, b.value) : L > K ? $f(a.value, b) : $f(a, b.value)
    for R in (:AbstractFloat, :Integer, :Rational, :AbstractIrrational)
        @eval @inline Base.$f(a::Dual, b::$R) = $f(a.value, b)
        @eval @inline Base.$f(a::$R, b::Dual) = $f(a, b.value)
    end
end

# A key of a dictionary: what was found for another derivative, or for a constant, is not found for this one.
Base.isequal(a::Dual{N,T,L}, b::Dual{M,S,K}) where {N,T,L,M,S,K} =
    L == K ? N == M && isequal(a.value, b.value) && all(map(isequal, partials(a), partials(b))) :
    L > K ? is_still(a) && isequal(a.value, b) : is_still(b) && isequal(a, b.value)
for R in (:AbstractFloat, :Integer, :Rational, :AbstractIrrational)
    @eval Base.isequal(a::Dual, b::$R) = is_still(a) && isequal(a.value, b)
    @eval Base.isequal(a::$R, b::Dual) = is_still(b) && isequal(a, b.value)
end

for f in (:floor, :ceil, :trunc, :round)
    @eval Base.$f(d::D) where {D<:Dual} = constant(D, $f(d.value))
    @eval Base.$f(::Type{T}, d::Dual) where {T<:Integer} = $f(T, d.value)
end
Base.unsafe_trunc(::Type{T}, d::Dual) where {T<:Integer} = unsafe_trunc(T, d.value)

# Functions of two arguments -------------------------------------------------------------------------------------------
#
# (function, its value, its derivatives by a and b): expressions in a, b and, for derivatives, y. Where the function is an op,
# they are those of its record.

"""A derivative's expression on numbers: the numbers in it take the type of the value."""
on_numbers(x::Real) = :(oftype(y, $x))
on_numbers(name::Symbol) = name
on_numbers(e::Expr) = Expr(:call, e.args[1], (x isa Integer ? x : on_numbers(x) for x in e.args[2:end])...)

const BINARY = (
    (:+, :(a + b), on_numbers.(AD.ADD.derivatives)...),
    (:-, :(a - b), on_numbers.(AD.SUB.derivatives)...),
    (:*, :(a * b), on_numbers.(AD.MUL.derivatives)...),
    (:/, :(a / b), on_numbers.(AD.DIV.derivatives)...),
    (:^, :(a^b), :(power_base(a, b)), :(power_exponent(a, b, y))),
    (:atan, :(atan(a, b)), on_numbers.(AD.ARCTAN2.derivatives)...),
    (:logaddexp, :(logaddexp(a, b)), :(share_of(a, b, y)), :(share_of(b, a, y))),
    (:hypot, :(hypot(a, b)), :(part_of_length(a, y)), :(part_of_length(b, y))),
    (:log, :(log(a, b)), :(-y / (a * log(a))), :(inv(b * log(a)))),
    (:max, :(max(a, b)), :(share(a > b, a == b, y)), :(share(b > a, a == b, y))),
    (:min, :(min(a, b)), :(share(a < b, a == b, y)), :(share(b < a, a == b, y))),
    (:rem, :(rem(a, b)), :(one(y)), :(-round((a - y) / b))),
    (:mod, :(mod(a, b)), :(one(y)), :(-round((a - y) / b))),
    (:mod1, :(mod1(a, b)), :(one(y)), :(-round((a - y) / b))),
    (:copysign, :(copysign(a, b)), :(sign(a) * sign(y)), :(zero(y))),
    (:flipsign, :(flipsign(a, b)), :(ifelse(signbit(b), -one(y), one(y))), :(zero(y))),
)

# b a^(b-1), and 0 at a = b = 0, where a^(b-1) is infinite; y log(a), and its limit 0 at a = 0 for b >= 0.
@inline power_base(a, b) = a == 0 && b == 0 ? zero(a^b) : b * a^(b - 1)
@inline power_exponent(a, b, y) = a == 0 && b >= 0 ? zero(y) : y * log(a)

# exp(a - y), and 0 where both terms are infinitely small.
@inline share_of(a, b, y) = y == -Inf ? zero(y) : one(y) / (one(y) + exp(b - a))

# a / y, and 0 at the origin, where every derivative of hypot is.
@inline part_of_length(a, y) = ifelse(y == 0, zero(y), a / ifelse(y == 0, one(y), y))

"""1 for the winner, 1/2 for a tie, 0 for the loser, and for both where one is NaN."""
@inline share(wins::Bool, tie::Bool, y) = ifelse(tie, oftype(y, 1) / 2, ifelse(wins, one(y), zero(y)))

for (f, y, da, db) in BINARY
    M = f === :logaddexp ? AD : Base
    combine = f === :+ ? :(alike(u, v, y, added(u.pieces, v.pieces))) :
        f === :- ? :(alike(u, v, y, subtracted(u.pieces, v.pieces))) :
        f === :^ ? :(both_of_power(u, v, y)) : :(both(u, v, y, $da, $db))
    @eval begin
        @inline function $M.$f(u::Dual{N,T,L,P}, v::Dual{N,T,L,P}) where {N,T,L,P}
            a, b = u.value, v.value
            y = $y
            return $combine
        end
        @inline $M.$f(u::Dual{N,T,L}, v::Dual{M,S,K}) where {N,T,L,M,S,K} =
            L == K ? $f(promote(u, v)...) : L > K ? $(Symbol(:by_first_, f))(u, v) : $(Symbol(:by_second_, f))(u, v)
        @inline function $(Symbol(:by_first_, f))(u::Dual, b)
            a = u.value
            y = $y
            return chained(u, y, $da)
        end
        @inline function $(Symbol(:by_second_, f))(a, v::Dual)
            b = v.value
            y = $y
            return chained(v, y, $(f === :^ ? :(is_still(v) ? zero(y) : $db) : db))
        end
    end
    for R in (:AbstractFloat, :Integer, :Rational, :AbstractIrrational)
        f === :^ && R === :Integer || @eval @inline $M.$f(u::Dual, b::$R) = $(Symbol(:by_first_, f))(u, b)
        f in (:copysign, :flipsign) || @eval @inline $M.$f(a::$R, v::Dual) = $(Symbol(:by_second_, f))(a, v)
    end
end
Base.log(::Irrational{:ℯ}, v::Dual) = log(v)
for f in (:copysign, :flipsign), R in (:Float32, :Float64, :Signed, :Rational)
    @eval @inline Base.$f(a::$R, v::Dual) = $f(a, v.value)  # steps of v
end
@inline alike(u::Dual{N,T,L,P}, v::Dual{N,T,L,P}, y::T, pieces::P) where {N,T,L,P} = Dual{N,T,L,P}(y, pieces)
@inline both(u::Dual{N,T,L}, v::Dual{N,T,L}, y, da, db) where {N,T,L} =
    both_as(promote_type(T, typeof(y)), u, v, y, da, db)
@inline function both_as(::Type{S}, u::Dual{N,T,L}, v::Dual{N,T,L}, y, da, db) where {S,N,T,L}
    D = dual_type(Val(N), S, Val(L))
    return chained(convert(D, u), convert(D, v), convert(S, y), convert(S, da), convert(S, db))
end

@inline both_of_power(u::Dual, v::Dual, y) =
    both(u, v, y, power_base(u.value, v.value), is_still(v) ? zero(y) : power_exponent(u.value, v.value, y))

# Whole quotients jump, and do not change between these places.
for (f, mode) in ((:div, :ToZero), (:fld, :Down), (:cld, :Up))
    @eval Base.$f(u::D, v::D) where {D<:Dual} = constant(D, $f(u.value, v.value))
    @eval Base.div(u::D, v::D, ::RoundingMode{$(QuoteNode(mode))}) where {D<:Dual} = constant(D, $f(u.value, v.value))
end
Base.rem2pi(u::Dual, mode::RoundingMode) = chained(u, rem2pi(u.value, mode), one(u.value))
LinearAlgebra.normalize(x::AbstractVector{<:Dual}, p::Real=2) = x ./ norm(x, p)

@inline Base.:+(u::Dual) = u
@inline Base.:-(u::Dual) = chained(u, -u.value, -one(u.value))

Base.:^(::Irrational{:ℯ}, v::Dual) = exp(v)
@inline whole_power(u::Dual, p) = chained(u, u.value^p, p == 0 ? zero(u.value) : p * u.value^(p - 1))
@inline Base.:^(u::Dual, p::Integer) = whole_power(u, p)
@inline function Base.literal_pow(::typeof(^), u::Dual, ::Val{P}) where {P}
    P == 0 && return one(u)
    a = u.value
    return chained(u, Base.literal_pow(^, a, Val(P)), P * Base.literal_pow(^, a, Val(P - 1)))
end

@inline at_level(::Val{L}, x::Dual{N,T,L}) where {N,T,L} = x.value
@inline at_level(::Val, x::Real) = x
"""`y`, which is `a * b + c` rounded twice, with the value that is rounded once."""
@inline rounded_once(y::Dual{N,T,L,P}, a, b, c) where {N,T,L,P} =
    Dual{N,T,L,P}(convert(T, fma(at_level(Val(L), a), at_level(Val(L), b), at_level(Val(L), c))), y.pieces)
@inline Base.fma(a::Dual, b::Dual, c::Dual) = rounded_once(a * b + c, a, b, c)
@inline Base.muladd(a::Dual, b::Dual, c::Dual) = a * b + c
for (A, B, C) in ((:Dual, :Dual, :Plain), (:Dual, :Plain, :Dual), (:Plain, :Dual, :Dual), (:Dual, :Plain, :Plain),
    (:Plain, :Dual, :Plain), (:Plain, :Plain, :Dual))
    @eval @inline Base.muladd(a::$A, b::$B, c::$C) = a * b + c
    @eval @inline Base.fma(a::$A, b::$B, c::$C) = rounded_once(a * b + c, a, b, c)
end

@inline function Base.clamp(x::Dual, low::Real, high::Real)
    within = ifelse_(x > high, high, ifelse_(x < low, low, x))
    return isnan(x.value) ? constant(typeof(within), plain_value(x)) : within
end
plain_value(x::Dual) = plain_value(x.value)
plain_value(x::Real) = x
@inline ifelse_(c::Bool, a, b) = ((u, v) = promote(a, b); ifelse(c, u, v))

# Functions of one argument --------------------------------------------------------------------------------------------------

# Those that are ops, by their records.
for op in collect(values(AD.TABLE)), f in op.functions
    length(op.derivatives) == 1 && !(f in (sin, cos)) || continue
    @eval @inline function (::$(typeof(f)))(u::Dual)
        x = u.value
        y = $f(x)
        return chained(u, y, $(on_numbers(op.derivatives[1])))
    end
end

# The others: (function, its derivative as an expression in a and y).
const DEGREE = :(oftype(a, pi) / 180)
const UNARY = (
    (:exp10, :(y * log(oftype(y, 10)))),
    (:sign, :(zero(y))),
    (:sec, :(y * tan(a))), (:csc, :(-y * cot(a))), (:cot, :(-(1 + y * y))),
    (:sind, :($DEGREE * cosd(a))), (:cosd, :(-$DEGREE * sind(a))), (:tand, :($DEGREE * (1 + y * y))),
    (:sinpi, :(oftype(y, pi) * cospi(a))), (:cospi, :(-oftype(y, pi) * sinpi(a))), (:sinc, :(sinc_slope(y, a))),
    (:asec, :(inv(abs(a) * sqrt(a * a - 1)))), (:acsc, :(-inv(abs(a) * sqrt(a * a - 1)))), (:acot, :(-inv(1 + a * a))),
    (:sech, :(-y * tanh(a))),
    (:csch, :(-y * coth(a))), (:coth, :((1 - y) * (1 + y))),
    (:asech, :(-inv(a * sqrt((1 - a) * (1 + a))))), (:acsch, :(-inv(abs(a) * sqrt(a * a + 1)))),
    (:acoth, :(inv((1 - a) * (1 + a)))),
)
for (f, dy) in UNARY
    @eval @inline function Base.$f(u::Dual)
        a = u.value
        y = $f(a)
        return chained(u, y, $dy)
    end
end
@inline Base.sin(u::Dual) = ((s, c) = sincos(u.value); chained(u, s, c))
@inline Base.cos(u::Dual) = ((s, c) = sincos(u.value); chained(u, c, -s))
@inline Base.sincos(u::Dual) = ((s, c) = sincos(u.value); (chained(u, s, c), chained(u, c, -s)))
Base.cosc(u::Dual) = sinc_slope(nothing, u)  # Base's own cancels near 0, and has a constant there
Base.ldexp(u::Dual, n::Integer) = chained(u, ldexp(u.value, n), ldexp(one(u.value), n))

"""`f` at a dual number, whose derivative at `a` is `slope(a, f(a))`."""
@inline by_rule(u::Dual, f::F, slope::G) where {F,G} = (a = u.value; y = f(a); chained(u, y, slope(a, y)))

# The level of a derivative ----------------------------------------------------------------------------------------------

"""What a type or a value holds: the highest level of its dual numbers, whether tensors, and whether only values tell."""
struct Held
    level::Int
    tensors::Bool
    unknown::Bool
end
const NOTHING_HELD = Held(0, false, false)
const ANYTHING = Held(0, false, true)
both(a::Held, b::Held) = Held(max(a.level, b.level), a.tensors | b.tensors, a.unknown | b.unknown)

"""Types that are not looked into: they hold no numbers of a calculation."""
const CLOSED = Union{Module,Type,Task,Method,Symbol,AbstractString,IO,Ptr,Regex,Exception}

function held_by_type(@nospecialize(T), seen::Set{Any}=Set{Any}())
    T === Union{} && return NOTHING_HELD
    T isa Union && return both(held_by_type(T.a, seen), held_by_type(T.b, seen))
    T isa Type && T <: CLOSED && return NOTHING_HELD
    T isa DataType && (T <: GraphNode || T === Elements) && return Held(0, true, false)
    T === Core.Box && return ANYTHING
    T isa DataType && isconcretetype(T) || return ANYTHING
    T in seen && return NOTHING_HELD
    push!(seen, T)
    T <: Dual && return Held(T.parameters[3]::Int, false, false)
    T <: Versions.CONTAINERS && return held_by_type(eltype(T), seen)
    held = NOTHING_HELD
    isstructtype(T) || return held
    for field in fieldtypes(T)
        held = both(held, held_by_type(field, seen))
    end
    return held
end

"""The same for a value whose type does not tell."""
held_by_value(@nospecialize(x)) = held_by_value(x, IdDict{Any,Nothing}())
function held_by_value(@nospecialize(x), seen::IdDict{Any,Nothing})
    held = held_by_type(typeof(x))
    held.unknown && !haskey(seen, x) || return held
    seen[x] = nothing
    held = NOTHING_HELD
    if x isa Versions.CONTAINERS
        for i in eachindex(x)
            isassigned(x, i) && (held = both(held, held_by_value(x[i], seen)))
        end
        return held
    end
    for i in 1:nfields(x)
        isdefined(x, i) && (held = both(held, held_by_value(getfield(x, i), seen)))
    end
    return held
end

"""
The level for a derivative of `f` at `x`: more than that of all dual numbers that they hold. Level 0 stands for tensors:
the derivative is then one of ops.
"""
@generated function level(f::F, x::T) where {F,T}
    held = both(held_by_type(F), held_by_type(T))
    held.tensors && return :(Val(0))
    held.unknown || return :(Val($(held.level + 1)))
    return :(level_of_values(f, x))
end

function level_of_values(@nospecialize(f), @nospecialize(x))
    held = both(held_by_value(f), held_by_value(x))
    return held.tensors ? Val(0) : Val(held.level + 1)
end

"""Whether a result holds tensors, which met the dual numbers inside the function."""
@generated function has_tensors(y::Y) where {Y}
    held = held_by_type(Y)
    held.unknown && !held.tensors && return :(held_by_value(y).tensors)
    return held.tensors
end

# Derivatives ----------------------------------------------------------------------------------------------------------

"""
    derivative(f, x)

The derivative of `f`, a plain Julia function of one number, at the number `x`. What `f` returns may be a number, or an
array or tuple of numbers, whose derivatives come back in the same form. Derivatives may be nested.

    derivative(x -> x^3, 2.0) == 12

Where tensors are met (`f` holds one, `x` is one, a transform around gives some) the ops' forward-mode rules are used, as by
[`TwinGrad.AD.jvp`](@ref); `f` may be called twice then, and only ops of TwinGrad are differentiated.
"""
@inline derivative(f::F, x::Real) where {F} = slope(f, float(x), level(f, x))
derivative(f, x::Elements) = AD.derivative_of_elements(f, x)
derivative(f, x::GraphNode) = AD.derivative_by_ops(f, x)
derivative(f, x) = throw(ShapeError(
    "derivative: expected a number, got $(typeof(x)); forward_gradient and forward_jacobian take arrays"))
derivative(f, x::Complex) = throw(NotDifferentiableError(
    "derivative: expected a real number, got $(typeof(x)); pass real and imaginary parts separately"))
@inline slope(f::F, x::T, v::Val{L}) where {F,T,L} = slope_of(f, x, v, f(dual(x, k -> one(T), Val(1), v)))
slope(f::F, x, ::Val{0}) where {F} = AD.derivative_by_ops(f, x)
@inline slope_of(f::F, x, v::Val, y::Dual) where {F} = moved_by(v, y)
@inline slope_of(f::F, x, v::Val, y) where {F} = has_tensors(y) ? AD.derivative_by_ops(f, x) : moved_by(v, y)

@inline moved_by(::Val{L}, y::Dual{1,T,L}) where {T,L} = partials(y)[1]
@inline moved_by(::Val, y::Real) = zero(y)
@inline moved_by(::Val{L}, y::Dual{N,T,K}) where {L,N,T,K} = K < L ? zero(y) : kept_beyond("derivative")
moved_by(v::Val, y::Union{AbstractArray,Tuple,NamedTuple}) = map(x -> moved_by(v, x), y)
moved_by(::Val, y) = throw(NotDifferentiableError("derivative: the function returned $(typeof(y)), which is no number"))

kept_beyond(name) = throw(NotDifferentiableError("$name: the function returned a dual number of another derivative, which was " *
    "kept beyond it; return what derivative() and its kin return instead"))

const DEFAULT_CHUNK = 12

"""
The number of partials at once for `n` inputs: all of them up to 12, else as few passes as chunks of at most 12 need, of
equal size.
"""
default_chunk(n::Int) = n <= DEFAULT_CHUNK ? max(n, 1) : cld(n, cld(n, DEFAULT_CHUNK))

"""
    ForwardBuffers(f, x; chunk=nothing)

What the forward mode of `f` at arrays of the size and element type of `x` works in, to be used again at every call. Give
the same function to the call; `chunk` is the number of partial derivatives that one run of `f` computes.

    buffers = ForwardBuffers(f, x; chunk=4)
    forward_gradient!(g, f, x, buffers)     # allocates nothing, unless f does
"""
struct ForwardBuffers{N,T,L,A<:AbstractArray}
    seeded::A
end

function ForwardBuffers(f, x::AbstractArray{<:Real}; chunk::Union{Nothing,Integer}=nothing)
    chunk === nothing || chunk >= 1 ||
        throw(ShapeError("forward mode: expected a chunk of 1 or more partial derivatives, got $chunk"))
    N = chunk === nothing ? default_chunk(length(x)) : Int(chunk)
    return buffers_of(level(f, x), Val(N), x)
end

buffers_of(::Val{0}, ::Val, x::AbstractArray) = throw(NotDifferentiableError("forward mode: the function holds tensors, which " *
    "need no buffers; call forward_gradient(f, x) or forward_jacobian(f, x)"))

function buffers_of(::Val{L}, ::Val{N}, x::AbstractArray) where {L,N}
    AD.check_indices(x)
    T = float(eltype(x))
    seeded = memory_like(x, dual_type(Val(N), T, Val(L)))
    return ForwardBuffers{N,T,L,typeof(seeded)}(seeded)
end

"""Matrices that hold only some of their elements; derivatives are by all of them."""
const Structured = Union{Diagonal,Bidiagonal,Tridiagonal,SymTridiagonal,Symmetric,Hermitian,LinearAlgebra.AbstractTriangular}

memory_like(x::AbstractArray, ::Type{T}) where {T} = similar(x, T)
memory_like(x::Structured, ::Type{T}) where {T} = Matrix{T}(undef, size(x))

function check_buffers(buffers::ForwardBuffers, x::AbstractArray)
    axes(buffers.seeded) == axes(x) || throw(ShapeError(
        "forward mode: these buffers are for arrays of size $(size(buffers.seeded)), got $(size(x))"))
end

@inline function hold!(seeded::AbstractArray{D}, x::AbstractArray) where {D}
    for (i, j) in zip(eachindex(seeded), eachindex(x))
        @inbounds seeded[i] = constant(D, x[j])
    end
end
@inline function move!(seeded::AbstractArray{D}, first::Int, last::Int) where {N,T,L,P,D<:Dual{N,T,L,P}}
    for i in first:last
        @inbounds seeded[i] = D(seeded[i].value, piecewise(k -> ifelse(k == i - first + 1, one(T), zero(T)), P))
    end
end
@inline function rest!(seeded::AbstractArray{D}, first::Int, last::Int) where {D}
    for i in first:last
        @inbounds seeded[i] = D(seeded[i].value, still(D))
    end
end

"""Runs, at most, after each of which all inputs are made anew, since looking for what a function writes costs as much."""
const FEW_RUNS = 10

"""
Make the inputs constants again after a run that moved those from `first` to `last`: these, or all of them if the function
writes to its argument; return whether it may. Of many runs the first one shows it, where a write changes a value or what
moves with it: to look after each run, or to make all inputs anew, would take up to two thirds of the time of a short function.
"""
@inline function settle!(seeded::AbstractArray{D}, x::AbstractArray, first::Int, last::Int, writes::Bool) where {D}
    last == length(x) && return writes  # no run follows
    if first == 1
        writes = length(x) <= FEW_RUNS * last || is_written(seeded, x, first, last)
    end
    writes ? hold!(seeded, x) : rest!(seeded, first, last)
    return writes
end

function is_written(seeded::AbstractArray{D}, x::AbstractArray, first::Int, last::Int) where {N,T,L,P,D<:Dual{N,T,L,P}}
    for (place, (i, j)) in enumerate(zip(eachindex(seeded), eachindex(x)))
        expected = constant(D, @inbounds x[j])
        if first <= place <= last
            expected = D(expected.value, piecewise(k -> ifelse(k == place - first + 1, one(T), zero(T)), P))
        end
        @inbounds seeded[i] === expected || return true
    end
    return false
end

"""
    forward_gradient!(g, f, x, buffers=ForwardBuffers(f, x))

Write the gradient of `f` at `x` into `g` and return the value of `f`. Allocates nothing when `buffers` are given, unless
`f` does.
"""
forward_gradient!(g::AbstractArray, f::F, x::AbstractArray, buffers::ForwardBuffers=ForwardBuffers(f, x)) where {F} =
    write_gradient!(g, f, Base.mightalias(g, x) ? copy(x) : x, buffers)

function write_gradient!(g::AbstractArray, f::F, x::AbstractArray, buffers::ForwardBuffers{N,T,L}) where {F,N,T,L}
    length(g) == length(x) || throw(ShapeError("forward_gradient!: expected memory for $(length(x)) derivatives, got $(size(g))"))
    AD.check_indices(g)
    seeded = buffers.seeded
    check_buffers(buffers, x)
    hold!(seeded, x)
    isempty(x) && return primal_at(Val(L), number(Val(L), f(seeded)))
    value, writes = zero(T), false
    for first in 1:N:length(x)
        last = min(first + N - 1, length(x))
        move!(seeded, first, last)
        y = number(Val(L), f(seeded))
        value = primal_at(Val(L), y)
        put_partials!(g, Val(L), y, first, last)
        writes = settle!(seeded, x, first, last, writes)
    end
    return value
end

@inline function put_partials!(g, ::Val{L}, y::Dual{N,T,L}, first::Int, last::Int) where {N,T,L}
    p = partials(y)
    for i in first:last
        @inbounds g[i] = p[i-first+1]
    end
end
@inline function put_partials!(g, ::Val, y::Real, first::Int, last::Int)
    for i in first:last
        @inbounds g[i] = zero(y)
    end
end
@inline put_partials!(g, ::Val{L}, y::Dual{N,T,K}, first::Int, last::Int) where {L,N,T,K} =
    K < L ? put_zeros!(g, first, last) : kept_beyond("forward mode")
@inline function put_zeros!(g, first::Int, last::Int)
    for i in first:last
        @inbounds g[i] = zero(eltype(g))
    end
end
number(::Val, y::Real) = y
number(::Val, y::Union{GraphNode,Elements}) = throw(NotDifferentiableError("forward_gradient!: the function met tensors, and " *
    "arrays cannot hold their derivatives; call forward_gradient(f, x)"))
number(::Val, y) = throw(ShapeError("forward_gradient: the function must return a number, got $(summary(y)); " *
    "forward_jacobian differentiates arrays"))
@inline primal_at(::Val{L}, y::Dual{N,T,L}) where {N,T,L} = y.value
@inline primal_at(::Val, y::Real) = y

"""
    forward_gradient(f, x; chunk=nothing)

The gradient of `f`, a plain Julia function of an array that returns a number, at the array `x`: of `x`'s size. `f` is run
once for every `chunk` inputs; see [`ForwardBuffers`](@ref) for the default, and for calls that allocate nothing. `f` gets a
copy of `x` and may write to it; of more than $FEW_RUNS runs it must do so in the first one in a way that changes a value
there, or what moves with it, as it does unless it copies equal numbers among later inputs.
"""
forward_gradient(f, x::AbstractArray{<:Real}; chunk::Union{Nothing,Integer}=nothing) =
    forward_gradient_at(level(f, x), f, x, chunk)
forward_gradient(f, x::GraphNode; chunk::Union{Nothing,Integer}=nothing) = AD.forward_gradient_by_ops(f, x)
forward_gradient(f, x; chunk=nothing) = throw(not_an_array("forward_gradient", x))
forward_gradient_at(::Val{0}, f, x, chunk) = AD.forward_gradient_by_ops(f, x)
forward_gradient_at(::Val, f, x, chunk) = forward_gradient_of(f, x, ForwardBuffers(f, x; chunk=chunk))

not_an_array(name, x) = NotDifferentiableError("$name: expected an array of real numbers, got $(typeof(x)); " * (
    eltype(x) <: Complex ? "pass real and imaginary parts separately" :
    eltype(x) <: GraphNode ? "make one tensor of them with stack()" : "derivative takes a number"))

function forward_gradient_of(f::F, x, buffers::ForwardBuffers{N,T,L}) where {F,N,T,L}
    seeded = buffers.seeded
    isempty(x) && return memory_like(x, T)
    hold!(seeded, x)
    move!(seeded, 1, min(N, length(x)))
    y = f(seeded)
    has_tensors(y) && return AD.forward_gradient_by_ops(f, x)
    g = memory_like(x, partial_type(Val(L), number(Val(L), y), T))
    put_partials!(g, Val(L), y, 1, min(N, length(x)))
    writes = settle!(seeded, x, 1, min(N, length(x)), false)
    for first in N+1:N:length(x)
        last = min(first + N - 1, length(x))
        move!(seeded, first, last)
        y = number(Val(L), f(seeded))
        g = widened(g, partial_type(Val(L), y, T))
        put_partials!(g, Val(L), y, first, last)
        writes = settle!(seeded, x, first, last, writes)
    end
    return g
end

"""The type of a result's partial derivatives: that of the inputs', or of dual numbers that the function holds."""
@inline partial_type(::Val{L}, ::Dual{N,S,L}, ::Type{T}) where {N,S,L,T} = S <: DualNumber ? S : T
@inline partial_type(::Val, ::Real, ::Type{T}) where {T} = T
partial_type(v::Val, y::AbstractArray{D}, ::Type{T}) where {D,T} = isconcretetype(D) ? type_of_partials(v, D, T) :
    mapreduce(e -> partial_type(v, e, T), promote_type, y; init=T)
partial_type(v::Val, y::Tuple, ::Type{T}) where {T} = promote_type(T, map(e -> partial_type(v, e, T), y)...)
type_of_partials(::Val{L}, ::Type{<:Dual{N,S,L}}, ::Type{T}) where {N,S,L,T} = S <: DualNumber ? S : T
type_of_partials(::Val, ::Type{<:Real}, ::Type{T}) where {T} = T

widened(g::AbstractArray{S}, ::Type{T}) where {S,T} =
    promote_type(S, T) === S ? g : copyto!(similar(g, promote_type(S, T)), g)

"""
    forward_jacobian!(J, f, x, buffers=ForwardBuffers(f, x))

Write the derivatives of all elements of the array `f(x)` (rows) by all elements of `x` (columns) into the matrix `J`, and
return it. Allocates nothing when `buffers` are given, unless `f` does.
"""
forward_jacobian!(J::AbstractMatrix, f::F, x::AbstractArray, buffers::ForwardBuffers=ForwardBuffers(f, x)) where {F} =
    write_jacobian!(J, f, Base.mightalias(J, x) ? copy(x) : x, buffers)

function write_jacobian!(J::AbstractMatrix, f::F, x::AbstractArray, buffers::ForwardBuffers{N,T,L}) where {F,N,T,L}
    AD.check_indices(J)
    seeded = buffers.seeded
    check_buffers(buffers, x)
    hold!(seeded, x)
    writes = false
    for first in 1:N:length(x)
        last = min(first + N - 1, length(x))
        move!(seeded, first, last)
        y = elements(f(seeded))
        size(J) == (length(y), length(x)) || throw(ShapeError("forward_jacobian!: expected a matrix of size " *
            "$((length(y), length(x))), got $(size(J))"))
        put_columns!(J, Val(L), y, first, last)
        writes = settle!(seeded, x, first, last, writes)
    end
    return J
end

@inline function put_columns!(J, ::Val{L}, y, first::Int, last::Int) where {L}
    for (row, v) in enumerate(y)
        put_partials!(view(J, row, :), Val(L), v, first, last)
    end
end

elements(y::AbstractArray) = y
elements(y::Union{Real,Tuple}) = (y...,)
elements(y) = throw(ShapeError("forward_jacobian: the function must return an array of numbers, got $(typeof(y))"))

"""
    forward_jacobian(f, x; chunk=nothing)

The derivatives of all elements of `f(x)` (rows) by all elements of `x` (columns), as a matrix; `f` is a plain Julia
function. It is run once for every `chunk` inputs, as in [`forward_gradient`](@ref).
"""
forward_jacobian(f, x::AbstractArray{<:Real}; chunk::Union{Nothing,Integer}=nothing) =
    forward_jacobian_at(level(f, x), f, x, chunk)
forward_jacobian(f, x::GraphNode; chunk::Union{Nothing,Integer}=nothing) = AD.forward_jacobian_by_ops(f, x)
forward_jacobian(f, x; chunk=nothing) = throw(not_an_array("forward_jacobian", x))
forward_jacobian_at(::Val{0}, f, x, chunk) = AD.forward_jacobian_by_ops(f, x)
forward_jacobian_at(::Val, f, x, chunk) = forward_jacobian_of(f, x, ForwardBuffers(f, x; chunk=chunk))

function forward_jacobian_of(f::F, x, buffers::ForwardBuffers{N,T,L}) where {F,N,T,L}
    seeded = buffers.seeded
    hold!(seeded, x)
    move!(seeded, 1, min(N, length(x)))
    result = f(seeded)
    has_tensors(result) && return AD.forward_jacobian_by_ops(f, x)
    y = elements(result)
    J = Matrix{partial_type(Val(L), y, T)}(undef, length(y), length(x))
    put_columns!(J, Val(L), y, 1, min(N, length(x)))
    writes = settle!(seeded, x, 1, min(N, length(x)), false)
    for first in N+1:N:length(x)
        last = min(first + N - 1, length(x))
        move!(seeded, first, last)
        y = elements(f(seeded))
        length(y) == size(J, 1) || throw(ShapeError("forward_jacobian: the function must return as many numbers at every " *
            "call, got $(size(J, 1)) and $(length(y))"))
        J = widened(J, partial_type(Val(L), y, T))
        put_columns!(J, Val(L), y, first, last)
        writes = settle!(seeded, x, first, last, writes)
    end
    return J
end

end
