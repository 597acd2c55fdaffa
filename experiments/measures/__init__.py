"""What is measured: one file for each measure; see `experiments.measures.measure`."""
