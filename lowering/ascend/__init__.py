"""Huawei Ascend backend: translate a graph to a MindIR file and run it in MindSpore's graph mode.

    Graph ─► per-device HLO ─► MindIR ─► GraphCell, one process for each rank

docs/guides/ascend.md explains the steps and the terms. Imports `lowering` and `sharding_rules`
only.
"""
