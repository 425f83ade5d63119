"""Programs whose MLPs have a backward pass of graphtrain's own; by arithmetic, without JAX."""

from __future__ import annotations

from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.config.schema.types import item_bytes
from graphtrain.models.shapes import parameter_arrays
from sharding_rules.arrays import ArraySpec, Role
from sharding_rules.plan import has_general_layout, make_layout

_STORED: tuple[Role, ...] = ("parameter", "optimizer")


def has_own_backward(program: ResolvedProgram) -> bool:
    """Return whether the backward pass of MLPs may be graphtrain's own instead of JAX's.

    It may be on GPUs and TPUs in native models; not in mixtures, with LoRA, fused projections or
    products in fp8 or int8, nor in pipelines or with gradients that are reduced once for each step.
    """
    model, batch, target = program.model, program.batch, program.target
    if is_imported(model) or program.stands_for_imported:
        return False
    return (
        (target.is_gpu or target.platform == "tpu")
        and model.moe is None
        and not model.fused_gate_up
        and program.adapter is None
        and program.settings.precision.matmul_dtype is None
        and program.mesh.axes.get("stage", 1) == 1
        and batch.gradient_reduction == "per_microbatch"
    )


def computes_weights_first(program: ResolvedProgram) -> bool:
    """Return whether an MLP's gradients of weights are computed before attention's backward pass.

    They are where products of layers are saved (with `full`, MLPs run in blocks), and where hidden
    values take more bytes than the float32 gradients that then exist instead of them. Not with
    tensor parallelism, where the gradient of the MLP's input is a partial sum.
    """
    if not has_own_backward(program):  # first: imported models have none of the settings below
        return False
    model = program.model
    hidden_bytes = item_bytes(model.dtype) * tokens_of_device(program)
    if model.remat == "full" or hidden_bytes <= 4 * model.embed:
        return False
    return column_shards(program) == 1


def tokens_of_device(program: ResolvedProgram) -> float:
    """Return the number of tokens of a microbatch that a device has inside of an MLP."""
    rules, mesh, batch = program.rules.activations, program.mesh, program.batch
    shards = mesh.size(rules.get("batch", ())) * mesh.size(rules.get("seq", ()))
    return batch.microbatch_rows * batch.seq_len / shards


def column_shards(program: ResolvedProgram) -> int | None:
    """Return how many shards of the MLP's columns there are.

    None: activations, weights and gradients shard the columns over different mesh axes, or rules of
    single arrays apply to weights, which the blocks and their gradients do not have, or activations
    shard columns and embed alike, which partial sums of blocks both have.
    """
    activations = program.rules.activations
    if (
        program.mesh.size(tuple({*activations.get("mlp", ())} & {*activations.get("embed", ())}))
        > 1
    ):
        return None
    columns = {"mlp": ArraySpec((program.model.mlp,), ("mlp",), role="activation")}
    for path, spec in parameter_arrays(program.model).items():
        if "/mlp/" in path and "mlp" in spec.axes:
            for role in _STORED:
                columns[f"{role}/{path}"] = stored = replace(spec, role=role)
                if not has_general_layout(path, stored, program.rules, program.mesh):
                    return None
    splits = {
        make_layout(path, spec, program.rules, program.mesh).split[spec.axes.index("mlp")]
        for path, spec in columns.items()
    }
    return program.mesh.size(splits.pop()) if len(splits) == 1 else None
