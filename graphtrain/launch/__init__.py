"""Compile and run jobs for cluster schedulers: Slurm and Kubernetes.

May import the configuration and `lowering.target`; nothing here traces or compiles.
"""
