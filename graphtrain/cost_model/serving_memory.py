"""Memory of the programs that serve, by arithmetic: what they hold beside weights and state.

The terms were found in the buffers of programs compiled for cpu:1, cpu:8, h100:1, h100:8 and
v5e:2x2 (tests/graphs/test_serving_estimates.py compares them).
"""

from __future__ import annotations

import math

from graphtrain.config.schema.types import item_bytes
from graphtrain.config.serving_program import batch_shards, packed_rows
from graphtrain.cost_model.served_sizes import ServedSizes, vocab_weights
from graphtrain.models.flops import is_gated
from graphtrain.models.grouped_matmul_support import step_computes_all_experts
from graphtrain.models.matmul_support import converts_weights
from lowering.machine.target import TPU_LANES

# Float32 arrays of logits that exist at once: where a token is chosen, and where scores are.
_CHOICE_LOGITS = {"cpu": 7, "cuda": 3, "rocm": 3}
_FEWEST_LOGITS = 2
_TARGETS = 8  # of each row whose logits score_rows computes at once, see graphs.row_scores
_PACKED_TARGETS = 32  # of all rows in score_packed, see graphs.packed_scores
_WORKSPACE = 4 << 20  # of cuBLAS
_COPIED = 16 << 20  # XLA for GPUs copies weights for products of one row, up to about this size
_VMEM = 128 << 20  # of a TPU; the compiler's peak counts what it keeps there
_USED_VMEM = 0.75
_CACHE_COPIES = {"decode": 1.75, "decode_one": 2.65}  # on a TPU, sizes of the cache


def temporaries(model: ServedSizes, graph: str) -> int:
    """Estimate the bytes that a program holds on a device beside weights and state.

    Args:
        model: the served model.
        graph: name of the program, as in graphs.names.graphs_for.
    """
    kind, _, size = graph.rpartition("_")
    if graph == "copy_prefix":
        return max(model.kv_bytes_by_layer)
    if kind == "score":
        scores = _scores(model, int(size), int(size)) + model.kv_bytes_per_slot
        return round(scores + _workspace(model))
    if kind == "score_rows":
        rows = model.slots_of_device
        scores = _scores(model, rows * int(size), rows * _TARGETS, rows)
        head = _matrix_in_float32(model, "vocab", rows * _TARGETS)
        return round(scores + head + _workspace(model))
    if kind == "score_packed":
        all_rows = packed_rows(model.program)
        rows = min(all_rows, model.slots_of_device)
        targets = rows * max(1, _PACKED_TARGETS // all_rows)
        scores = _scores(model, rows * int(size), targets, rows, keys=int(size))
        return round(scores + _matrix_in_float32(model, "vocab", targets) + _workspace(model))
    tokens = int(size) if kind in ("prefill", "first_prefill") else 1
    serve, shards = model.program.settings.serve, batch_shards(model.program)
    inherited = 0  # by beams, from the slots of their parents
    rows = model.slots_of_device if graph == "decode" else 1
    if graph == "decode_beams":
        rows = serve.beams if shards == 1 else model.slots_of_device
        inherited = rows * model.kv_bytes_per_slot
    in_loop = graph in ("decode", "decode_one")
    choice = 4 * rows * model.program.model.vocab * _choice_logits(model)
    total = inherited + choice + _copies(model, graph, rows) + _gathered(model, hoisted=in_loop)
    if kind == "first_prefill":  # copies a layer, and reads the caches of its slot
        total += _layer_weights(model) + 2 * model.kv_bytes_per_slot
    in_float32 = _head_in_float32(model, rows, in_loop), _layer_in_float32(model, rows * tokens)
    return round(total + max(_layer(model, tokens), *in_float32, _converted(model, rows * tokens)))


def loading(model: ServedSizes, parameter_bytes: int) -> int:
    """Estimate the peak of a device while the weights are cast: parameters, weights and state.

    Args:
        model: the served model.
        parameter_bytes: Bytes of a device's parameters as they are stored, in float32.
    """
    return parameter_bytes + model.resident_bytes


def _layer_weights(model: ServedSizes) -> int:
    """Return the bytes of the weights of a layer."""
    in_layers = [
        each.stored_bytes for each in model.weights if each.path.startswith("weights/layers/")
    ]
    return sum(in_layers) // model.native.model.layers


def _choice_logits(model: ServedSizes) -> int:
    return _CHOICE_LOGITS.get(model.program.target.platform, _FEWEST_LOGITS)


def _scores(model: ServedSizes, tokens: int, targets: int, rows: int = 1, keys: int = 0) -> float:
    """Return the bytes of a program that returns the log-probabilities of given tokens.

    Args:
        model: the served model.
        tokens: number of tokens that it processes.
        targets: number of tokens whose logits it computes at once.
        rows: number of sequences of a device.
        keys: number of keys of the row itself that attention reads at once.
    """
    platform, vocab = model.program.target.platform, model.program.model.vocab
    shards = model.mesh.size(model.program.rules.activations.get("vocab", ()))
    # XLA gathers split logits: for CPUs all of them, for GPUs one array more.
    shards = 1 if platform == "cpu" else shards
    arrays = _FEWEST_LOGITS + (shards > 1 and platform != "tpu")
    # Sums of integers, before they are scaled.
    arrays += platform == "cpu" and any(each.is_int8 for each in vocab_weights(model.weights))
    logits = 4 * targets * vocab / shards * arrays
    in_layers = max(_layer(model, tokens, rows, keys), _layer_in_float32(model, tokens))
    return max(logits, in_layers + _experts(model) + _gathered(model, hoisted=False))


def _layer(model: ServedSizes, tokens: int, rows: int = 1, keys: int = 0) -> float:
    """Return the bytes of the largest layer's activations: hidden values and scores."""
    settings, rules = model.native.model, model.program.rules.activations
    if model.program.target.platform == "tpu":  # in VMEM
        return 0.0
    on_cpu, item = model.program.target.platform == "cpu", _item(model)
    hidden = tokens * settings.mlp / model.mesh.size(rules.get("mlp", ())) * item
    keys = max(keys, model.cache_layout.block if on_cpu else model.cached_positions)
    heads = settings.heads / model.mesh.size(rules.get("heads", ()))
    scores = tokens * heads * keys * (12 if on_cpu else 4 + item)
    hidden *= 3 if is_gated(settings) else 2
    # XLA:CPU reuses the memory of one for the other if there are several sequences.
    return max(hidden, scores) if on_cpu and rows > 1 else hidden + scores


def _layer_in_float32(model: ServedSizes, rows: int) -> float:
    """Return the bytes of an MLP and its largest matrix in float32, for many rows on a CPU."""
    converted = _matrix_in_float32(model, "mlp", rows)
    if not converted:
        return 0.0
    settings, split = model.native.model, model.program.rules.activations.get("mlp", ())
    hidden = rows * settings.mlp / model.mesh.size(split) * _item(model)
    return hidden * (3 if is_gated(settings) else 2) + converted


def _matrix_in_float32(model: ServedSizes, axis: str, rows: int) -> float:
    """Return the bytes of the largest matrix with an axis, converted for products of many rows.

    Outside of loops, XLA:CPU converts the LM head inside of its product, block by block.
    """
    if model.program.target.platform != "cpu" or not converts_weights(rows):
        return 0.0
    matrices = (
        each.used_bytes * 2
        for each in model.weights
        if each.spec.dtype == "bfloat16"
        and axis in each.spec.axes
        and "experts" not in each.spec.axes
    )
    return max(matrices, default=0)


def _head_in_float32(model: ServedSizes, rows: int, in_loop: bool) -> float:
    """Return the bytes of a copy of the LM head for products of one row on GPUs.

    XLA multiplies and sums elements there, and stores the head in float32. In the loop of a program
    whose vocabulary is split, the embedding is gathered instead: its lookup has one row too.
    """
    platform = model.program.target.platform
    if platform not in ("cuda", "rocm") or rows > 1:
        return 0.0
    head = vocab_weights(model.weights)[-1]
    if head.is_gathered:
        return 0.0
    shards = model.mesh.size(model.program.rules.activations.get("vocab", ()))
    if shards > 1 and in_loop:
        return head.used_bytes * shards
    return math.prod(head.spec.shape) / shards * 4


def _converted(model: ServedSizes, rows: int) -> float:
    """Return the bytes of the largest int8 matrix in the dtype in which GPUs multiply it.

    XLA converts it before the product, except for one row, which it multiplies and sums.
    """
    if not model.program.target.is_gpu or rows == 1:
        return 0.0
    codes = (each.used_bytes for each in model.weights if each.is_int8)
    return max(codes, default=0) * _item(model)


def _workspace(model: ServedSizes) -> int:
    return _WORKSPACE if model.program.target.is_gpu else 0


def _copies(model: ServedSizes, graph: str, rows: int) -> float:
    """Return the bytes of weights and of KV cache that a program copies."""
    platform, kv_cache = model.program.target.platform, model.kv_cache_bytes
    if platform == "cpu":
        output = sum(_size(model, "attention/output")) if graph == "decode_one" else 0
        return output + _experts(model)
    if platform == "tpu":
        in_vmem = _USED_VMEM * min(_VMEM, model.weights_bytes)
        # Heads that do not fill a row have no kernel, and the cache is copied to other layouts.
        is_padded = (model.native.model.head_dim or 0) % TPU_LANES > 0
        return max(_CACHE_COPIES.get(graph, 0.0) * kv_cache * is_padded, in_vmem)
    if platform not in ("cuda", "rocm"):
        return 0.0
    copied = _workspace(model)
    if graph == "decode_one" and rows == 1:
        names = ("attention/key", "attention/value", "attention/output")
        copied += sum(size for name in names for size in _size(model, name) if size <= _COPIED)
    return copied


def _experts(model: ServedSizes) -> float:
    """Return the bytes of the experts' weights on a CPU, which XLA transposes."""
    if model.program.target.platform != "cpu" or not step_computes_all_experts(model.native):
        return 0.0
    return sum(each.used_bytes for each in model.weights if "experts" in each.spec.axes)


def _gathered(model: ServedSizes, *, hoisted: bool) -> float:
    """Return the bytes of weights that are gathered from shards.

    XLA gathers all of them before a loop over tokens, and elsewhere some at a time. For CPUs it
    gathers in float32.
    """
    gathered = [each for each in model.weights if each.is_gathered]
    if not gathered:
        return 0.0
    in_float32 = model.program.target.platform == "cpu"
    sizes = {
        each.path: each.used_bytes * (2 if in_float32 and each.spec.dtype == "bfloat16" else 1)
        for each in gathered
    }
    if hoisted:
        return sum(sizes.values())
    in_layers = [sizes[each.path] for each in gathered if "vocab" not in each.spec.axes]
    largest = max(gathered, key=lambda each: each.used_bytes)
    beside = largest.stored_bytes if in_float32 else max(in_layers, default=0)
    return sizes[largest.path] + beside


def _size(model: ServedSizes, name: str) -> list[int]:
    """Return the bytes of a weight of the native decoder in each layer; none if imported."""
    return [each.used_bytes for each in model.weights if f"layers/{name}/" in f"{each.path}/"]


def _item(model: ServedSizes) -> int:
    return item_bytes(model.program.model.dtype)
