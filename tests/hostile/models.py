"""Folders of Hugging Face models: sound ones, damaged ones, and ones that try to run code."""

import json
import os
import pickle
from pathlib import Path
from random import Random
from typing import Any

import damage
import numpy as np
import parsers
from safetensors.numpy import save_file

from graphtrain.data.tokenizers.train import train_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 264, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "torch_dtype": "float32",
}  # fmt: skip
PLAN = """
[program.batch]
global_batch_size = 2
seq_len = 16
[run]
directory = "run"
steps = 1
data.train = "data"
"""


def _tensors() -> dict[str, np.ndarray]:
    embed, mlp, heads, kv = 32, 48, 32, 16
    shapes = {"model.embed_tokens.weight": (264, embed), "model.norm.weight": (embed,),
              "lm_head.weight": (264, embed)}  # fmt: skip
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (heads, embed), "self_attn.k_proj": (kv, embed),
                "self_attn.v_proj": (kv, embed), "self_attn.o_proj": (embed, heads),
                "mlp.gate_proj": (mlp, embed), "mlp.up_proj": (mlp, embed),
                "mlp.down_proj": (embed, mlp), "input_layernorm": (embed,),
                "post_attention_layernorm": (embed,),
            }.items()
        }  # fmt: skip
    random = np.random.default_rng(0)
    return {name: random.random(shape, np.float32) for name, shape in shapes.items()}


def write(place: Path) -> None:
    """Write three sound folders: one file, two files with an index, and a .bin of PyTorch."""
    import torch

    (place / "a.toml").write_text(PLAN)
    tensors = _tensors()
    for name in ("single", "sharded", "bin"):
        folder = place / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
        (folder / "a.jsonl").write_text("\n".join(parsers._LINES))
        train_tokenizer([folder / "a.jsonl"], folder, "bpe", 260)
        (folder / "a.jsonl").unlink()
    save_file(tensors, place / "single" / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, place / "sharded" / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (place / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    torch.save(loaded, place / "bin" / "pytorch_model.bin")


class _Exploit:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def damaged(place: Path, random: Random, canary: Path) -> tuple[Path, str]:
    """Copy one of the folders with damage; return the copy, and what was done."""
    kind = random.choice(("single", "sharded", "bin"))
    copy = place / "copy"
    parsers.copy_files(place / kind, copy)
    attack = random.random()
    if attack < 0.08:
        return copy, _pickle(copy, random, canary)
    if attack < 0.16:
        return copy, _link(copy, random)
    if attack < 0.22:
        return copy, _code(copy, canary)
    path = random.choice(sorted(copy.iterdir()))
    return copy, f"{kind}/{path.name}: {damage.damage_file(path, random)}"


def _pickle(copy: Path, random: Random, canary: Path) -> str:
    import torch

    for path in copy.glob("*.safetensors*"):
        path.unlink()
    target = copy / "pytorch_model.bin"
    exploit = _Exploit(canary)
    if random.random() < 0.5:
        torch.save({"model.norm.weight": exploit}, target)
    else:
        target.write_bytes(pickle.dumps({"model.norm.weight": exploit}))
    return "a pickle that runs code"


def _link(copy: Path, random: Random) -> str:
    target = random.choice(("/etc/passwd", "/dev/zero", "/dev/stdin", "/", "..", "loop", "/proc/1"))
    name = random.choice(
        ("notes.txt", "config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja")
    )
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(name if target == "loop" else target)
    return f"{name} is a link to {target}"


def _code(copy: Path, canary: Path) -> str:
    """Name Python code in config.json and tokenizer_config.json, as trust_remote_code reads it."""
    (copy / "modeling_evil.py").write_text(f"import os\nos.mkdir({str(canary)!r})\n")
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model",
    }  # fmt: skip
    config["model_type"] = "evil"
    (copy / "config.json").write_text(json.dumps(config))
    return "code in auto_map"


def executed() -> None:
    """Raise the defect of code that ran."""
    raise damage.Defect("code in the folder was executed")
