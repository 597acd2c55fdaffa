"""Everything that py_engine raises on purpose.

Each error is an `EngineError` and also the builtin that a Python programmer would expect for the same mistake
(a wrong shape is a `ValueError`), so that both ``except EngineError`` and ordinary numpy-style handling work.
Messages name the user's own thing (layer, parameter, row), what was expected, what was found, and what to do.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "ConfigurationError",
    "DTypeError",
    "EngineError",
    "GradientCheckError",
    "InPlaceError",
    "LabelError",
    "LinearAlgebraError",
    "MissingAttributeError",
    "NonFiniteError",
    "NotDifferentiableError",
    "ParameterError",
    "ReplayError",
    "ShapeError",
    "TraceError",
]


class EngineError(Exception):
    """Base of all errors that py_engine raises on purpose."""


class ShapeError(EngineError, ValueError):
    """The shapes of operands, of a layer's input or of a batch don't fit together."""


class DTypeError(EngineError, TypeError):
    """A dtype isn't accepted here, such as float32 mixed with float64."""


class NotDifferentiableError(DTypeError):
    """A gradient by integers or booleans, or through an op without a rule."""


class MissingAttributeError(EngineError, AttributeError):
    """Arrays have this attribute and tensors don't; the message says what to write instead."""


class TraceError(EngineError, RuntimeError):
    """Something that only works eagerly was used while a graph was being traced."""


class ReplayError(EngineError, RuntimeError):
    """A compiled tape was called with something other than what it was planned for."""


class InPlaceError(EngineError, RuntimeError):
    """An array was written to in place while a gradient still needed its old values."""


class GradientCheckError(EngineError, AssertionError):
    """A gradient differs from its finite-difference estimate."""


class NonFiniteError(EngineError, ArithmeticError):
    """NaN or Inf appeared in a loss or in a gradient."""


class LinearAlgebraError(EngineError, np.linalg.LinAlgError):
    """A matrix has no inverse or no such decomposition: it is singular, or not positive definite."""


class LabelError(EngineError, ValueError):
    """Targets don't suit the loss: wrong kind, wrong number, or a class that doesn't exist."""


class ParameterError(EngineError, ValueError):
    """Named parameters don't match the model: missing, extra, or of another shape."""


class ConfigurationError(EngineError, ValueError):
    """A layer, initialiser, optimizer or trainer was given a setting it doesn't have or can't use."""
