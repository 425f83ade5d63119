"""Problems of this machine: packages, directories and files that a command will need."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from graphtrain.api.checks.problem import Problem
from graphtrain.config.schema import Config, Program, TorchModel
from lowering.errors import LoweringError
from lowering.machine.extras import MissingExtra, is_installed, missing_extra
from lowering.machine.target import Target

_DETERMINISTIC = "--xla_gpu_deterministic_ops"


def model_problems(program: Program) -> Iterator[Problem]:
    """Yield the packages that a model of PyTorch needs and that are not installed."""
    if not isinstance(program.model, TorchModel):
        return
    from graphtrain.errors import ImportedModelError
    from graphtrain.torch_frontend.versions import check_versions, installed

    setting = "torch" if program.model.hf is None else "hf"
    try:
        check_versions(installed(), hf=setting == "hf")
    except (MissingExtra, ImportedModelError) as error:
        yield Problem("machine", str(error), (("program", "model", setting),))


def precision_problems(program: Program) -> Iterator[Problem]:
    """Yield that the package for products in fp8 and int8 is not installed."""
    if program.precision.matmul_dtype is not None and not is_installed("qwix"):
        error = missing_extra("qwix", f'program.precision.compute = "{program.precision.compute}"')
        yield Problem("machine", str(error), (("program", "precision", "compute"),))


def compiler_problems(program: Program) -> Iterator[Problem]:
    """Yield that the compiler for the target is not installed."""
    from lowering.machine.aot_devices import require_compiler

    try:
        require_compiler(Target.parse(program.target))
    except MissingExtra as error:
        yield Problem("compiler", f"program.target: {error}", (("program", "target"),))
    except LoweringError:  # an unknown target, which the checks of the program report
        return


def verification_problems(config: Config) -> Iterator[Problem]:
    """Yield that the programs of a machine would not repeat a step bit for bit."""
    if config.run.verify_every is None:
        return
    setting = (("run", "verify_every"),)
    try:
        target = Target.parse(config.program.target)
    except LoweringError:  # an unknown target, which the checks of the program report
        return
    if target.platform not in ("cpu", "cuda", "rocm", "tpu"):
        message = f"run.verify_every is not supported on {target}; remove it"
        yield Problem("program", message, setting)
    elif target.is_gpu and _DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        message = (
            f"run.verify_every repeats steps, and programs for {target} are not deterministic by "
            f"default; set XLA_FLAGS={_DETERMINISTIC}=true where you compile and run"
        )
        yield Problem("program", message, setting)
    if config.program.optimizer.offload_to_host:
        message = "run.verify_every is not supported with optimizer.offload_to_host; remove one"
        yield Problem("program", message, setting)


def run_problems(config: Config) -> Iterator[Problem]:
    """Yield problems of the directory of the run, and of the weights that it starts from."""
    directory, setting = config.run.directory, ("run", "directory")
    if reason := directory_problem(Path(directory)):
        yield Problem("machine", f'run.directory = "{directory}": {reason}', (setting,))
    local, setting = config.run.checkpoints.local, ("run", "checkpoints", "local")
    if local is not None and (reason := directory_problem(Path(local))):
        yield Problem("machine", f'run.checkpoints.local = "{local}": {reason}', (setting,))
    yield from _store_problems(config)
    for name in ("init_from", "init_adapter_from"):
        path = getattr(config.run, name)
        if path is not None and not Path(path).exists():
            message = f'run.{name} = "{path}": no such directory'
            yield Problem("machine", message, (("run", name),))


def _store_problems(config: Config) -> Iterator[Problem]:
    """Yield why copies of checkpoints, or of files of the run, could not be written."""
    upload = config.run.upload
    for path, url in (
        ("run.checkpoints.remote", config.run.checkpoints.remote),
        ("run.upload.remote", upload and upload.remote),
    ):
        if url is None:
            continue
        setting = tuple(path.split("."))
        if not is_installed("obstore"):
            yield Problem("machine", str(missing_extra("obstore", path)), (setting,))
        elif "://" not in url and (reason := directory_problem(Path(url).expanduser())):
            yield Problem("machine", f'{path} = "{url}": {reason}', (setting,))


def place_problems(config: Config) -> Iterator[Problem]:
    """Yield that checkpoints, or copies, would be in the directory of the run itself."""
    directory, checkpoints, upload = (
        config.run.directory,
        config.run.checkpoints,
        config.run.upload,
    )
    for path, place in (
        ("run.checkpoints.local", checkpoints.local),
        ("run.checkpoints.remote", checkpoints.remote),
        ("run.upload.remote", upload and upload.remote),
    ):
        if place is not None and "://" not in place and _is_inside(place, directory):
            message = (
                f'{path} = "{place}" is in run.directory = "{directory}", with which it would be '
                "lost; name a directory elsewhere"
            )
            yield Problem("machine", message, (tuple(path.split(".")),))


def _is_inside(place: str, directory: str) -> bool:
    """Return whether a path is that of a directory or of something in it, also through links."""
    inner, outer = Path(place).expanduser(), Path(directory)
    return any(
        Path(resolve(inner)).is_relative_to(resolve(outer))
        for resolve in (os.path.abspath, os.path.realpath)
    )


def output_problems(option: str, path: Path) -> Iterator[Problem]:
    """Yield that the file of an option cannot be written."""
    if reason := file_problem(path):
        yield Problem("machine", f"cannot write {path}: {reason}", location=option)


def page_problems() -> Iterator[Problem]:
    """Yield that the package for the HTML page of a plan is not installed."""
    if not is_installed("vl_convert"):
        error = missing_extra("vl_convert", "the HTML page")
        yield Problem("machine", str(error), location="--html")


def directory_problem(path: Path) -> str:
    """Return why files cannot be written into a directory, which need not exist; empty if not."""
    ancestor = path
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    if not ancestor.is_dir():
        return f"{ancestor} is a file; name another directory"
    try:
        with tempfile.TemporaryFile(dir=ancestor):  # access() says yes to root, also in /proc
            return ""
    except OSError as error:
        return f"{ancestor} cannot be written ({_words(error)}); name another directory"


def file_problem(path: Path) -> str:
    """Return why a file cannot be written; empty if it can."""
    if path.is_dir():
        return "it is a directory"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "permission denied"
    if not path.parent.exists():
        return f"{path.parent}: no such directory"
    if not path.parent.is_dir():
        return f"{path.parent} is not a directory"
    return directory_problem(path.parent).partition(";")[0]


def _words(error: OSError) -> str:
    """Return the reason of an error; file systems of the kernel say that a file does not exist."""
    if error.errno in (errno.ENOENT, errno.EOPNOTSUPP):
        return "its file system does not accept files"
    return (error.strerror or str(error)).lower()
