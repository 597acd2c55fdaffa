# How the time of a gradient grows with the nodes of its graph, in the Julia engine: for experiments/measures/growth.py,
# which runs this file. Its arguments are how often to call, the seconds after which a call is not repeated, those after
# which no larger graph follows, how many numbers there are, and the nodes. It prints lines of what was timed, the nodes,
# the seconds, those of them that collecting garbage took, and the bytes that were resident at most, beyond those before.

using TwinGrad
using TwinGrad.AD

const REPEATS = parse(Int, ARGS[1])
const ONCE_SECONDS = parse(Float64, ARGS[2])
const CALL_SECONDS = parse(Float64, ARGS[3])
const X = collect(range(0.1, 1.0; length=parse(Int, ARGS[4])))

function chain(x, count)
    for _ in 1:count
        x = sin.(x)
    end
    return sum(x)
end

gradient(count) = grad(x -> chain(x, count))

collecting() = Base.gc_num().total_time / 1e9

# The least seconds of a few calls, and those of them that collecting garbage took.
function least(call)
    best = (Inf, 0.0)
    for _ in 1:REPEATS
        before, start = collecting(), time_ns()
        call()
        taken = (time_ns() - start) / 1e9
        best = min(best, (taken, collecting() - before))
        taken > ONCE_SECONDS && break
    end
    return best
end

# Bytes that are resident, or were at most ("VmHWM") since the peak was last reset; 0 where the system does not say.
function resident(name)
    isfile("/proc/self/status") || return 0
    for line in eachline("/proc/self/status")
        startswith(line, name) && return 1024 * parse(Int, split(line)[2])
    end
    return 0
end
reset_peak() = isfile("/proc/self/clear_refs") && write("/proc/self/clear_refs", "5")

eager(count) = ["eager gradient" => least(() -> gradient(count)(X))]

function compiled(count)
    f = gradient(count)
    kept = []
    first_call = least(() -> push!(kept, compile(f))[end](X))
    return ["first call, compiled" => first_call, "later call, compiled" => least(() -> kept[end](X))]
end

for timed in (eager, compiled)
    timed(1)  # which Julia compiles
    before = resident("VmRSS")
    for count in parse.(Int, ARGS[5:end])
        reset_peak()
        found = timed(count)
        held = max(resident("VmHWM") - before, 0)
        for (what, (seconds, collected)) in found
            println(join((what, count, seconds, collected, held), '\t'))
        end
        maximum(first ∘ last, found) > CALL_SECONDS && break
    end
end
