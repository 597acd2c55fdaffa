# How much Julia compiles.
#
# What makes a session runs once, through hundreds of methods: Julia 1.5 compiles for seconds what then runs for
# milliseconds. It can interpret instead, where `jl_options.compile_enabled` says so when a method is first called. A method
# once interpreted stays so for dynamic calls; code compiled later does not mind, since it infers its callees anew.

const WANTED = Ref(true)
const COMPILE, INTERPRET = Int8(1), Int8(3)  # JL_OPTIONS_COMPILE_ON, JL_OPTIONS_COMPILE_MIN

compile_switch() = Ptr{Int8}(cglobal(:jl_options)) + SWITCH_OFFSET
const SWITCH_OFFSET = fieldoffset(Base.JLOptions, something(findfirst(isequal(:compile_enabled),
    collect(fieldnames(Base.JLOptions)))))

"""
    interpreting(f)

`f()`, with its methods interpreted where that is sooner done than compiling them. For code that runs once, and none of
whose methods a hot loop calls dynamically; kernels are compiled all the same.
"""
interpreting(@nospecialize(f)) = WANTED[] ? switched(f, INTERPRET) : f()

"""
    interpret(wanted)

Whether [`interpreting`](@ref) interprets from now on. Not where what it runs is much, such as the plan of a sequence of
hundreds of steps, or is run again and again, as an engine without its techniques does.
"""
interpret(wanted::Bool) = (WANTED[] = wanted; nothing)

"""`f()`, with its methods compiled, inside of [`interpreting`](@ref) too."""
compiling(@nospecialize(f)) = switched(f, COMPILE)

function switched(@nospecialize(f), mode::Int8)
    Versions.INTERPRETS && !Versions.writes_code() || return f()
    switch = compile_switch()
    before = unsafe_load(switch)
    before == COMPILE || before == INTERPRET || return f()  # Julia was started with another wish
    unsafe_store!(switch, mode)
    try
        return f()
    finally
        unsafe_store!(switch, before)
    end
end

"""Set `n` integers to 1, for the same use as [`zeroed!`](@ref): a method with a `ccall` is never interpreted."""
function fill_ones!(p::Ptr{Int64}, n::Int)
    n > 0 && unsafe_store!(p, 1)
    done = 1
    while done < n
        count = min(done, n - done)
        ccall(:memcpy, Ptr{Cvoid}, (Ptr{Cvoid}, Ptr{Cvoid}, Csize_t), p + 8 * done, p, 8 * count)
        done += count
    end
    return nothing
end

"""
    apart(f, args...)

`f(args...)`, which Julia does not compile together with the caller, as it would what a caller is known to call.
"""
apart(@nospecialize(f), @nospecialize(args...)) = Base.invokelatest(f, args...)

"""Set all bytes of an array to zero. Not a loop: it may stand in code that is interpreted."""
function zeroed!(@nospecialize(x::Array))
    GC.@preserve x ccall(:memset, Ptr{Cvoid}, (Ptr{Cvoid}, Cint, Csize_t), Ptr{Cvoid}(pointer(x)), 0, sizeof(x))
    return x
end
