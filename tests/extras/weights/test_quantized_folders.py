"""Folders of DeepSeek-V3 in FP8 and gpt-oss in MXFP4, as published: read, trained, exported.

transformers dequantizes the same files and is the reference.
"""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
import transformers
from family_checks.tiny import tiny_config
from quantized_folders import quantize, quantize_deepseek_v4
from safetensors.torch import load_file
from transformers.integrations import finegrained_fp8, mxfp4

from graphtrain.config.schema import TorchModel
from graphtrain.errors import WeightsError
from graphtrain.models.shapes import parameter_arrays
from graphtrain.torch_frontend.module_factory import factory
from graphtrain.torch_frontend.open_module import open_model
from graphtrain.torch_frontend.parity import UNOPTIMIZED, stack_weights
from graphtrain.weights.hf_export import export_hugging_face
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.imported_folder import HuggingFaceWeights
from graphtrain.weights.open import open_weights
from graphtrain.weights.quantized_files import open_hugging_face
from lowering.trees import flatten, unflatten

VOCAB = 40
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
CONFIGS = {
    "fp8": lambda: transformers.DeepseekV3Config(
        **SIZES,
        **LATENT,
        v_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
    ),
    "mxfp4": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=3, num_experts_per_tok=2, sliding_window=8
    ),
}
RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module", params=CONFIGS)
def published(request, tmp_path_factory):
    """A quantized folder, that which transformers saves of it, and its model."""
    method, path = request.param, tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    CONFIGS[method]().save_pretrained(path / "quantized")
    model = TorchModel(hf=str(path / "quantized"), vocab=VOCAB, dtype="float32", remat="none")
    module = factory(model)()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
            if not name.endswith("e_score_correction_bias"):
                parameter.data = parameter.data.bfloat16()
    module.save_pretrained(path / "quantized")
    quantize(path / "quantized", method)
    kinds = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        path / "quantized", quantization_config=kinds[method](dequantize=True), dtype="auto"
    )
    loaded.hf_quantizer = None
    loaded.save_pretrained(path / "dequantized")
    return path, model, loaded


def read(model, folder):
    described = {
        path: SimpleNamespace(shape=spec.shape) for path, spec in open_model(model).specs().items()
    }

    def fill(tree, part):
        return unflatten(
            {
                path: part(path, one.shape, (slice(None),) * len(one.shape))
                for path, one in flatten(tree).items()
            }
        )

    return flatten(HuggingFaceWeights(folder, model).parameters(unflatten(described), fill))


def test_an_imported_model_starts_with_the_weights_and_logits_of_transformers(published):
    path, model, loaded = published
    found, opened = read(model, path / "quantized"), open_model(model)
    values = {name: one.detach().float().numpy() for name, one in loaded.state_dict().items()}
    for name, array in stack_weights(opened, values).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    tokens = RANDOM.integers(0, VOCAB, (2, 16), np.int32)
    forward = jax.jit(lambda arrays: opened.forward(unflatten(arrays), tokens, None)[0])
    ours = forward.lower(found).compile(UNOPTIMIZED)(found)
    with torch.no_grad():
        theirs = loaded.float().eval()(torch.from_numpy(tokens).long()).logits.numpy()
    assert np.abs(np.asarray(ours) - theirs).max() < 1e-5 * np.abs(theirs).max()


def test_a_converted_folder_and_its_export_have_the_dequantized_weights(published, tmp_path):
    source, *_ = published
    for name in ("quantized", "dequantized"):
        import_hugging_face(source / name, tmp_path / name, lambda done, count: None)
    ours, expected = (open_weights(tmp_path / name) for name in ("quantized", "dequantized"))
    for path in parameter_arrays(expected.model):
        for layer in range(expected.model.layers) if path.startswith("layers/") else [None]:
            first, second = (one.read([path], layer)[0] for one in (ours, expected))
            np.testing.assert_array_equal(first.astype("f4"), second.astype("f4"), err_msg=path)

    export_hugging_face(tmp_path / "quantized", tmp_path / "back", lambda done, count: None)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    back, whole = (
        load_file(one / "model.safetensors") for one in (tmp_path / "back", source / "dequantized")
    )
    assert back.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(back[name].float(), tensor.float()), name
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_values_are_those_of_the_functions_of_transformers(published, tmp_path):
    path, *_ = published
    stored, files = (
        load_file(path / "quantized/model.safetensors"),
        open_hugging_face(path / "quantized"),
    )
    compared = 0
    for name, tensor in stored.items():
        if (scales := stored.get(f"{name}_scale_inv")) is not None:
            theirs = finegrained_fp8.Fp8Dequantize(None)._dequantize_one(
                tensor, scales, torch.bfloat16
            )
        elif name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            theirs = mxfp4.convert_moe_packed_tensors(tensor, stored[f"{name}_scales"])
        else:
            continue
        compared += 1
        ours = torch.from_numpy(files.read(name).view(np.int16)).view(torch.bfloat16)
        assert torch.equal(ours, theirs), name
    assert compared >= 4


def test_deepseek_v4_with_experts_in_fp4_has_the_weights_of_transformers(tmp_path):
    config = json.loads(tiny_config("deepseek_v4")) | {"dtype": "bfloat16"}
    config |= {"moe_intermediate_size": 32, "o_lora_rank": 16, "num_hidden_layers": 2}
    config |= {name: config[name][:2] for name in ("layer_types", "mlp_layer_types")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = TorchModel(hf=str(tmp_path), vocab=config["vocab_size"], dtype="float32", remat="none")
    torch.manual_seed(0)
    factory(model)().bfloat16().save_pretrained(tmp_path)
    quantize_deepseek_v4(tmp_path)
    dequantize = transformers.FineGrainedFP8Config(
        dequantize=True, expert_dtype="fp4", scale_fmt="ue8m0"
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=dequantize, dtype="auto"
    )
    values = {name: one.detach().float().numpy() for name, one in loaded.state_dict().items()}
    found = read(model, tmp_path)
    for name, array in stack_weights(open_model(model), values).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_model_with_another_quantization_is_refused_by_name(published, tmp_path):
    path, *_ = published
    config = json.loads((path / "quantized/config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    shutil.copytree(path / "quantized", tmp_path / "other")
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    told = "quant_method = 'gptq' is not supported"
    with pytest.raises(WeightsError, match=told):
        import_hugging_face(tmp_path / "other", tmp_path / "ours", lambda done, count: None)
    with pytest.raises(WeightsError, match=told):
        HuggingFaceWeights(tmp_path / "other")
    with pytest.raises(WeightsError, match=told):
        factory(TorchModel(hf=str(tmp_path / "other"), vocab=VOCAB))()
