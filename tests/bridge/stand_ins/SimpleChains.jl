# A stand-in for SimpleChains: what bridge/adapters/simplechains.jl asks of it, in plain Julia. Gradients are finite
# differences.
module SimpleChains

include("parts.jl")

struct StaticInt{N} end
static(n::Integer) = StaticInt{Int(n)}()
Base.Int(::StaticInt{N}) where {N} = N

struct SimpleChain
    sizes::Tuple{Vararg{StaticInt}}
    layers::Tuple
end

struct TurboDense{B}
    f::Function
    outputs::Int
end
struct Conv
    f::Function
    kernel::Tuple
    filters::Int
end
struct MaxPool
    window::Tuple
end
struct Flatten
    axes::Int
end
struct Activation
    f::Function
end
struct SquaredLoss
    y::AbstractArray
end
struct LogitCrossEntropyLoss
    y::Vector{UInt32}
end
loss_multiplier(::LogitCrossEntropyLoss, n, T) = inv(T(n))
loss_multiplier(::SquaredLoss, n, T) = T(2) / T(n)

"""A layer's own parameters, and the size of what it makes of a sample."""
count_of(layer::TurboDense{B}, size) where {B} = layer.outputs * (size[1] + B), (layer.outputs,)
count_of(layer::Conv, size) = layer.filters * (prod(layer.kernel) * size[end] + 1),
    ((size[1:end-1] .- layer.kernel .+ 1)..., layer.filters)
count_of(layer::MaxPool, size) = 0, ((size[1:end-1] .÷ layer.window)..., size[end])
count_of(layer::Flatten, size) = 0, (prod(size[1:layer.axes]), size[layer.axes+1:end]...)
count_of(::Any, size) = 0, size

numparam(chain::SimpleChain) = static(last(foldl(chain.layers; init=(map(Int, chain.sizes), 0)) do (size, count), layer
    own, size = count_of(layer, size)
    (size, count + own)
end))

function (layer::TurboDense{B})(x, p) where {B}
    weight = reshape(p[1:layer.outputs*size(x, 1)], layer.outputs, :)
    return layer.f.(weight * x .+ (B ? p[length(weight)+1:end] : false))
end
function (layer::Conv)(x, p)
    weight = reshape(p[1:end-layer.filters], layer.kernel..., size(x, ndims(x) - 1), layer.filters)
    ones = map(_ -> 1, layer.kernel)
    y = convolution(x, weight; stride=ones, pad=(map(_ -> 0, layer.kernel)..., map(_ -> 0, layer.kernel)...),
        dilation=ones, groups=1, turned=false)
    return layer.f.(biased(y, p[end-layer.filters+1:end]))
end
(layer::MaxPool)(x, _) = pooled(x, false, layer.window, layer.window, ntuple(_ -> 0, 2 * length(layer.window)))
(layer::Flatten)(x, _) = reshape(x, :, size(x)[layer.axes+1:end]...)
(layer::Activation)(x, _) = layer.f.(x)

function (chain::SimpleChain)(x, p)
    map(Int, chain.sizes) == size(x)[1:end-1] || throw(ArgumentError("the chain is for $(chain.sizes)"))
    for layer in chain.layers
        own, _ = count_of(layer, size(x)[1:end-1])
        x, p = layer(x, p[1:own]), p[own+1:end]
    end
    return x
end

add_loss(chain::SimpleChain, loss) = SimpleChain(chain.sizes, (chain.layers..., loss))

# In training the losses are sums: of half the squares, and of the cross-entropies.
(loss::SquaredLoss)(x, _) = sum(abs2, x .- loss.y) / 2
(loss::LogitCrossEntropyLoss)(x, _) = sum(log(sum(exp.(x[:, k]))) - x[loss.y[k], k] for k in eachindex(loss.y))

function valgrad!(gradient::Vector, chain::SimpleChain, x, p::Vector)
    own = copy(p)
    gradient .= differences(() -> chain(x, own), own)
    return chain(x, p)
end

end
