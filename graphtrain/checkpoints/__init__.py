"""Checkpoints: save, restore, reshard; the order of layer rows in them; strategy files."""
