# Attention: each query's mean of values, weighted by how well their keys fit it (Vaswani et al. 2017).

"""
    scaled_dot_product_attention(query, key, value, bias=nothing; mask=nothing, causal=false, scale=nothing)

value softmax(keyᵀ query scale), over the keys that each query may see: query (D, L, ...), key (D, S, ...) and value (E, S, ...)
to (E, L, ...). `bias` is added to the products, and `mask` is true where a query sees a key: both broadcast to (S, L, ...). A
query that sees no key has the result 0. With `causal` query i sees the keys up to i alone; `scale` is 1/√D unless given. Throws a
`ShapeError` where the sizes do not fit.
"""
function scaled_dot_product_attention(@nospecialize(query), @nospecialize(key), @nospecialize(value), @nospecialize(bias=nothing);
        mask=nothing, causal::Bool=false, scale::Union{Nothing,Real}=nothing)
    q, k, v = as_tensors((query, key, value))
    min(ndims(q), ndims(k), ndims(v)) >= 2 && q.dims[1] == k.dims[1] && k.dims[2] == v.dims[2] || throw(ShapeError(
        "scaled_dot_product_attention: expected a query (D, L, ...), a key (D, S, ...) and a value (E, S, ...), got sizes " *
        "$(size(q)), $(size(k)) and $(size(v))"))
    factor = scale === nothing ? 1 / sqrt(max(q.dims[1], 1)) : Float64(scale)
    scores = matmul(flipped(k), MUL(q, factor))
    name = "scaled_dot_product_attention"
    bias === nothing || (scores = ADD(scores, broadcasting_to("$name: bias", as_tensor(bias, q.eltype), scores.dims)))
    seen = causal ? as_tensor(Int[s <= l for s in 1:k.dims[2], l in 1:q.dims[2]], q.eltype) : nothing
    if mask !== nothing
        given = broadcasting_to("$name: mask", as_tensor(mask, q.eltype), scores.dims)
        seen = seen === nothing ? given : LOGICAL_AND(seen, given)
    end
    seen === nothing || (scores = choose(seen, scores, -Inf))
    k.dims[2] == 0 && return matmul(v, scores)  # sums over no keys
    bias === nothing && mask === nothing && return matmul(v, softmax(scores))  # each query sees a key
    # The softmax of minus infinities is NaN.
    sees_any = NOT_EQUAL(maximum(scores; dims=1), -Inf)  # NaN is seen, and gives NaN
    return matmul(v, choose(sees_any, softmax(choose(sees_any, scores, 0)), 0))
end

FUNCTIONS["scaled_dot_product_attention"] = scaled_dot_product_attention
export scaled_dot_product_attention
