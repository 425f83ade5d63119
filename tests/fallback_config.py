"""A configuration of 32 GPUs that may start on fewer hosts."""

from graphtrain.config import load_config

CONFIG = """
[program]
target = "h100:32"
mesh = { data = "rest", fsdp = 8 }
model = { layers = 2, embed = 64, heads = 4, mlp = 96, vocab = 256 }
batch = { global_batch_size = 256, seq_len = 32, microbatches = 2 }

[run]
directory = "run"
steps = 10
data = { train = "data/train" }
fallback = [3, 2]
"""


def config(*overrides: str):
    return load_config(CONFIG, overrides)
