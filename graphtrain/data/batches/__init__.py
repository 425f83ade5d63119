"""Batches: indexed datasets packed into sequences, shuffled, blended and read ahead."""
