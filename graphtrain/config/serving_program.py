"""The program that generates with the weights of another: its mesh, batch and dtype."""

from dataclasses import replace
from typing import Literal

from graphtrain.config.resolve import ResolvedProgram, resolve
from graphtrain.config.schema import (
    Batch,
    Loss,
    Mesh,
    Model,
    Optimizer,
    PipelineSettings,
    Precision,
    Program,
    Serve,
    TorchModel,
    is_imported,
)
from sharding_rules.errors import ShardingError

_INT8 = ("cpu", "cuda", "rocm", "tpu")  # platforms whose weights may be int8

# Rules that split the positions of a sequence, of which decode has one.
_SEQUENCE_RULES = ("sequence", "context", "ulysses")


def serving_program(program: ResolvedProgram) -> ResolvedProgram:
    """Return the program that generates with the weights of `program`, on as many devices.

    The adapter of the run is merged into the weights. The devices of pipeline stages and of context
    parallelism hold shards of the weights (fsdp): one token at a time keeps no pipeline busy.
    Experts have no capacity, so that a sequence does not depend on those beside it.

    Raises:
        ShardingError: the rules cannot be applied, the target has no products of int8, or the
            program takes images.
    """
    if program.settings.serve.weights_dtype == "int8" and program.target.platform not in _INT8:
        raise ShardingError(
            f'serve.weights_dtype = "int8" is not supported for {program.settings.target}; '
            'set it to "bfloat16"'
        )
    settings, serve = program.settings, program.settings.serve
    if isinstance(settings.model, TorchModel) and settings.model.images:
        raise ShardingError(
            f"program.model.images = {settings.model.images}: generation, serving and evaluation "
            "of tasks take no images; export the run (graphtrain convert graphtrain-to-hf RUN "
            "FOLDER), and generate with transformers"
        )
    if settings.adapter is not None and is_imported(settings.model):
        raise ShardingError(
            "program.adapter of model.hf or model.torch cannot be merged for generation and "
            "serving; export the run (graphtrain convert graphtrain-to-hf RUN FOLDER), and "
            "generate with run.init_from = FOLDER, without [program.adapter]"
        )
    sizes = dict(program.mesh.axes)
    folded = [sizes.pop(axis, 1) for axis in ("stage", "context")]
    sizes["fsdp"] = sizes.get("fsdp", 1) * folded[0] * folded[1]
    rules = [name for name in settings.rules if name not in _SEQUENCE_RULES]
    if max(folded) > 1 and "fsdp" not in rules:
        rules.append("fsdp")
    changed = replace(
        settings,
        model=_serving_model(program),
        mesh=Mesh(**sizes),
        rules=tuple(rules),
        batch=Batch(global_batch_size=1, seq_len=context_of_serving(settings)),
        precision=Precision(),  # fp8, int8 and the loss scale are of training
        optimizer=Optimizer(),
        loss=Loss(),
        pipeline=PipelineSettings(),
        adapter=None,
    )
    resolved = resolve(changed)
    shards = batch_shards(resolved)
    slots = -(-max(serve.slots, serve.beams) // shards) * shards  # each beam is in a slot
    # A model has no learned positions beyond the context.
    prefill = tuple(dict.fromkeys(min(size, changed.batch.seq_len) for size in serve.prefill))
    serve = replace(serve, slots=slots, prefill=prefill, weights_dtype=_weights_dtype(program))
    return resolved.with_settings(replace(changed, serve=serve))


def context_of_serving(program: Program) -> int:
    """Return the number of tokens that a sequence may have when a program generates."""
    return program.serve.context_length or program.batch.seq_len


def without_adapters(program: ResolvedProgram) -> ResolvedProgram:
    """Return a program that serves the base model alone."""
    default = Serve()
    serve = replace(
        program.settings.serve,
        total_adapter_rank=default.total_adapter_rank,
        adapter_target_modules=default.adapter_target_modules,
    )
    return program.with_settings(replace(program.settings, serve=serve))


def batch_shards(program: ResolvedProgram) -> int:
    """Return over how many devices the sequences of a batch are divided."""
    return program.mesh.size(program.rules.activations.get("batch", ()))


def packed_rows(program: ResolvedProgram) -> int:
    """Return the number of rows of packed texts in a call: one, or as many as slots on a mesh."""
    return 1 if batch_shards(program) == 1 else program.settings.serve.slots


def _weights_dtype(program: ResolvedProgram) -> Literal["float32", "bfloat16", "int8"]:
    serve = program.settings.serve
    if serve.weights_dtype != "auto":
        return serve.weights_dtype
    return _serving_dtype(program.model) if serve.dtype == "auto" else serve.dtype


def _serving_dtype(model: Model) -> Literal["float32", "bfloat16"]:
    """Return the dtype in which a model is served where no setting says another.

    Kernels of serving have no float16, whose range is only a loss while a model is trained.
    """
    return "bfloat16" if model.dtype == "float16" else model.dtype


def _serving_model(program: ResolvedProgram) -> Model:
    """Return the model with the dtype of serving, and without what only training needs."""
    model, dtype = program.model, program.settings.serve.dtype
    if dtype == "auto":
        dtype = "float32" if program.target.platform == "cpu" else _serving_dtype(model)
    model = replace(model, dtype=dtype)
    if is_imported(model):
        return model
    model = replace(model, mtp_loss_weight=None)
    if model.moe is None:
        return model
    return replace(model, moe=replace(model.moe, capacity_factor=None))
