# What the Julia engine has, as lines `kind <tab> name <tab> options` (an optimizer's with their defaults): asked by
# test_twins.py, which compares the engines.

using TwinGrad
using TwinGrad: AD, NETWORK

# Ops that only the simplification of a graph makes stand for others, and are no one's to call.
const LISTS = (
    "op" => [name for (name, op) in AD.TABLE if isempty(op.fuses)],
    "function" => keys(AD.FUNCTIONS),
    "layer" => keys(NETWORK.LAYERS),
    "activation" => keys(NETWORK.ACTIVATIONS),
    "loss" => keys(NETWORK.LOSSES),
)
for (kind, list) in LISTS, name in list
    println(kind, "\t", name, "\t")
end
for (name, (_, options)) in NETWORK.INITIALISERS
    println("initialiser\t", name, "\t", join(options, ","))
end
for (name, rule) in NETWORK.OPTIMIZERS
    println("optimizer\t", name, "\t", join(["$(field)=$(getfield(rule(), field))" for field in fieldnames(rule)], ","))
end
for name in names(NETWORK)
    thing = getfield(NETWORK, name)
    thing isa Union{Function,Type} || continue
    any(method -> basename(String(method.file)) == "metrics.jl", methods(thing)) && println("metric\t", name, "\t")
end
