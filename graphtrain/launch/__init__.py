"""Compile jobs and run jobs for the schedulers of clusters."""
