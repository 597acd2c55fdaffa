"""Between the experiments and the engines: the model spec, weights, and all engines behind one protocol."""
