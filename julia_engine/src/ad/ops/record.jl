# The op record: everything the engine knows about one operation, in one place.
#
# An op is called with tensors, arrays and numbers. Called eagerly it computes at once; called while a function is
# traced it returns a symbolic tensor, which the planner and the tape turn into instructions later. Both use the same
# record, and so do the gradient tests and the op reference in the documentation.

Base.length(p::Program) = length(p.f32) + length(p.f64)

"""Memory that an op's instructions may use and that no run relies on."""
function scratch!(p::Program, @nospecialize(T::DataType), dims::Vector{Int})
    memory = new_memory(T, dims)
    push!(p.roots, memory)
    return memory
end

# Instructions ---------------------------------------------------------------------------------------------------------

const Loop = NTuple{4,Int}
const NONE = (0, 0, 0, 0)
const ONCE = (1, 1, 1, 1)
const NOWHERE = Ptr{Cvoid}(0)
const Addresses = NTuple{4,Ptr{Cvoid}}  # of the result and up to three operands

"""Integers are moved, never computed with, as elements of the same size."""
carrier(@nospecialize(T)) = T === Int64 ? Float64 : T

"""Append one instruction."""
function emit!(p::Program, @nospecialize(T::DataType), name::Symbol, at::Addresses, index::Ptr{Cvoid}, n::Loop,
        strides::NTuple{4,Loop}, i::Loop=NONE, f::Tuple{Float64,Float64}=(0.0, 0.0))
    single = carrier(T) === Float32
    code = kernel(name, single)
    if single
        push!(p.f32, Instruction{Float32}(code, at[1], at[2], at[3], at[4], index, n, strides..., i, f))
    else
        push!(p.f64, Instruction{Float64}(code, at[1], at[2], at[3], at[4], index, n, strides..., i, f))
    end
    last = single ? length(p.f32) : length(p.f64)
    if !isempty(p.stretches) && p.stretches[end].single == single && p.stretches[end].tile == 0
        p.stretches[end] = Stretch(single, p.stretches[end].first, last)
    else
        push!(p.stretches, Stretch(single, last, last))
    end
    return nothing
end

loop(v::Vector{Int}, default::Int) = ntuple(d -> d <= length(v) ? v[d] : default, Val(4))

"""Strides of `m` seen in the dimensions `dims`: 0 along axes on which its elements repeat."""
spread_strides(m::Memory, dims::Vector{Int}) =
    Int[d > length(m.dims) || (m.dims[d] == 1 && dims[d] != 1) ? 0 : m.strides[d] for d in eachindex(dims)]

"""Drop axes of length one, and join neighbours that all operands walk through in one stride."""
function coalesced(dims::Vector{Int}, strides::Vector{Vector{Int}})
    n = Int[]
    s = [Int[] for _ in strides]
    for d in eachindex(dims)
        dims[d] == 1 && continue
        if !isempty(n) && all(k -> strides[k][d] == s[k][end] * n[end], eachindex(strides))
            n[end] *= dims[d]
        else
            push!(n, dims[d])
            for k in eachindex(strides)
                push!(s[k], strides[k][d])
            end
        end
    end
    return n, s
end

"""
Append one op that walks through `dims` with an operand's strides each (the result's first): one instruction, or
several where the operands' layouts need more than four loops.
"""
function emit_loops!(p::Program, @nospecialize(T::DataType), name::Symbol, dims::Vector{Int}, operands::Vector{Memory},
        strides::Vector{Vector{Int}}, i::Loop=NONE, f::Tuple{Float64,Float64}=(0.0, 0.0))
    any(==(0), dims) && return nothing
    n, s = coalesced(dims, strides)
    at = Ptr{Cvoid}[m.address for m in operands]
    name === :copy && (name = copy_kernel(T, n, s))
    if length(n) <= 4
        emit!(p, T, name, addresses(at), NOWHERE, loop(n, 1), loops(s), i, f)
        return nothing
    end
    inner = Vector{Int}[v[1:4] for v in s]
    for place in CartesianIndices(Tuple(n[5:end]))
        moved_at = Ptr{Cvoid}[at[k] + sizeof(operands[k].eltype) * sum((place[d] - 1) * s[k][4+d] for d in 1:length(place))
                              for k in eachindex(at)]
        emit!(p, T, name, addresses(moved_at), NOWHERE, loop(n[1:4], 1), loops(inner), i, f)
    end
    return nothing
end

addresses(at::Vector{Ptr{Cvoid}}) = ntuple(k -> k <= length(at) ? at[k] : NOWHERE, Val(4))
loops(s::Vector{Vector{Int}}) = ntuple(k -> k <= length(s) ? loop(s[k], 0) : NONE, Val(4))

"""Append an elementwise op, with broadcasting."""
function emit_elementwise!(p::Program, name::Symbol, out::Memory, inputs::Vector{Memory}, i::Loop=NONE,
        f::Tuple{Float64,Float64}=(0.0, 0.0))
    T = isempty(inputs) ? out.eltype : inputs[1].eltype
    operands, strides = Memory[out], Vector{Int}[out.strides]
    for m in inputs
        push!(operands, m)
        push!(strides, spread_strides(m, out.dims))
    end
    return emit_loops!(p, T, name, out.dims, operands, strides, i, f)
end

"""Copies of matrices that lie by rows into such that lie by columns have a kernel of their own, from one vector's length on."""
function copy_kernel(@nospecialize(T::DataType), n::Vector{Int}, s::Vector{Vector{Int}})
    bytes = Kernels.VECTOR_BYTES[]
    turns = length(n) >= 2 && bytes > 0 && s[1][1] == 1 && s[2][1] > 1 && s[2][2] == 1 && s[1][2] > 1
    return turns && min(n[1], n[2]) >= bytes ÷ sizeof(T) ? Symbol(:turn_, bytes) : :copy
end

emit_copy!(p::Program, out::Memory, x::Memory) = emit_elementwise!(p, :copy, out, Memory[x])
emit_fill!(p::Program, out::Memory, v::Real) = emit_elementwise!(p, :fill, out, Memory[], NONE, (Float64(v), 0.0))

function copy_memory!(out::Memory, x::Memory)
    program = Program()
    emit_copy!(program, out, x)
    GC.@preserve out x execute!(program)
    return nothing
end

"""`m` itself where it has no gaps, else scratch memory that a copy is made into first."""
function dense!(p::Program, m::Memory)
    is_dense(m) && return m
    copied = scratch!(p, m.eltype, m.dims)
    emit_copy!(p, copied, m)
    return copied
end

"""
The address of what messages say of an op that checks integers at every run: op, layer, the integers' size. It is an
instruction's last number.
"""
function place!(p::Program, op::String, dims::Vector{Int})
    place = Kernels.Place(op, state().scope, dims)
    push!(p.roots, Memory(place, pointer_from_objref(place), UInt8, Int[0], Int[1]))
    return Int(pointer_from_objref(place))
end

same_place(a::Memory, b::Memory) = a.address == b.address && a.strides == b.strides && a.dims == b.dims

# The record -----------------------------------------------------------------------------------------------------------

"""
    Op

One operation. An op is callable with tensors, arrays and numbers.

- `name`: the name in the table, in messages and in `source(tape)`; the numpy engine's name for the same op.
- `infer(inputs, attrs)`: the result's dimensions and element type without running it, or an error.
- `forward!(program, out, inputs, attrs)`: appends the instructions that compute the op from the memories `inputs` into
  `out`. They write every element of `out` and nothing else but scratch.
- `view(memory, attrs)`: the result as a view of its input's memory, or `nothing` where the layout has none.
- `backward!`: one rule per input, `rule(g, y, inputs, attrs)`, written in ops, [`no_gradient`](@ref) for an input that
  counts as a constant; or one function `rule(i, g, y, inputs, attrs)` for ops with any number of inputs; or a
  [`Joint`](@ref), where the gradients of all inputs come from one computation. `nothing`, or `nothing` for an input: the
  rule is missing, and a gradient that needs it raises.
- `jvp(tangents, y, inputs, attrs)`: written in ops, with `nothing` for an input that does not move.
- `constant`: whether the result counts as a constant on purpose (a comparison, a random mask, the sign): a gradient ends
  there, and the op has no rules.
- `overwrites`: the inputs whose memory `out` may be.
- `elementwise`: whether every result element depends on one element of each input, found by broadcasting.
- `accepts(dims, strides)`: whether the instructions handle that layout of an input; where not, it is copied first.
- `scalar`: the function of single numbers that does what the op does without dimensions, a name in `StraightLine`; or a
  function that gives it for the attributes. Of fewer operands than the op has, it takes the first.
- `random`: each call draws new values, so equal calls must not be merged.
- `couples_batch`: whether the samples of a batch affect each other's results.
- `fuses`: for an op that only a graph's simplification makes: the ops that it stands for.
- `attrs`: names of the attributes, for `source(tape)`.
- `doc`: one line for the op reference.
- `reads`: which operands the rules read, for each number of inputs: derived from the rules, see [`operands_read`](@ref).
"""
struct Op <: Operator
    name::String
    infer::Function
    forward!::Union{Nothing,Function}
    view::Union{Nothing,Function}
    backward!::Union{Nothing,Function,Vector{Any}}
    jvp::Union{Nothing,Function}
    constant::Bool
    overwrites::Vector{Int}
    elementwise::Bool
    accepts::Union{Nothing,Function}
    scalar::Union{Nothing,Symbol,Function}
    random::Bool
    couples_batch::Bool
    fuses::String
    attrs::Vector{Symbol}
    doc::String
    reads::Dict{Int,Matrix{Bool}}
end

function Op(name::String, infer::Function; forward=nothing, view=nothing, backward=nothing, jvp=nothing,
        constant::Bool=false, overwrites::Vector{Int}=Int[], elementwise::Bool=false, accepts=nothing, scalar=nothing, random::Bool=false,
        couples_batch::Bool=false, fuses::String="", attrs::Vector{Symbol}=Symbol[], doc::String="")
    return Op(name, infer, forward, view, backward, jvp, constant, overwrites, elementwise, accepts, scalar, random,
        couples_batch, fuses, attrs, doc, Dict{Int,Matrix{Bool}}())
end

Base.show(io::IO, op::Op) = print(io, "Op(", op.name, ")")

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
function register!(op::Op, @nospecialize(functions...))
    haskey(TABLE, op.name) && throw(ConfigurationError("there is an op \"$(op.name)\" already"))
    check_rules(op)
    TABLE[op.name] = op
    for f in functions
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
    return apply(op, as_tensors(operands), NO_ATTRS)
end

"""Apply an op to tensors: eagerly, or symbolically while a function is traced."""
function apply(op::Op, inputs::Vector{Tensor}, attrs::Vector{Any}=NO_ATTRS)
    now = state()
    dims, T = inferred(op, inputs, attrs, now)
    symbolic = now.trace !== nothing
    level = 0
    for x in inputs
        symbolic |= x.data === nothing
        level = max(level, x.level)
    end
    requires_grad = level > 0 && now.recording && !op.constant && T in FLOATS
    data = symbolic ? nothing : compute(op, Memory[readable(x, op) for x in inputs], dims, T, attrs, now.reuse)
    if symbolic || requires_grad || now.made !== nothing
        result = Tensor(data, T, dims, op, inputs, attrs, requires_grad, nothing, "", now.scope, false)
        requires_grad && (result.level = level)
        now.trace === nothing || push!(now.trace, result)
        now.made === nothing || push!(now.made, result)
        requires_grad && !symbolic && (result.stamps = stamps_of(result))
        return result
    end
    return Tensor(data, T, dims, nothing, NO_INPUTS, NO_ATTRS, false, nothing, "", now.scope, false)
end

function readable(x::Tensor, op::Op)
    m = x.data::Memory
    is_there(m) || throw(InPlaceError("$(op.name): an operand, " * (isempty(x.name) ? "" : "\"$(x.name)\", ") *
        "an array of $(x.eltype) of size $(size(x)), $RESIZED"))
    return m
end

# Arrays are used by reference, and a gradient may need what they held when the op was computed.

"""Whether the caller gave its memory, or what it is a view of, and so may write there; what ops compute, nobody can."""
function is_given(x::Tensor)
    while x.op !== nothing && (x.op::Op).view !== nothing
        x = x.inputs[1]
    end
    return x.op === nothing && !x.literal
end

"""A checksum of all its elements: it changes when one of them does, or their order."""
stamp(x::Tensor) = checksum(x.data::Memory)

function checksum(m::Memory)
    is_dense(m) && return mixed_bytes(Ptr{UInt8}(m.address), length(m) * sizeof(m.eltype))
    # With gaps, or in another order: row by row along the first axis; elements that repeat count once.
    n, s = coalesced(m.dims, Vector{Int}[m.strides])
    once = Int[step == 0 ? 1 : count for (count, step) in zip(n, s[1])]
    p = m.eltype === Float32 ? Ptr{UInt32}(m.address) : Ptr{UInt64}(m.address)
    return mixed_rows(p, once[1], s[1][1], Tuple(once[2:end]), Tuple(s[1][2:end]))::UInt64
end

"""
Which of `n` inputs the rules of input `k` read in either mode, as `reads[i, k]`; row `n + 1` is for the result. Found by
tracing the rules, once for an op: what a rule reads may not depend on sizes or attributes. A rule that needs values reads all.
"""
function operands_read(node::Tensor)
    op = node.op::Op
    return get!(() -> traced_reads(node), op.reads, length(node.inputs))
end

function traced_reads(node::Tensor)
    op, n = node.op::Op, length(node.inputs)
    values = Tensor[symbol(x.eltype, x.dims) for x in Tensor[node.inputs; node]]
    g, y, inputs = symbol(node.eltype, node.dims), values[end], values[1:n]
    reads = zeros(Bool, n + 1, n)
    for (k, x) in enumerate(node.inputs)
        x.eltype in FLOATS || continue
        try
            r = rule(op, k)
            moves = Any[i == k ? symbol(a.eltype, a.dims) : nothing for (i, a) in enumerate(inputs)]
            parts, _ = tracing_apart() do
                pulled = r === nothing ? nothing : r(g, y, inputs, node.attrs)
                moves_ = op.jvp === nothing || counts_as_constant(op, k) ? nothing : op.jvp(moves, y, inputs, node.attrs)
                Any[pulled, moves_]
            end
            seen = Set{Tensor}(topological_sort(Tensor[part for part in parts if part !== nothing]))
            reads[:, k] = Bool[v in seen for v in values]
        catch error
            error isa EngineError || rethrow()
            reads[:, k] .= true
        end
    end
    return reads
end

"""Whether a gradient through this node reads its input `i`."""
function is_read(node::Tensor, reads::Matrix{Bool}, i::Int)
    for k in eachindex(node.inputs)
        reads[i, k] && node.inputs[k].requires_grad && return true
    end
    return false
end

"""What a gradient through this node reads of memory that a caller gave: inputs, and what the function captures that it repeats."""
function given_and_read(node::Tensor)
    (node.op::Op).backward! isa Joint &&
        return filter(is_given, Tensor[node.inputs; captured_by(node.attrs)])
    any(is_given, node.inputs) || return NO_INPUTS
    reads, found = operands_read(node), NO_INPUTS
    for (i, x) in enumerate(node.inputs)
        is_given(x) && is_read(node, reads, i) && !(any(y -> y === x, found)) || continue
        found === NO_INPUTS && (found = Tensor[])
        push!(found, x)
    end
    return found
end

function stamps_of(node::Tensor)
    given = given_and_read(node)
    return given === NO_INPUTS ? NO_STAMPS : UInt64[stamp(x) for x in given]
end

"""
Throw an `InPlaceError` if an array that this node's derivative reads was written to since. `now` keeps the checksums of this
gradient: of each array one is enough, as long as no code of the user's runs.
"""
function check_stamps(node::Tensor, now::Dict{Tensor,UInt64})
    isempty(node.stamps) && return nothing
    for (x, was) in zip(given_and_read(node), node.stamps)
        is_there(x.data::Memory) && get!(() -> stamp(x), now, x) == was && continue
        i = findfirst(a -> a === x, node.inputs)
        what = i === nothing ? "an array that its function captures" :
            isempty(x.name) ? "its input $i" : "its input $i, \"$(x.name)\""
        throw(InPlaceError("the gradient of $(described(node)) needs what was computed with, but $what (size $(size(x))) was " *
            "changed in place since; change arrays after the backward pass, or compute with a copy"))
    end
end

function inferred(op::Op, inputs::Vector{Tensor}, attrs::Vector{Any}, now::State)
    try
        return op.infer(inputs, attrs)::Tuple{Vector{Int},DataType}
    catch error
        error isa Union{ShapeError,DTypeError} || rethrow()
        throw(typeof(error)("$(op.name)$(in_layer(now.scope)): $(error.message)"))
    end
end

"""The values of the op for these memories, in memory of their own unless the op is a view."""
function compute(op::Op, inputs::Vector{Memory}, dims::Vector{Int}, @nospecialize(T::DataType), attrs::Vector{Any},
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

"""Compute the op into `out`."""
function compute!(op::Op, out::Memory, inputs::Vector{Memory}, attrs::Vector{Any})
    program = Program()
    if op.accepts !== nothing
        inputs = Memory[op.accepts(m.dims, m.strides) ? m : dense!(program, m) for m in inputs]
    end
    op.forward!(program, out, inputs, attrs)
    GC.@preserve out inputs program execute!(program)
    return nothing
end

# Operands -------------------------------------------------------------------------------------------------------------

"""
Turn operands into tensors. Numbers are weak: they take the float type of the tensors and arrays beside them; so do
arrays of integers and booleans. Arrays of floats keep theirs.
"""
function as_tensors(@nospecialize(operands))
    T = Float64
    for x in operands
        if (x isa Tensor || x isa AbstractArray) && eltype(x) in FLOATS
            T = eltype(x)
            break
        elseif x isa AbstractArray{<:DualNumber}
            T = float_of(eltype(x))
            break
        end
    end
    return Tensor[as_tensor(x, T) for x in operands]
end

as_tensor(x::Tensor, @nospecialize(T)=Float64) = x
as_tensor(x::Real, @nospecialize(T)=(x isa Float32 ? Float32 : Float64)) = literal(T, x)
as_tensor(x::Elements, @nospecialize(T)=Float64) = x.tensor
as_tensor(x::AbstractArray{<:Union{Float32,Float64}}, @nospecialize(T)=Float64) = Constant(x)
as_tensor(x::AbstractArray{<:Integer}, @nospecialize(T)=Float64) = converted(Array{T}(x), x)
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

"""The one element type of all inputs; arrays keep theirs, so the caller decides which one is meant."""
function common_eltype(inputs::Vector{Tensor})
    T = inputs[1].eltype
    all(x -> x.eltype === T, inputs) && return T
    names = join([string(x.eltype) for x in inputs], " and ")
    throw(DTypeError("operands of $names cannot be mixed; convert one with astype()"))
end

function check_float(@nospecialize(T))
    T in FLOATS || throw(DTypeError("expected Float32 or Float64, got $T; convert with astype()"))
    return T
end

infer_elementwise(inputs::Vector{Tensor}, attrs::Vector{Any}) =
    (broadcast_dims(inputs), check_float(common_eltype(inputs)))

"""
    elementwise(name, partials...; doc, ...)

Make and register an elementwise op whose instruction has the same name, from its partial derivatives: for each input
`partial(y, inputs...)`, which is dy/dinput, written in ops or a number. An op without partial derivatives is constant.
"""
function elementwise(name::String, @nospecialize(partials...); functions=(), doc::String, fuses::String="",
        forward=nothing, inputs::Int=max(1, length(partials)), scalar=nothing)
    code = Symbol(name)
    lower = forward === nothing ? (p, out, inputs, attrs) -> emit_elementwise!(p, code, out, inputs) : forward
    rules = Any[partial_rule(partial) for partial in partials]
    op = Op(name, infer_elementwise; forward=lower, backward=isempty(partials) ? nothing : rules,
        jvp=isempty(partials) ? nothing : (t, y, inputs, attrs) -> partials_jvp(partials, t, y, inputs),
        constant=isempty(partials), overwrites=collect(1:inputs), elementwise=true, fuses=fuses, scalar=scalar, doc=doc)
    return register!(op, functions...)
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

"""The tangents, with zeros for the inputs that do not move."""
moved(t, inputs::Vector{Tensor}) = Tensor[a === nothing ? zeros_like(x) : a for (a, x) in zip(t, inputs)]
zeros_like(x::Tensor) = Constant(fill!(new_array(x.eltype, x.dims), 0))

"""The jvp of an op that is linear in all its inputs together: the op itself, on the tangents."""
linear_jvp(name::String) = (t, y, inputs, attrs) -> apply(TABLE[name], moved(t, inputs), attrs)

"""The jvp of an op that is linear in each input: the sum over the inputs that move."""
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
