# Convolution and pooling layers. Sizes are those of a sample, (W, C) or (W, H, C): the channels come last, since numpy's
# (C, H, W) is (W, H, C) here. Settings are one number, or one for each spatial axis, W first.

# What the two convolutions share.
abstract type Convolutional <: Layer end

for (name, axes, size_in, size_out, weight) in (
    (:Conv1D, 1, "(W, C)", "(W', filters)", "(kernel, C / groups, filters)"),
    (:Conv2D, 2, "(W, H, C)", "(W', H', filters)", "(kw, kh, C / groups, filters)"))
    @eval begin
        @doc $("    $name(channels => filters, kernel, activation=identity; stride=1, padding=0, dilation=1, groups=1, " *
            "bias=true,\n        weight_init=\"glorot_uniform\", bias_init=\"zeros\", name=nothing)\n\nCross-correlation: " *
            "$size_in to $size_out. Settings are one number, or one for each spatial axis; padding\nalso a pair, before and " *
            "after, for each.\n\nParameters: `weight` $weight; `bias` (filters,) unless `bias=false`.")
        struct $name <: Convolutional
            channels::Int
            filters::Int
            kernel::Vector{Int}
            stride::Vector{Int}
            padding::Vector{Int}  # before and after, for each axis
            dilation::Vector{Int}
            groups::Int
            activation::String
            bias::Bool
            weight_init::Any
            bias_init::Any
            name::Union{Nothing,String}
        end

        function $name(@nospecialize(sizes), @nospecialize(kernel), @nospecialize(activation=identity); stride=1, padding=0,
                dilation=1, groups=1, bias::Bool=true, weight_init="glorot_uniform", bias_init="zeros", name=nothing)
            what = $(String(name))
            channels, filters = sizes_of(what, sizes)
            count = whole_number(what, "groups", groups)
            channels % count == 0 && filters % count == 0 || throw(ConfigurationError(
                "$what: $channels channels and $filters filters cannot be divided into $count groups"))
            return $name(channels, filters, settings(what, "kernel", kernel, $axes, 1),
                settings(what, "stride", stride, $axes, 1), sides(what, padding, $axes),
                settings(what, "dilation", dilation, $axes, 1), count, activation_name(what, activation), bias,
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

function parameters(layer::Convolutional)
    window = prod(layer.kernel)
    fans = (window * layer.channels ÷ layer.groups, window * layer.filters ÷ layer.groups)
    dims = Int[layer.kernel; layer.channels ÷ layer.groups; layer.filters]
    specs = ["weight" => ParameterSpec(dims, layer.weight_init, fans...)]
    layer.bias && push!(specs, "bias" => ParameterSpec([layer.filters], layer.bias_init, fans...))
    return specs
end

function output_size(layer::Convolutional, input::Vector{Int})
    axes = spatial_axes(layer)
    length(input) == axes + 1 && input[end] == layer.channels || throw(rejected(layer,
        "size ($(axes == 1 ? "W" : "W, H"), $(layer.channels))", input))
    return Int[counts(layer, input, layer.kernel, layer.dilation); layer.filters]
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
    y = AD.apply(AD.CONV, Tensor[x, parameters["weight"]], AD.attributes(:stride => layer.stride,
        :padding => layer.padding, :dilation => layer.dilation, :groups => layer.groups))
    layer.bias && (y = y .+ reshape(parameters["bias"], ones(Int, spatial_axes(layer))..., layer.filters))
    return activated(layer.activation, y)
end

Base.show(io::IO, layer::Convolutional) = print(io, kind(layer), "(", layer.channels, " => ", layer.filters, ", ",
    length(layer.kernel) == 1 ? layer.kernel[1] : Tuple(layer.kernel),
    layer.activation == "identity" ? "" : ", $(layer.activation)", ")")

LAYERS["conv1d"], LAYERS["conv2d"] = Conv1D, Conv2D
read_layer(T::Type{<:Convolutional}, line::Line, input::Vector{Int}) = T(channels(input) => given(line, "filters", Int),
    lengths(line, "kernel"); stride=lengths(line, "stride"), padding=paddings(line), dilation=lengths(line, "dilation"),
    groups=given(line, "groups", Int), bias=given(line, "bias", Bool), name=given(line, "id", String))

# Pooling --------------------------------------------------------------------------------------------------------------

# What the four pooling layers share.
abstract type Pooling <: Layer end

for (name, axes, op, what) in ((:MaxPool1D, 1, :MAX_POOL, "Largest element"),
    (:MaxPool2D, 2, :MAX_POOL, "Largest element"),
    (:AvgPool1D, 1, :AVG_POOL, "Mean"), (:AvgPool2D, 2, :AVG_POOL, "Mean"))
    averages = op === :AVG_POOL
    @eval begin
        @doc $("    $name(window; stride=window, padding=0, dilation=1, ceil_mode=false" * (averages ? ", count_padding=true" : "") *
            ", name=nothing)\n\n$what of each window: " *
            (axes == 1 ? "(W, C) to (W', C)" : "(W, H, C) to (W', H', C)") * ". Settings are one number, or one for each\n" *
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
    length(input) == axes + 1 || throw(rejected(layer, "size ($(axes == 1 ? "W" : "W, H"), C)", input))
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
    y = AD.apply(pooling_op(layer), Tensor[x], pooling_attrs(layer, x))
    pooling_op(layer) === AD.AVG_POOL || return y
    return AD.averaged(y, x, layer.count_padding ? layer.padding : zero(layer.padding), layer)
end

Base.show(io::IO, layer::Pooling) = print(io, kind(layer), "(", length(layer.window) == 1 ? layer.window[1] :
    Tuple(layer.window), layer.stride == layer.window ? "" : "; stride=$(Tuple(layer.stride))", ")")

LAYERS["max_pool1d"], LAYERS["max_pool2d"] = MaxPool1D, MaxPool2D
LAYERS["avg_pool1d"], LAYERS["avg_pool2d"] = AvgPool1D, AvgPool2D
function read_layer(T::Type{<:Pooling}, line::Line, input::Vector{Int})
    more = T <: Union{AvgPool1D,AvgPool2D} ? (count_padding=given(line, "count_padding", Bool),) : NamedTuple()
    return T(lengths(line, "window"); stride=lengths(line, "stride"), padding=paddings(line), dilation=lengths(line, "dilation"),
        ceil_mode=given(line, "ceil_mode", Bool), name=given(line, "id", String), more...)
end

for (name, what) in ((:GlobalMaxPool, "Largest element"), (:GlobalAvgPool, "Mean"))
    @eval begin
        @doc $("    $name()\n\n$what of each channel: (W, C) or (W, H, C) to (C,).")
        struct $name <: Layer
            name::Union{Nothing,String}
        end
        $name(; name=nothing) = $name(checked_name(name))
        Base.show(io::IO, layer::$name) = print(io, $(String(name)), "()")
    end
end

function output_size(layer::Union{GlobalMaxPool,GlobalAvgPool}, input::Vector{Int})
    length(input) in (2, 3) && all(>=(1), input[1:end-1]) || throw(rejected(layer, "size (W, C) or (W, H, C)", input))
    return input[end:end]
end

function forward(layer::Union{GlobalMaxPool,GlobalAvgPool}, x::Tensor, parameters::Dict{String,Tensor}, training::Bool)
    window = AD.spatial(x)
    op = layer isa GlobalMaxPool ? AD.MAX_POOL : AD.AVG_POOL
    y = AD.apply(op, Tensor[x], AD.attributes(:window => window, :stride => window,
        :padding => zeros(Int, 2 * length(window)), :dilation => ones(Int, length(window))))
    return reshape(y, x.dims[end-1:end]...)
end

LAYERS["global_max_pool"], LAYERS["global_avg_pool"] = GlobalMaxPool, GlobalAvgPool
read_layer(T::Type{<:Union{GlobalMaxPool,GlobalAvgPool}}, line::Line, input::Vector{Int}) =
    T(name=given(line, "id", String))

export Conv1D, Conv2D, MaxPool1D, MaxPool2D, AvgPool1D, AvgPool2D, GlobalMaxPool, GlobalAvgPool
