"""[program.model] with flax: a Flax module of the user in place of the native decoder."""

from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, ComputeDtype, Plain, Positive
from graphtrain.config.user_code import UserCode

_EMPTY: Any = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FlaxModel:
    """A Flax module whose parameters name their array axes."""

    flax: str  # "file.py:name", called with vocab, dtype, rngs and arguments; returns an nnx.Module
    arguments: dict[str, Plain] = _EMPTY  # arguments of flax
    vocab: Positive  # number of token ids
    dtype: ComputeDtype = "bfloat16"  # older name of program.precision.compute

    def __hash__(self) -> int:
        return hash(repr(self))  # dictionaries are not hashable

    @property
    def vocab_tokens(self) -> int:
        """Number of token ids."""
        return self.vocab

    @property
    def user_code(self) -> UserCode:
        """Return the module of the user."""
        return UserCode("program.model.flax", "graphtrain.models", self.flax)
