"""[program.precision]: the dtype of computation, fp8 and int8, the loss scale of float16."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, Float32, PositiveDecayRate

_INITIAL_SCALE = 65536.0
_GROWTH_INTERVAL = 2000
_GROWTH_FACTOR = 2.0
_BACKOFF_FACTOR = 0.5
# The loss is multiplied in float32: smallest and largest normal number of it.
_Scale = Annotated[float, Field(ge=1.2e-38, le=3.4e38)]
_Growth = Annotated[float, Field(gt=1), Float32]
_Interval = Annotated[int, Field(ge=1, lt=2**31)]  # the program counts in int32
# Parameters whose products can be quantized, by their names, and parts of the model. The embedding
# is a lookup and no product; experts are those that a router chooses.
Quantizable = Literal[
    "query", "key", "value", "output", "gate", "up", "gate_up", "down",
    "shared_gate", "shared_up", "shared_down", "experts", "router", "head", "embedding",
]  # fmt: skip
_EXCLUDED: tuple[Quantizable, ...] = ("head", "experts", "router", "embedding")
Recipe = Literal["tensor", "channel", "block"]
Compute = Literal["bfloat16", "float16", "float32", "fp8", "int8"]
_RECIPES: dict[str, Recipe] = {"fp8": "tensor", "int8": "channel"}
_OF_DYNAMIC = ("initial_scale", "growth_interval", "growth_factor", "backoff_factor")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Precision:
    """Dtype of computation, and the loss scale of float16; docs/guides/precision.md.

    Program moves bfloat16, float16 and float32 to the dtype of its model, from which all code reads
    it, and with fp8 and int8 makes that bfloat16; files and messages name `compute` alone.

    Source: Micikevicius et al. 2017, section 3.2, https://arxiv.org/abs/1710.03740; the settings
    and their defaults are those of torch.amp.GradScaler.
    """

    # fp8, int8: of products with weights; the rest is computed in bfloat16.
    compute: Compute | None = None  # dtype; weights are float32; unset: "bfloat16"
    # tensor: one scale for an operand. channel: one for each row and column. block: one for 128
    # summed values of each row and column. Unset: tensor for fp8, channel for int8.
    recipe: Recipe | None = None  # fp8, int8: what shares a scale
    # Unset: head, experts, router, embedding; a list replaces them all.
    exclude: tuple[Quantizable, ...] | None = None  # fp8, int8: products in bfloat16
    # dynamic: grows until a gradient overflows, and that step is skipped. A number: constant.
    loss_scale: Literal["dynamic"] | _Scale | None = None  # float16; unset: "dynamic"
    initial_scale: _Scale | None = None  # dynamic: scale of the first step; unset: 65536
    growth_interval: _Interval | None = None  # dynamic: steps without overflow; unset: 2000
    growth_factor: _Growth | None = None  # dynamic: scale after growth_interval; unset: 2
    backoff_factor: PositiveDecayRate | None = None  # dynamic: of the scale at overflow; unset: 0.5

    def __post_init__(self) -> None:
        used = [name for name in _OF_DYNAMIC if getattr(self, name) is not None]
        if used and self.loss_scale not in (None, "dynamic"):
            raise ValueError(
                f'{used[0]} is a setting of loss_scale = "dynamic"; '
                f"remove it, or loss_scale = {self.loss_scale}"
            )

        if self.matmul_dtype is None and (self.recipe or self.exclude is not None):
            name = "recipe" if self.recipe else "exclude"
            raise ValueError(f'{name} needs compute = "fp8" or "int8"; set it, or remove {name}')

    @property
    def matmul_dtype(self) -> Literal["fp8", "int8"] | None:
        """Return the dtype of 8 bits in which products with weights are computed; None: in none."""
        return self.compute if self.compute in ("fp8", "int8") else None

    @property
    def recipe_or_default(self) -> Recipe | None:
        """Return what shares a scale; None without fp8 and int8."""
        return None if self.matmul_dtype is None else self.recipe or _RECIPES[self.matmul_dtype]

    @property
    def excluded(self) -> tuple[Quantizable, ...]:
        """Return the parameters and parts of the model whose products are not quantized."""
        return _EXCLUDED if self.exclude is None else self.exclude

    def check_dtype(self, dtype: str) -> None:
        """Refuse a loss scale where the model does not compute in float16.

        Raises:
            ValueError: names the setting and the change to make.
        """
        names = [name for name in ("loss_scale", *_OF_DYNAMIC) if getattr(self, name) is not None]
        if names and dtype != "float16":
            raise ValueError(
                f'precision.{names[0]} is for compute = "float16", and it is "{dtype}", whose '
                "gradients do not overflow; remove it"
            )

    def scaling(self, dtype: str) -> "LossScaling | float | None":
        """Return the dynamic scaling or the constant scale of the loss; None: it is not scaled."""
        if dtype != "float16":
            return None
        if isinstance(self.loss_scale, float):
            return self.loss_scale
        return LossScaling(
            initial=self.initial_scale or _INITIAL_SCALE,
            growth_interval=self.growth_interval or _GROWTH_INTERVAL,
            growth_factor=self.growth_factor or _GROWTH_FACTOR,
            backoff_factor=self.backoff_factor or _BACKOFF_FACTOR,
        )


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic loss scaling with every setting that was left out."""

    initial: float
    growth_interval: int
    growth_factor: float
    backoff_factor: float
