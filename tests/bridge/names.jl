# What the Julia engine has, as lines `kind <tab> name <tab> options` (an optimizer's with their defaults): asked by
# test_twins.py, which compares the engines, with a file of lines that describe layers and optimizers.

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
# The settings that a layer or an optimizer reads: of lines, with the size of a sample in front.
for text in eachline(ARGS[1])
    size, description = split(text, '\t')
    line = NETWORK.Line(description)
    if line.subject == "layer"
        name = line.settings["op"]
        NETWORK.read_layer(NETWORK.LAYERS[name], line, parse.(Int, split(size, ',')))
    else
        name = line.settings["name"]
        NETWORK.read_optimizer(NETWORK.OPTIMIZERS[name], line)
    end
    println("settings\t", name, "\t", join(line.known, ","))
end
for name in names(NETWORK)
    thing = getfield(NETWORK, name)
    thing isa Union{Function,Type} || continue
    any(method -> basename(String(method.file)) == "metrics.jl", methods(thing)) && println("metric\t", name, "\t")
end
