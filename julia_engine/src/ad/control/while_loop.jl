# Loops that end on a value: one op, whose number of steps is found when it runs.
#
# The op keeps the last carry and the number of steps, nothing else. A derivative is a loop of that number of steps: in forward
# mode the tangents are carried beside the values; in reverse mode another op runs the steps once more, keeps the carry at the
# start of each of about √n segments, and goes backwards segment by segment. Both of these have derivatives that are such ops
# again, so that there are derivatives of any order.

"""
    Steps

What a loop repeats: a program from `carries` and constants to new carries.
"""
struct Steps
    program::Program
    carries::Int
end

"""
    While

Steps while `test`, a program from the carries and its own constants, gives a number that is not 0, but at most `limit` of
them.
"""
struct While
    steps::Steps
    test::Program
    limit::Int
end

Base.show(io::IO, steps::Steps) = print(io, length(steps.program.equations), " ops")
Base.show(io::IO, loop::While) = print(io, loop.steps, " while ", length(loop.test.equations), " ops hold")
programs_in(steps::Steps) = Program[steps.program]
programs_in(loop::While) = Program[loop.steps.program, loop.test]

kinds_of(xs::Vector{Tensor}) = Kind[(x.dims, x.eltype) for x in xs]

# The carries come first: the first result of an op is the one that gradients go by.
infer_while(inputs, attrs) = Kind[kinds_of((attrs.loop::While).steps.program.outputs); (Int[], Int64)]

# Running --------------------------------------------------------------------------------------------------------------

"""Where an array lies, and its bytes."""
const Block = Tuple{Ptr{UInt8},Int}
block(x::Array) = (Ptr{UInt8}(start_of(x)), sizeof(x))
block(m::Memory) = (Ptr{UInt8}(m.address), sizeof(m.eltype) * length(m))
blocks(xs) = Block[block(x) for x in xs]

"""Copies of whole arrays, from the second ones to the first ones."""
copies(to, from) = Transfer[Transfer(block(a)[1], block(b)..., 0, 0) for (a, b) in zip(to, from)]
step_copies(tape::Tape, carries::Int) = copies(tape.inputs[1:carries], tape.outputs[1:carries])

own_bytes(tape::Tape) = nbytes(tape) + sum(Int[sizeof(x) for x in [tape.inputs; tape.outputs]])
inside_tape(steps::Steps) = Tape(steps.program; techniques=state().techniques)

function poison_inside!(tape::Tape, byte::Integer)
    poison!(tape, byte)
    foreach(x -> fill_bytes!(x, byte), tape.inputs)
end

function one_step!(tape::Tape, turn::Vector{Transfer})
    run!(tape)
    copy_all!(turn, 0)
    return nothing
end

"""A loop that ends on a value, as an instruction."""
struct Looping
    tape::Tape
    test::Tape
    holds::Memory
    limit::Int
    enter::Vector{Transfer}
    shown::Vector{Transfer}
    turn::Vector{Transfer}
    leave::Vector{Transfer}
    count::Memory
end

function (r::Looping)()
    copy_all!(r.enter, 0)
    n = 0
    while n < r.limit
        copy_all!(r.shown, 0)
        run!(r.test)
        first_number(r.holds) == 0 && break
        one_step!(r.tape, r.turn)
        n += 1
    end
    copy_all!(r.leave, 0)
    unsafe_store!(Ptr{Int64}(r.count.address), n)
    return nothing
end

function forward_while(p::Instructions, outs::Vector{Memory}, inputs::Vector{Memory}, attrs)
    loop = attrs.loop::While
    tape, test = inside_tape(loop.steps), Tape(loop.test; techniques=state().techniques)
    c, n = loop.steps.carries, length(tape.inputs)
    enter = [copies(tape.inputs, inputs[1:n]); copies(test.inputs[c+1:end], inputs[n+1:end])]
    r = Looping(tape, test, Memory(test.outputs[1]), loop.limit, enter, copies(test.inputs[1:c], tape.inputs[1:c]), step_copies(tape, c),
        copies(outs[1:c], tape.inputs[1:c]), outs[end])
    return emit_call!(p, r, own_bytes(tape) + own_bytes(test), [inputs; outs])
end

poison!(r::Looping, byte::Integer) = (poison_inside!(r.tape, byte); poison_inside!(r.test, byte))

"""A loop of a number of steps that is an operand, as an instruction."""
struct Repeating
    tape::Tape
    count::Memory
    enter::Vector{Transfer}
    turn::Vector{Transfer}
    leave::Vector{Transfer}
end

function (r::Repeating)()
    copy_all!(r.enter, 0)
    for _ in 1:unsafe_load(Ptr{Int64}(r.count.address))
        one_step!(r.tape, r.turn)
    end
    copy_all!(r.leave, 0)
    return nothing
end

function forward_repeat(p::Instructions, outs::Vector{Memory}, inputs::Vector{Memory}, attrs)
    tape, c = inside_tape(attrs.loop::Steps), (attrs.loop::Steps).carries
    r = Repeating(tape, inputs[1], copies(tape.inputs, inputs[2:end]), step_copies(tape, c), copies(outs, tape.inputs[1:c]))
    return emit_call!(p, r, own_bytes(tape), [inputs; outs])
end

poison!(r::Repeating, byte::Integer) = poison_inside!(r.tape, byte)

"""
The gradient of a loop of a number of steps, as an instruction: `starts` keeps the carries that segments begin with, `kept`
those of one segment.
"""
struct Reversing
    tape::Tape
    back::Tape
    count::Memory
    enter::Vector{Transfer}
    turn::Vector{Transfer}
    sums::Vector{Block}
    seen::Vector{Transfer}
    pass_on::Vector{Transfer}
    leave::Vector{Transfer}
    carries::Vector{Block}
    starts::Vector{UInt8}
    kept::Vector{UInt8}
end

function (r::Reversing)()
    copy_all!(r.enter, 0)
    foreach(clear!, r.sums)
    n = unsafe_load(Ptr{Int64}(r.count.address))
    size = max(1, isqrt(n))
    segments = cld(n, size)
    width = sum(Int[bytes for (_, bytes) in r.carries])
    resize!(r.starts, width * segments)
    resize!(r.kept, width * min(n, size))
    for s in 1:segments
        keep_carries!(r.starts, r.carries, width, s)
        for _ in 1:(s == segments ? 0 : size)
            one_step!(r.tape, r.turn)
        end
    end
    for s in segments:-1:1
        steps = min(size, n - (s - 1) * size)
        restore_carries!(r.carries, r.starts, width, s)
        for k in 1:steps
            keep_carries!(r.kept, r.carries, width, k)
            k == steps || one_step!(r.tape, r.turn)
        end
        for k in steps:-1:1
            restore_carries!(r.carries, r.kept, width, k)
            copy_all!(r.seen, 0)
            run!(r.back)
            copy_all!(r.pass_on, 0)
        end
    end
    copy_all!(r.leave, 0)
    resize!(r.starts, 0)
    resize!(r.kept, 0)
    return nothing
end

clear!((at, bytes)::Block) = (ccall(:memset, Ptr{Cvoid}, (Ptr{UInt8}, Cint, Csize_t), at, 0, bytes); nothing)

"""Copy the carries to the `k`-th place of a buffer, or from there."""
function keep_carries!(buffer::Vector{UInt8}, carries::Vector{Block}, width::Int, k::Int)
    at = pointer(buffer) + (k - 1) * width
    GC.@preserve buffer for (here, bytes) in carries
        unsafe_copyto!(at, here, bytes)
        at += bytes
    end
    return nothing
end

function restore_carries!(carries::Vector{Block}, buffer::Vector{UInt8}, width::Int, k::Int)
    at = pointer(buffer) + (k - 1) * width
    GC.@preserve buffer for (here, bytes) in carries
        unsafe_copyto!(here, at, bytes)
        at += bytes
    end
    return nothing
end

function forward_reverse(p::Instructions, outs::Vector{Memory}, inputs::Vector{Memory}, attrs)
    loop, wanted = attrs.loop::Steps, attrs.wanted::Vector{Int}
    c, n = loop.carries, length(loop.program.inputs)
    tape, back = inside_tape(loop), Tape(attrs.back::Program; techniques=state().techniques)
    m = length(back.outputs)  # the gradients of the carries, and the sums
    values, seeds = inputs[2:n+1], inputs[n+2:end]
    enter = [copies(tape.inputs, values); copies(back.inputs[1:c], seeds); copies(back.inputs[m+c+1:end], values[c+1:end])]
    of_carries = Int[i for i in wanted if i <= c]
    leave = copies(outs, Any[back.inputs[of_carries]; back.inputs[c+1:m]])
    r = Reversing(tape, back, inputs[1], enter, step_copies(tape, c), blocks(back.inputs[c+1:m]),
        copies(back.inputs[m+1:m+c], tape.inputs[1:c]), copies(back.inputs[1:m], back.outputs), leave, blocks(tape.inputs[1:c]),
        UInt8[], UInt8[])
    return emit_call!(p, r, own_bytes(tape) + own_bytes(back), [inputs; outs])
end

poison!(r::Reversing, byte::Integer) = (poison_inside!(r.tape, byte); poison_inside!(r.back, byte))

# Derivatives ----------------------------------------------------------------------------------------------------------
#
# With f the loop of a known number of steps, x its carries and constants, g the cotangents of its results and J the Jacobian,
# the gradient is gᵀ J(x). That is linear in g. Its tangent along v is the gradient by x of gᵀ J(x) v, where J(x) v is what the
# loop f' that carries tangents beside the values makes of (x, v): a gradient of f' by x. So is its own gradient.

"""The gradients of `n` steps by the `wanted` inputs, in order, from those by the carries at the end."""
function reversed(loop::Steps, n::Tensor, inputs::Vector{Tensor}, cotangents, wanted::Vector{Int})
    isempty(wanted) && return Tensor[]
    seeds = Tensor[g === nothing ? zeros_of(x) : g for (g, x) in zip(cotangents, loop.program.outputs)]
    back = backward_step(loop.program, loop.carries, 0, Int[], Bool[i in wanted for i in eachindex(inputs)])
    return apply_several(REVERSE, Tensor[n; inputs; seeds], attributes(:loop => loop, :back => back, :wanted => wanted))
end

"""
The loop that carries tangents beside the values, and its inputs: the carries, their tangents, the constants, and the tangents
of those that have one.
"""
function with_tangents(loop::Steps, inputs::Vector{Tensor}, tangents)
    c = loop.carries
    active = Int[i for i in eachindex(inputs) if i <= c || tangents[i] !== nothing]
    dense = Tensor[tangents[i] === nothing ? zeros_of(inputs[i]) : tangents[i] for i in active]
    return Steps(forward_step(loop.program, c, 0, active), 2c), with_tangents(inputs, dense, active, c, 0)
end

"""The tangents of the carries after `n` steps."""
function pushed_ahead(loop::Steps, n::Tensor, inputs::Vector{Tensor}, tangents)
    doubled, both = with_tangents(loop, inputs, tangents)
    return apply_several(REPEAT, Tensor[n; both], attributes(:loop => doubled))[loop.carries+1:end]
end

"""The gradients of the loop that carries tangents by the `wanted` inputs of the loop itself."""
function reversed_ahead(loop::Steps, n::Tensor, inputs::Vector{Tensor}, tangents, cotangents, wanted::Vector{Int})
    doubled, both = with_tangents(loop, inputs, tangents)
    return reversed(doubled, n, both, cotangents, Int[i <= loop.carries ? i : i + loop.carries for i in wanted])
end

"""For each of `count` inputs its gradient, or `nothing`."""
function at_places(found::Vector{Tensor}, places::Vector{Int}, count::Int)
    parts = Vector{Any}(nothing, count)
    parts[places] = found
    return parts
end

"""How many inputs the body of a `while_loop` has; those of the test alone come behind them."""
body_inputs(loop::While) = length(loop.steps.program.inputs)

function while_pullback(cotangents::Vector{Union{Nothing,Tensor}}, node::Tensor, inputs::Vector{Tensor}, needs_grad::Vector{Bool})
    loop = node.attrs.loop::While
    own = 1:body_inputs(loop)
    wanted = Int[i for i in own if needs_grad[i]]
    return at_places(reversed(loop.steps, node.results[end], inputs[own], cotangents[1:end-1], wanted), wanted, length(inputs))
end

function while_jvp(t, results, inputs, attrs)
    loop = attrs.loop::While
    own = 1:body_inputs(loop)
    all(isnothing, t[own]) && return fill(nothing, length(results))
    return Any[pushed_ahead(loop.steps, results[end], inputs[own], t[own]); nothing]
end

function repeat_pullback(cotangents::Vector{Union{Nothing,Tensor}}, node::Tensor, inputs::Vector{Tensor}, needs_grad::Vector{Bool})
    wanted = Int[i for i in 1:length(inputs)-1 if needs_grad[i+1]]
    return at_places(reversed(node.attrs.loop::Steps, inputs[1], inputs[2:end], cotangents, wanted), wanted .+ 1, length(inputs))
end

repeat_jvp(t, results, inputs, attrs) = pushed_ahead(attrs.loop::Steps, inputs[1], inputs[2:end], t[2:end])

function reverse_jvp(t, results, inputs, attrs)
    loop, wanted, n = attrs.loop::Steps, attrs.wanted::Vector{Int}, inputs[1]
    m = length(loop.program.inputs)
    values, seeds, of_values, of_seeds = inputs[2:m+1], inputs[m+2:end], t[2:m+1], t[m+2:end]
    all(isnothing, of_values) && return reversed(loop, n, values, of_seeds, wanted)  # linear in the seeds
    return reversed_ahead(loop, n, values, of_values, Any[of_seeds; seeds], wanted)
end

function reverse_pullback(cotangents::Vector{Union{Nothing,Tensor}}, node::Tensor, inputs::Vector{Tensor}, needs_grad::Vector{Bool})
    loop, n = node.attrs.loop::Steps, inputs[1]
    m, c = length(loop.program.inputs), loop.carries
    values, seeds, of_values = inputs[2:m+1], inputs[m+2:end], Vector{Any}(nothing, m)
    of_values[node.attrs.wanted] = cotangents
    wanted = Int[i for i in 1:m if needs_grad[i+1]]
    by_values = reversed_ahead(loop, n, values, of_values, Any[fill(nothing, c); seeds], wanted)
    return Any[nothing; at_places(by_values, wanted, m); pushed_ahead(loop, n, values, of_values)]
end

const WHILE = Op("while_loop", infer_while; several=true, forward=forward_while, backward=Joint(while_pullback), jvp=while_jvp,
    accepts=is_dense, attrs=[:loop], doc="a body repeated while a value says so; the last result is the number of steps")
const REPEAT = Op("repeat_steps", (inputs, attrs) -> kinds_of((attrs.loop::Steps).program.outputs); several=true,
    forward=forward_repeat, backward=Joint(repeat_pullback), jvp=repeat_jvp, accepts=is_dense, attrs=[:loop],
    doc="a body repeated for a number of steps that is an input")
const REVERSE = Op("repeat_steps_gradient",
    (inputs, attrs) -> kinds_of((attrs.loop::Steps).program.inputs[attrs.wanted::Vector{Int}]); several=true,
    forward=forward_reverse, backward=Joint(reverse_pullback), jvp=reverse_jvp, accepts=is_dense, attrs=[:loop, :back, :wanted],
    doc="gradient of repeat_steps by some of its inputs")

# What users write -----------------------------------------------------------------------------------------------------

"""
    while_loop(cond, body, init; max_steps=nothing)

The carry at the end of

    while cond(carry)
        carry = body(carry)
    end

as one op.

- `cond`: takes the carry and returns one truth value, such as `sum(x) .> 0`.
- `body`: takes the carry and returns the new one, of the same structure, sizes and element type.
- `init`: the first carry, an array or a container of arrays of one float type.
- `max_steps`: the loop ends after this number of steps, whatever `cond` says; `nothing`: no limit.

Both functions are traced, so that their code runs once and cannot branch on values ([`branch`](@ref) can). Nothing is kept of
the steps. Forward mode carries the tangents through as many steps. Reverse mode, for n steps, runs the loop once more, keeping
about √n carries, and each step a second time on the way back: memory for 2√n carries while it runs. Tensors that `body`
captures have their gradients; `cond` has none, and neither has the number of steps. Under `vmap` each sample has its own loop.

    root(a) = while_loop(x -> abs.(x .* x .- a) .> 1e-12, x -> (x .+ a ./ x) ./ 2, a)
    compile(value_and_grad(root))(2.0)  # about (√2, 1 / 2√2)

Random masks cannot be drawn in it: draw them before.

Throws a `ShapeError` or `DTypeError` where the carry changes its structure, size or element type, or `cond` returns no single
truth value; a `ConfigurationError` where `max_steps` is no number of steps; a `TraceError` for a branch on a value.

Source: the segments after Chen et al., "Training deep nets with sublinear memory cost" (2016).
"""
function while_loop(cond, body, init; max_steps=nothing)
    max_steps === nothing || is_count(max_steps, 0) ||
        throw(ConfigurationError("while_loop: max_steps must be a number of steps or nothing, got $(repr(max_steps))"))
    leaves, structure = flatten(init)
    isempty(leaves) && throw(ShapeError("while_loop: init must hold an array at least, got $structure"))
    plain = is_plain(leaves)
    carries = carried_tensors("while_loop", leaves, structure)
    own = Tensor[like(x) for x in carries]
    outputs, nodes = nested_trace(() -> alike_carry("while_loop", body(unflatten(structure, own)), carries, structure))
    program, constants = closed_loop(nodes, own, outputs)
    again = Tensor[like(x) for x in carries]
    holds, nodes = nested_trace(() -> truth_value("while_loop: what cond returns", cond(unflatten(structure, again))))
    test, read = closed_loop(nodes, again, Tensor[holds])
    loop = While(Steps(program, length(carries)), test, max_steps === nothing ? typemax(Int) : Int(max_steps))
    found = as_rows(carries, apply_several(WHILE, Tensor[carries; constants; read], attributes(:loop => loop))[1:end-1])
    plain = plain && (!any(x -> x.requires_grad, found) || depends_on_duals(found))
    return unflatten(structure, shown(found, plain, leaves))
end

"""A traced function as a program, and what it captures."""
function closed_loop(nodes::Vector{Tensor}, own::Vector{Tensor}, outputs::Vector{Tensor})
    drawn = findfirst(x -> (x.op::Op).random, nodes)
    drawn === nothing || throw(TraceError("while_loop: random masks cannot be drawn inside a loop " *
        "($(nodes[drawn].op.name)); draw them before"))
    program, outside = close_over(nodes, own, outputs)
    !state().symbolic && any(x -> x.data === nothing, outside) && throw(TraceError("while_loop: the function uses a " *
        "tensor that was kept from an earlier trace; return it from there, or compute it here"))
    return program, outside
end
