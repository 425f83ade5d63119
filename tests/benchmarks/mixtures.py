"""FLOP and peak memory of training steps of mixtures, of programs compiled for h100:1.

    python tests/benchmarks/mixtures.py [EXPERTS ...]

No GPU is needed. The ratio is FLOP over the model's own for its active experts, without
recomputation; the goal is at most 1.25. The mixture is dropless: grouped matrix products.
"""

import argparse

from graphtrain.config.schema import Batch, MixtureOfExperts, Model, Program

TOKENS = {8: 8192, 32: 8192, 128: 32768}  # by experts: at least 512 choices for each
SEQ_LEN = 1024


def program(experts: int) -> Program:
    model = Model(
        layers=2, embed=1024, heads=8, kv_heads=8, mlp=2048, vocab=32000, remat="none",
        moe=MixtureOfExperts(experts=experts, experts_per_token=2),
    )  # fmt: skip
    sequences = TOKENS[experts] // SEQ_LEN
    batch = Batch(global_batch_size=sequences, seq_len=SEQ_LEN)
    return Program(target="h100:1", model=model, batch=batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experts", nargs="*", type=int, default=list(TOKENS))
    arguments = parser.parse_args()

    import lowering
    from graphtrain.compile import worker
    from graphtrain.config.resolve import resolve
    from graphtrain.models.flops import step_flops_per_token

    for experts in arguments.experts:
        of = program(experts)
        lowered = worker.lower(resolve(of), "train")
        record = lowering.backend(lowered.target).compile(lowered).record
        ratio = record["flops"] / (step_flops_per_token(of) * of.batch.tokens)
        peak = record["memory"]["peak"] / 1e9
        tokens = f"{of.batch.tokens:,} tokens"
        print(f"{experts:>4} experts, {tokens}: ratio {ratio:.2f}, {peak:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
