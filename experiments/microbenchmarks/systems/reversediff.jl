# ReverseDiff: a tape that is recorded once, compiled, and replayed into arrays that are there already.

using ReverseDiff

include("functions.jl")

function prepare(name, inputs, by, chunk)
    chunk == 0 || throw(Unsupported("has no forward mode in chunks"))
    f, constants = FUNCTIONS[name], Tuple(inputs[by+1:end])
    single = inputs[1] isa Number  # ReverseDiff differentiates by arrays
    arguments = single ? ([inputs[1]],) : Tuple(inputs[1:by])
    target = single ? x -> f(x[1]) : (x...) -> f(x..., constants...)
    tape = ReverseDiff.compile(ReverseDiff.GradientTape(target, arguments))
    results = map(similar, arguments)
    return () -> target(arguments...), () -> ReverseDiff.gradient!(results, tape, arguments)
end
