"""
Rules of ChainRulesCore, read and given: a function with a rule of theirs is differentiated here by that rule, and a compiled
function of ours has a rule for whoever differentiates by theirs, such as Zygote in a layer of Flux or Lux.
"""
module TwinGradChainRulesCoreExt

using ChainRulesCore: ChainRulesCore, AbstractZero, NoTangent, frule, rrule, unthunk
using TwinGrad: TwinGrad, ConfigurationError, DTypeError, NotDifferentiableError, custom_rule, vjp

"""A derivative of theirs as one of ours: an array, a number, or `nothing` for a zero."""
ours(::AbstractZero) = nothing
ours(x::ChainRulesCore.AbstractThunk) = ours(unthunk(x))
ours(x::AbstractArray) = collect(x)
ours(x::Real) = x
ours(x) = throw(DTypeError("chain_rule: expected the derivative by an array or a number, got a $(typeof(x))"))

function TwinGrad.AD.by_chain_rules(f, name::String)
    function pullback(g, y, inputs...)
        found = rrule(f, inputs...)
        found === nothing && throw(NotDifferentiableError("chain_rule: there is no rrule of $name for " *
            join(map(typeof, inputs), ", ")))
        return map(ours, found[2](g)[2:end])
    end
    function pushforward(tangents, y, inputs...)
        found = frule((NoTangent(), tangents...), f, inputs...)
        found === nothing && throw(NotDifferentiableError("chain_rule: there is no frule of $name for " *
            join(map(typeof, inputs), ", ") * "; use reverse mode"))
        return ours(found[2])
    end
    return custom_rule(f; vjp=pullback, jvp=pushforward, name=name, opaque=true)
end

has_derivative(x) = x isa AbstractFloat || x isa AbstractArray{<:AbstractFloat}

function ChainRulesCore.rrule(compiled::TwinGrad.AD.Compiled, args...)
    places = findall(has_derivative, collect(Any, args))
    for (k, x) in enumerate(args)
        has_derivative(x) || !any(has_derivative, TwinGrad.AD.flatten(x)[1]) || throw(ConfigurationError("the rule of a " *
            "compiled function takes numbers and arrays, and argument $k is a $(typeof(x)) that holds some, which would be " *
            "given no derivative; pass them as arguments"))
    end
    function of_floats(x...)
        all_args = collect(Any, args)
        all_args[places] .= x
        return compiled.f(all_args...)
    end
    y, pull = vjp(of_floats, (args[k] for k in places)...)
    function pullback(seed)
        seed = unthunk(seed)
        seed isa AbstractZero && return (NoTangent(), map(_ -> NoTangent(), args)...)
        seed isa Union{Real,AbstractArray} || throw(ConfigurationError("the rule of a compiled function takes the derivative " *
            "by one number or array, got a $(typeof(seed)); return one array from the function"))
        found = pull(seed isa AbstractArray ? convert(Array, seed) : seed)
        partials = collect(Any, map(_ -> NoTangent(), args))
        partials[places] .= found
        return (NoTangent(), partials...)
    end
    return y, pullback
end

end
