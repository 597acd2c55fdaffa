# The table of kernels, and how instructions reach them.
#
# Every operation is compiled into a separate function with one argument, the instruction's address, when it is first
# used for an element type. An instruction holds that function's address; running a tape is a loop that calls one address
# after the other. That is what a branch over operation codes compiles to, without compiling the operations that nobody
# uses.

"""
What finds the address of a kernel: the function's name, and for Float32 and for Float64 a function that returns the address.
"""
struct Kernel
    name::Symbol
    single::Function
    double::Function
end

"""The kernels by operation."""
const KERNELS = Dict{Symbol,Kernel}()

"""Addresses already found."""
const ADDRESSES = Dict{Tuple{Symbol,Bool},Ptr{Cvoid}}()
const ADDRESSES_LOCK = ReentrantLock()

function __init__()
    empty!(ADDRESSES)  # those found while the package was compiled mean nothing in this process
    VECTOR_BYTES[] = find_vector_bytes()
    precompile(mixed_bytes, (Ptr{UInt8}, Int))  # a call of one that is not compiled yet would box its arguments, ever after
end

"""The function of single numbers of each elementwise operation, a name here or in `StraightLine`."""
const SCALARS = Dict{Symbol,Union{Symbol,GlobalRef}}()

function operation!(name::Symbol, call::Expr)
    kernel = Symbol(:run_, name)
    @eval function $kernel(instruction::Ptr{Instruction{T}}) where {T}
        x = unsafe_load(instruction)
        $call
        return nothing
    end
    KERNELS[name] = Kernel(kernel, (@eval(() -> $(address_of(kernel, T))) for T in (Float32, Float64))...)
end

"""Compile all kernels for an element type, to be kept in the package's image."""
precompile_kernels(T::DataType) =
    foreach(kernel -> precompile(getfield(@__MODULE__, kernel.name), (Ptr{Instruction{T}},)), values(KERNELS))

address_of(kernel::Symbol, T::DataType) = :(@cfunction($kernel, Cvoid, (Ptr{Instruction{$T}},)))

function address(kernel::Kernel, single::Bool)
    Versions.ADDRESSES_IN_PROCESS && !Versions.writes_code() &&
        return Core.eval(@__MODULE__, address_of(kernel.name, single ? Float32 : Float64))::Ptr{Cvoid}
    return compiling(single ? kernel.single : kernel.double)::Ptr{Cvoid}
end

"""
    kernel(name, single)

The address of an operation's kernel, for Float32 or for Float64.
"""
function kernel(name::Symbol, single::Bool)
    lock(ADDRESSES_LOCK)
    try
        known = get(ADDRESSES, (name, single), C_NULL)
        known === C_NULL || return known
        return ADDRESSES[(name, single)] = address(KERNELS[name], single)
    finally
        unlock(ADDRESSES_LOCK)
    end
end

"""The same where it was asked for before, else `C_NULL`."""
function known_address(name::Symbol, single::Bool)
    lock(ADDRESSES_LOCK)
    try
        return get(ADDRESSES, (name, single), C_NULL)
    finally
        unlock(ADDRESSES_LOCK)
    end
end

for (name, f) in (:neg => :-, :square => :square, :reciprocal => :inv, :exp => :fast_exp, :expm1 => :fast_expm1,
    :log => :fast_log, :log1p => :fast_log1p, :sqrt => :fast_sqrt, :arcsin => :plain_asin, :arccos => :plain_acos,
    :arctan => :plain_atan, :sinh => :plain_sinh, :cosh => :plain_cosh, :tanh => :fast_tanh,
    :sigmoid => :fast_sigmoid, :softplus => :fast_softplus, :relu => :relu, :step => :step, :sign => :signum,
    :abs => :abs, :copy => :identity, :half_power => :half_power, :floor => :floor, :ceil => :ceil, :round => :round, :trunc => :trunc,
    :isnan => :is_nan, :isfinite => :is_finite, :isinf => :is_infinite, :logical_not => :fails)
    operation!(name, :(unary!($f, x)))
    SCALARS[name] = f
end
for (name, fast, slow) in ((:sin, :fast_sin, :slow_sin), (:cos, :fast_cos, :slow_cos), (:tan, :fast_tan, :slow_tan))
    operation!(name, :(guarded!($fast, $slow, x)))
    SCALARS[name] = Symbol(:any_, name)
end
for (name, f) in (:add => :+, :sub => :-, :mul => :*, :div => :/, :pow => :plain_pow, :maximum => :larger,
    :minimum => :smaller, :less => :less, :less_equal => :less_equal, :greater => :greater,
    :greater_equal => :greater_equal, :equal => :equal, :not_equal => :not_equal, :tanh_gradient => :tanh_gradient,
    :sigmoid_gradient => :sigmoid_gradient, :relu_gradient => :relu_gradient, :add_tanh => :add_tanh,
    :add_sigmoid => :add_sigmoid, :add_relu => :add_relu, :logical_and => :both_hold, :logical_or => :one_holds)
    operation!(name, :(binary!($f, x)))
    SCALARS[name] = f
end
for (name, f) in (:clip => :limited, :where => :chosen, :mul_add => :mul_add)
    operation!(name, :(ternary!($f, x)))
    SCALARS[name] = f
end

# Seldom in straight-line code: found here by their module, not imported there.
for (name, f) in (:cbrt => :cbrt, :exp2 => :exp2, :log2 => :plain_log2, :log10 => :plain_log10, :arcsinh => :asinh,
    :arccosh => :plain_acosh, :arctanh => :plain_atanh, :deg2rad => :deg2rad, :rad2deg => :rad2deg, :sinc => :plain_sinc,
    :erf => :plain_erf, :erfc => :plain_erfc, :gammaln => :plain_gammaln, :logit => :plain_logit,
    :silu => :plain_silu, :gelu => :plain_gelu, :gelu_tanh => :plain_gelu_tanh)
    operation!(name, :(unary!($f, x)))
    SCALARS[name] = GlobalRef(@__MODULE__, f)
end
for (name, f) in (:logaddexp => :plain_logaddexp, :arctan2 => :atan, :hypot => :hypot, :floor_divide => :fld, :mod => :mod,
    :fmod => :rem, :copysign => :copysign, :leaky_relu => :plain_leaky_relu, :elu => :plain_elu)
    operation!(name, :(binary!($f, x)))
    SCALARS[name] = GlobalRef(@__MODULE__, f)
end

"""Make the kernel of an elementwise operation from a function of single numbers; return where that is found."""
function new_kernel!(name::Symbol, @nospecialize(f), operands::Int)
    operation!(name, :($((:unary!, :binary!, :ternary!)[operands])($f, x)))
    place = Symbol(:value_of_, name)
    @eval const $place = $f
    return GlobalRef(@__MODULE__, place)
end

operation!(:max, :(extremum!(larger, x)))
operation!(:min, :(extremum!(smaller, x)))
operation!(:any, :(extremum!(one_holds, x)))
operation!(:all, :(extremum!(both_hold, x)))
operation!(:argmax, :(position!(isless, x)))
operation!(:argmin, :(position!(isgreater_, x)))
for name in (:fill, :whole_power, :sum, :prod, :shift, :normalise, :add_log_sum, :subtract_log_sum, :norm, :cross_entropy,
    :cross_entropy_gradient, :gather, :scatter, :embedding, :embedding_gradient, :dropout_mask, :matmul)
    operation!(name, :($(Symbol(name, :!))(x)))
end
"""The kernels of products by tiles, the vectors that they use, and how many of these the rows of a tile are."""
const TILES = ((:tiles_64_4, :wide, 4), (:tiles_64_2, :wide, 2), (:tiles_64_1, :wide, 1), (:tiles_32_2, :narrow, 2),
    (:tiles_32_1, :narrow, 1))
for (name, vector, rows) in TILES
    operation!(name, :(tiles!($vector(T), Val($rows), x)))
end
operation!(:turn_64, :(turn!(wide(T), x)))
operation!(:turn_32, :(turn!(narrow(T), x)))
operation!(:call, :(call!(x)))
operation!(:to_other, :(convert!(other(T), T, x)))
operation!(:to_int, :(to_int!(x)))
operation!(:from_int, :(convert!(T, Int64, x)))
other(::Type{Float32}) = Float64
other(::Type{Float64}) = Float32

"""
What an instruction `call` calls: a Julia object that takes no arguments. The instruction has this object's address, and
whoever runs it keeps the object alive.
"""
mutable struct Called
    run::Any
end

# The method that is the newest now, not the newest when this was compiled: the object may be made of a user's function.
call!(x::Instruction) = (Base.invokelatest(unsafe_pointer_to_objref(Ptr{Cvoid}(x.index)).run); nothing)

"""
A checksum of `n` words that lie `step` words apart, to tell whether memory was written to. Each word is mixed with its place
(`first` is that of the first), one to one: no change of one word goes unnoticed, and those of several, such as an exchange
or a change of all signs, do not cancel out but by a chance of about 2^-64.
"""
function mixed_bits(p::Ptr{T}, n::Int, step::Int=1, first::Int=1) where {T<:Unsigned}
    return step == 1 ? mixed_words(p, n, first) : mixed_apart(p, n, step, first)
end

@inline function mixed(word::Unsigned, place::Int)
    w = word % UInt64
    w ⊻= w >> 29
    z = (w + (place % UInt64) * 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
    return z ⊻ (z >> 32)
end

@inline function mixed_words(p::Ptr{T}, n::Int, first::Int) where {T}
    total = zero(UInt64)
    @summing for i in 0:n-1
        total += mixed(unsafe_load(p + i * sizeof(T)), first + i)
    end
    return total
end

function mixed_apart(p::Ptr{T}, n::Int, step::Int, first::Int) where {T}
    total = zero(UInt64)
    for i in 0:n-1
        total += mixed(unsafe_load(p + i * step * sizeof(T)), first + i)
    end
    return total
end

"""The checksum of rows of `n` words, and of the places at which these begin."""
function mixed_rows(p::Ptr{T}, n::Int, step::Int, counts::NTuple{N,Int}, strides::NTuple{N,Int}) where {T<:Unsigned,N}
    total, first = zero(UInt64), 1
    for place in CartesianIndices(counts)
        offset = 0
        for d in 1:N
            offset += (place[d] - 1) * strides[d]
        end
        total += mixed_bits(p + offset * sizeof(T), n, step, first)
        first += n
    end
    return total
end

"""
The checksum of `bytes` bytes. Not inlined: it is called from where the optimiser is off, and would take ten times as long there.
"""
@noinline function mixed_bytes(p::Ptr{UInt8}, bytes::Int)
    words = bytes >> 3
    return mixed_words(Ptr{UInt64}(p), words, 1) + mixed_words(p + 8 * words, bytes - 8 * words, words + 1)
end

"""
    execute!(code, first, last)

Do the instructions from `first` to `last` in order. Nothing is dispatched and nothing allocated.
"""
@inline function execute!(code::Vector{Instruction{T}}, first::Int, last::Int) where {T}
    GC.@preserve code begin
        for i in first:last
            instruction = pointer(code, i)
            ccall(unsafe_load(Ptr{Ptr{Cvoid}}(instruction)), Cvoid, (Ptr{Instruction{T}},), instruction)
        end
    end
    return nothing
end

"""Do one instruction."""
execute!(x::Instruction{T}) where {T} = execute!([x], 1, 1)

"""
    Segment

Instructions that run one after the other: those from `first` to `last`, of Float32 or of Float64. Where `tile` is not 0
they are written for the first `tile` of `n` elements, and are done again for the others; from tile to tile the addresses
move on that the program's `moves` numbered `moving` name.
"""
struct Segment
    single::Bool
    first::Int
    last::Int
    tile::Int
    n::Int
    moving::UnitRange{Int}
end
Segment(single, first, last) = Segment(single, first, last, 0, 0, 1:0)

"""
An operand's address in an instruction: of which argument or result, in which instruction, and which of its fields. Instruction
0 stands for what is called, which has read the address, so that the argument or result stays where it is.
"""
struct Slot
    number::Int
    single::Bool
    instruction::Int
    field::Int
end

const NO_SLOTS = Slot[]

"""
    Instructions

Instructions in the order in which they run. Those of Float32 and of Float64 lie in an array each, so that both are
concrete; `segments` says which part of which array comes next, and `moves` which addresses of an instruction (1 is the
result's) move how many bytes from tile to tile. `roots` keeps scratch memory alive. `slots` says which operands lie in an argument or
a result of the tape.
"""
mutable struct Instructions
    f32::Vector{Instruction{Float32}}
    f64::Vector{Instruction{Float64}}
    segments::Vector{Segment}
    moves::Vector{Tuple{Int,Int,Int}}  # (instruction, address, bytes)
    roots::Vector{Any}
    slots::Vector{Slot}
    Instructions() =
        new(Instruction{Float32}[], Instruction{Float64}[], Segment[], Tuple{Int,Int,Int}[], Any[], NO_SLOTS)
end

function Base.empty!(p::Instructions)
    empty!(p.f32)
    empty!(p.f64)
    empty!(p.segments)
    empty!(p.moves)
    empty!(p.roots)
    p.slots = NO_SLOTS
    return p
end

"""
The multiplications of a call of BLAS: the mean over all that a program does there, not over the calls. So it is the size of
the calls in which the time goes by.
"""
function multiplications_per_call(p::Instructions)
    total, weighted = 0.0, 0.0
    for (instructions, single) in ((p.f32, true), (p.f64, false))
        product = known_address(:matmul, single)
        for x in instructions
            x.kernel == product || continue
            m, n, k, stacked = x.n
            total += 1.0 * m * n * k * stacked
            weighted += (1.0 * m * n * k)^2 * stacked
        end
    end
    return total == 0 ? 0.0 : weighted / total
end

keep!(p::Instructions, slot::Slot) = (p.slots === NO_SLOTS && (p.slots = Slot[]); push!(p.slots, slot); nothing)

"""
    execute!(program)

Run all instructions. Whoever calls this keeps the memory that they use alive.
"""
@noinline function execute!(p::Instructions)
    for k in 1:length(p.segments)
        execute_segment!(p, k)
    end
    return nothing
end

@inline function execute_segment!(p::Instructions, k::Int)
    s = @inbounds p.segments[k]
    if s.tile != 0
        s.single ? execute_tiles!(p.f32, s, p.moves) : execute_tiles!(p.f64, s, p.moves)
    else
        s.single ? execute!(p.f32, s.first, s.last) : execute!(p.f64, s.first, s.last)
    end
    return nothing
end

"""
Run a segment tile by tile; its instructions are afterwards as before, even where one of them throws. An
interrupt waits until then: one that left them at some tile would let the next run write outside of its memory.
"""
@inline function execute_tiles!(code::Vector{Instruction{T}}, s::Segment, moves::Vector{Tuple{Int,Int,Int}}) where {T}
    tiles = cld(s.n, s.tile)
    rest = s.n - (tiles - 1) * s.tile
    moved = 0
    Base.sigatomic_begin()
    try
        for k in 1:tiles
            k == tiles && rest < s.tile && set_lengths!(code, s.first, s.last, rest)
            execute!(code, s.first, s.last)
            k < tiles && (move!(code, moves, s.moving, 1); moved = k)
        end
    finally
        move!(code, moves, s.moving, -moved)
        rest < s.tile && set_lengths!(code, s.first, s.last, s.tile)
        Base.sigatomic_end()
    end
    return nothing
end

@inline function move!(code::Vector{Instruction{T}}, moves::Vector{Tuple{Int,Int,Int}}, moving::UnitRange{Int},
        tiles::Int) where {T}
    GC.@preserve code for k in moving
        i, address, bytes = @inbounds moves[k]
        place = Ptr{Ptr{T}}(pointer(code, i)) + address * sizeof(Ptr)  # after the kernel's
        unsafe_store!(place, unsafe_load(place) + tiles * bytes)
    end
    return nothing
end

const LENGTH_AT = fieldoffset(Instruction{Float64}, 7)  # as in those of Float32

@inline function set_lengths!(code::Vector{Instruction{T}}, first::Int, last::Int, n::Int) where {T}
    GC.@preserve code for i in first:last
        unsafe_store!(Ptr{Int}(pointer(code, i)) + LENGTH_AT, n)
    end
    return nothing
end

"""Let the last `count` instructions, which are written for `tile` elements, be done for `n`."""
function repeat_last!(p::Instructions, single::Bool, count::Int, tile::Int, n::Int)
    before = pop!(p.segments)
    first = before.last - count + 1
    before.first < first && push!(p.segments, Segment(single, before.first, first - 1))
    moved = isempty(p.segments) ? 0 : maximum(s -> last(s.moving), p.segments)
    push!(p.segments, Segment(single, first, before.last, tile, n, moved+1:length(p.moves)))
    return nothing
end
