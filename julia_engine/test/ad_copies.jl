# Copies keep the graph or refuse: a gradient through one is right, or there is an error; it is never zero.

using TwinGrad.AD: AD
using Serialization: Serialization

"""A copy's gradient: that of `sum(copied(x) .^ 2)` where it is part of the graph."""
const X = [0.5, -1.5, 2.0]
same_again(x) = Serialization.deserialize(seekstart((io = IOBuffer(); Serialization.serialize(io, x); io)))
struct Wrapped
    inner::Any
end

const KEEPING = (
    ("copy", copy), ("deepcopy", deepcopy), ("deepcopy of a dictionary", x -> deepcopy(Dict("w" => x))["w"]),
    ("deepcopy of a named tuple", x -> deepcopy((w=x, b=[1.0])).w), ("deepcopy of a vector", x -> deepcopy([x, x])[2]),
    ("deepcopy of a nested container", x -> deepcopy(Dict(:a => [(x, 1)]))[:a][1][1]),
    ("deepcopy of a type of one's own", x -> deepcopy(Wrapped(x)).inner),
    ("deepcopy of what was computed", x -> deepcopy(x .* 2) ./ 2), ("copy of a slice", x -> vcat(copy(x[1:2]), x[3:3])),
    ("Tensor", x -> Tensor(x)), ("Tensor of what was computed", x -> Tensor(x .* 2) ./ 2), ("identity", x -> identity.(x)),
    ("a comprehension", x -> stack([v for v in x])), ("map", x -> stack(map(v -> v * 1, x))), ("broadcast", x -> (v -> v).(x)),
    ("generator", x -> stack(collect(v * 1 for v in x))), ("view", x -> view(x, :)),
    ("vec", vec), ("reshape", x -> reshape(x, 1, 3)),
    ("vcat", x -> vcat(x)), ("splat", x -> stack([x...])), ("Float64.", x -> Float64.(x)),
    ("the element type", x -> convert(Tensor, x)))
const LOSING = (
    ("Array", Array), ("Array{Float64}", Array{Float64}), ("Vector", Vector), ("collect", collect),
    ("convert", x -> convert(Array, x)), ("convert to a vector", x -> convert(Vector{Float64}, x)), ("Constant", Constant),
    ("Variable", Variable), ("Array of what was computed", x -> Array(x .* 2) ./ 2),
    ("Constant of what was computed", x -> Constant(x .* 2)),
    ("similar, filled", x -> (y = similar(x); for i in 1:3; y[i] = x[i]; end; y)),
    ("similar and .=", x -> (y = similar(x); y .= x; y)),
    ("copyto!", x -> copyto!(zeros(3), x)), ("zeros and .=", x -> (y = zeros(3); y .= x .* 1; y)),
    ("an array literal", x -> Float64[v for v in x]),
    ("Float64 of elements", x -> [Float64(x[1]), Float64(x[2]), Float64(x[3])]), ("serialize", same_again),
    ("serialize in a dictionary", x -> same_again(Dict("w" => x))["w"]), ("parent", parent),
    ("reinterpret", x -> reinterpret(Float64, x)))

@testset "what is made element by element keeps the size of the tensor" begin
    M, row = [1.0 2.0; 3.0 4.0], [10.0 20.0]
    for made in (X -> map(v -> v^2, X), X -> [v^2 for v in X], X -> map((v, w) -> v * w, X, X))
        value_, gradient = value_and_grad(X -> sum(made(X) .* row))(M)
        @test value_ == 500.0 && gradient == [20.0 80.0; 60.0 160.0]
        @test compile(X -> stack(vec(made(X))))(M) == vec(M .^ 2)
    end
    for n in 1:3, (join, joined) in ((hcat, (3, n)), (vcat, (3n,)))
        y = vjp(x -> reduce(join, [2 .* x[:, k] for k in 1:size(x, 2)]), ones(3, n))[1]
        @test size(y) == joined && all(==(2.0), value(y))
    end
end

squared(y) = sum(y .^ 2)
const STATES = (
    ("grad", f -> grad(x -> squared(f(x)))(X)),
    ("compiled", f -> compile(grad(x -> squared(f(x))))(X)),
    ("checkpoint", f -> grad(x -> squared(checkpoint(t -> f(t .* 2) ./ 2)(x)))(X)),
    ("scan's carry", f -> grad(x -> squared(scan((c, t) -> (reshape(f(c), 3), nothing), x, nothing; length=2)[1]))(X)),
    ("what a scan captures", f -> grad(x -> squared(scan((c, t) -> (c .+ reshape(f(x), 3), nothing), zeros(3),
        nothing; length=1)[1]))(X)),
    ("inside another gradient", f -> grad(y -> sum(grad(x -> squared(f(x)))(y) .* [1.0, 1, 1]))(X) .* X),
    ("a container", f -> grad(p -> squared(f(p.w)))((w=X,)).w))

@testset "a copy in $state" for (state, run) in STATES
    for (name, f) in KEEPING
        @test (name, run(Hidden(f)) ≈ 2X) == (name, true)
    end
    for (name, f) in LOSING
        error = error_of(() -> run(Hidden(f)))
        @test (name, error isa Exception) == (name, true)
        name in ("Array", "collect", "Vector", "Variable", "Constant", "convert", "serialize", "serialize in a dictionary") &&
            @test (name, error isa EngineError) == (name, true)
    end
end

@testset "forward mode keeps copies, too" begin
    for (name, f) in KEEPING
        @test (name, (g = Hidden(f); jvp(x -> squared(g(x)), (X,), (X,))[2])) == (name, sum(2X .* X))
    end
end

@testset "eager variables" begin
    for (name, f) in KEEPING
        x = Variable(copy(X))
        computed = x .* 1
        backward!(squared(f(computed)))
        @test (name, x.grad) == (name, 2X)
    end
    x = Variable(copy(X); name="w")
    twice = deepcopy(Dict(1 => x, 2 => x))
    @test twice[1] === twice[2] && twice[1] !== x && twice[1].name == "w" && twice[1].requires_grad && value(twice[1]) == X
    assign!(twice[1], [1.0, 1, 1])
    @test value(x) == X
    backward!(squared(twice[1]))
    @test twice[1].grad == [2, 2, 2] && x.grad === nothing
    shared = deepcopy((array=X, tensor=Constant(X)))
    shared.array[1] = 9
    @test value(shared.tensor)[1] == 9 && X[1] == 0.5
    part = deepcopy(Variable(view(copy(X), 2:3)))
    @test value(part) == X[2:3] && part.requires_grad
    @test Array(x) == collect(x) == Vector(x) == convert(Array, x) == X && Array(x) !== value(x)
    @test value(Tensor(Constant(X))) == X && Variable(x).requires_grad && !Constant(x).requires_grad &&
        similar(x) isa Vector{Float64}
    @test size(similar(x, (2, 2))) == (2, 2) && eltype(similar(x, Float32)) === Float32
    @test Array(Constant([1 2; 3 4])) == [1 2; 3 4] == Matrix(Constant([1 2; 3 4]))
    for f in (Variable, Constant)
        @test occursin("the derivative of this tensor would be lost", message_of(() -> f(x .* 2)))
    end
    @test deepcopy(X) == X
end

@testset "constants may be copied anywhere" begin
    c = Constant([1.0, 2, 3])
    for f in (Array, collect, deepcopy, copy, Tensor, Constant)
        @test grad(x -> sum(x .* f(c)))(X) == [1, 2, 3]
        @test compile(grad(x -> sum(x .* f(c))))(X) == [1, 2, 3]
    end
    @test grad(x -> sum(x .* value(x)))(X) == X
    @test grad(x -> sum(x .* Constant(stop_gradient(x))))(X) == X
end

@testset "compiled functions, tapes, chains and trainers" begin
    f = compile(x -> sum(x .^ 2))
    f(X)
    g = deepcopy(f)
    @test g !== f && g(X) == f(X) && g([1.0]) == 1 && deepcopy((f=f, g=f)).f(X) == f(X)
    @test occursin("cannot be copied", message_of(() -> deepcopy(first(values(f.tapes))[1])))

    chain = Chain(Dense(3 => 4, tanh), Dense(4 => 2))
    for it in (f, first(values(f.tapes))[1], chain, Trainer(chain), Variable(copy(X)), Dict(1 => Constant(X)))
        @test error_of(() -> same_again(it)) isa EngineError
    end
    other = deepcopy(chain)
    batch, labels = randn(AD.MersenneTwister(1), Float32, 3, 20), rand(AD.MersenneTwister(2), 1:2, 20)
    @test value(other(batch)) == value(chain(batch))
    other.parameters.vector .*= 2
    @test value(other(batch)) != value(chain(batch)) && value(other.parameters.tensors[1]) == other.parameters.arrays[1]
    assign!(other.parameters.tensors[1], 0)
    @test all(iszero, other.parameters.arrays[1]) && !all(iszero, chain.parameters.arrays[1])

    trainer = Trainer(chain; optimizer=Adam(0.01), batch_size=8, threads=1)
    train_epoch!(trainer, batch, labels)
    copied = deepcopy(trainer)
    expected = copy(trainer.chain.parameters.vector)
    after = train_epoch!(copied, batch, labels)
    @test trainer.chain.parameters.vector == expected != copied.chain.parameters.vector
    @test train_epoch!(trainer, batch, labels) == after && trainer.chain.parameters.vector == copied.chain.parameters.vector
    both = deepcopy((trainer, trainer.chain))
    @test both[1].chain === both[2] && both[1].optimizer !== trainer.optimizer
end

@testset "a copy has the same ops" begin
    op = AD.TABLE["sin"]
    @test deepcopy((f=op, ops=[op])) == (f=op, ops=[op])
    @test deepcopy(op) === op
end
