# The table of operation codes, and the one branch over it.

const CODES = Dict{Symbol,Int}()
const BRANCHES = Expr[]

function operation!(name::Symbol, call::Expr)
    CODES[name] = length(BRANCHES) + 1
    push!(BRANCHES, call)
end

for (name, f) in (:neg => :-, :square => :square, :reciprocal => :inv, :exp => :fast_exp, :expm1 => :fast_expm1,
    :log => :fast_log, :log1p => :fast_log1p, :sqrt => :fast_sqrt, :arcsin => :plain_asin, :arccos => :plain_acos,
    :arctan => :plain_atan, :sinh => :plain_sinh, :cosh => :plain_cosh, :tanh => :fast_tanh,
    :sigmoid => :fast_sigmoid, :softplus => :fast_softplus, :relu => :relu, :step => :step, :sign => :signum,
    :abs => :abs, :copy => :identity)
    operation!(name, :(unary!($f, x)))
end
for (name, fast, slow) in ((:sin, :fast_sin, :slow_sin), (:cos, :fast_cos, :slow_cos), (:tan, :fast_tan, :slow_tan))
    operation!(name, :(guarded!($fast, $slow, x)))
end
for (name, f) in (:add => :+, :sub => :-, :mul => :*, :div => :/, :pow => :plain_pow, :maximum => :larger,
    :minimum => :smaller, :less => :less, :less_equal => :less_equal, :greater => :greater,
    :greater_equal => :greater_equal, :equal => :equal, :not_equal => :not_equal, :tanh_gradient => :tanh_gradient,
    :sigmoid_gradient => :sigmoid_gradient, :relu_gradient => :relu_gradient, :add_tanh => :add_tanh,
    :add_sigmoid => :add_sigmoid, :add_relu => :add_relu)
    operation!(name, :(binary!($f, x)))
end
operation!(:clip, :(ternary!(limited, x)))
operation!(:where, :(ternary!(chosen, x)))
operation!(:max, :(extremum!(larger, x)))
operation!(:min, :(extremum!(smaller, x)))
for name in (:fill, :whole_power, :sum, :shift, :normalise, :add_log_sum, :subtract_log_sum, :norm, :cross_entropy,
    :cross_entropy_gradient, :gather, :scatter, :dropout_mask, :matmul)
    operation!(name, :($(Symbol(name, :!))(x)))
end
operation!(:to_other, :(convert!(other(T), T, x)))
operation!(:to_int, :(convert!(Int64, T, x)))
operation!(:from_int, :(convert!(T, Int64, x)))
other(::Type{Float32}) = Float64
other(::Type{Float64}) = Float32

"""The branches over codes first to last, halved until one is left."""
function branch(first::Int, last::Int)
    first == last && return :($(BRANCHES[first]); nothing)
    middle = (first + last) >> 1
    return Expr(:if, :(x.code <= $middle), branch(first, middle), branch(middle + 1, last))
end

# Do what one instruction says: a static branch over all operations, without dynamic dispatch, without allocation.
@eval @inline function execute!(x::Instruction{T}) where {T}
    $(branch(1, length(BRANCHES)))
    return nothing
end

"""
    execute!(code::Vector{Instruction{T}}, first, last)

Do the instructions from `first` to `last` in order.
"""
@noinline function execute!(code::Vector{Instruction{T}}, first::Int, last::Int) where {T}
    for i in first:last
        execute!(@inbounds code[i])
    end
    return nothing
end
