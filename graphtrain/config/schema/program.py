"""[program]: everything that can change compiled code."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Discriminator, Tag, ValidationError
from pydantic.dataclasses import dataclass

from graphtrain.config.hf_config import layer_count, layers_in_front
from graphtrain.config.schema.adapter import Adapter
from graphtrain.config.schema.batch import Batch
from graphtrain.config.schema.dump import Dump
from graphtrain.config.schema.flax_model import FlaxModel
from graphtrain.config.schema.loss import Loss
from graphtrain.config.schema.mesh import Mesh, PipelineSettings
from graphtrain.config.schema.model import Model
from graphtrain.config.schema.native_checks import check_ahead
from graphtrain.config.schema.optimizer import Optimizer
from graphtrain.config.schema.phase import Phase, PhaseError, describe_phase
from graphtrain.config.schema.precision import Precision
from graphtrain.config.schema.serve import Serve
from graphtrain.config.schema.torch_model import TorchModel, is_imported
from graphtrain.config.schema.types import STRICT, LocalPath
from sharding_rules.errors import ShardingError
from sharding_rules.pipeline import Stages, check_microbatches, divide_layers


def _model_kind(model: Any) -> str:
    """Return which of the classes a [program.model] is of."""
    if isinstance(model, FlaxModel) or (isinstance(model, dict) and "flax" in model):
        return "flax"
    if isinstance(model, dict):
        return "imported" if "torch" in model or "hf" in model else "native"
    return "imported" if isinstance(model, TorchModel) else "native"


if TYPE_CHECKING:  # functions of native models are typed with Model; see is_imported
    AnyModel = Model
else:
    AnyModel = Annotated[
        Annotated[Model, Tag("native")]
        | Annotated[TorchModel, Tag("imported")]
        | Annotated[FlaxModel, Tag("flax")],
        Discriminator(_model_kind),
    ]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Program:
    """Everything that can change compiled code. The cache key digests all of it."""

    target: str = "cpu:1"  # machine to compile for, for example cpu:8, h100:64 or v5p:4x4x4
    # Presets or .toml files. A strategy whose mesh axis has size 1 has no effect.
    rules: tuple[LocalPath, ...] = (
        "data",
        "fsdp",
        "pipeline",
        "expert",
        "context",
        "tensor",
        "sequence",
    )  # sharding strategies, by preset name or .toml file
    mesh: Mesh = Mesh(data="rest")
    model: AnyModel
    batch: Batch
    precision: Precision = Precision()
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    pipeline: PipelineSettings = PipelineSettings()
    adapter: Adapter | None = None  # LoRA; unset: train every weight
    serve: Serve = Serve()
    dump: Dump = Dump()
    phase: tuple[Phase, ...] | None = None  # earlier parts of a run; docs/guides/phases.md

    def __post_init__(self) -> None:
        self._move_compute_dtype()
        self.precision.check_dtype(self.model.dtype)
        if self.precision.matmul_dtype is not None:
            _check_quantized_products(self)
        if is_imported(self.model):
            _check_imported(self)
        else:
            self._check_native()
        if self.loss.kind == "dpo":
            check_preference(self)
        if self.batch.padding_sequences and (reason := why_not_padded(self)):
            raise ValueError(f"batch.padding_sequences cannot be used with {reason}; remove it")
        if self.mesh.stage != "rest" and self.mesh.stage > 1:
            check_pipeline(self, self.mesh.stage)
        self._check_phases()

    def _move_compute_dtype(self) -> None:
        """Let the dtype of the model follow precision.compute, whatever it was."""
        compute = self.precision.compute
        if self.precision.matmul_dtype is not None:
            object.__setattr__(self, "model", replace(self.model, dtype="bfloat16"))
        elif compute is not None:
            object.__setattr__(self, "model", replace(self.model, dtype=compute))
            object.__setattr__(self, "precision", replace(self.precision, compute=None))

    @property
    def compute(self) -> str:
        """Value of precision.compute, wherever it was set."""
        return self.precision.compute or self.model.dtype

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Return the parts of a run before that of these settings."""
        return self.phase or ()

    def in_phase(self, phase: Phase) -> "Program":
        """Return the program of one phase, which has no phases itself.

        Raises:
            ValueError: the settings of the phase do not suit the program.
        """
        model = replace(self.model, **phase.of_model) if phase.changes_model else self.model
        return replace(self, phase=None, batch=replace(self.batch, **phase.of_batch), model=model)

    def _check_phases(self) -> None:
        before = 0
        for index, phase in enumerate(self.phases):
            name, within = describe_phase(index + 1, phase), ("phase", str(index))
            if phase.until <= before:
                raise PhaseError(
                    within,
                    f"{name} ends at or before the phase before it, until = {before}; raise until",
                )
            before = phase.until
            if phase.changes_model and (is_imported(self.model) or self.model.positions != "rope"):
                raise PhaseError(
                    within,
                    f"{name}: rope_theta and rope_scaling are only for the native decoder with "
                    'positions = "rope"; remove them',
                )
            if phase.rope_scaling is not None and self.model.rope_scaling is None:
                raise PhaseError(
                    within,
                    f"{name}: rope_scaling leaves out model.rope_scaling, which is not set; "
                    "remove it",
                )
            try:
                self.in_phase(phase)
            except ValueError as error:
                raise PhaseError(within, f"{name}: {reason_of(error)}") from None

    def _check_native(self) -> None:
        if self.model.moe is not None and self.batch.gradient_reduction == "per_step":
            raise ValueError(
                'batch.gradient_reduction = "per_step" computes each replica separately, and a '
                "mixture of experts balances its experts over all replicas; use "
                'gradient_reduction = "per_microbatch"'
            )
        if self.model.mtp_loss_weight is not None:
            check_ahead(self)
        balanced = self.model.moe is not None and bool(self.model.moe.bias_update_rate)
        if balanced and self.optimizer.kind == "schedule_free":
            raise ValueError(
                'optimizer.kind = "schedule_free" averages weights, and model.moe.bias_update_rate '
                "updates biases of routers without gradients; choose another kind, or set "
                "bias_update_rate = 0"
            )
        chunk, seq_len = self.loss.chunk, self.batch.seq_len
        if isinstance(chunk, int) and seq_len % chunk:
            raise ValueError(f"batch.seq_len = {seq_len} is not a multiple of loss.chunk = {chunk}")
        self._check_positions()

    def _check_positions(self) -> None:
        """Refuse sequences that are longer than the table of learned positions."""
        limit = self.model.max_position_embeddings
        lengths = {
            "batch.seq_len": self.batch.seq_len,
            "serve.context_length": self.serve.context_length,
        }
        for name, length in lengths.items():
            if limit is not None and length is not None and length > limit:
                raise ValueError(
                    f"{name} = {length} is more than model.max_position_embeddings = {limit}; "
                    f"use at most {limit}"
                )


def reason_of(error: ValueError) -> str:
    """Return the words of a check, without those of pydantic around them."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return str(first.get("ctx", {}).get("error", first["msg"]))
    return str(error)


def _check_quantized_products(program: Program) -> None:
    """Refuse settings with which products cannot be in fp8 or int8."""
    refused = {
        "model.flax": isinstance(program.model, FlaxModel),
        "model.latent_attention": getattr(program.model, "latent_attention", None) is not None,
        'model.front_end = "strict"': getattr(program.model, "front_end", None) == "strict",
        'batch.gradient_reduction = "per_step"': program.batch.gradient_reduction == "per_step",
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f'precision.compute = "{program.precision.compute}" cannot be used with '
            f'{" and ".join(names)}; remove it, or set compute to "bfloat16"'
        )
    excluded = program.precision.excluded
    if is_imported(program.model):
        if "experts" not in excluded:
            raise ValueError(
                'precision.exclude does not name "experts", and those of an imported model have no '
                "product in fp8 or int8; add it"
            )
        return
    mixture = program.model.moe
    if mixture and mixture.capacity_factor is None and "experts" not in excluded:
        raise ValueError(
            'precision.exclude does not name "experts", and experts without '
            "model.moe.capacity_factor have no product in fp8 or int8; add it, or set "
            "capacity_factor"
        )


def why_not_padded(program: Program) -> str:
    """Return the setting with which empty sequences would change the loss; empty if none."""
    if is_imported(program.model):
        return "model.torch, model.hf or model.flax, whose losses may depend on every sequence"
    if program.model.moe is not None:
        return "model.moe, which balances its experts over every sequence"
    return ""


def check_preference(program: Program) -> None:
    """Refuse settings that DPO over preference pairs does not support.

    Raises:
        ValueError: names the setting and the change to make.
    """
    batch = program.batch
    rows = batch.microbatch_rows
    if rows % 2:
        raise ValueError(
            f'loss.kind = "dpo" needs pairs of rows, and batch.global_batch_size = '
            f"{batch.global_batch_size} with batch.microbatches = {batch.microbatches} makes "
            f"{rows} rows per microbatch; change one so that it is even"
        )
    if batch.gradient_reduction == "per_step":
        raise ValueError('loss.kind = "dpo" needs batch.gradient_reduction = "per_microbatch"')
    mixture = None if is_imported(program.model) else program.model.moe
    if mixture is not None and mixture.capacity_factor is not None:
        raise ValueError(
            'loss.kind = "dpo" compares two models on the same tokens, and a mixture of experts '
            "with a capacity factor drops different tokens in each; remove capacity_factor"
        )


def _check_imported(program: Program) -> None:
    """Refuse settings that PyTorch and Flax models do not support."""
    is_flax = isinstance(program.model, FlaxModel)
    refused = {
        'loss.kind = "dpo"': is_flax and program.loss.kind == "dpo",
        "loss.chunk": program.loss.has_chunks,
        "adapter": is_flax and program.adapter is not None,
        'serve.weights_dtype = "int8"': program.serve.weights_dtype == "int8",
        "serve.total_adapter_rank": program.serve.total_adapter_rank > 0,
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f"{' and '.join(names)} cannot be used with "
            f"{'model.flax' if is_flax else 'model.torch or model.hf'}; "
            "remove it, or use the native decoder (graphtrain convert hf-to-graphtrain)"
        )
    if isinstance(program.model, TorchModel) and program.model.images:
        _check_images(program)
    if is_flax and not program.batch.cross_document_attention:
        raise ValueError(
            "batch.cross_document_attention = false cannot be used with model.flax, which is not "
            "told where documents begin; remove it"
        )


def _check_images(program: Program) -> None:
    """Refuse settings with which a program takes no images."""
    refused = {
        "mesh.stage": program.mesh.stage != 1,
        "mesh.context": program.mesh.context != 1,
        'loss.kind = "dpo"': program.loss.kind == "dpo",
        f'precision.compute = "{program.precision.compute}"': program.precision.matmul_dtype
        is not None,
        'batch.gradient_reduction = "per_step"': program.batch.gradient_reduction == "per_step",
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(f"model.images cannot be used with {' and '.join(names)}; remove it")


def check_pipeline(program: Program, stages: int) -> Stages:
    """Return the assignment of a program's layers to `stages` pipeline stages.

    Raises:
        ShardingError: a setting that pipelines do not support, or layers, microbatches or
            positions that cannot be divided among the stages.
    """
    batch, pipeline = program.batch, program.pipeline
    check_microbatches(batch.microbatches, stages, batch.rows)
    if pipeline.schedule == "1f1b" and batch.seq_len % stages:
        raise ShardingError(
            f"batch.seq_len = {batch.seq_len} is not a multiple of mesh.stage = {stages}, over "
            'which 1f1b splits the LM head; change one, or set pipeline.schedule = "circular"'
        )
    return divide_layers(
        _layers_of(program), stages, pipeline.virtual_stages, pipeline.layers_per_stage
    )


def _layers_of(program: Program) -> int:
    """Return the number of layers that the stages divide.

    An imported model may have others in front of the stages and behind them.

    Raises:
        ShardingError: the settings do not state it.
    """
    model = program.model
    if not is_imported(model):
        return model.layers
    if isinstance(model, FlaxModel):
        raise ShardingError("model.flax has no pipeline stages; set mesh.stage = 1")
    total = model.hf and layer_count(model.hf, model.overrides)
    given = sum(program.pipeline.layers_per_stage or ())
    if given and (not total or given < total):
        return given  # the module decides whether the other layers can be outside of the stages
    if not total:
        raise ShardingError(
            f"the number of layers of model.{'hf' if model.hf else 'torch'} is unknown before the "
            "model is built; set pipeline.layers_per_stage, for example [6, 6]"
        )
    assert model.hf is not None
    return total if given else total - layers_in_front(model.hf, model.overrides)
