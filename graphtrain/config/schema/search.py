"""[run.search]: limits of the search for a strategy."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, Count, PositiveFloat

Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SearchSettings:
    """Limits of `graphtrain plan search`, and of `--search` of `compile` and `run`."""

    # A larger batch is another training: fewer steps for as many tokens, at a rate to choose anew.
    max_global_batch_size: Count | None = None  # largest to try; unset: only that of [program]
    device_memory_gb: PositiveFloat | None = None  # memory of a device in GB; unset: of the target
    # Of a run on GPUs, set XLA_CLIENT_MEM_FRACTION too: this limits the search only.
    memory_fraction: Share | None = None  # share of that for a step; unset: all, on GPUs JAX's pool
