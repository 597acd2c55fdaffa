# Functions without a derivative: ops marked constant, computed anew at each replay; sizes, which are plain numbers; `prod`.

using TwinGrad.AD: AD

const FIRST = [1.5 -2.5 0.0; -0.5 NaN 3.0]
const SECOND = [-1.5 2.5 NaN; Inf 0.25 -3.0]
truth(x) = x .> 0  # of plain arrays and of tensors

# On plain arrays and on tensors alike; the results differ between the two inputs. Truth values are 1 and 0 in tensors.
const FUNCTIONS_TRIED = [
    "floor" => x -> floor.(x), "ceil" => x -> ceil.(x), "round" => x -> round.(x), "trunc" => x -> trunc.(x),
    "sign" => x -> sign.(x), "isnan" => x -> isnan.(x), "isfinite" => x -> isfinite.(x), "isinf" => x -> isinf.(x),
    "less" => x -> x .< 0.1, "less_equal" => x -> x .<= 0, "greater" => x -> x .> 0.1, "greater_equal" => x -> x .>= 0,
    "equal" => x -> x .== 1.5, "not_equal" => x -> x .!= 1.5, "logical_not" => x -> .!truth(x),
    "logical_and" => x -> truth(x) .& (x .< 2), "logical_or" => x -> truth(x) .| isnan.(x),
    "xor" => x -> xor.(truth(x), x .< 2), "any" => x -> any(x .== 3), "any, dims" => x -> any(truth(x); dims=1),
    "any of" => x -> any(isnan, x; dims=2), "all" => x -> all(x .!= 3; dims=(1, 2)), "all of" => x -> all(isfinite, x; dims=2),
    "argmax" => x -> argmax(vec(x)), "argmin" => x -> argmin(vec(x)), "argmax, vector" => x -> argmax(x[1, :]),
    "argmin, dims" => x -> argmin(x[:, 1]; dims=1), "count" => x -> count(truth(x); dims=2), "step" => x -> Float64.(x .> 0)]

numbers(x) = x isa Tensor ? numbers(value(x)) : x isa AbstractArray ? (ndims(x) == 0 ? numbers(x[]) : Float64.(x)) : Float64(x)

@testset "$name follows its input, eagerly and at every replay" for (name, called) in FUNCTIONS_TRIED
    f = Hidden(called)
    # What Julia has for Float64; Float32 holds the same numbers.
    of_first, of_second, of_turned = numbers(f(FIRST)), numbers(f(SECOND)), numbers(f(permutedims(SECOND)))
    @test !isequal(of_first, of_second)
    for T in (Float64, Float32)
        a, b = T.(FIRST), T.(SECOND)
        @test isequal(numbers(f(Constant(a))), of_first) && isequal(numbers(f(Constant(b))), of_second)
        compiled = compile(f)
        for (x, expected) in ((a, of_first), (b, of_second), (a, of_first))
            @test isequal(numbers(compiled(x)), expected)
        end
        # In a loop, and behind views whose elements do not lie in order.
        steps = cat(a, b, a; dims=3)
        at_each = compile(xs -> scan((c, x) -> (c, astype(f(x) .* 1, T)), T(0), xs)[2])
        startswith(name, "arg") || @test isequal(numbers(at_each(steps)),
            cat((y isa AbstractArray ? y : [y] for y in (of_first, of_second, of_first))...; dims=ndims(of_first) + 1))
        turned = compile(x -> f(permutedims(x)))
        @test isequal(numbers(turned(b)), of_turned)
    end
end

@testset "positions are Julia's: the first of equal ones, of NaN before all" begin
    for v in ([1.0, 3.0, 3.0], [-1.0], [NaN, 5.0, NaN], [2.0, NaN], [-Inf, -Inf], [0.0, -0.0], [-0.0, 0.0], [Inf, -Inf, Inf])
        @test item(argmax(Constant(v))) === argmax(v) && item(argmin(Constant(v))) === argmin(v)
    end
    random = AD.MersenneTwister(3)
    x = Float64.(rand(random, 1:4, 3, 4, 5))
    for (mine, theirs) in ((argmax_along, argmax), (argmin_along, argmin)), dims in (1, 2, 3)
        along = map(i -> i[dims], theirs(x; dims=dims))
        @test value(mine(Constant(x), dims)) == along && compile(t -> mine(t, dims))(Float32.(x)) == along
        @test eltype(mine(Constant(x), dims)) === Int64
    end
    @test value(argmax_along(Constant(x), (1, 3)))[1, 2, 1] == argmax(vec(x[:, 2, :])) && item(argmin_along(Constant(x), :)) == argmin(vec(x))
    @test value(argmax_along(Constant([-0.0 0.0; 0.0 -0.0]), 1)) == [2 1] == value(argmin_along(Constant([0.0 -0.0; -0.0 0.0]), 1))
    @test occursin("argmax_along", message_of(() -> argmax(Constant(x)))) && occursin("empty", message_of(() -> argmax(Constant(Float64[]))))
    labels = compile(y -> sum(astype(argmax_along(y, 1), Float64) .== [1.0 2.0]) ./ 2)  # how often a class is right
    @test labels([3.0 1.0; 2.0 5.0]) == 1 && labels([3.0 1.0; 4.0 0.0]) == 0
    # A position is an index: of a vector, and of a matrix in the order of memory.
    pick = compile(x -> x[argmax(x)])
    @test pick([1.0, 5.0, 2.0]) == 5 && pick([7.0, 5.0, 2.0]) == 7
end

@testset "the derivative through them is zero, and what multiplies them has one" begin
    x = [1.5 -2.5; 0.25 3.0]
    for f in (floor, ceil, round, trunc, sign)
        for g in (grad(x -> sum(f.(x) .* x)), compile(grad(x -> sum(f.(x) .* x))))
            @test g(x) == f.(x) && g(-x) == f.(-x)
        end
        @test jvp(x -> f.(x) .* x, (x,), (one.(x),))[2] == f.(x) && grad(x -> sum(f.(x)))(x) == zeros(2, 2)
    end
    best(x) = sum(x .* (x .== maximum(x; dims=1)))
    @test compile(grad(best))(x) == [1 0; 0 1] && grad(x -> any(x .> 0) * x[1])(x) == [1 0; 0 0]
    @test floor(Int, Constant(2.7)) === 2 && round(Int, Constant(2.7)) === 3 && isnan(Constant(NaN)) === true
    @test value(floor(Constant(2.7))) == fill(2.0) && value((x -> isnan(x) + floor(x)).(Constant([1.5, 2.0]))) == [1, 2]
end

@testset "sizes are plain, and arrays like another are constants" begin
    x = Constant(Float32[1 2 3; 4 5 6])
    for f in (size, ndims, length, axes, eltype, x -> size(x, 1), x -> axes(x, 2), x -> size(x)[2], lastindex)
        @test f(x) === f(value(x))
        @test (seen = []; compile(t -> (push!(seen, f(t)); t .* 1))(value(x)); seen) == [f(value(x))]
    end
    like(x) = x .* 2 .+ zero(x) .+ fill!(similar(x), 3) .+ fill(one(eltype(x)), size(x)) .+ ones(eltype(x), size(x))
    for f in (like, compile(like))
        @test f(value(x)) == 2 .* value(x) .+ 5 && f(-value(x)) == -2 .* value(x) .+ 5
    end
    @test value(zero(x)) == zeros(Float32, 2, 3) && eltype(zero(x)) === Float32 && value(one(Constant([2.0 1; 1 1]))) == [1 0; 0 1]
    @test item(one(Constant(3.0))) == 1 && occursin("square", message_of(() -> one(x)))
    @test size(similar(x)) == (2, 3) && similar(x) isa Matrix{Float32} && similar(x, Int, (2,)) isa Vector{Int}
    @test occursin("stack()", message_of(() -> (a = similar(x); a[1] = x[1]; a)))
end

@testset "a product has derivatives of every order" begin
    random = AD.MersenneTwister(11)
    for (x, dims) in ((randn(random, 5), :), (randn(random, 3, 4), 1), (randn(random, 3, 4), 2), (randn(random, 2, 3, 2), (1, 3)),
            (randn(random, 0, 2), 1), (randn(random, 1), :), ([2.0, 0.0, 3.0], :), ([0.0, 0.0, 3.0], :), (randn(random, 7), 1))
        @test value(prod(Constant(x); dims=dims)) ≈ (dims isa Colon ? fill(prod(x)) : prod(x; dims=dims))
        f(x) = sum(sin.(prod(x; dims=dims)))
        gradcheck(f, x)  # throws where they differ
        @test compile(grad(f))(x) ≈ grad(f)(x)
    end
    p(x) = prod(x)
    for x in ([2.0, -1.0, 3.0, 0.5], [2.0, 0.0, 3.0, 0.5], [0.0, 0.0, 3.0, 0.5])
        others = [prod(x[setdiff(1:4, i)]) for i in 1:4]
        @test grad(p)(x) ≈ others
        @test hessian(p, x) ≈ [i == j ? 0.0 : prod(x[setdiff(1:4, (i, j))]) for i in 1:4, j in 1:4]
        @test grad(x -> hessian(p, x)[1, 2])(x) ≈ [0, 0, x[4], x[3]]
        @test jacobian(x -> hessian(p, x)[1, :], x; mode=:reverse) ≈ jacobian(x -> hessian(p, x)[1, :], x; mode=:forward)
    end
    @test compile(prod)([2.0, 3.0]) == 6 && prod(abs, Constant([-2.0, 3.0])) == 6
end

@testset "a corner that is constant has derivatives zero of every order" begin
    # Forward mode has infinity times 0 where the power's derivative is infinite, as PyTorch and JAX.
    for (f, power) in ((x -> relu(x)^1.5, 1.5), (x -> max(x, 0.0)^1.5, 1.5), (x -> clamp(x, 0.0, 9.0)^1.5, 1.5),
            (x -> max(0.0, x)^0.5, 0.5), (x -> min(max(x, 0.0), 2.0)^1.5, 1.5))
        for d in (grad(f), grad(grad(f)), compile(grad(f)), compile(grad(grad(f))), x -> grad(y -> derivative(f, y))(x),
                x -> derivative(y -> grad(f)(y), x))
            @test d(-1.0) == 0
        end
        @test isequal(derivative(f, -1.0), power < 1 ? NaN : 0.0)
        @test isnan(derivative(y -> derivative(f, y), -1.0))
        @test isfinite(grad(f)(1.0)) && grad(f)(1.0) > 0
    end
    @test grad(x -> sum(relu.(x) .^ 0.5))([-1.0, 4.0]) == [0, 0.25] && grad(x -> maximum(x)^0.5)([-1.0, 0.25]) == [0, 1]
end
