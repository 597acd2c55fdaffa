# The convolutional network of the papers imdb-cnn-a and imdb-cnn-c.
#
# - What a filter sees of a text is one stretch of its tokens' vectors, which begins a vector further on at each step: the
#   convolution is one product with overlapping columns, which BLAS would not take, by register tiles.
# - Of each window of the pool only the maximum has a gradient, and none where ReLU let nothing through: each of these few
#   adds one stretch to the gradient by its filter, and one to that by the tokens' vectors.
# - The gradient of the embedding is added up from them by all threads, each for its own words; one pass of Adam over all
#   parameters zeroes it again.

"""What one thread needs for its part of a batch."""
struct TextShard{T}
    columns::Int
    vectors::Vector{T}    # (dimension, length, columns)
    d_vectors::Vector{T}
    sums::Vector{T}       # (padded, length, columns)
    pooled::Vector{T}     # (filters, pools, columns)
    winner::Vector{Int}   # the same: the step of the text, from 0, or -1
    weight::Vector{T}     # (dimension, kernel, filters)
    weight_t::Vector{T}   # (padded, dimension, kernel): the same, transposed, with zeros below
    d_weight::Vector{T}
    logits::Vector{T}     # (columns), then the gradient by them
    gradient::Vector{T}   # as the parameters after the embedding
    loss::Base.RefValue{Float64}
    right::Base.RefValue{Int}
end

struct TextSession{T} <: Network{T}
    batch_size::Int
    length::Int
    vocabulary::Int
    dimension::Int
    filters::Int
    padded::Int  # filters, up to a whole number of vectors
    kernel::Int
    window::Int
    pools::Int
    padding::Int     # an id, or -1
    trained::Bool    # the embedding
    embedding::Int   # where it begins; the other parameters begin at `others`
    others::Int
    adam::NTuple{4,Float64}  # learning rate, betas, eps
    steps::Base.RefValue{Int}
    parameters::Vector{T}
    gradient::Vector{T}
    mean::Vector{T}
    square::Vector{T}
    shards::Vector{TextShard{T}}
    team::Team
end

function TextSession{T}(line::Line, parameters::Vector{T}) where {T}
    batch_size, threads, length_, vocabulary, dimension, filters, kernel, window, padding =
        numbers(line, "batch_size", "threads", "length", "vocabulary", "dimension", "filters", "kernel", "window", "padding")
    trained = given(line, "trained", Bool)
    pools = (length_ - kernel + 1) ÷ window
    count = filters * dimension * kernel + filters + filters * pools + 1
    embedding, others = trained ? (0, vocabulary * dimension) : (count, 0)
    team = Team(threads_to_use(min(threads, cld(batch_size, LEAST_SAMPLES))))
    n = cld(batch_size, team.size)
    zs(n...) = zeros(T, prod(n))
    stretch, lanes = dimension * kernel, 32 ÷ sizeof(T)
    padded = cld(filters, lanes) * lanes
    shards = [TextShard{T}(n, zs(dimension, length_, n), zs(dimension, length_, n), zs(padded, length_, n),
                  zs(filters, pools, n), zeros(Int, filters * pools * n), zs(stretch, filters), zs(padded, stretch), zs(stretch, filters), zs(n),
                  zs(count), Ref(0.0), Ref(0)) for _ in 1:team.size]
    moving = trained ? vocabulary * dimension + count : count
    adam = (given(line, "learning_rate", Float64), given(line, "betas", Vector{Float64})..., given(line, "eps", Float64))
    return TextSession{T}(batch_size, length_, vocabulary, dimension, filters, padded, kernel, window, pools, padding,
        trained, embedding, others, adam, Ref(0), parameters, zs(moving), zs(moving), zs(moving), shards, team)
end

"""The filters in the order in which they meet the text's numbers."""
function prepare!(s::TextSession, h::TextShard)
    c, k = s.dimension, s.kernel
    @inbounds for f in 0:s.filters-1, t in 0:k-1, j in 0:c-1
        w = s.parameters[s.others+(f*c+j)*k+t+1]
        h.weight[(f*k+t)*c+j+1] = w
        h.weight_t[(t*c+j)*s.padded+f+1] = w
    end
    return nothing
end

function forward!(s::TextSession{T}, h::TextShard{T}, data::Data{T}, first::Int, n::Int) where {T}
    c, filters, len = s.dimension, s.filters, s.length
    p = pointer(s.parameters)
    for i in 0:n-1
        ids = on(Ptr{Int64}(data.x), row(data, first + i) * len)
        for t in 0:len-1
            to, from = on(pointer(h.vectors), (i * len + t) * c), on(p, s.embedding + unsafe_load(ids, t + 1) * c)
            @simd ivdep for j in 1:c
                unsafe_store!(to, unsafe_load(from, j), j)
            end
        end
    end
    stretch = c * s.kernel
    # Columns that reach from one text into the next are not used.
    tiles!(narrow(T), Val(1), 0, s.padded, n * len - s.kernel + 1, stretch, pointer(h.weight_t), s.padded,
        pointer(h.vectors), 1, c, pointer(h.sums), s.padded, false)
    bias = s.others + stretch * filters
    weight = bias + filters
    @inbounds for i in 0:n-1
        logit = s.parameters[weight+filters*s.pools+1]
        for o in 0:s.pools-1
            at, to = (i * len + o * s.window) * s.padded, (i * s.pools + o) * filters
            @simd ivdep for f in 1:filters
                h.pooled[to+f] = h.sums[at+f]
                h.winner[to+f] = o * s.window
            end
            for t in 1:s.window-1
                at += s.padded
                @simd ivdep for f in 1:filters
                    v, m = h.sums[at+f], h.pooled[to+f]
                    larger = !(v <= m)  # NaN passes
                    h.pooled[to+f] = ifelse(larger, v, m)
                    h.winner[to+f] = ifelse(larger, o * s.window + t, h.winner[to+f])
                end
            end
            for f in 1:filters
                v = h.pooled[to+f] + s.parameters[bias+f]
                nothing_came = v <= 0
                h.pooled[to+f] = ifelse(nothing_came, zero(T), v)
                h.winner[to+f] = ifelse(nothing_came, -1, h.winner[to+f])
                logit += h.pooled[to+f] * s.parameters[weight+(f-1)*s.pools+o+1]
            end
        end
        h.logits[i+1] = logit
    end
    return nothing
end

"""Turn the logits into their gradient, `scale` times that of the sum of losses; keep that sum, and how many were right."""
function loss!(s::TextSession{T}, h::TextShard{T}, data::Data{T}, first::Int, n::Int, scale::T) where {T}
    loss, right, y = 0.0, 0, Ptr{T}(data.y)
    @inbounds for i in 1:n
        logit, target = h.logits[i], unsafe_load(y, row(data, first + i - 1) + 1)
        e = exp(-abs(Float64(logit)))
        loss += max(Float64(logit), 0.0) - Float64(logit) * target + log1p(e)
        right += (logit > 0) == (target > T(0.5))
        sigmoid = logit > 0 ? 1 / (1 + e) : e / (1 + e)
        h.logits[i] = scale * T(sigmoid - target)
    end
    h.loss[] = loss
    h.right[] = right
    return nothing
end

"""The gradient of a shard's parameters, and that by its tokens' vectors."""
function backward!(s::TextSession{T}, h::TextShard{T}, n::Int) where {T}
    filters, stretch, len = s.filters, s.dimension * s.kernel, s.length
    bias = stretch * filters
    weight = bias + filters
    fill!(h.gradient, zero(T))
    fill!(h.d_weight, zero(T))
    s.trained && fill!(h.d_vectors, zero(T))
    @inbounds for i in 0:n-1
        d_logit = h.logits[i+1]
        h.gradient[weight+filters*s.pools+1] += d_logit
        for o in 0:s.pools-1, f in 1:filters
            at = (i * s.pools + o) * filters + f
            step = h.winner[at]
            step < 0 && continue
            place = weight + (f - 1) * s.pools + o + 1
            h.gradient[place] += d_logit * h.pooled[at]
            g = d_logit * s.parameters[s.others+place]
            h.gradient[bias+f] += g
            here, of_filter = (i * len + step) * s.dimension, (f - 1) * stretch
            v, d_v = on(pointer(h.vectors), here), on(pointer(h.d_vectors), here)
            w, d_w = on(pointer(h.weight), of_filter), on(pointer(h.d_weight), of_filter)
            @simd ivdep for j in 1:stretch
                unsafe_store!(d_w, muladd(g, unsafe_load(v, j), unsafe_load(d_w, j)), j)
            end
            s.trained || continue
            @simd ivdep for j in 1:stretch
                unsafe_store!(d_v, muladd(g, unsafe_load(w, j), unsafe_load(d_v, j)), j)
            end
        end
    end
    c, k = s.dimension, s.kernel
    @inbounds for f in 0:filters-1, t in 0:k-1, j in 0:c-1
        h.gradient[(f*c+j)*k+t+1] = h.d_weight[(f*k+t)*c+j+1]
    end
    return nothing
end

"""Add the vectors' gradients of `h`, of `n` texts, to the embedding's, for the words that are member `k`'s."""
function add_vectors!(s::TextSession{T}, h::TextShard{T}, k::Int, data::Data{T}, first::Int, n::Int) where {T}
    c = s.dimension
    for i in 0:n-1
        ids = on(Ptr{Int64}(data.x), row(data, first + i) * s.length)
        for t in 0:s.length-1
            id = unsafe_load(ids, t + 1)
            (id % s.team.size == k - 1 && id != s.padding) || continue
            to, from = on(pointer(s.gradient), id * c), on(pointer(h.d_vectors), (i * s.length + t) * c)
            @simd ivdep for j in 1:c
                unsafe_store!(to, unsafe_load(to, j) + unsafe_load(from, j), j)
            end
        end
    end
    return nothing
end

"""Adam on `count` parameters, whose gradient becomes zero. Means are kept divided by 1 - beta."""
function adam!(s::TextSession{T}, before::Int, count::Int) where {T}
    rate, beta1, beta2, eps = s.adam
    root = sqrt((1 - beta2) / (1 - beta2^s.steps[]))
    b1, b2, e = T(beta1), T(beta2), T(eps / root)
    r = T(rate * (1 - beta1) / (1 - beta1^s.steps[]) / root)
    p, g = on(pointer(s.parameters), before), on(pointer(s.gradient), before)
    m, v = on(pointer(s.mean), before), on(pointer(s.square), before)
    @simd ivdep for i in 1:count
        d = unsafe_load(g, i)
        mean, square = muladd(b1, unsafe_load(m, i), d), muladd(b2, unsafe_load(v, i), d * d)
        unsafe_store!(m, mean, i)
        unsafe_store!(v, square, i)
        unsafe_store!(p, unsafe_load(p, i) - r * mean / (fast_sqrt(square) + e), i)
        unsafe_store!(g, zero(T), i)
    end
    return nothing
end

"""All steps from `first` to `last` of an epoch over `rows` rows, as member `k` of the team."""
function steps!(s::TextSession{T}, k::Int, data::Data{T}, rows::Int, first::Int, last::Int, losses::Ptr{Float64}) where {T}
    h, size = s.shards[k], s.team.size
    before, count = part(length(s.gradient), k, size)
    for step in first:last
        start = (step - 1) * s.batch_size
        n = min(s.batch_size, rows - start)
        mine, samples = part(n, k, size)
        prepare!(s, h)
        samples > 0 && forward!(s, h, data, start + mine, samples)
        loss!(s, h, data, start + mine, samples, T(1 / n))
        backward!(s, h, samples)
        k == 1 && (s.steps[] += 1)
        meet!(s.team) || return nothing
        for j in 1:size
            from, texts = part(n, j, size)
            s.trained && add_vectors!(s, s.shards[j], k, data, start + from, texts)
        end
        if k == 1
            add_others!(s)
            unsafe_store!(losses, sum_of_losses(s) / n, step)
        end
        meet!(s.team) || return nothing
        adam!(s, before, count)
        meet!(s.team) || return nothing
    end
    return nothing
end

"""Add up the shards' gradients of all but the embedding."""
function add_others!(s::TextSession)
    for h in s.shards
        @inbounds @simd ivdep for i in 1:length(h.gradient)
            s.gradient[s.others+i] += h.gradient[i]
        end
    end
    return nothing
end

function sum_of_losses(s::TextSession)
    total = 0.0
    for h in s.shards
        total += h.loss[]
    end
    return total
end

function predict!(s::TextSession{T}, data::Data{T}, samples::Int, out::Ptr{T}) where {T}
    pieces!(s, data, samples) do h, k, first, n
        for i in 1:n
            unsafe_store!(out, h.logits[i], first + i)
        end
    end
end

function gradients!(s::TextSession{T}, data::Data{T}, samples::Int, gradient::Vector{T}) where {T}
    fill!(s.gradient, zero(T))
    foreach(other -> fill!(other.gradient, zero(T)), s.shards)
    h, loss = s.shards[1], 0.0
    prepare!(s, h)
    for first in 0:h.columns:samples-1
        n = min(h.columns, samples - first)
        forward!(s, h, data, first, n)
        loss!(s, h, data, first, n, T(1 / samples))
        loss += h.loss[]
        backward!(s, h, n)
        for k in 1:s.team.size
            s.trained && add_vectors!(s, h, k, data, first, n)
        end
        add_others!(s)
    end
    copyto!(gradient, s.gradient)
    fill!(s.gradient, zero(T))
    return loss / samples
end

gradient_length(s::TextSession) = length(s.gradient)
