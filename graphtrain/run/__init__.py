"""Execution of compiled programs: training, evaluation, generation; nothing is traced."""
