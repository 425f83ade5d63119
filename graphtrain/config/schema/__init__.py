"""The settings, one module for each table of a configuration file.

The comment beside a field is its description in `graphtrain config show`, in the JSON schema and
in the reference. A check lives in the narrowest class that sees all settings it compares.
"""

from graphtrain.config.schema.adapter import Adapter
from graphtrain.config.schema.batch import Batch
from graphtrain.config.schema.checkpoints import CheckpointSettings
from graphtrain.config.schema.config import Config
from graphtrain.config.schema.dump import Dump
from graphtrain.config.schema.equivalent_model import EquivalentModel, scored_layers
from graphtrain.config.schema.flax_model import FlaxModel
from graphtrain.config.schema.learning_rate import LearningRate
from graphtrain.config.schema.loss import Loss
from graphtrain.config.schema.mesh import Mesh, PipelineSettings
from graphtrain.config.schema.model import (
    Activation,
    AttentionImplementation,
    LatentAttention,
    MixtureOfExperts,
    Model,
    Remat,
    RopeScaling,
)
from graphtrain.config.schema.optimizer import Optimizer
from graphtrain.config.schema.phase import Phase
from graphtrain.config.schema.precision import LossScaling, Precision
from graphtrain.config.schema.program import (
    Program,
    check_pipeline,
    check_preference,
)
from graphtrain.config.schema.run import (
    BlendPart,
    Data,
    Packing,
    Run,
    Samples,
    Spikes,
    Tasks,
    Watchdog,
)
from graphtrain.config.schema.search import SearchSettings
from graphtrain.config.schema.serve import Serve
from graphtrain.config.schema.stream import StreamSettings, is_streamed
from graphtrain.config.schema.torch_model import TorchModel, is_imported
from graphtrain.config.schema.upload import UploadSettings

__all__ = [
    "Activation",
    "Adapter",
    "AttentionImplementation",
    "Batch",
    "BlendPart",
    "CheckpointSettings",
    "Config",
    "Data",
    "Dump",
    "EquivalentModel",
    "FlaxModel",
    "LatentAttention",
    "LearningRate",
    "Loss",
    "LossScaling",
    "Mesh",
    "MixtureOfExperts",
    "Model",
    "Optimizer",
    "Packing",
    "Phase",
    "PipelineSettings",
    "Precision",
    "Program",
    "Remat",
    "RopeScaling",
    "Run",
    "Samples",
    "SearchSettings",
    "Serve",
    "Spikes",
    "StreamSettings",
    "Tasks",
    "TorchModel",
    "UploadSettings",
    "Watchdog",
    "check_pipeline",
    "check_preference",
    "is_imported",
    "is_streamed",
    "scored_layers",
]
