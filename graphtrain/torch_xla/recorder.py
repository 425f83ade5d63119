"""Run a torch-xla script without executing its graphs, and write each graph that it traces.

This file imports only torch-xla and the standard library: it runs in the environment of the script,
in which graphtrain is not installed, as `python recorder.py DIRECTORY SCRIPT [ARGS...]`.

Where the script would compile and run a graph, a fork of the process starts to do so, and is killed
as soon as XLA has dumped its input. Hash and HLO are therefore those of a real run. In the script's
own process all results are placeholder tensors without data. Only a script with sharded arrays
(SPMD) executes its steps, on virtual CPU devices: the compiler chooses the sharding of results,
which is part of the next graph. Tested with torch-xla 2.9.0.
"""

# torch-xla reads the environment when it is imported. It is not installed where this is linted.
# ruff: noqa: E402
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import argparse
import contextlib
import faulthandler
import gc
import glob
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

_DUMPS = tempfile.mkdtemp(prefix="graphtrain-extract-")  # XLA's dump of one graph
_SAVED = os.path.join(_DUMPS, "saved")  # torch-xla's dump of the same graph
os.environ["PJRT_DEVICE"] = "CPU"  # nothing is executed, so no other device is needed
os.environ["XLA_FLAGS"] = (  # read when torch-xla is imported
    f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={_DUMPS} --xla_dump_hlo_as_proto"
)
os.environ["XLA_SAVE_TENSORS_FILE"], os.environ["XLA_SAVE_TENSORS_FMT"] = _SAVED, "text"

import torch
import torch_xla
import torch_xla.core.xla_builder as xla_builder
import torch_xla.debug.metrics as metrics
import torch_xla.runtime
from torch_xla._internal import pjrt
from torch_xla.distributed.spmd import Mesh

FORMAT = 1
MANIFEST = "graphs.json"
STACK = "stack.txt"  # Python stack, written if torch-xla crashes
_TIMEOUT = 600  # timeout of lowering one graph, seconds
_PAUSE = 0.02  # polling interval, seconds
_DEVICE_TO_HOST_OPERATORS = ("_to_cpu", "_to_copy", "_copy_from", "_local_scalar_dense")
_C = torch_xla._XLAC
_get_cpu_tensors = _C._xla_get_cpu_tensors
_NOT_SCRIPT = (os.path.dirname(torch.__file__), os.path.dirname(torch_xla.__file__), __file__)


class _StepsDone(BaseException):
    """Signal that the requested number of steps is reached."""


class Unsupported(BaseException):
    """The script does something unsupported; a BaseException, which scripts rarely catch."""


class Recorder:
    """Recorder of a script's graphs, in the order of their first use."""

    def __init__(self, directory: str, steps: int, reads: str) -> None:
        """Record to a directory for a number of steps; reads is "refused" or "zeros"."""
        self.directory, self.limit, self.reads = directory, steps, reads
        self.graphs: dict[str, dict[str, Any]] = {}
        self.meshes: list[Mesh] = []
        self.warnings: list[str] = []
        self.step = 0
        self._tied: list[tuple[weakref.ref, list[list[str]]]] = []

    def end_step(self, sync: Callable[[], Any]) -> None:
        """End a step: record the graph of all pending tensors, which sync would compute."""
        pending = [tensor for tensor in _tensors() if _is_pending(tensor)]
        if not pending:
            return
        self._check_ties()
        self.record_sync(pending, sync)
        self.step += 1
        if self.step >= self.limit:
            raise _StepsDone

    def record_sync(self, tensors: Iterable[Any], sync: Callable[[], Any]) -> None:
        """Record the graph of those tensors that are pending, which sync would compute."""
        pending = [tensor for tensor in tensors if _is_pending(tensor)]
        if not pending:
            return
        self._record(sync)
        if torch_xla.runtime.is_spmd():
            sync()
        else:
            _replace_with_placeholders(pending)

    def read_value(self, tensor: Any) -> Any:
        """Return the value of a tensor that the script reads: zeros, or real under SPMD.

        Raises:
            Unsupported: extraction computes no values, and zeros are not allowed.
        """
        is_spmd = torch_xla.runtime.is_spmd()
        if not is_spmd and self.reads != "zeros":
            raise Unsupported(
                f"{_line_of_script()} reads a value from the device (as .item(), print, .cpu(), if "
                "and torch.save do), but extraction computes no values; remove the read, move it "
                "after the extracted steps, or set --reads zeros"
            )

        def get() -> Any:
            return _get_cpu_tensors([tensor])[0]

        if _is_pending(tensor):  # it stays pending: torch-xla computes it again in the step
            self._record(get)
        return get() if is_spmd else torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _record(self, sync: Callable[[], Any]) -> None:
        start_time = time.perf_counter()
        digest, hlo = _lower_in_fork(sync, self.graphs)
        if digest not in self.graphs:
            shutil.copyfile(hlo, os.path.join(self.directory, f"{digest}.hlo.pb"))
            seconds = round(time.perf_counter() - start_time, 3)
            self.graphs[digest] = {"hash": digest, "steps": [], "seconds": seconds}
            print(f"{digest}: step {self.step}", file=sys.stderr, flush=True)
        self.graphs[digest]["steps"].append(self.step)

    def remember_ties(self, module: Any) -> None:
        """Record the names of tied weights, before the module is moved to the device."""
        names: dict[int, list[str]] = {}
        for name, weight in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(weight), []).append(name)
        if tied := [group for group in names.values() if len(group) > 1]:
            self._tied.append((weakref.ref(module), tied))

    def _check_ties(self) -> None:
        for reference, tied in self._tied:
            module = reference()
            weights = dict(module.named_parameters(remove_duplicate=False)) if module else {}
            for group in tied:
                if len({id(weights.get(name)) for name in group}) > 1:
                    self._warn(
                        f"{' and '.join(group)} were tied before .to(device), but are now trained "
                        "as separate arrays; tie them after .to(device)"
                    )
        self._tied.clear()

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def as_json(self, script: str, arguments: list[str]) -> dict[str, Any]:
        """Return the contents of the manifest."""
        spmd = torch_xla.runtime.is_spmd()
        return {
            "format": FORMAT,
            "script": script,
            "arguments": arguments,
            "versions": {"torch": torch.__version__, "torch_xla": torch_xla.__version__},
            "devices": torch_xla.runtime.global_runtime_device_count() if spmd else 1,
            "meshes": _describe_meshes(self.meshes) if spmd else [],
            "steps": self.step,
            "warnings": self.warnings,
            "graphs": list(self.graphs.values()),
        }


def _describe_meshes(meshes: list[Mesh]) -> list[dict[str, Any]]:
    mesh_records = []
    for mesh in meshes:
        names = mesh.axis_names or [f"axis{index}" for index in range(len(mesh.mesh_shape))]
        mesh_record = {
            "axes": dict(zip(names, map(int, mesh.mesh_shape), strict=True)),
            "devices": [int(device) for device in mesh.device_ids.flatten()],
        }
        if mesh_record not in mesh_records:
            mesh_records.append(mesh_record)
    return mesh_records


def _tensors() -> list[Any]:
    """Return all device tensors that are reachable from Python, in order of creation."""
    tensors = [candidate for candidate in gc.get_objects() if _is_script_tensor(candidate)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    on_device = [tensor for tensor in tensors if tensor.device.type == "xla"]
    return sorted(on_device, key=_C._xla_get_tensor_id)


def _is_script_tensor(candidate: Any) -> bool:
    """Return true for tensors of the script.

    Fake tensors, wrappers of sharded tensors and operands inside an operator are not.
    """
    kind = type(candidate)
    return (
        issubclass(kind, torch.Tensor)
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and torch._is_functional_tensor(candidate)
    )


def _is_pending(tensor: Any) -> bool:
    return _C._check_tensor_need_materialization([tensor])[0]


def _replace_with_placeholders(pending: list[Any]) -> None:
    """Replace tensors whose graph was recorded by placeholders without data."""
    placeholders = {_C._xla_get_tensor_id(tensor): _placeholder(tensor) for tensor in pending}
    for tensor in _tensors():
        placeholder = placeholders.get(_C._xla_get_tensor_id(tensor))
        if placeholder is not None:
            tensor.data = placeholder


def _placeholder(tensor: Any) -> Any:
    return xla_builder.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)


def _lower_in_fork(sync: Callable[[], Any], known_hashes: Iterable[str]) -> tuple[str, str]:
    """Return the hash of the graph that sync would compute, and its HLO file if it is new."""
    for file in os.listdir(_DUMPS):
        os.remove(os.path.join(_DUMPS, file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads, which the fork does not need
        process = os.fork()
    if process == 0:
        _start_in_fork(sync)
    try:
        return _wait_for_dump(process, known_hashes)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _start_in_fork(sync: Callable[[], Any]) -> NoReturn:
    """Start to compute, in the fork, which is killed before it compiles."""
    try:
        sync()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _wait_for_dump(process: int, known_hashes: Iterable[str]) -> tuple[str, str]:
    """Wait until the fork has dumped its graph; return the hash and the HLO file."""
    deadline = time.monotonic() + _TIMEOUT
    digest = ""
    while time.monotonic() < deadline:
        digest = digest or _saved_hash()
        hlo_files = glob.glob(os.path.join(_DUMPS, "*.before_optimizations.hlo.pb"))
        is_complete = glob.glob(os.path.join(_DUMPS, "*.debug_options"))  # XLA writes it last
        if digest in known_hashes:
            return digest, ""
        if digest and hlo_files and is_complete:
            return digest, hlo_files[0]
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            raise Unsupported("torch-xla could not lower a graph; see its output above")
        time.sleep(_PAUSE)
    raise Unsupported(f"torch-xla did not lower a graph within {_TIMEOUT} s; see its output above")


def _saved_hash() -> str:
    """Return torch-xla's hash of the graph once its dump is complete, else ""."""
    for file in glob.glob(f"{_SAVED}*"):
        with open(file) as saved:
            text = saved.read()
        if match := re.search(r"^Graph Hash: (\w+)\s+## END_GRAPH", text, re.MULTILINE):
            return match[1]
    return ""


def install(recorder: Recorder) -> None:
    """Patch torch-xla, so that the recorder replaces compiling and running graphs."""
    step_marker = _C._xla_step_marker
    sync_live, sync_some = _C._xla_sync_live_tensors, _C._xla_sync_multi

    def mark_step(*arguments: Any, **kwargs: Any) -> None:
        recorder.end_step(lambda: step_marker(*arguments, **kwargs))
        is_spmd, compilations = torch_xla.runtime.is_spmd(), _compilations()
        step_marker(*arguments, **kwargs)  # nothing is pending; it advances the random seed
        if not is_spmd and _compilations() != compilations:
            raise Unsupported(
                "a step ended with a pending tensor that is not reachable from Python, for example "
                f"one saved for a later backward pass ({_line_of_script()}); end the step after "
                "the backward pass"
            )

    _C._xla_step_marker = mark_step
    _C._xla_sync_live_tensors = lambda *arguments, **kwargs: recorder.record_sync(
        _tensors(), lambda: sync_live(*arguments, **kwargs)
    )
    _C._xla_sync_multi = lambda tensors, *arguments, **kwargs: recorder.record_sync(
        tensors, lambda: sync_some(tensors, *arguments, **kwargs)
    )
    for name in ("_run_cached_graph", "_xla_warm_up_cache"):
        setattr(_C, name, _refuse_dynamo)
    pjrt.run_multiprocess = _in_this_process
    _watch_reads(recorder)
    _watch_modules(recorder)


def _compilations() -> int:
    return metrics.counter_value("UncachedCompile") or 0


def _watch_modules(recorder: Recorder) -> None:
    """Patch Module.to and Mesh, to record tied weights and meshes."""
    original_to, original_init = torch.nn.Module.to, Mesh.__init__

    def to(module: Any, *arguments: Any, **kwargs: Any) -> Any:
        recorder.remember_ties(module)
        return original_to(module, *arguments, **kwargs)

    def init_mesh(mesh: Mesh, *arguments: Any, **kwargs: Any) -> None:
        original_init(mesh, *arguments, **kwargs)
        recorder.meshes.append(mesh)

    torch.nn.Module.to = to
    Mesh.__init__ = init_mesh


def _watch_reads(recorder: Recorder) -> None:
    """Replace the four PyTorch operators that copy values from the device to the host."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about replaced operators
        for name in _DEVICE_TO_HOST_OPERATORS:
            library.impl(name, _read_operator(name, recorder), "XLA", with_keyset=True)
    install.library = library  # pyright: ignore[reportFunctionMemberAccess]  (keeps it alive)

    def get(tensors: list[Any]) -> list[Any]:
        return [
            recorder.read_value(tensor) if _has_no_value(tensor) else _get_cpu_tensors([tensor])[0]
            for tensor in tensors
        ]

    _C._xla_get_cpu_tensors = get


def _read_operator(name: str, recorder: Recorder) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(f"aten::{name}", "XLA")

    def read(keys: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "_to_cpu":
            return (
                [
                    recorder.read_value(tensor) if _has_no_value(tensor) else tensor
                    for tensor in first
                ]
                if any(map(_has_no_value, first))
                else kernel.call_boxed(keys, first)
            )
        to_host = name == "_local_scalar_dense" or (
            args[0].device.type == "cpu"
            if name == "_copy_from"
            else torch.device(kwargs.get("device") or first.device).type == "cpu"
        )
        if not (to_host and first.device.type == "xla" and _has_no_value(first)):
            return kernel.call_boxed(keys, first, *args, **kwargs)
        value = recorder.read_value(first)
        if name == "_local_scalar_dense":
            return value.item()
        if name == "_copy_from":
            return args[0].copy_(value)
        return value.to(kwargs.get("dtype") or value.dtype)

    return read


def _has_no_value(tensor: Any) -> bool:
    return tensor.device.type == "xla" and (
        _is_pending(tensor) or _C._is_placecholder(tensor)  # torch-xla's spelling
    )


def _refuse_dynamo(*arguments: Any) -> NoReturn:
    raise Unsupported(
        f"{_line_of_script()} calls a function compiled by torch.compile, which extraction does "
        "not support; extract without torch.compile"
    )


def _in_this_process(start: Callable[[], Any], *arguments: Any, **kwargs: Any) -> dict[int, Any]:
    """Run torch_xla.launch or xmp.spawn in this process, as they do for one device."""
    if int(os.environ.get("CPU_NUM_DEVICES", "1")) > 1:
        raise Unsupported(
            f"{_line_of_script()} starts a process or thread for each device; extraction supports "
            "one device (unset CPU_NUM_DEVICES), or several by SPMD (torch_xla.runtime.use_spmd)"
        )
    return {0: pjrt._run_singleprocess(start, *arguments)}


def _line_of_script() -> str:
    """Return the innermost line of the script's own code."""
    for frame in reversed(traceback.extract_stack()):
        if _is_of_script(frame.filename):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "the script"


def _is_of_script(file: str) -> bool:
    return not file.startswith((*_NOT_SCRIPT, "<")) and f"{os.sep}site-packages{os.sep}" not in file


def run(script: str, arguments: list[str]) -> dict[str, Any] | None:
    """Run a script as Python does; return None, or the error that stopped it."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    try:
        with open(script, "rb") as file:
            code = compile(file.read(), script, "exec")
        exec(code, main.__dict__)
    except _StepsDone:
        return None
    except Unsupported as error:
        return {"kind": "refused", "message": str(error)}
    except SystemExit as error:
        exit_code = error.code
        return (
            None
            if exit_code in (None, 0)
            else {"kind": "raised", "message": f"it exited with {exit_code}"}
        )
    except BaseException as error:
        return _describe_exception(error)
    return None


def _describe_exception(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    script_frames = [frame for frame in frames if _is_of_script(frame.filename)]
    print("".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)
    location = (
        f"{script_frames[-1].filename}:{script_frames[-1].lineno} ({script_frames[-1].line}): "
        if script_frames
        else ""
    )
    return {"kind": "raised", "message": f"{location}{type(error).__name__}: {error}"}


def _write(path: str, data: bytes) -> None:
    with open(f"{path}.part", "wb") as file:
        file.write(data)
    os.replace(f"{path}.part", path)


def main() -> None:
    """Extract, write the manifest, and exit without waiting for the script's threads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="maximum number of steps (10)")
    parser.add_argument("--reads", choices=("refused", "zeros"), default="refused")
    parser.add_argument("directory")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    os.makedirs(options.directory, exist_ok=True)
    directory = os.path.abspath(options.directory)
    stack = open(os.path.join(directory, STACK), "w")  # noqa: SIM115  (open until the process exits)
    faulthandler.enable(stack)
    recorder = Recorder(directory, options.steps, options.reads)
    install(recorder)
    error = run(options.script, options.arguments)
    manifest = recorder.as_json(options.script, options.arguments) | {"error": error}
    _write(os.path.join(directory, MANIFEST), json.dumps(manifest, indent=1).encode() + b"\n")
    shutil.rmtree(_DUMPS, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if error else 0)


if __name__ == "__main__":
    main()
