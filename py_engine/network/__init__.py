"""Neural networks on the automatic differentiation of `py_engine.ad`: layers, losses, optimizers, training."""

from py_engine.network.attention import MultiHeadAttention, PositionEmbedding
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
from py_engine.network.graph import Add, Concat, Graph, Joining
from py_engine.network.initialisers import INITIALISERS, ParameterSpec
from py_engine.network.layers import (
    ACTIVATIONS,
    GRU,
    LAYERS,
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
    "Add",
    "AvgPool1D",
    "AvgPool2D",
    "BatchNorm",
    "Chain",
    "Concat",
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
    "Graph",
    "Joining",
    "Layer",
    "LayerNorm",
    "Loss",
    "MaxPool1D",
    "MaxPool2D",
    "Mean",
    "MultiHeadAttention",
    "Optimizer",
    "ParameterSpec",
    "Parameters",
    "PermuteDims",
    "Pool",
    "PositionEmbedding",
    "RMSProp",
    "Recurrent",
    "Reshape",
    "Trainer",
    "accuracy",
]
