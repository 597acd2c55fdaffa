# Julia's functions on tensors against the same functions on plain arrays: equal, or refused with an error of the engine.
#
# What differs on purpose, and counts as equal: truth values are 1 and 0; numbers and integers take the float type of the
# tensors beside them; NaN is where Julia's function of a number throws a DomainError; a number may be an array without
# dimensions. Where Julia has no method, or its sizes do not fit, a tensor may have its own
# meaning (numbers and arrays are added by broadcasting): such calls are counted and not compared.

module Sweep

using LinearAlgebra, Statistics, Test
using TwinGrad
using TwinGrad.AD: AD, DOTTED

# Thousands of calls, each once: compiling them is what takes time.
@static if isdefined(Base, :Experimental) && isdefined(Base.Experimental, Symbol("@optlevel"))
    Base.Experimental.@optlevel 0
end

const COUNTS = Dict{Symbol,Int}()
const DIFFERENCES = String[]
count_up!(kind) = (COUNTS[kind] = get(COUNTS, kind, 0) + 1; nothing)

tensor(x::AbstractArray{<:Number}) = Constant(x)
tensor(x::AbstractFloat) = Constant(x)
tensor(x) = x

comparable(x::Tensor) = comparable(value(x))
comparable(x::Bool) = Float64(x)
comparable(x::Number) = x
comparable(x::AbstractArray) = ndims(x) == 0 ? comparable(x[]) : map(comparable, collect(x))
comparable(x::Tuple) = map(comparable, x)
comparable(x) = x
alike(a::Number, b::Number) = isequal(a, b) || (a == b) || (isnan(a) && isnan(b)) ||
    isapprox(a, b; rtol=1e-5, atol=a isa Float32 || b isa Float32 ? 1e-6 : 1e-13)
alike(a::AbstractArray, b::AbstractArray) = size(a) == size(b) && all(map(alike, a, b))
alike(a::Tuple, b::Tuple) = length(a) == length(b) && all(map(alike, a, b))
alike(a, b) = isequal(a, b)

"""A function of plain numbers that is NaN where Julia's throws a DomainError."""
total(f) = (x...) -> try
    f(x...)
catch error
    error isa DomainError ? NaN : rethrow()
end

"""What `f` gives for each element, without compiling a loop for it."""
function each(@nospecialize(f), x)
    found = Any[f(v) for v in vec(collect(x))]
    return reshape(convert(Vector{eltype(x)}, found), size(x))
end

outcome(@nospecialize(f), @nospecialize(arguments)) =
    try
        f(arguments...)
    catch error
        error
    end

"""Compare `f` of plain arguments with `f` of tensors, eagerly and compiled; `plain` stands for `f` on plain ones."""
function tried(name, @nospecialize(f), @nospecialize(arguments...); @nospecialize(plain=f), compiled_f=compile(f))
    expected = outcome(plain, arguments)
    tensors = outcome(() -> map(tensor, arguments), ())
    eager = tensors isa Exception ? tensors : outcome(f, tensors)
    if eager isa EngineError
        count_up!(:refused)
        COUNTS[:refused] % 5 == 0 || return nothing  # most of the time goes into tracing, so of these only some
    elseif eager isa Exception
        expected isa Exception ? count_up!(:refused_by_Julia) : report(name, arguments, "$(typeof(expected)) expected", eager)
        return nothing
    elseif expected isa Exception
        count_up!(:extension)
    elseif alike(comparable(expected), comparable(eager))
        count_up!(:equal)
    else
        report(name, arguments, expected, eager)
    end
    # What is no array, or of another type than the rest, adapts when it is an argument of a compiled function.
    all(x -> x isa Union{AbstractArray{Float64},Float64}, arguments) ||
        all(x -> x isa AbstractArray{Float32}, arguments) || return nothing
    compiled = outcome(compiled_f, map(x -> x isa AbstractArray ? collect(x) : x, arguments))
    if eager isa EngineError
        compiled isa EngineError ? count_up!(:compiled_refused) : report(name, arguments, eager, compiled; what="compiled")
    elseif compiled isa Exception
        # What needs values while it is traced is refused there alone.
        compiled isa EngineError ? count_up!(:compiled_refused) : report(name, arguments, eager, compiled; what="compiled")
    else
        isequal(comparable(eager), comparable(compiled)) || alike(comparable(eager), comparable(compiled)) ?
            count_up!(:compiled_equal) : report(name, arguments, eager, compiled; what="compiled")
    end
    return nothing
end

short(x) = first_line(x isa Exception ? sprint(showerror, x) : string(x isa Tensor ? value(x) : x))
first_line(text) = join(Iterators.take(split(text, "\n")[1], 150))

report(name, @nospecialize(arguments), @nospecialize(expected), @nospecialize(found); what="eager") = push!(DIFFERENCES,
    "$name$(map(a -> a isa Function ? "f" : a, arguments)) $what: expected $(short(expected)), got $(short(found))")

const SPECIAL = [-Inf, -2.5, -1.0, -0.5, -0.0, 0.0, 0.25, 1.0, 2.5, 700.0, Inf, NaN]
const M = [1.5 -2.0 0.5; 3.0 0.25 -1.0]

# Arrays of every element type, shape and layout.
const TYPES = [Float64[1 2; 3 4], Float32[1 2; 3 4], [1 2; 3 4], [true false; true true], big.([1.0 2; 3 4]), [1.0+2im 2; 3 4],
    [1//2 2; 3 4]]
const LAYOUTS = Any[M, M', view(M, :, 2:3), view(M, 2:-1:1, :), permutedims(M), M[:, 1], view(M, 1, :), view(M[:], 6:-2:1),
    1.0:4.0, fill(1.5), Float64[], zeros(0, 3), zeros(3, 0), [2.5], fill(2.5, 1, 1), reshape(collect(1.0:12), 2, 3, 2), Float32[1, 2, 3]]

# IEEE 754's power, as C's and Julia's before 1.8 at an infinite base.
power(a, b) = a == -Inf && isfinite(b) && !isinteger(b) ? (b > 0 ? Inf : 0.0) : total(^)(a, b)

const PAIRS = Any[(M, 2), (M, M'), (2, M), (M, 2.5f0), (M, pi), (M, 1//2), (M, true), (M, M[:, 1]), (M, zeros(0)), (M, [1 2 3]),
    (M, [true, false]), (Float32.(M), 2.0), (Float32.(M), M), (M, 1:2), (M, 2im), (M, big(2.0)), ([1, 2], [1.0, 2.0])]

@testset "every dotted function, at special values and in every layout" begin
    for f in sort!([f for f in keys(DOTTED) if f isa Function && parentmodule(f) in (Base, Core, Base.Math)]; by=string)
        name = string(f, ".")
        if f in (ifelse, clamp)
            for (a, b, c) in ((M, 0.0, 1.0), (M, 1, -1), (M, NaN, 1.0), (M, -1.0, NaN), (M, M .+ 1, M .- 1), (M, -Inf, Inf), (SPECIAL, -1.0, 1.0))
                f === clamp ? tried(name, (x, l, h) -> clamp.(x, l, h), a, b, c) :
                    tried(name, (x, l, h) -> ifelse.(x .> 0, l, h), a, b, c)
            end
        elseif applicable(f, 1.0) && !(f in (&, |, xor, -, +, *, max, min, <, <=, >, >=, ==, !=))
            plain = total(f)
            for x in (f === exp ? Any[LAYOUTS; TYPES] : Any[])
                tried(name, x -> f.(x), x; plain=x -> plain.(x))
            end
            for x in (SPECIAL, Float32.(SPECIAL))
                tried(name, x -> f.(x), x; plain=x -> each(plain, x))
            end
            at_once = compile(f)
            for x in SPECIAL
                tried(name, f, x; plain=plain, compiled_f=at_once)
            end
        elseif f in (&, |, xor)
            tried(name, (a, b) -> f.(a .> 0, b .> 0), M, -M)
            tried(name, (a, b) -> f.(a, b), [true, false], [true, true])
        elseif f === (!)
            tried(name, a -> .!(a .> 0), M)
        else
            plain = total((a, b) -> f(a, b))
            grid(f) = (a, b) -> f.(a, b)
            tried(name, grid(f), SPECIAL, permutedims(SPECIAL); plain=f === (^) ? (a, b) -> power.(a, b) : grid(plain))
            for (a, b) in (f in (+, ^) ? PAIRS : PAIRS[1:2])
                tried(name, grid(f), a, b; plain=grid(plain))
            end
            f in (+, -, *, /, ^, max, min) || continue
            at_once = compile(f)
            for a in SPECIAL, b in SPECIAL  # numbers alone: straight-line code
                tried(string(f), f, a, b; plain=f === (^) ? power : plain, compiled_f=at_once)
            end
        end
    end
    for wrong in (x -> exp.(x, x), x -> (!=).(x), x -> (<).(x), x -> AD.WHERE(x, x), x -> AD.MUL(x, x, x))  # numbers of operands
        @test outcome(wrong, (Constant(M),)) isa EngineError
    end
    for p in (-2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 5, 2.0, 1//2), T in (Float64, Float32)
        tried(".^ $p", x -> x .^ p, T.(SPECIAL); plain=x -> power.(x, p))
    end
    tried(".^ 2", x -> x .^ 2, SPECIAL)
    tried(".^ -1", x -> x .^ -1, SPECIAL)
    for g in (x -> x^2 + sin(x) / 3, x -> max(x, 0.5) - min(x, 2) * abs(x), x -> x > 0, x -> floor(x) + round(x), x -> hypot(x, 1), x -> log2(x),
            x -> x > 0 ? x : -x, x -> exp10(x), x -> mod(x, 2))
        tried("a function of one's own.", x -> g.(x), M)
    end
end

@testset "reductions: dims, functions, keywords" begin
    for f in (sum, prod, maximum, minimum, mean, var, std, norm, extrema, length, ndims, size, eltype)
        for x in (f in (sum, std) ? Any[LAYOUTS; TYPES] : Any[M, M', M[:, 1], 1.0:4.0, fill(1.5), Float64[], [1, 2]])
            tried(string(f), f, x)
        end
        for x in Any[[NaN, 1.0], [-0.0, 0.0], [Inf, -Inf]]
            tried(string(f), f, x)
        end
        f in (length, ndims, size, eltype, norm) && continue
        for x in (f === sum ? (M, reshape(collect(1.0:12), 2, 3, 2), zeros(0, 3)) : (M,)),
                d in (f === sum ? (1, 2, 3, (1, 2), (2, 1), (1, 1), 0, -1, 1.0, true, nothing, "a", [1, 2], 1:2, :) : (1, 3, (2, 1), 1.0))
            tried("$f dims=$d", x -> f(x; dims=d), x)
        end
        f === extrema || f in (var, std) || tried("$f of a function", x -> f(abs, x), M)
        tried("$f of a function", x -> f(v -> v^2, x), M)
        for kinds in ((init=0.0,), (by=abs,), (weights=[1.0],), (dims=1, init=0.0), (mean=0.5,), (corrected=false,), (corrected=true, dims=2))
            tried("$f $kinds", x -> f(x; kinds...), M)
        end
        tried("$f of two", f, M, 1.0)
    end
    for f in (var, std), x in ([5.0], Float64[], [Inf], [1.0, NaN], fill(2.0, 1, 3)), c in (true, false), d in (:, 1)
        tried("$f corrected=$c dims=$d", x -> f(x; corrected=c, dims=d), x)
    end
    for x in ([0.0, 0.0], [3.0, 4.0], [1e200, 1e200], Float64[], [Inf, 1.0], M), p in (1, 2, Inf, 3, 0, -Inf, 2.0, 1//2)
        tried("norm $p", x -> norm(x, p), x)
    end
    for f in (argmax, argmin, findmax, findmin), x in Any[M[:, 1], M, [NaN, 1.0], Float64[], [2.0, 2.0], fill(1.5)]
        tried(string(f), f, x)
        tried("$f dims", x -> f(x; dims=1), x)
    end
    for x in (M, [1.0, 0.0], Float64[])
        tried("any", x -> any(x .> 1), x)
        tried("all", x -> all(x .> 1; dims=1), x)
        tried("any of", x -> any(v -> v > 1, x), x)
        tried("count", x -> count(x .> 1), x)
        tried("count of", x -> count(isfinite, x), x)
    end
end

@testset "shapes and indices" begin
    A = reshape(collect(1.0:12), 2, 3, 2)
    for dims in ((:,), (3, 4), (3, :), (:, 4), (:, :), (5, :), (12.0,), (3.0, 4), (-1, 4), (0,), (12,), (2, 6, 1), ("a",), (big(3), 4), (Int8(3), 4))
        tried("reshape $dims", x -> reshape(x, dims...), A)
        tried("reshape ($dims)", x -> reshape(x, dims), A)
    end
    for p in ((1, 2, 3), (3, 1, 2), [2, 1, 3], (1, 1, 2), (1, 2), (1.0, 2, 3), (0, 1, 2), 1:3)
        tried("permutedims $p", x -> permutedims(x, p), A)
    end
    for f in (vec, permutedims, transpose, adjoint, copy, collect, reverse, zero, one, diff, sort, cumsum, unique, float, real, first, last,
            isempty, -, +, inv, iszero, isreal, identity, tr, det, diag), x in (M, M[:, 1], fill(1.5))
        tried(string(f), f, x)
    end
    for d in (1, 2, 3, (1, 2), 1.0)
        tried("dropdims $d", x -> dropdims(x; dims=d), reshape([1.0, 2.0], 1, 2, 1))
        tried("reverse $d", x -> reverse(x; dims=d), M)
        tried("diff $d", x -> diff(x; dims=d), M)
        tried("cat $d", x -> cat(x, 2x; dims=d), M)
        tried("cumsum $d", x -> cumsum(x; dims=d), M)
    end
    for (a, b) in ((M, M), (M, M[:, 1]), (M[:, 1], M[:, 2]), (1.0, M[:, 1]), (M, A), (zeros(0, 3), M), (M, [1 2 3]), (1.0, 2.0))
        for f in (vcat, hcat, (a, b) -> cat(a, b; dims=Val(2)), (a, b) -> cat(a, b; dims=0))
            tried("cat", f, a, b)
        end
    end
    places = ((1,), (12,), (0,), (13,), (:,), (1:3,), (4:-1:1,), (2, 3, 1), (2, 3), (2, 4, 1), (:, 2, :), (1:2, 1:2, 1), (2:-1:1, :, 1), (1, 1, 1, 1),
        (1.0,), (1.5,), ([1.0, 2.0],), ([1, 3],), ([1 2; 3 4],), ([1, 2], :, 1), ([2, 1], [1, 3], 1), ([0],), ([1, 4], 1, 1), (true,), (A .> 5,), ([true, false], :, 1),
        ([true, false, true], 1, 1), (:, [true, false, true], 1), (CartesianIndex(1, 2, 1),), (CartesianIndex(3, 1, 1),), (CartesianIndex(1, 2), 2),
        ([CartesianIndex(1, 1, 1), CartesianIndex(2, 3, 2)],), (1, CartesianIndex(2, 1)), (), (1:0,), (3:2, :, :), (Int8(2),), (UInt(2), 1, 1), (big(2),), ("a",),
        (nothing,), (:, :), (:, 3), (1:2:3,), (Base.OneTo(2), 1, 1), (1:2.0,), (-1,), (1:13,), (:, :, :, 1), (:, :, :, 2), (Int[],))
    for place in places
        tried("getindex $place", x -> x[place...], A)
    end
    tried("getindex end", x -> x[end, end, end] + x[end], A)
    for k in (1, 2, 0, 3, 1.0)
        tried("getindex of a vector $k", x -> x[k], [5.0, 6.0])
        tried("size $k", x -> size(x, k), A)
        tried("axes $k", x -> axes(x, k), A)
    end
    tried("getindex of a mask", x -> x[x .> 1], M)
    tried("indexing a number", x -> x[], 1.5)
    tried("indexing a number", x -> x[], fill(1.5))
    for f in (x -> (x[1] = 2.0; x), x -> fill!(x, 0.0), x -> (x .= 1; x), x -> (x .+= 1; x), x -> copyto!(x, x), x -> mul!(x, x, x), x -> push!(x, 1.0))
        @test outcome(f, (Constant([1.0]),)) isa Union{EngineError,MethodError}
    end
end

@testset "products and comparisons" begin
    operands = Any[M, M[:, 1], 2.0, 3, 1im, [1.0 2; 3 4], permutedims(M[:, 1]), zeros(0, 2), reshape(collect(1.0:8), 2, 2, 2), [1, 2], Float32[1, 2], 1//2, fill(2.0)]
    for f in (+, *, /, dot, ==, -, \, ^, !=, <, <=, >, isapprox, max, min, atan, hypot, mod, log, kron, cross, muladd)
        several = f in (*, dot) ? operands : f in (+, /, ==) ? operands[1:6] : f === (^) ? operands[2:4] : operands[1:4]
        for a in several, b in several
            any(x -> x isa AbstractArray{Float64} || x isa Float64, (a, b)) || continue
            # A tensor without dimensions is a number, and an array without dimensions is none.
            f === (==) && fill(2.0) in (a, b) && continue
            tried(string(f), f, a, b)
        end
    end
    for f in (x -> M * x, x -> x * M', x -> x' * x, x -> x^2, x -> x^-1, x -> 2^x, x -> x \ M), x in (M, [1.0 2; 3 4], M[1, :], 2.0)
        tried("product", f, x)
    end
    vectors = Any[M[:, 1], -M[:, 2], [2.5], Float32[1, 2], M, [1.0 2; 3 4], 2.0]
    for f in ((x, y) -> x' * y, (x, y) -> transpose(x) * y, (x, y) -> x * y', (x, y) -> (2x' - x' / 2) * y, (x, y) -> x' * y * x',
            (x, y) -> (x' * y)', (x, y) -> x' .* y, (x, y) -> (x')' * y, (x, y) -> (x' .+ 1) * y), x in vectors, y in vectors
        tried("product with a transposed one", f, x, y)
    end
    for w in (M[:, 1]', transpose([1, 2]), Float32[1, 2]'), x in (M[:, 2], [1.0 2; 3 4], Float32[1, 2], 2.0)
        tried("product with a constant one", x -> w * x, x)
        tried("product with a constant one", x -> x' * w', x)
    end
    for T in (Float32, Float64, Int64)
        tried("conversion to $T", x -> T.(x), M)
        tried("conversion to $T", x -> T.(x), [1.0, 2.0])
    end
end

@testset "nothing differs in silence" begin
    for line in DIFFERENCES
        println("  ", line)
    end
    println("  sweep: ", join(["$n $k" for (k, n) in sort!(collect(COUNTS); by=string)], ", "))
    @test isempty(DIFFERENCES)
    @test get(COUNTS, :equal, 0) > 1000 && get(COUNTS, :compiled_equal, 0) > 500 && get(COUNTS, :refused, 0) > 500
end

end
