# Convolution, pooling and interpolation layers. Sizes are those of a sample, (W, C), (W, H, C) or (W, H, D, C): the channels
# come last, since numpy's (C, H, W) is (W, H, C) here. Settings are one number, or one for each spatial axis, W first.

"""The names of the spatial axes in messages."""
axis_names(axes::Int) = join(("W", "H", "D")[1:axes], ", ")

# What all convolutions share, and those that are transposed.
abstract type Convolutional <: Layer end
abstract type TransposedConvolutional <: Convolutional end

for axes in 1:3, transposes in (false, true)
    name = Symbol("Conv$(axes)D", transposes ? "Transpose" : "")
    above, size_in = transposes ? :TransposedConvolutional : :Convolutional, "($(axis_names(axes)), C)"
    size_out = replace(replace(size_in, "C" => "filters"), r"([WHD])" => s"\1'")
    kernel = join(("kw", "kh", "kd")[1:axes], ", ")
    weight = transposes ? "($kernel, filters / groups, C)" : "($kernel, C / groups, filters)"
    what_it_does = transposes ? "The transpose of [`Conv$(axes)D`](@ref): each element adds its multiple of the kernels, " *
        "$size_in to $size_out.\n`padding` is cut off the result, `output_padding` is more at the end of each axis, less " *
        "than the stride or the dilation." : "Cross-correlation: $size_in to $size_out."
    @eval begin
        @doc $("    $name(channels => filters, kernel, activation=identity; stride=1, padding=0" *
            (transposes ? ", output_padding=0" : "") * ", dilation=1, groups=1,\n        bias=true, " *
            "weight_init=\"glorot_uniform\", bias_init=\"zeros\", name=nothing)\n\n$what_it_does Settings are one number, " *
            "or one for each spatial\naxis; padding also a pair, before and after, for each.\n\nParameters: `weight` $weight; " *
            "`bias` (filters,) unless `bias=false`.")
        struct $name <: $above
            channels::Int
            filters::Int
            kernel::Vector{Int}
            stride::Vector{Int}
            padding::Vector{Int}  # before and after, for each axis
            output_padding::Vector{Int}  # of transposed ones
            dilation::Vector{Int}
            groups::Int
            activation::String
            bias::Bool
            weight_init::Any
            bias_init::Any
            name::Union{Nothing,String}
        end

        function $name(@nospecialize(sizes), @nospecialize(kernel), @nospecialize(activation=identity); stride=1, padding=0,
                $((transposes ? (Expr(:kw, :output_padding, 0),) : ())...), dilation=1, groups=1, bias::Bool=true,
                weight_init="glorot_uniform", bias_init="zeros", name=nothing)
            what = $(String(name))
            channels, filters = sizes_of(what, sizes)
            count = whole_number(what, "groups", groups)
            channels % count == 0 && filters % count == 0 || throw(ConfigurationError(
                "$what: $channels channels and $filters filters cannot be divided into $count groups"))
            steps, apart = settings(what, "stride", stride, $axes, 1), settings(what, "dilation", dilation, $axes, 1)
            more = settings(what, "output_padding", $(transposes ? :output_padding : 0), $axes, 0)
            all(more .< max.(steps, apart)) || throw(ConfigurationError("$what: output_padding must be less than the stride " *
                "$(Tuple(steps)) or the dilation $(Tuple(apart)), got $(Tuple(more))"))
            return $name(channels, filters, settings(what, "kernel", kernel, $axes, 1), steps, sides(what, padding, $axes), more,
                apart, count, activation_name(what, activation), bias,
                checked_initialiser(what, "weight_init", weight_init), checked_initialiser(what, "bias_init", bias_init),
                checked_name(name))
        end
        spatial_axes(::$name) = $axes
    end
end

"""A layer's setting for each axis; what the op finds wrong is the layer's own mistake here."""
settings(what::String, setting::String, @nospecialize(value), axes::Int, least::Int) =
    configured(() -> AD.each_axis("$what: $setting", value, axes, least))
sides(what::String, @nospecialize(value), axes::Int) = configured(() -> AD.each_side("$what: padding", value, axes))

function configured(f)
    try
        return f()
    catch error
        error isa ShapeError ? throw(ConfigurationError(error.message)) : rethrow()
    end
end

weight_dims(layer::Convolutional) = Int[layer.kernel; layer.channels ÷ layer.groups; layer.filters]
weight_dims(layer::TransposedConvolutional) = Int[layer.kernel; layer.filters ÷ layer.groups; layer.channels]

function parameters(layer::Convolutional)
    window = prod(layer.kernel)
    fans = (window * layer.channels ÷ layer.groups, window * layer.filters ÷ layer.groups)
    specs = ["weight" => ParameterSpec(weight_dims(layer), layer.weight_init, fans...)]
    layer.bias && push!(specs, "bias" => ParameterSpec([layer.filters], layer.bias_init, fans...))
    return specs
end

function output_size(layer::Convolutional, input::Vector{Int})
    axes = spatial_axes(layer)
    length(input) == axes + 1 && input[end] == layer.channels || throw(rejected(layer,
        "size ($(axis_names(axes)), $(layer.channels))", input))
    return Int[convolved_lengths(layer, input); layer.filters]
end

convolved_lengths(layer::Convolutional, input::Vector{Int}) = counts(layer, input, layer.kernel, layer.dilation)

function convolved_lengths(layer::TransposedConvolutional, input::Vector{Int})
    found = Int[(input[d] - 1) * layer.stride[d] + layer.dilation[d] * (layer.kernel[d] - 1) + 1 - layer.padding[2d-1] -
                layer.padding[2d] + layer.output_padding[d] for d in 1:spatial_axes(layer)]
    all(>=(1), input[1:end-1]) && all(>=(1), found) || throw(rejected(layer,
        "elements of which padding leaves some (lengths would be $(Tuple(found)))", input))
    return found
end

"""How many windows fit on each axis of a sample; an error that names the layer where none does."""
function counts(layer::Layer, input::Vector{Int}, window::Vector{Int}, dilation::Vector{Int})
    try
        return AD.window_counts(input[1:end-1], window, layer.stride, layer.padding, dilation)
    catch error
        error isa ShapeError || rethrow()
        where_ = AD.state().scope
        throw(ShapeError("$layer$(isempty(where_) ? "" : " in layer \"$where_\""): $(error.message)"))
    end
end

function forward(layer::Convolutional, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    y = convolution(layer, x, parameters["weight"])
    layer.bias && (y = y .+ reshape(parameters["bias"], ones(Int, spatial_axes(layer))..., layer.filters))
    return activated(layer.activation, y)
end

convolution(layer::Convolutional, x::Tensor, weight::Tensor) =
    AD.convolved(x, weight, layer.stride, layer.padding, layer.dilation, layer.groups)
convolution(layer::TransposedConvolutional, x::Tensor, weight::Tensor) = conv_transpose(x, weight; stride=layer.stride,
    padding=[(layer.padding[2d-1], layer.padding[2d]) for d in 1:spatial_axes(layer)], output_padding=layer.output_padding,
    dilation=layer.dilation, groups=layer.groups)

Base.show(io::IO, layer::Convolutional) = print(io, kind(layer), "(", layer.channels, " => ", layer.filters, ", ",
    length(layer.kernel) == 1 ? layer.kernel[1] : Tuple(layer.kernel),
    layer.activation == "identity" ? "" : ", $(layer.activation)", ")")

LAYERS["conv1d"], LAYERS["conv2d"], LAYERS["conv3d"] = Conv1D, Conv2D, Conv3D
LAYERS["conv1d_transpose"], LAYERS["conv2d_transpose"], LAYERS["conv3d_transpose"] = Conv1DTranspose, Conv2DTranspose, Conv3DTranspose
function read_layer(T::Type{<:Convolutional}, line::Line, input::Vector{Int})
    more = T <: TransposedConvolutional ? (output_padding=lengths(line, "output_padding"),) : NamedTuple()
    return T(channels(input) => given(line, "filters", Int), lengths(line, "kernel"); stride=lengths(line, "stride"),
        padding=paddings(line), dilation=lengths(line, "dilation"), groups=given(line, "groups", Int),
        bias=given(line, "bias", Bool), name=given(line, "id", String), more...)
end

# Pooling --------------------------------------------------------------------------------------------------------------

# What the pooling layers share.
abstract type Pooling <: Layer end

for axes in 1:3, averages in (false, true)
    name, op = Symbol(averages ? "AvgPool" : "MaxPool", "$(axes)D"), averages ? :AVG_POOL : :MAX_POOL
    what, size_in = averages ? "Mean" : "Largest element", "($(axis_names(axes)), C)"
    @eval begin
        @doc $("    $name(window; stride=window, padding=0, dilation=1, ceil_mode=false" * (averages ? ", count_padding=true" : "") *
            ", name=nothing)\n\n$what of each window: " *
            "$size_in to $(replace(size_in, r"([WHD])" => s"\1'"))" * ". Settings are one number, or one for each\n" *
            "spatial axis. Padding is at most half the window; " *
            (averages ? "it counts as zeros, or without `count_padding` not at all." : "it is never the largest.") *
            "\nWith `ceil_mode` elements that are left over at the end, too few for a window, have one nevertheless.")
        struct $name <: Pooling
            window::Vector{Int}
            stride::Vector{Int}
            padding::Vector{Int}  # before and after, for each axis
            dilation::Vector{Int}
            ceil_mode::Bool
            count_padding::Bool
            name::Union{Nothing,String}
        end

        function $name(@nospecialize(window); stride=nothing, padding=0, dilation=1, ceil_mode::Bool=false,
                $((averages ? (Expr(:kw, :(count_padding::Bool), true),) : ())...), name=nothing)
            attrs = configured(() -> AD.pool_attrs($(String(name)), $axes, window, stride, padding, dilation))
            return $name(attrs.window, attrs.stride, attrs.padding, attrs.dilation, ceil_mode, $(averages ? :count_padding : true),
                checked_name(name))
        end
        spatial_axes(::$name) = $axes
        pooling_op(::$name) = AD.$op
    end
end

function output_size(layer::Pooling, input::Vector{Int})
    axes = spatial_axes(layer)
    length(input) == axes + 1 || throw(rejected(layer, "size ($(axis_names(axes)), C)", input))
    counts(layer, input, layer.window, layer.dilation)  # a window fits
    x = AD.symbol(Float32, Int[input; 1])
    try
        return AD.pooled_dims(x.dims, pooling_attrs(layer, x))[1:end-1]
    catch error
        error isa ShapeError ? throw(rejected(layer, "windows that hold elements ($(error.message))", input)) : rethrow()
    end
end

function pooling_attrs(layer::Pooling, x::Tensor)
    attrs = AD.attributes(:window => layer.window, :stride => layer.stride, :padding => layer.padding, :dilation => layer.dilation)
    return layer.ceil_mode ? AD.to_last_windows(x, attrs) : attrs
end

function forward(layer::Pooling, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    y = AD.pooled(pooling_op(layer), x, pooling_attrs(layer, x))
    pooling_op(layer) === AD.AVG_POOL || return y
    return AD.averaged(y, x, layer.count_padding ? layer.padding : zero(layer.padding), layer)
end

Base.show(io::IO, layer::Pooling) = print(io, kind(layer), "(", length(layer.window) == 1 ? layer.window[1] :
    Tuple(layer.window), layer.stride == layer.window ? "" : "; stride=$(Tuple(layer.stride))", ")")

LAYERS["max_pool1d"], LAYERS["max_pool2d"], LAYERS["max_pool3d"] = MaxPool1D, MaxPool2D, MaxPool3D
LAYERS["avg_pool1d"], LAYERS["avg_pool2d"], LAYERS["avg_pool3d"] = AvgPool1D, AvgPool2D, AvgPool3D
function read_layer(T::Type{<:Pooling}, line::Line, input::Vector{Int})
    more = T <: Union{AvgPool1D,AvgPool2D,AvgPool3D} ? (count_padding=given(line, "count_padding", Bool),) : NamedTuple()
    return T(lengths(line, "window"); stride=lengths(line, "stride"), padding=paddings(line), dilation=lengths(line, "dilation"),
        ceil_mode=given(line, "ceil_mode", Bool), name=given(line, "id", String), more...)
end

for (name, what) in ((:GlobalMaxPool, "Largest element"), (:GlobalAvgPool, "Mean"))
    @eval begin
        @doc $("    $name()\n\n$what of each channel: (..., C) to (C,).")
        struct $name <: Layer
            name::Union{Nothing,String}
        end
        $name(; name=nothing) = $name(checked_name(name))
        Base.show(io::IO, layer::$name) = print(io, $(String(name)), "()")
    end
end

function output_size(layer::Union{GlobalMaxPool,GlobalAvgPool}, input::Vector{Int})
    length(input) >= 2 && all(>=(1), input[1:end-1]) || throw(rejected(layer, "size (..., C) with elements in each channel", input))
    return input[end:end]
end

function forward(layer::Union{GlobalMaxPool,GlobalAvgPool}, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    window = AD.spatial(x)
    op = layer isa GlobalMaxPool ? AD.MAX_POOL : AD.AVG_POOL
    y = AD.pooled(op, x, AD.attributes(:window => window, :stride => window,
        :padding => zeros(Int, 2 * length(window)), :dilation => ones(Int, length(window))))
    return reshape(y, x.dims[end-1:end]...)
end

LAYERS["global_max_pool"], LAYERS["global_avg_pool"] = GlobalMaxPool, GlobalAvgPool
read_layer(T::Type{<:Union{GlobalMaxPool,GlobalAvgPool}}, line::Line, input::Vector{Int}) =
    T(name=given(line, "id", String))

# Interpolation --------------------------------------------------------------------------------------------------------

"""
    Interpolate(size; mode=:nearest, align_corners=false, name=nothing)

Every channel in another size: (..., C) to the same with spatial axes of the lengths `size`, one number or one for each axis. See
[`interpolate`](@ref).
"""
struct Interpolate <: Layer
    size::Vector{Int}  # one number alone: of all axes
    mode::Symbol
    align_corners::Bool
    name::Union{Nothing,String}
end

function Interpolate(@nospecialize(size); mode=:nearest, align_corners::Bool=false, name=nothing)
    how = mode isa Union{AbstractString,Symbol} ? Symbol(mode) : :none
    how in (:nearest, :linear) || throw(ConfigurationError("Interpolate: mode must be one of nearest, linear, got $(repr(mode))"))
    align_corners && how === :nearest && throw(ConfigurationError("Interpolate: align_corners is for mode linear"))
    lengths = settings("Interpolate", "size", size, size isa Integer ? 1 : length(collect(Any, size)), 1)
    return Interpolate(lengths, how, align_corners, checked_name(name))
end

function output_size(layer::Interpolate, input::Vector{Int})
    axes = length(input) - 1
    axes >= 1 && all(>=(1), input[1:end-1]) && length(layer.size) in (1, axes) || throw(rejected(layer,
        "size (..., C) with elements on $(length(layer.size) == 1 ? "one axis or more" : "$(length(layer.size)) axes") before the " *
        "channels", input))
    return Int[length(layer.size) == 1 ? fill(layer.size[1], axes) : layer.size; input[end]]
end

forward(layer::Interpolate, x::Tensor, parameters::Dict{String,Tensor}, training::Bool) =
    interpolate(x, output_size(layer, x.dims[1:end-1])[1:end-1]; mode=layer.mode, align_corners=layer.align_corners)

Base.show(io::IO, layer::Interpolate) = print(io, "Interpolate(", length(layer.size) == 1 ? layer.size[1] : Tuple(layer.size),
    layer.mode === :nearest ? "" : "; mode=:linear", layer.align_corners ? ", align_corners=true" : "", ")")

LAYERS["interpolate"] = Interpolate
read_layer(::Type{Interpolate}, line::Line, input::Vector{Int}) = Interpolate(lengths(line, "size"); mode=given(line, "mode", String),
    align_corners=given(line, "align_corners", Bool), name=given(line, "id", String))

export Conv1D, Conv2D, Conv3D, Conv1DTranspose, Conv2DTranspose, Conv3DTranspose, MaxPool1D, MaxPool2D, MaxPool3D, AvgPool1D
export AvgPool2D, AvgPool3D, GlobalMaxPool, GlobalAvgPool, Interpolate
