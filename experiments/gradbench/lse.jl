# GradBench's `lse`: the logarithm of a sum of exponentials, of which the largest is taken out, and its gradient.
function logsumexp_of_parts(x)
    largest = maximum(x)
    return largest + log(sum(exp.(x .- largest)))
end
primal() = logsumexp_of_parts
gradient_of_primal() = grad(logsumexp_of_parts)
(primal=primal, gradient=gradient_of_primal)
