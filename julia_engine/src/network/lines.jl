# Settings by name, as a line of text: how sessions, layers and optimizers come from another language.
#
# A line begins with the word for what it is about, and continues with settings: `layer id=conv op=conv2d filters=6 kernel=3,3
# padding=0,0,1,1 bias=true`. A value is a whole number, a number, true or false, a text, or several of them with commas
# between. In a text, any byte may be written as % and two hexadecimal digits, and all that mean something in a line do.
# Lines are read, and nothing in them is ever evaluated.

"""
    Line(text, number=0)

What a line is about, its settings as they are written, and the names of those that were asked for.

Throws a `ConfigurationError` for a text that is no line, with its number unless that is 0.
"""
struct Line
    subject::String
    settings::Dict{String,String}
    known::Vector{String}
end

function Line(text::AbstractString, number::Int=0)
    words = split(text, ' ')
    about = number == 0 ? words[1] : "line $number, $(words[1])"
    settings = Dict{String,String}()
    for word in words[2:end]
        parts = split(word, '='; limit=2)
        length(parts) == 2 && !isempty(parts[1]) ||
            throw(ConfigurationError("$about: expected name=value, got $(shortened(word))"))
        haskey(settings, parts[1]) && throw(ConfigurationError("$about: $(parts[1]) is set twice"))
        settings[parts[1]] = parts[2]
    end
    return Line(words[1], settings, String[])
end

"""
    reading(f, line)

`f()`, which reads the line. Its errors then begin with what the line is about, and settings that it did not ask for are
one.
"""
function reading(f, line::Line)
    try
        result = f()
        for name in sort!(collect(keys(line.settings)))
            name in line.known ||
                throw(ConfigurationError("there is no setting $(shortened(name)); there are: $(join(line.known, ", "))"))
        end
        return result
    catch error
        error isa AD.EngineError || rethrow()
        throw(typeof(error)("$(about(line)): $(error.message)"))
    end
end

"""A line's subject as messages have it: `layer "conv" (conv2d)`, `optimizer adam`."""
function about(line::Line)
    words = String[line.subject]
    for (name, before, after) in (("id", "\"", "\""), ("name", "", ""), ("op", "(", ")"))
        haskey(line.settings, name) || continue
        text = line.settings[name]
        push!(words, before * something(parsed(String, text), text) * after)
    end
    return join(words, " ")
end

"""
    given(line, name, T)

The value of a setting, an `Int`, `Float64`, `Bool` or `String`, or a vector of one of these. Throws a `ConfigurationError`
that names the setting where the line has none, or one of another type.
"""
function given(line::Line, name::String, ::Type{T})::T where {T}
    value = given_or_nothing(line, name, T)
    value === nothing && throw(ConfigurationError("the setting $name is missing"))
    return value
end

"""The same, or `nothing` where the line has no such setting."""
function given_or_nothing(line::Line, name::String, ::Type{T})::Union{Nothing,T} where {T}
    name in line.known || push!(line.known, name)
    haskey(line.settings, name) || return nothing
    text = line.settings[name]
    value = parsed(T, text)
    value === nothing && throw(ConfigurationError("$name: expected $(described(T)), got $(shortened(text))"))
    return value
end

# Each gives `nothing` for a text that is no such value.
parsed(::Type{Int}, text::AbstractString) = tryparse(Int, text; base=10)
parsed(::Type{Float64}, text::AbstractString) = tryparse(Float64, text)
parsed(::Type{Bool}, text::AbstractString) = text == "true" ? true : text == "false" ? false : nothing

function parsed(::Type{String}, text::AbstractString)
    bytes, i = UInt8[], 1
    while i <= ncodeunits(text)
        byte = codeunit(text, i)
        if byte == UInt8('%')
            i + 2 <= ncodeunits(text) || return nothing
            byte = tryparse(UInt8, String(codeunits(text)[i+1:i+2]); base=16)
            byte === nothing && return nothing
            i += 2
        end
        push!(bytes, byte)
        i += 1
    end
    decoded = String(bytes)
    return isvalid(decoded) ? decoded : nothing
end

# How many values a setting has at most: of numbers those are the weights of classes, no other setting has nearly as many.
most_values(::Type) = 64
most_values(::Type{Float64}) = 2^16

function parsed(::Type{Vector{T}}, text::AbstractString) where {T}
    count(isequal(','), text) < most_values(T) || return nothing
    values = T[]
    for item in split(text, ',')
        value = parsed(T, item)
        value === nothing && return nothing
        push!(values, value)
    end
    return values
end

described(::Type{Int}) = "a whole number"
described(::Type{Float64}) = "a number"
described(::Type{Bool}) = "true or false"
described(::Type{String}) = "a text"
described(::Type{Vector{T}}) where {T} = "$(described(T)), or several with commas between"

"""A text in messages, cut where it is long."""
shortened(text::AbstractString) = repr(length(text) <= 80 ? String(text) : first(text, 80) * "…")

# What layers read. Lines have C order, and count from 0: their axes come the other way round here.

"""A length for each axis."""
lengths(line::Line, name::String) = reverse(given(line, name, Vector{Int}))

"""The padding before and after each axis."""
function paddings(line::Line)
    sides = given(line, "padding", Vector{Int})
    iseven(length(sides)) || throw(ConfigurationError("padding: expected two for each axis, got $(length(sides))"))
    return reverse([(sides[k], sides[k+1]) for k in 1:2:length(sides)])
end

"""The length of a sample's axis of features, its first, or of channels, its last."""
features(input::Vector{Int}) = isempty(input) ? throw(ShapeError("it needs an axis of features")) : input[1]
channels(input::Vector{Int}) = isempty(input) ? throw(ShapeError("it needs an axis of channels")) : input[end]
