"""The settings, as frozen dataclasses; a check lives in the narrowest class that sees it all.

The comment beside a field is its meaning in `graphtrain config show` and in the JSON schema.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass
from typing_extensions import TypeIs

from graphtrain.config.hf_config import layer_count, vocab_size
from graphtrain.errors import ImportedModelError
from sharding_rules.errors import ShardingError
from sharding_rules.pipeline import Stages, check_microbatches, divide_layers

_STRICT = ConfigDict(extra="forbid", strict=True)

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NotNegativeFloat = Annotated[float, Field(ge=0)]


# What the backward pass computes again. none: nothing. attention: scores and softmax. dots: all but
# products with weights. full: everything. offload: as dots, but the products wait in host memory.
Remat = Literal["none", "attention", "dots", "full", "offload"]

# How attention is computed. scores: by matrix products, with all scores in memory. flash: by a
# kernel of the target that never has them. auto: flash where the target has a kernel for the model.
AttentionImplementation = Literal["auto", "flash", "scores"]

# Positions of a sequence whose logits exist at once. auto: fewer than all on a GPU or TPU, where
# that saves much of its memory and little of its time is lost. whole: all.
Chunk = Positive | Literal["auto", "whole"]


def _settle(settings: object, **defaults: Any) -> None:
    """Fill settings left out with a value that depends on others: a resolved file is whole."""
    for name, value in defaults.items():
        if getattr(settings, name) is None:
            object.__setattr__(settings, name, value)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MixtureOfExperts:
    """Experts in place of every MLP; a router sends each token to a few of them.

    Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538
    """

    experts: Annotated[int, Field(ge=2)]
    experts_per_token: Positive = 2  # experts that work on a token
    normalize_topk: bool = True  # the shares of a token's experts add up to 1
    shared_expert_mlp: Positive | None = None  # width of an expert that every token has, by a share of its own
    capacity_factor: PositiveFloat | None = None  # tokens an expert takes over the mean; None: all of them
    balance_loss: NotNegativeFloat = 0.01  # Switch (arxiv.org/abs/2101.03961): weight of f * P
    router_z_loss: NotNegativeFloat = 0.001  # ST-MoE (arxiv.org/abs/2202.08906): of the router's log(Z)^2

    def __post_init__(self) -> None:
        if self.experts_per_token > self.experts:
            raise ValueError(f"per_token = {self.experts_per_token} is more than experts = {self.experts}")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RopeScaling:
    """Rotary angles of a model stretched to longer sequences.

    Source: linear: Chen et al. 2023, https://arxiv.org/abs/2306.15595; llama3: the function
    apply_scaling of https://github.com/meta-llama/llama-models, models/llama3/model.py
    """

    kind: Literal["linear", "llama3"]  # linear: all angles; llama3: those of long wavelengths
    factor: PositiveFloat  # what angles are divided by
    low_freq_factor: PositiveFloat | None = None  # llama3: turns in original_length, fewer: stretched
    high_freq_factor: PositiveFloat | None = None  # llama3: turns in original_length, more: not
    original_max_position_embeddings: Positive | None = None  # llama3: tokens, before the stretching

    def __post_init__(self) -> None:
        own = (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings)
        if self.kind == "llama3" and None in own:
            raise ValueError(
                'kind = "llama3" needs low_frequency, high_frequency and original_length'
            )
        if self.kind == "linear" and own != (None, None, None):
            raise ValueError('kind = "linear" takes only factor; leave the others out')
        if self.low_freq_factor and self.high_freq_factor and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_frequency = {self.low_freq_factor} is not below "
                f"high_frequency = {self.high_freq_factor}"
            )


Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Model:
    """A decoder-only transformer. Defaults are Llama's; GPT-2 is a choice of the settings."""

    layers: Positive
    embed: Positive  # width of the residual stream
    heads: Positive  # query heads
    kv_heads: Positive | None = None  # key and value heads; as many as heads if left out
    head_dim: Positive | None = None  # embed / heads if left out
    mlp: Positive  # hidden width of the MLP
    vocab: Positive  # rows of the embedding; at least the tokenizer's
    positions: Literal["rope", "learned", "alibi"] = "rope"
    rope_base: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None  # None: angles as they are
    sliding_window: Positive | None = None  # positions a query sees, its own included; None: all before it
    full_every: Positive | None = None  # of so many layers the last sees all; None: none does
    window_rope_base: PositiveFloat | None = None  # of layers with a window, which are not scaled
    max_position_embeddings: Positive | None = None  # rows of the position table; only for learned positions
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: PositiveFloat = 1e-5
    scale_offset: bool = False  # norms multiply by 1 + scale, which begins at 0
    embedding_norm: bool = False  # norm what the embedding gives
    query_key_norm: bool = False  # norm queries and keys, each over head_dim
    post_norm: bool = False  # norm what attention and MLP add to the residual stream
    activation: Activation = "swiglu"
    bias: Literal["none", "qkv", "attention", "all"] = "none"
    score_divisor: PositiveFloat | None = None  # scores are over its root; head_dim if left out
    score_cap: PositiveFloat | None = None  # attention's scores are cap * tanh(score / cap)
    logit_cap: PositiveFloat | None = None  # the head's scores, likewise
    scaled_embedding: bool = False  # rows of the embedding are multiplied by the root of embed
    tied_head: bool = False  # the head is the embedding, transposed
    normalised_head: bool = False  # the head's weights for a token are divided by their length
    merged_gate: bool = False  # gate and up are one array and one product
    moe: MixtureOfExperts | None = None  # None: dense
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # after embedding, attention and MLP
    initial_deviation: PositiveFloat = 0.02  # of weights; a block's output: / sqrt(2 layers)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation; weights are float32
    remat: Remat = "dots"  # what the backward pass computes again: see docs/sharding.md
    attention: AttentionImplementation = (
        "auto"  # flash: without scores in memory; see docs/targets.md
    )
    unroll: Positive = 1  # layers written out in a turn of the loop; see docs/performance.md

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
        if self.merged_gate and self.activation in ("gelu", "gelu_tanh"):
            raise ValueError(
                f'activation = "{self.activation}" has no gate to merge; set merged_gate = false'
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary positions turn pairs")
        if self.moe is not None and self.merged_gate:
            raise ValueError("merged_gate is for dense models; experts have gate and up apart")
        if self.positions == "learned" and self.max_position_embeddings is None:
            raise ValueError('positions = "learned" needs max_length')
        if self.positions != "learned" and self.max_position_embeddings is not None:
            raise ValueError('max_length is only for positions = "learned"; leave it out')
        self._check_window()

    def _check_window(self) -> None:
        if self.positions != "rope" and self.rope_scaling is not None:
            raise ValueError('rope_scaling is only for positions = "rope"; leave it out')
        for name in ("full_every", "window_rope_base"):
            if self.sliding_window is None and getattr(self, name) is not None:
                raise ValueError(f"{name} is only for models with a window; set window too")


Plain = str | bool | int | float | list[str | bool | int | float]
Overrides = dict[str, Plain | dict[str, Plain]]

_EMPTY: Any = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TorchModel:
    """A model of PyTorch or Hugging Face as it is, in place of the settings of the native one."""

    torch: str | None = None  # "module:factory", or "file.py:factory": makes a torch.nn.Module
    hf: str | None = None  # a folder with a config.json of transformers, or such a file
    overrides: Overrides = _EMPTY  # in place of what the config says; with torch, the arguments
    vocab: Positive | None = None  # rows of the embedding; with hf the config says it
    axes: dict[str, tuple[str, ...]] = _EMPTY  # of parameters by name, as "*.wq.weight"; "": whole
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation; weights are float32
    remat: Literal["none", "attention", "dots", "full"] = "dots"  # what is computed again
    attention: AttentionImplementation = "auto"  # as of a native model; see docs/targets.md
    # trace: by JAX, with blocks scanned. strict: PyTorch's own backward pass. auto: as it must be.
    front_end: Literal["auto", "trace", "strict"] = "auto"  # see docs/torch.md, Two front ends
    parity: Overrides = _EMPTY  # further overrides, for the small model compared with PyTorch

    def __post_init__(self) -> None:
        if (self.torch is None) == (self.hf is None):
            raise ValueError("give either torch or hf")
        if self.vocab is None:
            try:
                _settle(self, vocab=self.hf and vocab_size(self.hf, self.overrides))
            except ImportedModelError as error:
                raise ValueError(str(error)) from error
        if self.vocab is None:
            raise ValueError("vocab is not known: set it to the rows of the embedding")

    def __hash__(self) -> int:
        return hash(repr(self))  # dictionaries have none of their own


def _kind(model: Any) -> str:
    """Which of the two a [program.model] is."""
    if isinstance(model, dict):
        return "imported" if "torch" in model or "hf" in model else "native"
    return "imported" if isinstance(model, TorchModel) else "native"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Batch:
    """One global training step."""

    global_batch_size: Positive  # over all devices and microbatches
    seq_len: Positive  # tokens per sequence
    microbatches: Positive = 1  # parts whose gradients are accumulated
    gradient_reduction: Literal["each", "last"] = "each"  # microbatch after which data's gradients are summed
    documents: Literal["joined", "apart"] = "joined"  # apart: none sees another, each begins at 0

    def __post_init__(self) -> None:
        if self.global_batch_size % self.microbatches:
            raise ValueError(
                f"sequences = {self.global_batch_size} is not a multiple of "
                f"microbatches = {self.microbatches}"
            )

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.seq_len


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Optimizer:
    """AdamW. The learning rate is an input of the step, so it is under [run.schedule].

    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101
    """

    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    weight_decay: NotNegativeFloat = 0.1
    decay_mask: Literal["matrices", "all"] = "matrices"  # matrices: not norms and biases
    clip_norm: NotNegativeFloat = 1.0  # global norm of the gradients; 0 turns clipping off
    offload_to_host: bool = False  # moments rest in the host's memory, where the target has it
    moment_dtype: Literal["float32", "bfloat16"] = "float32"  # of the first moment


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Loss:
    """Cross-entropy over the targets whose weight is not zero, or DPO over pairs of answers.

    Source: Rafailov et al. 2023, "Direct preference optimization", https://arxiv.org/abs/2305.18290
    """

    kind: Literal["cross_entropy", "preference"] = "cross_entropy"  # preference: rows are pairs
    z_loss: NotNegativeFloat = 0.0  # weight of log(Z)^2; PaLM (arxiv.org/abs/2204.02311): 1e-4
    chunk: Chunk = "auto"  # positions whose logits exist at once; see docs/performance.md
    beta: PositiveFloat = 0.1  # preference: how dear it is to leave the reference
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # preference: part of wrong labels

    def __post_init__(self) -> None:
        if self.kind == "preference" and self.z_loss:
            raise ValueError('z_loss is only for kind = "cross_entropy"; leave it out')
        if self.kind == "preference" and self.has_chunks:
            raise ValueError('chunk is only for kind = "cross_entropy"; leave it out')

    @property
    def has_chunks(self) -> bool:
        """Whether chunks are asked for, and of which length."""
        return isinstance(self.chunk, int)


Base = Literal["float32", "bfloat16", "int8", "nf4"]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Adapter:
    """LoRA: weights stay as they were, and each that is adapted gets a product of two thin ones.

    Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685; the frozen weights in few bits:
    Dettmers et al. 2023, "QLoRA", https://arxiv.org/abs/2305.14314
    """

    rank: Positive  # the inner width of the product
    alpha: PositiveFloat  # the product is multiplied by alpha / rank
    root_rank: bool = False  # rsLoRA (arxiv.org/abs/2312.03732): by alpha / the root of rank
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)  # weights by name or pattern
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of what the product is given
    modules_to_save: tuple[str, ...] = ()  # arrays trained in full beside, by name or pattern, as in "head"
    base_dtype: Base = "float32"  # how the frozen weights are kept

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.root_rank else self.rank)


MeshSize = Positive | Literal["rest"]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Mesh:
    """Devices along each mesh axis; one may be "rest": what the others leave of the target's."""

    data: MeshSize = 1
    fsdp: MeshSize = 1
    stage: MeshSize = 1
    expert: MeshSize = 1
    context: MeshSize = 1
    tensor: MeshSize = 1

    def __post_init__(self) -> None:
        rest = [name for name, size in vars(self).items() if size == "rest"]
        if len(rest) > 1:
            raise ValueError(f'only one mesh axis can be "rest", not {" and ".join(rest)}')


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class PipelineSettings:
    """How microbatches pass through the stages of the mesh axis `stage`.

    A stage is computed again, from its input, in the backward pass; only model.remat = "none" keeps
    what it computed, and 1f1b never does.

    Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473
    """

    schedule: Literal["gpipe", "circular", "1f1b"] = "circular"
    virtual_stages: Positive = 1  # times a microbatch passes all stages; only circular takes more than 1
    layers_per_stage: tuple[Positive, ...] | None = None  # of each stage, round by round; None: even

    def __post_init__(self) -> None:
        if self.virtual_stages > 1 and self.schedule != "circular":
            raise ValueError(f'rounds = {self.virtual_stages} needs schedule = "circular"')


if TYPE_CHECKING:  # what takes only native models is given no other; see is_imported
    AnyModel = Model
else:
    AnyModel = Annotated[
        Annotated[Model, Tag("native")] | Annotated[TorchModel, Tag("imported")],
        Discriminator(_kind),
    ]


def is_imported(model: Model | TorchModel) -> TypeIs[TorchModel]:
    """Whether a model is one of PyTorch."""
    return isinstance(model, TorchModel)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Program:
    """Everything that can change compiled code. The cache key digests it whole."""

    target: str = "cpu:1"  # the machine compiled for, as in cpu:8, h100:64, v5p:4x4x4
    rules: tuple[str, ...] = (  # presets or .toml files; one for an axis of size 1 does nothing
        "data",
        "fsdp",
        "pipeline",
        "expert",
        "context",
        "tensor",
        "sequence",
    )
    mesh: Mesh = Mesh(data="rest")
    model: AnyModel
    batch: Batch
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    pipeline: PipelineSettings = PipelineSettings()
    adapter: Adapter | None = None  # None: every weight is trained

    def __post_init__(self) -> None:
        if is_imported(self.model):
            _check_imported(self)
        else:
            self._check_native()
        if self.mesh.stage != "rest" and self.mesh.stage > 1:
            check_pipeline(self, self.mesh.stage)

    def _check_native(self) -> None:
        if self.loss.kind == "preference":
            check_preference(self)
        if self.model.moe is not None and self.batch.gradient_reduction == "last":
            raise ValueError(
                'batch.reduce = "last" sees the tokens of one copy of the model at a time, and a '
                'mixture balances its experts over all; use reduce = "each"'
            )
        chunk, length = self.loss.chunk, self.batch.seq_len
        if isinstance(chunk, int) and length % chunk:
            raise ValueError(f"batch.length = {length} is not a multiple of loss.chunk = {chunk}")
        limit = self.model.max_position_embeddings
        if limit is not None and self.batch.seq_len > limit:
            raise ValueError(
                f"batch.length = {self.batch.seq_len} is more than model.max_length = {limit}"
            )


def check_preference(program: Program) -> None:
    """Refuse what pairs of answers cannot be trained with.

    Raises:
        ValueError: says which setting, and what to change.
    """
    batch = program.batch
    if batch.global_batch_size // batch.microbatches % 2:
        raise ValueError(
            f'loss.kind = "preference" takes pairs of rows, and batch.sequences = '
            f"{batch.global_batch_size} in microbatches = {batch.microbatches} makes "
            f"{batch.global_batch_size // batch.microbatches} rows; change one so that it is even"
        )
    if batch.gradient_reduction == "last":
        raise ValueError('loss.kind = "preference" needs batch.reduce = "each"')
    if program.model.moe is not None and program.model.moe.capacity_factor is not None:
        raise ValueError(
            'loss.kind = "preference" compares two models on the same tokens, and a mixture with '
            "a capacity drops others in each; leave capacity out"
        )


def _check_imported(program: Program) -> None:
    """Refuse what models of PyTorch cannot be used with yet."""
    refused = {
        'loss.kind = "preference"': program.loss.kind == "preference",
        "loss.chunk": program.loss.has_chunks,
        "adapter": program.adapter is not None,
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f"{' and '.join(names)} cannot be used with model.torch or model.hf; leave it out, or "
            "take the native decoder (graphtrain convert hf-to-graphtrain)"
        )


def check_pipeline(program: Program, stages: int) -> Stages:
    """The division of a program's layers among stages, once their number is known.

    Raises:
        ShardingError: layers, microbatches or positions that these stages cannot take.
    """
    batch, pipeline = program.batch, program.pipeline
    if batch.documents == "apart":
        raise ShardingError(
            'batch.documents = "apart" and a pipeline do not go together; set mesh.stage = 1, or '
            'documents = "joined"'
        )
    if program.adapter is not None or program.loss.kind == "preference":
        what = "program.adapter" if program.adapter is not None else 'loss.kind = "preference"'
        raise ShardingError(f"{what} and a pipeline do not go together; set mesh.stage = 1")
    if program.loss.has_chunks:
        raise ShardingError(
            "loss.chunk and a pipeline do not go together, whose stages share out the head; leave "
            "it out, or set mesh.stage = 1"
        )
    check_microbatches(batch.microbatches, stages)
    if pipeline.schedule == "1f1b" and batch.seq_len % stages:
        raise ShardingError(
            f"batch.length = {batch.seq_len} is not a multiple of mesh.stage = {stages}, over which "
            "1f1b splits the head; change one, or set pipeline.schedule to circular"
        )
    return divide_layers(_layers_of(program), stages, pipeline.virtual_stages, pipeline.layers_per_stage)


def _layers_of(program: Program) -> int:
    """Blocks of a model, as its settings have them.

    Raises:
        ShardingError: they do not say.
    """
    if not is_imported(program.model):
        return program.model.layers
    model = program.model
    stated = model.hf and layer_count(model.hf, model.overrides)
    blocks = stated or sum(program.pipeline.layers_per_stage or ())
    if not blocks:
        raise ShardingError(
            "how many blocks model.torch makes is not known before it is made; say how many each "
            "stage has, as in pipeline.layers = [6, 6]"
        )
    return blocks


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class BlendPart:
    """One dataset of a blend, with either a weight or epochs."""

    dataset: str  # without its .bin and .idx
    weight: PositiveFloat | None = None  # share of the sequences, relative to the other weights
    epochs: PositiveFloat | None = None  # how often it is read while others are as often as theirs

    def __post_init__(self) -> None:
        if (self.weight is None) == (self.epochs is None):
            raise ValueError(f"give {self.dataset} either a weight or epochs")


# How documents become sequences. cut: end to end, then cut; fit: as many whole ones as fit; padded:
# one whole one.
Packing = Literal["cut", "fit", "padded"]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Data:
    """Datasets made by `graphtrain data prepare`, without their .bin and .idx."""

    train: (
        str | Annotated[tuple[BlendPart, ...], Field(min_length=1)]
    )  # a dataset, or parts of a blend
    validation: str | None = None
    packing: Packing | None = None  # None: text is cut, conversations fit, or padded if joined
    overlong: Literal["refuse", "cut", "drop"] = "refuse"  # documents that do not fit whole

    def __post_init__(self) -> None:
        if isinstance(self.train, str):
            return
        if len({part.weight is None for part in self.train}) > 1:
            raise ValueError("the parts of a blend have either all a weight or all epochs")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class LearningRate:
    """Learning rate by step: a linear warm-up to peak, then the shape down to floor."""

    schedule: Literal["constant", "linear", "cosine"] = "cosine"  # after the warm-up
    peak: PositiveFloat = 3e-4
    minimum: NotNegativeFloat = 0.0  # the last learning rate
    warmup_steps: NotNegative = 0  # steps

    def __post_init__(self) -> None:
        if self.minimum > self.peak:
            raise ValueError(f"floor = {self.minimum} is more than peak = {self.peak}")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Run:
    """Everything else. Changing it never compiles anything."""

    directory: Annotated[str, Field(min_length=1)]  # of checkpoints, metrics and config.toml
    steps: Positive
    data: Data
    learning_rate: LearningRate = LearningRate()
    init_from: str | None = None  # weights to start from: a converted folder, or another run's
    initial_adapter: str | None = None  # a folder of PEFT's to go on from; only with an adapter
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of the weights and the order of the data
    report_every: Positive = 10  # steps
    save_every: Positive = 1000  # steps; the last step is always saved
    keep_checkpoints: Positive = 3  # the newest
    evaluate_every: Positive | None = None  # steps; None: only after the last
    evaluate_batches: Positive | None = None  # None: the whole validation set
    tensorboard: bool = True

    def __post_init__(self) -> None:
        if self.learning_rate.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup = {self.learning_rate.warmup_steps} is more than steps = {self.steps}"
            )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config:
    """What to train: `program` can change compiled code; `run` cannot."""

    program: Program
    run: Run

    def __post_init__(self) -> None:
        adapter, preference = self.program.adapter, self.program.loss.kind == "preference"
        if (adapter is not None or preference) and self.run.init_from is None:
            what = "program.adapter" if adapter is not None else 'program.loss.kind = "preference"'
            raise ValueError(
                f"{what} starts from weights that are there; set run.initial to a converted "
                "folder or to the directory of a run"
            )
        if self.run.initial_adapter is not None and adapter is None:
            raise ValueError("run.initial_adapter is only for a [program.adapter]; set one")
