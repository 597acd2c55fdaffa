# Function transforms: a function in, a function out. They work on nested containers of arrays, inside each other to any
# order, and inside functions that are compiled.

# Calls ----------------------------------------------------------------------------------------------------------------

inside_transform() = (now = state(); now.differentiating || now.symbolic)

"""Whether results may be arrays: no tensor came in, and no transform or trace around is waiting for tensors."""
is_plain(leaves) = !inside_transform() && !any(x -> x isa Tensor, leaves)

"""A tensor that is differentiated by here and nowhere else, of this level."""
function own_variable(@nospecialize(x), level::Int)
    row = is_row(x)
    is_dual(x) && (x = as_tensor(x, float_of(eltype(x))))
    now = state()
    if x isa Tensor && (x.requires_grad || x.data === nothing || (x.op !== nothing && now.trace !== nothing && !now.symbolic))
        variable = IDENTITY(x)  # a new node: the tensor outside keeps its own place in the graph
    else
        variable = Variable(x isa Tensor ? value(x) : x)
    end
    variable.row = row
    variable.requires_grad, variable.level = true, level  # even what is a constant to all outside, as stop_gradient's result
    return variable
end

is_complex(@nospecialize(x)) = (x isa Number || x isa AbstractArray) && eltype(x) <: Complex
has_derivative(@nospecialize(x)) =
    ((x isa Tensor || x isa AbstractArray || x isa AbstractFloat) && eltype(x) in FLOATS) || is_dual(x)

function check_derivative(@nospecialize(x), name::String, n::Int, place::String)
    has_derivative(x) && return nothing
    T = x isa Tensor || x isa AbstractArray ? eltype(x) : typeof(x)
    advice = T <: Complex ? "pass its real and imaginary parts separately" :
        T <: Real ? "use an array of Float32 or Float64, for example Float64.(x), or do not differentiate by it" :
        "only numbers and arrays of Float32 or Float64 have; let the function capture it"
    throw(NotDifferentiableError("$name: argument $n$place is of $T, which has no derivative; $advice"))
end

"""
A function's call as a graph that derivatives are taken of, at its arguments' values.

- `variables`: the tensors that can be differentiated by, in the arguments' order.
- `arguments`: for each argument asked for, its structure.
- `variable_of_leaf`: for each leaf of these arguments its number among the variables, or 0.
- `outputs`, `result`: what the function returned.
- `plain`: whether derivatives are to be arrays.
- `theirs`: the caller's own arrays, which no result may share memory with.
- `level`: of the variables, see [`gradients`](@ref).
- `order`: what the outputs depend on, sorted.
- `trace`, `span`: the trace around it, if there is one, and the part of that which was made in the call.
- `on_duals`: whether derivatives that are to be arrays may depend on dual numbers of a derivative around.
"""
struct Linearized
    name::String
    variables::Vector{Tensor}
    arguments::Vector{Structure}
    variable_of_leaf::Vector{Vector{Int}}
    outputs::Vector{Tensor}
    result::Structure
    plain::Bool
    theirs::Vector{Any}
    level::Int
    order::Vector{Tensor}
    trace::Union{Nothing,Vector{Tensor}}
    span::UnitRange{Int}
    on_duals::Bool
end

"""
Call `f` with variables in place of the leaves of the arguments of these numbers. `strict`: every leaf must have a
derivative; otherwise those that have none are passed as they are.
"""
function linearize(name::String, @nospecialize(f), numbers::Vector{Int}, @nospecialize(args); strict::Bool=true)
    now = state()
    level, start, kept = next_level(), traced_length(now.trace), now.grad_enabled
    plain = is_plain(flatten(args)[1])
    given, theirs = Any[args...], Any[]
    variables, arguments, variable_of_leaf = Tensor[], Structure[], Vector{Int}[]
    return @entering grad_enabled=true differentiating=true begin
        for n in numbers
            1 <= n <= length(args) ||
                throw(ShapeError("$name: there is no argument $n, the function was called with $(length(args))"))
            leaves, structure = flatten(args[n])
            places = Int[]
            for (k, x) in enumerate(leaves)
                there = has_derivative(x)
                # For the error alone: `paths` makes the places of all leaves.
                !there && (strict || is_complex(x)) && check_derivative(x, name, n, paths(structure)[k])
                push!(places, there ? length(variables) + 1 : 0)
                there || continue
                x isa AbstractArray && push!(theirs, x)
                leaves[k] = own_variable(x, level)
                push!(variables, leaves[k])
            end
            push!(arguments, structure)
            push!(variable_of_leaf, places)
            given[n] = unflatten(structure, leaves)
        end
        found, result = flatten(f(given...))
        outputs = Tensor[as_output(x, name) for x in found]
        for y in outputs  # a leaf that is returned as it is: an array that the function captures
            y.op === nothing && y.data !== nothing && !any(x -> x === y, variables) && push!(theirs, (y.data::Memory).root)
        end
        order, below = sort_and_look_below(outputs, level)
        plain = plain && (isempty(below) || !kept || !depend_on_a_leaf(below))
        Linearized(name, variables, arguments, variable_of_leaf, outputs, result, plain, theirs, level, order, now.trace,
            start+1:traced_length(now.trace), plain && (depends_on_duals(below) || rules_hold_duals(order)))
    end
end

traced_length(trace) = trace === nothing ? 0 : length(trace)

as_output(x::Union{Tensor,AbstractArray{<:Real},Real}, ::String) = as_tensor(x)
as_output(@nospecialize(x), name::String) = throw(NotDifferentiableError(
    "$name: the function must return tensors, or containers of tensors, got $(typeof(x))" *
    (is_complex(x) ? "; return real and imaginary parts separately" : "")))

"""`f()`, with a graph only where someone outside of the call may ask for derivatives of derivatives."""
afterwards(@nospecialize(f), plain::Bool, on_duals::Bool) = plain && !on_duals ? without_grad(f) : f()
afterwards(@nospecialize(f), call::Linearized) = afterwards(f, call.plain, call.on_duals)

"""The only output, which must be a number."""
function scalar_output(call::Linearized)
    call.result == LEAF || throw(ShapeError("$(call.name): the function must return a number, got $(call.result); use " *
        "vjp or jacobian for other results"))
    output = call.outputs[1]
    length(output) == 1 || throw(ShapeError("$(call.name): the function must return a number, got an array of size " *
        "$(size(output)); use vjp or jacobian for arrays, or reduce it first, for example with sum()"))
    return output
end

unwrapped(@nospecialize(x::AbstractArray)) = ndims(x) == 0 ? x[] : x
unwrapped(x::Real) = x
"""An array as Julia has it: a number where it has no axes, and the transpose of a vector where it is one."""
as_julias(@nospecialize(x), row::Bool) = row ? vec(x)' : unwrapped(x)
only_one(x::AbstractArray) = x[1]

"""Results as the caller wants them: tensors, or arrays that share memory with no other result and nobody's array."""
function shown(found::Vector{Tensor}, plain::Bool, theirs::Vector{Any})
    plain || return collect(Any, found)
    roots = IdDict{Any,Nothing}(x => nothing for x in theirs)
    arrays = Any[]
    mixed = state().mixed
    for x in found
        if mixed && depends_on_duals(Tensor[x])
            push!(arrays, as_julias(with_duals(x), x.row))
            continue
        end
        a = value(x)
        root = (x.data::Memory).root
        (haskey(roots, root) || haskey(roots, a)) && (a = copy(a))
        roots[root] = nothing
        push!(arrays, as_julias(a, x.row))
    end
    return arrays
end

"""Results for every variable as one container for each argument; `nothing` for leaves without a derivative."""
by_argument(call::Linearized, found::Vector{Any}) = Any[
    unflatten(structure, Any[k == 0 ? nothing : found[k] for k in places])
    for (structure, places) in zip(call.arguments, call.variable_of_leaf)]

or_zeros(found, tensors::Vector{Tensor}) = Tensor[g === nothing ? zeros_like(x) : g for (g, x) in zip(found, tensors)]

# Gradients ------------------------------------------------------------------------------------------------------------

gradients(call::Linearized, outputs::Vector{Tensor}, seeds::Vector{Tensor}) =
    gradients(outputs, seeds, call.variables; level=call.level, span=state().trace === call.trace ? call.span : 1:0,
        order=call.order)

"""The value, and a gradient for each argument of these numbers."""
function differentiate(name::String, @nospecialize(f), numbers::Vector{Int}, @nospecialize(args); strict::Bool=true)
    call = linearize(name, f, numbers, args; strict=strict)
    output = scalar_output(call)
    seed = reshape_to(literal(output.eltype, 1), output.dims)
    found = afterwards(() -> or_zeros(gradients(call, Tensor[output], Tensor[seed]), call.variables), call)
    y = !call.plain ? output : call.on_duals ? only_one(with_duals(output)) : item(output)
    return y, by_argument(call, shown(found, call.plain, call.theirs))
end

"""
    value_and_grad(f; argnums=1)

A function that computes both the value of a scalar function and its gradient by one argument, or, with a tuple of
`argnums`, a tuple of gradients. An argument may be a nested container (tuple, named tuple, vector, dictionary) of arrays;
its gradient is one of the same structure. Called with arrays it returns arrays, which share memory with nothing else;
called with tensors, inside another transform, or with a function that captures a tensor for whose gradient `backward!` may be
called, it returns tensors.

Throws a `NotDifferentiableError` that names the argument, and the place in it, which has no derivative; a `ShapeError`
when the function does not return a single number.
"""
value_and_grad(@nospecialize(f); @nospecialize(argnums=1)) = Gradient(f, gradient_numbers(argnums), argnums isa Integer, true)

function gradient_numbers(@nospecialize(argnums))
    numbers = axis_list(argnums)
    allunique(numbers) || throw(ConfigurationError("grad: argnums must name each argument once, got $(repr(argnums))"))
    return numbers
end

"""
What [`value_and_grad`](@ref) and [`grad`](@ref) return: a struct rather than a closure, whose type would be another one for
every `f`, so that Julia would compile its call anew for each.
"""
struct Gradient <: Function
    f::Any
    numbers::Vector{Int}
    single::Bool
    with_value::Bool
end

function (g::Gradient)(@nospecialize(args...))
    output, found = differentiate("grad", g.f, g.numbers, args)
    gradient_ = g.single ? found[1] : Tuple(found)
    return g.with_value ? (output, gradient_) : gradient_
end

"""
    grad(f; argnums=1)

A function that computes the gradient of a scalar function; see [`value_and_grad`](@ref), also for what it throws.

    grad(x -> sum(x .^ 3))([1.0, 2.0]) == [3.0, 12.0]
"""
grad(@nospecialize(f); @nospecialize(argnums=1)) = Gradient(f, gradient_numbers(argnums), argnums isa Integer, false)

"""
    gradient(f, args...)

The gradients of a scalar function by all its arguments, as a tuple: Flux's and Zygote's name and form. Arguments, and
parts of containers, that have no derivative (integers, say) give `nothing`. Throws as [`value_and_grad`](@ref) does.
"""
gradient(@nospecialize(f), @nospecialize(args...)) = withgradient(f, args...).grad

"""
    withgradient(f, args...)

The value and the gradients of a scalar function, as `(val = ..., grad = ...)`; see [`gradient`](@ref).
"""
function withgradient(@nospecialize(f), @nospecialize(args...))
    any(x -> has_derivative(x) || is_complex(x), flatten(args)[1]) ||
        throw(NotDifferentiableError("gradient: no argument is of Float32 or Float64"))
    output, found = differentiate("gradient", f, collect(1:length(args)), args; strict=false)
    return (val=output, grad=Tuple(found))
end

# Products with the Jacobian -------------------------------------------------------------------------------------------

"""
    vjp(f, args...)

The value of a function and its pullback: `pull(seed)` gives the vector-Jacobian products by all arguments, as a tuple.
Arguments and result may be containers; the seed is one like the result, and each product one like its argument.

The values stay in memory as long as the pullback does. It throws an `InPlaceError` if an array that it needs was changed
in place meanwhile, since the derivative would be that of neither the old nor the new values.
"""
function vjp(@nospecialize(f), @nospecialize(args...))
    call = linearize("vjp", f, collect(1:length(args)), args)
    function pull(@nospecialize(seed))
        seeds = alike("vjp: the seed", seed, call.outputs, call.result)
        plain = call.plain && is_plain(flatten(seed)[1])
        on_duals = plain && (call.on_duals || depends_on_duals(seeds))
        found = afterwards(() -> gradients(call, call.outputs, seeds), plain, on_duals)
        theirs = Any[call.theirs; Any[x for x in flatten(seed)[1] if x isa AbstractArray]]
        return Tuple(by_argument(call, shown(or_zeros(found, call.variables), plain, theirs)))
    end
    return unflatten(call.result, shown(call.outputs, call.plain, call.theirs)), pull
end

"""The leaves of `x` as tensors that match these in size and element type."""
function alike(name::String, @nospecialize(x), tensors::Vector{Tensor}, structure::Structure)
    leaves = flatten_as(x, structure, name)
    return Tensor[as_alike(name * place, leaf, t) for (leaf, t, place) in zip(leaves, tensors, paths(structure))]
end

function as_alike(name::String, @nospecialize(x), t::Tensor)
    x isa Union{Tensor,Real,AbstractArray{<:Real}} || throw(DTypeError("$name: expected $(t.eltype) of size $(size(t)), " *
        "got $(typeof(x))"))
    found = as_tensor(x, t.eltype)
    found.dims == t.dims || throw(ShapeError("$name: expected size $(size(t)), got $(size(found))"))
    found.eltype === t.eltype || throw(DTypeError("$name: expected $(t.eltype), got $(found.eltype)"))
    return found
end

"""
    jvp(f, args, tangents)

The value of a function and its directional derivative, by the ops' forward-mode rules in one pass beside the values.
`args` and `tangents` are tuples of the same length and structure; `nothing` stands for an argument without a tangent. Throws a
`ShapeError` for tangents that do not fit, and a `NotDifferentiableError` for an argument without a derivative.
"""
jvp(@nospecialize(f), @nospecialize(args::Tuple), @nospecialize(tangents::Tuple)) = pushed("jvp", f, args, tangents)

function pushed(name::String, @nospecialize(f), @nospecialize(args::Tuple), @nospecialize(tangents::Tuple))
    length(args) == length(tangents) ||
        throw(ShapeError("$name: expected $(length(args)) tangents, one for each argument, got $(length(tangents))"))
    numbers = Int[n for n in 1:length(args) if tangents[n] !== nothing]
    call = linearize(name, f, numbers, args)
    leaf_tangents, k = Dict{Tensor,Tensor}(), 0
    for (n, structure, places) in zip(numbers, call.arguments, call.variable_of_leaf)
        mine = call.variables[k+1:k+length(places)]
        k += length(places)
        merge!(leaf_tangents, Dict(zip(mine, alike("$name: tangent $n", tangents[n], mine, structure))))
    end
    directions = flatten(tangents)[1]
    plain = call.plain && !any(x -> x isa Tensor, directions)
    theirs = Any[call.theirs; Any[x for x in directions if x isa AbstractArray]]
    on_duals = plain && (call.on_duals || depends_on_duals(collect(Tensor, values(leaf_tangents))))
    found = afterwards(() -> pushed_forward(call.outputs, leaf_tangents, call.order), plain, on_duals)
    arrays = shown(Tensor[call.outputs; found], plain, theirs)
    n = length(call.outputs)
    return unflatten(call.result, arrays[1:n]), unflatten(call.result, arrays[n+1:end])
end

"""
    stop_gradient(x)

`x` itself, as a constant: its derivative is zero, in forward mode on dual numbers as well. `x` may be a container.
"""
function stop_gradient(@nospecialize(x))
    leaves, structure = flatten(x)
    return unflatten(structure, Any[leaf isa Union{Tensor,Elements} ? STOP_GRADIENT(leaf) : without_duals(leaf) for leaf in leaves])
end

"""
    AutoTwinGrad(; compile=false)

This engine as a backend of DifferentiationInterface, where that package is loaded (Julia 1.10 and later):

    using DifferentiationInterface, TwinGrad
    value_and_gradient(f, AutoTwinGrad(), x)

With `compile=true`, what `prepare_gradient` makes is a compiled function (see [`compile`](@ref)); all else is computed eagerly.
"""
AutoTwinGrad(; compile::Bool=false) = backend_of(compile)

# The extension has a method for a Bool.
backend_of(@nospecialize(compile)) = throw(ConfigurationError("AutoTwinGrad: DifferentiationInterface is not loaded; write " *
    "`using DifferentiationInterface` first, in Julia 1.10 or later"))
