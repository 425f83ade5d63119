"""A checkpoint of Hugging Face through the real commands: there, evaluated, trained, and back."""

import json

import numpy as np
import pytest
import torch
import transformers
from places import CUBE

from graphtrain.data.batches.evaluation_batches import evaluation_batches


def reference_loss(model, path, vocab):
    """Of transformers, with the scores of zero that a padded vocabulary has."""
    losses, count = 0.0, 0.0
    for batch in evaluation_batches(path, batch_size=64, seq_len=32):
        with torch.no_grad():
            scores = model(torch.tensor(batch["tokens"], dtype=torch.long)).logits.double()
        scores = torch.nn.functional.pad(scores, (0, vocab - scores.shape[-1]))
        each = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), torch.tensor(batch["targets"]).long().ravel(), reduction="none"
        )
        weights = torch.tensor(np.asarray(batch["weights"])).ravel()
        losses, count = losses + float((each * weights).sum()), count + float(weights.sum())
    return losses / count


def test_from_hugging_face_through_training_to_hugging_face(place):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257}
    config = transformers.LlamaConfig(**sizes, **heads, rms_norm_eps=1e-5, initializer_range=0.2)
    source = transformers.LlamaForCausalLM(config)
    source.save_pretrained(place.path / "source")
    (place.path / "source/tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')

    out, _ = place.command("convert", "hf-to-graphtrain", "source", "ours", "--json")
    assert json.loads(out)["family"] == "llama"
    words = ["config.toml", "--set", "run.init_from=ours"]
    want = reference_loss(source, place.path / "data/validation", 264)
    for options in [], CUBE:
        out, _ = place.command("evaluate", *words, *options, "--json")
        result = json.loads(out)
        assert result["step"] == 0
        assert result["validation_loss"] == pytest.approx(want, rel=1e-5)

    place.command("run", *words, *CUBE)
    assert place.curve()[0][1] == pytest.approx(want, rel=0.1)  # another part of the text
    place.command("convert", "graphtrain-to-hf", "run", "back")
    assert (place.path / "back/tokenizer.json").exists()
    trained = transformers.AutoModelForCausalLM.from_pretrained(place.path / "back")
    assert trained.config.vocab_size == 257
    # What the padding learned is not in the folder, so its part of the loss is not either.
    without = reference_loss(trained, place.path / "data/validation", 257)
    assert without == pytest.approx(place.journal()[-1]["validation_loss"], rel=1e-2)
    assert without < want - 0.5
