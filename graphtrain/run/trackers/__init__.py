"""Trackers of experiments: metrics of a run, sent by threads to Weights & Biases and others."""
