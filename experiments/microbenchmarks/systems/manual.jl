# By hand: the plain functions, and their derivatives as a person would write them.

include("functions.jl")

dsincos(x::Number) = -cos(cos(x)) * sin(x)
dsincos(x) = -cos.(cos.(x)) .* sin.(x)

function dloop(x)
    s, c = sincos(x)
    r, derivative = one(x), zero(x)
    for _ in 1:STEPS
        derivative = derivative * s + r * c
        r *= s
    end
    return derivative
end

function dlogsumexp(x)
    e = exp.(x)
    e ./= sum(e)
    return e
end

function dlogistic(w, b, x)
    s = sigmoid.(w * x .+ b)
    d = s .* (1 .- s)
    return d * x', x isa AbstractVector ? d : vec(sum(d; dims=2))
end

function dmlp(w1, b1, w2, b2, x)
    hidden = max.(w1 * x .+ b1, 0)
    d = w2 * hidden .+ b2
    d .= exp.(d .- maximum(d))
    d ./= sum(d)
    d[LABEL] -= 1
    back = (w2' * d) .* (hidden .> 0)
    return back * x', back, d * hidden', d
end

function drosenbrock(x)
    g = zero(x)
    @inbounds for i in 1:length(x)-1
        left, right = 1 - x[i], x[i+1] - x[i]^2
        g[i] -= 2left + 400x[i] * right
        g[i+1] += 200right
    end
    return g
end

function dackley(x)
    n = length(x)
    root, wave = sqrt(sum(abs2, x) / n), exp(sum(t -> cos(2pi * t), x) / n)
    bowl = 4exp(-0.2root) / (n * root)
    return @. bowl * x + wave * 2pi / n * sin(2pi * x)
end

const DERIVATIVES = Dict(
    "sincos" => dsincos, "loop" => dloop, "logsumexp" => dlogsumexp, "logistic" => dlogistic, "mlp" => dmlp,
    "rosenbrock" => drosenbrock, "ackley" => dackley)

"""A function with its arguments, whose types are known; they are read anew at each call."""
struct Call{F,A}
    f::F
    arguments::Ref{A}
end
Call(f, arguments::Tuple) = Call(f, Ref(arguments))
(call::Call)() = call.f(call.arguments[]...)

function prepare(name, inputs, by, chunk)
    chunk == 0 || throw(Unsupported("has no forward mode"))
    return Call(FUNCTIONS[name], Tuple(inputs)), Call(DERIVATIVES[name], Tuple(inputs))
end
