"""The program of one device, for compilers that take no other: Neuron's and Ascend's.

    Graph ─► whole program ─► partition ─► one device's HLO ─► normalise ─► lowering/{neuron,ascend}

Nothing is imported here, since some commands read modules without JAX.
"""
