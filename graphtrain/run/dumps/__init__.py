"""Dumps: arrays of training steps in files, and the first difference between two of them."""
