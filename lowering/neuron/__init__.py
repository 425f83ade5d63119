"""AWS Trainium backend: normalise a graph's HLO, compile it to a NEFF with neuronx-cc, and run it.

    Graph ─► per-device HLO ─► normalised HLO ─► preflight ─► neuronx-cc ─► NEFF ─► nrt

docs/guides/neuron.md explains the steps and the terms. Imports `lowering` and `sharding_rules`
only.
"""
