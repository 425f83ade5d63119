"""Which settings forbid an export to Hugging Face is said before training."""

from dataclasses import replace

import pytest

from graphtrain.cli.conversion_output import conversion_progress
from graphtrain.cli.export_note import say_export_obstacle
from graphtrain.config.schema import Batch, Model, Program
from graphtrain.weights.exportable import export_obstacle

LLAMA = Model(layers=2, embed=32, heads=4, mlp=64, vocab=128, vocab_padding=20)
GPT2 = replace(
    LLAMA,
    positions="learned",
    max_position_embeddings=64,
    norm="layer",
    activation="gelu_tanh",
    bias="all",
    tie_word_embeddings=True,
)


@pytest.mark.parametrize("model", [LLAMA, GPT2, replace(LLAMA, qk_norm=True)])
def test_a_model_that_a_family_has_can_be_exported(model):
    assert export_obstacle(model) is None


@pytest.mark.parametrize(
    ("model", "needs"),
    [
        (replace(GPT2, bias="none"), 'gpt2, needs program.model.bias = "all" (now "none")'),
        (
            replace(GPT2, bias="none", activation="swiglu"),
            'program.model.activation = "gelu_tanh" (now "swiglu"), program.model.bias = "all"',
        ),
        (replace(LLAMA, activation="gelu"), 'needs program.model.activation = "swiglu"'),
        (replace(LLAMA, embedding_norm=True), "embedding_norm = false (now true)"),
        (replace(LLAMA, mtp_loss_weight=0.1), "llama, needs program.model.mtp_loss_weight = unset"),
    ],
)
def test_the_settings_that_forbid_an_export_are_named(model, needs):
    assert needs in str(export_obstacle(model))


def test_the_note_names_the_command(capsys):
    batch = Batch(global_batch_size=1, seq_len=8)
    say_export_obstacle(Program(model=GPT2, batch=batch))
    assert capsys.readouterr().err == ""
    say_export_obstacle(Program(model=replace(GPT2, bias="none"), batch=batch))
    assert "graphtrain-to-hf could not export this model" in capsys.readouterr().err


def test_no_progress_of_a_conversion_is_written_into_a_pipe(capsys):
    with conversion_progress() as show:
        show(1, 2)
    assert capsys.readouterr().err == ""
