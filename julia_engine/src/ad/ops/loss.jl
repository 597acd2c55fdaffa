# Losses, each the mean over the batch unless another reduction is asked for.

# Softmax cross-entropy ------------------------------------------------------------------------------------------------
#
# loss = mean(logsumexp(logits) - logits[label]). The logsumexp is a separate node, so that the gradient
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

# Labels as columns of zeros with a one, for what the fused ops do not compute.

function write_one_hot!(y::AbstractArray, labels::AbstractArray, ignored::Union{Nothing,Int}, place::String)
    fill!(y, 0)
    classes = size(y, 1)
    columns = reshape(y, classes, :)
    for (i, label) in enumerate(labels)
        label == ignored && continue
        1 <= label <= classes || throw(LabelError("$place: label $label in column $i is not one of the $classes classes 1..$classes" *
            (ignored === nothing ? "" : ", nor $ignored, which is ignored")))
        columns[label, i] = 1
    end
    return nothing
end

function infer_one_hot(inputs, attrs)
    inputs[1].eltype === Int64 || throw(DTypeError("expected integer labels, got $(inputs[1].eltype)"))
    return Int[attrs.classes; inputs[1].dims], attrs.eltype
end

function forward_one_hot(p, out, inputs, attrs)
    place = "one_hot" * in_layer(state().scope)
    return emit_arrays!(p, (y, labels) -> write_one_hot!(y, labels, attrs.ignored, place), Memory[out], inputs)
end

const ONE_HOT = register!(Op("one_hot", infer_one_hot; forward=forward_one_hot, constant=true, attrs=[:classes, :ignored, :eltype],
    doc="for each label a column of zeros with a one at its class"))

"""
    one_hot(labels, classes; ignored=nothing, eltype=Float64)

For each of the integer `labels` a column of zeros with a one at its class, from 1; of `ignored` ones zeros alone. Throws a
`LabelError` where a label is neither in 1:classes nor `ignored`, eagerly and at every replay.
"""
function one_hot(@nospecialize(labels), classes::Integer; ignored::Union{Nothing,Integer}=nothing, eltype::DataType=Float64)
    classes >= 1 || throw(ShapeError("one_hot: classes must be at least 1, got $classes"))
    eltype in (Float32, Float64, Int64) || throw(DTypeError("one_hot: expected Float32, Float64 or Int64, got $eltype"))
    return apply(ONE_HOT, Tensor[index_tensor(labels)], attributes(:classes => Int(classes),
        :ignored => ignored === nothing ? nothing : Int(ignored), :eltype => eltype))
end

"""The mean of the rows, or with `shares` their sum by that of these; their sum; or themselves."""
function by_reduction(name::String, rows::Tensor, reduction::Symbol, shares::Union{Nothing,Tensor}=nothing)
    reduction === :none && return rows
    reduction === :sum && return sum(rows)
    reduction === :mean || throw(ConfigurationError("$name: reduction must be :mean, :sum or :none, got $(repr(reduction))"))
    return shares === nothing ? mean(rows) : DIV(sum(rows), sum(shares))
end

"""
    softmax_cross_entropy(logits, labels; weight=nothing, label_smoothing=0, ignored=nothing, reduction=:mean)

Cross-entropy between softmax(logits) and integer labels.

`logits` are (classes, ...), unnormalised log-probabilities; `labels` (...), integers in 1:classes. Without the keywords one-hot
vectors are never built. `weight` (classes,) says by how much the losses of each class count; a mean is by the sum of these.
`label_smoothing` is the share of each label that all classes have in equal parts, `ignored` a label whose columns count nothing, and
`reduction` :mean, :sum or :none, for a loss for each label. Throws a `LabelError` that names the first label out of range, eagerly
and at every replay.
"""
function softmax_cross_entropy(@nospecialize(x), @nospecialize(y); weight=nothing, label_smoothing::Real=0,
        ignored::Union{Nothing,Integer}=nothing, reduction::Symbol=:mean)
    logits, labels = as_tensor(x), index_tensor(y)
    check_labels(logits, labels)
    0 <= label_smoothing <= 1 ||
        throw(ConfigurationError("softmax_cross_entropy: label_smoothing must be from 0 to 1, got $label_smoothing"))
    if weight === nothing && label_smoothing == 0 && ignored === nothing && reduction === :mean
        lse = apply(LOGSUMEXP, Tensor[logits], attributes(:axes => Int[1], :keep => false))
        return apply(SOFTMAX_CROSS_ENTROPY, Tensor[logits, lse, labels])
    end
    classes = logits.dims[1]
    hot = one_hot(labels, classes; ignored=ignored, eltype=logits.eltype)
    logs, shares = log_softmax(logits), hot
    if weight !== nothing
        by_class = as_tensor(weight, logits.eltype)
        by_class.dims == [classes] ||
            throw(ShapeError("softmax_cross_entropy: expected weights ($classes,), got size $(size(by_class))"))
        logs, shares = logs .* by_class, hot .* by_class
    end
    over_classes(t) = reshape_to(whole_sum(t, Int[1]), labels.dims)
    rows = NEG(over_classes(choose(hot, logs, 0)))
    if label_smoothing > 0
        spread_ = choose(over_classes(hot), NEG(over_classes(logs)), 0)
        rows = (1 - label_smoothing) .* rows .+ (label_smoothing / classes) .* spread_
    end
    return by_reduction("softmax_cross_entropy", rows, reduction, over_classes(shares))
end

# Other losses ---------------------------------------------------------------------------------------------------------

"""
    binary_cross_entropy(logits, targets; weight=nothing, positive_weight=nothing, reduction=:mean)

Cross-entropy between sigmoid(logits) and targets in [0, 1], of the same size.

Computed as t softplus(-x) + (1 - t) softplus(x): no term is negative, so that nothing cancels at large logits. `weight` says by how
much each loss counts, `positive_weight` its part for target 1; both broadcast to the logits. `reduction` is :mean, over all elements,
:sum or :none. Throws a `ShapeError` for sizes that differ, and a `ConfigurationError` for another reduction.
"""
function binary_cross_entropy(@nospecialize(x), @nospecialize(t); weight=nothing, positive_weight=nothing, reduction::Symbol=:mean)
    logits, targets = as_tensors((x, t))
    logits.dims == targets.dims || throw(ShapeError(
        "binary_cross_entropy: logits of size $(size(logits)) and targets of size $(size(targets)) differ"))
    positives = targets .* SOFTPLUS(NEG(logits))
    positive_weight === nothing || (positives = weighted("binary_cross_entropy: positive_weight", positives, positive_weight))
    losses = positives .+ (1 .- targets) .* SOFTPLUS(logits)
    weight === nothing || (losses = weighted("binary_cross_entropy: weight", losses, weight))
    return by_reduction("binary_cross_entropy", losses, reduction)
end

"""
    mean_squared_error(predictions, targets; weight=nothing, reduction=:mean)

Mean of (prediction - target)², over all elements; both of the same size. `weight`, which broadcasts, says by how much each square
counts; `reduction` is :mean, over all elements, :sum or :none. Throws as [`binary_cross_entropy`](@ref) does.
"""
function mean_squared_error(@nospecialize(x), @nospecialize(t); weight=nothing, reduction::Symbol=:mean)
    predictions, targets = as_tensors((x, t))
    predictions.dims == targets.dims || throw(ShapeError(
        "mean_squared_error: predictions of size $(size(predictions)) and targets of size $(size(targets)) differ"))
    squares = SQUARE(predictions .- targets)
    weight === nothing || (squares = weighted("mean_squared_error: weight", squares, weight))
    return by_reduction("mean_squared_error", squares, reduction)
end

weighted(what::String, losses::Tensor, weight) = MUL(losses, broadcasting_to(what, as_tensor(weight, losses.eltype), losses.dims))

FUNCTIONS["one_hot"] = one_hot
export one_hot
