"""The module of multi-token prediction has the loss and gradients of that of transformers."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_families import (
    DEEPSEEK,
    TOKENS,
    VOCAB,
    assert_close,
    checkpoint_names,
    loads_of_experts,
    quiet,
    randomised,
    stacked,
)
from transformers.modeling_layers import MtpLayer

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Program
from graphtrain.graphs.objectives import token_losses
from graphtrain.graphs.targets_ahead import with_targets_ahead
from graphtrain.models.decoder import parameter_specs
from graphtrain.weights.families import family_of_config
from graphtrain.weights.families.family import to_decoder
from graphtrain.weights.hf_export import export_hugging_face
from graphtrain.weights.hf_files import read_config
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.sources import ConvertedFolder
from lowering.trees import flatten

LAYERS, WEIGHT = DEEPSEEK["num_hidden_layers"], 0.3
RENAMED = {"mtp_block.": "", "post_norm.": "shared_head.norm."}  # names of checkpoints
BATCH, LENGTH = TOKENS.shape
TARGETS = np.roll(TOKENS, -1, 1)  # the last of each is any token


def module_name(name: str) -> str:
    for theirs, stored in RENAMED.items():
        name = name.removeprefix(theirs) if not stored else name.replace(theirs, stored)
    return f"model.layers.{LAYERS}.{name}"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The model, its module, and a folder with both."""
    config = transformers.DeepseekV3Config(**DEEPSEEK | {"num_mtp_layers": 1})
    model = randomised(transformers.AutoModelForCausalLM.from_config(config))
    layer, norm = model.model.layers[-1], model.model.norm
    module = randomised(MtpLayer(config, type(layer), type(norm), LAYERS))
    folder = tmp_path_factory.mktemp("folder")
    model.save_pretrained(folder)
    assert_none_without_module(folder)
    tensors = load_file(folder / "model.safetensors") | checkpoint_tensors(module)
    save_file(tensors, folder / "model.safetensors")
    return model.double(), module.double(), folder


def assert_none_without_module(folder: Path) -> None:
    """transformers saves the number of modules, and no weights of them."""
    assert read_config(folder)["num_nextn_predict_layers"] == 1
    import_hugging_face(folder, folder / "ours", quiet)
    assert ConvertedFolder(folder / "ours").model.mtp_loss_weight is None


def checkpoint_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's tensors by the names of checkpoints, experts one by one."""
    named = {}
    for name, tensor in module.state_dict().items():
        block, _, kind = name.rpartition(".experts.")
        if not block:
            named[module_name(name)] = tensor.float().clone()
            continue
        names = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        for expert, array in enumerate(tensor):
            for part, matrix in zip(names, array.chunk(len(names)), strict=True):
                at = module_name(f"{block}.experts.{expert}.{part}.weight")
                named[at] = matrix.float().clone()
    return named


def loss_of(model, module) -> tuple[torch.Tensor, torch.Tensor]:
    """Both losses, each divided by the number of next tokens."""
    tokens, targets = torch.tensor(TOKENS), torch.tensor(TARGETS)
    hidden = model.model(tokens, use_cache=False).last_hidden_state
    positions = torch.arange(LENGTH)[None]
    mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
    ahead = module(
        model.model.embed_tokens(targets),
        hidden,
        position_embeddings=model.model.rotary_emb(hidden, position_ids=positions),
        attention_mask=mask[None, None],
        position_ids=positions,
        cache=None,
    )
    entropy = torch.nn.functional.cross_entropy
    of_next = entropy(model.lm_head(hidden).reshape(-1, VOCAB), targets.ravel())
    logits, later = model.lm_head(ahead)[:, :-1], targets[:, 1:]
    of_later = entropy(logits.reshape(-1, VOCAB), later.ravel(), reduction="sum") / targets.numel()
    return of_next, of_later


def test_loss_and_gradients_equal_those_of_transformers(reference, tmp_path):
    model, module, folder = reference
    loads = loads_of_experts(model)
    of_module = loads_of_experts(module)
    of_next, of_later = loss_of(model, module)
    (of_next + WEIGHT * of_later).backward()
    gradients = checkpoint_names(model) | loads
    gradients |= {module_name(name): value for name, value in checkpoint_names(module).items()}
    gradients |= {module_name(name): value for name, value in of_module.items()}

    import_hugging_face(folder, tmp_path / "ours", quiet)
    converted = ConvertedFolder(tmp_path / "ours")
    settings = replace(converted.model, dtype="float32", mtp_loss_weight=WEIGHT)
    batch = Batch(global_batch_size=BATCH, seq_len=LENGTH)
    program = resolve(Program(target="cpu:1", model=settings, batch=batch))
    inputs = {
        "tokens": jnp.array(TOKENS),
        "targets": jnp.array(TARGETS),
        "weights": jnp.ones(TOKENS.shape),
    }
    inputs = with_targets_ahead(program, inputs)

    @jax.jit
    @jax.value_and_grad
    def objective(parameters):
        (value, _), _ = token_losses(program, parameters, inputs, total=float(TOKENS.size))
        return value

    got, got_gradients = objective(stacked(converted))
    np.testing.assert_allclose(got, (of_next + WEIGHT * of_later).item(), rtol=1e-5)
    family = family_of_config(read_config(folder))
    want: dict[str, list[np.ndarray]] = {}
    for piece in family.weights(converted.model):
        tensors = [gradients[name] for name in piece.names]
        for path, array in zip(
            piece.row.paths, to_decoder(piece, tensors, converted.model), strict=True
        ):
            want.setdefault(path, []).append(array)
    assert jax.tree.structure(got_gradients) == jax.tree.structure(parameter_specs(settings))
    for path, array in flatten(got_gradients).items():
        stack = np.stack(want[path]) if path.startswith("layers/") else want[path][0]
        assert_close(array, stack, path)

    export_hugging_face(tmp_path / "ours", tmp_path / "back", quiet)
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (folder / "config.json").read_text() == (tmp_path / "back" / "config.json").read_text()
