# Computation graphs: sorting, differentiation, tracing and simplification. Nothing here recurses over a graph.

# Sorting --------------------------------------------------------------------------------------------------------------

"""
    topological_sort(outputs, level=0)

Every tensor of at least this level that the outputs depend on through others of it, and themselves, each after its inputs.
"""
function topological_sort(outputs::Vector{Tensor}, level::Int=0)
    order = Tensor[]
    seen = Set{Tensor}()
    stack = Tuple{Tensor,Bool}[(x, false) for x in reverse(outputs)]
    while !isempty(stack)
        node, inputs_done = pop!(stack)
        if inputs_done
            push!(order, node)
        elseif node.level >= level && !(node in seen)
            push!(seen, node)
            push!(stack, (node, true))
            for x in Iterators.reverse(node.inputs)
                x in seen || push!(stack, (x, false))
            end
        end
    end
    return order
end
topological_sort(output::Tensor) = topological_sort(Tensor[output])

# Differentiation ------------------------------------------------------------------------------------------------------

"""
A gradient as it comes together: the sum so far, whether nobody else has seen that sum, and parts that belong into places
of the whole.
"""
mutable struct Pending
    total::Union{Nothing,Tensor}
    own::Bool
    parts::Vector{Tensor}
    places::Vector{Index}
end
Pending() = Pending(nothing, false, Tensor[], Index[])

"""
The rule of an op whose inputs' gradients come together: `rule(g, node, asked)` returns one for each input, `nothing`
where it is not asked for or where there is none.
"""
struct Joint <: Function
    rule::Function
end

"""
    gradients(outputs, seeds, targets; within=nothing, level=1, span=nothing)

The vector-Jacobian product of the outputs with the seeds, for each target: a tensor of its size and element type, or
`nothing` where no output depends on it.

Reverse mode, by the ops' own rules, which are ops again: eager tensors give values, symbolic ones extend the graph, and
either can be differentiated once more.

`within`: the tensors to go through, sorted, where they are known; what the targets were computed from is not looked at.

`level`: the targets have at least this one. What depends on them has it, too, and nothing else is looked at: so the cost of
a transform inside others does not grow with what these have computed before. `span` is the part of the trace that was made
since the transform began; `nothing` stands for all of it.
"""
function gradients(outputs::Vector{Tensor}, seeds::Vector{Tensor}, targets::Vector{Tensor};
        within::Union{Nothing,Vector{Tensor}}=nothing, level::Int=1, span::Union{Nothing,UnitRange{Int}}=nothing)
    order = within === nothing ? topological_sort(outputs, level) : Tensor[targets; within]
    wanted = Set{Tensor}(targets)
    depends = Set{Tensor}(targets)
    for node in order
        node.op !== nothing && node.requires_grad && any(x -> x in depends, node.inputs) && push!(depends, node)
    end
    if within === nothing && state().trace !== nothing
        replaced = merge_equal!(depends, wanted, span)
        outputs = Tensor[get(replaced, x, x) for x in outputs]
        isempty(replaced) || (order = topological_sort(outputs, level))
    end
    pending = Dict{Tensor,Pending}()
    for (output, seed) in zip(outputs, seeds)
        output in depends && add_part!(get!(Pending, pending, output), seed, nothing)
    end
    result = Dict{Tensor,Tensor}()
    now = state()
    outer, lender = now.scope, now.reuse
    stamps = Dict{Tensor,UInt64}()
    # Not where values may be read later on: by a derivative of this one, or by whoever asked for all results.
    reuse = now.recording || now.trace !== nothing || now.made !== nothing ? nothing : Reuse()
    reuse === nothing || keep_freed_memory()
    try
        for node in Iterators.reverse(order)
            haskey(pending, node) || continue
            now.scope, now.reuse = node.scope, reuse
            g = accumulated(pop!(pending, node), node, reuse)
            node in wanted && (result[node] = g)
            (node.op === nothing || (within !== nothing && node in wanted)) && continue
            check_stamps(node, stamps)
            asked = Bool[x in depends && x.eltype in FLOATS for x in node.inputs]
            if (node.op::Op).backward! isa Joint
                now.reuse = nothing  # such a rule runs the user's code, which may keep what it sees
                parts = node.op.backward!.rule(g, node, asked)
                empty!(stamps)
                for (x, part) in zip(node.inputs, parts)
                    part === nothing || add_part!(get!(Pending, pending, x), unbroadcast(part::Tensor, x), reuse)
                end
                continue
            end
            for (i, x) in enumerate(node.inputs)
                asked[i] && pull_back!(pending, node, i, x, g, reuse)
            end
            node in wanted || waits!(reuse, g.data, -1)
            recycle!(reuse, g.data)
        end
    finally
        now.scope, now.reuse = outer, lender
    end
    return Union{Nothing,Tensor}[get(result, target, nothing) for target in targets]
end

"""
Read the first of all nodes in `depends` that are computed in the same way, but not instead of those `wanted`; return what
is replaced by what. Done before a graph is differentiated: what a loop computes anew each time, and is the same, has one
gradient. What does not depend on the wanted stays as it is: among it are the variables of the transforms around, which may
be equal, too.
"""
function merge_equal!(depends::Set{Tensor}, wanted::Set{Tensor}, span::Union{Nothing,UnitRange{Int}})
    known, replaced = Dict{Vector{UInt},Tensor}(), Dict{Tensor,Tensor}()
    trace = state().trace::Vector{Tensor}
    for k in something(span, 1:length(trace))  # in the order they were made, so that the first one is there for all
        node = trace[k]
        node in depends || continue
        node.inputs = Tensor[get(replaced, x, x) for x in node.inputs]
        (node in wanted || (node.op::Op).random) && continue
        instead = get!(known, fingerprint(node), node)
        instead === node || (replaced[node] = instead)
    end
    return replaced
end

function pull_back!(pending::Dict{Tensor,Pending}, node::Tensor, i::Int, x::Tensor, g::Tensor,
        reuse::Union{Nothing,Reuse})
    op = node.op::Op
    if op === SLICE
        # Not put into zeros here: the gradient of an array taken apart by slices is assembled once from all.
        slot = get!(Pending, pending, x)
        push!(slot.parts, g)
        waits!(reuse, g.data)
        push!(slot.places, node.attrs[1]::Index)
        return nothing
    end
    r = rule(op, i)
    r === nothing && throw(missing_rule(node, "backward rule for its input $i"))
    part = r(g, node, node.inputs, node.attrs)
    part === nothing && return nothing
    add_part!(get!(Pending, pending, x), unbroadcast(part::Tensor, x), reuse)
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

function accumulated(slot::Pending, node::Tensor, reuse::Union{Nothing,Reuse})
    isempty(slot.parts) || add_part!(slot, assemble(slot.parts, slot.places, node.dims), reuse)
    foreach(x -> waits!(reuse, x.data, -1), slot.parts)
    return slot.total::Tensor
end

"""Sum a gradient over the axes along which `x` was broadcast, to the size of `x`."""
function unbroadcast(g::Tensor, x::Tensor)
    g.eltype === x.eltype || throw(DTypeError("a gradient rule returned $(g.eltype) for an input of $(x.eltype)"))
    g.dims == x.dims && return g
    axes = Int[d for d in 1:ndims(g) if d > ndims(x) || (x.dims[d] == 1 && g.dims[d] != 1)]
    summed = ndims(g) >= ndims(x) ? apply(SUM, Tensor[g], Any[axes, true]) : g
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
        leaf.grad = leaf.grad === nothing ? copy(value(g)) : leaf.grad .+ value(g)
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
leaves with `assign!` in between.
"""
function forward!(order::Vector{Tensor})
    for x in order
        op = x.op
        (op === nothing || op.view !== nothing) && continue
        compute!(op, x.data::Memory, Memory[a.data::Memory for a in x.inputs], x.attrs)
        isempty(x.stamps) || (x.stamps = stamps_of(x))
    end
    return value(order[end])
end
forward!(output::Tensor) = forward!(topological_sort(output))

# Tracing --------------------------------------------------------------------------------------------------------------

"""
    Graph

A traced function: symbolic inputs, outputs, and every op between them in the order it was made. Tensors with data that
the ops use are captured by reference: a later `assign!` to them is seen.
"""
mutable struct Graph
    inputs::Vector{Tensor}
    outputs::Vector{Tensor}
    nodes::Vector{Tensor}
end

"""Drop the ops that no output needs."""
function prune!(graph::Graph)
    needed = Set{Tensor}(topological_sort(graph.outputs))
    kept = Tensor[]
    for node in graph.nodes
        node in needed && push!(kept, node)
    end
    graph.nodes = kept
    return graph
end

"""Run `f()` with every op symbolic; return its result and the ops in the order they were made."""
function tracing(@nospecialize(f))
    now = state()
    now.trace === nothing ||
        throw(TraceError("a function cannot be compiled inside another one's trace; call it uncompiled there"))
    nodes = Tensor[]
    now.trace = nodes
    try
        return f(), nodes
    finally
        now.trace = nothing
    end
end

"""
    trace(f, inputs)

Run `f(inputs...)` on symbolic inputs and return the graph of what it did; `f` returns a list of tensors.
"""
function trace(@nospecialize(f), inputs::Vector{Tensor})
    outputs, nodes = tracing(() -> f(inputs...))
    return prune!(Graph(copy(inputs), Tensor[as_tensor(x) for x in outputs], nodes))
end

# Simplification -------------------------------------------------------------------------------------------------------

"""Merge equal ops, fold arithmetic on literals and drop ops that change nothing; in place."""
function simplify!(graph::Graph)
    replaced = Dict{Tensor,Tensor}()
    known = Dict{Vector{UInt},Tensor}()
    literals = Dict{Vector{UInt},Tensor}()
    function resolve(x::Tensor)
        x = get(replaced, x, x)
        x.literal && (x = get!(literals, UInt[objectid(x.eltype), literal_bits(x)], x))
        return x
    end
    for node in graph.nodes
        node.inputs = Tensor[resolve(x) for x in node.inputs]
        instead = simpler!(node)
        if instead === nothing
            (node.op::Op).random && continue
            instead = get!(known, fingerprint(node), node)
        end
        instead === node || (replaced[node] = instead)
    end
    graph.outputs = Tensor[resolve(x) for x in graph.outputs]
    return prune!(graph)
end

literal_bits(x::Tensor) = x.eltype === Float32 ? UInt(reinterpret(UInt32, item(x)::Float32)) :
    reinterpret(UInt, item(x)::Float64)

"""What an op is applied to, in numbers: equal for nodes that compute the same."""
function fingerprint(node::Tensor)
    key = UInt[objectid(node.op)]
    for x in node.inputs
        push!(key, objectid(x))
    end
    for attr in node.attrs
        write_down!(key, attr)
    end
    return key
end

write_down!(key::Vector{UInt}, x::Int) = (push!(key, x % UInt); nothing)
write_down!(key::Vector{UInt}, x::Float64) = (push!(key, reinterpret(UInt, x)); nothing)
write_down!(key::Vector{UInt}, x::Bool) = (push!(key, UInt(x)); nothing)
write_down!(key::Vector{UInt}, x::Char) = (push!(key, UInt(x)); nothing)
write_down!(key::Vector{UInt}, x::Item) = (push!(key, x[1] % UInt, x[2] % UInt, x[3] % UInt); nothing)
function write_down!(key::Vector{UInt}, x::Union{Vector{Int},Index,Vector{Index},Vector{Char},Vector{Vector{Char}}})
    push!(key, UInt(length(x)))
    for item in x
        write_down!(key, item)
    end
end
write_down!(key::Vector{UInt}, @nospecialize(x)) = (push!(key, objectid(x)); nothing)

"""An existing tensor, or a literal, that equals `node`; or `nothing`, perhaps with `node` itself shortened."""
function simpler!(node::Tensor)
    op, inputs = node.op::Op, node.inputs
    (op === IDENTITY || op === STOP_GRADIENT || op === CHECKPOINTED || op === CUSTOM) && return inputs[1]
    if op.elementwise && isempty(node.dims) && all(x -> x.literal, inputs)
        data = compute(op, Memory[x.data::Memory for x in inputs], node.dims, node.eltype, node.attrs)
        return literal(node.eltype, data.root[])
    end
    if op.elementwise && !isempty(node.dims) && all(x -> repeated(x) !== nothing, inputs)
        # One number for all elements: it is computed here, and repeated without memory of its own.
        numbers = Tensor[repeated(x) for x in inputs]
        data = compute(op, Memory[x.data::Memory for x in numbers], Int[], node.eltype, node.attrs)
        node.op, node.inputs, node.attrs = BROADCAST_TO, Tensor[literal(node.eltype, data.root[])], Any[node.dims]
        return nothing
    end
    if op === MUL
        is_one(inputs[1]) && inputs[2].dims == node.dims && return inputs[2]
        is_one(inputs[2]) && inputs[1].dims == node.dims && return inputs[1]
    end
    (op === RESHAPE || op === TRANSPOSE) && return shorter_view!(node)
    return nothing
end

"""The literal that all elements are equal to, or `nothing`."""
function repeated(x::Tensor)
    while x.op === RESHAPE || x.op === BROADCAST_TO
        x = x.inputs[1]
    end
    return x.literal ? x : nothing
end

function is_one(x::Tensor)
    number = repeated(x)
    return number !== nothing && item(number) == 1
end

function shorter_view!(node::Tensor)
    x = node.inputs[1]
    if x.op === node.op
        node.op === TRANSPOSE && (node.attrs = Any[x.attrs[1][node.attrs[1]]])
        x = x.inputs[1]
        node.inputs = Tensor[x]
    end
    node.op === RESHAPE && node.dims == x.dims && return x
    node.op === TRANSPOSE && issorted(node.attrs[1]) && return x
    return nothing
end

# Fusion ---------------------------------------------------------------------------------------------------------------
#
# Ops of their own for what a training step does most, in fewer passes over memory. A fused op exists in this engine
# only, has no derivative (graphs are fused after they have been differentiated) and equals the ops that it names.

fused_op(name, fuses, doc, operands=2) = register!(Op(name, infer_elementwise; elementwise=true,
    overwrites=collect(1:operands), fuses=fuses, scalar=Symbol(name),
    forward=(p, out, inputs, attrs) -> emit_elementwise!(p, Symbol(name), out, inputs), doc=doc))

const TANH_GRADIENT = fused_op("tanh_gradient", "mul, sub, square", "g (1 - y²)")
const SIGMOID_GRADIENT = fused_op("sigmoid_gradient", "mul, mul, sub", "g y (1 - y)")
const RELU_GRADIENT = fused_op("relu_gradient", "where, step", "g where y > 0, else 0")
const ADD_TANH = fused_op("add_tanh", "add, tanh", "tanh(a + b)")
const ADD_SIGMOID = fused_op("add_sigmoid", "add, sigmoid", "1 / (1 + exp(-a - b))")
const ADD_RELU = fused_op("add_relu", "add, relu", "max(a + b, 0)")
const MUL_ADD = fused_op("mul_add", "mul, add", "c + a b", 3)

function forward_matmul_add(p, out, inputs, attrs)
    c, a, b = inputs
    c.address == out.address && c.strides == out.strides || emit_copy!(p, out, c)
    return emit_matmul!(p, out, a, b, 1)
end

const MATMUL_ADD = register!(Op("matmul_add",
    (inputs, attrs) -> infer_matmul(inputs[2:3], attrs); forward=forward_matmul_add, overwrites=[1],
    accepts=nothing, fuses="matmul, add", doc="c + a b, in one BLAS call"))

"""
    fuse!(graph)

Replace chains of ops by the fused ops that stand for them, in place.
"""
function fuse!(graph::Graph)
    fuse_pools!(graph)
    uses = Dict{Tensor,Int}()
    for node in graph.nodes, x in node.inputs
        uses[x] = get(uses, x, 0) + 1
    end
    for x in graph.outputs
        uses[x] = get(uses, x, 0) + 1
    end
    once(x) = x.op !== nothing && x.data === nothing && uses[x] == 1
    place = Dict{Tensor,Int}(x => i for (i, x) in enumerate(graph.nodes))
    for node in graph.nodes
        found = fusion(node, once, place)
        found === nothing && continue
        node.op, node.inputs, node.attrs = found[1], found[2], NO_ATTRS
    end
    return prune!(graph)
end

function fusion(node::Tensor, once, place)
    op = node.op::Op
    op === WHERE && return relu_fusion(node, once)
    op === MUL && return gradient_fusion(node, once)
    op === ADD && return something(product_fusion(node, once, place), sum_fusion(node, once), Some(nothing))
    op === TANH && return bias_fusion(node, once, ADD_TANH)
    op === SIGMOID && return bias_fusion(node, once, ADD_SIGMOID)
    op === RELU && return bias_fusion(node, once, ADD_RELU)
    return nothing
end

is_number(x::Tensor, v) = x.literal && item(x) == v

function gradient_fusion(node::Tensor, once)
    g, d = node.inputs
    once(d) && g.dims == d.dims || return nothing
    if d.op === SUB && is_number(d.inputs[1], 1)
        squared = d.inputs[2]
        squared.op === SQUARE && return TANH_GRADIENT, Tensor[g, squared.inputs[1]]
    elseif d.op === MUL
        y, rest = d.inputs
        rest.op === SUB && is_number(rest.inputs[1], 1) && rest.inputs[2] === y && once(rest) &&
            return SIGMOID_GRADIENT, Tensor[g, y]
    end
    return nothing
end

function relu_fusion(node::Tensor, once)
    holds, g, other = node.inputs
    holds.op === STEP && once(holds) && is_number(other, 0) && g.dims == holds.dims || return nothing
    return RELU_GRADIENT, Tensor[g, holds.inputs[1]]
end

function product_fusion(node::Tensor, once, place)
    a, b = node.inputs
    suits(x) = x.op === MATMUL && once(x) && x.dims == node.dims
    (a === b || !(suits(a) || suits(b))) && return nothing
    # Of two products the later one is added: its factors need not be kept for longer.
    product, rest = suits(a) && (!suits(b) || place[a] > place[b]) ? (a, b) : (b, a)
    return MATMUL_ADD, Tensor[rest, product.inputs[1], product.inputs[2]]
end

"""Only where all three operands lie element by element."""
function sum_fusion(node::Tensor, once)
    whole(x) = x.dims == node.dims && x.op !== BROADCAST_TO
    suits(x) = x.op === MUL && once(x) && whole(x) && all(whole, x.inputs)
    a, b = node.inputs
    a !== b && whole(a) && whole(b) || return nothing
    product, rest = suits(b) ? (b, a) : (a, b)
    return suits(product) ? (MUL_ADD, Tensor[rest; product.inputs]) : nothing
end

function bias_fusion(node::Tensor, once, fused::Op)
    sum_ = node.inputs[1]
    sum_.op === ADD && once(sum_) || return nothing
    return fused, copy(sum_.inputs)
end
