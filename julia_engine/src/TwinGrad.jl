"""
TwinGrad's Julia engine: automatic differentiation and neural networks with the standard library alone.

    using TwinGrad
    gradient(x -> sum(sin.(x) .^ 2), [0.5, 1.0])
"""
module TwinGrad

include("AD.jl")
using .AD
for name in names(AD)
    name === :AD || @eval export $name
end
export AD

include("precompile.jl")

end
