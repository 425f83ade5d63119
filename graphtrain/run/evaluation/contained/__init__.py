"""Code that a model writes, and the tests that judge it, each in a process of its own.

`answer` runs a program of the model, `judge` its tests; `confinement` is what both may do, `values`
what crosses between them. Their processes have the standard library alone: they import this package
from its folder, as `contained`.
"""
