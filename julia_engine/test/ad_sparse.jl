# Sparse Jacobians and Hessians: equal to the dense ones, with few colours; patterns that miss nothing, or are refused.

using LinearAlgebra
using Random
using SparseArrays
using TwinGrad.AD: AD

banded(n, below, above) = [-above <= i - j <= below for i in 1:n, j in 1:n]
arrow(n) = [i == j || i == 1 || j == 1 for i in 1:n, j in 1:n]
blocks(n, size) = kron(Matrix(I, n, n), trues(size, size)) .> 0
rosenbrock(x) = sum(100 .* (x[2:end] .- x[1:end-1] .^ 2) .^ 2 .+ (1 .- x[1:end-1]) .^ 2)
tridiagonal(x) = sin.(x[3:end]) .* x[2:end-1] .+ x[1:end-2] .^ 2

"""The places of a pattern, and its columns' colours; a symmetric one's star colours."""
colors_of(pattern) = AD.column_colors(places(pattern)..., size(pattern))
star_colors_of(pattern) = AD.star_colors(places(pattern)..., size(pattern, 1))
places(pattern) = (p = vec(findall(pattern)); (Int[q[1] for q in p], Int[q[2] for q in p]))

some_patterns(rng) = [[banded(9, 1, 1), banded(7, 0, 3), arrow(8), blocks(3, 4), falses(3, 5)];
    [rand(rng, 11, 8) .< density for density in (0.05, 0.2, 0.6)]]

"""A function whose Jacobian has these entries."""
function with_pattern(pattern, rng)
    rows, columns = places(pattern)
    weights = randn(rng, length(rows))
    return function (x)
        terms = sin.(gather(x, columns) .* weights) .* gather(x, columns)
        return vjp(y -> gather(y, rows), zeros(size(pattern, 1)))[2](terms)[1]
    end
end

@testset "Jacobians of any pattern" begin
    rng = MersenneTwister(seeded(81))
    for pattern in some_patterns(rng)
        f, x = Hidden(with_pattern(pattern, rng)), randn(rng, size(pattern, 2))
        dense = jacobian(f, x)
        @test Matrix(sparsity(f, x)) == pattern
        for mode in (nothing, :forward, :reverse), given in (nothing, sparsity(f, x))
            found = sparse_jacobian(f, x; pattern=given, mode=mode)
            @test found isa SparseMatrixCSC{Float64,Int} && Matrix(found) ≈ dense
        end
        @test Matrix(sparse_jacobian(f, x; pattern=fill(true, size(pattern)))) ≈ dense
    end
end

@testset "Hessians of any pattern" begin
    rng = MersenneTwister(seeded(82))
    for pattern in some_patterns(rng)
        size(pattern, 1) == size(pattern, 2) || continue
        rows, columns = places(pattern)
        weights = randn(rng, length(rows))
        f(x) = sum(sin.(gather(x, rows) .* weights) .* gather(x, columns) .^ 2)
        x = randn(rng, size(pattern, 1))
        found = Matrix(sparse_hessian(Hidden(f), x))
        @test found ≈ hessian(Hidden(f), x) && found == found'
        triangle = [i <= j && (i == j || pattern[i, j] || pattern[j, i]) for i in eachindex(x), j in eachindex(x)]
        @test Matrix(sparse_hessian(Hidden(f), x; pattern=triangle)) == found
    end
    x = randn(rng, 2000)
    found = sparse_hessian(Hidden(rosenbrock), x)
    @test nnz(found) == 3 * 2000 - 2
    @test found * ones(2000) ≈ hvp(Hidden(rosenbrock), x, ones(2000))
end

@testset "colours" begin
    rng = MersenneTwister(seeded(83))
    @test maximum(colors_of(banded(50, 1, 1))) == 3
    @test maximum(colors_of(banded(50, 2, 3))) == 6
    @test maximum(colors_of(blocks(5, 4))) == 4
    @test maximum(colors_of(arrow(9))) == 9
    @test maximum(star_colors_of(arrow(9))) == 2
    @test maximum(star_colors_of(banded(50, 1, 1))) == 3
    @test colors_of(falses(2, 3)) == [0, 0, 0]
    for _ in 1:30
        n = rand(rng, 2:11)
        upper = triu(rand(rng, n, n) .< rand(rng), 1)
        pattern = upper .| upper'
        colors = star_colors_of(pattern)
        @test !any(colors[b] == colors[c] for b in 1:n, c in 1:n if pattern[b, c])
        @test !any(pattern[a, b] && pattern[b, c] && pattern[c, d] && a != c && b != d && a != d &&
            colors[a] == colors[c] && colors[b] == colors[d] for a in 1:n, b in 1:n, c in 1:n, d in 1:n)
    end
end

@testset "what is followed element by element" begin
    rng = MersenneTwister(seeded(84))
    x = rand(rng, 12) .+ 0.5
    three(x) = reshape(x, 2, 3, 2)
    for f in (x -> x[end:-1:1] .* 2, x -> gather(x, [4 4; 1 12]) .^ 2,
            x -> choose(x .> 0, x, 2 .* x), x -> [x; x[1:3]], x -> softmax(reshape(x, 4, 3); dims=1), x -> sum(three(x); dims=(1, 3)),
            x -> vec(sum(three(x); dims=2)), x -> standardize(reshape(x, 4, 3); dims=2), x -> ones(2, 3) * reshape(x, 3, 4),
            x -> matmul(three(x), ones(3, 5)), x -> einsum("ijk,kl->il", three(x), ones(2, 2)),
            x -> einsum("iij->ij", reshape(x[1:8], 2, 2, 2)), x -> embedding(reshape(x, 3, 4), [3, 1, 3]), x -> permutedims(three(x), (3, 1, 2)),
            x -> reshape(x, 3, 4) .+ x[1:3] .* x[4], x -> astype(x, Float32), x -> norm(x[1:3]) .* x[4:5])
        @test Matrix(sparsity(Hidden(f), x)) == (jacobian(Hidden(f), x) .!= 0)
    end
    @test Matrix(sparsity(x -> cumsum(x), x)) == trues(12, 12)  # all of the axis
    @test Matrix(sparsity(x -> Diagonal(x) \ ones(12) .+ diag(inv(Diagonal(x))), x)) == Matrix(I, 12, 12)
    @test all(Matrix(sparsity(x -> x[sortperm_along(x, 1)], x)))  # whichever may come
    @test nnz(sparsity(x -> floor.(x) .+ stop_gradient(x), x)) == 0
    @test all(Matrix(sparsity(x -> reshape(x[1:9], 3, 3) \ ones(3), x))[:, 1:9])
end

@testset "each element of a function with custom derivatives may depend on all" begin
    rounded = custom_rule(x -> round.(x); vjp=(g, y, x) -> g, jvp=(t, y, x) -> t[1])
    x = randn(MersenneTwister(seeded(86)), 4)
    @test all(Matrix(sparsity(rounded, x))) && Matrix(sparse_jacobian(rounded, x)) == Matrix(I, 4, 4)
    @test Matrix(sparsity(x -> rounded(x[1:2]) .* x[3], x)) == [true true true false; true true true false]
end

@testset "too many dependences are refused before their lists fill the memory" begin
    weight, message = ones(410, 410), ""
    bytes = @allocated message = message_of(() -> sparsity(x -> weight * reshape(x, 410, 410), ones(410^2)))
    @test occursin("by the op \"matmul\", 68921000 derivatives may be other than zero", message)
    @test bytes < 2^28
end

@testset "a pattern that misses an entry is refused" begin
    rng = MersenneTwister(seeded(85))
    x = randn(rng, 30)
    pattern = Matrix(sparsity(Hidden(tridiagonal), x))
    for mode in (:forward, :reverse), _ in 1:5
        lacking = copy(pattern)
        lacking[rand(rng, findall(pattern))] = false
        @test occursin("the pattern misses an entry that is not zero, in ", message_of(() -> sparse_jacobian(Hidden(tridiagonal), x; pattern=lacking, mode=mode)))
    end
    @test occursin("sparse_hessian: the pattern misses", message_of(() -> sparse_hessian(Hidden(rosenbrock), x; pattern=Matrix(I, 30, 30))))
    lacking = copy(pattern)
    lacking[7, :] .= false
    @test occursin("in row 7 (of 1 that are wrong)", message_of(() -> sparse_jacobian(Hidden(tridiagonal), x; pattern=lacking, mode=:forward)))
end

@testset "Float32, other shapes and mistakes" begin
    x = rand(Float32, 20)
    found = sparse_jacobian(Hidden(tridiagonal), x)
    @test found isa SparseMatrixCSC{Float32,Int} && Matrix(found) ≈ jacobian(Hidden(tridiagonal), x)
    square = rand(3, 3)
    @test Matrix(sparse_jacobian(x -> x' .* x, square)) ≈ jacobian(x -> x' .* x, square)
    @test size(sparse_jacobian(x -> x[1:0], ones(3))) == (0, 3)
    @test message_of(() -> sparse_jacobian(sin, ones(3); mode=:both)) == "sparse_jacobian: expected the mode :forward or :reverse, got :both"
    @test occursin("expected a pattern of size (3, 3), got one of size (2, 2)", message_of(() -> sparse_jacobian(x -> sin.(x), ones(3); pattern=trues(2, 2))))
    @test occursin("expected one array", message_of(() -> sparse_jacobian(p -> p[1], (ones(3), ones(3)))))
    @test occursin("must return one array", message_of(() -> sparse_jacobian(x -> (x, x), ones(3))))
    @test occursin("inside another transform", message_of(() -> grad(x -> sum(sparse_jacobian(y -> sin.(y), x)))(ones(3))))
    @test occursin("which has no derivative", message_of(() -> sparsity(x -> x, [1, 2])))
    @test occursin("more than a sparse matrix is good for", message_of(() -> sparsity(x -> x .* sum(x), ones(10_000))))
end
