# Convolution and max-pooling as one: the rewrite of graphs, and the ops that it makes.
#
# ReLU does not change which element of a window is the largest, so that it can wait until after the pool: a quarter of the
# work for pools of 2 × 2. The result of a fused op has one axis more than the pooled one, of length two: the values, and
# which element of its window each is, counted from 0, or -1 where ReLU let nothing through. Of the gradient before the pool
# only the elements at those places are not zero, and only they are computed with.
#
# Two shapes have kernels, those that the papers train: images under 3 × 3 or 5 × 5 kernels with pools of 2 × 2, and
# sequences whose channels lie in one piece (an embedding's, permuted).

"""A convolution and the max-pool behind it that can be one op, with what is in between."""
struct PooledConvolution
    conv::Equation
    bias::Union{Nothing,Tensor}
    relu::Bool
    before::Tensor  # what is pooled
    pool::Equation
    sequence::Bool
end

function pooled_convolution(pool::Equation, uses::Uses, readers::Dict{Tensor,Vector{Equation}})
    pool.op === MAX_POOL && Kernels.VECTOR_BYTES[] > 0 && length(output(pool)) > 0 || return nothing
    before = pool.inputs[1]
    rectified = by(uses, before, RELU)
    added = rectified === nothing ? before : rectified.inputs[1]
    bias, convolved = nothing, added
    sum_ = by(uses, added, ADD)
    if sum_ !== nothing
        k = op_of(sum_.inputs[1], uses) === CONV ? 1 : 2
        convolved, bias = sum_.inputs[k], sum_.inputs[3-k]
        is_channel_bias(bias, added, uses) || return nothing
    end
    conv = by(uses, convolved, CONV)
    # A bias of more elements than there are filters makes the sum larger than what is convolved.
    conv !== nothing && convolved.dims == added.dims || return nothing
    # Nobody else may need what is no longer computed.
    derived(e) = e === pool || (e.op === STEP && rectified !== nothing) ||
        (e.op === MAX_POOL_GRADIENT && e.inputs[2] === before)
    length(readers[before]) == uses.counts[before] && all(derived, readers[before]) || return nothing
    before === added || uses.counts[added] == 1 || return nothing
    added === convolved || uses.counts[convolved] == 1 || return nothing
    sequence = suits_sequences(conv, pool, uses)
    sequence || suits_planes(conv, pool) || return nothing
    return PooledConvolution(conv, bias, rectified !== nothing, before, pool, sequence)
end

"""Whether `bias` has an element for each channel of `x`, and is dense in memory but for axes of length one."""
is_channel_bias(bias::Tensor, x::Tensor, uses::Uses) = op_of(bias, uses) === RESHAPE && length(bias) == x.dims[end-1] &&
    ndims(bias) == ndims(x) - 1 && bias.dims[end] == length(bias)

function suits_planes(conv::Equation, pool::Equation)
    x, w = conv.inputs
    a, b = conv.attrs, pool.attrs
    return ndims(x) == 4 && w.dims[1] == w.dims[2] && w.dims[1] in (3, 5) && all(==(1), a.stride) && all(==(1), a.dilation) &&
           a.groups == 1 && b.window == [2, 2] == b.stride && all(==(0), b.padding) && all(==(1), b.dilation) && length(w) <= 4096
end

function suits_sequences(conv::Equation, pool::Equation, uses::Uses)
    x, a = conv.inputs[1], conv.attrs
    turned = by(uses, x, TRANSPOSE)
    return ndims(x) == 3 && x.eltype === Float32 && conv.inputs[2].dims[1] > 0 && turned !== nothing && turned.attrs.axes == [2, 1, 3] &&
           all(==(0), a.padding) && all(==(1), a.dilation) && a.groups == 1 && all(==(0), pool.attrs.padding) && all(==(1), pool.attrs.dilation)
end

# The ops --------------------------------------------------------------------------------------------------------------

vector_kernel(name::Symbol) = Symbol(name, :_, Kernels.VECTOR_BYTES[])
address_of(numbers::Vector{Int64}, p::Instructions) = (push!(p.roots, Memory(numbers)); Ptr{Cvoid}(pointer(numbers)))

"""The attributes of split rows: how many of a row's elements there are in each half, padding to the left and above, rows."""
function split_attrs(conv::Equation)
    padding, x = conv.attrs.padding, conv.inputs[1]
    lanes = 64 ÷ sizeof(x.eltype)
    width, rows = x.dims[1] + padding[1] + padding[2], x.dims[2] + padding[3] + padding[4]
    return attributes(:half => cld(cld(width, 2), lanes) * lanes, :left => padding[1], :above => padding[3], :rows => rows)
end

function infer_split_columns(inputs, attrs)
    x, = inputs
    return Int[2 * attrs.half * attrs.rows * x.dims[3] * x.dims[4] + 64 ÷ sizeof(x.eltype)], x.eltype
end

forward_split_columns(p, out, inputs, attrs) = emit!(p, out.eltype, vector_kernel(:split_columns),
    (out.address, inputs[1].address, NOWHERE, NOWHERE), NOWHERE, loop(inputs[1].dims, 1),
    (NONE, loop(inputs[1].strides, 0), NONE, NONE), (attrs.half, attrs.left, attrs.above, attrs.rows))

const SPLIT_COLUMNS = register!(Op("split_columns", infer_split_columns; forward=forward_split_columns, fuses="pad, copy",
    attrs=[:half, :left, :above, :rows], doc="images with padding, the even columns of each row before the odd ones"))

# A fused op's attributes: the size of its result, whether there is ReLU, and what its kernels need to know.

infer_as_given(inputs, attrs) = (attrs.dims, inputs[1].eltype)
bias_address(inputs) = length(inputs) == 3 ? inputs[3].address : NOWHERE
"""The largest elements, and which they were, of a fused op's result."""
which_part(m::Memory) = at_element(m, length(m) ÷ 2)

function plane_numbers!(p, dims, kernel, attrs, @nospecialize(T))
    half, rows = attrs.half, attrs.rows
    channels, filters = kernel[3], kernel[4]
    spare = scratch!(p, T, Int[(1 + prod(kernel)) * 64 ÷ sizeof(T)])
    return address_of(Int64[dims[1], dims[2], rows, half, channels, filters, dims[4], attrs.relu, Int(spare.address)], p)
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

"""Numbers for the kernels of sequences; `sizes` holds [kernel, filters, stride, window, stride of the pool]."""
function sequence_numbers!(p, x::Vector{Int}, pooled::Int, attrs, spare::Int)
    kernel, filters, stride, window, pool_stride = attrs.sizes
    steps = (x[2] - kernel) ÷ stride + 1
    return address_of(Int64[kernel * x[1], stride * x[1], steps, filters, x[3], x[1] * x[2], window, pool_stride, pooled,
        attrs.relu, kernel, spare], p)
end

emit_at!(p, out, name, numbers, a, b=NOWHERE, c=NOWHERE) =
    emit!(p, out.eltype, name, (out.address, a, b, c), numbers, ONCE, (NONE, NONE, NONE, NONE))

"""
The cost of the convolution of `sequence_pool`, in multiplications of a product: five multiplications here cost as much as six
there, and bringing an element of the weight into its order costs as much as 45.
"""
sequence_work(c::Convolution) = c.taps * c.filters * (6 * c.samples * c.pixels ÷ 5 + 45)

"""The convolution of `sequence_pool`, of sequences (T, C, N)."""
function sequence_convolution(x::Memory, w::Memory, stride::Int)
    at = attributes(:stride => Int[stride], :padding => Int[0, 0], :dilation => Int[1], :groups => 1)
    return Convolution(Int[x.dims[2], x.dims[1], x.dims[3]], w.dims, at)
end

function forward_sequence_pool(p, out, inputs, attrs)
    x, w = inputs
    tiled = by_winograd(sequence_convolution(x, w, attrs.sizes[3]), out.eltype; direct=sequence_work)
    tiled === nothing || return winograd_sequence_pool!(p, tiled, out, inputs, attrs)
    band = 32 ÷ sizeof(Float32)
    bands = cld(w.dims[3], band)
    spare = scratch!(p, Float32, Int[band * (2 + x.dims[2])])
    numbers = sequence_numbers!(p, x.dims, out.dims[1], attrs, Int(spare.address))
    patches = scratch!(p, Float32, w.dims)
    in_bands = scratch!(p, Float32, Int[w.dims[1] * w.dims[2] * band * bands])
    emit_at!(p, patches, :filters_in_patches, numbers, NOWHERE, w.address)
    emit_at!(p, in_bands, :filters_in_bands, numbers, patches.address)
    return emit_at!(p, out, vector_kernel(:pool_sequences), numbers, x.address, in_bands.address, bias_address(inputs))
end

"""The pools of sequences that are convolved by Winograd's algorithm, block by block."""
function winograd_sequence_pool!(p::Instructions, c::TiledConvolution, out::Memory, inputs, attrs)
    x, w = inputs
    _, _, _, window, stride = attrs.sizes
    pooled, filters = out.dims[1], c.filters
    made = turned_planes!(p, with_strides(out, out.dims[1:3], out.strides[1:3]), Int[c.axes[1].outputs, filters], Blocks(c).samples)
    spare = scratch!(p, Float32, Int[2 * vector_lanes()])
    sequences = with_strides(x, x.dims[[2, 1, 3]], x.strides[[2, 1, 3]])
    return emit_winograd!(p, c, made, sequences, w, false) do first, count
        planes, pools = of_block(made, first, count), of_samples(made.all, first, count)
        emit!(p, Float32, vector_kernel(:pool_convolved), (pools.address, planes.address, NOWHERE, bias_address(inputs)), NOWHERE,
            (pooled, filters, count, window),
            ((length(out) ÷ 2, 0, 0, 0), (planes.strides[1], planes.strides[3], stride, 0), NONE, NONE),
            (attrs.relu, Int(spare.address), 0, 0))
    end
end

function forward_sequence_pool_weight_gradient(p, out, inputs, attrs)
    g, pooled, x = inputs
    winners = scratch!(p, Float32, Int[3 * (g.dims[1] * g.dims[3] + 1)])  # of one filter, an address and a number each
    numbers = sequence_numbers!(p, x.dims, g.dims[1], attrs, Int(winners.address))
    patches = scratch!(p, Float32, out.dims)
    emit_at!(p, patches, vector_kernel(:pool_sequences_gradient), numbers, x.address, g.address, which_part(pooled))
    return emit_at!(p, out, :filters_in_kernels, numbers, patches.address)
end

function forward_sequence_pool_input_gradient(p, out, inputs, attrs)
    g, pooled, w = inputs
    numbers = sequence_numbers!(p, out.dims, g.dims[1], attrs, 0)
    patches = scratch!(p, Float32, w.dims)
    emit_at!(p, patches, :filters_in_patches, numbers, NOWHERE, w.address)
    emit_fill!(p, out, 0)
    return emit_at!(p, out, vector_kernel(:unpool_sequences), numbers, patches.address, g.address, which_part(pooled))
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
        (small[1], small[2], g.dims[end-1] * g.dims[end], 1), (NONE, (two(attrs.stride)..., 0, 0), NONE, NONE),
        (whole[1], whole[2], attrs.window[1], 0))
end

const WINNERS_SUM = register!(Op("winners_sum", infer_as_given; forward=forward_winners_sum, accepts=is_dense,
    fuses="max_pool_gradient, step, mul, sum", attrs=[:dims], doc="gradient of conv_pool and sequence_pool by the bias"))
const UNPOOL = register!(Op("unpool", infer_as_given; forward=forward_unpool, accepts=is_dense,
    fuses="max_pool_gradient, step, mul", attrs=[:dims, :window, :stride],
    doc="gradient of conv_pool and sequence_pool by what the convolution gave"))

# The rewrite ----------------------------------------------------------------------------------------------------------

"""
What the rewrite of a program has found and made so far.

- `found`: the convolutions that are fused, by what is pooled.
- `equations`, `made`: the new program.
- `replaced`: variables that others replace.
- `fused`: for each convolution the fused op's result, and what the op reads.
- `unpooled`: gradients before a pool: of which convolution, from which gradient.
"""
struct PoolRewrite
    found::Dict{Tensor,PooledConvolution}
    equations::Vector{Equation}
    made::Made
    replaced::TensorDict{Tensor}
    fused::Dict{Tensor,Tuple{Tensor,Tensor}}
    unpooled::Dict{Tensor,Tuple{PooledConvolution,Tensor}}
end

function put!(r::PoolRewrite, e::Equation)
    push!(r.equations, e)
    foreach(x -> r.made[x] = e, e.outputs)
    return e.outputs[1]
end
put!(r::PoolRewrite, scope::String, op::Op, inputs::Vector{Tensor}, attrs::Attributes) =
    put!(r, Equation(op, inputs, attrs, scope))

"""Replace convolutions with max-pools behind them, and their gradients, by fused ops."""
function fuse_pools(program::Program)
    any(e -> e.op === MAX_POOL, program.equations) || return program
    uses = Uses(program)
    readers = Dict{Tensor,Vector{Equation}}(x => Equation[] for (x, _) in uses.made)
    for e in program.equations, a in e.inputs
        haskey(readers, a) && push!(readers[a], e)
    end
    found = Dict{Tensor,PooledConvolution}()
    for e in program.equations
        it = pooled_convolution(e, uses, readers)
        it === nothing || (found[it.before] = it)
    end
    isempty(found) && return program
    r = PoolRewrite(found, Equation[], Made(), TensorDict{Tensor}(), Dict{Tensor,Tuple{Tensor,Tensor}}(),
        Dict{Tensor,Tuple{PooledConvolution,Tensor}}())
    for e in program.equations
        e = reading(a -> get(r.replaced, a, a), e)
        instead = without_pool!(r, e)
        instead === nothing ? put!(r, e) : (r.replaced[output(e)] = instead)
    end
    return prune(Program(program.inputs, r.equations, Tensor[get(r.replaced, x, x) for x in program.outputs]))
end

"""What replaces an equation's result, or `nothing` where that stays."""
function without_pool!(r::PoolRewrite, e::Equation)
    it = e.op === MAX_POOL ? get(r.found, e.inputs[1], nothing) : nothing
    if it !== nothing
        both, _ = r.fused[it.before] = fused_pool!(r, it, e.scope)
        values = Item[whole_axis(n) for n in output(e).dims]
        push!(values, (1, 1, -1))
        return put!(r, e.scope, SLICE, Tensor[both], attributes(:index => values))
    end
    from = gradient_before_pool(r, e)
    if from !== nothing
        it, g = from
        both, _ = r.fused[it.before]
        spread = put!(r, e.scope, UNPOOL, Tensor[g, both], attributes(:dims => output(e).dims, :window => it.pool.attrs.window,
            :stride => it.pool.attrs.stride))
        r.unpooled[spread] = (it, g)
        return spread
    end
    if !isempty(e.inputs) && haskey(r.unpooled, e.inputs[1])
        instead = fused_gradient!(r, e, r.unpooled[e.inputs[1]]...)
        instead === nothing || return instead
    end
    turned = e.op === TRANSPOSE && op_of(e.inputs[1], r.made) === TRANSPOSE ? r.made[e.inputs[1]].inputs[1] : nothing
    turned !== nothing && op_of(turned, r.made) === SEQUENCE_POOL_INPUT_GRADIENT || return nothing
    shorter = shorter_transpose(e, r.made)  # a sequence's gradient turned back
    return shorter isa Tensor ? shorter : put!(r, shorter)
end

"""The convolution in the new program."""
in_rewrite(r::PoolRewrite, it::PooledConvolution) = r.made[output(it.conv)]

"""The fused op, and what it reads: split rows, or sequences."""
function fused_pool!(r::PoolRewrite, it::PooledConvolution, scope::String)
    x, w = in_rewrite(r, it).inputs
    # What was transposed may be another op's result by now, and have no transpose any more.
    turned = op_of(x, r.made) === TRANSPOSE && r.made[x].attrs.axes == [2, 1, 3]
    source = !it.sequence ? put!(r, scope, SPLIT_COLUMNS, Tensor[x], split_attrs(it.conv)) :
        turned ? r.made[x].inputs[1] : put!(r, scope, TRANSPOSE, Tensor[x], attributes(:axes => Int[2, 1, 3]))
    inputs = Tensor[source, w]
    it.bias === nothing || push!(inputs, put!(r, scope, RESHAPE, Tensor[get(r.replaced, it.bias, it.bias)], attributes(:dims => Int[length(it.bias)])))
    dims = Int[output(it.pool).dims; 2]
    it.sequence && return put!(r, scope, SEQUENCE_POOL, inputs, sequence_attrs(it, dims)), source
    return put!(r, scope, CONV_POOL, inputs, plane_attrs(it, dims)), source
end

function plane_attrs(it::PooledConvolution, dims::Vector{Int})
    split = split_attrs(it.conv)
    return attributes(:dims => dims, :relu => Int(it.relu), :half => split.half, :rows => split.rows)
end

function sequence_attrs(it::PooledConvolution, dims::Vector{Int})
    w = it.conv.inputs[2]
    pool = it.pool.attrs
    return attributes(:dims => dims, :relu => Int(it.relu),
        :sizes => Int[w.dims[1], w.dims[3], it.conv.attrs.stride[1], pool.window[1], pool.stride[1]])
end

"""For the gradient by what the convolution gave, bias and all: the convolution, and the gradient by what was pooled."""
function gradient_before_pool(r::PoolRewrite, e::Equation)
    spread = e
    if e.op === WHERE && op_of(e.inputs[1], r.made) === STEP
        spread = get(r.made, e.inputs[2], nothing)
        is_number(e.inputs[3], 0) && spread !== nothing && spread.op === MAX_POOL_GRADIENT &&
            r.made[e.inputs[1]].inputs[1] === spread.inputs[2] || return nothing
    end
    spread.op === MAX_POOL_GRADIENT || return nothing
    it = get(r.found, spread.inputs[2], nothing)
    # A pool that comes later has not been fused yet: the gradient then stays as it is.
    it !== nothing && haskey(r.fused, it.before) && it.relu == (spread !== e) && it.pool.attrs == spread.attrs || return nothing
    return it, spread.inputs[1]
end

"""What computes an equation's result, a gradient by weight, bias or input, from the winners alone; or `nothing`."""
function fused_gradient!(r::PoolRewrite, e::Equation, it::PooledConvolution, g::Tensor)
    both, source = r.fused[it.before]
    input, w = in_rewrite(r, it).inputs
    y = e.outputs[1]
    # The same gradient may also be that of another convolution, whose result has this size.
    same(x) = subset(e.attrs, CONV_ATTRS) == it.conv.attrs && y.dims == x.dims
    if e.op === CONV_WEIGHT_GRADIENT && e.inputs[2] === input && same(w)
        op, attrs = it.sequence ? (SEQUENCE_POOL_WEIGHT_GRADIENT, sequence_attrs(it, y.dims)) :
            (CONV_POOL_WEIGHT_GRADIENT, plane_attrs(it, y.dims))
        return put!(r, e.scope, op, Tensor[g, both, source], attrs)
    elseif e.op === CONV_INPUT_GRADIENT && e.inputs[2] === w && it.sequence && same(input)
        turned = put!(r, e.scope, SEQUENCE_POOL_INPUT_GRADIENT, Tensor[g, both, w], sequence_attrs(it, source.dims))
        return put!(r, e.scope, TRANSPOSE, Tensor[turned], attributes(:axes => Int[2, 1, 3]))
    elseif e.op === SUM && length(y) == output(it.conv).dims[end-1] && !(ndims(input) - 1 in e.attrs.axes)
        sums = put!(r, e.scope, WINNERS_SUM, Tensor[g, both], attributes(:dims => Int[length(y)]))
        return put!(r, e.scope, RESHAPE, Tensor[sums], attributes(:dims => y.dims))
    end
    return nothing
end
