# Arithmetic that the stand-ins for Julia packages share.

# Each of them computes with a few numbers: compile it quickly.
@static if isdefined(Base, :Experimental) && isdefined(Base.Experimental, Symbol("@optlevel"))
    Base.Experimental.@optlevel 0
end

"""Call `each(output position, input position, kernel position)` for all that lies in the input."""
function windows(each, input, kernel, output, stride, pad, dilation)
    for o in CartesianIndices(output), k in CartesianIndices(kernel)
        i = CartesianIndex(ntuple(d -> (o[d] - 1) * stride[d] + (k[d] - 1) * dilation[d] + 1 - pad[2d-1], length(kernel)))
        checkbounds(Bool, CartesianIndices(input), i) && each(o, i, k)
    end
end
moved(n, k, stride, before, after, dilation) = (n + before + after - dilation * (k - 1) - 1) ÷ stride + 1

"""Weights (kernel axes..., channels of one group, filters); `turned`: a convolution, or else a cross-correlation."""
function convolution(x, w; stride, pad, dilation, groups, turned)
    kernel, input = size(w)[1:end-2], size(x)[1:end-2]
    output = ntuple(d -> moved(input[d], kernel[d], stride[d], pad[2d-1], pad[2d], dilation[d]), length(kernel))
    channels, filters = size(w)[end-1:end]
    y = zeros(eltype(x), output..., filters, size(x)[end])
    windows(input, kernel, output, stride, pad, dilation) do o, i, k
        at = turned ? CartesianIndex(kernel .+ 1 .- Tuple(k)) : k
        for f in 1:filters, c in 1:channels, n in 1:size(x)[end]
            group = (f - 1) ÷ (filters ÷ groups)
            y[o, f, n] += w[at, c, f] * x[i, group*channels+c, n]
        end
    end
    return y
end
biased(y, bias) = bias === false ? y : y .+ reshape(bias, ntuple(_ -> 1, ndims(y) - 2)..., :)

function pooled(x, mean, window, stride, pad)
    input = size(x)[1:end-2]
    output = ntuple(d -> moved(input[d], window[d], stride[d], pad[2d-1], pad[2d], 1), length(input))
    y = fill(eltype(x)(mean ? 0 : -Inf), output..., size(x)[end-1:end]...)
    windows(input, window, output, stride, pad, ntuple(_ -> 1, length(input))) do o, i, _
        y[o, :, :] .= mean ? y[o, :, :] .+ x[i, :, :] ./ prod(window) : max.(y[o, :, :], x[i, :, :])
    end
    return y
end

relu(x) = max(x, zero(x))
sigmoid(x) = 1 / (1 + exp(-x))
softplus(x) = log1p(exp(-abs(x))) + relu(x)
softmax(x; dims) = exp.(x) ./ sum(exp.(x); dims=dims)

function differences(f, array)
    gradient, step = similar(array), 1e-6
    for k in eachindex(array)
        kept = array[k]
        array[k] = kept + step
        above = f()
        array[k] = kept - step
        gradient[k] = (above - f()) / 2step
        array[k] = kept
    end
    return gradient
end

struct Rule
    change::Function
end
Descent(rate) = Rule((state, g) -> rate .* g)
Momentum(rate, rho) = Rule((state, g) -> (state[1] = rho .* get(state, 1, 0) .+ rate .* g))
function Nesterov(rate, rho)
    return Rule() do state, g
        state[1] = rho .* get(state, 1, 0) .+ g
        rate .* (g .+ rho .* state[1])
    end
end
function RMSProp(rate, rho, eps)
    return Rule() do state, g
        state[1] = rho .* get(state, 1, 0) .+ (1 - rho) .* g .^ 2
        rate .* g ./ (sqrt.(state[1]) .+ eps)
    end
end
function Adam(rate, (a, b), eps)
    return Rule() do state, g
        t = state[0] = get(state, 0, 0) + 1
        state[1] = a .* get(state, 1, 0) .+ (1 - a) .* g
        state[2] = b .* get(state, 2, 0) .+ (1 - b) .* g .^ 2
        rate .* state[1] ./ (1 - a^t) ./ (sqrt.(state[2] ./ (1 - b^t)) .+ eps)
    end
end
