"""The program of one device, for compilers that accept no other: those of Neuron and Ascend.

    Graph ─► global program ─► partition ─► device's HLO ─► normalise ─► lowering/{neuron,ascend}

Nothing is imported here, because some commands read HLO modules without importing JAX.
"""
