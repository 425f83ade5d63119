"""Every family generates what its own code in PyTorch does, alone and among other sequences."""

import pytest
from generation_cases import IMPORTED, NATIVE
from generation_parity import check_parity

CUBE, STAGES = {"data": 2, "fsdp": 2, "tensor": 2}, {"stage": 2, "data": 4}
ON_MESHES = {
    "native, cube": (NATIVE["gemma 2"], True, CUBE),
    "native, stages": (NATIVE["llama 3"], True, STAGES),
    "imported, cube": (IMPORTED["mistral"], False, CUBE),
    "imported, stages": (IMPORTED["gemma 2"], False, STAGES),
}


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_model_generates_as_pytorch_does(name, tmp_path):
    check_parity(NATIVE[name], tmp_path, is_native=True)


@pytest.mark.parametrize("name", IMPORTED)
def test_an_imported_model_generates_as_pytorch_does(name, tmp_path):
    check_parity(IMPORTED[name], tmp_path, is_native=False)


@pytest.mark.parametrize("name", ON_MESHES)
def test_8_devices_generate_as_pytorch_does(name, tmp_path):
    case, is_native, mesh = ON_MESHES[name]
    check_parity(case, tmp_path, is_native=is_native, target="cpu:8", mesh=mesh)


@pytest.mark.parametrize(
    ("name", "devices"), [("gemma 2", 2), ("bloom", 1)], ids=["windows, soft caps", "ALiBi"]
)
def test_the_simulator_of_neuron_generates_as_pytorch_does(name, devices, tmp_path):
    mesh = {"tensor": devices}
    check_parity(NATIVE[name], tmp_path, is_native=True, target=f"neuron-sim:{devices}", mesh=mesh)
