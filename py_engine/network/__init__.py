"""Neural networks on the automatic differentiation of `py_engine.ad`: layers, losses, optimizers, training."""

from py_engine.network.chain import Chain
from py_engine.network.convolution import (
    AvgPool1D,
    AvgPool2D,
    Conv1D,
    Conv2D,
    Convolution,
    GlobalAvgPool,
    GlobalMaxPool,
    GlobalPool,
    MaxPool1D,
    MaxPool2D,
    Pool,
)
from py_engine.network.embedding import Embedding, PermuteDims
from py_engine.network.initialisers import INITIALISERS, ParameterSpec
from py_engine.network.layers import (
    ACTIVATIONS,
    GRU,
    LSTM,
    RBF,
    RNN,
    Activation,
    Dense,
    Dropout,
    Flatten,
    Layer,
    Recurrent,
    Reshape,
)
from py_engine.network.losses import LOSSES, Loss
from py_engine.network.metrics import Accuracy, Mean, accuracy
from py_engine.network.normalisation import BatchNorm, LayerNorm
from py_engine.network.optimizers import OPTIMIZERS, SGD, Adam, AdamW, Optimizer, RMSProp
from py_engine.network.parameters import FlatVector, Parameters
from py_engine.network.trainer import Evaluation, Trainer

__all__ = [
    "ACTIVATIONS",
    "GRU",
    "INITIALISERS",
    "LAYERS",
    "LOSSES",
    "LSTM",
    "OPTIMIZERS",
    "RBF",
    "RNN",
    "SGD",
    "Accuracy",
    "Activation",
    "Adam",
    "AdamW",
    "AvgPool1D",
    "AvgPool2D",
    "BatchNorm",
    "Chain",
    "Conv1D",
    "Conv2D",
    "Convolution",
    "Dense",
    "Dropout",
    "Embedding",
    "Evaluation",
    "FlatVector",
    "Flatten",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GlobalPool",
    "Layer",
    "LayerNorm",
    "Loss",
    "MaxPool1D",
    "MaxPool2D",
    "Mean",
    "Optimizer",
    "ParameterSpec",
    "Parameters",
    "PermuteDims",
    "Pool",
    "RMSProp",
    "Recurrent",
    "Reshape",
    "Trainer",
    "accuracy",
]

LAYERS: dict[str, type[Layer]] = {
    "dense": Dense,
    "rnn": RNN,
    "lstm": LSTM,
    "gru": GRU,
    "flatten": Flatten,
    "reshape": Reshape,
    "permute_dims": PermuteDims,
    "activation": Activation,
    "dropout": Dropout,
    "conv1d": Conv1D,
    "conv2d": Conv2D,
    "max_pool1d": MaxPool1D,
    "max_pool2d": MaxPool2D,
    "avg_pool1d": AvgPool1D,
    "avg_pool2d": AvgPool2D,
    "global_max_pool": GlobalMaxPool,
    "global_avg_pool": GlobalAvgPool,
    "embedding": Embedding,
    "rbf": RBF,
    "batch_norm": BatchNorm,
    "layer_norm": LayerNorm,
}
"""Every layer by the name that a model spec has for it."""
