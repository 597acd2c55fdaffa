# TwinGrad's Julia engine, eager: the function is recorded and walked backward in every call.

using TwinGrad
using TwinGrad.AD

const STEPS = 500
const LABEL = 4

sum_of_sincos(x) = sum(sin.(cos.(x)))

function loop(x)
    r = 1.0
    for _ in 1:STEPS
        r = r .* sin.(x)
    end
    return r
end

logsumexp_(x) = log(sum(exp.(x)))
logistic(w, b, x) = sum(sigmoid.(w * x .+ b))

# One image is a matrix with one column, as this engine's losses read samples in columns.
mlp(w1, b1, w2, b2, x) = softmax_cross_entropy(w2 * relu.(w1 * x .+ b1) .+ b2, fill(LABEL, size(x, 2)))

rosenbrock(x) = sum((1 .- x[1:end-1]) .^ 2 .+ 100 .* (x[2:end] .- x[1:end-1] .^ 2) .^ 2)
ackley(x) = 20 + exp(1) - 20 * exp(-0.2 * sqrt(mean(x .^ 2))) - exp(mean(cos.(2pi .* x)))

const FUNCTIONS = Dict(
    "sincos" => x -> sin(cos(x)), "loop" => loop, "logsumexp" => logsumexp_, "logistic" => logistic, "mlp" => mlp,
    "rosenbrock" => rosenbrock, "ackley" => ackley)

"""The function for these inputs, and the inputs as it takes them."""
function written(name, inputs)
    x = inputs[end]
    name == "mlp" && x isa AbstractVector && return FUNCTIONS[name], Tuple([inputs[1:end-1]; [reshape(x, :, 1)]])
    x isa Number || !(name in ("sincos", "loop")) || return name == "loop" ? t -> sum(loop(t)) : sum_of_sincos, (x,)
    return FUNCTIONS[name], Tuple(inputs)
end

function prepare(name, inputs, by, chunk)
    chunk == 0 || throw(Unsupported("has no forward mode"))
    f, arguments = written(name, inputs)
    derivative = grad(f; argnums=by == 1 ? 1 : Tuple(1:by))
    constants = map(x -> x isa Number ? Variable(x) : Constant(x), arguments)
    return () -> value(no_grad(() -> f(constants...))), () -> derivative(arguments...)
end
