"""Training scripts for PyTorch/XLA: what they trace, compiled by graphtrain without a run."""
