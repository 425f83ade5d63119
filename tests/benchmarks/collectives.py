"""Predicted collectives beside those of compiled steps, for every configuration of a list.

    python tests/benchmarks/collectives.py TARGET [NAME ...]

TARGET has 8 devices, as in h100:8, cpu:8 or v5e:2x4. A row agrees if both have the same operations
over the same mesh axes, of those above 1 kB. Each row compiles a step, in about ten seconds. The
prediction was corrected with the first list; the held-out ones are counted apart.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "graphs"))
from compared_collectives import CASES, Cases, compared_program, listed, sent
from held_out_collectives import FIRST, SECOND
from programs import lower, unoptimized

from graphtrain.config.resolve import resolve
from graphtrain.cost_model.traffic import predict_collectives
from lowering.hlo.collectives import Collective
from lowering.xla import backend as xla


def main(target: str, *names: str) -> None:
    lists = {"known": CASES, "held out": FIRST.get(target, {}), "later": SECOND.get(target, {})}
    for title, cases in lists.items():
        chosen = [name for name in cases if not names or name in names]
        if chosen:
            agreeing = sum(compare(name, target, cases) for name in chosen)
            print(f"{target}, {title}: {agreeing} of {len(chosen)} agree", flush=True)


def compare(name: str, target: str, cases: Cases) -> bool:
    """Compile one case, print how the prediction differs, and return whether the lists agree."""
    program = compared_program(name, target, cases)
    record = xla.compile(unoptimized(lower(program, "train"))).record
    compiled = tuple(Collective.from_record(each) for each in record["collectives"])
    predicted = predict_collectives(resolve(program))
    differing = sorted(listed(compiled) ^ listed(predicted))
    megabytes = f"{sent(predicted) / 1e6:.1f} of {sent(compiled) / 1e6:.1f} MB"
    print(f"{name}: {megabytes}{'; differs in ' if differing else ''}", end="")
    print(", ".join(f"{op} over {axes}" for axes, op in differing), flush=True)
    return not differing


if __name__ == "__main__":
    main(*sys.argv[1:])
