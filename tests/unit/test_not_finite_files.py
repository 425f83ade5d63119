"""Weights that are NaN or infinite: refused where training starts, said where they are exported."""

import ml_dtypes
import numpy as np
import pytest
from published_folders import write_published

from graphtrain.config.resolve import resolve
from graphtrain.config.schema import Batch, Model, Program
from graphtrain.errors import WeightsError
from graphtrain.weights.digests import record_weights
from graphtrain.weights.files import SafetensorsFiles
from graphtrain.weights.finite import count_not_finite
from graphtrain.weights.hf_export import ExportedFiles, export_hugging_face
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.initial import part_reader
from graphtrain.weights.megatron.layout import RankLayout
from graphtrain.weights.mindspore.convert import from_mindspore
from graphtrain.weights.mindspore.export import to_mindspore
from graphtrain.weights.open import open_weights

MODEL = Model(layers=2, embed=16, heads=2, mlp=24, vocab=32)
NORM = "model.layers.1.input_layernorm.weight"


def quiet(done, count):
    """Show nothing."""


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_elements_of_every_dtype_are_counted_in_chunks(dtype, monkeypatch):
    array = np.linspace(-60000, 60000, 70, dtype=np.float32).astype(dtype).reshape(10, 7).T
    assert count_not_finite(array) == 0
    monkeypatch.setattr("graphtrain.weights.finite._CHUNK", 16)
    array[2, 3], array[6, 9], array[0, 0] = np.nan, np.inf, -np.inf
    assert count_not_finite(array) == 3
    assert count_not_finite(np.array([2**31 - 1], np.int32)) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_folder_is_not_converted_with_them(value, tmp_path):
    write_published(MODEL, tmp_path / "source", {NORM: (slice(3, 5), value)})
    with pytest.raises(WeightsError, match=rf"^2 of 16 values of {NORM} are NaN or infinite"):
        import_hugging_face(tmp_path / "source", tmp_path / "ours", quiet)
    assert not (tmp_path / "ours").exists()


@pytest.fixture
def converted(tmp_path):
    """A converted folder."""
    write_published(MODEL, tmp_path / "source")
    import_hugging_face(tmp_path / "source", tmp_path / "ours", quiet)
    return tmp_path / "ours"


def damage(folder, name, values):
    """Write values over the first ones of an array, with digests as if it had been so."""
    entry = SafetensorsFiles([folder / "weights/model.safetensors"])._entries[name]
    with entry.path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(np.array(values, np.float32).tobytes())
    record_weights(folder)


def test_no_run_starts_from_them(converted):
    damage(converted, "layers/1/mlp_norm/scale", [np.inf, np.nan])
    program = resolve(Program(model=MODEL, batch=Batch(global_batch_size=1, seq_len=8)))
    read = part_reader(open_weights(converted), program)
    assert read("layers/mlp_norm/scale", (2, 16), (slice(0, 1), slice(0, 16))).shape == (1, 16)
    told = "ours: 2 of 16 values of layers/1/mlp_norm/scale are NaN or infinite"
    with pytest.raises(WeightsError, match=told):
        read("layers/mlp_norm/scale", (2, 16), (slice(0, 2), slice(0, 16)))


def test_an_export_says_which_tensors_have_them(converted, tmp_path):
    damage(converted, "layers/1/mlp_norm/scale", [np.inf, np.nan])
    told = r"ours has values .* and so has the export: model\.layers\.1\.post_att\S+ \(2\); use"
    with pytest.warns(UserWarning, match=told):
        export_hugging_face(converted, tmp_path / "back", quiet)


def test_values_that_a_dtype_cannot_hold_are_refused(converted, tmp_path):
    damage(converted, "layers/1/mlp_norm/scale", [70000.0])
    export_hugging_face(converted, tmp_path / "back", quiet, files=ExportedFiles("bfloat16"))
    told = (
        r"layers\.1\.post_attention_layernorm\.weight has 1 values that are too large for float16"
    )
    with pytest.raises(WeightsError, match=told):
        export_hugging_face(converted, tmp_path / "half", quiet, files=ExportedFiles("float16"))
    assert not (tmp_path / "half").exists()


def test_files_of_mindspore_say_them_and_are_refused(converted, tmp_path):
    damage(converted, "layers/1/mlp_norm/scale", [np.inf, np.nan])
    with pytest.warns(UserWarning, match=r"has the export: model\.layers\.1\.ffn_norm\.weight \(2"):
        to_mindspore(converted, tmp_path / "ckpt", quiet, RankLayout())
    preset = str(tmp_path / "ckpt/model.toml")
    with pytest.raises(WeightsError, match=r"2 of 16 values of model\.layers\.1\.ffn_norm\.weight"):
        from_mindspore(tmp_path / "ckpt/rank_0/checkpoint.ckpt", tmp_path / "in", quiet, preset)
