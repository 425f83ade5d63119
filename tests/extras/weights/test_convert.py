"""Files of every kind to the decoder's arrays and back, and what is said of wrong ones."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graphtrain.errors import WeightsError
from graphtrain.weights.hf_export import ExportedFiles, export_hugging_face
from graphtrain.weights.hf_import import import_hugging_face
from graphtrain.weights.sources import ConvertedFolder

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 65,
}


def quiet(done: int, count: int) -> None:
    """Show nothing."""


def llama(dtype: torch.dtype = torch.float32, **settings) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | settings)
    return transformers.LlamaForCausalLM(config).to(dtype)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama of one file, with a tokenizer and a template."""
    llama().save_pretrained(tmp_path / "source")
    (tmp_path / "source/tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / "source/chat_template.jinja").write_text("{{ messages }}")
    return tmp_path / "source"


def there_and_back(source: Path) -> dict[str, torch.Tensor]:
    import_hugging_face(source, source.with_name("ours"), quiet)
    export_hugging_face(source.with_name("ours"), source.with_name("back"), quiet)
    found = {}
    for path in sorted(source.with_name("back").glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype, tmp_path):
    model = llama(dtype)
    model.save_pretrained(tmp_path / "source")
    assert_equal(there_and_back(tmp_path / "source"), model.state_dict())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.dtype == dtype


def test_a_chosen_dtype_in_files_of_a_chosen_size_is_loaded_by_transformers(source, tmp_path):
    import_hugging_face(source, tmp_path / "ours", quiet)
    files = ExportedFiles("bfloat16", max_file_bytes=10_000)
    export_hugging_face(tmp_path / "ours", tmp_path / "back", quiet, files=files)
    written = list((tmp_path / "back").glob("*.safetensors"))
    assert len(written) > 1
    for file in written:  # a file may be larger only if it holds a single tensor
        assert file.stat().st_size < 12_000 or len(load_file(file)) == 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.dtype == torch.bfloat16
    expected = {
        name: one.bfloat16() for name, one in load_file(source / "model.safetensors").items()
    }
    assert_equal({name: again.state_dict()[name] for name in expected}, expected)


def test_a_dtype_of_some_tensors_is_kept(source):
    tensors = load_file(source / "model.safetensors")
    mixed = {name: one.bfloat16() if one.ndim == 2 else one for name, one in tensors.items()}
    save_file(mixed, source / "model.safetensors")
    assert_equal(there_and_back(source), mixed)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_bin_files_with_an_index(legacy, source):
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    tensors = {name: one.bfloat16() for name, one in tensors.items()}
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[:9], names[9:])):
        file = f"pytorch_model-{number}.bin"
        held = {name: tensors[name] for name in part}
        torch.save(held, source / file, _use_new_zipfile_serialization=not legacy)
        index |= dict.fromkeys(part, file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert_equal(there_and_back(source), tensors)


def test_a_bin_file_runs_no_code(source, tmp_path):
    class Evil:
        def __reduce__(self):
            return Path(tmp_path / "ran").touch, ()

    (source / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Evil()}, source / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="cannot be loaded with weights_only=True"):
        import_hugging_face(source, tmp_path / "ours", quiet)
    assert not (tmp_path / "ran").exists()


def test_names_without_their_prefix(tmp_path):
    """As OpenAI's own GPT-2 has them, masks and all."""
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=65)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source/model.safetensors")
    short = {name.removeprefix("transformer."): one for name, one in tensors.items()}
    short["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    save_file(short, tmp_path / "source/model.safetensors")
    assert_equal(there_and_back(tmp_path / "source"), tensors)


def test_a_head_that_is_the_embedding_is_dropped(tmp_path):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source/model.safetensors")
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(twice, tmp_path / "source/model.safetensors")
    assert_equal(there_and_back(tmp_path / "source"), tensors)
    twice["lm_head.weight"][0, 0] += 1  # transformers then uses it
    save_file(twice, tmp_path / "source/model.safetensors")
    with pytest.raises(
        WeightsError, match=r"lm_head\.weight that differs from model\.embed_tokens"
    ):
        there_and_back(tmp_path / "source")


def test_files_beside_the_weights_travel_along(source):
    there_and_back(source)
    back = source.with_name("back")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (back / name).read_text() == (source / name).read_text()


def test_layers_are_stored_apart_and_in_the_decoders_order(source):
    import_hugging_face(source, source.with_name("ours"), quiet)
    converted = ConvertedFolder(source.with_name("ours"))
    want = load_file(source / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    got = converted.read(["layers/attention/query"], 1)[0]
    np.testing.assert_array_equal(got, want.numpy().T.reshape(32, 4, 8))


def broken(source: Path, **config) -> str:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(WeightsError) as error:
        import_hugging_face(source, source.with_name("ours"), quiet)
    assert not source.with_name("ours").exists()
    assert [path for path in source.parent.iterdir() if path != source] == []
    return str(error.value)


def test_what_the_decoder_does_not_do_is_refused(source):
    assert "model_type = 't5' is not supported" in broken(source, model_type="t5")
    told = broken(source, model_type="llama", rope_parameters={"rope_type": "new", "factor": 4})
    assert "RoPE type 'new' is not supported" in told
    told = broken(source, rope_parameters={"rope_type": "longrope", "factor": 4})
    assert "RoPE of type 'longrope'" in told and "needs short_factor, long_factor" in told
    told = broken(source, rope_parameters={"partial_rotary_factor": 0.5})
    assert "partial_rotary_factor = 0.5 is not supported" in told
    told = broken(source, rope_parameters=None, hidden_act="relu")
    assert "hidden_act = 'relu' is not one of 'silu'" in told
    assert "mlp_bias = True is not supported" in broken(source, hidden_act="silu", mlp_bias=True)
    assert "hidden_size is missing" in broken(source, mlp_bias=False, hidden_size=None)


def test_weights_of_another_model_are_refused(source):
    assert "do not contain model.layers.2.input_layernorm.weight" in broken(
        source, num_hidden_layers=3
    )
    assert "contain model.layers.1.input_layernorm.weight" in broken(source, num_hidden_layers=1)
    told = broken(source, num_hidden_layers=2, intermediate_size=40)
    assert "gate_proj.weight has shape (48, 32)" in told
    told = broken(source, intermediate_size=48, num_attention_heads=8, head_dim=8)
    assert "q_proj.weight has shape (32, 32)" in told


def test_modules_that_predict_further_tokens_are_named(source):
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, source / "model.safetensors")
    told = broken(source)
    assert "contain model.layers.2.eh_proj.weight" in told
    assert "multi-token prediction is not supported in this family" in told


def test_dtypes_that_cannot_be_kept_are_refused(source):
    tensors = load_file(source / "model.safetensors")
    doubled = tensors | {"model.norm.weight": tensors["model.norm.weight"].double()}
    save_file(doubled, source / "model.safetensors")
    assert "model.norm.weight has dtype F64" in (told := broken(source))
    assert "supported: float32, float16, bfloat16" in told
    (source / "model.safetensors").unlink()
    torch.save(doubled, source / "pytorch_model.bin")
    assert "model.norm.weight has dtype float64" in broken(source)


def test_damaged_files_are_named(source):
    file = source / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (b"", whole[:7], whole[:100], whole[:-1], b"\xff" * 8 + whole[8:]):
        file.write_bytes(damaged)
        assert f"{file} is not a complete safetensors file" in broken(source)
    file.unlink()
    assert "contains no weights" in broken(source)
    index = source / "model.safetensors.index.json"
    for text, told in {
        "{": "is not an index of weights",
        '{"weight_map": {"a": "../model.safetensors"}}': "outside its folder",
        '{"weight_map": {"a": "gone.safetensors"}}': "lists gone.safetensors, which does not exist",
        "[]": "is not an index of weights: not a JSON object but a list",
        '{"weight_map": []}': "is not an index of weights: weight_map: should be an object",
        '{"weight_map": {"a": 5}}': "weight_map.a: should be a valid string",
        '{"weight_map": {"a": "%s"}}' % ("x" * 300): "outside its folder",
    }.items():
        index.write_text(text)
        assert told in broken(source)


def test_an_entry_of_another_type_is_named(source):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": 1.5}))
    assert "config.json cannot be used: rope_parameters: should be" in broken(source)


def test_links_are_followed_only_inside_the_folder(source, tmp_path):
    (tmp_path / "secret").write_text("of another user")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    (source / "LICENSE").symlink_to("chat_template.jinja")
    with pytest.warns(UserWarning, match=r"notes.txt is a link to a file outside"):
        import_hugging_face(source, tmp_path / "ours", quiet)
    copied = tmp_path / "ours" / "hugging_face"
    assert not (copied / "notes.txt").exists()
    assert (copied / "LICENSE").read_text() == "{{ messages }}"
    assert not (copied / "LICENSE").is_symlink()


def test_a_folder_in_the_cache_of_the_hub_is_copied(source, tmp_path):
    blobs = tmp_path / "models--owner--name" / "blobs"
    snapshot = blobs.parent / "snapshots" / "0123"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    import_hugging_face(snapshot, tmp_path / "ours", quiet)
    assert (tmp_path / "ours/hugging_face/chat_template.jinja").read_text() == "{{ messages }}"


def test_a_flipped_pickle_is_converted_or_refused_without_advice_to_run_it(source):
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    whole = (source / "pytorch_model.bin").read_bytes()
    begin = whole.index(b"data.pkl") + 8
    for position in range(begin, begin + 3000, 97):
        flipped = bytearray(whole)
        flipped[position] ^= 0x41
        (source / "pytorch_model.bin").write_bytes(flipped)
        try:
            import_hugging_face(source, source.with_name("ours"), quiet)
            shutil.rmtree(source.with_name("ours"))
        except WeightsError as error:
            assert "to False" not in str(error) and "=False" not in str(error)


@pytest.mark.parametrize(
    ("vocab", "message"),
    [
        ('{"a": 0, "b": 0}', "the tokens 'a' and 'b' both have id 0"),
        ('{"a": 0, "b": 2}', "no token has id 1"),
        ('{"a": 0, "b": 700}', "token 'b' has id 700, but the embedding has 65 rows"),
        ("5", "not a tokenizer, or damaged"),
    ],
)
def test_a_tokenizer_that_cannot_be_that_of_the_model_is_told(source, vocab, message):
    (source / "tokenizer.json").write_text(f'{{"model": {{"vocab": {vocab}}}}}')
    with pytest.warns(UserWarning, match=f"tokenizer.json: .*{message}"):
        import_hugging_face(source, source.with_name("ours"), quiet)


def test_what_is_there_is_not_overwritten(source):
    import_hugging_face(source, source.with_name("ours"), quiet)
    with pytest.raises(WeightsError, match="exists already"):
        import_hugging_face(source, source.with_name("ours"), quiet)


def test_a_converted_folder_that_lost_a_file_is_refused(source):
    import_hugging_face(source, source.with_name("ours"), quiet)
    (source.with_name("ours") / "weights/model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"weights/model\.safetensors cannot be read"):
        export_hugging_face(source.with_name("ours"), source.with_name("back"), quiet)


MEASURE = """
import sys
from pathlib import Path
from lowering.machine.host import peak_resident_bytes, resident_bytes
from graphtrain.weights import hf_export, hf_import
import einops, ml_dtypes, safetensors
before = resident_bytes()
functions = vars(hf_import) | vars(hf_export)
functions[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), lambda done, count: None)
assert "jax" not in sys.modules
print(peak_resident_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_stays_near_the_largest_array(tmp_path):
    """300 MB in 4 files; the largest array has 64 MB, and must be transposed."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 16384}
    config = transformers.LlamaConfig(**SIZES | sizes | {"num_hidden_layers": 4})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.save_pretrained(tmp_path / "source", max_shard_size="80MB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 3
    del model
    largest = 4 * 16384 * 1024
    for name, begin, end in (
        ("import_hugging_face", "source", "ours"),
        ("export_hugging_face", "ours", "back"),
    ):
        words = [name, tmp_path / begin, tmp_path / end]
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, check=True
        )
        assert largest < int(done.stdout) < 1.3 * largest + (64 << 20)
