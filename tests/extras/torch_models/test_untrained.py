"""Parameters that get no gradient: neither updated nor decayed, as in PyTorch."""

from pathlib import Path

import pytest

from graphtrain.config.schema import TorchModel
from graphtrain.torch_frontend.describe import describe
from graphtrain.torch_frontend.open_module import open_model

MODULES = Path(__file__).with_name("modules.py")


@pytest.mark.parametrize("front_end", ["trace", "strict"])
def test_what_is_not_read_or_only_chooses_is_constant_and_said(front_end: str, tmp_path: Path):
    model = TorchModel(
        torch=f"{MODULES}:HashRouted", vocab=16, dtype="float32", remat="none", front_end=front_end
    )
    roles = {path: spec.role for path, spec in open_model(model).specs().items()}
    constant = {path for path, role in roles.items() if role == "constant"}
    assert constant == {"chooser/weight", "unused/weight", "unused/bias"}
    assert "chooser/weight and 2 others: get no gradient, so they stay as they are" in describe(
        model, tmp_path, None
    )
