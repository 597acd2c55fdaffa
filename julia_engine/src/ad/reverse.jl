# Reverse mode: the vector-Jacobian product of a graph, by the rules of its ops. Nothing here recurses over a graph.

const Replaced = TensorDict{Tensor}
const NONE_REPLACED = Replaced()
const NO_COTANGENTS = Union{Nothing,Tensor}[]

"""
    topological_sort(outputs, level=0)

Every tensor of at least this level that the outputs depend on through others of it, and themselves, each after its inputs.
An op with several results is there once, by the first. What is `replaced` gives way to what replaces it.
"""
topological_sort(outputs::Vector{Tensor}, level::Int=0, replaced::Replaced=NONE_REPLACED) =
    sort_and_look_below(outputs, level, replaced)[1]

"""The same, and the tensors of lower levels that require a gradient and that they depend on, too."""
function sort_and_look_below(outputs::Vector{Tensor}, level::Int, replaced::Replaced=NONE_REPLACED)
    order, below = Tensor[], Tensor[]
    seen = TensorSet()
    stack = Tuple{Tensor,Bool}[(node_of(x), false) for x in reverse(outputs)]
    while !isempty(stack)
        node, inputs_done = pop!(stack)
        if inputs_done
            push!(order, node)
        elseif node.level < level
            node.requires_grad && push!(below, node)
        elseif !(node in seen)
            push!(seen, node)
            push!(stack, (node, true))
            for x in Iterators.reverse(node.inputs)
                x = node_of(get(replaced, x, x))
                x in seen || push!(stack, (x, false))
            end
        end
    end
    return order, below
end
topological_sort(output::Tensor) = topological_sort(Tensor[output])

"""
Whether one of these tensors depends on a leaf that `backward!` stores a gradient in, or is one; through dual numbers of a
derivative around, which come back as dual numbers, nothing is looked for.
"""
function depend_on_a_leaf(tensors::Vector{Tensor})
    seen, stack = TensorSet(), copy(tensors)
    while !isempty(stack)
        x = pop!(stack)
        x.level == 1 && (x.op === nothing || !state().mixed) && return true
        (x in seen || x.op === DUAL) && continue
        push!(seen, x)
        append!(stack, Tensor[y for y in x.inputs if y.requires_grad])
    end
    return false
end
# Differentiation ------------------------------------------------------------------------------------------------------

"""
A gradient as it comes together: the sum so far, whether nobody else has seen that sum, parts that belong into places
of the whole, and traced products of few summands, see `add_products!`.
"""
mutable struct Pending
    total::Union{Nothing,Tensor}
    own::Bool
    parts::Vector{Tensor}
    places::Vector{Index}
    products::Vector{Tensor}
end
Pending() = Pending(nothing, false, NO_INPUTS, NO_PLACES, NO_INPUTS)  # lists are made when there is something to add
const NO_PLACES = Index[]

"""
    gradients(outputs, seeds, targets; within=nothing, level=1, span=nothing, order=nothing)

The vector-Jacobian product of the outputs with the seeds, for each target: a tensor of its size and element type, or
`nothing` where no output depends on it.

Reverse mode, by the ops' own rules, which are ops again: eager tensors give values, symbolic ones extend the graph, and
either can be differentiated once more.

`within`: the tensors to go through, sorted, where they are known; what the targets were computed from is not looked at.

`level`: the targets have at least this one. What depends on them has it, too, and nothing else is looked at: so the cost of
a transform inside others does not grow with what these have computed before. `span` is the part of the trace that was made
since the transform began; `nothing` stands for all of it. `order` is what the outputs depend on, sorted, where that is known.
"""
function gradients(outputs::Vector{Tensor}, seeds::Vector{Tensor}, targets::Vector{Tensor};
        within::Union{Nothing,Vector{Tensor}}=nothing, level::Int=1, span::Union{Nothing,UnitRange{Int}}=nothing,
        order::Union{Nothing,Vector{Tensor}}=nothing)
    wanted = TensorSet(targets)
    order, depends, replaced = nodes_between(outputs, targets, wanted, within, level, span, order)
    pending = sizehint!(TensorDict{Pending}(), length(order))
    for (x, seed) in zip(outputs, seeds)
        output = get(replaced, x, x)
        output in depends && add_part!(get!(Pending, pending, output), seed, nothing)
    end
    result = TensorDict{Tensor}()
    now = state()
    stamps = TensorDict{UInt64}()
    # Not where values may be read later on: by a derivative of this one, or by whoever asked for all results.
    reuse = now.grad_enabled || now.trace !== nothing ? nothing : Reuse()
    reuse === nothing || keep_freed_memory()
    @entering scope=now.scope reuse=now.reuse begin
        for node in Iterators.reverse(order)
            several = !isempty(node.results)
            (several ? any(x -> haskey(pending, x), node.results) : haskey(pending, node)) || continue
            now.scope, now.reuse = node.scope, reuse
            g, cotangents = nothing, NO_COTANGENTS
            if !several
                g = accumulated!(pending[node], node, reuse)
                node in wanted && (result[node] = g)
            else
                cotangents = Union{Nothing,Tensor}[
                    haskey(pending, x) ? accumulated!(pending[x], x, reuse) : nothing for x in node.results]
                for (x, cotangent) in zip(node.results, cotangents)
                    cotangent !== nothing && x in wanted && (result[x] = cotangent)
                end
            end
            (node.op === nothing || (within !== nothing && node in wanted)) && continue
            check_stamps(node, stamps)
            inputs = isempty(replaced) ? node.inputs : Tensor[get(replaced, x, x) for x in node.inputs]
            joint = (node.op::Op).backward!
            if joint isa Joint
                needs_grad = Bool[x in depends && is_float(x.eltype) for x in inputs]
                now.reuse = nothing  # such a rule runs the user's code, which may keep what it sees
                parts = joint.rule(several ? cotangents : Union{Nothing,Tensor}[g], node, inputs, needs_grad)
                empty!(stamps)
                for (x, part) in zip(inputs, parts)
                    part === nothing || add_part!(get!(Pending, pending, x), unbroadcast(part::Tensor, x), reuse)
                end
                continue
            end
            for (i, x) in enumerate(inputs)
                x in depends && is_float(x.eltype) && pull_back!(pending, node, inputs, i, x, g::Tensor, reuse)
            end
            node in wanted || waits!(reuse, g.data, -1)
            recycle!(reuse, g.data)
        end
    end
    return Union{Nothing,Tensor}[get(result, target, nothing) for target in targets]
end

"""
The nodes that outputs depend on, sorted; the tensors among them, and the targets themselves, that depend on the targets; and
for each duplicate node the first that equals it.
"""
function nodes_between(outputs::Vector{Tensor}, targets::Vector{Tensor}, wanted::TensorSet,
        within::Union{Nothing,Vector{Tensor}}, level::Int, span::Union{Nothing,UnitRange{Int}},
        order::Union{Nothing,Vector{Tensor}})
    within === nothing || (order = Tensor[targets; within])
    order === nothing && (order = topological_sort(outputs, level))
    depends = sizehint!(TensorSet(targets), length(order))
    for node in order
        node.op !== nothing && node.requires_grad && any(x -> x in depends, node.inputs) || continue
        isempty(node.results) ? push!(depends, node) : union!(depends, node.results)
    end
    within === nothing && state().symbolic || return order, depends, NONE_REPLACED
    replaced = equal_nodes(depends, wanted, span)
    isempty(replaced) && return order, depends, replaced
    return topological_sort(Tensor[get(replaced, x, x) for x in outputs], level, replaced), depends, replaced
end

"""
For nodes in `depends` that are computed in the same way, but not for those `wanted`: the first of them, which is read in place
of the others. Found before a graph is differentiated: what a loop computes anew each time, and is the same, has one
gradient. What does not depend on the wanted stays as it is: among it are the variables of the transforms around, which may
be equal, too.
"""
function equal_nodes(depends::TensorSet, wanted::TensorSet, span::Union{Nothing,UnitRange{Int}})
    trace = state().trace::Vector{Tensor}
    span === nothing && (span = 1:length(trace))
    replaced = Replaced()
    known = KnownCalls{Tensor}(length(span), replaced)
    for k in span  # in the order they were made, so that the first one is there for all
        node = trace[k]
        node in depends && !(node.op::Op).random || continue
        (isempty(node.results) ? node in wanted : any(x -> x in wanted, node.results)) && continue
        first = first_equal!(known, node)
        first === node && continue
        for (x, instead) in zip(results_of(node), results_of(first))
            replaced[x] = instead
        end
    end
    return replaced
end

function pull_back!(pending::TensorDict{Pending}, node::Tensor, inputs::Vector{Tensor}, i::Int, x::Tensor, g::Tensor,
        reuse::Union{Nothing,Reuse})
    op = node.op::Op
    if op === SLICE
        # Not put into zeros here: the gradient of an array taken apart by slices is assembled once from all.
        slot = get!(Pending, pending, x)
        isempty(slot.parts) && ((slot.parts, slot.places) = (Tensor[], Index[]))
        push!(slot.parts, g)
        waits!(reuse, g.data)
        push!(slot.places, node.attrs.index::Index)
        return nothing
    end
    r = rule(op, i)
    r === nothing && throw(missing_rule(node, "backward rule for its input $i"))
    part = r(g, node, inputs, node.attrs)
    part === nothing && return nothing
    slot, part = get!(Pending, pending, x), unbroadcast(part::Tensor, x)
    if has_few_summands(part) && state().techniques.join
        isempty(slot.products) && (slot.products = Tensor[])
        push!(slot.products, part)
    else
        add_part!(slot, part, reuse)
    end
    return nothing
end

"""Whether `g` is traced as a product by a transposed matrix whose operands are together smaller than the product."""
has_few_summands(g::Tensor) = g.data === nothing && g.op === MATMUL && g.inputs[2].op === TRANSPOSE &&
    ndims(g) == ndims(g.inputs[1]) == ndims(g.inputs[2]) == 2 && sum(length, g.inputs) <= length(g)

"""
Add products of few summands, as a loop has them, as one of all of them.

The gradient of a weight that a loop reads is a sum of products, one for each step. With few samples each writes a whole
matrix for little work: one product of all the steps' columns beside each other, which are copied, writes it once.
"""
function add_products!(slot::Pending, reuse::Union{Nothing,Reuse})
    products = slot.products
    if length(products) < 3
        foreach(g -> add_part!(slot, g, reuse), products)
        return nothing
    end
    left = concatenate(Tensor[g.inputs[1] for g in products], 2)
    right = concatenate(Tensor[g.inputs[2].inputs[1] for g in products], 2)
    add_part!(slot, MATMUL(left, flipped(right)), reuse)
    return nothing
end

"""
Add a contribution at once, not when all are there: so each can be freed, or fused into the product that made it. From the
third on into the sum that is there already, where there are values and nobody differentiates them.
"""
function add_part!(slot::Pending, part::Tensor, reuse::Union{Nothing,Reuse})
    total = slot.total
    if total === nothing
        slot.total = part
        waits!(reuse, part.data)
    elseif slot.own && part.data !== nothing && !part.requires_grad
        compute!(ADD, total.data::Memory, Memory[total.data::Memory, part.data::Memory], NO_ATTRS)
    else
        slot.total = ADD(total, part)
        waits!(reuse, total.data, -1)
        waits!(reuse, slot.total.data)
        slot.own = slot.total.op === nothing && slot.total.data !== nothing
    end
    return nothing
end

"""The whole gradient of a node, which the slot forgets: nothing else is added, and its memory can be freed."""
function accumulated!(slot::Pending, node::Tensor, reuse::Union{Nothing,Reuse})
    isempty(slot.products) || @entering scope=slot.products[1].scope add_products!(slot, reuse)
    isempty(slot.parts) || add_part!(slot, assemble(slot.parts, slot.places, node.dims), reuse)
    foreach(x -> waits!(reuse, x.data, -1), slot.parts)
    total = slot.total::Tensor
    slot.total, slot.parts, slot.products = nothing, NO_INPUTS, NO_INPUTS
    return total
end

"""Sum a gradient over the axes along which `x` was broadcast, to the size of `x`."""
function unbroadcast(g::Tensor, x::Tensor)
    g.eltype === x.eltype || throw(DTypeError("a gradient rule returned $(g.eltype) for an input of $(x.eltype)"))
    g.dims == x.dims && return g
    axes = Int[d for d in 1:ndims(g) if d > ndims(x) || (x.dims[d] == 1 && g.dims[d] != 1)]
    summed = ndims(g) >= ndims(x) ? apply(SUM, Tensor[g], attributes(:axes => axes, :keep => true)) : g
    length(summed) == length(x) ||
        throw(ShapeError("a gradient rule returned size $(size(g)) for an input of size $(size(x))"))
    return reshape_to(summed, x.dims)
end

"""
    backward!(output; seed=nothing)

Add the derivative of `output` to `.grad` of every leaf that requires it. `seed` is the upstream gradient, with the
output's size; it must be given unless the output is a single number.
"""
function backward!(output::Tensor; seed=nothing)
    output.requires_grad || throw(NotDifferentiableError(
        "backward!: this tensor does not depend on any Variable"))
    depends_on_duals(Tensor[output]) && throw(NotDifferentiableError("backward!: this tensor was computed from dual numbers of " *
        "derivative() or its kin, and .grad cannot hold their derivatives; use grad() instead"))
    if seed === nothing
        length(output) == 1 || throw(ShapeError("backward!: a seed of size $(size(output)) must be given, since the " *
            "tensor is not a single number; or reduce it first, for example with sum()"))
        upstream = Constant(fill!(new_array(output.eltype, output.dims), 1))
    else
        upstream = Constant(seed isa Real ? fill(output.eltype(seed)) : output.eltype.(value(seed)))
        upstream.dims == output.dims ||
            throw(ShapeError("backward!: expected a seed of size $(size(output)), got $(size(upstream))"))
    end
    leaves = Tensor[x for x in topological_sort(output) if x.op === nothing && x.requires_grad]
    found = no_grad(() -> gradients(Tensor[output], Tensor[upstream], leaves))
    for (leaf, g) in zip(leaves, found)
        g === nothing && continue
        leaf.grad === nothing && (leaf.grad = copy(value(g)); continue)
        total = leaf.grad .+ value(g)
        leaf.grad = total isa AbstractArray ? total : fill(total)
    end
    return nothing
end

"""
    backward!(order::Vector{Tensor}; seed=nothing)

The papers' form: `backward!(topological_sort(y))` differentiates the last node. Gradients of the order's variables are
set, not added up.
"""
function backward!(order::Vector{Tensor}; seed=nothing)
    for x in order
        x.grad = nothing
    end
    return backward!(order[end]; seed=seed)
end

"""
    forward!(order::Vector{Tensor})

The papers' form: compute every node of a sorted graph again, in place, and return the value of the last one. Change the
leaves with `assign!` in between: [`Variable`](@ref)s. What was computed from constants alone is a constant itself, no node of the
graph, and keeps its value. Throws a ConfigurationError where a node depends on a comparison, an order or another constant that was
computed from variables, or is of a `checkpoint` or a `custom_rule`: the graph does not know how to compute these again.
"""
function forward!(order::Vector{Tensor})
    for x in order
        op = x.op
        op === nothing && continue
        (any_frozen(x.inputs, x.attrs) || (op.view !== nothing && op.backward! isa Joint)) && throw(ConfigurationError("forward!: " *
            "$(op.name) depends on what the graph does not know how to compute again (a comparison or an order of variables, a " *
            "checkpoint, a custom rule); call the function again"))
        inputs = all_readable(x.inputs, op)
        if op.view !== nothing
            # A view sees what it is of, but for a layout that has none, which is copied.
            op.several || x.data.root === inputs[1].root || (x.data = compute(op, inputs[1:1], x.dims, x.eltype, x.attrs))
            continue
        end
        out = op.several ? Memory[y.data::Memory for y in x.results] : x.data::Memory
        compute!(op, out, inputs, x.attrs)
        isempty(x.stamps) || (x.stamps = stamps_of(x))
    end
    return value(order[end])
end
forward!(output::Tensor) = forward!(topological_sort(output))
