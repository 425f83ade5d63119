"""Graphs of PyTorch/XLA training scripts, extracted and compiled ahead of time."""
