# Optimizers: one update rule each, run over the flat parameter vector in place.
#
# The formulas and the places of epsilon are PyTorch's, so that the same settings mean the same thing there. A rule is a
# loop over one segment of the vector: the trainer gives each thread a segment, or, where gradients are summed up just
# before, blocks of it that fit the cache together with them.

"""
    Optimizer

What all optimizers (the papers' DescentMethod) share: `learning_rate`; `weight_decay`, which adds `weight_decay *
parameters` to the gradient (in [`AdamW`](@ref) it is decoupled from it); `clip_value`, which limits every element of the
gradient to ±`clip_value`; and `clip_norm`, which then limits the norm of the whole gradient. All settings can be set at any
time and hold from the next step on. What a rule keeps between steps is in a `State`.
"""
abstract type Optimizer end
"""The papers' name for [`Optimizer`](@ref)."""
const DescentMethod = Optimizer

# A smaller epsilon would vanish in Float32 and leave 0 / 0 where a gradient is zero.
const SMALLEST_EPS = 1e-30

function setting(@nospecialize(who), name::String, @nospecialize(value); at_least=-Inf, above=-Inf, below=Inf)
    if value isa Real && !(value isa Bool) && isfinite(value) && at_least <= value < below && value > above
        return Float64(value)
    end
    limits = String[]
    at_least > -Inf && push!(limits, ">= $at_least")
    above > -Inf && push!(limits, "> $above")
    below < Inf && push!(limits, "< $below")
    throw(ConfigurationError("$who: $name must be a finite number $(join(limits, " and ")), got $(repr(value))"))
end
optional(who, name, value) = value === nothing ? Inf : setting(who, name, value; above=0.0)

# Clipping that is off limits to infinity.
common_settings(who, learning_rate, weight_decay, clip_norm, clip_value) = (
    setting(who, "learning_rate", learning_rate; at_least=0.0), setting(who, "weight_decay", weight_decay; at_least=0.0),
    optional(who, "clip_norm", clip_norm), optional(who, "clip_value", clip_value))

# A setting that is set later is checked as those that an optimizer is made with.
Base.setproperty!(o::Optimizer, name::Symbol, @nospecialize(value)) = setfield!(o, name, checked_setting(o, name, value))

function checked_setting(o::Optimizer, name::Symbol, @nospecialize(value))
    who = String(nameof(typeof(o)))
    name in (:learning_rate, :weight_decay) && return setting(who, String(name), value; at_least=0.0)
    name in (:clip_norm, :clip_value) && return value isa Real && value == Inf ? Inf : optional(who, String(name), value)
    name in (:momentum, :alpha, :beta1, :beta2) && return setting(who, String(name), value; at_least=0.0, below=1.0)
    name === :eps && return setting(who, "eps", value; at_least=SMALLEST_EPS)
    return convert(fieldtype(typeof(o), name), value)
end

check_nesterov(nesterov::Bool, momentum::Float64) =
    nesterov && momentum == 0 && throw(ConfigurationError("SGD: nesterov needs a momentum above 0"))

"""
    SGD(learning_rate=0.01; momentum=0, nesterov=false, weight_decay=0, clip_norm=nothing, clip_value=nothing)

Gradient descent, with momentum and Nesterov's variant of it: `torch.optim.SGD` without dampening. Also `Descent`.

`velocity = momentum * velocity + gradient`; the step is `velocity`, or for Nesterov `gradient + momentum * velocity`,
times the learning rate.
"""
mutable struct SGD <: Optimizer
    learning_rate::Float64
    weight_decay::Float64
    clip_norm::Float64
    clip_value::Float64
    momentum::Float64
    nesterov::Bool
end

function SGD(learning_rate=0.01; momentum=0.0, nesterov::Bool=false, weight_decay=0.0, clip_norm=nothing,
        clip_value=nothing)
    momentum = setting("SGD", "momentum", momentum; at_least=0.0, below=1.0)
    check_nesterov(nesterov, momentum)
    return SGD(common_settings("SGD", learning_rate, weight_decay, clip_norm, clip_value)..., momentum, nesterov)
end
function Base.setproperty!(o::SGD, name::Symbol, @nospecialize(value))
    checked = checked_setting(o, name, value)
    name === :momentum && check_nesterov(o.nesterov, checked::Float64)
    name === :nesterov && check_nesterov(checked::Bool, o.momentum)
    return setfield!(o, name, checked)
end

"""Flux's name for [`SGD`](@ref)."""
const Descent = SGD
"""
    Momentum(learning_rate=0.01, momentum=0.9; ...)

[`SGD`](@ref) with momentum.
"""
Momentum(learning_rate=0.01, momentum=0.9; options...) = SGD(learning_rate; momentum=momentum, options...)

"""
    RMSProp(learning_rate=0.01, alpha=0.99; eps=1e-8, momentum=0, weight_decay=0, clip_norm=nothing, clip_value=nothing)

Gradient over the root of its running mean square: `torch.optim.RMSprop`, not centred.

`square = alpha * square + (1 - alpha) * gradient²`; the step is `gradient / (sqrt(square) + eps)`, collected in
`velocity` where there is momentum, times the learning rate.
"""
mutable struct RMSProp <: Optimizer
    learning_rate::Float64
    weight_decay::Float64
    clip_norm::Float64
    clip_value::Float64
    alpha::Float64
    eps::Float64
    momentum::Float64
end

RMSProp(learning_rate=0.01, alpha=0.99; eps=1e-8, momentum=0.0, weight_decay=0.0, clip_norm=nothing, clip_value=nothing) =
    RMSProp(common_settings("RMSProp", learning_rate, weight_decay, clip_norm, clip_value)...,
        setting("RMSProp", "alpha", alpha; at_least=0.0, below=1.0), setting("RMSProp", "eps", eps; at_least=SMALLEST_EPS),
        setting("RMSProp", "momentum", momentum; at_least=0.0, below=1.0))

for (name, decay, doc) in (
    (:Adam, 0.0, "Adam (Kingma and Ba 2015, algorithm 1) as `torch.optim.Adam` has it: eps beside the corrected root.\n\n" *
                 "`mean = beta1 * mean + (1 - beta1) * gradient` and `square` likewise of `gradient²`, both divided by\n" *
                 "`1 - beta^steps`; the step is `mean / (sqrt(square) + eps)` times the learning rate."),
    (:AdamW, 0.01, "Adam with decoupled weight decay (Loshchilov and Hutter 2019), as `torch.optim.AdamW` has it.\n\nThe " *
                   "parameters are first multiplied by `1 - learning_rate * weight_decay`; the gradient knows nothing of it."))
    who = String(name)
    head = "    $who(learning_rate=0.001, betas=(0.9, 0.999); eps=1e-8, weight_decay=$decay, clip_norm=nothing, " *
           "clip_value=nothing)\n\n"
    @eval begin
        @doc $(head * doc)
        mutable struct $name <: Optimizer
            learning_rate::Float64
            weight_decay::Float64
            clip_norm::Float64
            clip_value::Float64
            beta1::Float64
            beta2::Float64
            eps::Float64
        end
        function $name(learning_rate=0.001, betas=(0.9, 0.999); eps=1e-8, weight_decay=$decay, clip_norm=nothing,
                clip_value=nothing)
            betas isa Union{Tuple,AbstractVector} && length(betas) == 2 ||
                throw(ConfigurationError($who * ": betas must be two numbers, got $(repr(betas))"))
            return $name(common_settings($who, learning_rate, weight_decay, clip_norm, clip_value)...,
                setting($who, "betas[1]", betas[1]; at_least=0.0, below=1.0),
                setting($who, "betas[2]", betas[2]; at_least=0.0, below=1.0),
                setting($who, "eps", eps; at_least=SMALLEST_EPS))
        end
    end
end

"""Optimizers by the name that the bridge gives them."""
const OPTIMIZERS = Dict{String,Any}("sgd" => SGD, "rmsprop" => RMSProp, "adam" => Adam, "adamw" => AdamW)

"""
    read_optimizer(T, line)

The optimizer of type `T` with the settings of a [`Line`](@ref), which gives all of them but limits that there are not.
"""
function read_optimizer end

read_optimizer(::Type{SGD}, line::Line) = SGD(given(line, "learning_rate", Float64);
    momentum=given(line, "momentum", Float64), nesterov=given(line, "nesterov", Bool), keywords(line)...)
read_optimizer(::Type{RMSProp}, line::Line) = RMSProp(given(line, "learning_rate", Float64),
    given(line, "alpha", Float64); eps=given(line, "eps", Float64), momentum=given(line, "momentum", Float64),
    keywords(line)...)
read_optimizer(T::Type{<:Union{Adam,AdamW}}, line::Line) = T(given(line, "learning_rate", Float64),
    given(line, "betas", Vector{Float64}); eps=given(line, "eps", Float64), keywords(line)...)

keywords(line::Line) = (weight_decay=given(line, "weight_decay", Float64),
    clip_norm=given_or_nothing(line, "clip_norm", Float64))

"""Names of the vectors, each as long as the parameters, that a rule keeps between steps."""
state_names(o::SGD) = o.momentum > 0 ? (:velocity,) : ()
state_names(o::RMSProp) = o.momentum > 0 ? (:square, :velocity) : (:square,)
state_names(o::Union{Adam,AdamW}) = (:mean, :square)

"""What a rule keeps between steps: their number, and up to two vectors."""
mutable struct State{T}
    steps::Int
    first::Vector{T}
    second::Vector{T}
end

State{T}(optimizer::Optimizer, n::Int) where {T} = suit!(State{T}(0, T[], T[]), optimizer, n)

"""Make the vectors that a rule keeps, unless they are there: zeros; and drop others. Settings may change at any time."""
function suit!(state::State{T}, optimizer::Optimizer, n::Int) where {T}
    kept = length(state_names(optimizer))
    kept > 0 && length(state.first) < n && (state.first = AD.zeroed!(Vector{T}(undef, n)))
    kept > 1 && length(state.second) < n && (state.second = AD.zeroed!(Vector{T}(undef, n)))
    kept > 0 || isempty(state.first) || (state.first = T[])
    kept > 1 || isempty(state.second) || (state.second = T[])
    return state
end

"""
    step!(optimizer, state, vector, gradient)

Update `vector` in place from `gradient`, which clipping overwrites; what of it has no gradient, at its end, is left alone.
Throws a `NonFiniteError`, with the parameters
unchanged, if the norm is to be clipped and is NaN or infinite.
"""
function step!(optimizer::Optimizer, state::State{T}, vector::Vector{T}, gradient::Vector{T}) where {T}
    length(vector) >= length(gradient) || throw(ConfigurationError(
        "step!: expected a gradient of length $(length(vector)) at most, got $(length(gradient))"))
    suit!(state, optimizer, length(gradient))
    GC.@preserve vector gradient state begin
        n, g = length(gradient), pointer(gradient)
        optimizer.clip_value < Inf && clip!(g, T(optimizer.clip_value), 1, n)
        scale = 1.0
        if optimizer.clip_norm < Inf
            norm, unit = sqrt(Float64(squares(g, 1, n))), 1.0
            if norm == Inf  # finite numbers may have squares that are not
                unit = unit_of(largest(g, 1, n))
                scale!(g, T(1 / unit), 1, n)
                norm = unit * sqrt(Float64(squares(g, 1, n)))
            end
            isfinite(norm) || throw(NonFiniteError("$(typeof(optimizer)), step $(state.steps + 1): the norm of the " *
                "gradient is $norm; the parameters were left unchanged. Lower the learning rate, or look for NaN in the data"))
            scale = clip_scale(optimizer, norm) * unit
        end
        scale == 1 || scale!(g, T(scale), 1, n)
        state.steps += 1
        update!(optimizer, pointer(vector), g, pointer(state.first), pointer(state.second), 1, n, state.steps)
    end
    return nothing
end

# As torch.nn.utils.clip_grad_norm_ has it, the 1e-6 included.
clip_scale(o::Optimizer, norm::Float64) = min(1.0, o.clip_norm / (norm + 1e-6))

# The loops. Each works on the elements from `first` to `last`; the caller keeps the memory alive. `ivdep` holds: the
# vectors do not overlap.

load(p::Ptr, i) = unsafe_load(p, i)
store!(p::Ptr, v, i) = unsafe_store!(p, v, i)

# Processors take many times as long for numbers below the smallest normal one, and a running mean that is decayed never gets to
# zero by itself: what is nearly that small becomes zero, unless its root counts beside a very small epsilon.
least_kept(::Type{T}, eps::Float64=1.0) where {T} = eps >= 1e4 * sqrt(64 * floatmin(T)) ? 64 * floatmin(T) : zero(T)
kept(x, least) = ifelse(abs(x) < least, zero(x), x)

function update!(o::SGD, p::Ptr{T}, g::Ptr{T}, velocity::Ptr{T}, unused::Ptr{T}, first::Int, last::Int, steps::Int) where {T}
    rate, decay, momentum, least = T(o.learning_rate), T(o.weight_decay), T(o.momentum), least_kept(T)
    if o.momentum == 0
        @inbounds @simd ivdep for i in first:last
            store!(p, load(p, i) - rate * (load(g, i) + decay * load(p, i)), i)
        end
    elseif o.nesterov
        @inbounds @simd ivdep for i in first:last
            gi = load(g, i) + decay * load(p, i)
            v = kept(momentum * load(velocity, i) + gi, least)
            store!(velocity, v, i)
            store!(p, load(p, i) - rate * (gi + momentum * v), i)
        end
    else
        @inbounds @simd ivdep for i in first:last
            v = kept(momentum * load(velocity, i) + load(g, i) + decay * load(p, i), least)
            store!(velocity, v, i)
            store!(p, load(p, i) - rate * v, i)
        end
    end
    return nothing
end

function update!(o::RMSProp, p::Ptr{T}, g::Ptr{T}, square::Ptr{T}, velocity::Ptr{T}, first::Int, last::Int, steps::Int) where {T}
    rate, decay, alpha, eps, momentum = T(o.learning_rate), T(o.weight_decay), T(o.alpha), T(o.eps), T(o.momentum)
    rest, collects, least = T(1 - o.alpha), o.momentum > 0, least_kept(T, o.eps)
    if collects
        @inbounds @simd ivdep for i in first:last
            gi = load(g, i) + decay * load(p, i)
            s = kept(alpha * load(square, i) + rest * gi * gi, least)
            v = kept(momentum * load(velocity, i) + gi / (root(s) + eps), least)
            store!(square, s, i)
            store!(velocity, v, i)
            store!(p, load(p, i) - rate * v, i)
        end
    else
        @inbounds @simd ivdep for i in first:last
            gi = load(g, i) + decay * load(p, i)
            s = kept(alpha * load(square, i) + rest * gi * gi, least)
            store!(square, s, i)
            store!(p, load(p, i) - rate * (gi / (root(s) + eps)), i)
        end
    end
    return nothing
end

function update!(o::Union{Adam,AdamW}, p::Ptr{T}, g::Ptr{T}, mean::Ptr{T}, square::Ptr{T}, first::Int, last::Int, steps::Int) where {T}
    decay = o isa AdamW ? zero(T) : T(o.weight_decay)
    shrink = o isa AdamW ? T(1 - o.learning_rate * o.weight_decay) : one(T)
    beta1, beta2, rest1, rest2 = T(o.beta1), T(o.beta2), T(1 - o.beta1), T(1 - o.beta2)
    # The root's correction is moved onto eps and the learning rate: the same quotient, one division less.
    correction = sqrt(1 - o.beta2^steps)
    eps, rate = T(o.eps * correction), T(o.learning_rate * correction / (1 - o.beta1^steps))
    least = least_kept(T, o.eps)
    @inbounds @simd ivdep for i in first:last
        pi = load(p, i) * shrink
        gi = load(g, i) + decay * pi
        m = kept(beta1 * load(mean, i) + rest1 * gi, least)
        s = kept(beta2 * load(square, i) + rest2 * gi * gi, least)
        store!(mean, m, i)
        store!(square, s, i)
        store!(p, pi - rate * (m / (root(s) + eps)), i)
    end
    return nothing
end

root(x) = AD.Kernels.fast_sqrt(x)

function clip!(g::Ptr{T}, limit::T, first::Int, last::Int) where {T}
    @inbounds @simd ivdep for i in first:last
        x = load(g, i)
        store!(g, ifelse(x > limit, limit, ifelse(x < -limit, -limit, x)), i)
    end
end

function scale!(g::Ptr{T}, factor::T, first::Int, last::Int) where {T}
    @inbounds @simd ivdep for i in first:last
        store!(g, load(g, i) * factor, i)
    end
end

"""g += factor h"""
function add_scaled!(g::Ptr{T}, h::Ptr{T}, factor::T, first::Int, last::Int) where {T}
    @inbounds @simd ivdep for i in first:last
        store!(g, load(g, i) + factor * load(h, i), i)
    end
end

function squares(g::Ptr{T}, first::Int, last::Int) where {T}
    total = zero(T)
    @inbounds @simd for i in first:last
        total += load(g, i) * load(g, i)
    end
    return total
end

"""A power of two, about as large as a number, so that dividing by it rounds nothing."""
unit_of(x::Float64) = isfinite(x) ? ldexp(1.0, exponent(x)) : x

"""The largest absolute value of numbers of which none is NaN."""
function largest(g::Ptr{T}, first::Int, last::Int) where {T}
    most = zero(T)
    for i in first:last
        most = max(most, abs(load(g, i)))
    end
    return Float64(most)
end

function all_finite(g::Ptr{T}, n::Int) where {T}
    total = zero(T)
    @inbounds @simd for i in 1:n
        total += load(g, i) * zero(T)  # 0, or NaN for what is not finite
    end
    return total == 0
end
all_finite(values::Array) = GC.@preserve values all_finite(elements_of(values), length(values))
