"""Measuring of this machine: products, memory, functions, overheads, collectives."""
