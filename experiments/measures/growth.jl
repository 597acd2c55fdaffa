# How the time of a gradient grows with the nodes of its graph, in the Julia engine: for experiments/measures/growth.py,
# which runs this file. Its arguments are how often to call, the seconds after which a call is not repeated, those after
# which no larger graph follows, how many numbers there are, and the nodes. It prints lines of what was timed, the nodes
# and the seconds.

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

# The least seconds of a few calls.
function least(call)
    best = Inf
    for _ in 1:REPEATS
        start = time_ns()
        call()
        taken = (time_ns() - start) / 1e9
        best = min(best, taken)
        taken > ONCE_SECONDS && break
    end
    return best
end

eager(count) = ["eager gradient" => least(() -> gradient(count)(X))]

function compiled(count)
    f = gradient(count)
    kept = []
    first_call = least(() -> push!(kept, compile(f))[end](X))
    return ["first call, compiled" => first_call, "later call, compiled" => least(() -> kept[end](X))]
end

for timed in (eager, compiled)
    timed(1)  # which Julia compiles
    for count in parse.(Int, ARGS[5:end])
        found = timed(count)
        for (what, seconds) in found
            println(what, '\t', count, '\t', seconds)
        end
        maximum(last, found) > CALL_SECONDS && break
    end
end
