"""
C-callable entry points to a programmer's own functions: what a program in another language, in the same process, needs to
call a function of arrays that is written in Julia, and its derivative.

Arguments are described by integers: for each its element type (32, 64: a float of that many bits; 1: Int64), the number of
its axes, and their lengths. Memory is the caller's, in Julia's order; arguments without axes reach the function as
numbers. An argument of integers has no derivative.

- `define(code, name, replay)` is called in Julia and gives the number of a function: of `name`, or of what the code
  evaluates to when `name` is empty. The code is run as it is, in a separate module where `using TwinGrad` holds: it must be
  as trusted as the program that calls this. With `replay` the function is traced once for each combination of sizes and
  replayed (see [`compile`](@ref)); without, it runs at every call.
- `call(function, n, description, addresses, result)`: compute the function of `n` arguments and keep the result; `result`
  gets its description, of at most `2 + MOST_AXES` integers.
- `take(function, out)`: copy the kept result out.
- `pull(function, n, description, addresses, out)`: the products of a seed, of the result's size and type, with the
  derivatives by each argument, stored at the addresses `out` (null: not wanted). The seed is described and given last.
- `derive(function, by, needs_grad)` is called in Julia and gives the number of another function, which can be differentiated
  like any: for `by` above 0 that of the arguments and a seed, which gives the product of the seed with the derivative by
  that argument; for 0 that of the arguments and the tangents of those that are `needs_grad`, which gives the result's.
- `forget(function)`.

All return a status as the entry points of `entry.jl` do, and leave their message where those do.
"""
module Functions

using ..AD: AD, ConfigurationError, NotDifferentiableError, ShapeError, compile, grad, gradient, jvp
using ..Entry: OK, guarded

const MOST_AXES = 32
const TYPES = Dict{Int64,DataType}(1 => Int64, 32 => Float32, 64 => Float64)
const CODES = Dict{DataType,Int64}(T => code for (code, T) in TYPES)

mutable struct Wrapped
    name::String
    f::Any        # the function itself, in the newest world
    replay::Bool
    forward::Any  # what computes its value, and
    pull::Any     # what computes its gradients from a seed and the arguments
    result::Any
end

"""A function in the newest world: code that is evaluated after this was compiled is not seen from here otherwise."""
struct Newest
    f::Any
end
(it::Newest)(args...) = Base.invokelatest(it.f, args...)

const FUNCTIONS = Dict{Int64,Wrapped}()
const COUNT = Ref{Int64}(0)

function define(code::String, name::String, replay::Bool)
    # A module of Main: one that is made by Module() belongs to nobody, and Julia 1.5 collects it while its code is in use.
    place = Core.eval(Main, Expr(:module, true, gensym("TwinGradFunction"), Expr(:block)))
    Core.eval(place, :(const TwinGrad = $(parentmodule(@__MODULE__))))
    Core.eval(place, :(using .TwinGrad))
    value = include_string(place, code, isempty(name) ? "function" : name)
    if !isempty(name)
        isdefined(place, Symbol(name)) || throw(ConfigurationError("the code defines no $name"))
        value = getfield(place, Symbol(name))
    end
    value isa Function || throw(ConfigurationError(
        "the code must end with a function, or name one that it defines; its value is a $(typeof(value))"))
    return keep(isempty(name) ? "the function" : name, Newest(value), replay)
end

function keep(name::String, @nospecialize(f), replay::Bool)
    pull(seed, args...) = gradient(weighted(f, seed), args...)
    COUNT[] += 1
    FUNCTIONS[COUNT[]] = Wrapped(name, f, replay, replay ? compile(f) : f, replay ? compile(pull) : pull, nothing)
    return COUNT[]
end

"""The function whose gradients are the products of a seed with the derivatives of `f`."""
function weighted(f, seed)
    return function (xs...)
        y = f(xs...)
        size(y) == size(seed) ||  # which would be broadcast
            throw(ShapeError("the seed must have the result's size $(size(y)), and has $(size(seed))"))
        return sum(y .* seed)
    end
end

function derive(number::Int64, by::Int64, needs_grad::Vector{Bool})
    it, n = wrapped(number), length(needs_grad)
    by_argument(xs...) = grad(weighted(it.f, xs[end]); argnums=by)(xs[1:end-1]...)
    function tangent(xs...)
        given = Iterators.Stateful(xs[n+1:end])
        return jvp(it.f, xs[1:n], Tuple(needs ? popfirst!(given) : nothing for needs in needs_grad))[2]
    end
    return by > 0 ? keep("the derivative by argument $by of $(it.name)", by_argument, it.replay) :
        keep("the tangent of $(it.name)", tangent, it.replay)
end

function wrapped(number::Int64)
    haskey(FUNCTIONS, number) || throw(ConfigurationError("there is no function $number: it was forgotten, or never made"))
    return FUNCTIONS[number]
end

"""
The arguments that integers describe, in the caller's memory. It is the caller's again after this call, so a function that
runs as it is, and may keep its arguments or write to them, is given copies; one that is replayed can do neither.
"""
function arguments(it::Wrapped, n::Int64, description::Ptr{Int64}, addresses::Ptr{Ptr{Cvoid}})
    args = Any[]
    at = 1
    for i in 1:n
        T, axes = TYPES[unsafe_load(description, at)], unsafe_load(description, at + 1)
        dims = ntuple(k -> Int(unsafe_load(description, at + 1 + k)), axes)
        array = unsafe_wrap(Array, Ptr{T}(unsafe_load(addresses, i)), dims)
        push!(args, axes == 0 ? array[] : it.replay ? array : copy(array))
        at += 2 + axes
    end
    return args
end

function call(number::Int64, n::Int64, description::Ptr{Int64}, addresses::Ptr{Ptr{Cvoid}}, result::Ptr{Int64})::Cint
    return guarded(identity) do
        it = wrapped(number)
        it.result = nothing  # of an earlier call
        y = it.forward(arguments(it, n, description, addresses)...)
        T = y isa AbstractArray ? eltype(y) : typeof(y)
        y isa Union{Real,AbstractArray} && haskey(CODES, T) && ndims(y) <= MOST_AXES || throw(ShapeError(
            "$(it.name) must return a number or an array of Float32, Float64 or Int64, and returns a $(typeof(y))"))
        it.result = y isa Array ? y : y isa Real ? fill(y) : Array(y)
        for (i, value) in enumerate((CODES[T], ndims(y), size(y)...))
            unsafe_store!(result, value, i)
        end
        OK
    end
end

function take(number::Int64, out::Ptr{Cvoid})::Cint
    return guarded(identity) do
        it = wrapped(number)
        it.result === nothing && throw(ConfigurationError("$(it.name) has not been called"))
        store!(out, it.result)
        it.result = nothing
        OK
    end
end

function pull(number::Int64, n::Int64, description::Ptr{Int64}, addresses::Ptr{Ptr{Cvoid}}, out::Ptr{Ptr{Cvoid}})::Cint
    return guarded(identity) do
        it = wrapped(number)
        given = arguments(it, n + 1, description, addresses)
        found = it.pull(given[end], given[1:end-1]...)
        for (i, (x, g)) in enumerate(zip(given, found))
            address = unsafe_load(out, i)
            address == C_NULL && continue
            g === nothing && throw(NotDifferentiableError("$(it.name): argument $i is of $(eltype(x)), which has no derivative"))
            store!(address, g isa AbstractArray ? convert(Array{eltype(x)}, g) : fill(convert(typeof(x), g)))
        end
        OK
    end
end

store!(out::Ptr{Cvoid}, x::Array{T}) where {T} = GC.@preserve x unsafe_copyto!(Ptr{T}(out), pointer(x), length(x))

forget(number::Int64)::Cint = guarded(identity) do
    wrapped(number)
    delete!(FUNCTIONS, number)
    OK
end

call_pointer() = @cfunction(call, Cint, (Int64, Int64, Ptr{Int64}, Ptr{Ptr{Cvoid}}, Ptr{Int64}))
take_pointer() = @cfunction(take, Cint, (Int64, Ptr{Cvoid}))
pull_pointer() = @cfunction(pull, Cint, (Int64, Int64, Ptr{Int64}, Ptr{Ptr{Cvoid}}, Ptr{Ptr{Cvoid}}))
forget_pointer() = @cfunction(forget, Cint, (Int64,))

end
