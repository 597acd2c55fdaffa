# The op record: everything the engine knows about one operation, in one place.
#
# An op is called with tensors, arrays and numbers. Called eagerly it computes at once; called while a function is
# traced it returns a symbolic tensor, which the planner and the tape turn into instructions later. Both use the same
# record, and so do the gradient tests and the op reference in the documentation.

"""
    Op

One operation. An op is callable with tensors, arrays and numbers.

- `name`: the name in the table, in messages and in `source(tape)`; the numpy engine's name for the same op.
- `infer(inputs, attrs)`: the result's dimensions and element type without running it, or an error.
  Of an op with several results it is a list of them.
- `several`: whether it has several results: then [`apply_several`](@ref) applies it, `forward!` and `jvp` have lists of them
  in place of `out` and `y`, and `view(memories, attrs)` returns as many views, each of the input of its place, which no
  rule reads.
- `narrow(attrs, needed)`: of an op with several results, of which only the first may be needed: the attributes that compute
  no more than these.
- `forward!(code, out, inputs, attrs)`: appends the instructions that compute the op from the memories `inputs` into
  `out`. They write every element of `out` and nothing else but scratch.
- `view(memory, attrs)`: the result as a view of its input's memory, or `nothing` where the layout has none.
- `backward!`: one rule per input, `rule(g, y, inputs, attrs)`, written in ops, [`no_gradient`](@ref) for an input that
  counts as a constant; or one function `rule(i, g, y, inputs, attrs)` for ops with any number of inputs; or a
  [`Joint`](@ref), where the gradients of all inputs come from one computation. `nothing`, or `nothing` for an input: the
  rule is missing, and a gradient that needs it raises.
- `jvp(tangents, y, inputs, attrs)`: written in ops, with `nothing` for an input without a tangent, and as the result
  where no input has one.
- `batch(op, count, mapped, inputs, attrs)`: the op on `count` samples at once, written in ops: each input that is `mapped` has
  a last axis of samples, and so has the result. Most ops share the rule of a family (`trailing`, `by_samples` in
  below); an elementwise op needs none. `nothing`, or a rule that returns it: the op is applied sample by sample.
- `sparsity(inputs, attrs)`: which elements of each input an element of the result may depend on: for each input positions in the
  result and in the input, pair by pair, or `nothing` where it depends on none of it. Views and elementwise
  ops need none; of others that lack it, or for which it gives `nothing`, each element depends on all.
- `constant`: whether the result counts as a constant on purpose (a comparison, a random mask, the sign): a gradient ends
  there, and the op has no rules.
- `overwrites`: the inputs whose memory `out` may be.
- `elementwise`: whether every result element depends on one element of each input, found by broadcasting.
- `accepts(dims, strides)`: whether the instructions handle that layout of an input; where not, it is copied first.
- `simplify(equation, made)`: what equals the result, or an equation in its place that computes less, or `nothing`; `made` has
  the equations before it by their results. See [`simplify`](@ref).
- `scalar`: the function of single numbers that does what the op does without dimensions, by its name (in `StraightLine`); or a
  function that gives it for the attributes. Of fewer operands than the op has, it takes the first.
- `random`: each call draws new values, so equal calls must not be merged.
- `couples_batch`: whether the samples of a batch affect each other's results.
- `functions`: the functions of Julia, or of this module, that it stands in for when they are dotted over tensors.
- `derivatives`: of an elementary function, by each operand: an expression in the operands (`x`, or `a` and `b`) and the value
  `y`, from which the rules of tensors and those of dual numbers are made; empty where the rules are written otherwise.
- `fuses`: for an op that only the pass `fuse` makes: the ops that it stands for.
- `attrs`: names of the attributes, for `source(tape)`.
- `doc`: one line for the op reference.
- `reads`: which operands the rules read, for each number of inputs: derived from the rules, see [`operands_read`](@ref).
"""
mutable struct Op <: Operator
    name::String
    infer::Function
    several::Bool
    narrow::Union{Nothing,Function}
    forward!::Union{Nothing,Function}
    view::Union{Nothing,Function}
    backward!::Union{Nothing,Function,Vector{Any}}
    jvp::Union{Nothing,Function}
    batch::Union{Nothing,Function}
    sparsity::Union{Nothing,Function}
    constant::Bool
    overwrites::Vector{Int}
    elementwise::Bool
    accepts::Union{Nothing,Function}
    simplify::Union{Nothing,Function}
    scalar::Union{Nothing,Symbol,GlobalRef,Function}
    random::Bool
    couples_batch::Bool
    functions::Vector{Any}
    derivatives::Vector{Any}
    fuses::String
    attrs::Vector{Symbol}
    doc::String
    reads::Dict{Int,Matrix{Bool}}
end

# Most records have their own functions: without the marks, this would be compiled for each of them.
@noinline function Op(name::String, @nospecialize(infer::Function); several::Bool=false, @nospecialize(narrow=nothing), @nospecialize(forward=nothing),
        @nospecialize(view=nothing), @nospecialize(backward=nothing), @nospecialize(jvp=nothing), @nospecialize(batch=nothing),
        @nospecialize(sparsity=nothing), constant::Bool=false, overwrites::Vector{Int}=Int[], elementwise::Bool=false,
        @nospecialize(accepts=nothing), @nospecialize(simplify=nothing), @nospecialize(scalar=nothing), random::Bool=false,
        couples_batch::Bool=false, @nospecialize(functions=()), @nospecialize(derivatives=()), fuses::String="",
        attrs::Vector{Symbol}=Symbol[], doc::String="")
    return Op(name, infer, several, narrow, forward, view, backward, jvp, batch, sparsity, constant, overwrites, elementwise, accepts, simplify,
        scalar, random, couples_batch, Any[f for f in functions], Any[d for d in derivatives], fuses, attrs, doc, Dict{Int,Matrix{Bool}}())
end

"""
The rule of an op whose inputs' gradients come together: `rule(cotangents, node, inputs, needs_grad)` returns one for each
input, or `nothing` where it is not needed or there is none. `cotangents` has the gradient by each result, or `nothing`;
`node` is the first result.
"""
struct Joint <: Function
    rule::Function
end

Base.show(io::IO, op::Op) = print(io, "Op(", op.name, ")")

"""Dimensions and element type of a result."""
const Kind = Tuple{Vector{Int},DataType}

"""Every op by name."""
const TABLE = Dict{String,Op}()

"""Every public function on tensors by the name that it has in the numpy engine."""
const FUNCTIONS = Dict{String,Any}()

"""Whether there are rules for its derivatives."""
differentiable(op::Op) = op.backward! !== nothing

"""
The rule of an input that counts as a constant: labels, a condition, the operand that a maximum's place is found in; or
whose derivative another input's rule contains.
"""
no_gradient(g, y, inputs, attrs) = nothing

"""Whether the input's rule is `no_gradient`."""
counts_as_constant(op::Op, i::Int) = (rules = op.backward!; rules isa Vector{Any} && rules[i] === no_gradient)

"""The error for a derivative through an op that lacks the rule for it."""
missing_rule(node::Tensor, what::String) = NotDifferentiableError("a derivative is taken through $(described(node)), but " *
    (isempty(node.op.fuses) ? "it has no $what; give its record one, or constant=true if no derivative is to pass it" :
     "it is fused and has no rules; differentiate the ops that it stands for: $(node.op.fuses)"))

"""A node's op, and the layer that it belongs to, for messages."""
described(node::Tensor) = "\"$(node.op.name)\"$(in_layer(node.scope))"
in_layer(scope::String) = isempty(scope) ? "" : " in layer \"$scope\""

"""The rule of one input, as `rule(g, y, inputs, attrs)`, or `nothing` where it is missing."""
function rule(op::Op, i::Int)
    rules = op.backward!
    rules === nothing && return nothing
    rules isa Vector{Any} && return rules[i]
    return (g, y, inputs, attrs) -> rules(i, g, y, inputs, attrs)
end

"""
Enter an op into the table, and as the stand-in for Julia's functions when they are dotted over tensors. Throws a
`ConfigurationError` where there is one of that name; where a rule is missing, and the record does not say that the op, or
the input, counts as a constant (fused ops lack rules: the ops that they stand for have them); where a constant has rules.
"""
function register!(op::Op)
    haskey(TABLE, op.name) && throw(ConfigurationError("there is an op \"$(op.name)\" already"))
    check_rules(op)
    TABLE[op.name] = op
    for f in op.functions
        DOTTED[f] = op
    end
    return op
end

function check_rules(op::Op)
    rules = op.backward!
    if op.constant || !isempty(op.fuses)
        rules === nothing && op.jvp === nothing || throw(ConfigurationError("the op \"$(op.name)\" is " *
            (op.constant ? "constant" : "fused") * ", so it must have neither backward nor jvp rules"))
        return nothing
    end
    (rules === nothing || (rules isa Vector{Any} && any(isnothing, rules))) && throw(ConfigurationError(
        "the op \"$(op.name)\" lacks a backward rule; give one for each input (no_gradient for an input that counts as a " *
        "constant), or constant=true if the whole result does"))
    op.jvp === nothing &&
        throw(ConfigurationError("the op \"$(op.name)\" lacks a jvp rule; give one, or constant=true"))
    return nothing
end

function (op::Op)(@nospecialize(operands...))
    n = length(op.overwrites)  # of an elementwise op, all operands
    op.elementwise && n > 0 && length(operands) != n &&
        throw(ShapeError("$(op.name): expected $n operand$(n == 1 ? "" : "s"), got $(length(operands))"))
    any(x -> x isa Elements, operands) && return of_elements(op, operands)
    return apply(op, as_tensors(operands), NO_ATTRS)
end

"""Apply an op to tensors: eagerly, or symbolically while a function is traced."""
function apply(op::Op, inputs::Vector{Tensor}, attrs::Attributes=NO_ATTRS)
    now = state()
    dims, T = inferred(op, inputs, attrs, now)::Tuple{Vector{Int},DataType}
    symbolic = now.symbolic
    level = 0
    for x in inputs
        symbolic |= x.data === nothing
        level = max(level, x.level)
    end
    requires_grad = level > 0 && now.grad_enabled && !op.constant && is_float(T)
    data = symbolic ? nothing : compute(op, all_readable(inputs, op), dims, T, attrs, now.reuse)
    if symbolic || requires_grad || now.trace !== nothing
        result = Tensor(data, T, dims, op, inputs, attrs, requires_grad, nothing, "", now.scope, false)
        requires_grad && (result.level = level)
        now.trace === nothing || push!(now.trace, result)
        note_given(now, inputs)
        requires_grad && !symbolic && (result.stamps = stamps_of(result))
        return result
    end
    frozen = (level > 0 && now.grad_enabled) || any_frozen(inputs, attrs)
    return Tensor(data, T, dims, nothing, NO_INPUTS, frozen ? FROZEN : NO_ATTRS, false, nothing, "", now.scope, false)
end

"""Apply an op with several results to tensors: eagerly, or symbolically while a function is traced."""
function apply_several(op::Op, inputs::Vector{Tensor}, attrs::Attributes)
    now = state()
    kinds = inferred(op, inputs, attrs, now)::Vector{Kind}
    symbolic = now.symbolic || any(x -> x.data === nothing, inputs)
    if op.view !== nothing && !symbolic && now.trace === nothing
        # No rule reads what is passed through: how that was computed is not kept.
        inputs = Tensor[i <= length(kinds) ? detached(x) : x for (i, x) in enumerate(inputs)]
    end
    level = 0
    for x in inputs
        level = max(level, x.level)
    end
    requires_grad = level > 0 && now.grad_enabled && !op.constant
    data = symbolic ? fill(nothing, length(kinds)) : compute_several(op, all_readable(inputs, op), kinds, attrs)
    kept = symbolic || requires_grad || now.trace !== nothing
    constants = (level > 0 && now.grad_enabled) || any_frozen(inputs, attrs) ? FROZEN : NO_ATTRS
    results = Tensor[
        Tensor(m, T, dims, kept ? op : nothing, kept ? inputs : NO_INPUTS, kept ? attrs : constants, requires_grad && T in FLOATS,
            nothing, "", now.scope, false) for (m, (dims, T)) in zip(data, kinds)]
    kept || return results
    for x in results
        x.results = results
        x.requires_grad && (x.level = level)
    end
    now.trace === nothing || push!(now.trace, results[1])
    note_given(now, inputs)
    requires_grad && !symbolic && (results[1].stamps = stamps_of(results[1]))
    return results
end

"""All results of an op on tensors, be it one or several."""
apply_all(op::Op, inputs::Vector{Tensor}, attrs::Attributes) =
    op.several ? apply_several(op, inputs, attrs) : Tensor[apply(op, inputs, attrs)]

"""Dimensions and element types of all results."""
kinds_of(op::Op, inputs::Vector{Tensor}, attrs::Attributes) =
    op.several ? op.infer(inputs, attrs)::Vector{Kind} : Kind[as_kind(op.infer(inputs, attrs))]

# A conversion is found by types that are known only when it runs: what has one is compiled anew beside packages that add some.
as_kind(kind) = kind isa Kind ? kind : Base.invokelatest(convert, Kind, kind)::Kind

# A loop: a comprehension would make its closure anew in each op.
function all_readable(inputs::Vector{Tensor}, op::Op)
    memories = Vector{Memory}(undef, length(inputs))
    for i in eachindex(inputs)
        memories[i] = readable(inputs[i], op)
    end
    return memories
end

function readable(x::Tensor, op::Op)
    m = x.data::Memory
    is_there(m) || throw(InPlaceError("$(op.name): an operand, " * (isempty(x.name) ? "" : "\"$(x.name)\", ") *
        "an array of $(x.eltype) of size $(size(x)), $RESIZED"))
    return m
end

function inferred(op::Op, inputs::Vector{Tensor}, attrs::Attributes, now::State)
    try
        return op.infer(inputs, attrs)
    catch error
        error isa Union{ShapeError,DTypeError} || rethrow()
        throw(typeof(error)("$(op.name)$(in_layer(now.scope)): $(error.message)"))
    end
end

"""The values of the op for these memories, in new memory unless the op is a view."""
function compute(op::Op, inputs::Vector{Memory}, dims::Vector{Int}, @nospecialize(T::DataType), attrs::Attributes,
        reuse::Union{Nothing,Reuse}=nothing)
    if op.view !== nothing
        seen = op.view(inputs[1], attrs)
        seen === nothing || return seen
        copied = new_memory(inputs[1].eltype, inputs[1].dims)
        copy_memory!(copied, inputs[1])
        return op.view(copied, attrs)::Memory
    end
    out = new_memory(T, dims, reuse)
    compute!(op, out, inputs, attrs)
    return out
end

"""The values of an op with several results, in new memory unless the op is a view."""
function compute_several(op::Op, inputs::Vector{Memory}, kinds::Vector{Kind}, attrs::Attributes)
    op.view === nothing || return op.view(inputs, attrs)::Vector{Memory}
    outs = Memory[new_memory(T, dims) for (dims, T) in kinds]
    compute!(op, outs, inputs, attrs)
    return outs
end

"""
Compute the op into `out`, which is a list where it has several results. The task's list of instructions is used again; it is
taken out of the state meanwhile, since an op may compute others.
"""
function compute!(op::Op, out::Union{Memory,Vector{Memory}}, inputs::Vector{Memory}, attrs::Attributes)
    now = state()
    spare, now.code = now.code, nothing
    code = spare === nothing ? Instructions() : spare
    if op.accepts !== nothing
        inputs = Memory[op.accepts(m.dims, m.strides) ? m : dense!(code, m) for m in inputs]
    end
    op.forward!(code, out, inputs, attrs)
    GC.@preserve out inputs code execute!(code)
    now.code = empty!(code)
    return nothing
end

# Operands -------------------------------------------------------------------------------------------------------------

"""
Turn operands into tensors. Numbers are weak: they take the float type of the tensors and arrays beside them; so do
arrays of integers and booleans. Arrays of floats keep theirs.
"""
function as_tensors(@nospecialize(operands))
    found = Vector{Tensor}(undef, length(operands)::Int)
    T = nothing  # found where one is no tensor yet
    for i in eachindex(found)
        x = operands isa Tuple ? operands[i] : operands[i]  # that of a tuple is found when this is compiled
        if x isa Tensor
            found[i] = x
        else
            T === nothing && (T = float_type(operands))
            found[i] = as_tensor(x, T)
        end
    end
    return found
end

"""The float type that numbers take beside these operands."""
function float_type(@nospecialize(operands))
    for x in operands
        (x isa Tensor || x isa AbstractArray) && eltype(x) in FLOATS && return eltype(x)
        x isa AbstractArray{<:DualNumber} && return float_of(eltype(x))
    end
    return Float64
end

as_tensor(x::Tensor, @nospecialize(T)=Float64) = x
as_tensor(x::Real, @nospecialize(T)=(x isa Float32 ? Float32 : Float64)) = literal(T, x)
as_tensor(x::Elements, @nospecialize(T)=Float64) = x.tensor
as_tensor(x::AbstractArray{<:Union{Float32,Float64}}, @nospecialize(T)=Float64) = Constant(x)
as_tensor(x::AbstractArray{<:Integer}, @nospecialize(T)=Float64) = (check_indices(x); converted(Array{T}(x), x))
as_tensor(@nospecialize(x), @nospecialize(T)=Float64) = throw(DTypeError(
    "expected a tensor, an array of Float32 or Float64, or a real number, got $(typeof(x))" *
    (eltype(x) <: Complex ? "; compute with real and imaginary parts separately" : "")))

"""An operand that counts or points: a tensor or an array of integers."""
index_tensor(x::Tensor) = x.eltype === Int64 ? x :
    throw(DTypeError("expected integers, got a tensor of $(x.eltype)"))
index_tensor(x::AbstractArray{<:Integer}) = Constant(x)
index_tensor(x::AbstractArray{Bool}) = throw(DTypeError("expected integers, got booleans"))
index_tensor(x::Integer) = Constant(fill(Int64(x)))
index_tensor(@nospecialize(x)) = throw(DTypeError("expected integers, got $(typeof(x))"))

# Elementwise ops ------------------------------------------------------------------------------------------------------

"""The dimensions that broadcasting gives; an axis that one operand lacks counts as one of length one."""
function broadcast_dims(inputs::Vector{Tensor})
    first = inputs[1].dims
    all(x -> x.dims == first, inputs) && return first
    dims = ones(Int, maximum(length(x.dims) for x in inputs))
    for x in inputs, d in eachindex(x.dims)
        n = x.dims[d]
        if dims[d] == 1
            dims[d] = n
        elseif n != 1 && n != dims[d]
            sizes = join([string(size(x)) for x in inputs], " and ")
            throw(ShapeError("sizes $sizes cannot be broadcast together"))
        end
    end
    return dims
end

"""`x`, which has to broadcast to `dims` without making anything larger; else a `ShapeError` that calls it `what`."""
function broadcasting_to(what::String, x::Tensor, dims::Vector{Int})
    fits = length(x.dims) <= length(dims) && all(d -> x.dims[d] == 1 || x.dims[d] == dims[d], eachindex(x.dims))
    fits || throw(ShapeError("$what must broadcast to size $(Tuple(dims)), got size $(size(x))"))
    return x
end

"""The one element type of all inputs; arrays keep theirs, so the caller decides which one is meant."""
function common_eltype(inputs::Vector{Tensor})
    T = inputs[1].eltype
    same = true
    for x in inputs
        same &= x.eltype === T
    end
    same && return T
    names = join([string(x.eltype) for x in inputs], " and ")
    throw(DTypeError("operands of $names cannot be mixed; convert one with astype()"))
end

function check_float(@nospecialize(T))
    T in FLOATS || throw(DTypeError("expected Float32 or Float64, got $T; convert with astype()"))
    return T
end

infer_elementwise(inputs::Vector{Tensor}, attrs::Attributes) =
    (broadcast_dims(inputs), check_float(common_eltype(inputs)))

"""
    elementwise(name, partials...; doc, ...)

Make and register an elementwise op whose instruction has the same name, from its partial derivatives: for each input a
number, an expression (see `derivatives` of [`Op`](@ref)), or `partial(y, inputs...)`, which is dy/dinput, written in ops. An op
without partial derivatives is constant. `value` is the function of single numbers where the kernels have none of that name.

    elementwise("cube", :(3 * x^2); value=x -> x * x * x, functions=(cube,), doc="x³")
"""
@noinline function elementwise(name::String, @nospecialize(partials...); @nospecialize(functions=()), doc::String, fuses::String="",
        @nospecialize(forward=nothing), inputs::Int=max(1, length(partials)), @nospecialize(simplify=nothing), @nospecialize(value=nothing),
        @nospecialize(scalar=value === nothing ? get(Kernels.SCALARS, Symbol(name), nothing) :
            Kernels.new_kernel!(Symbol(name), value, inputs)))
    code = Symbol(name)
    lower = forward === nothing ? (p, out, inputs, attrs) -> emit_elementwise!(p, code, out, inputs) : forward
    slopes = Any[partial_function(partial, length(partials)) for partial in partials]
    expressions = any(partial -> partial isa Function, partials) ? () : partials
    return register!(Op(name, infer_elementwise; forward=lower, backward=isempty(partials) ? nothing : Any[partial_rule(f) for f in slopes],
        jvp=isempty(partials) ? nothing : (t, y, inputs, attrs) -> partials_jvp(slopes, t, y, inputs),
        constant=isempty(partials), overwrites=collect(1:inputs), elementwise=true, fuses=fuses, simplify=simplify,
        scalar=scalar, functions=functions, derivatives=expressions, doc=doc))
end

"""A partial derivative as a function of the value and the operands, on tensors."""
partial_function(f::Function, n::Int) = f
partial_function(number::Real, n::Int) = (y, inputs...) -> number
partial_function(e::Union{Symbol,Expr}, n::Int) =
    Core.eval(@__MODULE__, :((y, $((n == 1 ? (:x,) : (:a, :b))...)) -> $(on_tensors(e))))

"""An expression in numbers as one in tensors, op by op."""
on_tensors(e) = e
function on_tensors(e::Expr)
    f, operands = e.args[1], map(on_tensors, e.args[2:end])
    return f === :^ ? :(elementwise_power($(operands...))) : :(DOTTED[$f]($(operands...)))
end

partial_rule(@nospecialize(partial)) = (g, y, inputs, attrs) -> scaled(g, partial(y, inputs...))

function partials_jvp(@nospecialize(partials), t, y::Tensor, inputs::Vector{Tensor})
    total = nothing
    for (moved, partial) in zip(t, partials)
        moved === nothing && continue
        term = scaled(moved, partial(y, inputs...))
        total = total === nothing ? term : ADD(total, term)
    end
    return total::Tensor
end

"""A derivative that is `factor` where `holds` is not 0; elsewhere it is 0, which nothing passes, be it infinite."""
struct Where
    holds::Tensor
    factor::Any
end
scaled(g::Tensor, derivative::Where) = where_holds(derivative.holds, scaled(g, derivative.factor))
where_holds(holds::Tensor, x::Tensor) = apply(WHERE, Tensor[holds, x, literal(x.eltype, 0)])

"""`g` times a derivative that may be the number one or minus one."""
scaled(g::Tensor, derivative::Tensor) = MUL(g, derivative)
scaled(g::Tensor, derivative::Real) = derivative == 1 ? g : derivative == -1 ? NEG(g) : MUL(g, derivative)

"""The tangents, with zeros for the inputs without one."""
moved(t, inputs::Vector{Tensor}) = Tensor[a === nothing ? zeros_like(x) : a for (a, x) in zip(t, inputs)]
zeros_like(x::Tensor) = Constant(fill!(new_array(x.eltype, x.dims), 0))

"""The jvp of an op that is linear in all its inputs together: the op itself, on the tangents."""
linear_jvp(name::String) = (t, y, inputs, attrs) -> apply(TABLE[name], moved(t, inputs), attrs)

"""The jvp of an op that is linear in each input: the sum over the inputs with a tangent."""
function multilinear_jvp(name::String)
    return function (t, y, inputs, attrs)
        total = nothing
        for (i, a) in enumerate(t)
            a === nothing && continue
            term = apply(TABLE[name], Tensor[inputs[1:i-1]; a; inputs[i+1:end]], attrs)
            total = total === nothing ? term : ADD(total, term)
        end
        return total::Tensor
    end
end

# Many samples at once -------------------------------------------------------------------------------------------------
#
# What the batching rules of ops are made of (`batch` of `Op`). An input that is mapped has a last axis of samples.

"""Make room before the last axis, so that the rest broadcasts like an array among others of `n` axes."""
aligned_samples(x::Tensor, n::Int) = reshape_to(x, Int[x.dims[1:end-1]; ones(Int, n + 1 - ndims(x)); x.dims[end]])

"""An array that all samples share, with a last axis of samples."""
for_each(x::Tensor, count::Int) = spread_to(reshape_to(x, Int[x.dims; 1]), Int[x.dims; count])
all_mapped(count::Int, mapped::Vector{Bool}, inputs::Vector{Tensor}) =
    Tensor[m ? x : for_each(x, count) for (x, m) in zip(inputs, mapped)]

"""Batching of an op that takes any further axes behind its own and broadcasts them: elementwise ops, reductions, products."""
function trailing(op::Op, count::Int, mapped::Vector{Bool}, inputs::Vector{Tensor}, attrs::Attributes)
    n = maximum(ndims(x) - m for (x, m) in zip(inputs, mapped))
    return apply(op, Tensor[m ? aligned_samples(x, n) : x for (x, m) in zip(inputs, mapped)], attrs)
end

"""Batching of an op whose inputs and result have a batch's samples on their last axis: one larger batch."""
function by_samples(op::Op, count::Int, mapped::Vector{Bool}, inputs::Vector{Tensor}, attrs::Attributes)
    whole = Tensor[reshape_to(x, Int[x.dims[1:end-2]; x.dims[end-1] * count]) for x in all_mapped(count, mapped, inputs)]
    return in_batches(apply(op, whole, of_batch(attrs, count)), count)
end
in_batches(y::Tensor, count::Int) = reshape_to(y, Int[y.dims[1:end-1]; count == 0 ? 0 : y.dims[end] ÷ count; count])

"""The attributes of an op for a larger batch: its result's dimensions are among them where the inputs do not tell."""
of_batch(attrs::Attributes, count::Int) =
    has_attribute(attrs, :dims) ? changed(attrs, :dims => Int[attrs.dims[1:end-1]; attrs.dims[end] * count]) : attrs

# Which elements depend on which -------------------------------------------------------------------------------------
#
# What the ops' `sparsity` is made of; see sparse.jl.

"""The positions, from `first` on, of elements that are so far apart along axes of these lengths, the first axis fastest."""
function strided(dims::Vector{Int}, strides::Vector{Int}, first::Int=1)
    count_ = prod(big.(dims))
    count_ > MOST_DEPENDENCES && throw(TooManyDependences(count_))
    found = Int[first]
    for (n, step) in zip(dims, strides)
        found = Int[p + k * step for p in found, k in 0:n-1][:]
    end
    return found
end

"""What `strided` throws before its list would fill the memory; [`sparsity`](@ref) says of which op."""
struct TooManyDependences <: Exception
    count::BigInt
end

"""The `sparsity` of an op of one input whose elements each depend on the one in their place."""
one_to_one(inputs, attrs) = Any[(1:length(inputs[1]), 1:length(inputs[1]))]

"""That of an op whose elements each depend on all that differ from them along its `axes`, or its `axis`, alone."""
along_axes(inputs, attrs) =
    within_axes(inputs, has_attribute(attrs, :axes) ? attrs.axes : Int[attrs.axis], inputs[1].dims)

"""The same where the result has these axes with length one, or not at all."""
over_axes(inputs, attrs) =
    within_axes(inputs, attrs.axes, Int[d in attrs.axes ? 1 : n for (d, n) in enumerate(inputs[1].dims)])

function within_axes(inputs, axes::Vector{Int}, dims::Vector{Int})
    others = setdiff(eachindex(dims), axes)
    none, here = zeros(Int, length(axes)), dense_strides(dims)
    function pairs(x::Tensor)
        there, whole = dense_strides(x.dims), Int[dims[others]; dims[axes]; x.dims[axes]]
        return strided(whole, Int[here[others]; here[axes]; none]), strided(whole, Int[there[others]; none; there[axes]])
    end
    return Any[pairs(x) for x in inputs]
end

"""That of an elementwise op."""
each_with_each(inputs, dims::Vector{Int}) = Any[
    (1:prod(dims), strided(dims, Int[d <= ndims(x) && x.dims[d] == n ? dense_strides(x.dims)[d] : 0 for (d, n) in enumerate(dims)]))
    for x in inputs]
