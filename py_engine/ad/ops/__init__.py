"""Every op as a function on tensors, arrays and numbers; names follow numpy's.

What is written in one of these modules is part of `py_engine.ops` without being listed here: each op under its name in
the table, and each public function that takes operands and returns a tensor, or two. Nothing else is.
"""

# ruff: noqa: F403
import inspect as _inspect
from typing import Any as _Any

from py_engine.ad.op import TABLE as _TABLE
from py_engine.ad.ops import polynomials as _polynomials  # noqa: F401  (not later: they would be names here)
from py_engine.ad.ops import questions as _questions  # noqa: F401
from py_engine.ad.ops import scipy_functions as _scipy_functions  # noqa: F401
from py_engine.ad.ops import statistics as _statistics  # noqa: F401
from py_engine.ad.ops import ufuncs as _ufuncs  # noqa: F401
from py_engine.ad.ops.activations import *
from py_engine.ad.ops.along import *
from py_engine.ad.ops.attention import *
from py_engine.ad.ops.convolution import *
from py_engine.ad.ops.decompositions import *
from py_engine.ad.ops.elementary import *
from py_engine.ad.ops.fused_text import *
from py_engine.ad.ops.indexing import *
from py_engine.ad.ops.interpolation import *
from py_engine.ad.ops.linalg import *
from py_engine.ad.ops.loss import *
from py_engine.ad.ops.normalisation import *
from py_engine.ad.ops.numpy_functions import *
from py_engine.ad.ops.padding import *
from py_engine.ad.ops.pooling import *
from py_engine.ad.ops.random import *
from py_engine.ad.ops.reduction import *
from py_engine.ad.ops.shape import *
from py_engine.ad.ops.special import *


def _is_op(name: str, value: _Any) -> bool:
    if not _inspect.isfunction(value):
        return name in _TABLE and value is _TABLE[name]
    hints = dict(value.__annotations__)
    if hints.pop("return", None) not in ("Tensor", "tuple[Tensor, Tensor]") or not value.__module__.startswith(
        __name__
    ):
        return False
    return "Operand" in " ".join(hints.values())


for _name, _value in [*globals().items()]:
    if not _name.startswith("_") and not _is_op(_name, _value):
        del globals()[_name]  # what the modules use: their own modules among it
