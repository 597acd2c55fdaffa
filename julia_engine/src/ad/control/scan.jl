# Loops over sequences: one op for all steps, whose body is a separate tape that is run again and again.
#
# The derivatives of a loop are loops: reverse mode runs backwards over the carries that the forward loop kept, computes
# each step again and pulls its gradients back; forward mode carries a tangent beside every value. So any order works, and
# a loop inside a loop's body is a checkpoint: the outer one keeps only what enters each segment.

"""
    Scan

What a loop does at each step. The program's inputs are the carries, then this step's part of each sequence, then what is the
same at every step; its outputs the new carries, then this step's part of each result.

- `carries`, `sequences`: how many there are.
- `steps`, `backwards`: how often, and whether from the last step to the first.
- `keeps`: whether the last results are the carries as each step found them, for the backward pass.
"""
struct Scan
    program::Program
    carries::Int
    sequences::Int
    steps::Int
    backwards::Bool
    keeps::Bool
end

Base.show(io::IO, loop::Scan) = print(io, loop.steps, loop.backwards ? " steps backwards of " : " steps of ",
    length(loop.program.equations), " ops")

"""The final carries, then what the steps gave, stacked along a new last axis."""
infer_scan(inputs, attrs) = (loop = attrs.loop::Scan; Kind[(k <= loop.carries ? x.dims : Int[x.dims; loop.steps], x.eltype)
    for (k, x) in enumerate(loop.program.outputs)])

# Running --------------------------------------------------------------------------------------------------------------

"""A copy that every step makes: `bytes`, from and to addresses that may move on with the steps."""
struct Transfer
    to::Ptr{UInt8}
    from::Ptr{UInt8}
    bytes::Int
    to_stride::Int
    from_stride::Int
end

"""A loop as instructions: the body's tape, and what is copied before, at, and after each step."""
struct Repetition
    tape::Tape
    steps::Int
    backwards::Bool
    before::Vector{Transfer}
    fetch::Vector{Transfer}
    store::Vector{Transfer}
    turn::Vector{Transfer}
    after::Vector{Transfer}
end

function copy_all!(transfers::Vector{Transfer}, step::Int)
    for t in transfers
        ccall(:memcpy, Ptr{Cvoid}, (Ptr{UInt8}, Ptr{UInt8}, Csize_t), t.to + step * t.to_stride,
            t.from + step * t.from_stride, t.bytes)
    end
    return nothing
end

function (r::Repetition)()
    copy_all!(r.before, 0)
    for k in 1:r.steps
        step = r.backwards ? r.steps - k : k - 1
        copy_all!(r.fetch, step)
        run!(r.tape)
        copy_all!(r.store, step)
        copy_all!(r.turn, 0)
    end
    copy_all!(r.after, 0)
    return nothing
end

address_of(x::Array) = Ptr{UInt8}(start_of(x))

function forward_scan(p::Instructions, outs::Vector{Memory}, inputs::Vector{Memory}, attrs)
    loop = attrs.loop::Scan
    tape = Tape(loop.program; techniques=state().techniques)
    nc, ns = loop.carries, loop.sequences
    bytes(x) = sizeof(x)
    enter(i, stride) = Transfer(address_of(tape.inputs[i]), Ptr{UInt8}(inputs[i].address), bytes(tape.inputs[i]), 0, stride)
    before = Transfer[enter(i, 0) for i in eachindex(inputs) if !(nc < i <= nc + ns)]
    fetch = Transfer[enter(i, bytes(tape.inputs[i])) for i in nc+1:nc+ns]
    turn = Transfer[Transfer(address_of(tape.inputs[i]), address_of(tape.outputs[i]), bytes(tape.inputs[i]), 0, 0)
                    for i in 1:nc]
    store = Transfer[Transfer(Ptr{UInt8}(outs[k].address), address_of(tape.outputs[k]), bytes(tape.outputs[k]), bytes(tape.outputs[k]), 0)
                     for k in nc+1:length(outs)]
    after = Transfer[Transfer(Ptr{UInt8}(outs[k].address), address_of(tape.inputs[k]), bytes(tape.inputs[k]), 0, 0) for k in 1:nc]
    own = nbytes(tape) + sum(Int[bytes(x) for x in tape.inputs]) + sum(Int[bytes(x) for x in tape.outputs])
    return emit_call!(p, Repetition(tape, loop.steps, loop.backwards, before, fetch, store, turn, after), own, [inputs; outs])
end

function poison!(r::Repetition, byte::Integer)
    poison!(r.tape, byte)
    foreach(x -> fill_bytes!(x, byte), r.tape.inputs)
end

# Derivatives ----------------------------------------------------------------------------------------------------------

"""The same loop, which keeps its carries as results, too."""
function keeping(loop::Scan)
    loop.keeps && return loop
    program = loop.program
    more = Program(program.inputs, program.equations, Tensor[program.outputs; program.inputs[1:loop.carries]])
    return Scan(more, loop.carries, loop.sequences, loop.steps, loop.backwards, true)
end

"""The attributes of the loop without its kept carries, where nobody needs them."""
function narrow_scan(attrs::Attributes, needed::Vector{Bool})
    loop = attrs.loop::Scan
    loop.keeps && !any(needed[end-loop.carries+1:end]) || return attrs
    program = loop.program
    less = prune(Program(program.inputs, program.equations, program.outputs[1:end-loop.carries]))
    return attributes(:loop => Scan(less, loop.carries, loop.sequences, loop.steps, loop.backwards, false))
end

programs_in(loop::Scan) = Program[loop.program]

"""The results of a loop on these inputs. Where derivatives may be asked for it keeps its carries."""
function repeated(loop::Scan, inputs::Vector{Tensor})
    records = state().grad_enabled && any(x -> x.requires_grad, inputs)
    return apply_several(SCAN, inputs, attributes(:loop => records ? keeping(loop) : loop))
end

like(x::Tensor) = as_row(symbol(x.eltype, x.dims, x.name), x.row)
one_step(x::Tensor) = symbol(x.eltype, x.dims[1:end-1])
zeros_of(x::Tensor) = spread_to(literal(x.eltype, 0), x.dims)

"""The carries that depend, at some step, on what a gradient is asked for; the others need no rules."""
function depending_carries(program::Program, count::Int, needs_grad::Vector{Bool})
    carries = Set{Int}(i for i in 1:count if needs_grad[i])
    while true
        depends = Set{Tensor}(x for (i, x) in enumerate(program.inputs) if i > count ? needs_grad[i] : i in carries)
        for e in program.equations
            !e.op.constant && any(i -> e.inputs[i] in depends && !counts_as_constant(e.op, i), eachindex(e.inputs)) &&
                union!(depends, e.outputs)
        end
        before = length(carries)
        union!(carries, Int[i for i in 1:count if program.outputs[i] in depends])
        length(carries) == before && return sort!(collect(carries))
    end
end

"""
One step backwards. Its carries are the gradients of the `nc` carries, and the sums of those of what is `needed` of the inputs
that are the same at every step; then it takes the `nc` carries and `ns` parts of sequences as the step found them, the
gradients of the `upstream` results, and what is the same at every step. It returns the new gradients and sums, and then the
gradients of the parts that need one.
"""
function backward_step(program::Program, nc::Int, ns::Int, upstream::Vector{Int}, needs_grad::Vector{Bool})
    active = Int[i for i in eachindex(program.inputs) if i > nc && needs_grad[i]]
    summed = Int[i for i in active if i > nc + ns]
    (own, outputs), nodes = nested_trace() do
        carried = Tensor[like(x) for x in program.inputs[1:nc]]
        sums = Tensor[like(program.inputs[i]) for i in summed]
        here = symbols(program)
        seeds = Tensor[like(program.outputs[k]) for k in upstream]
        outputs, made = applied(program, here)
        targets = [depending_carries(program, nc, needs_grad); active]
        found = gradients(outputs[[1:nc; upstream]], Tensor[carried; seeds], here[targets]; within=made)
        by_input = Dict{Int,Tensor}(i => f for (i, f) in zip(targets, found) if f !== nothing)
        foreach(i -> get!(() -> zeros_of(here[i]), by_input, i), [1:nc; active])
        totals = Tensor[ADD(total, by_input[i]) for (total, i) in zip(sums, summed)]
        steps = Tensor[by_input[i] for i in active if i <= nc + ns]
        Tensor[carried; sums; here[1:nc+ns]; seeds; here[nc+ns+1:end]],
        Tensor[Tensor[by_input[i] for i in 1:nc]; totals; steps]
    end
    return traced(nodes, own, outputs)
end

"""One step with the tangents of the inputs that are `active`, all `nc` carries among them, behind those of their kind."""
function forward_step(program::Program, nc::Int, ns::Int, active::Vector{Int})
    (own, outputs), nodes = nested_trace() do
        here = symbols(program)
        tangents = Tensor[like(program.inputs[i]) for i in active]
        outputs, made = applied(program, here)
        of_inputs = Dict{Tensor,Tensor}(here[i] => d for (i, d) in zip(active, tangents))
        found = pushed_forward(outputs, of_inputs, made)
        with_tangents(here, tangents, active, nc, ns), Tensor[outputs[1:nc]; found[1:nc]; found[nc+1:end]]
    end
    return traced(nodes, own, outputs)
end

"""The carries, their tangents, the sequences, theirs, and what is the same at every step with its."""
function with_tangents(inputs::Vector{Tensor}, tangents::Vector{Tensor}, active::Vector{Int}, nc::Int, ns::Int)
    both(range) = Tensor[inputs[range]; tangents[[k for (k, i) in enumerate(active) if i in range]]]
    return Tensor[both(1:nc); both(nc+1:nc+ns); both(nc+ns+1:length(inputs))]
end

function scan_pullback(cotangents::Vector{Union{Nothing,Tensor}}, node::Tensor, inputs::Vector{Tensor}, needs_grad::Vector{Bool})
    loop, results = node.attrs.loop::Scan, node.results
    if !loop.keeps
        loop = keeping(loop)
        results = apply_several(SCAN, inputs, attributes(:loop => loop))
        append!(cotangents, fill(nothing, loop.carries))
    end
    nc, ns, program = loop.carries, loop.sequences, loop.program
    kept_carries = results[end-nc+1:end]
    upstream = Int[k for k in nc+1:length(results) if cotangents[k] !== nothing]
    fixed = inputs[nc+ns+1:end]
    active = Int[i for i in eachindex(inputs) if i > nc && needs_grad[i]]
    summed = Int[i for i in active if i > nc + ns]
    back = Scan(backward_step(program, nc, ns, upstream, needs_grad), nc + length(summed), nc + ns + length(upstream), loop.steps, !loop.backwards, false)
    start = Tensor[
        Tensor[something(cotangents[i], Some(zeros_of(results[i]))) for i in 1:nc]; Tensor[zeros_of(inputs[i]) for i in summed]]
    seeds = Tensor[cotangents[k] for k in upstream]
    found = repeated(back, Tensor[start; kept_carries; inputs[nc+1:nc+ns]; seeds; fixed])
    parts = Vector{Any}(nothing, length(inputs))
    for i in 1:nc
        needs_grad[i] && (parts[i] = found[i])
    end
    for (k, i) in enumerate(summed)
        parts[i] = found[nc+k]
    end
    for (k, i) in enumerate(Int[i for i in active if i <= nc + ns])
        parts[i] = found[nc+length(summed)+k]
    end
    return parts
end

function scan_jvp(t, results, inputs, attrs)
    loop = attrs.loop::Scan
    nc, ns, program = loop.carries, loop.sequences, loop.program
    active = Int[i for i in eachindex(inputs) if i <= nc || t[i] !== nothing]
    tangents = Tensor[t[i] === nothing ? zeros_of(inputs[i]) : t[i] for i in active]
    doubled = Scan(forward_step(program, nc, ns, active), 2nc, ns + count(i -> nc < i <= nc + ns, active), loop.steps, loop.backwards, false)
    found = repeated(doubled, with_tangents(inputs, tangents, active, nc, ns))
    return found[[nc+1:2nc; 2nc+1:nc+length(results)]]
end

const SCAN = Op("scan", infer_scan; several=true, narrow=narrow_scan, forward=forward_scan, backward=Joint(scan_pullback),
    jvp=scan_jvp, accepts=is_dense, attrs=[:loop], doc="a loop: one op for all steps")

# What users write -----------------------------------------------------------------------------------------------------

"""
    scan(f, carry, xs; length=nothing, checkpoint=false, truncate=nothing)

The loop

    for t in 1:length
        carry, ys[t] = f(carry, xs[t])
    end

as one op, of the same size for any number of steps. Returns `(carry, ys)`.

- `carry`: what is handed on from step to step, a container of arrays of one float type, which keep their sizes.
- `xs`: what the steps read, a container of arrays whose last axis is the steps; `nothing` if `length` is given.
- `ys`: what `f` returned second at each step, stacked along a new last axis; `f` may return `nothing` there.
- `checkpoint`: how many steps apart the carries are that are kept for the backward pass (`true`: about the square root of the
  number of steps). What lies between is computed again: memory for time.
- `truncate`: let gradients flow back through at most that many steps: the sequence is cut, counted from its end, and no
  gradient passes a cut.

The body is traced once: what holds for compiled functions holds for it. Tensors that it captures get gradients. Random
masks cannot be drawn in it: draw them before, and pass them in `xs`.

Throws a `ShapeError` where the carry changes its size, structure or element type, or sequences differ in length; a
`TraceError` for a branch on a value.

Source: truncation after Williams and Peng, Neural Computation 2 (1990); the square root after Chen et al.,
"Training deep nets with sublinear memory cost" (2016).
"""
function scan(f, carry, xs; length=nothing, checkpoint=false, truncate=nothing)
    c, carry_structure = flatten(carry)
    x, structure = flatten(xs)
    plain = is_plain([c; x])
    carries, sequences = scan_operands(c, carry_structure, x, structure)
    steps = scan_length(sequences, structure, length)
    body = Body(f, carry_structure, structure)
    truncate === nothing || is_count(truncate) ||
        throw(ConfigurationError("scan: truncate must be a number of steps from 1 on, got $(repr(truncate))"))
    checkpoint isa Bool || is_count(checkpoint) ||
        throw(ConfigurationError("scan: checkpoint must be true, false or a number of steps from 1 on, got " *
            repr(checkpoint)))
    segment = checkpoint === false ? 0 : checkpoint === true ? max(1, ceil(Int, sqrt(steps))) : Int(checkpoint)
    final, ys, ys_structure = scanned(body, carries, sequences, steps, segment, truncate === nothing ? 0 : Int(truncate))
    found = Tensor[final; ys]
    plain = plain && (!any(y -> y.requires_grad, found) || depends_on_duals(found))
    arrays = shown(found, plain, Any[c; x])
    n = Base.length(final)
    return unflatten(carry_structure, arrays[1:n]), unflatten(ys_structure, arrays[n+1:end])
end

is_count(n, least::Int=1) = n isa Integer && !(n isa Bool) && n >= least

"""What the user's function is called with at each step, and what it must return."""
struct Body
    f::Any
    carry::Structure
    step::Structure
end

function scan_operands(c::Vector{Any}, carry_structure::Structure, x::Vector{Any}, structure::Structure)
    T = float_among([c; x])
    carries = carried_tensors("scan", c, carry_structure, T)
    sequences = Tensor[
        named_operand(() -> a isa AbstractArray{<:Integer} ? index_tensor(a) : as_tensor(a, T), "scan: xs$place")
        for (a, place) in zip(x, paths(structure))]
    return carries, sequences
end

"""The float type of the first tensor or array that has one."""
function float_among(leaves::Vector{Any})
    k = findfirst(a -> (a isa Tensor || a isa AbstractArray) && eltype(a) in FLOATS, leaves)
    return k === nothing ? Float64 : eltype(leaves[k])
end

"""The leaves of a loop's first carry as tensors; `name` is the loop's, for messages."""
function carried_tensors(name::String, leaves::Vector{Any}, structure::Structure, @nospecialize(T)=float_among(leaves))
    for (a, place) in zip(leaves, paths(structure))
        (a isa Real && !(a isa Bool)) || has_derivative(a) || throw(NotDifferentiableError("$name: the carry$place is of " *
            "$(a isa Union{Tensor,AbstractArray} ? eltype(a) : typeof(a)); carry arrays of Float32 or Float64"))
    end
    carries = as_rows(leaves,
        Tensor[named_operand(() -> as_tensor(a, T), "$name: the carry$place") for (a, place) in zip(leaves, paths(structure))])
    isempty(carries) || check_eltypes("$name: the carry", carries)
    return carries
end

"""The tensor that `make()` returns, or its error with the name of the loop's operand."""
function named_operand(@nospecialize(make), what::String)
    try
        return make()
    catch error
        error isa DTypeError || rethrow()
        throw(DTypeError("$what: $(error.message)"))
    end
end

function scan_length(sequences::Vector{Tensor}, structure::Structure, @nospecialize(given))
    given === nothing || is_count(given, 0) ||
        throw(ConfigurationError("scan: length must be a number of steps, got $(repr(given))"))
    isempty(sequences) && given === nothing &&
        throw(ShapeError("scan: there are no xs to count the steps of; give length"))
    steps = given === nothing ? nothing : Int(given)
    for (x, place) in zip(sequences, paths(structure))
        ndims(x) == 0 && throw(ShapeError("scan: xs$place is a number; the last axis of an array is the steps"))
        steps === nothing && (steps = x.dims[end])
        x.dims[end] == steps ||
            throw(ShapeError("scan: expected $steps steps along the last axis of xs$place, got size $(size(x))"))
    end
    return steps
end

"""The final carries, the results of all steps, and the structure of a step's results."""
function scanned(body::Body, carries::Vector{Tensor}, xs::Vector{Tensor}, steps::Int, segment::Int, cut::Int)
    if 0 < cut < steps
        inner = Body((c, x) -> in_segment(body, c, x, cut, min(segment, cut), true), body.carry, body.step)
        return in_segments(body, inner, carries, xs, steps, cut, segment, steps % cut == 0 ? cut : steps % cut)
    elseif 0 < segment < steps
        inner = Body((c, x) -> in_segment(body, c, x, segment, 0, false), body.carry, body.step)
        return in_segments(body, inner, carries, xs, steps, segment, 0, steps % segment)
    end
    return plain_scan(body, carries, xs, steps)
end

"""A loop over segments of `n` steps, after the first `head` steps."""
function in_segments(body::Body, inner::Body, carries::Vector{Tensor}, xs::Vector{Tensor}, steps::Int, n::Int,
        segment::Int, head::Int)
    early = nothing
    if head > 0
        carries, early, _ = scanned(body, carries, Tensor[along_steps(x, 1, head) for x in xs], head, min(segment, head), 0)
    end
    count_ = (steps - head) ÷ n
    parts = Tensor[reshape_to(along_steps(x, head + 1, steps - head), Int[x.dims[1:end-1]; n; count_]) for x in xs]
    final, ys, structure = plain_scan(inner, carries, parts, count_)
    ys = Tensor[reshape_to(y, Int[y.dims[1:end-2]; n * count_]) for y in ys]
    early === nothing || (ys = Tensor[concatenate(Tensor[a, b], ndims(b)) for (a, b) in zip(early, ys)])
    return final, ys, structure
end

along_steps(x::Tensor, first::Int, n::Int) = first == 1 && n == x.dims[end] ? x :
    apply(SLICE, Tensor[x], attributes(:index => Index([[whole_axis(m) for m in x.dims[1:end-1]]; (first, 1, n)])))

"""One step of the loop over segments: a loop itself."""
function in_segment(body::Body, carry, x, n::Int, segment::Int, cut::Bool)
    carries = Tensor[cut ? as_row(STOP_GRADIENT(c), c.row) : c for c in flatten(carry)[1]]
    final, ys, structure = scanned(body, carries, Tensor[flatten(x)[1]...], n, segment, 0)
    return unflatten(body.carry, final), unflatten(structure, ys)
end

function plain_scan(body::Body, carries::Vector{Tensor}, xs::Vector{Tensor}, steps::Int)
    own = Tensor[Tensor[like(c) for c in carries]; Tensor[one_step(x) for x in xs]]
    n = length(carries)
    (outputs, structure), nodes = nested_trace() do
        result = body.f(unflatten(body.carry, own[1:n]), unflatten(body.step, own[n+1:end]))
        result isa Tuple && length(result) == 2 ||
            throw(ShapeError("scan: the function must return (carry, y), got $(typeof(result))"))
        new = alike_carry("scan", result[1], carries, body.carry)
        found, structure = flatten(result[2])
        T = isempty(new) ? nothing : new[1].eltype
        ys = Tensor[y isa Real && T !== nothing ? as_tensor(y, T) : as_output(y, "scan") for y in found]
        Tensor[new; ys], structure
    end
    isempty(outputs) && return Tensor[], Tensor[], structure
    check_eltypes("scan: the carry and what the steps return", outputs)
    check_float(outputs[1].eltype)
    drawn = findfirst(x -> (x.op::Op).random, nodes)
    drawn === nothing || throw(TraceError("scan: random masks cannot be drawn inside a loop's step ($(nodes[drawn].op.name)); " *
        "draw those of all steps before and pass them in xs"))
    program, outside = close_over(nodes, own, outputs)
    !state().symbolic && any(x -> x.data === nothing, outside) && throw(TraceError("scan: the function uses a " *
        "tensor that was kept from an earlier trace; return it from there, or compute it here"))
    found = repeated(Scan(program, n, length(xs), steps, false, false), Tensor[carries; xs; outside])
    return as_rows(carries, found[1:n]), found[n+1:length(outputs)], structure
end

function alike_carry(name::String, @nospecialize(new), carries::Vector{Tensor}, structure::Structure)
    leaves = flatten_as(new, structure, "$name: the carry")
    for (x, c, place) in zip(leaves, carries, paths(structure))
        x isa Union{Tensor,AbstractArray} && size(x) == size(c) && is_row(x) != c.row && throw(ShapeError(
            "$name: the carry$place is $(row_or_matrix(c.row)) and becomes $(row_or_matrix(!c.row)); begin with what the steps return"))
    end
    return Tensor[as_alike("$name: the carry$place must keep its size and element type", x, c)
                  for (x, c, place) in zip(leaves, carries, paths(structure))]
end
