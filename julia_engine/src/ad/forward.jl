# Forward mode: the derivatives of a graph in the direction of the leaves' tangents, by the rules of its ops.

"""The tangents of tensors from those of leaves, `tangents`; `order` is what lies between them, sorted."""
function pushed_forward(outputs::Vector{Tensor}, tangents::Dict{Tensor,Tensor}, order::Vector{Tensor})
    needed, stamps = leading_to(outputs, order), TensorDict{UInt64}()
    for node in order
        op = node.op
        (op === nothing || haskey(tangents, node)) && continue
        (isempty(node.results) ? node in needed : any(x -> x in needed, node.results)) || continue
        t = Any[counts_as_constant(op::Op, i) ? nothing : get(tangents, x, nothing) for (i, x) in enumerate(node.inputs)]
        all(isnothing, t) && continue
        (op::Op).jvp === nothing && throw(missing_rule(node, "jvp rule"))
        check_stamps(node, stamps)
        op.backward! isa Joint && empty!(stamps)  # whose rule may run the user's code
        if op.several
            for (x, tangent) in zip(node.results, op.jvp(t, node.results, node.inputs, node.attrs))
                tangent === nothing || (tangents[x] = spread_to(tangent, x.dims))
            end
        else
            tangent = op.jvp(t, node, node.inputs, node.attrs)
            tangent === nothing || (tangents[node] = spread_to(tangent, node.dims))
        end
    end
    return Tensor[haskey(tangents, x) ? tangents[x] : zeros_like(x) for x in outputs]
end

"""The nodes in `order` that outputs depend on not as on a constant."""
function leading_to(outputs::Vector{Tensor}, order::Vector{Tensor})
    needed = Set{Tensor}(outputs)
    for node in Iterators.reverse(order)
        results = results_of(node)
        node.requires_grad && node.op !== nothing || (setdiff!(needed, results); continue)
        any(x -> x in needed, results) || continue
        for (i, x) in enumerate(node.inputs)
            counts_as_constant(node.op::Op, i) || push!(needed, x)
        end
    end
    return needed
end
