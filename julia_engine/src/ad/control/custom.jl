# Functions with custom derivatives.

"""A function and its derivatives, as [`custom_rule`](@ref) makes them."""
struct CustomRule
    f::Any
    vjp::Any
    jvp::Any
    infer::Any
    name::String
    opaque::Bool
end

# An opaque function is called at every replay, and so reads what it captures then.
watched_parts(rule::CustomRule) = rule.opaque ? () : (rule.f, rule.vjp, rule.jvp)

# The first input is the result, the rest what the function was called with.
function custom_pullback(cotangents::Vector{Union{Nothing,Tensor}}, node::Tensor, all_inputs::Vector{Tensor}, needs_grad::Vector{Bool})
    rule, g = node.attrs.rule::CustomRule, cotangents[1]::Tensor
    rule.vjp === nothing && throw(NotDifferentiableError("custom rule \"$(rule.name)\": reverse mode was asked for, and it " *
        "has no vjp; give custom_rule(f; vjp=(g, y, inputs...) -> one gradient for each input)"))
    given = with_rows(all_inputs, node.attrs.rows)
    y, inputs, g = given[1], given[2:end], with_row(g, given[1].row)
    # The node is the function's value, and derivatives of the rule see that it depends on the inputs.
    found = rule.opaque ? opaque_pullback(rule, g, y, inputs) :
        as_list(rule.vjp(g, with_row(node, y.row), inputs...), length(inputs))
    length(found) == length(inputs) || throw(ShapeError("custom rule \"$(rule.name)\": its vjp must return one gradient " *
        "(or nothing) for each of $(length(inputs)) inputs, got $(length(found))"))
    return Any[nothing; Any[own_part(rule, "gradient of input $i", part, x) for (i, (part, x)) in
        enumerate(zip(found, inputs))]]
end

"""These inputs of a rule: transposes of vectors where they were when it was called. A program computed again does not say."""
with_rows(inputs::Vector{Tensor}, rows::Vector{Bool}) = Tensor[with_row(x, row) for (x, row) in zip(inputs, rows)]
with_row(x::Tensor, row::Bool) = x.row == row ? x : as_row(IDENTITY(x), row)

as_list(found::Union{Tuple,Vector{Any},Vector{Tensor}}, n::Int) = Any[found...]
as_list(found::Vector{<:AbstractArray}, n::Int) = Any[found...]
as_list(@nospecialize(found), n::Int) = Any[found]

function checked_part(rule::CustomRule, what::String, @nospecialize(part), x::Tensor)
    part === nothing && return nothing
    part isa Union{Tensor,Real,AbstractArray{<:Real}} || throw(DTypeError(
        "custom rule \"$(rule.name)\": the $what must be a tensor or an array, got $(typeof(part))"))
    found = as_tensor(part, x.eltype)
    found.dims == x.dims || throw(ShapeError(
        "custom rule \"$(rule.name)\": the $what must have size $(size(x)), got $(size(found))"))
    found.eltype === x.eltype || throw(ShapeError(
        "custom rule \"$(rule.name)\": the $what must be of $(x.eltype), got $(found.eltype)"))
    return found
end

"""
The part, in memory that no array of the user's shares: the rule may return one that it captures, and whoever asks for the
gradient may write to it. What opaque rules return is a copy.
"""
function own_part(rule::CustomRule, what::String, @nospecialize(part), x::Tensor)
    found = checked_part(rule, what, part, x)
    found === nothing && return nothing
    # A derivative is an array like any other op's, whatever the rule made it of.
    return rule.opaque || !is_given(found) ? with_row(found, false) : COPY(found)
end

function custom_jvp(t, y, inputs, attrs)
    rule = attrs.rule::CustomRule
    own = with_rows(inputs, attrs.rows)
    made, given = own[1], own[2:end]
    rule.jvp === nothing && throw(NotDifferentiableError("custom rule \"$(rule.name)\": forward mode was asked for, and it " *
        "has no jvp; give custom_rule(f; jvp=(tangents, y, inputs...) -> the result's tangent)"))
    tangents = Tuple(with_rows(moved(t[2:end], given), attrs.rows[2:end]))
    found = rule.opaque ? opaque(rule, "jvp",
        listed((values...) -> rule.jvp(values[1:length(given)], values[length(given)+1:end]...)),
        Tensor[tangents..., made, given...], Kind[(made.dims, y.eltype)])[1] : rule.jvp(tangents, with_row(y, made.row), given...)
    return own_part(rule, "tangent", found, y)
end

# Of its derivatives only the rules know which there are: they may be of elements that the values do not depend on.
const CUSTOM = Op("custom", infer_same; view=itself, backward=Joint(custom_pullback), jvp=custom_jvp,
    sparsity=(inputs, attrs) -> nothing,
    simplify=(e, made) -> its_input(e, made), attrs=[:rule, :rows], doc="a result with custom derivatives")

"""
Whether derivatives of these nodes, or of a program, come from rules of the user's that hold dual numbers; or tensors,
which may have been computed from some. The nodes do not depend on what only a rule holds.
"""
rules_hold_duals(nodes::Vector{Tensor}) = any(x -> x.op !== nothing && rules_hold_duals(x.op::Op, x.attrs), nodes)
rules_hold_duals(program::Program) = any(e -> rules_hold_duals(e.op, e.attrs), program.equations)
rules_hold_duals(op::Op, attrs::Attributes) = op.backward! isa Joint &&
    (op === CUSTOM ? rule_holds_duals(attrs.rule::CustomRule) : any(rules_hold_duals, programs_in(attrs)))

function rule_holds_duals(rule::CustomRule)
    rule.opaque && return false
    held = DualNumbers.held_by_value((rule.vjp, rule.jvp))
    return held.level > 0 || (held.tensors && state().mixed)
end

"""
    custom_rule(f; vjp=nothing, jvp=nothing, infer=nothing, name=string(f), opaque=false)

A function that computes the same as `f`, a function of tensors and arrays to one tensor, with these derivatives:

- `vjp(g, y, inputs...)`: one gradient, or `nothing`, for each input, from the upstream gradient `g` and the value `y`;
- `jvp(tangents, y, inputs...)`: the tangent of the result; `tangents` is a tuple like the inputs.

Both are written in ops like any other function, and so can be differentiated again. With `opaque=true`, `f` and its rules
are ordinary functions of arrays, which the engine does not look into: each is one call of the tape. Their results must have
the same size and element type whenever the inputs have: `infer(inputs...)` returns these as `(size, eltype)`, from tensors
without values; where it is `nothing`, compiling calls `f` once, on ones, to find out. They have no second derivatives.

Give whatever is differentiated by as an input: a function that captures a tensor which requires a gradient throws, and what
the rules of an opaque function capture counts as constant.

Throws a `ShapeError` that names the rule, the input, what was expected and what was returned; a `NotDifferentiableError`
when the rule for the mode in use is missing; a `ConfigurationError` for an `infer` without `opaque=true`, which needs none.
"""
function custom_rule(f; vjp=nothing, jvp=nothing, infer=nothing, name::AbstractString=string(f), opaque::Bool=false)
    infer === nothing || opaque || throw(ConfigurationError("custom rule \"$name\": infer is for opaque functions, since " *
        "others are traced; leave it out, or give opaque=true"))
    return CustomRule(f, vjp, jvp, infer, String(name), opaque)
end

function (rule::CustomRule)(args...)
    any(x -> x isa Elements, args) && return of_elements(rule, args)
    inputs = as_rows(args, as_tensors(args))
    plain = is_plain(args)
    y = rule.opaque ? opaque_value(rule, inputs) : value_of(rule, inputs)
    mine = given_arrays(Tensor[y])
    y.data === nothing || (y = as_row(leaf(y.data, y.eltype, y.dims, false, ""), y.row))
    result = as_row(apply(CUSTOM, Tensor[y; inputs], attributes(:rule => rule, :rows => Bool[x.row for x in Tensor[y; inputs]])), y.row)
    return plain ? shown(Tensor[result], true, Any[collect(Any, args); mine])[1] : result
end

"""What the rule's function computes, as a constant."""
function value_of(rule::CustomRule, inputs::Vector{Tensor})
    now = state()
    eager = now.grad_enabled && !now.symbolic && all(x -> x.data !== nothing, inputs)
    eager || return no_grad(() -> as_value(rule, rule.f(inputs...)))
    constants = Tensor[x.requires_grad ? as_row(leaf(x.data, x.eltype, x.dims, false, ""), x.row) : x for x in inputs]
    return without_captured(rule, as_value(rule, rule.f(constants...)))
end

"""A function's result, which may depend on no tensor that requires a gradient but the inputs, here constants."""
function without_captured(rule::CustomRule, y::Tensor)
    y.requires_grad && state().grad_enabled && throw(NotDifferentiableError("custom rule \"$(rule.name)\": the function uses a " *
        "tensor that requires a gradient and is no input of it, so that its rules do not know it; make it an input, or take its " *
        "value() if it is a constant"))
    return y
end

as_value(rule::CustomRule, @nospecialize(y)) = y isa Union{Tensor,Real,AbstractArray{<:Real}} ? as_row(as_tensor(y), is_row(y)) :
    throw(DTypeError("custom rule \"$(rule.name)\" must return a tensor or an array, got $(typeof(y))"))

# Functions of arrays that the engine does not look into ------------------------------------------------------------------

"""One call of a function on arrays: copies of the inputs in, its results, a list of arrays, copied out."""
struct OpaqueCall
    f::Any
    name::String
    copy_in::Instructions
    arrays::Vector{Any}
    rows::Vector{Bool}  # which of them are transposes of vectors
    outs::Vector{Memory}
end

function (c::OpaqueCall)()
    execute!(c.copy_in)
    for (out, result) in zip(c.outs, c.f(map(as_julias, c.arrays, c.rows)...))
        copy_memory!(out, Memory(like_opaque(c.name, result, out.dims, out.eltype)))
    end
    return nothing
end

function like_opaque(name::String, @nospecialize(result), dims::Vector{Int}, @nospecialize(T))
    result isa Union{Real,AbstractArray{<:Real}} ||
        throw(DTypeError("custom rule $name must return an array, got $(typeof(result))"))
    array_ = result isa Real ? fill(T(result)) : result
    collect(Int, size(array_)) == dims && eltype(array_) === T || throw(ShapeError(
        "custom rule $name must return size $(Tuple(dims)) of $T, got size $(size(array_)) of $(eltype(array_))"))
    return kept(array_)
end

function forward_opaque(p::Instructions, outs::Vector{Memory}, inputs::Vector{Memory}, attrs)
    copies = Memory[new_memory(m.eltype, m.dims) for m in inputs]
    copy_in = Instructions()
    for (copied, m) in zip(copies, inputs)
        emit_copy!(copy_in, copied, m)
    end
    return emit_call!(p, OpaqueCall(attrs.f, attrs.name, copy_in, Any[m.root for m in copies], attrs.rows, outs), 0, [inputs; outs])
end

fill_bytes!(called::Called, byte) = poison!(called.run, byte)
poison!(c::OpaqueCall, byte::Integer) = foreach(a -> fill_bytes!(a, byte), c.arrays)

no_second(name) = throw(NotDifferentiableError("custom rule $name: an opaque function of arrays has no second derivative; " *
    "write the rule in ops and leave opaque=false"))

const OPAQUE = Op("opaque", (inputs, attrs) -> attrs.kinds; several=true, forward=forward_opaque, attrs=[:f, :name, :kinds, :rows],
    backward=Joint((cotangents, node, inputs, needs_grad) -> no_second(node.attrs.name)),
    jvp=(t, y, inputs, attrs) -> no_second(attrs.name), doc="a function of arrays, called as it is")

"""The results, of these kinds, of a function from arrays to a list of arrays."""
opaque(rule::CustomRule, which::String, @nospecialize(f), inputs::Vector{Tensor}, kinds::Vector{Kind}) =
    apply_several(OPAQUE, inputs, attributes(:f => f,
        :name => which == "f" ? "\"$(rule.name)\"" : "\"$(rule.name)\": its $which", :kinds => kinds,
        :rows => Bool[x.row for x in inputs]))

"""A function of arrays to one array, as one to a list."""
listed(@nospecialize(f)) = (values...) -> Any[f(values...)]

function opaque_value(rule::CustomRule, inputs::Vector{Tensor})
    if any(x -> x.data === nothing, inputs) || state().symbolic
        rule.infer === nothing || return no_grad(() -> opaque(rule, "f", listed(rule.f), inputs, Kind[inferred_by(rule, inputs)])[1])
        trial = rule.f((as_julias(fill!(new_array(x.eltype, x.dims), 1), x.row) for x in inputs)...)
    else
        trial = rule.f((as_julias(copy(value(x)), x.row) for x in inputs)...)
        y = without_captured(rule, as_value(rule, trial isa AbstractArray ? copy(trial) : trial))  # it may return the same memory again and again
        return rule.infer === nothing ? y : as_row(y, false)  # of which only the size is known where it is traced
    end
    y = without_captured(rule, as_value(rule, trial))
    return as_row(no_grad(() -> opaque(rule, "f", listed(rule.f), inputs, Kind[(y.dims, y.eltype)])[1]), y.row)
end

"""What the rule's `infer` says of its result."""
function inferred_by(rule::CustomRule, inputs::Vector{Tensor})
    found = rule.infer((like(x) for x in inputs)...)
    found isa Tuple{Tuple{Vararg{Integer}},DataType} || throw(ConfigurationError("custom rule \"$(rule.name)\": infer must " *
        "return the result's size and element type, such as (size(x), eltype(x)), got $(repr(found))"))
    return (collect(Int, found[1]), found[2])
end

function opaque_pullback(rule::CustomRule, g::Tensor, y::Tensor, inputs::Vector{Tensor})
    floats = Int[i for (i, x) in enumerate(inputs) if x.eltype in FLOATS]
    function pulled(values...)
        found = as_list(rule.vjp(values...), length(inputs))
        length(found) == length(inputs) || throw(ShapeError("custom rule \"$(rule.name)\": its vjp must return one gradient " *
            "(or nothing) for each of $(length(inputs)) inputs, got $(length(found))"))
        return map(floats) do i
            checked = checked_part(rule, "gradient of input $i", found[i], inputs[i])
            checked === nothing ? zeros(inputs[i].eltype, size(inputs[i])) : value(checked)
        end
    end
    each = opaque(rule, "vjp", pulled, Tensor[g; y; inputs], Kind[(inputs[i].dims, inputs[i].eltype) for i in floats])
    parts = Vector{Any}(nothing, length(inputs))
    parts[floats] = each
    return parts
end

"""
    chain_rule(f; name=string(f))

A function that computes the same as `f`, differentiated by the rules that ChainRulesCore has for it, `rrule` and `frule`: those
that packages for Zygote define. Opaque, as [`custom_rule`](@ref) explains. From Julia 1.9 on, where ChainRulesCore is loaded;
compiled functions of ours have an `rrule` there as well, so that a layer of Flux or Lux may hold one.
"""
chain_rule(f; name::AbstractString=string(f)) = by_chain_rules(f, String(name))

# The extension has a method for names that are Strings.
by_chain_rules(@nospecialize(f), @nospecialize(name)) = throw(ConfigurationError(
    "chain_rule: ChainRulesCore is not loaded; write `using ChainRulesCore` first, in Julia 1.9 or later"))
