# What runs in the process of a system whose program is Julia: answers requests, a line of JSON each, as serve.py does.
#
#     julia serve.jl PROGRAM.jl
#
# A program has `prepare(name, inputs, by, chunk)`: a function of no arguments for the value, and one for the gradients by
# the first `by` inputs; or it throws an `Unsupported`. `packages` are the modules whose versions are reported.

struct Unsupported <: Exception
    message::String
end

const ANSWERS = stdout
redirect_stdout(stderr)

function main(program)
    prepared = Dict{String,Any}()
    counts = Dict{String,Int}()
    answer(guarded(() -> (include(program); "{\"ready\": true}")))
    isdefined(Main, :prepare) || return
    for line in eachline(stdin)
        request = fields(line)
        answer(guarded() do
            Base.invokelatest(respond, request, prepared, counts)
        end)
    end
end

function respond(request, prepared, counts)
    if request["call"] == "prepare"
        by = parse(Int, request["by"])
        inputs = read_arrays(request["inputs"], request["shapes"])
        calls = Base.invokelatest(Main.prepare, request["benchmark"], inputs, by, parse(Int, request["chunk"]))
        value, gradient = calls[1](), calls[2]()
        prepared["forward"], prepared["gradient"] = (calls[1], Ref(value)), (calls[2], Ref(gradient))
        empty!(counts)
        open(request["result"], "w") do file
            write(file, Float64[first(arrays(value))...])
            foreach(x -> write(file, c_order(x)), arrays(gradient))
        end
        return "{}"
    elseif request["call"] == "measure"
        call, sink = prepared[request["what"]]
        seconds, samples = parse(Float64, request["seconds"]), parse(Int, request["samples"])
        count = get!(() -> enough(call, sink, seconds), counts, request["what"])
        GC.gc(false)  # not a full one: those that follow a full one are slow, and only whoever asks for one meets them
        times = [timed(call, sink, count) / count for _ in 1:samples]
        return "{\"nanoseconds\": [$(join(times, ", "))], \"calls\": $count}"
    elseif request["call"] == "linear_algebra"
        isdefined(Main, :TwinGradRuntime) || include(joinpath(@__DIR__, "../../bridge/libjulia/runtime.jl"))
        said = Base.invokelatest(() -> "$(Main.TwinGradRuntime.blas()) $(Main.TwinGradRuntime.kernels())")
        return "{\"text\": \"$(escaped(strip(said)))\"}"
    end
    throw(Unsupported("no call $(request["call"])"))
end

answer(text) = (println(ANSWERS, text); flush(ANSWERS))

function guarded(work)
    try
        return "{\"result\": $(work())}"
    catch error
        Base.display_error(stderr, error, catch_backtrace())
        kind, message = error isa Unsupported ? ("unsupported", error.message) : ("failed", sprint(showerror, error))
        return "{\"error\": {\"kind\": \"$kind\", \"message\": \"$(escaped(first(message, 500)))\"}}"
    end
end

const FIELD = r"\"(\w+)\": *(?:\"((?:[^\"\\]|\\.)*)\"|([-+.\w]+))"

"""The strings and numbers of a JSON object whose objects have no name twice, as texts."""
fields(line) = Dict(m[1] => m[2] === nothing ? m[3] : unescaped(m[2]) for m in eachmatch(FIELD, line))

const LETTERS = Dict('b' => '\b', 'f' => '\f', 'n' => '\n', 'r' => '\r', 't' => '\t')

"""The text that a string of JSON stands for, given without its quotes."""
unescaped(string) = replace(string, r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u....|.)" => function (escape)
    escape[2] == 'u' || return get(LETTERS, escape[2], escape[2])
    code(place) = parse(UInt32, escape[place:place+3], base=16)
    return Char(length(escape) == 6 ? code(3) : 0x10000 + ((code(3) - 0xd800) << 10) + (code(9) - 0xdc00))
end)

"""A text as a string of JSON, without its quotes."""
escaped(text) = join(map(collect(text)) do c
    isvalid(c) || return "\\ufffd"
    c in ('"', '\\') && return "\\$c"
    return c < ' ' || c == '\x7f' ? "\\u" * string(UInt32(c), base=16, pad=4) : string(c)
end)

"""The arrays in a file of bare numbers, each in C order there; a number is a number."""
function read_arrays(path, shapes)
    numbers, start = reinterpret(Float64, read(path)), 0
    return map(split(shapes, ',')) do text
        shape = isempty(text) ? () : Tuple(parse.(Int, split(text, 'x')))
        part = numbers[start+1:start+prod(shape)]
        start += prod(shape)
        length(shape) == 2 ? permutedims(reshape(part, reverse(shape))) : isempty(shape) ? part[1] : part
    end
end

c_order(x::Number) = Float64[x]
c_order(x::AbstractVector) = Vector{Float64}(x)
c_order(x::AbstractMatrix) = Matrix{Float64}(permutedims(x))

arrays(x::Tuple) = x
arrays(x) = (x,)

"""Nanoseconds of some calls; each stores its result where the compiler can't see that nobody reads it."""
function timed(call, sink, count)
    start = time_ns()
    for _ in 1:count
        store!(sink, call)
    end
    return Float64(time_ns() - start)
end

@noinline store!(sink, call::F) where {F} = (sink[] = call(); nothing)

"""How many calls make a sample of this length; finding it out also warms up. One, where a single call is long enough."""
function enough(call, sink, seconds)
    seconds > 0 || return 1
    count, wanted = 1, seconds * 1e9
    timed(call, sink, 1)
    while true
        taken = timed(call, sink, count)
        taken >= 0.5 * wanted && return max(1, round(Int, count * wanted / taken))
        count = max(2 * count, min(10 * count, round(Int, count * wanted / max(taken, 1))))
    end
end

main(ARGS[1])
