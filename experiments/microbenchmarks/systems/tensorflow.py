"""TensorFlow: `tf.function` of the function and of its gradient, with tensors that are there already."""

from __future__ import annotations

from functools import partial
from typing import Any

import tensorflow as tf

from bridge.linear_algebra import of_tensorflow
from experiments.microbenchmarks.functions import LABEL, STEPS

linear_algebra = partial(of_tensorflow, tf)

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)


def sincos(x: Any) -> Any:
    """sin(cos(x))."""
    return tf.sin(tf.cos(x))


def loop(x: Any) -> Any:
    """500 multiplications by sin(x): written out by the tracing, which is faster here than a loop in the graph."""
    r = tf.ones_like(x)
    for _ in range(STEPS):
        r = r * tf.sin(x)
    return r


def logsumexp(x: Any) -> Any:
    """log(sum(exp(x)))."""
    return tf.reduce_logsumexp(x)


def logistic(w: Any, b: Any, x: Any) -> Any:
    """The sum of sigmoid(w x + b)."""
    return tf.reduce_sum(tf.sigmoid(tf.linalg.matvec(w, x) + b))


def mlp(w1: Any, b1: Any, w2: Any, b2: Any, x: Any) -> Any:
    """The network's cross-entropy."""
    logits = tf.linalg.matvec(w2, tf.nn.relu(tf.linalg.matvec(w1, x) + b1)) + b2
    return tf.nn.sparse_softmax_cross_entropy_with_logits(LABEL, logits)


FUNCTIONS = {item.__name__: item for item in (sincos, loop, logsumexp, logistic, mlp)}


def prepare(name: str, inputs: list[Any], by: int) -> Any:
    """The value and the gradients as traced functions; eager results are there when a call returns."""
    function, arguments = FUNCTIONS[name], [tf.constant(x) for x in inputs]

    @tf.function(autograph=False)
    def value(*arguments: Any) -> Any:
        return function(*arguments)

    @tf.function(autograph=False)
    def gradient(*arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(arguments[:by])
            result = function(*arguments)
        return tape.gradient(result, arguments[:by])

    return partial(value, *arguments), partial(gradient, *arguments)
