# GradBench's `kmeans`: the cost of a clustering, and a step of Newton's method by the diagonal of its Hessian.
#
# Axes are those of kmeans.py the other way round: points (d, n), centroids (d, k).
function total(points, centroids)
    away = vec(sum(centroids .^ 2; dims=1)) .+ sum(points .^ 2; dims=1) .- 2 .* (centroids' * points)
    return sum(minimum(away; dims=1))
end
cost() = total
function direction()
    return function (points, centroids)
        slope, curvature = jvp(grad(c -> total(points, c)), (centroids,), (ones(size(centroids)...),))
        return slope ./ curvature
    end
end
(cost=cost, dir=direction)
