"""The published weak-scaling configurations of Megatron-LM against what the search would choose.

    python tests/benchmarks/megatron.py [--json FILE] [--only NAME ...] [--attained 0.44]

For every published model, batch and number of A100s, two comparisons of predicted time: with all
strategies, and with those that the paper had: data, pipeline and tensor parallelism, with layers
computed again. The published (tensor, stage, data) is taken with its best microbatch and schedule.
Operations per second are counted as the paper counts them, recomputation included (equation 3).

--attained is the part of the peak that products reach. With 1.0, a roofline, links are too slow for
the devices. The paper's own 1.7B model, which no link slows, attains 137 of 312 TFLOP/s: 0.44.

Source: Narayanan et al. 2021, table 1, https://arxiv.org/abs/2104.04473
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from graphtrain.config.schema import Batch, Mesh, Model, Program
from graphtrain.planning.candidates import Candidate, candidates

GOAL = 1.1  # the published choice over the best, in predicted time
LENGTH, VOCAB = 2048, 51200


class Row(NamedTuple):
    """A line of the table."""

    name: str
    heads: int
    embed: int
    layers: int
    tensor: int
    stage: int
    devices: int
    sequences: int
    teraflops: int  # per GPU and second, published

    @property
    def program(self) -> Program:
        model = Model(
            layers=self.layers,
            embed=self.embed,
            heads=self.heads,
            mlp=4 * self.embed,
            vocab=VOCAB,
            positions="learned",
            max_position_embeddings=LENGTH,
            norm="layer",
            activation="gelu",
            bias="all",
            tie_word_embeddings=True,
        )
        batch = Batch(global_batch_size=self.sequences, seq_len=LENGTH)
        target = f"a100:{self.devices}"
        return Program(target=target, model=model, batch=batch, mesh=Mesh(data="rest"))

    @property
    def mesh(self) -> tuple[int, int, int]:
        return self.tensor, self.stage, self.devices // self.tensor // self.stage

    def teraflops_in(self, seconds: float) -> float:
        """Per GPU and second, by the paper's count."""
        width = self.layers * self.embed
        per_token = 96 * width * self.embed
        share = 1 + LENGTH / (6 * self.embed) + VOCAB / (16 * width)
        return per_token * share * self.sequences * LENGTH / seconds / self.devices / 1e12


ROWS = [
    Row("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
    Row("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
    Row("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
    Row("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
    Row("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138),
    Row("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    Row("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
    Row("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    Row("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
    Row("1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
]


def as_published(one: Candidate) -> bool:
    """Whether a strategy uses only what the paper had."""
    kinds = {"fsdp": "1", "zero": "none", "remat": "full"}
    return one.choice("sequence") != "on" and all(
        one.choice(family) == choice for family, choice in kinds.items()
    )


def axes(one: Candidate) -> tuple[int, int, int]:
    sizes = one.mesh.axes
    return sizes["tensor"], sizes["stage"], sizes["data"] * sizes["fsdp"]


def described(one: Candidate | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "seconds": one.seconds,
        "mesh": str(one.mesh),
        "microbatches": one.program.batch.microbatches,
        "remat": one.choice("remat"),
        "schedule": one.choice("schedule"),
        "peak_bytes": one.memory.peak,
    }


def best(found: Iterable[Candidate]) -> Candidate | None:
    return min(found, key=lambda one: one.rank, default=None)


def compared(row: Row, attained: float) -> dict[str, Any]:
    every = [one for one in candidates(row.program, attained) if one.memory.fits]
    theirs = [one for one in every if as_published(one)]
    published = best(one for one in theirs if axes(one) == row.mesh)
    found = {"all": best(every), "then": best(theirs), "published": published}
    about: dict[str, Any] = {"name": row.name, "fit": len(every), "fit_then": len(theirs)}
    about |= {name: described(one) for name, one in found.items()}
    if published is None:
        return about
    ratios = {f"over_{name}": published.seconds / found[name].seconds for name in ("all", "then")}
    predicted = row.teraflops_in(published.seconds)
    return about | ratios | {"predicted_teraflops": predicted, "published_teraflops": row.teraflops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--attained", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", default=[row.name for row in ROWS])
    arguments = parser.parse_args()
    results = []
    print(
        "model    TP,PP,DP   s | over best then: mesh | over best of all: mesh | TFLOP/s: published"
    )
    for row in (row for row in ROWS if row.name in arguments.only):
        one = compared(row, arguments.attained)
        results.append(one)
        mesh = ",".join(map(str, row.mesh))
        if one["published"] is None:
            print(f"{row.name:<9}{mesh:<10} does not fit", flush=True)
            continue
        print(
            f"{row.name:<9}{mesh:<10}{one['published']['seconds']:6.2f} | "
            f"{one['over_then']:.3f} {one['then']['mesh']} | "
            f"{one['over_all']:.3f} {one['all']['mesh']} {one['all']['remat']} | "
            f"{one['predicted_teraflops']:.0f}: {row.teraflops}",
            flush=True,
        )
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    for name in ("then", "all"):
        within = sum(one.get(f"over_{name}", 2) <= GOAL for one in results)
        print(f"within 10 % of the best of {name}: {within} of {len(results)}")


if __name__ == "__main__":
    main()
