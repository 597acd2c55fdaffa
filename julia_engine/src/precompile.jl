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

if Versions.writes_code()
    AD.Kernels.VECTOR_BYTES[] = AD.Kernels.find_vector_bytes()  # asked again whenever the package is loaded
    precompile_workload(Float32)
    precompile_workload(Float64)
end
