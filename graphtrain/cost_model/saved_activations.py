"""Memory of activations that the forward pass saves for the backward pass, by arithmetic."""

from __future__ import annotations

from dataclasses import replace

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import scored_layers
from graphtrain.cost_model.mixture_memory import ExpertSizes
from graphtrain.cost_model.pipeline_memory import saved_in_stage
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.models.attention.kernel_support import step_uses_flash_kernel
from graphtrain.models.flops import is_gated


def saved_by_layers(program: ResolvedProgram) -> float:
    """Return the bytes of activations that a device's layers save of one microbatch."""
    sizes, flash = DeviceSizes.of(program), step_uses_flash_kernel(program)
    blocks = sizes.layers * program.model.layers / program.model.depth
    dense = _saved_per_layer(program, replace(sizes, mlp=sizes.dense_mlp), flash)
    return blocks * _saved_by_block(program, sizes, flash) + (sizes.layers - blocks) * dense


def saved_activations(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes of activations that the forward pass saves for the backward pass.

    A pipeline stage saves the input of every tick (1F1B: those that wait, and that of the tick) and
    recomputes one chunk at a time; a stage that is not recomputed saves the activations of all
    chunks.
    """
    if program.mesh.axes.get("stage", 1) == 1:
        layers = program.model.layers * _saved_by_block(program, sizes, flash)
        return layers + _saved_in_dense_layers(program, sizes, flash)
    return saved_in_front(program, sizes, flash) + saved_in_ticks(program, sizes, flash)


def saved_in_front(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes that layers in front of the stages save.

    Such layers, for example dense layers before a mixture, run through all microbatches of a stage
    before its first tick, and through their backward pass after the last.
    """
    in_dense_layers = _saved_in_dense_layers(program, sizes, flash)
    outside = program.layers_outside * _embedded_microbatches(program)
    return in_dense_layers + outside * _saved_by_block(program, sizes, flash)


def saved_in_ticks(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes that a stage saves in its ticks."""
    outside, rounds = program.layers_outside, program.pipeline.virtual_stages
    own_layers = sizes.layers * program.model.layers / program.model.depth
    own_layers -= -(-outside // rounds) * rounds  # with_padding_layers has as many for each chunk
    return saved_in_stage(program, sizes, own_layers, _saved_by_block(program, sizes, flash))


def _embedded_microbatches(program: ResolvedProgram) -> float:
    """Return the number of microbatches that a device embeds at once."""
    stages = program.mesh.axes.get("stage", 1)
    return program.batch.microbatches / stages if stages > 1 else 1


def _saved_in_dense_layers(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes that dense layers save, of all microbatches that a stage embeds."""
    one = _saved_per_layer(program, replace(sizes, mlp=sizes.dense_mlp), flash)
    return program.model.dense_layers * _embedded_microbatches(program) * one


def _saved_by_block(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes that a block saves: a layer with an MLP or, of a mixture, with experts."""
    experts = ExpertSizes.of(program, sizes.sequences, sizes.seq_in_block)
    if experts is None:
        return _saved_per_layer(program, sizes, flash)
    around = _saved_per_layer(program, replace(sizes, mlp=sizes.shared), flash)
    return around + experts.saved(program.model.remat)


def _saved_per_layer(program: ResolvedProgram, sizes: DeviceSizes, flash: bool) -> float:
    """Return the bytes that the forward pass of a layer saves for its backward pass."""
    model = program.model
    assert model.head_dim
    tokens, inside = sizes.sequences * sizes.seq_residual, sizes.sequences * sizes.seq_in_block
    stream = tokens * model.embed * sizes.item_bytes
    hidden = inside * sizes.mlp * sizes.item_bytes * (2 if is_gated(model) else 1)
    # Native models save the heads of a token side by side, without padding.
    is_merged = model.remat == "dots" and not program.stands_for_imported
    head_dim = model.head_dim if is_merged else sizes.head_dim
    heads = inside * (sizes.heads + 2 * sizes.kv_heads) * head_dim * sizes.item_bytes
    products = heads + hidden + 2 * stream
    if flash:
        attention_output = inside * sizes.heads * (head_dim * sizes.item_bytes + 4)
        return _saved_with_kernel(program, stream, hidden, heads, attention_output)
    scores = sizes.sequences * sizes.heads * sizes.seq_in_block * sizes.kv_positions * 4
    scores *= scored_layers(model)  # the mean of all layers
    if program.target.platform == "cpu":  # computed again: models/attention/blockwise.py
        scores = 0
    normed = stream * (2 if model.post_norm else 0) + heads * model.qk_norm
    everything = 2 * products + 2 * stream + normed
    return {
        "full": stream,
        "offload": stream,
        "dots": stream + products,
        "attention": everything,
        "none": everything + (3 if model.attn_logit_softcap else 2) * scores,
    }[model.remat]


def _saved_with_kernel(
    program: ResolvedProgram, stream: float, hidden: float, heads: float, attention_output: float
) -> float:
    """Return the bytes that a layer saves where attention is a kernel.

    The kernel saves its output and a log-sum-exp for each row of scores. XLA does not save the
    MLP's last product, which is only part of the next layer's input. Without recomputation it saves
    six values of the residual stream in float32, and each hidden value three times (read from a
    program compiled for h100:8).
    """
    streams = (4 if program.model.post_norm else 2) * stream
    normed = heads * program.model.qk_norm
    everything = 6 * 2 * stream + 3 * hidden + streams + heads + normed + attention_output
    return {
        "full": stream,
        "offload": stream,
        "dots": streams + heads + hidden + attention_output,
        "attention": everything,
        "none": everything,
    }[program.model.remat]
