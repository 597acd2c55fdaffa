# Losses: what a model is trained on, and what its targets must look like.
#
# Each loss is a mean over all its targets, so that the loss of a batch is the mean of its shards' losses weighted by
# their sizes. Where targets count by weights, or not at all, the mean is by the sum of the weights of the whole batch, which
# its shards add up (`couples_batch`).

"""
    Loss

One row of the table: called with a model's outputs and targets, it gives the mean loss. `classes` says whether targets are
classes, integers from 1, one for each column of logits; otherwise they have the size of the outputs. `low` and `high` are
the limits of other targets. `counts_answers` says whether `accuracy` means something beside this loss. The other fields are
settings, see [`loss_of`](@ref): no weights, and `nothing`, where all targets count alike.
"""
struct Loss
    name::String
    compute::Function
    classes::Bool
    low::Float64
    high::Float64
    counts_answers::Bool
    class_weights::Vector{Float64}
    label_smoothing::Float64
    ignored::Union{Nothing,Int}
    positive_weight::Float64
end
Loss(name::String, compute, classes::Bool, low::Float64, high::Float64, counts_answers::Bool) =
    Loss(name, compute, classes, low, high, counts_answers, Float64[], 0.0, nothing, 1.0)

(loss::Loss)(outputs::Tensor, targets::Tensor) = (is_plain(loss) ? loss.compute(outputs, targets) :
    loss.classes ? weighted_softmax_cross_entropy(loss, outputs, targets) :
    loss.compute(outputs, targets; positive_weight=convert(outputs.eltype, loss.positive_weight)))::Tensor

"""Whether a loss has no settings."""
is_plain(loss::Loss) = !couples_batch(loss) && loss.label_smoothing == 0 && loss.positive_weight == 1

"""Whether a loss's mean is by the weights of a whole batch's targets, not by their number."""
couples_batch(loss::Loss) = !isempty(loss.class_weights) || loss.ignored !== nothing
couples_batch(::Function) = false

function weighted_softmax_cross_entropy(loss::Loss, logits::Tensor, labels::Tensor)
    couples_batch(loss) || return softmax_cross_entropy(logits, labels; label_smoothing=loss.label_smoothing)
    weight = isempty(loss.class_weights) ? nothing : convert(Vector{logits.eltype}, loss.class_weights)
    total = softmax_cross_entropy(logits, labels; weight=weight, label_smoothing=loss.label_smoothing, ignored=loss.ignored,
        reduction=:sum)
    hot = one_hot(labels, logits.dims[1]; ignored=loss.ignored, eltype=logits.eltype)
    return total ./ sum_of_parts(sum(weight === nothing ? hot : hot .* weight))
end

"""By how much the mean over these targets of `samples` samples counts beside the mean over others."""
function mean_weight(loss::Loss, targets::AbstractArray, samples::Int)
    couples_batch(loss) || return Float64(samples)
    total = 0.0
    for label in targets
        label == loss.ignored && continue
        total += isempty(loss.class_weights) ? 1.0 : loss.class_weights[label]
    end
    return total
end

"""Losses by name."""
const LOSSES = Dict{String,Loss}(
    "softmax_cross_entropy" => Loss("softmax_cross_entropy", softmax_cross_entropy, true, -Inf, Inf, true),
    "binary_cross_entropy" => Loss("binary_cross_entropy", binary_cross_entropy, false, 0.0, 1.0, true),
    "mean_squared_error" => Loss("mean_squared_error", mean_squared_error, false, -Inf, Inf, false),
)

# What a user may write for each: the functions themselves.
const LOSS_NAMES = IdDict{Any,String}(softmax_cross_entropy => "softmax_cross_entropy",
    binary_cross_entropy => "binary_cross_entropy", mean_squared_error => "mean_squared_error")

"""
    loss_of(loss; class_weights=nothing, label_smoothing=0, ignored_class=nothing, positive_weight=1)

The loss of that name, or of that function, with settings. Of `softmax_cross_entropy`: `class_weights`, how much the loss of each
class counts; `label_smoothing`, the share of each label that all classes have in equal parts; `ignored_class`, a label, perhaps
not a class, that counts nothing, in the loss and in accuracy. Of `binary_cross_entropy`: `positive_weight`, how much the part of
a loss for target 1 counts. Throws a `ConfigurationError` for another name, a setting that the loss has not, or a value that it
does not take.
"""
function loss_of(@nospecialize(loss); class_weights=nothing, label_smoothing=0, ignored_class=nothing, positive_weight=1)
    plain = plain_loss(loss)
    class_weights === nothing && label_smoothing == 0 && ignored_class === nothing && positive_weight == 1 && return plain
    is_plain(plain) || throw(ConfigurationError(
        "$(plain.name): this Loss has settings, and no others are added: give its name with all of them"))
    wrong(name, expected, value) = throw(ConfigurationError("$(plain.name): $name must be $expected, got $(repr(value))"))
    given = (("class_weights", class_weights !== nothing, "softmax_cross_entropy"),
        ("label_smoothing", label_smoothing != 0, "softmax_cross_entropy"),
        ("ignored_class", ignored_class !== nothing, "softmax_cross_entropy"),
        ("positive_weight", positive_weight != 1, "binary_cross_entropy"))
    for (name, is_given, owner) in given
        is_given && owner != plain.name && throw(ConfigurationError("$(plain.name): there is no setting $name"))
    end
    in_order = !(class_weights isa Union{AbstractDict,AbstractSet})  # of the classes
    weights = class_weights === nothing ? Any[] : collect(Any, class_weights)
    class_weights === nothing || in_order && all(w -> w isa Real && isfinite(w)::Bool && w >= 0, weights) && any(w -> (w::Real) > 0, weights) ||
        wrong("class_weights", "finite numbers >= 0 in the order of the classes, not all of them 0", class_weights)
    label_smoothing isa Real && 0 <= label_smoothing <= 1 || wrong("label_smoothing", "a number from 0 to 1", label_smoothing)
    ignored_class === nothing || ignored_class isa Integer && !(ignored_class isa Bool) ||
        wrong("ignored_class", "a whole number", ignored_class)
    positive_weight isa Real && isfinite(positive_weight) && positive_weight > 0 ||
        wrong("positive_weight", "a finite number > 0", positive_weight)
    return Loss(plain.name, plain.compute, plain.classes, plain.low, plain.high, plain.counts_answers, Float64[w for w in weights],
        Float64(label_smoothing), ignored_class === nothing ? nothing : Int(ignored_class), Float64(positive_weight))
end

function plain_loss(@nospecialize(loss))
    loss isa Loss && return loss
    name = loss isa Union{AbstractString,Symbol} ? String(loss) : get(LOSS_NAMES, loss, "")
    haskey(LOSSES, name) || throw(ConfigurationError(
        "unknown loss $(repr(loss)); there are: $(join(sort!(collect(keys(LOSSES))), ", "))"))
    return LOSSES[name]
end

"""The size of the targets of one sample, for an output sample of this size."""
target_size(loss::Loss, output::Vector{Int}) = loss.classes ? output[2:end] : output

"""
Targets as the loss takes them: checked, in the loss's own element type and without gaps. Targets that fit already are
returned as they are, not copied.

Throws a `LabelError`, naming the first bad sample, for labels that are not integers, that are out of range, or that are
not as many as the outputs.
"""
function checked_targets(loss::Loss, output::Vector{Int}, samples::Int, @nospecialize(targets), T::DataType)
    loss.classes && !isempty(output) && output[1] < 2 && throw(ConfigurationError("$(loss.name): expected a model with 2 outputs " *
        "or more, one for each class, got $(output[1]); for a single logit there is binary_cross_entropy"))
    expected = Int[target_size(loss, output); samples]
    given = collect(Int, size(targets))
    if given != expected && !(!loss.classes && !isempty(output) && output[1] == 1 && given == expected[2:end])
        throw(LabelError("$(loss.name): expected targets of size $(Tuple(expected)), got $(size(targets))"))
    end
    if loss.classes
        eltype(targets) <: Integer && eltype(targets) !== Bool ||
            throw(LabelError("$(loss.name): expected integer labels, got elements of $(eltype(targets))"))
        isempty(loss.class_weights) || length(loss.class_weights) == output[1] || throw(ConfigurationError(
            "$(loss.name): expected class_weights for $(output[1]) classes, which the model has, got $(length(loss.class_weights))"))
        labels = targets isa Array{Int64} ? targets : Array{Int64}(targets)
        check_classes(loss, labels, output[1], 1)
        return labels
    end
    eltype(targets) <: Real ||
        throw(LabelError("$(loss.name): expected real numbers as targets, got elements of $(eltype(targets))"))
    values = targets isa Array && eltype(targets) === T ? targets : Array{T}(targets)
    check_reals(loss, values, samples)
    return values
end

"""Check classes that are counted from `base`."""
function check_classes(loss::Loss, labels::Array{Int64}, classes::Int, base::Int)
    wrong = count_outside(labels, base, base + classes - 1)
    wrong == 0 && return nothing
    ignored = loss.ignored === nothing ? nothing : loss.ignored - 1 + base
    wrong = count(y -> !(base <= y < base + classes) && y != ignored, labels)
    wrong == 0 && return nothing
    i = findfirst(y -> !(base <= y < base + classes) && y != ignored, labels)
    throw(LabelError("$(loss.name): expected labels from $base to $(base + classes - 1) (the model has $classes " *
        "outputs)$(ignored === nothing ? "" : ", or $ignored, which is ignored"), got $(labels[i]) $(where_in(labels, i, base)); $wrong of $(length(labels)) are out of range"))
end

function check_reals(loss::Loss, values::Array, samples::Int)
    wrong = count_outside(values, loss.low, loss.high)
    wrong == 0 && all_finite(values) && return nothing
    i = findfirst(y -> !(loss.low <= y <= loss.high) || !isfinite(y), values)
    expected = loss.low == 0 ? "labels from 0 to 1" : "finite targets"
    throw(LabelError("$(loss.name): expected $expected, got $(values[i]) $(where_in(values, i, 1))"))
end

where_in(values::AbstractVector, i, base) = "in sample $(i - 1 + base)"
where_in(values::AbstractArray, i, base) = "in sample $(Tuple(i)[end] - 1 + base) at $(Tuple(i)[1:end-1])"

function count_outside(values::AbstractArray, low, high)
    n = 0
    @inbounds for y in values
        n += !(low <= y <= high)
    end
    return n
end
