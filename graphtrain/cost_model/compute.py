"""FLOPs of a training step: by arithmetic, and as the compiled program has them.

Work that several devices repeat is counted on each of them: a part of the model is computed on
every device of a mesh axis unless a rule splits it over that axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphtrain.config.computed_once import computed_once
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import is_imported
from graphtrain.cost_model.adapter_flops import adapter_flops_by_part
from graphtrain.cost_model.native_equivalent import with_native_model
from graphtrain.cost_model.padded_stages import with_padding_layers
from graphtrain.cost_model.passes import Passes
from graphtrain.cost_model.score_products import ALL_SCORES, ScoreProducts, score_products
from graphtrain.cost_model.tower import step_flops_of_projection, tower_program, trained_fraction
from graphtrain.cost_model.update_flops import update_flops
from graphtrain.models.flops import Part, expert_flops_per_token, forward_flops_by_part
from graphtrain.models.grouped_matmul_support import (
    imported_step_computes_all_experts,
    step_computes_all_experts,
)

_Flops = dict[Part, float]
# Array axes whose split divides the work of a part among devices.
_DIVIDES: dict[Part, tuple[str, ...]] = {
    "attention projections": ("batch", "seq", "heads", "stages"),
    "attention scores": ("batch", "seq", "q_seq", "heads", "attention_heads", "stages"),
    "MLP": ("batch", "seq", "mlp", "experts", "stages"),
    "LM head": ("batch", "seq", "vocab", "stages"),  # a stage has its share of the microbatches
}


@dataclass(frozen=True)
class PartFlops:
    """FLOPs of one part of the model in a step."""

    name: Part
    model: float  # of all tokens, without recomputation; with the padding layers of stages
    recomputed: float  # of all tokens, in the backward pass
    replicated_over: tuple[str, ...]  # mesh axes whose devices all compute the same
    replicas: int  # number of devices that compute the same
    unneeded: float = 1.0  # all computed experts over the chosen ones
    padded: float = 1.0  # the operations over those without padding layers
    adapter: float = 0.0  # of all tokens with LoRA factors, without recomputation

    @property
    def needed(self) -> float:
        """FLOPs of all tokens in the model's own layers, without recomputation."""
        return self.model / self.padded

    @property
    def ideal(self) -> float:
        """FLOPs of all devices, if none repeats what another computes."""
        return self.model + self.adapter + self.recomputed

    @property
    def computed(self) -> float:
        """FLOPs of all devices together, as the rules place the work."""
        return self.ideal * self.replicas * self.unneeded


@computed_once
def flops_by_part(
    program: ResolvedProgram, *, flash: bool, masked: bool = True
) -> tuple[PartFlops, ...]:
    """Return the FLOPs of a step by part of the model.

    Args:
        program: the program, whose model may be imported.
        flash: Whether attention is a kernel.
        masked: Count only the scores that a kernel computes under a causal mask, as in
            score_products().

    Raises:
        PlanError: the sizes of an imported model are not known.
    """
    unneeded, length = _computed_experts(program), program.batch.seq_len
    own = forward_flops_by_part(with_native_model(program.settings).model, length)
    program = with_padding_layers(program)
    forward = forward_flops_by_part(program.model, length)
    padded = {name: flops / own[name] for name, flops in forward.items() if own[name]}
    products = score_products(program, flash=flash, masked=masked)
    forward["attention scores"] *= products.computed
    parts = [
        replace(part, padded=padded.get(part.name, 1.0))
        for part in _parts(program, forward, products, unneeded)
    ]
    return tuple(parts) if program.tower is None else _with_tower(program, parts)


def _parts(
    program: ResolvedProgram, forward: _Flops, products: ScoreProducts, unneeded: float = 1.0
) -> list[PartFlops]:
    """Return the parts of a step whose forward pass has these FLOPs per token."""
    tokens = program.batch.rows * program.batch.seq_len
    adapter = adapter_flops_by_part(program)
    recomputed = _recomputed(program, _sum(forward, adapter), products)
    return [
        PartFlops(
            name,
            model=flops * _passes(program, name) * tokens,
            adapter=3 * adapter.get(name, 0.0) * tokens,
            recomputed=recomputed.get(name, 0.0) * tokens,
            replicated_over=(axes := replicated_over(program, name)),
            replicas=program.mesh.size(axes),
            unneeded=unneeded if name == "MLP" else 1.0,
        )
        for name, flops in forward.items()
    ]


def _with_tower(program: ResolvedProgram, parts: list[PartFlops]) -> tuple[PartFlops, ...]:
    """Return the parts with those of the vision tower in them; its projection is part of MLPs.

    The patch embedding counts as the LM head of the tower's native model, and as an MLP here.
    """
    tower, of_tower = program.tower, tower_program(program)
    assert tower is not None and of_tower is not None
    forward = forward_flops_by_part(of_tower.model, round(tower.attended))
    forward["MLP"] += forward.pop("LM head")
    has_adapter = program.adapter is not None
    projected = step_flops_of_projection(tower, has_adapter=has_adapter) * of_tower.batch.rows
    # A third pass over what the adapter trains in full.
    trained = 1 + trained_fraction(tower) / 2 if tower.trained else 1.0
    more = {part.name: part for part in _parts(of_tower, forward, ALL_SCORES)}

    def added(part: PartFlops) -> PartFlops:
        if part.name not in more:
            return part
        other = more[part.name]
        of_blocks = other.model * (trained if part.name != "attention scores" else 1.0)
        model = part.model + of_blocks + projected * (part.name == "MLP")
        return replace(
            part,
            model=model,
            adapter=part.adapter + other.adapter,
            recomputed=part.recomputed + other.recomputed,
        )

    return tuple(map(added, parts))


def step_flops(program: ResolvedProgram, *, flash: bool, masked: bool = True) -> float:
    """Return the FLOPs of a step on all devices, including recomputation, without repetition.

    Arguments are those of flops_by_part().
    """
    return sum(part.ideal for part in flops_by_part(program, flash=flash, masked=masked))


def expected_excess(program: ResolvedProgram, *, flash: bool) -> float:
    """Return the FLOPs of a step over those of step_flops().

    They include what devices compute in vain, and the optimizer's products of matrices.
    Arithmetic for a step that is not compiled; compiled_excess() is the same of one that is.
    """
    parts = flops_by_part(program, flash=flash)
    computed = sum(part.computed for part in parts) + update_flops(program)
    return computed / sum(part.ideal for part in parts)


def compiled_excess(
    program: ResolvedProgram, compiled: float, *, flash: bool, bubble: float = 0.0
) -> float:
    """Return the compiled FLOPs of a device over its share of step_flops().

    Below 1 the program has kernels whose FLOPs are not known, or computes less than is expected.

    Args:
        program: the program.
        compiled: FLOPs of a device, read from the compiled program.
        flash: Whether attention is a kernel.
        bubble: Fraction of a pipeline's ticks in which a stage computes on padding.
    """
    expected = step_flops(program, flash=flash, masked=False) / program.target.devices
    return compiled * (1 - bubble) / expected


def replicated(parts: Sequence[PartFlops]) -> dict[tuple[str, ...], list[Part]]:
    """Return the parts that several devices repeat, by the mesh axes over which they do."""
    found: dict[tuple[str, ...], list[Part]] = {}
    for part in parts:
        if part.replicas > 1:
            found.setdefault(part.replicated_over, []).append(part.name)
    return found


def computes_all_experts(program: ResolvedProgram, *, is_serving: bool = False) -> str:
    """Return why a mixture computes experts that its tokens did not choose; empty if it does not.

    Args:
        program: the program, whose model may be imported.
        is_serving: whether the question is about decoding instead of the training step.
    """
    native = with_padding_layers(program)
    if native.model.moe is None:
        return ""
    if is_imported(program.model):
        if is_serving and program.target.platform == "cpu":
            return "decoding has too few choices for products of blocks of rows"
        return imported_step_computes_all_experts(native)
    return step_computes_all_experts(native)


def _passes(program: ResolvedProgram, name: Part) -> int:
    """Return the passes of a step over a part; each costs as much as the forward pass.

    Frozen weights have no gradients; a product of scores has no weights. DPO's reference model
    has one more forward pass.
    """
    has_weights = name != "attention scores"
    passes = 2 if program.adapter is not None and has_weights else 3
    return passes + (program.loss.kind == "dpo")


def replicated_over(program: ResolvedProgram, name: Part) -> tuple[str, ...]:
    """Return the mesh axes that split nothing of a part."""
    table = program.rules.activations
    splitting = {axis for array_axis in _DIVIDES[name] for axis in table.get(array_axis, ())}
    return tuple(
        axis for axis, size in program.mesh.axes.items() if size > 1 and axis not in splitting
    )


def _computed_experts(program: ResolvedProgram) -> float:
    """Return the operations of a mixture's MLPs over those of the experts that tokens chose.

    A native mixture that computes all experts multiplies each choice by all of them, an imported
    one each token. With a capacity, an expert computes all of its slots, filled or not.
    """
    native = with_padding_layers(program)
    model, mixture = native.model, native.model.moe
    if mixture is None:
        return 1.0
    computed = 1.0
    if mixture.capacity_factor is not None and not is_imported(program.model):
        choices = native.batch.seq_len * mixture.experts_per_token
        slots = math.ceil(mixture.capacity_factor * choices / mixture.experts)
        computed = slots * mixture.experts / choices
    elif computes_all_experts(program):
        by_token = is_imported(program.model)
        computed = mixture.experts / (mixture.experts_per_token if by_token else 1)
    mlp = 3 * forward_flops_by_part(model, native.batch.seq_len)["MLP"]
    return 1 + (computed - 1) * expert_flops_per_token(model) / mlp


def _recomputed(program: ResolvedProgram, forward: _Flops, products: ScoreProducts) -> _Flops:
    """Return the operations per token that the backward pass recomputes, by part.

    Pipeline stages are recomputed from their input, and then by their own remat policy: with
    "full" this computes layers a third time, unless each is a stage of its own. Kernels and rings
    compute scores again whatever the policy is.

    Args:
        program: the program.
        forward: operations of the forward pass per token, by part.
        products: Products of attention.
    """
    model = program.model
    layers: _Flops = {name: flops for name, flops in forward.items() if name != "LM head"}
    scores: _Flops = {"attention scores": forward["attention scores"]}
    by_policy = scores
    if model.remat in ("none", "full"):
        by_policy = layers if model.remat == "full" else {}
    if products.recomputed is not None:
        again: _Flops = {"attention scores": products.recomputed * forward["attention scores"]}
        by_policy = _sum(again, layers) if model.remat == "full" else again
    in_stages = program.mesh.axes.get("stage", 1) > 1
    if in_stages and program.pipeline.recomputes_stages(model.remat):
        is_repeated = model.remat != "full" or Passes.of(program).recomputes_layers
        return _sum(layers, by_policy) if is_repeated else by_policy
    return by_policy


def _sum(one: _Flops, other: _Flops) -> _Flops:
    both = (*one, *other)
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in dict.fromkeys(both)}
