"""AWS Trainium: from a graph to what neuronx-cc takes, to a NEFF, to a run.

    Graph ─► per-device HLO ─► normalised HLO ─► preflight ─► neuronx-cc ─► NEFF ─► nrt

The words of the road: docs/neuron.md.
"""
