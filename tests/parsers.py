"""Every parser of files and options: sound files, and the function that reads them.

tests/unit/test_parsers.py and tests/hostile/run.py damage the files.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import damage
import numpy as np
import written_runs

from graphtrain.cache import Cache
from graphtrain.cache.bundles import KEYS_FILE
from graphtrain.cache.bundles import read as read_bundle
from graphtrain.cache.key import CacheKey
from graphtrain.checkpoints.info import check_same_model, read_checkpoint_info
from graphtrain.checkpoints.manifest import verify_files, write_manifest
from graphtrain.checkpoints.remote_manifest import (
    DamagedRemoteCheckpoint,
    RemoteFile,
    RemoteManifest,
    decode_manifest,
)
from graphtrain.checkpoints.strategy import read_json as read_strategy
from graphtrain.checkpoints.strategy import write_json as write_strategy
from graphtrain.config import load_config
from graphtrain.config.resolve import resolve
from graphtrain.data.indexed.description import read_description, summary
from graphtrain.data.indexed.verify import verify, verify_sample
from graphtrain.data.prepare.progress import read_progress
from graphtrain.data.prepare.text import prepare
from graphtrain.data.readers.corpus import Corpus
from graphtrain.data.tokenizers.open import load_tokenizer
from graphtrain.data.tokenizers.train import train_tokenizer
from graphtrain.files import json_digest
from graphtrain.launch.slurm import status
from graphtrain.models.shapes import parameter_arrays
from graphtrain.planning import ledger
from graphtrain.planning.assess import estimate
from graphtrain.planning.costs import read_prices
from graphtrain.planning.lock import lock_diff, lock_text, read_lock
from graphtrain.run.goodput.account import read_goodput
from graphtrain.run.goodput.page import goodput_page
from graphtrain.run.goodput.text import goodput_json, goodput_text
from graphtrain.run.loss_curve import loss_curve
from graphtrain.run.metrics import Journal, good_steps, read_journal
from graphtrain.run.prompt_file import read_prompt_file
from graphtrain.run.resume import Resumption, identity_of
from graphtrain.run.watch.watched_run import Known, WatchedRun
from graphtrain.torch_xla.graphs import read_extraction
from graphtrain.weights.base import _read_record
from graphtrain.weights.families import FAMILIES, family_of_config
from graphtrain.weights.hf_files import read_config
from graphtrain.weights.hf_record import record_hf_files, verify_hf_files
from graphtrain.weights.megatron.arguments import model_from_arguments
from graphtrain.weights.megatron.nemo import read_nemo_config
from graphtrain.weights.mindspore.ckpt_file import CkptWriter
from graphtrain.weights.mindspore.rank_files import open_ckpt
from graphtrain.weights.peft_folder import peft_scale, read_adapter_config
from graphtrain.weights.sources import ConvertedFolder
from graphtrain.weights.weight_folder import open_weight_files
from graphtrain.weights.writer import SafetensorsWriter
from lowering.artifact import Artifact
from lowering.ascend.strategy import strategy_file
from lowering.machine.leases import LeaseTiming
from lowering.machine.machine_tables import built_in
from lowering.machine.user_machines import with_machines_of
from lowering.neuron.persistent_cache import flags
from sharding_rules.arrays import ArraySpec
from sharding_rules.documents import read_bytes
from sharding_rules.mesh import MeshShape
from sharding_rules.plan import ArrayLayout
from sharding_rules.rules import Rules

CONFIG = """
[program]
target = "cpu:4"
rules = ["fsdp", "own.toml"]

[program.mesh]
data = 2
fsdp = "rest"

[program.model]
preset = "small.toml"
layers = 2
dtype = "float32"

[program.batch]
global_batch_size = 8
seq_len = 32

[program.optimizer]
weight_decay = 0.1

[run]
directory = "run"
steps = 16
seed = 3
report_every = 1

[run.data]
train = [{ dataset = "data/train", weight = 0.5 }, { dataset = "data/train", weight = 0.5 }]

[run.learning_rate]
peak = 1e-2
warmup_steps = 2
schedule = "cosine"
"""
PRESET = """
[program.model]
layers = 3
embed = 32
heads = 4
kv_heads = 2
mlp = 48
vocab = 264
"""
RULES = """
[parameters]
embed = "fsdp"
mlp = ["tensor"]

[activations]
batch = ["data", "fsdp"]

[arrays."mlp/up"]
mlp = "tensor"
"""
MACHINES = """
[h100]
memory = 94e9
gpu = { cores = 114 }

[mybox]
platform = "cuda"
memory = 48e9
flops = { bfloat16 = 180e12, fp8 = 360e12 }
link = 128e9
group = 4
achieved = { products = 0.5, attention = 0.2, tensor_overlap = 0.0 }
source = "data sheet"

[mypod]
based_on = "v5e"
"""


@dataclass(frozen=True)
class Parser:
    """Sound files, the function that reads them, and what makes damaged ones look written so."""

    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    seal: Callable[[Path], None] = lambda directory: None  # writes digests anew
    damaged: tuple[str, ...] = ("**/*",)  # patterns of the files that are damaged


def copy_files(sound: Path, copy: Path) -> None:
    """Replace `copy` by a copy of the sound files."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sound, copy, symlinks=True)


def damage_copy(name: str, sound: Path, copy: Path, random: Random) -> str:
    """Copy the sound files of a parser and damage some; return what was done."""
    copy_files(sound, copy)
    parser, done = PARSERS[name], []
    names = sorted(
        {path for pattern in parser.damaged for path in copy.glob(pattern) if path.is_file()}
    )
    paths = random.sample(names, random.choice((1, 1, 1, min(2, len(names)))))
    for path in paths:
        done.append(f"{path.relative_to(copy)}: {damage.damage_file(path, random)}")
    if random.random() < 0.5 and all(path.is_file() for path in paths):
        try:
            parser.seal(copy)
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            done.append("not sealed")
        else:
            done.append("sealed")
    return ", ".join(done)


def _write_config(directory: Path) -> None:
    (directory / "a.toml").write_text(CONFIG)
    (directory / "small.toml").write_text(PRESET)
    (directory / "own.toml").write_text(RULES)


def config(directory: Path, *changes: str) -> Any:
    """Load and resolve the configuration; paths in it are relative to its directory."""
    with chdir(directory):
        return resolve(load_config(Path("a.toml"), changes).program)


def _plan_parameters(directory: Path) -> None:
    from sharding_rules.plan import make_plan

    program = config(directory)
    rules = Rules.load([str(directory / "own.toml")])
    make_plan(parameter_arrays(program.model), rules, program.mesh)


def _write_model_configs(directory: Path) -> None:
    for family in FAMILIES:
        contents = {"model_type": family.model_type, **_MIXTURE}
        if family.model_type.startswith("gemma3"):
            del contents["rope_parameters"]
        (directory / family.model_type).mkdir()
        (directory / family.model_type / "config.json").write_text(json.dumps(contents))


_MIXTURE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 264,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
    "max_position_embeddings": 128, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128,
}  # fmt: skip


def _read_model_configs(directory: Path) -> None:
    for path in sorted(directory.glob("*/config.json")):
        contents = read_config(path.parent)
        model = family_of_config(contents).model_from_config(contents)
        parameter_arrays(model)


def _write_tensors(directory: Path) -> None:
    arrays = {f"layers.{i}.w": (np.dtype(np.float32), (8, 8)) for i in range(4)}
    writer = SafetensorsWriter(directory, arrays, 600)
    for name in arrays:
        writer.write(name, np.ones((8, 8), np.float32))
    writer.close()


def _read_tensors(directory: Path) -> None:
    folder = open_weight_files(directory)
    for name in folder.names:
        folder.dtype(name), folder.shape(name), folder.read(name)


def _write_converted(directory: Path) -> None:
    from graphtrain.config.render import render_model
    from graphtrain.weights.sources import stored_name

    _write_config(directory)
    model = config(directory).model
    arrays = {}
    for path, spec in parameter_arrays(model).items():
        inside = path.startswith("layers/")
        for layer in range(model.layers) if inside else (None,):
            shape = spec.shape[1:] if inside else spec.shape
            arrays[stored_name(path, layer)] = np.dtype(np.float32), shape
    writer = SafetensorsWriter(directory / "weights", arrays)
    for name, (dtype, shape) in arrays.items():
        writer.write(name, np.zeros(shape, dtype))
    writer.close()
    (directory / "model.toml").write_text(render_model(model))
    (directory / "hugging_face").mkdir()
    (directory / "hugging_face" / "tokenizer_config.json").write_text("{}")
    record_hf_files(directory)


def _read_converted(directory: Path) -> None:
    verify_hf_files(directory)
    weights = ConvertedFolder(directory)
    for path in parameter_arrays(weights.model):
        weights.dtype(path)
        weights.read([path], 0 if path.startswith("layers/") else None)


_LINES = [json.dumps({"text": f"text {number} of a small corpus " * 9}) for number in range(40)]


def _write_tokenizer(directory: Path) -> None:
    (directory / "a.jsonl").write_text("\n".join(_LINES))
    train_tokenizer([directory / "a.jsonl"], directory, "bpe", 300)


def _read_tokenizer(directory: Path) -> None:
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    tokenizer.decode(tokenizer.encode("a text, é 字 <|endoftext|>"))
    tokenizer.encode_batch(["text"]), tokenizer.encode_with_offsets(["text é"])
    tokenizer.special, tokenizer.chat_template, tokenizer.bos  # noqa: B018


def _write_gpt2(directory: Path) -> None:
    _write_tokenizer(directory)
    model = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(" ".join(pair) + "\n" for pair in model["merges"])
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}")


def _write_sentencepiece(directory: Path) -> None:
    (directory / "a.jsonl").write_text("\n".join(_LINES))
    train_tokenizer([directory / "a.jsonl"], directory, "sentencepiece", 290)


def _read_sentencepiece(directory: Path) -> None:
    tokenizer = load_tokenizer(directory / "tokenizer.model")
    tokenizer.decode(tokenizer.encode("a text é"))
    tokenizer.encode_batch(["text"]), tokenizer.encode_with_offsets(["a small"])


def _write_dataset(directory: Path) -> None:
    (directory / "a.jsonl").write_text("\n".join(_LINES))
    prepare([directory / "a.jsonl"], directory / "data", "bytes", validation=0.1)


def _read_dataset(directory: Path) -> None:
    prefix = directory / "data" / "train"
    read_description(prefix), verify_sample(prefix), verify(prefix), summary(prefix)


def _seal_json(path: Path) -> None:
    contents = json.loads(path.read_bytes())
    contents.pop("digest", None)
    contents["digest"] = json_digest(contents)
    path.write_text(json.dumps(contents))


def _write_checkpoint(directory: Path) -> None:
    _write_config(directory)
    _write_dataset(directory)
    step = directory / "run" / "checkpoints" / "4"
    (step / "about").mkdir(parents=True)
    (step / "state").mkdir()
    (step / "state" / "d").write_bytes(b"state")
    with chdir(directory):
        identity = identity_of(load_config(Path("a.toml")))
    metadata = {
        "loader": {"epoch": 0, "step": 4},
        "arrays": {"parameters/head": [[4, 4], "float32"], "step": [[], "int32"]},
        "rows": [0, 1],
        "identity": identity,
        "changes": [{"step": 2, "name": "run.seed", "from": 1, "to": 3}],
        "journal": {"bytes": 3, "sha256": "x"},
    }
    (step / "about" / "metadata").write_text(json.dumps(metadata))
    write_manifest(step)


def _seal_checkpoint(directory: Path) -> None:
    step = directory / "run" / "checkpoints" / "4"
    (step / "manifest.json").unlink(missing_ok=True)
    write_manifest(step)


def _seal_manifest(directory: Path) -> None:
    _seal_json(directory / "run" / "checkpoints" / "4" / "manifest.json")


def _write_remote(directory: Path) -> None:
    file = RemoteFile(5, "0" * 64)
    manifest = RemoteManifest(
        4,
        "2026-01-31T12:00:00Z",
        "v1/files/4-1-00000000",
        {"state/d": file},
        {"metrics.jsonl": file},
    )
    (directory / "4.json").write_bytes(manifest.encode())


def _read_remote(directory: Path) -> None:
    try:
        manifest = decode_manifest(read_bytes(directory / "4.json"), 4)
    except (OSError, ValueError) as error:  # a store gives bytes, or a CacheError
        raise DamagedRemoteCheckpoint("store", 4, str(error)) from error
    assert all(name.startswith("v1/files/4-") for name in manifest.objects())
    assert manifest.nbytes >= 0


def _read_checkpoint(directory: Path) -> None:
    with chdir(directory):
        loaded = load_config(Path("a.toml"))
        resumption = Resumption(Path("run"), partial(identity_of, loaded))
        resumption.changes(), resumption.info
    checkpoints = directory / "run" / "checkpoints"
    verify_files(checkpoints / "4")
    info = read_checkpoint_info(checkpoints, 4)
    check_same_model(checkpoints / "4", info, loaded.program)


def _write_goodput(directory: Path) -> None:
    facts: dict[str, Any] = {"process": "a", "at": 100.0}
    lines = [
        facts | {"event": "start", "host": "b", "pid": 1},
        facts | {"at": 102.0, "activity": "restore", "seconds": 2.0, "step": 0},
        facts | {"at": 102.0, "event": "begin", "step": 4, "compile_seconds": {"train": 3.0}},
        facts | {"at": 105.0, "activity": "first_step", "seconds": 3.0, "step": 5, "steps": 1},
        facts | {"at": 109.0, "activity": "step", "seconds": 4.0, "step": 9, "steps": 4, "late": 1,
                 "late_seconds": 2.0},
        facts | {"at": 109.0, "event": "end", "outcome": "stopped by SIGTERM"},
    ]  # fmt: skip
    (directory / "goodput.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def _read_goodput(directory: Path) -> None:
    result = read_goodput(directory)
    goodput_text(result), goodput_page(result), json.dumps(goodput_json(result), allow_nan=False)


def _write_journal(directory: Path) -> None:
    lines = [
        json.dumps({"step": step, "loss": 2.5, "grad_norm": 1.0, "step_seconds": 0.1})
        for step in range(1, 12)
    ]
    lines.append(json.dumps({"step": 11, "validation_loss": 2.0}))
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def _write_watched(directory: Path) -> None:
    run = directory / "run"
    written_runs.append(run, written_runs.records(1, 4))
    written_runs.append(run, [{"step": 2, "prompt": "a", "text": "b"}], "samples.jsonl")
    spike = {"step": 3, "on_spike": "skip", "loss": None, "documents": {"data": [1, 2]}}
    written_runs.append(run, [spike], "spikes.jsonl")
    written_runs.write_goodput(run, "completed")
    written_runs.write_checkpoint(run, 4)
    (run / "config.toml").write_text(written_runs.CONFIG)


def _read_watched(directory: Path) -> None:
    """Read a run twice, as a page does; whatever is damaged, there is an answer."""
    run, known = WatchedRun("run", directory / "run", Cache(directory / "cache")), Known()
    for _ in range(2):
        answer = run.answer(known)
        json.dumps(answer, allow_nan=False)
        known = Known(answer["curves"], answer["sequence"], answer.get("digest", ""))


def _read_journal(directory: Path) -> None:
    records = read_journal(directory)
    good_steps(records), loss_curve(records)
    Journal(directory, after=6, tensorboard=False, written={"bytes": 99, "sha256": "x"}).close()


def _write_preparation(directory: Path) -> None:
    _write_dataset(directory)
    from graphtrain.data.prepare.progress import PrepareProgress, write_progress

    write_progress(directory / "data", PrepareProgress({"a": 1}, "bytes"))


def _read_preparation(directory: Path) -> None:
    read_progress(directory / "data", {"a": 1})
    prepare([directory / "a.jsonl"], directory / "data", "bytes", validation=0.1)


def _read_corpus(directory: Path) -> None:
    corpus = Corpus.from_inputs([directory / "a.jsonl"])
    for chunk in corpus.chunks():
        corpus.texts(chunk)


def _write_chat(directory: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [
        {"messages": messages},
        {"instruction": "a", "input": "b", "output": "c", "history": [["a", "b"]]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[:1]},
    ]
    for number, line in enumerate(lines):
        (directory / f"{number}.jsonl").write_text(f"{json.dumps(line)}\n" * 2)


def _read_chat(directory: Path) -> None:
    from graphtrain.data.prepare.conversations import read_conversations

    for path in sorted(directory.glob("*.jsonl")):
        corpus = Corpus.from_inputs([path], keys=())
        for chunk in corpus.chunks():
            for place, record in corpus.records(chunk):
                read_conversations(record, "auto", place)


def _write_store(directory: Path) -> None:
    os.umask(0o022)
    store = Cache(directory / "cache")
    for number in range(2):
        key = CacheKey.of(text=number)
        store.put(key, Artifact(bytes(9 + number), {"graph": "train", "memory": {"peak": 1}}))
        request = CacheKey.of(graph="train", target={"machine": "cpu", "topology": "1"}, n=number)
        store.record_request(request, key, graph="train")
        store.store_bundle(key, request, "train", {"a": b"b"})
        store.store_failure(request, "train", "text", "log", {"error": "e", "kind": "OutOfMemory"})
    store.pin(key.digest)
    with store.lock(key):
        pass
    (directory / "cache" / "ledger.jsonl").write_text(_ledger_line() * 3)


def _write_machines(directory: Path) -> None:
    (directory / "targets.toml").write_text(MACHINES)
    (directory / "prices.toml").write_text('currency = "EUR"\n[device_hour]\nh100 = 2.5\n')


def _read_machines(directory: Path) -> None:
    with_machines_of(directory / "targets.toml", "targets.toml", built_in())
    read_prices(directory / "prices.toml")


def _ledger_line() -> str:
    costs = {"compile_seconds": 1.0, "step_seconds": 0.1, "peak_bytes": 1e6}
    entry = {
        "target": "cpu:1", "request": "x", "when": "2026-01-01T00:00:00Z", "steps": 3,
        "stablehlo_bytes": 5, "predicted": costs, "measured": costs,
    }  # fmt: skip
    return json.dumps(entry) + "\n"


def _read_store(directory: Path) -> None:
    store = Cache(directory / "cache", LeaseTiming(0.01, 0.1))
    for number in range(2):
        key = CacheKey.of(text=number)
        request = CacheKey.of(graph="train", target={"machine": "cpu", "topology": "1"}, n=number)
        store.get(key), store.get_by_request(request), store.contains(request)
        store.explain(request, graph="train"), store.stored_failure(request, "train")
        store.contains_program(key.digest), store.lease(key).try_acquire()
    store.explain(CacheKey.of(graph="train", target=None, n=7), graph="train")
    for entry in store.list():
        store.describe(entry.program)
    store.stored_programs(), store.verify(), store.pinned()
    entries = ledger.read(ledger.ledger_path(directory / "cache"))
    ledger.error_bars(entries, "cpu:1"), ledger.predict_compile_seconds(entries, "cpu:1", 7)
    for keys in sorted((directory / "cache").rglob(KEYS_FILE)):
        read_bundle(keys.parent)
    store.verify(repair=True), store.gc()


@cache
def _assessment() -> Any:
    return estimate(_plain_program())


@cache
def _plain_program() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        _write_config(Path(folder))
        return config(Path(folder))


def _write_lock(directory: Path) -> None:
    (directory / "a.plan").write_text(lock_text(_assessment()))


def _read_lock(directory: Path) -> None:
    lock_diff(read_lock(directory / "a.plan"), _assessment())


def _write_strategy(directory: Path) -> None:
    write_strategy(directory / "a.json", _plain_program())


def _write_extraction(directory: Path) -> None:
    manifest = {
        "format": 1, "script": "train.py", "versions": {"torch": "2"}, "devices": 4,
        "meshes": [{"axes": {"data": 2, "model": 2}, "devices": [0, 1, 2, 3]}], "steps": 2,
        "warnings": ["x"], "error": {"message": "m"},
        "graphs": [{"hash": "abc", "steps": [0, 1]}],
    }  # fmt: skip
    (directory / "graphs.json").write_text(json.dumps(manifest))
    (directory / "abc.hlo.pb").write_bytes(b"")


def _read_extraction(directory: Path) -> None:
    from graphtrain.compile.extracted_graphs import extracted_graphs

    extracted_graphs(read_extraction(directory), None)


def _write_prompts(directory: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    prompts = ["a", {"prompt": "b", "id": 3}, {"messages": messages}]
    (directory / "a.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in prompts))


def _read_prompts(directory: Path) -> None:
    read_prompt_file(directory / "a.jsonl")


def _write_records(directory: Path) -> None:
    (directory / "base.json").write_text(
        json.dumps({"folder": "/a", "files": {"a": {"size": 1, "modified_ns": 2, "sha256": "x"}}})
    )


def _write_adapter(directory: Path) -> None:
    contents = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False, "bias": "none",
        "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}, "modules_to_save": None,
        "alpha_pattern": {".*q_proj": 8},
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(contents))


def _read_adapter(directory: Path) -> None:
    peft_scale(read_adapter_config(directory), "model.layers.0.q_proj", 4)


def _write_jobs(directory: Path) -> None:
    (directory / "jobs.json").write_text('{"compile": 1, "run": 2}')


def _write_flags(directory: Path) -> None:
    (directory / "compile_flags.json").write_text('["--target=trn1", "--optlevel=1"]')


def _write_ckpt(directory: Path) -> None:
    """Files of two ranks of MindSpore; without their CRC, which would find all damage."""
    layout = ArrayLayout(ArraySpec((4, 3), (None, None)), (("tensor",), ()))
    strategy = strategy_file({"a": layout, "b": layout}, MeshShape({"tensor": 2}))
    (directory / "strategy").mkdir()
    for rank in range(2):
        (directory / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt").write_bytes(strategy)
        path = directory / f"rank_{rank}" / "llama.ckpt"
        path.parent.mkdir()
        writer = CkptWriter(path)
        writer.write("a", np.ones((2, 3), np.float32))
        writer.write("b", np.ones((2, 3), np.float16))


def _read_ckpt(directory: Path) -> None:
    files = open_ckpt(directory, None)
    for name in files.names:
        files.dtype(name), files.shape(name), files.read(name)


def _write_nemo(directory: Path) -> None:
    (directory / "model_config.yaml").write_text(
        "num_layers: 4\nhidden_size: 16\nffn_hidden_size: 24\nnum_attention_heads: 4\n"
        "encoder_seq_length: 8\nmax_position_embeddings: ${.encoder_seq_length}\n"
        "normalization: rmsnorm\nlayernorm_epsilon: 1.0e-5\nactivation: fast-swiglu\n"
        "bias: false\nposition_embedding_type: rope\nwindow_size: [4, 0]\n"
    )


def _read_nemo(directory: Path) -> None:
    model_from_arguments(read_nemo_config(directory / "model_config.yaml"), 48)


PARSERS = {
    "configuration": Parser(_write_config, config),
    "rules": Parser(_write_config, _plan_parameters, damaged=("own.toml",)),
    "config.json": Parser(_write_model_configs, _read_model_configs, damaged=("*/config.json",)),
    "weights": Parser(_write_tensors, _read_tensors),
    "converted weights": Parser(
        _write_converted, _read_converted, record_hf_files,
        ("model.toml", "weights/*", "hugging_face/*", "hugging_face.json"),
    ),
    "tokenizer.json": Parser(_write_tokenizer, _read_tokenizer, damaged=("*.json",)),
    "GPT-2 tokenizer": Parser(
        _write_gpt2,
        lambda folder: load_tokenizer(f"{folder}/vocab.json,{folder}/merges.txt").encode("a"),
        damaged=("vocab.json", "merges.txt", "tokenizer_config.json"),
    ),
    "sentencepiece": Parser(_write_sentencepiece, _read_sentencepiece, damaged=("*.model",)),
    "dataset": Parser(
        _write_dataset, _read_dataset, lambda folder: _seal_json(folder / "data" / "train.json"),
        ("data/train*",),
    ),
    "metadata": Parser(
        _write_checkpoint, _read_checkpoint, _seal_checkpoint, ("run/**/metadata",)
    ),
    "manifest": Parser(
        _write_checkpoint, _read_checkpoint, _seal_manifest, ("run/**/manifest.json", "run/**/d"),
    ),
    "remote manifest": Parser(
        _write_remote, _read_remote, lambda folder: _seal_json(folder / "4.json")
    ),
    "metrics": Parser(_write_journal, _read_journal),
    "goodput": Parser(_write_goodput, _read_goodput),
    "live page": Parser(_write_watched, _read_watched, damaged=("run/*.*", "run/**/manifest.json")),
    "preparation": Parser(
        _write_preparation, _read_preparation,
        damaged=("data/manifest.json", "data/.unfinished/*", "data/*.json"),
    ),
    "corpus": Parser(_write_tokenizer, _read_corpus, damaged=("a.jsonl",)),
    "conversations": Parser(_write_chat, _read_chat),
    "cache": Parser(_write_store, _read_store),
    "machines": Parser(_write_machines, _read_machines),
    "plan lock": Parser(_write_lock, _read_lock),
    "strategy": Parser(_write_strategy, lambda folder: read_strategy(folder / "a.json")),
    "extraction": Parser(_write_extraction, _read_extraction),
    "MindSpore's .ckpt": Parser(_write_ckpt, _read_ckpt),
    "NeMo's configuration": Parser(_write_nemo, _read_nemo),
    "base.json": Parser(_write_records, _read_record),
    "adapter_config.json": Parser(_write_adapter, _read_adapter),
    "prompts": Parser(_write_prompts, _read_prompts),
    "jobs.json": Parser(_write_jobs, status),
    "compile_flags.json": Parser(_write_flags, flags.read),
}  # fmt: skip
