"""llama.cpp by the packages xllamacpp and gguf, in their own interpreter; see decode.py."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def make_work(directory: Path, kind: str, prompt: int, long: int, tokens: int) -> Callable:
    import xllamacpp  # pyright: ignore[reportMissingImports]

    file = directory / f"model-{kind}.gguf"
    if not file.is_file():
        write_model(directory / "hf", file, kind)
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup = 8 * 512, 8, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    params.cache_prompt = False
    server = xllamacpp.Server(params)

    def complete(length: int, count: int) -> None:
        asked = {
            "prompt": random.choices(range(32000), k=length), "n_predict": count,
            "temperature": 0.0, "ignore_eos": True, "cache_prompt": False,
        }  # fmt: skip
        answer = server.handle_completions(asked)
        done = (answer[0] if isinstance(answer, list) else answer)["usage"]["completion_tokens"]
        assert done == count, answer

    def work(streams: int) -> None:
        if not streams:
            complete(long, 1)
            return
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(lambda _: complete(prompt, tokens), range(streams)))

    return work


def write_model(source: Path, file: Path, kind: str) -> None:
    """Write a Llama of Hugging Face as GGUF: f32, f16 or q8_0."""
    import json

    import gguf  # pyright: ignore[reportMissingImports]
    from safetensors.numpy import load_file

    sizes: dict[str, Any] = json.loads((source / "config.json").read_text())
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    writer.add_rope_dimension_count(sizes["hidden_size"] // heads)
    add_tokens(writer, sizes["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, sizes["num_hidden_layers"])
    types = gguf.GGMLQuantizationType
    wanted = {"f32": types.F32, "f16": types.F16, "q8_0": types.Q8_0}[kind]
    for name, array in load_file(source / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleave(array, heads if "q_proj" in name else kv_heads)
        dtype = wanted if array.ndim == 2 else types.F32
        data = gguf.quants.quantize(np.ascontiguousarray(array, np.float32), dtype)
        to = names.get_name(name, (".weight",))
        writer.add_tensor(to, data, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokens(writer: Any, vocab: int) -> None:
    """Add a vocabulary of words without a meaning, which the server requires."""
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(b"t%d " % i for i in range(3, vocab))])
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([2, 3, 3, *[1] * (vocab - 3)])  # unknown, control, normal


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows for llama.cpp's rotary embedding, which rotates neighbours, not halves."""
    split = array.reshape(heads, 2, -1, array.shape[1])
    return split.swapaxes(1, 2).reshape(array.shape)
