"""Checks of a configuration before anything is traced or compiled: all problems, in under a second.

Imports no JAX. `graphtrain.api.checks.report` has the functions for commands and for Python.
"""
