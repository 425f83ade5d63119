"""One graph, from settings to a stored program, in a process of its own.

The forkserver preloads this module, so a worker begins with everything imported. Nothing here
starts a backend at import: a backend does not survive a fork.
"""

import contextlib
import hashlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import lowering
from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.compile.extracted_graphs import read_module
from graphtrain.compile.memory_check import with_largest_arrays
from graphtrain.config.resolve import mesh_shape
from graphtrain.config.schema import Imported, Program, is_imported
from graphtrain.errors import USER_ERRORS
from graphtrain.graphs.build import build_graph
from graphtrain.graphs.decode import TOKENS_PER_CALL
from graphtrain.torch_xla.graphs import Extracted
from lowering.artifact import RECORD_VERSION, Artifact
from lowering.errors import CompilerMissing, LoweringError, OutOfMemory
from lowering.lowered import Lowered
from lowering.machine.target import Target
from lowering.xla import backend as xla  # noqa: F401  (preloaded for the workers; backend() finds it imported)
from sharding_rules.rules import Rules


class Bundled(LoweringError):
    """The compiler is not here; what it would be given is stored."""

    def __init__(self, directory: Path, missing: CompilerMissing) -> None:
        super().__init__(str(missing))
        self.directory, self.preflight = directory, missing.preflight


def work(
    program: Program | Extracted,
    name: str,
    request: CacheKey,
    store: Path,
    scratch: Path,
    pipe: Connection,
) -> None:
    """Body of a worker process: compile one graph, report stages and the outcome through the pipe.

    Sends ("stage", text) any number of times, then ("done", program digest, compiled, peak bytes),
    ("bundled", message, directory, what preflight found, peak bytes) or ("failed", message, class
    of the error, peak bytes).
    """
    os.setpgid(0, 0)  # a compiler that this starts ends with it
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)  # so that nothing is left elsewhere
    threading.Thread(target=_end_with_parent, args=(scratch.parent,), daemon=True).start()
    with _output_to(scratch / "log.txt"):
        try:
            digest, compiled = produce(
                program, name, request, Cache(store), scratch, lambda s: pipe.send(("stage", s))
            )
            pipe.send(("done", digest, compiled, _peak_bytes()))
        except Bundled as made:
            where = str(made.directory)
            pipe.send(("bundled", str(made), where, made.preflight, _peak_bytes()))
        except USER_ERRORS as error:
            print(error, file=sys.stderr)
            pipe.send(("failed", str(error), type(error).__name__, _peak_bytes()))
        except Exception as error:
            traceback.print_exc()
            kind = type(error).__name__
            pipe.send(("failed", f"{kind}: {error}".partition("\n")[0], kind, _peak_bytes()))


def produce(
    program: Program | Extracted,
    name: str,
    request: CacheKey,
    cache: Cache,
    scratch: Path,
    say: Callable[[str], None],
) -> tuple[str, bool]:
    """Make sure the cache holds the program of a request; return its digest, and if it is new.

    The caller holds the request's lease. Who has another request that leads to the same program
    waits here and then finds it done.
    """
    if isinstance(program, Program) and is_imported(program.model):
        say("comparing with PyTorch")
        model, strict = _compared(program, name, program.model, cache)
        program = replace(program, model=model)
        if strict:
            say(f"front end: strict, because {strict}")
    say("tracing")
    lowered = lower(program, name)
    if name == "train" and isinstance(program, Program) and is_imported(program.model):
        lowered.facts["flops_per_token"] = _flops_per_token(program)  # a run makes no module
    (scratch / "program.mlir").write_text(lowered.text)
    key = program_key(lowered, request)
    with cache.lock(key, on_wait=lambda owner: say(f"waiting for {owner}")):
        new = cache.get(key) is None
        if new:
            say("compiling")
            began = time.perf_counter()
            artifact = _compile(program, lowered, key, request, cache)
            say(f"storing after {time.perf_counter() - began:.1f} s")
            cache.put(key, artifact)
        cache.link(request, key, graph=name)
    return key.digest, new


def _compared(program: Program, name: str, model: Imported, cache: Cache) -> tuple[Imported, str]:
    """The model with the front end that is right, and why that is the strict one, if it is."""
    from graphtrain.torch_frontend.versions import check_versions, installed

    check_versions(installed(), hf=model.hf is not None)
    from graphtrain.torch_frontend.apart import ensure_apart
    from graphtrain.torch_frontend.parity import ensure_parity

    target = Target.parse(program.target)
    lowering.backend(target).described_devices(target)  # before anything asks JAX for a device
    strict = ensure_parity(model, cache.root).strict
    model = replace(model, front_end="strict") if strict else model
    ring = Rules.load(program.rules).activations.get("attended", ())
    split = mesh_shape(program).size(ring) > 1
    if program.batch.documents == "apart" or split or name in TOKENS_PER_CALL:
        ensure_apart(model, cache.root)
    return model, strict


def _flops_per_token(program: Program) -> dict[str, float]:
    from graphtrain.cost_model.native_equivalent import with_native_model
    from graphtrain.errors import PlanError
    from graphtrain.models.flops import useful_flops_per_token

    try:
        return useful_flops_per_token(with_native_model(program))
    except PlanError:
        return {}


def _end_with_parent(scratch: Path) -> None:
    """End this process and its compiler when its parent, which holds the lease, has died.

    Args:
        scratch: the parent's, which it can no longer remove.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(scratch, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _peak_bytes() -> int:
    """The most memory that this process has held, or a compiler it started, if that is more."""
    whose = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return 1024 * max(resource.getrusage(who).ru_maxrss for who in whose)


def _compile(
    program: Program | Extracted, lowered: Lowered, key: CacheKey, request: CacheKey, cache: Cache
) -> Artifact:
    """Compile; where the compiler is not here, store what it would be given as a bundle.

    Raises:
        OutOfMemory: the compiler finds no way to fit it; with what takes most.
        Bundled: says where the bundle is.
    """
    try:
        return lowering.backend(lowered.target).compile(lowered)
    except OutOfMemory as error:
        raise with_largest_arrays(error, program) from None
    except CompilerMissing as error:
        path = cache.store_bundle(key, request, lowered.name, error.files)
        raise Bundled(path, error) from None


def lower(program: Program | Extracted, name: str) -> Lowered:
    """Trace and shard one graph for the program's target; read one that is extracted."""
    target = Target.parse(program.target)
    if isinstance(program, Extracted):
        return _lower_extracted(program, target)
    backend = lowering.backend(target)
    backend.described_devices(target)  # before the model is built, which may ask for a device
    rules, graph = Rules.load(program.rules), build_graph(program, name)
    if name == "train":  # the graph that holds every array
        rules.check_patterns(graph.arrays())
    return backend.lower(graph, rules, mesh_shape(program), target)


def _lower_extracted(extracted: Extracted, target: Target) -> Lowered:
    from lowering.xla.imported_hlo import Imported, lower

    module = read_module(extracted.file)
    return lower(Imported("torch-xla", module, extracted.meshes), target)


def program_key(lowered: Lowered, request: CacheKey) -> CacheKey:
    """What must be equal for two lowered programs to compile to the same executable."""
    return CacheKey.of(
        graph=lowered.name,
        text=hashlib.sha256(lowered.text.encode()).hexdigest(),
        mesh=dict(lowered.plan.mesh.axes),  # names the axes by which the run places its arrays
        inputs=lowered.facts["inputs"],  # the loader finds arrays by these paths and layouts
        outputs=lowered.facts["outputs"],
        options=lowered.options,
        record=RECORD_VERSION,
        target=request.part("target"),
        toolchain=request.part("toolchain"),
    )


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Send what this process and the compiler below it print to a file."""
    with path.open("ab", buffering=0) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
        yield
        sys.stdout.flush()
        sys.stderr.flush()
