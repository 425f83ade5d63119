"""[program.model] with torch or hf: a PyTorch or Hugging Face model in place of the native one."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import TypeIs

from graphtrain.config.hf_config import vocab_size
from graphtrain.config.hf_images import image_layout, stated_image_size
from graphtrain.config.schema.flax_model import FlaxModel
from graphtrain.config.schema.model import AttentionImplementation, Model
from graphtrain.config.schema.types import (
    STRICT,
    ComputeDtype,
    LocalPath,
    NotNegative,
    Plain,
    Positive,
    set_derived_defaults,
)
from graphtrain.errors import ImportedModelError

Overrides = dict[str, Plain | dict[str, Plain | dict[str, Plain]]]
# Height and width in pixels.
ImageSize = Annotated[tuple[Positive, ...], Field(min_length=2, max_length=2)]

_EMPTY: Any = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TorchModel:
    """A PyTorch or Hugging Face model, traced as it is."""

    torch: str | None = None  # "module:factory" or "file.py:factory" that returns a torch.nn.Module
    hf: LocalPath | None = None  # folder with a config.json of transformers, or such a file
    overrides: Overrides = _EMPTY  # replace settings of config.json; with torch: factory arguments
    vocab: Positive | None = None  # rows of the embedding; with hf, unset: tokens and padding
    vocab_padding: Positive | None = None  # with hf: rows added to the vocabulary, never predicted
    axes: dict[str, tuple[str, ...]] = _EMPTY  # array axes by weight name: "*.wq.weight"; "": none
    dtype: ComputeDtype = "bfloat16"  # older name of program.precision.compute
    remat: Literal["none", "attention", "dots", "full"] = "dots"  # what the backward recomputes
    attention: AttentionImplementation = "auto"  # as of the native model; docs/guides/targets.md
    # trace: JAX differentiates the forward pass, with blocks scanned. strict: PyTorch's own
    # backward pass. auto: trace unless a known hazard or the parity check requires strict.
    front_end: Literal["auto", "trace", "strict"] = "auto"  # docs/guides/torch.md, Two front ends
    parity: Overrides = _EMPTY  # more overrides for the small model of the parity check
    images: NotNegative = 0  # images of a sequence, with hf; docs/guides/vision.md
    image_size: ImageSize | None = None  # height, width; unset: of config.json

    def __post_init__(self) -> None:
        if (self.torch is None) == (self.hf is None):
            raise ValueError("set either torch or hf")
        if self.vocab is None or self.vocab_padding is not None:
            self._set_vocab()
        if self.vocab is None:
            raise ValueError("vocab is unknown; set it to the number of rows of the embedding")
        self._check_images()

    def _check_images(self) -> None:
        """Derive the size of images, and refuse settings with which a model takes none.

        Raises:
            ValueError: names the setting and the change to make.
        """
        if not self.images:
            if self.image_size is not None:
                raise ValueError("image_size is set and images is 0; set images too")
            return
        if self.hf is None or self.front_end == "strict":
            other = 'front_end = "strict"' if self.hf else "torch"
            raise ValueError(f"images cannot be used with {other}; remove one of them")
        try:
            set_derived_defaults(self, image_size=stated_image_size(self.hf, self.overrides))
            if self.image_size is None:
                raise ValueError(
                    "images is set and the model takes images of several sizes; set image_size = "
                    "[HEIGHT, WIDTH] to that of the dataset"
                )
            image_layout(self)
        except ImportedModelError as error:
            raise ValueError(str(error)) from error

    def _set_vocab(self) -> None:
        """Derive the rows of the vocabulary from config.json and the padding.

        Raises:
            ValueError: the padding cannot be added, or contradicts vocab.
        """
        try:
            tokens = None if self.hf is None else vocab_size(self.hf, self.overrides)
        except ImportedModelError as error:
            raise ValueError(str(error)) from error
        if tokens is None:
            if self.vocab_padding is None:
                return
            raise ValueError(
                "vocab_padding needs hf with a vocab_size in config.json, because it changes that; "
                "a module of torch has its own number of rows"
            )
        rows = tokens + (self.vocab_padding or 0)
        if self.vocab_padding is not None and self.vocab not in (None, rows):
            raise ValueError(
                f"vocab = {self.vocab} is not vocab_size = {tokens} of config.json and "
                f"vocab_padding = {self.vocab_padding}; remove vocab, or set it to {rows}"
            )
        set_derived_defaults(self, vocab=rows)

    @property
    def vocab_tokens(self) -> int:
        """Number of rows of the embedding that may stand for a token."""
        assert self.vocab is not None
        return self.vocab - (self.vocab_padding or 0)

    def without_padding(self) -> "TorchModel":
        """Return the settings of the same model without rows that pad the vocabulary."""
        return replace(self, vocab=self.vocab_tokens, vocab_padding=None)

    def __hash__(self) -> int:
        return hash(repr(self))  # dictionaries are not hashable


def is_imported(model: Model | TorchModel | FlaxModel) -> TypeIs[TorchModel | FlaxModel]:
    """Return whether a model is not the native decoder, but of PyTorch or Flax."""
    return isinstance(model, TorchModel | FlaxModel)
