"""What Megatron-LM cannot describe, or its ranks cannot divide, is refused by name."""

from dataclasses import replace

import pytest

from graphtrain.config.schema import MixtureOfExperts, Model, RopeScaling
from graphtrain.errors import WeightsError
from graphtrain.weights.megatron.arguments import model_from_arguments
from graphtrain.weights.megatron.layout import RankLayout
from graphtrain.weights.megatron.written_arguments import arguments_of_model

MODEL = Model(layers=6, embed=16, heads=4, kv_heads=2, mlp=24, vocab=90)
MIXTURE = replace(MODEL, moe=MixtureOfExperts(experts=4, shared_expert_mlp=8))


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        MIXTURE,
        replace(MODEL, moe=MixtureOfExperts(experts=4, normalize_topk=False)),
        replace(
            MIXTURE, moe=MixtureOfExperts(experts=4, shared_expert_mlp=8, shared_expert_gate=False)
        ),
        replace(MODEL, bias="qkv", qk_norm=True, tie_word_embeddings=True, sliding_window=7),
        replace(MODEL, norm="layer", bias="all", activation="gelu_tanh", kv_heads=4),
        replace(MODEL, norm="layer", bias="all", activation="gelu", rms_norm_offset=True),
        replace(MODEL, positions="learned", max_position_embeddings=32),
        replace(MODEL, positions="alibi"),
        replace(MODEL, rope_theta=5e5, rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    ],
)
def test_the_written_arguments_describe_the_model(model):
    arguments = arguments_of_model(model, 128, RankLayout())
    assert model_from_arguments(arguments, 90) == model
    assert arguments["padded_vocab_size"] == 128


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (replace(MODEL, post_norm=True), "cannot describe program.model.post_norm = True"),
        (replace(MODEL, activation="geglu"), "program.model.activation = geglu"),
        (replace(MODEL, partial_rotary_factor=0.5), "program.model.partial_rotary_factor = 0.5"),
        (replace(MODEL, activation="gelu_tanh"), '"gelu_tanh" only with bias = "all"'),
        (
            replace(MODEL, moe=MixtureOfExperts(experts=4, experts_per_token=1)),
            "experts_per_token = 1 needs normalize_topk = false",
        ),
        (
            replace(MODEL, moe=MixtureOfExperts(experts=4, score_function="sigmoid")),
            "cannot describe program.model.moe",
        ),
    ],
)
def test_settings_that_megatron_lacks_are_refused(model, words):
    with pytest.raises(WeightsError, match=words):
        arguments_of_model(model, 128, RankLayout())


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (RankLayout(tensor=4), "kv_heads = 2 is not a multiple of 4 tensor ranks"),
        (RankLayout(pipeline=4), "--layers, for example --layers 2,2,1,1"),
        (RankLayout(pipeline=2, layers=(3, 2)), "the sum 5; it needs 2, .* with the sum 6"),
        (RankLayout(pipeline=2, virtual=2, layers=(3, 3)), "lists 2 numbers .* it needs 4"),
        (RankLayout(expert=3), "4 experts cannot be divided over 3 expert ranks"),
    ],
)
def test_ranks_that_cannot_divide_the_model_are_refused(layout, words):
    with pytest.raises(WeightsError, match=words):
        layout.check(MIXTURE)


def test_chunks_of_a_virtual_pipeline_go_round_the_ranks():
    layout = RankLayout(pipeline=2, virtual=2, layers=(1, 2, 2, 1))
    chunks = [
        (chunk.pipeline_rank, chunk.key, chunk.first_layer, chunk.num_layers)
        for chunk in layout.chunks(MODEL)
    ]
    assert chunks == [
        (0, "model0", 0, 1),
        (1, "model0", 1, 2),
        (0, "model1", 3, 2),
        (1, "model1", 5, 1),
    ]
    assert layout.pipeline_layout(MODEL) == "Et|tt|tt|tL"
    assert RankLayout(pipeline=2).pipeline_layout(MODEL) is None
    assert layout.folder(1, 0, 0) == "mp_rank_01_000"
    assert RankLayout(2, 1, 4).folder(1, 0, 3) == "mp_rank_01_003"
