# The memory plan, without computing anything.

using TwinGrad.AD: AD, Plan, plan
using Random: MersenneTwister

const PlanValue = AD.Value

"""Values whose memory may not be given away while they are needed; found by simulating every step."""
function check_plan(values, p)
    n = length(values)
    bytes(i) = (o = p.storage[i]; haskey(p.offset, o) ? (p.offset[o], p.offset[o] + values[o].nbytes) : nothing)
    readers = [Int[] for _ in 1:n]
    for (i, v) in enumerate(values), x in v.reads
        push!(readers[x], i)
    end
    # A value is needed until its last reader, the last of its views, and the value that contains it.
    last = collect(1:n)
    for i in n:-1:1
        isempty(readers[i]) || (last[i] = max(last[i], maximum(readers[i])))
        for j in i+1:n
            values[j].view_of == i && (last[i] = max(last[i], last[j]))
        end
    end
    for i in n:-1:1
        haskey(p.placed, i) && (last[i] = max(last[i], last[p.placed[i]]))
    end
    ok = true
    from(j) = values[j].since == 0 ? j : values[j].since
    for i in 1:n, j in i+1:n  # j is written while i is still needed: they may not share bytes
        values[j].view_of == 0 || continue
        (values[i].fixed || values[j].fixed) && continue
        p.storage[i] == p.storage[j] && get(p.placed, i, 0) == j && continue
        p.storage[i] == p.storage[j] && haskey(p.placed, i) && haskey(p.placed, j) && continue
        a, b = bytes(i), bytes(j)
        overlap = a !== nothing && b !== nothing && max(a[1], b[1]) < min(a[2], b[2])
        overwrites = p.storage[i] == p.storage[j] && last[i] == j && i in values[j].may_overwrite
        overlap && last[i] >= from(j) && !overwrites && (ok = false)
    end
    ok &= all(o -> o % AD.ALIGNMENT == 0, Base.values(p.offset))
    return ok && all(i -> p.offset[i] + values[i].nbytes <= p.size, keys(p.offset))
end

function random_values(random)
    values = PlanValue[]
    for i in 1:rand(random, 1:25)
        fixed = i == 1 || rand(random) < 0.15
        reads = i == 1 ? Int[] : unique(rand(random, 1:i-1, rand(random, 0:3)))
        if !fixed && !isempty(reads) && rand(random) < 0.25
            push!(values, PlanValue(values[reads[1]].nbytes; reads=reads[1:1], view_of=reads[1]))
        else
            n = 64 * rand(random, 0:4) + 8 * rand(random, 0:1)
            over = Int[x for x in reads if rand(random, Bool) && values[x].view_of == 0]
            since = rand(random) < 0.2 ? rand(random, 1:i) : 0
            over = since == 0 ? over : Int[]
            push!(values, PlanValue(n; reads=reads, may_overwrite=over, fixed=fixed, since=since))
        end
    end
    return values
end

@testset "no value is overwritten while it is needed" begin
    seed = seeded(31)
    @info "random plans" seed
    random = AD.MersenneTwister(seed)
    for trial in 1:draws(500)
        values = random_values(random)
        for in_place in (true, false), reuse in (true, false)
            @test check_plan(values, plan(values; in_place=in_place, reuse=reuse))
        end
        @test plan(values).size <= plan(values; reuse=false).size
    end
end

@testset "what the techniques bring" begin
    chain = [PlanValue(64; fixed=true); [PlanValue(64; reads=[i], may_overwrite=[i]) for i in 1:9]]
    @test plan(chain).size == 64
    @test plan(chain; in_place=false).size == 128
    @test plan(chain; in_place=false, reuse=false).size == 9 * 64
    whole = [PlanValue(8; fixed=true), PlanValue(64; reads=[1]), PlanValue(64; reads=[1]), PlanValue(128; reads=[2, 3], parts=[2, 3])]
    p = plan(whole)
    @test p.placed == Dict(2 => 4, 3 => 4) && p.size == 128 && p.lifetime[4] == (2, 4)
end

@testset "a long graph is planned in no time" begin
    values = [PlanValue(64; fixed=true); [PlanValue(64 * (1 + i % 7); reads=[i, max(1, i - 50)]) for i in 1:20_000]]
    @test length(plan(values).storage) == 20_001
end

@testset "one array as several operands of an op is what it is in the place of each, $T" for T in (Float32, Float64)
    random = MersenneTwister(6)
    W, x = randn(random, T, 200, 200) ./ 20, randn(random, T, 200, 40)
    square_ = randn(random, T, 200, 200)
    functions = (x -> (h = tanh.(x); W * h .+ h), x -> (h = tanh.(x); h .+ W' * h), x -> (h = tanh.(x) .+ 1; W * h .- h),
        x -> (h = sin.(x) .* 2; max.(h, h) .* h ./ (h .+ 3)), x -> (h = cos.(x); ifelse.(h .> 0, h, h) .+ W * h))
    for f in functions
        total(x) = sum(abs2, f(x))
        @test compile(f)(x) ≈ f(x) && compile(grad(total))(x) ≈ grad(total)(x)
    end
    for f in (h -> (h = tanh.(h); h * W .+ h), h -> (h = tanh.(h); h * h .+ h), h -> (h = tanh.(h); h' * h .+ h))
        total(x) = sum(abs2, f(x))
        @test compile(f)(square_) ≈ f(square_) && compile(grad(total))(square_) ≈ grad(total)(square_)
    end
end

# Dictionaries of tensors ------------------------------------------------------------------------------------------------

using TwinGrad.AD: TensorDict, TensorSet

@testset "dictionaries of tensors are as Julia's, with numbers that are $kind" for (kind, number) in (
        ("in order", i -> UInt32(i)), ("in reverse", i -> typemax(UInt32) - UInt32(i)), ("all the same", i -> UInt32(7)),
        ("multiples of a large one", i -> UInt32(i) << 20))
    tensors = [AD.symbol(Float64, [2]) for _ in 1:300]
    foreach(i -> tensors[i].number = number(i), 1:300)
    random = MersenneTwister(seeded(5))
    for room in (0, 10, 300, 1000)
        found, known = sizehint!(TensorDict{Int}(), room), IdDict{AD.Tensor,Int}()
        set = TensorSet()
        for i in 1:1000
            x = tensors[rand(random, 1:1+i÷4)]
            @test haskey(found, x) == haskey(known, x) == (x in set)
            @test get(found, x, -1) == get(known, x, -1)
            if isodd(i)
                found[x] = known[x] = i
            else
                @test get!(found, x, i) == get!(known, x, i)
            end
            push!(set, x)
        end
        @test length(found) == length(known) == length(set) && !isempty(found)
        @test all(pair -> known[pair.first] == pair.second, found) && length(collect(found)) == length(known)
        @test sort(values(found)) == sort(collect(values(known)))
        @test_throws KeyError found[AD.symbol(Float64, [2])]
        @test isempty(empty!(found)) && !haskey(found, tensors[1]) && get(() -> 3, found, tensors[1]) == 3
    end
end

@testset "no two tensors that two tasks make have one number" begin
    made = [Threads.@spawn([AD.symbol(Float64, [1]).number for _ in 1:1000]) for _ in 1:2]
    @test allunique(vcat(fetch.(made)...))
end
