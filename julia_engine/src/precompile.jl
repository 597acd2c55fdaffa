# What nearly every program does first, done once while the package is compiled: its compiled code is kept, as far as
# this Julia version can keep it (inferred code from 1.5 on, machine code from 1.9 on).

function precompile_workload(T::DataType)
    w, x, b = fill(T(0.1), 16, 16), fill(T(0.2), 16, 2), fill(T(0.3), 16)
    labels = [1, 2]
    loss(w, x, b) = softmax_cross_entropy(tanh.(w * x .+ b), labels)
    gradient(loss, w, x, b)
    compile(value_and_grad(loss; argnums=(1, 2, 3)))(w, x, b)
    parameters = AD.Tensor[Variable(w), Variable(b)]
    inputs = AD.Tensor[AD.symbol(T, [32, 2], "x"), AD.symbol(Int64, [2], "y")]
    outputs, nodes = AD.tracing() do
        steps = reshape(inputs[1], 16, 2, 2)
        projected = parameters[1] * steps .+ parameters[2]
        h = sigmoid.(relu.(projected[:, 1, :]))
        h = tanh.(projected[:, 2, :] .+ parameters[1] * h)
        value = softmax_cross_entropy(h, inputs[2])
        AD.Tensor[value; gradients(AD.Tensor[value], AD.Tensor[AD.literal(T, 1)], parameters)]
    end
    tape = Tape(AD.traced(nodes, inputs, outputs); results=Dict{Int,Any}(2 => zeros(T, 16, 16), 3 => zeros(T, 16)))
    run!(tape)
    return nothing
end

"""Compile what the record of each op has, for whatever network needs it first: rules are called by their types alone."""
function precompile_ops()
    inputs, memories, attrs = Vector{AD.Tensor}, Vector{AD.Memory}, AD.Attributes
    found = Any[getfield(m, name) for m in (AD, NETWORK) for name in names(m; all=true) if isdefined(m, name)]
    for op in unique!(filter(x -> x isa AD.Op, found))
        out = op.several ? memories : AD.Memory
        rules = op.backward!
        precompile(op.infer, (inputs, attrs))
        op.forward! === nothing || precompile(op.forward!, (AD.Kernels.Instructions, out, memories, attrs))
        op.view === nothing || precompile(op.view, (out, attrs))
        rules isa Function && precompile(rules, (Int, AD.Tensor, AD.Tensor, inputs, attrs))
        rules isa Vector{Any} || continue
        foreach(r -> r isa Function && precompile(r, (AD.Tensor, AD.Tensor, inputs, attrs)), rules)
    end
end

"""
Compile methods of Base that a plan calls with types that are known only then. Their code belongs to no package, and is kept
with the one that asks for it.
"""
function precompile_called_by_type()
    for (f, types) in ((all, (Function, Vector{Any})), (all, (Function, Vector{Int})), (all, (Function, UnitRange{Int})),
        (any, (Function, Vector{Int})), (collect, (Type{Any}, Tuple{Colon,Int,Colon})), (collect, (Type{Any}, Tuple{Int,Int})),
        (in, (Type, Tuple{DataType,DataType})), (in, (String, Vector{String})), (haskey, (Dict{String,Function}, String)),
        (getindex, (Base.RefValue{String},)), (getindex, (Vector{Int}, UnitRange{Int})), (issorted, (Vector{Int},)),
        (iszero, (Vector{Int},)), (*, (Int, Int, Int, Int, Int)), (sizeof, (Array{Float32,4},)), (vcat, (Vector{Int}, Int)),
        (vcat, (Vector{Int}, Int, Int)), (vcat, (Vector{Int}, Vector{Int}, Int)), (getindex, (Vector{AD.Memory}, Int)),
        (getindex, (Vector{AD.Memory}, UnitRange{Int})), (append!, (Vector{Any}, Vector{AD.Memory})))
        precompile(f, types)
    end
    for T in (Float32, Float64, Int64)
        foreach(n -> precompile(Array{T}, (UndefInitializer, fill(Int, n)...)), 0:4)
        precompile(Array{T}, (UndefInitializer, NTuple{4,Int}))
        precompile(getindex, (Array{T,0},))
        precompile(getindex, (Array{T,0}, Int))
        foreach(S -> precompile(fill!, (Array{T,0}, S)), (Float64, Int))
    end
end

if Versions.writes_code()
    AD.Kernels.VECTOR_BYTES[] = AD.Kernels.find_vector_bytes()  # asked again whenever the package is loaded
    precompile_workload(Float32)
    precompile_workload(Float64)
    if Versions.KEEPS_MACHINE_CODE
        precompile_ops()
        precompile_called_by_type()
    end
end
