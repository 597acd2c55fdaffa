"""Functions of scipy that are written in Python, on tensors, arrays and numbers: as in scipy, by the same names.

scipy's ufuncs (most of `scipy.special`) work on tensors as they are. Its other functions make plain arrays of what they
are given, and would lose the derivative; those that programs differentiate most often are here:

>>> from py_engine.scipy import stats
>>> pe.grad(stats.norm.logpdf)(0.5)
array(-0.5)

Nothing else of the engine imports this package. What needs scipy itself says so where it is not installed.
"""

from py_engine.scipy import integrate, linalg, signal, special, stats

__all__ = ["integrate", "linalg", "signal", "special", "stats"]
