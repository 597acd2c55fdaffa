"""
What differs between versions of Julia, each with its reason. Nowhere else does the engine ask which Julia this is.

Features are asked for by name where there is a name to ask for; a version is compared where only its behaviour differs.
"""
module Versions

import LinearAlgebra, Random

"""
1.9 and later keep machine code with a package (package images); before, each process compiles everything again. What a
workload makes there is worth its time; on 1.5 the code of steps that it would keep, inferred alone, allocates.
"""
const KEEPS_MACHINE_CODE = VERSION >= v"1.9-"

"""
In a package image, `@cfunction` gives an address that calls its function by dynamic dispatch, with a box for the argument:
16 bytes and 35 ns per call, in place of 0 bytes and 2 to 10 ns. There, addresses of kernels are made by the running process.
"""
const ADDRESSES_IN_PROCESS = KEEPS_MACHINE_CODE

"""
1.11 exchanges the two alignments of a copy that JuliaLang/julia#51152 introduced: a struct or tuple in memory that holds tuples
of `VecElement`, such as a dual number, is then read as if aligned to its size, and the process crashes (#57713). Of its mends
(#56938, #57722, #57845) 1.12.0 has all, and 1.10 has one alignment only; which of the 1.11 releases have them is not known here,
so that dual numbers hold vectors in none of these. The vectors of kernels are parts of nothing in memory: `unsafe_load` and
`unsafe_store!` move each by itself, without a copy, and with the alignment of one byte that they are given.
"""
const MISALIGNS_VECTORS = v"1.11-" <= VERSION < v"1.12-"

"""
The options of 1.5 let it interpret what runs once, in place of compiling it for seconds. Tried on 1.5 alone;
`Base.Experimental.@compiler_options` came with 1.6, and works on whole modules; 1.9 keeps compiled code.
"""
const INTERPRETS = v"1.5" <= VERSION < v"1.6-"

"""Before 1.8 `@threads` in a thread other than the first runs its iterations one after the other."""
const THREADS_FROM_FIRST_ALONE = VERSION < v"1.8-"

"""
From 1.12 on Julia starts a thread for interactive work beside those asked for, and the first code runs in it. `@threads` runs
in the others alone, and on as many cores as threads were asked for, the waiting one takes a core from them.
"""
@static if isdefined(Threads, :threadpool)
    waits_apart() = Threads.threadpool() === :interactive
else
    waits_apart() = false
end

"""Whether one thread alone can run code. From 1.9 on `nthreads` leaves out threads for interactive work and foreign ones."""
@static if isdefined(Threads, :maxthreadid)
    has_one_thread() = Threads.maxthreadid() == 1
else
    has_one_thread() = Threads.nthreads() == 1
end

"""`stack` is a function of Base from 1.9 on."""
const HAS_STACK = isdefined(Base, :stack)

"""`ifelse` is a builtin that takes no methods before 1.7."""
const IFELSE_TAKES_METHODS = !(ifelse isa Core.Builtin)

"""Arrays, and from 1.11 on what they are made of, `GenericMemory`."""
const CONTAINERS = isdefined(Core, :GenericMemory) ? Union{Array,getfield(Core, :GenericMemory)} : Array

"""A value that changes with every draw from the default generator of random numbers, which from 1.7 on is the task's own."""
@static if hasfield(Task, :rngState0)
    random_state() = (task = current_task(); (task.rngState0, task.rngState1, task.rngState2, task.rngState3))
else
    random_state() = (generator = Random.default_rng(); (generator.idxF, generator.idxI))
end

"""BLAS is reached through libblastrampoline from 1.7 on."""
const LIBBLAS = isdefined(LinearAlgebra.BLAS, :libblastrampoline) ? LinearAlgebra.BLAS.libblastrampoline : LinearAlgebra.BLAS.libblas

"""BLAS can be asked for its number of threads from 1.6 on."""
const BLAS_TELLS_THREADS = isdefined(LinearAlgebra.BLAS, :get_num_threads)

"""Whether this process writes a package's code: what it evaluates in a module that is closed would be lost, or an error."""
writes_code() = ccall(:jl_generating_output, Cint, ()) == 1

"""From 1.12 on code can be kept with a package that is compiled though it is another package's, and called dynamically."""
const KEEPS_CODE_OF_OTHERS = VERSION >= v"1.12-"

"""`f()`, all of whose code is kept with the package that is being compiled; not run where it would not be."""
function keeping(f)
    KEEPS_CODE_OF_OTHERS || return nothing
    ccall(:jl_tag_newly_inferred_enable, Cvoid, ())
    try
        return f()
    finally
        ccall(:jl_tag_newly_inferred_disable, Cvoid, ())
    end
end

end
