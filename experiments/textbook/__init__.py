"""One training step of each study in plain numpy, as a textbook has it: read them, and hold the engines against them.

They are slow and short, and printed in the paper's supplement; a test compares their losses, gradients and updates with
both engines'. `p` and `g` are parameters and gradients by the names of the spec.
"""

from __future__ import annotations

STEPS = {
    "mnist-rnn-d": "mnist_rnn",
    "mnist-rnn-e": "mnist_rnn",
    "mnist-cnn": "mnist_cnn",
    "imdb-cnn-a": "imdb_cnn",
    "imdb-cnn-c": "imdb_cnn",
}
"""The module of each study's step; studies of the same network share one."""
