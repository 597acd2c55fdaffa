# Programs: a traced function as the list of ops that compute it. Passes take a program and return one.
#
# Nothing in a program changes once it is made. Its variables are symbolic tensors, which are known by their identity; what
# a program reads besides its inputs and its own results are literals, and tensors with data, which are captured by
# reference, so that a later `assign!` to them is seen.

"""
    Equation

An op with its inputs, its attributes, and the variables that are its results. `scope` is the layer that it belongs to, for
messages. Nobody changes it. It is mutable, as ops, attributes and memories are, so that it is passed by reference: Julia copies an
immutable one in each call whose method is found at run time.
"""
mutable struct Equation
    op::Op
    inputs::Vector{Tensor}
    attrs::Attributes
    outputs::Vector{Tensor}
    scope::String
end

"""An op on these inputs, with new variables as its results."""
Equation(op::Op, inputs::Vector{Tensor}, attrs::Attributes, scope::String) =
    Equation(op, inputs, attrs, Tensor[symbol(T, dims) for (dims, T) in kinds_of(op, inputs, attrs)], scope)

"""The only result."""
output(e::Equation) = only(e.outputs)

"""The same op with other inputs."""
reading(e::Equation, inputs::Vector{Tensor}) = Equation(e.op, inputs, e.attrs, e.outputs, e.scope)

"""The same op with `input_for(x)` in place of each input `x`; the equation itself where all stay."""
function reading(input_for::F, e::Equation) where {F}
    all_stay = true
    for x in e.inputs
        all_stay &= input_for(x) === x
    end
    return all_stay ? e : reading(e, Tensor[input_for(x) for x in e.inputs])
end

"""The equations that compute each variable of a program."""
const Made = TensorDict{Equation}

"""The op that computes a variable, or `nothing` for what is no result of the program."""
op_of(x::Tensor, made::Made) = (e = get(made, x, nothing); e === nothing ? nothing : e.op)

"""
    Program

A function of tensors as the equations that compute it, in order.
"""
struct Program
    inputs::Vector{Tensor}
    equations::Vector{Equation}
    outputs::Vector{Tensor}
end

Base.show(io::IO, program::Program) = print(io, "Program of ", length(program.equations), " ops")

function made_by(program::Program)
    made = Made()
    sizehint!(made, length(program.equations))
    for e in program.equations, x in e.outputs
        made[x] = e
    end
    return made
end

"""New symbolic tensors like the inputs of a program."""
symbols(program::Program) = Tensor[symbol(x.eltype, x.dims, x.name) for x in program.inputs]

"""Apply the ops of a program to these inputs; return the outputs, and the nodes between them in order."""
function applied(program::Program, inputs::Vector{Tensor})
    here = TensorDict{Tensor}(zip(program.inputs, inputs))
    now, nodes = state(), Tensor[]
    @entering scope=now.scope begin
        for e in program.equations
            now.scope = e.scope
            found = apply_all(e.op, Tensor[get(here, x, x) for x in e.inputs], e.attrs)
            push!(nodes, found[1])
            for (x, y) in zip(e.outputs, found)
                here[x] = y
            end
        end
    end
    return Tensor[get(here, x, x) for x in program.outputs], nodes
end

# Tracing --------------------------------------------------------------------------------------------------------------

"""Run `f()` with every op symbolic; return its result and the ops in the order they were made."""
function tracing(@nospecialize(f))
    state().symbolic &&
        throw(TraceError("a function cannot be compiled inside another one's trace; call it uncompiled there"))
    nodes, given = Tensor[], Given()
    result = @entering trace=nodes given=given symbolic=true f()
    check_given(given)
    return result, nodes
end

"""Run `f()` with every op symbolic, inside another trace too, and return its result and the ops."""
function nested_trace(@nospecialize(f))
    nodes, given = Tensor[], Given()
    result = @entering trace=nodes given=given symbolic=true grad_enabled=true f()
    check_given(given)
    return result, nodes
end

"""
    trace(f, inputs)

Run `f(inputs...)` on symbolic inputs and return the program of what it did; `f` returns a list of tensors.
"""
function trace(@nospecialize(f), inputs::Vector{Tensor})
    outputs, nodes = tracing(() -> f(inputs...))
    return traced(nodes, inputs, Tensor[as_tensor(x) for x in outputs])
end

"""The program of collected ops, without those that no output needs."""
traced(nodes::Vector{Tensor}, inputs::Vector{Tensor}, outputs::Vector{Tensor}) =
    prune(Program(copy(inputs), equations_of(nodes), outputs))

"""Collected ops as equations."""
equations_of(nodes::Vector{Tensor}) =
    Equation[Equation(x.op::Op, x.inputs, x.attrs, results_of(x), x.scope) for x in nodes]

"""
    close_over(nodes, arguments, outputs)

What was made of `arguments`, as a program, and the tensors from outside that it is a function of as well: its further
inputs. These are tensors that can be differentiated by, those of a trace around it, and random draws, which must not be
drawn anew. Constants stay as they are. Results made under `no_grad` have no derivative, though they are computed anew, and
recorded.
"""
function close_over(nodes::Vector{Tensor}, arguments::Vector{Tensor}, outputs::Vector{Tensor})
    here = TensorDict{Tensor}()
    inputs, outside, equations = Tensor[], Tensor[], Equation[]
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
    for e in needed(equations_of(nodes), outputs)
        all(x -> haskey(here, x), e.outputs) && continue
        if e.op.random
            push!(outside, output(e))
            enter!(output(e))
            continue
        end
        results = Tensor[symbol(x.eltype, x.dims) for x in e.outputs]
        push!(equations, Equation(e.op, Tensor[inside(x) for x in e.inputs], e.attrs, results, e.scope))
        for (x, result) in zip(e.outputs, results)
            if made_without_grad(e, x)
                push!(equations, Equation(STOP_GRADIENT, Tensor[result], NO_ATTRS, e.scope))
                result = output(equations[end])
            end
            here[x] = result
        end
    end
    return prune(Program(inputs, equations, Tensor[inside(x) for x in outputs])), outside
end

"""Whether a result would have a derivative, had it not been made under `no_grad`."""
made_without_grad(e::Equation, x::Tensor) = !x.requires_grad && x.eltype in FLOATS && !e.op.constant &&
    any(a -> a.requires_grad, e.inputs)

const NO_PROGRAMS = Program[]

"""The programs in an attribute, or in all of an op: those that it repeats or chooses from."""
programs_in(@nospecialize attr) = NO_PROGRAMS
programs_in(program::Program) = Program[program]
programs_in(attrs::Attributes) = Program[program for pair in pairs_of(attrs) for program in programs_in(pair.second)]

"""The equations of the programs inside an equation, to any depth: those of a loop's body, say."""
function inner_equations(e::Equation)
    isempty(e.attrs) && return Equation[]
    return Equation[x for program in programs_in(e.attrs) for inner in program.equations for x in Equation[inner; inner_equations(inner)]]
end

"""The arrays that a piece of a program reads beside its inputs, those of the pieces inside it included."""
function captured_by(attrs::Attributes)
    isempty(attrs) && return NO_INPUTS
    programs = programs_in(attrs)
    return isempty(programs) ? NO_INPUTS : unique(Tensor[x for program in programs for x in captured_by(program)])
end
captured_by(program::Program) = unique(Tensor[
    Tensor[x for e in program.equations for x in e.inputs if x.data !== nothing && !x.literal];
    Tensor[x for x in program.outputs if x.data !== nothing && !x.literal];
    Tensor[x for e in program.equations for x in captured_by(e.attrs)]])

"""Whether an op reads what is frozen, as an input or inside the programs among its attributes."""
function any_frozen(inputs::Vector{Tensor}, attrs::Attributes)
    any(is_frozen, inputs) && return true
    for pair in pairs_of(attrs), program in programs_in(pair.second)
        any(is_frozen, captured_by(program)) && return true
    end
    return false
end

# Dead code ------------------------------------------------------------------------------------------------------------

"""Drop the equations that no output needs, and results that none does."""
prune(program::Program) = Program(program.inputs, needed(program.equations, program.outputs), program.outputs)

function needed(equations::Vector{Equation}, outputs::Vector{Tensor})
    read, found = sizehint!(TensorSet(outputs), length(equations)), Equation[]
    for e in Iterators.reverse(equations)
        any(x -> x in read, e.outputs) || continue
        union!(read, e.inputs)
        push!(found, e.op.narrow === nothing ? e : narrowed(e, read))
    end
    return reverse!(found)
end

"""The op with no more results than are needed."""
function narrowed(e::Equation, read::TensorSet)
    attrs = e.op.narrow(e.attrs, Bool[x in read for x in e.outputs])::Attributes
    return Equation(e.op, e.inputs, attrs, e.outputs[1:length(kinds_of(e.op, e.inputs, attrs))], e.scope)
end

# Simplification -------------------------------------------------------------------------------------------------------

"""Merge equal ops (CSE), fold arithmetic on literals, and drop ops that change nothing."""
function simplify(program::Program)
    replaced, made = TensorDict{Tensor}(), Made()
    sizehint!(made, length(program.equations))
    known = KnownCalls{Equation}(length(program.equations))
    literals = Dict{Vector{UInt},Tensor}()
    function resolve(x::Tensor)
        x = get(replaced, x, x)
        x.literal && (x = get!(literals, UInt[objectid(x.eltype), literal_bits(x)], x))
        return x
    end
    equations = Equation[]
    for e in program.equations
        found = simpler(reading(resolve, e), made)
        if found isa Equation
            push!(equations, found)
            for x in found.outputs
                made[x] = found
            end
            found.op.random && continue
            found = first_equal!(known, found).outputs
        end
        results = found::Vector{Tensor}
        for (x, instead) in zip(e.outputs, results)
            instead === x || (replaced[x] = instead)
        end
    end
    return prune(Program(program.inputs, equations, Tensor[resolve(x) for x in program.outputs]))
end

literal_bits(x::Tensor) = x.eltype === Float32 ? UInt(reinterpret(UInt32, item(x)::Float32)) :
    x.eltype === Float64 ? reinterpret(UInt, item(x)::Float64) : reinterpret(UInt, item(x)::Int64)

"""
Calls of ops, equations or nodes, by a hash of what each computes: its fingerprint. `replaced` are inputs that others stand for.
"""
struct KnownCalls{T<:Union{Equation,Tensor}}
    calls::Dict{UInt,T}
    replaced::TensorDict{Tensor}
    fingerprint::Vector{UInt}  # the last one, and that of a call with the same hash: memory that is used again
    other::Vector{UInt}
end
KnownCalls{T}(n::Int, replaced::TensorDict{Tensor}=TensorDict{Tensor}()) where {T} =
    KnownCalls{T}(sizehint!(Dict{UInt,T}(), 3 * n ÷ 2), replaced, UInt[], UInt[])

"""The first call that computes the same as this one, perhaps itself. Of different calls with one hash only the first is known."""
function first_equal!(known::KnownCalls{T}, call::T) where {T}
    write_down!(known.fingerprint, call, known.replaced)
    first = get!(known.calls, mixed_words(known.fingerprint), call)
    first === call && return call
    write_down!(known.other, first, known.replaced)
    return known.fingerprint == known.other ? first : call
end

function mixed_words(words::Vector{UInt})
    h = UInt(0)
    for w in words
        h = (h ⊻ w) * 0x9e3779b97f4a7c15
        h ⊻= h >> 32
    end
    return h
end

"""Write down in numbers what an op is applied to: the same for ops that compute the same."""
function write_down!(key::Vector{UInt}, call::Union{Equation,Tensor}, replaced::TensorDict{Tensor})
    push!(empty!(key), objectid(call.op))
    for x in call.inputs
        push!(key, objectid(get(replaced, x, x)))
    end
    for (_, attr) in pairs_of(call.attrs)
        write_down!(key, attr)
    end
    return nothing
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

"""What the results equal, existing tensors or literals; or the equation, perhaps a shorter one."""
function simpler(e::Equation, made::Made)
    e.op.elementwise && all(x -> one_number(x, made) !== nothing, e.inputs) && return folded(e, made)
    found = e.op.simplify === nothing ? nothing : e.op.simplify(e, made)
    return found === nothing ? e : found isa Tensor ? Tensor[found] : found
end

"""An elementwise op on literals, or on arrays of one number each, which is computed here and repeated without new memory."""
function folded(e::Equation, made::Made)
    y = output(e)
    data = compute(e.op, Memory[one_number(x, made).data::Memory for x in e.inputs], Int[], y.eltype, e.attrs)
    number = literal(y.eltype, data.root[])
    return isempty(y.dims) ? Tensor[number] : Equation(BROADCAST_TO, Tensor[number], attributes(:dims => y.dims), e.outputs, e.scope)
end

"""The literal that all elements are equal to, or `nothing`."""
function one_number(x::Tensor, made::Made)
    while op_of(x, made) === RESHAPE || op_of(x, made) === BROADCAST_TO
        x = made[x].inputs[1]
    end
    return x.literal ? x : nothing
end

# The rules of ops' records.

"""For an op that is its input but for derivatives: the input."""
its_input(e::Equation, made::Made) = e.inputs[1:length(e.outputs)]

"""For a product: the other factor of one."""
without_one(e::Equation, made::Made) = is_one(e.inputs[1], made) && e.inputs[2].dims == output(e).dims ? e.inputs[2] :
    is_one(e.inputs[2], made) && e.inputs[1].dims == output(e).dims ? e.inputs[1] : nothing

is_one(x::Tensor, made::Made) = (number = one_number(x, made); number !== nothing && item(number) == 1)

"""For a reshape: its input, or a reshape of what that is a reshape of."""
function shorter_reshape(e::Equation, made::Made)
    x = e.inputs[1]
    op_of(x, made) === RESHAPE && (x = made[x].inputs[1])
    return output(e).dims == x.dims ? x : reading(e, Tensor[x])
end

"""For a permutation of axes: its input, or one permutation in place of two."""
function shorter_transpose(e::Equation, made::Made)
    x, axes = e.inputs[1], e.attrs.axes
    if op_of(x, made) === TRANSPOSE
        x, axes = made[x].inputs[1], made[x].attrs.axes[axes]
    end
    return issorted(axes) ? x : Equation(TRANSPOSE, Tensor[x], attributes(:axes => axes), e.outputs, e.scope)
end
