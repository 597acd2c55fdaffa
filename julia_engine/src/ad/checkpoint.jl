# Checkpoints: functions whose inner values are computed again when a gradient needs them. And what that takes: a piece of
# a program, as a graph that is applied to other tensors.

# Pieces of programs ---------------------------------------------------------------------------------------------------

Base.show(io::IO, graph::Graph) = print(io, "Graph of ", length(graph.nodes), " ops")

"""Run `f()` and return its result, all ops that it used, recorded or not, in their order, and which it ran under `no_grad`."""
function making(@nospecialize(f))
    now = state()
    outer, constants = now.made, now.constants
    now.made, now.constants = Tensor[], Set{Tensor}()
    try
        return f(), now.made, now.constants
    finally
        if outer !== nothing
            append!(outer, now.made)
            union!(constants, now.constants)
        end
        now.made, now.constants = outer, constants
    end
end

"""Run `f()` with every op symbolic, inside another trace too, and return its result and the ops."""
function tracing_apart(@nospecialize(f))
    now = state()
    trace, recording, made = now.trace, now.recording, now.made
    nodes = Tensor[]
    now.trace, now.recording, now.made = nodes, true, nothing
    try
        return f(), nodes
    finally
        now.trace, now.recording, now.made = trace, recording, made
    end
end

"""
    closed(arguments, outputs, nodes, constants)

What was made of `arguments`, as a graph without values, and the tensors from outside that it is a function of as well. Its
inputs stand for the arguments and then for these: tensors that can be differentiated by, those of a trace around it, and
random draws, which must not be drawn anew. Constants stay as they are, and results in `constants` have no derivative, though
they will be computed anew, and recorded.
"""
function closed(arguments::Vector{Tensor}, outputs::Vector{Tensor}, nodes::Vector{Tensor}, constants::Set{Tensor})
    here = Dict{Tensor,Tensor}()
    inputs, outside, copies = Tensor[], Tensor[], Tensor[]
    function enter!(x::Tensor)
        s = symbol(x.eltype, x.dims, x.name)
        push!(inputs, s)
        return here[x] = s
    end
    function inside(x::Tensor)
        haskey(here, x) && return here[x]
        x.data !== nothing && !x.requires_grad && return x
        push!(outside, x)
        return enter!(x)
    end
    foreach(enter!, arguments)
    made = Set{Tensor}(nodes)
    for node in nodes
        haskey(here, node) && continue
        if (node.op::Op).random
            push!(outside, node)
            enter!(node)
            continue
        end
        node_inputs = Tensor[inside(x) for x in node.inputs]
        here[node] = Tensor(nothing, node.eltype, node.dims, node.op, node_inputs, node.attrs, node.eltype in FLOATS,
            nothing, "", node.scope, false)
        push!(copies, here[node])
        if node in constants && node.eltype in FLOATS
            here[node] = Tensor(nothing, node.eltype, node.dims, STOP_GRADIENT, Tensor[here[node]], NO_ATTRS, false, nothing, "",
                node.scope, false)
            push!(copies, here[node])
        end
    end
    graph = prune!(Graph(inputs, Tensor[inside(x) for x in outputs], copies))
    return graph, outside
end

"""The arrays that a piece of a program reads beside its inputs, those of the pieces inside it included."""
captured_by(@nospecialize attr) = NO_INPUTS
captured_by(attrs::Vector{Any}) = Tensor[x for attr in attrs for x in captured_by(attr)]
captured_by(graph::Graph) = unique(Tensor[
    Tensor[x for node in graph.nodes for x in node.inputs if x.data !== nothing && !x.literal];
    Tensor[x for x in graph.outputs if x.data !== nothing && !x.literal];
    Tensor[x for node in graph.nodes for x in captured_by(node.attrs)]])

"""Apply the ops of a graph to these inputs; return the outputs, and all results in order."""
function inlined(graph::Graph, inputs::Vector{Tensor})
    here = Dict{Tensor,Tensor}(zip(graph.inputs, inputs))
    now = state()
    outer = now.scope
    made = Tensor[]
    try
        for node in graph.nodes
            now.scope = node.scope
            here[node] = apply(node.op::Op, Tensor[get(here, x, x) for x in node.inputs], node.attrs)
            push!(made, here[node])
        end
    finally
        now.scope = outer
    end
    return Tensor[get(here, x, x) for x in graph.outputs], made
end

"""A piece of a program, recorded on tensors of its own: `(outputs, variables, everything between)`."""
function recorded_piece(graph::Graph, inputs::Vector{Tensor}, own)
    now = state()
    recording = now.recording
    try
        now.recording = true
        variables = Tensor[own(x) for x in inputs]
        outputs, made = inlined(graph, variables)
        return outputs, variables, made
    finally
        now.recording = recording
    end
end

"""Several results as one tensor, flat and of the widest type, unless there is one only; and back."""
function joined(parts::Vector{Tensor})
    length(parts) == 1 && return parts[1]
    T = any(x -> x.eltype === Float64, parts) ? Float64 : parts[1].eltype
    return concatenate(Tensor[astype(vec(x), T) for x in parts], 1)
end

function separated(flat::Tensor, like::Vector{Tensor})
    length(like) == 1 && return Tensor[flat]
    parts, last = Tensor[], 0
    for x in like
        piece = part(flat, last + 1, x.dims)
        push!(parts, x.eltype in FLOATS ? astype(piece, x.eltype) : piece)
        last += length(x)
    end
    return parts
end

"""The elements of a flat tensor from `first` on, as many as fill these dimensions."""
part(flat::Tensor, first::Int, dims::Vector{Int}) =
    reshape_to(apply(SLICE, Tensor[flat], Any[Index([(first, 1, prod(dims))])]), dims)

# Checkpoints ----------------------------------------------------------------------------------------------------------

# A barrier is its input, but not for the simplification of graphs: what is computed from it again is not merged with what
# was computed from the input itself, and so need not be kept. The attribute keeps barriers of two checkpoints apart.
const BARRIER = Op("barrier", infer_same; view=itself, backward=Any[(g, y, inputs, attrs) -> g],
    jvp=(t, y, inputs, attrs) -> t[1], attrs=[:graph], doc="x itself, which no simplification looks through")

# The first input is the result, computed without being recorded; the rest is what it was computed from.
function checkpoint_pullback(g::Tensor, node::Tensor, asked::Vector{Bool})
    graph = node.attrs[1]::Graph
    # Values, where nobody will differentiate what is computed here: then the recomputation knows nothing of the past.
    detached = !state().recording
    own(x) = x.data === nothing || (x.requires_grad && !detached) ? apply(BARRIER, Tensor[x], Any[graph]) :
        x.eltype in FLOATS ? Variable(value(x)) : x
    outputs, variables, made = recorded_piece(graph, node.inputs[2:end], own)
    seeds = separated(g, outputs)
    targets = Tensor[x for (x, is_asked) in zip(variables, asked[2:end]) if is_asked]
    found = Iterators.Stateful(gradients(outputs, seeds, targets; within=made))
    return Any[nothing; Any[is_asked ? popfirst!(found) : nothing for is_asked in asked[2:end]]]
end

function checkpoint_jvp(t, y, inputs, attrs)
    outputs, variables, made = recorded_piece(attrs[1]::Graph, inputs[2:end], own_variable_or_index)
    moves = Dict{Tensor,Tensor}(x => d for (x, d) in zip(variables, t[2:end]) if d !== nothing)
    return joined(pushed_forward(outputs, moves, made))
end
own_variable_or_index(x::Tensor) = x.eltype in FLOATS ? own_variable(x, next_level()) : x

const CHECKPOINTED = Op("checkpointed", infer_same; view=itself, backward=Joint(checkpoint_pullback),
    jvp=checkpoint_jvp, attrs=[:graph], doc="a result whose inner values are computed again in the backward pass")

"""
    checkpoint(f)

A function that computes the same as `f`, whose inner values are not kept for the backward pass but computed again there:
memory for time. It works eagerly and in compiled functions, with containers, inside itself, and with tensors that `f`
captures. Branches are those of the forward pass, and random draws are kept.

Source: Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).
"""
function checkpoint(f)
    return function (args...)
        given, structure = flatten(args)
        differentiable_ = any(x -> has_derivative(x), given)
        plain = is_plain(given)
        leaves = Any[has_derivative(x) ? own_tensor(x) : x for x in given]
        arguments = Tensor[x for x in leaves if x isa Tensor]
        (found, result), made, constants = making(() -> unrecorded(() -> flatten(f(unflatten(structure, leaves)...))))
        outputs = Tensor[as_output(x, "checkpoint") for x in found]
        floats = Tensor[x for x in outputs if x.eltype in FLOATS]
        parts = copy(outputs)  # integers have no derivative
        if !isempty(floats)
            graph, outside = closed(arguments, floats, made, constants)
            flat = joined_unrecorded(floats)
            y = apply(CHECKPOINTED, Tensor[flat; arguments; outside], Any[graph])
            parts[findall(x -> x.eltype in FLOATS, outputs)] = separated(y, floats)
        end
        return unflatten(result, shown(parts, plain && (!any(x -> x.requires_grad, parts) || depends_on_duals(parts)), given))
    end
end

own_tensor(x::Tensor) = x
own_tensor(x) = is_dual(x) ? as_tensor(x, float_of(eltype(x))) : Constant(x)

"""The result without the ops that it came from, where it has values already."""
function joined_unrecorded(outputs::Vector{Tensor})
    flat = unrecorded(() -> joined(outputs))
    return flat.data === nothing ? flat : leaf(flat.data, flat.eltype, flat.dims, false, "")
end
