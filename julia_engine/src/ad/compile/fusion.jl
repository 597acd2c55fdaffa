# Fusion: single ops for what a training step does most, in fewer passes over memory.
#
# A fused op has a kernel and no rules: programs are fused after they have been differentiated. It equals the ops that it
# names.

fused_op(name, fuses, doc, operands=2) = register!(Op(name, infer_elementwise; elementwise=true,
    overwrites=collect(1:operands), fuses=fuses, scalar=Kernels.SCALARS[Symbol(name)],
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
    c.address.pointer == out.address.pointer && c.strides == out.strides || emit_copy!(p, out, c)
    return emit_matmul!(p, out, a, b, 1)
end

const MATMUL_ADD = register!(Op("matmul_add",
    (inputs, attrs) -> infer_matmul(inputs[2:3], attrs); forward=forward_matmul_add, overwrites=[1],
    accepts=nothing, fuses="matmul, add", doc="c + a b, in one product"))

"""What a pass needs to know of a program's variables: which equation makes each, and how often each is read."""
struct Uses
    made::Made
    counts::TensorDict{Int}
end

function Uses(program::Program)
    counts = TensorDict{Int}()
    sizehint!(counts, length(program.equations))
    count!(x::Tensor) = counts[x] = get(counts, x, 0) + 1
    foreach(e -> foreach(count!, e.inputs), program.equations)
    foreach(count!, program.outputs)
    return Uses(made_by(program), counts)
end

op_of(x::Tensor, uses::Uses) = op_of(x, uses.made)

"""The equation that makes `x` where that is one of this op, or `nothing`."""
by(uses::Uses, x::Tensor, op::Op) = (e = get(uses.made, x, nothing); e !== nothing && e.op === op ? e : nothing)

"""The same where nobody else reads `x`."""
only_by(uses::Uses, x::Tensor, op::Op) = uses.counts[x] == 1 ? by(uses, x, op) : nothing

"""
    fuse(program)

Replace chains of ops by the fused ops that stand for them.
"""
function fuse(program::Program)
    program = fuse_pools(program)
    uses = Uses(program)
    place = TensorDict{Int}()
    sizehint!(place, length(program.equations))
    for (i, e) in enumerate(program.equations), x in e.outputs
        place[x] = i
    end
    equations = Equation[]
    for e in program.equations
        found = fusion(e, uses, place)
        if found !== nothing
            e = Equation(found[1], found[2], NO_ATTRS, e.outputs, e.scope)
            uses.made[output(e)] = e
        end
        push!(equations, e)
    end
    return prune(Program(program.inputs, equations, program.outputs))
end

"""The fused op that an equation can be, and its inputs; or `nothing`."""
function fusion(e::Equation, uses::Uses, place::TensorDict{Int})
    op = e.op
    op === WHERE && return relu_fusion(e, uses)
    op === MUL && return gradient_fusion(e, uses)
    op === ADD && return something(product_fusion(e, uses, place), sum_fusion(e, uses), Some(nothing))
    op === TANH && return bias_fusion(e, uses, ADD_TANH)
    op === SIGMOID && return bias_fusion(e, uses, ADD_SIGMOID)
    op === RELU && return bias_fusion(e, uses, ADD_RELU)
    return nothing
end

is_number(x::Tensor, v) = x.literal && item(x) == v

function gradient_fusion(e::Equation, uses::Uses)
    g, d = e.inputs
    g.dims == d.dims || return nothing
    if (difference = only_by(uses, d, SUB)) !== nothing && is_number(difference.inputs[1], 1)
        squared = by(uses, difference.inputs[2], SQUARE)
        squared === nothing || return TANH_GRADIENT, Tensor[g, squared.inputs[1]]
    elseif (product = only_by(uses, d, MUL)) !== nothing
        y, rest = product.inputs
        difference = only_by(uses, rest, SUB)
        difference !== nothing && is_number(difference.inputs[1], 1) && difference.inputs[2] === y &&
            return SIGMOID_GRADIENT, Tensor[g, y]
    end
    return nothing
end

function relu_fusion(e::Equation, uses::Uses)
    holds, g, other = e.inputs
    step = only_by(uses, holds, STEP)
    step !== nothing && is_number(other, 0) && g.dims == holds.dims || return nothing
    return RELU_GRADIENT, Tensor[g, step.inputs[1]]
end

function product_fusion(e::Equation, uses::Uses, place::TensorDict{Int})
    a, b = e.inputs
    suits(x) = only_by(uses, x, MATMUL) !== nothing && x.dims == output(e).dims
    (a === b || !(suits(a) || suits(b))) && return nothing
    # Of two products the later one is added: its factors need not be kept for longer.
    product, rest = suits(a) && (!suits(b) || place[a] > place[b]) ? (a, b) : (b, a)
    return MATMUL_ADD, Tensor[rest; uses.made[product].inputs]
end

"""Only where all three operands lie element by element."""
function sum_fusion(e::Equation, uses::Uses)
    whole(x) = x.dims == output(e).dims && op_of(x, uses) !== BROADCAST_TO
    suits(x) = only_by(uses, x, MUL) !== nothing && whole(x) && all(whole, uses.made[x].inputs)
    a, b = e.inputs
    a !== b && whole(a) && whole(b) || return nothing
    product, rest = suits(b) ? (b, a) : (a, b)
    return suits(product) ? (MUL_ADD, Tensor[rest; uses.made[product].inputs]) : nothing
end

function bias_fusion(e::Equation, uses::Uses, fused::Op)
    added = only_by(uses, e.inputs[1], ADD)
    return added === nothing ? nothing : (fused, added.inputs)
end
