"""
This engine as a backend of DifferentiationInterface, by its name `AutoTwinGrad`: gradients and products with the Jacobian in
reverse and forward mode, from which that package makes all its other operators.
"""
module TwinGradDifferentiationInterfaceExt

import DifferentiationInterface as DI
using DifferentiationInterface: ADTypes
using TwinGrad: TwinGrad, GraphNode, compile, jacobian, jvp, stack, value_and_grad, vjp

struct Backend <: ADTypes.AbstractADType
    compile::Bool
end
TwinGrad.AD.backend_of(compile::Bool) = Backend(compile)
Base.show(io::IO, backend::Backend) = print(io, "AutoTwinGrad(; compile=", backend.compile, ")")

ADTypes.mode(::Backend) = ADTypes.ForwardOrReverseMode()
DI.check_available(::Backend) = true
DI.inplace_support(::Backend) = DI.InPlaceNotSupported()

"""The function of its first argument alone."""
of_first(f, contexts) = x -> as_array(f(x, map(DI.unwrap, contexts)...))

"""A vector written as `[a, b]`, which holds tensors here and numbers elsewhere, as the one array that it stands for."""
as_array(y) = y isa AbstractVector && any(e -> e isa GraphNode, y) ? stack(collect(y)) : y

# Products with the Jacobian

function DI.prepare_pushforward_nokwarg(strict::Val, f, backend::Backend, x, tx::NTuple, contexts::Vararg{DI.Context})
    return DI.NoPushforwardPrep(DI.signature(f, backend, x, tx, contexts...; strict))
end

function DI.value_and_pushforward(f, prep::DI.NoPushforwardPrep, backend::Backend, x, tx::NTuple, contexts::Vararg{DI.Context})
    DI.check_prep(f, prep, backend, x, tx, contexts...)
    found = map(dx -> jvp(of_first(f, contexts), (x,), (dx,)), tx)
    return found[1][1], map(last, found)
end

"""The value and the pullback at a point, for as many seeds as one likes."""
struct PullbackAtPoint{SIG,Y,P} <: DI.PullbackPrep{SIG}
    _sig::Val{SIG}
    y::Y
    pull::P
end

function DI.prepare_pullback_nokwarg(strict::Val, f, backend::Backend, x, ty::NTuple, contexts::Vararg{DI.Context})
    return DI.NoPullbackPrep(DI.signature(f, backend, x, ty, contexts...; strict))
end

function DI.prepare_pullback_same_point(f, prep::DI.NoPullbackPrep, backend::Backend, x, ty::NTuple,
        contexts::Vararg{DI.Context})
    DI.check_prep(f, prep, backend, x, ty, contexts...)
    signature = DI.signature(f, backend, x, ty, contexts...; strict=DI.is_strict(prep))
    return PullbackAtPoint(signature, vjp(of_first(f, contexts), x)...)
end

function DI.value_and_pullback(f, prep::DI.NoPullbackPrep, backend::Backend, x, ty::NTuple, contexts::Vararg{DI.Context})
    DI.check_prep(f, prep, backend, x, ty, contexts...)
    y, pull = vjp(of_first(f, contexts), x)
    return y, map(only ∘ pull, ty)
end

function DI.value_and_pullback(f, prep::PullbackAtPoint, backend::Backend, x, ty::NTuple, contexts::Vararg{DI.Context})
    DI.check_prep(f, prep, backend, x, ty, contexts...)
    return copy(prep.y), map(only ∘ prep.pull, ty)
end

# Gradients and Jacobians

"""The function of value and gradient, compiled if the backend says so."""
struct GradientPrep{SIG,F} <: DI.GradientPrep{SIG}
    _sig::Val{SIG}
    value_and_gradient::F
end

struct JacobianPrep{SIG,F} <: DI.JacobianPrep{SIG}
    _sig::Val{SIG}
    value_and_jacobian::F
end

function DI.prepare_gradient_nokwarg(strict::Val, f, backend::Backend, x, contexts::Vararg{DI.Context})
    both = value_and_grad(f)
    return GradientPrep(DI.signature(f, backend, x, contexts...; strict), backend.compile ? compile(both) : both)
end

function DI.prepare_jacobian_nokwarg(strict::Val, f, backend::Backend, x, contexts::Vararg{DI.Context})
    both(x, rest...) = (f(x, rest...), jacobian(x -> as_array(f(x, rest...)), x))
    return JacobianPrep(DI.signature(f, backend, x, contexts...; strict), both)
end

for (operator, Prep) in ((:gradient, GradientPrep), (:jacobian, JacobianPrep))
    both, in_place, both_in_place = (Symbol(name) for name in
        ("value_and_$operator", "$(operator)!", "value_and_$(operator)!"))
    @eval function DI.$both(f, prep::$Prep, backend::Backend, x, contexts::Vararg{DI.Context})
        DI.check_prep(f, prep, backend, x, contexts...)
        return prep.$both(x, map(DI.unwrap, contexts)...)
    end
    @eval DI.$operator(f, prep::$Prep, backend::Backend, x, contexts::Vararg{DI.Context}) =
        DI.$both(f, prep, backend, x, contexts...)[2]
    @eval DI.$in_place(f, out, prep::$Prep, backend::Backend, x, contexts::Vararg{DI.Context}) =
        copyto!(out, DI.$operator(f, prep, backend, x, contexts...))
    @eval function DI.$both_in_place(f, out, prep::$Prep, backend::Backend, x, contexts::Vararg{DI.Context})
        y, found = DI.$both(f, prep, backend, x, contexts...)
        return y, copyto!(out, found)
    end
end

end
