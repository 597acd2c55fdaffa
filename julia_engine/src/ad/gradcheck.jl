# The gradient checker: an op's rules against finite differences, along random directions.

"""
    gradcheck(f, args...; rtol=1e-6, atol=1e-8, directions=3, seed=0)

Check the gradient of `f` by its Float64 arguments against central differences; others (labels) are passed on.

The result is projected on random vectors and the arguments are moved along random directions, so that one number per
direction checks the whole Jacobian: a rule wrong by 0.1 % anywhere is caught. The difference is extrapolated from two
step sizes (Richardson), which leaves an error of about 1e-10; where the two disagree, the function has a kink nearby and
the message says so.

Throws a `GradientCheckError` that gives both numbers; a `DTypeError` for Float32, whose differences are too coarse to
check anything; a `NotDifferentiableError` when no argument is of Float64, or one is a container of arrays.
"""
function gradcheck(@nospecialize(f), @nospecialize(args...); rtol::Float64=1e-6, atol::Float64=1e-8, directions::Int=3,
        seed::Int=0)
    random = MersenneTwister(seed)
    given, called = Any[args...], Ref{Any}(f)  # closures that held `f` itself would be compiled for each
    for (i, x) in enumerate(given)
        leaves, structure = flatten(x)
        structure === LEAF || any(leaf -> leaf isa Union{Tensor,AbstractArray{<:AbstractFloat}}, leaves) &&
            throw(NotDifferentiableError(
            "gradcheck: argument $i is $structure, and only arrays can be moved; give its arrays as separate arguments, " *
            "such as gradcheck((w, b) -> f((w=w, b=b)), w, b)"))
    end
    arrays = Any[x isa Tensor ? value(x) : x isa Real ? fill(x) : x for x in given]
    any(x -> eltype(x) === Float32, arrays) &&
        throw(DTypeError("gradcheck: Float32 is too coarse for finite differences; pass Float64 arrays"))
    active = Int[i for (i, x) in enumerate(arrays) if eltype(x) === Float64]
    isempty(active) && throw(NotDifferentiableError(
        "gradcheck: at least one argument of Float64 is needed to differentiate by"))
    as_point(x, i) = i in active ? Variable(x) : x
    evaluate(points) = as_tensor(called[](Any[as_point(x, i) for (i, x) in enumerate(points)]...))
    variables = Any[as_point(x, i) for (i, x) in enumerate(arrays)]
    output = as_tensor(called[](variables...))
    for k in 1:directions
        weights = randn(random, size(output)...)
        weights isa Number && (weights = fill(weights))
        found = no_grad(() -> gradients(Tensor[output], Tensor[Constant(weights)], Tensor[variables[i] for i in active]))
        steps = Any[randn_like(random, x) for x in arrays]
        analytic = 0.0
        for (i, g) in zip(active, found)
            g === nothing && continue
            size(g) == size(arrays[i]) || throw(GradientCheckError(
                "gradcheck: argument $i has size $(size(arrays[i])), its gradient $(size(g))"))
            analytic += sum(value(g) .* steps[i])
        end
        function difference(h)
            shifted(s) = Any[i in active ? as_array(x .+ s .* steps[i]) : x for (i, x) in enumerate(arrays)]
            return sum(weights .* (value(evaluate(shifted(h))) .- value(evaluate(shifted(-h))))) / 2h
        end
        coarse, fine = difference(2e-4), difference(1e-4)
        numeric = (4 * fine - coarse) / 3
        if !(abs(analytic - numeric) <= atol + rtol * max(abs(numeric), abs(analytic)))
            kink = abs(coarse - fine) > 1e-3 * max(abs(fine), abs(coarse), 1e-300) ?
                "; the two step sizes disagree, so there may be a kink within 2e-4 of this point" : ""
            throw(GradientCheckError(
                "gradcheck: direction $k: the gradient gives $analytic, finite differences $numeric$kink"))
        end
    end
    return nothing
end

as_array(x::AbstractArray) = x
as_array(x::Real) = fill(x)
randn_like(random, x) = reshape(randn(random, length(x)), size(x))
