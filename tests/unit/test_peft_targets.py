"""Names in configurations of PEFT: those that PEFT would take for experts are parameters."""

from graphtrain.weights.peft_config import split_targets

MODULES = ["self_attn.o_proj", "mlp.up_proj", "mlp.shared_experts.down_proj"]


def test_dense_layers_and_shared_experts_are_parameters_beside_experts():
    modules, parameters = split_targets(MODULES, has_experts=True)
    assert modules == ["self_attn.o_proj"]
    assert parameters == ["mlp.up_proj.weight", "mlp.shared_experts.down_proj.weight"]


def test_in_dense_models_all_are_modules():
    assert split_targets(MODULES, has_experts=False) == (MODULES, [])
