# Mooncake: reverse mode with what it prepares once for a function and its arguments.

using Mooncake

include("functions.jl")

function prepare(name, inputs, by, chunk)
    chunk == 0 || throw(Unsupported("has no forward mode in chunks"))
    f, arguments, constants = FUNCTIONS[name], Tuple(inputs[1:by]), Tuple(inputs[by+1:end])
    target = (x...) -> f(x..., constants...)
    cache = Mooncake.prepare_gradient_cache(target, arguments...)
    return () -> target(arguments...), () -> Mooncake.value_and_gradient!!(cache, target, arguments...)[2][2:end]
end
