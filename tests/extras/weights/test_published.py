"""Folders as transformers publishes and saves them: experts one by one, buffers, other names."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from graphtrain.config.schema import TorchModel
from graphtrain.errors import WeightsError
from graphtrain.torch_frontend.model import OpenedModel
from graphtrain.torch_frontend.module_factory import factory
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import stack_weights, unstack_weights
from graphtrain.weights.imported_folder import HuggingFaceWeights
from graphtrain.weights.published import SavedTensors
from graphtrain.weights.torch_modules import stored_buffers
from lowering.trees import flatten, unflatten

VOCAB = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
CONFIGS = {
    # A buffer by which experts are chosen; dense layers first; a shared expert.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES,
        **LATENT,
        v_head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    # Experts under other names in folders than in the module, and a router that is renamed.
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, num_local_experts=3),
    # Tied weights whose name in folders is not the first in the module; a module that is not used.
    "camembert": lambda: transformers.CamembertConfig(
        **{name: SIZES[name] for name in SIZES if name in vars(transformers.CamembertConfig())},
        is_decoder=True,
        add_cross_attention=True,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def saved(request, tmp_path_factory):
    """A folder of save_pretrained, its model as a program opens it, and the module."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    CONFIGS[request.param]().save_pretrained(folder)
    model = TorchModel(hf=str(folder), vocab=VOCAB, dtype="float32", remat="none")
    module = factory(model)()
    with torch.no_grad():
        for parameter in module.parameters():  # among them what are buffers in transformers
            parameter.add_(0.1 * torch.randn_like(parameter))
    module.save_pretrained(folder)
    return folder, model, module


def values(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: one.detach().numpy() for name, one in module.named_parameters()}


def read(model: TorchModel, folder, opened: OpenedModel) -> dict[str, np.ndarray]:
    described = {path: SimpleNamespace(shape=spec.shape) for path, spec in opened.specs().items()}

    def fill(tree, part):
        return unflatten(
            {
                path: part(path, one.shape, (slice(None),) * len(one.shape))
                for path, one in flatten(tree).items()
            }
        )

    return flatten(HuggingFaceWeights(folder, model).parameters(unflatten(described), fill))


def test_a_saved_folder_is_read_and_written_bit_for_bit(saved):
    folder, model, module = saved
    opened = open_model(model)
    found = read(model, folder, opened)
    for path, array in stack_weights(opened, values(module)).items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)

    arrays = unstack_weights(opened, found) | stored_buffers(opened.meta)
    shapes = {name: one.shape for name, one in arrays.items()}
    tensors, written = SavedTensors(opened.meta.module, shapes), {}
    for name, array in arrays.items():
        written |= dict(tensors.add(name, array))
    expected = load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)


def test_a_tensor_that_nothing_reads_is_refused_by_name(saved, tmp_path):
    folder, model, _ = saved
    extra = {"model.layers.0.mlp.surprise": np.ones(3, np.float32)}
    save_file(load_file(folder / "model.safetensors") | extra, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"contains model\.layers\.0\.mlp\.surprise, which"):
        read(model, tmp_path, open_model(model))


@pytest.mark.parametrize("saved", ["deepseek_v3"], indirect=True)
def test_a_missing_buffer_is_named(saved, tmp_path):
    folder, model, _ = saved
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.2.mlp.gate.e_score_correction_bias")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"does not contain .*e_score_correction_bias"):
        read(model, tmp_path, open_model(model))


def test_a_table_of_integers_must_be_that_of_the_module(tmp_path):
    modules = Path(__file__).parents[1] / "torch_models/modules.py"
    model = TorchModel(torch=f"{modules}:HashRouted", vocab=16, dtype="float32", remat="none")
    tensors = {name: tensor.numpy() for name, tensor in factory(model)().state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    opened = open_model(model)
    np.testing.assert_array_equal(
        read(model, tmp_path, opened)["head/weight"], tensors["head.weight"]
    )
    tensors["experts"][3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="experts"):
        read(model, tmp_path, opened)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model, tensors = TorchModel(hf=str(tmp_path)), load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    opened = open_model(model)
    assert "lm_head/weight" not in read(model, tmp_path, opened)
    save_file(tensors | {"lm_head.weight": head + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight that differs from model\.embed_tok"):
        read(model, tmp_path, opened)


@pytest.mark.parametrize("saved", ["deepseek_v3"], indirect=True)
@pytest.mark.parametrize("name", ["gate.e_score_correction_bias", "experts.2.up_proj.weight"])
def test_values_that_are_not_finite_are_refused_by_name(saved, name, tmp_path):
    folder, model, _ = saved
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.2.mlp.{name}"].ravel()[1] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    own = name.replace("2.up_proj.weight", "gate_up_proj")
    told = rf"1 of [\d,]+ values of model\.layers\.2\.mlp\.{own} are NaN or infinite"
    with pytest.raises(WeightsError, match=told):
        read(model, tmp_path, open_model(model))


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_a_mask_that_the_module_itself_makes_infinite_is_read(value, tmp_path):
    modules = Path(__file__).parents[1] / "torch_models/modules.py"
    model = TorchModel(torch=f"{modules}:MaskedLogits", vocab=16, dtype="float32", remat="none")
    opened = open_model(model)
    tensors = values(factory(model)())
    tensors["mask"][3] = value
    save_file(tensors, tmp_path / "model.safetensors")
    if np.isnan(value):
        with pytest.raises(WeightsError, match="1 of 16 values of mask are NaN or infinite"):
            read(model, tmp_path, opened)
    else:
        assert read(model, tmp_path, opened)["mask"][3] == value
