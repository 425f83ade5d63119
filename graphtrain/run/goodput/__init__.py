"""Goodput: how much of a run's wall time was training that was kept, and where the rest went."""
