# Zygote: `gradient` of the plain functions.

using Zygote

include("functions.jl")

function prepare(name, inputs, by, chunk)
    chunk == 0 || throw(Unsupported("has no forward mode in chunks"))
    f, arguments, constants = FUNCTIONS[name], Tuple(inputs[1:by]), Tuple(inputs[by+1:end])
    return () -> f(arguments..., constants...), () -> Zygote.gradient((x...) -> f(x..., constants...), arguments...)
end
