"""Configuration: TOML files to frozen dataclasses, and back.

May import pydantic and the standard library, so that reading a configuration stays cheap.
"""

from graphtrain.config.load import load_config
from graphtrain.config.render import render
from graphtrain.config.schema import (
    Batch,
    Config,
    Data,
    LearningRate,
    Loss,
    Mesh,
    Model,
    Optimizer,
    Program,
    Run,
)

__all__ = [
    "Batch",
    "Config",
    "Data",
    "LearningRate",
    "Loss",
    "Mesh",
    "Model",
    "Optimizer",
    "Program",
    "Run",
    "load_config",
    "render",
]
