"""Estimated memory of pipeline stages on GPUs."""

from dataclasses import replace

import pytest

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Adapter,
    Batch,
    Loss,
    Mesh,
    MixtureOfExperts,
    Model,
    PipelineSettings,
    Program,
)
from graphtrain.cost_model.head_memory import head_of
from graphtrain.cost_model.memory import memory
from graphtrain.cost_model.pipeline_memory import stage_input, stage_peak
from graphtrain.cost_model.saved_activations import saved_in_front, saved_in_ticks
from graphtrain.cost_model.sizes import DeviceSizes
from graphtrain.cost_model.weights import shard_weights

MODEL = Model(layers=8, embed=512, heads=8, mlp=1024, vocab=4096, remat="dots")
STAGES = Program(
    target="h100:8",
    mesh=Mesh(stage=4, fsdp=2),
    rules=("data", "fsdp", "pipeline"),
    model=MODEL,
    batch=Batch(global_batch_size=64, seq_len=1024, microbatches=8),
    pipeline=PipelineSettings(schedule="1f1b"),
    loss=Loss(chunk="none"),
)
IN_TWO = {"mesh": Mesh(data=2, stage=4), "rules": ("data", "pipeline")}
TIED = replace(
    STAGES,
    **IN_TWO,
    model=replace(MODEL, layers=4, vocab=128_000, remat="full", tie_word_embeddings=True),
    batch=Batch(global_batch_size=16, seq_len=256, microbatches=8),
    loss=Loss(chunk=16),
)
SCHEDULES = [
    PipelineSettings(schedule="1f1b"),
    PipelineSettings(schedule="gpipe"),
    PipelineSettings(schedule="gpipe", recompute_stages=False),
    PipelineSettings(schedule="circular", virtual_stages=2),
]


def mixture(**settings) -> Model:
    return replace(MODEL, moe=MixtureOfExperts(experts=4, capacity_factor=1.0, **settings))


@pytest.mark.parametrize("program", [STAGES, TIED], ids=["in layers", "at the end"])
@pytest.mark.parametrize("pipeline", SCHEDULES)
def test_layers_in_front_of_the_stages_add_what_they_save_to_every_phase(program, pipeline):
    model = replace(program.model, layers=8)
    of = resolve(replace(program, model=model, pipeline=pipeline, loss=Loss(chunk="none")))
    given = of, shard_weights(of), DeviceSizes.of(of)
    gradients, saved, temporaries = stage_peak(*given, 0.0, 3e8)
    assert stage_peak(*given, 1e9, 3e8) == (gradients, 1e9 + saved, temporaries)


def test_dense_layers_before_a_mixture_have_no_zeros_in_the_loop():
    narrow, wide = (
        resolve(replace(STAGES, model=mixture(dense_layers=2, dense_mlp=width)))
        for width in (1024, 8192)
    )
    sizes = DeviceSizes.of(narrow), DeviceSizes.of(wide)
    assert saved_in_ticks(narrow, sizes[0], True) == saved_in_ticks(wide, sizes[1], True)
    in_front = [saved_in_front(*each, True) for each in zip((narrow, wide), sizes, strict=True)]
    narrow, wide = memory(narrow), memory(wide)
    assert narrow.temporaries == wide.temporaries
    assert wide.activations - narrow.activations == in_front[1] - in_front[0] > 0


def test_transposed_frozen_weights_have_their_own_dtype():
    adapter = Adapter(rank=8, alpha=16, target_modules=("*",))

    def temporaries(dtype: str) -> int:
        of = replace(STAGES, adapter=replace(adapter, base_dtype=dtype))
        return memory(resolve(of)).temporaries

    # Rows of attention's output and of the MLP's last product, in a stage's layers over fsdp.
    elements = (MODEL.embed + MODEL.mlp) * MODEL.embed * (MODEL.layers / 4) / 2
    assert temporaries("float32") - temporaries("bfloat16") == 2 * elements
    assert temporaries("bfloat16") - temporaries("int8") == 2 * elements
    assert temporaries("int8") == temporaries("nf4")


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_dpo_is_that_of_the_policy(tied):
    model = replace(MODEL, tie_word_embeddings=tied)
    of = resolve(replace(STAGES, model=model, loss=Loss(kind="dpo", chunk="none")))
    weights = shard_weights(of)
    for given in (weights, weights[::-1]):
        assert not head_of(given).frozen
    assert len([each for each in weights if each.path == head_of(weights).path]) == 2


@pytest.mark.parametrize(
    ("mesh", "microbatches", "schedule", "compiled"),
    [
        (Mesh(stage=2), 4, "gpipe", 3.033e9),
        (Mesh(stage=2), 4, "1f1b", 1.981e9),
        (Mesh(data=2), 2, "gpipe", 3.110e9),  # without a pipeline
    ],
)
def test_dpo_has_the_float32_logits_of_both_models(mesh, microbatches, schedule, compiled):
    """The peak of the program compiled for h100:2; with one model's, it was 13 to 19 % too low."""
    of = Program(
        target="h100:2",
        mesh=mesh,
        rules=("data", "pipeline"),
        model=Model(layers=4, embed=512, heads=8, mlp=1408, vocab=32000, remat="full"),
        batch=Batch(global_batch_size=32, seq_len=1024, microbatches=microbatches),
        pipeline=PipelineSettings(schedule=schedule),
        loss=Loss(kind="dpo"),
    )
    assert memory(resolve(of)).peak == pytest.approx(compiled, rel=0.03)


def test_stages_pass_on_the_residual_streams_of_both_models_of_dpo():
    one, both = (
        resolve(replace(STAGES, loss=Loss(kind=kind, chunk="none")))
        for kind in ("cross_entropy", "dpo")
    )
    stream = 8 / 2 * 1024 * MODEL.embed * 2  # sequences, positions, bfloat16
    assert stage_input(one, DeviceSizes.of(one)) == stream
    assert stage_input(both, DeviceSizes.of(both)) == 2 * stream
    saved = saved_in_ticks(both, DeviceSizes.of(both), True)
    # 1F1B stores the inputs of 7 ticks, and that of the current one.
    assert saved - saved_in_ticks(one, DeviceSizes.of(one), True) == 8 * stream


@pytest.mark.parametrize(
    ("program", "peak"),
    [
        (TIED, 1_626_000_000),
        (
            replace(
                STAGES,
                **IN_TWO,
                model=replace(mixture(), layers=16),
                batch=Batch(global_batch_size=128, seq_len=1024, microbatches=16),
            ),
            1_045_000_000,
        ),
    ],
    ids=["tied embedding", "mixture"],
)
def test_memory_of_stages_with_data_is_near_that_of_the_compiled_step(program, peak):
    """The peaks are XLA's, in four digits, with JAX 0.10.2."""
    assert memory(resolve(program)).peak == pytest.approx(peak, rel=0.06)


def test_circular_schedules_have_both_gradients_of_a_tied_embedding_at_the_end():
    circular = replace(TIED, pipeline=PipelineSettings(schedule="circular"))
    apart = replace(circular, model=replace(TIED.model, tie_word_embeddings=False))
    both = memory(resolve(circular)).gradients
    assert both == pytest.approx(memory(resolve(apart)).gradients, rel=0.01)


def test_a_tick_of_interleaved_1f1b_holds_the_gradients_that_it_sums():
    def temporaries(copies: int) -> int:
        of = replace(
            STAGES,
            target=f"h100:{4 * copies}",
            mesh=Mesh(data=copies, stage=4),
            rules=("data", "pipeline"),
            batch=Batch(global_batch_size=64 * copies, seq_len=1024, microbatches=8),
            pipeline=PipelineSettings(schedule="1f1b", virtual_stages=2),
        )
        return memory(resolve(of)).temporaries

    layer = 4 * MODEL.embed**2 + 3 * MODEL.embed * MODEL.mlp + 2 * MODEL.embed
    assert temporaries(2) - temporaries(1) == 4 * layer  # one of two rows, in float32
