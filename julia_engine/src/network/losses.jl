# Losses: what a model is trained on, and what its targets must look like.
#
# Each loss is a mean over all its targets, so that the loss of a batch is the mean of its shards' losses weighted by
# their sizes.

"""
    Loss

One row of the table: called with a model's outputs and targets, it gives the mean loss. `classes` says whether targets are
classes, integers from 1, one for each column of logits; otherwise they have the size of the outputs. `low` and `high` are
the limits of other targets. `counts_answers` says whether `accuracy` means something beside this loss.
"""
struct Loss
    name::String
    compute::Function
    classes::Bool
    low::Float64
    high::Float64
    counts_answers::Bool
end

(loss::Loss)(outputs::Tensor, targets::Tensor) = loss.compute(outputs, targets)::Tensor

"""Losses by name."""
const LOSSES = Dict{String,Loss}(
    "softmax_cross_entropy" => Loss("softmax_cross_entropy", softmax_cross_entropy, true, -Inf, Inf, true),
    "binary_cross_entropy" => Loss("binary_cross_entropy", binary_cross_entropy, false, 0.0, 1.0, true),
    "mean_squared_error" => Loss("mean_squared_error", mean_squared_error, false, -Inf, Inf, false),
)

# What a user may write for each: the functions themselves.
const LOSS_NAMES = IdDict{Any,String}(softmax_cross_entropy => "softmax_cross_entropy",
    binary_cross_entropy => "binary_cross_entropy", mean_squared_error => "mean_squared_error")

"""The loss of that name, or of that function; or a `ConfigurationError` that lists the names there are."""
function loss_of(@nospecialize(loss))
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
    expected = Int[target_size(loss, output); samples]
    given = collect(Int, size(targets))
    if given != expected && !(!loss.classes && !isempty(output) && output[1] == 1 && given == expected[2:end])
        throw(LabelError("$(loss.name): expected targets of size $(Tuple(expected)), got $(size(targets))"))
    end
    if loss.classes
        eltype(targets) <: Integer && eltype(targets) !== Bool ||
            throw(LabelError("$(loss.name): expected integer labels, got elements of $(eltype(targets))"))
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
    i = findfirst(y -> !(base <= y < base + classes), labels)
    throw(LabelError("$(loss.name): expected labels from $base to $(base + classes - 1) (the model has $classes " *
        "outputs), got $(labels[i]) $(where_in(labels, i, base)); $wrong of $(length(labels)) are out of range"))
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
