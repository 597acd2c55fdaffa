# Convolution and pooling: against plain loops, and the fused ops against those that they stand for.

module Convolutions

using Test
using TwinGrad
using TwinGrad.AD: AD, Kernels, apply
using Main: error_of

const SEED = 31
@info "random operands" seed = SEED
const RANDOM = AD.MersenneTwister(SEED)

# Plain loops over images (W, H, C, N); those of one axis get a second one of length one ----------------------------------

function plain_conv(x::Array{T,4}, w::Array{T,4}, stride, padding, dilation, groups) where {T}
    out = [(size(x, d) + sum(padding[d]) - dilation[d] * (size(w, d) - 1) - 1) ÷ stride[d] + 1 for d in 1:2]
    y = zeros(T, out..., size(w, 4), size(x, 4))
    for n in axes(y, 4), f in axes(y, 3), v in axes(y, 2), u in axes(y, 1), c in axes(w, 3), j in axes(w, 2), i in axes(w, 1)
        a = (u - 1) * stride[1] + (i - 1) * dilation[1] - padding[1][1] + 1
        b = (v - 1) * stride[2] + (j - 1) * dilation[2] - padding[2][1] + 1
        channel = (f - 1) ÷ (size(w, 4) ÷ groups) * size(w, 3) + c
        checkbounds(Bool, x, a, b, 1, 1) && (y[u, v, f, n] += x[a, b, channel, n] * w[i, j, c, f])
    end
    return y
end

"""The elements of each window, in order, by `f`."""
function plain_pool(f, x::Array{T,4}, window, stride, padding, outside) where {T}
    out = [(size(x, d) + sum(padding[d]) - window[d]) ÷ stride[d] + 1 for d in 1:2]
    here(u, v, c, n) = checkbounds(Bool, x, u, v, c, n) ? x[u, v, c, n] : T(outside)
    return [f([here((u - 1) * stride[1] + i - padding[1][1], (v - 1) * stride[2] + j - padding[2][1], c, n)
               for i in 1:window[1], j in 1:window[2]]) for u in 1:out[1], v in 1:out[2], c in axes(x, 3), n in axes(x, 4)]
end

image(x::Array{T,3}) where {T} = reshape(x, size(x, 1), 1, size(x, 2), size(x, 3))
image(x::Array{T,4}) where {T} = x
both(v, one) = length(v) == 1 ? (v[1], one) : Tuple(v)

"""Numbers that all differ by more than the checker's steps: no window has two largest."""
distinct(dims...) = reshape((sortperm(rand(RANDOM, prod(dims))) .- prod(dims) ÷ 2) ./ 50, dims...)

const SETTINGS = [  # x, weight, stride, padding, dilation, groups
    ((9, 8, 2, 3), (3, 2, 2, 4), (2, 1), ((1, 0), (2, 1)), (1, 2), 1),
    ((9, 8, 4, 2), (3, 2, 2, 6), (1, 3), ((1, 4), (0, 1)), (2, 1), 2),
    ((5, 6, 3, 2), (1, 1, 3, 4), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),
    ((5, 6, 3, 2), (1, 1, 1, 3), (2, 2), ((0, 1), (0, 0)), (1, 1), 3),
    ((3, 3, 1, 1), (3, 3, 1, 1), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),
    ((1, 1, 1, 1), (1, 1, 1, 1), (3, 2), ((0, 0), (0, 0)), (1, 1), 1),
    ((7, 6, 2, 0), (3, 3, 2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),
    ((11, 4, 2), (3, 4, 5), (2,), ((1, 2),), (2,), 1),
    ((7, 4, 2), (2, 2, 6), (1,), ((0, 0),), (1,), 2),
    ((35, 3, 1, 1), (3, 2, 1, 2), (2, 2), ((1, 2), (1, 0)), (1, 1), 1),  # rows of whole vectors and what is left
    ((24, 1, 2), (4, 1, 2), (2,), ((0, 1),), (1,), 1),
    ((17, 3, 1, 1), (2, 1, 1, 2), (1, 2), ((0, 1), (0, 0)), (3, 1), 1),
    ((9, 5, 2, 1), (3, 2, 2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1), 1),  # two apart in memory, with channels first
    ((1, 1, 1, 1), (3, 3, 1, 1), (1, 1), ((1, 1), (1, 1)), (1, 1), 1),  # taps that are never inside of the image
]

@testset "conv $x by $w, $T" for (x, w, stride, padding, dilation, groups) in SETTINGS, T in (Float64, Float32)
    a, b = randn(RANDOM, T, x...), randn(RANDOM, T, w...)
    f(a, b) = conv(a, b; stride=stride, padding=padding, dilation=dilation, groups=groups)
    expected = plain_conv(image(a), image(b), both(stride, 1), both(padding, (0, 0)), both(dilation, 1), groups)
    y = value(f(Constant(a), Constant(b)))
    @test eltype(y) === T
    @test image(y) ≈ expected
    @test compile(f)(a, b) == y
    if T === Float64
        gradcheck(f, a, b)
        # Second derivatives, through both operands.
        gradcheck((a, b) -> reduce(vcat, vec.(grad((a, b) -> sum(f(a, b) .^ 2); argnums=(1, 2))(a, b))), a, b; rtol=1e-5)
    end
    # Other layouts: channels first in memory.
    turned = permutedims(Constant(permutedims(a, (ndims(a) - 1, 1:ndims(a)-2..., ndims(a)))), (2:ndims(a)-1..., 1, ndims(a)))
    @test value(f(turned, Constant(b))) ≈ y
end

const POOLS = [  # x, window, stride, padding
    ((7, 6, 2, 3), (2, 3), (1, 2), ((1, 1), (1, 0))),
    ((6, 6, 1, 2), (2, 2), (2, 2), ((0, 0), (0, 0))),
    ((5, 5, 1, 1), (5, 5), (1, 1), ((0, 0), (0, 0))),
    ((1, 1, 2, 1), (1, 1), (1, 1), ((0, 0), (0, 0))),
    ((4, 4, 2, 0), (2, 2), (2, 2), ((0, 0), (0, 0))),
    ((9, 2, 3), (3,), (2,), ((1, 1),)),
    ((8, 3, 2), (4,), (4,), ((0, 0),)),
]

@testset "pool $x by $window" for (x, window, stride, padding) in POOLS
    a = distinct(x...)
    sizes, steps, sides = both(window, 1), both(stride, 1), both(padding, (0, 0))
    largest(a) = max_pool(a, window; stride=stride, padding=padding)
    average(a) = avg_pool(a, window; stride=stride, padding=padding)
    for T in (Float64, Float32)
        b = T.(a)
        @test image(value(largest(Constant(b)))) == plain_pool(maximum, image(b), sizes, steps, sides, -Inf)
        expected = Array{T}(plain_pool(v -> sum(v) / length(v), image(b), sizes, steps, sides, 0))
        @test image(value(average(Constant(b)))) ≈ expected
        @test eltype(value(largest(Constant(b)))) === eltype(value(average(Constant(b)))) === T
    end
    gradcheck(largest, a)
    gradcheck(average, a)
    gradcheck(t -> grad(a -> sum(largest(a) .^ 3))(t), a; rtol=1e-5)
    gradcheck(t -> grad(a -> sum(average(a) .^ 3))(t), a; rtol=1e-5)
end

@testset "ties, NaN and infinities" begin
    pooled(x) = value(max_pool(Constant(x), 2))
    x = reshape([1.0, 1.0, 1.0, 1.0], 2, 2, 1, 1)
    @test grad(x -> sum(max_pool(x, 2)))(x) == reshape([1.0, 0, 0, 0], 2, 2, 1, 1)
    @test grad(x -> sum(max_pool(x, 2; stride=1, padding=1)))(x)[1] == 4  # only the corner is each window's first
    @test isnan(only(pooled(reshape([1.0, NaN, 3.0, 2.0], 2, 2, 1, 1))))
    @test only(pooled(fill(-Inf, 2, 2, 1, 1))) == -Inf
    @test only(pooled(reshape([-Inf, Inf, 0.0, 1.0], 2, 2, 1, 1))) == Inf
    @test grad(x -> sum(max_pool(x, 2)))(reshape([1.0, NaN, 3.0, NaN], 2, 2, 1, 1)) == reshape([0.0, 1, 0, 0], 2, 2, 1, 1)
end

@testset "errors name expected and actual" begin
    x, w = Variable(ones(5, 4, 2, 3)), Variable(ones(3, 3, 2, 4))
    for (f, text) in (
        (() -> conv(x, Variable(ones(6, 3, 2, 4))), "a window of size (6, 3) does not fit an input of (5, 4)"),
        (() -> conv(x, w; dilation=2), "with dilation (2, 2) does not fit"),
        (() -> conv(x, Variable(ones(3, 3, 1, 4))), "has 2 channels; a weight of size (3, 3, 1, 4) in 1 group takes 1"),
        (() -> conv(x, Variable(ones(3, 3, 1, 3)); groups=2), "its 3 filters cannot be divided"),
        (() -> conv(Variable(ones(5, 2)), w), "got sizes (5, 2) and (3, 3, 2, 4)"),
        (() -> conv(x, w; stride=0), "stride must be an integer >= 1"),
        (() -> conv(x, w; padding=(1, 2, 3)), "padding must be"),
        (() -> conv(x, w; padding=:same), "padding must be an integer >= 0, or an integer or a pair for each of 2 axes, got :same"),
        (() -> conv(x, w; padding=(1, :same)), "padding must be"),
        (() -> conv(x, w; stride=nothing), "stride must be an integer >= 1, or one for each of 2 axes, got nothing"),
        (() -> conv(x, w; dilation=1.5), "dilation must be"),
        (() -> max_pool(x, nothing), "max_pool: window must be"),
        (() -> avg_pool(x, 2; padding=nothing), "avg_pool: padding must be"),
        (() -> interpolate(x, :double), "interpolate: size must be"),
        (() -> max_pool(x, 5), "a window of size (5, 5) does not fit an input of (5, 4)"),
        (() -> max_pool(x, 5; ceil_mode=true), "a window of size (5, 5) does not fit an input of (5, 4)"),
        (() -> avg_pool(x, (1, 5); ceil_mode=true), "a window of size (1, 5) does not fit an input of (5, 4)"),
        (() -> max_pool(x, 2; padding=2), "padding must be at most half the window"),
        (() -> avg_pool(Variable(ones(5)), 2), "expected size (W, C, N) or (W, H, C, N), or more axes, got (5,)"))
        error = error_of(f)
        @test (text, error isa ShapeError && occursin(text, error.message)) == (text, true)
    end
    @test_throws DTypeError conv(x, Variable(ones(Float32, 3, 3, 2, 4)))
end

# Fused ops --------------------------------------------------------------------------------------------------------------

const VECTOR_BYTES = Kernels.VECTOR_BYTES[]

"""The loss and all gradients of a function of arrays: by a tape, and by one without fused ops."""
function with_and_without(f, arrays)
    numbers = Tuple(1:length(arrays))
    fused = compile(value_and_grad(f; argnums=numbers))
    plain = compile(value_and_grad(f; argnums=numbers); techniques=Techniques(; fuse=false))
    return fused, plain
end

same(a::Number, b::Number, limit) = abs(a - b) <= limit * max(abs(b), 1)
same(a::AbstractArray, b::AbstractArray, limit) =
    sum(abs2, a .- b) <= abs2(limit) * max(sum(abs2, b), 1)

function check_fused(f, arrays, name, T)
    fused, plain = with_and_without(f, arrays)
    limit = T === Float64 ? 1e-12 : 2e-5
    y, g = fused(arrays...)
    expected_y, expected_g = plain(arrays...)
    @test same(y, expected_y, limit)
    @test all(same(a, b, limit) for (a, b) in zip(g, expected_g))
    @test all(eltype(a) === T for a in g)
    @test occursin(name, source(fused)) && !occursin(name, source(plain))
    tape = first(values(fused.tapes))[1]
    for byte in (0x00, 0xff)
        poison!(tape, byte)
        @test isequal(fused(arrays...), (y, g))
    end
end

"""Layers on images whose pools are fused, with what a loss needs to depend on every element."""
function images(x, w, b, c; relu_first, bias, padding)
    y = conv(x, w; padding=padding)
    bias && (y = y .+ reshape(b, 1, 1, :))
    relu_first && (y = relu(y))
    y = max_pool(y, 2)
    return sum(y .* c) + sum(y .^ 2)
end

const EVERY_VECTOR = unique((min(32, VECTOR_BYTES), VECTOR_BYTES))

@testset "fused images of $dims by $kernel, $T, vectors of $bytes bytes" for bytes in EVERY_VECTOR,
        T in (Float32, Float64), (dims, kernel, filters, padding) in (((28, 28, 1, 3), 3, 6, 0), ((8, 9, 3, 2), 3, 4, 1),
            ((41, 7, 2, 2), 3, 3, ((2, 1), (0, 3))), ((4, 4, 1, 1), 3, 1, 0), ((14, 15, 2, 2), 5, 3, 0),
            ((5, 5, 1, 2), 3, 2, 0))

    bytes == 0 && continue
    Kernels.VECTOR_BYTES[] = bytes
    try
        x, w, b = randn(RANDOM, T, dims...), randn(RANDOM, T, kernel, kernel, dims[3], filters), randn(RANDOM, T, filters)
        c = randn(RANDOM, T, size(value(max_pool(conv(x, w; padding=padding), 2)))...)
        for relu_first in (true, false), bias in (true, false)
            f(x, w, b) = images(x, w, b, c; relu_first=relu_first, bias=bias, padding=padding)
            check_fused(f, (x, w, b), "conv_pool", T)
        end
    finally
        Kernels.VECTOR_BYTES[] = VECTOR_BYTES
    end
end

function sequences(x, w, b, c; relu_first, bias, stride, window, step)
    y = conv(permutedims(x, (2, 1, 3)), w; stride=stride)
    bias && (y = y .+ reshape(b, 1, :))
    relu_first && (y = relu(y))
    y = max_pool(y, window; stride=step)
    return sum(y .* c) + sum(y .^ 2)
end

@testset "fused sequences of $dims, vectors of $bytes bytes" for bytes in EVERY_VECTOR,
        (dims, kernel, filters, stride, window, step) in (((50, 130, 3), 3, 8, 1, 8, 8), ((4, 20, 2), 3, 11, 2, 3, 2),
            ((3, 9, 1), 2, 1, 1, 8, 8), ((6, 21, 2), 1, 17, 1, 2, 3))

    bytes == 0 && continue
    Kernels.VECTOR_BYTES[] = bytes
    try
        T = Float32
        x, w, b = randn(RANDOM, T, dims...), randn(RANDOM, T, kernel, dims[1], filters), randn(RANDOM, T, filters)
        y = conv(permutedims(x, (2, 1, 3)), w; stride=stride)
        c = randn(RANDOM, T, size(value(max_pool(y, window; stride=step)))...)
        for relu_first in (true, false), bias in (true, false)
            f(x, w, b) = sequences(x, w, b, c; relu_first=relu_first, bias=bias, stride=stride, window=window, step=step)
            check_fused(f, (x, w, b), "sequence_pool", T)
        end
    finally
        Kernels.VECTOR_BYTES[] = VECTOR_BYTES
    end
end

if VECTOR_BYTES > 0
    @testset "what others need is not fused away" begin
        x, w = randn(RANDOM, 8, 8, 1, 2), randn(RANDOM, 3, 3, 1, 2)
        for f in ((x, w) -> (y = relu(conv(x, w)); sum(max_pool(y, 2)) + sum(y)),
            (x, w) -> (y = conv(x, w); sum(max_pool(relu(y), 2)) + sum(y .^ 2)))
            fused, plain = with_and_without(f, (x, w))
            @test fused(x, w)[1] ≈ plain(x, w)[1]
            @test all(a ≈ b for (a, b) in zip(fused(x, w)[2], plain(x, w)[2]))
            @test !occursin("conv_pool", source(fused))
        end
        # The sum of a convolution and a bias of more elements than there are filters is larger than the convolution.
        for activate in (relu, identity)
            of_images(x, w, b) = sum(max_pool(activate(conv(x, w) .+ reshape(b, 1, 1, :)), 2) .^ 2)
            of_sequences(x, w, b) = sum(max_pool(activate(conv(permutedims(x, (2, 1, 3)), w) .+ reshape(b, 1, :)), 3) .^ 2)
            for (h, dims) in ((of_images, ((10, 10, 1, 2), (3, 3, 1, 1), (4,))), (of_sequences, ((4, 20, 2), (3, 4, 1), (5,))))
                arrays = map(d -> randn(RANDOM, Float32, d...), dims)
                fused, plain = with_and_without(h, arrays)
                found, expected = fused(arrays...), plain(arrays...)
                @test same(found[1], expected[1], 2e-5) && all(same(a, b, 2e-5) for (a, b) in zip(found[2], expected[2]))
                @test !occursin(r"conv_pool|sequence_pool", source(fused))
            end
        end
        # Second derivatives of a fused graph: what pools is differentiated before anything is fused.
        f(x, w) = sum(max_pool(relu(conv(x, w)), 2) .^ 2)
        g(w) = sum(grad(f; argnums=2)(x, w) .^ 2)
        @test compile(grad(g))(w) ≈ grad(g)(w)
    end

    @testset "the gradient of another convolution, with the same upstream gradient, is not that of the fused one" begin
        upstream(y) = grad(v -> sum(max_pool(v, 2) .^ 2))(y)
        function of_images(x, w)
            y = conv(x, w; padding=1)
            _, pull = vjp(u -> conv(x, u; padding=2, dilation=2), w)
            return max_pool(y, 2), pull(upstream(y))[1]
        end
        function of_sequences(x, w)
            s = permutedims(x, (2, 1, 3))
            y = conv(s, w)
            _, pull = vjp((t, u) -> conv(t, u; padding=1, dilation=2), s, w)
            return max_pool(y, 2), pull(upstream(y))...
        end
        for (h, dims, name) in ((of_images, ((8, 8, 1, 2), (3, 3, 1, 2)), "conv_pool"),
            (of_sequences, ((4, 20, 2), (3, 4, 5)), "sequence_pool"))
            arrays = map(d -> randn(RANDOM, Float32, d...), dims)
            fused, plain = compile(h), compile(h; techniques=Techniques(; fuse=false))
            @test all(same(a, b, 2e-5) for (a, b) in zip(fused(arrays...), plain(arrays...)))
            @test occursin(name, source(fused)) && !occursin(name * "_", source(fused))
        end
    end

    @testset "ties and NaN, fused" begin
        x, w = zeros(Float32, 6, 6, 1, 1), zeros(Float32, 3, 3, 1, 1)
        w[2, 2] = 1
        x[2:5, 2:5] .= 1
        f = compile(value_and_grad((x, w) -> sum(max_pool(relu(conv(x, w)), 2)); argnums=(1, 2)))
        y, (gx, gw) = f(x, w)
        @test occursin("conv_pool", source(f))
        @test y == 4 && gw[2, 2] == 4
        @test gx == [i in (2, 4) && j in (2, 4) for i in 1:6, j in 1:6, _ in 1:1, _ in 1:1]
        x[3, 3] = NaN
        h = compile(x -> max_pool(relu(conv(x, Constant(w))), 2))
        @test isnan.(h(x)) == isnan.(value(max_pool(relu(conv(Constant(x), Constant(w))), 2)))
    end
end

# Nothing is allocated -----------------------------------------------------------------------------------------------------

allocated_by(tape) = @allocated run!(tape)

@testset "runs allocate nothing, fused: $fuse" for fuse in (true, false)
    for (f, arrays) in (
        ((x, w, b) -> sum(max_pool(relu(conv(x, w) .+ reshape(b, 1, 1, :)), 2) .^ 2), ((9, 9, 2, 2), (3, 3, 2, 3), (3,))),
        ((x, w, b) -> sum(max_pool(relu(conv(permutedims(x, (2, 1, 3)), w) .+ reshape(b, 1, :)), 4) .^ 2),
            ((4, 20, 2), (3, 4, 5), (5,))),
        ((x, w, b) -> sum(avg_pool(conv(x, w; stride=2, padding=1, groups=2) .+ reshape(b, 1, 1, :), 2) .^ 2),
            ((9, 9, 4, 2), (3, 3, 2, 2), (2,))))
        compiled = compile(value_and_grad(f; argnums=(1, 2, 3)); techniques=Techniques(; fuse=fuse))
        compiled((randn(RANDOM, Float32, d...) for d in arrays)...)
        tape = first(values(compiled.tapes))[1]
        allocated_by(tape)
        @test allocated_by(tape) == 0
    end
end

# Layers -------------------------------------------------------------------------------------------------------------------

@testset "layers" begin
    chain = Chain(Conv2D(2 => 4, (3, 2), relu; stride=(2, 1), padding=((1, 0), (0, 1)), groups=2), MaxPool2D(2),
        AvgPool2D((1, 2); stride=1), GlobalMaxPool(); dtype=Float64, seed=1)
    @test TwinGrad.NETWORK.sizes(chain, (9, 8, 2)) ==
          ["conv2d" => [4, 8, 4], "maxpool2d" => [2, 4, 4], "avgpool2d" => [2, 3, 4], "globalmaxpool" => [4]]
    @test size(chain.parameters["conv2d.weight"]) == (3, 2, 1, 4) && size(chain.parameters["conv2d.bias"]) == (4,)
    x = randn(RANDOM, 9, 8, 2, 3)
    w, b = copy(chain.parameters["conv2d.weight"]), randn(RANDOM, 4)
    chain.parameters["conv2d.bias"] .= b
    y = relu.(value(conv(x, w; stride=(2, 1), padding=((1, 0), (0, 1)), groups=2)) .+ reshape(b, 1, 1, :))
    y = value(avg_pool(max_pool(y, 2), (1, 2); stride=1))
    @test value(chain(x)) ≈ dropdims(maximum(y; dims=(1, 2)); dims=(1, 2))
    chain = Chain(Conv1D(3 => 2, 3; dilation=2, bias=false), MaxPool1D(2), AvgPool1D(2; padding=1), GlobalAvgPool();
        dtype=Float64)
    @test TwinGrad.NETWORK.output_size(chain, (12, 3)) == [2]
    x = randn(RANDOM, 12, 3, 2)
    y = value(avg_pool(max_pool(conv(x, copy(chain.parameters["conv1d.weight"]); dilation=2), 2), 2; padding=1))
    @test value(chain(x)) ≈ dropdims(sum(y; dims=1); dims=1) ./ size(y, 1)
    @test occursin("Conv1D(3 => 2, 3)", sprint(show, chain))
    sizes(input, layers...) = () -> TwinGrad.NETWORK.sizes(Chain(layers...), input)
    for (f, kind, text) in (
        (() -> Conv2D(3 => 4, 3; groups=2), ConfigurationError, "3 channels and 4 filters"),
        (() -> Conv2D(3 => 4, 0), ConfigurationError, "Conv2D: kernel must be"),
        (() -> Conv1D(3 => 4, 3; padding=-1), ConfigurationError, "Conv1D: padding must be"),
        (() -> MaxPool2D(2; padding=2), ConfigurationError, "at most half the window"),
        (sizes((5, 5, 2), Conv2D(3 => 4, 3)), ShapeError, "in layer \"conv2d\": expected samples of size (W, H, 3)"),
        (sizes((5, 5, 2), Conv2D(2 => 4, 7)), ShapeError, "in layer \"conv2d\": a window of size (7, 7)"),
        (sizes((5, 2), MaxPool1D(8)), ShapeError, "in layer \"maxpool1d\": a window of size (8,)"))
        error = error_of(f)
        @test (text, error isa kind && occursin(text, error.message)) == (text, true)
    end
end

@testset "any technique may be switched off" begin
    x, y = randn(RANDOM, Float32, 12, 12, 1, 12), rand(RANDOM, 1:3, 12)
    losses(how) = train_epoch!(Trainer(Chain(Conv2D(1 => 3, 3, relu), MaxPool2D(2), Conv2D(3 => 2, 2), MaxPool2D(2; stride=1),
        Flatten(), Dense(18 => 3); seed=4); batch_size=4, threads=1, optimizer=SGD(0.1), techniques=how), x, y)
    expected = losses(Techniques())
    for name in fieldnames(Techniques)
        off = losses(Techniques(; (name => false,)...))
        @test (name, isapprox(off, expected; rtol=1e-4)) == (name, true)
    end
end

steps_allocate(trainer, x, y, order, losses) = @allocated train_epoch!(trainer, x, y, order, losses)

@testset "training: fused against plain, and nothing allocated" begin
    x, y = randn(RANDOM, Float32, 14, 14, 1, 40), rand(RANDOM, 1:5, 40)
    make() = Chain(Conv2D(1 => 3, 3, relu; bias=false), MaxPool2D(2), Flatten(), Dense(108 => 5); seed=2)
    fused, plain = make(), make()
    order, losses = collect(1:40), zeros(4)
    trainer = Trainer(fused; batch_size=10, threads=1, optimizer=SGD(0.1))
    train_epoch!(trainer, x, y, order, losses)
    @test losses ≈ train_epoch!(Trainer(plain; batch_size=10, threads=1, optimizer=SGD(0.1),
        techniques=Techniques(; fuse=false)), x, y) rtol = 1e-4
    @test fused.parameters.vector ≈ plain.parameters.vector rtol = 1e-4
    @test steps_allocate(trainer, x, y, order, losses) == 0
    @test isfinite(evaluate(trainer, x, y).loss)
end

@testset "pools of two by two, in vectors or not, $T: $w x $h" for T in (Float32, Float64), (w, h) in ((2, 2), (7, 4), (8, 5), (16, 16), (67, 3))
    random = RANDOM
    x = rand(random, T[-1, 0, 0.5, 2], w, h, 3, 2)  # with ties
    x[rand(random, 1:length(x), 9)] .= NaN
    x[rand(random, 1:length(x), 9)] .= -Inf
    out, g = fill(T(NaN), w ÷ 2, h ÷ 2, 3, 2), randn(random, T, w ÷ 2, h ÷ 2, 3, 2)
    gradient = zeros(T, size(x))
    for i in CartesianIndices(out)
        window = [CartesianIndex(2i[1] - a, 2i[2] - b, i[3], i[4]) for b in (1, 0) for a in (1, 0)]
        best = findfirst(j -> isnan(x[j]), window)
        best === nothing && (best = argmax(x[window]))
        out[i] = x[window[best]]
        gradient[window[best]] += g[i]
    end
    pooled(x) = max_pool(x, 2)
    @test isequal(value(pooled(Constant(x))), out)
    y, pull = vjp(pooled, x)
    @test isequal(y, out) && pull(g)[1] == gradient
    # The same of planes that lie by rows, which the general kernel pools.
    by_rows(x) = permutedims(max_pool(permutedims(x, (2, 1, 3, 4)), 2), (2, 1, 3, 4))
    distinct = randn(random, T, w, h, 3, 2)
    @test vjp(by_rows, distinct)[1] == vjp(pooled, distinct)[1] && vjp(by_rows, distinct)[2](g)[1] == vjp(pooled, distinct)[2](g)[1]
    @test compile(x -> max_pool(x, 2))(distinct) == vjp(pooled, distinct)[1]
end

end

numbers_of(dims...) = randn(AD.MersenneTwister(17), Float32, dims...)

@testset "a pool is fused only where its convolution reads what it read when the program was traced: $name" for (name, f, args) in (
    ("the gradient of another one", (s, w, w2) -> max_pool(conv(grad(s -> sum(max_pool(conv(permutedims(s, (2, 1, 3)), w), 2) .^ 2))(s), w2), 2),
        (numbers_of(8, 20, 2), numbers_of(3, 8, 6), numbers_of(3, 20, 5))),
    ("that of a longer one", (s, w, w2) -> max_pool(conv(grad(s -> sum(max_pool(conv(permutedims(s, (2, 1, 3)), w), 2) .^ 2))(s), w2), 2),
        (numbers_of(200, 20, 2), numbers_of(3, 200, 6), numbers_of(3, 20, 5))),
    ("a gradient before the pool", (x, w) -> (y = conv(x, w); g = grad(v -> sum(max_pool(v, 2)))(y); (g, max_pool(y, 2))),
        (numbers_of(8, 8, 1, 2), numbers_of(3, 3, 1, 2))),
    ("with relu", (x, w) -> (y = conv(x, w); g = grad(v -> sum(max_pool(relu.(v), 2)))(y); (g, max_pool(relu.(y), 2))),
        (numbers_of(8, 8, 1, 2), numbers_of(3, 3, 1, 2))),
    ("of sequences", (s, w) -> (y = conv(permutedims(s, (2, 1, 3)), w); g = grad(v -> sum(max_pool(v, 2)))(y); (g, max_pool(y, 2))),
        (numbers_of(8, 20, 2), numbers_of(3, 8, 6))),
    ("an empty kernel", (s, w) -> max_pool(conv(permutedims(s, (2, 1, 3)), w), 2), (numbers_of(4, 10, 2), zeros(Float32, 0, 4, 8))))
    found, expected = compile(f)(args...), compile(f; techniques=Techniques(fuse=false))(args...)
    for (a, b) in zip(found isa Tuple ? found : (found,), expected isa Tuple ? expected : (expected,))
        @test size(a) == size(b) && isapprox(a, b; rtol=1e-4, atol=1e-5)
    end
end
