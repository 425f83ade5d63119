"""Save a Llama with random weights, and its tokenizer, in the format of transformers."""

import sys

import torch
import transformers


def main(tokenizer_folder: str, destination: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        rms_norm_eps=1e-5,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(destination)
    tokenizer.save_pretrained(destination)


if __name__ == "__main__":
    main(*sys.argv[1:])
