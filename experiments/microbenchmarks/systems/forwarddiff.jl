# ForwardDiff: dual numbers through the plain functions, with the chunk size asked for or its own.

using ForwardDiff

include("functions.jl")

function prepare(name, inputs, by, chunk)
    f, constants = FUNCTIONS[name], Tuple(inputs[by+1:end])
    by == 1 || throw(Unsupported("ForwardDiff differentiates by one array: $by of them are for reverse mode"))
    x = inputs[1]
    x isa Number && return () -> f(x), () -> ForwardDiff.derivative(f, x)
    target = t -> f(t, constants...)
    size = chunk == 0 ? ForwardDiff.Chunk(x) : ForwardDiff.Chunk{chunk}()
    config, result = ForwardDiff.GradientConfig(target, x, size), similar(x)
    return () -> target(x), () -> ForwardDiff.gradient!(result, target, x, config)
end
