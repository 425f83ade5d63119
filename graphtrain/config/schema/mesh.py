"""[program.mesh] and [program.pipeline]: devices along each mesh axis, and pipeline schedules."""

from typing import Literal

from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, Positive, Width

MeshSize = Positive | Literal["rest"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mesh:
    """Devices along each mesh axis; one may be "rest": all devices that the others leave."""

    data: MeshSize = 1  # data parallelism: replicas of the model
    fsdp: MeshSize = 1  # fully sharded data parallelism (ZeRO-3)
    stage: MeshSize = 1  # pipeline parallelism: stages of layers
    expert: MeshSize = 1  # expert parallelism of a mixture of experts
    context: MeshSize = 1  # context parallelism: positions of long sequences
    tensor: MeshSize = 1  # tensor and sequence parallelism

    def __post_init__(self) -> None:
        rest_axes = [name for name, size in vars(self).items() if size == "rest"]
        if len(rest_axes) > 1:
            raise ValueError(f'only one mesh axis can be "rest", not {" and ".join(rest_axes)}')


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PipelineSettings:
    """The pipeline schedule over the mesh axis `stage`.

    The backward pass recomputes a stage from its input, unless model.remat = "none" or
    recompute_stages = false; 1f1b always recomputes.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473
    """

    schedule: Literal["gpipe", "circular", "1f1b"] = "circular"  # order of the microbatches
    virtual_stages: Width = 1  # stages on each device; with 1f1b: interleaved 1F1B
    layers_per_stage: tuple[Positive, ...] | None = None  # by virtual stage; unset: even
    recompute_stages: bool = True  # from their input; false: only what model.remat recomputes

    def __post_init__(self) -> None:
        if self.virtual_stages > 1 and self.schedule == "gpipe":
            raise ValueError(
                f'virtual_stages = {self.virtual_stages} needs schedule = "circular" or "1f1b"'
            )
        if self.schedule == "1f1b" and not self.recompute_stages:
            raise ValueError(
                'recompute_stages = false needs schedule = "circular" or "gpipe"; 1f1b stores only '
                "the inputs of stages"
            )

    def recomputes_stages(self, remat: str) -> bool:
        """Return whether the backward pass of a stage begins with its forward pass.

        Args:
            remat: `model.remat`.
        """
        return self.schedule == "1f1b" or (self.recompute_stages and remat != "none")
