# How much Julia compiles.
#
# What makes a session runs once, through hundreds of methods: Julia 1.5 compiles for seconds what then runs for
# milliseconds. It can interpret instead, where `jl_options.compile_enabled` says so when a method is first called. A method
# once interpreted stays so for dynamic calls, until `compile_interpreted!`; code compiled later does not mind, since it
# infers its callees anew.

const WANTED = Ref(true)
const INTERPRETED_SECONDS = Ref(0.0)  # so far in this process; infinite once nothing is to be interpreted any more
const MOST_INTERPRETED_SECONDS = 10.0  # compiling all that is interpreted takes 6 s; a first session is interpreted in 4
const COMPILE, INTERPRET = Int8(1), Int8(3)  # JL_OPTIONS_COMPILE_ON, JL_OPTIONS_COMPILE_MIN

compile_switch() = Ptr{Int8}(cglobal(:jl_options)) + SWITCH_OFFSET
const SWITCH_OFFSET = fieldoffset(Base.JLOptions, something(findfirst(isequal(:compile_enabled),
    collect(fieldnames(Base.JLOptions)))))

"""
    interpreting(f)

`f()`, with its methods interpreted where that is sooner done than compiling them. For code that runs once, and none of
whose methods a hot loop calls dynamically; kernels are compiled all the same.
"""
function interpreting(@nospecialize(f))
    WANTED[] && can_interpret() || return f()
    start = time_ns()
    try
        return switched(f, INTERPRET)
    finally
        INTERPRETED_SECONDS[] += (time_ns() - start) / 1e9
    end
end

"""
    interpret(wanted)

Whether [`interpreting`](@ref) interprets from now on. Not where what it runs is much, such as the plan of a sequence of
hundreds of steps, or is run again and again, as an engine without its techniques does. From then on, or once a process
has made so many sessions that they were sooner compiled, what was interpreted before is compiled.
"""
function interpret(wanted::Bool)
    can_interpret() || return nothing
    WANTED[] = wanted && INTERPRETED_SECONDS[] < MOST_INTERPRETED_SECONDS
    if !WANTED[] && 0 < INTERPRETED_SECONDS[] < Inf
        compile_interpreted!()
        INTERPRETED_SECONDS[] = Inf
    end
    return nothing
end

"""
Have all methods that were interpreted compiled when they are called next, and return how many: they forget that they are to
be interpreted, which Julia 1.5 notes with each method.
"""
function compile_interpreted!()
    probe = [x -> x]  # whose call the compiler can't foresee
    switched(() -> Base.invokelatest(probe[1], 1), INTERPRET)
    interpreter = first(c.invoke for c in codes(first(methods(probe[1]))) if c.invoke != C_NULL && c.specptr == C_NULL)
    found, tables, modules = 0, Set{Any}(), Set{Module}()
    foreach(m -> collect_tables!(tables, modules, m), [Core; Main; collect(values(Base.loaded_modules))])
    for table in tables
        table === nothing || Base.visit(table) do method
            for code in codes(method)
                code.invoke == interpreter || continue
                code.invoke = C_NULL
                found += 1
            end
        end
    end
    return found
end

"""What Julia keeps of each specialisation of a method."""
function codes(method::Method)
    found, all = Core.CodeInstance[], method.specializations
    for i in 1:length(all)
        isassigned(all, i) && all[i] isa Core.MethodInstance && isdefined(all[i], :cache) || continue
        code = all[i].cache
        push!(found, code)
        while isdefined(code, :next)
            code = code.next
            push!(found, code)
        end
    end
    return found
end

"""Add the tables of methods of all functions and types in a module, and in those inside of it."""
function collect_tables!(tables::Set{Any}, modules::Set{Module}, m::Module)
    m in modules && return nothing
    push!(modules, m)
    for name in names(m; all=true)
        isdefined(m, name) && !Base.isdeprecated(m, name) || continue
        value = getfield(m, name)
        value isa Module && collect_tables!(tables, modules, value)
        type = Base.unwrap_unionall(value isa Type ? value : typeof(value))
        type isa DataType && isdefined(type.name, :mt) && push!(tables, type.name.mt)
    end
    return nothing
end

"""`f()`, with its methods compiled, inside of [`interpreting`](@ref) too."""
compiling(@nospecialize(f)) = switched(f, COMPILE)

can_interpret() = Versions.INTERPRETS && !Versions.writes_code()

function switched(@nospecialize(f), mode::Int8)
    can_interpret() || return f()
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

"""
The address of an array's elements, whatever they are. Methods of `pointer`, and of pointers made of others, are found by types
that are known only when it runs, and other packages have such methods: what calls them would be compiled anew beside these.
"""
start_of(@nospecialize(x::Array)) = ccall(:jl_array_ptr, Ptr{Cvoid}, (Any,), x)

"""The same as a pointer to its elements, from the `i`-th on."""
@inline elements_of(x::Array{T}, i::Int=1) where {T} = Ptr{T}(start_of(x)) + (i - 1) * sizeof(T)

const HUGE_PAGE = 2 << 20

"""
Ask Linux for pages of 2 MB behind an array of 4 MB or more that nobody has touched yet, as numpy does for its arrays: they come
in half the time, and a pass over several large arrays, or down the columns of one, looks up fewer addresses.
"""
function huge_pages!(@nospecialize(x::Array))
    (Sys.islinux() && sizeof(x) >= 2 * HUGE_PAGE) || return x
    GC.@preserve x begin
        start = UInt(start_of(x))
        first, behind = cld(start, HUGE_PAGE) * HUGE_PAGE, fld(start + sizeof(x), HUGE_PAGE) * HUGE_PAGE
        # The number is MADV_HUGEPAGE. A kernel without such pages says so, which changes nothing.
        ccall(:madvise, Cint, (Ptr{Cvoid}, Csize_t, Cint), Ptr{Cvoid}(first), behind - first, 14)
    end
    return x
end

"""Set all bytes of a fresh array to zero. Not a loop: it may be in code that is interpreted."""
function zeroed!(@nospecialize(x::Array))
    huge_pages!(x)
    GC.@preserve x ccall(:memset, Ptr{Cvoid}, (Ptr{Cvoid}, Cint, Csize_t), start_of(x), 0, sizeof(x))
    return x
end
