# Winograd's algorithm: exact in exact numbers, the same convolutions as by sums, and only where it may be.

module WinogradTests

using Test
using TwinGrad
using TwinGrad.AD: AD, Kernels, CONV, CONV_INPUT_GRADIENT, CONV_WEIGHT_GRADIENT
using TwinGrad.NETWORK: NETWORK
using Main: seeded

const SEED = seeded(71)
@info "random operands" seed = SEED
const RANDOM = AD.MersenneTwister(SEED)

"""Of the root mean square of a result: how far elements may be off. Sums of products are off by a tenth of it."""
const TOLERANCE = 2e-5

"""Whether the processor has the vectors that transforms are made of."""
const HAS_VECTORS = Kernels.VECTOR_BYTES[] > 0

settings(axes, padding) = (stride=ones(Int, axes), padding=padding, dilation=ones(Int, axes), groups=1)
attributes_of(op, all) = AD.attributes((name => getfield(all, name) for name in op.attrs)...)

"""An op's result, by `lower(code, result, operands)`."""
function computed(lower, op, arrays, all)
    T = eltype(arrays[1])
    dims, _ = op.infer(AD.Tensor[AD.symbol(T, collect(Int, size(x)), "") for x in arrays], attributes_of(op, all))
    out, memories, code = AD.new_memory(T, dims), AD.Memory[AD.Memory(x) for x in arrays], AD.Instructions()
    fill!(out.root, NaN)
    lower(code, out, memories)
    for m in code.roots
        m.root isa Vector{Int64} || AD.fill_bytes!(m.root, 0xff)
    end
    GC.@preserve arrays out AD.execute!(code)
    return out.root
end

by_sums(op, arrays, all) =
    computed((code, out, memories) -> op.forward!(code, out, memories, attributes_of(op, all)), op, arrays, all)

function by_tiles(op, arrays, all, x, weight)
    made = AD.tiled_convolution(AD.Convolution(collect(Int, x), collect(Int, weight), attributes_of(CONV, all)), Float32)
    return computed(op, arrays, all) do code, out, (a, b)
        op === CONV ? AD.emit_winograd!(code, made, out, a, b, false) :
        op === CONV_INPUT_GRADIENT ? AD.emit_winograd!(code, AD.transposed(made), out, a, b, true) :
        AD.emit_winograd_weight_gradient!(code, made, out, a, b)
    end
end

"""The largest error of the three ops by tiles, of the root mean square of those by sums in Float64."""
function largest_error(samples, channels, filters, lengths, kernel, padding; gaps=false)
    all = settings(length(lengths), padding)
    drawn(dims...) = Float64.(randn(RANDOM, Float32, dims...))
    x, weight = drawn(lengths..., channels, samples), drawn(kernel..., channels, filters)
    g = drawn(size(by_sums(CONV, (x, weight), all))...)
    function single(a)
        gaps || return Float32.(a)
        wide = fill(NaN32, (2 .* size(a))...)
        part = view(wide, (2:2:n for n in size(wide))...)
        part .= a
        return part
    end
    worst = 0.0
    for (op, arrays, dims) in ((CONV, (x, weight), Int[]), (CONV_INPUT_GRADIENT, (g, weight), collect(Int, size(x))),
        (CONV_WEIGHT_GRADIENT, (g, x), collect(Int, size(weight))))

        at = merge(all, (dims=dims,))
        expected = by_sums(op, arrays, at)
        found = by_tiles(op, op === CONV_WEIGHT_GRADIENT ? map(single, arrays) : (single(arrays[1]), Float32.(arrays[2])), at,
            size(x), size(weight))
        scale = max(sqrt(sum(abs2, expected) / length(expected)), 1e-30)
        error = maximum(abs.(found .- expected)) / scale
        worst = isnan(error) ? Inf : max(worst, error)
    end
    return worst
end

# The transforms -------------------------------------------------------------------------------------------------------

"""The matrix of a transform of one tile along one axis, from its vectors of units."""
function matrix_of(name, pairs, kernel)
    n = 2pairs + 2
    each = n - kernel + 1
    read, made = name === :places_of_input ? (n, n) : name === :from_places ? (n, each) : (each, n)
    length_ = name === :places_of_input ? n : each
    axis = AD.TiledAxis(length_, each, 0, kernel, pairs)
    other = AD.TiledAxis(1, 1, 0, 1, 0)
    columns = map(1:read) do k
        code = AD.Instructions()
        c = AD.TiledConvolution((axis, other), false, 1, 1, 1)
        planes = AD.turned_planes!(code, AD.new_memory(Float32, [length_, 1, 1]), [length_, 1], 1).turned
        places = AD.place_memory!(code, AD.whole_vectors(1), 1, n)
        from, into = name === :from_places ? (places, planes) : (planes, places)
        fill!(from.root, 0)
        from.root[1+(k-1)*(name === :from_places ? from.strides[3] : from.strides[1])] = 1
        AD.emit_transform!(code, name, c, planes, places, (0, 0), (1, 1))
        AD.execute!(code)
        step = name === :from_places ? into.strides[1] : into.strides[3]
        return Float64[into.root[1+(i-1)*step] for i in 1:made]
    end
    return hcat(columns...)
end

# Transforms of one axis have three pairs of points; a kernel for two axes with as many is made by the same code.
HAS_VECTORS && @testset "a tile has the outputs of a kernel of $kernel" for kernel in 2:5
    b, a, back = (matrix_of(name, 3, kernel) for name in (:places_of_input, :places_of_upstream, :from_places))
    g = AD.weight_transform(kernel, 3)
    @test size(a) == (8, 9 - kernel) && a == back' && size(g) == (8, kernel)
    points = [0, 0.5, -0.5, 1, -1, 2, -2]
    product_of(roots) = foldl((c, r) -> [0.0; c] .- r .* [c; 0.0], roots; init=[1.0])
    @test b[1:7, :] == vcat((permutedims([product_of(points[points .!= p]); 0.0]) for p in points)...)
    @test b[8, :] == product_of(points)
    x, w = Float64.(rand(RANDOM, -9:9, 8)), Float64.(rand(RANDOM, -9:9, kernel))
    @test a' * ((g * w) .* (b * x)) ≈ [sum(x[i:i+kernel-1] .* w) for i in 1:9-kernel] atol = 1e-11
end

# The three ops --------------------------------------------------------------------------------------------------------

HAS_VECTORS && @testset "tiles cover an axis, kernel $kernel" for kernel in 2:5
    # Padding and a cut at either end, and tiles that are not full.
    worst = 0.0
    for n in 1:35, (before, after) in ((0, 0), (1, 1), (kernel - 1, 0), (0, kernel), (kernel + 1, 3))
        n + before + after >= kernel || continue
        worst = max(worst, largest_error(2, 2, 3, (n,), (kernel,), [before, after]))
    end
    @test worst < TOLERANCE
    worst = 0.0
    for n in (1, 2, 3, 5, 8, 13, 21, 35), (before, after) in ((0, 0), (2, 1), (kernel, 0)), other in 2:5
        n + before + after >= kernel || continue
        worst = max(worst, largest_error(2, 2, 3, (n, 6), (kernel, other), [before, after, 0, 1]))
        worst = max(worst, largest_error(2, 2, 3, (6, n), (other, kernel), [1, 0, before, after]))
    end
    @test worst < TOLERANCE
end

const SHAPES = [  # samples, channels, filters, lengths, kernel, padding
    (3, 4, 5, (8, 8), (3, 3), [1, 1, 1, 1]),
    (2, 1, 1, (3, 3), (3, 3), [0, 0, 0, 0]),
    (1, 2, 3, (1, 1), (3, 3), [1, 1, 1, 1]),
    (2, 33, 17, (7, 33), (3, 3), [2, 0, 0, 3]),
    (2, 2, 3, (5, 4), (3, 3), [5, 5, 4, 6]),  # the gradient by the input cuts off
    (2, 3, 4, (9, 7), (5, 1), [2, 2, 0, 0]),
    (2, 3, 4, (7, 19), (1, 5), [1, 2, 2, 2]),
    (2, 64, 20, (40,), (5,), [0, 0]),  # as many channels as whole vectors have
    (2, 4, 5, (2,), (2,), [3, 0]),
    (11, 40, 24, (20, 20), (3, 3), [1, 1, 1, 1]),  # blocks of one sample and of several, the last of fewer
    (11, 40, 24, (9, 10), (5, 5), [2, 2, 2, 2]),
    (2, 40, 24, (35, 35), (3, 3), [1, 1, 1, 1]),  # segments
    (2, 40, 24, (2000,), (3,), [1, 1]),
    (2, 40, 24, (3, 500), (1, 3), [0, 0, 1, 1]),
]

"""The widths of vectors that there are kernels for, as far as the processor has them."""
const WIDTHS = HAS_VECTORS ? unique((32, Kernels.VECTOR_BYTES[])) : ()

"""What `f()` gives with vectors of this width in bytes."""
function with_vectors(f, bytes)
    before = Kernels.VECTOR_BYTES[]
    Kernels.VECTOR_BYTES[] = bytes
    try
        return f()
    finally
        Kernels.VECTOR_BYTES[] = before
    end
end

@testset "the three ops are those by sums: $shape, vectors of $bytes bytes" for shape in SHAPES, bytes in WIDTHS
    @test with_vectors(() -> largest_error(shape...), bytes) < TOLERANCE
    @test with_vectors(() -> largest_error(shape...; gaps=true), bytes) < TOLERANCE
end

"""The convolution that a training step would have by tiles, or nothing."""
function chosen(samples, channels, filters, lengths, kernel; dtype=Float32, on=true, options...)
    at = merge(settings(length(lengths), ones(Int, 2 * length(lengths))), options)
    c = AD.Convolution([lengths...; channels; samples], [kernel...; channels ÷ at.groups; filters], attributes_of(CONV, at))
    return AD.@entering winograd=on AD.by_winograd(c, dtype)
end

HAS_VECTORS && @testset "where it may be, and is less work" begin
    uses(kernel=(3, 3); options...) = chosen(16, 32, 32, (16, 16), kernel; options...) !== nothing
    @test uses() && uses((5, 2)) && uses((1, 3)) && uses((3, 1))
    @test !uses(; on=false) && !uses(; dtype=Float64) && !uses((1, 1)) && !uses((6, 3)) && !uses(; groups=2)
    @test !uses(; stride=[2, 1]) && !uses(; dilation=[1, 2])
    @test all(n -> chosen(64, n..., (3, 3)) !== nothing, ((32, 64, (16, 16)), (64, 128, (8, 8)), (8, 16, (16, 16))))
    @test all(n -> chosen(n..., (3, 3)) === nothing, ((64, 2, 32, (32, 32)), (1, 64, 128, (4, 4)), (0, 32, 64, (16, 16))))
    of = [AD.winograd_work(AD.tiled_convolution(AD.Convolution([n, n, 32, 8], [3, 3, 32, 64],
        attributes_of(CONV, settings(2, [1, 1, 1, 1]))), Float32)) for n in (64, 128, 256)]
    @test all(ratio -> 3.9 < ratio < 4.1, of[2:3] ./ of[1:2])
    # A compiled function and a prediction are no training steps.
    x, weight = randn(RANDOM, Float32, 16, 16, 32, 4), randn(RANDOM, Float32, 3, 3, 32, 32)
    @test value(conv(x, weight)) == compile(conv)(x, weight) == by_sums(CONV, (x, weight), settings(2, [0, 0, 0, 0]))
end

@testset "pools of sequences, vectors of $bytes bytes" for bytes in WIDTHS
    x, weight, bias = randn(RANDOM, Float32, 20, 50, 7), randn(RANDOM, Float32, 4, 20, 40), randn(RANDOM, Float32, 40)
    y = by_sums(CONV, (permutedims(x, (2, 1, 3)), weight), settings(1, [0, 0])) .+ reshape(bias, 1, 40, 1)
    for (window, stride, relu) in ((47, 1, 1), (2, 2, 0), (5, 3, 1)), biased in (true, false)
        pooled = (47 - window) ÷ stride + 1
        before = biased ? y : y .- reshape(bias, 1, 40, 1)
        expected = [maximum(before[(p-1)*stride+1:(p-1)*stride+window, f, n]) for p in 1:pooled, f in 1:40, n in 1:7]
        relu == 1 && (expected = max.(expected, 0))
        at = AD.attributes(:dims => [pooled, 40, 7, 2], :relu => relu, :sizes => [4, 40, 1, window, stride])
        out, code = AD.new_memory(Float32, [pooled, 40, 7, 2]), AD.Instructions()
        inputs = AD.Memory[AD.Memory(a) for a in (biased ? (x, weight, bias) : (x, weight))]
        c = AD.tiled_convolution(AD.sequence_convolution(inputs[1], inputs[2], 1), Float32)
        with_vectors(() -> AD.winograd_sequence_pool!(code, c, out, inputs, at), bytes)
        foreach(m -> m.root isa Vector{Int64} || AD.fill_bytes!(m.root, 0xff), code.roots)
        GC.@preserve x weight bias AD.execute!(code)
        @test out.root[:, :, :, 1] ≈ expected rtol = 1e-5
        which = out.root[:, :, :, 2]
        @test all(I -> which[I] < 0 ? expected[I] == 0 :
            before[(I[1]-1)*stride+Int(which[I])+1, I[2], I[3]] ≈ expected[I], CartesianIndices(which))
    end
end

@testset "instructions are appended again" begin
    x, y, code = AD.Memory(Float32[1, 2, 3, 4]), AD.Memory(zeros(Float32, 4)), AD.Instructions()
    part(m, k) = AD.with_strides(m, [2], [1], k)
    AD.emit_copy!(code, part(y, 0), part(AD.in_slot(x, 3), 0))
    AD.emit_again!(code, 1:1, part(x, 0).address => part(x, 2).address, part(y, 0).address => part(y, 2).address)
    AD.execute!(code)
    @test y.root == x.root && length(code.segments) == 1
    # An argument that is put elsewhere for a call is found in both.
    @test [(s.number, s.instruction, s.field) for s in code.slots] == [(3, 1, 3), (3, 2, 3)]
end

# Training -------------------------------------------------------------------------------------------------------------

images(T) = Chain(Reshape(16, 16, 8), Conv2D(8 => 16, 3; padding=1), BatchNorm(16), Activation("relu"),
    Conv2D(16 => 16, 5; padding=2), Activation("tanh"), Flatten(), Dense(16 * 256 => 4); dtype=T, seed=3)
words(T) = Chain(Embedding(30 => 32), PermuteDims(2, 1), Conv1D(32 => 32, 5), Activation("relu"), GlobalMaxPool(), Dense(32 => 4);
    dtype=T, seed=3)

function trained(chain, x, y; options...)
    trainer = Trainer(chain; optimizer=SGD(eltype(x) === Int64 ? 0.5 : 0.02), batch_size=24, options...)
    losses = vcat([train_epoch!(trainer, x, y, collect(1:size(x, 2))) for _ in 1:3]...)
    return losses, trainer
end

"""How many instructions of a trainer's tapes bring the input of a convolution into places of tiles."""
function tiled_instructions(trainer)
    kernels = [at for ((name, single), at) in Kernels.ADDRESSES if single && startswith(string(name), "places_of_input")]
    return sum([count(x -> x.kernel in kernels, tape.code.f32) for tape in NETWORK.tapes(trainer)])
end

HAS_VECTORS && @testset "training is the same up to roundings: $make, $threads" for make in (images, words), threads in (1, 2)
    n = 58  # the last batch has fewer samples
    x = make === words ? rand(RANDOM, 1:30, 60, n) : randn(RANDOM, 16 * 16 * 8, n)
    y = rand(RANDOM, 1:4, n)
    of(T) = make === words ? x : T.(x)
    exact, _ = trained(make(Float64), of(Float64), y; threads=threads)
    @test exact[end] < 0.99 * exact[1]
    on, trainer = trained(make(Float32), of(Float32), y; threads=threads)
    off, plain = trained(make(Float32), of(Float32), y; threads=threads, techniques=Techniques(winograd=false))
    @test tiled_instructions(trainer) > 0 && tiled_instructions(plain) == 0
    @test trainer.vector != plain.vector
    @test on ≈ exact rtol = 2e-4
    @test off ≈ exact rtol = 2e-4
    @test trained(make(Float32), of(Float32), y; threads=threads)[1] == on  # bit for bit
    order, losses = collect(1:n), zeros(3)
    if threads == 1
        train_epoch!(trainer, of(Float32), y, order, losses)
        epoch(trainer, x, y) = @allocated train_epoch!(trainer, x, y, order, losses)
        z = of(Float32)
        epoch(trainer, z, y)
        @test epoch(trainer, z, y) == 0
    end
end

HAS_VECTORS && @testset "predictions are by sums" begin
    x = randn(RANDOM, Float32, 16 * 16 * 8, 5)
    predicted(on) = predict(Trainer(images(Float32); batch_size=5, threads=1, techniques=Techniques(winograd=on)), x)
    @test predicted(true) == predicted(false)
end

HAS_VECTORS && @testset "a number that is not finite is found" begin
    x, y = randn(RANDOM, Float32, 16 * 16 * 8, 24), rand(RANDOM, 1:4, 24)
    x[5, 3] = Inf
    @test_throws NonFiniteError trained(images(Float32), x, y; threads=1)
end

HAS_VECTORS || @testset "without vectors there are no tiles" begin
    @test chosen(64, 32, 64, (16, 16), (3, 3)) === nothing
end

end
