"""Runs a torch-xla script that computes nothing, and writes down the graphs that it traces.

This file imports torch-xla and the standard library alone: it runs in the environment of the
script, in which graphtrain is not installed, as `python recorder.py DIRECTORY SCRIPT [ARGS...]`.

Where the script would have a graph compiled and run, a copy of the process (os.fork) begins to, and
is ended as soon as XLA has written down what it is given: so hash and HLO are those of a real run.
In the script's own process tensors without data take the place of all results. Only a script that
splits arrays (SPMD) computes its steps, on virtual devices of the CPU: how a result is split is
decided by the compiler, and part of the next graph. Tested with torch-xla 2.9.0.
"""

# torch-xla reads its environment when it is imported, and is not where this is checked.
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

_DUMPS = tempfile.mkdtemp(prefix="graphtrain-extract-")  # what XLA writes of one graph
_SAVED = os.path.join(_DUMPS, "saved")  # what torch-xla writes of it
os.environ["PJRT_DEVICE"] = "CPU"  # devices of others are not here, and nothing is computed
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
STACK = "stack.txt"  # of Python, where torch-xla ends the process
_LONGEST = 600  # seconds that lowering one graph may take
_PAUSE = 0.02  # seconds
_READERS = ("_to_cpu", "_to_copy", "_copy_from", "_local_scalar_dense")
_C = torch_xla._XLAC
_get_cpu_tensors = _C._xla_get_cpu_tensors
_own = (os.path.dirname(torch.__file__), os.path.dirname(torch_xla.__file__), __file__)


class _Enough(BaseException):
    """As many graphs were taken as were asked for."""


class Refused(BaseException):
    """The script does what extraction cannot; no handler of its own should catch it."""


class Recorder:
    """The graphs of a script, in the order in which it first needs each."""

    def __init__(self, directory: str, steps: int, reads: str) -> None:
        self.directory, self.limit, self.reads = directory, steps, reads
        self.graphs: dict[str, dict[str, Any]] = {}
        self.meshes: list[Mesh] = []
        self.warnings: list[str] = []
        self.step = 0
        self._tied: list[tuple[weakref.ref, list[list[str]]]] = []

    def mark(self, sync: Callable[[], Any]) -> None:
        """End a step: everything that waits to be computed is one graph, which sync computes."""
        pending = [tensor for tensor in _tensors() if _is_pending(tensor)]
        if not pending:
            return
        self._check_ties()
        self.take(pending, sync)
        self.step += 1
        if self.step >= self.limit:
            raise _Enough

    def take(self, tensors: Iterable[Any], sync: Callable[[], Any]) -> None:
        """Some tensors are computed, by sync: they are a graph."""
        pending = [tensor for tensor in tensors if _is_pending(tensor)]
        if not pending:
            return
        self._record(sync)
        if torch_xla.runtime.is_spmd():
            sync()
        else:
            _replace(pending)

    def read(self, tensor: Any) -> Any:
        """A value is needed in Python, which extraction does not compute."""
        is_spmd = torch_xla.runtime.is_spmd()
        if not is_spmd and self.reads != "zeros":
            raise Refused(
                f"{_line_of_script()} reads a value of the device (as .item(), print, .cpu(), if "
                "and torch.save do), and extraction computes none; take it out, do so after the "
                "steps that are extracted, or let it read zeros: --reads zeros"
            )

        def get() -> Any:
            return _get_cpu_tensors([tensor])[0]

        if _is_pending(tensor):  # and stays so: what is computed for a reader, a step computes anew
            self._record(get)
        return get() if is_spmd else torch.zeros(tensor.shape, dtype=tensor.dtype)

    def _record(self, sync: Callable[[], Any]) -> None:
        began = time.perf_counter()
        digest, hlo = _lowered(sync, self.graphs)
        if digest not in self.graphs:
            shutil.copyfile(hlo, os.path.join(self.directory, f"{digest}.hlo.pb"))
            seconds = round(time.perf_counter() - began, 3)
            self.graphs[digest] = {"hash": digest, "steps": [], "seconds": seconds}
            print(f"{digest}: step {self.step}", file=sys.stderr, flush=True)
        self.graphs[digest]["steps"].append(self.step)

    def remember_ties(self, module: Any) -> None:
        """Names of weights that are one array, before the module goes to the device."""
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
                        f"{' and '.join(group)} were one array before .to(device), and are trained "
                        "as two since: tie them again after it"
                    )
        self._tied.clear()

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def as_json(self, script: str, arguments: list[str]) -> dict[str, Any]:
        """What stands in the manifest."""
        spmd = torch_xla.runtime.is_spmd()
        return {
            "format": FORMAT,
            "script": script,
            "arguments": arguments,
            "versions": {"torch": torch.__version__, "torch_xla": torch_xla.__version__},
            "devices": torch_xla.runtime.global_runtime_device_count() if spmd else 1,
            "meshes": _described(self.meshes) if spmd else [],
            "steps": self.step,
            "warnings": self.warnings,
            "graphs": list(self.graphs.values()),
        }


def _described(meshes: list[Mesh]) -> list[dict[str, Any]]:
    found = []
    for mesh in meshes:
        names = mesh.axis_names or [f"axis{index}" for index in range(len(mesh.mesh_shape))]
        one = {
            "axes": dict(zip(names, map(int, mesh.mesh_shape), strict=True)),
            "devices": [int(device) for device in mesh.device_ids.flatten()],
        }
        if one not in found:
            found.append(one)
    return found


def _tensors() -> list[Any]:
    """Every tensor on the device that Python reaches, in the order in which they were made."""
    found = [each for each in gc.get_objects() if _is_plain(each)]
    found += [each.grad for each in found if each.is_leaf and each.grad is not None]
    on_device = [each for each in found if each.device.type == "xla"]
    return sorted(on_device, key=_C._xla_get_tensor_id)


def _is_plain(each: Any) -> bool:
    """Whether it is a tensor of the script: not a fake, nor what wraps one that is split, nor what
    an operator is given."""
    kind = type(each)
    return (
        issubclass(kind, torch.Tensor)
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and torch._is_functional_tensor(each)
    )


def _is_pending(tensor: Any) -> bool:
    return _C._check_tensor_need_materialization([tensor])[0]


def _replace(pending: list[Any]) -> None:
    """Put a tensor without data in the place of every one that has now been computed."""
    replaced = {_C._xla_get_tensor_id(tensor): _without_data(tensor) for tensor in pending}
    for tensor in _tensors():
        made = replaced.get(_C._xla_get_tensor_id(tensor))
        if made is not None:
            tensor.data = made


def _without_data(tensor: Any) -> Any:
    return xla_builder.create_placeholder_tensor(tuple(tensor.shape), tensor.dtype)


def _lowered(sync: Callable[[], Any], known: Iterable[str]) -> tuple[str, str]:
    """Hash of the graph that sync would compute, and the file of its HLO if it is not known."""
    for file in os.listdir(_DUMPS):
        os.remove(os.path.join(_DUMPS, file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads, which the copy does not need
        process = os.fork()
    if process == 0:
        _begin(sync)
    try:
        return _awaited(process, known)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def _begin(sync: Callable[[], Any]) -> NoReturn:
    """Compute in a copy of the process, which does not live to compile."""
    try:
        sync()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _awaited(process: int, known: Iterable[str]) -> tuple[str, str]:
    deadline = time.monotonic() + _LONGEST
    digest = ""
    while time.monotonic() < deadline:
        digest = digest or _saved_hash()
        written = glob.glob(os.path.join(_DUMPS, "*.before_optimizations.hlo.pb"))
        is_whole = glob.glob(os.path.join(_DUMPS, "*.debug_options"))  # which XLA writes after it
        if digest in known:
            return digest, ""
        if digest and written and is_whole:
            return digest, written[0]
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            raise Refused("torch-xla could not lower a graph; its messages are above")
        time.sleep(_PAUSE)
    raise Refused(f"torch-xla did not lower a graph within {_LONGEST} s; its messages are above")


def _saved_hash() -> str:
    """What torch-xla calls the graph, once it has written down all of it."""
    for file in glob.glob(f"{_SAVED}*"):
        with open(file) as saved:
            text = saved.read()
        if found := re.search(r"^Graph Hash: (\w+)\s+## END_GRAPH", text, re.MULTILINE):
            return found[1]
    return ""


def install(recorder: Recorder) -> None:
    """Put the recorder in the place of what compiles and runs graphs."""
    step_marker = _C._xla_step_marker
    sync_live, sync_some = _C._xla_sync_live_tensors, _C._xla_sync_multi

    def mark(*arguments: Any, **named: Any) -> None:
        recorder.mark(lambda: step_marker(*arguments, **named))
        is_spmd, before = torch_xla.runtime.is_spmd(), _compilations()
        step_marker(*arguments, **named)  # nothing waits any more; it begins new random numbers
        if not is_spmd and _compilations() != before:
            raise Refused(
                "a value that Python does not reach had to be computed at the end of a step, as "
                f"what a backward pass that is still to come has saved ({_line_of_script()}); end "
                "the step after the backward pass"
            )

    _C._xla_step_marker = mark
    _C._xla_sync_live_tensors = lambda *arguments, **named: recorder.take(
        _tensors(), lambda: sync_live(*arguments, **named)
    )
    _C._xla_sync_multi = lambda tensors, *arguments, **named: recorder.take(
        tensors, lambda: sync_some(tensors, *arguments, **named)
    )
    for name in ("_run_cached_graph", "_xla_warm_up_cache"):
        setattr(_C, name, _refuse_dynamo)
    pjrt.run_multiprocess = _in_this_process
    _watch_reads(recorder)
    _watch_modules(recorder)


def _compilations() -> int:
    return metrics.counter_value("UncachedCompile") or 0


def _watch_modules(recorder: Recorder) -> None:
    move, begin = torch.nn.Module.to, Mesh.__init__

    def to(module: Any, *arguments: Any, **named: Any) -> Any:
        recorder.remember_ties(module)
        return move(module, *arguments, **named)

    def begin_mesh(mesh: Mesh, *arguments: Any, **named: Any) -> None:
        begin(mesh, *arguments, **named)
        recorder.meshes.append(mesh)

    torch.nn.Module.to = to
    Mesh.__init__ = begin_mesh


def _watch_reads(recorder: Recorder) -> None:
    """Every way from the device to the host is one of four operators of PyTorch's."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that operators are replaced, as they are
        for name in _READERS:
            library.impl(name, _reader(name, recorder), "XLA", with_keyset=True)
    install.library = library  # pyright: ignore[reportFunctionMemberAccess]  (it lasts as this does)

    def get(tensors: list[Any]) -> list[Any]:
        return [
            recorder.read(each) if _has_no_value(each) else _get_cpu_tensors([each])[0]
            for each in tensors
        ]

    _C._xla_get_cpu_tensors = get


def _reader(name: str, recorder: Recorder) -> Callable[..., Any]:
    kernel = torch.library.get_kernel(f"aten::{name}", "XLA")

    def read(keys: Any, first: Any, *others: Any, **named: Any) -> Any:
        if name == "_to_cpu":
            return (
                [recorder.read(each) if _has_no_value(each) else each for each in first]
                if any(map(_has_no_value, first))
                else kernel.call_boxed(keys, first)
            )
        to_host = name == "_local_scalar_dense" or (
            others[0].device.type == "cpu"
            if name == "_copy_from"
            else torch.device(named.get("device") or first.device).type == "cpu"
        )
        if not (to_host and first.device.type == "xla" and _has_no_value(first)):
            return kernel.call_boxed(keys, first, *others, **named)
        value = recorder.read(first)
        if name == "_local_scalar_dense":
            return value.item()
        if name == "_copy_from":
            return others[0].copy_(value)
        return value.to(named.get("dtype") or value.dtype)

    return read


def _has_no_value(tensor: Any) -> bool:
    return tensor.device.type == "xla" and (
        _is_pending(tensor) or _C._is_placecholder(tensor)  # spelt so by torch-xla
    )


def _refuse_dynamo(*arguments: Any) -> NoReturn:
    raise Refused(
        f"{_line_of_script()} calls what torch.compile has made, which compiles by itself; "
        "extract without torch.compile"
    )


def _in_this_process(start: Callable[[], Any], *arguments: Any, **named: Any) -> dict[int, Any]:
    """What torch_xla.launch and xmp.spawn do where there is one device."""
    if int(os.environ.get("CPU_NUM_DEVICES", "1")) > 1:
        raise Refused(
            f"{_line_of_script()} starts a process or thread for each device; extraction takes one "
            "device (without CPU_NUM_DEVICES), or several by SPMD (torch_xla.runtime.use_spmd)"
        )
    return {0: pjrt._run_singleprocess(start, *arguments)}


def _line_of_script() -> str:
    """The innermost line that is neither PyTorch's nor ours."""
    for frame in reversed(traceback.extract_stack()):
        if _is_of_script(frame.filename):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "the script"


def _is_of_script(file: str) -> bool:
    return not file.startswith((*_own, "<")) and f"{os.sep}site-packages{os.sep}" not in file


def run(script: str, arguments: list[str]) -> dict[str, Any] | None:
    """Run a script as Python does; what went wrong, if something did."""
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    try:
        with open(script, "rb") as file:
            code = compile(file.read(), script, "exec")
        exec(code, main.__dict__)
    except _Enough:
        return None
    except Refused as error:
        return {"kind": "refused", "message": str(error)}
    except SystemExit as error:
        said = error.code
        return None if said in (None, 0) else {"kind": "raised", "message": f"it exits with {said}"}
    except BaseException as error:
        return _raised(error)
    return None


def _raised(error: BaseException) -> dict[str, Any]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_of_script(frame.filename)]
    print("".join(traceback.format_exception(error)), end="", file=sys.stderr, flush=True)
    where = f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line}): " if own else ""
    return {"kind": "raised", "message": f"{where}{type(error).__name__}: {error}"}


def _write(path: str, data: bytes) -> None:
    with open(f"{path}.part", "wb") as file:
        file.write(data)
    os.replace(f"{path}.part", path)


def main() -> None:
    """Extract, write the manifest, and leave without waiting for threads of the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="graphs that end a step, at most")
    parser.add_argument("--reads", choices=("refused", "zeros"), default="refused")
    parser.add_argument("directory")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    os.makedirs(given.directory, exist_ok=True)
    directory = os.path.abspath(given.directory)
    stack = open(os.path.join(directory, STACK), "w")  # noqa: SIM115  (as long as the process)
    faulthandler.enable(stack)
    recorder = Recorder(directory, given.steps, given.reads)
    install(recorder)
    error = run(given.script, given.arguments)
    found = recorder.as_json(given.script, given.arguments) | {"error": error}
    _write(os.path.join(directory, MANIFEST), json.dumps(found, indent=1).encode() + b"\n")
    shutil.rmtree(_DUMPS, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if error else 0)


if __name__ == "__main__":
    main()
