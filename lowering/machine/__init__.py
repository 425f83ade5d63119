"""The machine to compile for and to run on: targets, toolchains, hosts, devices, processes.

May import `lowering.errors` only; imports neither JAX nor a compiler until a function needs it.
"""
