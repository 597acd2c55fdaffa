"""TwinGrad's numpy engine: a small, fast automatic-differentiation library on numpy arrays.

>>> import numpy as np, py_engine as pe
>>> pe.grad(lambda x: np.sum(np.sin(x) ** 2))(np.array([0.5, 1.0]))
array([0.84147098, 0.90929743])
"""

from py_engine.ad import ops
from py_engine.ad.compile.compiled import compile
from py_engine.ad.control.checkpoint import checkpoint
from py_engine.ad.control.cond import cond
from py_engine.ad.control.custom import custom_rule, stop_gradient
from py_engine.ad.control.scan import scan
from py_engine.ad.control.while_loop import while_loop
from py_engine.ad.draw import SVG, draw
from py_engine.ad.gradcheck import gradcheck
from py_engine.ad.jacobian import hessian, hvp, jacobian
from py_engine.ad.operators import tensor
from py_engine.ad.reverse import topological_sort
from py_engine.ad.sparse import sparse_hessian, sparse_jacobian, sparsity
from py_engine.ad.state import no_grad, scope
from py_engine.ad.techniques import Techniques
from py_engine.ad.tensor import Tensor
from py_engine.ad.transforms import grad, jvp, value_and_grad, vjp
from py_engine.ad.vmap import vmap
from py_engine.errors import EngineError

__all__ = [
    "SVG",
    "EngineError",
    "Techniques",
    "Tensor",
    "checkpoint",
    "compile",
    "cond",
    "custom_rule",
    "draw",
    "grad",
    "gradcheck",
    "hessian",
    "hvp",
    "jacobian",
    "jvp",
    "no_grad",
    "ops",
    "scan",
    "scope",
    "sparse_hessian",
    "sparse_jacobian",
    "sparsity",
    "stop_gradient",
    "tensor",
    "topological_sort",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
]
