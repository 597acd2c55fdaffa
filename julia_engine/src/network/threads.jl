# A team of threads that goes through many steps together.
#
# One parallel region runs a whole call, many steps of an epoch; inside it the threads meet at barriers, which are two
# atomic additions and a short wait. That costs less than starting a task for each step, and allocates nothing.

"""Threads that meet at barriers: how many, how many have arrived, and how often they have met."""
struct Team
    size::Int
    arrived::Threads.Atomic{Int}
    meetings::Threads.Atomic{Int}
    broken::Threads.Atomic{Int}
end
Team(size::Int) = Team(size, Threads.Atomic{Int}(0), Threads.Atomic{Int}(0), Threads.Atomic{Int}(0))

"""One thread, which waits for nobody."""
const ALONE = Team(1)

# Turns of the waiting loop before the processor is offered to others: about 20 µs.
const PATIENCE = 2000

"""Wait until all have come here; false when one of them never will."""
@inline function meet!(team::Team)
    team.size == 1 && return true
    team.broken[] == 0 || return false
    meeting = team.meetings[]
    if Threads.atomic_add!(team.arrived, 1) == team.size - 1
        team.arrived[] = 0
        Threads.atomic_add!(team.meetings, 1)
        return team.broken[] == 0
    end
    turns = 0
    while team.meetings[] == meeting
        team.broken[] == 0 || return false
        turns += 1
        turns < PATIENCE ? ccall(:jl_cpu_pause, Cvoid, ()) : offer_processor()
        GC.safepoint()
    end
    return team.broken[] == 0
end

@static if Sys.iswindows()
    offer_processor() = ccall(:jl_cpu_pause, Cvoid, ())
else
    offer_processor() = (ccall(:sched_yield, Cint, ()); nothing)
end

"""Held by the team that works: threads that wait for each other may not be those that another team waits for."""
const ONE_TEAM = ReentrantLock()

"""How many threads a team may have: those of Julia, unless a parallel region, or another team, is at work already."""
function threads_to_use(wanted::Int)
    ccall(:jl_in_threaded_region, Cint, ()) == 0 || return 1
    islocked(ONE_TEAM) && return 1
    @static if Versions.THREADS_FROM_FIRST_ALONE
        Threads.threadid() == 1 || return 1 
    end
    return min(wanted, Threads.nthreads())
end

"""
What each member of a team does, and the errors that ended some; not compiled anew for each `work`. A thread keeps its last
task, and with it this, which therefore forgets `work` when all have done it.
"""
mutable struct Members
    work::Any
    team::Team
    errors::Vector{Any}
end

function (members::Members)(k::Int)
    try
        members.work(k)
    catch error
        members.errors[k] = error
        members.team.broken[] = 1
    end
    return nothing
end

spawned(members::Members, k::Int) = Threads.@spawn members(k)

"""
Run `work(k)` for each k of the team, each in its thread, when no other team works. An exception in one of them is thrown
here, after the others have left.
"""
function together(@nospecialize(work), team::Team)
    team.size == 1 && return (work(1); nothing)
    members = Members(work, team, Vector{Any}(nothing, team.size))
    lock(() -> run_members(members), ONE_TEAM)
    members.work = nothing
    for error in members.errors
        error === nothing || throw(error)
    end
    return nothing
end

function run_members(members::Members)
    team = members.team
    team.arrived[] = 0
    team.broken[] = 0
    if Versions.waits_apart()
        # This thread would wait beside the team, and take a core from it: so it is one of the team.
        others = Task[spawned(members, k) for k in 2:team.size]
        members(1)
        foreach(wait, others)
    else
        Threads.@threads :static for k in 1:Threads.nthreads()
            k <= team.size && members(k)
        end
    end
    return nothing
end

# BLAS threads ---------------------------------------------------------------------------------------------------------

@static if Versions.BLAS_TELLS_THREADS
    own_blas_threads() = BLAS.get_num_threads()
else
    function own_blas_threads()
        try
            return Int(ccall((BLAS.@blasfunc(openblas_get_num_threads), BLAS.libblas), Cint, ()))
        catch
            return 1
        end
    end
end

"""How many threads the BLAS has that multiplies."""
function blas_threads()
    other = AD.Kernels.OTHER_BLAS.threads[]
    return other == C_NULL ? own_blas_threads() : Int(ccall(other, Cint, ()))
end

"""Set the number of BLAS threads where it differs, and return what it was."""
function set_blas_threads(n::Int)
    before, other = blas_threads(), AD.Kernels.OTHER_BLAS.set_threads[]
    before == n || (other == C_NULL ? BLAS.set_num_threads(n) : ccall(other, Cvoid, (Cint,), n))
    return before
end
