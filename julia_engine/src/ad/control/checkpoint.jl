# Checkpoints: functions whose inner values are computed again when a gradient needs them.

# A barrier is its input, but not for the simplification of programs: what is computed from it again is not merged with what
# was computed from the input itself, and so need not be kept. The attribute keeps barriers of two checkpoints apart.
const BARRIER = Op("barrier", infer_same; view=itself, backward=Any[(g, y, inputs, attrs) -> g],
    jvp=(t, y, inputs, attrs) -> t[1], attrs=[:program], doc="x itself, which no simplification looks through")

# The first inputs are the results, the rest is what they were computed from.
infer_checkpoint(inputs, attrs) = Kind[(x.dims, x.eltype) for x in inputs[1:length(attrs.program.outputs)]]

"""The inputs once more, the results and the nodes between them, on separate tensors."""
function once_more(program::Program, inputs::Vector{Tensor}, own)
    return @entering grad_enabled=true begin
        variables = Tensor[own(x) for x in inputs]
        outputs, nodes = applied(program, variables)
        variables, outputs, nodes
    end
end

function checkpoint_pullback(cotangents::Vector{Union{Nothing,Tensor}}, node::Tensor, inputs::Vector{Tensor},
        needs_grad::Vector{Bool})
    program, n = node.attrs.program::Program, length(cotangents)
    # Values, where nobody will differentiate what is computed here: then the recomputation knows nothing of the past.
    is_followed_ = state().grad_enabled
    own(x) = x.data === nothing || (x.requires_grad && is_followed_) ? apply(BARRIER, Tensor[x], attributes(:program => program)) :
        x.eltype in FLOATS ? Variable(value(x)) : x
    variables, outputs, nodes = once_more(program, inputs[n+1:end], own)
    wanted = needs_grad[n+1:end]
    seeded = Int[k for k in 1:n if cotangents[k] !== nothing]
    found = Iterators.Stateful(gradients(outputs[seeded], Tensor[cotangents[k] for k in seeded], variables[wanted]; within=nodes))
    return Any[fill(nothing, n); Any[is_wanted ? popfirst!(found) : nothing for is_wanted in wanted]]
end

function checkpoint_jvp(t, results, inputs, attrs)
    n = length(results)
    any(!isnothing, t[1:n]) && return t[1:n]  # traced: the ops inside are part of the graph
    variables, outputs, nodes = once_more(attrs.program::Program, inputs[n+1:end], own_variable_or_index)
    tangents = Dict{Tensor,Tensor}(x => d for (x, d) in zip(variables, t[n+1:end]) if d !== nothing)
    return pushed_forward(outputs, tangents, nodes)
end
own_variable_or_index(x::Tensor) = x.eltype in FLOATS ? own_variable(x, next_level()) : x

const CHECKPOINT = Op("checkpoint", infer_checkpoint; several=true,
    view=(memories, attrs) -> memories[1:length(attrs.program.outputs)], backward=Joint(checkpoint_pullback), jvp=checkpoint_jvp,
    simplify=(e, made) -> its_input(e, made), attrs=[:program],
    doc="the first inputs, which the others determine; their gradient computes them from these once more")

"""
    checkpoint(f)

A function that computes the same as `f`, whose inner values are not kept for the backward pass but computed again there:
memory for time. It works eagerly and in compiled functions, with containers, inside itself, and with tensors that `f`
captures. Branches are those of the forward pass, and random draws are kept.

Source: Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000).
"""
checkpoint(@nospecialize(f)) = Checkpointed(f)

"""What [`checkpoint`](@ref) returns: a struct, as [`Gradient`](@ref) is one."""
struct Checkpointed <: Function
    f::Any
end

function (c::Checkpointed)(@nospecialize(args...))
    given, structure = flatten(args)
    plain = is_plain(given)
    now = state()
    leaves = Any[has_derivative(x) ? own_tensor(x) : x for x in given]
    arguments = Tensor[x for x in leaves if x isa Tensor]
    # Eagerly the ops inside are collected here, and given up at the end.
    nodes = now.trace === nothing ? Tensor[] : now.trace
    start = length(nodes)
    noted = now.trace === nothing ? Given() : now.given
    found, result = @entering trace=nodes given=noted flatten(c.f(unflatten(structure, leaves)...))
    now.trace === nothing && check_given(noted)
    outputs = as_rows(found, Tensor[as_output(x, "checkpoint") for x in found])
    mine = given_arrays(outputs)
    places = findall(x -> x.eltype in FLOATS, outputs)  # integers have no derivative
    if !isempty(places)
        program, outside = close_over(nodes[start+1:end], arguments, outputs[places])
        outputs[places] = as_rows(outputs[places],
            apply_several(CHECKPOINT, Tensor[outputs[places]; arguments; outside], attributes(:program => program)))
    end
    any(x -> x isa Elements, found) &&  # of a dotted function around it
        return unflatten(result, Any[x isa Elements ? Elements(y, x.run) : y for (x, y) in zip(found, outputs)])
    return unflatten(result, shown(outputs, plain && (!any(x -> x.requires_grad, outputs) || depends_on_duals(outputs)), Any[given; mine]))
end

own_tensor(x::Tensor) = x
own_tensor(x) = as_row(is_dual(x) ? as_tensor(x, float_of(eltype(x))) : Constant(x), is_row(x))
