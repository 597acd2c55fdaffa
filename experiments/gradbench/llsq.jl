# GradBench's `llsq`: fitting a step by a polynomial, ½ Σᵢ (sᵢ - Σⱼ xⱼ tᵢʲ)², and its gradient by x.
function primal(n)
    t = collect(range(-1.0, 1.0; length=n))
    s = sign.(t)
    return function (x)
        powers = t .^ (0:length(x)-1)'
        residual = s .- powers * x
        return sum(residual .* residual) / 2
    end
end
gradient_of_primal(n) = grad(primal(n))
(primal=primal, gradient=gradient_of_primal)
