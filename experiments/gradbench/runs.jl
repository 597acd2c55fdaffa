# How the Julia engine runs a module's function for GradBench; `protocol.py` puts a module's functions before this.
#
# The result is one vector: how often it ran, the nanoseconds of each run, then for each array of the result the number of
# its axes, their lengths, and its elements.

# A function that takes the least number of runs and seconds, then `count` arrays, then what is no array.
function runs(make, count)
    return function (min_runs, min_seconds, args...)
        compiled = compile(make(args[count+1:end]...))
        arrays = args[1:count]
        nanoseconds, total = Float64[], 0.0
        result = nothing
        while length(nanoseconds) < max(min_runs, 1) || total < 1e9 * min_seconds
            before = time_ns()
            result = compiled(arrays...)
            push!(nanoseconds, time_ns() - before)
            total += nanoseconds[end]
        end
        packed = Float64[length(nanoseconds); nanoseconds]
        for x in (result isa Tuple ? result : (result,))
            append!(packed, (ndims(x), size(x)...))
            append!(packed, x)
        end
        return packed
    end
end
