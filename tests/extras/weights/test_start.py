"""Weights to start from reach the place that a program keeps them in."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
import transformers

from graphtrain.config import render
from graphtrain.config.resolve import resolve
from graphtrain.config.schema import (
    Adapter,
    Batch,
    Config,
    Data,
    Mesh,
    PipelineSettings,
    Program,
    Run,
)
from graphtrain.errors import TrainingError, WeightsError
from graphtrain.graphs.weight_specs import trained_specs
from graphtrain.models.decoder import parameter_specs
from graphtrain.models.lora.quantize import fake_quantize
from graphtrain.models.pipeline_stages import to_pipeline_layout
from graphtrain.run.initial_weights import InitialWeights
from graphtrain.run.serving.weights import load_weights
from graphtrain.weights.base import verify_adapter_settings
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.initial import load_initial_parameters, open_initial_weights
from graphtrain.weights.open import open_weights
from graphtrain.weights.sources import ConvertedFolder
from lowering.trees import flatten, unflatten


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 65}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).bfloat16()
    model.save_pretrained(path / "source")
    import_hugging_face(path / "source", path / "ours", lambda done, count: None)
    return path / "ours"


def config(directory: Path, **model) -> Config:
    program = Program(
        target="cpu:2",
        mesh=Mesh(stage=2),
        model=replace(ConvertedFolder(directory).model, **model),
        batch=Batch(global_batch_size=4, seq_len=8, microbatches=4),
        pipeline=PipelineSettings(virtual_stages=2),
    )
    run = Run(directory="run", steps=1, data=Data(train="data"), init_from=str(directory))
    return Config(program=program, run=run)


def in_halves(described, read):
    """Every array from two reads, as if its first axis were split over two devices."""
    made = {}
    for path, spec in flatten(described).items():
        middle = (spec.shape[0] + 1) // 2
        rest = (slice(None),) * (len(spec.shape) - 1)
        parts = [
            read(path, spec.shape, (one, *rest)) for one in (slice(middle), slice(middle, None))
        ]
        made[path] = np.concatenate(parts)
    return unflatten(made)


def test_layers_come_in_the_order_of_stages_and_the_vocabulary_is_padded(converted):
    """5 layers in 2 rounds of 2 stages, so that some rows are no layer's."""
    made = config(converted, vocab=72)
    program = resolve(made.program)
    weights = open_initial_weights(program.model, made.run)
    assert weights is not None
    got = load_initial_parameters(weights, program, trained_specs(program), in_halves)
    whole = {}
    for path, spec in flatten(parameter_specs(weights.model)).items():
        layers = range(5) if path.startswith("layers/") else [None]
        read = [weights.read([path], layer)[0].astype(np.float32) for layer in layers]
        whole[path] = np.stack(read) if path.startswith("layers/") else read[0]
        assert whole[path].shape == spec.shape
    whole["embedding/tokens"] = np.pad(whole["embedding/tokens"], ((0, 7), (0, 0)))
    whole["head"] = np.pad(whole["head"], ((0, 0), (0, 7)))
    assert program.stages is not None
    want = to_pipeline_layout(unflatten(whole), program.stages)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def opened(of: Config):
    return open_initial_weights(of.program.model, of.run)


def test_another_model_is_refused_with_what_differs(converted):
    with pytest.raises(WeightsError, match=r"rope_theta = 5\.0 \(instead of 10000\.0\)"):
        opened(config(converted, rope_theta=5.0))
    with pytest.raises(WeightsError, match=r"vocabulary of 65, but program\.model\.vocab = 64"):
        opened(config(converted, vocab=64))
    assert opened(config(converted, remat="full", dropout=0.1)) is not None


def test_a_folder_that_holds_no_weights_is_refused(tmp_path):
    with pytest.raises(
        WeightsError, match=r"is neither a converted folder .* convert weights of other formats"
    ):
        open_weights(tmp_path)


def test_a_directory_that_cannot_take_the_files_beside_the_weights_is_named(converted, tmp_path):
    (tmp_path / "file").touch()
    of = config(converted)
    beginning = InitialWeights.open(resolve(of.program), of.run, resuming=False)
    assert beginning is not None
    with pytest.raises(TrainingError, match=r"cannot be written .* remove the file \S+/file, or"):
        beginning.save_run_files(tmp_path / "file/run")


def adapted(directory: Path, **settings) -> Config:
    """Of one device, with an adapter."""
    plain = config(directory)
    adapter = Adapter(**({"rank": 2, "alpha": 4.0, "base_dtype": "nf4"} | settings))
    program = Program(
        target="cpu:1", model=plain.program.model, batch=plain.program.batch, adapter=adapter
    )
    return Config(program=program, run=plain.run)


def test_before_a_checkpoint_text_is_made_by_the_base_as_training_rounds_it(converted):
    begun = adapted(converted, modules_to_save=("layers/mlp/down",))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    described = unflatten(
        {
            path: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place)
            for path, spec in flatten(parameter_specs(begun.program.model)).items()
        }
    )
    found = flatten(
        load_weights(resolve(begun.program), begun.run, resolve(begun.program), described, None)
    )
    (up, down) = ConvertedFolder(converted).read(["layers/mlp/up", "layers/mlp/down"], 1)
    np.testing.assert_array_equal(found["layers/mlp/up"][1], fake_quantize(up, "nf4"))
    np.testing.assert_array_equal(found["layers/mlp/down"][1], down)  # trained whole


@pytest.mark.parametrize("changed", [{"alpha": 8.0}, {"rank": 4}, {"base_dtype": "int8"}])
def test_a_run_does_not_go_on_with_another_adapter(converted, tmp_path, changed):
    (tmp_path / "config.toml").write_text(render(adapted(converted)))
    verify_adapter_settings(adapted(converted, dropout=0.1).program.adapter, tmp_path)
    (name,) = changed
    with pytest.raises(WeightsError, match=rf"\[program\.adapter\]: {name} = .*\(instead of"):
        verify_adapter_settings(adapted(converted, **changed).program.adapter, tmp_path)
