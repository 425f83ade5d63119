"""[program.adapter]: LoRA."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.types import STRICT, DropoutRate, Positive, PositiveFloat


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Adapter:
    """LoRA: base weights are frozen, and each adapted one gains a trainable low-rank product.

    Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685; quantized base weights:
    Dettmers et al. 2023, "QLoRA", https://arxiv.org/abs/2305.14314
    """

    rank: Positive  # inner width of the low-rank product
    alpha: PositiveFloat  # the product is scaled by alpha / rank
    use_rslora: bool = False  # scale by alpha / sqrt(rank) (rsLoRA, arxiv.org/abs/2312.03732)
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "*",
    )  # adapted: names, globs
    dropout: DropoutRate = 0.0  # of the input of the low-rank product
    modules_to_save: tuple[str, ...] = ()  # arrays trained in full, by name or glob: "head"
    base_dtype: Literal["float32", "bfloat16", "int8", "nf4"] = "float32"  # of frozen weights

    @property
    def scale(self) -> float:
        """Factor of the low-rank product."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)
