"""Files of NeMo's ranks give the same weights as the checkpoint of Megatron that they divide."""

from operator import attrgetter
from pathlib import Path

import pytest
import torch
import yaml

from graphtrain.errors import WeightsError
from graphtrain.weights.megatron.arguments import model_from_arguments
from graphtrain.weights.megatron.convert import from_megatron
from graphtrain.weights.megatron.nemo import read_nemo_config
from graphtrain.weights.weight_folder import open_weight_files

# As in NeMo's examples/nlp/language_modeling/conf/megatron_llama_config.yaml.
CONFIG = {
    "mcore_gpt": True,
    "encoder_seq_length": 16,
    "max_position_embeddings": "${.encoder_seq_length}",
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "kv_channels": None,
    "normalization": "rmsnorm",
    "layernorm_epsilon": 1e-6,
    "bias": False,
    "activation": "fast-swiglu",
    "transformer_block_type": "pre_ln",
    "normalize_attention_scores": True,
    "position_embedding_type": "rope",
    "rotary_percentage": 1.0,
    "share_embeddings_and_output_weights": False,
    "num_query_groups": None,
    "tokenizer": {"library": "megatron", "model": "${model.restore_from_path}"},
}
LEGACY = (
    ("embedding.", "language_model.embedding."),
    ("output_layer.", "language_model.output_layer."),
    ("decoder.", "language_model.encoder."),
    ("linear_qkv", "query_key_value"),
    ("linear_proj", "dense"),
    ("linear_fc1", "dense_h_to_4h"),
    ("linear_fc2", "dense_4h_to_h"),
    ("pre_mlp_layernorm", "post_attention_layernorm"),
)


def quiet(done: int, count: int) -> None:
    """Show nothing."""


def whole() -> dict[str, torch.Tensor]:
    """The weights of the model without ranks, by the names of megatron-core."""
    random = torch.Generator().manual_seed(5)
    sizes = {f"{name}.weight": (48, 16) for name in ("embedding.word_embeddings", "output_layer")}
    sizes["decoder.final_layernorm.weight"] = (16,)
    for layer in range(4):
        prefix = f"decoder.layers.{layer}"
        sizes |= {
            f"{prefix}.input_layernorm.weight": (16,),
            f"{prefix}.pre_mlp_layernorm.weight": (16,),
            f"{prefix}.self_attention.linear_qkv.weight": (48, 16),
            f"{prefix}.self_attention.linear_proj.weight": (16, 16),
            f"{prefix}.mlp.linear_fc1.weight": (48, 16),
            f"{prefix}.mlp.linear_fc2.weight": (16, 24),
        }
    return {name: torch.randn(size, generator=random) for name, size in sizes.items()}


def of_rank(tensors: dict, tensor: int, pipeline: int, separate: bool) -> dict:
    """The part of one of 2 x 2 ranks; the layers of the ranks of the pipeline are 3 and 1."""
    part = {}
    for name, value in tensors.items():
        if name.startswith("decoder.layers."):
            layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
            if (int(layer) >= 3) != pipeline:
                continue
            name = f"decoder.layers.{int(layer) - 3 * pipeline}.{rest}"
        elif name.startswith("embedding.") == bool(pipeline):
            continue
        if "linear_fc1" in name:
            gate, up = (half.chunk(2)[tensor] for half in value.chunk(2))
            if separate:
                part[name.replace("fc1", "fc1_2")] = up
            value = gate if separate else torch.cat([gate, up])
        elif any(one in name for one in ("embeddings", "output_layer", "linear_qkv")):
            value = value.chunk(2)[tensor]
        elif any(one in name for one in ("linear_proj", "linear_fc2")):
            value = value.chunk(2, 1)[tensor]
        part[name] = value.clone()
    return part


def legacy(part: dict) -> dict:
    """The names of NeMo without megatron-core."""
    renamed = {}
    for name, value in part.items():
        for new, old in LEGACY:
            name = name.replace(new, old)
        renamed[name.replace("dense_h_to_4h_2_2", "dense_h_to_4h_2")] = value
    return renamed


def write(root: Path, form: str) -> Path:
    """Files as NeMo writes them; returns what the user names."""
    tensors = whole()
    for tensor, pipeline in ((0, 0), (0, 1), (1, 0), (1, 1)):
        part = of_rank(tensors, tensor, pipeline, separate=form == "neuron")
        part = part if form == "unpacked" else legacy(part)
        state = {f"model.{name}": value for name, value in part.items()}
        folder = root / f"tp_rank_{tensor:02d}_pp_rank_{pipeline:03d}"
        folder.mkdir(parents=True)
        if form == "unpacked":
            torch.save(state, folder / "model_weights.ckpt")
        else:
            file = {"state_dict": state, "pytorch-lightning_version": "2.0", "global_step": 9}
            torch.save(file, folder / "megatron_gpt--step=9.ckpt")
            torch.save({"state_dict": {}}, folder / "megatron_gpt--step=8.ckpt")
    if form == "unpacked":
        (root / "model_config.yaml").write_text(yaml.safe_dump(CONFIG))
        return root
    (root / "hparams.yaml").write_text(yaml.safe_dump({"cfg": CONFIG}))
    return root / "megatron_gpt--step=9.ckpt"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted folder of one rank of NeMo, which has no folder."""
    root = tmp_path_factory.mktemp("nemo")
    (root / "one").mkdir()
    state = {f"model.{name}": value for name, value in whole().items()}
    torch.save(state, root / "one/model_weights.ckpt")
    (root / "one/model_config.yaml").write_text(yaml.safe_dump(CONFIG))
    from_megatron(root / "one", root / "ours", quiet, vocab=40)
    return root / "ours"


@pytest.mark.parametrize("form", ["unpacked", "lightning", "neuron"])
def test_files_of_ranks_give_the_weights(form, reference, tmp_path):
    source = write(tmp_path / "source", form)
    model = None if form == "unpacked" else str(tmp_path / "source/hparams.yaml")
    from_megatron(source, tmp_path / "ours", quiet, model, vocab=40)
    for file in ("weights/model.safetensors", "model.toml"):
        assert (tmp_path / "ours" / file).read_bytes() == (reference / file).read_bytes()


def test_weights_have_their_places(reference):
    folder, tensors = open_weight_files(reference / "weights"), whole()
    gate, up = tensors["decoder.layers.3.mlp.linear_fc1.weight"].chunk(2)
    assert (folder.read("layers/3/mlp/gate") == gate.numpy().T).all()
    assert (folder.read("layers/3/mlp/up") == up.numpy().T).all()
    packed = tensors["decoder.layers.2.self_attention.linear_qkv.weight"].view(4, 3, 4, 16)
    assert (folder.read("layers/2/attention/key")[:, 1] == packed[1, 1].numpy().T).all()


def refused(source: Path, **options) -> str:
    with pytest.raises(WeightsError) as error:
        from_megatron(source, source.with_name("ours"), quiet, **options)
    return str(error.value)


def test_what_is_not_read_is_refused_by_name(tmp_path):
    source = write(tmp_path / "source", "lightning").parent
    assert "contains several checkpoints; name one" in refused(source)
    assert "megatron_gpt--step=7.ckpt" in refused(source / "megatron_gpt--step=7.ckpt")
    assert "--model FILE.yaml" in refused(source / "megatron_gpt--step=9.ckpt")
    (tmp_path / "model.nemo").touch()
    assert "is an archive; unpack it" in refused(tmp_path / "model.nemo")
    lost = source / "tp_rank_01_pp_rank_001/megatron_gpt--step=9.ckpt"
    lost.write_bytes(lost.read_bytes()[:3000])
    answer = refused(
        source / "megatron_gpt--step=9.ckpt", model=str(source / "hparams.yaml"), vocab=40
    )
    assert "cannot be loaded with weights_only=True" in answer


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"activation": "geglu"}, "activation = 'geglu' is not one of gelu, swiglu"),
        ({"normalization": "other"}, "normalization = 'other' is not one of"),
        ({"megatron_legacy": True}, "megatron_legacy = True is not supported, only False is"),
        ({"transformer_block_type": "post_ln"}, "only 'pre_ln' is"),
        ({"window_size": [[1]]}, "window_size is a table or contains one"),
        ({"kv_channels": "${multiply:2,4}"}, "cannot be resolved; replace it by its value"),
        ({"max_position_embeddings": "${.max_position_embeddings}"}, "cannot be resolved"),
        (
            {"mcore_customization_config": {"parallel_attention": True}},
            "mcore_customization_config = .*parallel_attention.* is not supported",
        ),
        (
            {"layernorm_zero_centered_gamma": True, "mcore_gpt": False},
            "layernorm_zero_centered_gamma = True needs mcore_gpt = True",
        ),
        (
            {"activation": "gelu", "bias_activation_fusion": True, "bias_gelu_fusion": False},
            "bias_activation_fusion = True contradicts bias_gelu_fusion = False",
        ),
        ({"old_context_len": 4096}, "old_context_len = 4096 is not supported, only 8192 is"),
        # Fields of megatron-core's configuration, which NeMo copies from its own.
        ({"softmax_scale": 0.5}, "softmax_scale = 0.5 is not supported"),
        ({"moe_layer_freq": [0, 1, 1, 1]}, "moe_layer_freq = .* is not supported, only 1 is"),
        ({"moe_router_score_function": "sigmoid"}, "only 'softmax' is"),
        ({"moe_router_topk_scaling_factor": 2.5}, "moe_router_topk_scaling_factor = 2.5 is not"),
        ({"moe_router_num_groups": 4}, "moe_router_num_groups = 4 is not supported"),
        ({"rotary_interleaved": True}, "rotary_interleaved = True is not supported"),
        (
            {"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
            "moe_router_load_balancing_type = 'sinkhorn' is not supported",
        ),
    ],
)
def test_entries_of_the_configuration_that_are_not_read_are_refused(changed, words, tmp_path):
    path = tmp_path / "model_config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changed))
    with pytest.raises(WeightsError, match=words):
        model_from_arguments(read_nemo_config(path), 48)


@pytest.mark.parametrize(
    ("changed", "settings"),
    [
        ({"layernorm_zero_centered_gamma": True}, {"norm": "rms", "rms_norm_offset": True}),
        ({"normalization": "layernorm1p"}, {"norm": "layer", "rms_norm_offset": True}),
        ({"activation": "gelu", "bias": True}, {"activation": "gelu_tanh"}),
        ({"activation": "gelu", "bias_gelu_fusion": False}, {"activation": "gelu"}),
        ({"activation": "gelu", "bias_activation_fusion": False}, {"activation": "gelu"}),
        ({"scale_positional_embedding": True}, {"rope_scaling.factor": 8.0}),
        ({"scale_positional_embedding": True, "scale_factor": 32}, {"rope_scaling.factor": 32.0}),
        (
            {"num_moe_experts": 4, "moe_ffn_hidden_size": 20},
            {"mlp": 20, "moe.experts": 4, "moe.experts_per_token": 2},
        ),
        (
            {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 20},
            {"mlp": 24, "moe.shared_expert_mlp": 20, "moe.shared_expert_gate": False},
        ),
    ],
)
def test_entries_of_the_configuration_are_settings(changed, settings, tmp_path):
    path = tmp_path / "model_config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changed))
    model = model_from_arguments(read_nemo_config(path), 48)
    assert {name: attrgetter(name)(model) for name in settings} == settings
