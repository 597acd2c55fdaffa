"""The op table, and every op as a function on tensors, arrays and numbers; names follow numpy's.

An op written in one of these modules is part of `py_engine.ops` without being listed here.
"""

# ruff: noqa: F403
from py_engine.ad.op import *
from py_engine.ad.ops.convolution import *
from py_engine.ad.ops.elementary import *
from py_engine.ad.ops.fused_text import *
from py_engine.ad.ops.indexing import *
from py_engine.ad.ops.linalg import *
from py_engine.ad.ops.loss import *
from py_engine.ad.ops.pooling import *
from py_engine.ad.ops.random import *
from py_engine.ad.ops.reduction import *
from py_engine.ad.ops.shape import *
