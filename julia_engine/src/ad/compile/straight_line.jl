# Tapes whose values are all single numbers, as straight-line Julia code: an instruction costs several times what one
# addition does. The code is made from the program and the functions that the ops' records name, the same that the kernels run.

"""Where straight-line code is compiled, with the optimiser that loops have."""
module StraightLine

using ..Kernels: TURNS, add_relu, add_sigmoid, add_tanh, both_hold, chosen, equal, fails, fast_cos, fast_exp, fast_expm1, fast_log,
    fast_log1p, fast_sigmoid, fast_sin, fast_softplus, fast_sqrt, fast_tan, fast_tanh, greater, greater_equal, half_power, is_finite,
    is_infinite, is_nan, larger, less, less_equal, limited, mul_add, not_equal, one_holds, plain_acos, plain_asin, plain_atan, plain_cosh, plain_pow, plain_sinh,
    relu, relu_gradient, sigmoid_gradient, signum, slow_cos, slow_sin, slow_tan, smaller, square, step, tanh_gradient

Base.Experimental.@optlevel 3

@inline any_sin(x::T) where {T} = abs(x) <= T(TURNS) ? fast_sin(x) : slow_sin(x)
@inline any_cos(x::T) where {T} = abs(x) <= T(TURNS) ? fast_cos(x) : slow_cos(x)
@inline any_tan(x::T) where {T} = abs(x) <= T(TURNS) ? fast_tan(x) : slow_tan(x)
@noinline general_power(x, p) = plain_pow(x, p)  # not inlined: knowing the exponent, LLVM would round otherwise than the kernel
@inline third_power(x) = x * x * x
@inline fourth_power(x) = square(x * x)
@inline fifth_power(x) = x * square(x * x)

end

"""Powers whose exponent the program writes, which is no operand then."""
const ONE_OPERAND = (:half_power, :third_power, :fourth_power, :fifth_power)

const PER_FUNCTION = 250  # ops in one function: compiling one takes more than proportionally to its length
const STRAIGHT_MOST = 5_000  # ops: above, compiling takes longer than the tape is likely to run

"""
    Straight

Compiled straight-line code: it reads its arguments from `inputs`, and writes its results to `outputs` and what one of
its functions leaves to the next to `kept`. All of them are memory of elements of type `T`.
"""
struct Straight
    code::Ptr{Cvoid}
    T::DataType
    inputs::Vector{Float64}
    outputs::Vector{Float64}
    kept::Vector{Float64}
    arguments::Int
    results::Int
    running::Threads.Atomic{Int}  # 1 while a call uses this memory
end

"""The straight-line code of a program, or `nothing` where it has other values than numbers of one type."""
function straight(program::Program)
    (isempty(program.inputs) || Versions.writes_code()) && return nothing
    T = program.inputs[1].eltype
    suits(x::Tensor) = isempty(x.dims) && x.eltype === T
    T in FLOATS && all(suits, program.inputs) && length(program.equations) <= STRAIGHT_MOST || return nothing
    for e in program.equations
        e.op.scalar !== nothing && suits(output(e)) || return nothing
        all(a -> suits(a) && (a.data === nothing || a.literal), e.inputs) || return nothing
    end
    functions, kept = straight_functions(program, T)
    foreach(f -> Core.eval(StraightLine, f), functions)
    names = Symbol[f.args[1].args[1] for f in functions]
    name = length(names) == 1 ? names[1] : gensym("straight")
    length(names) == 1 || Core.eval(StraightLine, :(function $name(x, y, kept)
        $((:($f(x, y, kept)) for f in names)...)
        return nothing
    end))
    find = Core.eval(StraightLine, :(() -> @cfunction($name, Cvoid, (Ptr{$T}, Ptr{$T}, Ptr{$T}))))
    code = compiling(() -> Base.invokelatest(find))::Ptr{Cvoid}
    numbers(n) = zeros(Float64, max(n, 1))
    return Straight(code, T, numbers(length(program.inputs)), numbers(length(program.outputs)), numbers(kept),
        length(program.inputs), length(program.outputs), Threads.Atomic{Int}(0))
end

"""Run the code on numbers, and return what `read(code)` makes of its results before another call can write over them."""
@inline function after_run(read, code::Straight, numbers::Tuple)
    Versions.has_one_thread() || return after_run_alone(read, code, numbers)
    run!(code, numbers)
    return read(code)
end

@noinline function after_run_alone(read, code::Straight, numbers::Tuple)
    claim!(code.running)
    try
        run!(code, numbers)
        return read(code)
    finally
        code.running[] = 0
    end
end

function straight_functions(program::Program, T::DataType)
    equations = program.equations
    part = Dict{Tensor,Int}(output(e) => cld(i, PER_FUNCTION) for (i, e) in enumerate(equations))
    parts = max(1, cld(length(equations), PER_FUNCTION))
    number = Dict{Tensor,Int}(x => i for (i, x) in enumerate(program.inputs))
    result = Dict{Tensor,Int}(x => i for (i, x) in enumerate(program.outputs))
    place = Dict{Tensor,Int}()  # of what a later function needs
    for (i, e) in enumerate(equations), a in e.inputs
        here = cld(i, PER_FUNCTION)
        get(part, a, here) < here && get!(place, a, length(place) + 1)
    end
    functions = Expr[]
    for k in 1:parts
        lines, names = Expr[], Dict{Tensor,Symbol}()
        function operand(a::Tensor)
            a.literal && return T(item(a))
            return get!(names, a) do
                name = Symbol("v", length(names))
                from = haskey(number, a) ? :(unsafe_load(x, $(number[a]))) : :(unsafe_load(kept, $(place[a])))
                push!(lines, :($name = $from))
                name
            end
        end
        for e in equations[(k-1)*PER_FUNCTION+1:min(k * PER_FUNCTION, end)]
            x, f = output(e), e.op.scalar isa Function ? e.op.scalar(e.attrs) : e.op.scalar
            n = f in ONE_OPERAND ? 1 : length(e.inputs)
            call = :($f($((operand(a) for a in e.inputs[1:n])...)))
            name = names[x] = Symbol("v", length(names))
            push!(lines, :($name = $call))
            haskey(result, x) && push!(lines, :(unsafe_store!(y, $name, $(result[x]))))
            haskey(place, x) && push!(lines, :(unsafe_store!(kept, $name, $(place[x]))))
        end
        push!(functions, :(@noinline function $(gensym("straight"))(x::Ptr{$T}, y::Ptr{$T}, kept::Ptr{$T})
            $(lines...)
            return nothing
        end).args[3])
    end
    return functions, length(place)
end

"""Run the code on numbers."""
@inline function run!(code::Straight, numbers::Tuple{T,Vararg{T}}) where {T}
    GC.@preserve code begin
        x = Ptr{T}(pointer(code.inputs))
        for i in 1:length(numbers)
            unsafe_store!(x, numbers[i], i)
        end
        ccall(code.code, Cvoid, (Ptr{Cvoid}, Ptr{Cvoid}, Ptr{Cvoid}), x, pointer(code.outputs), pointer(code.kept))
    end
    return nothing
end

@inline result(code::Straight, ::Type{T}, i::Int) where {T} =
    GC.@preserve code unsafe_load(Ptr{T}(pointer(code.outputs)), i)
