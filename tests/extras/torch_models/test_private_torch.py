"""Canaries: each private interface of PyTorch, torchax and transformers still works.

Run these first with a new version of one of them. A failure names the function and what to do.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from canaries import guarded_functions, make_canary, public_functions

from graphtrain.torch_frontend import private_torch
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment

REMEDIES = {
    "reparametrize": "torch/nn/utils/stateless.py: find what torch.func.functional_call uses now.",
    "replacing_truncated_normal": "torch/nn/init.py, trunc_normal_: find the function that draws. "
    "Without it, trunc_normal_ leaves parameters as they were, in silence.",
    "writes": "torch.Tensor._version: find the counter that autograd checks.",
    "storage_id": "torch.UntypedStorage._cdata: find another number that views share; without it, "
    "writes through views train wrong numbers in silence.",
    "export_joint": "torch/_functorch/aot_autograd.py: find aot_export_joint_simple or its "
    "successor with trace_joint=True. The strict front end needs it.",
    "is_operator": "torch/_ops.py: find the class of torch.ops.aten.mm.default.",
    "environment_of": "torchax/tensor.py, class Tensor: find where it keeps its environment.",
    "is_traced": "torchax/view.py: find what indexing by slices returns. Without it, slices of "
    "weights that are passed to pipeline stages are zeros in silence.",
    "stop_slice_gradient": "torchax/view.py: find how a View is made of another one.",
    "set_array": "torchax/tensor.py, class Tensor: find where it keeps its JAX array.",
    "causal_model_class": "transformers/models/auto/auto_factory.py: find the mapping that "
    "from_config reads.",
    "image_text_class": "transformers/models/auto/auto_factory.py: find the mapping that "
    "from_config reads.",
    "build_causal_model": "transformers/models/auto/auto_factory.py, from_config: find how it "
    "builds a model of a class.",
    "accepts_attention": "transformers/modeling_utils.py: find what set_attn_implementation asks.",
    "accepts_experts": "transformers/modeling_utils.py: find what set_experts_implementation asks.",
    "tied_weights": "transformers/modeling_utils.py: find which of two tied weights is saved.",
    "supports_sdpa": "transformers/modeling_utils.py: find the flag of sdpa.",
    "has_default_gate": "transformers/integrations/moe.py: find the default gate of experts.",
    "FakeTensorMode": "torch/_subclasses/fake_tensor.py: find the mode and its errors.",
}


canary = make_canary(
    private_torch,
    REMEDIES,
    f"torch {torch.__version__}, transformers {transformers.__version__} or torchax "
    "changed a private interface.",
)


def test_every_private_interface_has_a_canary_and_a_remedy():
    public = public_functions(private_torch) | {"FakeTensorMode"}
    assert public == guarded_functions(globals()) == set(REMEDIES)


@canary("reparametrize")
def test_a_module_takes_other_parameters_for_a_while():
    module = torch.nn.Linear(3, 2, bias=False)
    before, zeros = module.weight, torch.zeros(2, 3)
    with private_torch.reparametrize(module, {"weight": zeros}):
        assert module.weight is zeros
        assert module.forward(torch.ones(3)).tolist() == [0, 0]
    assert module.weight is before


@canary("replacing_truncated_normal")
def test_truncated_normal_numbers_can_be_drawn_otherwise():
    def draw(tensor, mean, std, low, high, generator=None):
        return tensor.fill_(mean + std + low + high)

    with private_torch.replacing_truncated_normal(draw), torch.no_grad():
        drawn = torch.nn.init.trunc_normal_(torch.zeros(2), 1.0, 2.0, 3.0, 4.0)
    assert drawn.tolist() == [10.0, 10.0]


@canary("writes", "storage_id", "FakeTensorMode")
def test_writes_and_views_are_seen_on_fake_tensors_too():
    for mode in (torch.no_grad(), private_torch.FakeTensorMode()):
        with mode:
            one, other = torch.zeros(4), torch.zeros(4)
            view, count = one.view(2, 2), private_torch.writes(one)
            view.add_(1)
            assert private_torch.writes(one) == count + 1
            assert private_torch.storage_id(view) == private_torch.storage_id(one)
            assert private_torch.storage_id(other) != private_torch.storage_id(one)


@canary("FakeTensorMode")
def test_a_value_that_a_fake_tensor_lacks_is_an_error_by_name():
    with private_torch.FakeTensorMode() as mode:
        with pytest.raises(private_torch.DataDependentOutputException):
            torch.ones(1).item()
        assert mode is not None


@canary("export_joint", "is_operator")
def test_a_function_is_exported_with_its_gradient():
    def square(x):
        return (torch.mm(x, x),)

    graph = private_torch.export_joint(square, [torch.ones(2, 2, requires_grad=True)], {})
    targets = [node.target for node in graph.graph.nodes if private_torch.is_operator(node.target)]
    assert targets.count(torch.ops.aten.mm.default) == 3  # one forward, two backward
    assert not private_torch.is_operator("output")


@canary("environment_of", "set_array")
def test_a_tensor_of_torchax_has_an_environment_and_an_array():
    environment = TraceEnvironment()
    tensor = Tensor(jnp.zeros(3), environment)
    assert private_torch.environment_of(tensor) is environment
    private_torch.set_array(tensor, jnp.ones(3))
    np.testing.assert_array_equal(tensor.jax(), np.ones(3))


@canary("is_traced")
def test_slices_are_traced_tensors_too():
    environment = TraceEnvironment()
    tensor = Tensor(jnp.zeros(3), environment)
    with environment:
        assert all(map(private_torch.is_traced, (tensor, tensor[None], tensor[1:], tensor + 1)))
    assert not private_torch.is_traced(torch.zeros(3))
    assert not private_torch.is_traced(jnp.zeros(3))


@canary("stop_slice_gradient")
def test_writes_pass_through_a_slice_without_gradient():
    environment = TraceEnvironment()
    tensor = Tensor(jnp.zeros(3), environment)
    with environment, torch.no_grad():
        tensor[1:].add_(2.0)
        kept = private_torch.stop_slice_gradient(tensor)
    assert kept is tensor
    np.testing.assert_array_equal(tensor.jax(), [0, 2, 2])


@canary("causal_model_class", "accepts_attention", "supports_sdpa")
def test_transformers_tells_the_class_of_a_configuration_and_its_attention():
    kind = private_torch.causal_model_class(transformers.LlamaConfig())
    assert kind is transformers.LlamaForCausalLM
    assert private_torch.accepts_attention(kind) is True
    assert private_torch.supports_sdpa(kind) is True
    assert private_torch.causal_model_class(transformers.ViTConfig()) is None


@canary("image_text_class")
def test_transformers_tells_the_class_of_a_model_of_text_and_images():
    kind = private_torch.image_text_class(transformers.LlavaConfig())
    assert kind is transformers.LlavaForConditionalGeneration
    assert private_torch.image_text_class(transformers.LlamaConfig()) is None


@canary("build_causal_model")
def test_transformers_builds_the_language_model_of_a_larger_one():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.Emu3TextConfig(
        **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1, attention_dropout=0.0
    )
    assert private_torch.causal_model_class(config) is None
    config.architectures = ["Emu3ForCausalLM"]
    kind = private_torch.causal_model_class(config)
    for either in (config, transformers.Emu3Config(text_config=config.to_dict())):
        with torch.device("meta"):
            model = private_torch.build_causal_model(kind, either, {"dtype": torch.float32})
        assert type(model) is kind and model.config.hidden_size == 8


@canary("accepts_experts", "tied_weights")
def test_experts_can_be_chosen_and_tied_weights_are_known():
    assert private_torch.accepts_experts(transformers.MixtralForCausalLM) is True
    assert private_torch.accepts_experts(transformers.GPT2LMHeadModel) is False
    with torch.device("meta"):
        model = transformers.CamembertForCausalLM(transformers.CamembertConfig(is_decoder=True))
    source = "roberta.embeddings.word_embeddings.weight"
    assert private_torch.tied_weights(model)["lm_head.decoder.weight"] == source


@canary("has_default_gate")
def test_experts_tell_their_gate():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    with torch.device("meta"):
        mixtral = MixtralExperts(transformers.MixtralConfig())
        assert private_torch.has_default_gate(mixtral)
        assert not private_torch.has_default_gate(GptOssExperts(transformers.GptOssConfig()))
