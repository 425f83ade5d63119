"""transformers' generate with a static KV cache, eager; see decode.py."""

from collections.abc import Callable
from pathlib import Path


def make_work(directory: Path, dtype: str, prompt: int, long: int, tokens: int) -> Callable:
    import torch
    import transformers

    load = transformers.LlamaForCausalLM.from_pretrained
    model = load(directory / "hf", dtype=getattr(torch, dtype)).eval()

    @torch.no_grad()
    def work(streams: int) -> None:
        if not streams:
            model(torch.randint(0, 32000, (1, long)), logits_to_keep=1)
            return
        ids = torch.randint(0, 32000, (streams, prompt))
        model.generate(
            ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False,
            cache_implementation="static", disable_compile=True,
            attention_mask=torch.ones_like(ids),
        )  # fmt: skip

    return work
