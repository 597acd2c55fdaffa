# Runs every test of the engine: `julia --project=julia_engine julia_engine/test/runtests.jl [name ...]`.
# With names (`ad_tape`), only those files. A file without a test is an error. Random tests print their seed.

using Test
using TwinGrad

# Test code runs once: compile it quickly. The engine's modules keep their optimisation levels.
Base.Experimental.@optlevel 0

const FILES = sort!([f[1:end-3] for f in readdir(@__DIR__) if endswith(f, ".jl") && f != "runtests.jl"])
const CHOSEN = isempty(ARGS) ? FILES : ARGS

# What the files share.

"""How many times a random test draws: a hundred times as often in a campaign."""
draws(n) = get(ENV, "TWINGRAD_TEST_PROFILE", "") == "campaign" ? 100n : n

"""The seed of a random test, by its number in the files and the seed of the whole run."""
seeded(n) = n + parse(Int, get(ENV, "TWINGRAD_TEST_SEED", "0"))

"""The message of the engine's error that `f()` ends in; empty if it doesn't."""
message_of(f) =
    try
        f()
        ""
    catch error
        error isa EngineError ? error.message : rethrow()
    end

"""What `f()` throws; nothing if it returns."""
error_of(f) =
    try
        f()
        nothing
    catch error
        error
    end

"""The attributes of an op, in the order of their names in its record."""
named(op, values...) = TwinGrad.AD.attributes((name => value for (name, value) in zip(op.attrs, values))...)

"""A function of any type: what is called with it is compiled once, not for every function anew."""
struct Hidden
    f::Any
end
(h::Hidden)(x...) = h.f(x...)

"""Whether Julia was started to interpret, with `--compile=min`, in a version in which that can be changed."""
interprets() = TwinGrad.Versions.INTERPRETS && Base.JLOptions().compile_enabled == TwinGrad.AD.Kernels.INTERPRET

"""
`f()`, compiled with all that it calls, even where Julia was started with `--compile=min`: for what counts allocations, and
for loops of many steps.
"""
function compiling(f)
    interprets() || return f()
    TwinGrad.AD.Kernels.compiling() do
        TwinGrad.AD.Kernels.compile_interpreted!()  # a method that was interpreted before stays so
        f()
    end
end

"""
Compile what Julia, started with `--compile=min`, had better not interpret: comparisons and copies of large arrays, which
would take longer, and LLVM's own operations on dual numbers with up to five partial derivatives, which can't be interpreted.
"""
function compile_beforehand()
    interprets() || return nothing
    duals = TwinGrad.AD.DualNumbers
    TwinGrad.AD.Kernels.compiling() do
        for T in (Float32, Float64)
            for x in (T[1, 2], T[1 2; 3 4])
                for f in (==, isequal, isapprox, -)
                    Base.invokelatest(f, x, x)
                end
                Base.invokelatest(isapprox, x, x; rtol=1e-3)
                foreach(f -> Base.invokelatest(all, f, x), (isfinite, iszero))
            end
            Base.invokelatest(as_dict, Chain(Dense(1 => 1); dtype=T).parameters)
            for n in 1:5
                moves = NTuple{n,T}
                precompile(duals.scaled, (T, moves))
                precompile(duals.added, (moves, moves))
                precompile(duals.subtracted, (moves, moves))
                precompile(duals.combined, (T, moves, T, moves))
            end
        end
    end
    return nothing
end
compile_beforehand()

"""The number of tests in a test set, and whether all of them passed."""
count_tests(set) = number(set.n_passed) + sum(Int[count_tests(x) for x in set.results])
count_tests(::Test.Result) = 1  # passed ones are counted by their set alone
passed(set) = all(passed, set.results)
passed(x::Test.Result) = x isa Union{Test.Pass,Test.Broken}
number(n::Integer) = n
number(n) = n[]  # an atomic counter in newer versions

@testset "TwinGrad" begin
    for name in CHOSEN
        println("file ", name)
        flush(stdout)  # for whoever reads how far an interrupted run came
        start = ccall(:clock, Clong, ())
        tests = @testset "$name" begin
            include(joinpath(@__DIR__, name * ".jl"))
        end
        seconds = (ccall(:clock, Clong, ()) - start) / 1e6
        n = count_tests(tests)
        n > 0 || error("the file $name has no test")
        println("file ", name, ": ", n, " tests ", passed(tests) ? "passed" : "ran, and some failed", ", ",
            round(seconds; digits=1), " s of CPU")
        flush(stdout)
    end
end
