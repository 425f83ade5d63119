"""Check one family of transformers; prints one line of JSON for each check.

    python tests/register/family.py FAMILY FOLDER [CHECK ...]

FOLDER keeps the small configuration and its weights.
"""

from __future__ import annotations

import json
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from family_checks.generation import check_generate
from family_checks.meshes import check_expert, check_fsdp, check_stage, check_tensor
from family_checks.states import choose_optimization
from family_checks.tiny import VOCAB, tiny_config
from family_checks.training import check_training
from family_checks.weights import check_weights

from graphtrain.config.schema import TorchModel
from graphtrain.torch_frontend.open_module import open_model
from sharding_rules.errors import UserError


def check_trace(model: TorchModel, folder: Path) -> str:
    """Trace the module, and its initial values."""
    opened = open_model(model)
    jax.eval_shape(opened.initialize, jax.random.key(0))
    return opened.strict and "strict front end"


_CHECKS: dict[str, Callable[[TorchModel, Path], str]] = {
    "trace": check_trace,
    "training": check_training,
    "weights": check_weights,
    "fsdp": check_fsdp,
    "tensor": check_tensor,
    "expert": check_expert,
    "stage": check_stage,
    "generate": check_generate,
}


def main(family: str, folder: Path, checks: Sequence[str]) -> None:
    """Run the checks in order; a family that cannot be traced gets no others."""
    warnings.simplefilter("ignore")
    folder.mkdir(parents=True, exist_ok=True)
    choose_optimization(family)
    jax.devices()  # as many as the flags say; else the first target would decide
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        (folder / "config.json").write_text(tiny_config(family))
    except Exception as error:
        _say("trace", False, f"no small configuration: {_short(error)}")
        return
    model = TorchModel(hf=str(folder), vocab=VOCAB, dtype="float32", remat="none")
    for check in checks or list(_CHECKS):
        try:
            _say(check, True, _CHECKS[check](model, folder))
        except Exception as error:
            _say(check, False, _short(error), refused=isinstance(error, UserError))
            if check == "trace":
                return


def _say(check: str, passed: bool, words: str, *, refused: bool = False) -> None:
    line = {"check": check, "passed": passed, "words": words}
    print(json.dumps(line | ({"refused": True} if refused else {})), flush=True)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    # Lines of the model, without the place where transformers is installed.
    for part in text.split():
        if "/site-packages/" in part:
            text = text.replace(part, part.rpartition("/site-packages/")[2])
    return textwrap.shorten(text, 300, placeholder=" ...")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
