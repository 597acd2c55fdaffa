"""Neural networks on the automatic differentiation of `py_engine.ad`: layers, losses, optimizers, training."""

from py_engine.network.chain import Chain
from py_engine.network.initialisers import INITIALISERS, ParameterSpec
from py_engine.network.layers import (
    ACTIVATIONS,
    GRU,
    LAYERS,
    LSTM,
    RNN,
    Activation,
    Dense,
    Dropout,
    Flatten,
    Layer,
    Reshape,
)
from py_engine.network.losses import LOSSES, Loss
from py_engine.network.metrics import Accuracy, Mean, accuracy
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
    "RNN",
    "SGD",
    "Accuracy",
    "Activation",
    "Adam",
    "AdamW",
    "Chain",
    "Dense",
    "Dropout",
    "Evaluation",
    "FlatVector",
    "Flatten",
    "Layer",
    "Loss",
    "Mean",
    "Optimizer",
    "ParameterSpec",
    "Parameters",
    "RMSProp",
    "Reshape",
    "Trainer",
    "accuracy",
]
