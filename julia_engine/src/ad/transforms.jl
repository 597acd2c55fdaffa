# Function transforms: a function in, a function out. They work on nested use and inside traced functions.

# Gradients ------------------------------------------------------------------------------------------------------------

inside_transform() = (now = state(); now.differentiating || now.trace !== nothing)

"""A tensor that is differentiated by here and nowhere else."""
function own_variable(@nospecialize(x), n::Int)
    T = x isa Tensor || x isa AbstractArray ? eltype(x) : typeof(x)
    T in FLOATS || throw(NotDifferentiableError(
        "gradient: argument $n is of $T, which has no derivative; use an array of Float32 or Float64"))
    x isa Tensor && (x.requires_grad || x.data === nothing) && return IDENTITY(x)  # the tensor outside keeps its place
    return Variable(x isa Tensor ? value(x) : x)
end

"""The function's value and its derivatives, as tensors, by the arguments of these numbers."""
function differentiate(@nospecialize(f), numbers::Vector{Int}, @nospecialize(args))
    for n in numbers
        1 <= n <= length(args) ||
            throw(ShapeError("gradient: there is no argument $n, the function was called with $(length(args))"))
    end
    outside = inside_transform()
    now = state()
    recording, differentiating = now.recording, now.differentiating
    given = Any[args...]
    try
        now.recording = now.differentiating = true
        variables = Tensor[own_variable(args[n], n) for n in numbers]
        for (n, x) in zip(numbers, variables)
            given[n] = x
        end
        output = as_tensor(f(given...))
        length(output) == 1 ||
            throw(ShapeError("gradient: the function must return a number, got an array of size $(size(output))"))
        # Derivatives of derivatives are recorded only where someone outside may ask for them.
        now.recording = recording && (outside || any(x -> x isa Tensor && x.requires_grad, args))
        seed = reshape_to(literal(output.eltype, 1), output.dims)
        found = gradients(Tensor[output], Tensor[seed], variables)
        return output, Tensor[g === nothing ? zeros_like(x) : g for (g, x) in zip(found, variables)]
    finally
        now.recording, now.differentiating = recording, differentiating
    end
end

is_plain(@nospecialize(args)) = !inside_transform() && !any(x -> x isa Tensor, args)
shown(g::Tensor, plain::Bool) = plain ? unwrapped(value(g)) : g
unwrapped(x::AbstractArray) = ndims(x) == 0 ? x[] : x

"""
    value_and_grad(f; argnums=1)

A function that computes both the value of a scalar function and its gradient by one argument, or, with a tuple of
`argnums`, a tuple of gradients. It returns arrays when called with arrays, and tensors when called with tensors or
inside another transform.
"""
function value_and_grad(f; argnums=1)
    numbers = axis_list(argnums)
    return function (args...)
        output, found = differentiate(f, numbers, args)
        plain = is_plain(args)
        results = Any[shown(g, plain) for g in found]
        return (plain ? item(output) : output), (argnums isa Integer ? results[1] : Tuple(results))
    end
end

"""
    grad(f; argnums=1)

A function that computes the gradient of a scalar function; see [`value_and_grad`](@ref).

    grad(x -> sum(x .^ 3))([1.0, 2.0]) == [3.0, 12.0]
"""
grad(f; argnums=1) = (g = value_and_grad(f; argnums=argnums); (args...) -> g(args...)[2])

"""
    gradient(f, args...)

The gradients of a scalar function by all its arguments, as a tuple: Flux's and Zygote's name and form. Arguments that
have no derivative (integers, say) give `nothing`.
"""
gradient(f, args...) = withgradient(f, args...).grad

"""
    withgradient(f, args...)

The value and the gradients of a scalar function, as `(val = ..., grad = ...)`; see [`gradient`](@ref).
"""
function withgradient(f, args...)
    numbers = Int[n for (n, x) in enumerate(args) if
        (x isa Tensor || x isa AbstractArray || x isa AbstractFloat) && eltype(x) in FLOATS]
    isempty(numbers) && throw(NotDifferentiableError("gradient: no argument is of Float32 or Float64"))
    output, found = differentiate(f, numbers, args)
    plain = is_plain(args)
    results = Any[nothing for _ in args]
    for (n, g) in zip(numbers, found)
        results[n] = shown(g, plain)
    end
    return (val=plain ? item(output) : output, grad=Tuple(results))
end

"""
    vjp(f, args...)

The value of a function and its pullback: `pull(seed)` gives the vector-Jacobian products by all arguments, as a tuple.
"""
function vjp(f, args...)
    variables = Tensor[Variable(x isa Tensor ? value(x) : x) for x in args]
    output = as_tensor(f(variables...))
    function pull(seed)
        upstream = as_tensors((seed, output))[1]
        upstream.dims == output.dims ||
            throw(ShapeError("vjp: expected a seed of size $(size(output)), got $(size(upstream))"))
        found = no_grad(() -> gradients(Tensor[output], Tensor[upstream], variables))
        return Tuple(value(g === nothing ? zeros_like(x) : g) for (g, x) in zip(found, variables))
    end
    return value(output), pull
end

"""
    jvp(f, args, tangents)

The value of a function and its directional derivative, by the ops' forward-mode rules in one pass beside the values.
"""
function jvp(f, args::Tuple, tangents::Tuple)
    variables = Tensor[Variable(x isa Tensor ? value(x) : x) for x in args]
    output = as_tensor(f(variables...))
    moves = Dict{Tensor,Tensor}(x => as_tensors((t, x))[1] for (x, t) in zip(variables, tangents))
    return value(output), value(pushed_forward(output, moves))
end

"""The derivative of a recorded tensor when its leaves move by these tangents."""
function pushed_forward(output::Tensor, moves::Dict{Tensor,Tensor})
    no_grad() do
        for node in topological_sort(output)
            node.op === nothing && continue
            t = Any[get(moves, x, nothing) for x in node.inputs]
            all(isnothing, t) && continue
            op = node.op::Op
            op.jvp === nothing && continue
            moved_ = op.jvp(t, node, node.inputs, node.attrs)
            moved_ === nothing || (moves[node] = spread_to(moved_, node.dims))
        end
    end
    return get(moves, output, zeros_like(output))
end

"""
    jacobian(f, x)

The derivatives of all elements of `f(x)` (rows) by all elements of `x` (columns), as a matrix.
"""
function jacobian(f, x)
    y, pull = vjp(f, x)
    rows = similar(y, length(y), length(x))
    for i in 1:length(y)
        seed = fill!(similar(y), 0)
        seed[i] = 1
        rows[i, :] = vec(pull(seed)[1])
    end
    return rows
end

"""
    hvp(f, x, v)

The Hessian of a scalar function times a direction, as the gradient of the gradient's product with it.
"""
hvp(f, x, v) = grad(t -> sum(grad(f)(t) .* v))(x)

"""
    hessian(f, x)

The second derivatives of a scalar function by all elements of `x`, as a matrix.
"""
function hessian(f, x)
    columns = map(1:length(x)) do i
        v = fill!(similar(x), 0)
        v[i] = 1
        vec(hvp(f, x, v))
    end
    return hcat(columns...)
end
