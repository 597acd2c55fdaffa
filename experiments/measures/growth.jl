# How the time of a gradient grows with the nodes of its graph, in the Julia engine: for experiments/measures/growth.py,
# which runs this file. Its arguments are the kind of calls, how often to call, the seconds after which a call is not repeated,
# those after which no larger graph follows, how many numbers there are, and the nodes. It prints lines of what was timed, the
# nodes, the seconds, those of them that collecting garbage took, those that the system worked for the thread, and how many
# bytes more than before were resident at most, where the system says it.

using TwinGrad
using TwinGrad.AD

const REPEATS = parse(Int, ARGS[2])
const ONCE_SECONDS = parse(Float64, ARGS[3])
const CALL_SECONDS = parse(Float64, ARGS[4])
const X = collect(range(0.1, 1.0; length=parse(Int, ARGS[5])))

function chain(x, count)
    for _ in 1:count
        x = sin.(x)
    end
    return sum(x)
end

gradient(count) = grad(x -> chain(x, count))

collecting() = Base.gc_num().total_time / 1e9

# Seconds that the system has worked for this thread, as bridge/memory.py has them; 0 where it does not say.
function system()
    Sys.islinux() || return 0.0
    usage = zeros(Clong, 32)  # two times of seconds and microseconds, the latter the system's, and counts
    thread = 1
    ccall(:getrusage, Cint, (Cint, Ptr{Clong}), thread, usage) == 0 || return 0.0
    return usage[3] + usage[4] / 1e6
end

# The least seconds of a few calls, and those of them that collecting garbage and the system took.
function least(call)
    best = (Inf, 0.0, 0.0)
    for _ in 1:REPEATS
        before, start = (collecting(), system()), time_ns()
        call()
        taken = (time_ns() - start) / 1e9
        best = min(best, (taken, collecting() - before[1], system() - before[2]))
        taken > ONCE_SECONDS && break
    end
    return best
end

# The bytes that were resident at most since `reset_peak`, as bridge/memory.py has them; `nothing` where the system does not say.
function peak()
    try
        line = only(filter(line -> startswith(line, "VmHWM"), readlines("/proc/self/status")))
        return 1024 * parse(Int, split(line)[2])
    catch
        return nothing
    end
end

function reset_peak()
    try
        write("/proc/self/clear_refs", "5")
        return true
    catch
        return false
    end
end

eager(count) = ["eager gradient" => least(() -> gradient(count)(X))]

function compiled(count)
    f = gradient(count)
    kept = Ref{Any}()
    first_call = least() do
        kept[] = compile(f)
        kept[](X)
    end
    return ["first call, compiled" => first_call, "later call, compiled" => least(() -> kept[](X))]
end

const TIMED = Dict("eager" => eager, "compiled" => compiled)[ARGS[1]]
TIMED(1)  # which Julia compiles
const BEFORE = reset_peak() ? peak() : nothing
for count in parse.(Int, ARGS[6:end])
    reset_peak()
    found = TIMED(count)
    held = BEFORE === nothing ? "" : max(peak() - BEFORE, 0)
    for (what, seconds) in found
        println(join((what, count, seconds..., held), '\t'))
    end
    maximum(first ∘ last, found) > CALL_SECONDS && break
end
