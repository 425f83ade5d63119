"""Scopes of the sums of a pipeline's gradients, by which they are found in a compiled program."""

BESIDE_TICK = "gradient_totals_beside_tick"
AFTER_TICKS = "gradient_totals_after_ticks"
