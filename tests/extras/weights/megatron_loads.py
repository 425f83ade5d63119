"""Scores of megatron-core on a CPU, with checkpoints that graphtrain wrote.

python megatron_loads.py DIRECTORY: DIRECTORY contains a folder for each case below, with the
checkpoint and `case.json`, and gets `logits.npy` in it.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from megatron_models import (
    CASES,
    LENGTH,
    GPTModel,
    build,
    dist_checkpointing,
    parallel_state,
    states,
)


def work(rank: int, place: Path, case: dict) -> None:
    """Load this rank's part, and compute its part of the scores."""
    torch.set_num_threads(1)
    tensor, pipeline, expert = case["tensor"], case["pipeline"], case["expert"]
    world = tensor * pipeline * expert
    meeting = f"file://{place}/meeting"
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
    told = CASES[case["model"]][0] | {"padded_vocab_size": case["padded_vocab_size"]}
    (model,) = build(told, (tensor, pipeline, None, expert), case["layout"])
    model.eval()
    load(model, place / "checkpoint/release", case)
    logits = scores(model, pipeline)
    if rank == world - 1:
        np.save(place / "logits.npy", logits.numpy())
    torch.distributed.barrier()


def load(model: GPTModel, folder: Path, case: dict) -> None:
    """Load all weights of this rank; a missing or an unknown one is an error."""
    if case["format"] == "torch-dist":
        loaded = dist_checkpointing.load(
            states([model], True), str(folder), strict="raise_unexpected"
        )
    else:
        name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
        if case["pipeline"] > 1:
            name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
        if case["expert"] > 1:
            name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
        loaded = torch.load(folder / name / "model_optim_rng.pt", weights_only=False)
    assert loaded["checkpoint_version"] == 3.0 and loaded["args"].num_layers == 4
    model.load_state_dict(loaded["model"], strict=True)


def scores(model: GPTModel, pipeline: int) -> torch.Tensor:
    tokens = torch.randint(0, 90, (2, LENGTH), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(LENGTH).expand(2, -1)
    later = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    with torch.no_grad():
        if stage > 0:
            hidden = torch.empty(LENGTH, 2, model.config.hidden_size)
            torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        output = model(tokens, positions, later)
        if stage < pipeline - 1:
            torch.distributed.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
    return output


def main(directory: Path) -> None:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    for place in sorted(directory.iterdir()):
        case = json.loads((place / "case.json").read_text())
        world = case["tensor"] * case["pipeline"] * case["expert"]
        mp.start_processes(work, (place, case), world, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
