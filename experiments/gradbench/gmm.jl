# GradBench's `gmm`: the log-posterior of a mixture of Gaussians with a Wishart prior (ADBench), and its gradient.
#
# Axes are those of gmm.py the other way round: alpha (k,), mu (d, k), q (d, k), l (d (d-1) / 2, k), x (d, n).

# For each element of Q, row after row (so Q itself, transposed): its place among zero, the diagonal, and the columns below.
function places(d)
    found = ones(Int, d, d)
    for i in 1:d
        found[i, i] = 1 + i
    end
    next = d + 1
    for column in 1:d, row in column+1:d
        next += 1
        found[column, row] = next
    end
    return vec(found)
end

# log Γ(x) of x > 0: Stirling's series, whose next term is below a rounding error from 16 on.
function log_gamma(x)
    before = 0.0
    while x < 16
        before += log(x)
        x += 1
    end
    series = (1 / 12 - (1 / 360 - (1 / 1260 - (1 / 1680 - 1 / 1188x^2) / x^2) / x^2) / x^2) / x
    return (x - 0.5) * log(x) - x + log(2pi) / 2 + series - before
end

# What of a component's prior does not depend on the parameters.
function wishart(d, gamma, m)
    degrees = d + m + 1
    multigamma = d * (d - 1) / 4 * log(pi) + sum(log_gamma((degrees - j) / 2) for j in 0:d-1)
    return degrees * d * log(gamma / sqrt(2)) - multigamma
end

function objective(gamma, m, sign_)
    return function (alpha, mu, q, lower, x)
        (d, k), n = size(mu), size(x, 2)
        diagonal, logs = exp.(q), vec(sum(q; dims=1))
        parts = vcat(zeros(1, k), diagonal, lower)
        Qt = reshape(parts[places(d), :], d, d, k)
        Q = permutedims(Qt, (2, 1, 3))
        away = matmul(Q, reshape(x, d, n, 1)) .- matmul(Q, reshape(mu, d, 1, k))  # Q (x - mu): (d, n, k)
        inner = reshape(alpha .+ logs, 1, k) .- reshape(sum(away .* away; dims=1), n, k) ./ 2
        largest = maximum(inner; dims=2)
        likelihood = sum(largest .+ log.(sum(exp.(inner .- largest); dims=2)))
        prior = m * sum(logs) - gamma^2 / 2 * (sum(diagonal .* diagonal) + sum(lower .* lower))
        return likelihood - n * logsumexp(alpha) - n * d / 2 * log(2pi) + sign_ * (prior + k * wishart(d, gamma, m))
    end
end
jacobian_of_objective(gamma, m, sign_) = grad(objective(gamma, m, sign_); argnums=(1, 2, 3, 4))
(objective=objective, jacobian=jacobian_of_objective)
