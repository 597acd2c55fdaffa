# The package as a registry, Pkg and other packages see it: its Project.toml, its methods, and all kinds of arrays.

using LinearAlgebra, Random, Statistics
using Serialization: Serialization
using Libdl: Libdl

const PACKAGE = dirname(@__DIR__)

"""The tables of a Project.toml: name and value of each entry as they are written."""
function project(path::String)
    tables, table = Dict{String,Dict{String,String}}(), Dict{String,String}()
    tables[""] = table
    for line in eachline(path)
        (isempty(line) || startswith(line, '#')) && continue
        head = match(r"^\[(\w+)\]$", line)
        head === nothing || (table = tables[head[1]] = Dict{String,String}(); continue)
        entry = match(r"^(\w+) = (.+)$", line)
        table[entry[1]] = entry[2]
    end
    return tables
end

entries(tables, name) = get(tables, name, Dict{String,String}())

"""All modules of the package, its extensions apart."""
function modules(M::Module=TwinGrad)
    found = Module[M]
    for name in names(M; all=true)
        isdefined(M, name) || continue
        inner = getfield(M, name)
        inner isa Module && inner !== M && parentmodule(inner) === M && append!(found, modules(inner))
    end
    return unique(found)
end

const MODULES = modules()
const OTHERS = Module[Base, Core, LinearAlgebra, Random, Statistics, Serialization, Libdl]

@testset "Project.toml is complete" begin
    tables = project(joinpath(PACKAGE, "Project.toml"))
    @test issubset(("name", "uuid", "version"), keys(tables[""]))
    deps, weak, extras, compat = (entries(tables, name) for name in ("deps", "weakdeps", "extras", "compat"))
    @test haskey(compat, "julia") && isempty(setdiff(union(keys(deps), keys(weak), keys(extras)), keys(compat)))
    @test isempty(setdiff(keys(compat), keys(deps), keys(weak), keys(extras), ["julia"]))
    @test all(bounds -> match(r"^\"[<\d][\d., <]*\"$", bounds) !== nothing, values(compat))  # an upper end each
    @test isempty(intersect(keys(deps), union(keys(weak), keys(extras))))
    @test occursin("Test", entries(tables, "targets")["test"]) && haskey(extras, "Test")
    @test all(name -> extras[name] == weak[name], keys(weak))  # Julia before 1.9 knows no weak dependencies
    extensions = entries(tables, "extensions")
    @test sort!(collect(values(extensions))) == sort!(["\"$name\"" for name in keys(weak)])
    @test sort!(readdir(joinpath(PACKAGE, "ext"))) == sort!(["$name.jl" for name in keys(extensions)])
    @test isfile(joinpath(PACKAGE, "LICENSE")) && isfile(joinpath(PACKAGE, "README.md"))
end

@testset "what is used is depended on, and nothing else is" begin
    used = Set{String}()
    for (folder, _, files) in walkdir(joinpath(PACKAGE, "src")), file in files
        for line in eachline(joinpath(folder, file))
            late = match(r"PkgId\(.*, \"(\w+)\"\)", line)  # loaded where it is first needed
            late === nothing || push!(used, late[1])
            match(r"^(using|import) [A-Z]", line) === nothing && continue
            for name in split(split(replace(line, r"^(using|import) " => ""), ':')[1], ',')
                push!(used, split(strip(name), '.')[1])
            end
        end
    end
    deps = keys(entries(project(joinpath(PACKAGE, "Project.toml")), "deps"))
    @test setdiff(used, ["Base"]) == Set{String}(deps)
end

@testset "all that is exported is defined" begin
    @test [(M, name) for M in MODULES for name in names(M) if !isdefined(M, name)] == []
    @test length(MODULES) > 5
end

ours(m::Method) = m.module in MODULES

"""Functions and types of others that have methods of ours."""
function extended()
    found = Any[]
    for M in OTHERS, name in names(M; all=true)
        isdefined(M, name) && !Base.isdeprecated(M, name) || continue
        f = getfield(M, name)
        f isa DataType && f <: Function && isdefined(f, :instance) && (f = f.instance)  # some have no other name
        (f isa Function || f isa Type && f !== Vararg) && !(f isa Core.Builtin) || continue
        any(ours, methods(f)) && push!(found, f)
    end
    return unique(found)
end

const EXTENDED = extended()

@testset "no two methods are ambiguous, nor with those of others" begin
    # A module of these functions alone: to compare all methods of Julia with each other takes a quarter of a minute.
    of_others = Module(:OfOthers)
    for (k, f) in enumerate(EXTENDED)
        Core.eval(of_others, :(const $(Symbol("f", k)) = $f))
        f isa Function && Core.eval(of_others, :(const $(Symbol("F", k)) = $(typeof(f))))  # some versions look at these
    end
    @test length(EXTENDED) > 100
    @test filter(pair -> any(ours, pair), detect_ambiguities(of_others, MODULES...)) == []
end

@testset "the values of all type parameters are known" begin
    @test filter(ours, detect_unbound_args(MODULES...)) == []
end

"""Whether a type, or one that it is made of, is ours."""
is_ours(T::UnionAll) = is_ours(T.var.ub) || is_ours(T.body)
is_ours(T::Union) = is_ours(T.a) && is_ours(T.b)
is_ours(T::DataType) = T.name.module in MODULES || any(is_ours, T.parameters)
is_ours(T::TypeVar) = is_ours(T.ub)
is_ours(T) = T isa Function && parentmodule(T) in MODULES ||
    isdefined(Core, :TypeofVararg) && T isa Core.TypeofVararg && isdefined(T, :T) && is_ours(T.T)

@testset "functions of others get methods for types of ours alone" begin
    methods_of_ours = [m for f in EXTENDED for m in methods(f) if ours(m)]
    @test length(methods_of_ours) > 100
    @test filter(m -> !any(is_ours, Base.unwrap_unionall(m.sig).parameters), methods_of_ours) == []
end

@testset "all kinds of arrays can be differentiated by" begin
    A = [1.0 2.0; 3.0 4.0]
    for x in Any[range(0.5, 1.5; length=3), view([1.0, 2.0, 3.0, 4.0], 4:-2:1), view([1.0, 2.0, 3.0], [3, 1]), view(A, 1, :),
            view(A', 1:1, :), A', reshape(1.0:4.0, 2, 2), reinterpret(Float64, [1, 2]), PermutedDimsArray(A, (2, 1)),
            Diagonal([1.0, 2.0]), UpperTriangular(A), Symmetric(A)]
        plain = Array(x)
        for find in (
                x -> grad(x -> sum(sin.(x) .* x))(x),
                x -> compile(grad(x -> sum(sin.(x) .* x)))(x),
                x -> jvp(x -> x .* x, (x,), (x,))[2],
                x -> jacobian(x -> vec(x) .* 2, x),
                x -> forward_gradient(x -> sum(abs2, x) + sum(x), x),
                x -> (v = Variable(x); backward!(sum(v .^ 2)); v.grad))
            @test find(x) == find(plain)
        end
    end
end
