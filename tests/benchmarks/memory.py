"""Peak memory of training steps: the compiler's beside the prediction and beside the minimum.

    python tests/benchmarks/memory.py [NAME ...] [--json FILE] [--known FILE] [--buffers]
        [--attention dense] [--chunk none]

Every row compiles a training step for machines that are not here. --known takes the compiler's
answers from an earlier FILE instead, to try a prediction without compiling again.

The minimum is what no schedule can avoid: parameters, gradients, optimizer state, and what the
policy of recomputation keeps for the backward pass. --buffers lists, where the peak is more than
1.15 times that, the largest buffers of the compiler's own report.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Batch, Loss, Mesh, Model, PipelineSettings, Program

SMALL = {"layers": 8, "embed": 1024, "heads": 16, "kv_heads": 4, "mlp": 2816, "vocab": 32000}
SEVEN = {"layers": 32, "embed": 4096, "heads": 32, "mlp": 11008, "vocab": 32000}
SEVENTY = {
    "layers": 80, "embed": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672, "vocab": 32000,
}  # fmt: skip
NONE, ATTENTION, DOTS, FULL = ({"remat": name} for name in ("none", "attention", "dots", "full"))
TENSOR = ("data", "tensor")
CUBE = {"data": 2, "fsdp": 8, "tensor": 4}
SQUARE = {"fsdp": 16, "tensor": 4}
WIDE = {"fsdp": 64, "tensor": 8}
SEQUENCE = ("data", "fsdp", "tensor", "sequence")
LONG = (8, 2048, 1)  # sequences, length, microbatches
STAGES = {"data": 2, "stage": 4}
PIPELINE = ("data", "pipeline")
ONE_FORWARD = PipelineSettings(schedule="1f1b")
CIRCULAR = PipelineSettings(schedule="circular", virtual_stages=2)
GPT = {
    "layers": 24, "embed": 2048, "heads": 16, "mlp": 8192, "vocab": 51200, "positions": "learned",
    "max_position_embeddings": 2048,
    "norm": "layer", "activation": "gelu", "bias": "all", "tie_word_embeddings": True,
}  # fmt: skip
THIRTEEN = {"layers": 40, "embed": 5120, "heads": 40, "mlp": 13824, "vocab": 32000}
# name, target, mesh, rules, model, batch, and a pipeline's schedule
ROWS = [
    ("0.2B dots", "h100:8", {"data": 8}, ("data",), SMALL | DOTS, (32, 2048, 1)),
    ("0.2B full", "h100:8", {"data": 8}, ("data",), SMALL | FULL, (32, 2048, 1)),
    ("0.2B none", "h100:8", {"data": 8}, ("data",), SMALL | NONE, (16, 1024, 1)),
    ("0.2B attention", "h100:8", {"data": 8}, ("data",), SMALL | ATTENTION, (16, 1024, 1)),
    ("0.2B zero1", "h100:8", {"data": 8}, ("zero1",), SMALL | DOTS, (32, 2048, 1)),
    ("0.2B zero2 x4", "h100:8", {"data": 8}, ("zero2",), SMALL | DOTS, (64, 2048, 4)),
    ("0.2B data x4", "h100:8", {"data": 8}, ("data",), SMALL | DOTS, (64, 2048, 4)),
    ("0.2B fsdp", "h100:8", {"fsdp": 8}, ("fsdp",), SMALL | DOTS, (32, 2048, 1)),
    ("0.2B tensor", "h100:8", {"data": 2, "tensor": 4}, TENSOR, SMALL | DOTS, LONG),
    ("0.2B sequence", "h100:8", {"data": 2, "tensor": 4}, SEQUENCE, SMALL | DOTS, LONG),
    ("7B fsdp 8", "h100:64", {"data": 8, "fsdp": 8}, SEQUENCE, SEVEN | FULL, (64, 4096, 1)),
    ("7B fsdp 64", "h100:64", {"fsdp": 64}, SEQUENCE, SEVEN | FULL, (128, 4096, 1)),
    ("7B fsdp 64 dots", "h100:64", {"fsdp": 64}, SEQUENCE, SEVEN | DOTS, (64, 4096, 1)),
    ("7B fsdp 64 x4", "h100:64", {"fsdp": 64}, SEQUENCE, SEVEN | FULL, (256, 4096, 4)),
    ("7B tensor 8", "h100:64", {"data": 8, "tensor": 8}, SEQUENCE, SEVEN | FULL, (64, 4096, 1)),
    ("7B cube", "h100:64", CUBE, SEQUENCE, SEVEN | DOTS, (64, 4096, 1)),
    ("70B fsdp 64 tensor 8", "h100:512", WIDE, SEQUENCE, SEVENTY | FULL, (64, 4096, 1)),
    ("70B fsdp 512", "h200:512", {"fsdp": 512}, SEQUENCE, SEVENTY | FULL, (512, 4096, 1)),
    ("0.2B stages", "h100:8", STAGES, PIPELINE, SMALL | FULL, (32, 2048, 8)),
    ("0.2B stages circular", "h100:8", STAGES, PIPELINE, SMALL | FULL, (32, 2048, 8), CIRCULAR),
    ("0.2B stages 1f1b", "h100:8", STAGES, PIPELINE, SMALL | FULL, (32, 2048, 8), ONE_FORWARD),
    ("0.2B data x4", "v5e:2x4", {"data": 8}, ("data",), SMALL | DOTS, (64, 2048, 4)),
    ("0.2B dots", "v5e:2x4", {"data": 8}, ("data",), SMALL | DOTS, (32, 2048, 1)),
    ("0.2B full", "v5e:2x4", {"data": 8}, ("data",), SMALL | FULL, (32, 2048, 1)),
    ("0.2B fsdp", "v5e:2x4", {"fsdp": 8}, ("fsdp",), SMALL | DOTS, (32, 2048, 1)),
    ("0.2B zero2 x4", "v5e:2x4", {"data": 8}, ("zero2",), SMALL | DOTS, (64, 2048, 4)),
    ("0.2B sequence", "v5e:2x4", {"data": 2, "tensor": 4}, SEQUENCE, SMALL | DOTS, LONG),
    ("7B fsdp 64", "v5p:4x4x4", {"fsdp": 64}, SEQUENCE, SEVEN | FULL, (128, 4096, 1)),
    ("7B fsdp 16 tensor 4", "v5p:4x4x4", SQUARE, SEQUENCE, SEVEN | FULL, (64, 4096, 1)),
    ("7B fsdp 16 tensor 4 dots", "v5p:4x4x4", SQUARE, SEQUENCE, SEVEN | DOTS, (64, 4096, 1)),
    # Short sequences, beside which neither scores nor logits are large.
    ("7B short full", "h100:8", {"fsdp": 8}, ("data", "fsdp"), SEVEN | FULL, (64, 512, 1)),
    ("7B short dots", "h100:8", {"fsdp": 8}, ("data", "fsdp"), SEVEN | DOTS, (64, 512, 1)),
    # These were compiled after the estimate had been settled by the rows above.
    ("1.3B GPT hybrid", "a100:16", {"data": 2, "fsdp": 8}, SEQUENCE, GPT | DOTS, (64, 2048, 1)),
    ("1.3B GPT data x4", "a100:16", {"data": 16}, ("zero1",), GPT | FULL, (256, 2048, 4)),
    ("13B cube", "b200:64", CUBE, SEQUENCE, THIRTEEN | FULL, (64, 4096, 2)),
    ("13B tensor 8 fsdp", "h200:32", {"fsdp": 4, "tensor": 8}, SEQUENCE, THIRTEEN | DOTS, LONG),
    ("1.3B GPT fsdp", "v6e:4x4", {"fsdp": 16}, SEQUENCE, GPT | DOTS, (32, 2048, 1)),
]

_GOAL = 1.15  # of the minimum
_SHOWN = 8  # largest buffers


def program(target, mesh, rules, model, batch, pipeline=PipelineSettings()) -> Program:  # noqa: B008
    sequences, length, microbatches = batch
    return Program(
        target=target,
        mesh=Mesh(**mesh),
        rules=rules,
        model=Model(**model),
        batch=Batch(global_batch_size=sequences, seq_len=length, microbatches=microbatches),
        pipeline=pipeline,
    )


def compiled(of: ResolvedProgram) -> tuple[int, list[str]]:
    """The peak, and lines of XLA's report of what it has planned for: sizes, and the arrays that
    share them."""
    import lowering
    from graphtrain.compile import worker

    lowered = worker.lower(of, "train")
    with tempfile.TemporaryDirectory() as directory:
        dump = {"xla_dump_to": directory, "xla_dump_hlo_as_text": True}
        lowered = replace(lowered, options=lowered.options | dump)
        record = lowering.backend(lowered.target).compile(lowered).record
        reports = sorted(Path(directory).glob("*memory-usage-report.txt"))
        lines = reports[0].read_text().splitlines() if reports else []
    shown = [line.strip() for line in lines if "; " in line]
    return record["memory"]["peak"], shown[1 : _SHOWN + 1]


def main() -> None:
    from graphtrain.config.resolve import resolve
    from graphtrain.cost_model.memory import lower_bound, memory

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--known", type=Path)
    parser.add_argument("--attention", choices=["auto", "dense"], default="auto")
    parser.add_argument(
        "--chunk", default="auto", help="program.loss.chunk: auto, none or a number"
    )
    parser.add_argument("--buffers", action="store_true")
    parser.add_argument("names", nargs="*", help="rows; by default all")
    arguments = parser.parse_args()
    chunk = int(arguments.chunk) if arguments.chunk.isdigit() else arguments.chunk
    known = {}
    if arguments.known and arguments.known.exists():
        known = {
            tuple(row["key"]): row["compiler"] for row in json.loads(arguments.known.read_text())
        }
    rows, errors = [], []
    heads = f"{'predicted':>10}{'compiler':>10}{'error':>8}{'minimum':>10}{'over it':>8}"
    print(f"{'model and mesh':<26}{'target':<12}{heads}")
    for name, target, *settings in ROWS:
        if arguments.names and name not in arguments.names:
            continue
        of = program(target, *settings)
        model = replace(of.model, attention=arguments.attention)
        of = replace(of, model=model, loss=Loss(chunk=chunk))
        made = resolve(of)
        predicted, minimum = memory(made), lower_bound(made)
        compiler, buffers = known.get((name, target)), []
        if compiler is None:
            compiler, buffers = compiled(made)
        error = predicted.peak / compiler - 1
        errors.append(abs(error))
        sizes = f"{predicted.peak / 1e9:>9.2f}G{compiler / 1e9:>9.2f}G"
        over = f"{minimum / 1e9:>9.2f}G{compiler / minimum:>8.2f}"
        print(f"{name:<26}{target:<12}{sizes}{error:>8.1%}{over}", flush=True)
        if arguments.buffers and compiler > _GOAL * minimum:
            print("\n".join(f"    {line}" for line in buffers))
        sizes_of = {"predicted": predicted.peak, "compiler": compiler, "minimum": minimum}
        rows.append({"key": [name, target], **sizes_of})
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"worst {max(errors):.1%}; within 10 %: {sum(e <= 0.1 for e in errors)} of {len(errors)}")


if __name__ == "__main__":
    main()
