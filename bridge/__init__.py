"""What lies between the experiments and the engines: the model spec, weights, and the engines behind one protocol."""
