"""Vision towers in estimates: a program of a tower's blocks, and its projection."""

from __future__ import annotations

import math
from dataclasses import replace

from graphtrain.config.hf_config import read_config
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Program, TorchModel
from graphtrain.config.schema.types import item_bytes
from graphtrain.config.tower import Tower
from graphtrain.cost_model.native_equivalent import with_native_model
from graphtrain.models.flops import step_flops_per_token, useful_flops_per_token
from graphtrain.models.shapes import parameter_arrays
from sharding_rules.arrays import ArraySpec
from sharding_rules.rules import Table

_WHOLE = ("vocab", "residual")  # array axes that no mesh axis splits in a tower


def tower_of(program: Program) -> Tower | None:
    """Return the vision tower of a program with images; None without images.

    With an adapter, it says what of it is trained in full.
    """
    model = program.model
    if not isinstance(model, TorchModel) or not model.images:
        return None
    from graphtrain.torch_frontend.tower_equivalent import tower_equivalent
    from graphtrain.torch_frontend.tower_names import with_trained_weights

    tower = tower_equivalent(model)
    if tower is None or program.adapter is None:
        return tower
    assert model.hf is not None
    kind = read_config(model.hf, model.overrides)["model_type"]
    return with_trained_weights(tower, kind, program.adapter.modules_to_save)


def tower_settings(program: Program, tower: Tower) -> Program:
    """Return the settings of a program whose sequences are the images of a native program."""
    rows = program.batch.rows * tower.images
    batch = replace(
        program.batch,
        global_batch_size=rows,
        padding_sequences=0,
        seq_len=tower.tokens,
        cross_document_attention=True,
    )
    model, adapter = replace(tower.model, remat=program.model.remat), program.adapter
    if adapter is not None:
        adapter = replace(adapter, modules_to_save=tower.trained)
    return replace(program, model=model, batch=batch, adapter=adapter)


def tower_program(program: ResolvedProgram) -> ResolvedProgram | None:
    """Return the program of a native program's tower.

    Its positions are on every device, and so are all values of a patch, for which its vocabulary
    stands.
    """
    if (tower := program.tower) is None:
        return None

    def split(table: Table) -> Table:
        return {axis: names for axis, names in table.items() if axis not in _WHOLE}

    rules = replace(
        program.rules,
        parameters=split(program.rules.parameters),
        gradients=split(program.rules.gradients),
        optimizer=split(program.rules.optimizer),
        activations=split(program.rules.activations),
    )
    native = program.with_settings(tower_settings(program.settings, tower))
    return replace(native, rules=rules, tower=None)


def projection_arrays(tower: Tower) -> dict[str, ArraySpec]:
    """Return the matrices of the projection, by path."""
    axes = ("mlp", "embed"), ("embed", "mlp")
    return {
        f"projection/{number}": ArraySpec(shape, axes[number], "float32", "parameter")
        for number, shape in enumerate(tower.projection)
    }


def projection_flops(tower: Tower) -> float:
    """Return the FLOPs of the projection's forward pass, of one image."""
    return sum(2.0 * rows * columns for rows, columns in tower.projection) * tower.features


def step_flops_of_projection(tower: Tower, *, has_adapter: bool) -> float:
    """Return the FLOPs of the projection in a training step, of one image.

    A frozen matrix has no product for its gradient.
    """
    indices = tower.trained_projection if has_adapter else range(len(tower.projection))
    trained = replace(tower, projection=tuple(tower.projection[index] for index in indices))
    return 2 * projection_flops(tower) + projection_flops(trained)


def trained_fraction(tower: Tower) -> float:
    """Return the fraction of the matrices in a tower's blocks that an adapter trains in full."""
    sizes = {
        path: math.prod(spec.shape)
        for path, spec in parameter_arrays(tower.model).items()
        if path.startswith(("layers/attention/", "layers/mlp/")) and not path.endswith("_bias")
    }
    return sum(sizes.get(path, 0) for path in tower.trained) / sum(sizes.values())


def feature_bytes(program: ResolvedProgram) -> float:
    """Return the bytes of the features of a device's images, of one microbatch."""
    assert program.tower is not None
    rows, _ = program.tower.projection[-1]
    sequences = program.batch.microbatch_rows / program.mesh.size(
        program.rules.activations.get("batch", ())
    )
    images = sequences * program.tower.images
    return images * program.tower.features * rows * item_bytes(program.model.dtype)


def step_flops_of_tower(program: Program, tower: Tower) -> float:
    """Return the FLOPs of a tower in a training step, without recomputation.

    Args:
        program: a native program, whose images the tower computes.
        tower: the tower.
    """
    settings = tower_settings(program, tower)
    in_windows = replace(settings, batch=replace(settings.batch, seq_len=round(tower.attended)))
    blocks = step_flops_per_token(in_windows)
    if tower.trained:
        full = step_flops_per_token(replace(in_windows, adapter=None))
        blocks += trained_fraction(tower) * (full - blocks)
    projection = step_flops_of_projection(tower, has_adapter=program.adapter is not None)
    return blocks * settings.batch.tokens + projection * settings.batch.global_batch_size


def useful_step_flops(program: Program) -> dict[str, float]:
    """Return a training step's operations per token, by the name of the metric of utilization.

    Those of a vision tower are divided by all tokens of the step.

    Raises:
        PlanError: as with_native_model.
    """
    native, tower = with_native_model(program), tower_of(program)
    flops = useful_flops_per_token(native)
    if tower is None:
        return flops
    more = step_flops_of_tower(native, tower) / native.batch.tokens
    return {name: value + more for name, value in flops.items()}
