"""Huawei Ascend: from a graph to a MindIR file, to MindSpore's graph mode, to a run.

    Graph ─► per-device HLO ─► MindIR ─► GraphCell, one process for each rank

The words of the road: docs/ascend.md.
"""
