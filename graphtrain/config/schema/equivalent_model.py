"""Native model of the sizes of an imported one; only estimates have it."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.model import Model
from graphtrain.config.schema.types import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EquivalentModel(Model):
    """A native model with what estimates need to know of an imported one; no configuration has it.

    It computes as a native model does, but that some of its layers have no attention scores.
    """

    # Fraction of the layers that compute attention scores; others are linear attention,
    # convolutions, or state space models.
    scored_layers: Annotated[float, Field(ge=0, le=1)] = 1.0


def scored_layers(model: Model) -> float:
    """Return the fraction of a model's layers that compute attention scores."""
    return model.scored_layers if isinstance(model, EquivalentModel) else 1.0
