"""The register of families: a sample of it passes, and its checks notice a wrong operation."""

from pathlib import Path

import jax
import pytest
import torch
from family import check_trace
from family_checks import training
from family_checks.meshes import check_fsdp
from family_checks.results import sample
from family_checks.states import Mismatch
from family_checks.tiny import VOCAB, tiny_config
from family_checks.training import check_training
from family_checks.weights import check_weights

from graphtrain.config.schema import TorchModel
from graphtrain.torch_frontend.bridge import Tensor, TraceEnvironment

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def family(name: str, folder: Path) -> TorchModel:
    (folder / "config.json").write_text(tiny_config(name))
    return TorchModel(hf=str(folder), vocab=VOCAB, dtype="float32", remat="none")


@pytest.mark.parametrize("name", sample(3))
def test_a_sample_of_families_passes_the_main_checks(name, tmp_path):
    model = family(name, tmp_path)
    for check in (check_trace, check_training, check_weights, check_fsdp):
        check(model, tmp_path)


def test_a_wrong_operation_fails_the_check(tmp_path, monkeypatch):
    def rsqrt(x: Tensor) -> Tensor:
        return Tensor(jax.lax.rsqrt(x.jax()) * 1.001, x._env)

    def register_operations(self, *args, **settings):
        original(self, *args, **settings)
        self.override_op_definition(torch.rsqrt, rsqrt)

    original = TraceEnvironment.__init__
    monkeypatch.setattr(TraceEnvironment, "__init__", register_operations)
    monkeypatch.setattr(training, "STEPS", 1)
    with pytest.raises(Mismatch, match=r"loss .* instead of|after 1 steps .* differs by"):
        check_training(family("llama", tmp_path), tmp_path)
