"""Worker process: compile one graph, from its settings to a stored program.

The forkserver preloads this module, so that a worker starts with everything imported. Importing it
must not initialize a JAX backend, which would not survive a fork.
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
from multiprocessing.connection import Connection
from pathlib import Path

import lowering
from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.cache.stored_requests import Origin, current_user
from graphtrain.compile.extracted_graphs import read_module
from graphtrain.compile.front_end import check_model
from graphtrain.compile.memory_check import with_largest_arrays
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.identity import user_code
from graphtrain.config.resolve import ResolvedProgram
from graphtrain.cost_model.native_equivalent import sizes_unknown
from graphtrain.cost_model.tower import useful_step_flops
from graphtrain.errors import PlanError
from graphtrain.graphs.build import build_graph
from graphtrain.graphs.names import DUMP, is_training_graph
from graphtrain.torch_xla.graphs import ExtractedGraph
from lowering.artifact import RECORD_VERSION, Artifact
from lowering.errors import CompilerMissing, LoweringError, OutOfMemory
from lowering.lowered import Lowered
from lowering.xla import backend as xla  # noqa: F401  (preloaded for the workers; backend() finds it imported)
from sharding_rules.errors import UserError


class BundleStored(LoweringError):
    """The compiler is not installed; its input is stored in the cache as a bundle."""

    def __init__(self, directory: Path, missing: CompilerMissing) -> None:
        super().__init__(str(missing))
        self.directory, self.preflight = directory, missing.preflight


def worker_main(
    program: ResolvedProgram | ExtractedGraph,
    name: str,
    request: CacheKey,
    configuration: str,
    store: Path,
    scratch: Path,
    pipe: Connection,
) -> None:
    """Compile one graph in a worker process; send stages and the outcome through the pipe.

    Messages are ("stage", text), any number of times, then ("done", program digest, compiled, peak
    bytes), ("bundled", message, directory, facts of the preflight, peak bytes) or ("failed",
    message, class of the error, peak bytes).

    Args:
        program: the program, or graphs extracted from a torch-xla script.
        name: name of the graph.
        request: its request key.
        configuration: name of the configuration, for listings of the cache.
        store: directory of the cache.
        scratch: temporary directory of this worker.
        pipe: connection to the pool.
    """
    os.setpgid(0, 0)  # so that a compiler started by this process is killed with it
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)  # the pool removes this directory
    threading.Thread(target=_end_with_parent, args=(scratch.parent,), daemon=True).start()
    with _output_to(scratch / "log.txt"):
        try:
            digest, compiled = compile_to_cache(
                program,
                name,
                request,
                configuration,
                Cache(store),
                scratch,
                lambda stage: pipe.send(("stage", stage)),
            )
            pipe.send(("done", digest, compiled, _peak_bytes()))
        except BundleStored as stored:
            directory = str(stored.directory)
            pipe.send(("bundled", str(stored), directory, stored.preflight, _peak_bytes()))
        except UserError as error:
            print(error, file=sys.stderr)
            pipe.send(("failed", str(error), type(error).__name__, _peak_bytes()))
        except Exception as error:
            traceback.print_exc()
            kind = type(error).__name__
            pipe.send(("failed", f"{kind}: {error}".partition("\n")[0], kind, _peak_bytes()))


def compile_to_cache(
    program: ResolvedProgram | ExtractedGraph,
    name: str,
    request: CacheKey,
    configuration: str,
    cache: Cache,
    scratch: Path,
    say: Callable[[str], None],
) -> tuple[str, bool]:
    """Ensure that the cache contains the program of a request.

    The caller must hold the request's lease. If a worker for another request compiles the same
    program, this one waits and then finds it in the cache.

    Args:
        program: the program, or graphs extracted from a torch-xla script.
        name: name of the graph.
        request: its request key.
        configuration: name of the configuration, for listings of the cache.
        cache: the cache.
        scratch: temporary directory, for the StableHLO.
        say: called with each stage.

    Returns:
        The digest of the program, and whether it was compiled now.
    """
    if isinstance(program, ResolvedProgram):
        of_training = is_training_graph(name) or name == DUMP
        program = check_model(program, cache, say, generates=not of_training)
    say("tracing")
    lowered = lower(program, name)
    if name == "train" and isinstance(program, ResolvedProgram) and sizes_unknown(program.settings):
        lowered.facts["flops_per_token"] = _flops_per_token(program)  # a run builds no module
    _check_user_code(program, name, request)
    (scratch / "program.mlir").write_text(lowered.text)
    key = program_key(lowered, request)
    with cache.lock(key, on_wait=lambda owner: say(f"waiting for {owner}")):
        new = cache.get(key) is None
        if new:
            say("compiling")
            start_time = time.perf_counter()
            artifact = _compile(program, lowered, key, request, cache)
            say(f"storing after {time.perf_counter() - start_time:.1f} s")
            cache.put(key, artifact)
        origin = Origin(configuration, current_user())
        cache.record_request(request, key, graph=name, origin=origin)
    return key.digest, new


def _check_user_code(
    program: ResolvedProgram | ExtractedGraph, name: str, request: CacheKey
) -> None:
    """Check that code of the user was traced as the request digests it.

    Raises:
        PlanError: a file was edited since the request was made.
    """
    if not isinstance(program, ResolvedProgram) or not user_code(program.settings):
        return
    current, asked = request_keys(program, [name])[name].part("program"), request.part("program")
    tables = ("model", "optimizer", "loss")
    if any(current[table] != asked[table] for table in tables):
        raise PlanError("the code that the configuration names was edited meanwhile; compile again")


def _flops_per_token(program: ResolvedProgram) -> dict[str, float]:
    """Return the useful FLOPs per token by metric name; empty if the module does not show them."""
    try:
        return useful_step_flops(program.settings)
    except PlanError:
        return {}


def _end_with_parent(scratch: Path) -> None:
    """Kill this process and its compiler when the parent, which holds the lease, has ended.

    Args:
        scratch: temporary directory of the parent, which is removed too.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(scratch, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _peak_bytes() -> int:
    """Return the peak memory of this process or of its compiler, whichever is larger."""
    process_scopes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return 1024 * max(resource.getrusage(scope).ru_maxrss for scope in process_scopes)


def _compile(
    program: ResolvedProgram | ExtractedGraph,
    lowered: Lowered,
    key: CacheKey,
    request: CacheKey,
    cache: Cache,
) -> Artifact:
    """Compile a lowered graph; if the compiler is not installed, store its input as a bundle.

    Raises:
        OutOfMemory: the program does not fit; the message names the largest part of the memory.
        BundleStored: the compiler is not installed; contains the directory of the bundle.
    """
    try:
        return lowering.backend(lowered.target).compile(lowered)
    except OutOfMemory as error:
        raise with_largest_arrays(error, program) from None
    except CompilerMissing as error:
        path = cache.store_bundle(key, request, lowered.name, error.files)
        raise BundleStored(path, error) from None


def lower(program: ResolvedProgram | ExtractedGraph, name: str) -> Lowered:
    """Lower one graph for the program's target; an extracted graph is read from its file."""
    if isinstance(program, ExtractedGraph):
        return _lower_extracted(program)
    backend = lowering.backend(program.target)
    # Must precede building the model, which may use JAX devices.
    backend.compile_devices(program.target)
    graph = build_graph(program, name)
    if name == "train":  # the only graph that contains all arrays
        program.rules.check_patterns(graph.arrays())
    return backend.lower(graph, program.rules, program.mesh, program.target)


def _lower_extracted(extracted: ExtractedGraph) -> Lowered:
    from lowering.xla.imported_hlo import ImportedHlo, lower

    module = read_module(extracted.file)
    return lower(ImportedHlo("torch-xla", module, extracted.meshes), extracted.target)


def program_key(lowered: Lowered, request: CacheKey) -> CacheKey:
    """Return the program key: everything that determines the executable of a lowered program."""
    return CacheKey.of(
        graph=lowered.name,
        text=hashlib.sha256(lowered.text.encode()).hexdigest(),
        mesh=dict(lowered.plan.mesh.axes),  # axis names, used by the run's shardings
        inputs=lowered.facts["inputs"],  # paths and layouts, used by the loader
        outputs=lowered.facts["outputs"],
        options=lowered.options,
        # Names and lines of the model are in the record, but not in the text.
        **({DUMP: lowered.facts[DUMP]} if DUMP in lowered.facts else {}),
        record=RECORD_VERSION,
        target=request.part("target"),
        toolchain=request.part("toolchain"),
    )


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Redirect the output of this process and of its compiler to a file."""
    with path.open("ab", buffering=0) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
        yield
        sys.stdout.flush()
        sys.stderr.flush()
