# Forward mode and tensors inside each other.
#
# Where a derivative of forward mode meets tensors, it is one of ops, by their forward-mode rules. Where it has called a
# transform of tensors with dual numbers, these become tensors for the transform's time: leaves that keep the partials, by
# which its results are pushed forward to be dual numbers again.

# Tensors inside forward mode: derivatives by ops ------------------------------------------------------------------------

as_float(x::Tensor) = x
as_float(x::Real) = float(x)
as_float(x::AbstractArray) = eltype(x) in FLOATS || is_dual(x) ? x : float.(x)

"""What [`derivative`](@ref) returns, by the ops' forward-mode rules."""
function derivative_by_ops(@nospecialize(f), @nospecialize(x))
    length(x) == 1 || throw(ShapeError("derivative: expected a number, got a tensor of size $(size(x)); forward_gradient " *
        "and forward_jacobian take arrays"))
    run = Ref(0)  # of the dotted function whose elements `f` captures, if it does
    d = pushed("derivative", t -> noting_run(run, f(t)), (as_float(x),), (ones_like(x),))[2]
    return run[] == 0 ? d : Elements(as_tensor(d), run[])
end

function noting_run(run::Ref{Int}, @nospecialize(y))
    y isa Elements && (run[] = y.run)
    return y
end
ones_like(x::Tensor) = Constant(fill!(new_array(x.eltype, x.dims), 1))
ones_like(x) = 1

"""The derivative of a function of one number, for each element of a tensor."""
derivative_of_elements(@nospecialize(f), x::Elements) = Elements(as_tensor(
    pushed("derivative", t -> as_tensor(f(Elements(t, x.run))), (x.tensor,), (ones_like(x.tensor),))[2]), x.run)

"""What [`forward_gradient`](@ref) returns, by the ops' forward-mode rules."""
function forward_gradient_by_ops(@nospecialize(f), @nospecialize(x))
    g = jacobian_of("forward_gradient", v -> one_number(f(v)), as_float(x), :forward, nothing)
    return reshape(g, size(x))
end
one_number(x::Union{Tensor,Real}) = length(x) == 1 ? reshape_to(as_tensor(x), Int[]) : DualNumbers.number(Val(0), summary_of(x))
one_number(@nospecialize(x)) = DualNumbers.number(Val(0), x)
summary_of(x::Tensor) = Array(zeros(size(x)))

"""What [`forward_jacobian`](@ref) returns, by the ops' forward-mode rules."""
forward_jacobian_by_ops(@nospecialize(f), @nospecialize(x)) =
    jacobian_of("forward_jacobian", v -> one_vector(f(v)), as_float(x), :forward, nothing)

one_vector(x::Tensor) = vec(x)
one_vector(x::Real) = reshape_to(as_tensor(x), Int[1])
one_vector(x::AbstractArray{<:Union{Float32,Float64,DualNumber}}) = vec(as_tensor(x))
one_vector(x::Union{AbstractArray,Tuple}) = concatenate(Any[one_vector(e) for e in x], 1)
one_vector(@nospecialize(x)) = DualNumbers.elements(x)

# Dual numbers inside transforms of tensors ------------------------------------------------------------------------------

"""The float type at the bottom of dual numbers."""
float_of(::Type{<:Dual{N,T}}) where {N,T} = float_of(T)
float_of(T::Type) = T

# The input is the value; the attributes are the partials' level and the partials, an array each. Reverse mode and the
# derivatives around see through it.
const DUAL = Op("dual", infer_same; view=itself, backward=Any[(g, y, inputs, attrs) -> g],
    jvp=(t, y, inputs, attrs) -> t[1], attrs=[:level, :partials], doc="a dual number as a tensor")

as_tensor(x::DualNumber, @nospecialize(T)=float_of(typeof(x))) =
    dual_leaf(fill(x), as_tensor(x.value, T))
as_tensor(x::AbstractArray{<:DualNumber}, @nospecialize(T)=Float64) =
    dual_leaf(x, as_tensor(map(d -> d.value, x), T))

function dual_leaf(x::AbstractArray{<:Dual{N,T,L}}, y::Tensor) where {N,T,L}
    y.eltype in FLOATS || throw(DTypeError("dual numbers of $T meet a tensor; tensors hold Float32 or Float64"))
    state().mixed = true
    partials_ = Any[map(d -> partials(d)[k], x) for k in 1:N]
    return Tensor(y.data, y.eltype, y.dims, DUAL, Tensor[y], attributes(:level => L, :partials => partials_), true, nothing, "", "", false)
end

"""Whether tensors were computed from dual numbers of a derivative around."""
depends_on_duals(tensors::Vector{Tensor}) = state().mixed && any(x -> x.requires_grad || x.op !== nothing, tensors) &&
    any(x -> x.op === DUAL, topological_sort(tensors))

"""The array of a tensor that was computed from dual numbers, of dual numbers."""
function with_duals(x::Tensor)
    levels = unique(Int[node.attrs.level for node in topological_sort(x) if node.op === DUAL])
    return with_grad(() -> with_levels(x, sort!(levels; rev=true)))
end

function with_levels(x::Tensor, levels::Vector{Int})
    isempty(levels) && return copy(value(x))
    order, inner = topological_sort(x), levels[2:end]
    leaves = Tensor[node for node in order if node.op === DUAL && node.attrs.level == levels[1]]
    values = with_levels(x, inner)
    isempty(leaves) && return values
    counts = unique(Int[length(leaf.attrs.partials) for leaf in leaves])
    length(counts) == 1 || throw(ShapeError("dual numbers with $(counts[1]) and with $(counts[2]) partials of one level cannot " *
        "meet; each belongs to a separate derivative, and was kept beyond it"))
    parts = Any[]
    for k in 1:counts[1]
        tangents = Dict{Tensor,Tensor}(y => as_tensor(converted_to(y.eltype, y.attrs.partials[k]), y.eltype) for y in leaves)
        push!(parts, with_levels(pushed_forward(Tensor[x], tangents, order)[1], inner))
    end
    T = promote_type(eltype(values), map(eltype, parts)...)
    return DualNumbers.as_duals(convert(AbstractArray{T}, values), map(p -> convert(AbstractArray{T}, p), parts),
        Val(counts[1]), Val(levels[1]))
end

converted_to(T::DataType, x::AbstractArray{<:DualNumber}) = x
converted_to(T::DataType, x::AbstractArray) = T.(x)

with_grad(@nospecialize(f)) = @entering grad_enabled=true f()

"""The same without derivatives of forward mode: numbers, arrays, and containers of them."""
without_duals(x::DualNumber) = without_duals(x.value)
without_duals(x::AbstractArray{<:DualNumber}) = map(without_duals, x)
function without_duals(@nospecialize(x))
    kind_of(x) === :leaf && return x
    leaves, structure = flatten(x)
    any(is_dual, leaves) || return x
    return unflatten(structure, Any[without_duals(leaf) for leaf in leaves])
end

# A function of one number that is dotted over a tensor, and holds a dual number.
for f in (:+, :-, :*, :/, :^, :max, :min, :<, :<=, :>, :>=, :(==), :!=)
    @eval Base.$f(a::Elements, b::Dual) = of_elements(DOTTED[$f], (a, b))
    @eval Base.$f(a::Dual, b::Elements) = of_elements(DOTTED[$f], (a, b))
end
