"""
Everything that the engine raises on purpose.

Messages name the user's own thing (layer, parameter, column), what was expected, what was found, and what to do.
"""
module Errors

export EngineError, ShapeError, DTypeError, NotDifferentiableError, TraceError, ReplayError, InPlaceError,
    GradientCheckError, NonFiniteError, LinearAlgebraError, LabelError, ParameterError, ConfigurationError

"""Base of all errors that the engine raises on purpose; each has a `message`."""
abstract type EngineError <: Exception end

for (name, doc) in (
    :ShapeError => "The shapes of operands, of a layer's input or of a batch don't fit together.",
    :DTypeError => "An element type isn't accepted here, such as Float32 mixed with Float64.",
    :NotDifferentiableError => "A gradient was asked for through integers, or through a function that has none.",
    :TraceError => "Something that only works eagerly was used while a graph was being traced.",
    :ReplayError => "A compiled tape was called with something other than what it was planned for.",
    :InPlaceError => "An array was written to in place while a gradient still needed its old values.",
    :GradientCheckError => "A gradient differs from its finite-difference estimate.",
    :NonFiniteError => "NaN or Inf appeared in a loss or in a gradient.",
    :LinearAlgebraError => "A matrix has no inverse or no such decomposition: it is singular, or not positive definite.",
    :LabelError => "Targets don't suit the loss: wrong kind, wrong number, or a class that doesn't exist.",
    :ParameterError => "Named parameters don't match the model: missing, extra, or of another shape.",
    :ConfigurationError => "A layer, initialiser, optimizer or trainer was given a setting it doesn't have or can't use.",
)
    @eval begin
        struct $name <: EngineError
            message::String
        end
        @doc $doc $name
    end
end

Base.showerror(io::IO, error::EngineError) = print(io, nameof(typeof(error)), ": ", error.message)

end
