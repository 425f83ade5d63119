"""Seconds to rank the strategies of a 70B Llama on 1,024 H100, before anything is compiled.

python tests/benchmarks/search.py [--rounds 3] [--json FILE]
"""

import argparse
from pathlib import Path

from measuring import finish, summary

from graphtrain.config.schema import Batch, Mesh, Model, Program
from graphtrain.planning.search import search

LLAMA_70B = Model(layers=80, embed=8192, heads=64, kv_heads=8, mlp=28672, vocab=32000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    batch = Batch(global_batch_size=1024, seq_len=4096)
    program = Program(target="h100:1024", model=LLAMA_70B, batch=batch, mesh=Mesh(data="rest"))
    rounds = [search(program) for _ in range(arguments.rounds)]
    seconds = summary([found.seconds for found in rounds])
    finish({"strategies": rounds[0].considered, "seconds": seconds}, arguments.json)


if __name__ == "__main__":
    main()
