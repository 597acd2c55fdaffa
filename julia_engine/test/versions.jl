# What differs between versions of Julia is in one file.

using TwinGrad.Versions: Versions

@testset "one file tells versions apart" begin
    sources = joinpath(dirname(@__DIR__), "src")
    asks = r"\bVERSION\b|isdefined\((Base|Core|LinearAlgebra)\b|jl_generating_output"
    found = String[]
    for (folder, _, files) in walkdir(sources), file in files
        text = read(joinpath(folder, file), String)
        occursin(asks, text) && push!(found, file)
    end
    @test found == ["versions.jl"]
end

@testset "features are those of their versions" begin
    @test Versions.HAS_STACK == (VERSION >= v"1.9")
    @test Versions.IFELSE_TAKES_METHODS == (VERSION >= v"1.7")
    @test (Versions.CONTAINERS === Array) == (VERSION < v"1.11")
    @test !(Versions.INTERPRETS && Versions.KEEPS_MACHINE_CODE)
    @test !Versions.writes_code()
end
