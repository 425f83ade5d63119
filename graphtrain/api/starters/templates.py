"""Configuration files of new projects: TOML with comments that name the other choices."""

from dataclasses import dataclass
from pathlib import Path

from graphtrain.api.starters.sizes import Size, steps_for
from graphtrain.config.render import toml
from graphtrain.config.settings import known_settings

KINDS = {
    "llama": "a Llama: rotary positions, RMSNorm, SwiGLU",
    "gpt2": "a GPT-2, which can be exported to Hugging Face: learned positions, LayerNorm, GELU",
    "shakespeare-char": "nanoGPT's character model: a small GPT-2 on characters, without biases",
    "lora": "a LoRA adapter for the Hugging Face model in a folder: --like lora=FOLDER",
    "hf": "the Hugging Face model in a folder, from new weights: --like hf=FOLDER",
}


@dataclass(frozen=True)
class Project:
    """Facts that a configuration file of a new project states."""

    directory: Path
    kind: str  # one of KINDS
    tokens: int  # of training
    size: Size
    folder: Path | None = None  # of the Hugging Face model
    overrides: str = ""  # of its config.json, as TOML; empty: none


def config_text(project: Project) -> str:
    """Return the configuration file of a project."""
    size, directory = project.size, project.directory
    steps = steps_for(project.tokens, size.global_batch_size * size.seq_len)
    name, model, peak = _MODELS[project.kind](project)
    every = max(steps // 10, 50)
    return f"""\
# Made by graphtrain init: {name}.
# Every setting with its meaning: graphtrain config show {directory}

[program]
target = "cpu:1"  # machine to compile for, for example h100:8; this one: graphtrain doctor

{model}
[program.batch]
global_batch_size = {size.global_batch_size}  # sequences per step
seq_len = {size.seq_len}  # tokens per sequence

[run]
directory = {toml(str(directory / "run"))}  # for checkpoints and metrics
{_init_from(project)}steps = {steps}
evaluate_every = {every}
evaluate_batches = 20

[run.checkpoints]
local_every = {every}  # steps between checkpoints, of which the newest 3 are kept

[run.data]
directory = {toml(str(directory / "data"))}  # made by graphtrain data prepare

[run.learning_rate]
{_choice("schedule", "cosine", "learning_rate", "run")}
peak = {peak:g}
minimum = {peak / 10:g}
warmup_steps = {min(100, steps // 10)}
"""


def _init_from(project: Project) -> str:
    return f"init_from = {toml(str(_base(project)))}\n" if project.kind == "lora" else ""


def _base(project: Project) -> Path:
    """Return the folder of the converted model that a LoRA starts from."""
    return project.directory / "base"


def _choice(name: str, value: str, table: str = "model", root: str = "program") -> str:
    """Return the line of a setting, with the other values that it accepts in a comment."""
    values = known_settings()[root, table, name]["enum"]
    others = ", ".join(toml(other) for other in values if other != value)
    return f"{name} = {toml(value)}  # or {others}"


def _llama(project: Project) -> tuple[str, str, float]:
    size = project.size
    return (
        "a Llama",
        f"""\
[program.model]  # vocab: unset, that of the data
layers = {size.layers}
embed = {size.embed}  # width
heads = {size.heads}
mlp = {size.gated_mlp}
{_choice("positions", "rope")}
{_choice("norm", "rms")}
{_choice("activation", "swiglu")}
""",
        1e-3 if size.embed < 512 else 6e-4,
    )


def _gpt2(project: Project) -> tuple[str, str, float]:
    size = project.size
    return (
        "a GPT-2 that graphtrain convert graphtrain-to-hf can export",
        _gpt2_model(size, "gelu_tanh", "all", "GPT-2 has all of them"),
        1e-3 if size.embed < 512 else 6e-4,
    )


def _shakespeare(project: Project) -> tuple[str, str, float]:
    model = _gpt2_model(project.size, "gelu", "none", 'an export to Hugging Face needs "all"')
    return (
        "nanoGPT's character model",
        f"""{model}
[program.optimizer]
beta2 = 0.99
""",
        1e-3,
    )


def _gpt2_model(size: Size, activation: str, bias: str, about_bias: str) -> str:
    return f"""\
[program.model]  # vocab: unset, that of the data
layers = {size.layers}
embed = {size.embed}  # width
heads = {size.heads}
mlp = {4 * size.embed}
{_choice("positions", "learned")}
max_position_embeddings = {size.seq_len}
{_choice("norm", "layer")}
{_choice("activation", activation)}
{_choice("bias", bias)}; {about_bias}
tie_word_embeddings = true  # the LM head is the transposed embedding
"""


def _lora(project: Project) -> tuple[str, str, float]:
    model = f"""\
[program.model]
preset = {toml(str(_base(project) / "model.toml"))}  # converted from {project.folder}

[program.adapter]  # LoRA: the weights of the model are frozen
rank = 8
alpha = 16.0
{_choice("base_dtype", "bfloat16", "adapter")}; nf4 is QLoRA
"""
    return f"a LoRA adapter for {project.folder}", model, 2e-4


def _hugging_face(project: Project) -> tuple[str, str, float]:
    overrides = f"overrides = {project.overrides}\n" if project.overrides else ""
    model = f"""\
[program.model]
hf = {toml(str(project.folder))}  # its config.json; the weights begin anew
{overrides}remat = "dots"  # activation checkpointing; or "none", "attention", "full"
"""
    return f"the model of {project.folder}", model, 6e-4


_MODELS = {
    "llama": _llama,
    "gpt2": _gpt2,
    "shakespeare-char": _shakespeare,
    "lora": _lora,
    "hf": _hugging_face,
}
