# Runs every test of the engine: `julia --project=julia_engine julia_engine/test/runtests.jl [name ...]`.
# With names (`ad_tape`), only those files. Random tests print their seed.

using Test
using TwinGrad

const FILES = sort!([f[1:end-3] for f in readdir(@__DIR__) if endswith(f, ".jl") && f != "runtests.jl"])
const CHOSEN = isempty(ARGS) ? FILES : ARGS

# What the files share.

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

@testset "TwinGrad" begin
    for name in CHOSEN
        @testset "$name" begin
            include(joinpath(@__DIR__, name * ".jl"))
        end
    end
end
