# Convolution and max-pooling as one: the rewrite of graphs, and the ops that it makes.
#
# ReLU does not change which element of a window is the largest, so that it can wait until after the pool: a quarter of the
# work for pools of 2 × 2. The result of a fused op has one axis more than the pooled one, of length two: the values, and
# which element of its window each is, counted from 0, or -1 where ReLU let nothing through. Of the gradient before the pool
# only the elements at those places are not zero, and only they are computed with.
#
# Two shapes have kernels, those that the papers train: images under 3 × 3 or 5 × 5 kernels with pools of 2 × 2, and
# sequences whose channels lie in one piece (an embedding's, permuted).

"""A convolution and the max-pool behind it that can be one op, with the nodes in between."""
struct PooledConvolution
    conv::Tensor
    bias::Union{Nothing,Tensor}
    relu::Bool
    before::Tensor  # what is pooled
    pool::Tensor
    sequence::Bool
end

function pooled_convolution(pool::Tensor, users)
    pool.op === MAX_POOL && Kernels.VECTOR_BYTES[] > 0 && length(pool) > 0 || return nothing
    before = pool.inputs[1]
    before.data === nothing && before.op !== nothing || return nothing
    relu = before.op === RELU
    added = relu ? before.inputs[1] : before
    bias, conv = nothing, added
    if added.op === ADD
        k = added.inputs[1].op === CONV ? 1 : 2
        conv, bias = added.inputs[k], added.inputs[3-k]
        is_channel_bias(bias, added) || return nothing
    end
    conv.op === CONV && conv.data === nothing || return nothing
    # Nobody else may need what is no longer computed.
    derived(x) = x === pool || (x.op === STEP && relu) || (x.op === MAX_POOL_GRADIENT && x.inputs[2] === before)
    all(derived, users[before]) || return nothing
    before === added || length(users[added]) == 1 || return nothing
    added === conv || length(users[conv]) == 1 || return nothing
    sequence = suits_sequences(conv, pool)
    sequence || suits_planes(conv, pool) || return nothing
    return PooledConvolution(conv, bias, relu, before, pool, sequence)
end

"""Whether `bias` has an element for each channel of `x`, and is dense in memory but for axes of length one."""
is_channel_bias(bias::Tensor, x::Tensor) = bias.op === RESHAPE && length(bias) == x.dims[end-1] &&
    ndims(bias) == ndims(x) - 1 && bias.dims[end] == length(bias)

function suits_planes(conv::Tensor, pool::Tensor)
    x, w = conv.inputs
    stride, _, dilation, groups = conv.attrs
    return ndims(x) == 4 && w.dims[1] == w.dims[2] && w.dims[1] in (3, 5) && all(==(1), stride) && all(==(1), dilation) &&
           groups == 1 && pool.attrs[1] == [2, 2] == pool.attrs[2] && all(==(0), pool.attrs[3]) && length(w) <= 4096
end

function suits_sequences(conv::Tensor, pool::Tensor)
    x, w = conv.inputs
    _, padding, dilation, groups = conv.attrs
    return ndims(x) == 3 && x.eltype === Float32 && x.op === TRANSPOSE && x.attrs[1] == [2, 1, 3] && all(==(0), padding) &&
           all(==(1), dilation) && groups == 1 && all(==(0), pool.attrs[3])
end

# The ops --------------------------------------------------------------------------------------------------------------

vector_kernel(name::Symbol) = Symbol(name, :_, Kernels.VECTOR_BYTES[])
address_of(numbers::Vector{Int64}, p::Program) = (push!(p.roots, Memory(numbers)); Ptr{Cvoid}(pointer(numbers)))

"""The attributes of split rows: how many of a row's elements there are in each half, padding to the left and above, rows."""
function split_attrs(conv::Tensor)
    padding, x = conv.attrs[2], conv.inputs[1]
    lanes = 64 ÷ sizeof(x.eltype)
    width, rows = x.dims[1] + padding[1] + padding[2], x.dims[2] + padding[3] + padding[4]
    return Any[cld(cld(width, 2), lanes) * lanes, padding[1], padding[3], rows]
end

function infer_split_columns(inputs, attrs)
    x, = inputs
    return Int[2 * attrs[1] * attrs[4] * x.dims[3] * x.dims[4] + 64 ÷ sizeof(x.eltype)], x.eltype
end

forward_split_columns(p, out, inputs, attrs) = emit!(p, out.eltype, vector_kernel(:split_columns),
    (out.address, inputs[1].address, NOWHERE, NOWHERE), NOWHERE, loop(inputs[1].dims, 1),
    (NONE, loop(inputs[1].strides, 0), NONE, NONE), Tuple(attrs))

const SPLIT_COLUMNS = register!(Op("split_columns", infer_split_columns; forward=forward_split_columns, fuses="pad, copy",
    attrs=[:half, :left, :above, :rows], doc="images with padding, the even columns of each row before the odd ones"))

# A fused op's attributes: the size of its result, whether there is ReLU, and what its kernels need to know.

infer_as_given(inputs, attrs) = (attrs[1], inputs[1].eltype)
bias_address(inputs) = length(inputs) == 3 ? inputs[3].address : NOWHERE
"""The largest elements, and which they were, of a fused op's result."""
which_part(m::Memory) = at_element(m, length(m) ÷ 2)

function plane_numbers!(p, dims, kernel, attrs, @nospecialize(T))
    half, rows = attrs[3], attrs[4]
    channels, filters = kernel[3], kernel[4]
    spare = scratch!(p, T, Int[(1 + prod(kernel)) * 64 ÷ sizeof(T)])
    return address_of(Int64[dims[1], dims[2], rows, half, channels, filters, dims[4], attrs[2], Int(spare.address)], p)
end

function forward_conv_pool(p, out, inputs, attrs)
    x, w = inputs
    numbers = plane_numbers!(p, out.dims, w.dims, attrs, out.eltype)
    return emit!(p, out.eltype, Symbol(vector_kernel(:pool_planes), :_, w.dims[1]),
        (out.address, x.address, w.address, bias_address(inputs)), numbers, ONCE, (NONE, NONE, NONE, NONE))
end

function forward_conv_pool_weight_gradient(p, out, inputs, attrs)
    g, pooled, x = inputs
    numbers = plane_numbers!(p, g.dims, out.dims, attrs, out.eltype)
    return emit!(p, out.eltype, Symbol(vector_kernel(:pool_planes_gradient), :_, out.dims[1]),
        (out.address, x.address, g.address, which_part(pooled)), numbers, ONCE, (NONE, NONE, NONE, NONE))
end

const FUSED_POOL_ATTRS = [:dims, :relu, :half, :rows]
const CONV_POOL = register!(Op("conv_pool", infer_as_given; forward=forward_conv_pool, accepts=is_dense,
    fuses="conv, add, relu, max_pool", attrs=FUSED_POOL_ATTRS,
    doc="max-pool of a convolution of split images, with bias and ReLU: values, and which of their windows they were"))
const CONV_POOL_WEIGHT_GRADIENT = register!(Op("conv_pool_weight_gradient", infer_as_given;
    forward=forward_conv_pool_weight_gradient, accepts=is_dense, attrs=FUSED_POOL_ATTRS,
    fuses="max_pool_gradient, step, mul, conv_weight_gradient", doc="gradient of conv_pool by the weight"))

"""Numbers for the kernels of sequences; attrs hold [kernel, filters, stride, window, stride of the pool]."""
function sequence_numbers!(p, x::Vector{Int}, pooled::Int, attrs, spare::Int)
    kernel, filters, stride, window, pool_stride = attrs[3]
    steps = (x[2] - kernel) ÷ stride + 1
    return address_of(Int64[kernel * x[1], stride * x[1], steps, filters, x[3], x[1] * x[2], window, pool_stride, pooled,
        attrs[2], kernel, spare], p)
end

emit_at!(p, out, name, numbers, a, b=NOWHERE, c=NOWHERE) =
    emit!(p, out.eltype, name, (out.address, a, b, c), numbers, ONCE, (NONE, NONE, NONE, NONE))

function forward_sequence_pool(p, out, inputs, attrs)
    x, w = inputs
    band = 32 ÷ sizeof(Float32)
    bands = cld(w.dims[3], band)
    spare = scratch!(p, Float32, Int[band * (2 + x.dims[2])])
    numbers = sequence_numbers!(p, x.dims, out.dims[1], attrs, Int(spare.address))
    stretches = scratch!(p, Float32, w.dims)
    in_bands = scratch!(p, Float32, Int[w.dims[1] * w.dims[2] * band * bands])
    emit_at!(p, stretches, :filters_in_stretches, numbers, NOWHERE, w.address)
    emit_at!(p, in_bands, :filters_in_bands, numbers, stretches.address)
    return emit_at!(p, out, vector_kernel(:pool_sequences), numbers, x.address, in_bands.address, bias_address(inputs))
end

function forward_sequence_pool_weight_gradient(p, out, inputs, attrs)
    g, pooled, x = inputs
    winners = scratch!(p, Float32, Int[3 * (g.dims[1] * g.dims[3] + 1)])  # of one filter, an address and a number each
    numbers = sequence_numbers!(p, x.dims, g.dims[1], attrs, Int(winners.address))
    stretches = scratch!(p, Float32, out.dims)
    emit_at!(p, stretches, vector_kernel(:pool_sequences_gradient), numbers, x.address, g.address, which_part(pooled))
    return emit_at!(p, out, :filters_in_kernels, numbers, stretches.address)
end

function forward_sequence_pool_input_gradient(p, out, inputs, attrs)
    g, pooled, w = inputs
    numbers = sequence_numbers!(p, out.dims, g.dims[1], attrs, 0)
    stretches = scratch!(p, Float32, w.dims)
    emit_at!(p, stretches, :filters_in_stretches, numbers, NOWHERE, w.address)
    emit_fill!(p, out, 0)
    return emit_at!(p, out, vector_kernel(:unpool_sequences), numbers, stretches.address, g.address, which_part(pooled))
end

const SEQUENCE_POOL_ATTRS = [:dims, :relu, :sizes]
const SEQUENCE_POOL = register!(Op("sequence_pool", infer_as_given; forward=forward_sequence_pool, accepts=is_dense,
    fuses="transpose, conv, add, relu, max_pool", attrs=SEQUENCE_POOL_ATTRS,
    doc="max-pool of a convolution of sequences (C, T, N), with bias and ReLU: values, and which of their windows they were"))
const SEQUENCE_POOL_WEIGHT_GRADIENT = register!(Op("sequence_pool_weight_gradient", infer_as_given;
    forward=forward_sequence_pool_weight_gradient, accepts=is_dense, attrs=SEQUENCE_POOL_ATTRS,
    fuses="max_pool_gradient, step, mul, conv_weight_gradient", doc="gradient of sequence_pool by the weight"))
const SEQUENCE_POOL_INPUT_GRADIENT = register!(Op("sequence_pool_input_gradient", infer_as_given;
    forward=forward_sequence_pool_input_gradient, accepts=is_dense, attrs=SEQUENCE_POOL_ATTRS,
    fuses="max_pool_gradient, step, mul, conv_input_gradient", doc="gradient of sequence_pool by the sequences"))

function forward_winners_sum(p, out, inputs, attrs)
    g, pooled = inputs
    planes = prod(g.dims[1:end-2])
    return emit!(p, out.eltype, :sum_of_winners, (out.address, g.address, which_part(pooled), NOWHERE), NOWHERE,
        (planes, g.dims[end-1], g.dims[end], 1), (NONE, NONE, NONE, NONE))
end

function forward_unpool(p, out, inputs, attrs)
    g, pooled = inputs
    emit_fill!(p, out, 0)
    two(v) = length(v) == 1 ? (v[1], 1) : (v[1], v[2])
    whole, small = two(spatial(out)), two(spatial(g))
    return emit!(p, out.eltype, :unpool, (out.address, g.address, which_part(pooled), NOWHERE), NOWHERE,
        (small[1], small[2], g.dims[end-1] * g.dims[end], 1), (NONE, (two(attrs[3])..., 0, 0), NONE, NONE),
        (whole[1], whole[2], attrs[2][1], 0))
end

const WINNERS_SUM = register!(Op("winners_sum", infer_as_given; forward=forward_winners_sum, accepts=is_dense,
    fuses="max_pool_gradient, step, mul, sum", attrs=[:dims], doc="gradient of conv_pool and sequence_pool by the bias"))
const UNPOOL = register!(Op("unpool", infer_as_given; forward=forward_unpool, accepts=is_dense,
    fuses="max_pool_gradient, step, mul", attrs=[:dims, :window, :stride],
    doc="gradient of conv_pool and sequence_pool by what the convolution gave"))

# The rewrite ----------------------------------------------------------------------------------------------------------

"""Replace convolutions with max-pools behind them, and their gradients, by fused ops; in place."""
function fuse_pools!(graph::Graph)
    any(x -> x.op === MAX_POOL, graph.nodes) || return graph
    users = Dict{Tensor,Vector{Tensor}}(x => Tensor[] for x in graph.nodes)
    for x in graph.nodes, a in x.inputs
        haskey(users, a) && push!(users[a], x)
    end
    for x in graph.outputs
        haskey(users, x) && push!(users[x], x)
    end
    found = Dict{Tensor,PooledConvolution}()  # by what is pooled
    for x in graph.nodes
        it = pooled_convolution(x, users)
        it === nothing || (found[it.before] = it)
    end
    isempty(found) && return graph
    replaced, fused = Dict{Tensor,Tensor}(), Dict{PooledConvolution,Tuple{Tensor,Tensor}}()
    unpooled = Dict{Tensor,Tuple{PooledConvolution,Tensor}}()  # gradients before the pool: of what, from which
    nodes = Tensor[]
    function put!(scope::String, op::Op, inputs::Vector{Tensor}, attrs::Vector{Any})
        dims, _ = op.infer(inputs, attrs)
        x = new_node(op, inputs, dims, attrs)
        x.scope = scope
        push!(nodes, x)
        return x
    end
    for x in graph.nodes
        x.inputs = Tensor[get(replaced, a, a) for a in x.inputs]
        it = x.op === MAX_POOL ? get(found, x.inputs[1], nothing) : nothing
        if it !== nothing
            fused[it] = both, source = fused_pool!(it, x.scope, put!)
            values = Item[whole_axis(n) for n in x.dims]
            push!(values, (1, 1, -1))
            replaced[x] = put!(x.scope, SLICE, Tensor[both], Any[values])
            continue
        end
        from = gradient_before_pool(x, found)
        if from !== nothing
            it, g = from
            both, _ = fused[it]
            spread = put!(x.scope, UNPOOL, Tensor[g, both], Any[x.dims, it.pool.attrs[1], it.pool.attrs[2]])
            unpooled[spread] = (it, g)
            replaced[x] = spread
            continue
        end
        if !isempty(x.inputs) && haskey(unpooled, x.inputs[1])
            it, g = unpooled[x.inputs[1]]
            instead = fused_gradient!(x, it, g, fused[it]..., put!)
            if instead !== nothing
                replaced[x] = instead
                continue
            end
        end
        instead = x.op === TRANSPOSE ? shorter_view!(x) : nothing  # a sequence's gradient turned back
        instead === nothing ? push!(nodes, x) : (replaced[x] = instead)
    end
    graph.nodes = nodes
    graph.outputs = Tensor[get(replaced, x, x) for x in graph.outputs]
    return prune!(graph)
end

"""The fused op, and what it reads: split rows, or sequences."""
function fused_pool!(it::PooledConvolution, scope::String, put!)
    x, w = it.conv.inputs
    source = it.sequence ? x.inputs[1] : put!(scope, SPLIT_COLUMNS, Tensor[x], split_attrs(it.conv))
    inputs = Tensor[source, w]
    it.bias === nothing || push!(inputs, put!(scope, RESHAPE, Tensor[it.bias], Any[Int[length(it.bias)]]))
    it.sequence && return put!(scope, SEQUENCE_POOL, inputs, sequence_attrs(it, Int[it.pool.dims; 2])), source
    return put!(scope, CONV_POOL, inputs, plane_attrs(it, Int[it.pool.dims; 2])), source
end

function plane_attrs(it::PooledConvolution, dims::Vector{Int})
    half, _, _, rows = split_attrs(it.conv)
    return Any[dims, Int(it.relu), half, rows]
end

function sequence_attrs(it::PooledConvolution, dims::Vector{Int})
    w = it.conv.inputs[2]
    return Any[dims, Int(it.relu), Int[w.dims[1], w.dims[3], it.conv.attrs[1][1], it.pool.attrs[1][1], it.pool.attrs[2][1]]]
end

"""For the gradient by what the convolution gave, bias and all: the convolution, and the gradient by what was pooled."""
function gradient_before_pool(x::Tensor, found)
    spread = x
    if x.op === WHERE && x.inputs[1].op === STEP
        spread = x.inputs[2]
        is_number(x.inputs[3], 0) && spread.op === MAX_POOL_GRADIENT && x.inputs[1].inputs[1] === spread.inputs[2] ||
            return nothing
    end
    spread.op === MAX_POOL_GRADIENT || return nothing
    it = get(found, spread.inputs[2], nothing)
    it !== nothing && it.relu == (spread !== x) && it.pool.attrs == spread.attrs || return nothing
    return it, spread.inputs[1]
end

"""What computes `x`, a gradient by weight, bias or input, from the winners alone; or nothing."""
function fused_gradient!(x::Tensor, it::PooledConvolution, g::Tensor, both::Tensor, source::Tensor, put!)
    input, w = it.conv.inputs
    if x.op === CONV_WEIGHT_GRADIENT && x.inputs[2] === input
        op, attrs = it.sequence ? (SEQUENCE_POOL_WEIGHT_GRADIENT, sequence_attrs(it, x.dims)) :
            (CONV_POOL_WEIGHT_GRADIENT, plane_attrs(it, x.dims))
        return put!(x.scope, op, Tensor[g, both, source], attrs)
    elseif x.op === CONV_INPUT_GRADIENT && x.inputs[2] === w && it.sequence
        turned = put!(x.scope, SEQUENCE_POOL_INPUT_GRADIENT, Tensor[g, both, w], sequence_attrs(it, source.dims))
        return put!(x.scope, TRANSPOSE, Tensor[turned], Any[Int[2, 1, 3]])
    elseif x.op === SUM && length(x) == it.conv.dims[end-1] && !(ndims(input) - 1 in x.attrs[1])
        sums = put!(x.scope, WINNERS_SUM, Tensor[g, both], Any[Int[length(x)]])
        return put!(x.scope, RESHAPE, Tensor[sums], Any[x.dims])
    end
    return nothing
end
