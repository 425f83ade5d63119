"""Names of the graphs that a purpose needs; imports no JAX."""

from typing import Literal

from graphtrain.config.resolve import ResolvedProgram
from graphtrain.config.schema import Run, is_imported
from graphtrain.config.serving_program import (
    batch_shards,
    packed_rows,
    serving_program,
    without_adapters,
)

FIRST_PREFILL = "first_prefill"
NO_TOKEN = -1  # in the outputs of decode, after the last token of a sequence
ADAPTER_RANKS = "adapter_ranks"  # of a sequence: begin and end of its adapter's ranks
_FIRST_TOKENS = 64  # of a prompt, with which a process answers soonest
_FEWEST_LAYERS = 6  # of programs whose layers are worth a loop
# Elements of a matrix of the MLP. Beyond that, copying the weights of a layer takes longer than
# loading its part of a program and running it first, about 0.03 s.
_LARGEST_IN_LOOP = 16 << 20
_FEW_TOKENS = 8  # of each slot in one call: the last tokens of texts
_MOST_TOKENS = 1024  # of all slots in one call; with more, no matrix product is faster
TRAINING_GRAPHS = ("init", "train", "evaluate")
EVALUATE_AVERAGED = "evaluate_averaged"  # with program.optimizer.ema_decay
DUMP = "dump"  # name of the training step that also returns arrays, and of its purpose
SPIKE = "spike"  # metric: 1 if the program left the step undone
COPY_STATE, CHECKSUMS = VERIFICATION_GRAPHS = ("copy_state", "checksums")  # run.verify_every
KINDS = ("forward", "backward", "gradients")  # of the arrays of a dump; their names begin so
SUMMARY = ("norm", "max_abs", "mean", "zeros", "non_finite")  # statistics of an array in a dump

ServingPurpose = Literal["generate", "batch", "evaluate", "serve"]
PlannedPurpose = Literal["train"] | ServingPurpose
Purpose = Literal["dump"] | PlannedPurpose


def purpose_while_training(run: Run) -> Literal["batch", "evaluate"] | None:
    """Return what a run does beside training: evaluate tasks, continue prompts, both, or nothing.

    The graphs that evaluate tasks also continue prompts.
    """
    if run.tasks is not None:
        return "evaluate"
    return None if run.samples is None else "batch"


def is_training_graph(name: str) -> bool:
    """Return whether a graph is of training, and not of generation."""
    return name in (*TRAINING_GRAPHS, EVALUATE_AVERAGED, *VERIFICATION_GRAPHS)


def training_graphs(program: ResolvedProgram) -> list[str]:
    """Return the names of the graphs that a run of a program may need."""
    has_average = program.optimizer.ema_decay is not None
    return [*TRAINING_GRAPHS, *([EVALUATE_AVERAGED] if has_average else [])]


def graphs_for(program: ResolvedProgram, purpose: Purpose) -> tuple[ResolvedProgram, list[str]]:
    """Return the program that a purpose needs, and the names of its graphs.

    Args:
        program: The program that is, or was, trained.
        purpose: Train and evaluate; dump arrays of training steps; generate one sequence; generate
            a batch of many; evaluate tasks, which scores and generates many; or serve.
    """
    if purpose == "dump":
        return program, ["init", DUMP]
    if purpose == "train":
        return program, training_graphs(program)
    served = serving_program(program)
    if purpose != "serve":
        served = without_adapters(served)
    serve = served.settings.serve
    names = ["serve_init", *(f"prefill_{size}" for size in serve.prefill)]
    is_one = purpose in ("generate", "serve")  # often one sequence alone is generated
    if is_one and (size := first_prefill_size(served)):
        names.append(f"{FIRST_PREFILL}_{size}")
    has_decode_one = is_one and serve.slots > 1 and batch_shards(served) == 1
    if has_decode_one:
        names.append("decode_one")
    if purpose != "generate" or not has_decode_one:
        names.append("decode")
    if purpose == "generate" and serve.beams:
        names.append("decode_beams")
    if purpose != "generate":
        names.append("copy_prefix")
    if purpose == "serve":
        names += [f"score_{size}" for size in serve.prefill]
    if purpose == "evaluate":
        names += [f"score_rows_{size}" for size in row_sizes(served)]
        names += [f"score_packed_{size}" for size in packed_sizes(served)]
    return served, names


def first_prefill_size(served: ResolvedProgram) -> int | None:
    """Return the size of the program of a process's first prompt; None: there is none.

    On a CPU, XLA's library of kernels prepares each product of a program when it runs first. The
    program `first_prefill_N` has its layers in a loop. It is slower than `prefill_N`, but with
    neither of them loaded it gives a token sooner: of a Llama of 125M parameters, after 0.17 s of
    processor in place of 0.47 s (two cores of an EPYC, jaxlib 0.10.2).
    """
    model, serve, target = served.model, served.settings.serve, served.target
    if (
        target.platform != "cpu"
        or target.devices > 1
        or is_imported(model)
        or model.moe is not None
        or model.global_attention_every is not None
        or model.layers < _FEWEST_LAYERS
        or model.embed * model.mlp > _LARGEST_IN_LOOP
        or serve.total_adapter_rank
    ):
        return None
    return next((size for size in serve.prefill if size >= _FIRST_TOKENS), serve.prefill[-1])


def row_sizes(served: ResolvedProgram) -> tuple[int, ...]:
    """Return the numbers of tokens of each slot that the programs `score_rows_N` process."""
    serve = served.settings.serve
    first, *others = serve.prefill
    # For long texts alone: others are packed.
    largest = [size for size in others if size * serve.slots <= _MOST_TOKENS][-1:] or [first]
    return tuple(dict.fromkeys((min(_FEW_TOKENS, first), *largest)))


def packed_sizes(served: ResolvedProgram) -> tuple[int, ...]:
    """Return the numbers of tokens of each row that the programs `score_packed_N` process.

    These are sizes of prefill: the largest that a call has room for, and smaller ones for the last
    texts of a group and for continuations of long texts.
    """
    sizes = served.settings.serve.prefill
    fitting = [size for size in sizes if size * packed_rows(served) <= _MOST_TOKENS] or sizes[:1]
    smaller = [size for size in fitting if size <= fitting[-1] // 4][-1:]
    return tuple(dict.fromkeys((fitting[0], *smaller, fitting[-1])))
