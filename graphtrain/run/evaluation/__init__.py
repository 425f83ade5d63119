"""Evaluation of tasks of lm-eval by compiled programs, offline.

Importing this folder sets the packages of Hugging Face offline in this process: they read their
environment when they are imported, which only modules of this folder do.
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
# Bootstrapped errors of lm-eval, the same either way: forks of a process with threads can hang.
os.environ.setdefault("DISABLE_MULTIPROC", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of lm-eval, in place of ours
