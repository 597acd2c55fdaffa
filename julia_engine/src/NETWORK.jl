"""
Neural networks on the automatic differentiation of `AD`: layers, losses, optimizers, training.

The twin of the numpy engine's `network` package, file by file. The batch is the last axis here, the first there.
"""
module NETWORK

using LinearAlgebra: BLAS
using Random: MersenneTwister, randperm
using ..AD
using ..Versions: Versions
using ..AD: Constant, Memory, Tape, Techniques, Tensor, Variable, elements_of, stack

include("network/initialisers.jl")
include("network/lines.jl")
include("network/layers.jl")
include("network/convolution.jl")
include("network/embedding.jl")
include("network/threads.jl")
include("network/batch_sums.jl")
include("network/normalisation.jl")
include("network/attention.jl")
include("network/parameters.jl")
include("network/chain.jl")
include("network/graph.jl")
include("network/losses.jl")
include("network/metrics.jl")
include("network/optimizers.jl")
include("network/steps.jl")
include("network/parallel.jl")
include("network/dropout_streams.jl")
include("network/trainer.jl")

export Chain, Layer, ParameterSpec, Parameters, as_dict, load!
export Dense, RNN, LSTM, GRU, Flatten, Reshape, Activation, Dropout, RBF, Embedding, PermuteDims, BatchNorm, LayerNorm
export ACTIVATIONS, INITIALISERS, LAYERS, LOSSES, OPTIMIZERS
export Optimizer, DescentMethod, SGD, Descent, Momentum, RMSProp, Adam, AdamW
export Accuracy, Mean, accuracy, Communicator, Evaluation, Trainer, train!, train_epoch!, evaluate, predict, loss_and_gradients
export loss_of, training_state, load_state!

end
