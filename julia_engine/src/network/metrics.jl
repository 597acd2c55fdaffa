# Metrics that are collected over the batches of an epoch, without allocating.

"""
    Mean()

A running mean in Float64, such as the loss of an epoch, weighted by the samples in each batch: `add!(mean, value,
weight)`, then `result(mean)`, NaN before the first value.
"""
mutable struct Mean
    total::Float64
    weight::Float64
end
Mean() = Mean(0.0, 0.0)

add!(m::Mean, value::Real, weight::Real=1) = (m.total += Float64(value) * weight; m.weight += weight; m)
result(m::Mean) = m.weight == 0 ? NaN : m.total / m.weight

"""
    Accuracy(ignored=nothing)

The share of right answers, over all batches added so far: `add!(accuracy, logits, labels)`, then `result(accuracy)`.

What counts as an answer follows from the sizes. Logits (classes, ...) with integer labels (...), from 1: the class with
the largest logit, the first of equals. Logits of the labels' own length: binary, 1 where the logit is above 0, and labels
are 1 where they are above one half. A class `ignored` is a label that counts nothing.
"""
mutable struct Accuracy
    right::Int
    count::Int
    ignored::Union{Nothing,Int}
end
Accuracy(ignored::Union{Nothing,Int}=nothing) = Accuracy(0, 0, ignored)

result(m::Accuracy) = m.count == 0 ? NaN : m.right / m.count

function add!(m::Accuracy, logits::AbstractArray, labels::AbstractArray)
    if length(logits) == length(labels)
        for (x, y) in zip(logits, labels)
            m.right += (x > 0) == (y > 0.5)
        end
    elseif length(labels) > 0 && size(logits)[2:end] == size(labels) && eltype(labels) <: Integer
        classes = size(logits, 1)
        for (i, label) in enumerate(labels)
            label == m.ignored && (m.count -= 1; continue)
            best = 1
            @inbounds for c in 2:classes
                logits[(i-1)*classes+c] > logits[(i-1)*classes+best] && (best = c)
            end
            m.right += best == label
        end
    else
        throw(ShapeError("accuracy: expected labels of size $(size(logits)[2:end]) (classes) or $(size(logits)) (binary) " *
            "for logits of size $(size(logits)), got $(size(labels))"))
    end
    m.count += length(labels)
    return m
end

"""
    accuracy(logits, labels)

The share of right answers in one batch, as [`Accuracy`](@ref) counts it.
"""
accuracy(logits::AbstractArray, labels::AbstractArray) = result(add!(Accuracy(), logits, labels))
