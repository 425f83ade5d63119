"""Checkpoints that megatron-core itself writes on a CPU, and the scores that it computes.

python megatron_models.py DIRECTORY: for each case, `dist` and `classic` checkpoints of one rank and
of several, and `logits.npy` of the tokens in `tokens.npy`.
"""

import os
import sys
import warnings
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp

warnings.simplefilter("ignore")
# What a CPU has not.
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"
torch.cuda.current_stream = lambda *_: None
torch.Tensor.cuda = lambda tensor, *_, **__: tensor

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

random.get_cuda_rng_tracker().fork = lambda *_: nullcontext()
moe_utils.te_general_gemm = None  # megatron-core 0.16 asks for it without Transformer Engine too
# Its own is of a process that imports megatron-core once more, for every rank and checkpoint.
RESULTS = mp.get_context("fork")
filesystem_async._get_write_results_queue = lambda: RESULTS.Manager().Queue()

LENGTH = 12
LLAMA = {
    "num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48,
    "group_query_attention": True, "num_query_groups": 2, "normalization": "RMSNorm",
    "norm_epsilon": 1e-6, "swiglu": True, "add_bias_linear": False, "add_qkv_bias": False,
    "position_embedding_type": "rope", "rotary_base": 500, "rotary_percent": 1.0,
    "untie_embeddings_and_output_weights": True, "max_position_embeddings": 16,
    "vocab_size": 90, "padded_vocab_size": 96, "kv_channels": 8, "bias_gelu_fusion": False,
}  # fmt: skip
GPT2 = LLAMA | {
    "group_query_attention": False, "num_query_groups": 1, "normalization": "LayerNorm",
    "norm_epsilon": 1e-5, "swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": True,
    "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False,
}  # fmt: skip
# All that models like Llama have: biases of queries, keys and values, and norms too.
QWEN = LLAMA | {"add_qkv_bias": True, "qk_layernorm": True, "kv_channels": 16}
MIXTURE = LLAMA | {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
    "moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": 40,
    "moe_shared_expert_gate": True, "expert_model_parallel_size": 2,
}  # fmt: skip
# Settings, and ranks of tensor, pipeline, chunks of a virtual pipeline, experts.
CASES = {
    "qwen": (QWEN, (2, 2, 2, 1)),
    "gpt2": (GPT2, (1, 2, None, 1)),
    "mixture": (MIXTURE, (1, 1, None, 2)),
}


def configure(
    told: dict,
    tensor: int,
    pipeline: int,
    chunks: int | None,
    experts: int,
    layout: str | None = None,
):
    """The settings of megatron-core, as Megatron-LM takes them from its arguments."""
    gated = told["swiglu"]
    groups = told["num_query_groups"] if told["group_query_attention"] else None
    extra = {}
    if told.get("num_experts"):
        extra = {
            "num_moe_experts": told["num_experts"],
            "moe_token_dispatcher_type": "allgather",
            **{name: value for name, value in told.items() if name.startswith("moe_")},
        }
    return TransformerConfig(
        num_layers=told["num_layers"],
        hidden_size=told["hidden_size"],
        num_attention_heads=told["num_attention_heads"],
        num_query_groups=groups,
        kv_channels=told["kv_channels"],
        ffn_hidden_size=told["ffn_hidden_size"],
        normalization=told["normalization"],
        layernorm_epsilon=told["norm_epsilon"],
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        bias_activation_fusion=told["bias_gelu_fusion"],
        add_bias_linear=told["add_bias_linear"],
        add_qkv_bias=told["add_qkv_bias"],
        qk_layernorm=told.get("qk_layernorm", False),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=chunks,
        expert_model_parallel_size=experts,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_layout=layout,
        **extra,
    )


def build(told: dict, ranks: tuple, layout: str | None = None) -> list[GPTModel]:
    """The chunks of this rank; every rank that has logits has all of them."""
    config = configure(told, *ranks, layout)
    spec = get_gpt_layer_local_spec(
        num_experts=told.get("num_experts"),
        qk_layernorm=told.get("qk_layernorm", False),
        normalization=told["normalization"],
    )
    chunks = [None] if ranks[2] is None else range(ranks[2])
    return [
        GPTModel(
            config,
            spec,
            vocab_size=told["padded_vocab_size"],
            max_sequence_length=told["max_position_embeddings"],
            pre_process=parallel_state.is_pipeline_first_stage(False, chunk),
            post_process=parallel_state.is_pipeline_last_stage(False, chunk),
            share_embeddings_and_output_weights=not told["untie_embeddings_and_output_weights"],
            position_embedding_type=told["position_embedding_type"],
            rotary_base=told["rotary_base"],
            parallel_output=False,
            vp_stage=chunk,
        )
        for chunk in chunks
    ]


def states(models: list[GPTModel], sharded: bool) -> dict:
    """As Megatron-LM puts the chunks of a rank into a checkpoint."""
    names = ["model"] if len(models) == 1 else [f"model{i}" for i in range(len(models))]
    method = "sharded_state_dict" if sharded else "state_dict_for_save_checkpoint"
    return {name: getattr(one, method)() for name, one in zip(names, models, strict=True)}


def work(rank: int, world: int, name: str, directory: Path, ranks: tuple) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{directory}/meeting-{name}-{world}"
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(*ranks[:3], expert_model_parallel_size=ranks[3])
    told, here = CASES[name][0], directory / name
    models = build(told, ranks)
    alone, there = world == 1, here / ("one" if world == 1 else "several")
    if alone:
        fill(models[0])
        here.mkdir()
        np.save(here / "logits.npy", scores(models[0]))
    else:
        loaded = dist_checkpointing.load(states(models, True), str(here / "one/dist"))
        for key, model in zip(states(models, False), models, strict=True):
            model.load_state_dict(loaded[key])
    arguments = Namespace(
        **told
        | {
            "tensor_model_parallel_size": ranks[0],
            "pipeline_model_parallel_size": ranks[1],
            "expert_model_parallel_size": ranks[3],
            "model_type": ModelType.encoder_or_decoder,
            "params_dtype": torch.float32,
        }
    )
    common = {"args": arguments, "checkpoint_version": 3.0, "iteration": 7}
    (there / "dist").mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(states(models, True) | common, str(there / "dist"))
    folder = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if ranks[1] > 1:
        folder += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if ranks[3] > 1:
        folder += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    path = there / "classic/iter_0000007" / folder
    path.mkdir(parents=True)
    arguments.activation = torch.nn.functional.gelu  # which nothing here may look up
    torch.save(states(models, False) | common, path / "model_optim_rng.pt")
    (there / "classic/latest_checkpointed_iteration.txt").write_text("7")
    torch.distributed.barrier()


def fill(model: GPTModel) -> None:
    """Random numbers in all weights: norms and biases begin at ones and zeros."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        scale = 0.2 if weight.ndim > 1 else 0.5
        weight.data = torch.randn(weight.shape, generator=generator) * scale + ("norm" in name)


def scores(model: GPTModel) -> np.ndarray:
    tokens = torch.randint(0, 90, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(LENGTH).expand(2, -1)
    later = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    with torch.no_grad():
        return model(tokens, positions, later).numpy()


def main(directory: Path) -> None:
    tokens = torch.randint(0, 90, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    np.save(directory / "tokens.npy", tokens.numpy())
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    for name, (_, ranks) in CASES.items():
        for here in ((1, 1, None, 1), ranks):
            world = here[0] * here[1] * here[3]
            # Forked: megatron-core is imported once.
            mp.start_processes(work, (world, name, directory, here), world, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
