# Numbers that Julia code reads of what a compiled function captures: a change is seen at the next call.

using TwinGrad.AD: AD

mutable struct Settings
    rate::Float64
    weights::Any
end
struct Affine
    weights::Any
end
(f::Affine)(x) = x .* f.weights[2] .+ sum(f.weights)
variable_of_a_closure() = (rate = 2.0; (x -> sum(x) * rate, () -> rate += 1))

"""What a function captures: functions of `x` that read numbers of it, and what changes these."""
const CAPTURES = Any[
    ("an array", () -> (w = [1.0, 2, 3]; (x -> x .* w[1], () -> w[1] += 1))),
    ("its sum", () -> (w = [1.0, 2, 3]; (x -> x .* sum(w), () -> w[3] += 1))),
    ("integers", () -> (w = [1, 2, 3]; (x -> x .^ w[2], () -> w[2] += 1))),
    ("what decides a branch", () -> (w = [true]; (x -> w[1] ? x .* 2 : x .* 3, () -> w[1] = !w[1]))),
    ("what Julia computes of an array", () -> (w = [1.0 2; 3 4]; (x -> x .* (2 .* w)[:, 1], () -> w[1, 1] += 1))),
    ("a copied slice", () -> (w = [1.0 2; 3 4]; (x -> x .* w[:, 1], () -> w[2, 1] += 1))),
    ("an array's length", () -> (w = [1.0]; (x -> x .* length(w), () -> push!(w, 1.0)))),
    ("a view", () -> (w = [1.0, 2, 3]; v = view(w, 2:3); (x -> x .* v[1], () -> w[2] += 1))),
    ("a transposed matrix", () -> (w = [1.0 2; 3 4]'; (x -> x .* w[1, 2], () -> w[1, 2] += 1))),
    ("bits", () -> (w = trues(3); (x -> x .* count(w), () -> w[2] = !w[2]))),
    ("strings", () -> (w = ["a"]; (x -> x .* length(w[1]), () -> w[1] *= "b"))),
    ("a tuple", () -> (w = (1, [2.0]); (x -> x .* w[2][1], () -> w[2][1] += 1))),
    ("a dictionary's array", () -> (w = Dict(:a => [2.0]); (x -> x .* w[:a][1], () -> w[:a][1] += 1))),
    ("a dictionary's number", () -> (w = Dict("a" => 2.0); (x -> x .* w["a"], () -> w["a"] += 1))),
    ("an array put in another's place", () -> (w = Any[[2.0, 1.0]]; (x -> x .* w[1], () -> w[1] = w[1] .+ 1))),
    ("a reference", () -> (w = Ref(2.0); (x -> x .* w[], () -> w[] += 1))),
    ("a variable", variable_of_a_closure),
    ("a field", () -> (w = Settings(2.0, nothing); (x -> x .* w.rate, () -> w.rate += 1))),
    ("a field's array", () -> (w = Settings(2.0, (a=[1.0],)); (x -> x .* w.weights.a[1], () -> w.weights.a[1] += 1))),
    ("a function of one's own", () -> (w = [1.0, 2.0]; (Affine(w), () -> w[2] += 1))),
    ("a function in a function", () -> (w = [2.0]; g = Affine(Any[0.0, 3.0, w]); (x -> x .* g.weights[3][1], () -> w[1] += 1))),
    ("a tensor's number", () -> (w = Constant([2.0, 3.0]); (x -> x .* value(w)[1], () -> assign!(w, value(w) .+ 1)))),
    ("a loop's step", () -> (w = [2.0]; (x -> scan((c, _) -> (c .* w[1], nothing), x, nothing; length=2)[1], () -> w[1] += 1))),
    ("a checkpoint", () -> (w = [2.0]; (x -> checkpoint(t -> t .* w[1])(x), () -> w[1] += 1))),
    ("a compiled function", () -> (w = [2.0]; g = compile(x -> x .* w[1]); (x -> g(x) .+ 1, () -> w[1] += 1)))]

plain(x) = x isa Tensor ? AD.unwrapped(value(x)) : x

@testset "a change is seen: $name" for (name, make) in CAPTURES
    f, change! = map(Hidden, make())
    x, y = [0.5, -1.5], [1.0, 2.0]
    total(x) = sum(f(x))
    compiled, gradient_ = compile(f), compile(grad(total))
    for k in 1:3, v in (x, y)
        expected = plain(f(Constant(v)))
        @test (name, k, compiled(v), compiled(v)) == (name, k, expected, expected)
        @test (name, k, gradient_(v), gradient_(v)) == (name, k, grad(total)(v), grad(total)(v))
        v === y && change!()
        v === y && @test (name, plain(f(Constant(v))) != expected) == (name, true)
    end
end

@testset "numbers alone, memory for results, and a tape of one's own" begin
    w = [2.0, 3.0]
    f = compile(x -> x * w[1] + evalpoly(x, w))
    @test f(2.0) == 12 && f(2.0) == 12
    w[1] = 5
    @test f(2.0) == 21 && f(2.0) == 21
    g, room = compile(x -> x .* w[1]), zeros(2)
    @test run!(room, g, [1.0, 2.0]) == [5, 10] && run!(room, g, [1.0, 2.0]) == [5, 10]
    tape = first(values(g.tapes))[1]
    w[1] = 7
    @test occursin("was changed since the function was traced", message_of(() -> tape([1.0, 2.0])))
    @test run!(room, g, [1.0, 2.0]) == [7, 14]
end

@testset "what needs no other trace causes none" begin
    traces = Ref(0)
    w, unread, both = [1.0, 2.0], Settings(1.0, [3.0]), Dict("w" => [1.0, 2.0])
    seen, calls = [], Dict{Int,Int}()
    f = compile(function (x)
        traces[] += 1
        push!(seen, length(x))
        calls[length(x)] = traces[]
        sum(x .* w) + sum(view(both["w"], 1:2) .* x) + unread.weights[1]
    end)
    for k in 1:3
        @test f([1.0, 1.0]) == sum(w) + sum(both["w"]) + 3
        w .+= 1  # is read in place
        both["w"] .*= 2
    end
    @test traces[] == 1 && seen == [2]
    unread.rate = 2  # could be what a branch depended on
    f([1.0, 1.0])
    @test traces[] == 2
    tape = first(values(f.tapes))[1]
    @test !any(x -> x.object === w || x.object === both["w"] || x.object === traces, tape.watched)
    @test isempty(AD.watch(x -> sum(x .* 2))) && length(AD.watch(x -> sum(x .* w))) == 1
    chain = Chain(Dense(2 => 3, tanh), Dense(3 => 1); dtype=Float64)
    of_chain = compile(x -> sum(chain(x)))
    before = of_chain([1.0 2.0]')
    tape = first(values(of_chain.tapes))[1]
    chain.parameters.vector .*= 2
    @test of_chain([1.0 2.0]') == item(sum(chain(Constant([1.0 2.0]')))) != before && first(values(of_chain.tapes))[1] === tape
    push!(chain, Dense(1 => 2))
    @test of_chain([1.0 2.0]') == item(sum(chain(Constant([1.0 2.0]'))))
end
