"""Estimates of a plan's memory, communication and time, by arithmetic.

Imports no JAX, so that a search can use it: an estimate needs microseconds, and each of its results
is a sum of named parts. Where a program is compiled, the report of its compiler is more accurate
(`graphtrain.planning`).
"""
