"""Profiles of training steps: XLA's trace while a run trains, joined with the plan afterwards."""
