# How the Julia engine runs a module's function for GradBench; `protocol.py` puts a module's functions before this.
#
# The result is one vector: how many preparations there were (one, or none where an earlier message left a compiled function)
# and their nanoseconds, how often the function ran and the nanoseconds of each run, then for each array of the result the
# number of its axes, their lengths, and its elements.

# A function that takes the least number of runs and seconds, then `count` arrays, then what is no array. It keeps the last
# `most` compiled functions.
function runs(make, count, compiled, most)
    known, order = Dict{Any,Any}(), Any[]
    return function (min_runs, min_seconds, args...)
        arrays, settings = args[1:count], args[count+1:end]
        key, preparation, nanoseconds, total = (settings, map(size, arrays)), Float64[], Float64[], 0.0
        if !haskey(known, key)
            before = time_ns()
            known[key] = compiled ? compile(make(settings...)) : make(settings...)
            push!(order, key)
            length(order) > most && delete!(known, popfirst!(order))
            if compiled
                known[key](arrays...)
                push!(preparation, time_ns() - before)
            end
        end
        f, result = known[key], nothing
        while length(nanoseconds) < max(min_runs, 1) || total < 1e9 * min_seconds
            before = time_ns()
            result = f(arrays...)
            push!(nanoseconds, time_ns() - before)
            total += nanoseconds[end]
        end
        packed = Float64[length(preparation); preparation; length(nanoseconds); nanoseconds]
        for x in (result isa Tuple ? result : (result,))
            append!(packed, (ndims(x), size(x)...))
            append!(packed, x)
        end
        return packed
    end
end
