# A team of threads that goes through many steps together, and `Trials`, which find out whether all threads are faster than one.
#
# One parallel region runs a whole call, many steps of an epoch (in trials, some steps); inside it the threads wait at barriers,
# which are two atomic additions and a short wait. That costs less than starting a task for each step, and allocates nothing.

"""Threads that wait for each other at barriers: how many, how many have arrived, and the barriers passed so far."""
struct Team
    size::Int
    arrived::Threads.Atomic{Int}
    barriers::Threads.Atomic{Int}
    broken::Threads.Atomic{Int}
end
Team(size::Int) = Team(size, Threads.Atomic{Int}(0), Threads.Atomic{Int}(0), Threads.Atomic{Int}(0))

"""One thread, which waits for nobody."""
const ALONE = Team(1)

# Turns of the waiting loop before the processor is offered to others: about 20 µs.
const PATIENCE = 2000

"""Barrier: wait for all threads of the team; false where one has failed and will not come."""
@inline function barrier!(team::Team)
    team.size == 1 && return true
    team.broken[] == 0 || return false
    passed = team.barriers[]
    if Threads.atomic_add!(team.arrived, 1) == team.size - 1
        team.arrived[] = 0
        Threads.atomic_add!(team.barriers, 1)
        return team.broken[] == 0
    end
    turns = 0
    while team.barriers[] == passed
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

# Which way is the fastest -----------------------------------------------------------------------------------------------

"""Trials of each way, at least, whose median counts, and seconds of all of them."""
const TRIALS, LEAST_SECONDS = 3, 0.1
"""Seconds of a trial, at least: many short steps are timed together."""
const TRIAL_SECONDS = 0.005
"""How many times as fast all threads must be: below that a lucky trial decides, and one thread does as well."""
const GAIN = 1.03
"""Threads of BLAS wait busily for 0.1 s after a product: seconds at the start of a trial that do not count, and those that do."""
const BUSY_SECONDS, BLAS_TRIAL_SECONDS = 0.1, 0.05
"""
Both are compared again, since other work that had the processors may have ended, or begun: after at least these seconds of
training, and at least this many times those of the last comparison.
"""
const AGAIN_SECONDS, AGAIN_TIMES = 20.0, 50
"""
Seconds of training by all threads after which they are held against what one thread took in the comparison, at least, and at least
those of that comparison: if they took longer, it is made again. Twice as many the next time.
"""
const WATCHED_SECONDS = 0.25
"""Seconds of a step of a whole batch from which on one thread is not tried: its products are so large that threads are worth it."""
const LONG_STEP = 0.05
"""Multiplications that take longer than that on any processor."""
const LONG_WORK = 2.0^33

"""
The two ways to make a step, by all threads or by one, tried in turn in the first steps until it is known which takes less time, now
and then again, and where all threads have become slower than one was. Both compute the same numbers.
"""
mutable struct Trials
    together::Vector{Float64}  # seconds of a step, in each trial
    alone::Vector{Float64}
    is_alone::Bool  # the way that is tried now, or was chosen
    warm::Bool  # whether steps have been run before, which compiles them and touches their memory
    compares::Bool  # whether both are being tried
    decided::Bool  # whether one was chosen
    prefers_alone::Bool  # which
    left::Float64  # seconds of training until both are compared again
    step_seconds::Float64  # of a step in the chosen way, when it was chosen
    limit::Float64  # of a step that one thread would take less than
    window::Float64  # seconds of training that are held against it together
    watched::Float64  # seconds of training since the last check
    watched_steps::Int  # steps since then
    waited::Float64  # seconds of this trial that do not count
    steps::Int  # of this trial, that count
    spent::Float64  # seconds of these
    all_spent::Float64  # and of all trials
    took::Float64  # seconds of all steps of this comparison
    least::Int  # steps of a trial, at least: to an update
    checked::Bool  # whether it is known that both compute the same numbers
    with_blas::Bool  # whether the ways differ in the threads of BLAS
end
Trials(least::Int, checked::Bool=true, with_blas::Bool=false) = Trials(
    Float64[], Float64[], false, false, true, false, false, 0.0, 0.0, Inf, 0.0, 0.0, 0, 0.0, 0, 0.0, 0.0, 0.0, least, checked, with_blas)

trial_seconds(trials::Trials) = trials.with_blas ? BLAS_TRIAL_SECONDS : TRIAL_SECONDS

"""Compare both ways again where they were compared so long ago that it may be otherwise now."""
function compare_again!(trials::Trials)
    (trials.compares || trials.left > 0) && return nothing
    empty!(trials.together)
    empty!(trials.alone)
    trials.compares, trials.is_alone = true, false
    trials.waited, trials.steps, trials.spent, trials.all_spent, trials.took = 0.0, 0, 0.0, 0.0, 0.0
    return nothing
end

"""Of `steps` steps, how many are to be run next in the same way."""
function at_once(trials::Trials, steps::Int)
    if !trials.compares
        seconds = trials.limit == Inf ? trials.left : min(trials.left, trials.window - trials.watched)
        return min(steps, ceil(Int, clamp(seconds / max(trials.step_seconds, 1e-9), 1.0, 1e12)))
    end
    trials.steps == 0 && return min(trials.least, steps)
    wanted = (trial_seconds(trials) - trials.spent) / max(trials.spent, 1e-9) * trials.steps
    return min(ceil(Int, clamp(wanted, 1.0, 1e6)), steps)
end

"""Note what `steps` steps took; after a trial it is the other way's turn, or it is decided."""
function note!(trials::Trials, seconds::Float64, steps::Int)
    if !trials.compares
        trials.left -= seconds
        watch!(trials, seconds, steps)
        return nothing
    end
    trials.took += seconds
    trials.warm || (trials.warm = true; return nothing)
    if trials.with_blas && trials.waited < BUSY_SECONDS
        trials.waited += seconds
        return nothing
    end
    trials.steps += steps
    trials.spent += seconds
    trials.all_spent += seconds
    (trials.spent < trial_seconds(trials) || trials.steps < trials.least) && return nothing
    push!(trials.is_alone ? trials.alone : trials.together, trials.spent / trials.steps)
    trials.is_alone = !trials.is_alone
    trials.waited, trials.steps, trials.spent = 0.0, 0, 0.0
    if length(trials.alone) >= TRIALS && length(trials.alone) == length(trials.together) && trials.all_spent >= LEAST_SECONDS
        usual(seconds) = sort(seconds)[cld(length(seconds), 2)]
        choose!(trials, usual(trials.alone) < GAIN * usual(trials.together), max(AGAIN_SECONDS, AGAIN_TIMES * trials.took))
        trials.step_seconds = usual(trials.is_alone ? trials.alone : trials.together)
        trials.limit = trials.is_alone ? Inf : GAIN * usual(trials.alone)
        trials.window = max(trials.window, trials.took, WATCHED_SECONDS)
    end
    return nothing
end

"""
Compare both ways again where steps by all threads take longer than those of one thread did: the processors on which they run may be
others now, or busy.
"""
function watch!(trials::Trials, seconds::Float64, steps::Int)
    trials.watched += seconds
    trials.watched_steps += steps
    trials.watched < trials.window && return nothing
    if trials.watched > trials.limit * trials.watched_steps
        trials.left = 0.0
        trials.window *= 2
    end
    trials.watched, trials.watched_steps = 0.0, 0
    return nothing
end

"""Make steps in this way from now on, by one thread or by all, for `left` seconds of training."""
function choose!(trials::Trials, alone::Bool, left::Float64=AGAIN_SECONDS)
    trials.is_alone = trials.prefers_alone = alone
    trials.compares, trials.decided, trials.left = false, true, left
    trials.limit, trials.watched, trials.watched_steps = Inf, 0.0, 0
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
