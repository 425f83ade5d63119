"""The settings, as frozen dataclasses; a check lives in the narrowest class that sees it all.

The comment beside a field is its meaning in `graphtrain config show` and in the JSON schema.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", strict=True)

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]


def _settle(settings: object, **defaults: Any) -> None:
    """Fill settings left out with a value that depends on others: a resolved file is whole."""
    for name, value in defaults.items():
        if getattr(settings, name) is None:
            object.__setattr__(settings, name, value)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Model:
    """A dense decoder-only transformer. Defaults are Llama's; GPT-2 is a choice of the settings."""

    layers: Positive
    embed: Positive  # width of the residual stream
    heads: Positive  # query heads
    kv_heads: Positive | None = None  # key and value heads; as many as heads if left out
    head_dim: Positive | None = None  # embed / heads if left out
    mlp: Positive  # hidden width of the MLP
    vocab: Positive  # rows of the embedding; at least the tokenizer's
    positions: Literal["rope", "learned", "alibi"] = "rope"
    rope_base: PositiveFloat = 10_000.0
    max_length: Positive | None = None  # rows of the position table; only for learned positions
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: PositiveFloat = 1e-5
    activation: Literal["swiglu", "geglu", "gelu", "gelu_tanh"] = "swiglu"
    bias: Literal["none", "qkv", "all"] = "none"
    tied_head: bool = False  # the head is the embedding, transposed
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # after embedding, attention and MLP
    initial_deviation: PositiveFloat = 0.02  # of weights; a block's output: / sqrt(2 layers)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation; weights are float32
    remat: Literal["none", "dots", "full"] = "dots"  # what the backward pass computes again

    def __post_init__(self) -> None:
        if self.head_dim is None and self.embed % self.heads:
            raise ValueError(
                f"embed = {self.embed} is not a multiple of heads = {self.heads}; "
                "change one, or set head_dim"
            )
        _settle(self, kv_heads=self.heads, head_dim=self.embed // self.heads)
        assert self.kv_heads and self.head_dim
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary positions turn pairs")
        if self.positions == "learned" and self.max_length is None:
            raise ValueError('positions = "learned" needs max_length')
        if self.positions != "learned" and self.max_length is not None:
            raise ValueError('max_length is only for positions = "learned"; leave it out')


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Batch:
    """One global training step."""

    sequences: Positive  # over all devices and microbatches
    length: Positive  # tokens per sequence
    microbatches: Positive = 1  # parts whose gradients are accumulated

    def __post_init__(self) -> None:
        if self.sequences % self.microbatches:
            raise ValueError(
                f"sequences = {self.sequences} is not a multiple of "
                f"microbatches = {self.microbatches}"
            )

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Optimizer:
    """AdamW. The learning rate is an input of the step, so it is under [run.schedule].

    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101
    """

    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.1
    decay: Literal["matrices", "all"] = "matrices"  # matrices: not norms and biases
    clip_norm: NotNegativeFloat = 1.0  # global norm of the gradients; 0 turns clipping off


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Loss:
    """Cross-entropy over the targets whose weight is not zero."""

    z_loss: NotNegativeFloat = 0.0  # weight of log(Z)^2; PaLM (arxiv.org/abs/2204.02311): 1e-4


MeshSize = Positive | Literal["rest"]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Mesh:
    """Devices along each mesh axis; one may be "rest": what the others leave of the target's."""

    data: MeshSize = 1
    fsdp: MeshSize = 1
    tensor: MeshSize = 1

    def __post_init__(self) -> None:
        rest = [name for name, size in vars(self).items() if size == "rest"]
        if len(rest) > 1:
            raise ValueError(f'only one mesh axis can be "rest", not {" and ".join(rest)}')


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Program:
    """Everything that can change compiled code. The cache key digests it whole."""

    target: str = "cpu:1"  # the machine compiled for, as in cpu:8, h100:64, v5p:4x4x4
    rules: tuple[str, ...] = ("data", "fsdp", "tensor", "sequence")  # presets or .toml files
    mesh: Mesh = Mesh(data="rest")
    model: Model
    batch: Batch
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()

    def __post_init__(self) -> None:
        limit = self.model.max_length
        if limit is not None and self.batch.length > limit:
            raise ValueError(
                f"batch.length = {self.batch.length} is more than model.max_length = {limit}"
            )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Data:
    """Datasets made by `graphtrain data prepare`, without their .bin and .idx."""

    train: str
    validation: str | None = None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Schedule:
    """Learning rate by step: a linear warm-up to peak, then the shape down to floor."""

    shape: Literal["constant", "linear", "cosine"] = "cosine"  # after the warm-up
    peak: PositiveFloat = 3e-4
    floor: NotNegativeFloat = 0.0  # the last learning rate
    warmup: NotNegative = 0  # steps

    def __post_init__(self) -> None:
        if self.floor > self.peak:
            raise ValueError(f"floor = {self.floor} is more than peak = {self.peak}")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Run:
    """Everything else. Changing it never compiles anything."""

    directory: Annotated[str, Field(min_length=1)]  # of checkpoints, metrics and config.toml
    steps: Positive
    data: Data
    schedule: Schedule = Schedule()
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of the weights and the order of the data
    report_every: Positive = 10  # steps
    save_every: Positive = 1000  # steps; the last step is always saved
    keep_checkpoints: Positive = 3  # the newest
    evaluate_every: Positive | None = None  # steps; None: only after the last
    evaluate_batches: Positive | None = None  # None: the whole validation set
    tensorboard: bool = True

    def __post_init__(self) -> None:
        if self.schedule.warmup > self.steps:
            raise ValueError(
                f"schedule.warmup = {self.schedule.warmup} is more than steps = {self.steps}"
            )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config:
    """What to train: `program` can change compiled code; `run` cannot."""

    program: Program
    run: Run
