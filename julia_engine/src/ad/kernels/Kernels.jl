"""
What a tape does: instructions on bare addresses, and the loops behind them.

Nothing here knows of tensors, shapes or graphs, allocates, or dispatches dynamically. Whoever executes an instruction
keeps the memory behind its addresses alive.
"""
module Kernels

using LinearAlgebra
using ..Errors: DTypeError, LabelError, ShapeError
using ...Versions: Versions

export Instruction, Instructions, execute!

Base.Experimental.@optlevel 3  # the module around asks for quick compilation; loops want the optimiser

include("compilation.jl")
include("instruction.jl")
include("functions.jl")
include("special.jl")
include("activations.jl")
include("loops.jl")
include("products.jl")
include("tiles.jl")
include("execute.jl")
include("shared_products.jl")
include("convolution.jl")
include("pooling.jl")
include("fused_pooling.jl")
include("operations.jl")
include("winograd.jl")

end
