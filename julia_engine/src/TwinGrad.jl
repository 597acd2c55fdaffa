"""
TwinGrad's Julia engine: automatic differentiation and neural networks with the standard library alone.

    using TwinGrad
    gradient(x -> sum(sin.(x) .^ 2), [0.5, 1.0])

    chain = Chain(Dense(784 => 84, relu), Dense(84 => 10))
    train!(chain, x, y; epochs=5, optimizer=Adam(0.001), batch_size=100)  # x (784, N), y classes from 1
"""
module TwinGrad

include("versions.jl")

include("AD.jl")
using .AD
for name in names(AD)
    name === :AD || @eval export $name
end
export AD

include("NETWORK.jl")
using .NETWORK
for name in names(NETWORK)
    name === :NETWORK || @eval export $name
end
export NETWORK

include("entry.jl")
include("functions.jl")

include("precompile.jl")
include("network/precompile.jl")

end
