# The functions as plain Julia, which every system here differentiates as they are. See functions.py for what they are.

using LinearAlgebra

const STEPS = 500
const LABEL = 4

sigmoid(x) = inv(one(x) + exp(-x))

sincos_(x::Number) = sin(cos(x))
sincos_(x) = sum(sin.(cos.(x)))

function loop(x)
    r = one(x)
    for _ in 1:STEPS
        r *= sin(x)
    end
    return r
end

logsumexp(x) = log(sum(exp.(x)))

logistic(w, b, x) = sum(sigmoid.(w * x .+ b))

function mlp(w1, b1, w2, b2, x)
    logits = w2 * max.(w1 * x .+ b1, 0) .+ b2
    largest = maximum(logits)
    return largest + log(sum(exp.(logits .- largest))) - logits[LABEL]
end

function rosenbrock(x)
    result = zero(eltype(x))
    @inbounds @simd for i in 1:length(x)-1  # x[i+1] is read first, or LLVM would not vectorise the loop
        result += 100 * (x[i+1] - x[i]^2)^2 + (1 - x[i])^2
    end
    return result
end

function ackley(x)
    squares = cosines = zero(eltype(x))
    @inbounds for i in eachindex(x)
        squares += x[i]^2
        cosines += cos(2pi * x[i])
    end
    n = length(x)
    return 20 + exp(1) - 20 * exp(-0.2 * sqrt(squares / n)) - exp(cosines / n)
end

const FUNCTIONS = Dict(
    "sincos" => sincos_, "loop" => loop, "logsumexp" => logsumexp, "logistic" => logistic, "mlp" => mlp,
    "rosenbrock" => rosenbrock, "ackley" => ackley)
