# Losses, each the mean over the batch.

# Softmax cross-entropy ------------------------------------------------------------------------------------------------
#
# loss = mean(logsumexp(logits) - logits[label]). The logsumexp is a node of its own, so that the gradient
# (softmax(logits) - one_hot(labels)) / n can be computed from it with one exp and no reduction; that gradient is a fused
# op, too. Its rule for `logits` is the total derivative, through the logsumexp as well.

function check_labels(logits::Tensor, labels::Tensor)
    check_float(logits.eltype)
    labels.eltype === Int64 || throw(DTypeError("expected integer labels, got $(labels.eltype)"))
    ndims(logits) > 0 && labels.dims == logits.dims[2:end] || throw(ShapeError(
        "logits of size $(size(logits)) need labels of size $(Tuple(logits.dims[2:end])), got $(size(labels))"))
end

function infer_cross_entropy(inputs, attrs)
    check_labels(inputs[1], inputs[3])
    return Int[], inputs[1].eltype
end

"""The number of classes and of samples."""
class_count(logits::Memory) = (logits.dims[1], prod(logits.dims[2:end]), 1, 1)

function forward_cross_entropy(p, out, inputs, attrs)
    logits, lse, labels = inputs
    return emit!(p, out.eltype, :cross_entropy, (out.address, logits.address, lse.address, NOWHERE), labels.address,
        class_count(logits), (NONE, NONE, NONE, NONE), (0, 0, 0, place!(p, "softmax_cross_entropy", labels.dims)))
end

function forward_cross_entropy_gradient(p, out, inputs, attrs)
    g, logits, lse, labels = inputs
    length(out) == 0 && return nothing
    rows = Memory(lse.root, lse.address, lse.eltype, Int[1; lse.dims], Int[0; lse.strides])
    emit_elementwise!(p, :sub, out, Memory[logits, rows])
    emit_elementwise!(p, :exp, out, Memory[out])
    return emit!(p, out.eltype, :cross_entropy_gradient, (out.address, NOWHERE, NOWHERE, g.address), labels.address,
        class_count(logits), (NONE, NONE, NONE, NONE), (0, 0, 0, place!(p, "softmax_cross_entropy", labels.dims)))
end

with_classes(x::Tensor) = reshape_to(x, Int[1; x.dims])
unit(x::Tensor) = literal(x.eltype, 1)

"""The derivative of exp(logits - lse) g / n with respect to logits (and minus that to lse), times u."""
cross_entropy_tangent(u, g, logits, lse, labels) =
    u .* EXP(logits .- with_classes(lse)) .* (g .* (1 / max(length(labels), 1)))

function backward_cross_entropy_gradient(i, u, y, inputs, attrs)
    g, logits, lse, labels = inputs
    i == 1 && return sum(u .* SOFTMAX_CROSS_ENTROPY_GRADIENT(unit(y), logits, lse, labels))
    i == 4 && return nothing
    tangent = cross_entropy_tangent(u, g, logits, lse, labels)
    i == 2 && return tangent
    return NEG(reshape_to(whole_sum(tangent, Int[1]), lse.dims))
end

function jvp_cross_entropy_gradient(t, y, inputs, attrs)
    g, logits, lse, labels = inputs
    total = nothing
    if t[1] !== nothing
        total = t[1] .* SOFTMAX_CROSS_ENTROPY_GRADIENT(unit(y), logits, lse, labels)
    end
    if t[2] !== nothing
        term = cross_entropy_tangent(t[2], g, logits, lse, labels)
        total = total === nothing ? term : total .+ term
    end
    if t[3] !== nothing
        term = NEG(cross_entropy_tangent(with_classes(t[3]), g, logits, lse, labels))
        total = total === nothing ? term : total .+ term
    end
    return total
end

const SOFTMAX_CROSS_ENTROPY = register!(Op("softmax_cross_entropy", infer_cross_entropy; forward=forward_cross_entropy,
    backward=Any[(g, y, inputs, attrs) -> SOFTMAX_CROSS_ENTROPY_GRADIENT(g, inputs...), no_gradient, no_gradient],
    jvp=(t, y, inputs, attrs) -> sum(t[1] .* SOFTMAX_CROSS_ENTROPY_GRADIENT(unit(y), inputs...)),
    accepts=is_dense, doc="mean of -log softmax(logits)[label]"))
const SOFTMAX_CROSS_ENTROPY_GRADIENT = register!(Op("softmax_cross_entropy_gradient",
    (inputs, attrs) -> (inputs[2].dims, inputs[2].eltype); forward=forward_cross_entropy_gradient,
    backward=backward_cross_entropy_gradient, jvp=jvp_cross_entropy_gradient, accepts=is_dense,
    doc="(softmax(logits) - one_hot(labels)) g / n"))

"""
    softmax_cross_entropy(logits, labels)

Mean cross-entropy between softmax(logits) and integer labels.

`logits` are (classes, ...), unnormalised log-probabilities; `labels` (...), integers in 1:classes. One-hot vectors are
never built. Throws a `LabelError` that names the first label out of range, eagerly and at every
replay.
"""
function softmax_cross_entropy(@nospecialize(x), @nospecialize(y))
    logits, labels = as_tensor(x), index_tensor(y)
    check_labels(logits, labels)
    lse = apply(LOGSUMEXP, Tensor[logits], attributes(:axes => Int[1], :keep => false))
    return apply(SOFTMAX_CROSS_ENTROPY, Tensor[logits, lse, labels])
end

# Other losses ---------------------------------------------------------------------------------------------------------

"""
    binary_cross_entropy(logits, targets)

Mean cross-entropy between sigmoid(logits) and targets in [0, 1], of the same size.

Computed as softplus(x) - x t, which neither overflows nor loses the gradient at large logits.
"""
function binary_cross_entropy(@nospecialize(x), @nospecialize(t))
    logits, targets = as_tensors((x, t))
    logits.dims == targets.dims || throw(ShapeError(
        "binary_cross_entropy: logits of size $(size(logits)) and targets of size $(size(targets)) differ"))
    return mean(SOFTPLUS(logits) .- logits .* targets)
end

"""
    mean_squared_error(predictions, targets)

Mean of (prediction - target)², over all elements; both of the same size.
"""
function mean_squared_error(@nospecialize(x), @nospecialize(t))
    predictions, targets = as_tensors((x, t))
    predictions.dims == targets.dims || throw(ShapeError(
        "mean_squared_error: predictions of size $(size(predictions)) and targets of size $(size(targets)) differ"))
    return mean(SQUARE(predictions .- targets))
end
