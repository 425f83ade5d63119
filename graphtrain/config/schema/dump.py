"""[program.dump]: arrays of a training step that `graphtrain dump` writes."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Dump:
    """Arrays of a training step that `graphtrain dump` writes; no other program has them."""

    # Of a layer: "layers/3/mlp/up", or "layers/*/mlp/*" for all. With "forward/", "backward/" or
    # "gradients/" before it, only activations, their gradients, or gradients of parameters.
    arrays: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)  # names, globs
    summary: bool = False  # norm, largest value, mean, zeros and non-finite elements of each only
